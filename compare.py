"""Which recipe is better, and how sure is it? Trains recipes with the same seeds and compares them.

python compare.py --base "--preset quickstart" --arm "adamw: --optimizer adamw" \\
    --sweep learning_rate=4e-3,8e-3,1.6e-2 --seeds 4
python compare.py --base "--preset quickstart" --arm "mine: @../my-copy --n-head 4"

An arm has the base's flags and its own. @DIRECTORY trains it with another copy of this repository.
Runs of one seed read the same data in the same order and, if their architecture is the same, start
from the same weights. So compare.py judges the difference between two runs of one seed.
Arms with --dtype auto share the precision that the first of their runs picks.
To continue after an interruption, repeat the command. OUT receives the runs, compare.md,
compare.json, compare.png, and the changes of each copy as NAME.diff.
"""

import difflib
import hashlib
import json
import math
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from tyro.conf import UseAppendAction

from support.common import (
    UsageError,
    UserError,
    hash_file,
    parse_flags,
    run_script,
    say,
    without,
    write_whole,
    writing,
)
from support.log import read_run
from support.plots import GREY, STYLES, label_lines, label_x, name_text, new_figure, save_picture
from support.token_files import find_shards, identify
from support.tokenizer import tokenizer_of_data

# Flags in front of every arm's own: a comparison needs no other evaluations
QUIET = """--hellaswag-every=0 --sample-every=0 --checkpoint-every=0 --checkpoint-minutes=10
    --keep-checkpoints=1"""
OURS = ("--seed", "--log-dir", "--log_dir", "--resume", "--overwrite")
NO_EFFECT = ("preset", "log_dir", "data_dir", "resume", "overwrite")  # on what is computed
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's t for 95%, by degrees of freedom


@dataclass
class CompareConfig:
    """Trains every arm with the same seeds, one run after the other, and compares them."""

    base: str = ""  # flags of train_gpt2.py; begin with @DIRECTORY to use another copy
    arm: UseAppendAction[tuple[str, ...]] = ()  # "name: flags", added to base's; repeat for more
    sweep: str = ""  # a setting to tune for every arm, such as learning_rate=4e-3,8e-3
    seeds: int = 4  # number of seeds; with --sweep, the first one tunes and the others judge
    out: Path = Path("log/compare")  # directory of the runs and the report


@dataclass
class Arm:
    """A recipe, and what becomes of it."""

    name: str
    copy: Path  # the repository that trains it
    flags: list[str]
    recipe: dict[str, Any]  # what decides its losses: settings, data, code
    data_dir: str = ""
    diff: str = ""  # what `patch -p1` needs to make its code of the base's
    tried: list[tuple] = field(default_factory=list)  # by the sweep: value, loss or None
    tuned: dict = field(default_factory=dict)  # the sweep's setting and the best of them
    runs: list[dict] = field(default_factory=list)  # their outcomes, one for each judging seed
    against: dict = field(default_factory=dict)  # the comparison with the base


# -- the command line


def read_arms(config: CompareConfig) -> list[Arm]:
    """The base, then the other arms, which have its flags and their own."""
    base = read_arm("base", config.base, QUIET.split())
    arms = [base]
    for text in config.arm:
        name, _, flags = text.strip().partition(":")
        if not re.fullmatch(r"\w[\w.+-]*", name) or name in [arm.name for arm in arms]:
            raise UserError(f"--arm {text!r}: expected 'name: flags', each name one word and new")
        arm = read_arm(name, flags, base.flags)
        if any(arm.recipe[key] != base.recipe[key] for key in ("val_tokens", "data")):
            refuse_other_text(text, arm, base)
        arm.diff = compare_code(read_code(base.copy), read_code(arm.copy))
        arms.append(arm)
    if len(arms) == 1:
        raise UserError('nothing to compare with the base: add --arm "name: flags"')
    return arms


def refuse_other_text(text: str, arm: Arm, base: Arm) -> None:
    """Raises UserError unless both validate on all of the same text, whatever its tokens."""
    arms = (arm, base)
    hashes, lengths = zip(*(held_out_text(a.data_dir) for a in arms), strict=True)
    is_part = False  # of the sequences of a split
    for a, length in zip(arms, lengths, strict=True):
        T = a.recipe["sequence_length"]
        is_part |= a.recipe["val_tokens"] // T < (length - 1) // T
    if hashes[0] != hashes[1] or is_part:
        raise UserError(
            f"--arm {text!r}: arms with other data or val_tokens must hold out the same text, as "
            "fineweb.py --vocab-size and --tokenizer do, and validate on all of it: "
            f"--val-tokens {max(lengths)} in --base"
        )


@cache  # the base's is asked for with each arm
def held_out_text(data_dir: str) -> tuple[str, int]:
    """The SHA-256 of the text for validation, and its number of tokens."""
    decode = tokenizer_of_data(data_dir).encoding.decode_bytes
    sha256 = hashlib.sha256()
    shards = find_shards(Path(data_dir), "val")
    for shard in shards:
        for tokens in shard.read_all():
            sha256.update(decode(tokens.tolist()))
    return sha256.hexdigest(), sum(shard.num_tokens for shard in shards)


ASK = """
import dataclasses, json, sys
sys.argv[0] = "train_gpt2.py"
sys.path.insert(0, sys.argv[1])
import config
settings = config.parse_command_line(sys.argv[2:])
problems = config.check(settings, 1)
if not settings.val_every:
    problems.append("val_every is 0, so nothing is measured")
if getattr(settings, "minutes", 0):
    problems.append("--minutes would choose for each run anew: type the flags that it prints")
if problems:
    sys.exit("; ".join(problems))
print(json.dumps(dataclasses.asdict(settings)))
"""


def ask(copy: Path, flags: list[str]) -> tuple[dict[str, Any], str]:
    """The settings that flags mean to a copy, or its complaint."""
    command = [sys.executable, "-c", ASK, str(copy), *flags, "--resume=auto"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        return {}, answer.stderr.strip()
    return json.loads(answer.stdout), ""


def read_arm(name: str, text: str, before: list[str]) -> Arm:
    """Parses an arm's flags with the copy that trains it. Its own override those in `before`."""
    own = shlex.split(text)
    copy = Path(__file__).parent
    if text.strip().startswith("@"):
        copy = Path(own.pop(0)[1:]).resolve()
    if not (copy / "train_gpt2.py").is_file():
        raise UserError(f"{name}: {copy} is no copy of this repository: it has no train_gpt2.py")
    if any(flag.partition("=")[0] in OURS for flag in own):
        raise UserError(f"{name}: {text!r} sets what compare.py sets itself: {', '.join(OURS)}")
    flags = [*before, *own]
    settings, complaint = ask(copy, flags)
    inherited = re.findall(r"--[\w-]+(?= has no effect)", complaint)
    if inherited and len(without(own, *inherited)) == len(own):
        flags = [*without(before, *inherited), *own]  # without the base's, in vain with the arm's
        settings, complaint = ask(copy, flags)
    if complaint:
        raise UserError(f"{name}: {text!r} is refused\n{complaint}")
    data = Path(settings["data_dir"])
    shards = find_shards(data, "train") + find_shards(data, "val")
    recipe = {key: value for key, value in settings.items() if key not in NO_EFFECT}
    recipe |= dict(data=identify(shards), code=hash_code(copy))
    origin = Path(settings["init_from"])
    if weights := [f for f in (origin, *sorted(origin.glob("*.safetensors"))) if f.is_file()]:
        recipe["weights"] = [hash_file(file) for file in weights]
    return Arm(name, copy, flags, recipe, str(data))


def read_code(copy: Path) -> dict[str, str]:
    """A copy's Python files. A change to one of them makes the copy's runs new ones."""
    files = sorted([*copy.glob("*.py"), *copy.glob("support/*.py")])
    return {str(file.relative_to(copy)): file.read_text("utf-8") for file in files}


def hash_code(copy: Path) -> str:
    return hashlib.sha256("".join(read_code(copy).values()).encode()).hexdigest()


def compare_code(base: dict[str, str], code: dict[str, str]) -> str:
    """The changes from the base's Python files to a copy's, as a patch."""
    patch: list[str] = []
    for name in sorted(base | code):
        before = base.get(name, "").splitlines(True)
        after = code.get(name, "").splitlines(True)
        patch += difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(patch)


def read_sweep(text: str, arms: list[Arm]) -> tuple[str, list]:
    """'learning_rate=4e-3,8e-3' -> the setting's name and its values, in order."""
    name, _, listed = text.partition("=")
    name = name.replace("-", "_")
    kind: type = type(arms[0].recipe.get(name))
    if kind not in (int, float):
        raise UserError(f"--sweep {text}: {name} is no number that train_gpt2.py knows")
    values = sorted({kind(value) for value in listed.split(",")})
    if len(values) < 2 or values[0] <= 0:
        raise UserError(f"--sweep {text}: expected values above 0: learning_rate=4e-3,8e-3")
    for arm, value in product(arms, values):
        if complaint := ask(arm.copy, [*arm.flags, f"--{name}={value}"])[1]:
            raise UserError(f"--sweep {text}: {arm.name} cannot have {value}\n{complaint}")
    return name, values


# -- the runs


@dataclass
class Trainer:
    """Trains runs one after the other, and counts them."""

    out: Path
    total: int  # number of runs; a sweep may add some
    done: int = 0
    seconds: float = 0.0  # that the longest run took: one that diverged is short
    dtypes: dict[str, str] = field(default_factory=dict)  # what auto is: the first run measures it
    measure: str = "val_loss"  # that judges; bits_per_byte, if the arms' tokens differ

    def run(self, arm: Arm, changes: dict) -> dict:
        """Trains an arm with changed settings, unless it has been. Returns the outcome."""
        directory = locate(arm, changes, self.out)
        dtype = arm.recipe["dtype"]
        outcome = read_outcome(directory, self.measure)
        if outcome is None:
            minutes = math.ceil(self.seconds * (self.total - self.done) / 60)
            left = f", about {minutes} min left" if minutes else ""
            run = f"run {self.done + 1} of {self.total}{left}"
            say(f"{run}: training {directory}, see output.txt there")
            changes = changes | {"dtype": self.dtypes.get(dtype, dtype)}
            outcome = train(arm, changes, directory, self.measure)
        self.done += 1
        self.seconds = max([self.seconds, *outcome["seconds"]])
        self.dtypes[dtype] = outcome["dtype"]
        say(f"{directory}: {show_loss(outcome['val_loss'])}")
        return outcome


def locate(arm: Arm, changes: dict, out: Path) -> Path:
    """The directory of a run. Its name ends with a hash of all that decides the losses."""
    changed = [f"{setting}={value}" for setting, value in changes.items()]
    recipe = json.dumps(arm.recipe | changes, sort_keys=True)
    return out / arm.name / "_".join([*changed, hashlib.sha256(recipe.encode()).hexdigest()[:8]])


def train(arm: Arm, changes: dict, directory: Path, measure: str) -> dict:
    """Trains a run, or the rest of one that was interrupted. Returns its outcome."""
    if hash_code(arm.copy) != arm.recipe["code"]:
        raise UserError(f"{arm.copy} has changed since the start: repeat the command")
    settings = changes | {"log-dir": directory, "resume": "auto"}
    flags = arm.flags + [f"--{setting}={value}" for setting, value in settings.items()]
    run_process([sys.executable, f"{arm.copy}/train_gpt2.py", *flags], directory)
    outcome = read_outcome(directory, measure)
    if outcome is None:
        output = (directory / "output.txt").read_text(errors="replace").strip()
        last = (output or "ended early").splitlines()[-1]
        own = "compare.py sets --log-dir and --resume; to begin this run again, delete its folder"
        raise UserError(f"{directory}: {last}\n({own})")
    return outcome


def run_process(command: list[str], directory: Path) -> None:
    """Runs a training to its end. If this process is interrupted, the training saves and stops."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "output.txt", "ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        process.wait()
    finally:
        process.terminate()  # if this process is interrupted; else it has no effect
        process.wait()


def read_outcome(directory: Path, measure: str) -> dict | None:
    """A finished run's validation losses, and the tokens and seconds of training before each one.

    measure: val_loss or bits_per_byte, in which the losses are. `val_loss` is the last loss, or
    None if the run diverged. Returns None for an unfinished run.
    """
    if not (directory / "log.txt").exists():
        return None
    run = read_run(directory)
    end = run.records[-1]["type"]
    if end not in ("end", "diverged"):
        return None
    steps, losses = run.series(measure, "val")
    updates, wall = run.series("wall")
    return dict(
        directory=directory,
        git=run.records[0]["git"],
        dtype=run.records[0]["dtype"],
        val_loss=losses[-1] if end == "end" else None,
        losses=losses,
        tokens=[step * run.config["total_batch_size"] for step in steps],
        seconds=np.interp(steps, [0, *np.add(updates, 1)], [0, *wall]).tolist(),
    )


def tune(arm: Arm, sweep: str, values: list, seed: int, trainer: Trainer) -> None:
    """Tries the values, then up to 8 more until the best one is not at an end."""
    most = len(values) + 8
    while values and len(arm.tried) < most:
        outcomes = [trainer.run(arm, {sweep: value, "seed": seed}) for value in values]
        losses = [outcome["val_loss"] for outcome in outcomes]
        arm.tried = sorted([*arm.tried, *zip(values, losses, strict=True)])
        best, _ = min(arm.tried, key=lambda tried: tried[1] or math.inf)
        arm.tuned = {sweep: best}
        values = widen([value for value, _ in arm.tried], best)
        if any(ask(arm.copy, [*arm.flags, f"--{sweep}={value}"])[1] for value in values):
            return  # it is the end of what the setting can be
        trainer.total += len(values)


def widen(tried: list, best: float) -> list:
    """If the best is at an end: the value beyond it by the ratio of the two values there."""
    neighbours = {tried[0]: tried[1], tried[-1]: tried[-2]}
    if best not in neighbours or isinstance(best, int):  # a larger size also takes more time
        return []
    beyond = float(f"{best**2 / neighbours[best]:.6g}")
    return [beyond] if beyond not in (0, best) else []


def compare(arms: list[Arm], sweep: str, values: list, seeds: int, out: Path) -> dict:
    """Trains what is missing. Returns the content of compare.json."""
    seed = arms[0].recipe["seed"]
    judging = range(seed + 1 if sweep else seed, seed + seeds)
    same_data = all(arm.recipe["data"] == arms[0].recipe["data"] for arm in arms)
    measure = "val_loss" if same_data else "bits_per_byte"
    trainer = Trainer(out, len(arms) * (len(values) + len(judging)), measure=measure)
    for arm in arms:
        tune(arm, sweep, values, seed, trainer)
    for judge in judging:
        for arm in arms:  # in turn: a slow hour slows all arms
            arm.runs.append(trainer.run(arm, arm.tuned | {"seed": judge}))
    for arm in arms[1:]:
        arm.against = compare_pairs(arm.name, arm.runs, arms[0].runs)
    return dict(
        sweep=sweep,
        measure="validation loss" if same_data else "bits per byte",
        about=read_run(arms[0].runs[0]["directory"]).records[0],
        base=arms[0].recipe | arms[0].tuned,
        arms=[asdict(arm) for arm in arms],
    )


def compare_pairs(name: str, runs: list[dict], base: list[dict]) -> dict:
    """Compares an arm's runs with the base's runs of the same seeds."""
    if any(run["val_loss"] is None for run in [*runs, *base]):
        return dict(verdict=f"{name} cannot be judged: a run diverged")
    pairs = list(zip(runs, base, strict=True))
    differences = [run["val_loss"] - other["val_loss"] for run, other in pairs]
    mean, half = interval(differences)
    verdict = f"{name}: no difference can be seen"
    if abs(mean) > half:
        side = "lower" if mean < 0 else "higher"
        verdict = f"{name} is {side} by {show_interval(abs(mean), half)}"
    result: dict = dict(verdict=verdict, differences=differences, mean=mean, half=half)
    for by in ("tokens", "seconds"):
        result[by] = [reach(run, other, by) for run, other in pairs]
    return result


def interval(differences: list[float]) -> tuple[Any, Any]:
    """The mean of at least two differences, and half of its 95% interval (paired t)."""
    n = len(differences)
    # beyond the table, the series of Fisher and Cornish (1960)
    t = T95.get(n - 1) or np.polyval([1.590, 2.556, 2.823, 2.372, 1.960], 1 / (n - 1))
    return np.mean(differences), t * np.std(differences, ddof=1) / n**0.5


def reach(run: dict, base: dict, by: str) -> float | None:
    """The tokens or seconds until a run reaches the base's final loss, over the base's own.

    None if it never does. Between evaluations we draw straight lines through the lowest losses.
    """
    lowest = np.minimum.accumulate(run["losses"])[::-1]  # np.interp expects rising values
    needed = np.interp(base["val_loss"], lowest, run[by][::-1], left=math.inf)
    return None if needed == math.inf else needed / base[by][-1]


def show_interval(mean: float, half: float) -> str:
    """Shows one digit of `half`, two if it begins with 1; at least two decimals."""
    digits = max(2, -math.floor(math.log10(half / 2))) if half else 4
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


# -- the page

PAGE = """\
`{command}`

The base: {n_layer} × {n_embd}, {max_steps:,} steps of {total_batch_size:,} tokens of {text}. \
{device[name]}, revision {git}, {dtype}.

| arm | {measure} | against base | tokens | minutes |
| --- | ---: | ---: | ---: | ---: |
{rows}

{verdicts}

{Measure}: mean and standard deviation of the seeds. Against base: the mean difference of two
runs with the same seed, and its 95% interval (paired t, not corrected for the number of arms).
Tokens, minutes: in the base's row, what its run took; in an arm's, for each seed, the fraction of
that after which the arm had reached the base's final loss. The minutes include evaluations and
compilation.
"""


def show_loss(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.4f}"


def format_page(result: dict) -> str:
    """compare.json's content as a page of Markdown."""
    arms = result["arms"]
    rows = [f"| {' | '.join(describe_arm(arm))} |" for arm in arms]
    verdicts = [f"- {arm['against']['verdict']}." for arm in arms[1:]]
    if halves := [arm["against"]["half"] for arm in arms if "half" in arm["against"]]:
        seeds = len(arms[0]["runs"])
        verdicts.append(f"- {seeds} seeds may miss a difference of less than {max(halves):.2g}.")
    measure = result.get("measure", "validation loss")  # old records have no other
    text = name_text(result["about"].get("config", {}), "the text")  # not in old records
    facts = dict(measure=measure, Measure=measure.capitalize(), text=text)
    facts |= dict(rows="\n".join(rows), verdicts="\n".join(verdicts), command=result["command"])
    sizes = result["about"].get("model", {})  # --init-from has its own
    page = PAGE.format(**result["base"] | result["about"] | sizes | facts)
    if result["sweep"]:
        page += f"\n{result['sweep']}, tuned on another seed:\n\n"
        page += "".join(f"- {arm['name']}: {describe_sweep(arm)}\n" for arm in arms)
    return page


def describe_arm(arm: dict) -> list[str]:
    """Its row: name and loss; then how it compares with the base, or what the base needs."""
    runs = arm["runs"]
    against = arm["against"]
    losses = [run["val_loss"] for run in runs]
    name = arm["name"]
    if arm.get("diff"):  # not in old records
        name += f" ([changes]({name}.diff) to the base; revision {runs[0]['git'] or 'unknown'})"
    if None in losses:
        return [name, "diverged", "", "", ""]
    cells = [name, f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}"]
    if not against:  # the base
        minutes = np.mean([run["seconds"][-1] for run in runs]) / 60
        return [*cells, "", f"{runs[0]['tokens'][-1]:,}", f"{minutes:.1f}"]
    if "mean" not in against:  # the base diverged
        return [*cells, "", "", ""]
    cells.append(show_interval(against["mean"], against["half"]))
    for fractions in (against["tokens"], against["seconds"]):
        shown = ["never" if x is None else f"{x:.2f}" for x in fractions]
        cells.append(", ".join(shown) if any(x is not None for x in fractions) else "never")
    return cells


def describe_sweep(arm: dict) -> str:
    """The losses with the values that were tried, and whether the best is at an end."""
    [best] = arm["tuned"].values()
    tried = arm["tried"]
    shown = ", ".join(f"{value:g}: {show_loss(loss)}" for value, loss in tried)
    text = f"{best:g} is the best of {shown}"
    if best in (tried[0][0], tried[-1][0]):
        text += "; it is at an end of the range, so a value beyond it may be better"
    return text


# -- the picture


def plot_comparison(result: dict[str, Any]) -> Any:
    """Draws what compare.py found: each arm's losses by tokens, and its differences to the base."""
    figure, [losses, differences] = new_figure(1, 2, 3.6)
    measure = result.get("measure", "validation loss")
    names = name_arms(result["arms"])
    found = []
    for arm, name, style in zip(result["arms"], names, cycle(STYLES)):
        color = style["color"]
        if ended := [run for run in arm["runs"] if run["val_loss"] is not None]:
            start = max(1, len(ended[0]["losses"]) // 10)  # the first fall would fill the picture
            millions = np.array(ended[0]["tokens"][start:]) / 1e6
            seeds = np.array([run["losses"][start:] for run in ended])
            losses.plot(millions, seeds.mean(0), label=name, **style)
            losses.fill_between(millions, seeds.min(0), seeds.max(0), color=color, alpha=0.2, lw=0)
        against = arm["against"]
        if "mean" in against:
            found.append((against["mean"], against["half"], name))
            rows = [name] * len(arm["runs"])
            differences.plot(against["differences"], rows, "|", color=color, ms=9)
            differences.errorbar(against["mean"], name, xerr=against["half"], fmt="o", color=color)
    unit = "nats" if measure == "validation loss" else measure
    title = describe_best(found, names[0], unit) if found else ""
    losses.set(ylabel=f"{measure} (nats per token)" if unit == "nats" else measure, title=title)
    text = name_text(result["about"].get("config", {}), "the text")
    size = "{n_layer} × {n_embd}".format(**result["base"] | result["about"].get("model", {}))
    label_x(losses, f"millions of tokens of {text}, {size}\n(mean and range of the seeds)")
    label_lines(losses)
    differences.axvline(0, color=GREY, linewidth=0.8)
    differences.margins(x=0.1, y=0.3)
    differences.invert_yaxis()
    differences.set_title("Each seed, mean and 95% interval")
    label_x(differences, f"final {measure} minus that of {names[0]}")
    return figure


def name_arms(arms: list[dict]) -> list[str]:
    """Optimizer and learning rate, if the recipes differ in nothing else; else the arms' names."""
    recipes = [arm.get("recipe", {}) | arm.get("tuned", {}) for arm in arms]
    embeddings = {r.pop("embedding_lr", 1) for r in recipes if r.get("optimizer") == "muon"}
    for recipe in recipes:
        recipe.pop("embedding_lr", 1)  # without effect on AdamW
    pairs = [(r.pop("optimizer", ""), r.pop("learning_rate", 0)) for r in recipes]
    alike = recipes.count(recipes[0]) == len(arms) and len(embeddings) <= 1
    if not alike or len(set(pairs)) < len(arms):
        return [arm["name"] for arm in arms]
    shown = dict(adamw="AdamW", muon="Muon")
    return [
        f"{shown.get(name, name)}, {np.format_float_scientific(rate, trim='-', exp_digits=1)}"
        for name, rate in pairs
    ]


def describe_best(found: list[tuple], base: str, unit: str) -> str:
    """What the arm with the lowest mean shows. found: mean, half of its interval, name."""
    mean, half, name = min(found)
    if abs(mean) <= half:
        return f"No difference between {name} and {base} can be seen"
    shown = show_interval(abs(mean), half)
    return f"{name} ends {shown} {unit} {'below' if mean < 0 else 'above'} {base}"


# -- the command


def refuse_other_comparison(out: Path, names: set[str]) -> None:
    """Raises UserError if the report in a directory has arms that this one would not have."""
    record = out / "compare.json"
    found = json.loads(record.read_bytes())["arms"] if record.exists() else []
    if others := [arm["name"] for arm in found if arm["name"] not in names]:
        raise UserError(f"--out {out}: its report also has {', '.join(others)}; choose another")


def main(args: list[str]) -> None:
    # for tyro "--preset x" is a flag, " --preset x" a value
    spaced = [f" {v}" if flag in ("--base", "--arm") else v for flag, v in pairwise(["", *args])]
    config = parse_flags(CompareConfig, spaced)
    try:
        arms = read_arms(config)
        sweep, values = read_sweep(config.sweep, arms) if config.sweep else ("", [])
        refuse_other_comparison(config.out, {arm.name for arm in arms})
        if config.seeds < (3 if sweep else 2):
            raise UserError("--seeds: at least 2 to judge, and 1 more to tune a --sweep")
    except ValueError as error:  # a UserError, or "No closing quotation"
        raise UsageError(str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out = config.out
    result = compare(arms, sweep, values, config.seeds, out)
    result["command"] = f"python compare.py {shlex.join(args)}"
    page = format_page(result)
    for arm in arms:
        if arm.diff:
            write_whole(out / f"{arm.name}.diff", arm.diff.encode())
    write_whole(out / "compare.md", page.encode())
    write_whole(out / "compare.json", json.dumps(result, indent=1, default=str).encode())
    save_picture(plot_comparison(result), out / "compare.png")
    say(f"\n{page}\nsaved as compare.md, compare.json and compare.png in {out}")


if __name__ == "__main__":
    run_script(main)

"""Which settings are better, and how sure is it? Trains arms with the same seeds and compares them.

python compare.py --base "--preset quickstart" --arm "adamw: --optimizer adamw" \\
    --sweep learning_rate=4e-3,8e-3,1.6e-2 --seeds 4
python compare.py --base "--preset quickstart" --arm "mine: @../my-copy --n-head 4"

An arm has the base's flags and its own. @DIRECTORY trains it with another copy of this repository.
Runs of one seed read the same data in the same order and, if their architecture is the same, start
from the same weights. So compare.py judges the difference between two runs of one seed.
Arms with --dtype auto share the precision that the first of their runs picks. --jobs 8 trains eight
runs at once, each with a GPU of its own. OUT receives the runs, the report and the changes of each
copy as NAME.diff. To continue, repeat the command, with any --jobs.
"""

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
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tyro.conf import UseAppendAction

from config import idle_settings
from support.base.console import run_script, say
from support.base.errors import UsageError, UserError
from support.base.files import hash_file, write_whole
from support.base.flags import String, drop_flags, flag_of, parse_flags
from support.base.programs import Program, find_places, last_line, run_programs
from support.run.log import LOG, METRICS, end_of, read_metrics, read_run, starts_of
from support.run.source_code import compare_code, hash_code, read_code
from support.show import comparison, plots
from support.text.token_files import find_shards, identify
from support.text.tokenizer import tokenizer_of_data

# Flags in front of every arm's own: a comparison only needs validations
NO_EVALUATIONS = """--hellaswag-every=0 --sample-every=0 --checkpoint-every=0
    --checkpoint-minutes=10 --keep-checkpoints=1"""
SET_HERE = ("--seed", "--log-dir", "--log_dir", "--resume", "--overwrite")
NO_EFFECT = ("preset", "log_dir", "data_dir", "resume", "overwrite")  # on what is computed
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's t for 95%, by degrees of freedom


@dataclass(frozen=True)
class CompareConfig:
    """Trains every arm with the same seeds, and compares them."""

    base: String = ""  # flags of train_gpt2.py; begin with @DIRECTORY to use another copy
    arm: UseAppendAction[tuple[str, ...]] = ()  # "name: flags", added to base's; repeat for more
    sweep: String = ""  # a setting to tune for every arm, such as learning_rate=4e-3,8e-3
    seeds: int = 4  # number of seeds; with --sweep, the first one tunes and the others judge
    jobs: int = 1  # runs at once, each with a GPU of its own, or with its share of the cores
    out: Path = Path("log/compare")  # directory of the runs and the report


@dataclass
class Arm:
    """Settings that are compared, and what becomes of them."""

    name: str
    copy: Path  # the repository that trains it
    flags: list[str]
    settings: dict[str, Any]  # what decides its losses: also data, code and machine
    data_dir: str = ""
    diff: str = ""  # what `patch -p1` needs to make its code of the base's
    tried: list[tuple] = field(default_factory=list)  # by the sweep: value, loss or None
    tuned: dict = field(default_factory=dict)  # the sweep's setting and the best of them
    runs: list[dict] = field(default_factory=list)  # their outcomes, one for each judging seed
    against: dict = field(default_factory=dict)  # the comparison with the base


def read_arms(config: CompareConfig) -> list[Arm]:
    """The base, then the other arms, which have its flags and their own."""
    base = read_arm("base", config.base, NO_EVALUATIONS.split())
    arms = [base]
    for text in config.arm:
        name, _, flags = text.strip().partition(":")
        if not re.fullmatch(r"\w[\w.+-]*", name) or name in [arm.name for arm in arms]:
            raise UserError(f"--arm {text!r}: expected 'name: flags', each name one word and new")
        arm = read_arm(name, flags, base.flags)
        measured = ("val_tokens", "sequence_length", "data")
        if any(arm.settings[key] != base.settings[key] for key in measured):
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
        T = a.settings["sequence_length"]
        is_part |= a.settings["val_tokens"] // T < (length - 1) // T
    if hashes[0] != hashes[1] or is_part:
        raise UserError(
            f"--arm {text!r}: with other data, val_tokens or sequence_length, arms must hold out "
            "the same text (fineweb.py --vocab-size or --tokenizer), and validate on all of it: "
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


ASK_SETTINGS = """
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
found = {k: v for k, v in dataclasses.asdict(settings).items() if k != "typed"}
print(json.dumps([found, "; ".join(problems)]))
"""


@cache
def name_machine(device: str) -> list[str]:
    """What decides a result besides settings, data and code: Python, PyTorch, CPU or GPU."""
    # another process looks, so that this one takes no memory of a GPU
    look = """
import json, platform, sys, torch
from support.machine.device import device_name, pick_device
name = device_name(pick_device(sys.argv[1]))
print(json.dumps([platform.python_version(), torch.__version__, name]))
"""
    command = [sys.executable, "-c", look, device]
    answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    if answer.returncode:
        raise UserError(answer.stderr.strip().rpartition("Error: ")[2])
    return json.loads(answer.stdout)


def count_gpus(device: str) -> int:
    import torch  # counting takes no memory of a GPU

    return 0 if device == "cpu" else torch.cuda.device_count()


def ask(copy: Path, flags: list[str]) -> tuple[dict[str, Any], str]:
    """The settings that flags mean to a copy, and its complaint, if it has one."""
    command = [sys.executable, "-c", ASK_SETTINGS, str(copy), *flags, "--resume=auto"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        return {}, answer.stderr.strip()
    settings, complaint = json.loads(answer.stdout)
    return settings, complaint


def read_arm(name: str, text: str, before: list[str]) -> Arm:
    """Parses an arm's flags with the copy that trains it. Its own override those in `before`."""
    text = text.strip()
    own = shlex.split(text)
    copy = Path(__file__).parent
    if text.startswith("@"):
        copy = Path(own.pop(0)[1:]).resolve()
    if not (copy / "train_gpt2.py").is_file():
        raise UserError(f"{name}: {copy} is no copy of this repository: it has no train_gpt2.py")
    if any(flag.partition("=")[0] in SET_HERE for flag in own):
        raise UserError(f"{name}: {text!r} sets what compare.py sets itself: {', '.join(SET_HERE)}")
    flags = [*before, *own]
    settings, complaint = ask(copy, flags)
    # the base's flags that have no effect with the arm's own
    useful = [*drop_flags(before, *map(flag_of, idle_settings(settings))), *own]
    if useful != flags:
        flags = useful
        settings, complaint = ask(copy, flags)
    if complaint:
        raise UserError(f"{name}: {text!r} is refused\n{complaint}")
    data = Path(settings["data_dir"])
    shards = find_shards(data, "train") + find_shards(data, "val")
    settings = {key: value for key, value in settings.items() if key not in NO_EFFECT}
    settings |= dict(data=identify(shards), code=hash_code(copy))
    settings["machine"] = name_machine(settings["device"])
    origin = Path(settings["init_from"])
    if weights := [f for f in (origin, *sorted(origin.glob("*.safetensors"))) if f.is_file()]:
        settings["weights"] = [hash_file(file) for file in weights]
    return Arm(name, copy, flags, settings, str(data))


def read_sweep(text: str, arms: list[Arm]) -> tuple[str, list]:
    """'learning_rate=4e-3,8e-3' -> the setting's name and its values, in order."""
    name, _, listed = text.partition("=")
    name = name.replace("-", "_")
    kind: type = type(arms[0].settings.get(name))
    if kind not in (int, float) or flag_of(name) in SET_HERE:
        raise UserError(f"--sweep {text}: {name} is no number that a sweep can set")
    values = sorted({kind(value) for value in listed.split(",")})
    if len(values) < 2 or values[0] <= 0:
        raise UserError(f"--sweep {text}: expected values above 0: learning_rate=4e-3,8e-3")
    for arm, value in product(arms, values):
        if complaint := ask(arm.copy, [*arm.flags, f"--{name}={value}"])[1]:
            raise UserError(f"--sweep {text}: {arm.name} cannot have {value}\n{complaint}")
    return name, values


@dataclass
class Trainer:
    """Trains runs, as many at once as there are places, and counts them."""

    out: Path
    total: int  # number of runs; a sweep may add some
    places: list[dict[str, str]] = field(default_factory=lambda: [{}])  # see find_places
    begun: int = 0
    seconds: float = 0.0  # that the longest run took: one that diverged is short
    first: dict[str, Path] = field(default_factory=dict)  # of each --dtype: it picks what auto is
    measure: str = "val_loss"  # that judges; bits_per_byte, if the arms' tokens differ

    def run(self, runs: list[tuple[Arm, dict]]) -> list[dict]:
        """Trains arms with changed settings, unless they have been. Returns their outcomes."""
        named = {locate(arm, changes, self.out): (arm, changes) for arm, changes in runs}
        outcomes: dict[Path, dict] = {}

        def take_in(directory: Path, outcome: dict) -> None:
            outcomes[directory] = outcome
            self.seconds = max([self.seconds, *outcome["seconds"]])
            say(f"{directory}: {comparison.show_loss(outcome['val_loss'])}")

        for directory, (arm, _) in named.items():
            if outcome := read_outcome(directory, self.measure):
                self.begun += 1
                self.first.setdefault(arm.settings["dtype"], directory)
                take_in(directory, outcome)
        missing = [directory for directory in named if directory not in outcomes]

        def start_next() -> Program | None:
            if not missing:
                return None
            directory = missing[0]
            arm, changes = named[directory]
            dtype = arm.settings["dtype"]
            first = self.first.setdefault(dtype, directory)
            if first != directory and not (dtype := find_dtype(first)):
                return None  # the first run has not picked it yet
            self.announce(missing.pop(0))
            return train(arm, changes | {"dtype": dtype}, directory)

        for directory in run_programs(start_next, self.places):
            if not (outcome := read_outcome(directory, self.measure)):
                own = "compare.py sets --log-dir and --resume"
                advice = f"({own}; to begin this run again, delete its folder)"
                raise UserError(f"{directory}: {last_line(directory)}\n{advice}")
            take_in(directory, outcome)
        return [outcomes[directory] for directory in named]

    def announce(self, directory: Path) -> None:
        minutes = math.ceil(self.seconds * (self.total - self.begun) / len(self.places) / 60)
        left = f", about {minutes} min left" if minutes else ""
        self.begun += 1
        run = f"run {self.begun} of {self.total}{left}"
        say(f"{run}: training {directory}, see output.txt there")


def find_dtype(directory: Path) -> str:
    """The precision of a run that has begun; empty before."""
    starts = starts_of(read_metrics(directory / METRICS, updates=False))
    return starts[0]["dtype"] if starts else ""


def locate(arm: Arm, changes: dict, out: Path) -> Path:
    """The directory of a run. Its name ends with a hash of all that decides the losses."""
    changed = [f"{setting}={value}" for setting, value in changes.items()]
    everything = json.dumps(arm.settings | changes, sort_keys=True).encode()
    return out / arm.name / "_".join([*changed, hashlib.sha256(everything).hexdigest()[:8]])


def train(arm: Arm, changes: dict, directory: Path) -> Program:
    """What trains a run, or the rest of one that was interrupted."""
    if hash_code(arm.copy) != arm.settings["code"]:
        raise UserError(f"{arm.copy} has changed since the start: repeat the command")
    settings = changes | {"log-dir": directory, "resume": "auto"}
    flags = arm.flags + [f"--{setting}={value}" for setting, value in settings.items()]
    return [sys.executable, f"{arm.copy}/train_gpt2.py", *flags], directory


def read_outcome(directory: Path, measure: str) -> dict | None:
    """A finished run's losses in `measure`, and the tokens and seconds of training before each.

    `val_loss` is the last one, or None if the run diverged. Returns None for an unfinished run.
    """
    if not (directory / LOG).exists():
        return None
    run = read_run(directory)
    if not (end := end_of(run.records)):
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


def tune(arms: list[Arm], sweep: str, values: list, seed: int, trainer: Trainer) -> None:
    """Tries the values, then up to 8 more for each arm until its best one is not at an end."""
    most = len(values) + 8
    tries = [(arm, value) for arm in arms for value in values]
    while tries:
        outcomes = trainer.run([(arm, {sweep: value, "seed": seed}) for arm, value in tries])
        for (arm, value), outcome in zip(tries, outcomes, strict=True):
            arm.tried = sorted([*arm.tried, (value, outcome["val_loss"])])
        tries = []
        for arm in arms:
            best, _ = min(arm.tried, key=lambda tried: tried[1] or math.inf)
            arm.tuned = {sweep: best}
            for value in widen([value for value, _ in arm.tried], best):
                can_be = not ask(arm.copy, [*arm.flags, f"--{sweep}={value}"])[1]
                if can_be and len(arm.tried) < most:
                    tries.append((arm, value))
        trainer.total += len(tries)


def widen(tried: list, best: float) -> list:
    """If the best is at an end: the value beyond it by the ratio of the two values there."""
    neighbours = {tried[0]: tried[1], tried[-1]: tried[-2]}
    if best not in neighbours or isinstance(best, int):  # a larger size also takes more time
        return []
    beyond = float(f"{best**2 / neighbours[best]:.6g}")
    return [beyond] if beyond not in (0, best) else []


def compare(arms: list[Arm], sweep: str, values: list, seeds: int, out: Path, places: list) -> dict:
    """Trains what is missing. Returns the content of compare.json."""
    seed = arms[0].settings["seed"]
    judging = range(seed + 1 if sweep else seed, seed + seeds)
    same_data = all(arm.settings["data"] == arms[0].settings["data"] for arm in arms)
    measure = "val_loss" if same_data else "bits_per_byte"
    total = len(arms) * (len(values) + len(judging))
    trainer = Trainer(out, total, places, measure=measure)
    tune(arms, sweep, values, seed, trainer)
    # in turn: a slow hour slows all arms
    turns = [(arm, arm.tuned | {"seed": judge}) for judge in judging for arm in arms]
    for (arm, _), outcome in zip(turns, trainer.run(turns), strict=True):
        arm.runs.append(outcome)
    for arm in arms[1:]:
        arm.against = compare_pairs(arm.name, arm.runs, arms[0].runs)
    return dict(
        sweep=sweep,
        measure="validation loss" if same_data else "bits per byte",
        about=read_run(arms[0].runs[0]["directory"]).records[0],
        base=arms[0].settings | arms[0].tuned,
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
        verdict = f"{name} is {side} by {comparison.show_interval(abs(mean), half)}"
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
    """Tokens or seconds until a run has the base's final loss, over the base's own, or None."""
    # straight lines through the lowest losses; np.interp expects rising values
    lowest = np.minimum.accumulate(run["losses"])[::-1]
    needed = np.interp(base["val_loss"], lowest, run[by][::-1], left=math.inf)
    return None if needed == math.inf else needed / base[by][-1]


def refuse_other_comparison(out: Path, names: set[str]) -> None:
    """Raises UserError if the report in a directory has arms that this one would not have."""
    record = out / "compare.json"
    found = json.loads(record.read_bytes())["arms"] if record.exists() else []
    if others := [arm["name"] for arm in found if arm["name"] not in names]:
        raise UserError(f"--out {out}: its report also has {', '.join(others)}; choose another")


def join_values(args: list[str], *flags: str) -> list[str]:
    """The arguments, but --flag=value for these flags, because a value may begin with a dash."""
    joined: list[str] = []
    for arg in args:
        if joined and joined[-1] in flags:
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


def main(args: list[str]) -> None:
    config = parse_flags(CompareConfig, join_values(args, "--base", "--arm"))
    try:
        arms = read_arms(config)
        sweep, values = read_sweep(config.sweep, arms) if config.sweep else ("", [])
        refuse_other_comparison(config.out, {arm.name for arm in arms})
        if config.seeds < (3 if sweep else 2):
            raise UserError("--seeds: at least 2 to judge, and 1 more to tune a --sweep")
        places = find_places(config.jobs, count_gpus(arms[0].settings["device"]))
    except ValueError as error:  # a UserError, or "No closing quotation"
        raise UsageError(str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out = config.out
    result = compare(arms, sweep, values, config.seeds, out, places)
    result["command"] = f"python compare.py {shlex.join(args)}"
    page = comparison.format_page(result)
    for arm in arms:
        if arm.diff:
            write_whole(out / f"{arm.name}.diff", arm.diff.encode())
    write_whole(out / "compare.md", page.encode())
    write_whole(out / "compare.json", json.dumps(result, indent=1, default=str).encode())
    plots.save_picture(comparison.plot_comparison(result), out / "compare.png")
    say(f"\n{page}\nsaved as compare.md, compare.json and compare.png in {out}")


if __name__ == "__main__":
    run_script(main)

"""Which recipe is better, and how sure is it? Runs of train_gpt2.py, compared seed by seed.

python compare.py --base "--preset quickstart" --arm "adamw: --optimizer adamw" \\
    --sweep learning_rate=4e-3,8e-3,1.6e-2 --seeds 4
python compare.py --base "--preset quickstart" --arm "mine: @../my-copy --n-head 4"

An arm has the base's flags and its own; @DIRECTORY names another copy of this repository. The same
seed gives the same data in the same order and, for the same architecture, the same first weights:
so what is judged is the difference between two runs of one seed. The same command goes on where it
was interrupted, and trains no finished run again. OUT has compare.md, .json, .png, and the runs.
"""

import ast
import hashlib
import json
import math
import re
import shlex
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

from tyro.conf import UseAppendAction

from support import paired, runs
from support.common import UserError, read_flags, run_script, say, write_whole
from support.plots import plot_comparison
from support.records import read_run
from support.runs import Run
from support.shards import find_shards, identify

HERE = Path(__file__).parent
# before the flags of all arms, which may say otherwise: nothing that a comparison does not need
QUIET = "--hellaswag-every=0 --sample-every=0 --checkpoint-every=0 --checkpoint-minutes=10"
MOST = 8  # values that a sweep may add to those that were asked for


@dataclass
class CompareConfig:
    """Trains every arm with the same seeds, one run after the other, and compares them."""

    # -- comparison: What is compared, and where the results go.
    base: str = ""  # its flags of train_gpt2.py; @DIRECTORY in front: of another copy
    arm: UseAppendAction[tuple[str, ...]] = ()  # "name: flags", laid over base's; one for each arm
    sweep: str = ""  # a number to tune for every arm, such as learning_rate=4e-3,8e-3
    seeds: int = 4  # how many; with --sweep the first one tunes and only the others judge
    data_dir: str = ""  # shards for all; empty = as the base says
    out: str = "log/compare"  # a directory for the runs and the report


# -- what is compared


@dataclass
class Arm:
    """One of the recipes; `value` and `tried` are filled in by the sweep."""

    name: str
    copy: Path  # the repository that trains it
    flags: list[str]
    config: dict  # what the flags make of that copy's TrainConfig
    code: str  # a hash of that copy
    value: float | None = None  # the best
    tried: dict[float, float] = field(default_factory=dict)  # value: loss on the first seed


@dataclass
class Comparison:
    """All that the command line asks for, and how long the runs so far took."""

    out: Path
    arms: list[Arm]  # the base first
    sweep: str  # the name of a field of TrainConfig, or empty
    values: list[float]
    tuned: list[int]  # seeds: one where there is a sweep, else none
    judged: list[int]
    data: dict  # the shards
    planned: int  # runs
    took: list[float] = field(default_factory=list)  # seconds


def read_comparison(c: CompareConfig) -> Comparison:
    """Raises UserError for what cannot be compared, before anything is trained."""
    arms = read_arms(c)
    sweep, values = read_sweep(c.sweep, arms)
    tuning = 1 if sweep else 0
    if c.seeds < tuning + 2:
        raise UserError(f"--seeds {c.seeds}: at least 2 to judge, and 1 more to tune a --sweep")
    if c.seeds > 1000:
        raise UserError(f"--seeds {c.seeds}: at most 1000, each is a run of every arm")
    seeds = [arms[0].config["seed"] + i for i in range(c.seeds)]
    data_dir = Path(arms[0].config["data_dir"])
    shards = [shard for split in ("train", "val") for shard in find_shards(data_dir, split)]
    return Comparison(
        out=Path(c.out),
        arms=arms,
        sweep=sweep,
        values=values,
        tuned=seeds[:tuning],
        judged=seeds[tuning:],
        data=identify(shards),
        planned=len(arms) * (len(values) + c.seeds - tuning),
    )


def read_arms(c: CompareConfig) -> list[Arm]:
    """The base and the others, which have its flags, its data and their own flags."""
    last = [f"--data-dir={c.data_dir}"] if c.data_dir else []
    base = read_arm("base", c.base, QUIET.split(), last)
    last = [f"--data-dir={base.config['data_dir']}"]
    arms = [base]
    for text in c.arm:
        name, colon, flags = text.partition(":")
        if not colon or not re.fullmatch(r"\w[\w.+-]*", name):
            raise UserError(f"--arm {text!r}: expected 'name: flags', the name one plain word")
        if name in [arm.name for arm in arms]:
            raise UserError(f"--arm {text!r}: another arm is called {name}, choose another name")
        arms.append(read_arm(name, flags, base.flags, last))
        ours, theirs = base.config["val_tokens"], arms[-1].config["val_tokens"]
        if ours != theirs:
            raise UserError(f"--arm {text!r}: val_tokens is {theirs}, the base's is {ours}")
    if len(arms) == 1:
        raise UserError('nothing to compare with the base: add --arm "name: flags"')
    return arms


ASK = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv.pop(1))
sys.argv[0] = "train_gpt2.py"
import config
asked = config.parse_command_line(sys.argv[1:])
print(json.dumps([dataclasses.asdict(asked), config.check(asked, 1)]))
"""


def read_arm(name: str, text: str, before: list[str], after: list[str]) -> Arm:
    """An arm from its flags; those in `before` give way to them, those in `after` do not.

    The copy that is to train it says what they mean. Raises UserError for what it refuses.
    """
    try:
        own = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{name}: {text!r} has {str(error).lower()}") from None
    copy = HERE
    if own and own[0].startswith("@"):
        copy = Path(own.pop(0)[1:]).resolve()
    if not (copy / "train_gpt2.py").is_file():
        raise UserError(f"{name}: {copy} is no copy of this repository: it has no train_gpt2.py")
    flags = [*before, *own, *after]
    command = [sys.executable, "-c", ASK, str(copy), *flags, "--resume=auto"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise UserError(f"{name}: train_gpt2.py does not take {text!r}\n{answer.stderr.strip()}")
    config, problems = json.loads(answer.stdout)
    if not config["val_every"]:
        problems.append("val_every is 0: a comparison needs validation losses")
    if problems:
        raise UserError(f"{name}: {'; '.join(problems)}")
    return Arm(name, copy, flags, config, hash_code(copy))


def hash_code(copy: Path) -> str:
    """A hash of all the code that training may run; comments do not count."""
    sha256 = hashlib.sha256()
    others = ["bench", "compare", "fineweb", "plan", "paired", "plots", "runs"]
    for path in [*sorted(copy.glob("*.py")), *sorted(copy.glob("support/*.py"))]:
        if path.stem not in others:
            try:
                sha256.update(ast.dump(ast.parse(path.read_bytes())).encode())
            except SyntaxError as error:
                raise UserError(f"{path}, line {error.lineno}: {error.msg}") from None
    return sha256.hexdigest()


def read_sweep(text: str, arms: list[Arm]) -> tuple[str, list[float]]:
    """'learning_rate=4e-3,8e-3' -> the field of TrainConfig, and its values."""
    if not text:
        return "", []
    name, _, listed = text.partition("=")
    name = name.replace("-", "_")
    kinds = {type(arm.config.get(name)) for arm in arms}
    if kinds not in ({int}, {float}) or name == "seed":
        raise UserError(f"--sweep {text}: train_gpt2.py has no number called {name!r} to tune")
    read = int if int in kinds else float
    try:
        values: list[float] = sorted({read(value) for value in listed.split(",")})
    except ValueError:
        values = [0]
    if not (values[0] > 0 and values[-1] < math.inf):
        raise UserError(f"--sweep {text}: expected values above 0, as in learning_rate=4e-3,8e-3")
    return name, values


# -- one run


def place_run(x: Comparison, arm: Arm, value: float | None, seed: int) -> Run:
    """The run of an arm with a value of the sweep and a seed.

    Its directory ends with a hash of configuration, data, code and PyTorch: others, another run.
    """
    changes: dict = {"seed": seed}
    if value is not None:
        changes[x.sweep] = value
    config = arm.config | changes
    places = ("preset", "log_dir", "data_dir", "resume", "overwrite")
    known = [{name: config[name] for name in config.keys() - places}, x.data, arm.code]
    text = json.dumps([*known, version("torch")], sort_keys=True)
    words = [f"{name}_{changed}" for name, changed in sorted(changes.items())]
    directory = "_".join([*words, hashlib.sha256(text.encode()).hexdigest()[:8]])
    path = x.out / arm.name / directory
    command = [sys.executable, str(arm.copy / "train_gpt2.py"), *arm.flags]
    command += [f"--{name.replace('_', '-')}={changed}" for name, changed in changes.items()]
    command += [f"--log-dir={path}", "--resume", "auto"]
    return Run(" ".join([arm.name, *words]), seed, config["max_steps"], path, command)


def train(x: Comparison, arm: Arm, value: float | None, seed: int) -> dict:
    """Trains a run, or what is left of it -> its outcome. Raises UserError if it fails."""
    run = place_run(x, arm, value, seed)
    outcome = runs.find_outcome(run)
    if outcome is None:
        if hash_code(arm.copy) != arm.code:
            raise UserError(f"{arm.copy} has changed since the start: give the command again")
        outcome = runs.train(run)
    x.took.append(outcome.get("seconds", [0.0])[-1])
    left = timedelta(seconds=round(statistics.fmean(x.took) * (x.planned - len(x.took))))
    loss = "diverged" if outcome["val_loss"] is None else f"{outcome['val_loss']:.4f}"
    say(f"{len(x.took)} of {x.planned} | {run.name} | {loss} | left {left}")
    return outcome


# -- all runs


def tune(x: Comparison, arm: Arm) -> None:
    """Tries the values of the sweep, then more until the best is not at an end."""
    missing = x.values
    while missing:
        for value in missing:
            arm.tried[value] = try_value(x, arm, value)
        arm.value = min(arm.tried, key=lambda value: arm.tried[value])
        if arm.tried[arm.value] == math.inf:
            raise UserError(f"{arm.name}: no {x.sweep} of {list(arm.tried)} gave a loss, try lower")
        enough = len(arm.tried) >= len(x.values) + MOST
        missing = [] if enough else widen(sorted(arm.tried), arm.value)
        x.planned += len(missing)


def try_value(x: Comparison, arm: Arm, value: float) -> float:
    """The loss with a value of the sweep; infinity if it diverged or cannot be trained."""
    try:
        loss = train(x, arm, value, x.tuned[0])["val_loss"]
    except UserError as error:
        if value in x.values:
            raise
        say(f"{error}")  # a value beyond those asked for may be one that cannot be
        x.planned -= 1
        return math.inf
    return math.inf if loss is None else loss


def widen(tried: list[float], best: float) -> list[float]:
    """What to try next if the best is at an end: as far from it as its neighbour is, by ratio.

    >>> widen([1.0, 2.0, 4.0], 4.0), widen([1.0, 2.0, 4.0], 2.0), widen([3], 3)
    ([8.0], [], [2, 6])
    """
    more: list[float] = []
    if len(tried) == 1:
        more = [best / 2, best * 2]
    elif best == tried[0]:
        more = [best**2 / tried[1]]
    elif best == tried[-1]:
        more = [best**2 / tried[-2]]
    more = [round(v) if isinstance(best, int) else float(f"{v:.6g}") for v in more]
    return [value for value in more if value > 0 and value not in tried]


def compare(x: Comparison) -> dict:
    """Trains all that is missing -> what compare.json holds."""
    for arm in x.arms if x.sweep else []:
        tune(x, arm)
    judged: dict[str, list[dict]] = {arm.name: [] for arm in x.arms}
    for seed in x.judged:  # the arms in turn: a slow hour is one for all of them
        for arm in x.arms:
            judged[arm.name].append(train(x, arm, arm.value, seed))
    first = read_run(judged["base"][0]["directory"]).records[0]
    names = ("total_batch_size", "max_steps", "val_tokens", "n_layer", "n_embd", "sequence_length")
    return dict(
        command=f"python compare.py {shlex.join(sys.argv[1:])}",
        sweep=x.sweep,
        tuned=x.tuned,
        judged=x.judged,
        about={name: first[name] for name in ("git", "versions", "device", "dtype")},
        base={name: x.arms[0].config[name] for name in names},
        arms=[describe_arm(arm, judged[arm.name], judged["base"]) for arm in x.arms],
    )


def describe_arm(arm: Arm, judged: list[dict], base: list[dict]) -> dict:
    tried = [[value, loss if loss < math.inf else None] for value, loss in arm.tried.items()]
    return dict(
        name=arm.name,
        copy=str(arm.copy) if arm.copy != HERE else "",
        flags=shlex.join(arm.flags),
        value=arm.value,
        tried=sorted(tried),
        runs=judged,
        against={} if judged is base else paired.compare_pairs(arm.name, judged, base),
    )


# -- the command


def join_values(args: list[str]) -> list[str]:
    """--base "--preset x" -> "--base=--preset x": these values may begin with hyphens."""
    joined: list[str] = []
    for arg in args:
        if joined and joined[-1] in ("--base", "--arm"):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


def main() -> None:
    c = read_flags(CompareConfig, args=join_values(sys.argv[1:]))
    try:
        x = read_comparison(c)
    except UserError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result = compare(x)
    report = paired.write_report(result)
    write_whole(x.out / "compare.md", report.encode())
    write_whole(x.out / "compare.json", json.dumps(result, indent=1).encode())
    plot_comparison(result).savefig(x.out / "compare.png")
    say(f"\n{report}\nkept as {x.out}/compare.md, compare.json and compare.png")


if __name__ == "__main__":
    run_script(main)

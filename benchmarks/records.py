"""The race of two cores: measures an entry of records/ beside the record to beat, or checks it.

python -m benchmarks.records                          prints the table of records/README.md
python -m benchmarks.records --measure records/mine   -> records/mine/record.json
python -m benchmarks.records --check records/mine     -> log/records/mine/check.json

An entry is a revision of this repository, the changes in its change.diff, and flags. It takes turns
with the record: short runs say how many updates fit the time, then each seed trains both. No run
finds the held-out text; transformers opens the checkpoints, and this program scores them. To
continue, repeat the command.
"""

import hashlib
import json
import math
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import peers
from benchmarks.race import find_paces, fit, pace, write_tokens
from compare import ask, compare_pairs, name_machine
from config import idle_settings
from support.base.console import run_script, say
from support.base.errors import UserError, reading
from support.base.files import write_whole
from support.base.flags import Positive, Range, String, drop_flags, flag_of, parse_flags
from support.base.programs import run_program
from support.run.log import METRICS, end_of, read_metrics
from support.run.source_code import HERE
from support.show.comparison import show_interval, show_loss
from support.text.sources import TINYSHAKESPEARE, TRAINING_CHARS
from support.text.token_files import find_shards
from support.text.tokenizer import gpt2, tokenizer_of_data

RECORDS = HERE / "records"
OUT = Path("log/records")
TRIAL = 160  # updates of a short run
SCORES = 8  # of a whole run
CLOCKS = 1.15  # times as long as the record may an entry take by our clock: paces are not exact


@dataclass(frozen=True)
class RecordsConfig:
    """Measures or checks an entry of the race of two cores. Without either, prints the table."""

    measure: String = ""  # an entry's folder: trains it and the record to beat with seeds 1, 2, …
    check: String = ""  # a measured entry's folder: trains both with seeds that are drawn now
    # more of them show smaller gains; 0 only writes down what is to be checked
    seeds: Annotated[int, Range(0, 100)] = 4
    # of an entry that is measured:
    revision: str = "HEAD"  # what its change.diff is applied to
    flags: str = "--preset quickstart"  # of train_gpt2.py
    data: str = "--vocab-size 1024"  # of fineweb.py
    beside: String = ""  # the entry to beat; by default the newest one before it that holds
    minutes: Positive = 3.0  # of training


@dataclass(frozen=True)
class Entry:
    """What is trained."""

    name: str
    revision: str
    flags: str
    data: str
    change: str  # the SHA-256 of its change.diff; empty if there is none


def define(config: RecordsConfig, folder: Path, record: dict | None = None) -> dict[str, Any]:
    """What is trained beside what, for how long. record: of an entry that was measured."""
    known = record["entry"] if record else vars(config)
    revision = git(HERE, "rev-parse", "--short", f"{known['revision']}^{{commit}}").strip()
    entry = Entry(folder.name, revision, known["flags"], known["data"], hash_change(folder))
    if record:  # else the revision has code that no reader of the diff sees
        git(HERE, "merge-base", "--is-ancestor", revision, "HEAD")
    if record and entry.change != known["change"]:
        problem = f"{folder}: change.diff is not the one that record.json was made with"
        raise UserError(f"{problem}: delete record.json, and measure it again")
    earlier = {name: found for name, found in find_records().items() if name < folder.name}
    verdicts = {name: judge(found)[0] for name, found in earlier.items()}
    waiting = [name for name, verdict in verdicts.items() if verdict == "not checked"]
    holding = [name for name, verdict in verdicts.items() if verdict in ("the first", "holds")]
    beside = config.beside or (holding[-1] if holding else entry.name)
    if waiting and not config.beside:
        problem = f"{waiting[0]} is not checked"
        if record:
            raise UserError(f"{problem}: check it first, or choose --beside")
        say(f"{problem}, so this is beside {beside}, the newest entry that holds")
    if beside not in {*earlier, entry.name}:
        raise UserError(f"--beside {beside}: expected one of {', '.join(earlier)}")
    opponent = earlier[beside]["entry"] if beside in earlier else asdict(entry)
    return dict(entry=asdict(entry), beside=opponent, minutes=config.minutes)


def hash_change(folder: Path) -> str:
    change = folder / "change.diff"
    return hashlib.sha256(change.read_bytes()).hexdigest() if change.exists() else ""


def find_records() -> dict[str, dict]:
    """Each entry's check by its name, in order; without one no runs: an author's do not count."""
    found = {}
    for file in sorted(RECORDS.glob("*/record.json")):
        check = file.with_name("check.json")
        defined = json.loads(file.read_bytes()) | dict(runs=[])
        found[file.parent.name] = json.loads(check.read_bytes()) if check.exists() else defined
    return found


# -- what no entry does for itself: its copy, its text, its clock, its scores


def git(clone: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(clone), *args], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"git {shlex.join(args)}: {done.stderr.strip() or 'no'}")
    return done.stdout


def prepare(entry: Entry, change: Path, place: Path, scored: Path) -> None:
    """Makes the entry's copy and, with its own code, its tokens. What it is scored on goes apart.

    Raises UserError if the tokens are not Tiny Shakespeare's as nanoGPT splits it, or if the
    vocabulary knows more than the text for training.
    """
    code, data = place / "code", place / "data"
    git(HERE, "clone", "--quiet", "--shared", "--no-checkout", ".", str(code))
    git(code, "checkout", "--quiet", entry.revision)
    if entry.change:
        git(code, "apply", str(change))
    shutil.rmtree(code / ".git")  # it has the text, too
    flags = [*shlex.split(entry.data), "--source=tinyshakespeare", f"--data-dir={data}"]
    last = run_program([sys.executable, f"{code}/fineweb.py", *flags], OUT / entry.name)
    with reading(data, f"fineweb.py ended with: {last}"):
        tokenizer = tokenizer_of_data(str(data))
        splits = [find_shards(data, split) for split in ("train", "val")]
        tokens = [np.concatenate([p for s in shards for p in s.read_all()]) for shards in splits]
    read, held_out = (
        tokenizer.encoding.decode_bytes(part[part != tokenizer.eot].tolist()) for part in tokens
    )
    text = Path(TINYSHAKESPEARE).read_bytes()
    if (read, held_out) != (text[:TRAINING_CHARS], text[TRAINING_CHARS:]):
        raise UserError(f"{entry.name} does not hold: its text is another, or held out elsewhere")
    foreign = [token for token in tokenizer.ranks if len(token) > 1 and token not in read]
    if foreign and tokenizer is not gpt2():
        problem = f"its vocabulary has {foreign[0]!r}, which is not in the text for training"
        raise UserError(f"{entry.name} does not hold: {problem}")
    write_tokens(scored, tokens, tokenizer.sizes.tolist())
    np.save(splits[1][0].path, tokens[0][: len(tokens[1])])  # text for training, in its place
    (code / "assets" / "tinyshakespeare.txt").unlink()


def train(entry: Entry, place: Path, updates: int, seed: int, every: int) -> tuple[float, list]:
    """Trains for some updates, with a checkpoint after `every` of them, if that is not 0.

    Returns the seconds of the program by our clock, and those until the end of each update by its;
    none if the run diverged.
    """
    run = place / "run"  # a copy, in which an earlier run has left nothing
    shutil.rmtree(run, ignore_errors=True)
    for part in ("code", "data"):
        shutil.copytree(place / part, run / part)
    flags = f"""--data-dir={run}/data --log-dir={run}/log --device=cpu --init-from=scratch
        --resume=none --seed={seed} --max-steps={updates} --checkpoint-every={every}
        --checkpoint-minutes=0 --val-every=0 --sample-every=0 --hellaswag-every=0"""
    ours = [*flags.split(), "--keep-checkpoints=99" if every else "--warmup-steps=1"]
    theirs = shlex.split(entry.flags)
    settings, _ = ask(run / "code", [*theirs, *ours])
    theirs = drop_flags(theirs, *map(flag_of, idle_settings(settings)))  # of evaluations
    command = [sys.executable, f"{run}/code/train_gpt2.py", *theirs, *ours]
    began = time.perf_counter()
    # no compiled code of earlier runs
    last = run_program(command, OUT / entry.name, {"TORCHINDUCTOR_CACHE_DIR": f"{run}/cache"})
    took = time.perf_counter() - began
    records = read_metrics(run / "log" / METRICS)
    if not (end := end_of(records)):
        raise UserError(
            f"{entry.name} ended early: {last} (all of it: {OUT / entry.name}/output.txt)"
        )
    ms = [record["ms"] for record in records if record["type"] == "train" and end == "end"]
    return took, (np.cumsum(ms) / 1000).tolist()


@torch.no_grad()
def score(checkpoint: Path, scored: Path) -> float:
    """Bits per byte of the held-out text, by transformers' GPT-2."""
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with reading(checkpoint, "an entry's checkpoints must open in transformers"):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    if type(model) is not GPT2LMHeadModel:
        raise UserError(f"{checkpoint} does not hold: it is a {type(model).__name__}, no GPT-2")
    T = model.config.n_positions
    idx = torch.arange(T)[None] % model.config.vocab_size
    later = idx.clone()
    later[0, -1] = 0 if idx[0, -1] else 1
    sees_it = not torch.allclose(model(idx).logits[:, :-1], model(later).logits[:, :-1], atol=1e-4)
    if T > 1024 or sees_it:  # config.json may say "is_causal": false
        problem = "it sees the tokens that it predicts" if sees_it else f"{T} positions"
        raise UserError(f"{checkpoint} does not hold: {problem}, no GPT-2")

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten(), ignore_index=-1)

    return peers.score(loss, scored, T)


# -- measuring and judging


def measure(defined: dict[str, Any], seeds: list[int], file: Path) -> dict[str, Any]:
    """Trains what is missing. The file has all runs so far, and their seeds."""
    result: dict = defined | dict(seeds=[], paces={}, runs=[], machine=name_machine("cpu"))
    if file.exists():
        result = json.loads(file.read_bytes())
        if result | defined != result:
            raise UserError(f"{file} is of another entry or record: delete it to measure again")
    result["seeds"] += seeds[len(result["seeds"]) :]
    sides = {side["name"]: Entry(**side) for side in (defined["beside"], defined["entry"])}
    done = [(run["name"], run["seed"]) for run in result["runs"]]
    turns = [(name, seed) for seed in result["seeds"] for name in sides]
    if missing := [turn for turn in turns if turn not in done]:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as apart:
            places = {name: Path(folder, name) for name in sides}
            for name, side in sides.items():
                prepare(side, RECORDS / name / "change.diff", places[name], Path(apart, name))
            if not result["paces"]:
                trials = {name: partial(try_out, sides[name], places[name]) for name in sides}
                result["paces"] = find_paces(trials)
            for name, seed in missing:
                update, start = np.median(result["paces"][name], axis=0)
                updates = fit(defined["minutes"], update, start, SCORES)
                run, points = train_and_score(
                    sides[name], places[name], Path(apart, name), updates, seed
                )
                # whole runs count, too, because the machine's speed changes
                result["paces"][name] += [pace(points)] if points else []
                result["runs"].append(dict(name=name, seed=seed) | run)
                write_whole(file, json.dumps(result, indent=1).encode())
                say(f"{name}, seed {seed}: {show_loss(run['val_loss'])} bits per byte")
    write_whole(file, json.dumps(result, indent=1).encode())
    return result


def try_out(side: Entry, place: Path) -> list[peers.Point]:
    """The first and the last point of a short run, for its pace."""
    _, seconds = train(side, place, TRIAL, 0, every=0)
    return ends_of(seconds)


def ends_of(seconds: list[float]) -> list[peers.Point]:
    return [(1, seconds[0], 0.0), (len(seconds), seconds[-1], 0.0)]


def train_and_score(
    side: Entry, place: Path, scored: Path, updates: int, seed: int
) -> tuple[dict, list[peers.Point]]:
    """Trains for some updates, a multiple of SCORES.

    Returns what compare_pairs wants and our clock's time, and the points of its pace; none of them
    if it diverged.
    """
    every = updates // SCORES
    took, seconds = train(side, place, updates, seed, every)
    if not seconds:
        return dict(took=took, tokens=[], seconds=[], losses=[], val_loss=None), []
    steps = list(range(every, updates + 1, every))
    bits = [score(place / "run" / "log" / f"ckpt_{step:06d}", scored) for step in steps]
    at = [seconds[step - 1] for step in steps]
    run = dict(took=took, tokens=steps, seconds=at, losses=bits, val_loss=bits[-1])
    return run, ends_of(seconds)


def judge(record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Whether an entry holds, and how it compares with the record that it beats."""
    own, base = (
        [run for run in record["runs"] if run["name"] == record[side]["name"]]
        for side in ("entry", "beside")
    )
    if record["entry"] == record["beside"]:
        return "the first", {}
    if len(own) < 2 or len(own) != len(base):
        return "not checked", {}
    if any(run["val_loss"] is None for run in own):
        return "does not hold: a run diverged", {}
    found = compare_pairs(record["entry"]["name"], own, base)
    found["clocks"] = sum(run["took"] for run in own) / sum(run["took"] for run in base)
    reached = [math.inf if x is None else x for x in found["seconds"]]
    found["minutes"] = record["minutes"] * np.median(reached)
    found["bits"] = np.mean([run["val_loss"] for run in own])
    found["beside"] = np.mean([run["val_loss"] for run in base])
    found["by"] = show_interval(-found["mean"], found["half"])
    if len({run["val_loss"] for run in own}) < len(own):
        return "does not hold: it ignores the seed", found
    if found["clocks"] > CLOCKS:
        return f"does not hold: its runs take {found['clocks']:.2f} × as long", found
    if found["mean"] > found["half"]:
        return "does not hold: it ends higher", found
    return "holds" if -found["mean"] > found["half"] else "not shown", found


def describe(record: dict[str, Any]) -> str:
    """What `measure` found."""
    verdict, found = judge(record)
    name, base = record["entry"]["name"], record["beside"]["name"]
    if not found:
        return f"{name}: {verdict}"
    side = "below" if found["mean"] < 0 else "above"
    by = show_interval(abs(found["mean"]), found["half"])
    return (
        f"{name}: {verdict}. It ends at {found['bits']:.3f} bits per byte, {by} {side} {base}, and "
        f"has {base}'s last loss {show_minutes(found['minutes'])}. By our clock, its runs take "
        f"{found['clocks']:.2f} times as long."
    )


def show_minutes(minutes: float) -> str:
    return "never" if math.isinf(minutes) else f"after {minutes:.2f} min"


def format_table() -> str:
    """A row for each entry, the first one first, by its check."""
    heads = ["entry", "bits per byte", "nats per character", "the record's bits", "below it"]
    heads += ["has its last loss", "verdict"]
    lines = [f"| {' | '.join(heads)} |", "|---|---:|---:|---:|---:|---:|---|"]
    for name, record in find_records().items():
        verdict, found = judge(record)
        cells = [""] * 5
        if found:
            bits = [found["bits"], found["bits"] * math.log(2), found["beside"]]
            reached = show_minutes(found["minutes"])
            cells = [*(f"{x:.3f}" for x in bits), found["by"], reached]
        lines.append(f"| [{name}]({name}/) | {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines)


def main(args: list[str]) -> None:
    config = parse_flags(RecordsConfig, args)
    if hasattr(os, "sched_setaffinity"):  # the race is of two cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    seeds = list(range(1, config.seeds + 1))
    if config.check:
        folder = RECORDS / Path(config.check).name
        drawn = [secrets.randbelow(10**6) for _ in seeds]
        with reading(folder / "record.json", "measure it first: --measure"):
            record = json.loads((folder / "record.json").read_bytes())
        defined = define(config, folder, record)
        found = measure(defined, drawn, OUT / folder.name / "check.json")
    elif config.measure:
        folder = RECORDS / Path(config.measure).name
        file = folder / "record.json"
        if file.exists() and config.revision == "HEAD":  # which has moved, if one has committed
            config = replace(config, revision=json.loads(file.read_bytes())["entry"]["revision"])
        found = measure(define(config, folder), seeds, file)
    else:
        print(format_table())
        return
    print(describe(found))


if __name__ == "__main__":
    run_script(main)

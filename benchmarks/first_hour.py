"""The first hour on a GPU: what no CPU can show, in parts that each stand alone.

make gpu                 all of them; without a GPU the same at a tiny size, in under five minutes
make gpu PART=ladder     one of them, made to take under 7 minutes on one H100

A part leaves its section, its numbers and its picture in benchmarks/{device}, whose README.md is
all sections that are there. A part that fails leaves what it has measured until then and the last
lines of what it printed, and the others go on. Nothing here needs a network.
"""

import inspect
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `python benchmarks/first_hour.py`
from benchmarks.results import describe_result, format_table, read_result
from model import GPT, GPTConfig
from support.checkpoint import path_of
from support.common import UserError, hash_file, read_flags, run_script
from support.distributed import World
from support.fitting import parts_of_memory
from support.records import read_metrics
from support.report import describe_run

GOAL = "500,000 tokens/s or more for the 124M at T=1024 on one H100, 43% of its peak"
STEPS = 20  # of a training run
SAVED = 10  # the step of its checkpoint; it is killed two steps later
# without a GPU
TINY_BENCH = """--model tiny --batch-size 2 --sequence-length 16 --rounds 1 --turn 0 --no-compile
    --examples 8"""
TINY_TRAINING = """--n-layer 2 --n-head 2 --n-embd 64 --sequence-length 64 --batch-size 4
    --total-batch-size 512 --val-tokens 512 --no-compile --dtype float32"""


@dataclass
class HourConfig:
    """Measure what only a GPU can show, and write the record."""

    # -- what: What is done, with what, and where the record goes.
    part: Literal["all", "tests", "ladder", "batch", "paths", "scaling", "training"] = "all"
    device: str = "auto"  # auto | cuda | cpu, where everything is tiny
    minutes: float = 6.5  # that a part may take; what is not done then has failed
    data_dir: str = ""  # shards to train on; empty = edu_fineweb10B, else the standard library
    log_dir: str = "log/first_hour"  # logs and checkpoints of the training runs
    out: str = "benchmarks"  # the record goes to OUT/{device}


class Failed(Exception):
    """What a part has found to be wrong, with the last lines of what the command printed."""


class Hour:
    """What the parts share: the device, where the record goes, and how a command is run."""

    def __init__(self, config: HourConfig):
        self.config = config
        self.world = World(config.device)
        self.device = self.world.device.type
        self.tiny = self.device != "cuda"
        self.about = describe_run(config, self.world, torch.float32, batch_size=0)
        self.name = self.about["device"]["name"]
        self.folder = Path(config.out) / re.sub(r"\W+", "-", self.name).strip("-")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begin("")

    def begin(self, part: str) -> None:
        """Begins a part: its name, its clock, the commands it has run."""
        self.part = part
        self.began = time.monotonic()
        self.ends = self.began + 60 * self.config.minutes
        self.commands: list[str] = []

    def run(self, *arguments, kill_at: str = "") -> list[str]:
        """Runs a Python command, shows what it prints -> the last lines.

        kill_at: when a line begins with it, the command is killed as by `kill -9`. Raises Failed
        if it ends otherwise, or is not done in the part's time.
        """
        command = ["python", *map(str, arguments)]
        self.commands.append(shlex.join(command))
        print(f"\n> {self.commands[-1]}", flush=True)
        process = subprocess.Popen(
            [sys.executable, *command[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that it is killed with all that it has started
        )
        clock = threading.Timer(self.ends - time.monotonic(), kill, [process])
        clock.start()
        last: deque[str] = deque(maxlen=15)
        killed = False
        try:
            for line in process.stdout or []:
                print(line, end="", flush=True)
                last.append(line.rstrip()[:300])
                if kill_at and line.startswith(kill_at):
                    kill(process)
                    killed = True
            code = process.wait()
        finally:
            clock.cancel()
            kill(process)
        if killed or (code == 0 and not kill_at):
            return list(last)
        after = f"{time.monotonic() - self.began:.0f} s of {60 * self.config.minutes:.0f}"
        how = f"`{self.commands[-1]}` ended with {code} after {after}; its last lines:"
        raise Failed(f"{how}\n\n{block(last)}")


def kill(process: subprocess.Popen) -> None:
    """Ends a process and all that it has started, at this moment."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# -- the parts: each yields the paragraphs of its section


def run_tests(hour: Hour) -> Iterator[str]:
    """The tests that need a GPU; without one they skip themselves."""
    yield block(hour.run("-m", "pytest", "-p", "no:cacheprovider", "tests/test_cuda.py"))


def climb_ladder(hour: Hour) -> Iterator[str]:
    """Each technique on top of those before it; then transformers' GPT-2 beside this one."""
    yield from measure(hour, "--ladder", "--against", "hf")


def sweep_batch(hour: Hour) -> Iterator[str]:
    """Micro-batches of 1, 2, 4, … until memory ends; the memory of each, measured and planned.

    On a CPU the measured one is that of the whole process, PyTorch's libraries included.
    """
    yield from measure(hour, "--sweep", "batch", "--max-batch", 4 if hour.tiny else 64)
    result = read_result(hour.folder / "batch.json")
    dtype = getattr(torch, result["dtype"])
    lines = ["| B | measured GB | planned GB | planned ÷ measured |", "|--:|--:|--:|--:|"]
    for row in result["benchmarks"]["sweep"]["rows"]:
        if "error" not in row:
            measured = row["memory_gb"]
            planned = plan_bytes(row["options"], hour.world, dtype) / 1e9
            B = row["options"]["B"]
            lines.append(f"| {B} | {measured:.2f} | {planned:.2f} | {planned / measured:.2f} |")
    yield "\n".join(lines)


def plan_bytes(options: dict, world: World, dtype: torch.dtype) -> int:
    """Bytes that the step of bench.py with these options is expected to need."""
    T = options["T"]
    with torch.device("meta"):
        raw = GPT(GPTConfig(block_size=T, **options["size"]))
    return sum(parts_of_memory(raw, options["B"], T, world, dtype).values())


def follow_paths(hour: Hour) -> Iterator[str]:
    """Generation, validation, HellaSwag, attention: each beside its plain version and its limit."""
    examples = ["--hellaswag-path", find_examples(hour), "--examples", 200]
    yield from measure(hour, "--generate", "--validation", "--hellaswag", "--attention", *examples)


def find_examples(hour: Hour) -> Path:
    """HellaSwag where it is at hand; else made-up examples of its size: only speed is measured."""
    for place in ("hellaswag/hellaswag_val.jsonl", "../shared/data/hellaswag_val_1000.jsonl"):
        if Path(place).exists():
            return Path(place)
    lines = []
    for i in range(200):
        endings = [" and then he takes the next one" * (1 + (i + j) % 4) for j in range(4)]
        context = "A man stands on a roof and takes off the old tiles." * (1 + i % 6)
        lines.append(json.dumps(dict(ind=i, ctx=context, endings=endings, label=i % 4)))
    path = Path(hour.config.log_dir) / "made_up_examples.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def scale_up(hour: Hour) -> Iterator[str]:
    """The same micro-batch on each of 1, 2, 4, 8 GPUs (without one, processes on this CPU)."""
    devices = (os.cpu_count() or 1) if hour.tiny else torch.cuda.device_count()
    if devices > 1:
        yield from measure(hour, "--scaling")
    else:
        yield "There is one device: nothing to scale."


def measure(hour: Hour, *flags) -> Iterator[str]:
    """Runs bench.py; yields its tables and its plot, also those of a run that has failed."""
    out = hour.folder / hour.part
    for suffix in (".json", ".png"):
        out.with_suffix(suffix).unlink(missing_ok=True)
    tiny = shlex.split(TINY_BENCH) if hour.tiny else []
    try:
        hour.run("bench.py", *flags, *tiny, "--device", hour.device, "--out", out)
    finally:  # what was measured before it failed counts, too
        if out.with_suffix(".json").exists():
            yield from show_tables(hour, read_result(out.with_suffix(".json")))
        if out.with_suffix(".png").exists():
            yield f"![{hour.part}]({hour.part}.png)"


def show_tables(hour: Hour, result: dict) -> Iterator[str]:
    """The tables of a result of bench.py; the speed of the training step beside the goal."""
    yield block([describe_result(result)])
    for name, found in result["benchmarks"].items():
        notes = [f"- {note}" for note in found["notes"]]
        yield "\n".join([f"### {name}\n", format_table(found["rows"]), "", *notes])
        speeds = {row["median"]: row["name"] for row in found["rows"] if "median" in row}
        if speeds and name in ("ladder", "sweep"):
            best = max(speeds)
            yield f"Fastest: {best:,.0f} tokens/s ({speeds[best]}). {recall_goal(hour)}"


def train(hour: Hour) -> Iterator[str]:
    """The 124M at its own batch of 0.5M tokens: free, then bit for bit, killed and resumed."""
    flags = f"--device {hour.device} --max-steps {STEPS} --warmup-steps 5 --val-every {STEPS} "
    flags += f"--val-tokens {2**20} --hellaswag-every 0 --sample-every 0 --checkpoint-every {SAVED}"
    if hour.tiny:
        flags += f" {TINY_TRAINING}"
    start = ["train_gpt2.py", "--data-dir", find_shards(hour), *shlex.split(flags)]
    free, whole, cut = (Path(hour.config.log_dir) / name for name in ("free", "whole", "cut"))
    hour.run(*start, "--log-dir", free, "--overwrite")
    shutil.copy(free / "loss.png", hour.folder / "training.png")
    shutil.copy(free / "metrics.jsonl", hour.folder / "training.jsonl")
    yield f"{describe_training(free)} {recall_goal(hour)}\n\n![losses](training.png)"

    start += ["--deterministic"]
    hour.run(*start, "--log-dir", whole, "--overwrite")
    yield f"With `--deterministic`: {describe_training(whole)}"
    late = f"step {SAVED + 2:5d} | loss"
    hour.run(*start, "--log-dir", cut, "--overwrite", kill_at=late)
    hour.run(*start, "--log-dir", cut, "--resume", "auto")
    yield compare_runs(whole, cut)


def find_shards(hour: Hour) -> str:
    """The directory of shards to train on; if there is none, the standard library becomes one."""
    if hour.config.data_dir:
        return hour.config.data_dir
    for place in ("edu_fineweb10B", "data/stdlib"):
        if list(Path(place).glob("*_train_*")):
            return place
    hour.run("fineweb.py", "--source", "stdlib", "--data-dir", "data/stdlib")
    return "data/stdlib"


def read_steps(log_dir: Path) -> list[dict]:
    records = read_metrics(log_dir / "metrics.jsonl")
    return [record for record in records if record["type"] == "train"]


def describe_training(log_dir: Path) -> str:
    """Micro-batch, speed, memory and losses of a run of training."""
    about = read_metrics(log_dir / "metrics.jsonl")[0]
    steps = read_steps(log_dir)
    timed = steps[2:]  # the first compiles
    rate = statistics.median(step["tokens_per_sec"] for step in timed)
    mfu = statistics.median(step["mfu"] for step in timed)
    return (
        f"{rate:,.0f} tokens/s (median of {len(timed)} steps; MFU {mfu:.1%}), micro-batch "
        f"{about['batch_size']} of {about['config']['total_batch_size']:,} tokens, peak memory "
        f"{steps[-1]['memory'] / 1e9:.2f} GB, training loss {steps[0]['loss']:.4f} to "
        f"{steps[-1]['loss']:.4f}."
    )


def recall_goal(hour: Hour) -> str:
    here = "a tiny model, not to be compared with it" if hour.tiny else hour.name
    return f"The goal is {GOAL}; here: {here}."


def compare_runs(whole: Path, cut: Path) -> str:
    """Says that the run that was killed is the run left alone. Raises Failed if it is not."""
    runs = [[(r["step"], r["loss"], r["norm"]) for r in read_steps(run)] for run in (whole, cut)]
    weights = [hash_file(path_of(run, STEPS) / "model.safetensors") for run in (whole, cut)]
    if runs[0] != runs[1] or weights[0] != weights[1]:
        pairs = [f"{a} {b}" for a, b in zip(*runs, strict=False) if a != b]
        differing = f"\n\n{block(pairs)}" if pairs else "only the final weights differ"
        raise Failed(f"The resumed run is another run; step, loss and norm of both: {differing}")
    return (
        f"Killed with `kill -9` two steps after the checkpoint of step {SAVED}, and resumed: the "
        f"losses and gradient norms of all {len(runs[0])} steps and the final weights are, bit "
        "for bit, those of the run left alone."
    )


PARTS: dict[str, Callable[[Hour], Iterator[str]]] = {
    "tests": run_tests,
    "ladder": climb_ladder,
    "batch": sweep_batch,
    "paths": follow_paths,
    "scaling": scale_up,
    "training": train,
}


# -- the record


def do_part(hour: Hour, part: str) -> bool:
    """Does one part, writes its section and the page of all -> whether it went well."""
    hour.begin(part)
    paragraphs = []
    problem = ""
    try:
        for paragraph in PARTS[part](hour):
            paragraphs.append(paragraph)
    except Exception as error:  # whatever it is: it is told, and the other parts go on
        traceback.print_exc()
        kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
        problem = f"**Failed.** {kind}{error}"
    seconds = time.monotonic() - hour.began
    head = [f"## {part}", inspect.getdoc(PARTS[part]) or "", block(hour.commands)]
    head.append(f"{time.strftime('%Y-%m-%d %H:%M')}, {seconds:.0f} s; {list_versions(hour)}.")
    section = "\n\n".join([*head, *paragraphs, problem]).rstrip() + "\n"
    (hour.folder / f"{part}.md").write_text(section)
    write_page(hour)
    return not problem


def write_page(hour: Hour) -> None:
    """README.md: the goal, then the section of each part that has been done here, in order."""
    page = [f"# The first hour on {hour.name}\n\nGoal: {GOAL}.\n"]
    for part in PARTS:
        section = hour.folder / f"{part}.md"
        missing = f"## {part}\n\nNot done yet: `make gpu PART={part}`.\n"
        page.append(section.read_text() if section.exists() else missing)
    (hour.folder / "README.md").write_text("\n".join(page))


def list_versions(hour: Hour) -> str:
    """What was measured: revision, versions, and what the driver says of the GPU."""
    versions = hour.about["versions"] | {"revision": hour.about["git"] or "unknown"}
    found = [f"{name} {value}" for name, value in versions.items()]
    if not hour.tiny and shutil.which("nvidia-smi"):
        asked = "name,driver_version,memory.total,power.limit,clocks.max.sm"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        found += subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return "; ".join(found)


def block(lines) -> str:
    return "\n".join(["```", *lines, "```"])


def main() -> None:
    config = read_flags(HourConfig)
    hour = Hour(config)
    parts = list(PARTS) if config.part == "all" else [config.part]
    failed = [part for part in parts if not do_part(hour, part)]
    print(f"\nthe record: {hour.folder / 'README.md'}")
    if failed:
        raise UserError(f"failed: {', '.join(failed)}; README.md there has their last lines")


if __name__ == "__main__":
    run_script(main)

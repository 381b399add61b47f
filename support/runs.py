"""A run of train_gpt2.py in a process of its own, which may be there already, whole or begun."""

import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from support.common import UserError, say
from support.records import read_run

OUTPUT = "output.txt"  # what a run printed
PAUSE = 5.0  # seconds between two looks at it


@dataclass
class Run:
    """What is to be trained; its directory is known by all that makes it this run."""

    name: str
    seed: int
    updates: int
    directory: Path
    command: list[str]  # goes on where it was interrupted


def find_outcome(run: Run) -> dict | None:
    """What support/paired.py calls a run, if it is finished; else None.

    One that another process still trains, as a killed comparison leaves it, is waited for.
    """
    run.directory.mkdir(parents=True, exist_ok=True)
    wait_for_others(run)
    outcome: dict = dict(seed=run.seed, directory=str(run.directory))
    if re.search(r"step \d+: the (validation )?loss is", last_line(run)):
        return outcome | dict(val_loss=None)
    if not (run.directory / "log.txt").exists():
        return None
    logged = read_run(run.directory)
    records = [record for record in logged.records if record["type"] == "val"]
    steps = [record["step"] for record in records]
    if not steps or steps[-1] < run.updates:
        return None
    losses = [record["val_loss"] for record in records]  # log.txt has four digits only
    tokens = logged.place(steps, "tokens").tolist()
    seconds = logged.place(steps, "time").tolist()
    return outcome | dict(val_loss=losses[-1], losses=losses, tokens=tokens, seconds=seconds)


def wait_for_others(run: Run) -> None:
    """Waits while another process trains it."""
    from filelock import FileLock, Timeout

    lock = FileLock(run.directory / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"{run.name}: another process trains it, waiting for its end")
        lock.acquire()
    except NotImplementedError:  # a file system without locks
        return
    lock.release()


def last_line(run: Run) -> str:
    """What a run printed last: if it failed, why."""
    output = run.directory / OUTPUT
    lines = output.read_text(errors="replace").split("\n") if output.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "")


def train(run: Run) -> dict:
    """Trains a run, or what is left of it -> its outcome. Raises UserError if it fails.

    Who interrupts this interrupts the run, which saves what it has.
    """
    process = start(run)
    try:
        while process.poll() is None:
            show(f"{run.name} | {last_line(run)}")
            with suppress(subprocess.TimeoutExpired):
                process.wait(PAUSE)
    except BaseException:
        process.terminate()
        process.wait()
        say(f"{run.name}: interrupted; the same command goes on with it")
        raise
    show("")
    outcome = find_outcome(run)
    if outcome is None:
        raise UserError(f"{run.name} has not ended: {last_line(run)} ({run.directory / OUTPUT})")
    for path in run.directory.glob("ckpt_*"):
        if not path.name.endswith(f"_{run.updates:06d}"):  # it was only to go on from
            shutil.rmtree(path)
    return outcome


def start(run: Run) -> subprocess.Popen:
    with open(run.directory / OUTPUT, "ab") as output:
        return subprocess.Popen(run.command, stdout=output, stderr=subprocess.STDOUT)


def show(text: str) -> None:
    """A line that the next one writes over, where somebody watches a terminal."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"{text[:width]}\x1b[K", end="\r", file=sys.stderr, flush=True)

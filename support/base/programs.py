"""Runs other programs: as many at once as there are places for them."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.base.console import counted
from support.base.errors import UserError, writing
from support.base.process import usable_cores

Program = tuple[list[str], Path]  # a command, and the directory of its output.txt


def find_places(jobs: int, gpus: int) -> list[dict[str, str]]:
    """The environment of each of so many programs: a GPU, or its share of the cores."""
    if jobs == 1:
        return [{}]  # the whole machine
    most = gpus or usable_cores()
    if not 1 <= jobs <= most:
        raise UserError(
            f"--jobs {jobs}: this machine has {counted(most, 'GPU' if gpus else 'core')}"
        )
    if not gpus:
        return [{"OMP_NUM_THREADS": str(most // jobs)}] * jobs
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in shown.split(",")[:jobs]]


def run_programs(
    take: Callable[[], Program | None], places: list[dict[str, str]]
) -> Iterator[Path]:
    """Runs what `take` returns, one in each place at a time. Yields their directories as they end.

    Where `take` returns None, it is asked again while something runs. If this process is
    interrupted, so is what runs: a training saves and stops.
    """
    free = [*places]
    running: dict[subprocess.Popen, tuple[dict[str, str], Path]] = {}
    try:
        while True:
            while free and (program := take()):
                command, directory = program
                place = free.pop(0)
                running[start(command, directory, place)] = (place, directory)
            if not running:
                return
            time.sleep(0.05)
            for process in [process for process in running if process.poll() is not None]:
                place, directory = running.pop(process)
                free.append(place)
                yield directory
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def start(command: list[str], directory: Path, place: dict[str, str]) -> subprocess.Popen:
    """Starts a program. What it prints is added to output.txt."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "output.txt", "ab") as output:
            env = os.environ | place
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)


def run_program(command: list[str], directory: Path, place: dict[str, str] | None = None) -> str:
    """Runs one program to its end. Returns the last line that it printed."""
    programs = iter([(command, directory)])
    [_] = run_programs(lambda: next(programs, None), [place or {}])
    return last_line(directory)


def last_line(directory: Path) -> str:
    """Of what a program printed there."""
    output = (directory / "output.txt").read_text(errors="replace").strip()
    return (output or "ended early").splitlines()[-1]

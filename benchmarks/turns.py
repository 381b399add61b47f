"""What is compared takes turns: each side in a process of its own, so that its memory is its own, and side by side with what it
is compared with, so that a slow minute of the machine slows both."""

import math
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from distributed import World
from model import first_line
from train_gpt2 import peak_memory


@dataclass
class Side:
    """One of the things compared. In a process of its own make(world, **options) -> run, and each run() does it once.

    run may return a dict: the numbers of the first run become columns, except `waited`, seconds that each waited for data.
    """

    name: str
    make: Callable
    options: dict
    amount: int  # of its unit that one run does
    unit: str = "tokens/s"
    base: int = 0  # the side it is compared with, by its place; itself: none
    limits: dict[str, float] = field(default_factory=dict)  # column: what the hardware would allow, in the same unit
    processes: int = 1


here: dict = {}  # in a side's own process: its World, its `run`, and how many runs make a turn


def settle(side: Side, device: str, rank: int, port: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, without a traceback
    ranks = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=side.processes, LOCAL_WORLD_SIZE=side.processes, MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="localhost")
    torch.manual_seed(0)
    here.update(world=World(device), runs=1)
    here["run"] = side.make(here["world"], **side.options)


def take_turn(least: float) -> dict:
    """Seconds of a run, what the last one returned, the process's peak memory. The next turn takes at least `least` seconds."""
    device, n = here["world"].device, here["runs"]
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(n):
        returned = here["run"]()
    wait()
    seconds = (time.perf_counter() - start) / n
    here["runs"] = max(1, math.ceil(min(1000, least / seconds)))
    turn = dict(seconds=seconds, memory=peak_memory(device), returned={k: float(v) for k, v in (returned or {}).items()})
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the other side may need what this one only keeps
    return turn


def leave() -> None:
    here["world"].close()


class Worker:
    """The processes of one side. turn() -> what take_turn says on rank 0; raises what they raise."""

    def __init__(self, side: Side, device: torch.device):
        with socket.socket() as s:  # a free port, for the processes to find each other
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        self.pools = [ProcessPoolExecutor(1, spawn) for _ in range(side.processes)]
        self.ready = [pool.submit(settle, side, device.type, rank, port) for rank, pool in enumerate(self.pools)]

    def turn(self, least: float) -> dict:
        least = least if len(self.pools) == 1 else 0  # ranks that count differently would wait for each other for ever
        answers = [pool.submit(take_turn, least) for pool in self.pools]
        return [future.result() for future in (*self.ready, *answers)][len(self.ready)]

    def close(self) -> None:
        for pool in self.pools:
            with suppress(RuntimeError):  # it may have been killed
                pool.submit(leave)
            pool.shutdown(wait=False)


def measure(sides: list[Side], device: torch.device, rounds: int, least: float) -> Iterator[dict]:
    """A row for each side: medians of `rounds` turns of at least `least` seconds, in turns with its base. `speedup` is of turns
    side by side, `total` a product of those. A side that fails has an error, and what builds on it builds on its base instead.
    Processes live no longer than they are needed, so that memory has room for them."""
    rows: list[dict] = []
    workers: dict[int, Worker] = {}
    for i, side in enumerate(sides):
        start, pair = time.perf_counter(), [*dict.fromkeys([side.base, i])]
        workers[i] = Worker(side, device)
        try:
            first = workers[i].turn(least)  # compilation and the optimizer's moments belong to it
            started = time.perf_counter() - start
            print(f"{side.name}: first run after {started:.1f} s", file=sys.stderr)
            workers[i].turn(least)  # how long is a run?
            turns = {j: [] for j in pair}
            for j in pair * rounds:
                turns[j].append(workers[j].turn(least))
            row, base = summarize(side, turns[i]), rows[side.base] if side.base != i else None
            if base:
                row["beside"] = summarize(sides[side.base], turns[side.base])["median"]
                row["speedup"] = row["median"] / row["beside"]
            row["total"] = row["speedup"] * base["total"] if base else 1.0
            rows.append(first["returned"] | row | dict(start_s=started, options=side.options))
        except (RuntimeError, MemoryError) as error:  # out of memory, or killed for it
            rows.append(dict(name=side.name, error=f"{type(error).__name__}: {first_line(error)}"))
            for j, later in enumerate(sides[i + 1 :], i + 1):
                later.base = later.base if later.base != i else side.base if side.base != i else j
        yield rows[-1]
        for j in set(workers) - {later.base for later in sides[i + 1 :]}:
            workers.pop(j).close()


def summarize(side: Side, turns: list[dict]) -> dict:
    """The format of all results: name, unit, the median of the turns and their range, and what else is known."""
    rates = [side.amount / turn["seconds"] for turn in turns]
    median = statistics.median(rates)
    row = dict(name=side.name, unit=side.unit, median=median, low=min(rates), high=max(rates), ms=1000 * side.amount / median)
    row |= {column: median / limit for column, limit in side.limits.items()}
    if "waited" in turns[0]["returned"]:
        row["loader"] = statistics.median(turn["returned"]["waited"] / turn["seconds"] for turn in turns)
    return row | dict(memory_gb=max(turn["memory"] for turn in turns) / 1e9)

"""What is compared takes turns.

Each side runs in a process of its own, so that its memory is its own; and it takes turns with the
side that it is compared with, so that a slow minute of the machine slows both.
"""

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

from support.common import first_line
from support.device import peak_memory, synchronize
from support.distributed import World


@dataclass
class Side:
    """One of the things compared.

    In a process of its own make(world, **options) -> run, and each run() does it once. run may
    return a dict of numbers: those of the first run become columns, except `waited`, the seconds
    that each run waited for data.
    """

    name: str
    make: Callable
    options: dict
    amount: int  # of its unit that one run does
    unit: str = "tokens/s"
    base: int = 0  # the side it is compared with, by its place; itself: none
    limits: dict[str, float] = field(default_factory=dict)  # column: the hardware's limit, in unit
    processes: int = 1


# -- in a side's own process

here: dict = {}  # its World, its `run`, and how many `runs` make a turn


def settle(side: Side, device: str, rank: int, port: int) -> None:
    """Joins the other processes of the side, and makes what it runs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, without a traceback
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(side.processes),
        LOCAL_WORLD_SIZE=str(side.processes),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    torch.manual_seed(0)
    here["world"] = World(device)
    here["runs"] = 1
    here["run"] = side.make(here["world"], **side.options)


def take_turn(least: float) -> dict:
    """Seconds of a run, what the last run returned, and the process's peak memory in bytes.

    The next turn takes at least `least` seconds: short runs are repeated.
    """
    device = here["world"].device
    if here.pop("emptied", False):
        here["run"]()  # so that the clock does not run while memory is allocated again
    synchronize(device)
    start = time.perf_counter()
    for _ in range(here["runs"]):
        returned = here["run"]()
    synchronize(device)
    seconds = (time.perf_counter() - start) / here["runs"]
    here["runs"] = max(1, math.ceil(min(1000, least / seconds)))
    numbers = {name: float(value) for name, value in (returned or {}).items()}
    turn = dict(seconds=seconds, memory=peak_memory(device), returned=numbers)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the other side may need what this one only keeps
        here["emptied"] = True
    return turn


def leave() -> None:
    here["world"].close()


# -- in the process that compares


class Worker:
    """The processes of one side."""

    def __init__(self, side: Side, device: torch.device):
        with socket.socket() as s:  # a free port, for the processes to find each other
            s.bind(("localhost", 0))
            _, port = s.getsockname()
        spawn = multiprocessing.get_context("spawn")
        self.pools = [ProcessPoolExecutor(1, spawn) for _ in range(side.processes)]
        self.ready = []
        for rank, pool in enumerate(self.pools):
            self.ready.append(pool.submit(settle, side, device.type, rank, port))

    def turn(self, least: float) -> dict:
        """A turn of all processes: what take_turn says on rank 0. Raises what they raise."""
        if len(self.pools) > 1:
            least = 0  # ranks that count differently would wait for each other for ever
        answers = [pool.submit(take_turn, least) for pool in self.pools]
        for future in self.ready:
            future.result()
        turns = [future.result() for future in answers]
        return turns[0]

    def close(self) -> None:
        for pool in self.pools:
            with suppress(RuntimeError):  # it may have been killed
                pool.submit(leave)
            pool.shutdown(wait=False)


def measure(sides: list[Side], device: torch.device, rounds: int, least: float) -> Iterator[dict]:
    """Yields a row for each side: medians of `rounds` turns of at least `least` seconds.

    A side and its base take turns. The row of a side that fails has an error, and what builds on
    it builds on its base instead. Processes end as soon as they are not needed any more: memory is
    for the others.
    """
    rows: list[dict] = []
    workers: dict[int, Worker] = {}
    for i, side in enumerate(sides):
        start = time.perf_counter()
        workers[i] = Worker(side, device)
        try:
            first = workers[i].turn(least)  # compiles, and allocates the optimizer's moments
            started = time.perf_counter() - start
            print(f"{side.name}: first run after {started:.1f} s", file=sys.stderr)
            workers[i].turn(least)  # how long is a run?
            pair = {side.base: workers[side.base], i: workers[i]}
            turns = alternate(pair, rounds, least)
            row = summarize(side, turns[i])
            if side.base != i:
                base = sides[side.base]
                row |= compare(rates_of(side, turns[i]), rates_of(base, turns[side.base]))
            rows.append(first["returned"] | row | dict(start_s=started, options=side.options))
        except (RuntimeError, MemoryError) as error:  # out of memory, or killed for it
            message = f"{type(error).__name__}: {first_line(error)}"
            rows.append(dict(name=side.name, error=message))
            replace_base(sides, i)
        yield rows[-1]
        needed = {later.base for later in sides[i + 1 :]}
        for j in set(workers) - needed:
            workers.pop(j).close()


def alternate(workers: dict[int, Worker], rounds: int, least: float) -> dict[int, list[dict]]:
    """`rounds` turns of each of these workers, one beside the other: {its key: its turns}."""
    turns: dict[int, list[dict]] = {i: [] for i in workers}
    for _ in range(rounds):
        for i, worker in workers.items():
            turns[i].append(worker.turn(least))
    return turns


def compare(rates: list[float], base_rates: list[float]) -> dict:
    """How many times as fast as its base, by the turns that stood side by side.

    beside: the base's median rate; speedup: the median of the ratios; speedup_low and
    speedup_high: their range.
    """
    ratios = [rate / beside for rate, beside in zip(rates, base_rates, strict=True)]
    return dict(
        beside=statistics.median(base_rates),
        speedup=statistics.median(ratios),
        speedup_low=min(ratios),
        speedup_high=max(ratios),
    )


def replace_base(sides: list[Side], failed: int) -> None:
    """Gives the sides that build on a failed one its base; or themselves, if it had none."""
    for j in range(failed + 1, len(sides)):
        if sides[j].base == failed:
            base = sides[failed].base
            sides[j].base = base if base != failed else j


def rates_of(side: Side, turns: list[dict]) -> list[float]:
    """What each turn did in a second, in the side's unit."""
    return [side.amount / turn["seconds"] for turn in turns]


def summarize(side: Side, turns: list[dict]) -> dict:
    """The columns of a side: the median of its turns, their range, and what else is known."""
    rates = rates_of(side, turns)
    median = statistics.median(rates)
    row = dict(
        name=side.name,
        unit=side.unit,
        median=median,
        low=min(rates),
        high=max(rates),
        ms=1000 * side.amount / median,
    )
    for column, limit in side.limits.items():
        row[column] = median / limit
    if "waited" in turns[0]["returned"]:
        parts = [turn["returned"]["waited"] / turn["seconds"] for turn in turns]
        row["loader"] = statistics.median(parts)
    row["memory_gb"] = max(turn["memory"] for turn in turns) / 1e9
    return row

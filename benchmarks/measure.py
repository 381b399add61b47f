"""Sides of a comparison take turns, so that a slow minute of the machine slows both."""

import atexit
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from support.base.errors import first_line
from support.machine.device import peak_memory
from support.machine.distributed import start_world

TURN = 0.5  # seconds that a turn takes at least


@dataclass
class Side:
    """One of the things that are compared."""

    name: str
    make: Callable  # make(world, **options) -> run, which is timed; its first numbers are columns
    options: dict
    amount: float  # of its unit, done by one run
    unit: str = "tokens/s"
    peak: float = 0.0  # what the hardware can do, in this unit; 0 = unknown
    processes: int = 1


# -- in a side's own process

here: dict = {}  # its World and its `run`


def start(side: Side, device: str, rank: int, port: int) -> dict:
    """Makes what the side runs, and runs it once -> the numbers that it returns."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    place: dict = dict(RANK=rank, LOCAL_RANK=rank, MASTER_ADDR="localhost", MASTER_PORT=port)
    place |= dict(WORLD_SIZE=side.processes, LOCAL_WORLD_SIZE=side.processes)
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.manual_seed(0)
    here["world"] = start_world(device)
    atexit.register(here["world"].close)
    here["run"] = side.make(here["world"], **side.options)
    return numbers_of(here["run"]())  # compiles, and allocates the optimizer's state


def numbers_of(returned: Any) -> dict[str, float]:
    """What a run returned, if that is a dict of numbers."""
    numbers = returned if isinstance(returned, dict) else {}
    return {name: float(value) for name, value in numbers.items()}


def take_turn(runs: int) -> dict:
    """Seconds per run, over `runs` of them, and the peak memory of this process in bytes."""
    run = here["run"]
    device = here["world"].device
    if device.type == "cuda":
        run()  # allocates again what the last turn gave back
    torch.get_device_module(device).synchronize()
    began = time.perf_counter()
    for _ in range(runs):
        run()
    torch.get_device_module(device).synchronize()
    seconds = (time.perf_counter() - began) / runs
    torch.cuda.empty_cache()  # the other side may need it
    return dict(seconds=seconds, memory=peak_memory(device))


# -- in the process that compares


class Worker:
    """The processes of one side, which share no memory with another side's."""

    def __init__(self, side: Side):
        self.side = side
        self.runs = 1  # in a turn
        spawn = multiprocessing.get_context("spawn")
        self.pools = [ProcessPoolExecutor(1, spawn) for _ in range(side.processes)]

    def first_run(self, device: str) -> dict:
        port = get_free_port()  # where the processes find each other
        ranks = enumerate(self.pools)
        answers = [pool.submit(start, self.side, device, rank, port) for rank, pool in ranks]
        numbers, *_ = [answer.result() for answer in answers]  # each may raise
        return numbers

    def turn(self) -> dict:
        """Takes a turn. The next one lasts at least TURN seconds: short runs are repeated."""
        answers = [pool.submit(take_turn, self.runs) for pool in self.pools]
        turn, *_ = [answer.result() for answer in answers]
        self.runs = max(1, math.ceil(min(1000, TURN / turn["seconds"])))
        return turn

    def close(self) -> None:
        for pool in self.pools:
            pool.shutdown(wait=False)


def measure(sides: Iterable[Side], device: str, rounds: int, chain: bool = False) -> Iterator[dict]:
    """Yields a row for each side: medians of `rounds` turns, or an error.

    A side takes turns with the first side, and with `chain` also with the one before it that did
    not fail. Processes end as soon as they are not needed, to leave their memory to the others.
    """
    bases: list[Worker] = []
    for side in sides:
        began = time.perf_counter()
        worker = Worker(side)
        row: dict = dict(name=side.name, unit=side.unit)
        try:
            row |= worker.first_run(device)
            row["start_s"] = time.perf_counter() - began
            print(f"{side.name}: first run after {row['start_s']:.1f} s", file=sys.stderr)
            row |= take_turns(worker, bases, rounds)
            if chain or not bases:
                bases.append(worker)
        except (RuntimeError, MemoryError) as error:  # out of memory, or killed for it
            row["error"] = f"{type(error).__name__}: {first_line(error)}"
        if worker not in bases:
            worker.close()
        if len(bases) > 2:
            bases.pop(1).close()
        yield row
    for base in bases:
        base.close()


def take_turns(worker: Worker, bases: list[Worker], rounds: int) -> dict:
    """The row of a side after turns beside its bases: the first side, and the one before it."""
    worker.turn()  # how long is a run?
    rates = []
    for _ in range(rounds):
        turns = [(each.side.amount, each.turn()) for each in (*bases, worker)]
        rates.append([amount / turn["seconds"] for amount, turn in turns])
    *beside, own = zip(*rates, strict=True)  # of each worker, one for each round
    median = statistics.median(own)
    row = dict(median=median, ms=1000 * worker.side.amount / median)
    row["memory_gb"] = turns[-1][1]["memory"] / 1e9
    if worker.side.peak:
        row["MFU"] = median / worker.side.peak
    if beside:
        row["beside"] = statistics.median(beside[-1])
        row |= compare_rates("speedup", own, beside[-1])
        row |= compare_rates("total", own, beside[0])
    return row


def compare_rates(name: str, rates: tuple[float, ...], beside: tuple[float, ...]) -> dict:
    """Median and range of the ratios of neighbouring turns."""
    ratios = [rate / base for rate, base in zip(rates, beside, strict=True)]
    row = {name: statistics.median(ratios)}
    return row | {f"{name}_low": min(ratios), f"{name}_high": max(ratios)}

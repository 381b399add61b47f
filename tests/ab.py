"""Variants of the training step, each in a process with an environment of its own, in turns.

    python tests/ab.py B name:VARIABLE=1,ANOTHER=0 other …

All compile at once, so that a minute of a GPU suffices for five. It prints a line for each, and
writes the environment of our fastest one, and its time, to log/second/choice-B. A name that begins
with nanogpt measures the model of the clone in data/nanoGPT, one that begins with eager is not
chosen. CPU=1 in the environment: small sizes, on the CPU.
"""

import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from bench import BenchConfig, Machine
from benchmarks import peers
from support.machine.device import peak_memory
from support.machine.distributed import start_world

TURNS = 3
SMALL = dict(device="cpu", model="tiny", sequence_length=32, compile=False)
OUT = Path("log/second")


def take_turns(name: str, B: int) -> None:
    """In a variant's process: for each number on stdin, so many steps -> seconds of one."""
    machine = Machine(BenchConfig(batch_size=B, **(SMALL if os.environ.get("CPU") else {})))
    theirs = {}
    if name.startswith("nanogpt"):
        theirs = dict(theirs=str(peers.find_nanogpt("data/nanoGPT")))
    with start_world(machine.config.device) as world:
        synchronize = torch.get_device_module(world.device).synchronize
        torch.manual_seed(0)
        step = peers.training(world, **machine.step("", **theirs).options)
        loss = float(step()["loss"])
        for _ in range(4):
            step()
        synchronize()
        torch.cuda.empty_cache()  # the others compile, too
        print(f"first loss {loss:.4f}, {peak_memory(world.device) / 1e9:.2f} GB", flush=True)
        for line in sys.stdin:
            step()
            synchronize()
            start = time.perf_counter()
            for _ in range(int(line)):
                step()
            synchronize()
            print((time.perf_counter() - start) / int(line), flush=True)
            torch.cuda.empty_cache()


def start(variant: str, B: str) -> tuple[str, dict[str, str], subprocess.Popen]:
    """'name:VARIABLE=1' -> its name, its variables, its process."""
    name, _, listed = variant.partition(":")
    variables = dict(pair.split("=", 1) for pair in listed.split(",") if pair)
    command = [sys.executable, __file__, "--turns", name, B]
    with open(OUT / f"{name}-{B}.err", "w") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | variables,
            text=True,
        )
    return name, variables, process


def main(B: str, *variants: str) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    started = [start(variant, B) for variant in variants]
    about = {name: process.stdout.readline().strip() for name, _, process in started}
    running = [one for one in started if about[one[0]]]
    seconds: dict[str, list[float]] = {name: [] for name, *_ in running}
    steps = 2 if os.environ.get("CPU") else max(4, 500 // int(B))
    for _ in range(TURNS):
        for name, _, process in running:
            with suppress(OSError, ValueError):  # it has died: the others go on
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
                seconds[name].append(float(process.stdout.readline()))
    ours = []
    for name, variables, process in started:
        with suppress(OSError):
            process.stdin.close()
        if len(seconds.get(name, [])) < TURNS:
            print(f"{B:>3} {name:20} FAILED, see {OUT}/{name}-{B}.err", flush=True)
            continue
        low, high = 1000 * min(seconds[name]), 1000 * max(seconds[name])
        ms = 1000 * statistics.median(seconds[name])
        print(f"{B:>3} {name:20} {ms:8.2f} ms ({low:.2f} to {high:.2f}), {about[name]}", flush=True)
        if not name.startswith(("nanogpt", "eager")):
            ours.append((ms, variables))
    if ours:
        ms, variables = min(ours, key=lambda one: one[0])
        lines = [f"export {name}={value}\n" for name, value in variables.items()]
        (OUT / f"choice-{B}").write_text("".join(lines) + f"export BEST_MS={ms:.2f}\n")


if __name__ == "__main__":
    if sys.argv[1] == "--turns":
        take_turns(sys.argv[2], int(sys.argv[3]))
    else:
        main(*sys.argv[1:])

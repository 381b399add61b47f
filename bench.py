"""The scoreboard: how fast is a training step here, and how far is that from the hardware's limit?

python bench.py                            each technique added in turn, up to what training uses
python bench.py --against hf --attention   any of the other comparisons, see --help
python bench.py --report A.json B.json     the results of several machines in one table and plot

What is compared takes turns (benchmarks/turns.py); figures are medians of turns.
"""

import math
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from benchmarks.anatomy import dissect
from benchmarks.hot_paths import (
    compare_attention,
    compare_generation,
    compare_scoring,
    compare_tokenizing,
    compare_validation,
)
from benchmarks.results import print_report, read_result, write_result
from benchmarks.training_step import training
from benchmarks.turns import Side, measure
from config import GPT2_SIZES
from model import GPT, GPTConfig
from support.common import read_flags, run_script
from support.device import dtype_name, free_memory, pick_device, pick_dtype, why_not_compile
from support.distributed import World
from support.peaks import peak_flops
from support.report import describe_run

ModelName = Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "tiny"]
MODELS = GPT2_SIZES | {"tiny": dict(n_layer=2, n_head=2, n_embd=64)}


@dataclass
class BenchConfig:
    """Measure the training step and the other hot paths. Without a flag: the ladder."""

    # -- comparison: What to measure.
    ladder: bool = False  # each technique added in turn; what runs when nothing else is asked for
    sweep: Literal["", "batch"] = ""  # batch: micro-batches of 1, 2, 4, … until memory ends
    scaling: bool = False  # 1, 2, 4, 8 processes, as many as there are GPUs (or cores)
    against: Literal["", "hf"] = ""  # hf: transformers' GPT-2, eager and compiled, the same AdamW
    optimizers: bool = False  # what Muon costs beside AdamW
    anatomy: bool = False  # where the time and memory of a step go, part by part; on a CPU
    attention: bool = False  # attention alone, fused and written out, by sequence length
    generate: bool = False  # 128 tokens with and without a KV cache; limit: the memory's bandwidth
    validation: bool = False  # eager, and with compiled blocks
    hellaswag: bool = False  # in batches and one example at a time; limit: the matmul peak
    data: bool = False  # text to shards, by build-nanogpt's loop too; limit: the bare tokenizer
    report: tuple[str, ...] | None = None  # only these JSON files, in one table and one plot

    # -- size: How much of it.
    model: ModelName = "gpt2"  # its size; tiny is for tests
    batch_size: int = 0  # micro-batch B; 0 = 4 on a CPU, 16 on a GPU
    sequence_length: int = 0  # T; 0 = 256 on a CPU, 1024 on a GPU
    max_batch: int = 128  # where --sweep batch ends at the latest
    rounds: int = 3  # turns of each side
    turn: float = 0.5  # seconds that a turn takes at least: short runs are repeated
    hellaswag_path: str = ""  # a jsonl file for --hellaswag; empty = download it
    examples: int = 48  # of HellaSwag, drawn at random: the first ones of the file are short
    megabytes: int = 50  # of text for --data

    # -- computation: How it computes, and where the results go.
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto = as in training
    compile: bool = True  # torch.compile, where there is a compiler
    out: str = "log/bench"  # results go to OUT.json and OUT.png


def check_flags(config: BenchConfig) -> list[str]:
    """Every problem of the flags, a sentence each; an empty list if there is none."""
    least = dict(
        rounds=1,
        turn=0,
        max_batch=1,
        batch_size=0,
        sequence_length=0,
        examples=1,
        megabytes=1,
    )
    problems = []
    for name, n in least.items():
        value = getattr(config, name)
        if not n <= value < math.inf:  # nan is neither
            problems.append(f"--{name.replace('_', '-')} {value}: at least {n} is expected")
    if config.report == ():
        problems.append("--report: name the JSON files that bench.py wrote, one or more")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        own = "bench.py starts its own processes"
        problems.append(f"{own}: use python bench.py --scaling, not torchrun")
    return problems


# -- the machine


@dataclass
class Machine:
    """What the comparisons share: the flags, their defaults filled in, and the hardware."""

    config: BenchConfig
    device: torch.device
    dtype: torch.dtype  # what training would use here
    why: str
    why_eager: str
    peaks: dict[str, tuple[float, str]]  # precision: operations a second, source
    notes: list[str] = field(default_factory=list)  # what a reader of the table has to know

    @property
    def size(self) -> dict[str, int]:
        return MODELS[self.config.model]

    def peak(self, dtype: torch.dtype, tf32: bool = False) -> float:
        """Operations a second at most; with tf32, float32's matmuls are done in TF32."""
        name = dtype_name(dtype)
        if tf32 and dtype == torch.float32:
            name = "tf32"
        return self.peaks[name][0]

    def measure(self, sides: Iterable[Side]) -> Iterator[dict]:
        return measure(list(sides), self.device, self.config.rounds, self.config.turn)

    def step(self, name: str, base: int = 0, processes: int = 1, **changes) -> Side:
        """The step as training takes it here, with changes of the options of `training`."""
        options: dict = dict(
            B=self.config.batch_size,
            T=self.config.sequence_length,
            size=self.size,
            dtype=self.dtype,
            tf32="tf32" in self.peaks,
            compile=not self.why_eager,
            flash=True,
            pad_vocab_to=128,
            own_loss=True,
            fused=self.device.type in ("cuda", "cpu"),
            recompute=self.device.type == "cpu",
            keep_memory=self.device.type == "cpu",
        )
        options.update(changes)
        return Side(
            name=name,
            make=training,
            options=options,
            amount=processes * options["B"] * options["T"],
            base=base,
            limits=self.limit_tokens(options, processes),
            processes=processes,
        )

    def limit_tokens(self, options: dict, processes: int) -> dict[str, float]:
        """Tokens a second at the peak of the step's own precision, and at that of 16 bits."""
        with torch.device("meta"):
            flops = GPT(GPTConfig(**options["size"])).flops_per_token(options["T"])
        half = torch.float16 if "float16" in self.peaks else torch.bfloat16
        devices = processes if self.device.type == "cuda" else 1
        return {
            "MFU": devices * self.peak(options["dtype"], options["tf32"]) / flops,
            "MFU bf16": devices * self.peak(half) / flops,
        }


def look_around(config: BenchConfig) -> Machine:
    """Fills the flags in, and finds or measures the peaks of the device."""
    device = pick_device(config.device)
    B, T = (4, 256) if device.type == "cpu" else (16, 1024)
    config = replace(
        config,
        batch_size=config.batch_size or B,
        sequence_length=config.sequence_length or T,
    )
    dtype, why = pick_dtype(device, config.dtype)
    why_eager = why_not_compile(device) if config.compile else "--no-compile"
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    torch.set_float32_matmul_precision("highest")
    peaks = {
        "float32": peak_flops(device, torch.float32),
        dtype_name(half): peak_flops(device, half),
    }
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        torch.set_float32_matmul_precision("high")
        peaks["tf32"] = peak_flops(device, torch.float32)
    return Machine(config, device, dtype, why, why_eager, peaks)


# -- the comparisons: each yields the rows of its table


def climb_ladder(m: Machine) -> Iterator[dict]:
    """Each technique on top of those before it, from a plain step to what training does here.

    A technique that training does not use here is left out; or only measured, and the next one
    does not build on it: bfloat16 on a CPU that is slower at it, recomputation on a GPU.
    """
    plain = m.step(
        "float32, eager",
        dtype=torch.float32,
        tf32=False,
        compile=False,
        flash=False,
        pad_vocab_to=1,
        fused=False,
        own_loss=False,
        recompute=False,
        keep_memory=False,
    )
    used = m.step("").options  # what training does here
    sides = [plain]
    at = 0  # the row that the next one builds on
    for name, option, value in list_techniques(m):
        kept = option == "B" or used[option] == value
        worth_a_look = option == "dtype" or (option == "recompute" and used["compile"])
        if not kept and not worth_a_look:
            m.notes.append(f"left out: {name}, which training does not use here")
            continue
        options = sides[at].options | {option: value}
        sides.append(m.step(name, base=at, **options))
        if kept:
            at = len(sides) - 1
        else:
            why = f" ({m.why})" if option == "dtype" else ""
            left = f"training leaves it{why}, and what follows builds on the row before it"
            m.notes.append(f"{name!r} is only measured: {left}")
    yield from m.measure(sides)


def list_techniques(m: Machine) -> list[tuple]:
    """The steps of the ladder: name, the option of `training` that each changes, and to what."""
    B = m.config.batch_size
    more = 2 * B if m.device.type == "cpu" else 4 * B
    half = m.dtype if m.dtype != torch.float32 else torch.bfloat16
    return [
        ("+ TF32 matmuls", "tf32", True),
        (f"+ {dtype_name(half)} autocast", "dtype", half),
        ("+ torch.compile", "compile", True),
        ("+ fused attention", "flash", True),
        ("+ vocabulary of 50304", "pad_vocab_to", 128),
        ("+ fused AdamW", "fused", True),
        ("+ the model's own loss", "own_loss", True),
        ("+ cheap activations recomputed", "recompute", True),
        ("+ freed memory kept", "keep_memory", True),
        (f"+ micro-batch {B} → {more}", "B", more),
    ]


def sweep_batch_sizes(m: Machine) -> Iterator[dict]:
    """Micro-batches of 1, 2, 4, … until memory ends.

    On a CPU only until it could end: there the system kills a process instead of raising an error.
    """
    free = free_memory(m.device)
    room = (4 * 2**30 if free is None else free) / 1e9  # 4 GB where the system does not say
    memory_gb = 0
    B = 1
    while B <= m.config.max_batch:
        if m.device.type == "cpu" and 2 * memory_gb > room:
            needed = f"it could need {2 * memory_gb:.0f} of the {room:.0f} GB free"
            m.notes.append(f"ended before B {B}: {needed}")
            return
        [row] = m.measure([m.step(f"B {B}", B=B)])
        yield row
        if "error" in row:
            return
        memory_gb = row["memory_gb"]
        B *= 2


def scale_processes(m: Machine) -> Iterator[dict]:
    """The same micro-batch on each of 1, 2, 4, 8 processes, gradients averaged as in training."""
    most = torch.cuda.device_count()
    if m.device.type != "cuda":
        most = os.cpu_count() or 1
        m.notes.append("the processes share the same cores: the ideal is the speed of one process")
    yield from m.measure(m.step(f"{n} process(es)", processes=n) for n in (1, 2, 4, 8) if n <= most)


def compare_transformers(m: Machine) -> Iterator[dict]:
    """transformers' GPT-2, the same AdamW and precision, and the step as training takes it."""
    theirs = dict(hf=True, recompute=False, keep_memory=False)
    sides = [m.step("transformers, eager", compile=False, **theirs)]
    if not m.why_eager:
        sides.append(m.step("transformers, compiled", **theirs))
    sides.append(m.step("this repository"))
    yield from m.measure(sides)


def compare_optimizers(m: Machine) -> Iterator[dict]:
    """AdamW and Muon after one micro-batch, and how much of a step of 0.5M tokens Muon takes."""
    tokens = m.config.batch_size * m.config.sequence_length
    every = f"an update every {tokens:,} tokens"
    sides = [m.step(f"{every}: AdamW"), m.step(f"{every}: Muon", optimizer="muon")]
    adamw, muon = m.measure(sides)
    yield adamw
    yield muon
    if "ms" in adamw and "ms" in muon:
        more = muon["ms"] - adamw["ms"]
        part = more / (adamw["ms"] * 524288 / tokens)
        of = f"{part:.1%} of a step of 524,288 tokens on this device"
        m.notes.append(f"Muon takes {more:,.0f} ms more, once a step: {of}")


BENCHMARKS = {
    "ladder": climb_ladder,
    "sweep": sweep_batch_sizes,
    "scaling": scale_processes,
    "against": compare_transformers,
    "optimizers": compare_optimizers,
    "anatomy": dissect,
    "attention": compare_attention,
    "generate": compare_generation,
    "validation": compare_validation,
    "hellaswag": compare_scoring,
    "data": compare_tokenizing,
}


# -- the command


def run_benchmarks(config: BenchConfig) -> dict:
    """The comparisons that are asked for; OUT.json has what is known so far after each row."""
    m = look_around(config)
    with World(config.device) as world:
        result = describe_run(m.config, world, m.dtype, m.config.batch_size)
    result["command"] = f"python bench.py {shlex.join(sys.argv[1:])}".strip()
    result["why"] = m.why
    result["peaks"] = m.peaks
    result["benchmarks"] = {}
    asked = [name for name in BENCHMARKS if getattr(config, name)]
    for name in asked or ["ladder"]:
        rows: list[dict] = []
        m.notes = []
        for row in BENCHMARKS[name](m):
            rows.append(row)
            result["benchmarks"][name] = dict(rows=rows, notes=m.notes)
            write_result(config.out, result)
    write_result(config.out, result)  # with the last notes
    return result


def main() -> None:
    config = read_flags(BenchConfig)
    problems = check_flags(config)
    if problems:
        print("\n".join(f"bench.py: {problem}" for problem in problems), file=sys.stderr)
        sys.exit(2)
    Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    if config.report:
        print_report([read_result(path) for path in config.report], config.out)
        return
    start = time.perf_counter()
    result = run_benchmarks(config)
    print_report([result], config.out)
    print(f"numbers: {config.out}.json; {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    run_script(main)

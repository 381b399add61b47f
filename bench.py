"""The scoreboard: how fast is a training step here, which technique makes it so, and how far is it from the hardware's limit?

python bench.py                              the ladder: each technique added in turn, from plain float32 to what training uses
python bench.py --against hf --attention     any of the other comparisons, see --help
python bench.py --report A.json B.json       the results of several machines in one table and one plot

Every step is train_gpt2.train_step on made-up tokens. Each variant stands in a process of its own, so that its memory is its
own, and takes turns with the one it is compared to, so that a slow minute of the machine slows both. Figures are medians.
"""

import json
import math
import multiprocessing
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

import hellaswag
import plots
from distributed import World, pick_device
from model import GPT, SIZES, DataLoaderLite, GPTConfig, autocast, decay_groups, pick_dtype
from tokenizer import EOT, UserError, get_tokenizer, run_script
from train_gpt2 import compiler_works, describe_run, peak_memory, train_step

MODELS = SIZES | {"tiny": dict(n_layer=2, n_head=2, n_embd=64)}


@dataclass
class BenchConfig:
    """Measure the training step and the other hot paths. Without a flag: the ladder, in a size that suits the machine."""

    ladder: bool = False  # each technique added in turn; also what runs when nothing else is asked for
    sweep: Literal["", "batch"] = ""  # batch: micro-batches of 1, 2, 4, … until memory ends
    scaling: bool = False  # 1, 2, 4, 8 processes, as many as there are GPUs (or cores)
    against: Literal["", "hf"] = ""  # hf: transformers' GPT-2, eager and compiled, with the same AdamW
    generate: bool = False  # generation with the KV cache, without it, and the memory's bandwidth
    hellaswag: bool = False  # HellaSwag in batches, one example at a time, and the matmul peak
    data: bool = False  # text to shards to batches, and the bare tokenizer
    attention: bool = False  # attention alone, fused and written out, by sequence length
    report: tuple[str, ...] = ()  # measure nothing: merge these JSON files into one table and one plot

    model: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "tiny"] = "gpt2"  # its size; tiny is for tests
    batch_size: int = 0  # micro-batch B; 0 = 4 on a CPU, 16 on a GPU
    sequence_length: int = 0  # T; 0 = 256 on a CPU, 1024 on a GPU
    max_batch: int = 128  # where --sweep batch ends at the latest
    rounds: int = 3  # turns of each variant; the figures are their medians
    steps: int = 0  # training steps in a turn; 0 = 1 on a CPU, 10 on a GPU
    hellaswag_path: str = ""  # jsonl file for --hellaswag; empty = made-up examples of the real ones' lengths
    data_tokens: int = 0  # how much of the standard library --data tokenizes; 0 = all of it
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto = what training would pick here
    compile: bool = True  # torch.compile, where there is a compiler
    out: str = "log/bench"  # results go to OUT.json and OUT.png


# -- what the hardware can do ------------------------------------------------------------------------------------------

# Published peaks of matrix products without sparsity, in TFLOP/s: float32, TF32, 16 bits (bfloat16, or float16 where there is
# no bfloat16) accumulated in float32. By the whole name that CUDA reports: a MIG slice or a laptop's GPU is another thing.
PEAKS = {
    r"Tesla V100-SXM\d-\w+": (15.7, None, 125, "NVIDIA V100 datasheet, 2020"),
    r"Tesla V100-PCIE-\w+": (14.0, None, 112, "NVIDIA V100 datasheet, 2020"),
    r"Tesla T4": (8.1, None, 65, "NVIDIA T4 datasheet, 2019"),
    r"NVIDIA A100-[\w-]+": (19.5, 156, 312, "NVIDIA A100 datasheet, 2021"),
    r"NVIDIA L4": (30.3, 60, 121, "NVIDIA L4 datasheet, 2023"),
    r"NVIDIA GeForce RTX 3090": (35.6, 35.6, 71, "NVIDIA Ampere GA102 whitepaper, appendix A"),
    r"NVIDIA GeForce RTX 4090": (82.6, 82.6, 165.2, "NVIDIA Ada whitepaper, appendix A"),
    r"NVIDIA GeForce RTX 5090": (104.8, 104.8, 209.5, "NVIDIA RTX Blackwell whitepaper, appendix A"),
    r"NVIDIA H100 PCIe": (51, 378, 756, "NVIDIA H100 datasheet, 2023"),
    r"NVIDIA H100 80GB HBM3": (67, 494.5, 989.5, "NVIDIA H100 datasheet, 2023 (SXM)"),
    r"NVIDIA H200": (67, 494.5, 989.5, "NVIDIA H200 datasheet, 2024 (SXM)"),
    r"NVIDIA B200": (80, 1100, 2250, "NVIDIA Blackwell architecture brief, 2024 (HGX)"),
}


def published_peaks(name: str) -> dict[str, tuple[float, str]]:
    """{precision: (operations a second, source)} of a GPU by the name that CUDA reports; empty for one not in the table."""
    for pattern, (float32, tf32, half, source) in PEAKS.items():
        if re.fullmatch(pattern, name):
            speeds = {"float32": float32, "tf32": tf32, "bfloat16": half, "float16": half}
            return {precision: (1e12 * speed, source) for precision, speed in speeds.items() if speed}
    return {}


def spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def sync(device: torch.device) -> None:
    """Waits until the device has done what it was told, so that a clock tells the truth."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def timed(run: Callable, device: torch.device) -> float:
    sync(device)
    start = time.perf_counter()
    run()
    sync(device)
    return time.perf_counter() - start


def matmul_speed(device: torch.device, precision: str) -> float:
    """Operations a second of the best large square matrix product in float32, tf32, bfloat16 or float16, measured here."""
    before, best = torch.get_float32_matmul_precision(), 0.0
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    for n in (1024, 2048) if device.type == "cpu" else (4096, 8192):
        a = torch.randn(n, n, device=device, dtype=getattr(torch, precision.replace("tf32", "float32")))
        seconds, left = [timed(lambda a=a: a @ a, device)], 0.5
        while left > 0:
            seconds.append(timed(lambda a=a: a @ a, device))
            left -= seconds[-1]
        best = max(best, 2 * n**3 / min(seconds))
    torch.set_float32_matmul_precision(before)
    return best


def read_speed(device: torch.device, num_bytes: int) -> float:
    """Bytes a second that a matrix-vector product over so many bytes reads: what each new token does with the weights."""
    weights = torch.ones(max(1, num_bytes // 4 // 1024), 1024, device=device)
    x = torch.ones(1, 1024, device=device)
    return weights.nbytes / min(timed(lambda: F.linear(x, weights), device) for _ in range(10))


# -- one variant of the step, in a process of its own ------------------------------------------------------------------


@dataclass
class Variant:
    """One way to take the same training step."""

    name: str
    B: int
    T: int
    size: dict[str, int]  # n_layer, n_head, n_embd
    dtype: torch.dtype = torch.float32
    tf32: bool = False
    compile: bool = False
    flash: bool = False  # SDPA's best backend, else its plain one
    pad_vocab_to: int = 1
    fused: bool = False  # AdamW's fused kernel, else PyTorch's default
    own_loss: bool = False  # GPT.forward's loss, else one over all the logits at once
    hf: bool = False  # transformers' GPT-2 instead of ours
    processes: int = 1

    def tokens(self) -> int:
        """Tokens of one step."""
        return self.processes * self.B * self.T

    def precision(self) -> str:
        return "tf32" if self.tf32 and self.dtype == torch.float32 else spell(self.dtype)


class WrittenOutLoss(torch.nn.Module):
    """Our GPT with the loss that everyone writes first: float32 logits of all tokens, then the cross-entropy."""

    def __init__(self, gpt: GPT):
        super().__init__()
        self.gpt = gpt

    def forward(self, x, y):
        return None, F.cross_entropy(self.gpt.logits(self.gpt.hidden(x)).float().flatten(0, 1), y.flatten())


class HuggingFace(torch.nn.Module):
    """transformers' GPT-2 of the same size, without dropout like ours, called as train_step calls a model."""

    def __init__(self, T: int, n_layer: int, n_head: int, n_embd: int):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        self.gpt = GPT2LMHeadModel(GPT2Config(n_positions=T, n_layer=n_layer, n_head=n_head, n_embd=n_embd, **dropout))

    def forward(self, x, y):
        return None, self.gpt(input_ids=x, labels=x, use_cache=False).loss  # it shifts the labels itself


class MadeUpTokens:
    """A loader that has its one batch of random tokens in memory."""

    def __init__(self, B: int, T: int, seed: int = 0):
        tokens = torch.randint(EOT, (B, T + 1), generator=torch.Generator().manual_seed(seed))
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if torch.cuda.is_available():
            self.batch = tuple(t.pin_memory() for t in self.batch)

    def next_batch(self):
        return self.batch


def prepare(v: Variant, world: World) -> Callable[[int], dict]:
    """Builds a variant; the function it returns takes so many steps and says how long they took and what they needed."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high" if v.tf32 else "highest")
    # AOTAutograd's cache does not know which attention a graph was traced with: it would hand the plain rung the fused kernel.
    functorch_config.enable_autograd_cache = v.flash
    if v.hf:
        raw = HuggingFace(v.T, **v.size).to(world.device)
    else:
        gpt = GPT(GPTConfig(block_size=v.T, pad_vocab_to=v.pad_vocab_to, **v.size)).to(world.device)
        raw = gpt if v.own_loss else WrittenOutLoss(gpt)
    model = world.wrap(torch.compile(raw, dynamic=False) if v.compile else raw)
    if v.fused and not v.hf:
        optimizers = gpt.configure_optimizers()
    else:
        groups = decay_groups(list(raw.parameters()), weight_decay=0.1)
        optimizers = [torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=v.fused or None)]
    scaler = torch.amp.GradScaler(world.device.type, enabled=v.dtype == torch.float16)
    loader = MadeUpTokens(v.B, v.T, seed=world.rank)

    def turn(steps: int) -> dict:
        losses = []

        def run() -> None:
            for _ in range(steps):
                losses.append(train_step(model, optimizers, scaler, loader, 1, world, v.dtype, 6e-4, 1.0)[0])

        with nullcontext() if v.flash else sdpa_kernel([SDPBackend.MATH]):
            seconds = timed(run, world.device)
        memory = peak_memory(world.device)
        if world.device.type == "cuda":
            torch.cuda.empty_cache()  # the next variant may need what this one only keeps
        return dict(seconds=seconds / steps, loss=losses[-1].item(), memory=memory)

    return turn


here: dict = {}  # in a variant's own process: its World and its `turn`


def settle(v: Variant, device: str, rank: int, port: int) -> None:
    """In a process of its own: makes a variant ready for its turns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    ranks = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=v.processes, LOCAL_WORLD_SIZE=v.processes, MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="localhost")
    here["world"] = World(device)
    here["turn"] = prepare(v, here["world"])


def take_turn(steps: int) -> dict:
    return here["turn"](steps)


def leave() -> None:
    here["world"].close()


class Worker:
    """The processes of one variant. `take(steps)` -> seconds a step, loss, peak memory in bytes; raises what they raise."""

    def __init__(self, v: Variant, device: torch.device):
        with socket.socket() as s:  # a free port, for the processes to find each other
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        self.pools = [ProcessPoolExecutor(1, spawn) for _ in range(v.processes)]
        self.ready = [pool.submit(settle, v, device.type, rank, port) for rank, pool in enumerate(self.pools)]

    def take(self, steps: int) -> dict:
        answers = [pool.submit(take_turn, steps) for pool in self.pools]
        for settled in self.ready:
            settled.result()
        first, *_ = [answer.result() for answer in answers]
        return first

    def close(self) -> None:
        for pool in self.pools:
            with suppress(RuntimeError):  # it may have been killed
                pool.submit(leave)
            pool.shutdown(wait=False)


@dataclass
class Setup:
    """What all comparisons share: the flags with their defaults filled in, and what is known of the machine."""

    config: BenchConfig
    device: torch.device
    dtype: torch.dtype  # what training would use here
    why: str
    why_not_compile: str
    peaks: dict[str, tuple[float, str]]  # precision: operations a second, source
    notes: list[str] = field(default_factory=list)  # what a reader of the table has to know

    def variant(self, name: str, **changes) -> Variant:
        """The step as training takes it, with changes."""
        c = self.config
        best = dict(compile=not self.why_not_compile, flash=True, pad_vocab_to=128, own_loss=True)
        best |= dict(dtype=self.dtype, tf32=has_tf32(self.device), fused=self.device.type in ("cuda", "cpu"))
        return Variant(**(dict(name=name, B=c.batch_size, T=c.sequence_length, size=MODELS[c.model]) | best | changes))

    def model(self) -> GPT:
        """The model without its memory, for its arithmetic."""
        with torch.device("meta"):
            return GPT(GPTConfig(block_size=self.config.sequence_length, **MODELS[self.config.model]))


def find_setup(config: BenchConfig) -> Setup:
    """Fills the flags in and measures what the table of published peaks does not have."""
    device = pick_device(config.device)
    on_cpu = device.type == "cpu"
    config = replace(
        config,
        batch_size=config.batch_size or (4 if on_cpu else 16),
        sequence_length=config.sequence_length or (256 if on_cpu else 1024),
        steps=config.steps or (1 if on_cpu else 10),
    )
    dtype, why = pick_dtype(device, config.dtype)
    why_not = compiler_works(device) if config.compile else "--no-compile"
    peaks = published_peaks(torch.cuda.get_device_name(device)) if device.type == "cuda" else {}
    half = "float16" if dtype == torch.float16 else "bfloat16"
    for precision in ["float32", half, *["tf32"] * has_tf32(device)]:
        peaks.setdefault(precision, (matmul_speed(device, precision), "measured here with a large matrix product"))
    return Setup(config, device, dtype, why, why_not, peaks)


def free_memory() -> float:
    """Bytes of the machine's memory that nobody uses; endless where the system does not tell."""
    told = "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {})
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if told else math.inf


def measure(variants: list[Variant], bases: list[int | None], setup: Setup) -> list[dict]:
    """A row for each variant, without those that failed. Each takes turns with the one it builds on, `bases[i]`, in processes
    that stand side by side; two at a time, so that memory has room for them. Ratios are of such turns, or products of them.
    """
    n, bases = setup.config.rounds, list(bases)
    rows: list[dict | None] = []
    workers: dict[int, Worker] = {}
    turns: list[list[dict]] = [[] for _ in variants]
    for i, v in enumerate(variants):
        start, base = time.perf_counter(), bases[i]
        workers[i] = Worker(v, setup.device)
        try:
            turns[i].append(workers[i].take(1))  # compilation and the optimizer's moments belong to the first step
            turns[i][0]["start"] = time.perf_counter() - start
            print(f"{v.name}: first step after {turns[i][0]['start']:.1f} s", file=sys.stderr)
            for _ in range(n):
                for j in (i,) if base is None else (base, i):
                    turns[j].append(workers[j].take(setup.config.steps))
            speed = {j: variants[j].tokens() / median_seconds(turns[j][-n:]) for j in (i, base) if j is not None}
            ratios = {} if base is None else dict(base=rows[base]["name"], speedup=speed[i] / speed[base])
            rows.append(dict(name=v.name, **ratios, total=ratios.get("speedup", 1) * (rows[base]["total"] if ratios else 1)))
        except (RuntimeError, MemoryError) as error:  # out of memory, or killed for it
            setup.notes.append(f"left out: {v.name} failed ({type(error).__name__}: {str(error).splitlines()[0]})")
            rows.append(None)
            bases = [base if b == i else b for b in bases]
        for j in [j for j in workers if j not in bases[i + 1 :]]:
            workers.pop(j).close()
    return [row | summarize(v, t, setup) for row, v, t in zip(rows, variants, turns, strict=True) if row]


def median_seconds(turns: list[dict]) -> float:
    return statistics.median(t["seconds"] for t in turns)


def summarize(v: Variant, turns: list[dict], setup: Setup) -> dict:
    """What a table says of a variant: medians over all of its turns after the first step."""
    tokens = v.tokens() / median_seconds(turns[1:])
    flops = tokens * setup.model().flops_per_token(v.T) / (v.processes if setup.device.type == "cuda" else 1)
    half = "bfloat16" if "bfloat16" in setup.peaks else "float16"
    return dict(
        **dict(B=v.B, T=v.T, processes=v.processes, precision=v.precision(), tokens_per_second=tokens),
        **dict(ms=1000 * v.tokens() / tokens, turns_ms=[1000 * t["seconds"] for t in turns[1:]]),
        **dict(mfu=flops / setup.peaks[v.precision()][0], mfu_half=flops / setup.peaks[half][0]),
        **dict(memory_gb=max(t["memory"] for t in turns) / 1e9, start=turns[0]["start"], loss=turns[-1]["loss"]),
    )


def compare(rows: list[dict], key: str = "tokens_per_second") -> list[dict]:
    """Adds to each row how many times as fast as the first it is."""
    for row in rows:
        row["total"] = row[key] / rows[0][key]
    return rows


# -- the comparisons: each returns the rows of its table ---------------------------------------------------------------


def ladder(setup: Setup) -> list[dict]:
    """Each technique on top of those before it, from a plain float32 step to what training uses."""
    config, device, B = setup.config, setup.device, setup.config.batch_size
    plain = dict(dtype=torch.float32, tf32=False, compile=False, flash=False, pad_vocab_to=1, fused=False, own_loss=False)
    rungs, bases, at = [setup.variant("float32, eager", **plain)], [None], 0

    def climb(name: str, why_not: str = "", stay: bool = False, **changes) -> None:
        """Adds a rung to the one we stand on; with `stay`, the next ones do not build on it."""
        nonlocal at
        if why_not:
            return setup.notes.append(f"left out: {name} ({why_not})")
        rungs.append(replace(rungs[at], name=name, **changes))
        bases.append(at)
        at = at if stay else len(rungs) - 1

    climb("+ TF32 matmuls", "" if has_tf32(device) else "for NVIDIA GPUs of compute capability 8.0 and more", tf32=True)
    half = setup.dtype if setup.dtype != torch.float32 else torch.bfloat16
    stay = setup.dtype == torch.float32
    climb(f"+ {spell(half)} autocast", "as asked" if stay and config.dtype != "auto" else "", stay, dtype=half)
    climb("+ torch.compile", setup.why_not_compile, compile=True)
    climb("+ fused attention", flash=True)
    climb("+ vocabulary of 50304", pad_vocab_to=128)
    climb("+ fused AdamW", "" if device.type in ("cuda", "cpu") else f"not used on {device.type}", fused=True)
    climb("+ the model's own loss", own_loss=True)
    more = B * (2 if device.type == "cpu" else 4)
    climb(f"+ micro-batch {B} → {more}", B=more)
    rows = measure(rungs, bases, setup)
    if stay and config.dtype == "auto":
        setup.notes.append(
            f"training stays in float32 here ({setup.why}): the rungs after {spell(half)} go on from the one before it"
        )
    setup.notes += [
        f"slower: {row['name']} runs at {row['speedup']:.2f} × the speed of {row['base']!r}"
        for row in rows
        if row.get("speedup", 1) < 0.98
    ]
    return rows


def sweep(setup: Setup) -> list[dict]:
    """Micro-batches of 1, 2, 4, … as training takes its step, until memory ends, or on a CPU, which kills instead of raising,
    before it could."""
    rows, B, room = [], 1, free_memory() / 1e9
    while B <= setup.config.max_batch:
        if setup.device.type == "cpu" and rows and 2 * rows[-1]["memory_gb"] > room:
            setup.notes.append(f"ended before B {B}: it could need {2 * rows[-1]['memory_gb']:.0f} of the {room:.0f} GB free")
            break
        found = measure([setup.variant(f"B {B}", B=B)], [None], setup)
        if not found:
            break
        rows, B = rows + found, 2 * B
    return compare(rows)


def scaling(setup: Setup) -> list[dict]:
    """The same micro-batch on each of 1, 2, 4, 8 processes, gradients averaged as in training."""
    on_gpu = setup.device.type == "cuda"
    most = torch.cuda.device_count() if on_gpu else os.cpu_count() or 1
    counts = [n for n in (1, 2, 4, 8) if n <= most]
    variants = [setup.variant(f"{n} process{'es' * (n > 1)}", processes=n) for n in counts]
    rows = measure(variants, [None] + [0] * (len(counts) - 1), setup)
    for row in rows:
        row["ideal"] = row["total"] / (row["processes"] if on_gpu else 1)
    if not on_gpu:
        setup.notes.append("the processes share the same cores: the ideal is the speed of one process")
    return rows


def against(setup: Setup) -> list[dict]:
    """transformers' GPT-2, the same AdamW and precision, and the step as training takes it."""
    compiled = not setup.why_not_compile
    variants = [setup.variant("transformers, eager", hf=True, compile=False)]
    if compiled:
        variants.append(setup.variant("transformers, compiled", hf=True))
    variants.append(setup.variant("this repository" + ", compiled" * compiled))
    return measure(variants, [None, *range(len(variants) - 1)], setup)


def alternate(runs: dict[str, Callable], setup: Setup) -> dict[str, float]:
    """Median seconds of each function, called in turns after one call to warm up; without those that run out of memory."""
    times: dict[str, list[float]] = {}
    for name, run in runs.items():
        try:
            run()
            times[name] = []
        except torch.OutOfMemoryError:
            setup.notes.append(f"{name}: out of memory")
    repeats = {name: max(1, min(100, int(0.02 / timed(runs[name], setup.device)))) for name in times}  # no turn too short
    for _ in range(setup.config.rounds):
        for name, seconds in times.items():
            run, n = runs[name], repeats[name]
            seconds.append(timed(lambda run=run, n=n: [run() for _ in range(n)], setup.device) / n)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


@torch.no_grad()
def generate_plainly(model: GPT, idx: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Greedy generation as everyone writes it first: the whole context again for each token."""
    for _ in range(new_tokens):
        idx = torch.cat([idx, model.logits(model.hidden(idx)[:, -1:]).argmax(-1)], 1)
    return idx


def generate(setup: Setup) -> list[dict]:
    """Greedy generation from half a context on, against the limit: each token reads all weights once."""
    T, device = setup.config.sequence_length, setup.device
    model = GPT(GPTConfig(block_size=T, **MODELS[setup.config.model])).to(device, setup.dtype).eval().requires_grad_(False)
    n, weights = min(64, T // 2), sum(p.nbytes for p in model.parameters())
    prompts = MadeUpTokens(8, T // 2).batch[0].to(device)
    names = {"the whole context for each token, 1 row": 1, "KV cache, 1 row": 1, "KV cache, 8 rows": 8}
    runs = {name: lambda rows=rows: model.generate(prompts[:rows], n, temperature=0) for name, rows in names.items()}
    runs[next(iter(names))] = lambda: generate_plainly(model, prompts[:1], n)
    speed = read_speed(device, weights)
    setup.notes.append(f"limit: reading {weights / 1e6:.0f} MB of weights for each token of a row at {speed / 1e9:.1f} GB/s")
    seconds = alternate(runs, setup)
    rows = [
        dict(name=name, tokens_per_second=names[name] * n / t, limit=n / t * weights / speed) for name, t in seconds.items()
    ]
    return compare(rows)


@torch.no_grad()
def score_one_by_one(model: GPT, examples: list[dict], setup: Setup) -> int:
    """HellaSwag as build-nanogpt scores it: for each example four padded rows and all of their logits; -> the right ones."""
    correct = 0
    for example in examples:
        tokens, mask, label = (torch.as_tensor(t).to(setup.device) for t in hellaswag.render_example(example))
        with autocast(setup.device, setup.dtype):
            logits, _ = model(tokens)
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(4, -1)
        mask = mask[:, 1:]
        correct += int(((losses * mask).sum(1) / mask.sum(1)).argmin() == label)
    return correct


def hellaswag_examples(path: str, count: int) -> list[dict]:
    """Some examples of a file, or made-up ones with the lengths of HellaSwag's validation set (medians of its eighths)."""
    if path:
        examples = list(hellaswag.iterate_examples("val", path))
        return random.Random(0).sample(examples, min(count, len(examples)))
    words, lengths = random.Random(0), ((15, 13), (26, 14), (36, 25), (44, 34), (51, 37), (56, 38), (61, 38), (71, 35))

    def text(n: int) -> str:
        return " ".join(words.choices(["the", "man", "puts", "his", "hands", "on", "a", "table", "and", "looks", "up"], k=n))

    shapes = (lengths[i % len(lengths)] for i in range(count))
    return [dict(ctx=text(c), endings=[text(e) for _ in range(4)], label=0) for c, e in shapes]


def score_hellaswag(setup: Setup) -> list[dict]:
    """HellaSwag's scorer against one example at a time, and against the products of matrices it cannot do without."""
    c = setup.config
    examples = hellaswag_examples(c.hellaswag_path, 48 if setup.device.type == "cpu" else 480)
    model = GPT(GPTConfig(block_size=max(256, c.sequence_length), **MODELS[c.model])).to(setup.device).eval()
    runs = {
        "one example at a time": lambda: score_one_by_one(model, examples, setup),
        "in batches": lambda: hellaswag.evaluate(model, examples, setup.device, dtype=setup.dtype),
    }
    encoded = [hellaswag.encode_example(e, get_tokenizer().encode_ordinary) for e in examples]
    predicted = sum(len(e) for _, endings in encoded for e in endings)
    read = predicted + sum(len(context) - 4 for context, _ in encoded)  # an ending's last token is only predicted
    C, V, L = model.config.n_embd, model.config.vocab_size, model.config.n_layer
    least = (2 * 12 * L * C**2 * read + 2 * V * C * predicted) / setup.peaks[spell(setup.dtype)][0]
    setup.notes.append(f"limit: matrix products over each context once and its endings, at the peak of {spell(setup.dtype)}")
    seconds = alternate(runs, setup)
    rows = [dict(name=name, examples_per_second=len(examples) / t, limit=least / t) for name, t in seconds.items()]
    return compare(rows, "examples_per_second")


def documents_of(folder: Path) -> list[str]:
    """The texts in a directory of shards."""
    tokens = np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))])
    return [get_tokenizer().decode(part[1:].tolist()) for part in np.split(tokens, np.flatnonzero(tokens == EOT))[1:]]


def prepare_data(setup: Setup) -> list[dict]:
    """Text to shards, against the bare tokenizer on every core; then the loader that reads them."""
    c, cores = setup.config, os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as temporary:
        folders = (Path(temporary) / str(i) for i in range(10**6))

        def fineweb() -> Path:
            command = [sys.executable, str(Path(__file__).with_name("fineweb.py")), "--source", "stdlib"]
            command += ["--data-dir", str(folder := next(folders)), "--max-tokens", str(c.data_tokens)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise UserError(f"{' '.join(command)} failed: {done.stderr.strip()}")
            return folder

        texts, encode = documents_of(folder := fineweb()), get_tokenizer().encode_ordinary
        loader = DataLoaderLite(folder, "train", c.batch_size, c.sequence_length, shuffle=True)
        alone, whole, batch = "the tokenizer alone, 1 core", f"fineweb.py, start to finish, {cores} cores", "DataLoaderLite"
        tokens = {alone: sum(len(encode(t)) for t in texts), batch: c.batch_size * c.sequence_length}
        tokens[whole] = tokens[alone] + len(texts)  # with <|endoftext|>
        runs = {alone: lambda: [encode(t) for t in texts], whole: fineweb, batch: loader.next_batch}
        seconds = alternate(runs, setup)
    rows = [dict(name=name, tokens_per_second=tokens[name] / t, ms=1000 * t) for name, t in seconds.items()]
    rows[1]["limit"] = rows[1]["tokens_per_second"] / (cores * rows[0]["tokens_per_second"])
    setup.notes.append(f"limit: the tokenizer alone on {cores} cores; the loader's ms are those of one batch")
    return compare(rows[:2]) + rows[2:]


def attention(setup: Setup) -> list[dict]:
    """Causal attention alone, forward and backward, by sequence length: written out as in the paper, and PyTorch's fused."""
    size, device, B, rows = MODELS[setup.config.model], setup.device, 4, []
    for T in [T for T in (2**i for i in range(5, 20)) if T <= 4 * setup.config.sequence_length][-5:]:
        shape = (3, B, size["n_head"], T, size["n_embd"] // size["n_head"])
        q, k, v = (x.requires_grad_() for x in torch.randn(shape, device=device, dtype=setup.dtype).unbind())
        future = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)

        def written_out(q=q, k=k, v=v, future=future):
            scores = (q @ k.transpose(-2, -1) * q.size(-1) ** -0.5).masked_fill(future, -torch.inf)
            (scores.float().softmax(-1).to(v.dtype) @ v).sum().backward()

        def fused(q=q, k=k, v=v):
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        seconds = alternate({f"written out, T {T}": written_out, f"fused, T {T}": fused}, setup)
        ms = {name.split(",")[0].replace(" ", "_") + "_ms": 1000 * t for name, t in seconds.items()}
        ratio = dict(speedup=ms["written_out_ms"] / ms["fused_ms"]) if len(ms) == 2 else {}
        rows.append(dict(name=f"T {T}", T=T, **ms, **ratio))
    setup.notes.append(f"{B} sequences, {size['n_head']} heads of {shape[-1]}, {spell(setup.dtype)}, forward and backward")
    return rows


BENCHMARKS = dict(ladder=ladder, sweep=sweep, scaling=scaling, against=against, generate=generate)
BENCHMARKS |= dict(hellaswag=score_hellaswag, data=prepare_data, attention=attention)


# -- results: tables, JSON, plots --------------------------------------------------------------------------------------

COLUMNS = {  # key of a row: heading, format
    "machine": ("machine", ""),
    "name": ("", ""),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "examples_per_second": ("examples/s", ",.1f"),
    "ms": ("ms", ",.1f"),
    "written_out_ms": ("written out, ms", ",.2f"),
    "fused_ms": ("fused, ms", ",.2f"),
    "speedup": ("× base", ".2f"),
    "total": ("× first", ".2f"),
    "mfu": ("MFU own", ".1%"),
    "mfu_half": ("MFU bf16", ".1%"),
    "limit": ("of limit", ".1%"),
    "ideal": ("of ideal", ".1%"),
    "memory_gb": ("peak GB", ".2f"),
    "start": ("start s", ".1f"),
}


def table(rows: list[dict]) -> str:
    """The rows as an aligned Markdown table with the columns that they have."""
    keys = [key for key in COLUMNS if any(key in row for row in rows)]
    cells = [[COLUMNS[key][0] for key in keys]]
    cells += [[format(row[key], COLUMNS[key][1]) if key in row else "" for key in keys] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    is_text = [key in ("machine", "name") for key in keys]
    lines = [
        "| " + " | ".join(c.ljust(w) if text else c.rjust(w) for c, w, text in zip(line, widths, is_text, strict=True)) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (w + 2) if text else "-" * (w + 1) + ":" for w, text in zip(widths, is_text, strict=True)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def show(name: str, results: list[dict]) -> None:
    """Prints one comparison's table over all machines, and what there is to know about it."""
    several = len(results) > 1
    print(f"\n{name}")
    rows = [
        {"machine": r["device"]["name"]} | row if several else row for r in results for row in r["benchmarks"][name]["rows"]
    ]
    print(table(rows))
    for r in results:
        for note in r["benchmarks"][name]["notes"]:
            print(f"  {r['device']['name'] + ': ' if several else ''}{note}")


def describe(result: dict) -> str:
    """The machine, the precision and the peaks that MFU is measured against, in a few lines."""
    d, c = result["device"], result["config"]
    lines = [
        f"{d['name']} ({d['type']}, {d['threads']} CPU threads), torch {result['versions']['torch']}, revision {result['git']}",
        f"{c['model']}, B {c['batch_size']} × T {c['sequence_length']}; training uses {result['dtype']} here ({result['why']})",
        *(f"peak {name}: {flops / 1e12:,.2f} TFLOP/s, {source}" for name, (flops, source) in result["peaks"].items()),
        "MFU own: of the peak of the row's own precision; MFU bf16: of bfloat16's (float16's where there is no bfloat16)",
        "× base: times as fast as the row it builds on, in turns side by side; × first: as the first row, a product of those",
        "start: seconds from the start of a process to the end of its first step, compilation included",
    ]
    return "\n".join(lines)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's where Linux tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo)
    return f"{found[1] if found else device.type}, {os.cpu_count()} cores"


def draw(results: list[dict], path: Path) -> None:
    """A row of panels for each comparison, a column for each machine."""
    from matplotlib.figure import Figure

    names = [name for name in BENCHMARKS if any(name in r["benchmarks"] for r in results)]
    figure = Figure(figsize=(7.5 * len(results), 4 * len(names)), layout="constrained", facecolor="white")
    axes = figure.subplots(len(names), len(results), squeeze=False)
    for line, name in zip(axes, names, strict=True):
        for axis, result in zip(line, results, strict=True):
            if not (rows := result["benchmarks"].get(name, {}).get("rows")):
                axis.set_visible(False)
                continue
            (draw_bars if name != "attention" else draw_curves)(axis, rows)
            axis.set_title(f"{name}: {result['device']['name']}", fontsize=10)
    figure.savefig(path, dpi=150)


def draw_bars(axis, rows: list[dict]) -> None:
    """A bar for each row, as long as it is fast; orange where it is slower than what it builds on."""
    key = "examples_per_second" if "examples_per_second" in rows[0] else "tokens_per_second"
    colors = [plots.ORANGE if row.get("speedup", 1) < 0.98 else plots.BLUE for row in rows]
    bars = axis.barh([row["name"] for row in rows], [row[key] for row in rows], color=colors)
    labels = [f" {row[key]:,.0f}" + (f"  ({row['total']:.2f} ×)" if "total" in row else "") for row in rows]
    axis.bar_label(bars, labels, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.25)
    axis.set_xlabel(COLUMNS[key][0])
    plots.tidy(axis)


def draw_curves(axis, rows: list[dict]) -> None:
    """Milliseconds by sequence length, a curve for each way to compute the same thing."""
    for key, color in ("written_out_ms", plots.ORANGE), ("fused_ms", plots.BLUE):
        points = [(row["T"], row[key]) for row in rows if key in row]
        axis.loglog(*zip(*points, strict=True), "o-", color=color, label=COLUMNS[key][0].removesuffix(", ms"))
    axis.set(xlabel="sequence length", ylabel="milliseconds, forward and backward")
    axis.set_xticks([row["T"] for row in rows], [str(row["T"]) for row in rows], minor=False)
    plots.tidy(axis)


def read_result(path: str) -> dict:
    try:
        result = json.loads(Path(path).read_text())
        _ = result["device"]["name"], [b["rows"] for b in result["benchmarks"].values()]
        return result
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a result of bench.py ({type(error).__name__}: {error}): name its JSON files") from None


def report(results: list[dict], out: str) -> None:
    """The results of one or more machines: a table for each comparison, and one plot, OUT.png."""
    for result in results:
        print(f"\n{describe(result)}")
    for name in BENCHMARKS:
        if having := [r for r in results if name in r["benchmarks"]]:
            show(name, having)
    draw(results, path := Path(f"{out}.png"))
    print(f"\nplot: {path}")


def check(config: BenchConfig) -> None:
    """Raises UserError that names every value that cannot be."""
    least = dict(rounds=1, max_batch=1, batch_size=0, sequence_length=0, steps=0, data_tokens=0)
    problems = [
        f"--{name.replace('_', '-')} {getattr(config, name)}: at least {n}{' (bench.py picks)' if n == 0 else ''}"
        for name, n in least.items()
        if getattr(config, name) < n
    ]
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        problems.append("bench.py starts its own processes: use python bench.py --scaling, not torchrun")
    if problems:
        raise UserError("; ".join(problems))


def main() -> None:
    config = tyro.cli(BenchConfig)
    check(config)
    Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    if config.report:
        return report([read_result(path) for path in config.report], config.out)
    start, setup = time.perf_counter(), find_setup(config)
    config = setup.config
    with World(config.device) as world:
        result = describe_run(config, world, setup.dtype, config.batch_size)
    result["device"]["name"] = device_name(setup.device)
    result |= dict(why=setup.why, peaks=setup.peaks, benchmarks={})
    path = Path(f"{config.out}.json")
    for name in [name for name in BENCHMARKS if getattr(config, name)] or ["ladder"]:
        setup.notes = []
        result["benchmarks"][name] = dict(rows=BENCHMARKS[name](setup), notes=setup.notes)
        path.write_text(json.dumps(result, indent=1) + "\n")  # after each, so that an interruption loses one at most
    report([result], config.out)
    print(f"numbers: {path}; {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    run_script(main)

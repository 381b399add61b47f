"""Trains a GPT-2. The 124M reproduction on one machine of 8 GPUs, or the same on a laptop:

torchrun --standalone --nproc_per_node=8 train_gpt2.py
python train_gpt2.py --preset quickstart
"""

import dataclasses
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
import tyro
from tqdm import tqdm

import checkpoint
import hellaswag
import plots
import sample
from distributed import World
from model import GPT, SIZES, DataLoaderLite, GPTConfig, autocast, peak_flops, pick_dtype
from tokenizer import UserError, run_script


@dataclass
class TrainConfig:
    """Train a GPT-2. Without a flag: the reproduction of the 124M model. A part with `every` 0 is off."""

    preset: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-125m", "quickstart"] = "gpt2"
    """a complete set of the values below, which any flag overrides"""

    # where things are
    data_dir: str = "edu_fineweb10B"  # directory of token shards, as fineweb.py makes them
    log_dir: str = "log"  # what the run leaves: logs, plot, checkpoints
    init_from: str = "scratch"  # scratch | a GPT-2 on the Hugging Face hub | a model directory or checkpoint
    resume: str = "none"  # none | auto (the newest whole checkpoint in log_dir, if any) | a checkpoint directory
    overwrite: bool = False  # start anew in a log_dir that holds a run

    # the model (GPT-2 paper, table 2)
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads a block
    n_embd: int = 768  # channels, C
    pad_vocab_to: int = 128  # embedding rows are a multiple of this, in memory only
    sequence_length: int = 1024  # tokens in a sequence, T, and the context window of a new model

    # the batch: total_batch_size = batch_size × sequence_length × accumulation × processes
    batch_size: int = 0  # sequences of a micro-batch on each process, B; 0 = the largest power of two up to 64 that fits
    total_batch_size: int = 524288  # tokens an update (GPT-3 paper, table 2.1: 0.5M)

    # the recipe (GPT-3 paper, section 2.3 and appendix B)
    max_steps: int = 19073  # updates: 10B tokens of 0.5M
    warmup_steps: int = 715  # linear warm-up: 375M tokens
    learning_rate: float = 6e-4  # at its peak
    min_lr_frac: float = 0.1  # of the peak, at the end
    decay: Literal["cosine", "linear", "wsd"] = "cosine"  # after warm-up; wsd stays at the peak until its last part
    decay_frac: float = 0.2  # the part of max_steps over which wsd decays
    weight_decay: float = 0.1  # on matrices and embeddings
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices inside the blocks, AdamW for the rest
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    eps: float = 1e-8  # AdamW
    grad_clip: float = 1.0  # largest norm of the gradient; 0 = off
    skip_spikes: float = 0.0  # drop updates whose loss or norm is this many deviations above the last 128; 0 = off

    # what happens on the way, at step 0, every so many steps, and at the end
    val_every: int = 250  # validation loss
    val_tokens: int = 10485760  # tokens of the validation split to look at
    hellaswag_every: int = 250  # HellaSwag score
    hellaswag_limit: int = 0  # only the first examples; 0 = all 10,042
    hellaswag_path: str = ""  # a jsonl file; empty = download it
    sample_every: int = 250  # samples (not at step 0)
    sample_prompt: str = "Hello, I'm a language model,"  # what they continue
    sample_tokens: int = 32  # tokens added to it
    num_samples: int = 4  # how many, on each process
    checkpoint_every: int = 5000  # checkpoints (not at step 0)
    keep_checkpoints: int = 2  # how many of the newest to keep; the best by validation loss stays too

    # how it computes
    seed: int = 1337  # of the weights, the order of the data, and the samples
    shuffle: bool = True  # permute the documents anew in each epoch
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # what to autocast to
    sharding: Literal["ddp", "zero1", "fsdp"] = "ddp"  # what processes divide: batch; + optimizer state; + weights, gradients
    compile: bool = True  # torch.compile the training step, where there is a compiler
    activation_checkpointing: bool = False  # recompute activations in the backward pass: less memory, a third more work
    deterministic: bool = False  # CUDA: bit-identical runs, slower (a CPU is so anyway)
    overfit_single_batch: bool = False  # train on the first batch only: the loss must go to zero
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # where the metrics go besides log_dir


PRESETS = {
    # sizes: GPT-2 paper, table 2; learning rates, batch sizes and warm-up: GPT-3 paper, table 2.1 and appendix B
    "gpt2": TrainConfig(),
    "gpt2-medium": TrainConfig(preset="gpt2-medium", **SIZES["gpt2-medium"], learning_rate=3e-4),
    "gpt2-large": TrainConfig(preset="gpt2-large", **SIZES["gpt2-large"], learning_rate=2.5e-4),
    "gpt2-xl": TrainConfig(
        preset="gpt2-xl",
        **SIZES["gpt2-xl"],
        learning_rate=2e-4,
        total_batch_size=1048576,
        max_steps=9536,
        warmup_steps=358,  # 375M tokens
    ),
    "gpt3-125m": TrainConfig(preset="gpt3-125m", sequence_length=2048),
    # about three minutes on two CPU cores, on the source of Python's standard library
    "quickstart": TrainConfig(
        preset="quickstart",
        data_dir="data/stdlib",
        log_dir="log/quickstart",
        **dict(n_layer=6, n_head=6, n_embd=192, sequence_length=256),
        **dict(batch_size=8, total_batch_size=2048, max_steps=150, warmup_steps=20, learning_rate=8e-3, optimizer="muon"),
        **dict(val_every=50, val_tokens=20480, hellaswag_every=150, hellaswag_limit=100, checkpoint_every=150),
        **dict(sample_every=75, sample_prompt="def ", sample_tokens=96, num_samples=2),
    ),
}


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of update `step`: linear warm-up, then decay to min_lr_frac of the peak at max_steps.

    cosine: GPT-3 paper, appendix B. wsd: warm-up, stable, linear decay (Hu et al. 2024, MiniCPM).
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    decay_steps = config.max_steps - config.warmup_steps
    if config.decay == "wsd":
        decay_steps = min(decay_steps, round(config.decay_frac * config.max_steps))
    progress = min(1.0, max(0.0, 1 - (config.max_steps - step) / max(1, decay_steps)))
    part = 0.5 * (1 + math.cos(math.pi * progress)) if config.decay == "cosine" else 1 - progress
    return config.learning_rate * (config.min_lr_frac + (1 - config.min_lr_frac) * part)


def check(config: TrainConfig, world_size: int) -> list[str]:
    """Every problem of a configuration, a sentence each, before anything is allocated. Empty if there is none."""
    c, problems = config, []

    def expect(ok: bool, sentence: str) -> bool:
        if not ok:
            problems.append(sentence)
        return ok

    for name in ("n_layer", "n_head", "n_embd", "pad_vocab_to", "sequence_length", "total_batch_size", "max_steps"):
        expect(getattr(c, name) > 0, f"{name} is {getattr(c, name)}: it must be at least 1")
    for name in ("batch_size", "warmup_steps", "weight_decay", "grad_clip", "val_every", "hellaswag_every", "hellaswag_limit"):
        expect(getattr(c, name) >= 0, f"{name} is {getattr(c, name)}: it must be 0 or more")
    for name in ("sample_every", "checkpoint_every", "min_lr_frac", "skip_spikes"):
        expect(getattr(c, name) >= 0, f"{name} is {getattr(c, name)}: it must be 0 or more")
    for name in ("learning_rate", "eps", "num_samples", "sample_tokens", "keep_checkpoints"):
        expect(getattr(c, name) > 0, f"{name} is {getattr(c, name)}: it must be above 0")
    for name in ("beta1", "beta2"):
        expect(0 <= getattr(c, name) < 1, f"{name} is {getattr(c, name)}: it must be at least 0 and below 1")
    expect(0 < c.decay_frac <= 1, f"decay_frac is {c.decay_frac}: it must be above 0, at most 1")
    if problems:
        return problems
    T, S = c.sequence_length, c.total_batch_size // c.sequence_length  # S sequences an update
    expect(
        c.n_embd % c.n_head == 0, f"n_embd {c.n_embd} does not divide by n_head {c.n_head}: use {nearby(c.n_embd, c.n_head)}"
    )
    expect(c.warmup_steps < c.max_steps, f"warmup_steps {c.warmup_steps} leaves nothing of max_steps {c.max_steps}: use fewer")
    expect(not c.val_every or c.val_tokens >= T, f"val_tokens {c.val_tokens} is less than a sequence of {T}: use at least {T}")
    if c.resume == "none" and not c.overwrite and (Path(c.log_dir) / "metrics.jsonl").exists():
        expect(
            False, f"log_dir {c.log_dir!r} holds a run: add --resume auto to go on with it, --overwrite, or another --log-dir"
        )
    if c.tracker != "none" and importlib.util.find_spec(c.tracker) is None:
        expect(False, f"tracker {c.tracker} is not installed: pip install {c.tracker}")
    if not Path(c.data_dir).is_dir():
        how = {"quickstart": " --source stdlib --data-dir data/stdlib"}.get(c.preset, f" --data-dir {c.data_dir}")
        expect(False, f"data_dir {c.data_dir!r} does not exist: make it with python fineweb.py{how}")
    if expect(
        c.total_batch_size % T == 0,
        f"total_batch_size {c.total_batch_size} tokens is not a whole number of sequences of {T}: "
        f"use {nearby(c.total_batch_size, T)}",
    ) and expect(
        S % world_size == 0,
        f"the {S} sequences of a batch (total_batch_size {c.total_batch_size} / sequence_length {T}) cannot be split over "
        f"{world_size} processes: use a number of processes that divides {S}, or total_batch_size {nearby(S, world_size, T)}",
    ):
        fits = [b for b in range(1, S // world_size + 1) if S // world_size % b == 0 and b <= 64]
        expect(
            c.batch_size == 0 or S // world_size % c.batch_size == 0,
            f"batch_size {c.batch_size} does not divide the {S // world_size} sequences of each of {world_size} process(es): "
            f"use one of {', '.join(map(str, fits))}",
        )
    return problems


def nearby(n: int, divisor: int, unit: int = 1) -> str:
    """The multiples of divisor next to n, in units: '6 or 12'."""
    below = n // divisor * divisor
    return " or ".join(str(unit * m) for m in (below, below + divisor) if m)


def fit_batch_size(model: torch.nn.Module, raw: GPT, config: TrainConfig, world: World, dtype: torch.dtype) -> int:
    """The largest power of two up to 64 that divides the batch and fits in memory, the same on every process.

    On a GPU it tries: a forward and a backward pass with room held for the optimizer's moments. On a CPU, where running
    out of memory raises nothing, it stays within half of the free memory by an estimate of the activations.
    """
    per_process = config.total_batch_size // config.sequence_length // world.size
    B = math.gcd(64, per_process)
    if world.device.type == "cuda":
        fits = False
        while not fits and B > 1:
            fits = not world.any(runs_out_of_memory(model, raw, B, config.sequence_length, world, dtype))
            B = B if fits else B // 2
        return B
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4 * 2**30
    bytes_per_value = 4 if dtype == torch.float32 else 3  # bfloat16, with some float32 beside it
    per_token = bytes_per_value * (18 * config.n_embd * raw.config.n_layer + 3 * raw.config.padded_vocab_size)
    room = free / 2 / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 12 * raw.num_params()  # gradients and two moments
    while B > 1 and B * config.sequence_length * per_token > room:
        B //= 2
    while world.any(B * config.sequence_length * per_token > room and B > 1):
        B //= 2
    return B


def runs_out_of_memory(model, raw: GPT, B: int, T: int, world: World, dtype: torch.dtype) -> bool:
    """Whether a micro-batch of B sequences does not fit beside weights, gradients and AdamW's two moments."""
    try:
        ranks = world.size if world.sharding in ("zero1", "fsdp") else 1  # that divide them
        moments = torch.empty(2 * sum(p.numel() for p in raw.parameters()) // ranks, device=world.device)
        x = torch.zeros(B, T, dtype=torch.int64, device=world.device)
        with autocast(world.device, dtype):
            loss = model(x, x)[1]
        loss.backward()
        del moments
        return False
    except torch.OutOfMemoryError:
        return True
    finally:
        raw.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


class Interrupted(Exception):
    """SIGTERM or SIGINT came: the unfinished update or evaluation is dropped."""


class Stop:
    """Remembers SIGTERM and SIGINT, and raises Interrupted on all processes at the same point. A second one ends at once."""

    def __init__(self, world: World):
        self.world, self.asked = world, False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.remember)

    def remember(self, number, _frame) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        if self.world.any(self.asked):
            raise Interrupted


def train_step(
    model, optimizers, scaler, loader, grad_accum_steps, world, dtype, lr, grad_clip, stop=None, accept=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One update: gradients of the mean loss over all micro-batches and processes, clipped, then the optimizers.

    Returns the loss and the norm of the gradient before clipping, both scalars on the device, the same on every process.
    accept(loss, norm) may refuse the update; it costs a wait for the device in the middle of the step.
    """
    model.train()
    loss_accum = torch.zeros((), device=world.device)
    for micro_step in range(grad_accum_steps):
        x, y = (t.to(world.device, non_blocking=True) for t in loader.next_batch())
        world.sync_gradients(model, micro_step == grad_accum_steps - 1)  # before the forward: DDP looks at it there
        with autocast(world.device, dtype):
            _, loss = model(x, y)
        loss = loss / grad_accum_steps  # the mean over the update is the mean of equally large micro-batches' means
        loss_accum += loss.detach()
        scaler.scale(loss).backward()
        if stop is not None:
            stop.check()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # with fsdp each process holds a part
    loss_accum = world.mean(loss_accum)
    accepted = accept is None or accept(loss_accum.item(), norm.item())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        if accepted:
            scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return loss_accum, norm


def is_spike(value: float, recent: list[float], limit: float, window: int = 128) -> bool:
    """Whether a value is more than `limit` standard deviations above the mean of a full window (as llm.c's -sl and -sg)."""
    return len(recent) == window and value > statistics.fmean(recent) + limit * statistics.pstdev(recent)


@torch.no_grad()
def validate(raw: GPT, loader: DataLoaderLite, val_tokens: int, world: World, dtype: torch.dtype, stop=None) -> float:
    """The mean loss over the first val_tokens of the split, from sequence 0, whatever the batch and the processes."""
    sequences = min(val_tokens, loader.num_tokens - 1) // loader.T
    was_training = raw.training
    raw.eval()
    total = torch.zeros((), dtype=torch.float64, device="cpu" if world.device.type == "mps" else world.device)
    stride = loader.B * world.size
    for first in tqdm(range(0, sequences, stride), "validation", leave=False, disable=quiet(world)):
        mine = first + world.rank * loader.B
        if count := max(0, min(loader.B, sequences - mine)):
            x, y = loader.batch(mine, count)
            with autocast(world.device, dtype):
                _, loss = raw(x.to(world.device), y.to(world.device))
            total += loss.to(total) * count
        if stop is not None:
            stop.check()
    raw.train(was_training)
    return (world.sum(total) / sequences).item()


def quiet(world: World) -> bool:
    """Whether a progress bar would be in the way: on other ranks, and where nobody watches a terminal."""
    return not (world.is_main and sys.stderr.isatty())


class Log:
    """The console, log.txt (`{step} {stream} {value}`, as build-nanogpt writes it), metrics.jsonl and a tracker; silent off
    rank 0."""

    def __init__(self, log_dir: str, is_main: bool, tracker: str = "none"):
        self.dir, self.is_main, self.tracker = Path(log_dir), is_main, tracker
        self.text, self.metrics = self.dir / "log.txt", self.dir / "metrics.jsonl"
        self.track, self.close = ignore, ignore

    def start(self, run: dict) -> None:
        """Begins a new run: the first line of metrics.jsonl says what it is."""
        if self.is_main:
            self.dir.mkdir(parents=True, exist_ok=True)
            checkpoint.prune(self.dir, keep=0)
            self.metrics.write_text(json.dumps({"type": "run", **run}) + "\n")
            self.text.write_text("")
            self.track, self.close = open_tracker(self.tracker, self.dir, run, 0)

    def resume(self, step: int, evaluated: bool, run: dict) -> None:
        """Cuts both files back to a checkpoint's step, so that no step appears twice, and goes on from there."""

        def keep(at: int, is_train: bool) -> bool:
            return at < step or (at == step and evaluated and not is_train)

        if self.is_main:
            lines = [line.split() for line in self.text.read_text().splitlines()]
            lines = [line for line in lines if len(line) == 3 and keep(int(line[0]), line[1] == "train")]
            replace(self.text, "".join(" ".join(line) + "\n" for line in lines))
            records = [r for r in map(parse, self.metrics.read_text().splitlines()) if r]
            records = [r for r in records if r["type"] in ("run", "resume") or keep(r["step"], r["type"] == "train")]
            records = [r for r in records if r["type"] != "resume" or r["step"] <= step] + [
                {"type": "resume", "step": step, **run}
            ]
            replace(self.metrics, "".join(json.dumps(r) + "\n" for r in records))
            self.track, self.close = open_tracker(self.tracker, self.dir, run, step)

    def say(self, message: str = "") -> None:
        if self.is_main:
            print(message, flush=True)

    def value(self, step: int, stream: str, value: float, digits: int = 4, **more) -> None:
        """One value of train, val or hella, in both files; `more` goes to metrics.jsonl."""
        if self.is_main:
            with open(self.text, "a") as f:
                f.write(f"{step} {stream} {value:.{digits}f}\n")
            name = {"train": "loss", "val": "val_loss", "hella": "hellaswag"}[stream]
            self.record(step, stream, **{name: value}, **more)

    def record(self, step: int, type: str, **values) -> None:
        if self.is_main:
            with open(self.metrics, "a") as f:
                f.write(json.dumps({"type": type, "step": step, **values}) + "\n")
            self.track(step, type, values)


def ignore(*_) -> None:
    pass


def open_tracker(name: str, log_dir: Path, run: dict, step: int) -> tuple:
    """What sends a record (step, type, values) to TensorBoard (files in log_dir), wandb or trackio, and what ends it."""
    if name == "none":
        return ignore, ignore
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(log_dir / "tensorboard", purge_step=step)  # a resumed run replaces what came after
        writer.add_text("run", f"```\n{json.dumps(run, indent=2)}\n```", step)

        def write(step: int, type: str, values: dict) -> None:
            for key, value in values.items():
                if isinstance(value, (int, float)):
                    writer.add_scalar(f"{type}/{key}", value, step)
                elif key == "samples":
                    writer.add_text("samples", "\n\n---\n\n".join(value), step)

        return write, writer.close
    service = importlib.import_module(name)  # wandb and trackio share these three calls
    service.init(project="gpt2", name=log_dir.name, config=run["config"], **({"dir": str(log_dir)} if name == "wandb" else {}))

    def send(step: int, type: str, values: dict) -> None:
        texts = {key: "\n---\n".join(value) for key, value in values.items() if isinstance(value, list)}
        service.log({f"{type}/{key}": value for key, value in {**values, **texts}.items()}, step=step)

    return send, service.finish


def parse(line: str) -> dict | None:
    """A line of metrics.jsonl; None for one that a power cut left half-written."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text)
    checkpoint.sync(beside)
    beside.replace(path)


def describe_run(config: TrainConfig, world: World, dtype: torch.dtype, batch_size: int) -> dict:
    """What the first line of metrics.jsonl holds, so that every number can be traced."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent)
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "config": dataclasses.asdict(config),
        "command": command(),
        "git": git.stdout.strip(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": {"type": world.device.type, "name": name, "processes": world.size, "threads": torch.get_num_threads()},
        "dtype": str(dtype).removeprefix("torch."),
        "batch_size": batch_size,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def compiler_works(device: torch.device) -> str:
    """Empty if torch.compile works here, else why it does not."""
    if device.type == "mps":
        return "torch.compile is not reliable on MPS"
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
        return ""
    except Exception as error:  # no compiler, no Triton, an unsupported Python: any reason will do
        return f"torch.compile does not work here ({type(error).__name__}; it needs a C++ compiler such as g++)"


def peak_memory(device: torch.device) -> int:
    """Bytes: the most the GPU's allocator held, or the most this process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def duration(seconds: float) -> str:
    minutes = int(seconds / 60)
    return f"{minutes // 60}h {minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m {int(seconds) % 60:02d}s"


def parse_command_line(args: list[str]) -> TrainConfig:
    """The configuration: the preset that is named, with every other flag laid over it."""
    named = [b for a, b in pairwise(args) if a == "--preset"]
    named += [a.removeprefix("--preset=") for a in args if a.startswith("--preset=")]
    return tyro.cli(TrainConfig, default=PRESETS.get(named[-1] if named else "gpt2", PRESETS["gpt2"]), args=args)


# What may differ between a run and its continuation without changing what is computed.
HARMLESS = {"preset", "resume", "overwrite", "log_dir", "init_from", "batch_size", "sharding", "keep_checkpoints"}


def find_resume(config: TrainConfig, log: Log) -> tuple[Path, dict] | None:
    """The checkpoint to go on from and its state. Raises UserError if it belongs to another model or other sequences."""
    if config.resume == "none":
        return None
    if config.resume == "auto":
        found = checkpoint.newest(config.log_dir, log.say)
        if found is None:
            log.say(f"resume: no checkpoint in {config.log_dir} yet, starting from the beginning")
            return None
    else:
        found = Path(config.resume), checkpoint.load_state(config.resume)
    path, state = found
    now, then = dataclasses.asdict(config), state["config"]
    changed = {k: f"{k} {then[k]} -> {v}" for k, v in now.items() if then.get(k, v) != v and k not in HARMLESS}
    if fixed := [changed[k] for k in ("n_layer", "n_head", "n_embd", "sequence_length", "optimizer") if k in changed]:
        raise UserError(f"{path} cannot be resumed with another {', '.join(fixed)}: use its values, or --init-from {path}")
    log.say(f"resuming from {path}: {state['step']} updates, {state['cursor']:,} sequences")
    if changed:
        log.say(f"  with other settings than before: {', '.join(changed.values())}")
    return found


def load_hellaswag(config: TrainConfig, world: World, log: Log) -> list[dict]:
    """The examples to score; empty, with a line that says why, where there are none to be had."""
    if not config.hellaswag_every:
        return []
    try:
        return hellaswag.load_examples("val", config.hellaswag_path, config.hellaswag_limit, world)
    except UserError as error:
        log.say(f"hellaswag: off, {error}")
        return []


@dataclass
class Run:
    """What the loop works on. `raw` is saved, scored and sampled; `model` around it is compiled, averages gradients, trains."""

    config: TrainConfig
    world: World
    log: Log
    stop: Stop
    dtype: torch.dtype
    raw: GPT
    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    batch_size: int  # B, the micro-batch
    train_loader: DataLoaderLite
    val_loader: DataLoaderLite
    examples: list[dict]  # of HellaSwag
    peak: float  # operations a second of all processes, what MFU is a part of
    step: int = 0  # updates done
    evaluated: bool = False  # whether what is due at this step is done
    cursor: int = 0  # where this step's sequences start
    best: dict | None = None  # loss and step of the best validation so far
    recent: dict[str, list[float]] = field(default_factory=lambda: {"loss": [], "norm": []})  # for skip_spikes
    skipped: str = ""  # why the last update was not made
    last_saved: Path | None = None
    began: float = 0.0  # when this run would have started, had it never been interrupted

    def wall(self) -> float:
        return time.perf_counter() - self.began

    @property
    def grad_accum_steps(self) -> int:
        return self.config.total_batch_size // self.config.sequence_length // self.world.size // self.batch_size

    def accept(self, loss: float, norm: float) -> bool:
        """Whether to make an update: not where float16 overflowed, nor, with skip_spikes, where loss or norm is an outlier."""
        self.skipped = "" if math.isfinite(norm) else "overflow in float16"
        for name, value in dict(loss=loss, norm=norm).items() if self.config.skip_spikes and not self.skipped else ():
            if is_spike(value, self.recent[name], self.config.skip_spikes):
                self.skipped = f"spike of the {name}"
            self.recent[name] = [*self.recent[name][-127:], value]
        return not self.skipped

    def due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.config.max_steps)


def set_up(config: TrainConfig, world: World) -> Run:
    """Makes the model, the optimizer and the loaders: from nothing, from other weights, or from a checkpoint."""
    log, stop, device, T = Log(config.log_dir, world.is_main, config.tracker), Stop(world), world.device, config.sequence_length
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA; nothing changes on a CPU
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS needs for it
        torch.use_deterministic_algorithms(True)
    path, state = find_resume(config, log) or (None, None)

    dtype, reason = pick_dtype(device, config.dtype)
    if config.dtype == "auto" and state:
        dtype, reason = getattr(torch, state["dtype"]), "as before"
    elif config.dtype == "auto" and world.any(dtype == torch.float32):  # the same on all processes
        dtype = torch.float32
    torch.manual_seed(config.seed)
    memory = dict(pad_vocab_to=config.pad_vocab_to, activation_checkpointing=config.activation_checkpointing)
    if path is None and config.init_from == "scratch":
        raw = GPT(GPTConfig(T, n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, **memory))
    else:
        raw = GPT.from_pretrained(path or config.init_from, block_size=T, **memory)
    world.place(raw, dtype)
    why_eager = compiler_works(device) if config.compile else "as asked"
    log.say(f"device: {device}, {dtype} ({reason}), {'eager: ' + why_eager if why_eager else 'compiled'}".replace("torch.", ""))
    model = raw if why_eager else torch.compile(raw, dynamic=False)

    sequences = config.total_batch_size // T // world.size  # of one update, on each process
    B = config.batch_size or (state["batch_size"] if state else 0)
    if B == 0 or sequences % B:
        B = fit_batch_size(model, raw, config, world, dtype)
    loader = DataLoaderLite(config.data_dir, "train", B, T, world.rank, world.size, config.shuffle, config.seed)
    peak, whose_peak = peak_flops(device, dtype)
    log.say(f"peak: {peak / 1e12:,.2f} TFLOP/s a process ({whose_peak})")
    betas, muon = (config.beta1, config.beta2), config.optimizer == "muon"
    run = Run(
        *(config, world, log, stop, dtype, raw, world.wrap(model)),
        raw.configure_optimizers(config.weight_decay, config.learning_rate, betas, config.eps, muon, world.make_optimizer),
        torch.amp.GradScaler(device.type, enabled=dtype == torch.float16),
        *(B, loader),
        # validation is eager and holds its logits, so it takes fewer sequences at a time
        DataLoaderLite(config.data_dir, "val", max(1, min(B, 8192 // T)), T) if config.val_every else loader,
        load_hellaswag(config, world, log),
        peak * world.size,
        began=time.perf_counter(),
    )
    print_setup(run)
    about = describe_run(config, world, dtype, B)
    if state:
        restore(run, path, state)
        log.resume(run.step, run.evaluated, about)
    else:
        log.start(about)
    return run


def print_setup(run: Run) -> None:
    """The facts of a run that a reader of its output will want to have seen."""
    config, log, tokens, total = run.config, run.log, run.train_loader.num_tokens, run.config.total_batch_size
    log.say(
        f"model: {run.raw.num_params():,} parameters (embedding padded to {run.raw.config.padded_vocab_size} rows in memory)"
    )
    for optimizer in run.optimizers:
        sizes = [[p.numel() for p in group["params"]] for group in optimizer.param_groups]
        parts = zip(sizes, ("decayed", "other"), strict=False)
        log.say(
            f"{type(getattr(optimizer, 'optim', optimizer)).__name__}: "
            + ", ".join(f"{len(ns)} {name} tensors with {sum(ns):,} parameters" for ns, name in parts)
            + (", fused" if optimizer.param_groups[0].get("fused") else ", not fused")
            + (f", state divided over {run.world.size} processes" if run.world.sharding in ("zero1", "fsdp") else "")
        )
    for name, loader in {"train": run.train_loader, "val": run.val_loader}.items():
        if loader is not run.train_loader or name == "train":
            log.say(f"{name}: {len(loader.shards)} shard(s), {loader.num_tokens:,} tokens in {config.data_dir}")
    log.say(
        f"batch: B {run.batch_size} × T {config.sequence_length} × accumulation {run.grad_accum_steps} × "
        f"ranks {run.world.size} = {total:,} tokens; an epoch is {tokens / total:,.1f} steps, "
        f"the run {config.max_steps:,} steps or {config.max_steps * total / tokens:.2f} epochs"
    )
    if config.val_every and config.val_tokens >= run.val_loader.num_tokens:
        log.say(f"val: the split is smaller than val_tokens {config.val_tokens:,}: all of it is used")


def restore(run: Run, path: Path, state: dict) -> None:
    """Puts a run where a checkpoint left it."""
    if state["tokens"] != run.train_loader.num_tokens:
        raise UserError(
            f"{run.config.data_dir} has {run.train_loader.num_tokens} tokens, {state['tokens']} when {path} was written: "
            f"put the shards back, or start a new run from its weights with --init-from {path}"
        )
    checkpoint.load_optimizers(run.raw, run.optimizers, state, run.world)
    run.scaler.load_state_dict(state["scaler"])
    run.train_loader.load_state_dict(state)
    torch.set_rng_state(state["rng"])
    for key in ("step", "evaluated", "cursor", "best", "recent"):
        setattr(run, key, state.get(key, getattr(run, key)))
    run.began, run.last_saved = time.perf_counter() - state["wall"], path


def save(run: Run) -> Path:
    """Writes a checkpoint of the updates done so far, then removes those no longer wanted."""
    state = {key: getattr(run, key) for key in ("step", "evaluated", "cursor", "best", "recent", "batch_size")}
    state |= dict(wall=run.wall(), tokens=run.train_loader.num_tokens, dtype=str(run.dtype).removeprefix("torch."))
    state |= dict(config=dataclasses.asdict(run.config), scaler=run.scaler.state_dict(), rng=torch.get_rng_state())
    card = {"data": run.config.data_dir, "steps": run.step, "tokens": f"{run.step * run.config.total_batch_size:,}"}
    if run.best:
        card["best validation loss"] = f"{run.best['loss']:.4f} at step {run.best['step']}"
    card["command"] = command()
    run.last_saved = checkpoint.save(run.config.log_dir, run.raw, run.optimizers, state, run.world, card)
    if run.world.is_main:
        best = Path(run.config.log_dir) / f"ckpt_{run.best['step']:06d}" if run.best else None
        checkpoint.prune(run.config.log_dir, run.config.keep_checkpoints, best)
    return run.last_saved


def evaluate(run: Run) -> None:
    """Whatever is due at this step: validation, HellaSwag, samples, the plot. Training does not notice."""
    config, step, world = run.config, run.step, run.world
    if not any(map(run.due, (config.val_every, config.hellaswag_every, config.sample_every))):
        return
    with world.whole(run.raw):
        if run.due(config.val_every):
            val_loss = validate(run.raw, run.val_loader, config.val_tokens, world, run.dtype, run.stop)
            perplexity = math.exp(min(val_loss, 99))
            run.log.say(f"step {step:5d} | val loss {val_loss:.4f} | perplexity {perplexity:.2f}")
            run.log.value(step, "val", val_loss, perplexity=perplexity)
            if run.best is None or val_loss < run.best["loss"]:
                run.best = {"loss": val_loss, "step": step}
        if run.examples and run.due(config.hellaswag_every):
            score = hellaswag.evaluate(run.raw, run.examples, world.device, world=world, dtype=run.dtype)
            run.log.say(f"step {step:5d} | HellaSwag {score['num_correct_norm']}/{score['total']} = {score['acc_norm']:.4f}")
            run.log.value(step, "hella", score["acc_norm"], acc=score["acc"], total=score["total"])
        if step > 0 and run.due(config.sample_every):
            generator = torch.Generator(world.device).manual_seed(config.seed + 1000 * step + world.rank)
            texts = sample.complete(
                run.raw, config.sample_prompt, config.num_samples, config.sample_tokens, generator=generator
            )
            for i, text in enumerate(texts):
                print(f"rank {world.rank} sample {i}: {text}", flush=True)
            run.log.record(step, "samples", prompt=config.sample_prompt, samples=texts)
    if world.is_main and run.due(config.val_every):
        plots.plot_run(config.log_dir)


def train(config: TrainConfig, world: World) -> None:
    """A run to its last step, or to the signal that interrupts it: evaluate, save, make an update, log it."""
    run = set_up(config, world)
    try:
        loop(run)
        took, memory = duration(run.wall()), peak_memory(world.device) / 2**30
        run.log.say(f"done: {config.max_steps} steps in {took}, peak memory {memory:.2f} GB")
    except Interrupted:
        if run.step == 0:
            return run.log.say("interrupted before the first update: nothing to save, the same command starts it again")
        path = save(run)
        run.log.say(f"interrupted: {path} is saved; go on with: {command_to_resume()}")
    finally:
        run.log.close()


def loop(run: Run) -> None:
    config, start = run.config, run.step
    first_step_done = 0.0
    while True:
        if not run.evaluated:
            evaluate(run)
            run.evaluated = True
        if run.step > start and run.due(config.checkpoint_every):
            save(run)
        if run.step == config.max_steps:
            return
        if config.overfit_single_batch:
            run.train_loader.reset()

        t0, step, lr = time.perf_counter(), run.step, learning_rate(run.step, config)
        loss, norm = train_step(
            *(run.model, run.optimizers, run.scaler, run.train_loader, run.grad_accum_steps, run.world, run.dtype),
            *(lr, config.grad_clip, run.stop, run.accept if config.skip_spikes or run.scaler.is_enabled() else None),
        )
        loss, norm = loss.item(), norm.item()  # waits for the device: the one time in a step
        dt = time.perf_counter() - t0
        if not math.isfinite(loss) or (not math.isfinite(norm) and not run.scaler.is_enabled()):
            raise UserError(explain_nan(run, loss, norm))
        run.step, run.cursor, run.evaluated = step + 1, run.train_loader.cursor, False

        first_step_done = first_step_done or time.perf_counter()  # compilation belongs to the first step
        left = (time.perf_counter() - first_step_done) / max(1, step - start) * (config.max_steps - run.step)
        rate = config.total_batch_size / dt
        mfu = rate * run.raw.flops_per_token(config.sequence_length) / run.peak
        run.log.say(
            f"step {step:5d} | loss {loss:.6f} | lr {lr:.4e} | norm {norm:.4f} | dt {1000 * dt:.1f}ms | tok/sec {rate:,.0f}"
            + f" | mfu {mfu:.1%}"
            + (f" | left {duration(left)}" if step > start else "")
            + (f" | no update: {run.skipped}" if run.skipped else "")
        )
        more = {"skipped": run.skipped} if run.skipped else {}
        more |= dict(lr=lr, norm=norm, ms=1000 * dt, tokens_per_sec=rate, mfu=mfu, tokens=run.step * config.total_batch_size)
        run.log.value(step, "train", loss, 6, **more, wall=run.wall(), memory=peak_memory(run.world.device))


def explain_nan(run: Run, loss: float, norm: float) -> str:
    """What to know and to do about a loss that is not a number."""
    last = run.cursor + run.config.total_batch_size // run.config.sequence_length - 1
    find = "import runpy, torch; torch.autograd.set_detect_anomaly(True); runpy.run_path('train_gpt2.py', run_name='__main__')"
    return (
        f"step {run.step}: the loss is {loss} and the gradient norm {norm}, on sequences {run.cursor} to {last}; "
        f'last good checkpoint: {run.last_saved or "none yet"}. To find the operation: python -c "{find}" '
        f"{shlex.join(without_resume())} --no-compile --resume auto. To go on: a lower --learning-rate, or --dtype float32."
    )


def without_resume() -> list[str]:
    """The flags of this command without those that say how it starts."""
    args = re.sub(r"(^|\0)--(resume[=\0][^\0]*|(no-)?overwrite)(?=\0|$)", "", "\0".join(sys.argv[1:]))
    return [a for a in args.split("\0") if a]


def command(more: list[str] | None = None) -> str:
    """What was typed to start this run, or the same with other flags."""
    n, flags = int(os.environ.get("WORLD_SIZE", 1)), sys.argv[1:] if more is None else more
    return f"{f'torchrun --standalone --nproc_per_node={n}' if n > 1 else 'python'} {shlex.join(['train_gpt2.py', *flags])}"


def command_to_resume() -> str:
    return command([*without_resume(), "--resume", "auto"])


def main() -> None:
    config = parse_command_line(sys.argv[1:])
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):  # torchrun started all processes again because one died
        config = dataclasses.replace(config, resume="auto", overwrite=False)
    if problems := check(config, int(os.environ.get("WORLD_SIZE", 1))):
        if int(os.environ.get("RANK", 0)) == 0:
            print("\n".join(f"train_gpt2.py: {problem}" for problem in problems), file=sys.stderr)
        sys.exit(2)
    with World(config.device, config.sharding) as world:
        train(config, world)


if __name__ == "__main__":
    run_script(main)

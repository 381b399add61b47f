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
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

import checkpoint
import hellaswag
import plots
import sample
from distributed import World, device_name
from model import GPT, SIZES, DataLoaderLite, GPTConfig, autocast, compiled, newest_flash_attention, peak_flops, pick_dtype
from tokenizer import UserError, read_flags, run_script


@dataclass
class Start:
    """What the run begins with, and where things are."""

    preset: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-125m", "gpt2-muon", "quickstart"] = "gpt2"
    """a complete set of the values below, which any flag overrides"""
    data_dir: str = "edu_fineweb10B"  # directory of token shards, as fineweb.py makes them
    log_dir: str = "log"  # what the run leaves: logs, plot, checkpoints
    init_from: str = "scratch"  # scratch | a GPT-2 on the Hugging Face hub | a model directory or checkpoint
    resume: str = "none"  # none | auto (the newest whole checkpoint in log_dir, if any) | a checkpoint directory
    overwrite: bool = False  # start anew in a log_dir that holds a run


@dataclass
class Architecture:
    """The sizes of the model (GPT-2 paper, table 2)."""

    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads a block
    n_embd: int = 768  # channels, C
    pad_vocab_to: int = 128  # embedding rows are a multiple of this, in memory only
    sequence_length: int = 1024  # tokens in a sequence, T, and the context window of a new model


@dataclass
class Batch:
    """total_batch_size = batch_size × sequence_length × accumulation × processes."""

    batch_size: int = 0  # sequences of a micro-batch on each process, B; 0 = the largest power of two up to 64 that fits
    total_batch_size: int = 524288  # tokens an update (GPT-3 paper, table 2.1: 0.5M)


@dataclass
class Recipe:
    """How it learns (GPT-3 paper, section 2.3 and appendix B)."""

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


@dataclass
class Evaluation:
    """What happens on the way: at step 0, every so many steps, and at the end; 0 = never."""

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


@dataclass
class Computation:
    """How it computes."""

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


@dataclass
class TrainConfig(Computation, Evaluation, Recipe, Batch, Architecture, Start):  # a dataclass has the fields of the last first
    """Train a GPT-2. Without a flag: the reproduction of the 124M model."""


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
    # fewer tokens to the same loss; AdamW's learning rate: the best one is within a factor of two of it in benchmarks/recipes
    "gpt2-muon": TrainConfig(preset="gpt2-muon", optimizer="muon"),
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
    c, positive = config, "n_layer n_head n_embd pad_vocab_to sequence_length total_batch_size max_steps"
    bounds = [
        (f"{positive} num_samples sample_tokens keep_checkpoints", lambda x: x >= 1, "at least 1"),
        ("batch_size warmup_steps min_lr_frac weight_decay grad_clip skip_spikes", lambda x: x >= 0, "0 or more"),
        ("val_every hellaswag_every hellaswag_limit sample_every checkpoint_every", lambda x: x >= 0, "0 or more"),
        ("learning_rate eps", lambda x: x > 0, "above 0"),
        ("beta1 beta2", lambda x: 0 <= x < 1, "at least 0 and below 1"),
        ("decay_frac", lambda x: 0 < x <= 1, "above 0, at most 1"),
    ]
    values = [(name, getattr(c, name), fits, words) for names, fits, words in bounds for name in names.split()]
    if wrong := [f"{name} is {value}: it must be {words}" for name, value, fits, words in values if not fits(value)]:
        return wrong  # what follows divides by some of them
    T, total, n = c.sequence_length, c.total_batch_size, world_size
    S = total // T  # sequences an update
    whole, splits = total % T == 0, total % T == 0 and S % n == 0
    sizes = ", ".join(str(b) for b in range(1, 65) if splits and S // n % b == 0)
    source = " --source stdlib" if c.data_dir == PRESETS["quickstart"].data_dir else ""
    begun = c.resume == "none" and not c.overwrite and (Path(c.log_dir) / "metrics.jsonl").exists()
    problems = [
        (c.n_embd % c.n_head, f"n_embd {c.n_embd} does not divide by n_head {c.n_head}: use {nearby(c.n_embd, c.n_head)}"),
        (c.warmup_steps >= c.max_steps, f"warmup_steps {c.warmup_steps} leaves nothing of max_steps {c.max_steps}: use fewer"),
        (c.val_every and c.val_tokens < T, f"val_tokens {c.val_tokens} is less than a sequence of {T}: use at least {T}"),
        (begun, f"log_dir {c.log_dir!r} holds a run: add --resume auto to go on with it, --overwrite, or another --log-dir"),
        (
            c.tracker != "none" and importlib.util.find_spec(c.tracker) is None,
            f"tracker {c.tracker} is not installed: pip install {c.tracker}",
        ),
        (
            not Path(c.data_dir).is_dir(),
            f"data_dir {c.data_dir!r} does not exist: make it with python fineweb.py{source} --data-dir {c.data_dir}",
        ),
        (
            not whole,
            f"total_batch_size {total} tokens is not a whole number of sequences of {T}: use {nearby(total, T)}",
        ),
        (
            whole and not splits,
            f"the {S} sequences of a batch (total_batch_size {total} / sequence_length {T}) cannot be split over "
            f"{n} processes: use a number of processes that divides {S}, or total_batch_size {nearby(S, n, T)}",
        ),
        (
            splits and c.batch_size and S // n % c.batch_size,
            f"batch_size {c.batch_size} does not divide the {S // n} sequences of each of {n} process(es): use one of {sizes}",
        ),
    ]
    return [sentence for is_wrong, sentence in problems if is_wrong]


def nearby(n: int, divisor: int, unit: int = 1) -> str:
    """The multiples of divisor next to n, in units: '6 or 12'."""
    below = n // divisor * divisor
    return " or ".join(str(unit * m) for m in (below, below + divisor) if m)


def fit_batch_size(model: torch.nn.Module, raw: GPT, config: TrainConfig, world: World, dtype: torch.dtype) -> int:
    """The largest power of two up to 64 that divides the batch and fits in memory, the same on every process.

    On a GPU it tries. On a CPU, where running out of memory raises nothing, and with fsdp, where a process that fails would
    leave the others waiting, what the backward pass needs is estimated, and must stay within half of the free memory.
    """
    T, c = config.sequence_length, raw.config
    B = math.gcd(64, config.total_batch_size // T // world.size)
    if world.device.type == "cuda" and world.sharding != "fsdp":
        while B > 1 and world.any(runs_out_of_memory(model, raw, B, T, world, dtype)):
            B //= 2
        torch.cuda.reset_peak_memory_stats()
        torch._dynamo.reset()  # what was compiled for the other sizes counts toward its limit
        return B
    sharing = world.size if world.sharding == "fsdp" else 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world.device.type == "cpu" else 1
    room = free_memory(world.device) / 2 / processes - 12 * raw.num_params() / sharing  # gradients and two moments
    values = 18 + c.n_layer if c.activation_checkpointing else 18 * c.n_layer  # kept for each token and channel
    per_token = (4 if dtype == torch.float32 else 3) * values * c.n_embd  # 16 bits, with some float32 beside them
    while world.any(B > 1 and B * T * per_token > room):
        B //= 2
    return B


def runs_out_of_memory(model, raw: GPT, B: int, T: int, world: World, dtype: torch.dtype) -> bool:
    """Whether a micro-batch of B sequences does not fit beside weights, gradients and AdamW's two moments."""
    try:
        ranks = world.size if world.sharding == "zero1" else 1  # that divide the moments
        moments = torch.empty(2 * sum(p.numel() for p in raw.parameters()) // ranks, device=world.device)
        x = torch.zeros(B, T, dtype=torch.int64, device=world.device)
        for _ in range(2):  # from the second micro-step on, the gradients are there before the activations
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


def free_memory(device: torch.device) -> int:
    """Bytes that a GPU has left, or that this machine or container can give without swapping; 4 GB where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free, cgroup = 4 * 2**30, Path("/sys/fs/cgroup")
    with suppress(OSError, TypeError):
        free = 1024 * int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    with suppress(OSError, TypeError, ValueError):  # a container's limit, unless it is "max"; the files it has read can go
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used + int(re.search(r"inactive_file (\d+)", (cgroup / "memory.stat").read_text())[1]))
    return free


class Interrupted(Exception):
    """SIGTERM or SIGINT came: the unfinished update or evaluation is dropped."""


class Stop:
    """Remembers SIGTERM and SIGINT, and raises Interrupted on all processes at the same point. A second SIGINT ends at once
    (of SIGTERM there may well be two: SLURM's own, and torchrun's that passes it on)."""

    def __init__(self, world: World):
        self.world, self.asked = world, False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.remember)

    def remember(self, number, _frame) -> None:
        if self.asked and number == signal.SIGINT:
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
    for first in tqdm(range(0, sequences, stride), "validation", leave=False, disable=None if world.is_main else True):
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


STREAMS = {"train": ("loss", 6), "val": ("val_loss", 4), "hella": ("hellaswag", 4)}  # log.txt's: which value, its digits


class Log:
    """The console, log.txt (`{step} {stream} {value}`, as build-nanogpt writes it), metrics.jsonl and a tracker; silent off
    rank 0."""

    def __init__(self, log_dir: str, is_main: bool, tracker: str = "none"):
        self.dir, self.is_main, self.tracker = Path(log_dir), is_main, tracker
        self.text, self.metrics = self.dir / "log.txt", self.dir / "metrics.jsonl"
        self.track = self.close = lambda *_: None

    def start(self, run: dict) -> None:
        """Begins a new run: the first line of metrics.jsonl says what it is."""
        self.write([{"type": "run", **run}], -1)

    def resume(self, step: int, evaluated: bool, run: dict) -> None:
        """Cuts both files back to a checkpoint's step, so that no step appears twice, and goes on from there."""

        def stays(type: str, at: int) -> bool:
            return at < step or (at == step and (type == "resume" or (evaluated and type != "train")))

        records = plots.read_metrics(self.metrics) if self.metrics.exists() else []
        records = [r for r in records if r["type"] == "run" or stays(r["type"], r["step"])]
        self.write([*records, {"type": "resume", "step": step, **run}], step)

    def write(self, records: list[dict], step: int) -> None:
        """Makes both files anew, whole or not at all. Checkpoints of later steps belong to a run that is given up."""
        if not self.is_main:
            return
        self.dir.mkdir(parents=True, exist_ok=True)
        checkpoint.remove_after(self.dir, step)
        for path, line in ((self.metrics, json.dumps), (self.text, self.line)):
            beside = path.with_name(f".{path.name}.tmp")
            beside.write_text("".join(f"{text}\n" for text in map(line, records) if text))
            checkpoint.sync(beside)
            beside.replace(path)
        if self.tracker != "none":
            self.track, self.close = open_tracker(self.tracker, self.dir, records[-1], max(0, step))

    def line(self, record: dict) -> str:
        """What log.txt has of a record: nothing of samples and the like."""
        name, digits = STREAMS.get(record["type"], ("", 0))
        return f"{record['step']} {record['type']} {record[name]:.{digits}f}" if name else ""

    def record(self, step: int, type: str, **values) -> None:
        """One line in metrics.jsonl and, of training, validation and HellaSwag, in log.txt."""
        if not self.is_main:
            return
        record = {"type": type, "step": step, **values}
        for path, line in ((self.metrics, json.dumps(record)), (self.text, self.line(record))):
            if line:
                with open(path, "a") as f:
                    f.write(line + "\n")
        self.track(step, {f"{type}/{k}": "\n\n---\n\n".join(v) if k == "samples" else v for k, v in values.items()})

    def say(self, message: str = "") -> None:
        if self.is_main:
            print(message, flush=True)


def open_tracker(name: str, log_dir: Path, run: dict, step: int) -> tuple:
    """track(step, {type/name: number or text}) and close(), for TensorBoard (files in log_dir), wandb or trackio."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(log_dir / "tensorboard", purge_step=step)  # a resumed run replaces what came after
        writer.add_text("run", f"```\n{json.dumps(run, indent=2)}\n```", step)

        def track(step: int, values: dict) -> None:
            for key, value in values.items():
                if value is not None:
                    (writer.add_text if isinstance(value, str) else writer.add_scalar)(key, value, step)

        return track, writer.close
    service = importlib.import_module(name)  # wandb and trackio share these three calls
    service.init(project="gpt2", name=log_dir.name, config=run["config"], **({"dir": str(log_dir)} if name == "wandb" else {}))
    return lambda step, values: service.log(values, step=step), service.finish


def describe_run(config: TrainConfig, world: World, dtype: torch.dtype, batch_size: int) -> dict:
    """What the first line of metrics.jsonl holds, so that every number can be traced."""
    describe = ["git", "describe", "--always", "--dirty"]
    here, threads = Path(__file__).parent, torch.get_num_threads()
    git = subprocess.run(describe, capture_output=True, text=True, cwd=here).stdout.strip() if shutil.which("git") else ""
    return {
        "config": dataclasses.asdict(config),
        "command": command(),
        "git": git,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": {"type": world.device.type, "name": device_name(world.device), "processes": world.size, "threads": threads},
        "dtype": str(dtype).removeprefix("torch."),
        "batch_size": batch_size,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "launch": os.environ.get("TORCHELASTIC_RUN_ID", ""),  # the same for all that one torchrun starts
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
    return read_flags(TrainConfig, PRESETS.get(named[-1] if named else "gpt2", PRESETS["gpt2"]), args)


# What may differ between a run and its continuation without changing what is computed.
HARMLESS = {"preset", "resume", "overwrite", "log_dir", "init_from", "batch_size", "sharding", "keep_checkpoints"}


def find_resume(config: TrainConfig, world: World, log: Log) -> tuple[Path, dict] | None:
    """The checkpoint to go on from and its state. Raises UserError if it belongs to another model or other sequences."""
    found = None
    if config.resume == "auto":
        found = checkpoint.newest(config.log_dir, log.say)
        if found is None and checkpoint.checkpoints(config.log_dir):
            raise UserError(
                f"no checkpoint in {config.log_dir} can be read: to start anew, --overwrite instead of --resume auto"
            )
    elif config.resume != "none":
        found = Path(config.resume), checkpoint.load_state(config.resume)
    step = found[1]["step"] if found else 0
    if world.any(step * world.size != world.sum(torch.tensor(step)).item()):
        raise UserError(f"the processes find different checkpoints in {config.log_dir}: all nodes must share that directory")
    if found is None:
        if config.resume == "auto":
            log.say(f"resume: no checkpoint in {config.log_dir} yet, starting from the beginning")
        return None
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


class Run:
    """What the loop works on. `raw` is saved, scored and sampled; `model` around it is compiled, averages gradients, trains."""

    PROGRESS = ("step", "evaluated", "cursor", "best", "losses", "recent")  # what a checkpoint keeps, besides tensors

    def __init__(self, config: TrainConfig, world: World):
        """Begins from nothing, from other weights, or from a checkpoint."""
        self.config, self.world, self.stop = config, world, Stop(world)
        self.log, device, T = Log(config.log_dir, world.is_main, config.tracker), world.device, config.sequence_length
        self.step = 0  # updates done
        self.cursor = 0  # where this step's sequences start
        self.evaluated = False  # whether what is due at this step is done
        self.best = None  # loss and step of the best validation at a step with a checkpoint
        self.losses = {}  # the last ones, for the model card
        self.recent = {"loss": [], "norm": []}  # for skip_spikes
        self.skipped = ""  # why the last update was not made
        self.last_saved = None
        torch.set_float32_matmul_precision("high")  # TF32 on CUDA; nothing changes on a CPU
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS needs for it
            torch.use_deterministic_algorithms(True)
        path, state = find_resume(config, world, self.log) or (None, None)
        self.dtype, reason = choose_dtype(config, world, state)

        torch.manual_seed(config.seed)
        memory = dict(pad_vocab_to=config.pad_vocab_to, activation_checkpointing=config.activation_checkpointing)
        if path is None and config.init_from == "scratch":
            self.raw = GPT(GPTConfig(T, n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, **memory))
        else:
            self.raw = GPT.from_pretrained(path or config.init_from, block_size=T, **memory)
        world.place(self.raw, self.dtype)
        why_eager = compiler_works(device) if config.compile else "as asked"
        how = f"eager: {why_eager}" if why_eager else "compiled"
        flash = "" if config.deterministic else newest_flash_attention(device)
        kernels = f"{how}, {flash}" if flash else how
        self.log.say(f"device: {device}, {self.dtype} ({reason}), {kernels}".replace("torch.", ""))
        model = self.raw if why_eager else compiled(self.raw, recompute=device.type == "cpu")

        sequences = config.total_batch_size // T // world.size  # of one update, on each process
        self.batch_size = config.batch_size or (state["batch_size"] if state else 0)
        if self.batch_size == 0 or sequences % self.batch_size:
            self.batch_size = fit_batch_size(model, self.raw, config, world, self.dtype)
        self.grad_accum_steps = sequences // self.batch_size
        B, order = self.batch_size, (config.shuffle, config.seed)
        self.train_loader = DataLoaderLite(config.data_dir, "train", B, T, world.rank, world.size, *order)
        self.val_loader = DataLoaderLite(config.data_dir, "val", B, T) if config.val_every else None
        self.examples = load_hellaswag(config, world, self.log)
        peak, whose_peak = peak_flops(device, self.dtype)
        self.peak = peak * world.size  # operations a second, what MFU is a part of
        self.log.say(f"peak: {peak / 1e12:,.2f} TFLOP/s a process ({whose_peak})")
        self.model = world.wrap(model)
        adamw = config.weight_decay, config.learning_rate, (config.beta1, config.beta2), config.eps
        self.optimizers = self.raw.configure_optimizers(*adamw, config.optimizer == "muon", world.make_optimizer)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        self.began = time.perf_counter()  # when this run would have started, had it never been interrupted

        print_setup(self)
        about = describe_run(config, world, self.dtype, B) | {"model": dataclasses.asdict(self.raw.config)}
        if state:
            restore(self, path, state)
            self.log.resume(self.step, self.evaluated, about)
        else:
            self.log.start(about)

    def wall(self) -> float:
        return time.perf_counter() - self.began

    def due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.config.max_steps)

    def accept(self, loss: float, norm: float) -> bool:
        """Whether to make an update: not where float16 overflowed, nor, with skip_spikes, where loss or norm is an outlier."""
        self.skipped = "" if math.isfinite(norm) else "overflow in float16"
        for name, value in dict(loss=loss, norm=norm).items() if self.config.skip_spikes and not self.skipped else ():
            if is_spike(value, self.recent[name], self.config.skip_spikes):
                self.skipped = f"spike of the {name}"
            self.recent[name] = [*self.recent[name][-127:], value]
        return not self.skipped


def choose_dtype(config: TrainConfig, world: World, state: dict | None) -> tuple[torch.dtype, str]:
    """What to autocast to, the same on all processes and after a resume, and why."""
    if config.dtype == "auto" and state:
        return getattr(torch, state["dtype"]), "as before"
    return pick_dtype(world.device, config.dtype, world)


def print_setup(run: Run) -> None:
    """The facts of a run that a reader of its output will want to have seen."""
    config, say, tokens, total = run.config, run.log.say, run.train_loader.num_tokens, run.config.total_batch_size
    say(f"model: {run.raw.num_params():,} parameters (embedding padded to {run.raw.config.padded_vocab_size} rows in memory)")
    shared = f", state divided over {run.world.size} processes" if run.world.sharding in ("zero1", "fsdp") else ""
    for optimizer in run.optimizers:
        sizes = [[p.numel() for p in group["params"]] for group in optimizer.param_groups]
        parts = [
            f"{len(n)} {which} tensors with {sum(n):,} parameters"
            for n, which in zip(sizes, ("decayed", "other"), strict=False)
        ]
        fused = "fused" if optimizer.param_groups[0].get("fused") else "not fused"
        say(f"{type(getattr(optimizer, 'optim', optimizer)).__name__}: {', '.join(parts)}, {fused}{shared}")
    for name, loader in {"train": run.train_loader, "val": run.val_loader}.items():
        if loader:
            say(f"{name}: {len(loader.shards)} shard(s), {loader.num_tokens:,} tokens in {config.data_dir}")
    say(
        f"batch: B {run.batch_size} × T {config.sequence_length} × accumulation {run.grad_accum_steps} × "
        f"ranks {run.world.size} = {total:,} tokens; an epoch is {tokens / total:,.1f} steps, "
        f"the run {config.max_steps:,} steps or {config.max_steps * total / tokens:.2f} epochs"
    )
    if run.val_loader and config.val_tokens >= run.val_loader.num_tokens:
        say(f"val: the split is smaller than val_tokens {config.val_tokens:,}: all of it is used")


def restore(run: Run, path: Path, state: dict) -> None:
    """Puts a run where a checkpoint left it."""
    if state["tokens"] != run.train_loader.num_tokens:
        raise UserError(
            f"{run.config.data_dir} has {run.train_loader.num_tokens} tokens, {state['tokens']} when {path} was written: "
            f"put the shards back, or start a new run from its weights with --init-from {path}"
        )
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    asked = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    checkpoint.load_optimizers(run.raw, run.optimizers, state, run.world)
    for group, values in zip((g for optimizer in run.optimizers for g in optimizer.param_groups), asked, strict=True):
        group.update(values)  # weight decay and the like are this command's, not the checkpoint's
    if state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    run.train_loader.load_state_dict(state)
    torch.set_rng_state(state["rng"])
    for key in run.PROGRESS:
        setattr(run, key, state[key])
    run.began, run.last_saved = time.perf_counter() - state["wall"], path


def save(run: Run) -> Path:
    """Writes a checkpoint of the updates done so far, then removes those no longer wanted."""
    state = {key: getattr(run, key) for key in (*run.PROGRESS, "batch_size")}
    state |= dict(wall=run.wall(), tokens=run.train_loader.num_tokens, dtype=str(run.dtype).removeprefix("torch."))
    state |= dict(config=dataclasses.asdict(run.config), scaler=run.scaler.state_dict(), rng=torch.get_rng_state())
    card = {"data": run.config.data_dir, "steps": run.step, "tokens": f"{run.step * run.config.total_batch_size:,}"}
    card |= {name: f"{loss:.4f}" for name, loss in run.losses.items()} | {"command": command()}
    if run.world.is_main:
        for file in (run.log.text, run.log.metrics):  # so that a resumed run finds every step up to this one
            checkpoint.sync(file)
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
            run.log.record(step, "val", val_loss=val_loss, perplexity=perplexity)
            run.losses["validation loss"] = val_loss
            if run.due(config.checkpoint_every) and (run.best is None or val_loss < run.best["loss"]):
                run.best = {"loss": val_loss, "step": step}
        if run.examples and run.due(config.hellaswag_every):
            how = dict(world=world, dtype=run.dtype, progress=True, stop=run.stop)
            score = hellaswag.evaluate(run.raw, run.examples, world.device, **how)
            run.log.say(f"step {step:5d} | HellaSwag {score['num_correct_norm']}/{score['total']} = {score['acc_norm']:.4f}")
            run.log.record(step, "hella", hellaswag=score["acc_norm"], acc=score["acc"], total=score["total"])
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
    """A run to its last step, or to the signal that interrupts it."""
    run = Run(config, world)
    try:
        loop(run)
        took, memory = duration(run.wall()), peak_memory(world.device) / 1e9
        run.log.say(f"done: {config.max_steps} steps in {took}, peak memory {memory:.2f} GB")
    except Interrupted:
        if run.step == 0:
            return run.log.say(f"interrupted before the first update: nothing to save; start with: {command_to_resume()}")
        path = Path(config.log_dir) / f"ckpt_{run.step:06d}"
        path = path if path == run.last_saved else save(run)
        run.log.say(f"interrupted: {path} is saved; go on with: {command_to_resume()}")
    except torch.OutOfMemoryError:
        less = "--activation-checkpointing" if not config.activation_checkpointing else "--sharding fsdp, on several GPUs"
        less = f"--batch-size {run.batch_size // 2}" if run.batch_size > 1 else less
        raise UserError(
            f"out of GPU memory with micro-batches of {run.batch_size}: add {less}; the run stays the same"
        ) from None
    finally:
        run.log.close()


def loop(run: Run) -> None:
    """Evaluate, save, make an update, log it, until all are made."""
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
        run.losses["training loss"] = loss

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
        more |= dict(lr=lr, norm=norm if math.isfinite(norm) else None, ms=1000 * dt, tokens_per_sec=rate, mfu=mfu)
        more |= dict(tokens=run.step * config.total_batch_size, wall=run.wall(), memory=peak_memory(run.world.device))
        run.log.record(step, "train", loss=loss, **more)


def explain_nan(run: Run, loss: float, norm: float) -> str:
    """What to know and to do about a loss that is not a number."""
    last = run.cursor + run.config.total_batch_size // run.config.sequence_length - 1
    find = 'python -c "import train_gpt2; train_gpt2.find_nan()"'
    return (
        f"step {run.step}: the loss is {loss} and the gradient norm {norm}, on sequences {run.cursor} to {last}; "
        f"last good checkpoint: {run.last_saved or 'none yet'}. To find the operation: {find} "
        f"{shlex.join(sys.argv[1:])} --no-compile --resume auto. To go on: a lower --learning-rate, or --dtype float32."
    )


def find_nan() -> None:
    """The rerun that explain_nan proposes: it ends at the first module, or operation of the backward pass, that makes a nan."""
    names = {}

    def before(module, _inputs) -> None:
        if isinstance(module, GPT):
            names.update({part: name for name, part in module.named_modules()})

    def after(module, _inputs, output) -> None:
        if isinstance(output, torch.Tensor) and not output.isfinite().all():
            raise UserError(f"the first output that is not finite is that of {names[module]}, {module}")

    torch.nn.modules.module.register_module_forward_pre_hook(before)
    torch.nn.modules.module.register_module_forward_hook(after)
    torch.autograd.set_detect_anomaly(True)
    run_script(main)


def command(*more: str) -> str:
    """What was typed to start this run, and more flags."""
    n, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    launcher = "python" if n == 1 else f"torchrun --standalone --nproc_per_node={n}"
    if n > local:
        launcher = f"torchrun --nnodes={n // local} --nproc_per_node={local} --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"
    return f"{launcher} {shlex.join(['train_gpt2.py', *sys.argv[1:], *more])}"


def command_to_resume() -> str:
    return command() if sys.argv[-2:] == ["--resume", "auto"] else command("--resume", "auto")  # the last of a flag counts


def as_restarted(config: TrainConfig) -> TrainConfig:
    """torchrun starts all processes again if one dies: they go on from what this run has saved, not from one it overwrites."""
    metrics = Path(config.log_dir) / "metrics.jsonl"
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and metrics.exists():
        launches = [record.get("launch") for record in plots.read_metrics(metrics) if record["type"] in ("run", "resume")]
        begun = launches[-1:] == [os.environ.get("TORCHELASTIC_RUN_ID", "")]
        if begun and (config.resume == "none" or checkpoint.checkpoints(config.log_dir)):
            return dataclasses.replace(config, resume="auto", overwrite=False)
    return config


def main() -> None:
    config = as_restarted(parse_command_line(sys.argv[1:]))
    if problems := check(config, int(os.environ.get("WORLD_SIZE", 1))):
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # each node has its own disk
            print("\n".join(f"train_gpt2.py: {problem}" for problem in problems), file=sys.stderr)
        sys.exit(2)
    with World(config.device, config.sharding) as world:
        train(config, world)


if __name__ == "__main__":
    run_script(main)

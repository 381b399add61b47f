"""Trains a GPT-2: the 124M reproduction on 8 GPUs, or a model of 12M on a laptop:

torchrun --standalone --nproc_per_node=8 train_gpt2.py
python train_gpt2.py --preset quickstart
"""

import dataclasses
import math
import os
import shlex
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

import hellaswag
import sample
from config import PRESETS, TrainConfig, check, parse_command_line, typed
from model import GPT, HARMLESS, DataLoaderLite, GPTConfig
from support import checkpoint, hf, plots, report
from support.common import UserError, duration, first_line, run_script, say, write_whole
from support.device import (
    autocast,
    compile_blocks,
    device_name,
    dtype_name,
    eager,
    evaluation_mode,
    keep_freed_memory,
    peak_flops,
    peak_memory,
    pick_dtype,
    seed_everything,
    why_not_compile,
)
from support.distributed import Interrupted, Stop, World
from support.log import Log, alone_in, read_metrics, starts_of
from support.memory import explain_out_of_memory, fit_batch_size, refuse_too_large
from support.shards import find_shards, identify
from support.tokenizer import check_vocabulary, token_sizes


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of update `step`: linear warm-up, then decay to min_lr_frac of the peak.

    cosine: GPT-3 paper, appendix B. wsd: warm-up, stable, linear decay (Hu et al. 2024, MiniCPM).

    >>> config = TrainConfig(max_steps=100, warmup_steps=10, learning_rate=1.0, min_lr_frac=0.1)
    >>> [round(learning_rate(step, config), 2) for step in (0, 9, 10, 55, 100)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    decay_steps = config.max_steps - config.warmup_steps
    if config.decay == "wsd":
        decay_steps = min(decay_steps, round(config.decay_frac * config.max_steps))
    progress = 1 - (config.max_steps - step) / max(1, decay_steps)
    progress = min(1.0, max(0.0, progress))
    left = 1 - progress
    if config.decay == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_frac + (1 - config.min_lr_frac) * left)


def train_step(
    *,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    loader: DataLoaderLite,
    grad_accum_steps: int,
    world: World,
    dtype: torch.dtype,
    lr: float,
    grad_clip: float,
    stop: Stop | None = None,
    accept=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One update, by the gradient of the mean loss over all micro-batches and processes.

    Returns the loss, and the gradient's norm before clipping: scalars on the device, the same on
    every process. accept(loss, norm) may refuse the update. It makes the CPU wait for the device.
    """
    model.train()
    loss_accum = torch.zeros((), device=world.device)
    for micro_step in range(grad_accum_steps):
        x, y = loader.next_batch()
        x = x.to(world.device, non_blocking=True)
        y = y.to(world.device, non_blocking=True)
        is_last = micro_step == grad_accum_steps - 1
        world.sync_gradients(model, is_last)
        with autocast(world.device, dtype):
            _, loss = model(x, y)
        # micro-batches are equally large: the mean of their means is the mean over the update
        loss = loss / grad_accum_steps
        loss_accum += loss.detach()
        scaler.scale(loss).backward()
        if stop is not None:
            stop.check()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = clip_gradients(model, grad_clip, world)
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


def clip_gradients(model: torch.nn.Module, largest: float, world: World) -> torch.Tensor:
    """Scales the gradient down to a norm of at most `largest` (0 = any) -> its norm before.

    A tensor's norm is the norm of its rows' norms. One float32 sum over the 124M's embedding is
    0.3% off on a CPU, and off by another amount where processes divide it.
    """
    params = [p for p in model.parameters() if p.grad is not None]
    grads: list[Any] = [p.grad for p in params]
    if world.divides:  # here is a part of each
        grads = [grad.to_local() for grad in grads]
    rows = [torch.linalg.vector_norm(grad, dim=-1) for grad in grads]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(r) for r in rows]))
    if world.divides:
        copies = world.size / world.shards
        norm = (world.sum(norm.square()) / copies).sqrt()
    torch.nn.utils.clip_grads_with_norm_(params, largest or math.inf, norm)
    return norm


@torch.no_grad()
def validate(
    raw: GPT,
    loader: DataLoaderLite,
    val_tokens: int,
    world: World,
    dtype: torch.dtype,
    stop: Stop | None = None,
) -> float:
    """The mean loss over the first val_tokens of the split.

    The micro-batch and the number of processes do not change it.
    """
    sequences = val_sequences(loader, val_tokens)
    on = "cpu" if world.device.type == "mps" else world.device  # MPS has no float64
    total = torch.zeros((), dtype=torch.float64, device=on)
    rounds = range(0, sequences, loader.B * world.size)
    disable = None if world.is_main else True  # None: a bar only in a terminal
    with evaluation_mode(raw):
        for first in tqdm(rounds, "validation", leave=False, disable=disable):
            mine = first + world.rank * loader.B
            count = min(loader.B, sequences - mine)
            if count > 0:
                x, y = loader.batch(mine, count)
                # compiled blocks want batches of one size; targets of -1 do not count
                x = F.pad(x, (0, 0, 0, loader.B - count))
                y = F.pad(y, (0, 0, 0, loader.B - count), value=-1)
                with autocast(world.device, dtype):
                    _, loss = raw(x.to(world.device), y.to(world.device))
                total += loss.to(total) * count
            if stop is not None:
                stop.check()
    return (world.sum(total) / sequences).item()


def val_sequences(loader: DataLoaderLite, val_tokens: int) -> int:
    return min(val_tokens // loader.T, loader.num_sequences)


@lru_cache(maxsize=1)
def bytes_per_token(loader: DataLoaderLite, sequences: int) -> float:
    """The mean length of the first sequences' targets, in bytes of text."""
    sizes = token_sizes()
    return sum(sizes[loader.sequence(k)[1:]].mean().item() for k in range(sequences)) / sequences


def describe_loss(val_loss: float, loader: DataLoaderLite, val_tokens: int) -> dict[str, float]:
    """A validation loss in nats per token, also as perplexity and in bits per byte of the text.

    Only the latter can be compared with other tokenizers' models, on the same text.
    """
    num_bytes = bytes_per_token(loader, val_sequences(loader, val_tokens))
    return {
        "val_loss": val_loss,
        "perplexity": math.exp(min(val_loss, 99)),
        "bits_per_byte": val_loss / math.log(2) / num_bytes,
    }


# -- a run


@dataclass
class Progress:
    """How far a run has come. A checkpoint keeps it beside weights and optimizers."""

    step: int = 0  # updates done
    cursor: int = 0  # sequences consumed by them
    evaluated: bool = False  # whether this step's evaluations are done
    wall: float = 0.0  # seconds, until the last checkpoint
    best: dict | None = None  # the lowest validation loss with a checkpoint: {"loss", "step"}
    lower: dict | None = None  # this step's validation loss, if it is lower: {"loss", "step"}
    losses: dict[str, float] = field(default_factory=dict)  # the last ones, for the model card
    recent: dict[str, list] = field(default_factory=lambda: {"loss": [], "norm": []})  # for spikes
    skipped_in_a_row: int = 0


class Run:
    """The state of a run: a new run, or one resumed from the checkpoint `found`.

    `raw` is the model that is saved, scored and sampled, its blocks compiled in place. `model`
    wraps it to average the gradients of all processes, and is trained.
    """

    def __init__(self, config: TrainConfig, world: World, log: Log, found: checkpoint.Found | None):
        """Builds it, in an order that matters.

        Data come first: errors in them appear before the slow steps. The model moves to its device
        before it is compiled, and is compiled before the micro-batch is chosen. DDP wraps it after
        that: its buckets take memory. Optimizers come last, because wrapping may change parameters.
        """
        self.config = config
        self.world = world
        self.log = log
        self.stop = Stop(world)
        self.data = know_data(config, found, log)
        self.machine = describe_machine(world)
        self.dtype, why = prepare_device(config, world, found)
        log.say(f"device: {world.device}, {dtype_name(self.dtype)} ({why})")
        self.raw = build_model(config, found, log)
        world.place(self.raw)
        log.say(f"kernels: {compile_model(config, self.raw, world.device)}")
        B = choose_batch_size(self, found)
        self.train_loader, self.val_loader = build_loaders(config, world, B)
        self.examples = load_hellaswag(config, world, log, self.raw)
        self.model = world.wrap(self.raw)
        self.optimizers = self.raw.configure_optimizers(
            weight_decay=config.weight_decay,
            learning_rate=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            muon=config.optimizer == "muon",
        )
        half = self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=half)
        self.peak = 0.0  # FLOP/s of all GPUs
        if world.device.type != "cpu":  # a CPU's changes with its other load
            peak, source = peak_flops(world.device, self.dtype)
            log.say(f"peak: {peak / 1e12:,.2f} TFLOP/s per process ({source})")
            self.peak = world.size * peak
        log.say(report.describe_batch(config, world.size, self.train_loader, self.val_loader))
        self.progress = Progress()
        self.last_saved: Path | None = None
        if found:
            restore(self, found)
        self.skipped = ""  # why the last update was skipped
        self.first_step = self.progress.step  # of this process
        self.first_step_ended = 0.0  # by the clock; the first update compiles
        self.last_save_time = time.perf_counter()
        self.clock_start = time.perf_counter() - self.progress.wall

    def wall(self) -> float:
        return time.perf_counter() - self.clock_start

    def due(self, every: int) -> bool:
        step = self.progress.step
        return every > 0 and (step % every == 0 or step == self.config.max_steps)


def prepare_device(
    config: TrainConfig, world: World, found: checkpoint.Found | None
) -> tuple[torch.dtype, str]:
    """Sets memory, TF32, determinism -> the dtype for autocast, the same on all ranks; why."""
    keep_freed_memory(world.device)
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA; on a CPU it changes nothing
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
        torch.use_deterministic_algorithms(True)
        # filling new memory with NaN costs time, and only wrong code would read it
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if config.dtype == "auto" and found:
        return getattr(torch, found.state["dtype"]), "as before"
    return pick_dtype(world.device, config.dtype, world)


def build_model(config: TrainConfig, found: checkpoint.Found | None, log: Log) -> GPT:
    """The model, on the CPU: from the checkpoint, from --init-from, or new.

    A flag sets the GPTConfig field of its name. Loaded weights keep their own configuration; flags
    override its HARMLESS fields. With --init-from, flags also set the context length and any field
    that the files lack.
    """
    T = config.sequence_length
    fields = dataclasses.fields(GPTConfig)
    flags = {f.name: getattr(config, f.name) for f in fields if hasattr(config, f.name)}
    flags["block_size"] = T
    harmless = {f.name: flags[f.name] for f in fields if f.metadata == HARMLESS}
    torch.manual_seed(config.seed)
    if found:
        refuse_too_large(found.state["model"])
        raw = GPT.from_pretrained(found.path, **(found.state["model"] | harmless))
        hf.refuse_resume_by_changed_code(found.path, raw.fingerprint)
    elif config.init_from == "scratch":
        refuse_too_large(flags)
        raw = GPT(GPTConfig(**flags))
    else:
        raw = GPT.from_pretrained(config.init_from, flags, block_size=T, **harmless)
        check_vocabulary(config.init_from, raw.config.vocab_size)
    other = [name for name in flags if flags[name] != getattr(raw.config, name)]
    other = [name for name in other if name in typed(sys.argv[1:])]  # a preset's may differ
    if other:
        has = ", ".join(f"{name} {getattr(raw.config, name)}" for name in other)
        told = f"{found.path if found else config.init_from} has {has}"
        raise UserError(f"{told}: leave these flags out, or train a new model without --init-from")
    rows = raw.config.padded_vocab_size
    log.say(f"model: {raw.num_params():,} parameters (embedding padded to {rows} rows in memory)")
    if raw.fingerprint.difference:
        log.say(hf.describe_change(raw.fingerprint))
    return raw


def compile_model(config: TrainConfig, raw: GPT, device: torch.device) -> str:
    """Compiles the model, if asked and possible -> what it runs with, in words."""
    why_eager = why_not_compile(device) if config.compile else "as asked"
    if why_eager:
        return f"eager: {why_eager}"
    compile_blocks(raw, recompute=device.type == "cpu")
    return "compiled"


def choose_batch_size(run: Run, found: checkpoint.Found | None) -> int:
    """The micro-batch: as asked, as before, or as large as fits."""
    config = run.config
    B = config.batch_size or (found.state["batch_size"] if found else 0)
    sequences = config.total_batch_size // config.sequence_length // run.world.size
    if B and sequences % B == 0:
        return B
    return fit_batch_size(run.raw, config, run.world, run.dtype)


def build_loaders(config: TrainConfig, world: World, B: int) -> tuple[DataLoaderLite, Any]:
    """The loaders for training and for validation; None if there is no validation."""
    T = config.sequence_length
    train_loader = DataLoaderLite(
        config.data_dir,
        "train",
        B,
        T,
        process_rank=world.rank,
        num_processes=world.size,
        shuffle=config.shuffle,
        seed=config.seed,
        pin=world.device.type == "cuda",
    )
    val_loader = DataLoaderLite(config.data_dir, "val", B, T) if config.val_every else None
    return train_loader, val_loader


def load_hellaswag(
    config: TrainConfig, world: World, log: Log, raw: GPT
) -> hellaswag.Prepared | None:
    """The examples to score. Without a network: None, and a line that says why."""
    if not config.hellaswag_every:
        return None
    path = config.hellaswag_path
    try:
        examples = hellaswag.load_examples("val", path, config.hellaswag_limit, world)
    except UserError as error:
        if path:
            raise
        log.say(f"hellaswag: off, {error}")
        return None
    return hellaswag.prepare(examples, raw, world.device)


# -- evaluations

VAL_LINE = "val loss {val_loss:.4f} | perplexity {perplexity:.2f} | bits/byte {bits_per_byte:.4f}"
HELLASWAG_LINE = "HellaSwag {num_correct_norm}/{total} = {acc_norm:.4f}"


def evaluate(run: Run) -> None:
    """Computes validation loss, HellaSwag and samples, if due. It does not affect training."""
    config = run.config
    run.progress.lower = None
    validating = run.due(config.val_every)
    scoring = run.examples is not None and run.due(config.hellaswag_every)
    sampling = run.progress.step > 0 and run.due(config.sample_every)
    if not (validating or scoring or sampling):
        return
    with run.world.whole(run.raw):
        if validating:
            evaluate_loss(run)
        if scoring:
            evaluate_hellaswag(run)
        if sampling:
            with eager():  # prompts and caches of every length would recompile the blocks
                print_samples(run)
    if run.world.is_main and validating:
        try:
            plots.plot_run(config.log_dir)
            if own_path(run) == run.last_saved:  # interrupted before this validation
                difference = run.raw.fingerprint.difference
                card = hf.model_card(run.raw.num_params(), card_of(run), difference)
                write_whole(own_path(run) / "README.md", card.encode(errors="replace"))
        except Exception as error:
            say(f"loss.png or the model card: {first_line(error)}; training goes on")


def evaluate_loss(run: Run) -> None:
    config = run.config
    progress = run.progress
    step = progress.step
    val_loss = validate(
        run.raw, run.val_loader, config.val_tokens, run.world, run.dtype, stop=run.stop
    )
    if not math.isfinite(val_loss):
        raise UserError(explain_nan(run, f"the validation loss is {val_loss}"))
    losses = describe_loss(val_loss, run.val_loader, config.val_tokens)
    run.log.say(f"step {step:5d} | {VAL_LINE.format(**losses)}")
    run.log.record(step, "val", **losses)
    progress.losses["validation loss"] = val_loss
    if progress.best is None or val_loss < progress.best["loss"]:
        progress.lower = {"loss": val_loss, "step": step}
        if own_path(run) == run.last_saved:  # interrupted before this validation
            progress.best = progress.lower


def evaluate_hellaswag(run: Run) -> None:
    step = run.progress.step
    score = hellaswag.evaluate(
        run.raw,
        run.examples,
        run.world.device,
        world=run.world,
        dtype=run.dtype,
        progress=True,
        stop=run.stop,
    )
    run.log.say(f"step {step:5d} | {HELLASWAG_LINE.format(**score)}")
    run.log.record(
        step, "hella", hellaswag=score["acc_norm"], acc=score["acc"], total=score["total"]
    )


def print_samples(run: Run) -> None:
    config = run.config
    step = run.progress.step
    rank = run.world.rank
    generator = torch.Generator(run.world.device)
    generator.manual_seed(config.seed + 1000 * step + rank)
    prompt = config.sample_prompt
    texts = sample.complete(
        run.raw, prompt, config.num_samples, config.sample_tokens, generator=generator
    )
    for i, text in enumerate(texts):
        say(f"rank {rank} sample {i}: {text}")
    run.log.record(step, "samples", prompt=prompt, samples=texts)


# -- the loop


def loop(run: Run) -> None:
    """Repeats until the last step: evaluate, save, make an update, log it."""
    config = run.config
    progress = run.progress
    may_skip = config.skip_spikes > 0 or run.scaler.is_enabled()
    tokens = run.train_loader.B * config.sequence_length * run.world.size  # of all micro-batches
    while True:
        if not progress.evaluated:
            evaluate(run)
            progress.evaluated = True
        if save_is_due(run):
            save_checkpoint(run)
        if progress.step == config.max_steps:
            return
        if config.overfit_single_batch:
            run.train_loader.reset()

        start = time.perf_counter()
        seed_everything(config.seed, progress.step, run.world.rank)  # for models with dropout
        lr = learning_rate(progress.step, config)
        loss_on_device, norm_on_device = train_step(
            model=run.model,
            optimizers=run.optimizers,
            scaler=run.scaler,
            loader=run.train_loader,
            grad_accum_steps=config.total_batch_size // tokens,
            world=run.world,
            dtype=run.dtype,
            lr=lr,
            grad_clip=config.grad_clip,
            stop=run.stop,
            accept=partial(judge_update, run) if may_skip else None,
        )
        loss = loss_on_device.item()  # waits for the device
        norm = norm_on_device.item()
        seconds = time.perf_counter() - start
        stop_at_nan(run, loss, norm)
        report_step(run, loss, norm, lr, seconds)
        progress.step += 1
        progress.cursor = run.train_loader.cursor
        progress.evaluated = False
        progress.losses["training loss of the last update"] = loss


def report_step(run: Run, loss: float, norm: float, lr: float, seconds: float) -> None:
    """Prints and records the update that was just made."""
    config = run.config
    step = run.progress.step
    now = time.perf_counter()
    rate = config.total_batch_size / seconds
    line = (
        f"step {step:5d} | loss {loss:.6f} | lr {lr:.4e} | norm {norm:.4f} "
        f"| dt {1000 * seconds:.1f}ms | tok/sec {rate:,.0f}"
    )
    more: dict = {}
    if run.peak:
        more["mfu"] = rate * run.raw.flops_per_token(config.sequence_length) / run.peak
        line += f" | mfu {more['mfu']:.1%}"
    if step == run.first_step:
        run.first_step_ended = now
    else:
        pace = (now - run.first_step_ended) / (step - run.first_step)
        line += f" | left {duration(pace * (config.max_steps - step - 1))}"
    if run.skipped:
        line += f" | no update: {run.skipped}"
        more["skipped"] = run.skipped
    run.log.say(line)
    run.log.record(
        step,
        "train",
        loss=loss,
        **more,
        lr=lr,
        norm=norm if math.isfinite(norm) else None,
        ms=1000 * seconds,
        tokens_per_sec=rate,
        tokens=run.train_loader.cursor * config.sequence_length,
        wall=run.wall(),
        memory=peak_memory(run.world.device),
    )


# -- NaN and spikes

SPIKE_WINDOW = 128  # updates, as in llm.c's -sl and -sg
MOST_SKIPPED = 50  # updates in a row: the model learns nothing any more


def is_spike(value: float, recent: list[float], limit: float) -> bool:
    """Whether a value is more than `limit` standard deviations above the mean of a full window."""
    if len(recent) < SPIKE_WINDOW:
        return False
    return value > statistics.fmean(recent) + limit * statistics.pstdev(recent)


def judge_update(run: Run, loss: float, norm: float) -> bool:
    """Whether to make an update; if not, run.skipped says why. Raises UserError at MOST_SKIPPED."""
    progress = run.progress
    run.skipped = ""
    if not math.isfinite(norm):
        run.skipped = "overflow in float16"  # the scaler lowers its scale
    elif run.config.skip_spikes:
        for name, value in {"loss": loss, "norm": norm}.items():
            if is_spike(value, progress.recent[name], run.config.skip_spikes):
                run.skipped = f"spike of the {name}"
            progress.recent[name] = [*progress.recent[name], value][-SPIKE_WINDOW:]
    progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if run.skipped else 0
    if progress.skipped_in_a_row == MOST_SKIPPED:
        what = f"{MOST_SKIPPED} updates in a row were skipped, the last because of: {run.skipped}"
        raise UserError(explain_nan(run, what))
    return not run.skipped


def stop_at_nan(run: Run, loss: float, norm: float) -> None:
    """Raises UserError for a loss or norm that is not finite, but not for float16's overflows."""
    if math.isfinite(loss) and (math.isfinite(norm) or run.scaler.is_enabled()):
        return
    first = run.progress.cursor
    last = first + run.config.total_batch_size // run.config.sequence_length - 1
    what = f"the loss is {loss} and the gradient norm {norm}, on sequences {first} to {last}"
    raise UserError(explain_nan(run, what))


def explain_nan(run: Run, what: str) -> str:
    """What happened at which step, and the two ways to go on."""
    last = run.last_saved
    again = "--resume auto"
    if last not in checkpoint.checkpoints(run.config.log_dir):  # none, or elsewhere
        again = f"--resume {shlex.quote(str(last or 'none'))} --overwrite"
    find = 'python -c "import train_gpt2; train_gpt2.find_nan()"'
    return (
        f"step {run.progress.step}: {what}; last checkpoint: {last or 'none yet'}. "
        f"To find the operation: {find} {shlex.join(sys.argv[1:])} --no-compile {again}. "
        f"To go on: {again} with a lower --learning-rate or --dtype float32."
    )


def find_nan() -> None:
    """The slow rerun that explain_nan proposes.

    It names the first module with an output that is not finite, or the operation in backward.
    """
    names: dict[torch.nn.Module, str] = {}

    def before(module: torch.nn.Module, _inputs) -> None:
        if isinstance(module, GPT):
            names.update({part: name for name, part in module.named_modules()})

    def after(module, _inputs, output) -> None:
        if isinstance(output, torch.Tensor) and not output.isfinite().all():
            raise UserError(
                f"the first output that is not finite is that of {names[module]}, {module}"
            )

    torch.nn.modules.module.register_module_forward_pre_hook(before)
    torch.nn.modules.module.register_module_forward_hook(after)
    torch.autograd.set_detect_anomaly(True)
    run_script(main)


# -- saving


def save_is_due(run: Run) -> bool:
    """Whether this step gets a checkpoint: by its number, by the clock, or as the best so far."""
    progress = run.progress
    if progress.step == run.first_step:
        return False
    minutes = run.config.checkpoint_minutes
    late = minutes > 0 and time.perf_counter() - run.last_save_time > 60 * minutes
    late = run.world.any(run.world.is_main and late)  # all processes go by one clock
    best = run.config.save_best and progress.lower is not None
    return late or best or run.due(run.config.checkpoint_every)


def save_checkpoint(run: Run) -> None:
    """Writes a checkpoint of the updates done so far, then removes those no longer wanted."""
    config = run.config
    progress = run.progress
    progress.wall = run.wall()
    progress.best = progress.lower or progress.best
    state = {
        **dataclasses.asdict(progress),
        "batch_size": run.train_loader.B,
        "data": run.data,
        "machine": run.machine,
        "dtype": dtype_name(run.dtype),
        "config": dataclasses.asdict(config),
        "model": dataclasses.asdict(run.raw.config),
        "scaler": run.scaler.state_dict(),
    }
    run.log.sync()  # so that a resumed run finds every step up to this one
    run.last_saved = checkpoint.save(
        config.log_dir,
        model=run.raw,
        optimizers=run.optimizers,
        state=state,
        world=run.world,
        card=card_of(run),
    )
    if run.world.is_main:
        best = progress.best["step"] if progress.best else None
        checkpoint.prune(config.log_dir, config.keep_checkpoints, best)
    run.last_save_time = time.perf_counter()


def own_path(run: Run) -> Path:
    """The path of this step's checkpoint. run.last_saved is the same path once it is written."""
    return checkpoint.path_of(run.config.log_dir, run.progress.step)


def card_of(run: Run) -> dict:
    """The rows of the model card."""
    progress = run.progress
    return {
        "data": run.config.data_dir,
        "steps": progress.step,
        "tokens": f"{progress.cursor * run.config.sequence_length:,}",
        **{name: f"{loss:.4f}" for name, loss in progress.losses.items()},
        "command": report.command(),
    }


def save_interrupted(run: Run) -> None:
    """Saves the last completed update and says how to go on."""
    path = own_path(run)
    saved = f"{path} is saved"
    if run.progress.step == 0:
        saved = "before the first update: nothing to save"
    elif path != run.last_saved:
        save_checkpoint(run)
    run.log.say(f"interrupted: {saved}; go on with: {report.command_to_resume()}")


# -- resuming

# A resumed run may change these without a word.
SILENT = {"preset", "resume", "overwrite", "log_dir", "init_from", "device"}
SILENT |= {"keep_checkpoints", "checkpoint_minutes", "save_best"}

# What a change means, where its name does not say it
REORDERED = " (the rest of this epoch has another order: some sequences come again, others never)"
MEANINGS = {"seed": REORDERED, "shuffle": REORDERED}
MEANINGS["val_tokens"] = " (validation losses do not compare with those before)"


def as_restarted(config: TrainConfig, world: World) -> TrainConfig:
    """If torchrun restarted the processes: goes on with the run that they had begun, if they had.

    A run has begun when its start is in metrics.jsonl. Older checkpoints are out of the way before
    that. Rank 0 decides, because a shared disk may show two nodes two states.
    """
    agents = world.agents()
    metrics = Path(config.log_dir) / "metrics.jsonl"
    if world.is_main and agents and metrics.exists():
        starts = starts_of(read_metrics(metrics))
        if starts and set(agents) & set(starts[-1].get("launch", [])):
            if config.resume in ("none", "auto") or checkpoint.checkpoints(config.log_dir):
                config = dataclasses.replace(config, resume="auto", overwrite=False)
            else:  # the same start once more: resume names a checkpoint elsewhere
                config = dataclasses.replace(config, overwrite=True)
    return world.share(config)


def find_checkpoint(config: TrainConfig, world: World, log: Log) -> checkpoint.Found | None:
    """The checkpoint to go on from; None for a new run."""
    if config.resume == "none":
        return None
    candidates = [Path(config.resume)]
    if config.resume == "auto":
        if world.is_main:
            checkpoint.sweep(Path(config.log_dir))
        candidates = checkpoint.checkpoints(config.log_dir)[::-1]
    found = checkpoint.find(candidates, world, log.say)
    if found is None:
        log.say(f"resume: no checkpoint in {config.log_dir} yet, starting from the beginning")
        return None
    if "warmup_steps" not in typed(sys.argv[1:]):
        config.warmup_steps = found.state["config"]["warmup_steps"]
    others = compare_settings(config, found)
    steps = found.state["step"]
    log.say(f"resuming from {found.path}: {steps} updates, {found.state['cursor']:,} sequences")
    if others:
        log.say(f"  with other settings than before: {', '.join(others)}")
    here = describe_machine(world)
    then = found.state.get("machine", here)  # version 2 kept none
    moved = [f"{name} {then[name]} -> {here[name]}" for name in here if then[name] != here[name]]
    if moved:
        log.say(f"  so the uninterrupted run may have other bits: {', '.join(moved)}")
    return found


def describe_machine(world: World) -> dict:
    """What else decides the last bits of a loss, besides the settings."""
    return {
        "code": report.revision(),
        "device": device_name(world.device),
        "processes": world.size,
        "threads": torch.get_num_threads() if world.device.type == "cpu" else "any",
        "torch": str(torch.__version__),
    }


def compare_settings(config: TrainConfig, found: checkpoint.Found) -> list[str]:
    """The settings that have changed since a checkpoint, as "name then -> now".

    Raises UserError if the model or the optimizer differs.
    """
    then = dataclasses.asdict(TrainConfig()) | found.state["config"]  # a newer field: its default
    now = dataclasses.asdict(config)
    for name in ("dtype", "batch_size"):  # auto and 0 keep what they have found
        then[name] = found.state[name]
        now[name] = then[name] if now[name] in ("auto", 0) else now[name]
    changed = {
        name: f"{name} {then[name]} -> {now[name]}{MEANINGS.get(name, '')}"
        for name in now
        if then[name] != now[name]
    }
    fields = dataclasses.fields(GPTConfig)
    fixed = ["sequence_length", "optimizer", *[f.name for f in fields if f.metadata != HARMLESS]]
    refused = [changed[name] for name in fixed if name in changed]
    unknown = set(found.state["model"]) - {f.name for f in fields}
    refused += [f"{name}, which this program does not know" for name in sorted(unknown)]
    if refused:
        raise UserError(
            f"{found.path} cannot be resumed with another {', '.join(refused)}: "
            f"use its values, or --init-from {found.path}"
        )
    return [changed[name] for name in changed if name not in SILENT]


def know_data(config: TrainConfig, found: checkpoint.Found | None, log: Log) -> dict[str, dict]:
    """What a checkpoint keeps of the data: {split: `identify` of its shards}.

    Raises UserError if shards are missing or damaged, or not those that `found` was trained on.
    """
    data_dir = Path(config.data_dir)
    splits = ["train", "val"] if config.val_every else ["train"]
    now = {split: identify(find_shards(data_dir, split)) for split in splits}
    if not found:
        return now
    then = found.state["data"]
    if found.state["version"] == 2:
        log.say(f"  {found.path} is of version 2: it knows training shards by name and size only")
        hashes = {name: sha256 for name, (_, sha256) in now["train"].items()}
        then = {"train": {name: [size, hashes.get(name)] for name, (size, _) in then.items()}}
    for split in splits:
        here = now[split]
        before = then.get(split, here)
        other = sorted(name for name in here | before if here.get(name) != before.get(name))
        if other:
            raise UserError(
                f"{data_dir} has other shards than when {found.path} was written "
                f"({other[0]} differs, {len(other)} in all): put the shards back, or start a new "
                f"run from its weights with --init-from {found.path}"
            )
    return then | now  # without validation, the split that the run had is kept


def restore(run: Run, found: checkpoint.Found) -> None:
    """Puts a run where the checkpoint left it."""
    state = found.state
    checkpoint.load_optimizers(run.raw, run.optimizers, state.pop("optimizer"))
    if state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    names = [f.name for f in dataclasses.fields(Progress)]
    run.progress = Progress(**{name: state[name] for name in names if name in state})
    if not is_own(run.config, found):
        run.progress.best = None  # its checkpoint is not in this log_dir
    run.train_loader.seek(run.progress.cursor)
    run.last_saved = found.path


def is_own(config: TrainConfig, found: checkpoint.Found | None) -> bool:
    """Whether a checkpoint is in log_dir, and not from elsewhere."""
    return found is not None and found.path.resolve().parent == Path(config.log_dir).resolve()


def clear_the_way(config: TrainConfig, found: checkpoint.Found | None, step: int) -> None:
    """Renames damaged and later checkpoints; --overwrite removes those of the old run."""
    for path in found.damaged if found else []:
        checkpoint.set_aside(path, "damaged")
    own = is_own(config, found)
    for path in checkpoint.checkpoints(config.log_dir):
        if config.overwrite and not own:
            checkpoint.remove(path)
        elif not own or checkpoint.step_of(path) > step:
            checkpoint.set_aside(path, "abandoned")
    if not own:
        for name in ("loss.png", "report.md"):
            Path(config.log_dir, name).unlink(missing_ok=True)


def start_logs(run: Run, found: checkpoint.Found | None) -> None:
    """Begins the logs, or goes on with those of the checkpoint's run."""
    step = run.progress.step
    about = report.describe_run(run.config, run.world, run.dtype, run.train_loader.B)
    about |= {"model": dataclasses.asdict(run.raw.config), "parameters": run.raw.num_params()}
    if run.world.is_main:
        run.log.open_tracker(about, step)  # if it fails, the old run is still there
        clear_the_way(run.config, found, step)
    if found:
        ours = is_own(run.config, found)
        run.log.resume(step, run.progress.evaluated, about, ours=ours)
    else:
        run.log.start(about)


# -- the command


def train(config: TrainConfig, world: World) -> None:
    """Trains to the last step, or until a signal interrupts it."""
    log = Log(config.log_dir, world.is_main, config.tracker)
    found = find_checkpoint(config, world, log)
    if found and found.state["step"] > config.max_steps:
        log.say(f"done: {found.path} is past --max-steps {config.max_steps}, nothing is left to do")
        return
    usual = PRESETS[config.preset].warmup_steps
    if not found and config.warmup_steps < usual and "warmup_steps" not in typed(sys.argv[1:]):
        log.say(f"warmup_steps {config.warmup_steps}, not {usual}: a tenth of this shorter run")
    run: Run | None = None
    try:
        run = Run(config, world, log, found)
        start_logs(run, found)
        loop(run)
        finish(run)
    except Interrupted:
        if run:
            save_interrupted(run)
    except torch.OutOfMemoryError:
        batch_size = run.train_loader.B if run else 0
        raise UserError(explain_out_of_memory(batch_size, config)) from None
    finally:
        log.close()


def finish(run: Run) -> None:
    """Writes the report, and says what to do next. The run is complete, whatever fails here."""
    log_dir = run.config.log_dir
    memory = peak_memory(run.world.device)
    wall = run.wall()
    run.log.record(run.progress.step, "end", wall=wall, memory=memory)
    done = f"done: {run.config.max_steps} steps in {duration(wall)}"
    run.log.say(f"{done}, peak memory {memory / 1e9:.2f} GB")
    if run.world.is_main:
        try:
            report.write_report(log_dir)
            say(report.last_words(run.config))
        except Exception as error:
            say(f"no report of {log_dir} ({first_line(error)}): the run itself is complete")


def evaluate_only(config: TrainConfig, world: World) -> None:
    """Prints validation loss and HellaSwag of --init-from's model, as training does."""
    log = Log(config.log_dir, world.is_main)  # it writes no file, because nobody starts it
    dtype, _ = prepare_device(config, world, None)
    raw = build_model(config, None, log)
    world.place(raw)
    log.say(f"{world.device}, {dtype_name(dtype)}, {compile_model(config, raw, world.device)}")
    examples = load_hellaswag(config, world, log, raw)
    B = config.batch_size or fit_batch_size(raw, config, world, dtype)
    with world.whole(raw):
        if config.val_every:
            loader = DataLoaderLite(config.data_dir, "val", B, config.sequence_length)
            val_loss = validate(raw, loader, config.val_tokens, world, dtype)
            log.say(VAL_LINE.format(**describe_loss(val_loss, loader, config.val_tokens)))
        if examples:
            score = hellaswag.evaluate(
                raw, examples, world.device, world=world, dtype=dtype, progress=True
            )
            log.say(HELLASWAG_LINE.format(**score))


def main() -> None:
    config = parse_command_line(sys.argv[1:])
    with World(config.device, config.sharding) as world:
        config = as_restarted(config, world)
        problems = check(config, world.size)
        if problems:
            if int(os.environ.get("LOCAL_RANK", 0)):  # one rank of each node says it
                time.sleep(10)  # torchrun ends all ranks with the first that ends
            else:
                print("\n".join(f"train_gpt2.py: {p}" for p in problems), file=sys.stderr)
            sys.exit(2)
        if config.eval_only:
            evaluate_only(config, world)
            return
        patience = 10.0 if config.resume == "auto" else 0.0  # the job's last start may still save
        with alone_in(config.log_dir, world, patience):
            train(config, world)


if __name__ == "__main__":
    run_script(main)

"""Trains a GPT-2. The 124M reproduction on one machine of 8 GPUs, or the same on a laptop:

torchrun --standalone --nproc_per_node=8 train_gpt2.py
python train_gpt2.py --preset quickstart
"""

import dataclasses
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

import hellaswag
import sample
from config import TrainConfig, check, parse_command_line
from model import GPT, DataLoaderLite, GPTConfig
from support import checkpoint, hf, plots
from support.common import UserError, run_script, say
from support.device import (
    autocast,
    compile_blocks,
    eager,
    free_memory,
    newest_flash_attention,
    peak_flops,
    peak_memory,
    pick_dtype,
    seed_everything,
    why_not_compile,
)
from support.distributed import Interrupted, Stop, World
from support.fitting import fit_batch_size
from support.log import Log, alone_in, read_metrics
from support.report import (
    command,
    command_to_resume,
    describe_run,
    dtype_name,
    duration,
    explain_nan,
    print_setup,
)
from support.shards import identify
from support.tokenizer import check_vocabulary


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
    """One update: the gradient of the mean loss over all micro-batches and processes.

    It is clipped, then the optimizers use it. Returns the loss and the gradient's norm before
    clipping, both scalars on the device, the same on every process. accept(loss, norm) may refuse
    the update; it costs a wait for the device in the middle of the step.
    """
    model.train()
    loss_accum = torch.zeros((), device=world.device)
    for micro_step in range(grad_accum_steps):
        x, y = loader.next_batch()
        x = x.to(world.device, non_blocking=True)
        y = y.to(world.device, non_blocking=True)
        is_last = micro_step == grad_accum_steps - 1
        world.sync_gradients(model, is_last)  # before the forward: DDP looks at it there
        with autocast(world.device, dtype):
            _, loss = model(x, y)
        # the mean over the update is the mean of equally large micro-batches' means
        loss = loss / grad_accum_steps
        loss_accum += loss.detach()
        scaler.scale(loss).backward()
        if stop is not None:
            stop.check()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = clip_gradients(model, grad_clip)
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


def clip_gradients(model: torch.nn.Module, largest: float) -> torch.Tensor:
    """Scales the gradient down to a norm of at most `largest` (0 = any) -> its norm before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest or math.inf)
    if hasattr(norm, "full_tensor"):  # with fsdp each process holds a part
        norm = norm.full_tensor()
    return norm


SPIKE_WINDOW = 128  # updates, as in llm.c's -sl and -sg


def is_spike(value: float, recent: list[float], limit: float) -> bool:
    """Whether a value is more than `limit` standard deviations above the mean of a full window."""
    if len(recent) < SPIKE_WINDOW:
        return False
    return value > statistics.fmean(recent) + limit * statistics.pstdev(recent)


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

    It does not depend on the micro-batch and the number of processes.
    """
    sequences = min(val_tokens // loader.T, loader.num_sequences)
    was_training = raw.training
    raw.eval()
    on = "cpu" if world.device.type == "mps" else world.device  # MPS has no float64
    total = torch.zeros((), dtype=torch.float64, device=on)
    rounds = range(0, sequences, loader.B * world.size)
    hidden = None if world.is_main else True  # None: shown where somebody watches a terminal
    for first in tqdm(rounds, "validation", leave=False, disable=hidden):
        mine = first + world.rank * loader.B
        count = min(loader.B, sequences - mine)
        if count > 0:
            x, y = loader.batch(mine, count)
            # the last batch is as large as the others, for the compiled blocks; -1 is ignored
            x = F.pad(x, (0, 0, 0, loader.B - count))
            y = F.pad(y, (0, 0, 0, loader.B - count), value=-1)
            with autocast(world.device, dtype):
                _, loss = raw(x.to(world.device), y.to(world.device))
            total += loss.to(total) * count
        if stop is not None:
            stop.check()
    raw.train(was_training)
    return (world.sum(total) / sequences).item()


# -- a run


class Run:
    """What the loop works on.

    `raw` is the model as it is saved, scored and sampled, its blocks compiled in place; `model`
    around it averages the gradients of all processes, and is trained.
    """

    PROGRESS = ("step", "evaluated", "cursor", "best", "losses", "recent")  # kept in a checkpoint

    def __init__(
        self, config: TrainConfig, world: World, log: Log, found: checkpoint.Found | None = None
    ):
        """Begins from nothing, from other weights, or from a checkpoint that was found."""
        self.config = config
        self.world = world
        self.log = log
        self.stop = Stop(world)
        self.step = 0  # updates done
        self.cursor = 0  # where this step's sequences start
        self.evaluated = False  # whether what is due at this step is done
        # the lowest validation loss so far at a step with a checkpoint: {"loss", "step"}
        self.best: dict | None = None
        self.losses: dict[str, float] = {}  # the last ones, for the model card
        self.recent: dict[str, list[float]] = {"loss": [], "norm": []}  # for skip_spikes
        self.skipped = ""  # why the last update was not made
        self.last_saved: Path | None = None

        # The order matters. Only a model that is placed on its device can be compiled for it; the
        # largest micro-batch is found with the compiled model, without the buckets of DDP; and the
        # optimizers need the parameters that wrapping leaves.
        self.build_model(found)
        self.fit_batch(found)
        self.build_loaders()
        self.build_optimizers()
        self.measure_peak()
        # where the run's clock began; restore moves it back by the time that was spent before
        self.clock_start = time.perf_counter()
        print_setup(self)
        self.open_logs(found)

    def build_model(self, found: checkpoint.Found | None) -> None:
        """The model: new, or from a checkpoint or other weights; on its device, compiled."""
        config = self.config
        world = self.world
        torch.set_float32_matmul_precision("high")  # TF32 on CUDA; nothing changes on a CPU
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS needs for it
            torch.use_deterministic_algorithms(True)
        self.dtype, reason = choose_dtype(config, world, found)
        self.raw = self.build_raw(found)
        if world.is_main and self.raw.fingerprint.difference:
            self.log.say(hf.describe_change(self.raw.fingerprint))
        world.place(self.raw, self.dtype)

        why_eager = why_not_compile(world.device) if config.compile else "as asked"
        kernels = f"eager: {why_eager}" if why_eager else "compiled"
        if not config.deterministic and (flash := newest_flash_attention(world.device)):
            kernels += f", {flash}"
        self.log.say(f"device: {world.device}, {dtype_name(self.dtype)} ({reason}), {kernels}")
        if not why_eager:
            compile_blocks(self.raw, recompute=world.device.type == "cpu")

    def build_raw(self, found: checkpoint.Found | None) -> GPT:
        """The model on the CPU: as the checkpoint says, else from other weights, else new.

        A flag sets the GPTConfig field of its name. Loaded weights keep their architecture: of it
        flags set only what is harmless and, with --init-from, the context, and what the files do
        not tell.
        """
        config = self.config
        flags = {name: getattr(config, name) for name in fields_of_gpt() if hasattr(config, name)}
        flags["block_size"] = config.sequence_length
        harmless = {f.name for f in dataclasses.fields(GPTConfig) if f.metadata.get("harmless")}
        harmless_flags = {name: flags[name] for name in flags.keys() & harmless}
        torch.manual_seed(config.seed)
        if found:
            refuse_too_large(found.state["model"])
            raw = GPT.from_pretrained(found.path, **{**found.state["model"], **harmless_flags})
            hf.refuse_resume_by_changed_code(found.path, raw.fingerprint)
            return raw
        if config.init_from == "scratch":
            refuse_too_large(flags)
            return GPT(GPTConfig(**flags))
        T = config.sequence_length
        raw = GPT.from_pretrained(config.init_from, flags, block_size=T, **harmless_flags)
        check_vocabulary(config.init_from, raw.config.vocab_size)
        return raw

    def fit_batch(self, found: checkpoint.Found | None) -> None:
        """The micro-batch: as asked, as before, or as large as fits."""
        sequences = self.config.total_batch_size // self.config.sequence_length // self.world.size
        self.batch_size = self.config.batch_size
        if self.batch_size == 0 and found:
            self.batch_size = found.state["batch_size"]
        if self.batch_size == 0 or sequences % self.batch_size:
            self.batch_size = fit_batch_size(self.raw, self.config, self.world, self.dtype)
        self.grad_accum_steps = sequences // self.batch_size

    def build_loaders(self) -> None:
        """What is trained on, validated on and scored."""
        config = self.config
        world = self.world
        B = self.batch_size
        T = config.sequence_length
        self.train_loader = DataLoaderLite(
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
        self.val_loader: Any = None  # a DataLoaderLite, if there is validation
        if config.val_every:
            self.val_loader = DataLoaderLite(config.data_dir, "val", B, T)
        self.examples = load_hellaswag(config, world, self.log)

    def build_optimizers(self) -> None:
        """The model that averages gradients over the processes, and what updates it."""
        config = self.config
        world = self.world
        self.model = world.wrap(self.raw)
        self.optimizers = self.raw.configure_optimizers(
            weight_decay=config.weight_decay,
            learning_rate=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            muon=config.optimizer == "muon",
            make=world.make_optimizer,
        )
        half = self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=half)

    def measure_peak(self) -> None:
        """Operations a second of all processes, of which MFU is a part."""
        peak, source = peak_flops(self.world.device, self.dtype)
        self.peak = peak * self.world.size
        self.log.say(f"peak: {peak / 1e12:,.2f} TFLOP/s a process ({source})")

    def open_logs(self, found: checkpoint.Found | None) -> None:
        """Starts the logs, or goes on where a checkpoint left everything."""
        about = describe_run(self.config, self.world, self.dtype, self.batch_size)
        about["model"] = dataclasses.asdict(self.raw.config)
        if found:
            restore(self, found)
        if self.world.is_main:
            self.clear_the_way(found)
        if found:
            self.log.resume(self.step, self.evaluated, about, ours=self.is_own(found))
        else:
            self.log.start(about)
        self.first_step = self.step  # of this process: 0, or the checkpoint's
        self.first_step_ended: float | None = None  # its clock: the first update compiles
        self.last_save_time = time.perf_counter()  # or when the run began

    def clear_the_way(self, found: checkpoint.Found | None) -> None:
        """Renames damaged checkpoints, and those of a run that is given up; --overwrite removes."""
        for path in found.damaged if found else []:
            checkpoint.set_aside(path, "damaged")
        own = found is not None and self.is_own(found)
        for path in checkpoint.checkpoints(self.config.log_dir):
            if self.config.overwrite and not own:
                checkpoint.remove(path)
            elif not own or checkpoint.step_of(path) > self.step:
                checkpoint.set_aside(path, "abandoned")

    def is_own(self, found: checkpoint.Found) -> bool:
        """Whether a checkpoint is of the run in log_dir, and not of one elsewhere."""
        return found.path.resolve().parent == Path(self.config.log_dir).resolve()

    def wall(self) -> float:
        return time.perf_counter() - self.clock_start

    def due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.config.max_steps)

    def accept(self, loss: float, norm: float) -> bool:
        """Whether to make this update; if not, `skipped` says why."""
        self.skipped = ""
        if not math.isfinite(norm):
            self.skipped = "overflow in float16"  # in another dtype stop_at_nan ends the run
        elif self.config.skip_spikes:
            for name, value in {"loss": loss, "norm": norm}.items():
                if is_spike(value, self.recent[name], self.config.skip_spikes):
                    self.skipped = f"spike of the {name}"
                self.recent[name] = [*self.recent[name], value][-SPIKE_WINDOW:]
        return not self.skipped


def choose_dtype(
    config: TrainConfig, world: World, found: checkpoint.Found | None
) -> tuple[torch.dtype, str]:
    """What to autocast to, the same on all processes and after a resume, and why."""
    if config.dtype == "auto" and found:
        return getattr(torch, found.state["dtype"]), "as before"
    return pick_dtype(world.device, config.dtype, world)


def fields_of_gpt() -> list[str]:
    return [f.name for f in dataclasses.fields(GPTConfig)]


def refuse_too_large(shape: dict) -> None:
    """Raises UserError for a model whose weights alone do not fit into this machine's memory."""
    L, C, T = shape["n_layer"], shape["n_embd"], shape["block_size"]
    need = 4 * (12 * L * C**2 + (T + GPTConfig.vocab_size) * C)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # each makes its own, on the CPU first
    free = free_memory(torch.device("cpu"))
    if free is not None and need * processes > free:
        raise UserError(
            f"a model of n_layer {L}, n_embd {C} and {T} positions needs {need:,} bytes for its "
            f"weights in each process, {free:,} are free here: use smaller ones"
        )


def load_hellaswag(config: TrainConfig, world: World, log: Log) -> list[dict]:
    """The examples to score; empty, with a line that says why, where there are none to be had."""
    if not config.hellaswag_every:
        return []
    try:
        return hellaswag.load_examples("val", config.hellaswag_path, config.hellaswag_limit, world)
    except UserError as error:
        if config.hellaswag_path:
            raise
        log.say(f"hellaswag: off, {error}")
        return []


# -- checkpoints of a run

# Settings that a resumed run may change without being told as "other settings than before".
SILENT = {"preset", "resume", "overwrite", "log_dir", "init_from", "batch_size"}
SILENT |= {"sharding", "keep_checkpoints", "checkpoint_minutes", "save_best"}


def find_resume(config: TrainConfig, world: World, log: Log) -> checkpoint.Found | None:
    """The checkpoint to go on from; None to begin. Raises UserError if it is of another model."""
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
    refuse_other_model(config, found)
    then = found.state["config"]
    changed = [
        f"{name} {then[name]} -> {now}"
        for name, now in dataclasses.asdict(config).items()
        if name not in SILENT and then.get(name, now) != now
    ]
    steps, sequences = found.state["step"], found.state["cursor"]
    log.say(f"resuming from {found.path}: {steps} updates, {sequences:,} sequences")
    if changed:
        log.say(f"  with other settings than before: {', '.join(changed)}")
    return found


def refuse_other_model(config: TrainConfig, found: checkpoint.Found) -> None:
    """Raises UserError if a checkpoint's model or optimizer is not the one of this command.

    A field that the checkpoint does not know yet had its default.
    """
    then = dataclasses.asdict(TrainConfig()) | found.state["config"]
    fixed = [f.name for f in dataclasses.fields(GPTConfig) if not f.metadata.get("harmless")]
    changed = []
    for name in (*fixed, "sequence_length", "optimizer"):
        now = getattr(config, name, None)
        if now is not None and now != then[name]:
            changed.append(f"{name} {then[name]} -> {now}")
    unknown = set(found.state["model"]) - set(fields_of_gpt())
    changed += [f"{name}, which this program does not know" for name in unknown]
    if changed:
        raise UserError(
            f"{found.path} cannot be resumed with another {', '.join(changed)}: "
            f"use its values, or --init-from {found.path}"
        )


def restore(run: Run, found: checkpoint.Found) -> None:
    """Puts a run where a checkpoint left it."""
    state = found.state
    refuse_other_data(run, found)
    asked = [options_of(group) for group in groups_of(run.optimizers)]
    checkpoint.load_optimizers(run.raw, run.optimizers, state, run.world)
    for group, options in zip(groups_of(run.optimizers), asked, strict=True):
        group.update(options)  # weight decay and the like are this command's, not the checkpoint's
    if state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    run.train_loader.load_state_dict({"cursor": state["cursor"]})
    for name in run.PROGRESS:
        setattr(run, name, state[name])
    run.clock_start = time.perf_counter() - state["wall"]
    run.last_saved = found.path
    del state["optimizer"]  # its file need not stay mapped


def refuse_other_data(run: Run, found: checkpoint.Found) -> None:
    """Raises UserError if the shards are not those that the run has begun with."""
    now = identify(run.train_loader.shards)
    then = found.state["data"]
    other = sorted(name for name in now | then if now.get(name) != then.get(name))
    if other:
        raise UserError(
            f"{run.config.data_dir} has other shards than when {found.path} was written "
            f"({other[0]} and {len(other) - 1} more differ): put the shards back, or start a new "
            f"run from its weights with --init-from {found.path}"
        )


def groups_of(optimizers: list[torch.optim.Optimizer]) -> list[dict]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def options_of(group: dict) -> dict:
    return {name: value for name, value in group.items() if name != "params"}


def save(run: Run) -> Path:
    """Writes a checkpoint of the updates done so far, then removes those no longer wanted."""
    config = run.config
    state = {name: getattr(run, name) for name in run.PROGRESS}
    state |= {
        "batch_size": run.batch_size,
        "wall": run.wall(),
        "data": identify(run.train_loader.shards),
        "dtype": dtype_name(run.dtype),
        "config": dataclasses.asdict(config),
        "model": dataclasses.asdict(run.raw.config),
        "scaler": run.scaler.state_dict(),
    }
    card = {
        "data": config.data_dir,
        "steps": run.step,
        "tokens": f"{run.step * config.total_batch_size:,}",
        **{name: f"{loss:.4f}" for name, loss in run.losses.items()},
        "command": command(),
    }
    run.log.sync()  # so that a resumed run finds every step up to this one
    path = checkpoint.save(
        config.log_dir,
        model=run.raw,
        optimizers=run.optimizers,
        state=state,
        world=run.world,
        card=card,
    )
    if run.world.is_main:
        best = checkpoint.path_of(config.log_dir, run.best["step"]) if run.best else None
        checkpoint.prune(config.log_dir, config.keep_checkpoints, best)
    run.last_saved = path
    run.last_save_time = time.perf_counter()
    return path


# -- what happens on the way


def evaluate(run: Run) -> None:
    """Validation, HellaSwag and samples, each where it is due at this step.

    Training does not notice: the weights, the loader and the random state stay as they were.
    """
    config = run.config
    validating = run.due(config.val_every)
    scoring = bool(run.examples) and run.due(config.hellaswag_every)
    sampling = run.step > 0 and run.due(config.sample_every)
    if not (validating or scoring or sampling):
        return
    with run.world.whole(run.raw):
        if validating:
            evaluate_loss(run)
        with eager():  # rows of every length would recompile the blocks
            if scoring:
                evaluate_hellaswag(run)
            if sampling:
                print_samples(run)
    if run.world.is_main and validating:
        plots.plot_run(config.log_dir)


def evaluate_loss(run: Run) -> None:
    config = run.config
    val_loss = validate(
        run.raw, run.val_loader, config.val_tokens, run.world, run.dtype, stop=run.stop
    )
    if not math.isfinite(val_loss):
        raise UserError(explain_nan(run, f"the validation loss is {val_loss}"))
    perplexity = math.exp(min(val_loss, 99))
    run.log.say(f"step {run.step:5d} | val loss {val_loss:.4f} | perplexity {perplexity:.2f}")
    run.log.record(run.step, "val", val_loss=val_loss, perplexity=perplexity)
    run.losses["validation loss"] = val_loss
    has_checkpoint = run.step > 0 and (config.save_best or run.due(config.checkpoint_every))
    if has_checkpoint and (run.best is None or val_loss < run.best["loss"]):
        run.best = {"loss": val_loss, "step": run.step}


def evaluate_hellaswag(run: Run) -> None:
    score = hellaswag.evaluate(
        run.raw,
        run.examples,
        run.world.device,
        world=run.world,
        dtype=run.dtype,
        progress=True,
        stop=run.stop,
    )
    total = score["total"]
    acc_norm = score["acc_norm"]
    right = f"{score['num_correct_norm']}/{total}"
    run.log.say(f"step {run.step:5d} | HellaSwag {right} = {acc_norm:.4f}")
    run.log.record(run.step, "hella", hellaswag=acc_norm, acc=score["acc"], total=total)


def print_samples(run: Run) -> None:
    config = run.config
    rank = run.world.rank
    generator = torch.Generator(run.world.device)
    generator.manual_seed(config.seed + 1000 * run.step + rank)
    texts = sample.complete(
        run.raw,
        config.sample_prompt,
        config.num_samples,
        config.sample_tokens,
        generator=generator,
    )
    for i, text in enumerate(texts):
        say(f"rank {rank} sample {i}: {text}")
    run.log.record(run.step, "samples", prompt=config.sample_prompt, samples=texts)


def log_step(run: Run, loss: float, norm: float, lr: float, seconds: float) -> None:
    """One line on the console and one record of the update that was just made."""
    config = run.config
    now = time.perf_counter()
    rate = config.total_batch_size / seconds
    mfu = rate * run.raw.flops_per_token(config.sequence_length) / run.peak
    line = (
        f"step {run.step:5d} | loss {loss:.6f} | lr {lr:.4e} | norm {norm:.4f} "
        f"| dt {1000 * seconds:.1f}ms | tok/sec {rate:,.0f} | mfu {mfu:.1%}"
    )
    if run.first_step_ended is None:
        run.first_step_ended = now
    else:
        a_step = (now - run.first_step_ended) / (run.step - run.first_step)
        line += f" | left {duration(a_step * (config.max_steps - run.step - 1))}"
    why = {}
    if run.skipped:
        line += f" | no update: {run.skipped}"
        why["skipped"] = run.skipped
    run.log.say(line)
    run.log.record(
        run.step,
        "train",
        loss=loss,
        **why,
        lr=lr,
        norm=norm if math.isfinite(norm) else None,
        ms=1000 * seconds,
        tokens_per_sec=rate,
        mfu=mfu,
        tokens=(run.step + 1) * config.total_batch_size,
        wall=run.wall(),
        memory=peak_memory(run.world.device),
    )


# -- the loop


def loop(run: Run) -> None:
    """Evaluate, save, make an update, log it, until all are made."""
    config = run.config
    refusing = config.skip_spikes or run.scaler.is_enabled()
    while True:
        if not run.evaluated:
            evaluate(run)
            run.evaluated = True
        if save_is_due(run):
            save(run)
        if run.step == config.max_steps:
            return
        if config.overfit_single_batch:
            run.train_loader.reset()

        start = time.perf_counter()
        seed_everything(config.seed, run.step, run.world.rank)
        lr = learning_rate(run.step, config)
        loss_on_device, norm_on_device = train_step(
            model=run.model,
            optimizers=run.optimizers,
            scaler=run.scaler,
            loader=run.train_loader,
            grad_accum_steps=run.grad_accum_steps,
            world=run.world,
            dtype=run.dtype,
            lr=lr,
            grad_clip=config.grad_clip,
            stop=run.stop,
            accept=run.accept if refusing else None,
        )
        loss = loss_on_device.item()  # waits for the device
        norm = norm_on_device.item()
        seconds = time.perf_counter() - start
        stop_at_nan(run, loss, norm)
        log_step(run, loss, norm, lr, seconds)
        run.step += 1
        run.cursor = run.train_loader.cursor
        run.evaluated = False
        run.losses["training loss"] = loss


def save_is_due(run: Run) -> bool:
    """Whether this step gets a checkpoint: by its number, by the clock, or as the best so far."""
    if run.step == run.first_step:
        return False
    minutes = run.config.checkpoint_minutes
    late = minutes > 0 and time.perf_counter() - run.last_save_time > 60 * minutes
    late = run.world.any(run.world.is_main and late)  # all processes go by one clock
    best = run.config.save_best and run.best is not None and run.best["step"] == run.step
    return late or best or run.due(run.config.checkpoint_every)


def train(config: TrainConfig, world: World) -> None:
    """A run to its last step, or to the signal that interrupts it."""
    log = Log(config.log_dir, world.is_main, config.tracker)
    found = find_resume(config, world, log)
    if found and found.state["step"] > config.max_steps:
        log.say(f"done: {found.path} is past --max-steps {config.max_steps}, nothing is left to do")
        return
    run = Run(config, world, log, found)
    try:
        loop(run)
        memory = peak_memory(world.device) / 1e9
        took = duration(run.wall())
        run.log.say(f"done: {config.max_steps} steps in {took}, peak memory {memory:.2f} GB")
    except Interrupted:
        save_interrupted(run)
    except torch.OutOfMemoryError:
        if run.batch_size > 1:
            less = f"--batch-size {run.batch_size // 2}"
        elif not config.activation_checkpointing:
            less = "--activation-checkpointing"
        else:
            less = "--sharding fsdp, on several GPUs"
        raise UserError(
            f"out of GPU memory with micro-batches of {run.batch_size}: add {less}; "
            "the run stays the same"
        ) from None
    finally:
        run.log.close()


def save_interrupted(run: Run) -> None:
    """Saves the last completed update and says how to go on."""
    go_on = command_to_resume()
    if run.step == 0:
        run.log.say(f"interrupted before the first update: nothing to save; start with: {go_on}")
        return
    path = checkpoint.path_of(run.config.log_dir, run.step)
    if path != run.last_saved:
        save(run)
    run.log.say(f"interrupted: {path} is saved; go on with: {go_on}")


# -- when the loss is not a number


def stop_at_nan(run: Run, loss: float, norm: float) -> None:
    """Raises UserError with what to know and to do, unless float16 merely overflowed."""
    if math.isfinite(loss) and (math.isfinite(norm) or run.scaler.is_enabled()):
        return  # an overflow in float16 is refused by `accept`, and the scaler lowers its scale
    sequences = run.config.total_batch_size // run.config.sequence_length
    what = (
        f"the loss is {loss} and the gradient norm {norm}, "
        f"on sequences {run.cursor} to {run.cursor + sequences - 1}"
    )
    raise UserError(explain_nan(run, what))


def find_nan() -> None:
    """The rerun that stop_at_nan proposes.

    It ends at the first module, or operation of the backward pass, that makes a nan.
    """
    names = {}

    def before(module, _inputs) -> None:
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


# -- the command


def as_restarted(config: TrainConfig) -> TrainConfig:
    """The configuration after torchrun has started all processes again because one died.

    They go on from what this very run has saved, not from a run that it was to overwrite.
    """
    metrics = Path(config.log_dir) / "metrics.jsonl"
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if not restarts or not metrics.exists():
        return config
    starts = [record for record in read_metrics(metrics) if record["type"] in ("run", "resume")]
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "")
    has_begun = bool(starts) and starts[-1].get("launch") == launch
    if not has_begun:
        return config
    if config.resume == "none" or checkpoint.checkpoints(config.log_dir):
        return dataclasses.replace(config, resume="auto", overwrite=False)
    return dataclasses.replace(config, overwrite=True)  # the same start, in its own log_dir


def main() -> None:
    config = as_restarted(parse_command_line(sys.argv[1:]))
    problems = check(config, int(os.environ.get("WORLD_SIZE", 1)))
    if problems:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # each node has its own disk
            print("\n".join(f"train_gpt2.py: {p}" for p in problems), file=sys.stderr)
        sys.exit(2)
    patience = 10.0 if config.resume == "auto" else 0.0  # a requeued job's last one may still save
    with World(config.device, config.sharding) as world, alone_in(config.log_dir, world, patience):
        train(config, world)


if __name__ == "__main__":
    run_script(main)

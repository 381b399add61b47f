"""Trains a GPT-2: the 124M reproduction on 8 GPUs, or a 1.9M model on a laptop:

torchrun --standalone --nproc_per_node=8 train_gpt2.py
python train_gpt2.py --preset quickstart
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

import minutes
from config import Settled, TrainConfig, refuse_other_sizes, settle, wrong_vocabulary
from evaluate import Evaluations, build_evaluations, show
from model import GPT, DataLoaderLite, GPTConfig
from optim import clip_gradients, describe_optimizers
from support.base.console import duration, run_script, say, say_once
from support.base.errors import UserError, first_line
from support.machine import device, graphs, sharding
from support.machine.compile import compile_model
from support.machine.distributed import Interrupted, Stop, World, under_torchrun
from support.machine.memory import explaining_memory, fit_batch_size, refuse_too_large
from support.run import checkpoint, divergence, resume
from support.run.average import average_weights, averaged
from support.run.checkpoint import Progress, Writer
from support.run.log import Log
from support.show import plots, report
from support.text.token_files import describe_frequencies
from support.weights import hf


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
    progress = min(1.0, max(0.0, 1 - (config.max_steps - step) / max(1, decay_steps)))
    remaining = 1 - progress
    if config.decay == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_frac + (1 - config.min_lr_frac) * remaining)


def train_step(
    *,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    loader: DataLoaderLite,
    grad_accum_steps: int,
    world: World,
    stop: Stop,
    dtype: torch.dtype,
    lr: float,
    grad_clip: float,
    averaging: float = 1.0,
    strategy: str = "ddp",  # --sharding
    run_part: Callable[..., Any] = graphs.run_eagerly,
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """One update, by the gradient of the mean loss over all micro-batches and processes.

    Returns the loss and the gradient's norm before clipping, scalars on the device, the same on
    every process; and whether a float16 overflow skipped the update, for which the CPU waits.
    run_part: by CUDA graphs, too, and then the next update overwrites the norm.
    """

    def add_gradients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with device.autocast(world.device, dtype):
            _, loss = model(x, y)
        # micro-batches are equally large: the mean of their means is the mean over the update
        loss = loss / grad_accum_steps
        scaler.scale(loss).backward()
        return loss.detach()

    model.train()
    loss_accum = torch.zeros((), device=world.device)
    for micro_step in range(grad_accum_steps):
        stop.read_vote()
        x, y = (t.to(world.device, non_blocking=t.is_pinned()) for t in loader.next_batch())
        sharding.sync_gradients(model, strategy, micro_step == grad_accum_steps - 1)
        part = "micro-step" if micro_step else "first micro-step"  # which makes the gradients
        loss_accum += run_part(part, add_gradients, x, y)
        with stop.noting_problems():
            loader.wait()
        stop.start_vote()
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        graphs.set_rate(group, "lr", lr * group.get("lr_scale", 1.0))
        graphs.set_rate(group, "averaging", averaging)
    update = partial(update_weights, model, optimizers, scaler, grad_clip, world)
    norm, skipped = run_part("update", update)
    loss_accum = world.sum(loss_accum) / world.size
    return loss_accum, norm, skipped


def update_weights(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    grad_clip: float,
    world: World,
) -> tuple[torch.Tensor, bool]:
    """Clips the gradients, updates the weights by them, and drops them -> norm, skipped."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = clip_gradients(model, grad_clip, world)
    # of all optimizers: with each scaler.step() for itself, Muon might step while AdamW does not
    skipped = scaler.is_enabled() and not norm.isfinite()
    for optimizer in optimizers:
        if not skipped:
            scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return norm, skipped


# -- a run


@dataclass
class Run:
    """A training run: its parts, all finished, and how far it has come."""

    config: TrainConfig
    command: str  # that began it
    command_to_resume: str
    world: World
    stop: Stop
    model: GPT  # what is saved and evaluated; its blocks are compiled in place
    wrapped_model: torch.nn.Module  # the same one: its backward pass averages all gradients
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    dtype: torch.dtype
    run_part: Callable[..., Any]  # of an update
    train_loader: DataLoaderLite
    evaluations: Evaluations
    data_identity: dict[str, Any]  # resume.identify_data's
    total_peak_flops: float  # a second, of all GPUs; 0 on a CPU, where it varies with other load
    progress: Progress
    writer: Writer
    first_step: int  # of this process
    began: float  # by the clock, as if nothing had interrupted the run
    log: Log = field(default_factory=Log)  # writes nothing until `train` opens it
    first_step_ended: float = 0.0  # by the clock; the first update compiles
    shortest: float = math.inf  # seconds of this process's fastest update
    last_save_time: float = field(default_factory=time.perf_counter)
    last_picture_time: float = -math.inf

    def wall(self) -> float:
        return time.perf_counter() - self.began

    def own_path(self) -> Path:
        """The path of this step's checkpoint. writer.last is the same once it is written."""
        return checkpoint.path_of(self.config.log_dir, self.progress.step)

    def close(self) -> None:
        """Finishes what is being written, and ends the threads."""
        self.writer.thread.shutdown()
        for loader in filter(None, (self.train_loader, self.evaluations.val_loader)):
            loader.close()
        self.log.close()

    def redraw(self) -> Future[bool]:
        """Has the writer's thread draw loss.png: no two at a time. Returns whether it could."""
        return self.writer.thread.submit(plots.redraw, self.config.log_dir)


def build_run(settled: Settled, args: list[str]) -> Run:
    """Builds all parts of a run, new or resumed from a checkpoint.

    Data come first, so that other ones are refused before the slow steps. The model is compiled
    before the micro-batch is chosen, and DDP wraps it after that, because its buckets take memory.
    Optimizers come last, because sharding changes parameters.
    """
    config, world, data, resumed_from = settled
    data_identity = resume.identify_data(data, resumed_from)
    before = resumed_from.state if resumed_from else {}
    dtype, total_peak_flops = start_device(config, world, before.get("dtype", ""))
    model = build_model(settled, dtype)
    B = fit_batch_size(model, config, world, dtype, before.get("batch_size", 0))
    train_loader = build_loader(settled, B)
    stop = Stop(world)
    evaluations = build_evaluations(config, model, world, stop, dtype, B, data)
    wrapped_model = sharding.wrap(model, world)
    optimizers = build_optimizers(config, model, dtype)
    world.say(f"optimizer: {describe_optimizers(optimizers)}")
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16)
    progress = resume.restore(config, resumed_from, model, optimizers, scaler, train_loader)
    run_part: Callable[..., Any] = graphs.run_eagerly
    if graphs.can_record(config, world, dtype):
        run_part = graphs.Graphs(optimizers, world.device).run
    with world.fail_together():
        train_loader.wait()
    last_saved = resumed_from.path if resumed_from else None
    world.say(report.describe_batch(config, world.size, train_loader))
    return Run(
        config=config,
        command=world.command(args),
        command_to_resume=world.command(resume.args_to_resume(args)),
        world=world,
        stop=stop,
        model=model,
        wrapped_model=wrapped_model,
        optimizers=optimizers,
        scaler=scaler,
        dtype=dtype,
        run_part=run_part,
        train_loader=train_loader,
        evaluations=evaluations,
        data_identity=data_identity,
        total_peak_flops=total_peak_flops,
        progress=progress,
        writer=Writer(stop, Path(config.log_dir), config.keep_checkpoints, last_saved),
        first_step=progress.step,
        began=time.perf_counter() - progress.wall,
    )


def start_device(config: TrainConfig, world: World, before: str = "") -> tuple[torch.dtype, float]:
    """Prints device and precision. Returns the autocast dtype and the peak FLOP/s of all GPUs."""
    dtype, reason = device.pick_dtype(world.device, config.dtype, before, world.any)
    world.say(f"device: {world.device}, {device.dtype_name(dtype)} ({reason})")
    if world.device.type == "cpu":  # its peak varies with other load
        return dtype, 0.0
    peak, source = device.peak_flops(world.device, dtype)
    world.say(f"peak: {peak / 1e12:,.2f} TFLOP/s per process ({source})")
    return dtype, world.size * peak


def build_loader(settled: Settled, B: int) -> DataLoaderLite:
    config, world, data, _ = settled
    return DataLoaderLite(
        data,
        "train",
        B,
        config.sequence_length,
        process_rank=world.rank,
        num_processes=world.size,
        shuffle=config.shuffle,
        seed=config.seed,
        pin=world.device.type == "cuda",
    )


def build_optimizers(
    config: TrainConfig, model: GPT, dtype: torch.dtype
) -> list[torch.optim.Optimizer]:
    optimizers = model.configure_optimizers(
        config.optimizer,
        weight_decay=config.weight_decay,
        learning_rate=config.learning_rate,
        embedding_lr=config.embedding_lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
    )
    for optimizer in optimizers if config.average_frac else []:
        optimizer.register_step_post_hook(average_weights)
    return optimizers


def build_model(settled: Settled, dtype: torch.dtype) -> GPT:
    """The model, sharded and compiled: from the checkpoint, from --init-from, or new.

    Loaded weights keep their own fields, except those marked SAME_MATH. With --init-from, flags
    also set the context length and what the files lack.
    """
    config, world, data, resumed_from = settled
    tokenizer = data.tokenizer
    flags = GPTConfig.fields_from(config, tokenizer.vocab_size)
    same_math = GPTConfig.same_math_from(config)
    torch.manual_seed(config.seed)
    origin = config.init_from
    if resumed_from:
        origin = str(resumed_from.path)
        saved = resumed_from.state["model"] | same_math
        refuse_too_large(partial(GPT, GPTConfig(**saved)), world.local_size)
        model = GPT.from_pretrained(resumed_from.path, **saved)
        hf.refuse_resume_by_changed_code(resumed_from.path, model.fingerprint)
    elif config.init_from == "scratch":
        refuse_too_large(partial(GPT, GPTConfig(**flags)), world.local_size)
        model = GPT(GPTConfig(**flags))
        model.tokenizer = tokenizer
    else:
        model = GPT.from_pretrained(origin, flags, block_size=config.sequence_length, **same_math)
    hf.refuse_other_vocabulary(origin, model, config.data_dir, tokenizer)
    refuse_other_sizes(origin, model.config, config)
    warning = wrong_vocabulary(config, tokenizer.vocab_size)
    world.say(f"vocabulary: {tokenizer}, from {config.data_dir}{warning}")
    world.say(
        f"model: {model.num_params():,} parameters, {model.origin or 'new'} (embedding padded to "
        f"{model.config.padded_vocab_size} rows in memory)"
    )
    if difference := model.fingerprint.difference:
        world.say(f"model: not a GPT-2: {difference}; only this code can read its checkpoints")
    sharding.place(model, world, config.sharding)
    kernel = device.sdpa_choice(world.device, dtype, model.config)
    how = compile_model(model, world.device, config.compile and not config.find_nan)
    world.say(f"model: {how}{kernel}")
    return model


def is_due(step: int, every: int, config: TrainConfig) -> bool:
    return every > 0 and (step % every == 0 or step == config.max_steps)


def evaluate_if_due(run: Run) -> bool:
    """Makes and records the evaluations that are due, if any. They do not affect training."""
    progress = run.progress
    progress.lower = None
    due = {
        name: measure
        for name, (every, measure) in run.evaluations.schedule.items()
        if is_due(progress.step, every, run.config)
    }
    if not due:
        return False
    with averaged(run.optimizers), sharding.unsharded(run.model, run.config.sharding):
        for name, measure in due.items():
            values = measure(progress.step)
            if name == "val":
                note_validation(run, values)
            if "figures" in values:
                run.world.say(f"step {progress.step:5d} | {show(values['figures'])}")
            run.log.record(progress.step, name, **values)
    # not at each validation, because a picture takes a second or two of a core
    if "val" in due and run.world.is_main and time.perf_counter() > run.last_picture_time + 120:
        drawing = run.redraw()
        if run.world.device.type not in checkpoint.SAVES_IN_BACKGROUND:
            drawing.result()
        run.last_picture_time = time.perf_counter()
    return True


def note_validation(run: Run, values: dict[str, Any]) -> None:
    """Remembers the lowest validation loss. Raises UserError if it is not a number."""
    progress = run.progress
    val_loss = values["val_loss"]
    if not math.isfinite(val_loss):
        end_diverged(run, f"the validation loss is {val_loss}")
    progress.losses["validation loss"] = val_loss
    for unit in ("bits_per_byte", "nats_per_character"):
        if unit in values:
            progress.losses[f"validation, {unit.replace('_', ' ')}"] = values[unit]
    this = {"loss": val_loss, "step": progress.step, "val_tokens": values["val_tokens"]}
    best = progress.best
    if not best or best["val_tokens"] != this["val_tokens"] or val_loss < best["loss"]:
        progress.lower = this
        if run.own_path() == run.writer.last:  # interrupted before this validation
            progress.best = progress.lower


# -- the loop


def loop(run: Run) -> None:
    """Repeats until the last step: evaluate, save, make an update, log it."""
    config = run.config
    progress = run.progress
    start = time.perf_counter()
    while True:
        if not progress.evaluated and evaluate_if_due(run):
            start = time.perf_counter()  # an update's time leaves out evaluations and saves only
        progress.evaluated = True
        run.stop.read_vote()
        if save_is_due(run):
            save_checkpoint(run)
            start = time.perf_counter()
        if progress.step == config.max_steps:
            return
        lr = learning_rate(progress.step, config)
        loss, norm, skipped = make_update(run, lr)
        end = time.perf_counter()
        if reason := divergence.why_stop(loss, norm, progress.skipped_in_a_row):
            last = progress.cursor + config.total_batch_size // config.sequence_length - 1
            end_diverged(run, f"{reason}, on sequences {progress.cursor} to {last}")
        report_step(run, loss, norm, lr, end - start, skipped)
        start = end
        progress.step += 1
        progress.cursor = run.train_loader.cursor
        progress.evaluated = False
        progress.losses = {"training loss of the last update": loss}  # no earlier model's


def make_update(run: Run, lr: float) -> tuple[float, float, bool]:
    """Makes the next update -> its loss, its norm, and whether float16 skipped it."""
    config = run.config
    progress = run.progress
    if config.overfit_single_batch:
        run.train_loader.reset()
    device.seed_everything(config.seed, progress.step, run.world.rank)  # for dropout
    run.stop.checkpoint_due = run.world.is_main and (  # all processes go by one clock
        0 < 60 * config.checkpoint_minutes < time.perf_counter() - run.last_save_time
    )
    at_once = run.train_loader.B * config.sequence_length * run.world.size  # tokens
    loss, norm, skipped = train_step(
        model=run.wrapped_model,
        optimizers=run.optimizers,
        scaler=run.scaler,
        loader=run.train_loader,
        grad_accum_steps=config.total_batch_size // at_once,
        world=run.world,
        stop=run.stop,
        dtype=run.dtype,
        lr=lr,
        grad_clip=config.grad_clip,
        averaging=1 / max(1, config.average_frac * (progress.step + 1)),
        strategy=config.sharding,
        run_part=run.run_part,
    )
    progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if skipped else 0
    return loss.item(), norm.item(), skipped  # waits for the device


def report_step(run: Run, loss: float, norm: float, lr: float, dt: float, skipped: bool) -> None:
    """Prints and records the update that was just made, in dt seconds."""
    config = run.config
    step = run.progress.step
    rate = config.total_batch_size / dt
    line = (
        f"step {step:5d} | loss {loss:.6f} | lr {lr:.4e} | norm {norm:.4f} "
        f"| dt {1000 * dt:.1f}ms | tok/sec {rate:,.0f}"
    )
    more: dict[str, Any] = {}
    if run.total_peak_flops:
        flops = rate * run.model.flops_per_token(config.sequence_length)
        more["mfu"] = flops / run.total_peak_flops
        line += f" | mfu {more['mfu']:.1%}"
    if step == run.first_step:
        run.first_step_ended = time.perf_counter()
    else:
        pace = (time.perf_counter() - run.first_step_ended) / (step - run.first_step)
        line += f" | left {duration(pace * (config.max_steps - step - 1))}"
    if skipped:
        more["skipped"] = "overflow in float16"  # the scaler lowers its scale
        line += f" | no update: {more['skipped']}"
    run.world.say(line)
    run.shortest = min(run.shortest, dt)
    if run.world.size == 1 and dt > 2 * run.shortest and device.is_overloaded(run.world.device):
        say_once(
            "updates take twice as long while other programs use these cores, because threads wait "
            f"for each other: Ctrl-C, then OMP_NUM_THREADS=1 {run.command_to_resume}"
        )
    run.log.record(
        step,
        "train",
        loss=loss if math.isfinite(loss) else None,
        **more,
        lr=lr,
        norm=norm if math.isfinite(norm) else None,
        ms=1000 * dt,
        tokens_per_sec=rate,
        tokens=run.train_loader.cursor * config.sequence_length,
        wall=run.wall(),
        memory=device.peak_memory(run.world.device),
    )


def end_diverged(run: Run, reason: str) -> NoReturn:
    """Records that the run diverged, and raises a UserError with two commands, a line each."""
    step = run.progress.step
    run.log.record(step, "diverged", reason=reason)
    raise UserError(
        f"step {step}: {reason}; last checkpoint: {run.writer.wait() or 'none yet'}",
        f"to find the operation: {run.command_to_resume} --find-nan",
        f"to resume, with a lower --learning-rate or --dtype float32: {run.command_to_resume}",
    )


def save_is_due(run: Run) -> bool:
    """Whether this step gets a checkpoint: by its number, by the clock, or as the best so far."""
    step = run.progress.step
    if step == run.first_step:
        return False
    if run.config.save_best and run.progress.lower:
        return True
    return run.stop.any_checkpoint_due or is_due(step, run.config.checkpoint_every, run.config)


def save_checkpoint(run: Run) -> None:
    """Writes a checkpoint of the updates done so far, then removes those no longer wanted."""
    config = run.config
    progress = run.progress
    broken = divergence.find_not_finite(run.model)
    if run.world.any(bool(broken)):
        end_diverged(run, f"{broken or 'a weight'} has values that are not finite")
    divergence.refuse_other_copies(run.model, run.world, run.command_to_resume)
    progress.wall = run.wall()
    progress.best = progress.lower or progress.best
    state = {
        **asdict(progress),
        "data": run.data_identity,
        "machine": resume.describe_machine(run.world),
        "batch_size": run.train_loader.B,
        "dtype": device.dtype_name(run.dtype),
        "config": config.saved(),
        "model": asdict(run.model.config),
        "scaler": run.scaler.state_dict(),
    }
    card = {
        "data": config.data_dir,
        "steps": progress.step,
        "tokens": f"{progress.cursor * config.sequence_length:,}",
        **{name: f"{loss:.4f}" for name, loss in progress.losses.items()},
        "command": run.command,
    }
    run.log.sync()  # so that a resumed run finds every step up to this one
    with averaged(run.optimizers):
        run.writer.save(run.model, run.optimizers, state, card)
    run.last_save_time = time.perf_counter()


def end_interrupted(run: Run, problem: str) -> None:
    """Saves the last completed update, and says how to resume. Raises UserError for a problem."""
    saved = f"{run.own_path()} is saved"
    if run.progress.step == 0:
        saved = "there is nothing to save before the first update"
    elif run.writer.wait() != run.own_path():
        save_checkpoint(run)
        run.writer.wait()
    if run.world.is_main:
        run.redraw().result()
    saved += f"; resume with: {run.command_to_resume}"
    if problem:
        raise UserError(f"{problem}; {saved}")
    run.world.say(f"interrupted: {saved}")


# -- the command


def train(settled: Settled, args: list[str], began: float) -> None:
    """Trains to the last step, or until a signal or an unreadable shard interrupts it."""
    config, world, data, resumed_from = settled
    if resumed_from:
        resume.announce(config, resumed_from, fields(GPTConfig), world)
        if world.broadcast(resume.is_finished(config, resumed_from)):
            resume.identify_data(data, resumed_from)  # of other data, it is not done
            world.say(f"done: --max-steps is {config.max_steps}, nothing is left to do")
            return
    with explaining_memory(config, config.batch_size if config.minutes else 0):  # to rehearse
        if minutes.is_open(config):
            build = partial(build_run, args=args)
            settled = minutes.fit_schedule(settled, began, build, make_update)
        run = build_run(settled, args)
    try:
        with explaining_memory(run.config, run.train_loader.B):
            run.stop.listen()
            run.log = resume.start_logs(
                run.config, world, resumed_from, run.progress, describe(run)
            )
            loop(run)
            finish(run)
    except Interrupted as end:
        end_interrupted(run, str(end))
    finally:
        run.close()


def describe(run: Run) -> dict[str, Any]:
    """The record of this start in metrics.jsonl, so that every number can be traced."""
    B = run.train_loader.B
    about = report.describe_run(run.config.saved(), run.world, run.dtype, B, run.command)
    about["model"] = asdict(run.model.config)
    about["parameters"] = run.model.num_params()
    about["difference"] = run.model.fingerprint.difference  # from GPT-2
    about["epoch_tokens"] = run.train_loader.epoch_tokens
    if run.world.is_main:
        about["frequencies"] = describe_frequencies(run.train_loader.shards)
    return about


def finish(run: Run) -> None:
    """Writes the report, and says what to do next. The run is complete, whatever fails here."""
    progress = run.progress
    last = run.writer.wait()
    memory = device.peak_memory(run.world.device)
    wall = run.wall()
    run.log.record(progress.step, "end", wall=wall, memory=memory, best=progress.best)
    run.world.say(
        f"done: {progress.step} steps in {duration(wall)}, peak memory {memory / 1e9:.2f} GB"
    )
    if run.world.is_main:
        drawn = Path(run.config.log_dir, "loss.png").exists() and run.redraw().result()
        try:
            report.write_report(run.config.log_dir, drawn)
            say(report.last_words(run.config, last, progress))
        except Exception as error:
            say(f"no report ({first_line(error)}): the run itself is complete")


def find_nan(settled: Settled, args: list[str]) -> None:
    """Repeats the updates since the last checkpoint, and names the operation behind a NaN.

    It writes nothing, and ends one update past the one that failed. Nothing is compiled, because
    compiled code has no operations to name.
    """
    config, world, _, resumed_from = settled
    if resumed_from:
        resume.announce(config, resumed_from, fields(GPTConfig), world)
    with explaining_memory(config):
        run = build_run(settled, args)
    run.scaler = torch.amp.GradScaler(world.device.type, enabled=False)  # its overflows are no NaN
    records = world.broadcast(resume.records_of(config.log_dir))
    failed = [record["step"] for record in records if record["type"] == "diverged"]
    last = min([config.max_steps - 1, *(step + 1 for step in failed[-1:])])
    with explaining_memory(config, run.train_loader.B), divergence.naming_operations(run.model):
        for step in range(run.progress.step, last + 1):
            run.progress.step = step
            loss, norm, _ = make_update(run, learning_rate(step, config))
            world.say(f"step {step:5d} | loss {loss:.6f} | norm {norm:.4f}")
            if reason := divergence.why_stop(loss, norm, skipped_in_a_row=0):
                raise UserError(f"step {step}: {reason}, but every module's output is finite")
    world.say(f"every result was finite up to step {last}: the NaN did not come again")


def evaluate_only(settled: Settled) -> None:
    """Prints the validation loss and HellaSwag score of --init-from's model, as training does."""
    config, world, data, _ = settled
    dtype, _ = start_device(config, world)
    with explaining_memory(config):
        model = build_model(settled, dtype)
        B = config.batch_size or 8  # training's would have to fit a backward pass, too
        evaluations = build_evaluations(config, model, world, Stop(world), dtype, B, data)
    with explaining_memory(config, B), sharding.unsharded(model, config.sharding):
        for name, (_, measure) in evaluations.schedule.items():
            if name != "samples":
                world.say(show(measure(0).get("figures", {})))


def main(args: list[str]) -> None:
    began = time.perf_counter() - time.process_time()  # by the clock: imports only compute
    with settle(args) as settled:
        if settled.config.eval_only:
            evaluate_only(settled)
        elif settled.config.find_nan:
            find_nan(settled, args)
        else:
            train(settled, args, began)


if __name__ == "__main__":
    run_script(main, at_once=under_torchrun())

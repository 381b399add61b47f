"""Trains a GPT-2. The 124M reproduction on one machine of 8 GPUs, or the same on a laptop:

torchrun --standalone --nproc_per_node=8 train_gpt2.py
python train_gpt2.py --preset quickstart
"""

import dataclasses
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

import hellaswag
import sample
from config import TrainConfig, check, parse_command_line
from model import GPT, DataLoaderLite, GPTConfig
from support import checkpoint, ending, hf, plots, report, resume
from support.common import UserError, run_script, say
from support.device import (
    autocast,
    compile_blocks,
    dtype_name,
    eager,
    evaluation_mode,
    keep_freed_memory,
    newest_flash_attention,
    peak_memory,
    pick_dtype,
    seed_everything,
    why_not_compile,
)
from support.distributed import Interrupted, Stop, World
from support.fitting import explain_out_of_memory, fit_batch_size, refuse_too_large
from support.health import explain_nan, judge_update, stop_at_nan, watch_for_nan
from support.log import Log, alone_in
from support.peaks import peak_flops
from support.report import duration
from support.shards import find_shards
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
    """Scales the gradient down to a norm of at most `largest` (0 = any) -> its norm before.

    Each tensor's norm is that of its rows' norms: PyTorch's single float32 sum over the 124M's
    embedding is 0.3% off on a CPU, and by another amount with fsdp.
    """
    params = [p for p in model.parameters() if p.grad is not None]
    rows = [torch.linalg.vector_norm(p.grad, dim=-1) for p in params]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(r) for r in rows]))
    if hasattr(norm, "full_tensor"):  # with fsdp each process holds a part
        norm = norm.full_tensor()
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

    It does not depend on the micro-batch and the number of processes.
    """
    sequences = min(val_tokens // loader.T, loader.num_sequences)
    on = "cpu" if world.device.type == "mps" else world.device  # MPS has no float64
    total = torch.zeros((), dtype=torch.float64, device=on)
    rounds = range(0, sequences, loader.B * world.size)
    hidden = None if world.is_main else True  # None: shown where somebody watches a terminal
    with evaluation_mode(raw):
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
    return (world.sum(total) / sequences).item()


# -- a run


class Run:
    """What the loop works on.

    `raw` is the model as it is saved, scored and sampled, its blocks compiled in place; `model`
    around it averages the gradients of all processes, and is trained.
    """

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
        self.evaluated = False  # whether this step's evaluations are done
        # the lowest validation loss so far at a step with a checkpoint: {"loss", "step"}
        self.best: dict | None = None
        self.losses: dict[str, float] = {}  # the last ones, for the model card
        self.recent: dict[str, list[float]] = {"loss": [], "norm": []}  # for skip_spikes
        self.skipped = ""  # why the last update was not made
        self.skipped_in_a_row = 0
        self.last_saved: Path | None = None

        # The order matters. What is wrong with the data is told before time goes into the model.
        # Only a model that is placed on its device can be compiled for it; the largest micro-batch
        # is found with the compiled model, without the buckets of DDP; and the optimizers need the
        # parameters that wrapping leaves.
        self.find_data(found)
        self.prepare_device(found)
        self.build_model(found)
        self.fit_batch(found)
        self.build_loaders()
        self.build_optimizers()
        self.measure_peak()
        # where the run's clock began; restore moves it back by the time that was spent before
        self.clock_start = time.perf_counter()
        report.print_setup(self)
        if found:
            resume.restore(self, found)
        if world.is_main:
            resume.clear_the_way(self, found)
        self.start_logs(found)
        self.first_step = self.step  # of this process: 0, or the checkpoint's
        self.first_step_ended: float | None = None  # its clock: the first update compiles
        self.last_save_time = time.perf_counter()  # or when the run began

    def find_data(self, found: checkpoint.Found | None) -> None:
        """Raises UserError if a split is missing or damaged, or not what a checkpoint was of."""
        data_dir = Path(self.config.data_dir)
        shards = find_shards(data_dir, "train")
        if found:
            resume.refuse_other_data(data_dir, shards, found)
        if self.config.val_every:
            find_shards(data_dir, "val")

    def prepare_device(self, found: checkpoint.Found | None) -> None:
        """Memory, TF32, determinism, and the dtype to autocast to."""
        keep_freed_memory(self.world.device)
        torch.set_float32_matmul_precision("high")  # TF32 on CUDA; nothing changes on a CPU
        if self.config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS needs for it
            torch.use_deterministic_algorithms(True)
        self.dtype, self.why_dtype = choose_dtype(self.config, self.world, found)

    def build_model(self, found: checkpoint.Found | None) -> None:
        """The model: new, or from a checkpoint or other weights; on its device, compiled."""
        config = self.config
        world = self.world
        self.raw = self.build_raw(found)
        if world.is_main and self.raw.fingerprint.difference:
            self.log.say(hf.describe_change(self.raw.fingerprint))
        world.place(self.raw)

        why_eager = why_not_compile(world.device) if config.compile else "as asked"
        kernels = f"eager: {why_eager}" if why_eager else "compiled"
        if not config.deterministic and (flash := newest_flash_attention(world.device)):
            kernels += f", {flash}"
        precision = f"{dtype_name(self.dtype)} ({self.why_dtype})"
        self.log.say(f"device: {world.device}, {precision}, {kernels}")
        if not why_eager:
            compile_blocks(self.raw, recompute=world.device.type == "cpu")

    def build_raw(self, found: checkpoint.Found | None) -> GPT:
        """The model, on the CPU: from the checkpoint, else from --init-from, else new.

        A flag sets the GPTConfig field of its name. For loaded weights their files decide, except:
        a HARMLESS field is always the flag's; and with --init-from the context is
        --sequence-length, and a field that the files do not have is the flag's.
        """
        config = self.config
        flags: dict[str, Any] = {}
        harmless: dict[str, Any] = {}
        for field in dataclasses.fields(GPTConfig):
            if hasattr(config, field.name):
                flags[field.name] = getattr(config, field.name)
                if field.metadata.get("harmless"):
                    harmless[field.name] = flags[field.name]
        flags["block_size"] = config.sequence_length
        torch.manual_seed(config.seed)
        if found:
            refuse_too_large(found.state["model"])
            raw = GPT.from_pretrained(found.path, **(found.state["model"] | harmless))
            hf.refuse_resume_by_changed_code(found.path, raw.fingerprint)
            return raw
        if config.init_from == "scratch":
            refuse_too_large(flags)
            return GPT(GPTConfig(**flags))
        T = config.sequence_length
        raw = GPT.from_pretrained(config.init_from, flags, block_size=T, **harmless)
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
        self.examples = load_hellaswag(config, world, self.log, self.raw)

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

    def start_logs(self, found: checkpoint.Found | None) -> None:
        """Begins the logs, or goes on with those of the checkpoint's run."""
        about = report.describe_run(self.config, self.world, self.dtype, self.batch_size)
        about["model"] = dataclasses.asdict(self.raw.config)
        about["parameters"] = self.raw.num_params()
        if found:
            self.log.resume(self.step, self.evaluated, about, ours=resume.is_own(self, found))
        else:
            self.log.start(about)

    def wall(self) -> float:
        return time.perf_counter() - self.clock_start

    def due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.config.max_steps)


def choose_dtype(
    config: TrainConfig, world: World, found: checkpoint.Found | None
) -> tuple[torch.dtype, str]:
    """What to autocast to, the same on all processes and after a resume, and why."""
    if config.dtype == "auto" and found:
        return getattr(torch, found.state["dtype"]), "as before"
    return pick_dtype(world.device, config.dtype, world)


def load_hellaswag(
    config: TrainConfig, world: World, log: Log, raw: GPT
) -> hellaswag.Prepared | None:
    """The examples to score; None, with a line that says why, where there are none to be had."""
    if not config.hellaswag_every:
        return None
    try:
        limit = config.hellaswag_limit
        examples = hellaswag.load_examples("val", config.hellaswag_path, limit, world)
    except UserError as error:
        if config.hellaswag_path:
            raise
        log.say(f"hellaswag: off, {error}")
        return None
    return hellaswag.prepare(examples, raw, world.device)


# -- what happens on the way


def evaluate(run: Run) -> None:
    """Validation, HellaSwag and samples, each where it is due at this step.

    Training does not notice: the weights, the loader and the random state stay as they were.
    """
    config = run.config
    validating = run.due(config.val_every)
    scoring = run.examples is not None and run.due(config.hellaswag_every)
    sampling = run.step > 0 and run.due(config.sample_every)
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


# -- the loop


def loop(run: Run) -> None:
    """Evaluate, save, make an update, log it, until all are made."""
    config = run.config
    may_skip = config.skip_spikes > 0 or run.scaler.is_enabled()
    while True:
        if not run.evaluated:
            evaluate(run)
            run.evaluated = True
        if save_is_due(run):
            resume.save_checkpoint(run)
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
            accept=partial(judge_update, run) if may_skip else None,
        )
        loss = loss_on_device.item()  # waits for the device
        norm = norm_on_device.item()
        seconds = time.perf_counter() - start
        stop_at_nan(run, loss, norm)
        report.report_step(run, loss, norm, lr, seconds)
        run.step += 1
        run.cursor = run.train_loader.cursor
        run.evaluated = False
        run.losses["training loss of the last update"] = loss


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
    found = resume.find_checkpoint(config, GPTConfig, world, log)
    if found and found.state["step"] > config.max_steps:
        log.say(f"done: {found.path} is past --max-steps {config.max_steps}, nothing is left to do")
        return
    run: Run | None = None
    try:
        run = Run(config, world, log, found)
        loop(run)
        memory = peak_memory(world.device)
        wall = run.wall()
        run.log.record(run.step, "end", wall=wall, memory=memory)
        took = duration(wall)
        run.log.say(f"done: {config.max_steps} steps in {took}, peak memory {memory / 1e9:.2f} GB")
        if world.is_main:
            ending.finish(config.log_dir)
    except Interrupted:
        if run:
            save_interrupted(run)
    except torch.OutOfMemoryError:
        batch_size = run.batch_size if run else 0
        raise UserError(explain_out_of_memory(batch_size, config)) from None
    finally:
        log.close()


def save_interrupted(run: Run) -> None:
    """Saves the last completed update and says how to go on."""
    go_on = report.command_to_resume()
    if run.step == 0:
        run.log.say(f"interrupted before the first update: nothing to save; start with: {go_on}")
        return
    path = checkpoint.path_of(run.config.log_dir, run.step)
    if path != run.last_saved:
        resume.save_checkpoint(run)
    run.log.say(f"interrupted: {path} is saved; go on with: {go_on}")


# -- the command


def find_nan() -> None:
    """The rerun that is proposed when the loss is not a number: it says where that begins."""
    watch_for_nan(GPT)
    run_script(main)


def main() -> None:
    config = resume.as_restarted(parse_command_line(sys.argv[1:]))
    problems = check(config, int(os.environ.get("WORLD_SIZE", 1)))
    if problems:
        if int(os.environ.get("LOCAL_RANK", 0)):  # one rank of each node says it
            time.sleep(10)  # torchrun ends all ranks with the first that ends
        else:
            print("\n".join(f"train_gpt2.py: {p}" for p in problems), file=sys.stderr)
        sys.exit(2)
    patience = 10.0 if config.resume == "auto" else 0.0  # a requeued job's last one may still save
    with World(config.device, config.sharding) as world, alone_in(config.log_dir, world, patience):
        train(config, world)


if __name__ == "__main__":
    run_script(main)

"""What a run says about itself: the command that started it, what it found, how long it takes."""

import dataclasses
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch

from support.device import device_name, dtype_name, peak_memory
from support.distributed import World


def command(*more: str) -> str:
    """What was typed to start this run, and more flags."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    launcher = "python"
    if size > local:
        launcher = (
            f"torchrun --nnodes={size // local} --nproc_per_node={local} "
            "--rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"
        )
    elif size > 1:
        launcher = f"torchrun --standalone --nproc_per_node={size}"
    return f"{launcher} {shlex.join(['train_gpt2.py', *sys.argv[1:], *more])}"


def command_to_resume() -> str:
    given = [value for flag, value in pairwise(sys.argv) if flag == "--resume"]
    if given[-1:] == ["auto"]:  # the last of a flag counts
        return command()
    return command("--resume", "auto")


def describe_run(config, world: World, dtype: torch.dtype, batch_size: int) -> dict:
    """What the first line of metrics.jsonl holds, so that every number can be traced."""
    git = ""
    if shutil.which("git"):
        asked = ["git", "describe", "--always", "--dirty"]
        here = Path(__file__).parent.parent
        git = subprocess.run(asked, capture_output=True, text=True, cwd=here).stdout.strip()
    return {
        "config": dataclasses.asdict(config),
        "command": command(),
        "git": git,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": {
            "type": world.device.type,
            "name": device_name(world.device),
            "processes": world.size,
            "threads": torch.get_num_threads(),
        },
        "dtype": dtype_name(dtype),
        "batch_size": batch_size,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        # the same for all that one torchrun starts
        "launch": os.environ.get("TORCHELASTIC_RUN_ID", ""),
    }


def print_setup(run) -> None:
    """The facts of a run that a reader of its output will want to have seen."""
    config, world, say = run.config, run.world, run.log.say
    rows = run.raw.config.padded_vocab_size
    say(f"model: {run.raw.num_params():,} parameters (embedding padded to {rows} rows in memory)")
    for optimizer in run.optimizers:
        shared = ""
        if world.sharding in ("zero1", "fsdp"):
            shared = f", state divided over {world.size} processes"
        say(describe_optimizer(optimizer) + shared)
    for name, loader in {"train": run.train_loader, "val": run.val_loader}.items():
        if loader:
            shards = len(loader.shards)
            say(f"{name}: {shards} shard(s), {loader.num_tokens:,} tokens in {config.data_dir}")
    total = config.total_batch_size
    tokens = run.train_loader.num_sequences * config.sequence_length  # of an epoch
    say(
        f"batch: B {run.batch_size} × T {config.sequence_length} "
        f"× accumulation {run.grad_accum_steps} × ranks {world.size} = {total:,} tokens; "
        f"an epoch is {tokens / total:,.1f} steps, the run {config.max_steps:,} steps "
        f"or {config.max_steps * total / tokens:.2f} epochs"
    )
    T = config.sequence_length
    if run.val_loader and config.val_tokens // T > run.val_loader.num_sequences:
        say(f"val: the split is smaller than val_tokens {config.val_tokens:,}: all of it is used")


def report_step(run, loss: float, norm: float, lr: float, seconds: float) -> None:
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


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Its name, how many tensors and parameters it decays and does not, and whether it is fused."""
    parts = []
    for kind, group in zip(("decayed", "other"), optimizer.param_groups, strict=False):
        sizes = [p.numel() for p in group["params"]]
        parts.append(f"{len(sizes)} {kind} tensors with {sum(sizes):,} parameters")
    name = type(getattr(optimizer, "optim", optimizer)).__name__  # zero1 wraps it
    fused = "fused" if optimizer.param_groups[0].get("fused") else "not fused"
    return f"{name}: {', '.join(parts)}, {fused}"


def duration(seconds: float) -> timedelta:
    return timedelta(seconds=round(min(seconds, 1e13)))  # timedelta holds no more

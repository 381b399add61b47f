"""--minutes: sizes from the operations that fit the time, the number of updates from a rehearsal.

The rule itself is in config.py: choose_sizes and choose_recipe.
"""

from __future__ import annotations

import gc
import io
import math
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from support.common import UsageError, UserError, out_of_range
from support.device import dtype_name, peak_flops, pick_dtype
from support.resume import command_line
from support.sharding import unsharded
from support.token_files import find_shards
from support.tokenizer import tokenizer_of_data

if TYPE_CHECKING:
    from config import TrainConfig
    from support.distributed import World

AIM = 0.92  # of the time, because the machine may get busier
# of the speed of matmuls, which training of small models reaches: docs/minutes.md
EFFICIENCY = {torch.float32: 0.6, torch.bfloat16: 0.25, torch.float16: 0.25}
EVALUATING = 0.05  # of the time
START = 20.0  # seconds for imports and compiling
LAUNCHING = 0.02  # seconds that an update takes on a GPU at least, as we assume: docs/minutes.md
LAST = 5.0  # seconds for the last checkpoint, the picture and the report
EPOCHS = 20  # more of them would only memorize the text: docs/minutes.md
REHEARSED = 20  # updates, at most
REHEARSING = 0.05  # of the time, at most, for them
OPEN = {"val": "val_every", "samples": "sample_every"}  # chosen, if they are not typed


def is_open(config: TrainConfig) -> bool:
    """Whether the run's length is to be chosen: not without --minutes, nor on a resume."""
    return config.minutes > 0 and "max_steps" not in config.typed


def fit_sizes(config: TrainConfig, world: World) -> TrainConfig:
    """The settings with sizes for the operations that fit the time. Measures matmuls."""
    if not is_open(config) or not Path(config.data_dir).is_dir() or out_of_range(config):
        return config
    dtype, _ = pick_dtype(world.device, config.dtype, anywhere=world.any)
    peak, _ = peak_flops(world.device, dtype, patience=1)
    seconds = AIM * 60 * config.minutes
    seconds -= min(START, seconds / 2)
    operations = world.broadcast(seconds * EFFICIENCY[dtype] * world.size * peak)
    world.say(f"minutes: about {operations:.1e} operations fit {config.minutes:g} minutes here")
    # in float32, compiled updates are hardly faster, and compiling takes half a minute
    config = config.with_chosen({"compile": dtype != torch.float32 or config.minutes >= 10})
    vocab_size = tokenizer_of_data(config.data_dir).vocab_size
    limits = dict(most_tokens=most_tokens(config.data_dir))
    if world.device.type == "cuda":
        limits["most_updates"] = seconds / LAUNCHING
    config = config.sized_for(operations, vocab_size, world.size, **limits)
    if not config.val_every:
        return config
    longest = max(shard.num_tokens for shard in find_shards(Path(config.data_dir), "val")) - 1
    T = 2 ** int(math.log2(max(1, min(longest, config.sequence_length))))
    return config.with_chosen({"sequence_length": T})  # of which what is held out has one


def most_tokens(data_dir: str) -> float:
    """How many are worth training on: EPOCHS of the text. No limit if it is not there."""
    if not Path(data_dir).is_dir():
        return math.inf
    return EPOCHS * sum(shard.num_tokens for shard in find_shards(Path(data_dir), "train"))


def fit_schedule(
    config: TrainConfig, world: World, began: float, build: Callable, make_update: Callable
) -> TrainConfig:
    """The settings with as many updates as fit, and the recipe for them: by a rehearsal.

    began: when the command did, by the clock. build: makes a run of settings. The rehearsal is
    silent and leaves nothing behind.
    """
    if not is_open(config):
        return config
    with redirect_stdout(io.StringIO()):
        run = build(config)
        until = time.perf_counter() + REHEARSING * 60 * config.minutes
        update, evaluations = rehearse(run, make_update, until)
    found: dict[str, Any] = dict(batch_size=run.train_loader.B, dtype=dtype_name(run.dtype))
    epoch = run.train_loader.epoch_tokens / config.total_batch_size  # updates
    per_parameter = config.total_batch_size / run.model.num_params()  # tokens of an update
    del run
    gc.collect()  # its parts refer to each other, and the next run needs their memory
    torch.cuda.empty_cache()
    spent = time.perf_counter() - began
    left = AIM * 60 * config.minutes - spent - LAST
    steps, times = world.broadcast(divide_time(config, left, update, evaluations))
    if steps < 10:
        raise UserError(
            f"--minutes {config.minutes:g}: no ten updates fit the time, after {spent:.0f} s of "
            f"start-up, at {update:.1f} s each: give more minutes, or type smaller sizes"
        )
    if steps > EPOCHS * epoch:
        steps = max(1, int(EPOCHS * epoch))
        found["save_best"] = config.val_every > 0
        world.say(f"minutes: the text is short: more than {EPOCHS} epochs would only memorize it")
    config = config.scheduled_for(steps, steps / epoch)
    if config.warmup_steps >= steps:
        raise UsageError(f"--warmup-steps {config.warmup_steps}: only {steps} updates fit the time")
    config = config.with_chosen(found | dict.fromkeys(OPEN.values(), math.ceil(steps / times)))
    world.say(
        f"minutes: {steps:,} updates, {1000 * update:.0f} ms each: "
        f"{steps * per_parameter:.2g} tokens per parameter, {steps / epoch:.1f} epochs"
    )
    world.say(f"minutes: the same run again: {as_command(config, world)}")
    return config


def rehearse(run: Any, make_update: Callable, until: float) -> tuple[float, dict[str, tuple]]:
    """Seconds of an update; of each evaluation, and how often it is due. It spoils the run.

    until: when it ends, by the clock, though not before the second update.
    """
    evaluations = {}
    with unsharded(run.model, run.config.sharding):
        for name, (every, measure) in 2 * list(run.evaluations.schedule.items()):
            start = time.perf_counter()
            if every:
                measure(0)
                seconds = time.perf_counter() - start
                evaluations[name] = (seconds, every)  # of the second time: the first compiles
    updates = []
    for n in range(1 + REHEARSED):
        start = time.perf_counter()
        make_update(run, 0.0)
        updates.append(time.perf_counter() - start)
        if n and run.world.broadcast(time.perf_counter() > until):
            break
    run.stop.read_vote()
    return median(updates[1:]), evaluations


def divide_time(
    config: TrainConfig, left: float, update: float, evaluations: dict[str, tuple]
) -> tuple[int, int]:
    """How many updates fit the time that is left, and how many times the OPEN evaluations do.

    update, evaluations: `rehearse`'s. All are due at step 0, too; those not OPEN slow each update.
    """
    left -= sum(seconds for seconds, _ in evaluations.values())
    free = 0.0
    for name, (seconds, every) in evaluations.items():
        if name in OPEN and OPEN[name] not in config.typed:
            free += seconds
        else:
            update += seconds / every
    times = max(2, min(10, int(EVALUATING * left / max(free, 0.01))))
    return int((left - times * free) / update), times


def as_command(config: TrainConfig, world: World) -> str:
    """What repeats a run with these settings, in another log_dir."""
    command = command_line(world.launcher, config.as_flags())
    if world.device.type == "cpu" and world.size == 1:
        command = f"OMP_NUM_THREADS={torch.get_num_threads()} {command}"
    return command

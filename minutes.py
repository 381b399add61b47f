"""--minutes: the rule that chooses sizes, recipe and vocabulary, and the rehearsal that times them.

docs/minutes.md derives the rule and shows what it rests on. torch is imported where it is used,
because fineweb.py asks here for the size of a vocabulary, and starts fast without it.
"""

from __future__ import annotations

import gc
import io
import math
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from statistics import median
from typing import TYPE_CHECKING, Any

from support.base.errors import UsageError, UserError

if TYPE_CHECKING:
    from config import Config, Settled, TrainConfig
    from support.machine.distributed import World
    from support.text.token_files import Data

# n_layer and n_embd: GPT-2's sizes, and smaller ones like them, with heads of 64 channels
LADDER = [(2, 128), (2, 192), (2, 256), (3, 320), (4, 384), (5, 448), (6, 512), (8, 576), (10, 640)]
LADDER += [(12, 768), (16, 896), (24, 1024), (36, 1280), (48, 1600)]

TIME_TO_USE = 0.92  # of the time, because the machine may get busier
# of the speed of matmuls, which training of small models reaches
EFFICIENCY = {"float32": 0.6, "bfloat16": 0.25, "float16": 0.25}
STARTING = 20.0  # seconds for imports and compiling
ENDING = 5.0  # seconds for the last checkpoint, the picture and the report
EVALUATING = 0.05  # of the time
LAUNCHING = 0.02  # seconds that an update takes on a GPU at least, as we assume
MOST_EPOCHS = 20  # more of them would only memorize the text
MOST_REHEARSED = 20  # updates
REHEARSING = 0.05  # of the time, at most, for them
TIMED_FLAGS = {"val": "val_every", "samples": "sample_every"}  # chosen, if they are not typed


# -- the rule


def choose_shape(operations: float, vocab_size: int, typed: dict) -> tuple[dict[str, int], int]:
    """The sizes of the model for so many operations of training -> and the operations per token.

    typed: settings that the user has fixed; the others fit around them.
    """
    wanted = math.log(100e6) + 0.375 * math.log(operations / 8.5e18)  # parameters in the blocks
    shapes = {(typed.get("n_layer", L), typed.get("n_embd", C)) for L, C in LADDER}
    parameters = {(L, C): 12 * L * C**2 for L, C in shapes}
    fitting = [shape for shape in shapes if shape[1] % typed.get("n_head", 1) == 0] or shapes
    n_layer, C = min(fitting, key=lambda shape: abs(math.log(parameters[shape]) - wanted))
    n_head = max(h for h in range(1, 1 + max(1, C // 64)) if C % h == 0)
    T = 2 ** round(min(10, max(7, math.log2(128 * (operations / 3e13) ** 0.2))))
    T = typed.get("sequence_length", T)
    operations_per_token = 6 * (parameters[n_layer, C] + vocab_size * C) + 12 * n_layer * C * T
    shape = dict(n_layer=n_layer, n_embd=C, n_head=n_head, sequence_length=T)
    return shape, operations_per_token


def choose_sizes(
    operations: float,
    vocab_size: int,
    typed: dict,
    most_tokens: float = math.inf,
    most_updates: float = math.inf,
) -> dict[str, int]:
    """The sizes of model and batch with the lowest loss after so many operations of training.

    typed: as in choose_shape. most_tokens: of the text; then fewer operations are executed.

    >>> choose_sizes(2.9e13, 1024, {})
    {'n_layer': 2, 'n_embd': 192, 'n_head': 3, 'sequence_length': 128, 'total_batch_size': 2048, \
'val_tokens': 65536}
    >>> choose_sizes(8.5e18, 50257, {})["total_batch_size"]
    524288
    """
    shape, per_token = choose_shape(operations, vocab_size, typed)
    while operations / per_token > 1.000001 * most_tokens:  # a smaller model may need fewer
        operations = most_tokens * per_token
        shape, per_token = choose_shape(operations, vocab_size, typed)
    tokens = operations / per_token
    return dict(
        **shape,
        total_batch_size=max(2048, 2 ** round(math.log2(tokens / min(19073, most_updates)))),
        # ten times these take a twentieth of the time
        val_tokens=int(min(10485760, max(2**16, 0.015 * tokens))),
    )


def choose_recipe(
    max_steps: int, epochs: float, n_embd: int, per_token: float, typed: dict
) -> dict[str, Any]:
    """The recipe with the lowest loss after so many updates, which read the text `epochs` times.

    per_token: the blocks' parameters for each token of the text. Fewer memorize less of it.

    >>> recipe = choose_recipe(1200, 6.0, 256, 4.0, {})
    >>> recipe["learning_rate"], recipe["weight_decay"], recipe["warmup_steps"]
    (0.006, 1.01, 40)
    """
    optimizer = typed.get("optimizer", "muon")
    share = 1 if optimizer == "muon" else 4  # AdamW takes a quarter of the rate
    rate = min(1e-2, 6e-3 * (256 / n_embd) * (1200 / max_steps) ** 0.3) / share
    rate = typed.get("learning_rate", rate)
    # the part of a weight that an update takes at this rate: docs/minutes.md
    per_epoch = min(0.6, 0.08 * epochs) * per_token ** (2 / 3)
    fading = min(0.01, per_epoch * epochs / max_steps)
    return dict(
        max_steps=max_steps,
        warmup_steps=min(max_steps // 30, 100),
        learning_rate=float(f"{rate:.2g}"),
        weight_decay=round(max(0.1, fading / rate / share), 2),
        optimizer=optimizer,
        embedding_lr=4.0 if optimizer == "muon" else 1.0,
        decay="linear",
        min_lr_frac=0.0,
        average_frac=0.08,
    )


def choose_vocab_size(num_bytes: float) -> int:
    """How many tokens a vocabulary for a text of so many bytes gets.

    >>> [choose_vocab_size(megabytes * 10**6) for megabytes in (1, 10, 100)]
    [1024, 4096, 16384]
    """
    wanted = 10 + 0.6 * math.log2(max(1, num_bytes) / 1e6)
    return 2 ** round(min(14, max(9, wanted)))


def with_sizes(
    config: Config, operations: float, vocab_size: int, processes: int, **limits: float
) -> Config:
    """The settings with sizes for so many operations, and a recipe. limits: choose_sizes'."""
    typed = config.typed_settings()
    chosen: dict[str, Any] = choose_sizes(operations, vocab_size, typed, **limits)
    at_once = processes * max(1, typed.get("batch_size", 0)) * chosen["sequence_length"]
    chosen["total_batch_size"] = at_once * math.ceil(chosen["total_batch_size"] / at_once)
    # HellaSwag needs a network, and small models only guess
    chosen |= dict(hellaswag_every=0, checkpoint_minutes=5.0, batch_size=0)
    # a recipe for the rehearsal, which finds the number of updates
    return with_recipe(config.with_chosen(chosen), config.max_steps, epochs=1)


def with_recipe(config: Config, max_steps: int, epochs: float, **more: Any) -> Config:
    """The settings with the recipe for so many updates, and `more` that is chosen."""
    per_token = 12 * config.n_layer * config.n_embd**2 * epochs / max_steps
    per_token /= config.total_batch_size
    typed = config.typed_settings()
    recipe = choose_recipe(max_steps, epochs, config.n_embd, per_token, typed)
    return config.with_chosen(recipe | more)


# -- a start with --minutes: sizes from the speed of matmuls, then the updates from a rehearsal


def is_open(config: TrainConfig) -> bool:
    """Whether the run's length is to be chosen: not without --minutes, nor on a resume."""
    return config.minutes > 0 and "max_steps" not in config.typed


def fit_sizes(config: TrainConfig, world: World, data: Data) -> TrainConfig:
    """The settings with sizes for the operations that fit the time. Measures matmuls."""
    from support.machine.device import dtype_name, peak_flops, pick_dtype

    dtype, _ = pick_dtype(world.device, config.dtype, anywhere=world.any)
    peak, _ = peak_flops(world.device, dtype, patience=1)
    seconds = TIME_TO_USE * 60 * config.minutes
    seconds -= min(STARTING, seconds / 2)
    operations = world.broadcast(seconds * EFFICIENCY[dtype_name(dtype)] * world.size * peak)
    world.say(f"minutes: about {operations:.1e} operations fit {config.minutes:g} minutes here")
    # in float32, compiled updates are hardly faster, and compiling takes half a minute
    is_fast = dtype_name(dtype) != "float32"
    config = config.with_chosen({"compile": is_fast or config.minutes >= 10})
    limits: dict[str, float] = dict(most_tokens=MOST_EPOCHS * data.num_tokens("train"))
    if world.device.type == "cuda":
        limits["most_updates"] = seconds / LAUNCHING
    config = with_sizes(config, operations, data.tokenizer.vocab_size, world.size, **limits)
    if not config.val_every:
        return config
    longest = max(shard.num_tokens for shard in data.shards["val"]) - 1
    T = 2 ** int(math.log2(max(1, min(longest, config.sequence_length))))
    return config.with_chosen({"sequence_length": T})  # of which what is held out has one


def fit_schedule(settled: Settled, began: float, build: Callable, make_update: Callable) -> Settled:
    """What is settled, with as many updates as fit, and the recipe for them: by a rehearsal.

    began: when the command did, by the clock. build: makes a run of what is settled. The rehearsal
    is silent and leaves nothing behind.
    """
    import torch

    from support.machine.device import dtype_name

    config, world, *_ = settled
    with redirect_stdout(io.StringIO()):
        run = build(settled)
        until = time.perf_counter() + REHEARSING * 60 * config.minutes
        update, evaluations = rehearse(run, make_update, until)
    found: dict[str, Any] = dict(batch_size=run.train_loader.B, dtype=dtype_name(run.dtype))
    epoch = run.train_loader.epoch_tokens / config.total_batch_size  # updates
    per_parameter = config.total_batch_size / run.model.num_params()  # tokens of an update
    run.close()
    del run
    gc.collect()  # its parts refer to each other, and the next run needs their memory
    torch.cuda.empty_cache()
    spent = time.perf_counter() - began
    left = TIME_TO_USE * 60 * config.minutes - spent - ENDING
    steps, times = world.broadcast(divide_time(config, left, update, evaluations))
    if steps < 10:
        measuring = sum(seconds for seconds, _ in evaluations.values())
        raise UserError(
            f"--minutes {config.minutes:g}: no ten updates fit the time, after {spent:.0f} s of "
            f"start-up, at {update:.1f} s each and {measuring:.1f} s for a round of evaluations: "
            "give more minutes, or type smaller sizes"
        )
    if steps > MOST_EPOCHS * epoch:
        steps = max(1, int(MOST_EPOCHS * epoch))
        found["save_best"] = config.val_every > 0
        world.say(
            f"minutes: the text is short: more than {MOST_EPOCHS} epochs would only memorize it"
        )
    found |= dict.fromkeys(TIMED_FLAGS.values(), math.ceil(steps / times))
    found["typed"] = config.typed | {"max_steps"}  # nothing is left to choose
    config = with_recipe(config, steps, steps / epoch, **found)
    if config.warmup_steps >= steps:
        raise UsageError(f"--warmup-steps {config.warmup_steps}: only {steps} updates fit the time")
    world.say(
        f"minutes: {steps:,} updates, {1000 * update:.0f} ms each: "
        f"{steps * per_parameter:.2g} tokens per parameter, {steps / epoch:.1f} epochs"
    )
    world.say(f"minutes: the same run again: {as_command(config, world)}")
    return settled._replace(config=config)


def rehearse(run: Any, make_update: Callable, until: float) -> tuple[float, dict[str, tuple]]:
    """Seconds of an update; of each evaluation, and how often it is due. It spoils the run.

    until: when it ends, by the clock, though not before an update that is like those to come.
    """
    from support.machine.graphs import UNRECORDED, run_eagerly
    from support.machine.sharding import unsharded

    evaluations = {}
    short, times = run.evaluations.shortened()
    with unsharded(run.model, run.config.sharding):
        for name, (every, measure) in 2 * list(short.schedule.items()):
            start = time.perf_counter()
            if every:
                measure(0)
                seconds = times.get(name, 1) * (time.perf_counter() - start)
                evaluations[name] = (seconds, every)  # of the second time: the first compiles
    updates = []
    first = 1 if run.run_part is run_eagerly else 1 + UNRECORDED  # which is like those to come
    for n in range(first + MOST_REHEARSED):
        start = time.perf_counter()
        make_update(run, 0.0)
        updates.append(time.perf_counter() - start)
        if n >= first and run.world.broadcast(time.perf_counter() > until):
            break
    run.stop.read_vote()
    return median(updates[first:]), evaluations


def divide_time(
    config: TrainConfig, left: float, update: float, evaluations: dict[str, tuple]
) -> tuple[int, int]:
    """How many updates fit the time that is left, and how many times those of TIMED_FLAGS.

    update, evaluations: `rehearse`'s. All are due at step 0, too; the others slow each update.
    """
    left -= sum(seconds for seconds, _ in evaluations.values())
    free = 0.0
    for name, (seconds, every) in evaluations.items():
        if name in TIMED_FLAGS and TIMED_FLAGS[name] not in config.typed:
            free += seconds
        else:
            update += seconds / every
    times = max(2, min(10, int(EVALUATING * left / max(free, 0.01))))
    return int((left - times * free) / update), times


def as_command(config: TrainConfig, world: World) -> str:
    """What repeats a run with these settings, in another log_dir."""
    import torch

    command = world.command(config.as_flags())
    if world.device.type == "cpu" and world.size == 1:
        command = f"OMP_NUM_THREADS={torch.get_num_threads()} {command}"
    return command

"""Going on where a run stopped: from which checkpoint, whether it fits, and what it restores.

`run` is train_gpt2.Run, `config` its TrainConfig.
"""

import dataclasses
import os
import time
from pathlib import Path

from support import checkpoint
from support.common import UserError
from support.device import dtype_name
from support.distributed import World
from support.log import Log
from support.optimizer_state import load_optimizers
from support.records import read_metrics, starts_of
from support.report import command
from support.shards import Shard, identify

# What of a run's attributes a checkpoint keeps as they are.
PROGRESS = ("step", "evaluated", "cursor", "best", "losses", "recent", "skipped_in_a_row")

# Settings that a resumed run may change without being told as "other settings than before".
SILENT = {"preset", "resume", "overwrite", "log_dir", "init_from", "batch_size"}
SILENT |= {"sharding", "keep_checkpoints", "checkpoint_minutes", "save_best"}


def as_restarted(config):
    """The configuration after torchrun has started all processes again because one died.

    They go on from what this very run has saved, not from a run that it was to overwrite.
    """
    metrics = Path(config.log_dir) / "metrics.jsonl"
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if not restarts or not metrics.exists():
        return config
    starts = starts_of(read_metrics(metrics))
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "")
    has_begun = bool(starts) and starts[-1].get("launch") == launch
    if not has_begun:
        return config
    if config.resume == "none" or checkpoint.checkpoints(config.log_dir):
        return dataclasses.replace(config, resume="auto", overwrite=False)
    return dataclasses.replace(config, overwrite=True)  # the same start, in its own log_dir


# -- before anything is built


def find_checkpoint(config, model_config: type, world: World, log: Log) -> checkpoint.Found | None:
    """The checkpoint to go on from; None to begin.

    model_config: the class GPTConfig. Raises UserError if the checkpoint is of another model.
    """
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
    refuse_other_model(config, model_config, found)
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


def refuse_other_model(config, model_config: type, found: checkpoint.Found) -> None:
    """Raises UserError if a checkpoint's model or optimizer is not the one of this command.

    A field that the checkpoint does not know yet had its default.
    """
    then = dataclasses.asdict(type(config)()) | found.state["config"]
    fields = dataclasses.fields(model_config)
    fixed = [field.name for field in fields if not field.metadata.get("harmless")]
    changed = []
    for name in (*fixed, "sequence_length", "optimizer"):
        now = getattr(config, name, None)
        if now is not None and now != then[name]:
            changed.append(f"{name} {then[name]} -> {now}")
    unknown = set(found.state["model"]) - {field.name for field in fields}
    changed += [f"{name}, which this program does not know" for name in sorted(unknown)]
    if changed:
        raise UserError(
            f"{found.path} cannot be resumed with another {', '.join(changed)}: "
            f"use its values, or --init-from {found.path}"
        )


# -- when everything is built


def restore(run, found: checkpoint.Found) -> None:
    """Puts a run where a checkpoint left it."""
    state = found.state
    flags = options_of(run.optimizers)
    load_optimizers(run.raw, run.optimizers, state, run.world)
    for group, options in zip(groups_of(run.optimizers), flags, strict=True):
        group.update(options)  # loading brought the old weight decay and betas; the flags decide
    if state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    run.train_loader.load_state_dict({"cursor": state["cursor"]})
    for name in PROGRESS:
        if name in state:  # one that is newer than the checkpoint keeps its beginning
            setattr(run, name, state[name])
    if not is_own(run, found):
        run.best = None  # its checkpoint is not in this log_dir
    run.clock_start = time.perf_counter() - state["wall"]
    run.last_saved = found.path
    del state["optimizer"]  # its file need not stay mapped


def options_of(optimizers: list) -> list[dict]:
    """The options (lr, weight_decay, …) of each group of parameters."""
    return [
        {name: x for name, x in group.items() if name != "params"}
        for group in groups_of(optimizers)
    ]


def groups_of(optimizers: list) -> list[dict]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def refuse_other_data(data_dir: Path, shards: list[Shard], found: checkpoint.Found) -> None:
    """Raises UserError if the shards are not those that the run has begun with."""
    now = identify(shards)
    then = found.state["data"]
    other = sorted(name for name in now | then if now.get(name) != then.get(name))
    if other:
        raise UserError(
            f"{data_dir} has other shards than when {found.path} was written "
            f"({other[0]} and {len(other) - 1} more differ): put the shards back, or start a new "
            f"run from its weights with --init-from {found.path}"
        )


def clear_the_way(run, found: checkpoint.Found | None) -> None:
    """Renames damaged checkpoints, and those of a run that is given up; --overwrite removes."""
    for path in found.damaged if found else []:
        checkpoint.set_aside(path, "damaged")
    own = is_own(run, found)
    for path in checkpoint.checkpoints(run.config.log_dir):
        if run.config.overwrite and not own:
            checkpoint.remove(path)
        elif not own or checkpoint.step_of(path) > run.step:
            checkpoint.set_aside(path, "abandoned")


def is_own(run, found: checkpoint.Found | None) -> bool:
    """Whether a checkpoint is of the run in log_dir, and not of one elsewhere."""
    return found is not None and found.path.resolve().parent == Path(run.config.log_dir).resolve()


# -- for the next time


def save_checkpoint(run) -> Path:
    """Writes a checkpoint of the updates done so far, then removes those no longer wanted."""
    config = run.config
    state = {name: getattr(run, name) for name in PROGRESS}
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

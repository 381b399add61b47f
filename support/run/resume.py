"""Resuming: what two starts of a run may differ in; finding, refusing, restoring a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from support.base.errors import UsageError, UserError, reading, writing
from support.base.files import lies_in
from support.base.flags import drop_flags
from support.base.process import revision
from support.machine.device import device_name
from support.run import checkpoint
from support.run.checkpoint import Checkpoint, Progress
from support.run.log import (
    EVENTS,
    METRICS,
    PAGES,
    Log,
    open_log,
    open_tracker,
    read_metrics,
    records_before,
    starts_of,
)
from support.text.names import MANIFEST
from support.text.token_files import identify
from support.weights.hf import new_run_from

if TYPE_CHECKING:
    from config import TrainConfig
    from model import GPT, DataLoaderLite
    from support.machine.distributed import World
    from support.text.token_files import Data

# A resumed run may change these without a word.
SILENT = {"preset", "resume", "overwrite", "log_dir", "init_from", "device", "find_nan"}
SILENT |= {"keep_checkpoints", "checkpoint_minutes", "save_best", "minutes"}

# What a change means, where its name does not say it
REORDERED = " (the rest of this epoch has another order: some sequences repeat, others are missed)"
MEANINGS = {"seed": REORDERED, "shuffle": REORDERED}
MEANINGS["val_tokens"] = " (validation losses are not comparable with those before)"
MEANINGS["hellaswag_limit"] = " (scores are not comparable with those before)"


def args_to_resume(args: list[str]) -> list[str]:
    """The arguments that resume the run that these began."""
    return [*drop_flags(args, "--resume", "--overwrite"), "--resume", "auto"]


# -- which settings, which checkpoint


def has_begun(log_dir: str, launches: list[str]) -> bool:
    """Whether torchrun has restarted the processes of the run in log_dir, which had begun.

    It has begun when its start is in metrics.jsonl. Older checkpoints are out of the way before
    that. launches: World's.
    """
    starts = starts_of(records_of(log_dir)) if launches else []
    return bool(starts and set(launches) & set(starts[-1]["launch"]))


def kept_settings(config: TrainConfig, processes: int) -> dict[str, Any]:
    """The settings that a resumed run keeps from its last start, unless they are typed again.

    If its log is there, it stays deterministic. With --minutes, it keeps all that its start chose;
    one that was killed before it chose has left no record, and chooses again.
    """
    if config.resume == "none":
        return {}
    folder = Path(config.resume)
    if config.resume == "auto":
        folder = Path(config.log_dir)
    elif not checkpoint.checkpoints(folder):
        folder = folder.resolve().parent
    starts = starts_of(records_of(folder))
    before = starts[-1]["config"] if starts else {}
    if not config.minutes:
        return {"deterministic": before.get("deterministic", config.deterministic)}
    if not starts:
        if any(path.exists() for path in candidates_for(config)):
            problem = f"{folder} has no metrics.jsonl, which says what was chosen"
            raise UsageError(f"--minutes: {problem}: type the flags of that run instead")
        return {}
    if before.get("minutes") != config.minutes:
        raise UsageError(
            f"--minutes {config.minutes:.12g}: the run in {folder} was started with --minutes "
            f"{before.get('minutes', 0):.12g}, which cannot change: type that, or start a new run "
            "in another --log-dir, without --resume"
        )
    own = ("log_dir", "resume", "overwrite", "find_nan", "eval_only", "init_from")
    known = {field.name for field in dataclasses.fields(config)}
    kept = {name: before[name] for name in before if name in known and name not in own}
    sizes = kept | config.typed_settings()
    share = sizes["total_batch_size"] // max(1, sizes["sequence_length"]) // processes
    if kept["batch_size"] and share % kept["batch_size"]:
        kept["batch_size"] = 0  # on more processes, another one must fit
    return kept | {"typed": config.typed | {"max_steps"}}  # nothing is left to choose


def records_of(log_dir: str | Path) -> list[dict[str, Any]]:
    """The records of the run in log_dir but for its updates; none if there is no run."""
    with reading(log_dir):
        return read_metrics(Path(log_dir, METRICS), updates=False)


def find_checkpoint(config: TrainConfig, world: World) -> Checkpoint | None:
    """The checkpoint to resume from; None for a new run. Raises UserError if none is whole."""
    if config.resume == "none":
        return None
    found = checkpoint.find(candidates_for(config), world)
    if found:
        return found
    with world.fail_together():
        if world.is_main and any(n >= config.max_steps for n in ends_of(config.log_dir)):
            raise UserError(  # its log would be lost without need
                f"{config.log_dir} holds a finished run without checkpoints: to train it "
                "again, --overwrite instead of --resume auto"
            )
    world.say(f"resume: no checkpoint in {config.log_dir} yet, starting from the beginning")
    return None


def announce(
    config: TrainConfig,
    resumed_from: Checkpoint,
    model_fields: tuple[dataclasses.Field, ...],
    world: World,
) -> None:
    """Says what is resumed, and what differs from before.

    model_fields: those of GPTConfig. Raises UserError if the model or the optimizer is another one.
    """
    state = resumed_from.state
    changed = compare_settings(config, resumed_from, model_fields)
    world.say(
        f"resuming from {resumed_from.path}: {state['step']} updates, {state['cursor']:,} sequences"
    )
    if changed:
        world.say(f"  with other settings than before: {', '.join(changed)}")
    then = state["machine"]
    here = describe_machine(world)
    moved = [f"{key} {then[key]} -> {here[key]}" for key in here if then[key] != here[key]]
    if moved:
        world.say(f"  so its last bits may differ from the uninterrupted run's: {', '.join(moved)}")


def candidates_for(config: TrainConfig) -> list[Path]:
    """The checkpoints that --resume means, the preferred one first.

    auto means those of log_dir, and another log_dir its own, from the newest on. If there is none
    yet, auto means the checkpoint from elsewhere that the run in log_dir began with.
    """
    if config.resume == "auto":
        if own := checkpoint.checkpoints(config.log_dir)[::-1]:
            return own
        starts = starts_of(records_of(config.log_dir))
        elsewhere = starts[-1].get("resumed_from") if starts else None
        return [Path(elsewhere)] if elsewhere else []
    path = Path(config.resume)
    if lies_in(path, config.log_dir):  # the run's own, however it was typed
        path = Path(config.log_dir, path.resolve().relative_to(Path(config.log_dir).resolve()))
        if "_ckpt_" in path.name:  # abandoned_ckpt_…
            raise UsageError(
                f"--resume {config.resume}: the run has gone on without it, so choose another "
                "--log-dir for a run that goes on from there"
            )
    own = checkpoint.checkpoints(path)[::-1]
    is_named = checkpoint.NAME.fullmatch(path.name)  # so if it is damaged, `find` says how
    is_known = is_named and (path.is_dir() or checkpoint.checkpoints(path.parent))
    if not (own or is_known or (path / checkpoint.STATE).exists()):
        raise UsageError(f"--resume {config.resume}: no checkpoint is there")
    return own or [path]


def is_finished(config: TrainConfig, resumed_from: Checkpoint) -> bool:
    """Whether nothing is left to do."""
    step = resumed_from.state["step"]
    if step == config.max_steps and is_own(config, resumed_from):
        return step in ends_of(config.log_dir)
    return step > config.max_steps


def ends_of(log_dir: str) -> list[int]:
    """The last update of the run in log_dir, if it has reached it."""
    return [record["step"] for record in records_of(log_dir)[-1:] if record["type"] == "end"]


def is_own(config: TrainConfig, resumed_from: Checkpoint | None) -> bool:
    """Whether there is a checkpoint, in log_dir and not from elsewhere."""
    return resumed_from is not None and resumed_from.path.parent == Path(config.log_dir)


# -- what may differ


def compare_settings(
    config: TrainConfig, resumed_from: Checkpoint, model_fields: tuple[dataclasses.Field, ...]
) -> list[str]:
    """The settings that have changed since a checkpoint, as "name then -> now".

    model_fields: those of GPTConfig. Raises UserError if the model or the optimizer differs.
    """
    state = resumed_from.state
    then = type(config)().saved() | state["config"]  # a newer field: its default
    now = config.saved()
    for name in config.typed & now.keys() & state["model"].keys():  # --init-from has its own sizes
        then[name] = state["model"][name]
    for name in ("dtype", "batch_size"):  # auto and 0 keep what they have found
        then[name] = state[name]
        now[name] = then[name] if now[name] in ("auto", 0) else now[name]
    changed = {
        name: f"{name} {then[name]} -> {now[name]}{MEANINGS.get(name, '')}"
        for name in now
        if then[name] != now[name]
    }
    fixed = ["sequence_length", "optimizer"]
    if not now["average_frac"]:  # averages may begin, but not end
        fixed.append("average_frac")
    fixed += [field.name for field in model_fields if "same_math" not in field.metadata]
    refused = [changed[name] for name in fixed if name in changed]
    unknown = set(state["model"]) - {field.name for field in model_fields}
    refused += [f"{name}, which this code does not know" for name in sorted(unknown)]
    if refused:
        advice = "use the code that wrote it" if unknown else "use its values"
        if then["minutes"] and not now["minutes"]:
            advice = f"it began with --minutes {then['minutes']:g}, type that again"
        raise UserError(
            f"{resumed_from.path} cannot be resumed with another {', '.join(refused)}: "
            f"{advice}, or, if it is the same model, {new_run_from(resumed_from.path)}"
        )
    words = [changed[name] for name in changed if name not in SILENT]
    # PyTorch's default, which Muon had here until November 2026
    if any(group.get("ns_steps") == 5 for group in state["optimizer"]["param_groups"]):
        words.append("Muon's c_attn one matrix -> each head's queries, keys and values apart")
    return words


def describe_machine(world: World) -> dict[str, Any]:
    """What else decides the last bits of a loss, besides the settings."""
    return {
        "code": revision(),
        "device": device_name(world.device),
        "processes": world.size,
        "threads": torch.get_num_threads() if world.device.type == "cpu" else "any",
        "torch": str(torch.__version__),
    }


def identify_data(data: Data, resumed_from: Checkpoint | None) -> dict[str, dict]:
    """What a checkpoint keeps of the data: {split: `identify` of its shards}.

    Raises UserError if they are not those that the run was trained on.
    """
    now = {split: identify(shards) for split, shards in data.shards.items()}
    if resumed_from is None:
        return now
    then = resumed_from.state["data"]
    for split in now:
        before = then.get(split, now[split])
        refuse_other_shards(data.folder, before, now[split], resumed_from.path)
    return then | now  # without validation, what was recorded of its split is kept


def refuse_other_shards(data_dir: Path, before: dict, now: dict, path: Path) -> None:
    """Raises UserError, which says what to put back or take away, if the shards have changed."""
    missing = sorted(before.keys() - now.keys())
    added = sorted(now.keys() - before.keys())
    changed = sorted(name for name in now.keys() & before.keys() if now[name] != before[name])
    if missing or added or changed:
        advice = "move the new shards away"
        if missing or changed or (data_dir / MANIFEST).exists():
            advice = "put the shards back as they were"
        raise UserError(
            f"{data_dir} has other shards than when {path} was written (missing: {missing[:3]}, "
            f"changed: {changed[:3]}, new: {added[:3]}): {advice}; or train a new model in another "
            f"--log-dir; or, if the vocabulary is the same, {new_run_from(path)}"
        )


# -- restoring and beginning


def restore(
    config: TrainConfig,
    resumed_from: Checkpoint | None,
    model: GPT,
    optimizers: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    loader: DataLoaderLite,
) -> Progress:
    """Puts a run's parts where the checkpoint left them, if there is one -> how far it had come."""
    if resumed_from is None:
        return Progress()
    state = resumed_from.state
    # popped, because the run keeps its checkpoint, and these states are larger than the weights
    checkpoint.load_optimizers(model, optimizers, state.pop("optimizer"))
    if state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    loader.load_state_dict(state)
    progress = Progress(**{f.name: state[f.name] for f in dataclasses.fields(Progress)})
    if progress.step == config.max_steps != state["config"]["max_steps"]:
        progress.evaluated = False  # it has become the last step, at which all evaluations are due
    if best := progress.best:
        is_there = checkpoint.path_of(config.log_dir, best["step"]).exists()
        if not is_there or not is_own(config, resumed_from):
            progress.best = None  # its checkpoint is gone, or not in this log_dir
        else:  # older ones do not say on how much of the text
            progress.best = {"val_tokens": state["config"]["val_tokens"], **best}
    return progress


def clear_the_way(config: TrainConfig, resumed_from: Checkpoint | None) -> None:
    """Renames damaged and later checkpoints; --overwrite removes those of the old run."""
    log_dir = Path(config.log_dir)
    checkpoint.remove_leftovers(log_dir)
    own = is_own(config, resumed_from)
    for path in resumed_from.damaged if resumed_from and own else []:
        checkpoint.set_aside(path, "damaged")
    newest = resumed_from.state["step"] if resumed_from and own else -1
    for path in checkpoint.checkpoints(log_dir):
        if config.overwrite and not own and (path / checkpoint.STATE).exists():
            checkpoint.remove(path)
        elif checkpoint.step_of(path) > newest:
            checkpoint.set_aside(path, "abandoned")
    if not own:
        for name in PAGES:
            (log_dir / name).unlink(missing_ok=True)


def start_logs(
    config: TrainConfig,
    world: World,
    resumed_from: Checkpoint | None,
    progress: Progress,
    about: dict[str, Any],
) -> Log:
    """Begins the logs, or continues those of the checkpoint's run. Only rank 0's write."""
    if not world.is_main:
        return Log()
    log_dir = Path(config.log_dir)
    step = resumed_from.state["step"] if resumed_from else 0
    # before the old run is cleared away: this may fail
    own = is_own(config, resumed_from)
    starts = starts_of(records_of(log_dir)) if own else []
    began = [*starts, about][0].get("time", "")
    tracker = open_tracker(config.tracker, log_dir, about, step, began)
    with writing(log_dir):
        clear_the_way(config, resumed_from)
    if resumed_from is None:
        return open_log(log_dir, [{"type": "run", **about}], tracker)
    kept: Iterable[dict] = []
    if own:
        kept = records_before(log_dir, step, progress.evaluated)
    else:
        about = about | {"resumed_from": str(resumed_from.path.resolve())}
    log = open_log(log_dir, chain(kept, [{"type": "resume", "step": step, **about}]), tracker)
    for record in records_of(log_dir) if tracker else []:  # TensorBoard lost those of this step
        if record.get("step") == step and record["type"] not in EVENTS:
            log.track(**record)
    return log

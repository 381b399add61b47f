"""A checkpoint: a complete Hugging Face GPT-2, with `training_state.pt` beside the weights.

It is written under another name and renamed when everything is on the disk, so a directory called
ckpt_* is whole.
"""

import re
import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from support import hf
from support.common import UserError, sync
from support.distributed import World

NAME = re.compile(r"ckpt_(\d{6,})")
STATE = "training_state.pt"
VERSION = 1  # of the training state; raised when an older program could not go on from a newer one
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
EMBEDDING = "transformer.wte.weight"


def path_of(log_dir: str | Path, step: int) -> Path:
    return Path(log_dir) / f"ckpt_{step:06d}"


# -- writing


def save(
    log_dir: str | Path,
    *,
    model,
    optimizers: list[torch.optim.Optimizer],
    state: dict,
    world: World,
    card: dict | None = None,
) -> Path:
    """Writes log_dir/ckpt_{step:06d} -> its path.

    model: a GPT before wrapping. state: plain values; it has `step`. Every rank calls it; rank 0
    writes, whatever the sharding the same. A directory of that name is replaced, and is never
    missing a file in between.
    """
    final = path_of(log_dir, state["step"])
    if world.sharding == "fsdp":
        weights = get_model_state_dict(model, options=FULL)
    else:
        weights = model.state_dict()
    optimizer_state = gather_optimizers(model, optimizers, world)
    if world.is_main:
        for leftover in final.parent.glob(".ckpt_*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        beside = final.with_name(f".{final.name}.tmp")
        model.save_pretrained(beside, weights, card)
        optimizer_state = resize_embedding(optimizer_state, model.config.vocab_size)
        torch.save({**state, "version": VERSION, "optimizer": optimizer_state}, beside / STATE)
        for file in (*beside.iterdir(), beside):
            sync(file)
        old = final.with_name(f".{final.name}.old")
        if final.exists():
            final.rename(old)
        beside.rename(final)
        sync(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    world.barrier()
    return final


def gather_optimizers(model, optimizers: list, world: World) -> dict:
    """The state of all optimizers in one dictionary by parameter names, whole on rank 0.

    zero1's own state dictionaries go by numbers: here they get the names.
    """
    if world.sharding != "zero1":
        return get_optimizer_state_dict(model, optimizers, options=FULL)
    whole: dict = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        optimizer.consolidate_state_dict(to=0)
        if world.is_main:
            names = parameter_names(model, optimizer)
            numbered = optimizer.state_dict()
            for i, values in numbered["state"].items():
                whole["state"][names[i]] = values
            for group in numbered["param_groups"]:
                named = [names[i] for i in group["params"]]
                whole["param_groups"].append({**group, "params": named})
    return whole


def parameter_names(model, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in its own order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def resize_embedding(optimizer_state: dict, rows: int) -> dict:
    """The same state with the embedding's moments cut or padded with zeros to `rows`.

    So the padding of the vocabulary is never saved.
    """

    def resize(x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2:
            return x
        missing = max(0, rows - len(x))
        return torch.cat([x[:rows], x.new_zeros(missing, x.size(1))])

    moments = optimizer_state["state"].get(EMBEDDING, {})
    resized = {EMBEDDING: {name: resize(x) for name, x in moments.items()}}
    return {**optimizer_state, "state": {**optimizer_state["state"], **resized}}


# -- reading


def checkpoints(log_dir: str | Path) -> list[Path]:
    """The checkpoints in log_dir, oldest first."""
    paths = [path for path in Path(log_dir).glob("ckpt_*") if NAME.fullmatch(path.name)]
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("ckpt_"))


def newest(log_dir: str | Path, say=print) -> tuple[Path, dict] | None:
    """The newest whole checkpoint in log_dir and its state; None if there is none.

    A damaged one is named and skipped.
    """
    for path in reversed(checkpoints(log_dir)):
        try:
            hf.read_model(path)
            return path, load_state(path)
        except UserError as error:
            say(f"skipping {path}: {error}")
    return None


def load_state(directory: str | Path) -> dict:
    """The training state of a checkpoint, on the CPU.

    Raises UserError if there is none, if it is damaged, or of another version.
    """
    path = Path(directory) / STATE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: {directory} holds no training state; "
            "--init-from takes weights alone"
        ) from None
    except Exception as error:  # a truncated or altered archive fails in many ways
        kind = type(error).__name__
        raise UserError(f"{path} cannot be read ({kind}): the checkpoint is damaged") from None
    version = state.get("version", VERSION)  # the first ones did not say
    if version != VERSION:
        raise UserError(
            f"{path} is of version {version}, this program reads version {VERSION}: go on with the "
            f"revision that wrote it, or start from its weights with --init-from {directory}"
        )
    return state


def load_optimizers(
    model, optimizers: list[torch.optim.Optimizer], state: dict, world: World
) -> None:
    """Gives the optimizers what `save` kept.

    The sharding and the padding of the embedding may have been others then.
    """
    rows = model.transformer.wte.weight.size(0)
    whole = resize_embedding(state["optimizer"], rows)
    if world.sharding != "zero1":
        set_optimizer_state_dict(model, optimizers, whole, options=FULL)
        return
    for optimizer in optimizers:
        number = {name: i for i, name in enumerate(parameter_names(model, optimizer))}
        moments = {number[n]: values for n, values in whole["state"].items() if n in number}
        groups = [
            {**group, "params": [number[name] for name in group["params"]]}
            for group in whole["param_groups"]
            if group["params"][0] in number
        ]
        optimizer.load_state_dict({"state": moments, "param_groups": groups})


# -- removing


def prune(log_dir: str | Path, keep: int, best: Path | None = None) -> None:
    """Removes all checkpoints but the `keep` newest and the best.

    Call it when the newest is safe on the disk.
    """
    for path in checkpoints(log_dir)[:-keep]:
        if path != best:
            remove(path)


def remove_after(log_dir: str | Path, step: int) -> None:
    """Removes the checkpoints of later steps.

    A run that goes on from an earlier one must not come upon them.
    """
    for path in checkpoints(log_dir):
        if step_of(path) > step:
            remove(path)


def remove(path: Path) -> None:
    """Under another name first: at no time is there a ckpt_ directory that is not whole."""
    hidden = path.with_name(f".{path.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    shutil.rmtree(path.rename(hidden))

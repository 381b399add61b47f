"""A checkpoint: a directory that is a complete Hugging Face GPT-2, with `training_state.pt` beside the weights.

It is written under another name and renamed when everything is on the disk, so a directory called ckpt_* is whole.
"""

import os
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

from distributed import World
from model import GPT
from tokenizer import UserError

NAME = re.compile(r"ckpt_(\d{6,})")
STATE = "training_state.pt"
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
EMBEDDING = "transformer.wte.weight"


def save(log_dir, model: GPT, optimizers: list[torch.optim.Optimizer], state: dict, world: World, card=None) -> Path:
    """Writes log_dir/ckpt_{step:06d} from `model` (unwrapped), the optimizers and `state` (plain values; has `step`).

    Every rank calls it; rank 0 writes, whatever the sharding the same. A directory of that name is replaced, and is never
    missing a file in between.
    """
    final = Path(log_dir) / f"ckpt_{state['step']:06d}"
    weights = get_model_state_dict(model, options=FULL) if world.sharding == "fsdp" else model.state_dict()
    optimizer_state = gather_optimizers(model, optimizers, world)
    if world.is_main:
        beside, old = final.with_name(f".{final.name}.tmp"), final.with_name(f".{final.name}.old")
        for leftover in final.parent.glob(".ckpt_*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        model.save_pretrained(beside, weights, card)
        torch.save({**state, "optimizer": resize_embedding(optimizer_state, model.config.vocab_size)}, beside / STATE)
        for file in (*beside.iterdir(), beside):
            sync(file)
        if final.exists():
            final.rename(old)
        beside.rename(final)
        sync(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    world.barrier()
    return final


def load_state(directory: str | Path) -> dict:
    """The training state of a checkpoint, on the CPU. Raises UserError if there is none or it is damaged."""
    path = Path(directory) / STATE
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {directory} holds no training state; --init-from takes weights alone") from None
    except Exception as error:  # a truncated or altered archive fails in many ways
        raise UserError(f"{path} cannot be read ({type(error).__name__}): the checkpoint is damaged") from None


def load_optimizers(model: GPT, optimizers: list[torch.optim.Optimizer], state: dict, world: World) -> None:
    """Gives the optimizers the state that `save` kept, whatever the sharding and the padding of the embedding were then."""
    whole = resize_embedding(state["optimizer"], model.transformer.wte.weight.size(0))
    if world.sharding != "zero1":
        set_optimizer_state_dict(model, optimizers, whole, options=FULL)
        return
    for optimizer in optimizers:
        number = {name: i for i, name in enumerate(parameter_names(model, optimizer))}
        groups = [group for group in whole["param_groups"] if group["params"][0] in number]
        moments = {number[name]: values for name, values in whole["state"].items() if name in number}
        groups = [{**group, "params": [number[name] for name in group["params"]]} for group in groups]
        optimizer.load_state_dict({"state": moments, "param_groups": groups})


def gather_optimizers(model: GPT, optimizers: list[torch.optim.Optimizer], world: World) -> dict:
    """The state of all optimizers in one dictionary by parameter names, whole on rank 0; zero1 keeps it by numbers."""
    if world.sharding != "zero1":
        return get_optimizer_state_dict(model, optimizers, options=FULL)
    whole = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        optimizer.consolidate_state_dict(to=0)
        if world.is_main:
            names, numbered = parameter_names(model, optimizer), optimizer.state_dict()
            whole["state"] |= {names[i]: values for i, values in numbered["state"].items()}
            whole["param_groups"] += [{**g, "params": [names[i] for i in g["params"]]} for g in numbered["param_groups"]]
    return whole


def parameter_names(model: GPT, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in its own order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def resize_embedding(optimizer_state: dict, rows: int) -> dict:
    """The same state with the embedding's moments cut or padded with zeros to `rows`: padding is never saved."""

    def resize(x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2:
            return x
        return torch.cat([x[:rows], x.new_zeros(max(0, rows - len(x)), x.size(1))])

    moments = {key: resize(x) for key, x in optimizer_state["state"].get(EMBEDDING, {}).items()}
    return {**optimizer_state, "state": {**optimizer_state["state"], EMBEDDING: moments}}


def checkpoints(log_dir: str | Path) -> list[Path]:
    """The checkpoints in log_dir, oldest first."""
    found = [(int(m[1]), p) for p in Path(log_dir).glob("ckpt_*") if (m := NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def newest(log_dir: str | Path, say=print) -> tuple[Path, dict] | None:
    """The newest whole checkpoint in log_dir and its state; None if there is none. A damaged one is named and skipped."""
    for path in reversed(checkpoints(log_dir)):
        try:
            GPT.from_pretrained(path)
            return path, load_state(path)
        except UserError as error:
            say(f"skipping {path}: {error}")
    return None


def prune(log_dir: str | Path, keep: int, best: Path | None = None) -> None:
    """Removes all checkpoints but the `keep` newest and the best; called when the newest is safe on the disk."""
    for path in checkpoints(log_dir)[:-keep]:
        if path != best:
            remove(path)


def remove_after(log_dir: str | Path, step: int) -> None:
    """Removes the checkpoints of later steps: a run that goes on from an earlier one must not come upon them."""
    for path in checkpoints(log_dir):
        if int(NAME.fullmatch(path.name)[1]) > step:
            remove(path)


def remove(path: Path) -> None:
    """Under another name first: at no time is there a ckpt_ directory that is not whole."""
    hidden = path.with_name(f".{path.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    shutil.rmtree(path.rename(hidden))


def sync(path: Path) -> None:
    """Waits until a file, or a directory's entries, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open a directory, and needs no such call
        return
    fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows syncs only what can be written
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""A checkpoint: a complete Hugging Face model, with `training_state.pt` beside the weights.

It is renamed to ckpt_* when everything is on the disk. `checksums.json` has the SHA-256 of its
files, to find later damage. Resume renames what it does not use: damaged_ckpt_…, abandoned_ckpt_…
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from support.common import UserError, first_line, hash_file, sync
from support.fingerprint import EMBEDDING, HEAD

NAME = re.compile(r"ckpt_(\d{6,})")
STATE = "training_state.pt"
CHECKSUMS = "checksums.json"
NEEDED = (STATE, "model.safetensors", "config.json")
VERSION = 3  # of the training state; 2 knew less of the data, 1 had them in another order
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Found:
    """A checkpoint to go on from, and the damaged ones that are newer."""

    path: Path
    state: dict
    damaged: list[Path]


def path_of(log_dir: str | Path, step: int) -> Path:
    return Path(log_dir) / f"ckpt_{step:06d}"


def checkpoints(log_dir: str | Path) -> list[Path]:
    """The checkpoints in log_dir, oldest first."""
    paths = [path for path in Path(log_dir).glob("ckpt_*") if NAME.fullmatch(path.name)]
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("ckpt_"))


# -- writing


def save(
    log_dir: str | Path,
    *,
    model,
    optimizers: list[torch.optim.Optimizer],
    state: dict,
    world,
    card: dict | None = None,
) -> Path:
    """Writes log_dir/ckpt_{step:06d} -> its path.

    model: a GPT before wrapping. state: plain values, with `step`. Every rank calls it; rank 0
    writes. Raises UserError if weights are not finite, or if the disk is full or fails.
    """
    final = path_of(log_dir, state["step"])
    weights: dict = get_model_state_dict(model, options=FULL)
    moments: dict = {"state": {}}
    if all(optimizer.state for optimizer in optimizers):  # else PyTorch makes a first step
        moments = get_optimizer_state_dict(model, optimizers, options=FULL)
    with world.together():
        if world.is_main:
            sweep(final.parent)
            moments = resize_embedding(moments, model.config.vocab_size)
            refuse_not_finite(weights, final)
            refuse_full_disk(weights, moments, final)
            beside = final.with_name(f".{final.name}.tmp")
            try:
                model.save_pretrained(beside, weights, card)
                torch.save({**state, "version": VERSION, "optimizer": moments}, beside / STATE)
                finish(beside, final)
            except Exception as e:  # torch's and safetensors' writers have errors of their own
                told = f"{final} cannot be written ({first_line(e)})"
                raise UserError(f"{told}; older files are intact") from e
    return final


def refuse_not_finite(weights: dict[str, torch.Tensor], final: Path) -> None:
    for name, w in weights.items():
        if not w.isfinite().all():
            raise UserError(
                f"{name} has values that are not finite: {final} is not written. Go on from the "
                "checkpoint before it with a lower --learning-rate (--resume auto)"
            )


def refuse_full_disk(weights: dict, moments: dict, final: Path) -> None:
    """Raises UserError if the disk has less room than a checkpoint needs."""
    tensors = list({w.data_ptr(): w for w in weights.values()}.values())  # a tied one once
    for values in moments["state"].values():
        tensors += values.values()
    need = sum(x.nbytes for x in tensors) + 2**22  # the tokenizer and the like
    final.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(final.parent).free
    if need > free:
        raise UserError(
            f"{final} needs {need:,} bytes, the disk has {free:,} left: make room, then go on with "
            "--resume auto; older files are intact"
        )


def finish(beside: Path, final: Path) -> None:
    """Adds the checksums to a written directory, waits for the disk, and gives it its name."""
    hashes = {file.name: hash_file(file) for file in sorted(beside.iterdir())}
    (beside / CHECKSUMS).write_text(json.dumps(hashes, indent=1) + "\n")
    for path in (*beside.iterdir(), beside):
        sync(path)
    if final.exists():
        set_aside(final, "abandoned")
    beside.rename(final)
    sync(final.parent)


def sweep(log_dir: Path) -> None:
    """Removes what a killed process left half-written or half-removed."""
    for leftover in log_dir.glob(".ckpt_*"):
        shutil.rmtree(leftover, ignore_errors=True)


# -- finding and reading


def find(candidates: list[Path], world, say) -> Found | None:
    """The first of these checkpoints that is whole; None if there are none. Every rank calls it.

    Raises UserError if all are damaged, or if the disk cannot read one: it may still be whole.
    """
    path = None
    damaged: list[Path] = []
    with world.together():
        for candidate in candidates if world.is_main else []:
            problem = damage_of(candidate)
            if not problem:
                path = candidate
                break
            say(f"skipping {candidate}: {problem}")
            damaged.append(candidate)
        if damaged and not path:
            hint = "--overwrite starts anew, --init-from takes weights"
            raise UserError(f"{problem}; no other is whole: {hint}")
    path, damaged = world.share((path, damaged))
    return Found(path, load_state(path), damaged) if path else None


def damage_of(directory: Path) -> str:
    """What is wrong with a checkpoint's files; empty if they are as they were written.

    Raises UserError for another version, or if the disk or memory fails: that is not damage.
    """
    try:
        load_state(directory)
        expected = json.loads((directory / CHECKSUMS).read_bytes())
        for name in {*expected, *NEEDED} - {"README.md"}:  # anyone may edit the model card
            if hash_file(directory / name) != expected.get(name):
                return f"{directory / name} is not what was written (its SHA-256 differs)"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, MemoryError) as e:
        raise UserError(f"{directory} cannot be read now ({e}): fix that, then start again") from e
    except UserError:
        raise
    except Exception as error:  # truncated or altered archives and JSON fail in many ways
        return f"{directory} is damaged: {STATE} or {CHECKSUMS} cannot be read ({error!r:.200})"
    return ""


def load_state(directory: Path) -> dict:
    """A checkpoint's training state; tensors are read when needed. Raises what torch.load does."""
    path = directory / STATE
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    version = state.get("version", 1)  # the first ones did not say
    if not 2 <= version <= VERSION:
        raise UserError(
            f"{path} is of version {version}, this program reads 2 to {VERSION} (CHANGELOG.md): "
            "go on with the revision that wrote it, or start from its weights with "
            f"--init-from {directory}"
        )
    return state


# -- the states of the optimizers, as one dictionary by parameter names


def resize_embedding(moments: dict, rows: int) -> dict:
    """Cuts the embedding's moments to `rows`, or pads them with zeros: no padding is saved."""
    states = dict(moments["state"])
    for name in {EMBEDDING, HEAD} & set(states):
        states[name] = dict(states[name])
        for key, x in states[name].items():
            if x.dim() == 2:
                missing = max(0, rows - len(x))
                states[name][key] = torch.cat([x[:rows], x.new_zeros(missing, x.size(1))])
    return {**moments, "state": states}


def load_optimizers(model, optimizers: list, moments: dict) -> None:
    """Gives the optimizers their part of a checkpoint's `optimizer`, saved with any sharding.

    Their options (weight decay, betas, fused) stay as they are: flags and device decide.
    """
    if not moments["state"]:  # every update so far was skipped
        return
    whole = resize_embedding(moments, model.transformer.wte.weight.size(0))
    own = [group for optimizer in optimizers for group in optimizer.param_groups]
    whole["param_groups"] = [
        {**group, "params": saved["params"]}
        for group, saved in zip(own, whole["param_groups"], strict=True)
    ]
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizers, whole, options=options)


# -- moving aside and removing


def set_aside(path: Path, why: str) -> None:
    """Renames a checkpoint to {why}_ckpt_…, which no resume looks at."""
    target = path.with_name(f"{why}_{path.name}")
    number = 2
    while target.exists():
        target = path.with_name(f"{why}_{path.name}_{number}")
        number += 1
    path.rename(target)


def prune(log_dir: str | Path, keep: int, best: int | None = None) -> None:
    """Removes all checkpoints but the `keep` newest and that of step `best`."""
    for path in checkpoints(log_dir)[:-keep]:
        if step_of(path) != best:
            remove(path)


def remove(path: Path) -> None:
    """Renames it first: no directory called ckpt_* is ever half-removed."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    shutil.rmtree(path.rename(hidden))

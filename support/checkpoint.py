"""A checkpoint: a complete Hugging Face model, with `training_state.pt` beside the weights.

It is written under another name and renamed when everything is on the disk, so a directory called
ckpt_* is whole; `checksums.json` has the SHA-256 of its files, so damage that comes later is found.
Nothing that might be of use is deleted: a damaged checkpoint becomes damaged_ckpt_*, one that a
resumed run leaves behind abandoned_ckpt_*.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from support.common import UserError, first_line, hash_file, sync
from support.distributed import World
from support.optimizer_state import FULL, gather_optimizers, resize_embedding

NAME = re.compile(r"ckpt_(\d{6,})")
STATE = "training_state.pt"
CHECKSUMS = "checksums.json"
NEEDED = (STATE, "model.safetensors", "config.json")
VERSION = 2  # of the training state; 1 had another order of the data, and no checksums


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
    world: World,
    card: dict | None = None,
) -> Path:
    """Writes log_dir/ckpt_{step:06d} -> its path.

    model: a GPT before wrapping. state: plain values; it has `step`. Every rank calls it; rank 0
    writes, whatever the sharding the same. A directory of that name is replaced, and is never
    missing a file in between. Raises UserError on every rank if weights are not finite, or if the
    disk is full or fails; what was there before stays.
    """
    final = path_of(log_dir, state["step"])
    if world.sharding == "fsdp":
        weights: dict = get_model_state_dict(model, options=FULL)
    else:
        weights = model.state_dict()
    optimizer_state = gather_optimizers(model, optimizers, world)
    problem = ""
    if world.is_main:
        optimizer_state = resize_embedding(optimizer_state, model.config.vocab_size)
        state = {**state, "version": VERSION, "optimizer": optimizer_state}
        try:
            sweep(final.parent)
            refuse_not_finite(weights, final)
            refuse_full_disk(weights, optimizer_state, final)
            beside = final.with_name(f".{final.name}.tmp")
            model.save_pretrained(beside, weights, card)
            torch.save(state, beside / STATE)
            finish(beside, final)
        except UserError as error:
            problem = str(error)
        except Exception as error:  # of torch's and safetensors' writers, when the disk fails
            problem = f"{final} cannot be written ({first_line(error)}); what was there is intact"
    world.raise_together(problem)
    return final


def refuse_not_finite(weights: dict[str, torch.Tensor], final: Path) -> None:
    """Raises UserError for weights that are infinite or not a number."""
    for name, w in weights.items():
        if not w.isfinite().all():
            raise UserError(
                f"{name} has values that are not finite: {final} is not written. Go on from the "
                "checkpoint before it with a lower --learning-rate (--resume auto)"
            )


def refuse_full_disk(weights: dict, optimizer_state: dict, final: Path) -> None:
    """Raises UserError if the disk has less room than a checkpoint needs."""
    tensors = list({w.data_ptr(): w for w in weights.values()}.values())  # a tied one once
    for values in optimizer_state["state"].values():
        tensors += [x for x in values.values() if isinstance(x, torch.Tensor)]
    need = sum(x.numel() * x.element_size() for x in tensors)
    final.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(final.parent).free
    if need > free:
        raise UserError(
            f"{final} needs {need:,} bytes, the disk has {free:,} left: make room, then go on with "
            "--resume auto; what was there is intact"
        )


def finish(beside: Path, final: Path) -> None:
    """Adds the checksums to a written directory, waits for the disk, and gives it its name."""
    hashes = {file.name: hash_file(file) for file in sorted(beside.iterdir())}
    (beside / CHECKSUMS).write_text(json.dumps(hashes, indent=1) + "\n")
    for path in (*beside.iterdir(), beside):
        sync(path)
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(old)
    beside.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def sweep(log_dir: Path) -> None:
    """Clears away what a killed process left half-written or half-removed.

    A checkpoint that was about to be replaced when the process was killed gets its name back.
    """
    for leftover in log_dir.glob(".ckpt_*"):
        name = leftover.name.removeprefix(".")
        if name.endswith(".old") and not (log_dir / name.removesuffix(".old")).exists():
            leftover.rename(log_dir / name.removesuffix(".old"))
        else:
            shutil.rmtree(leftover, ignore_errors=True)


# -- finding and reading


def find(candidates: list[Path], world: World, say) -> Found | None:
    """The first of these checkpoints that is whole; None if there are none. Every rank calls it.

    Rank 0 looks, and names the damaged ones that it skips. Raises UserError on every rank if all
    are damaged, or if one cannot be read now: that one may be whole.
    """
    path = None
    damaged: list[Path] = []
    problem = ""
    try:
        if world.is_main:
            path, damaged = first_whole(candidates, say)
    except UserError as error:
        problem = str(error)
    world.raise_together(problem)
    path, damaged = world.share((path, damaged))
    return Found(path, load_state(path), damaged) if path else None


def first_whole(candidates: list[Path], say) -> tuple[Path | None, list[Path]]:
    """The first that is whole, and the damaged ones before it."""
    damaged: list[Path] = []
    problem = ""
    for candidate in candidates:
        problem = damage_of(candidate)
        if not problem:
            return candidate, damaged
        say(f"skipping {candidate}: {problem}")
        damaged.append(candidate)
    if damaged:
        hint = "--overwrite starts anew, --init-from takes weights"
        raise UserError(f"{problem}; no other is whole: {hint}")
    return None, []


def damage_of(directory: Path) -> str:
    """What is wrong with a checkpoint's files; empty if they are as they were written.

    Raises UserError where one cannot be read now: a missing permission or a failing disk is no
    damage.
    """
    try:
        if not (directory / CHECKSUMS).exists():
            load_state(directory)  # of an earlier version it has a sentence of its own
        expected = json.loads((directory / CHECKSUMS).read_bytes())
        for name in {*expected, *NEEDED} - {"README.md"}:  # the model card is anyone's to edit
            if hash_file(directory / name) != expected.get(name):
                return f"{directory / name} is not what was written (its SHA-256 differs)"
        load_state(directory)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise UserError(
            f"{directory} cannot be read now ({reason}): mend that, then start again"
        ) from None
    except UserError:
        raise
    except Exception as error:  # truncated or altered archives and JSON fail in many ways
        reason = f"{type(error).__name__}: {first_line(error)}"
        return f"{directory} is damaged: {CHECKSUMS} or {STATE} cannot be read ({reason})"
    return ""


def load_state(directory: str | Path) -> dict:
    """The training state of a checkpoint, on the CPU, mapped: its tensors are read when needed.

    Raises UserError for another version, and whatever torch.load does for a damaged file.
    """
    path = Path(directory) / STATE
    path.open("rb").close()  # its errors are clearer than torch's
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    version = state.setdefault("version", 1)  # the first ones did not say
    if version != VERSION:
        raise UserError(
            f"{path} is of version {version}, this program reads version {VERSION} (CHANGELOG.md): "
            "go on with the revision that wrote it, or start from its weights with "
            f"--init-from {directory}"
        )
    return state


# -- moving aside and removing


def set_aside(path: Path, why: str) -> Path:
    """Renames a checkpoint to {why}_ckpt_…, which nothing takes for one -> its new path."""
    target = path.with_name(f"{why}_{path.name}")
    number = 2
    while target.exists():
        target = path.with_name(f"{why}_{path.name}_{number}")
        number += 1
    return path.rename(target)


def prune(log_dir: str | Path, keep: int, best: Path | None = None) -> None:
    """Removes all checkpoints but the `keep` newest and the best.

    Call it when the newest is safe on the disk.
    """
    for path in checkpoints(log_dir)[:-keep]:
        if path != best:
            remove(path)


def remove(path: Path) -> None:
    """Under another name first: at no time is there a ckpt_ directory that is not whole."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    shutil.rmtree(path.rename(hidden))

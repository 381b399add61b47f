"""A checkpoint: a model directory as Hugging Face has it, and `training_state.pt` beside it.

It is renamed to ckpt_* when everything is on the disk. `checksums.json` has the SHA-256 of its
files. Resume renames what it does not use: damaged_ckpt_…, abandoned_ckpt_…
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.checkpoint import state_dict
from torch.optim import Optimizer

from support.base.errors import UserError, as_os_error, first_line, writing
from support.base.files import hash_file, sync
from support.run.average import swap_averages
from support.weights.hf import new_run_from

if TYPE_CHECKING:
    from model import GPT
    from support.machine.distributed import Stop, World

NAME = re.compile(r"ckpt_(\d{6,})")
COMPARED = re.compile(r".*seed=\d+_[0-9a-f]{8}")  # the directory of a run of compare.py
STATE = "training_state.pt"
CHECKSUMS = "checksums.json"
NEEDED = (STATE, "model.safetensors", "config.json")
VERSION = 5  # of the training state; older code would take averages for weights
READABLE = (3, 4, VERSION)
FULL = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
SAVES_IN_BACKGROUND = {"cuda"}  # a CPU that trains on would share its cores with the thread


@dataclass
class Checkpoint:
    """A checkpoint to resume from, and the damaged ones that are newer."""

    path: Path
    state: dict[str, Any]
    damaged: list[Path]


@dataclass
class Progress:
    """How far a run has come. A checkpoint keeps these names and values in its state."""

    step: int = 0  # updates done
    cursor: int = 0  # sequences consumed by them
    evaluated: bool = False  # whether this step's evaluations are done
    wall: float = 0.0  # seconds, until the last checkpoint
    # the lowest validation loss with a checkpoint, its step, and on how many tokens it was measured
    best: dict | None = None
    lower: dict | None = None  # the same of this step, if it is lower
    losses: dict[str, float] = field(default_factory=dict)  # the last ones, for the model card
    skipped_in_a_row: int = 0  # updates


def path_of(log_dir: str | Path, step: int) -> Path:
    return Path(log_dir) / f"ckpt_{step:06d}"


def checkpoints(log_dir: str | Path) -> list[Path]:
    """The checkpoints in log_dir, oldest first."""
    paths = [path for path in Path(log_dir).glob("ckpt_*") if NAME.fullmatch(path.name)]
    return sorted(paths, key=step_of)


def newest_checkpoint(folder: str = "log") -> Path | None:
    """Of all runs below a folder, but for those of compare.py, the checkpoint written last."""
    paths = [path for path in Path(folder).rglob("ckpt_*") if NAME.fullmatch(path.name)]
    paths = [path for path in paths if not COMPARED.fullmatch(path.parent.name)]
    return max(paths, key=lambda path: path.stat().st_mtime, default=None)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("ckpt_"))


@dataclass
class Writer:
    """Writes a run's checkpoints, on rank 0. On a GPU, a thread does it while training continues.

    The thread has copies, and calls no collective. If it fails, Stop ends the run.
    """

    stop: Stop
    log_dir: Path
    keep: int = 0  # so many of the newest stay; 0: all
    last: Path | None = None  # the newest one that all ranks know to be whole
    begun: Future[Path] | None = None
    thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))

    def save(self, model: GPT, optimizers: list[Optimizer], state: dict, card: dict) -> None:
        """Begins to write ckpt_{step:06d}; on a CPU, it is written. Every rank calls it.

        model: before wrapping. state: plain values, with `step`. Raises UserError as wait does.
        """
        self.wait()
        world = self.stop.world
        final = path_of(self.log_dir, state["step"])
        weights: dict = state_dict.get_model_state_dict(model, options=FULL)
        moments: dict = {"state": {}}
        if any(optimizer.state for optimizer in optimizers):  # else PyTorch would make an update
            moments = state_dict.get_optimizer_state_dict(model, optimizers, options=FULL)
        work = partial(Path, final)  # the other ranks have nothing to write
        if world.is_main:
            # a tied weight has one name; its parameter is another one in FSDP's next update
            weights = {name: weights[name] for name, _ in model.named_parameters()}
            live = kept_on_cpu(optimizers) if world.device.type in SAVES_IN_BACKGROUND else set()
            moments = states_to_save(moments, model, live)
            state = {**state, "version": VERSION, "optimizer": moments}
            work = partial(write, final, model, weights, state, card, self.keep)
        if world.device.type in SAVES_IN_BACKGROUND:
            self.begun = self.thread.submit(work)
            self.begun.add_done_callback(self.note)
        else:
            with world.fail_together():
                self.last = work()

    def note(self, begun: Future[Path]) -> None:
        if error := begun.exception():
            self.stop.problem = str(error) or repr(error)

    def wait(self) -> Path | None:
        """Waits for what was begun -> the last checkpoint. Each rank calls it. Raises UserError."""
        if self.begun:
            with self.stop.world.fail_together():
                self.last = self.begun.result()
        return self.last


def write(
    final: Path, model: GPT, weights: dict, state: dict[str, Any], card: dict, keep: int
) -> Path:
    """Writes a checkpoint beside its place, renames it, and only then removes older ones."""
    beside = final.with_name(f".{final.name}.tmp")
    try:
        remove_leftovers(final.parent)
        model.save_pretrained(beside, weights, card)
        with as_os_error():
            torch.save(state, beside / STATE)
            load_state(beside)  # it refuses what no resume could read, such as NumPy's scalars
        hashes = {file.name: hash_file(file) for file in sorted(beside.iterdir())}
        (beside / CHECKSUMS).write_text(json.dumps(hashes, indent=1) + "\n")
        for path in (*beside.iterdir(), beside):
            sync(path)
        if final.exists():
            set_aside(final, "abandoned")
        beside.rename(final)
        sync(final.parent)
    except Exception as e:
        shutil.rmtree(beside, ignore_errors=True)  # it may have filled the disk
        if not isinstance(e, OSError):  # of one's own change: with its file and line
            raise
        problem = f"{final} cannot be written ({first_line(e)}); older files are intact"
        raise UserError(f"{problem}: fix that or make room, then resume with --resume auto") from e
    prune(final.parent, keep, (state.get("best") or {}).get("step"))
    return final


def remove_leftovers(log_dir: Path) -> None:
    """Removes what a killed process left half-written or half-removed."""
    for leftover in (*log_dir.glob(".ckpt_*.tmp"), *log_dir.glob(".ckpt_*.removed")):
        shutil.rmtree(leftover, ignore_errors=True)


def find(candidates: list[Path], world: World) -> Checkpoint | None:
    """The first of these checkpoints that is whole; None if there are none. Every rank calls it.

    Raises UserError if all are damaged, or if the disk cannot read one: it may still be whole.
    """
    path = None
    damaged: list[Path] = []
    with world.fail_together():
        for candidate in candidates if world.is_main else []:
            problem = damage_of(candidate)
            if not problem:
                path = candidate
                break
            world.say(f"skipping {candidate}: {problem}")
            damaged.append(candidate)
        if damaged and not path:
            if others := [c for c in checkpoints(damaged[-1].parent) if c not in damaged]:
                raise UserError(f"{problem}; the newest other one: --resume {others[-1]}")
            hint = "start over, with --overwrite and without --resume"
            if "model.safetensors" not in problem:
                hint += f", or {new_run_from(damaged[-1])}"
            raise UserError(f"{problem}; no other checkpoint is whole: {hint}")
    path, damaged = world.broadcast((path, damaged))
    return Checkpoint(path, load_state(path), damaged) if path else None


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
    if version not in READABLE:
        problem = f"{path} is of version {version}, but this code reads {READABLE}"
        hint = f"resume with the revision that wrote it, or {new_run_from(directory)}"
        raise UserError(f"{problem}: {hint}")
    return state


def kept_on_cpu(optimizers: list[Optimizer]) -> set[int]:
    """Where the tensors begin that optimizers keep on the CPU: a step count of AdamW, not fused.

    Offloading copies only a GPU's. The next update would change these before they are written.
    """
    tensors = [x for o in optimizers for own in o.state.values() for x in own.values()]
    return {x.data_ptr() for x in tensors if type(x) is torch.Tensor and x.is_cpu}


def states_to_save(moments: dict, model: GPT, live: set[int]) -> dict:
    """The optimizers' states without padding. live: where tensors begin that must be copied."""

    def as_saved(name: str, x: torch.Tensor) -> torch.Tensor:
        y = model.without_padding(name, x) if x.dim() == 2 else x
        # of a view, torch.save writes all storage
        return y.clone() if y.nbytes < x.nbytes or x.data_ptr() in live else y

    return change_states(moments, as_saved)


def change_states(moments: dict, change: Callable[[str, torch.Tensor], torch.Tensor]) -> dict:
    """The optimizers' states, with change(parameter's name, x) for each tensor x."""
    states = {}
    for name, own in moments["state"].items():
        states[name] = {
            key: change(name, x) if isinstance(x, torch.Tensor) else x for key, x in own.items()
        }
    return {**moments, "state": states}


def load_optimizers(model: GPT, optimizers: list[Optimizer], moments: dict) -> None:
    """Gives the optimizers the states of a checkpoint, saved with any sharding."""
    if not moments["state"]:  # every update so far was skipped
        return
    rows = {name: len(p) for name, p in model.named_parameters()}

    def pad(name: str, x: torch.Tensor) -> torch.Tensor:
        is_cut = x.dim() == 2 and len(x) == model.config.vocab_size < rows[name]
        return F.pad(x, (0, 0, 0, rows[name] - len(x))) if is_cut else x

    padded = change_states(moments, pad)
    own = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    # their options (weight decay, betas, fused) stay as they are: flags and device decide
    kept = [  # not those of an optimizer without a state
        (optimizer, {**group, "params": saved["params"]})
        for (optimizer, group), saved in zip(own, padded["param_groups"], strict=True)
        if moments["state"].keys() & {*saved["params"]}
    ]
    padded["param_groups"] = [group for _, group in kept]
    optimizers = list(dict.fromkeys(optimizer for optimizer, _ in kept))
    options = state_dict.StateDictOptions(full_state_dict=True)
    state_dict.set_optimizer_state_dict(model, optimizers, padded, options=options)
    if any("average" in own for own in moments["state"].values()):  # it was saved exchanged
        swap_averages(optimizers)


def set_aside(path: Path, state: str) -> None:
    """Renames a checkpoint to {state}_ckpt_…, which no resume looks at."""
    target = path.with_name(f"{state}_{path.name}")
    number = 2
    while target.exists():
        target = path.with_name(f"{state}_{path.name}_{number}")
        number += 1
    path.rename(target)


def prune(log_dir: str | Path, keep: int, best: int | None = None) -> None:
    """Keeps the `keep` newest checkpoints and that of step `best`; with keep 0, all of them."""
    for path in checkpoints(log_dir)[:-keep]:
        if step_of(path) != best:
            remove(path)


def remove(path: Path) -> None:
    """Renames it first: no directory called ckpt_* is ever half-removed."""
    hidden = path.with_name(f".{path.name}.removed")
    with writing(hidden):
        path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)  # `remove_leftovers` tries again

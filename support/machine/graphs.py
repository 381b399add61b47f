"""CUDA graphs: the launches of an update, recorded once and then replayed.

A small model's update has hundreds of launches, which take the CPU longer than the GPU computes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from support.base.console import say
from support.base.errors import first_line

if TYPE_CHECKING:
    from config import TrainConfig
    from support.machine.distributed import World

# Updates before the recorded one. They compile, and make moments and the matmuls' workspaces.
UNRECORDED = 2


def can_record(config: TrainConfig, world: World, dtype: torch.dtype) -> bool:
    """Whether a run's updates can be recorded: only where Python decides nothing in them.

    In float16 it skips an update that overflowed. Several processes wait for each other. Where
    activations are recomputed, memory is short, and kernels are longer than their launches.
    """
    alone = world.device.type == "cuda" and world.size == 1
    compiled = config.compile and not config.find_nan
    return alone and compiled and dtype != torch.float16 and not config.activation_checkpointing


class Recording(NamedTuple):
    """A part of an update as a graph."""

    replay: Callable[[], None]
    inputs: tuple[Tensor, ...]  # from which it reads
    output: Any  # to which it writes
    grads: list[Tensor | None]  # the parameters', after it
    options: list[dict[str, Any]]  # the optimizers'


def run_eagerly(_part: str, work: Callable[..., Any], *inputs: Tensor) -> Any:
    """What Graphs.run does without graphs."""
    return work(*inputs)


class Graphs:
    """Runs the parts of an update. From the third update on, a GPU replays what they launched.

    A part is the same work each time, and an update has the same parts in the same order. So the
    micro-step that makes the gradients is another part than those that add to them.

    The kernels stay the same, and so do the bits. But a graph keeps each number that Python passed
    to a launch. So the optimizers' rates become tensors, which `set_rate` fills. An optimizer is
    recorded if its groups have PyTorch's option "capturable": it counts nothing in Python.
    """

    def __init__(self, optimizers: list[Optimizer], device: torch.device):
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.params = [p for group in groups for p in group["params"]]
        capturable = all("capturable" in group for group in groups)
        self.unrecordable = set() if capturable else {"update"}
        self.recordable_groups = groups if capturable else []
        for group in self.recordable_groups:
            group["capturable"] = True
            for name in ("lr", "averaging"):
                group[name] = torch.full((), float(group.get(name, 1.0)), device=device)
        self.device = device
        self.off = os.environ.get("GPT2_NO_GRAPH") == "1"  # to compare
        self.first_part = ""  # of an update
        self.updates = 0  # that have begun
        self.recordings: dict[str, Recording] = {}

    def run(self, part: str, work: Callable[..., Any], *inputs: Tensor) -> Any:
        """work(*inputs). The part's next run overwrites the output."""
        self.first_part = self.first_part or part
        self.updates += part == self.first_part
        if self.updates > UNRECORDED and part not in self.unrecordable and not self.off:
            try:
                if part not in self.recordings:
                    self.recordings[part] = self.record(work, inputs)
                if self.options() != self.recordings[part].options:
                    raise RuntimeError("an optimizer's option, other than its rates, changed")
            except RuntimeError as error:
                say(f"without CUDA graphs from now on; {part}: {first_line(error)}")
                self.off = True
                self.recordings.clear()  # they keep memory
        if self.off:
            return work(*inputs)
        recording = self.recordings.get(part)
        return self.replay(recording, inputs) if recording else self.warm_up(work, inputs)

    def record(self, work: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Recording:
        before = [p.grad for p in self.params]
        inputs = tuple(x.clone() for x in inputs)
        try:
            replay, output = self.capture(lambda: work(*inputs))
            grads = [p.grad for p in self.params]
        finally:  # nothing was computed yet
            self.set_grads(before)
        return Recording(replay, inputs, output, grads, self.options())

    def replay(self, recording: Recording, inputs: tuple[Tensor, ...]) -> Any:
        for own, given in zip(recording.inputs, inputs, strict=True):
            own.copy_(given)
        recording.replay()
        self.set_grads(recording.grads)
        return recording.output

    def options(self) -> list[dict[str, Any]]:
        """What Python passes to the optimizers' launches."""
        return [
            {name: x for name, x in group.items() if name != "params" and not torch.is_tensor(x)}
            for group in self.recordable_groups
        ]

    def set_grads(self, grads: list[Tensor | None]) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad

    # -- on the GPU: all of it on one stream, since a graph cannot record what was begun on another

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    @cached_property
    def pool(self) -> Any:
        """The memory of all graphs."""
        return torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
        """work(*inputs), which is not recorded."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            output = work(*inputs)
        current.wait_stream(self.stream)
        return output

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What repeats the launches of work(), and its output. It computes nothing."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        if 2 * (most := torch.cuda.max_memory_allocated(self.device)) > total:
            # graphs keep what a micro-step takes, and evaluations need as much again
            raise RuntimeError(f"updates take {most:,} bytes, more than half of the GPU's")
        gc.collect()  # what is left of an earlier backward pass may belong to another stream
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.stream(torch.cuda.current_stream(self.device)),  # again after an error, too
            torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"),
        ):
            output = work()
        return graph.replay, output


def set_rate(group: dict[str, Any], name: str, value: float) -> None:
    """Sets a number of an optimizer's group that changes from update to update."""
    if isinstance(group.get(name), Tensor):
        group[name].fill_(value)
    else:
        group[name] = value

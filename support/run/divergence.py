"""Runs that go wrong: when to stop, copies that differ, and the hunt for a NaN's origin."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from support.base.errors import UserError, first_line
from support.machine.distributed import World
from support.machine.sharding import is_sharded, local_weights

MOST_SKIPPED = 50  # updates in a row: the model has stopped learning


def why_stop(loss: float, norm: float, skipped_in_a_row: int) -> str:
    """Why training cannot continue after an update; empty if it can.

    skipped_in_a_row: updates that overflowed in float16, this one the last; 0 if it did not.
    """
    if skipped_in_a_row == MOST_SKIPPED:
        return f"{MOST_SKIPPED} updates in a row were skipped: overflow in float16"
    if math.isfinite(loss) and (skipped_in_a_row or math.isfinite(norm)):
        return ""
    return f"the loss is {loss} and the gradient norm {norm}"


def find_not_finite(model: nn.Module) -> str:
    """A parameter with a value that is not finite in this process; empty if there is none."""
    weights = local_weights(model)
    finite = torch.stack([x.isfinite().all() for x in weights.values()]).tolist()  # one wait
    return next((name for name, ok in zip(weights, finite, strict=True) if not ok), "")


def refuse_other_copies(model: nn.Module, world: World, again: str) -> None:
    """Raises UserError on all processes if they hold different weights. again: how to resume."""
    if world.size == 1:
        return
    shards = world.shard_group_size if is_sharded(model) else 1  # each node has a copy of each
    sums = torch.zeros(world.size, dtype=torch.int64)
    bits = [x.view(torch.int32).sum(dtype=torch.int64) for x in local_weights(model).values()]
    sums[world.rank] = torch.stack(bits).sum()
    copies = world.sum(sums).view(-1, shards)
    equal = (copies == copies[0]).all(0)
    odd = [f"rank {i}: {n}" for i, n in enumerate(copies.flatten()) if not equal[i % shards]]
    if odd:
        problem = f"the processes hold different weights (sums of their bits: {', '.join(odd)})"
        hint = f"go back to the last good checkpoint with: {again}"
        raise UserError(f"{problem}, so nothing is saved; {hint}")


@contextmanager
def naming_operations(model: nn.Module) -> Iterator[None]:
    """Inside, the first result that is not finite raises a UserError with its operation's name.

    That is a module in the forward pass and, for a NaN in the backward pass, an autograd function.
    """
    names = {module: name for name, module in model.named_modules()}

    def check_output(module: nn.Module, _inputs: Any, output: Any) -> None:
        for x in output if isinstance(output, tuple) else (output,):
            if isinstance(x, torch.Tensor) and not x.isfinite().all():
                name = f"{names.get(module) or 'the loss'} ({type(module).__name__})"
                raise UserError(f"the first output that is not finite is that of {name}")

    try:
        with register_module_forward_hook(check_output), torch.autograd.set_detect_anomaly(True):
            yield
    except RuntimeError as error:
        if "returned nan values" not in str(error):
            raise
        raise UserError(f"in the backward pass: {first_line(error)}") from None

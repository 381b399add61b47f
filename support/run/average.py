"""An average of the weights, which is evaluated and saved instead of them: --average-frac."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer


@torch.no_grad()
def average_weights(optimizer: Optimizer, *_: Any) -> None:
    """Moves each weight's average, a part of its state, by its group's `averaging` to the weight.

    A hook of Optimizer.step. With 1 / (f · updates so far), two thirds of the average are the last
    fraction f of the updates: it weighs them by a power of time (Shamir & Zhang 2013).
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                own = optimizer.state[p]
                if "average" not in own:
                    own["average"] = p.clone()
                own["average"].lerp_(p, group.get("averaging", 1.0))


@torch.no_grad()
def swap_averages(optimizers: list[Optimizer]) -> None:
    """Exchanges the weights and their averages, where there are any."""
    for optimizer in optimizers:
        for p, own in optimizer.state.items():
            if "average" in own:
                average = own["average"].clone()
                own["average"].copy_(p)
                p.copy_(average)


@contextmanager
def averaged(optimizers: list[Optimizer]) -> Iterator[None]:
    """To evaluate and save: inside, the model has the averages, and the optimizers its weights."""
    swap_averages(optimizers)
    try:
        yield
    finally:
        swap_averages(optimizers)

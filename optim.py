"""Optimizers by name, their parameter groups, and the clipping of gradients.

A new optimizer is a function here, its word in OPTIMIZERS, and the same word in TrainConfig.
memory.state_memory estimates what it holds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.linalg import vector_norm
from torch.optim import AdamW, Optimizer

if TYPE_CHECKING:
    from model import GPT
    from support.machine.distributed import World


def adamw(
    model: GPT, embedding_lr: float = 1.0, dtype: Any = None, **options: Any
) -> list[Optimizer]:
    """AdamW (Loshchilov & Hutter 2019), one rate for all. embedding_lr and dtype are Muon's."""
    return [adamw_of(model.parameters(), **options)]


def muon(
    model: GPT,
    learning_rate: float,
    weight_decay: float,
    embedding_lr: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> list[Optimizer]:
    """Muon (Jordan 2024) for the matrices inside the blocks, AdamW for the others.

    Its update is scaled to the size of AdamW's (Liu et al. 2025), so that one learning rate serves
    both. embedding_lr multiplies it for the embeddings, which AdamW updates. dtype: in which Muon
    orthogonalizes.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    inside = {p for p in model.transformer.h.parameters() if p.dim() == 2}
    matrices = [p for p in trained if p in inside]
    others = [p for p in trained if p not in inside]
    optimizers: list[Optimizer] = []
    if others:
        rest = adamw_of(others, learning_rate, weight_decay, **options)
        for group in rest.param_groups:
            group["lr_scale"] = embedding_lr if group["params"][0].dim() >= 2 else 1.0
        optimizers.append(rest)
    if matrices:
        optimizer = Muon(matrices, learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw")
        optimizer.dtype = dtype
        optimizers.append(optimizer)
    return optimizers


OPTIMIZERS: dict[str, Callable[..., list[Optimizer]]] = {"adamw": adamw, "muon": muon}


def adamw_of(
    params: Iterable[nn.Parameter], learning_rate: float, weight_decay: float, **options: Any
) -> AdamW:
    """AdamW for these parameters, fused where the device can. options: betas and eps."""
    params = [p for p in params if p.requires_grad]
    groups = decay_groups(params, weight_decay)
    return AdamW(groups, learning_rate, fused=params[0].device.type in ("cuda", "cpu"), **options)


def decay_groups(params: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's two groups: matrices and embeddings decay, biases and layer norms do not.

    An empty group is left out, because PyTorch cannot load its state.
    """
    groups: list[dict[str, Any]] = [
        dict(params=[p for p in params if p.dim() >= 2], weight_decay=weight_decay),
        dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0),
    ]
    return [group for group in groups if group["params"]]


def describe_optimizers(optimizers: list[Optimizer]) -> str:
    """What each optimizer updates, in words: its tensors, their numbers, and whether they decay."""
    words = []
    for optimizer in optimizers:
        fused = " (fused)" if optimizer.defaults.get("fused") else ""
        groups = [
            f"{len(group['params'])} tensors with {sum(p.numel() for p in group['params']):,} "
            f"numbers {'decay' if group.get('weight_decay') else 'do not'}"
            for group in optimizer.param_groups
        ]
        words.append(f"{type(optimizer).__name__}{fused}, {', '.join(groups)}")
    return "; ".join(words) + " (padding included)"


class Muon(torch.optim.Muon):
    """PyTorch's Muon, but each process orthogonalizes only its share of the matrices."""

    dtype = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for shape in dict.fromkeys(p.shape for p in params):
                matrices = [p for p in params if p.shape == shape]
                stacked = torch.stack([self.direction(p, group["momentum"]) for p in matrices])
                updates = orthogonalize_all(stacked, group)
                for p, update in zip(matrices, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    # torch.optim's match_rms_adamw, the only one used here
                    p.add_(update, alpha=-0.2 * math.sqrt(max(shape)) * group["lr"])

    def direction(self, p: Any, momentum: float) -> torch.Tensor:
        """Nesterov's momentum, in the dtype in which Muon orthogonalizes."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(state["momentum_buffer"], momentum).to(self.dtype)


mesh_of = lru_cache(maxsize=1)(DeviceMesh.from_group)  # it takes a millisecond


def orthogonalize_all(stacked: Any, options: dict[str, Any]) -> torch.Tensor:
    """Orthogonalizes matrices (n, rows, columns), each on one process; shards them as before.

    Products of sharded matrices would need a collective in each iteration, and round differently.
    Under ddp, the processes exchange only results; else the processes of a node share the work.
    """
    if not dist.is_initialized():
        return orthogonalize_share(stacked, options)
    # gloo has no all-to-all, so DTensor gathers instead. Its warning would help no user.
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    if is_whole := not isinstance(stacked, DTensor):
        stacked = DTensor.from_local(stacked, mesh_of(dist.group.WORLD, stacked.device.type))
    shares = stacked.redistribute(placements=[*stacked.placements[:-1], Shard(0)])
    orthogonalize_share(shares.to_local(), options)
    updates = shares.redistribute(placements=stacked.placements)
    return updates.to_local() if is_whole else updates


def orthogonalize_share(stacked: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Orthogonalizes matrices (n, rows, columns) in place.

    A GPU takes up to 64M numbers at once, because launching the products of a small matrix takes
    longer than computing them. Together they may round differently, so a CPU, where any number of
    processes promises the same bits, takes one after another.
    """
    parts: Iterable[torch.Tensor] = stacked
    if stacked.device.type == "cuda":
        parts = stacked.split(max(1, 2**26 // math.prod(stacked.shape[1:])))
    for part in parts:
        part.copy_(orthogonalize(part, options))
    return stacked


def orthogonalize(x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """A matrix, or several (n, rows, columns), with nearly equal singular values.

    Muon's Newton-Schulz iteration: x <- a x + (b A + c A²) x with A = x xᵀ pushes every singular
    value towards 1.
    """
    a, b, c = options["ns_coefficients"]
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
    if is_tall := x.size(-2) > x.size(-1):
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=options["eps"])  # singular values: <= 1
    for _ in range(options["ns_steps"]):
        A = x @ x.mT
        x = multiply(x, multiply(A, A, A, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def clip_gradients(model: nn.Module, largest: float, world: World) -> torch.Tensor:
    """Scales the gradient down to a norm of at most `largest` (0 = any) -> its norm before.

    A tensor's norm is the norm of its rows' norms. One float32 sum over the 124M's embedding is
    0.3% off on a CPU, and off by another amount where processes share it.
    """
    params = [p for p in model.parameters() if p.grad is not None]
    grads: list[Any] = [p.grad for p in params]
    grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    rows = [vector_norm(grad, dim=-1) if grad.dim() > 1 else grad for grad in grads]
    norm = torch.nn.utils.get_total_norm(rows)
    if isinstance(params[0], DTensor):
        copies = world.size / world.shard_group_size
        norm = (world.sum(norm.square()) / copies).sqrt()
    if largest:
        torch.nn.utils.clip_grads_with_norm_(params, largest, norm)
    return norm

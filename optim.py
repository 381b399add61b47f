"""Optimizers by name, their parameter groups, and the clipping of gradients.

A new optimizer is a function here, its word in OPTIMIZERS, and the same word in TrainConfig.
memory.state_memory estimates what it holds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
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
    inside = {p: name for name, p in model.transformer.h.named_parameters() if p.dim() == 2}
    matrices = [p for p in trained if p in inside]
    others = [p for p in trained if p not in inside]
    # c_attn holds the heads' queries, then keys, then values. Orthogonalized as one matrix, queries
    # and keys move a third as far as values. One of another layout stays one matrix.
    parts = {
        p: 3 * model.config.n_head
        for p in matrices
        if inside[p].endswith("attn.c_attn.weight") and len(p) == 3 * model.config.n_embd
    }
    optimizers: list[Optimizer] = []
    if others:
        rest = adamw_of(others, learning_rate, weight_decay, **options)
        for group in rest.param_groups:
            group["lr_scale"] = embedding_lr if group["params"][0].dim() >= 2 else 1.0
        optimizers.append(rest)
    if matrices:
        optimizers.append(Muon(matrices, learning_rate, weight_decay, dtype, parts))
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


# a, b and c of Muon's iterations: the best sequence of three for singular values from 0.01 to 1,
# with 2% of room above, beyond which they diverge. Polar Express (Amsel et al. 2025) finds them.
POLYNOMIALS = [(7.862, -21.672, 15.306), (3.57, -2.568, 0.4863), (2.668, -1.983, 0.4533)]


class Muon(torch.optim.Muon):
    """PyTorch's Muon, but each process orthogonalizes only its share of the matrices.

    parts: how many matrices a parameter holds, one above the other, if not one.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        learning_rate: float,
        weight_decay: float,
        dtype: torch.dtype,
        parts: dict[nn.Parameter, int],
    ):
        super().__init__(params, learning_rate, weight_decay, ns_steps=len(POLYNOMIALS))
        self.param_groups[0]["capturable"] = False  # as AdamW's: a CUDA graph may record `step`
        self.dtype = dtype
        self.parts = parts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            kinds = {p: (p.shape, self.parts.get(p, 1)) for p in params}
            for kind in dict.fromkeys(kinds.values()):
                (rows, columns), parts = kind
                longest = max(rows // parts, columns)
                alike = [p for p in params if kinds[p] == kind]
                stacked = torch.stack([self.direction(p, group["momentum"]) for p in alike])
                updates = orthogonalize_all(stacked, parts)
                scale = -0.2 * math.sqrt(longest)  # what torch.optim calls match_rms_adamw
                for p, update in zip(alike, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    if isinstance(group["lr"], torch.Tensor):  # for CUDA graphs
                        p.addcmul_(update, group["lr"], value=scale)
                    else:
                        p.add_(update, alpha=scale * group["lr"])

    def direction(self, p: Any, momentum: float) -> torch.Tensor:
        """Nesterov's momentum, in the dtype in which Muon orthogonalizes."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(state["momentum_buffer"], momentum).to(self.dtype)


mesh_of = lru_cache(maxsize=1)(DeviceMesh.from_group)  # it takes a millisecond


def orthogonalize_all(stacked: Any, parts: int) -> torch.Tensor:
    """Orthogonalizes parameters (n, rows, columns), each on one process; shards them as before.

    Products of sharded matrices would need a collective in each iteration, and round differently.
    Under ddp, the processes exchange only results; else the processes of a node share the work.
    """
    if not dist.is_initialized():
        return orthogonalize_share(stacked, parts)
    # gloo has no all-to-all, so DTensor gathers instead. Its warning would help no user.
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    if is_whole := not isinstance(stacked, DTensor):
        stacked = DTensor.from_local(stacked, mesh_of(dist.group.WORLD, stacked.device.type))
    shares = stacked.redistribute(placements=[*stacked.placements[:-1], Shard(0)])
    orthogonalize_share(shares.to_local(), parts)
    updates = shares.redistribute(placements=stacked.placements)
    return updates.to_local() if is_whole else updates


def orthogonalize_share(stacked: torch.Tensor, parts: int) -> torch.Tensor:
    """Orthogonalizes parameters (n, rows, columns) in place, each as its matrices.

    A GPU takes up to 64M numbers at once, because launching the products of a small matrix takes
    longer than computing them. Together they may round differently, so a CPU, where any number of
    processes promises the same bits, takes one parameter after another.
    """
    several = stacked.unflatten(1, (parts, -1))  # (n, matrices in each, rows, columns)
    at_once = 1
    if stacked.device.type == "cuda":
        at_once = max(1, 2**26 // math.prod(stacked.shape[1:]))
    for some in several.split(at_once):
        # one alone has two dimensions: in 16 bits, a CPU's mm is twice as fast as its bmm
        matrices = some.flatten(0, 1).squeeze(0)
        some.copy_(orthogonalize(matrices).view_as(some))
    return stacked


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """Matrices (…, rows, columns) -> the same with nearly equal singular values: Muon's update.

    A Newton-Schulz iteration multiplies a wide x by P = aI + bA + cA², where A = x xᵀ has only
    rows × rows numbers. That moves every singular value s to a s + b s³ + c s⁵, nearer to 1. At
    first, none may exceed 1. The root of A's norm is a bound for them, much closer than the norm
    of x, which Muon takes. So, with better polynomials, three iterations do as well as its five.
    """
    if is_tall := x.size(-2) > x.size(-1):
        x = x.mT
    A = x @ x.mT
    norm = A.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-14)
    # in 16 bits, P A P loses small eigenvalues of A: x xᵀ is computed again before the last one
    from_A = len(POLYNOMIALS) if x.dtype == torch.float32 else 2
    x = multiply_steps(A / norm, POLYNOMIALS[:from_A]) @ (x / norm.sqrt())
    if others := POLYNOMIALS[from_A:]:
        x = multiply_steps(x @ x.mT, others) @ x
    return x.mT if is_tall else x


def multiply_steps(A: torch.Tensor, polynomials: Sequence[tuple[float, ...]]) -> torch.Tensor:
    """The product of these iterations' P, from A alone: Gram Newton-Schulz (Dao-AILab 2026).

    P is symmetric, so the next A is (P x)(P x)ᵀ = P A P.
    """
    (a, b, c), *others = polynomials
    multiply_add = torch.addmm if A.dim() == 2 else torch.baddbmm
    P = multiply_add(A, A, A, beta=b, alpha=c)
    P.diagonal(dim1=-2, dim2=-1).add_(a)
    return multiply_steps(P @ A @ P, others) @ P if others else P


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

"""What the processes divide besides the batch, and what that does to a model.

ddp     nothing: the backward pass averages the gradients of all processes
zero1   the optimizer's state, and the weights between updates: gathered in an update's first
        forward pass, gradients summed in its last backward pass. It has ddp's traffic
fsdp    weights and gradients, too: gathered and summed by blocks, in each micro-step

zero1 and fsdp are FSDP2 (Zhao et al. 2023). On several nodes, the processes of each node share one
copy, so that only sums cross the network; nodes of one process each share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from support.base.errors import UsageError
from support.machine.device import limit_nccl

if TYPE_CHECKING:
    from model import GPT
    from support.machine.distributed import World


def is_sharded(model: nn.Module) -> bool:
    """Whether each process has only its shard of the weights."""
    return isinstance(model, FSDPModule)


def local_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this process holds of each parameter."""
    return {name: getattr(p.data, "_local_tensor", p.data) for name, p in model.named_parameters()}


def fsdp_units(model: GPT) -> list[Any]:
    """What FSDP2 gathers at a time: each block, and the rest of the model."""
    return [*model.transformer.h, model]


def place(model: GPT, world: World, sharding: str) -> None:
    """Moves a model to the device; of a sharded one, only this process's shard of each tensor.

    FSDP2 gathers in float32: in 16 bits, layer norms and residual stream would differ. Raises
    UsageError if the nodes have different numbers of processes.
    """
    if world.size == 1 or sharding == "ddp":
        model.to(world.device)
        return
    here = world.local_size
    if world.any(world.broadcast(here) != here):
        problem = f"{here} of {world.size} processes are on this node, but not as many on each"
        raise UsageError(f"--sharding {sharding}: {problem}: start equal numbers, or use ddp")
    copies = world.size // world.shard_group_size
    shape = (copies, world.shard_group_size) if copies > 1 else (world.shard_group_size,)
    names = ("copies", "shards")[-len(shape) :]
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        limit_nccl(group, world.device)
    for unit in fsdp_units(model):
        fully_shard(unit, mesh=mesh)
    if copies > 1:  # unlike DDP, fully_shard leaves each node what it drew: by CPU, draws differ
        for weight in local_weights(model).values():
            torch.distributed.broadcast(weight, group=mesh.get_group("copies"), group_src=0)
    # the first forward finishes the set-up, and must be of the whole model
    x = torch.zeros(1, 1, dtype=torch.int64, device=world.device)
    with torch.no_grad():
        model(x, x)
    reshard(model, sharding)


def reshard(model: GPT, sharding: str) -> None:
    """Leaves each process its shard of the weights. fsdp gathers a block only for its turn."""
    for unit in fsdp_units(model):
        unit.set_reshard_after_forward(sharding == "fsdp" and unit is not model, recurse=False)
        unit.reshard()


@contextmanager
def unsharded(model: GPT, sharding: str) -> Iterator[None]:
    """For evaluation: inside, each process holds all weights."""
    units = fsdp_units(model) if is_sharded(model) else []
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        if units:
            reshard(model, sharding)


def wrap(model: GPT, world: World) -> nn.Module:
    """The model whose backward pass averages the gradients over all processes."""
    if world.size == 1 or is_sharded(model):
        return model
    trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # After its first backward pass, DDP divides the gradients into other buckets, which three or
    # more processes sum in another order. A resumed run must not have a first one again.
    x = torch.zeros(1, 1, dtype=torch.int64, device=world.device)
    with torch.compiler.set_stance("force_eager"):  # this shape would be compiled, too
        trained(x, x)[1].backward()
    model.zero_grad(set_to_none=True)
    return trained


def sync_gradients(trained: nn.Module, sharding: str, is_last: bool) -> None:
    """Says before a forward pass whether its backward pass is an update's last and averages."""
    if isinstance(trained, DistributedDataParallel):
        trained.require_backward_grad_sync = is_last
    elif isinstance(trained, FSDPModule) and sharding == "zero1":
        trained.set_requires_gradient_sync(is_last)
        trained.set_reshard_after_backward(is_last)  # the next update gathers its new weights
    elif isinstance(trained, FSDPModule):
        # every micro-step reduce-scatters, so no process keeps all gradients; sums over nodes wait
        trained.set_requires_all_reduce(is_last)

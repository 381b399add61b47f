"""One process or many. Only this file touches the process group of `torch.distributed`.

In one process, no communication takes place.
"""

import os
import re
import signal
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import _muon

from support.common import UserError
from support.device import eager, pick_device


class World:
    """The processes of this run, as torchrun starts them. This one is `rank` of `size`.

    device: auto (a GPU if there is one, else the CPU), cuda, mps or cpu. sharding: what the
    processes divide besides the batch: nothing (ddp), or weights, gradients and the optimizer's
    state. fsdp gathers the weights of a block when its turn comes, and sums its gradients in each
    micro-step. zero1 gathers all weights in an update's first forward pass, and sums gradients in
    its last backward pass: it has ddp's traffic, and in between it divides the moments alone.
    On several nodes, the processes of each node divide one copy: sums alone cross the network.
    Use it as a context manager: it leaves the process group at the end, so that no rank hangs or
    complains at exit. Raises UserError for a device that is not there.
    """

    def __init__(self, device: str = "auto", sharding: str = "ddp"):
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.is_main = self.rank == 0
        self.sharding = sharding if self.size > 1 else "none"
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.shards = local_size if local_size > 1 else self.size  # processes that share one copy
        self.device = self.claim_device(device)
        if self.size > 1:
            self.join()

    @property
    def divides(self) -> bool:
        """Whether the processes divide the weights among themselves."""
        return self.sharding in ("zero1", "fsdp")

    def claim_device(self, name: str) -> torch.device:
        """The device of this process; on a CPU, its share of the cores."""
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if self.size > 1 and name == "auto" and not torch.cuda.is_available():
            name = "cpu"  # several processes on a Mac: gloo has no MPS
        device = pick_device(name)
        if device.type == "cuda":
            gpus = torch.cuda.device_count()
            if local_size > gpus:
                raise UserError(
                    f"{local_size} processes on a machine with {gpus} GPUs: "
                    f"use --nproc_per_node={gpus}"
                )
            device = torch.device("cuda", local_rank)
            if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # sizes that change leave fewer holes
                os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
            torch.cuda.set_device(device)
        elif self.size > 1:  # torchrun gives each process one thread; share the cores instead
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
        return device

    def join(self) -> None:
        """Meets the other processes."""
        store, _, _ = next(dist.rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # torchrun's store outlives the workers that it restarts, and so would the dead
            # workers' addresses. Several nodes count their restarts apart: there,
            # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun begin a new store.
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            store = dist.PrefixStore(f"start {restarts}", store)
        on_gpu = self.device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            device_id=self.device if on_gpu else None,
        )

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """After an error, calls no collective: other processes may be in a different one.

        The process prints what happened and exits (common.run_script). torchrun ends the others.
        """
        if error is None:
            self.close()
        lost = re.search("onnection (closed|reset|refused)", str(error))
        if isinstance(error, RuntimeError) and lost:
            raise UserError(
                f"rank {self.rank}: another process is gone, see its own message ({error})"
            ) from None

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- the model

    def place(self, model) -> None:
        """Moves the model to the device; of a divided one, only this process's part of each tensor.

        Call it before the optimizer is made. FSDP2 (Zhao et al. 2023) gathers weights in float32:
        gathered in 16 bits, layer norms and residual stream would differ.
        """
        if not self.divides:
            model.to(self.device)
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        copies = self.size // self.shards
        shape = (copies, self.shards) if copies > 1 else (self.shards,)
        names = ("copies", "shards")[-len(shape) :]
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        for part in parts_of(model):
            fully_shard(part, mesh=mesh)
        # the first forward finishes the set-up, and must be of the whole model
        x = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            model(x, x)
        self.keep_own_part(model)
        _muon._zeropower_via_newtonschulz = orthogonalize

    def keep_own_part(self, model) -> None:
        """Leaves each process its part of the weights. fsdp gathers a block only for its turn."""
        for part in parts_of(model):
            for_its_turn = self.sharding == "fsdp" and part is not model
            part.set_reshard_after_forward(for_its_turn, recurse=False)
            part.reshard()

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model whose backward pass averages the gradients over all processes."""
        if self.size == 1 or self.divides:
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
        # After its first backward pass, DDP divides the gradients into other buckets, which three
        # or more processes sum in another order. A resumed run must not have a first one again.
        x = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with eager():
            wrapped(x, x)[1].backward()
        model.zero_grad(set_to_none=True)
        return wrapped

    def sync_gradients(self, model, on: bool) -> None:
        """Sets whether the next backward pass is an update's last, and averages the gradients.

        Call it before the forward, where DDP decides it. fsdp divides them in every micro-step: to
        wait for the last one, each process would have to hold all gradients whole. Only the sum
        over the nodes waits.
        """
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = on
        elif self.sharding == "zero1":
            model.set_requires_gradient_sync(on)
            model.set_reshard_after_backward(on)  # the next update gathers its new weights
        elif self.sharding == "fsdp":
            model.set_requires_all_reduce(on)

    @contextmanager
    def whole(self, model):
        """For evaluation: inside, processes may call the model unequally often, but at least once.

        It first gathers the weights of a divided model, and they stay until the end.
        """
        parts = parts_of(model) if self.divides else []
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            if self.divides:
                self.keep_own_part(model)

    # -- what the processes tell each other

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x summed over all processes, the same on each."""
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def warm_up(self) -> None:
        """Makes a first sum: NCCL takes its memory for it, and keeps that."""
        self.sum(torch.zeros(2**23, device=self.device))

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum(x) / self.size

    def any(self, flag: bool) -> bool:
        """Whether any process sets the flag. It travels between CPUs: no GPU waits for it."""
        return self.sum(torch.tensor(int(flag))).item() > 0

    def share(self, value):
        """Rank 0's value, on every process."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def agents(self) -> list[str]:
        """The log folder of torchrun on each node, to tell this start of torchrun from another.

        Its name is random, and stays when torchrun restarts the processes. Empty without torchrun.
        """
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        names = [error_file.rpartition("/attempt_")[0]] * self.size
        if self.size > 1:
            dist.all_gather_object(names, names[0])
        return sorted(set(names) - {""})

    @contextmanager
    def together(self):
        """A mistake or a failing disk inside, on one process, is a UserError on every process."""
        problem = ""
        try:
            yield
        except (UserError, OSError) as error:
            problem = str(error)
        if self.any(bool(problem)):
            raise UserError(problem or f"rank {self.rank}: another process has failed and says why")


def parts_of(model) -> list:
    """What is gathered at a time: each block, and the rest of the model."""
    return [*model.transformer.h, model]


def orthogonalize(update, *options, plain=_muon._zeropower_via_newtonschulz):
    """What Muon does to a matrix, here of a matrix that the processes may divide.

    It gathers the matrix once, in the bfloat16 in which Muon computes. Products of divided matrices
    would need a collective in each of the five iterations, and round otherwise than one process.
    """
    if not isinstance(update, DTensor):
        return plain(update, *options)
    half: Any = update.bfloat16()
    whole = plain(half.full_tensor(), *options)
    return distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)


# -- signals


class Interrupted(Exception):
    """SIGTERM or SIGINT came. The unfinished update or evaluation is dropped."""


class Stop:
    """Remembers SIGTERM and SIGINT, and raises Interrupted on all processes at the same point.

    A second SIGINT ends at once. A second SIGTERM does not: SLURM sends one, torchrun another.
    """

    def __init__(self, world: World):
        self.world = world
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.remember)

    def remember(self, number, _frame) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        if self.world.any(self.asked):
            raise Interrupted

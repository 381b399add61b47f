"""One process or many. Only this file touches the process group of `torch.distributed`.

In one process, no communication takes place.
"""

import os
import re
import signal
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support.common import UserError
from support.device import pick_device


class World:
    """The processes of this run, as torchrun starts them. This one is `rank` of `size`.

    device: auto (a GPU if there is one, else the CPU), cuda, mps or cpu. sharding: what the
    processes divide besides the batch: nothing (ddp), the optimizer's state (zero1), or the weights
    and gradients too (fsdp). Use it as a context manager: it leaves the process group at the end,
    so that no rank hangs or complains at exit. Raises UserError for a device that is not there.
    """

    def __init__(self, device: str = "auto", sharding: str = "ddp"):
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.is_main = self.rank == 0
        self.sharding = sharding if self.size > 1 else "none"
        self.device = self.claim_device(device)
        if self.size > 1:
            self.join()

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

    # -- the model and its optimizer

    def place(self, model) -> None:
        """Moves the model to the device; with fsdp only this process's part of each tensor.

        Call it before the optimizer is made. fsdp gathers each block when its turn comes (Zhao et
        al. 2023), in float32: gathered in 16 bits, layer norms and residual stream would differ.
        """
        if self.sharding != "fsdp":
            model.to(self.device)
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.size,))
        for part in parts_of(model):
            fully_shard(part, mesh=mesh)
        # the first forward finishes the set-up, and must be of the whole model
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        model.reshard()

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model whose backward pass averages the gradients over all processes."""
        if self.size == 1 or self.sharding == "fsdp":
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def sync_gradients(self, model: torch.nn.Module, on: bool) -> None:
        """Sets whether the next backward pass averages the gradients.

        Call it before the forward, where DDP decides it. fsdp averages in every micro-step: to
        wait for the last one, each process would have to hold all gradients whole.
        """
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = on

    def make_optimizer(
        self, params, optimizer_class: type[torch.optim.Optimizer], **defaults
    ) -> torch.optim.Optimizer:
        """An optimizer. With zero1, each process keeps the state of its part of the parameters."""
        if self.sharding == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(params, optimizer_class, **defaults)
        return optimizer_class(params, **defaults)

    @contextmanager
    def whole(self, model):
        """For evaluation: inside, processes may call the model unequally often, but at least once.

        With fsdp, it first gathers all weights, and they stay until the end.
        """
        parts = parts_of(model) if self.sharding == "fsdp" else []
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.set_reshard_after_forward(part is not model, recurse=False)
                part.reshard()

    # -- what the processes tell each other

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x summed over all processes, the same on each."""
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

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
    """What fsdp gathers at a time: each block, and the rest of the model."""
    return [*model.transformer.h, model]


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

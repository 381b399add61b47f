"""One process or many: the only file that knows `torch.distributed`'s process group. In one process everything is a no-op."""

import os
import re
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tokenizer import UserError


class World:
    """The processes of this run, as torchrun starts them: `rank` of `size`, and the `device` that this one computes on.

    device: auto (a GPU where there is one, else the CPU), cuda, mps or cpu. sharding: what the processes divide among
    them besides the batch: nothing (ddp), the optimizer's state (zero1), or weights and gradients too (fsdp). Use it as a
    context manager: the process group is destroyed at the end whatever happens, so that no rank hangs or complains at
    exit. Raises UserError for a device that is not there.
    """

    def __init__(self, device: str = "auto", sharding: str = "ddp"):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.is_main = self.rank == 0
        self.sharding = sharding if self.size > 1 else "none"
        several_on_a_mac = self.size > 1 and device == "auto" and not torch.cuda.is_available()  # gloo has no MPS
        self.device = pick_device("cpu" if several_on_a_mac else device)
        if self.device.type == "cuda":
            if local_size > torch.cuda.device_count():
                raise UserError(
                    f"{local_size} processes on a machine with {torch.cuda.device_count()} GPUs: "
                    f"use --nproc_per_node={torch.cuda.device_count()}"
                )
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
        elif self.size > 1:  # torchrun allows one thread a process; share the cores instead
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
        if self.size > 1:
            on_gpu = self.device.type == "cuda"
            store, _, _ = next(dist.rendezvous("env://"))
            if os.environ.get("GROUP_WORLD_SIZE") == "1":
                # torchrun's store outlives the workers it restarts, and so would the dead ones' addresses in it; with several
                # nodes, which count their restarts apart, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun begin a new one
                store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
            backend, device_id = ("cpu:gloo,cuda:nccl", self.device) if on_gpu else ("gloo", None)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, device_id=device_id)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close()
        if isinstance(error, RuntimeError) and re.search("onnection (closed|reset|refused)", str(error)):
            raise UserError(f"rank {self.rank}: another process is gone, see its own message ({error})") from None

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def place(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Moves the model to the device; with fsdp only this process's part of each tensor. Before the optimizer is made.

        fsdp gathers a block when it is its turn, in `dtype`, and averages gradients in float32 (Zhao et al. 2023).
        """
        if self.sharding != "fsdp":
            model.to(self.device)
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=dtype if dtype != torch.float32 else None, reduce_dtype=torch.float32)
        mesh = init_device_mesh(self.device.type, (self.size,))
        for part in (*model.transformer.h, model):  # what the blocks leave: embeddings and the last layer norm
            fully_shard(part, mesh=mesh, mp_policy=policy)
        with torch.no_grad():  # the first forward finishes the set-up, and must be one of the whole model
            model(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        model.reshard()

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model whose backward pass averages the gradients over all processes."""
        if self.size == 1 or self.sharding == "fsdp":
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def sync_gradients(self, model: torch.nn.Module, on: bool) -> None:
        """Whether the next forward and backward average the gradients; DDP decides it in the forward, so call it before.

        fsdp averages in every micro-step: a process that waited for the last one would have to hold all gradients whole.
        """
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = on

    def make_optimizer(self, params, optimizer_class: type[torch.optim.Optimizer], **defaults) -> torch.optim.Optimizer:
        """An optimizer; with zero1 each process keeps the state of its part of the parameters and shares the result."""
        if self.sharding == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(params, optimizer_class, **defaults)
        return optimizer_class(params, **defaults)

    @contextmanager
    def whole(self, model: torch.nn.Module):
        """Within it each process can call the model as often as it likes: with fsdp all of it is gathered before."""
        parts = [*model.transformer.h, model] if self.sharding == "fsdp" else []
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.set_reshard_after_forward(part is not model, recurse=False)
                part.reshard()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x summed over all processes, the same on each."""
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum(x) / self.size

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process: the same answer on each. It travels beside the GPU's own work."""
        return self.sum(torch.tensor(int(flag))).item() > 0

    def barrier(self) -> None:
        """Waits until every process has come here."""
        self.any(False)


def pick_device(name: str = "auto") -> torch.device:
    """A device by name; auto is the accelerator that is there (CUDA, or MPS on Apple silicon), else the CPU."""
    here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name not in ("auto", "cpu", here.type):
        raise UserError(f"device {name!r} is not available here: use {' or '.join(dict.fromkeys([here.type, 'cpu']))}")
    return here if name == "auto" else torch.device(name)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's where Linux tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo)
    return f"{found[1] if found else device.type}, {os.cpu_count()} cores"

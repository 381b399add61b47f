"""One process or many: the only file that knows `torch.distributed`'s process group. In one process everything is a no-op."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tokenizer import UserError


class World:
    """The processes of this run, as torchrun starts them: `rank` of `size`, and the `device` that this one computes on.

    device: auto (a GPU where there is one, else the CPU), cuda, mps or cpu. Use it as a context manager: the process group
    is destroyed at the end whatever happens, so that no rank hangs or complains at exit. Raises UserError for a device
    that is not there.
    """

    def __init__(self, device: str = "auto"):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.is_main = self.rank == 0
        self.device = pick_device(device)
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
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", device_id=self.device if on_gpu else None)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model whose backward pass averages the gradients over all processes."""
        if self.size == 1:
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True)

    def sync_gradients(self, model: torch.nn.Module, on: bool) -> None:
        """Whether the next forward and backward average the gradients; DDP decides it in the forward, so call it before."""
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = on

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
        self.sum(torch.zeros(1, device=self.device))


def pick_device(name: str = "auto") -> torch.device:
    """A device by name; auto is the accelerator that is there (CUDA, or MPS on Apple silicon), else the CPU."""
    here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name not in ("auto", "cpu", here.type):
        raise UserError(f"device {name!r} is not available here: use {' or '.join(dict.fromkeys([here.type, 'cpu']))}")
    return here if name == "auto" else torch.device(name)

"""Who this process is, and what the processes tell each other. One process tells nothing.

Only this file reads torchrun's variables and touches the process group of `torch.distributed`.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from support.common import UsageError, UserError, counted, say
from support.device import pick_device

T = TypeVar("T")


def several() -> bool:
    """Whether torchrun started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


class World:
    """The processes of this run, as torchrun starts them. This one is `rank` of `size`.

    device: see pick_device. As a context manager it leaves the process group at the end, so that no
    rank hangs or complains at exit.
    """

    def __init__(self, device: str = "auto"):
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))  # on this node
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.is_main = self.rank == 0
        # Sharding stays inside a node, so that only sums cross the network.
        self.shard_group_size = self.local_size if self.local_size > 1 else self.size
        self.device = self.claim_device(device)
        if self.size > 1:
            self.join()

    def claim_device(self, name: str) -> torch.device:
        """The device of this process; on a CPU, its share of the cores."""
        device = pick_device(name)
        if self.size > 1 and name == "auto" and device.type != "cuda":
            device = torch.device("cpu")  # several processes on a Mac: gloo has no MPS
        if device.type == "cuda":
            gpus = torch.cuda.device_count()
            if self.local_size > gpus:
                problem = f"{self.local_size} processes on a machine with {counted(gpus, 'GPU')}"
                raise UserError(f"{problem}: use --nproc_per_node={gpus}")
            device = torch.device("cuda", self.local_rank)
            if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # sizes that change leave fewer holes
                os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
            torch.cuda.set_device(device)
        elif self.size > 1:  # torchrun gives each process one thread; share the cores instead
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.local_size))
        return device

    def join(self) -> None:
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
        self.limit_nccl(dist.group.WORLD)

    def limit_nccl(self, group: Any) -> None:
        """Ends a stuck collective of a group's GPUs after 10 minutes.

        gloo keeps its 30, because processes wait there for rank 0's downloads.
        """
        if self.device.type == "cuda":
            nccl = group._get_backend(self.device)
            nccl = getattr(nccl, "wrapped_pg", nccl)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
            nccl._set_default_timeout(timedelta(minutes=10))

    def __enter__(self) -> "World":
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        """After an error, calls no collective: other processes may be in a different one.

        The process prints what happened and exits (common.run_script). torchrun ends the others.
        """
        if error is None:
            self.close()
        if isinstance(error, UsageError) and self.local_rank:
            time.sleep(10)  # all raise it, one on each node prints it

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
            # DTensor's caches keep the group, so gloo's threads live on. One that lets go of the
            # last tensor only while Python ends would abort it (PyTorch issue 190489).
            time.sleep(0.1)

    @property
    def launcher(self) -> str:
        """The command that starts this many processes on this many nodes."""
        if self.size == 1:
            return "python"
        nodes = self.size // self.local_size
        if nodes == 1:
            return f"torchrun --standalone --nproc_per_node={self.size}"
        processes = f"--nnodes={nodes} --nproc_per_node={self.local_size}"
        return f"torchrun {processes} --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"

    def say(self, message: str) -> None:
        if self.is_main:
            say(message)

    # -- what the processes tell each other

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x summed over all processes, the same on each."""
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        """Whether any process sets the flag. It travels between CPUs: no GPU waits for it."""
        return self.sum(torch.tensor(int(flag))).item() > 0

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every process."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def warm_up_nccl(self) -> None:
        """Makes a first sum, for which NCCL allocates the memory that it then keeps."""
        self.sum(torch.zeros(2**23, device=self.device))

    def launches(self) -> list[str]:
        """The log folder of torchrun on each node, to tell this start of torchrun from another.

        Its name is random, and stays when torchrun restarts the processes. Empty without torchrun.
        """
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        names = [error_file.rpartition("/attempt_")[0]] * self.size
        if self.size > 1:
            dist.all_gather_object(names, names[0])
        return sorted(set(names) - {""})

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """A UserError inside, on one process, is one on every process."""
        problem = ""
        try:
            yield
        except UserError as error:
            problem = str(error)
        if self.any(bool(problem)):
            raise UserError(problem or self.elsewhere())

    def elsewhere(self) -> str:
        return f"rank {self.rank}: another process has failed and says why"


class Interrupted(UserError):
    """The run ends early. The message says why, unless a signal asked for it."""


class Stop:
    """Ends a run on all processes at the same point, by Interrupted.

    `ask` begins to add up what the processes want, and `heed` waits for the sums; GPUs compute in
    between. `check` does both. After `listen`, SIGTERM and SIGINT ask for an end. A second SIGINT
    ends at once; a second SIGTERM does not, because SLURM sends one and torchrun another.
    """

    def __init__(self, world: World):
        self.world = world
        self.interrupted = False
        self.problem = ""  # of this process
        self.late = False  # by this process's clock, a checkpoint is due
        self.any_late = False
        self.wishes = torch.zeros(3)
        self.sum: Any = None

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.remember)

    def remember(self, number: int, _frame: FrameType | None) -> None:
        if self.interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.interrupted = True

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """A UserError inside, on one process, ends the run on all that are asked after it."""
        try:
            yield
        except UserError as error:
            self.problem = str(error)

    def ask(self) -> None:
        self.wishes = torch.tensor([self.interrupted, bool(self.problem), self.late]).int()
        self.sum = dist.all_reduce(self.wishes, async_op=True) if self.world.size > 1 else None

    def heed(self) -> None:
        if self.sum:
            self.sum.wait()
        interrupted, problems, self.any_late = map(bool, self.wishes.tolist())
        if problems:
            raise Interrupted(self.problem or self.world.elsewhere())
        if interrupted:
            raise Interrupted

    def check(self) -> None:
        self.ask()
        self.heed()

"""Who this process is, and what the processes tell each other. One process tells nothing.

Only this file reads torchrun's variables, and makes and ends the process group.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from support.base.console import say
from support.base.errors import UsageError, UserError
from support.base.process import as_typed, beside_script
from support.machine.device import claim_device, limit_nccl

T = TypeVar("T")


def under_torchrun() -> bool:
    """Whether torchrun started this process beside others."""
    return os.environ.get("WORLD_SIZE", "") not in ("", "1")


# what torchrun gives each of its processes
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
VARIABLES = (*NUMBERS, "MASTER_ADDR", "MASTER_PORT")


def start_world(device: str = "auto") -> World:
    """Joins the processes that torchrun started, each with its own device: see claim_device."""
    numbers = read_numbers()
    claimed = claim_device(device, numbers.get("local_rank", 0), numbers.get("local_size", 1))
    return make_world(claimed, numbers)


def meet() -> World:
    """The same processes over gloo alone, before any of them has touched a GPU."""
    return make_world(torch.device("cpu"), read_numbers())


def make_world(device: torch.device, numbers: dict[str, int]) -> World:
    world = World(device, **numbers)
    if numbers:
        join(world)
    return world


def read_numbers() -> dict[str, int]:
    """World's numbers, as torchrun gives them; none for a single process.

    Raises UserError if only some of torchrun's variables are set, as by a cluster or a shell.
    """
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if not under_torchrun() and given.get("RANK", "0") == "0":
        return {}
    wrong = [f"{name} is {given[name]!r}" for name in NUMBERS if not given.get(name, "0").isdigit()]
    wrong += [f"{name} is not set" for name in VARIABLES if name not in given]
    if wrong:
        values = " ".join(f"{name}={value}" for name, value in given.items())
        raise UserError(f"{values}, but {', '.join(wrong)}: start with torchrun, or unset them all")
    rank, size, local_rank, local_size = (int(given[name]) for name in NUMBERS)
    return dict(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        shard_group_size=local_size if local_size > 1 else size,
    )


@cache  # of all groups that this process makes, because rank 0 may be its server
def find_store() -> Any:
    """Where the processes find each other."""
    store, _, _ = next(dist.rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        return store
    # torchrun's store outlives the workers that it restarts, and so would the dead workers'
    # addresses. Several nodes count their restarts apart: there,
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun begin a new store.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return dist.PrefixStore(f"start {restarts}", store)


group_numbers = count()


def join(world: World) -> None:
    """Makes the process group of all processes. They may make another after they have left it."""
    store = dist.PrefixStore(f"group {next(group_numbers)}", find_store())
    on_gpu = world.device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        device_id=world.device if on_gpu else None,
    )
    limit_nccl(dist.group.WORLD, world.device)


@dataclass
class World:
    """The processes of a run. This one is `rank` of `size`, and computes on `device`.

    As a context manager it leaves the process group at the end, so that no rank hangs or complains
    at exit.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this node
    local_size: int = 1
    shard_group_size: int = 1  # processes that share one copy: a node's, so only sums leave it

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> World:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        """After an error, calls no collective: other processes may be in a different one.

        The process prints what happened and exits (console.run_script). torchrun ends the others.
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
            return as_typed("python")
        torchrun = as_typed("torchrun")
        nodes = self.size // self.local_size
        if nodes == 1:
            return f"{torchrun} --standalone --nproc_per_node={self.size}"
        processes = f"--nnodes={nodes} --nproc_per_node={self.local_size}"
        return f"{torchrun} {processes} --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"

    def command(self, args: list[str]) -> str:
        """What one types to have this many processes train with these arguments."""
        return f"{self.launcher} {beside_script('train_gpt2.py')} {shlex.join(args)}".rstrip()

    def say(self, message: str) -> None:
        if self.is_main:
            say(message)

    # -- what the processes tell each other

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x over all processes, in place. Returns it, the same on each."""
        if self.size > 1:
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
        own = None
        try:
            yield
        except UserError as error:
            own = error
        if self.any(own is not None):
            raise own or UserError(self.elsewhere())

    def elsewhere(self) -> str:
        return f"rank {self.rank}: another process has failed and says why"


class Interrupted(UserError):
    """The run ends early. The message says why, unless a signal asked for it."""


class Stop:
    """Ends a run on all processes at the same point, by Interrupted, or has all save a checkpoint.

    `start_vote` begins to add up what the processes want, and `read_vote` waits for the sums; GPUs
    compute in between. `vote` does both. After `listen`, SIGTERM, SIGINT and SIGHUP, of a terminal
    that closes, ask for an end. A second SIGINT ends at once; a second SIGTERM does not: SLURM
    sends one and torchrun another.
    """

    def __init__(self, world: World):
        self.world = world
        self.interrupted = False
        self.problem = ""  # of this process
        self.checkpoint_due = False  # by this process's clock, a checkpoint is due
        self.any_checkpoint_due = False
        self.votes = torch.zeros(3)
        self.sum: Any = None

    def listen(self) -> None:
        numbers = [signal.SIGTERM, signal.SIGINT]
        # `nohup` ignores SIGHUP, and so the run goes on; but torchrun ends by it, and passes it on
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        if not nohup or "TORCHELASTIC_RUN_ID" in os.environ:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, self.remember)

    def remember(self, number: int, _frame: FrameType | None) -> None:
        if self.interrupted and number == signal.SIGINT:
            os._exit(128 + signal.SIGINT)  # an exception would wait for the thread that writes
        self.interrupted = True

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """A UserError inside, on one process, ends the run on all that are asked after it."""
        try:
            yield
        except UserError as error:
            self.problem = str(error)

    def start_vote(self) -> None:
        votes = [self.interrupted, bool(self.problem), self.checkpoint_due]
        self.votes = torch.tensor(votes).int()
        self.sum = dist.all_reduce(self.votes, async_op=True) if self.world.size > 1 else None

    def read_vote(self) -> None:
        if self.sum:
            self.sum.wait()
        interrupted, problems, self.any_checkpoint_due = map(bool, self.votes.tolist())
        if problems:
            raise Interrupted(self.problem or self.world.elsewhere())
        if interrupted:
            raise Interrupted

    def vote(self) -> None:
        self.start_vote()
        self.read_vote()

"""Compares the collectives of an update with a table: 8 processes, and two nodes of 8.

This process is rank 0, with real tensors on the CPU. The others are PyTorch's fake process group,
which sends nothing. Collectives depend on neither the device nor compilation nor the micro-batch.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import TrainConfig, parse_command_line
from model import GPT, GPTConfig
from support.machine import distributed, sharding
from support.machine.distributed import Stop, start_world
from train_gpt2 import build_optimizers, train_step

# -- the table: how many of each kind an update of 2 micro-steps makes, and their bytes. The bytes
# are of whole tensors: of 8 GPUs in a ring, each sends 7/8 of them, or twice that to all-reduce.

WEIGHTS = 4 * 124_475_904  # bytes of the 124M in float32, with the padding of the embedding
BLOCKS = 4 * 85_054_464  # of the 12 blocks: FSDP2's 13 units are these and the rest of the model
STOP = {"all-reduce of Stop's votes": (2, 2 * 12)}  # behind each backward pass, between CPUs
LOSS = {"all-reduce of a number": (1, 4)}
LOSS_AND_NORM = {"all-reduce of a number": (2, 8)}
# ddp sums in the last backward pass, in buckets of 25 MB or one tensor
DDP = STOP | LOSS | {"all-reduce": (13, WEIGHTS)}
# zero1 gathers in the first forward pass, and sums in the last backward pass
ZERO1 = STOP | LOSS_AND_NORM | {"all-gather": (13, WEIGHTS), "reduce-scatter": (13, WEIGHTS)}
# fsdp does so in each micro-step, and its backward passes gather the blocks again
FSDP = STOP | LOSS_AND_NORM | {"all-gather": (2 * (13 + 12), 2 * (WEIGHTS + BLOCKS))}
FSDP |= {"reduce-scatter": (2 * 13, 2 * WEIGHTS)}
NODES = {"all-reduce": (13, WEIGHTS // 8)}  # each GPU's shard, in the last backward pass
EXPECTED = {  # by --sharding and nodes of 8 GPUs
    ("ddp", 1): DDP,
    ("zero1", 1): ZERO1,
    ("fsdp", 1): FSDP,
    ("ddp", 2): DDP,
    ("zero1", 2): ZERO1 | NODES,
    ("fsdp", 2): FSDP | NODES,
}
# In a run's first update, DDP's rank 0 also tells the order of its buckets.
FIRST = {"ddp": {"broadcast": (2, 648)}, "zero1": {}, "fsdp": {}}

KINDS = dict(allreduce_="all-reduce", _allgather_base_="all-gather", broadcast_="broadcast")
KINDS |= dict(_reduce_scatter_base_="reduce-scatter")
sent: dict[str, tuple[int, int]] = {}  # in the present update: their number and bytes, by kind


def note(kind: str, tensor: torch.Tensor) -> None:
    if kind == "all-reduce" and tensor.numel() <= 3:
        kind += " of a number" if tensor.is_floating_point() else " of Stop's votes"
    number, size = sent.get(kind, (0, 0))
    sent[kind] = (number + 1, size + tensor.nbytes)


class NoteCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it comes again, as its local tensors and their collectives
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._overloadpacket.__name__
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            note(KINDS.get(name, name), max(tensors, key=lambda x: x.nbytes))
        return out


class NotedDDP(DistributedDataParallel):
    """DDP with a hook instead of its all-reduce, because the fake group returns no result."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_comm_hook(None, self.note_bucket)

    @staticmethod
    def note_bucket(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        note("all-reduce", bucket.buffer())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def make_updates(config: TrainConfig, nodes: int) -> list[dict]:
    """The collectives of a run's first two updates."""
    os.environ.update(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="8", WORLD_SIZE=str(8 * nodes))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")
    world = start_world("cpu")
    model = GPT(GPTConfig(**GPTConfig.fields_from(config)))
    sharding.place(model, world, config.sharding)
    trained = sharding.wrap(model, world)
    optimizers = build_optimizers(config, model, torch.bfloat16)
    x, y = torch.zeros(2, 1, 16, dtype=torch.int64)
    loader = SimpleNamespace(wait=lambda: None, next_batch=lambda: (x, y))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    parts = dict(model=trained, optimizers=optimizers, scaler=scaler, loader=loader, world=world)
    parts |= dict(stop=Stop(world), dtype=torch.bfloat16, strategy=config.sharding)
    updates = []
    for _ in range(2):
        sent.clear()
        with NoteCollectives():
            train_step(**parts, grad_accum_steps=2, lr=1e-3, grad_clip=config.grad_clip)
        updates.append(dict(sent))
    world.close()
    return updates


def make_row(update: dict) -> dict[str, str]:
    """A row of the page's table."""
    row = {f"{kind}s": "" for kind in ("all-gather", "reduce-scatter", "all-reduce")}
    row |= {f"{k}s": f"{n}, {b / 1e6:,.0f} MB" for k, (n, b) in update.items() if " " not in k}
    return row | {"of numbers": f"{sum(n for k, (n, _) in update.items() if ' ' in k)}"}


def main(result: Path) -> None:
    """Writes rows of the page's table and findings to `result`."""
    distributed.join = lambda world: dist.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=world.size
    )
    sharding.DistributedDataParallel = NotedDDP
    rows = {}
    problems = []
    for (strategy, nodes), expected in EXPECTED.items():
        name = f"{strategy}, {nodes} × 8 GPUs"
        config = parse_command_line(["--sharding", strategy])
        first, second = make_updates(config, nodes)
        tables = {"first": (first, expected | FIRST[strategy]), "second": (second, expected)}
        for which, (made, table) in tables.items():
            if made != table:
                more, less = made.items() - table.items(), table.items() - made.items()
                problem = f"makes {sorted(more)} (number, bytes); the table says {sorted(less)}"
                problems.append(f"{name}, the {which} update {problem}")
        rows[name] = make_row(second)
    result.write_text(json.dumps([rows, problems]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

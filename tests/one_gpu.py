"""train_gpt2.py, but torchrun's processes share one GPU and meet over gloo: NCCL refuses that."""

from unittest.mock import patch

import torch
import torch.distributed as dist

import train_gpt2
from support.base.console import run_script
from support.machine import distributed, sharding

claim_device, join = distributed.claim_device, dist.init_process_group


def main(args: list[str]) -> None:
    both = dict(limit_nccl=lambda *_: None)
    own: dict = dict(device_id=None)
    first = dict(claim_device=lambda name, _rank, local_size: claim_device(name, 0, local_size))
    with (
        patch.object(torch.cuda, "device_count", lambda: 2),
        patch.object(
            dist, "init_process_group", lambda _backend, **how: join("gloo", **(how | own))
        ),
        patch.multiple(distributed, **first, **both),
        patch.multiple(sharding, **both),
    ):
        train_gpt2.main(args)


if __name__ == "__main__":
    run_script(main, at_once=True)

"""train_gpt2.py, but torchrun's processes share one GPU and meet over gloo: NCCL refuses that."""

from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import train_gpt2
from support.base.console import run_script
from support.machine import distributed, sharding

claim_device, join = distributed.claim_device, dist.init_process_group


def join_over_gloo(_nccl: str, device_id: object, **how: Any) -> None:
    join("gloo", **how)


def main(args: list[str]) -> None:
    unlimited = dict(limit_nccl=lambda *_: None)
    first = dict(claim_device=lambda name, _rank, _size: claim_device(name, 0, 1))
    with (
        patch.object(dist, "init_process_group", join_over_gloo),
        patch.multiple(distributed, **first, **unlimited),
        patch.multiple(sharding, **unlimited),
    ):
        train_gpt2.main(args)


if __name__ == "__main__":
    run_script(main, at_once=True)

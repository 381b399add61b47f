"""train_gpt2.py, but torchrun's processes share one GPU and meet over gloo: NCCL refuses that."""

from unittest.mock import patch

import torch.distributed as dist

import train_gpt2
from support.base.console import run_script
from support.machine import distributed, sharding

claim_device, join = distributed.claim_device, dist.init_process_group


def main(args: list[str]) -> None:
    unlimited = dict(limit_nccl=lambda *_: None)
    first = dict(claim_device=lambda name, _rank, _size: claim_device(name, 0, 1))
    own: dict = dict(device_id=None)
    with (
        patch.object(dist, "init_process_group", lambda _nccl, **how: join("gloo", **(how | own))),
        patch.multiple(distributed, **first, **unlimited),
        patch.multiple(sharding, **unlimited),
    ):
        train_gpt2.main(args)


if __name__ == "__main__":
    run_script(main, at_once=True)

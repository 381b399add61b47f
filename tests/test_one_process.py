"""What several processes run, in a process group of one: on a machine with a single GPU, too."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import losses, read_records, run_script, settle_in, tiny_run, weights_hash

import train_gpt2
from support.machine import sharding
from support.machine.device import prepare_device
from support.machine.distributed import join, start_world

WAYS = {  # how a run is wrapped, and what then is the type of the model that trains
    "no group": "GPT",
    "ddp": "DistributedDataParallel",
    "zero1": "FSDPGPT",
    "fsdp": "FSDPGPT",
}


class Alone(int):
    """A number of processes that is 1, and passes every check for several."""

    __hash__ = int.__hash__

    def __eq__(self, other):
        return False

    def __gt__(self, other):
        return True


def train_all(folder: Path, device: str, flags: str) -> None:
    """Trains in each way, resumes from the middle, and prints the types of what trained."""
    types = []
    wrap = sharding.wrap

    def noted_wrap(model, world):
        types.append(type(trained := wrap(model, world)).__name__)
        return trained

    sharding.wrap = noted_wrap
    # so high that float16 overflows at first
    torch.amp.GradScaler = partial(torch.amp.GradScaler, init_scale=2.0**19)
    torch.serialization.add_safe_globals([Alone])  # checkpoints hold the number of processes
    prepare_device(device, "--deterministic" in flags)
    with start_world(device) as group:
        group.size = Alone(1)
        join(group)
        for way in WAYS:
            world = start_world(device) if way == "no group" else group
            strategy = ["--sharding", way] if world is group else []
            middle = ["--resume", folder / way / "ckpt_000003"]
            for log_dir, more in (way, []), (f"{way} again", middle):
                args = tiny_run(folder / "shards", folder / log_dir, flags, *strategy, *more)
                args = [str(arg) for arg in args]
                train_gpt2.train(settle_in(world, args), args, began=0.0)
    print(*types)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("device, flags, rel", [
    ("cpu", "", 1e-5),
    ("cpu", "--dtype float16", 1e-3),
    ("cuda", "--compile --dtype auto --deterministic", 0.03),
])  # fmt: skip
def test_a_group_of_one_trains_and_resumes_in_every_sharding(
    shards, tmp_path, device, flags, rel, optimizer
):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    flags += f" --device {device} --optimizer {optimizer} --checkpoint-every 3"
    arguments = [tmp_path, device, f"{flags} --val-every 3 --val-tokens 160"]
    torchrun = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    done = run_script("tests/test_one_process.py", *arguments, **torchrun)
    types = done.stdout.splitlines()[-1].split()
    assert types == [name for name in WAYS.values() for _ in range(2)]
    curves = {}
    for way in WAYS:
        records = read_records(tmp_path / way, "train")
        skipped = [record["step"] for record in records if "skipped" in record]
        [run, *_] = read_records(tmp_path / way, "run")
        overflows = run["dtype"] == "float16"  # which auto is on a GPU without bfloat16
        assert bool(skipped) == overflows and len(skipped) < 4, "some updates were made"
        norms = [record["norm"] or 0.0 for record in records]  # none of an overflow
        curves[way] = losses(tmp_path / way) + norms + skipped
        last = [weights_hash(tmp_path / run / "ckpt_000006") for run in (way, f"{way} again")]
        assert last[0] == last[1], way
        assert curves[way] == pytest.approx(curves["no group"], rel=rel), way


if __name__ == "__main__":
    train_all(Path(sys.argv[1]), *sys.argv[2:])

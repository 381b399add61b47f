"""One run on any number of processes, with any sharding, killed and restarted: the same curve."""

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from conftest import (
    LONGEST,
    ROOT,
    losses,
    read_records,
    run_program,
    run_script,
    started,
    tiny_run,
    train,
    wait_for,
    warm_train,
    weights_hash,
)
from torch.distributed.elastic.utils.distributed import get_free_port

from config import TrainConfig, as_resumed
from support.machine.distributed import join, start_world
from support.run.log import open_log

# an update of eight sequences, so that 4 ranks have 2 each; a later flag counts more
EIGHT = "--total-batch-size 128 --max-steps 10 --keep-checkpoints 9"
SIXTY = f"{EIGHT} --max-steps 60 --checkpoint-every 10"


def torchrun(shards, log_dir, flags: str, *options: str) -> list[str]:
    """The command of a tiny run, with options of torchrun."""
    run = [ROOT / "train_gpt2.py", *tiny_run(shards, log_dir, flags)]
    return [sys.executable, "-m", "torch.distributed.run", *options, *map(str, run)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_moves_between_zero1_fsdp_and_one_process_on_the_same_curve(
    shards, tmp_path, optimizer
):
    flags = f"""{EIGHT} --optimizer {optimizer}
        --checkpoint-every 4 --val-every 5 --val-tokens 160 --sample-every 5"""
    run = tmp_path / "run"
    train(shards, tmp_path / "one", flags)
    reference = losses(tmp_path / "one")
    train(shards, run, f"{flags} --sharding zero1", ranks=2)
    assert losses(run) == pytest.approx(reference, rel=1e-5)
    # each goes on from what the one before it left
    fsdp = f"{flags} --sharding fsdp --batch-size 4"
    train(shards, run, fsdp, "--resume", run / "ckpt_000004", ranks=2)
    assert losses(run) == pytest.approx(reference, rel=1e-5)
    train(shards, run, flags, "--resume", run / "ckpt_000008")
    assert losses(run) == pytest.approx(reference, rel=1e-5)


@pytest.mark.torture
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_number_of_processes_micro_batch_and_sharding_makes_the_same_run(
    shards, tmp_path, optimizer
):
    sixteen = "--total-batch-size 256"  # sequences
    flags = f"{EIGHT} {sixteen} --optimizer {optimizer} --checkpoint-every 5"
    train(shards, tmp_path / "one", f"{flags} --batch-size 16")
    reference = losses(tmp_path / "one")
    made = {}
    ways = [(1, "ddp"), *itertools.product((2, 4), ("ddp", "zero1", "fsdp"))]  # 1 shards nothing
    for (ranks, strategy), B in itertools.product(ways, (1, 2, 4)):
        log_dir = tmp_path / f"{ranks}-{B}-{strategy}"
        train(shards, log_dir, f"{flags} --batch-size {B} --sharding {strategy}", ranks=ranks)
        assert losses(log_dir) == pytest.approx(reference, rel=1e-5), log_dir.name
        made[ranks, strategy] = log_dir
    for origin, (ranks, strategy) in itertools.product(ways[1:4], ways):
        log_dir = shutil.copytree(made[origin], tmp_path / "moved")
        goes_on = f"{flags} --sharding {strategy} --resume"
        train(shards, log_dir, goes_on, log_dir / "ckpt_000005", ranks=ranks)
        assert losses(log_dir) == pytest.approx(reference, rel=1e-5), (origin, ranks, strategy)
        shutil.rmtree(log_dir)


# -- processes that die


def kill_a_rank(args: list[str], wait: Callable) -> str:
    """Runs torchrun, kills one of its two processes after a wait, and returns what it prints."""
    with started(args) as process:
        workers: list[str] = []
        while len(workers) < 2:
            assert process.poll() is None, process.communicate()
            workers = run_program(["pgrep", "-P", str(process.pid)]).stdout.split()
        wait(process)
        with contextlib.suppress(ProcessLookupError):  # it may have ended
            os.kill(int(workers[-1]), signal.SIGKILL)
        out, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, err
    return out + err


def assert_same_sixty(log_dir, whole) -> None:
    assert losses(log_dir) == losses(whole), log_dir.name
    assert weights_hash(log_dir / "ckpt_000060") == weights_hash(whole / "ckpt_000060")


def test_when_a_rank_dies_torchrun_restarts_and_the_run_ends_as_if_nothing_had_happened(
    shards, tmp_path
):
    cut = tmp_path / "cut"
    train(shards, tmp_path / "whole", SIXTY, ranks=2)
    options = ["--standalone", "--nproc_per_node=2", "--max-restarts=3"]
    args = torchrun(shards, cut, f"{SIXTY} --overwrite", *options)
    printed = kill_a_rank(args, lambda process: wait_for(cut / "ckpt_000010", process))
    assert "resuming from" in printed
    assert printed.count("failed (exitcode") == 1, "the restarted ones found each other at once"
    assert_same_sixty(cut, tmp_path / "whole")


@pytest.mark.parametrize("flags, goes_on", [
    (dict(overwrite=True), dict(resume="auto", overwrite=False)),
    (dict(), dict(resume="auto")),
    (dict(resume="auto"), dict()),
    (dict(resume="elsewhere/ckpt_000010", overwrite=True), dict(resume="auto", overwrite=False)),
    (dict(resume="elsewhere/ckpt_000010"), dict(resume="auto")),
])  # fmt: skip
def test_a_restart_goes_on_with_the_run_that_its_own_launch_began(
    tmp_path, monkeypatch, flags, goes_on
):
    def restart(launch: str) -> TrainConfig:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{launch}/attempt_1/0/error.json")
        return as_resumed(typed, start_world("cpu").launches(), 1)

    typed = TrainConfig(log_dir=str(tmp_path), **flags)
    again = dataclasses.replace(typed, **goes_on)
    assert restart("b") == typed
    open_log(tmp_path, [{"type": "run", "launch": ["a"], "config": {}}])
    (tmp_path / "ckpt_000020").mkdir()
    assert restart("b") == typed, "it was killed before it could begin its own"
    (tmp_path / "ckpt_000020").rmdir()
    open_log(tmp_path, [{"type": "run", "launch": ["b", "c"], "config": {}}])
    assert restart("b") == restart("c") == again, "another node may now be the first"
    (tmp_path / "ckpt_000010").mkdir()
    assert restart("b") == dataclasses.replace(typed, resume="auto", overwrite=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert as_resumed(typed, [], 1) == typed, "python has no restarts"


OFTEN = (0.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)  # imports take the first two or three


@pytest.mark.parametrize("backend, delays", [
    ("c10d", [1.0]),
    pytest.param("c10d", OFTEN, marks=pytest.mark.torture),
    pytest.param("static", OFTEN, marks=pytest.mark.torture),
])  # fmt: skip
def test_a_rank_killed_soon_after_the_start_never_brings_back_the_run_that_was_overwritten(
    shards, tmp_path, backend, delays
):
    flags = f"{SIXTY} --batch-size 1"
    train(shards, tmp_path / "whole", flags, ranks=2)
    other = f"{SIXTY} --batch-size 8 --learning-rate 0.02".split()
    warm_train(shards, tmp_path / "old", *other, TORCHELASTIC_RUN_ID="same")
    for delay in delays:
        log_dir = shutil.copytree(tmp_path / "old", tmp_path / str(delay))
        meet = [f"--rdzv_backend={backend}", f"--rdzv_endpoint=127.0.0.1:{get_free_port()}"]
        options = [*meet, "--rdzv_id=same", "--nnodes=1", "--nproc_per_node=2", "--max-restarts=3"]
        args = torchrun(shards, log_dir, f"{flags} --overwrite", *options)
        kill_a_rank(args, lambda _, delay=delay: time.sleep(delay))
        assert_same_sixty(log_dir, tmp_path / "whole")


def test_two_nodes_that_meet_through_c10d_make_the_run_of_one(shards, tmp_path):
    train(shards, tmp_path / "one", EIGHT)
    meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{get_free_port()}"]
    options = ["--nnodes=2", "--nproc_per_node=1", *meet]
    args = torchrun(shards, tmp_path / "two", EIGHT, *options)
    with started(args) as first, started(args) as second:
        for node in (first, second):
            _, err = node.communicate(timeout=LONGEST)
            assert node.returncode == 0, err
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])  # TORCH_DISTRIBUTED_DEBUG
def test_what_hangs_holds_gpus_for_10_minutes_but_gloo_waits_30(monkeypatch, debug):
    def make_group(_backends, device_id, plain=dist.init_process_group, **group):
        plain("gloo", **group)
        nccl = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, dist.default_pg_timeout)  # stands in
        if debug == "DETAIL":
            nccl = dist.distributed_c10d._ProcessGroupWrapper(nccl, nccl)
        kind = dist.ProcessGroup.BackendType.NCCL
        dist.group.WORLD._register_backend(torch.device("cuda"), kind, nccl)

    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", make_group)
    with start_world("cpu") as world:
        world.device = torch.device("cuda", 0)
        join(world)
        backends = [dist.group.WORLD._get_backend(torch.device(name)) for name in ("cuda", "cpu")]
        assert [each.options._timeout.total_seconds() / 60 for each in backends] == [10, 30]


# Rank 1 joins the sum two seconds late. By then rank 0 has left its group and holds the GIL in a
# loop. Its gloo thread is the last to hold the tensor, and waits for the GIL until Python ends.
LATE_ALL_REDUCE = """
import sys, time
import torch
import torch.distributed as dist
from support.base.console import run_script
from support.machine.distributed import start_world

held = []


def main(_args):
    with start_world("cpu") as world:
        held.append(dist.group.WORLD)  # as ZeRO, FSDP and torch.distributed.nn do
        time.sleep(2 * world.rank)
        dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(2 * world.rank)  # its group stays until the sum is made
    print(f"rank {world.rank} is done", flush=True)  # later it would let go of the GIL
    sys.setswitchinterval(1000)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        pass


run_script(main, at_once=True)
"""


def test_a_rank_that_ends_while_gloo_frees_a_tensor_is_not_taken_for_one_that_died(tmp_path):
    """Python aborted: "terminate called without an active exception". Then torchrun failed."""
    script = tmp_path / "late.py"
    script.write_text(LATE_ALL_REDUCE)
    done = run_script(script, ranks=2)
    assert sorted(done.stdout.splitlines()) == ["rank 0 is done", "rank 1 is done"]


# -- memory

COUNT_PAGES = """
import resource, sys
import torch
import train_gpt2

def count_pages():
    torch.zeros(2**25)  # 128 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = count_pages()
train_gpt2.main(sys.argv[1:])
print("pages", before, count_pages())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_a_large_tensor_takes_the_pages_of_the_one_before_it(shards, tmp_path):
    arguments = tiny_run(shards, tmp_path / "log", "--max-steps 4")
    done = run_program([sys.executable, "-c", COUNT_PAGES, *map(str, arguments)])
    pages = re.search(r"pages (\d+) (\d+)", done.stdout)
    assert pages, done.stdout + done.stderr
    before, after = map(int, pages.groups())
    assert after < before / 4


@pytest.mark.torture
def test_memory_stays_flat_over_two_thousand_steps_with_evaluations(shards, tmp_path):
    flags = """--max-steps 2000 --val-every 100 --val-tokens 160
        --sample-every 200 --checkpoint-every 500 --keep-checkpoints 9"""
    # Large tensors come from the system and go back to it: holes in the heap do not count.
    train(shards, tmp_path / "log", flags, MALLOC_MMAP_THRESHOLD_="262144")
    memory = {r["step"]: r["memory"] for r in read_records(tmp_path / "log", "train")}
    assert memory[1999] - memory[600] < 8 * 2**20, "the peak of the process still grows"

"""One run on any number of processes, however they share the model, killed and started again:
always the same curve.
"""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    LONGEST,
    ROOT,
    command,
    losses,
    read_records,
    run_program,
    run_script,
    started,
    tiny_run,
    train,
    wait_for,
    weights_hash,
)

from config import TrainConfig
from model import GPT, GPTConfig
from support import checkpoint
from support.common import UserError
from support.device import autocast
from support.distributed import World
from support.health import MOST_SKIPPED, is_spike, judge_update
from support.log import Log
from support.resume import as_restarted
from train_gpt2 import train_step

# an update of eight sequences, so that 4 ranks have 2 each; a later flag counts more
EIGHT = "--total-batch-size 128 --max-steps 10 --keep-checkpoints 9"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_moves_between_zero1_fsdp_and_one_process_on_the_same_curve(
    shards, tmp_path, optimizer
):
    flags = f"""{EIGHT} --optimizer {optimizer}
        --checkpoint-every 4 --val-every 5 --val-tokens 160 --sample-every 5"""
    run = tmp_path / "run"
    train(shards, tmp_path / "one", flags)
    reference = losses(tmp_path / "one")
    done = train(shards, run, f"{flags} --sharding zero1", ranks=2)
    assert "state divided over 2 processes" in done.stdout
    assert ("Muon" in done.stdout) == (optimizer == "muon")
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
    # one process has nothing to share
    ways = [(1, "ddp"), *itertools.product((2, 4), ("ddp", "zero1", "fsdp"))]
    for (ranks, sharding), B in itertools.product(ways, (1, 2, 4)):
        log_dir = tmp_path / f"{ranks}-{B}-{sharding}"
        train(shards, log_dir, f"{flags} --batch-size {B} --sharding {sharding}", ranks=ranks)
        assert losses(log_dir) == pytest.approx(reference, rel=1e-5), log_dir.name
        made[ranks, sharding] = log_dir
    origins = [(2, "ddp"), (2, "zero1"), (2, "fsdp")]
    for origin, (ranks, sharding) in itertools.product(origins, ways):
        log_dir = tmp_path / "moved"
        shutil.copytree(made[origin], log_dir)
        goes_on = f"{flags} --sharding {sharding} --resume"
        train(shards, log_dir, goes_on, log_dir / "ckpt_000005", ranks=ranks)
        assert losses(log_dir) == pytest.approx(reference, rel=1e-5), (origin, ranks, sharding)
        shutil.rmtree(log_dir)


def test_a_checkpoint_of_one_optimizer_is_not_resumed_with_the_other_but_gives_its_weights(
    shards, tmp_path
):
    train(shards, tmp_path / "muon", f"{EIGHT} --optimizer muon --checkpoint-every 10")
    last = tmp_path / "muon" / "ckpt_000010"
    done = train(shards, tmp_path / "muon", f"{EIGHT} --resume", last, expect=1)
    assert "cannot be resumed with another optimizer muon -> adamw" in done.stderr
    assert "--init-from" in done.stderr
    train(shards, tmp_path / "adamw", f"{EIGHT} --init-from", last)
    assert losses(tmp_path / "adamw")[0] < losses(tmp_path / "muon")[0] - 0.5


@pytest.mark.parametrize("flags", ["--optimizer muon", "--dtype float16"], ids=["muon", "float16"])
def test_muon_and_float16_resume_bit_for_bit(shards, tmp_path, flags):
    flags = f"{EIGHT} {flags} --checkpoint-every 5"
    train(shards, tmp_path / "whole", flags)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    start = tmp_path / "cut" / "ckpt_000005"
    train(shards, tmp_path / "cut", flags, "--resume", start)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    cut = tmp_path / "cut" / "ckpt_000010"
    whole = tmp_path / "whole" / "ckpt_000010"
    assert weights_hash(cut) == weights_hash(whole)
    a = checkpoint.load_state(cut)
    b = checkpoint.load_state(whole)
    assert a["scaler"] == b["scaler"]
    assert bool(a["scaler"]) == ("float16" in flags)
    moments_a = a["optimizer"]["state"]
    moments_b = b["optimizer"]["state"]
    for name, values in moments_b.items():
        assert all(torch.equal(moments_a[name][key], x) for key, x in values.items())


# -- processes that die


def workers_of(process: subprocess.Popen) -> list[int]:
    """The process numbers of those that torchrun has started."""
    listed = run_program(["pgrep", "-P", str(process.pid)])
    return [int(pid) for pid in listed.stdout.split()]


def test_when_a_rank_dies_torchrun_restarts_and_the_run_ends_as_if_nothing_had_happened(
    shards, tmp_path
):
    flags = f"{EIGHT} --max-steps 60 --checkpoint-every 10 --overwrite"
    train(shards, tmp_path / "whole", flags, ranks=2)
    args = command("train_gpt2.py", *tiny_run(shards, tmp_path / "cut", flags), ranks=2)
    args.insert(args.index("--standalone"), "--max-restarts=3")
    with started(args) as process:
        wait_for(tmp_path / "cut" / "ckpt_000010", process)
        os.kill(workers_of(process)[-1], signal.SIGKILL)
        out, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, err
    assert "resuming from" in out, err
    assert err.count("failed (exitcode") == 1, "the restarted processes found each other at once"
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    last = "ckpt_000060"
    assert weights_hash(tmp_path / "cut" / last) == weights_hash(tmp_path / "whole" / last)


def test_a_rank_that_dies_before_the_run_has_begun_does_not_bring_back_the_run_that_it_overwrites(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "now")
    typed = TrainConfig(log_dir=str(tmp_path), overwrite=True)
    log = Log(str(tmp_path), True, "none")
    log.start({"launch": "before"})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert as_restarted(typed) == typed
    log.start({"launch": "now"})
    assert as_restarted(typed) == dataclasses.replace(typed, resume="auto", overwrite=False)
    elsewhere = dataclasses.replace(typed, resume="elsewhere/ckpt_000010")
    again = dataclasses.replace(elsewhere, overwrite=True)
    assert as_restarted(elsewhere) == again, "nothing of its own is saved yet"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert as_restarted(typed) == typed


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_nodes_that_meet_through_c10d_make_the_run_of_one(shards, tmp_path):
    train(shards, tmp_path / "one", EIGHT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    run = [ROOT / "train_gpt2.py", *tiny_run(shards, tmp_path / "two", EIGHT)]
    args = [*launcher, *meet, *map(str, run)]
    with started(args) as first, started(args) as second:
        for node in (first, second):
            _, err = node.communicate(timeout=LONGEST)
            assert node.returncode == 0, err
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.torture
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_thirty_kills_at_random_moments_change_nothing(shards, tmp_path, optimizer):
    flags = f"""{EIGHT} --optimizer {optimizer} --max-steps 200
        --checkpoint-every 2 --keep-checkpoints 2 --resume auto"""
    train(shards, tmp_path / "whole", flags)
    args = command("train_gpt2.py", *tiny_run(shards, tmp_path / "cut", flags))
    moments = random.Random(optimizer)
    start_up = 0.0  # seconds
    for kill in range(30):
        with started(args) as process:
            if kill == 0:
                start_up = seconds_to_first_step(process)
            if kill % 3:  # at its beginning, or
                time.sleep(start_up * moments.uniform(0.3, 1.2))
            else:  # somewhere in the steps
                time.sleep(start_up + moments.uniform(0, 1))
            process.kill()
            _, err = process.communicate()
        assert err == ""
    train(shards, tmp_path / "cut", flags)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    last = "ckpt_000200"
    assert weights_hash(tmp_path / "cut" / last) == weights_hash(tmp_path / "whole" / last)
    assert not list((tmp_path / "cut").glob(".ckpt*")), "nothing half-written stays"


def seconds_to_first_step(process: subprocess.Popen) -> float:
    began = time.time()
    while "step " not in process.stdout.readline():
        assert process.poll() is None
    return time.time() - began


# Rank 1 joins the sum two seconds late, when rank 0 has left its group and spins with the GIL. Rank
# 0's gloo thread, the last that holds the tensor, waits for the GIL until the interpreter ends.
LATE_ALL_REDUCE = """
import sys, time
import torch
import torch.distributed as dist
from support.common import run_script
from support.distributed import World

held = []


def main():
    with World("cpu") as world:
        held.append(dist.group.WORLD)  # as ZeRO, FSDP and torch.distributed.nn do
        time.sleep(2 * world.rank)
        dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(2 * world.rank)  # its group stays until the sum is made
    print(f"rank {world.rank} is done", flush=True)  # later it would let go of the GIL
    sys.setswitchinterval(1000)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        pass


run_script(main)
"""


def test_a_rank_that_ends_while_gloo_frees_a_tensor_is_not_taken_for_one_that_died(tmp_path):
    """It aborted: "terminate called without an active exception", and torchrun ended the others."""
    script = tmp_path / "late.py"
    script.write_text(LATE_ALL_REDUCE)
    done = run_script(script, ranks=2, PYTHONPATH=str(ROOT))
    assert sorted(done.stdout.splitlines()) == ["rank 0 is done", "rank 1 is done"]


# -- updates that are not made


def test_a_spike_stands_out_of_a_full_window_only():
    calm = [1.0 + 0.01 * (i % 3) for i in range(128)]
    assert is_spike(2.0, calm, 6)
    assert not is_spike(1.03, calm, 6)
    assert not is_spike(0.0, calm, 6)
    assert not is_spike(2.0, calm[:-1], 6), "the window is not full yet"


def test_a_spike_and_an_overflow_are_refused_and_the_window_moves_on():
    run = SimpleNamespace(
        config=TrainConfig(skip_spikes=4.0),
        recent={"loss": [1.0, 1.1] * 64, "norm": [0.5, 0.6] * 64},
        skipped_in_a_row=0,
    )
    assert judge_update(run, 1.0, 0.5)
    assert run.skipped == ""
    assert not judge_update(run, 9.0, 0.5)
    assert run.skipped == "spike of the loss"
    assert not judge_update(run, 1.0, 7.0)
    assert run.skipped == "spike of the norm"
    assert len(run.recent["loss"]) == 128
    assert run.recent["loss"][-3:] == [1.0, 9.0, 1.0]
    before = list(run.recent["norm"])
    assert not judge_update(run, 1.0, float("inf"))
    assert "float16" in run.skipped
    assert run.recent["norm"] == before


def test_a_run_whose_every_update_overflows_ends_in_a_sentence():
    run = SimpleNamespace(config=TrainConfig(), step=7, last_saved=None, skipped_in_a_row=0)
    overflow = float("inf")
    for _ in range(MOST_SKIPPED - 1):
        assert not judge_update(run, 1.0, overflow)
    assert judge_update(run, 1.0, 0.5), "an update that is made begins the count anew"
    for _ in range(MOST_SKIPPED - 1):
        assert not judge_update(run, 1.0, overflow)
    with pytest.raises(UserError, match=r"step 7: 50 updates in a row .* overflow in float16"):
        judge_update(run, 1.0, overflow)


class SameBatch:
    def next_batch(self):
        x = torch.zeros(2, 8, dtype=torch.int64)
        return x, x + 1


@pytest.mark.parametrize("muon", [False, True])
def test_a_refused_update_leaves_weights_and_moments_as_they_were(tiny, muon):
    optimizers = tiny.configure_optimizers(muon=muon)
    before = {name: p.clone() for name, p in tiny.named_parameters()}

    def step(accepted: bool) -> None:
        train_step(
            model=tiny,
            optimizers=optimizers,
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            loader=SameBatch(),
            grad_accum_steps=1,
            world=World("cpu"),
            dtype=torch.float32,
            lr=0.1,
            grad_clip=1.0,
            accept=lambda loss, norm: accepted,
        )

    step(accepted=False)
    assert all(torch.equal(p, before[name]) for name, p in tiny.named_parameters())
    assert not any(optimizer.state for optimizer in optimizers)
    assert all(p.grad is None for p in tiny.parameters())
    step(accepted=True)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert not torch.equal(tiny.get_parameter(name), before[name])


def test_skipped_steps_are_logged_and_the_window_survives_a_resume(shards, tmp_path):
    # a low limit and a slow descent: from step 128 on, about every other update is refused
    flags = f"""{EIGHT} --max-steps 160 --learning-rate 0.001
        --skip-spikes 0.5 --checkpoint-every 140"""
    log_dir = tmp_path / "log"
    train(shards, log_dir, flags)
    skipped = [r["step"] for r in read_records(log_dir, "train") if "skipped" in r]
    assert skipped
    assert min(skipped) >= 128
    whole = losses(log_dir)
    done = train(shards, log_dir, flags, "--resume", log_dir / "ckpt_000140")
    assert losses(log_dir) == whole
    assert "no update: spike" in done.stdout


# -- memory

COUNT_PAGES = """
import resource, runpy, sys
import torch

def count_pages():
    torch.zeros(2**25)  # 128 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = count_pages()
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code
print("pages", before, count_pages())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.parametrize("script", ["train_gpt2.py", "hellaswag.py"])
def test_a_large_tensor_takes_the_pages_of_the_one_before_it(shards, tmp_path, tiny, script):
    arguments = tiny_run(shards, tmp_path / "log", "--max-steps 4")
    if script == "hellaswag.py":
        tiny.save_pretrained(tmp_path / "model")
        example = dict(ctx="One", endings=[" two", " three", " four", " five"], label=0)
        (tmp_path / "one.jsonl").write_text(json.dumps(example))
        arguments = ["--model", tmp_path / "model", "--path", tmp_path / "one.jsonl"]
    done = run_program([sys.executable, "-c", COUNT_PAGES, script, *arguments])
    pages = re.search(r"pages (\d+) (\d+)", done.stdout)
    assert pages, done.stdout + done.stderr
    before, after = map(int, pages.groups())
    assert after < before / 4


@pytest.mark.torture
def test_memory_stays_flat_over_two_thousand_steps_with_evaluations(shards, tmp_path):
    flags = """--max-steps 2000 --val-every 100 --val-tokens 160
        --sample-every 200 --checkpoint-every 500 --keep-checkpoints 9"""
    # large tensors straight from the system and back, so that only what is really held counts,
    # not holes in the heap
    train(shards, tmp_path / "log", flags, MALLOC_MMAP_THRESHOLD_="262144")
    memory = {r["step"]: r["memory"] for r in read_records(tmp_path / "log", "train")}
    assert memory[1999] - memory[600] < 8 * 2**20, "the peak of the process still grows"


def state_bytes(sharding: str) -> None:
    """Run under torchrun: gpt2-xl's width, 6 layers; prints this process's bytes of weights,
    gradients and moments.
    """
    with World("cpu", sharding) as world:
        model = GPT(GPTConfig(block_size=16, n_layer=6, n_head=25, n_embd=1600))
        world.place(model)
        wrapped = world.wrap(model)
        optimizers = model.configure_optimizers(make=world.make_optimizer)
        x = torch.zeros(1, 16, dtype=torch.int64)
        for _ in range(2):
            with autocast(world.device, torch.float32):
                _, loss = wrapped(x, x)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        params = list(model.parameters())
        found = bytes_here(params) + bytes_here(p.grad for p in params)
        for optimizer in optimizers:
            own = getattr(optimizer, "optim", optimizer)  # zero1 has one inside
            for moments in own.state.values():
                found += bytes_here(moments.values())
        print("bytes per parameter", found / sum(p.numel() for p in params), flush=True)


def bytes_here(tensors: Iterable[torch.Tensor]) -> int:
    """What this process holds of them: of a tensor that fsdp divides, its own part."""
    total = 0
    for tensor in tensors:
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        total += tensor.numel() * tensor.element_size()
    return total


@pytest.mark.torture
@pytest.mark.parametrize("sharding, expected", [("ddp", 16), ("zero1", 12), ("fsdp", 8)])
def test_weights_gradients_and_moments_take_the_bytes_that_the_arithmetic_says(sharding, expected):
    done = run_script("tests/test_topology.py", sharding, ranks=2, PYTHONPATH=str(ROOT))
    measured = [float(x) for x in re.findall(r"bytes per parameter ([\d.]+)", done.stdout)]
    print(sharding, measured)
    assert len(measured) == 2
    assert all(abs(m / expected - 1) < 0.1 for m in measured), measured


if __name__ == "__main__":
    state_bytes(sys.argv[1])

"""One run on any number of processes, however they share the model, killed and started again: always the same curve."""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, command, environment, losses, run_script, weights_hash

import checkpoint
from distributed import World
from model import GPT, GPTConfig, autocast
from train_gpt2 import Log, Run, TrainConfig, as_restarted, is_spike, train_step

EIGHT_SEQUENCES = ("--total-batch-size", 128, "--max-steps", 10)  # so that 4 ranks have 2 each


def train(shards, log_dir, *flags, **kwargs):
    flags = (*TINY, "--data-dir", shards, "--log-dir", log_dir, *EIGHT_SEQUENCES, "--keep-checkpoints", 9, *flags)
    return run_script("train_gpt2.py", *flags, **kwargs)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_moves_between_zero1_fsdp_and_one_process_on_the_same_curve(shards, tmp_path, optimizer):
    flags = ("--optimizer", optimizer, "--checkpoint-every", 4, "--val-every", 5, "--val-tokens", 160, "--sample-every", 5)
    train(shards, tmp_path / "one", *flags)
    reference = losses(tmp_path / "one")
    done = train(shards, tmp_path / "run", *flags, "--sharding", "zero1", ranks=2)
    assert "state divided over 2 processes" in done.stdout and ("Muon" in done.stdout) == (optimizer == "muon")
    assert losses(tmp_path / "run") == pytest.approx(reference, rel=1e-5)
    moves = [("ckpt_000004", ("--sharding", "fsdp", "--batch-size", 4), 2), ("ckpt_000008", (), 1)]
    for start, how, ranks in moves:  # each goes on from what the one before it left
        train(shards, tmp_path / "run", *flags, "--resume", tmp_path / "run" / start, *how, ranks=ranks)
        assert losses(tmp_path / "run") == pytest.approx(reference, rel=1e-5)


@pytest.mark.torture
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_number_of_processes_micro_batch_and_sharding_makes_the_same_run(shards, tmp_path, optimizer):
    flags = ("--optimizer", optimizer, "--checkpoint-every", 5, "--total-batch-size", 256)  # 16 sequences
    train(shards, tmp_path / "one", *flags, "--batch-size", 16)
    reference, made = losses(tmp_path / "one"), {}
    ways = [(1, "ddp"), *itertools.product((2, 4), ("ddp", "zero1", "fsdp"))]  # one process has nothing to share
    for (ranks, sharding), B in itertools.product(ways, (1, 2, 4)):
        log_dir = tmp_path / f"{ranks}-{B}-{sharding}"
        train(shards, log_dir, *flags, "--batch-size", B, "--sharding", sharding, ranks=ranks)
        assert losses(log_dir) == pytest.approx(reference, rel=1e-5), log_dir.name
        made[ranks, sharding] = log_dir
    for origin, (ranks, sharding) in itertools.product([(2, "ddp"), (2, "zero1"), (2, "fsdp")], ways):
        log_dir = tmp_path / "moved"
        shutil.copytree(made[origin], log_dir)
        resume = ("--resume", log_dir / "ckpt_000005", "--sharding", sharding)
        train(shards, log_dir, *flags, *resume, ranks=ranks)
        assert losses(log_dir) == pytest.approx(reference, rel=1e-5), f"{origin} -> {ranks} {sharding}"
        shutil.rmtree(log_dir)


def test_a_checkpoint_of_one_optimizer_is_not_resumed_with_the_other_but_gives_its_weights(shards, tmp_path):
    train(shards, tmp_path / "muon", "--optimizer", "muon", "--checkpoint-every", 10)
    last = tmp_path / "muon" / "ckpt_000010"
    done = train(shards, tmp_path / "muon", "--resume", last, expect=1)
    assert "cannot be resumed with another optimizer muon -> adamw" in done.stderr and "--init-from" in done.stderr
    train(shards, tmp_path / "adamw", "--init-from", last)
    assert losses(tmp_path / "adamw")[0] < losses(tmp_path / "muon")[0] - 0.5


@pytest.mark.parametrize("flags", [("--optimizer", "muon"), ("--dtype", "float16")], ids=["muon", "float16"])
def test_muon_and_float16_resume_bit_for_bit(shards, tmp_path, flags):
    train(shards, tmp_path / "whole", *flags, "--checkpoint-every", 5)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    train(shards, tmp_path / "cut", *flags, "--checkpoint-every", 5, "--resume", tmp_path / "cut" / "ckpt_000005")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    states = [checkpoint.load_state(tmp_path / run / "ckpt_000010") for run in ("cut", "whole")]
    assert weights_hash(tmp_path / "cut" / "ckpt_000010") == weights_hash(tmp_path / "whole" / "ckpt_000010")
    assert states[0]["scaler"] == states[1]["scaler"] and bool(states[0]["scaler"]) == ("float16" in flags)
    moments = [state["optimizer"]["state"] for state in states]
    assert all(torch.equal(moments[0][name][k], x) for name, values in moments[1].items() for k, x in values.items())


# -- processes that die


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        time.sleep(0.02)
        assert process.poll() is None, process.communicate()


def workers_of(process: subprocess.Popen) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def test_when_a_rank_dies_torchrun_restarts_and_the_run_ends_as_if_nothing_had_happened(shards, tmp_path):
    flags = ("--max-steps", 60, "--checkpoint-every", 10, "--overwrite")
    train(shards, tmp_path / "whole", *flags, ranks=2)
    args = (*TINY, "--data-dir", shards, "--log-dir", tmp_path / "cut", *EIGHT_SEQUENCES, "--keep-checkpoints", 9, *flags)
    args = command("train_gpt2.py", *args, ranks=2)
    args.insert(args.index("--standalone"), "--max-restarts=3")
    process = subprocess.Popen(args, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "cut" / "ckpt_000010", process)
    os.kill(workers_of(process)[-1], signal.SIGKILL)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0 and "resuming from" in out, err
    assert err.count("failed (exitcode") == 1, "the restarted processes found each other at once"
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert weights_hash(tmp_path / "cut" / "ckpt_000060") == weights_hash(tmp_path / "whole" / "ckpt_000060")


def test_a_rank_that_dies_before_the_run_has_begun_does_not_bring_back_the_run_that_it_overwrites(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "now")
    typed = TrainConfig(log_dir=str(tmp_path), overwrite=True)
    log = Log(str(tmp_path), True, "none")
    log.start({"launch": "before"})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert as_restarted(typed) == typed
    log.start({"launch": "now"})
    assert as_restarted(typed) == dataclasses.replace(typed, resume="auto", overwrite=False)
    elsewhere = dataclasses.replace(typed, resume="elsewhere/ckpt_000010")
    assert as_restarted(elsewhere) == elsewhere, "nothing of its own is saved yet"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert as_restarted(typed) == typed


def test_two_nodes_that_meet_through_c10d_make_the_run_of_one(shards, tmp_path):
    train(shards, tmp_path / "one")
    port = random.Random(os.getpid()).randint(20000, 60000)
    flags = (*TINY, "--data-dir", shards, "--log-dir", tmp_path / "two", *EIGHT_SEQUENCES)
    meet = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}"]
    args = [sys.executable, "-m", "torch.distributed.run", *meet, str(ROOT / "train_gpt2.py"), *map(str, flags)]
    nodes = [subprocess.Popen(args, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    assert [node.wait(timeout=600) for node in nodes] == [0, 0], [node.communicate() for node in nodes]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.torture
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_thirty_kills_at_random_moments_change_nothing(shards, tmp_path, optimizer):
    flags = ("--max-steps", 200, "--checkpoint-every", 2, "--keep-checkpoints", 2, "--optimizer", optimizer, "--resume", "auto")
    train(shards, tmp_path / "whole", *flags)
    args = (*TINY, "--data-dir", shards, "--log-dir", tmp_path / "cut", *EIGHT_SEQUENCES, *flags)
    args, moments, started = command("train_gpt2.py", *args), random.Random(optimizer), 0.0
    for kill in range(30):
        process = subprocess.Popen(args, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if kill == 0 or started == 0.0:
            began = time.time()
            while "step " not in process.stdout.readline():
                assert process.poll() is None
            started = time.time() - began
        time.sleep(started * moments.uniform(0.3, 1.2) if kill % 3 else started + moments.uniform(0, 1))
        process.kill()
        _, err = process.communicate()
        assert err == ""
    train(shards, tmp_path / "cut", *flags)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert weights_hash(tmp_path / "cut" / "ckpt_000200") == weights_hash(tmp_path / "whole" / "ckpt_000200")
    assert not list((tmp_path / "cut").glob(".ckpt*")), "nothing half-written stays"


# -- updates that are not made


def test_a_spike_stands_out_of_a_full_window_only():
    calm = [1.0 + 0.01 * (i % 3) for i in range(128)]
    assert is_spike(2.0, calm, 6) and not is_spike(1.03, calm, 6) and not is_spike(0.0, calm, 6)
    assert not is_spike(2.0, calm[:-1], 6), "the window is not full yet"


def test_a_spike_and_an_overflow_are_refused_and_the_window_moves_on():
    run = SimpleNamespace(config=TrainConfig(skip_spikes=4.0), recent={"loss": [1.0, 1.1] * 64, "norm": [0.5, 0.6] * 64})
    assert Run.accept(run, 1.0, 0.5) and run.skipped == ""
    assert not Run.accept(run, 9.0, 0.5) and run.skipped == "spike of the loss"
    assert not Run.accept(run, 1.0, 7.0) and run.skipped == "spike of the norm"
    assert len(run.recent["loss"]) == 128 and run.recent["loss"][-3:] == [1.0, 9.0, 1.0]
    before = list(run.recent["norm"])
    assert not Run.accept(run, 1.0, float("inf")) and "float16" in run.skipped and run.recent["norm"] == before


@pytest.mark.parametrize("muon", [False, True])
def test_a_refused_update_leaves_weights_and_moments_as_they_were(tiny, muon):
    class Batches:
        def next_batch(self):
            return torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)

    optimizers, before = tiny.configure_optimizers(muon=muon), {n: p.clone() for n, p in tiny.named_parameters()}
    args = (tiny, optimizers, torch.amp.GradScaler("cpu", enabled=False), Batches(), 1, World("cpu"), torch.float32, 0.1, 1.0)
    train_step(*args, accept=lambda loss, norm: False)
    assert all(torch.equal(p, before[n]) for n, p in tiny.named_parameters())
    assert not any(optimizer.state for optimizer in optimizers) and all(p.grad is None for p in tiny.parameters())
    train_step(*args, accept=lambda loss, norm: True)
    assert not torch.equal(tiny.transformer.h[0].mlp.c_fc.weight, before["transformer.h.0.mlp.c_fc.weight"])


def test_skipped_steps_are_logged_and_the_window_survives_a_resume(shards, tmp_path):
    flags = ("--max-steps", 160, "--skip-spikes", 1.5, "--checkpoint-every", 140)
    train(shards, tmp_path / "log", *flags)
    records = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    skipped = [r["step"] for r in records if r["type"] == "train" and "skipped" in r]
    assert skipped and min(skipped) >= 128
    whole = losses(tmp_path / "log")
    done = train(shards, tmp_path / "log", *flags, "--resume", tmp_path / "log" / "ckpt_000140")
    assert losses(tmp_path / "log") == whole and "no update: spike" in done.stdout


# -- memory


@pytest.mark.torture
def test_memory_stays_flat_over_two_thousand_steps_with_evaluations(shards, tmp_path):
    often = ("--val-every", 100, "--val-tokens", 160, "--sample-every", 200, "--checkpoint-every", 500)
    # large tensors straight from the system and back, so that only what is really held counts, not holes in the heap
    train(shards, tmp_path / "log", *TINY, *often, "--max-steps", 2000, MALLOC_MMAP_THRESHOLD_="262144")
    records = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    memory = {r["step"]: r["memory"] for r in records if r["type"] == "train"}
    assert memory[1999] - memory[600] < 8 * 2**20, "the peak of the process still grows"


def state_bytes(sharding: str) -> None:
    """Run under torchrun: gpt2-xl's width, 6 layers; prints this process's bytes of weights, gradients and moments."""
    with World("cpu", sharding) as world:
        model = GPT(GPTConfig(block_size=16, n_layer=6, n_head=25, n_embd=1600))
        world.place(model, torch.float32)
        wrapped, optimizers = world.wrap(model), model.configure_optimizers(make=world.make_optimizer)
        x = torch.zeros(1, 16, dtype=torch.int64)
        for _ in range(2):
            with autocast(world.device, torch.float32):
                wrapped(x, x)[1].backward()
            for optimizer in optimizers:
                optimizer.step()

        def count(tensors) -> int:
            return sum(t.numel() * t.element_size() for t in (t.to_local() if hasattr(t, "to_local") else t for t in tensors))

        params = list(model.parameters())
        states = [s for o in optimizers for s in getattr(o, "optim", o).state.values()]
        found = count(params) + count(p.grad for p in params) + count(t for s in states for t in s.values())
        print("bytes per parameter", found / sum(p.numel() for p in params), flush=True)


@pytest.mark.torture
@pytest.mark.parametrize("sharding, expected", [("ddp", 16), ("zero1", 12), ("fsdp", 8)])
def test_weights_gradients_and_moments_take_the_bytes_that_the_arithmetic_says(sharding, expected):
    done = run_script("tests/test_topology.py", sharding, ranks=2, PYTHONPATH=str(ROOT))
    measured = [float(x) for x in re.findall(r"bytes per parameter ([\d.]+)", done.stdout)]
    print(sharding, measured)
    assert len(measured) == 2 and all(abs(m / expected - 1) < 0.1 for m in measured), measured


if __name__ == "__main__":
    state_bytes(sys.argv[1])

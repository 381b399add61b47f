"""`make gpu`: each part leaves its section, whatever becomes of it. On a CPU, at a tiny size."""

import json
import math
import shlex
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_script

import bench
from bench import BenchConfig, check_flags
from benchmarks import first_hour, turns
from benchmarks.first_hour import Failed, Hour, HourConfig
from config import check, parse_command_line
from support.checkpoint import path_of
from support.common import UserError, read_flags
from support.distributed import World


@pytest.fixture
def hour(tmp_path) -> Hour:
    out = str(tmp_path / "out")
    return Hour(HourConfig(device="cpu", log_dir=str(tmp_path / "log"), out=out))


def python(hour: Hour, code: str, **how) -> list[str]:
    return hour.run("-c", code, **how)


def test_a_part_that_fails_tells_its_last_lines_and_keeps_what_it_has_measured(hour, monkeypatch):
    def breaks(hour):
        """A part that breaks."""
        yield "measured before"
        python(hour, "for i in range(40): print('line', i)\nraise SystemExit(3)")

    def works(hour):
        """A part that works."""
        yield "\n".join(python(hour, "print('fine')"))

    monkeypatch.setattr(first_hour, "PARTS", dict(first=breaks, second=works, third=works))
    assert not first_hour.do_part(hour, "first")
    assert first_hour.do_part(hour, "second")
    page = (hour.folder / "README.md").read_text()
    assert "measured before" in page
    assert "ended with 3" in page and "line 39" in page and "line 20" not in page
    assert "A part that works." in page and "\nfine\n" in page
    assert "torch 2." in page and "Not done yet: `make gpu PART=third`" in page
    assert (hour.folder / "second.md").exists()


def test_a_command_that_outlives_its_part_is_ended_with_all_that_it_started(hour):
    hour.ends = time.monotonic() + 1.0
    child = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'input()'])"
    code = f"print('begun', flush=True)\n{child.replace('input()', 'import time; time.sleep(900)')}"
    with pytest.raises(Failed, match=r"(?s)ended with -9 after .*begun"):
        python(hour, code)


def test_a_command_that_was_to_be_killed_and_ends_before_has_failed(hour):
    endless = "import time\nprint('step 1', flush=True)\ntime.sleep(900)"
    assert python(hour, endless, kill_at="step 1") == ["step 1"]
    with pytest.raises(Failed, match="ended with 0"):
        python(hour, "print('step 1')", kill_at="step 2")


@pytest.mark.parametrize("tiny", [True, False])
def test_every_command_has_flags_that_the_scripts_take(hour, monkeypatch, shards, tiny):
    asked = []

    def remember(*command, **_) -> list[str]:
        asked.append([*map(str, command)])
        return []

    monkeypatch.setattr(hour, "run", remember)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    hour.tiny = tiny
    hour.config.data_dir = str(shards)
    for part in first_hour.PARTS.values():
        with suppress(OSError, UserError):  # these commands leave nothing to read
            list(part(hour))
    scripts = [command[0] for command in asked]
    assert scripts.count("bench.py") == 4 and "train_gpt2.py" in scripts
    for script, *flags in asked:
        if script == "bench.py":
            check_flags(read_flags(BenchConfig, args=flags))
        elif script == "train_gpt2.py":
            assert check(parse_command_line(flags), 1) == []


def test_the_batch_sweep_stands_beside_what_was_planned(hour, monkeypatch):
    options = dict(B=4, T=16, size=dict(n_layer=2, n_head=2, n_embd=64))
    rows = [dict(name="B 4", unit="tokens/s", median=5.0, memory_gb=0.5, options=options)]
    rows.append(dict(name="B 8", error="OutOfMemoryError: no room"))
    result = dict(dtype="float32", benchmarks=dict(sweep=dict(rows=rows, notes=[])))
    monkeypatch.setattr(first_hour, "measure", lambda *_: iter(()))
    monkeypatch.setattr(first_hour, "read_result", lambda _: result)
    monkeypatch.setattr(first_hour, "plan_bytes", lambda *_: 4e8)
    (table,) = first_hour.sweep_batch(hour)
    assert table.splitlines()[2:] == ["| 4 | 0.50 | 0.40 | 0.80 |"]


def test_what_is_planned_grows_by_the_sequence_from_the_state_of_the_model():
    size = dict(n_layer=2, n_head=2, n_embd=64)
    world = World("cpu")
    planned = []
    for B in (0, 1, 2):
        planned.append(first_hour.plan_bytes(dict(B=B, T=16, size=size), world, torch.float32))
    state = 16 * (50304 * 64 + 16 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64)
    assert planned[0] >= state
    assert planned[2] - planned[1] == planned[1] - planned[0] > 0


def test_a_sweep_ends_at_once_where_no_memory_is_free(monkeypatch):
    peaks = {"float32": (1e12, "a test"), "bfloat16": (2e12, "a test")}
    config = BenchConfig(model="tiny", sequence_length=16)
    cpu = torch.device("cpu")
    m = bench.Machine(config, cpu, torch.float32, "a test", "--no-compile", peaks)
    monkeypatch.setattr(m, "measure", lambda sides: [dict(median=1.0, memory_gb=1.0)])
    for free, sizes in {0: 1, None: 3, 10**10: 4}.items():
        monkeypatch.setattr(bench, "free_memory", lambda _, free=free: free)
        m.config.max_batch = 8 if free else 4
        assert len(list(bench.sweep_batch_sizes(m))) == sizes


def test_memory_that_was_given_back_is_there_again_before_the_clock_runs(monkeypatch):
    runs = []
    here = dict(world=World("cpu"), runs=1, run=lambda: runs.append(1), emptied=True)
    monkeypatch.setattr(turns, "here", here)
    turns.take_turn(0.0)
    assert len(runs) == 2, "one that is not timed, and one that is"
    turns.take_turn(0.0)
    assert len(runs) == 3


def write_run(log_dir, last_loss: float, weights: bytes) -> Path:
    checkpoint = path_of(log_dir, first_hour.STEPS)
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(weights)
    records = [dict(type="run", config={})]
    for step, loss in enumerate((9.0, last_loss)):
        records.append(dict(type="train", step=step, loss=loss, norm=1.0))
    (log_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    return log_dir


def test_the_last_bit_of_a_loss_and_of_the_weights_makes_another_run(tmp_path):
    whole = write_run(tmp_path / "whole", 0.3, b"weights")
    same = write_run(tmp_path / "same", 0.3, b"weights")
    assert "all 2 steps" in first_hour.compare_runs(whole, same)
    other_loss = write_run(tmp_path / "loss", math.nextafter(0.3, 1), b"weights")
    with pytest.raises(Failed, match=r"(?s)another run.*0\.3, 1\.0\) \(1, 0\.30000000000000004"):
        first_hour.compare_runs(whole, other_loss)
    other_weights = write_run(tmp_path / "weights", 0.3, b"weight5")
    with pytest.raises(Failed, match=r"another run.*only the final weights differ"):
        first_hour.compare_runs(whole, other_weights)


@pytest.mark.torture
def test_the_whole_hour_leaves_a_complete_record_on_a_cpu(tmp_path):
    flags = f"--device cpu --log-dir {tmp_path}/log --out {tmp_path}/out"
    run_script("benchmarks/first_hour.py", *shlex.split(flags), cwd=ROOT)
    (folder,) = (tmp_path / "out").iterdir()
    page = (folder / "README.md").read_text()
    for part in first_hour.PARTS:
        assert f"## {part}\n" in page and (folder / f"{part}.md").exists()
    assert "**Failed.**" not in page and "Not done yet" not in page
    assert "| B | measured GB | planned GB |" in page and "bit for bit" in page
    for picture in ("ladder", "batch", "paths", "training"):
        assert f"({picture}.png)" in page
        assert (folder / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert '"type": "resume"' in (tmp_path / "log" / "cut" / "metrics.jsonl").read_text()

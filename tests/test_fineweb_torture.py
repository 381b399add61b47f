"""fineweb.py for longer than `make test` has time: many kills, large files, memory."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time

import pytest
from test_fineweb import (
    contents,
    corpus_with_everything,
    kill_and_restart,
    prose,
    run,
    session,
    start,
    wait_for,
    write_parquet,
)

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("seed", [2, 3])
def test_twenty_kills_leave_no_trace(tmp_path, seed):
    kill_and_restart(tmp_path, times=20, count=4000, decontaminate=seed == 2, seed=seed)


@pytest.mark.parametrize("seed", [4, 5])
def test_workers_killed_at_random_moments_leave_no_trace(tmp_path, seed):
    """Only a worker is killed: its parent says so, and the same command goes on."""
    choose = random.Random(seed)
    options = corpus_with_everything(tmp_path, 4000, decontaminate=False)
    process = start(*options, "--data-dir", tmp_path / "whole", method="fork")
    wait_for(lambda: workers_of(process))
    began = time.perf_counter()
    process.communicate(timeout=600)
    took = time.perf_counter() - began
    assert process.returncode == 0
    out = tmp_path / "killed"
    told = 0
    for _ in range(10):
        process = start(*options, "--data-dir", out, method="fork")
        wait_for(lambda process=process: process.poll() is not None or workers_of(process))
        time.sleep(choose.random() * took / 20)
        if workers := workers_of(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(choose.choice(workers), signal.SIGKILL)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0 or "a worker was killed" in errors, errors
        told += process.returncode
        wait_for(lambda pid=process.pid: not session(pid))
    run(*options, "--data-dir", out)
    assert told > 4  # the last ones may find it finished
    assert contents(out) == contents(tmp_path / "whole")


def workers_of(process: subprocess.Popen) -> list[int]:
    return [pid for pid in session(process.pid) if pid != process.pid]


def test_memory_stays_flat_at_the_default_shard_size(tmp_path):
    """Six hundred megabytes of text: the first two shards wait in memory, a third is begun."""
    texts = prose(20_000, words=400)
    for i in range(20):
        some = texts[i * 1000 : i * 1000 + 1000]
        write_parquet(tmp_path / f"{i:02d}.parquet", some * 15, group=1000)
    options = ["--data-dir", tmp_path / "out", "--workers", 2]
    process = start("--source", tmp_path / "*.parquet", *options)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    peak = usage.ru_maxrss // 1024
    print(f"peak of the reading process: {peak} MB")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["tokens"] > 200_000_000
    assert 400 < peak < 1000

"""fineweb.py for longer than `make test` has time: many kills, large files, memory."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from test_fineweb import (
    NASTY,
    SURROGATES,
    contents,
    corpus_with_everything,
    expected,
    kill_and_restart,
    prose,
    run,
    session,
    start,
    texts_in,
    tokens_in,
    wait_for,
    write_parquet,
)

import fineweb

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
    peak = 0
    while process.poll() is None:
        try:
            with open(f"/proc/{process.pid}/status") as f:
                for line in f:
                    if line.startswith("VmHWM"):
                        peak = max(peak, int(line.split()[1]) // 1024)
        except (FileNotFoundError, ProcessLookupError):
            break
        time.sleep(0.05)
    assert process.wait() == 0 and not session(process.pid)
    print(f"peak of the reading process: {peak} MB")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["tokens"] > 200_000_000
    assert 400 < peak < 1000


def test_random_unicode_documents_come_back_exactly(tmp_path):
    choose = random.Random(11)
    planes = [range(0x20, 0x7F), range(0xA0, 0x2FF), range(0x4E00, 0x9FFF)]
    planes += [range(0x1F300, 0x1F6FF), range(0x110000)]
    texts = []
    for _ in range(20_000):
        letters = choose.choices(choose.choice(planes), k=choose.randrange(60))
        letters = [chr(c) for c in letters if not 0xD800 <= c < 0xE000]  # no surrogates
        texts.append("".join(" " * choose.randrange(2) + letter for letter in letters))
    texts += [*NASTY, SURROGATES.encode("utf-8", "replace").decode()]
    write_parquet(tmp_path / "a.parquet", texts, group=997)
    options = ["--source", tmp_path / "a.parquet", "--data-dir", tmp_path / "out"]
    options += ["--shard-size", 100_003, "--workers", 7]
    subprocess.run([sys.executable, fineweb.__file__, *map(str, options)], check=True)
    tokens = tokens_in(tmp_path / "out")
    assert np.array_equal(tokens, expected(texts))
    assert texts_in(tokens) == texts

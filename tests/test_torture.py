"""Kills training at random moments, again and again: the run must be the one left alone.

make torture                                              each kind, 10 kills
PYTHONPATH=. python tests/test_torture.py --minutes 60    as many kills as fit, added up in
                                                          benchmarks/torture.json
"""

import argparse
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT, documents, losses, tiny_run, weights_hash, write_shard
from contract import Done
from warm import Warm, two_ranks

from support.run import checkpoint
from support.run.log import read_metrics
from support.show.report import revision

RECORD = ROOT / "benchmarks" / "torture.json"
KINDS = {  # name: flags, processes
    "adamw": ("--optimizer adamw", 1),
    "muon": ("--optimizer muon", 1),
    "adamw, compiled": ("--optimizer adamw --compile", 1),
    "muon, compiled": ("--optimizer muon --compile", 1),
    "muon, 2 ranks": ("--optimizer muon --batch-size 1", 2),
    "adamw, 2 ranks, zero1": ("--batch-size 1 --sharding zero1", 2),
    "adamw, 2 ranks, fsdp": ("--batch-size 1 --sharding fsdp", 2),
    "adamw, 2 ranks, compiled": ("--batch-size 1 --compile", 2),
    "muon, saved beside": ("--optimizer muon", 1),
    "adamw, 2 ranks, fsdp, saved beside": ("--batch-size 1 --sharding fsdp", 2),
}
OFTEN = """
    --max-steps 200 --checkpoint-every 3 --keep-checkpoints 2 --val-every 10 --val-tokens 160
    --sample-every 20 --hellaswag-every 25 --resume auto
"""
EXAMPLE = {"ctx": "A man", "endings": ["is here.", "goes.", "is.", "sits."], "label": 1}


def make_shards(directory: Path) -> Path:
    directory.mkdir()
    write_shard(directory / "toy_val_000000.npy", documents(700, seed=0))
    write_shard(directory / "toy_train_000001.npy", documents(3000, seed=1))
    (directory / "examples.jsonl").write_text(8 * (json.dumps(EXAMPLE) + "\n"))
    return directory


def run(
    warm: Warm, kind: str, shards: Path, log_dir: Path, seconds=None, only_rank_0=False
) -> Done:
    """Trains to the end, or is killed after so many seconds.

    only_rank_0: the other ranks are not killed, but lose their peer.
    """
    flags, processes = KINDS[kind]
    scored = ("--hellaswag-path", shards / "examples.jsonl")
    args = tiny_run(shards, log_dir, OFTEN + flags, *scored)
    script = "tests/beside.py" if "beside" in kind else "train_gpt2.py"
    pid = warm.start(script, *args, **(two_ranks() if processes == 2 else {}))
    if seconds is None:
        return warm.finish()
    time.sleep(seconds)
    if only_rank_0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return warm.finish()
    return warm.kill(pid)


def kill_again_and_again(warm: Warm, kind: str, place: Path, kills: int, seed: int) -> int:
    """Kills one run so many times. Its losses and weights must be those of a run left alone.

    Returns how many kills came before the run had ended.
    """
    shards = make_shards(place / "shards")
    start = time.perf_counter()
    done = run(warm, kind, shards, place / "whole")
    assert done.returncode == 0, done
    took = time.perf_counter() - start
    records = [r for r in read_metrics(place / "whole" / "metrics.jsonl") if r["type"] == "train"]
    startup = took - records[-1]["wall"]
    draw = random.Random(seed)
    killed = 0
    for _ in range(kills):
        seconds = draw.uniform(0.5 * startup, startup + 3)
        done = run(warm, kind, shards, place / "cut", seconds, only_rank_0=draw.random() < 0.3)
        assert done.returncode in (0, -signal.SIGKILL), done
        if done.returncode == 0:
            break
        killed += 1
    done = run(warm, kind, shards, place / "cut")
    assert done.returncode == 0, done
    assert losses(place / "cut") == losses(place / "whole")
    last = checkpoint.path_of(place / "cut", 200)
    assert weights_hash(last) == weights_hash(checkpoint.path_of(place / "whole", 200))
    assert not checkpoint.damage_of(last)
    left = [path.name for path in (place / "cut").iterdir() if "ckpt" in path.name]
    assert all(checkpoint.NAME.fullmatch(name) for name in left), "nothing half-written stays"
    assert len(left) in (2, 3), "the newest two, and the best"
    return killed


@pytest.mark.torture
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_at_random_moments_is_the_run_left_alone(tmp_path, warm, kind):
    assert kill_again_and_again(warm, kind, tmp_path, kills=10, seed=0) > 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    until = time.time() + 60 * parser.parse_args().minutes
    record = json.loads(RECORD.read_text())
    here = revision().removesuffix("-dirty")  # the record itself may have changed
    if record["revision"] != here:  # other code has proved nothing about this one
        record = {"revision": here, "kills": {}, "runs": {}}
    with Warm() as warm:
        while time.time() < until:
            seed = sum(record["runs"].values())
            kind = min(KINDS, key=lambda kind: record["runs"].get(kind, 0))
            with tempfile.TemporaryDirectory() as folder:
                killed = kill_again_and_again(warm, kind, Path(folder), kills=20, seed=seed)
            for name, number in {"kills": killed, "runs": 1}.items():
                record[name][kind] = record[name].get(kind, 0) + number
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
            total = sum(record["kills"].values())
            print(f"{kind}: {killed} kills, exact; {total} in all", flush=True)


if __name__ == "__main__":
    main()

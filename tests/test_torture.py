"""What takes long: kills at random moments, again and again, and what has survived them adds up.

make torture                                              each case once
PYTHONPATH=. python tests/test_torture.py --minutes 60    as many kills as fit, added up in
                                                          benchmarks/torture.json
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, command, documents, environment, losses, weights_hash, write_shard
from warm import Warm

from support import checkpoint
from support.records import read_metrics

RECORD = ROOT / "benchmarks" / "torture.json"
KINDS = {  # name: flags, processes
    "adamw": (["--optimizer", "adamw"], 1),
    "muon": (["--optimizer", "muon"], 1),
    "adamw, compiled": (["--optimizer", "adamw", "--compile"], 1),
    "muon, compiled": (["--optimizer", "muon", "--compile"], 1),
    "muon, 2 ranks": (["--optimizer", "muon", "--batch-size", "1"], 2),
    "adamw, 2 ranks, zero1": (["--batch-size", "1", "--sharding", "zero1"], 2),
    "adamw, 2 ranks, fsdp": (["--batch-size", "1", "--sharding", "fsdp"], 2),
    "adamw, 2 ranks, compiled": (["--batch-size", "1", "--compile"], 2),
}
OFTEN = ["--max-steps", "200", "--checkpoint-every", "3", "--keep-checkpoints", "2"]
OFTEN += ["--val-every", "10", "--val-tokens", "160", "--sample-every", "20", "--resume", "auto"]
OFTEN += ["--hellaswag-every", "25"]


def make_shards(directory: Path) -> Path:
    directory.mkdir()
    write_shard(directory / "toy_val_000000.npy", documents(700, seed=0))
    write_shard(directory / "toy_train_000001.npy", documents(3000, seed=1))
    example = {"ctx": "A man", "endings": ["is here.", "goes.", "is.", "sits."], "label": 1}
    (directory / "examples.jsonl").write_text(8 * (json.dumps(example) + "\n"))
    return directory


class Victim:
    """A run of one kind that can be started, killed at a moment, and started again.

    Of several ranks the kill takes all, or only one: torchrun then ends the other.
    """

    def __init__(self, warm: Warm, kind: str, shards: Path, log_dir: Path):
        self.warm = warm
        self.draw = random.Random(kind)
        self.flags, self.processes = KINDS[kind]
        self.log_dir = log_dir
        where = ["--data-dir", shards, "--log-dir", log_dir]
        scored = ["--hellaswag-path", shards / "examples.jsonl"]
        self.args = [*TINY, *where, *OFTEN, *scored, *self.flags]

    def run(self, seconds: float | None = None) -> bool:
        """Runs to the end, or is killed after so many seconds -> whether it ended."""
        if self.processes == 1:
            pid = self.warm.start("train_gpt2.py", *self.args)
            if seconds is not None:
                time.sleep(seconds)
                done = self.warm.kill(pid)
            else:
                done = self.warm.finish()
            assert done.returncode in (0, -signal.SIGKILL), done
            return done.returncode == 0
        process = subprocess.Popen(
            command("train_gpt2.py", *self.args, ranks=self.processes),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, err = process.communicate(timeout=seconds)
            assert process.returncode == 0, err
            return True
        except subprocess.TimeoutExpired:
            self.kill_all_or_one(process)
            return False

    def kill_all_or_one(self, process: subprocess.Popen) -> None:
        """Kills torchrun and its ranks, or one rank, and waits until all are gone."""
        doomed = descendants(process.pid)
        ranks = children(process.pid)
        if ranks and self.draw.random() < 0.5:
            doomed = [self.draw.choice(ranks)]
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=600)


def children(pid: int) -> list[int]:
    """The processes that a process has started; torchrun's are its ranks."""
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return []


def descendants(pid: int) -> list[int]:
    """A process and all that it has started: torchrun's workers have sessions of their own."""
    return [pid, *(p for child in children(pid) for p in descendants(child))]


def kill_again_and_again(warm: Warm, kind: str, place: Path, kills: int, seed: int) -> int:
    """Kills one run so many times; its losses and weights must be those of a run left alone.

    Returns how many kills came before the run had ended.
    """
    shards = make_shards(place / "shards")
    whole = Victim(warm, kind, shards, place / "whole")
    start = time.perf_counter()
    assert whole.run()
    took = time.perf_counter() - start
    records = [r for r in read_metrics(place / "whole" / "metrics.jsonl") if r["type"] == "train"]
    startup = took - records[-1]["wall"]
    victim = Victim(warm, kind, shards, place / "cut")
    draw = random.Random(seed)
    killed = 0
    for _ in range(kills):
        if victim.run(seconds=draw.uniform(0.5 * startup, startup + 3)):
            break
        killed += 1
    assert victim.run()
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
def test_a_run_killed_at_random_moments_is_the_run_left_alone(tmp_path, kind):
    with Warm() as warm:
        assert kill_again_and_again(warm, kind, tmp_path, kills=10, seed=0) > 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    args = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"kills": {}, "runs": {}}
    until = time.time() + 60 * args.minutes
    seed = sum(record["runs"].values())
    with Warm() as warm:
        while time.time() < until:
            kind = min(KINDS, key=lambda kind: record["runs"].get(kind, 0))
            with tempfile.TemporaryDirectory() as folder:
                killed = kill_again_and_again(warm, kind, Path(folder), kills=20, seed=seed)
            for name, number in {"kills": killed, "runs": 1}.items():
                record[name][kind] = record[name].get(kind, 0) + number
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
            print(
                f"{kind}: {killed} kills, exact; {sum(record['kills'].values())} in all", flush=True
            )
            seed += 1


if __name__ == "__main__":
    main()

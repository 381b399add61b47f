"""`make gpu`, with a Python that only notes what it is asked to do: there is no GPU here."""

import os
import re
import shlex
import signal
import subprocess
import tarfile

import conftest
import pytest
from conftest import ROOT, wait_for_file

from bench import BenchConfig
from config import parse_command_line, wrong_sizes
from fineweb import Config
from support.base.flags import out_of_range, parse_flags

PARTS = {  # of each part, a step in its middle, by a word of its command
    "gpu-tests": "test_cuda",
    "gpu-run": "resume",
    "gpu-climb": "ladder",
    "gpu-speed": "pieces",
    "gpu-large": "gpt2-xl",
}
FAKE = """#!/bin/sh
test "$1" = -c && { echo A-GPU; exit; }
echo "$@" >> asked
echo "$1 has begun"
case "$@" in *$STUCK*) touch stuck; while test -e stuck; do sleep 0.1; done;; esac
exit 3
"""


def make(folder, *arguments: str) -> list[str]:
    """The command that makes a part in a folder, with the fake Python."""
    python = folder / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    for name in ("Makefile", "tests"):
        (folder / name).symlink_to(ROOT / name)
    return ["make", "-s", "-C", folder, f"PY={python}", *arguments]


def read_archive(folder, part: str) -> dict[str, str]:
    """The files of what a part left, without the part's name."""
    with tarfile.open(folder / f"{part}.tar.gz") as archive:
        names = [name for name in archive.getnames() if "." in name]
        return {n.removeprefix(f"{part}/"): archive.extractfile(n).read().decode() for n in names}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder in which `make gpu` has run, every command of which has failed."""
    folder = tmp_path_factory.mktemp("gpu")
    arguments = make(folder, "gpu", "HELLASWAG=examples.jsonl")
    made = conftest.run_program(arguments, STUCK="never", OUT="", CPU="")
    assert made.returncode == 2 and "FAILED with 3" in made.stdout
    return folder


def asked(done) -> list[list[str]]:
    return [shlex.split(line) for line in (done / "asked").read_text().splitlines()]


def test_a_command_that_fails_leaves_its_log_and_does_not_stop_the_next(done):
    scripts = [command[0] for command in asked(done)]
    assert scripts.count("bench.py") == 3 and scripts.count("train_gpt2.py") == 6
    logs = []
    for part in PARTS:
        left = read_archive(done / "benchmarks/A-GPU", part)
        assert "A-GPU" in left.pop("versions.txt"), "where PyTorch's own words would stand"
        assert all("FAILED with" in log for log in left.values())
        logs += left
    assert len(logs) == len(scripts) + 2  # and the two comparisons of the runs


def test_a_run_on_a_gpu_is_no_fork_of_the_warm_process(monkeypatch, tmp_path):
    monkeypatch.setattr(conftest, "warm_server", lambda: pytest.fail("a fork cannot use CUDA"))
    monkeypatch.setattr(conftest, "run_script", lambda script, *args, **_: [script, *args])
    assert "cuda" in conftest.train(tmp_path, tmp_path, "--device cuda --compile")


def test_every_command_has_flags_that_the_scripts_take(done):
    settings = dict.fromkeys(("bench.py", "tests/profile_step.py"), BenchConfig)
    settings["fineweb.py"] = Config
    for script, *flags in asked(done):
        if script == "train_gpt2.py":
            config = parse_command_line(flags)
            assert out_of_range(config) + wrong_sizes(config, 1) == []
        elif script != "-m":
            parse_flags(settings[script], flags)


def test_the_killed_run_is_resumed_and_compared_with_the_one_left_alone(done):
    whole, cut, resumed = [set(command) for command in asked(done) if "--deterministic" in command]
    assert whole ^ cut == {"log/gpu/gpu-run/whole", "log/gpu/gpu-run/cut"}
    assert resumed - cut == {"--resume", "auto"}
    left = read_archive(done / "benchmarks/A-GPU", "gpu-run")
    assert "FAILED with 3 before it made log/gpu/gpu-run/cut/ckpt_000010" in left["cut.log"]
    for name in ("same_losses", "same_weights"):
        assert "FAILED with 2: cmp" in left[f"{name}.log"]


@pytest.mark.parametrize("part", PARTS)
def test_the_time_limits_of_a_part_leave_it_within_nine_minutes(part, tmp_path):
    steps = subprocess.run([*make(tmp_path, "-n", part)], capture_output=True, text=True).stdout
    limits = [int(seconds) + 5 for seconds in re.findall(r"\bstep (\d+) ", steps)]
    assert limits and sum(limits) <= 510
    for seconds, typed in re.findall(r"\bstep (\d+) (.*?--max-steps .*?);", steps):
        asked = dict(re.findall(r"--(max-steps|total-batch-size) (\d+)", typed))
        tokens = int(asked["max-steps"]) * int(asked["total-batch-size"])
        # what a T4 does of the 124M, at 40% of its peak; none trains the XL
        assert part == "gpu-large" or tokens <= 30_000 * (int(seconds) - 5)
    assert all("--total-batch-size" in step for step in steps.splitlines() if "--max-steps" in step)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("part, step", PARTS.items())
def test_a_part_killed_in_its_middle_leaves_what_it_had_finished(part, step, number, tmp_path):
    environment = conftest.environment(STUCK=step, OUT="out", CPU="1")
    with subprocess.Popen(make(tmp_path, part), env=environment, start_new_session=True) as process:
        wait_for_file(tmp_path / "stuck")
        os.killpg(process.pid, number)
    (tmp_path / "stuck").unlink()  # so that what outlives a SIGKILL ends
    left = read_archive(tmp_path / "out", part)
    assert "A-GPU" in left["versions.txt"]
    finished = [log for log in left.values() if "FAILED with" in log]
    assert len(finished) == len(asked(tmp_path)) - 1
    begun = [log for log in left.values() if "has begun" in log and "FAILED" not in log]
    assert len(begun) == (number == signal.SIGTERM), "the step's output, too, if there is time"

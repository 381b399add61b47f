"""`make gpu`, with a Python that only notes what it is asked to do: there is no GPU here."""

import shlex
import subprocess

import conftest
import pytest
from conftest import ROOT

from bench import BenchConfig
from config import parse_command_line, wrong_sizes
from fineweb import Config
from support.common import out_of_range, parse_flags

FAKE = """#!/bin/sh
test "$1" = -c && { echo A-GPU; exit; }
echo "$@" >> asked
exit 3
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder in which `make gpu` has run, every command of which has failed."""
    folder = tmp_path_factory.mktemp("gpu")
    python = folder / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    make = ["make", "-s", "-C", folder, "-f", ROOT / "Makefile", "gpu", f"PY={python}"]
    made = subprocess.run(make, capture_output=True, text=True, timeout=120)
    assert made.returncode == 2 and "FAILED with 3" in made.stdout
    return folder


def asked(done) -> list[list[str]]:
    return [shlex.split(line) for line in (done / "asked").read_text().splitlines()]


def test_a_command_that_fails_leaves_its_log_and_does_not_stop_the_next(done):
    scripts = [command[0] for command in asked(done)]
    assert "--sweep" in asked(done)[1], "after the tests comes what matters most, should time end"
    assert scripts.count("bench.py") == 6 and scripts.count("train_gpt2.py") == 4
    logs = list(done.glob("benchmarks/A-GPU/*.log"))
    assert len(logs) == len(scripts) + 2  # and the two comparisons of the runs
    assert "FAILED with 3" in (done / "benchmarks/A-GPU/ladder.log").read_text()


def test_a_run_on_a_gpu_is_no_fork_of_the_warm_process(monkeypatch, tmp_path):
    monkeypatch.setattr(conftest, "warm_server", lambda: pytest.fail("a fork cannot use CUDA"))
    monkeypatch.setattr(conftest, "run_script", lambda script, *args, **_: [script, *args])
    assert "cuda" in conftest.train(tmp_path, tmp_path, "--device cuda --compile")


def test_every_command_has_flags_that_the_scripts_take(done):
    for script, *flags in asked(done):
        if script == "bench.py":
            parse_flags(BenchConfig, flags)
        elif script == "train_gpt2.py":
            config, _ = parse_command_line(flags)
            assert out_of_range(config) + wrong_sizes(config, 1) == []
        elif script == "fineweb.py":
            parse_flags(Config, flags)


def test_the_killed_run_is_resumed_and_compared_with_the_one_left_alone(done):
    whole, cut, resumed = [set(command) for command in asked(done) if "--deterministic" in command]
    assert whole ^ cut == {"log/gpu/whole", "log/gpu/cut"}
    assert resumed - cut == {"--resume", "auto"}
    for name in ("same_losses", "same_weights"):
        assert "FAILED with 2: cmp" in (done / f"benchmarks/A-GPU/{name}.log").read_text()

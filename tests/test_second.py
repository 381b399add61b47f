"""The two commands for the next fifteen minutes of a GPU, tried small on a CPU."""

import bz2
import json
import os
import re
import shlex
import subprocess
import sys

import ab
import conftest
import pytest
from conftest import ROOT
from test_gpu import FAKE

from bench import BenchConfig
from config import parse_command_line, wrong_sizes
from fineweb import Config
from sample import SampleConfig
from support.base.flags import out_of_range, parse_flags


def test_variants_take_turns_and_the_fastest_of_ours_is_chosen(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPU", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ab.main("2", "plain:MINE=1", "nanogpt:")
    printed = capsys.readouterr().out
    assert "  2 nanogpt              FAILED, see log/second/nanogpt-2.err" in printed
    assert "is no clone of nanoGPT" in (tmp_path / "log/second/nanogpt-2.err").read_text()
    assert re.search(r"  2 plain .* ms \(.*\), first loss 1\d\.\d+, \d", printed)
    assert re.fullmatch(r"export MINE=1\nexport BEST_MS=\S+\n", (ab.OUT / "choice-2").read_text())


@pytest.fixture
def asked(tmp_path):
    """What both commands ask of a Python that only notes it."""
    fake = FAKE.replace("/bin/sh", "/bin/bash").replace('echo "$@" >>', 'echo "${@@Q}" >>')
    (tmp_path / "python").write_text(fake.replace("A-GPU", "3600"))  # it is asked for a number
    (tmp_path / "python").chmod(0o755)
    for part in ("one", "two 600"):
        command = ["bash", str(ROOT / "tests" / "second.sh"), *part.split()]
        environment = conftest.environment(PY=str(tmp_path / "python"), OUT="out", STUCK="never")
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    return [shlex.split(line) for line in (tmp_path / "asked").read_text().splitlines()]


def test_every_command_of_the_fifteen_minutes_has_flags_that_the_scripts_take(asked):
    settings = {"tests/profile_step.py": BenchConfig, "fineweb.py": Config}
    settings["sample.py"] = SampleConfig
    for script, *flags in asked:
        if script == "train_gpt2.py":
            config = parse_command_line(flags)
            assert out_of_range(config) + wrong_sizes(config, 1) == []
        elif script in settings:
            parse_flags(settings[script], flags)
    scripts = [script for script, *_ in asked]
    assert scripts.count("tests/ab.py") == scripts.count("train_gpt2.py") == 2


@pytest.mark.torture
def test_both_commands_run_small_on_a_cpu(tmp_path):
    place = tmp_path / "tree"
    subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True)
    (place / ".books").mkdir()
    text = "".join((ROOT / page).read_text() for page in ("README.md", "CONTRIBUTING.md"))
    for name in ("train0.jsonl", "train1.jsonl", "val.jsonl"):
        lines = json.dumps({"text": f"{name} {text}"}).encode()
        (place / ".books" / f"{name}.bz2").write_bytes(bz2.compress(lines))
    environment = conftest.environment(PY=sys.executable, OUT="out", CPU="1") | {"PYTHONPATH": ""}
    for part in ("one", "two 600"):
        command = ["bash", "tests/second.sh", *part.split()]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
        ended = dict(re.findall(r"\] (\w+) ends: (\d+)", done.stdout))
        assert {name for name, code in ended.items() if code != "0"} <= {"tests"}, done.stdout
        assert (place / "out" / f"{part.split()[0]}.tar.gz").exists()
    assert "BEST_MS" in (place / "log/second/choice-64").read_text()
    assert (place / "log/books/report.md").exists() and os.listdir(place / "log/second/small")

"""What the scripts stand on: flags, files written whole, and which way imports run."""

import ast
import dataclasses
import doctest
import errno
import hashlib
import importlib
import os
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_program

from bench import BenchConfig
from config import TrainConfig
from fineweb import Config as FineWebConfig
from hellaswag import HellaSwagConfig
from plan import PlanConfig
from sample import SampleConfig
from support import checkpoint
from support.common import UserError, headings, read_flags, write_whole

# -- flags


@dataclasses.dataclass
class Flags:
    """How to make tea."""

    # -- pot: What it is made in.
    liters: float = 1.5  # how much water
    lid: bool = True  # whether it is shut
    # -- tea: What it is made of.
    leaves: str = "green"  # their kind; any that grows


def help_of(config_class, monkeypatch, capsys) -> str:
    """What --help prints, on one line and without the frames of its boxes."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        read_flags(config_class, args=["--help"])
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_flags_are_laid_over_the_defaults():
    args = ["--no-lid", "--leaves", "black"]
    assert read_flags(Flags, args=args) == Flags(lid=False, leaves="black")
    default = Flags(liters=0.5)
    assert read_flags(Flags, default, args) == Flags(liters=0.5, lid=False, leaves="black")


def test_the_comment_behind_a_field_is_the_help_of_its_flag(monkeypatch, capsys):
    shown = help_of(Flags, monkeypatch, capsys)
    assert "How to make tea." in shown
    _, boxes = shown.split("pot options")
    pot, tea = boxes.split("tea options")
    assert "What it is made in." in pot
    assert "--liters FLOAT how much water (default: 1.5)" in pot
    assert "--lid, --no-lid whether it is shut" in pot
    assert "--leaves STR their kind; any that grows (default: green)" in tea


@pytest.mark.parametrize(
    "config_class",
    [TrainConfig, FineWebConfig, HellaSwagConfig, SampleConfig, BenchConfig, PlanConfig],
)
def test_every_flag_of_every_script_has_a_help(config_class, monkeypatch, capsys):
    comments = {}
    for _, _, commented in headings(config_class):
        comments.update(commented)
    assert list(comments) == [field.name for field in dataclasses.fields(config_class)]
    shown = help_of(config_class, monkeypatch, capsys)
    for name, comment in comments.items():
        assert comment in shown, name


# -- files


def test_a_file_written_whole_holds_its_chunks_and_is_told_by_its_hash(tmp_path):
    sha256 = write_whole(tmp_path / "file", b"one, ", b"two")
    assert (tmp_path / "file").read_bytes() == b"one, two"
    assert sha256 == hashlib.sha256(b"one, two").hexdigest()


def test_a_full_disk_leaves_the_old_content_and_nothing_beside_it(tmp_path, monkeypatch):
    def full_disk(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_whole(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", b"new")
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "another", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_training_state_of_another_version_is_refused_in_a_sentence(tmp_path):
    newer = checkpoint.VERSION + 1
    torch.save({"step": 3, "version": newer}, tmp_path / checkpoint.STATE)
    with pytest.raises(UserError) as refused:
        checkpoint.load_state(tmp_path)
    [sentence] = str(refused.value).splitlines()
    assert f"is of version {newer}, this program reads version {checkpoint.VERSION}" in sentence
    assert f"--init-from {tmp_path}" in sentence


# -- imports


def modules_of_the_house() -> dict[str, Path]:
    """The modules by the names under which they are imported."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("support/*.py")]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


def imports_of(file: Path) -> set[str]:
    """What a file imports anywhere in it: modules, and their parts, which may be modules."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: names in full, please"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_support_imports_nothing_from_the_top_level():
    house = modules_of_the_house()
    assert "support.common" in house
    assert "train_gpt2" in house
    for name, file in house.items():
        if name.startswith("support"):
            ours = imports_of(file) & house.keys()
            assert all(other.startswith("support") for other in ours), (name, ours)


def test_no_modules_import_each_other_in_a_circle():
    house = modules_of_the_house()
    graph = {name: imports_of(file) & house.keys() for name, file in house.items()}
    assert graph["train_gpt2"] >= {"config", "model", "support.checkpoint"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("name", ["config", "fineweb"])
def test_what_starts_fast_does_not_import_torch(name):
    code = f"import {name}, sys; assert 'torch' not in sys.modules"
    done = run_program([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["model", "train_gpt2"])
def test_the_examples_in_docstrings_are_true(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0

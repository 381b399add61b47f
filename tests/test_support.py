"""What the scripts stand on: files written whole, and which way imports run."""

import ast
import dataclasses
import doctest
import errno
import hashlib
import os
import re
import sys
from graphlib import TopologicalSorter
from importlib.metadata import metadata
from pathlib import Path

import pytest
import same_bits
import torch
from conftest import ROOT, code_files, run_program, torchrun_variables
from packaging.specifiers import SpecifierSet

import config
import minutes
import train_gpt2
from support.base.console import run_script, say_once
from support.base.errors import UserError, reading
from support.base.files import write_whole
from support.base.process import command_for
from support.machine.device import GPUS
from support.machine.distributed import World, start_world

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
    for name in ("file", "another"):
        with pytest.raises(UserError, match=f"{tmp_path}/{name} cannot be written .No space left"):
            write_whole(tmp_path / name, b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error, traceback", [
    (FileNotFoundError("x"), True), (UserError("x"), False), (OSError(errno.ENOSPC, "x"), False),
    (OSError(errno.EDQUOT, "x"), False),
])  # fmt: skip
def test_only_what_the_user_can_mend_hides_its_traceback(error, traceback, capsys):
    def main(_args):
        raise error

    with pytest.raises(SystemExit) as end:
        run_script(main)
    printed = capsys.readouterr().err
    assert end.value.code == 1 and printed.endswith(" x\n")
    assert ("Traceback" in printed) == traceback


@pytest.mark.parametrize("error, sentence", [
    (KeyError("n_layer"), r"^it cannot be read \(KeyError: 'n_layer'\); look$"),
    (ValueError("two\n  lines"), r"\(ValueError: two lines\)"),
    (ValueError("No. This file can still be loaded: run its code"), r"\(ValueError: No\.\)"),
    (UserError("a sentence of ours"), "^a sentence of ours$"),
])  # fmt: skip
def test_what_cannot_be_read_is_one_sentence_and_a_sentence_of_ours_stays(error, sentence):
    with pytest.raises(UserError, match=sentence), reading("it", "look"):
        raise error


# -- GPUs


@pytest.mark.parametrize("name, known_as", [
    ("NVIDIA A100-SXM4-80GB", "A100"),
    ("NVIDIA A100 80GB PCIe", "A100"),
    ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
    ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA H100 PCIe", "H100-PCIe"),
    ("Tesla V100-SXM2-32GB", "V100"),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
])  # fmt: skip
def test_a_gpu_is_known_by_the_name_that_cuda_gives(name, known_as):
    found = [gpu for gpu, (pattern, *_) in GPUS.items() if re.fullmatch(pattern, name)]
    assert found == ([known_as] if known_as else [])


@pytest.mark.parametrize("cuda, files, name, visible, is_told", [
    ("13.0", "nvidiactl", "auto", {}, False),  # of a driver that is too old, PyTorch tells
    (None, "nvidiactl", "cpu", {}, False),
    (None, "nvidiactl", "auto", {"CUDA_VISIBLE_DEVICES": ""}, False),
    (None, "nvidiactl", "auto", {"CUDA_VISIBLE_DEVICES": "-1"}, False),
    (None, "", "auto", {}, False),
    (None, "nvidiactl", "auto", {}, True),
])  # fmt: skip
def test_no_gpu_idles_in_silence(
    monkeypatch, tmp_path, capsys, cuda, files, name, visible, is_told
):
    for file in files.split():
        (tmp_path / file).touch()
    monkeypatch.setattr("support.machine.device.Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: None)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("support.machine.distributed.join", lambda world: None)
    monkeypatch.setattr(os, "environ", torchrun_variables(0, 8, 8) | visible)
    say_once.cache_clear()
    assert [start_world(name).device.type for _ in range(2)] == ["cpu", "cpu"]
    assert capsys.readouterr().err.count("the GPU is not used, because") == is_told, "once"


# -- imports


def imports_of(file: Path) -> set[str]:
    """What a file imports when it runs: modules, and their parts, which may be modules."""
    found = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in [node for node in tree.body if isinstance(node, ast.If)]:  # if TYPE_CHECKING:
        assert "TYPE_CHECKING" in ast.unparse(node.test) or "__main__" in ast.unparse(node.test)
        tree.body.remove(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: names in full, please"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


WINGS = ("base", "machine", "text", "weights", "run", "show")  # each may import those before it


def test_the_wings_of_support_stand_on_each_other_in_one_order_and_on_nothing_above():
    names = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in code_files()}
    graph = {name: imports_of(file) & names.keys() for name, file in names.items()}
    assert graph["train_gpt2"] >= {"config", "model", "support.run.checkpoint"}
    assert [*TopologicalSorter(graph).static_order()]  # CycleError names a circle
    order = [f"support.{wing}" for wing in WINGS]
    for name in graph:
        wing = name.rpartition(".")[0]
        if name.startswith("support.") and wing != "support":
            allowed = order[: order.index(wing) + 1]
            assert {other.rpartition(".")[0] for other in graph[name]} <= {*allowed}, name


def test_settings_are_changed_where_they_settle_and_after_the_rehearsal_only():
    found = []
    for file in code_files():
        calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
        names = [ast.unparse(call.func).rpartition(".")[2] for call in calls]
        found += [f"{file.stem}: {name}" for name in names if name == "with_chosen"]
        found += [f"{file.stem}: {n}" for n in names if n == "replace" and file.stem == "config"]
    assert sorted(set(found)) == ["config: replace", "config: with_chosen", "minutes: with_chosen"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.TrainConfig().seed = 1


def test_every_python_file_is_counted_and_checked():
    listed = run_program(["git", "ls-files", "*.py", ":!tests"]).stdout.split()
    assert {ROOT / name for name in listed} <= {*code_files()}
    excluded = re.search(r'(?m)^exclude = "(.*)"', (ROOT / "pyproject.toml").read_text())[1]
    assert not [name for name in listed if re.search(excluded, name)], "mypy leaves them out"


@pytest.mark.parametrize("name", ["config", "fineweb", "minutes", "plan"])
def test_what_starts_fast_does_not_import_torch(name):
    code = f"import {name}, sys; assert 'torch' not in sys.modules"
    done = run_program([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_commands_name_the_python_of_an_environment_in_this_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my env" / "bin" / "python"))
    monkeypatch.setattr(sys, "argv", ["scripts/train_gpt2.py"])
    monkeypatch.chdir(tmp_path)
    assert command_for("sample.py") == "'my env/bin/python' scripts/sample.py"
    two = World(torch.device("cpu"), size=2, local_size=2)
    assert two.launcher == "'my env/bin/torchrun' --standalone --nproc_per_node=2"
    monkeypatch.chdir(tmp_path / "..")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert command_for("sample.py") == "python scripts/sample.py"


def test_same_bits_names_each_run_before_it_starts(monkeypatch, capsys):
    told = []
    read = capsys.readouterr
    monkeypatch.setattr(same_bits, "run", lambda *_, **__: told.append(read().err) or "{}")
    monkeypatch.setattr(same_bits, "hashes_of_run", lambda log_dir: [])
    assert list(same_bits.hashes_of(ROOT)) == []
    assert told[1:-1] == [f"{name} …\n" for name in same_bits.RUNS]


def test_pins_without_a_condition_install_on_the_oldest_python():
    for name in ("requirements.txt", "requirements-dev.txt"):
        pins = re.findall(r"^([\w-]+)==[\w.]+$", (ROOT / name).read_text(), re.MULTILINE)
        assert len(pins) > 5
        for package in pins:
            assert "3.10" in SpecifierSet(metadata(package)["Requires-Python"]), package


@pytest.mark.parametrize("module", [train_gpt2, minutes])
def test_the_examples_of_the_rules_are_true(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0

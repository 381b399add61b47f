"""What the scripts stand on: files written whole, and which way imports run."""

import ast
import doctest
import errno
import hashlib
import os
import re
import sys
from contextlib import nullcontext
from graphlib import TopologicalSorter
from importlib.metadata import metadata
from pathlib import Path

import pytest
import same_bits
import torch
from conftest import ROOT, run_program, torchrun_variables
from packaging.specifiers import SpecifierSet

import config
import fineweb
import train_gpt2
from support.common import UserError, command_for, reading, run_script, say_once, write_whole
from support.device import GPUS
from support.distributed import World, start_world

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


DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.54.03  Release Build\n"
REFUSED = "PyTorch for CUDA 13.0 cannot use the GPU with driver 535.54.03: update the driver, add "
REFUSED += "--device cpu, or pip install --force-reinstall torch=="


@pytest.mark.parametrize("cuda, files, name, visible, ends", [
    ("13.0", "version nvidiactl", "auto", {}, REFUSED),
    ("13.0", "version nvidiactl", "cuda", {"CUDA_VISIBLE_DEVICES": "0,1"}, REFUSED),
    ("13.0", "version nvidiactl", "cpu", {}, ""),
    ("13.0", "version nvidiactl", "auto", {"CUDA_VISIBLE_DEVICES": ""}, ""),
    ("13.0", "version nvidiactl", "auto", {"CUDA_VISIBLE_DEVICES": "-1"}, ""),
    ("13.0", "version", "auto", {}, ""),
    (None, "version nvidiactl", "auto", {}, "the GPU is not used, because .*\n"),
])  # fmt: skip
def test_no_gpu_idles_in_silence(monkeypatch, tmp_path, capsys, cuda, files, name, visible, ends):
    for file in files.split():
        (tmp_path / file).write_text(DRIVER)
    for module in ("device", "common"):
        monkeypatch.setattr(f"support.{module}.Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: None)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("support.device.as_typed", str)
    monkeypatch.setattr("support.distributed.join", lambda world: None)
    monkeypatch.setattr(os, "environ", torchrun_variables(0, 8, 8) | visible)
    say_once.cache_clear()
    with pytest.raises(UserError, match=ends) if ends == REFUSED else nullcontext():
        assert [start_world(name).device.type for _ in range(2)] == ["cpu", "cpu"]
        assert re.fullmatch(ends, capsys.readouterr().err)


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


def test_support_imports_nothing_from_the_top_level_nor_in_a_circle_and_has_four_floors_at_most():
    files = [*ROOT.glob("*.py"), *ROOT.glob("support/*.py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    house = {n.removesuffix(".__init__"): file for n, file in zip(names, files, strict=True)}
    graph = {name: imports_of(file) & house.keys() for name, file in house.items()}
    assert graph["train_gpt2"] >= {"config", "model", "support.checkpoint"}
    floors = {"support": 0}
    for name in TopologicalSorter(graph).static_order():  # CycleError names a circle
        if name.startswith("support."):
            assert all(other.startswith("support") for other in graph[name]), (name, graph[name])
            floors[name] = 1 + max((floors[other] for other in graph[name]), default=0)
    assert max(floors.values()) <= 4, floors


@pytest.mark.parametrize("name", ["config", "fineweb", "plan"])
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


@pytest.mark.parametrize("module", [train_gpt2, config, fineweb])
def test_the_examples_of_the_rules_are_true(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0

"""The same run by each technique, and mistakes beside the right run."""

import json
import re
import subprocess

import pytest
from conftest import ROOT, documents, write_shard

from benchmarks import mistakes, techniques
from support.base.errors import UserError

TINY = """
    --n-layer 1 --n-head 2 --n-embd 16 --sequence-length 16 --batch-size 1 --total-batch-size 64
    --max-steps 3
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Flags of a tiny run on a text of its own. What it writes goes to tmp_path."""
    (tmp_path / "text").mkdir()
    for split, seed in ("val", 0), ("train", 1):
        write_shard(tmp_path / "text" / f"toy_{split}_000000.npy", documents(3000, seed=seed))
    monkeypatch.setattr(techniques, "OUT", tmp_path / "techniques")
    monkeypatch.setattr(mistakes, "OUT", tmp_path / "mistakes")
    monkeypatch.chdir(ROOT)
    return [*TINY.split(), f"--data-dir={tmp_path}/text"]


def read_record(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def test_the_recorded_techniques_are_one_run():
    record = read_record("techniques")
    far = techniques.differences(record)
    assert list(far) == list(techniques.TECHNIQUES)
    bounds = {name: bound for name, (_, _, bound) in techniques.TECHNIQUES.items()}
    assert all(far[name] <= bound for name, bound in bounds.items())
    record["runs"]["compiled"]["loss"][100] += 0.02
    assert techniques.differences(record)["compiled"] > bounds["compiled"]
    page = (ROOT / "docs" / "techniques.md").read_text()
    assert techniques.table(read_record("techniques")) in page
    by_step, by_time = techniques.plot_techniques(record).axes
    assert len(by_step.lines) == len(by_time.lines) == 2 * len(bounds), "a curve and its crosses"


def test_runs_are_compared_and_drawn_and_one_that_is_another_is_an_error(
    tiny, tmp_path, monkeypatch, capsys
):
    """The first run has attention written out; the other one reads its data in another order."""
    chosen = {name: techniques.TECHNIQUES[name] for name in (techniques.BY_HAND,)}
    chosen["another seed"] = ("--dtype float32 --no-compile --seed 2", 1, 0.01)
    monkeypatch.setattr(techniques, "TECHNIQUES", chosen)
    with pytest.raises(UserError, match=r"explains: another seed$"):
        techniques.main(tiny)
    assert f"| {techniques.BY_HAND} | 10." in capsys.readouterr().out
    made = {path.name for path in (tmp_path / "techniques").iterdir()}
    assert {"techniques.json", "techniques.png"} < made
    with pytest.raises(UserError, match=r"another-seed ended early: .*4000"):
        techniques.train_by("another seed", [*tiny, "--sequence-length=4000"])


def test_each_mistake_is_a_diff_of_this_code_and_is_drawn():
    diffs = sorted((ROOT / "docs" / "mistakes").glob("*.diff"))
    assert {diff.stem for diff in diffs} == set(mistakes.MISTAKES)
    for diff in diffs:
        subprocess.run(["git", "apply", "--check", diff], cwd=ROOT, check=True)
    figure = mistakes.plot_mistakes(read_record("mistakes"))
    assert [len(axis.lines) for axis in figure.axes] == [2, 2, 2, 2]


def test_a_mistake_is_trained_in_a_copy(tiny, tmp_path):
    flags = [*tiny, "--no-compile", "--val-every", "0", "--sample-every", "0"]
    right = mistakes.train_with("", flags)
    wrong = mistakes.train_with("divided-twice", flags)
    losses = [run.series("loss")[1] for run in (right, wrong)]
    assert losses[0][0] == pytest.approx(4 * losses[1][0], rel=1e-5), "4 micro-batches"


def test_the_tests_that_the_page_of_mistakes_names_are_there():
    page = (ROOT / "docs" / "mistakes.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) >= 5
    assert not [name for name in named if f"def {name}(" not in code]

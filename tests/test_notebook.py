"""play.ipynb, executed from top to bottom."""

import re

import pytest
from conftest import ROOT
from test_plots import write_run

from model import GPT, GPTConfig

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

MACHINE_PATH = re.compile(r"(/home/|/root/|/work/|/tmp/|/Users/|[A-Z]:\\\\)\w")


def execute(directory, monkeypatch):
    """The notebook after it ran in a directory: the scripts in reach, and no hub."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(directory / "huggingface"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(ROOT / "play.ipynb", as_version=4)
    where = {"metadata": {"path": str(directory)}}
    client = nbclient.NotebookClient(notebook, timeout=240, startup_timeout=240, resources=where)
    return client.execute()


def outputs(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in code for output in cell.outputs]


def pictures(notebook):
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def text(notebook):
    """All that can be read in the outputs: what was printed, and tables."""
    found = [output.get("text") or output.get("data", {}) for output in outputs(notebook)]
    return "\n".join(part if isinstance(part, str) else part.get("text/html", "") for part in found)


def test_the_notebook_draws_the_runs_and_the_newest_checkpoint(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "tiny")
    model = GPT(GPTConfig(block_size=32, n_layer=2, n_head=2, n_embd=32))
    model.save_pretrained(tmp_path / "log" / "tiny" / "ckpt_000002")
    notebook = execute(tmp_path, monkeypatch)
    assert pictures(notebook) == 5, "loss, HellaSwag, the steps; positions, one head"
    shown = text(notebook)
    assert "log/tiny/ckpt_000002: " in shown and not MACHINE_PATH.search(shown)
    assert "== tiny, step 20\nso <far> 20\n$\n--\nand so on" in shown, "the first samples"
    assert "step 60" in shown and "step 40" not in shown, "and the last"
    row = ("data/stdlib", "<td>12</td>", "<td>3.3174</td>", "<td>0.28</td>", "<td>1000")
    assert all(cell in shown for cell in row), "the table of runs"
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]


def test_without_a_model_the_notebook_says_in_a_line_how_to_get_one(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "tiny", total=999)
    notebook = execute(tmp_path, monkeypatch)
    assert pictures(notebook) == 2, "loss, the steps; HellaSwag needs 1,000 examples"
    assert "make quickstart" in text(notebook) and not MACHINE_PATH.search(text(notebook))


def test_the_committed_outputs_are_whole_and_small_and_name_no_machine():
    assert (ROOT / "play.ipynb").stat().st_size < 1.5e6
    notebook = nbformat.read(ROOT / "play.ipynb", as_version=4)
    assert pictures(notebook) >= 4, "runs and a model"
    for output in outputs(notebook):
        assert output.output_type != "error" and output.get("name") != "stderr"
    assert not MACHINE_PATH.search(text(notebook))

"""play.ipynb, executed from top to bottom."""

import re
from pathlib import Path

import pytest
from test_plots import write_run

from model import GPT, GPTConfig

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

REPO = Path(__file__).resolve().parent.parent
MACHINE_PATH = re.compile(r"(/home/|/root/|/work/|/tmp/|/Users/|[A-Z]:\\\\)\w")


def execute(directory, monkeypatch):
    """The notebook after it ran in a directory: the scripts in reach, and no hub."""
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(directory / "huggingface"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(REPO / "play.ipynb", as_version=4)
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
    found = []
    for output in outputs(notebook):
        found.append(output.get("text", "") or output.get("data", {}).get("text/html", ""))
    return "\n".join(map(str, found))


def test_the_notebook_draws_the_runs_and_the_newest_checkpoint(tmp_path, monkeypatch):
    if (REPO / "runs").is_dir():
        (tmp_path / "runs").symlink_to(REPO / "runs")
    else:
        write_run(tmp_path / "runs" / "tiny")
    model = GPT(GPTConfig(block_size=32, n_layer=2, n_head=2, n_embd=32))
    model.save_pretrained(tmp_path / "log" / "tiny" / "ckpt_000002")
    notebook = execute(tmp_path, monkeypatch)
    # loss, the steps; positions, attention weights, all heads, one head
    assert pictures(notebook) == 6
    assert "log/tiny/ckpt_000002: " in text(notebook)
    assert not MACHINE_PATH.search(text(notebook))
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]


def test_without_a_model_the_notebook_says_in_a_line_how_to_get_one(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "tiny")
    notebook = execute(tmp_path, monkeypatch)
    assert pictures(notebook) == 3, "loss, HellaSwag, the steps"
    assert "make quickstart" in text(notebook) and not MACHINE_PATH.search(text(notebook))
    assert "so &lt;far&gt; 60<br>$" in text(notebook)  # samples


def test_the_committed_outputs_are_whole_and_small_and_name_no_machine():
    assert (REPO / "play.ipynb").stat().st_size < 1.5e6
    notebook = nbformat.read(REPO / "play.ipynb", as_version=4)
    assert pictures(notebook) >= 9, "runs, benchmarks and a model"
    for output in outputs(notebook):
        assert output.output_type != "error" and output.get("name") != "stderr"
    assert not MACHINE_PATH.search(text(notebook))

"""play.ipynb, executed from top to bottom."""

import json
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, environment
from test_plots import write_run

from model import GPT, GPTConfig
from support.show import notebook as wing

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

PAGE = ROOT / "play.ipynb"
MACHINE_PATH = re.compile(r"(/home/|/root/|/work/|/tmp/|/Users/|[A-Z]:\\\\)\w")


def execute(directory, monkeypatch, last_cell="", offline="1") -> Any:
    """The notebook after it ran in a directory: the scripts in reach, a tiny size, and no hub.

    last_cell: words of the cell at which it ends, if not the last.
    """
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setenv("HF_HOME", str(directory / "huggingface"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(ROOT / "play.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace(
            "size = {}", "size = dict(n_layer=2, n_head=2, n_embd=64)"
        )
    ends = [i for i, cell in enumerate(notebook.cells) if last_cell and last_cell in cell.source]
    notebook.cells = notebook.cells[: ends[0] + 1 if ends else None]
    where = {"metadata": {"path": str(directory)}}
    client = nbclient.NotebookClient(notebook, timeout=240, startup_timeout=240, resources=where)
    return client.execute()


def test_cells_say_what_they_skip_of_a_model_with_a_short_context_or_without_positions(capsys):
    """As by the page's rotary diff, or by --minutes on a few kilobytes."""
    tiny = GPT(GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=4))
    example = dict(ctx="one two three", endings=["four five", "six seven eight nine"])
    assert wing.can_read(tiny, dict(ctx="one", endings=["two"]))
    assert not wing.can_read(tiny, example | dict(ctx="one two three four five"))
    del tiny.transformer["wpe"]
    assert not wing.has_positions(tiny)
    full = GPT(GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=4))
    assert len(wing.draw_weights({"untrained": full, "trained": tiny}).axes) == 3
    told = capsys.readouterr().out
    assert "reads 8 tokens, not these 9" in told and told.count("has no wpe") == 2
    cells = "".join("".join(cell.source) for cell in nbformat.read(PAGE, as_version=4).cells)
    assert cells.count("notebook.has_positions(trained)") == 2 and "can_read(trained" in cells


def outputs(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in code for output in cell.outputs]


def pictures(notebook):
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def text(notebook):
    """All that can be read in the outputs: what was printed, and tables."""
    found = [output.get("text") or output.get("data", {}) for output in outputs(notebook)]
    kinds = ("text/html", "text/markdown")
    return "\n".join(
        part if isinstance(part, str) else "".join(part.get(kind, "") for kind in kinds)
        for part in found
    )


def test_the_notebook_walks_from_nothing_to_gpt2_and_through_what_a_run_leaves(
    tmp_path, monkeypatch
):
    write_run(tmp_path / "runs" / "tiny")
    model = GPT(GPTConfig(block_size=32, n_layer=2, n_head=2, n_embd=32))
    model.save_pretrained(tmp_path / "log" / "tiny" / "ckpt_000002")
    notebook = execute(tmp_path, monkeypatch)
    assert pictures(notebook) == 15
    shown = text(notebook)
    assert "log/tiny/ckpt_000002: " in shown and not MACHINE_PATH.search(shown)
    first, last = re.search(
        r"step  0 \| loss (\S+).*step 49 \| loss (\S+)", shown, re.DOTALL
    ).groups()
    walk = [
        "transformer.h.0.attn.c_attn.weight (192, 64)       transposed in OpenAI's files",
        "one tensor: True and one memory: True",
        "[ 5962, 22307,    25,   198,  8421,   356]",
        "plain: 10.1, scaled by 1/√100: 1.0",
        "rank 7 reads sequences [14, 15, 30, 31, 46, 47]",
        "mask of row 0: [0, 0, 0",
        "10 tensors with 3,383,296 numbers decay, 18 tensors with 1,792 numbers do not",
    ]
    assert not [line for line in walk if line not in shown]
    assert float(last) < float(first) - 0.5 and abs(float(first) - 10.82) < 0.3
    assert shown.count("(as generate: True)") == 4 and "as generate: False" not in shown
    assert "== tiny, step 20\nso <far> 20\n\n    $\n--\nand so on" in shown, "the first samples"
    assert "== tiny, step 40" in shown and "== tiny, step 60" in shown, "few are all shown"
    assert "its first ten merges: [' t', ' a', 'he', 'in'," in shown
    assert "torch.float16: plain 0.0e+00, scaled 1.0e-08" in shown
    row = ("data/stdlib", "<td>12</td>", "<td>3.3174</td>", "<td>0.28</td>", "<td>1000")
    assert all(cell in shown for cell in row), "the table of runs"
    assert "0.3007" in shown, "what others got from scratch"
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]


class Hub(SimpleHTTPRequestHandler):
    """A stand-in of the hub with one model, the files of server.folder, named gpt2."""

    def log_message(self, *_) -> None:
        pass

    def translate_path(self, path: str) -> str:
        return str(self.server.folder / Path(path).name)

    def end_headers(self) -> None:
        self.send_header("ETag", f'"{Path(self.path).name}"')
        self.send_header("X-Repo-Commit", 40 * "1")
        super().end_headers()

    def do_GET(self) -> None:
        if not self.path.startswith("/api/models/gpt2/"):
            return super().do_GET()
        answer: Any = {"id": "gpt2", "sha": 40 * "1", "siblings": []}
        if "/tree/" in self.path:
            paths = self.server.folder.iterdir()
            sizes = [(path.name, path.stat().st_size) for path in paths]
            answer = [dict(type="file", path=name, size=size, oid="0") for name, size in sizes]
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_without_a_checkpoint_the_notebook_asks_the_hub(tmp_path, monkeypatch):
    model = GPT(GPTConfig(block_size=64, n_layer=1, n_head=2, n_embd=32))
    model.save_pretrained(tmp_path / "model")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.folder = tmp_path / "model"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        notebook = execute(tmp_path, monkeypatch, "draw_weights(", offline="0")
        server.shutdown()
    shown = text(notebook)
    assert "\ngpt2: 1,6" in shown and "1 layers of 2 heads" in shown, shown
    assert shown.count("(as generate: True)") == 4


def test_without_a_model_the_notebook_says_in_a_line_how_to_get_one(tmp_path, monkeypatch):
    notebook = execute(tmp_path, monkeypatch, "draw_weights(")
    assert pictures(notebook) == 1 and text(notebook).count("(as generate: True)") == 2
    assert "make quickstart" in text(notebook) and not MACHINE_PATH.search(text(notebook))


def test_the_committed_outputs_are_whole_and_small_and_name_no_machine():
    assert (ROOT / "play.ipynb").stat().st_size < 2e6
    notebook = nbformat.read(ROOT / "play.ipynb", as_version=4)
    assert pictures(notebook) >= 10, "weights, runs, published ones, the climb"
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert sum(len(source.splitlines()) for source in code) <= 250
    for output in outputs(notebook):
        assert output.output_type != "error" and output.get("name") != "stderr"
    assert not MACHINE_PATH.search(text(notebook))

"""A run beside what others published: OpenAI's scores, and runs of the same recipe."""

import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from test_plots import labels, write_run

import evaluate
from config import PRESETS, TrainConfig
from evaluate import Evaluations
from fineweb import name_after
from model import GPT, GPTConfig
from optim import describe_optimizers
from support.run.log import LoggedRun, open_log, read_run, read_runs
from support.show import notebook, plots, published
from support.show.report import write_report

REPRODUCTION = published.REPRODUCTION | {"data_dir": "edu_fineweb10B"}
ENDS = {  # of each log: its last validation loss and HellaSwag score
    "a_1_epoch": (3.0663, 0.3058),
    "a_shuffled": (3.0619, 0.3025),
    "a_no_warmup": (3.1681, 0.2909),
    "b_epoch_1": (3.0717, 0.3074),
    "llmc_fineweb": (3.2722, None),
}


def test_the_published_logs_are_whole_and_read_as_they_are():
    runs = plots.published_runs()
    raw = read_runs(str(ROOT / "assets" / "published_runs" / "*.txt"))
    assert sorted(run.name for run in raw) == sorted(ENDS) == sorted(run.name for run in runs)
    for run in [*runs, *raw]:
        streams = run.streams
        hella = streams["hella"][1][-1] if "hella" in streams else None
        assert (streams["val"][1][-1], hella) == ENDS[run.name]
        assert len(streams["train"][0]) > 400
    assert {
        axis.get_title("left") for axis in notebook.plot_by_text(plots.draw_loss, raw).axes
    } == {*ENDS}, "what they trained on is not recorded"


def test_published_runs_are_drawn_by_text_with_openais_lines_which_the_recipe_passes():
    runs = plots.published_runs()
    edu, fineweb = notebook.plot_by_text(plots.draw_loss, runs).axes
    assert {"OpenAI's 124M 3.292", "published 3.062 to 3.072"} <= set(labels(edu))
    assert "OpenAI's 124M 3.425" in labels(fineweb) and edu.get_title("left") == "edu_fineweb10B"
    [scores] = notebook.plot_by_text(plots.draw_hellaswag, runs[:4]).axes
    assert {"OpenAI's GPT-2 124M", "a_1_epoch 0.306", "published 0.302 to 0.307"} <= {
        *labels(scores)
    }
    table = notebook.table_of_runs(runs)
    assert table["highest HellaSwag, difference"].max() == pytest.approx(0.3074 - 0.2945, abs=1e-4)
    assert table["lowest validation loss, OpenAI's"].tolist() == 4 * [3.2924] + [3.4250]


def test_no_two_of_many_runs_look_the_same():
    steps = list(range(3))
    streams = {"train": (steps, [3.0, 2.0, 1.0])}
    runs = [LoggedRun(f"run {i}", streams, [], {"data_dir": "a"}) for i in range(12)]
    [axis] = notebook.plot_by_text(plots.draw_loss, runs).axes
    looks = {(line.get_color(), line.get_linestyle()) for line in axis.lines}
    assert len(looks) == len(axis.lines) == 12
    [axis] = notebook.plot_by_text(plots.draw_loss, [*runs, *runs]).axes
    assert len(axis.lines) == 24, "none is left out"


def test_runs_of_two_vocabularies_and_runs_that_diverged_are_drawn_as_far_as_they_compare():
    def trained(vocab_size: int, *losses: float) -> LoggedRun:
        streams = {"train": ([0, 1, 2], losses), "val": ([0, 2], losses[::2])}
        return LoggedRun("run", streams, [], {"data_dir": "a", "vocab_size": vocab_size})

    runs = [trained(300, 3.0, math.nan, math.inf), trained(1024, 4.0, 3.5, 3.0)]
    runs.append(trained(300, math.nan, math.nan, math.nan))
    axes = notebook.plot_by_text(plots.draw_loss, runs).axes
    assert [axis.get_title("left") for axis in axes] == ["a, 300 tokens", "a, 1,024 tokens"]
    assert all(map(math.isfinite, axes[0].get_ylim()))
    assert notebook.plot_by_text(notebook.draw_by_time, []) is None
    assert notebook.plot_training(runs) is None, "of whose speed nothing is known"


@pytest.mark.parametrize("changes, is_reproduction", [
    (asdict(PRESETS["gpt2"]), True),
    (dict(data_dir="data/fineweb-edu-10B"), True),
    (asdict(PRESETS["gpt2-muon"]), False),
    (asdict(PRESETS["gpt2-medium"]), False),
    (dict(data_dir="data/fineweb-10B"), False),
    (dict(vocab_size=50257), True),
    (dict(vocab_size=32768), False),
    (dict(total_batch_size=65536), False),
    (dict(max_steps=10), False),
    (asdict(PRESETS["gpt3-125m"]), False),
    (dict(sequence_length=512), False),
    (dict(init_from="gpt2"), False),
])  # fmt: skip
def test_only_a_run_of_the_recipe_is_laid_beside_the_published_ones(changes, is_reproduction):
    config = REPRODUCTION | changes
    assert published.is_reproduction(config) == is_reproduction
    if is_reproduction or {*changes} in ({"vocab_size"}, {"sequence_length"}):
        assert published.openai_loss(config) == (3.2924 if is_reproduction else None)


def test_openais_loss_is_known_in_the_folder_that_fineweb_makes():
    config = dict(data_dir=f"data/{name_after('fineweb-10B')}", n_layer=24, n_embd=1024)
    assert published.openai_loss(config) == 3.083089


@pytest.mark.parametrize("step, loss, told", [
    (0, 20.0, None),
    (250, 6.42, None),
    (250, 6.45, "0.27 behind"),
    (500, 5.33, None),
    (500, 5.63, "0.30 behind"),
    (1000, 4.86, "0.71 behind"),
    (1999, 3.90, None),
    (2000, 3.76, None),
    (2000, 3.97, "0.30 behind"),
    (2125, 3.97, "behind"),  # between two validations of the published runs
    (19073, 3.17, None),
    (19073, 3.38, "0.31 behind"),
    (19073, 2.9, None),
])  # fmt: skip
def test_a_run_that_lags_is_told_so_and_what_to_check(step, loss, told):
    words = evaluate.describe_place(step, loss)
    assert (" behind: check the rate" in words) == bool(told) and (told or "") in words
    if step == 500:
        assert words.startswith("5.30 to 5.33")


def test_of_the_published_runs_only_the_one_without_warmup_is_told_that_it_lags():
    for run in plots.published_runs():
        if run.config["data_dir"] == "edu_fineweb10B":
            lags = [step for step, loss in zip(*run.streams["val"], strict=True)
                    if "behind" in evaluate.describe_place(step, loss)]  # fmt: skip
            assert bool(lags) == (run.name == "a_no_warmup")
            assert not lags or lags[0] == 500


@pytest.mark.parametrize("vocab_size, changes", [
    (50257, {}), (1024, {}), (50257, {"eval_only": True}), (50257, {"max_steps": 100})
])  # fmt: skip
def test_a_validation_line_says_where_the_run_stands(monkeypatch, vocab_size, changes):
    monkeypatch.setattr(evaluate, "validate", lambda **_: (5.75, None, None))
    loader = SimpleNamespace(vocab_size=vocab_size)
    config = TrainConfig(**changes)
    parts = dict.fromkeys(("model", "world", "stop", "dtype", "val_loader", "examples"))
    values = Evaluations(config, **parts).measure_loss(loader, 500)
    said = evaluate.show(values["figures"])
    assert ("published runs: 5.30 to 5.33, so this run is 0.42 behind" in said) == (
        vocab_size == 50257 and not changes
    )


def test_a_run_of_the_recipe_has_the_band_in_its_picture_and_openais_scores_in_its_report(tmp_path):
    run = write_run(tmp_path / "run", **REPRODUCTION, total=10042)
    losses, scores = plots.plot_run(run).axes
    assert "published 3.062 to 3.072" in labels(losses)
    assert "published 0.302 to 0.307" in labels(scores)
    write_report(run, has_curve=True)
    page = (run / "report.md").read_text()
    best = min(read_run(run).streams["train"][1])
    assert f"| lowest training loss | {best:.4f} |  |  |" in page
    assert "| lowest validation loss | 3.3174 | 3.2924 | +0.0250 |" in page
    assert "| highest HellaSwag | 0.2800 | 0.2945 | -0.0145 |" in page
    other = write_run(tmp_path / "other", n_embd=64)
    plots.plot_run(other)
    write_report(other, has_curve=True)
    assert "OpenAI" not in (other / "report.md").read_text()
    assert not [word for word in labels(plots.plot_run(other).axes[0]) if "published" in word]


def test_scores_on_few_examples_stand_beside_no_published_ones():
    def scored_on(total: int) -> LoggedRun:
        record = dict(type="hella", step=0, total=total)
        return LoggedRun("run", {"hella": ([0], [0.9])}, [record], REPRODUCTION)

    assert published.beside_openai(scored_on(999)) == {}
    best = published.beside_openai(scored_on(1000))
    assert best == {"highest HellaSwag": (0.9, 0.294463)}


@pytest.mark.parametrize("type, value, measure", [
    ("val", "val_loss", "val_tokens"), ("hella", "hellaswag", "total"),
])  # fmt: skip
def test_the_best_is_the_best_of_those_measured_on_as_much(tmp_path, type, value, measure):
    """A resumed run measures on more: 0.36 of 200 examples stands beside no 0.2945 of 10,042."""
    log = open_log(tmp_path, [{"type": "run", "config": REPRODUCTION}])
    better = -1 if type == "val" else 1
    for step, (amount, score) in enumerate([(2000, 0.36), (10042, 0.29), (10042, 0.28)]):
        log.record(step, type, **{value: 9 + better * score, measure: amount})
    run = read_run(tmp_path)
    assert run.streams[type][0] == [1, 2]
    [(own, _)] = published.beside_openai(run).values()
    assert own == pytest.approx(9 + better * 0.29)


def test_a_start_says_what_will_be_optimized():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    decay = "50 tensors with 124,354,560 numbers decay"
    rest = "98 tensors with 121,344 numbers do not (padding included)"
    words = describe_optimizers(model.configure_optimizers("adamw"))
    assert words == f"AdamW, {decay}, {rest}", "not fused on this device"
    words = describe_optimizers(model.configure_optimizers("muon", weight_decay=0.0))
    assert words.startswith("AdamW, 2 tensors with 39,419,904 numbers do not, 98 tensors with")
    assert "; Muon, 48 tensors with 84,934,656 numbers do not" in words
    tiny = GPT(GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=8))
    own = torch.optim.Rprop(tiny.parameters())  # it has no weight decay
    assert describe_optimizers([own]).startswith("Rprop, 16 tensors with 403,384 numbers do not")
    assert describe_optimizers(tiny.configure_optimizers("adamw")).startswith("AdamW (fused), 6 ")


def test_the_published_figures_name_their_sources():
    runs = json.loads((ROOT / "assets" / "published_runs" / "runs.json").read_text())["runs"]
    assert all("github.com/" in run["source"] for run in runs.values())
    assert published.OPENAI["hellaswag_by_script"]["124M"]["acc"] == 0.2859

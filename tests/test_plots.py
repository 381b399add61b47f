"""What log.py reads and plots.py draws."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from model import GPT, GPTConfig
from support import plots
from support.log import read_log, read_metrics, read_run, read_runs


def write_run(directory, data_dir="data/stdlib", steps=60, hella=True, **config):
    """The logs of a run as support.log writes them: a falling loss, evaluated every 20 steps."""
    directory.mkdir(parents=True)
    run = dict(n_layer=12, n_embd=768, total_batch_size=1000, data_dir=data_dir) | config
    text = []
    records = [{"type": "run", "config": run, "device": {"name": "a CPU"}, "dtype": "float32"}]
    for step in range(steps + 1):
        loss = 3.3 + 7 * math.exp(-step / 10)
        if step % 20 == 0:
            text.append(f"{step} val {loss:.4f}")
            records.append({"type": "val", "step": step, "val_loss": loss})
            if hella:
                score = dict(hellaswag=0.25 + step / 2000, total=100)
                text.append(f"{step} hella {score['hellaswag']:.4f}")
                records.append({"type": "hella", "step": step, **score})
            if step:
                samples = [f"so <far> {step}\n$", "and so on"]
                records.append({"type": "samples", "step": step, "samples": samples})
        if step < steps:
            text.append(f"{step} train {loss:.6f}")
            values = dict(loss=loss, lr=6e-4, norm=1.5, tokens_per_sec=1000.0)
            records.append({"type": "train", "step": step, **values, "wall": 2.0 * (step + 1)})
    (directory / "log.txt").write_text("\n".join(text) + "\n")
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    return directory


def labels(figure, panel=0):
    return figure.axes[panel].get_legend_handles_labels()[1]


def test_a_log_is_read_into_streams_and_a_half_written_last_line_is_left_out(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("0 val 11.0028\n0 hella 0.2600\n0 train 11.045870\n1 train 10.7\n2 tra")
    assert read_log(log) == {
        "val": ([0], [11.0028]),
        "hella": ([0], [0.26]),
        "train": ([0, 1], [11.04587, 10.7]),
    }
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"type": "run", "config": {}}\n{"type": "val", "step": 0}\n{"type": "tra')
    assert [r["type"] for r in read_metrics(metrics)] == ["run", "val"]


def test_training_gets_its_loss_png_and_nothing_else_is_left_behind(tmp_path):
    run = write_run(tmp_path / "run")
    assert plots.plot_run(run) == run / "loss.png"
    assert sorted(p.name for p in run.iterdir()) == ["log.txt", "loss.png", "metrics.jsonl"]
    image = imread(run / "loss.png")
    assert image.shape[1] > 1000
    # white and opaque up to its edges: nothing is cut
    assert (image[0] == 1).all() and (image[:, 0] == 1).all()


def test_loss_png_can_be_drawn_from_the_first_evaluation_on(tmp_path):
    run = write_run(tmp_path / "run", steps=0, hella=False)
    assert plots.plot_run(run).exists()


def test_drawing_leaves_pyplot_and_its_backend_alone(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    plots.plot_run(write_run(tmp_path / "run"))
    assert "matplotlib.pyplot" not in sys.modules


def test_published_baselines_appear_for_fineweb_and_for_nothing_else(tmp_path):
    shakespeare = read_run(write_run(tmp_path / "shakespeare"))
    fineweb = read_run(write_run(tmp_path / "medium", data_dir="edu_fineweb10B", n_layer=24))
    for draw in (plots.draw_loss, plots.draw_hellaswag):
        figure = plots.plot_along(draw, [shakespeare], "step")
        assert not any("OpenAI" in label for label in labels(figure))
    figure = plots.plot_along(plots.draw_loss, [fineweb], "step")
    assert not any("OpenAI" in label for label in labels(figure)), "of the 350M nobody has told"
    for n_layer, data_dir, size in (12, "edu_fineweb10B", "124M"), (24, "fineweb10B", "350M"):
        log_dir = tmp_path / f"{data_dir} {n_layer}"
        run = read_run(write_run(log_dir, data_dir=data_dir, n_layer=n_layer))
        figure = plots.plot_along(plots.draw_loss, [run], "step")
        assert f"OpenAI's GPT-2 {size}, validation" in labels(figure)
    figure = plots.plot_along(plots.draw_hellaswag, [fineweb], "step")
    assert {"OpenAI's GPT-2 350M", "OpenAI's GPT-3 350M"} <= set(labels(figure))


def test_runs_lie_on_steps_tokens_and_time(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert run.last_step() == 60
    assert run.place([0, 60], "step").tolist() == [0, 60]
    assert run.place([0, 60], "tokens").tolist() == [0, 60_000]
    # an evaluation at step s comes after s updates
    assert run.place([0, 30, 60], "time").tolist() == [0, 60, 120]
    figure = plots.plot_along(plots.draw_loss, [run], "step", "tokens", "time")
    along = [axis.get_xlabel() for axis in figure.axes]
    assert along == ["step", "tokens (thousands)", "time (minutes)"]


def test_a_log_of_build_nanogpt_is_drawn_by_step_and_by_tokens_once_told(tmp_path):
    write_run(tmp_path / "log")
    (tmp_path / "log" / "metrics.jsonl").unlink()
    untold = read_run(tmp_path / "log")
    told = read_run(tmp_path / "log", data_dir="edu_fineweb10B", total_batch_size=524288)
    assert not plots.is_fineweb(untold) and plots.is_fineweb(told)
    for run, lines in ((untold, (2, 0, 0)), (told, (2, 2, 0))):
        figure = plots.plot_along(plots.draw_loss, [run, run], "step", "tokens", "time")
        assert tuple(labels(figure, i).count("log") for i in range(3)) == lines


def test_several_runs_have_a_colour_each(tmp_path):
    runs = [read_run(write_run(tmp_path / name)) for name in ("a", "b")]
    figure = plots.plot_along(plots.draw_loss, runs, "step")
    handles, names = figure.axes[0].get_legend_handles_labels()
    assert names == ["a", "b", "validation"]
    assert [h.get_color() for h in handles[:2]] == [plots.BLUE, plots.RED]
    assert [axis.get_ylabel() for axis in plots.plot_training(runs).axes] == [
        "learning rate",
        "gradient norm, unclipped",
        "tokens/s",
    ]


def test_runs_are_found_by_pattern_and_none_is_said_in_a_sentence(tmp_path):
    write_run(tmp_path / "runs" / "b")
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "README").mkdir()
    assert [run.name for run in read_runs(str(tmp_path / "runs" / "*"))] == ["a", "b"]
    with pytest.raises(FileNotFoundError, match="make quickstart"):
        read_runs(str(tmp_path / "nothing" / "*"))


def test_smoothing_is_the_mean_of_the_last_values():
    assert plots.smooth([1, 2, 3, 4, 5], 3) == [1, 1.5, 2, 3, 4]
    assert plots.smooth([1, 2, 3], 1) == [1, 2, 3]


def test_attention_patterns_are_those_the_model_uses():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=32))
    idx = torch.randint(50257, (1, 7))
    patterns = torch.from_numpy(plots.attention_patterns(model, idx))
    assert patterns.shape == (2, 2, 7, 7)
    assert torch.allclose(patterns.sum(-1), torch.ones(2, 2, 7))
    assert patterns.triu(1).eq(0).all()
    with torch.no_grad():  # the first layer: patterns times values is what its attention returns
        block = model.transformer.h[0]
        x = block.ln_1(model.embed(idx, torch.arange(7)))
        v = block.attn.c_attn(x)[0, :, 64:].view(7, 2, 16).transpose(0, 1)
        y = block.attn.c_proj((patterns[0] @ v).transpose(0, 1).reshape(7, 32))
        assert torch.allclose(y, block.attn(x)[0], atol=1e-6)


def test_every_comparison_of_the_benchmark_is_drawn_and_a_failed_row_is_left_out():
    ladder = [
        dict(name="a", unit="tokens/s", median=100, total=1.0),
        dict(name="b", unit="tokens/s", median=250, total=2.5),
        dict(name="c", error="out of memory"),
    ]
    (axis,) = plots.plot_benchmark("ladder", ladder, "a CPU").axes
    assert [bar.get_width() for bar in axis.patches] == [100, 250]
    assert axis.get_xlabel() == "tokens/s"
    curves = [
        dict(way="written out", T=128, ms=4.0),
        dict(way="fused", T=128, ms=2.0),
        dict(way="fused", T=256, ms=5.0),
    ]
    (axis,) = plots.plot_benchmark("attention", curves, "a CPU").axes
    assert [line.get_label() for line in axis.lines] == ["written out", "fused"]


def test_a_comparison_has_a_line_a_run_and_a_mean_beside_the_dots_of_each_arm():
    def arm(name, *lasts, **against):
        runs = []
        for last in lasts:
            losses = None if last is None else [9, 5, last]
            runs.append(dict(val_loss=last, losses=losses, tokens=[0, 10**6, 2 * 10**6]))
        return dict(name=name, runs=runs, against=against)

    better = dict(mean=-1.0, half=0.1, differences=[-1.1, -0.9])
    arms = [arm("base", 4, 4), arm("better", 2.9, 3.1, **better), arm("worse", 4, None)]
    losses, differences = plots.plot_comparison(dict(arms=arms)).axes
    drawn = [line.get_ydata().tolist() for line in losses.lines if len(line.get_ydata())]
    assert drawn == [[5, 4], [5, 4], [5, 2.9], [5, 3.1], [5, 4]], "not the one that diverged"
    assert losses.get_xlabel() == "tokens (millions)"
    assert losses.get_legend_handles_labels()[1] == ["base", "better", "worse"]
    assert differences.lines[0].get_xdata().tolist() == [-1.1, -0.9]
    assert [label.get_text() for label in differences.get_yticklabels()] == ["better", "worse"]


def test_a_table_keeps_line_breaks_and_shows_markup_as_text():
    pytest.importorskip("IPython")
    html = plots.table(["step 1"], [["<b>\nnext"]]).data
    assert "&lt;b&gt;<br>next" in html and "<b>" not in html


def test_pictures_of_attention_have_a_label_for_every_token():
    pattern = np.tril(np.full((3, 3), 1 / 3))
    axis = plots.plot_attention(pattern, [" a", "\n", "$"], "layer 0, head 0").axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()] == [" a", r"\n", r"\$"]
    assert plots.plot_heads(np.stack([pattern[None]] * 2)).axes[0].get_ylabel() == "layer"

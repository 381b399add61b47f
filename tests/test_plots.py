"""What log.py reads, plots.py draws, notebook.py finds and report.py says."""

import dataclasses
import json
import math
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from matplotlib.image import imread

from config import PRESETS
from model import GPT, GPTConfig
from support.base.errors import UserError
from support.machine.distributed import World
from support.run.checkpoint import Progress
from support.run.log import (
    LoggedRun,
    open_log,
    read_log,
    read_metrics,
    read_run,
    read_runs,
    records_before,
)
from support.show import comparison, notebook, plots, report

ABOUT = {  # what the first line of metrics.jsonl says besides the configuration
    "command": "python train_gpt2.py --max-steps 60 --seed 2 --overwrite",
    "git": "1234567",
    "versions": {"python": "3.12.0", "torch": "2.13.0"},
    "device": {"type": "cpu", "name": "a CPU", "processes": 1, "threads": 2},
    "dtype": "float32",
    "parameters": 124_439_808,
    "time": "2026-01-01 00:00:00",
}


def write_run(
    directory, data_dir="data/stdlib", steps=60, hella=True, total=1000, about=ABOUT, **config
):
    """The logs of a run as log.py writes them: a falling loss, evaluated every 20 steps."""
    run = dict(n_layer=12, n_embd=768, total_batch_size=1000, data_dir=data_dir, max_steps=steps)
    run |= config
    model = {name: run[name] for name in ("n_layer", "n_embd")}
    log = open_log(directory, [{"type": "run", "config": run, "model": model, **about}])
    for step in range(steps + 1):
        loss = 3.3 + 7 * math.exp(-step / 10)
        if step % 20 == 0:
            log.record(step, "val", val_loss=loss, figures={"val loss": f"{loss:.4f}"})
            if hella:
                score = 0.25 + step / 2000
                log.record(
                    step, "hella", hellaswag=score, total=total, figures={"HellaSwag": score}
                )
            if step:
                log.record(step, "samples", samples=[f"so <far> {step}\n\n    $", "and so on"])
        if step < steps:
            values = dict(loss=loss, lr=6e-4, norm=1.5, tokens_per_sec=1000.0, memory=2 * 10**9)
            done = step + 1
            log.record(step, "train", **values, mfu=0.25, wall=2.0 * done, tokens=1000 * done)
    return directory


def resume(run, step, command):
    """The log of a run that goes on at this step, started by this command."""
    records = list(records_before(run, step, evaluated=True))
    again = {**records[0], "type": "resume", "step": step, "command": command}
    return open_log(run, [*records, again])


def test_a_run_is_read_with_the_settings_of_its_last_start(tmp_path):
    run = write_run(tmp_path / "run", max_steps=10)
    first, *records = read_metrics(run / "metrics.jsonl")
    again = first | dict(type="resume", step=2, config=first["config"] | dict(max_steps=19073))
    open_log(run, [first, *records, again])
    assert read_run(run).config["max_steps"] == 19073


def labels(axis):
    """What is written into a picture: the names of lines at their ends, and arrows."""
    return [text.get_text() for text in axis.texts]


# -- logs


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


def test_runs_are_found_by_pattern_and_none_is_said_in_a_sentence(tmp_path):
    write_run(tmp_path / "runs" / "b", steps=0)
    write_run(tmp_path / "runs" / "a", steps=0)
    (tmp_path / "runs" / "README").mkdir()
    own, recorded = (str(tmp_path / folder / "*") for folder in ("log", "runs"))
    assert [run.name for run in read_runs(recorded)] == ["a", "b"]
    write_run(tmp_path / "log" / "a", steps=0)
    names = [str(tmp_path / "log" / "a"), str(tmp_path / "runs" / "a"), "b"]
    assert [run.name for run in read_runs(own, recorded)] == names
    with pytest.raises(FileNotFoundError, match="make quickstart"):
        read_runs(str(tmp_path / "nothing" / "*"))
    (tmp_path / "other.txt").write_text("iter 0: loss 10.9, time 9.1 ms\n")  # nanoGPT's
    with pytest.raises(UserError, match=r"other.txt has no line like '250 val 3.2841'"):
        read_runs(str(tmp_path / "other.txt"))


# -- pictures of runs


def test_training_gets_its_loss_png_and_nothing_else_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    run = write_run(tmp_path / "run")
    plots.plot_run(run)
    assert sorted(p.name for p in run.iterdir()) == ["log.txt", "loss.png", "metrics.jsonl"]
    image = imread(run / "loss.png")
    assert image.shape[1] > 1000
    # white and opaque up to its edges: nothing is cut
    assert (image[0] == 1).all() and (image[:, 0] == 1).all()
    assert "matplotlib.pyplot" not in sys.modules, "it would keep figures in memory"


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_loss_can_be_drawn_from_the_first_evaluation_on(tmp_path, steps):
    run = read_run(write_run(tmp_path / "run", steps=steps, hella=False))
    drawn = labels(notebook.plot_by_text(plots.draw_loss, [run]).axes[0])
    assert [label for label in drawn if label.startswith("validation ")]


def test_published_baselines_appear_for_their_own_text_and_size(tmp_path):
    def drawn(draw, **config):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        figure = notebook.plot_by_text(draw, [read_run(write_run(directory, **config))])
        return " ".join(label for label in labels(figure.axes[0]) if "OpenAI" in label)

    edu = dict(data_dir="data/edu_fineweb10B")
    medium = dict(n_layer=24, n_embd=1024)
    for other in (dict(data_dir="data/fineweb-2-german"), edu | dict(n_embd=192), edu | medium):
        assert drawn(plots.draw_loss, **other) == ""
    assert drawn(plots.draw_loss, **edu) == "OpenAI's 124M 3.292"
    assert drawn(plots.draw_loss, data_dir="fineweb10B", **medium) == "OpenAI's 350M 3.083"
    assert drawn(plots.draw_hellaswag, n_embd=192) == ""
    assert drawn(plots.draw_hellaswag) == "OpenAI's GPT-2 124M OpenAI's GPT-3 124M"


def test_a_picture_begins_at_0_ends_at_the_end_and_says_what_it_is(tmp_path):
    run = write_run(tmp_path / "run", "data/tinyshakespeare", hella=False)
    [axis] = plots.plot_run(run).axes
    assert axis.get_title("left") == "Tiny Shakespeare, 124 million parameters"
    assert axis.get_xlim() == (0, 60), "no dead space"
    assert axis.get_ylim()[1] < 8, "the untrained loss would fill the picture"
    assert axis.get_xlabel() == "step"
    (run / "metrics.jsonl").unlink()
    [axis] = plots.plot_run(run).axes
    assert axis.get_title("left") == "run", "a log.txt does not say more"


def test_beside_it_the_whole_curve_has_the_losses_that_need_no_model(tmp_path):
    frequencies = {"kinds": 20, "entropy": 1.5}
    about = ABOUT | dict(frequencies=frequencies)
    run = read_run(write_run(tmp_path / "run", hella=False, about=about))
    axis = notebook.plot_by_text(plots.draw_loss, [run]).axes[0]
    [whole] = axis.child_axes
    assert whole.get_title("left") == "loss (nats per token)"
    assert {text.get_text() for text in whole.texts} == {
        f"all 50,257 tokens alike: {math.log(50257):.2f}",
        f"the 20 that occur: {math.log(20):.2f}",
        "by frequency: 1.50",
    }
    shown = {line.get_color(): line.get_data() for line in whole.lines}
    for color, stream in (plots.BLUE, "train"), (plots.RED, "val"):
        assert np.array_equal(shown[color], run.streams[stream]), "nothing is left out"


@pytest.mark.parametrize("steps, band", [(3, False), (40, False), (60, True)])
def test_a_label_stands_where_its_line_ends_and_a_band_has_its_own(tmp_path, steps, band):
    run = read_run(write_run(tmp_path / "run", "edu_fineweb10B", steps=steps))
    axis = notebook.plot_by_text(plots.draw_loss, [run]).axes[0]
    named = [text for text in axis.texts if "deviation" not in text.get_text()]
    assert len(named) == 3
    ends = [line.get_ydata()[-1] for line in axis.lines if len(line.get_ydata())]
    for text in named:
        value = float(re.search(r"\d+\.\d+", text.get_text())[0])
        assert text.xy[1] == pytest.approx(value, abs=0.006), text
        assert text.xy[1] in ends
    assert ("± one deviation" in labels(axis)) == band == bool(axis.collections)
    assert all(collection.get_alpha() == 0.1 for collection in axis.collections)


def test_a_cross_is_where_a_run_was_resumed(tmp_path):
    run = write_run(tmp_path / "run", hella=False)
    [axis] = plots.plot_run(run).axes
    assert not [line for line in axis.lines if line.get_marker() == "x" and len(line.get_xdata())]
    resume(run, 40, "python again.py").record(40, "train", loss=3.5)
    [axis] = plots.plot_run(run).axes
    [cross] = [line for line in axis.lines if line.get_marker() == "x"]
    curve = axis.lines[0]
    assert cross.get_xdata() == [40] and cross.get_ydata() == curve.get_ydata()[-1]
    assert "×: interrupted, then resumed" in axis.get_xlabel()


@pytest.mark.parametrize("updates, marks", [(25, [25, 50]), (60, []), (1, []), (0, [])])
def test_each_epoch_that_begins_within_a_run_is_marked(tmp_path, updates, marks):
    about = ABOUT | (dict(epoch_tokens=updates * 1000) if updates else {})
    [axis] = plots.plot_run(write_run(tmp_path / "run", hella=False, about=about)).axes
    found = [line for line in axis.lines if line.get_marker() == "|"]
    assert [x for line in found for x in line.get_xdata()] == marks
    assert axis.get_xlabel() == ("step (|: a new epoch)" if marks else "step")


def test_samples_stand_above_the_curve_with_an_arrow_to_their_point(tmp_path):
    run = write_run(tmp_path / "run", hella=False, sample_prompt="so")  # 2 s a step
    [axis] = plots.plot_samples(run, [0.5, 1.3, 60]).axes
    texts = [text for text in axis.texts if "minutes" in text.get_text()]
    assert [text.xy[0] for text in texts] == [20, 40, 60], "the first after it, or the last"
    assert texts[0].get_text() == "1 minutes, step 20\n\nso <far> 20\n\n    $"
    assert axis.get_title("left").endswith("parameters, continuing 'so'")
    curve = next(line for line in axis.lines if line.get_color() == plots.BLUE)
    for text in texts[1:]:
        assert text.xy[1] == pytest.approx(np.interp(text.xy[0], *curve.get_data()), abs=0.01)
    assert axis.get_ylim()[1] >= texts[0].xy[1], "an arrow out of the axes is not drawn"


def luminance(color):
    """A colour #rrggbb -> its relative luminance, from 0 (black) to 1 (WCAG 2.2)."""
    srgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(a, b):
    dark, light = sorted(map(luminance, (a, b)))
    return (light + 0.05) / (dark + 0.05)


def test_a_picture_for_pages_is_always_the_same_bytes_and_reads_on_light_and_dark(tmp_path):
    runs = [read_run(write_run(tmp_path / name)) for name in "abcde"]  # of all colours
    for name in ("1", "2"):
        figure = notebook.plot_by_text(plots.draw_loss, runs)
        plots.save_picture(figure, tmp_path / f"{name}.svg")
    svg = (tmp_path / "1.svg").read_text()
    assert (tmp_path / "2.svg").read_text() == svg and len(svg) < 150_000
    assert contrast("#ffffff", "#000000") == 21
    colors = set(re.findall("#[0-9a-f]{6}", svg))
    assert colors == set(plots.COLORS), "the text is grey, and a transparent page has no colour"
    for page in ("#ffffff", "#0d1117"):  # of GitHub
        assert all(contrast(color, page) >= 3 for color in colors), page


def test_the_committed_pictures_of_pages_are_small():
    for name in ("runs/quickstart/loss", "runs/laptop/samples", "benchmarks/compare/compare"):
        assert (ROOT / f"{name}.svg").stat().st_size < 150_000


@pytest.mark.parametrize("first, dots", [(3.0, 3), (9.0, 2)])
def test_all_lines_are_in_view_and_a_first_loss_too_unless_it_is_far_above(first, dots):
    steps = list(range(200))
    streams = {"train": (steps, [3.0] * 200), "val": ([0, 100, 200], [first, 3.0, 3.0])}
    run = LoggedRun("tuned", streams, [], {"data_dir": "edu_fineweb10B"})
    axis = notebook.plot_by_text(plots.draw_loss, [run]).axes[0]
    assert 3.292 < axis.get_ylim()[1] < 4, "OpenAI's loss is higher than all of the run's"
    [validation] = [line for line in axis.lines if line.get_color() == plots.RED]
    assert len(validation.get_ydata()) == dots


def test_each_text_has_a_panel_and_other_batches_are_compared_by_tokens(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", data_dir="data/tinyshakespeare")
    write_run(tmp_path / "c", total_batch_size=2000)
    runs = read_runs(str(tmp_path / "*"))
    stdlib, shakespeare = notebook.plot_by_text(plots.draw_loss, runs).axes
    assert (stdlib.get_title("left"), shakespeare.get_title("left")) == (
        "Python's library",
        "Tiny Shakespeare",
    )
    assert labels(stdlib) == ["a 3.317", "c 3.317"]
    assert [text.get_color() for text in stdlib.texts] == [plots.BLUE, plots.RED]
    assert "validation 3.317" in labels(shakespeare), "alone on its text"
    assert stdlib.get_xlabel() == "tokens (millions)" and shakespeare.get_xlabel() == "step"
    ends = [max(line.get_xdata()) for line in stdlib.lines if line.get_marker() == "o"]
    assert ends == pytest.approx([0.06, 0.12])
    unknown = LoggedRun("a log.txt", runs[0].streams, [], {"data_dir": "stdlib"})
    plots.draw_loss(shakespeare, [runs[0], unknown])
    assert shakespeare.get_xlabel() == "step", "where a batch is unknown"
    for count, scale in ((1, "linear"), (3, "log")):
        axes = notebook.plot_training(runs[:count]).axes
        scales = [scale, scale, scale, "linear", "linear"]
        assert [axis.get_yscale() for axis in axes] == scales, "the last: MFU and memory"
    by_time, _ = notebook.plot_by_text(notebook.draw_by_time, runs).axes
    assert by_time.lines[0].get_xdata()[-1] == pytest.approx(60 * 2 / 60) and labels(by_time)


def test_a_log_of_build_nanogpt_is_drawn_and_named_once_told(tmp_path):
    write_run(tmp_path / "log")
    (tmp_path / "log" / "metrics.jsonl").unlink()
    untold = read_run(tmp_path / "log")
    told = read_run(tmp_path / "log", data_dir="edu_fineweb10B", total_batch_size=524288)
    for run in (untold, told):
        axis = notebook.plot_by_text(plots.draw_loss, [run]).axes[0]
        assert "validation 3.317" in labels(axis)
        assert ("OpenAI's 124M 3.292" in labels(axis)) == (run is told)


def arm_of(name, *lasts, settings=(), **against):
    runs = []
    for last in lasts:
        losses = None if last is None else [9, 5, last]
        runs.append(dict(val_loss=last, losses=losses, tokens=[0, 10**6, 2 * 10**6]))
    return dict(name=name, settings=dict(settings), runs=runs, against=against)


def test_a_comparison_has_a_mean_and_a_range_beside_the_differences_of_each_arm():
    better = dict(mean=-1.0, half=0.1, differences=[-1.1, -0.9])
    arms = [arm_of("base", 4, 4), arm_of("better", 2.9, 3.1, **better), arm_of("worse", 4, None)]
    about = dict(config=dict(data_dir="data/stdlib"))
    result = dict(arms=arms, about=about, base=dict(n_layer=2, n_embd=64))
    losses, differences = comparison.plot_comparison(result).axes
    assert losses.get_ylabel() == "validation loss (nats per token)"
    assert losses.get_xlabel().startswith("millions of tokens of Python's library, 2 × 64\n")
    assert [line.get_ydata().tolist() for line in losses.lines] == [[5, 4], [5, 3], [5, 4]]
    ranges = [band.get_paths()[0].vertices[:, 1] for band in losses.collections]
    assert [(y.min(), y.max()) for y in ranges] == [(4, 5), (2.9, 5), (4, 5)], "none diverged"
    assert labels(losses) == ["better", "base", "worse"] and losses.get_xlim() == (1, 2)
    assert losses.get_title("left") == "better ends 1.00 ± 0.10 nats below base"
    assert differences.lines[0].get_xdata().tolist() == [-1.1, -0.9]
    assert [label.get_text() for label in differences.get_yticklabels()] == ["better"]


def test_no_two_of_nine_arms_look_the_same():
    arms = [arm_of(f"arm {i}", 4 + i, 4 + i) for i in range(9)]
    result = dict(arms=arms, about={}, base=dict(n_layer=2, n_embd=64))
    lines = comparison.plot_comparison(result).axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 9


def test_arms_are_named_by_optimizer_and_rate_if_nothing_else_differs():
    muon = dict(optimizer="muon", learning_rate=8e-3, n_head=2)
    adamw = muon | dict(optimizer="adamw", learning_rate=1.6e-2)
    assert comparison.name_arms([arm_of("base", settings=muon), arm_of("b", settings=adamw)]) == [
        "Muon, 8e-3", "AdamW, 1.6e-2",
    ]  # fmt: skip
    for other in (muon, adamw | dict(n_head=4)):
        arms = [arm_of("a", settings=muon), arm_of("b", settings=other)]
        assert comparison.name_arms(arms) == ["a", "b"]
    arms = [arm_of(f"{n}", settings=muon | dict(embedding_lr=n)) for n in (1, 4)]
    arms[1]["settings"]["learning_rate"] = 4e-3
    assert comparison.name_arms(arms) == ["1", "4"], "their embeddings differ, too"
    arms[0]["settings"]["optimizer"] = "adamw"
    assert comparison.name_arms(arms) == ["AdamW, 8e-3", "Muon, 4e-3"], "AdamW has no such rate"
    found = [(0.1, 0.2, "a"), (0.5, 0.2, "b")]
    unseen = "No difference between a and base can be seen"
    assert comparison.describe_best(found, "base", "nats") == unseen
    assert (
        comparison.describe_best(found[1:], "base", "nats") == "b ends 0.50 ± 0.20 nats above base"
    )
    small = "a ends 0.0040 ± 0.0002 nats below base"
    assert comparison.describe_best([(-0.004, 0.0002, "a")], "base", "nats") == small


# -- looks into a model


def test_attention_patterns_are_those_the_model_uses():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=32))
    idx = torch.randint(50257, (1, 7))
    patterns = torch.from_numpy(notebook.attention_patterns(model, idx))
    assert patterns.shape == (2, 2, 7, 7)
    assert torch.allclose(patterns.sum(-1), torch.ones(2, 2, 7))
    assert patterns.triu(1).eq(0).all()
    with torch.no_grad():  # the first layer: patterns times values is what its attention returns
        block = model.transformer.h[0]
        x = block.ln_1(model.embed(idx, torch.arange(7)))
        v = block.attn.c_attn(x)[0, :, 64:].view(7, 2, 16).transpose(0, 1)
        y = block.attn.c_proj((patterns[0] @ v).transpose(0, 1).reshape(7, 32))
        assert torch.allclose(y, block.attn(x)[0], atol=1e-6)


def test_the_previous_token_head_is_found_and_its_picture_names_every_token():
    patterns = np.full((2, 3, 4, 4), 0.1)
    patterns[1, 2] = np.eye(4, k=-1)
    assert notebook.find_previous_token_head(patterns) == (1, 2, 1.0)
    axis = notebook.plot_attention(patterns[1, 2], [" a", "\n", "$", "b"], "layer 1").axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["␣a", r"\n", r"\$", "b"]


# -- the report of a run


def test_a_report_says_on_a_page_what_a_run_was(tmp_path):
    run = write_run(tmp_path / "run")
    best = {"step": 60, "loss": 3.25}
    resume(run, 60, "python again.py").record(60, "end", wall=3600.0, memory=10**9, best=best)
    report.write_report(run, has_curve=False)
    page = (run / "report.md").read_text()
    loss = float(re.search(r"training loss \| (\S+), a mean", page)[1])
    assert f"training {loss:.2f}" in labels(plots.plot_run(run).axes[0])
    for fact in (
        "# GPT-2 of 12 layers and 768 channels, on stdlib",
        "| parameters | 124,439,808 |",
        "60 updates, 60,000 tokens",
        "| time | 1:00:00 ",
        "| speed | 1,000 tokens/s",
        "| MFU | 25.0%",
        "| memory | 2.00 GB at most",
        "| val loss | 3.3174 |",
        "| HellaSwag | 0.28 |",
        "| best checkpoint | ckpt_000060, with the lowest validation loss: 3.2500 |",
        "    2026-01-01 00:00:00  python train_gpt2.py --max-steps 60 --seed 2 --overwrite\n",
        "    2026-01-01 00:00:00  python again.py\n",
        "## Samples after 20 updates\n\n    so <far> 20\n\n        $\n\n    and so on\n",
    ):
        assert fact in page, fact


def test_a_report_of_a_changed_model_says_so_in_its_title(tmp_path):
    run = write_run(tmp_path / "run", about=ABOUT | {"difference": "its logits differ"})
    report.write_report(run, has_curve=False)
    assert (run / "report.md").read_text().startswith("# A changed GPT-2 of 12 layers")


def test_all_samples_of_a_run_can_be_seen_and_the_notebook_shows_some(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=200)  # samples after 20, 40, …, 200 updates
    resume(run, 200, "python again.py").record(200, "end", wall=1.0, memory=1, best={})
    report.write_report(run, has_curve=False)
    page = (run / "report.md").read_text()
    shown, hidden, last = re.split("<details><summary>.*</summary>|</details>", page)
    assert "samples at 8 steps between" in page
    for step in range(20, 201, 20):
        part = {20: shown, 200: last}.get(step, hidden)
        assert part.count(f"## Samples after {step} updates\n\n    so <far> {step}\n") == 1
    notebook.show_samples([read_run(run)])
    assert re.findall(r"step (\d+)", capsys.readouterr().out) == ["20", "40", "60", "100", "200"]


def test_a_report_of_a_run_whose_lowest_loss_was_not_saved_says_so(tmp_path):
    run = write_run(tmp_path / "run")
    log = resume(run, 60, "python again.py")
    log.record(60, "end", wall=1.0, memory=1, best={"step": 20, "loss": 9.0})
    report.write_report(run, has_curve=False)
    page = (run / "report.md").read_text()
    assert "validation loss: 9.0000 of those saved; step 60 had 3.3174 |" in page


def test_a_report_has_the_speed_of_the_machine_it_names_and_the_losses_of_the_last_model(tmp_path):
    run = write_run(tmp_path / "run")
    log = resume(run, 60, "python again.py")
    log.record(60, "train", loss=3.0, tokens_per_sec=7.0, tokens=1, memory=1, wall=1.0, norm=1.0)
    log.record(61, "end", wall=3600.0, memory=10**9, best=None)
    report.write_report(run, has_curve=False)
    page = (run / "report.md").read_text()
    assert "| speed | 7 tokens/s" in page
    assert not any(f"\n| {row}" in page for row in ("val loss", "HellaSwag", "validation minus"))


@pytest.mark.parametrize("losing", ["train", "val", "hella", "samples"])
def test_a_report_leaves_out_what_a_run_has_not_done(tmp_path, losing):
    run = write_run(tmp_path / "run", steps=20)
    records = read_metrics(run / "metrics.jsonl")
    lines = [json.dumps(record) + "\n" for record in records if record["type"] != losing]
    (run / "metrics.jsonl").write_text("".join(lines))
    report.write_report(run, has_curve=False)
    page = (run / "report.md").read_text()
    row = {"train": "speed", "val": "| val loss", "hella": "| Hella", "samples": "## Samples"}
    assert row[losing] not in page and "## Commands" in page and "loss.png" not in page


def test_the_last_words_are_the_loss_of_text_the_best_checkpoint_and_what_to_run_next():
    quickstart = PRESETS["quickstart"]
    last = Path("log/quickstart/ckpt_000200")
    losses = {"validation, bits per byte": 2.06, "validation, nats per character": 1.428}
    progress = Progress(best={"step": 180, "loss": 3.1234}, losses=losses)
    words = report.last_words(quickstart, last, progress)
    assert "2.060 bits per byte = 1.428 nats per character" in words
    assert "log/quickstart/ckpt_000180, with the lowest validation loss: 3.1234" in words
    prompt = shlex.quote(quickstart.sample_prompt)
    assert f"sample.py --model log/quickstart/ckpt_000200 --prompt {prompt}" in words
    assert "--source my.txt --vocab-size auto --data-dir data/mine" in words
    assert "train_gpt2.py --minutes 20 --data-dir data/mine" in words
    assert "plan.py" in words
    mine = dataclasses.replace(quickstart, data_dir="data/mine")
    words = report.last_words(mine, None, Progress())
    assert "sample.py" not in words, "nothing was saved"
    assert "my.txt" not in words and "plan.py" not in words, "the user has done that"


def test_a_name_with_signs_of_mathematics_is_written_as_it_is(tmp_path):
    name = "price_$5_to_$9 \\frac{"
    records = [dict(type="run", config=dict(data_dir=name), model={}, parameters=3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "log.txt").write_text("".join(f"{i} train {5 - i}.0\n" for i in range(3)))
    figure = plots.plot_run(tmp_path)
    assert figure.axes[0].get_title(loc="left").startswith(name)


def test_printed_commands_can_be_typed_where_the_script_was_started(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["../my code/train_gpt2.py"])
    config = dataclasses.replace(PRESETS["quickstart"], log_dir="log/a b")
    words = report.last_words(config, Path("log/a b/ckpt_000200"), Progress())
    assert "python '../my code/sample.py' --model 'log/a b/ckpt_000200' --prompt ROMEO:" in words
    assert "python '../my code/fineweb.py' --source my.txt" in words
    typed = World(torch.device("cpu")).command(["--log-dir", "log/a b"])
    assert typed.endswith("python '../my code/train_gpt2.py' --log-dir 'log/a b'")

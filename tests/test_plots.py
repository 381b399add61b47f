"""What log.py reads, plots.py draws, inside.py finds and ending.py tells."""

import json
import math
import re
import sys

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from benchmarks import results
from model import GPT, GPTConfig
from support import ending, inside, plots
from support.common import UserError
from support.log import Log
from support.records import LoggedRun, read_log, read_metrics, read_run, read_runs

ABOUT = {  # what the first line of metrics.jsonl says besides the configuration
    "command": "python train_gpt2.py --max-steps 60 --seed 2 --overwrite",
    "git": "1234567",
    "versions": {"python": "3.12.0", "torch": "2.13.0"},
    "device": {"type": "cpu", "name": "a CPU", "processes": 1, "threads": 2},
    "dtype": "float32",
    "time": "2026-01-01 00:00:00",
}


def write_run(directory, data_dir="data/stdlib", steps=60, hella=True, total=1000, **config):
    """The logs of a run as support.log writes them: a falling loss, evaluated every 20 steps."""
    directory.mkdir(parents=True)
    run = dict(n_layer=12, n_embd=768, total_batch_size=1000, data_dir=data_dir, max_steps=steps)
    run |= dict(log_dir="log/it", preset="gpt2", sample_prompt="so", checkpoint_every=20) | config
    text = []
    records = [{"type": "run", "config": run, **ABOUT}]
    for step in range(steps + 1):
        loss = 3.3 + 7 * math.exp(-step / 10)
        if step % 20 == 0:
            text.append(f"{step} val {loss:.4f}")
            perplexity = math.exp(loss)
            values = dict(val_loss=loss, perplexity=perplexity)
            records.append({"type": "val", "step": step, **values})
            if hella:
                score = dict(hellaswag=0.25 + step / 2000, total=total)
                text.append(f"{step} hella {score['hellaswag']:.4f}")
                records.append({"type": "hella", "step": step, **score})
            if step:
                samples = [f"so <far> {step}\n$", "and so on"]
                records.append({"type": "samples", "step": step, "samples": samples})
        if step < steps:
            text.append(f"{step} train {loss:.6f}")
            values = dict(loss=loss, lr=6e-4, norm=1.5, tokens_per_sec=1000.0, memory=2 * 10**9)
            values |= dict(wall=2.0 * (step + 1), tokens=1000 * (step + 1))
            records.append({"type": "train", "step": step, **values})
    (directory / "log.txt").write_text("\n".join(text) + "\n")
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    return directory


def labels(axis):
    """What is written into a picture: the names of lines at their ends, and arrows."""
    return [text.get_text() for text in axis.texts]


def line_of(axis, color):
    """The y values of the first line of a colour."""
    [line, *_] = [line for line in axis.lines if line.get_color() == color]
    return np.asarray(line.get_ydata(), dtype=float)


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


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_loss_png_can_be_drawn_from_the_first_evaluation_on(tmp_path, steps):
    run = write_run(tmp_path / "run", steps=steps, hella=False)
    assert plots.plot_run(run).exists()


def test_drawing_leaves_pyplot_and_its_backend_alone(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    plots.plot_run(write_run(tmp_path / "run"))
    assert "matplotlib.pyplot" not in sys.modules


def test_published_baselines_appear_for_their_own_text_and_size_and_for_nothing_else(tmp_path):
    def drawn(draw, name, **config):
        figure = plots.plot_along(draw, [read_run(write_run(tmp_path / name, **config))], "step")
        return " ".join(label for label in labels(figure.axes[0]) if "OpenAI" in label)

    edu = dict(data_dir="data/edu_fineweb10B")
    fineweb = dict(data_dir="fineweb10B")
    medium = dict(n_layer=24, n_embd=1024)
    assert drawn(plots.draw_loss, "shakespeare", data_dir="data/tinyshakespeare") == ""
    assert drawn(plots.draw_loss, "other", data_dir="data/fineweb-2-german") == ""
    assert drawn(plots.draw_loss, "narrow", **edu, n_embd=192) == "", "12 layers are not the size"
    assert drawn(plots.draw_loss, "edu 350M", **edu, **medium) == "", "of it nobody has told"
    assert drawn(plots.draw_loss, "edu", **edu) == "OpenAI's 124M 3.292"
    assert drawn(plots.draw_loss, "plain", **fineweb) == "OpenAI's 124M 3.425"
    assert drawn(plots.draw_loss, "plain 350M", **fineweb, **medium) == "OpenAI's 350M 3.083"
    assert drawn(plots.draw_hellaswag, "stdlib") == ""
    both = drawn(plots.draw_hellaswag, "edu scored", **edu)
    assert both == "OpenAI's GPT-2 124M OpenAI's GPT-3 124M"


def test_the_untrained_loss_is_an_arrow_and_not_a_ramp_across_the_picture(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    axis = plots.plot_along(plots.draw_loss, [run], "step").axes[0]
    validation = line_of(axis, plots.RED)
    assert np.isnan(validation[0]) and validation[1:] == pytest.approx(run.streams["val"][1][1:])
    assert axis.get_ylim()[1] < 8, "the view ends above the last nine tenths, not at 10.3"
    assert sorted(labels(axis)) == ["10.30\n(above)", "training 3.33", "validation 3.317"]


def test_hellaswag_is_drawn_from_1000_examples_on(tmp_path):
    few = read_run(write_run(tmp_path / "few", total=999))
    many = read_run(write_run(tmp_path / "many", total=1000))
    assert plots.scored([few, many]) == [many]
    widths = [imread(plots.plot_run(tmp_path / name)).shape for name in ("few", "many")]
    assert widths[0] == widths[1]
    axis = plots.plot_along(plots.draw_hellaswag, [few, many], "step").axes[0]
    assert labels(axis) == ["chance", "many 0.280"]


def test_no_line_is_too_pale_to_be_seen_on_white():
    def contrast(color: str) -> float:
        """Of a colour on white: WCAG 2.1, relative luminance."""
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        luminance = np.dot([0.2126, 0.7152, 0.0722], linear)
        return 1.05 / (luminance + 0.05)

    assert contrast("#E69F00") < 3, "Okabe & Ito's orange, which was used before"
    for color in (*plots.COLORS, plots.GREY, plots.PALE):
        assert contrast(color) >= 3, color


def test_texts_at_the_ends_of_lines_do_not_touch():
    axis = plots.new_figure(1, 1)[1][0]
    axis.set_ylim(0, 1)
    plots.label_lines(axis, [(0.51, "b", "red"), (0.5, "a", "red"), (0.9, "c", "red")])
    heights = [text.xy[1] for text in axis.texts]
    assert labels(axis) == ["a", "b", "c"] and heights == pytest.approx([0.5, 0.57, 0.9])


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


def test_each_text_has_a_row_of_its_own(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", data_dir="data/tinyshakespeare")
    write_run(tmp_path / "c")
    figure = plots.plot_along(plots.draw_loss, read_runs(str(tmp_path / "*")), "step", "time")
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["on stdlib"] * 2 + ["on tinyshakespeare"] * 2
    assert labels(figure.axes[0]) == ["a 3.317", "c 3.317"]
    assert "validation 3.317" in labels(figure.axes[2]), "alone on its text"


def test_a_log_of_build_nanogpt_is_drawn_by_step_and_by_tokens_once_told(tmp_path):
    write_run(tmp_path / "log")
    (tmp_path / "log" / "metrics.jsonl").unlink()
    untold = read_run(tmp_path / "log")
    told = read_run(tmp_path / "log", data_dir="edu_fineweb10B", total_batch_size=524288)
    assert not plots.published_loss(untold) and plots.published_loss(told)
    for run, lines in ((untold, (2, 0, 0)), (told, (3, 3, 1))):
        figure = plots.plot_along(plots.draw_loss, [run], "step", "tokens", "time")
        drawn = [
            [line for line in axis.lines if len(line.get_xdata()) != 1] for axis in figure.axes
        ]
        assert tuple(map(len, drawn)) == lines


def test_several_runs_have_a_colour_each_and_far_learning_rates_a_logarithmic_axis(tmp_path):
    runs = [read_run(write_run(tmp_path / name)) for name in ("a", "b")]
    axis = plots.plot_along(plots.draw_loss, runs, "step").axes[0]
    assert labels(axis) == ["a 3.317", "b 3.317"]
    assert [text.get_color() for text in axis.texts] == [plots.BLUE, plots.RED]
    axes = plots.plot_training(runs).axes
    fields = ["learning rate", "gradient norm, unclipped", "tokens/s"]
    assert [axis.get_ylabel() for axis in axes] == fields
    assert [axis.get_yscale() for axis in axes] == ["log"] * 3
    assert plots.plot_training(runs[:1]).axes[0].get_yscale() == "linear"


def test_runs_are_found_by_pattern_and_none_is_said_in_a_sentence(tmp_path):
    write_run(tmp_path / "runs" / "b")
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "README").mkdir()
    assert [run.name for run in read_runs(str(tmp_path / "runs" / "*"))] == ["a", "b"]
    with pytest.raises(FileNotFoundError, match="make quickstart"):
        read_runs(str(tmp_path / "nothing" / "*"))


def test_smoothing_is_the_mean_around_each_value():
    assert plots.smooth([1, 2, 6, 4, 5], 3).tolist() == [1.5, 3, 4, 5, 4.5]
    assert plots.smooth([1, 2, 3], 1).tolist() == [1, 2, 3]


def test_attention_patterns_are_those_the_model_uses():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=32))
    idx = torch.randint(50257, (1, 7))
    patterns = torch.from_numpy(inside.attention_patterns(model, idx))
    assert patterns.shape == (2, 2, 7, 7)
    assert torch.allclose(patterns.sum(-1), torch.ones(2, 2, 7))
    assert patterns.triu(1).eq(0).all()
    with torch.no_grad():  # the first layer: patterns times values is what its attention returns
        block = model.transformer.h[0]
        x = block.ln_1(model.embed(idx, torch.arange(7)))
        v = block.attn.c_attn(x)[0, :, 64:].view(7, 2, 16).transpose(0, 1)
        y = block.attn.c_proj((patterns[0] @ v).transpose(0, 1).reshape(7, 32))
        assert torch.allclose(y, block.attn(x)[0], atol=1e-6)


def draw_benchmark(name, rows):
    config = dict(model="gpt2", batch_size=4, sequence_length=256)
    result = dict(config=config, device=dict(name="a CPU"), benchmarks={name: dict(rows=rows)})
    return results.plot_benchmarks([result])


def test_every_comparison_of_the_benchmark_is_drawn_and_a_failed_row_is_left_out():
    unit = dict(unit="tokens/s")
    ladder = [
        dict(name="a", median=100, **unit),
        dict(name="b", median=250, beside=125, speedup=2, **unit),
        dict(name="c", error="out of memory"),
    ]
    figure = draw_benchmark("ladder", ladder)
    (axis,) = figure.axes
    assert [bar.get_width() for bar in axis.patches] == [100, 125, 250], "b beside its own base"
    assert axis.get_xlabel() == "tokens a second (longer is faster)"
    curves = [
        dict(way="written out", T=128, ms=4.0),
        dict(way="fused", T=128, ms=2.0),
        dict(way="fused", T=256, ms=5.0),
    ]
    (axis,) = draw_benchmark("attention", curves).axes
    assert [line.get_label() for line in axis.lines] == ["written out", "fused"]


def test_a_comparison_has_a_line_a_run_and_a_mean_beside_the_dots_of_each_arm():
    def arm(name, *lasts, **against):
        runs = []
        for last in lasts:
            losses = None if last is None else [9, 5, last]
            runs.append(dict(val_loss=last, losses=losses, tokens=[0, 10**6, 2 * 10**6]))
        return dict(name=name, value=0.004, runs=runs, against=against)

    better = dict(mean=-1.0, half=0.1, differences=[-1.1, -0.9])
    arms = [arm("base", 4, 4), arm("better", 2.9, 3.1, **better), arm("worse", 4, None)]
    losses, differences = plots.plot_comparison(dict(arms=arms, sweep="")).axes
    drawn = [line.get_ydata().tolist() for line in losses.lines if len(line.get_ydata())]
    assert drawn == [[5, 4], [5, 4], [5, 2.9], [5, 3.1], [5, 4]], "not the one that diverged"
    assert losses.get_xlabel() == "tokens (millions)"
    assert losses.get_legend_handles_labels()[1] == ["base", "better", "worse"]
    assert losses.get_ylim()[1] > 5, "the highest point is whole"
    assert differences.lines[0].get_xdata().tolist() == [-1.1, -0.9]
    assert [label.get_text() for label in differences.get_yticklabels()] == ["better", "worse"]
    swept = plots.plot_comparison(dict(arms=arms, sweep="learning_rate")).axes[0]
    assert swept.get_legend_handles_labels()[1][0] == "base, learning_rate 0.004"


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (1.1, 1.3, "1.20 × (1.10 to 1.30): faster"),
        (0.9, 1.3, "1.20 × (0.90 to 1.30): no difference shown"),
        (0.7, 0.9, "1.20 × (0.70 to 0.90): slower"),
        (1.2, 1.2, "1.20 × (no range)"),
    ],
)
def test_nothing_is_called_faster_or_slower_where_the_range_holds_one(low, high, told):
    row = dict(name="b", unit="tokens/s", median=120, beside=100, speedup=1.2)
    assert results.describe_ratio(row) == "1.20 × (no range)", "of a record that has none"
    row |= dict(speedup_low=low, speedup_high=high)
    assert results.describe_ratio(row) == told
    assert told in results.format_table([row])
    bar = draw_benchmark("ladder", [row]).axes[0].patches[-1]
    colors = {"faster": plots.BLUE, "slower": plots.RED}
    wanted = colors.get(told.rpartition(": ")[2], plots.GREY)
    assert bar.get_facecolor() == pytest.approx(rgba(wanted))


def rgba(color):
    return (*[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)], 1.0)


def test_the_previous_token_head_is_found():
    patterns = np.full((2, 3, 4, 4), 0.1)
    patterns[1, 2] = np.eye(4, k=-1)
    assert inside.find_previous_token_head(patterns) == (1, 2, 1.0)


def test_the_spectra_of_a_model_stand_beside_an_untrained_ones():
    torch.manual_seed(0)
    model, untrained = (GPT(GPTConfig(block_size=16, n_layer=3, n_head=2, n_embd=32)),) * 2
    figure = inside.plot_positions(model, untrained)
    assert "the 0 that stand out" in figure.axes[1].get_title() and not figure.axes[1].lines
    with torch.no_grad():
        model = GPT(model.config)
        model.transformer.wpe.weight += torch.linspace(-1, 1, 16)[:, None]
    figure = inside.plot_positions(model, untrained)
    assert "the 1 that stand out" in figure.axes[1].get_title() and len(figure.axes[1].lines) == 1
    for axis in inside.plot_attention_weights(model, untrained).axes:
        names = [line.get_label() for line in axis.lines]
        assert names == ["untrained", "layer 0", "layer 1", "layer 2"]


# -- the report of a run


def test_a_report_says_on_a_page_what_a_run_was(tmp_path):
    run = write_run(tmp_path / "run")
    page = ending.write_report(run).read_text()
    for fact in (
        "# GPT-2 of 12 layers and 768 channels, on stdlib",
        "(loss.png)",
        "60 updates of 1,000 tokens: 60,000 tokens",
        "| time | 0:02:00 ",
        "1,000 tokens/s: median",
        "2.00 GB",
        "| validation loss | 3.3174 (perplexity 27.59) after 60 updates",
        "| HellaSwag | 0.280 ± 0.014 of 1,000 examples",
        "a CPU; 1 process",
        "revision 1234567",
        "    2026-01-01 00:00:00  python train_gpt2.py --max-steps 60 --seed 2 --overwrite\n",
        "## Samples after 20 updates\n\n    so <far> 20\n    $\n\n    and so on\n",
        "## Samples after 60 updates",
        "    python sample.py --model log/it/ckpt_000060 --prompt so\n",
        "    python train_gpt2.py --seed 2 --resume auto --max-steps 120\n",
    ):
        assert fact in page, fact
    assert page.count("\n") < 70, "one page"


def test_a_report_of_a_run_that_was_resumed_has_both_commands_and_the_time_of_its_end(tmp_path):
    run = write_run(tmp_path / "run")
    again = ABOUT | {"command": "python train_gpt2.py --resume auto", "parameters": 30_000}
    records = read_metrics(run / "metrics.jsonl")
    records.append({"type": "resume", "step": 60, "config": records[0]["config"], **again})
    records.append({"type": "end", "step": 60, "wall": 3600.0, "memory": 5 * 10**9})
    page = ending.compose_report(records)
    assert "python train_gpt2.py --max-steps 60" in page
    assert "python train_gpt2.py --resume auto\n" in page
    assert "| time | 1:00:00 " in page and "5.00 GB" in page
    assert "2 for each of 30,000 parameters" in page


@pytest.mark.parametrize("losing", ["train", "val", "hella", "samples"])
def test_a_report_leaves_out_what_a_run_has_not_done(tmp_path, losing):
    records = read_metrics(write_run(tmp_path / "run") / "metrics.jsonl")
    page = ending.compose_report([record for record in records if record["type"] != losing])
    row = {"train": "speed", "val": "| validation", "hella": "| Hella", "samples": "## Samples"}
    assert row[losing] not in page and "## How to go on" in page


def test_a_run_ends_with_its_first_samples_beside_its_last_and_what_to_run_next(tmp_path, capsys):
    run = write_run(tmp_path / "run", preset="quickstart")
    ending.finish(run)
    shown = capsys.readouterr().out
    assert re.search(r"^-- after 20 updates +-- after 60 updates$", shown, re.MULTILINE)
    assert re.search(r"^so <far> 20 +so <far> 60$", shown, re.MULTILINE)
    for line in ("The curve: .*loss.png", "The report: .*report.md", "Sample it: .*ckpt_000060"):
        assert re.search(line, shown), line
    assert "--data-dir data/mine --log-dir log/mine" in shown and (run / "report.md").exists()


def test_a_report_that_fails_is_one_sentence_and_spoils_nothing(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / "report.md").mkdir()  # nothing can be written there
    ending.finish(run)
    ending.finish(tmp_path / "nowhere")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("the run itself is complete" in line for line in lines)
    with pytest.raises(UserError, match="first line is missing"):
        ending.compose_report([{"type": "val", "step": 0, "val_loss": 1.0}])


def test_a_run_that_goes_on_after_its_end_has_one_end(tmp_path):
    log = Log(tmp_path, is_main=True)
    log.start({"config": {}})
    log.record(1, "end", wall=1.0)
    log.resume(1, evaluated=True, run={"config": {}})
    log.record(2, "end", wall=2.0)
    assert [r["type"] for r in read_metrics(log.metrics)] == ["run", "resume", "end"]


def test_long_lines_of_samples_are_cut_at_their_column():
    shown = ending.side_by_side("abcdef\n\ng", "1\n23456\n7890", 4)
    assert shown.splitlines() == ["abc…    1", "        234…", "g       7890"]


# -- tables


def test_the_table_of_runs_says_on_how_many_examples_hellaswag_stands(tmp_path):
    run = read_run(write_run(tmp_path / "run", total=100))
    row = plots.describe_results(run)
    assert row[1:4] == ["stdlib", "12 × 768", "60 × 1000"]
    assert row[-2:] == ["3.3174", "0.280 ± 0.045 (n = 100)"]
    assert plots.describe_results(LoggedRun("empty", {}, [], {}))[-3:] == ["–", "–", "–"]


def test_a_table_keeps_line_breaks_and_shows_markup_as_text():
    pytest.importorskip("IPython")
    html = plots.table(["step 1"], [["<b>\nnext"]]).data
    assert "&lt;b&gt;<br>next" in html and "<b>" not in html


def test_pictures_of_attention_have_a_label_for_every_token():
    pattern = np.tril(np.full((3, 3), 1 / 3))
    axis = inside.plot_attention(pattern, [" a", "\n", "$"], "layer 0, head 0").axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()] == [" a", r"\n", r"\$"]
    assert inside.plot_heads(np.stack([pattern[None]] * 2)).axes[0].get_ylabel() == "layer"

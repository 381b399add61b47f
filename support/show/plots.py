"""Draws runs: loss.png of training; and what all pictures share: colours, axes, labels."""

import gc
import io
import json
import math
import textwrap
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np

from support.base.console import say
from support.base.errors import first_line
from support.base.files import write_whole
from support.run.log import LoggedRun, read_run, starts_of
from support.show import published
from support.text.names import ALWAYS_THERE

# Colour-blind readers can tell these apart. Their contrast is above 3.8 on GitHub's light pages and
# on its dark ones. After Okabe & Ito's palette; the purple is near Tol's.
BLUE = "#2f81b7"
RED = "#d55e00"
GREEN = "#008f68"
GREY = "#727a83"  # also of the text, see gpt2.mplstyle
COLORS = (BLUE, RED, GREEN, "#b5559f", GREY)  # the fourth is purple
LOSS = "loss (nats per token)"
# of many runs in one picture: no two of 15 look the same
STYLES = [dict(linestyle=dash, color=color) for dash, color in product(("-", ":", "-."), COLORS)]


def new_figure(rows: int, columns: int, height: float = 4.0) -> tuple[Any, list]:
    """A figure as wide as a page on GitHub, and the list of its axes; height: inches per row."""
    import matplotlib.style
    from matplotlib.figure import Figure  # not pyplot's, which would keep it in memory

    matplotlib.style.use(Path(__file__).with_name("gpt2.mplstyle"))
    figure = Figure((8.6, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def label_x(axis: Any, label: str) -> None:
    axis.set_xlabel(label)
    axis.locator_params(axis="x", nbins=6, integer=label == "step")
    axis.xaxis.set_major_formatter("{x:,g}")


def scale_x(axis: Any, runs: list[LoggedRun]) -> list[float]:
    """Labels x: steps, or tokens if the runs differ in their batch. Returns x per step of each."""
    batches = [run.config.get("total_batch_size", 0) for run in runs]
    if len(set(batches)) > 1 and min(batches) > 0:
        label_x(axis, "tokens (millions)")
        return [batch / 1e6 for batch in batches]
    label_x(axis, "step")
    return [1] * len(runs)


def average(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of up to 51 values around each, and their deviation: 0 in a short run."""
    around = np.ones(min(51, len(values) // 25 | 1))
    count = np.convolve(np.ones(len(values)), around, "same")  # fewer at the ends
    mean = np.convolve(values, around, "same") / count
    square = np.convolve(np.square(values), around, "same") / count
    return mean, np.sqrt(np.maximum(0, square - mean**2))


def label_lines(axis: Any) -> None:
    """Writes the label of each line beside its end. Texts that are moved apart point."""
    bottom, top = axis.get_ylim()
    along = axis.get_yaxis_transform()
    inches = axis.get_position().height * axis.figure.get_figheight()
    y = -np.inf
    lines, _ = axis.get_legend_handles_labels()
    ends = [(line.get_ydata()[-1], line.get_label(), line.get_color()) for line in lines]
    for value, text, color in sorted(ends):
        y = max(value, y + 0.17 / inches * (top - bottom))
        style = dict(color=color, arrowprops=dict(arrowstyle="-", color=color, relpos=(0, 0.5)))
        axis.annotate(text, (1, value), (1.025, y), along, va="center", **style)


def plot_run(log_dir: str | Path) -> Any:
    """Draws log_dir/loss.png: training and validation loss, and HellaSwag if it was scored."""
    gc.collect()  # the last figure refers to itself: its 14 MB would stay until Python looks
    run = read_run(log_dir, updates=False)
    has_scores = published.is_scored(run) and len(run.streams["hella"][0]) > 1
    figure, axes = new_figure(2 if has_scores else 1, 1)
    draw_loss(axes[0], [run])
    axes[0].set_title(title_of(run))
    if has_scores:
        draw_hellaswag(axes[1], [run])
    save_picture(figure, Path(log_dir) / "loss.png")
    return figure


def redraw(log_dir: str | Path) -> bool:
    """Draws log_dir/loss.png as far as the run has come. If that fails, says why -> False."""
    try:
        plot_run(log_dir)
        return True
    except Exception as error:
        say(f"loss.png: {first_line(error)}; training is not affected")
        return False


def save_picture(figure: Any, path: Path) -> None:
    """Writes a figure as NAME.png, or for light and dark pages as NAME.svg, transparent."""
    picture = io.BytesIO()
    undated = dict(Date=None, Creator=None)  # an svg is always the same bytes
    is_svg = path.suffix == ".svg"
    figure.savefig(picture, format=path.suffix[1:], transparent=is_svg, metadata=undated)
    write_whole(path, picture.getvalue())


def title_of(run: LoggedRun) -> str:
    """The text that a run trains on, and the size of its model where that was recorded."""
    text = name_text(run.config, run.name)
    millions = next((r["parameters"] for r in run.records if "parameters" in r), 0) / 1e6
    return f"{text}, {millions:.{int(millions < 10)}f} million parameters" if millions else text


def name_text(config: dict, unknown: str) -> str:
    """In words, what a run with these settings trains on; `unknown` where that was not recorded."""
    text = published.text_of(config)
    return (ALWAYS_THERE | {"?": unknown}).get(text, text)


def draw_loss(axis: Any, runs: list[LoggedRun], beginning: bool = True) -> None:
    """Draws training loss, averaged, and validation loss as dots. A run alone has its details.

    The view leaves out the steep part. With `beginning`, a second one at the left shows all.
    """
    alone = len(runs) == 1
    theirs = {published.size_of(run.config): published.openai_loss(run.config) for run in runs}
    levels = {f"OpenAI's {size} {loss:.3f}": loss for size, loss in theirs.items() if loss}
    draw_levels(axis, levels)
    tops = list(levels.values())
    units = scale_x(axis, runs)
    draw_band(axis, runs, "val", units)
    for run, unit, style in zip(runs, units, cycle(STYLES)):
        color = style["color"]
        streams = finite(run)
        if "train" in streams:
            steps, losses = streams["train"]
            mean, deviation = average(losses)
            few = np.linspace(0, len(steps) - 1, min(len(steps), 400)).astype(int)  # enough to see
            label = f"training {mean[-1]:.2f}" if alone else None
            axis.plot(steps[few] * unit, mean[few], **style, label=label)
            tops.append(mean[in_view(run, steps)].max())
            if alone:
                mark_steps(axis, run, steps, mean)
            if alone and deviation.any():
                band = np.array([np.maximum(mean - deviation, losses.min()), mean + deviation])
                axis.fill_between(steps[few], *band[:, few], color=color, alpha=0.1, linewidth=0)
                # one point draws no line, but has a label
                axis.plot(steps[-1:], band[0, -1:], color=color, label="± one deviation")
        if "val" in streams:
            steps, losses = streams["val"]
            label = f"{'validation' if alone else run.name} {losses[-1]:.3f}"
            tops.append(losses[in_view(run, steps)].max())
            seen = losses <= max(tops)
            ink = dict(color=RED if alone else color, linestyle=style["linestyle"])
            dots = dict(marker="o", markersize=5 if len(steps) < 40 else 3, clip_on=False)
            axis.plot(steps[seen] * unit, losses[seen], label=label, **ink, **dots)
    if tops:
        margin = 0.06 * (max(tops) - axis.dataLim.y0) or 0.5
        axis.set_ylim(axis.dataLim.y0 - margin, max(tops) + margin)
    label_lines(axis)
    if beginning:
        draw_beginning(axis, runs)
    else:
        axis.set_ylabel(LOSS)


def draw_beginning(axis: Any, runs: list[LoggedRun]) -> None:
    """Draws whole curves at the left of draw_loss's axis, with more room for earlier updates.

    Dashed: what a model without weights can reach, the lecture's "easy gains".
    """
    from matplotlib.transforms import blended_transform_factory

    figure = axis.figure
    figure.get_layout_engine().set(rect=(0.3, 0, 0.7, 1))
    across = blended_transform_factory(figure.transFigure, axis.transAxes)
    whole = axis.inset_axes((0.045, 0, 0.23, 1), transform=across, in_layout=False)
    units = scale_x(whole, runs)
    size = max(run.config.get("vocab_size", published.VOCAB_SIZE) for run in runs)
    levels = {math.log(size): f"all {size:,} tokens alike"}
    if theirs := published.openai_loss(runs[0].config):
        levels[theirs] = "OpenAI's"
    starts = [record for run in runs for record in starts_of(run.records)]
    known: dict = next((r["frequencies"] for r in starts[::-1] if "frequencies" in r), {})
    if known:
        levels |= {known["entropy"]: "by frequency"}
        if known["kinds"] < 0.7 * size:  # else the two lines are one
            levels |= {math.log(known["kinds"]): f"the {known['kinds']:,} that occur"}
    for y, meaning in sorted(levels.items()):
        whole.axhline(y, linestyle="--", color=GREY, linewidth=1)
        place = dict(transform=whole.get_yaxis_transform(), ha="right", va="bottom")
        whole.text(1, y, f"{meaning}: {y:.2f}", **place)
    for run, unit, style in zip(runs, units, cycle(STYLES)):
        for name, (steps, losses) in finite(run).items():
            if name == "train":
                whole.plot(steps * unit, losses, linewidth=0.7, **style)
            if name == "val":
                ink = RED if len(runs) == 1 else style["color"]
                whole.plot(steps * unit, losses, "o", color=ink, markersize=3, clip_on=False)
    whole.set_xscale("symlog", linthresh=max(units))  # 0 is on it
    end = max(whole.dataLim.x1, 10 * max(units))
    decades = 10 ** np.arange(np.ceil(np.log10(max(units))), np.floor(np.log10(end)) + 1)
    whole.set_xticks([0, *(decades[:: 1 + len(decades) // 5])])
    whole.xaxis.set_major_formatter("{x:,g}")
    whole.set_title(LOSS, fontsize="medium")


def finite(run: LoggedRun) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Its streams without values that are nan or inf, with which build-nanogpt trains on."""
    arrays = {name: (np.array(steps), np.array(y)) for name, (steps, y) in run.streams.items()}
    kept = {name: (steps[np.isfinite(y)], y[np.isfinite(y)]) for name, (steps, y) in arrays.items()}
    return {name: stream for name, stream in kept.items() if len(stream[0])}


def mark_steps(axis: Any, run: LoggedRun, steps: np.ndarray, mean: np.ndarray) -> None:
    """Marks on the curve where a run was resumed, and below it where each epoch begins."""
    notes = []
    if resumes := [record["step"] for record in starts_of(run.records)[1:]]:
        axis.plot(resumes, np.interp(resumes, steps, mean), "x", color=GREY, ms=7, mew=1.6)
        notes.append("×: interrupted, then resumed")
    tokens = next((r["epoch_tokens"] for r in run.records if "epoch_tokens" in r), 0)
    epoch = tokens / run.config.get("total_batch_size", 1)
    if 0 < epoch < steps[-1] <= 40 * epoch:  # more could not be told apart
        at = np.arange(epoch, steps[-1], epoch)
        axis.plot(at, 0 * at, "|", color=GREY, ms=14, mew=1.6, transform=axis.get_xaxis_transform())
        notes.append("|: a new epoch")
    axis.set_xlabel(f"step ({'; '.join(notes)})" if notes else "step")


def draw_band(axis: Any, runs: list[LoggedRun], stream: str, units: list[float]) -> None:
    """Draws the published runs of the 124M as a pale band, if one of these runs is of it."""
    for run, unit in zip(runs, units, strict=True):
        if published.is_reproduction(run.config):
            steps, low, high = published_band(stream)
            name = f"published {low[-1]:.3f} to {high[-1]:.3f}"
            axis.fill_between(steps * unit, low, high, color=GREY, alpha=0.35, linewidth=0)
            axis.plot(steps[-1:] * unit, high[-1:], color=GREY, label=name)
            return


@cache
def published_band(stream: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, and the lowest and highest published value at each. stream: train, val or hella."""
    runs = [run for run in published_runs() if published.is_reproduction(run.config)]
    values = np.array([run.streams[stream][1] for run in runs])  # all logged at the same steps
    return np.array(runs[0].streams[stream][0]), values.min(0), values.max(0)


def published_runs() -> list[LoggedRun]:
    """The runs that others published, as the trainer's own are read."""
    folder = published.ASSETS / "published_runs"
    runs = []
    for name, about in json.loads((folder / "runs.json").read_text())["runs"].items():
        config = published.REPRODUCTION if about["is_reproduction"] else published.SIZE
        runs.append(read_run(folder / f"{name}.txt", **config, data_dir=about["text"]))
    return runs


def in_view(run: LoggedRun, steps: np.ndarray) -> np.ndarray:
    """Which steps are after the first tenth of a run, or the last: the view ends above them."""
    last = max(steps[-1] for steps, _ in run.streams.values())
    return steps >= min(last / 10, steps[-1])


def draw_levels(axis: Any, levels: dict[str, float]) -> None:
    """Draws published figures as dashed lines."""
    for name, y in levels.items():
        axis.axhline(y, linestyle="--", color=GREY, linewidth=1, label=name)


def draw_hellaswag(axis: Any, runs: list[LoggedRun]) -> None:
    """Draws HellaSwag accuracy with its standard error. Dashed: chance, OpenAI's models."""
    levels = {"chance": 0.25}
    for size in filter(None, (published.size_of(run.config) for run in runs)):
        for family, scores in published.OPENAI["hellaswag"].items():
            levels[f"OpenAI's {family} {size}"] = scores[size]
    draw_levels(axis, levels)
    units = scale_x(axis, runs)
    draw_band(axis, runs, "hella", units)
    for run, unit, style in zip(runs, units, cycle(STYLES)):
        steps, scores = map(np.array, run.streams["hella"])
        error = np.sqrt(scores * (1 - scores) / run.examples)
        axis.errorbar(steps * unit, scores, error, marker="o", ms=3, clip_on=False, **style)
        axis.lines[-1].set_label(f"{run.name} {scores[-1]:.3f}")
    axis.set_ylabel("HellaSwag accuracy (normalized)")
    label_lines(axis)


def plot_samples(log_dir: str | Path, moments: list[float]) -> Any:
    """Draws a run's losses and, above them, samples after so many minutes; math.inf: the last."""
    run = read_run(log_dir)
    figure, [axis] = new_figure(1, 1, 5.2)
    draw_loss(axis, [run], beginning=False)
    steps, samples = run.series("samples", "samples")
    minutes = np.interp(steps, *run.series("wall")) / 60
    curve = next(line.get_data() for line in axis.lines if line.get_color() == BLUE)
    for i, moment in enumerate(moments):
        k = min(int(np.searchsorted(minutes, moment - 0.5)), len(steps) - 1)
        lines = [f"{minutes[k]:.0f} minutes, step {steps[k]:,}", ""]
        for line in samples[k][0].splitlines():  # as it was generated
            lines += textwrap.wrap(line, 96 // len(moments)) or [""]
        text = "\n".join(lines[:9])
        point = (steps[k], min(np.interp(steps[k], *curve), axis.get_ylim()[1]))
        column = 1.16 * i / len(moments)  # there are no axes below the labels at the right
        across = np.clip((steps[k] / steps[-1] - column) * len(moments), 0, 1)
        arrow = dict(arrowstyle="-|>", color=GREY, linewidth=0.6, relpos=(across, 0))
        style = dict(family="monospace", arrowprops=arrow)
        axis.annotate(text, point, (column, 1.06), "data", axis.transAxes, **style)
    axis.set_title(f"{title_of(run)}, continuing {run.config['sample_prompt']!r}", pad=125)
    return figure

"""Draws runs: loss.png of training, the pictures and tables of the notebook and of compare.py."""

import gc
import io
import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from support.common import first_line, say, write_whole
from support.log import RECENT, LoggedRun, read_run

# Colour-blind readers can tell these apart, and none is pale (contrast to white above 3:1).
# From Okabe & Ito's palette; the purple is Tol's, which is darker.
BLUE = "#0072B2"
RED = "#D55E00"
BLACK = "#000000"
PALE = "#949494"  # for bars beside others
COLORS = (BLUE, RED, "#009E73", "#AA4499", BLACK)  # the third is green, the fourth purple

OPENAI: dict = json.loads((Path(__file__).parent.parent / "assets" / "openai.json").read_text())
Label = tuple[float, str, str]  # a value, its text, its colour
FEWEST_EXAMPLES = 1000  # of HellaSwag: with fewer, the standard error is over 1.4%


# -- figures and axes


def new_figure(rows: int, columns: int, height: float = 4.0) -> tuple[Any, list]:
    """A figure as wide as a notebook, and the list of its axes; height: inches per row."""
    from matplotlib.figure import Figure  # not pyplot's, which would keep it in memory

    figure = Figure((9.6, height * rows), dpi=120, layout="constrained", facecolor="white")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def tidy(axis: Any) -> None:
    """Adds a light grid and, if something is labelled, a legend. Removes the frame."""
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(frameon=False, fontsize=9)


def label_x(axis: Any, label: str) -> None:
    axis.set_xlabel(label)
    axis.locator_params(axis="x", nbins=6, integer=label == "step")
    axis.xaxis.set_major_formatter("{x:,g}")
    tidy(axis)


def scale_x(axis: Any, runs: list[LoggedRun]) -> list[float]:
    """Labels x: steps, or tokens if the runs differ in their batch. Returns x per step of each."""
    batches = [run.config.get("total_batch_size", 0) for run in runs]
    if len(set(batches)) > 1 and min(batches) > 0:
        label_x(axis, "tokens (millions)")
        return [batch / 1e6 for batch in batches]
    label_x(axis, "step")
    return [1] * len(runs)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Averages the `window` values (an odd number) around each; at the ends, those that exist."""
    around = np.ones(window)
    return np.convolve(values, around, "same") / np.convolve(np.ones(len(values)), around, "same")


def draw_smoothed(axis: Any, x: np.ndarray, values: np.ndarray, color: str) -> np.ndarray:
    """Draws and returns the average around each point. Long runs get a band of one deviation."""
    window = min(51, len(values) // 25 | 1)
    mean = smooth(values, window)
    if window > 1:
        deviation = np.sqrt(np.maximum(0, smooth(np.square(values), window) - mean**2))
        low = np.maximum(mean - deviation, values.min())
        axis.fill_between(x, low, mean + deviation, color=color, alpha=0.2, linewidth=0)
    axis.plot(x, mean, color=color, linewidth=1.4)
    return mean


def label_lines(axis: Any, labels: list[Label]) -> None:
    """Names values at the right edge. Texts that are moved apart point."""
    bottom, top = axis.get_ylim()
    along = axis.get_yaxis_transform()
    y = -np.inf
    for value, text, color in sorted(labels):
        y = max(value, y + 0.07 * (top - bottom))
        style = dict(color=color, arrowprops=dict(arrowstyle="-", color=color, relpos=(0, 0.5)))
        axis.annotate(text, (1, value), (1.02, y), along, fontsize=9, va="center", **style)


# -- runs


def plot_run(log_dir: str | Path) -> None:
    """Draws log_dir/loss.png: training and validation loss, and HellaSwag if it was scored."""
    gc.collect()  # the last figure refers to itself: its 14 MB would stay until Python looks
    run = read_run(log_dir)
    draws = [draw_loss]
    if scored([run]) and len(run.streams["hella"][0]) > 1:
        draws.append(draw_hellaswag)
    figure, axes = new_figure(1, len(draws))
    for axis, draw in zip(axes, draws, strict=True):
        draw(axis, [run])
    title = "GPT-2, {n_layer} layers, {n_embd} wide, on {text}, {total_batch_size:,} tokens a step"
    figure.suptitle(title.format(text=text_of(run), **run.config), fontsize=11)
    save_picture(figure, Path(log_dir) / "loss.png", dpi=150)


def redraw(log_dir: str | Path) -> bool:
    """Draws log_dir/loss.png as far as the run has come. If that fails, says why -> False."""
    try:
        plot_run(log_dir)
        return True
    except Exception as error:
        say(f"loss.png: {first_line(error)}; training is not affected")
        return False


def save_picture(figure: Any, path: Path, **options: Any) -> None:
    """Writes a figure as a PNG file, whole or not at all. The options are savefig's."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", **options)
    write_whole(path, picture.getvalue())


def text_of(run: LoggedRun) -> str:
    """The name of the text that a run trains on. Losses on different texts are not compared."""
    return Path(run.config.get("data_dir", "?")).name


def size_of(run: LoggedRun) -> str:
    """OpenAI's name for a model of this size, "" if there is none."""
    shape = f"{run.config.get('n_layer', 12)} x {run.config.get('n_embd', 768)}"
    return OPENAI["sizes"].get(shape, "")


def plot_by_text(draw: Callable[..., None], runs: list[LoggedRun]) -> Any:
    """Draws the runs on each text in a panel of its own. draw: draw_loss or draw_hellaswag."""
    texts = list(dict.fromkeys(map(text_of, runs)))
    figure, axes = new_figure(len(texts), 1)
    for axis, text in zip(axes, texts, strict=True):
        draw(axis, [run for run in runs if text_of(run) == text])
        axis.set_title(f"on {text}", fontsize=10)
    return figure


def draw_loss(axis: Any, runs: list[LoggedRun]) -> None:
    """Draws training loss, smoothed, and validation loss as dots."""
    alone = len(runs) == 1
    levels = {}
    for size in map(size_of, runs):
        if loss := OPENAI["val_loss"].get(text_of(runs[0]), {}).get(size):
            levels[f"OpenAI's {size} {loss:.3f}"] = loss
    labels = draw_levels(axis, levels)
    tops = list(levels.values())
    for run, unit, color in zip(runs, scale_x(axis, runs), cycle(COLORS)):
        if "train" in run.streams:
            steps, losses = map(np.array, run.streams["train"])
            mean = draw_smoothed(axis, steps * unit, losses, color)
            tops.append(mean[in_view(run, steps)].max())
            if alone:
                last = losses[-RECENT:]
                text = f"training {last.mean():.2f} (last {len(last)})"
                labels.append((last.mean(), text, color))
        if "val" in run.streams:
            steps, losses = map(np.array, run.streams["val"])
            name = "validation" if alone else run.name
            ink = RED if alone else color
            labels.append((losses[-1], f"{name} {losses[-1]:.3f}", ink))
            tops.append(losses[in_view(run, steps)].max())
            seen = losses <= max(tops)
            axis.plot(steps[seen] * unit, losses[seen], "o-", color=ink, ms=5.5, mec="white")
            if alone and not seen[0]:
                point_above(axis, steps[0], losses[0])
    if tops:
        margin = 0.06 * (max(tops) - axis.dataLim.y0) or 0.5
        axis.set_ylim(axis.dataLim.y0 - margin, max(tops) + margin)
    band = "; band: one deviation" if axis.collections else ""
    axis.set_ylabel(f"loss (nats per token){band}")
    label_lines(axis, labels)


def in_view(run: LoggedRun, steps: np.ndarray) -> np.ndarray:
    """Which steps are after the first tenth of a run; the last step, if all are earlier.

    The view ends above their losses. Otherwise the untrained model's would take most of it.
    """
    last = max(steps[-1] for steps, _ in run.streams.values())
    return steps >= min(last / 10, steps[-1])


def point_above(axis: Any, x: float, loss: float) -> None:
    axis.margins(x=0.11)
    style = dict(color=RED, fontsize=8, ha="center", va="top")
    axis.text(x, 0.99, f"▲\n{loss:.2f}\n(above)", transform=axis.get_xaxis_transform(), **style)


def draw_levels(axis: Any, levels: dict[str, float]) -> list[Label]:
    """Draws published figures as dashed lines. Returns their labels for label_lines."""
    for y in levels.values():
        axis.axhline(y, linestyle="--", color=BLACK, linewidth=1.2)
    return [(y, name, BLACK) for name, y in levels.items()]


def examples_of(run: LoggedRun) -> int:
    """How many HellaSwag examples a run was scored on; all, if it has only a log.txt."""
    _, totals = run.series("total", "hella")
    return totals[-1] if totals else 10042


def scored(runs: list[LoggedRun]) -> list[LoggedRun]:
    """The runs with a HellaSwag score on enough examples to show more than luck."""
    return [run for run in runs if "hella" in run.streams and examples_of(run) >= FEWEST_EXAMPLES]


def draw_hellaswag(axis: Any, runs: list[LoggedRun]) -> None:
    """Draws HellaSwag accuracy with its standard error. Dashed: chance, OpenAI's models."""
    levels = {"chance": 0.25}
    for size in filter(None, map(size_of, runs)):
        for family, scores in OPENAI["hellaswag"].items():
            levels[f"OpenAI's {family} {size}"] = scores[size]
    labels = draw_levels(axis, levels)
    for run, unit, color in zip(runs, scale_x(axis, runs), cycle(COLORS)):
        steps, scores = map(np.array, run.streams["hella"])
        error = np.sqrt(scores * (1 - scores) / examples_of(run))
        axis.errorbar(steps * unit, scores, yerr=error, fmt="o-", color=color, markersize=3)
        labels.append((scores[-1], f"{run.name} {scores[-1]:.3f}", color))
    axis.set_ylabel("HellaSwag accuracy (normalized)")
    label_lines(axis, labels)


def plot_training(runs: list[LoggedRun]) -> Any:
    """Draws learning rate, gradient norm and throughput by step."""
    scale = "log" if len(runs) > 1 else "linear"
    panels = [("lr", "learning rate", scale), ("norm", "gradient norm, unclipped", scale)]
    panels.append(("tokens_per_sec", "tokens/s", "linear"))
    figure, axes = new_figure(len(panels), 1, height=2.2)
    for axis, (field, title, yscale) in zip(axes, panels, strict=True):
        for run, color in zip(runs, cycle(COLORS)):
            axis.plot(*run.series(field), color=color, linewidth=1, label=run.name)
        axis.set(ylabel=title, yscale=yscale)
        label_x(axis, "step")
    axes[-1].set_ylim(bottom=0)
    return figure


# -- comparisons


def plot_comparison(result: dict[str, Any]) -> Any:
    """Draws what compare.py found: validation losses by tokens, and differences to the base."""
    figure, (losses, differences) = new_figure(1, 2)
    measure = result.get("measure", "validation loss")
    for arm, color in zip(result["arms"], cycle(COLORS)):
        name = arm["name"]
        for run in arm["runs"]:
            if run["val_loss"] is not None:
                start = max(1, len(run["losses"]) // 10)  # the first fall would fill the picture
                millions = np.array(run["tokens"][start:]) / 1e6
                losses.plot(millions, run["losses"][start:], "o-", color=color, markersize=3)
        losses.plot([], [], color=color, label=name)
        against = arm["against"]
        if "mean" in against:
            for difference in against["differences"]:
                differences.plot(difference, name, "o", color="#666666")
            half = against["half"]
            differences.errorbar(against["mean"], name, xerr=half, fmt="D", color=color, capsize=5)
    losses.set(ylabel=measure, title="a line for each seed")
    label_x(losses, "tokens (millions)")
    differences.axvline(0, color=BLACK, linewidth=1)
    differences.margins(y=0.3)
    differences.invert_yaxis()
    differences.set_title("each seed (dots), mean and 95% interval")
    differences.set_xlabel(f"final {measure} minus the base's")
    tidy(differences)
    return figure


# -- tables of the notebook


def table_of_runs(runs: list[LoggedRun]) -> Any:
    """A row for each run: its size, length and last losses; HellaSwag with its examples."""
    import pandas

    settings = ("data_dir", "n_layer", "n_embd", "total_batch_size", "max_steps")
    rows = []
    for run in runs:
        row: dict = {"run": run.name} | {name: run.config.get(name) for name in settings}
        row |= {stream: values[-1] for stream, (_, values) in run.streams.items()}
        if "hella" in run.streams:
            row["examples"] = examples_of(run)
        rows.append(row)
    return pandas.DataFrame(rows).round(4)


def show_samples(runs: list[LoggedRun]) -> None:
    """Prints the first samples of each run, those a fifth of the way in, and its last."""
    for run in runs:
        steps, samples = run.series("samples", "samples")
        for i in sorted({0, len(steps) // 5, len(steps) - 1} if steps else ()):
            print(f"\n== {run.name}, step {steps[i]:,}")
            print("\n--\n".join(samples[i]))

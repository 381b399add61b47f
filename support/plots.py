"""Draws runs: loss.png of training, the pictures and tables of the notebook and of compare.py."""

import gc
import io
import json
import re
import textwrap
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from support.common import first_line, say, write_whole
from support.log import LoggedRun, read_run, starts_of

# Colour-blind readers can tell these apart, and none is pale (contrast to white above 3:1).
# From Okabe & Ito's palette; the purple is Tol's, which is darker.
BLUE = "#0072b2"
RED = "#d55e00"
BLACK = "#1f2328"
PALE = "#949494"  # for what shows no difference
COLORS = (BLUE, RED, "#009e73", "#aa4499", BLACK)  # the third is green, the fourth purple
DARK = {  # on a dark page, those above, and the ticks, grid and paper of gpt2.mplstyle
    BLUE: "#58a6ff",
    RED: "#f0883e",
    BLACK: "#e6edf3",
    PALE: "#6e7681",
    "#009e73": "#3fb98f",
    "#aa4499": "#d67fc8",
    "#59636e": "#9198a1",
    "#d1d9e0": "#30363d",
    "#ffffff": "#0d1117",
}

OPENAI: dict = json.loads((Path(__file__).parent.parent / "assets" / "openai.json").read_text())
Label = tuple[float, str, str]  # a value, its text, its colour
FEWEST_EXAMPLES = 1000  # of HellaSwag: with fewer, the standard error is over 1.4%
MOST_POINTS = 500  # of a line: more cannot be seen
TEXTS = {
    "tinyshakespeare": "Tiny Shakespeare",
    "python": "Python source",
    "stdlib": "Python's standard library",
    "edu_fineweb10B": "FineWeb-Edu",
}


# -- figures and axes


def new_figure(rows: int, columns: int, height: float = 4.0) -> tuple[Any, list]:
    """A figure as wide as a page on GitHub, and the list of its axes; height: inches per row."""
    import matplotlib.style
    from matplotlib.figure import Figure  # not pyplot's, which would keep it in memory

    matplotlib.style.use(Path(__file__).with_name("gpt2.mplstyle"))
    figure = Figure((8.6, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def set_headline(figure: Any, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left")


def tidy(axis: Any) -> None:
    """Adds a light grid and, if something is labelled, a legend."""
    axis.grid(True)
    if axis.get_legend_handles_labels()[1]:
        axis.legend()


def label_x(axis: Any, label: str) -> None:
    axis.set_xlabel(label)
    axis.locator_params(axis="x", nbins=6, integer=label == "step")
    axis.xaxis.set_major_formatter("{x:,g}")
    tidy(axis)


def scale_x(axis: Any, runs: list[LoggedRun]) -> list[float]:
    """Labels x, from 0 to the end: steps, or tokens if the batches differ. -> x per step of each."""
    batches = [run.config.get("total_batch_size", 0) for run in runs]
    units = [1] * len(runs)
    label = "step"
    if len(set(batches)) > 1 and min(batches) > 0:
        units = [batch / 1e6 for batch in batches]
        label = "tokens (millions)"
    label_x(axis, label)
    ends = [last_step(run) * unit for run, unit in zip(runs, units, strict=True)]
    axis.set_xlim(0, max(ends) or 1)
    return units


def last_step(run: LoggedRun) -> int:
    return max((steps[-1] for steps, _ in run.streams.values()), default=0)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Averages the `window` values (an odd number) around each; at the ends, those that exist."""
    around = np.ones(window)
    return np.convolve(values, around, "same") / np.convolve(np.ones(len(values)), around, "same")


def average(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean around each value, and the deviation there: 0 in a short run."""
    window = min(51, len(values) // 25 | 1)
    mean = smooth(values, window)
    return mean, np.sqrt(np.maximum(0, smooth(np.square(values), window) - mean**2))


def label_lines(axis: Any, labels: list[Label]) -> None:
    """Names values at the right edge. Texts that are moved apart point."""
    bottom, top = axis.get_ylim()
    along = axis.get_yaxis_transform()
    inches = axis.get_position().height * axis.figure.get_figheight()
    height = 0.17 / inches * (top - bottom)  # of a line of text
    y = -np.inf
    for value, text, color in sorted(labels):
        y = max(value, y + height)
        pointer = dict(arrowstyle="-", color=color, linewidth=0.6, relpos=(0, 0.5))
        style = dict(color=color, arrowprops=pointer if y > value + height / 3 else None)
        axis.annotate(text, (1, value), (1.02, y), along, va="center", **style)


# -- runs


def plot_run(log_dir: str | Path) -> None:
    """Draws log_dir/loss.png."""
    gc.collect()  # the last figure refers to itself: its 14 MB would stay until Python looks
    save_picture(plot_loss(log_dir), Path(log_dir) / "loss.png")


def plot_loss(log_dir: str | Path) -> Any:
    """Draws training and validation loss, and HellaSwag if it was scored."""
    run = read_run(log_dir)
    draws = [draw_loss]
    if scored([run]) and len(run.streams["hella"][0]) > 1:
        draws.append(draw_hellaswag)
    figure, axes = new_figure(1, len(draws))
    for axis, draw in zip(axes, draws, strict=True):
        draw(axis, [run])
    axes[0].set_title(title_of(run))
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
    """Writes a figure as a PNG file, whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_whole(path, picture.getvalue())


def save_for_pages(figure: Any, path: Path) -> None:
    """Writes PATH.svg and, for dark pages, PATH-dark.svg. Both are transparent."""
    picture = io.BytesIO()
    figure.savefig(picture, format="svg", transparent=True, metadata=dict(Date=None, Creator=None))
    light = picture.getvalue().decode()
    dark = re.sub("|".join(DARK), lambda color: DARK[color[0]], light)
    write_whole(path.with_suffix(".svg"), light.encode())
    write_whole(path.with_name(f"{path.name}-dark.svg"), dark.encode())


def text_of(run: LoggedRun) -> str:
    """The name of the text that a run trains on. Losses on different texts are not compared."""
    return Path(run.config.get("data_dir", "?")).name


def title_of(run: LoggedRun) -> str:
    """The text that a run trains on, and the size of its model where that was recorded."""
    text = TEXTS.get(text_of(run), text_of(run))
    millions = next((r["parameters"] for r in run.records if "parameters" in r), 0) / 1e6
    return f"{text}, {millions:.{int(millions < 10)}f} million parameters" if millions else text


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
        axis.set_title(TEXTS.get(text, text))
    return figure


def draw_loss(axis: Any, runs: list[LoggedRun]) -> None:
    """Draws training loss, averaged, and validation loss as dots. A run alone has its details."""
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
            mean, deviation = average(losses)
            few = np.linspace(0, len(steps) - 1, min(len(steps), MOST_POINTS)).astype(int)
            axis.plot(steps[few] * unit, mean[few], color=color)
            tops.append(mean[in_view(run, steps)].max())
            if alone:
                labels.append((mean[-1], f"training {mean[-1]:.2f}", color))
                mark_resumes(axis, run, steps, mean)
            if alone and deviation.any():
                low = np.maximum(mean - deviation, losses.min())
                band = (steps[few], low[few], (mean + deviation)[few])
                axis.fill_between(*band, color=color, alpha=0.1, linewidth=0)
                labels.append((low[-1], "± one deviation", color))
        if "val" in run.streams:
            steps, losses = map(np.array, run.streams["val"])
            name = "validation" if alone else run.name
            ink = RED if alone else color
            labels.append((losses[-1], f"{name} {losses[-1]:.3f}", ink))
            tops.append(losses[in_view(run, steps)].max())
            seen = losses <= max(tops)
            style = dict(color=ink, markersize=5.5, markeredgecolor="white", clip_on=False)
            axis.plot(steps[seen] * unit, losses[seen], "o-", **style)
    if tops:
        margin = 0.06 * (max(tops) - axis.dataLim.y0) or 0.5
        axis.set_ylim(axis.dataLim.y0 - margin, max(tops) + margin)
    axis.set_ylabel("loss (nats per token)")
    label_lines(axis, labels)


def mark_resumes(axis: Any, run: LoggedRun, steps: np.ndarray, mean: np.ndarray) -> None:
    """Marks on the curve where a run was stopped or killed, and resumed."""
    resumes = [record["step"] for record in starts_of(run.records)[1:]]
    if resumes:
        losses = np.interp(resumes, steps, mean)
        style = dict(color=BLACK, markersize=7, markeredgewidth=1.6, zorder=3)
        axis.plot(resumes, losses, "x", label="interrupted, then resumed", **style)
        tidy(axis)


def in_view(run: LoggedRun, steps: np.ndarray) -> np.ndarray:
    """Which steps are after the first tenth of a run; the last step, if all are earlier.

    The view ends above their losses. Otherwise the untrained model's would take most of it.
    """
    return steps >= min(last_step(run) / 10, steps[-1])


def draw_levels(axis: Any, levels: dict[str, float]) -> list[Label]:
    """Draws published figures as dashed lines. Returns their labels for label_lines."""
    for y in levels.values():
        axis.axhline(y, linestyle="--", color=BLACK, linewidth=1)
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
        style = dict(color=color, markersize=3, clip_on=False)
        axis.errorbar(steps * unit, scores, yerr=error, fmt="o-", **style)
        labels.append((scores[-1], f"{run.name} {scores[-1]:.3f}", color))
    axis.set_ylabel("HellaSwag accuracy (normalized)")
    label_lines(axis, labels)


def plot_samples(log_dir: str | Path, steps: list[int]) -> Any:
    """Draws a run's losses and, above them, what it wrote after each of the steps."""
    run = read_run(log_dir)
    figure, [axis] = new_figure(1, 1, 4.8)
    draw_loss(axis, [run])
    samples = dict(zip(*run.series("samples", "samples"), strict=True))
    mean, _ = average(np.array(run.streams["train"][1]))
    for i, step in enumerate(steps):
        minutes = np.interp(step, *run.series("wall")) / 60
        written = re.sub("  +", "  ", samples[step][0])  # code may begin far to the right
        lines = [x for line in written.splitlines() for x in textwrap.wrap(line, 36)]
        text = "\n".join([f"{minutes:.0f} minutes, step {step:,}", "", *lines[:4]])
        loss = min(np.interp(step, run.streams["train"][0], mean), axis.get_ylim()[1])
        column = 1.16 * i / len(steps)  # there are no axes below the labels at the right
        across = np.clip((step / last_step(run) - column) * len(steps), 0, 1)
        arrow = dict(arrowstyle="-|>", color="#59636e", linewidth=0.6, relpos=(across, 0))
        style = dict(family="monospace", fontsize=7.5, parse_math=False, arrowprops=arrow)
        axis.annotate(text, (step, loss), (column, 1.06), "data", axis.transAxes, **style)
    device = starts_of(run.records)[-1]["device"]["name"]
    set_headline(figure, f"{title_of(run)}: {minutes:.0f} minutes on {device}")
    return figure


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
    """Draws what compare.py found: each arm's losses by tokens, and its differences to the base."""
    figure, [losses, differences] = new_figure(1, 2, 3.6)
    measure = result.get("measure", "validation loss")
    arms = result["arms"]
    names = name_arms(arms)
    labels = []
    means = {}
    for arm, name, color in zip(arms, names, cycle(COLORS)):
        ended = [run for run in arm["runs"] if run["val_loss"] is not None]
        if ended:
            start = max(1, len(ended[0]["losses"]) // 10)  # the first fall would fill the picture
            millions = np.array(ended[0]["tokens"][start:]) / 1e6
            seeds = np.array([run["losses"][start:] for run in ended])
            losses.plot(millions, seeds.mean(0), color=color)
            band = (millions, seeds.min(0), seeds.max(0))
            losses.fill_between(*band, color=color, alpha=0.2, linewidth=0)
            labels.append((seeds.mean(0)[-1], name, color))
        against = arm["against"]
        if "mean" in against:
            means[against["mean"]] = (name, against["half"])
            points = against["differences"]
            differences.plot(points, [name] * len(points), "|", color=color, markersize=9)
            style = dict(color=color, markersize=5, linewidth=1.4)
            differences.errorbar(against["mean"], name, xerr=against["half"], fmt="o", **style)
    set_headline(figure, describe_best(means, names[0], measure))
    losses.set_title("Mean and range of the seeds", fontsize=9)
    losses.set_ylabel(measure)
    losses.margins(x=0)
    label_x(losses, "tokens (millions)")
    label_lines(losses, labels)
    differences.axvline(0, color=BLACK, linewidth=0.8)
    differences.margins(y=0.3)
    differences.invert_yaxis()
    differences.set_title("Each seed, mean and 95% interval", fontsize=9)
    differences.set_xlabel(f"final {measure} minus that of {names[0]}")
    tidy(differences)
    return figure


def name_arms(arms: list[dict]) -> list[str]:
    """Optimizer and learning rate, if only these differ between the recipes; else the arms' names."""
    recipes = [arm.get("recipe", {}) | arm.get("tuned", {}) for arm in arms]
    names = []
    others = []
    for recipe in recipes:
        optimizer = recipe.pop("optimizer", "").replace("adamw", "AdamW").replace("muon", "Muon")
        rate = np.format_float_scientific(recipe.pop("learning_rate", 0), trim="-", exp_digits=1)
        names.append(f"{optimizer}, {rate}")
        others.append(recipe)
    alike = others.count(others[0]) == len(arms) == len(set(names))
    return names if alike else [arm["name"] for arm in arms]


def describe_best(means: dict[float, tuple], base: str, measure: str) -> str:
    """The arm that ends lowest, beside the base. means: the difference of each, its name and half."""
    if not means:
        return ""
    mean = min(means)
    name, half = means[mean]
    if abs(mean) <= half:
        return f"No difference can be seen between {name} and {base}"
    unit = "nats" if measure == "validation loss" else measure
    return f"{name} ends {abs(mean):.2f} {unit} {'below' if mean < 0 else 'above'} {base}"


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

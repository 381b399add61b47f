"""Draws runs: loss.png of training, the notebook's pictures and tables; what all pictures share."""

import gc
import html
import io
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support.common import write_whole
from support.records import RECENT, LoggedRun, read_run

# Okabe & Ito's colours, which colour-blind readers can tell apart, without those that are too pale
# on white (contrast under 3:1); the purple is Tol's, which is darker
BLUE = "#0072B2"
RED = "#D55E00"
GREEN = "#009E73"
PURPLE = "#AA4499"
BLACK = "#000000"
GREY = "#666666"
PALE = "#949494"  # of bars that stand beside others
COLORS = (BLUE, RED, GREEN, PURPLE, BLACK)

# OpenAI's models on two texts, by the names that fineweb.py, build-nanogpt and llm.c give their
# directories, and on HellaSwag. Sources: build-nanogpt's play.ipynb and llm.c's dev/vislog.ipynb
FINEWEB_EDU = {"124M": 3.2924}
FINEWEB = {"124M": 3.424958, "350M": 3.083089, "774M": 3.000580, "1558M": 2.831273}
GPT2_VAL_LOSS = {
    "edu_fineweb10B": FINEWEB_EDU,
    "fineweb-edu-10B": FINEWEB_EDU,
    "fineweb10B": FINEWEB,
    "fineweb-10B": FINEWEB,
}
GPT2_HELLASWAG = {"124M": 0.294463, "350M": 0.375224, "774M": 0.431986, "1558M": 0.488946}
GPT3_HELLASWAG = {"124M": 0.337, "350M": 0.436, "774M": 0.510, "1558M": 0.547}
SIZES = {(12, 768): "124M", (24, 1024): "350M", (36, 1280): "774M", (48, 1600): "1558M"}
FEWEST_EXAMPLES = 1000  # of HellaSwag: with fewer, the standard error is over 1.4%

AXES: dict[str, list[tuple[float, str]]] = {  # what x can be: units and labels, largest first
    "step": [(1, "step")],
    "tokens": [
        (1e9, "tokens (billions)"),
        (1e6, "tokens (millions)"),
        (1e3, "tokens (thousands)"),
        (1, "tokens"),
    ],
    "time": [(3600, "time (hours)"), (60, "time (minutes)"), (1, "time (seconds)")],
}

PUBLISHED = dict(color=BLACK, linewidth=1.2)  # the line of a published figure


# -- figures and axes


def new_figure(rows: int, columns: int, height: float = 4.0):
    """A figure as wide as a notebook, and the list of its axes; height: inches of a row.

    White on a dark page too. It is not pyplot's, which would keep it in memory.
    """
    from matplotlib.figure import Figure

    size = (9.6, height * rows)
    figure = Figure(figsize=size, dpi=120, layout="constrained", facecolor="white")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def tidy(axis, **legend) -> None:
    """A light grid, no frame, and a legend where something is labelled."""
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    _, labels = axis.get_legend_handles_labels()
    if labels:
        axis.legend(frameon=False, fontsize=9, **legend)


@dataclass
class PlacedRun:
    """A run and its place in a picture: what x is (step, tokens, time) and its unit; the colour."""

    run: LoggedRun
    by: str
    unit: float
    color: str

    def x(self, steps: list[int]) -> np.ndarray:
        """Where steps lie on the axis."""
        return self.run.place(steps, self.by) / self.unit


def place_on_x_axis(axis, runs: list[LoggedRun], by: str) -> list[PlacedRun]:
    """Labels the x axis with a unit that suits all runs, and gives each run its colour.

    A run that does not say where it lies (a log.txt alone knows no time) is left out.
    """
    ends = [run.place([run.last_step()], by)[0] for run in runs]
    unit, label = pick_unit(ends, by)
    axis.set_xlabel(label)
    axis.locator_params(axis="x", nbins=6, integer=by == "step")
    axis.xaxis.set_major_formatter("{x:,g}")
    tidy(axis)
    placed = []
    for i, (run, end) in enumerate(zip(runs, ends, strict=True)):
        if not math.isnan(end):
            placed.append(PlacedRun(run, by, unit, COLORS[i % len(COLORS)]))
    return placed


def pick_unit(ends: list[float], by: str) -> tuple[float, str]:
    """The largest unit of which some run has at least two, else the smallest; with its label."""
    for unit, label in AXES[by]:
        if any(end >= 2 * unit for end in ends):
            return unit, label
    return AXES[by][-1]


def smooth(values, window: int) -> np.ndarray:
    """The mean of the `window` values (an odd number) around each; at the ends, of those there."""
    around = np.ones(window)
    return np.convolve(values, around, "same") / np.convolve(np.ones(len(values)), around, "same")


def draw_smoothed(axis, x: np.ndarray, values: list[float], color: str, **line) -> np.ndarray:
    """A noisy curve: its mean around each point, which is returned, in a band of one deviation."""
    window = min(51, len(values) // 25 | 1)
    mean = smooth(values, window)
    deviation = np.sqrt(np.maximum(0, smooth(np.square(values), window) - mean**2))
    lower = np.maximum(mean - deviation, min(values))
    axis.fill_between(x, lower, mean + deviation, color=color, alpha=0.2, linewidth=0)
    axis.plot(x, mean, color=color, linewidth=1.4, **line)
    return mean


def label_lines(axis, labels: list[tuple[float, str, str]]) -> None:
    """Names lines at the right end of the axis; labels: where a line ends (y), text, colour.

    Texts that would touch are moved apart.
    """
    bottom, top = axis.get_ylim()
    lowest = -math.inf
    for end, text, color in sorted(labels):
        y = max(end, lowest)
        lowest = y + 0.07 * (top - bottom)
        at = dict(xy=(1, y), xycoords=("axes fraction", "data"), annotation_clip=False)
        beside = dict(xytext=(5, 0), textcoords="offset points", va="center")
        axis.annotate(text, color=color, fontsize=9, **at, **beside)


# -- runs


def plot_run(log_dir: str | Path) -> Path:
    """Draws log_dir/loss.png: training and validation loss, and HellaSwag where it was scored."""
    log_dir = Path(log_dir)
    picture = render_run(read_run(log_dir))
    gc.collect()  # a figure refers to itself: its 14 MB would stay until Python happens to look
    write_whole(log_dir / "loss.png", picture)
    return log_dir / "loss.png"


def render_run(run: LoggedRun) -> bytes:
    """The picture of a run as a PNG."""
    draws = [draw_loss]
    if scored([run]) and len(run.streams["hella"][0]) > 1:
        draws.append(draw_hellaswag)
    figure, axes = new_figure(1, len(draws))
    for axis, draw in zip(axes, draws, strict=True):
        draw(axis, [run])
    config = run.config
    size = f"{config['n_layer']} layers, {config['n_embd']} wide"
    batch = f"{config['total_batch_size']:,} tokens a step"
    figure.suptitle(f"GPT-2, {size}, on {text_of(run)}, {batch}", fontsize=11)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


def text_of(run: LoggedRun) -> str:
    """The name of what a run is trained on: losses on different texts are not compared."""
    return Path(run.config.get("data_dir", "?")).name


def size_of(run: LoggedRun) -> str:
    """The size of OpenAI's models that a run's model has, or ""."""
    return SIZES.get((run.config.get("n_layer", 12), run.config.get("n_embd", 768)), "")


def plot_along(draw, runs: list[LoggedRun], *by: str):
    """A row of panels for each text, and in it one for each of `by` (step, tokens, time).

    draw: draw_loss or draw_hellaswag.
    """
    texts = list(dict.fromkeys(text_of(run) for run in runs))
    figure, axes = new_figure(len(texts), len(by))
    panels = [(text, x) for text in texts for x in by]
    for axis, (text, x) in zip(axes, panels, strict=True):
        draw(axis, [run for run in runs if text_of(run) == text], x)
        axis.set_title(f"on {text}", fontsize=10)
    return figure


def draw_loss(axis, runs: list[LoggedRun], by: str = "step") -> None:
    """Training loss, smoothed, in a band of one deviation; validation loss as dots.

    The view ends a little above the losses of the last nine tenths of the steps.
    """
    alone = len(runs) == 1
    labels = []
    tops = []
    validations = []
    for placed in place_on_x_axis(axis, runs, by):
        if "train" in placed.run.streams:
            end, top = draw_training_loss(axis, placed)
            tops.append(top)
            if alone:
                last = np.mean(placed.run.streams["train"][1][-RECENT:])
                labels.append((end, f"training {last:.2f}", placed.color))
        if "val" in placed.run.streams:
            name, color = ("validation", RED) if alone else (placed.run.name, placed.color)
            line, top = draw_validation_loss(axis, placed, color)
            tops.append(top)
            validations.append(line)
            end = line.get_ydata()[-1]
            labels.append((end, f"{name} {end:.3f}", color))
    for size, loss in {found for run in runs if (found := published_loss(run))}:
        axis.axhline(loss, linestyle="--", **PUBLISHED)
        labels.append((loss, f"OpenAI's {size} {loss:.3f}", BLACK))
    if tops:
        limit_losses(axis, max(tops), validations)
    dots = "" if alone else "; dots: validation"
    axis.set_ylabel(f"loss (nats per token){dots}; band: one deviation")
    label_lines(axis, labels)


def draw_training_loss(axis, placed: PlacedRun) -> tuple[float, float]:
    """Draws the training loss -> its last smoothed value, and its highest in view."""
    steps, losses = placed.run.streams["train"]
    smoothed = draw_smoothed(axis, placed.x(steps), losses, placed.color)
    return smoothed[-1], highest_in_view(placed.run, steps, smoothed)


def draw_validation_loss(axis, placed: PlacedRun, color: str) -> tuple[Any, float]:
    """Draws the validation loss with a dot at each evaluation -> the line, its highest in view."""
    steps, losses = placed.run.streams["val"]
    size = 4.5 if len(losses) <= 25 else 3
    dots = dict(markersize=size, markeredgewidth=0.5, markeredgecolor="white")
    (line,) = axis.plot(placed.x(steps), losses, "o-", color=color, **dots)
    return line, highest_in_view(placed.run, steps, losses)


def highest_in_view(run: LoggedRun, steps: list[int], losses) -> float:
    """The highest loss after the first tenth of a run, or the last one where all are earlier."""
    start = min(run.last_step() / 10, steps[-1])
    return max(loss for step, loss in zip(steps, losses, strict=True) if step >= start)


def published_loss(run: LoggedRun) -> tuple[str, float] | None:
    """The size and validation loss of OpenAI's model as large as this one, on the same text."""
    size = size_of(run)
    loss = GPT2_VAL_LOSS.get(text_of(run), {}).get(size)
    return (size, loss) if loss else None


def limit_losses(axis, top: float, validations: list) -> None:
    """Ends the view a little above `top`; of validations what lies above is taken out.

    Otherwise a line would cross the picture from the loss of an untrained model to the first
    evaluation in view. Of a run alone, that loss is told by an arrow at the edge.
    """
    bottom = axis.dataLim.y0
    margin = 0.06 * (top - bottom) or 0.5
    axis.set_ylim(bottom - margin, top + margin)
    for line in validations:
        x, losses = line.get_data()
        above = losses > top + margin
        line.set_ydata(np.where(above, np.nan, losses))
        if len(validations) == 1 and above[0]:
            edge = axis.get_xaxis_transform()
            axis.margins(x=0.11)
            axis.plot(x[:1], [0.98], "^", color=line.get_color(), transform=edge)
            under = dict(ha="center", va="top", transform=edge)
            told = f"{losses[0]:.2f}\n(above)"
            axis.text(x[0], 0.95, told, fontsize=8, color=line.get_color(), **under)


def scored(runs: list[LoggedRun]) -> list[LoggedRun]:
    """The runs with a HellaSwag score on enough examples to show more than luck."""
    return [run for run in runs if "hella" in run.streams and examples_of(run) >= FEWEST_EXAMPLES]


def examples_of(run: LoggedRun) -> int:
    """How many examples of HellaSwag a run was scored on; a log.txt alone does not say: all."""
    totals = [record["total"] for record in run.records if record["type"] == "hella"]
    return totals[-1] if totals else 10042


def draw_hellaswag(axis, runs: list[LoggedRun], by: str = "step") -> None:
    """HellaSwag accuracy in a band of one standard error, against chance.

    For runs on FineWeb, against OpenAI's models of that size, too. Scores on few examples are
    left out.
    """
    labels = [(0.25, "chance", GREY)]
    axis.axhline(0.25, color=GREY, linestyle=":", linewidth=1.2)
    for placed in place_on_x_axis(axis, scored(runs), by):
        steps, accuracies = placed.run.streams["hella"]
        accuracy = np.array(accuracies)
        error = np.sqrt(accuracy * (1 - accuracy) / examples_of(placed.run))
        x = placed.x(steps)
        band = dict(color=placed.color, alpha=0.2, linewidth=0)
        axis.fill_between(x, accuracy - error, accuracy + error, **band)
        axis.plot(x, accuracy, "o-", color=placed.color, markersize=3, linewidth=1.4)
        name = "this run" if len(runs) == 1 else placed.run.name
        labels.append((accuracies[-1], f"{name} {accuracies[-1]:.3f}", placed.color))
    for size in {size_of(run) for run in runs if published_loss(run)}:
        for name, accuracies_by_size in {"GPT-2": GPT2_HELLASWAG, "GPT-3": GPT3_HELLASWAG}.items():
            axis.axhline(accuracies_by_size[size], linestyle="--", **PUBLISHED)
            labels.append((accuracies_by_size[size], f"OpenAI's {name} {size}", BLACK))
    axis.set_ylabel("HellaSwag accuracy (normalized)")
    label_lines(axis, labels)


def plot_training(runs: list[LoggedRun]):
    """Learning rate, gradient norm, throughput and, where it was logged, MFU, by step.

    Several runs may lie far apart: their axes are logarithmic.
    """
    labels = {
        "lr": "learning rate",
        "norm": "gradient norm, unclipped",
        "tokens_per_sec": "tokens/s",
        "mfu": "MFU",
    }
    fields = [field for field in labels if any(run.series(field)[0] for run in runs)]
    figure, axes = new_figure(2, 2, height=3.0)
    for axis, field in zip(axes, fields, strict=False):
        for placed in place_on_x_axis(axis, runs, "step"):
            steps, values = placed.run.series(field)
            if field == "lr":
                axis.plot(steps, values, color=placed.color, linewidth=1.4, label=placed.run.name)
            elif values:
                draw_smoothed(axis, np.array(steps), values, placed.color)
        axis.set_ylabel(labels[field])
        if len(runs) > 1 and field != "mfu":
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    for axis in axes[len(fields) :]:
        axis.remove()
    if len(runs) > 1:
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


# -- comparisons


def plot_comparison(result: dict):
    """What compare.py found: validation losses by tokens, and the differences to the base."""
    figure, (losses, differences) = new_figure(1, 2)
    whole = [run for arm in result["arms"] for run in arm["runs"] if run["val_loss"] is not None]
    unit, label = pick_unit([run["tokens"][-1] for run in whole], "tokens")
    for arm, color in zip(result["arms"], itertools.cycle(COLORS)):
        style = dict(color=color, linewidth=1.2, alpha=0.8, marker="o", markersize=3)
        tuned = f", {result['sweep']} {arm['value']:g}" if result["sweep"] else ""
        losses.plot([], [], label=arm["name"] + tuned, **style)
        for run in arm["runs"]:
            if run["val_loss"] is not None:
                losses.plot(np.array(run["tokens"][1:]) / unit, run["losses"][1:], **style)
    if whole:  # the fall of the first tenth may lie above the view
        top = max(run["losses"][max(1, len(run["losses"]) // 10)] for run in whole)
        losses.set_ylim(top=top + 0.05 * (top - losses.dataLim.y0))
    losses.set(xlabel=label, ylabel="validation loss", title="a line for each seed")
    losses.locator_params(axis="x", nbins=6)
    losses.xaxis.set_major_formatter("{x:,g}")
    tidy(losses)
    draw_differences(differences, result["arms"][1:])
    return figure


def draw_differences(axis, arms: list[dict]) -> None:
    """Each arm's differences to the base, a dot for each seed, and the mean with its interval."""
    for y, (arm, color) in enumerate(zip(arms, itertools.cycle(COLORS[1:]))):
        against = arm["against"]
        if "mean" in against:
            seeds = against["differences"]
            axis.plot(seeds, [y - 0.06] * len(seeds), "o", color=GREY)
            bar = dict(fmt="D", color=color, capsize=5, linewidth=1.6)
            axis.errorbar(against["mean"], y + 0.06, xerr=against["half"], **bar)
    axis.axvline(0, color=BLACK, linewidth=1)
    axis.text(0, 0.99, " base", va="top", fontsize=9, transform=axis.get_xaxis_transform())
    axis.set_yticks(range(len(arms)), [arm["name"] for arm in arms])
    axis.set_ylim(-0.5, len(arms) - 0.5)
    axis.invert_yaxis()
    title = "each seed (dots), mean and 95% interval"
    axis.set(xlabel="final validation loss minus the base's", title=title)
    tidy(axis)


# -- text


def table(header: list[str], rows: list[list]):
    """Header and rows as a table, line breaks kept."""
    from IPython.display import HTML

    def line(tag: str, values: list) -> str:
        cells = []
        for value in values:
            text = html.escape(str(value)).replace("\n", "<br>")
            cells.append(f'<{tag} style="text-align:left;vertical-align:top">{text}</{tag}>')
        return "<tr>" + "".join(cells) + "</tr>"

    lines = [line("th", header), *[line("td", row) for row in rows]]
    return HTML("<table>" + "\n".join(lines) + "</table>")


def table_of_runs(runs: list[LoggedRun]):
    """A row for each run: its size, length and last losses; HellaSwag with n and its error."""
    header = "run, text, layers × channels, steps × tokens, hours, validation loss, HellaSwag"
    return table(header.split(", "), [describe_results(run) for run in runs])


def describe_results(run: LoggedRun) -> list[str]:
    """The cells of table_of_runs; a dash where nothing is known."""
    walls = run.series("wall")[1]
    losses = run.streams.get("val", ([], []))[1]
    score = "–"
    if "hella" in run.streams:
        accuracy = run.streams["hella"][1][-1]
        n = examples_of(run)
        score = f"{accuracy:.3f} ± {math.sqrt(accuracy * (1 - accuracy) / n):.3f} (n = {n:,})"
    return [
        run.name,
        text_of(run),
        f"{run.config.get('n_layer', '?')} × {run.config.get('n_embd', '?')}",
        f"{run.last_step():,} × {run.config.get('total_batch_size', '?')}",
        f"{walls[-1] / 3600:.2f}" if walls else "–",
        f"{losses[-1]:.4f}" if losses else "–",
        score,
    ]


def tables_of_samples(runs: list[LoggedRun]) -> list:
    """For each run with samples a table: those of the first, the middle and the last step."""
    tables = []
    for run in runs:
        records = [record for record in run.records if record["type"] == "samples"]
        shown = [
            records[i] for i in sorted({0, len(records) // 2, len(records) - 1} if records else {})
        ]
        if shown:
            header = [f"{run.name}, step {record['step']:,}" for record in shown]
            rows = zip(*[record["samples"] for record in shown], strict=False)
            tables.append(table(header, [list(row) for row in rows]))
    return tables

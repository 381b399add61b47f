"""Draws runs and measurements: for training's loss.png, the benchmarks and the notebook."""

import gc
import html
import io
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.common import write_whole
from support.log import LoggedRun, read_run

# Okabe & Ito's colours, which colour-blind readers can tell apart (their yellow is too pale)
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
BLACK = "#000000"
GREY = "#666666"
COLORS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK)

# OpenAI's GPT-2 on FineWeb's validation split, and GPT-2 and GPT-3 on HellaSwag: the figures of
# build-nanogpt's play.ipynb
GPT2_VAL_LOSS = {
    "FineWeb-Edu": {"124M": 3.2924},
    # llm.c's dev/vislog.ipynb
    "FineWeb": {"124M": 3.424958, "350M": 3.083089, "774M": 3.000580, "1558M": 2.831273},
}
GPT2_HELLASWAG = {"124M": 0.294463, "350M": 0.375224, "774M": 0.431986, "1558M": 0.488946}
GPT3_HELLASWAG = {"124M": 0.337, "350M": 0.436, "774M": 0.510, "1558M": 0.547}
SIZE_BY_LAYERS = {12: "124M", 24: "350M", 36: "774M", 48: "1558M"}

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


def smooth(values: list[float], window: int) -> list[float]:
    """The mean of each value and up to window - 1 before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return ((sums[ends] - sums[starts]) / (ends - starts)).tolist()


# -- runs


def is_fineweb(run: LoggedRun) -> bool:
    """Whether a run's data is FineWeb, where the published baselines mean something."""
    return "fineweb" in str(run.config.get("data_dir", ""))


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
    if len(run.streams.get("hella", ([], []))[0]) > 1:
        draws.append(draw_hellaswag)
    figure, axes = new_figure(1, len(draws))
    for axis, draw in zip(axes, draws, strict=True):
        draw(axis, [run])
    config = run.config
    size = f"{config['n_layer']} layers, {config['n_embd']} wide"
    batch = f"{config['total_batch_size']:,} tokens a step"
    figure.suptitle(f"GPT-2, {size}, on {Path(config['data_dir']).name}, {batch}", fontsize=11)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


def plot_along(draw, runs: list[LoggedRun], *by: str):
    """A panel for each of `by` (step, tokens, time), drawn by draw_loss or draw_hellaswag."""
    figure, axes = new_figure(1, len(by))
    for axis, x in zip(axes, by, strict=True):
        draw(axis, runs, x)
    return figure


def draw_loss(axis, runs: list[LoggedRun], by: str = "step") -> None:
    """Training loss, faint as it was and smoothed, and validation loss.

    The fall of the first steps may lie above the view.
    """
    alone = len(runs) == 1
    tops = []  # the view reaches up to the highest of these losses
    validations = []
    for placed in place_on_x_axis(axis, runs, by):
        if "train" in placed.run.streams:
            tops.append(draw_training_loss(axis, placed, alone))
        if "val" in placed.run.streams:
            validations.append(draw_validation_loss(axis, placed, alone))
            tops.append(placed.run.streams["val"][1][-1])
    if not alone:
        style = dict(color="white", markeredgecolor=BLACK, markersize=4.5)
        axis.plot([], [], "o", label="validation", **style)
    for size, loss in sorted({found for run in runs if (found := published_loss(run))}):
        label = f"OpenAI's GPT-2 {size}, validation"
        axis.axhline(loss, linestyle="--", label=label, **PUBLISHED)
    if tops:
        limit_losses(axis, max(tops), validations)
    axis.set_ylabel("loss (nats per token)")
    tidy(axis, loc="upper right")


def published_loss(run: LoggedRun) -> tuple[str, float] | None:
    """The size and validation loss of OpenAI's model as large as this one, on the same text."""
    if not is_fineweb(run):
        return None
    text = "FineWeb-Edu" if "edu" in str(run.config["data_dir"]) else "FineWeb"
    size = SIZE_BY_LAYERS.get(run.config.get("n_layer", 12), "")
    loss = GPT2_VAL_LOSS[text].get(size)
    return (size, loss) if loss else None


def draw_training_loss(axis, placed: PlacedRun, alone: bool) -> float:
    """Draws the training loss; returns its highest smoothed value after the first steps."""
    steps, losses = placed.run.streams["train"]
    window = min(50, max(1, len(losses) // 50))
    smoothed = smooth(losses, window)
    label = f"training, mean of {window}" if alone else placed.run.name
    x = placed.x(steps)
    axis.plot(x, losses, color=placed.color, alpha=0.2, linewidth=0.7)
    axis.plot(x, smoothed, color=placed.color, linewidth=1.4, label=label)
    first = len(losses) // (25 if len(losses) > 250 else 10)
    return max(smoothed[first:])


def draw_validation_loss(axis, placed: PlacedRun, alone: bool):
    """Draws the validation loss with a dot at each evaluation; returns the line."""
    steps, losses = placed.run.streams["val"]
    if alone:
        label = f"validation, {losses[-1]:.3f} at step {steps[-1]:,}"
        style = dict(color=RED, markeredgecolor="white", label=label)
    else:
        style = dict(color=placed.color, markeredgecolor=BLACK)
    size = 4.5 if len(losses) <= 25 else 3
    x = placed.x(steps)
    (line,) = axis.plot(x, losses, "o-", markersize=size, markeredgewidth=0.5, **style)
    return line


def limit_losses(axis, top: float, validations: list) -> None:
    """Ends the view a little above `top`; what the validation lines have above it is taken out.

    Otherwise a line would cross the picture from the loss of an untrained model, far above the
    view, to the first evaluation in it.
    """
    bottom = axis.dataLim.y0
    margin = 0.06 * (top - bottom) or 0.5
    axis.set_ylim(bottom - margin, top + margin)
    for line in validations:
        losses = line.get_ydata()
        line.set_ydata(np.where(losses > top + margin, np.nan, losses))


def draw_hellaswag(axis, runs: list[LoggedRun], by: str = "step") -> None:
    """HellaSwag accuracy with one standard error, against chance.

    For runs on FineWeb, against OpenAI's models of that size, too.
    """
    scored = [run for run in runs if "hella" in run.streams]
    for placed in place_on_x_axis(axis, scored, by):
        draw_accuracy(axis, placed)
    layers = {run.config.get("n_layer", 12) for run in runs if is_fineweb(run)}
    sizes = {SIZE_BY_LAYERS[n_layer] for n_layer in layers if n_layer in SIZE_BY_LAYERS}
    for size in sorted(sizes):
        gpt3 = f"OpenAI's GPT-3 {size}"
        gpt2 = f"OpenAI's GPT-2 {size}"
        axis.axhline(GPT3_HELLASWAG[size], linestyle="-.", label=gpt3, **PUBLISHED)
        axis.axhline(GPT2_HELLASWAG[size], linestyle="--", label=gpt2, **PUBLISHED)
    axis.axhline(0.25, color=GREY, linestyle=":", linewidth=1.2, label="chance")
    bottom, top = axis.get_ylim()
    _, labels = axis.get_legend_handles_labels()
    axis.set_ylim(bottom, top + 0.1 * (top - bottom) * len(labels))  # room for the legend
    axis.set_ylabel("HellaSwag accuracy (normalized)")
    tidy(axis, loc="upper left")


def draw_accuracy(axis, placed: PlacedRun) -> None:
    """One run's accuracy and, as a band around it, its standard error."""
    steps, accuracies = placed.run.streams["hella"]
    accuracy = np.array(accuracies)
    totals = [record["total"] for record in placed.run.records if record["type"] == "hella"]
    total = totals[0] if totals else 10042  # a log.txt alone does not say: the validation split
    error = np.sqrt(accuracy * (1 - accuracy) / total)
    x = placed.x(steps)
    label = f"{placed.run.name} ({total:,} examples)"
    axis.plot(x, accuracy, "o-", color=placed.color, markersize=3, linewidth=1.4, label=label)
    band = dict(color=placed.color, alpha=0.15, linewidth=0)
    axis.fill_between(x, accuracy - error, accuracy + error, **band)


def plot_training(runs: list[LoggedRun]):
    """Learning rate, gradient norm, throughput and, where it was logged, MFU, by step."""
    labels = {
        "lr": "learning rate",
        "norm": "gradient norm, unclipped",
        "tokens_per_sec": "tokens/s",
    }
    shape = (1, 3)
    if any(run.series("mfu")[0] for run in runs):
        labels["mfu"] = "MFU"
        shape = (2, 2)
    figure, axes = new_figure(*shape, height=3.0)
    for axis, (field, label) in zip(axes, labels.items(), strict=True):
        draw_field(axis, runs, field)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.ticklabel_format(axis="y", scilimits=(-3, 5), useMathText=True)
    if len(runs) > 1:
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_field(axis, runs: list[LoggedRun], field: str) -> None:
    """A field of the training records by step, faint as it was and smoothed."""
    for placed in place_on_x_axis(axis, runs, "step"):
        steps, values = placed.run.series(field)
        smoothed = values
        if field != "lr":
            smoothed = smooth(values, max(1, len(values) // 50))
        axis.plot(steps, values, color=placed.color, alpha=0.25, linewidth=0.7)
        axis.plot(steps, smoothed, color=placed.color, linewidth=1.4, label=placed.run.name)


# -- measurements


def plot_benchmark(name: str, rows: list[dict], machine: str):
    """One comparison of bench.py on one machine."""
    return plot_benchmarks([dict(device=dict(name=machine), benchmarks={name: dict(rows=rows)})])


def plot_benchmarks(results: list[dict]):
    """Results of bench.py: a row for each comparison, a column for each machine."""
    from matplotlib.figure import Figure

    panels = {}  # (comparison, place of the machine): the rows that did not fail
    for i, result in enumerate(results):
        for name, comparison in result["benchmarks"].items():
            rows = [row for row in comparison["rows"] if "error" not in row]
            if rows:
                panels[name, i] = rows
    heights: dict[str, float] = {}
    for (name, _), rows in panels.items():
        heights[name] = max(heights.get(name, 0), panel_height(name, rows))
    names = list(heights)
    inches = list(heights.values())
    size = (9.6 * len(results), sum(inches))
    figure = Figure(figsize=size, dpi=120, layout="constrained", facecolor="white")
    parts = figure.subfigures(len(names), len(results), squeeze=False, height_ratios=inches)
    for (name, i), rows in panels.items():
        part = parts[names.index(name), i]
        part.suptitle(f"{name}: {results[i]['device']['name']}", fontsize=10)
        draw = draw_curves if name == "attention" else draw_bars
        draw(part, rows)
    return figure


def panel_height(name: str, rows: list[dict]) -> float:
    """Inches that a comparison takes: curves the same always, bars by their number."""
    return 4.0 if name == "attention" else 1.2 + 0.32 * len(rows)


def draw_bars(figure, rows: list[dict]) -> None:
    """A bar for each row, as long as it is fast; orange where it is slower than its base."""
    medians = [row["median"] for row in rows]
    colors = [ORANGE if row.get("speedup", 1) < 0.98 else BLUE for row in rows]
    labels = []
    for row in rows:
        digits = 1 if row["median"] < 1000 else 0
        labels.append(f"{row['median']:,.{digits}f}  ({row['total']:.2f} ×)")
    axis = figure.subplots()
    bars = axis.barh([row["name"] for row in rows], medians, color=colors, height=0.65)
    axis.bar_label(bars, labels, padding=4, fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.set_xlabel(rows[0]["unit"])
    axis.xaxis.set_major_formatter("{x:,g}")
    tidy(axis)


def draw_curves(figure, rows: list[dict]) -> None:
    """Milliseconds by sequence length, a curve for each way."""
    axis = figure.subplots()
    ways = dict.fromkeys(row["way"] for row in rows)
    for way, color in zip(ways, COLORS, strict=False):
        lengths = [row["T"] for row in rows if row["way"] == way]
        milliseconds = [row["ms"] for row in rows if row["way"] == way]
        axis.loglog(lengths, milliseconds, "o-", color=color, label=way)
    axis.set(xlabel="sequence length", ylabel="milliseconds, forward and backward")
    lengths = sorted({row["T"] for row in rows})
    axis.set_xticks(lengths, [f"{T:,}" for T in lengths])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:,g}")
    tidy(axis)


def plot_comparison(result: dict):
    """What compare.py found: validation losses by tokens, and the differences to the base."""
    figure, (losses, differences) = new_figure(1, 2)
    whole = [run for arm in result["arms"] for run in arm["runs"] if run["val_loss"] is not None]
    unit, label = pick_unit([run["tokens"][-1] for run in whole], "tokens")
    for arm, color in zip(result["arms"], itertools.cycle(COLORS)):
        style = dict(color=color, linewidth=1.2, alpha=0.8)
        losses.plot([], [], label=arm["name"], **style)
        for run in arm["runs"]:
            if run["val_loss"] is not None:
                losses.plot(np.array(run["tokens"][1:]) / unit, run["losses"][1:], **style)
    if whole:  # the fall of the first tenth may lie above the view
        losses.set_ylim(top=max(run["losses"][max(1, len(run["losses"]) // 10)] for run in whole))
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
            axis.plot(against["differences"], [y] * len(against["differences"]), "o", color=GREY)
            bar = dict(fmt="D", color=color, capsize=5, linewidth=1.6)
            axis.errorbar(against["mean"], y + 0.15, xerr=against["half"], **bar)
    axis.axvline(0, color=BLACK, linewidth=1)
    axis.set_yticks(range(len(arms)), [arm["name"] for arm in arms])
    axis.set_ylim(-0.5, len(arms) - 0.5)
    axis.invert_yaxis()
    title = "each seed (dots), mean and 95% interval"
    axis.set(xlabel="final validation loss minus the base's", title=title)
    tidy(axis)


# -- a model


def attention_patterns(model, idx) -> np.ndarray:
    """What the heads look at: idx (1, T) int64 -> (n_layer, nh, T, T).

    Row t of a pattern has the weights with which position t looks at positions 0 to t.
    """
    import torch

    layers = []  # of each: queries, keys and values, (1, T, 3C)

    def remember(_module, _inputs, output) -> None:
        layers.append(output)

    hooks = [block.attn.c_attn.register_forward_hook(remember) for block in model.transformer.h]
    try:
        with torch.no_grad():
            model.hidden(idx)
    finally:
        for hook in hooks:
            hook.remove()
    T = idx.size(1)
    qkv = torch.cat(layers).float().unflatten(-1, (3, model.config.n_head, -1))
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)  # each (n_layer, nh, T, hs)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    future = torch.ones(T, T, dtype=torch.bool, device=idx.device).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1).cpu().numpy()


def draw_matrix(axis, matrix: np.ndarray, **colors) -> None:
    """A matrix as an image with its colour bar.

    Without `colors`: blue below zero and red above, up to the 99th percentile, in steps, which
    make the file small.
    """
    import matplotlib

    if not colors:
        top = np.percentile(np.abs(matrix), 99)
        colors = dict(cmap=matplotlib.colormaps["RdBu_r"].resampled(17), vmin=-top, vmax=top)
    # nearest: averaging 1,024 rows into fewer pixels would draw stripes that are not there
    image = axis.imshow(matrix, aspect="auto", interpolation="nearest", **colors)
    extend = "both" if image.norm.vmin < 0 else "neither"
    axis.figure.colorbar(image, ax=axis, label="weight", extend=extend, pad=0.02)


def plot_heads(patterns: np.ndarray):
    """The patterns of all heads (n_layer, nh, T, T), a row a layer: which head to enlarge."""
    L, nh, T, _ = patterns.shape
    edge = (0, 1)  # a line between heads
    framed = np.pad(patterns, ((0, 0), (0, 0), edge, edge), constant_values=np.nan)
    picture = framed.transpose(0, 2, 1, 3).reshape(L * (T + 1), nh * (T + 1))
    figure, (axis,) = new_figure(1, 1, height=min(9.6, max(3.0, 8.4 * L / nh)))
    axis.set_facecolor(GREY)
    axis.imshow(picture, cmap="Blues", vmin=0, vmax=1)
    axis.set_xticks(np.arange(nh) * (T + 1) + T / 2, range(nh))
    axis.set_yticks(np.arange(L) * (T + 1) + T / 2, range(L))
    title = "attention patterns of all heads: white 0, blue 1"
    axis.set(xlabel="head", ylabel="layer", title=title)
    return figure


def plot_attention(pattern: np.ndarray, tokens: list[str], title: str):
    """One head's pattern (T, T) on a text: a row's token looks at the columns' tokens."""
    figure, (axis,) = new_figure(1, 1, height=6.4)
    draw_matrix(axis, pattern, cmap="Blues", vmin=0, vmax=pattern.max())
    labels = [repr(token)[1:-1].replace("$", r"\$") for token in tokens]
    axis.set_xticks(range(len(tokens)), labels, rotation=90)
    axis.set_yticks(range(len(tokens)), labels)
    axis.set(xlabel="looked at", ylabel="looking", title=title)
    return figure


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

"""Reads what runs leave (`log.txt`, `metrics.jsonl`) and draws it: for training's loss.png, the benchmarks and the notebook."""

import contextlib
import gc
import html
import json
import math
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import numpy as np

# Okabe & Ito's colours, which colour-blind readers can tell apart (their yellow is too pale for a line)
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000"
COLORS, GREY = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK), "#666666"

# OpenAI's GPT-2 on FineWeb's validation split, and GPT-2 and GPT-3 on HellaSwag (the figures of build-nanogpt's play.ipynb)
GPT2_VAL_LOSS = {"124M": 3.2924}
GPT2_HELLASWAG = {"124M": 0.294463, "350M": 0.375224, "774M": 0.431986, "1558M": 0.488946}
GPT3_HELLASWAG = {"124M": 0.337, "350M": 0.436, "774M": 0.510, "1558M": 0.547}
SIZES = {12: "124M", 24: "350M", 36: "774M", 48: "1558M"}  # by layers

AXES = {  # what a curve can be drawn along: units and their labels, largest first
    "step": [(1, "step")],
    "tokens": [(1e9, "tokens (billions)"), (1e6, "tokens (millions)"), (1e3, "tokens (thousands)"), (1, "tokens")],
    "time": [(3600, "time (hours)"), (60, "time (minutes)"), (1, "time (seconds)")],
}

# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run: `streams` {train, val, hella: (steps, values)}, and the records of metrics.jsonl, of which the first says
    what the run is. There are no records where there was only a log.txt."""

    name: str
    streams: dict[str, tuple[list[int], list[float]]]
    records: list[dict]
    config: dict

    def series(self, field: str) -> tuple[list[int], list[float]]:
        """Steps and values of a field of the training records (lr, norm, tokens_per_sec, …); empty if it was not logged."""
        rows = [r for r in self.records if r["type"] == "train" and r.get(field) is not None]
        return [r["step"] for r in rows], [r[field] for r in rows]

    def last_step(self) -> int:
        return max((steps[-1] for steps, _ in self.streams.values()), default=0)

    def place(self, steps: list[int], by: str) -> np.ndarray:
        """Where steps lie along steps, tokens or time (in seconds); not-a-number where the run does not say."""
        if by == "step":
            return np.array(steps, dtype=float)
        if by == "tokens":
            return np.array(steps) * self.config.get("total_batch_size", math.nan)
        done, wall = self.series("wall")  # the time at the end of update step + 1
        return np.interp(steps, [0, *(s + 1 for s in done)], [0, *wall]) if done else np.full(len(steps), math.nan)


def read_log(path: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """log.txt (ours or build-nanogpt's) -> {stream: (steps, values)} for the streams train, val and hella."""
    streams: dict[str, tuple[list[int], list[float]]] = {}
    for words in map(str.split, Path(path).read_text().splitlines()):
        if len(words) == 3:  # the last line of a run in progress may be half-written
            steps, values = streams.setdefault(words[1], ([], []))
            steps.append(int(words[0]))
            values.append(float(words[2]))
    return streams


def read_metrics(path: str | Path) -> list[dict]:
    """metrics.jsonl -> its records; the first says what the run is. What a power cut left half-written is left out."""
    records = []
    for line in Path(path).read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def read_run(directory: str | Path, **config) -> Run:
    """A run's directory. One with a log.txt alone (build-nanogpt's) can be told what it is:
    read_run("build-nanogpt/log", data_dir="edu_fineweb10B", total_batch_size=524288, n_layer=12)."""
    directory = Path(directory)
    records = read_metrics(directory / "metrics.jsonl") if (directory / "metrics.jsonl").exists() else []
    known = records[0]["config"] | records[0].get("model", {}) if records else {}  # --init-from has a size of its own
    return Run(directory.name, read_log(directory / "log.txt"), records, known | config)


def read_runs(*patterns: str) -> list[Run]:
    """The runs in all directories that match: read_runs("runs/*", "log/quickstart"). Raises FileNotFoundError for none."""
    found = [path for pattern in patterns for path in sorted(glob(pattern)) if (Path(path) / "log.txt").exists()]
    if not found:
        raise FileNotFoundError(f"no run in {' or '.join(patterns)}: make quickstart leaves one in log/quickstart")
    return [read_run(path) for path in found]


def smooth(values: list[float], window: int) -> list[float]:
    """The mean of each value and up to window - 1 before it."""
    sums, ends = np.concatenate([[0.0], np.cumsum(values)]), np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return ((sums[ends] - sums[starts]) / (ends - starts)).tolist()


def is_fineweb(run: Run) -> bool:
    """Whether a run's data is FineWeb, where the published baselines mean something."""
    return "fineweb" in str(run.config.get("data_dir", ""))


# -- drawing runs ------------------------------------------------------------------------------------------------------


def new_figure(rows: int, columns: int, height: float = 4.0):
    """A figure as wide as a notebook and the list of its axes; white, on a dark page too. Not pyplot's: it keeps no state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, height * rows), dpi=120, layout="constrained", facecolor="white")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def tidy(axis, **legend) -> None:
    """A light grid, no frame, and a legend where something is labelled."""
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=9, **legend)


def plot_run(log_dir: str | Path) -> Path:
    """Draws log_dir/loss.png from the run's logs: training and validation loss, and HellaSwag where it was scored."""
    log_dir = Path(log_dir)
    run = read_run(log_dir)
    draws = [draw_loss, draw_hellaswag] if len(run.streams.get("hella", ([],))[0]) > 1 else [draw_loss]
    figure, axes = new_figure(1, len(draws))
    for axis, draw in zip(axes, draws, strict=True):
        draw(axis, [run])
    c, data = run.config, Path(run.config["data_dir"]).name
    size = f"{c['n_layer']} layers, {c['n_embd']} wide"
    figure.suptitle(f"GPT-2, {size}, on {data}, {c['total_batch_size']:,} tokens a step", fontsize=11)
    figure.savefig(beside := log_dir / ".loss.tmp.png", dpi=150)
    del figure, axes, axis
    gc.collect()  # a figure refers to itself: with its 14 MB of picture it would stay until Python happens to look
    return beside.replace(log_dir / "loss.png")


def plot_along(draw, runs: list[Run], *by: str):
    """A panel for each of `by` (step, tokens, time), drawn by draw_loss or draw_hellaswag."""
    figure, axes = new_figure(1, len(by))
    for axis, x in zip(axes, by, strict=True):
        draw(axis, runs, x)
    return figure


def prepare(axis, runs: list[Run], by: str):
    """Labels the x axis with a unit that suits all runs; yields each run that can be placed on it, a colour and the unit."""
    ends = [run.place([run.last_step()], by)[0] for run in runs]
    unit, label = next((u for u in AXES[by] if any(end >= 2 * u[0] for end in ends)), AXES[by][-1])
    axis.set_xlabel(label)
    axis.locator_params(axis="x", nbins=6, integer=by == "step")
    axis.xaxis.set_major_formatter("{x:,g}")
    tidy(axis)
    for i, (run, end) in enumerate(zip(runs, ends, strict=True)):
        if not math.isnan(end):
            yield run, COLORS[i % len(COLORS)], unit


def draw_loss(axis, runs: list[Run], by: str = "step") -> None:
    """Training loss, faint as it was and smoothed, and validation loss. The fall of the first steps may lie above the view."""
    alone, tops, validations = len(runs) == 1, [], []
    for run, color, unit in prepare(axis, runs, by):
        for steps, losses in filter(None, [run.streams.get("train")]):
            window = min(50, max(1, len(losses) // 50))
            smoothed, x = smooth(losses, window), run.place(steps, by) / unit
            axis.plot(x, losses, color=color, alpha=0.2, linewidth=0.7)
            axis.plot(x, smoothed, color=color, linewidth=1.4, label=f"training, mean of {window}" if alone else run.name)
            tops.append(max(smoothed[len(losses) // 25 if len(losses) > 250 else 0 :]))
        for steps, losses in filter(None, [run.streams.get("val")]):
            label = f"validation, {losses[-1]:.3f} at step {steps[-1]:,}" if alone else None
            style = dict(color=ORANGE, markeredgecolor="white") if alone else dict(color=color, markeredgecolor=BLACK)
            size = 4.5 if len(losses) <= 25 else 3
            style |= dict(label=label, markersize=size, markeredgewidth=0.5)
            validations += axis.plot(run.place(steps, by) / unit, losses, "o-", **style)
            tops.append(losses[-1])
    if not alone:
        axis.plot([], [], "o", color="white", markeredgecolor=BLACK, markersize=4.5, label="validation")
    if any(map(is_fineweb, runs)):
        axis.axhline(GPT2_VAL_LOSS["124M"], color=BLACK, linestyle="--", linewidth=1.2, label="OpenAI's GPT-2 124M, validation")
    if tops:
        bottom, top = axis.dataLim.y0, max(tops)
        margin = 0.06 * (top - bottom) or 0.5
        axis.set_ylim(bottom - margin, top + margin)
    for line in validations:  # no line across the picture from an untrained model's loss to the first evaluation in view
        line.set_ydata(np.where(line.get_ydata() > axis.get_ylim()[1], np.nan, line.get_ydata()))
    axis.set_ylabel("loss (nats per token)")
    tidy(axis, loc="upper right")


def draw_hellaswag(axis, runs: list[Run], by: str = "step") -> None:
    """HellaSwag accuracy, with one standard error, against chance and, for FineWeb runs, OpenAI's models of that size."""
    for run, color, unit in prepare(axis, [run for run in runs if "hella" in run.streams], by):
        x, accuracy = run.place(run.streams["hella"][0], by) / unit, np.array(run.streams["hella"][1])
        total = next((r["total"] for r in run.records if r["type"] == "hella"), 10042)
        error = np.sqrt(accuracy * (1 - accuracy) / total)
        axis.plot(x, accuracy, "o-", color=color, markersize=3, linewidth=1.4, label=f"{run.name} ({total:,} examples)")
        axis.fill_between(x, accuracy - error, accuracy + error, color=color, alpha=0.15, linewidth=0)
    for size in sorted({SIZES.get(run.config.get("n_layer"), "124M") for run in runs if is_fineweb(run)}):
        axis.axhline(GPT3_HELLASWAG[size], color=BLACK, linestyle="-.", linewidth=1.2, label=f"OpenAI's GPT-3 {size}")
        axis.axhline(GPT2_HELLASWAG[size], color=BLACK, linestyle="--", linewidth=1.2, label=f"OpenAI's GPT-2 {size}")
    axis.axhline(0.25, color=GREY, linestyle=":", linewidth=1.2, label="chance")
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top + 0.1 * (top - bottom) * len(axis.get_legend_handles_labels()[0]))  # room for the legend
    axis.set_ylabel("HellaSwag accuracy (normalized)")
    tidy(axis, loc="upper left")


def plot_training(runs: list[Run]):
    """Learning rate, gradient norm, throughput and, where it was logged, MFU, by step."""
    labels = {"lr": "learning rate", "norm": "gradient norm, unclipped", "tokens_per_sec": "tokens/s", "mfu": "MFU"}
    fields = [field for field in labels if field != "mfu" or any(run.series("mfu")[0] for run in runs)]
    figure, axes = new_figure(2 if len(fields) == 4 else 1, 2 if len(fields) == 4 else 3, 3.0)
    for axis, field in zip(axes, fields, strict=True):
        for run, color, _ in prepare(axis, runs, "step"):
            steps, values = run.series(field)
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.7)
            smoothed = values if field == "lr" else smooth(values, max(1, len(values) // 50))
            axis.plot(steps, smoothed, color=color, linewidth=1.4, label=run.name)
        axis.set_ylabel(labels[field])
        axis.set_ylim(bottom=0)
        axis.ticklabel_format(axis="y", scilimits=(-3, 5), useMathText=True)
    if len(runs) > 1:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


# -- drawing measurements ----------------------------------------------------------------------------------------------


def plot_benchmark(name: str, rows: list[dict], machine: str):
    """One comparison of bench.py on one machine."""
    return plot_benchmarks([dict(device=dict(name=machine), benchmarks={name: dict(rows=rows)})])


def plot_benchmarks(results: list[dict]):
    """Results of bench.py: a row for each comparison, a column for each machine."""
    from matplotlib.figure import Figure

    found = {(name, i): b["rows"] for i, result in enumerate(results) for name, b in result["benchmarks"].items()}
    found = {place: kept for place, rows in found.items() if (kept := [row for row in rows if "error" not in row])}
    names = list(dict.fromkeys(name for name, _ in found))
    bars = {name: max(len(rows) for (other, _), rows in found.items() if other == name) for name in names}
    heights = [{"attention": 4.0, "recipes": 7.0}.get(name, 1.2 + 0.32 * bars[name]) for name in names]
    figure = Figure(figsize=(9.6 * len(results), sum(heights)), dpi=120, layout="constrained", facecolor="white")
    parts = figure.subfigures(len(names), len(results), squeeze=False, height_ratios=heights)
    for (name, i), rows in found.items():
        part = parts[names.index(name), i]
        part.suptitle(f"{name}: {results[i]['device']['name']}", fontsize=10)
        {"attention": draw_curves, "recipes": draw_recipes}.get(name, draw_bars)(part, rows)
    return figure


def draw_bars(figure, rows: list[dict]) -> None:
    """A bar for each row, as long as it is fast; orange where it is slower than what it builds on."""
    axis = figure.subplots()
    colors = [ORANGE if row.get("speedup", 1) < 0.98 else BLUE for row in rows]
    bars = axis.barh([row["name"] for row in rows], [row["median"] for row in rows], color=colors, height=0.65)
    labels = [f"{row['median']:,.1f}" if row["median"] < 1000 else f"{row['median']:,.0f}" for row in rows]
    labels = [f"{label}  ({row['total']:.2f} ×)" for label, row in zip(labels, rows, strict=True)]
    axis.bar_label(bars, labels, padding=4, fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.set_xlabel(rows[0]["unit"])
    axis.xaxis.set_major_formatter("{x:,g}")
    tidy(axis)


def draw_curves(figure, rows: list[dict]) -> None:
    """Milliseconds by sequence length, a curve for each way."""
    axis = figure.subplots()
    for way, color in zip(dict.fromkeys(row["way"] for row in rows), COLORS, strict=False):
        points = [(row["T"], row["ms"]) for row in rows if row["way"] == way]
        axis.loglog(*zip(*points, strict=True), "o-", color=color, label=way)
    axis.set(xlabel="sequence length", ylabel="milliseconds, forward and backward")
    lengths = sorted({row["T"] for row in rows})
    axis.set_xticks(lengths, [f"{T:,}" for T in lengths])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:,g}")
    tidy(axis)


def best_recipes(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """(scale, optimizer): its runs with the learning rate that is best by the seed that all rates share, which comes first."""
    best = {}
    for row in rows:
        if "val_loss" in row:
            best.setdefault((row["scale"], row["optimizer"]), []).append(row)
    for key, tried in best.items():
        rate = min((row for row in tried if row["seed"] == tried[0]["seed"]), key=lambda row: row["val_loss"])["learning_rate"]
        best[key] = [row for row in tried if row["learning_rate"] == rate]
    return best


def recipe_speeds(rows: list[dict]) -> dict[tuple[str, str], float]:
    """(scale, optimizer): tokens a second. AdamW's is what stood beside Muon's, turn by turn."""
    speeds = {(row["scale"], row["optimizer"]): row["median"] for row in rows if "median" in row}
    return speeds | {(row["scale"], "adamw"): row["beside"] for row in rows if "beside" in row}


def draw_recipes(figure, rows: list[dict]) -> None:
    """Validation loss by tokens and by time, a column for each scale: all seeds of the best learning rates. The axis holds what
    comes after the second evaluation: a run that begins with a loss of 20 enters from above."""
    scales, speeds = list(dict.fromkeys(row["scale"] for row in rows)), recipe_speeds(rows)
    axes, after = figure.subplots(2, len(scales), squeeze=False, sharey=True), []
    for (scale, optimizer), runs in best_recipes(rows).items():
        color = {"adamw": BLUE, "muon": RED}[optimizer]
        after += [loss for run in runs for loss in run["losses"][2:]]
        units = {"tokens (thousands)": 1000, "seconds": speeds.get((scale, optimizer), math.nan)}  # nan: not measured yet
        for axis, (along, unit) in zip(axes[:, scales.index(scale)], units.items(), strict=True):
            for i, run in enumerate(runs):
                label = f"{optimizer}, {run['learning_rate']:g}" if i == 0 else None
                axis.plot(
                    np.array(run["tokens"][1:]) / unit, run["losses"][1:], color=color, alpha=0.8, linewidth=1.2, label=label
                )
            axis.set(xlabel=along, title=f"{scale} parameters")
            axis.xaxis.set_major_formatter("{x:,g}")
            axis.locator_params(axis="x", nbins=5)
            tidy(axis)
    for axis in axes[:, 0]:
        axis.set_ylabel("validation loss")
    if after:
        axes[0, 0].set_ylim(min(after) - 0.1, max(after) + 0.3)


# -- drawing a model ---------------------------------------------------------------------------------------------------


def attention_patterns(model, idx) -> np.ndarray:
    """What the heads look at: idx (1, T) int64 -> (n_layer, nh, T, T), row t the weights with which t looks at 0..t."""
    import torch

    qkv, T = [], idx.size(1)
    hooks = [b.attn.c_attn.register_forward_hook(lambda _module, _x, y: qkv.append(y)) for b in model.transformer.h]
    try:
        with torch.no_grad():
            model.hidden(idx)
    finally:
        for hook in hooks:
            hook.remove()
    q, k, _ = torch.cat(qkv).float().unflatten(-1, (3, model.config.n_head, -1)).permute(2, 0, 3, 1, 4)  # each (L, nh, T, hs)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    future = torch.ones(T, T, dtype=torch.bool, device=idx.device).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1).cpu().numpy()


def draw_matrix(axis, matrix: np.ndarray, **colors) -> None:
    """A matrix as an image with its colour bar: blue below zero and red above, in steps, up to the 99th percentile."""
    import matplotlib

    top = np.percentile(np.abs(matrix), 99)
    colors = colors or dict(cmap=matplotlib.colormaps["RdBu_r"].resampled(17), vmin=-top, vmax=top)  # steps: a small file
    # nearest: averaging 1,024 rows into a few less pixels would draw stripes that are not there
    image = axis.imshow(matrix, aspect="auto", interpolation="nearest", **colors)
    axis.figure.colorbar(image, ax=axis, label="weight", extend="both" if image.norm.vmin < 0 else "neither", pad=0.02)


def plot_heads(patterns: np.ndarray):
    """The patterns of all heads (n_layer, nh, T, T), a row a layer: which head to enlarge."""
    L, nh, T, _ = patterns.shape
    framed = np.pad(patterns, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=np.nan)  # a line between heads
    figure, (axis,) = new_figure(1, 1, min(9.6, max(3.0, 8.4 * L / nh)))
    axis.set_facecolor(GREY)
    axis.imshow(framed.transpose(0, 2, 1, 3).reshape(L * (T + 1), nh * (T + 1)), cmap="Blues", vmin=0, vmax=1)
    axis.set_xticks(np.arange(nh) * (T + 1) + T / 2, range(nh))
    axis.set_yticks(np.arange(L) * (T + 1) + T / 2, range(L))
    axis.set(xlabel="head", ylabel="layer", title="attention patterns of all heads: white 0, blue 1")
    return figure


def plot_attention(pattern: np.ndarray, tokens: list[str], title: str):
    """One head's pattern (T, T) on a text: a row's token looks at the columns' tokens."""
    figure, (axis,) = new_figure(1, 1, 6.4)
    draw_matrix(axis, pattern, cmap="Blues", vmin=0, vmax=pattern.max())
    labels = [repr(token)[1:-1].replace("$", r"\$") for token in tokens]
    axis.set_xticks(range(len(tokens)), labels, rotation=90)
    axis.set_yticks(range(len(tokens)), labels)
    axis.set(xlabel="looked at", ylabel="looking", title=title)
    return figure


def table(header: list[str], rows: list[list]):
    """Header and rows as a table, line breaks kept."""
    from IPython.display import HTML

    def line(tag: str, row: list) -> str:
        cells = (html.escape(str(text)).replace("\n", "<br>") for text in row)
        return "<tr>" + "".join(f'<{tag} style="text-align:left;vertical-align:top">{text}</{tag}>' for text in cells) + "</tr>"

    return HTML("<table>" + "\n".join([line("th", header), *(line("td", row) for row in rows)]) + "</table>")

"""Reads what runs leave (`log.txt`, `metrics.jsonl`) and draws it: for training's loss.png, the benchmarks and the notebook."""

import json
from pathlib import Path

# Okabe & Ito's colours, which colour-blind readers can tell apart
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#777777"

# OpenAI's GPT-2 on FineWeb's validation split, and GPT-2 and GPT-3 on HellaSwag (the figures of build-nanogpt's play.ipynb)
GPT2_VAL_LOSS = {"124M": 3.2924}
GPT2_HELLASWAG = {"124M": 0.294463, "350M": 0.375224, "774M": 0.431986, "1558M": 0.488946}
GPT3_HELLASWAG = {"124M": 0.337, "350M": 0.436, "774M": 0.510, "1558M": 0.547}


def read_log(path: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """log.txt (ours or build-nanogpt's) -> {stream: (steps, values)} for the streams train, val and hella."""
    streams: dict[str, tuple[list[int], list[float]]] = {}
    for line in Path(path).read_text().splitlines():
        step, stream, value = line.split()
        steps, values = streams.setdefault(stream, ([], []))
        steps.append(int(step))
        values.append(float(value))
    return streams


def read_metrics(path: str | Path) -> list[dict]:
    """metrics.jsonl -> its records; the first says what the run is."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def smooth(values: list[float], window: int) -> list[float]:
    """The mean of each value and up to window - 1 before it."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]


def is_fineweb(run: dict) -> bool:
    """Whether a run's data is FineWeb, where the published baselines mean something."""
    return "fineweb" in run["config"]["data_dir"]


def plot_run(log_dir: str | Path) -> Path:
    """Draws log_dir/loss.png from the run's logs: training and validation loss, and HellaSwag where it was scored."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    log_dir = Path(log_dir)
    streams, run = read_log(log_dir / "log.txt"), read_metrics(log_dir / "metrics.jsonl")[0]
    panels = ["loss", "hella"] if len(streams.get("hella", ([],))[0]) > 1 else ["loss"]
    figure, axes = plt.subplots(1, len(panels), figsize=(6.4 * len(panels), 4.2), squeeze=False, layout="constrained")
    draw_loss(axes[0][0], streams, is_fineweb(run))
    if "hella" in panels:
        draw_hellaswag(axes[0][1], streams, is_fineweb(run))
    config = run["config"]
    figure.suptitle(
        f"GPT-2, {config['n_layer']} layers, {config['n_embd']} wide, on {Path(config['data_dir']).name}: "
        f"{config['total_batch_size']:,} tokens a step",
        fontsize=11,
    )
    figure.savefig(beside := log_dir / ".loss.tmp.png", dpi=150, facecolor="white")
    plt.close(figure)
    return beside.replace(log_dir / "loss.png")


def draw_loss(axis, streams: dict, baselines: bool) -> None:
    """Training loss, thin as it was and smoothed, and validation loss."""
    if "train" in streams:
        steps, losses = streams["train"]
        window = max(1, len(steps) // 50)
        axis.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
        axis.plot(steps, smooth(losses, window), color=BLUE, linewidth=1.6, label=f"training (mean of {window} steps)")
    if "val" in streams:
        steps, losses = streams["val"]
        axis.plot(steps, losses, color=ORANGE, marker="o", markersize=4, linewidth=1.6, label="validation")
        axis.annotate(f"{losses[-1]:.3f}", (steps[-1], losses[-1]), (-4, 8), textcoords="offset points", ha="right", color=RED)
    if baselines:
        axis.axhline(GPT2_VAL_LOSS["124M"], color=GREY, linestyle="--", label="OpenAI's GPT-2 124M, validation")
    axis.set(xlabel="step", ylabel="loss (nats per token)")
    tidy(axis)


def draw_hellaswag(axis, streams: dict, baselines: bool) -> None:
    """HellaSwag accuracy against chance and, for FineWeb runs, OpenAI's models."""
    steps, accuracies = streams["hella"]
    axis.plot(steps, accuracies, color=GREEN, marker="o", markersize=4, linewidth=1.6, label="this run")
    axis.axhline(0.25, color=GREY, linestyle=":", label="chance")
    if baselines:
        axis.axhline(GPT2_HELLASWAG["124M"], color=GREY, linestyle="--", label="OpenAI's GPT-2 124M")
        axis.axhline(GPT3_HELLASWAG["124M"], color=PURPLE, linestyle="--", label="OpenAI's GPT-3 124M")
    axis.set(xlabel="step", ylabel="HellaSwag accuracy (normalized)")
    tidy(axis)


def tidy(axis) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)

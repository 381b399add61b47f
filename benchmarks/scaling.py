"""How much better is twice as large, and twice as long?"""

from typing import Any

import numpy as np
import torch

from benchmarks.race import THIS_REPOSITORY, summarize
from config import parse_command_line
from model import GPT, GPTConfig
from support.show import plots
from support.show.published import OPENAI


def plot_scaling(races: list[dict]) -> Any:
    """Draws loss by the size of models that others trained, and by the work of our own runs.

    races: records of benchmarks/race.py on a text of 4,096 tokens. The titles say what twice gains.
    """
    figure, (by_size, by_work) = plots.new_figure(1, 2)
    sizes = [(each["parameters"] / 1e6, each["val_loss"]) for each in OPENAI["by_size"]]
    theirs = []
    for shape, size in OPENAI["sizes"].items():
        layers, channels = map(int, shape.split(" x "))
        model = on_meta(n_layer=layers, n_embd=channels, n_head=channels // 64)
        theirs.append((model.num_params() / 1e6, OPENAI["val_loss"]["fineweb"][size]))
    others = draw_power_law(by_size, sizes, plots.BLUE, "one recipe on FineWeb-Edu")
    their = draw_power_law(by_size, theirs, plots.RED, "OpenAI's, on FineWeb")
    by_size.set_title(f"twice the size: {others:.0%} less loss, OpenAI's {their:.0%}")
    by_size.set_xticks([x for x, _ in [*sizes, *theirs[2:]]])
    by_size.set(xlabel="million parameters", ylabel=plots.LOSS)
    points = []
    for race in races:
        config = parse_command_line(race["flags"])
        model = on_meta(**GPTConfig.fields_from(config, 4096))
        work = model.flops_per_token(config.sequence_length) * config.total_batch_size
        ours = next(row for row in summarize(race) if row["name"] == THIS_REPOSITORY)
        points.append((work * config.max_steps / 1e12, ours["bits"]))
    *first, last = (f"{race['config']['minutes']:g}" for race in races)
    label = f"{', '.join(first)} and {last} minutes of two cores"
    gain = draw_power_law(by_work, points, plots.BLUE, label)
    by_work.set_title(f"twice the work: {gain:.0%} fewer bits")
    by_work.set_xticks([x for x, _ in points])
    by_work.set(xlabel="operations (10^12)", ylabel="bits per byte, Python's library")
    return figure


def on_meta(**fields: Any) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(**fields))


def draw_power_law(axis: Any, points: list[tuple], color: str, label: str) -> float:
    """Draws points and a line a·x^b through them -> the part by which y falls where x doubles."""
    x, y = np.transpose(points)
    slope, height = np.polyfit(np.log(x), np.log(y), 1)
    axis.set(xscale="log", yscale="log")
    axis.plot(x, np.exp(height) * x**slope, color=color, linewidth=1)
    axis.plot(x, y, "o", color=color, label=label, clip_on=False)
    axis.minorticks_off()
    axis.set_yticks(np.arange(0.9, 3.6, 0.1 if y.max() < 2 else 0.2).round(1))
    axis.set_ylim(0.98 * min(axis.dataLim.y0, y.min()), 1.02 * max(axis.dataLim.y1, y.max()))
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter("{x:,.4g}")
    axis.legend()
    return 1 - 2**slope

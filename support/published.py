"""What others published about GPT-2, beside a run: OpenAI's scores, and runs of the recipe."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ASSETS = Path(__file__).parent.parent / "assets"
RUNS = ASSETS / "published_runs"
PUBLISHED: dict = json.loads((RUNS / "runs.json").read_text())["runs"]
OPENAI: dict = json.loads((ASSETS / "openai.json").read_text())
SIZE = dict(n_layer=12, n_embd=768, total_batch_size=524288)
RECIPE = SIZE | dict(optimizer="adamw", max_steps=19073)
# Nats per token above the highest published run that are no luck, before this update and from it on
EARLY, LATE, LATE_FROM = 0.25, 0.1, 2000
FEWEST_EXAMPLES = 1000  # of HellaSwag: with fewer, the standard error is over 1.4%


def text_of(config: dict[str, Any]) -> str:
    """The name of the text that a run trains on. Losses on different texts are not compared."""
    return Path(config.get("data_dir", "?")).name


def size_of(config: dict[str, Any]) -> str:
    """OpenAI's name for a model of this size, "" if there is none."""
    return OPENAI["sizes"].get(f"{config.get('n_layer', 12)} x {config.get('n_embd', 768)}", "")


def is_recipe(config: dict[str, Any]) -> bool:
    """Whether a run is the 124M's on FineWeb-Edu, of which others have published logs."""
    shape = {name: config.get(name) for name in RECIPE}
    return shape == RECIPE and text_of(config) in ("edu_fineweb10B", "fineweb-edu-10B")


@cache
def published_band(stream: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, and the lowest and highest published value at each. stream: train, val or hella."""
    values: dict[int, list[float]] = {}
    for name in (name for name, run in PUBLISHED.items() if run["is_recipe"]):
        for line in (RUNS / f"{name}.txt").read_text().splitlines():
            step, of, value = line.split()
            if of == stream:
                values.setdefault(int(step), []).append(float(value))
    at = np.array(list(values.values()))  # (steps, runs): all were evaluated at the same steps
    return np.array(list(values)), at.min(1), at.max(1)


def describe_place(step: int, val_loss: float) -> str:
    """Where a run of the recipe stands among the published ones, and what to check if it lags."""
    steps, lows, highs = published_band("val")
    low, high = np.interp(step, steps, lows), np.interp(step, steps, highs)
    behind = val_loss - high
    if step == 0 or behind <= (EARLY if step < LATE_FROM else LATE):
        return f"{low:.2f} to {high:.2f}"
    advice = "check the rate, its warm-up and the data: docs/reproduction.md, When to stop a run"
    return f"{low:.2f} to {high:.2f}, so this run is {behind:.2f} behind: {advice}"


def beside_openai(
    config: dict[str, Any], streams: dict[str, tuple], examples: int
) -> dict[str, tuple[float, float | None]]:
    """A run's best scores: {name: (its own, OpenAI's for this size and text or None)}.

    streams: LoggedRun's. examples: of HellaSwag; few of them show luck only.
    """
    size = size_of(config)
    rows: dict[str, tuple] = {}
    if "train" in streams:
        rows["lowest training loss"] = (min(streams["train"][1]), None)
    if "val" in streams:
        theirs = OPENAI["val_loss"].get(text_of(config), {}).get(size)
        rows["lowest validation loss"] = (min(streams["val"][1]), theirs)
    if "hella" in streams and examples >= FEWEST_EXAMPLES:
        theirs = OPENAI["hellaswag"]["GPT-2"].get(size)
        rows["highest HellaSwag"] = (max(streams["hella"][1]), theirs)
    return rows

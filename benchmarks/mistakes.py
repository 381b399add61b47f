"""Mistakes that circulate and still train, each beside the right run.

python -m benchmarks.mistakes    three minutes on two cores, after the quickstart has made its text.
                                 FLAGS of train_gpt2.py change all runs. -> log/mistakes
"""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.techniques import keep, make_record, train
from support.base.console import run_script
from support.run.log import LoggedRun
from support.show import plots

ROOT = Path(__file__).parent.parent
OUT = Path("log/mistakes")
FLAGS = ["--val-every", "40", "--sample-every", "40", "--average-frac", "0"]
MISTAKES = {  # docs/mistakes/NAME.diff: what is drawn of it, its label, and what one sees
    "divided-twice": ("loss", plots.LOSS, "It begins at a quarter of ln 1,024 = 6.93"),
    "backward-after-the-loop": ("norm", "gradient norm", "The norm of one micro-batch of four"),
    "optimizer-of-another-model": ("loss", plots.LOSS, "No weight moves"),
    "evaluation-in-the-time": ("ms", "ms an update", "Evaluations count as time of updates"),
}


def train_with(name: str, flags: list[str]) -> LoggedRun:
    """Trains a copy of this repository with a mistake in it, or without: ""."""
    with tempfile.TemporaryDirectory() as folder:
        copy = f"{folder}/copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "data", "log", "runs"))
        if name:
            diff = ROOT / "docs" / "mistakes" / f"{name}.diff"
            subprocess.run(["git", "apply", diff], cwd=copy, check=True)
        return train([f"{copy}/train_gpt2.py"], [*FLAGS, *flags], OUT / (name or "right"))


def plot_mistakes(record: dict) -> Any:
    """Draws each mistake in red over the right run in blue."""
    figure, axes = plots.new_figure(2, 2, 2.6)
    right, *wrong = record["runs"].items()
    for axis, (name, run) in zip(axes, wrong, strict=True):
        field, label, seen = MISTAKES[name]
        for each, color, series in ("right", plots.BLUE, right[1]), (name, plots.RED, run):
            values = np.array(series[field])
            if field == "ms":
                values[0] = np.nan  # it compiles
            axis.plot(values, color=color, label=each, linewidth=1)
        axis.set(title=seen, ylabel=label)
        if field == "norm":  # a batch with a large one would hide the others
            axis.set(yscale="log", yticks=[0.3, 1, 3])
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.legend()
        plots.label_x(axis, "step")
    return figure


def main(args: list[str]) -> None:
    record = make_record({name or "right": train_with(name, args) for name in ("", *MISTAKES)})
    keep(record, plot_mistakes(record), OUT / "mistakes")


if __name__ == "__main__":
    run_script(main)

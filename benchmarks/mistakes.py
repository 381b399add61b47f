"""Mistakes that circulate and still train, each beside the right run.

python -m benchmarks.mistakes    three minutes on two cores, after the quickstart has made its text.
                                 FLAGS of train_gpt2.py change all runs. -> log/mistakes
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.techniques import make_record, train
from support.base.console import run_script
from support.base.files import write_whole
from support.show import plots

ROOT = Path(__file__).parent.parent
OUT = Path("log/mistakes")
FLAGS = ["--val-every", "40", "--sample-every", "40", "--average-frac", "0"]
MISTAKES = {  # docs/mistakes/NAME.diff: what is drawn of it, and what one sees
    "divided-twice": ("loss", "It begins at a quarter of ln 1,024 = 6.93"),
    "backward-after-the-loop": ("norm", "One micro-batch of four counts"),
    "optimizer-of-another-model": ("loss", "No weight moves"),
    "evaluation-in-the-time": ("tokens_per_sec", "The speed falls at each evaluation"),
}


def train_with(name: str, flags: list[str]) -> Any:
    """Trains a copy of this repository with a mistake in it, or without: ""."""
    copy = OUT / "copies" / (name or "right")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "data", "log", "runs"))
    if name:
        diff = ROOT / "docs" / "mistakes" / f"{name}.diff"
        subprocess.run(["patch", "-s", "-p1", "-i", diff], cwd=copy, check=True)
    return train([f"{copy}/train_gpt2.py"], [*FLAGS, *flags], OUT / copy.name)


def plot_mistakes(record: dict) -> Any:
    """Draws each mistake in red over the right run in blue."""
    figure, axes = plots.new_figure(2, 2, 2.6)
    right, *wrong = record["runs"].items()
    for axis, (name, run) in zip(axes, wrong, strict=True):
        field, seen = MISTAKES[name]
        for label, color, each in ("right", plots.BLUE, right[1]), (name, plots.RED, run):
            axis.plot(each[field][1:], color=color, label=label, linewidth=1)
        axis.set(title=seen, ylabel=plots.LOSS if field == "loss" else field.replace("_", " "))
        axis.legend()
        plots.label_x(axis, "step")
    return figure


def main(args: list[str]) -> None:
    record = make_record({name or "right": train_with(name, args) for name in ("", *MISTAKES)})
    write_whole(OUT / "mistakes.json", json.dumps(record).encode())
    plots.save_picture(plot_mistakes(record), OUT / "mistakes.png")
    print(f"record and picture: {OUT}/mistakes.json, .png")


if __name__ == "__main__":
    run_script(main)

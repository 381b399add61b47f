"""Draws all committed pictures again from their records: python -m benchmarks.pictures"""

import json
import math
from pathlib import Path

from benchmarks.climb import plot_climbs
from benchmarks.minutes import plot_budgets, plot_minutes
from compare import plot_comparison
from support.plots import plot_run, plot_samples, save_picture

PLOTS = {
    "compare*/compare": (plot_comparison, [".png", ".svg"]),
    "minutes*": (plot_minutes, [".svg"]),
}


def draw(root: Path) -> None:
    """Draws the pictures of root/runs and root/benchmarks, beside the records."""
    laptop = root / "runs" / "laptop"
    save_picture(plot_run(root / "runs" / "quickstart"), root / "runs" / "quickstart" / "loss.svg")
    plot_run(laptop)
    save_picture(plot_samples(laptop, [2, 15, math.inf]), laptop / "samples.svg")
    ladders = sorted((root / "benchmarks").glob("*-ladder.json"))
    save_picture(plot_climbs(ladders), root / "benchmarks" / "climb.svg")
    if budgets := sorted((root / "benchmarks").glob("budget-*.json")):
        races = [json.loads(record.read_text()) for record in budgets]
        save_picture(plot_budgets(races), root / "benchmarks" / "budgets.svg")
    for pattern, (plot, suffixes) in PLOTS.items():
        for record in (root / "benchmarks").glob(f"{pattern}.json"):
            figure = plot(json.loads(record.read_text()))
            for suffix in suffixes:
                save_picture(figure, record.with_suffix(suffix))


if __name__ == "__main__":
    draw(Path(__file__).parent.parent)

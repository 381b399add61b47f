"""Draws all committed pictures again from their records: python -m benchmarks.pictures"""

import json
import math
from pathlib import Path

from benchmarks.climb import plot_climbs
from benchmarks.mistakes import plot_mistakes
from benchmarks.race import plot_budgets, plot_minutes
from benchmarks.techniques import plot_techniques
from support.show.comparison import plot_comparison
from support.show.plots import plot_run, plot_samples, save_picture


def draw(root: Path) -> None:
    """Draws the pictures of root/runs and root/benchmarks, beside the records."""
    figures = {run.name: plot_run(run) for run in (root / "runs").iterdir()}
    save_picture(figures["quickstart"], root / "runs" / "quickstart" / "loss.svg")
    laptop = root / "runs" / "laptop"
    save_picture(plot_samples(laptop, [2, 15, math.inf]), laptop / "samples.svg")
    records = root / "benchmarks"
    save_picture(plot_climbs(sorted(records.glob("*-ladder.json"))), records / "climb.svg")
    for plot, name in (plot_techniques, "techniques"), (plot_mistakes, "mistakes"):
        record = json.loads((records / f"{name}.json").read_text())
        save_picture(plot(record), records / f"{name}.svg")
    races = [json.loads(race.read_text()) for race in sorted(records.glob("amx-budget-*.json"))]
    save_picture(plot_budgets(races), records / "budgets.svg")
    for path in records.glob("compare*/compare.json"):
        figure = plot_comparison(json.loads(path.read_text()))
        for suffix in (".png", ".svg"):
            save_picture(figure, path.with_suffix(suffix))
    for name in ("minutes", "amx-budget-10"):
        race = json.loads((records / f"{name}.json").read_text())
        save_picture(plot_minutes(race), records / f"{name}.svg")


if __name__ == "__main__":
    draw(Path(__file__).parent.parent)

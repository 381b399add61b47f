"""Draws all pictures again from the committed records: python -m benchmarks.pictures

Those of README.md, as SVG for light and dark pages, go to assets/; the others beside their records.
"""

import json
from pathlib import Path

import numpy as np

from bench import plot_benchmarks
from benchmarks.minutes import plot_minutes
from support.log import read_run
from support.plots import (
    plot_comparison,
    plot_loss,
    plot_run,
    plot_samples,
    save_for_pages,
    save_picture,
)

ROOT = Path(__file__).parent.parent
MOMENTS = (2, 15)  # minutes after which the hour's samples are quoted, besides its last


def find_samples(log_dir: Path) -> list[int]:
    """The steps of a run's samples nearest to the moments, and of its last."""
    run = read_run(log_dir)
    steps, _ = run.series("samples", "samples")
    minutes = np.interp(steps, *run.series("wall")) / 60
    return [*(steps[np.abs(minutes - moment).argmin()] for moment in MOMENTS), steps[-1]]


def draw_for_readme(out: Path) -> None:
    """Draws what README.md shows, if it was measured: OUT/NAME.svg and OUT/NAME-dark.svg."""
    laptop = ROOT / "runs" / "laptop"
    save_for_pages(plot_loss(ROOT / "runs" / "quickstart"), out / "quickstart")
    save_for_pages(plot_samples(laptop, find_samples(laptop)), out / "hour")
    for name, plot in {"minutes": plot_minutes, "compare/compare": plot_comparison}.items():
        record = ROOT / "benchmarks" / f"{name}.json"
        if record.exists():
            save_for_pages(plot(json.loads(record.read_text())), out / record.stem)


def draw_beside_records() -> None:
    for log in ROOT.glob("runs/*/log.txt"):
        plot_run(log.parent)
    for pattern, plot in {"cpu-*": plot_benchmarks, "compare*/compare": plot_comparison}.items():
        for record in (ROOT / "benchmarks").glob(f"{pattern}.json"):
            if figure := plot(json.loads(record.read_text())):
                save_picture(figure, record.with_suffix(".png"))


if __name__ == "__main__":
    draw_for_readme(ROOT / "assets")
    draw_beside_records()

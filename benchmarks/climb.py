"""The climb of bench.py beside published ones, on one axis."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import by_turns, machine_of, time_of_10B
from support.base.errors import reading
from support.show import plots

PUBLISHED = Path(__file__).parent.parent / "assets" / "climbs.json"


def read_climb(path: str | Path) -> dict:
    """The ladder of a record of bench.py, as one of the published climbs. Raises UserError."""
    with reading(path, "name a record of bench.py's ladder"):
        record = json.loads(Path(path).read_text())
        machine = machine_of(record)
        if (model := record["config"]["model"]) != "gpt2":
            machine += f", another model ({model})"
        rows = record["benchmarks"]["ladder"]["rows"]
        measured = [row for row in by_turns(rows) if "median" in row]
        if not measured:
            raise ValueError("each of its rows failed")
    rungs = [dict(name=row["name"], tokens_per_sec=row["median"]) for row in measured]
    return dict(name=machine, rows=rungs)


def plot_climbs(records: Sequence[str | Path]) -> Any:
    """Draws tokens/s, a line for each machine from its first rung to its fastest one."""
    published = json.loads(PUBLISHED.read_text())["climbs"]
    climbs = [*map(read_climb, records), *published]
    climbs.sort(key=lambda climb: climb["rows"][0]["tokens_per_sec"])
    figure, [axis] = plots.new_figure(1, 1, 0.9 + 0.5 * len(climbs))
    for y, climb in enumerate(climbs):
        color = plots.GREY if climb in published else plots.BLUE
        rates = [row["tokens_per_sec"] for row in climb["rows"]]
        first, best = rates[0], max(rates)
        axis.plot(rates, [y] * len(rates), "-o", color=color, ms=4)
        axis.text(first, y - 0.2, climb["name"], weight="bold", va="bottom")
        about = f"{first:,.0f} → {best:,.0f} ({best / first:,.1f} ×): 10B in {time_of_10B(best)}"
        axis.annotate(about, (best, y), (8, 0), textcoords="offset points", va="center")
    axis.set(
        xscale="log",
        xlim=(0.6 * climbs[0]["rows"][0]["tokens_per_sec"], 3e9),
        ylim=(len(climbs) - 0.5, -0.8),
        yticks=[],
    )
    axis.spines["left"].set_visible(False)
    axis.set_xticks([10**n for n in range(2, 8)])
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.minorticks_off()
    axis.set_xlabel("tokens/s of GPT-2 124M, a dot for each row")
    axis.set_title("From a plain step to the fastest one (blue: measured here, grey: published)")
    return figure

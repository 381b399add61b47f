"""The climb of bench.py beside published ones, on one axis."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.base.errors import reading
from support.show import plots

PUBLISHED = Path(__file__).parent.parent / "assets" / "climbs.json"


def read_climb(path: str | Path) -> dict:
    """The ladder of a record of bench.py, as one of the published climbs. Raises UserError."""
    with reading(path, "name a record of bench.py's ladder"):
        record = json.loads(Path(path).read_text())
        machine = f"{record['device']['name']}, {record['dtype']}"
        if (model := record["config"]["model"]) != "gpt2":
            machine += f", another model ({model})"
        rows = record["benchmarks"]["ladder"]["rows"]
        measured = [row | {"tokens_per_sec": row["median"]} for row in rows if "median" in row]
        if not measured:
            raise ValueError("each of its rows failed")
    return dict(name=f"{machine}: measured", rows=measured)


def plot_climbs(records: Sequence[str | Path]) -> Any:
    """Draws tokens/s, a line for each rung: the published climbs, and those of the records."""
    published = json.loads(PUBLISHED.read_text())["climbs"]
    climbs = [*map(read_climb, records), *published]
    climbs.sort(key=lambda climb: climb["rows"][0]["tokens_per_sec"])
    lowest = 0.9 * climbs[0]["rows"][0]["tokens_per_sec"]
    num_lines = sum(len(climb["rows"]) + 2 for climb in climbs)
    figure, [axis] = plots.new_figure(1, 1, 0.7 + 0.19 * num_lines)
    at_left = axis.get_yaxis_transform()
    y = 0
    for climb in climbs:
        color = plots.GREY if climb in published else plots.BLUE
        axis.text(-0.34, y, climb["name"], transform=at_left, va="center", weight="bold")
        first = climb["rows"][0]["tokens_per_sec"]
        for row in climb["rows"]:
            y += 1
            rate = row["tokens_per_sec"]
            shown = f"{rate:,.0f}" + (f" ({row['ms']:,.0f} ms)" if "ms" in row else "")
            gain = f"   {row.get('total', rate / first):,.1f} ×" if rate != first else ""
            axis.text(-0.34, y, row["name"], transform=at_left, va="center")
            axis.plot([first, rate], [y, y], color=color, linewidth=1)
            axis.plot(rate, y, "o", color=color, ms=5)
            axis.annotate(shown + gain, (rate, y), (7, 0), textcoords="offset points", va="center")
        y += 2
    axis.set(xscale="log", xlim=(lowest, 6e7), ylim=(y - 1, -1), yticks=[])
    axis.spines["left"].set_visible(False)  # it would cut the names
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlabel("tokens/s, GPT-2 124M (×: times the first row; ours: in turns with it)")
    axis.set_title("From a laptop to 8 H100s: published climbs in grey, measured here in blue")
    return figure

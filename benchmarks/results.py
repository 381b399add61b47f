"""What bench.py has measured: as JSON, as a table, as a plot."""

import json
from pathlib import Path

from support.common import UserError
from support.plots import BLUE, COLORS, GREY, PALE, RED, tidy

COLUMNS = {  # of a table, where a row has them: heading and format
    "machine": ("machine", ""),
    "name": ("", ""),
    "case": ("", ""),
    "part": ("part", ""),
    "median": ("", ",.1f"),
    "ms": ("ms", ",.1f"),
    "beside": ("base beside it", ",.1f"),
    "ratio": ("× base", ""),
    "share": ("of the step", ".1%"),
    "MFU": ("MFU", ".1%"),
    "MFU bf16": ("MFU bf16", ".1%"),
    "of limit": ("of limit", ".1%"),
    "loader": ("loader", ".1%"),
    "gb": ("GB", ".2f"),
    "memory_gb": ("peak GB", ".2f"),
    "start_s": ("start s", ".1f"),
    "loss": ("first loss", ".4f"),
    "right": ("right", ".0f"),
    "error": ("failed", ""),
}

LEGEND = (
    "MFU: of the peak of the row's own precision; "
    "MFU bf16: of bfloat16's (float16's where there is no bfloat16)\n"
    "× base: times as fast as the row it builds on, the median of turns side by side (and their "
    "range); nothing is faster or slower whose range holds 1\n"
    "loader: the part of a step that waits for data; "
    "start: from a new process to the end of its first run, compiled\n"
    "first loss: rows of one model and one micro-batch begin with the same weights and tokens"
)


def format_table(rows: list[dict]) -> str:
    """The rows as an aligned Markdown table with the columns that they have."""
    rows = [row | dict(ratio=describe_ratio(row) or None) for row in rows]
    units = dict.fromkeys(row["unit"] for row in rows if "unit" in row)
    columns = []
    for key, (heading, spec) in COLUMNS.items():
        values = [row.get(key) for row in rows]
        if key == "median":
            heading = ", ".join(units)
        if any(value is not None for value in values):
            columns.append(format_column(heading, spec, values))
    return "\n".join("|" + "|".join(line) + "|" for line in zip(*columns, strict=True))


def format_column(heading: str, spec: str, values: list) -> list[str]:
    """One column: heading, rule and values, all as wide as the widest; numbers to the right."""
    cells = [heading]
    for value in values:
        cells.append("" if value is None else format(value, spec))
    width = max(len(cell) for cell in cells)
    if spec:
        cells = [f" {cell:>{width}} " for cell in cells]
        rule = "-" * (width + 1) + ":"
    else:
        cells = [f" {cell:<{width}} " for cell in cells]
        rule = "-" * (width + 2)
    return [cells[0], rule, *cells[1:]]


def describe_result(result: dict) -> str:
    """The machine, the precision, the peaks of MFU, and what the columns mean."""
    device = result["device"]
    config = result["config"]
    where = f"{device['name']} ({device['type']}, {device['threads']} CPU threads)"
    size = f"B {config['batch_size']} × T {config['sequence_length']}"
    lines = [
        f"{where}, torch {result['versions']['torch']}, revision {result['git']}",
        f"{result['command']}; training uses {result['dtype']} here ({result['why']})",
        f"{config['model']}, {size}, medians of {config['rounds']} turns",
    ]
    for name, (flops, source) in result["peaks"].items():
        lines.append(f"peak {name}: {flops / 1e12:,.2f} TFLOP/s, {source}")
    return "\n".join([*lines, LEGEND])


def read_result(path: str | Path) -> dict:
    """The JSON file that an earlier bench.py wrote; UserError for anything else."""
    try:
        if not Path(path).is_file():  # a device may have no end
            raise OSError("no such file")
        result = json.loads(Path(path).read_text())
        _ = result["device"]["name"]
        _ = [found["rows"] for found in result["benchmarks"].values()]
        return result
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        message = f"{path} is not a result of bench.py ({why}): name its JSON files"
        raise UserError(message) from None


def print_report(results: list[dict], out: str) -> None:
    """The results of one or more machines: a table for each comparison, and one plot, OUT.png."""
    for result in results:
        print(f"\n{describe_result(result)}")
    for name in dict.fromkeys(name for result in results for name in result["benchmarks"]):
        rows = []
        notes = []
        for result in results:
            found = result["benchmarks"].get(name, dict(rows=[], notes=[]))
            if len(results) == 1:
                rows += found["rows"]
                notes += found["notes"]
            else:
                machine = result["device"]["name"]
                rows += [dict(machine=machine) | row for row in found["rows"]]
                notes += [f"{machine}: {note}" for note in found["notes"]]
        print(f"\n{name}\n{format_table(rows)}")
        for note in notes:
            print(f"  {note}")
    plot_benchmarks(results).savefig(f"{out}.png")
    print(f"\nplot: {out}.png")


def write_result(out: str, result: dict) -> None:
    Path(f"{out}.json").write_text(json.dumps(result, indent=1, default=str) + "\n")


# -- the plot


# what bench.py compares, for a reader who has not seen its flags
TITLES = {
    "ladder": "A training step, each technique added to those before it",
    "sweep": "A training step, by the micro-batch B",
    "scaling": "A training step on several processes",
    "against": "A training step, beside that of Hugging Face's transformers",
    "optimizers": "A training step with AdamW and with Muon",
    "anatomy": "Where the time of a training step goes",
    "attention": "Attention alone, forward and backward",
    "generate": "Generation of 128 tokens",
    "validation": "Validation, eager and with the blocks that training has compiled",
    "hellaswag": "Scoring HellaSwag",
    "data": "Text to token shards",
}


def plot_benchmarks(results: list[dict]):
    """Results of bench.py: a row for each comparison, a column for each machine."""
    from matplotlib.figure import Figure

    panels = {}  # (comparison, place of the machine): the rows that did not fail
    for i, result in enumerate(results):
        for name, comparison in result["benchmarks"].items():
            rows = [row for row in comparison["rows"] if "error" not in row]
            if rows:
                panels[name, i] = rows
    heights: dict[str, float] = {}
    for (name, _), rows in panels.items():
        heights[name] = max(heights.get(name, 0), panel_height(name, rows))
    names = list(heights)
    inches = list(heights.values())
    size = (9.6 * len(results), sum(inches))
    figure = Figure(figsize=size, dpi=120, layout="constrained", facecolor="white")
    parts = figure.subfigures(len(names), len(results), squeeze=False, height_ratios=inches)
    for (name, i), rows in panels.items():
        part = parts[names.index(name), i]
        part.suptitle(describe_panel(name, results[i]), fontsize=10)
        DRAWN.get(name, draw_bars)(part, rows)
    return figure


def panel_height(name: str, rows: list[dict]) -> float:
    """Inches that a comparison takes: curves the same always, bars by their number."""
    return 4.0 if name in DRAWN else 1.7 + 0.45 * len(rows)


def describe_panel(name: str, result: dict) -> str:
    """A title, and below it what was computed and on which machine."""
    config = result.get("config", {})
    what = ""
    if name not in ("data", "attention"):
        what = f"{config['model']}, "
    if name == "anatomy":
        what += f"{config['batch_size']} sequences, "
    if name in ("ladder", "against", "optimizers", "scaling"):
        what += f"{config['batch_size']} sequences of {config['sequence_length']:,} tokens, "
    return f"{TITLES.get(name, name)}\n{what}on {result['device']['name']}"


def judge_ratio(row: dict) -> str:
    """What the paired turns of a row and its base show: faster, slower or no difference shown.

    Nothing is faster or slower if the range of their ratios holds 1, or if there is no range: of
    a single turn, or in a record that does not have it.
    """
    low, high = row.get("speedup_low"), row.get("speedup_high")
    if low == high:
        return "no range"
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "no difference shown"


def describe_ratio(row: dict) -> str:
    """How many times as fast as its base a row is, the range of the turns, what they show."""
    if "speedup" not in row:
        return ""
    judgement = judge_ratio(row)
    ratio = f"{row['speedup']:.2f} ×"
    if judgement == "no range":
        return f"{ratio} ({judgement})"
    return f"{ratio} ({row['speedup_low']:.2f} to {row['speedup_high']:.2f}): {judgement}"


def draw_bars(figure, rows: list[dict]) -> None:
    """A bar for each row, as long as it is fast, and above it that of the side beside it.

    Both are medians of the same turns, so only these two are to be compared.
    """
    axis = figure.subplots()
    colors = {"faster": BLUE, "slower": RED}
    for i, row in enumerate(rows):
        at = i
        if "beside" in row:
            axis.barh(i - 0.17, row["beside"], height=0.34, color=PALE)
            at = i + 0.17
        color = colors.get(judge_ratio(row), GREY)
        bar = axis.barh(at, row["median"], height=0.34, color=color)
        digits = 1 if row["median"] < 1000 else 0
        label = f"{row['median']:,.{digits}f}   {describe_ratio(row)}"
        axis.bar_label(bar, [label], padding=4, fontsize=9)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.invert_yaxis()
    axis.margins(x=0.35)
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.set_xlabel(f"{rows[0]['unit'].replace('/s', ' a second')} (longer is faster)")
    tidy(axis)
    axis.grid(visible=False, axis="y")
    if any("beside" in row for row in rows):
        pale = "pale: what a row is compared with, in turns beside it"
        figure.supxlabel(f"{pale}; blue: faster, red: slower, grey: neither shown", fontsize=9)


def draw_curves(figure, rows: list[dict]) -> None:
    """Milliseconds by sequence length, a curve for each way."""
    axis = figure.subplots()
    ways = dict.fromkeys(row["way"] for row in rows)
    for way, color in zip(ways, COLORS, strict=False):
        lengths = [row["T"] for row in rows if row["way"] == way]
        milliseconds = [row["ms"] for row in rows if row["way"] == way]
        axis.loglog(lengths, milliseconds, "o-", color=color, label=way)
    axis.set(xlabel="sequence length", ylabel="milliseconds, forward and backward")
    lengths = sorted({row["T"] for row in rows})
    axis.set_xticks(lengths, [f"{T:,}" for T in lengths])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:,g}")
    tidy(axis)


# of anatomy.PARTS: products blue, attention red, elementwise green, the update purple
SHADES = (
    *("#084a7a", BLUE, "#3f8ec4"),
    *("#a03f00", RED),
    *("#00664b", "#2a9070"),
    *("#7d3f66", "#b0668f"),
    *("#4d4d4d", "#8a8a8a"),
)


def draw_parts(figure, rows: list[dict]) -> None:
    """A bar for each case, cut into the parts of its step; a part of 4% and more is labelled."""
    from matplotlib.patches import Patch

    axis = figure.subplots()
    cases = dict.fromkeys(row["case"] for row in rows)
    timed = [row for row in rows if "share" in row and row["part"] != "the step"]
    names = dict.fromkeys(row["part"] for row in timed)
    for i, case in enumerate(cases):
        left = 0.0
        parts = [row for row in timed if row["case"] == case]
        for row, shade in zip(parts, SHADES, strict=True):
            share = row["share"]
            bar = axis.barh(i, share, left=left, color=shade, edgecolor="white")
            if share >= 0.04:
                axis.bar_label(bar, [f"{share:.0%}"], label_type="center", color="white")
            left += share
    axis.set_yticks(range(len(cases)), list(cases))
    axis.invert_yaxis()
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axis.set_xlabel("part of the step's time")
    tidy(axis)
    axis.grid(visible=False, axis="y")
    patches = [Patch(color=shade) for shade in SHADES]
    figure.legend(patches, names, loc="outside lower center", ncols=3, fontsize=8, frameon=False)


DRAWN = {"attention": draw_curves, "anatomy": draw_parts}  # the others as bars

"""What bench.py has measured: as JSON, as a table, as a plot."""

import json
from pathlib import Path

from support.common import UserError
from support.plots import plot_benchmarks

COLUMNS = {  # of a table, where a row has them: heading and format
    "machine": ("machine", ""),
    "name": ("", ""),
    "median": ("", ",.1f"),
    "ms": ("ms", ",.1f"),
    "beside": ("base beside it", ",.1f"),
    "speedup": ("× base", ".2f"),
    "total": ("× first", ".2f"),
    "MFU": ("MFU", ".1%"),
    "MFU bf16": ("MFU bf16", ".1%"),
    "of limit": ("of limit", ".1%"),
    "loader": ("loader", ".1%"),
    "memory_gb": ("peak GB", ".2f"),
    "start_s": ("start s", ".1f"),
    "loss": ("first loss", ".4f"),
    "right": ("right", ".0f"),
    "error": ("failed", ""),
}

LEGEND = (
    "MFU: of the peak of the row's own precision; "
    "MFU bf16: of bfloat16's (float16's where there is no bfloat16)\n"
    "× base: times as fast as the row it builds on, in turns side by side; "
    "× first: as the first row, a product of those\n"
    "loader: the part of a step that waits for data; "
    "start: from a new process to the end of its first run, compiled\n"
    "first loss: rows of one model and one micro-batch begin with the same weights and tokens"
)


def format_table(rows: list[dict]) -> str:
    """The rows as an aligned Markdown table with the columns that they have."""
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

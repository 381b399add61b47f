"""Records of benchmarks as Markdown tables."""

COLUMNS = {  # of a table, where a row has them: heading and format
    "name": ("", ""),
    "median": ("", ",.1f"),
    "ms": ("ms", ",.1f"),
    "beside": ("base beside it", ",.1f"),
    "ratio": ("× base", ""),
    "MFU": ("MFU", ".1%"),
    "memory_gb": ("peak GB", ".2f"),
    "start_s": ("start s", ".1f"),
    "loss": ("first loss", ".4f"),
    "right": ("right", ".0f"),
    "error": ("failed", ""),
}

CLIMB = {  # of the ladder, where a row's base is the row above
    **{key: COLUMNS[key] for key in ("name", "ms", "median")},
    "ratio": ("× row above", ""),
    "total": ("× first row", ""),
    "whole": ("10B tokens take", ""),
    **{key: COLUMNS[key] for key in ("MFU", "memory_gb", "error")},
}


def by_turns(rows: list[dict]) -> list[dict]:
    """A ladder's rows with speeds that agree with ×: the fastest row's, by the ratios of `total`.

    Each row's own median is also of the minute in which it was measured.
    """
    measured = (row for row in rows if "median" in row)
    fastest = max(measured, key=lambda row: row.get("total", 1), default={})
    shown = []
    for row in rows:
        if "median" in row:
            rate = row["median"]
            if "total" in fastest:
                rate = fastest["median"] * (row.get("total", 1) / fastest["total"])
            scale = rate / row["median"]
            row = row | dict(median=rate, ms=row["ms"] / scale, whole=time_of_10B(rate))
            row |= {"MFU": row["MFU"] * scale} if "MFU" in row else {}
        shown.append(row)
    return shown


def time_of_10B(tokens_per_sec: float) -> str:
    """How long the recipe's 10 billion tokens take, in words."""
    seconds = 1e10 / tokens_per_sec
    for unit, size in dict(days=86400, hours=3600).items():
        if seconds >= 2 * size:
            return f"{seconds / size:,.{int(seconds < 20 * size)}f} {unit}"
    return f"{seconds / 60:.0f} minutes"


def show_bound(bound: float) -> str:
    """Two decimals, or more if they would hide on which side of 1 the bound is."""
    digits = 2
    while round(bound, digits) == 1 != bound:
        digits += 1
    return f"{bound:.{digits}f}"


def describe_ratio(row: dict) -> str:
    """How many times as fast as its base a row is, with the range, and what that shows."""
    if "speedup" not in row:
        return ""
    speedup = f"{row['speedup']:.2f} ×"
    low = row["speedup_low"]
    high = row["speedup_high"]
    if low == high:  # of one turn
        return f"{speedup} (no range)"
    verdict = "no difference shown"
    if low > 1:
        verdict = "faster"
    if high < 1:
        verdict = "slower"
    return f"{speedup} ({show_bound(low)} to {show_bound(high)}): {verdict}"


def describe_total(row: dict) -> str:
    """How many times as fast as the first row a row is, with the range."""
    if "total" not in row:
        return ""
    return "{total:.1f} × ({total_low:.1f} to {total_high:.1f})".format(**row)


def format_table(rows: list[dict], columns: dict[str, tuple] = COLUMNS) -> str:
    """The rows as an aligned Markdown table with the columns that they have."""
    if "whole" in columns:
        rows = by_turns(rows)
    shown = []
    for key, (heading, spec) in columns.items():
        heading = rows[0]["unit"] if key == "median" else heading
        in_words = {"ratio": describe_ratio, "total": describe_total}.get(key)
        values = [in_words(row) if in_words else row.get(key) for row in rows]
        cells = ["" if value is None else format(value, spec) for value in values]
        if any(cells):
            width = max(len(cell) for cell in [heading, *cells])
            align = ">" if spec else "<"
            column = [heading, "-" * width, *cells]
            shown.append([f"{cell:{align}{width}}" for cell in column])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*shown, strict=True))


def machine_of(record: dict) -> str:
    """What measured a record, and in which precision: for a picture."""
    return f"{record['device']['name']}, {record['dtype']}"

"""What paired runs say: the mean difference, how sure it is, how soon the other's loss is reached.

A run is a dictionary: `seed`, `val_loss` (the last one; None where the loss was not a number), and
for each evaluation `losses`, and the `tokens` and `seconds` of training before it.
"""

import math
import statistics

import numpy as np

SURE = 0.95  # of every interval


def t_quantile(degrees: int) -> float:
    """The t for which |T| <= t is as probable as SURE, for T with so many degrees of freedom.

    The probability is Abramowitz and Stegun's (Handbook of Mathematical Functions, 26.7.3 and
    26.7.4), a series that ends; t is found by halving.
    """
    low, high = 0.0, 100.0
    while high - low > 1e-9:
        t = (low + high) / 2
        theta = math.atan(t / math.sqrt(degrees))
        odd = degrees % 2
        term = math.cos(theta) if odd else 1.0
        series = 0.0
        for k in range(odd + 1, degrees, 2):
            series += term
            term *= math.cos(theta) ** 2 * k / (k + 1)
        inside = math.sin(theta) * series
        if odd:
            inside = 2 / math.pi * (theta + inside)
        if inside < SURE:
            low = t
        else:
            high = t
    return high


def interval(differences: list[float]) -> tuple[float, float]:
    """The mean of at least two differences, and half of its interval (paired t)."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences), t_quantile(len(differences) - 1) * error


def compare_pairs(name: str, runs: list[dict], base: list[dict]) -> dict:
    """The runs of an arm called `name` against the base's of the same seeds.

    -> `verdict` and, unless a run has no loss, `differences`, `mean` and `half` of its interval;
    `tokens` and `seconds` to the base's final loss, as parts of what the base needs, for each seed:
    None where it is not reached.
    """
    lost = sum(run["val_loss"] is None for run in [*runs, *base])
    if lost:
        return dict(verdict=f"{name} cannot be judged: {lost} of {2 * len(runs)} runs diverged")
    differences = [a["val_loss"] - b["val_loss"] for a, b in zip(runs, base, strict=True)]
    mean, half = interval(differences)
    verdict = judge(name, mean, half)
    result = dict(differences=differences, mean=mean, half=half, verdict=verdict)
    for by in ("tokens", "seconds"):
        parts = []
        for a, b in zip(runs, base, strict=True):
            needed = reach(a, b["val_loss"], by)
            whole = reach(b, b["val_loss"], by)  # 0 if the base has learned nothing
            parts.append(needed / whole if needed is not None and whole else None)
        result[by] = parts
    return result


def reach(run: dict, loss: float, by: str) -> float | None:
    """Tokens or seconds to a validation loss; None if it is never reached.

    Between two evaluations the lowest loss so far is taken for a straight line.
    """
    lowest = np.minimum.accumulate(run["losses"])[::-1]  # np.interp wants them to rise
    if loss < lowest[0]:
        return None
    return float(np.interp(loss, lowest, run[by][::-1]))


def judge(name: str, mean: float, half: float) -> str:
    """An arm's mean difference to the base and half of its interval, in words."""
    if mean == half == 0:
        return f"{name} is the same: every difference is exactly 0"
    digits = digits_of(half)
    if abs(mean) <= half:
        return f"{name}: no difference can be seen: it would have to exceed {half:.{digits}f}"
    side = "lower" if mean < 0 else "higher"
    return f"{name} is {side} by {abs(mean):.{digits}f} ± {half:.{digits}f}"


def digits_of(half: float) -> int:
    """Decimals that say one digit of it, two if it begins with 1; from two to nine."""
    if half == 0:
        return 4
    return min(9, max(2, -math.floor(math.log10(half / 2))))


# -- in words and as a table


def write_report(result: dict) -> str:
    """compare.json's content as a page of Markdown."""
    base = result["base"]
    about = result["about"]
    size = f"{base['n_layer']} × {base['n_embd']}, sequences of {base['sequence_length']}"
    steps = f"{base['max_steps']:,} steps of {base['total_batch_size']:,} tokens"
    machine = f"{about['device']['name']}, {about['dtype']}, torch {about['versions']['torch']}"
    lines = [
        f"`{result['command']}`",
        "",
        f"The base: {size}, {steps}, validated on {base['val_tokens']:,}. {machine}; "
        f"revision {about['git'] or 'unknown'}.",
        "",
        write_table(result["arms"], result["sweep"]),
        "",
    ]
    lines += [f"- {arm['against']['verdict']}." for arm in result["arms"][1:]]
    lines += ["", explain(result)]
    return "\n".join([*lines, *describe_sweep(result)]) + "\n"


def write_table(arms: list[dict], sweep: str) -> str:
    """The arms as a Markdown table, the base first."""
    head = ["arm", sweep, "validation loss", "by seed", "against base", "tokens", "time"]
    rows = [head, ["---"] + 6 * ["---:"]]
    for arm in arms:
        losses = [run["val_loss"] for run in arm["runs"]]
        cells = ["diverged", ""]
        if None not in losses:
            cells = [f"{statistics.fmean(losses):.4f}", f"± {statistics.stdev(losses):.4f}"]
        value = f"{arm['value']:g}" if sweep else ""
        rows.append([arm["name"], value, *cells, *describe_pairs(arm["against"])])
    if not sweep:
        rows = [[row[0], *row[2:]] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def describe_pairs(against: dict) -> list[str]:
    """The cells of a comparison: the difference, and parts of the base's tokens and time."""
    if "mean" not in against:  # the base itself, or an arm that diverged
        return ["", "", ""]
    digits = digits_of(against["half"])
    cells = [f"{against['mean']:+.{digits}f} ± {against['half']:.{digits}f}"]
    for by in ("tokens", "seconds"):
        parts = [part for part in against[by] if part is not None]
        text = "never"
        if parts:
            text = f"{statistics.fmean(parts):.2f} ({min(parts):.2f}–{max(parts):.2f})"
        if 0 < len(parts) < len(against[by]):
            text += f" in {len(parts)} of {len(against[by])}"
        cells.append(text)
    return cells


def explain(result: dict) -> str:
    """What the columns mean, and what the base itself needs."""
    base = [run for run in result["arms"][0]["runs"] if run["val_loss"] is not None]
    needs = ""
    if base:
        tokens = statistics.fmean(run["tokens"][-1] for run in base)
        minutes = statistics.fmean(run["seconds"][-1] for run in base) / 60
        needs = f" The base's runs take {tokens:,.0f} tokens and {minutes:,.1f} minutes."
    each = " for each arm, not for all together" if len(result["arms"]) > 2 else ""
    return (
        f"Means of {len(result['judged'])} seeds ({', '.join(map(str, result['judged']))}). "
        "By seed: the standard deviation, which is what a seed alone varies. Against base: the "
        f"mean difference of runs with the same seed, and its {SURE:.0%} interval{each} (paired "
        "t). Tokens, time: to the base's final loss, as a part of what the base needs, with the "
        f"least and the most of the seeds; evaluations and compilation are in the time.{needs}"
    )


def describe_sweep(result: dict) -> list[str]:
    """For each arm the losses with the values that were tried, the best in bold."""
    lines = []
    if result["sweep"]:
        lines += [
            "",
            f"{result['sweep']}, tuned on seed {result['tuned'][0]}, which does not judge:",
            "",
        ]
    for arm in result["arms"]:
        parts = []
        for value, loss in arm["tried"]:
            part = f"{value:g}: {loss:.4f}" if loss is not None else f"{value:g}: diverged"
            parts.append(f"**{part}**" if value == arm["value"] else part)
        if parts:
            lines.append(f"- {arm['name']}: {', '.join(parts)}{warn(arm)}")
    return lines


def warn(arm: dict) -> str:
    """What makes the choice of the best value doubtful: it is at an end, or another is as good."""
    ends = (arm["tried"][0][0], arm["tried"][-1][0])
    text = "; the best is at an end, one beyond it may be better" if arm["value"] in ends else ""
    losses = [run["val_loss"] for run in arm["runs"]]
    if None not in losses:
        near = dict(arm["tried"])[arm["value"]] + 2 * statistics.stdev(losses)
        close = [f"{v:g}" for v, loss in arm["tried"] if loss is not None and loss < near]
        close.remove(f"{arm['value']:g}")
        if close:
            text += f"; {' and '.join(close)} may be as good: nearer than twice what a seed varies"
    return text

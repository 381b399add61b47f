"""The page and the picture of what compare.py found."""

import math
from itertools import cycle
from typing import Any

import numpy as np

from support.show.plots import GREY, STYLES, label_lines, label_x, name_text, new_figure

PAGE = """\
`{command}`

The base: {n_layer} × {n_embd}, {max_steps:,} steps of {total_batch_size:,} tokens of {text}. \
{device[name]}, revision {git}, {dtype}.

| arm | {measure} | against base | tokens | minutes |
| --- | ---: | ---: | ---: | ---: |
{rows}

{verdicts}

{Measure}: mean and standard deviation of the seeds. Against base: the mean difference of two
runs with the same seed, and its 95% interval (paired t, not corrected for the number of arms).
Tokens, minutes: in the base's row, what its run took; in an arm's, for each seed, the fraction of
that after which the arm had reached the base's final loss. The minutes include evaluations and
compilation.
"""


def show_loss(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.4f}"


def show_interval(mean: float, half: float) -> str:
    """Shows one digit of `half`, two if it begins with 1; at least two decimals."""
    digits = max(2, -math.floor(math.log10(half / 2))) if half else 4
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def format_page(result: dict) -> str:
    """compare.json's content as a page of Markdown."""
    arms = result["arms"]
    rows = [f"| {' | '.join(describe_arm(arm))} |" for arm in arms]
    verdicts = [f"- {arm['against']['verdict']}." for arm in arms[1:]]
    if halves := [arm["against"]["half"] for arm in arms if "half" in arm["against"]]:
        seeds = len(arms[0]["runs"])
        verdicts.append(f"- {seeds} seeds may miss a difference of less than {max(halves):.2g}.")
    measure = result.get("measure", "validation loss")  # old records have no other
    text = name_text(result["about"].get("config", {}), "the text")  # not in old records
    facts = dict(measure=measure, Measure=measure.capitalize(), text=text)
    facts |= dict(rows="\n".join(rows), verdicts="\n".join(verdicts), command=result["command"])
    sizes = result["about"].get("model", {})  # --init-from has its own
    page = PAGE.format(**result["base"] | result["about"] | sizes | facts)
    if result["sweep"]:
        page += f"\n{result['sweep']}, tuned on another seed:\n\n"
        page += "".join(f"- {arm['name']}: {describe_sweep(arm)}\n" for arm in arms)
    return page


def describe_arm(arm: dict) -> list[str]:
    """Its row: name and loss; then how it compares with the base, or what the base needs."""
    runs = arm["runs"]
    against = arm["against"]
    losses = [run["val_loss"] for run in runs]
    name = arm["name"]
    if arm.get("diff"):  # not in old records
        name += f" ([changes]({name}.diff) to the base; revision {runs[0]['git'] or 'unknown'})"
    if None in losses:
        return [name, "diverged", "", "", ""]
    cells = [name, f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}"]
    if not against:  # the base
        minutes = np.mean([run["seconds"][-1] for run in runs]) / 60
        return [*cells, "", f"{runs[0]['tokens'][-1]:,}", f"{minutes:.1f}"]
    if "mean" not in against:  # the base diverged
        return [*cells, "", "", ""]
    cells.append(show_interval(against["mean"], against["half"]))
    for fractions in (against["tokens"], against["seconds"]):
        shown = ["never" if x is None else f"{x:.2f}" for x in fractions]
        cells.append(", ".join(shown) if any(x is not None for x in fractions) else "never")
    return cells


def describe_sweep(arm: dict) -> str:
    """The losses with the values that were tried, and whether the best is at an end."""
    [best] = arm["tuned"].values()
    tried = arm["tried"]
    shown = ", ".join(f"{value:g}: {show_loss(loss)}" for value, loss in tried)
    text = f"{best:g} is the best of {shown}"
    if best in (tried[0][0], tried[-1][0]):
        text += "; it is at an end of the range, so a value beyond it may be better"
    return text


def plot_comparison(result: dict[str, Any]) -> Any:
    """Draws what compare.py found: each arm's losses by tokens, and its differences to the base."""
    figure, [losses, differences] = new_figure(1, 2, 3.6)
    measure = result.get("measure", "validation loss")
    names = name_arms(result["arms"])
    found = []
    for arm, name, style in zip(result["arms"], names, cycle(STYLES)):
        color = style["color"]
        if ended := [run for run in arm["runs"] if run["val_loss"] is not None]:
            start = max(1, len(ended[0]["losses"]) // 10)  # the first fall would fill the picture
            millions = np.array(ended[0]["tokens"][start:]) / 1e6
            seeds = np.array([run["losses"][start:] for run in ended])
            losses.plot(millions, seeds.mean(0), label=name, **style)
            losses.fill_between(millions, seeds.min(0), seeds.max(0), color=color, alpha=0.2, lw=0)
        against = arm["against"]
        if "mean" in against:
            found.append((against["mean"], against["half"], name))
            rows = [name] * len(arm["runs"])
            differences.plot(against["differences"], rows, "|", color=color, ms=9)
            differences.errorbar(against["mean"], name, xerr=against["half"], fmt="o", color=color)
    unit = "nats" if measure == "validation loss" else measure
    title = describe_best(found, names[0], unit) if found else ""
    losses.set(ylabel=f"{measure} (nats per token)" if unit == "nats" else measure, title=title)
    text = name_text(result["about"].get("config", {}), "the text")
    size = "{n_layer} × {n_embd}".format(**result["base"] | result["about"].get("model", {}))
    label_x(losses, f"millions of tokens of {text}, {size}\n(mean and range of the seeds)")
    label_lines(losses)
    differences.axvline(0, color=GREY, linewidth=0.8)
    differences.margins(x=0.1, y=0.3)
    differences.invert_yaxis()
    differences.set_title("Each seed, mean and 95% interval")
    label_x(differences, f"final {measure} minus that of {names[0]}")
    return figure


def name_arms(arms: list[dict]) -> list[str]:
    """Optimizer and learning rate, if the arms differ in nothing else; else their names."""
    settings = [arm.get("settings", {}) | arm.get("tuned", {}) for arm in arms]
    embeddings = {s.pop("embedding_lr", 1) for s in settings if s.get("optimizer") == "muon"}
    for one in settings:
        one.pop("embedding_lr", 1)  # without effect on AdamW
    pairs = [(s.pop("optimizer", ""), s.pop("learning_rate", 0)) for s in settings]
    alike = settings.count(settings[0]) == len(arms) and len(embeddings) <= 1
    if not alike or len(set(pairs)) < len(arms):
        return [arm["name"] for arm in arms]
    shown = dict(adamw="AdamW", muon="Muon")
    return [
        f"{shown.get(name, name)}, {np.format_float_scientific(rate, trim='-', exp_digits=1)}"
        for name, rate in pairs
    ]


def describe_best(found: list[tuple], base: str, unit: str) -> str:
    """What the arm with the lowest mean shows. found: mean, half of its interval, name."""
    mean, half, name = min(found)
    if abs(mean) <= half:
        return f"No difference between {name} and {base} can be seen"
    shown = show_interval(abs(mean), half)
    return f"{name} ends {shown} {unit} {'below' if mean < 0 else 'above'} {base}"

"""A page about a finished run, and what its reader sees last on the console.

python -m support.ending LOG_DIR    writes LOG_DIR/report.md, of an old run too
"""

import math
import re
import shlex
import shutil
import statistics
import sys
from itertools import zip_longest
from pathlib import Path

from support.common import UserError, first_line, run_script, say, write_whole
from support.records import RECENT, read_metrics, starts_of
from support.report import duration


def finish(log_dir: str | Path) -> None:
    """Writes the report of a run that is done and prints its samples, its files, what to run next.

    Whatever goes wrong here is one sentence: the run itself is complete.
    """
    try:
        path = write_report(log_dir)
        say(last_words(read_metrics(path.with_name("metrics.jsonl")), path))
    except Exception as error:
        say(f"no report of {log_dir} ({first_line(error)}): the run itself is complete")


def write_report(log_dir: str | Path) -> Path:
    """Writes log_dir/report.md, a page about a run, from its metrics.jsonl alone.

    Raises UserError if that file does not say what the run is, OSError if it cannot be read.
    """
    log_dir = Path(log_dir)
    page = compose_report(read_metrics(log_dir / "metrics.jsonl"))
    write_whole(log_dir / "report.md", page.encode())
    return log_dir / "report.md"


def compose_report(records: list[dict]) -> str:
    """The page, in Markdown: the curve, the figures, the commands, samples, how to go on."""
    starts = find_starts(records)
    config = starts[-1]["config"]
    name = Path(config["data_dir"]).name
    commands = [f"{start['time']}  {start['command']}" for start in starts]
    steps = next_steps(records).items()
    parts = [
        f"# GPT-2 of {config['n_layer']} layers and {config['n_embd']} channels, on {name}",
        "![training and validation loss](loss.png)",
        as_table(figures(records)),
        "## Commands",
        as_code("\n".join(commands)),
    ]
    for samples in first_and_last(records, "samples"):
        parts.append(f"## Samples after {samples['step']:,} updates")
        parts += [as_code(text) for text in samples["samples"]]
    parts.append("## How to go on")
    parts += [f"{what}:\n\n{as_code(typed)}" for what, typed in steps]
    return "\n\n".join(parts) + "\n"


def find_starts(records: list[dict]) -> list[dict]:
    """The records with which a run began and was resumed. Raises UserError if there are none."""
    starts = starts_of(records)
    if not starts or "command" not in starts[0]:
        raise UserError("metrics.jsonl does not say what the run is: its first line is missing")
    return starts


def first_and_last(records: list[dict], type: str) -> list[dict]:
    """The first and the last record of a type: none, one or two."""
    found = [record for record in records if record["type"] == type]
    return found[:1] + found[1:][-1:]


def figures(records: list[dict]) -> dict[str, str]:
    """What can be said of a run in figures: {what: figure and unit}."""
    about = find_starts(records)[-1]
    device = about["device"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    processes = "1 process" if device["processes"] == 1 else f"{device['processes']} processes"
    machine = f"{device['name']}; {processes}, {device['threads']} CPU threads each"
    return {
        **figures_of_training(records),
        **figures_of_losses(records),
        "machine": f"{machine}; {about['dtype']}; {versions}",
        "code": f"revision {about['git'] or 'unknown'}",
    }


def figures_of_training(records: list[dict]) -> dict[str, str]:
    """Tokens, time, speed and memory; nothing if no update was made."""
    updates = [record for record in records if record["type"] == "train"]
    if not updates:
        return {}
    about = find_starts(records)[-1]
    tokens = updates[-1]["tokens"]
    size = about["config"]["total_batch_size"]
    seen = f"{len(updates):,} updates of {size:,} tokens: {tokens:,} tokens"
    if parameters := about.get("parameters"):
        seen += f", {tokens / parameters:.2g} for each of {parameters:,} parameters"
    ends = [record for record in records if record["type"] == "end"]  # older runs have none
    last = (ends or updates)[-1]
    until = "to the end" if ends else "to the last update"
    speed = statistics.median(update["tokens_per_sec"] for update in updates)
    mfus = [update["mfu"] for update in updates if "mfu" in update]  # older runs have none
    mfu = f", MFU {statistics.median(mfus):.1%}" if mfus else ""
    return {
        "training": seen,
        "time": f"{duration(last['wall'])} (hours:minutes:seconds) {until}, with evaluations",
        "speed": f"{speed:,.0f} tokens/s{mfu}: medians of the updates",
        "memory": f"{last['memory'] / 1e9:.2f} GB at most, on one process",
    }


def figures_of_losses(records: list[dict]) -> dict[str, str]:
    """The last losses, and HellaSwag with its standard error."""
    found = {}
    if evaluations := [record for record in records if record["type"] == "val"]:
        last = evaluations[-1]
        best = min(evaluations, key=lambda record: record["val_loss"])
        found["validation loss"] = (
            f"{last['val_loss']:.4f} (perplexity {last['perplexity']:,.2f}) after "
            f"{last['step']:,} updates; lowest {best['val_loss']:.4f} after {best['step']:,}"
        )
    if losses := [record["loss"] for record in records if record["type"] == "train"][-RECENT:]:
        found["training loss"] = f"{statistics.fmean(losses):.4f}, mean of the last {len(losses)}"
    for score in first_and_last(records, "hella")[-1:]:
        right = score["hellaswag"]
        total = score["total"]
        error = math.sqrt(right * (1 - right) / total)
        found["HellaSwag"] = f"{right:.3f} ± {error:.3f} of {total:,} examples; chance is 0.25"
    return found


def as_code(text: str) -> str:
    """A text as Markdown shows it letter by letter, whatever is in it."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines()).rstrip()


def as_table(rows: dict[str, str]) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def next_steps(records: list[dict]) -> dict[str, str]:
    """What one could run next: {what it does: the command}."""
    start = find_starts(records)[-1]
    config = start["config"]
    steps = {}
    if config["checkpoint_every"]:
        last = f"{config['log_dir']}/ckpt_{config['max_steps']:06d}"
        prompt = shlex.quote(config["sample_prompt"])
        again = re.sub(r" --(overwrite|resume[ =]\S+|max[-_]steps[ =]\S+)", "", start["command"])
        steps["Sample it"] = f"python sample.py --model {last} --prompt {prompt}"
        steps["As long again"] = f"{again} --resume auto --max-steps {2 * config['max_steps']}"
    if config["preset"] == "quickstart":
        own = "--data-dir data/mine"
        mine = "--log-dir log/mine --sample-prompt 'The '"
        steps["Your own text"] = f"python fineweb.py --source my.txt {own}"
        steps["  then"] = f"python train_gpt2.py --preset quickstart {own} {mine}"
        steps["GPT-2 itself"] = "python fineweb.py && python train_gpt2.py"
    return steps


def last_words(records: list[dict], report: Path) -> str:
    """What a reader of the console sees last: first samples beside the last, files, next steps."""
    lines = [""]
    samples = first_and_last(records, "samples")
    if len(samples) == 2:
        first, last = samples
        width = min(shutil.get_terminal_size().columns, 120) // 2 - 2
        heads = [f"-- after {record['step']:,} updates" for record in samples]
        lines.append(side_by_side(heads[0], heads[1], width))
        for then, now in list(zip(first["samples"], last["samples"], strict=False))[:2]:
            lines += [side_by_side(then, now, width), ""]
    rows = {"The curve": str(report.with_name("loss.png")), "The report": str(report)}
    for what, typed in next_steps(records).items():
        rows[what] = re.sub(r"\bpython (?=\w+\.py\b)", lambda _: f"{python_here()} ", typed)
    longest = max(map(len, rows)) + 1
    return "\n".join(lines + [f"{what + ':':<{longest}}  {row}" for what, row in rows.items()])


def python_here() -> str:
    """How this Python is called from the current directory."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        return str(python.relative_to(Path.cwd()))
    return "python"


def side_by_side(left: str, right: str, width: int) -> str:
    """Two texts in columns of `width` characters; lines that are longer end with …"""
    columns = [cut(text, width) for text in (left, right)]
    rows = zip_longest(*columns, fillvalue="")
    return "\n".join(f"{then:<{width}}    {now}".rstrip() for then, now in rows)


def cut(text: str, width: int) -> list[str]:
    """The lines of a text; of longer ones the first `width` - 1 characters and …"""
    lines = text.expandtabs(4).splitlines()
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]


def main() -> None:
    if len(sys.argv) != 2:
        raise UserError("name the directory of one run: python -m support.ending log/quickstart")
    say(str(write_report(sys.argv[1])))


if __name__ == "__main__":
    run_script(main)

"""What a run says about itself: at its start, in `report.md`, and as its last words."""

from __future__ import annotations

import platform
import shlex
import statistics
import time
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from support.base.console import counted, duration
from support.base.files import write_whole
from support.base.process import command_for, revision
from support.machine.device import device_name, dtype_name
from support.run.log import measured_alike, read_run, starts_of
from support.show.plots import average
from support.show.published import beside_openai, text_of
from support.text.names import ALWAYS_THERE

if TYPE_CHECKING:
    from config import TrainConfig
    from model import DataLoaderLite
    from support.machine.distributed import World
    from support.run.checkpoint import Progress


def describe_run(
    settings: dict[str, Any], world: World, dtype: torch.dtype, batch_size: int, command: str
) -> dict[str, Any]:
    """The first line of metrics.jsonl, so that every number can be traced."""
    device: dict = dict(type=world.device.type, name=device_name(world.device))
    device |= dict(processes=world.size, threads=torch.get_num_threads())
    return {
        "config": settings,
        "command": command,
        "git": revision(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": device,
        "dtype": dtype_name(dtype),
        "batch_size": batch_size,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "launch": world.launches(),
    }


def describe_batch(config: TrainConfig, processes: int, train: DataLoaderLite) -> str:
    """What is trained on, and how a step is divided."""
    total = config.total_batch_size
    accumulation = total // (train.B * train.T * processes)
    steps = train.epoch_tokens / total  # of an epoch
    return (
        f"train: {counted(len(train.shards), 'shard')}, {train.num_tokens:,} tokens in "
        f"{config.data_dir}\n"
        f"batch: B {train.B} × T {train.T} × accumulation {accumulation} × ranks {processes} "
        f"= {total:,} tokens\nrun: {counted(config.max_steps, 'step')}, {config.warmup_steps:,} of "
        f"warm-up; {config.max_steps / steps:.2f} epochs of {steps:,.1f} steps"
    )


def write_report(log_dir: str | Path, has_curve: bool) -> None:
    """Writes log_dir/report.md, a page about a run. has_curve: whether loss.png shows all of it."""
    log_dir = Path(log_dir)
    run = read_run(log_dir)
    records = run.records
    starts = starts_of(records)
    kind = "A changed GPT-2" if starts[-1].get("difference") else "GPT-2"
    title = f"# {kind} of {run.config['n_layer']} layers and {run.config['n_embd']} channels"
    rows = [f"| {name} | {figure} |" for name, figure in figures(records, starts[-1]).items()]
    commands = "\n".join(f"{start['time']}  {start['command']}" for start in starts)
    parts = [
        f"{title}, on {text_of(run.config)}",
        "![training and validation loss](loss.png)" if has_curve else "",
        "\n".join(["| | |", "|---|---|", *rows]),
        "## Commands",
        indent(commands, "    "),  # code, in Markdown
    ]
    scores = beside_openai(run).items()
    if any(theirs for _, (_, theirs) in scores):
        parts.append("## Beside OpenAI's model of this size")
        lines = ["| | this run | OpenAI's | difference |", "|---|---|---|---|"]
        for name, (own, theirs) in scores:
            cells = f"{theirs:.4f} | {own - theirs:+.4f}" if theirs else " | "
            lines.append(f"| {name} | {own:.4f} | {cells} |")
        parts.append("\n".join(lines))
    samples = [format_samples(record) for record in of_type(records, "samples")]
    if len(samples) > 3:  # those between are there for who wants to see more
        between = f"<details><summary>samples at {len(samples) - 2} steps between</summary>"
        samples = [samples[0], between, *samples[1:-1], "</details>", samples[-1]]
    parts += samples
    write_whole(log_dir / "report.md", ("\n\n".join(filter(None, parts)) + "\n").encode())


def format_samples(record: dict) -> str:
    texts = [indent(text.rstrip(), "    ") for text in record["samples"]]
    return "\n\n".join([f"## Samples after {record['step']:,} updates", *texts])


def of_type(records: list[dict], type: str) -> list[dict]:
    return [record for record in records if record["type"] == type]


def figures(records: list[dict], about: dict) -> dict[str, str]:
    """A run in figures: {name: figure and unit}. about: the record of its last start."""
    rows = {"parameters": f"{about['parameters']:,}"}
    at_end = [record for record in records if record.get("step") == records[-1].get("step")]
    if updates := of_type(records, "train"):
        last = (of_type(records, "end") or updates)[-1]
        here = [u for u in updates if u["step"] >= about.get("step", 0)] or updates  # its machine
        speed = statistics.median(update["tokens_per_sec"] for update in here)
        losses = [u["loss"] for u in updates if u["loss"] is not None]
        loss = average(np.array(losses))[0][-1]  # one alone is noisy
        memory = max(record["memory"] for record in [*updates, last])
        rows["training"] = f"{len(updates):,} updates, {updates[-1]['tokens']:,} tokens"
        rows["time"] = f"{duration(last['wall'])} (hours:minutes:seconds), with evaluations"
        rows["speed"] = f"{speed:,.0f} tokens/s: median of the updates"
        if mfus := [update["mfu"] for update in here if "mfu" in update]:
            rows["MFU"] = f"{statistics.median(mfus):.1%}: median of the updates"
        rows["memory"] = f"{memory / 1e9:.2f} GB at most, in one process"
        rows["training loss"] = f"{loss:.4f}, a mean of the last updates"
        if vals := of_type(at_end, "val"):
            gap = vals[-1]["val_loss"] - loss
            rows["validation minus training"] = f"{gap:+.4f}: grows as the model memorizes its text"
        if best := last.get("best"):
            rows["best checkpoint"] = describe_best(best)
            vals = measured_alike(records, "val")
            lowest = min(vals, key=lambda val: val["val_loss"], default=best)
            if lowest["step"] != best["step"]:
                lost = f"step {lowest['step']:,} had {lowest['val_loss']:.4f}"
                rows["best checkpoint"] += f" of those saved; {lost}"
    for record in at_end:
        rows |= {name.rstrip(":"): figure for name, figure in record.get("figures", {}).items()}
        if record.get("nats_per_character"):
            rows["nats/character"] = f"{record['nats_per_character']:.4f}"
    machine = about["device"]
    processes = counted(machine["processes"], "process", "es")
    rows["machine"] = f"{machine['name']}; {processes} × {counted(machine['threads'], 'thread')}"
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    rows["code"] = f"revision {about['git'] or 'unknown'}; {about['dtype']}; {versions}"
    return rows


def describe_best(best: dict[str, Any]) -> str:
    """best: the step and the loss of the checkpoint with the lowest validation loss."""
    return f"ckpt_{best['step']:06d}, with the lowest validation loss: {best['loss']:.4f}"


def last_words(config: TrainConfig, last_saved: Path | None, progress: Progress) -> str:
    """How well it predicts text, where report, curve and checkpoint are, and what to run next."""
    log_dir = config.log_dir
    lines = {}
    if bits := progress.losses.get("validation, bits per byte"):
        nats = progress.losses["validation, nats per character"]
        lines["Held-out text:"] = f"{bits:.3f} bits per byte = {nats:.3f} nats per character"
    lines["The report:"] = f"{log_dir}/report.md"
    if Path(log_dir, "loss.png").exists():
        lines["The curve:"] = f"{log_dir}/loss.png"
    if progress.best:
        lines["The best:"] = f"{log_dir}/{describe_best(progress.best)}"
    if last_saved:
        where = ["--model", str(last_saved)]
        if not config.sample_prompt.startswith(("@", "-")):  # else it is sample.py's own by default
            where += ["--prompt", config.sample_prompt]
        lines["Sample it:"] = f"{command_for('sample.py')} {shlex.join(where)}"
    if text_of({"data_dir": config.data_dir}) in ALWAYS_THERE:
        text = "--source my.txt --vocab-size auto"
        mine = "--data-dir data/mine"
        lines["Your own text:"] = f"{command_for('fineweb.py')} {text} {mine}"
        lines["  then"] = f"{command_for('train_gpt2.py')} --minutes 20 {mine} --log-dir log/mine"
        lines["GPT-2 itself:"] = f"{command_for('plan.py')} (hours and dollars on GPUs)"
    return "\n".join(["", *(f"{name:16}{line}" for name, line in lines.items())])

"""What a run says about itself: at its start, in `report.md`, and as its last words."""

import dataclasses
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

from support.common import duration, write_whole
from support.device import device_name, dtype_name
from support.log import RECENT, read_metrics, starts_of

# -- at the start


def command(*more: str) -> str:
    """What was typed to start this run, and more flags."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    launcher = "python"
    if size > local:
        launcher = (
            f"torchrun --nnodes={size // local} --nproc_per_node={local} "
            "--rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"
        )
    elif size > 1:
        launcher = f"torchrun --standalone --nproc_per_node={size}"
    return f"{launcher} {shlex.join(['train_gpt2.py', *sys.argv[1:], *more])}"


def command_to_resume() -> str:
    given = [value for flag, value in pairwise(sys.argv) if flag == "--resume"]
    return command() if given[-1:] == ["auto"] else command("--resume", "auto")


def revision() -> str:
    """The commit of this code, marked if it was changed since; empty without git."""
    if not shutil.which("git"):
        return ""
    asked = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent.parent
    return subprocess.run(asked, capture_output=True, text=True, cwd=here).stdout.strip()


def describe_run(config, world, dtype: torch.dtype, batch_size: int) -> dict:
    """The first line of metrics.jsonl, so that every number can be traced."""
    return {
        "config": dataclasses.asdict(config),
        "command": command(),
        "git": revision(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": {
            "type": world.device.type,
            "name": device_name(world.device),
            "processes": world.size,
            "threads": torch.get_num_threads(),
        },
        "dtype": dtype_name(dtype),
        "batch_size": batch_size,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "launch": world.agents(),
    }


def describe_batch(config, processes: int, train, val) -> str:
    """What is trained on and how a step is divided. train, val: the loaders."""
    B, T = train.B, train.T
    total = config.total_batch_size
    steps = train.num_sequences * T / total  # of an epoch
    lines = [
        f"train: {len(train.shards)} shard(s), {train.num_tokens:,} tokens in {config.data_dir}",
        f"batch: B {B} × T {T} × accumulation {total // (B * T * processes)} × ranks {processes} "
        f"= {total:,} tokens; an epoch is {steps:,.1f} steps, the run {config.max_steps:,} steps "
        f"or {config.max_steps / steps:.2f} epochs",
    ]
    if val and config.val_tokens > val.num_sequences * T:
        lines.append(
            f"val: the split is smaller than val_tokens {config.val_tokens:,}: all of it is used"
        )
    return "\n".join(lines)


# -- at the end


def write_report(log_dir: str | Path) -> None:
    """Writes log_dir/report.md, a page about a run, from its metrics.jsonl."""
    log_dir = Path(log_dir)
    records = read_metrics(log_dir / "metrics.jsonl")
    starts = starts_of(records)
    about = starts[-1]
    model = about["model"]
    rows = [f"| {what} | {figure} |" for what, figure in figures(records, about).items()]
    commands = [f"{start['time']}  {start['command']}" for start in starts]
    parts = [
        f"# GPT-2 of {model['n_layer']} layers and {model['n_embd']} channels, "
        f"on {Path(about['config']['data_dir']).name}",
        "![training and validation loss](loss.png)",
        "\n".join(["| | |", "|---|---|", *rows]),
        "## Commands",
        as_code("\n".join(commands)),
    ]
    samples = of_type(records, "samples")
    for record in samples[:1] + samples[1:][-1:]:
        parts.append(f"## Samples after {record['step']:,} updates")
        parts += [as_code(text) for text in record["samples"]]
    write_whole(log_dir / "report.md", ("\n\n".join(parts) + "\n").encode())


def of_type(records: list[dict], type: str) -> list[dict]:
    return [record for record in records if record["type"] == type]


def figures(records: list[dict], about: dict) -> dict[str, str]:
    """A run in figures: {what: figure and unit}. about: the record of its last start."""
    found = {"parameters": f"{about['parameters']:,}"}
    if updates := of_type(records, "train"):
        last = (of_type(records, "end") or updates)[-1]
        speed = statistics.median(update["tokens_per_sec"] for update in updates)
        losses = [update["loss"] for update in updates[-RECENT:]]
        found["training"] = f"{len(updates):,} updates, {updates[-1]['tokens']:,} tokens"
        found["time"] = f"{duration(last['wall'])} (hours:minutes:seconds), with evaluations"
        found["speed"] = f"{speed:,.0f} tokens/s: median of the updates"
        if mfus := [update["mfu"] for update in updates if "mfu" in update]:
            found["MFU"] = f"{statistics.median(mfus):.1%}: median of the updates"
        found["memory"] = f"{last['memory'] / 1e9:.2f} GB at most, on one process"
        found["training loss"] = f"{statistics.fmean(losses):.4f}, mean of the last {len(losses)}"
    for record in of_type(records, "val")[-1:]:
        found["validation loss"] = f"{record['val_loss']:.4f} nats per token"
        found["perplexity"] = f"{record['perplexity']:.2f}"
        if "bits_per_byte" in record:  # older runs have none
            found["bits per byte"] = f"{record['bits_per_byte']:.4f}"
    for record in of_type(records, "hella")[-1:]:
        found["HellaSwag"] = f"{record['hellaswag']:.4f} of {record['total']:,}; chance is 0.25"
    device = about["device"]
    processes = f"{device['processes']} process(es), {device['threads']} CPU threads each"
    versions = [f"{name} {version}" for name, version in about["versions"].items()]
    found["machine"] = f"{device['name']}; {processes}"
    found["code"] = f"revision {about['git'] or 'unknown'}; {about['dtype']}; {', '.join(versions)}"
    return found


def as_code(text: str) -> str:
    """A text as a Markdown code block: shown verbatim."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines()).rstrip()


def last_words(config) -> str:
    """Where the curve and report are, and what to run next."""
    python = "python"
    if Path(sys.executable).is_relative_to(Path.cwd()):  # perhaps not activated
        python = str(Path(sys.executable).relative_to(Path.cwd()))
    lines = ["", f"The report:     {config.log_dir}/report.md"]
    if Path(config.log_dir, "loss.png").exists():
        lines.append(f"The curve:      {config.log_dir}/loss.png")
    if config.checkpoint_every:
        model = f"{config.log_dir}/ckpt_{config.max_steps:06d}"
        prompt = shlex.quote(config.sample_prompt)
        lines.append(f"Sample it:      {python} sample.py --model {model} --prompt {prompt}")
    if config.preset == "quickstart":
        mine = "--data-dir data/mine"
        train = f"{python} train_gpt2.py --preset quickstart {mine} --log-dir log/mine"
        lines.append(f"Your own text:  {python} fineweb.py --source my.txt {mine}")
        lines.append(f"  then          {train} --sample-prompt 'The '")
        lines.append(f"GPT-2 itself:   {python} fineweb.py && {python} train_gpt2.py")
    return "\n".join(lines)

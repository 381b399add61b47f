"""Estimates a training run before you pay for it: memory, hours, cost, disk.

python plan.py --preset gpt2-xl --gpus 8 --gpu H100    takes all flags of train_gpt2.py, too
python plan.py --record log/bench.json                 at the speed that bench.py measured
python plan.py --minutes 60 --gpu T4                   what --minutes would choose there
python plan.py --table                                 the presets for GPUs, on 1 and 8 of them
"""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import minutes
from benchmarks.tables import by_turns
from config import (
    GPT2_SIZES,
    PRESETS,
    TrainConfig,
    parse_command_line,
    refuse_other_sizes,
    wrong_sizes,
)
from support.base.console import duration, run_script
from support.base.errors import UsageError
from support.base.flags import Amount, Count, CountOrZero, Fraction, String, flag_of, out_of_range
from support.run.log import HELLASWAG
from support.text.token_files import open_data
from support.text.tokenizer import tokenizer_of_data

if TYPE_CHECKING:
    from model import GPT

# Billions of tokens that llm.c's scripts/run_gpt2_*.sh train GPT-2 on, by n_layer and n_embd.
LLM_C = {(12, 768): 10, (24, 1024): 31.5, (36, 1280): 150, (48, 1600): 32}
RENT = {"H100": 2.5}  # dollars per GPU-hour: our assumption, roughly what clouds listed in 2025
PUBLISHED_MFU = (0.41, 0.29)  # docs/reproduction.md has their sources
HELLASWAG_TOKENS = 2_000_000  # of all its examples
SAMPLING = 1.2e-3  # seconds of a layer for a token, eager: an assumption
PICTURE = 1.5  # seconds for which all GPUs wait


@dataclass(frozen=True)
class Estimate:
    """What is estimated, and for which GPUs."""

    vocab_size: CountOrZero = 0  # vocabulary size; 0 = that of data_dir if it exists, else GPT-2's
    gpus: Count = 1  # how many GPUs, each with its own process
    gpu: str = "H100"  # H100 | H200 | B200 | A100 | L4 | RTX-4090 | …; a wrong name lists them all
    # the fraction of the GPU's published peak that training reaches: published are 29% to 41%; one
    # H200 reached 45% here
    mfu: Fraction = 0.4
    record: String = ""  # a JSON file of bench.py from such a GPU: its best MFU replaces the guess
    tokens_per_second: Amount = 0.0  # the measured speed of all GPUs together; 0 = from the MFU
    price: Amount = 0.0  # dollars per GPU-hour: look up yours; 0 = 2.5 for an H100, else unknown
    table: bool = False  # print the presets on 1 and 8 of these GPUs instead, in Markdown


@dataclass(frozen=True)
class PlanConfig(TrainConfig, Estimate):
    """Estimate what a training run needs. Takes every flag of training, too, and trains nothing."""


def plan_run(config: PlanConfig) -> dict[str, tuple[str, str]]:
    """Each estimate in words, with a note. Raises UsageError with all problems."""
    from support.machine.device import GPUS  # needs torch, and --help should not wait for that
    from support.machine.memory import state_memory

    problems = out_of_range(config)
    if config.gpu not in GPUS:
        problems.append(f"--gpu {config.gpu!r} is not known: use {', '.join(GPUS)}")
    speeds = {"mfu", "record", "tokens_per_second"} & config.typed
    if len(speeds) > 1:
        flags = " and ".join(map(flag_of, sorted(speeds)))
        problems.append(f"{flags} each set the speed: choose one")
    if config.minutes and config.tokens_per_second:
        problems.append("--tokens-per-second is of one model, --minutes chooses it: give --mfu")
    if config.eval_only:
        problems.append("--eval-only trains nothing: leave it out to plan a training run")
    if config.minutes and not problems:
        config = choose_for_minutes(config, GPUS[config.gpu])
    problems = problems or wrong_sizes(config, config.gpus)
    if problems:
        raise UsageError(*problems)
    model = model_on_meta(config)
    shape = model.config
    N = model.num_params()
    tokens = config.max_steps * config.total_batch_size
    per_parameter = f"{tokens / N:.2g}"
    if llm_c := LLM_C.get((shape.n_layer, shape.n_embd)):
        per_parameter += f" (llm.c: {1e9 * llm_c / N:.0f}, of {llm_c}B)"
    rate, source = find_rate(config, GPUS[config.gpu], model.flops_per_token(shape.block_size))
    if config.minutes:  # its small updates may wait for launches
        rate = min(rate, config.total_batch_size / minutes.LAUNCHING)
    saved = state_memory(model, config, width=4)
    checkpoint = saved["weights"] + saved["optimizer state"]
    kept = config.keep_checkpoints + 1 + (config.val_every > 0)  # one is written, one is the best
    total = f"{tokens / 1e9:.1f}B" if tokens >= 1e9 else f"{tokens / 1e6:.1f}M"
    sizes = f"{shape.n_layer} layers of {shape.n_embd}, T {shape.block_size}"
    facts = {
        "parameters": (f"{N:,}", f"{sizes}, V {shape.vocab_size:,}"),
        "tokens": (total, f"{config.max_steps:,} steps of {config.total_batch_size:,}"),
        "tokens per parameter": (per_parameter, ""),
        **plan_memory(config, model, GPUS[config.gpu][1]),
        "speed": (f"{rate:,.0f} tokens/s", source),
        **plan_cost(config, estimate_seconds(config, rate), find_range(config, rate)),
        "checkpoint": (show_bytes(checkpoint), f"{kept} of them: {show_bytes(kept * checkpoint)}"),
        "data": (show_bytes(2 * tokens), "if each token is read once"),
    }
    if config.minutes:
        facts["flags"] = (shlex.join(config.as_flags()), "")
    return facts


def model_on_meta(config: PlanConfig) -> GPT:
    """The model that training would build, on PyTorch's meta device, where it takes no memory."""
    import torch

    from model import GPT, GPTConfig
    from support.weights.hf import load_weights, read_fields

    flags = GPTConfig.fields_from(config, find_vocab_size(config))
    files: dict = {}
    if config.init_from in GPT2_SIZES:
        files = {"block_size": 1024, **GPT2_SIZES[config.init_from]}
    elif config.init_from != "scratch":
        files = read_fields(config.init_from)
    theirs = flags | files | GPTConfig.same_math_from(config)
    with torch.device("meta"):
        model = GPT(GPTConfig(**(theirs | {"block_size": config.sequence_length})))
        if files:  # training's own checks
            saved = GPT(GPTConfig(**(theirs | {"pad_vocab_to": 1})))
            load_weights(model, files, dict(saved.named_parameters()))
            refuse_other_sizes(config.init_from, model.config, config)
    return model


def choose_for_minutes(config: PlanConfig, gpu: tuple) -> PlanConfig:
    """The settings that --minutes would choose at the planned speed, with no time for start-up."""
    seconds = 60 * minutes.TIME_TO_USE * config.minutes
    per_second, _ = find_rate(config, gpu, flops=1)
    text = open_data(config.data_dir, "train") if Path(config.data_dir).is_dir() else None
    most_tokens = minutes.MOST_EPOCHS * text.num_tokens("train") if text else math.inf
    limits = dict(most_tokens=most_tokens, most_updates=seconds / minutes.LAUNCHING)
    vocab_size = find_vocab_size(config)
    config = minutes.with_sizes(config, seconds * per_second, vocab_size, config.gpus, **limits)
    rate, _ = find_rate(config, gpu, model_on_meta(config).flops_per_token(config.sequence_length))
    val = {"val": (config.val_tokens / 3 / rate, config.val_every)} if config.val_every else {}
    update = max(config.total_batch_size / rate, minutes.LAUNCHING)
    steps, times = minutes.divide_time(config, seconds, update, val)
    steps_of_text = most_tokens / config.total_batch_size
    steps = max(1, int(min(steps, steps_of_text)))
    epochs = minutes.MOST_EPOCHS * steps / steps_of_text
    every = dict.fromkeys(minutes.TIMED_FLAGS.values(), math.ceil(steps / times))
    return minutes.with_recipe(config, steps, epochs, **every)


def find_vocab_size(config: PlanConfig) -> int:
    return config.vocab_size or tokenizer_of_data(config.data_dir).vocab_size


def plan_memory(config: PlanConfig, model: GPT, gigabytes: int) -> dict[str, tuple[str, str]]:
    """The micro-batch, and the memory that it needs on a GPU of this many gigabytes, in words."""
    from support.machine.memory import estimate_memory, largest_batch, room_on_gpu

    width = 4 if config.dtype == "float32" else 2
    shards = min(config.gpus, 8)  # of one node: see World
    estimate = partial(estimate_memory, model, config, width=width, device="cuda", processes=shards)
    room = room_on_gpu(1e9 * gigabytes, estimate(1)["weights"], config.sharding)
    sequences = config.total_batch_size // config.sequence_length // config.gpus
    B = config.batch_size or largest_batch(sequences, lambda B: sum(estimate(B).values()) <= room)
    sizes = estimate(B)
    needed = sum(sizes.values())
    total = f"{needed / 1e9:.0f} GB" if needed >= 1e10 else show_bytes(needed)
    note = f"of {gigabytes} GB, for an eager step; a compiled one needs less"
    if needed > room:
        total += ": too much"
        note = f"of {gigabytes} GB: --batch-size 0, --activation-checkpointing, --sharding fsdp"
    return {
        "B × accumulation": (f"{B} × {sequences // B}", ""),
        "memory per GPU": (total, note),
        **{f"  {part}": (show_bytes(size), "") for part, size in sizes.items()},
    }


def show_bytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def estimate_seconds(config: PlanConfig, rate: float) -> float:
    """Seconds of the whole run at this many tokens a second of all GPUs, without start-up."""

    def how_many(every: int) -> int:  # at step 0, …, at the end
        return 1 + math.ceil(config.max_steps / every) if every else 0

    tokens = float(config.max_steps * config.total_batch_size)
    tokens += how_many(config.val_every) * config.val_tokens / 3  # without backward pass: a third
    # batches of a few rows are as slow as if they were trained on
    share = (config.hellaswag_limit or HELLASWAG) / HELLASWAG
    tokens += how_many(config.hellaswag_every) * share * HELLASWAG_TOKENS
    seconds = tokens / rate
    seconds += how_many(config.sample_every) * config.sample_tokens * config.n_layer * SAMPLING
    return seconds + PICTURE * min(seconds / 120, how_many(config.val_every))  # at validations


def find_range(config: PlanConfig, rate: float) -> str:
    """The time of the run at the lowest and highest MFU that others published, in words."""
    if {"mfu", "record", "tokens_per_second", "minutes"} & config.typed:
        return ""
    low, high = (estimate_seconds(config, rate / config.mfu * mfu) for mfu in PUBLISHED_MFU)
    percent = " to ".join(f"{mfu:.0%}" for mfu in PUBLISHED_MFU)
    return f"; at the published MFUs, {percent}: {duration(low)} to {duration(high)}"


def plan_cost(config: PlanConfig, seconds: float, spread: str) -> dict[str, tuple[str, str]]:
    """The time and, if the rent is known, the cost in words. Under a minute, nothing is exact."""
    under = "under " if seconds < 60 else ""
    seconds = max(60, seconds)
    cost = ("unknown", "give --price, the dollars per GPU-hour")
    if price := config.price or RENT.get(config.gpu):
        whose = "" if config.price else "our assumption, "
        note = f"at ${price:.2f} per GPU-hour, {whose}see --price"
        cost = (f"{under}${price * config.gpus * seconds / 3600:,.2f}", note)
    return {"time": (f"{under}{duration(seconds)}", f"with evaluations{spread}"), "cost": cost}


def find_rate(config: PlanConfig, gpu: tuple, flops: int) -> tuple[float, str]:
    """Tokens per second of all GPUs at this many operations per token, and the number's source."""
    if config.tokens_per_second:
        return config.tokens_per_second, "given by --tokens-per-second"
    name, _, _, tf32, half, source = gpu
    peak = tf32 if config.dtype == "float32" else half
    mfu = config.mfu
    why = "assumed, see --mfu"
    if config.record:
        mfu, why, dtype = read_mfu(config.record, name)
        if (dtype == "float32") != (config.dtype == "float32"):
            raise UsageError(f"--record {config.record} is of {dtype}: give --dtype {dtype}")
    if config.activation_checkpointing:
        mfu *= 3 / 4
        why += "; three quarters of it, because the forward pass runs twice"
    rate = mfu * 1e12 * peak * config.gpus / flops
    return rate, f"MFU {mfu:.1%} of {peak:,.0f} TFLOP/s (NVIDIA {source}): {why}"


def read_mfu(path: str, gpu: str) -> tuple[float, str, str]:
    """The MFU of the fastest training in a record of bench.py, its source, and its dtype."""
    try:
        record = json.loads(Path(path).read_text())
        name = record["device"]["name"]
        dtype = record["dtype"]
        rows = record["benchmarks"]["ladder"]["rows"]
        measured = [row for row in by_turns(rows) if "MFU" in row]
        best = max(measured, key=lambda row: row["median"])
        why = f"measured with {record['config']['model']}, {best['name']!r}, {path}"
    except Exception as e:
        raise UsageError(f"--record {path} is no record of bench.py's steps: {e}") from e
    if not re.fullmatch(gpu, name):
        advice = f"--gpu means {gpu!r}: make them agree, or give --mfu"
        raise UsageError(f"--record {path} is of {name!r}, {advice}")
    return best["MFU"], why, dtype


def print_table(args: list[str]) -> None:
    """Prints a row for each preset with the other flags: on 1 GPU, and on 8 where that differs."""
    columns = ["parameters", "tokens", "tokens per parameter", "B × accumulation"]
    columns += ["memory per GPU", "time", "cost", "checkpoint"]
    print(f"| `--preset` | {' | '.join(columns)} |")
    print("|---" * (1 + len(columns)) + "|")
    for name in PRESETS:
        if name in ("quickstart", "laptop"):  # they are for a CPU
            continue
        plans = []
        for gpus in ("1", "8"):
            flags = [*args, "--preset", name, "--gpus", gpus]
            plans.append(plan_run(parse_command_line(flags, PlanConfig)))
        cells = [" / ".join(dict.fromkeys(plan[column][0] for plan in plans)) for column in columns]
        print(f"| `{name}` | {' | '.join(cells)} |")


def main(args: list[str]) -> None:
    config = parse_command_line(args, PlanConfig)
    if config.table:
        print_table(args)
        return
    facts = plan_run(config)
    what = f"--minutes {config.minutes:g}" if config.minutes else config.preset
    why = ""
    if config.minutes and "gpu" not in config.typed:
        why = " (--gpu names another; train_gpt2.py --minutes measures the machine that it runs on)"
    print(f"{what} on {config.gpus} × {config.gpu}, {config.sharding}{why}\n")
    for name, (fact, note) in facts.items():
        print(f"{name:22}{fact:24}{note}".rstrip())


if __name__ == "__main__":
    run_script(main)

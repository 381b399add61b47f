"""Estimates a training run before you pay for it: memory, hours, cost, disk.

python plan.py --preset gpt2-xl --gpus 8 --gpu H100    takes all flags of train_gpt2.py, too
python plan.py --record log/bench.json                 at the speed that bench.py measured
python plan.py --table                                 the presets for GPUs, on 1 and 8 of them
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from config import GPT2_SIZES, PRESETS, TrainConfig, out_of_range, parse_command_line, wrong_sizes
from support.common import UserError, duration, first_line, run_script

# Billions of tokens that llm.c's scripts/run_gpt2_*.sh train GPT-2 on, by n_layer and n_embd.
LLM_C = {(12, 768): 10, (24, 1024): 31.5, (36, 1280): 150, (48, 1600): 32}
# Dollars per GPU-hour: an assumption of ours, roughly what on-demand clouds listed in 2025
RENT = {"H100": 2.5}


@dataclass
class PlanConfig(TrainConfig):
    """Estimate what a training run needs. Takes every flag of training, too, and trains nothing."""

    gpus: int = 1  # how many GPUs, each with its own process
    gpu: str = "H100"  # H100 | H200 | B200 | A100 | L4 | RTX-4090 | …; a wrong name lists them all
    mfu: float = 0.4  # the part of the GPU's published peak that training reaches: a guess
    record: str = ""  # a JSON file of bench.py from such a GPU: its best MFU replaces the guess
    tokens_per_second: float = 0.0  # measured, of all GPUs together; 0 = computed from the MFU
    price: float = 0.0  # dollars per GPU-hour: look up yours; 0 = 2.5 for an H100, else unknown
    table: bool = False  # print the presets on 1 and 8 of these GPUs instead, in Markdown


PLAN_RANGES = [  # as config.RANGES
    ("gpus", lambda x: x >= 1, "at least 1"),
    ("mfu", lambda x: 0 < x <= 1, "above 0, at most 1"),
    ("tokens_per_second price", lambda x: x >= 0, "0 or more"),
]


def describe(config: PlanConfig) -> dict[str, tuple[str, str]]:
    """Each estimate in words, with a note. Raises UserError with all problems of the settings."""
    from support.device import GPUS  # needs torch, and --help should not wait for that
    from support.memory import state_memory

    problems = out_of_range(config) + out_of_range(config, PLAN_RANGES)
    if config.gpu not in GPUS:
        problems.append(f"--gpu {config.gpu!r} is not known: use {', '.join(GPUS)}")
    problems = problems or wrong_sizes(config, config.gpus)
    if problems:
        raise UserError("; ".join(problems))
    model = build_model(config)
    shape = model.config
    N = model.num_params()
    tokens = config.max_steps * config.total_batch_size
    per_parameter = f"{tokens / N:.2g}"
    if llm_c := LLM_C.get((shape.n_layer, shape.n_embd)):
        per_parameter += f" (llm.c: {1e9 * llm_c / N:.0f}, of {llm_c}B)"
    rate, source = find_rate(config, GPUS[config.gpu], model.flops_per_token(shape.block_size))
    validations = 0
    if config.val_every:
        validations = 1 + math.ceil(config.max_steps / config.val_every)  # at step 0, …, at the end
    # Without a backward pass, a token takes a third of the operations.
    seconds = (tokens + validations * config.val_tokens / 3) / rate
    saved = state_memory(shape, config, width=4)
    gigabytes = (saved["weights"] + saved["moments"]) / 1e9
    kept = config.keep_checkpoints + 1 + (validations > 0)  # one being written, and the best one
    return {
        "parameters": (f"{N:,}", ""),
        "tokens": (
            f"{tokens / 1e9:.1f}B" if tokens >= 1e9 else f"{tokens / 1e6:.1f}M",
            f"{config.max_steps:,} steps of {config.total_batch_size:,}",
        ),
        "tokens per parameter": (per_parameter, ""),
        **plan_memory(config, shape, GPUS[config.gpu][1]),
        "speed": (f"{rate:,.0f} tokens/s", source),
        **plan_cost(config, seconds),
        "checkpoint": (f"{gigabytes:.1f} GB", f"{kept} of them: {kept * gigabytes:.1f} GB"),
        "data": (f"{2 * tokens / 1e9:.1f} GB", "if each token is read once"),
    }


def build_model(config: PlanConfig):
    """The run's model, on PyTorch's meta device: it takes no memory."""
    import torch

    from model import GPT, GPTConfig
    from support.hf import read_fields, read_pt

    shape = {name: value for name, value in vars(config).items() if hasattr(GPTConfig, name)}
    if config.init_from in GPT2_SIZES:
        shape |= GPT2_SIZES[config.init_from]
    elif config.init_from.endswith(".pt"):
        shape |= read_pt(Path(config.init_from))[0]
    elif config.init_from != "scratch":
        shape |= read_fields(Path(config.init_from))
    shape["block_size"] = config.sequence_length
    with torch.device("meta"):
        return GPT(GPTConfig(**shape))


def plan_memory(config: PlanConfig, shape, gigabytes: int) -> dict[str, tuple[str, str]]:
    """The micro-batch, and the memory that it needs on each GPU of so many gigabytes, in words."""
    from support.memory import estimate_memory, largest_batch, room_on_gpu

    width = 4 if config.dtype == "float32" else 2
    shards = min(config.gpus, 8)  # of one node: see World

    def estimate(B: int) -> dict[str, int]:
        return estimate_memory(shape, config, B, width, "cuda", shards)

    room = room_on_gpu(1e9 * gigabytes, estimate(1)["weights"], config.sharding)

    def fits(B: int) -> bool:
        return sum(estimate(B).values()) <= room

    sequences = config.total_batch_size // config.sequence_length // config.gpus
    B = config.batch_size or largest_batch(sequences, fits)
    parts = estimate(B)
    total = f"{sum(parts.values()) / 1e9:.0f} GB"
    note = f"of {gigabytes} GB, for an eager step; a compiled one needs less"
    if not fits(B):
        total += ": too much"
        note = f"of {gigabytes} GB: --batch-size 0, --activation-checkpointing, --sharding fsdp"
    rows = {"B × accumulation": (f"{B} × {sequences // B}", ""), "memory per GPU": (total, note)}
    for part, size in parts.items():
        rows[f"  {part}"] = (f"{size / 1e9:.1f} GB", "")
    return rows


def plan_cost(config: PlanConfig, seconds: float) -> dict[str, tuple[str, str]]:
    """The time and, if the rent is known, the cost in words. Under a minute, nothing is exact."""
    under = "under " if seconds < 60 else ""
    seconds = max(60, seconds)
    cost = ("unknown", "give --price, the dollars per GPU-hour")
    if price := config.price or RENT.get(config.gpu):
        whose = "" if config.price else "our assumption, "
        note = f"at ${price:.2f} per GPU-hour, {whose}see --price"
        cost = (f"{under}${price * config.gpus * seconds / 3600:,.2f}", note)
    note = "with validation; without HellaSwag, samples, the start"
    return {"time": (f"{under}{duration(seconds)}", note), "cost": cost}


def find_rate(config: PlanConfig, gpu: tuple, flops: int) -> tuple[float, str]:
    """Tokens per second of all GPUs at this many operations per token, and the number's source."""
    if config.tokens_per_second:
        return config.tokens_per_second, "given by --tokens-per-second"
    name, _, _, float32, half, source = gpu
    peak = float32 if config.dtype == "float32" else half
    mfu = config.mfu
    why = "assumed, see --mfu"
    if config.record:
        peak = half
        mfu, why = read_mfu(config.record, name)
    elif config.activation_checkpointing:
        mfu *= 3 / 4
        why += "; three quarters of it, because the forward pass runs twice"
    why = f"MFU {mfu:.1%} of {peak:,.0f} TFLOP/s (NVIDIA {source}): {why}"
    return mfu * 1e12 * peak * config.gpus / flops, why


def read_mfu(path: str, gpu: str) -> tuple[float, str]:
    """The best MFU of training in a record of bench.py, and its source."""
    try:
        record = json.loads(Path(path).read_text())
        name = record["device"]["name"]
        rows = []
        for kind in ("ladder", "sweep", "scaling"):
            rows += record["benchmarks"].get(kind, {"rows": []})["rows"]
        best = max((row for row in rows if "MFU" in row), key=lambda row: row["MFU"])
        why = f"measured with {record['config']['model']}, {best['name']!r}, {path}"
    except Exception as e:
        raise UserError(f"--record {path} is no record of bench.py's steps: {first_line(e)}") from e
    if not re.fullmatch(gpu, name):
        raise UserError(f"--record {path} is of {name!r}, --gpu means {gpu!r}: make them agree")
    return best["MFU"], why


def print_page(config: PlanConfig) -> None:
    plan = describe(config)
    print(f"{config.preset} on {config.gpus} × {config.gpu}, {config.sharding}\n")
    for name, (fact, note) in plan.items():
        print(f"{name:22}{fact:24}{note}".rstrip())


def print_table(args: list[str]) -> None:
    """A row for each preset, with the other flags: on 1 GPU, and on 8 where that differs."""
    columns = ["parameters", "tokens", "tokens per parameter", "B × accumulation"]
    columns += ["memory per GPU", "time", "cost", "checkpoint"]
    print(f"| `--preset` | {' | '.join(columns)} |")
    print("|---" * (1 + len(columns)) + "|")
    for name in PRESETS:
        if name in ("quickstart", "laptop"):  # they are for a CPU
            continue
        plans = []
        for gpus in ("1", "8"):
            config = parse_command_line([*args, "--preset", name, "--gpus", gpus], PlanConfig)
            plans.append(describe(config))
        cells = [" / ".join(dict.fromkeys(plan[column][0] for plan in plans)) for column in columns]
        print(f"| `{name}` | {' | '.join(cells)} |")


def main() -> None:
    config = parse_command_line(sys.argv[1:], PlanConfig)
    if config.table:
        print_table(sys.argv[1:])
    else:
        print_page(config)


if __name__ == "__main__":
    run_script(main)

"""What a training run will need, before it is paid for: memory, hours, cost, disk.

python plan.py --preset gpt2-xl --gpus 8 --gpu H100    with any flag of train_gpt2.py besides
python plan.py --record log/bench.json                 at the speed that bench.py has measured
python plan.py --table                                 all presets on 1 and 8 GPUs, in Markdown
"""

import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from config import (
    GPT2_SIZES,
    PRESETS,
    RANGES,
    TrainConfig,
    out_of_range,
    parse_command_line,
    wrong_sizes,
)
from support.common import UserError, run_script
from support.memory import estimate_memory, largest_batch, room_on_gpu

# GB of memory, and the name of CUDA under which support/peaks.py has the peak: both are of the
# datasheet that it names there. (A B200 has 180 in the NVIDIA DGX B200 datasheet: 1,440 GB in 8.)
GPUS = {
    "B200": (180, "NVIDIA B200"),
    "H200": (141, "NVIDIA H200"),
    "H100": (80, "NVIDIA H100 80GB HBM3"),
    "H100-PCIe": (80, "NVIDIA H100 PCIe"),
    "A100": (80, "NVIDIA A100-SXM4-80GB"),
    "A100-40GB": (40, "NVIDIA A100-SXM4-40GB"),
    "V100": (32, "Tesla V100-SXM2-32GB"),
    "V100-16GB": (16, "Tesla V100-SXM2-16GB"),
    "T4": (16, "Tesla T4"),
    "L4": (24, "NVIDIA L4"),
    "RTX-5090": (32, "NVIDIA GeForce RTX 5090"),
    "RTX-4090": (24, "NVIDIA GeForce RTX 4090"),
    "RTX-3090": (24, "NVIDIA GeForce RTX 3090"),
}

# Billions of tokens that llm.c trained the sizes of GPT-2 on: its scripts/run_gpt2_*.sh.
LLM_C = {"gpt2": 10, "gpt2-medium": 31.5, "gpt2-large": 150, "gpt2-xl": 32}


@dataclass
class PlanConfig(TrainConfig):
    """What a training run will need. Trains nothing, and takes every flag of training besides."""

    # -- plan: The machine, its speed, its price.
    gpus: int = 1  # how many, each with a process of its own
    gpu: str = "H100"  # H100 | H200 | B200 | A100 | L4 | RTX-4090 | …; a wrong word lists them all
    mfu: float = 0.4  # the part of the GPU's published peak that training will reach: a guess
    record: str = ""  # a JSON file of bench.py from such a GPU: its best MFU instead of the guess
    tokens_per_second: float = 0.0  # measured, of all GPUs together; 0 = what MFU says
    price: float = 2.5  # dollars for an hour of one GPU: look up yours
    table: bool = False  # instead: all presets on 1 and 8 of these GPUs, in Markdown


PLAN_RANGES = [  # as config.RANGES
    ("gpus", lambda x: x >= 1, "at least 1"),
    ("n_layer", lambda x: x <= 10_000, "at most 10,000: each is built, without its memory"),
    ("mfu", lambda x: 0 < x <= 1, "above 0, at most 1"),
    ("tokens_per_second price", lambda x: x >= 0, "0 or more"),
]


class Plan:
    """What is known of a run before it begins. Raises UserError that names all that cannot be."""

    def __init__(self, config: PlanConfig):
        problems = find_problems(config)
        if problems:
            raise UserError("; ".join(problems))
        self.config = config
        model = build_model(config)
        self.shape = model.config
        self.num_params = model.num_params()
        self.sequences = config.total_batch_size // config.sequence_length // config.gpus
        self.batch_size = config.batch_size or largest_batch(self.sequences, self.fits)
        self.memory = self.estimate(self.batch_size)
        alone = self.estimate(1, processes=1, sharding="ddp")
        self.checkpoint = alone["weights"] + alone["moments"]  # bytes
        self.tokens = config.max_steps * config.total_batch_size
        flops = model.flops_per_token(config.sequence_length)
        self.rate, self.why = find_rate(config, flops)  # tokens a second of all GPUs
        self.seconds = (self.tokens + count_validation(config) / 3) / self.rate

    def estimate(self, B: int, **other) -> dict[str, int]:
        """Bytes of one GPU, by part."""
        c = self.config
        how: dict = dict(sharding=c.sharding, processes=c.gpus, muon=c.optimizer == "muon")
        width = 4 if c.dtype == "float32" else 2
        T = c.sequence_length
        return estimate_memory(self.shape, B=B, T=T, width=width, device="cuda", **(how | other))

    def fits(self, B: int) -> bool:
        """Whether a micro-batch of B sequences has room; trying it out may find room for more."""
        gigabytes, _ = GPUS[self.config.gpu]
        parts = self.estimate(B)
        room = room_on_gpu(1e9 * gigabytes, parts["weights"], self.config.sharding)
        return sum(parts.values()) <= room


def count_validation(c: PlanConfig) -> int:
    """Tokens that all validations read, at a third of the operations: there is no backward pass."""
    if not c.val_every:
        return 0
    return c.val_tokens * (1 + math.ceil(c.max_steps / c.val_every))  # at step 0, …, at the end


def find_problems(config: PlanConfig) -> list[str]:
    """What training would refuse, except for directories; and what is wrong with the plan's own."""
    problems = out_of_range(config, RANGES + PLAN_RANGES)
    if config.gpu not in GPUS:
        problems.append(f"--gpu {config.gpu!r} is not known: use {', '.join(GPUS)}")
    if config.device not in ("auto", "cuda"):
        problems.append(f"--device {config.device}: plans are for GPUs, leave this flag out")
    if config.record and config.dtype == "float32":
        problems.append("--record is read for 16 bits: with float32 use --tokens-per-second")
    return problems or wrong_sizes(config, config.gpus)


def build_model(config: PlanConfig):
    """The model of the run, which takes no memory."""
    import torch  # here, so that --help is there at once

    from model import GPT, GPTConfig

    names = [f.name for f in fields(GPTConfig)]
    shape = {name: getattr(config, name) for name in names if hasattr(config, name)}
    if config.init_from in GPT2_SIZES:
        shape |= GPT2_SIZES[config.init_from]
    elif config.init_from != "scratch":
        shape |= read_init_from(config.init_from)
    shape["block_size"] = config.sequence_length
    with torch.device("meta"):
        return GPT(GPTConfig(**shape))


def read_init_from(name: str) -> dict:
    """The fields of GPTConfig that --init-from gives. Raises UserError for a name on the hub."""
    from support.hf import read_fields, read_pt

    if name.endswith(".pt"):
        return read_pt(Path(name))[0]
    if not Path(name).is_dir():
        raise UserError(
            f"--init-from {name}: a plan asks no network; expected a directory, a .pt file, or one "
            f"of {', '.join(GPT2_SIZES)}"
        )
    return read_fields(Path(name))


def find_rate(config: PlanConfig, flops: int) -> tuple[float, str]:
    """Tokens a second of all GPUs at so many operations a token, and where that comes from."""
    if config.tokens_per_second:
        return config.tokens_per_second, "as --tokens-per-second says"
    import torch

    from support.peaks import published_peak

    _, gpu = GPUS[config.gpu]
    dtype = torch.float32 if config.dtype == "float32" else torch.float16
    peak, source = published_peak(gpu, dtype, tf32=True) or (0.0, "")
    mfu = config.mfu
    why = "assumed, see --mfu"
    if config.record:
        mfu, why = read_mfu(config.record, gpu)
    elif config.activation_checkpointing:
        mfu *= 3 / 4
        why += "; three quarters of it, as the forward pass is done twice"
    of = f"MFU {mfu:.1%} of {peak / 1e12:,.0f} TFLOP/s ({source})"
    return mfu * peak * config.gpus / flops, f"{of}: {why}"


def read_mfu(path: str, gpu: str) -> tuple[float, str]:
    """The best MFU of the training steps in a record of bench.py, of the peak in 16 bits."""
    from benchmarks.results import read_result

    result = read_result(path)
    name = result["device"]["name"]
    if name != gpu:
        raise UserError(f"--record {path} is of {name!r}, --gpu means {gpu!r}: use one for both")
    rows = []
    for kind in ("ladder", "sweep", "scaling"):
        rows += result["benchmarks"].get(kind, {"rows": []})["rows"]
    rows = [row for row in rows if "MFU bf16" in row]
    if not rows:
        raise UserError(f"--record {path} has no training step: make one with python bench.py")
    best = max(rows, key=lambda row: row["MFU bf16"])
    model = result["config"]["model"]
    return best["MFU bf16"], f"measured with {model}, {best['name']!r}, {path}"


# -- what is printed

COLUMNS = ["parameters", "tokens", "tokens a parameter", "B × accumulation"]
COLUMNS += ["memory a GPU", "time", "cost", "checkpoint"]
PARTS = {  # of the memory: what they are
    "weights": "in float32",
    "copies": "of the weights, in 16 bits or gathered by fsdp",
    "gradients": "of the micro-steps before",
    "buckets": "where DDP averages gradients",
    "moments": "of the optimizer",
    "activations": "kept for the backward pass",
    "loss": "some rows of logits, and the gradient of the embedding",
}


def format_table(args: list[str]) -> str:
    """A row for each preset, the other flags laid over it: on 1 GPU, and where it differs on 8."""
    lines = [f"| `--preset` | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name in PRESETS:
        facts = []
        for gpus in ("1", "8"):
            config = parse_command_line([*args, "--preset", name, "--gpus", gpus], PlanConfig)
            if gpus == "1" or not find_problems(config):  # the quickstart's batch is for one
                facts.append(describe(Plan(config)))
        cells = [" / ".join(dict.fromkeys(fact[column] for fact in facts)) for column in COLUMNS]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_page(plan: Plan) -> str:
    """A line for each fact, and what has to be known about it."""
    c = plan.config
    shape = plan.shape
    gigabytes, _ = GPUS[c.gpu]
    memory = f"of {gigabytes} GB, as the step is written; compiled it needs less"
    if not plan.fits(plan.batch_size):
        memory = f"of {gigabytes} GB: --batch-size 0, --activation-checkpointing, --sharding fsdp"
    notes = {
        "memory a GPU": memory,
        "speed": f"{c.total_batch_size / plan.rate:.2g} s a step; {plan.why}",
        "time": "validation included; HellaSwag, samples and the start are not",
        "cost": f"at ${c.price:.2f} a GPU-hour, see --price",
    }
    size = f"{shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} channels"
    lines = [f"{c.preset} ({size}) on {c.gpus} × {c.gpu}, {c.sharding}", ""]
    for name, fact in describe(plan).items():
        lines.append(f"{name:20}{fact:18} {notes.get(name, '')}".rstrip())
        if name == "memory a GPU":
            lines += describe_memory(plan)
    return "\n".join(lines)


def describe_memory(plan: Plan) -> list[str]:
    """A line for each part that there is."""
    parts = {part: size for part, size in plan.memory.items() if size}
    return [f"{size / 1e9:25.1f} GB  {part:13}{PARTS[part]}" for part, size in parts.items()]


def describe(plan: Plan) -> dict[str, str]:
    """The facts, in words."""
    c = plan.config
    B = plan.batch_size
    billions = plan.tokens / 1e9
    used = f"{sum(plan.memory.values()) / 1e9:.0f} GB"
    checkpoint = plan.checkpoint / 1e9
    kept = c.keep_checkpoints + 1 + (c.val_every > 0)  # one is being written, one is the best
    return {
        "parameters": f"{plan.num_params:,}",
        "tokens": f"{billions:.1f}B" if billions >= 1 else f"{1000 * billions:.1f}M",
        "tokens a parameter": f"{plan.tokens / plan.num_params:.2g}{compare_with_llm_c(plan)}",
        "steps": f"{c.max_steps:,} of {c.total_batch_size:,} tokens",
        "B × accumulation": f"{B} × {plan.sequences // B}",
        "memory a GPU": used if plan.fits(B) else f"{used}: too much",
        "speed": f"{plan.rate:,.0f} tokens/s",
        "time": duration(plan.seconds),
        "cost": f"${c.price * c.gpus * plan.seconds / 3600:,.2f}",
        "checkpoint": f"{checkpoint:.1f} GB",
        "disk": f"{kept * checkpoint:.1f} GB for {kept} checkpoints (of them one being written), "
        f"{2 * billions:.1f} GB for the tokens",
        "a hard kill undoes": find_longest_loss(plan),
    }


def compare_with_llm_c(plan: Plan) -> str:
    """How many tokens a parameter llm.c took for a model of this size, where it trained one."""
    for name, size in GPT2_SIZES.items():
        if (size["n_layer"], size["n_embd"]) == (plan.shape.n_layer, plan.shape.n_embd):
            billions = LLM_C[name]
            return f" (llm.c: {1e9 * billions / plan.num_params:.0f}, of {billions}B)"
    return ""


def find_longest_loss(plan: Plan) -> str:
    """What may have been done since the last checkpoint."""
    c = plan.config
    since = {
        "--checkpoint-minutes": 60 * c.checkpoint_minutes,
        "--checkpoint-every": c.checkpoint_every * plan.seconds / c.max_steps,
        "there is no checkpoint before the end": plan.seconds,
    }
    why = min((name for name in since if since[name]), key=since.__getitem__)
    return f"{duration(since[why])} at most ({why})"


def duration(seconds: float) -> str:
    """In seconds below a minute, in minutes below two hours, else in hours."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"


# -- the command


def main() -> None:
    args = sys.argv[1:]
    config = parse_command_line(args, PlanConfig)
    print(format_table(args) if config.table else format_page(Plan(config)))


if __name__ == "__main__":
    run_script(main)

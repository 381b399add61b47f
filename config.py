"""What one edits: the settings of a training run, its presets, and the check before it starts."""

import importlib.util
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from support.common import read_flags

PresetName = Literal[
    "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-125m", "gpt2-muon", "quickstart"
]


@dataclass
class TrainConfig:
    """Train a GPT-2. Without a flag: the reproduction of the 124M model."""

    # common.headings reads these lines: "# -- word: about" opens a box of --help, and the comment
    # behind a field is its help.
    # -- start: What the run begins with, and where things are.
    preset: PresetName = "gpt2"  # a complete set of the values below, which any flag overrides
    data_dir: str = "edu_fineweb10B"  # directory of token shards, as fineweb.py makes them
    log_dir: str = "log"  # what the run leaves: logs, plot, checkpoints
    init_from: str = "scratch"  # scratch | a GPT-2 on the Hugging Face hub | a model directory
    resume: str = "none"  # none | auto (log_dir's newest whole checkpoint, if any) | a checkpoint
    overwrite: bool = False  # start anew in a log_dir that holds a run

    # -- architecture: The sizes of the model (GPT-2 paper, table 2).
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads a block
    n_embd: int = 768  # channels, C
    pad_vocab_to: int = 128  # embedding rows are a multiple of this, in memory only
    sequence_length: int = 1024  # tokens in a sequence, T, and the context window of a new model

    # -- batch: total_batch_size = batch_size × sequence_length × accumulation × processes.
    batch_size: int = 0  # sequences of a process's micro-batch, B; 0 = the most up to 64 that fit
    total_batch_size: int = 524288  # tokens an update (GPT-3 paper, table 2.1: 0.5M)

    # -- recipe: How it learns (GPT-3 paper, section 2.3 and appendix B).
    max_steps: int = 19073  # updates: 10B tokens of 0.5M
    warmup_steps: int = 715  # linear warm-up: 375M tokens
    learning_rate: float = 6e-4  # at its peak
    min_lr_frac: float = 0.1  # of the peak, at the end
    decay: Literal["cosine", "linear", "wsd"] = "cosine"  # after warm-up; wsd: flat, then a fall
    decay_frac: float = 0.2  # the part of max_steps over which wsd falls
    weight_decay: float = 0.1  # on matrices and embeddings
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, AdamW the rest
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    eps: float = 1e-8  # AdamW
    grad_clip: float = 1.0  # largest norm of the gradient; 0 = off
    skip_spikes: float = 0.0  # drop updates this many deviations above the last 128; 0 = off

    # -- evaluation: What happens on the way: at step 0, every so many steps, at the end; 0 = never.
    val_every: int = 250  # validation loss
    val_tokens: int = 10485760  # tokens of the validation split to look at
    hellaswag_every: int = 250  # HellaSwag score
    hellaswag_limit: int = 0  # only the first examples; 0 = all 10,042
    hellaswag_path: str = ""  # a jsonl file; empty = download it
    sample_every: int = 250  # samples (not at step 0)
    sample_prompt: str = "Hello, I'm a language model,"  # what they continue
    sample_tokens: int = 32  # tokens added to it
    num_samples: int = 4  # how many, on each process
    checkpoint_every: int = 5000  # checkpoints (not at step 0)
    checkpoint_minutes: float = 30.0  # also save when the last one is older than this; 0 = never
    save_best: bool = False  # also save when the validation loss is the lowest so far
    keep_checkpoints: int = 2  # how many of the newest to keep; the best by validation loss stays

    # -- computation: How it computes.
    seed: int = 1337  # of the weights, the order of the data, and the samples
    shuffle: bool = True  # a new order of the sequences, and other cuts, in each epoch
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # what to autocast to
    sharding: Literal["ddp", "zero1", "fsdp"] = "ddp"  # divide the data; + moments; + everything
    compile: bool = True  # torch.compile the training step, where there is a compiler
    activation_checkpointing: bool = False  # recompute activations: less memory, a third more work
    deterministic: bool = False  # CUDA: bit-identical runs, slower (a CPU is so anyway)
    overfit_single_batch: bool = False  # train on the first batch only: the loss must go to zero
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # besides log_dir


GPT2_SIZES: dict[
    str, dict[str, Any]
] = {  # GPT-2 paper, table 2; heads from OpenAI's released hyperparameters
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 350M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}

PRESETS = {
    # learning rates, batch sizes and warm-up: GPT-3 paper, table 2.1 and appendix B
    "gpt2": TrainConfig(),
    "gpt2-medium": TrainConfig(
        preset="gpt2-medium",
        **GPT2_SIZES["gpt2-medium"],
        learning_rate=3e-4,
    ),
    "gpt2-large": TrainConfig(
        preset="gpt2-large",
        **GPT2_SIZES["gpt2-large"],
        learning_rate=2.5e-4,
    ),
    "gpt2-xl": TrainConfig(
        preset="gpt2-xl",
        **GPT2_SIZES["gpt2-xl"],
        learning_rate=2e-4,
        total_batch_size=1048576,
        max_steps=9536,
        warmup_steps=358,  # 375M tokens
    ),
    "gpt3-125m": TrainConfig(preset="gpt3-125m", sequence_length=2048),
    # AdamW's learning rate: Muon's update is scaled to the size of AdamW's.
    "gpt2-muon": TrainConfig(preset="gpt2-muon", optimizer="muon"),
    # two to three minutes on two CPU cores, on the source of Python's standard library
    "quickstart": TrainConfig(
        preset="quickstart",
        data_dir="data/stdlib",
        log_dir="log/quickstart",
        n_layer=6,
        n_head=6,
        n_embd=192,
        sequence_length=128,  # short ones see more documents in so few tokens
        batch_size=16,
        total_batch_size=2048,
        max_steps=200,
        warmup_steps=20,
        learning_rate=8e-3,
        optimizer="muon",
        val_every=20,
        val_tokens=20480,
        hellaswag_every=0,  # it asks for a network, and a model of code scores as one that guesses
        sample_every=100,
        sample_prompt="def ",
        sample_tokens=96,
        num_samples=2,
        checkpoint_every=200,
    ),
}


def parse_command_line(args: list[str], config_class: type = TrainConfig) -> Any:
    """The configuration: the preset that is named, with every other flag laid over it.

    config_class: TrainConfig, or a dataclass that adds flags to it (plan.py).
    """
    preset = "gpt2"
    for flag, value in pairwise([*args, ""]):
        if flag == "--preset":
            preset = value
        elif flag.startswith("--preset="):
            preset = flag.removeprefix("--preset=")
    default = config_class(**vars(PRESETS.get(preset, PRESETS["gpt2"])))
    return read_flags(config_class, default, args)


AT_LEAST_1 = """n_layer n_head n_embd sequence_length total_batch_size max_steps sample_tokens
    keep_checkpoints val_tokens"""
AT_LEAST_0 = """batch_size warmup_steps min_lr_frac weight_decay grad_clip skip_spikes
    val_every hellaswag_every hellaswag_limit sample_every checkpoint_every checkpoint_minutes"""
RANGES = [  # fields, what fits, in words
    (AT_LEAST_1, lambda x: x >= 1, "at least 1"),
    (AT_LEAST_0, lambda x: x >= 0, "0 or more"),
    ("num_samples", lambda x: 1 <= x <= 1000, "from 1 to 1000: they are made in one batch"),
    ("pad_vocab_to", lambda x: 1 <= x <= 2**16, "from 1 to 2**16"),
    ("learning_rate eps", lambda x: x > 0, "above 0"),
    ("beta1 beta2", lambda x: 0 <= x < 1, "at least 0 and below 1"),
    ("decay_frac", lambda x: 0 < x <= 1, "above 0, at most 1"),
    ("seed", lambda x: 0 <= x < 2**62, "at least 0 and below 2**62"),
]
LARGEST = 2**62  # what does not fit into 64 bits breaks the files that it is written to


def check(config: TrainConfig, world_size: int) -> list[str]:
    """Every problem of a configuration, a sentence each; an empty list if there is none.

    It runs before anything is allocated.
    """
    problems = out_of_range(config)
    if not problems:  # the others divide by what was in doubt
        problems += wrong_places(config) + wrong_sizes(config, world_size)
    return problems


def out_of_range(c: TrainConfig, ranges=RANGES) -> list[str]:
    """Values that cannot be, whatever the others are."""
    problems = []
    for names, fits, words in ranges:
        for name in names.split():
            value = getattr(c, name)
            largest = LARGEST if isinstance(value, int) else sys.float_info.max
            if not -largest <= value <= largest:  # nan is neither
                problems.append(f"{name} is {value}: it must be a finite number, at most {largest}")
            elif not fits(value):
                problems.append(f"{name} is {value}: it must be {words}")
    return problems


def wrong_places(c: TrainConfig) -> list[str]:
    """Directories and packages that are not there, or in the way."""
    problems = []
    log_dir = Path(c.log_dir)
    goes_on = c.resume == "auto"
    if c.resume not in ("none", "auto"):  # a checkpoint of this very directory, or from elsewhere
        goes_on = Path(c.resume).resolve().parent == log_dir.resolve()
    if (log_dir / "metrics.jsonl").exists() and not goes_on and not c.overwrite:
        problems.append(
            f"log_dir {c.log_dir!r} holds a run: "
            "add --resume auto to go on with it, --overwrite, or another --log-dir"
        )
    if not Path(c.data_dir).is_dir():
        source = " --source stdlib" if c.data_dir == PRESETS["quickstart"].data_dir else ""
        problems.append(
            f"data_dir {c.data_dir!r} does not exist: "
            f"make it with python fineweb.py{source} --data-dir {c.data_dir}"
        )
    if c.hellaswag_every and c.hellaswag_path and not Path(c.hellaswag_path).exists():
        problems.append(
            f"hellaswag_path {c.hellaswag_path!r} does not exist: leave it empty to download, or "
            "--hellaswag-every 0"
        )
    if c.tracker != "none" and importlib.util.find_spec(c.tracker) is None:
        problems.append(f"tracker {c.tracker} is not installed: pip install {c.tracker}")
    return problems


def wrong_sizes(c: TrainConfig, world_size: int) -> list[str]:
    """Sizes that do not go into each other."""
    problems = []
    if c.n_embd % c.n_head:
        fitting = nearby(c.n_embd, c.n_head)
        problems.append(f"n_embd {c.n_embd} does not divide by n_head {c.n_head}: use {fitting}")
    if c.warmup_steps >= c.max_steps:
        problems.append(
            f"warmup_steps {c.warmup_steps} leaves nothing of max_steps {c.max_steps}: use fewer"
        )
    T = c.sequence_length
    if c.val_every and c.val_tokens < T:
        problems.append(
            f"val_tokens {c.val_tokens} is less than a sequence of {T}: use at least {T}"
        )
    total = c.total_batch_size
    sequences = total // T  # of an update
    share = sequences // world_size
    if total % T:
        problems.append(
            f"total_batch_size {total} tokens is not a whole number of sequences of {T}: "
            f"use {nearby(total, T)}"
        )
    elif sequences % world_size:
        problems.append(
            f"the {sequences} sequences of a batch "
            f"(total_batch_size {total} / sequence_length {T}) cannot be split over "
            f"{world_size} processes: use a number of processes that divides {sequences}, "
            f"or total_batch_size {nearby(sequences, world_size, unit=T)}"
        )
    elif c.batch_size and share % c.batch_size:
        divisors = ", ".join(str(b) for b in range(1, 65) if share % b == 0)
        problems.append(
            f"batch_size {c.batch_size} does not divide the {share} sequences of each of "
            f"{world_size} process(es): use one of {divisors}"
        )
    return problems


def nearby(n: int, divisor: int, unit: int = 1) -> str:
    """The multiples of divisor next to n, in units: '6 or 12'."""
    below = n // divisor * divisor
    return " or ".join(str(unit * m) for m in (below, below + divisor) if m)

"""The settings of a training run, its presets, and the check before it starts."""

import importlib.util
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import tyro

PresetName = Literal[
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "gpt3-125m",
    "gpt2-muon",
    "quickstart",
    "laptop",
]


@dataclass
class TrainConfig:
    """Trains a GPT-2. Without a flag: the reproduction of the 124M model."""

    # The comment behind a field is its help.
    # -- what the run starts from, and where things are
    preset: PresetName = "gpt2"  # a complete set of values; other flags override single ones
    data_dir: str = "edu_fineweb10B"  # directory of token shards, made by fineweb.py
    log_dir: str = "log"  # where logs, plot and checkpoints go
    init_from: str = "scratch"  # scratch | a GPT-2 on the Hugging Face hub | a directory | FILE.pt
    resume: str = "none"  # none | auto (log_dir's newest whole checkpoint, if any) | a checkpoint
    overwrite: bool = False  # start anew in a log_dir that holds a run, and delete its checkpoints

    # -- the sizes of the model (GPT-2 paper, table 2)
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads in each block
    n_embd: int = 768  # channels, C
    pad_vocab_to: int = 128  # pad the embedding to a multiple of this many rows, in memory only
    sequence_length: int = 1024  # tokens in a sequence, T; also the context window of a new model

    # -- the batch: total_batch_size = batch_size × sequence_length × accumulation × processes
    batch_size: int = 0  # sequences in a process's micro-batch, B; 0 = as many as fit, up to 64
    total_batch_size: int = 524288  # tokens per update (GPT-3 paper, table 2.1: 0.5M)

    # -- the recipe (GPT-3 paper, section 2.3 and appendix B)
    max_steps: int = 19073  # updates; 19073 of 0.5M tokens are 10B tokens
    warmup_steps: int = 715  # of linear warm-up; 375M tokens; unless typed, at most max_steps / 10
    learning_rate: float = 6e-4  # the peak
    min_lr_frac: float = 0.1  # the last learning rate, as a part of the peak
    decay: Literal["cosine", "linear", "wsd"] = "cosine"  # wsd: flat, then linear
    decay_frac: float = 0.2  # wsd: the part of max_steps that decays
    weight_decay: float = 0.1  # of matrices and embeddings
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon updates the blocks' matrices
    beta1: float = 0.9  # AdamW's
    beta2: float = 0.95  # AdamW's
    eps: float = 1e-8  # AdamW's
    grad_clip: float = 1.0  # scale the gradient down to this norm; 0 = off
    skip_spikes: float = 0.0  # skip a loss or norm this many standard deviations too high; 0 = off

    # -- evaluation: at step 0 (but no samples and checkpoints), every so many steps, at the end
    val_every: int = 250  # steps between validations; 0 = never
    val_tokens: int = 10485760  # tokens of the validation split to use
    hellaswag_every: int = 250  # steps between HellaSwag scores; 0 = never
    hellaswag_limit: int = 0  # use only the first examples; 0 = all 10,042
    hellaswag_path: str = ""  # a jsonl file; empty = download it
    sample_every: int = 250  # steps between samples; 0 = never
    sample_prompt: str = "Hello, I'm a language model,"  # the text that samples continue
    sample_tokens: int = 32  # tokens in each sample
    num_samples: int = 4  # samples on each process
    checkpoint_every: int = 5000  # steps between checkpoints; 0 = never
    checkpoint_minutes: float = 30.0  # also save after this many minutes; 0 = never
    save_best: bool = False  # also save when the validation loss is the lowest so far
    keep_checkpoints: int = 2  # how many of the newest to keep, besides the best by validation loss

    # -- the computation
    seed: int = 1337  # of the weights, the order of the data, and the samples
    shuffle: bool = True  # reorder the sequences in each epoch, and cut them elsewhere
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matmuls (autocast)
    sharding: Literal["ddp", "zero1", "fsdp"] = "ddp"  # split batch; + moments; + weights
    compile: bool = True  # torch.compile the training step, if there is a compiler
    activation_checkpointing: bool = False  # recompute activations: less memory, a third more work
    deterministic: bool = False  # bit-identical runs on CUDA, too, but slower ones
    overfit_single_batch: bool = False  # train on the first batch only: its loss must go to zero
    eval_only: bool = False  # only print the losses of --init-from's model: no training, no log
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # log there, too


# GPT-2 paper, table 2; heads: OpenAI's released hyperparameters
GPT2_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 355M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}

PRESETS = {
    # learning rates, batch sizes and warm-up: GPT-3 paper, table 2.1 and appendix B
    "gpt2": TrainConfig(),
    "gpt2-medium": TrainConfig("gpt2-medium", **GPT2_SIZES["gpt2-medium"], learning_rate=3e-4),
    "gpt2-large": TrainConfig("gpt2-large", **GPT2_SIZES["gpt2-large"], learning_rate=2.5e-4),
    "gpt2-xl": TrainConfig(
        "gpt2-xl",
        **GPT2_SIZES["gpt2-xl"],
        learning_rate=2e-4,
        total_batch_size=1048576,
        max_steps=9536,
        warmup_steps=358,  # 375M tokens
    ),
    "gpt3-125m": TrainConfig("gpt3-125m", sequence_length=2048),
    # AdamW's learning rate: Muon's update is scaled to the size of AdamW's.
    "gpt2-muon": TrainConfig("gpt2-muon", optimizer="muon"),
    # two to three minutes on two CPU cores, on the source of Python's standard library
    "quickstart": TrainConfig(
        "quickstart",
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
        hellaswag_every=0,  # it needs a network, and a model of code only guesses
        sample_every=100,
        sample_prompt="def ",
        sample_tokens=96,
        num_samples=2,
        checkpoint_every=200,
    ),
    # one to two hours on two CPU cores, on the source of the packages that are installed
    "laptop": TrainConfig(
        "laptop",
        data_dir="data/python",
        log_dir="log/laptop",
        n_layer=8,
        n_head=6,
        n_embd=192,
        sequence_length=256,
        batch_size=8,
        total_batch_size=2048,
        max_steps=4000,
        warmup_steps=50,
        learning_rate=6e-3,
        min_lr_frac=0.0,
        decay="linear",  # to zero: Bergsma et al. 2025
        optimizer="muon",
        val_every=500,
        val_tokens=131072,
        hellaswag_every=0,
        sample_every=100,
        sample_prompt="def count_words(path):",
        sample_tokens=160,
        num_samples=2,
        checkpoint_every=1000,
        checkpoint_minutes=10,
    ),
}


def parse_command_line(args: list[str], config_class: type = TrainConfig) -> Any:
    """The named preset with the other flags laid over it. plan.py's config_class has more flags."""
    preset = "gpt2"
    for flag, value in pairwise([*args, ""]):
        if flag == "--preset":
            preset = value
        elif flag.startswith("--preset="):
            preset = flag.removeprefix("--preset=")
    default = config_class(**vars(PRESETS.get(preset, PRESETS["gpt2"])))
    config = tyro.cli(config_class, default=default, args=args)
    if "warmup_steps" not in typed(args):  # it is for the preset's length: a first try is shorter
        config.warmup_steps = min(config.warmup_steps, max(0, config.max_steps) // 10)
    return config


def typed(args: list[str]) -> set[str]:
    """The settings whose flags are among the arguments. The preset has set the others."""
    flags = [arg.partition("=")[0] for arg in args if arg.startswith("--")]
    return {flag[2:].replace("-", "_").removeprefix("no_") for flag in flags}


LARGEST = 10**12  # steps, tokens, …: a larger number is a slip of the finger
AT_LEAST_1 = """n_layer n_head n_embd sequence_length total_batch_size max_steps sample_tokens
    keep_checkpoints val_tokens"""
AT_LEAST_0 = """batch_size warmup_steps min_lr_frac weight_decay grad_clip skip_spikes
    val_every hellaswag_every hellaswag_limit sample_every checkpoint_every checkpoint_minutes"""
RANGES = [  # fields, what fits, in words
    (AT_LEAST_1, lambda x: 1 <= x <= LARGEST, f"from 1 to {LARGEST:,}"),
    (AT_LEAST_0, lambda x: 0 <= x <= LARGEST, f"from 0 to {LARGEST:,}"),
    ("num_samples", lambda x: 1 <= x <= 1000, "from 1 to 1000: they are made in one batch"),
    ("pad_vocab_to", lambda x: 1 <= x <= 2**16, "from 1 to 2**16"),
    ("learning_rate eps", lambda x: 0 < x <= LARGEST, f"above 0, at most {LARGEST:,}"),
    ("beta1 beta2", lambda x: 0 <= x < 1, "at least 0 and below 1"),
    ("decay_frac", lambda x: 0 < x <= 1, "above 0, at most 1"),
    ("seed", lambda x: 0 <= x < 2**62, "at least 0 and below 2**62"),
]


def check(config: TrainConfig, world_size: int) -> list[str]:
    """Every problem of a configuration, a sentence each. It runs before anything is allocated."""
    problems = out_of_range(config)
    if not problems:  # the other checks divide by these values
        problems = wrong_places(config) + wrong_sizes(config, world_size)
    return problems


def out_of_range(c, ranges=RANGES) -> list[str]:
    """Values that are impossible by themselves, a sentence each. c: the dataclass of any script."""
    problems = []
    for names, fits, words in ranges:
        for name in names.split():
            value = getattr(c, name)
            if not fits(value):
                problems.append(f"{name} is {value}: it must be {words}")
    return problems


def wrong_places(c: TrainConfig) -> list[str]:
    """Directories and packages that are missing, or in the way."""
    problems = []
    log_dir = Path(c.log_dir)
    goes_on = c.resume == "auto" or c.eval_only  # which writes nothing there
    if c.resume not in ("none", "auto"):  # a checkpoint of this very directory, or from elsewhere
        goes_on = Path(c.resume).resolve().parent == log_dir.resolve()
    if c.eval_only and (c.init_from == "scratch" or c.resume != "none"):
        problems.append("eval_only needs a model: --init-from MODEL, and no --resume")
    if (log_dir / "metrics.jsonl").exists() and not goes_on and not c.overwrite:
        problems.append(
            f"log_dir {c.log_dir!r} holds a run: "
            "add --resume auto to go on with it, --overwrite, or another --log-dir"
        )
    if not Path(c.data_dir).is_dir():
        name = c.data_dir.removeprefix("data/")
        source = f" --source {name}" if name in ("stdlib", "python") else ""
        problems.append(
            f"data_dir {c.data_dir!r} does not exist: "
            f"make it with python fineweb.py{source} --data-dir {c.data_dir}"
        )
    if c.tracker != "none" and importlib.util.find_spec(c.tracker) is None:
        problems.append(f"tracker {c.tracker} is not installed: pip install {c.tracker}")
    return problems


def wrong_sizes(c: TrainConfig, world_size: int) -> list[str]:
    """Sizes that do not fit each other."""
    problems = []
    T = c.sequence_length
    total = c.total_batch_size
    if c.n_embd % c.n_head:
        fitting = nearby(c.n_embd, c.n_head)
        problems.append(f"n_embd {c.n_embd} is no multiple of n_head {c.n_head}: use {fitting}")
    if c.warmup_steps >= c.max_steps:
        problems.append(
            f"warmup_steps {c.warmup_steps} leaves nothing of max_steps {c.max_steps}: use fewer"
        )
    if c.val_every and c.val_tokens < T:
        problems.append(
            f"val_tokens {c.val_tokens} is less than a sequence of {T}: use at least {T}"
        )
    if c.eval_only:
        return problems
    share, rest = divmod(total, T * world_size)  # sequences of each process
    if rest:
        problems.append(
            f"total_batch_size {total} is no multiple of sequence_length {T} × {world_size} "
            f"process(es): use {nearby(total, T * world_size)}"
        )
    elif c.batch_size and share % c.batch_size:
        divisors = [str(B) for B in range(1, 65) if share % B == 0]
        problems.append(
            f"batch_size {c.batch_size} does not divide the {share} sequences of each of "
            f"{world_size} process(es): use one of {', '.join(divisors)}"
        )
    return problems


def nearby(n: int, divisor: int) -> str:
    """The multiples of divisor next to n: '6 or 12'."""
    below = n // divisor * divisor
    return " or ".join(str(multiple) for multiple in (below, below + divisor) if multiple)

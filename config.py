"""The settings of a training run, its presets, and the check before it starts."""

import argparse
import importlib.util
import math
import os
import shlex
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from support import common
from support.common import Amount, Count, CountOrZero, Fraction, Positive, Range, UsageError

Config = TypeVar("Config", bound="TrainConfig")
# --help shows the text as it is, not as a shell would need it
Prompt = Annotated[
    str, tyro.conf.arg(help_behavior_hint=lambda text: f"(default: {' '.join(shlex.split(text))})")
]


# The settings in six groups, as --help shows them. The comment beside a field is its help text.


@dataclass
class Start:
    """What the run starts from, and where things are."""

    preset: str = "gpt2"  # a named set of defaults, which other flags override
    data_dir: str = "edu_fineweb10B"  # directory of token shards, made by fineweb.py
    log_dir: str = "log"  # where logs, plot and checkpoints go
    init_from: str = "scratch"  # scratch | a GPT-2 on the Hugging Face hub | a checkpoint | FILE.pt
    # none | auto (log_dir's newest whole checkpoint, if any) | a checkpoint | another log_dir
    resume: str = "none"
    overwrite: bool = False  # start over in a log_dir that holds a run, and delete its checkpoints


@dataclass
class Model:
    """The sizes of a new model (GPT-2 paper, table 2)."""

    n_layer: Annotated[int, Range(1, 10_000)] = 12  # blocks
    n_head: Annotated[int, Range(1, 10_000)] = 12  # attention heads in each block
    n_embd: Annotated[int, Range(1, 1_000_000)] = 768  # channels, C
    # pad the embedding's rows to a multiple of this, in memory only: GPUs are faster with it
    pad_vocab_to: Annotated[int, Range(1, 2**16)] = 128
    sequence_length: Count = 1024  # tokens in a sequence, T; also the context window of a new model


@dataclass
class Batch:
    """total_batch_size = batch_size × sequence_length × accumulated micro-batches × processes."""

    batch_size: CountOrZero = 0  # sequences per process and micro-batch, B; 0 = what fits, up to 64
    total_batch_size: Count = 524288  # tokens per update (GPT-3 paper, table 2.1: 0.5M)


@dataclass
class Recipe:
    """How it is trained (GPT-3 paper, section 2.3 and appendix B)."""

    # choose sizes, rates and the number of updates for this long, on this machine and text; typed
    # flags stay as they are; 0 = off
    minutes: Amount = 0.0
    max_steps: Count = 19073  # updates; 19073 of 0.5M tokens each make 10B tokens
    warmup_steps: CountOrZero = 715  # steps of linear warm-up; by default at most max_steps / 10
    learning_rate: Positive = 6e-4  # the peak
    # the last learning rate, as a fraction of the peak
    min_lr_frac: Annotated[float, Range(0, 1)] = 0.1
    decay: Literal["cosine", "linear", "wsd"] = "cosine"  # wsd: flat, then linear
    decay_frac: Fraction = 0.2  # wsd: the fraction of max_steps in which it decays
    weight_decay: Amount = 0.1  # of matrices and embeddings
    # muon updates the blocks' matrices, and AdamW the rest
    optimizer: Literal["adamw", "muon"] = "adamw"
    embedding_lr: Positive = 1.0  # with muon, the embeddings' rate as a multiple of learning_rate
    beta1: Annotated[float, Range(0, 0.999999)] = 0.9  # AdamW's mean of gradients keeps this much
    beta2: Annotated[float, Range(0, 0.999999)] = 0.95  # and its mean of their squares this much
    eps: Positive = 1e-8  # AdamW adds this to the root of that mean
    grad_clip: Amount = 1.0  # scale the gradient down to this norm; 0 = off


@dataclass
class Evaluation:
    """Every N steps and at the end; validation and HellaSwag also at step 0."""

    val_every: CountOrZero = 250  # steps between validations; 0 = never
    val_tokens: Count = 10485760  # tokens of the validation split to use
    hellaswag_every: CountOrZero = 250  # steps between HellaSwag scores; 0 = never
    hellaswag_limit: CountOrZero = 0  # N examples, spread over the file; 0 = all 10,042
    hellaswag_path: str = ""  # HellaSwag's jsonl file; empty = download it
    sample_every: CountOrZero = 250  # steps between samples; 0 = never
    sample_prompt: Prompt = "Hello, I'm a language model,"  # the text that samples continue
    sample_tokens: Count = 32  # tokens in each sample
    num_samples: Annotated[int, Range(1, 1000)] = 4  # samples on each process
    checkpoint_every: CountOrZero = 5000  # steps between checkpoints; 0 = not even at the end
    checkpoint_minutes: Amount = 30.0  # also save this many minutes after the last save; 0 = never
    save_best: bool = False  # also save when the validation loss is the lowest so far
    keep_checkpoints: Count = 2  # newest checkpoints to keep, besides the best by validation loss


@dataclass
class Computation:
    """With what, and how, it is computed."""

    seed: Annotated[int, Range(0, 2**62)] = 1337  # for weights, data order and samples
    shuffle: bool = True  # in each epoch, reorder the sequences and shift where they start
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matmuls (autocast)
    # ddp: split the batch; zero1: also optimizer state and, between updates, weights; fsdp: also
    # weights and gradients within an update
    sharding: Literal["ddp", "zero1", "fsdp"] = "ddp"
    compile: bool = True  # torch.compile the blocks and the loss, if there is a compiler
    activation_checkpointing: bool = False  # recompute activations: less memory, more work
    deterministic: bool = False  # meant to make runs bit-identical on CUDA, but slower
    overfit_single_batch: bool = False  # train on the first batch only; its loss should go to zero
    find_nan: bool = False  # replay a diverged run to name the operation at fault; write nothing
    eval_only: bool = False  # only evaluate the model of --init-from: no training, no log
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # send the log there, too


@dataclass
class TrainConfig(Computation, Evaluation, Recipe, Batch, Model, Start):
    """Trains a GPT-2. Without flags, the recipe is that of the 124M model."""

    def __post_init__(self) -> None:
        self.typed: set[str] = set()  # settings that the user typed: no flag, and never saved

    def keep_typed_warmup(self, before: dict[str, Any]) -> "TrainConfig":
        """The settings of a run resumed from those `before`, with a warm-up that was typed then."""
        usual = usual_warmup(before["preset"], before["max_steps"])
        if "warmup_steps" in self.typed or before["warmup_steps"] == usual:
            return self
        config = self.with_chosen({"warmup_steps": before["warmup_steps"]})
        if problems := wrong_sizes(config, 1):
            raise UsageError(*problems)
        return config

    def with_chosen(self: Config, chosen: dict[str, Any]) -> Config:
        """The settings with the `chosen` ones, but for flags that were typed."""
        config = copy(self)
        vars(config).update((k, v) for k, v in chosen.items() if k not in self.typed)
        return config

    def sized_for(
        self: Config, operations: float, vocab_size: int, processes: int, **limits: float
    ) -> Config:
        """The settings with sizes for so many operations, and a recipe. limits: choose_sizes'."""
        typed = {name: getattr(self, name) for name in self.typed}
        chosen = choose_sizes(operations, vocab_size, typed, **limits)
        at_once = processes * max(1, typed.get("batch_size", 0)) * chosen["sequence_length"]
        chosen["total_batch_size"] = at_once * math.ceil(chosen["total_batch_size"] / at_once)
        # HellaSwag needs a network, and small models only guess
        chosen |= dict(hellaswag_every=0, checkpoint_minutes=5.0, batch_size=0)
        return self.with_chosen(chosen).scheduled_for(self.max_steps, epochs=1)

    def scheduled_for(self: Config, max_steps: int, epochs: float) -> Config:
        """The settings with the recipe for so many updates."""
        typed = {name: getattr(self, name) for name in self.typed}
        per_token = 12 * self.n_layer * self.n_embd**2 * epochs / max_steps / self.total_batch_size
        return self.with_chosen(choose_recipe(max_steps, epochs, self.n_embd, per_token, typed))

    def as_flags(self) -> list[str]:
        """What repeats a run with these settings, whichever way they were chosen."""
        left_out = ("preset", "minutes", "log_dir", "resume", "overwrite")
        flags = []
        for name, usual in asdict(TrainConfig()).items():
            value = getattr(self, name)
            # an untyped warm-up follows the length of the run
            if name in left_out or (value == usual and name != "warmup_steps"):
                continue
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags.append(f"--{flag}={value}")  # a prompt may begin with a dash
        return flags


# GPT-2 paper, table 2; heads: OpenAI's released hyperparameters
GPT2_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 355M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}

# updates of a million tokens, for the largest sizes; the warm-up is 375M tokens
MILLION: dict = dict(learning_rate=2e-4, total_batch_size=1048576, max_steps=9536, warmup_steps=358)

RECIPES: dict[str, dict[str, Any]] = {  # what a preset changes
    # learning rates, batch sizes and warm-up: GPT-3 paper, table 2.1 and appendix B
    "gpt2": dict(),
    "gpt2-medium": dict(**GPT2_SIZES["gpt2-medium"], learning_rate=3e-4),
    "gpt2-large": dict(**GPT2_SIZES["gpt2-large"], learning_rate=2.5e-4),
    "gpt2-xl": dict(**GPT2_SIZES["gpt2-xl"], **MILLION),
    "gpt3-125m": dict(sequence_length=2048),
    "gpt3-350m": dict(**GPT2_SIZES["gpt2-medium"], sequence_length=2048, learning_rate=3e-4),
    "gpt3-760m": dict(
        n_layer=24, n_head=16, n_embd=1536, sequence_length=2048, learning_rate=2.5e-4
    ),
    # 16 heads of 128: the paper's 24 do not divide n_embd
    "gpt3-1.3b": dict(n_layer=24, n_head=16, n_embd=2048, sequence_length=2048, **MILLION),
    # AdamW's learning rate: Muon's update is scaled to the size of AdamW's.
    "gpt2-muon": dict(optimizer="muon"),
    # three minutes on two CPU cores, on Tiny Shakespeare
    "quickstart": dict(
        data_dir="data/tinyshakespeare",
        log_dir="log/quickstart",
        n_layer=2,
        n_head=4,
        n_embd=256,
        sequence_length=128,
        batch_size=16,
        total_batch_size=2048,
        max_steps=1200,
        warmup_steps=40,
        learning_rate=8e-3,
        min_lr_frac=0.0,
        decay="linear",  # to zero: Bergsma et al. 2025
        weight_decay=0.3,  # the text is read six times
        optimizer="muon",
        embedding_lr=4.0,
        val_every=150,
        val_tokens=49408,  # all of the text that is held out
        hellaswag_every=0,  # it needs a network, and a model of plays only guesses
        sample_every=600,
        sample_prompt="ROMEO:",
        sample_tokens=128,
        num_samples=2,
        checkpoint_every=1200,
    ),
    # an hour on two CPU cores, on the source of the packages that are installed
    "laptop": dict(
        data_dir="data/python",
        log_dir="log/laptop",
        n_layer=3,
        n_head=4,
        n_embd=256,
        sequence_length=256,
        batch_size=8,
        total_batch_size=2048,
        max_steps=14000,
        warmup_steps=50,
        learning_rate=4e-3,
        min_lr_frac=0.0,
        decay="linear",  # to zero: Bergsma et al. 2025
        optimizer="muon",
        embedding_lr=4.0,
        val_every=1000,
        val_tokens=262144,
        hellaswag_every=0,
        sample_every=200,
        sample_prompt="def count_words(path):",
        sample_tokens=160,
        num_samples=2,
        checkpoint_every=2000,
        checkpoint_minutes=10,
    ),
}
PRESETS = {name: TrainConfig(name, **changes) for name, changes in RECIPES.items()}
# what --help says of them; the estimates are plan.py's
NOTES = """
Presets, their parameters, and times (estimates for eight H100s, if not for CPUs):
  gpt2         124M   10B tokens: 48 minutes
  gpt2-medium  355M   10B tokens: 2:16 hours
  gpt2-large   774M   10B tokens: 4:49 hours
  gpt2-xl     1558M   10B tokens: 9:15 hours
  gpt3-125m    125M   10B tokens in sequences of 2,048: 54 minutes
  gpt3-350m    356M   10B tokens in sequences of 2,048: 2:33 hours
  gpt3-760m    760M   10B tokens in sequences of 2,048: 5:02 hours
  gpt3-1.3b   1316M   10B tokens in sequences of 2,048: 8:10 hours
  gpt2-muon    124M   gpt2 with Muon: 48 minutes
  quickstart   1.9M   Tiny Shakespeare: 3 minutes on 2 CPU cores with bfloat16 units, 10 without
  laptop       3.5M   the Python source on this machine: an hour on 2 such cores
"""
VOCAB_SIZES = {"quickstart": 1024, "laptop": 4096}  # what a preset is tuned for, if not GPT-2's


# -- how long you have: docs/minutes.md derives the rule of --minutes and shows what it rests on

# n_layer and n_embd: GPT-2's sizes, and smaller ones like them, with heads of 64 channels
LADDER = [(2, 128), (2, 192), (2, 256), (3, 320), (4, 384), (5, 448), (6, 512), (8, 576), (10, 640)]
LADDER += [(12, 768), (16, 896), (24, 1024), (36, 1280), (48, 1600)]


def choose_sizes(
    operations: float,
    vocab_size: int,
    typed: dict,
    most_tokens: float = math.inf,
    most_updates: float = math.inf,
) -> dict:
    """The sizes of model and batch with the lowest loss after so many operations of training.

    typed: settings that the user has fixed; the others fit around them.

    >>> choose_sizes(2.9e13, 1024, {})
    {'n_layer': 2, 'n_embd': 192, 'n_head': 3, 'sequence_length': 128, 'total_batch_size': 2048, \
'val_tokens': 65536}
    >>> choose_sizes(8.5e18, 50257, {})["total_batch_size"]
    524288
    """
    wanted = math.log(100e6) + 0.375 * math.log(operations / 8.5e18)  # parameters in the blocks
    shapes = {(typed.get("n_layer", L), typed.get("n_embd", C)) for L, C in LADDER}
    parameters = {(L, C): 12 * L * C**2 for L, C in shapes}
    fitting = [shape for shape in shapes if shape[1] % typed.get("n_head", 1) == 0] or shapes
    n_layer, C = min(fitting, key=lambda shape: abs(math.log(parameters[shape]) - wanted))
    n_head = max(h for h in range(1, 1 + max(1, C // 64)) if C % h == 0)
    T = 2 ** round(min(10, max(7, math.log2(128 * (operations / 3e13) ** 0.2))))
    T = typed.get("sequence_length", T)
    operations_per_token = 6 * (parameters[n_layer, C] + vocab_size * C) + 12 * n_layer * C * T
    tokens = operations / operations_per_token
    if tokens > most_tokens:  # then fewer operations will be executed
        operations = most_tokens * operations_per_token
        return choose_sizes(operations, vocab_size, typed, most_tokens, most_updates)
    return dict(
        n_layer=n_layer,
        n_embd=C,
        n_head=n_head,
        sequence_length=T,
        total_batch_size=max(2048, 2 ** round(math.log2(tokens / min(19073, most_updates)))),
        # ten times these take a twentieth of the time
        val_tokens=int(min(10485760, max(2**16, 0.015 * tokens))),
    )


def choose_recipe(
    max_steps: int, epochs: float, n_embd: int, per_token: float, typed: dict
) -> dict[str, Any]:
    """The recipe with the lowest loss after so many updates, which read the text `epochs` times.

    per_token: the blocks' parameters for each token of the text. Fewer memorize less of it.

    >>> recipe = choose_recipe(1200, 6.0, 256, 4.0, {})
    >>> recipe["learning_rate"], recipe["weight_decay"], recipe["warmup_steps"]
    (0.006, 0.39, 40)
    """
    optimizer = typed.get("optimizer", "muon")
    share = 1 if optimizer == "muon" else 4  # AdamW takes a quarter of the rate
    rate = min(1e-2, 6e-3 * (256 / n_embd) * (1200 / max_steps) ** 0.3) / share
    rate = typed.get("learning_rate", rate)
    # the part of a weight that an update takes at this rate, within what an epoch may: minutes.md
    most = min(2, 0.6 * per_token) * epochs / max_steps
    fading = min(0.0055 * epochs**1.5 / max_steps**0.5, most)
    return dict(
        max_steps=max_steps,
        warmup_steps=min(max_steps // 30, 100),
        learning_rate=float(f"{rate:.2g}"),
        weight_decay=round(max(0.1, fading / rate / share), 2),
        optimizer=optimizer,
        embedding_lr=4.0 if optimizer == "muon" else 1.0,
        decay="linear",
        min_lr_frac=0.0,
    )


def parse_command_line(args: list[str], config_class: type = TrainConfig) -> Any:
    """The preset with the other flags applied to it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", default="gpt2", choices=PRESETS)
    preset = PRESETS[parser.parse_known_args(args)[0].preset]
    about = f"{config_class.__doc__}\n{NOTES}"
    config = common.read_flags(config_class, args, config_class(**asdict(preset)), about)
    flags = [arg[2:].partition("=")[0] for arg in args if arg.startswith("--")]
    config.typed = {flag.replace("-", "_").removeprefix("no_") for flag in flags}
    if config.minutes and "max_steps" in config.typed:
        raise UsageError("--minutes and --max-steps each set the length of the run: choose one")
    if config.minutes and config.init_from != "scratch":
        raise UsageError("--minutes chooses a new model, --init-from brings its own: choose one")
    if config.minutes and config.preset not in ("gpt2", *VOCAB_SIZES):
        raise UsageError(f"--minutes and --preset {config.preset} each choose sizes: choose one")
    if "warmup_steps" not in config.typed:
        config.warmup_steps = usual_warmup(config.preset, config.max_steps)
    return config


def usual_warmup(preset: str, max_steps: int) -> int:
    """A preset's warm-up steps; at most a tenth of the run, so that a short trial warms up, too."""
    return min(PRESETS.get(preset, TrainConfig()).warmup_steps, max(0, max_steps) // 10)


def refuse_other_sizes(source: str, model_config: Any, config: TrainConfig) -> None:
    """Raises UsageError if typed flags contradict the GPTConfig of the files of `source`."""
    theirs = vars(model_config).items()
    other = [f"{k} {v}" for k, v in theirs if k in config.typed and getattr(config, k) != v]
    if sizes := ", ".join(other):
        raise UsageError(
            f"{source} has {sizes}: leave these flags out, or train a new model from scratch"
        )


def check(config: TrainConfig, world_size: int) -> list[str]:
    """All problems of a configuration, a sentence each, before anything is allocated."""
    if problems := common.out_of_range(config):  # the other checks divide by these values
        return problems
    if config.minutes and (problems := wrong_places(config)):  # no sizes are chosen without data
        return problems
    return wrong_places(config) + wrong_sizes(config, world_size) + without_effect(config)


def without_effect(c: TrainConfig) -> list[str]:
    """Flags that would not do what the user believes that they do."""
    problems = []
    if "embedding_lr" in c.typed and c.optimizer != "muon":
        problems.append(f"--embedding-lr has no effect with --optimizer {c.optimizer}")
    if "decay_frac" in c.typed and c.decay != "wsd":
        problems.append(f"--decay-frac has no effect with --decay {c.decay}")
    if c.save_best and not c.val_every:
        problems.append("--save-best has no effect with --val-every 0")
    is_own = Path(c.init_from).resolve().parent == Path(c.log_dir).resolve()
    if c.overwrite and is_own and c.init_from != "scratch":
        problems.append("--overwrite would delete --init-from's model: choose another --log-dir")
    if c.overwrite and c.resume == "auto":
        problems.append("--overwrite starts over, and --resume auto goes on: choose one")
    return problems


def wrong_places(c: TrainConfig) -> list[str]:
    """Directories and packages that are missing, or in the way."""
    problems = []
    log_dir = Path(c.log_dir).resolve()
    resumes = c.resume == "auto" or (c.resume != "none" and common.lies_in(c.resume, log_dir))
    if c.eval_only and (c.init_from == "scratch" or c.resume != "none"):
        problems.append("eval_only needs a model: --init-from MODEL, and no --resume")
    keeps = resumes or c.overwrite or c.eval_only or c.find_nan
    if os.path.exists(log_dir / "metrics.jsonl") and not keeps:
        choice = "replace it with --overwrite, or choose another --log-dir"
        if any(log_dir.glob("ckpt_*")):
            choice = f"resume it with --resume auto, {choice}"
        problems.append(f"log_dir {c.log_dir!r} holds a run: {choice}")
    if not os.path.isdir(c.data_dir):
        name = Path(c.data_dir).name
        source = f" --source {name}" if name in ("tinyshakespeare", "stdlib", "python") else ""
        if not source and c.data_dir != TrainConfig.data_dir:
            source = " --source YOUR_TEXT"
        size = "auto" if c.minutes and source else VOCAB_SIZES.get(c.preset, "")
        command = f"{common.command_for('fineweb.py')}{source}"
        command += f" --vocab-size {size}" if size else ""
        command += f" --data-dir {shlex.quote(c.data_dir)}"
        problems.append(f"data_dir {c.data_dir!r} does not exist: make it with {command}")
    if c.tracker != "none" and importlib.util.find_spec(c.tracker) is None:
        install = f"{common.as_typed('pip')} install {c.tracker}"
        problems.append(f"tracker {c.tracker} is missing: {install}")
    return problems


def wrong_vocabulary(c: TrainConfig, vocab_size: int) -> str:
    """A warning if a preset is tuned for a vocabulary of another size than the data's."""
    fits = VOCAB_SIZES.get(c.preset, vocab_size)
    if fits == vocab_size or c.minutes:
        return ""
    return f"; --preset {c.preset} is tuned for {fits:,}: fineweb.py --vocab-size {fits}"


def wrong_sizes(c: TrainConfig, world_size: int) -> list[str]:
    """Sizes that do not fit each other."""
    problems = []
    T = c.sequence_length
    total = c.total_batch_size
    if c.n_embd % c.n_head:
        near = nearby(c.n_embd, c.n_head)
        problems.append(f"n_embd {c.n_embd} is not a multiple of n_head {c.n_head}: use {near}")
    if c.warmup_steps >= c.max_steps:
        problems.append(f"warmup_steps {c.warmup_steps}: use fewer than max_steps {c.max_steps}")
    if c.val_every and c.val_tokens < T:
        problems.append(f"val_tokens {c.val_tokens}: use at least one sequence of {T}")
    if c.eval_only:
        return problems
    share, rest = divmod(total, T * world_size)  # sequences of each process
    if rest:
        near = nearby(total, T * world_size)
        product = f"sequence_length {T} × processes {world_size}"
        problems.append(f"total_batch_size {total} is not a multiple of {product}: use {near}")
    elif c.batch_size and share % c.batch_size:
        divisors = ", ".join(str(B) for B in range(1, 65) if share % B == 0)
        problems.append(
            f"batch_size {c.batch_size} does not divide the {share} sequences of each process in "
            f"an update: use one of {divisors}"
        )
    return problems


def nearby(n: int, divisor: int) -> str:
    """The multiples of divisor next to n: '6 or 12'."""
    below = n // divisor * divisor
    return " or ".join(str(multiple) for multiple in (below, below + divisor) if multiple)

"""The settings of a training run: their flags, presets and checks, and how they are settled."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import tyro

import minutes
from support.base.errors import UsageError
from support.base.files import lies_in
from support.base.flags import (
    Amount,
    Count,
    CountOrZero,
    Dtype,
    Fraction,
    Positive,
    Range,
    String,
    flag_of,
    out_of_range,
    read_flags,
)
from support.base.process import as_typed, command_for
from support.run.log import LOG, METRICS, PAGES
from support.text.names import ALWAYS_THERE

if TYPE_CHECKING:
    from support.machine.distributed import World
    from support.run.checkpoint import Checkpoint
    from support.text.token_files import Data

Config = TypeVar("Config", bound="TrainConfig")


# The settings in six groups, as --help shows them. The comment beside a field is its help text.


@dataclass(frozen=True)
class Start:
    """What the run starts from, and where things are."""

    preset: str = "gpt2"  # a named set of defaults, which other flags override
    data_dir: str = "edu_fineweb10B"  # directory of token shards, made by fineweb.py
    log_dir: str = "log"  # where logs, plot and checkpoints go
    init_from: str = "scratch"  # scratch | a GPT-2 on the Hugging Face hub | a checkpoint | FILE.pt
    # none | auto (log_dir's newest whole checkpoint, if any) | a checkpoint | another log_dir
    resume: str = "none"
    overwrite: bool = False  # start over in a log_dir that holds a run, and delete its checkpoints
    # the settings that were typed: it is no flag, and no file keeps it
    typed: tyro.conf.Suppress[tyro.conf.Fixed[frozenset[str]]] = field(
        default=frozenset(), compare=False
    )


@dataclass(frozen=True)
class Model:
    """The sizes of a new model (GPT-2 paper, table 2)."""

    n_layer: Annotated[int, Range(1, 10_000)] = 12  # blocks
    n_head: Annotated[int, Range(1, 10_000)] = 12  # attention heads in each block
    n_embd: Annotated[int, Range(1, 1_000_000)] = 768  # channels, C
    sequence_length: Count = 1024  # tokens in a sequence, T; also the context window of a new model


@dataclass(frozen=True)
class BatchSize:
    """total_batch_size = batch_size × sequence_length × accumulated micro-batches × processes."""

    batch_size: CountOrZero = 0  # sequences per process and micro-batch, B; 0 = what fits, up to 64
    total_batch_size: Count = 524288  # tokens per update (GPT-3 paper, table 2.1: 0.5M)


@dataclass(frozen=True)
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
    # what is evaluated and saved: the weights' average, mostly over this last part of the updates
    average_frac: Annotated[float, Range(0, 0.5)] = 0.0  # 0 = the weights themselves
    weight_decay: Amount = 0.1  # of matrices and embeddings
    # muon updates the blocks' matrices, and AdamW the rest
    optimizer: Literal["adamw", "muon"] = "adamw"
    embedding_lr: Positive = 1.0  # with muon, the embeddings' rate as a multiple of learning_rate
    beta1: Annotated[float, Range(0, 0.999999)] = 0.9  # AdamW's mean of gradients keeps this much
    beta2: Annotated[float, Range(0, 0.999999)] = 0.95  # and its mean of their squares this much
    eps: Positive = 1e-8  # AdamW adds this to the root of that mean
    grad_clip: Amount = 1.0  # scale the gradient down to this norm; 0 = off


@dataclass(frozen=True)
class Evaluation:
    """Every N steps, at step 0 and at the end; checkpoints not at step 0."""

    val_every: CountOrZero = 250  # steps between validations; 0 = never
    val_tokens: Count = 10485760  # tokens of the validation split to use
    hellaswag_every: CountOrZero = 250  # steps between HellaSwag scores; 0 = never
    hellaswag_limit: CountOrZero = 0  # N examples, spread over the file; 0 = all 10,042
    hellaswag_path: String = ""  # HellaSwag's jsonl file; empty = download it
    sample_every: CountOrZero = 250  # steps between samples; 0 = never
    sample_prompt: String = "Hello, I'm a language model,"  # the text that samples continue
    sample_tokens: Count = 32  # tokens in each sample
    num_samples: Annotated[int, Range(1, 1000)] = 4  # samples on each process
    checkpoint_every: CountOrZero = 5000  # steps between checkpoints; 0 = not even at the end
    checkpoint_minutes: Amount = 30.0  # also save this many minutes after the last save; 0 = never
    save_best: bool = False  # also save when the validation loss is the lowest so far
    keep_checkpoints: Count = 2  # newest checkpoints to keep, besides the best by validation loss


@dataclass(frozen=True)
class Computation:
    """With what, and how, it is computed."""

    seed: Annotated[int, Range(0, 2**62)] = 1337  # for weights, data order and samples
    shuffle: bool = True  # in each epoch, reorder the sequences and shift where they start
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Dtype = "auto"  # of matmuls (autocast)
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


@dataclass(frozen=True)
class TrainConfig(Computation, Evaluation, Recipe, BatchSize, Model, Start):
    """Trains a GPT-2. Without flags, the recipe is that of the 124M model."""

    def saved(self) -> dict[str, Any]:
        """The settings as files keep them: without what was typed at this start."""
        return {name: value for name, value in asdict(self).items() if name != "typed"}

    def typed_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.typed}

    def with_chosen(self: Config, chosen: dict[str, Any]) -> Config:
        """The settings with the `chosen` ones, but for flags that were typed."""
        return replace(self, **{k: v for k, v in chosen.items() if k not in self.typed})

    def as_flags(self) -> list[str]:
        """What repeats a run with these settings, whichever way they were chosen."""
        left_out = ["preset", "minutes", "log_dir", "resume", "overwrite"]
        left_out += idle_settings(vars(self))
        flags = []
        for name, usual in TrainConfig().saved().items():
            value = getattr(self, name)
            # an untyped warm-up follows the length of the run
            if name in left_out or (value == usual and name != "warmup_steps"):
                continue
            flags.append(as_flag(name, value))
        return flags


def as_flag(name: str, value: Any) -> str:
    """A setting as one types it."""
    if isinstance(value, bool):
        return flag_of(name if value else f"no_{name}")
    return f"{flag_of(name)}={value}"  # a prompt may begin with a dash


# GPT-2 paper, table 2; heads: OpenAI's released hyperparameters
GPT2_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 355M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}

# updates of a million tokens, for the largest sizes; the warm-up is 375M tokens
MILLION: dict = dict(learning_rate=2e-4, total_batch_size=1048576, max_steps=9536, warmup_steps=358)

CHANGES: dict[str, dict[str, Any]] = {  # what a preset changes
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
        max_steps=960,
        warmup_steps=32,
        learning_rate=6e-3,
        min_lr_frac=0.0,
        decay="linear",  # to zero: Bergsma et al. 2025
        weight_decay=0.8,  # the text is read five times
        optimizer="muon",
        embedding_lr=4.0,
        average_frac=0.08,
        val_every=160,
        val_tokens=49408,  # all of the text that is held out
        hellaswag_every=0,  # it needs a network, and a model of plays only guesses
        sample_every=160,
        sample_prompt="ROMEO:",
        sample_tokens=128,
        num_samples=1,
        checkpoint_every=960,
    ),
    # an hour on two CPU cores, on books for children
    "laptop": dict(
        data_dir="data/tales",
        log_dir="log/laptop",
        n_layer=3,
        n_head=4,
        n_embd=256,
        sequence_length=256,
        batch_size=8,
        total_batch_size=2048,
        max_steps=14000,
        warmup_steps=50,
        learning_rate=3e-3,
        min_lr_frac=0.0,
        decay="linear",  # to zero: Bergsma et al. 2025
        weight_decay=0.25,  # the text is read 12 times
        optimizer="muon",
        embedding_lr=4.0,
        average_frac=0.08,
        val_every=1000,
        val_tokens=121344,  # all of the text that is held out
        hellaswag_every=0,
        sample_every=200,
        sample_prompt="Once upon a time",
        sample_tokens=160,
        num_samples=1,
        checkpoint_every=2000,
        checkpoint_minutes=10,
    ),
}
PRESETS = {name: TrainConfig(name, **changes) for name, changes in CHANGES.items()}
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
  quickstart   1.9M   Tiny Shakespeare: 2 minutes on 2 CPU cores with bfloat16 units, 6 without
  laptop       3.5M   books for children: an hour on 2 cores with bfloat16 units
"""
VOCAB_SIZES = {"quickstart": 1024, "laptop": 4096}  # what a preset is tuned for, if not GPT-2's


# -- the command line


def parse_command_line(args: list[str], config_class: type = TrainConfig) -> Any:
    """The preset with the other flags applied to it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", default="gpt2", choices=PRESETS)
    preset = PRESETS[parser.parse_known_args(args)[0].preset]
    about = f"{config_class.__doc__}\n{NOTES}"
    values = read_flags(config_class, args, vars(config_class()) | vars(preset), about)
    flags = [arg[2:].partition("=")[0] for arg in args if arg.startswith("--")]
    typed = {flag.replace("-", "_").removeprefix("no_") for flag in flags}
    if "warmup_steps" not in typed:
        values["warmup_steps"] = usual_warmup(preset.preset, values["max_steps"])
    config = config_class(**(values | dict(typed=frozenset(typed))))
    if config.minutes and "max_steps" in typed:
        raise UsageError("--minutes and --max-steps each set the length of the run: choose one")
    if config.minutes and config.init_from != "scratch":
        raise UsageError("--minutes chooses a new model, --init-from brings its own: choose one")
    if config.minutes and config.preset not in ("gpt2", *VOCAB_SIZES):
        raise UsageError(f"--minutes and --preset {config.preset} each choose sizes: choose one")
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


def check(config: TrainConfig, processes: int) -> list[str]:
    """All problems of a configuration, a sentence each, before anything is allocated.

    Where --minutes is still to choose sizes, they are checked after that.
    """
    if problems := out_of_range(config):  # the other checks divide by these values
        return problems
    if minutes.is_open(config):
        return wrong_places(config)
    return wrong_places(config) + check_chosen(config, processes)


def check_chosen(config: TrainConfig, processes: int) -> list[str]:
    """The problems of sizes, and flags without effect."""
    return wrong_sizes(config, processes) + without_effect(config)


# settings that are of no use where others have these values
IN_VAIN: list[tuple[str, dict[str, Any]]] = [
    ("embedding_lr", dict(optimizer="adamw")),
    ("decay_frac", dict(decay="cosine")),
    ("decay_frac", dict(decay="linear")),
    ("val_tokens save_best", dict(val_every=0)),
    ("hellaswag_limit hellaswag_path", dict(hellaswag_every=0)),
    ("sample_tokens num_samples", dict(sample_every=0)),  # sample.py continues the prompt
    ("keep_checkpoints", dict(checkpoint_every=0, checkpoint_minutes=0, save_best=False)),
    ("find_nan", dict(resume="none")),
    ("find_nan", dict(eval_only=True)),
]


def idle_settings(settings: dict[str, Any]) -> dict[str, str]:
    """{name: the flags that make it useless} of the settings that are IN_VAIN."""
    idle: dict[str, str] = {}
    for names, where in IN_VAIN:
        if all(settings.get(other) == value for other, value in where.items()):
            flags = " ".join(as_flag(other, value) for other, value in where.items())
            idle |= dict.fromkeys(names.split(), flags)
    return idle


def without_effect(c: TrainConfig) -> list[str]:
    """Flags that would not do what the user believes that they do."""
    problems = []
    for name, flags in idle_settings(vars(c)).items():
        if name in c.typed and getattr(c, name):
            problems.append(f"{flag_of(name)} is of no use with {flags}")
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
    resumes = c.resume == "auto" or (c.resume != "none" and lies_in(c.resume, log_dir))
    if c.eval_only and (c.init_from == "scratch" or c.resume != "none"):
        problems.append("eval_only needs a model: --init-from MODEL, and no --resume")
    keeps = resumes or c.overwrite or c.eval_only or c.find_nan
    if not keeps and any(os.path.exists(log_dir / name) for name in (METRICS, LOG, *PAGES)):
        choice = "replace it with --overwrite, or choose another --log-dir"
        if any(log_dir.glob("ckpt_*")):
            choice = f"resume it with --resume auto, {choice}"
        problems.append(f"log_dir {c.log_dir!r} holds a run: {choice}")
    if not os.path.isdir(c.data_dir):
        name = Path(c.data_dir).name
        source = f" --source {name}" if name in ALWAYS_THERE else ""
        if not source and c.data_dir != TrainConfig.data_dir:
            source = " --source YOUR_TEXT"
        size = "auto" if c.minutes and source else VOCAB_SIZES.get(c.preset, "")
        command = f"{command_for('fineweb.py')}{source}"
        command += f" --vocab-size {size}" if size else ""
        command += f" --data-dir {shlex.quote(c.data_dir)}"
        problems.append(f"data_dir {c.data_dir!r} does not exist: make it with {command}")
    if c.tracker != "none" and importlib.util.find_spec(c.tracker) is None:
        install = f"{as_typed('pip')} install {c.tracker}"
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


# -- a start


class Settled(NamedTuple):
    """What a start of training begins with. Only the rehearsal of --minutes changes it later."""

    config: TrainConfig
    world: World
    data: Data
    resumed_from: Checkpoint | None  # None for a new run


@contextmanager
def settle(args: list[str]) -> Iterator[Settled]:
    """Settles the settings of a start. Inside, a run that writes has log_dir for itself.

    First comes what is typed and what a resumed run keeps, because a device is prepared by it: one
    process reads that and tells the others over gloo, before any has touched CUDA. Then, on their
    devices, whose speed decides them, the sizes of --minutes; last the warm-up. Raises UserError.

    What needs torch is imported here, because --help should not wait for it.
    """
    from support.machine.device import prepare_device
    from support.machine.distributed import meet, start_world
    from support.run.log import alone_in
    from support.run.resume import find_checkpoint
    from support.text.token_files import open_data

    config = parse_command_line(args)
    with meet() as world:
        launches = world.launches()
        with world.fail_together():
            config = as_resumed(config, launches, world.size) if world.is_main else config
        config = world.broadcast(config)
    prepare_device(config.device, config.deterministic)
    with start_world(config.device) as world:
        if problems := check(config, world.size):
            raise UsageError(*problems)
        trains = [] if config.eval_only else ["train"]
        data = open_data(config.data_dir, *trains, *(["val"] if config.val_every else []))
        if minutes.is_open(config):
            config = minutes.fit_sizes(config, world, data)
            if problems := check_chosen(config, world.size):
                raise UsageError(*problems)
        if config.eval_only:
            yield Settled(config, world, data, None)
            return
        patience = 10.0 if config.resume == "auto" else 0.0  # the last start may still save
        with nullcontext() if config.find_nan else alone_in(config.log_dir, world, patience):
            resumed_from = find_checkpoint(config, world)
            if resumed_from:
                config = keep_warmup(config, resumed_from.state["config"], world.size)
            yield Settled(config, world, data, resumed_from)


def as_resumed(config: TrainConfig, launches: list[str], processes: int) -> TrainConfig:
    """The settings with those that a resumed run has kept in its log.

    If torchrun has restarted the processes, they resume what they had begun. launches: World's.
    """
    from support.run import resume

    if resume.has_begun(config.log_dir, launches):
        config = replace(config, resume="auto", overwrite=False)
    return config.with_chosen(resume.kept_settings(config, processes))


def keep_warmup(config: TrainConfig, before: dict[str, Any], processes: int) -> TrainConfig:
    """Keeps a resumed run's warm-up, if it was typed or chosen: a default follows max_steps."""
    if before["warmup_steps"] == usual_warmup(before["preset"], before["max_steps"]):
        return config
    config = config.with_chosen({"warmup_steps": before["warmup_steps"]})
    if problems := wrong_sizes(config, processes):
        raise UsageError(*problems)
    return config

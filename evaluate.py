"""What a run measures: validation loss, HellaSwag, samples. A new evaluation belongs here."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import hellaswag
from config import TrainConfig
from model import GPT, DataLoaderLite
from support.base.console import say
from support.base.errors import UserError
from support.machine.device import autocast, evaluation_mode
from support.machine.distributed import Stop, World
from support.show.plots import published_band
from support.show.published import is_reproduction
from support.text.token_files import Data
from support.weights.generation import complete

# Nats per token above the highest published run that are no luck, before this update and from it on
EARLY, LATE, LATE_FROM = 0.25, 0.1, 2000


@dataclass
class Evaluations:
    """The evaluations of a run. A new one is a method, and its line in `schedule`.

    A method returns what metrics.jsonl keeps. log.txt gets the first value, if it is a number. The
    console and the report show `figures`, {name: figure}, if there are any. No two evaluations may
    use the same name.
    """

    config: TrainConfig
    model: GPT
    world: World
    stop: Stop
    dtype: torch.dtype
    val_loader: DataLoaderLite | None
    examples: hellaswag.Prepared | None

    @cached_property
    def schedule(self) -> dict[str, tuple[int, Callable[[int], dict[str, Any]]]]:
        """{type of its record: (every how many steps, what makes it at a step)}."""
        config = self.config
        schedule: dict[str, tuple] = {}
        if self.val_loader:
            schedule["val"] = (config.val_every, partial(self.measure_loss, self.val_loader))
        if self.examples:
            score = partial(self.score_hellaswag, self.examples)
            schedule["hella"] = (config.hellaswag_every, score)
        schedule["samples"] = (config.sample_every, self.print_samples)
        return schedule

    def shortened(self) -> tuple["Evaluations", dict[str, float]]:
        """The same on a part, to be timed, and for some, how many times as long they take whole."""
        tokens = self.config.sample_tokens
        part: dict[str, Any] = dict(sample_tokens=min(64, tokens))
        times = {"samples": tokens / part["sample_tokens"]}
        examples = self.examples
        if loader := self.val_loader:
            at_once = 4 * loader.B * loader.T * self.world.size
            whole = min(self.config.val_tokens, loader.epoch_tokens)
            part["val_tokens"] = min(whole, at_once)
            times["val"] = whole / part["val_tokens"]
        if examples:
            few = examples.batches[: 4 * self.world.size]
            times["hella"] = len(examples.batches) / len(few)
            examples = replace(examples, batches=few)
        return replace(self, config=replace(self.config, **part), examples=examples), times

    def measure_loss(self, loader: DataLoaderLite, step: int) -> dict[str, Any]:
        loss, bits_per_byte, nats_per_character = validate(
            model=self.model,
            loader=loader,
            val_tokens=self.config.val_tokens,
            world=self.world,
            stop=self.stop,
            dtype=self.dtype,
        )
        values: dict[str, Any] = dict(val_loss=loss, perplexity=math.exp(min(loss, 99)))
        values["val_tokens"] = self.config.val_tokens
        figures = {"val loss": f"{loss:.4f}", "perplexity": f"{values['perplexity']:.2f}"}
        if bits_per_byte is not None:
            values["bits_per_byte"] = bits_per_byte
            values["nats_per_character"] = nats_per_character
            figures["bits/byte"] = f"{bits_per_byte:.4f}"
        if is_reproduction(vars(self.config), loader.vocab_size) and not self.config.eval_only:
            figures["published runs:"] = describe_place(step, loss)
        return {**values, "figures": figures}

    def score_hellaswag(self, examples: hellaswag.Prepared, _step: int) -> dict[str, Any]:
        score = hellaswag.evaluate(
            self.model,
            examples,
            self.world.device,
            world=self.world,
            dtype=self.dtype,
            stop=self.stop,
        )
        values = dict(hellaswag=score["acc_norm"], acc=score["acc"], total=score["total"])
        figure = "{num_correct_norm}/{total} = {acc_norm:.4f}".format(**score)
        return {**values, "figures": {"HellaSwag": figure}}

    def print_samples(self, step: int) -> dict[str, Any]:
        config = self.config
        rank = self.world.rank
        generator = torch.Generator(self.world.device).manual_seed(config.seed + 1000 * step + rank)
        prompt = config.sample_prompt
        # prompts and caches of every length would recompile the blocks
        with torch.compiler.set_stance("force_eager"):
            texts = complete(
                self.model, prompt, config.num_samples, config.sample_tokens, generator=generator
            )
        for i, text in enumerate(texts):
            say(f"rank {rank} sample {i}: {text}")
        return dict(prompt=prompt, samples=texts)


def build_evaluations(
    config: TrainConfig,
    model: GPT,
    world: World,
    stop: Stop,
    dtype: torch.dtype,
    B: int,
    data: Data,
) -> Evaluations:
    val_loader = None
    if config.val_every:
        val_loader = DataLoaderLite(data, "val", B, config.sequence_length)
        if config.val_tokens > val_loader.epoch_tokens:
            world.say("val: the split is smaller than val_tokens, so all of it is used")
    examples = None
    if config.hellaswag_every and not config.find_nan:
        path = config.hellaswag_path
        try:
            loaded = hellaswag.load_examples(path, config.hellaswag_limit, world)
            examples = hellaswag.prepare(loaded, model, world.device)
        except UserError as error:
            if path:
                raise
            world.say(f"hellaswag: off, {error}")  # there is no network
    return Evaluations(config, model, world, stop, dtype, val_loader, examples)


def describe_place(step: int, val_loss: float) -> str:
    """Where a reproduction stands among the published ones, and what to check if it lags."""
    steps, lows, highs = published_band("val")
    low, high = np.interp(step, steps, lows), np.interp(step, steps, highs)
    behind = val_loss - high
    if step == 0 or behind <= (EARLY if step < LATE_FROM else LATE):
        return f"{low:.2f} to {high:.2f}"
    advice = "check the rate, its warm-up and the data: docs/reproduction.md, When to stop a run"
    return f"{low:.2f} to {high:.2f}, so this run is {behind:.2f} behind: {advice}"


def show(figures: dict[str, str]) -> str:
    return " | ".join(f"{name} {figure}" for name, figure in figures.items())


@torch.no_grad()
def validate(
    model: GPT,
    loader: DataLoaderLite,
    val_tokens: int,
    world: World,
    dtype: torch.dtype,
    stop: Stop,
) -> tuple[float, float | None, float | None]:
    """The mean loss over the first val_tokens: nats per token, bits per byte, nats per character.

    The last two compare models of different vocabularies, on the same text. They leave out the
    losses of <|endoftext|>, because it is not text; None if the split has no text. The
    micro-batch and the number of processes change none of the three.
    """
    sequences = min(val_tokens // loader.T, loader.num_sequences)
    tokenizer = model.tokenizer
    sizes = torch.from_numpy(np.stack([tokenizer.sizes, tokenizer.characters]))
    on = "cpu" if world.device.type == "mps" else world.device  # MPS has no float64
    total, eot_nats = torch.zeros(2, dtype=torch.float64, device=on)
    amounts = torch.zeros(2, dtype=torch.float64)  # of the text: its bytes, its characters
    rounds = range(0, sequences, loader.B * world.size)
    disable = None if world.is_main else True  # None: a bar only in a terminal
    with evaluation_mode(model), autocast(world.device, dtype):
        for first in tqdm(rounds, "validation", leave=False, disable=disable):
            mine = first + world.rank * loader.B
            count = max(0, min(loader.B, sequences - mine))
            with stop.noting_problems():
                x, y = loader.batch(mine, count)
                amounts += sizes[:, y].sum((1, 2))
                # compiled blocks want batches of one size; targets of -1 do not count
                x = F.pad(x, (0, 0, 0, loader.B - count)).to(world.device)
                y = F.pad(y, (0, 0, 0, loader.B - count), value=-1).to(world.device)
                hidden = model.hidden(x)  # with no sequence, too: FSDP needs a call from each rank
                if count:
                    total += model.loss(hidden, y).to(on).double() * count
                is_eot = y == tokenizer.eot
                eot_nats += model.token_losses(hidden[is_eot], y[is_eot]).to(on).double().sum()
            stop.vote()
    sums = world.sum(torch.stack([total, eot_nats, *amounts.to(on)]))
    total, eot_nats, num_bytes, num_characters = sums.tolist()
    nats = total * loader.T - eot_nats
    if not num_bytes:
        return total / sequences, None, None
    return total / sequences, nats / num_bytes / math.log(2), nats / num_characters

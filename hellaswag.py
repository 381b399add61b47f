"""HellaSwag (Zellers et al. 2019): which of four endings does a model find likeliest?

    python hellaswag.py --model gpt2

An example is a context, four endings and the label of the right one. The model's choice is the
ending with the smallest loss: acc compares the summed losses of the endings, acc_norm their mean
losses per token. build-nanogpt and llm.c do the same; lm-evaluation-harness's acc_norm divides by
bytes instead, and its own `hellaswag` task rewrites the texts.
"""

import json
import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm

from model import GPT
from support import tokenizer
from support.common import UserError, run_script, write_whole
from support.device import autocast, dtype_name, evaluation_mode, keep_freed_memory, pick_dtype
from support.distributed import World
from support.examples import check_example, iterate_examples
from support.generation import pad
from support.rows import PADDING, PARTS, ROW, Batch, Row, join, lay_out, make_batches

# acc and acc_norm on all of val, from build-nanogpt's hellaswag.py
PUBLISHED = {"gpt2": (0.2859, 0.2955), "gpt2-xl": (0.3842, 0.4893)}


# -- examples


def load_examples(split: str, path: str | Path, limit: int, world: World) -> list[dict]:
    """The examples of a split, or of the file at `path`, on every process; with a limit, the first.

    The main process reads before the others, so that only one downloads. Where one process fails,
    all raise UserError.
    """
    examples: list[dict] = []
    problem = ""
    for main_reads in (True, False):
        if world.is_main == main_reads:
            try:
                for example in iterate_examples(split, path):
                    examples.append(example)
                    if len(examples) == limit:
                        break
            except UserError as error:
                problem = str(error)
        world.raise_together(problem)
    return examples


def encode_example(example: dict, encode) -> tuple[list[int], list[list[int]]]:
    """The tokens of the context, and of each ending, which begins with a space as in a sentence."""
    return encode(example["ctx"]), [encode(" " + ending) for ending in example["endings"]]


def render_example(example: dict) -> tuple[torch.Tensor, torch.Tensor, int]:
    """An example as build-nanogpt lays it out: tokens (4, N), mask (4, N), label.

    Row i is the context and ending i, padded with zeros at the right; the mask is 1 on the ending.
    Raises UserError for a dict that is no labelled example.
    """
    check_example(example, "this example")
    if "label" not in example:
        raise UserError("this example has no label: only the splits train and val have labels")
    context, endings = encode_example(example, tokenizer.encode)
    tokens = [context + ending for ending in endings]
    mask = [[0] * len(context) + [1] * len(ending) for ending in endings]
    return pad(tokens), pad(mask), int(example["label"])


# -- prepared for a model


@dataclass
class Prepared:
    """N examples, tokenized and laid out for a model."""

    batches: list[Batch]
    lengths: np.ndarray  # (N, 4): the tokens of the endings
    labels: np.ndarray  # (N,): the right endings; -1 where unknown
    truncated: int  # how many examples had to be cut


def prepare(examples, model, device, encode=None, tokens_per_batch=0) -> Prepared:
    """Examples as batches for one model, on the CPU: once, for any number of evaluations.

    For our GPT all batches have one shape, so that compiled blocks are compiled once; models of
    transformers take no mask like ours, and get one ending a row. encode: the model's tokenizer,
    str -> ids, if it is not GPT-2's. tokens_per_batch: 0 = what suits the device. What is prepared
    already is returned as it is. Raises UserError for malformed or no examples, and for a model
    with another vocabulary.
    """
    if isinstance(examples, Prepared):
        return examples
    model = uncompiled(model)
    if encode is None:
        tokenizer.check_vocabulary("the model", model.config.vocab_size)
        encode = tokenizer.encode
    examples = list(examples)
    if not examples:
        raise UserError("there are no examples to score: pass at least one")
    budget = tokens_per_batch
    if not budget:
        budget = 1536 if torch.device(device).type == "cpu" else 16384
    window = context_window(model)
    is_ours = isinstance(model, GPT)
    width = min(ROW, window) if is_ours else 0
    rows, lengths, truncated = lay_out_all(examples, encode, window, width)
    if is_ours:
        width = max(width, max(len(row.tokens) for row in rows))
        rows = join(rows, width)
    labels = np.array([int(example.get("label", -1)) for example in examples])
    return Prepared(make_batches(rows, budget, width), lengths, labels, truncated)


def lay_out_all(examples: list[dict], encode, window: int, width: int):
    """-> the rows of all examples, the endings' lengths (N, 4), how many examples had to be cut.

    window: the most tokens that the model can read. Where an example's longest ending does not fit
    behind the context, the context loses its oldest tokens, and an ending that is too long by
    itself its last ones. width: see `lay_out`.
    """
    rows: list[Row] = []
    lengths = np.zeros((len(examples), 4), dtype=np.int64)
    truncated = 0
    for n, example in enumerate(examples):
        check_example(example, f"example {n}")
        context, endings = encode_example(example, encode)
        room = window + 1 - max(map(len, endings))  # for the context
        if len(context) > room:
            truncated += 1
            context = context[-max(1, room) :]
            endings = [ending[:window] for ending in endings]
        lengths[n] = [len(ending) for ending in endings]
        rows += lay_out(context, endings, slot=4 * n, width=width)
    return rows, lengths, truncated


def context_window(model) -> int:
    """The most tokens that our GPT, or a model of transformers, can read; some have no limit."""
    ours = getattr(model.config, "block_size", None)
    theirs = getattr(model.config, "max_position_embeddings", None)
    return ours or theirs or 1 << 30


# -- scores


def attention_mask(part: torch.Tensor) -> torch.Tensor:
    """part (B, T), as in rows.Row -> (B, 1, T, T), True where a column may attend to another.

    A token sees its own part and its context (part 0 for 1 to 4, 5 for 6 to 9, …), nothing later.
    Padding sees padding: a row of the mask without a True would make the softmax NaN.
    """
    query = part[:, :, None]
    key = part[:, None, :]
    context = query // PARTS * PARTS
    return ((key == query) | (key == context)).tril()[:, None]


def token_losses(model, batch: Batch) -> torch.Tensor:
    """−log p of the batch's P targets: (P,) float32, in nats."""
    if isinstance(model, GPT):
        x = model.hidden(batch.tokens, batch.pos, attention_mask(batch.part))  # (B, T, C)
        to_logits = model.logits
    else:
        is_token = (batch.part != PADDING).long()
        x = model(input_ids=batch.tokens, attention_mask=is_token, use_cache=False).logits
        to_logits = torch.nn.Identity()  # x is (B, T, V) already
    b, column = batch.predicted_at.T
    x = x[b, column]  # (P, C) or (P, V)
    at_once = 128 if x.device.type == "cpu" else 2048  # a CPU's cache should hold float32 logits
    losses = []
    for some, y in zip(x.split(at_once), batch.targets.split(at_once), strict=True):
        logits = to_logits(some).float()
        losses.append(logits.logsumexp(-1) - logits.gather(-1, y[:, None])[:, 0])
    return torch.cat(losses)


@torch.no_grad()
def score(
    model,
    examples,
    device,
    *,
    world=None,
    dtype=torch.float32,
    progress=False,
    stop=None,
    tokens_per_batch=0,
    encode=None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """-> losses (N, 4), lengths (N, 4), truncated: the endings' summed losses and their tokens.

    The losses are in nats, float64; truncated is how many examples were cut to fit the model. The
    arguments are those of `evaluate`, but labels may be missing.
    """
    device = torch.device(device)
    model = uncompiled(model)
    prepared = prepare(examples, model, device, encode, tokens_per_batch)
    batches = prepared.batches
    # The batches are the same for any number of processes, and so are the losses. Every process
    # runs the model equally often, because a sharded model gathers its weights from all of them
    # each time: in the last round, some repeat a batch for nothing.
    rank = world.rank if world else 0
    size = world.size if world else 1
    turns = range(rank, rank + len(batches), size)
    disable = None if progress and rank == 0 else True  # None: shown where somebody watches
    slots: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    with evaluation_mode(model), autocast(device, dtype):  # one autocast casts the weights once
        for turn in tqdm(turns, "HellaSwag", disable=disable, leave=False):
            batch = batches[turn % len(batches)]
            loss = token_losses(model, Batch._make(x.to(device) for x in batch))
            if turn < len(batches):
                slots.append(batch.slots)
                losses.append(loss)
            if stop is not None:
                stop.check()
    total = torch.zeros(prepared.lengths.size, dtype=torch.float64)
    if losses:
        total.index_add_(0, torch.cat(slots), torch.cat(losses).cpu().double())
    if world:
        total = world.sum(total)
    return total.view(-1, 4).numpy(), prepared.lengths, prepared.truncated


def uncompiled(model):
    """The model inside torch.compile's wrapper, if there is one."""
    return getattr(model, "_orig_mod", model)


def evaluate(model, examples, device, *, encode=None, tokens_per_batch=0, **options) -> dict:
    """How often our GPT, or a causal language model of transformers, finds the right ending.

    Returns acc (smallest summed loss), acc_norm (smallest mean loss per token of the ending),
    acc_stderr, acc_norm_stderr, num_correct, num_correct_norm, total and num_truncated (contexts
    cut at the left).

    examples: dicts, or what `prepare` made of them for this model; `prepare` explains encode and
    tokens_per_batch. The options go to `score`. world: the processes that share the work; each gets
    the same result. dtype: autocast to it. progress: show a bar. stop: its check() is called after
    each batch, and may raise. Leaves the training mode and all random state alone. Raises UserError
    for malformed, unlabelled or no examples, for a model with another vocabulary, and for one whose
    losses are not finite.
    """
    prepared = prepare(examples, model, device, encode, tokens_per_batch)
    labels = prepared.labels
    if labels.min() < 0:
        raise UserError("examples without labels cannot be scored: use the split val or train")
    losses, lengths, truncated = score(model, prepared, device, **options)
    if not np.isfinite(losses).all():
        raise UserError(
            "the model's losses are infinite or not a number: its weights are spoiled, or too "
            "large for this precision; try float32, else another checkpoint"
        )
    total = len(labels)
    result = {}
    for suffix, values in {"": losses, "_norm": losses / lengths}.items():
        correct = int((values.argmin(1) == labels).sum())
        acc = correct / total
        result[f"acc{suffix}"] = acc
        result[f"acc{suffix}_stderr"] = math.sqrt(acc * (1 - acc) / max(1, total - 1))
        result[f"num_correct{suffix}"] = correct
    return result | {"total": total, "num_truncated": truncated}


# -- the command


@dataclass
class HellaSwagConfig:
    """Score a GPT-2 on HellaSwag; with torchrun, on many processes."""

    # gpt2 | gpt2-medium | gpt2-large | gpt2-xl, a checkpoint, or any Hugging Face GPT-2 directory
    model: str = "gpt2"
    limit: int = 0  # only the first examples; 0 = all 10,042
    path: str = ""  # a jsonl file; empty = download it
    device: str = "auto"  # auto | cuda | mps | cpu
    # what to autocast to; auto: the fastest here
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    json: str = ""  # write the result to this file


def main() -> None:
    config = tyro.cli(HellaSwagConfig)
    if config.limit < 0:
        raise UserError(f"--limit {config.limit}: 0 (all examples) or more was expected")
    output = Path(os.path.realpath(config.json))
    if config.json:
        check_output(output)
    with World(config.device) as world:
        keep_freed_memory(world.device)
        examples = load_examples("val", config.path, config.limit, world)
        model = GPT.from_pretrained(config.model).to(world.device)
        dtype, _ = pick_dtype(world.device, config.dtype, world)
        start = time.perf_counter()
        result = evaluate(model, examples, world.device, world=world, dtype=dtype, progress=True)
        seconds = time.perf_counter() - start
        if not world.is_main:
            return
        precision = dtype_name(dtype)
        where = f"{world.size} × {world.device.type}, {precision}"
        report(config.model, result, complete=not config.path and not config.limit)
        print(f"{result['total']} examples in {seconds:.1f} s on {where}")
        if config.json:
            run = dict(model=config.model, path=config.path, dtype=precision, seconds=seconds)
            record = run | result
            write_whole(output, (json.dumps(record, indent=2) + "\n").encode())


def check_output(path: Path) -> None:
    """Raises UserError unless a file can be written there: before the work, not behind it."""
    if path.is_dir():
        raise UserError(f"--json {path} is a directory: name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(
            f"--json {path}: no file can be made in {path.parent} ({error.strerror}); "
            "name a directory that is there and may be written"
        ) from None


def report(model: str, result: dict, complete: bool) -> None:
    """Prints what `evaluate` found and what it means.

    complete: these are all examples of val, so what others found for this model belongs beside it.
    """
    meanings = {
        "": "smallest summed loss of the ending",
        "_norm": "smallest mean loss per token of the ending",
    }
    for i, (suffix, meaning) in enumerate(meanings.items()):
        acc = result[f"acc{suffix}"]
        stderr = result[f"acc{suffix}_stderr"]
        correct = result[f"num_correct{suffix}"]
        if complete and model in PUBLISHED:
            meaning += f"; published {PUBLISHED[model][i]:.4f}"
        print(f"acc{suffix:5} {acc:.4f} ± {stderr:.4f}  {correct}/{result['total']}  ({meaning})")
    if result["num_truncated"]:
        print(f"{result['num_truncated']} contexts were cut at the left to fit the model")


if __name__ == "__main__":
    run_script(main)

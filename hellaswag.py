"""HellaSwag (Zellers et al. 2019): which of four endings does a model find likeliest?

    python hellaswag.py --model gpt2

The model chooses the ending with the smallest loss: acc compares the summed losses of the endings,
acc_norm their mean losses per token. build-nanogpt and llm.c do the same; lm-evaluation-harness's
acc_norm divides by characters instead, and its own `hellaswag` task rewrites the texts.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from model import GPT
from support.base.console import run_script
from support.base.errors import UserError, reading
from support.base.files import download, write_whole
from support.base.flags import CountOrZero, Dtype, String, parse_flags
from support.machine.device import (
    autocast,
    dtype_name,
    evaluation_mode,
    keep_freed_memory,
    pick_dtype,
)
from support.machine.distributed import Stop, World, start_world, under_torchrun
from support.text.tokenizer import Tokenizer, gpt2
from support.weights.generation import pad
from support.weights.hf import check_vocabulary

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
BLOB_ID = "0f5ee25d72216f12317d5d8a7b92deafa423d81e"  # git's hash of this file

Example = dict[str, Any]  # the text `ctx`, four texts `endings`, and `label`, the right one's index

# -- examples


def find_official() -> Path:
    """The official validation split, downloaded to hellaswag/ if it is not there."""
    path = Path("hellaswag") / URL.rpartition("/")[2]
    if not path.exists():
        write_whole(path, download(URL))
    content = path.read_bytes()
    if hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() != BLOB_ID:
        raise UserError(f"{path} is not HellaSwag's official file: delete it to download it again")
    return path


def iterate_examples(path: str | Path = "") -> Iterator[Example]:
    """Yields the examples of a jsonl file; "val", or none: the official one. Raises UserError."""
    advice = "name its jsonl file with --path, or in the other scripts with --hellaswag-path"
    with reading("HellaSwag", advice):
        path = find_official() if path in ("", "val") else path
        lines = Path(path).read_bytes().splitlines()
    if not any(map(bytes.strip, lines)):
        raise UserError(f"{path} is empty: download it again")
    expected = "as JSON with a `ctx`, 4 `endings` (not empty) and a `label` from 0 to 3,"
    advice = "remove the line, or download the file again"
    for number, line in enumerate(lines, 1):
        if line.strip():
            with reading(f"{path}, line {number}, {expected}", advice):
                yield parse_example(line)


def parse_example(line: bytes) -> Example:
    """A line of a file as an example. Raises ValueError."""
    match example := json.loads(line):
        case {"ctx": str(context), "endings": [str(), str(), str(), str()] as endings}:
            labelled = str(example.get("label", 0)) in ("0", "1", "2", "3")
            if labelled and context and all(endings):  # empty ones would have equal losses
                return example
    raise ValueError(f"it is {line[:60]!r}")


def load_examples(path: str, limit: int, world: World) -> list[Example]:
    """`limit` examples, evenly spread over the file, which is sorted by source; 0: all of them."""
    with world.fail_together():
        examples = list(iterate_examples(path)) if world.is_main else []
    count = min(limit or len(examples), len(examples))
    return world.broadcast([examples[i * len(examples) // count] for i in range(count)])


def encode_example(example: Example, tokenizer: Tokenizer) -> tuple[list[int], list[list[int]]]:
    """The tokens of the context and of each ending. A space comes before each ending."""
    endings = [tokenizer.encode(" " + ending) for ending in example["endings"]]
    return tokenizer.encode(example["ctx"]), endings


def render_example(
    example: Example, tokenizer: Tokenizer | None = None
) -> tuple[Tensor, Tensor, int]:
    """An example as build-nanogpt lays it out, with GPT-2's tokenizer by default.

    tokens (4, N): context and ending, padded with zeros; mask (4, N): 1 on the ending; label.
    """
    context, endings = encode_example(example, tokenizer or gpt2())
    tokens = [context + ending for ending in endings]
    mask = [[0] * len(context) + [1] * len(ending) for ending in endings]
    return pad(tokens), pad(mask), int(example["label"])


# -- rows: contexts and endings, packed

PARTS = 5  # of one context: itself and its four endings
# columns (B, T, 3), of token, pos and part; targets (P, 4), of row, column, token and slot; int64
PackedBatch = tuple[Tensor, Tensor]


@dataclass
class Row:
    """One row of a batch: contexts, each with some of its endings behind it, side by side.

    Each ending behaves as if it came right after the context, because its positions continue the
    context's and the mask hides the other endings. `a b c` with the endings `d e` and `f g h`:

        tokens   a b c d f g
        pos      0 1 2 3 3 4
        part     0 0 0 1 2 2      0: the context; 1 to 4: an ending

        c sees   a b c            and predicts d, and f
        d sees   a b c d          and predicts e
        f sees   a b c   f        and predicts g
        g sees   a b c   f g      and predicts h

    The last token of an ending predicts nothing, so the row does not contain it. The next context
    in the row has positions from 0 and parts from another multiple of 5: it sees none of the first.
    """

    columns: list[tuple]  # of (token, pos, part)
    # (predicting column, token, slot) for each token of an ending; slots number all endings
    targets: list[tuple]

    def __len__(self) -> int:
        return len(self.columns)


def lay_out(context: list, endings: list, first_slot: int, width: int) -> list[Row]:
    """Lays one example out in few rows of at most `width` tokens; one long ending may exceed it."""
    rows: list[Row] = []
    for i, ending in enumerate(endings, first_slot):
        if not rows or len(rows[-1]) + len(ending) - 1 > width:
            part = PARTS * i  # another one than any other context's
            rows.append(Row([(token, pos, part) for pos, token in enumerate(context)], []))
        row = rows[-1]
        part += 1
        column = len(context) - 1  # the context's last token predicts the ending's first
        for pos, token in enumerate(ending, len(context)):
            row.targets.append((column, token, i))
            column = len(row)
            row.columns.append((token, pos, part))
        row.columns.pop()
    return rows


def join(rows: list[Row], width: int) -> list[Row]:
    """Puts rows behind one another, into rows of at most `width` tokens, by best fit decreasing."""
    joined: list[Row] = []
    by_room: list[list[Row]] = [[] for _ in range(width + 1)]  # by the columns that are still free
    for row in sorted(rows, key=len, reverse=True):
        for hosts in by_room[len(row) :]:  # the fullest that have room
            if hosts:
                host = hosts.pop()
                break
        else:
            host = Row([], [])
            joined.append(host)
        start = len(host)
        host.targets += [(start + column, *target) for column, *target in row.targets]
        host.columns += row.columns
        by_room[width - len(host)].append(host)
    return joined


def make_batches(rows: list[Row], width: int, budget: int) -> Iterator[PackedBatch]:
    """Yields batches of B rows of similar length: about `budget` tokens, or one row."""
    rows = sorted(rows, key=len, reverse=True)
    count = math.ceil(len(rows) / max(1, budget // len(rows[0])))
    B = math.ceil(len(rows) / count)
    rows += [Row([], [])] * (B * count - len(rows))
    for start in range(0, len(rows), B):
        batch = rows[start : start + B]
        # padding has the token 0, pos 0 and part -1
        columns = [row.columns + [(0, 0, -1)] * (width - len(row)) for row in batch]
        targets = [(b, *target) for b, row in enumerate(batch) for target in row.targets]
        yield torch.tensor(columns), torch.tensor(targets)


# -- scores

CPU_TOKENS = 1536  # in a batch
GPU_TOKENS = 16384


@dataclass
class Prepared:
    """N examples, tokenized and laid out for a model."""

    batches: list[PackedBatch]
    lengths: np.ndarray  # (N, 4): the tokens of the endings
    labels: np.ndarray  # (N,): the right endings
    truncated: int  # how many examples had to be cut


def prepare(examples: list[Example] | Prepared, model: GPT, device: torch.device | str) -> Prepared:
    """Examples as batches on the CPU, all of one shape, so that blocks are compiled only once.

    Where the longest ending does not fit, the context loses its oldest tokens, and an ending that
    is too long by itself its last. Raises UserError without labels or for another vocabulary.
    """
    if isinstance(examples, Prepared):
        return examples
    check_vocabulary("the model", model)
    if not all("label" in example for example in examples):
        raise UserError("examples without labels cannot be scored: use the official file")
    window = model.config.block_size
    width = min(384, window)  # of a row: about two examples, one long and one short
    rows = []
    lengths = []
    truncated = 0
    for n, example in enumerate(examples):
        context, endings = encode_example(example, model.tokenizer)
        room = window + 1 - max(map(len, endings))  # for the context
        truncated += len(context) > room
        endings = [ending[:window] for ending in endings]
        lengths.append(list(map(len, endings)))
        rows += lay_out(context[-max(1, room) :], endings, 4 * n, width)
    width = max(width, *map(len, rows))
    budget = CPU_TOKENS if torch.device(device).type == "cpu" else GPU_TOKENS
    batches = list(make_batches(join(rows, width), width, budget))
    labels = np.array([int(example["label"]) for example in examples])
    return Prepared(batches, np.array(lengths), labels, truncated)


def attention_mask(part: Tensor) -> Tensor:
    """part (B, T), as in Row -> (B, 1, T, T), True where a column may attend to another.

    A token sees its own part and its context (part 0 for 1 to 4, 5 for 6 to 9, …), nothing later.
    Padding sees padding: a row of the mask without a True would make the softmax NaN.
    """
    query = part[:, :, None]
    key = part[:, None, :]
    return ((key == query) | (key == query // PARTS * PARTS)).tril()[:, None]


def target_losses(model: GPT, columns: Tensor, targets: Tensor) -> Tensor:
    """−log p of the P targets of a batch: (P,) float32, in nats."""
    tokens, pos, part = columns.unbind(-1)
    row, column, target, _ = targets.T
    x = model.hidden(tokens, pos, attention_mask(part))  # (B, T, C)
    return model.token_losses(x[row, column], target)


@torch.no_grad()
def score(
    model: GPT,
    examples: list[Example] | Prepared,
    device: torch.device | str,
    *,
    world: World | None = None,
    dtype: torch.dtype = torch.float32,
    stop: Stop | None = None,
) -> np.ndarray:
    """The summed loss of each ending in nats, (N, 4) float64: the same on all processes of world.

    dtype: of autocast. stop: its vote() is called after each batch.
    """
    device = torch.device(device)
    world = world or World(device)
    prepared = prepare(examples, model, device)
    batches = prepared.batches
    # All processes take the same number of turns, because stop.vote asks them all and a sharded
    # model needs a call from each. In the last round, some repeat a batch whose result is dropped.
    turns = range(world.rank, world.rank + len(batches), world.size)
    hidden = None if world.is_main else True  # None: a bar only in a terminal
    scored = []
    with evaluation_mode(model), autocast(device, dtype):  # one autocast casts the weights once
        for turn in tqdm(turns, "HellaSwag", disable=hidden, leave=False):
            columns, targets = batches[turn % len(batches)]
            losses = target_losses(model, columns.to(device), targets.to(device))
            if turn < len(batches):
                scored.append((targets[:, 3], losses))
            if stop:
                stop.vote()
    total = torch.zeros(prepared.lengths.size, dtype=torch.float64)
    for slots, losses in scored:
        total.index_add_(0, slots, losses.cpu().double())
    return world.sum(total).view(-1, 4).numpy()


def evaluate(
    model: GPT, examples: list[Example] | Prepared, device: torch.device | str, **options: Any
) -> dict[str, Any]:
    """How often a GPT finds the right ending. The options are those of `score`.

    Returns acc, acc_norm, acc_stderr, …, num_correct, …, total and num_truncated (contexts cut at
    the left). Raises UserError if a loss is not finite.
    """
    prepared = prepare(examples, model, device)
    losses = score(model, prepared, device, **options)
    if not np.isfinite(losses).all():
        raise UserError("losses are infinite or NaN: try --dtype float32 or another checkpoint")
    total = len(losses)
    result: dict[str, Any] = {"total": total, "num_truncated": prepared.truncated}
    for name, values in {"": losses, "_norm": losses / prepared.lengths}.items():
        correct = int((values.argmin(1) == prepared.labels).sum())
        acc = correct / total
        stderr = math.sqrt(acc * (1 - acc) / max(1, total - 1))
        result |= {f"acc{name}": acc, f"acc{name}_stderr": stderr, f"num_correct{name}": correct}
    return result


# -- the command

REPORT = """\
acc      {acc:.4f} ± {acc_stderr:.4f}  {num_correct}/{total}  (summed loss)
acc_norm {acc_norm:.4f} ± {acc_norm_stderr:.4f}  {num_correct_norm}/{total}  (mean loss per token)
{total} examples, {num_truncated} of them cut to fit the model, in {seconds:.1f} s, {dtype}"""


@dataclass(frozen=True)
class HellaSwagConfig:
    """Scores a GPT-2 on HellaSwag. Under torchrun, the processes share the examples."""

    model: str = "gpt2"  # gpt2 … gpt2-xl, a directory, nanoGPT's or build-nanogpt's FILE.pt
    limit: CountOrZero = 0  # N examples, spread over the file; 0 = all 10,042
    path: String = ""  # HellaSwag's jsonl file; empty = download it
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Dtype = "auto"  # of matmuls (autocast)
    json: String = ""  # write the result to this file


def main(args: list[str]) -> None:
    config = parse_flags(HellaSwagConfig, args)
    with start_world(config.device) as world:
        path = Path(config.json)
        writable = os.access(path.parent, os.W_OK) and not os.path.isdir(path)
        with world.fail_together():
            if config.json and world.is_main and not writable:
                raise UserError(f"--json {path}: name a file in a directory that you may write to")
        keep_freed_memory(world.device)
        examples = load_examples(config.path, config.limit, world)
        model = GPT.from_pretrained(config.model).to(world.device)
        dtype, _ = pick_dtype(world.device, config.dtype, anywhere=world.any)
        start = time.perf_counter()
        result = evaluate(model, examples, world.device, world=world, dtype=dtype)
        seconds = time.perf_counter() - start
    if world.is_main:
        run = dict(model=config.model, path=config.path, dtype=dtype_name(dtype), seconds=seconds)
        print(REPORT.format(**run, **result), f"on {world.size} × {world.device.type}")
        if config.json:
            write_whole(path, json.dumps(run | result, indent=2).encode())


if __name__ == "__main__":
    run_script(main, at_once=under_torchrun())

"""HellaSwag (Zellers et al. 2019): which of four endings does a model find likeliest?

    python hellaswag.py --model gpt2

An example is a context, four endings and the label of the right one. The model's choice is the
ending with the smallest loss: acc compares the summed losses of the endings, acc_norm their mean
losses per token. build-nanogpt and llm.c do the same; lm-evaluation-harness's acc_norm divides by
bytes instead, and its own `hellaswag` task rewrites the texts.
"""

import hashlib
import json
import math
import time
from contextlib import suppress
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
from support.generation import pad

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/"
BLOB_IDS = {  # git's hashes of these files
    "train": "1997e15fe638ef2aeec6993471159295cd75aab7",
    "val": "0f5ee25d72216f12317d5d8a7b92deafa423d81e",
    "test": "7a4b590ea240595f468bfbc7f2c744e5eef72da5",
}


# -- examples


def download(split: str) -> Path:
    """The official file of a split (train, val or test), downloaded to hellaswag/ if not there.

    Raises OSError if the network or the disk fails (in seconds if there is no network), and
    UserError if the file is not the official one.
    """
    import requests
    from requests.adapters import HTTPAdapter, Retry

    path = Path("hellaswag") / f"hellaswag_{split}.jsonl"
    if not path.exists():
        retry = Retry(2, connect=0, backoff_factor=1, status_forcelist=[429, 500, 502, 503, 504])
        with requests.Session() as session:
            session.mount(URL, HTTPAdapter(max_retries=retry))
            answer = session.get(URL + path.name, timeout=(3, 20))  # seconds to connect, to wait
            answer.raise_for_status()
        path.parent.mkdir(exist_ok=True)
        write_whole(path, answer.content)
    content = path.read_bytes()
    if hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() != BLOB_IDS[split]:
        raise UserError(f"{path} is not HellaSwag's official file: delete it to download it again")
    return path


def iterate_examples(split="val", path: str | Path = ""):
    """Yields the examples of the jsonl file at `path`, or else of a split, which it may download.

    Each is a dict with the text `ctx`, four texts `endings`, and `label`, the index of the right
    one (the split test has no labels). Raises UserError if it cannot read them, and at the first
    line that is not an example.
    """
    try:
        path = path or download(split)
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UserError(
            f"HellaSwag cannot be read ({error}): name its jsonl file by --path "
            "(train_gpt2.py, fineweb.py: --hellaswag-path)"
        ) from error
    if not any(lines):
        raise UserError(f"{path} is empty: download it again")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield parse_example(line, f"{path}, line {number}")


def parse_example(line: bytes, where: str) -> dict:
    """A line of a file as an example. Raises UserError, which begins with `where`."""
    with suppress(ValueError, RecursionError):
        match example := json.loads(line):
            case {"ctx": str(context), "endings": [str(), str(), str(), str()]} if context:
                if str(example.get("label", 0)) in ("0", "1", "2", "3"):
                    return example
    raise UserError(
        f"{where} is {line[:60]!r}: JSON with a `ctx`, 4 `endings` and a `label` from 0 to "
        "3 was expected; remove the line, or download the file again"
    )


def load_examples(split: str, path, limit: int, world: World) -> list:
    """The examples of `iterate_examples`, or the first `limit` of them, on every process.

    Only the main process reads them. If it fails, every process raises UserError.
    """
    examples = []
    with world.together():
        if world.is_main:
            examples = list(iterate_examples(split, path))
    return world.share(examples[: limit or None])


def encode_example(example: dict, encode) -> tuple:
    """The tokens of the context and of each ending. A space comes before each ending."""
    return encode(example["ctx"]), [encode(" " + ending) for ending in example["endings"]]


def render_example(example: dict) -> tuple:
    """An example as build-nanogpt lays it out: tokens (4, N), mask (4, N), label.

    Row i is the context and ending i, padded with zeros at the right; the mask is 1 on the ending.
    """
    context, endings = encode_example(example, tokenizer.encode)
    tokens = [context + ending for ending in endings]
    mask = [[0] * len(context) + [1] * len(ending) for ending in endings]
    return pad(tokens), pad(mask), int(example["label"])


# -- rows: contexts and endings, packed

ROW = 384  # tokens in a row: about two examples, one long and one short
PARTS = 5  # of one context: itself and its four endings
PADDING = (0, 0, -1)  # a column that fills up a row: token, pos, part


@dataclass
class Row:
    """One row of a batch: contexts, each with some of its endings behind it, side by side.

    A causal model's output for a token depends on this token and earlier ones, never on later ones.
    So the context's outputs are the same before every ending, and one pass serves all four. Each
    ending behaves as if it came right after the context, for two reasons: its positions continue
    the context's, and the attention mask hides the other endings. The context `a b c` with the
    endings `d e` and `f g h`:

        tokens   a b c d f g
        pos      0 1 2 3 3 4
        part     0 0 0 1 2 2      0: the context; 1 to 4: an ending

        a sees   a
        b sees   a b
        c sees   a b c            and predicts d, and f
        d sees   a b c d          and predicts e
        f sees   a b c   f        and predicts g
        g sees   a b c   f g      and predicts h

    The last token of an ending predicts nothing, so the row does not contain it. `targets` has
    (column, token, slot) for each token of the endings: the column that predicts it, the token, and
    the number of its ending, counted over the endings of all examples.

    The next context follows in the same row. Its positions begin at 0, its parts at another
    multiple of 5. Its tokens see no token of the first example.
    """

    columns: list[tuple]  # of (token, pos, part)
    targets: list[tuple]  # of (column, token, slot)

    def __len__(self):
        return len(self.columns)


def lay_out(context: list, endings: list, slot: int, width: int) -> list[Row]:
    """Lays one example out in few rows of at most `width` tokens; one long ending may exceed it.

    slot: the number of the first ending. The drawing in `Row`, with 1 to 8 for a to h:

    >>> [row] = lay_out(context=[1, 2, 3], endings=[[4, 5], [6, 7, 8]], slot=0, width=16)
    >>> row.columns
    [(1, 0, 0), (2, 1, 0), (3, 2, 0), (4, 3, 1), (6, 3, 2), (7, 4, 2)]
    >>> row.targets
    [(2, 4, 0), (3, 5, 0), (2, 6, 1), (4, 7, 1), (5, 8, 1)]
    """
    rows: list[Row] = []
    for i, ending in enumerate(endings, slot):
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


def join(rows: list[Row], width: int) -> list:
    """Puts rows behind one another, into fewer rows of at most `width` tokens.

    Each row, the longest first, goes to the fullest row that still has room for it. (This is best
    fit decreasing, from bin packing. It leaves 1% of HellaSwag's rows empty.)
    """
    joined = []
    with_room: list[list] = [[] for _ in range(width)]  # by columns that are still free
    for row in sorted(rows, key=len, reverse=True):
        hosts = next(filter(None, with_room[len(row) :]), None)
        if hosts:
            host = hosts.pop()
            start = len(host)
            host.targets += [(start + column, *target) for column, *target in row.targets]
            host.columns += row.columns
            row = host
        else:
            joined.append(row)
        with_room[width - len(row)].append(row)
    return joined


def make_batches(rows, width: int, budget: int) -> list:
    """Batches of B rows of similar length: about `budget` tokens, or one row.

    A batch is two int64 tensors: columns (B, T, 3), each a token, pos and part, with the same B and
    T in all batches; and targets (P, 4), each a row, column, token and slot.
    """
    rows = sorted(rows, key=len, reverse=True)
    count = math.ceil(len(rows) / max(1, budget // len(rows[0])))
    B = math.ceil(len(rows) / count)
    rows += [Row([], [])] * (B * count - len(rows))
    batches = []
    for start in range(0, len(rows), B):
        some = rows[start : start + B]
        columns = [row.columns + [PADDING] * (width - len(row)) for row in some]
        targets = [(b, *target) for b, row in enumerate(some) for target in row.targets]
        batches.append((torch.tensor(columns), torch.tensor(targets)))
    return batches


# -- scores

CPU_TOKENS = 1536  # in a batch
GPU_TOKENS = 16384


@dataclass
class Prepared:
    """N examples, tokenized and laid out for a model."""

    batches: list[tuple]
    lengths: np.ndarray  # (N, 4): the tokens of the endings
    labels: np.ndarray  # (N,): the right endings; -1 where unknown
    truncated: int  # how many examples had to be cut


def prepare(examples, model: GPT, device) -> Prepared:
    """Examples as batches for one model, on the CPU: once, for any number of evaluations.

    All batches have one shape, so blocks are compiled only once. If the longest ending does not fit
    behind the context, the context loses its oldest tokens. An ending that is too long by itself
    loses its last tokens. Returns prepared examples as they are. Raises UserError for a model with
    another vocabulary.
    """
    if isinstance(examples, Prepared):
        return examples
    tokenizer.check_vocabulary("the model", model.config.vocab_size)
    window = model.config.block_size
    width = min(ROW, window)
    rows = []
    lengths = []
    labels = []
    truncated = 0
    for n, example in enumerate(examples):
        context, endings = encode_example(example, tokenizer.encode)
        room = window + 1 - max(map(len, endings))  # for the context
        if len(context) > room:
            truncated += 1
            context = context[-max(1, room) :]
            endings = [ending[:window] for ending in endings]
        lengths.append(list(map(len, endings)))
        labels.append(int(example.get("label", -1)))
        rows += lay_out(context, endings, 4 * n, width)
    width = max(width, *map(len, rows))
    budget = CPU_TOKENS if torch.device(device).type == "cpu" else GPU_TOKENS
    batches = make_batches(join(rows, width), width, budget)
    return Prepared(batches, np.array(lengths), np.array(labels), truncated)


def attention_mask(part):
    """part (B, T), as in Row -> (B, 1, T, T), True where a column may attend to another.

    A token sees its own part and its context (part 0 for 1 to 4, 5 for 6 to 9, …), nothing later.
    Padding sees padding: a row of the mask without a True would make the softmax NaN.
    """
    query = part[:, :, None]
    key = part[:, None, :]
    return ((key == query) | (key == query // PARTS * PARTS)).tril()[:, None]


def token_losses(model: GPT, columns, targets):
    """−log p of the P targets of a batch: (P,) float32, in nats."""
    tokens, pos, part = columns.unbind(-1)
    x = model.hidden(tokens, pos, attention_mask(part))  # (B, T, C)
    row, column, target, _ = targets.T
    at_once = 128 if x.device.type == "cpu" else 2048  # a CPU's cache should hold float32 logits
    losses = []
    for some, y in zip(x[row, column].split(at_once), target.split(at_once), strict=True):
        logits = model.logits(some).float()
        losses.append(logits.logsumexp(-1) - logits.gather(-1, y[:, None])[:, 0])
    return torch.cat(losses)


@torch.no_grad()
def score(
    model: GPT, examples, device, *, world=None, dtype=torch.float32, progress=False, stop=None
):
    """-> losses (N, 4), lengths (N, 4), truncated: the endings' summed losses and their tokens.

    The losses are in nats, float64; truncated is how many examples were cut to fit the model. The
    arguments are those of `evaluate`, but labels may be missing.
    """
    device = torch.device(device)
    prepared = prepare(examples, model, device)
    batches = prepared.batches
    rank = world.rank if world else 0
    size = world.size if world else 1
    # Every process takes equally many turns, because stop.check asks them all. A divided model also
    # wants a call from each (World.whole). In the last round some repeat a batch for nothing.
    turns = range(rank, rank + len(batches), size)
    hidden = None if progress and rank == 0 else True  # None: shown where somebody watches
    found = []
    with evaluation_mode(model), autocast(device, dtype):  # one autocast casts the weights once
        for turn in tqdm(turns, "HellaSwag", disable=hidden, leave=False):
            columns, targets = batches[turn % len(batches)]
            losses = token_losses(model, columns.to(device), targets.to(device))
            if turn < len(batches):
                found.append((targets[:, 3], losses))
            if stop:
                stop.check()
    total = torch.zeros(prepared.lengths.size, dtype=torch.float64)
    for slots, losses in found:
        total.index_add_(0, slots, losses.cpu().double())
    if world:
        total = world.sum(total)
    return total.view(-1, 4).numpy(), prepared.lengths, prepared.truncated


def evaluate(model: GPT, examples, device, **options) -> dict:
    """How often a GPT finds the right ending.

    Returns acc (smallest summed loss), acc_norm (smallest mean loss per token of the ending),
    acc_stderr, acc_norm_stderr, num_correct, num_correct_norm, total and num_truncated (contexts
    cut at the left).

    examples: dicts, or what `prepare` made of them for this model. The options go to `score`.
    world: the processes that share the work; each gets the same result. dtype: autocast to it.
    progress: show a bar. stop: its check() is called after each batch, and may raise. Leaves the
    training mode and all random state alone. Raises UserError for examples without labels, for a
    model with another vocabulary, and for one whose losses are not finite.
    """
    prepared = prepare(examples, model, device)
    if prepared.labels.min() < 0:
        raise UserError("examples without labels cannot be scored: use the split val or train")
    losses, lengths, truncated = score(model, prepared, device, **options)
    if not np.isfinite(losses).all():
        raise UserError(
            "the model's losses are infinite or not a number: its weights are damaged, or too "
            "large for this precision; try --dtype float32 or another checkpoint"
        )
    total = len(losses)
    result = {"total": total, "num_truncated": truncated}
    for suffix, values in {"": losses, "_norm": losses / lengths}.items():
        correct = int((values.argmin(1) == prepared.labels).sum())
        acc = correct / total
        result[f"acc{suffix}"] = acc
        result[f"acc{suffix}_stderr"] = math.sqrt(acc * (1 - acc) / max(1, total - 1))
        result[f"num_correct{suffix}"] = correct
    return result


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
    with World(config.device) as world:
        keep_freed_memory(world.device)
        examples = load_examples("val", config.path, config.limit, world)
        model = GPT.from_pretrained(config.model).to(world.device)
        dtype, _ = pick_dtype(world.device, config.dtype, world)
        start = time.perf_counter()
        result = evaluate(model, examples, world.device, world=world, dtype=dtype, progress=True)
        seconds = time.perf_counter() - start
    if world.is_main:
        precision = dtype_name(dtype)
        for suffix, meaning in {"": "summed loss", "_norm": "mean loss per token"}.items():
            print(
                f"acc{suffix:5} {result['acc' + suffix]:.4f} ± {result[f'acc{suffix}_stderr']:.4f}",
                f" {result['num_correct' + suffix]}/{result['total']}",
                f" (smallest {meaning} of the ending)",
            )
        print(
            f"{result['total']} examples, {result['num_truncated']} of them cut to fit the model,",
            f"in {seconds:.1f} s on {world.size} × {world.device.type}, {precision}",
        )
        if config.json:
            run = dict(model=config.model, path=config.path, dtype=precision, seconds=seconds)
            write_whole(Path(config.json), json.dumps(run | result, indent=2).encode())


if __name__ == "__main__":
    run_script(main)

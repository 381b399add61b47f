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
import os
import reprlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from support.device import autocast, pick_dtype
from support.distributed import World
from support.generation import pad
from support.web import connect, read_content

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_{split}.jsonl"
BLOB_IDS = {  # git's names for the contents of these files
    "train": "1997e15fe638ef2aeec6993471159295cd75aab7",
    "val": "0f5ee25d72216f12317d5d8a7b92deafa423d81e",
    "test": "7a4b590ea240595f468bfbc7f2c744e5eef72da5",
}
# acc and acc_norm on all of val, from build-nanogpt's hellaswag.py
PUBLISHED = {"gpt2": (0.2859, 0.2955), "gpt2-xl": (0.3842, 0.4893)}


# -- download


def download(
    split: str, folder="hellaswag", url=URL, blob_ids=BLOB_IDS, attempts=3, patience=1.0
) -> Path:
    """The official jsonl file of a split (train, val or test); fetched into `folder` if not there.

    A transfer that fails is tried again after `patience` seconds, then after twice as many. Raises
    UserError if there is no network (within seconds), if every attempt failed, and for a file whose
    content does not have the expected git blob id.
    """
    if split not in blob_ids:
        raise UserError(f"HellaSwag has no split {split!r}: use one of {', '.join(blob_ids)}")
    path = Path(folder) / f"hellaswag_{split}.jsonl"
    expected = blob_ids[split]
    if path.exists():
        found = blob_id(read_local(path))
        if found != expected:
            raise UserError(
                f"{path} is not the official file (blob id {found}, not {expected}): "
                "delete it to fetch it anew"
            )
        return path
    content = fetch_official(url.format(split=split), expected, attempts, patience)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise UserError(
            f"HellaSwag cannot be written to {folder} ({error}): name a local file by path"
        ) from None
    return path


def read_local(path: Path) -> bytes:
    """The content of a file; UserError if it is no file, or cannot be read."""
    try:
        if path.is_file():
            return path.read_bytes()
        problem = "it is no file"
    except OSError as error:
        problem = str(error.strerror)
    raise UserError(f"{path} cannot be read ({problem}): delete it to fetch it anew")


def fetch_official(url: str, expected: str, attempts: int, patience: float) -> bytes:
    """The content of a URL, with the blob id `expected`; UserError after too many attempts."""
    for attempt in range(attempts):
        if attempt > 0:
            time.sleep(patience * 2 ** (attempt - 1))
        content, problem, try_again = fetch(url)
        if not problem:
            found = blob_id(content)
            if found == expected:
                return content
            problem = f"{len(content)} bytes with blob id {found} came, {expected} was expected"
        if not try_again:
            break
    raise UserError(
        f"HellaSwag cannot be had from {url} ({problem}): copy the file here and name it by path"
    )


def fetch(url: str, seconds: float = 5) -> tuple[bytes, str, bool]:
    """One attempt: the content, the problem ("" if none), and whether to try again may help."""
    import requests

    try:
        answer = connect(url, seconds)
    except TimeoutError as error:
        return b"", str(error), False
    except requests.ConnectionError as error:
        return b"", f"no connection: {type(error).__name__}", False
    except Exception as error:  # a redirect, say, that makes no sense
        return b"", f"no usable answer: {type(error).__name__}", False
    if answer.status_code != 200:
        busy = answer.status_code >= 500 or answer.status_code == 429
        return b"", f"HTTP {answer.status_code} {answer.reason}", busy
    name = url.rsplit("/", 1)[-1]
    size = answer.raw.length_remaining  # None if unknown
    bar = tqdm(total=size, unit="B", unit_scale=True, desc=name, leave=False, disable=None)
    try:
        with bar:
            return read_content(answer, bar.update), "", True
    except TimeoutError as error:
        return b"", str(error), False
    except Exception as error:
        return b"", f"the transfer broke off: {type(error).__name__}", True


def blob_id(content: bytes) -> str:
    """What git calls this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


# -- examples


def iterate_examples(split: str = "val", path: str | Path = "") -> Iterator[dict]:
    """Yields the examples of a split, downloaded if need be, or those of a local jsonl file.

    Each is a dict with the text `ctx`, four texts `endings`, and `label`, the index of the right
    one. Raises UserError for a file that is empty or cannot be read, and at the first line that is
    no example.
    """
    path = Path(path) if path else download(split)
    remedy = "name a jsonl file, or none to download HellaSwag"
    empty = True
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no file: {remedy}")
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    empty = False
                    yield parse_example(line, f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    if empty:
        raise UserError(f"{path} is empty: one example a line was expected; fetch it again")


def parse_example(line: bytes, where: str) -> dict:
    """A line of a file as an example. Raises UserError, which begins with `where`, for others."""
    try:
        example = json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = f"{where} is not JSON ({error}): mend it, or fetch the file again"
        raise UserError(problem) from None
    check_example(example, where)
    return example


def check_example(example, where: str) -> None:
    """Raises UserError, which begins with `where`, unless this is an example.

    A label may be missing, as in the test split, but not wrong.
    """
    fields = example if isinstance(example, dict) else {}
    context = fields.get("ctx")
    endings = fields.get("endings")
    label = fields.get("label", 0)
    if not isinstance(context, str) or not context:
        problem = "has no text under `ctx`"
    elif not isinstance(endings, list) or not all(isinstance(e, str) for e in endings):
        problem = "has no list of texts under `endings`"
    elif len(endings) != 4:
        problem = f"has {len(endings)} endings"
    elif not isinstance(label, int | str) or str(label) not in ("0", "1", "2", "3"):
        problem = f"has the label {reprlib.repr(label)}"
    else:
        return
    raise UserError(
        f"{where} {problem}: an example is a `ctx`, 4 `endings` and a `label` from 0 to 3; "
        "mend or remove it"
    )


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


# -- rows: how examples become batches


@dataclass
class Row:
    """One row of a batch: a context, and behind it some of its endings, side by side.

    What a causal model computes for a token depends on that token and on those before it, never on
    later ones. So it computes the same for a context whichever ending follows, and once is enough
    for all four. Two things let each ending follow the context directly, as if the others were not
    there: its positions go on from the context's last one, and the attention mask hides the other
    endings. The context `a b c` with the endings `d e` and `f g h`:

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
    """

    tokens: list[int]
    pos: list[int]
    part: list[int]
    targets: list[tuple[int, int, int]]


def lay_out(context: list[int], endings: list[list[int]], slot: int, width: int) -> list[Row]:
    """One example as few rows of at most `width` tokens; with width 0, one ending a row.

    slot: the number of the first ending; the others' follow. The drawing in `Row`, with 1 to 8 for
    a to h:

    >>> [row] = lay_out(context=[1, 2, 3], endings=[[4, 5], [6, 7, 8]], slot=0, width=16)
    >>> row.tokens, row.pos, row.part
    ([1, 2, 3, 4, 6, 7], [0, 1, 2, 3, 3, 4], [0, 0, 0, 1, 2, 2])
    >>> row.targets
    [(2, 4, 0), (3, 5, 0), (2, 6, 1), (4, 7, 1), (5, 8, 1)]
    """
    rows: list[Row] = []
    first = len(context)  # the position of an ending's first token
    for i, ending in enumerate(endings):
        inputs = ending[:-1]
        if not rows or len(rows[-1].tokens) + len(inputs) > width:
            rows.append(Row(list(context), pos=list(range(first)), part=[0] * first, targets=[]))
        row = rows[-1]
        start = len(row.tokens)
        row.tokens += inputs
        row.pos += range(first, first + len(inputs))
        row.part += [i + 1] * len(inputs)
        # the context's last token predicts the ending's first; each of its own tokens the next
        columns = [first - 1, *range(start, start + len(inputs))]
        for column, token in zip(columns, ending, strict=True):
            row.targets.append((column, token, slot + i))
    return rows


def lay_out_all(examples: list[dict], encode, window: int, share: bool):
    """-> the rows of all examples, the endings' lengths (N, 4), how many examples had to be cut.

    window: the most tokens that the model can read. Where an example's longest ending does not fit
    behind the context, the context loses its oldest tokens, and an ending that is too long by
    itself its last ones. share: endings share rows.
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
        rows += lay_out(context, endings, slot=4 * n, width=window if share else 0)
    return rows, lengths, truncated


def make_batches(rows: list[Row], budget: int) -> list[list[Row]]:
    """Rows of similar length together, the longest first, at most `budget` tokens with the padding.

    A row that is longer than this is a batch of its own.
    """
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        if not batches or (len(batches[-1]) + 1) * len(batches[-1][0].tokens) > budget:
            batches.append([])
        batches[-1].append(row)
    return batches


# -- scores


def token_losses(model, batch: list[Row], device: torch.device) -> torch.Tensor:
    """−log p of the batch's P targets, row after row: (P,) float32, in nats."""
    tokens = pad([row.tokens for row in batch], device)  # (B, T)
    if isinstance(model, GPT):
        pos = pad([row.pos for row in batch], device)
        part = pad([row.part for row in batch], device)
        looking = part[:, :, None]
        seen = part[:, None, :]
        visible = (seen == 0) | (seen == looking)  # (B, T, T): the context, and one's own ending …
        mask = visible.tril()[:, None]  # … but nothing later, and so none of the padding
        x = model.hidden(tokens, pos, mask)  # (B, T, C)
        to_logits = model.logits
    else:
        is_token = pad([[1] * len(row.tokens) for row in batch], device)
        x = model(input_ids=tokens, attention_mask=is_token, use_cache=False).logits  # (B, T, V)
        to_logits = torch.nn.Identity()
    where = [(b, column, token) for b, row in enumerate(batch) for column, token, _ in row.targets]
    b, columns, targets = torch.tensor(where, device=device).T
    x = x[b, columns]  # (P, C) or (P, V)
    at_once = 128 if device.type == "cpu" else 2048  # a CPU's cache should hold the float32 logits
    losses = []
    for some, y in zip(x.split(at_once), targets.split(at_once), strict=True):
        logits = to_logits(some).float()
        losses.append(logits.logsumexp(-1) - logits.gather(-1, y[:, None])[:, 0])
    return torch.cat(losses)


@contextmanager
def evaluation_mode(model: torch.nn.Module):
    """model.eval() inside; afterwards each module is in the mode it was in, whatever happened."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


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
    arguments are those of `evaluate`; tokens_per_batch: 0 = what suits the device.
    """
    device = torch.device(device)
    model = getattr(model, "_orig_mod", model)  # a compiled one would compile again for each width
    if encode is None:
        tokenizer.check_vocabulary("the model", model.config.vocab_size)
        encode = tokenizer.encode
    share = isinstance(model, GPT)  # transformers' models take no such mask
    rows, lengths, truncated = lay_out_all(examples, encode, context_window(model), share)
    batches = make_batches(rows, tokens_per_batch or (1024 if device.type == "cpu" else 16384))

    # The batches are the same for any number of processes, and so are the losses. Every process
    # runs the model equally often, because a sharded model gathers its weights from all of them
    # each time: in the last round, some repeat a batch for nothing.
    rank = world.rank if world else 0
    size = world.size if world else 1
    turns = range(rank, rank + len(batches), size)
    disable = None if progress and rank == 0 else True  # None: shown where somebody watches
    slots: list[int] = []
    losses: list[torch.Tensor] = []
    with evaluation_mode(model), autocast(device, dtype):  # one autocast casts the weights once
        for turn in tqdm(turns, "HellaSwag", disable=disable, leave=False):
            batch = batches[turn % len(batches)]
            loss = token_losses(model, batch, device)
            if turn < len(batches):
                losses.append(loss)
                slots += [slot for row in batch for _, _, slot in row.targets]
            if stop is not None:
                stop.check()
    total = torch.zeros(4 * len(examples), dtype=torch.float64)
    if losses:
        total.index_add_(0, torch.tensor(slots), torch.cat(losses).cpu().double())
    if world:
        total = world.sum(total)
    return total.view(-1, 4).numpy(), lengths, truncated


def context_window(model) -> int:
    """The most tokens that our GPT, or a model of transformers, can read; some have no limit."""
    ours = getattr(model.config, "block_size", None)
    theirs = getattr(model.config, "max_position_embeddings", None)
    return ours or theirs or 1 << 30


def evaluate(model, examples, device, **options) -> dict:
    """How often our GPT, or a causal language model of transformers, finds the right ending.

    Returns acc (smallest summed loss), acc_norm (smallest mean loss per token of the ending),
    acc_stderr, acc_norm_stderr, num_correct, num_correct_norm, total and num_truncated (contexts
    cut at the left).

    The options go to `score`. world: the processes that share the work; each gets the same result.
    dtype: autocast to it. progress: show a bar. stop: its check() is called after each batch, and
    may raise. encode: the model's tokenizer, str -> ids, if it is not GPT-2's. Leaves the training
    mode and all random state alone. Raises UserError for malformed, unlabelled or no examples, for
    a model with another vocabulary, and for one whose losses are not finite.
    """
    examples = list(examples)
    if not examples:
        raise UserError("there are no examples to score: pass at least one")
    if any("label" not in example for example in examples):
        raise UserError("examples without labels cannot be scored: use the split val or train")
    losses, lengths, truncated = score(model, examples, device, **options)
    if not np.isfinite(losses).all():
        raise UserError(
            "the model's losses are infinite or not a number: its weights are spoiled, or too "
            "large for this precision; try float32, else another checkpoint"
        )
    labels = np.array([int(example["label"]) for example in examples])
    total = len(examples)
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
        examples = load_examples("val", config.path, config.limit, world)
        model = GPT.from_pretrained(config.model).to(world.device)
        dtype, _ = pick_dtype(world.device, config.dtype, world)
        start = time.perf_counter()
        result = evaluate(model, examples, world.device, world=world, dtype=dtype, progress=True)
        seconds = time.perf_counter() - start
        if not world.is_main:
            return
        precision = str(dtype).removeprefix("torch.")
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

"""HellaSwag (Zellers et al. 2019): which of four endings does a model find likeliest? python hellaswag.py --model gpt2

An example is a context, four endings and the label of the right one. A model's choice is the ending with the smallest loss:
acc compares the summed losses, acc_norm the mean loss per token of the ending (as build-nanogpt and llm.c do; note that
lm-evaluation-harness's acc_norm divides by bytes, and its own `hellaswag` task rewrites the texts).
"""

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm

from distributed import World
from model import GPT, autocast, pick_dtype
from tokenizer import UserError, get_tokenizer, run_script

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_{split}.jsonl"
BLOB_IDS = {  # git's names for the contents of these files
    "train": "1997e15fe638ef2aeec6993471159295cd75aab7",
    "val": "0f5ee25d72216f12317d5d8a7b92deafa423d81e",
    "test": "7a4b590ea240595f468bfbc7f2c744e5eef72da5",
}
PUBLISHED = {"gpt2": (0.2859, 0.2955), "gpt2-xl": (0.3842, 0.4893)}  # acc, acc_norm on all of val: build-nanogpt's hellaswag.py


def download(split: str, folder: str | Path = "hellaswag", url: str = URL, blob_ids=BLOB_IDS, attempts=3, patience=1.0) -> Path:
    """The official jsonl of a split (train, val or test), fetched into `folder` unless it is there; whole or not at all.

    A transfer that fails is tried again after `patience` seconds, then after twice as many. Raises UserError where there is
    no network (within seconds), where the attempts run out, and for a file whose content has another git blob id.
    """
    if split not in blob_ids:
        raise UserError(f"HellaSwag has no split {split!r}: use one of {', '.join(blob_ids)}")
    path, url, wanted = Path(folder) / f"hellaswag_{split}.jsonl", url.format(split=split), blob_ids[split]
    if path.exists():
        if (found := blob_id(path.read_bytes())) != wanted:
            raise UserError(f"{path} is not the official file (blob id {found}, not {wanted}): delete it to fetch it anew")
        return path
    for attempt in range(attempts):
        if attempt:
            time.sleep(patience * 2 ** (attempt - 1))
        content, problem, worth_another = fetch(url)
        if not problem and (found := blob_id(content)) != wanted:
            problem = f"{len(content)} bytes with blob id {found} came, {wanted} was expected"
        if not problem or not worth_another:
            break
    if problem:
        raise UserError(f"HellaSwag cannot be had from {url} ({problem}): copy the file here and name it by path")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"HellaSwag cannot be written to {folder} ({error}): name a local file by path") from None
    return path


def fetch(url: str, seconds: float = 5) -> tuple[bytes, str, bool]:
    """One attempt: the content, what went wrong (or nothing), and whether another attempt is worth it."""
    import requests

    # The connection is made in a thread: a dead resolver, or eight dead addresses in turn, outlast any timeout of requests.
    connection: futures.Future = futures.Future()

    def connect() -> None:
        try:
            connection.set_result(requests.get(url, stream=True, timeout=(seconds, 20)))
        except requests.RequestException as error:
            connection.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        answer = connection.result(seconds)
    except futures.TimeoutError:
        return b"", f"no answer within {seconds} seconds", False
    except requests.RequestException as error:
        return b"", f"no connection: {type(error).__name__}", False
    if answer.status_code != 200:
        return b"", f"HTTP {answer.status_code} {answer.reason}", answer.status_code >= 500 or answer.status_code == 429
    content, size = b"", int(answer.headers.get("content-length", 0)) or None
    try:
        with answer, tqdm(total=size, unit="B", unit_scale=True, desc=url.rsplit("/", 1)[-1], leave=False, disable=None) as bar:
            for chunk in answer.iter_content(1 << 20):
                content += chunk
                bar.update(len(chunk))
    except requests.RequestException as error:
        return b"", f"the transfer broke off: {type(error).__name__}", True
    return content, "", True


def blob_id(content: bytes) -> str:
    """What git calls this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def iterate_examples(split: str = "val", path: str | Path = "") -> Iterator[dict]:
    """Yields the examples of a split, or of a local jsonl file: dicts with `ctx`, four `endings` and the right one's `label`.

    Raises UserError for a missing or empty file, and at the first line that is no such example.
    """
    path = Path(path) if path else download(split)
    if not path.is_file():
        raise UserError(f"{path} is not there: HellaSwag as jsonl was expected (without a path it is downloaded)")
    number = 0
    with open(path, "rb") as file:
        for number, line in ((n, line) for n, line in enumerate(file, 1) if line.strip()):
            try:
                example = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number} is not JSON ({error}): mend it, or fetch the file again") from None
            check(example, f"{path}, line {number}")
            yield example
    if not number:
        raise UserError(f"{path} is empty: HellaSwag as jsonl was expected, one example a line; fetch it again")


def check(example, where: str) -> None:
    """Raises UserError unless this is an example; a label may be missing (the test split has none), but not wrong."""
    example, endings = (example, example.get("endings")) if isinstance(example, dict) else ({}, None)
    problems = [
        (not isinstance(example.get("ctx"), str) or not example["ctx"], "has no text under `ctx`"),
        (not isinstance(endings, list) or not all(isinstance(e, str) for e in endings), "has no list of texts under `endings`"),
        (isinstance(endings, list) and len(endings) != 4, f"has {len(endings or [])} endings"),
        (str(example.get("label", 0)) not in ("0", "1", "2", "3"), f"has the label {example.get('label')!r}"),
    ]
    if found := [problem for wrong, problem in problems if wrong]:
        raise UserError(f"{where} {found[0]}: an example is a `ctx`, 4 `endings` and a `label` from 0 to 3; mend or remove it")


def load_examples(split: str, path: str | Path, limit: int, world: World) -> list[dict]:
    """All examples (limit 0) or the first, on every process; one downloads. Where one process fails, all raise UserError."""
    examples, problem = [], ""
    for turn in (True, False):  # the main process first; the others then find the file
        try:
            if world.is_main is turn:
                examples = list(islice(iterate_examples(split, path), limit or None))
        except UserError as error:
            problem = str(error)
        if world.any(bool(problem)):
            raise UserError(problem or "another process could not read HellaSwag and says why")
    return examples


def encode_example(example: dict, encode) -> tuple[list[int], list[list[int]]]:
    """The tokens of the context and of each ending, which begins with a space as in running text."""
    return encode(example["ctx"]), [encode(" " + ending) for ending in example["endings"]]


def render_example(example: dict) -> tuple[torch.Tensor, torch.Tensor, int]:
    """An example as build-nanogpt lays it out: tokens (4, N), mask (4, N), label.

    Row i is the context and ending i, padded with zeros at the right; the mask is 1 on the ending. Raises UserError for a
    dict that is no labelled example.
    """
    check(example, "this example")
    if "label" not in example:
        raise UserError("this example has no label: the splits train and val have them, test has not")
    context, endings = encode_example(example, get_tokenizer().encode_ordinary)
    N = len(context) + max(map(len, endings))
    tokens, mask = torch.zeros(4, N, dtype=torch.long), torch.zeros(4, N, dtype=torch.long)
    for i, ending in enumerate(endings):
        tokens[i, : len(context) + len(ending)] = torch.tensor(context + ending)
        mask[i, len(context) : len(context) + len(ending)] = 1
    return tokens, mask, int(example["label"])


@dataclass
class Row:
    """One row of a batch: a context once, then endings side by side, which see the context and themselves.

    An ending's last token is predicted but never read. `columns` are where the tokens `targets` are predicted, `slots` whose
    loss they belong to: 4 × example + ending. `part` is 0 in the context, 1 to 4 in an ending.
    """

    tokens: list[int]
    pos: list[int]
    part: list[int]
    columns: list[int]
    targets: list[int]
    slots: list[int]


def lay_out(n: int, context: list[int], endings: list[list[int]], width: int) -> list[Row]:
    """Example n as few rows of at most `width` tokens; 0: one ending a row."""
    rows, C = [], len(context)
    for i, ending in enumerate(endings):
        new = len(ending) - 1
        if not rows or len(rows[-1].tokens) + new > width:
            rows.append(Row([*context], [*range(C)], [0] * C, [], [], []))
        row, start = rows[-1], len(rows[-1].tokens)
        row.tokens += ending[:-1]
        row.pos += range(C, C + new)
        row.part += [i + 1] * new
        row.columns += [C - 1, *range(start, start + new)]  # the context's last token predicts every ending's first
        row.targets += ending
        row.slots += [4 * n + i] * len(ending)
    return rows


def make_batches(rows: list[Row], budget: int) -> list[list[Row]]:
    """Rows of similar length together, as many as `budget` tokens hold with their padding; the longest first."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        if not batches or (len(batches[-1]) + 1) * len(batches[-1][0].tokens) > budget:
            batches.append([])
        batches[-1].append(row)
    return batches


def token_losses(model, batch: list[Row], device: torch.device) -> torch.Tensor:
    """−log p of the batch's P targets, (P,) float32 nats, row after row."""
    W = len(batch[0].tokens)

    def padded(rows) -> torch.Tensor:
        return torch.tensor([row + [0] * (W - len(row)) for row in rows], device=device)  # (B, W)

    tokens, part = padded([row.tokens for row in batch]), padded([row.part for row in batch])
    rows, columns = torch.tensor([(b, c) for b, row in enumerate(batch) for c in row.columns], device=device).T
    targets = torch.tensor([t for row in batch for t in row.targets], device=device)
    if isinstance(model, GPT):
        looker, seen = part[:, :, None], part[:, None, :]
        visible = (seen == 0) | (seen == looker)  # (B, W, W): the context and one's own ending …
        mask = visible.tril()[:, None]  # … and nothing later; so nobody looks at the padding, which is at the right
        x = model.hidden(tokens, padded([row.pos for row in batch]), mask)[rows, columns]  # (P, C)
        project = model.logits
    else:
        lengths = torch.tensor([[len(row.tokens)] for row in batch], device=device)
        attention_mask = (torch.arange(W, device=device) < lengths).long()
        x = model(input_ids=tokens, attention_mask=attention_mask, use_cache=False).logits[rows, columns]  # (P, V)
        project = torch.nn.Identity()
    at_once = 128 if device.type == "cpu" else 2048  # rows of logits in float32: on a CPU they should stay in its cache
    losses = []
    for some, t in zip(x.split(at_once), targets.split(at_once), strict=True):
        logits = project(some).float()
        losses.append(logits.logsumexp(-1) - logits.gather(-1, t[:, None])[:, 0])
    return torch.cat(losses)


def prepare(examples: list[dict], encode, window: int, share: bool) -> tuple[list[Row], np.ndarray, int]:
    """The rows of all examples, the endings' lengths (N, 4), and how many examples had to be cut to fit the window."""
    rows, lengths, truncated = [], np.zeros((len(examples), 4), dtype=np.int64), 0
    for n, example in enumerate(examples):
        check(example, f"example {n}")
        context, endings = encode_example(example, encode)
        longest = max(map(len, endings))
        if len(context) + longest - 1 > window:  # the oldest tokens of the context go; an ending loses its last, if it must
            truncated += 1
            context = context[-max(1, window - longest + 1) :]
            endings = [ending[:window] for ending in endings]
        lengths[n] = [len(ending) for ending in endings]
        rows += lay_out(n, context, endings, window if share else 0)
    return rows, lengths, truncated


@torch.no_grad()
def score(
    model, examples, device, *, world=None, dtype=torch.float32, progress=False, stop=None, tokens_per_batch=0, encode=None
):
    """-> losses (N, 4), lengths (N, 4), truncated: the endings' summed losses in nats (float64) and their tokens.

    truncated counts the examples that were cut to fit the model. The arguments are those of `evaluate`.
    """
    device, model = torch.device(device), getattr(model, "_orig_mod", model)  # compiled, it would recompile for every width
    rank, size = (world.rank, world.size) if world else (0, 1)
    window = getattr(model.config, "block_size", None) or getattr(model.config, "max_position_embeddings", None) or 1 << 30
    encode = encode or get_tokenizer().encode_ordinary
    rows, lengths, truncated = prepare(examples, encode, window, share=isinstance(model, GPT))

    # The batches are the same for any number of processes, and so are the losses. Every process makes as many forward passes
    # as the others (in the last round some repeat a batch for nothing): a sharded model gathers its weights in each.
    batches = make_batches(rows, tokens_per_batch or (1024 if device.type == "cpu" else 16384))
    slots, losses, modes = [], [], [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with autocast(device, dtype):  # one context around all batches: the weights are cast once
            hidden = None if progress and rank == 0 else True  # None: shown where somebody watches a terminal
            for k in tqdm(range(rank, rank + len(batches), size), "HellaSwag", disable=hidden, leave=False):
                batch = batches[k % len(batches)]
                loss = token_losses(model, batch, device)
                if k < len(batches):
                    slots += [slot for row in batch for slot in row.slots]
                    losses.append(loss)
                if stop is not None:
                    stop.check()
    finally:
        for module, mode in modes:
            module.training = mode
    total = torch.zeros(4 * len(examples), dtype=torch.float64)
    if losses:
        total.index_add_(0, torch.tensor(slots), torch.cat(losses).cpu().double())
    return (world.sum(total) if world else total).view(-1, 4).numpy(), lengths, truncated


def evaluate(model, examples, device, *, world=None, dtype=torch.float32, progress=False, **options) -> dict:
    """Scores `examples` (as iterate_examples gives them) with our GPT, or any causal language model of transformers.

    Returns acc (smallest summed loss), acc_norm (smallest mean loss per token of the ending), their standard errors,
    num_correct, num_correct_norm, total and num_truncated (contexts cut at the left). world: the processes that share the
    work; each gets the same result. dtype: autocast to it. stop: its check() is called after each batch, and may raise.
    encode: the model's tokenizer, str -> ids, where it is not GPT-2's. Leaves the training mode and all random state alone.
    Raises UserError for malformed, unlabelled or no examples.
    """
    examples = list(examples)
    if not examples:
        raise UserError("there are no examples to score: pass at least one")
    if any("label" not in example for example in examples):
        raise UserError("examples without labels cannot be scored: use the split val or train, not test")
    losses, lengths, truncated = score(model, examples, device, world=world, dtype=dtype, progress=progress, **options)
    labels, total = np.array([int(example["label"]) for example in examples]), len(examples)
    result = {}
    for suffix, value in ("", losses), ("_norm", losses / lengths):
        correct = int((value.argmin(1) == labels).sum())
        acc = correct / total
        stderr = math.sqrt(acc * (1 - acc) / max(1, total - 1))
        result |= {f"acc{suffix}": acc, f"acc{suffix}_stderr": stderr, f"num_correct{suffix}": correct}
    return result | {"total": total, "num_truncated": truncated}


@dataclass
class HellaSwagConfig:
    """Score a GPT-2 on HellaSwag; with torchrun, on many processes."""

    model: str = "gpt2"  # gpt2 | gpt2-medium | gpt2-large | gpt2-xl, a checkpoint, or any Hugging Face GPT-2 directory
    limit: int = 0  # only the first examples; 0 = all 10,042
    path: str = ""  # a jsonl file; empty = download it
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # what to autocast to; auto: the fastest here
    json: str = ""  # write the result to this file


def main() -> None:
    config = tyro.cli(HellaSwagConfig)
    if config.limit < 0:
        raise UserError(f"--limit {config.limit}: 0 (all examples) or more was expected")
    if config.json and not (folder := Path(config.json).resolve().parent).is_dir():
        raise UserError(f"--json {config.json}: there is no directory {folder}, make it first")
    with World(config.device) as world:
        examples = load_examples("val", config.path, config.limit, world)
        model = GPT.from_pretrained(config.model).to(world.device)
        dtype, _ = pick_dtype(world.device, config.dtype, world)
        start = time.perf_counter()
        result = evaluate(model, examples, world.device, world=world, dtype=dtype, progress=True)
        seconds, precision = time.perf_counter() - start, str(dtype).removeprefix("torch.")
        if world.is_main:
            report(config.model, result, complete=not config.path and not config.limit)
            print(f"{result['total']} examples in {seconds:.1f} s on {world.size} × {world.device.type}, {precision}")
        if world.is_main and config.json:
            record = dict(model=config.model, path=config.path, dtype=precision, seconds=seconds, **result)
            Path(config.json).write_text(json.dumps(record, indent=2) + "\n")


def report(model: str, result: dict, complete: bool) -> None:
    """Prints what was found, what it means and, for all of val, what others found for this model."""
    meanings = {"": "smallest summed loss of the ending", "_norm": "smallest mean loss per token of the ending"}
    for i, (suffix, meaning) in enumerate(meanings.items()):
        published = f"; published {PUBLISHED[model][i]:.4f}" if complete and model in PUBLISHED else ""
        print(
            f"acc{suffix:5} {result[f'acc{suffix}']:.4f} ± {result[f'acc{suffix}_stderr']:.4f}  "
            f"{result[f'num_correct{suffix}']}/{result['total']}  ({meaning}{published})"
        )
    if result["num_truncated"]:
        print(f"{result['num_truncated']} contexts were cut at the left to fit the model")


if __name__ == "__main__":
    run_script(main)

"""The hot paths beside the training step: bench.py --attention, --generate, --validation,
--hellaswag and --data.

Each is compared with its plain version and its physical limit. `m` is bench.py's Machine.
"""

import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

import hellaswag
from benchmarks.training_step import MadeUpTokens
from benchmarks.turns import Side, compare, rates_of, summarize
from model import GPT, GPTConfig
from support.device import autocast, compile_blocks, keep_freed_memory
from support.distributed import World
from support.generation import choose
from support.tokenizer import EOT, VOCAB_SIZE, get_tokenizer
from train_gpt2 import validate

PROMPT = 8  # tokens
NEW = 128  # tokens


# -- attention


def compare_attention(m) -> Iterator[dict]:
    """Attention by sequence length, fused and written out."""
    m.notes.append(f"4 sequences, {m.size['n_head']} heads, {m.dtype}, forward and backward")
    lengths = [2**i for i in range(5, 20) if 2**i <= 4 * m.config.sequence_length]
    for T in lengths[-5:]:
        sides = []
        ways = {"written out": False, "fused": True}
        for way, fused in ways.items():
            options = dict(fused=fused, T=T, dtype=m.dtype, **m.size)
            sides.append(Side(f"{way}, T {T}", attention, options, amount=4 * T))
        for row, way in zip(m.measure(sides), ways, strict=True):
            yield row | dict(way=way, T=T)


def attention(world: World, fused, T, dtype, n_layer, n_head, n_embd) -> Callable:
    """Makes a run of causal attention alone, forward and backward, on 4 sequences.

    fused: by PyTorch's fused kernel; else written out as in the paper (Vaswani et al. 2017).
    """
    shape = (3, 4, n_head, T, n_embd // n_head)
    qkv = torch.randn(shape, device=world.device, dtype=dtype)
    q, k, v = (x.requires_grad_() for x in qkv.unbind())  # each (4, nh, T, hs)
    future = torch.ones(T, T, dtype=torch.bool, device=world.device).triu(1)

    def written_out() -> torch.Tensor:
        scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5  # (4, nh, T, T)
        scores = scores.masked_fill(future, -torch.inf)
        return scores.float().softmax(-1).to(dtype) @ v

    def run() -> None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if fused else written_out()
        y.sum().backward()

    return run


# -- generation


def compare_generation(m) -> Iterator[dict]:
    """Generation for 1 and 4 prompts.

    Its limit: for each new token of a batch every weight is read once.
    """
    speed = read_speed(m.device)
    with torch.device("meta"):
        weights = GPT(GPTConfig(**m.size)).num_params() * m.dtype.itemsize
    limit = f"reading {weights / 1e6:.0f} MB at {speed / 1e9:.1f} GB/s"
    m.notes.append(f"{NEW} tokens a prompt, {m.dtype}; limit: {limit}")
    ways = ["transformers", "no cache", "ours, eager"]
    if not m.why_eager:
        ways.append("ours, compiled")
    for rows in (1, 4):
        sides = []
        for how in ways:
            side = Side(
                name=f"{how}, {rows} × {NEW}",
                make=generation,
                options=dict(how=how, rows=rows, size=m.size, dtype=m.dtype),
                amount=rows * NEW,
                limits={"of limit": rows * speed / weights},
            )
            sides.append(side)
        yield from m.measure(sides)


def read_speed(device: torch.device) -> float:
    """Bytes a second at which the device reads memory: the best of five, ten sums of 256 MiB each.

    Ten, because a GPU would otherwise spend as long on being told what to do.
    """
    x = torch.ones(2**26, device=device)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10):
            total = x.sum()
        total.item()
        best = max(best, 10 * x.nbytes / (time.perf_counter() - start))
    return best


def generation(world: World, how, rows, size, dtype) -> Callable:
    """Makes a run that samples NEW tokens after each of `rows` prompts.

    how: transformers; no cache, a loop that reads the whole prefix for each token (as nanoGPT and
    build-nanogpt do); ours, eager; or ours, compiled.
    """
    idx = torch.randint(EOT, (rows, PROMPT)).to(world.device)
    if how == "transformers":
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(**size))
    else:
        model = GPT(GPTConfig(**size))
    model.to(world.device, dtype).eval().requires_grad_(False)

    def by_transformers() -> None:
        model.generate(
            idx,
            attention_mask=torch.ones_like(idx),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            pad_token_id=EOT,
            do_sample=True,
            temperature=0.9,
            top_k=50,
            top_p=1.0,
        )

    def without_cache() -> None:
        tokens = idx
        for _ in range(NEW):
            logits, _ = model(tokens)
            new = choose(logits[:, -1].float(), temperature=0.9, top_k=50)
            tokens = torch.cat([tokens, new[:, None]], dim=1)

    def ours() -> None:
        model.generate(idx, NEW, temperature=0.9, top_k=50, compile=how == "ours, compiled")

    return {"transformers": by_transformers, "no cache": without_cache}.get(how, ours)


# -- validation


def compare_validation(m) -> Iterator[dict]:
    """Validation as training does it, and with its compiled blocks and loss switched off."""
    B, T = m.config.batch_size, m.config.sequence_length
    sides = []
    for how in ["eager"] if m.why_eager else ["eager", "compiled"]:
        options = dict(how=how, B=B, T=T, size=m.size, dtype=m.dtype)
        sides.append(Side(f"validation, {how}", validation, options, amount=2 * B * T))
    yield from m.measure(sides)


def validation(world: World, how, B, T, size, dtype) -> Callable:
    """Makes a run of `validate` over two batches, which returns the loss."""
    keep_freed_memory(world.device)
    model = GPT(GPTConfig(block_size=T, **size)).to(world.device)
    if how == "compiled":
        compile_blocks(model, recompute=False)
    loader = MadeUpTokens(B, T, world)
    return lambda: dict(loss=validate(model, loader, 2 * B * T, world, dtype))


# -- HellaSwag


def compare_scoring(m) -> Iterator[dict]:
    """HellaSwag in batches and one example at a time.

    The limit is that of the matrix products: over each context once and over its endings, and over
    the vocabulary for the endings.
    """
    examples = draw_examples(m.config.hellaswag_path, m.config.examples)
    ways = ["one example at a time", "in batches, eager"]
    if not m.why_eager:
        ways.append("in batches, compiled")
    sides = []
    for how in ways:
        side = Side(
            name=how,
            make=scoring,
            options=dict(
                how=how,
                path=m.config.hellaswag_path,
                count=m.config.examples,
                size=m.size,
                dtype=m.dtype,
            ),
            amount=len(examples),
            unit="examples/s",
            limits={"of limit": len(examples) * m.peak(m.dtype) / scoring_flops(examples, m.size)},
        )
        sides.append(side)
    yield from m.measure(sides)


def scoring_flops(examples: list[dict], size: dict[str, int]) -> int:
    """The operations without which these examples cannot be scored."""
    encode = get_tokenizer().encode_ordinary
    read = 0  # tokens that go through the blocks
    predicted = 0  # tokens whose loss is needed
    for example in examples:
        context, endings = hellaswag.encode_example(example, encode)
        tokens = sum(len(ending) for ending in endings)
        predicted += tokens
        read += len(context) + tokens - 4  # the last token of each ending is only predicted
    C = size["n_embd"]
    return 2 * 12 * size["n_layer"] * C**2 * read + 2 * VOCAB_SIZE * C * predicted


def draw_examples(path: str, count: int) -> list[dict]:
    examples = list(hellaswag.iterate_examples("val", path))
    return random.Random(0).sample(examples, min(count, len(examples)))


def scoring(world: World, how, path, count, size, dtype) -> Callable:
    """Makes a run of HellaSwag, prepared before as training does it, or one example at a time.

    how: one example at a time; in batches, eager; or in batches, compiled. The run returns how many
    are right.
    """
    if how != "one example at a time":
        keep_freed_memory(world.device)
    model = GPT(GPTConfig(**size)).to(world.device).eval()
    examples = draw_examples(path, count)
    prepared = hellaswag.prepare(examples, model, world.device)
    if how == "in batches, compiled":
        compile_blocks(model, recompute=False)

    def in_batches() -> dict:
        result = hellaswag.evaluate(model, prepared, world.device, dtype=dtype)
        return dict(right=result["num_correct_norm"])

    def one_by_one() -> dict:
        return dict(right=score_one_by_one(model, examples, world.device, dtype))

    return one_by_one if how == "one example at a time" else in_batches


@torch.no_grad()
def score_one_by_one(
    model: GPT, examples: list[dict], device: torch.device, dtype: torch.dtype
) -> int:
    """HellaSwag as build-nanogpt scores it -> how many are right.

    For each example four padded rows and all of their logits.
    """
    correct = 0
    for example in examples:
        tokens, mask, label = hellaswag.render_example(example)
        tokens = tokens.to(device)  # (4, N)
        mask = mask.to(device)[:, 1:]
        with autocast(device, dtype):
            logits, _ = model(tokens)
        predictions = logits[:, :-1].flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        losses = F.cross_entropy(predictions, targets, reduction="none").view(4, -1)
        mean_losses = (losses * mask).sum(1) / mask.sum(1)
        correct += int(mean_losses.argmin() == label)
    return correct


# -- text to shards


def compare_tokenizing(m) -> Iterator[dict]:
    """Text to shards; the limit is the bare tokenizer on as many cores.

    fineweb_bench.py measures, in turns of its own.
    """
    found = run_fineweb_bench(m.config.megabytes, m.config.rounds)
    tokens = int(found["rounds"][0]["tokens"])
    names = {"classic": "build-nanogpt's loop", "ours": "fineweb.py", "bare": "tokenizer alone"}
    rows = {}
    rates = {}
    for way, name in names.items():
        turns = []
        for seconds in found["rounds"]:
            turns.append(dict(seconds=seconds[way], memory=math.nan, returned={}))
        side = Side(name, make=run_fineweb_bench, options={}, amount=tokens)
        rates[way] = rates_of(side, turns)
        rows[way] = summarize(side, turns)
        rows[way]["memory_gb"] = None
    rows["ours"]["memory_gb"] = found["peak_mb"]["tree_pss_mb"] / 1000
    for way, row in rows.items():
        if way != "classic":
            row |= compare(rates[way], rates["classic"])
        yield row | {"of limit": row["median"] / rows["bare"]["median"]}


def run_fineweb_bench(megabytes: int, rounds: int) -> dict:
    """What fineweb_bench.py writes as JSON."""
    script = Path(__file__).with_name("fineweb_bench.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        flags = [f"--megabytes={megabytes}", f"--rounds={rounds}", f"--json={out}"]
        command = [sys.executable, str(script), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())

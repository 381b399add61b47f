"""bench.py --generate, --hellaswag and --data: the hot paths beside the training step, each against its plain version and its
physical limit. `m` is bench.py's Machine."""

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
from benchmarks.turns import Side, summarize
from model import GPT, GPTConfig, autocast, choose
from tokenizer import EOT, VOCAB_SIZE, get_tokenizer

PROMPT, NEW = 8, 128  # tokens


def generation(world, how, rows, size, dtype) -> Callable:
    """NEW tokens after each of some prompts, sampled: by transformers, a loop without a cache, or ours, eager or compiled."""
    idx = torch.randint(EOT, (rows, PROMPT)).to(world.device)
    if how == "transformers":
        from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(**size)) if how == "transformers" else GPT(GPTConfig(**size))
    model.to(world.device, dtype).eval().requires_grad_(False)

    def by_transformers() -> None:
        lengths = dict(attention_mask=torch.ones_like(idx), max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=EOT)
        model.generate(idx, do_sample=True, temperature=0.9, top_k=50, top_p=1.0, **lengths)

    def whole_prefix() -> None:  # as nanoGPT and build-nanogpt
        tokens = idx
        for _ in range(NEW):
            tokens = torch.cat([tokens, choose(model(tokens)[0][:, -1].float(), 0.9, 50, None)[:, None]], 1)

    def ours() -> None:
        model.generate(idx, NEW, temperature=0.9, top_k=50, compile="compiled" in how)

    return {"transformers": by_transformers, "no cache": whole_prefix}.get(how, ours)


@torch.no_grad()
def score_one_by_one(model: GPT, examples: list[dict], device: torch.device, dtype: torch.dtype) -> int:
    """HellaSwag as build-nanogpt scores it: for each example four padded rows and all of their logits; -> the right ones."""
    correct = 0
    for example in examples:
        tokens, mask, label = (torch.as_tensor(t).to(device) for t in hellaswag.render_example(example))
        with autocast(device, dtype):
            logits, _ = model(tokens)
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(4, -1)
        mask = mask[:, 1:]
        correct += int(((losses * mask).sum(1) / mask.sum(1)).argmin() == label)
    return correct


def draw_examples(path: str, count: int) -> list[dict]:
    examples = list(hellaswag.iterate_examples("val", path))
    return random.Random(0).sample(examples, min(count, len(examples)))


def scoring(world, batched, path, count, size, dtype) -> Callable:
    """HellaSwag, as hellaswag.py scores it or one example at a time -> how many are right."""
    model, examples = GPT(GPTConfig(**size)).to(world.device).eval(), draw_examples(path, count)
    if batched:
        return lambda: dict(right=hellaswag.evaluate(model, examples, world.device, dtype=dtype)["num_correct_norm"])
    return lambda: dict(right=score_one_by_one(model, examples, world.device, dtype))


def read_speed(device: torch.device) -> float:
    """Bytes a second at which the device reads memory: the best of ten sums over 256 MiB."""
    x, best = torch.ones(2**26, device=device), 0.0
    for _ in range(10):
        start = time.perf_counter()
        x.sum().item()
        best = max(best, x.nbytes / (time.perf_counter() - start))
    return best


def generate(m) -> Iterator[dict]:
    """Generation for 1 and 4 prompts, against the limit that every weight is read once for each new token of the batch."""
    speed = read_speed(m.device)
    with torch.device("meta"):
        weights = GPT(GPTConfig(**m.size)).num_params() * m.dtype.itemsize
    m.notes.append(f"{NEW} tokens a prompt, {m.dtype}; limit: reading {weights / 1e6:.0f} MB at {speed / 1e9:.1f} GB/s")
    for rows in (1, 4):
        limits, options = {"of limit": rows * speed / weights}, dict(rows=rows, size=m.size, dtype=m.dtype)
        ways = ["transformers", "no cache", "ours, eager", *["ours, compiled"] * (not m.why_not_compile)]
        yield from m.measure(
            Side(f"{how}, {rows} × {NEW}", generation, dict(how=how, **options), rows * NEW, limits=limits) for how in ways
        )


def score(m) -> Iterator[dict]:
    """HellaSwag, against the matrix products over each context once and its endings, and over the vocabulary for these."""
    examples = draw_examples(m.config.hellaswag_path, m.config.examples)
    encoded = [hellaswag.encode_example(example, get_tokenizer().encode_ordinary) for example in examples]
    predicted = sum(len(ending) for _, endings in encoded for ending in endings)
    read = predicted + sum(len(context) - 4 for context, _ in encoded)  # an ending's last token is only predicted
    L, C = m.size["n_layer"], m.size["n_embd"]
    flops = 2 * 12 * L * C**2 * read + 2 * VOCAB_SIZE * C * predicted
    limits = {"of limit": len(examples) * m.peak(m.dtype) / flops}
    options = dict(path=m.config.hellaswag_path, count=m.config.examples, size=m.size, dtype=m.dtype)
    yield from m.measure(
        Side(name, scoring, dict(batched=batched, **options), len(examples), "examples/s", limits=limits)
        for name, batched in {"one example at a time": False, "in batches": True}.items()
    )


def prepare(m) -> Iterator[dict]:
    """Text to shards: fineweb_bench.py's own turns, against the bare tokenizer on as many cores."""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(__file__).with_name("fineweb_bench.py"), Path(folder) / "result.json"
        flags = ["--megabytes", str(m.config.megabytes), "--rounds", str(m.config.rounds), "--json", str(out)]
        subprocess.run([sys.executable, str(script), *flags], check=True, stdout=subprocess.DEVNULL)
        found = json.loads(out.read_text())
    rows = {}
    for side, name in dict(classic="build-nanogpt's loop", ours="fineweb.py", bare="tokenizer alone").items():
        turns = [dict(seconds=taken[side], memory=math.nan, returned={}) for taken in found["rounds"]]
        rows[side] = summarize(Side(name, prepare, {}, int(found["rounds"][0]["tokens"])), turns)
        rows[side]["memory_gb"] = found["peak_mb"]["tree_pss_mb"] / 1000 if side == "ours" else None
    for row in rows.values():
        yield row | {"total": row["median"] / rows["classic"]["median"], "of limit": row["median"] / rows["bare"]["median"]}

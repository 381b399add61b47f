"""What bench.py measures: this repository, transformers, and build-nanogpt's ways.

Most functions here make a side of a comparison (measure.Side): from the World and the side's
options they make the function that is timed.
"""

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hellaswag
from model import GPT, DataLoaderLite, GPTConfig
from support.compile import compile_blocks
from support.device import autocast, keep_freed_memory
from support.distributed import Stop, World
from support.generation import compile_step
from support.optim import decay_groups
from support.sharding import wrap
from support.tokenizer import gpt2
from train_gpt2 import train_step

# -- the training step


class MadeUpTokens(DataLoaderLite):
    """The real loader, on a shard of random tokens in documents of 1,000."""

    def __init__(self, B: int, T: int, world: World):
        self.folder = tempfile.TemporaryDirectory()
        tokens = np.random.default_rng(0).integers(gpt2().eot, size=2_000_000, dtype=np.uint16)
        tokens[::1000] = gpt2().eot
        folder = self.folder.name
        np.save(f"{folder}/made-up_train_000001.npy", tokens)
        pin = world.device.type == "cuda"
        super().__init__(folder, "train", B, T, world.rank, world.size, shuffle=True, pin=pin)


def training(
    world: World, *, B: int, T: int, size: dict, dtype: torch.dtype, hf: bool = False, **on: Any
) -> Callable:
    """The real train_step on made-up tokens; the run returns the loss.

    hf: the model of transformers. on: which techniques are on, see bench.py's TECHNIQUES.
    """
    torch.set_float32_matmul_precision("high" if on["tf32"] else "highest")
    if on["keep_memory"]:
        keep_freed_memory(world.device)
    if hf:
        model = make_transformers_model(size, T)
        model.forward = partial(transformers_loss, model.forward)
    else:
        model = GPT(GPTConfig(block_size=T, pad_vocab_to=on["pad_vocab_to"], **size))
    if not on["own_loss"]:
        model.forward = partial(plain_loss, model)
    model.to(world.device)
    groups = decay_groups(list(model.parameters()), weight_decay=0.1)
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=on["fused"] or None)
    if on["compile"] and hf:
        model = torch.compile(model, dynamic=False)
    elif on["compile"]:
        compile_blocks(model, on["recompute"])
    step = partial(
        train_step,
        model=wrap(model, world),
        optimizers=[adamw],
        scaler=torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16),
        loader=MadeUpTokens(B, T, world),
        grad_accum_steps=1,
        world=world,
        stop=Stop(world),
        dtype=dtype,
        lr=6e-4,
        grad_clip=1.0,
    )

    def run() -> dict:
        with nullcontext() if on["flash"] else sdpa_kernel([SDPBackend.MATH]):
            loss, _, _ = step()
        return dict(loss=loss)

    return run


def plain_loss(model: GPT, x: Tensor, y: Tensor) -> tuple[None, Tensor]:
    """The loss as everyone writes it first, from the float32 logits of all tokens."""
    logits = model.logits(model.hidden(x)).float()  # (B, T, V)
    return None, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def transformers_loss(their_forward: Callable, x: Tensor, _y: Tensor) -> tuple:
    return None, their_forward(input_ids=x, labels=x, use_cache=False).loss  # it shifts labels


def make_transformers_model(size: dict[str, Any], T: int) -> Any:
    """transformers' GPT-2, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(**size, n_positions=T, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


# -- generation


def generation(
    world: World, *, rows: int, size: dict, dtype: torch.dtype, hf: bool, compile: bool
) -> Callable:
    """Samples 128 tokens after each of `rows` prompts. hf: by transformers."""
    idx = torch.randint(gpt2().eot, (rows, 8)).to(world.device)
    sampling: dict[str, Any] = dict(max_new_tokens=128, temperature=0.9, top_k=50)
    model = make_transformers_model(size, T=1024) if hf else GPT(GPTConfig(**size))
    if hf:
        sampling |= dict(do_sample=True, top_p=1.0, min_new_tokens=128, pad_token_id=gpt2().eot)
        sampling["attention_mask"] = torch.ones_like(idx)
    model.to(world.device, dtype).eval().requires_grad_(False)
    if compile:
        compile_step(model)

    def run() -> None:
        model.generate(idx, **sampling)

    return run


# -- HellaSwag


def scoring(
    world: World, *, batched: bool, compile: bool, examples: list, size: dict, dtype: torch.dtype
) -> Callable:
    """Scores HellaSwag in batches or one example at a time, and returns how many are right."""
    model = GPT(GPTConfig(**size)).to(world.device).eval()
    if compile:
        compile_blocks(model, recompute=False)
    if not batched:
        return partial(score_one_at_a_time, model, examples, world, dtype)
    keep_freed_memory(world.device)
    prepared = hellaswag.prepare(examples, model, world.device)

    def run() -> dict:
        result = hellaswag.evaluate(model, prepared, world.device, dtype=dtype)
        return dict(right=result["num_correct_norm"])

    return run


@torch.no_grad()
def score_one_at_a_time(model: GPT, examples: list, world: World, dtype: torch.dtype) -> dict:
    """HellaSwag as build-nanogpt scores it: four padded rows per example, and all their logits."""
    correct = 0
    for example in examples:
        tokens, mask, label = hellaswag.render_example(example)
        tokens = tokens.to(world.device)  # (4, N)
        mask = mask.to(world.device)[:, 1:]
        with autocast(world.device, dtype):
            logits, _ = model(tokens)
        predictions = logits[:, :-1].flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        losses = F.cross_entropy(predictions, targets, reduction="none").view(4, -1)
        mean_losses = (losses * mask).sum(1) / mask.sum(1)
        correct += int(mean_losses.argmin() == label)
    return dict(right=correct)


# -- text to shards


def write_documents(path: str, megabytes: float) -> float:
    """Writes Python's own sources as JSON lines, again and again -> megabytes of text."""
    files = itertools.cycle(sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")))
    written = 0.0
    with open(path, "w") as lines:
        while written < megabytes:
            text = next(files).read_text(encoding="utf-8", errors="replace")
            lines.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode()) / 1e6
    return written


def classic_pool(world: World, *, path: str) -> Callable:
    """build-nanogpt's loop without its files: one document at a time to half the cores."""
    documents = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]
    pool = multiprocessing.Pool(max(1, (os.cpu_count() or 1) // 2))
    count = partial(pool.imap, classic_tokenize, documents, chunksize=16)
    return lambda: dict(tokens=sum(map(len, count())))


def classic_tokenize(document: str) -> np.ndarray:
    return np.array([gpt2().eot, *gpt2().encoding.encode_ordinary(document)], np.uint16)


def fineweb_script(world: World, *, path: str) -> Callable:
    """fineweb.py as a user runs it."""
    command = [sys.executable, f"{Path(__file__).parent.parent}/fineweb.py", "--source", path]

    def run() -> dict:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*command, "--data-dir", folder], check=True, stdout=subprocess.DEVNULL)
            return dict(tokens=json.loads(Path(folder, "manifest.json").read_text())["tokens"])

    return run

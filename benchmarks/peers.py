"""What the benchmarks measure: this repository, transformers, nanoGPT, build-nanogpt."""

import importlib
import math
import os
import pickle
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hellaswag
from config import TrainConfig
from model import GPT, DataLoaderLite, GPTConfig
from optim import decay_groups
from support.base.errors import UserError
from support.base.programs import run_program
from support.machine.compile import compile_blocks
from support.machine.device import autocast, keep_freed_memory, pick_dtype
from support.machine.distributed import Stop, World
from support.machine.graphs import Graphs, run_eagerly
from support.machine.sharding import wrap
from support.run.log import METRICS, end_of, read_metrics, read_run
from support.text.tokenizer import gpt2
from support.weights.generation import compile_step
from train_gpt2 import learning_rate, train_step

# -- what bench.py measures: functions of a World and a Side's options, which return what is timed


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
    world: World, *, B: int, T: int, size: dict, dtype: torch.dtype, theirs: str = "", **on: Any
) -> Callable:
    """The real train_step on made-up tokens. theirs: "hf" or a clone of nanoGPT. on: TECHNIQUES."""
    torch.set_float32_matmul_precision("high" if on["tf32"] else "highest")
    if on["keep_memory"]:
        keep_freed_memory(world.device)
    if theirs == "hf":
        model = make_transformers_model(size, T)
        plain = model.forward  # which shifts labels
        model.forward = lambda x, _y: (None, plain(input_ids=x, labels=x, use_cache=False).loss)
    elif theirs:
        code = import_nanogpt(theirs)
        shape = dict(size, block_size=T, vocab_size=50304)  # padded, as in its train.py
        model = code.GPT(code.GPTConfig(**shape, dropout=0.0, bias=True))
    else:
        model = GPT(GPTConfig(block_size=T, pad_vocab_to=on["pad_vocab_to"], **size))
    if not on["own_loss"]:
        model.forward = partial(plain_loss, model)
    model.to(world.device)
    groups = decay_groups(list(model.parameters()), weight_decay=0.1)
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=on["fused"] or None)
    if on["compile"] and theirs:
        model = torch.compile(model, dynamic=False)
    elif on["compile"]:
        compile_blocks(model, on["recompute"])
    run_part = Graphs([adamw], world.device).run if on["graphs"] else run_eagerly
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
        run_part=run_part,
    )

    # by patching, not by sdpa_kernel, which the compiler's cache does not tell apart
    rewritten = patch.object(F, "scaled_dot_product_attention", written_out)

    def run() -> dict:
        with nullcontext() if on["flash"] else rewritten:
            loss, _, _ = step()
        return dict(loss=loss)

    return run


def written_out(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """Causal attention as everyone writes it first: it makes all T × T weights of each head."""
    T, hs = q.shape[-2:]
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT) / math.sqrt(hs)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def plain_loss(model: GPT, x: Tensor, y: Tensor) -> tuple[None, Tensor]:
    """The loss as everyone writes it first, from the float32 logits of all tokens."""
    logits = model.logits(model.hidden(x)).float()  # (B, T, V)
    return None, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def make_transformers_model(size: dict[str, Any], T: int) -> Any:
    """transformers' GPT-2, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**size, n_positions=T, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config)


def find_nanogpt(peer: str) -> Path:
    """The path of a nanoGPT clone. Raises UserError if it is none."""
    if not Path(peer, "train.py").exists() or not Path(peer, "configurator.py").exists():
        advice = "git clone https://github.com/karpathy/nanoGPT"
        raise UserError(f"--peer {peer!r} is no clone of nanoGPT: {advice}")
    return Path(peer).resolve()


def import_nanogpt(peer: str | Path) -> Any:
    """Imports nanoGPT's model.py instead of ours, also for its own train.py."""
    sys.path.insert(0, str(peer))
    sys.modules.pop("model", None)
    return importlib.import_module("model")


def attention(world: World, *, T: int, fused: bool, dtype: torch.dtype) -> Callable:
    """Causal attention of T tokens, forward only, by GPT-2's 12 heads of 64."""
    q, k, v = torch.randn(3, 1, 12, T, 64, dtype=dtype, device=world.device)
    attend = partial(F.scaled_dot_product_attention, is_causal=True) if fused else written_out
    return partial(attend, q, k, v)


def adamw(world: World, *, size: dict, way: dict[str, Any]) -> Callable:
    """AdamW's update of a GPT-2, gradients given. way: PyTorch's flags of its implementation."""
    model = GPT(GPTConfig(**size)).to(world.device)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return torch.optim.AdamW(model.parameters(), **way).step


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
    return partial(model.generate, idx, **sampling)


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


# -- minutes of training, for race.py: each side returns its points

Point = tuple[int, float, float]  # updates, seconds of training, bits per byte


class Clock:
    """Counts the seconds between `go` and `stop`."""

    seconds = 0.0
    since: float | None = None

    def go(self) -> None:
        self.since = self.since or time.perf_counter()

    def stop(self) -> float:
        if self.since:
            self.seconds += time.perf_counter() - self.since
        self.since = None
        return self.seconds


@torch.no_grad()
def score(loss: Callable[[Tensor, Tensor], Tensor], folder: Path, T: int) -> float:
    """Bits per byte of val.bin, cut into sequences of T tokens. loss: the mean; -1 is ignored."""
    tokens = torch.from_numpy(np.fromfile(folder / "val.bin", np.uint16).astype(np.int64))
    sizes = torch.tensor(pickle.loads((folder / "meta.pkl").read_bytes())["sizes"])
    end = (len(tokens) - 1) // T * T
    x = tokens[:end].view(-1, T)
    y = tokens[1 : end + 1].view(-1, T)
    num_bytes = int(sizes[y].sum())
    y = y.where(sizes[y] > 0, -1)  # <|endoftext|> is no text
    batches = zip(x.split(16), y.split(16), strict=True)
    nats = sum(loss(x, y).item() * int((y >= 0).sum()) for x, y in batches)
    return nats / num_bytes / math.log(2)


def train_nanogpt(
    peer: Path, settings: str, folder: Path, updates: int, rate: float, seed: int, scores: int
) -> list:
    """Its own train.py, unchanged. Where it would save a checkpoint, that is scored."""
    points: list[Point] = []
    clock = Clock()
    theirs = import_nanogpt(peer)
    their_train = nn.Module.train
    set_seed = torch.manual_seed

    def train(module: nn.Module, mode: bool = True) -> nn.Module:  # around its evaluations
        clock.go() if mode else clock.stop()
        return their_train(module, mode)

    def save(checkpoint: dict, _path: str) -> None:
        seconds = clock.stop()
        with torch.random.fork_rng():
            model = theirs.GPT(theirs.GPTConfig(**checkpoint["model_args"])).eval()
        weights = checkpoint["model"].items()  # of a compiled model: named _orig_mod.…
        model.load_state_dict({name.removeprefix("_orig_mod."): w for name, w in weights})
        bits = score(lambda *batch: model(*batch)[1], folder, model.config.block_size)
        points.append((checkpoint["iter_num"], seconds, bits))
        clock.go()

    flags = f"""{settings} --device=cpu --dataset={folder} --out_dir={folder} --eval_iters=1
        --max_iters={updates} --lr_decay_iters={updates} --eval_interval={updates // scores}
        --always_save_checkpoint=True --learning_rate={rate} --min_lr={rate / 10}"""
    sys.argv = ["train.py", *flags.split()]
    os.chdir(peer)
    nn.Module.train = train  # type: ignore
    torch.save = save  # type: ignore
    torch.manual_seed = lambda _: set_seed(seed)  # type: ignore
    runpy.run_path("train.py", run_name="__main__")
    return points


def train_transformers(
    settings: TrainConfig, folder: Path, updates: int, rate: float, seed: int, scores: int
) -> list:
    """Its GPT-2 in a plain loop: our dtype, compiled, fused AdamW, a cosine, gradients clipped."""
    T = settings.sequence_length
    B = settings.total_batch_size // T
    loader = DataLoaderLite(settings.data_dir, "train", B, T, shuffle=True, seed=seed)
    size = dict(n_layer=settings.n_layer, n_head=settings.n_head, n_embd=settings.n_embd)
    torch.manual_seed(seed)
    model = make_transformers_model(size | dict(vocab_size=loader.vocab_size), T)
    params = list(model.parameters())
    adamw = torch.optim.AdamW(params, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = TrainConfig(max_steps=updates, warmup_steps=updates // 30, learning_rate=rate)
    cpu = torch.device("cpu")
    dtype, _ = pick_dtype(cpu)  # as this repository

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with autocast(cpu, dtype):
            logits = model(input_ids=x, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), ignore_index=-1)

    compiled = torch.compile(loss, dynamic=False) if settings.compile else loss
    points: list[Point] = []
    clock = Clock()
    for step in range(updates):
        clock.go()
        adamw.param_groups[0]["lr"] = learning_rate(step, schedule)
        compiled(*loader.next_batch()).backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        adamw.step()
        adamw.zero_grad()
        if (step + 1) % (updates // scores) == 0:
            points.append((step + 1, clock.stop(), score(loss, folder, T)))
    return points


def train_here(
    flags: list[str], folder: Path, updates: int, rate: float, seed: int, scores: int
) -> list:
    """This repository's train_gpt2.py. Its log has the losses, and the time of each update."""
    off = "--sample-every 0 --hellaswag-every 0 --checkpoint-every 0 --checkpoint-minutes 0"
    every = f"--max-steps {updates} --val-every {updates // scores} --val-tokens {10**9}"
    how = f"--learning-rate {rate} --seed {seed} --device cpu --overwrite --log-dir {folder}/log"
    command = [sys.executable, "train_gpt2.py", *flags, *f"{off} {every} {how}".split()]
    last = run_program(command, folder)
    if end_of(read_metrics(folder / "log" / METRICS)) != "end":
        raise UserError(f"this repository's training ended early: {last}")
    run = read_run(folder / "log")
    seconds = np.cumsum(run.series("ms")[1]) / 1000
    validations = zip(*run.series("bits_per_byte", "val"), strict=True)
    return [(step, seconds[step - 1], bits) for step, bits in validations if step]

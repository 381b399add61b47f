"""Training as a user runs it: one process or two, killed and resumed, and its mistakes."""

import dataclasses
import fcntl
import json
import math
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from beside import write_beside
from conftest import (
    EOT,
    LONGEST,
    command,
    environment,
    losses,
    random_model,
    read_records,
    run_program,
    settle_in,
    started,
    tiny_run,
    torchrun_variables,
    train,
    wait_for_file,
    warm_server,
    warm_train,
    weights_hash,
)
from contract import as_a_process, call, contents, judge
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn.utils import parameters_to_vector
from warm import two_ranks

import evaluate
import hellaswag
import train_gpt2
from config import PRESETS, Settled, TrainConfig, check, parse_command_line
from model import GPT, DataLoaderLite, GPTConfig
from optim import orthogonalize
from support.base.errors import UsageError, UserError
from support.base.process import as_typed, usable_cores
from support.machine import device
from support.machine.compile import why_not_compile
from support.machine.device import bfloat16_speed, free_memory, pick_dtype
from support.machine.distributed import Interrupted, Stop, World, start_world
from support.machine.memory import (
    estimate_memory,
    explain_out_of_memory,
    explaining_memory,
    fit_batch_size,
    runs_out_of_memory,
)
from support.run import checkpoint, divergence, resume
from support.run.checkpoint import Progress
from support.run.divergence import MOST_SKIPPED, why_stop
from support.run.log import Log, open_log, open_tracker, read_run, records_before
from support.run.resume import args_to_resume, start_logs
from support.show import plots
from support.text.token_files import describe_frequencies, find_shards, open_data
from support.text.tokenizer import gpt2
from train_gpt2 import build_model, end_diverged, learning_rate, main, report_step, train_step

WORLD = start_world("cpu")


@pytest.mark.parametrize("decay, quarter", [("cosine", 0.8682), ("linear", 0.775), ("wsd", 1.0)])
@hypothesis.given(warmup=st.integers(0, 50), steps=st.integers(51, 200))
def test_every_schedule_warms_up_and_then_falls_in_its_way(decay, quarter, warmup, steps):
    config = TrainConfig(max_steps=steps, warmup_steps=warmup, learning_rate=1.0, decay=decay)
    rates = [learning_rate(s, config) for s in range(steps + 1)]
    assert rates[:warmup] == pytest.approx([(s + 1) / warmup for s in range(warmup)])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[warmup] == pytest.approx(1)
    assert rates[-1] == pytest.approx(0.1)
    config = dataclasses.replace(config, max_steps=100, warmup_steps=20)
    assert learning_rate(40, config) == pytest.approx(quarter, abs=1e-4)


def test_help_has_every_flag_in_order_with_the_values_of_the_preset():
    shown = call("train_gpt2.py", "--preset", "quickstart", "--help").stdout
    flags = ["--" + name.replace("_", "-") for name in TrainConfig().saved()]
    assert re.findall(r"^│ (--[a-z0-9-]+)", shown, re.MULTILINE) == flags
    groups = [base.__name__ for base in TrainConfig.__mro__[-2:0:-1]]
    assert re.findall(r"^╭─ (\w+) options ─", shown, re.MULTILINE) == groups
    assert "(default: data/tinyshakespeare)" in shown
    assert set(PRESETS) <= set(re.findall(r"[\w-]+(?:\.\w+)?", shown.partition("╭")[0]))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_any_flag_overrides_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parse_command_line(["--keep_checkpoints=7", "--preset", name, "--data-dir", "."])
    overridden = dict(preset=name, keep_checkpoints=7, data_dir=".")
    assert config == dataclasses.replace(PRESETS[name], **overridden)
    assert check(config, 1) == []


# -- the step


def step_on(
    model, optimizers, sequences, B: int, lr=0.1, grad_clip=0.0, scaled=False, wait=None, stop=None
):
    """One update on all the sequences (N, T+1), in micro-batches of B -> loss, norm.

    scaled: by a GradScaler, as float16 needs it.
    """
    parts = iter(sequences.split(B))

    def next_batch():
        part = next(parts)
        return part[:, :-1], part[:, 1:]

    loss, norm, _ = train_step(
        model=model,
        optimizers=optimizers,
        scaler=torch.amp.GradScaler("cpu", enabled=scaled),
        loader=SimpleNamespace(next_batch=next_batch, wait=wait or Mock()),
        grad_accum_steps=len(sequences) // B,
        world=WORLD,
        stop=stop or Stop(WORLD),
        dtype=torch.float32,
        lr=lr,
        grad_clip=grad_clip,
    )
    return loss, norm


@pytest.mark.parametrize("B", [1, 2, 4])
def test_accumulated_gradients_are_those_of_one_large_batch(B):
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, 50257, (8, 9), generator=generator)

    def step(batch: int, grad_clip: float = 0.0, scaled: bool = False):
        torch.manual_seed(0)
        model = GPT(GPTConfig(block_size=8, n_layer=2, n_head=2, n_embd=8)).double()
        optimizer = torch.optim.SGD(model.parameters())
        before = parameters_to_vector(model.parameters())
        how = dict(lr=1.0, grad_clip=grad_clip, scaled=scaled)
        loss, norm = step_on(model, [optimizer], sequences, batch, **how)
        return before - parameters_to_vector(model.parameters()), loss, norm

    whole, loss, norm = step(8)
    parts, loss_of_parts, norm_of_parts = step(B)
    assert (whole - parts).abs().max() < 1e-10
    assert abs(loss - loss_of_parts) < 1e-5  # it is summed up in float32
    assert abs(norm - norm_of_parts) < 1e-6
    clipped, _, norm_before = step(B, grad_clip=0.25)
    assert norm_before == norm_of_parts > 0.25
    assert clipped.norm().item() == pytest.approx(0.25, rel=1e-3)
    unscaled, _, norm_unscaled = step(B, grad_clip=0.25, scaled=True)
    assert (unscaled - clipped).abs().max() < 1e-6 and abs(norm_unscaled - norm_before) < 1e-6


def test_updates_are_those_of_build_nanogpt_on_the_gpt2_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    random_model().save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path).double()
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).double().eval()  # no dropout
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers = ours.configure_optimizers(weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for lr in (0.01, 0.02, 0.01, 0.005):
        sequences = torch.randint(0, 50257, (4, 17))
        loss, norm = step_on(ours, optimizers, sequences, B=2, lr=lr, grad_clip=1.0)
        loss_accum = 0.0
        for part in sequences.split(2):
            logits = theirs(part[:, :-1]).logits
            mean = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / 2
            mean.backward()
            loss_accum += mean.item()
        their_norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(loss_accum, rel=1e-6)
        assert norm.item() == pytest.approx(their_norm.item(), rel=1e-9)


@pytest.mark.parametrize("name, overflows", [
    ("adamw", "transformer.wpe.weight"),
    ("muon", "transformer.wpe.weight"),  # AdamW's; Muon's gradients are finite
    ("muon", "transformer.h.0.mlp.c_fc.weight"),  # Muon's; AdamW's gradients are finite
])  # fmt: skip
def test_an_overflow_in_float16_skips_the_update_of_every_optimizer(tiny, name, overflows):
    optimizers = tiny.configure_optimizers(name)
    before = {name: p.clone() for name, p in tiny.named_parameters()}
    sequences = torch.randint(0, 50257, (2, 9))
    with tiny.get_parameter(overflows).register_hook(lambda grad: grad * math.inf):
        _, norm = step_on(tiny, optimizers, sequences, B=2, scaled=True)
    assert not norm.isfinite()
    assert all(torch.equal(p, before[name]) for name, p in tiny.named_parameters())
    assert not any(optimizer.state for optimizer in optimizers)
    assert all(p.grad is None for p in tiny.parameters())
    step_on(tiny, optimizers, sequences, B=2, scaled=True)
    assert not any(torch.equal(p, before[name]) for name, p in tiny.named_parameters())


@pytest.mark.parametrize("seconds, dtype", [
    (100.0, torch.float32),  # emulated, as without AVX512
    (1.4, torch.float32),
    (0.5, torch.bfloat16),  # AMX
])  # fmt: skip
def test_muon_takes_float32_where_the_run_does_and_both_where_it_is_faster(
    tiny, monkeypatch, seconds, dtype
):
    """seconds: of a matmul in bfloat16; in float32 it takes one."""
    sizes = set()

    def time_matmul(_device, dtype, n):
        sizes.add(n)
        return seconds if dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr("support.machine.device.time_matmul", time_matmul)
    bfloat16_speed.cache_clear()
    assert pick_dtype(torch.device("cpu"))[0] == dtype
    assert (1024 in sizes) == (seconds < 2), "one that is emulated would take seconds"
    bfloat16_speed.cache_clear()
    config = TrainConfig(optimizer="muon", weight_decay=0.0)
    optimizers = train_gpt2.build_optimizers(config, tiny, dtype)
    assert optimizers[1].dtype == dtype
    half = train_gpt2.build_optimizers(config, tiny, torch.float16)
    assert half[1].dtype == torch.float32, "float16 lacks its range, such a GPU has no bfloat16"
    block = tiny.transformer.h[0]
    before = [p.detach().clone() for p in (block.mlp.c_fc.weight, block.attn.c_attn.weight)]
    step_on(tiny, optimizers, torch.randint(0, 50257, (16, 33)), B=16, lr=1.0)
    in_mlp = block.mlp.c_fc.weight - before[0]
    # queries, keys and values of two heads
    queries, keys, values = (block.attn.c_attn.weight - before[1]).view(3, 2, 16, 32)
    for matrices, longest in ((in_mlp, 128), (queries, 32), (keys, 32), (values, 32)):
        values = torch.linalg.svdvals(matrices) / (0.2 * math.sqrt(longest))
        most = 1.3 if dtype == torch.float32 else 1.6  # it is not exact
        assert 0.6 < values.median(-1).values.min() and values.max() < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (48, 48)], ids=str)
def test_muon_makes_singular_values_from_a_hundredth_on_nearly_equal(shape, dtype):
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    largest = 1 / 1.7  # of the root of the norm of A
    for size in (1.0, 1e-4):
        x = u * size * torch.logspace(0, math.log10(0.01 / largest), len(v)) @ v
        values = torch.linalg.svdvals(orthogonalize(x[None].to(dtype))[0].float())
        assert 0.6 < values.min() and values.max() < 1.4
    for x in (torch.zeros(shape), torch.full(shape, 1e-30), torch.ones(shape)):
        ends = orthogonalize(x[None].to(dtype))
        assert ends.isfinite().all() and ends.norm() < 1.1


def freeze(model: GPT, part: str) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(part not in name)


class Bare(GPT):
    """Without biases and gains, as nanochat's: no parameter has one dimension."""

    def __init__(self, config):
        super().__init__(config)
        for module in list(self.modules()):
            for name, p in list(module.named_parameters(recurse=False)):
                if p.dim() < 2:
                    module.register_parameter(name, None)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("part", ["transformer.h.", "transformer.wte", "ln_", "mlp", "none"])
def test_a_part_that_is_trained_alone_resumes_with_its_optimizers_state(tmp_path, part, name):
    """Blocks, embedding, norms or MLPs frozen; none: nothing is, but no parameter is a vector."""
    kind = Bare if part == "none" else GPT
    whole = kind(GPTConfig(block_size=8, vocab_size=300, n_layer=2, n_head=2, n_embd=16))
    freeze(whole, part)
    optimizers = whole.configure_optimizers(name)
    sequences = torch.randint(0, 300, (6, 2, 9))
    for step, batch in enumerate(sequences):
        if step == 3:
            writer = checkpoint.Writer(Stop(WORLD), tmp_path)
            writer.save(whole, optimizers, dict(step=3), {})
        step_on(whole, optimizers, batch, B=2)
    saved = checkpoint.find([checkpoint.path_of(tmp_path, 3)], WORLD)
    resumed = kind.from_pretrained(saved.path)
    freeze(resumed, part)
    optimizers = resumed.configure_optimizers(name)
    assert saved.state["optimizer"]["state"]
    checkpoint.load_optimizers(resumed, optimizers, saved.state["optimizer"])
    for batch in sequences[3:]:
        step_on(resumed, optimizers, batch, B=2)
    assert torch.equal(*(parameters_to_vector(m.parameters()) for m in (whole, resumed)))


@pytest.mark.parametrize("name, factor", [("adamw", 1), ("muon", 3)])
def test_embedding_lr_is_of_muons_embeddings_alone(tiny, name, factor):
    """AdamW's first update changes each weight by its rate, wherever the gradient is not small."""
    optimizers = tiny.configure_optimizers(name, embedding_lr=3.0, weight_decay=0.0)
    before = {name: p.clone() for name, p in tiny.named_parameters()}
    step_on(tiny, optimizers, torch.randint(0, 50257, (2, 9)), B=2, lr=1e-3)
    moved = {name: (p - before[name]).abs().max() for name, p in tiny.named_parameters()}
    embeddings = ("transformer.wte.weight", "transformer.wpe.weight")
    for name in (*embeddings, "transformer.ln_f.weight", "transformer.h.0.ln_1.bias"):
        rate = 1e-3 * (factor if name in embeddings else 1)
        assert moved[name].item() == pytest.approx(rate, rel=0.01), name


def test_a_batch_that_is_not_needed_yet_may_be_unreadable(tiny):
    """The next batch is read ahead. What cannot be read ends the run when its turn comes."""
    optimizers = tiny.configure_optimizers()
    gone = Mock(side_effect=UserError("the shard is gone"))
    batch = dict(sequences=torch.randint(0, 50257, (4, 9)), B=4, wait=gone, stop=Stop(WORLD))
    loss, _ = step_on(tiny, optimizers, **batch)
    assert loss.isfinite() and optimizers[0].state, "the update is made"
    with pytest.raises(Interrupted, match="the shard is gone"):
        step_on(tiny, optimizers, **batch)


def validate(model: GPT, data_dir: Path, B: int, T: int, val_tokens: int = 10**9) -> tuple:
    """The loss, the bits per byte and the nats per character."""
    loader = DataLoaderLite(data_dir, "val", B, T)
    alone = dict(world=WORLD, stop=Stop(WORLD), dtype=torch.float32)
    return evaluate.validate(model=model, loader=loader, val_tokens=val_tokens, **alone)


@pytest.mark.parametrize("B", [1, 3, 50])
def test_validation_is_the_mean_over_a_fixed_number_of_tokens_whatever_the_batch(shards, tiny, B):
    x, y = DataLoaderLite(shards, "val", B, 16).batch(0, 20)
    with torch.no_grad():
        expected = tiny(x, y)[1].item()
    tiny.train()
    loss, *_ = validate(tiny, shards, B, T=16, val_tokens=20 * 16 + 5)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert tiny.training


def test_the_losses_of_text_are_shared_among_its_bytes_and_its_characters(tmp_path, tiny):
    text = "def naïve(x):\n        return x  # 你好\n" * 9
    tokens = [EOT, *gpt2().encode(text), EOT, *gpt2().encode("naïve")]
    tokens = tokens[: (len(tokens) - 1) // 8 * 8 + 1]
    inputs, targets = (torch.tensor(part).view(-1, 8) for part in (tokens[:-1], tokens[1:]))
    nats = F.cross_entropy(tiny(inputs)[0].flatten(0, 1), targets.flatten(), reduction="none")
    is_text = targets.flatten() != EOT
    assert not is_text.all(), "an end of text is among the targets"
    written = gpt2().encoding.decode(targets.flatten()[is_text].tolist())
    np.save(tmp_path / "a_val_000000.npy", np.array(tokens, np.uint16))
    for B in (1, 2, 50):
        loss, bits, per_character = validate(tiny, tmp_path, B, T=8)
        assert loss == pytest.approx(nats.mean().item(), rel=1e-6), "all targets, as ever"
        nats_of_text = nats[is_text].sum().item()
        assert bits == pytest.approx(nats_of_text / math.log(2) / len(written.encode()), rel=1e-6)
        assert per_character == pytest.approx(nats_of_text / len(written), rel=1e-6)
    np.save(tmp_path / "a_val_000000.npy", np.full(33, EOT, np.uint16))
    loss, bits, per_character = validate(tiny, tmp_path, B=2, T=8)
    assert loss > 0 and bits is None and per_character is None


# -- runs


def test_a_run_leaves_logs_a_plot_and_a_report(shards, tmp_path):
    log_dir = tmp_path / "log"
    often = "--val-every 3 --val-tokens 160 --sample-every 3 --num-samples 2 --checkpoint-every 6"
    done = train(shards, log_dir, often)
    assert "B 2 × T 16 × accumulation 2 × ranks 1 = 64 tokens" in done.stdout
    assert "rank 0 sample 1: Hello, I'm a language model," in done.stdout
    assert done.stderr == ""
    lines = [line.split() for line in (log_dir / "log.txt").read_text().splitlines()]
    assert [step for step, stream, _ in lines if stream == "val"] == ["0", "3", "6"]
    assert [int(step) for step, stream, _ in lines if stream == "train"] == list(range(6))
    for step, stream, value in lines:
        [record] = [r for r in read_records(log_dir, stream) if r["step"] == int(step)]
        expected = f"{record['val_loss']:.4f}" if stream == "val" else f"{record['loss']:.6f}"
        assert value == expected
    model = GPT.from_pretrained(log_dir / "ckpt_000006")
    assert record["val_loss"] == pytest.approx(validate(model, shards, 3, 16, 160)[0], rel=1e-5)
    first = read_records(log_dir)[0]
    assert first["config"]["max_steps"] == 6
    assert first["versions"]["torch"]
    assert first["frequencies"] == describe_frequencies(find_shards(shards, "train"))
    measured = {"loss", "lr", "norm", "ms", "tokens_per_sec", "tokens", "wall", "memory"}
    assert measured <= read_records(log_dir, "train")[0].keys()
    assert "mfu" not in read_records(log_dir, "train")[0], "a CPU's peak depends on its other load"
    assert "mfu" not in done.stdout and "TFLOP/s" not in done.stdout
    assert (log_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "6 updates, 384 tokens" in (log_dir / "report.md").read_text()


def test_an_optimizer_without_a_state_resumes_beside_one_with(tmp_path):
    """As somebody's own may be."""
    model = GPT(GPTConfig(block_size=8, vocab_size=300, n_layer=1, n_head=2, n_embd=16))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizers = [torch.optim.SGD(vectors), torch.optim.AdamW(matrices)]
    step_on(model, optimizers, torch.randint(0, 300, (2, 9)), B=2)
    checkpoint.Writer(Stop(WORLD), tmp_path).save(model, optimizers, dict(step=1), {})
    saved = checkpoint.load_state(tmp_path / "ckpt_000001")["optimizer"]
    again = [torch.optim.SGD(vectors), torch.optim.AdamW(matrices)]
    checkpoint.load_optimizers(model, again, saved)
    moments = [each[1].state[matrices[-1]]["exp_avg"] for each in (optimizers, again)]
    assert torch.equal(*moments) and not again[0].state
    other = {"state": {"transformer.wte.weight": dict(count=3, column=torch.ones(1, 16))}}
    [state] = checkpoint.states_to_save(other, model, set())["state"].values()
    assert state["count"] == 3 and state["column"].shape == (1, 16), "nothing is cut"


def test_every_setting_of_the_recipe_reaches_the_run(shards, tmp_path, monkeypatch):
    flags = """--seed 7 --beta1 0.8 --beta2 0.7 --eps 1e-5 --weight-decay 0.2 --grad-clip 0.3
        --optimizer muon --embedding-lr 3"""
    args = [str(arg) for arg in tiny_run(shards, tmp_path / "log", flags)]
    run = train_gpt2.build_run(settle_in(WORLD, args), args)
    assert (run.train_loader.seed, run.train_loader.shuffle) == (7, True)
    adamw, muon = run.optimizers
    matrices, others = adamw.param_groups
    assert [(g["betas"], g["eps"]) for g in adamw.param_groups] == [((0.8, 0.7), 1e-5)] * 2
    assert (matrices["lr_scale"], others["lr_scale"]) == (3.0, 1.0)
    decays = [group["weight_decay"] for group in (matrices, others, *muon.param_groups)]
    assert decays == [0.2, 0.0, 0.2]
    given: dict = {}

    def step(**options):
        given.update(options)
        return torch.zeros(()), torch.zeros(()), False

    monkeypatch.setattr(train_gpt2, "train_step", step)
    train_gpt2.make_update(run, lr=0.5)
    assert (given["grad_clip"], given["lr"], given["grad_accum_steps"]) == (0.3, 0.5, 2)


def test_a_line_of_training_on_a_gpu_has_the_mfu():
    config = TrainConfig(total_batch_size=1000)
    run = Mock(total_peak_flops=4e12, first_step=0, shortest=1.0, config=config)
    run.progress.step = 0
    run.train_loader.cursor = 1
    run.model.flops_per_token.return_value = 10**9
    run.world.device = torch.device("cpu")
    report_step(run, loss=3.0, norm=1.0, lr=1e-3, dt=0.5, skipped=False)
    assert run.world.say.call_args.args[0].endswith("| tok/sec 2,000 | mfu 50.0%")
    assert run.log.record.call_args.kwargs["mfu"] == 0.5
    report_step(run, loss=math.nan, norm=math.inf, lr=1e-3, dt=0.5, skipped=True)
    kept = run.log.record.call_args.kwargs
    assert (kept["loss"], kept["norm"]) == (None, None), "JSON has no NaN"


@pytest.mark.parametrize("seconds, load, threads, is_told", [
    (2.1, 2.6, 2, True),
    (1.9, 2.6, 2, False),  # not twice as slow
    (2.1, 2.4, 2, False),  # only this run's two threads
    (2.1, 2.6, 1, False),  # one thread waits for no other
])  # fmt: skip
def test_a_run_beside_other_work_is_told_to_take_one_thread(
    monkeypatch, capsys, seconds, load, threads, is_told
):
    run = Mock(total_peak_flops=0, first_step=0, shortest=math.inf, config=TrainConfig())
    run.command_to_resume = f"python train_gpt2.py {seconds} {load} {threads} --resume auto"
    run.progress.step = 0
    run.train_loader.cursor = 1
    run.world.device = torch.device("cpu")
    run.world.size = 1
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("support.machine.device.usable_cores", lambda: 2)
    for dt in (5.0, 1.0, seconds, seconds):
        report_step(run, loss=3.0, norm=1.0, lr=1e-3, dt=dt, skipped=False)
    told = capsys.readouterr().err
    assert told.count(f"OMP_NUM_THREADS=1 {run.command_to_resume}\n") == is_told


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "fsdp"])
def test_a_rank_without_a_sequence_to_validate_hangs_no_other(shards, tmp_path, sharding):
    flags = f"--max-steps 3 --val-every 1 --val-tokens 16 --sharding {sharding}"
    train(shards, tmp_path / "two", flags, ranks=2)
    train(shards, tmp_path / "one", flags)
    two, one = (
        [val["val_loss"] for val in read_records(tmp_path / n, "val")] for n in ("two", "one")
    )
    assert len(one) == 4 and two == pytest.approx(one, rel=1e-5)


def test_any_micro_batch_and_number_of_processes_make_the_same_run(shards, tmp_path):
    flags = "--max-steps 20 --val-every 10 --val-tokens 208 --checkpoint-every 10"
    log_dir = tmp_path / "log"
    curves = []
    for way, ranks in [
        ("--batch-size 4", 1),
        ("--batch-size 1 --overwrite", 1),
        ("--batch-size 2 --overwrite", 2),
        (f"--batch-size 4 --resume {log_dir}/ckpt_000010", 1),
    ]:
        train(shards, log_dir, f"{flags} {way}", ranks=ranks)
        records = read_records(log_dir, "val")
        assert len(records) == 3
        both = [r[name] for r in records for name in ("val_loss", "bits_per_byte")]
        curves.append(losses(log_dir) + both)
        assert curves[-1] == pytest.approx(curves[0], rel=1e-5), way


def test_evaluations_leave_training_as_it_is_and_the_best_checkpoint_stays(corpus, tmp_path):
    example = dict(ctx="One", endings=[" two", " three", " four", " five"], label=0)
    (tmp_path / "one.jsonl").write_text(json.dumps(example))
    flags = "--max-steps 8 --learning-rate 1 --min-lr-frac 1 --checkpoint-every 8"
    often = f"""--val-every 3 --val-tokens 160 --sample-every 4 --hellaswag-every 4
        --hellaswag-path {tmp_path}/one.jsonl --save-best --keep-checkpoints 1"""
    train(corpus, tmp_path / "plain", flags)
    train(corpus, tmp_path / "log", f"{flags} {often}")
    assert losses(tmp_path / "log") == losses(tmp_path / "plain")
    last = "ckpt_000008"
    assert weights_hash(tmp_path / "log" / last) == weights_hash(tmp_path / "plain" / last)
    train(corpus, tmp_path / "clock", f"{flags} {often} --checkpoint-minutes 1e-9 --no-save-best")
    for log_dir in (tmp_path / "log", tmp_path / "clock"):
        scores = {r["step"]: r["val_loss"] for r in read_records(log_dir, "val")[1:]}
        best = min(scores, key=lambda step: scores[step])
        kept = [checkpoint.step_of(path) for path in checkpoint.checkpoints(log_dir)]
        assert 0 < best < 8 and kept == [best, 8], "due by --save-best, or by the clock"


def test_an_average_is_saved_and_evaluated_and_leaves_training_as_it_is(corpus, tmp_path):
    flags = """--max-steps 6 --checkpoint-every 1 --keep-checkpoints 9 --val-every 3
        --val-tokens 160 --optimizer muon"""
    train(corpus, tmp_path / "plain", flags)
    train(corpus, tmp_path / "log", f"{flags} --average-frac 0.5")
    assert losses(tmp_path / "log") == losses(tmp_path / "plain")
    average: dict = {}
    for step in range(1, 7):
        weights = load_file(tmp_path / f"plain/ckpt_{step:06d}/model.safetensors")
        share = 1 / max(1, step / 2)
        average = {n: share * w + (1 - share) * average.get(n, w) for n, w in weights.items()}
    last = tmp_path / "log/ckpt_000006"
    torch.testing.assert_close(load_file(last / "model.safetensors"), average)
    name = "transformer.wte.weight"
    raw = checkpoint.load_state(last)["optimizer"]["state"][name]["average"]
    assert torch.equal(raw, weights[name]), "to go on from"
    done = train(corpus, tmp_path / "no", f"{flags} --init-from {last} --eval-only")
    [*_, scored] = read_records(tmp_path / "log", "val")
    assert f"val loss {scored['val_loss']:.4f}" in done.stdout
    done = train(corpus, tmp_path / "log", f"{flags} --resume auto", expect=1)
    assert "cannot be resumed with another average_frac 0.5 -> 0.0" in done.stderr
    later = f"{flags.replace('steps 6', 'steps 7')} --average-frac 0.5 --resume auto"
    assert "average_frac 0.0 -> 0.5" in train(corpus, tmp_path / "plain", later).stdout


def assert_same_bits(path: Path, other: Path) -> dict:
    """Two checkpoints have the same weights, moments and scaler -> the state of the first."""
    assert weights_hash(path) == weights_hash(other)
    state, other_state = map(checkpoint.load_state, (path, other))
    assert state["scaler"] == other_state["scaler"]
    moments = [each["optimizer"]["state"] for each in (state, other_state)]
    torch.testing.assert_close(*moments, rtol=0, atol=0)
    return state


@pytest.mark.parametrize("way, threads", [
    ("", 1), ("--compile", 1), ("--optimizer muon", 1), ("--dtype float16", 1),
    ("--optimizer muon --average-frac 0.5", 1), ("", 2), ("--compile", 2),
])  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(shards, tmp_path, way, threads):
    flags = f"{way} --max-steps 8 --checkpoint-every 4 --val-every 4 --val-tokens 160"
    how = {"OMP_NUM_THREADS": "2"} if threads == 2 else {}  # in a process of its own
    done = train(shards, tmp_path / "whole", flags, **how)
    if way == "--compile":
        if why_not_compile(torch.device("cpu")):
            pytest.skip("no compiler here")
        assert "model: compiled" in done.stdout
    whole = tmp_path / "whole"
    cut = shutil.copytree(whole, tmp_path / "cut")
    last = "ckpt_000008"
    shutil.rmtree(cut / last)
    done = train(shards, cut, f"{flags} --resume auto", **how)
    assert "ckpt_000004: 4 updates" in done.stdout
    starts = [*read_records(cut, "run"), *read_records(cut, "resume")]
    assert [start["device"]["threads"] for start in starts] == [threads] * 2
    walls = [record["wall"] for record in read_records(cut, "train")]
    assert walls == sorted(walls), "it goes on behind the interruption"
    assert losses(cut) == losses(whole)
    assert (cut / "log.txt").read_text() == (whole / "log.txt").read_text()
    state = assert_same_bits(cut / last, whole / last)
    assert bool(state["scaler"]) == ("float16" in way)
    moments = state["optimizer"]["state"]["transformer.wte.weight"]["exp_avg"]
    assert len(moments) == 50257, "the padding is not saved"


def test_a_killed_run_resumes_to_the_same_weights(warm, corpus, tmp_path):
    flags = "--max-steps 100 --checkpoint-every 25 --keep-checkpoints 9"
    whole = tmp_path / "whole"
    train(corpus, whole, flags)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
        cut = tmp_path / number.name
        pid = warm.start("train_gpt2.py", *tiny_run(corpus, cut, flags))
        wait_for_file(cut / "ckpt_000025")
        os.kill(pid, number)
        done = warm.finish()
        killed = number == signal.SIGKILL
        assert done.stderr == ""
        assert done.returncode == (-number if killed else 0)
        assert killed or "--resume auto" in done.stdout.splitlines()[-1]
        assert killed or (cut / "loss.png").exists(), "no validation would draw it"
        train(corpus, cut, f"{flags} --resume auto")
        assert ("loss.png" in (cut / "report.md").read_text()) == (not killed)
        assert losses(cut) == losses(whole)
        assert weights_hash(cut / "ckpt_000100") == weights_hash(whole / "ckpt_000100")


@pytest.mark.parametrize("nohup", [[], ["nohup"]])
def test_a_run_whose_terminal_closes_saves_and_goes_on_only_under_nohup(shards, tmp_path, nohup):
    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    most = 150 if nohup else 100_000
    args = tiny_run(shards, tmp_path / "log", f"--max-steps {most} --checkpoint-every 50")
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [*nohup, *command("train_gpt2.py", *args)],
        cwd=tmp_path,
        env=environment(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    while not (tmp_path / "log" / "ckpt_000050").exists():
        assert process.poll() is None
        if not nohup and select.select([ours], [], [], 0.1)[0]:
            os.read(ours, 2**16)
    os.close(ours)
    assert process.wait(LONGEST) == 0
    last = checkpoint.checkpoints(tmp_path / "log")[-1]
    assert not checkpoint.damage_of(last)
    assert (checkpoint.step_of(last) == most) == bool(nohup)


FAST_CLOCK = """
import os, sys, time, train_gpt2
import torch.distributed as dist
def tell(x, **options):
    print(f"rank {rank}: {x.dtype}", flush=True)
    return all_reduce(x, **options)
all_reduce, perf_counter, rank = dist.all_reduce, time.perf_counter, os.environ["RANK"]
dist.all_reduce = tell
if rank == os.environ["FAST"]:  # on the other rank, nothing is late
    time.perf_counter = lambda: 1e9 * perf_counter()
train_gpt2.main(sys.argv[1:])
"""


def test_ranks_save_by_the_clock_of_rank_0_and_an_update_makes_no_sum_for_it(shards, tmp_path):
    (tmp_path / "fast.py").write_text(FAST_CLOCK)
    flags = "--batch-size 1 --keep-checkpoints 9 --resume auto --max-steps"
    for fast, steps, saved in [("1", 5, 0), ("0", 3, 3), ("0", 5, 5)]:
        args = tiny_run(shards, tmp_path / fast, flags, steps)
        done = warm_server().run("fast.py", *args, root=tmp_path, FAST=fast, **two_ranks())
        assert done.returncode == 0 and len(checkpoint.checkpoints(tmp_path / fast)) == saved, done
        if not saved:  # a save makes sums of its own
            update = done.stdout.partition("step     3 |")[2].partition("step     4 |")[0]
            assert update.count("rank 0: torch.int") == 2, "one for each micro-step"


def write_later(monkeypatch, may_write) -> None:
    """Makes a thread write checkpoints, each when may_write(its step) says so."""
    write = checkpoint.write

    def later(final, *rest):
        end = time.monotonic() + 60
        while not may_write(checkpoint.step_of(final)):
            time.sleep(0.01)
            assert time.monotonic() < end, "training waits for the checkpoint"
        return write(final, *rest)

    def here(self, *args, **options):
        assert threading.current_thread() is threading.main_thread(), "FSDP swaps them"
        return torch.nn.Module.named_parameters(self, *args, **options)

    write_beside(monkeypatch.setattr)
    monkeypatch.setattr(checkpoint, "write", later)
    monkeypatch.setattr(GPT, "named_parameters", here)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_trains_on_while_a_thread_writes_what_it_had(corpus, tmp_path, monkeypatch, name):
    log_dir = tmp_path / "log"
    flags = f"--checkpoint-every 2 --keep-checkpoints 9 --optimizer {name}"
    train(corpus, tmp_path / "whole", flags)
    made = lambda: len(read_records(log_dir, "train"))  # noqa: E731
    write_later(monkeypatch, lambda step: made() >= min(6, step + 2))
    done = call("train_gpt2.py", *tiny_run(corpus, log_dir, flags))
    assert done.returncode == 0 and f"--model {log_dir}/ckpt_000006" in done.stdout, done
    for path in checkpoint.checkpoints(tmp_path / "whole"):
        assert_same_bits(log_dir / path.name, path)
        assert not checkpoint.damage_of(log_dir / path.name)


@pytest.mark.parametrize("end", ["diverged", "signal", "full disk"])
def test_the_end_of_a_run_names_only_written_checkpoints(corpus, tmp_path, monkeypatch, end):
    ended: list[int] = []

    def train_step(**parts):
        step = parts["loader"].cursor // 4
        loss, norm, skipped = real_step(**parts)
        if step < 2:
            return loss, norm, skipped
        ended.append(step)
        if end == "diverged":
            return loss * math.nan, norm, skipped
        signal.raise_signal(signal.SIGTERM)
        return loss, norm, skipped

    def may_write(step):
        if (step, end) == (3, "full disk"):
            raise UserError("the disk is full")
        return ended

    real_step = train_gpt2.train_step
    monkeypatch.setattr(train_gpt2, "train_step", train_step)
    write_later(monkeypatch, may_write)
    done = call("train_gpt2.py", *tiny_run(corpus, tmp_path / "log", "--checkpoint-every 2"))
    words = {"diverged": "last checkpoint: {}/ckpt_000002", "signal": "{}/ckpt_000003 is saved"}
    said = done.stdout + done.stderr
    assert words.get(end, "the disk is full").format(tmp_path / "log") in said
    assert (done.returncode == 0) == ("is saved" in said) == (end == "signal")
    last = tmp_path / "log" / ("ckpt_000003" if end == "signal" else "ckpt_000002")
    assert checkpoint.checkpoints(tmp_path / "log")[-1] == last and not checkpoint.damage_of(last)


@pytest.mark.parametrize("sharding", ["ddp", "zero1"])
def test_two_processes_told_to_stop_save_and_leave_without_noise(shards, tmp_path, sharding):
    flags = f"--max-steps 100000 --batch-size 1 --sharding {sharding}"
    args = tiny_run(shards, tmp_path / "log", flags)
    with started(command("train_gpt2.py", *args, ranks=2)) as process:
        while "step    10" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=LONGEST)
    assert "interrupted: " in out
    assert len(checkpoint.checkpoints(tmp_path / "log")) == 1
    for noise in ("terminate called", "forcefully", 'train_gpt2.py", line'):
        assert noise not in errors, errors


def test_a_single_batch_is_learned_by_heart(shards, tmp_path):
    flags = "--overfit-single-batch --max-steps 50 --n-embd 64 --batch-size 4"
    train(shards, tmp_path / "log", f"{flags} --optimizer muon --learning-rate 0.02")
    # not zero: the first tokens of a sequence do not tell which one it is
    assert losses(tmp_path / "log")[-1] < 0.1


def test_the_state_of_another_device_is_loaded_for_fused_kernels(finished, monkeypatch):
    """A fused AdamW wants its step numbers on the GPU. The loaded options said: not fused."""
    model = GPT.from_pretrained(finished / "ckpt_000004")
    [adamw] = model.configure_optimizers()
    moments = checkpoint.load_state(finished / "ckpt_000004")["optimizer"]
    for group in moments["param_groups"]:
        group["fused"] = False
    load = Mock(wraps=adamw.load_state_dict)
    monkeypatch.setattr(adamw, "load_state_dict", load)
    checkpoint.load_optimizers(model, [adamw], moments)
    groups = load.call_args.kwargs["state_dict"]["param_groups"]
    assert [group["fused"] for group in groups] == [True, True]
    assert all(state["step"] == 4 for state in adamw.state.values())


def test_a_resume_says_what_changes_and_counts_the_tokens_of_every_batch(corpus, run_dir):
    other = "--total-batch-size 128 --seed 7 --no-shuffle --batch-size 4 --val-tokens 99 "
    other += "--val-every 8"
    same = "--dtype auto --device auto --max-steps 8 --checkpoint-every 8 --resume auto"
    done = train(corpus, run_dir, f"{other} {same}")
    [line] = [line for line in done.stdout.splitlines() if "with other settings" in line]
    for words in (
        "seed 1337 -> 7 (the rest of this epoch has another order",
        "shuffle True -> False (the rest of this epoch has another order",
        "val_tokens 10485760 -> 99 (validation losses are not comparable",
        "batch_size 2 -> 4",
        "total_batch_size 64 -> 128",
    ):
        assert words in line
    assert "dtype" not in line and "device" not in line and "rounding" not in done.stdout
    assert "float32 (as before; --dtype changes it)" in done.stdout
    tokens = [r["tokens"] for r in read_records(run_dir, "train")]
    assert tokens == [64 * n for n in (1, 2, 3, 4, 5, 6, 8, 10)]
    assert "640" in (run_dir / "ckpt_000008" / "README.md").read_text()


@pytest.mark.parametrize(
    "steps, told", [({"ns_steps": 5}, True), ({"ns_steps": 3}, False), ({}, False)]
)
def test_a_run_that_began_with_another_muon_is_told(tiny, tmp_path, steps, told):
    config = TrainConfig(optimizer="muon")
    groups = [{"lr": 0.1}, {"lr": 0.1, **steps}]
    state = dict(model={}, dtype="float32", batch_size=1, optimizer={"param_groups": groups})
    saved = checkpoint.Checkpoint(tmp_path, state | dict(config=config.saved()), [])
    words = " ".join(resume.compare_settings(config, saved, []))
    assert ("Muon's c_attn one matrix -> each head's" in words) == told


@pytest.mark.parametrize("tokens, is_lower", [(64, True), (32, False)])
def test_a_loss_on_other_text_is_neither_lower_nor_higher(corpus, tmp_path, tokens, is_lower):
    """The first loss on as much text is the lowest, however low one on less text was."""
    often = "--max-steps 2 --warmup-steps 0 --val-every 1 --val-tokens 32 --checkpoint-every 1"
    train(corpus, tmp_path, f"{often} --learning-rate 0.0001")
    more = f"--val-every 1 --val-tokens {tokens} --checkpoint-every 1"
    train(corpus, tmp_path, f"{more} --max-steps 3 --learning-rate 5 --resume auto")
    vals = read_records(tmp_path, "val")
    [end] = read_records(tmp_path, "end")
    assert (end["best"]["val_tokens"], end["best"]["loss"]) == (
        tokens,
        min(val["val_loss"] for val in vals if val["val_tokens"] == tokens),
    )
    steps, _ = read_run(tmp_path).streams["val"]
    assert len(steps) == (1 if is_lower else 4), vals


def test_a_card_has_no_loss_of_an_earlier_model(corpus, tmp_path):
    train(corpus, tmp_path, "--max-steps 4 --val-every 2 --checkpoint-every 1 --keep-checkpoints 9")
    cards = [(path / "README.md").read_text() for path in checkpoint.checkpoints(tmp_path)]
    assert ["| validation loss |" in card for card in cards] == [False, True, False, True]
    assert all("| training loss of the last update |" in card for card in cards)


@pytest.mark.parametrize("is_there, resumed_from, val_tokens, best", [
    (True, ".", 99, {"step": 2, "loss": 3.0, "val_tokens": 99}),
    (True, ".", 88, {"step": 2, "loss": 3.0, "val_tokens": 88}),  # of other text
    (True, "elsewhere", 99, None),
    (False, ".", 99, None),
])  # fmt: skip
def test_a_best_checkpoint_that_is_gone_or_elsewhere_is_forgotten(
    tmp_path, is_there, resumed_from, val_tokens, best
):
    if is_there:
        checkpoint.path_of(tmp_path, 2).mkdir()
    state = dataclasses.asdict(Progress(best={"step": 2, "loss": 3.0}))
    before = dict(val_tokens=val_tokens, max_steps=9)
    state |= dict(optimizer={"state": {}}, scaler={}, config=before)
    saved = checkpoint.Checkpoint(tmp_path / resumed_from / "ckpt_000003", state, [])
    config = TrainConfig(log_dir=str(tmp_path), val_tokens=99)
    loader = SimpleNamespace(load_state_dict=lambda _: None)
    progress = resume.restore(config, saved, None, [], None, loader)
    assert progress.best == best


@pytest.mark.parametrize("name, code, words", [
    ("typo", 2, "typo: no checkpoint is there"),
    ("run", 2, "run: no checkpoint is there"),
    ("run/ckpt_000001", 2, "run/ckpt_000001: no checkpoint is there"),
    ("log/ckpt_000001", 1, "ckpt_000001/training_state.pt is missing; the newest other one: "),
])  # fmt: skip
def test_a_path_without_a_checkpoint_is_a_sentence(corpus, tmp_path, name, code, words):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "log" / "ckpt_000002").mkdir(parents=True)
    done = train(corpus, tmp_path / "log", f"--resume {tmp_path}/{name}", expect=code)
    assert words in done.stderr


def test_another_model_or_optimizer_gives_only_its_weights(corpus, run_dir, tmp_path):
    for flags, words in {
        "--n-layer 3": "n_layer 2 -> 3",
        "--sequence-length 8": "sequence_length 16 -> 8",
        "--optimizer muon": "optimizer adamw -> muon",
    }.items():
        done = train(corpus, run_dir, f"{flags} --resume auto", expect=1)
        assert words in done.stderr and "--init-from" in done.stderr
    train(corpus, tmp_path / "new", "--optimizer muon --init-from", run_dir / "ckpt_000006")
    assert losses(tmp_path / "new")[0] < losses(run_dir)[0] - 0.1


def test_no_padding_is_saved_with_an_optimizers_state(tiny, tmp_path):
    wte = "transformer.wte.weight"
    padded = {"state": {wte: {"exp_avg": tiny.transformer.wte.weight.detach()}}}
    saved = checkpoint.states_to_save(padded, tiny, set())["state"][wte]["exp_avg"]
    assert saved.shape == (50257, 32)
    torch.save(saved, tmp_path / "saved.pt")
    assert (tmp_path / "saved.pt").stat().st_size < 50280 * 32 * 4, "of a view, all is written"


@pytest.mark.parametrize("keep", [1, 2, 4, 5, 9])
def test_pruning_keeps_the_newest_and_the_best(tmp_path, keep):
    names = [f"ckpt_{step:06d}" for step in range(1, 6)]
    for name in names:
        (tmp_path / name).mkdir()
    checkpoint.prune(tmp_path, keep, best=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted({names[1], *names[-keep:]})


# -- the micro-batch


FULL = ["[CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when", "NVML_SUCCESS == r INTERNAL"]


@pytest.mark.parametrize("problem", FULL)
def test_the_micro_batch_halves_until_it_fits_on_a_gpu(tiny, monkeypatch, problem):
    forward = tiny.forward
    order = []

    def with_little_memory(x, y):
        if len(x) > 4:
            raise RuntimeError(problem)
        return forward(x, y)

    def try_on_the_cpu(raw, config, B, _, dtype):
        order.append(B)
        return runs_out_of_memory(raw, config, B, WORLD, dtype)

    gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"), size=1, any=bool)
    gpu.warm_up_nccl = lambda: order.append("NCCL")
    memory = SimpleNamespace(total_memory=10**9)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: memory)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr("support.machine.memory.runs_out_of_memory", try_on_the_cpu)
    monkeypatch.setattr(tiny, "forward", with_little_memory)
    for sequences, B in {6: 2, 64: 4}.items():  # it must divide the batch
        config = TrainConfig(sequence_length=16, total_batch_size=sequences * 16)
        assert fit_batch_size(tiny, config, gpu, torch.float32) == B
        assert all(p.grad is None for p in tiny.parameters()), "nothing of the trial stays"
    assert order == ["NCCL", 2, "NCCL", 64, 32, 16, 8, 4], "NCCL takes its memory first"
    order.clear()
    parts = estimate_memory(tiny, config, 16, width=4, device="cuda")
    memory.total_memory = sum(parts.values()) // 1.2 + 1
    assert fit_batch_size(tiny, config, gpu, torch.float32) == 4
    assert order == ["NCCL", 16, 8, 4], "what the estimate excludes is not even compiled"
    memory.total_memory = 1
    with pytest.raises(UserError, match="a micro-batch of 1: add --activation-checkpointing"):
        fit_batch_size(tiny, config, gpu, torch.float32)  # not after its first evaluation
    memory.total_memory = 10**9
    problem = "another error"
    with pytest.raises(RuntimeError, match=problem):
        fit_batch_size(tiny, config, gpu, torch.float32)


@pytest.mark.parametrize("name, kernel", [
    ("", "6.8.0-generic"),
    ("PYTORCH_ALLOC_CONF", "6.8.0-generic"),
    ("PYTORCH_CUDA_ALLOC_CONF", "6.8.0-generic"),
    ("", "5.15.153.1-microsoft-standard-WSL2"),
])  # fmt: skip
def test_a_gpus_memory_grows_in_segments_but_on_wsl_or_if_the_user_says_otherwise(
    monkeypatch, name, kernel
):
    monkeypatch.setattr("platform.release", lambda: kernel)
    set_by_user = {name: "a:1"} if name else {}
    found = []
    monkeypatch.setattr(os, "environ", set_by_user.copy())
    monkeypatch.setattr("support.machine.device.pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: found.append(os.environ.copy()))
    start_world("cuda")
    ours = {} if "WSL" in kernel else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert found == [set_by_user or ours]


def test_a_resumed_run_that_was_deterministic_is_so_again(corpus, tmp_path):
    train(corpus, tmp_path, "--deterministic --checkpoint-every 6")
    resumed = train(corpus, tmp_path, "--resume auto --max-steps 7 --checkpoint-every 7")
    assert "deterministic" not in resumed.stdout
    train(corpus, tmp_path, "--resume auto --max-steps 8 --no-deterministic")
    found = [record["config"]["deterministic"] for record in read_records(tmp_path, "resume")]
    assert found == [True, False]


@pytest.mark.parametrize("user, nvls", [({}, "0"), ({"NCCL_NVLS_ENABLE": "1"}, "1")])
def test_deterministic_is_in_force_when_nccls_group_is_made(monkeypatch, user, nvls):
    def make_group(_world):
        assert torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        assert not torch.utils.deterministic.fill_uninitialized_memory, "it costs time"
        raise UserError(f"NVLS {os.environ['NCCL_NVLS_ENABLE']}")

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    met = World(torch.device("cpu"))
    monkeypatch.setattr("support.machine.distributed.meet", lambda: met)
    monkeypatch.setattr("support.machine.distributed.join", make_group)
    monkeypatch.setattr(os, "environ", torchrun_variables(0, 8, 8) | user)
    with pytest.raises(UserError, match=f"NVLS {nvls}"):
        main(["--deterministic", "--device", "cpu"])


def test_on_a_gpu_the_attention_kernel_for_the_models_heads_is_named(monkeypatch):
    shape = GPTConfig(n_head=24)  # not of the flags, but of the model: --init-from has its own
    assert device.sdpa_choice(torch.device("cpu"), torch.bfloat16, shape) == ""
    monkeypatch.setattr(torch, "empty", lambda *size, device, dtype: torch.zeros(size, dtype=dtype))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q, k, v, is_causal: 3)  # cuDNN
    named = device.sdpa_choice(torch.device("cuda"), torch.bfloat16, shape)
    assert named == ", cudnn_attention for heads of 32"


def test_processes_on_unlike_gpus_train_in_one_dtype(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (8, 6))
    gpu = torch.device("cuda")
    assert pick_dtype(gpu)[0] == torch.bfloat16
    assert pick_dtype(gpu, anywhere=lambda slow: True)[0] == torch.float16, "one is older"


def test_a_gpu_that_is_full_while_a_nan_is_looked_for_is_a_sentence(run_dir, corpus, monkeypatch):
    def fill(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(train_gpt2, "make_update", fill)
    args = tiny_run(corpus, run_dir, "--find-nan --resume auto --max-steps 9")
    with pytest.raises(UserError, match="micro-batch of 2: add --batch-size 1"):
        main([str(arg) for arg in args])


@pytest.mark.parametrize("own, shown", [
    ("No working C++ compiler found: g++", "No working C++ compiler found: g++"),
    ("C++ compile error\nx.h:1: fatal error: Python.h: No such file\ncompilation terminated.\n",
     "x.h:1: fatal error: Python.h: No such file"),
    ("", "RuntimeError:"),
])  # fmt: skip
def test_why_nothing_is_compiled_is_the_compilers_own_last_line(monkeypatch, own, shown):
    def refuse(*_, **__):
        raise RuntimeError(f"{own}\n\nSet TORCHDYNAMO_VERBOSE=1 for the stack\n")

    monkeypatch.setattr(torch, "compile", refuse)
    assert why_not_compile(torch.device("cpu")).rstrip().endswith(shown)


def test_processes_share_the_cores_that_are_theirs(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    device.claim_device("cpu", 0, 2)
    assert threads == [1], "a half of the three that this process may use"


@pytest.mark.parametrize("limit, cores", [("max 100000", 8), ("150000 100000", 2), (None, 8)])
def test_a_containers_limit_counts_as_usable_cores(monkeypatch, tmp_path, limit, cores):
    file = tmp_path / "cpu.max"
    if limit:
        file.write_text(f"{limit}\n")
    threads = []
    monkeypatch.setattr("support.base.process.Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    device.pick_device("cpu")
    assert usable_cores() == cores and threads == [2] * (cores == 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    device.pick_device("cpu")
    assert len(threads) == (cores == 2), "what one types is taken"


@pytest.mark.parametrize("tightest", ["", "job", "job/step"])
def test_a_limit_of_any_group_around_a_process_counts(monkeypatch, tmp_path, tightest):
    for group in ("", "job", "job/step"):
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        is_tightest = group == tightest
        limits = ("100000 100000", "3000") if is_tightest else ("max 100000", "max")
        files = dict(zip(("cpu.max", "memory.max"), limits, strict=True))
        files |= {"memory.current": "2500", "memory.stat": "inactive_file 500"}
        for name, text in files.items():
            (folder / name).write_text(text)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/old\n0::/job/step\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 8000 kB")
    monkeypatch.setattr("support.base.process.Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores() == 1 and free_memory(torch.device("cpu")) == 1000


def test_what_to_do_when_a_gpu_is_full_depends_on_what_was_tried():
    for batch_size, checkpointing, advice in [
        (8, False, "--batch-size 4"),
        (15, False, "--batch-size 5"),
        (1, False, "--activation-checkpointing"),
        (1, True, "--sharding fsdp"),
        (0, False, "another program"),
    ]:
        config = TrainConfig(activation_checkpointing=checkpointing)
        assert advice in explain_out_of_memory(batch_size, config)
        for problem in FULL:
            with pytest.raises(UserError, match=advice), explaining_memory(config, batch_size):
                raise RuntimeError(problem)


@pytest.mark.parametrize("B", [1, 4, 64])
def test_the_micro_batch_stays_within_half_of_a_cpus_free_memory(tiny, monkeypatch, B):
    config = TrainConfig(sequence_length=32, total_batch_size=64 * 32)
    parts = estimate_memory(tiny, config, B, width=4, device="cpu")
    free = 2 * (sum(parts.values()) - parts["weights"])  # the weights are there already
    monkeypatch.setattr("support.machine.memory.free_memory", lambda device, _: free)
    assert fit_batch_size(tiny, config, start_world("cpu"), torch.float32) == B
    free -= 1
    assert fit_batch_size(tiny, config, start_world("cpu"), torch.float32) == max(1, B // 2)


@pytest.mark.parametrize("limit, free", [("max", 8192000), ("5000000", 3500000), (None, 8192000)])
def test_a_containers_limit_counts_as_free_memory(monkeypatch, tmp_path, limit, free):
    files = {"meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"}
    if limit:
        files["memory.max"] = limit
        files["memory.current"] = "2000000"
        files["memory.stat"] = "anon 1\ninactive_file 500000\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("support.base.process.Path", lambda path: tmp_path / Path(path).name)
    assert free_memory(torch.device("cpu")) == free
    assert free_memory(torch.device("cpu"), 2) == free // 2, "two processes share the machine"
    (tmp_path / "meminfo").unlink()  # macOS has none
    pages = {"SC_PAGE_SIZE": 1024, "SC_PHYS_PAGES": 16000}
    monkeypatch.setattr("os.sysconf", pages.get)
    assert free_memory(torch.device("cpu")) == free


# -- signals, logs, a loss that is not a number


def test_a_second_sigterm_changes_nothing_and_a_second_ctrl_c_ends_at_once(tiny, monkeypatch):
    with as_a_process(sys.argv, b""):
        stop = Stop(WORLD)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script does for a job in the background
        stop.listen()
        stop.vote()
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            stop.vote()
        example = dict(ctx="a b", endings=["c", "d", "e", "f"], label=0)
        with pytest.raises(Interrupted):
            hellaswag.evaluate(tiny, [example], "cpu", stop=stop)
        ended: list[int] = []
        monkeypatch.setattr("os._exit", ended.append)  # no thread that writes is waited for
        signal.raise_signal(signal.SIGINT)
        assert ended == [130]


def test_a_resumed_log_has_no_step_twice_and_drops_a_half_written_line(tmp_path, monkeypatch):
    log = open_log(tmp_path, [{"type": "run"}])
    for name in ("builtins.open", "io.open"):
        monkeypatch.setattr(name, None)  # a record opens no file, and can be read at once
    for step in range(6):
        if step % 2 == 0:
            log.record(step, "val", val_loss=1.0)
        log.record(step, "train", loss=2.0)
    log.record(4, "end", wall=1.0)
    monkeypatch.undo()
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"type": "train", "st')
    open_log(tmp_path, records_before(tmp_path, 4, True))
    assert not read_records(tmp_path, "end"), "it goes on"
    lines = [line.split() for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert [step for step, stream, _ in lines if stream == "train"] == ["0", "1", "2", "3"]
    assert [step for step, stream, _ in lines if stream == "val"] == ["0", "2", "4"]
    open_log(tmp_path, records_before(tmp_path, 4, False))
    assert "4 val" not in (tmp_path / "log.txt").read_text()


def test_a_loss_that_is_not_a_number_stops_the_run_and_says_where(shards, tmp_path):
    flags = "--learning-rate 1e12 --grad-clip 0 --eps 1e-30"
    printed = train(shards, tmp_path / "log", flags, expect=1).stderr
    assert "the loss is nan" in printed
    assert re.search(r"sequences \d+ to \d+", printed)
    assert "Traceback" not in printed
    assert read_records(tmp_path / "log")[-1]["type"] == "diverged"
    before = contents(tmp_path)
    [rerun] = re.findall(r"find the operation: (.*? --find-nan)$", printed, re.MULTILINE)
    python, *rerun = shlex.split(rerun)
    assert python == as_typed("python")
    found = run_program([sys.executable, *rerun])
    assert found.returncode == 1
    assert "the first output that is not finite is that of transformer.h.0" in found.stderr
    assert contents(tmp_path) == before, "it writes nothing"


def test_a_nan_in_the_backward_pass_is_named_and_one_that_is_gone_ends_the_hunt(corpus, run_dir):
    layer = torch.nn.Linear(1, 1)
    with (
        pytest.raises(UserError, match=r"backward pass.*MulBackward0"),
        divergence.naming_operations(layer),
    ):
        (layer(torch.ones(1)) * 0).sqrt().backward()
    with open(run_dir / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"type": "diverged", "step": 6, "reason": "a NaN"}) + "\n")
    before = contents(run_dir)
    flags = "--max-steps 99 --find-nan --resume"
    done = train(corpus, run_dir, flags, run_dir / "ckpt_000004")
    steps = re.findall(r"^step +(\d+)", done.stdout, re.MULTILINE)
    assert steps == ["4", "5", "6", "7"], "one update past the one that had failed"
    assert "did not come again" in done.stdout
    assert contents(run_dir) == before


@pytest.mark.parametrize("loss, norm, skipped_in_a_row, reason", [
    (3.0, 1.0, 0, ""),
    (3.0, math.inf, 1, ""),  # one overflow in float16
    (3.0, math.nan, MOST_SKIPPED - 1, ""),
    (3.0, math.inf, MOST_SKIPPED, "50 updates in a row were skipped: overflow in float16"),
    (3.0, math.inf, 0, "the loss is 3.0 and the gradient norm inf"),
    (math.nan, math.nan, 0, "the loss is nan and the gradient norm nan"),
    (math.inf, math.nan, 1, "the loss is inf and the gradient norm nan"),  # a NaN, no overflow
])  # fmt: skip
def test_a_run_goes_on_after_an_overflow_but_not_after_many_or_a_nan(
    loss, norm, skipped_in_a_row, reason
):
    assert why_stop(loss, norm, skipped_in_a_row) == reason


def test_overflows_in_a_row_are_counted_and_a_checkpoint_keeps_the_count(monkeypatch):
    run = Mock(config=TrainConfig(), progress=Progress(best={"loss": 3.0}), last_save_time=0)
    run.train_loader.B = run.world.size = run.world.rank = 1
    counts = []
    for skipped in (False, True, True, False, True, True, True):
        outcome = (torch.tensor(3.0), torch.tensor(1.0), skipped)
        monkeypatch.setattr(train_gpt2, "train_step", lambda outcome=outcome, **_: outcome)
        train_gpt2.make_update(run, lr=1e-3)
        counts.append(run.progress.skipped_in_a_row)
    assert counts == [0, 1, 2, 0, 1, 2, 3]
    saved = dataclasses.asdict(run.progress)
    assert saved["best"] == {"loss": 3.0} and "lower" in saved, "as older checkpoints have it"


# -- mistakes: a sentence, no traceback


def test_all_problems_of_a_configuration_are_told_together_with_the_way_out(tmp_path):
    flags = "--n-head 3 --total-batch-size 100 --batch-size 7 --warmup-steps 99"
    done = train(tmp_path / "nowhere", tmp_path / "log", flags, expect=2)
    assert len(done.stderr.splitlines()) == 4
    for words in (
        "use 15 or 18",
        "use 96 or 112",
        "fineweb.py --source YOUR_TEXT",
        "warmup_steps 99",
    ):
        assert words in done.stderr


@pytest.mark.parametrize(
    "change, processes, words",
    [
        (dict(batch_size=3), 1, ["batch_size 3", "4 sequences", "1, 2, 4"]),
        (dict(val_every=5, val_tokens=3), 1, ["val_tokens 3", "sequence of 16"]),
        (dict(tracker="wandb"), 1, ["wandb", f"{as_typed('pip')} install wandb"]),
        (dict(batch_size=0), 3, ["64", "16 × processes 3", "48 or 96"]),
        (dict(eval_only=True), 3, ["--init-from MODEL"]),
        (dict(eval_only=True, init_from="gpt2", resume="auto"), 1, ["no --resume"]),
    ],
)
def test_a_wrong_value_is_named_with_what_would_do(shards, monkeypatch, change, processes, words):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fine = parse_command_line([*map(str, tiny_run(shards, "nowhere"))])
    assert check(fine, 1) == []
    [problem] = check(dataclasses.replace(fine, **change), processes)
    assert all(word in problem for word in words), problem


def test_a_log_directory_that_holds_a_run_is_not_overwritten_unasked(corpus, run_dir):
    before = (run_dir / "log.txt").read_text()
    done = train(corpus, run_dir, expect=2)
    assert "--resume auto" in done.stderr
    assert (run_dir / "log.txt").read_text() == before
    train(corpus, run_dir, "--overwrite --max-steps 3")
    assert len(losses(run_dir)) == 3
    assert not checkpoint.checkpoints(run_dir)


@pytest.mark.parametrize("end", ["", "--resume auto", "--overwrite", "--resume=x --overwrite"])
def test_the_command_to_resume_is_the_command_that_was_given(end, monkeypatch):
    line = "--sample-prompt 'a b' --resume x --max-steps=3"
    args = args_to_resume(shlex.split(f"{line} {end}"))
    assert shlex.join(args) == "--sample-prompt 'a b' --max-steps=3 --resume auto"
    assert parse_command_line(args).resume == "auto"


def test_the_command_has_the_launcher_of_so_many_processes_on_so_many_nodes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # this Python is not below it
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py"])
    monkeypatch.setattr("support.machine.distributed.join", lambda world: None)
    for size, local, launcher in [
        (1, 1, "python train_gpt2.py"),
        (8, 8, "torchrun --standalone --nproc_per_node=8 train_gpt2.py"),
        (8, 4, "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d"),
    ]:
        monkeypatch.setattr(os, "environ", torchrun_variables(0, size, local))
        assert start_world("cpu").command(["--seed", "1"]).startswith(launcher)


ALL = torchrun_variables(1, 2, 2)


@pytest.mark.parametrize("given, words", [
    (dict(RANK="3"), "RANK=3, but WORLD_SIZE is not set, LOCAL_RANK is not set"),
    (dict(WORLD_SIZE="2"), "WORLD_SIZE=2, but RANK is not set"),
    (dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="a"), "LOCAL_WORLD_SIZE is not set, MASTER_PORT"),
    (ALL | dict(LOCAL_RANK=""), "but LOCAL_RANK is not set: start with torchrun, or unset them"),
    (ALL | dict(RANK="one"), "but RANK is 'one': start with torchrun"),
    (ALL | dict(WORLD_SIZE="two"), "but WORLD_SIZE is 'two'"),
    (dict(RANK="", WORLD_SIZE="", LOCAL_RANK=""), ""),
    (dict(LOCAL_RANK="3", MASTER_ADDR="a"), ""),  # a variable of an earlier job
    (dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="a", MASTER_PORT="2"), ""),  # a cluster's, for one
])  # fmt: skip
def test_a_launchers_variables_without_the_launcher_are_named_or_harmless(
    monkeypatch, given, words
):
    monkeypatch.setattr(os, "environ", given)
    if words:
        with pytest.raises(UserError, match=re.escape(words)):
            start_world("cpu")
    else:
        assert start_world("cpu") == World(torch.device("cpu"))


@pytest.mark.parametrize("flags, words", [
    ("--embedding-lr 2", "--embedding-lr is of no use with --optimizer=adamw"),
    ("--preset quickstart --optimizer adamw --embedding-lr=4", "--embedding-lr is of no use"),
    ("--decay-frac 0.5 --decay linear", "--decay-frac is of no use with --decay=linear"),
    ("--save-best --val-every 0", "--save-best is of no use with --val-every=0"),
    ("--find-nan", "--find-nan is of no use with --resume=none"),
    ("--init-from gpt2 --eval-only --find-nan", "--find-nan is of no use with --eval-only"),
    ("--init-from gpt2 --eval-only --save-best --overwrite", ""),  # a training command, and this
    ("--preset quickstart --hellaswag-limit 9", "--hellaswag-limit is of no use with --hella"),
    ("--sample-every 0 --sample-tokens 9", "--sample-tokens is of no use with --sample-every=0"),
    ("--val-every 0 --val-tokens 9999", "--val-tokens is of no use with --val-every=0"),
    ("--checkpoint-every 0 --checkpoint-minutes 0 --keep-checkpoints 3", "--keep-checkpoints is"),
    ("--checkpoint-every 0 --keep-checkpoints 3", ""),  # by the clock
    ("--resume auto --find-nan --hellaswag-every 0", ""),
    ("--overwrite --resume auto", "--overwrite starts over, and --resume auto goes on"),
    ("--overwrite --init-from {log}/ckpt_000002", "--overwrite would delete --init-from's model"),
    ("--min-lr-frac 5", "--min-lr-frac 5.0: it must be at least 0 and at most 1"),
    ("--sequence-length 0", "--sequence-length 0: it must be at least 1"),
    ("--n-head 0", "--n-head 0: it must be at least 1"),
    ("--preset quickstart --optimizer adamw", ""),  # nobody typed the rate of embeddings
    ("--optimizer muon --embedding-lr 2 --decay wsd --decay-frac 0.5", ""),
])  # fmt: skip
def test_a_flag_without_effect_is_refused(tmp_path, flags, words):
    log_dir = str(tmp_path / "log")
    args = [*flags.format(log=log_dir).split(), "--data-dir", str(tmp_path), "--log-dir", log_dir]
    problems = check(parse_command_line(args), 1)
    assert [problem for problem in problems if problem.startswith(words)] or not words
    assert len(problems) == bool(words), problems


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_reports_a_mistake_and_the_others_let_it_end_first(rank, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    for name, value in torchrun_variables(rank, 2, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("support.machine.distributed.join", lambda world: None)
    monkeypatch.setattr(World, "broadcast", lambda world, value: value)
    monkeypatch.setattr(World, "any", lambda world, flag: flag)
    monkeypatch.setattr(World, "launches", lambda world: [])
    with pytest.raises(UsageError, match="--val-tokens 0: it must be at least 1"):
        main(["--val-tokens", "0"])
    assert bool(slept) == (rank == 1)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_the_configuration_the_metrics_and_the_samples(name, tmp_path, monkeypatch):
    got: list = []
    service = SimpleNamespace(
        init=lambda **options: got.append(options["config"]),
        log=lambda values, step: got.append((step, values)),
        finish=lambda: got.append("finish"),
    )
    monkeypatch.setitem(sys.modules, name, service)
    about = {"config": {"n_layer": 12, "seed": 1}, "model": {"n_layer": 2}}
    log = open_log(tmp_path, [], open_tracker(name, tmp_path, about, 0))
    log.record(3, "train", loss=4.5, lr=0.1)
    log.record(5, "samples", prompt="a", samples=["ab", "ac"])
    log.close()
    assert got == [
        {"n_layer": 2, "seed": 1},
        (3, {"train/loss": 4.5, "train/lr": 0.1}),
        (5, {"samples/prompt": "a", "samples/samples": "ab\n\n---\n\nac"}),
        "finish",
    ]


@pytest.mark.parametrize("method", ["log", "finish"])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), RuntimeError("quota\nx")])
def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(
    corpus, tmp_path, monkeypatch, method, error, outcome
):
    service = Mock(__spec__=Mock(), **{f"{method}.side_effect": error})
    monkeypatch.setitem(sys.modules, "wandb", service)
    done = call(
        "train_gpt2.py", *tiny_run(corpus, tmp_path, "--tracker wandb --checkpoint-every 3")
    )
    outcome("trackers", f"{method}: {error}", judge(done))
    assert done.stdout.count(f"the tracker has failed ({type(error).__name__}: ") == 1
    assert getattr(service, method).call_count == 1 and "quota\nx" not in done.stdout
    assert done.returncode == 0 and (tmp_path / "ckpt_000006").exists(), done


def test_only_the_broken_pipe_of_standard_output_is_no_error(tmp_path):
    """`| head` is a reader who has seen enough; another pipe that breaks is a failure."""
    code = "import os, sys; from support.base.console import run_script\n"
    code += "def other(_): raise BrokenPipeError(32, 'another pipe')\n"
    code += "def long(_): print('a' * 10 ** 7)\nrun_script({})"
    for name, expected in (("other", 1), ("long", 0)):
        run = f'set -o pipefail; {sys.executable} -c "{code.format(name)}" | head -c 9'
        done = run_program(["bash", "-c", run], cwd=tmp_path)
        assert done.returncode == expected, done
        assert ("BrokenPipeError: [Errno 32] another pipe" in done.stderr) == bool(expected)


def test_wandb_and_trackio_continue_the_same_run_and_an_overwritten_one_is_another(
    run_dir, monkeypatch
):
    service = Mock()
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, service)
    about = {"config": {}, "model": {}, "time": "now"}
    config = TrainConfig(log_dir=str(run_dir), resume="auto", tracker="wandb")
    begun = read_records(run_dir, "run")[0] | {"model": {}}
    open_tracker("wandb", run_dir, begun, 0, begun["time"])
    found = checkpoint.find([run_dir / "ckpt_000004"], WORLD)
    start_logs(config, WORLD, found, Progress(), about)
    start_logs(dataclasses.replace(config, overwrite=True), WORLD, None, Progress(), about)
    first, resumed, other = [call.kwargs for call in service.init.call_args_list]
    assert first["id"] == resumed["id"] != other["id"]
    assert {call["resume"] for call in (first, resumed, other)} == {"allow"}
    service.init.reset_mock()
    for folder, step in ((run_dir, 0), (run_dir, 4), (run_dir.parent / "b" / run_dir.name, 0)):
        open_tracker("trackio", folder, begun, step, begun["time"])
    own, resumed, other = [call.kwargs for call in service.init.call_args_list]
    assert own == resumed and own["resume"] == "allow" and "id" not in own
    assert own["name"] != other["name"], "trackio knows a run by its name, in one project"


def test_a_tracker_that_does_not_answer_leaves_the_run_that_it_would_overwrite(
    run_dir, monkeypatch
):
    config = TrainConfig(log_dir=str(run_dir), overwrite=True, tracker="wandb")
    service = Mock()
    service.init.side_effect = ConnectionError
    monkeypatch.setitem(sys.modules, "wandb", service)
    about = {"config": {}, "model": {}}
    with pytest.raises(UserError, match=r"--tracker wandb does not start \(ConnectionError"):
        start_logs(config, WORLD, None, Progress(), about)
    assert len(checkpoint.checkpoints(run_dir)) == 3
    service.init.side_effect = None
    start_logs(config, WORLD, None, Progress(), about)
    assert not checkpoint.checkpoints(run_dir)
    assert not (run_dir / "report.md").exists(), "it was about the old run"


def test_a_checkpoint_before_the_first_update_that_counts_makes_no_step(tiny, tmp_path):
    """float16 skips updates that overflow. PyTorch would step to have a state to save."""
    optimizers = tiny.configure_optimizers()
    writer = checkpoint.Writer(Stop(WORLD), tmp_path)
    writer.save(tiny, optimizers, {"step": 1}, {})
    checkpoint.load_optimizers(tiny, optimizers, checkpoint.load_state(writer.last)["optimizer"])
    assert not optimizers[0].state


def test_tensorboard_gets_the_metrics_and_the_samples(shards, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = "--tracker tensorboard --val-every 3 --val-tokens 160 --sample-every 3"
    train(shards, tmp_path / "log", flags)
    events = reader.EventAccumulator(str(tmp_path / "log" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("val/val_loss")] == [0, 3, 6]
    values = [event.value for event in events.Scalars("train/loss")]
    assert values == pytest.approx(losses(tmp_path / "log"))
    assert {"train/lr", "train/norm"} <= set(events.Tags()["scalars"])
    assert "samples/samples/text_summary" in events.Tags()["tensors"]


@pytest.mark.parametrize("every", ["2", "3"])
def test_after_a_resume_tensorboard_has_what_metrics_jsonl_has(corpus, tmp_path, every):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = f"--tracker tensorboard --val-every 1 --val-tokens 160 --checkpoint-every {every}"
    train(corpus, tmp_path, flags)
    shutil.rmtree(tmp_path / "ckpt_000006")
    time.sleep(1)  # the name of TensorBoard's file has the second in it
    train(corpus, tmp_path, f"{flags} --resume auto")
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for kind, value in (("val", "val_loss"), ("train", "loss")):
        logged = [(event.step, event.value) for event in events.Scalars(f"{kind}/{value}")]
        records = read_records(tmp_path, kind)
        assert [step for step, _ in logged] == [record["step"] for record in records]
        assert [v for _, v in logged] == pytest.approx([record[value] for record in records])


# -- short runs, models that files decide, evaluation alone, pictures and cards


WARM_UPS = {"--max-steps 10": 1, "--max-steps 9": 0, "--max-steps 30000": 715}
WARM_UPS |= {"--preset quickstart --max-steps=100": 10, "--max-steps 10 --warmup_steps=3": 3}


@pytest.mark.parametrize("flags, steps", WARM_UPS.items())
def test_a_presets_warm_up_is_at_most_a_tenth_of_the_run(flags, steps, tmp_path):
    config = parse_command_line([*flags.split(), "--data-dir", str(tmp_path)])
    assert config.warmup_steps == steps
    assert check(dataclasses.replace(config, log_dir="nowhere"), 1) == []


def run_without(left_out: str, shards, log_dir, flags: str) -> str:
    """What a tiny run prints whose command line lacks some flags of TINY."""
    args = tiny_run(shards, log_dir, flags)
    for flag in left_out.split():
        del args[args.index(flag) : args.index(flag) + 2]
    done = warm_server().run("train_gpt2.py", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "first, then, steps",
    [
        ("", "--max-steps 20", 2),  # a first try, then the whole run
        ("--warmup-steps 7", "--max-steps 20", 7),  # typed: it stays
        ("", "--max-steps 20 --warmup-steps 3", 3),
    ],
)
def test_an_untyped_warm_up_follows_the_length_of_the_run(corpus, tmp_path, first, then, steps):
    place = (corpus, tmp_path / "log")
    said = run_without("--warmup-steps", *place, f"--checkpoint-every 10 --max-steps 10 {first}")
    assert f" {first[-1:] or 1} of warm-up" in said
    said = run_without("--warmup-steps", *place, f"--resume auto {then}")
    before = int(first[-1:] or 1)
    assert (f"warmup_steps {before} -> {steps}" in said) == (before != steps)
    starts = [r for r in read_records(tmp_path / "log") if r["type"] in ("run", "resume")]
    assert [start["config"]["warmup_steps"] for start in starts] == [before, steps]
    rates = [record["lr"] for record in read_records(tmp_path / "log", "train")]
    config = TrainConfig(max_steps=20, warmup_steps=steps, learning_rate=0.01)
    assert rates[10:] == [learning_rate(step, config) for step in range(10, 20)]


def test_a_typed_warm_up_that_a_shorter_resume_leaves_no_room_for_is_refused(corpus, run_dir):
    args = [*tiny_run(corpus, run_dir, "--max-steps 2 --resume"), run_dir / "ckpt_000002"]
    del args[args.index("--warmup-steps") : args.index("--warmup-steps") + 2]
    done = call("train_gpt2.py", *args)
    assert done.returncode == 2 and "warmup_steps 2: use fewer than max_steps 2" in done.stderr


def test_pages_about_a_run_have_the_sizes_of_the_model_in_the_files(corpus, finished, tmp_path):
    flags = f"--init-from {finished}/ckpt_000006"
    run_without("--n-layer --n-head --n-embd", corpus, tmp_path / "log", flags)
    assert "# GPT-2 of 2 layers and 16 channels" in (tmp_path / "log" / "report.md").read_text()
    assert read_run(tmp_path / "log").config["n_head"] == 2


@pytest.mark.parametrize(
    "flags, has",
    [
        ("", ""),
        ("--preset quickstart --n-embd 32 --n_layer=2", ""),
        ("--n-layer 12", "has n_layer 2:"),
        ("--n-head=4 --n_embd 768 --no-activation-checkpointing", "has n_head 2, n_embd 32:"),
    ],
)
def test_a_typed_size_that_the_files_contradict_is_refused(tiny, tmp_path, flags, has):
    tiny.save_pretrained(tmp_path / "model")
    args = [*flags.split(), "--sequence-length=16", f"--init-from={tmp_path}/model"]
    args.append(f"--data-dir={tmp_path}")  # not what make quickstart leaves here
    config = parse_command_line([*args, "--no-compile"])
    settled = Settled(config, WORLD, open_data(tmp_path), None)
    if has:
        with pytest.raises(UserError, match=rf"model {has} leave these flags out.* from scratch$"):
            build_model(settled, torch.float32)
    else:
        assert build_model(settled, torch.float32).config.n_layer == 2


def test_eval_only_prints_what_training_does_and_writes_nothing(corpus, tmp_path, monkeypatch):
    example = dict(ctx="One", endings=[" two", " three", " four", " five"], label=0)
    (tmp_path / "one.jsonl").write_text(json.dumps(example))
    flags = f"""--val-every 6 --val-tokens 160 --hellaswag-every 6
        --hellaswag-path {tmp_path}/one.jsonl"""
    log_dir = tmp_path / "log"
    trained = train(corpus, log_dir, f"{flags} --checkpoint-every 6").stdout
    last = [line.split(" | ", 1)[1] for line in trained.splitlines() if "step     6 |" in line]
    assert len(last) == 2
    before = contents(tmp_path)
    alone = f"{flags} --eval-only --init-from {log_dir}/ckpt_000006 --total-batch-size 65"
    shared = train(corpus, log_dir, f"{alone} --sharding fsdp", ranks=2).stdout
    assert shared.splitlines()[-2:] == last
    monkeypatch.setattr(GPT, "configure_optimizers", None)
    monkeypatch.setattr(train_gpt2, "fit_batch_size", None)  # that a backward pass fits, too
    done = call("train_gpt2.py", *tiny_run(corpus, tmp_path / "nowhere", alone))
    assert done.stdout.splitlines()[-2:] == last, done
    assert contents(tmp_path) == before and not (tmp_path / "nowhere").exists()


def test_a_picture_that_cannot_be_drawn_is_a_line_and_training_goes_on(corpus, tmp_path):
    log_dir = tmp_path / "log"
    flags = ("--val-every", 3, "--val-tokens", 160)
    done = warm_train(corpus, log_dir, *flags, largest_file=20_000)
    assert done.returncode == 0 and len(losses(log_dir)) == 6
    assert f"loss.png: {log_dir}/loss.png cannot be written (File too large)" in done.stdout
    assert "The curve" not in done.stdout and not list(log_dir.glob(".*tmp"))


def test_a_time_is_that_of_an_update_and_pictures_are_few(corpus, tmp_path, monkeypatch):
    clock = [0.0]
    drawn = []

    def takes(seconds: float, function):
        return lambda *args, **options: clock.append(seconds) or function(*args, **options)

    def draw(log_dir):
        drawn.append(len(read_records(Path(log_dir), "val")))
        assert len(drawn) < 3, "the third cannot be drawn"
        Path(log_dir, "loss.png").touch()

    monkeypatch.setattr(time, "perf_counter", lambda: sum(clock))
    monkeypatch.setattr(plots, "plot_run", draw)
    monkeypatch.setattr(evaluate, "validate", takes(50, lambda **_: (3.0, None, None)))
    monkeypatch.setattr(checkpoint, "write", takes(1000, checkpoint.write))
    monkeypatch.setattr(Stop, "start_vote", takes(4, Stop.start_vote))
    monkeypatch.setattr(Log, "record", takes(1, Log.record))
    flags = "--batch-size 4 --val-every 2 --val-tokens 160 --checkpoint-every 3"
    call("train_gpt2.py", *tiny_run(corpus, tmp_path / "log", flags))
    times = [record["ms"] for record in read_records(tmp_path / "log", "train")]
    assert times == [4000, 5000, 4000, 4000, 4000, 5000], "the record before it counts"
    assert drawn == [1, 3, 4], "the first validation, one two minutes later, the end"
    assert "loss.png" not in (tmp_path / "log" / "report.md").read_text(), "it lacks the end"


def test_an_interrupted_last_validation_is_made_by_the_resumed_run(corpus, tmp_path, monkeypatch):
    log_dir = tmp_path / "log"
    args = tiny_run(corpus, log_dir, "--val-every 6 --val-tokens 160 --resume auto")
    answers = [(10.0, 2.0, 1.0), Interrupted, (9.0, None, None)]
    monkeypatch.setattr(evaluate, "validate", Mock(side_effect=answers))
    for words in ("interrupted: ", "done: "):
        assert words in call("train_gpt2.py", *args).stdout
    assert [record["val_loss"] for record in read_records(log_dir, "val")] == [10.0, 9.0]
    words = "ckpt_000006, with the lowest validation loss: 9.0000"
    assert f"| best checkpoint | {words} |" in (log_dir / "report.md").read_text()


def test_the_way_out_of_a_nan_begins_at_the_last_good_checkpoint(run_dir):
    config = TrainConfig(log_dir=str(run_dir))
    run = Mock(config=config, progress=Progress())
    run.command_to_resume = "AGAIN"
    with pytest.raises(UserError, match=r"operation: AGAIN --find-nan; to resume.*: AGAIN$"):
        end_diverged(run, "the loss is nan")
    assert run.log.record.call_args.kwargs == {"reason": "the loss is nan"}


def test_a_run_begun_from_elsewhere_goes_on_from_there_when_killed(corpus, finished, tmp_path):
    log_dir = tmp_path / "log"
    flags = "--checkpoint-every 9 --weight-decay 0.7 --dtype float16"
    start = finished / "ckpt_000004"
    args = tiny_run(corpus, log_dir, f"{flags} --resume {start}")
    done = train(corpus, tmp_path / "whole", f"{flags} --resume {start}")
    for words in ("weight_decay 0.1 -> 0.7", "dtype float32 -> float16"):
        assert words in done.stdout
    state = checkpoint.load_state(tmp_path / "whole" / "ckpt_000006")
    assert [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [0.7, 0.0]
    assert state["scaler"]
    pid = warm_server().start("train_gpt2.py", *args, "--max-steps", "100000")
    wait_for_file(log_dir / "metrics.jsonl")
    os.kill(pid, signal.SIGKILL)
    warm_server().finish()
    done = train(corpus, log_dir, f"{flags} --resume auto")
    assert f"resuming from {start}: 4 updates" in done.stdout
    whole, cut = (read_records(place, "train") for place in (tmp_path / "whole", log_dir))
    assert [r["step"] for r in whole] == [4, 5]
    assert [r["loss"] for r in cut] == [r["loss"] for r in whole]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_shard_that_disappears_ends_the_run_with_its_updates_saved(shards, tmp_path, ranks):
    flags = "--max-steps 100000 --batch-size 1 --val-every 0"
    server = warm_server()
    args = tiny_run(shards, tmp_path / "log", flags)
    server.start("train_gpt2.py", *args, **(two_ranks() if ranks == 2 else {}))
    wait_for_file(tmp_path / "log" / "metrics.jsonl")
    while len(read_records(tmp_path / "log", "train")) < 3:
        time.sleep(0.01)
    for shard in shards.glob("*_train_*"):
        shard.unlink()
    done = server.finish()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(r"_train_00000\d.npy.*is saved; resume with:.*--resume auto", done.stderr)
    [saved] = checkpoint.checkpoints(tmp_path / "log")
    assert checkpoint.step_of(saved) == len(losses(tmp_path / "log"))


def test_a_run_knows_its_own_checkpoint_by_any_path(corpus, run_dir, monkeypatch):
    monkeypatch.chdir(run_dir.parent)
    monkeypatch.setattr(Stop, "read_vote", Mock(side_effect=Interrupted))
    before = contents(run_dir / "ckpt_000004")
    resume = tiny_run(corpus, "log", "--max-steps 9 --resume", run_dir / "ckpt_000004")
    done = call("train_gpt2.py", *resume)
    assert "log/ckpt_000004 is saved" in done.stdout, done
    assert contents(run_dir / "ckpt_000004") == before
    assert not list(run_dir.glob("abandoned_ckpt_000004*"))


@pytest.mark.parametrize("flag", ["--find-nan --resume auto", "--eval-only --init-from"])
def test_without_a_run_an_unreadable_shard_is_a_sentence_too(shards, finished, tmp_path, flag):
    for shard in shards.glob("*.npy"):
        np.save(shard, np.full(700, 60_000, np.uint16))
    model = [finished / "ckpt_000006"] if "init" in flag else []
    flags = f"--val-every 3 --val-tokens 160 {flag}"
    done = call("train_gpt2.py", *tiny_run(shards, tmp_path / "log", flags, *model))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    assert "token 60000" in done.stderr

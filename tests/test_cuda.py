"""What only a GPU can show: 16 bits, fused kernels, its memory. Without one all is skipped."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from conftest import (
    documents,
    losses,
    read_records,
    run_script,
    tiny_run,
    train,
    weights_hash,
    write_shard,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import hellaswag
from config import TrainConfig
from model import GPT, DataLoaderLite, GPTConfig
from optim import orthogonalize_share
from support.machine.compile import compile_blocks
from support.machine.device import autocast
from support.machine.distributed import Stop, World, start_world
from support.machine.graphs import UNRECORDED, Graphs, run_eagerly
from support.machine.memory import fit_batch_size, runs_out_of_memory
from support.weights.generation import compile_step
from train_gpt2 import train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
GPU = torch.device("cuda")
B, T = 4, 256
# training as on a GPU: compiled, in 16 bits
AS_ON_A_GPU = "--device cuda --compile --dtype auto --n-embd 64 --sequence-length 64 "
AS_ON_A_GPU += "--batch-size 2 --total-batch-size 512"


def make_model(**shape) -> GPT:
    torch.set_float32_matmul_precision("highest")  # no TF32
    torch.manual_seed(0)
    small = dict(block_size=T, n_layer=2, n_head=2, n_embd=128)
    return GPT(GPTConfig(**(small | shape))).to(GPU)


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(50257, shape, generator=torch.Generator().manual_seed(0)).to(GPU)


def attention(kernel: SDPBackend | None):
    """The context in which attention runs by this kernel alone. None: by PyTorch's choice."""
    return sdpa_kernel([kernel]) if kernel else nullcontext()


def take_gradients(model: GPT, dtype: torch.dtype, kernel: SDPBackend | None) -> tuple[float, list]:
    """The loss and the gradients of one forward and backward pass."""
    tokens = random_tokens(B, T + 1)
    tokens[0, -1] = -1  # no target
    with attention(kernel), autocast(GPU, dtype):
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
    scale = 2.0**14  # the gradients of the logits would vanish in float16
    (scale * loss).backward()
    return loss.item(), [p.grad / scale for p in model.parameters()]


@pytest.mark.parametrize("kernel, of_loss", [
    (None, False), (SDPBackend.FLASH_ATTENTION, False), (None, True)
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_compiled_step_in_16_bits_is_the_plain_one_in_float32_to_rounding(
    dtype, kernel, of_loss, monkeypatch
):
    """of_loss: whether the loss takes its Triton kernel."""
    needs_ampere = dtype == torch.bfloat16 or kernel is not None
    if needs_ampere and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no bfloat16 and no flash attention")
    torch._dynamo.reset()
    # the compiler's cache does not tell the contexts of two kernels apart
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    loss, gradients = take_gradients(make_model(), torch.float32, SDPBackend.MATH)
    monkeypatch.setenv("GPT2_LOSS_KERNEL", str(int(of_loss)))
    model = make_model()
    compile_blocks(model, recompute=False)
    loss16, gradients16 = take_gradients(model, dtype, kernel)
    assert loss16 == pytest.approx(loss, rel=0.003)
    for exact, rounded in zip(gradients, gradients16, strict=True):
        assert rounded.dtype == torch.float32
        assert (rounded - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("sharding, ranks", [
    ("ddp", 1),
    pytest.param("ddp", 2, marks=several),
    pytest.param("zero1", 2, marks=several),
    pytest.param("fsdp", 2, marks=several),
])  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    shards, tmp_path, sharding, ranks, optimizer
):
    flags = f"{AS_ON_A_GPU} --deterministic --checkpoint-every 3"
    flags += f" --sharding {sharding} --optimizer {optimizer}"
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(shards, whole, flags, ranks=ranks)
    train(shards, again, flags, "--resume", whole / "ckpt_000003", ranks=ranks)
    assert [record["loss"] for record in read_records(again, "train")] == losses(whole)[3:]
    assert weights_hash(again / "ckpt_000006") == weights_hash(whole / "ckpt_000006")


@pytest.mark.parametrize("flags", [
    "--optimizer adamw",
    "--optimizer muon --average-frac 0.5",
    "--optimizer muon --total-batch-size 128",
    "--sequence-length 200 --total-batch-size 1200 --batch-size 3",
])  # fmt: skip
def test_updates_replayed_by_cuda_graphs_are_the_eager_ones_bit_for_bit(shards, tmp_path, flags):
    flags = f"{AS_ON_A_GPU} {flags} --deterministic --val-every 2 --val-tokens 256"
    replayed = train(shards, tmp_path / "replayed", flags)
    assert "without CUDA graphs" not in replayed.stdout
    train(shards, tmp_path / "eager", flags, GPT2_NO_GRAPH="1")
    left = []
    for log_dir in (tmp_path / "replayed", tmp_path / "eager"):
        validations = [record["val_loss"] for record in read_records(log_dir, "val")]
        left.append((losses(log_dir), validations, weights_hash(log_dir / "ckpt_000006")))
    assert left[0] == left[1]


@pytest.mark.parametrize("flags, ranks, rel", [
    ("--dtype float16", 1, 0.03),
    pytest.param("--sharding ddp", 2, 1e-3, marks=several),
    pytest.param("--sharding zero1", 2, 1e-3, marks=several),
    pytest.param("--sharding fsdp", 2, 1e-3, marks=several),
])  # fmt: skip
def test_float16_and_two_gpus_train_as_float32_on_one_does(shards, tmp_path, flags, ranks, rel):
    plain = f"{AS_ON_A_GPU} --dtype float32"
    train(shards, tmp_path / "plain", plain)
    train(shards, tmp_path / "other", f"{plain} {flags}", ranks=ranks)
    curve = losses(tmp_path / "other")
    assert curve == pytest.approx(losses(tmp_path / "plain"), rel=rel)
    assert curve[-1] < curve[0]


# gloo may lack what zero1 and fsdp need of it on a GPU
maybe = pytest.mark.xfail(reason="gloo has no such collective of GPU tensors", strict=False)


@pytest.mark.parametrize("sharding", [
    "ddp", pytest.param("zero1", marks=maybe), pytest.param("fsdp", marks=maybe)
])  # fmt: skip
def test_two_processes_on_one_gpu_train_as_one_does(shards, tmp_path, sharding):
    plain = f"{AS_ON_A_GPU} --dtype float32"
    train(shards, tmp_path / "plain", plain)
    flags = tiny_run(shards, tmp_path / "two", f"{plain} --sharding {sharding}")
    run_script("tests/one_gpu.py", *flags, ranks=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)


@pytest.mark.parametrize("shape", [(3, 128, 384), (5, 256, 64), (1, 64, 64)], ids=str)
def test_muon_orthogonalizes_many_matrices_at_once_as_a_cpu_does_one_after_another(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for parts in (1, shape[1] // 32):
        exact = orthogonalize_share(matrices.clone(), parts)
        for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.05)):
            x = orthogonalize_share(matrices.to(GPU, dtype), parts).float().cpu()
            assert (x - exact).norm() < tolerance * exact.norm()


def make_update(
    model: GPT, optimizers: list, loader: DataLoaderLite, world: World, run_part=run_eagerly
) -> torch.Tensor:
    """Makes an update of two micro-steps, as training does on a GPU -> its loss, on the GPU."""
    loss, _, _ = train_step(
        model=model,
        optimizers=optimizers,
        scaler=torch.amp.GradScaler("cuda", enabled=False),
        loader=loader,
        grad_accum_steps=2,
        world=world,
        stop=Stop(world),
        dtype=torch.bfloat16,
        lr=1e-3,
        grad_clip=1.0,
        run_part=run_part,
    )
    return loss


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("replay", [False, True])
def test_after_the_first_updates_nothing_recompiles_and_the_cpu_never_waits(
    tmp_path, replay, optimizer
):
    write_shard(tmp_path / "toy_train_000001.npy", documents(100_000, seed=1))
    world = start_world("cuda")
    model = make_model()
    compile_blocks(model, recompute=False)
    loader = DataLoaderLite(tmp_path, "train", B=16, T=T, pin=True)
    optimizers = model.configure_optimizers(optimizer)
    run_part = Graphs(optimizers, GPU).run if replay else run_eagerly
    for _ in range(UNRECORDED + 1 if replay else 1):
        make_update(model, optimizers, loader, world, run_part)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            made = [make_update(model, optimizers, loader, world, run_part) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(math.isfinite(loss.item()) for loss in made)
    assert all(half.is_pinned() for half in loader.next_batch()), "copied beside the computation"


@pytest.mark.parametrize("dtype, rel", [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_hellaswag_is_scored_as_by_the_plain_kernel_in_float32(dtype, rel):
    draw = np.random.default_rng(0)
    examples = []
    for _ in range(40):
        lengths = draw.integers(1, 40, 5)
        context, *endings = [" ".join(draw.choice([*"abcdefgh"], n)) for n in lengths]
        examples.append({"ctx": context, "endings": endings, "label": 0})
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5)  # so that what a token attends to shows in its loss
    with attention(SDPBackend.MATH):
        exact = hellaswag.score(model, examples, GPU)
    compile_blocks(model, recompute=False)
    scored = hellaswag.score(model, examples, GPU, dtype=dtype)
    assert scored == pytest.approx(exact, rel=rel)


@pytest.fixture
def memory_limit():
    """A function that limits what this process may allocate, in bytes; at the end nothing does."""
    total = torch.cuda.get_device_properties(GPU).total_memory
    yield lambda n: torch.cuda.set_per_process_memory_fraction(min(1.0, n / total))
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_the_micro_batch_that_is_found_leaves_room_for_training(memory_limit, tmp_path):
    write_shard(tmp_path / "toy_train_000001.npy", documents(200_000, seed=1))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    world = start_world("cuda")
    raw = make_model(n_embd=256, block_size=1024)
    compile_blocks(raw, recompute=False)
    config = TrainConfig(sequence_length=1024, total_batch_size=64 * 1024)
    assert not runs_out_of_memory(raw, config, 64, world, torch.bfloat16), "on 16 GB or more"
    limit = 0.8 * torch.cuda.max_memory_allocated()  # reserved has holes: 64 might still fit
    memory_limit(limit)
    size = fit_batch_size(raw, config, world, torch.bfloat16)
    assert 1 <= size < 64
    torch.cuda.reset_peak_memory_stats()
    optimizers = raw.configure_optimizers()
    for _ in range(2):  # the first makes the moments
        loader = DataLoaderLite(tmp_path, "train", size, 1024, pin=True)
        loss = make_update(raw, optimizers, loader, world)
    assert math.isfinite(loss.item())
    assert torch.cuda.max_memory_reserved() <= limit


def test_the_compiled_step_of_generation_chooses_the_eager_ones_tokens():
    model = make_model().eval()
    prompts = random_tokens(2, 8)
    plain = model.generate(prompts, 32, temperature=0)
    compile_step(model)
    assert torch.equal(model.generate(prompts, 32, temperature=0), plain)

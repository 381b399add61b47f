"""How much memory a training process needs, and the largest micro-batch that fits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from support.base.errors import UserError
from support.machine.device import autocast, free_memory
from support.machine.sharding import is_sharded

if TYPE_CHECKING:
    from config import TrainConfig
    from model import GPT
    from support.machine.distributed import World

FLOAT32 = 4  # bytes
HEADROOM = 0.03  # of a GPU's memory: its allocator cannot fill every hole
# The fraction of free memory that an estimate may fill. On a GPU, the rest is for an error of 15%
# and HEADROOM; on a CPU, for other programs and holes in the heap (device.keep_freed_memory).
FILL = {"cpu": 0.5, "cuda": 0.8}


def estimate_memory(
    model: GPT, config: TrainConfig, B: int, width: int, device: str, processes: int = 1
) -> dict[str, int]:
    """Bytes that each process holds at the start of the last micro-step's eager backward pass.

    B sequences; matmuls of numbers of `width` bytes (4 in float32, else 2). model: may be on meta.
    tests/test_plan.py compares it with fake tensors and a real peak, but not what fsdp gathers.
    """
    shape = model.config
    C = shape.n_embd
    V = shape.padded_vocab_size
    tokens = B * config.sequence_length
    residual = FLOAT32 * C * tokens
    cast = width * C * tokens
    # Kept for a block: the residual stream before attention and before the MLP; for matmuls and
    # attention both layer norms' outputs, q, k, v, attention's output, 4·C before and after GELU.
    block = 2 * residual + (1 + 1 + 3 + 1 + 4 + 4) * cast
    last = 2 * residual  # around the last layer norm
    rows = min(tokens, model.loss_rows(device))
    # float32 logits, what logsumexp makes of them, and earlier rows, if there are any
    loss = (3 if tokens > rows else 2) * FLOAT32 * rows * V
    loss += FLOAT32 * V * C + cast  # the gradients of the embedding and of the input
    if width < FLOAT32:  # the loss casts its input and the embedding
        last += cast
        loss += width * V * C
    kept = block
    if shape.activation_checkpointing:  # the backward pass recomputes a block when the loss is gone
        kept = residual
        loss = max(loss, block)
    parts = state_memory(model, config, width, processes)
    return parts | {"activations": shape.n_layer * kept + last, "loss": loss}


def state_memory(model: GPT, config: TrainConfig, width: int, processes: int = 1) -> dict[str, int]:
    """The parts that do not depend on the micro-batch."""
    N = sum(p.numel() for p in model.parameters())
    blocks = sum(p.numel() for p in model.transformer.h.parameters())
    matrices = sum(p.numel() for p in model.transformer.h.parameters() if p.dim() == 2)
    weights = FLOAT32 * N
    moments = 2 * weights
    if config.optimizer == "muon":  # one moment for each matrix of a block
        moments -= FLOAT32 * matrices
    if config.average_frac:
        moments += weights
    sharding = config.sharding if processes > 1 else ""
    shards = processes if sharding in ("zero1", "fsdp") else 1
    parts = {
        "weights": weights // shards,
        "weight copies": width * matrices if width < FLOAT32 else 0,  # autocast makes them
        "gradients": weights // shards,
        "DDP buckets": weights if sharding == "ddp" else 0,  # beside earlier micro-steps' gradients
        "optimizer state": moments // shards,
    }
    if sharding == "zero1":  # all is whole until the update's last backward pass
        parts["weight copies"] += weights
        parts["gradients"] += weights
    if sharding == "fsdp":  # the embeddings, this block and the next; its gradient and its buffer
        parts["weight copies"] += FLOAT32 * (N - blocks + 4 * blocks // model.config.n_layer)
    return parts


def fit_batch_size(
    model: GPT, config: TrainConfig, world: World, dtype: torch.dtype, before: int = 0
) -> int:
    """The micro-batch: as asked, as before a resume, or the largest that fits on every process.

    On a GPU it tries sizes. It estimates on a CPU, where the system would kill the process, and for
    a sharded model, whose other processes would wait for one that failed.
    """
    sequences = config.total_batch_size // config.sequence_length // world.size
    B = config.batch_size or before
    if B and sequences % B == 0:
        return B
    device = world.device.type
    if device == "cuda" and not is_sharded(model):
        world.warm_up_nccl()
        total = torch.cuda.get_device_properties(world.device).total_memory

        def fits_here(B: int) -> bool:
            needed = estimate_memory(model, config, B, dtype.itemsize, device)
            # what surely fails would compile for a minute; but estimates may be a fifth too high,
            # with checkpointing two fifths
            most = 1.5 if config.activation_checkpointing else 1.2
            if world.any(sum(needed.values()) > most * total):
                return False
            return not world.any(runs_out_of_memory(model, config, B, world, dtype))

        B = largest_batch(sequences, fits_here)
        if B == 1 and not fits_here(1):  # else the first evaluation would take minutes before that
            raise UserError(explain_out_of_memory(1, config))
        torch.cuda.reset_peak_memory_stats()
        return B
    free = FILL.get(device, 0.5) * free_memory(world.device, world.local_size)

    def fits(B: int) -> bool:
        parts = estimate_memory(model, config, B, dtype.itemsize, device, world.shard_group_size)
        needed = sum(parts.values()) - parts["weights"]  # the weights are there already
        return not world.any(needed > free)

    return largest_batch(sequences, fits)


def largest_batch(sequences: int, fits: Callable[[int], bool]) -> int:
    """The largest power of two up to 64 that divides this many sequences and fits; at least 1."""
    B = math.gcd(64, sequences)
    while B > 1 and not fits(B):
        B //= 2
    return B


def room_on_gpu(total: float, weights: float, sharding: str) -> float:
    """The bytes that fit_batch_size lets a step fill on a GPU of `total` bytes."""
    if sharding != "ddp":
        return weights + FILL["cuda"] * (total - weights)
    return (1 - HEADROOM) * total


def runs_out_of_memory(
    model: GPT, config: TrainConfig, B: int, world: World, dtype: torch.dtype
) -> bool:
    """Whether a micro-batch of B sequences is too large for this GPU."""
    parts = state_memory(model, config, dtype.itemsize, world.shard_group_size)
    total = torch.cuda.get_device_properties(world.device).total_memory
    # the trial sets aside what training needs, too
    beside = parts["optimizer state"] + parts["DDP buckets"] + round(HEADROOM * total)
    try:
        held = torch.empty(beside, dtype=torch.uint8, device=world.device)
        x = torch.zeros(B, config.sequence_length, dtype=torch.int64, device=world.device)
        for _ in range(2):  # the second micro-step starts with the gradients of the first
            with autocast(world.device, dtype):
                _, loss = model(x, x)
            loss.backward()
        del held
        return False
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return True
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def refuse_too_large(make: Callable[[], GPT], processes: int) -> None:
    """Raises UserError if the CPU's memory cannot hold the weights of make() in every process."""
    with torch.device("meta"):
        model = make()
    need = sum(p.nbytes for p in model.parameters())
    if need > (free := free_memory(torch.device("cpu"), processes)):
        size = f"n_layer {model.config.n_layer} and n_embd {model.config.n_embd}"
        problem = f"the weights of {size} need {need:,} bytes, but each process has only {free:,}"
        raise UserError(f"{problem}: choose a smaller model")


@contextmanager
def explaining_memory(config: TrainConfig, batch_size: int = 0) -> Iterator[None]:
    """Raises UserError, with what to do, if a GPU's memory does not suffice inside."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(explain_out_of_memory(batch_size, config)) from None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch, CUDA, Triton or cuBLAS had no GPU memory left."""
    # on a MIG slice, PyTorch's own report fails instead, by NVML (pytorch/pytorch#112377)
    names = "out of memory|CUBLAS_STATUS_ALLOC_FAILED|NVML_SUCCESS"
    return isinstance(error, torch.OutOfMemoryError) or re.search(names, str(error)) is not None


def explain_out_of_memory(batch_size: int, config: TrainConfig) -> str:
    """What to do when a GPU has no room for a micro-batch; 0: no room even for the model."""
    if batch_size == 0:
        problem = "out of GPU memory before the first step: is another program using this GPU?"
        return f"{problem} --sharding fsdp shares the model among several GPUs"
    advice = "--sharding fsdp, on several GPUs"
    if batch_size > 1:
        smaller = max(B for B in range(1, batch_size) if batch_size % B == 0)
        advice = f"--batch-size {smaller}"  # it divides an update, too
    elif not config.activation_checkpointing:
        advice = "--activation-checkpointing"
    problem = f"out of GPU memory with a micro-batch of {batch_size}"
    return f"{problem}: add {advice}; the run is the same"

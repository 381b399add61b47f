"""How much memory a training process needs, and the largest micro-batch that fits.

plan.py prints the estimate before a run. Training uses it where it cannot try a micro-batch out.
"""

import math
import re
from collections.abc import Callable

import torch

from support.common import UserError
from support.device import autocast, free_memory
from support.tokenizer import VOCAB_SIZE

FLOAT32 = 4  # bytes
HEADROOM = 0.03  # of a GPU's memory: its allocator cannot fill every hole
# The part of the free memory that an estimate may fill. On a GPU, the rest is for an error of 15%
# and HEADROOM. On a CPU, it is for other programs and for holes in the heap, a third of a small
# model's peak (device.keep_freed_memory).
FILL = {"cpu": 0.5, "cuda": 0.8}


def loss_rows(device: str) -> int:
    """How many rows of logits model.LinearCrossEntropy computes at a time on this device type."""
    return 2048 if device == "cpu" else 8192


# -- the estimate


def estimate_memory(
    shape, config, B: int, width: int, device: str, processes: int = 1
) -> dict[str, int]:
    """Bytes that each process holds at the fullest moment of an eager step, by part.

    That moment is the start of the last micro-step's backward pass. shape: a GPTConfig. config: a
    TrainConfig. B sequences; matmuls of numbers of `width` bytes (4 in float32, else 2).
    tests/test_plan.py compares the estimate with fake tensors and with a real peak. Nobody has
    measured yet what fsdp gathers.
    """
    C = shape.n_embd
    V = shape.padded_vocab_size
    tokens = B * config.sequence_length
    residual = FLOAT32 * C * tokens
    cast = width * C * tokens
    # Kept for a block: the residual stream before attention and before the MLP; for matmuls and
    # attention both layer norms' outputs, q, k, v, attention's output, 4·C before and after GELU.
    block = 2 * residual + (1 + 1 + 3 + 1 + 4 + 4) * cast
    last = 2 * residual  # around the last layer norm
    rows = min(tokens, loss_rows(device))
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
    activations = shape.n_layer * kept + last
    state = state_memory(shape, config, width, processes)
    return state | {"activations": activations, "loss": loss}


def state_memory(shape, config, width: int, processes: int = 1) -> dict[str, int]:
    """The parts that do not depend on the micro-batch."""
    C = shape.n_embd
    embedding = shape.padded_vocab_size * C
    matrices = 12 * C**2 * shape.n_layer
    blocks = matrices + 13 * C * shape.n_layer
    N = embedding + shape.block_size * C + blocks + 2 * C
    weights = FLOAT32 * N
    copies = width * matrices if width < FLOAT32 else 0  # autocast makes them
    buckets = 0
    moments = 2 * FLOAT32 * N
    if config.optimizer == "muon":  # one moment for each matrix of a block
        moments -= FLOAT32 * matrices
    gradients = weights
    if processes > 1 and config.sharding == "ddp":
        buckets = weights  # DDP holds them beside the gradients of the earlier micro-steps
    elif processes > 1:
        moments //= processes
        weights //= processes
        gradients //= processes
        if config.sharding == "zero1":  # all is whole until the update's last backward pass
            copies += FLOAT32 * N
            gradients += FLOAT32 * N
        else:  # the embeddings, this block and the next; a block's gradient, and its buffer
            copies += FLOAT32 * (N - blocks + 4 * blocks // shape.n_layer)
    return {
        "weights": weights,
        "weight copies": copies,
        "gradients": gradients,
        "DDP buckets": buckets,
        "moments": moments,
    }


# -- the micro-batch


def fit_batch_size(raw, config, world, dtype: torch.dtype) -> int:
    """The largest micro-batch that fits, the same on every process of `world` (a World).

    On a GPU it tries sizes. On a CPU and for a divided model it uses the estimate: on a CPU, the
    system would kill the process; and the others would wait for one that failed to gather weights.
    """
    tries = world.device.type == "cuda" and not world.divides

    def fits(B: int) -> bool:
        if tries:
            return not world.any(runs_out_of_memory(raw, config, B, world, dtype))
        device = world.device.type
        parts = estimate_memory(raw.config, config, B, dtype.itemsize, device, world.shards)
        need = sum(parts.values()) - parts["weights"]  # the weights are there already
        free = free_memory(world.device) or 4 * 2**30
        return not world.any(need > FILL.get(device, 0.5) * free)

    if tries:
        world.warm_up()
    B = largest_batch(config.total_batch_size // config.sequence_length // world.size, fits)
    if tries:
        torch.cuda.reset_peak_memory_stats()
    return B


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


def runs_out_of_memory(raw, config, B: int, world, dtype: torch.dtype) -> bool:
    """Whether a micro-batch of B sequences is too large for this GPU.

    Training also needs moments, buckets and HEADROOM, so the trial holds as much memory as these.
    """
    parts = state_memory(raw.config, config, dtype.itemsize, world.shards)
    total = torch.cuda.get_device_properties(world.device).total_memory
    beside = parts["moments"] + parts["DDP buckets"] + round(HEADROOM * total)
    try:
        held = torch.empty(beside, dtype=torch.uint8, device=world.device)
        x = torch.zeros(B, config.sequence_length, dtype=torch.int64, device=world.device)
        for _ in range(2):  # the second micro-step starts with the gradients of the first
            with autocast(world.device, dtype):
                _, loss = raw(x, x)
            loss.backward()
        del held
        return False
    except RuntimeError as error:  # from PyTorch, CUDA or Triton
        if not re.search("out of memory|CUBLAS_STATUS_ALLOC_FAILED", str(error)):
            raise
        return True
    finally:
        raw.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def refuse_too_large(shape: dict) -> None:
    """Raises UserError if this machine has no room for the weights of a model of this shape."""
    L = shape["n_layer"]
    C = shape["n_embd"]
    rows = shape["block_size"] + shape.get("vocab_size", VOCAB_SIZE)
    need = FLOAT32 * (12 * L * C**2 + rows * C)
    free = free_memory(torch.device("cpu"))  # where a model is made first
    if free is not None and need > free:
        raise UserError(
            f"the weights of n_layer {L} and n_embd {C} need {need:,} bytes in each process, and "
            f"{free:,} are free for each on this machine: choose a smaller model"
        )


def explain_out_of_memory(batch_size: int, config) -> str:
    """What to do when a GPU has no room for a micro-batch; 0: no room even for the model."""
    if batch_size == 0:
        return (
            "out of GPU memory before the first step: is another program using this GPU? "
            "--sharding fsdp divides the model among several GPUs"
        )
    less = "--sharding fsdp, on several GPUs"
    if batch_size > 1:
        less = f"--batch-size {batch_size // 2}"
    elif not config.activation_checkpointing:
        less = "--activation-checkpointing"
    return (
        f"out of GPU memory with a micro-batch of {batch_size}: add {less}; the run stays the same"
    )

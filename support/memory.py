"""How much memory a process of a training run needs. Arithmetic alone: no device, no torch.

plan.py prints it before a run, and fitting.py takes it where a micro-batch cannot be tried.
"""

import math
from collections.abc import Callable

HEADROOM = 0.03  # of a GPU's memory: its allocator cannot fill every hole
# The part of the free memory that an estimate may fill. On a GPU it leaves room for an error of
# 15% and for the headroom; on a CPU for other programs and for the holes of the heap, which were a
# third of the peak of a small model (device.keep_freed_memory).
FILL = {"cpu": 0.5, "cuda": 0.8}
LOSS_ROWS = {"cpu": 2048}  # of logits, by device: see loss_rows
LOSS_ROWS_ELSEWHERE = 8192
FLOAT32 = 4  # bytes


def loss_rows(device: str) -> int:
    """How many rows of logits model.LinearCrossEntropy has at a time, on a device of this type."""
    return LOSS_ROWS.get(device, LOSS_ROWS_ELSEWHERE)


def largest_batch(sequences: int, fits: Callable[[int], bool]) -> int:
    """The largest power of two up to 64 that divides this many sequences and fits; at least 1."""
    B = math.gcd(64, sequences)
    while B > 1 and not fits(B):
        B //= 2
    return B


def room_beside_weights(free: float, device: str) -> float:
    """Bytes that may be taken of those that are free once the weights are there, by estimate."""
    return FILL.get(device, 0.5) * free


def room_on_gpu(total: float, weights: float, sharding: str) -> float:
    """Bytes of a GPU that a step may take, as fit_batch_size sees it: weights and all the rest."""
    if sharding == "fsdp":  # estimated
        return weights + room_beside_weights(total - weights, "cuda")
    return (1 - HEADROOM) * total


def estimate_memory(
    shape,
    *,
    B: int,
    T: int,
    width: int,
    device: str,
    sharding: str = "ddp",
    processes: int = 1,
    muon: bool = False,
) -> dict[str, int]:
    """Bytes that one process holds when a step needs the most, by part.

    That is when the backward pass of the last micro-step begins. shape: a GPTConfig. B sequences
    of T tokens, matmuls in values of `width` bytes (4 in float32, else 2), on a device of this
    type. The step is taken as it is written; compiled it needs less. tests/test_plan.py holds this
    against fake tensors and a real peak; what fsdp gathers has been compared with nothing yet.
    """
    parts = state_memory(
        shape,
        width=width,
        sharding=sharding,
        processes=processes,
        muon=muon,
    )
    return parts | batch_memory(shape, B * T, width=width, device=device)


def state_memory(shape, *, width: int, sharding: str, processes: int, muon: bool) -> dict[str, int]:
    """What does not depend on the micro-batch: weights, their copies, gradients, moments."""
    C = shape.n_embd
    embedding = shape.padded_vocab_size * C
    block = 12 * C**2 + 13 * C
    matrices = 12 * C**2 * shape.n_layer
    N = embedding + shape.block_size * C + block * shape.n_layer + 2 * C
    weights = FLOAT32 * N
    moments = 2 * FLOAT32 * N
    if muon:  # one moment for each matrix of a block
        moments -= FLOAT32 * matrices
    casts = width * matrices if width < FLOAT32 else 0  # which autocast makes
    if sharding == "fsdp":
        # Gathered are the embeddings, and the block at work and the next, each in a buffer too.
        gathered = FLOAT32 * (N - block * shape.n_layer + 4 * block)
        return {
            "weights": weights // processes,
            "copies": gathered + casts,
            "gradients": weights // processes,
            "buckets": 0,
            "moments": moments // processes,
        }
    if sharding == "zero1":  # whole tensors are dealt out, and the embedding is the largest
        moments = max(moments // processes, 2 * FLOAT32 * embedding)
    return {
        "weights": weights,
        "copies": casts,
        "gradients": weights,
        # DDP averages in buckets; until the last micro-step the gradients are beside them
        "buckets": weights if processes > 1 else 0,
        "moments": moments,
    }


def batch_memory(shape, tokens: int, *, width: int, device: str) -> dict[str, int]:
    """What the micro-batch needs: its activations, and the loss beside them."""
    C = shape.n_embd
    residual = FLOAT32 * C * tokens
    cast = width * C * tokens
    # The residual stream before attention and before the MLP; and for matmuls and attention both
    # layer norms' outputs, q, k, v, attention's output, and the MLP's 4·C before and after GELU.
    block = 2 * residual + (1 + 1 + 3 + 1 + 4 + 4) * cast
    last = 2 * residual  # around the last layer norm
    if width < FLOAT32:
        last += cast  # for the loss
    loss = loss_memory(shape, tokens, width=width, device=device)
    if not shape.activation_checkpointing:
        return {"activations": shape.n_layer * block + last, "loss": loss}
    # a block is recomputed when the loss is gone
    return {"activations": shape.n_layer * residual + last, "loss": max(loss, block)}


def loss_memory(shape, tokens: int, *, width: int, device: str) -> int:
    """What LinearCrossEntropy holds besides its input."""
    embedding = shape.padded_vocab_size * shape.n_embd
    gradients = FLOAT32 * embedding + width * shape.n_embd * tokens
    casts = width * embedding if width < FLOAT32 else 0
    rows = loss_rows(device)
    tensors = 2  # logits in float32, and what logsumexp makes of them
    if tokens > rows:
        tensors = 3  # the rows before are still there
    logits = tensors * FLOAT32 * min(tokens, rows) * shape.padded_vocab_size
    return logits + gradients + casts

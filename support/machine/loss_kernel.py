"""The loss' softmax in one Triton kernel of two passes, with GPT2_LOSS_KERNEL=1 on a GPU.

The compiler's kernel makes three, and computes more for each logit. No GPU has compared them yet:
tests/ab.py does. Imported where it is asked for: PyTorch for CPUs comes without Triton.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits that a row's program reads at a time
LOG2E = tl.constexpr(math.log2(math.e))  # exp2 is one instruction


@triton.jit
def kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    vocab_size,
    row_length,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_length
    columns = tl.arange(0, BLOCK)
    largest = -1e30
    total = 0.0  # of exp2(x - largest)
    for start in range(0, vocab_size, BLOCK):
        at = start + columns
        x = tl.load(logits + at, at < vocab_size, other=-float("inf")).to(tl.float32) * LOG2E
        higher = tl.maximum(largest, tl.max(x))
        total = total * tl.exp2(largest - higher) + tl.sum(tl.exp2(x - higher))
        largest = higher
    lse = largest + tl.log2(total)
    target = tl.load(targets + row)
    correct = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(target >= 0, lse / LOG2E - correct, 0.0))
    if GRADIENT:
        tl.debug_barrier()  # all threads have read `correct`
        for start in range(0, row_length, BLOCK):
            at = start + columns
            x = tl.load(logits + at, at < vocab_size, other=-float("inf")).to(tl.float32)
            p = tl.exp2(x * LOG2E - lse)
            tl.store(logits + at, p - (at == target).to(tl.float32), at < row_length)


@torch.library.triton_op("gpt2::row_losses", mutates_args={"logits"})
def row_losses(logits: Tensor, targets: Tensor, vocab_size: int, gradient: bool) -> Tensor:
    """Each row's loss, (rows,) float32. gradient: the logits become those of the losses.

    logits (rows, padded V), targets (rows,) where -1 is ignored.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    torch.library.wrap_triton(kernel)[(len(logits),)](
        logits, targets, losses, vocab_size, logits.size(1), gradient, BLOCK, num_warps=8
    )
    return losses

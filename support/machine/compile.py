"""What runs compiled: the blocks and the loss, in place, with our code for two operators; and
whether this machine can compile.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._functorch import config as functorch_config

from support.machine import attention

if TYPE_CHECKING:
    from model import GPT


def why_not_compile(device: torch.device) -> str:
    """Why torch.compile does not work here; empty if it does."""
    if device.type == "mps":
        return "torch.compile is not reliable on MPS"
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
        return ""
    except Exception as error:  # no compiler, no Triton, an unsupported Python, …
        own, _, _ = str(error).partition("\nSet TORCH")  # below it, PyTorch says how to see more
        lines = own.strip().splitlines()
        reason = ([line for line in lines if "error:" in line] or lines or [""])[-1]  # a compiler's
        return f"torch.compile does not work here: {type(error).__name__}: {reason.strip()[:300]}"


def compile_model(model: GPT, device: torch.device, asked: bool) -> str:
    """Compiles the model, if asked and possible -> how it runs, in words."""
    if problem := why_not_compile(device) if asked else "--no-compile":
        return f"not compiled ({problem})"
    compile_blocks(model, recompute=device.type == "cpu")
    return "compiled"


def compile_blocks(model: GPT, recompute: bool) -> None:
    """Compiles the blocks and the loss of a GPT in place, so parameters keep their names.

    All blocks share their code, so 48 layers compile as fast as 12. The embedding stays eager:
    inductor would scatter its gradient with atomics, slowly and differently in each run.
    """
    replace_operators()
    # else the compiler may keep GELU, layer norms and casts of the weights for the backward pass
    functorch_config.ban_recompute_used_far_apart = not recompute
    functorch_config.ban_recompute_long_fusible_chains = not recompute
    functorch_config.ban_recompute_materialized_backward = not recompute
    torch._dynamo.config.recompile_limit = 64  # micro-batches that are tried, validation, …
    torch._dynamo.config.optimize_ddp = False  # it would split blocks, but only those inside DDP
    for block in model.transformer.h:
        block.forward = torch.compile(block.forward, dynamic=False)
    if os.environ.get("GPT2_LOSS_KERNEL") == "1" and model.lm_head.weight.is_cuda:
        from support.machine.loss_kernel import row_losses

        model.loss_kernel = row_losses
    model.loss = torch.compile(model.loss, dynamic=False)  # type: ignore[method-assign]


def replace_operators() -> None:
    """Makes the compiler use our GELU (tanh form), and on a CPU our gradient of attention."""
    from torch._inductor.decomposition import select_decomp_table

    aten = torch.ops.aten
    select_decomp_table().update(
        {
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention.backward,
            aten.gelu.default: gelu,
            aten.gelu_backward.default: gelu_backward,
        }
    )
    # the compiler's caches would not notice another version of these files
    code = b"".join(Path(file).read_bytes() for file in (__file__, attention.__file__))
    torch.compiler.config.cache_key_tag = hashlib.sha256(code).hexdigest()


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x (1 + tanh u) / 2 as x sigmoid(2u), since an exp takes half as long as a tanh. u: below."""
    if approximate != "tanh":
        return decomposition_table[torch.ops.aten.gelu.default](x, approximate=approximate)
    wide, s = sigmoid_2u(x)
    return (wide * s).to(x.dtype)


def gelu_backward(dy: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """With s = sigmoid(2u), x s has the derivative s + x s (1 - s) 2u'."""
    if approximate != "tanh":
        return decomposition_table[torch.ops.aten.gelu_backward.default](
            dy, x, approximate=approximate
        )
    wide, s = sigmoid_2u(x)
    slope = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * wide * wide)
    return (dy * (s + wide * s * (1 - s) * slope)).to(x.dtype)


def sigmoid_2u(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in 32 bits at least, and sigmoid(2u) with u = √(2/π) (x + 0.044715 x³)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x, torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))

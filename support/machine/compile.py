"""What runs compiled: the blocks and the loss, in place; and whether this machine can compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._functorch import config as functorch_config

from support.machine.attention import replace_attention_backward

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
    replace_attention_backward()
    # else the compiler may keep GELU, layer norms and casts of the weights for the backward pass
    functorch_config.ban_recompute_used_far_apart = not recompute
    functorch_config.ban_recompute_long_fusible_chains = not recompute
    functorch_config.ban_recompute_materialized_backward = not recompute
    torch._dynamo.config.recompile_limit = 64  # micro-batches that are tried, validation, …
    torch._dynamo.config.optimize_ddp = False  # it would split blocks, but only those inside DDP
    for block in model.transformer.h:
        block.forward = torch.compile(block.forward, dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)  # type: ignore[method-assign]

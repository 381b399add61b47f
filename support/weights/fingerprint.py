"""Is this code a GPT-2? A tiny model of it is compared with the plain GPT-2 below."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from support.base.errors import first_line

if TYPE_CHECKING:
    from model import GPT, GPTConfig

EMBEDDING = "transformer.wte.weight"  # names of tensors
POSITIONS = "transformer.wpe.weight"
CLOSE = 1e-4  # standard deviations of the logits; rounding makes 2e-6, exact GELU 1e-3
LARGE = 100.0  # how many times larger a trained model's logits are than the made-up one's


@dataclass
class Fingerprint:
    difference: str  # how some code differs from GPT-2; empty if it does not
    logits: list[float]  # its tiny model's, to tell changed models apart; empty if it fails
    loss: float  # the same


# Without oneDNN, torch.set_float32_matmul_precision changes nothing here.
@torch.backends.mkldnn.flags(enabled=False, allow_tf32=None, fp32_precision=None)
@torch.autocast("cpu", enabled=False)
@torch.random.fork_rng(devices=[])
@torch.no_grad()
def take_fingerprint(model: GPT) -> Fingerprint:
    """Compares a model's tensors with GPT-2's, and what a tiny model of its class computes."""
    config = replace(model.config, vocab_size=61, n_layer=2, n_head=2, n_embd=32)
    try:
        with torch.device("cpu"):
            idx = numbers("idx", 1, config.block_size).abs().mul(config.vocab_size - 1).long()
            targets = idx.flip(1)
            targets[:, 1::3] = -1  # a third is ignored
            tiny = type(model)(config).float().eval()
            for name, p in tiny.named_parameters():
                p.copy_(made_up(name, *p.shape))
            logits = tiny(idx)[0]
            # the loss is of logits as large as a trained model's, where a cap would show
            for name, p in tiny.named_parameters():
                if name.startswith("transformer.ln_f."):  # the logits are linear in these
                    p.mul_(LARGE)
            loss = tiny(idx, targets)[1].item()
            own_loss = F.cross_entropy(tiny(idx)[0][0], targets[0], ignore_index=-1).item()
            if not (logits.isfinite().all() and math.isfinite(loss)):
                raise ValueError("its logits or its loss are not finite")
            expected = gpt2(made_up, idx, config)
            expected_loss = F.cross_entropy(LARGE * expected[0], targets[0], ignore_index=-1).item()
            difference = other_tensor(model) or other_output(logits, loss, expected, expected_loss)
            rounding = CLOSE * LARGE * expected.std()
            if abs(loss - expected_loss) <= rounding < abs(loss - own_loss):  # a change in vain
                parts = [difference, "its loss is not the cross-entropy of its logits"]
                difference = "; ".join(filter(None, parts))
    except Exception as error:  # changed code may raise anything
        return Fingerprint(f"a tiny model cannot be compared: {first_line(error)}", [], 0.0)
    return Fingerprint(difference, logits.flatten()[:: max(1, logits.numel() // 64)].tolist(), loss)


def numbers(name: str, *shape: int) -> Tensor:
    """Numbers between -1 and 1 that depend on the name alone, the same in every version."""
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    return torch.from_numpy((bits >> 11) * 2.0**-52 - 1).float().view(shape)


def made_up(name: str, *shape: int) -> Tensor:
    """Values for a parameter. Small embeddings make the layer norm's epsilon matter."""
    values = 0.3 * numbers(name, *shape)
    if name in (EMBEDDING, POSITIONS):
        return values * 0.1
    if len(shape) == 1 and not name.endswith("bias"):
        return values + 1
    return values


def gpt2(take: Callable[..., Tensor], idx: Tensor, config: GPTConfig) -> Tensor:
    """GPT-2 with the parameters take(name, *shape): idx (B, T) -> logits (B, T, V)."""
    C = config.n_embd

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (C,), take(f"{name}.weight", C), take(f"{name}.bias", C))

    def linear(x: Tensor, name: str, width: int) -> Tensor:
        return F.linear(x, take(f"{name}.weight", width, x.size(-1)), take(f"{name}.bias", width))

    wte = take(EMBEDDING, config.padded_vocab_size, C)
    x = wte[idx] + take(POSITIONS, config.block_size, C)[: idx.size(1)]
    for i in range(config.n_layer):
        block = f"transformer.h.{i}"
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn", 3 * C)
        q, k, v = qkv.unflatten(2, (3, config.n_head, -1)).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{block}.attn.c_proj", C)
        h = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc", 4 * C)
        x = x + linear(F.gelu(h, approximate="tanh"), f"{block}.mlp.c_proj", C)
    return norm(x, "transformer.ln_f") @ wte[: config.vocab_size].t()


def other_tensor(model: GPT) -> str:
    """The first tensor that is not GPT-2's, in words; empty if all are."""
    expected: dict[str, tuple] = {}

    def take(name: str, *shape: int) -> Tensor:
        expected[name] = shape
        return torch.empty(shape, device="meta")

    gpt2(take, torch.zeros(1, 1, dtype=torch.long, device="meta"), model.config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name in sorted(expected | shapes):
        here = shapes.get(name, "missing")
        there = expected.get(name, "missing")
        if here != there:
            return f"tensor {name} is {here} here, and {there} in GPT-2"
    return ""


def other_output(logits: Tensor, loss: float, expected: Tensor, expected_loss: float) -> str:
    """How the logits or the loss differ, in words; empty if only by rounding."""
    if logits.shape != expected.shape:
        return f"its logits have shape {tuple(logits.shape)}, not {tuple(expected.shape)}"
    change = (logits - expected).abs().max() / expected.std()
    if change > CLOSE:
        return f"its logits differ by {change:.2g} standard deviations"
    # where no logit changes by more than d, cross-entropy changes by at most 2·d: the same unit
    change = abs(loss - expected_loss) / (LARGE * expected.std())
    return f"its loss differs by {change:.2g} standard deviations" if change > CLOSE else ""

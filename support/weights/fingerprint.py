"""Is this code a GPT-2? Two small models of it are compared with the plain GPT-2 below.

One has the model's depth, the other its width: code may treat some layers or sizes in another way.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

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
PERIOD = 262139  # after so many, a prime, made-up numbers repeat: an XL has 30 million in a block
MOST_LAYERS = 12  # that are compared: an XL's 48 would take seconds
EARLIER = [dict(n_layer=2, n_head=2, n_embd=32)]  # the small model of older checkpoints


@dataclass
class Fingerprint:
    difference: str  # how some code differs from GPT-2; empty if it does not
    logits: list[float]  # its small models', to tell changed models apart; none of one that fails
    loss: float  # the sum of theirs
    shapes: list[dict[str, Any]]  # in what each small model differs from the model's own config


# Without oneDNN, torch.set_float32_matmul_precision changes nothing here.
@torch.backends.mkldnn.flags(enabled=False, allow_tf32=None, fp32_precision=None)
@torch.autocast("cpu", enabled=False)
@torch.random.fork_rng(devices=[])
@torch.no_grad()
def take_fingerprint(model: GPT, shapes: list[dict[str, Any]] | None = None) -> Fingerprint:
    """Compares a model's tensors with GPT-2's, and what small models of its class compute."""
    own = model.config
    shapes = shapes or [
        dict(n_layer=min(own.n_layer, MOST_LAYERS), n_head=2, n_embd=32),
        dict(n_layer=1, block_size=min(own.block_size, 48)),
    ]
    tensors = {name: model.without_padding(name, p) for name, p in model.named_parameters()}
    difference = other_tensor(tensors, own)
    in_vain = ""
    logits: list[float] = []
    loss = 0.0
    for shape in shapes:
        try:
            with torch.device("cpu"):
                config = replace(own, vocab_size=61, **shape)
                other, vain, its_logits, its_loss = compare(type(model), config)
        except Exception as error:  # changed code may raise anything
            difference = difference or f"a small model cannot be compared: {first_line(error)}"
            continue
        difference = difference or other
        in_vain = in_vain or vain
        logits += its_logits.flatten()[:: max(1, its_logits.numel() // 64)].tolist()
        loss += its_loss
    return Fingerprint("; ".join(filter(None, [difference, in_vain])), logits, loss, shapes)


def compare(make: Callable[[Any], GPT], config: GPTConfig) -> tuple[str, str, Tensor, float]:
    """How a model of this config differs, what is wrong with its loss; its logits and its loss."""
    idx = numbers("idx", 1, config.block_size).abs().mul(config.vocab_size - 1).long()
    targets = idx.flip(1)
    targets[:, 1::3] = -1  # a third is ignored
    values = cache(made_up)
    small = make(config).float().eval()
    for name, p in small.named_parameters():
        p.copy_(values(name, *p.shape))
    logits = small(idx)[0]
    # the loss is of logits as large as a trained model's, where a cap would show
    for name, p in small.named_parameters():
        if name.startswith("transformer.ln_f."):  # the logits are linear in these
            p.mul_(LARGE)
    loss = small(idx, targets)[1].item()
    own_loss = F.cross_entropy(small(idx)[0][0], targets[0], ignore_index=-1).item()
    if not (logits.isfinite().all() and math.isfinite(loss)):
        raise ValueError("its logits or its loss are not finite")
    expected = gpt2(values, idx, config)
    expected_loss = F.cross_entropy(LARGE * expected[0], targets[0], ignore_index=-1).item()
    difference = other_output(logits, loss, expected, expected_loss)
    rounding = CLOSE * LARGE * expected.std()
    in_vain = ""
    if abs(loss - expected_loss) <= rounding < abs(loss - own_loss):
        in_vain = "its loss is not the cross-entropy of its logits"
    return difference, in_vain, logits, loss


def numbers(name: str, *shape: int) -> Tensor:
    """Numbers between -1 and 1 that depend on the name alone, the same in every version."""
    n = math.prod(shape)
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(min(n, PERIOD))
    return torch.from_numpy(np.resize(np.float32((bits >> 11) * 2.0**-52 - 1), n)).view(shape)


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


def other_tensor(tensors: dict[str, Tensor], config: GPTConfig) -> str:
    """The first tensor that is not GPT-2's, in words; empty if all are. tensors: no padding."""
    expected: dict[str, tuple] = {}

    def take(name: str, *shape: int) -> Tensor:
        expected[name] = shape
        return torch.empty(shape, device="meta")

    one_token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    gpt2(take, one_token, replace(config, n_layer=1, pad_vocab_to=1))  # all blocks are alike
    for name, shape in list(expected.items()):
        for i in range(config.n_layer):
            expected[name.replace(".h.0.", f".h.{i}.")] = shape
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
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

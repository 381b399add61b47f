"""Is this code a GPT-2? A tiny model of it is compared with the plain GPT-2 below."""

import math
import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from support.common import first_line

EMBEDDING = "transformer.wte.weight"
HEAD = "lm_head.weight"  # tied to the embedding
POSITIONS = "transformer.wpe.weight"
CLOSE = 1e-4  # standard deviations of the logits; rounding makes 2e-6, exact GELU 1e-3
TINY = dict(vocab_size=61, n_layer=2, n_head=2, n_embd=32)


@dataclass
class Fingerprint:
    difference: str  # how it differs from GPT-2; empty if it does not
    logits: list[float]  # the tiny model's, to tell changed models apart; empty if it fails


# Without oneDNN, torch.set_float32_matmul_precision changes nothing here.
@torch.backends.mkldnn.flags(enabled=False, allow_tf32=None, fp32_precision=None)
@torch.autocast("cpu", enabled=False)
@torch.random.fork_rng(devices=[])
@torch.no_grad()
def take_fingerprint(make, model) -> Fingerprint:
    """Compares a model's tensors with GPT-2's, and the logits of a tiny model that `make` makes."""
    small = replace(model.config, **TINY)
    try:
        with torch.device("cpu"):
            tiny = make(small).float().eval()
            for name, p in tiny.named_parameters():
                p.copy_(made_up(name, *p.shape))
            idx = numbers("idx", 1, small.block_size).abs().mul(small.vocab_size - 1).long()
            logits = tiny(idx)[0]
            if not logits.isfinite().all():
                raise ValueError("its logits are not finite")
            difference = other_tensor(model) or other_logits(logits, gpt2(made_up, idx, small))
    except Exception as error:  # changed code may raise anything
        return Fingerprint(f"a tiny model cannot be compared: {first_line(error)}", [])
    return Fingerprint(difference, logits.flatten()[:: max(1, logits.numel() // 64)].tolist())


def numbers(name: str, *shape: int) -> torch.Tensor:
    """Numbers between -1 and 1 that depend on the name alone, the same in every version."""
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    return torch.from_numpy((bits >> 11) * 2.0**-52 - 1).float().view(shape)


def made_up(name: str, *shape: int) -> torch.Tensor:
    """Values for a parameter. Small embeddings make the layer norm's epsilon matter."""
    values = 0.3 * numbers(name, *shape)
    if name in (EMBEDDING, POSITIONS):
        return values * 0.1
    if len(shape) == 1 and not name.endswith("bias"):
        return values + 1
    return values


def gpt2(take, idx, config) -> torch.Tensor:
    """GPT-2 with the parameters take(name, *shape): idx (B, T) -> logits (B, T, V)."""
    C = config.n_embd

    def norm(x, name):
        return F.layer_norm(x, (C,), take(f"{name}.weight", C), take(f"{name}.bias", C))

    def linear(x, name, width):
        return F.linear(x, take(f"{name}.weight", width, x.size(-1)), take(f"{name}.bias", width))

    B, T = idx.shape
    wte = take(EMBEDDING, config.padded_vocab_size, C)
    x = wte[idx] + take(POSITIONS, config.block_size, C)[:T]
    for i in range(config.n_layer):
        block = f"transformer.h.{i}"
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn", 3 * C)
        q, k, v = qkv.view(B, T, 3, config.n_head, -1).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{block}.attn.c_proj", C)
        h = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc", 4 * C)
        h = h / 2 * (1 + (math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)).tanh())
        x = x + linear(h, f"{block}.mlp.c_proj", C)
    return norm(x, "transformer.ln_f") @ wte[: config.vocab_size].t()


def other_tensor(model) -> str:
    """The first tensor that is not GPT-2's, in words; empty if all are."""
    expected: dict[str, tuple] = {}

    def take(name, *shape):
        expected[name] = shape
        return torch.empty(shape, device="meta")

    gpt2(take, torch.zeros(1, 1, dtype=torch.long, device="meta"), model.config)
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name in sorted(expected | found):
        if name not in found:
            return f"it has no tensor {name}"
        if name not in expected:
            return f"GPT-2 has no tensor {name}"
        if found[name] != expected[name]:
            return f"{name} has shape {found[name]}, not {expected[name]}"
    return ""


def other_logits(found: torch.Tensor, expected: torch.Tensor) -> str:
    """How the logits differ, in words; empty if only by rounding."""
    if found.shape != expected.shape:
        return f"its logits have shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    difference = (found - expected).abs().max() / expected.std()
    differ = f"its logits differ by {difference:.2g} standard deviations"
    return "" if difference <= CLOSE else differ


def without_padding(name: str, w: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return w[:vocab_size] if name in (EMBEDDING, HEAD) else w

"""Is this code a GPT-2? A tiny model of it is compared with a plain GPT-2 that is written out here.

Its logits are a fingerprint, too, by which changed code is known again. This file knows no model
class: it is handed a callable that makes one.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from support.common import first_line

EMBEDDING = "transformer.wte.weight"
HEAD = "lm_head.weight"  # the same tensor
POSITIONS = "transformer.wpe.weight"
# Of the logits' standard deviation: rounding makes 2e-6, exact GELU for the tanh form 1e-3.
CLOSE = 1e-4
TINY = dict(vocab_size=61, n_layer=2, n_head=2, n_embd=32)


@dataclass
class Fingerprint:
    """What a model's code computes, as `take_fingerprint` finds out."""

    difference: str  # from GPT-2, in words; empty if there is none
    logits: list[float]  # some of a tiny model's; empty where none could be made


# -- is it a GPT-2?


def take_fingerprint(
    make: Callable, config, tensors: dict[str, tuple[int, ...]] | None = None
) -> Fingerprint:
    """What the code behind `make` computes, and how that differs from GPT-2.

    make(config) is a model: idx (B, T) -> (logits, …). Of it a tiny one is made, all fields but the
    sizes of TINY as in config, its weights, biases and norms filled with numbers that are always
    the same, and compared with a plain GPT-2 over the whole context. tensors: the sizes of the real
    model's parameters, the padding counted, which are compared, too.
    """
    small = replace(config, **TINY)
    difference = other_tensor(tensors, config) if tensors else ""
    try:
        with torch.random.fork_rng(devices=[]), plain_float32():
            tiny = make(small).float().eval()
            weights = fill(tiny.named_parameters(), small.vocab_size)
            idx = made_up("idx", (1, small.block_size)).abs().mul(small.vocab_size - 1).long()
            logits = tiny(idx)[0]
            if not logits.isfinite().all():
                raise ValueError("its logits are not finite")
            sizes = {name: tuple(p.shape) for name, p in tiny.named_parameters()}
            difference = difference or other_tensor(sizes, small)
            difference = difference or other_logits(logits, gpt2(weights, idx, small))
    except Exception as error:  # whatever code that somebody has changed may raise
        return Fingerprint(f"a tiny model cannot be compared: {first_line(error)}", [])
    picked = logits.flatten()[:: max(1, logits.numel() // 64)]
    return Fingerprint(difference, picked.tolist())


@contextmanager
def plain_float32() -> Iterator[None]:
    """Within it a CPU computes in full float32, whatever this process has set.

    oneDNN alone would obey torch.set_float32_matmul_precision, and is off.
    """
    mkldnn = torch.backends.mkldnn
    was_on, *_ = mkldnn.set_flags(_enabled=False, _fp32_precision=None)
    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            yield
    finally:
        mkldnn.set_flags(_enabled=was_on, _fp32_precision=None)


def made_up(name: str, size: tuple[int, ...]) -> torch.Tensor:
    """Numbers between -1 and 1 that depend on the name alone, the same in every version."""
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(size))
    return torch.from_numpy((bits >> 11) * 2.0**-52 - 1).float().view(size)


def fill(parameters: Iterable, vocab_size: int) -> dict[str, torch.Tensor]:
    """Gives parameters made-up values -> {name: what a GPT-2 would keep of it}.

    Nothing may hide behind a zero or a one; small embeddings show the layer norm's epsilon.
    """
    weights = {}
    for name, p in parameters:
        values = 0.3 * made_up(name, tuple(p.shape))
        if name in (EMBEDDING, POSITIONS):
            values *= 0.1
        elif p.dim() == 1 and not name.endswith("bias"):
            values += 1
        p.copy_(values)
        weights[name] = without_padding(name, p, vocab_size)
    return weights


def gpt2(weights: dict[str, torch.Tensor], idx: torch.Tensor, config) -> torch.Tensor:
    """GPT-2 once more, as plain as can be: idx (B, T) -> logits (B, T, V)."""

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x, name):
        return x @ weights[f"{name}.weight"].t() + weights[f"{name}.bias"]

    B, T = idx.shape
    x = weights[EMBEDDING][idx] + weights[POSITIONS][:T]
    for i in range(config.n_layer):
        block = f"transformer.h.{i}"
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")
        q, k, v = qkv.view(B, T, 3, config.n_head, -1).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{block}.attn.c_proj")
        h = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        h = h / 2 * (1 + (math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)).tanh())
        x = x + linear(h, f"{block}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weights[EMBEDDING].t()


def gpt2_tensors(config) -> dict[str, tuple[int, ...]]:
    """The names and sizes of a GPT-2's tensors, the padding of the embedding counted."""
    C = config.n_embd
    linear = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C)}
    linear |= {"mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    tensors: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.padded_vocab_size, C),
        POSITIONS: (config.block_size, C),
    }
    for i in range(config.n_layer):
        for name, size in linear.items():
            tensors[f"transformer.h.{i}.{name}.weight"] = size
            tensors[f"transformer.h.{i}.{name}.bias"] = size[:1]
    norms = [f"h.{i}.{name}" for i in range(config.n_layer) for name in ("ln_1", "ln_2")]
    for name in [*norms, "ln_f"]:
        tensors[f"transformer.{name}.weight"] = (C,)
        tensors[f"transformer.{name}.bias"] = (C,)
    return tensors


def other_tensor(tensors: dict[str, tuple[int, ...]], config) -> str:
    """The first tensor that is not as in GPT-2, in words; empty if all are."""
    expected = gpt2_tensors(config)
    for name in sorted(expected | tensors):
        if name not in tensors:
            return f"it has no tensor {name}"
        if name not in expected:
            return f"GPT-2 has no tensor {name}"
        if tensors[name] != expected[name]:
            return f"{name} has shape {tensors[name]}, not {expected[name]}"
    return ""


def other_logits(found: torch.Tensor, expected: torch.Tensor) -> str:
    """How far logits are from the expected ones, in words; empty if only rounding differs."""
    if found.shape != expected.shape:
        return f"its logits have shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    difference = (found - expected).abs().max() / expected.std()
    if difference <= CLOSE:
        return ""
    return f"its logits differ by {difference:.2g} standard deviations"


def without_padding(name: str, w: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The rows that are saved: of the embedding those of tokens, of anything else all."""
    return w[:vocab_size] if name in (EMBEDDING, HEAD) else w

"""Looks into a model, for the notebook: what attention looks at, what the weights have learned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from support.plots import COLORS, GREY, new_figure

if TYPE_CHECKING:
    from model import GPT


def attention_patterns(model: GPT, idx: torch.Tensor) -> np.ndarray:
    """idx (1, T) int64 -> (n_layer, nh, T, T): how much position t looks at each of 0 to t."""
    layers = []  # of each layer: queries, keys and values, (1, T, 3C)
    with torch.no_grad():
        x = model.embed(idx, torch.arange(idx.size(1)))
        for block in model.transformer.h:
            layers.append(block.attn.c_attn(block.ln_1(x)))
            x = block(x)
    qkv = torch.cat(layers).float().unflatten(-1, (3, model.config.n_head, -1))
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)  # each (n_layer, nh, T, hs)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1).cpu().numpy()


def find_previous_token_head(patterns: np.ndarray) -> tuple[int, int, float]:
    """Layer and head that look most at the token before, and their average weight on it."""
    before = patterns.diagonal(-1, axis1=2, axis2=3).mean(-1)  # (n_layer, nh)
    layer, head = divmod(int(before.argmax()), before.shape[1])
    return layer, head, float(before.max())


def plot_positions(model: GPT) -> Any:
    """Draws position embeddings: singular values, and the strongest directions along positions."""
    figure, (values, waves) = new_figure(1, 2)
    U, S, _ = np.linalg.svd(model.transformer.wpe.weight.numpy(force=True), full_matrices=False)
    values.plot(S, color=GREY)
    values.set(xlabel="direction, strongest first", ylabel="singular value")
    values.set(title="position embeddings")
    for k in range(3):
        waves.plot(U[:, k] * S[k], color=COLORS[k], label=f"direction {k}")
    waves.set(xlabel="position", ylabel="weight", title="the three strongest, along positions")
    waves.legend()
    return figure


def plot_attention(pattern: np.ndarray, tokens: list[str], title: str) -> Any:
    """Draws one head's pattern (T, T) on a text: a row's token looks at the columns' tokens."""
    figure, (axis,) = new_figure(1, 1, height=6.4)
    image = axis.imshow(pattern, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0)
    figure.colorbar(image, ax=axis, label="weight", pad=0.02)
    labels = [repr(token)[1:-1].replace("$", r"\$").replace(" ", "␣") for token in tokens]
    axis.set_xticks(range(len(tokens)), labels, rotation=90)
    axis.set_yticks(range(len(tokens)), labels)
    axis.grid(False)
    axis.set(xlabel="looked at", ylabel="looking", title=title)
    return figure

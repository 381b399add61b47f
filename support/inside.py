"""Looks into a model: what attention looks at, what the weights have learned; for the notebook."""

import math

import numpy as np

from support.plots import COLORS, GREY, label_lines, new_figure, tidy


def attention_patterns(model, idx) -> np.ndarray:
    """What the heads look at: idx (1, T) int64 -> (n_layer, nh, T, T).

    Row t of a pattern has the weights with which position t looks at positions 0 to t.
    """
    import torch

    layers = []  # of each: queries, keys and values, (1, T, 3C)

    def remember(_module, _inputs, output) -> None:
        layers.append(output)

    hooks = [block.attn.c_attn.register_forward_hook(remember) for block in model.transformer.h]
    try:
        with torch.no_grad():
            model.hidden(idx)
    finally:
        for hook in hooks:
            hook.remove()
    T = idx.size(1)
    qkv = torch.cat(layers).float().unflatten(-1, (3, model.config.n_head, -1))
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)  # each (n_layer, nh, T, hs)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    future = torch.ones(T, T, dtype=torch.bool, device=idx.device).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1).cpu().numpy()


def find_previous_token_head(patterns: np.ndarray) -> tuple[int, int, float]:
    """Layer and head that look most at the token before, and with which weight on average.

    patterns: (n_layer, nh, T, T), as attention_patterns returns them.
    """
    before = patterns.diagonal(-1, axis1=2, axis2=3).mean(-1)  # (n_layer, nh)
    layer, head = np.unravel_index(before.argmax(), before.shape)
    return int(layer), int(head), float(before.max())


def even_weight(T: int) -> float:
    """The mean weight on the token before, of a head that looks at all T tokens so far alike."""
    return float(np.mean(1 / np.arange(2, T + 1)))


def plot_positions(model, untrained):
    """What position embeddings have learned: their singular values beside an untrained model's,
    and, along the positions, the directions that stand out of these.
    """
    figure, (values, waves) = new_figure(1, 2)
    U, S, _ = np.linalg.svd(positions_of(model), full_matrices=False)
    noise = singular_values(positions_of(untrained))
    draw_spectra(values, {"this model": S}, noise)
    values.set_title("position embeddings: singular values", fontsize=10)
    labels = []
    # twice: training moves all singular values up a little, the noise with them
    strongest = min(3, int((S > 2 * noise[0]).sum()))
    for k, color in zip(range(strongest), COLORS, strict=False):
        wave = U[:, k] * S[k]
        waves.plot(wave, color=color, linewidth=1.2)
        labels.append((wave[-1], f"number {k}", color))
    waves.set(xlabel="position", ylabel="weight")
    waves.set_title(f"the {strongest} that stand out, along the positions", fontsize=10)
    tidy(waves)
    label_lines(waves, labels)
    return figure


def positions_of(model) -> np.ndarray:
    """The position embeddings, (T, C)."""
    return model.transformer.wpe.weight.detach().float().numpy()


def plot_attention_weights(model, untrained):
    """Singular values of c_attn of the first, the middle and the last layer, for queries, keys
    and values, beside those of an untrained model.
    """
    figure, axes = new_figure(1, 3, height=3.6)
    last = model.config.n_layer - 1
    [noise] = split_c_attn(untrained, [0]).values()
    layers = split_c_attn(model, sorted({0, last // 2, last}))
    for i, (axis, what) in enumerate(zip(axes, ("queries", "keys", "values"), strict=True)):
        spectra = {name: singular_values(parts[i]) for name, parts in layers.items()}
        draw_spectra(axis, spectra, singular_values(noise[i]))
        axis.set_title(f"c_attn, to {what}", fontsize=10)
    return figure


def split_c_attn(model, layers: list[int]) -> dict[str, list[np.ndarray]]:
    """{layer's name: the matrices (C, C) that make its queries, keys and values}"""
    weights = {}
    for layer in layers:
        weight = model.transformer.h[layer].attn.c_attn.weight  # (3C, C)
        weights[f"layer {layer}"] = np.split(weight.detach().float().numpy(), 3)
    return weights


def singular_values(matrix: np.ndarray) -> np.ndarray:
    return np.linalg.svd(matrix, compute_uv=False)


def draw_spectra(axis, spectra: dict[str, np.ndarray], untrained: np.ndarray) -> None:
    """Singular values, largest first: {name: values} as lines, an untrained model's dashed."""
    axis.plot(untrained, "--", color=GREY, linewidth=1.2, label="untrained")
    for (name, values), color in zip(spectra.items(), COLORS, strict=False):
        axis.plot(values, color=color, linewidth=1.4, label=name)
    axis.set(xlabel="number, the largest first", ylabel="singular value")
    axis.set_ylim(bottom=0)
    tidy(axis)


def plot_heads(patterns: np.ndarray):
    """The patterns of all heads (n_layer, nh, T, T), a row a layer: which head to enlarge."""
    L, nh, T, _ = patterns.shape
    edge = (0, 1)  # a line between heads
    framed = np.pad(patterns, ((0, 0), (0, 0), edge, edge), constant_values=np.nan)
    picture = framed.transpose(0, 2, 1, 3).reshape(L * (T + 1), nh * (T + 1))
    figure, (axis,) = new_figure(1, 1, height=min(9.6, max(3.0, 8.4 * L / nh)))
    axis.set_facecolor(GREY)
    axis.imshow(picture, cmap="Blues", vmin=0, vmax=1)
    axis.set_xticks(np.arange(nh) * (T + 1) + T / 2, range(nh))
    axis.set_yticks(np.arange(L) * (T + 1) + T / 2, range(L))
    title = "attention patterns of all heads: white 0, blue 1"
    axis.set(xlabel="head", ylabel="layer", title=title)
    return figure


def plot_attention(pattern: np.ndarray, tokens: list[str], title: str):
    """One head's pattern (T, T) on a text: a row's token looks at the columns' tokens."""
    figure, (axis,) = new_figure(1, 1, height=6.4)
    image = axis.imshow(pattern, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0)
    figure.colorbar(image, ax=axis, label="weight", pad=0.02)
    labels = [repr(token)[1:-1].replace("$", r"\$") for token in tokens]
    axis.set_xticks(range(len(tokens)), labels, rotation=90)
    axis.set_yticks(range(len(tokens)), labels)
    axis.set(xlabel="looked at", ylabel="looking", title=title)
    return figure

"""What only the notebook shows: looks into a model, runs side by side, tables."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from support.run.log import LoggedRun
from support.show import plots, published

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


def has_positions(model: GPT) -> bool:
    """Whether a model has position embeddings, as GPT-2 has; says if not: it may be changed."""
    found = "wpe" in model.transformer
    if not found:
        print("the trained model has no wpe, so this looks at none of it")
    return found


def can_read(model: GPT, example: dict[str, Any]) -> bool:
    """Whether a model's context holds an example of HellaSwag; says if not."""
    encode = model.tokenizer.encode
    endings = [encode(f" {ending}") for ending in example["endings"]]  # as render_example has them
    longest = len(encode(example["ctx"])) + max(map(len, endings))
    if longest > model.config.block_size:
        print(f"the trained model reads {model.config.block_size} tokens, not these {longest}")
    return longest <= model.config.block_size


def draw_weights(models: dict[str, GPT]) -> Any:
    """Draws of each model a corner of wpe, three of its channels, and a corner of c_attn."""
    models = {name: each for name, each in models.items() if has_positions(each)}
    figure, axes = plots.new_figure(len(models), 3, height=2.6)
    for row, (name, each) in enumerate(models.items()):
        image, channels, attention = axes[3 * row : 3 * row + 3]
        wpe = each.transformer.wpe.weight.numpy(force=True)
        c_attn = each.transformer.h[0].attn.c_attn.weight.numpy(force=True)
        for axis, weights in (image, wpe), (attention, c_attn):
            width = 3 * weights.std()
            corner = weights[:128, :128]
            axis.imshow(corner, aspect="auto", cmap="gray", vmin=-width, vmax=width)
            axis.grid(False)
        image.set(title=f"{name}: wpe", xlabel="channel", ylabel="position")
        attention.set(title="c_attn, a corner", xlabel="in", ylabel="out")
        for channel, color in (1, plots.BLUE), (2, plots.RED), (3, plots.GREY):
            channels.plot(wpe[:, channel], linewidth=0.7, color=color)
        channels.set(title="three channels of wpe", xlabel="position")
    return figure


def plot_positions(model: GPT) -> Any:
    """Draws position embeddings: singular values, and the strongest directions along positions."""
    figure, (values, waves) = plots.new_figure(1, 2)
    U, S, _ = np.linalg.svd(model.transformer.wpe.weight.numpy(force=True), full_matrices=False)
    values.plot(S, color=plots.GREY)
    values.set(xlabel="direction, strongest first", ylabel="singular value")
    values.set(title="position embeddings")
    for k in range(3):
        waves.plot(U[:, k] * S[k], color=plots.COLORS[k], label=f"direction {k}")
    waves.set(xlabel="position", ylabel="weight", title="the three strongest, along positions")
    waves.legend()
    return figure


def plot_attention(pattern: np.ndarray, tokens: list[str], title: str) -> Any:
    """Draws one head's pattern (T, T) on a text: a row's token looks at the columns' tokens."""
    figure, (axis,) = plots.new_figure(1, 1, height=6.4)
    image = axis.imshow(pattern, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0)
    figure.colorbar(image, ax=axis, label="weight", pad=0.02)
    labels = [repr(token)[1:-1].replace("$", r"\$").replace(" ", "␣") for token in tokens]
    axis.set_xticks(range(len(tokens)), labels, rotation=90)
    axis.set_yticks(range(len(tokens)), labels)
    axis.grid(False)
    axis.set(xlabel="looked at", ylabel="looking", title=title)
    return figure


def plot_by_text(draw: Callable[..., None], runs: list[LoggedRun]) -> Any:
    """Draws the runs on each text in a panel of its own. draw: draw_loss, draw_hellaswag, …"""
    if not runs:
        return None
    by_text: dict[tuple, list[LoggedRun]] = {}  # losses of other vocabularies are not comparable
    for run in runs:
        vocab_size = run.config.get("vocab_size", published.VOCAB_SIZE)
        text = plots.name_text(run.config, run.name)
        by_text.setdefault((text, vocab_size), []).append(run)
    texts = [text for text, _ in by_text]
    figure, axes = plots.new_figure(len(by_text), 1)
    for axis, ((text, vocab_size), same) in zip(axes, by_text.items(), strict=True):
        draw(axis, same)
        axis.set_title(f"{text}, {vocab_size:,} tokens" if texts.count(text) > 1 else text)
    return figure


def draw_by_time(axis: Any, runs: list[LoggedRun]) -> None:
    """Draws training loss, averaged, by minutes from the start, of runs whose times are known."""
    for run, style in zip(runs, cycle(plots.STYLES)):
        _, walls = run.series("wall")
        _, losses = run.series("loss")
        shown = slice(len(losses) // 50, None)  # the untrained model's would take most of the view
        mean, _ = plots.average(np.array(losses))
        minutes = np.array(walls[: len(losses)]) / 60
        axis.plot(minutes[shown], mean[shown], label=run.name, **style)
    plots.label_x(axis, "minutes, evaluations included")
    axis.set(xlim=(0, None), ylabel="training loss (nats per token)")
    plots.label_lines(axis)


def plot_training(runs: list[LoggedRun]) -> Any:
    """Draws learning rate, gradient norm, throughput, MFU and memory by step, where recorded."""
    from matplotlib.ticker import LogFormatter

    scale = "log" if len(runs) > 1 else "linear"
    panels = {  # field: the axis's label and scale, and the unit
        "lr": ("learning rate", scale, 1),
        "norm": ("gradient norm, unclipped", scale, 1),
        "tokens_per_sec": ("tokens/s", scale, 1),
        "mfu": ("MFU", "linear", 1),
        "memory": ("peak memory, GB", "linear", 1e9),
    }
    fields = [field for field in panels if any(run.series(field)[0] for run in runs)]
    if not fields:
        return None
    figure, axes = plots.new_figure(len(fields), 1, height=2.2)
    for axis, field in zip(axes, fields, strict=True):
        label, yscale, unit = panels[field]
        for run, style in zip(runs, cycle(plots.STYLES)):
            steps, values = run.series(field)
            axis.plot(steps, np.array(values) / unit, linewidth=1, label=run.name, **style)
        axis.set(ylabel=label, yscale=yscale)
        plots.label_x(axis, "step")
        if len(runs) > 1:  # of other lengths
            axis.set_xscale("symlog", linthresh=10)
            axis.xaxis.set_major_formatter("{x:,g}")
        axis.legend()
        if yscale == "linear":
            axis.set_ylim(bottom=0)
        else:  # the usual labels are mathematical text, see gpt2.mplstyle
            axis.yaxis.set_major_formatter(LogFormatter())
            axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    return figure


def table_of_runs(runs: list[LoggedRun]) -> Any:
    """A row for each run: its size, length and best scores; OpenAI's beside them where known."""
    import pandas

    settings = ("data_dir", "n_layer", "n_embd", "total_batch_size", "max_steps")
    rows = []
    for run in runs:
        row: dict = {"run": run.name} | {name: run.config.get(name) for name in settings}
        for name, (own, theirs) in published.beside_openai(run).items():
            row[name] = own
            if theirs:
                row |= {f"{name}, OpenAI's": theirs, f"{name}, difference": own - theirs}
        if "hella" in run.streams:
            row["examples"] = run.examples
        rows.append(row)
    return pandas.DataFrame(rows).convert_dtypes().round(4)  # whole numbers stay whole


def show_samples(runs: list[LoggedRun]) -> None:
    """Prints samples of each run: its first, its last, and some between, more of the early ones."""
    for run in runs:
        steps, samples = run.series("samples", "samples")
        picked = list(range(len(steps)))
        if len(steps) > 5:
            picked = [0, *np.geomspace(1, len(steps) - 1, 4).round().astype(int)]
        for i in picked:  # report.md has all
            print(f"\n== {run.name}, step {steps[i]:,}")
            print("\n--\n".join(samples[i]))

"""bench.py --recipes: AdamW against Muon on small models, each at its best learning rate; `m` is bench.py's Machine."""

import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import plots
from tokenizer import UserError

SCALES = {  # millions of parameters outside the embedding; heads of 32
    "1M": dict(n_layer=6, n_head=4, n_embd=128),
    "3M": dict(n_layer=6, n_head=6, n_embd=192),
    "8M": dict(n_layer=10, n_head=8, n_embd=256),
}
TOKENS, T = 1024, 256  # of a step, of a sequence


def sweep_recipes(m, rows: list[dict]) -> Iterator[dict]:
    """Yields the rows of an earlier run, then those that it lacks. For each scale and optimizer: the learning rates asked for,
    more of them until the best is not at an end, and other seeds of the best. Then a step of both, side by side."""
    yield from rows
    c, rows = m.config, [*rows]

    def train(scale: str, optimizer: str, rate: float, seed: int) -> Iterator[dict]:
        name = f"{scale} {optimizer} {rate:g} seed {seed}"
        if name not in {row["name"] for row in rows}:
            print(name, file=sys.stderr)
            recipe = dict(optimizer=optimizer, learning_rate=rate, seed=seed)
            rows.append(dict(name=name, scale=scale, **recipe) | train_recipe(c, name, **recipe, **SCALES[scale]))
            yield rows[-1]

    for scale in c.scales:
        for optimizer in ("adamw", "muon"):
            missing = c.learning_rates
            while missing:
                for rate in missing:
                    yield from train(scale, optimizer, rate, c.seeds[0])
                tried = [row["learning_rate"] for row in rows if (row["scale"], row["optimizer"]) == (scale, optimizer)]
                best = plots.best_recipes(rows)[scale, optimizer][0]["learning_rate"]
                missing = [best / 2] * (best == min(tried)) + [best * 2] * (best == max(tried))
            for seed in c.seeds[1:]:
                yield from train(scale, optimizer, best, seed)
        steps = {f"{scale} {optimizer}, a step": optimizer for optimizer in ("adamw", "muon")}
        if not {row["name"] for row in rows} >= set(steps):
            sizes = dict(size=SCALES[scale], B=TOKENS // T, T=T)
            timed = m.measure(m.step(name, **sizes, optimizer=optimizer) for name, optimizer in steps.items())
            rows += (row | dict(scale=scale, optimizer=steps[row["name"]]) for row in timed)
            yield from rows[-2:]
        m.notes.append(f"{scale}: to AdamW's final loss Muon needs {compare_recipes(rows, scale)}")


def train_recipe(c, name: str, **values) -> dict:
    """A run of train_gpt2.py: its validation losses, and the tokens of training before each."""
    log_dir = Path(f"{c.out}_{name.replace(' ', '_')}")
    values |= dict(data_dir=c.data_dir, log_dir=log_dir, device=c.device, dtype=c.dtype)
    values |= dict(sequence_length=T, batch_size=TOKENS // T, total_batch_size=TOKENS, max_steps=c.recipe_steps)
    values |= dict(warmup_steps=c.recipe_steps // 10, val_every=max(1, c.recipe_steps // 10), val_tokens=8192)
    values |= dict(hellaswag_every=0, sample_every=0, checkpoint_every=0)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]
    script = Path(__file__).parent.parent / "train_gpt2.py"
    command = [sys.executable, str(script), *flags, "--overwrite", "--compile" if c.compile else "--no-compile"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "the loss is" in done.stderr:  # not a number: this learning rate is too high
        return dict(error="diverged")
    if done.returncode:
        raise UserError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    steps, losses = plots.read_run(log_dir).streams["val"]
    return dict(val_loss=losses[-1], losses=losses, tokens=[TOKENS * step for step in steps])


def compare_recipes(rows: list[dict], scale: str) -> str:
    """What part of AdamW's tokens and time Muon needs to reach its final loss, seed by seed, both at their best rates."""
    best, speeds, parts = plots.best_recipes(rows), plots.recipe_speeds(rows), []
    for adamw, muon in zip(best[scale, "adamw"], best[scale, "muon"], strict=False):
        lowest = np.minimum.accumulate(muon["losses"])[::-1]  # straight lines between evaluations; nan: never reached
        parts.append(np.interp(adamw["val_loss"], lowest, muon["tokens"][::-1], left=math.nan) / adamw["tokens"][-1])
    slower = speeds[scale, "adamw"] / speeds[scale, "muon"]
    words = (
        f"{k * np.mean(parts):.2f} of its {axis} ({k * min(parts):.2f} to {k * max(parts):.2f})"
        for axis, k in {"tokens": 1, "time": slower}.items()
    )
    return f"{' and '.join(words)}, {len(parts)} seed(s)"

"""bench.py --recipes: AdamW against Muon on small models, each at its best learning rate; `m` is bench.py's Machine."""

import math
import shlex
import statistics
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
TOKENS, T = 2048, 256  # of a step, of a sequence


def sweep_recipes(m, rows: list[dict]) -> Iterator[dict]:
    """Yields the rows of an earlier run, then those that it lacks. For each scale and optimizer: the learning rates asked for,
    more of them until the best is not at an end, and other seeds of the best."""
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
        m.notes.append(f"{scale}: to AdamW's final loss Muon needs {compare_recipes(rows, scale)}")


def train_recipe(c, name: str, **values) -> dict:
    """A run of train_gpt2.py: its validation losses, and the tokens and the seconds of training before each."""
    log_dir = Path(f"{c.out}_{name.replace(' ', '_')}")
    values |= dict(data_dir=c.data_dir, log_dir=log_dir, device=c.device, dtype=c.dtype)
    values |= dict(sequence_length=T, batch_size=TOKENS // T, total_batch_size=TOKENS, max_steps=c.recipe_steps)
    values |= dict(warmup_steps=c.recipe_steps // 10, val_every=max(1, c.recipe_steps // 20), val_tokens=32768)
    values |= dict(hellaswag_every=0, sample_every=0, checkpoint_every=0)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]
    script = Path(__file__).parent.parent / "train_gpt2.py"
    command = [sys.executable, str(script), *flags, "--overwrite", "--compile" if c.compile else "--no-compile"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "the loss is" in done.stderr:  # not a number: this learning rate is too high
        return dict(error="diverged")
    if done.returncode:
        raise UserError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    run = plots.read_run(log_dir)
    steps, losses = run.streams["val"]
    _, ms = run.series("ms")
    seconds = np.cumsum([0, statistics.median(ms), *ms[1:]])[steps] / 1000  # the first step's are those of compilation
    return dict(val_loss=losses[-1], losses=losses, tokens=[TOKENS * s for s in steps], seconds=seconds.tolist())


def compare_recipes(rows: list[dict], scale: str) -> str:
    """What part of AdamW's tokens and time Muon needs to reach its final loss, seed by seed, both at their best rates."""
    best, parts = plots.best_recipes(rows), {"tokens": [], "seconds": []}
    for adamw, muon in zip(best[scale, "adamw"], best[scale, "muon"], strict=False):
        lowest = np.minimum.accumulate(muon["losses"])[::-1]
        for axis, of_seeds in parts.items():  # straight lines between evaluations; not a number where it is never reached
            of_seeds.append(np.interp(adamw["val_loss"], lowest, muon[axis][::-1], left=math.nan) / adamw[axis][-1])
    words = (f"{np.mean(part):.2f} of its {axis} ({min(part):.2f} to {max(part):.2f})" for axis, part in parts.items())
    return f"{' and '.join(words)}, {len(parts['tokens'])} seed(s)"

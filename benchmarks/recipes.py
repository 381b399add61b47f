"""bench.py --recipes: AdamW against Muon on small models, each at its best learning rate; `m` is bench.py's Machine.

python -m benchmarks.recipes makes the shards that it trains on.
"""

import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import plots
from tokenizer import EOT, UserError, run_script

SCALES = {  # millions of parameters outside the embedding; heads of 32
    "1M": dict(n_layer=6, n_head=4, n_embd=128),
    "3M": dict(n_layer=6, n_head=6, n_embd=192),
    "8M": dict(n_layer=10, n_head=8, n_embd=256),
}
TOKENS, T = 2048, 256  # of a step, of a sequence
OPTIMIZERS = ("adamw", "muon")


def cut_documents(source: str = "data/stdlib", target: str = "data/stdlib-pieces", most: int = 512) -> None:
    """Makes shards in `target` of those in `source`: their documents in pieces of at most `most` tokens, shuffled.

    A module of the standard library has up to 100,000 tokens: so short a run would see nothing else for fifty of its steps.
    """
    shards, beside = sorted(Path(source).glob("*.npy")), Path(f"{target}.tmp")
    if not shards:
        raise UserError(f"no shards in {source}: make them with python fineweb.py --source stdlib --data-dir {source}")
    if Path(target).exists():
        raise UserError(f"{target} is there already: remove it first, or choose another --target")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for path in shards:
        tokens, pieces = np.load(path), []
        for document in np.split(tokens, np.flatnonzero(tokens == EOT)[1:]):
            parts = [document[i : i + most - 1] for i in range(1, len(document), most - 1)]
            pieces += [np.concatenate([document[:1], part]) for part in parts]  # each starts with <|endoftext|>
        order = np.random.default_rng(0).permutation(len(pieces))
        np.save(beside / path.name, np.concatenate([pieces[i] for i in order]))
        print(f"{target}/{path.name}: {len(pieces):,} pieces")
    beside.rename(target)


def sweep_recipes(m) -> Iterator[dict]:
    """For each scale and optimizer: the learning rates asked for, more of them until the best is not at an end, and other seeds
    of the best. Then a step of both optimizers, side by side."""
    c, rows = m.config, []

    def train(scale: str, optimizer: str, rate: float, seed: int) -> Iterator[dict]:
        name = f"{scale} {optimizer} {rate:g} seed {seed}"
        print(name, file=sys.stderr)
        recipe = dict(optimizer=optimizer, learning_rate=rate, seed=seed)
        rows.append(dict(name=name, scale=scale, **recipe) | train_recipe(c, name, **recipe, **SCALES[scale]))
        yield rows[-1]

    for scale in c.scales:
        for optimizer in OPTIMIZERS:
            tried, missing = [], list(c.learning_rates)
            while missing:
                for rate in missing:
                    yield from train(scale, optimizer, rate, c.seeds[0])
                tried += missing
                if (scale, optimizer) not in (best_of := plots.best_recipes(rows)):
                    raise UserError(
                        f"{scale}, {optimizer}: no learning rate of {tried} gave a loss that is a number, try lower"
                    )
                best = best_of[scale, optimizer][0]["learning_rate"]
                missing = [best / 2] * (best == min(tried)) + [best * 2] * (best == max(tried))
            for seed in c.seeds[1:]:
                yield from train(scale, optimizer, best, seed)
        sizes = dict(size=SCALES[scale], B=TOKENS // T, T=T)
        steps = m.measure(m.step(f"{scale} {optimizer}, a step", **sizes, optimizer=optimizer) for optimizer in OPTIMIZERS)
        rows += (row | dict(scale=scale, optimizer=optimizer) for row, optimizer in zip(steps, OPTIMIZERS, strict=True))
        yield from rows[-2:]
        m.notes.append(f"{scale}: to AdamW's final loss Muon needs {compare_recipes(rows, scale)}")


def train_recipe(c, name: str, **values) -> dict:
    """A run of train_gpt2.py, unless it is there already: its validation losses, and the tokens of training before each."""
    log_dir = Path(f"{c.out}_{name.replace(' ', '_')}")
    values |= dict(data_dir=c.data_dir, device=c.device, dtype=c.dtype)
    values |= dict(sequence_length=T, batch_size=TOKENS // T, total_batch_size=TOKENS, max_steps=c.recipe_steps)
    values |= dict(warmup_steps=c.recipe_steps // 10, val_every=max(1, c.recipe_steps // 10), val_tokens=8192)
    values |= dict(hellaswag_every=0, sample_every=0, checkpoint_every=0, compile=c.compile)
    if not is_complete(log_dir, values):
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in values.items() if key != "compile"]
        flags += [f"--log-dir={log_dir}", "--overwrite", "--compile" if c.compile else "--no-compile"]
        command = [sys.executable, str(Path(__file__).parent.parent / "train_gpt2.py"), *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and "the loss is" in done.stderr:  # not a number: this learning rate is too high
            return dict(error="diverged")
        if done.returncode:
            raise UserError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    steps, losses = plots.read_run(log_dir).streams["val"]
    return dict(val_loss=losses[-1], losses=losses, tokens=[TOKENS * step for step in steps])


def is_complete(log_dir: Path, values: dict) -> bool:
    """Whether log_dir holds a whole run of this configuration."""
    if not (log_dir / "metrics.jsonl").exists():
        return False
    run = plots.read_run(log_dir)
    last, _ = run.streams.get("val", ([0], []))
    return last[-1] == values["max_steps"] and values.items() <= run.config.items()


def compare_recipes(rows: list[dict], scale: str) -> str:
    """What part of AdamW's tokens and time Muon needs to reach its final loss, seed by seed, both at their best rates."""
    best, speeds, parts = plots.best_recipes(rows), plots.recipe_speeds(rows), []
    for adamw, muon in zip(best[scale, "adamw"], best[scale, "muon"], strict=False):
        lowest = np.minimum.accumulate(muon["losses"])[::-1]  # straight lines between evaluations; nan: never reached
        parts.append(np.interp(adamw["val_loss"], lowest, muon["tokens"][::-1], left=math.nan) / adamw["tokens"][-1])
    slower = speeds.get((scale, "adamw"), math.nan) / speeds.get((scale, "muon"), math.nan)
    words = (
        f"{k * np.mean(parts):.2f} of its {axis} ({k * np.min(parts):.2f} to {k * np.max(parts):.2f})"
        for axis, k in {"tokens": 1, "time": slower}.items()
    )
    return f"{' and '.join(words)}, {len(parts)} seed(s)"


if __name__ == "__main__":
    import tyro

    run_script(lambda: tyro.cli(cut_documents))

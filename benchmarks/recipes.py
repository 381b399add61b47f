"""bench.py --recipes: AdamW against Muon on small models, each at its best learning rate.

`m` is bench.py's Machine. python -m benchmarks.recipes makes the shards that it trains on.
"""

import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from support.common import UserError, run_script
from support.log import read_run
from support.plots import best_recipes, recipe_speeds
from support.tokenizer import EOT

SCALES = {  # millions of parameters outside the embedding; heads of 32
    "1M": dict(n_layer=6, n_head=4, n_embd=128),
    "3M": dict(n_layer=6, n_head=6, n_embd=192),
    "8M": dict(n_layer=10, n_head=8, n_embd=256),
}
TOKENS = 2048  # of a step
T = 256  # tokens of a sequence
OPTIMIZERS = ("adamw", "muon")


# -- the shards


def cut_documents(
    source: str = "data/stdlib", target: str = "data/stdlib-pieces", most: int = 512
) -> None:
    """Makes shards in `target` of those in `source`: pieces of documents, shuffled.

    A piece has at most `most` tokens. A module of the standard library has up to 100,000: so short
    a run would see nothing else for fifty of its steps.
    """
    shards = sorted(Path(source).glob("*.npy"))
    beside = Path(f"{target}.tmp")
    if not shards:
        make = f"python fineweb.py --source stdlib --data-dir {source}"
        raise UserError(f"no shards in {source}: make them with {make}")
    if Path(target).exists():
        raise UserError(f"{target} is there already: remove it first, or choose another --target")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for path in shards:
        pieces = cut_shard(np.load(path), most)
        order = np.random.default_rng(0).permutation(len(pieces))
        np.save(beside / path.name, np.concatenate([pieces[i] for i in order]))
        print(f"{target}/{path.name}: {len(pieces):,} pieces")
    beside.rename(target)


def cut_shard(tokens: np.ndarray, most: int) -> list[np.ndarray]:
    """The documents of a shard in pieces, each of which starts with <|endoftext|>."""
    pieces = []
    starts = np.flatnonzero(tokens == EOT)
    for document in np.split(tokens, starts[1:]):
        for i in range(1, len(document), most - 1):
            pieces.append(np.concatenate([document[:1], document[i : i + most - 1]]))
    return pieces


# -- the comparison


def sweep_recipes(m) -> Iterator[dict]:
    """For each scale: both optimizers at their best learning rates, and a step of both timed."""
    rows: list[dict] = []
    for scale in m.config.scales:
        for optimizer in OPTIMIZERS:
            yield from sweep_learning_rates(m.config, rows, scale, optimizer)
        yield from time_steps(m, rows, scale)
        needed = compare_recipes(rows, scale)
        m.notes.append(f"{scale}: to AdamW's final loss Muon needs {needed}")


def sweep_learning_rates(c, rows: list[dict], scale: str, optimizer: str) -> Iterator[dict]:
    """The learning rates asked for, then more until the best is not at an end, then other seeds.

    c: bench.py's flags. A row for each run is added to `rows` and yielded.
    """

    def train(rate: float, seed: int) -> dict:
        name = f"{scale} {optimizer} {rate:g} seed {seed}"
        print(name, file=sys.stderr)
        recipe = dict(optimizer=optimizer, learning_rate=rate, seed=seed)
        result = train_recipe(c, name, **recipe, **SCALES[scale])
        rows.append(dict(name=name, scale=scale, **recipe) | result)
        return rows[-1]

    tried: list[float] = []
    missing = list(c.learning_rates)
    while missing:
        for rate in missing:
            yield train(rate, c.seeds[0])
        tried += missing
        best_of = best_recipes(rows)
        if (scale, optimizer) not in best_of:
            problem = f"no learning rate of {tried} gave a loss that is a number, try lower"
            raise UserError(f"{scale}, {optimizer}: {problem}")
        best = best_of[scale, optimizer][0]["learning_rate"]
        missing = []
        if best == min(tried):
            missing.append(best / 2)
        if best == max(tried):
            missing.append(best * 2)
    for seed in c.seeds[1:]:
        yield train(best, seed)


def time_steps(m, rows: list[dict], scale: str) -> Iterator[dict]:
    """A step of both optimizers, side by side; the rows are added to `rows` and yielded."""
    sides = []
    for optimizer in OPTIMIZERS:
        side = m.step(
            f"{scale} {optimizer}, a step",
            size=SCALES[scale],
            B=TOKENS // T,
            T=T,
            optimizer=optimizer,
        )
        sides.append(side)
    for row, optimizer in zip(m.measure(sides), OPTIMIZERS, strict=True):
        rows.append(row | dict(scale=scale, optimizer=optimizer))
        yield rows[-1]


def compare_recipes(rows: list[dict], scale: str) -> str:
    """What part of AdamW's tokens and time Muon needs to reach its final loss, seed by seed.

    Both at their best learning rates; between evaluations the loss is taken for a straight line.
    """
    best = best_recipes(rows)
    speeds = recipe_speeds(rows)
    parts = []
    for adamw, muon in zip(best[scale, "adamw"], best[scale, "muon"], strict=False):
        lowest = np.minimum.accumulate(muon["losses"])[::-1]  # np.interp wants them to rise
        tokens = muon["tokens"][::-1]
        needed = np.interp(adamw["val_loss"], lowest, tokens, left=math.nan)  # nan: never reached
        parts.append(needed / adamw["tokens"][-1])
    slower = speeds.get((scale, "adamw"), math.nan) / speeds.get((scale, "muon"), math.nan)
    words = []
    for axis, k in {"tokens": 1, "time": slower}.items():
        low = k * np.min(parts)
        high = k * np.max(parts)
        words.append(f"{k * np.mean(parts):.2f} of its {axis} ({low:.2f} to {high:.2f})")
    return f"{' and '.join(words)}, {len(parts)} seed(s)"


# -- one run


def train_recipe(c, name: str, **recipe) -> dict:
    """A run of train_gpt2.py, unless it is there already; c: bench.py's flags.

    Returns its validation losses, and the tokens of training before each.
    """
    log_dir = Path(f"{c.out}_{name.replace(' ', '_')}")
    values = recipe | dict(
        data_dir=c.data_dir,
        device=c.device,
        dtype=c.dtype,
        sequence_length=T,
        batch_size=TOKENS // T,
        total_batch_size=TOKENS,
        max_steps=c.recipe_steps,
        warmup_steps=c.recipe_steps // 10,
        val_every=max(1, c.recipe_steps // 10),
        val_tokens=8192,
        hellaswag_every=0,
        sample_every=0,
        checkpoint_every=0,
        compile=c.compile,
    )
    if not is_complete(log_dir, values):
        command = training_command(log_dir, values)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and "the loss is" in done.stderr:  # not a number: the rate is too high
            return dict(error="diverged")
        if done.returncode:
            raise UserError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    steps, losses = read_run(log_dir).streams["val"]
    return dict(val_loss=losses[-1], losses=losses, tokens=[TOKENS * step for step in steps])


def training_command(log_dir: Path, values: dict) -> list[str]:
    command = [sys.executable, str(Path(__file__).parent.parent / "train_gpt2.py")]
    for name, value in values.items():
        if name != "compile":
            command.append(f"--{name.replace('_', '-')}={value}")
    command += [f"--log-dir={log_dir}", "--overwrite"]
    command.append("--compile" if values["compile"] else "--no-compile")
    return command


def is_complete(log_dir: Path, values: dict) -> bool:
    """Whether log_dir holds a whole run of this configuration."""
    if not (log_dir / "metrics.jsonl").exists():
        return False
    run = read_run(log_dir)
    steps, _ = run.streams.get("val", ([0], []))
    return steps[-1] == values["max_steps"] and values.items() <= run.config.items()


if __name__ == "__main__":
    import tyro

    run_script(lambda: tyro.cli(cut_documents))

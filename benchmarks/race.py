"""The same minutes: who has the lowest loss on held-out text when the time is up?

git clone https://github.com/karpathy/nanoGPT ../nanoGPT
python -m benchmarks.race --peer ../nanoGPT
python -m benchmarks.race --peer ../nanoGPT --minutes 1 --ours="--minutes 1" --seeds 1

On the CPU, nanoGPT, transformers and this repository train on one text, each in a process of its
own. First they take turns with short runs, because the machine's speed changes: the medians say how
long compiling and an update take, and how many updates fit the time. So a run's clock starts with
its first update, whatever the machine does meanwhile. Scores are in bits per byte of all held-out
text, because the sides' tokens differ. The rate that is best with the first seed is trained with
the others, too, and counts by the mean. To continue, repeat the command.
"""

import json
import math
import os
import pickle
import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

import minutes
from benchmarks import peers, tables
from config import parse_command_line
from model import DataLoaderLite
from support.base.console import run_script, say
from support.base.errors import UserError
from support.base.files import write_whole
from support.base.flags import Positive, Range, String, drop_flags, parse_flags
from support.machine.device import keep_to_limit, pick_dtype
from support.machine.distributed import start_world
from support.show import plots, report
from support.text.token_files import find_shards, open_data
from support.text.tokenizer import tokenizer_of_data

TRIAL = 160  # updates of a side's short runs; nanoGPT's settings have 100 of warm-up
TURNS = 3  # short runs of each side
SCORES = 16  # of a long run
RATES = (1e-3, 2e-3, 4e-3)  # the best counts
SEEDS = (1337, 1338, 1339)  # the first one chooses the rate
THIS_REPOSITORY = "this repository"
ADAMW = "this repository, AdamW"  # as the peers: it tells what Muon adds
HF = "transformers, our tokens"
A100 = 1.4697  # nanoGPT's README: nats per character
LEVELS = {"tinyshakespeare": {f"nanoGPT, 3 min of an A100 {A100:.3f}": A100}}
UNITS = {"tinyshakespeare": ("nats per character", math.log(2))}
NANOGPT = "nanoGPT, our tokens"
MACBOOK_SIDE = "nanoGPT, its README"
# in pictures a program has one colour; dashes: without what is best in it
STYLES: dict[str, dict[str, str]] = {
    THIS_REPOSITORY: dict(color=plots.BLUE),
    ADAMW: dict(color=plots.BLUE, linestyle="--"),
    NANOGPT: dict(color=plots.RED),
    MACBOOK_SIDE: dict(color=plots.RED, linestyle="--"),
    HF: dict(color=plots.GREEN),
}
# {name: the function that trains with some updates at a learning rate and a seed, rates to try}
Sides = dict[str, tuple[Callable, tuple]]
# nanoGPT's README, "I only have a macbook": its settings for a CPU, but for the number of updates
MACBOOK = """config/train_shakespeare_char.py --compile=False --block_size=64 --batch_size=12
    --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0"""


@dataclass(frozen=True)
class MinutesConfig:
    """Trains each side on the same text for the same time."""

    peer: String = ""  # a clone of nanoGPT; without it, its two sides are left out
    data_dir: str = "data/tinyshakespeare"  # shards by fineweb.py
    minutes: Positive = 3.0  # of training, for each run
    # this repository's flags, typed as --ours="--preset laptop"; the others take its sizes. With
    # --ours="--minutes 3", its rule chooses sizes, and a recipe for the updates that fit
    ours: str = "--preset quickstart"
    seeds: Annotated[int, Range(1, 3)] = 3
    out: str = "log/minutes"  # the results go to OUT.json and OUT.png


def write_tokens(folder: Path, splits: list[np.ndarray], sizes: list[int]) -> Path:
    """A directory for nanoGPT. sizes: bytes of each token, for `score`."""
    folder.mkdir(exist_ok=True)
    for name, tokens in zip(("train", "val"), splits, strict=True):
        tokens.astype(np.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=len(sizes), sizes=sizes)))
    return folder


def choose_flags(config: MinutesConfig) -> list[str]:
    """This repository's flags; with --minutes, sizes for the operations that fit here."""
    flags = [*shlex.split(config.ours), f"--data-dir={config.data_dir}"]
    settings = parse_command_line(flags)
    if not settings.minutes:
        return flags
    data = open_data(settings.data_dir, "train", "val")
    return minutes.fit_sizes(settings, start_world("cpu"), data).as_flags()


def schedule(flags: list[str], updates: int, typed: frozenset[str]) -> list[str]:
    """The same sizes, with the recipe of --minutes for so many updates, but for what was typed."""
    settings = replace(parse_command_line(flags), typed=typed)  # all else may be chosen again
    loader = DataLoaderLite(settings.data_dir, "train", 1, settings.sequence_length)
    epochs = updates * settings.total_batch_size / loader.epoch_tokens
    return minutes.with_recipe(settings, updates, epochs).as_flags()


def find_sides(config: MinutesConfig, flags: list[str], folder: Path) -> Sides:
    """flags: this repository's, from choose_flags."""
    settings = parse_command_line(flags)
    tokenizer = tokenizer_of_data(config.data_dir)
    splits = [find_shards(Path(config.data_dir), split) for split in ("train", "val")]
    tokens = [np.concatenate([p for shard in split for p in shard.read_all()]) for split in splits]
    ours = write_tokens(folder / "tokens", tokens, tokenizer.sizes.tolist())
    hf = (partial(peers.train_transformers, settings, ours), RATES)
    sides: Sides = {
        THIS_REPOSITORY: (partial(peers.train_here, flags, ours), (settings.learning_rate,))
    }
    adamw = [*drop_flags(flags, "--embedding-lr"), "--optimizer=adamw"]
    sides[ADAMW] = (partial(peers.train_here, adamw, ours), RATES)
    if not config.peer:
        say("nanoGPT is left out: name a clone of https://github.com/karpathy/nanoGPT with --peer")
        return sides | {HF: hf}
    texts = [tokenizer.encoding.decode_bytes(t[t != tokenizer.eot].tolist()) for t in tokens]
    letters, text = np.unique(np.frombuffer(b"".join(texts), np.uint8), return_inverse=True)
    characters = np.split(text, [len(texts[0])])  # of ASCII; else the bytes of UTF-8
    theirs = write_tokens(folder / "characters", characters, [1] * len(letters))
    T = settings.sequence_length
    same = f"""--batch_size={settings.total_batch_size // T} --block_size={T} --dropout=0.0
        --n_layer={settings.n_layer} --n_head={settings.n_head} --n_embd={settings.n_embd}
        --gradient_accumulation_steps=1 --warmup_iters={settings.warmup_steps}
        --compile={settings.compile}"""
    train = partial(peers.train_nanogpt, peers.find_nanogpt(config.peer))
    sides[NANOGPT] = (partial(train, same, ours), RATES)
    sides[MACBOOK_SIDE] = (partial(train, MACBOOK, theirs), RATES[:1])
    return sides | {HF: hf}


def pace(points: list[peers.Point]) -> tuple[float, float]:
    """Seconds of an update, and how many more the first one took: it compiles."""
    (first, began, _), *_, (last, ended, _) = points
    update = (ended - began) / (last - first)
    return update, max(0.0, began - first * update)


def find_paces(trials: Mapping[str, Callable[[], list[peers.Point]]]) -> dict[str, list]:
    """The paces of each side's short runs, which take turns: the machine's speed changes."""
    paces: dict[str, list] = {name: [] for name in trials}
    for name, trial in [*trials.items()] * TURNS:
        paces[name].append(pace(trial()))
        say(f"{name}: {1000 * paces[name][-1][0]:.0f} ms an update")
    return paces


def race(config: MinutesConfig, command: str) -> dict:
    """Trains each side at its rates. OUT.json and OUT.png always have all runs so far."""
    record = Path(f"{config.out}.json")
    dtype, _ = pick_dtype(torch.device("cpu"))
    result = report.describe_run(asdict(config), start_world("cpu"), dtype, 0, command)
    result["runs"] = []
    if record.exists():
        found = json.loads(record.read_text())
        if found["config"] | dict(seeds=0) != result["config"] | dict(seeds=0):
            kept = f"it is the race of {found['command']}"
            raise UserError(f"--out {config.out}: {kept}; choose another")
        result = found
        say(f"{record}: going on with revision {found['git']}'s race; for a new one, another --out")
    with tempfile.TemporaryDirectory() as folder:
        result["flags"] = result.get("flags") or choose_flags(config)
        sides = find_sides(config, result["flags"], Path(folder))
        paces = result.setdefault("paces", {})
        if new := {name: side for name, side in sides.items() if name not in paces}:
            trials = {
                name: partial(in_new_process, train, TRIAL, rates[0], SEEDS[0], 2)
                for name, (train, rates) in new.items()
            }
            for name, turns in find_paces(trials).items():
                paces[name] = np.median(turns, axis=0).tolist()
            settings = parse_command_line(shlex.split(config.ours))
            if settings.minutes and THIS_REPOSITORY in new:
                updates = fit(config.minutes, *paces[THIS_REPOSITORY])
                result["flags"] = schedule(result["flags"], updates, settings.typed)
                sides = find_sides(config, result["flags"], Path(folder))
            write_whole(record, json.dumps(result, indent=1).encode())
        while missing := find_missing(sides, result["runs"], SEEDS[: config.seeds]):
            name, rate, seed = missing
            update, start = paces[name]
            updates = fit(config.minutes, update, start)
            scores = in_new_process(sides[name][0], updates, rate, seed, SCORES)
            points = [(n, start + n * update, bits) for n, _, bits in scores]
            result["runs"].append(dict(name=name, rate=rate, seed=seed, points=points))
            write_whole(record, json.dumps(result, indent=1).encode())
            plots.save_picture(plot_minutes(result), record.with_suffix(".png"))
    return result


def fit(minutes: float, update: float, start: float, scores: int = SCORES) -> int:
    """How many updates fit, a multiple of `scores`. Takes the seconds of one and of compiling."""
    return max(1, int((60 * minutes - start) / update / scores)) * scores


def find_missing(sides: Sides, runs: list[dict], seeds: tuple) -> tuple[str, float, int] | None:
    """The name, rate and seed of the next run; None if there are all."""
    done = [(run["name"], run["rate"], run["seed"]) for run in runs]
    tuning = ((name, rate, SEEDS[0]) for name, (_, rates) in sides.items() for rate in rates)
    # asked only when all of the tuning is done
    judging = ((name, tried(runs, name)[0]["rate"], seed) for seed in seeds[1:] for name in sides)
    return next((run for run in chain(tuning, judging) if run not in done), None)


def tried(runs: list[dict], name: str) -> list[dict]:
    """A side's runs with the first seed, the best rate first."""
    own = [run for run in runs if run["name"] == name and run["seed"] == SEEDS[0]]
    return sorted(own, key=lambda run: run["points"][-1][2])


def in_new_process(train: Callable, *arguments: float) -> list[peers.Point]:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # no compiled code of earlier runs
        with get_context("spawn").Pool(1, keep_to_limit) as pool:
            return pool.apply(train, arguments)


COLUMNS = {  # heading and format
    "name": ("", ""),
    "rate": ("rate", "g"),
    "updates": ("updates", ",d"),
    "ms": ("ms", ",.0f"),
    "start": ("compiling s", ".0f"),
    "seconds": ("seconds", ".0f"),
    "bits": ("bits per byte", ".3f"),
    "by_seed": ("by seed", ""),
    "others": ("at other rates", ""),
    "passed": ("we reach it after s", ".0f"),
}


def summarize(result: dict) -> list[dict]:
    """A row for the best rate of each side, with means of its seeds; the lowest loss first."""
    rows = []
    for name in dict.fromkeys(run["name"] for run in result["runs"]):
        best, *worse = tried(result["runs"], name)
        side = (name, best["rate"])
        seeds = [run for run in result["runs"] if (run["name"], run["rate"]) == side]
        curves = np.array([run["points"] for run in seeds])  # (seeds, scores, 3)
        points = curves.mean(0)
        updates, seconds, bits = points[-1]
        update, start = pace(points)
        by_seed = ", ".join(f"{bits:.3f}" for bits in curves[:, -1, 2])
        others = ", ".join(f"{run['rate']:g}: {run['points'][-1][2]:.3f}" for run in worse)
        row = dict(updates=int(updates), ms=1000 * update, start=start, seconds=seconds, bits=bits)
        row |= dict(by_seed=by_seed, others=others, points=points)
        row["range"] = (curves[:, :, 2].min(0), curves[:, :, 2].max(0))
        rows.append(best | row)
    ours = next(row["points"] for row in rows if row["name"] == THIS_REPOSITORY)
    for row in rows:
        row["passed"] = min((s for _, s, bits in ours if bits <= row["bits"]), default=None)
    return sorted(rows, key=lambda row: row["bits"])


def plot_minutes(result: dict) -> Any:
    """The loss of held-out text by minutes: the mean and the range of each side's seeds."""
    figure, [axis] = plots.new_figure(1, 1)
    settings = result["config"]
    data = Path(settings["data_dir"]).name
    plots.draw_levels(axis, LEVELS.get(data, {}))
    # a character of Tiny Shakespeare is a byte, and nats per character are what nanoGPT prints
    unit, scale = UNITS.get(data, ("bits per byte", 1.0))
    rows = summarize(result)
    for row in rows:
        _, seconds, bits = row["points"].T
        label = f"{row['name']} {scale * row['bits']:.3f}"
        axis.plot(seconds / 60, scale * bits, marker="o", ms=3, label=label, **STYLES[row["name"]])
        low, high = (scale * bound for bound in row["range"])
        color = STYLES[row["name"]]["color"]
        axis.fill_between(seconds / 60, low, high, color=color, alpha=0.25, linewidth=0)
    ours = next(row["bits"] for row in rows if row["name"] == THIS_REPOSITORY)
    peer = next((row for row in rows if row["name"] not in (THIS_REPOSITORY, ADAMW)), rows[0])
    name, _, _ = peer["name"].partition(",")
    title = f"After {settings['minutes']:g} minutes, {scale * ours:.2f} {unit}; {name} has "
    axis.set_title(f"{title}{scale * peer['bits']:.2f}\n({tables.machine_of(result)})")
    axis.set_ylabel(f"{unit} of held-out {plots.name_text(settings, 'text')}")
    plots.label_x(axis, "minutes of training, with compiling")
    axis.set_xticks(range(1 + round(settings["minutes"])))
    plots.label_lines(axis)
    return figure


def plot_budgets(races: list[dict]) -> Any:
    """Final bits per byte by minutes, a line for each side: mean and range of its seeds."""
    figure, [axis] = plots.new_figure(1, 1)
    ends: dict[str, list] = {}
    races = sorted(races, key=lambda race: race["config"]["minutes"])
    for race in races:
        for row in summarize(race):
            low, high = (float(bound[-1]) for bound in row["range"])
            end = (race["config"]["minutes"], row["bits"], row["bits"] - low, high - row["bits"])
            ends.setdefault(row["name"], []).append(end)
    last = {name: found[-1][1] for name, found in ends.items()}
    for name, found in ends.items():
        minutes, bits, *error = np.array(found).T
        axis.errorbar(minutes, bits, error, marker="o", ms=4, clip_on=False, **STYLES[name])
        axis.lines[-1].set_label(f"{name} {last[name]:.3f}")
    peer = min(bits for name, bits in last.items() if name not in (THIS_REPOSITORY, ADAMW))
    share = (last[ADAMW] - last[THIS_REPOSITORY]) / (peer - last[THIS_REPOSITORY])
    most = races[-1]["config"]["minutes"]
    title = f"Muon is {share:.0%} of the lead after {most:g} minutes"
    axis.set_title(f"{title}\n({tables.machine_of(races[-1])})")
    text = plots.name_text(races[0]["config"], "text")
    axis.set(xscale="log", ylabel=f"bits per byte of held-out {text}")
    budgets = sorted({race["config"]["minutes"] for race in races})
    axis.set_xticks(budgets, [f"{minutes:g}" for minutes in budgets])
    axis.minorticks_off()
    axis.set_xlabel("minutes of training, each run with a schedule of its own")
    plots.label_lines(axis)
    return figure


def main(args: list[str]) -> None:
    config = parse_flags(MinutesConfig, args)
    result = race(config, shlex.join(["python", "-m", "benchmarks.race", *args]))
    print(f"\n{tables.format_table(summarize(result), COLUMNS)}\n\nplot: {config.out}.png")


if __name__ == "__main__":
    run_script(main)

"""Text → token shards: FineWeb-Edu, any other text dataset of the Hugging Face hub, or your files.

    python fineweb.py                                         FineWeb-Edu's 10B tokens
    python fineweb.py --source stdlib --data-dir data/stdlib  Python's own library, no network
    python fineweb.py --source 'mine/*.jsonl' notes.txt       your own text

A thread reads text (`read_batches`), worker processes turn it into tokens (`tokenize`), and `pack`
cuts the stream of tokens into shards. `save_shard` writes each shard whole or not at all, and
notes in `manifest.json` where to resume. Kill it at any time and start it again: the shards are
byte for byte the same. Memory stays flat: under 1 GB for this process.
"""

import glob
import hashlib
import itertools
import json
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from support.common import UserError, hash_file, write_whole
from support.decontaminate import Benchmark, cut_out
from support.shards import write_shard
from support.text import Text, find_changes, find_sources, read_batches
from support.tokenizer import EOT, encode_to_arrays
from support.workers import map_ahead, run_and_exit, start_pool

NOT_SHAPING = ("data_dir", "workers", "overwrite", "verify")  # they do not change the shards
SHORTEST = 128  # tokens: the quickstart's sequences; other presets have longer ones


@dataclass
class Config:
    """Turns text into shards of GPT-2 tokens. The same command goes on after an interruption."""

    # fineweb-edu-10B, fineweb-edu-100B, fineweb-edu-350B, fineweb-10B, tinystories, openwebtext,
    # tinyshakespeare, stdlib (Python's library), python (stdlib and the installed packages, some of
    # them held out), hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]], or paths and globs of .txt, .jsonl
    # and .parquet files
    source: tuple[str, ...] = ("fineweb-edu-10B",)
    data_dir: str = ""  # default: edu_fineweb10B for fineweb-edu-10B, data/NAME for other sources
    name: str = ""  # the shards' names begin with it; default: from the source
    shard_size: int = 100_000_000  # tokens per shard, two bytes each
    # tokens of the first shard, or a few more, up to the end of a document; 0 = a whole shard,
    # or 5% of the text if it fills fewer than two shards
    val_tokens: int = 0
    max_tokens: int = 0  # where to stop; 0 = at the end
    workers: int = 0  # processes that tokenize; 0 = one per core
    column: str = "text"  # with the text, in .jsonl, .parquet and hub files
    revision: str = ""  # commit, branch or tag on the hub; default: the newest commit
    decontaminate: bool = False  # cut out text that shares 13 words in a row with HellaSwag
    hellaswag_path: str = ""  # its validation set as a local .jsonl file; default: download it
    overwrite: bool = False  # make data_dir's shards anew if they are complete or do not match
    verify: bool = False  # only compare all shards in data_dir with the manifest


# -- what the workers do

START = np.array([EOT], np.uint32)  # comes before each document
COUNTS = ("documents", "contaminated", "cuts", "dropped")  # what the manifest counts


def tokenize(texts: list[Text]) -> tuple[np.ndarray, dict[str, int]]:
    """Texts → uint16 tokens, without what the benchmark has too; and the COUNTS of these texts."""
    tokens = [START[:0]]
    counts: Counter = Counter()
    for text, starts in texts:
        spans, cuts = cut_out(text, benchmark_of_worker.find(text) if benchmark_of_worker else [])
        for start, end in spans:
            parts = encode_to_arrays(text[start:end])
            if starts or start > 0:  # what is left behind a cut is a document of its own
                parts.insert(0, START)
            tokens += parts
        counts.update(documents=starts, contaminated=cuts > 0, cuts=cuts, dropped=not spans)
    return np.concatenate(tokens, dtype=np.uint16, casting="unsafe"), counts  # all below 2**16


benchmark_of_worker: Benchmark | None = None  # what --decontaminate looks for


def prepare_worker(benchmark: Benchmark | None) -> None:
    global benchmark_of_worker
    benchmark_of_worker = benchmark


# -- the stream


@dataclass(frozen=True)
class Cursor:
    """Where a shard begins: a batch, a token in it, and the counts before the batch."""

    file: int  # the number of the file in which the batch begins
    text: int  # the number of its first text in this file
    last: int  # the number of the file in which it ends
    counts: dict[str, int]  # COUNTS of all texts before the batch
    token: int = 0  # tokens of the batch that earlier shards hold


Stream = Iterator[tuple[Cursor, np.ndarray]]  # batch after batch: where it begins, its tokens


def stream_tokens(batches: Iterable, limit: int, counts: Counter, bar) -> Stream:
    """Yields each batch, up to `limit` tokens in all, and adds its COUNTS to `counts`."""
    for (file, text, last), (tokens, counted) in batches:
        cursor = Cursor(file, text, last, dict(counts))
        counts.update(counted)
        bar.update(len(tokens[:limit]))
        yield cursor, tokens[:limit]
        limit -= len(tokens)
        if limit <= 0:
            return


# -- packing


def pack(
    stream: Stream,
    shard_size: int,
    val_tokens: int,
    index: int = 0,
    done: int = 0,
    held_out: int = 0,
) -> Iterator[tuple[int, list[np.ndarray], Cursor]]:
    """Cuts the stream into shards: yields (index, tokens in parts, cursor).

    Documents lie end to end. A shard may end inside a document, because training reads one long
    stream: nothing has to be padded, dropped or put in another order. A shard is a list of slices
    of the batches, to be written one after another: nothing is copied.

    The cursor with a shard says where the next one begins. To resume there, give a stream that
    starts with its batch, and its `token` as `done`. The shards depend on no other state, so a
    killed run makes the same shards as an uninterrupted one.

    Shard 0 is for validation and may have another size. It depends on the amount of text, so pack
    first reads as many tokens as two shards hold.
    """
    missing = shard_size  # tokens, until the shard is full
    if index == 0:
        head = take_tokens(stream, 2 * shard_size)
        first = [tokens for _, tokens in head]
        missing = choose_val_tokens(first, shard_size, val_tokens, held_out)
        stream = itertools.chain(pop_all(head), stream)
    parts: list[np.ndarray] = []
    for cursor, tokens in stream:
        while done < len(tokens):
            part = tokens[done : done + missing]
            parts.append(part)
            done += len(part)
            missing -= len(part)
            if not missing:
                yield index, parts, replace(cursor, token=done)
                index += 1
                parts = []
                missing = shard_size
        done = 0
    if parts:
        yield index, parts, replace(cursor, token=len(tokens))


def take_tokens(stream: Stream, count: int) -> deque:
    """The next items of a stream, with at least `count` tokens, or all."""
    head: deque = deque()
    while count > 0 and (item := next(stream, None)):
        head.append(item)
        count -= len(item[1])
    return head


def pop_all(head: deque) -> Iterator:
    """Yields each item and keeps none: itertools.chain(head) would hold all to the end."""
    while head:
        yield head.popleft()


def choose_val_tokens(
    head: list[np.ndarray], shard_size: int, val_tokens: int, held_out: int = 0
) -> int:
    """The number of tokens for validation. head: the tokens of two shards, or all if fewer.

    If a source holds out documents, it is what the first `held_out` have. Else it is `val_tokens`,
    by default a whole shard, or 5% if two shards do not fill. If the next document starts near, the
    tokens up to its start are added.
    """
    begins = np.cumsum([0, *map(len, head)])
    total = int(begins[-1])
    starts = [at + np.flatnonzero(part == EOT) for at, part in zip(begins, head, strict=False)]
    documents = np.concatenate([np.zeros(0, int), *starts])
    if held_out:
        wanted = int(documents[held_out]) if held_out < len(documents) else total
    elif val_tokens:
        wanted = val_tokens
    elif total >= 2 * shard_size:
        wanted = shard_size
    else:
        wanted = max(1, total // 20)
    if wanted >= total:
        raise UserError(f"{total} tokens, {wanted} for validation: nothing is left to train on")
    near = documents[(documents >= wanted) & (documents <= min(2 * wanted, shard_size))]
    val = int(near[0]) if len(near) else wanted
    if (fewest := min(val, total - val)) <= SHORTEST:
        split = "val" if fewest == val else "train"
        told = f"warning: the {split} split has {fewest} tokens, less than a sequence of any preset"
        print(f"{told}: add text, or change --val-tokens", file=sys.stderr)
    return val


# -- the manifest: how the shards were made, what is in them, where to go on

MANIFEST = "manifest.json"
KEYS = {"options", "sources", "shards", "tokens", "counts", "cursor"}
GONE = {"deduplicate": False}  # removed options, with the only value that still works


def open_manifest(folder: Path, options: dict, overwrite: bool) -> dict:
    """Returns the manifest of a folder, or a first one. Refuses a folder that does not match."""
    first = {
        "options": options,
        "sources": {},
        "files": {},
        "shards": [],
        "tokens": 0,
        "counts": dict.fromkeys(COUNTS, 0),
        "cursor": {"file": 0, "text": 0, "token": 0},
    }
    if not (folder / MANIFEST).exists():
        if strange := sorted(folder.glob("*.npy")):
            raise UserError(f"{folder} holds {strange[0].name}; choose another --data-dir")
        return first
    manifest = read_manifest(folder)
    before = GONE | manifest["options"]
    changes = [
        f"--{key.replace('_', '-')} was {before[key]}, not {value}"
        for key, value in (GONE | options).items()
        if before.get(key, value) != value  # older manifests lack some
    ]
    names = [shard["name"] for shard in manifest["shards"]]
    changes += [f"{name} is missing" for name in names if not (folder / name).exists()]
    if "files" in manifest:
        all_read = not manifest["cursor"] and manifest["tokens"] != options["max_tokens"]
        changes += find_changes(options["source"], manifest["files"], all_read)
    if changes and not overwrite:
        told = f"{folder} does not match: {'; '.join(changes[:9])} ({len(changes)} in all)"
        raise UserError(f"{told}; choose another --data-dir, or make it anew with --overwrite")
    return first if overwrite and (changes or not manifest["cursor"]) else manifest


def read_manifest(folder: Path) -> dict:
    """Raises UserError if the manifest is missing, or is not what `write_manifest` has written."""
    path = folder / MANIFEST
    try:
        manifest = dict(json.loads(path.read_bytes()))
        written = manifest.pop("checksum", None)  # the oldest have none
        if written not in (None, checksum(manifest)) or KEYS - manifest.keys():
            raise ValueError("it is incomplete, or its checksum differs")
    except (OSError, ValueError, TypeError) as error:
        told = f"{path} cannot be read ({error!r})"
        raise UserError(f"{told}; to verify or to go on, put back a copy") from error
    return manifest


def write_manifest(folder: Path, manifest: dict) -> None:
    text = json.dumps(manifest | {"checksum": checksum(manifest)}, indent=1) + "\n"
    write_whole(folder / MANIFEST, text.encode())


def checksum(manifest: dict) -> str:
    """The SHA-256. Without it, a damaged cursor would silently lose text."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def verify_shards(folder: Path) -> str:
    """Compares each shard with its SHA-256 in the manifest. Raises UserError if they differ."""
    recorded = {shard["name"]: shard["sha256"] for shard in read_manifest(folder)["shards"]}
    damaged = [
        name
        for name, sha256 in recorded.items()
        if not (folder / name).exists() or hash_file(folder / name) != sha256
    ]
    if damaged:
        raise UserError(
            f"{folder}: missing or damaged: {', '.join(damaged)}; --overwrite makes all anew"
        )
    return f"{folder}: all {len(recorded)} shards are as they were written"


# -- one start of the command


def make_shards(config: Config, folder: Path) -> str:
    """Fills the folder with shards. Returns a sentence about what is in it then."""
    from filelock import FileLock, Timeout

    options = {key: value for key, value in asdict(config).items() if key not in NOT_SHAPING}
    options["source"] = list(config.source)
    try:
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=1):  # a killed process's workers hold it a moment
            manifest = open_manifest(folder, options, config.overwrite)
            if not manifest["cursor"]:
                return f"{folder} is complete, with {manifest['tokens']:,} tokens: nothing to do"
            try:
                write_shards(config, folder, manifest)
            finally:
                if new and not (folder / MANIFEST).exists():  # folders come with the first shard
                    (folder / ".lock").unlink()
                    for path in new:
                        path.rmdir()
    except Timeout:
        raise UserError(f"another process is writing to {folder}: wait for it") from None
    except OSError as error:  # of writing: errors of reading are UserErrors
        raise UserError(f"{folder} cannot be written ({error}); fix that to go on") from None
    except BrokenProcessPool:
        raise UserError("a worker was killed: to go on, try fewer --workers") from None
    counted = ", ".join(f"{n:,} {name}" for name, n in manifest["counts"].items() if n)
    return (
        f"{folder}: {manifest['tokens']:,} tokens in {len(manifest['shards'])} shards ({counted})"
    )


def write_shards(config: Config, folder: Path, manifest: dict) -> None:
    """Writes the shards that are missing, each while the next one is filled."""
    from tqdm import tqdm

    found = find_sources(config.source, config.column, config.revision, manifest["sources"])
    files = sorted(found, key=lambda file: not file.held_out)
    benchmark = load_benchmark(config.hellaswag_path) if config.decontaminate else None
    start = manifest["cursor"]
    for left in (*folder.glob(f".{config.name}_*.npy.*.tmp"), *folder.glob(f".{MANIFEST}.*.tmp")):
        left.unlink()  # a killed process left them
    # the first start["token"] tokens of the stream are written already
    limit = start["token"] + (config.max_tokens or sys.maxsize) - manifest["tokens"]
    counts = Counter(manifest["counts"])
    pool = start_pool(config.workers, prepare_worker, benchmark)
    bar = tqdm(
        desc=config.name,
        initial=manifest["tokens"],
        total=config.max_tokens or None,
        unit="tok",
        unit_scale=True,
        disable=None,  # None: only in a terminal
    )
    # each of these steps is lazy: it works when the next one asks
    texts = read_batches(files, start["file"], start["text"])
    batches = map_ahead(pool, tokenize, texts, ahead=2 * config.workers + 1)
    stream = stream_tokens(batches, limit, counts, bar)
    shards = pack(
        stream,
        shard_size=config.shard_size,
        val_tokens=config.val_tokens,
        index=len(manifest["shards"]),
        done=start["token"],
        held_out=sum(file.held_out for file in files),
    )
    with bar, ThreadPoolExecutor(1) as writer:
        writing: list[Future] = []
        for index, parts, cursor in shards:
            read = {file.name: file.stamp for file in files[: cursor.last + 1] if file.stamp}
            while writing:
                writing.pop().result()  # never two at a time: shards are large
            writing.append(writer.submit(save_shard, folder, manifest, index, parts, cursor, read))
        while writing:
            writing.pop().result()
    if manifest["tokens"] != config.max_tokens:
        manifest.get("files", {}).update({file.name: file.stamp for file in files if file.stamp})
    manifest["counts"] = dict(counts)
    manifest["cursor"] = None
    write_manifest(folder, manifest)


def save_shard(
    folder: Path, manifest: dict, index: int, parts: list[np.ndarray], cursor: Cursor, read: dict
) -> None:
    """Writes a shard, then the manifest: there is always a place to go on from. read: stamps."""
    if index == 0:
        if (folder / MANIFEST).exists():  # --overwrite
            old = glob.escape(read_manifest(folder)["options"]["name"])
            for path in folder.glob(f"{old}_*_*.npy"):
                path.unlink()
        write_manifest(folder, manifest)
    split = "train" if index else "val"
    name = f"{manifest['options']['name']}_{split}_{index:06d}.npy"
    count = sum(map(len, parts))
    sha256 = write_shard(folder / name, parts)
    manifest["shards"].append({"name": name, "split": split, "tokens": count, "sha256": sha256})
    manifest["tokens"] += count
    manifest["counts"] = cursor.counts
    manifest["cursor"] = {key: getattr(cursor, key) for key in ("file", "text", "token")}
    manifest.get("files", {}).update(read)
    write_manifest(folder, manifest)


def load_benchmark(path: str) -> Benchmark:
    """HellaSwag's validation set, each ending behind its context."""
    from hellaswag import iterate_examples

    return Benchmark(
        f"{x['ctx']} {ending}" for x in iterate_examples("val", path) for ending in x["endings"]
    )


# -- the command line


def check_flags(config: Config) -> None:
    """Raises UserError with all that is wrong with the command line."""
    limits = {
        "shard_size": (1, sys.maxsize),
        "val_tokens": (0, config.shard_size),
        "max_tokens": (0, sys.maxsize),
        "workers": (0, 1000),
    }
    problems = [
        f"--{key.replace('_', '-')} {getattr(config, key)} is not between {least} and {most}"
        for key, (least, most) in limits.items()
        if not least <= getattr(config, key) <= most
    ]
    if not config.source:
        problems.append("--source names nothing to read")
    if "python" in config.source:
        if "stdlib" in config.source:
            problems.append("--source python contains stdlib: leave stdlib out")
        if config.val_tokens or config.decontaminate:
            told = "--source python holds out whole packages"
            problems.append(f"{told}: leave out --val-tokens and --decontaminate")
    if problems:
        raise UserError("; ".join(problems))


def name_after(source: str) -> str:
    """What the names of the shards begin with, if --name does not say it."""
    if source.startswith("fineweb"):
        return "edufineweb" if "edu" in source else "fineweb"  # the former is build-nanogpt's
    last = source.removeprefix("hub:").partition(":")[0].rpartition("/")[2].partition(".")[0]
    return re.sub(r"[^A-Za-z0-9-]", "", last).lower() or "text"


def main() -> None:
    import tyro

    config = tyro.cli(Config)
    check_flags(config)
    config.name = config.name or name_after(config.source[0])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    config.workers = config.workers or cores or 1
    default = "edu_fineweb10B" if config.source == Config.source else f"data/{config.name}"
    folder = Path(config.data_dir or default)
    if config.verify:
        print(verify_shards(folder))
    else:
        print(make_shards(config, folder))


if __name__ == "__main__":
    run_and_exit(main)

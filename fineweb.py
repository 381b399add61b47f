"""Text → token shards: FineWeb-Edu, any other text dataset of the Hugging Face hub, or your files.

    python fineweb.py                                         FineWeb-Edu's 10B tokens
    python fineweb.py --source stdlib --data-dir data/stdlib  Python's own library, no network
    python fineweb.py --source 'mine/*.jsonl' notes.txt       your own text
    python fineweb.py --source notes.txt --vocab-size auto    with a vocabulary of its own

A thread reads text (`read_batches`), worker processes turn it into tokens (`tokenize`), and `pack`
cuts the stream of tokens into shards. `save_shard` writes each whole or not at all, and notes in
`manifest.json` where to resume. A run that is killed and started again, at any time, makes the
same shards, byte for byte. Memory stays flat: under 1 GB for this process.
"""

import glob
import json
import math
import re
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from minutes import choose_vocab_size
from support.base.errors import UsageError, UserError
from support.base.files import locked
from support.base.flags import Count, CountOrZero, Range, String, Strings, parse_flags
from support.base.process import usable_cores
from support.text import sources
from support.text.decontaminate import Benchmark, cut_out
from support.text.manifest import (
    LITERAL,
    begin_folder,
    open_manifest,
    verify_shards,
    write_manifest,
)
from support.text.names import MANIFEST, TOKENIZER_FILE
from support.text.ready import fetch_shards
from support.text.sources import File, Place, Text
from support.text.token_files import find_shards, write_shard
from support.text.tokenizer import (
    END,
    VOCAB_SIZE,
    Tokenizer,
    read_tokenizer,
    tokenizer_of_data,
    train_vocabulary,
)
from support.text.workers import map_ahead, run_and_exit, start_pool


@dataclass(frozen=True)
class Source:
    """Which text."""

    # fineweb-edu-10B, fineweb-edu-100B, fineweb-edu-350B, fineweb-10B, tinystories, openwebtext,
    # tinyshakespeare, tales (books for children), stdlib (Python's library), a path or glob of
    # text (.txt, .md, .json, .jsonl, .ndjson, .parquet, code; also packed by gzip, bzip2, xz or
    # zstd), hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]], or tokens:OWNER/NAME (ready shards of GPT-2's
    # tokens on the hub)
    source: Strings = ("fineweb-edu-10B",)
    # text for validation, whole: sources as above; default: the beginning of --source, or its own
    val_source: Strings = ()
    column: str = "text"  # the column with the text, in .jsonl, .parquet and hub files
    revision: String = ""  # commit, branch or tag on the hub; default: the newest commit
    decontaminate: bool = False  # cut out text that shares 13 words in a row with HellaSwag
    hellaswag_path: String = ""  # HellaSwag's jsonl file; empty = download it


@dataclass(frozen=True)
class Vocabulary:
    """With either flag, 5% of a text without its own split are held out before it is tokenized."""

    # train a vocabulary of this many tokens, 257 to 65,536, on the training text; auto = by its
    # size; 0 = use GPT-2's
    vocab_size: Annotated[int | Literal["auto"], Range(0, 2**16)] = 0
    tokenizer: String = ""  # use that of a checkpoint or a tokenizer.json; gpt2: GPT-2's


@dataclass(frozen=True)
class Shards:
    """Where the tokens go."""

    data_dir: String = ""  # default: edu_fineweb10B for fineweb-edu-10B, else data/NAME
    name: String = ""  # NAME, with which the shards' names begin; default: from the source
    shard_size: Count = 100_000_000  # tokens per shard, two bytes each
    # tokens for validation, or a few more, up to the end of a document; 0 = a whole shard,
    # or 5% of the text if it fills fewer than two shards
    val_tokens: CountOrZero = 0
    # stop after this many tokens, with those for validation; 0 = at the end of the text
    max_tokens: CountOrZero = 0
    workers: Annotated[int, Range(0, 1000)] = 0  # processes that tokenize; 0 = one per core
    overwrite: bool = False  # rebuild the shards in data_dir if they are complete or do not match
    verify: bool = False  # only check all shards in data_dir against the manifest


@dataclass(frozen=True)
class Config(Shards, Vocabulary, Source):
    """Turns text into token shards. After an interruption, the same command resumes."""


# -- what the workers do


def tokenize(
    texts: list[Text], tokenizer: Tokenizer, benchmark: Benchmark | None
) -> tuple[np.ndarray, dict[str, int]]:
    """Tokenizes texts, without what the benchmark has, too. Returns uint16 tokens and COUNTS."""
    start = np.array([tokenizer.eot], np.uint32)  # comes before each document
    tokens = [start[:0]]
    counts: Counter = Counter()
    for text, starts, around in texts:
        spans, cuts = cut_out(text, benchmark, *around)
        for first, end in spans:
            if starts or first > 0:  # the text behind a cut is a document of its own
                tokens.append(start)
            tokens += tokenizer.encode_to_arrays(text[first:end])
        counts.update(documents=starts, contaminated=cuts > 0, cuts=cuts, dropped=not spans)
        counts[LITERAL] += text.count(END)
    return np.concatenate(tokens, dtype=np.uint16, casting="unsafe"), counts  # all below 2**16


in_worker: dict[str, Any] = {}  # what a worker process is given once, when it starts


def prepare_worker(tokenizer: Tokenizer, benchmark: Benchmark | None) -> None:
    in_worker.update(tokenizer=tokenizer, benchmark=benchmark)


def tokenize_in_worker(texts: list[Text], is_held_out: bool) -> tuple[np.ndarray, dict[str, int]]:
    """`tokenize`. Of text that is held out, nothing is cut out."""
    benchmark = None if is_held_out else in_worker["benchmark"]
    return tokenize(texts, in_worker["tokenizer"], benchmark)


# -- the stream, and how it is packed into shards

Before = tuple[Place, dict[str, int]]  # where a batch begins, and COUNTS of all texts before it
Stream = Iterator[tuple[Before, np.ndarray]]  # of batches: what is before each, and its tokens
# a shard's tokens; what is before the batch where the next one begins, and how many tokens of it
Packed = tuple[list[np.ndarray], Before, int]


def stream_tokens(batches: Iterable, limit: int, counts: Counter, bar: Any, eot: int) -> Stream:
    """Yields each batch, up to `limit` tokens in all, and adds its COUNTS to `counts`."""
    for place, (tokens, added) in batches:
        before = (place, dict(counts))
        if len(tokens) > limit:
            tokens = tokens[:limit]
            added = {**added, "documents": int((tokens == eot).sum())}
        counts.update(added)
        bar.update(len(tokens))
        yield before, tokens
        limit -= len(tokens)
        if not limit:
            return


def hold_out(
    stream: Stream, size: int, val_tokens: int, num_files: int, eot: int
) -> tuple[int, Stream]:
    """How many of the first tokens are for validation, and the stream with all of its tokens.

    They are those of the first `num_files`, if any. Otherwise they are `val_tokens`, by default a
    shard of `size` tokens, or 5% of a text that does not fill two.
    """
    head: deque = deque()
    total = 0  # tokens in the head: those of two shards, or all if there are fewer
    held_out = 0  # of them, in the first `num_files`
    starts: list[int] = []  # of its documents
    is_whole = True
    for before, tokens in stream:
        head.append((before, tokens))
        starts += (total + np.flatnonzero(tokens == eot)).tolist()
        total += len(tokens)
        place, _ = before
        if place.file < num_files:
            held_out = total
        elif total > held_out and total >= 2 * max(size, val_tokens):
            is_whole = False
            break
    wanted = held_out or val_tokens
    if not wanted:
        wanted = size if total >= 2 * size else max(2, total // 20)
    # or more, up to where the next document starts, if that is nearby
    near = (start for start in starts if wanted <= start <= min(2 * wanted, size, total // 2))
    split = next(near, wanted)
    parts = {"validation": (0, held_out if num_files else split)}
    if is_whole:
        parts["training"] = (split, total)
    for purpose, (a, b) in parts.items():
        if sum(a <= start < b for start in starts) >= b - a:  # only <|endoftext|>
            problem = f"of {total} tokens, {max(0, b - a)} are for {purpose}"
            hint = "give other files, or more (--max-tokens counts both)"
            raise UserError(f"{problem}, and they hold no text: {hint}")
    return split, replay(head, stream)


def replay(head: deque, stream: Stream) -> Stream:
    """What was read of a stream, then its rest. No batch stays in memory when it is packed."""
    while head:
        yield head.popleft()
    yield from stream


def pack(stream: Stream, size: int, first: int, done: int = 0) -> Iterator[Packed]:
    """Cuts the stream into shards of `size` tokens, but `first` tokens in the first one.

    A shard may end inside a document, because training reads one long stream. It comes as slices
    of the batches: nothing is copied. To resume behind it, give a stream that starts with its last
    batch, and as `done` how many tokens of that are packed.
    """
    slices: list[np.ndarray] = []
    missing = first  # tokens, until the shard is full
    for before, tokens in stream:
        while done < len(tokens):
            slices.append(tokens[done : done + missing])
            done += len(slices[-1])
            missing -= len(slices[-1])
            if not missing:
                yield slices, before, done
                slices = []
                missing = size
        done = 0
    if slices:
        yield slices, before, len(tokens)


# -- one start of the command

OTHER_FLAGS = ("data_dir", "workers", "overwrite", "verify")  # they do not change the shards


def make_shards(config: Config, folder: Path) -> str:
    """Fills the folder with shards. Returns a sentence about them, and one about validation."""
    given = read_tokenizer(config.tokenizer) if config.tokenizer else None
    if given and given.vocab_size > 2**16:
        problem = f"--tokenizer {config.tokenizer} has {given.vocab_size:,} tokens"
        raise UserError(f"{problem}: a shard can have at most 65,536, because it is of uint16")
    flags = json.loads(json.dumps(asdict(config)))  # with lists, as in the manifest
    options = {name: value for name, value in flags.items() if name not in OTHER_FLAGS}
    if given:
        options["tokenizer"] = given.sha256
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    busy = f"another process is writing to {folder}: wait for it"
    try:
        with locked(folder, 1, busy):  # a killed process's workers hold it a moment
            manifest = open_manifest(folder, options, config.overwrite)
            if not manifest["cursor"]:
                return f"{folder} is complete, with {manifest['tokens']:,} tokens: nothing to do"
            try:
                if config.source[0].startswith("tokens:"):
                    tokenizer, where = fetch_shards(config.source[0], folder, manifest)
                else:
                    tokenizer, where = shard_text(config, folder, manifest, given)
                manifest["cursor"] = None  # complete
                write_manifest(folder, manifest)
            finally:
                if new and not (folder / MANIFEST).exists():  # folders come with the first shard
                    with suppress(OSError):  # another process may have begun to fill them
                        (folder / ".lock").unlink()
                        for path in new:
                            path.rmdir()
    except BrokenProcessPool:
        raise UserError("a worker was killed: to resume, try fewer --workers") from None
    counts = ", ".join(f"{name}: {n:,}" for name, n in manifest["counts"].items() if n)
    held_out = find_shards(folder, "val")
    num_tokens = sum(shard.num_tokens for shard in held_out)
    pieces = (tokens for shard in held_out for tokens in shard.read_all())
    size = sum(tokenizer.sizes[tokens].sum() for tokens in pieces) / num_tokens
    return (
        f"{folder}: {manifest['tokens']:,} tokens in {len(manifest['shards'])} shards ({counts})\n"
        f"vocabulary: {tokenizer}, {size:.2f} bytes per token of the text for validation\n"
        f"for validation: {num_tokens:,} tokens, "
        f"{num_tokens / manifest['tokens']:.1%} of the text, {where}"
    )


def shard_text(
    config: Config, folder: Path, manifest: dict, given: Tokenizer | None
) -> tuple[Tokenizer, str]:
    """Fills the folder from text -> its vocabulary, and which part of it is for validation."""
    files = sources.find_sources(manifest["options"], manifest["sources"])
    most = most_bytes(config.max_tokens, given.vocab_size if given else config.vocab_size)
    if (given or config.vocab_size) and not files[0].held_out:
        manifest["split"] = manifest.get("split") or sources.find_split(files, most)
        files = sources.split(files, manifest["split"])
    benchmark = load_benchmark(config.hellaswag_path) if config.decontaminate else None
    tokenizer = given or read_tokenizer("gpt2")
    if manifest["shards"]:
        tokenizer = tokenizer_of_data(folder)
    elif config.vocab_size:
        tokenizer = train_tokenizer(config.vocab_size, files, most, benchmark)
    if given or config.vocab_size:
        manifest["tokenizer"] = dict(vocab_size=tokenizer.vocab_size, sha256=tokenizer.sha256)
    write_shards(config, folder, manifest, files, tokenizer, benchmark)
    readers = [sources.READERS.get(sources.kind_of(file.name)) for file in files]
    is_plain = sources.read_text in readers
    if (n := manifest["counts"].get(LITERAL)) and is_plain:
        hint = "to make each begin a document, give a .jsonl file with a document in each line"
        print(f"{n:,} times the text itself says {END}, which stays text: {hint}", file=sys.stderr)
    where = files[0].held_out or "its beginning"
    if files[0].local and where == "its beginning":
        where += "; to choose another text: --val-source FILE"
    return tokenizer, where


def most_bytes(max_tokens: int, vocab_size: int | Literal["auto"]) -> float:
    """About how many bytes of text --max-tokens stops after."""
    if not max_tokens:
        return math.inf
    if vocab_size == "auto":
        vocab_size = choose_vocab_size(4 * max_tokens)
    # measured a token: 2.3 with 1,024 of them; with GPT-2's 3.3 (plays) to 4.5 (web pages)
    return max_tokens * min(4.0, (math.log2(vocab_size or VOCAB_SIZE) - 6) / 2)


def train_tokenizer(
    size: int | Literal["auto"], files: list[File], most: float, benchmark: Benchmark | None
) -> Tokenizer:
    """A vocabulary of the text to train on, as large as --vocab-size says."""
    if size == "auto":
        size = choose_vocab_size(sources.find_size(files, most))
    tokenizer = train_vocabulary(sources.read_for_vocabulary(files, benchmark), size)
    if tokenizer.vocab_size < size:
        fewer = f"{tokenizer.vocab_size:,} tokens, not {size:,}"
        print(f"vocabulary: {fewer}: the text has no more pairs that recur", file=sys.stderr)
    return tokenizer


def write_shards(
    config: Config,
    folder: Path,
    manifest: dict,
    files: list[File],
    tokenizer: Tokenizer,
    benchmark: Benchmark | None,
) -> None:
    """Writes the shards that are missing, each while the next one is filled."""
    from tqdm import tqdm

    begin = manifest["cursor"]
    held_out = sum(bool(file.held_out) for file in files)
    for name in (f"{glob.escape(config.name)}_*.npy", MANIFEST, TOKENIZER_FILE):
        for path in folder.glob(f".{name}.*.tmp"):
            path.unlink()  # a killed process left it
    # the first begin["token"] tokens of the stream are written already
    limit = begin["token"] + (config.max_tokens or sys.maxsize) - manifest["tokens"]
    counts = Counter(manifest["counts"])
    pool = start_pool(config.workers, prepare_worker, tokenizer, benchmark)
    patience = 0 if sys.stderr.isatty() else 60  # seconds between lines in a batch job's log
    bar = tqdm(
        desc=config.name,
        initial=manifest["tokens"],
        total=config.max_tokens or None,
        unit="tok",
        unit_scale=True,
        delay=patience,
        mininterval=max(0.1, patience),
        maxinterval=max(10, patience),
    )
    with bar, ThreadPoolExecutor(1) as writer:
        # each of these steps is lazy: it works when the next one asks
        texts = sources.read_batches(files, begin["file"], begin["text"])
        work = ((place, (batch, place.file < held_out)) for place, batch in texts)
        batches = map_ahead(pool, tokenize_in_worker, work, ahead=2 * config.workers + 1)
        stream = stream_tokens(batches, limit, counts, bar, tokenizer.eot)
        size = config.shard_size
        if not manifest["shards"]:
            size, stream = hold_out(stream, size, config.val_tokens, held_out, tokenizer.eot)
        saving = writer.submit(lambda: None)  # never two at a time: shards are large
        for shard in pack(stream, config.shard_size, first=size, done=begin["token"]):
            saving.result()
            saving = writer.submit(save_shard, folder, manifest, files, tokenizer, shard)
        saving.result()
    if manifest["tokens"] != config.max_tokens:
        manifest["files"].update({file.name: file.stamp for file in files if file.stamp})
    manifest["counts"] = dict(counts)


def save_shard(
    folder: Path, manifest: dict, files: list[File], tokenizer: Tokenizer, shard: Packed
) -> None:
    """Writes a shard, then the manifest, so that there is always a place to resume from."""
    slices, (place, counts), done = shard
    index = len(manifest["shards"])
    split = "train" if index else "val"
    name = f"{manifest['options']['name']}_{split}_{index:06d}.npy"
    if index == 0:  # a run that is killed before trains its vocabulary again
        begin_folder(folder, manifest, tokenizer, name)
    count = sum(map(len, slices))
    sha256 = write_shard(folder / name, slices)
    read = files[: place.last_file + 1]  # and, ahead of us, perhaps others
    manifest["files"].update({file.name: file.stamp for file in read if file.stamp})
    manifest["shards"].append({"name": name, "split": split, "tokens": count, "sha256": sha256})
    manifest["tokens"] += count
    manifest["counts"] = counts
    manifest["cursor"] = {"file": place.file, "text": place.text, "token": done}
    write_manifest(folder, manifest)


def load_benchmark(path: str) -> Benchmark:
    """HellaSwag's validation set, each ending behind its context."""
    from hellaswag import iterate_examples

    examples = iterate_examples(path)
    return Benchmark(f"{x['ctx']} {ending}" for x in examples for ending in x["endings"])


# -- the command line


def check_flags(config: Config) -> None:
    """Raises UsageError for flags that do not fit each other."""
    source = config.source[0]
    if source.startswith("tokens:"):
        fitting = ("source", "max_tokens", "revision", *OTHER_FLAGS)
        given = (f.name for f in fields(config) if getattr(config, f.name) != f.default)
        if other := [name for name in given if name not in fitting] or config.source[1:]:
            raise UsageError(f"--source {source} has tokens already: leave out {', '.join(other)}")
    if "/" in config.name:
        where = "--data-dir names the directory"
        raise UsageError(f"--name {config.name}: the names of shards begin with it; {where}")
    if config.hellaswag_path and not config.decontaminate:
        raise UsageError("--hellaswag-path has no effect without --decontaminate")
    if config.vocab_size in range(1, 257) or (config.vocab_size and config.tokenizer):
        raise UsageError("--vocab-size: 257 at least, for all bytes, and no --tokenizer beside it")
    own_split = {"tales", "tinyshakespeare"} & {*config.source}
    if config.val_source and own_split:
        names = " and ".join(sorted(own_split))
        raise UsageError(f"--val-source: {names} has text for validation already")
    splits_text = config.vocab_size or config.tokenizer or config.val_source or own_split
    if config.val_tokens and splits_text:
        raise UsageError(
            "--val-tokens: leave it out, because --vocab-size, --tokenizer, --val-source, "
            "tinyshakespeare and tales split the text before there are tokens"
        )


def name_after(source: str) -> str:
    """What the names of the shards begin with, if --name does not say it."""
    if source.startswith("fineweb"):
        return "edufineweb" if "edu" in source else "fineweb"  # the former is build-nanogpt's
    source = re.sub("^(hub|tokens):", "", source)
    last = source.partition(":")[0].rpartition("/")[2].partition(".")[0]
    return re.sub(r"[^A-Za-z0-9-]", "", last).lower() or "text"


def main(args: list[str]) -> None:
    config = parse_flags(Config, args)
    check_flags(config)
    name = config.name or name_after(config.source[0])
    default = "edu_fineweb10B" if config.source == Config.source else f"data/{name}"
    config = replace(config, name=name, workers=config.workers or usable_cores())
    folder = Path(config.data_dir or default)
    print(verify_shards(folder) if config.verify else make_shards(config, folder))


if __name__ == "__main__":
    run_and_exit(main)

"""Text → token shards: FineWeb-Edu, any other text dataset of the Hugging Face hub, or your files.

    python fineweb.py                                         FineWeb-Edu's 10B tokens
    python fineweb.py --source stdlib --data-dir data/stdlib  Python's own library, no network
    python fineweb.py --source 'mine/*.jsonl' notes.txt       your own text

A thread reads (`read_batches`), processes `tokenize`, `pack` cuts the one long stream of tokens
into shards, and `save_shard` writes each of them whole or not at all, with the place to go on
from in `manifest.json`. Kill it whenever you like and start it again: the result is byte for
byte that of a run left alone. Memory stays flat: under 1 GB for this process.
"""

import hashlib
import itertools
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from support.common import UserError
from support.filters import (
    COUNTS,
    Batch,
    Benchmark,
    Seen,
    cut_out,
    drop_copies,
    hash_document,
    name_counts,
)
from support.manifest import open_manifest, verify_shards, write_manifest
from support.readers import File, Text, count_texts
from support.shards import write_shard
from support.sources import Place, find_sources, read_batches
from support.tokenizer import EOT, encode_to_arrays, get_tokenizer
from support.web import read_patiently
from support.workers import count_cores, map_ahead, run_and_exit, start_pool

MOST_WORKERS = 1000
NOT_SHAPING = ("data_dir", "workers", "hellaswag_path", "dry_run", "verify")  # same shards with any


@dataclass
class Config:
    """Turns text into shards of GPT-2 tokens. Run the same command again to go on after any
    interruption."""

    # fineweb-edu-10B, fineweb-edu-100B, fineweb-edu-350B, fineweb-10B, tinystories, openwebtext,
    # tinyshakespeare, stdlib, hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]], or paths and
    # globs of .txt, .jsonl and .parquet files
    source: tuple[str, ...] = ("fineweb-edu-10B",)
    # where the shards go; default: edu_fineweb10B for fineweb-edu-10B, otherwise data/NAME
    data_dir: str = ""
    name: str = ""  # the shards' names begin with it; default: from the source
    shard_size: int = 100_000_000  # tokens in a shard, two bytes each
    # of the first shard, up to a document's end where it is near; 0 = all, or 5% of less than two
    # shards
    val_tokens: int = 0
    max_tokens: int = 0  # where to stop; 0 = at the end
    workers: int = 0  # processes that tokenize; 0 = one for each core
    column: str = "text"  # of .jsonl and .parquet files: the one that holds the text
    # commit, branch or tag on the hub; default: the newest commit, which the manifest then names
    revision: str = ""
    # drop exact copies of earlier documents, for 16 bytes of memory a document
    deduplicate: bool = False
    # cut out what shares 13 words with HellaSwag's validation set (GPT-3 paper, appendix C)
    decontaminate: bool = False
    hellaswag_path: str = ""  # that set as a local .jsonl file; default: download it
    dry_run: bool = False  # only estimate documents, tokens, disk and time, from the first batch
    verify: bool = False  # only check that all shards of data_dir are what the manifest says


# -- what the workers do

START = np.array([EOT], np.uint32)  # of a document


def tokenize(texts: list[Text]) -> Batch:
    """Texts → tokens, without what the benchmark has too."""
    tokens = [START[:0]]
    lengths = np.zeros(len(texts), int)
    counts = np.zeros((len(texts), len(COUNTS)), int)
    hashes: list[bytes | None] = []
    for i, (text, starts, ends) in enumerate(texts):
        matches = benchmark_of_worker.find(text) if benchmark_of_worker else []
        spans, cuts = cut_out(text, matches)
        for start, end in spans:
            parts = encode_to_arrays(text[start:end])
            if starts or start > 0:  # what is left behind a cut is a document of its own
                parts.insert(0, START)
            lengths[i] += sum(map(len, parts))
            tokens += parts
        counts[i] = (starts, cuts > 0, cuts, not spans, 0)  # in the order of COUNTS
        hashes.append(hash_document(text) if starts and ends else None)
    joined = np.concatenate(tokens, dtype=np.uint16, casting="unsafe")  # all are below 2**16
    return Batch(joined, lengths, counts, hashes)


benchmark_of_worker: Benchmark | None = None  # what --decontaminate looks for


def prepare_worker(benchmark: Benchmark | None) -> None:
    global benchmark_of_worker
    benchmark_of_worker = benchmark
    get_tokenizer()


# -- the stream


@dataclass(frozen=True)
class Cursor:
    """A place in the stream: a batch, and what was counted before it. Shards begin at one."""

    file: int  # the number of the file in which the batch begins
    text: int  # the number of its first text in this file
    hashes: int  # documents that --deduplicate has seen before the batch
    counts: dict[str, int]  # COUNTS of all texts before the batch
    token: int = 0  # tokens of the batch that earlier shards hold


Stream = Iterator[tuple[Cursor, np.ndarray]]  # batch after batch: where it begins, its tokens


def stream_tokens(
    batches: Iterable[tuple[Place, Batch]], limit: int, seen: Seen | None, counts: np.ndarray, bar
) -> Stream:
    """Yields the tokens of each batch, without copies, up to `limit` tokens in all.

    The texts of a batch are added to `counts`, its tokens to the progress bar.
    """
    for (file, text), batch in batches:
        hashes = seen.count if seen else 0
        cursor = Cursor(file, text, hashes, name_counts(counts))
        if seen:
            batch = drop_copies(batch, seen)
        tokens = batch.tokens[:limit]
        used = np.searchsorted(np.cumsum(batch.lengths), limit) + 1  # texts that are read
        counts += batch.counts[:used].sum(axis=0)
        bar.update(len(tokens))
        yield cursor, tokens
        limit -= len(tokens)
        if limit <= 0:
            return


# -- packing


def pack(
    stream: Stream, shard_size: int, val_tokens: int, index: int = 0, done: int = 0
) -> Iterator[tuple[int, list[np.ndarray], Cursor]]:
    """Cuts the stream into shards: yields (index, tokens in parts, cursor).

    Documents lie end to end, and a shard ends where it is full, be it inside a document: training
    reads one long stream, so nothing has to be padded, dropped or put in another order. A shard
    is a list of slices of the batches, to be written one after another: nothing is copied.

    The cursor with a shard says where the next one begins. To go on from there, give a stream that
    starts with its batch, and its `token` as `done`. No other state leads from one shard to the
    next, which is why a killed run and one that was left alone make the same shards.

    Shard 0 is for validation and may be smaller. Its size depends on how much text there is, so
    two shards' worth of tokens is read before this one is cut.
    """
    missing = shard_size  # tokens, until the shard is full
    if index == 0:
        head = take_tokens(stream, 2 * shard_size)
        missing = choose_val_tokens([tokens for _, tokens in head], shard_size, val_tokens)
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


def choose_val_tokens(head: list[np.ndarray], shard_size: int, val_tokens: int) -> int:
    """How many tokens are for validation, if `head` are the first two shards' worth or all.

    `val_tokens` of them, or by default a whole shard, or 5% if there are not two shards; then on
    to where the next document starts, if it starts near.
    """
    begins = np.cumsum([0, *map(len, head)])
    total = int(begins[-1])
    if val_tokens:
        wanted = val_tokens
    elif total >= 2 * shard_size:
        wanted = shard_size
    else:
        wanted = max(1, total // 20)
    if wanted >= total:
        told = f"the source has {total} tokens, of which {wanted} are for validation"
        raise UserError(f"{told}: nothing is left to train on")
    starts = [at + np.flatnonzero(part == EOT) for at, part in zip(begins, head, strict=False)]
    documents = np.concatenate(starts)
    near = documents[(documents >= wanted) & (documents <= min(2 * wanted, shard_size))]
    return int(near[0]) if len(near) else wanted


# -- one start of the command


def load_benchmark(path: str) -> Benchmark:
    """HellaSwag's validation set, each ending behind its context."""
    from support.examples import iterate_examples

    examples = iterate_examples("val", path)
    return Benchmark(f"{x['ctx']} {ending}" for x in examples for ending in x["endings"])


class Job:
    """Makes the shards that a folder still lacks, from where its manifest says to go on."""

    def __init__(self, config: Config, folder: Path, manifest: dict):
        self.config = config
        self.folder = folder
        self.manifest = manifest
        commits = manifest["sources"]
        self.files = find_sources(config.source, config.column, config.revision, commits)
        self.benchmark = load_benchmark(config.hellaswag_path) if config.decontaminate else None
        start = manifest["cursor"]
        self.start = Cursor(
            start["file"], start["text"], start["hashes"], manifest["counts"], start["token"]
        )
        if start["read"] not in (None, self.fingerprint(self.start.file)):
            raise source_changed(folder)
        for written in (f"{config.name}_*.npy", "manifest.json"):
            for unfinished in folder.glob(f".{written}.*.tmp"):  # by a process that was killed
                unfinished.unlink()
        self.seen = Seen(folder / ".hashes", self.start.hashes) if config.deduplicate else None
        self.counts = np.array([self.start.counts[name] for name in COUNTS])

    def fingerprint(self, last: int) -> str:
        """A hash of the benchmark and of the files up to number `last`, by name and size."""
        read = "".join(f"{file.name} {file.size}\n" for file in self.files[: last + 1])
        hashes = self.benchmark.hashes.tobytes() if self.benchmark else b""
        return hashlib.sha256(read.encode(errors="surrogateescape") + hashes).hexdigest()

    def run(self) -> str:
        """Writes each shard while the next one is filled. Returns what is in the folder then."""
        from tqdm import tqdm

        pool = start_pool(self.config.workers, prepare_worker, self.benchmark)
        bar = tqdm(
            desc=self.config.name,
            initial=self.manifest["tokens"],
            total=self.config.max_tokens or None,
            unit="tok",
            unit_scale=True,
            disable=None if sys.stderr else True,  # None: none where stderr is no terminal
        )
        with bar, ThreadPoolExecutor(1) as writer:
            writing = writer.submit(write_manifest, self.folder, self.manifest)
            for index, parts, cursor in self.pack_shards(pool, bar):
                writing.result()  # never two at a time: shards are large
                writing = writer.submit(self.save_shard, index, parts, cursor)
            writing.result()
        return self.finish()

    def pack_shards(
        self, pool: ProcessPoolExecutor, bar
    ) -> Iterator[tuple[int, list[np.ndarray], Cursor]]:
        """The shards still to be made. Each step below is lazy: it works when the next one asks."""
        config = self.config
        start = self.start
        limit = sys.maxsize
        if config.max_tokens:  # the first start.token tokens of the stream are written already
            limit = start.token + config.max_tokens - self.manifest["tokens"]
        texts = read_batches(self.files, start.file, start.text)
        batches = map_ahead(pool, tokenize, texts, ahead=2 * config.workers + 1)
        stream = stream_tokens(batches, limit, self.seen, self.counts, bar)
        if self.manifest["shards"]:
            stream = self.check_beginning(stream)
        return pack(
            stream,
            shard_size=config.shard_size,
            val_tokens=config.val_tokens,
            index=len(self.manifest["shards"]),
            done=start.token,
        )

    def check_beginning(self, stream: Stream) -> Stream:
        """The stream. Raises UserError if the last shard cannot have ended at its beginning."""
        first = next(stream, None)
        if first is None:
            raise source_changed(self.folder)
        cursor, tokens = first
        same_place = (cursor.file, cursor.text) == (self.start.file, self.start.text)
        if not same_place or len(tokens) < self.start.token:
            raise source_changed(self.folder)
        return itertools.chain([first], stream)

    def save_shard(self, index: int, parts: list[np.ndarray], cursor: Cursor) -> None:
        """Writes a shard, then the manifest: there is always a place to go on from."""
        if self.seen:
            self.seen.write_to_disk()
        split = "train" if index else "val"
        count = sum(map(len, parts))
        name = f"{self.config.name}_{split}_{index:06d}.npy"
        sha256 = write_shard(self.folder / name, parts)
        shard = {"name": name, "split": split, "tokens": count, "sha256": sha256}
        self.manifest["shards"].append(shard)
        self.manifest["tokens"] += count
        self.manifest["counts"] = cursor.counts
        self.manifest["cursor"] = {
            "file": cursor.file,
            "text": cursor.text,
            "hashes": cursor.hashes,
            "token": cursor.token,
            "read": self.fingerprint(cursor.file),
        }
        write_manifest(self.folder, self.manifest)

    def finish(self) -> str:
        """Marks the folder as complete. Returns what is in it."""
        self.manifest["counts"] = name_counts(self.counts)
        self.manifest["cursor"] = None
        write_manifest(self.folder, self.manifest)
        if self.seen:
            self.seen.delete()
        counted = ", ".join(f"{n:,} {name}" for name, n in self.manifest["counts"].items() if n)
        tokens = f"{self.manifest['tokens']:,} tokens in {len(self.manifest['shards'])} shards"
        return f"{self.folder}: {tokens} ({counted})"


def source_changed(folder: Path) -> UserError:
    told = f"what was read before {folder} was left off has changed since"
    return UserError(f"{told}; delete it and start again")


# -- the command line


def check_flags(config: Config) -> None:
    """Raises UserError that tells all that is wrong with the command line."""
    problems = []
    smallest = {"shard_size": 1, "workers": 0, "max_tokens": 0, "val_tokens": 0}
    for field, least in smallest.items():
        value = getattr(config, field)
        if value < least:
            problems.append(f"--{field.replace('_', '-')} {value} is less than {least}")
    if config.workers > MOST_WORKERS:
        problems.append(f"--workers {config.workers} are more than {MOST_WORKERS}")
    if not config.source:
        problems.append("--source names nothing to read")
    if config.val_tokens > config.shard_size:
        told = f"--val-tokens {config.val_tokens} are more than one shard"
        problems.append(f"{told}: raise --shard-size {config.shard_size}")
    if not re.fullmatch(r"[\w.-]*", config.name):
        told = f"--name {config.name!r} cannot begin a file name"
        problems.append(f"{told}; letters, digits, '.', '_' and '-' can")
    if problems:
        raise UserError("; ".join(problems))


def name_after(source: str) -> str:
    """What the names of the shards begin with, if --name does not say it."""
    if source.startswith("fineweb"):
        return "edufineweb" if "edu" in source else "fineweb"  # the former is build-nanogpt's
    path = source.removeprefix("hub:").split(":")[0]
    last = path.rpartition("/")[2].partition(".")[0]
    return re.sub(r"[^A-Za-z0-9-]", "", last).lower() or "text"


def estimate_corpus(files: list[File], workers: int) -> str:
    """What all files will come to, judged by the first batch of documents."""
    batches = read_batches(files)
    _, texts = next(batches, (None, []))
    second = next(batches, None)
    if not second and not any(text.text for text in texts):
        raise UserError("there is no text in it: nothing to estimate; give another --source")
    get_tokenizer()
    began = time.perf_counter()
    tokens = len(tokenize(texts).tokens)
    minutes = (time.perf_counter() - began) / 60 / workers
    share = share_before(files, second[0]) if second else 1.0
    free = shutil.disk_usage(".").free / 1e9
    return (
        f"about {len(texts) / share:,.0f} documents, {tokens / share:,.0f} tokens, "
        f"{2 * tokens / share / 1e9:,.3f} GB of shards ({free:,.0f} GB are free here), "
        f"{minutes / share:,.1f} minutes with {workers} workers if reading keeps up"
    )


def share_before(files: list[File], place: Place) -> float:
    """How much of all files comes before a place, between 0 and 1."""
    last, number = place
    sizes = [file.size or 1 for file in files]  # the hub's files are about the same size
    file = files[last]
    [count] = read_patiently(file.name, lambda: iter([count_texts(file)]))
    return (sum(sizes[:last]) + sizes[last] * number / count) / sum(sizes)


def make_shards(config: Config, folder: Path) -> str:
    """Fills the folder with shards, and returns what is in it then.

    Raises UserError if it cannot, or if another process is doing it.
    """
    from filelock import FileLock, Timeout

    options = {key: value for key, value in asdict(config).items() if key not in NOT_SHAPING}
    options["source"] = list(config.source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=1):  # a killed process's workers hold it a moment
            manifest = open_manifest(folder, options)
            if manifest["cursor"]:
                return Job(config, folder, manifest).run()
            (folder / ".hashes").unlink(missing_ok=True)  # a kill at the very end leaves it
            return f"{folder} is complete, with {manifest['tokens']:,} tokens: nothing to do"
    except Timeout:
        told = f"another process is writing to {folder}"
        raise UserError(f"{told}; wait for it, or choose another --data-dir") from None
    except OSError as error:  # of writing: `read_patiently` tells those of reading
        told = f"{folder} cannot be written ({error.strerror or error})"
        raise UserError(f"{told}; that mended, the same command goes on") from None
    except BrokenProcessPool:
        told = "a worker was killed, for want of memory?"
        raise UserError(f"{told} the same command goes on, as does --workers 1") from None


def main() -> None:
    import tyro

    config = tyro.cli(Config)
    check_flags(config)
    config.name = config.name or name_after(config.source[0])
    config.workers = config.workers or count_cores()
    default = "edu_fineweb10B" if config.source == Config.source else f"data/{config.name}"
    folder = Path(config.data_dir or default)
    if config.verify:
        verify_shards(folder)
    elif config.dry_run:
        files = find_sources(config.source, config.column, config.revision, {})
        print(f"{', '.join(config.source)}: {estimate_corpus(files, config.workers)}")
    else:
        print(make_shards(config, folder))


INTERRUPTED = "interrupted: the same command goes on from the last whole shard"

if __name__ == "__main__":
    run_and_exit(main, INTERRUPTED)

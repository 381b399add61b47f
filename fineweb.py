"""Text → token shards: FineWeb-Edu, any other text dataset of the Hugging Face hub, your own files, or what is at hand.

    python fineweb.py                                            FineWeb-Edu's 10B tokens → edu_fineweb10B/
    python fineweb.py --source stdlib --data-dir data/stdlib     the running Python's standard library, no network
    python fineweb.py --source 'mine/*.jsonl' notes.txt          your own text

`documents` reads, processes `tokenize`, `pack` cuts the one long stream of tokens into shards, and `save` writes each of
them whole or not at all, with the place to go on from in `manifest.json`. Kill it whenever you like and start it again: the
result is byte for byte that of a run left alone. Memory stays flat: under 1 GB for this process.
"""

import codecs
import glob
import gzip
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
import tokenize as python_source
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokenizer import EOT, UserError, get_tokenizer, run_script

HUB = {  # name: hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]]
    "fineweb-edu-10B": "hub:HuggingFaceFW/fineweb-edu:sample-10BT",
    "fineweb-edu-100B": "hub:HuggingFaceFW/fineweb-edu:sample-100BT",
    "fineweb-edu-350B": "hub:HuggingFaceFW/fineweb-edu:sample-350BT",
    "fineweb-10B": "hub:HuggingFaceFW/fineweb:sample-10BT",
    "tinystories": "hub:roneneldan/TinyStories",
    "openwebtext": "hub:Skylion007/openwebtext",
}
TINYSHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
NOT_MODULES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "pydoc_data", "__pycache__"}
BATCH_DOCUMENTS, BATCH_CHARS = 1000, 2**20  # what a worker gets at a time, at most
STRETCH = 2**20  # bytes of a text file that are one piece of work
WAITS = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)  # seconds before reading from the network is tried again
COUNTS = ("documents", "contaminated", "cuts", "dropped", "duplicates", "hashes")  # what the manifest counts


@dataclass
class Config:
    """Turns text into shards of GPT-2 tokens. Run the same command again to go on after any interruption."""

    # fineweb-edu-10B, fineweb-edu-100B, fineweb-edu-350B, fineweb-10B, tinystories, openwebtext, tinyshakespeare, stdlib,
    # hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]], or paths and globs of .txt, .jsonl and .parquet files.
    source: tuple[str, ...] = ("fineweb-edu-10B",)
    # Where the shards go. Default: edu_fineweb10B for fineweb-edu-10B, otherwise data/NAME.
    data_dir: str = ""
    # Start of the shards' file names. Default: from the source.
    name: str = ""
    # Tokens in a shard (two bytes each).
    shard_size: int = 100_000_000
    # Processes that tokenize. Default (0): one for each core.
    workers: int = 0
    # Stop after so many tokens (0: take everything).
    max_tokens: int = 0
    # Tokens of the first shard that are held out for validation, and on to the end of that document where it is near.
    # Default (0): the whole shard, or 5% of a corpus smaller than two shards.
    val_tokens: int = 0
    # Column of .jsonl and .parquet files that holds the text.
    column: str = "text"
    # Commit, branch or tag of a dataset on the hub. Default: the newest commit, which the manifest then names.
    revision: str = ""
    # Drop documents that are exact copies of an earlier one (takes 16 bytes of memory for each document).
    deduplicate: bool = False
    # Cut out what shares 13 words in a row with HellaSwag's validation set, as the GPT-3 paper's appendix C does.
    decontaminate: bool = False
    # HellaSwag's validation set as a local .jsonl file. Default: download it.
    hellaswag_path: str = ""
    # Only read a few hundred documents and estimate documents, tokens, disk and time.
    dry_run: bool = False
    # Only check that all shards of data_dir are what the manifest says.
    verify: bool = False


# ---- sources ---------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A document, or a stretch of one that is a long text file. Reading its file from `position` on gives it again."""

    position: int  # a row, or the byte at which a line or a stretch begins
    text: str
    starts: bool = True  # the document starts here
    whole: bool = True  # it starts and ends here


class File(NamedTuple):
    name: str
    size: int  # with the name, for noticing that the corpus has changed
    read: Callable[[int], Iterator[Piece]]


def open_file(url: str):
    if url.startswith("https:"):
        import requests

        return io.BytesIO(requests.get(url, timeout=30).content)
    return gzip.open(url) if url.endswith(".gz") else open(url, "rb")


def read_text(path: str, _: str, position: int) -> Iterator[Piece]:
    """A text file is one document, read in stretches that tokenize as the whole would: none of GPT-2's words goes on from
    a visible character into a space, so that between these two it may be cut."""
    wanted, ended = STRETCH, False
    with open_file(path) as f:
        while not ended:
            f.seek(position)
            data = f.read(wanted)
            ended = len(data) < wanted
            try:
                text, _ = codecs.utf_8_decode(data, "strict", ended)
            except UnicodeDecodeError as error:
                at = position + error.start
                raise UserError(f"{path} is not UTF-8 (byte {at}): iconv -f ITS_ENCODING -t UTF-8 converts it") from None
            if not ended:
                cut = re.match(r".*\S(?=\s)", text, re.DOTALL)
                wanted = STRETCH if cut else 2 * wanted
                text = cut[0] if cut else ""
            if text or ended:
                yield Piece(position, text, position == 0, ended and position == 0)
            position += len(text.encode())


def read_python(path: Path, position: int) -> Iterator[Piece]:
    with python_source.open(path) as f:  # in the encoding that the module declares
        yield Piece(position, f.read())


def read_jsonl(path: str, column: str, position: int) -> Iterator[Piece]:
    """Each line is an object whose `column` is a document."""
    with open_file(path) as f:
        f.seek(position)
        for line in f:
            if line.strip():
                try:
                    text = json.loads(line)[column]
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    expected = f"a JSON object in UTF-8 with a text as its {column!r} was expected; --column names another"
                    raise UserError(f"{path}, byte {position}: {expected}")
                yield Piece(position, text)
            position += len(line)


def read_parquet(path: str, column: str, position: int) -> Iterator[Piece]:
    """Each row's `column` is a document, a null an empty one. Not by way of `datasets`, which takes a second to start and three
    times the memory, and reads a file from its start to find a row."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=STRETCH, pre_buffer=False) as parquet:  # pre-buffering holds the whole column
        check_column(path, column, parquet.schema_arrow.names)
        ends = np.cumsum([parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)], dtype=int)
        group = int(np.searchsorted(ends, position, side="right"))  # the one that holds `position`
        batches = parquet.iter_batches(100, range(group, len(ends)), [column], use_threads=False)
        row = int(ends[group - 1]) if group else 0
        yield from itertools.dropwhile(lambda piece: piece.position < position, pieces_of(path, column, row, batches))


def read_hub(stream, url: str, column: str, position: int) -> Iterator[Piece]:
    yield from pieces_of(url, column, position, stream.skip(position).with_format("arrow").iter(batch_size=100))


def pieces_of(name: str, column: str, first: int, batches: Iterable) -> Iterator[Piece]:
    """The documents in Arrow's batches of rows, `first` being the number of the first."""
    for row, text in enumerate((text for batch in batches for text in batch.column(column).to_pylist()), first):
        if not isinstance(text, str | None):
            raise UserError(f"{name} has no text in column {column!r}; --column names another")
        yield Piece(row, text or "")


def check_column(name: str, column: str, names: Iterable[str]) -> None:
    if column not in names:
        raise UserError(f"{name} has no column {column!r} but {', '.join(names)}; --column names another")


READERS = {".txt": read_text, ".parquet": read_parquet}
READERS |= dict.fromkeys((".jsonl", ".jsonl.gz", ".json", ".json.gz"), read_jsonl)


def find_files(source: str, column: str) -> list[File]:
    """The files behind one `--source` that is not on the hub, in the order in which they are read."""
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        modules = [path.relative_to(root) for path in root.rglob("*.py")]
        modules = [path.as_posix() for path in modules if not NOT_MODULES & set(path.parts)]
        # An order that looks random but is always the same makes the held-out start a fair sample of all packages.
        modules.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        return [File(name, (root / name).stat().st_size, partial(read_python, root / name)) for name in modules]
    if source == "tinyshakespeare":
        return [File(TINYSHAKESPEARE, 0, partial(read_text, TINYSHAKESPEARE, ""))]
    paths = [source] if os.path.exists(source) else sorted(glob.glob(source, recursive=True))
    if not paths:
        raise UserError(f"--source {source}: no such file, and no known source; `python fineweb.py --help` lists those")
    files = []
    for path in paths:
        reader = next((reader for suffix, reader in READERS.items() if path.endswith(suffix)), None)
        if not reader or not os.path.isfile(path):
            raise UserError(f"--source {path} is no .txt, .jsonl or .parquet file; of a folder, give the files: '{path}/*.txt'")
        files.append(File(path, os.path.getsize(path), partial(reader, path, column)))
    return files


def find_on_hub(source: str, column: str, revision: str, _: int) -> Iterator[tuple[int, list[File], str]]:
    """The files of a dataset on the hub, and the commit that they are of: one item, so that `patiently` can ask again."""
    os.environ.setdefault("USE_TORCH", "0")  # `datasets` would import torch, 200 MB for nothing
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    repository, config, split, of_column = (source.removeprefix("hub:").split(":") + [""] * 3)[:4]
    column, split, hint = of_column or column, split or "train", "--revision refs/convert/parquet may help"
    commit = HfApi().dataset_info(repository, revision=revision or None).sha
    try:  # load_dataset(..., streaming=True) in two steps, for a look at the files in between
        builder = load_dataset_builder(repository, config or None, revision=commit)
    except (ValueError, RuntimeError) as error:  # no such configuration; a loading script, which nobody should run
        raise UserError(f"{source}: {str(error).splitlines()[0]} ({hint})") from None
    splits = builder.config.data_files or {}
    if split not in splits:
        raise UserError(f"{source} has no split {split!r} but {', '.join(splits)}; write hub:OWNER/NAME:CONFIG:SPLIT")
    if strange := [url for url in splits[split] if not url.endswith(tuple(READERS)) or url.endswith(".txt")]:
        raise UserError(f"{strange[0]} is neither parquet nor jsonl, so it cannot be read; {hint}")
    stream, n = builder.as_streaming_dataset(split), len(splits[split])
    check_column(source, column, stream.features or [column])
    streams = [stream.select_columns(column).shard(n, i) for i in range(n)]  # one for each file
    yield 0, [File(url, 0, partial(read_hub, streams[i], url, column)) for i, url in enumerate(splits[split])], commit


def find_sources(config: Config, commits: dict[str, str]) -> tuple[list[File], list[dict]]:
    """All files to read, and what the manifest says of them; `commits` are those that an earlier start has settled on."""
    files, sources = [], []
    for source in config.source:
        hub, commit = HUB.get(source, source), None
        if hub.startswith("hub:"):
            find = partial(find_on_hub, hub, config.column, commits.get(source) or config.revision)
            _, found, commit = next(patiently(hub, find))
        else:
            found = find_files(source, config.column)
        sources.append({"source": source, "commit": commit, "files": len(found)})
        files += found
    return files, sources


def fingerprint(files: list[File]) -> str:
    return hashlib.sha256("".join(f"{file.name} {file.size}\n" for file in files).encode()).hexdigest()


def patiently(name: str, read: Callable, position: int = 0) -> Iterator:
    """What read(position) gives. Where the network fails it waits, longer each time, and goes on from the last place."""
    waits = WAITS if re.match("hub:|hf:|https:", name) else ()
    failures, done = 0, None
    while True:
        try:
            for piece in read(position):
                if piece[0] != done:
                    yield piece
                    failures, position, done = 0, piece[0], piece[0]
            return
        except UserError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            gone = getattr(getattr(error, "response", None), "status_code", 0) in (401, 403, 404)
            if gone or isinstance(error, FileNotFoundError) or failures == len(waits):
                raise UserError(f"{name} cannot be read ({reason}); that mended, the same command goes on") from error
        print(f"\n{name}: {reason}; trying again in {waits[failures]} s", file=sys.stderr)
        time.sleep(waits[failures])
        failures += 1


def documents(files: list[File], first: int = 0, position: int = 0) -> Iterator[tuple[int, list[Piece]]]:
    """All text from a position in the first file on, in batches of work for `tokenize`: (number of the file, pieces)."""
    batch, chars, begun = [], 0, first
    for i, file in enumerate(files[first:], first):
        for piece in patiently(file.name, file.read, position if i == first else 0):
            begun = begun if batch else i
            batch.append(piece)
            chars += len(piece.text)
            if len(batch) >= BATCH_DOCUMENTS or chars >= BATCH_CHARS:
                yield begun, batch
                batch, chars = [], 0
    if batch:
        yield begun, batch


# ---- tokens ----------------------------------------------------------------------------------------------------------

START = np.array([EOT], np.uint32)
PUNCTUATION = re.compile(r"[^\w\s]|_")
LAST_SPACE = re.compile(r"(?=[^\S\x1c-\x1f][\S\x1c-\x1f])(?<=[^\S\x1c-\x1f]{100000})")  # the place before it


def encode(text: str) -> list[np.ndarray]:
    """GPT-2 tokens of a text. A literal <|endoftext|> stays text; a lone surrogate becomes U+FFFD, as in tiktoken itself."""
    try:
        # tiktoken panics where a million spaces precede a word. All but the last of them are one piece in GPT-2's pattern.
        parts = LAST_SPACE.split(text) if len(text) > 100_000 else [text]
        return [get_tokenizer().encode_to_numpy(part, disallowed_special=()) for part in parts]
    except UnicodeEncodeError:
        return encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


class Benchmark:
    """What must not be trained on, as in the GPT-3 paper's appendix C: any of its 13 words in a row, in lower case and without
    punctuation. (Not the exception made there of what more than ten documents share: that takes a second pass.)"""

    def __init__(self, texts: Iterable[str]):
        words = [word for text in texts for word in [*words_of(text), ""]]  # "" parts the texts
        self.vocabulary = {word: i for i, word in enumerate(sorted(set(words)))}
        self.hashes = np.unique(self.grams(words)[1])

    def grams(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The places at which 13 words of the vocabulary stand in a row, and their hashes. Word 0 is no word."""
        ids = np.array([self.vocabulary.get(word, 0) for word in words] + [0] * 13, np.uint64)
        missing = np.concatenate([[0], np.cumsum(ids == 0)])
        places = np.flatnonzero(missing[13:] == missing[:-13])
        hashes = np.zeros(len(places), np.uint64)
        for i in range(13):
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[places + i]  # modulo 2**64
        return places, hashes

    def find(self, text: str) -> list[int]:
        """The numbers of the words at which 13 words in a row begin that the benchmark has, too."""
        places, hashes = self.grams(words_of(text))
        return places[self.hashes.searchsorted(hashes) < self.hashes.searchsorted(hashes, side="right")].tolist()


def words_of(text: str) -> list[str]:
    return PUNCTUATION.sub("", text.lower()).split()


def cut_out(text: str, matches: list[int]) -> tuple[list[tuple[int, int]], int]:
    """What is left of a text without 13 words from each of the matches on and 200 characters on both sides, as (start, end),
    and the number of cuts. Less than 200 characters are not worth keeping; after more than ten cuts, nothing is."""
    spans = [match.span() for match in re.finditer(r"\S+", text) if words_of(match[0])]
    left, end, cuts = [], 0, 0
    for match in matches:
        start = spans[match][0] - 200
        if start > end or not cuts:
            left.append((end, start))
            cuts += 1
        end = spans[match + 12][1] + 200
    left.append((end, len(text)))
    return [(a, b) for a, b in left if b - a >= 200] if cuts <= 10 else [], cuts


benchmark: Benchmark | None = None  # of a worker: what --decontaminate looks for


def start_worker(of_worker: Benchmark | None) -> None:
    """A worker leaves Ctrl-C to its parent, and ends when the parent does, however that happens."""
    global benchmark
    benchmark = of_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    get_tokenizer()


def tokenize(pieces: list[Piece], hashed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[bytes]]:
    """Runs in the workers. For n pieces: their tokens as uint16; the number of tokens of each; its share in the COUNTS,
    (n, len(COUNTS)); if `hashed`, its hash."""
    tokens, lengths, counts = [START[:0]], np.zeros(len(pieces), int), np.zeros((len(pieces), len(COUNTS)), int)
    for i, (_, text, starts, _) in enumerate(pieces):
        parts, cuts = [(0, len(text))], 0
        if benchmark and (matches := benchmark.find(text)):
            parts, cuts = cut_out(text, matches)
        counts[i, :4] = starts, cuts > 0, cuts, not parts
        for start, end in parts:
            encoded = ([START] if start or starts else []) + encode(text[start:end])
            lengths[i] += sum(map(len, encoded))
            tokens += encoded
    hashes = [hashlib.blake2b(piece.text.encode(errors="surrogatepass"), digest_size=16).digest() for piece in pieces if hashed]
    return np.concatenate(tokens).astype(np.uint16), lengths, counts, hashes


def in_workers(pool, reader, batches: Iterator, ahead: int, hashed: bool) -> Iterator[tuple[int, list[Piece], tuple]]:
    """Each batch with what `tokenize` makes of it, in order, while the next are being read and tokenized."""
    waiting, batch, failure = deque(), True, None
    while batch or waiting:
        try:  # in a thread: the wait for it can be interrupted, the network cannot
            batch = batch and reader.submit(next, batches, None).result()
        except UserError as error:  # raised after all that came before it
            batch, failure = None, error
        if batch:
            file, pieces = batch
            waiting.append((file, [piece._replace(text="") for piece in pieces], pool.submit(tokenize, pieces, hashed)))
        if waiting and (not batch or len(waiting) > ahead):
            file, pieces, future = waiting.popleft()
            yield file, pieces, future.result()
    if failure:
        raise failure


class Seen:
    """The hashes of all documents so far, packed into strings of bytes: as a set of objects they would take six times the
    memory. They are also in a file, from which the first `count` are taken up again."""

    def __init__(self, path: Path, count: int):
        self.path, self.saved = path, count
        self.buckets, self.fresh = [bytearray() for _ in range(2**16)], bytearray()
        with open(path, "a+b") as f:
            f.seek(0)
            for _ in range(count):
                self.add(f.read(16))
        self.fresh.clear()

    def add(self, digest: bytes) -> bool:
        """False where it has been there before."""
        bucket, rest = self.buckets[digest[0] + 256 * digest[1]], digest[2:]
        at = bucket.find(rest)
        while at > 0 and at % 14:
            at = bucket.find(rest, at + 1)
        if at < 0:
            bucket += rest
            self.fresh += digest
        return at < 0

    def save(self, count: int) -> None:
        """Makes the first `count` hashes last; in a thread of its own, while others are added."""
        size = 16 * (count - self.saved)
        with open(self.path, "r+b") as f:
            f.seek(16 * self.saved)
            f.write(self.fresh[:size])
            f.flush()
            os.fsync(f.fileno())
        del self.fresh[:size]
        self.saved = count


def token_stream(results: Iterable, limit: int, seen: Seen | None, counts, bar) -> Iterator[tuple[dict, np.ndarray]]:
    """The tokens of each batch without duplicates, up to `limit` in all, after the place at which the batch begins and the
    COUNTS up to there; `counts` goes on counting, and so does the progress bar."""
    for file, pieces, (tokens, lengths, added, hashes) in results:
        cursor = {"file": file, "position": pieces[0].position, "counts": dict(zip(COUNTS, counts.tolist(), strict=True))}
        if seen:
            new = np.array([not piece.whole or seen.add(digest) for piece, digest in zip(pieces, hashes, strict=True)])
            tokens, lengths = tokens[np.repeat(new, lengths)], lengths * new
            added[~new, 1:4] = 0  # a copy is a duplicate and nothing else
            added[:, 4], added[:, 5] = ~new, new & [piece.whole for piece in pieces]
        counts += added[: np.searchsorted(np.cumsum(lengths), limit) + 1].sum(axis=0)
        bar.update(min(len(tokens), limit))
        yield cursor, tokens[:limit]
        limit -= len(tokens)
        if limit <= 0:
            return


def held_out(head: list[np.ndarray], shard_size: int, val_tokens: int) -> int:
    """How many tokens are for validation, where `head` are the first two shards' worth or all there are."""
    total, done = sum(map(len, head)), 0
    wanted = val_tokens or (shard_size if total >= 2 * shard_size else max(1, total // 20))
    if wanted >= total:
        raise UserError(f"the source has {total} tokens, of which {wanted} are for validation: nothing is left to train on")
    for tokens in head:
        starts = np.flatnonzero(tokens == EOT) + done
        if len(starts) and starts[-1] >= wanted:
            start = int(starts[np.searchsorted(starts, wanted)])
            return start if start <= min(2 * wanted, shard_size) else wanted
        done += len(tokens)
    return wanted


def pack(stream: Iterator, shard_size: int, val_tokens: int, index=0, done=0) -> Iterator[tuple[int, np.ndarray, dict]]:
    """Cuts the stream, from token `done` of its first batch on, into shards: (index, tokens, cursor after them). Shard 0, for
    validation, may be a smaller one."""
    size = shard_size
    if index == 0:
        head, total = deque(), 0
        while total < 2 * shard_size and (batch := next(stream, None)):
            head.append(batch)
            total += len(batch[1])
        size = held_out([tokens for _, tokens in head], shard_size, val_tokens)
        stream = itertools.chain((head.popleft() for _ in range(len(head))), stream)  # popped, so that memory shrinks
    shard, filled = np.empty(size, np.uint16), 0
    for cursor, tokens in stream:
        while done < len(tokens):
            n = min(size - filled, len(tokens) - done)
            shard[filled : filled + n] = tokens[done : done + n]
            filled, done = filled + n, done + n
            if filled == size:
                yield index, shard, cursor | {"token": done}
                index, size = index + 1, shard_size
                shard, filled = np.empty(size, np.uint16), 0
        done = 0
    if filled:
        yield index, shard[:filled], cursor | {"token": len(tokens)}


# ---- files -----------------------------------------------------------------------------------------------------------


def write_whole(path: Path, *chunks) -> str:
    """Writes a file that is there whole or not at all, whatever happens; returns its sha256."""
    temporary, sha256 = path.with_name(path.name + ".tmp"), hashlib.sha256()
    try:
        with open(temporary, "wb") as f:
            for chunk in chunks:
                sha256.update(chunk)
                f.write(chunk)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        message = f"{path} cannot be written ({error.strerror}); that mended, the same command goes on from here"
        raise UserError(message) from None
    return sha256.hexdigest()


def write_shard(path: Path, split: str, tokens: np.ndarray) -> dict:
    """A one-dimensional uint16 .npy, byte for byte as np.save writes it. Returns its entry in the manifest."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(tokens))
    sha256 = write_whole(path, header.getvalue(), tokens.data.cast("B"))
    return {"name": path.name, "split": split, "tokens": len(tokens), "sha256": sha256}


def write_manifest(folder: Path, manifest: dict) -> None:
    write_whole(folder / "manifest.json", json.dumps(manifest, indent=1).encode() + b"\n")


def save(folder: Path, manifest: dict, index: int, tokens: np.ndarray, cursor: dict, seen: Seen | None) -> None:
    """Writes a shard and then the manifest that counts on it, so that there is always a place to go on from."""
    if seen:
        seen.save(cursor["counts"]["hashes"])
    split = "train" if index else "val"
    manifest["shards"].append(write_shard(folder / f"{manifest['name']}_{split}_{index:06d}.npy", split, tokens))
    manifest["tokens"] += len(tokens)
    manifest["counts"], manifest["cursor"] = cursor.pop("counts"), cursor
    write_manifest(folder, manifest)


def read_manifest(folder: Path) -> dict | None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else None
    if manifest and not {"name", "options", "sources", "shards", "tokens", "counts", "cursor"} <= manifest.keys():
        raise UserError(f"{path} was not written by this version of fineweb.py; choose another --data-dir")
    return manifest


def begin_or_go_on(folder: Path, name: str, options: dict) -> dict:
    """The manifest of a folder, or that of an empty one. Raises UserError if it is not what the options ask for."""
    manifest = read_manifest(folder)
    if manifest is None:
        if strange := sorted(folder.glob("*.npy")):
            raise UserError(f"{folder} has no manifest.json but holds {strange[0].name}; choose another --data-dir")
        counts, start = dict.fromkeys(COUNTS, 0), {"file": 0, "position": 0, "token": 0}
        return {"name": name, "options": options, "sources": [], "shards": [], "tokens": 0, "counts": counts, "cursor": start}
    before, now = manifest["options"] | {"name": manifest["name"]}, options | {"name": name}
    if other := [f"--{key.replace('_', '-')} {before.get(key)}, not {now[key]}" for key in now if before.get(key) != now[key]]:
        raise UserError(f"{folder} was made with {'; '.join(other)}: give the same again, or another --data-dir")
    if missing := [shard["name"] for shard in manifest["shards"] if not (folder / shard["name"]).exists()]:
        raise UserError(f"{folder / missing[0]} is missing; delete {folder} and start again")
    return manifest


def describe(folder: Path, manifest: dict) -> str:
    counts = ", ".join(f"{n:,} {name}" for name, n in manifest["counts"].items() if n and name != "hashes")
    return f"{folder}: {manifest['tokens']:,} tokens in {len(manifest['shards'])} shards ({counts})"


def verify(folder: Path) -> None:
    """Compares each shard with its sha256 in the manifest."""
    if (manifest := read_manifest(folder)) is None:
        raise UserError(f"{folder} has no manifest.json to verify its shards by; --data-dir names another")
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.npy")}
    if damaged := [shard["name"] for shard in manifest["shards"] if hashes.get(shard["name"]) != shard["sha256"]]:
        raise UserError(f"{folder}: missing or damaged: {', '.join(damaged)}; delete {folder} and make it again")
    print(f"{folder}: all {len(hashes)} shards are as they were written")


# ---- the command -----------------------------------------------------------------------------------------------------


def check(config: Config) -> None:
    """Raises UserError that tells all that is wrong with the command line."""
    sizes = ("shard_size", "workers", "max_tokens", "val_tokens")
    wrong = [f"--{key.replace('_', '-')} {getattr(config, key)} is negative" for key in sizes if getattr(config, key) < 0]
    if not config.source:
        wrong.append("--source names nothing to read")
    if not config.shard_size:
        wrong.append("--shard-size 0 has room for nothing; the default is 100000000")
    if config.val_tokens > config.shard_size:
        wrong.append(f"--val-tokens {config.val_tokens} are more than one shard: raise --shard-size {config.shard_size}")
    if not re.fullmatch(r"[\w.-]*", config.name):
        wrong.append(f"--name {config.name!r} cannot begin a file name; letters, digits, '.', '_' and '-' can")
    if wrong:
        raise UserError("; ".join(wrong))


def default_name(source: str) -> str:
    if source.startswith("fineweb"):
        return "edufineweb" if "edu" in source else "fineweb"  # the former is build-nanogpt's
    last = source.removeprefix("hub:").split(":")[0].rpartition("/")[2].partition(".")[0]
    return re.sub(r"[^A-Za-z0-9-]", "", last).lower() or "text"


def share_of(file: File, pieces: list[Piece]) -> float:
    """How much of a file its first pieces are."""
    if file.name.endswith(".parquet"):
        import fsspec
        import pyarrow.parquet as pq

        with fsspec.open(file.name) as f:
            return len(pieces) / pq.read_metadata(f).num_rows
    read = max(pieces[-1].position, sum(len(piece.text.encode(errors="replace")) for piece in pieces))
    with open_file(file.name) as f:
        return read / sum(map(len, f))


def estimate(files: list[File], workers: int) -> str:
    """What the whole will come to, from its first few hundred documents."""
    batches = ((i, piece) for i, file in enumerate(files) for piece in patiently(file.name, file.read))
    sample = list(itertools.islice(batches, 500))
    get_tokenizer()
    began = time.perf_counter()
    tokens = len(tokenize([piece for _, piece in sample], False)[0])
    minutes = (time.perf_counter() - began) / 60 / workers
    share = 1.0  # of the whole that has been read
    if len(sample) == 500:
        last, sizes = sample[-1][0], [file.size or 1 for file in files]  # the hub's files are about the same size
        of_last = share_of(files[last], [piece for i, piece in sample if i == last])
        share = (sum(sizes[:last]) + sizes[last] * of_last) / sum(sizes)
    disk = f"{2 * tokens / share / 1e9:,.3f} GB of shards ({shutil.disk_usage('.').free / 1e9:,.0f} GB are free here)"
    pace = f"{minutes / share:,.1f} minutes with {workers} workers if reading keeps up"
    return f"about {len(sample) / share:,.0f} documents, {tokens / share:,.0f} tokens, {disk}, {pace}"


def load_benchmark(path: str) -> Benchmark:
    from hellaswag import iterate_examples

    return Benchmark(f"{x['ctx']} {ending}" for x in iterate_examples("val", path) for ending in x["endings"])


def build(config: Config, folder: Path, name: str, workers: int) -> None:
    """Fills the folder with shards, from wherever an earlier start has left off."""
    from tqdm import tqdm

    shaping = ("shard_size", "max_tokens", "val_tokens", "column", "revision", "deduplicate", "decontaminate")
    manifest = begin_or_go_on(folder, name, {"source": list(config.source)} | {key: getattr(config, key) for key in shaping})
    if (cursor := manifest["cursor"]) is None:
        print(f"{describe(folder, manifest)}; it is complete, nothing to do")
        return
    files, manifest["sources"] = find_sources(config, {source["source"]: source["commit"] for source in manifest["sources"]})
    of_workers = load_benchmark(config.hellaswag_path) if config.decontaminate else None
    manifest["benchmark"] = hashlib.sha256(of_workers.hashes).hexdigest() if of_workers else None
    if cursor.get("read") not in (None, [fingerprint(files[: cursor["file"] + 1]), manifest["benchmark"]]):
        raise UserError(f"what was read before {folder} was left off has changed since; delete it and start again")
    for unfinished in folder.glob("*.tmp"):
        unfinished.unlink()
    write_manifest(folder, manifest)
    seen = Seen(folder / ".hashes", manifest["counts"]["hashes"]) if config.deduplicate else None
    counts = np.array(list(manifest["counts"].values()))
    limit = cursor["token"] + config.max_tokens - manifest["tokens"] if config.max_tokens else sys.maxsize
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")  # its word on a killed process's semaphores
    pool = ProcessPoolExecutor(workers, initializer=start_worker, initargs=(of_workers,))
    pool.submit(os.getpid).result()  # where processes are forked, do so before there are threads
    total = config.max_tokens or None
    bar = tqdm(desc=name, initial=manifest["tokens"], total=total, unit="tok", unit_scale=True, disable=None)
    with pool, ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer, bar:
        try:
            batches = documents(files, cursor["file"], cursor["position"])
            results = in_workers(pool, reader, batches, 2 * workers + 1, config.deduplicate)
            stream = token_stream(results, limit, seen, counts, bar)
            shards = pack(stream, config.shard_size, config.val_tokens, len(manifest["shards"]), cursor["token"])
            writing = None
            for index, tokens, after in shards:
                after["read"] = [fingerprint(files[: after["file"] + 1]), manifest["benchmark"]]
                if writing:
                    writing.result()  # at most one shard is being written while the next is filled
                writing = writer.submit(save, folder, manifest, index, tokens, after, seen)
            if writing:
                writing.result()
        except BrokenProcessPool:
            raise UserError("a worker was killed, for want of memory? the same command goes on, as does --workers 1") from None
        except KeyboardInterrupt:
            print("\ninterrupted: the same command goes on from the last whole shard", file=sys.stderr, flush=True)
            os._exit(130)  # at once, workers and all: reading may be waiting for the network, writing for the disk
    manifest["counts"], manifest["cursor"] = dict(zip(COUNTS, counts.tolist(), strict=True)), None
    write_manifest(folder, manifest)
    if seen:
        seen.path.unlink()
    print(describe(folder, manifest))


def main() -> None:
    import tyro
    from filelock import FileLock, Timeout

    config = tyro.cli(Config)
    check(config)
    name = config.name or default_name(config.source[0])
    folder = Path(config.data_dir or ("edu_fineweb10B" if config.source == Config.source else f"data/{name}"))
    workers = config.workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    if config.verify:
        verify(folder)
    elif config.dry_run:
        print(f"{', '.join(config.source)}: {estimate(find_sources(config, {})[0], workers)}")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / ".lock", timeout=1):  # the workers of a killed process hold it for a moment more
                build(config, folder, name, workers)
        except Timeout:
            raise UserError(f"another process is writing to {folder}; wait for it, or choose another --data-dir") from None


def command() -> None:
    """`main`, and an end at once: with a stream broken off, Arrow's threads can hang Python's own (apache/arrow#45214)."""
    try:
        code = run_script(main)
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(bool(code) if isinstance(code, str) else code or 0)


if __name__ == "__main__":
    command()

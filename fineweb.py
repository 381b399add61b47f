"""Text → token shards: FineWeb-Edu, any other text dataset of the Hugging Face hub, your own files, or what is at hand.

    python fineweb.py                                            FineWeb-Edu's 10B tokens → edu_fineweb10B/
    python fineweb.py --source stdlib --data-dir data/stdlib     the running Python's standard library, no network
    python fineweb.py --source 'mine/*.jsonl' notes.txt          your own text

One thread reads (`documents`), processes `tokenize`, `pack` cuts the one long stream of tokens into shards, and `save`
writes each of them whole or not at all, with the place to go on from in `manifest.json`. Kill it whenever you like and
start it again: the result is byte for byte that of a run left alone. Memory stays flat: under 1 GB for this process.
"""

import codecs
import contextlib
import glob
import gzip
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
import tokenize as python_source
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
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
KINDS = {".txt": "text", ".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".json": "jsonl", ".json.gz": "jsonl", ".parquet": "parquet"}
NOT_MODULES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "pydoc_data", "__pycache__"}
BATCH_DOCUMENTS, BATCH_CHARS = 1000, 2**20  # what a worker gets at a time, at most
STRETCH = 2**20  # bytes of a text file that are one piece of work
DOWNLOAD = 2**24  # bytes asked of the hub at a time
RETRY_SECONDS = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)
PATIENCE = {"hf": 10, "https": 3}  # how often reading is tried again; a local file is not
COUNTS = ("documents", "duplicates", "contaminated", "cuts", "dropped", "hashes")  # of what the manifest counts


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


class TextFile(NamedTuple):
    url: str
    kind: str  # a key of READERS
    column: str
    name: str  # for people, and for noticing that the corpus has changed
    size: int


class Piece(NamedTuple):
    """A document, or a stretch of one that is a long text file. Reading `file` from `position` on gives it again."""

    file: int
    position: int  # row of a parquet file, byte of any other
    starts: bool  # the document starts here
    whole: bool  # it starts and ends here
    text: str


# ---- sources ---------------------------------------------------------------------------------------------------------


def find_files(source: str, column: str) -> list[TextFile]:
    """The local files behind one `--source`, in the order in which they are read."""
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        modules = [path.relative_to(root) for path in root.rglob("*.py")]
        modules = [path.as_posix() for path in modules if not NOT_MODULES & set(path.parts)]
        # An order that looks random but is always the same makes the held-out start a fair sample of all packages.
        modules.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        return [TextFile(str(root / name), "python", "", name, (root / name).stat().st_size) for name in modules]
    if source == "tinyshakespeare":
        return [TextFile(TINYSHAKESPEARE, "text", "", source, 0)]
    paths = [source] if os.path.exists(source) else sorted(glob.glob(source, recursive=True))
    if not paths:
        raise UserError(f"--source {source}: no such file, and no known source; `python fineweb.py --help` lists those")
    for path in paths:
        if not kind_of(path) or not os.path.isfile(path):
            raise UserError(f"--source {path} is no .txt, .jsonl or .parquet file; of a folder, give the files: '{path}/*.txt'")
    return [TextFile(path, kind_of(path), column, path, os.path.getsize(path)) for path in paths]


def kind_of(path: str) -> str:
    return next((kind for suffix, kind in KINDS.items() if path.endswith(suffix)), "")


def find_on_hub(source: str, column: str, revision: str) -> tuple[list[TextFile], str]:
    """The files of a dataset on the hub, and the commit that they are of. `datasets` says which they are; they are read
    here, because its own streaming would begin a file of gigabytes again after each interruption."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    repository, config, split, of_column = (source.removeprefix("hub:").split(":") + [""] * 3)[:4]
    split = split or "train"
    commit = HfApi().dataset_info(repository, revision=revision or None).sha
    try:
        splits = load_dataset_builder(repository, config or None, revision=commit).config.data_files or {}
    except (ValueError, RuntimeError) as error:  # no such configuration; a loading script, which nobody should run
        raise UserError(f"{source}: {str(error).splitlines()[0]} (--revision refs/convert/parquet may help)") from None
    if split not in splits:
        raise UserError(f"{source} has no split {split!r} but {', '.join(splits)}; write hub:OWNER/NAME:CONFIG:SPLIT")
    for url in splits[split]:
        if not kind_of(url):
            raise UserError(
                f"{url} is neither parquet nor jsonl, so it cannot be read; --revision refs/convert/parquet may help"
            )
    return [TextFile(url, kind_of(url), of_column or column, url, 0) for url in splits[split]], commit


def find_sources(config: Config, commits: dict[str, str]) -> tuple[list[TextFile], list[dict]]:
    """All files to read, and what the manifest says of them; `commits` are those that an earlier start has settled on."""
    files, sources = [], []
    for source in config.source:
        hub, commit = HUB.get(source, source), None
        if hub.startswith("hub:"):
            found, commit = patiently(hub, find_on_hub, hub, config.column, commits.get(source) or config.revision)
        else:
            found = find_files(source, config.column)
        sources.append({"source": source, "commit": commit, "files": len(found), "names_sha256": fingerprint(found)})
        files += found
    return files, sources


def fingerprint(files: list[TextFile]) -> str:
    return hashlib.sha256("".join(f"{file.name} {file.size}\n" for file in files).encode()).hexdigest()


def patiently(what: str, work, *args):
    """The result of work(*args), tried again a few times where the network fails."""
    for failures in itertools.count():
        try:
            return work(*args)
        except Exception as error:
            wait_or_give_up(what, error, failures, 3)


def wait_or_give_up(what: str, error: Exception, failures: int, patience: int) -> None:
    """Waits before something is tried again, longer each time; raises UserError where waiting is no use."""
    if isinstance(error, UserError):
        raise error
    reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if failures >= patience or status in (401, 403, 404) or isinstance(error, FileNotFoundError):
        raise UserError(f"{what} cannot be read ({reason}); that mended, the same command goes on from here") from error
    print(f"\n{what}: {reason}; trying again in {RETRY_SECONDS[failures]} s", file=sys.stderr)
    time.sleep(RETRY_SECONDS[failures])


def open_file(url: str):
    """A local or remote file, opened for reading bytes."""
    if url.startswith("hf://"):
        from huggingface_hub import HfFileSystem

        f = HfFileSystem().open(url, block_size=DOWNLOAD)
    elif url.startswith("https://"):
        import requests

        response = requests.get(url, timeout=30)
        response.raise_for_status()
        f = io.BytesIO(response.content)
    else:
        f = open(url, "rb")  # noqa: SIM115
    return gzip.open(f) if url.endswith(".gz") else f


def read_text(file: TextFile, position: int) -> Iterator[tuple[int, bool, bool, str]]:
    """A text file is one document, read in stretches that tokenize as the whole would: none of GPT-2's words goes on from
    a visible character into a space, so that between these two it may be cut."""
    wanted = STRETCH
    with open_file(file.url) as f:
        while True:
            f.seek(position)
            data = f.read(wanted)
            ended = len(data) < wanted
            try:
                text, _ = codecs.utf_8_decode(data, "strict", ended)
            except UnicodeDecodeError as error:
                at = position + error.start
                raise UserError(f"{file.name} is not UTF-8 (byte {at}): iconv -f ITS_ENCODING -t UTF-8 converts it") from None
            if ended:
                yield position, position == 0, position == 0, text
                return
            if cut := re.match(r".*\S(?=\s)", text, re.DOTALL):
                yield position, position == 0, False, cut[0]
                position += len(cut[0].encode())
            wanted = STRETCH if cut else 2 * wanted


def read_python(file: TextFile, position: int) -> Iterator[tuple[int, bool, bool, str]]:
    """A module is one document, in the encoding that it declares."""
    data = Path(file.url).read_bytes()
    encoding, _ = python_source.detect_encoding(io.BytesIO(data).readline)
    yield 0, True, True, data.decode(encoding)


def read_jsonl(file: TextFile, position: int) -> Iterator[tuple[int, bool, bool, str]]:
    """Each line is an object whose `column` is a document."""
    with open_file(file.url) as f:
        f.seek(position)
        for line in f:
            if line.strip():
                try:
                    text = json.loads(line.decode())[file.column]
                except UnicodeDecodeError as error:
                    raise UserError(f"{file.name} is not UTF-8 (byte {position + error.start}); convert it first") from None
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    expected = f"a JSON object with a text as its {file.column!r} was expected; --column names another"
                    raise UserError(f"{file.name}, byte {position}: {expected}")
                yield position, True, True, text
            position += len(line)


def read_parquet(file: TextFile, position: int) -> Iterator[tuple[int, bool, bool, str]]:
    """Each row's `column` is a document; no other column is read. A null is an empty document."""
    import pyarrow.parquet as pq

    with open_file(file.url) as f:
        parquet = pq.ParquetFile(f, buffer_size=STRETCH, pre_buffer=False)  # pre-buffering holds the whole column
        names = parquet.schema_arrow.names
        if file.column not in names:
            raise UserError(f"{file.name} has no column {file.column!r} but {', '.join(names)}; --column names another")
        rows = np.cumsum([parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)], dtype=int)
        group = int(np.searchsorted(rows, position, side="right"))  # the row group that holds `position`
        row = int(rows[group - 1]) if group else 0
        groups = range(group, parquet.num_row_groups)
        for batch in parquet.iter_batches(100, groups, [file.column], use_threads=False):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str | None):
                    raise UserError(
                        f"{file.name} has no text in column {file.column!r}; --column names another: {', '.join(names)}"
                    )
                if row >= position:
                    yield row, True, True, text or ""
                row += 1


def length_of(file: TextFile) -> int:
    """The end of what `position` counts in a file."""
    with open_file(file.url) as f:
        if file.kind == "parquet":
            import pyarrow.parquet as pq

            return pq.ParquetFile(f).metadata.num_rows
        return f.seek(0, os.SEEK_END) if file.kind != "python" else 1


READERS = {"text": read_text, "python": read_python, "jsonl": read_jsonl, "parquet": read_parquet}


def read(file: TextFile, position: int) -> Iterator[tuple[int, bool, bool, str]]:
    """The pieces of a file from a position on. Where the network fails it waits, and goes on from the same place."""
    failures, done = 0, -1
    while True:
        try:
            for piece in READERS[file.kind](file, position):
                if piece[0] > done:
                    yield piece
                    failures, position, done = 0, piece[0], piece[0]
            return
        except Exception as error:
            wait_or_give_up(file.name, error, failures, PATIENCE.get(file.url.partition(":")[0], 0))
            failures += 1


def documents(files: list[TextFile], first: int = 0, position: int = 0) -> Iterator[list[Piece]]:
    """All text from a position in the first file on, in batches of work for `tokenize`."""
    batch, chars = [], 0
    for index in range(first, len(files)):
        for piece in read(files[index], position if index == first else 0):
            batch.append(Piece(index, *piece))
            chars += len(batch[-1].text)
            if len(batch) >= BATCH_DOCUMENTS or chars >= BATCH_CHARS:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


# ---- tokens ----------------------------------------------------------------------------------------------------------

SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # white space to GPT-2's pattern
LONG_SPACE = re.compile(f"(?<![{SPACE}])([{SPACE}]{{100000,}})(?=[{SPACE}][^{SPACE}])")
PUNCTUATION = re.compile(r"[^\w\s]|_")
START = np.array([EOT], np.uint32)
benchmark: "Benchmark | None" = None  # of a worker: what --decontaminate looks for


def encode(text: str) -> list[np.ndarray]:
    """GPT-2 tokens of a text. A literal <|endoftext|> stays text; a lone surrogate becomes U+FFFD, as in tiktoken itself."""
    try:
        # tiktoken panics where a million spaces precede a word. All but the last of them are one piece in GPT-2's pattern.
        parts = LONG_SPACE.split(text) if len(text) > 100_000 else [text]
        return [get_tokenizer().encode_to_numpy(part, disallowed_special=()) for part in parts]
    except UnicodeEncodeError:
        return encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


class Benchmark(NamedTuple):
    """What must not be trained on, as in the GPT-3 paper's appendix C: any of its 13 words in a row, in lower case and without
    punctuation. (Not the exception made there of what more than ten documents share: that takes a second pass.)"""

    vocabulary: dict[str, int]
    hashes: np.ndarray  # uint64, sorted: of every 13 consecutive words

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Benchmark":
        words = [word for text in texts for word in [*words_of(text), ""]]  # "" parts the texts
        vocabulary = {word: i for i, word in enumerate(sorted(set(words)))}
        return cls(vocabulary, np.unique(cls(vocabulary, np.empty(0)).grams(words)[1]))

    def grams(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The places at which 13 words of the vocabulary stand in a row, and their hashes. Word 0 is no word."""
        ids = np.array([self.vocabulary.get(word, 0) for word in words] + [0] * 13, np.uint64)
        missing = np.concatenate([[0], np.cumsum(ids == 0)])
        places = np.flatnonzero(missing[13:] == missing[:-13])
        hashes = np.zeros(len(places), np.uint64)
        for i in range(13):
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[places + i]  # modulo 2**64
        return places, hashes

    def find(self, texts: list[str]) -> dict[int, list[int]]:
        """For each text that shares 13 words in a row with the benchmark: the numbers of the first words of all matches."""
        words = [[*words_of(text), ""] for text in texts]
        ends = np.cumsum([len(w) for w in words])
        places, hashes = self.grams(list(itertools.chain.from_iterable(words)))
        places = places[self.hashes.searchsorted(hashes) < self.hashes.searchsorted(hashes, side="right")]
        found = {}
        for place, text in zip(places, np.searchsorted(ends, places, side="right"), strict=True):
            found.setdefault(int(text), []).append(int(place - ends[text] + len(words[text])))
        return found


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


def start_worker(of_worker: Benchmark | None) -> None:
    """A worker leaves Ctrl-C to its parent, and ends when the parent does, however that happens."""
    global benchmark
    benchmark = of_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    get_tokenizer()


def tokenize(texts: list[str], starts: list[bool], hashed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[bytes]]:
    """Runs in the workers: texts → their tokens as uint16, the number of tokens in each text, (contaminated, cuts, dropped)
    of each, and a hash of each if `hashed`."""
    found = benchmark.find(texts) if benchmark else {}
    tokens, lengths, counts = [START[:0]], np.zeros(len(texts), int), np.zeros((len(texts), 3), int)
    for i, text in enumerate(texts):
        parts = [(0, len(text))]
        if i in found:
            parts, cuts = cut_out(text, found[i])
            counts[i] = 1, cuts, not parts
        for start, end in parts:
            encoded = ([START] if start or starts[i] else []) + encode(text[start:end])
            lengths[i] += sum(map(len, encoded))
            tokens += encoded
    hashes = [hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest() for text in texts] if hashed else []
    return np.concatenate(tokens).astype(np.uint16), lengths, counts, hashes


@contextlib.contextmanager
def worker_pool(workers: int, of_workers: Benchmark | None) -> Iterator[ProcessPoolExecutor]:
    """Processes that tokenize, gone at the end of the `with` block but for what they have already begun."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")  # its word on a killed process's semaphores
    pool = ProcessPoolExecutor(workers, initializer=start_worker, initargs=(of_workers,))
    try:
        pool.submit(os.getpid).result()  # where processes are forked, do so before there are threads
        yield pool
    except BrokenProcessPool:
        message = "a worker was killed, perhaps for want of memory: the same command goes on, with --workers 1 it needs least"
        raise UserError(message) from None
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from the last whole shard", file=sys.stderr, flush=True)
        os._exit(130)  # at once, workers and all: reading may be waiting for the network, writing for the disk
    finally:
        pool.shutdown(cancel_futures=True)


def background(function, *args) -> Future:
    """Calls a function in a thread that does not keep the process from ending."""
    future = Future()

    def run():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def in_workers(pool: ProcessPoolExecutor, batches: Iterable[list[Piece]], ahead: int, hashed: bool) -> Iterator[tuple]:
    """Each batch with its result from `tokenize`, in order. Reading, tokenizing and the caller go on side by side, the
    reading at most `ahead` batches in front."""
    results, room = queue.SimpleQueue(), threading.Semaphore(ahead)

    def read_on():
        for batch in batches:
            room.acquire()
            work = [piece.text for piece in batch], [piece.starts for piece in batch], hashed
            results.put(([piece._replace(text="") for piece in batch], pool.submit(tokenize, *work)))

    reading = background(read_on)
    reading.add_done_callback(lambda _: results.put(None))
    try:
        while (item := results.get()) is not None:
            yield item[0], *item[1].result()
            room.release()
        reading.result()  # raises what reading raised
    finally:  # where the caller has had enough, the pool is shut and takes no more
        room.release()
        wait([reading], timeout=2)


class Seen:
    """The hashes of all documents so far, packed into strings of bytes: as a set of objects they would take six times the
    memory. They are also in a file, from which the first `count` are taken up again."""

    def __init__(self, path: Path, count: int):
        self.path, self.taken = path, count
        self.buckets, self.fresh = [bytearray() for _ in range(2**16)], bytearray()
        path.touch()
        if path.stat().st_size < 16 * count:
            raise UserError(f"{path} should hold {count} hashes but is too short; delete {path.parent} and start again")
        os.truncate(path, 16 * count)
        with open(path, "rb") as f:
            while digest := f.read(16):
                self.add(digest)
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

    def take(self, count: int) -> bytes:
        """Those among the first `count` hashes that have not been taken yet."""
        size = 16 * (count - self.taken)
        hashes, self.taken = bytes(self.fresh[:size]), count
        del self.fresh[:size]
        return hashes

    def save(self, hashes: bytes) -> None:
        with open(self.path, "ab") as f:
            f.write(hashes)
            f.flush()
            os.fsync(f.fileno())


class Tokens(NamedTuple):
    """A batch of pieces as tokens; piece i is tokens[bounds[i]:bounds[i + 1]]."""

    tokens: np.ndarray
    bounds: np.ndarray
    pieces: list[Piece]
    counts: np.ndarray  # before each piece, of COUNTS

    def cursor(self, end: int) -> dict:
        """Where to go on after tokens[:end]: the piece that holds the last of them, and the number of them in it."""
        i = int(np.searchsorted(self.bounds[1:], end))
        place = {"file": self.pieces[i].file, "position": self.pieces[i].position, "token": int(end - self.bounds[i])}
        return place | {"counts": dict(zip(COUNTS, self.counts[i].tolist(), strict=True))}


def token_stream(results: Iterable[tuple], skip: int, limit: int, seen: Seen | None, totals: np.ndarray) -> Iterator[Tokens]:
    """The tokens without duplicates, after the first `skip` and up to `limit` of them; keeps `totals`, the COUNTS so far."""
    for pieces, tokens, lengths, cut_counts, hashes in results:
        copies = np.zeros(len(pieces), bool)
        if seen:
            copies[:] = [piece.whole and not seen.add(digest) for piece, digest in zip(pieces, hashes, strict=True)]
            tokens = tokens[~np.repeat(copies, lengths)]
            lengths, cut_counts = np.where(copies, 0, lengths), np.where(copies[:, None], 0, cut_counts)
        hashed = np.array([bool(seen) and piece.whole for piece in pieces]) & ~copies
        counts = np.column_stack([[piece.starts for piece in pieces], copies, cut_counts, hashed])
        counts = np.concatenate([[totals], totals + np.cumsum(counts, axis=0)])
        bounds = np.concatenate([[0], np.cumsum(lengths)]) - skip
        tokens, skip = tokens[skip:], 0
        last = int(np.searchsorted(bounds[1:], limit)) if len(tokens) >= limit else len(pieces) - 1
        totals[:] = counts[last + 1]
        yield Tokens(tokens[:limit], bounds, pieces, counts)
        limit -= len(tokens)
        if limit <= 0:
            return


def held_out(head: list[Tokens], shard_size: int, val_tokens: int) -> int:
    """How many tokens are for validation, where `head` are the first two shards' worth or all there are."""
    total = sum(len(batch.tokens) for batch in head)
    wanted = val_tokens or (shard_size if total >= 2 * shard_size else max(1, total // 20))
    if wanted >= total:
        raise UserError(f"the source has {total} tokens, of which {wanted} are for validation: nothing is left to train on")
    done = 0
    for batch in head:
        starts = np.flatnonzero(batch.tokens == EOT) + done
        if len(starts) and starts[-1] >= wanted:
            start = int(starts[np.searchsorted(starts, wanted)])
            return start if start <= min(2 * wanted, shard_size) else wanted
        done += len(batch.tokens)
    return wanted


def pack(stream: Iterator[Tokens], shard_size: int, val_tokens: int, index: int = 0) -> Iterator[tuple[int, np.ndarray, dict]]:
    """Cuts the stream into shards: (index, tokens, cursor after them). Shard 0, for validation, may be a smaller one."""
    head, size = [], shard_size
    if index == 0:
        while sum(len(batch.tokens) for batch in head) < 2 * shard_size and (batch := next(stream, None)) is not None:
            head.append(batch)
        size = held_out(head, shard_size, val_tokens)
        head.reverse()
    shard, filled, batch = np.empty(size, np.uint16), 0, None
    while (following := head.pop() if head else next(stream, None)) is not None:
        batch, done = following, 0
        while done < len(batch.tokens):
            n = min(size - filled, len(batch.tokens) - done)
            shard[filled : filled + n] = batch.tokens[done : done + n]
            filled, done = filled + n, done + n
            if filled == size:
                yield index, shard, batch.cursor(done)
                index, size = index + 1, shard_size
                shard, filled = np.empty(size, np.uint16), 0
    if filled:
        yield index, shard[:filled], batch.cursor(len(batch.tokens))


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
        if hasattr(os, "O_DIRECTORY"):  # the new name has to last, too; Windows has no such call
            folder = os.open(path.parent, os.O_DIRECTORY)
            os.fsync(folder)
            os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"{path} cannot be written ({error.strerror}); that mended, the same command goes on from here"
        ) from None
    return sha256.hexdigest()


def write_shard(path: Path, split: str, tokens: np.ndarray) -> dict:
    """A one-dimensional uint16 .npy, byte for byte as np.save writes it. Returns its entry in the manifest."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(tokens))
    sha256 = write_whole(path, header.getvalue(), tokens.data.cast("B"))
    return {"name": path.name, "split": split, "tokens": len(tokens), "sha256": sha256}


def write_manifest(folder: Path, manifest: dict) -> None:
    write_whole(folder / "manifest.json", json.dumps(manifest, indent=1).encode() + b"\n")


def save(folder: Path, manifest: dict, index: int, tokens: np.ndarray, cursor: dict, seen: Seen | None, hashes: bytes) -> None:
    """Writes a shard and then the manifest that counts on it, so that there is always a place to go on from."""
    if seen:
        seen.save(hashes)
    split = "train" if index else "val"
    path = folder / f"{manifest['name']}_{split}_{index:06d}.npy"
    manifest["shards"].append(write_shard(path, split, tokens))
    manifest["tokens"] += len(tokens)
    manifest["counts"], manifest["cursor"] = cursor.pop("counts"), cursor
    write_manifest(folder, manifest)


def read_manifest(folder: Path) -> dict | None:
    path = folder / "manifest.json"
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        return {key: manifest[key] for key in ("name", "options", "sources", "shards", "tokens", "counts", "cursor")}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} was not written by this version of fineweb.py; choose another --data-dir") from None


def begin_or_go_on(folder: Path, name: str, options: dict) -> dict:
    """The manifest of a folder, or that of an empty one. Raises UserError if it is not what the options ask for."""
    manifest = read_manifest(folder)
    if manifest is None:
        if strange := sorted(folder.glob("*.npy")):
            raise UserError(f"{folder} has no manifest.json but holds {strange[0].name}; choose another --data-dir")
        start = {"file": 0, "position": 0, "token": 0}
        counts = dict.fromkeys(COUNTS, 0)
        return {"name": name, "options": options, "sources": [], "shards": [], "tokens": 0, "counts": counts, "cursor": start}
    before, now = manifest["options"] | {"name": manifest["name"]}, options | {"name": name}
    if different := [
        f"--{key.replace('_', '-')} {before.get(key)}, not {now[key]}" for key in now if before.get(key) != now[key]
    ]:
        raise UserError(f"{folder} was made with {'; '.join(different)}: give the same again, or another --data-dir")
    for shard in manifest["shards"]:
        if not (folder / shard["name"]).exists():
            raise UserError(f"{folder / shard['name']} is missing; delete {folder} and start again")
    return manifest


def describe(folder: Path, manifest: dict) -> str:
    counts = manifest["counts"]
    text = f"{folder}: {manifest['tokens']:,} tokens of {counts['documents']:,} documents in {len(manifest['shards'])} shards"
    if manifest["options"]["deduplicate"]:
        text += f"; {counts['duplicates']:,} duplicates left out"
    if manifest["options"]["decontaminate"]:
        text += f"; {counts['contaminated']:,} contaminated: cut in {counts['cuts']:,} places, {counts['dropped']:,} dropped"
    return text


def verify(folder: Path) -> None:
    """Compares each shard with its sha256 in the manifest."""
    if (manifest := read_manifest(folder)) is None:
        raise UserError(f"{folder} has no manifest.json to verify its shards by; --data-dir names another")
    damaged = []
    for shard in manifest["shards"]:
        path = folder / shard["name"]
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != shard["sha256"]:
            damaged.append(shard["name"])
    if damaged:
        raise UserError(f"{folder}: missing or damaged: {', '.join(damaged)}; delete {folder} and make it again")
    print(f"{folder}: all {len(manifest['shards'])} shards are as they were written")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from writing into the folder. However this one ends, the system takes the lock back."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as f:
        try:
            if os.name == "nt":
                import msvcrt

                msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, not shared with forked workers
        except (BlockingIOError, PermissionError):
            raise UserError(f"another process is writing to {folder}; wait for it, or choose another --data-dir") from None
        except OSError:
            pass  # this file system knows no locks
        yield


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


def estimate(files: list[TextFile], workers: int) -> str:
    """What the whole will come to, from its first few hundred documents."""
    sample = list(itertools.islice(itertools.chain.from_iterable(documents(files)), 500))
    get_tokenizer()
    began = time.perf_counter()
    tokens = len(tokenize([piece.text for piece in sample], [piece.starts for piece in sample], False)[0])
    minutes = (time.perf_counter() - began) / 60 / workers
    share = 1.0  # of the whole that has been read
    if len(sample) == 500:
        last, sizes = sample[-1], [file.size or 1 for file in files]  # the hub's files are about the same size
        share = (sum(sizes[: last.file]) + sizes[last.file] * (last.position + 1) / length_of(files[last.file])) / sum(sizes)
    disk = f"{2 * tokens / share / 1e9:,.3f} GB of shards"
    pace = f"{minutes / share:,.1f} minutes with {workers} workers if reading keeps up"
    return f"about {len(sample) / share:,.0f} documents, {tokens / share:,.0f} tokens, {disk}, {pace}"


def load_benchmark(path: str) -> Benchmark:
    from hellaswag import iterate_examples

    return Benchmark.of(f"{x['ctx']} {ending}" for x in iterate_examples("val", path) for ending in x["endings"])


def build(config: Config, folder: Path, name: str, workers: int) -> None:
    """Fills the folder with shards, from wherever an earlier start has left off."""
    from tqdm import tqdm

    shaping = ("shard_size", "max_tokens", "val_tokens", "column", "revision", "deduplicate", "decontaminate")
    manifest = begin_or_go_on(folder, name, {"source": list(config.source)} | {key: getattr(config, key) for key in shaping})
    if (cursor := manifest["cursor"]) is None:
        (folder / ".hashes").unlink(missing_ok=True)
        print(f"{describe(folder, manifest)}; it is complete, nothing to do")
        return
    files, manifest["sources"] = find_sources(config, {source["source"]: source["commit"] for source in manifest["sources"]})
    of_workers = load_benchmark(config.hellaswag_path) if config.decontaminate else None
    manifest["benchmark"] = hashlib.sha256(of_workers.hashes).hexdigest() if of_workers else None
    if cursor.get("read") not in (None, [fingerprint(files[: cursor["file"] + 1]), manifest["benchmark"]]):
        raise UserError(f"what was read before {folder} was left off has changed since; delete it and start again")
    for unfinished in folder.glob("*.npy.tmp"):
        unfinished.unlink()
    write_manifest(folder, manifest)
    seen = Seen(folder / ".hashes", manifest["counts"]["hashes"]) if config.deduplicate else None
    totals = np.array(list(manifest["counts"].values()))
    limit = config.max_tokens - manifest["tokens"] if config.max_tokens else sys.maxsize

    with (
        worker_pool(workers, of_workers) as pool,
        tqdm(
            desc=name, initial=manifest["tokens"], total=config.max_tokens or None, unit="tok", unit_scale=True, disable=None
        ) as bar,
    ):
        batches = documents(files, cursor["file"], cursor["position"])
        results = in_workers(pool, batches, 2 * workers + 2, config.deduplicate)
        stream = token_stream(results, cursor["token"], limit, seen, totals)
        stream = ((batch, bar.update(len(batch.tokens)))[0] for batch in stream)
        writing = Future()
        writing.set_result(None)
        try:
            for index, tokens, cursor in pack(stream, config.shard_size, config.val_tokens, len(manifest["shards"])):
                writing.result()  # at most one shard is being written while the next is filled
                cursor["read"] = [fingerprint(files[: cursor["file"] + 1]), manifest["benchmark"]]
                hashes = seen.take(cursor["counts"]["hashes"]) if seen else b""
                writing = background(save, folder, manifest, index, tokens, cursor, seen, hashes)
        except UserError:
            writing.result()  # a shard that is full is not lost
            raise
        writing.result()
    manifest["counts"], manifest["cursor"] = dict(zip(COUNTS, totals.tolist(), strict=True)), None
    write_manifest(folder, manifest)
    if seen:
        seen.path.unlink()
    print(describe(folder, manifest))


def main() -> None:
    import tyro

    config = tyro.cli(Config)
    check(config)
    name = config.name or default_name(config.source[0])
    folder = Path(config.data_dir or ("edu_fineweb10B" if config.source == Config.source else f"data/{name}"))
    workers = config.workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    if config.verify:
        verify(folder)
    elif config.dry_run:
        files, _ = find_sources(config, {})
        print(
            f"{', '.join(config.source)}: {estimate(files, workers)}; {shutil.disk_usage('.').free / 1e9:,.0f} GB are free here"
        )
    else:
        with locked(folder):
            build(config, folder, name, workers)


if __name__ == "__main__":
    run_script(main)

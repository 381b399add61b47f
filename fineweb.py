"""Text → token shards: FineWeb-Edu, any other text dataset of the Hugging Face hub, your own files, or what is at hand.

    python fineweb.py                                            FineWeb-Edu's 10B tokens → edu_fineweb10B/
    python fineweb.py --source stdlib --data-dir data/stdlib     the running Python's standard library, no network
    python fineweb.py --source 'mine/*.jsonl' notes.txt          your own text

A thread reads (`documents`), processes `tokenize`, `pack` cuts the one long stream of tokens into shards, and `save` writes
each of them whole or not at all, with the place to go on from in `manifest.json`. Kill it whenever you like and start it
again: the result is byte for byte that of a run left alone. Memory stays flat: under 1 GB for this process.
"""

import codecs
import glob
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
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
NOT_SHAPING = ("data_dir", "workers", "hellaswag_path", "dry_run", "verify")  # options that do not change the shards
COUNTS = ("documents", "contaminated", "cuts", "dropped", "duplicates")  # what the manifest counts


@dataclass
class Config:
    """Turns text into shards of GPT-2 tokens. Run the same command again to go on after any interruption."""

    # fineweb-edu-10B, fineweb-edu-100B, fineweb-edu-350B, fineweb-10B, tinystories, openwebtext, tinyshakespeare, stdlib,
    # hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]], or paths and globs of .txt, .jsonl and .parquet files
    source: tuple[str, ...] = ("fineweb-edu-10B",)
    data_dir: str = ""  # where the shards go; default: edu_fineweb10B for fineweb-edu-10B, otherwise data/NAME
    name: str = ""  # the shards' names begin with it; default: from the source
    shard_size: int = 100_000_000  # tokens in a shard, two bytes each
    val_tokens: int = 0  # of the first shard, up to a document's end where it is near; 0 = all, or 5% of less than two shards
    max_tokens: int = 0  # where to stop; 0 = at the end
    workers: int = 0  # processes that tokenize; 0 = one for each core
    column: str = "text"  # of .jsonl and .parquet files: the one that holds the text
    revision: str = ""  # commit, branch or tag on the hub; default: the newest commit, which the manifest then names
    deduplicate: bool = False  # drop exact copies of earlier documents, for 16 bytes of memory a document
    decontaminate: bool = False  # cut out what shares 13 words with HellaSwag's validation set (GPT-3 paper, appendix C)
    hellaswag_path: str = ""  # that set as a local .jsonl file; default: download it
    dry_run: bool = False  # only estimate documents, tokens, disk and time, from the first batch
    verify: bool = False  # only check that all shards of data_dir are what the manifest says


# ---- sources ---------------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """A document, or a stretch of one that is a long text file."""

    text: str
    starts: bool = True  # the document starts here
    ends: bool = True


class File(NamedTuple):
    name: str
    size: int  # with the name, for noticing that the corpus has changed
    read: Callable[[], Iterator[Text]]
    commit: str | None = None  # where it is on the hub


def open_file(url: str):
    if url.startswith("http"):
        import requests

        answer = requests.get(url, timeout=30)
        answer.raise_for_status()
        return io.BytesIO(answer.content)
    import fsspec

    return fsspec.open(url, compression="infer")


def read_text(path: str, _: str) -> Iterator[Text]:
    """A text file is one document, read in stretches that tokenize as the whole would: none of GPT-2's words goes on from
    a visible character into a space, so that between these two it may be cut."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    text, starts, ended = "", True, False
    with open_file(path) as f:
        while not ended:
            data = f.read(STRETCH)
            ended = len(data) < STRETCH
            try:
                text += decode(data, ended)
            except UnicodeDecodeError as error:
                at = f.tell() - len(error.object) + error.start
                raise UserError(f"{path} is not UTF-8 (byte {at}): iconv -f ITS_ENCODING -t UTF-8 converts it") from None
            cut = re.match(r".*\S(?=\s)", text, re.DOTALL)
            if ended or cut:
                end = len(text) if ended else cut.end()
                yield Text(text[:end], starts, ended)
                text, starts = text[end:], False


def read_jsonl(path: str, column: str) -> Iterator[Text]:
    """Each line is an object whose `column` is a document."""
    with open_file(path) as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                try:
                    text = json.loads(line)[column]
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    expected = f"a JSON object in UTF-8 with a text as its {column!r} was expected; --column names another"
                    raise UserError(f"{path}, line {number}: {expected}")
                yield Text(text)


def read_parquet(path: str, column: str) -> Iterator[Text]:
    """Not by way of `datasets`, which takes a second to start and three times the memory."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=STRETCH, pre_buffer=False) as parquet:  # pre-buffering holds the whole column
        check_column(path, column, parquet.schema_arrow)
        yield from rows_of(parquet.iter_batches(100, columns=[column], use_threads=False))


def read_hub(stream) -> Iterator[Text]:
    yield from rows_of(stream.with_format("arrow").iter(batch_size=100))


def rows_of(batches: Iterable) -> Iterator[Text]:
    """Each row of Arrow's batches is a document, a null an empty one."""
    for batch in batches:
        for text in batch.column(0).to_pylist():
            yield Text(text or "")


def check_column(name: str, column: str, schema) -> None:
    types = dict(zip(schema.names, map(str, schema.types), strict=True))
    if types.get(column) not in ("string", "large_string"):
        columns = ", ".join(f"{key} ({value})" for key, value in types.items())
        raise UserError(f"{name} has no column {column!r} of text but {columns}; --column names another")


JSON = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
READERS = {".txt": read_text, ".parquet": read_parquet}
READERS |= dict.fromkeys(JSON, read_jsonl)


def find_files(source: str, column: str) -> Iterator[File]:
    """The files behind one `--source` that is not on the hub, in the order in which they are read."""
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        modules = [path.relative_to(root) for path in root.rglob("*.py")]
        modules = [path.as_posix() for path in modules if not NOT_MODULES & set(path.parts)]
        # An order that looks random but is always the same makes the held-out start a fair sample of all packages.
        for name in sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest()):
            yield File(name, (root / name).stat().st_size, partial(read_text, str(root / name), ""))
        return
    if source == "tinyshakespeare":
        yield File(TINYSHAKESPEARE, 0, partial(read_text, TINYSHAKESPEARE, ""))
        return
    paths = [source] if os.path.exists(source) else sorted(glob.glob(source, recursive=True))
    if not paths:
        raise UserError(f"--source {source}: no such file, and no known source; `python fineweb.py --help` lists those")
    for path in paths:
        reader = next((reader for suffix, reader in READERS.items() if path.endswith(suffix)), None)
        if not reader or not os.path.isfile(path):
            raise UserError(f"--source {path} is no .txt, .jsonl or .parquet file; of a folder, give the files: '{path}/*.txt'")
        yield File(path, os.path.getsize(path), partial(reader, path, column))


def find_on_hub(source: str, column: str, revision: str) -> Iterator[File]:
    """The files of a dataset on the hub, which `datasets` streams: no copy on the disk, nobody else's code."""
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
    if split not in (urls := builder.config.data_files or {}):
        raise UserError(f"{source} has no split {split!r} but {', '.join(urls)}; write hub:OWNER/NAME:CONFIG:SPLIT")
    if strange := [url for url in urls[split] if not url.endswith((".parquet", *JSON))]:
        raise UserError(f"{strange[0]} is neither parquet nor jsonl, so it cannot be read; {hint}")
    stream, urls = builder.as_streaming_dataset(split), urls[split]
    check_column(source, column, stream.features.arrow_schema)
    for i, url in enumerate(urls):  # each is a shard of the stream
        yield File(url, 0, partial(read_hub, stream.select_columns(column).shard(len(urls), i)), commit)


def find_sources(config: Config, commits: dict[str, str | None]) -> list[File]:
    """All files to read. `commits` are those of the sources that an earlier start has settled on; those of others are added."""
    files = []
    for source in config.source:
        find, name = partial(find_files, source, config.column), HUB.get(source, source)
        if name.startswith("hub:"):
            find = partial(find_on_hub, name, config.column, commits.get(source) or config.revision)
        found = list(patiently(name, find))
        commits[source] = found[0].commit
        files += found
    return files


def patiently(name: str, read: Callable[[], Iterator], done: int = 0) -> Iterator:
    """What read() gives, without the first `done`. Where the network fails it waits, longer each time, and then goes on."""
    waits = WAITS if re.match("(hub|hf|https?):", name) else ()
    failures = 0
    while True:
        try:
            for item in itertools.islice(read(), done, None):
                yield item
                done, failures = done + 1, 0
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


def documents(files: list[File], file: int = 0, number: int = 0) -> Iterator[tuple[tuple[int, int], list[Text]]]:
    """All text from a place, (file, number of the text in it), on: batches of work for `tokenize`, each with its place."""
    place, batch, chars = (file, number), [], 0
    for i in range(file, len(files)):
        for j, text in enumerate(patiently(files[i].name, files[i].read, number), number):
            place = place if batch else (i, j)
            batch.append(text)
            chars += len(text.text)
            if len(batch) >= BATCH_DOCUMENTS or chars >= BATCH_CHARS:
                yield place, batch
                batch, chars = [], 0
        number = 0
    if batch:
        yield place, batch


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


def tokenize(texts: list[Text]) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[bytes | None]]:
    """Runs in the workers. The tokens of n texts as uint16; of each the number of tokens, its share in the COUNTS, (n,
    len(COUNTS)), and the hash, if it is a whole document."""
    tokens, lengths, counts, hashes = [START[:0]], np.zeros(len(texts), int), np.zeros((len(texts), len(COUNTS)), int), []
    for i, (text, starts, ends) in enumerate(texts):
        parts, cuts = [(0, len(text))], 0
        if benchmark and (matches := benchmark.find(text)):
            parts, cuts = cut_out(text, matches)
        for start, end in parts:
            encoded = ([START] if start or starts else []) + encode(text[start:end])
            lengths[i] += sum(map(len, encoded))
            tokens += encoded
        counts[i, :4] = starts, cuts > 0, cuts, not parts
        data = text.encode(errors="surrogatepass")
        hashes.append(hashlib.blake2b(data, digest_size=16).digest() if starts and ends else None)
    return np.concatenate(tokens, dtype=np.uint16, casting="unsafe"), lengths, counts, hashes


def in_workers(pool, reader, batches: Iterator, ahead: int) -> Iterator[tuple[tuple[int, int], tuple]]:
    """What `tokenize` makes of each batch, after its place, in order; what went wrong in reading is raised after all that came
    before it. Meanwhile the next are read, in a thread, and tokenized."""

    def start():
        if batch := next(batches, None):
            place, texts = batch
            return place, pool.submit(tokenize, texts)

    started = deque(reader.submit(start) for _ in range(ahead))
    while batch := started.popleft().result():
        started.append(reader.submit(start))
        place, future = batch
        yield place, future.result()


class Seen:
    """The hashes of all documents so far, packed into strings of bytes: as a set of objects they would take six times the
    memory. They are also in a file, from which the first `count` are taken up again."""

    def __init__(self, path: Path, count: int):
        self.count, self.buckets = 0, [bytearray() for _ in range(2**16)]
        self.file = open(path, "a+b")  # noqa: SIM115
        self.file.seek(0)
        for _ in range(count):
            self.remember(self.file.read(16))
        self.file.truncate(16 * count)

    def remember(self, digest: bytes) -> bool:
        """False where it has been there before."""
        bucket, rest = self.buckets[digest[0] + 256 * digest[1]], digest[2:]
        at = bucket.find(rest)
        while at > 0 and at % 14:
            at = bucket.find(rest, at + 1)
        if at < 0:
            bucket += rest
            self.count += 1
        return at < 0

    def add(self, digest: bytes) -> bool:
        return self.remember(digest) and bool(self.file.write(digest))

    def save(self) -> None:
        """Makes all that were added last; more may be added meanwhile."""
        self.file.flush()
        os.fsync(self.file.fileno())


def token_stream(results: Iterable, limit: int, seen: Seen | None, counts, bar) -> Iterator[tuple[dict, np.ndarray]]:
    """The tokens of each batch without duplicates, up to `limit` in all, after the place at which the batch begins and the
    COUNTS up to there; `counts` goes on counting, and so does the progress bar."""
    for (file, number), (tokens, lengths, added, hashes) in results:
        cursor = {"file": file, "text": number, "hashes": seen.count if seen else 0}
        cursor["counts"] = dict(zip(COUNTS, counts.tolist(), strict=True))
        if seen:
            new = np.array([digest is None or seen.add(digest) for digest in hashes])
            tokens, lengths = tokens[np.repeat(new, lengths)], lengths * new
            added[~new] = 1, 0, 0, 0, 1  # a copy is a duplicate and nothing else
        counts += added[: np.searchsorted(np.cumsum(lengths), limit) + 1].sum(axis=0)
        bar.update(min(len(tokens), limit))
        yield cursor, tokens[:limit]
        limit -= len(tokens)
        if limit <= 0:
            return


def held_out(head: list[np.ndarray], shard_size: int, val_tokens: int) -> int:
    """How many tokens are for validation, where `head` are the first two shards' worth or all there are."""
    begins = np.cumsum([0, *map(len, head)])
    total = int(begins[-1])
    wanted = val_tokens or (shard_size if total >= 2 * shard_size else max(1, total // 20))
    if wanted >= total:
        raise UserError(f"the source has {total} tokens, of which {wanted} are for validation: nothing is left to train on")
    starts = np.concatenate([begin + np.flatnonzero(tokens == EOT) for begin, tokens in zip(begins, head, strict=False)])
    near = starts[(starts >= wanted) & (starts <= min(2 * wanted, shard_size))]
    return int(near[0]) if len(near) else wanted


def pack(stream: Iterator, shard_size: int, val_tokens: int, index=0, done=0) -> Iterator[tuple[int, list, dict]]:
    """Cuts the stream, from token `done` of its first batch on, into shards: (index, tokens in parts, cursor after them). Shard
    0, for validation, may be a smaller one."""
    size = shard_size
    if index == 0:
        head, total = deque(), 0
        while total < 2 * shard_size and (batch := next(stream, None)):
            head.append(batch)
            total += len(batch[1])
        size = held_out([tokens for _, tokens in head], shard_size, val_tokens)
        stream = itertools.chain((head.popleft() for _ in range(len(head))), stream)  # popped: chain would keep all of it
    shard, filled = [], 0
    for cursor, tokens in stream:
        while done < len(tokens):
            shard.append(tokens[done : done + size - filled])
            filled, done = filled + len(shard[-1]), done + len(shard[-1])
            if filled == size:
                yield index, shard, cursor | {"token": done}
                index, size, shard, filled = index + 1, shard_size, [], 0
        done = 0
    if filled:
        yield index, shard, cursor | {"token": len(tokens)}


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
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return sha256.hexdigest()


def write_manifest(folder: Path, manifest: dict) -> None:
    write_whole(folder / "manifest.json", json.dumps(manifest, indent=1).encode() + b"\n")


def save(folder: Path, manifest: dict, index: int, parts: list[np.ndarray], cursor: dict, seen: Seen | None) -> None:
    """Writes a shard and then the manifest that counts on it, so that there is always a place to go on from."""
    if seen:
        seen.save()
    split, count, header = "train" if index else "val", sum(map(len, parts)), io.BytesIO()
    path = folder / f"{manifest['options']['name']}_{split}_{index:06d}.npy"
    np.lib.format.write_array_header_1_0(header, {"descr": "<u2", "fortran_order": False, "shape": (count,)})
    sha256 = write_whole(path, header.getvalue(), *parts)  # byte for byte as np.save writes it
    manifest["shards"].append({"name": path.name, "split": split, "tokens": count, "sha256": sha256})
    manifest["tokens"] += count
    manifest["counts"], manifest["cursor"] = cursor.pop("counts"), cursor
    write_manifest(folder, manifest)


def begin_or_go_on(folder: Path, options: dict) -> dict:
    """The manifest of a folder, or that of an empty one. Raises UserError if it is not what the options ask for."""
    path = folder / "manifest.json"
    if not path.exists():
        if strange := sorted(folder.glob("*.npy")):
            raise UserError(f"{folder} has no manifest.json but holds {strange[0].name}; choose another --data-dir")
        start = {"file": 0, "text": 0, "token": 0, "hashes": 0, "read": None}
        manifest = {"options": options, "sources": {}, "shards": [], "tokens": 0}
        return manifest | {"counts": dict.fromkeys(COUNTS, 0), "cursor": start}
    manifest = json.loads(path.read_text())
    before = manifest.get("options", {})
    if other := [key for key in options if before.get(key) != options[key]]:
        told = "; ".join(f"--{key.replace('_', '-')} {before.get(key)}, not {options[key]}" for key in other)
        raise UserError(f"{folder} was made with {told}: give the same again, or another --data-dir")
    if missing := [shard["name"] for shard in manifest["shards"] if not (folder / shard["name"]).exists()]:
        raise UserError(f"{folder / missing[0]} is missing; delete {folder} and start again")
    return manifest


def verify(folder: Path) -> None:
    """Compares each shard with its sha256 in the manifest."""
    path = folder / "manifest.json"
    if not path.exists():
        raise UserError(f"{folder} has no manifest.json to verify its shards by; --data-dir names another")
    manifest = json.loads(path.read_text())
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.npy")}
    if damaged := [shard["name"] for shard in manifest["shards"] if hashes.get(shard["name"]) != shard["sha256"]]:
        raise UserError(f"{folder}: missing or damaged: {', '.join(damaged)}; delete {folder} and make it again")
    print(f"{folder}: all {len(manifest['shards'])} shards are as they were written")


# ---- the command -----------------------------------------------------------------------------------------------------


def check(config: Config) -> None:
    """Raises UserError that tells all that is wrong with the command line."""
    wrong = []
    for key, least in ("shard_size", 1), ("workers", 0), ("max_tokens", 0), ("val_tokens", 0):
        if (value := getattr(config, key)) < least:
            wrong.append(f"--{key.replace('_', '-')} {value} is less than {least}")
    if not config.source:
        wrong.append("--source names nothing to read")
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


def texts_in(file: File) -> float:
    import pyarrow.parquet as pq

    if file.name.endswith((".parquet", *JSON)):
        with open_file(file.name) as f:
            return pq.read_metadata(f).num_rows if file.name.endswith(".parquet") else sum(1 for line in f if line.strip())
    return max(1, file.size / STRETCH)


def estimate(files: list[File], workers: int) -> str:
    """What the whole will come to, judged by the first batch of documents."""
    batches = documents(files)
    (_, texts), rest = next(batches), next(batches, None)
    get_tokenizer()
    began = time.perf_counter()
    tokens = len(tokenize(texts)[0])
    minutes = (time.perf_counter() - began) / 60 / workers
    share = 1.0  # of the whole that the batch is, up to the place where the next begins
    if rest:
        (file, number), _ = rest
        sizes = [file.size or 1 for file in files]  # the hub's files are about the same size
        share = (sum(sizes[:file]) + sizes[file] * number / texts_in(files[file])) / sum(sizes)
    disk = f"{2 * tokens / share / 1e9:,.3f} GB of shards ({shutil.disk_usage('.').free / 1e9:,.0f} GB are free here)"
    pace = f"{minutes / share:,.1f} minutes with {workers} workers if reading keeps up"
    return f"about {len(texts) / share:,.0f} documents, {tokens / share:,.0f} tokens, {disk}, {pace}"


def load_benchmark(path: str) -> Benchmark:
    from hellaswag import iterate_examples

    return Benchmark(f"{x['ctx']} {ending}" for x in iterate_examples("val", path) for ending in x["endings"])


def fingerprint(files: list[File], benchmark: Benchmark | None) -> str:
    """Of what has been read so far, to notice where it changes between an interruption and the next start."""
    read = "".join(f"{file.name} {file.size}\n" for file in files).encode()
    return hashlib.sha256(read + (benchmark.hashes.tobytes() if benchmark else b"")).hexdigest()


def build(config: Config, folder: Path) -> None:
    """Fills the folder with shards, from wherever an earlier start has left off."""
    from tqdm import tqdm

    options = {key: value for key, value in asdict(config).items() if key not in NOT_SHAPING}
    manifest = begin_or_go_on(folder, options | {"source": list(config.source)})
    if (start := manifest["cursor"]) is None:
        print(f"{folder} is complete, with {manifest['tokens']:,} tokens: nothing to do")
        return
    files = find_sources(config, manifest["sources"])
    benchmark = load_benchmark(config.hellaswag_path) if config.decontaminate else None
    if start["read"] not in (None, fingerprint(files[: start["file"] + 1], benchmark)):
        raise UserError(f"what was read before {folder} was left off has changed since; delete it and start again")
    for unfinished in folder.glob("*.tmp"):
        unfinished.unlink()
    seen = Seen(folder / ".hashes", start["hashes"]) if config.deduplicate else None
    counts = np.array(list(manifest["counts"].values()))
    limit = start["token"] + config.max_tokens - manifest["tokens"] if config.max_tokens else sys.maxsize
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")  # its word on a killed process's semaphores
    pool = ProcessPoolExecutor(config.workers, initializer=start_worker, initargs=(benchmark,))
    pool.submit(os.getpid).result()  # where processes are forked, do so before there are threads
    unit = {"unit": "tok", "unit_scale": True}
    with tqdm(desc=config.name, initial=manifest["tokens"], total=config.max_tokens or None, disable=None, **unit) as bar:
        batches = documents(files, start["file"], start["text"])
        results = in_workers(pool, ThreadPoolExecutor(1), batches, 2 * config.workers + 1)
        stream = token_stream(results, limit, seen, counts, bar)
        shards = pack(stream, config.shard_size, config.val_tokens, len(manifest["shards"]), start["token"])
        with ThreadPoolExecutor(1) as writer:
            writing = writer.submit(write_manifest, folder, manifest)
            for index, parts, cursor in shards:
                cursor["read"] = fingerprint(files[: cursor["file"] + 1], benchmark)
                writing.result()  # at most one shard is being written while the next is filled
                writing = writer.submit(save, folder, manifest, index, parts, cursor, seen)
            writing.result()
    manifest["counts"], manifest["cursor"] = dict(zip(COUNTS, counts.tolist(), strict=True)), None
    write_manifest(folder, manifest)
    if seen:
        seen.file.close()
        Path(seen.file.name).unlink()
    counted = ", ".join(f"{n:,} {name}" for name, n in manifest["counts"].items() if n)
    print(f"{folder}: {manifest['tokens']:,} tokens in {len(manifest['shards'])} shards ({counted})")


def main() -> None:
    import tyro
    from filelock import FileLock, Timeout

    config = tyro.cli(Config)
    check(config)
    config.name = config.name or default_name(config.source[0])
    folder = Path(config.data_dir or ("edu_fineweb10B" if config.source == Config.source else f"data/{config.name}"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    config.workers = config.workers or cores
    if config.verify:
        verify(folder)
    elif config.dry_run:
        print(f"{', '.join(config.source)}: {estimate(find_sources(config, {}), config.workers)}")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / ".lock", timeout=1):  # the workers of a killed process hold it for a moment more
                build(config, folder)
        except Timeout:
            raise UserError(f"another process is writing to {folder}; wait for it, or choose another --data-dir") from None
        except OSError as error:  # of reading, `patiently` tells
            raise UserError(f"{folder} cannot be written ({error.strerror}); that mended, the same command goes on") from None
        except BrokenProcessPool:
            raise UserError("a worker was killed, for want of memory? the same command goes on, as does --workers 1") from None


def interrupted(*_) -> None:
    os.write(2, b"\ninterrupted: the same command goes on from the last whole shard\n")  # print may be interrupted itself
    os._exit(130)


def command() -> None:
    """`main`, and an end at once, whatever the threads that read and write and the workers are at: left to itself, Python would
    wait for a hub that stalls, and a stream broken off can make it hang (apache/arrow#45214)."""
    signal.signal(signal.SIGINT, interrupted)
    code = 0
    try:
        run_script(main)
    except SystemExit as end:
        code = end.code or 0
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    command()

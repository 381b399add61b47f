"""Where text comes from: local files, Python's own library, the Hugging Face hub.

`find_sources` lists the files, `find_split` says which text is for validation, and `read_batches`
reads them from a given place.
"""

import bz2
import codecs
import fnmatch
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from support.base.errors import UserError, reading
from support.base.files import hash_file, refuse_pointer
from support.text.decontaminate import Benchmark, cut_out
from support.text.names import ALWAYS_THERE
from support.text.tokenizer import NO_SPACE, SPACE

HUB = {  # name: hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]]
    "fineweb-edu-10B": "hub:HuggingFaceFW/fineweb-edu:sample-10BT",
    "fineweb-edu-100B": "hub:HuggingFaceFW/fineweb-edu:sample-100BT",
    "fineweb-edu-350B": "hub:HuggingFaceFW/fineweb-edu:sample-350BT",
    "fineweb-10B": "hub:HuggingFaceFW/fineweb:sample-10BT",
    "tinystories": "hub:roneneldan/TinyStories",
    "openwebtext": "hub:Skylion007/openwebtext",
}
ASSETS = Path(__file__).parents[2] / "assets"
TINYSHAKESPEARE = ASSETS / "tinyshakespeare.txt"
TRAINING_CHARS = 1_003_854  # nanoGPT's split of it (data/shakespeare_char/prepare.py)
NOT_MODULES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
MOST_HELD_OUT = 10_000_000  # bytes of text, where the split comes before the vocabulary
VOCABULARY_TEXT = 100_000_000  # bytes that a vocabulary is trained on
DISTINCT_WORDS = 10_000_000  # bytes of different words, to train on which takes 1 GB of memory
STRETCH = 2**20  # bytes of a text file that are read at a time
# A cut there changes no token: no word of GPT-2's pattern has a visible character before a space.
BEFORE_LAST_SPACE = re.compile(rf".*{NO_SPACE}(?={SPACE})", re.DOTALL)
BATCH_DOCUMENTS = 1000  # texts in a batch, at most
BATCH_CHARS = 2**20  # characters that fill a batch
FIRST_ANSWER = 10  # seconds that the hub has for its first answer
RETRY_WAITS = (1, 4, 15, 60, 60, 60)  # seconds before a stream that broke off is tried again
WINDOW_TOO_LONG = "requires too much memory for decoding"  # zstd's words: made by --long
OTHER_COLUMN = "--column names another, which all files must have"

AROUND = 2000  # characters before and behind a stretch: more than 13 words and a margin

# a document, or a stretch of a long one; whether the document starts here
Stretch = tuple[str, bool]
Text = tuple[str, bool, tuple[str, str]]  # and what the document has before and behind it


class Place(NamedTuple):
    """Where a batch of texts comes from."""

    file: int  # the number of its first file
    text: int  # of its first text there
    last_file: int


@dataclass(eq=False)
class File:
    name: str
    read: Callable[[], Iterator[Stretch]]
    commit: str | None = None  # of the dataset on the hub
    local: bool = False  # the user's own
    stamp: tuple = ()  # a local file's size, last change and SHA-256 when we first read it
    held_out: str = ""  # if it is for validation, and so read before all others: what it is
    # the part of it: from a character of one text to a character of another, or to the end
    begin: tuple[int, int] = (0, 0)
    end: tuple[int, int] = (sys.maxsize, 0)


# -- finding: the files behind each source, in the order in which they are read


def find_sources(options: dict, commits: dict[str, str | None]) -> list[File]:
    """All files, each once. A dataset has its commit in `commits`; new ones are added there."""
    unique: dict[str | File, File] = {}
    held_out = options.get("val_source", ())  # before all others: a file of both is held out
    for source in (*held_out, *options["source"]):
        name = HUB.get(source, source)
        with reading(name):
            if name.startswith("hub:"):
                revision = commits.get(source) or options["revision"]
                files: Iterable[File] = find_on_hub(name, options["column"], revision)
            elif source == "stdlib":
                files = find_stdlib()
            elif source == "tinyshakespeare":
                whole = File(source, partial(read_text, str(TINYSHAKESPEARE)))
                last = replace(
                    whole, begin=(0, TRAINING_CHARS), held_out="the last tenth of Shakespeare"
                )
                files = [last, replace(whole, end=(0, TRAINING_CHARS))]
            elif source == "tales":
                books = {name: str(ASSETS / f"tales_{name}.jsonl.xz") for name in ("val", "train")}
                files = [File(name, partial(read_jsonl, books[name], "text")) for name in books]
                files[0].held_out = "The Book of Dragons and Ozma of Oz"
            else:
                files = find_local(source, options["column"])
            for file in files:
                if source in held_out:
                    file.held_out = "what --val-source names"
                unique.setdefault(os.path.realpath(file.name) if file.local else file, file)
                commits[source] = file.commit
    return sorted(unique.values(), key=lambda file: not file.held_out)


def find_stdlib() -> Iterator[File]:
    """The running Python's library, in an order that looks random but is always the same."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(root).as_posix(): str(path) for path in root.rglob("*.py")}
    modules = [name for name in paths if NOT_MODULES.isdisjoint(name.split("/"))]
    for name in sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest()):
        yield File(name, partial(read_text, paths[name]))


def find_paths(source: str) -> list[str]:
    """The files of a path or a glob, in the order in which they are read. Other sources: none."""
    if source in (*HUB, *ALWAYS_THERE) or source.startswith("hub:"):
        return []
    return [source] if os.path.exists(source) else sorted(expand(source))


def expand(pattern: str) -> list[str]:
    """glob.glob, where ** means folders of any depth; but it enters each folder once.

    glob follows a link to a folder above it again and again: two of them take forever.
    """
    top, recursive, rest = f"/{pattern}".partition("/**/")
    if not recursive:
        return glob.glob(pattern)
    found = []
    entered = set()
    for root in glob.glob(top[1:]) if top else [""]:
        for folder, inside, _ in os.walk(root or ".", followlinks=True):
            if (place := os.path.realpath(folder)) in entered:
                inside.clear()
                continue
            entered.add(place)
            inside[:] = sorted(name for name in inside if not name.startswith("."))
            here = os.path.join(folder, "").removeprefix("" if root else "./")
            found += expand(glob.escape(here) + rest)
    return found


def kind_of(path: str) -> str:
    """The kind of a file, packed or not, by the end of its name: of READERS, if it is read."""
    name, end = os.path.splitext(path.lower())
    return (name if end in UNPACKED_BY else name + end).rpartition(".")[2]


def find_local(source: str, column: str) -> Iterator[File]:
    """Yields the files of a path or a glob."""
    if not (paths := find_paths(source)):
        raise UserError(f"{source}: no such file, and none of the sources in --help")
    for path in paths:
        kind = kind_of(path)
        if kind not in READERS or not Path(path).is_file():  # a pipe cannot be read twice
            ends = [f"*.{kind}{packed}" for kind in READERS for packed in ("", *UNPACKED_BY)]
            inside = os.path.join(glob.escape(path), "**")
            files = expand(os.path.join(inside, "*"))
            found = [os.path.join(inside, end) for end in ends if fnmatch.filter(files, end)]
            hint = "name other files, or copies that end in .txt"
            if found:
                hint = f"give {shlex.join(found)}"
            raise UserError(f"{path}: .txt, .md, .jsonl, .parquet and code are read; {hint}")
        yield File(path, partial(READERS[kind], path, column), local=True)


def find_on_hub(source: str, column: str, revision: str) -> Iterator[File]:
    """Yields the files of a dataset. They are streamed: nothing is copied to the disk."""
    os.environ.setdefault("USE_TORCH", "0")  # `datasets` would import torch, 200 MB for nothing
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    repository, config, split, own_column = f"{source.removeprefix('hub:')}:::".split(":")[:4]
    split = split or "train"
    column = own_column or column
    info = HfApi().dataset_info(repository, revision=revision or None, timeout=FIRST_ANSWER)
    builder = load_dataset_builder(repository, config or None, revision=info.sha)
    stream = builder.as_streaming_dataset(split).select_columns(column).with_format("arrow")
    urls = builder.config.data_files[split]
    for i, url in enumerate(urls):  # each file is a shard of the stream
        tables = partial(stream.shard(len(urls), i).iter, batch_size=100)
        read = partial(read_rows, tables, column, url)
        if kind_of(url) == "txt":  # `datasets` would make a document of each line
            read = partial(read_text, url)
        yield File(url, read, info.sha)


def find_changes(sources: list[str], stamps: dict[str, list], all_read: bool) -> list[str]:
    """How local files differ from those that were read, a phrase each; none if all are deleted."""
    present = {os.path.realpath(path): path for source in sources for path in find_paths(source)}
    read = {os.path.realpath(path): path for path in stamps}
    same = [read[key] for key in read if key in present]
    expected = list(present)[: None if all_read else len(same)]  # files are read in this order
    changes = [f"{path} has changed" for path in same if has_changed(path, stamps[path])]
    changes += [f"{present[key]} is new" for key in expected if key not in read]
    changes += [f"{read[key]} is gone" for key in read if key not in present]
    return changes if present else []


def has_changed(path: str, stamp: list) -> bool:
    """Whether a local file differs from its stamp: size, time of the last change, SHA-256."""
    status = os.stat(path)
    size, time_ns, sha256 = stamp[:3]  # of a part of the file, old manifests have a fourth
    if (status.st_size, status.st_mtime_ns) == (size, time_ns):
        return False
    return status.st_size != size or hash_file(Path(path)) != sha256


# -- where text is split, and a vocabulary trained on it: no token may know what is held out


def find_split(files: list[File], most: float) -> list[int]:
    """Where training begins: the number of the file, of the text in it, and of its character.

    What comes before is for validation: 5% of the bytes, at most MOST_HELD_OUT, in whole documents
    if they are no more than twice as much. most: where a long source counts as ended, in bytes.
    """
    size = 0
    first: list[tuple] = []  # texts: the bytes before each, its place, it, is it a start
    for i, j, (text, starts, _) in read_texts(files):
        if size <= 2 * MOST_HELD_OUT:
            first.append((size, i, j, text, starts))
        size += num_bytes(text)
        if size >= min(most, 20 * MOST_HELD_OUT):
            break
    if not size:
        raise UserError("there is no text: nothing is left to train on")
    wanted = max(1, int(min(size, most, 20 * MOST_HELD_OUT)) // 20)
    for before, i, j, _, starts in first:
        if starts and wanted <= before <= 2 * wanted:
            return [i, j, 0]
    before, i, j, text, _ = [place for place in first if place[0] < wanted][-1]
    data = text.encode("utf-8", "surrogatepass")[: wanted - before]
    at = max(1, len(data.decode("utf-8", "ignore")))
    return [i, j, cut_near(text, at, most=wanted // 10)]


def cut_near(text: str, at: int, most: int) -> int:
    """The nearest end of a line, else space, at most `most` characters from `at`; else `at`."""
    first = max(1, at - most)  # both pieces have at least a character
    last = min(len(text) - 1, at + most)
    for sign in ("\n", " "):
        ends = [text.rfind(sign, first - 1, at) + 1, text.find(sign, at, last) + 1]
        if near := [end for end in ends if first <= end <= last]:
            return min(near, key=lambda end: abs(end - at))
    return at


def split(files: list[File], place: list[int]) -> list[File]:
    """The same text, held out up to a place that find_split has found."""
    i, j, at = place
    before = files[:i]
    if (j, at) > (0, 0):
        before.append(replace(files[i], end=(j, at)))
    rest = [replace(files[i], begin=(j, at)), *files[i + 1 :]]
    return [replace(file, held_out="its beginning") for file in before] + rest


def read_for_vocabulary(files: list[File], benchmark: Benchmark | None) -> Iterator[str]:
    """Yields training text without the benchmark's, up to VOCABULARY_TEXT or DISTINCT_WORDS."""
    size = 0
    distinct = 0  # bytes of `words`
    words: set[str] = set()
    for _, _, (text, _, around) in read_texts([file for file in files if not file.held_out]):
        spans, _ = cut_out(text, benchmark, *around)
        yield from (text[start:end] for start, end in spans)
        size += num_bytes(text)
        new = set(re.findall(r"[^\W_]+", text)) - words
        words |= new
        distinct += num_bytes("".join(new))
        if distinct > DISTINCT_WORDS or size >= VOCABULARY_TEXT:
            sample = f"the first {size / 1e6:,.0f} MB"
            if distinct > DISTINCT_WORDS:  # in Japanese, nearly every clause is another word
                sample += ", because their words are so many (text without spaces?)"
            print(f"vocabulary: trained on {sample}", file=sys.stderr)
            return


def find_size(files: list[File], most: float) -> float:
    """The bytes of the text to train on, at most `most`, as far as VOCABULARY_TEXT."""
    size = 0
    for _, _, (text, *_) in read_texts([file for file in files if not file.held_out]):
        size += num_bytes(text)
        if size >= min(VOCABULARY_TEXT, most):
            break
    return min(size, most)


def num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


# -- reading each kind of file


def open_file(path: str) -> Any:
    """Opens a file, here or on the hub, and unpacks it by the end of its name."""
    file: Any = path
    if path.startswith("hf://"):
        from huggingface_hub import HfFileSystem

        file = HfFileSystem().open(path, "rb")
    if unpack := UNPACKED_BY.get(os.path.splitext(path.lower())[1]):
        return unpack(file)
    return open(path, "rb") if file is path else file


def open_zst(file: Any) -> Any:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(file, compression="zstd"))


UNPACKED_BY: dict[str, Callable] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": open_zst,
}


def read_text(path: str, column: str = "") -> Iterator[Stretch]:
    """Yields a text file, one document, in stretches with the same tokens as the whole."""
    decoder = None
    done = 0  # bytes decoded
    text = ""
    starts = True
    final = False
    with open_file(path) as file:
        while not final:
            data = file.read(STRETCH)
            final = len(data) < STRETCH
            # without the byte order mark; UTF-16 by its mark or its zeros, as Windows writes it
            decoder = decoder or codecs.getincrementaldecoder(json.detect_encoding(data))()
            seen = max(0, len(text) - 1)  # no stretch ends before: this keeps the time linear
            try:
                text += decoder.decode(data, final)
            except UnicodeDecodeError as error:
                waiting, _ = decoder.getstate()  # the first bytes of a character
                place = done - len(waiting) + error.start
                name = error.encoding.upper()
                told = f"byte {place:,} is not {name}: {error.reason}"
                if name == "UTF-8":
                    told += "; an older file may become it by iconv -f latin1 -t utf-8"
                raise ValueError(told) from error
            done += len(data)
            if not final and (stretch := BEFORE_LAST_SPACE.match(text, seen)):
                yield text[: stretch.end()], starts
                text = text[stretch.end() :]
                starts = False
    yield text, starts


def read_jsonl(path: str, column: str) -> Iterator[Stretch]:
    """Yields the text under `column` of each JSON object: a line of the file, or all in a list."""
    begun = False
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            is_list = not begun and line.lstrip().startswith(b"[")
            begun = True
            with reading(f"{path}, line {number}, as a JSON object,"):
                rows = json.loads(line + file.read()) if is_list else [json.loads(line)]
            for entry, row in enumerate(rows, 1):
                where = f"entry {entry} of the list" if is_list else f"line {number}"
                yield take_text(row, column, f"{path}, {where}"), True


def take_text(row: Any, column: str, where: str) -> str:
    """A text, or that under `column` of a JSON object; null is an empty one. Raises UserError."""
    if isinstance(row, str):
        return row
    if not isinstance(row, dict) or column not in row:
        names = list(row) if isinstance(row, dict) else row
        raise UserError(f"{where} has no {column!r} but {names!r:.200}; {OTHER_COLUMN}")
    if not isinstance(row[column], str | None):
        raise UserError(f"{where}: {column!r} is {row[column]!r:.60}, not a text; {OTHER_COLUMN}")
    return row[column] or ""


def read_parquet(path: str, column: str) -> Iterator[Stretch]:
    """Yields a column's rows. `datasets` would need more memory, and a second to start."""
    import pyarrow.parquet as pq

    # pre-buffering would hold the whole column in memory
    with pq.ParquetFile(path, buffer_size=STRETCH, pre_buffer=False) as parquet:
        if column not in (names := parquet.schema_arrow.names):
            raise UserError(f"{path} has no column {column!r} but {names}; {OTHER_COLUMN}")
        tables = partial(parquet.iter_batches, 100, columns=[column], use_threads=False)
        yield from read_rows(tables, column, path)


def read_rows(tables: Callable[[], Iterable], column: str, name: str) -> Iterator[Stretch]:
    """Yields each row of a column of Arrow's tables; a null is an empty document."""
    from pyarrow.types import is_nested, is_primitive

    for table in tables():
        kind = table.column(column).type
        if is_primitive(kind) or is_nested(kind):  # numbers, dates, …; lists, structs
            raise UserError(f"{name}: {column!r} is of {kind}, not of text; {OTHER_COLUMN}")
        for text in table.column(column).cast("string").to_pylist():
            yield text or "", True


CODE = "c cc cpp cu cuh go h hpp hs java jl js lean lua py r rb rs scala sh sql swift tex ts"
READERS = {
    **dict.fromkeys(("txt", "md", "rst", *CODE.split()), read_text),
    **dict.fromkeys(("json", "jsonl", "ndjson"), read_jsonl),
    "parquet": read_parquet,
}


def read_batches(
    files: list[File], file: int = 0, start: int = 0
) -> Iterator[tuple[Place, list[Text]]]:
    """Yields batches of texts, each with its place, from text `start` of a file on."""
    texts = read_texts(files, file, start)
    # what is held out ends with a batch
    for _, group in groupby(texts, key=lambda text: not files[text[0]].held_out):
        batch: list[Text] = []
        for i, j, text in group:
            if not batch:
                begin = (i, j)
                chars = 0
            batch.append(text)
            chars += len(text[0])
            if len(batch) >= BATCH_DOCUMENTS or chars >= BATCH_CHARS:
                yield Place(*begin, i), batch
                batch = []
        if batch:
            yield Place(*begin, i), batch


def read_texts(files: list[File], file: int = 0, start: int = 0) -> Iterator[tuple[int, int, Text]]:
    """Yields (number of its file, number, text) of each text, from text `start` of a file on."""
    for i in range(file, len(files)):
        first, skipped = files[i].begin
        last, taken = files[i].end
        texts = enumerate(with_neighbours(read_patiently(files[i])))
        for j, (text, starts, around) in islice(texts, max(start, first), last + (taken > 0)):
            text = text[skipped if j == first else 0 : taken if j == last else None]
            before = "" if j == first and skipped else around[0]
            after = "" if j == last else around[1]
            # a document starts where a part begins
            yield i, j, (text, starts or j == first, (before, after))
        start = 0


# errors that another attempt would only repeat, besides HTTP's 4xx
PERMANENT: tuple[type[Exception], ...] = (UserError, UnicodeError, LookupError, TypeError)
PERMANENT += (FileNotFoundError, PermissionError, NotImplementedError, MemoryError)


def is_permanent(error: Exception) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return isinstance(error, PERMANENT) or (status // 100 == 4 and status not in (408, 429))


def with_neighbours(stretches: Iterator[Stretch]) -> Iterator[Text]:
    """Yields each with the ends of those beside it in its document."""
    before = ""
    for (text, starts), (next_text, next_starts) in pairwise(chain(stretches, [("", True)])):
        before = "" if starts else before
        yield text, starts, (before, "" if next_starts else next_text[:AROUND])
        before = text[-AROUND:]


def read_patiently(file: File) -> Iterator[Stretch]:
    """Yields each text. Retries if the hub fails. Stamps a local file when it is first read."""
    number = 0
    with reading(file.name):
        if file.local and not file.stamp:
            refuse_pointer(file.name)
            status = os.stat(file.name)
            file.stamp = (status.st_size, status.st_mtime_ns, hash_file(Path(file.name)))
        for wait in (*RETRY_WAITS, None):
            try:
                for text in islice(file.read(), number, None):
                    yield text
                    number += 1
                return
            except Exception as error:
                if WINDOW_TOO_LONG in str(error):
                    advice = "unpack it first, by zstd -d --long=31"
                    raise UserError(f"{file.name}: {advice}") from error
                if wait is None or not file.commit or is_permanent(error):
                    raise
                print(f"\n{file.name}: {error}; trying again in {wait} s", file=sys.stderr)
            time.sleep(wait)

"""Where text comes from: local files, Python's own library, the Hugging Face hub.

`find_sources` lists the files behind `--source`. `read_batches` reads them from a given place.
"""

import codecs
import glob
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from support.common import UserError, hash_file, reading
from support.decontaminate import Benchmark, cut_out

HUB = {  # name: hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]]
    "fineweb-edu-10B": "hub:HuggingFaceFW/fineweb-edu:sample-10BT",
    "fineweb-edu-100B": "hub:HuggingFaceFW/fineweb-edu:sample-100BT",
    "fineweb-edu-350B": "hub:HuggingFaceFW/fineweb-edu:sample-350BT",
    "fineweb-10B": "hub:HuggingFaceFW/fineweb:sample-10BT",
    "tinystories": "hub:roneneldan/TinyStories",
    "openwebtext": "hub:Skylion007/openwebtext",
}
TINYSHAKESPEARE = "https://github.com/karpathy/char-rnn/raw/master/data/tinyshakespeare/input.txt"
NOT_MODULES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
NOT_MODULES |= {"_vendor", "_vendored", "vendor", "vendored", "extern", "externals", "third_party"}
GENERATED = re.compile(  # what a module says of itself in its first 1000 characters
    r'(?im)^(#|"""|this (file|module)).*(auto-?(matically )?generated|'
    r"generated (and used )?(by|from))|do(n.t| not) edit"
)
HELD_OUT = "4"  # the first digit of the hash of a name: eight packages of requirements.txt have it
PACKAGE_BYTES = 4_000_000  # of one package at most: torch and transformers would be half of all
HELD_OUT_BYTES = 400_000  # of one that is held out: networkx would be most of the validation split
STRETCH = 2**20  # bytes of a text file that are read at a time
BEFORE_LAST_SPACE = re.compile(r".*\S(?=\s)", re.DOTALL)  # ends in a visible character
BATCH_DOCUMENTS = 1000  # texts in a batch, at most
BATCH_CHARS = 2**20  # characters that fill a batch
FIRST_ANSWER = 10  # seconds that the hub has for its first answer
WAITS = (1, 4, 15, 60, 60, 60)  # seconds before a stream that broke off is tried again

Text = tuple[str, bool]  # a document or a stretch of a long one; whether the document starts here
# of a batch: its first file, its first text there, its last file, and what was read of that one
Place = tuple[int, int, int, tuple]
Batch = tuple[Place, list[Text]]


@dataclass(eq=False)
class File:
    name: str
    read: Callable[[], Iterator[Text]]
    commit: str | None = None  # of the dataset on the hub
    local: bool = False  # the user's own
    stamp: tuple = ()  # a local file's size, last change and SHA-256 when we began to read it
    held_out: bool = False  # for validation: read before all others


# -- finding: the files behind each source, in the order in which they are read


def find_sources(options: dict, commits: dict[str, str | None]) -> list[File]:
    """All files, each once. A dataset has its commit in `commits`; new ones are added there."""
    unique: dict[str | File, File] = {}
    files: Iterable[File]
    for source in options["source"]:
        name = HUB.get(source, source)
        with reading(name):
            if name.startswith("hub:"):
                revision = commits.get(source) or options["revision"]
                files = find_on_hub(name, options["column"], revision)
            elif source == "stdlib":
                files = (File(str(n), partial(read_text, p)) for n, p in shuffle(find_stdlib()))
            elif source == "python":
                files = find_python()
            elif source == "tinyshakespeare":
                files = [File(TINYSHAKESPEARE, partial(read_text, TINYSHAKESPEARE))]
            else:
                files = find_local(source, options["column"])
            for file in files:
                unique.setdefault(os.path.realpath(file.name) if file.local else file, file)
                commits[source] = file.commit
    return list(unique.values())


def find_stdlib() -> dict[PurePath, str]:
    """The names and paths of all modules of the running Python's library."""
    root = Path(sysconfig.get_path("stdlib"))
    return {path.relative_to(root): str(path) for path in root.rglob("*.py")}


def shuffle(paths: dict[PurePath, str]) -> list[tuple[PurePath, str]]:
    """All but NOT_MODULES, in an order that looks random but is always the same."""
    modules = [item for item in paths.items() if NOT_MODULES.isdisjoint(item[0].parts)]
    return sorted(modules, key=lambda item: hashlib.sha256(item[0].as_posix().encode()).digest())


def find_python() -> Iterator[File]:
    """Yields modules of the standard library and of installed packages, first what is held out.

    Tests, vendored copies and generated files are left out. A package is held out if the SHA-256 of
    its name begins with HELD_OUT. From the others we cut each NGRAM words that it shares with them.
    """
    packages: dict[str, list] = {}
    for distribution in distributions():  # the first of a name is the one that Python imports
        if project := distribution.metadata["Name"]:  # none: pip has left it half deleted
            packages.setdefault(re.sub(r"[-_.]+", "-", project).lower(), distribution.files or [])
    held_out: dict[PurePath, str] = {}
    others = {name: path for name, path in shuffle(find_stdlib()) if is_written_by_hand(path)}
    for package, files in packages.items():
        is_held_out = hashlib.sha256(package.encode()).hexdigest().startswith(HELD_OUT)
        room = HELD_OUT_BYTES if is_held_out else PACKAGE_BYTES
        for name, path in shuffle({n: str(n.locate()) for n in files if n.suffix == ".py"}):
            size = os.path.getsize(path) if os.path.exists(path) else 0
            if size <= room and is_written_by_hand(path):  # which reads it
                room -= size
                (held_out if is_held_out else others)[name] = path
    if not held_out:
        raise UserError("no installed package is held out: run it in the environment of make setup")
    print("held out for validation:", *sorted({n.parts[0] for n in held_out}), file=sys.stderr)
    benchmark = cache(lambda: Benchmark(Path(p).read_text("utf-8") for p in held_out.values()))
    for name, path in shuffle(held_out):
        yield File(str(name), partial(read_text, path), held_out=True)
    for name, path in shuffle(others):
        yield File(str(name), partial(read_without, path, benchmark))


def is_written_by_hand(path: str) -> bool:
    """Whether a module is there, in UTF-8, not empty, and does not say that it was generated."""
    with suppress(OSError, UnicodeDecodeError):
        text = Path(path).read_text("utf-8")
        return bool(text) and not GENERATED.search(text[:1000])
    return False


def find_paths(source: str) -> list[str]:
    """The files of a path or a glob, in the order in which they are read. Other sources: none."""
    if source in (*HUB, "stdlib", "python", "tinyshakespeare") or source.startswith("hub:"):
        return []
    return [source] if os.path.exists(source) else sorted(glob.glob(source, recursive=True))


def find_local(source: str, column: str) -> Iterator[File]:
    """Yields the files of a path or a glob."""
    if not (paths := find_paths(source)):
        raise UserError(f"--source {source}: no such file, and none of the sources in --help")
    for path in paths:
        kind = path.removesuffix(".gz").rpartition(".")[2]
        if kind not in READERS:
            globs = [os.path.join(path, f"*.{kind}{gz}") for kind in READERS for gz in ("", ".gz")]
            matching = [f"'{pattern}'" for pattern in globs if glob.glob(pattern)]
            hint = f"give {' '.join(matching)}" if matching else "copy plain text to a .txt file"
            raise UserError(f"--source {path}: .txt, .jsonl and .parquet are read; {hint}")
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
        yield File(url, partial(read_rows, tables, column), info.sha)


def find_changes(options: dict, stamps: dict[str, list], all_read: bool) -> list[str]:
    """How local files differ from those that were read, a phrase each; none if all are deleted.

    stamps: of the files that were read, in order. all_read: they are all that the sources had.
    """
    present = {os.path.realpath(p): p for source in options["source"] for p in find_paths(source)}
    read = {os.path.realpath(path): path for path in stamps}
    same = [read[key] for key in read if key in present]
    expected = list(present)[: None if all_read else len(same)]
    changes = [f"{p} has changed" for p in same if has_changed(p, options["column"], stamps[p])]
    changes += [f"{present[key]} is new" for key in expected if key not in read]
    changes += [f"{read[key]} is gone" for key in read if key not in present]
    return changes if present else []


def has_changed(path: str, column: str, stamp: list) -> bool:
    """Whether the text that was read of a local file is another one now. stamp: of the reading.

    A stamp is (size, time of the last change, SHA-256). Of a file that was not read to its end, the
    hash is that of the texts that were read, and their number follows: the rest may change.
    """
    status = os.stat(path)
    if [status.st_size, status.st_mtime_ns] == stamp[:2]:
        return False
    if len(stamp) == 3:
        return hash_file(Path(path)) != stamp[2]
    [file] = find_local(path, column)
    last = islice(read_patiently(file), stamp[3] - 1, stamp[3])
    return [sha256.hexdigest() for _, sha256 in last] != [stamp[2]]


# -- reading each kind of file


def open_file(path: str) -> Any:
    """Opens a file, decompressed if its name says so, or a text on the web, as bytes."""
    if path.startswith("http"):
        return io.BytesIO(download(path))
    import fsspec

    return fsspec.open(path, compression="infer")


def download(url: str) -> bytes:
    """The content behind a URL. Asks a busy server three times. Raises OSError."""
    import requests
    from requests.adapters import HTTPAdapter, Retry

    retry = Retry(2, connect=0, backoff_factor=1, status_forcelist=[429, 500, 502, 503, 504])
    with requests.Session() as session:
        session.mount(url, HTTPAdapter(max_retries=retry))
        response = session.get(url, timeout=(3, 20))  # seconds to connect, and without a byte
        response.raise_for_status()
    return response.content


def read_text(path: str, column: str = "") -> Iterator[Text]:
    """Yields a text file, one document, in stretches with the same tokens as the whole.

    A stretch ends between a visible character and a space. No word of GPT-2's pattern has both
    in this order, so no token is cut in two. A byte order mark is left out.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text = ""
    starts = True
    with open_file(path) as file:
        while len(data := file.read(STRETCH)) == STRETCH:
            seen = max(0, len(text) - 1)  # no stretch ends before: this keeps the time linear
            text += decoder.decode(data)
            if stretch := BEFORE_LAST_SPACE.match(text, seen):
                yield text[: stretch.end()], starts
                text = text[stretch.end() :]
                starts = False
    yield text + decoder.decode(data, final=True), starts


def read_without(path: str, benchmark: Callable[[], Benchmark]) -> Iterator[Text]:
    """Yields a file in whole lines, without the text that the benchmark has too."""
    text = "".join(stretch for stretch, _ in read_text(path))
    for start, end in cut_out(text, benchmark().find(text))[0]:
        piece = text[start:end]
        if start:
            piece = piece.partition("\n")[2]
        if end < len(text):
            piece = piece[: piece.rfind("\n") + 1]
        if piece:
            yield piece, True


def read_jsonl(path: str, column: str) -> Iterator[Text]:
    """Yields the text that each line, a JSON object, has under `column`."""
    expected = f"as a JSON object with a text as its {column!r} (--column),"
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                with reading(f"{path}, line {number}, {expected}"):
                    text = json.loads(line)[column] + ""  # a TypeError if it is not a text
                yield text, True


def read_parquet(path: str, column: str) -> Iterator[Text]:
    """Yields a column's rows. `datasets` would need more memory, and a second to start."""
    import pyarrow.parquet as pq

    # pre-buffering would hold the whole column in memory
    with pq.ParquetFile(path, buffer_size=STRETCH, pre_buffer=False) as parquet:
        if column not in (names := parquet.schema_arrow.names):
            raise UserError(f"{path} has no column {column!r} but {names}; --column names another")
        tables = partial(parquet.iter_batches, 100, columns=[column], use_threads=False)
        yield from read_rows(tables, column)


def read_rows(tables: Callable[[], Iterable], column: str) -> Iterator[Text]:
    """Yields each row of a column of Arrow's tables; a null is an empty document."""
    for table in tables():
        for text in table.column(column).cast("string").to_pylist():
            yield text or "", True


READERS = {"txt": read_text, "json": read_jsonl, "jsonl": read_jsonl, "parquet": read_parquet}


# -- batches


def read_batches(files: list[File], file: int = 0, number: int = 0) -> Iterator[Batch]:
    """Yields batches of texts, each with its place, from text `number` of a file on."""
    batch: list[Text] = []
    chars = 0
    for i in range(file, len(files)):
        texts = enumerate(read_patiently(files[i]))
        for j, (text, sha256) in islice(texts, number if i == file else 0, None):
            if not batch:
                begin = (i, j)
            batch.append(text)
            chars += len(text[0])
            if len(batch) >= BATCH_DOCUMENTS or chars >= BATCH_CHARS:
                stamp = files[i].stamp and (*files[i].stamp[:2], sha256.hexdigest(), j + 1)
                yield (*begin, i, stamp), batch
                batch = []
                chars = 0
    if batch:
        yield (*begin, i, files[i].stamp), batch


def read_patiently(file: File) -> Iterator[tuple[Text, Any]]:
    """Yields each text and, of a local file, the hash of all so far. Retries if the hub fails."""
    sha256 = hashlib.sha256()
    number = 0
    with reading(file.name):
        if file.local:
            status = os.stat(file.name)
            file.stamp = (status.st_size, status.st_mtime_ns, hash_file(Path(file.name)))
        for wait in (*WAITS, None):
            try:
                for text in islice(file.read(), number, None):
                    if file.local:  # UTF-8 has no byte FF: it ends the text
                        sha256.update(text[0].encode("utf-8", "surrogatepass") + b"\xff")
                    yield text, sha256
                    number += 1
                return
            except Exception as error:
                if wait is None or not file.commit:
                    raise
                print(f"\n{file.name}: {error}; trying again in {wait} s", file=sys.stderr)
            time.sleep(wait)

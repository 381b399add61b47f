"""Where text comes from: local files, Python's own library, the Hugging Face hub.

`find_sources` lists the files behind `--source`. `read_batches` reads them from a given place.
"""

import codecs
import glob
import hashlib
import io
import itertools
import json
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import distributions
from pathlib import Path, PurePath

from support.common import UserError, first_line, hash_file
from support.decontaminate import Benchmark, cut_out

HUB = {  # name: hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]]
    "fineweb-edu-10B": "hub:HuggingFaceFW/fineweb-edu:sample-10BT",
    "fineweb-edu-100B": "hub:HuggingFaceFW/fineweb-edu:sample-100BT",
    "fineweb-edu-350B": "hub:HuggingFaceFW/fineweb-edu:sample-350BT",
    "fineweb-10B": "hub:HuggingFaceFW/fineweb:sample-10BT",
    "tinystories": "hub:roneneldan/TinyStories",
    "openwebtext": "hub:Skylion007/openwebtext",
}
CHAR_RNN = "https://raw.githubusercontent.com/karpathy/char-rnn/master"
TINYSHAKESPEARE = f"{CHAR_RNN}/data/tinyshakespeare/input.txt"
NOT_MODULES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
VENDORED = {"_vendor", "_vendored", "vendor", "vendored", "extern", "externals", "third_party"}
BY_A_PROGRAM = r"auto-?(matically )?generated|generated (and used )?(by|from)"
GENERATED = re.compile(  # what a module says of itself
    rf'^(#|"""|this (file|module)).*({BY_A_PROGRAM})|do(n.t| not) edit',
    re.IGNORECASE | re.MULTILINE,
)
GENERATED_WITHIN = 1000  # characters: a module's head, where it says so
HELD_OUT = "4"  # the first digit of the hash of a name: eight packages of requirements.txt have it
PACKAGE_BYTES = 4_000_000  # of one package at most: torch and transformers would be half of all
HELD_OUT_BYTES = 400_000  # of one that is held out: networkx would be most of the validation split
STRETCH = 2**20  # bytes of a text file that are read at a time
BATCH_DOCUMENTS = 1000  # texts in a batch, at most
BATCH_CHARS = 2**20  # characters that fill a batch
FIRST_ANSWER = 10  # seconds that the hub has for its first answer
WAITS = (1, 4, 15, 60, 60, 60)  # seconds before a stream that broke off is tried again

Text = tuple[str, bool]  # a document or a stretch of a long one; whether the document starts here


@dataclass(eq=False)
class File:
    name: str
    read: Callable[[], Iterator[Text]]
    commit: str | None = None  # of the dataset on the hub
    local: bool = False  # the user's own
    stamp: list | None = None  # what it was when we began to read it
    held_out: bool = False  # for validation: read before all others


# -- finding: the files behind each source, in the order in which they are read


def find_sources(
    sources: Iterable[str], column: str, revision: str, commits: dict[str, str | None]
) -> Iterator[File]:
    """Yields all files. A dataset has its commit in `commits`; new ones are added there."""
    seen: set = set()
    for source in sources:
        name = HUB.get(source, source)
        with one_sentence(name):
            if name.startswith("hub:"):
                found = list(find_on_hub(name, column, commits.get(source) or revision))
            elif source == "stdlib":
                modules = order_modules(find_stdlib())
                found = [File(name, partial(read_text, path, "")) for name, path in modules]
            elif source == "python":
                found = list(find_python())
            elif source == "tinyshakespeare":
                found = [File(TINYSHAKESPEARE, partial(read_text, TINYSHAKESPEARE, column))]
            else:
                found = list(find_local(source, column))
        commits[source] = found[0].commit
        once = {os.path.realpath(file.name) if file.local else file: file for file in found}
        new = [file for key, file in once.items() if key not in seen]
        if again := len(found) - len(new):
            print(f"--source {source}: {again} named before; each is read once", file=sys.stderr)
        seen |= once.keys()
        yield from new


@contextmanager
def one_sentence(name: str) -> Iterator[None]:
    """Turns each error of reading a source into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{name} cannot be read ({reason}); fix that to go on") from error


def find_stdlib() -> dict[str, str]:
    """The names and paths of the modules of the running Python's library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(root): str(path) for path in root.rglob("*.py")}
    return {name.as_posix(): path for name, path in paths.items() if is_module(name)}


def is_module(name: PurePath) -> bool:
    return name.suffix == ".py" and NOT_MODULES.isdisjoint(name.parts)


def order_modules(paths: dict[str, str]) -> list[tuple[str, str]]:
    """An order that looks random but is always the same: the first ones are a sample."""
    return sorted(paths.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())


def find_python() -> Iterator[File]:
    """Yields the modules of the standard library and of the installed packages, without tests.

    Vendored copies and generated files are left out. A package is held out if the SHA-256 of its
    name begins with HELD_OUT. From all others we cut what it shares with them, NGRAM words or more.
    """
    packages: dict[str, list] = {}
    for distribution in distributions():  # the first of a name is the one that Python imports
        if name := distribution.metadata["Name"]:  # none: pip has left it half deleted
            packages.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.files or [])
    held_out: dict[str, str] = {}
    others = {name: path for name, path in find_stdlib().items() if is_written_by_hand(path)}
    for package, files in packages.items():
        names = [n for n in files if is_module(n) and VENDORED.isdisjoint(n.parts)]
        held = hashlib.sha256(package.encode()).hexdigest().startswith(HELD_OUT)
        room = HELD_OUT_BYTES if held else PACKAGE_BYTES
        for name, path in order_modules({n.as_posix(): str(n.locate()) for n in names}):
            size = os.path.getsize(path) if os.path.exists(path) else 0
            if 0 < size <= room and is_written_by_hand(path):
                room -= size
                (held_out if held else others)[name] = path
    if not held_out:
        raise UserError("no installed package is held out: run it in the environment of make setup")
    folders = sorted({name.partition("/")[0] for name in held_out})
    print(f"held out for validation: {', '.join(folders)}", file=sys.stderr)
    benchmark = cache(lambda: Benchmark(Path(p).read_text("utf-8") for p in held_out.values()))
    for name, path in order_modules(held_out):
        yield File(name, partial(read_text, path, ""), held_out=True)
    for name, path in order_modules(others):
        yield File(name, partial(read_without, path, benchmark))


def is_written_by_hand(path: str) -> bool:
    """Whether a module is in UTF-8, not empty, and does not say that it was generated."""
    try:
        text = Path(path).read_text("utf-8")
    except UnicodeDecodeError:
        return False
    return bool(text) and not GENERATED.search(text[:GENERATED_WITHIN])


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
            raise UserError(
                f"--source {path}: give .txt, .jsonl or .parquet files, as '{path}/*.txt'"
            )
        yield File(path, partial(READERS[kind], path, column), local=True)


def find_on_hub(source: str, column: str, revision: str) -> Iterator[File]:
    """Yields the files of a dataset. They are streamed: nothing is copied to the disk."""
    os.environ.setdefault("USE_TORCH", "0")  # `datasets` would import torch, 200 MB for nothing
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    repository, config, split, own_column = f"{source.removeprefix('hub:')}:::".split(":")[:4]
    split = split or "train"
    column = own_column or column
    ask = partial(HfApi().dataset_info, repository, revision=revision or None)
    answer = ThreadPoolExecutor(1).submit(ask)  # its own timeout is for each of many addresses
    if not wait([answer], FIRST_ANSWER).done:
        raise TimeoutError(f"no answer in {FIRST_ANSWER} s")
    commit = answer.result().sha
    builder = load_dataset_builder(repository, config or None, revision=commit)
    stream = builder.as_streaming_dataset(split).select_columns(column).with_format("arrow")
    urls = builder.config.data_files[split]
    for i, url in enumerate(urls):  # each file is a shard of the stream
        yield File(url, partial(read_hub, stream.shard(len(urls), i), column), commit)


def make_stamp(path: str, known: list | None = None) -> list:
    """A file's bytes, the time of its last change, and its SHA-256: the known one if it can be."""
    status = os.stat(path)
    now = [status.st_size, status.st_mtime_ns]
    return known if known and known[:2] == now else [*now, hash_file(Path(path))]


def find_changes(sources: list[str], read: dict[str, list], all_read: bool) -> list[str]:
    """How local files differ from those that were read, a phrase each; none if all are deleted.

    read: {path: stamp}, in order. all_read: they are all that the sources had.
    """
    now = {os.path.realpath(path): path for source in sources for path in find_paths(source)}
    then = {os.path.realpath(path): path for path in read}
    same = [then[key] for key in then if key in now]
    first = list(now)[: None if all_read else len(same)]
    changes = [f"{p} has changed" for p in same if make_stamp(p, read[p])[2] != read[p][2]]
    changes += [f"{now[key]} is new" for key in first if key not in then]
    changes += [f"{then[key]} is gone" for key in then if key not in now]
    return changes if now else []


# -- reading each kind of file


def open_file(path: str):
    """Opens a file, decompressed if its name says so, or a text on the web, as bytes."""
    if path.startswith("http"):
        import requests

        answer = requests.get(path, timeout=(3, 10))  # seconds to connect, and without a byte
        answer.raise_for_status()
        return io.BytesIO(answer.content)
    import fsspec

    return fsspec.open(path, compression="infer")


BEFORE_LAST_SPACE = re.compile(r".*\S(?=\s)", re.DOTALL)  # ends in a visible character


def read_text(path: str, column: str) -> Iterator[Text]:
    """Yields a text file, one document, in stretches with the same tokens as the whole.

    A stretch ends between a visible character and a space. No word of GPT-2's pattern has both
    in this order, so no token is cut in two. A byte order mark is left out.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text = ""
    starts = True
    with open_file(path) as file:
        while True:
            data = file.read(STRETCH)
            ended = len(data) < STRETCH
            seen = max(0, len(text) - 1)  # no stretch ends before: this keeps the time linear
            text += decoder.decode(data, ended)
            if ended:
                yield text, starts
                return
            if stretch := BEFORE_LAST_SPACE.match(text, seen):
                yield text[: stretch.end()], starts
                text = text[stretch.end() :]
                starts = False


def read_without(path: str, benchmark: Callable[[], Benchmark]) -> Iterator[Text]:
    """Yields what is left of a file, in whole lines, without what the benchmark has too."""
    text = "".join(stretch for stretch, _ in read_text(path, ""))
    spans, _ = cut_out(text, benchmark().find(text))
    for start, end in spans:
        piece = text[start:end]
        if start:
            piece = piece.partition("\n")[2]
        if end < len(text):
            piece = piece[: piece.rfind("\n") + 1]
        if piece:
            yield piece, True


def read_jsonl(path: str, column: str) -> Iterator[Text]:
    """Yields the text that each line, a JSON object, has under `column`."""
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    text = json.loads(line)[column]
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    told = f"{path}, line {number}: a JSON object with a text as its {column!r}"
                    raise UserError(f"{told} was expected; --column names another")
                yield text, True


def read_parquet(path: str, column: str) -> Iterator[Text]:
    """Yields a column's rows. `datasets` would need more memory, and a second to start."""
    import pyarrow.parquet as pq

    # pre-buffering would hold the whole column in memory
    with pq.ParquetFile(path, buffer_size=STRETCH, pre_buffer=False) as parquet:
        names = parquet.schema_arrow.names
        if column not in names:
            raise UserError(f"{path} has no column {column!r} but {names}; --column names another")
        yield from read_rows(parquet.iter_batches(100, columns=[column], use_threads=False), column)


def read_hub(stream, column: str) -> Iterator[Text]:
    yield from read_rows(stream.iter(batch_size=100), column)


def read_rows(tables: Iterable, column: str) -> Iterator[Text]:
    """Yields each row of a column of Arrow's tables; a null is an empty document."""
    for table in tables:
        for text in table.column(column).cast("string").to_pylist():
            yield text or "", True


READERS = {"txt": read_text, "json": read_jsonl, "jsonl": read_jsonl, "parquet": read_parquet}


# -- batches


def read_batches(
    files: list[File], file: int = 0, number: int = 0
) -> Iterator[tuple[tuple[int, int, int], list[Text]]]:
    """Yields ((file and number of its first text, file of its last), batch) from a place on."""
    batch: list[Text] = []
    chars = 0
    for i in range(file, len(files)):
        for j, text in enumerate(read_patiently(files[i], number), number):
            if not batch:
                place = (i, j)
            batch.append(text)
            chars += len(text[0])
            if len(batch) >= BATCH_DOCUMENTS or chars >= BATCH_CHARS:
                yield (*place, i), batch
                batch = []
                chars = 0
        number = 0  # the next file is read from its start
    if batch:
        yield (*place, i), batch


def read_patiently(file: File, number: int) -> Iterator[Text]:
    """Yields the texts of a file from a number on. Goes on there after the hub has failed."""
    with one_sentence(file.name):
        if file.local:
            file.stamp = make_stamp(file.name)
        for wait in (*WAITS, None):
            try:
                for text in itertools.islice(file.read(), number, None):
                    yield text
                    number += 1
                return
            except Exception as error:
                if wait is None or not file.commit:
                    raise
                print(f"\n{file.name}: {error}; trying again in {wait} s", file=sys.stderr)
            time.sleep(wait)

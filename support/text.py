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
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from support.common import UserError, first_line

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
STRETCH = 2**20  # bytes of a text file that are read at a time
BATCH_DOCUMENTS = 1000  # texts in a batch, at most
BATCH_CHARS = 2**20  # characters that fill a batch
WAITS = (1, 4, 15, 60, 60, 60)  # seconds before the network is tried again

Text = tuple[str, bool]  # a document or a stretch of a long one; whether the document starts here


class File(NamedTuple):
    name: str
    size: int  # bytes; 0 on the web and on the hub
    read: Callable[[], Iterator[Text]]
    commit: str | None = None  # of the dataset on the hub


# -- finding: the files behind each source, in the order in which they are read


def find_sources(
    sources: Iterable[str], column: str, revision: str, commits: dict[str, str | None]
) -> Iterator[File]:
    """Yields all files. A dataset has its commit in `commits`; new ones are added there."""
    for source in sources:
        name = HUB.get(source, source)
        with one_sentence(name):
            if name.startswith("hub:"):
                found = list(find_on_hub(name, column, commits.get(source) or revision))
            elif source == "stdlib":
                found = list(find_stdlib())
            elif source == "tinyshakespeare":
                found = [File(TINYSHAKESPEARE, 0, partial(read_text, TINYSHAKESPEARE, column))]
            else:
                found = list(find_local(source, column))
        commits[source] = found[0].commit
        yield from found


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


def find_stdlib() -> Iterator[File]:
    """Yields the modules of the running Python's standard library, without its tests.

    Their order looks random but is always the same: the first ones, for validation, are a sample.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        path = root / name
        if NOT_MODULES.isdisjoint(path.parts[len(root.parts) :]):
            yield File(name, path.stat().st_size, partial(read_text, str(path), ""))


def find_local(source: str, column: str) -> Iterator[File]:
    """Yields the files of a path or a glob."""
    paths = [source] if os.path.exists(source) else sorted(glob.glob(source, recursive=True))
    if not paths:
        raise UserError(f"--source {source}: no such file, and none of the sources in --help")
    for path in paths:
        kind = path.removesuffix(".gz").rpartition(".")[2]
        if kind not in READERS:
            raise UserError(
                f"--source {path}: give .txt, .jsonl or .parquet files, as '{path}/*.txt'"
            )
        yield File(path, os.path.getsize(path), partial(READERS[kind], path, column))


def find_on_hub(source: str, column: str, revision: str) -> Iterator[File]:
    """Yields the files of a dataset. They are streamed: nothing is copied to the disk."""
    os.environ.setdefault("USE_TORCH", "0")  # `datasets` would import torch, 200 MB for nothing
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    repository, config, split, own_column = f"{source.removeprefix('hub:')}:::".split(":")[:4]
    split = split or "train"
    column = own_column or column
    commit = HfApi().dataset_info(repository, revision=revision or None).sha
    builder = load_dataset_builder(repository, config or None, revision=commit)
    stream = builder.as_streaming_dataset(split).select_columns(column).with_format("arrow")
    urls = builder.config.data_files[split]
    for i, url in enumerate(urls):  # each file is a shard of the stream
        yield File(url, 0, partial(read_hub, stream.shard(len(urls), i), column), commit)


# -- reading each kind of file


def open_file(path: str):
    """Opens a file, decompressed if its name says so, or a text on the web, as bytes."""
    if path.startswith("http"):
        import requests

        answer = requests.get(path, timeout=(10, 20))  # seconds to connect, and without a byte
        answer.raise_for_status()
        return io.BytesIO(answer.content)
    import fsspec

    return fsspec.open(path, compression="infer")


BEFORE_LAST_SPACE = re.compile(r".*\S(?=\s)", re.DOTALL)  # ends in a visible character


def read_text(path: str, column: str) -> Iterator[Text]:
    """Yields a text file, one document, in stretches with the same tokens as the whole.

    A stretch ends between a visible character and a space. No word of GPT-2's pattern has both
    in this order, so no token is cut in two.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
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
) -> Iterator[tuple[tuple[int, int], list[Text]]]:
    """Yields all texts from a place on, in batches, each with the (file, number) of its first."""
    batch: list[Text] = []
    chars = 0
    for i in range(file, len(files)):
        for j, text in enumerate(read_patiently(files[i], number), number):
            if not batch:
                place = (i, j)
            batch.append(text)
            chars += len(text[0])
            if len(batch) >= BATCH_DOCUMENTS or chars >= BATCH_CHARS:
                yield place, batch
                batch = []
                chars = 0
        number = 0  # the next file is read from its start
    if batch:
        yield place, batch


def read_patiently(file: File, number: int) -> Iterator[Text]:
    """Yields the texts of a file from a number on. Goes on there after the network has failed."""
    with one_sentence(file.name):
        for wait in (*WAITS, None):
            try:
                for text in itertools.islice(file.read(), number, None):
                    yield text
                    number += 1
                return
            except Exception as error:
                if wait is None or "://" not in file.name:
                    raise
                print(f"\n{file.name}: {error}; trying again in {wait} s", file=sys.stderr)
            time.sleep(wait)

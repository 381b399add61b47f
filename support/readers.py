"""Files of text, and how each kind of them is read."""

import codecs
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from support.common import UserError
from support.web import fetch

JSON = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
STRETCH = 2**20  # bytes of a text file that are read at a time


class Text(NamedTuple):
    """A document, or a stretch of one that is a long text file."""

    text: str
    starts: bool = True  # the document starts here
    ends: bool = True  # the document ends here


class File(NamedTuple):
    """A file to read: local, on the web or on the hub."""

    name: str
    size: int  # bytes; 0 where nobody has told
    read: Callable[[], Iterator[Text]]
    commit: str | None = None  # of the dataset on the hub


def open_file(path: str):
    """A local file, decompressed if its name says so, or one on the web, as a stream of bytes."""
    if path.startswith("http"):
        return io.BytesIO(fetch(path))
    import fsspec

    return fsspec.open(path, compression="infer")


BEFORE_LAST_SPACE = re.compile(r".*\S(?=\s)", re.DOTALL)  # ends in a visible character


def read_text(path: str) -> Iterator[Text]:
    """Yields a text file, which is one document, in stretches that tokenize as the whole would.

    A stretch ends between a visible character and a space: no word of GPT-2's pattern has both
    in this order, so no token is cut in two. Raises UserError if the file is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    text = ""
    starts = True
    ended = False
    with open_file(path) as file:
        while not ended:
            data = file.read(STRETCH)
            ended = len(data) < STRETCH
            seen = max(0, len(text) - 1)  # no stretch ends before: this keeps the time linear
            try:
                text += decoder.decode(data, ended)
            except UnicodeDecodeError as error:
                at = file.tell() - len(error.object) + error.start
                told = f"{path} is not UTF-8 (byte {at})"
                raise UserError(f"{told}: iconv -f ITS_ENCODING -t UTF-8 converts it") from None
            if ended:
                yield Text(text, starts, ends=True)
            elif stretch := BEFORE_LAST_SPACE.match(text, seen):
                yield Text(text[: stretch.end()], starts, ends=False)
                text = text[stretch.end() :]
                starts = False


def read_jsonl(path: str, column: str) -> Iterator[Text]:
    """Yields the text that each line, a JSON object, has under `column`."""
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[column]
            except (ValueError, KeyError, TypeError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise UserError(
                    f"{path}, line {number}: a JSON object in UTF-8 with a text as its {column!r} "
                    "was expected; --column names another"
                )
            yield Text(text)


def read_parquet(path: str, column: str) -> Iterator[Text]:
    """Yields the rows of a column. `datasets` would take a second to start and more memory."""
    import pyarrow.parquet as pq

    # pre-buffering would hold the whole column in memory
    with pq.ParquetFile(path, buffer_size=STRETCH, pre_buffer=False) as parquet:
        check_column(path, column, parquet.schema_arrow)
        yield from read_rows(parquet.iter_batches(100, columns=[column], use_threads=False))


def read_rows(batches: Iterable) -> Iterator[Text]:
    """Yields each row of Arrow's batches of one column; a null is an empty document."""
    for batch in batches:
        for text in batch.column(0).to_pylist():
            yield Text(text or "")


def check_column(name: str, column: str, schema) -> None:
    """Raises UserError unless the column is there and holds text."""
    types = dict(zip(schema.names, map(str, schema.types), strict=True))
    if types.get(column) not in ("string", "large_string"):
        columns = ", ".join(f"{key} ({value})" for key, value in types.items())
        told = f"{name} has no column {column!r} of text but {columns}"
        raise UserError(f"{told}; --column names another")


def count_texts(file: File) -> float:
    """How many texts a file has: its rows or lines, or about how many stretches of a text file."""
    if file.name.endswith(".parquet"):
        import pyarrow.parquet as pq

        with open_file(file.name) as parquet:
            return pq.read_metadata(parquet).num_rows
    if file.name.endswith(JSON):
        with open_file(file.name) as lines:
            return sum(1 for line in lines if line.strip())
    return max(1, file.size / STRETCH)


def pick_reader(path: str, column: str) -> Callable[[], Iterator[Text]]:
    """The reader for what a file's name ends in. Raises UserError if there is none."""
    if not os.path.isfile(path) and not os.path.isdir(path):
        told = f"--source {path} is a pipe, a device or a broken link"
        raise UserError(f"{told}: save the text in a file, and give that")
    if os.path.isfile(path):
        if path.endswith(".txt"):
            return partial(read_text, path)
        if path.endswith(".parquet"):
            return partial(read_parquet, path, column)
        if path.endswith(JSON):
            return partial(read_jsonl, path, column)
    told = f"--source {path} is no .txt, .jsonl or .parquet file"
    if os.path.isfile(path):
        raise UserError(f"{told}; if it is text, give a copy of it the name {path}.txt")
    raise UserError(f"{told}; of a folder, give the files: '{path}/*.txt'")

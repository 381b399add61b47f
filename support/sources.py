"""Where text comes from: local files, the Hugging Face hub, the web; and patience with the network.

`find_sources` lists the files behind `--source`, `read_batches` reads them from any place on.
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
from functools import partial
from pathlib import Path
from typing import NamedTuple

from support.common import UserError, first_line
from support.web import fetch

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
NOT_MODULES = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
NOT_MODULES |= {"_bundled", "pydoc_data", "__pycache__"}
JSON = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
STRETCH = 2**20  # bytes of a text file that are read at a time
BATCH_DOCUMENTS = 1000  # texts in a batch, at most
BATCH_CHARS = 2**20  # a batch is full when its texts have so many characters
OTHER_REVISION = "--revision refs/convert/parquet may help"
WAITS = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)  # seconds before the network is tried again


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


# -- readers: each yields the texts of one file


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


def read_hub(stream) -> Iterator[Text]:
    """Yields the rows of a stream of `datasets` that has one column."""
    yield from read_rows(stream.with_format("arrow").iter(batch_size=100))


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


# -- finding: the files behind each source, in the order in which they are read


def find_files(source: str, column: str) -> Iterator[File]:
    """Yields the files of a source that is not on the hub. Raises UserError if there are none."""
    if source == "stdlib":
        yield from find_stdlib()
    elif source == "tinyshakespeare":
        yield File(TINYSHAKESPEARE, 0, partial(read_text, TINYSHAKESPEARE))
    else:
        yield from find_local(source, column)


def find_stdlib() -> Iterator[File]:
    """Yields the modules of the running Python's standard library, without its tests.

    Their order looks random but is always the same, so that the validation tokens, which are
    the first, are a fair sample of all packages.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = [path.relative_to(root) for path in root.rglob("*.py")]
    names = [path.as_posix() for path in modules if not NOT_MODULES & set(path.parts)]
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        path = root / name
        yield File(name, path.stat().st_size, partial(read_text, str(path)))


def find_local(source: str, column: str) -> Iterator[File]:
    """Yields the files of a path or a glob."""
    paths = [source] if os.path.exists(source) else sorted(glob.glob(source, recursive=True))
    if not paths:
        told = f"--source {source}: no such file, and no known source"
        raise UserError(f"{told}; `python fineweb.py --help` lists those")
    for path in paths:
        read = pick_reader(path, column)
        yield File(path, os.path.getsize(path), read)


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
    raise UserError(f"{told}; of a folder, give the files: '{path}/*.txt'")


def find_on_hub(source: str, column: str, revision: str) -> Iterator[File]:
    """Yields the files of hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]], which `datasets` streams.

    Nothing is copied to the disk, and no code of the dataset's authors runs. An empty revision
    is the newest commit.
    """
    parts = [*source.removeprefix("hub:").split(":"), "", "", ""]  # all but the first are optional
    repository, config, split, own_column = parts[:4]
    column = own_column or column
    split = split or "train"
    builder, commit = open_on_hub(source, repository, config, revision)
    urls = list_urls(source, split, builder.config.data_files or {})
    stream = builder.as_streaming_dataset(split)
    check_column(source, column, stream.features.arrow_schema)
    stream = stream.select_columns(column)
    for i, url in enumerate(urls):  # each file is a shard of the stream
        yield File(url, 0, partial(read_hub, stream.shard(len(urls), i)), commit)


def open_on_hub(source: str, repository: str, config: str, revision: str):
    """The builder of `datasets` for a dataset, and the commit that the revision stands for.

    Making a builder is the first half of load_dataset(..., streaming=True). Between the halves
    one can look at the list of files.
    """
    os.environ.setdefault("USE_TORCH", "0")  # `datasets` would import torch, 200 MB for nothing
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HFValidationError, disable_progress_bars

    disable_progress_bars()
    try:
        commit = HfApi().dataset_info(repository, revision=revision or None).sha
    except HFValidationError as error:
        told = f"--source {source} names no dataset ({first_line(error)})"
        raise UserError(f"{told}; write hub:OWNER/NAME") from None
    try:
        return load_dataset_builder(repository, config or None, revision=commit), commit
    except (ValueError, RuntimeError) as error:  # no such configuration, or a loading script
        reason = str(error).splitlines()[0]
        raise UserError(f"{source}: {reason} ({OTHER_REVISION})") from None


def list_urls(source: str, split: str, urls: dict[str, list[str]]) -> list[str]:
    """The files of a split. Raises UserError if there is no such split, or no reader for them."""
    if split not in urls:
        told = f"{source} has no split {split!r} but {', '.join(urls)}"
        raise UserError(f"{told}; write hub:OWNER/NAME:CONFIG:SPLIT")
    for url in urls[split]:
        if not url.endswith((".parquet", *JSON)):
            told = f"{url} is neither parquet nor jsonl, so it cannot be read"
            raise UserError(f"{told}; {OTHER_REVISION}")
    return urls[split]


def find_sources(
    sources: Iterable[str], column: str, revision: str, commits: dict[str, str | None]
) -> list[File]:
    """All files to read.

    `commits` has the commit of each source that an earlier start has settled on: the same is
    read again, whatever is the newest by now. Those of the other sources are added to it.
    """
    files = []
    for source in sources:
        name = HUB.get(source, source)
        if name.startswith("hub:"):
            find = partial(find_on_hub, name, column, commits.get(source) or revision)
        else:
            find = partial(find_files, source, column)
        found = list(read_patiently(name, find))
        commits[source] = found[0].commit
        files += found
    return files


# -- reading


def read_patiently(name: str, read: Callable[[], Iterator], done: int = 0) -> Iterator:
    """Yields what read() yields, without the first `done` items.

    Where the network fails it waits, longer each time, and then goes on where it was. Raises
    UserError where waiting does not help.
    """
    waits = WAITS if re.match("(hub|hf|https?):", name) else ()
    failures = 0
    while True:
        try:
            for item in itertools.islice(read(), done, None):
                yield item
                done += 1
                failures = 0
            return
        except UserError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            if failures == len(waits) or is_final(error):
                told = f"{name} cannot be read ({reason})"
                raise UserError(f"{told}; that mended, the same command goes on") from error
        wait = waits[failures]
        failures += 1
        print(f"\n{name}: {reason}; trying again in {wait} s", file=sys.stderr)
        time.sleep(wait)


def is_final(error: Exception) -> bool:
    """Whether another attempt would fail, too: nothing is there, or it may not be read."""
    response = getattr(error, "response", None)
    refused = getattr(response, "status_code", 0) in (401, 403, 404)
    return refused or isinstance(error, FileNotFoundError)


Place = tuple[int, int]  # number of a file, number of a text in it


def read_batches(
    files: list[File], file: int = 0, number: int = 0
) -> Iterator[tuple[Place, list[Text]]]:
    """Yields all texts from a place on, in batches, each with the place of its first text."""
    batch: list[Text] = []
    chars = 0
    for i in range(file, len(files)):
        texts = read_patiently(files[i].name, files[i].read, done=number)
        for j, text in enumerate(texts, number):
            if not batch:
                place = (i, j)
            batch.append(text)
            chars += len(text.text)
            if len(batch) >= BATCH_DOCUMENTS or chars >= BATCH_CHARS:
                yield place, batch
                batch = []
                chars = 0
        number = 0  # the next file is read from its start
    if batch:
        yield place, batch

"""Where text comes from: the files behind `--source`, and their texts in batches.

`find_sources` lists the files, `read_batches` reads them from any place on.
"""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from support.common import UserError
from support.hub import HUB, find_on_hub
from support.readers import File, Text, pick_reader, read_text
from support.web import read_patiently

CHAR_RNN = "https://raw.githubusercontent.com/karpathy/char-rnn/master"
TINYSHAKESPEARE = f"{CHAR_RNN}/data/tinyshakespeare/input.txt"
NOT_MODULES = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
NOT_MODULES |= {"_bundled", "pydoc_data", "__pycache__"}
BATCH_DOCUMENTS = 1000  # texts in a batch, at most
BATCH_CHARS = 2**20  # a batch is full when its texts have so many characters


# -- finding: the files behind each source, in the order in which they are read


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


# -- reading

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

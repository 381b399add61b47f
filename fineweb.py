"""Text → token shards: FineWeb-Edu, any other text dataset of the Hugging Face hub, your own files, or what is at hand.

    python fineweb.py                                            FineWeb-Edu's 10B tokens → edu_fineweb10B/
    python fineweb.py --source stdlib --data-dir data/stdlib     the running Python's standard library, no network
    python fineweb.py --source 'mine/*.jsonl' notes.txt          your own text

`documents` reads, workers `tokenize`, `pack` cuts the one long stream of tokens into shards, `write_shard` writes each of
them whole or not at all, and `manifest.json` says where to go on. Kill it whenever you like and start it again: the
result is byte for byte that of a run that was left alone. Memory stays flat, under 1 GB for the reading process.
"""

import codecs
import contextlib
import glob
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import queue
import re
import signal
import sys
import sysconfig
import threading
import time
import tokenize as python_source
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokenizer import EOT, UserError, get_tokenizer, run_script

HUB_SOURCES = {  # name: hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]]
    "fineweb-edu-10B": "hub:HuggingFaceFW/fineweb-edu:sample-10BT",
    "fineweb-edu-100B": "hub:HuggingFaceFW/fineweb-edu:sample-100BT",
    "fineweb-edu-350B": "hub:HuggingFaceFW/fineweb-edu:sample-350BT",
    "fineweb-10B": "hub:HuggingFaceFW/fineweb:sample-10BT",
    "tinystories": "hub:roneneldan/TinyStories",
    "openwebtext": "hub:Skylion007/openwebtext",
}
TINYSHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
NOT_PROSE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "pydoc_data", "__pycache__"}
BATCH_DOCUMENTS, BATCH_CHARS = 1000, 2**21  # what a worker gets at a time
STRETCH = 2**20  # bytes of a text file that are one piece of work
RETRY_SECONDS = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)


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
    # Tokens of the first shard that are held out for validation. Default (0): the whole of it, or 5% of a corpus smaller
    # than two shards, up to the end of a document.
    val_tokens: int = 0
    # Column of .jsonl and .parquet files that holds the text.
    column: str = "text"


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
    starts: bool  # a document starts here
    text: str


# ---- sources ---------------------------------------------------------------------------------------------------------


def find_files(source: str, column: str) -> list[TextFile]:
    """The files behind one `--source`, in the order in which they are read."""
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        modules = [path.relative_to(root) for path in root.rglob("*.py")]
        modules = [path.as_posix() for path in modules if not NOT_PROSE & set(path.parts)]
        # An order that looks random but is always the same makes the held-out start a fair sample of all packages.
        modules.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        return [TextFile(str(root / name), "python", "", name, (root / name).stat().st_size) for name in modules]
    if source == "tinyshakespeare":
        return [TextFile(TINYSHAKESPEARE, "text", "", source, 0)]
    paths = [source] if os.path.exists(source) else sorted(glob.glob(source, recursive=True))
    kinds = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
    for path in paths:
        if Path(path).suffix not in kinds or not os.path.isfile(path):
            raise UserError(
                f"--source {path} is no .txt, .jsonl or .parquet file; for a folder, give a pattern: '{path}/**/*.txt'"
            )
    if not paths:
        raise UserError(f"--source {source}: no such file, and no known source; `python fineweb.py --help` lists those")
    return [TextFile(path, kinds[Path(path).suffix], column, path, os.path.getsize(path)) for path in paths]


def open_file(url: str):
    """A local or remote file, opened for reading bytes."""
    if url.startswith("https://"):
        import requests

        response = requests.get(url, timeout=30)
        response.raise_for_status()
        return io.BytesIO(response.content)
    return open(url, "rb")


def read_text(file: TextFile, position: int) -> Iterator[tuple[int, bool, str]]:
    """A text file is one document, read in stretches that tokenize as the whole would: none of GPT-2's words goes on from
    a visible character into a space, so that between these two it may be cut."""
    with open_file(file.url) as f:
        f.seek(position)
        data, wanted = b"", STRETCH
        while True:
            more = f.read(wanted - len(data))
            data += more
            try:
                text, _ = codecs.utf_8_decode(data, "strict", not more)
            except UnicodeDecodeError as error:
                at = position + error.start
                raise UserError(f"{file.name} is not UTF-8 text (byte {at}); convert it: iconv -t UTF-8 -f ...") from None
            if not more:
                if text or position == 0:
                    yield position, position == 0, text
                return
            cut = re.match(r".*\S(?=\s)", text, re.DOTALL)
            if cut is None:
                wanted *= 2
                continue
            yield position, position == 0, cut[0]
            used = len(cut[0].encode())
            data, wanted, position = data[used:], STRETCH, position + used


def read_python(file: TextFile, position: int) -> Iterator[tuple[int, bool, str]]:
    """A module is one document, in the encoding that it declares."""
    data = Path(file.url).read_bytes()
    encoding, _ = python_source.detect_encoding(io.BytesIO(data).readline)
    yield 0, True, data.decode(encoding)


def read_jsonl(file: TextFile, position: int) -> Iterator[tuple[int, bool, str]]:
    """Each line is an object whose `column` is a document."""
    with open_file(file.url) as f:
        f.seek(position)
        for line in f:
            if line.strip():
                try:
                    text = json.loads(line.decode())[file.column]
                    if not isinstance(text, str):
                        raise TypeError
                except (ValueError, KeyError, TypeError):
                    raise UserError(
                        f"{file.name}, byte {position}: expected a UTF-8 line of JSON with a text as its {file.column!r}; "
                        "--column names another"
                    ) from None
                yield position, True, text
            position += len(line)


def read_parquet(file: TextFile, position: int) -> Iterator[tuple[int, bool, str]]:
    """Each row's `column` is a document; only that column is read, a thousand rows at a time. A null is an empty text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_file(file.url) as f:
            parquet = pq.ParquetFile(f, buffer_size=STRETCH)
            columns = parquet.schema_arrow
            if file.column not in columns.names:
                raise UserError(f"{file.name} has no column {file.column!r}, only {', '.join(columns.names)}; use --column")
            group = row = 0  # the row group that holds `position`, and its first row
            while group < parquet.num_row_groups and row + parquet.metadata.row_group(group).num_rows <= position:
                row += parquet.metadata.row_group(group).num_rows
                group += 1
            groups = range(group, parquet.num_row_groups)
            for batch in parquet.iter_batches(BATCH_DOCUMENTS, row_groups=groups, columns=[file.column], use_threads=False):
                if row + len(batch) > position:
                    for text in batch.column(0).slice(max(0, position - row)).to_pylist():
                        if text is not None and not isinstance(text, str):
                            raise UserError(f"{file.name}: column {file.column!r} holds no text; --column names another")
                        yield max(row, position), True, text or ""
                        position = max(row, position) + 1
                row += len(batch)
    except pa.ArrowException as error:
        raise UserError(f"{file.name} is no readable parquet file ({error}); download or write it again") from None


READERS = {"text": read_text, "python": read_python, "jsonl": read_jsonl, "parquet": read_parquet}


def documents(files: list[TextFile], file: int = 0, position: int = 0) -> Iterator[list[Piece]]:
    """All text from a position on, in batches of work for `tokenize`."""
    batch, chars = [], 0
    for index in range(file, len(files)):
        for at, starts, text in READERS[files[index].kind](files[index], position):
            batch.append(Piece(index, at, starts, text))
            chars += len(text)
            if len(batch) >= BATCH_DOCUMENTS or chars >= BATCH_CHARS:
                yield batch
                batch, chars = [], 0
        position = 0
    if batch:
        yield batch


# ---- tokens ----------------------------------------------------------------------------------------------------------

SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # white space to GPT-2's pattern
LONG_SPACE = re.compile(f"([{SPACE}]{{100000,}})(?=[{SPACE}][^{SPACE}])")


def encode(text: str) -> list[np.ndarray]:
    """GPT-2 tokens of a text. A literal <|endoftext|> stays text; a lone surrogate becomes U+FFFD, as in tiktoken itself."""
    try:
        # tiktoken panics where a million spaces precede a word. All but the last of them are one piece in GPT-2's pattern.
        parts = LONG_SPACE.split(text) if len(text) > 100_000 else [text]
        return [get_tokenizer().encode_to_numpy(part, disallowed_special=()) for part in parts]
    except UnicodeEncodeError:
        return encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def start_worker() -> None:
    """A worker leaves Ctrl-C to its parent, and ends when the parent does, however that happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    get_tokenizer()


def tokenize(texts: list[str], starts: list[bool]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of all the pieces as uint16, and the number of them in each. Runs in the workers."""
    tokens, lengths = [], []
    for text, start in zip(texts, starts):
        parts = ([np.array([EOT])] if start else []) + encode(text)
        tokens += parts
        lengths.append(sum(map(len, parts)))
    return np.concatenate(tokens).astype(np.uint16), np.array(lengths)


class Tokens(NamedTuple):
    """A batch of pieces as tokens; piece i is tokens[bounds[i]:bounds[i + 1]]."""

    tokens: np.ndarray
    bounds: np.ndarray
    pieces: list[tuple[int, int]]  # (file, position)
    documents: np.ndarray  # documents begun before each piece

    def cursor(self, end: int) -> dict:
        """Where to go on after tokens[:end]: in the piece that holds the last of them."""
        i = int(np.searchsorted(self.bounds[1:], end))
        file, position = self.pieces[i]
        return {"file": file, "position": position, "token": int(end - self.bounds[i]), "documents": int(self.documents[i])}


def in_workers(batches: Iterable[list[Piece]], workers: int) -> Iterator[tuple[list[Piece], np.ndarray, np.ndarray]]:
    """Each batch with its tokens and lengths, in order. Reading, tokenizing and what the caller does go on side by side."""
    results, room, stopped = queue.SimpleQueue(), threading.Semaphore(2 * workers + 2), threading.Event()

    def read():
        try:
            for batch in batches:
                room.acquire()
                if stopped.is_set():
                    return
                work = [p.text for p in batch], [p.starts for p in batch]
                results.put(([p._replace(text="") for p in batch], pool.submit(tokenize, *work)))
            results.put((None, None))
        except BaseException as error:  # to be raised where the results are used
            results.put((error, None))

    with ProcessPoolExecutor(workers, initializer=start_worker) as pool:
        pool.submit(os.getpid).result()  # fork, where that is the custom, before there are threads
        threading.Thread(target=read, daemon=True).start()
        try:
            while (item := results.get())[0] is not None:
                if isinstance(item[0], BaseException):
                    raise item[0]
                yield item[0], *item[1].result()
                room.release()
        except BrokenProcessPool:
            raise UserError("a worker was killed, perhaps for want of memory; go on with fewer --workers") from None
        finally:
            stopped.set()
            room.release()
            pool.shutdown(cancel_futures=True)


def token_stream(batches: Iterable, cursor: dict, limit: int) -> Iterator[Tokens]:
    """The tokens from the cursor on, `limit` of them at most."""
    skip, before = cursor["token"], cursor["documents"]
    for pieces, tokens, lengths in batches:
        bounds = np.concatenate([[0], np.cumsum(lengths)]) - skip
        started = np.cumsum([p.starts for p in pieces])
        count = np.concatenate([[0], started]) + before
        tokens, skip, before = tokens[skip:], 0, before + started[-1]
        batch = Tokens(tokens[:limit], bounds, [p[:2] for p in pieces], count)
        yield batch
        limit -= len(batch.tokens)
        if limit <= 0:
            return


def held_out(head: Iterable[Tokens], total: int, shard_size: int, val_tokens: int) -> int:
    """How many tokens are for validation: `val_tokens`, or a shard, or 5% of a small corpus, and on to the end of that
    document where it comes soon. `head` are the first two shards' worth, `total` the tokens in them."""
    wanted = val_tokens or (shard_size if total >= 2 * shard_size else max(1, total // 20))
    if total and wanted >= total:
        raise UserError(f"--val-tokens {wanted} leaves nothing to train on: the source has {total} tokens")
    starts = np.flatnonzero(np.concatenate([batch.tokens == EOT for batch in head])[: shard_size + 1])
    end = starts[np.searchsorted(starts, wanted) :]
    return int(end[0]) if len(end) and end[0] <= 2 * wanted else wanted


def pack(stream: Iterator[Tokens], shard_size: int, val_tokens: int, index: int = 0) -> Iterator[tuple[int, np.ndarray, dict]]:
    """Cuts the stream into shards: (index, tokens, cursor after them). Shard 0, the one for validation, may be smaller."""
    head, total, size = [], 0, shard_size
    if index == 0:
        while total < 2 * shard_size and (batch := next(stream, None)) is not None:
            head.append(batch)
            total += len(batch.tokens)
        if not total:
            raise UserError("the source has no documents")
        size = held_out(head, total, shard_size, val_tokens)
    head.reverse()
    shard, filled = np.empty(size, np.uint16), 0
    while (batch := head.pop() if head else next(stream, None)) is not None:
        done = 0
        while done < len(batch.tokens):
            n = min(size - filled, len(batch.tokens) - done)
            shard[filled : filled + n] = batch.tokens[done : done + n]
            filled, done = filled + n, done + n
            if filled == size:
                yield index, shard, batch.cursor(done)
                index, size = index + 1, shard_size
                shard, filled = np.empty(size, np.uint16), 0
        last = batch
    if filled:
        yield index, shard[:filled], last.cursor(len(last.tokens))


# ---- files -----------------------------------------------------------------------------------------------------------


def write_whole(path: Path, chunks: list) -> str:
    """Writes a file so that it is there whole or not at all, whatever happens; returns its sha256."""
    temporary, sha256 = path.with_name(path.name + ".tmp"), hashlib.sha256()
    try:
        with open(temporary, "wb") as f:
            for chunk in chunks:
                sha256.update(chunk)
                f.write(chunk)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # make the renaming last, too; Windows has no such call
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)
    return sha256.hexdigest()


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """A one-dimensional uint16 .npy, as np.save writes it."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(tokens))
    return write_whole(path, [header.getvalue(), tokens.data.cast("B")])


def main() -> None:
    import tyro

    prepare(tyro.cli(Config))


def prepare(config: Config) -> None:
    """Does what the command line asks for."""
    from tqdm import tqdm

    name = config.name or Path(config.source[0]).stem
    folder = Path(config.data_dir or f"data/{name}")
    folder.mkdir(parents=True, exist_ok=True)
    options = {k: v for k, v in asdict(config).items() if k not in ("workers", "data_dir")}
    options |= {"name": name, "source": list(config.source)}
    manifest = {"options": options, "tokens": 0, "shards": [], "cursor": {"file": 0, "position": 0, "token": 0, "documents": 0}}
    if (folder / "manifest.json").exists():
        manifest = json.loads((folder / "manifest.json").read_text())
        for key, value in options.items():
            if manifest["options"].get(key) != value:
                raise UserError(
                    f"{folder} was made with {key} {manifest['options'].get(key)}, not {value}; use another --data-dir"
                )
        if manifest["cursor"] is None:
            print(f"{folder} is complete: {manifest['tokens']:,} tokens in {len(manifest['shards'])} shards; nothing to do")
            return
    files = [file for source in config.source for file in find_files(source, config.column)]
    cursor, workers = manifest["cursor"], config.workers or os.cpu_count()
    batches = in_workers(documents(files, cursor["file"], cursor["position"]), workers)
    stream = token_stream(batches, cursor, (config.max_tokens or 2**62) - manifest["tokens"])
    with tqdm(initial=manifest["tokens"], unit="tok", unit_scale=True, disable=None, desc=name) as bar:
        for index, tokens, cursor in pack(stream, config.shard_size, config.val_tokens, len(manifest["shards"])):
            split = "train" if index else "val"
            path = folder / f"{name}_{split}_{index:06d}.npy"
            sha256 = write_shard(path, tokens)
            manifest["shards"].append({"name": path.name, "split": split, "tokens": len(tokens), "sha256": sha256})
            manifest["tokens"] += len(tokens)
            manifest["cursor"] = cursor
            write_whole(folder / "manifest.json", [json.dumps(manifest, indent=1).encode()])
            bar.update(len(tokens))
    manifest["cursor"] = None
    write_whole(folder / "manifest.json", [json.dumps(manifest, indent=1).encode()])
    print(f"{folder}: {manifest['tokens']:,} tokens in {len(manifest['shards'])} shards")


if __name__ == "__main__":
    run_script(main)

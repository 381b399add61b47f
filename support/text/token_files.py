"""The files that hold tokens: ours and build-nanogpt's, llm.c's, nanoGPT's."""

import hashlib
import io
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from support.base.errors import UserError, reading
from support.base.files import refuse_pointer, write_whole
from support.base.process import command_for
from support.text.names import MANIFEST, TOKENIZER_FILE
from support.text.tokenizer import Tokenizer, tokenizer_of_data

LLMC_MAGIC = 20240520  # llm.c's header is 256 int32 words: this, version, number of tokens, zeros
BLOCKS = 8  # of a shard, first to last, for `identify`: a bit that flips elsewhere goes unnoticed
BLOCK = 4096  # tokens in each
PIECE = 2**20  # tokens that are read at once
PUT_BACK = "put it back, or make all again: the same fineweb.py command in another --data-dir"


class OpenFile(io.FileIO):
    """A file that its last reader closes: no thread can close what another one still reads."""

    def __del__(self) -> None:
        self.close()


class Shard:
    """One file of uint16 tokens: a `.npy`, llm.c's `.bin` with a header, or nanoGPT's without."""

    def __init__(self, path: Path):
        """Raises UserError if it is none of these, or is truncated."""
        self.path = path
        with reading(f"{path}, as a shard of uint16 tokens,", PUT_BACK):
            refuse_pointer(path)
            self.offset, self.num_tokens = find_tokens(path)  # the first token's byte; how many

    def open_ahead(self) -> OpenFile:
        """Opens the file, and has all of it read ahead of us, where the system can."""
        with reading(self.path, "put the file back"):
            file = OpenFile(self.path)
            if hasattr(os, "posix_fadvise"):  # macOS has none
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            return file

    def read(self, start: int, count: int, file: OpenFile | None = None) -> np.ndarray:
        """`count` tokens from token `start` on, uint16; not mapped: memory stays flat."""
        with reading(self.path, "put the file back"):
            file = file or OpenFile(self.path)
            tokens = os.pread(file.fileno(), 2 * count, self.offset + 2 * start)
            if len(tokens) < 2 * count:
                raise OSError(f"it has shrunk: it had {self.num_tokens} tokens")
        return np.frombuffer(tokens, "<u2")

    def read_all(self) -> Iterator[np.ndarray]:
        """Yields all tokens, a piece at a time: memory stays flat."""
        for start in range(0, self.num_tokens, PIECE):
            yield self.read(start, min(PIECE, self.num_tokens - start))


def find_tokens(path: Path) -> tuple[int, int]:
    """The byte at which the tokens of a file start, and their number. Raises what NumPy raises."""
    if path.suffix == ".npy":
        # checks the header against the file's size; "r" would share the map, which FUSE may refuse
        tokens = np.load(path, mmap_mode="c")
        if tokens.dtype != np.uint16 or tokens.ndim != 1:
            raise ValueError(f"it holds {tokens.dtype} of shape {tokens.shape}")
        return tokens.offset, len(tokens)
    head = np.fromfile(path, np.uint8, 8192)
    magic, _, count = head[:12].view(np.int32).tolist()
    offset = 4 * 256 if magic == LLMC_MAGIC else 0
    size = path.stat().st_size - offset
    if size % 2 or (offset and size != 2 * count):
        raise ValueError(f"{size:,} bytes of tokens do not fit its header or its type")
    first = head[offset:]
    halves = first[: len(first) // 4 * 4].view(np.uint16)[1::2]  # the upper ones of 32 bits
    if len(halves) >= 64 and (halves < 4).mean() > 0.9:
        raise UserError(f"{path} has tokens of 32 bits: make it anew with tokens of 16, or others")
    if len(halves) >= 64 and first.max() < 128 and not path.with_name(TOKENIZER_FILE).exists():
        raise UserError(
            f"{path} has characters, not tokens: make shards of its text, by fineweb.py"
        )
    return offset, size // 2


def find_shards(data_dir: Path, split: str) -> list[Shard]:
    """The shards of a split (train or val), by a manifest of fineweb.py's, or by their names.

    Raises UserError if there are none, if one is damaged, or if fineweb.py has not made them all.
    """
    try:
        manifest = json.loads((data_dir / MANIFEST).read_bytes())
        ours = {shard["name"]: shard.get("split") for shard in manifest["shards"]}
        complete = not manifest["cursor"]
        missing = ", ".join(name for name in ours if not (data_dir / name).exists())
        paths = [data_dir / name for name in sorted(ours) if ours[name] == split]
    except (OSError, ValueError, KeyError, TypeError):  # no manifest of fineweb.py's
        complete = True
        missing = ""
        pattern = re.compile(rf"(.*_)?{split}(_\d+)?\.(npy|bin)")
        paths = sorted(path for path in data_dir.glob("*") if pattern.fullmatch(path.name))
    if len({path.suffix for path in paths}) > 1:
        raise UserError(
            f"{data_dir} holds two sets of {split} shards, .npy and .bin: move one away"
        )
    if not complete:  # a run that took what is there could not be resumed with all
        raise UserError(f"{data_dir} is not complete; the same fineweb.py command finishes it")
    if missing:
        raise UserError(f"{data_dir} lacks {missing:.200}: {PUT_BACK}")
    if not paths:
        raise UserError(
            f"no {split} shards in {data_dir} (files like *_{split}_000000.npy): "
            "make all with fineweb.py in another directory, and name that with --data-dir"
        )
    if (data_dir / "meta.pkl").exists() and paths[0].suffix == ".bin":
        raise UserError(
            f"{data_dir}: by its meta.pkl, nanoGPT made these tokens of characters; make a "
            f"vocabulary and tokens with {command_for('fineweb.py')} --source "
            f"{shlex.quote(str(data_dir / 'input.txt'))} --vocab-size auto --data-dir data/mine"
        )
    return [Shard(path) for path in paths]


@dataclass(frozen=True)
class Data:
    """What a run reads of a directory: the shards of its splits, and their tokenizer."""

    folder: Path
    shards: dict[str, list[Shard]]  # {split: its shards}
    tokenizer: Tokenizer

    def num_tokens(self, split: str) -> int:
        return sum(shard.num_tokens for shard in self.shards[split])


def open_data(data_dir: str | Path, *splits: str) -> Data:
    """Finds the shards of these splits, and their tokenizer. Raises UserError as both do."""
    shards = {split: find_shards(Path(data_dir), split) for split in splits}
    return Data(Path(data_dir), shards, tokenizer_of_data(data_dir))


def identify(shards: list[Shard]) -> dict[str, list]:
    """{name: [tokens, SHA-256 of its BLOCKS]}, by which resume knows the data in milliseconds."""
    identities: dict[str, list] = {}
    for shard in shards:
        count = min(BLOCK, shard.num_tokens)
        last = shard.num_tokens - count
        blocks = [shard.read(last * i // (BLOCKS - 1), count) for i in range(BLOCKS)]
        sha256 = hashlib.sha256(np.concatenate(blocks).tobytes()).hexdigest()
        identities[shard.path.name] = [shard.num_tokens, sha256]
    return identities


def describe_frequencies(shards: list[Shard]) -> dict[str, float]:
    """Of the first 16M tokens, or some more: how many kinds occur, and their entropy in nats.

    The entropy is the loss of a model that knows how frequent each token is, and nothing else.
    """
    counts = np.zeros(2**16, np.int64)
    for piece in chain.from_iterable(shard.read_all() for shard in shards):
        counts += np.bincount(piece, minlength=len(counts))
        if counts.sum() >= 16 * PIECE:
            break
    shares = counts[counts > 0] / counts.sum()
    return {"kinds": len(shares), "entropy": float(-shares @ np.log(shares))}


def write_shard(path: Path, arrays: list) -> str:
    """Writes arrays of uint16 tokens as one `.npy`, byte for byte np.save's -> its SHA-256."""
    header = io.BytesIO()
    array = {"descr": "<u2", "fortran_order": False, "shape": (sum(map(len, arrays)),)}
    np.lib.format.write_array_header_1_0(header, array)
    return write_whole(path, header.getvalue(), *arrays)  # no copy of the tokens in memory

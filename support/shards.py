"""The files that hold tokens: ours and build-nanogpt's, llm.c's, nanoGPT's."""

import hashlib
import io
import json
import re
import shlex
from pathlib import Path

import numpy as np

from support.common import UserError, first_line, write_whole

HEADER = 256  # int32 words that llm.c puts first: magic, version, number of tokens, zeros
GPT2_MAGIC = 20240520
LLAMA3_MAGIC = 20240801  # the same header, before tokens of 32 bits
BLOCKS = 8  # of a shard, by which `identify` knows it
BLOCK = 4096  # tokens in each


class Shard:
    """One file of uint16 tokens: a `.npy`, llm.c's `.bin` with a header, or nanoGPT's without.

    Raises UserError for anything else, and for a truncated file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self.offset, self.num_tokens = find_tokens(path)  # the first token's byte; how many
        except Exception as error:  # NumPy's parser fails in many ways
            raise UserError(
                f"{path} is not a whole shard of uint16 tokens ({first_line(error)}): "
                "it is damaged or truncated, make it again"
            ) from error

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from token `start` on, uint16. Raises UserError if the file has shrunk.

        It reads, and does not map: memory stays flat.
        """
        tokens = np.fromfile(self.path, "<u2", count, offset=self.offset + 2 * start)
        if len(tokens) < count:
            raise UserError(
                f"{self.path} has shrunk: it had {self.num_tokens} tokens when the run began, "
                f"and ends before token {start + count} now; put the file back"
            )
        return tokens


def find_tokens(path: Path) -> tuple[int, int]:
    """The byte at which the tokens of a file start, and their number. Raises what NumPy raises."""
    if path.suffix == ".npy":
        tokens = np.load(path, mmap_mode="r")  # checks the header against the file's size
        if tokens.dtype != np.uint16 or tokens.ndim != 1:
            raise ValueError(f"it holds {tokens.dtype} of shape {tokens.shape}")
        return tokens.offset, len(tokens)
    words = np.fromfile(path, np.int32, 3).tolist()
    if words[:1] == [LLAMA3_MAGIC]:
        raise ValueError("it holds tokens of Llama 3")
    has_header = words[:1] == [GPT2_MAGIC]
    offset = 4 * HEADER if has_header else 0
    size = path.stat().st_size - offset
    if size % 2 or (has_header and size != 2 * words[2]):
        raise ValueError(f"{size:,} bytes of tokens do not fit its header or its type")
    return offset, size // 2


def find_shards(data_dir: Path, split: str) -> list[Shard]:
    """The shards of a split (train or val), in the order of their names.

    Raises UserError if there are none, if one is damaged, or if fineweb.py has not made them all.
    """
    refuse_unfinished(data_dir)
    pattern = re.compile(rf"(.*_)?{split}(_\d+)?\.(npy|bin)")
    paths = sorted(path for path in data_dir.glob("*") if pattern.fullmatch(path.name))
    if not paths:
        raise UserError(
            f"no {split} shards in {data_dir} (files like *_{split}_000000.npy): "
            "make them with python fineweb.py, or name another directory with --data-dir"
        )
    return [Shard(path) for path in paths]


def refuse_unfinished(data_dir: Path) -> None:
    """Raises UserError, with the command to type, unless all shards of a manifest are there.

    Training would begin on a part of the data, and not resume with all of it.
    """
    try:
        manifest = json.loads((data_dir / "manifest.json").read_bytes())
        paths = [data_dir / shard["name"] for shard in manifest["shards"]]
        options = manifest["options"] | {"data_dir": str(data_dir)}
        options["overwrite"] = not manifest["cursor"]  # its shards were all there once
        if not manifest["cursor"] and all(path.exists() for path in paths):
            return
    except (OSError, ValueError, KeyError, TypeError):
        return  # it is not fineweb.py's
    command = ["python", "fineweb.py"]
    for key, value in options.items():
        if value:  # the others are the defaults
            words = value if isinstance(value, list) else [value]
            command.append(f"--{key.replace('_', '-')}")
            command += [str(word) for word in words if word is not True]
    raise UserError(f"{data_dir} is not complete; to go on, type: {shlex.join(command)}")


def identify(shards: list[Shard]) -> dict[str, list]:
    """{name: [tokens, SHA-256 of a few blocks]}, to recognize the data on resume.

    The blocks are the first, the last and some between. It takes milliseconds a shard, and does not
    find a bit that flipped elsewhere.
    """
    found = {}
    for shard in shards:
        count = min(BLOCK, shard.num_tokens)
        last = shard.num_tokens - count
        sha256 = hashlib.sha256()
        for i in range(BLOCKS):
            sha256.update(shard.read(last * i // (BLOCKS - 1), count).tobytes())
        found[shard.path.name] = [shard.num_tokens, sha256.hexdigest()]
    return found


def write_shard(path: Path, parts: list) -> str:
    """Writes arrays of uint16 tokens, one behind another, as one `.npy`; returns its SHA-256.

    The file is byte for byte np.save's, without a copy of the tokens in memory. Raises OSError.
    """
    header = io.BytesIO()
    array = {"descr": "<u2", "fortran_order": False, "shape": (sum(map(len, parts)),)}
    np.lib.format.write_array_header_1_0(header, array)
    return write_whole(path, header.getvalue(), *parts)

"""Files of tokens: ours and build-nanogpt's, llm.c's and nanoGPT's."""

import io
import json
import re
from contextlib import suppress
from pathlib import Path

import numpy as np

from support.common import UserError, first_line, write_whole


def find_shards(data_dir: Path, split: str) -> list["Shard"]:
    """The shards of a split (train or val), in the order of their names.

    Raises UserError where there are none, or one is damaged.
    """
    pattern = re.compile(rf"(.*_)?{split}(_\d+)?\.(npy|bin)")
    paths = sorted(path for path in data_dir.glob("*") if pattern.fullmatch(path.name))
    if not paths:
        raise UserError(
            f"no {split} shards in {data_dir} (files like *_{split}_000000.npy): "
            "make them with python fineweb.py, or name another directory with --data-dir"
        )
    return [Shard(path) for path in paths]


def identify(shards: list["Shard"]) -> dict[str, list]:
    """{name: [tokens, SHA-256]}, by which the same data is known again.

    The hash is the one that fineweb.py recorded, empty where it did not: nothing is read.
    """
    recorded = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        manifest = json.loads((shards[0].path.parent / "manifest.json").read_text())
        recorded = {shard["name"]: shard["sha256"] for shard in manifest["shards"]}
    return {
        shard.path.name: [shard.num_tokens, recorded.get(shard.path.name, "")] for shard in shards
    }


class Shard:
    """One file of tokens: where they start in it, how many there are, and a way to read some.

    It is our and build-nanogpt's `.npy`, llm.c's `.bin` with a header, or nanoGPT's `.bin` without
    one. Raises UserError for anything else.
    """

    HEADER = 256  # int32 words that llm.c puts first: magic, version, number of tokens, and zeros
    GPT2_MAGIC = 20240520
    LLAMA3_MAGIC = 20240801  # the same header before tokens of 32 bits

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise UserError(f"{path} is no regular file: a shard of tokens was expected")
        self.offset, self.num_tokens = self.find_tokens()
        found, odd_byte = divmod(path.stat().st_size - self.offset, 2)
        if found != self.num_tokens or odd_byte:
            raise UserError(
                f"{path} should hold {self.num_tokens:,} tokens of two bytes by its header, "
                f"{found:,} are there: it is damaged or truncated, make it again"
            )

    def find_tokens(self) -> tuple[int, int]:
        """-> the byte at which the tokens start, and how many there should be."""
        if self.path.suffix == ".npy":
            return self.read_npy_header()
        words = np.fromfile(self.path, np.int32, 3).tolist()
        if words[:1] == [self.LLAMA3_MAGIC]:
            raise UserError(f"{self.path} holds tokens of Llama 3: GPT-2's were expected")
        if words[:1] != [self.GPT2_MAGIC]:
            size = self.path.stat().st_size
            if size % 2:
                raise UserError(
                    f"{self.path} has an odd number of bytes ({size}): uint16 tokens were expected"
                )
            return 0, size // 2
        if words[1:2] != [1]:
            raise UserError(f"{self.path} has a header of version {words[1:2]}: 1 was expected")
        return 4 * self.HEADER, words[2]

    def read_npy_header(self) -> tuple[int, int]:
        try:
            with open(self.path, "rb") as file:
                if np.lib.format.read_magic(file) == (1, 0):
                    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                else:
                    shape, _, dtype = np.lib.format.read_array_header_2_0(file)
                offset = file.tell()
        except OSError:
            raise
        except Exception as error:  # NumPy's parser fails in many ways
            raise UserError(
                f"{self.path} is not a whole .npy file ({first_line(error)}): "
                "it is damaged or truncated, make it again"
            ) from None
        if dtype != np.uint16 or len(shape) != 1:
            raise UserError(
                f"{self.path} holds {dtype} of shape {shape}; a shard is one-dimensional uint16"
            )
        return offset, shape[0]

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from token `start` on, uint16.

        They are read, not mapped: memory stays flat, and a file that has shrunk is an ordinary
        error. Raises UserError for it, and OSError where the disk fails.
        """
        tokens = np.fromfile(self.path, "<u2", count, offset=self.offset + 2 * start)
        if len(tokens) < count:
            raise UserError(
                f"{self.path} has shrunk: it had {self.num_tokens} tokens when the run began, "
                f"those from {start + len(tokens)} on are gone; put the file back"
            )
        return tokens


def write_shard(path: Path, parts: list) -> str:
    """Writes arrays of uint16 tokens, one behind another and without a copy, as one `.npy` file.

    It is byte for byte what np.save would write, and there whole or not at all. Returns its
    SHA-256. Raises OSError.
    """
    count = sum(map(len, parts))
    header = io.BytesIO()
    array = {"descr": "<u2", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, array)
    return write_whole(path, header.getvalue(), *parts)

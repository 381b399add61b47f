"""Files of tokens (ours and build-nanogpt's, llm.c's and nanoGPT's), and the stream in them."""

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


class TokenStream:
    """The token shards of one split as an endless stream of sequences of T+1 tokens.

    Inside a shard they are cut with stride T, so each one's last token is the next one's first, and
    what is left at a shard's end is skipped. Epoch follows epoch, and sequence k is the same,
    whoever asks. With shuffle, each epoch permutes the shards, and in each shard the sequences,
    which begin at another offset in each epoch. Raises UserError for missing, damaged or too small
    shards.
    """

    def __init__(
        self,
        data_dir: str | Path,
        split: str,
        T: int,
        *,
        shuffle: bool,
        seed: int,
        vocab_size: int,
    ):
        self.T = T
        self.shuffle = shuffle
        self.seed = seed
        self.vocab_size = vocab_size
        self.shards = find_shards(Path(data_dir), split)
        self.num_tokens = sum(shard.num_tokens for shard in self.shards)
        self.num_sequences = sum(map(self.sequences_in, self.shards))  # of an epoch
        if not self.num_sequences:
            raise UserError(
                f"the {split} split in {data_dir} has {self.num_tokens} tokens in "
                f"{len(self.shards)} shard(s), none of them has one sequence of {T} + 1"
            )
        self.open_epoch: tuple = (None, None)  # its number, and what order_of says of it
        self.open_shard: tuple = (None, None)  # epoch and index, and what starts_of says of it

    def sequence(self, k: int) -> np.ndarray:
        """The T+1 tokens of sequence k of the stream, uint16."""
        shard, start = self.find_sequence(k)
        tokens = shard.read(start, self.T + 1)
        if tokens.max() >= self.vocab_size:
            bad = int(np.argmax(tokens >= self.vocab_size))
            raise UserError(
                f"{shard.path}: token {tokens[bad]} at offset {start + bad} is outside the "
                f"vocabulary of {self.vocab_size}: the file is damaged, or made with another "
                "tokenizer"
            )
        return tokens

    def find_sequence(self, k: int) -> tuple[Shard, int]:
        """-> the shard that holds sequence k of the stream, and the token at which it begins."""
        epoch, k = divmod(k, self.num_sequences)
        number, found = self.open_epoch
        if number != epoch:
            found = self.order_of(epoch)
            self.open_epoch = (epoch, found)
        order, ends = found
        i = int(np.searchsorted(ends, k, side="right"))  # the shard's place in this epoch's order
        before = int(ends[i - 1]) if i else 0
        wanted = (epoch, int(order[i]))
        which, starts = self.open_shard
        if which != wanted:
            starts = self.starts_of(*wanted)
            self.open_shard = (wanted, starts)
        return self.shards[order[i]], int(starts[k - before])

    def sequences_in(self, shard: Shard) -> int:
        """How many sequences a shard has, in every epoch the same number."""
        N, T = shard.num_tokens, self.T
        if N <= T:
            return 0
        if self.shuffle:  # one less, so that there is room for an offset
            return max(1, (N - T) // T)
        return (N - 1) // T

    def order_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards of an epoch in order, and how many sequences come up to the end of each."""
        order = np.arange(len(self.shards))
        if self.shuffle:
            order = np.argsort(random_bits(len(order), self.seed, epoch), kind="stable")
        return order, np.cumsum([self.sequences_in(self.shards[i]) for i in order])

    def starts_of(self, epoch: int, index: int) -> np.ndarray:
        """The tokens of a shard at which its sequences begin, in the order of this epoch."""
        shard = self.shards[index]
        n = self.sequences_in(shard)
        if not self.shuffle:
            return self.T * np.arange(n)
        bits = random_bits(n + 1, self.seed, epoch, index + 1)
        offset = int(bits[0]) % min(self.T, shard.num_tokens - n * self.T)
        return offset + self.T * np.argsort(bits[1:], kind="stable")


def random_bits(n: int, *seed: int) -> np.ndarray:
    """n random numbers of 64 bits that depend on the seed alone.

    The raw bits of PCG64 never change between versions of NumPy.
    """
    return np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n)

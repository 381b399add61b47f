"""What is left out of a corpus: copies of earlier documents, and what a benchmark has."""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.common import UserError

COUNTS = ("documents", "contaminated", "cuts", "dropped", "duplicates")  # kept in the manifest


class Batch(NamedTuple):
    """The tokens of n texts, and what the filters have done with them or need to know."""

    tokens: np.ndarray  # of all texts, uint16
    lengths: np.ndarray  # (n,) tokens of each text
    counts: np.ndarray  # (n, len(COUNTS)) what each text adds to the COUNTS
    hashes: list[bytes | None]  # of each text, if it is a whole document


def name_counts(counts: np.ndarray) -> dict[str, int]:
    return dict(zip(COUNTS, counts.tolist(), strict=True))


# -- what a benchmark has

NGRAM = 13  # words in a row that two texts do not share by chance (GPT-3 paper, appendix C)
MARGIN = 200  # characters that are cut out on both sides of them
MOST_CUTS = 10  # in a document that is worth keeping
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: spreads hashes well
PUNCTUATION = re.compile(r"[^\w\s]|_")


class Benchmark:
    """Texts that must not be trained on, as the hashes of all NGRAM words in a row in them.

    Words are in lower case and without punctuation. This is the GPT-3 paper's appendix C without
    one exception: runs of words that more than ten documents share, which takes a second pass.
    """

    def __init__(self, texts: Iterable[str]):
        words = []
        for text in texts:
            words += split_words(text)
            words.append("")  # no run of words goes on into the next text
        self.vocabulary = {word: i for i, word in enumerate(sorted(set(words)))}
        _, hashes = self.hash_runs(words)
        self.hashes = np.unique(hashes)

    def hash_runs(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The places at which NGRAM words of the vocabulary begin, and the hashes of these runs."""
        numbers = [self.vocabulary.get(word, 0) for word in words]  # 0: unknown, or ""
        ids = np.array(numbers + [0] * NGRAM, np.uint64)
        unknown = np.concatenate([[0], np.cumsum(ids == 0)])  # how many stand before each place
        places = np.flatnonzero(unknown[NGRAM:] == unknown[:-NGRAM])  # none in the NGRAM words
        hashes = np.zeros(len(places), np.uint64)
        for i in range(NGRAM):
            hashes = hashes * MULTIPLIER + ids[places + i]  # modulo 2**64
        return places, hashes

    def find(self, text: str) -> list[int]:
        """The numbers of the words at which NGRAM in a row begin that the benchmark has too."""
        places, hashes = self.hash_runs(split_words(text))
        first = self.hashes.searchsorted(hashes)
        behind = self.hashes.searchsorted(hashes, side="right")
        return places[first < behind].tolist()


def split_words(text: str) -> list[str]:
    return PUNCTUATION.sub("", text.lower()).split()


def cut_out(text: str, matches: list[int]) -> tuple[list[tuple[int, int]], int]:
    """Cuts NGRAM words from each match on, and a MARGIN on both sides, out of a text.

    Returns what is left, as (start, end), and the number of cuts. What is shorter than a MARGIN
    is not worth keeping; after more than MOST_CUTS, nothing is.
    """
    if not matches:
        return [(0, len(text))], 0
    words = [word.span() for word in re.finditer(r"\S+", text) if split_words(word[0])]
    left: list[tuple[int, int]] = []
    end = 0  # of the last cut
    for match in matches:
        start = words[match][0] - MARGIN
        if start > end or not left:
            left.append((end, start))
        end = words[match + NGRAM - 1][1] + MARGIN
    cuts = len(left)
    left.append((end, len(text)))
    if cuts > MOST_CUTS:
        return [], cuts
    return [(start, end) for start, end in left if end - start >= MARGIN], cuts


# -- copies


def hash_document(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


class Seen:
    """The hashes of all documents so far.

    In memory, those with the same first two bytes lie end to end in one bucket: a set of Python
    objects would take six times as much. They are also in a file, from which a restart reads the
    first `count`; those behind belong to documents that will be read again. Raises UserError if
    there are not so many.
    """

    def __init__(self, path: Path, count: int):
        self.count = 0
        self.buckets = [bytearray() for _ in range(2**16)]
        self.file = open(path, "a+b")  # noqa: SIM115
        if self.file.tell() < 16 * count:
            told = f"{path} is damaged: {self.file.tell()} bytes, {16 * count} were expected"
            raise UserError(f"{told}; put back a copy, or delete {path.parent} and make it again")
        self.file.seek(0)
        for _ in range(count):
            self.remember(self.file.read(16))
        self.file.truncate(16 * count)

    def remember(self, digest: bytes) -> bool:
        """Keeps a hash in memory. Returns whether it is new."""
        bucket = self.buckets[digest[0] + 256 * digest[1]]
        rest = digest[2:]
        at = bucket.find(rest)
        while at > 0 and at % len(rest):  # the end of one hash and the start of the next
            at = bucket.find(rest, at + 1)
        if at >= 0:
            return False
        bucket += rest
        self.count += 1
        return True

    def add(self, digest: bytes) -> bool:
        """Keeps a hash in memory and in the file. Returns whether it is new."""
        is_new = self.remember(digest)
        if is_new:
            self.file.write(digest)
        return is_new

    def write_to_disk(self) -> None:
        """Waits until what has been added is on the disk; more may be added meanwhile."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def delete(self) -> None:
        self.file.close()
        Path(self.file.name).unlink()


def drop_copies(batch: Batch, seen: Seen) -> Batch:
    """The batch without documents that have been seen before."""
    is_new = np.array([digest is None or seen.add(digest) for digest in batch.hashes])
    counts = batch.counts.copy()
    counts[~is_new] = (1, 0, 0, 0, 1)  # a copy is a document and a duplicate, and nothing else
    tokens = batch.tokens[np.repeat(is_new, batch.lengths)]
    lengths = np.where(is_new, batch.lengths, 0)
    return Batch(tokens, lengths, counts, batch.hashes)

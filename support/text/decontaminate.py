"""Finds and cuts out text that a benchmark has too: the 13-gram filter of GPT-3's appendix C."""

import re
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

NGRAM = 13  # words in a row that two texts do not share by chance (GPT-3 paper, appendix C)
MARGIN = 200  # characters that are cut out on both sides of them
MOST_CUTS = 10  # a document with more cuts is dropped; of a long text, with more in 100,000
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: its powers spread hashes well


class Benchmark:
    """Texts that must not be trained on, as a hash of each run of NGRAM words in them."""

    def __init__(self, texts: Iterable[str]):
        words = [word for text in texts for word in (*split_words(text), "")]  # "" ends a text
        self.vocabulary = {word: i for i, word in enumerate(sorted(set(words)))}
        self.hashes = np.unique(self.hash_runs(words)[1])  # unlike GPT-3's, common runs count

    def hash_runs(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns where NGRAM words of the vocabulary begin, and the hash of each such run."""
        numbers = [self.vocabulary.get(word, 0) for word in words]  # 0: unknown, or ""
        ids = np.array(numbers + [0] * NGRAM, np.uint64)
        unknown = np.concatenate([[0], np.cumsum(ids == 0)])  # how many stand before each place
        places = np.flatnonzero(unknown[NGRAM:] == unknown[:-NGRAM])  # none in the NGRAM words
        powers = GOLDEN ** np.arange(NGRAM, dtype=np.uint64)  # modulo 2**64, as the sums
        return places, np.convolve(ids, powers, "valid")[places]

    def find(self, text: str) -> list[int]:
        """Returns the number of each word that starts a run of words of the benchmark."""
        places, hashes = self.hash_runs(split_words(text))
        known = self.hashes.searchsorted(hashes, "right") > self.hashes.searchsorted(hashes)
        return places[known].tolist()


def split_words(text: str) -> list[str]:
    return re.sub(r"[^\w\s]|_", "", text.lower()).split()  # without punctuation


def cut_out(
    text: str, benchmark: Benchmark | None, before: str = "", after: str = ""
) -> tuple[list[tuple[int, int]], int]:
    """Cuts each match and its MARGIN out of a text -> (start, end) of the rest; how many cuts.

    before, after: what a stretch of a long document has around it. A match may reach across.
    """
    whole = before + text + after
    matches = benchmark.find(whole) if benchmark else []
    if not matches:
        return [(0, len(text))], 0
    words = [word.span() for word in re.finditer(r"\S+", whole) if split_words(word[0])]
    pieces: list[tuple[int, int]] = []
    end = 0  # of the last cut
    for match in matches:
        start = words[match][0] - MARGIN
        if start > end or not pieces:
            pieces.append((end, start))
        end = words[match + NGRAM - 1][1] + MARGIN
    pieces.append((end, len(whole)))
    first, last = len(before), len(before) + len(text)
    cuts = sum(a < last and b > first for (_, a), (b, _) in pairwise(pieces))
    if cuts > MOST_CUTS * max(1, len(text) / 100_000):  # a .txt comes in stretches of a megabyte
        return [], cuts
    kept = [(max(a, first), min(b, last)) for a, b in pieces if b - a >= MARGIN]
    return [(a - first, b - first) for a, b in kept if a < b], cuts

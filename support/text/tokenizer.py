"""Byte-level BPE: GPT-2's vocabulary, or one of the data's own. It never needs the network."""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from support.base.errors import UserError, reading
from support.text.names import MANIFEST, TOKENIZER_FILE

RANKS_FILE = Path(__file__).parents[2] / "assets" / "gpt2.tiktoken"
VOCAB_SIZE = 50257  # GPT-2's: 256 bytes + 50,000 merges + <|endoftext|>
END = "<|endoftext|>"  # starts every document

# How GPT-2 cuts text into words before it merges bytes (the pattern of tiktoken's r50k_base).
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# tiktoken's \s and \S: Python's \s has \x1c to \x1f, too
SPACE = r"[^\S\x1c-\x1f]"
NO_SPACE = r"[\S\x1c-\x1f]"
LAST_SPACE = re.compile(rf"(?={SPACE}{NO_SPACE})(?<={SPACE}{{100000}})")  # of very many

# settings of tokenizer.json's model and of tokenizer_config.json by which a text has other tokens
OTHERWISE = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
CONFIGURED = ("add_prefix_space", "add_bos_token", "add_eos_token", "do_lower_case")

# The characters for bytes in Hugging Face's files: a visible one its own, the others from 256 on
# (encoder.py of openai/gpt-2).
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTES = {chr(byte): byte for byte in VISIBLE} | {chr(256 + i): b for i, b in enumerate(HIDDEN)}


@dataclass(eq=False)
class Tokenizer:
    ranks: dict[bytes, int]  # {the bytes of a token: its number}, in the order of the merges
    json: str  # the same for Hugging Face's libraries: what tokenizer.json says

    @property
    def eot(self) -> int:
        """<|endoftext|>, the last token."""
        return len(self.ranks)

    @property
    def vocab_size(self) -> int:
        return len(self.ranks) + 1

    @cached_property
    def sha256(self) -> str:
        """Two vocabularies with the same one give all texts the same tokens."""
        lines = [PATTERN.encode(), *map(base64.b64encode, self.ranks)]
        return hashlib.sha256(b"\n".join(lines)).hexdigest()

    def __str__(self) -> str:
        name = "GPT-2's" if self is gpt2() else f"SHA-256 {self.sha256[:8]}…"
        return f"{self.vocab_size:,} tokens ({name})"

    @cached_property
    def files(self) -> dict[str, bytes]:
        """tokenizer.json, and the two files that transformers 4's GPT2Tokenizer reads instead."""
        model = json.loads(self.json)["model"]
        merges = "".join(f"{merge}\n" for merge in model["merges"])
        return {
            TOKENIZER_FILE: self.json.encode(),
            "vocab.json": json.dumps(model["vocab"], ensure_ascii=False).encode(),
            "merges.txt": f"#version: 0.2\n{merges}".encode(),
        }

    @cached_property
    def encoding(self) -> Any:
        """tiktoken's Encoding. Its `encode_ordinary` fails for some texts: see `encode`."""
        import tiktoken

        return tiktoken.Encoding(
            "ranks", pat_str=PATTERN, mergeable_ranks=self.ranks, special_tokens={END: self.eot}
        )

    @cached_property
    def sizes(self) -> np.ndarray:
        """(vocab_size,): how many bytes of text each token is. <|endoftext|> is none."""
        return np.array([*map(len, self.ranks), 0])

    @cached_property
    def characters(self) -> np.ndarray:
        """(vocab_size,): how many characters of UTF-8 begin in each token."""
        return np.array([*(sum(b & 0xC0 != 0x80 for b in token) for token in self.ranks), 0])

    def encode(self, text: str) -> list[int]:
        """The tokens of any text. A literal <|endoftext|> stays text."""
        return np.concatenate(self.encode_to_arrays(text)).tolist()

    def encode_to_arrays(self, text: str) -> list[np.ndarray]:
        """The same tokens as arrays, one for each piece of a long text."""
        # tiktoken fails where a million spaces precede a word. GPT-2's pattern takes all but the
        # last of them for one word, so cutting the text before the last changes no token.
        pieces = LAST_SPACE.split(text) if len(text) > 100_000 else [text]
        try:
            encode = self.encoding.encode_to_numpy
            return [encode(piece, disallowed_special=()) for piece in pieces]
        except UnicodeEncodeError:
            return self.encode_to_arrays(replace_surrogates(text))


@lru_cache(maxsize=1)
def gpt2() -> Tokenizer:
    lines = RANKS_FILE.read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    return Tokenizer(ranks, RANKS_FILE.with_name(TOKENIZER_FILE).read_text("utf-8"))


def from_merges(vocabulary: dict[str, int], merges: list) -> Tokenizer:
    """From Hugging Face's {word: number}. Raises ValueError if ranks alone lead to other merges."""
    words = sorted(vocabulary.keys() - {END}, key=vocabulary.__getitem__)
    numbers = {word: number for number, word in enumerate([*words, END])}
    model = models.BPE(numbers, [(first, second) for first, second in merges])
    merged = [first + second for first, second in merges]
    if merged != words[256:] or any(len(model.tokenize(word)) > 1 for word in words):
        raise ValueError("the merges are not those of the ranks")
    theirs = tokenizers.Tokenizer(model)
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    theirs.post_processor = processors.ByteLevel(trim_offsets=False)
    theirs.add_special_tokens([END])
    ranks = {bytes(BYTES[c] for c in word): rank for rank, word in enumerate(words)}
    parts = json.loads(theirs.to_str())
    # as strings, because tokenizers before 0.20 (of transformers 4.40) read no pairs
    parts["model"]["merges"] = [f"{first} {second}" for first, second in merges]
    return Tokenizer(ranks, json.dumps(parts, ensure_ascii=False, separators=(",", ":")))


def replace_surrogates(text: str) -> str:
    """Replaces lone surrogates, of broken bytes or escapes, because UTF-8 cannot write them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def train_vocabulary(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A vocabulary of `vocab_size` tokens, or fewer if no pair of tokens comes twice any more."""
    trained = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = pre_tokenizers.Split(tokenizers.Regex(".{1,1000}"), "isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])  # as `trainer` is quadratic
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    texts = map(replace_surrogates, texts)
    thread = ThreadPoolExecutor(1)  # because only Python's own code hears Ctrl-C
    thread.submit(trained.train_from_iterator, texts, trainer).result()
    thread.shutdown()
    # Its threads do not survive a fork: later ones do without, and are not warned of it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model = json.loads(trained.to_str())["model"]
    return from_merges(model["vocab"], model["merges"])


def read_tokenizer(name: str | Path) -> Tokenizer:
    """Reads a tokenizer.json, or the one in a directory; "gpt2" is GPT-2's. Raises UserError."""
    if str(name) == "gpt2":
        return gpt2()
    path = Path(name)
    if (path / MANIFEST).exists() or (path / "config.json").exists():
        return tokenizer_of_data(path)  # GPT-2's have no file
    path = path / TOKENIZER_FILE if path.is_dir() else path
    with reading(path):
        tokenizer = parse(path.read_text("utf-8"))
    if not tokenizer:
        raise UserError(
            f"{path} is of another kind than byte-level BPE like GPT-2's, with {END} as its last "
            "token, and none put around a text: fineweb.py --vocab-size trains one"
        )
    return tokenizer


@lru_cache(maxsize=4)  # data, loaders and a checkpoint share it; 65,536 merges take a second
def parse(content: str) -> Tokenizer | None:
    """The tokenizer of a tokenizer.json. None if its ranks alone do not decide."""
    if content == gpt2().json:
        return gpt2()
    json.loads(content)  # a damaged one is not of another kind
    with suppress(Exception):  # of the library, too: not byte-level, not BPE, …
        *others, vocabulary, merges = what_decides(content)
        tokenizer = from_merges(vocabulary, merges)
        if [*others, vocabulary, merges] == what_decides(tokenizer.json):
            return gpt2() if tokenizer.ranks == gpt2().ranks else tokenizer
    return None


def what_decides(content: str) -> list:
    """Of a tokenizer.json, what decides which tokens a text has. Old files write it otherwise."""
    theirs = tokenizers.Tokenizer.from_str(content)
    theirs.no_truncation()  # transformers sets both anew in each call
    theirs.no_padding()
    around = theirs.encode("a").ids != theirs.encode("a", add_special_tokens=False).ids  # a BOS
    parts = json.loads(theirs.to_str())
    parts["pre_tokenizer"].pop("trim_offsets", None)
    added = [(token["id"], token["content"]) for token in parts["added_tokens"]]
    model = parts["model"]
    other = [model.get(name) or None for name in OTHERWISE]
    decoder = (parts["decoder"] or {}).get("type", "ByteLevel")
    same = [parts["normalizer"], parts["pre_tokenizer"], decoder, added, around, other]
    return [*same, model["type"], model["vocab"], model["merges"]]


def tokenizer_in(directory: str | Path) -> Tokenizer:
    """A model's own, from its tokenizer.json. A directory without one is GPT-2's."""
    own = Path(directory, TOKENIZER_FILE)
    settings = Path(directory, "tokenizer_config.json")
    if settings.exists():
        with reading(settings):
            theirs = json.loads(settings.read_bytes())
            is_known = "GPT2" in theirs.get("tokenizer_class", "GPT2") or own.exists()
            if any(theirs.get(name) for name in CONFIGURED) or not is_known:
                raise UserError(f"{settings} is of a tokenizer that gives a text other tokens")
    if own.exists():
        return read_tokenizer(own)
    old = Path(directory, "vocab.json")  # what older models have instead
    if old.exists():
        added = old.with_name("added_tokens.json")
        with reading(old):
            words = json.loads(old.read_bytes())
            words |= json.loads(added.read_bytes()) if added.exists() else {}
        if words != json.loads(gpt2().json)["model"]["vocab"]:
            hint = f"have transformers save {TOKENIZER_FILE} beside it"
            raise UserError(f"{old} is not GPT-2's, or {added.name} adds tokens: {hint}")
    return gpt2()


def tokenizer_of_data(data_dir: str | Path) -> Tokenizer:
    """The one that made the shards in data_dir. Raises UserError if another or none is there."""
    manifest = Path(data_dir) / MANIFEST
    tokenizer = tokenizer_in(data_dir)
    if manifest.exists():
        with reading(manifest):
            made_with = json.loads(manifest.read_bytes()).get("tokenizer", {})
        if tokenizer.sha256 != made_with.get("sha256", gpt2().sha256):
            raise UserError(
                f"{Path(data_dir, TOKENIZER_FILE)} is missing or not the one that made the shards: "
                "put it back (GPT-2's shards have none), or make all again in another --data-dir"
            )
    return tokenizer

"""GPT-2's byte-pair encoding: text that others wrote goes through `encode`.

The rank table is in `assets/`, so it never needs the network.
"""

import base64
import hashlib
import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from support.common import UserError

RANKS_FILE = Path(__file__).parent.parent / "assets" / "gpt2.tiktoken"
# the hash that tiktoken pins for r50k_base
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
VOCAB_SIZE = 50257  # 256 bytes + 50,000 merges + <|endoftext|>
EOT = 50256  # <|endoftext|>, the start of every document

# How GPT-2 cuts text into words before merging bytes (the pattern of tiktoken's r50k_base).
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


@lru_cache(maxsize=1)
def mergeable_ranks() -> dict[bytes, int]:
    """The 50,256 tokens that are bytes, each with its rank, which is also its id.

    Raises UserError for a damaged table.
    """
    table = RANKS_FILE.read_bytes()
    if hashlib.sha256(table).hexdigest() != RANKS_SHA256:
        raise UserError(
            f"{RANKS_FILE} is not GPT-2's rank table (its sha256 differs); "
            f"restore it: git checkout {RANKS_FILE}"
        )
    ranks = {}
    for line in table.splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return ranks


@lru_cache(maxsize=1)
def get_tokenizer():
    """GPT-2's tokenizer of 50,257 tokens.

    `encode_ordinary(text)` treats a literal <|endoftext|> as plain text.
    """
    import tiktoken

    return tiktoken.Encoding(
        "gpt2",
        pat_str=PATTERN,
        mergeable_ranks=mergeable_ranks(),
        special_tokens={"<|endoftext|>": EOT},
        explicit_n_vocab=VOCAB_SIZE,
    )


# -- any text to tokens

SPACE = r"[^\S\x1c-\x1f]"  # a space for tiktoken; for Python's \s, four control characters too
LAST_SPACE = re.compile(rf"(?={SPACE}[\S\x1c-\x1f])(?<={SPACE}{{100000}})")  # of very many


def encode(text: str) -> list[int]:
    """GPT-2's tokens of any text: a literal <|endoftext|> in it stays text."""
    return np.concatenate(encode_to_arrays(text)).tolist()


def encode_to_arrays(text: str) -> list[np.ndarray]:
    """The same tokens as arrays, one for each part of the text, for where there are very many.

    tiktoken panics where a million spaces precede a word. GPT-2's pattern takes all but the last
    of them for one word of its own, so cutting the text before the last does not change a token.
    """
    parts = LAST_SPACE.split(text) if len(text) > 100_000 else [text]
    tokenizer = get_tokenizer()
    try:
        return [tokenizer.encode_to_numpy(part, disallowed_special=()) for part in parts]
    except UnicodeEncodeError:
        return encode_to_arrays(replace_surrogates(text))


def replace_surrogates(text: str) -> str:
    """The text with U+FFFD for each lone surrogate, which UTF-8 cannot write.

    Python makes them of bytes on a command line that are no text, JSON of a broken escape.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_vocabulary(model: str, vocab_size: int) -> None:
    """Raises UserError, which names the model, unless its tokens are GPT-2's."""
    if vocab_size != VOCAB_SIZE:
        raise UserError(
            f"{model} has a vocabulary of {vocab_size}: its tokens are not GPT-2's {VOCAB_SIZE}, "
            "which text is turned into here; use a model that has those"
        )


# -- for Hugging Face


@lru_cache(maxsize=1)
def tokenizer_json() -> str:
    """GPT-2's tokenizer as Hugging Face's `tokenizer.json`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    # GPT-2 writes bytes as printable characters: those that print as themselves, the other 68 as
    # U+0100 onwards.
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [b for b in range(256) if b not in printable]
    to_char = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}

    def spell(token: bytes) -> str:
        return "".join(to_char[b] for b in token)

    vocab = {spell(token): rank for token, rank in mergeable_ranks().items()}
    vocab["<|endoftext|>"] = EOT
    pairs = [(spell(a), spell(b)) for a, b in merges()]
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer.to_str()


@lru_cache(maxsize=1)
def merges() -> list[tuple[bytes, bytes]]:
    """GPT-2's `vocab.bpe`: for each token of several bytes the two parts it is made of.

    They are in order of rank. The rank table does not hold them, but the encoder's own rule finds
    them: of the bytes of a token, merge the pair of the lowest rank, again and again, until two
    parts are left.
    """
    ranks = mergeable_ranks()

    def halves(token: bytes) -> tuple[bytes, bytes]:
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            pair_ranks = [ranks.get(a + b, VOCAB_SIZE) for a, b in pairwise(parts)]
            i = pair_ranks.index(min(pair_ranks))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts[0], parts[1]

    return [halves(token) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]

"""GPT-2's byte-pair encoding, from the rank table in `assets/`: it never needs the network."""

import base64
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from support.common import UserError

RANKS_FILE = Path(__file__).parent.parent / "assets" / "gpt2.tiktoken"
TOKENIZER_JSON = RANKS_FILE.with_name("tokenizer.json")  # the same for Hugging Face
VOCAB_SIZE = 50257  # 256 bytes + 50,000 merges + <|endoftext|>
EOT = 50256  # <|endoftext|>, the start of every document

# How GPT-2 cuts text into words before it merges bytes (the pattern of tiktoken's r50k_base).
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# Before the last of very many spaces. Unlike Python's \s, tiktoken's lacks \x1c to \x1f.
LAST_SPACE = re.compile(r"(?=[^\S\x1c-\x1f][\S\x1c-\x1f])(?<=[^\S\x1c-\x1f]{100000})")


@lru_cache(maxsize=1)
def get_tokenizer() -> Any:
    """GPT-2's tokenizer. `encode_ordinary(text)` takes a literal <|endoftext|> for plain text."""
    import tiktoken

    lines = RANKS_FILE.read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    return tiktoken.Encoding(
        "gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": EOT}
    )


@lru_cache(maxsize=1)
def token_sizes() -> np.ndarray:
    """(50257,): how many bytes of text each token is. <|endoftext|> is none."""
    decode = get_tokenizer().decode_single_token_bytes
    return np.array([*(len(decode(token)) for token in range(EOT)), 0])


def encode(text: str) -> list[int]:
    """GPT-2's tokens of any text. A literal <|endoftext|> stays text."""
    return np.concatenate(encode_to_arrays(text)).tolist()


def encode_to_arrays(text: str) -> list[np.ndarray]:
    """The same tokens as arrays, one for each piece of a long text.

    tiktoken fails where a million spaces precede a word. GPT-2's pattern takes all but the last
    of them for one word, so we cut the text before the last. No token changes.
    """
    pieces = LAST_SPACE.split(text) if len(text) > 100_000 else [text]
    try:
        return [get_tokenizer().encode_to_numpy(piece, disallowed_special=()) for piece in pieces]
    except UnicodeEncodeError:
        return encode_to_arrays(replace_surrogates(text))


def replace_surrogates(text: str) -> str:
    """Replaces each lone surrogate, which UTF-8 cannot write, with U+FFFD.

    They come from bytes on a command line that are not UTF-8, and from broken escapes in JSON.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_vocabulary(model: str, vocab_size: int) -> None:
    """Raises UserError if the vocabulary is not GPT-2's. model: its name."""
    if vocab_size != VOCAB_SIZE:
        raise UserError(
            f"{model} has {vocab_size} tokens in its vocabulary: use one with GPT-2's {VOCAB_SIZE}"
        )

"""GPT-2's byte-pair encoding as a `tiktoken.Encoding`, from the rank table in `assets/` and never from the network."""

import base64
import hashlib
import os
import sys
from functools import lru_cache
from pathlib import Path

RANKS_FILE = Path(__file__).parent / "assets" / "gpt2.tiktoken"
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"  # the hash tiktoken pins for r50k_base
VOCAB_SIZE = 50257  # 256 bytes + 50,000 merges + <|endoftext|>
EOT = 50256  # <|endoftext|>, the start of every document

# How GPT-2 cuts text into words before merging bytes (the pattern of tiktoken's r50k_base).
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class UserError(ValueError):
    """A mistake that the user can mend, told in one sentence: what was found, what was expected, what to do."""


@lru_cache(maxsize=1)
def mergeable_ranks() -> dict[bytes, int]:
    """The 50,256 tokens that are bytes, each with its rank, which is also its id. Raises UserError for a damaged table."""
    table = RANKS_FILE.read_bytes()
    if hashlib.sha256(table).hexdigest() != RANKS_SHA256:
        raise UserError(f"{RANKS_FILE} is not GPT-2's rank table (its sha256 differs); restore it: git checkout {RANKS_FILE}")
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in table.splitlines())}


@lru_cache(maxsize=1)
def get_tokenizer():
    """GPT-2's tokenizer: 50,257 tokens. `encode_ordinary(text)` treats a literal <|endoftext|> as plain text."""
    import tiktoken

    return tiktoken.Encoding(
        "gpt2",
        pat_str=PATTERN,
        mergeable_ranks=mergeable_ranks(),
        special_tokens={"<|endoftext|>": EOT},
        explicit_n_vocab=VOCAB_SIZE,
    )


def run_script(main) -> None:
    """Calls `main` as every script here ends: a user's mistake or a failing disk is one line on stderr and exit code 1."""
    try:
        main()
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `python sample.py | head`: the reader has gone, nothing is wrong
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, the shell's convention

"""GPT-2's byte-pair encoding as a `tiktoken.Encoding`, from the rank table in `assets/` and never from the network."""

import base64
import hashlib
import json
import os
import sys
from dataclasses import fields, make_dataclass
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


@lru_cache(maxsize=1)
def merges() -> list[tuple[bytes, bytes]]:
    """The table as GPT-2's `vocab.bpe` has it: for each token of several bytes the two it is made of, in order of rank."""
    ranks = mergeable_ranks()

    def halves(token: bytes) -> tuple[bytes, bytes]:
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:  # merge the pair that came first, as the encoder would, until two parts are left
            i = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], VOCAB_SIZE))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts[0], parts[1]

    return [halves(token) for token in sorted(ranks, key=ranks.get) if len(token) > 1]


@lru_cache(maxsize=1)
def hf_tokenizer_json() -> str:
    """The same tokenizer as Hugging Face's `tokenizer.json`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    # GPT-2 writes bytes as printable characters: those that print as themselves, the other 68 as U+0100 onwards.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    to_char = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}

    def spell(token: bytes) -> str:
        return "".join(to_char[b] for b in token)

    vocab = {spell(token): rank for token, rank in mergeable_ranks().items()} | {"<|endoftext|>": EOT}
    tokenizer = Tokenizer(models.BPE(vocab, [(spell(a), spell(b)) for a, b in merges()]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer.to_str()


def save_hf_tokenizer(directory: Path, model_max_length: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`: `AutoTokenizer.from_pretrained(directory)` gives the same ids."""
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    config = dict(
        tokenizer_class="GPT2Tokenizer", model_max_length=model_max_length, add_prefix_space=False, **special
    )  # fmt: skip
    (directory / "tokenizer.json").write_text(hf_tokenizer_json(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def read_flags(config_class, default=None, args: list[str] | None = None):
    """The command line laid over `default` -> config_class. --help has a box for each of the dataclasses that it is made of."""
    import tyro

    default, parts = default or config_class(), config_class.__bases__[::-1]
    boxes = make_dataclass("Boxes", [(part.__name__.lower(), part) for part in parts])
    boxes.__doc__ = config_class.__doc__
    defaults = boxes(*(part(**{f.name: getattr(default, f.name) for f in fields(part)}) for part in parts))
    given = tyro.cli(tyro.conf.OmitArgPrefixes[boxes], default=defaults, args=args)
    return config_class(**{name: value for part in vars(given).values() for name, value in vars(part).items()})


def run_script(main) -> None:
    """Calls `main` as every script here ends: a user's mistake or a failing disk is one line on stderr and exit code 1."""
    sys.stdout.reconfigure(errors="replace")  # text of a model may hold what a console's encoding has not
    try:
        main()
    except SystemExit as end:
        if not end.code and {"-h", "--help"} & set(sys.argv[1:]):  # after the flags, the examples
            print(sys.modules["__main__"].__doc__)
        raise
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `python sample.py | head`: the reader has gone, nothing is wrong
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, the shell's convention

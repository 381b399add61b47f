"""Hugging Face, nanoGPT and build-nanogpt files ↔ plain dictionaries.

A shape is {block_size, vocab_size, n_layer, n_head, n_embd}. Weights are {name: tensor} with
GPT-2's names and nn.Linear's orientation, (out, in). This file knows no model class.
"""

import json
import os
import pickle
import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from support.common import UserError, first_line
from support.tokenizer import EOT, VOCAB_SIZE, mergeable_ranks

EMBEDDING = "transformer.wte.weight"
SHAPE = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")


def is_conv1d(name: str) -> bool:
    """Whether Hugging Face keeps this tensor as OpenAI did, (in, out), not (out, in)."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


# -- reading


def read_model(name_or_dir: str | Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Shape and weights of a name on the hub, a model directory, or a .pt file.

    Raises UserError if it is no GPT-2.
    """
    if str(name_or_dir).endswith(".pt"):
        return read_pt(Path(name_or_dir))
    directory = Path(name_or_dir)
    if not directory.is_dir():
        directory = download_pretrained(str(name_or_dir))
    shape = read_shape(directory)
    weights = {}
    for name, w in read_weights(directory).items():
        if not name.startswith("transformer."):
            name = f"transformer.{name}"  # the hub's own gpt2 has no prefix
        weights[name] = w.t() if is_conv1d(name) and w.dim() == 2 else w
    return shape, without_buffers(weights)


def without_buffers(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without what is no parameter: masks that older files carry, and the head, which is tied."""
    buffers = (".attn.bias", ".attn.masked_bias", "lm_head.weight")
    return {name: w for name, w in weights.items() if not name.endswith(buffers)}


def refuse_other_sizes(shape: dict, weights: dict[str, torch.Tensor]) -> None:
    """Raises UserError if the weights are not of this shape, before a model of it is made."""
    C = shape["n_embd"]
    expected = {
        EMBEDDING: (shape["vocab_size"], C),
        "transformer.wpe.weight": (shape["block_size"], C),
    }
    for name, size in expected.items():
        if name in weights and weights[name].shape != size:
            found = tuple(weights[name].shape)
            raise UserError(f"{name} has shape {found} where {size} was expected")
    for i in range(shape["n_layer"]):
        name = f"transformer.h.{i}.ln_1.weight"
        if name not in weights:
            L = shape["n_layer"]
            raise UserError(f"the weights have no tensor {name}: this is not a GPT-2 of {L} layers")


def read_shape(directory: Path) -> dict:
    """What a Hugging Face config.json fixes. Raises UserError unless it is a GPT-2's."""
    path = directory / "config.json"
    try:
        theirs = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: "
            "a Hugging Face model directory or one of our ckpt_ directories was expected"
        ) from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is no JSON: it is damaged; fetch or make it again") from None
    if not isinstance(theirs, dict) or theirs.get("model_type") != "gpt2":
        kind = theirs.get("model_type") if isinstance(theirs, dict) else type(theirs).__name__
        raise UserError(
            f"{directory} holds a {kind!r} model; only GPT-2's architecture can be loaded"
        )
    shape: dict[str, Any] = {key: theirs.get(key) for key in SHAPE}
    shape["block_size"] = theirs.get("n_positions")
    wrong = [key for key, n in shape.items() if type(n) is not int or n < 1]
    if wrong:
        told = ", ".join(f"{key} {shape[key]!r}" for key in wrong)
        raise UserError(f"{path} has {told}: numbers from 1 on were expected; it is damaged")
    openai = dict(
        activation_function="gelu_new",
        n_inner=4 * shape["n_embd"],
        layer_norm_epsilon=1e-5,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
        tie_word_embeddings=True,
    )
    changed = [key for key, value in openai.items() if theirs.get(key) not in (None, value)]
    if changed:
        told = ", ".join(f"{key} {theirs[key]}" for key in changed)
        raise UserError(f"{directory} is not OpenAI's GPT-2 but has {told}; it cannot be loaded")
    return shape


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model directory, as they are in the file.

    That is model.safetensors, else pytorch_model.bin by the unpickler that runs no code.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = directory / "model.safetensors"
    try:
        if file.exists():
            return load_file(file)
        file = directory / "pytorch_model.bin"
        file.open("rb").close()  # its errors are clearer than torch's
        weights = torch.load(file, map_location="cpu", weights_only=True)
        if all(isinstance(w, torch.Tensor) for w in weights.values()):
            return weights
        raise UserError(f"{file} holds more than tensors: the weights of a GPT-2 were expected")
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(
            f"{directory} has neither model.safetensors nor pytorch_model.bin"
        ) from None
    except pickle.UnpicklingError as error:
        reason = first_line(error)
        raise UserError(
            f"the weights in {directory} are refused: more than tensors is pickled ({reason})"
        ) from None
    except OSError as error:
        raise UserError(f"{file} cannot be read now ({error.strerror}): mend that first") from None
    except (SafetensorError, RuntimeError, EOFError, ValueError, AttributeError) as error:
        reason = first_line(error)
        raise UserError(
            f"the weights in {directory} cannot be read ({reason}): the file is damaged"
        ) from None


class TheirConfig:
    """Stands in for build-nanogpt's pickled GPTConfig: its fields, none of its code."""


def read_pt(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Shape and weights of nanoGPT's `ckpt.pt` or build-nanogpt's `model_*.pt`.

    The unpickler runs no code; the one class it may make is build-nanogpt's GPTConfig.
    """
    modules = ("__main__", "train_gpt2", "model")
    stand_ins: list = [(TheirConfig, f"{module}.GPTConfig") for module in modules]
    try:
        with torch.serialization.safe_globals(stand_ins):
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        theirs = saved["model_args"] if "model_args" in saved else vars(saved["config"])
        shape = {key: theirs[key] for key in SHAPE}
        weights = {re.sub(r"^(_orig_mod\.|module\.)+", "", n): w for n, w in saved["model"].items()}
    except FileNotFoundError:
        raise UserError(f"{path} is not there") from None
    except pickle.UnpicklingError as error:
        reason = first_line(error)
        raise UserError(
            f"{path} is refused: it holds more than weights and plain values ({reason})"
        ) from None
    except (RuntimeError, EOFError, KeyError, TypeError, AttributeError) as error:
        reason = first_line(error)
        raise UserError(f"{path} is no checkpoint of nanoGPT or build-nanogpt ({reason})") from None
    V = min(shape["vocab_size"], VOCAB_SIZE)  # theirs counts the padding
    shape["vocab_size"] = V
    if EMBEDDING in weights:
        weights[EMBEDDING] = weights[EMBEDDING][:V]
    for name in list(weights):
        if is_conv1d(name) or ".ln_" in name:
            # nanoGPT can be trained without biases: the same as zeros
            bias = name.replace(".weight", ".bias")
            weights.setdefault(bias, torch.zeros(len(weights[name])))
    return shape, without_buffers(weights)


def download_pretrained(name: str) -> Path:
    """A hub repository's directory in Hugging Face's cache, downloaded if need be."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        wanted = ["config.json", "model.safetensors"]
        directory = Path(snapshot_download(name, allow_patterns=wanted))
        if not (directory / "model.safetensors").exists():  # an older repository
            snapshot_download(name, allow_patterns=["pytorch_model.bin"])
        return directory
    except (HFValidationError, RepositoryNotFoundError):
        raise UserError(
            f"{name!r} is neither a directory here nor a model on the Hugging Face hub"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = first_line(error).removeprefix("Got: ")
        raise UserError(
            f"{name!r} is not a directory here, and the hub cannot be reached ({reason}): "
            "mend that, or give a directory"
        ) from None


# -- writing


def write_model(
    directory: Path, shape: dict, weights: dict[str, torch.Tensor], card: dict[str, object]
) -> None:
    """Writes a complete Hugging Face GPT-2 directory.

    weights: (out, in) as everywhere here, without padding, the tied head once. card: the rows of
    the model card, in this order.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    theirs = {name: (w.t() if is_conv1d(name) else w).contiguous() for name, w in weights.items()}
    save_file(theirs, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o666 & ~umask())  # it would be its owner's alone
    write_json(directory / "config.json", hf_config(shape))
    generation = dict(
        bos_token_id=EOT,
        eos_token_id=EOT,
        # transformers' pipeline asks for 256 of any model, and cannot slide the window
        max_new_tokens=min(256, shape["block_size"] // 2),
    )
    write_json(directory / "generation_config.json", generation)
    write_tokenizer(directory, shape["block_size"])
    num_params = sum(w.numel() for w in weights.values())
    text = model_card(num_params, card)
    (directory / "README.md").write_bytes(text.encode(errors="replace"))


def umask() -> int:
    """The permissions that new files of this process do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2))


def hf_config(shape: dict) -> dict:
    """The config.json of transformers' GPT2LMHeadModel."""
    return dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        vocab_size=shape["vocab_size"],
        n_positions=shape["block_size"],
        n_ctx=shape["block_size"],
        n_layer=shape["n_layer"],
        n_head=shape["n_head"],
        n_embd=shape["n_embd"],
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        resid_pdrop=0.0,  # trained without dropout
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=EOT,
        eos_token_id=EOT,
        dtype="float32",
    )


def model_card(num_params: int, facts: dict) -> str:
    """The README.md of a model directory."""
    rows = []
    for name, value in facts.items():
        escaped = str(value).replace("|", "\\|")
        rows.append(f"| {name} | {escaped} |\n")
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# GPT-2, {num_params / 1e6:,.0f}M parameters

| | |
|---|---|
{"".join(rows)}
`transformers.pipeline("text-generation", "this directory")` runs it;
so does `python sample.py --model` where it was trained.
"""


# -- the tokenizer


def write_tokenizer(directory: Path, model_max_length: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`.

    AutoTokenizer.from_pretrained(directory) gives the same ids as tiktoken.
    """
    config = dict(
        tokenizer_class="GPT2Tokenizer",
        model_max_length=model_max_length,
        add_prefix_space=False,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )
    (directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    write_json(directory / "tokenizer_config.json", config)


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

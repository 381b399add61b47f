"""Hugging Face, nanoGPT and build-nanogpt files ↔ plain dictionaries.

A shape is {block_size, vocab_size, n_layer, n_head, n_embd}. Weights are {name: tensor} with
GPT-2's names and nn.Linear's orientation, (out, in). This file knows no model class.

A directory says `"model_type": "gpt2"` only if the code that wrote it is a GPT-2, by its
fingerprint (fingerprint.py). Otherwise it says "gpt2-changed", and has all fields of GPTConfig.
"""

import dataclasses
import json
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.common import UserError, first_line
from support.fingerprint import (
    EMBEDDING,
    HEAD,
    POSITIONS,
    Fingerprint,
    other_logits,
    take_fingerprint,
    without_padding,
)
from support.tokenizer import VOCAB_SIZE

SHAPE = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
CHANGED = "gpt2-changed"  # the model_type of what is no GPT-2 any more


@dataclass
class Pretrained:
    """A model as its files tell it."""

    name: str
    fields: dict[str, Any]  # of its GPTConfig: a GPT-2's shape, of a changed one all
    weights: dict[str, torch.Tensor]
    fingerprint: Fingerprint | None = None  # if it is a changed one


def is_conv1d(name: str) -> bool:
    """Whether Hugging Face keeps this tensor as OpenAI did, (in, out), not (out, in)."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def turned(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From our orientation to Hugging Face's, and back."""
    return {n: w.t() if is_conv1d(n) and w.dim() == 2 else w for n, w in weights.items()}


# -- reading


def read_model(name_or_dir: str | Path) -> Pretrained:
    """What a name on the hub, a model directory, or a .pt file holds.

    Raises UserError if it is no GPT-2, and none that code like this has changed.
    """
    if str(name_or_dir).endswith(".pt"):
        shape, weights = read_pt(Path(name_or_dir))
        refuse_other_sizes(shape, weights)
        return Pretrained(str(name_or_dir), shape, weights)
    directory = Path(name_or_dir)
    if not directory.is_dir():
        directory = download_pretrained(str(name_or_dir))
    theirs = read_config(directory)
    if theirs["model_type"] == CHANGED:
        found = read_changed(directory, theirs)
        refuse_missing_layers(found.fields["n_layer"], found.weights)
        return found
    shape = read_shape(directory, theirs)
    weights = {}
    for name, w in read_weights(directory).items():
        if not name.startswith("transformer."):
            name = f"transformer.{name}"  # the hub's own gpt2 has no prefix
        weights[name] = w
    weights = without_buffers(turned(weights))
    refuse_other_sizes(shape, weights)
    return Pretrained(str(name_or_dir), shape, weights)


def without_buffers(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without what is no parameter: masks that older files carry, and the head, which is tied."""
    buffers = (".attn.bias", ".attn.masked_bias", HEAD)
    return {name: w for name, w in weights.items() if not name.endswith(buffers)}


def refuse_other_sizes(shape: dict, weights: dict[str, torch.Tensor]) -> None:
    """Raises UserError if the weights are not of this shape, before a model of it is made."""
    C = shape["n_embd"]
    expected = {EMBEDDING: (shape["vocab_size"], C), POSITIONS: (shape["block_size"], C)}
    for name, size in expected.items():
        if name in weights and weights[name].shape != size:
            found = tuple(weights[name].shape)
            raise UserError(f"{name} has shape {found} where {size} was expected")
    refuse_missing_layers(shape["n_layer"], weights)


def refuse_missing_layers(L: int, weights: dict[str, torch.Tensor]) -> None:
    """Raises UserError if there are fewer than L layers: a damaged L would take all memory."""
    there = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
    for i in range(L):
        if str(i) not in there:
            raise UserError(
                f"the weights have no tensor transformer.h.{i}.…: this is not a GPT-2 of {L} layers"
            )


def crop_positions(weights: dict[str, torch.Tensor], T: int) -> dict[str, torch.Tensor]:
    """Weights for a context of T tokens. Raises UserError where fewer positions were learned."""
    if POSITIONS not in weights:  # it has none to learn
        return weights
    known = len(weights[POSITIONS])
    if T > known:
        raise UserError(
            f"the weights know {known} positions, {T} were asked for: "
            f"--sequence-length can be {known} or less"
        )
    return {**weights, POSITIONS: weights[POSITIONS][:T]}


@torch.no_grad()
def load_weights(
    parameters: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], config
) -> None:
    """Copies weights into the parameters of these names; the padding becomes zero.

    config: the model's, with vocab_size and n_layer. Raises UserError where a tensor is missing,
    too much, or of another shape.
    """
    kind = f"this is not a GPT-2 of {config.n_layer} layers"
    for name, p in parameters.items():
        if name not in weights:
            raise UserError(f"the weights have no tensor {name}: {kind}")
        w = weights[name]
        rows = without_padding(name, p, config.vocab_size)
        if w.shape != rows.shape or not w.is_floating_point():
            raise UserError(
                f"{name} has shape {tuple(w.shape)} of {w.dtype} where {tuple(rows.shape)} of "
                "floating-point numbers was expected"
            )
        p.zero_()
        rows.copy_(w)
    surplus = set(weights) - set(parameters)
    if surplus:
        raise UserError(f"the weights have a tensor {min(surplus)} too much: {kind}")


def read_config(directory: Path) -> dict:
    """What config.json says. Raises UserError unless it is of a GPT-2, changed or not."""
    path = directory / "config.json"
    try:
        theirs = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        from support.checkpoint import checkpoints

        inside = checkpoints(directory)
        expected = f"{inside[-1]}, or another" if inside else "a Hugging Face model directory or a"
        raise UserError(f"{path} is missing: {expected} checkpoint was expected") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is no JSON: it is damaged; fetch or make it again") from None
    kind = theirs.get("model_type") if isinstance(theirs, dict) else type(theirs).__name__
    if kind not in ("gpt2", CHANGED):
        raise UserError(
            f"{directory} holds a {kind!r} model; only GPT-2's architecture can be loaded"
        )
    return theirs


def read_fields(directory: Path) -> dict:
    """The fields of GPTConfig that a model directory fixes; its weights are not read."""
    theirs = read_config(directory)
    if theirs["model_type"] == CHANGED:
        return theirs.get("gpt_config") or {}
    return read_shape(directory, theirs)


def refuse_wrong_sizes(path: Path, shape: dict) -> None:
    """Raises UserError unless the sizes in a configuration are numbers from 1 on."""
    wrong = [key for key in SHAPE if type(shape.get(key)) is not int or shape[key] < 1]
    if wrong:
        told = ", ".join(f"{key} {shape.get(key)!r}" for key in wrong)
        raise UserError(f"{path} has {told}: numbers from 1 on were expected; it is damaged")


def read_shape(directory: Path, theirs: dict) -> dict:
    """What a GPT-2's config.json fixes. Raises UserError unless it is OpenAI's architecture."""
    shape: dict[str, Any] = {key: theirs.get(key) for key in SHAPE}
    shape["block_size"] = theirs.get("n_positions")
    refuse_wrong_sizes(directory / "config.json", shape)
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
            zipped = zipfile.is_zipfile(path)  # PyTorch's format before 1.6 cannot be mapped
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
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
    if "model_args" in saved:
        mention(
            f"{path}: nanoGPT trains with exact GELU; this is GPT-2's tanh form of it, so the "
            "logits differ slightly"
        )
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


def mention(message: str) -> None:
    """Prints a line where it disturbs no text and no JSON, and only once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)


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


# -- changed models


def refuse_other_code(found: Pretrained, make: Callable, config_class: type) -> None:
    """Raises UserError if a changed model was written by code that computes something else."""
    if found.fingerprint is None:
        return
    known = {f.name for f in dataclasses.fields(config_class)}
    unknown = [f"{name} {value!r}" for name, value in found.fields.items() if name not in known]
    if unknown:
        raise UserError(
            f"{found.name} is a changed GPT-2 with {', '.join(unknown)}, which this code does not "
            "know: use the code that wrote it"
        )
    ours = take_fingerprint(make, config_class(**found.fields)).logits
    theirs = found.fingerprint.logits
    if ours != theirs and other_logits(torch.tensor(ours), torch.tensor(theirs)):
        raise UserError(
            f"{found.name} is a changed GPT-2 ({found.fingerprint.difference}), and this code is "
            "changed otherwise, or not at all: use the code that wrote it"
        )


def read_changed(directory: Path, theirs: dict) -> Pretrained:
    """A model that `write_model` has called changed. Raises UserError if config.json is damaged."""
    path = directory / "config.json"
    found = theirs.get("gpt_config")
    logits = theirs.get("fingerprint")
    if not isinstance(found, dict) or not isinstance(logits, list):
        raise UserError(f"{path} lacks gpt_config or fingerprint: it is damaged")
    refuse_wrong_sizes(path, found)
    fingerprint = Fingerprint(str(theirs.get("difference")), logits)
    return Pretrained(str(directory), found, turned(read_weights(directory)), fingerprint)


def describe_change(fingerprint: Fingerprint) -> str:
    """The line of a run whose checkpoints will not be GPT-2s."""
    return (
        f"model: not a GPT-2: {fingerprint.difference}; its checkpoints say {CHANGED}, "
        "transformers refuses them, the scripts of this code read them"
    )


def refuse_resume_by_changed_code(directory: Path, fingerprint: Fingerprint) -> None:
    """Raises UserError if a GPT-2 is to go on as another model that has the same tensors."""
    if fingerprint.difference and read_config(directory)["model_type"] != CHANGED:
        raise UserError(
            f"{directory} is a GPT-2, and this code is none ({fingerprint.difference}): "
            f"resume with the code that wrote it, or take its weights with --init-from {directory}"
        )

"""Reads the model files of Hugging Face, nanoGPT and build-nanogpt, and writes Hugging Face's.

Weights are {name: tensor} with GPT-2's names and nn.Linear's orientation, (out, in). Fields are
those of GPTConfig. A directory says `"model_type": "gpt2"` only if fingerprint.py finds that the
code is a GPT-2. Otherwise it says "gpt2-changed", and keeps all fields of GPTConfig.
"""

import json
import os
import re
import shutil
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.common import UserError
from support.fingerprint import (
    EMBEDDING,
    HEAD,
    POSITIONS,
    Fingerprint,
    other_logits,
    without_padding,
)
from support.tokenizer import EOT, TOKENIZER_JSON, VOCAB_SIZE

Weights = dict[str, torch.Tensor]
SHAPE = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
CHANGED = "gpt2-changed"  # the model_type of a changed GPT-2
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Hugging Face stores them (in, out)
OPENAI = dict(
    model_type="gpt2",
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
    add_cross_attention=False,
    tie_word_embeddings=True,
)


@contextmanager
def reading(what: str | Path):
    """Turns any error into one sentence, without the advice that PyTorch adds."""
    try:
        yield
    except Exception as error:
        reason = textwrap.shorten(str(error).partition(". ")[0], 200)
        raise UserError(f"{what} cannot be read: {reason}") from error


def turned(weights: Weights) -> Weights:
    """Changes our orientation to Hugging Face's, or theirs to ours."""
    return {n: w.t() if n.endswith(CONV1D) and w.dim() == 2 else w for n, w in weights.items()}


# -- reading


def read_model(name: str | Path, make, config_class) -> tuple[dict, Weights]:
    """Reads a model directory, a .pt file, or a model of the hub -> fields, weights.

    make(config_class(…)) is a model of this code. Raises UserError unless the files hold a GPT-2,
    or one that was changed as this code is.
    """
    path = Path(name)
    if path.suffix == ".pt":
        return read_pt(path)
    if not path.is_dir():
        path = download_pretrained(str(name))
    fields, fingerprint = read_config(path)
    with reading(f"the weights in {path}"):
        if (path / "model.safetensors").exists():
            weights = load_file(path / "model.safetensors")
        else:
            weights = torch.load(path / "pytorch_model.bin", "cpu", weights_only=True)
    if fingerprint is None:
        return fields, gpt2_weights(turned(weights))
    with reading(f"the changed GPT-2 in {path}"), torch.device("meta"):
        ours = make(config_class(**fields)).fingerprint.logits
    same = ours == fingerprint.logits
    if not same and other_logits(torch.tensor(ours), torch.tensor(fingerprint.logits)):
        raise UserError(
            f"{path} is a changed GPT-2 ({fingerprint.difference}), but this code does not "
            "have the same change: use the code that wrote it"
        )
    return fields, turned(weights)


def read_fields(directory: Path) -> dict:
    """The fields of GPTConfig that a model directory fixes."""
    return read_config(directory)[0]


def read_config(directory: Path) -> tuple[dict, Fingerprint | None]:
    """Reads config.json -> fields of GPTConfig, and the fingerprint of a changed GPT-2."""
    path = directory / "config.json"
    if not path.exists():
        inside = ", ".join(sorted(str(child) for child in directory.glob("ckpt_*")))
        raise UserError(f"{path} is missing: give a model (checkpoints here: {inside or 'none'})")
    with reading(path):
        theirs = json.loads(path.read_bytes())
        if theirs["model_type"] == CHANGED:
            return theirs["gpt_config"], Fingerprint(theirs["difference"], theirs["fingerprint"])
        for key, value in OPENAI.items():
            if theirs.get(key, value) != value:
                raise ValueError(f"{key} is {theirs[key]}, and OpenAI's GPT-2 has {value}")
        theirs["block_size"] = theirs["n_positions"]
        return {key: theirs[key] for key in SHAPE}, None


def gpt2_weights(weights: Weights) -> Weights:
    """Only the parameters, by GPT-2's names.

    On the hub some names lack their prefix; torch.compile and DDP add theirs. Older files also
    hold masks, and the tied head.
    """
    return {
        re.sub(r"^(_orig_mod\.|module\.|transformer\.)*", "transformer.", name): w
        for name, w in weights.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias", HEAD))
    }


class TheirConfig:
    """Stands in for build-nanogpt's pickled GPTConfig: its fields, none of its code."""


def read_pt(path: Path) -> tuple[dict, Weights]:
    """Reads nanoGPT's `ckpt.pt` or build-nanogpt's `model_*.pt`, and runs no code in it."""
    stand_ins: list = [
        (TheirConfig, f"{module}.GPTConfig") for module in ("__main__", "train_gpt2", "model")
    ]
    what = f"{path}, as a checkpoint of nanoGPT or build-nanogpt,"
    with reading(what), torch.serialization.safe_globals(stand_ins):
        saved = torch.load(path, "cpu", weights_only=True, mmap=True)
        theirs = saved["model_args"] if "model_args" in saved else vars(saved["config"])
        fields = {key: theirs[key] for key in SHAPE}
        fields["vocab_size"] = min(theirs["vocab_size"], VOCAB_SIZE)  # theirs counts the padding
        weights = gpt2_weights(saved["model"])
        weights[EMBEDDING] = weights[EMBEDDING][: fields["vocab_size"]]
    if "model_args" in saved and os.environ.get("RANK", "0") == "0":
        exact = "nanoGPT trains with exact GELU, this code with GPT-2's tanh form"
        print(f"{path}: {exact}; the logits differ slightly", file=sys.stderr)
    for name, w in list(weights.items()):
        if name.endswith(CONV1D) or ".ln_" in name:  # a nanoGPT without biases is one with zeros
            weights.setdefault(name.replace(".weight", ".bias"), torch.zeros(len(w)))
    return fields, weights


def download_pretrained(name: str) -> Path:
    """Downloads a model of the hub, unless it is in Hugging Face's cache -> its directory there."""
    from huggingface_hub import snapshot_download

    with reading(f"{name!r} is not a directory here, and on the hub it"):
        directory = snapshot_download(name, allow_patterns=["config.json", "model.safetensors"])
        if not Path(directory, "model.safetensors").exists():  # an older repository
            snapshot_download(name, allow_patterns=["pytorch_model.bin"])
    return Path(directory)


def load_weights(model, fields: dict, weights: Weights) -> None:
    """Copies weights into a GPT. Its context may be shorter. The padding becomes zero."""
    config = model.config
    known = fields["block_size"]
    if POSITIONS in weights and config.block_size > known:
        raise UserError(
            f"the weights know {known} positions, {config.block_size} were asked for: "
            f"--sequence-length can be {known} or less"
        )
    with reading("the weights"), torch.no_grad():
        if POSITIONS in weights and config.block_size < known:
            weights[POSITIONS] = weights[POSITIONS][: config.block_size - known]
        tensors = model.state_dict()
        for name, p in tensors.items():
            rows = without_padding(name, p, config.vocab_size)
            if rows is not p and name in weights and weights[name].shape == rows.shape:
                p.zero_()  # the padding
                rows.copy_(weights[name])
                weights[name] = p
        if HEAD in tensors:
            weights.setdefault(HEAD, weights[EMBEDDING])  # tied
        model.load_state_dict(weights)


def refuse_resume_by_changed_code(directory: Path, fingerprint: Fingerprint) -> None:
    """Raises UserError if changed code would resume a GPT-2 that has the same tensors."""
    if fingerprint.difference and read_config(directory)[1] is None:
        raise UserError(
            f"{directory} is a GPT-2, but this code is not ({fingerprint.difference}): "
            f"resume with the code that wrote it, or take its weights with --init-from {directory}"
        )


def describe_change(fingerprint: Fingerprint) -> str:
    """The line that a run prints if its checkpoints will not be GPT-2s."""
    return f"model: not a GPT-2: {fingerprint.difference}; only this code can read its checkpoints"


# -- writing


def write_model(
    directory: Path, fields: dict, weights: Weights, fingerprint: Fingerprint, card: dict
) -> None:
    """Writes a complete Hugging Face directory. card: the rows of the model card."""
    kept = {name: without_padding(name, w, fields["vocab_size"]) for name, w in weights.items()}
    theirs = {name: w.contiguous() for name, w in turned(kept).items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(theirs, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors lets only its owner read it
    shutil.copyfile(TOKENIZER_JSON, directory / "tokenizer.json")
    for name, content in json_files(fields, fingerprint).items():
        (directory / name).write_text(json.dumps(content, indent=2))
    text = model_card(sum(w.numel() for w in kept.values()), card, fingerprint.difference)
    (directory / "README.md").write_bytes(text.encode(errors="replace"))


def json_files(fields: dict, fingerprint: Fingerprint) -> dict[str, dict]:
    """What Hugging Face's libraries read about a model, by file."""
    T = fields["block_size"]
    gpt2 = dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        vocab_size=fields["vocab_size"],
        n_positions=T,
        n_ctx=T,
        n_layer=fields["n_layer"],
        n_head=fields["n_head"],
        n_embd=fields["n_embd"],
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        resid_pdrop=0.0,  # trained without dropout
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=EOT,
        eos_token_id=EOT,
        dtype="float32",
    )
    changed = dict(
        model_type=CHANGED,  # AutoModel refuses it
        activation_function="not GPT-2, see README.md",  # GPT2LMHeadModel refuses this
        difference=fingerprint.difference,
        gpt_config=fields,
        fingerprint=fingerprint.logits,
    )
    # transformers' pipeline asks any model for 256 tokens, and cannot slide the window
    generation = dict(bos_token_id=EOT, eos_token_id=EOT, max_new_tokens=min(256, T // 2))
    tokenizer = dict(tokenizer_class="GPT2Tokenizer", model_max_length=T, add_prefix_space=False)
    tokenizer |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    return {
        "config.json": changed if fingerprint.difference else gpt2,
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer,
    }


def model_card(num_params: int, facts: dict[str, object], difference: str) -> str:
    """The README.md of a model directory."""
    escaped = {name: str(value).replace("|", "\\|") for name, value in facts.items()}
    rows = "".join(f"| {name} | {value} |\n" for name, value in escaped.items())
    library = "" if difference else "library_name: transformers\n"
    kind = "A changed GPT-2" if difference else "GPT-2"
    use = """`transformers.pipeline("text-generation", "this directory")` runs it;
so does `python sample.py --model` where it was trained."""
    if difference:
        use = f"""This is not a GPT-2: {difference}. transformers cannot run it;
`python sample.py --model` of the code that wrote it can."""
    return f"""---
{library}pipeline_tag: text-generation
---
# {kind}, {num_params / 1e6:,.0f}M parameters

| | |
|---|---|
{rows}
{use}
"""

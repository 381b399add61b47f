"""A model as a complete Hugging Face directory: weights, configuration, tokenizer, model card."""

import json
import os
from pathlib import Path

import torch

from support.fingerprint import Fingerprint, without_padding
from support.hf import CHANGED, turned
from support.tokenizer import EOT, tokenizer_json


def write_model(
    directory: Path,
    fields: dict,
    weights: dict[str, torch.Tensor],
    fingerprint: Fingerprint,
    card: dict[str, object],
) -> None:
    """Writes a complete Hugging Face directory; transformers reads it if it is a GPT-2.

    fields: of the GPTConfig. weights: (out, in) as everywhere here, the tied head once. card: the
    rows of the model card, in this order.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    V = fields["vocab_size"]
    kept = {name: without_padding(name, w, V) for name, w in weights.items()}
    theirs = {name: w.contiguous() for name, w in turned(kept).items()}
    save_file(theirs, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o666 & ~umask())  # it would be its owner's alone
    config = changed_config(fields, fingerprint) if fingerprint.difference else hf_config(fields)
    write_json(directory / "config.json", config)
    generation = dict(
        bos_token_id=EOT,
        eos_token_id=EOT,
        # transformers' pipeline asks for 256 of any model, and cannot slide the window
        max_new_tokens=min(256, fields["block_size"] // 2),
    )
    write_json(directory / "generation_config.json", generation)
    write_tokenizer(directory, fields["block_size"])
    num_params = sum(w.numel() for w in kept.values())
    text = model_card(num_params, card, fingerprint.difference)
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


def model_card(num_params: int, facts: dict, difference: str = "") -> str:
    """The README.md of a model directory."""
    rows = []
    for name, value in facts.items():
        escaped = str(value).replace("|", "\\|")
        rows.append(f"| {name} | {escaped} |\n")
    if difference:
        library = ""
        kind = "A changed GPT-2"
        use = f"""This is not a GPT-2: {difference}. transformers cannot run it;
`python sample.py --model` of the code that wrote it can."""
    else:
        library = "library_name: transformers\n"
        kind = "GPT-2"
        use = """`transformers.pipeline("text-generation", "this directory")` runs it;
so does `python sample.py --model` where it was trained."""
    return f"""---
{library}pipeline_tag: text-generation
---
# {kind}, {num_params / 1e6:,.0f}M parameters

| | |
|---|---|
{"".join(rows)}
{use}
"""


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


def changed_config(fields: dict, fingerprint: Fingerprint) -> dict:
    """The config.json of a model that is no GPT-2.

    AutoModel refuses the model_type; GPT2LMHeadModel, which only warns of it, the activation.
    """
    return dict(
        model_type=CHANGED,
        activation_function="not GPT-2, see README.md",
        difference=fingerprint.difference,
        gpt_config=fields,
        fingerprint=fingerprint.logits,
    )

"""Reads the model files of Hugging Face, nanoGPT and build-nanogpt, and writes Hugging Face's.

Weights are {name: tensor} with GPT-2's names and nn.Linear's orientation, (out, in). A directory
says `"model_type": "gpt2"` only if fingerprint.py finds that the code is a GPT-2. Otherwise it says
"gpt2-changed", and keeps all fields of GPTConfig.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from support.base.console import say_once
from support.base.errors import UserError, as_os_error, reading
from support.base.files import if_supported, refuse_pointer
from support.text.names import TOKENIZER_FILE
from support.text.tokenizer import END, VOCAB_SIZE, Tokenizer, gpt2, tokenizer_in
from support.weights.fingerprint import (
    EARLIER,
    EMBEDDING,
    POSITIONS,
    Fingerprint,
    other_output,
    other_tensor,
    take_fingerprint,
)

if TYPE_CHECKING:
    from model import GPT

Weights = dict[str, torch.Tensor]
HEAD = "lm_head.weight"  # tied to the embedding
SIZES = ("vocab_size", "n_layer", "n_head", "n_embd")  # and the context, which has two names
CHANGED = "gpt2-changed"  # the model_type of a changed GPT-2
# NAME or OWNER/NAME, but neither a path here nor a file
HUB_NAME = re.compile(r"(?!(data|log|runs)/)(?!.*\.(pth?|bin|safetensors)$)(\w[\w.-]*/)?\w[\w.-]*")
WRAPPED = re.compile(r"^(_orig_mod\.|module\.)*")  # names that torch.compile and DDP change
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Hugging Face stores them (in, out)
OPENAI = dict(
    model_type="gpt2",
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
    tie_word_embeddings=True,
)
# GPT2Config's defaults, which transformers need not write, and its other names for them
DEFAULTS = dict(vocab_size=VOCAB_SIZE, n_positions=1024, n_embd=768, n_layer=12, n_head=12)
ALIASES = dict(
    hidden_size="n_embd",
    max_position_embeddings="n_positions",
    num_attention_heads="n_head",
    num_hidden_layers="n_layer",
)
SAME_GELU = ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate")  # by tanh
# Settings that nobody writes where they are as in GPT-2.
UNUSUAL: dict[str, Any] = dict(add_cross_attention=False, pruned_heads={}, quantization_config=None)
# Settings of transformers' GPT2Config that change neither the logits nor the tokens.
HARMLESS = {
    *("architectures", "bos_token_id", "dtype", "gradient_checkpointing", "initializer_range"),
    *("n_ctx", "reorder_and_upcast_attn", "torch_dtype", "transformers_version", "use_cache"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "task_specific_params", "pad_token_id"),
    *("n_special", "predict_special_tokens", "output_past"),  # of OpenAI's larger models
}


class Pretrained(NamedTuple):
    fields: dict[str, Any]  # of GPTConfig
    weights: Weights
    origin: str  # whose files they are, for the user
    tokenizer: Tokenizer
    fingerprint: Fingerprint | None = None  # of the changed code that wrote them


def transposed(weights: Weights) -> Weights:
    """Changes our orientation to Hugging Face's, or theirs to ours."""
    return {n: w.t() if n.endswith(CONV1D) and w.dim() == 2 else w for n, w in weights.items()}


# -- reading


def read_model(name: str | Path) -> Pretrained:
    """Reads a model directory, a .pt file, or a model of the hub. Raises UserError."""
    path = Path(name)
    origin = str(name)
    if is_file(path):
        return read_pt(path)
    if not os.path.isdir(path):
        path = download_pretrained(origin)
        origin += " (from the Hugging Face hub)"
    elif origin in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        say_once(f"{origin} is the directory here; the hub's is openai-community/{origin}")
    if os.path.exists(path / "adapter_config.json"):
        hint = "merge it into its base model, by peft's merge_and_unload"
        raise UserError(f"{path} holds an adapter, which is not applied here: {hint}")
    fields, fingerprint = read_config(path)
    with reading(f"the weights in {path}"):
        weights = read_weights(path)
        if fingerprint is None:
            weights = gpt2_weights(weights, fields["vocab_size"])
    tokenizer = tokenizer_in(path)
    if not any((path / name).exists() for name in (TOKENIZER_FILE, "vocab.json")):
        say_once(f"{path} has no {TOKENIZER_FILE}: its tokens are taken for GPT-2's")
    return Pretrained(fields, transposed(weights), origin, tokenizer, fingerprint)


def is_file(path: Path) -> bool:
    """Whether a model's name means a file; a .pt does even if it is missing."""
    return path.suffix == ".pt" or os.path.isfile(path)


def read_weights(directory: Path) -> Weights:
    """All tensors of a directory, as they are stored: in one file, or in several with an index."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = directory / f"{name}.index.json"
        parts = {name}
        if not (directory / name).exists():  # transformers prefers it, too
            if not index.exists():
                continue
            parts = set(json.loads(index.read_bytes())["weight_map"].values())
        weights: Weights = {}
        for part in sorted(parts):
            path = directory / part
            refuse_pointer(path)
            is_pickle = name.endswith(".bin")
            weights |= torch.load(path, "cpu", weights_only=True) if is_pickle else load_file(path)
        return weights
    expected = "model.safetensors or pytorch_model.bin, or their index"
    problem = f"{directory} has no weights that are read here ({expected})"
    raise UserError(f"{problem}: save them with transformers' save_pretrained")


def read_fields(name: str) -> dict[str, Any]:
    """The fields of GPTConfig that a model directory or a .pt file fixes."""
    path = Path(name)
    if is_file(path):
        return read_pt(path).fields
    directory = path if os.path.isdir(path) else download_pretrained(name, weights=False)
    return read_config(directory)[0]


def read_config(directory: Path) -> tuple[dict[str, Any], Fingerprint | None]:
    """Reads config.json -> fields of GPTConfig, and the fingerprint of a changed GPT-2."""
    path = directory / "config.json"
    with reading(path):
        if not path.exists():
            here = ", ".join(sorted(map(str, directory.glob("ckpt_*")))) or "none"
            raise UserError(f"{path} is missing: name a model (checkpoints here: {here})")
        theirs = json.loads(path.read_bytes())
        if theirs.get("model_type") == CHANGED:
            fingerprint = Fingerprint(
                theirs["difference"],
                theirs["fingerprint"],
                theirs.get("loss", math.nan),  # older files lack it
                theirs.get("fingerprint_of", EARLIER),
            )
            return theirs["gpt_config"], fingerprint
        theirs = DEFAULTS | {ALIASES.get(key, key): value for key, value in theirs.items()}
        if theirs.get("activation_function") in SAME_GELU:
            theirs["activation_function"] = OPENAI["activation_function"]
        shape = {key: theirs[key] for key in (*SIZES, "n_positions")}
        n_inner = theirs.get("n_inner") and 4 * theirs["n_embd"]  # null means that, too
        tokenizer = tokenizer_in(directory)
        if theirs.get("eos_token_id") in (None, [tokenizer.eot]):
            theirs["eos_token_id"] = tokenizer.eot  # the end's other spellings
        expected = OPENAI | UNUSUAL | shape | dict(n_inner=n_inner, eos_token_id=tokenizer.eot)
        for key, value in expected.items():
            if theirs.get(key, value) != value:
                raise ValueError(f"{key} is {theirs[key]}, and OpenAI's GPT-2 has {value}")
        unused = theirs.keys() - expected.keys() - HARMLESS
        if names := sorted(name for name in unused if not name.startswith(("_", "summary_"))):
            say_once(f"{path}: settings that are not used here: {', '.join(names)}")
        theirs["vocab_size"] = unpadded_size(theirs["vocab_size"], tokenizer)
        return {key: theirs[key] for key in SIZES} | {"block_size": theirs["n_positions"]}, None


def unpadded_size(rows: int, tokenizer: Tokenizer) -> int:
    """The vocabulary's size: an embedding's rows without the padding that others add to it."""
    size = tokenizer.vocab_size
    return size if rows in [math.ceil(size / n) * n for n in (64, 128, 256, 1024)] else rows


def gpt2_weights(weights: Weights, vocab_size: int) -> Weights:
    """Only the parameters, by GPT-2's names, without padding. Raises UserError for other masks."""
    plain = {WRAPPED.sub("", name): w for name, w in weights.items()}
    # on the hub some names lack their prefix
    kept = {f"transformer.{name.removeprefix('transformer.')}": w for name, w in plain.items()}
    if len(kept) < len(weights):
        raise UserError("some tensors have the same name but for a prefix: whose are they?")
    for name, w in list(kept.items()):  # older files also hold masks, and the tied head
        if name.endswith(HEAD):
            is_redundant = torch.equal(w, kept[EMBEDDING])
        elif name.endswith(".attn.masked_bias"):  # the score of a token that must not be seen
            is_redundant = w.numel() == 1 and w.item() <= -1e4
        elif name.endswith(".attn.bias"):  # a token sees itself and earlier ones
            mask = w.squeeze().bool()
            is_redundant = torch.equal(mask, torch.ones_like(mask).tril())
        else:
            continue
        if not is_redundant:
            raise UserError(f"{name} is not as in GPT-2: this code would compute without it")
        del kept[name]
    kept[EMBEDDING] = kept[EMBEDDING][:vocab_size]
    return kept


def read_pt(path: Path) -> Pretrained:
    """Reads nanoGPT's `ckpt.pt` or build-nanogpt's `model_*.pt`, and runs no code in it."""
    # build-nanogpt pickles its GPTConfig: we take its fields, and none of its code
    names = ("__main__.GPTConfig", "train_gpt2.GPTConfig", "model.GPTConfig")
    stand_ins: list[Any] = [(SimpleNamespace, name) for name in names]
    name = f"{path}, as a checkpoint of nanoGPT or build-nanogpt,"
    advice = "of this code's checkpoints, name the directory"
    with reading(name, advice), torch.serialization.safe_globals(stand_ins):
        saved = torch.load(path, "cpu", weights_only=True, mmap=True)
        if not {"model_args", "config"} & saved.keys():
            raise ValueError("weights alone, without model_args or config, have no sizes")
        theirs = saved["model_args"] if "model_args" in saved else vars(saved["config"])
        fields = {key: theirs[key] for key in (*SIZES, "block_size")}
        if fields["vocab_size"] < 257:
            raise UserError(f"{path} has a vocabulary of characters, which nothing here reads")
        tokenizer = tokenizer_in(path.parent)
        fields["vocab_size"] = unpadded_size(fields["vocab_size"], tokenizer)
        weights = gpt2_weights(saved["model"], fields["vocab_size"])
    for name, w in list(weights.items()):
        if name.endswith(CONV1D) or ".ln_" in name:  # a nanoGPT without biases is one with zeros
            weights.setdefault(name.replace(".weight", ".bias"), torch.zeros(len(w)))
    program = "nanoGPT" if "model_args" in saved else "build-nanogpt"
    if program == "nanoGPT":
        say_once(f"{path}: nanoGPT trains with exact GELU, so the logits differ slightly here")
    return Pretrained(fields, weights, f"{path} (from {program})", tokenizer)


def download_pretrained(name: str, weights: bool = True) -> Path:
    """Downloads a model of the hub, unless it is in Hugging Face's cache -> its directory there."""
    from huggingface_hub import snapshot_download

    owner = name.rpartition("/")[0]
    if not HUB_NAME.fullmatch(name) or (owner and os.path.isdir(owner)):  # a misspelt path
        raise UserError(f"{name}: there is no such directory")
    with reading(f"{name!r} is not a directory here, and on the hub it"):
        texts = ["config.json", TOKENIZER_FILE, "tokenizer_config.json", "vocab.json"]
        texts += ["adapter_config.json", "added_tokens.json"]
        wanted = [*texts, "model*.safetensors*"] if weights else texts
        directory = Path(snapshot_download(name, allow_patterns=wanted))
        if weights and not any(directory.glob("model*.safetensors")):  # an older repository
            snapshot_download(name, allow_patterns=["pytorch_model*.bin*"])
    return directory


def load_weights(model: GPT, fields: dict[str, Any], weights: Weights) -> None:
    """Copies weights into a GPT. Its context may be shorter. The padding becomes zero."""
    config = model.config
    known = fields["block_size"]
    unused = known - config.block_size
    if POSITIONS in weights and unused < 0:
        problem = f"the weights know {known} positions, {config.block_size} were asked for"
        raise UserError(f"{problem}: --sequence-length can be {known} or less")
    with reading("the weights"):
        if POSITIONS in weights:  # by `unused`, because the file's may have another length
            weights[POSITIONS] = weights[POSITIONS][: len(weights[POSITIONS]) - unused]
        padding = (0, 0, 0, config.padded_vocab_size - config.vocab_size)
        for name in {EMBEDDING, HEAD} & weights.keys():
            weights[name] = F.pad(weights[name], padding)
        if HEAD in model.state_dict():
            head = weights.setdefault(HEAD, weights[EMBEDDING])
            is_tied = model.lm_head.weight is model.transformer.wte.weight
            embedding = weights[EMBEDDING]
            if is_tied and head is not embedding and not torch.equal(head, embedding):
                problem = f"{HEAD} is not the embedding, to which this code ties it"
                raise UserError(f"the weights: {problem}: use the code that wrote them")
        model.load_state_dict(weights)


def refuse_other_change(
    files: Pretrained, make_config: Callable[..., Any], make: Callable[[Any], GPT]
) -> None:
    """Raises UserError if changed code wrote the files, and what it makes is not changed alike."""
    written = files.fingerprint
    if written is None:
        return
    with reading(f"the changed GPT-2 in {files.origin}"):
        config = make_config(**files.fields)
    with torch.device("meta"):  # an error of one's own change keeps its file and line
        ours = take_fingerprint(make(config), written.shapes)
    expected = torch.tensor(written.logits)
    # all to go by if no small model runs; older files have other words for it
    differs: object = ours.difference != written.difference and written.shapes != EARLIER
    if ours.logits or written.logits:
        differs = other_output(torch.tensor(ours.logits), ours.loss, expected, written.loss)
    if differs:
        problem = f"{files.origin} is a changed GPT-2 ({written.difference}), but this code"
        raise UserError(f"{problem} does not have the same change: use the code that wrote it")


def refuse_resume_by_changed_code(directory: Path, fingerprint: Fingerprint) -> None:
    """Raises UserError if changed code would resume a GPT-2 that has the same tensors."""
    if fingerprint.difference and read_config(directory)[1] is None:
        problem = f"{directory} is a GPT-2, but this code is not ({fingerprint.difference})"
        hint = f"resume with the code that wrote it, or {new_run_from(directory)}"
        raise UserError(f"{problem}: {hint}")


def check_vocabulary(name: str, model: GPT) -> None:
    """Raises UserError if a model has another number of tokens than its tokenizer. name: its."""
    size = model.config.vocab_size
    if size != model.tokenizer.vocab_size:
        problem = f"{name} has {size} tokens, its tokenizer {model.tokenizer.vocab_size}"
        raise UserError(f"{problem}: put the {TOKENIZER_FILE} of its vocabulary beside its weights")


def refuse_other_vocabulary(name: str, model: GPT, data_dir: str, of_data: Tokenizer) -> None:
    """Raises UserError if a model and data have two vocabularies. name: the model's."""
    check_vocabulary(name, model)
    if model.tokenizer.sha256 != of_data.sha256:
        own = Path(name).parent if is_file(Path(name)) else Path(name)
        choice = shlex.quote(str(own)) if own.is_dir() else f"FILE, the model's {TOKENIZER_FILE}"
        if model.tokenizer is gpt2():
            choice = "gpt2"
        problem = f"{name} has a vocabulary of {model.tokenizer}, {data_dir} one of {of_data}"
        hint = f"make data with the model's, by fineweb.py --tokenizer {choice}"
        raise UserError(f"{problem}: {hint}, or train a new model")


def new_run_from(checkpoint: Path) -> str:
    """What to do with a checkpoint that cannot be resumed."""
    flags = shlex.join(["--init-from", str(checkpoint)])
    return f"start a new run with its weights: {flags}, another --log-dir, no --resume"


# -- writing


def write_model(directory: Path, model: GPT, weights: Weights, card: dict[str, Any]) -> None:
    """Writes a Hugging Face directory from `weights`: the model may train on. card: its rows."""
    weights = {WRAPPED.sub("", name): w for name, w in weights.items()}
    weights = {name: model.without_padding(name, w) for name, w in weights.items()}
    if HEAD in weights and torch.equal(weights[HEAD], weights[EMBEDDING]):
        del weights[HEAD]  # tied
    # of a model that was changed after it was built, the tensors tell
    difference = other_tensor(weights, model.config) or model.fingerprint.difference
    weights = {name: w.contiguous() for name, w in transposed(weights).items()}
    directory.mkdir(parents=True, exist_ok=True)
    with as_os_error():
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with if_supported("chmod"):  # safetensors lets only the file's owner read it
        (directory / "model.safetensors").chmod(0o644)
    for name, data in model.tokenizer.files.items():
        (directory / name).write_bytes(data)
    dtype = str(weights[EMBEDDING].dtype).removeprefix("torch.")
    for name, content in json_files(model, difference, dtype).items():
        (directory / name).write_text(json.dumps(content, indent=2))
    size = sum(w.numel() for w in weights.values())
    text = model_card(size, card, difference)
    (directory / "README.md").write_bytes(text.encode(errors="replace"))


def json_files(model: GPT, difference: str, dtype: str) -> dict[str, dict[str, Any]]:
    """What Hugging Face's libraries read about a model, by file. difference: from GPT-2."""
    fields = asdict(model.config)
    fingerprint = model.fingerprint
    T = model.config.block_size
    is_gpt2 = model.tokenizer is gpt2()
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), model.tokenizer.eot)
    plain: dict[str, Any] = dict(
        **OPENAI,
        architectures=["GPT2LMHeadModel"],
        **{key: fields[key] for key in SIZES},
        n_positions=T,
        n_ctx=T,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),  # no dropout
        **ends,
        dtype=dtype,
    )
    changed = dict(
        model_type=CHANGED,  # AutoModel refuses it
        activation_function="not GPT-2, see README.md",  # GPT2LMHeadModel refuses this
        difference=difference,
        gpt_config=fields,
        fingerprint=fingerprint.logits,
        fingerprint_of=fingerprint.shapes,
        loss=fingerprint.loss,
    )
    return {
        "config.json": changed if difference else plain,
        # transformers' pipeline asks any model for 256 tokens, and cannot slide the window
        "generation_config.json": dict(**ends, max_new_tokens=min(256, T // 2)),
        "tokenizer_config.json": dict(
            # of GPT2Tokenizer, transformers 5 takes some of the file only, and gives other tokens
            tokenizer_class="GPT2Tokenizer" if is_gpt2 else "PreTrainedTokenizerFast",
            model_max_length=T,
            # without it, transformers 4 gives token_type_ids, to which a GPT-2 adds embeddings
            model_input_names=["input_ids", "attention_mask"],
            add_prefix_space=False,
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END),
        ),
    }


CARD = """---
{library}pipeline_tag: text-generation
---
# {kind}, {size} parameters

| | |
|---|---|
{rows}
{use}
"""
USE = """`transformers.pipeline("text-generation", "this directory")` runs it;
so does `python sample.py --model` where it was trained."""
USE_CHANGED = """This is not a GPT-2: {difference}. transformers cannot run it;
`python sample.py --model` of the code that wrote it can."""


def model_card(num_params: int, facts: dict[str, object], difference: str) -> str:
    """The README.md of a model directory."""
    rows = ""
    for name, value in facts.items():
        cell = str(value).replace("|", "\\|").replace("\n", " ")
        rows += f"| {name} | {cell} |\n"
    size = f"{num_params / 1e6:,.0f}M"
    if difference:
        use = USE_CHANGED.format(difference=difference)
        return CARD.format(library="", kind="A changed GPT-2", size=size, rows=rows, use=use)
    library = "library_name: transformers\n"
    return CARD.format(library=library, kind="GPT-2", size=size, rows=rows, use=USE)

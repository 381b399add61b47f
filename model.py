"""GPT-2 (Radford et al. 2019), exactly, and the loader that feeds it.

Shapes: B sequences in a batch, T tokens in a sequence, C = n_embd channels, nh heads of hs = C / nh channels, V = vocab_size.
"""

import json
import math
import pickle
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._functorch import config as functorch_config
from torch.nn import attention
from torch.utils.checkpoint import checkpoint

from tokenizer import EOT, VOCAB_SIZE, UserError, save_hf_tokenizer

SIZES = {  # GPT-2 paper, table 2; heads from OpenAI's released hyperparameters
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 350M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}


@dataclass
class GPTConfig:
    block_size: int = 1024  # the context window: the most tokens the model can look at
    vocab_size: int = VOCAB_SIZE
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    pad_vocab_to: int = 128  # the embedding has rows up to a multiple of this, in memory only: matrix units like it
    activation_checkpointing: bool = False  # recompute each block in the backward pass instead of keeping its activations

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.pad_vocab_to) * self.pad_vocab_to


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # queries, keys and values of all heads at once
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, mask=None, cache=None):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, nh, T, hs)
        if cache is not None:
            past_k, past_v, columns = cache  # (B, nh, S, hs) twice, and where in S these T tokens belong
            past_k.index_copy_(2, columns, k.to(past_k.dtype))
            past_v.index_copy_(2, columns, v.to(past_v.dtype))
            if mask is not None:  # it says what a token may see of the past; without one a prompt sees only itself
                k, v = past_k, past_v
        # softmax(q kᵀ / √hs + mask) v; without a mask each token sees itself and what came before it
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # the tanh form is part of GPT-2


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, mask=None, cache=None):
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


class LinearCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of logits x Wᵀ that never exist all at once: some rows at a time, and their gradients right away.

    x (N, C), weight (padded V, C), targets (N,) where -1 is ignored, are gradients wanted? -> a scalar, at least float32.
    All the logits of a micro-batch would be its largest tensor. The idea is Cut Your Losses' and Liger Kernel's (both 2024);
    torch.compile fuses what is between the matmuls.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, with_grad):
        device, rows = x.device, 2048 if x.device.type == "cpu" else 8192
        half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else x.dtype
        wide = torch.promote_types(half, torch.float32)
        w, classes = weight.to(half), torch.arange(len(weight), device=device)
        loss, dx = x.new_zeros((), dtype=wide), []
        dw = torch.zeros_like(weight, dtype=wide) if with_grad else None
        for x_, y in zip(x.to(half).split(rows), targets[:, None].split(rows), strict=True):
            logits = (x_ @ w.t()).to(wide)
            logits[:, vocab_size:] = -torch.inf  # the padding: probability and gradient zero
            lse = logits.logsumexp(-1, keepdim=True)
            loss += torch.where(y >= 0, lse - logits.gather(1, y.clamp(min=0)), 0).sum()
            if with_grad:  # of the sum: softmax - one-hot; in float16, one of the mean would underflow
                dlogits = logits.sub_(lse).exp_().add_(classes == y, alpha=-1).to(half)
                dx.append(dlogits @ w * (y >= 0))
                dw += dlogits.t() @ (x_ * (y >= 0))
        n = (targets >= 0).sum()
        if with_grad:
            ctx.save_for_backward(torch.cat(dx), dw, n)
            ctx.dtypes = x.dtype, weight.dtype
        return loss / n

    @staticmethod
    def backward(ctx, grad):
        dx, dw, n = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        return dx.to(x_dtype) * (grad / n), (dw * (grad / n)).to(weight_dtype), None, None, None


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.n_embd % config.n_head:
            raise UserError(f"n_embd {config.n_embd} does not divide by n_head {config.n_head}: heads must be of equal width")
        self.config = config
        with torch.device("meta"):  # without memory and random numbers: init_weights fills it
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(config.padded_vocab_size, config.n_embd),
                    wpe=nn.Embedding(config.block_size, config.n_embd),
                    h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                    ln_f=nn.LayerNorm(config.n_embd),
                )
            )
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.allocate(torch.get_default_device())
        self.init_weights()

    def allocate(self, device) -> None:
        """Memory for the weights, whatever it holds."""
        self.to_empty(device=device)
        self.lm_head.weight = self.transformer.wte.weight  # tied (Press & Wolf 2017)

    @torch.no_grad()
    def init_weights(self) -> None:
        """GPT-2's initialization: normal(0, 0.02), projections into the residual stream by 1/√(2·n_layer) smaller."""
        self.transformer.wte.weight.zero_()  # the padding's gradient is zero, so it stays zero
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif p.dim() == 1:  # layer norm
                p.fill_(1)
            else:
                residual = name.endswith("c_proj.weight")
                rows = self.config.vocab_size if p is self.transformer.wte.weight else len(p)
                p[:rows].normal_(0.0, 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02)

    def forward(self, idx, targets=None):
        """idx (B, T) int64 -> (logits (B, T, V), None); with targets (B, T), where -1 is ignored, -> (None, mean loss)."""
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x), None
        args = (x.flatten(0, 1), self.lm_head.weight, targets.flatten(), self.config.vocab_size, torch.is_grad_enabled())
        return None, LinearCrossEntropy.apply(*args)

    def hidden(self, idx, pos=None, mask=None, caches=None):
        """The hidden states after the last layer norm, (B, T, C): all of the model but the projection to the vocabulary.

        pos (B, T) or (T,): positions, by default 0..T-1. mask: as SDPA takes it, by default causal. caches: KVCache's.
        """
        if idx.size(1) > self.config.block_size:
            raise UserError(f"{idx.size(1)} tokens are more than the model's context of {self.config.block_size}")
        if pos is None:
            pos = torch.arange(idx.size(1), device=idx.device)
        return self.blocks(self.embed(idx, pos), mask, caches)

    def blocks(self, x, mask=None, caches=None):
        """From the embeddings to the last layer norm, (B, T, C) -> (B, T, C)."""
        for i, block in enumerate(self.transformer.h):
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask, caches[i] if caches else None)
        return self.transformer.ln_f(x)

    # Inductor would scatter the embedding's gradient with atomics: slow on a CPU, and different in every run.
    @torch.compiler.disable
    def embed(self, idx, pos):
        return self.transformer.wte(idx) + self.transformer.wpe(pos)

    def logits(self, x):
        """(…, C) -> (…, V). The padding is cut off here, once: a loss or a choice of a token never sees it."""
        return self.lm_head(x)[..., : self.config.vocab_size]

    def flops_per_token(self, T: int) -> int:
        """Operations to train on one token (PaLM, appendix B): 6 a weight in a matmul, and 12·L·C·T for attention."""
        L, C, V = self.config.n_layer, self.config.n_embd, self.config.vocab_size
        return 6 * (12 * L * C**2 + V * C) + 12 * L * C * T

    def num_params(self) -> int:
        """Parameters of the model as it is saved: tied weights once, no padding."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        return sum(p.numel() for p in self.parameters()) - padding

    def configure_optimizers(
        self, weight_decay=0.1, learning_rate=6e-4, betas=(0.9, 0.95), eps=1e-8, muon=False, make=None
    ) -> list[torch.optim.Optimizer]:
        """AdamW (Loshchilov & Hutter 2019) with GPT-3's betas, the fused kernel wherever the device has one.

        With muon, the matrices inside the blocks go to PyTorch's Muon (Jordan 2024), whose update is scaled to the size of
        AdamW's (Liu et al. 2025), so that one learning rate serves both. Matrices and embeddings decay, biases and layer
        norms do not. make(params, optimizer_class=…, **defaults) builds each optimizer (World.make_optimizer).
        """
        make = make or (lambda params, optimizer_class, **defaults: optimizer_class(params, **defaults))
        if muon and not hasattr(torch.optim, "Muon"):
            raise UserError(f"optimizer muon needs PyTorch 2.9 or newer, this is {torch.__version__}: use adamw")
        matrices = [p for p in self.transformer.h.parameters() if p.dim() == 2] if muon else []
        taken = set(map(id, matrices))
        rest = [p for p in self.parameters() if p.requires_grad and id(p) not in taken]
        adamw = dict(lr=learning_rate, betas=betas, eps=eps, fused=self.transformer.wte.weight.device.type in ("cuda", "cpu"))
        optimizers = [make(decay_groups(rest, weight_decay), optimizer_class=torch.optim.AdamW, **adamw)]
        if muon:
            scaled = dict(lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            optimizers.append(make(matrices, optimizer_class=torch.optim.Muon, **scaled))
        return optimizers

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(self, idx, max_new_tokens, *, lengths=None, **sampling):
        """idx (B, T) int64 -> (B, T + n): each row its prompt, then its new tokens, then `stop` (or 50256) up to the end.

        lengths (B,): how much of each row of idx is prompt (default: all of it), so that prompts of different lengths
        share a batch. The other arguments, and what happens at the end of the context window, are those of `stream`.
        """
        lengths = [idx.size(1)] * idx.size(0) if lengths is None else [int(n) for n in lengths]
        new = list(self.stream(idx, max_new_tokens, lengths=lengths, **sampling))
        fill = EOT if sampling.get("stop") is None else sampling["stop"]
        out = F.pad(idx, (0, len(new)), value=fill)
        for b, n in enumerate(lengths):
            out[b, n:] = fill
            out[b, n : n + len(new)] = torch.tensor([token[b] for token in new])
        return out

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, *, lengths=None, stop=None, compile=False, **choice):
        """Yields (B,) tokens as they are made, at most max_new_tokens times; ends early when every row has produced `stop`.

        choice: temperature, top_k, top_p and generator, as `choose` takes them. A row that outgrows the context window goes
        on from the newest half of it. compile: the step of one token is compiled, once for each size of batch and of cache
        (the prompts' width + max_new_tokens), with today's weights as constants in it: for long or many generations.
        """
        B, T = idx.shape
        lengths = [T] * B if lengths is None else [int(n) for n in lengths]
        if min(lengths) < 1 or max(lengths) > T:
            raise UserError(f"lengths {lengths}: every prompt needs at least 1 and at most {T} tokens (the width of idx)")
        rows = [idx[b, :n].tolist() for b, n in enumerate(lengths)]
        start, window = [0] * B, self.config.block_size
        decode = self.compiled_decode if compile else self.decode
        cache = KVCache(self, B, min(window, T + max_new_tokens))
        done = torch.zeros(B, dtype=torch.bool, device=idx.device)
        token = None
        for _ in range(max_new_tokens):
            outgrown = [len(row) - s > window for row, s in zip(rows, start, strict=True)]
            if token is None or any(outgrown):
                start = [len(row) - window // 2 if out else s for row, s, out in zip(rows, start, outgrown, strict=True)]
                logits = self.prefill([row[s:] for row, s in zip(rows, start, strict=True)], cache)
            else:
                pos, *rest = cache.advance()
                logits = decode(self.embed(token[:, None], pos), *rest)
            token = choose(logits.float(), **choice)
            if stop is not None:
                token = token.masked_fill(done, stop)
                done |= token == stop
            for row, t in zip(rows, token.tolist(), strict=True):
                row.append(t)
            yield token
            if stop is not None and done.all():
                return

    def prefill(self, contexts: list[list[int]], cache: "KVCache"):
        """Reads whole contexts into the cache -> logits (B, V) of what follows each."""
        width, device = max(map(len, contexts)), self.transformer.wte.weight.device
        lengths = torch.tensor([len(context) for context in contexts], device=device)
        # padded at the right, where causal attention never looks
        idx = torch.tensor([context + [EOT] * (width - len(context)) for context in contexts], device=device)
        x = self.hidden(idx, caches=cache.begin(lengths, width))
        return self.logits(x[torch.arange(len(x), device=device), lengths - 1])

    def decode(self, x, mask, caches):
        """The embedding of one more token a row, (B, 1, C) -> logits (B, V) of the next."""
        return self.logits(self.blocks(x, mask, caches)[:, -1])

    @cached_property
    def compiled_decode(self):
        """`decode` for weights that stay as they are. On a CPU inductor repacks them for its own matrix kernels."""
        import torch._inductor.config as inductor

        kernels = dict(freezing=True, max_autotune=True, max_autotune_gemm_backends="CPP")
        on_cpu = self.transformer.wte.weight.device.type == "cpu"
        return inductor.patch(kernels if on_cpu else {})(torch.compile(self.decode, dynamic=False))

    # -- Hugging Face directories --------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, name_or_dir: str | Path, **overrides) -> "GPT":
        """Loads a Hugging Face GPT-2: a name on the hub (gpt2 … gpt2-xl), a directory, or one of our checkpoints; or a .pt
        file of nanoGPT or build-nanogpt.

        overrides: fields of GPTConfig; a smaller block_size crops the positions. Raises UserError if it is no GPT-2.
        """
        if str(name_or_dir).endswith(".pt"):
            shape, weights = read_pt(Path(name_or_dir))
        else:
            directory = Path(name_or_dir) if Path(name_or_dir).is_dir() else download_pretrained(str(name_or_dir))
            shape, weights = read_shape(directory), read_weights(directory)
        device = torch.get_default_device()
        with torch.device("meta"):  # no time for random weights that are not to stay
            model = cls(GPTConfig(**{**shape, **overrides}))
        model.allocate(device)
        model.load_hf_weights(weights)
        return model

    @torch.no_grad()
    def load_hf_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Copies a Hugging Face GPT-2 state dict in. Raises UserError for a missing tensor or another shape."""
        for name, p in self.named_parameters():
            w = weights.get(name, weights.get(name.removeprefix("transformer.")))  # the hub's own gpt2 has no prefix
            if w is None:
                raise UserError(f"the weights have no tensor {name}: this is not a GPT-2 of {self.config.n_layer} layers")
            w = w.t() if is_conv1d(name) else w
            rows = self.config.vocab_size if name == "transformer.wte.weight" else len(p)  # padding stays zero
            if name == "transformer.wpe.weight" and len(w) < rows:
                raise UserError(f"the weights know {len(w)} positions, {rows} were asked for: sequence_length can only shrink")
            if w.shape[1:] != p.shape[1:] or len(w) < rows:
                raise UserError(f"{name} has shape {tuple(w.shape)} where {(rows, *p.shape[1:])} was expected")
            p[:rows], p[rows:] = w[:rows], 0

    def hf_weights(self, state_dict: dict | None = None) -> dict[str, torch.Tensor]:
        """The weights as Hugging Face names and turns them, GPT-2's 50,257 rows, the tied head once."""
        state_dict = self.state_dict() if state_dict is None else state_dict
        weights = {name: w.detach() for name, w in state_dict.items() if name != "lm_head.weight"}
        weights["transformer.wte.weight"] = weights["transformer.wte.weight"][: self.config.vocab_size]
        return {name: (w.t() if is_conv1d(name) else w).contiguous() for name, w in weights.items()}

    def save_pretrained(self, directory: str | Path, state_dict: dict | None = None, card: dict | None = None) -> None:
        """Writes a complete Hugging Face GPT-2 directory: `GPT2LMHeadModel.from_pretrained(directory)` and others read it.

        card: what the model card tells, in this order, such as {"data": …, "steps": …, "validation loss": …, "command": …}.
        """
        from safetensors.torch import save_file

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.hf_weights(state_dict), directory / "model.safetensors", metadata={"format": "pt"})
        c = self.config
        config = dict(
            architectures=["GPT2LMHeadModel"],
            model_type="gpt2",
            vocab_size=c.vocab_size,
            n_positions=c.block_size,
            n_ctx=c.block_size,
            **dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd),
            activation_function="gelu_new",
            layer_norm_epsilon=1e-5,
            **dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),  # trained without dropout
            **dict(bos_token_id=EOT, eos_token_id=EOT),
            dtype="float32",
        )
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        length = min(256, c.block_size // 2)  # transformers' pipeline asks for 256 of any model, and cannot slide the window
        generation = dict(bos_token_id=EOT, eos_token_id=EOT, max_new_tokens=length)
        (directory / "generation_config.json").write_text(json.dumps(generation, indent=2))
        save_hf_tokenizer(directory, c.block_size)
        (directory / "README.md").write_text(model_card(self.num_params(), card or {}), encoding="utf-8")


def decay_groups(params: list[nn.Parameter], weight_decay: float) -> list[dict]:
    """AdamW's two groups: matrices and embeddings decay, biases and layer norms do not."""
    return [
        dict(params=[p for p in params if p.dim() >= 2], weight_decay=weight_decay),
        dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0),
    ]


def is_conv1d(name: str) -> bool:
    """Whether Hugging Face keeps this tensor as OpenAI did, (in, out), where nn.Linear has (out, in)."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def model_card(num_params: int, facts: dict) -> str:
    """The README.md of a model directory."""
    rows = "".join(f"| {name} | {str(value).replace('|', chr(92) + '|')} |\n" for name, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# GPT-2, {num_params / 1e6:,.0f}M parameters

| | |
|---|---|
{rows}
`transformers.pipeline("text-generation", "this directory")` runs it; so does `python sample.py --model` where it was trained.
"""


def read_shape(directory: Path) -> dict:
    """The fields of GPTConfig that a Hugging Face config.json fixes. Raises UserError unless it is a GPT-2's."""
    try:
        hf = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        raise UserError(
            f"{directory}/config.json is missing: a Hugging Face model directory or one of our ckpt_ directories was expected"
        ) from None
    if hf.get("model_type") != "gpt2":
        raise UserError(f"{directory} holds a {hf.get('model_type')!r} model; only GPT-2's architecture can be loaded")
    ours = dict(activation_function="gelu_new", n_inner=4 * hf["n_embd"], layer_norm_epsilon=1e-5)
    ours |= dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    if changed := [f"{key} {hf[key]}" for key, value in ours.items() if hf.get(key) not in (None, value)]:
        raise UserError(f"{directory} is not OpenAI's GPT-2 but has {', '.join(changed)}; it cannot be loaded")
    return dict(block_size=hf["n_positions"], **{k: hf[k] for k in ("vocab_size", "n_layer", "n_head", "n_embd")})


def read_pt(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Fields of GPTConfig and weights, as Hugging Face has them, of nanoGPT's `ckpt.pt` or build-nanogpt's `model_*.pt`.

    The unpickler runs no code; the one class it may make is build-nanogpt's GPTConfig, for which ours stands in.
    """
    stand_ins = [(GPTConfig, f"{module}.GPTConfig") for module in ("__main__", "train_gpt2", "model")]
    try:
        with torch.serialization.safe_globals(stand_ins):
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        shape = saved["model_args"] if "model_args" in saved else vars(saved["config"])
        shape = {k: shape[k] for k in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}
        weights = {re.sub(r"^(_orig_mod\.|module\.)+", "", name): w for name, w in saved["model"].items()}
    except FileNotFoundError:
        raise UserError(f"{path} is not there") from None
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} is refused: it holds more than weights and plain values ({first_line(error)})") from None
    except (RuntimeError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no checkpoint of nanoGPT or build-nanogpt ({first_line(error)})") from None
    shape["vocab_size"] = min(shape["vocab_size"], VOCAB_SIZE)  # theirs counts the padding
    for name in [name for name in weights if is_conv1d(name) or ".ln_" in name]:
        bias = name.replace(".weight", ".bias")  # nanoGPT can be trained without: the same as zeros
        weights.setdefault(bias, torch.zeros(len(weights[name])))
    return shape, {name: w.t() if is_conv1d(name) else w for name, w in weights.items()}


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].strip()


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model directory: model.safetensors, else pytorch_model.bin by the unpickler that runs no code."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if (directory / "model.safetensors").exists():
            return load_file(directory / "model.safetensors")
        return torch.load(directory / "pytorch_model.bin", map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(f"{directory} has neither model.safetensors nor pytorch_model.bin") from None
    except pickle.UnpicklingError as error:
        raise UserError(f"the weights in {directory} are refused: more than tensors is pickled ({first_line(error)})") from None
    except (SafetensorError, RuntimeError, EOFError) as error:
        raise UserError(f"the weights in {directory} cannot be read ({first_line(error)}): the file is damaged") from None


def download_pretrained(name: str) -> Path:
    """A hub repository's directory in Hugging Face's cache, downloaded where it is not there yet."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        directory = Path(snapshot_download(name, allow_patterns=["config.json", "model.safetensors"]))
        if not (directory / "model.safetensors").exists():  # an older repository
            snapshot_download(name, allow_patterns=["pytorch_model.bin"])
        return directory
    except (HFValidationError, RepositoryNotFoundError):
        raise UserError(f"{name!r} is neither a directory here nor a model on the Hugging Face hub") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = first_line(error).removeprefix("Got: ")
        raise UserError(
            f"{name!r} is not a directory here, and the hub cannot be reached ({reason}): mend that, or give a directory"
        ) from None


class KVCache:
    """Keys and values of every layer, (B, nh, S, hs) each, so that a new token costs one position instead of all.

    A column belongs to the same step in every row. A prompt shorter than others leaves columns that `mask` hides.
    """

    def __init__(self, model: GPT, B: int, S: int):
        c, like = model.config, model.transformer.wpe.weight
        shape = (B, c.n_head, S, c.n_embd // c.n_head)
        self.layers = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(c.n_layer)]
        self.columns = torch.arange(S, device=like.device)

    def begin(self, lengths, width: int):
        """Takes prompts of these lengths (B,) in the first columns: what `hidden` needs to store them."""
        self.width, self.pos = width, lengths[:, None] - 1  # (B, 1)
        self.mask = (self.columns < lengths[:, None])[:, None, None, :]  # (B, 1, 1, S): what the next token may see
        return [(k, v, self.columns[:width]) for k, v in self.layers]

    def advance(self):
        """The next column: the new tokens' positions, their mask, and what `hidden` needs to store them."""
        column = self.columns[self.width : self.width + 1]
        self.width, self.pos = self.width + 1, self.pos + 1
        self.mask[..., column] = True
        return self.pos, self.mask, [(k, v, column) for k, v in self.layers]


def choose(logits, temperature=1.0, top_k: int | None = 50, top_p: float | None = None, generator=None):
    """One token (B,) from logits (B, V): the likeliest at temperature 0, else a draw from the top_k, then the top_p of them
    (Holtzman et al. 2020); None is all. `generator` lives on the logits' device.
    """
    if temperature == 0:
        return logits.argmax(-1)
    V = logits.size(-1)
    values, indices = logits.topk(min(top_k or V, V))  # sorted, largest first
    probs = (values / temperature).softmax(-1)
    if top_p is not None:
        probs = probs.masked_fill(probs.cumsum(-1) - probs > top_p, 0)  # all that is needed to reach top_p, at least one
    return indices.gather(-1, torch.multinomial(probs, 1, generator=generator))[:, 0]


# -- precision ---------------------------------------------------------------------------------------------------------


def pick_dtype(device: torch.device, name: str = "auto", world=None) -> tuple[torch.dtype, str]:
    """The dtype to autocast to on this device, and why. auto: the fastest that trains well, one for all of world."""
    if name != "auto":
        return getattr(torch, name), "as asked"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16, "compute capability 8.0 or newer"
        return torch.float16, "this GPU has no bfloat16; the gradients are scaled"
    if device.type == "cpu":
        ratio = bfloat16_speed()
        slow = ratio <= 1.5 if world is None else world.any(ratio <= 1.5)  # each process has timed it for itself
        return (torch.float32 if slow else torch.bfloat16), f"bfloat16 matmuls run at {ratio:.1f} × float32's speed here"
    return (torch.bfloat16, "MPS has it") if device.type == "mps" else (torch.float32, "unknown device")


@lru_cache(maxsize=1)
def bfloat16_speed() -> float:
    """How much faster this CPU multiplies matrices in bfloat16 than in float32: the best of 15 each, in turns.

    The flags of a CPU do not tell: with AMX several times, with AVX512-BF16 alone it can be slower, otherwise it is emulated.
    """
    cpu, dtypes = torch.device("cpu"), (torch.float32, torch.bfloat16)
    float32, bfloat16 = zip(*([time_matmul(cpu, dtype) for dtype in dtypes] for _ in range(15)), strict=True)
    return min(float32) / min(bfloat16)


def time_matmul(device: torch.device, dtype: torch.dtype, n: int = 1024) -> float:
    """Seconds of one product of n × n matrices."""
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    a = torch.ones(n, n, dtype=dtype, device=device)
    wait()
    start = time.perf_counter()
    a @ a
    wait()
    return time.perf_counter() - start


# Published peaks of dense matmuls in TFLOP/s: float32, TF32, 16 bits accumulated in float32; by the whole name CUDA reports
# (a MIG slice or a laptop's GPU is another thing). Where a datasheet counts sparsity, half of its figure.
PEAKS = {
    r"Tesla V100-SXM\d-\w+": (15.7, None, 125, "NVIDIA V100 datasheet, 2020"),
    r"Tesla V100-PCIE-\w+": (14.0, None, 112, "NVIDIA V100 datasheet, 2020"),
    r"Tesla T4": (8.1, None, 65, "NVIDIA T4 datasheet, 2019"),
    r"NVIDIA A100-[\w-]+": (19.5, 156, 312, "NVIDIA A100 datasheet, 2021"),
    r"NVIDIA L4": (30.3, 60, 121, "NVIDIA L4 datasheet, 2023"),
    r"NVIDIA GeForce RTX 3090": (35.6, 35.6, 71, "NVIDIA Ampere GA102 whitepaper, appendix A"),
    r"NVIDIA GeForce RTX 4090": (82.6, 82.6, 165.2, "NVIDIA Ada whitepaper, appendix A"),
    r"NVIDIA GeForce RTX 5090": (104.8, 104.8, 209.5, "NVIDIA RTX Blackwell whitepaper, appendix A"),
    r"NVIDIA H100 PCIe": (51, 378, 756, "NVIDIA H100 datasheet, 2023"),
    r"NVIDIA H100 80GB HBM3": (67, 494.5, 989.5, "NVIDIA H100 datasheet, 2023 (SXM)"),
    r"NVIDIA H200": (67, 494.5, 989.5, "NVIDIA H200 datasheet, 2024 (SXM)"),
    r"NVIDIA B200": (80, 1100, 2250, "NVIDIA Blackwell architecture brief, 2024 (HGX)"),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Operations a second that MFU is measured against, and whose figure it is: the maker's, or one of a matmul timed here.

    float32 on a GPU means TF32 where there is TF32 and torch.set_float32_matmul_precision allows it.
    """
    if device.type == "cuda":
        tf32 = torch.cuda.get_device_capability(device) >= (8, 0) and torch.get_float32_matmul_precision() != "highest"
        for pattern, (*peaks, source) in PEAKS.items():
            if re.fullmatch(pattern, torch.cuda.get_device_name(device)):
                return 1e12 * peaks[int(tf32) if dtype == torch.float32 else 2], source
    n = 2048 if device.type == "cpu" else 4096  # smaller ones are slower
    return 2 * n**3 / min(time_matmul(device, dtype, n) for _ in range(8)), f"measured here, matmuls of {n} × {n}"


def compiled(model: nn.Module, recompute: bool) -> nn.Module:
    """torch.compile for training. recompute: the backward pass computes again what takes neither matmul nor attention (GELU,
    layer norms, casts of the weights) instead of keeping it, even where the compiler finds keeping it faster. It is one setting
    for all models of the process, read when a model first runs."""
    functorch_config.ban_recompute_used_far_apart = not recompute
    functorch_config.ban_recompute_long_fusible_chains = not recompute
    functorch_config.ban_recompute_materialized_backward = not recompute
    return torch.compile(model, dynamic=False)


def newest_flash_attention(device: torch.device) -> str:
    """Has SDPA use the FlashAttention made for Hopper (3) or Blackwell (4) where its package is installed -> which, or ""."""
    made_for = {9: "FA3", 10: "FA4"}
    newest = made_for.get(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else None
    if newest and hasattr(attention, "activate_flash_attention_impl"):  # PyTorch 2.11
        with suppress(ImportError, OSError, RuntimeError, ValueError):  # not installed or not fitting: SDPA has its own
            attention.activate_flash_attention_impl(newest)
            return newest
    return ""


def autocast(device: torch.device, dtype: torch.dtype):
    """The context that computes in dtype where that is safe; nothing for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


# -- data --------------------------------------------------------------------------------------------------------------


class Shard:
    """One file of tokens: our and build-nanogpt's `.npy`, llm.c's `.bin` with a header, nanoGPT's `.bin` without."""

    HEADER = 256  # int32 words that llm.c puts first: magic, version, number of tokens, and zeros
    MAGIC = 20240520

    def __init__(self, path: Path):
        self.path, self.offset = path, 0
        size = path.stat().st_size
        if path.suffix == ".npy":
            try:
                tokens = np.load(path, mmap_mode="r")
            except (ValueError, EOFError) as error:
                raise UserError(
                    f"{path} is not a whole .npy file ({error}): it is damaged or truncated, make it again"
                ) from None
            if tokens.dtype != np.uint16 or tokens.ndim != 1:
                raise UserError(f"{path} holds {tokens.dtype} of shape {tokens.shape}; a shard is one-dimensional uint16")
            self.offset, self.num_tokens = tokens.offset, len(tokens)
            return
        header = np.fromfile(path, np.int32, 3)
        if len(header) == 3 and header[0] == self.MAGIC:
            self.offset, self.num_tokens = 4 * self.HEADER, int(header[2])
            if header[1] != 1 or size != self.offset + 2 * self.num_tokens:
                raise UserError(
                    f"{path}: its header says version {header[1]} and {header[2]} tokens, version 1 and "
                    f"{(size - self.offset) // 2} were found: it is damaged, or of another tokenizer"
                )
        elif size % 2:
            raise UserError(f"{path} has an odd number of bytes ({size}): uint16 tokens were expected")
        else:
            self.num_tokens = size // 2

    def tokens(self) -> np.ndarray:
        return np.memmap(self.path, np.uint16, "r", self.offset, (self.num_tokens,))


def permutation(n: int, *seed: int) -> np.ndarray:
    """0..n-1 in an order that depends on the seed alone: the raw bits of PCG64 never change between versions of NumPy."""
    return np.argsort(np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n), kind="stable")


class DataLoaderLite:
    """Batches from the token shards of one split: an endless stream of tokens cut into sequences of T+1, stride T.

    Epoch follows epoch in one stream, and sequence k is the same whoever asks. `cursor` counts the sequences consumed by
    all processes: it is the same on every rank, and the whole state. A batch of rank r is sequences cursor + r·B onwards.
    With shuffle, each epoch permutes the shards, and inside a shard the pieces between two <|endoftext|>, by generators
    seeded with (seed, epoch) and (seed, epoch, shard). Raises UserError for missing, damaged or too small shards.
    """

    def __init__(self, data_dir, split, B, T, process_rank=0, num_processes=1, shuffle=False, seed=1337, vocab_size=VOCAB_SIZE):
        self.B, self.T, self.rank, self.num_processes = B, T, process_rank, num_processes
        self.shuffle, self.seed, self.vocab_size = shuffle, seed, vocab_size
        pattern = re.compile(rf"(.*_)?{split}(_\d+)?\.(npy|bin)")
        paths = sorted(p for p in Path(data_dir).glob("*") if pattern.fullmatch(p.name))
        if not paths:
            raise UserError(
                f"no {split} shards in {data_dir} (files like *_{split}_000000.npy): make them with python fineweb.py, "
                "or name another directory with --data-dir"
            )
        self.shards = [Shard(path) for path in paths]
        self.num_tokens = sum(shard.num_tokens for shard in self.shards)  # of an epoch
        if self.num_tokens <= T:
            raise UserError(f"the {split} split in {data_dir} has {self.num_tokens} tokens, less than one sequence of {T} + 1")
        self.open_shard = lru_cache(maxsize=2)(self.open_shard)
        self.shard_order = lru_cache(maxsize=2)(self.shard_order)
        self.reader = ThreadPoolExecutor(1, "DataLoaderLite")
        self.reset()

    def reset(self) -> None:
        self.load_state_dict({"cursor": 0})

    def state_dict(self) -> dict[str, int]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.cursor = state["cursor"]
        self.prefetch()

    def prefetch(self) -> None:
        """Begins to read the next batch in the background, so that a step does not wait for it."""
        self.coming = self.reader.submit(self.batch, self.cursor + self.rank * self.B, self.B)

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x, y (B, T) int64 on the CPU (pinned where there is a GPU); y is x one token later."""
        x, y = self.coming.result()
        self.cursor += self.B * self.num_processes
        self.prefetch()
        return x, y

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences first … first + count - 1 as x, y (count, T): the one place where the stream is cut into sequences."""
        stream = self.read(first * self.T, count * self.T + 1)
        x, y = (torch.from_numpy(s.astype(np.int64)).view(count, self.T) for s in (stream[:-1], stream[1:]))
        return (x.pin_memory(), y.pin_memory()) if torch.cuda.is_available() else (x, y)

    def read(self, position: int, count: int) -> np.ndarray:
        """`count` tokens of the endless stream, uint16."""
        parts = []
        while count:
            epoch, offset = divmod(position, self.num_tokens)
            order, ends = self.shard_order(epoch)
            i = int(np.searchsorted(ends, offset, side="right"))  # the shard that holds this token
            n = min(count, int(ends[i]) - offset)
            parts.append(self.read_shard(int(order[i]), epoch, offset - (int(ends[i - 1]) if i else 0), n))
            position, count = position + n, count - n
        return np.concatenate(parts)

    def read_shard(self, index: int, epoch: int, offset: int, count: int) -> np.ndarray:
        """`count` tokens from `offset` of a shard, in the order that this epoch gives to its pieces."""
        tokens, starts, ends = self.open_shard(index, epoch if self.shuffle else 0)
        parts = []
        i = int(np.searchsorted(ends, offset, side="right"))
        while count:
            into = offset - (int(ends[i - 1]) if i else 0)
            n = min(count, int(ends[i]) - offset)
            begin = int(starts[i]) + into
            part = np.array(tokens[begin : begin + n])
            if part.max() >= self.vocab_size:
                bad = int(np.argmax(part >= self.vocab_size))
                raise UserError(
                    f"{self.shards[index].path}: token {part[bad]} at offset {begin + bad} is outside the vocabulary of "
                    f"{self.vocab_size}: the file is damaged, or made with another tokenizer"
                )
            parts.append(part)
            offset, count, i = offset + n, count - n, i + 1
        return np.concatenate(parts)

    def shard_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards of an epoch in order, and where each ends in it."""
        order = permutation(len(self.shards), self.seed, epoch) if self.shuffle else np.arange(len(self.shards))
        return order, np.cumsum([self.shards[i].num_tokens for i in order])

    def open_shard(self, index: int, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A shard's tokens (mapped, not read), where its pieces start in the file, and where they end once permuted."""
        tokens = self.shards[index].tokens()
        if not self.shuffle:
            return tokens, np.array([0]), np.array([len(tokens)])
        starts = np.flatnonzero(tokens == EOT)
        starts = starts if len(starts) and starts[0] == 0 else np.concatenate([[0], starts])
        order = permutation(len(starts), self.seed, epoch, index)
        return tokens, starts[order], np.cumsum(np.diff(starts, append=len(tokens))[order])

"""GPT-2 (Radford et al. 2019), exactly, and the loader that feeds it.

Shapes: B sequences in a batch, T tokens in a sequence, C = n_embd channels, nh heads of
hs = C / nh channels each, V = vocab_size.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from support import generation, hf, hf_write
from support.common import UserError
from support.fingerprint import Fingerprint, take_fingerprint, without_padding
from support.memory import loss_rows
from support.shards import TokenStream
from support.tokenizer import VOCAB_SIZE

# Marks a field that may change when a checkpoint goes on: the model it makes computes the same.
HARMLESS = {"harmless": True}


@dataclass
class GPTConfig:
    block_size: int = 1024  # the context window: the most tokens the model can look at
    vocab_size: int = VOCAB_SIZE
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    # The embedding has rows up to a multiple of this, in memory only: matrix units like it.
    pad_vocab_to: int = field(default=128, metadata=HARMLESS)
    # Recompute each block in the backward pass instead of keeping its activations.
    activation_checkpointing: bool = field(default=False, metadata=HARMLESS)

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.pad_vocab_to) * self.pad_vocab_to


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        # one matmul for the queries, keys and values of all heads
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, mask=None, cache=None):
        """(B, T, C) -> (B, T, C). What is passed decides the mode:

        neither: training; a token attends to itself and to earlier tokens.
        mask (B, 1, T, T): HellaSwag; the mask says which tokens a token attends to.
        cache: prefill; it attends as in training, and stores the keys and values.
        cache and mask (B, 1, 1, S): decode, T = 1; the new token attends to stored ones.
        """
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, nh, T, hs)
        if cache is not None:
            all_k, all_v, columns = cache  # (B, nh, S, hs) twice; (T,): where these T are stored
            all_k.index_copy_(2, columns, k.to(all_k.dtype))
            all_v.index_copy_(2, columns, v.to(all_v.dtype))
            if mask is not None:  # decode
                k, v = all_k, all_v
        # softmax(q kᵀ / √hs + mask) v
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        x = self.c_fc(x)
        x = F.gelu(x, approximate="tanh")  # the tanh form is part of GPT-2
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.activation_checkpointing = config.activation_checkpointing
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, mask=None, cache=None):
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(self.layers, x, mask, cache, use_reentrant=False)
        return self.layers(x, mask, cache)

    def layers(self, x, mask, cache):
        x = x + self.attn(self.ln_1(x), mask, cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class LinearCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of logits x Wᵀ that never exist all at once.

    It is F.cross_entropy(x @ weight.t(), targets, ignore_index=-1), but for the padding. All logits
    would be the largest tensor of a micro-batch. A row with softmax p and one-hot target t has
    loss = logsumexp(x Wᵀ) - (x Wᵀ)·t, dlogits = p - t, dx = dlogits W, and adds dlogitsᵀ x to dW.
    Only some rows exist at a time, so `forward` makes the gradients of the sum too, and `backward`
    scales them to those of the mean. The idea is Cut Your Losses' and Liger Kernel's (both 2024);
    torch.compile fuses what is between the matmuls.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, with_grad):
        """x (N, C), weight (padded V, C), targets (N,) where -1 is ignored -> a scalar."""
        device = x.device
        chunk = loss_rows(device.type)
        autocast = torch.is_autocast_enabled(device.type)
        matmul_dtype = torch.get_autocast_dtype(device.type) if autocast else x.dtype
        sum_dtype = torch.promote_types(matmul_dtype, torch.float32)  # of the softmax and of sums
        w = weight.to(matmul_dtype)
        token_ids = torch.arange(len(weight), device=device)
        loss_sum = x.new_zeros((), dtype=sum_dtype)
        dx = []
        dw = torch.zeros_like(weight, dtype=sum_dtype) if with_grad else None
        x_chunks = x.to(matmul_dtype).split(chunk)
        y_chunks = targets[:, None].split(chunk)
        for x_chunk, y in zip(x_chunks, y_chunks, strict=True):
            counted = y >= 0  # (rows, 1)
            logits = (x_chunk @ w.t()).to(sum_dtype)
            logits[:, vocab_size:] = -torch.inf  # the padding: probability and gradient zero
            lse = logits.logsumexp(-1, keepdim=True)
            loss_sum += torch.where(counted, lse - logits.gather(1, y.clamp(min=0)), 0).sum()
            if with_grad:
                # p - t, in the memory of the logits. Not divided by n yet: small ones would become
                # zero in float16.
                dlogits = logits.sub_(lse).exp_().add_(token_ids == y, alpha=-1).to(matmul_dtype)
                dx.append(dlogits @ w * counted)
                dw += sum_of_products(dlogits, x_chunk * counted)
        n = (targets >= 0).sum()
        if with_grad:
            ctx.save_for_backward(torch.cat(dx), dw, n)
            ctx.dtypes = x.dtype, weight.dtype
        return loss_sum / n

    @staticmethod
    def backward(ctx, grad):
        dx, dw, n = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        return dx.to(x_dtype) * (grad / n), (dw * (grad / n)).to(weight_dtype), None, None, None


def sum_of_products(dlogits, x):
    """dlogitsᵀ x: dlogits (rows, V), between -1 and 1, and x (rows, C) -> (V, C).

    float16 ends at 65504, and a sum over thousands of rows may be larger. GradScaler cannot prevent
    it: it multiplies the loss, which is computed after this sum. So x is first multiplied by a
    power of two, at most 1, that keeps every sum in range; the result is divided by it in float32.
    """
    if x.dtype != torch.float16:
        return dlogits.t() @ x
    largest_sum = len(x) * x.abs().amax().float()
    room = torch.finfo(x.dtype).max / largest_sum
    scale = room.log2().floor().clamp(max=0).exp2()
    return (dlogits.t() @ (x * scale.to(x.dtype))).float() / scale


def make_optimizer(params, optimizer_class, **options) -> torch.optim.Optimizer:
    """The default for one process; World.make_optimizer can also divide the optimizer's state."""
    return optimizer_class(params, **options)


class GPT(nn.Module):
    """GPT-2.

    forward = hidden, then loss (with targets) or logits (without)
    hidden  = embed, then blocks (every Block, then the last layer norm)

    HellaSwag calls hidden with a mask; generation calls embed, blocks and logits with a cache.
    """

    transformer: Any  # an nn.ModuleDict, of whose parts a type checker knows nothing

    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.n_embd % config.n_head:
            raise UserError(
                f"n_embd {config.n_embd} does not divide by n_head {config.n_head}: "
                "heads must be of equal width"
            )
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
        """Gives the parameters uninitialized memory, and ties the head to the embedding.

        Nothing would fill a buffer, so a model here has none.
        """
        buffers = [name for name, _ in self.named_buffers()]
        if buffers:
            raise UserError(f"{buffers[0]} is a buffer: compute it in forward instead")
        self.to_empty(device=device)
        self.lm_head.weight = self.transformer.wte.weight  # tied (Press & Wolf 2017)

    @torch.no_grad()
    def init_weights(self) -> None:
        """normal(0, 0.02) for matrices and embeddings, 0 for biases, 1 for layer norms' gains.

        A block's two c_proj write into the residual stream. Their std is divided by √(2·n_layer),
        so that the stream's variance does not grow with depth (GPT-2 paper, section 2.3). As in
        nanoGPT and build-nanogpt; OpenAI's code has std 0.01 for the positions.
        """
        for name, p in self.named_parameters():
            p.zero_()  # biases; and the padding's rows, which stay zero: their gradient is zero
            if name.endswith("bias"):
                continue
            if p.dim() == 1:  # the gain of a layer norm
                p.fill_(1)
                continue
            std = 0.02
            if name.endswith("c_proj.weight"):
                std /= math.sqrt(2 * self.config.n_layer)
            without_padding(name, p, self.config.vocab_size).normal_(0.0, std)

    def forward(self, idx, targets=None):
        """idx (B, T) int64 -> (logits (B, T, V), None).

        With targets (B, T), of which -1 is ignored, -> (None, the mean loss in nats a token).
        """
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x), None
        return None, self.loss(x, targets)

    def hidden(self, idx, pos=None, mask=None, caches=None):
        """The hidden states after the last layer norm, (B, T, C): all but the vocabulary.

        pos (B, T) or (T,): positions, by default 0..T-1. mask: as SDPA takes it, by default
        causal. caches: for each block, where its keys and values go (generation.KVCache).
        """
        T = idx.size(1)
        if T > self.config.block_size:
            raise UserError(
                f"{T} tokens are more than the model's context of {self.config.block_size}"
            )
        if pos is None:
            pos = torch.arange(T, device=idx.device)
        return self.blocks(self.embed(idx, pos), mask, caches)

    def embed(self, idx, pos):
        """idx, pos (B, T) -> what `blocks` takes, (B, T, C).

        Not compiled (device.compile_blocks says why).
        """
        return self.transformer.wte(idx) + self.transformer.wpe(pos)

    def blocks(self, x, mask=None, caches=None):
        """From the embeddings to the last layer norm, (B, T, C) -> (B, T, C)."""
        for i, block in enumerate(self.transformer.h):
            x = block(x, mask, caches[i] if caches else None)
        return self.transformer.ln_f(x)

    def logits(self, x):
        """(…, C) -> (…, V).

        The padding is cut off here, once: a loss or a choice of a token never sees it.
        """
        return self.lm_head(x)[..., : self.config.vocab_size]

    def loss(self, x, targets):
        """Hidden states (B, T, C) and what comes next, (B, T) -> the mean loss, without logits."""
        return LinearCrossEntropy.apply(
            x.flatten(0, 1),
            self.lm_head.weight,
            targets.flatten(),
            self.config.vocab_size,
            torch.is_grad_enabled(),
        )

    def flops_per_token(self, T: int) -> int:
        """Operations to train on one token (PaLM, appendix B).

        6 for each weight in a matmul, and 12·L·C·T for attention.
        """
        L, C, V = self.config.n_layer, self.config.n_embd, self.config.vocab_size
        return 6 * (12 * L * C**2 + V * C) + 12 * L * C * T

    def num_params(self) -> int:
        """Parameters of the model as it is saved: tied weights once, no padding."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        return sum(p.numel() for p in self.parameters()) - padding

    def configure_optimizers(
        self,
        weight_decay: float = 0.1,
        learning_rate: float = 6e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        muon: bool = False,
        make: Callable = make_optimizer,
    ) -> list[torch.optim.Optimizer]:
        """AdamW (Loshchilov & Hutter 2019) with GPT-3's betas, fused where the device can.

        With muon, the matrices inside the blocks go to PyTorch's Muon (Jordan 2024), whose update
        is scaled to the size of AdamW's (Liu et al. 2025), so that one learning rate serves both.
        Matrices and embeddings decay, biases and layer norms do not. `make` builds each of them.
        """
        matrices: list[nn.Parameter] = []
        if muon:
            matrices = [p for p in self.transformer.h.parameters() if p.dim() == 2]
        ids = {id(p) for p in matrices}
        others = [p for p in self.parameters() if p.requires_grad and id(p) not in ids]
        adamw = make(
            decay_groups(others, weight_decay),
            optimizer_class=torch.optim.AdamW,
            lr=learning_rate,
            betas=betas,
            eps=eps,
            fused=self.transformer.wte.weight.device.type in ("cuda", "cpu"),
        )
        if not muon:
            return [adamw]
        for_matrices = make(
            matrices,
            optimizer_class=torch.optim.Muon,
            lr=learning_rate,
            weight_decay=weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        return [adamw, for_matrices]

    # -- generation and files: thin ends of support/generation.py and support/hf.py

    def generate(self, idx, max_new_tokens: int, **sampling) -> torch.Tensor:
        """idx (B, T) -> (B, T + n): the prompts and what follows them.

        The arguments are those of generation.generate.
        """
        return generation.generate(self, idx, max_new_tokens, **sampling)

    def stream(self, idx, max_new_tokens: int, **sampling) -> Iterator[torch.Tensor]:
        """Yields (B,) tokens as they are made; the arguments are those of generation.stream."""
        return generation.stream(self, idx, max_new_tokens, **sampling)

    @classmethod
    def from_pretrained(
        cls, name_or_dir: str | Path, defaults: dict | None = None, **overrides
    ) -> "GPT":
        """Loads a GPT-2: a name on the hub, a directory, a checkpoint, or a .pt file.

        Names are gpt2 … gpt2-xl, a .pt file is nanoGPT's or build-nanogpt's. overrides: fields of
        GPTConfig; a smaller block_size crops the positions. defaults: fields that count where the
        files do not tell them. Raises UserError for what is no GPT-2, is one that other code has
        changed, or cannot be read.
        """
        found = hf.read_model(name_or_dir)
        hf.refuse_other_code(found, cls, GPTConfig)
        config = GPTConfig(**{**(defaults or {}), **found.fields, **overrides})
        device = torch.get_default_device()
        with torch.device("meta"):  # no time for random weights that are not to stay
            model = cls(config)
        weights = hf.crop_positions(found.weights, config.block_size)
        model.allocate(device)
        hf.load_weights(dict(model.named_parameters()), weights, config)
        return model

    def save_pretrained(
        self, directory: str | Path, state_dict: dict | None = None, card: dict | None = None
    ) -> None:
        """Writes a directory that `GPT2LMHeadModel.from_pretrained` and others read.

        If this code has become another model than GPT-2, the directory says so, and only this code
        reads it. state_dict: the weights, if not those of this module. card: what the model card
        tells, in this order, such as {"data": …, "steps": …, "command": …}.
        """
        state_dict = self.state_dict() if state_dict is None else state_dict
        weights = {name: state_dict[name].detach() for name, _ in self.named_parameters()}
        fields = dataclasses.asdict(self.config)
        hf_write.write_model(Path(directory), fields, weights, self.fingerprint, card or {})

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What this code computes, and whether that is GPT-2. It takes milliseconds, once."""
        tensors = {name: tuple(p.shape) for name, p in self.named_parameters()}
        return take_fingerprint(GPT, self.config, tensors)


def decay_groups(params: list[nn.Parameter], weight_decay: float) -> list[dict]:
    """AdamW's two groups: matrices and embeddings decay, biases and layer norms do not."""
    return [
        dict(params=[p for p in params if p.dim() >= 2], weight_decay=weight_decay),
        dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0),
    ]


# -- data


class DataLoaderLite(TokenStream):
    """Batches from the token shards of one split, an endless stream of sequences.

    A sequence is T+1 tokens, and sequence k is the same whoever asks (shards.TokenStream).
    `cursor` counts the sequences consumed by all processes: it is the same on every rank, and the
    whole state. A batch of rank r is the sequences from cursor + r·B on.

    shuffle: each epoch has another order. pin: batches lie in memory that a GPU copies from while
    it computes. Raises UserError for missing, damaged or too small shards.
    """

    def __init__(
        self,
        data_dir: str | Path,
        split: str,
        B: int,
        T: int,
        process_rank: int = 0,
        num_processes: int = 1,
        shuffle: bool = False,
        seed: int = 1337,
        vocab_size: int = VOCAB_SIZE,
        pin: bool = False,
    ):
        super().__init__(data_dir, split, T, shuffle=shuffle, seed=seed, vocab_size=vocab_size)
        self.B = B
        self.rank = process_rank
        self.num_processes = num_processes
        self.pin = pin
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
        """x, y (B, T) int64 on the CPU; y is x one token later."""
        x, y = self.coming.result()
        self.cursor += self.B * self.num_processes
        self.prefetch()
        if self.pin:  # here, because the reader's thread does not know which GPU is ours
            return x.pin_memory(), y.pin_memory()
        return x, y

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences first … first + count - 1 as x, y (count, T).

        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> np.save(f"{folder}/a_train_000001.npy", np.arange(10, dtype=np.uint16))
        >>> x, y = DataLoaderLite(folder, "train", B=1, T=4).batch(first=0, count=2)
        >>> x.tolist(), y.tolist()
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 2, 3, 4], [5, 6, 7, 8]])
        """
        rows = [self.sequence(first + i) for i in range(count)]
        sequences = torch.from_numpy(np.stack(rows).astype(np.int64))
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

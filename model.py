"""GPT-2 (Radford et al. 2019), exactly, and the loader that feeds it.

Shapes: B sequences in a batch, T tokens in a sequence, C = n_embd channels, nh heads of
hs = C / nh channels each, V = vocab_size.
"""

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from support import generation, hf
from support.common import UserError
from support.fingerprint import Fingerprint, take_fingerprint, without_padding
from support.memory import loss_rows
from support.shards import Shard, find_shards
from support.tokenizer import VOCAB_SIZE

# Marks a field that does not change what the model computes: a resumed run may set it anew.
HARMLESS = {"harmless": True}


@dataclass
class GPTConfig:
    block_size: int = 1024  # the context window: the most tokens the model can look at
    vocab_size: int = VOCAB_SIZE
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    # Pad the embedding's rows to a multiple of this, in memory only: GPUs are faster with it.
    pad_vocab_to: int = field(default=128, metadata=HARMLESS)
    # The backward pass recomputes each block instead of keeping its activations.
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
        """(B, T, C) -> (B, T, C). There are four modes:

        no mask, no cache: training. A token attends to itself and to earlier tokens.
        mask (B, 1, T, T): HellaSwag. The mask says which tokens a token attends to.
        cache: prefill. Tokens attend as in training; the cache stores their keys and values.
        cache and mask (B, 1, 1, S): decode, T = 1. The new token attends to the stored ones.
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

    It computes F.cross_entropy(x @ weight.t(), targets, ignore_index=-1) without the padding. The
    logits would be the largest tensor of a micro-batch, so only some rows exist at a time. For a
    row with softmax p and one-hot target t: loss = logsumexp(x Wᵀ) - (x Wᵀ)·t, dlogits = p - t,
    dx = dlogits W, dW += dlogitsᵀ x. `backward` would have to compute the logits again, so
    `forward` computes these gradients, of the sum, and `backward` scales them to the mean. The
    idea is from Cut Your Losses and Liger Kernel (2024). torch.compile fuses what is between.
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
        scale = keep_in_range(matmul_dtype, min(chunk, len(x)), x)
        y_chunks = targets[:, None].split(chunk)
        for x_chunk, y in zip(x_chunks, y_chunks, strict=True):
            counted = y >= 0  # (rows, 1)
            logits = (x_chunk @ w.t()).to(sum_dtype)
            logits[:, vocab_size:] = -torch.inf  # the padding: probability and gradient zero
            lse = logits.logsumexp(-1, keepdim=True)
            loss_sum += torch.where(counted, lse - logits.gather(1, y.clamp(min=0)), 0).sum()
            if with_grad:
                # p - t, in the memory of the logits. Dividing by n here would turn small values
                # into zeros in float16.
                dlogits = logits.sub_(lse).exp_().add_(token_ids == y, alpha=-1).to(matmul_dtype)
                dx.append(dlogits @ w * counted)
                dw += dlogits.t() @ (x_chunk * counted * scale)
        n = (targets >= 0).sum()
        if with_grad:
            ctx.save_for_backward(torch.cat(dx), dw, n, n * scale)
            ctx.dtypes = x.dtype, weight.dtype
        return loss_sum / n

    @staticmethod
    def backward(ctx, grad):
        dx, dw, n, n_scaled = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        dx = dx.to(x_dtype) * (grad / n)
        return dx, (dw * (grad / n_scaled)).to(weight_dtype), None, None, None


def keep_in_range(dtype, rows, x):
    """A power of two by which to multiply x (N, C), so that dlogitsᵀ x over `rows` rows is finite.

    float16 ends at 65504, and a sum over thousands of rows may be larger; dlogits are between -1
    and 1. GradScaler cannot prevent that: it scales the loss, which comes after this sum.
    """
    if dtype != torch.float16:
        return 1
    room = torch.finfo(dtype).max / (rows * x.abs().amax().float())
    return room.log2().floor().clamp(max=0).exp2()


class GPT(nn.Module):
    """GPT-2.

    forward = hidden, then loss (with targets) or logits (without)
    hidden  = embed, then blocks (every Block, then the last layer norm)

    HellaSwag calls hidden with a mask. Generation calls embed, blocks and logits with a cache.
    """

    transformer: Any  # an nn.ModuleDict; a type checker does not know its parts

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        with torch.device("meta"):  # no memory, no random numbers: init_weights fills it
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

        Nothing would fill a buffer, so a changed model must not have one.
        """
        for name, _ in self.named_buffers():
            raise UserError(f"{name} is a buffer: compute it in forward instead")
        self.to_empty(device=device)
        self.lm_head.weight = self.transformer.wte.weight  # tied (Press & Wolf 2017)

    @torch.no_grad()
    def init_weights(self) -> None:
        """normal(0, 0.02) for matrices and embeddings, 0 for biases, 1 for layer norms' gains.

        A block's two c_proj write into the residual stream. Dividing their std by √(2·n_layer)
        keeps the stream's variance from growing with depth (GPT-2 paper, section 2.3). nanoGPT and
        build-nanogpt do the same; OpenAI's code has std 0.01 for the positions.
        """
        for name, p in self.named_parameters():
            p.zero_()  # biases, and the padding's rows: their gradient is zero, so they stay zero
            if p.dim() >= 2:
                std = 0.02
                if name.endswith("c_proj.weight"):
                    std /= math.sqrt(2 * self.config.n_layer)
                without_padding(name, p, self.config.vocab_size).normal_(0.0, std)
            elif not name.endswith("bias"):  # the gain of a layer norm
                p.fill_(1)

    def forward(self, idx, targets=None):
        """idx (B, T) int64 -> (logits (B, T, V), None).

        With targets (B, T), where -1 is ignored, -> (None, the mean loss in nats per token).
        """
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x), None
        return None, self.loss(x, targets)

    def hidden(self, idx, pos=None, mask=None, caches=None):
        """idx (B, T) -> the hidden states after the last layer norm, (B, T, C).

        pos (B, T) or (T,): positions, by default 0..T-1. mask: as SDPA takes it, by default
        causal. caches: where each block stores its keys and values (generation.KVCache).
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
        """idx, pos (B, T) -> (B, T, C). It is not compiled: device.compile_blocks says why."""
        return self.transformer.wte(idx) + self.transformer.wpe(pos)

    def blocks(self, x, mask=None, caches=None):
        """From the embeddings to the last layer norm, (B, T, C) -> (B, T, C)."""
        for i, block in enumerate(self.transformer.h):
            x = block(x, mask, caches[i] if caches else None)
        return self.transformer.ln_f(x)

    def logits(self, x):
        """(…, C) -> (…, V), without the padding: generation cannot choose its tokens."""
        return self.lm_head(x)[..., : self.config.vocab_size]

    def loss(self, x, targets):
        """Hidden states (B, T, C) and targets (B, T) -> the mean loss, without all logits."""
        return LinearCrossEntropy.apply(
            x.flatten(0, 1),
            self.lm_head.weight,
            targets.flatten(),
            self.config.vocab_size,
            torch.is_grad_enabled(),
        )

    def flops_per_token(self, T: int) -> int:
        """Operations per token of training, 12·L·C·T of them for attention (PaLM, appendix B)."""
        L, C, V = self.config.n_layer, self.config.n_embd, self.config.vocab_size
        return 6 * (12 * L * C**2 + V * C) + 12 * L * C * T

    def num_params(self) -> int:
        """The parameters that are saved: tied weights once, no padding."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        return sum(p.numel() for p in self.parameters()) - padding

    def configure_optimizers(
        self,
        weight_decay: float = 0.1,
        learning_rate: float = 6e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        muon: bool = False,
    ) -> list[torch.optim.Optimizer]:
        """AdamW (Loshchilov & Hutter 2019) with GPT-3's betas, fused where the device can.

        With muon, PyTorch's Muon (Jordan 2024) takes the matrices inside the blocks. Its update is
        scaled to the size of AdamW's (Liu et al. 2025), so that one learning rate serves both.
        """
        matrices: list[nn.Parameter] = []
        if muon:
            matrices = [p for p in self.transformer.h.parameters() if p.dim() == 2]
        ids = {id(p) for p in matrices}
        others = [p for p in self.parameters() if p.requires_grad and id(p) not in ids]
        adamw = torch.optim.AdamW(
            decay_groups(others, weight_decay),
            lr=learning_rate,
            betas=betas,
            eps=eps,
            fused=others[0].device.type in ("cuda", "cpu"),
        )
        if not muon:
            return [adamw]
        for_matrices = torch.optim.Muon(
            matrices,
            lr=learning_rate,
            weight_decay=weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        return [adamw, for_matrices]

    # -- generation and files: thin ends of support/generation.py and support/hf.py

    def generate(self, idx, max_new_tokens: int, **sampling) -> torch.Tensor:
        """idx (B, T) -> (B, T + n): prompts and what follows them, as generation.generate says."""
        return generation.generate(self, idx, max_new_tokens, **sampling)

    @classmethod
    def from_pretrained(
        cls, name_or_dir: str | Path, defaults: dict | None = None, **overrides
    ) -> "GPT":
        """Loads a model from a checkpoint or another directory, the hub, or a .pt file.

        The hub has gpt2 … gpt2-xl; .pt files are nanoGPT's or build-nanogpt's. overrides set fields
        of GPTConfig; a smaller block_size crops the positions. defaults set fields that the files
        lack. Raises UserError if the files cannot be read or belong to another model.
        """
        fields, weights = hf.read_model(name_or_dir, cls, GPTConfig)
        config = GPTConfig(**{**(defaults or {}), **fields, **overrides})
        device = torch.get_default_device()
        with torch.device("meta"):  # draws no random weights
            model = cls(config)
        model.allocate(device)
        hf.load_weights(model, fields, weights)
        return model

    def save_pretrained(
        self, directory: str | Path, state_dict: dict | None = None, card: dict | None = None
    ) -> None:
        """Writes a directory that `GPT2LMHeadModel.from_pretrained` and others read.

        If this code is not a GPT-2 any more, the directory says so, and only this code reads it.
        state_dict replaces the module's own weights. card has the rows of the model card, such as
        {"data": …, "steps": …, "command": …}.
        """
        state_dict = self.state_dict() if state_dict is None else state_dict
        weights = {name: state_dict[name].detach() for name, _ in self.named_parameters()}
        fields = dataclasses.asdict(self.config)
        hf.write_model(Path(directory), fields, weights, self.fingerprint, card or {})

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Says whether this code is a GPT-2. Computed once, in milliseconds."""
        return take_fingerprint(GPT, self)


def decay_groups(params: list[nn.Parameter], weight_decay: float) -> list[dict]:
    """AdamW's two groups: matrices and embeddings decay, biases and layer norms do not."""
    return [
        dict(params=[p for p in params if p.dim() >= 2], weight_decay=weight_decay),
        dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0),
    ]


# -- data


class DataLoaderLite:
    """Batches from the token shards of one split: an endless stream of sequences of T+1 tokens.

    Sequence k is the same whoever asks. Each shard is cut with stride T, so the last token of a
    sequence is the first of the next one. Tokens left over at a shard's end are skipped. With
    shuffle, each epoch has its own order of shards and sequences, cut from another offset.

    `cursor` counts the sequences that all processes have consumed. It is the loader's whole
    state, the same on every rank. Rank r's next batch is the B sequences from cursor + r·B on.
    pin: batches in pinned memory. Raises UserError for missing, damaged or too small
    shards.
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
        self.B = B
        self.T = T
        self.rank = process_rank
        self.num_processes = num_processes
        self.shuffle = shuffle
        self.seed = seed
        self.vocab_size = vocab_size
        self.pin = pin
        self.shards = find_shards(Path(data_dir), split)
        self.num_tokens = sum(shard.num_tokens for shard in self.shards)
        self.num_sequences = sum(map(self.sequences_in, self.shards))  # of an epoch
        if not self.num_sequences:
            raise UserError(
                f"the {split} split in {data_dir} has {self.num_tokens} tokens in "
                f"{len(self.shards)} shard(s); none of them has one sequence of {T} + 1"
            )
        self.shard_order = lru_cache(maxsize=1)(self.order_shards)  # of the epoch in progress
        self.starts = lru_cache(maxsize=1)(self.cut_shard)  # of the shard in use
        self.reader = ThreadPoolExecutor(1, "DataLoaderLite")
        self.reset()

    def reset(self) -> None:
        self.seek(0)

    def seek(self, cursor: int) -> None:
        self.cursor = cursor
        self.prefetch()

    def prefetch(self) -> None:
        """Begins to read the next batch in the background: a step does not wait for it."""
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

    def sequence(self, k: int) -> np.ndarray:
        """The T+1 tokens of sequence k of the stream, uint16."""
        epoch, k = divmod(k, self.num_sequences)
        order, ends = self.shard_order(epoch)
        i = int(np.searchsorted(ends, k, side="right"))  # the shard's place in this epoch
        before = ends[i - 1] if i else 0
        shard = self.shards[order[i]]
        start = int(self.starts(epoch, int(order[i]))[k - before])
        tokens = shard.read(start, self.T + 1)
        if tokens.max() >= self.vocab_size:
            raise UserError(
                f"{shard.path}: token {tokens.max()}, within {self.T + 1} from {start} on, is "
                f"outside the vocabulary of {self.vocab_size}: the file is damaged, or made with "
                "another tokenizer"
            )
        return tokens

    def sequences_in(self, shard: Shard) -> int:
        """The number of sequences in a shard, the same in every epoch."""
        N, T = shard.num_tokens, self.T
        if N <= T:
            return 0
        if self.shuffle:  # one less, so that there is room for an offset
            return max(1, (N - T) // T)
        return (N - 1) // T

    def order_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of an epoch's shards, and the number of sequences up to the end of each."""
        order = np.arange(len(self.shards))
        if self.shuffle:
            order = np.argsort(random_bits(len(order), self.seed, epoch), kind="stable")
        return order, np.cumsum([self.sequences_in(self.shards[i]) for i in order])

    def cut_shard(self, epoch: int, index: int) -> np.ndarray:
        """The tokens at which a shard's sequences begin, in the order of this epoch."""
        shard = self.shards[index]
        n = self.sequences_in(shard)
        if not self.shuffle:
            return self.T * np.arange(n)
        bits = random_bits(n + 1, self.seed, epoch, index + 1)
        offset = int(bits[0]) % min(self.T, shard.num_tokens - n * self.T)
        return offset + self.T * np.argsort(bits[1:], kind="stable")


def random_bits(n: int, *seed: int) -> np.ndarray:
    """n random numbers of 64 bits: PCG64's raw bits are the same in every version of NumPy."""
    return np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n)

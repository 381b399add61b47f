"""GPT-2 (Radford et al. 2019), exactly, and the loader that feeds it.

Shapes: B sequences in a batch, T tokens in a sequence, C = n_embd channels, nh heads of
hs = C / nh channels each, V = vocab_size.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from optim import OPTIMIZERS
from support.base.console import say_once
from support.base.errors import UserError
from support.text.token_files import Data, OpenFile, Shard, open_data
from support.text.tokenizer import VOCAB_SIZE, Tokenizer, gpt2
from support.weights import generation, hf
from support.weights.fingerprint import Fingerprint, take_fingerprint

Cache = tuple[Tensor, Tensor, Tensor]  # keys and values (B, nh, S, hs), and columns (T,) of S

# Marks a field that changes no evaluation: a resumed run may change it.
SAME_MATH = {"same_math": True}


@dataclass
class GPTConfig:
    block_size: int = 1024  # the context window: the most tokens the model can look at
    vocab_size: int = VOCAB_SIZE
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    # Pad the embedding's rows to a multiple of this, in memory only: GPUs are faster with it.
    pad_vocab_to: int = field(default=128, metadata=SAME_MATH)
    # The backward pass recomputes each block instead of keeping its activations.
    activation_checkpointing: bool = field(default=False, metadata=SAME_MATH)

    @classmethod
    def fields_from(cls, settings: Any, vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
        """The fields that a TrainConfig sets: those of the same name, and block_size."""
        values = vars(settings) | {"block_size": settings.sequence_length, "vocab_size": vocab_size}
        return {f.name: values[f.name] for f in fields(cls) if f.name in values}

    @classmethod
    def same_math_from(cls, settings: Any) -> dict[str, Any]:
        """Of these, the fields that do not change what the model computes."""
        same = [f.name for f in fields(cls) if f.metadata == SAME_MATH]
        return {name: getattr(settings, name, getattr(cls, name)) for name in same}

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

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
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
            all_k, all_v, columns = cache
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

    def forward(self, x: Tensor) -> Tensor:
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

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(self.layers, x, mask, cache, use_reentrant=False)
        return self.layers(x, mask, cache)

    def layers(self, x: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask, cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class LinearCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of logits x Wᵀ that never exist all at once.

    It computes F.cross_entropy(x @ weight.t(), targets, ignore_index=-1) without the padding, for
    some rows at a time, because the logits would be the largest tensor of a micro-batch. For a
    row with softmax p and one-hot target t: loss = logsumexp(x Wᵀ) - (x Wᵀ)·t, dlogits = p - t,
    dx = dlogits W, dW += dlogitsᵀ x. `backward` would have to compute the logits again, so
    `forward` computes these gradients, of the sum, and `backward` scales them to the mean. The
    idea is from Cut Your Losses and Liger Kernel (2024). torch.compile fuses the rest.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        chunk: int,
        with_grad: bool,
        kernel: Any = None,
    ) -> Tensor:
        """x (N, C), weight (padded V, C), targets (N,) where -1 is ignored -> a scalar.

        chunk: how many rows of logits it computes at a time. kernel: loss_kernel's, or None.
        """
        device = x.device
        autocast = torch.is_autocast_enabled(device.type)
        matmul_dtype = torch.get_autocast_dtype(device.type) if autocast else x.dtype
        sum_dtype = torch.promote_types(matmul_dtype, torch.float32)  # of the softmax and of sums
        w = weight.to(matmul_dtype)
        # to compare ids of 64 bits would take a third of the loss' time on a CPU
        token_ids = torch.arange(len(weight), device=device, dtype=torch.int32)
        y_chunks = targets[:, None].int().split(chunk)
        loss_sum = x.new_zeros((), dtype=sum_dtype)
        dx = []
        dw = torch.zeros_like(weight, dtype=sum_dtype) if with_grad else None
        scale = keep_in_range(matmul_dtype, min(chunk, len(x)), x)
        x_chunks = x.to(matmul_dtype).split(chunk)
        for x_chunk, y in zip(x_chunks, y_chunks, strict=True):
            counted = y >= 0  # (rows, 1)
            if kernel:  # the other branch in one
                dlogits = x_chunk @ w.t()
                losses = kernel(dlogits, y[:, 0], vocab_size, with_grad)
            else:
                logits = (x_chunk @ w.t()).to(sum_dtype)
                if vocab_size < len(weight):  # the padding: probability and gradient zero
                    logits.masked_fill_(token_ids >= vocab_size, -torch.inf)
                lse = logits.logsumexp(-1, keepdim=True)
                correct = logits.gather(1, y.clamp(min=0).long())
                losses = torch.where(counted, lse - correct, 0)
                # p - t, in the memory of the logits. Dividing by n here would turn small values
                # into zeros in float16.
                if with_grad:
                    logits.sub_(lse).exp_().add_(token_ids == y, alpha=-1)
                    dlogits = logits.to(matmul_dtype)
            loss_sum += losses.sum()
            if with_grad:
                dx.append(dlogits @ w * counted)
                dw += dlogits.t() @ (x_chunk * counted * scale)
        n = (targets >= 0).sum()
        if with_grad:
            ctx.save_for_backward(torch.cat(dx), dw, n, n * scale)
            ctx.dtype = x.dtype
        return loss_sum / n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, n, n_scaled = ctx.saved_tensors
        return dx.to(ctx.dtype) * (grad / n), dw * (grad / n_scaled), *5 * (None,)


def keep_in_range(dtype: torch.dtype, rows: int, x: Tensor) -> Tensor | int:
    """A power of two for x (N, C), so that dlogitsᵀ x over `rows` rows is finite."""
    if dtype != torch.float16:  # which ends at 65504: thousands of dlogits may sum to more
        return 1
    room = torch.finfo(dtype).max / (rows * x.abs().amax().float())
    return room.log2().floor().clamp(max=0).exp2()


class GPT(nn.Module):
    """forward = hidden, then loss (with targets) or logits (without)
    hidden  = embed, then blocks (every Block, then the last layer norm)

    HellaSwag calls hidden with a mask. Generation calls embed, blocks and logits with a cache.
    """

    transformer: Any  # an nn.ModuleDict; a type checker does not know its parts
    origin = ""  # where from_pretrained found the weights, for the user

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.tokenizer: Tokenizer = gpt2()  # until a builder sets the data's or the files'
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
        self.one_token_step: Any = generation.step_of_one_token  # compile_step compiles it
        self.loss_kernel: Any = None  # compile_blocks may choose one
        self.allocate(torch.get_default_device())
        self.init_weights()

    def allocate(self, device: torch.device) -> None:
        """Gives the parameters uninitialized memory, and ties the head to the embedding."""
        for name, _ in self.named_buffers():  # nothing would fill it
            raise UserError(f"{name} is a buffer: compute it in forward instead")
        self.to_empty(device=device)
        self.lm_head.weight = self.transformer.wte.weight  # tied (Press & Wolf 2017)

    @torch.no_grad()
    def init_weights(self) -> None:
        """normal(0, 0.02) for matrices and embeddings, 0 for biases, 1 for layer norms' gains.

        A block's two c_proj write into the residual stream, whose variance would grow with depth,
        so their std is divided by √(2·n_layer) (GPT-2 paper, section 2.3). nanoGPT does the same.
        """
        for name, p in self.named_parameters():
            p.zero_()  # biases, and the padding's rows, which stay zero: they have no gradient
            if p.dim() >= 2:
                depth = 2 * self.config.n_layer if name.endswith("c_proj.weight") else 1
                self.without_padding(name, p).normal_(0.0, 0.02 / math.sqrt(depth))
            elif not name.endswith("bias"):  # the gain of a layer norm
                p.fill_(1)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """idx (B, T) int64 -> (logits (B, T, V), None).

        With targets (B, T), where -1 is ignored, -> (None, the mean loss in nats per token).
        """
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x), None
        return None, self.loss(x, targets)

    def hidden(self, idx: Tensor, pos: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """idx (B, T) -> the hidden states after the last layer norm, (B, T, C).

        pos (B, T) or (T,): positions, by default 0..T-1. mask: as SDPA takes it, by default causal.
        """
        T = idx.size(1)
        most = self.config.block_size
        if T > most:
            raise UserError(f"{T} tokens are more than the model's context of {most}")
        if pos is None:
            pos = torch.arange(T, device=idx.device)
        return self.blocks(self.embed(idx, pos), mask)

    def embed(self, idx: Tensor, pos: Tensor) -> Tensor:
        """idx (B, T), pos (B, T) or (T,) -> (B, T, C). Not compiled: compile_blocks says why."""
        return self.transformer.wte(idx) + self.transformer.wpe(pos)

    def blocks(
        self, x: Tensor, mask: Tensor | None = None, caches: list[Cache] | None = None
    ) -> Tensor:
        """What embed returns -> (B, T, C) after the last layer norm. caches: one for each block."""
        for i, block in enumerate(self.transformer.h):
            x = block(x, mask, caches[i] if caches else None)
        return self.transformer.ln_f(x)

    def logits(self, x: Tensor) -> Tensor:
        """(…, C) -> (…, V), without the padding: generation cannot choose its tokens."""
        return self.lm_head(x)[..., : self.config.vocab_size]

    @staticmethod
    def loss_rows(device: str) -> int:
        """How many rows of logits the loss computes at a time on this type of device."""
        return 2048 if device == "cpu" else 8192

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Hidden states (P, C) and targets (P,) -> each target's loss, (P,) float32, in nats."""
        at_once = 128 if x.device.type == "cpu" else 2048  # a CPU's cache should hold the logits
        losses = []
        for states, y in zip(x.split(at_once), targets.split(at_once), strict=True):
            logits = self.logits(states).float()
            losses.append(logits.logsumexp(-1) - logits.gather(-1, y[:, None])[:, 0])
        return torch.cat(losses)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Hidden states (B, T, C) and targets (B, T) -> the mean loss, without all logits."""
        return LinearCrossEntropy.apply(
            x.flatten(0, 1),
            self.lm_head.weight,
            targets.flatten(),
            self.config.vocab_size,
            self.loss_rows(x.device.type),
            torch.is_grad_enabled(),
            self.loss_kernel,
        )

    def flops_per_token(self, T: int) -> int:
        """Operations per token of training, 12·L·C·T of them for attention (PaLM, appendix B)."""
        c = self.config
        return 6 * c.n_embd * (12 * c.n_layer * c.n_embd + c.vocab_size + 2 * c.n_layer * T)

    def without_padding(self, name: str, tensor: Tensor) -> Tensor:
        """The vocabulary's rows of a parameter, or of an optimizer's state for it."""
        has_padding = name.endswith(("wte.weight", "lm_head.weight"))
        return tensor[: self.config.vocab_size] if has_padding else tensor

    def num_params(self) -> int:
        """The parameters that are saved: tied weights once, no padding."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        return sum(p.numel() for p in self.parameters()) - padding

    def configure_optimizers(self, name: str = "adamw", **options: Any) -> list[Optimizer]:
        """This name's optimizers, in the order of their updates. options: see optim.py."""
        gpt3 = dict(weight_decay=0.1, learning_rate=6e-4, betas=(0.9, 0.95), eps=1e-8)
        return OPTIMIZERS[name](self, **(gpt3 | options))

    # -- generation and files: thin ends of support/weights/generation.py and support/weights/hf.py

    def generate(self, idx: Tensor, max_new_tokens: int, **sampling: Any) -> Tensor:
        """idx (B, T) -> (B, T + n): prompts and what follows them, as generation.generate says."""
        return generation.generate(self, idx, max_new_tokens, **sampling)

    def stream(
        self, idx: Tensor, max_new_tokens: int, *, lengths: Any = None, **sampling: Any
    ) -> Iterator[Tensor]:
        """The same, but yields the next tokens, (B,), as soon as they are made."""
        prompts = generation.unpad(idx, lengths)
        return generation.stream(self, prompts, max_new_tokens, **sampling)

    @classmethod
    def from_pretrained(
        cls, name_or_dir: str | Path, defaults: dict[str, Any] | None = None, **overrides: Any
    ) -> "GPT":
        """Loads a directory (a checkpoint), a model of the hub (gpt2 … gpt2-xl), or a .pt file.

        .pt files are nanoGPT's or build-nanogpt's. overrides set fields of GPTConfig; a smaller
        block_size crops the positions. defaults set fields that the files lack. Raises UserError
        if the files cannot be read or belong to another model.
        """
        files = hf.read_model(name_or_dir)
        hf.refuse_other_change(files, GPTConfig, cls)
        config = GPTConfig(**((defaults or {}) | files.fields | overrides))
        with torch.device("meta"):  # draws no random weights
            model = cls(config)
        model.allocate(torch.get_default_device())
        hf.load_weights(model, files.fields, files.weights)
        model.origin = files.origin
        model.tokenizer = files.tokenizer
        if files.fingerprint is None and (difference := model.fingerprint.difference):
            say_once(f"{files.origin} is a GPT-2, and this code is not: {difference}")
        return model

    def save_pretrained(
        self, directory: str | Path, state_dict: dict | None = None, card: dict | None = None
    ) -> None:
        """Writes a directory that transformers reads, if this code is still a GPT-2.

        state_dict replaces the parameters, which it names. card: the rows of the model card.
        """
        weights = state_dict or {name: p.detach() for name, p in self.named_parameters()}
        if not state_dict:  # not a run's: its class may have been changed meanwhile
            vars(self).pop("fingerprint", None)
        hf.write_model(Path(directory), self, weights, card or {})

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Says whether this code is a GPT-2. Computed once, in half a second for the 124M."""
        return take_fingerprint(self)


# -- data


class Order(NamedTuple):
    """The order of an epoch's shards; the sequences with which they begin, and their number."""

    epoch: int
    shards: np.ndarray
    firsts: np.ndarray


class Cut(NamedTuple):
    """An epoch's shard: the tokens at which its sequences begin, in their order; its file, open."""

    at: tuple[int, int]  # the epoch, and the number of the shard
    starts: np.ndarray
    file: OpenFile


@dataclass(eq=False)
class DataLoaderLite:
    """Batches from the token shards of one split: an endless stream of sequences of T+1 tokens.

    Sequence k is the same for every process. Each shard is cut with stride T, so the last token of
    a sequence is the first of the next one; what is left at its end is skipped. With shuffle, each
    epoch has its own order of shards and sequences, cut from another offset.

    `cursor` counts the sequences that all processes have consumed. It is the loader's whole
    state, the same on every rank. Rank r's next batch is the B sequences from cursor + r·B on.
    pin: batches in pinned memory. Raises UserError for missing, damaged or too small shards.
    """

    data: Data | str | Path  # a directory, or what open_data found there
    split: str
    B: int
    T: int
    process_rank: int = 0
    num_processes: int = 1
    shuffle: bool = False
    seed: int = 1337
    pin: bool = False

    def __post_init__(self) -> None:
        data = self.data if isinstance(self.data, Data) else open_data(self.data, self.split)
        self.shards = data.shards[self.split]
        self.num_tokens = data.num_tokens(self.split)
        self.vocab_size = data.tokenizer.vocab_size
        self.num_sequences = sum(map(self.sequences_in, self.shards))  # of an epoch
        self.epoch_tokens = self.num_sequences * self.T
        if not self.num_sequences:
            raise UserError(
                f"no shard of the {self.split} split in {data.folder} is as long as one sequence "
                f"of {self.T} + 1 tokens; all have {self.num_tokens}: shorten --sequence-length"
            )
        self.order = self.order_shards(0)
        self.cut: Cut | None = None
        self.reader = ThreadPoolExecutor(1, "DataLoaderLite")
        self.reset()

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self.reader.shutdown(cancel_futures=True)

    def reset(self) -> None:
        self.seek(0)

    def seek(self, cursor: int) -> None:
        """Begins to read the next batch in the background, so that no step waits for it."""
        self.cursor = cursor
        first = cursor + self.process_rank * self.B
        self.coming = self.reader.submit(self.batch, first, self.B)

    def state_dict(self) -> dict[str, int]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seek(state["cursor"])

    def wait(self) -> None:
        """Waits for the next batch. Raises UserError if it cannot be read."""
        self.coming.result()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """x, y (B, T) int64 on the CPU; y is x one token later."""
        x, y = self.coming.result()
        self.seek(self.cursor + self.B * self.num_processes)
        if self.pin:  # here, because the reader's thread does not know which GPU is ours
            return x.pin_memory(), y.pin_memory()
        return x, y

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Sequences first … first + count - 1 as x, y (count, T)."""
        rows = [self.sequence(first + i) for i in range(count)]
        sequences = torch.from_numpy(np.array(rows, np.int64).reshape(count, self.T + 1))
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

    def sequence(self, k: int) -> np.ndarray:
        """The T+1 tokens of sequence k of the stream, uint16."""
        epoch, k = divmod(k, self.num_sequences)
        order = self.order
        if order.epoch != epoch:
            order = self.order = self.order_shards(epoch)
        i = np.searchsorted(order.firsts, k, side="right") - 1  # the shard's place in this epoch
        index = int(order.shards[i])
        cut = self.cut
        if cut is None or cut.at != (epoch, index):
            cut = self.cut = self.cut_shard(epoch, index)
        shard = self.shards[index]
        start = int(cut.starts[k - order.firsts[i]])
        tokens = shard.read(start, self.T + 1, cut.file)
        if tokens.max() >= self.vocab_size:
            raise UserError(
                f"{shard.path}: token {tokens.max()}, one of the {self.T + 1} from {start} on, is "
                f"outside the vocabulary of {self.vocab_size}: the file is damaged, or another "
                "tokenizer made it"
            )
        return tokens

    def sequences_in(self, shard: Shard) -> int:
        """The number of sequences in a shard, the same in every epoch."""
        n = max(0, shard.num_tokens - 1) // self.T
        if self.shuffle and n > 0:  # one less, so that there is room for an offset
            return max(1, shard.num_tokens // self.T - 1)
        return n

    def order_shards(self, epoch: int) -> Order:
        order = np.arange(len(self.shards))
        if self.shuffle:
            order = np.argsort(random_bits(len(order), self.seed, epoch), kind="stable")
        counts = [self.sequences_in(self.shards[i]) for i in order]
        return Order(epoch, order, np.cumsum([0, *counts]))

    def cut_shard(self, epoch: int, index: int) -> Cut:
        shard = self.shards[index]
        n = self.sequences_in(shard)
        starts = self.T * np.arange(n)
        if self.shuffle:
            bits = random_bits(n + 1, self.seed, epoch, index + 1)
            offset = int(bits[0]) % min(self.T, shard.num_tokens - n * self.T)
            starts = offset + self.T * np.argsort(bits[1:], kind="stable")
        return Cut((epoch, index), starts, shard.open_ahead())


def random_bits(n: int, *seed: int) -> np.ndarray:
    """n random numbers of 64 bits: PCG64's raw bits are the same in every version of NumPy."""
    return np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n)

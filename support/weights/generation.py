"""New tokens from a model: a KV cache, the choice of a token, and the loop around them.

In a causal model a token's keys and values never change. The cache keeps them, so a new token costs
one position instead of all. The first pass over the prompts is the *prefill*, later ones *decode*.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from support.base.console import say_once
from support.base.errors import UserError
from support.machine.device import evaluation_mode
from support.text.tokenizer import END, replace_surrogates

if TYPE_CHECKING:
    from model import GPT

Rows = list[list[int]]  # tokens


class KVCache:
    """Keys and values of every layer, (B, nh, S, hs) each, in memory that stays where it is.

    A column belongs to the same step in every row. A shorter prompt leaves some empty, which `mask`
    hides and `pos` does not count.
    """

    def __init__(self, model: GPT, B: int, S: int):
        c = model.config
        weight = next(model.parameters())  # the cache has its dtype and device
        shape = (B, c.n_head, S, c.n_embd // c.n_head)
        self.model = model
        self.step = model.one_token_step
        self.layers = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(c.n_layer)]
        self.columns = torch.arange(S, device=weight.device)

    def prefill(self, contexts: Rows) -> Tensor:
        """Reads whole contexts, from the first column on -> logits (B, V) of what follows each."""
        idx = pad(contexts).to(self.columns)  # (B, T)
        self.pos = torch.tensor([[len(context) - 1] for context in contexts]).to(idx)  # (B, 1)
        self.mask = (self.columns <= self.pos)[:, None, None]  # (B, 1, 1, S): what is seen
        columns = self.columns[: idx.size(1)]
        self.column = columns[-1:].clone()  # of the newest token
        x = self.model.embed(idx, columns)
        x = self.model.blocks(x, caches=[(k, v, columns) for k, v in self.layers])
        return self.model.logits(x.take_along_dim(self.pos[..., None], 1)[:, 0])

    def decode(self, token: Tensor) -> Tensor:
        """Reads one more token per row, (B,) -> logits (B, V) of what follows."""
        self.column += 1
        self.pos += 1
        self.mask[..., self.column] = True
        x = self.model.embed(token[:, None], self.pos)
        return self.step(self.model, x, self.mask, [(k, v, self.column) for k, v in self.layers])


def pad(rows: Rows, value: int = 0) -> Tensor:
    """B lists of at most T numbers -> (B, T) int64, filled up at the right, where nobody looks."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def unpad(idx: Tensor, lengths: Any = None) -> Rows:
    """The first `lengths` (B,) tokens of each row of idx (B, T), or all of them."""
    B, T = idx.shape
    lengths = [T] * B if lengths is None else [int(n) for n in lengths]
    if not all(0 <= n <= T for n in lengths):
        raise UserError(f"lengths {lengths}: idx has {T} columns")
    return [row[:n] for row, n in zip(idx.tolist(), lengths, strict=True)]


def step_of_one_token(model: GPT, x: Any, mask: Tensor, caches: list) -> Tensor:
    """The embedding of one more token per row, (B, 1, C) -> logits (B, V) of the next."""
    return model.logits(model.blocks(x, mask, caches)[:, -1])


def compile_step(model: GPT) -> None:
    """Compiles `step_of_one_token` for a model, whose weights and device must stay as they are."""
    import torch._inductor.config as inductor

    # inductor takes half a minute for each size of batch and cache; on a CPU it repacks the weights
    cpu = next(model.parameters()).device.type == "cpu"
    tuned = inductor.patch(freezing=cpu, max_autotune=cpu, max_autotune_gemm_backends="CPP")
    model.one_token_step = tuned(torch.compile(step_of_one_token, dynamic=False))


def choose(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = 50,
    top_p: float | None = None,
    generator: Generator | None = None,
) -> Tensor:
    """One token (B,) from logits (B, V): at temperature 0 the likeliest, else a drawn one.

    It is drawn from the top_k likeliest, and only from the likeliest of these that together hold
    the probability top_p (Holtzman et al. 2020). None: no limit. generator: on the logits' device.
    """
    if not (temperature >= 0 and (top_k or 0) >= 0 and 0 <= (top_p or 0) <= 1):
        problem = f"temperature {temperature}, top_k {top_k}, top_p {top_p}"
        raise UserError(f"{problem}: none may be negative, and top_p at most 1")
    if temperature < 1e-30:  # float32 logits cannot be divided by less
        return logits.argmax(-1)
    V = logits.size(-1)
    values, indices = logits.topk(min(top_k or V, V))  # sorted, largest first
    probs = (values / temperature).softmax(-1)
    if top_p is not None and top_p < 1:
        before = F.pad(probs.cumsum(-1)[:, :-1], (1, 0))  # what the likelier ones hold
        probs = probs.masked_fill(before >= max(top_p, 1e-30), 0)  # the likeliest always stays
    return indices.gather(-1, probs.multinomial(1, generator=generator))[:, 0]


@torch.no_grad()
def stream(
    model: GPT, prompts: Rows, max_new_tokens: int, *, stop: int | None = None, **choice: Any
) -> Iterator[Tensor]:
    """Yields tokens (B,) as they are made, at most max_new_tokens times. choice: see `choose`.

    Ends early when every row has produced `stop`. When a row outgrows the window, only its newest
    half is kept, and all rows are read again. Raises UserError if the logits are not finite, or if
    a prompt is empty or has a token outside the vocabulary.
    """
    window = model.config.block_size
    last = model.config.vocab_size - 1
    for prompt in prompts:  # the rows of the padding would be read as tokens
        if not prompt or min(prompt) < 0 or max(prompt) > last:
            raise UserError(f"prompt {prompt[:9]}: give at least one token, each from 0 to {last}")
    contexts = [list(prompt) for prompt in prompts]  # what each row can look at
    longest = max(map(len, contexts)) + max_new_tokens
    rounded = -(-longest // 256) * 256  # few sizes, because compile_step compiles each anew
    cache = KVCache(model, len(contexts), min(window, rounded))
    token = None
    for _ in range(max_new_tokens):
        too_long = [context for context in contexts if len(context) > window]
        if token is None or too_long:  # nothing is cached, or a row's positions move
            for context in too_long:
                del context[: -max(1, window // 2)]
            logits = cache.prefill(contexts)
        else:
            logits = cache.decode(token)
        if not logits.isfinite().all():
            raise UserError("logits are infinite or NaN: try --dtype float32 or another checkpoint")
        new = choose(logits.float(), **choice)
        if token is not None and stop is not None:
            new = new.masked_fill(token == stop, stop)  # in rows that have ended
        token = new
        tokens = token.tolist()
        for context, t in zip(contexts, tokens, strict=True):
            context.append(t)
        yield token
        if set(tokens) == {stop}:
            return


def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    *,
    lengths: Any = None,
    stop: int | None = None,
    **choice: Any,
) -> Tensor:
    """idx (B, T) int64 -> (B, T + n): prompts, new tokens, padding. See unpad, stream, choose."""
    prompts = unpad(idx, lengths)
    if not prompts:
        return idx
    steps = stream(model, prompts, max_new_tokens, stop=stop, **choice)
    new = [token.tolist() for token in steps]
    rows = [[*prompt, *(token[i] for token in new)] for i, prompt in enumerate(prompts)]
    last = model.config.vocab_size - 1  # GPT-2's <|endoftext|>
    return pad(rows, last if stop is None else stop).to(idx)


def complete(model: GPT, prompt: str, B: int, max_new_tokens: int, **options: Any) -> list[str]:
    """B texts that begin with the prompt. The options are those of stream."""
    prompts = [replace_surrogates(prompt)] * B
    with evaluation_mode(model):
        pieces = list(stream_texts(model, prompts, max_new_tokens, **options))
    return ["".join(texts) for texts in zip(*pieces, strict=True)]


def stream_texts(
    model: GPT, prompts: list[str], max_new_tokens: int, *, stop: bool = True, **options: Any
) -> Iterator[list[str]]:
    """Yields the prompts (an empty one is <|endoftext|>), then the next piece of each continuation.

    stop: it ends at <|endoftext|>. Bytes of an unfinished character wait for the next token.
    """
    yield prompts
    if any(END in prompt for prompt in prompts):
        say_once(f"{END} in a prompt is read as letters; an empty prompt begins a document")
    eot = model.tokenizer.eot if stop else None
    rows = [model.tokenizer.encode(prompt) or [model.tokenizer.eot] for prompt in prompts]
    window = model.config.block_size
    if (longest := max(map(len, rows))) > window:
        say_once(f"of a prompt of {longest} tokens, the model sees the last {max(1, window // 2)}")
    spell = model.tokenizer.encoding.decode_single_token_bytes
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in rows]
    for tokens in stream(model, rows, max_new_tokens, stop=eot, **options):
        spelled = [b"" if token == eot else spell(token) for token in tokens.tolist()]
        yield [decoder.decode(text) for decoder, text in zip(decoders, spelled, strict=True)]
    yield [decoder.decode(b"", final=True) for decoder in decoders]

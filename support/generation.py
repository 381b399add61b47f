"""New tokens from a model: a KV cache, the choice of a token, and the loop around them.

Everything here works with any model that has `config`, `embed`, `blocks` and `logits`, as GPT
has.

Without a cache each new token costs a pass over all tokens before it. But in a causal model the
keys and values of a token never change once it has been read: they are kept, and a new token
costs one position. The first pass over the prompts is the *prefill*, each later one a *decode*.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from support.common import UserError
from support.device import dtype_name


class KVCache:
    """Keys and values of every layer, (B, nh, S, hs) each, in memory that stays where it is.

    All rows advance together: a column belongs to the same step in every row. A prompt that is
    shorter than the others leaves columns which `mask` hides; its tokens' positions are counted
    without them.
    """

    def __init__(self, model, B: int, S: int):
        c = model.config
        like = next(model.parameters())
        shape = (B, c.n_head, S, c.n_embd // c.n_head)
        self.layers = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(c.n_layer)]
        self.columns = torch.arange(S, device=like.device)

    def start_prefill(self, lengths, width: int) -> list[tuple]:
        """Takes prompts of these lengths (B,) in the first `width` columns.

        -> for each layer, where its keys and values go.
        """
        self.width = width
        self.pos = lengths[:, None] - 1  # (B, 1)
        is_prompt = self.columns < lengths[:, None]  # (B, S)
        self.mask = is_prompt[:, None, None, :]  # (B, 1, 1, S): what is seen
        return [(k, v, self.columns[:width]) for k, v in self.layers]

    def add_column(self) -> list[tuple]:
        """Takes one more column -> for each layer, where its keys and values go.

        `pos` and `mask` are then those of the new tokens.
        """
        column = self.columns[self.width : self.width + 1]
        self.width += 1
        self.pos = self.pos + 1
        self.mask[..., column] = True
        return [(k, v, column) for k, v in self.layers]


COLDEST = 1e-30  # the lowest temperature that float32 logits can be divided by


def choose(
    logits,
    temperature: float = 1.0,
    top_k: int | None = 50,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
):
    """One token (B,) from logits (B, V).

    The likeliest at temperature 0 (and next to it), else a draw from the top_k likeliest, of these
    from as many as it takes to hold the probability top_p (Holtzman et al. 2020); None is all.
    `generator` lives on the logits' device.
    """
    if temperature < COLDEST:
        return logits.argmax(-1)
    V = logits.size(-1)
    values, indices = logits.topk(min(top_k or V, V))  # sorted, largest first
    probs = (values / temperature).softmax(-1)
    if top_p is not None:
        before = probs.cumsum(-1) - probs  # what the likelier ones hold
        probs = probs.masked_fill(before > top_p, 0)  # so the likeliest always stays
    drawn = torch.multinomial(probs, 1, generator=generator)
    return indices.gather(-1, drawn)[:, 0]


def generate(
    model, idx, max_new_tokens: int, *, lengths=None, stop=None, **sampling
) -> torch.Tensor:
    """idx (B, T) int64 -> (B, T + n): each row its prompt, its new tokens, then `stop`.

    Rows that end early are filled up with `stop`, or with the last token of the vocabulary, as
    which GPT-2 has <|endoftext|>. lengths (B,): how much of each row of idx is prompt (default:
    all of it), so that prompts of different lengths share a batch. The other arguments are those
    of `stream`.
    """
    B, T = idx.shape
    lengths = [T] * B if lengths is None else [int(n) for n in lengths]
    new = list(stream(model, idx, max_new_tokens, lengths=lengths, stop=stop, **sampling))
    fill = model.config.vocab_size - 1 if stop is None else stop
    out = F.pad(idx, (0, len(new)), value=fill)
    drawn = torch.stack(new, 1) if new else idx[:, :0]  # (B, n)
    for b, n in enumerate(lengths):
        out[b, n:] = fill
        out[b, n : n + len(new)] = drawn[b]
    return out


@torch.no_grad()
def stream(
    model, idx, max_new_tokens: int, *, lengths=None, stop=None, compile=False, **choice
) -> Iterator[torch.Tensor]:
    """Yields (B,) tokens as they are made, at most max_new_tokens times.

    It ends early when every row has produced `stop`. choice: temperature, top_k, top_p and
    generator, as `choose` takes them. compile: the step of one token is compiled, once for each
    size of batch and of cache (the prompts' width + max_new_tokens), with today's weights as
    constants in it: for long or many generations.

    A row that outgrows the context window goes on from the newest half of it: all rows are then
    read anew, once in half a window of tokens. Raises UserError for impossible lengths, and where
    the model gives no finite logits.
    """
    B, T = idx.shape
    lengths = [T] * B if lengths is None else [int(n) for n in lengths]
    if min(lengths) < 1 or max(lengths) > T:
        raise UserError(
            f"lengths {lengths}: every prompt needs at least 1 and at most {T} tokens "
            "(the width of idx)"
        )
    window = model.config.block_size
    kept = max(1, window // 2)  # of a row that outgrows it
    cache = KVCache(model, B, min(window, T + max_new_tokens))
    step = compiled_decode(model) if compile else decode
    contexts = [idx[b, :n].tolist() for b, n in enumerate(lengths)]  # what each row can look at
    done = torch.zeros(B, dtype=torch.bool, device=idx.device)
    token = None
    for _ in range(max_new_tokens):
        too_long = [context for context in contexts if len(context) > window]
        for context in too_long:
            del context[:-kept]
        if token is None or too_long:  # nothing is cached yet, or a row's positions have moved
            logits = prefill(model, contexts, cache)
        else:
            caches = cache.add_column()
            x = model.embed(token[:, None], cache.pos)
            logits = step(model, x, cache.mask, caches)
        check_logits(logits)
        token = choose(logits.float(), **choice)
        if stop is not None:
            token = token.masked_fill(done, stop)
            done |= token == stop
        for context, t in zip(contexts, token.tolist(), strict=True):
            context.append(t)
        yield token
        if stop is not None and done.all():
            return


def check_logits(logits) -> None:
    """Raises UserError unless all of them are finite: no token can be drawn from others."""
    if not logits.isfinite().all():
        dtype = dtype_name(logits.dtype)
        raise UserError(
            f"the model's logits in {dtype} are infinite or not a number: its weights are "
            "spoiled, or too large for this precision; try float32, else another checkpoint"
        )


def prefill(model, contexts: list[list[int]], cache: KVCache):
    """Reads whole contexts into the cache -> logits (B, V) of what follows each."""
    device = cache.columns.device
    lengths = torch.tensor([len(context) for context in contexts], device=device)
    idx = pad(contexts, device)  # (B, T)
    T = idx.size(1)
    pos = torch.arange(T, device=device)
    x = model.blocks(model.embed(idx, pos), caches=cache.start_prefill(lengths, T))
    last = x[torch.arange(len(x), device=device), lengths - 1]
    return model.logits(last)


def pad(rows: Sequence[Sequence[int]], device=None) -> torch.Tensor:
    """B rows of at most T numbers -> (B, T) int64, with zeros at the right.

    There causal attention never looks, and every vocabulary has a token 0.
    """
    T = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (T - len(row))] for row in rows], device=device)


def decode(model, x, mask, caches):
    """The embedding of one more token a row, (B, 1, C) -> logits (B, V) of the next."""
    return model.logits(model.blocks(x, mask, caches)[:, -1])


def compiled_decode(model):
    """`decode`, compiled for weights that stay as they are, and kept with the model.

    Compiling takes half a minute. On a CPU inductor repacks the weights for its own kernels.
    """
    if "compiled_decode" not in vars(model):
        import torch._inductor.config as inductor

        options = {}
        if next(model.parameters()).device.type == "cpu":
            options = dict(freezing=True, max_autotune=True, max_autotune_gemm_backends="CPP")
        step = inductor.patch(options)(torch.compile(decode, dynamic=False))
        vars(model)["compiled_decode"] = step
    return vars(model)["compiled_decode"]

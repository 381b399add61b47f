"""New tokens from a model: a KV cache, the choice of a token, and the loop around them.

Without a cache each new token costs a pass over all tokens before it. But in a causal model a
token's keys and values never change. The cache keeps them, so a new token costs one position.
The first pass over the prompts is the *prefill*, each later one a *decode*. `model` is anything
that has GPT's `config`, `embed`, `blocks` and `logits`.
"""

import torch

from support.common import UserError


class KVCache:
    """Keys and values of every layer, (B, nh, S, hs) each, in memory that stays where it is.

    All rows advance together: a column belongs to the same step in every row. A shorter prompt
    leaves columns empty. `mask` hides them, and `pos` does not count them.
    """

    def __init__(self, model, B: int, S: int):
        c = model.config
        like = next(model.parameters())
        shape = (B, c.n_head, S, c.n_embd // c.n_head)
        self.model = model
        self.layers = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(c.n_layer)]
        self.columns = torch.arange(S, device=like.device)

    def prefill(self, contexts):
        """Reads whole contexts, from the first column on -> logits (B, V) of what follows each."""
        idx = pad(contexts, self.columns.device)  # (B, T)
        lengths = torch.tensor([len(context) for context in contexts], device=idx.device)
        self.width = idx.size(1)
        self.pos = lengths[:, None] - 1  # (B, 1)
        self.mask = (self.columns <= self.pos)[:, None, None]  # (B, 1, 1, S): what is seen
        columns = self.columns[: self.width]
        x = self.model.embed(idx, columns)
        x = self.model.blocks(x, caches=[(k, v, columns) for k, v in self.layers])
        return self.model.logits(x[torch.arange(len(x), device=idx.device), lengths - 1])

    def decode(self, token, step):
        """Reads one more token per row, (B,) -> logits (B, V) of what follows."""
        column = self.columns[self.width : self.width + 1]
        self.width += 1
        self.pos += 1
        self.mask[..., column] = True
        x = self.model.embed(token[:, None], self.pos)
        return step(self.model, x, self.mask, [(k, v, column) for k, v in self.layers])


def pad(rows, device=None, value=0) -> torch.Tensor:
    """B lists of at most T numbers -> (B, T) int64, filled up at the right.

    Causal attention never looks there, and every vocabulary has a token 0.
    """
    T = max(map(len, rows))
    return torch.tensor([row + [value] * (T - len(row)) for row in rows], device=device)


def step_of_one_token(model, x, mask, caches):
    """The embedding of one more token per row, (B, 1, C) -> logits (B, V) of the next."""
    return model.logits(model.blocks(x, mask, caches)[:, -1])


def compiled_step(model):
    """`step_of_one_token`, compiled for weights that stay as they are, and kept with the model.

    It takes half a minute. On a CPU inductor repacks the weights for its own kernels.
    """
    if "compiled_step" not in vars(model):
        import torch._inductor.config as inductor

        on_cpu = next(model.parameters()).device.type == "cpu"
        with_options = inductor.patch(
            freezing=on_cpu, max_autotune=on_cpu, max_autotune_gemm_backends="CPP"
        )
        step = torch.compile(step_of_one_token, dynamic=False)
        vars(model)["compiled_step"] = with_options(step)
    return vars(model)["compiled_step"]


def choose(logits, temperature=1.0, top_k=50, top_p=None, generator=None):
    """One token (B,) from logits (B, V).

    At temperature 0 it is the likeliest token. Otherwise it is drawn from the top_k likeliest, and
    only from the likeliest of these that together hold the probability top_p (Holtzman et al.
    2020). None: no limit. `generator` must be on the logits' device.
    """
    if temperature < 1e-30:  # float32 logits cannot be divided by less
        return logits.argmax(-1)
    V = logits.size(-1)
    values, indices = logits.topk(min(top_k or V, V))  # sorted, largest first
    probs = (values / temperature).softmax(-1)
    if top_p is not None and top_p < 1:
        before = probs.cumsum(-1) - probs  # what the likelier ones hold
        probs = probs.masked_fill(before > top_p, 0)  # so the likeliest always stays
    drawn = torch.multinomial(probs, 1, generator=generator)
    return indices.gather(-1, drawn)[:, 0]


@torch.no_grad()
def stream(model, idx, max_new_tokens: int, *, lengths=None, stop=None, compile=False, **choice):
    """Yields (B,) tokens as they are made, at most max_new_tokens times.

    Ends early when every row has produced `stop`. idx: B prompts, as a tensor (B, T) or as lists.
    lengths (B,): how much of each row is prompt (default: all of it). choice: see `choose`.
    compile: compiles the step of one token, for fixed weights and each size of batch and cache
    (T + max_new_tokens). It is worth it for long or many generations.

    When a row outgrows the window, only its newest half is kept, and all rows are read again.
    Raises UserError if the logits are not finite.
    """
    window = model.config.block_size
    contexts = cut(idx, lengths)  # what each row can look at
    longest = max(map(len, contexts))
    cache = KVCache(model, len(contexts), min(window, longest + max_new_tokens))
    step = compiled_step(model) if compile else step_of_one_token
    token = None
    for _ in range(max_new_tokens):
        too_long = [context for context in contexts if len(context) > window]
        if token is None or too_long:  # nothing is cached, or a row's positions move
            for context in too_long:
                del context[: -(window // 2)]
            logits = cache.prefill(contexts)
        else:
            logits = cache.decode(token, step)
        if not logits.isfinite().all():
            raise UserError(
                "the model's logits are infinite or not a number: try --dtype float32, else "
                "another checkpoint"
            )
        new = choose(logits.float(), **choice)
        if token is not None and stop is not None:
            new = new.masked_fill(token == stop, stop)  # in rows that have ended
        token = new
        for context, t in zip(contexts, token.tolist(), strict=True):
            context.append(t)
        yield token
        if all(context[-1] == stop for context in contexts):
            return


def cut(idx, lengths) -> list:
    """The rows of idx as lists, each cut to its length, if it has one."""
    rows = idx if isinstance(idx, list) else idx.tolist()
    if lengths is None:
        lengths = [None] * len(rows)
    return [row[:n] for row, n in zip(rows, lengths, strict=True)]


def generate(model, idx, max_new_tokens: int, *, lengths=None, stop=None, **sampling):
    """idx (B, T) int64 -> (B, T + n): each row its prompt, its new tokens, then padding.

    The padding is `stop`, or the vocabulary's last token, GPT-2's <|endoftext|>. The arguments are
    those of `stream`.
    """
    tokens = stream(model, idx, max_new_tokens, lengths=lengths, stop=stop, **sampling)
    drawn = torch.stack(list(tokens), 1).tolist()  # (B, n)
    rows = [prompt + new for prompt, new in zip(cut(idx, lengths), drawn, strict=True)]
    return pad(rows, idx.device, model.config.vocab_size - 1 if stop is None else stop)

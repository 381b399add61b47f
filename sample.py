"""Generations from a checkpoint or a pretrained GPT-2.

python sample.py --model log/quickstart/ckpt_000200 --prompt "def "
"""

import codecs
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

from model import GPT
from support.common import UserError, run_script
from support.device import evaluation_mode, free_memory, pick_device, pick_dtype, why_not_compile
from support.generation import pad
from support.tokenizer import EOT, check_vocabulary, encode, get_tokenizer, replace_surrogates

ROWS = 64  # samples that are made together
MOST = 10**9  # samples, tokens of one, bytes of prompts: more is a slip of the finger


@dataclass
class SampleConfig:
    """Continue a prompt with a GPT-2: one of our checkpoints, any Hugging Face GPT-2 directory, or
    a name on the hub.

    One sample is printed as it is made; several are made in one batch and printed one after the
    other.
    """

    # directory, nanoGPT's or build-nanogpt's FILE.pt, or gpt2 | gpt2-medium | gpt2-large | gpt2-xl
    model: str = "gpt2"
    # text to continue; - reads prompts from stdin, @FILE from a file, one a line
    prompt: str = "Hello, I'm a language model,"
    num_samples: int = 1  # continuations of each prompt
    max_new_tokens: int = 100  # tokens to add, at most
    temperature: float = 0.9  # 0 takes the likeliest token each time
    top_k: int = 50  # draw from the k likeliest tokens; 0 = from all
    top_p: float = 1.0  # draw from the likeliest tokens that hold this much probability
    stop: bool = True  # end at <|endoftext|>
    seed: int = 42  # of the draws: the same seed, the same text
    json: bool = False  # print one JSON object a sample: {"prompt": …, "text": …}
    # compile the step of one token: half a minute first, then faster; for long or many generations
    compile: bool = False
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the weights


def load(model: str, device: torch.device, dtype: torch.dtype) -> GPT:
    """A model to generate with: on the device, in evaluation mode, its weights cast to dtype.

    Raises UserError unless it is a GPT-2 with GPT-2's vocabulary.
    """
    gpt = GPT.from_pretrained(model)
    check_vocabulary(model, gpt.config.vocab_size)
    return gpt.to(device, dtype).eval().requires_grad_(False)


def complete(
    model: GPT, prompt: str, num_samples: int, max_new_tokens: int, **sampling
) -> list[str]:
    """`num_samples` continuations of one prompt, each with the prompt; see `complete_all`."""
    prompt = replace_surrogates(prompt)
    texts = complete_all(model, [prompt] * num_samples, max_new_tokens, **sampling)
    return [prompt + text for text in texts]


def complete_all(model: GPT, prompts: list[str], max_new_tokens: int, **sampling) -> list[str]:
    """The continuations of some prompts, made in one batch; the arguments are `stream_texts`'.

    Leaves model.training and the global random state as they were.
    """
    with evaluation_mode(model):
        pieces = list(stream_texts(model, prompts, max_new_tokens, **sampling))
    return ["".join(texts) for texts in zip(*pieces, strict=True)]


def stream_texts(
    model: GPT, prompts: list[str], max_new_tokens: int, *, stop=EOT, **sampling
) -> Iterator[list[str]]:
    """Yields the next piece of each prompt's continuation, token by token up to the token `stop`.

    A token may end inside a character: its bytes wait for the next token. An empty prompt starts
    from <|endoftext|>. sampling: the other arguments of GPT.stream.
    """
    rows = [encode(prompt) or [EOT] for prompt in prompts]
    idx = pad(rows, model.transformer.wte.weight.device)  # (B, T)
    lengths = [len(row) for row in rows]
    spell = get_tokenizer().decode_single_token_bytes
    decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in rows]
    for tokens in model.stream(idx, max_new_tokens, lengths=lengths, stop=stop, **sampling):
        spelled = [b"" if token == stop else spell(token) for token in tokens.tolist()]
        yield [decoder.decode(some) for decoder, some in zip(decoders, spelled, strict=True)]
    yield [decoder.decode(b"", final=True) for decoder in decoders]


# -- the command


def read_prompts(prompt: str) -> list[str]:
    """The prompts that --prompt means. Raises UserError for a source without any."""
    if prompt == "-":
        content = sys.stdin.buffer.read(MOST + 1)
    elif prompt.startswith("@"):
        try:
            with open(prompt[1:], "rb") as file:
                content = file.read(MOST + 1)
        except OSError as error:
            raise UserError(
                f"--prompt {prompt}: {error.strerror}; behind the @ belongs a file that can be "
                "read, with one prompt a line"
            ) from None
    else:
        return [replace_surrogates(prompt)]
    if len(content) > MOST:
        raise UserError(f"--prompt {prompt}: it has more than {MOST:,} bytes, give it in pieces")
    prompts = [line for line in content.decode("utf-8", errors="replace").splitlines() if line]
    if not prompts:
        raise UserError(f"--prompt {prompt}: there is no line to continue, give at least one")
    return prompts


def check_flags(config: SampleConfig) -> None:
    """Raises UserError, which names every flag with an impossible value."""
    problems = []
    if not 1 <= config.num_samples <= MOST:
        problems.append(f"--num-samples {config.num_samples}: from 1 to {MOST:,}")
    if not 1 <= config.max_new_tokens <= MOST:
        problems.append(f"--max-new-tokens {config.max_new_tokens}: from 1 to {MOST:,}")
    if not 0 <= config.temperature < math.inf:
        problems.append(f"--temperature {config.temperature}: 0 (the likeliest token) or above")
    if config.top_k < 0:
        problems.append(f"--top-k {config.top_k}: 0 (all tokens) or more")
    if not 0 < config.top_p <= 1:
        problems.append(f"--top-p {config.top_p}: above 0, at most 1")
    if not 0 <= config.seed < 2**64:
        problems.append(f"--seed {config.seed}: from 0 to 2**64 - 1")
    if problems:
        raise UserError("; ".join(problems) + ": that was expected")


def check_memory(model: GPT, rows: int, prompts: list[str], max_new_tokens: int) -> None:
    """Raises UserError where `rows` samples at a time need more memory than is free."""
    c = model.config
    weight = model.transformer.wte.weight
    T = min(c.block_size, max(len(encode(prompt)) for prompt in prompts) + max_new_tokens)
    # keys and values of each layer; while the prompts are read, two activations of the MLP
    cache = T * (2 * c.n_layer + 2 * 4) * c.n_embd * weight.itemsize
    pieces = 100 * max_new_tokens  # short Python strings
    needed = rows * (cache + pieces)
    free = free_memory(weight.device)
    if free is not None and needed > free:
        raise UserError(
            f"{rows} samples at a time with --max-new-tokens {max_new_tokens} need "
            f"{needed / 1e9:,.1f} GB of memory, {free / 1e9:,.1f} GB is free: ask for fewer"
        )


def main() -> None:
    config = tyro.cli(SampleConfig)
    check_flags(config)
    prompts = read_prompts(config.prompt)
    device = pick_device(config.device)
    problem = why_not_compile(device) if config.compile else ""
    if problem:
        raise UserError(f"--compile: {problem}; leave that flag out")
    dtype, _ = pick_dtype(device, config.dtype)
    model = load(config.model, device, dtype)
    sampling = dict(
        temperature=config.temperature,
        top_k=config.top_k or None,
        top_p=config.top_p if config.top_p < 1 else None,
        stop=EOT if config.stop else None,
        generator=torch.Generator(device).manual_seed(config.seed),
        compile=config.compile,
    )
    total = len(prompts) * config.num_samples
    if total == 1 and not config.json:
        print(prompts[0], end="", flush=True)
        for (text,) in stream_texts(model, prompts, config.max_new_tokens, **sampling):
            print(text, end="", flush=True)
        print()
        return
    check_memory(model, min(total, ROWS), prompts, config.max_new_tokens)
    for start in range(0, total, ROWS):
        numbers = range(start, min(start + ROWS, total))
        batch = [prompts[i // config.num_samples] for i in numbers]
        texts = complete_all(model, batch, config.max_new_tokens, **sampling)
        for i, prompt, text in zip(numbers, batch, texts, strict=True):
            if config.json:
                print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
            else:
                print(f"--- sample {i}\n{prompt}{text}")


if __name__ == "__main__":
    run_script(main)

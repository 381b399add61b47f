"""Generations from a checkpoint or a pretrained GPT-2.

python sample.py --model log/quickstart/ckpt_000200 --prompt "def "
python sample.py --model log/quickstart/ckpt_000200    in a terminal: reads prompts until Ctrl-D
"""

import codecs
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from config import out_of_range, typed
from model import GPT
from support import generation
from support.common import UserError, run_script
from support.device import evaluation_mode, pick_device, pick_dtype, why_not_compile
from support.tokenizer import EOT, check_vocabulary, encode, get_tokenizer, replace_surrogates

ROWS = 64  # samples in a batch


@dataclass
class SampleConfig:
    """Continue a prompt. One sample is printed while it is made, several batch by batch."""

    model: str = "gpt2"  # gpt2 … gpt2-xl, a directory, nanoGPT's or build-nanogpt's FILE.pt
    prompt: str = "Hello, I'm a language model,"  # - (stdin) and @FILE: one per line
    num_samples: int = 1  # continuations of each prompt
    max_new_tokens: int = 100  # tokens to add, at most
    temperature: float = 0.9  # 0 takes the likeliest token each time
    top_k: int = 50  # draw from the k likeliest tokens; 0 = from all
    top_p: float = 1.0  # draw from the likeliest tokens that hold this much probability
    stop: bool = True  # end at <|endoftext|>
    seed: int = 42  # the same seed gives the same text
    json: bool = False  # print one JSON object per sample: {"prompt": …, "text": …}
    compile: bool = False  # takes half a minute, then saves time on each token
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the weights


RANGES = [  # fields, what fits, in words
    ("num_samples max_new_tokens", lambda x: 1 <= x <= 10**6, "from 1 to 1,000,000"),
    ("temperature top_k", lambda x: x >= 0, "0 or more"),
    ("top_p", lambda x: 0 <= x <= 1, "from 0 to 1"),
]


def complete(model, prompt: str, num_samples: int, max_new_tokens: int, **sampling) -> list[str]:
    """`num_samples` texts that begin with the prompt; sampling: as in generation.stream."""
    prompt = replace_surrogates(prompt)
    with evaluation_mode(model):
        pieces = list(stream_texts(model, [prompt] * num_samples, max_new_tokens, **sampling))
    return ["".join([prompt, *texts]) for texts in zip(*pieces, strict=True)]


def stream_texts(model, prompts: list[str], max_new_tokens: int, *, stop=EOT, **sampling):
    """Yields the next piece of each prompt's continuation, up to the token `stop`.

    Bytes of an unfinished character wait for the next token. An empty prompt is <|endoftext|>.
    """
    rows = [encode(prompt) or [EOT] for prompt in prompts]
    spell = get_tokenizer().decode_single_token_bytes
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in rows]
    for tokens in generation.stream(model, rows, max_new_tokens, stop=stop, **sampling):
        spelled = [b"" if token == stop else spell(token) for token in tokens.tolist()]
        yield [decoder.decode(some) for decoder, some in zip(decoders, spelled, strict=True)]
    yield [decoder.decode(b"", final=True) for decoder in decoders]


def read_prompts(prompt: str) -> list[str]:
    """The prompts that --prompt stands for. Raises UserError if there are none."""
    if prompt == "-":
        content = sys.stdin.buffer.read()
    elif prompt.startswith("@"):
        content = Path(prompt[1:]).read_bytes()
    else:
        return [replace_surrogates(prompt)]
    prompts = [line for line in content.decode(errors="replace").splitlines() if line]
    if not prompts:
        raise UserError(f"--prompt {prompt} has no prompts: give one per line")
    return prompts


def print_samples(config: SampleConfig, model, prompts: list[str], sampling: dict) -> None:
    """Prints the continuations of prompts: a single one token by token."""
    rows = [prompt for prompt in prompts for _ in range(config.num_samples)]
    if len(rows) == 1 and not config.json:
        print(rows[0], end="", flush=True)
        for (text,) in stream_texts(model, rows, config.max_new_tokens, **sampling):
            print(text, end="", flush=True)
        print()
        return
    for start in range(0, len(rows), ROWS):
        batch = rows[start : start + ROWS]
        pieces = stream_texts(model, batch, config.max_new_tokens, **sampling)
        for i, (prompt, *texts) in enumerate(zip(batch, *pieces, strict=True), start):
            text = "".join(texts)
            if config.json:
                print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
            else:
                print(f"--- sample {i}\n{prompt}{text}")


def main() -> None:
    config = tyro.cli(SampleConfig)
    if problems := out_of_range(config, RANGES):
        raise UserError("; ".join(problems))
    prompts = read_prompts(config.prompt)
    device = pick_device(config.device)
    if config.compile and (problem := why_not_compile(device)):
        raise UserError(f"--compile: {problem}; leave that flag out")
    model = GPT.from_pretrained(config.model)
    check_vocabulary(config.model, model.config.vocab_size)
    model.to(device, pick_dtype(device, config.dtype)[0]).eval().requires_grad_(False)
    sampling = dict(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        stop=EOT if config.stop else None,
        generator=torch.Generator(device).manual_seed(config.seed % 2**64),
        compile=config.compile,
    )
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if "prompt" in typed(sys.argv[1:]) or not asks:
        print_samples(config, model, prompts, sampling)
        return
    print("Type a prompt and Enter. Ctrl-D ends.")
    with suppress(EOFError):
        while True:
            print_samples(config, model, [input("> ")], sampling)
    print()


if __name__ == "__main__":
    run_script(main)

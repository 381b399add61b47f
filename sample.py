"""Generations from a checkpoint or a pretrained GPT-2.

python sample.py --model log/quickstart/ckpt_001200 --prompt "ROMEO:"
python sample.py --model log/quickstart/ckpt_001200    in a terminal: reads prompts until Ctrl-D
"""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from model import GPT
from support.common import (
    Amount,
    Count,
    Range,
    UsageError,
    UserError,
    parse_flags,
    reading,
    run_script,
)
from support.compile import why_not_compile
from support.device import pick_device, pick_dtype
from support.generation import compile_step, stream_texts
from support.hf import check_vocabulary
from support.tokenizer import replace_surrogates

PROMPT = "Hello, I'm a language model,"
ROWS = 64  # samples in a batch


@dataclass
class SampleConfig:
    """Continues a prompt. A single sample is printed token by token, several batch by batch."""

    model: str = "gpt2"  # gpt2 … gpt2-xl, a directory, nanoGPT's or build-nanogpt's FILE.pt
    prompt: str | None = None  # a text; - (stdin) or @FILE: one per line; default: asks for it
    num_samples: Count = 1  # continuations of each prompt
    max_new_tokens: Count = 100  # tokens to add, at most
    temperature: Amount = 0.9  # 0 always takes the likeliest token
    top_k: Annotated[int, Range(0)] = 50  # draw from the k likeliest tokens; 0 = from all
    # draw only from the likeliest tokens that together have this probability
    top_p: Annotated[float, Range(0, 1)] = 1.0
    stop: bool = True  # end at <|endoftext|>
    seed: int = 42  # the same seed gives the same text
    json: bool = False  # print one JSON object per sample: {"prompt": …, "text": …}
    compile: bool = False  # takes half a minute, then makes each token faster
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the weights


def read_prompts(prompt: str) -> list[str]:
    """The prompts that --prompt stands for. Raises UserError if there are none."""
    if prompt == "-":
        lines = sys.stdin.buffer.readlines()
    elif prompt.startswith("@"):
        with reading(prompt[1:]), open(prompt[1:], "rb") as file:
            lines = file.readlines()
    else:
        return [replace_surrogates(prompt)]
    if not lines:
        raise UserError(f"--prompt {prompt} has no prompts: give one per line")
    return [line.rstrip(b"\r\n").decode(errors="replace") for line in lines]


def print_samples(config: SampleConfig, model: GPT, prompts: list[str], **options: Any) -> None:
    """Prints the continuations of prompts: a single one token by token."""
    rows = [prompt for prompt in prompts for _ in range(config.num_samples)]
    if len(rows) == 1 and not config.json:
        for (text,) in stream_texts(model, rows, config.max_new_tokens, **options):
            print(text, end="", flush=True)
        print()
        return
    for start in range(0, len(rows), ROWS):
        pieces = stream_texts(model, rows[start : start + ROWS], config.max_new_tokens, **options)
        for i, (prompt, *texts) in enumerate(zip(*pieces, strict=True), start):
            text = "".join(texts)
            if config.json:
                print(json.dumps(dict(prompt=prompt, text=text), ensure_ascii=False))
            else:
                print(f"--- sample {i}\n{prompt}{text}")


def main(args: list[str]) -> None:
    config = parse_flags(SampleConfig, args)
    ask = config.prompt is None and sys.stdin.isatty() and sys.stdout.isatty()
    prompts = read_prompts(PROMPT if config.prompt is None else config.prompt)
    device = pick_device(config.device)
    if config.compile and (reason := why_not_compile(device)):
        raise UsageError(f"--compile: {reason}; leave that flag out")
    model = GPT.from_pretrained(config.model)
    check_vocabulary(config.model, model)
    model.to(device, pick_dtype(device, config.dtype)[0]).eval().requires_grad_(False)
    if config.compile:
        compile_step(model)
    options = dict(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        stop=config.stop,
        generator=torch.Generator(device).manual_seed(config.seed % 2**64),
    )
    if ask:
        print("Type a prompt and Enter. Ctrl-D ends.")
        with suppress(EOFError):
            while True:
                print_samples(config, model, [input("> ")], **options)
        print()
    else:
        print_samples(config, model, prompts, **options)


if __name__ == "__main__":
    run_script(main)

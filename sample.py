"""Generations from a checkpoint or a pretrained GPT-2.

python sample.py                  five short samples of the newest checkpoint below log/, else gpt2
python sample.py --interactive                             asks for prompts
python sample.py --model log/quickstart/ckpt_000960 --prompt "ROMEO:"
"""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from model import GPT
from support.base.console import run_script
from support.base.errors import UsageError, UserError, reading
from support.base.flags import Amount, CountOrZero, Dtype, Range, parse_flags
from support.machine.compile import why_not_compile
from support.machine.device import pick_device, pick_dtype
from support.run.checkpoint import newest_checkpoint
from support.run.log import METRICS, read_metrics, starts_of
from support.text.tokenizer import replace_surrogates
from support.weights.generation import compile_step, stream_texts
from support.weights.hf import check_vocabulary

PROMPT = "Hello, I'm a language model,"
ROWS = 64  # samples in a batch


@dataclass(frozen=True)
class SampleConfig:
    """Continues a prompt. A single sample is printed token by token, several batch by batch."""

    # gpt2 … gpt2-xl, a directory, nanoGPT's or build-nanogpt's FILE.pt; default: the newest
    # checkpoint below log/ if there is one and no --prompt, else gpt2
    model: str = ""
    prompt: str | None = None  # a text; - (stdin) or @FILE: one per line; default: the run's own
    interactive: bool = False  # asks for prompts until Ctrl-D
    num_samples: CountOrZero = 0  # continuations of each prompt; 0 = 1, or 5 of the run's own
    max_new_tokens: CountOrZero = 0  # tokens to add, at most; 0 = 100, or 30 after the run's own
    temperature: Amount = 0.9  # 0 always takes the likeliest token
    top_k: Annotated[int, Range(0)] = 50  # draw from the k likeliest tokens; 0 = from all
    # draw only from the likeliest tokens that together have this probability
    top_p: Annotated[float, Range(0, 1)] = 1.0
    stop: bool = True  # end at <|endoftext|>
    seed: int = 42  # the same seed gives the same text
    json: bool = False  # print one JSON object per sample: {"prompt": …, "text": …}
    compile: bool = False  # takes half a minute, then makes each token faster
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Dtype = "auto"  # of the weights


def read_prompts(prompt: str) -> list[str]:
    """The prompts that --prompt stands for. Raises UserError if there are none."""
    if prompt == "-":
        data = sys.stdin.buffer.read()
    elif prompt.startswith("@"):
        with reading(prompt[1:]):
            data = Path(prompt[1:]).read_bytes()
    else:
        return [replace_surrogates(prompt)]
    if not data:
        raise UserError(f"--prompt {prompt} has no prompts: give one per line")
    text = data.decode(json.detect_encoding(data), "replace")  # Windows also writes UTF-16
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]


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


def own_prompt(model: str) -> str:
    """What the run continued whose checkpoint this is; of other models, the trainer's default."""
    starts = starts_of(read_metrics(Path(model).parent / METRICS, updates=False))
    return starts[-1]["config"].get("sample_prompt", PROMPT) if starts else PROMPT


def fill_in(config: SampleConfig) -> SampleConfig:
    """The settings with what was left open: without a prompt, as the run had its own samples."""
    is_bare = config.prompt is None and not config.interactive
    model = config.model
    if not model and config.prompt is None:
        model = str(newest_checkpoint() or "gpt2")
        print(f"model: {model}", file=sys.stderr)
    return replace(
        config,
        model=model or "gpt2",
        num_samples=config.num_samples or (5 if is_bare and config.temperature else 1),
        max_new_tokens=config.max_new_tokens or (30 if is_bare else 100),
    )


def main(args: list[str]) -> None:
    config = parse_flags(SampleConfig, args)
    if config.interactive and config.prompt is not None:
        raise UsageError("--interactive asks for prompts: leave --prompt out")
    config = fill_in(config)
    prompts = [] if config.prompt is None else read_prompts(config.prompt)
    if not prompts and not config.interactive:
        prompts = [own_prompt(config.model)]
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
    if config.interactive:
        print("Type a prompt and Enter. Ctrl-D ends.")
        with suppress(EOFError):
            while True:
                print_samples(config, model, [input("> ")], **options)
        print()
    else:
        print_samples(config, model, prompts, **options)


if __name__ == "__main__":
    run_script(main)

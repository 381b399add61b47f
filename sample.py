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

from config import TrainConfig
from model import GPT
from support.base.console import run_script
from support.base.errors import UsageError, UserError, reading
from support.base.flags import Amount, CountOrZero, Dtype, Range, String, parse_flags
from support.machine.compile import why_not_compile
from support.machine.device import pick_device, pick_dtype
from support.run.checkpoint import newest_checkpoint
from support.run.log import METRICS, read_metrics, starts_of
from support.text.tokenizer import replace_surrogates
from support.weights.generation import compile_step, stream_texts
from support.weights.hf import check_vocabulary

PROMPT = TrainConfig.sample_prompt
ROWS = 64  # samples in a batch


@dataclass(frozen=True)
class SampleConfig:
    """Continues a prompt. A single sample is printed token by token, several batch by batch."""

    # gpt2 … gpt2-xl, a directory, nanoGPT's or build-nanogpt's FILE.pt; default: the newest
    # checkpoint below log/ if there is one, else gpt2
    model: String = ""
    prompt: str | None = None  # a text; - (stdin) or @FILE: one per line; default: the run's own
    interactive: bool = False  # asks for prompts until Ctrl-D
    num_samples: CountOrZero = 0  # continuations of each prompt; 0 = 1, or 5 of the run's own
    # tokens to add, at most; 0 = 100, or after the run's own prompt as many as in its samples, up
    # to the end of a line
    max_new_tokens: CountOrZero = 0
    temperature: Amount = 0.9  # 0 always takes the likeliest token
    top_k: Annotated[int, Range(0)] = 50  # draw from the k likeliest tokens; 0 = from all
    # draw only from the likeliest tokens that together have this probability
    top_p: Annotated[float, Range(0, 1)] = 1.0
    stop: bool = True  # end at <|endoftext|>
    seed: int = 42  # with the same prompts and number of samples, it gives the same texts
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


def print_samples(
    config: SampleConfig, model: GPT, prompts: list[str], cut: bool = False, **options: Any
) -> None:
    """Prints the continuations of prompts: a single one token by token. cut: as `whole_lines`."""
    rows = [prompt for prompt in prompts for _ in range(config.num_samples)]
    if len(rows) == 1 and not config.json and not cut:
        for (text,) in stream_texts(model, rows, config.max_new_tokens, **options):
            print(text, end="", flush=True)
        print()
        return
    for start in range(0, len(rows), ROWS):
        pieces = stream_texts(model, rows[start : start + ROWS], config.max_new_tokens, **options)
        for i, (prompt, *texts) in enumerate(zip(*pieces, strict=True), start):
            text = "".join(texts)
            text = whole_lines(text) if cut else text
            if config.json:
                print(json.dumps(dict(prompt=prompt, text=text), ensure_ascii=False))
            else:
                print(f"--- sample {i}\n{prompt}{text}")


def whole_lines(text: str) -> str:
    """A text without the line that it leaves unfinished; of a single line, without the word."""
    lines = text.rpartition("\n")[0].rstrip("\n")
    return lines or text.rpartition(" ")[0] or text


def own_samples(model: str) -> tuple[str, int]:
    """The prompt and the tokens of samples by the run of a checkpoint; else the trainer's own."""
    starts = starts_of(read_metrics(Path(model).parent / METRICS, updates=False))
    config = starts[-1]["config"] if starts else {}
    prompt = config.get("sample_prompt", PROMPT)
    return prompt, config.get("sample_tokens", TrainConfig.sample_tokens)


def pick_model() -> str:
    """The newest checkpoint, else GPT-2, and says so."""
    if newest := newest_checkpoint():
        print(f"model: {newest}", file=sys.stderr)
        return str(newest)
    reason = "log/ has no checkpoint (make quickstart trains one)"
    print(f"model: gpt2, because {reason}", file=sys.stderr)
    return "gpt2"


def main(args: list[str]) -> None:
    config = parse_flags(SampleConfig, args)
    if config.interactive and config.prompt is not None:
        raise UsageError("--interactive asks for prompts: leave --prompt out")
    config = replace(config, model=config.model or pick_model())
    is_bare = config.prompt is None and not config.interactive
    cut = is_bare and not config.max_new_tokens
    prompts, tokens = [], 100
    if is_bare:
        prompt, tokens = own_samples(config.model)
        prompts = [prompt]
    elif config.prompt is not None:
        prompts = read_prompts(config.prompt)
    config = replace(
        config,
        num_samples=config.num_samples or (5 if is_bare and config.temperature else 1),
        max_new_tokens=config.max_new_tokens or tokens,
    )
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
        print_samples(config, model, prompts, cut, **options)


if __name__ == "__main__":
    run_script(main)

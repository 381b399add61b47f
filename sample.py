"""Generations from a checkpoint or a pretrained GPT-2: python sample.py --model log/quickstart/ckpt_000150 --prompt "def "."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from distributed import pick_device
from model import GPT, pick_dtype
from tokenizer import EOT, VOCAB_SIZE, UserError, get_tokenizer, run_script


@dataclass
class SampleConfig:
    """Continue a prompt with a GPT-2: one of our checkpoints, any Hugging Face GPT-2 directory, or a name on the hub.

    One sample is printed as it is made; several are made in one batch and printed one after the other.
    """

    model: str = "gpt2"  # directory, nanoGPT's or build-nanogpt's FILE.pt, or gpt2 | gpt2-medium | gpt2-large | gpt2-xl
    prompt: str = "Hello, I'm a language model,"  # text to continue; - reads prompts from stdin, @FILE from a file, one a line
    num_samples: int = 1  # continuations of each prompt
    max_new_tokens: int = 100  # tokens to add, at most
    temperature: float = 0.9  # 0 takes the likeliest token each time
    top_k: int = 50  # draw from the k likeliest tokens; 0 = from all
    top_p: float = 1.0  # draw from the likeliest tokens that hold this much probability
    stop: bool = True  # end at <|endoftext|>
    seed: int = 42  # of the draws: the same seed, the same text
    json: bool = False  # print one JSON object a sample: {"prompt": …, "text": …}
    compile: bool = False  # compile the step of one token: half a minute first, then faster; for long or many generations
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: str = "auto"  # of the weights: auto | float32 | bfloat16 | float16


def load(model: str, device: torch.device, dtype: torch.dtype) -> GPT:
    """A model ready to generate: on the device, in evaluation mode, its weights cast once."""
    gpt = GPT.from_pretrained(model)
    if gpt.config.vocab_size != VOCAB_SIZE:
        raise UserError(f"{model} has a vocabulary of {gpt.config.vocab_size}: its tokens are not GPT-2's, text needs those")
    return gpt.to(device, dtype).eval().requires_grad_(False)


def complete(model: GPT, prompt: str, num_samples: int, max_new_tokens: int, **sampling) -> list[str]:
    """`num_samples` continuations of a prompt, each with the prompt; otherwise `complete_all`."""
    return [prompt + text for text in complete_all(model, [prompt] * num_samples, max_new_tokens, **sampling)]


def complete_all(model: GPT, prompts: list[str], max_new_tokens: int, *, stop=EOT, **sampling) -> list[str]:
    """The continuation of each prompt, up to `stop`, all made in one batch; `sampling` as in GPT.stream.

    Leaves model.training and the global random state as they were. An empty prompt starts from <|endoftext|>.
    """
    encoder, was_training = get_tokenizer(), model.training
    rows = [encoder.encode_ordinary(prompt) or [EOT] for prompt in prompts]
    lengths, device = [len(row) for row in rows], model.transformer.wte.weight.device
    idx = torch.tensor([row + [EOT] * (max(lengths) - len(row)) for row in rows], device=device)
    model.eval()
    try:
        new = list(model.stream(idx, max_new_tokens, lengths=lengths, stop=stop, **sampling))
    finally:
        model.train(was_training)
    texts = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in torch.stack(new, 1).tolist()]
    return [encoder.decode(tokens) for tokens in texts]


def write_stream(model: GPT, prompt: str, max_new_tokens: int, *, stop=EOT, **sampling) -> None:
    """Prints one continuation as it is made; bytes that do not yet make a character wait for the next token."""
    encoder, device = get_tokenizer(), model.transformer.wte.weight.device
    idx = torch.tensor([encoder.encode_ordinary(prompt) or [EOT]], device=device)
    print(prompt, end="", flush=True)
    waiting = b""
    for token in model.stream(idx, max_new_tokens, stop=stop, **sampling):
        if token.item() == stop:
            break
        waiting += encoder.decode_single_token_bytes(token.item())
        text = waiting.decode("utf-8", errors="ignore")
        if text.encode() == waiting or len(waiting) > 16:  # whole characters, or bytes that never will be
            print(waiting.decode("utf-8", errors="replace"), end="", flush=True)
            waiting = b""
    print(waiting.decode("utf-8", errors="replace"))


def read_prompts(prompt: str) -> list[str]:
    """The prompts that --prompt means. Raises UserError for a source without any."""
    if prompt != "-" and not prompt.startswith("@"):
        return [prompt]
    source = sys.stdin.buffer.read() if prompt == "-" else Path(prompt[1:]).read_bytes()
    prompts = [line for line in source.decode("utf-8", errors="replace").splitlines() if line]
    if not prompts:
        raise UserError(f"--prompt {prompt}: there is no line to continue")
    return prompts


def check(config: SampleConfig) -> None:
    """Raises UserError that names every value that cannot be."""
    problems = [
        (config.num_samples < 1, f"--num-samples {config.num_samples}: at least 1"),
        (config.max_new_tokens < 1, f"--max-new-tokens {config.max_new_tokens}: at least 1"),
        (config.temperature < 0, f"--temperature {config.temperature}: 0 (the likeliest token) or more"),
        (config.top_k < 0, f"--top-k {config.top_k}: 0 (all tokens) or more"),
        (not 0 < config.top_p <= 1, f"--top-p {config.top_p}: above 0, at most 1"),
        (
            config.dtype not in ("auto", "float32", "bfloat16", "float16"),
            f"--dtype {config.dtype}: auto | float32 | bfloat16 | float16",
        ),
    ]
    if wrong := [text for is_wrong, text in problems if is_wrong]:
        raise UserError("; ".join(wrong))


def main() -> None:
    config = tyro.cli(SampleConfig)
    check(config)
    prompts = [prompt for prompt in read_prompts(config.prompt) for _ in range(config.num_samples)]
    device = pick_device(config.device)
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
    if len(prompts) == 1 and not config.json:
        return write_stream(model, prompts[0], config.max_new_tokens, **sampling)
    for start in range(0, len(prompts), 64):  # their caches share the memory
        some = prompts[start : start + 64]
        for i, text in enumerate(complete_all(model, some, config.max_new_tokens, **sampling)):
            sample = dict(prompt=some[i], text=text)
            print(json.dumps(sample, ensure_ascii=False) if config.json else f"--- sample {start + i}\n{some[i]}{text}")


if __name__ == "__main__":
    run_script(main)

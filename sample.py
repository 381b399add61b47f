"""Generations from a checkpoint or a pretrained GPT-2: python sample.py --model log/quickstart/ckpt_000300 --prompt "def "."""

from dataclasses import dataclass

import torch
import tyro

from distributed import pick_device
from model import GPT, pick_dtype
from tokenizer import EOT, UserError, get_tokenizer, run_script


@dataclass
class SampleConfig:
    """Continue a prompt with a GPT-2: one of our checkpoints, any Hugging Face GPT-2 directory, or a name on the hub.

    One sample is printed as it is made; several are made together and printed one after the other.
    """

    model: str = "gpt2"  # directory, or gpt2 | gpt2-medium | gpt2-large | gpt2-xl
    prompt: str = "Hello, I'm a language model,"  # text to continue
    num_samples: int = 1  # continuations, made in one batch
    max_new_tokens: int = 100  # tokens to add, at most
    temperature: float = 0.9  # 0 takes the likeliest token each time
    top_k: int = 50  # draw from the k likeliest tokens; 0 = from all
    top_p: float = 1.0  # draw from the likeliest tokens that hold this much probability
    stop: bool = True  # end at <|endoftext|>
    seed: int = 42
    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16


def load(name_or_dir: str, device: torch.device, dtype: torch.dtype) -> GPT:
    """A model ready to generate: on the device, in evaluation mode, its weights cast once."""
    return GPT.from_pretrained(name_or_dir).to(device, dtype).eval().requires_grad_(False)


def complete(model: GPT, prompt: str, num_samples: int, max_new_tokens: int, *, stop=EOT, **sampling) -> list[str]:
    """`num_samples` continuations of a prompt, in one batch, each with the prompt; `sampling` as in GPT.stream.

    Leaves model.training and the global random state as they were. An empty prompt starts from <|endoftext|>.
    """
    encoder, was_training = get_tokenizer(), model.training
    tokens = encoder.encode_ordinary(prompt) or [EOT]
    idx = torch.tensor([tokens] * num_samples, device=model.transformer.wte.weight.device)
    model.eval()
    try:
        rows = model.generate(idx, max_new_tokens, stop=stop, **sampling).tolist()
    finally:
        model.train(was_training)
    ends = [row.index(stop, len(tokens)) if stop in row[len(tokens) :] else len(row) for row in rows]
    return [prompt + encoder.decode(row[len(tokens) : end]) for row, end in zip(rows, ends, strict=True)]


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
    device = pick_device(config.device)
    dtype, _ = pick_dtype(device, config.dtype)
    model = load(config.model, device, dtype)
    sampling = dict(
        temperature=config.temperature,
        top_k=config.top_k or None,
        top_p=config.top_p if config.top_p < 1 else None,
        stop=EOT if config.stop else None,
        generator=torch.Generator(device).manual_seed(config.seed),
    )
    if config.num_samples == 1:
        return write_stream(model, config.prompt, config.max_new_tokens, **sampling)
    for i, text in enumerate(complete(model, config.prompt, config.num_samples, config.max_new_tokens, **sampling)):
        print(f"--- sample {i}\n{text}")


if __name__ == "__main__":
    run_script(main)

"""hellaswag.evaluate against the loop that scores one example at a time, in turns on a random-weight GPT-2.

python benchmarks/hellaswag_bench.py --path ../shared/data/hellaswag_val_1000.jsonl   (prints a table, then one JSON line)
"""

import json
import random
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hellaswag
from distributed import pick_device
from model import GPT, SIZES, GPTConfig, autocast, pick_dtype
from tokenizer import run_script


@dataclass
class BenchConfig:
    """Both sides in turn on one small chunk of a random sample after the other, so that a busy machine disturbs both alike."""

    path: str = ""  # a jsonl file; empty = download it
    sample: int = 200  # examples, drawn at random: the first ones of the file are short, and flatter the ratio
    chunk: int = 20  # examples at a time
    size: str = "gpt2"  # gpt2 | gpt2-medium | gpt2-large | gpt2-xl
    device: str = "auto"
    dtype: str = "bfloat16"  # auto | float32 | bfloat16 | float16
    tokens_per_batch: int = 0  # 0 = evaluate's own choice
    only: str = ""  # batched | loop: one side alone, for its peak memory


@torch.no_grad()
def one_at_a_time(model: GPT, examples: list[dict], device: torch.device, dtype: torch.dtype) -> int:
    """build-nanogpt's loop: 4 padded rows and all of their logits, per example; -> the number right by mean loss."""
    correct = 0
    for example in examples:
        tokens, mask, label = hellaswag.render_example(example)
        tokens, mask = tokens.to(device), mask.to(device)
        with autocast(device, dtype):
            logits, _ = model(tokens)
        shifted, targets = logits[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        losses = F.cross_entropy(shifted.flatten(0, 1), targets.flatten(), reduction="none").view(4, -1)
        weights = mask[:, 1:].contiguous()
        correct += int(((losses * weights).sum(1) / weights.sum(1)).argmin()) == label
    return correct


def main() -> None:
    config = tyro.cli(BenchConfig)
    device = pick_device(config.device)
    dtype, _ = pick_dtype(device, config.dtype)
    examples = random.Random(0).sample(list(hellaswag.iterate_examples("val", config.path)), config.sample)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES[config.size])).to(device).eval()

    def batched(chunk: list[dict]) -> int:
        options = dict(dtype=dtype, tokens_per_batch=config.tokens_per_batch)
        return hellaswag.evaluate(model, chunk, device, **options)["num_correct_norm"]

    sides = {"loop": lambda chunk: one_at_a_time(model, chunk, device, dtype), "batched": batched}
    sides = {name: run for name, run in sides.items() if config.only in ("", name)}
    for run in sides.values():
        run(examples[:2])  # warm up
    seconds, correct = {name: [] for name in sides}, dict.fromkeys(sides, 0)
    for i in range(0, len(examples), config.chunk):
        for name, run in sides.items():
            start = time.perf_counter()
            correct[name] += run(examples[i : i + config.chunk])
            seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        print(f"{name:8} {1000 * sum(times) / len(examples):7.1f} ms an example, {correct[name]}/{len(examples)} right")
    ratios = sorted(a / b for a, b in zip(*seconds.values(), strict=True)) if len(seconds) == 2 else []
    if ratios:
        whole = sum(seconds["loop"]) / sum(seconds["batched"])
        print(
            f"ratio {whole:.2f} over all; by chunk {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}"
        )
    on_cpu = device.type == "cpu"  # ru_maxrss is in KiB on Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if on_cpu else torch.cuda.max_memory_allocated()
    record = dict(
        config=vars(config), threads=torch.get_num_threads(), torch=torch.__version__, seconds=seconds, peak_bytes=peak
    )
    print(json.dumps(record | dict(ratios=ratios, correct=correct)))


if __name__ == "__main__":
    run_script(main)

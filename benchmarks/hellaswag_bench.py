"""hellaswag.evaluate against the loop that scores one example at a time, in alternating runs on a random-weight GPT-2.

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
    """Medians of alternating runs over the same random sample of examples."""

    path: str = ""  # a jsonl file; empty = download it
    sample: int = 200  # examples, drawn at random: the first ones of the file are short, and flatter the ratio
    runs: int = 3  # of each
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

    def batched() -> int:
        options = dict(dtype=dtype, tokens_per_batch=config.tokens_per_batch)
        return hellaswag.evaluate(model, examples, device, **options)["num_correct_norm"]

    sides = {"loop": lambda: one_at_a_time(model, examples, device, dtype), "batched": batched}
    sides = {name: run for name, run in sides.items() if config.only in ("", name)}
    seconds, correct = {name: [] for name in sides}, {}
    hellaswag.evaluate(model, examples[:8], device, dtype=dtype)  # warm up
    one_at_a_time(model, examples[:2], device, dtype)
    for _ in range(config.runs):
        for name, run in sides.items():
            start = time.perf_counter()
            correct[name] = run()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        runs = ", ".join(f"{t:.1f}" for t in seconds[name])
        print(f"{name:8} {1000 * median / len(examples):7.1f} ms an example, {correct[name]}/{len(examples)} right ({runs} s)")
    if len(medians) == 2:
        print(f"ratio {medians['loop'] / medians['batched']:.2f}")
    on_cpu = device.type == "cpu"  # ru_maxrss is in KiB on Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if on_cpu else torch.cuda.max_memory_allocated()
    record = dict(
        config=vars(config), threads=torch.get_num_threads(), torch=torch.__version__, seconds=seconds, peak_bytes=peak
    )
    print(json.dumps(record | dict(medians=medians, correct=correct)))


if __name__ == "__main__":
    run_script(main)

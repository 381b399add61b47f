"""GPT.generate, eager and compiled, against transformers and against the loop that reads the whole prefix for each token.

python benchmarks/generate_bench.py --batch 4   (alternating runs on a random-weight GPT-2; a table, then one JSON line)
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from distributed import pick_device
from model import GPT, SIZES, GPTConfig, choose, pick_dtype
from tokenizer import EOT, run_script


@dataclass
class BenchConfig:
    """Medians of alternating runs of one batch of generations."""

    batch: int = 1  # prompts
    prompt: int = 8  # tokens of each
    new: int = 128  # tokens to add to each
    runs: int = 3  # of each side; the loop runs once
    sides: list[Literal["transformers", "eager", "compiled", "loop"]] = field(
        default_factory=lambda: ["transformers", "eager", "compiled"]
    )
    size: str = "gpt2"  # gpt2 | gpt2-medium | gpt2-large | gpt2-xl
    device: str = "auto"
    dtype: str = "bfloat16"  # auto | float32 | bfloat16 | float16


@torch.no_grad()
def whole_prefix(model: GPT, idx: torch.Tensor, n: int) -> torch.Tensor:
    """The loop of nanoGPT and build-nanogpt: no cache, the logits of all positions."""
    for _ in range(n):
        logits, _ = model(idx)
        idx = torch.cat([idx, choose(logits[:, -1].float(), 0.9, 50, None)[:, None]], 1)
    return idx


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second at which this device reads memory: the best of ten sums over 1 GiB."""
    x, best = torch.ones(2**28, device=device), 0.0
    for _ in range(10):
        start = time.perf_counter()
        x.sum().item()
        best = max(best, x.nbytes / (time.perf_counter() - start))
    return best


def main() -> None:
    config = tyro.cli(BenchConfig)
    device = pick_device(config.device)
    dtype, _ = pick_dtype(device, config.dtype)
    torch.manual_seed(0)
    ours = GPT(GPTConfig(**SIZES[config.size]))
    with tempfile.TemporaryDirectory() as directory:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        ours.save_pretrained(directory)
        theirs = transformers.GPT2LMHeadModel.from_pretrained(directory, dtype=dtype).to(device).eval()
    ours = ours.to(device, dtype).eval().requires_grad_(False)
    idx = torch.randint(0, EOT, (config.batch, config.prompt), device=device)
    sampling = dict(do_sample=True, temperature=0.9, top_k=50, top_p=1.0, pad_token_id=EOT)
    sides = dict(
        transformers=lambda n: theirs.generate(
            idx, attention_mask=torch.ones_like(idx), max_new_tokens=n, min_new_tokens=n, **sampling
        ),
        eager=lambda n: ours.generate(idx, n, temperature=0.9, top_k=50),
        compiled=lambda n: ours.generate(idx, n, temperature=0.9, top_k=50, compile=True),
        loop=lambda n: whole_prefix(ours, idx, n),
    )
    sides = {name: sides[name] for name in config.sides}
    warm_up = {}
    for name, run in sides.items():
        start = time.perf_counter()
        run(config.new if name == "compiled" else 4)  # a cache of another size would be compiled anew
        warm_up[name] = time.perf_counter() - start
    rates: dict[str, list[float]] = {name: [] for name in sides}
    bandwidth = 0.0
    for i in range(config.runs):
        bandwidth = max(bandwidth, read_bandwidth(device))
        for name, run in sides.items():
            if name == "loop" and i:
                continue
            start = time.perf_counter()
            assert run(config.new).shape == (config.batch, config.prompt + config.new)
            rates[name].append(config.batch * config.new / (time.perf_counter() - start))
    weights = ours.num_params() * dtype.itemsize
    limit = config.batch * bandwidth / weights  # every weight is read once for each new token of the batch
    print(
        f"{config.batch} × {config.new} tokens, {dtype}; memory reads {bandwidth / 1e9:.1f} GB/s: at most {limit:.0f} tokens/s"
    )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, median in medians.items():
        versus = "".join(f", {median / medians[o]:.2f} × {o}" for o in ("transformers", "loop") if o in medians and o != name)
        runs = ", ".join(f"{rate:.1f}" for rate in rates[name])
        print(f"{name:12} {median:6.1f} tokens/s ({runs}), {median / limit:.2f} of the limit{versus}")
    if "compiled" in warm_up:
        print(f"compiling took {warm_up['compiled']:.0f} s, apart")
    print(json.dumps(dict(config=vars(config), rates=rates, medians=medians, bandwidth=bandwidth, warm_up_seconds=warm_up)))


if __name__ == "__main__":
    run_script(main)

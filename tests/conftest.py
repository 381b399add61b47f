"""What the tests share: a small deterministic corpus, a tiny model, and the scripts run as a user runs them."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from model import GPT, GPTConfig
from tokenizer import EOT

settings.register_profile("here", deadline=None, derandomize=True, max_examples=50)  # the same examples in every run
settings.load_profile("here")

ROOT = Path(__file__).parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"

# a training run of a second or two: tiny model, float32, eager, nothing on the way
TINY = [
    *("--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--sequence-length", "16", "--batch-size", "2"),
    *("--total-batch-size", "64", "--max-steps", "6", "--warmup-steps", "2", "--learning-rate", "0.01"),
    *("--val-every", "0", "--hellaswag-every", "0", "--sample-every", "0", "--checkpoint-every", "0"),
    *("--dtype", "float32", "--no-compile", "--device", "cpu"),
]


def write_shard(path: Path, tokens) -> np.ndarray:
    tokens = np.asarray(tokens, np.uint16)
    np.save(path, tokens)
    return tokens


def documents(num_tokens: int, seed: int, vocab: int = 300) -> np.ndarray:
    """Random documents of 1 to 40 tokens, each starting with <|endoftext|>, with some structure to learn."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, num_tokens) // rng.integers(1, 30, num_tokens)
    tokens[np.cumsum(rng.integers(1, 40, num_tokens)) % num_tokens] = EOT
    tokens[0] = EOT
    return tokens.astype(np.uint16)


@pytest.fixture
def shards(tmp_path) -> Path:
    """A directory with one validation shard and three training shards of different lengths."""
    directory = tmp_path / "shards"
    directory.mkdir()
    write_shard(directory / "toy_val_000000.npy", documents(700, seed=0))
    for i, n in enumerate((1000, 333, 777), start=1):
        write_shard(directory / f"toy_train_{i:06d}.npy", documents(n, seed=i))
    return directory


@pytest.fixture
def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=32, n_layer=2, n_head=2, n_embd=32))


def random_model(**shape) -> GPT:
    """A tiny model whose biases and layer norms are random too, so that nothing hides behind a zero or a one."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**{**dict(block_size=24, n_layer=2, n_head=2, n_embd=16), **shape}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            rows = model.config.vocab_size if name == "transformer.wte.weight" else len(p)
            p[:rows] += 0.1 * torch.randn_like(p[:rows])
    return model


def environment(**extra) -> dict:
    """The environment without what torchrun or an outer run left in it; one thread, so that tests may run beside each other."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return {**inherited, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **extra}


def command(script: str, *args, ranks: int = 1) -> list[str]:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, str(ROOT / script), *map(str, args)]


def run_script(script: str, *args, ranks: int = 1, cwd=None, expect: int = 0, **extra) -> subprocess.CompletedProcess:
    """Runs one of the scripts; fails, with what it printed, if the exit code is not the expected one."""
    done = subprocess.run(
        command(script, *args, ranks=ranks),
        cwd=cwd or ROOT,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=900,  # many times what any takes, even on a busy machine
    )
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def losses(log_dir: Path) -> list[float]:
    """The training loss of each step; fails if one is missing or there twice."""
    records = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [(r["step"], r["loss"]) for r in records if r["type"] == "train"]
    assert [s for s, _ in steps] == list(range(len(steps)))
    return [loss for _, loss in steps]


def weights_hash(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()

"""Does a change compute the same? One hash for each thing that two revisions must have in
common, to the last bit.

    python tests/same_bits.py                   the hashes of this checkout, as JSON
    python tests/same_bits.py ../before .       two checkouts side by side; exit 1 where they differ

Each checkout takes about five minutes on two cores. It calls only what README.md and the
docstrings promise: the command lines, and `GPT` and `score`. Times, printed words and the version
of the training state may differ; losses, tokens, weights and shards may not.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

# a model and a batch that take a second; every run is compared over 20 updates
SMALL = [
    "--n-layer=3",
    "--n-head=2",
    "--n-embd=32",
    "--sequence-length=64",
    "--batch-size=2",
    "--total-batch-size=512",
    "--max-steps=20",
    "--warmup-steps=5",
    "--learning-rate=0.01",
    "--val-every=10",
    "--val-tokens=2048",
    "--sample-every=10",
    "--sample-tokens=16",
    "--hellaswag-every=0",
    "--checkpoint-every=10",
    "--dtype=float32",
    "--device=cpu",
    "--no-compile",
]
QUICKSTART = [
    "--preset=quickstart",
    "--max-steps=20",
    "--warmup-steps=5",
    "--val-every=10",
    "--val-tokens=4096",
    "--sample-every=0",
    "--hellaswag-every=0",
    "--checkpoint-every=20",
    "--dtype=float32",
    "--device=cpu",
]
RUNS = {  # name: flags, number of processes
    "quickstart, eager": ([*QUICKSTART, "--no-compile"], 1),
    "quickstart, compiled": (QUICKSTART, 1),
    "adamw": ([*SMALL, "--optimizer=adamw"], 1),
    "muon": ([*SMALL, "--optimizer=muon"], 1),
    "activation checkpointing": ([*SMALL, "--activation-checkpointing"], 1),
    "bfloat16": ([*SMALL, "--dtype=bfloat16"], 1),
    "2 ranks, ddp": ([*SMALL, "--optimizer=muon"], 2),
    "2 ranks, zero1": ([*SMALL, "--sharding=zero1"], 2),
    "2 ranks, fsdp": ([*SMALL, "--sharding=fsdp"], 2),
}
LANGUAGES = [
    "the of and to in",
    "für über weiß größer Öl",
    "これは テスト です 。",
    "def return self. == 0x7f",
    "😀 🎉 \t\n",
]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def made_up_text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(draw.choice(LANGUAGES).split(" ")) for _ in range(words))


def write_corpus(path: Path) -> None:
    """The fixed jsonl: 600 documents of 1 to 800 words in several scripts."""
    draw = random.Random(0)
    documents = [{"text": made_up_text(draw, draw.randint(1, 800))} for _ in range(600)]
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def run(repo: Path, script: str, *flags, processes: int = 1) -> None:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [*launcher, str(repo / script), *map(str, flags)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(f"{script} {' '.join(map(str, flags))}\n{done.stdout}\n{done.stderr}")


def hashes_of_run(log_dir: Path) -> dict[str, str]:
    """The losses and norms of all steps, the samples, and the weights of every checkpoint."""
    records = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    kept = ("type", "step", "loss", "norm", "lr", "val_loss", "samples")
    told = [
        {key: r[key] for key in kept if key in r}
        for r in records
        if r["type"] not in ("run", "resume")
    ]
    hashes = {
        "metrics": sha256(json.dumps(told).encode()),
        "log.txt": sha256((log_dir / "log.txt").read_bytes()),
    }
    for checkpoint in sorted(log_dir.glob("ckpt_*")):
        hashes[checkpoint.name] = sha256((checkpoint / "model.safetensors").read_bytes())
    return hashes


def hashes_of_model(repo: Path) -> dict[str, str]:
    """HellaSwag losses and generated tokens of a random model. Runs in a process of its own: it
    imports `repo`.
    """
    sys.path.insert(0, str(repo))
    import torch

    import hellaswag
    from model import GPT, GPTConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=96, n_layer=3, n_head=2, n_embd=32)).eval()
    draw = random.Random(1)
    examples = [
        {
            "ctx": made_up_text(draw, draw.randint(1, 60)),
            "endings": [made_up_text(draw, draw.randint(1, 20)) for _ in range(4)],
            "label": draw.randint(0, 3),
        }
        for _ in range(50)
    ]
    losses = hellaswag.score(model, examples, "cpu")[0]
    prompts = torch.randint(0, 50257, (4, 40), generator=torch.Generator().manual_seed(2))
    lengths = [40, 1, 17, 33]  # 64 more tokens outgrow the window of 96
    greedy = model.generate(prompts, 64, lengths=lengths, temperature=0)
    drawn = model.generate(
        prompts,
        64,
        lengths=lengths,
        temperature=0.9,
        top_k=50,
        top_p=0.95,
        generator=torch.Generator().manual_seed(3),
    )
    return {
        "hellaswag, 50 examples": sha256(losses.tobytes()),
        "64 greedy tokens": sha256(greedy.numpy().tobytes()),
        "64 sampled tokens": sha256(drawn.numpy().tobytes()),
    }


def hashes_of(repo: Path) -> dict[str, str]:
    """Everything, by name."""
    hashes = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_corpus(place / "corpus.jsonl")
        shards = place / "shards"
        source = ["--source", place / "corpus.jsonl", "--data-dir", shards, "--name", "fixed"]
        run(
            repo,
            "fineweb.py",
            *source,
            "--shard-size",
            200_000,
            "--val-tokens",
            20_000,
            "--workers",
            2,
        )
        for shard in sorted(shards.glob("*.npy")):
            hashes[shard.name] = sha256(shard.read_bytes())
        for name, (flags, processes) in RUNS.items():
            log_dir = place / name.replace(" ", "-")
            where = ["--data-dir", shards, "--log-dir", log_dir]
            run(repo, "train_gpt2.py", *flags, *where, processes=processes)
            hashes |= {f"{name}: {part}": found for part, found in hashes_of_run(log_dir).items()}
        resume = ["--resume", place / "adamw" / "ckpt_000010", "--log-dir", place / "resumed"]
        run(repo, "train_gpt2.py", *RUNS["adamw"][0], "--data-dir", shards, *resume)
        hashes |= {
            f"resumed: {part}": found for part, found in hashes_of_run(place / "resumed").items()
        }
    code = (
        "import json, sys; from pathlib import Path; from same_bits import hashes_of_model; "
        "print(json.dumps(hashes_of_model(Path(sys.argv[1]))))"
    )
    asked = [sys.executable, "-c", code, str(repo)]
    told = subprocess.run(
        asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return hashes | json.loads(told.stdout)


def main(repos: list[Path]) -> None:
    found = {str(repo): hashes_of(repo.resolve()) for repo in repos}
    if len(repos) == 1:
        print(json.dumps(found[str(repos[0])], indent=1))
        return
    before, after = found.values()
    different = [name for name in before | after if before.get(name) != after.get(name)]
    for name in before | after:
        mark = "differs" if name in different else "the same"
        print(f"{mark:9} {before.get(name, 'missing'):16} {after.get(name, 'missing'):16} {name}")
    sys.exit(f"{len(different)} of {len(before | after)} differ" if different else 0)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:3]] or [Path(__file__).parent.parent])

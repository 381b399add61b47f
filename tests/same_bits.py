"""Does a change compute the same? One hash for each thing that must be equal to the last bit.

    python tests/same_bits.py > before.json     the hashes of this checkout
    python tests/same_bits.py before.json .     another checkout beside them; exit 1 if some differ
    python tests/same_bits.py ../before .       two checkouts

A checkout takes about five minutes on two idle cores. Only the command lines, `GPT` and `score` are
used. Losses, tokens, weights and shards must be the same. Times and messages may differ.
"""

import hashlib
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# a model and a batch that take a second; every run is compared over 20 updates
COMMON = "--max-steps=20 --warmup-steps=5 --val-every=10 --hellaswag-every=0 --dtype=float32"
SMALL = f"""{COMMON} --device=cpu --no-compile --n-layer=3 --n-head=2 --n-embd=32 --batch-size=2
    --sequence-length=64 --total-batch-size=512 --learning-rate=0.01 --val-tokens=2048
    --sample-every=10 --sample-tokens=16 --checkpoint-every=10"""
# the preset quickstart of November 2026
QUICKSTART = f"""{COMMON} --device=cpu --n-layer=6 --n-head=6 --n-embd=192 --batch-size=16
    --sequence-length=128 --total-batch-size=2048 --learning-rate=8e-3 --optimizer=muon
    --val-tokens=4096 --sample-every=0 --checkpoint-every=20"""
RUNS = {  # name: flags
    "quickstart, eager": f"{QUICKSTART} --no-compile",
    "quickstart, compiled": QUICKSTART,
    "adamw": f"{SMALL} --optimizer=adamw",
    "muon": f"{SMALL} --optimizer=muon",
    "activation checkpointing": f"{SMALL} --activation-checkpointing",
    "bfloat16": f"{SMALL} --dtype=bfloat16",
    "2 ranks, ddp": f"{SMALL} --optimizer=muon",
    "2 ranks, zero1": f"{SMALL} --sharding=zero1",
    "2 ranks, fsdp": f"{SMALL} --sharding=fsdp",
    "resumed": f"{SMALL} --optimizer=adamw --resume=adamw/ckpt_000010",
}
FINEWEB = """--source=corpus.jsonl --data-dir=shards --name=fixed --shard-size=200_000
    --val-tokens=20_000 --workers=2"""
LANGUAGES = [
    "the of and to in",
    "für über weiß größer Öl",
    "これは テスト です 。",
    "def return self. == 0x7f",
    "😀 🎉 \t\n",
]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def make_text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(draw.choice(LANGUAGES).split(" ")) for _ in range(words))


def write_corpus(path: Path) -> None:
    """600 documents of 1 to 800 words in several scripts."""
    draw = random.Random(0)
    documents = [{"text": make_text(draw, draw.randint(1, 800))} for _ in range(600)]
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def run(folder: Path, script: Path, *args: str, processes: int = 1) -> str:
    """Runs a script in a folder -> what it prints."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(script), *args]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def hashes_of(repo: Path) -> Iterator[tuple[str, str]]:
    """Yields names and hashes: from a JSON file, or of a checkout, as they are made."""
    if repo.is_file():
        yield from json.loads(repo.read_text()).items()
        return
    repo = repo.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl")
        run(folder, repo / "fineweb.py", *shlex.split(FINEWEB))
        for shard in sorted((folder / "shards").glob("*.npy")):
            yield shard.name, sha256(shard.read_bytes())
        for name, flags in RUNS.items():
            args = [*shlex.split(flags), "--data-dir=shards", f"--log-dir={name}"]
            processes = 2 if name.startswith("2 ranks") else 1
            print(f"{name} …", file=sys.stderr, flush=True)
            run(folder, repo / "train_gpt2.py", *args, processes=processes)
            for part, found in hashes_of_run(folder / name):
                yield f"{name}: {part}", found
        made = run(folder, Path(__file__).resolve(), "--model", str(repo))
        yield from json.loads(made).items()


def hashes_of_run(log_dir: Path) -> Iterator[tuple[str, str]]:
    """The losses and norms of all steps, the samples, and the weights of every checkpoint."""
    kept = ("type", "step", "loss", "norm", "lr", "val_loss", "samples")
    records = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    records = [r for r in records if r["type"] not in ("run", "resume")]
    records = [{key: r[key] for key in kept if key in r} for r in records]
    yield "metrics", sha256(json.dumps(records).encode())
    yield "log.txt", sha256((log_dir / "log.txt").read_bytes())
    for checkpoint in sorted(log_dir.glob("ckpt_*")):
        yield checkpoint.name, sha256((checkpoint / "model.safetensors").read_bytes())


def hashes_of_model(repo: str) -> dict[str, str]:
    """HellaSwag losses and generated tokens of a random model. It imports the checkout `repo`."""
    sys.path.insert(0, repo)
    import torch

    import hellaswag
    from model import GPT, GPTConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=96, n_layer=3, n_head=2, n_embd=32)).eval()
    draw = random.Random(1)
    examples = [
        {
            "ctx": make_text(draw, draw.randint(1, 60)),
            "endings": [make_text(draw, draw.randint(1, 20)) for _ in range(4)],
            "label": draw.randint(0, 3),
        }
        for _ in range(50)
    ]
    losses = hellaswag.score(model, examples, "cpu")
    if isinstance(losses, tuple):  # of an older revision
        losses, *_ = losses
    prompts = torch.randint(0, 50257, (4, 40), generator=torch.Generator().manual_seed(2))
    lengths = [40, 1, 17, 33]  # 64 more tokens outgrow the window of 96
    greedy = model.generate(prompts, 64, lengths=lengths, temperature=0)
    generator = torch.Generator().manual_seed(3)
    how = dict(temperature=0.9, top_k=50, top_p=0.95, generator=generator)
    drawn = model.generate(prompts, 64, lengths=lengths, **how)
    return {
        "hellaswag, 50 examples": sha256(losses.tobytes()),
        "64 greedy tokens": sha256(greedy.numpy().tobytes()),
        "64 sampled tokens": sha256(drawn.numpy().tobytes()),
    }


def collect(repo: Path) -> dict[str, str]:
    hashes = {}
    for name, found in hashes_of(repo):
        print(found, name, file=sys.stderr, flush=True)
        hashes[name] = found
    return hashes


def compare(before: dict[str, str], repo: Path) -> None:
    wrong = set(before)
    for name, found in hashes_of(repo):
        then = before.get(name, "missing")
        print(f"{'same' if found == then else 'differs':8} {then:16} {found} {name}", flush=True)
        wrong.add(name)
        if found == then:
            wrong.remove(name)
    sys.exit(f"different or missing: {sorted(wrong)}" if wrong else 0)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--model", repo]:
            print(json.dumps(hashes_of_model(repo)))
        case [before, after]:
            compare(collect(Path(before)), Path(after))
        case args:
            print(
                json.dumps(collect(Path(*args) if args else Path(__file__).parent.parent), indent=1)
            )

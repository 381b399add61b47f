"""Throughput of fineweb.py against the classic script and against tiktoken alone.

    python benchmarks/fineweb_bench.py --megabytes 530 --rounds 3

All three have the same text and the same cores. `classic` is build-nanogpt's loop: one document
at a time through `mp.Pool(cpu_count() // 2).imap(tokenize, docs, 16)`. `bare` is two processes
that do nothing but `encode_ordinary`, their halves of the text already in memory. The corpus is
Python source from this machine in a parquet file with FineWeb's columns.

Rounds alternate; medians are reported, and the peak memory of fineweb.py's whole process tree
(PSS: memory shared by processes counts once). fineweb.py's time is all of it, start, imports and
writing included; that of `bare` is encoding only.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from support.tokenizer import EOT, get_tokenizer  # noqa: E402

# -- the corpus


def make_corpus(path: Path, megabytes: int) -> None:
    """Python files, each once and then again until there is enough, in groups of 1000 rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = megabytes * 1_000_000
    size = 0  # bytes of text
    rows: list[dict] = []
    writer = None
    while size < wanted:
        for file in python_files():
            text = file.read_text(errors="replace")
            rows.append(make_row(file, text, number=size))
            size += len(text.encode(errors="replace"))
            if len(rows) == 1000:
                table = pa.Table.from_pylist(rows)
                writer = writer or pq.ParquetWriter(path, table.schema)
                writer.write_table(table)
                rows = []
                if size >= wanted:
                    break
    writer.close()


def python_files() -> list[Path]:
    """The standard library and the installed packages, in an order that is always the same."""
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = [file for root in roots for file in root.rglob("*.py")]
    return sorted(files, key=lambda file: (hash_name(file), file))


def hash_name(file: Path) -> int:
    return sum(map(ord, file.stem)) * 2654435761 % 1000003


def make_row(file: Path, text: str, number: int) -> dict:
    """A document with the columns of FineWeb-Edu."""
    return {
        "text": text,
        "id": f"<urn:{number}>",
        "dump": "here",
        "url": file.as_uri(),
        "file_path": str(file),
        "language": "en",
        "language_score": 0.9,
        "token_count": len(text) // 4,
        "score": 3.5,
        "int_score": 4,
    }


def read_rows(path: Path) -> Iterator[dict]:
    """Rows as dicts, as `datasets` gives them."""
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path).iter_batches(1000):
        yield from batch.to_pylist()


# -- classic


def classic_tokenize(document: dict) -> np.ndarray:
    tokens = np.array([EOT, *get_tokenizer().encode_ordinary(document["text"])])
    assert (tokens >= 0).all() and (tokens < 2**16).all()
    return tokens.astype(np.uint16)


def run_classic(path: Path, out: Path) -> tuple[float, int]:
    """build-nanogpt's fineweb.py: seconds and tokens."""
    began = time.perf_counter()
    out.mkdir()
    shard_size = 10**8
    shard = np.empty(shard_size, np.uint16)
    index = 0
    count = 0  # tokens in the shard
    total = 0
    with multiprocessing.Pool(max(1, os.cpu_count() // 2)) as pool:
        for tokens in pool.imap(classic_tokenize, read_rows(path), chunksize=16):
            total += len(tokens)
            if count + len(tokens) >= shard_size:
                rest = shard_size - count
                shard[count:] = tokens[:rest]
                np.save(out / f"shard_{index:06d}", shard)
                index += 1
                count = 0
                tokens = tokens[rest:]
            shard[count : count + len(tokens)] = tokens
            count += len(tokens)
        np.save(out / f"shard_{index:06d}", shard[:count])
    return time.perf_counter() - began, total


# -- bare


def bare_worker(path: Path, part: int, ready, go, done) -> None:
    """Encodes every second document; its own start and its reading are not measured."""
    texts = [row["text"] for i, row in enumerate(read_rows(path)) if i % 2 == part]
    tokenizer = get_tokenizer()
    ready.release()
    go.wait()
    done.put(sum(len(tokenizer.encode_ordinary(text)) + 1 for text in texts))


def run_bare(path: Path) -> tuple[float, int]:
    """Two processes that only encode: seconds and tokens."""
    ready = multiprocessing.Semaphore(0)
    go = multiprocessing.Event()
    done = multiprocessing.Queue()
    workers = []
    for part in range(2):
        process = multiprocessing.Process(target=bare_worker, args=(path, part, ready, go, done))
        process.start()
        workers.append(process)
    for _ in workers:
        ready.acquire()
    began = time.perf_counter()
    go.set()
    tokens = sum(done.get() for _ in workers)
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    return seconds, tokens


# -- ours


def run_ours(path: Path, out: Path) -> tuple[float, int, dict]:
    """fineweb.py as a user runs it, imports and all: seconds, tokens and peaks of memory."""
    command = [sys.executable, str(ROOT / "fineweb.py"), "--source", str(path)]
    command += ["--data-dir", str(out), "--workers", "2"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    tree_pss = 0.0
    parent_rss = 0.0
    while process.poll() is None:
        tree = [process.pid, *list_children(process.pid)]
        pss = sum(read_memory(pid, "smaps_rollup", "Pss:") for pid in tree)
        tree_pss = max(tree_pss, pss)
        parent_rss = max(parent_rss, read_memory(process.pid, "status", "VmRSS:"))
        time.sleep(0.2)
    assert process.returncode == 0
    seconds = time.perf_counter() - began
    tokens = json.loads((out / "manifest.json").read_text())["tokens"]
    return seconds, tokens, {"tree_pss_mb": tree_pss, "parent_rss_mb": parent_rss}


def list_children(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # it has ended
        return []
    return [int(child) for child in children.split()]


def read_memory(pid: int, file: str, field: str) -> float:
    """A field of /proc/{pid}/{file}, in MB."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:  # it has ended
        return 0.0
    for line in lines:
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return 0.0


# -- the command


def run_round(corpus: Path, folder: Path) -> dict:
    """Each of the three once: seconds and peaks of memory."""
    ours, ours_tokens, peak = run_ours(corpus, folder / "ours")
    classic, classic_tokens = run_classic(corpus, folder / "classic")
    bare, bare_tokens = run_bare(corpus)
    told = f"{ours_tokens}, {classic_tokens} and {bare_tokens} tokens"
    assert ours_tokens == classic_tokens == bare_tokens, told
    shutil.rmtree(folder / "ours")
    shutil.rmtree(folder / "classic")
    return {"tokens": ours_tokens, "ours": ours, "classic": classic, "bare": bare, **peak}


def run_rounds(args: argparse.Namespace, rounds: list[dict]) -> float:
    """Adds what the rounds measured to `rounds`. Returns the megabytes of text in the corpus."""
    folder = Path(tempfile.mkdtemp(prefix="fineweb_bench_"))
    try:
        corpus = Path(args.corpus or folder / "corpus.parquet")
        if not corpus.exists():
            make_corpus(corpus, args.megabytes)
        for _ in range(args.rounds):
            taken = run_round(corpus, folder)
            rounds.append({name: round(value, 2) for name, value in taken.items()})
            print(rounds[-1], flush=True)
        return sum(len(row["text"].encode()) for row in read_rows(corpus)) / 1e6
    finally:
        shutil.rmtree(folder)


def summarize(args: argparse.Namespace, megabytes: float, rounds: list[dict]) -> dict:
    """The record of all rounds, as fineweb_bench.json has it."""
    import torch  # not before the processes that are measured have started

    from support.device import device_name

    machine = device_name(torch.device("cpu"))
    python = f"Python {platform.python_version()}"
    command = "python benchmarks/fineweb_bench.py"
    median = {}
    for name in ("ours", "classic", "bare"):
        median[name] = statistics.median(taken[name] for taken in rounds)
    peak = {}
    for name in ("tree_pss_mb", "parent_rss_mb"):
        peak[name] = round(max(taken[name] for taken in rounds))
    return {
        "command": f"{command} --megabytes {args.megabytes} --rounds {len(rounds)}",
        "machine": f"{machine}, {python}, tiktoken {version('tiktoken')}",
        "text_mb": round(megabytes, 1),
        "mb_per_s": {name: round(megabytes / value, 2) for name, value in median.items()},
        "ours_over_classic": round(median["classic"] / median["ours"], 3),
        "ours_over_bare": round(median["bare"] / median["ours"], 3),
        "peak_mb": peak,
        "rounds": rounds,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "text in the corpus; 530 are more than two shards"
    parser.add_argument("--megabytes", type=int, default=530, help=text)
    text = "a corpus made by an earlier run, or where to leave it for a later one"
    parser.add_argument("--corpus", default="", help=text)
    parser.add_argument("--rounds", type=int, default=3)
    text = "also write the result to this file; the rounds already in it count, too"
    parser.add_argument("--json", default="", help=text)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    rounds = []
    if args.json and Path(args.json).exists():
        rounds = json.loads(Path(args.json).read_text())["rounds"]
    megabytes = run_rounds(args, rounds)
    result = json.dumps(summarize(args, megabytes, rounds), indent=1)
    print(result)
    if args.json:
        Path(args.json).write_text(result + "\n")


if __name__ == "__main__":
    main()

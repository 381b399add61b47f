"""Throughput of fineweb.py against the classic script and against tiktoken alone, on the same text and the same cores.

    python benchmarks/fineweb_bench.py --megabytes 530 --rounds 3

`classic` is build-nanogpt's loop: one document at a time through `mp.Pool(cpu_count() // 2).imap(tokenize, docs, 16)`.
`bare` is two processes that do nothing but `encode_ordinary`, their halves of the text already in memory. The corpus is
Python source from this machine in a parquet file with FineWeb's columns. Rounds alternate; medians are reported, and the
peak memory of fineweb.py's whole process tree (PSS: memory shared by processes counts once). fineweb.py's time is all of it,
start, imports and writing included; that of `bare` is encoding only.
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
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tokenizer import EOT, get_tokenizer  # noqa: E402


def make_corpus(path: Path, megabytes: int) -> None:
    """Python files from the standard library and installed packages, in an order that is always the same, each once and
    then again until there is enough."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = sorted((file for root in roots for file in root.rglob("*.py")), key=lambda file: (hash_of(file), file))
    columns = ["text", "id", "dump", "url", "file_path", "language", "language_score", "token_count", "score", "int_score"]
    done, rows, writer = 0, [], None
    while done < megabytes * 1_000_000:
        for file in files:
            text = file.read_text(errors="replace")
            rows.append([text, f"<urn:{done}>", "here", file.as_uri(), str(file), "en", 0.9, len(text) // 4, 3.5, 4])
            done += len(text.encode(errors="replace"))
            if len(rows) == 1000:
                table = pa.table(dict(zip(columns, zip(*rows, strict=True), strict=True)))
                writer = writer or pq.ParquetWriter(path, table.schema)
                writer.write_table(table)
                rows = []
                if done >= megabytes * 1_000_000:
                    break
    writer.close()


def hash_of(file: Path) -> int:
    return sum(map(ord, file.stem)) * 2654435761 % 1000003


def documents(path: Path):
    """Rows as dicts, as `datasets` gives them."""
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path).iter_batches(1000):
        yield from batch.to_pylist()


def classic_tokenize(document: dict) -> np.ndarray:
    tokens = np.array([EOT, *get_tokenizer().encode_ordinary(document["text"])])
    assert (tokens >= 0).all() and (tokens < 2**16).all()
    return tokens.astype(np.uint16)


def classic(path: Path, out: Path) -> int:
    """build-nanogpt's fineweb.py."""
    out.mkdir()
    shard_size, index, count, total = 10**8, 0, 0, 0
    shard = np.empty(shard_size, np.uint16)
    with multiprocessing.Pool(max(1, os.cpu_count() // 2)) as pool:
        for tokens in pool.imap(classic_tokenize, documents(path), chunksize=16):
            total += len(tokens)
            if count + len(tokens) >= shard_size:
                rest = shard_size - count
                shard[count:] = tokens[:rest]
                np.save(out / f"shard_{index:06d}", shard)
                index, count, tokens = index + 1, 0, tokens[rest:]
            shard[count : count + len(tokens)] = tokens
            count += len(tokens)
        np.save(out / f"shard_{index:06d}", shard[:count])
    return total


def bare_worker(path: Path, part: int, ready, go, done) -> None:
    texts = [document["text"] for i, document in enumerate(documents(path)) if i % 2 == part]
    tokenizer = get_tokenizer()
    ready.release()
    go.wait()
    done.put(sum(len(tokenizer.encode_ordinary(text)) + 1 for text in texts))


def bare(path: Path) -> tuple[float, int]:
    ready, go, done = multiprocessing.Semaphore(0), multiprocessing.Event(), multiprocessing.Queue()
    workers = [multiprocessing.Process(target=bare_worker, args=(path, part, ready, go, done)) for part in range(2)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    began = time.perf_counter()
    go.set()
    tokens = sum(done.get() for _ in workers)
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    return seconds, tokens


def ours(path: Path, out: Path) -> tuple[float, int, dict]:
    """fineweb.py as a user runs it, imports and all, its memory watched."""
    command = [sys.executable, str(ROOT / "fineweb.py"), "--source", str(path), "--data-dir", str(out), "--workers", "2"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = {"tree_pss_mb": 0.0, "parent_rss_mb": 0.0}
    while process.poll() is None:
        tree = [process.pid, *map(int, children(process.pid))]
        peak["tree_pss_mb"] = max(peak["tree_pss_mb"], sum(memory(pid, "smaps_rollup", "Pss:") for pid in tree))
        peak["parent_rss_mb"] = max(peak["parent_rss_mb"], memory(process.pid, "status", "VmRSS:"))
        time.sleep(0.2)
    assert process.returncode == 0
    seconds = time.perf_counter() - began
    return seconds, json.loads((out / "manifest.json").read_text())["tokens"], peak


def children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def memory(pid: int, file: str, field: str) -> float:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), 0.0)
    except OSError:
        return 0.0


def one_round(corpus: Path, folder: Path) -> dict:
    """Each of the three once: seconds and peaks of memory."""
    ours_seconds, ours_tokens, peak = ours(corpus, folder / "ours")
    began = time.perf_counter()
    classic_tokens = classic(corpus, folder / "classic")
    classic_seconds = time.perf_counter() - began
    bare_seconds, bare_tokens = bare(corpus)
    assert ours_tokens == classic_tokens == bare_tokens, f"{ours_tokens}, {classic_tokens} and {bare_tokens} tokens"
    for name in ("ours", "classic"):
        shutil.rmtree(folder / name)
    return {"tokens": ours_tokens, "ours": ours_seconds, "classic": classic_seconds, "bare": bare_seconds, **peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=530, help="text in the corpus; 530 are more than two shards")
    parser.add_argument("--corpus", default="", help="a corpus made by an earlier run, or where to leave it for a later one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="", help="also write the result to this file; the rounds already in it count, too")
    args = parser.parse_args()
    rounds = json.loads(Path(args.json).read_text())["rounds"] if args.json and Path(args.json).exists() else []
    folder = Path(tempfile.mkdtemp(prefix="fineweb_bench_"))
    try:
        corpus = Path(args.corpus or folder / "corpus.parquet")
        if not corpus.exists():
            make_corpus(corpus, args.megabytes)
        megabytes = sum(len(document["text"].encode()) for document in documents(corpus)) / 1e6
        for _ in range(args.rounds):
            taken = one_round(corpus, folder)
            rounds.append({name: round(value, 2) for name, value in taken.items()})
            print(rounds[-1], flush=True)
    finally:
        shutil.rmtree(folder)
    import torch  # not before the processes that are measured have started

    from distributed import device_name

    median = {name: statistics.median(taken[name] for taken in rounds) for name in ("ours", "classic", "bare")}
    result = {
        "command": f"python benchmarks/fineweb_bench.py --megabytes {args.megabytes} --rounds {len(rounds)}",
        "machine": f"{device_name(torch.device('cpu'))}, Python {platform.python_version()}, tiktoken {version('tiktoken')}",
        "text_mb": round(megabytes, 1),
        "mb_per_s": {name: round(megabytes / value, 2) for name, value in median.items()},
        "ours_over_classic": round(median["classic"] / median["ours"], 3),
        "ours_over_bare": round(median["bare"] / median["ours"], 3),
        "peak_mb": {name: round(max(taken[name] for taken in rounds)) for name in ("tree_pss_mb", "parent_rss_mb")},
        "rounds": rounds,
    }
    print(json.dumps(result, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

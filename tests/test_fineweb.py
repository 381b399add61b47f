"""fineweb.py: every document arrives exactly, whatever kills, cuts or confuses the program."""

import copy
import errno
import gzip
import hashlib
import json
import os
import random
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlparse

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import run_program
from contract import TOLD
from tqdm import tqdm

import fineweb
from fineweb import Config, choose_val_tokens, pack, stream_tokens, tokenize
from support import common, examples, filters, manifest, readers, sources, tokenizer, web
from support import download as transfer
from support.common import UserError
from support.filters import Benchmark, Seen, cut_out
from support.manifest import SHAPE, read_manifest, verify_shards
from support.readers import Text
from support.sources import find_files, read_batches
from support.tokenizer import EOT, encode_to_arrays, get_tokenizer

ROOT = Path(__file__).parent.parent
FINEWEB = str(ROOT / "fineweb.py")

IN_A_PLANE = (0x41, 0xE9, 0x1234, 0xFFFD, 0xFFFF)  # some characters of each plane of Unicode
NASTY = [
    "",
    "x",
    "ab" * 500_000,  # a megabyte without a space
    "<|endoftext|> is text here: <|endoftext|><|endoftext|>",
    "".join(chr(plane * 0x10000 + i) for plane in range(17) for i in IN_A_PLANE),
    "\x00\x01\r\n\r\n\t \u00a0\u3000\u2028 ends in spaces   ",
    "don't 'tis it's I'LL 12345 مرحبا 你好 🙂🏽 e\u0301",
    "\n" * 3000,
]
SURROGATES = "lone \ud800 high, low \udfff, a pair \ud83d\ude00, the wrong way \ude00\ud83d"


def run(*args, code=0, method="", env=None, **kwargs) -> subprocess.CompletedProcess:
    """`python fineweb.py ...` in a process of its own, which must end with that exit code."""
    command = [sys.executable, FINEWEB]
    if method:  # of starting workers, as a platform or a user may choose it
        command = [sys.executable, "-c", STARTER.format(method=method)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    command += map(str, args)
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, **kwargs)
    assert done.returncode == code, done.stderr + done.stdout
    if code == 1:
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done


STARTER = """
import multiprocessing, sys
import fineweb
if __name__ == "__main__":
    multiprocessing.set_start_method("{method}")
    sys.argv[0] = "fineweb.py"
    fineweb.run_and_exit(fineweb.main, fineweb.INTERRUPTED)
"""


def tokens_in(folder: Path) -> np.ndarray:
    """All tokens of a finished directory, each shard checked against the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    shards = []
    for i, shard in enumerate(manifest["shards"]):
        assert shard["split"] == ("train" if i else "val")
        assert shard["name"] == f"{manifest['options']['name']}_{shard['split']}_{i:06d}.npy"
        data = (folder / shard["name"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == shard["sha256"]
        shards.append(np.load(folder / shard["name"]))
        assert shards[-1].dtype == np.uint16 and shards[-1].shape == (shard["tokens"],)
    assert manifest["cursor"] is None and manifest["tokens"] == sum(map(len, shards))
    assert not list(folder.glob("*.tmp"))
    return np.concatenate(shards)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@cache
def tokens_of(text: str) -> np.ndarray:
    return np.array([EOT, *get_tokenizer().encode_ordinary(text)])


def expected(texts) -> np.ndarray:
    return np.concatenate([tokens_of(text) for text in texts])


def texts_in(tokens: np.ndarray) -> list[str]:
    """The documents again."""
    assert tokens[0] == EOT
    starts = [*np.flatnonzero(tokens == EOT), len(tokens)]
    return [get_tokenizer().decode(tokens[a + 1 : b].tolist()) for a, b in pairwise(starts)]


def write_parquet(path: Path, texts, group: int = 50) -> Path:
    columns = {
        "text": texts,
        "id": [f"<urn:{i}>" for i in range(len(texts))],
        "token_count": list(range(len(texts))),
    }
    pq.write_table(
        pa.table(columns), path, row_group_size=group, compression="none", use_dictionary=False
    )
    return path


def write_jsonl(path: Path, texts, column: str = "text") -> Path:
    lines = [json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)]
    path.write_text("".join(lines))
    return path


def prose(count: int, seed: int = 0, words: int = 60) -> list[str]:
    """Documents of random words, on average `words` of them."""
    choose = random.Random(seed)
    texts = []
    for _ in range(count):
        length = choose.randrange(1, 2 * words)
        texts.append(" ".join(choose.choices(WORDS, k=length)) + ".")
    return texts


WORDS = ["".join(random.Random(i).choices("etaoinshrdlu", k=1 + i % 9)) for i in range(400)]


# -- tokens


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_a_text_has_the_tokens_that_tiktoken_gives_it(text):
    assert np.concatenate(encode_to_arrays(text)).tolist() == get_tokenizer().encode_ordinary(text)


def test_lone_surrogates_become_the_replacement_character_as_in_tiktoken():
    tokens = np.concatenate(encode_to_arrays(SURROGATES)).tolist()
    assert tokens == get_tokenizer().encode_ordinary(SURROGATES)
    text = get_tokenizer().decode(tokens)
    assert text == "lone \ufffd high, low \ufffd, a pair 😀, the wrong way \ufffd\ufffd"


@pytest.mark.parametrize("space", [" ", "\n", "\u3000", " \n"])
def test_a_million_spaces_do_not_stop_tiktoken(space):
    text = f"before{space * 1_200_000}after{space * 150_000}"
    assert get_tokenizer().decode(np.concatenate(encode_to_arrays(text)).tolist()) == text


@pytest.mark.parametrize(
    "text",
    ["a" + " " * 9 + "b", " " * 8 + "b", "a" + " " * 9, " " * 9, "\n\n\n\n\n\n x \t\t\t\t\t\t\n!"],
)
def test_long_spaces_have_the_same_tokens_in_parts(text, monkeypatch):
    of_five = tokenizer.LAST_SPACE.pattern.replace("100000", "5")
    monkeypatch.setattr(tokenizer, "LAST_SPACE", re.compile(of_five))
    padded = text + "y" * 100_001  # long enough to be looked at
    assert np.concatenate(encode_to_arrays(padded)).tolist() == get_tokenizer().encode_ordinary(
        padded
    )
    padded = "y" * 100_001 + "\n" + text
    assert np.concatenate(encode_to_arrays(padded)).tolist() == get_tokenizer().encode_ordinary(
        padded
    )


def test_a_text_file_read_in_stretches_has_the_tokens_of_the_whole(tmp_path, monkeypatch):
    choose = random.Random(5)
    alphabet = ["a", "Bc", " ", "  ", "\n", "\r\n", "\t", "'", "'s", "é", "你", "🙂", "12", "!"]
    alphabet += ["\u3000", "\u0085", "\x1c", "<|endoftext|>"]
    for size in (1, 7, 16, 50):
        monkeypatch.setattr(readers, "STRETCH", size)
        for _ in range(40):
            text = "".join(choose.choices(alphabet, k=choose.randrange(60)))
            (tmp_path / "a.txt").write_bytes(text.encode())
            pieces = list(readers.read_text(str(tmp_path / "a.txt")))
            assert "".join(piece.text for piece in pieces) == text
            assert [piece.starts for piece in pieces] == [True] + [False] * (len(pieces) - 1)
            assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            parts = [part for piece in pieces for part in encode_to_arrays(piece.text)]
            assert np.concatenate(parts).tolist() == expected([text])[1:].tolist()


def test_a_long_text_file_without_a_space_is_read_in_linear_time(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "STRETCH", 5000)
    path = tmp_path / "a.txt"
    seconds = []
    for stretches in (100, 800):
        path.write_text("x" * 5000 * stretches)
        began = time.process_time()
        assert len(list(readers.read_text(str(path)))) == 1
        seconds.append(time.process_time() - began)
    assert seconds[1] < 0.5 + 24 * seconds[0]  # it took 50 times as long


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_reading_goes_on_from_any_place(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(readers, "STRETCH", 40)
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 1)
    texts = [*prose(230, words=5), None, ""]
    path = tmp_path / f"corpus.{kind}"
    if kind == "txt":
        path.write_text("é ".join(texts[:-2]))
    elif kind == "jsonl":
        write_jsonl(path, texts[:-2])
    else:
        write_parquet(path, texts, group=17)
    files = [*find_files(str(path), "text"), *find_files(str(path), "text")]
    batches = list(read_batches(files))
    n = len(batches) // 2
    assert n > 150 and [place for place, _ in batches] == [(i, j) for i in (0, 1) for j in range(n)]
    for i in [0, 1, 16, 17, 18, 99, 100, 101, n - 2, n - 1, n, n + 1, n + 99]:
        assert list(read_batches(files, *batches[i][0])) == batches[i:]


# -- the stream and its shards


def stream_of(texts, size, cursor=None, limit=10**9):
    """What the workers and `stream_tokens` make of texts, `size` at a time, from a cursor on."""
    first = 0
    counts = np.zeros(len(filters.COUNTS), int)
    if cursor:
        first = cursor.text
        counts[:] = list(cursor.counts.values())
    batches = []
    for i in range(first, len(texts), size):
        batches.append(((0, i), tokenize([Text(text) for text in texts[i : i + size]])))
    return stream_tokens(iter(batches), limit, None, counts, tqdm(disable=True)), counts


@pytest.mark.parametrize("shard_size", [1, 64, 777, 1500])
def test_shards_hold_the_stream_and_each_cursor_leads_to_the_same_rest(shard_size):
    texts = prose(60, words=20)
    whole = expected(texts)
    packed = pack(stream_of(texts, 7)[0], shard_size, 0)
    shards = [(i, np.concatenate(parts), cursor) for i, parts, cursor in packed]
    assert np.array_equal(np.concatenate([tokens for _, tokens, _ in shards]), whole)
    assert [index for index, _, _ in shards] == list(range(len(shards)))
    if len(whole) >= 2 * shard_size:
        assert {len(tokens) for _, tokens, _ in shards[:-1]} <= {shard_size}
    for i in range(0, len(shards) - 1, 1 + len(shards) // 20):
        index, _, cursor = shards[i]
        rest = list(pack(stream_of(texts, 7, cursor)[0], shard_size, 0, index + 1, cursor.token))
        rest = [(a, np.concatenate(b).tolist(), c) for a, b, c in rest]
        assert rest == [(a, b.tolist(), c) for a, b, c in shards[i + 1 :]]


def test_a_stream_ends_at_the_limit_and_counts_only_what_it_has_used():
    texts = prose(50, words=20)
    whole = expected(texts)
    for limit in (1, 500, len(whole) - 1, len(whole), len(whole) + 1):
        stream, totals = stream_of(texts, 6, limit=limit)
        assert np.concatenate([tokens for _, tokens in stream]).tolist() == whole[:limit].tolist()
        assert totals[0] == np.sum(whole[:limit] == EOT)


@pytest.mark.parametrize(
    ("lengths", "shard_size", "val_tokens", "held"),
    [
        ([50] * 40, 1000, 0, 1000),  # two shards or more: a whole one
        ([50] * 39, 1000, 0, 100),  # less: 5%, up to a document
        ([1900], 1000, 0, 95),  # no document starts near: 5% all the same
        ([94, 91, 1700], 1000, 0, 94),
        ([93, 92, 1700], 1000, 0, 93 + 92),
        ([94, 97, 1700], 100, 70, 94),
        ([50] * 400, 1000, 75, 100),
        ([50] * 400, 1000, 100, 100),
        ([50] * 400, 1000, 1000, 1000),
        ([300] * 400, 1000, 100, 100),
    ],
)
def test_the_first_tokens_are_held_out(lengths, shard_size, val_tokens, held):
    tokens = np.concatenate([[EOT] + [1] * (n - 1) for n in lengths]).astype(np.uint16)
    head = np.array_split(tokens[: 2 * shard_size], 7)
    assert choose_val_tokens(head, shard_size, val_tokens) == held


def test_a_corpus_that_leaves_nothing_to_train_on_is_refused():
    with pytest.raises(UserError, match="nothing is left to train on"):
        list(pack(stream_of(["two words"], 1)[0], 100, 5))
    with pytest.raises(UserError, match="nothing is left to train on"):
        list(pack(stream_of([], 1)[0], 100, 0))


# -- filters


def test_hashes_are_remembered_in_about_16_bytes_and_over_a_restart(tmp_path):
    choose = random.Random(1)
    hashes = [choose.randbytes(16) for _ in range(20_000)]
    hashes[50:60] = [bytes([0, 0, *b"same" * 3, i, 9]) for i in range(10)]  # in one bucket
    hashes[60] = b"\0\0" + hashes[50][9:] + hashes[51][2:9]  # found there, but across two
    seen = Seen(tmp_path / "hashes", 0)
    assert [seen.add(h) for h in hashes] == [True] * len(hashes)
    assert not any(seen.add(h) for h in hashes)
    seen.write_to_disk()
    # the manifest that should have followed the last 5,000 is lost
    again = Seen(tmp_path / "hashes", 15_000)
    assert [again.add(h) for h in hashes] == [False] * 15_000 + [True] * 5_000
    again.write_to_disk()
    assert (tmp_path / "hashes").read_bytes() == b"".join(hashes) and again.count == 20_000
    many = Seen(tmp_path / "many", 0)
    for i in range(300_000):
        many.add(hashlib.blake2b(i.to_bytes(4, "big"), digest_size=16).digest())
    assert sum(len(bucket) for bucket in many.buckets) == 14 * 300_000


def slow_matches(text: str, benchmark: list[str]) -> list[int]:
    def words(t):
        return [w for w in ("".join(c for c in w.lower() if c.isalnum()) for w in t.split()) if w]

    grams = {tuple(words(b)[i : i + 13]) for b in benchmark for i in range(len(words(b)) - 12)}
    return [i for i in range(len(words(text)) - 12) if tuple(words(text)[i : i + 13]) in grams]


def test_shared_runs_of_13_words_are_found_wherever_they_stand():
    choose = random.Random(2)
    vocabulary = ["The", "the,", "cat", "sat!", "on", "—", "mat", "it's", "İt", "ΣΑΣ", "x_y", "9"]
    benchmark = [" ".join(choose.choices(vocabulary, k=choose.randrange(40))) for _ in range(40)]
    texts = []
    for _ in range(300):
        filler = choose.choices([*vocabulary, "unheard", "of"], k=choose.randrange(30))
        copied = choose.choice(benchmark).upper().split()
        copied = copied[choose.randrange(5) : choose.randrange(10, 40)]
        texts.append(" \n".join([*filler, *copied, *filler[:3]]))
    found = [Benchmark(benchmark).find(text) for text in texts]
    slow = [slow_matches(text, benchmark) for text in texts]
    assert 20 < sum(map(bool, slow)) < 280
    assert found == slow


def test_a_match_is_cut_with_200_characters_on_each_side():
    run = " ".join(f"w{i}" for i in range(13))
    benchmark = Benchmark([run])
    before = "a " * 300
    after = " b" * 250
    text = before + run.upper() + "," + after
    left, cuts = cut_out(text, benchmark.find(text))
    assert (left, cuts) == ([(0, 400), (len(before + run) + 1 + 200, len(text))], 1)
    # 198, 1 and 198 characters would be left
    text = "a " * 199 + run + " b" * 200 + " " + run + " b" * 199
    assert cut_out(text, benchmark.find(text)) == ([], 2)
    text = "c " * 150 + (run + " b" * 210 + " ") * 11
    assert cut_out(text, benchmark.find(text)) == ([], 11)
    text = "c " * 250 + (run + " b" * 210 + " ") * 10
    left, cuts = cut_out(text, benchmark.find(text))
    assert cuts == 10 and left == [(0, 300), (len(text) - 221, len(text))]


# -- the command


def test_importing_does_no_work_and_needs_neither_torch_nor_datasets():
    heavy = {"torch", "datasets", "pyarrow", "tyro", "tiktoken", "requests", "tqdm"}
    code = f"import sys, fineweb; print(*sorted({heavy} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize(
    ("method", "workers"), [("fork", 1), ("spawn", 2), ("forkserver", 2), ("fork", 7)]
)
def test_every_document_comes_back_exactly_with_any_workers(tmp_path, method, workers, monkeypatch):
    texts = [*NASTY, *prose(1200, words=10)]
    (tmp_path / "a.txt").write_bytes(NASTY[4].encode() + b"\r\n" + " ".join(prose(20)).encode())
    paths = [
        write_parquet(tmp_path / "a.parquet", texts),
        write_jsonl(tmp_path / "b.jsonl", [*texts[:20], SURROGATES]),
        tmp_path / "a.txt",
    ]
    options = ["--data-dir", tmp_path / "out", "--shard-size", 50_000, "--workers", workers]
    run("--source", *paths, *options, method=method)
    tokens = tokens_in(tmp_path / "out")
    everything = [*texts, *texts[:20], SURROGATES, (tmp_path / "a.txt").read_bytes().decode()]
    assert np.array_equal(tokens, expected(everything))
    replaced = SURROGATES.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert texts_in(tokens) == [replaced if text == SURROGATES else text for text in everything]


def test_a_finished_directory_says_so_and_other_options_are_refused(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", prose(30))
    command = ["--source", source, "--data-dir", tmp_path / "out", "--shard-size", 500]
    run(*command)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = run(*command, "--workers", 1)
    assert "nothing to do" in again.stdout
    assert len(again.stdout.splitlines()) == 1 and not again.stderr
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    other = run(*command[:-1], 501, "--max-tokens", 7, code=1)
    assert "--shard-size 500, not 501; --max-tokens 0, not 7" in other.stderr


def test_verify_finds_a_damaged_and_a_missing_shard(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", prose(60))
    where = ["--data-dir", tmp_path / "out"]
    command = ["--source", source, *where, "--shard-size", 500, "--name", "some"]
    run(*command)
    assert "are as they were written" in run("--verify", *where).stdout
    shard = tmp_path / "out" / "some_train_000002.npy"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    assert "some_train_000002.npy;" in run("--verify", *where, code=1).stderr
    shard.unlink()
    assert "some_train_000002.npy" in run("--verify", *where, code=1).stderr
    assert "some_train_000002.npy is missing" in run(*command, code=1).stderr


def estimates_in(output: str) -> tuple[int, ...]:
    """The documents and tokens of which a dry run tells."""
    told = re.findall(r"([\d,]+) (?:documents|tokens)", output)
    return tuple(int(n.replace(",", "")) for n in told)


def test_a_dry_run_estimates_and_writes_nothing(tmp_path):
    texts = prose(20_000, words=20)
    source = write_parquet(tmp_path / "a.parquet", texts, group=1000)
    done = run("--source", source, "--data-dir", tmp_path / "out", "--dry-run")
    documents, tokens = estimates_in(done.stdout)
    assert abs(documents / 20_000 - 1) < 0.01
    assert abs(tokens / len(expected(texts[:2000])) / 10 - 1) < 0.1
    assert not (tmp_path / "out").exists()


def test_the_standard_library_comes_in_one_order_that_begins_with_a_fair_sample():
    files = list(find_files("stdlib", "text"))
    assert [file[:2] for file in files] == [file[:2] for file in find_files("stdlib", "text")]
    left_out = re.compile(r"(^|/)(tests?|idle_test|site-packages)/")
    assert not any(left_out.search(file.name) for file in files)
    assert len({file.name.split("/")[0] for file in files[: len(files) // 20]}) > 10
    batches = list(read_batches(files))
    pieces = [piece for _, batch in batches for piece in batch]
    assert len(pieces) == len(files) and batches[-1][0] == (len(files) - len(batches[-1][1]), 0)
    i = [file.name for file in files].index("json/decoder.py")
    assert pieces[i].text == Path(json.decoder.__file__).read_text()
    assert 2e6 < sum(len(piece.text) for piece in pieces) / 3 < 1e7  # about 5M tokens


def test_the_shards_are_cut_at_the_size_and_at_the_limit(tmp_path):
    texts = prose(400)
    source = write_jsonl(tmp_path / "a.jsonl", texts, column="content")
    command = ["--source", source, "--column", "content"]
    command += ["--shard-size", 1000, "--max-tokens", 4321, "--val-tokens", 300]
    run(*command, "--data-dir", tmp_path / "out", "--name", "mine")
    tokens = tokens_in(tmp_path / "out")
    assert np.array_equal(tokens, expected(texts)[:4321])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    sizes = [shard["tokens"] for shard in manifest["shards"]]
    assert 300 <= sizes[0] < 500 and tokens[sizes[0]] == EOT
    assert sizes[1:-1] == [1000] * (len(sizes) - 2)


def test_duplicates_and_benchmark_texts_are_left_out_and_counted(tmp_path):
    secret = " ".join(f"word{i}" for i in range(20))
    padding = prose(2, seed=3, words=400)
    some = prose(300, words=30)
    contaminated = f"{padding[0]} {secret} {padding[1]}"
    texts = [*some, "twice", contaminated, "twice", *some, "twice"]
    source = write_parquet(tmp_path / "a.parquet", texts)
    context = " ".join(secret.split()[:10])
    ending = " ".join(secret.split()[10:])
    example = {"ind": 0, "ctx": context, "endings": [ending, "a", "b", "c"], "label": 0}
    (tmp_path / "hellaswag.jsonl").write_text(json.dumps(example) + "\n")
    filters = ["--deduplicate", "--decontaminate", "--hellaswag-path", tmp_path / "hellaswag.jsonl"]
    done = run("--source", source, "--data-dir", tmp_path / "out", "--shard-size", 10_000, *filters)
    duplicates = len(texts) - len(set(texts))
    assert f"1 contaminated, 1 cuts, {duplicates} duplicates)" in done.stdout
    assert not (tmp_path / "out" / ".hashes").exists()
    kept = texts_in(tokens_in(tmp_path / "out"))
    unique = list(dict.fromkeys(texts))
    i = unique.index(contaminated)
    unique[i : i + 1] = [(padding[0] + " ")[:-200], (" " + padding[1])[200:]]
    assert kept == unique


# -- interruptions


def start(*args, method="") -> subprocess.Popen:
    command = [sys.executable, FINEWEB]
    if method:
        command = [sys.executable, "-c", STARTER.format(method=method)]
    return subprocess.Popen(
        [*command, *map(str, args)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def session(pid: int) -> list[int]:
    """The processes of a session, as `start` opens one, that are still running."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == pid and fields[0] not in "ZX":
            alive.append(int(path.parent.name))
    return alive


def corpus_with_everything(folder: Path, count: int, decontaminate: bool) -> list:
    """The options of a run in which every piece of resumable state matters."""
    choose = random.Random(8)
    texts = prose(count, words=40)
    secrets = [text for text in texts if len(text.split()) > 60][:20]
    for i, text in enumerate(texts):
        if choose.random() < 0.1:
            texts[i] = text + " " + choose.choice(secrets)
    texts += choose.choices(texts, k=count // 5)
    choose.shuffle(texts)
    write_parquet(folder / "a.parquet", texts[: count // 2], group=100)
    three_shards = "long " * 9000
    write_jsonl(folder / "b.jsonl", [*texts[count // 2 :], three_shards])
    (folder / "c.txt").write_text("\n".join(texts) * 2)
    options = ["--source", folder / "a.parquet", folder / "b.jsonl", folder / "c.txt"]
    options += ["--shard-size", 3000, "--deduplicate"]
    if decontaminate:
        rows = [{"ctx": text, "endings": ["a", "b", "c", "d"], "label": 0} for text in secrets]
        (folder / "hellaswag.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options += ["--decontaminate", "--hellaswag-path", folder / "hellaswag.jsonl"]
    return [*options, "--workers", 2]


def kill_and_restart(folder: Path, times: int, count: int, decontaminate: bool, seed: int) -> None:
    """A run killed at random moments is byte for byte the run that was left alone.

    It leaves no process behind.
    """
    choose = random.Random(seed)
    options = corpus_with_everything(folder, count, decontaminate)
    run(*options, "--data-dir", folder / "whole")
    whole = contents(folder / "whole")
    out = folder / "killed"
    kills = 0
    for i in range(times):
        process = start(*options, "--data-dir", out, method=choose.choice(["fork", "spawn"]))
        # so that the kills are spread over the whole
        shards = i * len(whole) // times + choose.randrange(2)
        while process.poll() is None:
            if len(list(out.glob("*.npy"))) >= shards and (out / "manifest.json").exists():
                break
            time.sleep(0.002)
        time.sleep(choose.random() * 0.02)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        wait_for(lambda pid=process.pid: not session(pid))
    run(*options, "--data-dir", out)
    assert kills >= times * 0.7
    assert contents(out) == whole


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path):
    kill_and_restart(tmp_path, times=4, count=700, decontaminate=False, seed=1)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ctrl_c_ends_everything_within_two_seconds(tmp_path, method):
    source = tmp_path / "a.txt"
    source.write_text("\n".join(prose(2000)) * 100)
    options = ["--source", source, "--data-dir", tmp_path / "out", "--shard-size", 100_000]
    process = start(*options, method=method)
    wait_for(lambda: len(list((tmp_path / "out").glob("*.npy"))) > 1)
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    _, errors = process.communicate(timeout=10)
    wait_for(lambda: not session(process.pid), 2 - (time.monotonic() - began))
    assert process.returncode == 130
    assert errors.strip().startswith("interrupted: the same command goes on"), errors
    assert len(errors.strip().splitlines()) == 1, errors


KILLED_WHILE_IT_HANDS_OVER = """
import multiprocessing, os, signal
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from support.workers import map_ahead, start_pool

def send_half(self, buffer, write=os.write):
    write(self._handle, buffer[: len(buffer) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

def work(value):
    Connection._send = send_half  # of this worker: its result goes through it
    return bytes(2**20)

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    pool = start_pool(2, id, None)
    try:
        list(map_ahead(pool, work, iter([("key", "value")]), ahead=3))
    except BrokenProcessPool as error:
        os.write(1, str(error).encode())
    os._exit(0)
"""


def test_a_worker_killed_while_it_hands_over_its_result_is_not_waited_for():
    done = run_program([sys.executable, "-c", KILLED_WHILE_IT_HANDS_OVER])
    assert done.stdout == "a worker was killed", done.stderr


def test_a_killed_worker_is_one_sentence_and_resumable(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("\n".join(prose(2000)) * 30)
    options = ["--source", source, "--shard-size", 100_000, "--workers", 2]
    process = start(*options, "--data-dir", tmp_path / "out", method="fork")
    wait_for(lambda: len(list((tmp_path / "out").glob("*.npy"))) > 1)
    os.kill(max(session(process.pid)), signal.SIGKILL)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1 and "a worker was killed" in errors, errors
    assert len(errors.strip().splitlines()) == 1, errors
    run(*options, "--data-dir", tmp_path / "out")
    assert np.array_equal(tokens_in(tmp_path / "out"), expected([source.read_text()]))


def test_a_second_process_on_the_same_directory_is_refused(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("\n".join(prose(2000)) * 100)
    options = ["--source", source, "--data-dir", tmp_path / "out", "--shard-size", 100_000]
    process = start(*options)
    wait_for(lambda: (tmp_path / "out" / "manifest.json").exists())
    assert "another process is writing to" in run(*options, code=1).stderr
    process.kill()
    process.communicate()


def test_a_full_disk_is_one_sentence_and_resumable(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        source = write_jsonl(tmp_path / "a.jsonl", prose(2000))
        options = ["--source", source, "--data-dir", disk / "out", "--shard-size", 5000]
        message = run(*options, code=1).stderr
        assert "No space left on device" in message and "cannot be written" in message
        assert not list(disk.rglob("*.tmp"))
        manifest = json.loads((disk / "out" / "manifest.json").read_text())
        assert len(manifest["shards"]) > 2 and manifest["cursor"]
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        run(*options)
        run(*options[:2], "--data-dir", tmp_path / "whole", *options[4:])
        assert contents(disk / "out") == contents(tmp_path / "whole")
    finally:
        subprocess.run(["umount", disk], check=True)


def damaged(path: Path, texts: list[str], damage: str) -> Path:
    if damage in ("parquet", "truncated", "column", "numbers"):
        write_parquet(path, texts)
        if damage == "parquet":
            path.write_bytes(b"this is no parquet at all")
        elif damage == "truncated":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        else:
            name = "text" if damage == "numbers" else "content"
            pq.write_table(pa.table({name: list(range(9)), "id": ["a"] * 9}), path)
    elif damage == "latin":
        path.write_bytes(("\n".join(texts) + " café").encode("latin-1"))
    elif damage == "utf-16":
        path.write_bytes("\n".join(texts).encode("utf-16"))
    else:
        lines = write_jsonl(path, texts).read_bytes().splitlines()
        bad_lines = {
            "no json": b"{what",
            "no text": b'{"text": 5}',
            "latin line": '{"text": "é"}'.encode("latin-1"),
        }
        lines[150] = bad_lines[damage]
        path.write_bytes(b"\n".join(lines))
    return path


NO_COLUMN = "has no column 'text' of text but"
NO_OBJECT = "a JSON object in UTF-8 with a text as its 'text' was expected"


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        ("parquet", "parquet", "cannot be read"),
        ("truncated", "parquet", "cannot be read"),
        ("column", "parquet", f"{NO_COLUMN} content (int64), id (string); --column names another"),
        ("numbers", "parquet", f"{NO_COLUMN} text (int64), id (string)"),
        ("latin", "txt", "is not UTF-8 (byte "),
        ("utf-16", "txt", "is not UTF-8 (byte 0)"),
        ("latin line", "jsonl", NO_OBJECT),
        ("no json", "jsonl", NO_OBJECT),
        ("no text", "jsonl", NO_OBJECT),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence_after_all_before_it(
    tmp_path, damage, kind, message
):
    first = write_parquet(tmp_path / "a.parquet", prose(300))
    second = damaged(tmp_path / f"b.{kind}", prose(200, seed=1), damage)
    files = [*find_files(str(first), "text"), *find_files(str(second), "text")]
    with pytest.raises(UserError) as error:
        list(read_batches(files))
    told = str(error.value)
    assert message in told and second.name in told and "\n" not in told


@pytest.mark.parametrize(("damage", "kind"), [("truncated", "parquet"), ("latin", "txt")])
def test_once_a_damaged_file_is_mended_the_run_goes_on(tmp_path, damage, kind):
    good = prose(1300, words=10)
    bad = prose(200, seed=1)
    first = write_parquet(tmp_path / "a.parquet", good)
    second = damaged(tmp_path / f"b.{kind}", bad, damage)
    options = ["--source", first, second, "--data-dir", tmp_path / "out"]
    options += ["--shard-size", 1000, "--workers", 1]
    assert second.name in run(*options, code=1).stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert len(manifest["shards"]) > 3 and manifest["cursor"]["file"] == 0
    if kind == "parquet":
        write_parquet(second, bad)
    else:
        bad = ["\n".join(bad)]
        second.write_text(bad[0])
    run(*options)
    assert np.array_equal(tokens_in(tmp_path / "out"), expected([*good, *bad]))


def test_a_source_that_changed_under_a_resumed_run_is_refused(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", prose(1500, words=10))  # more than one batch
    source.write_bytes(source.read_bytes() + b"{")
    options = ["--source", source, "--data-dir", tmp_path / "out", "--shard-size", 1000]
    run(*options, code=1)
    write_jsonl(source, prose(1500, words=10, seed=9))
    assert "has changed since" in run(*options, code=1).stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--source", "nosuch.txt"], "nosuch.txt: no such file"),
        (["--source", "nosuch-*.parquet"], "no such file"),
        (["--source", "."], "give the files: './*.txt'"),
        (["--source", "a.pdf"], "no .txt, .jsonl or .parquet"),
        (["--source", "pipe.txt"], "pipe.txt is a pipe, a device or a broken link: save"),
        (["--source", "broken.*"], "broken.jsonl is a pipe, a device or a broken link: save"),
        (["--source", "hub:"], "--source hub: names no dataset (Repo id must use"),
        (["--source", "hub:a/b/c"], "--source hub:a/b/c names no dataset (Repo id must be"),
        (["--workers", "1000000"], "--workers 1000000 are more than 1000"),
        (["--source", "good.jsonl", "--data-dir", "a.pdf"], "a.pdf cannot be written"),
        (
            ["--shard-size", "-1", "--workers", "-2"],
            "--shard-size -1 is less than 1; --workers -2 is less than 0",
        ),
        (
            ["--val-tokens", "2000", "--shard-size", "1000"],
            "--val-tokens 2000 are more than one shard",
        ),
        (["--verify", "--data-dir", "nowhere"], "no manifest.json"),
        (["--name", "a/b"], "cannot begin a file name"),
        (["--source", "good.jsonl", "--data-dir", "."], "no manifest.json but holds stray.npy"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, options, message, monkeypatch):
    (tmp_path / "a.pdf").touch()
    (tmp_path / "stray.npy").touch()
    (tmp_path / "broken.jsonl").symlink_to("nowhere.jsonl")
    os.mkfifo(tmp_path / "pipe.txt")
    write_jsonl(tmp_path / "good.jsonl", ["x"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fineweb.py", *options])
    with pytest.raises(UserError) as error:
        fineweb.main()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_mistyped_flag_is_bad_usage(tmp_path):
    assert "--shard-size" in run("--shard-siz", 5, code=2).stderr


# -- the hub, played by a server on this machine that is not in the best of health

COMMIT = "c0ffee" * 6 + "beef"
CARD = b"""---
configs:
- config_name: default
  data_files: [{split: train, path: other/*}]
- config_name: sample-10BT
  data_files: [{split: train, path: sample/10BT/*}]
- config_name: table
  data_files: [{split: train, path: table/*}]
---
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as `datasets` uses to read a dataset."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status: int, body: bytes = b"", **headers) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        api, _, path = unquote(urlparse(self.path).path).partition("/o/d")
        self.server.asked.append(path)
        files = self.server.files
        if api and self.server.failures and self.server.failures.pop():
            self.answer(503)
        elif api == "/api/datasets" and path.startswith("/tree/"):
            folder = "/".join([*path.split("/")[3:], ""])
            inside = [name[len(folder) :] for name in files if name.startswith(folder)]
            names = sorted({name.split("/")[0] for name in inside})
            entries = [self.entry(folder + name) for name in names]
            self.answer(200, json.dumps(entries).encode())
        elif api == "/api/datasets":
            commit = COMMIT if COMMIT in path else self.server.commit
            self.answer(200, json.dumps({"id": "o/d", "sha": commit, "siblings": []}).encode())
        elif api == "/datasets" and (name := path.partition(COMMIT + "/")[2]) in files:
            self.file(files[name])
        elif self.path == "/input.txt":
            self.answer(200, self.server.texts[0].encode())
        elif not path:
            self.answer(404, X_Error_Code="RepoNotFound")
        else:
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)

    do_HEAD = do_POST = do_GET

    def entry(self, path: str) -> dict:
        """A file or a folder in the hub's listing."""
        data = self.server.files.get(path)
        kind = "directory" if data is None else "file"
        return {"path": path, "oid": "0", "size": len(data or b""), "type": kind}

    def file(self, data: bytes) -> None:
        headers = {"X_Repo_Commit": COMMIT, "ETag": '"1"', "Accept_Ranges": "bytes"}
        if not (asked := self.headers.get("Range")):
            return self.answer(200, data, **headers)
        first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        trouble = self.server.trouble.pop(0) if self.server.trouble else ""
        if trouble in ("500", "503", "429"):
            return self.answer(int(trouble))
        headers["Content_Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        if not trouble:
            return self.answer(206, part, **headers)
        self.send_response(206)
        for name, value in {**headers, "Content_Length": str(len(part))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(part[: len(part) // 3])
        self.wfile.flush()
        if trouble == "stall":
            time.sleep(3)
        self.close_connection = True


@pytest.fixture
def hub(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.asked = []
    server.trouble = []
    server.failures = []
    server.commit = COMMIT
    server.texts = prose(2400, words=40)
    server.files = {
        "README.md": CARD,
        "other/a.parquet": b"not asked for",
        "table/a.csv": b"text\na\n",
    }
    for i in range(30):
        path = write_parquet(tmp_path / "file", server.texts[80 * i : 80 * (i + 1)])
        server.files[f"sample/10BT/0{i + 10}.parquet"] = path.read_bytes()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.env = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DOWNLOAD_TIMEOUT": "1",
        "PYTHONWARNINGS": "ignore",
    }
    yield server
    server.shutdown()
    server.server_close()


IMPATIENT = """
import time
import fineweb
from support import sources
time.sleep = lambda seconds: None  # also between huggingface_hub's own attempts
sources.BATCH_DOCUMENTS = 100
fineweb.run_and_exit(fineweb.main, fineweb.INTERRUPTED)
"""


def start_from_hub(server, out: Path, *options, impatient=True) -> subprocess.Popen:
    options = ["--data-dir", out, "--shard-size", 20_000, "--workers", 1, *options]
    command = [sys.executable, FINEWEB]
    if impatient:
        command = [sys.executable, "-c", IMPATIENT]
    return subprocess.Popen(
        [*command, "--source", "hub:o/d:sample-10BT", *map(str, options)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **server.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def from_hub(server, out: Path, *options, code=0) -> tuple[str, str]:
    process = start_from_hub(server, out, *options)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    return output, errors


def test_a_dataset_is_read_from_the_hub_and_its_commit_noted(tmp_path, hub):
    output, _ = from_hub(hub, tmp_path / "out", "--dry-run")
    documents, tokens = estimates_in(output)
    assert documents == 2400 and abs(tokens / len(expected(hub.texts)) - 1) < 0.1
    from_hub(hub, tmp_path / "out")
    assert np.array_equal(tokens_in(tmp_path / "out"), expected(hub.texts))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["sources"] == {"hub:o/d:sample-10BT": COMMIT}
    assert not any(path.endswith(".py") and path in hub.files for path in hub.asked)
    assert not any("other/a.parquet" in path for path in hub.asked)


def test_a_hub_that_fails_stalls_and_hangs_up_delays_but_changes_nothing(tmp_path, hub):
    some = ["", "503", "", "cut", "", "", "stall", "", "500", "429", "", "cut", "cut", "", "", ""]
    hub.trouble = some + ["503"] * 7 + [""] * 9 + ["cut"] * 15 + [""] * 9
    hub.trouble += random.Random(4).choices(some, k=9)
    hub.failures = [True, False] * 3
    from_hub(hub, tmp_path / "out")
    assert not hub.trouble and not hub.failures
    assert np.array_equal(tokens_in(tmp_path / "out"), expected(hub.texts))


def test_a_hub_that_is_gone_for_long_is_one_sentence_and_the_commit_is_kept_to_on_resume(
    tmp_path, hub
):
    hub.trouble = [""] * 25 + ["cut"] * 2000
    _, errors = from_hub(hub, tmp_path / "out", code=1)
    assert re.search(r"0\d\d.parquet cannot be read", errors.strip().splitlines()[-1])
    assert len(json.loads((tmp_path / "out" / "manifest.json").read_text())["shards"]) > 1
    hub.trouble = []
    hub.commit = "f" * 40
    hub.asked.clear()
    from_hub(hub, tmp_path / "out")
    assert np.array_equal(tokens_in(tmp_path / "out"), expected(hub.texts))
    # what is done is not read again
    assert not any("011.parquet" in path and "resolve" in path for path in hub.asked)


def test_ctrl_c_does_not_wait_for_a_hub_that_stalls(tmp_path, hub):
    hub.trouble = [""] * 25 + ["stall"] * 1000
    process = start_from_hub(hub, tmp_path / "out", impatient=False)
    wait_for(lambda: len(hub.trouble) < 1000)
    time.sleep(0.3)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=2)
    assert process.returncode == 130
    wait_for(lambda: not session(process.pid), 2 - (time.monotonic() - began))


def test_a_text_is_read_over_http(hub, monkeypatch):
    monkeypatch.setattr(sources, "TINYSHAKESPEARE", hub.env["HF_ENDPOINT"] + "/input.txt")
    files = list(find_files("tinyshakespeare", ""))
    assert list(read_batches(files)) == [((0, 0), [Text(hub.texts[0])])]
    monkeypatch.setattr(sources, "TINYSHAKESPEARE", hub.env["HF_ENDPOINT"] + "/nothere.txt")
    files = list(find_files("tinyshakespeare", ""))
    with pytest.raises(UserError, match=r"nothere\.txt cannot be read \(HTTPError: 404"):
        list(read_batches(files))


def test_what_the_hub_does_not_have_is_one_sentence(hub):
    no_column = "has no column 'content' of text but"
    expected_messages = {
        "hub:o/nothere": "cannot be read (RepositoryNotFoundError",
        "hub:o/d:nosuch": "'nosuch' not found. Available: ['default', 'sample-10BT', 'table']",
        "hub:o/d:table": "table/a.csv is neither parquet nor jsonl",
        "hub:o/d:sample-10BT:test": "has no split 'test' but train",
        "hub:o/d:sample-10BT:train:content": f"{no_column} text (string), id (string), ",
    }
    program = """
import sys
from support.common import UserError
from support.sources import find_sources, read_batches
for source in sys.argv[1:]:
    try:
        list(read_batches(find_sources((source,), column="text", revision="", commits={})))
    except UserError as error:
        print(error)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **hub.env}
    command = [sys.executable, "-c", program, *expected_messages]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected_messages)
    for line, message in zip(lines, expected_messages.values(), strict=True):
        assert message in line


# -- faults: each is one sentence, and all that was written before stays as it was


class HerePool:
    """Stands in for the processes: does the work at once, in this process."""

    def submit(self, work, *args):
        future = Future()
        future.set_result(work(*args))
        return future


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(fineweb, "start_pool", lambda *_: HerePool())
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 100)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and no power fails here


def make(folder: Path, *sources, **options) -> str:
    """A run of fineweb.py in this process, with `here`."""
    small = {"name": "x", "shard_size": 500, "data_dir": str(folder), "deduplicate": True}
    config = Config(source=tuple(map(str, sources)), workers=1, **(small | options))
    return fineweb.make_shards(config, folder)


def sentence(call, *args, **kwargs) -> str:
    """What the user is told of a failure."""
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    told = str(error.value)
    assert told.strip() and "\n" not in told
    return told


@pytest.fixture
def unfinished(tmp_path, here):
    """A folder whose run ended behind some shards, and its source, mended since: same size."""
    source = write_jsonl(tmp_path / "a.jsonl", [*prose(250, words=10), "the last"])
    data = source.read_bytes()
    source.write_bytes(data[:-2] + b"!\n")
    folder = tmp_path / "unfinished"
    assert "line 251" in sentence(make, folder, source)
    source.write_bytes(data)
    assert len(json.loads((folder / "manifest.json").read_text())["shards"]) > 3
    return folder, source


NO_OBJECT_AT_ALL = (3, "x", [])
NO_COUNT = (None, -1, 1.5, True, "7", [], 10**30)
NO_NAME = (None, 3, [], {})
WRONG = {  # what each value of a manifest cannot be
    ("options",): (None, *NO_OBJECT_AT_ALL),
    ("sources",): (None, *NO_OBJECT_AT_ALL),
    ("shards",): (None, 3, "x", {}, [3], [[]], [{}]),
    ("shards", 0, "name"): NO_NAME,
    ("shards", 0, "split"): NO_NAME,
    ("shards", 0, "tokens"): NO_COUNT,
    ("shards", 0, "sha256"): NO_NAME,
    ("tokens",): NO_COUNT,
    ("counts",): (None, *NO_OBJECT_AT_ALL, {}),
    ("counts", "documents"): NO_COUNT,
    ("cursor",): (*NO_OBJECT_AT_ALL, {}),
    ("cursor", "file"): NO_COUNT,
    ("cursor", "text"): NO_COUNT,
    ("cursor", "token"): NO_COUNT,
    ("cursor", "hashes"): NO_COUNT,
    ("cursor", "read"): (3, [], {}),
}
ABSENT = object()


def with_other(manifest: dict, path: tuple, value) -> bytes:
    """A manifest that has another value at a path, or none."""
    other = copy.deepcopy(manifest)
    place = other
    for key in path[:-1]:
        place = place[key]
    if value is ABSENT:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(other).encode()


def damaged_manifests(whole: bytes) -> list[bytes]:
    damages = [b"", b"[]", b"3", b"{}", b"null", b'"text"', b"[" * 100_000, b"\xff\x00" * 99]
    damages += [whole[: len(whole) // 2], whole[:-20], whole.replace(b":", b";", 1)]
    manifest = json.loads(whole)
    manifest.pop("checksum", None)  # older ones have none
    for path, values in WRONG.items():
        damages += [with_other(manifest, path, value) for value in (ABSENT, *values)]
    return damages


def test_a_damaged_manifest_is_one_sentence_and_the_shards_stay(unfinished, tmp_path, outcome):
    folder, source = unfinished
    path = folder / "manifest.json"
    whole = path.read_bytes()
    before = contents(folder)
    is_damaged = f"{path} is damaged: it is not what fineweb.py has written; put back a copy, or "
    is_damaged += f"delete {folder} and make it again"
    for damage in damaged_manifests(whole):
        path.write_bytes(damage)
        assert sentence(make, folder, source) == is_damaged, damage
        assert sentence(verify_shards, folder) == is_damaged
        assert path.read_bytes() == damage
        outcome("shards and manifests", f"manifest.json: {ascii(damage)[-60:]}", TOLD)
    path.unlink()
    for make_other, remove in ((os.mkdir, os.rmdir), (os.mkfifo, os.unlink)):
        make_other(path)
        assert sentence(make, folder, source) == is_damaged
        assert sentence(verify_shards, folder) == is_damaged
        remove(path)
    path.write_bytes(whole)
    assert contents(folder) == before
    make(folder, source)
    make(tmp_path / "whole", source)
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_manifest_with_a_wrong_digit_or_bit_is_noticed(unfinished):
    folder, source = unfinished
    path = folder / "manifest.json"
    whole = path.read_bytes()
    manifest = json.loads(whole)
    for place in ["file", "text", "token", "hashes"]:
        path.write_bytes(with_other(manifest, ("cursor", place), manifest["cursor"][place] + 1))
        assert "is damaged" in sentence(make, folder, source)
    content = read_manifest(folder) if path.write_bytes(whole) else {}
    choose = random.Random(0)
    told = 0
    for _ in range(300):
        flipped = bytearray(whole)
        flipped[choose.randrange(len(whole))] ^= 1 << choose.randrange(8)
        path.write_bytes(flipped)
        try:
            found = read_manifest(folder)
        except UserError:
            told += 1
        else:  # the checksum's own name, or a space
            assert {key: found[key] for key in SHAPE} == {key: content[key] for key in SHAPE}
    assert told > 250


def no_checksum(folder: Path, place: str, value: int) -> None:
    """Writes another cursor into an older manifest, one without a checksum."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("checksum", None)
    path.write_bytes(with_other(manifest, ("cursor", place), value))


@pytest.mark.parametrize("value", [10**6, 2**62])
def test_a_cursor_behind_the_end_is_one_sentence(unfinished, tmp_path, value):
    folder, source = unfinished
    before = contents(folder)
    for place in ("file", "text", "token", "hashes"):
        no_checksum(folder, place, value)
        message = ".hashes is damaged" if place == "hashes" else "has changed since"
        assert message in sentence(make, folder, source)
        (folder / "manifest.json").write_bytes(before["manifest.json"])
    no_checksum(folder, "file", 0)  # which is right
    make(folder, source)
    make(tmp_path / "whole", source)
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_lost_file_of_hashes_is_one_sentence(unfinished):
    folder, source = unfinished
    (folder / ".hashes").unlink()
    assert ".hashes is damaged: 0 bytes" in sentence(make, folder, source)


def test_a_shard_that_cannot_be_read_is_not_called_damaged(unfinished, monkeypatch):
    folder, _ = unfinished

    def broken(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(manifest, "hash_file", broken)
    assert "cannot be read (Input/output error)" in sentence(verify_shards, folder)


def test_files_of_the_user_are_not_deleted(tmp_path, here):
    source = write_jsonl(tmp_path / "a.jsonl", prose(300))
    folder = tmp_path / "out"
    folder.mkdir()
    mine = ["mine.tmp", ".mine.tmp", "manifest.json.tmp"]
    ours = [".x_train_000001.npy.123.tmp", ".manifest.json.77.tmp"]
    for name in mine + ours:
        (folder / name).touch()
    make(folder, source)
    assert sorted(path.name for path in folder.glob("*.tmp")) == sorted(mine)


# -- a full disk


def failing(monkeypatch, at: int) -> list[str]:
    """Every write to a disk from number `at` on fails. Returns the list of what is done."""
    done = []

    def count(name):
        done.append(name)
        if len(done) > at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Disk:
        """A file whose writes are counted."""

        def __init__(self, path, mode):
            self.file = open(path, mode)  # noqa: SIM115

        def write(self, data):
            count("write")
            return self.file.write(data)

        def flush(self):
            count("flush")
            self.file.flush()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

    def counted(name, call):
        return lambda *args: (count(name), call(*args))[1]

    monkeypatch.setattr(common, "open", Disk, raising=False)
    monkeypatch.setattr(filters, "open", Disk, raising=False)
    monkeypatch.setattr(os, "fsync", counted("fsync", os.fsync))
    monkeypatch.setattr(Path, "replace", counted("rename", Path.replace))
    return done


def test_a_disk_that_fills_up_at_any_write_is_one_sentence_and_resumable(
    tmp_path, here, monkeypatch, outcome
):
    source = write_jsonl(tmp_path / "a.jsonl", prose(40, words=30))
    with monkeypatch.context() as patch:
        operations = failing(patch, at=10**9)
        make(tmp_path / "whole", source, shard_size=700)
    whole = contents(tmp_path / "whole")
    assert len(operations) > 30 and {"write", "flush", "fsync", "rename"} == set(operations)
    for at in range(len(operations)):
        folder = tmp_path / f"{at}"
        with monkeypatch.context() as patch:
            failing(patch, at)
            told = sentence(make, folder, source, shard_size=700)
        assert told == (
            f"{folder} cannot be written (No space left on device); that mended, the same "
            "command goes on"
        )
        assert not list(folder.glob("*.tmp"))
        for name in set(contents(folder)) - {"manifest.json", ".hashes"}:
            assert contents(folder)[name] == whole[name]
        make(folder, source, shard_size=700)
        assert contents(folder) == whole
        outcome("full disk and permissions", f"fineweb.py at {operations[at]} {at}", TOLD)


# -- sources that are empty, go or change


def empty_file(folder: Path, kind: str) -> Path:
    path = folder / f"empty.{kind}"
    if kind == "no rows.parquet":
        return write_parquet(path, pa.array([], pa.string()))
    path.write_text("\n\n" if kind == "blank.jsonl" else "")
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "blank.jsonl", "parquet", "no rows.parquet"])
def test_a_dry_run_of_nothing_is_one_sentence(tmp_path, kind, monkeypatch):
    path = empty_file(tmp_path, kind)
    monkeypatch.setattr(sys, "argv", ["fineweb.py", "--source", str(path), "--dry-run"])
    told = sentence(fineweb.main)
    assert re.search(r"there is no text in it|Parquet file size is 0 bytes", told)


def test_a_dry_run_counts_an_unreadable_rest_as_a_mistake(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.gz"
    lines = write_jsonl(tmp_path / "a.jsonl", prose(4000)).read_bytes()
    path.write_bytes(gzip.compress(lines)[:-100])
    monkeypatch.setattr(sys, "argv", ["fineweb.py", "--source", str(path), "--dry-run"])
    assert "a.jsonl.gz cannot be read (EOFError" in sentence(fineweb.main)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize("fate", ["goes", "becomes a folder"])
def test_a_source_that_goes_after_it_was_found_is_one_sentence(
    tmp_path, here, kind, fate, monkeypatch
):
    first = write_jsonl(tmp_path / "a.jsonl", prose(150, words=10))
    second = tmp_path / f"b.{kind}"
    texts = ["one text", "another"]
    if kind == "parquet":
        write_parquet(second, texts)
    else:
        write_jsonl(second, texts)
    data = second.read_bytes()

    def find_and_lose(*args):
        files = sources.find_sources(*args)
        second.unlink()
        if fate == "becomes a folder":
            second.mkdir()
        return files

    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(fineweb, "find_sources", find_and_lose)
        told = sentence(make, folder, first, second)
    assert re.search(rf"b.{kind} cannot be read \(\w+Error: .*; that mended, the same", told)
    if fate == "becomes a folder":
        second.rmdir()
    second.write_bytes(data)
    make(folder, first, second)
    make(tmp_path / "whole", first, second)
    assert contents(folder) == contents(tmp_path / "whole")


def test_lines_of_any_depth_and_names_of_any_bytes_do_no_harm(tmp_path, here):
    deep = tmp_path / "deep.jsonl"
    deep.write_text('{"text": "a"}\n' + "[" * 100_000)
    assert "deep.jsonl, line 2: a JSON object" in sentence(make, tmp_path / "deep", deep)
    source = tmp_path / os.fsdecode(b"\xff\n.jsonl")
    write_jsonl(source, prose(300))
    make(tmp_path / "out", source)
    assert len(texts_in(tokens_in(tmp_path / "out"))) == 300


def test_every_character_and_a_million_spaces_come_back_from_jsonl(tmp_path, here):
    characters = [chr(c) for c in range(0x110000)]
    random.Random(0).shuffle(characters)  # a third of all neighbours of surrogates are some
    texts = ["".join(characters[i : i + 4096]) for i in range(0, len(characters), 4096)]
    texts += [" " * 1_000_000 + "word", "a" + "\n" * 1_000_000 + "b", " " * 1_000_000]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    make(tmp_path / "out", source, shard_size=10**7, deduplicate=False)
    replaced = [t.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for t in texts]
    assert texts_in(tokens_in(tmp_path / "out")) == replaced


def test_processes_that_cannot_be_started_are_one_sentence(monkeypatch):
    def no_more(*_):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(ProcessPoolExecutor, "submit", no_more)
    told = sentence(fineweb.start_pool, 900, print, None)
    assert "900 workers cannot be started (Resource temporarily unavailable); try fewer" in told


# -- Ctrl-C while a worker is still importing, streams that are closed

SLOW_TO_IMPORT = """
import multiprocessing, os, sys, time
if __name__ != "__main__":
    number = len(os.listdir("importing"))
    open(f"importing/{number}", "w").close()
    time.sleep(0.5 if number == int(sys.argv[-1]) else 0)
import fineweb
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    sys.argv.pop()
    fineweb.run_and_exit(fineweb.main, fineweb.INTERRUPTED)
"""


@pytest.mark.parametrize("worker", [0, 1])  # the first is started by the main thread
def test_a_worker_that_is_still_importing_says_nothing_at_ctrl_c(tmp_path, worker):
    (tmp_path / "main.py").write_text(SLOW_TO_IMPORT)
    (tmp_path / "importing").mkdir()
    source = write_jsonl(tmp_path / "a.jsonl", prose(20_000, words=10))
    command = [sys.executable, "main.py", "--source", source, "--workers", "2", str(worker)]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    wait_for((tmp_path / "importing" / str(worker)).exists)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    wait_for(lambda: not session(process.pid), 10)
    assert process.returncode == 130
    assert len(errors.strip().splitlines()) == 1 and errors.strip().startswith("interrupted")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-", "| true"])
def test_closed_streams_change_nothing(tmp_path, closed):
    source = write_jsonl(tmp_path / "a.jsonl", prose(30))
    line = f"{sys.executable} {FINEWEB} --source {source} --data-dir out --workers 1 {closed}"
    command = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert len(texts_in(tokens_in(tmp_path / "out"))) == 30


# -- what a web server can do wrong

OK = b"HTTP/1.1 200 OK\r\n"
CLOSE = b"Connection: close\r\n"
BODY = b"some text " * 1000
SIZE = b"Content-Length: 10000\r\n"
FOUND = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: %s\r\n\r\n"
GZIP = b"Content-Encoding: gzip\r\n"
DRIP = [b"x"] * 1000


class RawServer(socketserver.ThreadingTCPServer):
    """Answers every request with its `answer`: bytes, or a list of them, ten a second."""

    daemon_threads = True
    answer: bytes | list[bytes] = b""

    class RequestHandlerClass(socketserver.StreamRequestHandler):
        def handle(self):
            while self.rfile.readline().strip():
                pass
            answer = self.server.answer
            parts = [answer] if isinstance(answer, bytes) else answer
            try:
                for i, part in enumerate(parts):
                    time.sleep(0.1 if i else 0)
                    self.wfile.write(part)
            except OSError:
                pass  # the client has had enough

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.RequestHandlerClass)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/input.txt"


@pytest.fixture
def server(monkeypatch):
    server = RawServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(web, "WINDOW", 0.5)
    monkeypatch.setattr(web, "LEAST", 100)
    monkeypatch.setattr(web, "SILENCE", 1)
    monkeypatch.setattr(web, "MOST", 100_000)
    monkeypatch.setattr(web, "WAITS", (0,))
    monkeypatch.setattr(sources, "TINYSHAKESPEARE", server.url)
    in_threads = []
    monkeypatch.setattr(threading, "excepthook", in_threads.append)
    yield server
    server.shutdown()
    server.server_close()
    assert not in_threads


def text_from(server) -> str:
    batches = read_batches(list(find_files("tinyshakespeare", "")))
    return "".join(text.text for _, batch in batches for text in batch)


def download_from(server, folder: Path, seconds: float = 5) -> bytes:
    """HellaSwag's download, if BODY were its official content."""
    ids = {"val": transfer.blob_id(BODY)}
    return examples.download("val", folder, server.url, ids, patience=0).read_bytes()


@pytest.mark.parametrize("length", [b"abc", b"-5", b"1e4", b"", b"9" * 5000])
def test_a_content_length_that_is_none_does_no_harm(server, length, tmp_path, outcome):
    server.answer = OK + CLOSE + b"Content-Length: " + length + b"\r\n\r\n" + BODY
    assert download_from(server, tmp_path) == BODY  # its hash says that this is all
    told = sentence(text_from, server)
    assert "input.txt cannot be read (OSError: the server does not say how long it is)" in told
    outcome("HTTP", f"a length of {length[:20]!r}", TOLD)


WRONG_ANSWERS = {
    "half": OK + SIZE + b"\r\n" + BODY[:5000],
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.7\r\n",
    "no head": b"\x00\xff" * 500,
    "gzip": OK + CLOSE + GZIP + b"\r\n" + BODY,
    "half gzip": OK + SIZE + GZIP + b"\r\n" + gzip.compress(BODY),
    "chunks": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    "two lengths": OK + SIZE + b"Content-Length: 7\r\n\r\n" + BODY,
    "redirect to [": FOUND % b"http://[",
    "redirect to a port": FOUND % b"http://127.0.0.1:port/",
    "redirect to bytes": FOUND % b"http://\xff\xfe/",
    "redirect to ftp": FOUND % b"ftp://127.0.0.1/",
    "redirect to a file": FOUND % b"file:///etc/passwd",
    "redirect to itself": FOUND % b"/input.txt",
    "redirect to nowhere": b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n",
    "410": b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n",
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "dripping head": [OK, b"X: ", *DRIP],
    "dripping body": [OK + SIZE + b"\r\n", *DRIP],
    "dripping body without a length": [OK + CLOSE + b"\r\n", *DRIP],
    "dripping chunks": [OK + b"Transfer-Encoding: chunked\r\n\r\n", *([b"1\r\nx\r\n"] * 1000)],
    "dripping redirect": [FOUND[:40], *DRIP],
    "silence": [OK + SIZE + b"\r\n", *([b""] * 1000)],
    "no end": OK + CLOSE + b"\r\n" + BODY * 100,
}


@pytest.mark.parametrize("answer", WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
def test_a_wrong_answer_is_one_sentence_within_seconds(
    server, tmp_path, answer, monkeypatch, outcome
):
    server.answer = answer
    fetch = transfer.fetch
    monkeypatch.setattr(transfer, "fetch", lambda url: fetch(url, 0.7))
    connect = web.connect
    monkeypatch.setattr(web, "connect", lambda url, _: connect(url, 0.7))
    began = time.monotonic()
    assert "HellaSwag cannot be had from http:" in sentence(download_from, server, tmp_path)
    assert "/input.txt cannot be read (" in sentence(text_from, server)
    assert time.monotonic() - began < 5
    assert not list(tmp_path.iterdir())
    outcome("HTTP", f"an answer of {ascii(answer)[:60]}", TOLD)

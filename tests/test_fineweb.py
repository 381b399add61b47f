"""fineweb.py: every document arrives exactly, whatever kills, cuts or confuses the program."""

import bz2
import codecs
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import unquote, urlparse

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from conftest import EOT, POINTER, HerePool, documents, environment, run_program
from contract import TOLD, call, contents
from tqdm import tqdm

import fineweb
from fineweb import Config, hold_out, pack, stream_tokens, tokenize
from support.base.errors import UserError
from support.base.files import download
from support.text import sources
from support.text.decontaminate import Benchmark, cut_out
from support.text.manifest import read_manifest, verify_shards, write_manifest
from support.text.sources import Place, find_sources, read_batches
from support.text.token_files import find_shards
from support.text.tokenizer import gpt2

ROOT = Path(__file__).parent.parent

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


STARTER = """
import multiprocessing, sys, time
import fineweb
from support.text import sources
if __name__ == "__main__":
    sys.argv[0] = "fineweb.py"
    {first}
    fineweb.run_and_exit(fineweb.main)
"""


def start(*args, method="", first="", env=None) -> subprocess.Popen:
    """`python fineweb.py ...` in a session of its own, with what it does first."""
    if method:
        first = f'multiprocessing.set_start_method("{method}")'
    program = ["-c", STARTER.format(first=first)] if first else [ROOT / "fineweb.py"]
    return subprocess.Popen(
        [sys.executable, *map(str, [*program, *args])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(**(env or {})),
    )


def run(*args, code=0, **how) -> subprocess.CompletedProcess:
    """The same, until it ends, which must be with that exit code."""
    process = start(*args, **how)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors + output
    assert code != 1 or errors.strip().splitlines()[-1].startswith("fineweb.py: ")
    return subprocess.CompletedProcess(args, code, output, errors)


def files_of(source, column="text") -> list:
    return find_sources({"source": [str(source)], "column": column, "revision": ""}, {})


def sentence(call, *args, **kwargs) -> str:
    """What the user is told of a failure."""
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    told = str(error.value)
    assert told.strip() and "\n" not in told
    return told


def tokens_in(folder: Path) -> np.ndarray:
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


@cache
def tokens_of(text: str) -> np.ndarray:
    return np.array([EOT, *gpt2().encoding.encode_ordinary(text)])


def expected(texts) -> np.ndarray:
    return np.concatenate([tokens_of(text) for text in texts])


def texts_in(tokens: np.ndarray) -> list[str]:
    """The documents again."""
    assert tokens[0] == EOT
    starts = [*np.flatnonzero(tokens == EOT), len(tokens)]
    return [gpt2().encoding.decode(tokens[a + 1 : b].tolist()) for a, b in pairwise(starts)]


def write_parquet(path: Path, texts, group: int = 50) -> Path:
    columns = {"text": texts, "id": [f"<urn:{i}>" for i in range(len(texts))]}
    pq.write_table(pa.table(columns), path, row_group_size=group, compression="none")
    return path


def write_jsonl(path: Path, texts, column: str = "text") -> Path:
    lines = [json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)]
    path.write_text("".join(lines))
    return path


def prose(count: int, seed: int = 0, words: int = 60) -> list[str]:
    choose = random.Random(seed)
    texts = []
    for _ in range(count):
        length = choose.randrange(1, 2 * words)
        texts.append(" ".join(choose.choices(WORDS, k=length)) + ".")
    return texts


WORDS = ["".join(random.Random(i).choices("etaoinshrdlu", k=1 + i % 9)) for i in range(400)]


# -- tokens


def test_a_text_file_read_in_stretches_has_the_tokens_of_the_whole(tmp_path, monkeypatch):
    choose = random.Random(5)
    alphabet = ["a", "Bc", " ", "  ", "\n", "\r\n", "\t", "'", "'s", "é", "你", "🙂", "12", "!"]
    alphabet += ["\u3000", "\u0085", "\x1c", "!\x1f", "<|endoftext|>"]  # a sign, to tiktoken
    for size in (1, 7, 16, 50):
        monkeypatch.setattr(sources, "STRETCH", size)
        for _ in range(40):
            document = "".join(choose.choices(alphabet, k=choose.randrange(60)))
            (tmp_path / "a.txt").write_bytes(document.encode())
            pieces = list(sources.read_text(str(tmp_path / "a.txt"), ""))
            assert "".join(piece for piece, _ in pieces) == document
            assert [starts for _, starts in pieces] == [True] + [False] * (len(pieces) - 1)
            parts = [part for piece, _ in pieces for part in gpt2().encode_to_arrays(piece)]
            assert np.concatenate(parts).tolist() == expected([document])[1:].tolist()


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_reading_goes_on_from_any_place(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(sources, "STRETCH", 40)
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 1)
    texts = [*prose(230, words=5), None, ""]
    path = tmp_path / f"corpus.{kind}"
    path.write_text("é ".join(texts[:-2]))
    if kind == "jsonl":
        write_jsonl(path, texts[:-2])
    if kind == "parquet":
        write_parquet(path, texts, group=17)
    files = 2 * files_of(path)
    batches = list(read_batches(files))
    n = len(batches) // 2
    places = [(i, j, i) for i in (0, 1) for j in range(n)]
    assert n > 150 and [place for place, _ in batches] == places
    for i in [0, 1, 16, 17, 18, 99, 100, 101, n - 2, n - 1, n, n + 1, n + 99]:
        assert list(read_batches(files, *places[i][:2])) == batches[i:]


def test_text_is_read_from_every_kind_of_file_that_people_have(tmp_path):
    rows = [{"text": "one"}, {"text": None}, {"text": "two\n"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    pa.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd").write(lines)
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines))
    (tmp_path / "a.ndjson.bz2").write_bytes(bz2.compress(lines))
    (tmp_path / "ba.json").write_text(json.dumps(["one", "", "two\n"]))
    (tmp_path / "b.JSON").write_text("\n" + json.dumps(rows, indent=1))
    (tmp_path / "bb.json").write_bytes(codecs.BOM_UTF8 + json.dumps(rows).encode())
    (tmp_path / "c.JSONL").write_bytes(codecs.BOM_UTF8 + lines)
    pq.write_table(pa.table({"text": ["one", None, "two\n"]}), tmp_path / "d.parquet")
    for path in sorted(tmp_path.iterdir()):
        [(_, batch)] = read_batches(files_of(path))
        assert [text for text, *_ in batch] == ["one", "", "two\n"], path.name
    pq.write_table(pa.table({"text": pa.nulls(2)}), tmp_path / "e.parquet")
    (tmp_path / "f.TXT").write_text("three")
    (tmp_path / "g.md").write_text("four")
    (tmp_path / "h.py.gz").write_bytes(gzip.compress(b"five = 5"))
    texts = [
        t for name in "efgh" for _, b in read_batches(files_of(tmp_path / f"{name}.*")) for t in b
    ]
    assert [text for text, *_ in texts] == ["", "", "three", "four", "five = 5"]


# -- the stream and its shards


BEGINNING = (Place(0, 0, 0), {})


def stream_of(texts, size, before=BEGINNING, limit=10**9):
    """What the workers and `stream_tokens` make of texts, `size` at a time, from a place on."""
    place, counts = before
    batches = []
    for i in range(place.text, len(texts), size):
        whole = [(text, True, ("", "")) for text in texts[i : i + size]]
        batches.append((Place(0, i, 0), tokenize(whole, gpt2(), None)))
    return stream_tokens(iter(batches), limit, Counter(counts), tqdm(disable=True), EOT)


def pack_all(stream, size, val_tokens=0):
    first, stream = hold_out(stream, size, val_tokens, 0, EOT)
    return pack(stream, size, first)


@pytest.mark.parametrize("shard_size", [2, 64, 777, 1500])
def test_shards_hold_the_stream_and_each_cursor_leads_to_the_same_rest(shard_size):
    texts = prose(60, words=20)
    whole = expected(texts)
    packed = pack_all(stream_of(texts, 7), shard_size)
    shards = [(np.concatenate(parts).tolist(), *place) for parts, *place in packed]
    assert np.array_equal(np.concatenate([tokens for tokens, *_ in shards]), whole)
    if len(whole) >= 2 * shard_size:
        assert {len(tokens) for tokens, *_ in shards[:-1]} <= {shard_size}
    for i in range(0, len(shards) - 1, 1 + len(shards) // 20):
        _, before, done = shards[i]
        rest = pack(stream_of(texts, 7, before), shard_size, first=shard_size, done=done)
        rest = [(np.concatenate(parts).tolist(), *place) for parts, *place in rest]
        assert rest == shards[i + 1 :]


@pytest.mark.parametrize(
    ("lengths", "shard_size", "val_tokens", "held"),
    [
        ([50] * 40, 1000, 0, 1000),  # two shards or more: a whole one
        ([50] * 39, 1000, 0, 100),  # less: 5%, up to a document
        ([1900], 1000, 0, 95),  # no document starts near: 5% all the same
        ([94, 97, 1700], 100, 70, 94),
        ([50] * 400, 1000, 75, 100),
        ([300] * 400, 1000, 100, 100),
        ([50] * 19 + [30, 40] * 9, 1000, 0, 1020),  # the 21 documents that the source holds out
        ([50] * 19 + [30, 40] * 9, 1000, 75, 1020),
        ([1725, 93], 10_000, 900, 900),  # the next start would leave a twentieth to train on
        ([50] * 400, 1000, 3010, 3010),  # more than a shard, if that is asked for
    ],
)
def test_the_first_tokens_are_held_out(lengths, shard_size, val_tokens, held):
    tokens = np.concatenate([[EOT] + [1] * (n - 1) for n in lengths]).astype(np.uint16)
    end = 1020 if 40 in lengths else 0  # a batch ends where the files end that are held out
    batches = [*np.array_split(tokens[:end], 30), *np.array_split(tokens[end:], 40)]
    places = [(Place(int(i >= 30), i, 0), {}) for i in range(70)]
    stream = zip(places, batches, strict=True)
    first, stream = hold_out(stream, shard_size, val_tokens, int(end > 0), EOT)
    assert first == held
    assert [place.text for (place, _), _ in stream] == list(range(70))


def test_tokens_that_are_packed_do_not_stay_in_memory():
    arrays = [np.full(100, 1, np.uint16) for _ in range(8)]
    first = weakref.ref(arrays[0])
    shards = pack_all(((BEGINNING, arrays.pop(0)) for _ in range(8)), size=200)
    for _ in range(2):
        next(shards)
    assert first() is None


def test_a_corpus_that_leaves_nothing_to_train_on_is_refused():
    """Nor does one that leaves <|endoftext|> alone: it is no text."""
    for texts, val_tokens, told in (
        (["two words"], 5, "of 3 tokens, 0 are for training, and they hold no text"),
        ([], 0, "of 0 tokens, 0 are for training, and they hold no text"),
        (["two words", "", ""], 3, "of 5 tokens, 2 are for training"),
        (["", "", "two words"], 2, "of 5 tokens, 2 are for validation"),
    ):
        assert told in sentence(pack_all, stream_of(texts, 1), 100, val_tokens)


# -- decontamination


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
    for _ in range(100):
        filler = choose.choices([*vocabulary, "unheard", "of"], k=choose.randrange(30))
        copied = choose.choice(benchmark).upper().split()
        copied = copied[choose.randrange(5) : choose.randrange(10, 40)]
        texts.append(" \n".join([*filler, *copied, *filler[:3]]))
    found = [Benchmark(benchmark).find(text) for text in texts]
    slow = [slow_matches(text, benchmark) for text in texts]
    assert 7 < sum(map(bool, slow)) < 93
    assert found == slow


def test_a_passage_across_two_stretches_is_cut_out_of_both(tmp_path, monkeypatch):
    """A .txt comes in stretches, whose ends the passage knows nothing of."""
    monkeypatch.setattr(sources, "STRETCH", 9000)
    run = " ".join(f"w{i}" for i in range(13))
    benchmark = Benchmark([run])
    for before in range(8850, 9100, 9):  # where the first stretch ends in it, or near
        (tmp_path / "a.txt").write_text("a " * (before // 2) + run + " b" * 5000)
        texts = [text for _, batch in read_batches(files_of(tmp_path / "a.txt")) for text in batch]
        assert len(texts) > 1
        tokens, counts = tokenize(texts, gpt2(), benchmark)
        kept = texts_in(tokens)
        whole = "".join(text for text, *_ in texts)
        [(_, a), (b, _)] = cut_out(whole, benchmark)[0]
        assert (kept[0], "".join(kept[1:])) == (whole[:a], whole[b:]), before
        assert counts["cuts"] == 1 or counts["cuts"] == 2  # in one stretch, or in both


def test_a_match_is_cut_with_200_characters_on_each_side():
    run = " ".join(f"w{i}" for i in range(13))
    benchmark = Benchmark([run])
    before = "a " * 300
    after = " b" * 250
    text = before + run.upper() + "," + after
    left, cuts = cut_out(text, benchmark)
    assert (left, cuts) == ([(0, 400), (len(before + run) + 1 + 200, len(text))], 1)
    # 198, 1 and 198 characters would be left
    text = "a " * 199 + run + " b" * 200 + " " + run + " b" * 199
    assert cut_out(text, benchmark) == ([], 2)
    text = "c " * 250 + (run + " b" * 210 + " ") * 10
    left, cuts = cut_out(text, benchmark)
    assert cuts == 10 and left == [(0, 300), (len(text) - 221, len(text))]
    many = (run + " c" * 300 + " ") * 11
    assert cut_out(many, benchmark) == ([], 11)
    stretch = "c " * 60_000 + many
    assert len(cut_out(stretch, benchmark)[0]) == 12, "a part of a long file"


# -- the command


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
    told = run("--source", *paths, *options, method=method).stderr
    assert told.startswith("6 times the text itself says <|endoftext|>, which stays text: to make")
    tokens = tokens_in(tmp_path / "out")
    replaced = SURROGATES.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    everything = [*texts, *texts[:20], replaced, (tmp_path / "a.txt").read_bytes().decode()]
    assert np.array_equal(tokens, expected(everything)) and texts_in(tokens) == everything


def test_the_standard_library_comes_in_one_order_that_begins_with_a_fair_sample():
    files = files_of("stdlib")
    assert [file.name for file in files] == [file.name for file in files_of("stdlib")]
    left_out = re.compile(r"(^|/)(tests?|idle_test|site-packages)/")
    assert not any(left_out.search(file.name) for file in files)
    assert len({file.name.split("/")[0] for file in files[: len(files) // 20]}) > 10
    pieces = [piece for _, batch in read_batches(files) for piece, *_ in batch]
    assert len(pieces) == len(files)
    i = [file.name for file in files].index("json/decoder.py")
    assert pieces[i] == Path(json.decoder.__file__).read_text()
    assert 2e6 < sum(map(len, pieces)) / 3 < 1e7  # about 5M tokens


def test_the_shards_are_cut_at_the_size_and_at_the_limit(tmp_path, here):
    source = write_jsonl(tmp_path / "a.jsonl", prose(400), column="content")
    sizes = dict(shard_size=1000, max_tokens=4321, val_tokens=300)
    make(tmp_path / "out", source, column="content", name="mine", **sizes)
    tokens = tokens_in(tmp_path / "out")
    assert np.array_equal(tokens, expected(prose(400))[:4321])
    manifest = read_manifest(tmp_path / "out")
    assert manifest["counts"]["documents"] == (tokens == EOT).sum() < 400, "only those that are in"
    sizes = [shard["tokens"] for shard in manifest["shards"]]
    assert 300 <= sizes[0] < 500 and tokens[sizes[0]] == EOT
    assert sizes[1:-1] == [1000] * (len(sizes) - 2)


def test_benchmark_texts_are_left_out_and_counted(tmp_path):
    secret = " ".join(f"word{i}" for i in range(20))
    padding = prose(2, seed=3, words=400)
    texts = [*prose(300, words=30), f"{padding[0]} {secret} {padding[1]}", "the last"]
    source = write_parquet(tmp_path / "a.parquet", texts)
    context, ending = secret[:59], secret[60:]
    example = {"ind": 0, "ctx": context, "endings": [ending, "a", "b", "c"], "label": 0}
    (tmp_path / "hellaswag.jsonl").write_text(json.dumps(example) + "\n")
    options = ["--decontaminate", "--hellaswag-path", tmp_path / "hellaswag.jsonl"]
    done = run("--source", source, "--data-dir", tmp_path / "out", "--shard-size", 9000, *options)
    assert "(documents: 302, contaminated: 1, cuts: 1)" in done.stdout
    texts[300:301] = [(padding[0] + " ")[:-200], (" " + padding[1])[200:]]
    assert texts_in(tokens_in(tmp_path / "out")) == texts


# -- interruptions


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def session(pid: int) -> list[int]:
    """The processes of a session, as `start` opens one, that are still running."""
    listed = subprocess.run(["ps", "-o", "pid=,stat=", "--sid", str(pid)], capture_output=True)
    found = [line.split() for line in listed.stdout.decode().splitlines()]
    return [int(pid) for pid, state in found if state[0] not in "ZX"]


def corpus_with_everything(folder: Path, count: int, decontaminate: bool) -> list:
    """The options of a run in which every piece of resumable state matters."""
    choose = random.Random(8)
    texts = prose(count, words=40)
    secrets = [text for text in texts if len(text.split()) > 60][:20]
    for i in range(count):
        if choose.random() < 0.1:
            texts[i] += " " + choose.choice(secrets)
    write_parquet(folder / "a.parquet", texts[: count // 2], group=100)
    three_shards = "long " * 9000
    write_jsonl(folder / "b.jsonl", [*texts[count // 2 :], three_shards])
    (folder / "c.txt").write_text("\n".join(texts) * 2)
    options = ["--source", folder / "a.parquet", folder / "b.jsonl", folder / "c.txt"]
    options += ["--shard-size", 3000]
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


def interrupt(process: subprocess.Popen) -> None:
    """Ctrl-C ends all processes of the session within two seconds, with one sentence."""
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    _, errors = process.communicate(timeout=10)
    wait_for(lambda: not session(process.pid), 2 - (time.monotonic() - began))
    assert process.returncode == 130
    told = errors.strip()
    assert told.startswith("interrupted: ") and len(told.splitlines()) == 1, errors


@pytest.fixture
def long_run(tmp_path) -> list:
    """The options of a run that takes its time."""
    (tmp_path / "a.txt").write_text("\n".join(prose(2000)) * 100)
    options = ["--source", tmp_path / "a.txt", "--data-dir", tmp_path / "out"]
    return [*options, "--shard-size", 100_000, "--workers", 2]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_second_run_is_refused_and_ctrl_c_ends_the_first(tmp_path, long_run, method):
    process = start(*long_run, method=method)
    wait_for(lambda: len(list((tmp_path / "out").glob("*.npy"))) > 1)
    assert "another process is writing to" in run(*long_run, code=1).stderr
    interrupt(process)


KILLED_WHILE_IT_HANDS_OVER = """
import multiprocessing, os, signal
from multiprocessing.connection import Connection
from support.text.workers import map_ahead, run_and_exit, start_pool

def send_half(self, buffer, write=os.write):
    write(self._handle, buffer[: len(buffer) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

def work(value):
    Connection._send = send_half  # of this worker: its result goes through it
    return bytes(2**20)

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    pool = start_pool(2, id, None)
    run_and_exit(lambda args: list(map_ahead(pool, work, iter([("key", ("value",))]), ahead=3)))
"""


def test_a_worker_killed_while_it_hands_over_its_result_is_not_waited_for():
    done = run_program([sys.executable, "-c", KILLED_WHILE_IT_HANDS_OVER])
    assert done.stderr.strip().endswith("BrokenProcessPool: a worker was killed")


def test_a_killed_worker_is_one_sentence_and_resumable(tmp_path, long_run):
    source = tmp_path / "a.txt"
    source.write_text("\n".join(prose(2000)) * 10)
    process = start(*long_run, method="fork")
    wait_for(lambda: len(list((tmp_path / "out").glob("*.npy"))) > 1)
    os.kill(max(session(process.pid)), signal.SIGKILL)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "a worker was killed" in errors and len(errors.strip().splitlines()) == 1, errors
    run(*long_run)
    assert np.array_equal(tokens_in(tmp_path / "out"), expected([source.read_text()]))


GOOD_LINES = b'{"text": "x"}\n' * 150
COLUMN = pa.BufferOutputStream()
pq.write_table(pa.table({"content": ["a"]}), COLUMN)
NUMBERS = pa.BufferOutputStream()
pq.write_table(pa.table({"text": [1, None]}), NUMBERS)
LONG_WINDOW = b"\x28\xb5\x2f\xfd\0\xa8\x0d\0\0a"  # RFC 8878: a window of 2 GB, a block of one byte
NO_OBJECT = "line 151, as a JSON object, cannot be read ("


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.parquet", b"PAR1 and no more", "cannot be read (ArrowInvalid: "),
        ("b.txt", "some text, café".encode("latin-1"), "byte 14 is not UTF-8"),
        ("b.txt", b"a b " * 2**19 + b"\xff", "byte 2,097,152 is not UTF-8"),  # stretches before it
        ("b.parquet", COLUMN.getvalue().to_pybytes(), "has no column 'text' but ['content']"),
        ("b.txt", None, "cannot be read (FileNotFoundError: "),
        ("b.jsonl", GOOD_LINES + '{"text": "é"}'.encode("latin-1"), NO_OBJECT),
        ("b.jsonl", GOOD_LINES + b"{what", NO_OBJECT),
        ("b.jsonl", GOOD_LINES + b'{"text": 5}', "'text' is 5, not a text; --column names"),
        ("b.jsonl", b'{"body": "a", "id": 3}', "has no 'text' but ['body', 'id']; --column names"),
        ("b.json", b'[{"text": "a"},\n["b"]]', "entry 2 of the list has no 'text' but ['b']"),
        ("b.txt", "Köln".encode("latin-1"), "iconv -f latin1 -t utf-8"),
        ("b.txt", POINTER, "b.txt is a pointer of Git LFS"),
        ("b.txt.zst", LONG_WINDOW, "b.txt.zst: unpack it first, by zstd -d --long=31"),
        ("b.parquet", NUMBERS.getvalue().to_pybytes(), "'text' is of int64, not of text"),
    ],
)
def test_an_unreadable_file_is_a_sentence_after_all_before_it(tmp_path, name, content, message):
    first = write_parquet(tmp_path / "a.parquet", prose(1300))
    second = tmp_path / name
    second.write_bytes(content or b"a text")
    batches = read_batches([*files_of(first), *files_of(second)])
    if content is None:
        second.unlink()
    assert next(batches)[0] == (0, 0, 0)
    told = sentence(list, batches)
    assert message in told and name in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--source nosuch.txt", "py: nosuch.txt: no such file, and none of the sources in"),
        ("--source .", ".: .txt, .md, .jsonl, .parquet and code are read; give './**/*.md' "),
        ("--source zipped/", ".parquet and code are read; give 'zipped/**/*.md'"),
        ("--source spark.parquet", "are read; give 'spark.parquet/**/*.parquet'"),
        (
            "--source zipped/*.pdf",
            "zipped/c.pdf: .txt, .md, .jsonl, .parquet and code are read; name",
        ),
        (
            "--source pipe.jsonl",
            "pipe.jsonl: .txt, .md, .jsonl, .parquet and code are read; name other files",
        ),
        (
            "--source empty",
            "empty: .txt, .md, .jsonl, .parquet and code are read; name other files",
        ),
        ("--source good.jsonl --name a/b", "--name a/b: the names of shards begin with it"),
        ("--source", "--source names nothing"),
        ("--source good.jsonl --val-source", "--val-source names nothing"),
        ("--source hub:", "hub: cannot be read (HFValidationError: Repo id must use"),
        ("--source good.jsonl --data-dir a.pdf", "a.pdf cannot be written (File exists): fix "),
        ("--source good.jsonl --data-dir .", ". holds stray.npy; choose another --data-dir"),
        ("--val-tokens -1 --workers 2000", "--val-tokens -1: it must be at least 0"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, options, message, monkeypatch):
    names = ("a.pdf", "b.parquet", "stray.npy", "zipped/c.pdf", "zipped/c.md", "empty/d")
    for name in (*names, "spark.parquet/part-0.snappy.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe.jsonl")
    write_jsonl(tmp_path / "good.jsonl", ["x"])
    monkeypatch.chdir(tmp_path)
    done = call("fineweb.py", *options.split())
    assert message in done.stderr
    assert done.returncode == (
        2 if "names" in message.replace("names a", "") or "--val" in options else 1
    )


def test_an_empty_file_cannot_be_the_text_for_validation(tmp_path):
    write_jsonl(tmp_path / "good.jsonl", ["x"])
    (tmp_path / "void.txt").touch()
    source = ["--source", tmp_path / "good.jsonl", "--val-source", tmp_path / "void.txt"]
    assert "hold no text" in run(*source, "--data-dir", tmp_path / "out", code=1).stderr
    source = ["--source", "tales", "--val-source", tmp_path / "good.jsonl", "--max-tokens", 2]
    source[1] = tmp_path / "good.jsonl"
    told = run(*source, "--data-dir", tmp_path / "out", code=1).stderr
    assert "0 are for training" in told and "(--max-tokens counts both)" in told


def test_a_failed_run_leaves_folders_that_another_one_uses_by_then(tmp_path, monkeypatch):
    def fail(*_):
        (tmp_path / "data" / "another").mkdir()
        raise UserError("as asked")

    monkeypatch.setattr(fineweb, "shard_text", fail)
    config = fineweb.Config(source=["stdlib"])
    with pytest.raises(UserError, match="as asked"):
        fineweb.make_shards(config, tmp_path / "data" / "mine")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["another"]


# -- the hub, played by a server on this machine that is not in the best of health

COMMIT = "c0ffee" * 6 + "beef"
CARD = b"""---
configs:
- config_name: default
  data_files: [{split: train, path: other/*}]
- config_name: sample-10BT
  data_files: [{split: train, path: sample/10BT/*}]
---
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as `datasets` uses to read a dataset."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status: int, body: bytes = b"", sent: int | None = None, **headers) -> None:
        """Announces the body, and sends all of it or only its first bytes."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        api, _, path = unquote(urlparse(self.path).path).partition("/o/d")
        self.server.asked.append(path)
        files = self.server.files
        if api == "/api/datasets" and path.startswith("/tree/"):
            folder = "/".join([*path.split("/")[3:], ""])
            inside = [name[len(folder) :] for name in files if name.startswith(folder)]
            names = sorted({name.split("/")[0] for name in inside})
            entries = []
            for path in (folder + name for name in names):
                kind = "file" if path in files else "directory"
                size = len(files.get(path, b""))
                entries.append({"path": path, "oid": "0", "size": size, "type": kind})
            self.answer(200, json.dumps(entries).encode())
        elif api == "/api/datasets":
            commit = COMMIT if COMMIT in path else self.server.commit
            about = {"id": "o/d", "sha": commit, "siblings": self.server.siblings}
            self.answer(200, json.dumps(about).encode())
        elif api == "/datasets" and (name := path.partition(COMMIT + "/")[2]) in files:
            self.file(files[name])
        elif self.path == "/input.txt":
            self.answer(self.server.statuses.pop(0), self.server.texts[0].encode())
        elif not path:
            self.answer(404, X_Error_Code="RepoNotFound")
        else:
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)

    do_HEAD = do_POST = do_GET

    def file(self, data: bytes) -> None:
        headers = {"X_Repo_Commit": COMMIT, "ETag": '"1"', "Accept_Ranges": "bytes"}
        if not (asked := self.headers.get("Range")):
            return self.answer(200, data, **headers)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        first = int(first)
        part = data[first : int(last or len(data)) + 1]
        trouble = self.server.trouble.pop(0) if self.server.trouble else ""
        if trouble in ("500", "503", "429"):
            return self.answer(int(trouble))
        headers["Content_Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        if not trouble:
            return self.answer(206, part, **headers)
        self.answer(206, part, sent=len(part) // 3, **headers)
        if trouble == "stall":
            time.sleep(3)
        self.close_connection = True


@pytest.fixture
def hub(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.asked = []
    server.trouble = []
    server.siblings = []
    server.commit = COMMIT
    server.texts = prose(2400, words=40)
    server.files = {"README.md": CARD, "other/a.parquet": b"not asked for"}
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


# the second also between huggingface_hub's own attempts
IMPATIENT = "sources.BATCH_DOCUMENTS = 100; time.sleep = lambda seconds: None"


def from_hub(server, out: Path, code=0, source="d:sample-10BT") -> str:
    """What a run that reads from the hub prints as its errors."""
    options = ["--source", f"hub:o/{source}", "--data-dir", out, *SMALL]
    return run(*options, code=code, first=IMPATIENT, env=server.env).stderr


SMALL = ["--shard-size", 20_000, "--workers", 1]


def test_a_hub_that_fails_stalls_and_hangs_up_delays_but_changes_nothing(tmp_path, hub):
    some = ["", "503", "", "cut", "", "", "stall", "", "500", "429", "", "cut", "cut", "", "", ""]
    hub.trouble = some + ["503"] * 7 + [""] * 9 + ["cut"] * 15 + [""] * 9
    hub.trouble += random.Random(4).choices(some, k=9)
    from_hub(hub, tmp_path / "out")
    assert not hub.trouble
    assert np.array_equal(tokens_in(tmp_path / "out"), expected(hub.texts))
    assert read_manifest(tmp_path / "out")["sources"] == {"hub:o/d:sample-10BT": COMMIT}
    assert not any("other/a.parquet" in path for path in hub.asked)


def test_a_hub_that_is_gone_for_long_is_a_sentence_and_a_resume_keeps_to_its_commit(tmp_path, hub):
    hub.trouble = [""] * 25 + ["cut"] * 2000
    errors = from_hub(hub, tmp_path / "out", code=1)
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
    options = ["--source", "hub:o/d:sample-10BT", "--data-dir", tmp_path / "out", *SMALL]
    process = start(*options, env=hub.env)
    wait_for(lambda: len(hub.trouble) < 1000)
    time.sleep(0.3)
    interrupt(process)


def test_a_file_on_the_web_is_read_also_from_a_busy_server(hub, monkeypatch):
    url = hub.env["HF_ENDPOINT"] + "/input.txt"
    monkeypatch.setattr("urllib3.util.Retry.sleep", lambda *_: None)
    hub.statuses = [503, 503, 200, 404]
    assert download(url) == hub.texts[0].encode()
    with pytest.raises(OSError, match="404"):
        download(url)


def test_without_a_network_a_run_fails_soon_and_leaves_no_folder(tmp_path, monkeypatch, here):
    folder = tmp_path / "data" / "x"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and says nothing
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {"HF_ENDPOINT": address}
        options = ["--source", "hub:o/d", "--data-dir", folder]
        done = run(*options, code=1, first="sources.FIRST_ANSWER = 0.3", env=env)
    assert "hub:o/d cannot be read (ReadTimeout: " in done.stderr
    assert not folder.parent.exists() and 5 <= sources.FIRST_ANSWER <= 15


def llm_c(tokens: np.ndarray) -> bytes:
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    return header.tobytes() + tokens.astype(np.uint16).tobytes()


def offer(server, **files: bytes) -> None:
    """Puts files into the hub's dataset, with their SHA-256."""
    for name, data in files.items():
        path = f"deep/{name}.bin"
        server.files[path] = data
        lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
        server.siblings.append({"rfilename": path, "size": len(data), "lfs": lfs})


def ready(server, out: Path, *more, code=0, source="tokens:o/d"):
    return run("--source", source, "--data-dir", out, *more, code=code, env=server.env)


def test_ready_tokens_are_downloaded_checked_resumed_and_trained_on(hub, tmp_path):
    tokens = [documents(300, seed=seed) for seed in range(4)]
    names = ["fw_val_000000", "fw_train_000001", "fw_train_000002", "fw_train_000003"]
    offer(hub, **dict(zip(names[::-1], map(llm_c, tokens[::-1]), strict=True)), unrelated=b"1")
    out = tmp_path / "out"
    whole = hub.files["deep/fw_train_000002.bin"]
    hub.files["deep/fw_train_000002.bin"] = whole[:-2] + b"no"
    assert "fw_train_000002.bin was damaged on its way" in ready(hub, out, code=1).stderr
    assert [shard["name"] for shard in read_manifest(out)["shards"]] == [
        f"deep/{name}.bin" for name in names[:2]
    ]
    hub.files["deep/fw_train_000002.bin"] = whole
    hub.asked.clear()
    hub.commit = "f" * 40
    said = ready(hub, out).stdout
    assert f"{sum(map(len, tokens)):,} tokens in 4 shards (documents: " in said
    assert not any("000001" in path for path in hub.asked)
    assert [path for path in hub.asked if "revision" in path] == [f"/revision/{COMMIT}"]
    for split, expected in (("val", tokens[:1]), ("train", tokens[1:])):
        found = [np.concatenate([*shard.read_all()]) for shard in find_shards(out, split)]
        assert all(map(np.array_equal, found, expected)) and len(found) == len(expected)
    assert "4 shards are as they were written" in run("--verify", "--data-dir", out).stdout
    hub.commit = COMMIT
    offer(hub, fw_val_000004=llm_c(tokens[1]))
    some = tmp_path / "some"
    said = ready(hub, some, "--max-tokens", 400).stdout
    assert "for validation: 600 tokens, 66.7% of the text" in said
    names = [shard["name"][-10:] for shard in read_manifest(some)["shards"]]
    assert names == ["000000.bin", "000004.bin", "000001.bin"], "one to train on, at least"
    offer(hub, other_train_000001=llm_c(tokens[1]))
    several = "holds several sets of tokens, ['deep/fw_train', 'deep/fw_val', 'deep/other_train']"
    assert several in ready(hub, tmp_path / "several", code=1).stderr
    del hub.siblings[-2:]
    some = tmp_path / "less"
    ready(hub, some, "--max-tokens", 400)
    assert [shard["name"][-10:] for shard in read_manifest(some)["shards"]] == [
        "000000.bin",
        "000001.bin",
    ]


def test_ready_tokens_replace_a_folder_only_when_they_come(hub, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(prose(40)))
    out = tmp_path / "out"
    run("--source", tmp_path / "a.txt", "--vocab-size", 300, "--data-dir", out, "--workers", 1)
    before = contents(out)
    val = llm_c(documents(300, seed=0))

    def now() -> dict:
        return {k: v for k, v in contents(out).items() if not k.startswith(".cache")}

    offer(hub, fw_val_000000=val, fw_train_000001=val)
    hub.files["deep/fw_val_000000.bin"] = val[:-2] + b"no"
    assert "damaged on its way" in ready(hub, out, "--overwrite", code=1).stderr
    assert now() == before
    hub.files["deep/fw_val_000000.bin"] = val
    ready(hub, out, "--overwrite")
    names = ["deep/fw_train_000001.bin", "deep/fw_val_000000.bin", "manifest.json"]
    assert sorted(now()) == names, "neither old shards nor their vocabulary"
    assert "2 shards are as they were written" in run("--verify", "--data-dir", out).stdout


def test_what_is_not_gpt2s_tokens_is_refused(hub, tmp_path):
    out = tmp_path / "out"
    assert "it has no files like *_train_000001.bin" in ready(hub, out, code=1).stderr
    assert not out.exists()
    llama = documents(300, seed=0)
    llama[7] = 50257
    wrong = [llm_c(llama), documents(300, seed=0).tobytes()]  # the second has no header
    for i, val in enumerate(wrong):
        hub.siblings.clear()
        offer(hub, fw_val_000000=val, fw_train_000001=llm_c(llama))
        told = ready(hub, tmp_path / f"out{i}", code=1).stderr
        assert "fw_val_000000.bin has no GPT-2 tokens in llm.c's format" in told
    typed = ready(hub, out, "--vocab-size", 300, "--workers", 1, code=2).stderr
    assert "tokens:o/d has tokens already: leave out vocab_size" in typed


def test_a_text_file_on_the_hub_is_one_document_with_its_newlines(hub, tmp_path):
    """`datasets` would give its lines, without their ends."""
    text = "\n\n".join(prose(300, words=90)) + "\r\n"
    hub.files = {"a.txt": text.encode(), "b.txt.gz": gzip.compress(text.encode())}
    from_hub(hub, tmp_path / "out", source="d")
    assert texts_in(tokens_in(tmp_path / "out")) == [text, text]


@pytest.mark.parametrize("column", [[["a"], ["b"]], [{"a": 1}, {"a": 2}], [1, 2]])
def test_a_column_that_is_no_text_is_told_at_once(hub, tmp_path, column):
    pq.write_table(pa.table({"text": column}), tmp_path / "file")
    hub.files = {"a.parquet": (tmp_path / "file").read_bytes()}
    errors = from_hub(hub, tmp_path / "out", source="d", code=1)
    assert "not of text; --column names another" in errors and "trying again" not in errors


@pytest.mark.parametrize("error, is_permanent", [
    (FileNotFoundError("gone"), True),
    (UnicodeDecodeError("utf-8", b"a", 0, 1, "no"), True),
    (requests.HTTPError(response=Mock(status_code=403)), True),
    (requests.HTTPError(response=Mock(status_code=429)), False),
    (requests.HTTPError(response=Mock(status_code=503)), False),
    (ConnectionResetError(), False),
    (pa.ArrowInvalid("the stream broke off"), False),
])  # fmt: skip
def test_only_what_may_pass_is_tried_again(monkeypatch, capsys, error, is_permanent):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)

    def read():
        raise error
        yield

    told = sentence(list, sources.read_patiently(sources.File("a", read, commit="c")))
    assert told.startswith("a cannot be read") and len(waits) == (0 if is_permanent else 6)


NOT_THERE = {
    "nothere": "cannot be read (RepositoryNotFoundError",
    "d:nosuch": "Available: ['default', 'sample-10BT']",
    "d:sample-10BT:train:content": "Column name ['content'] not in the dataset",
}


@pytest.mark.parametrize("source", NOT_THERE)
def test_what_the_hub_does_not_have_is_one_sentence(hub, tmp_path, source):
    errors = from_hub(hub, tmp_path / "out", source=source, code=1)
    assert NOT_THERE[source] in errors and len(errors.strip().splitlines()) == 1, errors


# -- faults: each is one sentence, and all that was written before stays as it was


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(fineweb, "start_pool", HerePool)
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 100)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and no power fails here


def make(folder: Path, *sources, **options) -> str:
    """A run of fineweb.py in this process, with `here`."""
    small = {"name": "x", "shard_size": 500, "data_dir": str(folder)}
    config = Config(source=tuple(map(str, sources)), workers=1, **(small | options))
    return fineweb.make_shards(config, folder)


@pytest.fixture
def unfinished(tmp_path, here):
    """A folder whose run ended behind some shards, and its glob: the second file is mended now."""
    write_jsonl(tmp_path / "a.jsonl", prose(250, words=10))
    second = write_jsonl(tmp_path / "b.jsonl", ["the last " * 30])
    second.write_bytes(b"{")
    folder = tmp_path / "unfinished"
    assert "b.jsonl, line 1" in sentence(make, folder, tmp_path / "*.jsonl")
    write_jsonl(second, ["the last " * 30])
    assert len(json.loads((folder / "manifest.json").read_text())["shards"]) > 3
    return folder, tmp_path / "*.jsonl"


DAMAGES = [(b"}", b""), (b'"text": ', b'"text": 1')]  # cut short; a wrong digit


@pytest.mark.parametrize(("was", "now"), DAMAGES)
def test_a_damaged_manifest_is_one_sentence_and_the_shards_stay(unfinished, outcome, was, now):
    folder, source = unfinished
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(was, now))
    before = contents(folder)
    for act in (lambda: make(folder, source), lambda: verify_shards(folder)):
        told = sentence(act)
        assert f"{path} cannot be read (" in told or f"{path} is damaged: put it back" in told
    assert contents(folder) == before
    outcome("shards and manifests", f"manifest.json: {now}", TOLD)
    assert "tokens in" in make(folder, source, overwrite=True), "what the sentence advises"


@pytest.mark.parametrize("touched, said", [(False, ""), (True, "a.jsonl has changed")])
def test_a_manifest_that_hashed_only_what_was_read_is_gone_on_with(unfinished, touched, said):
    """As of November 2026. Its file must be as old as it was, because its hash is of a part."""
    folder, source = unfinished
    manifest = read_manifest(folder)
    [(path, stamp)] = manifest["files"].items()
    manifest["files"][path] = [*stamp[:2], "the hash of 7 texts", 7]
    write_manifest(folder, manifest)
    if touched:
        os.utime(path, ns=(0, 0))
        assert said in sentence(make, folder, source)
        return
    make(folder, source)
    make(folder.parent / "whole", source)
    assert contents(folder) == contents(folder.parent / "whole")


def test_a_split_file_is_hashed_once(tmp_path, here, monkeypatch):
    """It is read three times: to split it, to train a vocabulary, and to tokenize it."""
    source = tmp_path / "a.txt"
    source.write_text("\n".join(prose(60)))
    hashed = []
    real = sources.hash_file
    monkeypatch.setattr(sources, "hash_file", lambda path: hashed.append(path) or real(path))
    make(tmp_path / "out", source, vocab_size=300)
    assert hashed == [source]


def rewrite(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.utime(path, ns=(0, 0))  # another time, however fast the test is


EDITED = "a.jsonl has changed"
GONE = "a.jsonl is gone ("
CHANGES = {  # of a.jsonl; what a finished folder tells then, and what an unfinished one
    "longer": (lambda a: rewrite(a, 2 * a.read_bytes()), EDITED, EDITED),
    "edited": (lambda a: rewrite(a, a.read_bytes().replace(b"s", b"f")), EDITED, EDITED),
    "touched": (lambda a: rewrite(a, a.read_bytes()), "", ""),
    # an unfinished one has not come to what is new; the shards of a finished one hold the text
    "renamed": (lambda a: a.rename(a.with_name("0.jsonl")), GONE + "2 in", GONE + "1 in"),
    "new": (lambda a: write_jsonl(a.with_name("c.jsonl"), "z"), "c.jsonl is new", ""),
    "deleted": (lambda a: [path.unlink() for path in a.parent.glob("*.jsonl")], "", "no such file"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("finished", [True, False])
def test_sources_that_changed_since_are_named_and_overwrite_makes_the_shards_anew(
    unfinished, tmp_path, change, finished
):
    folder, source = unfinished
    if finished:
        make(folder, source)
    before = contents(folder)
    apply, *told = CHANGES[change]
    apply(tmp_path / "a.jsonl")
    if not told[not finished]:
        assert ("nothing to do" in make(folder, source)) is finished is (contents(folder) == before)
        return
    said = sentence(make, folder, source)
    assert told[not finished] in said and contents(folder) == before
    if change != "deleted":
        assert said.endswith("choose another --data-dir, or rebuild it with --overwrite")
        make(folder, source, overwrite=True)
        make(tmp_path / "anew", source)
        assert contents(folder) == contents(tmp_path / "anew")


def test_overwrite_replaces_shards_only_when_the_new_ones_come(unfinished, tmp_path):
    folder, source = unfinished
    make(folder, source, overwrite=True)  # what is unfinished and has not changed goes on
    make(tmp_path / "whole", source)
    assert contents(folder) == contents(tmp_path / "whole")
    (tmp_path / "a.jsonl").write_text("{")
    assert "line 1" in sentence(make, folder, source, overwrite=True, name="y")
    assert contents(folder) == contents(tmp_path / "whole")
    make(folder, tmp_path / "b.jsonl", overwrite=True, name="y")
    assert sorted(contents(folder)) == ["manifest.json", "y_train_000001.npy", "y_val_000000.npy"]


def test_overwrite_leaves_what_others_have_put_there(unfinished):
    folder, source = unfinished
    make(folder, source)
    theirs = [folder / "x_my_vectors.npy", folder / "x_old_train_000001.npy"]
    for path in theirs:
        np.save(path, np.zeros(9, np.uint16))
    make(folder, source, overwrite=True)
    assert all(path.exists() for path in theirs)


def test_files_of_a_batch_behind_its_first_count_as_read(tmp_path, here):
    """A hundred small files are one batch: each is compared, not the first alone."""
    for i in range(120):
        (tmp_path / f"{i:03d}.txt").write_text(prose(1, seed=i)[0])
    (tmp_path / "120.txt").write_bytes(b"\xff")
    assert "120.txt" in sentence(make, tmp_path / "out", tmp_path / "*.txt")
    (tmp_path / "120.txt").write_text("mended")
    (tmp_path / "099.txt").write_text("another")
    assert "099.txt has changed" in sentence(make, tmp_path / "out", tmp_path / "*.txt")


def test_a_finished_folder_of_stdlib_outlives_an_update_of_python(tmp_path, here, monkeypatch):
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text(prose(9)[0])
    make(tmp_path / "out", "stdlib")
    (tmp_path / "lib" / "a.py").write_text("another version")
    assert "nothing to do" in make(tmp_path / "out", "stdlib")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_a_text_that_windows_wrote_is_the_same_text(tmp_path, monkeypatch, encoding):
    """Without a mark, UTF-16 was read as ASCII with NULs between."""
    monkeypatch.setattr(sources, "STRETCH", 999)
    text = "One and two.\r\n" * 99 + "Łódź 🙂"
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    texts = [text for _, batch in read_batches(files_of(tmp_path / "a.txt")) for text in batch]
    assert "".join(text for text, *_ in texts) == text
    (tmp_path / "a.txt").write_bytes(text.encode("utf-16-le")[:-1])
    told = sentence(list, read_batches(files_of(tmp_path / "a.txt")))
    assert re.search(r"byte [\d,]+ is not UTF-16-LE: unexpected end", told)


@pytest.mark.parametrize("links", [0, 1, 2])
def test_links_to_the_folder_above_end_and_lose_nothing(tmp_path, monkeypatch, links):
    """glob follows each: two of them take 2 to the power of 40 folders."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine/a", "mine/b/c", "mine/.hidden", "elsewhere"):
        Path(name).mkdir(parents=True)
        Path(name, "x.txt").write_text(name)
    Path("mine/d").symlink_to(tmp_path / "elsewhere")
    before = sources.find_paths("mine/**/*.txt")
    assert before == [f"mine/{name}/x.txt" for name in ("a", "b/c", "d")]
    for name in "ab"[:links]:
        Path("mine", name, "up").symlink_to(tmp_path / "mine")
    assert sources.find_paths("mine/**/*.txt") == before
    assert sources.find_paths(f"{tmp_path}/mine/**/*.txt") == [f"{tmp_path}/{x}" for x in before]
    assert sources.find_paths("**/c/*.txt") == ["mine/b/c/x.txt"]
    assert sources.find_paths("mine/**/c/**/*.txt") == ["mine/b/c/x.txt"]
    assert "give 'mine/**/*.txt'" in sentence(files_of, "mine")


def test_a_tokenizer_json_of_someone_else_is_neither_replaced_nor_deleted(tmp_path, here, outcome):
    write_jsonl(tmp_path / "a.jsonl", prose(60))
    folder = tmp_path / "out"
    for begin in ({}, {"overwrite": True}):
        for options in ({}, {"vocab_size": 300}):
            folder.mkdir(exist_ok=True)
            (folder / "tokenizer.json").write_text("mine")
            told = sentence(make, folder, tmp_path / "*.jsonl", **options, **begin)
            assert f"{folder}/tokenizer.json" in told or "holds tokenizer.json" in told
            assert (folder / "tokenizer.json").read_text() == "mine"
            outcome("weights and tokenizers", f"foreign: {options} {begin}", TOLD)
        (folder / "tokenizer.json").unlink()
        make(
            folder, tmp_path / "*.jsonl", **begin
        )  # of GPT-2's tokens: the manifest names no vocabulary
        assert "tokenizer.json" not in contents(folder)


def test_a_byte_order_mark_is_no_text_and_a_file_named_twice_is_read_once(tmp_path, here):
    texts = prose(2)
    marked = [tmp_path / "a.txt", write_jsonl(tmp_path / "b.jsonl", texts[1:])]
    marked[0].write_text(texts[0])
    for path in marked:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    (tmp_path / "link.txt").symlink_to("a.txt")
    sources = [*marked, marked[1], tmp_path / "*.txt"]
    make(tmp_path / "out", *sources)
    assert texts_in(tokens_in(tmp_path / "out")) == texts
    assert "nothing to do" in make(tmp_path / "out", *sources)


def test_the_last_words_say_which_text_is_for_validation_and_how_to_choose_another(tmp_path, here):
    mine, other = tmp_path / "mine.txt", tmp_path / "other.txt"
    mine.write_text(" a" * 2000)
    other.write_text(" b" * 300)
    made = make(tmp_path / "one", mine, shard_size=10_000)
    assert "for validation: 100 tokens, 5.0% of the text, its beginning; to choose another" in made
    made = make(tmp_path / "two", other, mine, shard_size=10_000, val_tokens=301)
    assert "for validation: 301 tokens, 13.1% of the text, its beginning; to choose" in made
    assert texts_in(np.load(tmp_path / "two" / "x_val_000000.npy")) == [" b" * 300]


def test_training_refuses_unfinished_data_until_the_same_command_finishes_it(unfinished):
    folder, source = unfinished
    told = f"{folder} is not complete; the same fineweb.py command finishes it"
    assert sentence(find_shards, folder, "train") == told
    make(folder, source)
    assert find_shards(folder, "val") and read_manifest(folder)["cursor"] is None
    (folder / "x_train_000003.npy").unlink()
    told = f"{folder} lacks x_train_000003.npy: put it back, or make all again: the same fineweb"
    assert sentence(find_shards, folder, "val").startswith(told)
    make(folder, source, overwrite=True)
    assert find_shards(folder, "train")


def test_an_error_of_ours_is_not_told_as_a_full_disk(tmp_path, here, monkeypatch):
    monkeypatch.setattr(fineweb, "pack", lambda *_, **__: os.stat("/a bug"))
    write_jsonl(tmp_path / "a.jsonl", ["x " * 99])
    with pytest.raises(FileNotFoundError, match="/a bug"):
        make(tmp_path / "out", tmp_path / "a.jsonl")


def test_a_finished_folder_is_left_alone_and_verified(tmp_path, here):
    source = write_jsonl(tmp_path / "a.jsonl", prose(60))
    folder = tmp_path / "out"
    folder.mkdir()
    mine = ["mine.tmp", ".mine.tmp", "manifest.json.tmp"]
    for name in [*mine, ".x_train_000001.npy.123.tmp", ".manifest.json.77.tmp"]:
        (folder / name).touch()
    make(folder, source)
    assert sorted(path.name for path in folder.glob("*.tmp")) == sorted(mine)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*[!k]")}  # but .lock
    assert "nothing to do" in make(folder, source, verify=True)  # it does not shape the shards
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*[!k]")} == before
    told = sentence(make, folder, source, shard_size=501, max_tokens=7)
    assert "--shard-size was 500, not 501; --max-tokens was 0, not 7 (2 in all);" in told
    assert "are as they were written" in verify_shards(folder)
    manifest = read_manifest(folder)
    write_manifest(folder, manifest | {"cursor": {"file": 0}})
    assert "is not complete; the same" in sentence(verify_shards, folder)
    write_manifest(folder, manifest)
    shard = folder / "x_train_000002.npy"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "damaged: x_train_000002.npy; put it" in sentence(verify_shards, folder)
    make(folder, source, overwrite=True)
    assert shard.read_bytes() == data
    shard.unlink()
    assert "damaged: x_train_000002.npy;" in sentence(verify_shards, folder)
    assert "x_train_000002.npy is missing" in sentence(make, folder, source)


# -- a full disk


def failing(monkeypatch, at: int) -> list[str]:
    """Every write to a disk from number `at` on fails. Returns the list of what is done."""
    done = []

    def counted(name, call):
        def count(*args):
            done.append(name)
            if len(done) > at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args)

        return count

    class Disk(io.FileIO):
        write = counted("write", io.FileIO.write)

    disk = "support.base.files.open"
    monkeypatch.setattr(disk, lambda path, mode: Disk(path, mode), raising=False)
    monkeypatch.setattr(os, "fsync", counted("fsync", os.fsync))
    monkeypatch.setattr(Path, "replace", counted("rename", Path.replace))
    return done


def test_a_disk_full_at_any_write_is_a_sentence_and_resumable(tmp_path, here, monkeypatch, outcome):
    source = write_jsonl(tmp_path / "a.jsonl", prose(40, words=30))
    with monkeypatch.context() as patch:
        operations = failing(patch, at=10**9)
        make(tmp_path / "whole", source, shard_size=700)
    whole = contents(tmp_path / "whole")
    assert len(operations) > 20 and {"write", "fsync", "rename"} == set(operations)
    for at in range(len(operations)):
        folder = tmp_path / f"{at}"
        with monkeypatch.context() as patch:
            failing(patch, at)
            told = sentence(make, folder, source, shard_size=700)
        assert re.match(rf"{folder}/[^.]\S+ cannot be written \(No space left", told), told
        assert not list(folder.glob("*.tmp"))
        if (folder / "manifest.json").exists():
            manifest = read_manifest(folder)
            assert bool(manifest["files"]) == bool(manifest["shards"]), "what was read is known"
        for name in set(contents(folder)) - {"manifest.json"}:
            assert contents(folder)[name] == whole[name]
        make(folder, source, shard_size=700)
        assert contents(folder) == whole
        outcome("full disk and permissions", f"fineweb.py at {operations[at]} {at}", TOLD)

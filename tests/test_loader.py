"""DataLoaderLite: one stream, cut the same way whoever asks."""

import gc
import hashlib
import io
import os
import shutil
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import documents, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from model import DataLoaderLite
from support.base.errors import UserError
from support.text.token_files import PIECE, describe_frequencies, find_shards, open_data


def epoch_of(loader: DataLoaderLite, epoch: int) -> list[tuple]:
    """The sequences of an epoch, in its order."""
    n = loader.num_sequences
    return [tuple(loader.sequence(k).tolist()) for k in range(epoch * n, (epoch + 1) * n)]


def cut(tokens, T: int, offset: int = 0) -> list[tuple]:
    """All sequences of T+1 tokens that a shard has from an offset on, with stride T."""
    return [tuple(tokens[i : i + T + 1].tolist()) for i in range(offset, len(tokens) - T, T)]


def training_shards(directory) -> list[np.ndarray]:
    return [np.load(path) for path in sorted(directory.glob("*train*"))]


def test_without_shuffle_the_stream_is_each_shard_cut_from_its_start_again_and_again(shards):
    loader = DataLoaderLite(shards, "train", 2, 8)
    expected = [sequence for tokens in training_shards(shards) for sequence in cut(tokens, 8)]
    for epoch in range(3):
        assert epoch_of(loader, epoch) == expected


def test_the_stream_is_the_same_on_macos(shards, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise")
    test_without_shuffle_the_stream_is_each_shard_cut_from_its_start_again_and_again(shards)


@pytest.mark.parametrize("B", [4, 300], ids=["small", "more than an epoch"])
def test_x_and_y_are_a_sequence_without_its_last_and_without_its_first_token(shards, B):
    loader = DataLoaderLite(shards, "train", B, 8, shuffle=True)
    for first in range(0, 1000, B):
        x, y = loader.next_batch()
        assert x.dtype == y.dtype == torch.int64
        sequences = np.stack([loader.sequence(k) for k in range(first, first + B)])
        assert x.tolist() == sequences[:, :-1].tolist()
        assert y.tolist() == sequences[:, 1:].tolist()


@settings(max_examples=60)
@given(
    sizes=st.lists(st.floats(0, 10), min_size=1, max_size=4),
    T=st.integers(1, 20),
    seed=st.integers(0, 2**62 - 1),
)
def test_an_epoch_has_as_many_sequences_of_each_shard_as_the_rule_says_each_once(
    tmp_path_factory, sizes, T, seed
):
    """Shards of no token to 10 T: the rule of DataLoaderLite's docstring, written out once more."""
    directory = tmp_path_factory.mktemp("shards")
    arrays = []
    for i, size in enumerate(sizes):
        first = sum(map(len, arrays))  # no token occurs twice
        arrays.append(np.arange(first, first + round(size * T), dtype=np.uint16))
        write_shard(directory / f"a_train_{i:06d}.npy", arrays[-1])
    if all(len(tokens) <= T for tokens in arrays):
        with pytest.raises(UserError, match="is as long as one sequence of"):
            DataLoaderLite(directory, "train", 1, T, shuffle=True)
        return
    loader = DataLoaderLite(directory, "train", 1, T, shuffle=True, seed=seed)
    for epoch in range(3):
        found = epoch_of(loader, epoch)
        assert len(found) == len(set(found)) == loader.num_sequences
        for tokens in arrays:
            mine = sorted(s for s in found if len(tokens) and tokens[0] <= s[0] <= tokens[-1])
            N = len(tokens)
            if N <= T:
                assert not mine
                continue
            n = max(1, (N - T) // T)
            offset = mine[0][0] - tokens[0]
            assert 0 <= offset < min(T, N - n * T)
            assert mine == cut(tokens, T, offset)[:n]


@settings(max_examples=30)
@given(
    steps=st.integers(1, 60),
    shuffle=st.booleans(),
    T=st.integers(1, 50),
    ranks=st.integers(1, 4),
    B=st.integers(1, 5),
)
def test_ranks_and_micro_batches_only_split_a_steps_sequences(corpus, steps, shuffle, T, ranks, B):
    one = DataLoaderLite(corpus, "train", B * ranks, T, shuffle=shuffle)
    many = [DataLoaderLite(corpus, "train", B, T, r, ranks, shuffle=shuffle) for r in range(ranks)]
    for _ in range(steps):
        parts = zip(*[loader.next_batch() for loader in many], strict=True)
        for whole, part in zip(one.next_batch(), parts, strict=True):
            assert torch.equal(whole, torch.cat(part))
        assert {loader.cursor for loader in many} == {one.cursor}


@settings(max_examples=20)
@given(st.booleans(), st.integers(0, 200), st.integers(1, 20), st.integers(1, 4))
def test_the_cursor_is_the_whole_state(corpus, shuffle, consumed, more, B):
    loader = DataLoaderLite(corpus, "train", B, 16, shuffle=shuffle)
    for _ in range(consumed):
        loader.next_batch()
    assert loader.state_dict() == {"cursor": consumed * B}
    other = DataLoaderLite(corpus, "train", B, 16, shuffle=shuffle)
    other.load_state_dict(loader.state_dict())
    coming = [loader.next_batch()[0] for _ in range(more)]
    assert all(torch.equal(x, other.next_batch()[0]) for x in coming)
    other.reset()
    assert torch.equal(other.next_batch()[0], other.batch(0, B)[0])


def test_batches_are_pinned_where_asked_by_the_thread_that_knows_its_gpu(shards, monkeypatch):
    threads = []

    def pin(x):
        threads.append(threading.current_thread())
        return x

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    DataLoaderLite(shards, "train", 2, 8).next_batch()
    loader = DataLoaderLite(shards, "train", 2, 8, pin=True)
    loader.batch(0, 1)  # validation copies it once more
    assert threads == []
    loader.next_batch()
    assert threads == [threading.main_thread()] * 2


def test_the_frequencies_of_tokens_are_counted_over_shards_up_to_a_limit(tmp_path):
    write_shard(tmp_path / "toy_train_000001.npy", np.array([7, 7, 9, 65535], np.uint16))
    write_shard(tmp_path / "toy_train_000002.npy", np.array([9, 9, 7, 7], np.uint16))
    shards = find_shards(tmp_path, "train")
    found = describe_frequencies(shards)
    halves = -(0.5 * np.log(0.5) + 0.375 * np.log(0.375) + 0.125 * np.log(0.125))
    assert found == {"kinds": 3, "entropy": pytest.approx(halves)}
    for shard, token in zip(shards, (1, 2), strict=True):
        pieces = 12 * [np.full(PIECE, token, np.uint16)]
        shard.read_all = lambda pieces=pieces: iter(pieces)
    assert describe_frequencies(shards)["entropy"] == pytest.approx(
        -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    ), "16 pieces: 12 of the first shard, 4 of the second"


def test_every_epoch_and_seed_has_its_own_order_and_offsets_the_same_on_every_machine(shards):
    loader = DataLoaderLite(shards, "train", 1, 8, shuffle=True)
    epochs = [epoch_of(loader, number) for number in range(4)]
    stream = np.array(epochs[0], np.uint16)
    assert hashlib.sha256(stream.tobytes()).hexdigest()[:16] == "9dd3078e7f15ed22"
    for seed in (1337, 1, 2):
        other = DataLoaderLite(shards, "train", 1, 8, shuffle=True, seed=seed)
        epochs.append(epoch_of(other, 0))
    assert epochs[0] == epochs[4], "1337 is the default"
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert len({frozenset(epoch) for epoch in epochs}) == 6, "the sequences begin elsewhere"


def test_sequences_of_one_document_are_spread_over_the_epoch(tmp_path):
    write_shard(tmp_path / "a_train_000001.npy", np.arange(50_000, dtype=np.uint16))
    x, _ = DataLoaderLite(tmp_path, "train", 20 * 8, 50, shuffle=True).next_batch()
    low, high = x[:, 0].view(20, 8).aminmax(dim=1)
    assert (high - low > 10_000).all(), "eight in a row come from all of the shard"


def test_a_shard_of_a_hundred_million_tokens_opens_without_being_read(tmp_path, monkeypatch):
    path = tmp_path / "a_train_000001.npy"
    # a hole in the file: no disk is used
    np.lib.format.open_memmap(path, "w+", np.uint16, (100_000_000,))
    read, pread = [], os.pread

    def counted(file, size, offset):
        if os.fstat(file).st_size > 10**8:  # the loader of another test may still prefetch
            read.append(size)
        return pread(file, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    loader = DataLoaderLite(tmp_path, "train", 4, 1024, shuffle=True)
    loader.next_batch()
    loader.next_batch()
    assert loader.num_sequences == 97_655
    loader.wait()
    assert read == [2 * 1025] * 12


def test_an_epoch_opens_each_shard_once_has_it_read_ahead_and_keeps_one_open(tmp_path, monkeypatch):
    for i in range(50):
        write_shard(tmp_path / f"a_train_{i:06d}.npy", documents(100, seed=i))
    advise = Mock()
    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(np, "fromfile", None)  # it would open the file
    loader = DataLoaderLite(tmp_path, "train", 7, 8, shuffle=True)
    loader.wait()
    for first in range(0, loader.num_sequences, 5):  # a shard has 11: many batches have two
        loader.batch(first, min(5, loader.num_sequences - first))
        files = [file.resolve() for file in Path("/proc/self/fd").iterdir()]
        assert sum(file.parent == tmp_path for file in files) == 1
    assert [call.args[1:] for call in advise.mock_calls] == [(0, 0, os.POSIX_FADV_WILLNEED)] * 50


def test_a_thread_does_not_close_the_shard_that_another_one_reads(shards, monkeypatch):
    loader = DataLoaderLite(shards, "train", 1, 8)
    loader.wait()

    def read_later(*place):
        monkeypatch.undo()
        loader.sequence(loader.num_sequences - 1)  # of another shard, as if by another thread
        return os.pread(*place)

    monkeypatch.setattr(os, "pread", read_later)
    assert np.array_equal(loader.sequence(0), training_shards(shards)[0][:9])


def test_a_loader_that_is_closed_or_deleted_leaves_no_thread(shards):
    def readers() -> set:
        return {t for t in threading.enumerate() if t.name.startswith("DataLoaderLite")}

    before = readers()  # of other tests; some of them may end while this one runs
    loader = DataLoaderLite(open_data(shards, "train"), "train", 1, 8, shuffle=True)
    loader.next_batch()
    assert len(readers() - before) == 1
    loader.close()
    assert not readers() - before
    loader = DataLoaderLite(shards, "train", 1, 8)
    [thread] = readers() - before
    gc.disable()
    del loader
    gc.enable()
    thread.join(60)
    assert not thread.is_alive(), "the loader was in no circle that only gc finds"


def test_llm_c_and_nanogpt_files_give_the_same_stream_as_npy(tmp_path):
    tokens = documents(500, seed=1)
    header = llm_c_header(20240520, len(tokens))
    files = {
        "npy/x_train_000000.npy": npy(tokens),
        "llmc/x_train_000000.bin": header + tokens.tobytes(),
        "nanogpt/train.bin": tokens.tobytes(),
    }
    streams = []
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir()
        file.write_bytes(content)
        streams.append(epoch_of(DataLoaderLite(file.parent, "train", 1, 8), 0))
    assert streams[0] == streams[1] == streams[2]


def npy(array) -> bytes:
    """An array as the content of an .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def llm_c_header(magic: int, num_tokens: int) -> bytes:
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, num_tokens
    return header.tobytes()


INCOMPLETE = "is not complete; the same fineweb.py command"


@pytest.mark.parametrize("name, content, words", [
    ("manifest.json", b'{"shards": [], "cursor": {"file": 0}}', INCOMPLETE),
    ("manifest.json", b'{"shards": [{"name": "x"}], "cursor": null}', "lacks x: put it back, or"),
    ("manifest.json", b'{"name": "of another program"}', "no train shards"),
    ("x_train_000000.npy", npy(np.zeros(100, np.uint16))[:-10], "put it back"),
    ("x_train_000000.npy", b"", "put it back"),
    ("x_train_000000.npy", npy(np.zeros(100, np.int64)), "int64.*put it back"),
    ("x_train_000000.npy", npy(np.zeros((10, 10), np.uint16)), r"\(10, 10\).*put it back"),
    ("x_train_000000.bin", llm_c_header(20240520, 99) + bytes(20), "put it back"),
    ("x_train_000000.bin", llm_c_header(20240801, 10) + bytes(20), "tokens of 32 bits"),  # Llama's
    ("train.bin", bytes(range(32, 122)) * 99, "train.bin has characters, not tokens"),
    ("train.bin", np.arange(99, dtype=np.uint16).repeat(9).tobytes(), "has characters, not"),
    ("train.bin", np.arange(999, dtype=np.uint32).tobytes(), "tokens of 32 bits"),
    ("train.bin", np.arange(99, 99999, 99).tobytes(), "tokens of 32 bits"),  # or of 64
    ("train.bin", bytes(101), "101 bytes"),
    ("x_train_000000.npy", npy(np.zeros(8, np.uint16)), "all have 8"),
    ("x_train_000000.npy", npy(np.full(20, 50300, np.uint16)), "token 50300.*50257"),
    ("x_val_000000.npy", npy(np.zeros(100, np.uint16)), "make all with fineweb.py.*--data-dir"),
])  # fmt: skip
def test_a_shard_that_cannot_be_used_is_one_sentence_with_its_name(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        DataLoaderLite(tmp_path, "train", 1, 8).next_batch()
    assert str(tmp_path) in str(error.value)


def test_two_formats_of_shards_are_not_mixed(shards):
    shutil.copy(shards / "toy_train_000001.npy", shards / "toy_train_000001.bin")
    told = r"holds two sets of train shards, .npy and .bin: move one away"
    with pytest.raises(UserError, match=told):
        DataLoaderLite(shards, "train", 1, 8)
    DataLoaderLite(shards, "val", 1, 8).close()

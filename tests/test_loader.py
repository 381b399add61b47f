"""DataLoaderLite: one stream, cut the same way whoever asks."""

import hashlib
import io

import numpy as np
import pytest
import torch
from conftest import documents, write_shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model import DataLoaderLite
from support.common import UserError
from support.tokenizer import EOT

# The loader only reads the shards, so all examples may share them; a slow machine is no error.
SHARED_FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def all_tokens(shards) -> np.ndarray:
    """The training shards one after the other."""
    return np.concatenate([np.load(path) for path in sorted(shards.glob("*train*"))])


def epoch_of(loader: DataLoaderLite, epoch: int) -> np.ndarray:
    return loader.read(epoch * loader.num_tokens, loader.num_tokens)


def pieces(tokens: np.ndarray) -> list[tuple]:
    """The parts of a stream that start at an <|endoftext|>."""
    starts = np.flatnonzero(tokens == EOT)
    return [tuple(piece) for piece in np.split(tokens, starts) if len(piece)]


def test_without_shuffle_the_stream_is_the_shards_one_after_the_other_again_and_again(shards):
    loader = DataLoaderLite(shards, "train", 2, 8)
    whole = all_tokens(shards)
    assert np.array_equal(loader.read(0, 3 * len(whole)), np.tile(whole, 3))


def test_sequences_are_t_plus_1_tokens_with_stride_t(shards):
    loader = DataLoaderLite(shards, "train", 4, 8)
    stream = loader.read(0, 10_000).astype(np.int64)
    for first in range(0, 1000, 4):
        x, y = loader.next_batch()
        for row, k in enumerate(range(first, first + 4)):
            assert x[row].tolist() == stream[8 * k : 8 * k + 8].tolist()
            assert y[row].tolist() == stream[8 * k + 1 : 8 * k + 9].tolist()


@settings(max_examples=30, suppress_health_check=SHARED_FIXTURE)
@given(
    steps=st.integers(1, 60),
    shuffle=st.booleans(),
    T=st.integers(1, 50),
    ranks=st.integers(1, 4),
    B=st.integers(1, 5),
)
def test_ranks_and_micro_batches_only_split_a_steps_sequences(shards, steps, shuffle, T, ranks, B):
    one = DataLoaderLite(shards, "train", B * ranks, T, shuffle=shuffle)
    many = [
        DataLoaderLite(
            shards,
            "train",
            B,
            T,
            process_rank=rank,
            num_processes=ranks,
            shuffle=shuffle,
        )
        for rank in range(ranks)
    ]
    for _ in range(steps):
        x, y = one.next_batch()
        parts_x, parts_y = zip(*[loader.next_batch() for loader in many], strict=True)
        assert torch.equal(x, torch.cat(parts_x))
        assert torch.equal(y, torch.cat(parts_y))
        assert {loader.cursor for loader in many} == {one.cursor}


@settings(max_examples=20, suppress_health_check=SHARED_FIXTURE)
@given(
    shuffle=st.booleans(),
    consumed=st.integers(0, 200),
    more=st.integers(1, 20),
    B=st.integers(1, 4),
)
def test_the_cursor_is_the_whole_state(shards, shuffle, consumed, more, B):
    loader = DataLoaderLite(shards, "train", B, 16, shuffle=shuffle)
    for _ in range(consumed):
        loader.next_batch()
    state = loader.state_dict()
    assert state == {"cursor": consumed * B}
    other = DataLoaderLite(shards, "train", B, 16, shuffle=shuffle)
    other.load_state_dict(state)
    for _ in range(more):
        assert torch.equal(loader.next_batch()[0], other.next_batch()[0])


def test_reset_starts_again(shards):
    loader = DataLoaderLite(shards, "train", 2, 16, shuffle=True)
    first = [loader.next_batch()[0] for _ in range(5)]
    loader.reset()
    assert all(torch.equal(x, loader.next_batch()[0]) for x in first)


def test_each_shuffled_epoch_has_every_document_of_every_shard_once_in_another_order(shards):
    loader = DataLoaderLite(shards, "train", 1, 8, shuffle=True)
    plain = all_tokens(shards)
    epochs = [epoch_of(loader, number) for number in range(3)]
    for epoch in epochs:
        assert sorted(pieces(epoch)) == sorted(pieces(plain))
    assert len({tokens.tobytes() for tokens in (*epochs, plain)}) == 4


def test_the_order_depends_on_the_seed(shards):
    orders = set()
    for seed in (1, 1, 2):
        loader = DataLoaderLite(shards, "train", 1, 8, shuffle=True, seed=seed)
        orders.add(epoch_of(loader, 0).tobytes())
    assert len(orders) == 2


def test_the_shuffled_order_is_the_same_on_every_machine_and_in_every_version(shards):
    stream = DataLoaderLite(shards, "train", 1, 8, shuffle=True).read(0, 2110)
    assert hashlib.sha256(stream.tobytes()).hexdigest()[:16] == "440cae250c8fa948"


def test_a_document_cut_by_a_shards_end_is_two_pieces(tmp_path):
    write_shard(tmp_path / "a_train_000001.npy", [EOT, 1, 2, EOT, 3])
    write_shard(tmp_path / "a_train_000002.npy", [4, 5, EOT, 6])
    loader = DataLoaderLite(tmp_path, "train", 1, 2, shuffle=True)
    parts = [[EOT, 1, 2], [EOT, 3], [4, 5], [EOT, 6]]
    for epoch in range(8):
        tokens = epoch_of(loader, epoch).tolist()
        assert sorted(split_by(tokens, parts)) == sorted(parts)


def split_by(tokens: list[int], parts: list[list[int]]) -> list[list[int]]:
    """Cuts tokens into the given parts, in whatever order they come."""
    found = []
    while tokens:
        part = next(p for p in parts if tokens[: len(p)] == p)
        found.append(part)
        tokens = tokens[len(part) :]
    return found


def test_a_batch_may_be_longer_than_the_whole_corpus(tmp_path):
    write_shard(tmp_path / "a_train_000001.npy", [EOT, 1, 2, 3, 4])
    x, _ = DataLoaderLite(tmp_path, "train", 8, 4).next_batch()
    assert x.flatten().tolist() == ([EOT, 1, 2, 3, 4] * 7)[:32]


def test_llm_c_and_nanogpt_files_give_the_same_stream_as_npy(tmp_path):
    tokens = documents(500, seed=1)
    header = llm_c_header(version=1, num_tokens=len(tokens))
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
        streams.append(DataLoaderLite(file.parent, "train", 1, 8).read(0, 1200))
    assert np.array_equal(streams[0], streams[1])
    assert np.array_equal(streams[0], streams[2])


def npy(array) -> bytes:
    """An array as the content of an .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def llm_c_header(version: int, num_tokens: int) -> bytes:
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, version, num_tokens
    return header.tobytes()


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("x_train_000000.npy", npy(np.zeros(100, np.uint16))[:-10], "not a whole .npy file"),
        ("x_train_000000.npy", b"", "not a whole .npy file"),
        ("x_train_000000.npy", npy(np.zeros(100, np.int64)), "one-dimensional uint16"),
        ("x_train_000000.npy", npy(np.zeros((10, 10), np.uint16)), "one-dimensional uint16"),
        ("x_train_000000.bin", llm_c_header(7, 10) + bytes(20), "version 7"),
        ("x_train_000000.bin", llm_c_header(1, 99) + bytes(20), "99 tokens"),
        ("train.bin", bytes(101), "odd number of bytes"),
        ("x_train_000000.npy", npy(np.zeros(8, np.uint16)), "less than one sequence"),
    ],
)
def test_a_damaged_shard_is_named_in_one_sentence(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        DataLoaderLite(tmp_path, "train", 1, 8)


def test_a_token_outside_the_vocabulary_is_named_with_file_and_offset(tmp_path):
    tokens = documents(100, seed=0)
    tokens[70] = 50300
    write_shard(tmp_path / "x_train_000000.npy", tokens)
    loader = DataLoaderLite(tmp_path, "train", 1, 8)
    with pytest.raises(UserError, match=r"x_train_000000.npy: token 50300 at offset 70 "):
        for _ in range(20):
            loader.next_batch()


def test_a_directory_without_shards_says_how_to_make_them(tmp_path):
    with pytest.raises(UserError, match=r"python fineweb.py"):
        DataLoaderLite(tmp_path, "train", 1, 8)

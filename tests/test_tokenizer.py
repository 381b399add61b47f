import json
import subprocess
import sys

import pytest
from conftest import ROOT, SHARED_DATA
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizer
from tokenizer import EOT, UserError, get_tokenizer, hf_tokenizer_json, mergeable_ranks, merges


def test_a_known_sentence_has_gpt2s_tokens():
    assert get_tokenizer().encode_ordinary("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="needs ../shared/data")
def test_tiny_shakespeare_has_338025_tokens():
    text = (SHARED_DATA / "tinyshakespeare.txt").read_text()
    assert len(get_tokenizer().encode_ordinary(text)) == 338_025


def test_there_are_50257_tokens_and_the_last_starts_documents():
    assert get_tokenizer().n_vocab == 50257 and get_tokenizer().decode([EOT]) == "<|endoftext|>"


def test_a_literal_endoftext_stays_text():
    assert EOT not in get_tokenizer().encode_ordinary("<|endoftext|>")


@given(st.text())
def test_any_text_comes_back_from_its_tokens(text):
    text = text.encode("utf-8", errors="replace").decode()
    assert get_tokenizer().decode(get_tokenizer().encode_ordinary(text)) == text


@pytest.fixture(scope="module")
def hf():
    from tokenizers import Tokenizer

    return Tokenizer.from_str(hf_tokenizer_json())


@settings(max_examples=300)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_the_hugging_face_tokenizer_gives_the_same_ids(hf, text):
    assert hf.encode(text).ids == get_tokenizer().encode_ordinary(text)


def test_each_merge_makes_the_token_of_its_rank_from_two_earlier_ones():
    ranks = mergeable_ranks()
    for rank, (a, b) in enumerate(merges(), start=256):
        assert ranks[a + b] == rank and ranks[a] < rank and ranks[b] < rank


def test_hugging_faces_vocabulary_has_every_token_once():
    vocab = json.loads(hf_tokenizer_json())["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(50257))


def test_a_damaged_rank_table_is_refused(tmp_path, monkeypatch):
    damaged = tmp_path / "gpt2.tiktoken"
    damaged.write_bytes(tokenizer.RANKS_FILE.read_bytes().replace(b"IQ== 0", b"IQ== 1"))
    monkeypatch.setattr(tokenizer, "RANKS_FILE", damaged)
    mergeable_ranks.cache_clear()
    with pytest.raises(UserError, match="not GPT-2's rank table"):
        mergeable_ranks()


def test_importing_the_light_files_imports_no_torch():
    code = "import sys, tokenizer, fineweb, plots; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

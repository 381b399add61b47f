import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, SHARED_DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from support import tokenizer
from support.common import UserError
from support.tokenizer import (
    EOT,
    check_vocabulary,
    encode,
    get_tokenizer,
    mergeable_ranks,
    merges,
    replace_surrogates,
    tokenizer_json,
)


def test_a_known_sentence_has_gpt2s_tokens():
    tokens = get_tokenizer().encode_ordinary("Hello, I'm a language model,")
    assert tokens == [15496, 11, 314, 1101, 257, 3303, 2746, 11]


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


# -- text that others wrote

UNICODE = st.characters()
HARD = st.characters(categories=["Cs", "Zs", "Zl", "Zp", "Cc"])  # lone surrogates, spaces, controls


@given(st.text(UNICODE | HARD))
def test_encode_gives_the_tokens_that_tiktoken_gives(text):
    assert encode(text) == get_tokenizer().encode_ordinary(text)


@given(st.text(st.sampled_from(" \n\t\u3000\x1c\x1fxy!"), min_size=5))
def test_cutting_long_spaces_changes_no_token(text):
    long = "y" * 100_001 + text  # long enough to be looked at
    expected = get_tokenizer().encode_ordinary(long)
    of_five = tokenizer.LAST_SPACE.pattern.replace("100000", "5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "LAST_SPACE", re.compile(of_five))
        assert encode(long) == expected


@pytest.mark.parametrize("space", [" ", "\n", "\u3000", " \n"])
def test_a_million_spaces_before_a_word_do_not_stop_tiktoken(space):
    text = f"before{space * 1_200_000}after"
    assert get_tokenizer().decode(encode(text)) == text


def test_a_lone_surrogate_becomes_the_replacement_character_and_a_pair_its_character():
    text = "\ufefflone \ud83d high, low \udcff, a pair \ud83d\ude00"
    assert replace_surrogates(text) == "\ufefflone \ufffd high, low \ufffd, a pair 😀"
    assert get_tokenizer().decode(encode(text)) == replace_surrogates(text)


def test_another_vocabulary_is_named():
    check_vocabulary("ours", 50257)
    with pytest.raises(UserError, match=r"theirs has a vocabulary of 300: .* 50257"):
        check_vocabulary("theirs", 300)


@pytest.fixture(scope="module")
def hf():
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer_json())


@settings(max_examples=300)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_the_hugging_face_tokenizer_gives_the_same_ids(hf, text):
    assert hf.encode(text).ids == get_tokenizer().encode_ordinary(text)


def test_each_merge_makes_the_token_of_its_rank_from_two_earlier_ones():
    ranks = mergeable_ranks()
    for rank, (a, b) in enumerate(merges(), start=256):
        assert ranks[a + b] == rank and ranks[a] < rank and ranks[b] < rank


def test_hugging_faces_vocabulary_has_every_token_once():
    vocab = json.loads(tokenizer_json())["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(50257))


def test_a_damaged_rank_table_is_refused(tmp_path, monkeypatch):
    damaged = tmp_path / "gpt2.tiktoken"
    damaged.write_bytes(tokenizer.RANKS_FILE.read_bytes().replace(b"IQ== 0", b"IQ== 1"))
    monkeypatch.setattr(tokenizer, "RANKS_FILE", damaged)
    mergeable_ranks.cache_clear()
    with pytest.raises(UserError, match="not GPT-2's rank table"):
        mergeable_ranks()


def test_importing_the_light_files_imports_no_torch():
    code = (
        "import sys, fineweb, support.tokenizer, support.plots; "
        "sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

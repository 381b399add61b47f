import hashlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT, SHARED_DATA
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken._educational import bpe_encode
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

from support import tokenizer
from support.common import UserError
from support.tokenizer import EOT, TOKENIZER_JSON, encode, get_tokenizer, replace_surrogates


def test_a_known_sentence_has_gpt2s_tokens():
    tokens = get_tokenizer().encode_ordinary("Hello, I'm a language model,")
    assert tokens == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert get_tokenizer().n_vocab == 50257 and get_tokenizer().decode([EOT]) == "<|endoftext|>"
    assert EOT not in encode("<|endoftext|>")  # it stays text


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="needs ../shared/data")
def test_tiny_shakespeare_has_338025_tokens():
    assert len(encode((SHARED_DATA / "tinyshakespeare.txt").read_text())) == 338_025


# -- text that others wrote

HARD = st.characters(categories=["Cs", "Zs", "Zl", "Zp", "Cc"])  # lone surrogates, spaces, controls


@given(st.text(st.characters() | HARD))
def test_any_text_has_the_tokens_of_tiktoken_and_comes_back_from_them(text):
    assert encode(text) == get_tokenizer().encode_ordinary(text)
    assert get_tokenizer().decode(encode(text)) == replace_surrogates(text)


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


def test_another_vocabulary_is_named():
    tokenizer.check_vocabulary("ours", 50257)
    with pytest.raises(UserError, match=r"theirs has 300 tokens .* 50257"):
        tokenizer.check_vocabulary("theirs", 300)


# -- assets/tokenizer.json


HF = Tokenizer.from_file(str(TOKENIZER_JSON))


@settings(max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_hugging_face_gives_the_same_ids(text):
    assert HF.encode(text).ids == encode(text)


def test_tokenizer_json_is_made_of_the_rank_table():
    files = (tokenizer.RANKS_FILE, TOKENIZER_JSON)
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert hashes == re.findall(r"[0-9a-f]{64}", (ROOT / "assets" / "README.md").read_text())
    spell = bytes_to_unicode()
    words: list[str] = []
    merges: list[tuple[str, str]] = []
    ranks: dict[bytes, int] = {}
    for rank in range(EOT):
        token = get_tokenizer().decode_single_token_bytes(rank)
        words.append("".join(spell[b] for b in token))
        if rank >= 256:  # of the lower ranks alone, the encoder makes the two parts of this token
            a, b = bpe_encode(ranks, token, visualise=None)
            merges.append((words[a], words[b]))
        ranks[token] = rank
    vocab = {word: rank for rank, word in enumerate([*words, "<|endoftext|>"])}
    rebuilt = Tokenizer(models.BPE(vocab, merges))
    rebuilt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rebuilt.decoder = decoders.ByteLevel()
    rebuilt.post_processor = processors.ByteLevel(trim_offsets=False)
    rebuilt.add_special_tokens(["<|endoftext|>"])
    assert rebuilt.to_str() == TOKENIZER_JSON.read_text(encoding="utf-8")


def test_importing_the_light_files_imports_no_torch():
    code = (
        "import sys, fineweb, support.tokenizer, support.plots; "
        "sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

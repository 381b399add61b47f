import hashlib
import json
import os
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tokenizers
from conftest import EOT, ROOT
from contract import TOLD
from hypothesis import given, settings
from hypothesis import strategies as st

from support.base.errors import UserError
from support.text import sources as texts
from support.text import tokenizer
from support.text.tokenizer import (
    from_merges,
    gpt2,
    read_tokenizer,
    replace_surrogates,
    tokenizer_in,
    train_vocabulary,
)
from support.weights import hf

SHAKESPEARE = texts.TINYSHAKESPEARE.read_text()
SMALL = train_vocabulary([SHAKESPEARE[:200_000]], 600)
BOTH = pytest.mark.parametrize("vocabulary", [gpt2(), SMALL], ids=["gpt2", "own"])
encode = gpt2().encode


def test_a_known_sentence_has_gpt2s_tokens():
    assert encode("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert gpt2().vocab_size == 50257 and gpt2().encoding.decode([EOT]) == "<|endoftext|>"
    assert EOT not in encode("<|endoftext|>")  # it stays text
    assert len(encode(SHAKESPEARE)) == 338_025


# -- text that others wrote

HARD = st.characters(categories=["Cs", "Zs", "Zl", "Zp", "Cc"])  # lone surrogates, spaces, controls


@BOTH
@given(st.text(st.characters() | HARD))
def test_any_text_has_the_tokens_of_tiktoken_and_comes_back_from_them(vocabulary, text):
    tokens = vocabulary.encode(text)
    assert tokens == vocabulary.encoding.encode_ordinary(text)
    back = replace_surrogates(text)
    assert vocabulary.encoding.decode(tokens) == back and vocabulary.eot not in tokens
    assert vocabulary.sizes[tokens].sum() == len(back.encode())
    assert vocabulary.characters[tokens].sum() == len(back)


@given(st.text(st.sampled_from(" \n\t\u3000\x1c\x1fxy!"), min_size=5))
def test_cutting_long_spaces_changes_no_token(text):
    long = "y" * 100_001 + text  # long enough to be looked at
    expected = gpt2().encoding.encode_ordinary(long)
    of_five = tokenizer.LAST_SPACE.pattern.replace("100000", "5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "LAST_SPACE", re.compile(of_five))
        assert encode(long) == expected


@pytest.mark.parametrize("space", [" ", "\n", "\u3000", " \n"])
def test_a_million_spaces_before_a_word_do_not_stop_tiktoken(space):
    text = f"before{space * 1_200_000}after"
    assert gpt2().encoding.decode(encode(text)) == text


def test_a_lone_surrogate_becomes_the_replacement_character_and_a_pair_its_character():
    text = "\ufefflone \ud83d high, low \udcff, a pair \ud83d\ude00"
    assert replace_surrogates(text) == "\ufefflone \ufffd high, low \ufffd, a pair 😀"


# -- tokenizer.json


@pytest.fixture(scope="module")
def theirs() -> dict:
    """What Hugging Face's library makes of each vocabulary's tokenizer.json."""
    return {v: tokenizers.Tokenizer.from_str(v.json) for v in (gpt2(), SMALL)}


@BOTH
@settings(max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|end" not in text))
def test_hugging_face_gives_the_same_ids(vocabulary, theirs, text):
    assert theirs[vocabulary].encode(text).ids == vocabulary.encode(text)


@BOTH
def test_hugging_face_gives_megabytes_of_text_the_same_ids(vocabulary, theirs):
    draw = random.Random(0)
    words = [
        "日本語の文章",
        "これは。",
        "😀🎉",
        "   ",
        "\n\n\n",
        "Ελληνικά",
        "don't",
        "x" * 99,
        "１２",
    ]
    text = SHAKESPEARE + " ".join(draw.choices([*words, *SHAKESPEARE.split()], k=100_000))
    assert theirs[vocabulary].encode(text).ids == vocabulary.encode(text)


def test_gpt2s_file_is_made_of_the_rank_table_as_any_other_vocabularys_is():
    files = [
        ROOT / "assets" / f for f in ("gpt2.tiktoken", "tokenizer.json", "tinyshakespeare.txt")
    ]
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert hashes == re.findall(r"[0-9a-f]{64}", (ROOT / "assets" / "README.md").read_text())
    content = files[1].read_text(encoding="utf-8")
    model = json.loads(content)["model"]
    made = from_merges(model["vocab"], [merge.split(" ") for merge in model["merges"]])
    assert made.json == content == gpt2().json and made.ranks == gpt2().ranks


# -- a vocabulary of one's own


def test_a_vocabulary_is_the_same_with_any_number_of_threads():
    code = (
        "from support.text.sources import TINYSHAKESPEARE as path\n"
        "from support.text.tokenizer import train_vocabulary\n"
        "print(train_vocabulary([path.read_text()], 2000).sha256)"
    )
    command = [sys.executable, "-c", code]
    env = os.environ | {"TOKENIZERS_PARALLELISM": "true"}
    made = {
        subprocess.check_output(command, cwd=ROOT, env=env | {"RAYON_NUM_THREADS": threads})
        for threads in ("1", "4")
    }
    assert len(made) == 1


def test_a_vocabulary_has_all_bytes_its_merges_and_the_end_of_text_as_its_last_token():
    assert SMALL.vocab_size == 600 and SMALL.eot == 599 and SMALL.encoding.n_vocab == 600
    assert {bytes([b]) for b in range(256)} == set(list(SMALL.ranks)[:256])
    assert b" the" in SMALL.ranks
    few = train_vocabulary(["aaaa aaaa \udc80"], 600)  # a surrogate, and no more pairs
    assert 257 < few.vocab_size < 270 and few.sha256 != SMALL.sha256


@BOTH
def test_a_tokenizer_json_is_known_by_its_ranks_however_it_is_written(tmp_path, vocabulary):
    content = json.loads(vocabulary.json)
    content["post_processor"] = BOS | {"single": [SEQUENCE]}
    content["truncation"] = dict(direction="Right", max_length=2, strategy="LongestFirst", stride=0)
    content["model"]["continuing_subword_prefix"] = ""
    content["decoder"] = None
    content["pre_tokenizer"]["trim_offsets"] = True
    content["model"]["merges"] = [merge.split(" ") for merge in content["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=1))
    found = tokenizer_in(tmp_path)
    assert found.sha256 == vocabulary.sha256 and str(found) == str(vocabulary)
    (tmp_path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (tmp_path / "tokenizer.json").unlink()
    if vocabulary is gpt2():
        assert tokenizer_in(tmp_path) is gpt2()
    else:
        with pytest.raises(UserError, match=r"vocab\.json is not GPT-2's"):
            tokenizer_in(tmp_path)


def change(*path, to):
    def apply(content: dict) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = to(content[path[-1]]) if callable(to) else to

    return apply


def merge_otherwise(merges: list) -> list:
    """One token is merged of two others than by its ranks: ("t", "he") instead of ("th", "e")."""
    words = {merge.replace(" ", "") for merge in merges} | set("".join(merges))
    for i, merge in enumerate(merges):
        word = merge.replace(" ", "")
        for k in {*range(1, len(word))} - {merge.index(" ")}:
            if {word[:k], word[k:]} <= words:
                return [*merges[:i], f"{word[:k]} {word[k:]}", *merges[i + 1 :]]
    raise AssertionError("no token has two ways")


SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
END_TOKEN = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
BOS = {
    "type": "TemplateProcessing",
    "single": [END_TOKEN, SEQUENCE],
    "pair": [SEQUENCE, SEQUENCE],
    "special_tokens": {
        "<|endoftext|>": {"id": "<|endoftext|>", "ids": [599], "tokens": ["<|endoftext|>"]}
    },
}


@pytest.mark.parametrize(
    "apply",
    [
        change("normalizer", to={"type": "NFC"}),
        change("pre_tokenizer", to=None),
        change("pre_tokenizer", "add_prefix_space", to=True),
        change("added_tokens", 0, "content", to="<s>"),
        change("post_processor", to=BOS),
        change("model", "dropout", to=0.1),
        change("model", "end_of_word_suffix", to="</w>"),
        change("decoder", to={"type": "WordPiece", "prefix": "##", "cleanup": True}),
        change("model", "merges", to=lambda merges: merges[::-1]),
        change("model", "merges", to=merge_otherwise),
        change("model", "vocab", to=lambda vocab: {f"▁{word}": n for word, n in vocab.items()}),
        change("model", "vocab", to=lambda vocab: {**vocab, "<|endoftext|>": 0, "!": 599}),
        change("model", to={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
        change("model", to={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}),
    ],
)
def test_another_kind_of_tokenizer_is_refused_in_a_sentence(tmp_path, apply, outcome):
    content = json.loads(SMALL.json)
    apply(content)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    sentence = r"tokenizer.json is of another kind.*: fineweb.py --vocab-size"
    with pytest.raises(UserError, match=sentence):
        read_tokenizer(path)
    outcome("weights and tokenizers", str(content)[:99], TOLD)


def test_a_damaged_tokenizer_json_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text(SMALL.json[:-9])
    with pytest.raises(UserError, match=r"tokenizer.json cannot be read \(JSONDecodeError"):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_a_model_with_another_number_of_tokens_than_its_tokenizer_is_named():
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=600), tokenizer=SMALL)
    hf.check_vocabulary("ours", model)
    model.config.vocab_size = 300
    with pytest.raises(UserError, match=r"theirs has 300 tokens, its tokenizer 600"):
        hf.check_vocabulary("theirs", model)


def test_each_merge_is_of_two_earlier_tokens():
    model = json.loads(SMALL.json)["model"]
    vocabulary = model["vocab"]
    for a, b in map(str.split, model["merges"]):
        assert max(vocabulary[a], vocabulary[b]) < vocabulary[a + b]
    assert len(model["merges"]) == len(SMALL.ranks) - 256
    assert list(SMALL.ranks.values()) == list(range(599))


def test_importing_the_light_files_imports_no_torch():
    code = (
        "import sys, fineweb, support.text.tokenizer, support.show.plots; "
        "sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

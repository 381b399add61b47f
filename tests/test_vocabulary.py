"""A vocabulary of one's own: from text to shards, into a model, to everyone else's tools."""

import ast
import json
import lzma
import random
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import TINY, HerePool, command, run_program, started, wait_for_file, warm_train
from contract import call

import fineweb
from config import parse_command_line
from fineweb import Config, make_shards
from hellaswag import render_example
from model import GPT
from support.base.errors import UserError
from support.text import sources
from support.text.manifest import verify_shards
from support.text.token_files import find_shards
from support.text.tokenizer import gpt2, read_tokenizer, tokenizer_of_data, train_vocabulary

GREEK = "".join(f"Το πλοίο αριθμός {n} έφυγε από το λιμάνι το πρωί με άνεμο.\n" for n in range(900))
JAPANESE = "".join(
    f"{'猫犬鳥魚馬'[n % 5]}は{'東西南北'[n % 4]}の{'山川海'[n % 3]}で{'眠歌走'[n % 7 % 3]}る。\n"
    for n in range(1500)
)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(fineweb, "start_pool", HerePool)


def make(folder: Path, *sources, **options) -> str:
    config = Config(source=tuple(map(str, sources)), data_dir=str(folder), name="x", workers=1)
    return make_shards(replace(config, **options), folder)


def shards_of(folder: Path) -> list[np.ndarray]:
    return [np.load(path) for path in sorted(folder.glob("*.npy"), key=lambda p: p.name[-10:])]


def text_of(folder: Path, shard: int) -> str:
    return tokenizer_of_data(folder).encoding.decode(shards_of(folder)[shard].tolist())


@pytest.fixture
def documents(tmp_path) -> Path:
    lines = [
        json.dumps({"text": f"Document {n}: {'the same words again ' * 9}"}) for n in range(300)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return tmp_path / "a.jsonl"


# -- the split


def test_two_vocabularies_hold_out_the_same_bytes_and_know_none_of_them(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "STRETCH", 1000)  # what is held out ends in one of the later ones
    planted = "zyxomma "
    lines = [f"{planted * 40 if n < 25 else f'line {n} of a long text'}\n" for n in range(9000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    for name, options in (
        ("300", dict(vocab_size=300)),
        ("900", dict(vocab_size=900)),
        ("gpt2", dict(tokenizer="gpt2")),
    ):
        said = make(tmp_path / name, tmp_path / "a.txt", **options)
        assert "bytes per token" in said and "to choose another text: --val-source FILE" in said
    held_out, *others = (text_of(tmp_path / name, 0) for name in ("300", "900", "gpt2"))
    assert held_out.startswith(f"<|endoftext|>{planted}") and others == [held_out] * 2
    rest = text_of(tmp_path / "300", 1)
    assert held_out + rest.removeprefix("<|endoftext|>") == f"<|endoftext|>{''.join(lines)}"
    assert rest.startswith("<|endoftext|>") and held_out.endswith("\n") == rest.endswith("\n")
    assert planted.strip() not in rest, "it is in the first 5% only"
    assert not any(b"zyx" in token for token in tokenizer_of_data(tmp_path / "900").ranks)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([100] * 100, (0, 5, 0)),  # documents as a whole
        ([100] * 109, (0, 6, 0)),
        ([9000, 1000], (0, 0, 500)),  # the first is too much: it is cut at the end of a line
        ([60] * 3 + [9000], (0, 3, 280)),
        ([10], (0, 0, 1)),
    ],
)
def test_the_split_is_at_a_document_or_at_the_end_of_a_line(sizes, expected):
    texts = [("".join("123456789\n" for _ in range(size // 10)), True) for size in sizes]
    texts = [("0123456789", True)] if sizes == [10] else texts
    assert sources.find_split([sources.File("a", lambda: iter(texts))], 1e9) == list(expected)


SHAPES = {  # texts whose line ends are far from where they are split
    "a short last line": "river stone light mill " * 13000 + "\nThe end.\n",
    "a short first line": "a licence\n" + "var x=function(n){return n+1};" * 9000,
    "no line end": "ACGTTGCA" * 40_000,
    "a paragraph a line": ("नदी के किनारे एक गाँव था। " * 900 + "\n") * 5,
    "Japanese without spaces": "猫は東の山で眠る。" * 9000,
    "Windows' line ends": ("one line of text\r\n" * 4000),
}


@pytest.mark.parametrize("name", SHAPES)
def test_about_a_twentieth_is_held_out_wherever_the_lines_end(tmp_path, name):
    text = SHAPES[name]
    (tmp_path / "a.txt").write_bytes(text.encode())
    make(tmp_path / "own", tmp_path / "a.txt", vocab_size=300)
    held_out, train = (text_of(tmp_path / "own", shard) for shard in (0, 1))
    held_out, train = (part.removeprefix("<|endoftext|>") for part in (held_out, train))
    assert held_out + train == text
    assert 0.044 < len(held_out.encode()) / len(text.encode()) < 0.056
    assert held_out[-1] == ("\n" if "Windows" in name else " ") or " " not in text


def test_a_limit_of_tokens_limits_what_is_held_out_of_them(tmp_path):
    """A stretch of a file is a megabyte, and more than the limit."""
    (tmp_path / "a.txt").write_text("river stone light mill\n" * 60_000)
    make(tmp_path / "own", tmp_path / "a.txt", tokenizer="gpt2", max_tokens=20_000)
    held_out, train = map(len, shards_of(tmp_path / "own"))
    assert held_out + train == 20_000 and 800 < held_out < 1200


def test_a_limit_of_tokens_holds_out_as_much_with_any_vocabulary(tmp_path):
    shutil.copy(sources.TINYSHAKESPEARE, tmp_path / "a.txt")
    for own in (dict(tokenizer="gpt2"), *(dict(vocab_size=n) for n in (400, 1024, "auto"))):
        folder = tmp_path / str([*own.values()])
        make(folder, tmp_path / "a.txt", **own, max_tokens=20_000)
        held_out, train = map(len, shards_of(folder))
        assert held_out + train == 20_000 and 700 < held_out < 1300, own


@pytest.mark.parametrize("options", [{}, dict(vocab_size=300), dict(tokenizer="gpt2")])
def test_files_that_are_named_for_validation_are_held_out_whole(tmp_path, options):
    """With any vocabulary, and also where --source names them, too."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"The text of file {name}, and more of it. " * 30)
    val = (str(tmp_path / "b.txt"),)
    said = make(tmp_path / "own", tmp_path / "*.txt", val_source=val, **options)
    texts = [(tmp_path / f"{name}.txt").read_text() for name in "abc"]
    assert text_of(tmp_path / "own", 0) == f"<|endoftext|>{texts[1]}"
    assert text_of(tmp_path / "own", 1) == f"<|endoftext|>{texts[0]}<|endoftext|>{texts[2]}"
    assert said.endswith("of the text, what --val-source names")
    assert "nothing to do" in make(tmp_path / "own", tmp_path / "*.txt", val_source=val, **options)
    (tmp_path / "b.txt").write_text("another")
    with pytest.raises(UserError, match=r"b\.txt has changed"):
        make(tmp_path / "own", tmp_path / "*.txt", val_source=val, **options)
    with pytest.raises(UserError, match="--val-source was"):
        make(tmp_path / "own", tmp_path / "*.txt", **options)
    (tmp_path / "empty.jsonl").write_text("\n")
    val = (str(tmp_path / "empty.jsonl"),)
    with pytest.raises(UserError, match="0 are for validation, and they hold no text"):
        make(tmp_path / "none", tmp_path / "a.txt", val_source=val, **options)


def test_a_benchmark_is_cut_out_before_a_vocabulary_is_trained_and_not_from_held_out_text(tmp_path):
    secret = " ".join(f"zyxomma{n}" for n in range(13))
    rest = "the river runs past the old stone mill " * 40
    example = {"ctx": secret, "endings": ["a", "b", "c", "d"], "label": 0}
    (tmp_path / "bench.jsonl").write_text(json.dumps(example))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{rest}{secret} {rest}" * 3)
    options = dict(decontaminate=True, hellaswag_path=str(tmp_path / "bench.jsonl"), vocab_size=300)
    val = (str(tmp_path / "b.txt"),)
    make(tmp_path / "own", tmp_path / "a.txt", val_source=val, **options)
    assert secret in text_of(tmp_path / "own", 0) and secret not in text_of(tmp_path / "own", 1)
    assert not any(b"zyx" in token for token in tokenizer_of_data(tmp_path / "own").ranks)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "y_train_000007.npy", "x_val_000000.bin"])
def test_training_reads_the_shards_of_the_manifest_and_no_others(documents, tmp_path, name):
    make(tmp_path / "own", documents, vocab_size=300)

    def found():
        splits = (find_shards(tmp_path / "own", split) for split in ("train", "val"))
        return [[shard.path.name for shard in shards] for shards in splits]

    ours = found()
    foreign = tmp_path / "own" / name
    np.save(foreign, np.zeros(99, np.uint16)) if "npy" in name else foreign.write_bytes(bytes(99))
    assert found() == ours
    (tmp_path / "theirs").mkdir()
    shutil.copy(foreign, tmp_path / "theirs")
    with pytest.raises(UserError, match=f"holds {name}; choose another --data-dir"):
        make(tmp_path / "theirs", documents, vocab_size=300)


def test_a_source_without_text_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(UserError, match="there is no text"):
        make(tmp_path / "own", tmp_path / "a.jsonl", vocab_size=300)


def test_at_most_ten_megabytes_are_held_out_whatever_comes_later(monkeypatch):
    monkeypatch.setattr(sources, "MOST_HELD_OUT", 1000)
    asked = []

    def read():
        for number in range(10**6):
            asked.append(number)
            yield "x" * 100, True

    assert sources.find_split([sources.File("a", read)], 1e9) == [0, 10, 0]
    assert len(asked) == 201 and sources.find_split([sources.File("a", read)], 4000) == [0, 2, 0]


def test_tiny_shakespeare_has_nanogpts_split(tmp_path):
    make(tmp_path / "own", "tinyshakespeare", vocab_size=300)
    make(tmp_path / "gpt2", "tinyshakespeare")
    whole = sources.TINYSHAKESPEARE.read_text()
    for name in ("own", "gpt2"):
        assert text_of(tmp_path / name, 0) == "<|endoftext|>" + whole[1_003_854:]
        assert text_of(tmp_path / name, 1) == "<|endoftext|>" + whole[:1_003_854]


def test_of_the_tales_two_books_are_held_out_whole(tmp_path):
    make(tmp_path, "tales", max_tokens=300_000)
    with lzma.open(sources.ASSETS / "tales_val.jsonl.xz") as file:
        books = [json.loads(line) for line in file]
    assert [book["title"] for book in books] == ["The Book of Dragons", "Ozma of Oz"]
    whole = "".join("<|endoftext|>" + book["text"] for book in books)
    assert text_of(tmp_path, 0) == whole
    training = text_of(tmp_path, 1)
    assert training.startswith("<|endoftext|>") and books[1]["text"][1000:1200] not in training


def test_text_without_spaces_is_sampled_less_and_said_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sources, "DISTINCT_WORDS", 500)
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(JAPANESE)
    files = list(sources.find_local(str(tmp_path / "*.txt"), "text"))
    assert list(sources.read_for_vocabulary(files, None)) == [JAPANESE], (
        "one has more than 500 bytes"
    )
    assert "vocabulary: trained on the first 0 MB, because their words" in capsys.readouterr().err
    monkeypatch.setattr(sources, "DISTINCT_WORDS", 10**9)
    monkeypatch.setattr(sources, "VOCABULARY_TEXT", 500)
    assert list(sources.read_for_vocabulary(files, None)) == [JAPANESE]
    assert capsys.readouterr().err == "vocabulary: trained on the first 0 MB\n"


# -- the folder


def test_a_vocabulary_is_made_once_and_a_folder_with_another_one_is_refused(documents, tmp_path):
    folder = tmp_path / "own"
    said = make(folder, documents, vocab_size=5000)
    manifest = json.loads((folder / "manifest.json").read_text())
    came = tokenizer_of_data(folder)
    assert manifest["options"]["vocab_size"] == 5000 > came.vocab_size
    assert manifest["tokenizer"] == dict(vocab_size=came.vocab_size, sha256=came.sha256)
    assert f"vocabulary: {came.vocab_size} tokens (SHA-256 {came.sha256[:8]}…)" in said
    assert "nothing to do" in make(folder, documents, vocab_size=5000)
    for options, words in (
        (dict(vocab_size=600), "--vocab-size was 5000, not 600"),
        (dict(), "--vocab-size was 5000, not 0"),
        (dict(tokenizer="gpt2"), "--vocab-size was 5000, not 0; --tokenizer was , not "),
    ):
        with pytest.raises(UserError, match=words):
            make(folder, documents, **options)
    make(tmp_path / "gpt2", documents)
    with pytest.raises(UserError, match="--vocab-size was 0, not 600"):
        make(tmp_path / "gpt2", documents, vocab_size=600)
    make(tmp_path / "copy", documents, tokenizer=str(folder))
    assert (tmp_path / "copy" / "tokenizer.json").read_text() == came.json
    assert [*map(list, shards_of(tmp_path / "copy"))] == [*map(list, shards_of(folder))]
    make(tmp_path / "again", documents, tokenizer=str(tmp_path / "gpt2"))
    assert tokenizer_of_data(tmp_path / "again") is gpt2(), "whose data have no file of it"
    own = str(tmp_path / "copy" / "tokenizer.json")  # the same one has another path
    assert "nothing to do" in make(tmp_path / "copy", documents, tokenizer=own)
    make(folder, documents, overwrite=True)
    assert not (folder / "tokenizer.json").exists() and tokenizer_of_data(folder) is gpt2()


def test_a_folder_whose_vocabulary_is_lost_or_swapped_is_refused(documents, tmp_path):
    folder = tmp_path / "own"
    make(folder, documents, vocab_size=300)
    make(tmp_path / "other", documents, vocab_size=290)
    for swap in (Path.unlink, lambda path: shutil.copy(tmp_path / "other" / path.name, path)):
        swap(folder / "tokenizer.json")
        with pytest.raises(UserError, match="is missing or not the one that made the shards"):
            tokenizer_of_data(folder)
        with pytest.raises(UserError, match="is missing or not the one that made the shards"):
            verify_shards(folder)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--vocab-size", 256], "257 at least, for all bytes"),
        (["--vocab-size", 65537], "at most 65,536"),
        (["--vocab-size", 300, "--tokenizer", "gpt2"], "no --tokenizer beside it"),
        (["--vocab-size", 300, "--val-tokens", 9], "--val-tokens: leave it out"),
        (["--tokenizer", "gpt2", "--val-tokens", 9], "--val-tokens: leave it out"),
        (["--source", "tinyshakespeare", "--val-tokens", 9], "--val-tokens: leave it out"),
        (["--val-source", "a.txt", "--val-tokens", 9], "--val-tokens: leave it out"),
        (["--source", "tales", "--val-source", "a.txt"], "tales has text for validation already"),
        (["--source", "a.txt", "--source", "b.txt"], "--source is given twice: name all after one"),
        (["--val_source=a", "--workers", "1", "--val-source=b"], "--val-source is given twice"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags, words):
    done = call("fineweb.py", *flags)
    assert done.returncode == 2 and words in done.stderr


def test_a_vocabulary_whose_tokens_do_not_fit_a_shard_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "read_tokenizer", lambda _: SimpleNamespace(vocab_size=65_537))
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(UserError, match="has 65,537 tokens: a shard can have at most 65,536"):
        make(tmp_path / "out", tmp_path / "a.txt", tokenizer="large.json")


def test_auto_counts_only_the_text_that_a_limit_of_tokens_leaves(documents, tmp_path, monkeypatch):
    sizes: list[float] = []
    monkeypatch.setattr(fineweb, "choose_vocab_size", lambda size: sizes.append(size) or 300)
    for max_tokens in (0, 500):
        make(tmp_path / str(max_tokens), documents, vocab_size="auto", max_tokens=max_tokens)
    assert sizes[0] > sizes[1] == 2000 > sizes[2]


def test_auto_chooses_the_vocabulary_by_the_text_and_the_manifest_keeps_its_size(tmp_path):
    words = [f"{a}{b}{c} " for a in "bcdfg" for b in "aeiou" for c in "klmnp"]
    (tmp_path / "text.txt").write_text("".join(words) * 20)
    flags = (
        "--source",
        tmp_path / "text.txt",
        "--vocab-size",
        "auto",
        "--data-dir",
        tmp_path / "d",
    )
    first = call("fineweb.py", *flags)
    assert first.returncode == 0, first.stderr
    size = tokenizer_of_data(tmp_path / "d").vocab_size
    assert 257 < size <= 512 and f"vocabulary: {size} tokens" in first.stdout
    manifest = json.loads((tmp_path / "d" / "manifest.json").read_text())
    assert manifest["tokenizer"]["vocab_size"] == size
    again = call("fineweb.py", *flags)
    assert "is complete" in again.stdout
    done = call("fineweb.py", *flags[:2], "--vocab-size", "many", "--data-dir", tmp_path / "e")
    assert done.returncode == 2 and "{auto}" in done.stderr


@pytest.mark.timeout(120)  # it took minutes, or had no end
@pytest.mark.parametrize("word", ["a" * 10**6, "\0" * 10**6, "ACGT" * 50_000, " " * 10**6])
def test_a_word_of_any_length_is_no_work_for_a_vocabulary(word):
    word = "".join(random.Random(0).sample(word, len(word)))
    tokenizer = train_vocabulary(["the cat sat on the mat " * 99, word], 300)
    assert tokenizer.vocab_size > 257


def test_ctrl_c_ends_the_training_of_a_vocabulary(tmp_path):
    choose = random.Random(1)
    (tmp_path / "a.txt").write_text("".join(choose.choices("!?.,;:abcdef", k=4 * 10**6)))
    args = ("--source", tmp_path / "a.txt", "--vocab-size", 20000, "--data-dir", tmp_path / "d")
    with started(command("fineweb.py", *args)) as process:
        wait_for_file(tmp_path / "d" / ".lock")
        time.sleep(2)  # now it trains: that takes ten seconds and more
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted: the same command resumes" in told
    assert [path.name for path in (tmp_path / "d").iterdir()] == [".lock"]


def test_nanogpts_characters_are_refused_with_the_command_that_makes_tokens(tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"{split}.bin").write_bytes(bytes(200))
    (tmp_path / "meta.pkl").write_bytes(b"not a pickle")
    done = call("train_gpt2.py", "--data-dir", tmp_path, *TINY)
    command = (
        f"python fineweb.py --source {tmp_path}/input.txt --vocab-size auto --data-dir data/mine"
    )
    assert done.returncode == 1 and command in done.stderr


# -- in a model

OFFLINE = dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
EVERY_THREE = [
    "--checkpoint-every",
    "3",
    "--val-every",
    "3",
    "--val-tokens",
    "100000",
    "--sample-every",
    "6",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with data of two vocabularies, `own` and `gpt2`, and a run on the first, `log`."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "a.txt").write_text(GREEK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fineweb, "start_pool", HerePool)
        make(folder / "own", folder / "a.txt", vocab_size=300)
        make(folder / "gpt2", folder / "a.txt", tokenizer="gpt2")
    done = warm_train(folder / "own", folder / "log", *EVERY_THREE)
    assert done.returncode == 0, done.stderr
    assert "vocabulary: 300 tokens (SHA-256 " in done.stdout
    assert "nats per character" in done.stdout and "rank 0 sample 0: Hello" in done.stdout
    return folder


def test_a_checkpoint_carries_the_vocabulary_to_our_tools_and_to_everyone_elses(trained):
    checkpoint = trained / "log" / "ckpt_000006"
    model = GPT.from_pretrained(checkpoint)
    own = tokenizer_of_data(trained / "own")
    assert model.tokenizer.sha256 == own.sha256 and model.config.vocab_size == 300
    assert not model.fingerprint.difference, "it is still a GPT-2"
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert theirs.eos_token_id == own.eot == 299
    for sentence in (GREEK[:500], JAPANESE[:500], " 's\n\n  x😀", "don't  stop", "naïve\t\u3000"):
        assert theirs(sentence)["input_ids"] == own.encode(sentence)
        assert theirs.decode(own.encode(sentence)) == sentence
    code = f"""from transformers import pipeline
generate = pipeline("text-generation", model={str(checkpoint)!r})
print(generate("Το πλοίο", do_sample=False, max_new_tokens=5))"""
    done = run_program([sys.executable, "-c", code], **OFFLINE)
    assert done.returncode == 0, done.stderr
    idx = torch.tensor([own.encode("Το πλοίο")])
    tokens = model.generate(idx, 5, temperature=0, stop=own.eot)[0].tolist()
    expected = own.encoding.decode(tokens).split("<|endoftext|>")[0]
    assert ast.literal_eval(done.stdout) == [{"generated_text": expected}]
    done = call("sample.py", "--model", checkpoint, "--prompt", "Το", "--temperature", 0)
    assert done.returncode == 0 and done.stdout.startswith("Το"), done
    example = dict(ctx="Το πλοίο", endings=[" έφυγε", " ήρθε", " x", " y"], label=0)
    tokens, mask, _ = render_example(example, model.tokenizer)
    row = tokens[0][: len(own.encode("Το πλοίο")) + int(mask[0].sum())].tolist()
    assert row == own.encode("Το πλοίο") + own.encode("  έφυγε")


def test_data_and_weights_of_two_vocabularies_are_refused(trained, tmp_path):
    checkpoint = trained / "log" / "ckpt_000006"
    flags = ["--init-from", str(checkpoint)]
    done = warm_train(trained / "gpt2", tmp_path / "log", *flags)
    own = tokenizer_of_data(trained / "own")
    assert (
        f"{checkpoint} has a vocabulary of {own}, {trained}/gpt2 one of 50,257 tokens (GPT-2's): "
        f"make data with the model's, by fineweb.py --tokenizer {checkpoint}, or train a new model"
    ) in done.stderr
    done = warm_train(trained / "own", tmp_path / "log", *flags)
    assert done.returncode == 0, "the same vocabulary"


def test_a_preset_says_which_vocabulary_its_sizes_fit(trained, tmp_path):
    flags = ["--preset", "quickstart", *TINY]
    done = call("train_gpt2.py", *flags, "--data-dir", trained / "own", "--log-dir", tmp_path / "a")
    assert "; --preset quickstart is tuned for 1,024: fineweb.py --vocab-size 1024" in done.stdout
    done = call("train_gpt2.py", *flags, "--data-dir", "data/nothing", "--log-dir", tmp_path / "b")
    assert (
        "python fineweb.py --source YOUR_TEXT --vocab-size 1024 --data-dir data/nothing"
        in done.stderr
    )


def test_another_models_file_is_read_and_its_absence_means_gpt2s(trained, tmp_path):
    checkpoint = shutil.copytree(trained / "log" / "ckpt_000006", tmp_path / "model")
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "vocab.json").unlink()
    with pytest.raises(UserError, match="tokenizer that gives a text other tokens"):
        GPT.from_pretrained(checkpoint)
    (checkpoint / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="eos_token_id is 299, and OpenAI's GPT-2 has 50256"):
        GPT.from_pretrained(checkpoint)
    settings = json.loads((checkpoint / "config.json").read_bytes())
    (checkpoint / "config.json").write_text(json.dumps(settings | dict(eos_token_id=50256)))
    assert GPT.from_pretrained(checkpoint).tokenizer is gpt2()
    sample = call("sample.py", "--model", checkpoint)
    assert "has 300 tokens, its tokenizer 50257" in sample.stderr
    transformers.AutoTokenizer.from_pretrained(trained / "log" / "ckpt_000006").save_pretrained(
        tmp_path / "theirs"
    )
    saved = read_tokenizer(tmp_path / "theirs" / "tokenizer.json")
    assert saved.sha256 == tokenizer_of_data(trained / "own").sha256


# -- a language of its own


@pytest.mark.parametrize("language", [GREEK, JAPANESE], ids=["greek", "japanese"])
def test_a_small_vocabulary_of_its_own_is_better_at_a_language_than_gpt2s(language, tmp_path):
    (tmp_path / "a.txt").write_text(language)
    bits = []
    for name, options in (("own", dict(vocab_size=300)), ("gpt2", dict(tokenizer="gpt2"))):
        make(tmp_path / name, tmp_path / "a.txt", **options)
        flags = ["--max-steps", "60", "--val-every", "60", "--val-tokens", "100000"]
        assert warm_train(tmp_path / name, tmp_path / f"log_{name}", *flags).returncode == 0
        records = (tmp_path / f"log_{name}" / "metrics.jsonl").read_text().splitlines()
        vals = [record for record in map(json.loads, records) if record["type"] == "val"]
        bits.append(vals[-1]["bits_per_byte"])
    own, theirs = (text_of(tmp_path / name, 0) for name in ("own", "gpt2"))
    lengths = [len(shards_of(tmp_path / name)[0]) for name in ("own", "gpt2")]
    assert own == theirs and lengths[1] >= 1.8 * lengths[0]
    assert bits[0] < bits[1]


def test_plan_takes_the_vocabulary_of_the_data_or_of_a_flag(trained):
    flags = ["--preset", "gpt2", "--n-layer", "1", "--data-dir"]
    sizes = []
    for more in (["nowhere"], [trained / "own"], ["nowhere", "--vocab-size", 1000]):
        done = call("plan.py", *flags, *more)
        line = next(line for line in done.stdout.splitlines() if line.startswith("parameters"))
        sizes.append(int(line.split()[1].replace(",", "")))
    assert sizes[0] - sizes[1] == (50257 - 300) * 768 and sizes[2] - sizes[1] == 700 * 768


def test_the_command_line_of_training_has_no_flag_for_the_vocabulary():
    with pytest.raises(SystemExit):
        parse_command_line(["--vocab-size", "300"])

"""Whatever is typed, read, drawn or scored ends well: many small cases, most in this process.

tests/contract.py has the contract; `pytest --fault-table` counts the cases.
"""

import json
import os
import random
import re
import shlex
import shutil
import socket
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import EOT, TINY, HerePool, documents, losses, write_shard
from contract import RIGHT, Done, call, contents, judge

import fineweb
import sample
from model import GPT, GPTConfig
from support.text.tokenizer import gpt2, replace_surrogates

# -- where the scripts are called


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A directory with a little of everything that the scripts read, as the current one."""
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "toy_val_000000.npy", documents(700, seed=0))
    write_shard(tmp_path / "data" / "toy_train_000001.npy", documents(1000, seed=1))
    torch.manual_seed(0)
    GPT(GPTConfig(block_size=32, n_layer=1, n_head=1, n_embd=8)).save_pretrained(tmp_path / "model")
    write_lines(tmp_path / "text.jsonl", [{"text": f"some text {i}"} for i in range(12)])
    write_lines(tmp_path / "examples.jsonl", [EXAMPLE] * 3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


EXAMPLE = dict(ctx="A man is", endings=["here.", "there.", "a dog.", "not there."], label=1)


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def quick(monkeypatch) -> None:
    """No network, no waiting for the disk, no other processes."""

    def no_network(*_, **__) -> None:
        raise socket.gaierror("there is no network in tests")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(fineweb, "start_pool", HerePool)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def clear(place: Path, before: dict[str, str]) -> None:
    """Removes what was not there before. Fails if something has changed."""
    kept = {Path(name).parts[0] for name in before}
    for path in place.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert contents(place) == before


# -- command lines

SCRIPTS = {  # a command line that works
    "train_gpt2.py": [*TINY, "--data-dir=data", "--log-dir=log"],
    "fineweb.py": shlex.split("--source text.jsonl --data-dir out --workers 1 --shard-size 20"),
    "hellaswag.py": shlex.split("--model model --path examples.jsonl --device cpu"),
    "sample.py": shlex.split("--model model --max-new-tokens 3 --device cpu"),
    "bench.py": shlex.split("--model tiny --device cpu"),
    "plan.py": ["--n-layer=2"],
    "compare.py": [
        f"--base={shlex.join(TINY)} --val-every=2 --data-dir=data",
        "--arm=a: --weight-decay 0.2",
    ],
}
LONG = {  # what starts when everything has been checked, and is left out here
    "train_gpt2.py": "support.show.report.describe_batch",
    "bench.py": "bench.run_benchmarks",
    "compare.py": "compare.compare",
}
RIGHT_WORDS = {"fineweb.py": "tokens", "hellaswag.py": "acc_norm", "plan.py": "checkpoint"}
RIGHT_WORDS |= dict.fromkeys(LONG, "reached")
ODD = ["", " ", "-1", "0", "1", "1.5", "nan", "inf", "-inf", "1e38", "1e400", "1e20", "0x10"]
ODD += [str(10**20), str(-(10**20)), "9223372036854775807", "9223372036854775808", "true", "None"]
ODD += [
    "auto",
    "ä",
    "\udcff",
    "a b",
    "y" * 300,
    "--seed",
    "'",
    "@x",
    "hub:",
    "~",
    "../..",
    "*",
    "-",
]


def stop_before_work(*_) -> None:
    print("reached")
    raise SystemExit(0)


def flags_of(script: str) -> list[str]:
    """The flags that --help shows. Each must have a help, and no default or choice is empty."""
    shown = call(script, "--help").stdout
    flags = re.findall(r"^│ (--[a-z0-9-]+)(.*?)(?=^│ --|^╰)", shown, re.DOTALL | re.MULTILINE)
    assert len(flags) >= 4
    for flag, text in flags:
        told = re.sub(r"^, --no\S+|\{\S+\}|[\s│]+", " ", text)
        assert re.search(r"[a-z']{2,}[ ,]", told), (flag, text)
        assert not re.search(r"\(default: (''|\))|\{,", text), (flag, text)
    return [flag for flag, _ in flags]


def command_lines(script: str) -> list[list[str]]:
    """For each flag some odd values; and odd flags."""
    draw = random.Random(script)
    flags = flags_of(script)
    if script == "plan.py":  # training's own flags are tried with training
        flags = sorted(set(flags) - set(flags_of("train_gpt2.py")))
    lines = [["--no-such-flag"], ["--no-such-flag", "1"], ["stray"], ["--help"], ["--"], ["-x"]]
    lines += [[flags[0]], [flags[-1]], [flags[-1][:-1] + "x", "1"]]
    for flag in flags:
        odd = draw.sample(ODD, 3)
        lines += [[f"{flag}={odd[0]}"], [flag, odd[1]], [f"--{flag[2:].replace('-', '_')}", odd[2]]]
    return lines


def words_of(line: list[str]) -> list[str]:
    """What a sentence about this command line may name: its flags, or their values."""
    words = ["Unrecognized options", "HellaSwag", "--init-from", "manifest.json"]
    for part in line:
        flag, _, value = part.partition("=")
        name = flag.removeprefix("--")
        words += [name, name.replace("-", "_"), name.replace("_", "-"), value or name]
    return [word.encode(errors="backslashreplace").decode()[:60] for word in words if word]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_with_odd_values_is_taken_or_told_in_a_sentence(
    script, place, quick, monkeypatch, outcome
):
    monkeypatch.setattr("support.machine.compile.why_not_compile", lambda device: "as asked")
    monkeypatch.setattr(sample, "why_not_compile", lambda device: "not in this test")
    if script in LONG:
        monkeypatch.setattr(LONG[script], stop_before_work)
    before = contents(place)
    for line in command_lines(script):
        done = call(script, *SCRIPTS[script], *line, stdin=b"one\ntwo\n")
        outcome("command lines", f"{script} {line}", judge(done, *words_of(line)))
        if done.returncode == 0 and line != ["--help"]:
            assert RIGHT_WORDS.get(script, "") in done.stdout, line
        clear(place, before)


# what training does with extreme numbers: it runs to its end, or says why not
NUMBERS = """
    --learning-rate=1e-320 --learning-rate=1e12 --eps=1e-45 --eps=1e12 --beta2=0.9999999999999999
    --weight-decay=1e12 --grad-clip=1e-320 --min-lr-frac=1e12 --seed=1e20
    --checkpoint-minutes=1e-320 --keep-checkpoints=1e12 --batch-size=1e12
    --warmup-steps=5 --n-layer=1000000000000 --n-embd=1000000000000
"""


@pytest.mark.parametrize("flag", NUMBERS.split())
def test_a_run_with_an_extreme_number_ends_well(flag, place, quick, outcome):
    done = call("train_gpt2.py", *SCRIPTS["train_gpt2.py"], "--checkpoint-every=6", flag)
    name, _, _ = flag[2:].partition("=")
    ended = judge(done, name, name.replace("-", "_"), "not finite", "loss is", "bytes")
    outcome("command lines", f"train_gpt2.py {flag}", ended)
    assert done.returncode or len(losses(place / "log")) == 6
    for saved in place.glob("log/ckpt_*"):
        assert all(p.isfinite().all() for p in GPT.from_pretrained(saved).parameters())


# -- text

BLOCKS = [range(128), range(0x80, 0x700), range(0x900, 0x980), range(0x1100, 0x1200)]
BLOCKS += [range(0x2000, 0x2070), range(0x4E00, 0x9FFF), range(0xD7F0, 0xE010)]
BLOCKS += [range(0x1F300, 0x1F650), range(0xE0000, 0xE0080), range(0x110000)]
PIECES = ["<|endoftext|>", "<|", "|>", "'s", "'LL", "  ", "\n\n", "\r\n", "\t", "\x00", "\u200d"]
PIECES += [
    "\ufeff",
    "e\u0301",
    "👩\u200d👩\u200d👧",
    "🇨🇭",
    "1234567",
    "٣",
    "...",
    "\u202e",
    "\ud83d",
]


def strings(count: int, seed: int) -> list[str]:
    """Texts of many scripts, of bytes that are no text, of pieces that the pattern treats apart."""
    draw = random.Random(seed)
    kinds = [
        lambda: "".join(map(chr, draw.choices(draw.choice(BLOCKS), k=draw.randrange(40)))),
        lambda: "".join(draw.choices(PIECES, k=draw.randrange(12))),
        lambda: draw.randbytes(draw.randrange(60)).decode("utf-8", "surrogateescape"),
        lambda: draw.choice(PIECES) * draw.randrange(200),
    ]
    return [kinds[i % len(kinds)]() for i in range(count)]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.torture) for seed in range(1, 40))]
)
def test_five_thousand_strings_come_back_from_tokens_and_from_shards(seed, place, quick, outcome):
    texts = strings(5000, seed)
    write_lines(place / "a.jsonl", [{"text": text} for text in texts])
    done = call("fineweb.py", "--source=a.jsonl", "--data-dir=out", "--shard-size=1000000")
    assert done.returncode == 0, done
    val, train = (np.load(next(place.glob(f"out/*_{split}_*.npy"))) for split in ("val", "train"))
    tokens = np.concatenate([val, train])
    starts = [*np.flatnonzero(tokens == EOT), len(tokens)]
    decode = gpt2().encoding.decode
    for text, (start, end) in zip(texts, pairwise(starts), strict=True):
        whole = replace_surrogates(text)
        back = decode(tokens[start + 1 : end].tolist())
        assert back == whole and decode(gpt2().encode(text)) == whole, ascii(text)
        outcome("text", ascii(text)[:60], RIGHT)


# -- sampling and scoring

PROMPTS = ["", " ", "a", "\n", "<|endoftext|>", "ä\u0301", "🙂🏽", "\udcff", "\x00", "word " * 60]
PROMPTS += ["the man", "0" * 300, "\u202eabc", "-x", "@nowhere", "-"]
DRAWS = {  # what is right, and what is not
    "--temperature": ["0", "1e-300", "1e-30", "0.5", "1", "1e30", "1e308", "-1", "nan"],
    "--top-k": ["0", "1", "2", "50257", "50258", "-1"],
    "--top-p": ["1", "0.5", "1e-300", "1e-9", "0.999999999", "0", "1.1", "nan"],
    "--seed": ["0", "42", str(2**64 - 1), str(2**64), "-1"],
    "--max-new-tokens": ["1", "3", "40", "0", "-5"],
    "--num-samples": ["1", "2", "3", "0"],
}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.torture) for seed in range(1, 40))]
)
def test_sampling_gives_text_that_begins_with_its_prompt_or_a_sentence(seed, place, quick, outcome):
    draw = random.Random(seed)
    before = contents(place)
    right = 0
    for _ in range(50):
        flags = [f"--prompt={draw.choice(PROMPTS)}", *draw.choice([[], ["--no-stop"]])]
        for flag in draw.sample(list(DRAWS), draw.randrange(5)):
            flags += [flag, draw.choice(DRAWS[flag])]
        done = continue_prompt(flags)
        outcome("sampling and scoring", f"sample.py {flags}", judge(done))
        if done.returncode == 0:
            right += 1
            prompt = replace_surrogates(flags[0].removeprefix("--prompt="))
            prompts = {"one", "\ufffdtwo"} if prompt == "-" else {prompt}
            assert {json.loads(line)["prompt"] for line in done.stdout.splitlines()} == prompts
            assert continue_prompt(flags).stdout == done.stdout, "the same seed, the same text"
    assert right > 10 and contents(place) == before


def continue_prompt(flags: list[str], stdin: bytes = b"one\n\xfftwo") -> Done:
    return call(
        "sample.py", *SCRIPTS["sample.py"], "--dtype=float32", "--json", *flags, stdin=stdin
    )


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"one", b"\xff\n\x00\n", b"a\r\nb\r\n", b" \x0c\n"]
)
def test_prompts_from_any_stdin_are_continued_or_told(content, place, quick, outcome):
    done = continue_prompt(["--prompt=-"], content)
    outcome("sampling and scoring", f"sample.py reads {content!r}", judge(done, "--prompt -"))
    assert len(done.stdout.splitlines()) == len(content.splitlines())


@pytest.mark.parametrize("line", [b"{", b"null", b"\xff\xfe", b'{"ctx": "a"}', bytes(40)])
def test_a_line_that_cannot_be_scored_is_named(line, place, quick, outcome):
    (place / "examples.jsonl").write_bytes(json.dumps(EXAMPLE).encode() + b"\n" + line)
    done = call("hellaswag.py", *SCRIPTS["hellaswag.py"])
    assert done.returncode == 1, done
    ended = judge(done, "examples.jsonl, line 2")
    outcome("sampling and scoring", f"hellaswag.py with {line!r}", ended)


# -- permissions

RESUME = "train_gpt2.py --resume auto --max-steps 9 --log-dir run"
DENIED = {  # what may not be read or written, and who needs it
    "data": "train_gpt2.py",
    "run": RESUME,
    "run/ckpt_000006": RESUME,
    "run/ckpt_000006/training_state.pt": RESUME,
    "run/ckpt_000006/model.safetensors": "train_gpt2.py --init-from run/ckpt_000006",
    "examples.jsonl": "hellaswag.py",
    "model/config.json": "hellaswag.py",
    "model": "sample.py",
    "prompts": "sample.py --prompt @prompts",
    "text.jsonl": "fineweb.py",
    "made": "fineweb.py --data-dir made",
    "made/manifest.json": "fineweb.py --data-dir made --verify",
}


@pytest.mark.parametrize("name", DENIED)
def test_what_may_not_be_read_is_one_sentence_and_stays(name, warm, finished, place, outcome):
    script, *flags = DENIED[name].split()
    shutil.copytree(finished, place / "run")
    (place / "made").mkdir()
    (place / "made" / "manifest.json").write_text("{}")
    (place / "prompts").write_text("one\ntwo\n")
    before = contents(place)
    mode = (place / name).stat().st_mode
    (place / name).chmod(0)
    done = warm.run(script, *SCRIPTS[script], *flags, cwd=place, powerless=True, HF_HUB_OFFLINE="1")
    (place / name).chmod(mode)
    outcome("full disk and permissions", f"{name} for {script}", judge(done, *Path(name).parts))
    assert done.returncode == 1
    after = contents(place)
    assert {path: after.get(path) for path in before} == before

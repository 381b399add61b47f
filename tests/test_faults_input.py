"""Whatever is typed, read, drawn or scored ends well: many small cases, most in this process.

The contract and the areas are in tests/contract.py; `pytest --fault-table` counts the cases.
"""

import dataclasses
import json
import os
import random
import shlex
import shutil
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, documents, losses, write_shard
from contract import RIGHT, Done, call, contents, judge
from test_fineweb import HerePool, make, texts_in, tokens_in

import bench
import compare
import fineweb
import hellaswag
import plan
import sample
import train_gpt2
from config import TrainConfig
from model import GPT, GPTConfig
from support import download, web
from support.tokenizer import encode, get_tokenizer, replace_surrogates

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
    """No network, no waiting for the disk, no measuring, no other processes."""

    def no_network(*_) -> None:
        raise TimeoutError("there is no network in tests")

    torch.set_num_threads(1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(download, "connect", no_network)
    monkeypatch.setattr(web, "connect", no_network)
    monkeypatch.setattr(web, "WAITS", ())
    monkeypatch.setattr(fineweb, "start_pool", lambda *_: HerePool())
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(train_gpt2, "peak_flops", lambda *_: (1e11, "not measured"))


# -- command lines


def stop_before_work(*_) -> None:
    """Stands in for what follows when everything has been checked."""
    print("reached")
    raise SystemExit(0)


SCRIPTS = {  # the flags' dataclass, a command line that works, what it prints, cases a flag
    "train_gpt2.py": (
        TrainConfig,
        [*TINY, *shlex.split("--data-dir data --log-dir log")],
        "reached",
        4,
    ),
    "fineweb.py": (
        fineweb.Config,
        shlex.split("--source text.jsonl --data-dir out --workers 1 --shard-size 20"),
        "tokens",
        8,
    ),
    "hellaswag.py": (
        hellaswag.HellaSwagConfig,
        shlex.split("--model model --path examples.jsonl --device cpu --dtype float32"),
        "acc_norm",
        10,
    ),
    "sample.py": (
        sample.SampleConfig,
        shlex.split("--model model --max-new-tokens 3 --device cpu --dtype float32"),
        "",
        8,
    ),
    "bench.py": (bench.BenchConfig, shlex.split("--model tiny --device cpu"), "reached", 4),
    "plan.py": (plan.PlanConfig, ["--n-layer=2"], "checkpoint", 10),
    "compare.py": (
        compare.CompareConfig,
        ["--data-dir=data", "--base", shlex.join([*TINY, "--val-every=2"]), "--arm=a: --seed 2"],
        "reached",
        3,
    ),
}
SLOW = {"compare.py"}  # it asks each arm's own copy, a process, what its flags mean
ODD = ["", " ", "-1", "0", "1", "1.5", "nan", "inf", "-inf", "1e38", "1e400", "1e20", "0x10"]
ODD += [str(10**20), str(-(10**20)), "1" + "0" * 400, "9223372036854775807", "9223372036854775808"]
ODD += ["true", "None", "auto", "ä", "\udcff", "a b", "y" * 300, "--seed", "'", "@x", "hub:", "~"]
ODD += ["../..", "/dev/null", "/proc/x", "*", "-", ":"]


def command_lines(script: str) -> list[list[str]]:
    """For each flag some odd values, in every way to give or to forget one; and odd flags."""
    config_class, _, _, cases = SCRIPTS[script]
    draw = random.Random(script)
    lines = [["--no-such-flag"], ["--no-such-flag", "1"], ["stray"], ["--help"], ["--"], ["-x"]]
    names = [field.name for field in dataclasses.fields(config_class)]
    if config_class is plan.PlanConfig:  # training's own flags are tried with training
        names = names[len(dataclasses.fields(TrainConfig)) :]
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        odd = draw.sample(ODD, cases)
        lines += [[flag], [f"{flag}={odd[0]}", f"{flag}={odd[1]}"], [f"--{name}", odd[2]]]
        lines += [draw.choice([[flag, value], [f"{flag}={value}"]]) for value in odd[3:]]
        lines.append([flag[:-1] + "x", odd[0]])
    return lines


def words_of(line: list[str]) -> list[str]:
    """What a sentence about this command line may name: its flags, or their values."""
    words = ["Unrecognized options", "HellaSwag cannot be had", "--init-from"]
    for part in line:
        flag, _, value = part.partition("=")
        name = flag.removeprefix("--")
        words += [name, name.replace("-", "_"), name.replace("_", "-"), value or name]
    return [word.encode(errors="backslashreplace").decode()[:60] for word in words if word]


@pytest.fixture
def no_work(quick, monkeypatch) -> None:
    """What takes long is left out: training itself, compiling, measuring."""
    monkeypatch.setattr(train_gpt2.Run, "measure_peak", stop_before_work)
    monkeypatch.setattr(train_gpt2, "why_not_compile", lambda device: "as asked")
    monkeypatch.setattr(sample, "why_not_compile", lambda device: "not in this test")
    monkeypatch.setattr(bench, "run_benchmarks", stop_before_work)
    monkeypatch.setattr(compare, "compare", stop_before_work)


@pytest.mark.parametrize(
    "script",
    [pytest.param(s, marks=pytest.mark.torture) if s in SLOW else s for s in SCRIPTS],
)
def test_every_flag_with_odd_values_is_taken_or_told_in_a_sentence(script, place, no_work, outcome):
    _, base, right, _ = SCRIPTS[script]
    before = contents(place)
    with all_cases() as case:
        for line in command_lines(script):
            with case(line):
                done = call(script, *base, *line, stdin=b"one\ntwo\n")
                outcome("command lines", f"{script} {line}", judge(done, *words_of(line)))
                if done.returncode == 0 and line != ["--help"]:
                    assert right in done.stdout
            clear(place, before)
            assert contents(place) == before, line


@contextmanager
def all_cases():
    """Gives a context for each case. Whatever fails in one is told at the end, with the others."""
    broken = []

    @contextmanager
    def case(what):
        try:
            yield
        except Exception as error:
            broken.append(f"{ascii(what)[:200]}: {ascii(error)[:900]}")

    yield case
    assert not broken, "\n".join(broken)


def clear(place: Path, before: dict[str, str]) -> None:
    """Removes what was not there before."""
    kept = {Path(name).parts[0] for name in before}
    for path in place.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


# -- text

BLOCKS = [range(128), range(0x80, 0x250), range(0x300, 0x370), range(0x590, 0x700)]
BLOCKS += [range(0x900, 0x980), range(0x1100, 0x1200), range(0x2000, 0x2070), range(0x3040, 0x3100)]
BLOCKS += [range(0x4E00, 0x9FFF), range(0xD7F0, 0xE010), range(0xFE00, 0xFE10)]
BLOCKS += [
    range(0xFFF0, 0x10000),
    range(0x1F300, 0x1F650),
    range(0xE0000, 0xE0080),
    range(0x110000),
]
PIECES = [
    "<|endoftext|>",
    "<|",
    "|>",
    "'s",
    "'LL",
    "  ",
    "\n\n",
    "\r\n",
    "\t",
    "\x00",
    "\u200d",
    "\ufeff",
]
PIECES += [
    "e\u0301",
    "👩\u200d👩\u200d👧",
    "🇨🇭",
    "1234567",
    "٣",
    "...",
    "http://a.b/?c=d#e",
    "\u202e",
    "\ud83d",
]


def strings(count: int, seed: int) -> list[str]:
    """Texts of every plane, of bytes that are none, of pieces that the pattern treats apart."""
    draw = random.Random(seed)
    kinds = [
        lambda: "".join(map(chr, draw.choices(draw.choice(BLOCKS), k=draw.randrange(40)))),
        lambda: "".join(chr(draw.choice(draw.choice(BLOCKS))) for _ in range(draw.randrange(40))),
        lambda: "".join(draw.choices(PIECES, k=draw.randrange(12))),
        lambda: draw.randbytes(draw.randrange(60)).decode("utf-8", "surrogateescape"),
        lambda: draw.randbytes(draw.randrange(60)).decode("latin-1"),
        lambda: draw.choice(PIECES) * draw.randrange(200),
        lambda: " ".join("".join(draw.choices("etaoin ", k=9)) for _ in range(draw.randrange(30))),
    ]
    return [kinds[i % len(kinds)]() for i in range(count)]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.torture) for seed in range(1, 40))]
)
def test_five_thousand_strings_come_back_from_tokens_and_from_shards(
    seed, tmp_path, quick, outcome
):
    texts = strings(5000, seed)
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    make(tmp_path / "out", tmp_path / "a.jsonl", shard_size=10**6, deduplicate=False)
    from_shards = texts_in(tokens_in(tmp_path / "out"))
    decode = get_tokenizer().decode
    for text, back in zip(texts, from_shards, strict=True):
        whole = replace_surrogates(text)
        assert back == whole and decode(encode(text)) == whole, ascii(text)
        outcome("text", ascii(text)[:60], RIGHT)


# -- sampling and scoring

PROMPTS = ["", " ", "a", "\n", "<|endoftext|>", "ä\u0301", "🙂🏽", "\udcff", "\x00", "word " * 60]
PROMPTS += [" " * 200, "the man", "0" * 300, "\u202eabc", "-x", "@nowhere", "-"]
DRAWS = {  # what is right, and what is not
    "--temperature": ["0", "1e-300", "1e-30", "0.5", "1", "1e30", "1e308", "-1", "nan", "inf"],
    "--top-k": ["0", "1", "2", "50257", "50258", str(10**20), "-1"],
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
    with all_cases() as case:
        for flags in [draw_flags(draw) for _ in range(60)]:
            with case(flags):
                done = continue_prompt(flags)
                outcome("sampling and scoring", f"sample.py {flags}", judge(done))
                if done.returncode == 0:
                    right += 1
                    assert continue_prompt(flags) == done, "the same seed, the same text"
                    assert_continued(flags, done.stdout)
    assert right > 15 and contents(place) == before


def draw_flags(draw: random.Random) -> list[str]:
    flags = [f"--prompt={draw.choice(PROMPTS)}"]
    for flag in draw.sample(list(DRAWS), draw.randrange(5)):
        flags += [flag, draw.choice(DRAWS[flag])]
    return flags + draw.choice([[], ["--json"], ["--no-stop"]])


def continue_prompt(flags: list[str]) -> Done:
    command = shlex.split("--model model --device cpu --dtype float32 --max-new-tokens 2")
    return call("sample.py", *command, *flags, stdin=b"one\n\xfftwo")


def assert_continued(flags: list[str], printed: str) -> None:
    """Every sample begins with its prompt."""
    prompt = flags[0].removeprefix("--prompt=")
    prompts = ["one", "\ufffdtwo"] if prompt == "-" else [replace_surrogates(prompt)]
    for prompt in prompts:
        if "--json" in flags:
            records = [json.loads(line) for line in printed.splitlines()]
            assert prompt in [record["prompt"] for record in records]
        else:
            assert prompt in printed


def plain_losses(model: GPT, example: dict) -> list[float]:
    """One ending at a time, nothing shared, cut at the left to fit: the reference."""
    context = encode(example["ctx"])
    endings = [encode(" " + ending) for ending in example["endings"]]
    window = model.config.block_size
    losses = []
    room = max(1, window + 1 - max(map(len, endings)))
    for ending in endings:
        tokens = torch.tensor([context[-room:] + ending[:window]])
        logits, _ = model(tokens[:, :-1])
        first = tokens.size(1) - 1 - len(ending[:window])
        of_ending = logits[0, first:].log_softmax(-1)
        losses.append(F.nll_loss(of_ending, tokens[0, first + 1 :], reduction="sum").item())
    return losses


STRANGE = [
    "x",
    " ",
    "\n",
    "<|endoftext|>",
    "ä\u0301",
    "🙂",
    "\ud800",
    "\x00",
    "word " * 50,
    "a" * 99,
]
BAD_LINES = [b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b"[" * 9999, b"{}", b"NaN", b"\x00"]
BAD_FIELDS = [("ctx", v) for v in (None, "", 3, [], {})]
BAD_FIELDS += [("endings", v) for v in (None, "abcd", [], ["a"] * 3, ["a"] * 5, [1, 2, 3, 4], {})]
BAD_FIELDS += [("label", v) for v in (4, -1, None, "x", 1.0, [], "", True, 10**30, "1.0")]


@torch.no_grad()
def test_scoring_gives_the_plain_references_losses_or_a_sentence(place, quick, outcome):
    draw = random.Random(0)
    model = GPT.from_pretrained("model")
    for i in range(30):
        texts = draw.choices(STRANGE, k=5)
        example = dict(ctx=texts[0], endings=texts[1:], label=draw.choice([0, "3"]))
        losses, _, _ = hellaswag.score(model, [example], "cpu")
        assert np.allclose(losses[0], plain_losses(model, example), rtol=1e-4, atol=1e-4), example
        outcome("sampling and scoring", f"score {i}: {ascii(texts)[:60]}", RIGHT)
    lines = BAD_LINES + [json.dumps(EXAMPLE | {k: v}).encode() for k, v in BAD_FIELDS]
    flags = shlex.split("--model model --path bad.jsonl --device cpu --dtype float32")
    with all_cases() as case:
        for line in lines:
            (place / "bad.jsonl").write_bytes(json.dumps(EXAMPLE).encode() + b"\n" + line)
            with case(line):
                done = call("hellaswag.py", *flags)
                assert done.returncode == 1, done
                ended = judge(done, "bad.jsonl, line 2")
                outcome("sampling and scoring", f"hellaswag.py with {line[:60]!r}", ended)


# -- numbers

LARGEST = 2**62 - 1
NUMBERS = {  # what runs to its end, or is told
    "--learning-rate": ["1e-320", "1e-45", "1", "1e38", "1e300"],
    "--eps": ["1e-320", "1e-45", "1", "1e300"],
    "--beta1": ["0", "0.9999999999999999"],
    "--beta2": ["0", "0.9999999999999999"],
    "--weight-decay": ["1e10", "1e300"],
    "--grad-clip": ["0", "1e-320", "1e300"],
    "--min-lr-frac": ["0", "1e-320", "1e300"],
    "--skip-spikes": ["1e-320", "1e300"],
    "--checkpoint-minutes": ["1e-320", "1e300"],
    "--seed": ["0", LARGEST],
    "--keep-checkpoints": [LARGEST],
    "--val-tokens": ["16", LARGEST],
    "--hellaswag-limit": [LARGEST],
    "--sample-tokens": ["1", "100"],
    "--num-samples": ["1", "1001", LARGEST],
    "--pad-vocab-to": ["1", "7", LARGEST],
    "--val-every": [LARGEST],
    "--sample-every": [LARGEST],
    "--checkpoint-every": ["1", LARGEST],
    "--warmup-steps": ["0", "5", LARGEST],
    "--batch-size": ["0", LARGEST],
}
ON_THE_WAY = {  # what a flag needs to matter
    "--val": "--val-every 6 --val-tokens 160",
    "--hellaswag": "--hellaswag-every 6 --hellaswag-path examples.jsonl",
    "--sample": "--sample-every 6 --num-samples 1 --sample-tokens 2",
    "--num": "--sample-every 6 --sample-tokens 2",
}


@pytest.mark.parametrize("flag", NUMBERS)
def test_a_run_with_an_extreme_number_ends_well(flag, place, quick, outcome):
    _, base, _, _ = SCRIPTS["train_gpt2.py"]
    needed = shlex.split(ON_THE_WAY.get("-".join(flag.split("-")[:3]), ""))
    before = contents(place)
    with all_cases() as case:
        for value in NUMBERS[flag]:
            with case(value):
                done = call("train_gpt2.py", *base, "--checkpoint-every", 6, *needed, flag, value)
                ended = judge(done, flag[2:], flag[2:].replace("-", "_"), "not finite", "loss is")
                outcome("numbers", f"{flag} {value}", ended)
                assert_right_run(place / "log", done)
            clear(place, before)
            assert contents(place) == before


def assert_right_run(log_dir: Path, done: Done) -> None:
    """It made all its updates, if it said so; what it saved can be used."""
    assert done.returncode or len(losses(log_dir)) == 6
    for saved in log_dir.glob("ckpt_*"):
        assert all(p.isfinite().all() for p in GPT.from_pretrained(saved).parameters())


def test_a_run_without_an_end_is_told_the_time_it_will_take(warm, place, outcome):
    """Until Ctrl-C, which saves: how many steps there are is no reason to fail."""
    command = [*TINY, "--data-dir", place / "data", "--log-dir", place / "log"]
    pid = warm.start("train_gpt2.py", *command, "--max-steps", LARGEST)
    try:
        while warm.said().count("left") < 3:
            time.sleep(0.05)
            assert "train_gpt2.py:" not in warm.said() and "Traceback" not in warm.said()
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        done = warm.finish()
    outcome("numbers", f"--max-steps {LARGEST}", judge(done))
    assert done.returncode == 0 and "is saved; go on with" in done.stdout
    assert list((place / "log").glob("ckpt_*"))


# -- streams and environment

SURROUNDINGS = [("RANK", value) for value in ("x", "-1", "3", "")]
SURROUNDINGS += [("WORLD_SIZE", value) for value in ("x", "0", "-1", "1e20", "", "2")]
SURROUNDINGS += [("LOCAL_RANK", value) for value in ("x", "")]
SURROUNDINGS += [("LOCAL_WORLD_SIZE", value) for value in ("x", "0", "")]
SURROUNDINGS += [("TORCHELASTIC_RESTART_COUNT", value) for value in ("x", "-1", "")]
SURROUNDINGS += [("COLUMNS", value) for value in ("x", "0", "-1")]


@pytest.mark.parametrize("script", ["train_gpt2.py", "hellaswag.py", "bench.py"])
def test_a_variable_that_makes_no_sense_is_told_or_does_no_harm(script, place, no_work, outcome):
    _, base, right, _ = SCRIPTS[script]
    before = contents(place)
    with all_cases() as case:
        for name, value in SURROUNDINGS:
            with case((name, value)):
                done = call(script, *base, environ={name: value})
                ended = judge(done, name, value or name)
                outcome("streams and environment", f"{script} with {name}={value}", ended)
                assert done.returncode or right in done.stdout, done
            clear(place, before)
            assert contents(place) == before


@pytest.mark.parametrize("script", ["sample.py", "hellaswag.py"])
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (1, 2), (0, 1, 2)])
def test_closed_streams_do_not_harm_a_command(script, closed, warm, place, outcome):
    _, base, right, _ = SCRIPTS[script]
    done = warm.run(script, *base, cwd=place, closed=closed, HF_HUB_OFFLINE="1")
    outcome("streams and environment", f"{script} with {closed} closed", judge(done))
    assert done.returncode == 0 and (1 in closed or right in done.stdout)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"one", b"\xff\n\x00\n", b"a\r\nb\r\n", b" \n"])
def test_prompts_from_any_stdin_are_continued_or_told(content, place, quick, outcome):
    flags = shlex.split("--model model --prompt - --max-new-tokens 2 --device cpu --json")
    done = call("sample.py", *flags, stdin=content)
    outcome("streams and environment", f"sample.py reads {content!r}", judge(done, "--prompt -"))
    lines = [line for line in content.decode(errors="replace").splitlines() if line]
    assert len(done.stdout.splitlines()) == len(lines)


# -- permissions

DENIED = {  # what may not be read or written, and who needs it
    "data": "train_gpt2.py",
    "data/toy_train_000001.npy": "train_gpt2.py",
    "data/toy_val_000000.npy": "train_gpt2.py --val-every 3 --val-tokens 160",
    "run": "train_gpt2.py --resume auto --max-steps 9 --log-dir run",
    "run/metrics.jsonl": "train_gpt2.py --resume auto --max-steps 9 --log-dir run",
    "run/ckpt_000006": "train_gpt2.py --resume auto --max-steps 9 --log-dir run",
    "run/ckpt_000006/training_state.pt": "train_gpt2.py --resume auto --max-steps 9 --log-dir run",
    "run/ckpt_000006/checksums.json": "train_gpt2.py --resume auto --max-steps 9 --log-dir run",
    "run/ckpt_000006/model.safetensors": "train_gpt2.py --init-from run/ckpt_000006",
    "run/ckpt_000006/config.json": "train_gpt2.py --init-from run/ckpt_000006",
    "examples.jsonl": "hellaswag.py",
    "model/config.json": "hellaswag.py",
    "model/model.safetensors": "sample.py",
    "model": "sample.py",
    "prompts": "sample.py --prompt @prompts",
    "text.jsonl": "fineweb.py",
    "made": "fineweb.py --data-dir made",
    "made/manifest.json": "fineweb.py --data-dir made --verify",
    "results": "bench.py --report results/none.json",
}


@pytest.mark.parametrize("name", DENIED)
def test_what_may_not_be_read_is_one_sentence_and_stays(
    name, warm, corpus, finished, place, outcome
):
    script, *flags = DENIED[name].split()
    shutil.copytree(finished, place / "run")
    shutil.copytree(corpus, place / "data", dirs_exist_ok=True)
    for folder in ("made", "results"):
        (place / folder).mkdir()
    (place / "made" / "manifest.json").write_text("{}")
    (place / "prompts").write_text("one\ntwo\n")
    _, base, _, _ = SCRIPTS[script]
    before = contents(place)
    mode = (place / name).stat().st_mode
    (place / name).chmod(0)
    done = warm.run(script, *base, *flags, cwd=place, powerless=True, HF_HUB_OFFLINE="1")
    (place / name).chmod(mode)
    outcome("full disk and permissions", f"{name} for {script}", judge(done, *Path(name).parts))
    assert done.returncode == 1
    after = contents(place)
    assert {path: after.get(path) for path in before} == before

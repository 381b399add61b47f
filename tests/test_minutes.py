"""--minutes: what it chooses, that printed flags and a resume are the same run, what it refuses.

Never how long a run takes: that is measured in docs/minutes.md.
"""

import re
import shlex
import time
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    losses,
    random_model,
    read_records,
    warm_server,
    weights_hash,
    write_shard,
)
from hypothesis import given
from hypothesis import strategies as st
from warm import two_ranks

import hellaswag
import minutes
import train_gpt2
from config import GPT2_SIZES, TrainConfig, parse_command_line, without_effect, wrong_sizes
from evaluate import Evaluations
from minutes import choose_recipe, choose_sizes, with_recipe, with_sizes
from model import DataLoaderLite
from support.base.errors import UserError
from support.base.process import as_typed
from support.machine.distributed import Stop, World
from support.machine.graphs import run_eagerly
from support.text import token_files
from support.text.names import TOKENIZER_FILE
from support.text.token_files import open_data
from support.text.tokenizer import train_vocabulary

CHOSEN = ("n_layer", "n_head", "n_embd", "sequence_length", "total_batch_size")
CHOSEN += ("batch_size", "max_steps", "warmup_steps", "learning_rate", "weight_decay")
TYPED = ("", "--n-layer 7", "--n-head 5", "--n-embd 100", "--sequence-length 100")
TYPED += ("--preset quickstart", "--optimizer adamw", "--batch-size 6")
TYPED += ("--sequence-length 48 --batch-size 7",)


@given(
    exponent=st.floats(9, 22),
    vocab_size=st.sampled_from((257, 1024, 50257)),
    processes=st.sampled_from((1, 3, 8)),
    typed=st.sampled_from(TYPED),
)
def test_any_time_and_typed_size_give_sizes_that_fit_each_other(
    exponent, vocab_size, processes, typed
):
    config = parse_command_line([*typed.split(), "--minutes", "1"])
    sized = with_sizes(config, 10**exponent, vocab_size, processes)
    more = with_sizes(config, 10 ** (exponent + 1), vocab_size, processes)
    assert not wrong_sizes(sized, processes)
    assert sized.batch_size == 0 or "--batch-size" in typed, "a preset's fits other sizes"
    assert sized.n_embd // sized.n_head >= min(64, sized.n_embd) or "--n-head" in typed
    assert more.n_layer * more.n_embd**2 >= sized.n_layer * sized.n_embd**2
    run = with_recipe(sized, 1000, epochs=3)
    for name, value in zip(*[iter(typed.split())] * 2, strict=True):
        assert str(getattr(run, name[2:].replace("-", "_"))) == value
    assert without_effect(parse_command_line(run.as_flags())) == [], "they can be typed"
    changed = {name for name, value in asdict(run).items() if getattr(sized, name) != value}
    assert changed <= {"max_steps", "warmup_steps", "learning_rate", "weight_decay"}, (
        "an update is timed as it will be made"
    )


@given(operations=st.floats(1e9, 1e22), most_tokens=st.floats(100, 1e12))
def test_the_text_limits_the_sizes_whatever_the_numbers(operations, most_tokens):
    sizes = choose_sizes(operations, 1024, {}, most_tokens)
    assert sizes["val_tokens"] <= max(2**16, 0.0151 * most_tokens)


def test_where_launching_limits_the_updates_each_has_more_tokens():
    plain = choose_sizes(1e16, 4096, {})
    assert choose_sizes(1e16, 4096, {}, most_updates=1e9) == plain
    few = choose_sizes(1e16, 4096, {}, most_updates=1000)
    assert few.pop("total_batch_size") > 4 * plain.pop("total_batch_size")
    assert few == plain


def test_the_time_of_the_reproduction_gives_the_124m():
    chosen = choose_sizes(8.5e18, 50257, {})
    assert chosen.items() >= GPT2_SIZES["gpt2"].items()
    assert (chosen["sequence_length"], chosen["total_batch_size"]) == (1024, 524288)


def test_weights_fade_the_faster_the_more_often_a_text_is_read_but_not_within_an_epoch():
    def fading(epochs, per_token=4.0, **typed):
        recipe = choose_recipe(2400, epochs, 256, per_token, typed)
        return recipe["learning_rate"] * recipe["weight_decay"]

    by_epochs = [fading(epochs) for epochs in (0, 1, 4, 12)]
    assert by_epochs[0] == by_epochs[1] < by_epochs[2] < by_epochs[3]
    assert by_epochs[0] == pytest.approx(0.1 * 4.9e-3, rel=0.01), "a decay of 0.1 at least"
    assert fading(20, per_token=1.0) == pytest.approx(0.6 * 20 / 2400, rel=0.01), "in each epoch"
    assert fading(20, per_token=0.1) == pytest.approx(0.13 * 20 / 2400, rel=0.01), "memorizes less"
    assert fading(60) == pytest.approx(0.01, rel=0.01), "and at most"
    german = parse_command_line([]).with_chosen(choose_sizes(1.1e14, 2048, {}))
    assert with_recipe(german, 9490, epochs=20).weight_decay == 0.54, "as docs/minutes.md says"
    assert fading(12, learning_rate=1e-3) == pytest.approx(by_epochs[3], rel=0.01), "as typed"
    assert 4 * fading(12, optimizer="adamw") == pytest.approx(by_epochs[3], rel=0.03)


def test_printed_flags_can_be_typed_if_a_prompt_begins_with_a_dash():
    config = parse_command_line(["--sample-prompt=--Anna", "--max-steps=9"])
    assert parse_command_line(config.as_flags()).sample_prompt == "--Anna"


def test_what_a_short_text_limits_is_chosen_for_it(text):
    long = with_sizes(parse_command_line(["--minutes", "60"]), 1e18, 512, 1)
    capped = with_sizes(parse_command_line(["--minutes", "60"]), 1e18, 512, 1, most_tokens=1e7)
    assert long.total_batch_size > 2048 == capped.total_batch_size
    sizes = choose_sizes(1e18, 512, {}, most_tokens=1e7)
    tokens = 6 * (12 * sizes["n_layer"] * sizes["n_embd"] ** 2 + 512 * sizes["n_embd"])
    tokens += 12 * sizes["n_layer"] * sizes["n_embd"] * sizes["sequence_length"]
    assert sizes == choose_sizes(1e7 * tokens, 512, {}), "for what will be trained"
    assert sizes["n_embd"] < long.n_embd
    config = parse_command_line(["--minutes", "60", "--data-dir", str(text)])
    data = open_data(text, "train", "val")
    fitted = minutes.fit_sizes(config, World(torch.device("cpu")), data)
    assert fitted.sequence_length == 64, "of 100"


@pytest.fixture
def text(tmp_path):
    """So short that --minutes trains on it for a second: it ends after some epochs."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / TOKENIZER_FILE).write_text(train_vocabulary(["a"], 257).json)
    rng = np.random.default_rng(0)
    write_shard(tmp_path / "text" / "toy_val_000000.npy", rng.integers(0, 99, 100))
    write_shard(tmp_path / "text" / "toy_train_000001.npy", rng.integers(0, 99, 200))
    return tmp_path / "text"


SMALL = shlex.split("""--minutes 9 --n-layer 1 --n-embd 16 --sequence-length 16 --no-compile
    --total-batch-size 32 --device cpu --sample-tokens 2""")


def start(text, log_dir, *flags, expect=0, **options):
    args = ["--data-dir", text, "--log-dir", log_dir, *SMALL, *flags]
    done = warm_server().run("train_gpt2.py", *args, **options)
    assert done.returncode == expect, f"{done.stdout}\n{done.stderr}"
    return done


def test_the_printed_flags_and_a_resume_after_a_kill_are_the_same_run(text, tmp_path):
    first = start(text, tmp_path / "a", "--checkpoint-every", 50)
    [command] = re.findall("the same run again: (.*)", first.stdout)
    variable, _, script, *flags = shlex.split(command)
    assert (variable, script) == ("OMP_NUM_THREADS=1", str(ROOT / "train_gpt2.py"))
    again = warm_server().run("train_gpt2.py", *flags, "--log-dir", tmp_path / "b")
    assert "minutes:" not in again.stdout
    configs = [read_records(tmp_path / name, "run")[0]["config"] for name in "ab"]
    assert {name: configs[0][name] for name in CHOSEN} == {n: configs[1][n] for n in CHOSEN}
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    steps = configs[0]["max_steps"]
    assert steps == 20 * 11 * 16 // 32, "the text's 11 sequences are read twenty times"
    assert configs[0]["val_every"] <= steps / 2, "however many updates would have fitted"

    log_dir = tmp_path / "a"
    checkpoints = sorted(log_dir.glob("ckpt_*"))
    made = weights_hash(checkpoints[-1])
    for kept in (1, 0):  # killed after its first checkpoint, before it
        for path in sorted(log_dir.glob("ckpt_*"))[kept:]:
            path.rename(tmp_path / f"{path.name} {kept}")
        log = log_dir / "metrics.jsonl"
        log.write_text("".join(x for x in log.open() if '"type": "end"' not in x))
        resumed = start(text, log_dir, "--checkpoint-every", 50, "--resume", "auto")
        assert "minutes:" not in resumed.stdout, "chooses nothing again"
        assert losses(log_dir) == losses(tmp_path / "b")
        assert weights_hash(checkpoints[-1]) == made
    other = start(text, log_dir, "--resume", "auto", "--minutes", 8, expect=2)
    assert f"--minutes 8: the run in {log_dir} was started with --minutes 9" in other.stderr
    other = start(text, log_dir, "--resume", "auto", "--minutes", 0, "--n-head", 1, expect=1)
    assert "another optimizer" in other.stderr and "began with --minutes 9" in other.stderr

    sorted(log_dir.glob("ckpt_*"))[-1].rename(tmp_path / "last")
    for turn in range(2):
        start(text, log_dir, "--resume", "auto", **two_ranks())
        assert read_records(log_dir, "resume")[-1]["batch_size"] == 1, "2 sequences, for two"
        sorted(log_dir.glob("ckpt_*"))[-1].rename(tmp_path / f"last {turn}")
    (log_dir / "metrics.jsonl").unlink()
    lost = start(text, log_dir, "--resume", "auto", expect=2)
    assert f"{log_dir} has no metrics.jsonl, which says what was chosen" in lost.stderr


@pytest.mark.parametrize("sharding", ["ddp", "zero1"])
def test_rank_0_chooses_for_all_and_typed_flags_stay(text, tmp_path, sharding):
    flags = ("--learning-rate", "0.003", "--val-every", 60, "--sharding", sharding)
    done = start(text, tmp_path / "log", *flags, **two_ranks())
    [run] = read_records(tmp_path / "log", "run")
    assert (run["config"]["learning_rate"], run["config"]["val_every"]) == (0.003, 60)
    assert len(losses(tmp_path / "log")) == run["config"]["max_steps"]
    assert f"again: {as_typed('torchrun')} --standalone --nproc_per_node=2 /" in done.stdout


@pytest.mark.parametrize("typed, update", [
    ("", 0.1), ("", 2.0), ("--val-every 20", 0.5), ("--hellaswag-every 90 --sample-every 5", 0.5),
])  # fmt: skip
def test_updates_and_evaluations_fill_the_time_that_is_left(typed, update):
    config = parse_command_line(["--minutes", "3", *typed.split()])
    schedule = dict(val=(0.7, config.val_every), samples=(0.3, config.sample_every), mine=(20, 90))
    if "hella" in typed:
        schedule["hella"] = (20, config.hellaswag_every)
    steps, times = minutes.divide_time(config, 120, update, schedule)
    spent, free = steps * update, 0.0
    for name, (once, every) in schedule.items():
        is_free = name in ("val", "samples") and minutes.TIMED_FLAGS[name] not in config.typed
        spent += once * (1 + times if is_free else 1 + steps / every)
        free += once if is_free else 0
    assert 120 - 2 * update - 1 < spent <= 120 + 1
    assert times == 2 or (times <= 10 and times * free <= minutes.EVALUATING * 120)


def test_a_time_in_which_no_update_fits_is_a_sentence(text, tmp_path):
    done = start(text, tmp_path / "log", "--minutes", 1e-6, expect=1)
    assert "--minutes 1e-06: no ten updates fit the time, after" in done.stderr
    assert [path.name for path in (tmp_path / "log").iterdir()] == [".lock"], "no run has begun"
    long = ("--sequence-length", 256, "--total-batch-size", 512)
    done = start(text, tmp_path / "log", *long, expect=1)
    assert "256" in done.stderr and "Traceback" not in done.stderr
    done = start(text, tmp_path / "log", "--warmup-steps", 999, expect=2)
    assert "--warmup-steps 999: only 110 updates fit the time" in done.stderr
    done = start(text, tmp_path / "log", "--n-head", 0, expect=2)
    assert "--n-head 0: it must be at least 1" in done.stderr
    done = start(tmp_path / "none", tmp_path / "log", expect=2)
    assert f"does not exist: make it with {as_typed('python')} " in done.stderr
    assert len(done.stderr.splitlines()) == 1, "nothing about sizes, which are not chosen yet"


@pytest.mark.parametrize("flags", [["--minutes=9"], ["--max-steps=2", "--n-head=1"]])
def test_the_data_are_found_once_a_start(text, tmp_path, monkeypatch, flags):
    asked = []

    def counted(find):
        return lambda *of: asked.append(of[-1]) or find(*of)

    for name in ("find_shards", "tokenizer_of_data"):
        find = counted(getattr(token_files, name))
        monkeypatch.setattr(token_files, name, find)
    every = [f for f in SMALL if f not in ("--minutes", "9")]
    where = [f"--data-dir={text}", f"--log-dir={tmp_path}/log", "--val-tokens=64"]
    train_gpt2.main([*every, *flags, *where, "--hellaswag-every=0"])
    assert [*map(str, asked)] == ["train", "val", str(text)]


def test_a_gpu_that_is_full_in_the_rehearsal_is_a_sentence(text, tmp_path, monkeypatch):
    def fill(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(train_gpt2, "make_update", fill)
    flags = ["--batch-size=2", f"--data-dir={text}", f"--log-dir={tmp_path}/log"]
    with pytest.raises(UserError, match="micro-batch of 2: add --batch-size 1"):
        train_gpt2.main([*SMALL, *flags])


def test_a_rehearsal_measures_a_part_of_long_evaluations(text, monkeypatch):
    """`--val-tokens 3000000` took 6:40, twice, of half a minute."""
    model = random_model(vocab_size=257)
    data = open_data(text, "val")
    model.tokenizer = data.tokenizer
    loader = DataLoaderLite(data, "val", B=2, T=4)  # of 24 sequences
    examples = hellaswag.Prepared([(None, None)] * 90, None, None, 0)
    config = TrainConfig(sample_tokens=640, sequence_length=4)
    world = World(torch.device("cpu"))
    whole = Evaluations(config, model, world, Stop(world), torch.float32, loader, examples)
    short, times = whole.shortened()
    read = []
    batch = loader.batch
    monkeypatch.setattr(loader, "batch", lambda *at: read.append(at) or batch(*at))
    short.schedule["val"][1](0)
    assert read == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert times == {"samples": 10, "val": 24 / 8, "hella": 90 / 4}
    assert len(short.examples.batches) == 4 and short.config.sample_tokens == 64
    assert whole.config.sample_tokens == 640


def test_a_rehearsal_times_what_is_compiled_already_and_ends_in_time():
    # when two evaluations, then three updates begin and end, and two looks at the clock
    seconds = iter([0, 9, 9, 10, 10, 30, 30, 31, 31, 31, 32, 36])
    short = SimpleNamespace(schedule={"val": (7, lambda step: None)})
    run = SimpleNamespace(evaluations=SimpleNamespace(shortened=lambda: (short, {"val": 3})))
    run.world = World(torch.device("cpu"))
    run.model, run.config = torch.nn.Linear(1, 1), SimpleNamespace(sharding="ddp")
    run.stop, run.run_part = SimpleNamespace(read_vote=lambda: None), run_eagerly
    rates = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(seconds))
        paces = minutes.rehearse(run, lambda run, lr: rates.append(lr), until=35)
    assert paces == (1, {"val": (3, 7)}), "the first ones, of 9 and 20 s, compiled"
    assert rates == [0, 0, 0]

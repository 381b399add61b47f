"""compare.py: paired runs, what they say, and that nothing is trained twice or lost."""

import doctest
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, command, documents, environment, wait_for, write_shard

import compare
import train_gpt2
from config import parse_command_line
from support import paired, runs
from support.common import UserError
from support.distributed import World

# AdamW at a rate where rounding does not grow
FLAGS = " ".join([*TINY, "--max-steps 40 --val-every 20 --val-tokens 320 --learning-rate 1e-3"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("shards")
    write_shard(directory / "toy_val_000000.npy", documents(700, seed=0))
    write_shard(directory / "toy_train_000001.npy", documents(3000, seed=1))
    return directory


class Here:
    """A run in this process, for tests that are not about processes; MFU and loss.png left out."""

    def __init__(self, run):
        config = parse_command_line(run.command[2:])
        printed = io.StringIO()
        with redirect_stdout(printed), World("cpu") as world:
            train_gpt2.train(config, world)
        (run.directory / runs.OUTPUT).write_text(printed.getvalue())

    def poll(self):
        return 0


@pytest.fixture(scope="module")
def here():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    torch.set_num_threads(1)  # as in the process that is killed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "start", Here)
        patch.setattr(train_gpt2, "peak_flops", lambda *_: (1e12, "a test"))
        patch.setattr(train_gpt2.plots, "plot_run", lambda _: None)
        yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def asked_here(monkeypatch):
    """What an arm's flags mean is asked in this process: a new one takes half a second."""

    def ask(command, **_):
        answer, complaint = io.StringIO(), io.StringIO()
        code = 0
        with monkeypatch.context() as patch, redirect_stdout(answer), redirect_stderr(complaint):
            patch.setattr(sys, "path", [*sys.path])
            patch.setattr(sys, "argv", command[2:])
            try:
                exec(command[2], {})
            except SystemExit as end:
                code = end.code
        return SimpleNamespace(
            returncode=code, stdout=answer.getvalue(), stderr=complaint.getvalue()
        )

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=ask))


def read(corpus, out, base=FLAGS, arms=("again:",), **more) -> compare.Comparison:
    flags = dict(base=base, arm=arms, data_dir=str(corpus), out=str(out), seeds=2) | more
    return compare.read_comparison(compare.CompareConfig(**flags))


# -- the statistics


@pytest.mark.parametrize(
    "degrees, t",
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (120, 1.9799)],
)
def test_the_quantiles_are_those_of_the_printed_tables(degrees, t):
    assert paired.t_quantile(degrees) == pytest.approx(t, abs=6e-5)


def test_the_interval_is_that_of_students_own_example():
    # hours of sleep that one drug adds over another (Student 1908); the interval is R's t.test
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    mean, half = paired.interval(hours)
    assert mean - half == pytest.approx(0.7001142, abs=1e-6)
    assert mean + half == pytest.approx(2.4598858, abs=1e-6)


def curve(*losses: float, seconds: float = 1.0) -> dict:
    steps = range(len(losses))
    tokens = [100 * step for step in steps]
    return dict(
        seed=0,
        val_loss=losses[-1],
        losses=list(losses),
        tokens=tokens,
        seconds=[seconds * step for step in steps],
    )


def test_tokens_and_time_to_the_bases_loss_are_parts_of_what_the_base_needs():
    base = [curve(9, 5, 4), curve(9, 6, 5)]
    arm = [curve(9, 4, 3, seconds=3.0), curve(9, 7, 6)]
    against = paired.compare_pairs("it", arm, base)
    assert against["tokens"] == [0.5, None]  # the second never gets there
    assert against["seconds"] == [1.5, None]
    assert against["differences"] == [-1, 1] and "no difference" in against["verdict"]
    assert paired.describe_pairs(against)[1] == "0.50 (0.50–0.50) in 1 of 2"
    bumpy = curve(9, 5, 8, 4)
    assert paired.reach(bumpy, 5, "tokens") == 100, "the first time counts"
    assert paired.reach(bumpy, 4.5, "tokens") == 250


@pytest.mark.parametrize(
    "mean, half, words",
    [
        (-0.2134, 0.0312, "it is lower by 0.21 ± 0.03"),
        (0.2134, 0.0142, "it is higher by 0.213 ± 0.014"),
        (0.011, 0.0201, "it: no difference can be seen: it would have to exceed 0.02"),
        (0.0, 0.0, "it is the same: every difference is exactly 0"),
        (2e-7, 1e-6, "it: no difference can be seen: it would have to exceed 0.0000010"),
    ],
)
def test_the_verdict_is_a_sentence_with_as_many_digits_as_are_known(mean, half, words):
    assert paired.judge("it", mean, half) == words


def test_a_run_that_diverged_is_said_and_never_averaged():
    lost = dict(seed=1, val_loss=None)
    against = paired.compare_pairs("high", [curve(9, 5), lost], [curve(9, 5), curve(9, 5)])
    assert against == dict(verdict="high cannot be judged: 1 of 4 runs diverged")
    arms = [
        dict(name="base", value=None, runs=[curve(9, 5)] * 2, against={}),
        dict(name="high", value=None, runs=[curve(9, 5), lost], against=against),
    ]
    assert "| high | diverged |" in paired.write_table(arms, sweep="")


# -- the sweep


def test_a_sweep_is_widened_by_its_own_ratio_until_the_best_is_inside(
    corpus, tmp_path, monkeypatch, asked_here
):
    asked = []

    def train(x, arm, value, seed):
        asked.append(value)
        if value > 0.05:
            return dict(val_loss=None)  # diverged
        if arm.name == "again" and value < 3e-4:
            raise UserError("a value that cannot be")
        return dict(val_loss=abs(math.log(value / best[arm.name])))

    monkeypatch.setattr(compare, "train", train)
    x = read(corpus, tmp_path, seeds=3, sweep="learning-rate=2e-3,1e-3")
    best = dict(base=0.017, again=4e-4)
    for arm in x.arms:
        compare.tune(x, arm)
    assert [arm.value for arm in x.arms] == [0.016, 0.0005]
    assert asked[:6] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032]
    assert asked[6:] == [0.001, 0.002, 0.0005, 0.00025]
    assert x.arms[1].tried[0.00025] == math.inf and x.planned == 2 * (2 + 2) + 4 + 2 - 1
    best["base"] = 1e-30
    compare.tune(x, x.arms[0])
    assert len(x.arms[0].tried) < 20, "a best value that does not exist is not sought for ever"
    monkeypatch.setattr(compare, "train", lambda *_: dict(val_loss=None))
    x = read(corpus, tmp_path, seeds=3, sweep="learning_rate=1,2")
    with pytest.raises(UserError, match=r"base: no learning_rate of \[1\.0, 2\.0\] gave a loss"):
        compare.tune(x, x.arms[0])


def test_the_page_doubts_a_best_value_at_an_end_or_with_another_as_near_as_chance():
    arm = dict(name="it", value=2.0, runs=[curve(9, 5.0), curve(9, 5.1), curve(9, 5.2)])
    tried = [[1.0, 5.19], [2.0, 5.0], [4.0, 5.21], [8.0, None]]
    lines = paired.describe_sweep(
        dict(sweep="learning_rate", tuned=[7], arms=[dict(arm, tried=tried)])
    )
    row = "- it: 1: 5.1900, **2: 5.0000**, 4: 5.2100, 8: diverged; "
    assert lines[-1] == row + "1 may be as good: nearer than twice what a seed varies"
    assert "is at an end" in paired.warn(dict(arm, tried=tried[1:]))
    assert paired.warn(dict(arm, tried=[[1.0, 6.0], *tried[1:]])) == ""


def test_the_example_of_widening_is_true():
    assert doctest.testmod(compare) == (0, 1)


def test_it_finds_the_best_of_adamws_rates(here, asked_here, corpus, tmp_path):
    x = read(corpus, tmp_path / "out", seeds=3, sweep="learning_rate=1e-5,1e-3")
    base = x.arms[0]
    compare.tune(x, base)
    rates = sorted(base.tried)
    assert rates[:3] == [1e-5, 1e-3, 0.1] and rates[0] < base.value < rates[-1]
    assert base.tried[base.value] == min(base.tried.values())
    assert base.tried[1e-5] > base.tried[1e-3] + 0.01, "it has learned nothing yet"


# -- whole comparisons, killed and gone on with

ARMS = ("again:", "micro: --batch-size 4", "slow: --learning-rate 1e-6")


@pytest.fixture(scope="module")
def made(here, corpus, tmp_path_factory) -> tuple[Path, dict]:
    """The directory and result of a comparison that was killed in its first run, by kill -9."""
    out = tmp_path_factory.mktemp("compared") / "out"
    base = f"{FLAGS} --checkpoint-every 20"
    flags = ["--base", base, "--data-dir", corpus, "--out", out, "--seeds", 3]
    for arm in ARMS:
        flags += ["--arm", arm]
    process = subprocess.Popen(
        command("compare.py", *flags),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its run is killed, too
    )
    try:
        x = read(corpus, out, base, ARMS, seeds=3)
        first = compare.place_run(x, x.arms[0], None, x.judged[0]).directory
        wait_for(first / "ckpt_000020", process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not (first.parent.parent / "compare.json").exists()
    return out, compare.compare(x)


def against(result: dict, name: str) -> dict:
    [found] = [arm["against"] for arm in result["arms"] if arm["name"] == name]
    return found


def test_an_arm_against_itself_gives_exactly_0_even_if_one_run_was_killed(made):
    out, result = made
    again = against(result, "again")
    assert again["differences"] == [0, 0, 0] and again["half"] == 0
    assert again["tokens"] == [1, 1, 1]
    outputs = [path.read_text() for path in sorted(out.glob("base/*/output.txt"))]
    assert "resuming from" in outputs[0] and "resuming from" not in outputs[1]
    left = sorted(path.name for path in out.glob("*/*/ckpt_*"))
    assert left == ["ckpt_000040"] * 12, "what was only to go on from is removed"


def test_another_micro_batch_is_no_difference_and_a_rate_of_a_millionth_is_worse(made):
    micro = against(made[1], "micro")
    assert abs(micro["mean"]) <= max(micro["half"], 1e-5)  # one CPU in twenty is an unlucky one
    assert any(micro["differences"]), "it is rounded in another order"
    slow = against(made[1], "slow")
    assert slow["verdict"].startswith("slow is higher by") and slow["tokens"] == [None] * 3


def test_a_finished_comparison_trains_nothing_and_writes_the_same_report(
    made, corpus, monkeypatch, capsys, asked_here
):
    out, result = made
    monkeypatch.setattr(runs, "start", None)
    flags = ["--base", f"{FLAGS} --checkpoint-every 20", "--data-dir", str(corpus)]
    for arm in ARMS:
        flags += ["--arm", arm]
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags, "--out", str(out), "--seeds", "3"])
    compare.main()
    written = json.loads((out / "compare.json").read_text())
    assert written["arms"] == result["arms"]
    report = (out / "compare.md").read_text()
    assert report in capsys.readouterr().out
    assert "- again is the same: every difference is exactly 0." in report
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")


# -- which run it is


def test_another_configuration_data_or_code_is_another_run_and_comments_are_not(corpus, tmp_path):
    def directory(x, arm=0, value=None, seed=1337) -> str:
        return compare.place_run(x, x.arms[arm], value, seed).directory.name

    x = read(corpus, tmp_path / "out")
    same = read(corpus, tmp_path / "out", base=f"{FLAGS} --max-steps=40")
    other = read(corpus, tmp_path / "out", base=f"{FLAGS} --warmup-steps 3")
    assert directory(x) == directory(same) == directory(x, arm=1) != directory(other)
    x.data["toy_train_000001.npy"] = [3000, "another hash"]
    assert directory(x) != directory(same)
    before = directory(x)
    x.arms[0].code = "other code"
    assert directory(x) != before

    copy = tmp_path / "copy"
    (copy / "support").mkdir(parents=True)
    for path in ("config.py", "model.py", "train_gpt2.py", "support/common.py"):
        (copy / path).write_bytes((ROOT / path).read_bytes())
    before = compare.hash_code(copy)
    with open(copy / "model.py", "a") as file:
        file.write("# a comment\n")
    assert compare.hash_code(copy) == before
    config = (copy / "config.py").read_text()
    new = "    n_layer: int = 12\n    activation: str = 'gelu'  # new\n"
    (copy / "config.py").write_text(config.replace("    n_layer: int = 12", new, 1))
    arm = compare.read_arm(
        "mine", f"@{copy} --activation relu", FLAGS.split(), [f"--data-dir={corpus}"]
    )
    assert arm.config["activation"] == "relu" and arm.code != before
    x.arms.append(arm)
    assert compare.place_run(x, arm, None, 1).command[1] == str(copy / "train_gpt2.py")
    (copy / "model.py").write_text("changed = True\n")
    with pytest.raises(UserError, match="has changed since the start"):
        compare.train(x, arm, None, 1)


def test_a_run_that_a_killed_comparison_has_left_is_waited_for(
    corpus, tmp_path, capsys, asked_here
):
    x = read(corpus, tmp_path / "out")
    run = compare.place_run(x, x.arms[0], None, 1)
    run.directory.mkdir(parents=True)
    hold = "import sys, time, filelock\nwith filelock.FileLock(sys.argv[1]):\n"
    hold += "    print(flush=True)\n    time.sleep(0.5)\n    open(sys.argv[2], 'w').close()"
    ended = tmp_path / "ended"
    arguments = [sys.executable, "-c", hold, str(run.directory / ".lock"), str(ended)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert runs.find_outcome(run) is None and ended.exists()
    assert "another process trains it" in capsys.readouterr().out


def test_a_run_that_diverged_is_finished_and_one_that_failed_says_why(
    corpus, tmp_path, monkeypatch
):
    x = read(corpus, tmp_path / "out")
    run = compare.place_run(x, x.arms[0], None, 1)

    def start(printed: str):
        return lambda run: subprocess.Popen(
            [sys.executable, "-c", f"print({printed!r})"],
            stdout=open(run.directory / runs.OUTPUT, "ab"),
        )

    monkeypatch.setattr(runs, "start", start("train_gpt2.py: no space left"))
    with pytest.raises(UserError, match=r"base seed_1 has not ended: .*no space left \(.*output"):
        compare.train(x, x.arms[0], None, 1)
    monkeypatch.setattr(runs, "start", start("train_gpt2.py: step 3: the loss is nan and the rest"))
    assert compare.train(x, x.arms[0], None, 1)["val_loss"] is None
    monkeypatch.setattr(runs, "start", None)
    assert runs.find_outcome(run)["val_loss"] is None


# -- mistakes


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "nothing to compare with the base"),
        (["--arm", "adamw --optimizer adamw"], "'name: flags'"),
        (["--arm", "a:", "--arm", "a:"], "another arm is called a"),
        (["--arm", "a: --optimizer sgd"], "a: train_gpt2.py does not take"),
        (["--arm", "a: @nowhere"], "no copy of this repository"),
        (["--arm", "a: 'open"], "no closing quotation"),
        (["--arm", "a: --val-tokens 160"], "val_tokens is 160, the base's is 320"),
        (["--arm", "a: --val-every 0"], "needs validation losses"),
        (["--arm", "a: --n-head 3"], "does not divide by n_head 3"),
        (["--arm", "a:", "--seeds", "-1"], "--seeds -1: at least 2"),
        (["--arm", "a:", "--seeds", "2", "--sweep", "learning_rate=1"], "1 more to tune"),
        (["--arm", "a:", "--sweep", "learning_rate="], "expected values above 0"),
        (["--arm", "a:", "--sweep", "n_layer=0,1"], "expected values above 0"),
        (["--arm", "a:", "--sweep", "shuffle=1,2"], "no number called 'shuffle'"),
        (["--arm", "a:", "--sweep", "seed=1,2"], "no number called 'seed'"),
    ],
)
def test_a_mistake_is_told_before_anything_is_trained(
    flags, words, corpus, monkeypatch, capsys, asked_here
):
    where = ["--data-dir", str(corpus), "--out", str(corpus / "never")]
    monkeypatch.setattr(sys, "argv", ["compare.py", "--base", FLAGS, *where, *flags])
    with pytest.raises(SystemExit) as end:
        compare.main()
    told = capsys.readouterr().err
    assert end.value.code == 2 and told.startswith("compare.py: ") and words in told
    assert not (corpus / "never").exists()


# -- for long


@pytest.mark.torture
def test_a_comparison_killed_again_and_again_ends_with_the_same_table(corpus, tmp_path):
    base = f"{FLAGS} --checkpoint-every 5 --max-steps 100"
    flags = ["--base", base, "--data-dir", corpus, "--out", tmp_path, "--seeds", 3]
    for arm in ARMS:
        flags += ["--arm", arm]
    choose = random.Random(0)
    kills = 0
    while not (tmp_path / "compare.json").exists():
        process = subprocess.Popen(
            command("compare.py", *flags),
            env=environment(),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            assert process.wait(timeout=choose.uniform(2, 20)) == 0
        except subprocess.TimeoutExpired:
            kills += 1
            if choose.random() < 0.5:
                process.kill()  # its run goes on alone
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(choose.uniform(0, 2))
    result = json.loads((tmp_path / "compare.json").read_text())
    assert kills and against(result, "again")["differences"] == [0, 0, 0]
    assert abs(against(result, "micro")["mean"]) <= max(against(result, "micro")["half"], 1e-5)

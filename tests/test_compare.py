"""compare.py: paired runs, what they show, and that nothing is trained twice or lost."""

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, command, environment, wait_for, warm_server
from contract import call

import compare
from compare import Arm, Trainer
from support.base import programs
from support.base.errors import UsageError, UserError
from support.run import checkpoint, source_code
from support.run.log import read_run
from support.show import comparison
from support.show.report import of_type

# AdamW at a rate where rounding does not grow
FLAGS = " ".join([*TINY, "--max-steps 40 --val-every 20 --val-tokens 320 --learning-rate 1e-3"])


def train_warm(take, _places):
    """Trains in forks of a warm process, for tests that are not about processes."""
    while program := take():
        command, directory = program
        directory.mkdir(parents=True, exist_ok=True)
        done = warm_server().run("train_gpt2.py", *command[2:])
        with open(directory / "output.txt", "a") as output:
            output.write(done.stdout + done.stderr)
        yield directory


def pretend(monkeypatch, outcome) -> None:
    """Nothing is trained: outcome(arm, changes, directory) is what a run ends with."""
    finished = {}

    def train(arm, changes, directory):
        finished[directory] = outcome(arm, changes, directory)
        return [], directory

    def run_programs(take, _places):
        while program := take():
            yield program[1]

    def find_dtype(directory):
        return finished[directory]["dtype"] if directory in finished else ""

    monkeypatch.setattr(compare, "train", train)
    monkeypatch.setattr(compare, "run_programs", run_programs)
    monkeypatch.setattr(compare, "find_dtype", find_dtype)
    monkeypatch.setattr(compare, "read_outcome", lambda directory, _: finished.get(directory))


@pytest.fixture
def asked_here(monkeypatch):
    """What an arm's flags mean is asked in this process: a new one takes half a second."""

    def ask(command, **_):
        answer, complaint, code = io.StringIO(), io.StringIO(), 0
        with monkeypatch.context() as patch, redirect_stdout(answer), redirect_stderr(complaint):
            patch.setattr(sys, "path", [*sys.path])
            patch.setattr(sys, "argv", command[2:])
            try:
                exec(command[2], {})
            except SystemExit as end:
                code = end.code
                print(code, file=sys.stderr)
        answers = dict(stdout=answer.getvalue(), stderr=complaint.getvalue())
        return SimpleNamespace(returncode=code, **answers)

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=ask))


def read_base(corpus, flags="") -> Arm:
    flags = f"{FLAGS} --data-dir {corpus} {flags}"
    return compare.read_arm("base", flags, compare.NO_EVALUATIONS.split())


# -- the statistics


@pytest.mark.parametrize(
    "n, t",
    [(2, 12.7062), (3, 4.3027), (4, 3.1824), (5, 2.7764), (6, 2.5706), (10, 2.2622), (121, 1.9799)],
)
def test_the_interval_has_the_quantiles_of_the_printed_tables(n, t):
    values = [0.0] * (n - 1) + [1.0]  # their deviation is the root of 1 / n
    assert compare.interval(values)[1] * n == pytest.approx(t, rel=3e-4)


def curve(*losses: float, seconds: float = 1.0) -> dict:
    times = [seconds * step for step in range(len(losses))]
    tokens = [100 * step for step in range(len(losses))]
    return dict(val_loss=losses[-1], losses=list(losses), tokens=tokens, seconds=times)


def test_tokens_and_time_to_the_bases_loss_are_parts_of_what_the_base_needs():
    base = [curve(9, 5, 4), curve(9, 6, 5)]
    arm = [curve(9, 4, 3, seconds=3.0), curve(9, 7, 6)]
    against = compare.compare_pairs("it", arm, base)
    assert against["tokens"] == [0.5, None]  # the second never gets there
    assert against["seconds"] == [1.5, None]
    assert against["differences"] == [-1, 1] and "no difference" in against["verdict"]
    row = comparison.describe_arm(dict(name="it", runs=arm, against=against))
    assert row[3:] == ["0.50, never", "1.50, never"]
    assert comparison.describe_arm(dict(name="base", runs=base, against={}))[3:] == ["200", "0.0"]
    runs = [curve(9, 5), dict(val_loss=None)]
    against = compare.compare_pairs("high", runs, base)
    assert against == dict(verdict="high cannot be judged: a run diverged")
    row = comparison.describe_arm(dict(name="high", runs=runs, against=against))
    assert row == ["high", "diverged", "", "", ""]
    against = compare.compare_pairs("low", base, runs)
    row = comparison.describe_arm(dict(name="low", runs=base, against=against))
    assert row[2:] == ["", "", ""], "absolute figures would read as parts of the base's"
    bumpy = curve(9, 5, 8, 4)
    assert compare.reach(bumpy, curve(9, 7, 7, 5), "tokens") == 1 / 3, "the first time counts"
    assert compare.reach(bumpy, curve(9, 7, 7, 4.5), "tokens") == 2.5 / 3


@pytest.mark.parametrize(
    "mean, half, words",
    [
        (-0.2134, 0.0312, "it is lower by 0.21 ± 0.03"),
        (0.2134, 0.0142, "it is higher by 0.213 ± 0.014"),
        (2e-6, 1e-6, "it is higher by 0.0000020 ± 0.0000010"),
        (0.011, 0.0201, "it: no difference can be seen"),
        (0.0, 0.0, "it: no difference can be seen"),
    ],
)
def test_the_verdict_has_as_many_digits_as_are_known(mean, half, words, monkeypatch):
    monkeypatch.setattr(compare, "interval", lambda _: (mean, half))
    runs = [curve(9, 5), curve(9, 5)]
    assert compare.compare_pairs("it", runs, runs)["verdict"] == words


@pytest.mark.parametrize("record", ["compare", "compare-changes", "compare-lion"])
def test_the_page_is_that_of_the_committed_records(record):
    directory = ROOT / "benchmarks" / record
    result = json.loads((directory / "compare.json").read_text())
    assert comparison.format_page(result) == (directory / "compare.md").read_text()
    result["about"]["model"] = dict(n_layer=2, n_embd=8)  # of --init-from, not of the preset
    assert "The base: 2 × 8, " in comparison.format_page(result)


# -- the sweep


def test_a_sweep_is_widened_by_its_own_ratio_until_the_best_is_inside(tmp_path, monkeypatch):
    def outcome(_arm, changes, _directory):
        value = changes["lr"]
        loss = None if value > 0.05 else abs(value / best - 1)  # or diverged
        return dict(val_loss=loss, dtype="float32", seconds=[])

    def tune(*values) -> tuple[float, list]:
        pretend(monkeypatch, outcome)
        arm = Arm("base", tmp_path, [], dict(dtype="float32"))
        compare.tune([arm], "lr", list(values), 1, Trainer(tmp_path, total=len(values)))
        return arm.tuned["lr"], arm.tried

    monkeypatch.setattr(compare, "ask", lambda _, flags: ({}, "0.000125" in flags[-1]))
    best = 0.017
    assert tune(1e-3, 2e-3)[0] == 0.016
    best = 4e-4
    tuned, tried = tune(1e-3, 2e-3)
    assert [value for value, _ in tried] == [0.00025, 0.0005, 0.001, 0.002]
    assert tuned == 0.0005
    assert tune(0.2, 0.4)[0] < 0.05, "all diverged: lower ones are tried"
    best = 1e-30
    assert len(tune(1.1e-3, 2.2e-3)[1]) < 20, "it is not sought for ever"
    assert tune(1e-3, 2e-3)[0] == 0.00025, "the value below is refused"
    assert compare.widen([3, 6], 6) == [] != compare.widen([3.0, 6.0], 6.0), "no larger sizes"


def test_the_page_doubts_a_best_value_at_an_end():
    tried = [[1.0, 5.19], [2.0, 5.0], [4.0, None]]
    arm = dict(tuned={"lr": 2.0}, tried=tried)
    row = "2 is the best of 1: 5.1900, 2: 5.0000, 4: diverged"
    assert comparison.describe_sweep(arm) == row
    for inside in (tried[1:], tried[:2]):
        assert "is at an end" in comparison.describe_sweep(dict(arm, tried=inside))


# -- whole comparisons, killed and continued


@pytest.fixture(scope="module")
def made(corpus, tmp_path_factory) -> tuple[Path, list[str], dict]:
    """A comparison whose first run was killed by kill -9: its directory, flags and arms."""
    out = tmp_path_factory.mktemp("compared") / "out"
    flags = ["--base", f"{FLAGS} --checkpoint-every 20 --data-dir {corpus}", "--out", str(out)]
    flags += ["--seeds", "2", "--arm", "again:", "--arm", "slow: --learning-rate 1e-6"]
    process = subprocess.Popen(
        command("compare.py", *flags),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its run is killed, too
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("run 1 of 6: training "), line
        first = Path(line.split()[5].removesuffix(","))
        wait_for(first / "ckpt_000020", process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not (out / "compare.json").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "run_programs", train_warm)
        compare.main(flags)
    arms = json.loads((out / "compare.json").read_text())["arms"]
    return out, flags, {arm["name"]: arm["against"] for arm in arms}


def test_an_arm_against_itself_gives_exactly_0_even_if_one_run_was_killed(made):
    out, _, against = made
    again = against["again"]
    assert again["differences"] == [0, 0] and again["half"] == 0
    assert again["tokens"] == [1, 1]
    outputs = [path.read_text() for path in sorted(out.glob("base/*/output.txt"))]
    assert "resuming from" in outputs[0] and "resuming from" not in outputs[1]
    left = sorted(path.name for path in out.glob("*/*/ckpt_*"))
    assert left == ["ckpt_000040"] * 6, "older checkpoints are removed"
    result = json.loads((out / "compare.json").read_text())
    assert {run["git"] for arm in result["arms"] for run in arm["runs"]} == {result["about"]["git"]}
    slow = against["slow"]
    assert slow["verdict"].startswith("slow is higher by") and slow["tokens"] == [None] * 2


def test_a_finished_comparison_trains_nothing_and_writes_the_same_report(
    made, monkeypatch, capsys, asked_here
):
    out, flags, _ = made
    before = json.loads((out / "compare.json").read_text())
    monkeypatch.setattr(compare, "train", None)
    compare.main(flags)
    assert json.loads((out / "compare.json").read_text())["arms"] == before["arms"]
    report = (out / "compare.md").read_text()
    assert report in capsys.readouterr().out
    assert "| again |" in report and "| 0.0000 ± 0.0000 |" in report
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="its report also has again; choose another"):
        compare.main([*flags[:-4], *flags[-2:]])
    assert (out / "compare.md").read_text() == report
    assert checkpoint.newest_checkpoint(str(out.parent)) is None, "an arm's is nobody's newest run"


# -- which run it is


def test_another_configuration_data_or_code_is_another_run(corpus, tmp_path, asked_here):
    arms = [read_base(corpus), read_base(corpus, "--max-steps=40")]
    arms.append(read_base(corpus, "--warmup-steps 3"))
    others = [dict(data={"toy_train_000001.npy": [3000, "another"]}), dict(code="another")]
    for other in [*others, dict(machine=["3.11.7", "2.11.0", "another"])]:
        arms.append(Arm("base", ROOT, [], arms[0].settings | other))
    places = [compare.locate(arm, {"seed": 1}, tmp_path) for arm in arms]
    assert places[0] == places[1] and len(set(places)) == 5
    assert compare.locate(arms[0], {"seed": 2}, tmp_path) not in places
    weights = tmp_path / "model.safetensors"
    for content in (b"a", b"b"):
        weights.write_bytes(content)
        arm = read_base(corpus, f"--init-from {tmp_path}")
        places.append(compare.locate(arm, {"seed": 1}, tmp_path))
    assert len(set(places)) == 7


def test_another_copy_has_its_own_flags_and_is_refused_once_it_changes(
    corpus, tmp_path, monkeypatch
):
    copy = tmp_path / "copy"
    for name, code in source_code.read_code(ROOT).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(code)
    with_activation = "    activation: str = 'gelu'  # new\n    n_layer: "
    config = (copy / "config.py").read_text().replace("    n_layer: ", with_activation, 1)
    (copy / "config.py").write_text(config)
    base = read_base(corpus)
    arm = compare.read_arm("mine", f"@{copy} --activation relu", base.flags)
    assert arm.settings["activation"] == "relu" and arm.settings["code"] != base.settings["code"]
    command, _ = compare.train(arm, {"seed": 1}, tmp_path)
    assert command[1] == str(copy / "train_gpt2.py")
    (copy / "model.py").write_text("changed = True\n")
    with pytest.raises(UserError, match="has changed since the start"):
        compare.train(arm, {"seed": 1}, tmp_path)


def test_the_page_has_the_revision_of_a_changed_copy_and_its_changes_beside_it(
    corpus, tmp_path, monkeypatch, asked_here
):
    copy = tmp_path / "copy"
    for name, code in source_code.read_code(ROOT).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(code.replace(b"F.gelu(x", b"F.relu(x"))
    (copy / "support" / "machine" / "new.py").write_text("new = True")
    about = dict(git="1234567", device=dict(name="a CPU"), dtype="float32")
    outcome = curve(9, 5) | dict(directory="run", git="7654321-dirty", dtype="float32")
    pretend(monkeypatch, lambda *_: outcome)
    monkeypatch.setattr(compare, "read_run", lambda _: SimpleNamespace(records=[about]))
    flags = ["--base", f"{FLAGS} --data-dir {corpus}", "--out", str(tmp_path)]
    compare.main([*flags, "--arm", "same:", "--arm", f"relu: @{copy}"])
    page = (tmp_path / "compare.md").read_text()
    assert "| relu ([changes](relu.diff) to the base; revision 7654321-dirty) | 5.0000 " in page
    assert "| same | 5.0000 " in page and not (tmp_path / "same.diff").exists()
    patch = (tmp_path / "relu.diff").read_text().splitlines()
    changed = [line for line in patch if line.startswith(("+", "-"))]
    assert changed[0] == "--- a/model.py"
    assert changed[3][1:] == changed[2][1:].replace("gelu", "relu")
    new = ["--- /dev/null", "+++ b/support/machine/new.py", "+new = True"]
    assert changed[4:] == new and patch[-1] == "\\ No newline at end of file"


def test_the_code_of_a_copy_is_its_files_with_their_names_and_its_diff_can_be_applied(tmp_path):
    def make(name: str, **files: str) -> Path:
        for path, text in {"assets/ranks": "3", "old.py": "gone", **files}.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / name

    base = make("base", **{"a.py": "one\n", "tests/test.py": "x", "log.md": ""})
    moved = make("moved", **{"wing/a.py": "one\n"})
    longer = make("longer", **{"a.py": "one\ntwo", ".venv/b.py": "x", "assets/ranks": "4"})
    assert [*source_code.read_code(base)] == ["a.py", "assets/ranks", "old.py"]
    hashes = {source_code.hash_code(copy) for copy in (base, moved, longer)}
    assert len(hashes) == 3, "the same lines in another folder are other code"
    for copy in (moved, longer):
        patch = source_code.compare_code(source_code.read_code(base), source_code.read_code(copy))
        made = tmp_path / f"{copy.name} again"
        for name, content in source_code.read_code(base).items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).write_bytes(content)
        git = ["git", "-C", str(made), "apply", "--no-index", "-"]
        subprocess.run(git, input=patch.encode(), check=True)
        found = source_code.read_code(made)
        assert found == source_code.read_code(copy)


def test_a_run_that_diverged_is_finished_and_one_that_failed_says_why(tmp_path, monkeypatch):
    records = [
        '{"type": "run", "git": "", "dtype": "float32", "config": {"total_batch_size": 9}}',
        '{"type": "val", "step": 0, "val_loss": 11.0}',
        '{"type": "train", "step": 49}',
    ]

    def run(take, _places):
        if program := take():
            _command, directory = program
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "log.txt").touch()
            (directory / "metrics.jsonl").write_text("\n".join([*records, ""]))
            (directory / "output.txt").write_text(f"{printed}\n\n")
            yield directory

    def train() -> dict:
        [outcome] = Trainer(tmp_path, total=1).run([(arm, {"seed": 1})])
        return outcome

    printed = ""
    arm = Arm("base", ROOT, [], dict(code=source_code.hash_code(ROOT), dtype="float32"))
    monkeypatch.setattr(compare, "run_programs", run)
    told = r"""base/seed=1_.*: {}
\(compare.py sets --log-dir and --resume; to begin this run again, delete its folder\)$"""
    with pytest.raises(UserError, match=told.format("ended early")):
        train()
    records, whole = [], records
    with pytest.raises(UserError, match=told.format("ended early")):
        train()
    records = whole
    printed = "train_gpt2.py: step 50: the reason"
    with pytest.raises(UserError, match=told.format(printed)):
        train()
    records.append('{"type": "diverged", "step": 50, "reason": "50 updates in a row were skipped"}')
    assert train()["val_loss"] is None
    monkeypatch.setattr(compare, "train", None)
    assert train()["val_loss"] is None, "it is not trained again"


def test_the_line_before_a_run_says_how_far_the_comparison_is(tmp_path, monkeypatch, capsys):
    """Finished runs count too. The sweep's best is at its end, so it adds a run."""

    def outcome(arm, changes, _):
        loss = 1 / changes.get("lr", 1) if len(arm.tried) < 3 else 9.0
        return dict(val_loss=loss, dtype="float32", seconds=[0, 200.0])

    pretend(monkeypatch, outcome)
    monkeypatch.setattr(compare, "ask", lambda *_: ({}, ""))
    base, new = (Arm(name, tmp_path, [], dict(dtype="float32")) for name in ("base", "new"))
    trainer = Trainer(tmp_path, total=5)
    Trainer(tmp_path, total=1).run([(base, {"seed": 1})])
    capsys.readouterr()
    trainer.run([(base, {"seed": 1})])
    compare.tune([new], "lr", [1.0, 2.0], 1, trainer)
    compare.tune([new], "lr", [3.0], 1, Trainer(tmp_path, 4, [{}, {}], seconds=200.0))
    lines = [line for line in capsys.readouterr().out.splitlines() if "training" in line]
    found = [line.partition(": training ")[0] for line in lines]
    assert found[:3] == [
        "run 2 of 5, about 14 min left",
        "run 3 of 5, about 10 min left",
        "run 4 of 6, about 10 min left",
    ]
    assert "run 1 of 4, about 7 min left" in found, "two at once take half the time"


def test_arms_with_dtype_auto_share_the_precision_that_the_first_run_measured(
    tmp_path, monkeypatch
):
    def outcome(_arm, changes, _directory):
        flags.append(changes["dtype"])
        name = "bfloat16" if changes["dtype"] == "auto" else changes["dtype"]
        return dict(val_loss=5.0, dtype=name, seconds=[])

    flags = []
    pretend(monkeypatch, outcome)
    arms = [Arm(dtype, ROOT, [], dict(dtype=dtype)) for dtype in ("auto", "float16")]
    for seeds in ([1, 2], [1, 2, 3]):  # the command is repeated, with a seed more
        Trainer(tmp_path, total=6).run([(arm, {"seed": seed}) for seed in seeds for arm in arms])
    assert flags == ["auto", "float16", "bfloat16", "float16", "bfloat16", "float16"]


# -- several runs at once


def test_each_run_has_a_gpu_or_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(programs, "usable_cores", lambda: 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert programs.find_places(1, gpus=3) == [{}], "all of them"
    assert programs.find_places(2, gpus=0) == [{"OMP_NUM_THREADS": "2"}] * 2
    gpus = [{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(2)]
    assert programs.find_places(2, gpus=3) == gpus
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-1f")
    assert programs.find_places(2, gpus=2)[1] == {"CUDA_VISIBLE_DEVICES": "GPU-1f"}
    for jobs, gpus, words in ((0, 2, "2 GPUs"), (3, 2, "2 GPUs"), (6, 0, "5 cores")):
        with pytest.raises(UserError, match=f"--jobs {jobs}: this machine has {words}"):
            programs.find_places(jobs, gpus)


def test_programs_run_at_once_in_places_of_their_own_and_the_next_begins_when_one_ends(tmp_path):
    """Three programs in two places. The first two end only once both have begun, the third last."""
    wait = "import os, pathlib, time\nprint(os.environ['PLACE'], flush=True)\n"
    wait += f"while len(list(pathlib.Path({str(tmp_path)!r}).iterdir())) < %d: time.sleep(0.01)"
    counts = dict(a=2, b=2, c=4)  # c's is the file of this test
    commands = iter([([sys.executable, "-c", wait % n], tmp_path / k) for k, n in counts.items()])
    places = [{"PLACE": "left"}, {"PLACE": "right"}]
    ended = []
    for directory in programs.run_programs(lambda: next(commands, None), places):
        ended.append(directory)
        if len(ended) == 2:
            (tmp_path / "two-have-ended").touch()
    assert sorted(ended) == [tmp_path / name for name in "abc"] and ended[2].name == "c"
    assert sorted(map(programs.last_line, ended[:2])) == ["left", "right"]
    assert programs.last_line(ended[2]) == programs.last_line(ended[0]), "in the free place"


def test_who_interrupts_a_comparison_interrupts_its_runs(tmp_path):
    save = "import signal, sys, time\n"
    save += "signal.signal(signal.SIGTERM, lambda *_: sys.exit('saved'))\n"
    save += "print('began', flush=True); time.sleep(10**6)"
    commands = iter([([sys.executable, "-c", save], tmp_path / name) for name in "ab"])

    def take():
        if program := next(commands, None):
            return program
        if all((tmp_path / name / "output.txt").read_text() for name in "ab"):
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):  # not after these days
        [*programs.run_programs(take, [{}] * 3)]
    assert [programs.last_line(tmp_path / name) for name in "ab"] == ["saved"] * 2


def test_runs_at_once_wait_for_the_first_to_pick_the_precision_and_end_as_one_after_the_other(
    corpus, tmp_path, monkeypatch
):
    """An interrupted comparison goes on with another number of jobs, and its losses stay."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arm = read_base(corpus, "--max-steps 4 --val-every 4 --dtype auto")
    runs = [(arm, {"seed": seed}) for seed in (1, 2, 3)]
    begun = []

    def seen(*args):
        begun.append((args[1]["dtype"], sorted(tmp_path.glob("two/base/*/metrics.jsonl"))))
        return compare_train(*args)

    compare_train = compare.train
    monkeypatch.setattr(compare, "train", seen)
    two = programs.find_places(2, gpus=0)
    outcomes = Trainer(tmp_path / "two", 3, two).run(runs[:2])
    assert [dtype for dtype, _ in begun] == ["auto", outcomes[0]["dtype"]]
    assert len(begun[1][1]) == 1, "the first run has picked it, and may not have ended"
    outcomes = Trainer(tmp_path / "two", 3).run(runs)
    assert len(begun) == 3
    alone = Trainer(tmp_path / "one", 3, first={"auto": outcomes[0]["directory"]}).run(runs)
    assert [run["losses"] for run in outcomes] == [run["losses"] for run in alone]


# -- other vocabularies


def test_arms_of_other_vocabularies_are_compared_in_bits_of_the_same_text(
    tmp_path, monkeypatch, asked_here
):
    lines = [f"the {n} quick brown foxes jump over {n % 7} lazy dogs\n" for n in range(2000)]
    for name, start, flags in (
        ("gpt2", 0, ["--tokenizer", "gpt2"]),
        ("own", 0, ["--vocab-size", 300]),
        ("other", 9, ["--vocab-size", 300]),
    ):
        (tmp_path / "b.txt").write_text("".join(lines[start:]))
        done = call(
            "fineweb.py", "--source", tmp_path / "b.txt", "--data-dir", tmp_path / name, *flags
        )
        assert done.returncode == 0, done
    monkeypatch.setattr(compare, "run_programs", train_warm)
    base = f"{FLAGS} --data-dir {tmp_path}/own --val-tokens"
    for arm, val_tokens, words in (
        ("other", 10**6, "must hold out the same text"),
        ("own --sequence-length 8", 160, "validate on all of it: --val-tokens"),
        ("gpt2", 320, "validate on all of it: --val-tokens"),
    ):
        flags = ["--base", f"{base} {val_tokens}", "--arm", f"it: --data-dir {tmp_path}/{arm}"]
        with pytest.raises(UsageError, match=words):
            compare.main(flags)
    out = tmp_path / "out"
    arm = f"it: --data-dir {tmp_path}/gpt2"
    compare.main(["--base", f"{base} 1000000", "--arm", arm, "--seeds=2", f"--out={out}"])
    result = json.loads((out / "compare.json").read_text())
    for arm in result["arms"]:
        for run in arm["runs"]:
            [*_, last] = of_type(read_run(run["directory"]).records, "val")
            assert run["val_loss"] == run["losses"][-1] == last["bits_per_byte"]
    page = (out / "compare.md").read_text()
    assert "| arm | bits per byte | against base |" in page and "Bits per byte: mean" in page


# -- mistakes


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "nothing to compare with the base"),
        (["adamw --optimizer adamw"], "'name: flags'"),
        (["a:", "--arm", "a:"], "each name one word and new"),
        (["a: --optimizer sgd"], "a: '--optimizer sgd' is refused"),
        (["a: @nowhere"], "no copy of this repository"),
        (["a: --seed 99"], "sets what compare.py sets itself"),
        (["a: --log-dir=elsewhere"], "sets what compare.py sets itself"),
        (["a: 'open"], "No closing quotation"),
        (["a: --val-tokens 160"], "validate on all of it: --val-tokens 700 in --base"),
        (["a: --data-dir nowhere"], "does not exist"),
        (["a: --val-every 0"], "nothing is measured"),
        (["a: --n-head 3"], "is not a multiple of n_head 3"),
        (["a:", "--sweep", "beta2=0.9,1"], "base cannot have 1.0\n"),
        (["a: --optimizer muon", "--sweep", "embedding_lr=2,4"], "base cannot have 2.0"),
        (["a:", "--sweep", "n_head=2,3"], "cannot have 3\nn_embd 16 is not a multiple"),
        (["a:", "--jobs", "999"], "--jobs 999: this machine has"),
        (["a:", "--seeds", "2", "--sweep", "learning_rate=1,2"], "1 more to tune"),
        (["a:", "--sweep", "learning_rate=1"], "values above 0"),
        (["a:", "--sweep", "shuffle=1,2"], "shuffle is no number"),
        (["a:", "--sweep", "seed=1,2"], "seed is no number"),
        (["a:", "--sweep", "learning_rate=1,x"], "convert string to float: 'x'"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_trained(
    flags, words, corpus, tmp_path, asked_here
):
    where = ["--base", f"{FLAGS} --data-dir {corpus}", "--out", str(tmp_path / "never")]
    arms = ["--arm", *flags] if flags else []
    with pytest.raises(UsageError) as error:
        compare.main([*where, *arms])
    assert words in str(error.value)
    assert not (tmp_path / "never").exists()


def test_an_arm_is_not_refused_for_a_flag_of_the_base_that_is_in_vain_with_its_own(
    corpus, asked_here
):
    base = f"{FLAGS} --data-dir {corpus} --optimizer muon --embedding-lr 4"
    arms = compare.read_arms(compare.CompareConfig(base, ("adamw: --optimizer adamw",)))
    assert [arm.settings["optimizer"] for arm in arms] == ["muon", "adamw"]
    assert "--embedding-lr" in arms[0].flags and "--embedding-lr" not in arms[1].flags
    with pytest.raises(UserError, match="--embedding-lr is of no use"):
        arm = "adamw: --optimizer adamw --embedding-lr 2"
        compare.read_arms(compare.CompareConfig(base, (arm,)))


def test_minutes_would_choose_another_run_for_each_seed(corpus, asked_here):
    _, complaint = compare.ask(ROOT, ["--minutes", "3", "--data-dir", str(corpus)])
    assert complaint == "--minutes would choose for each run anew: type the flags that it prints"

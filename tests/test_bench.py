"""bench.py: what is compared, what is reported. Never how fast this machine is."""

import itertools
import json
import math
import re
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import bench
import plan
from bench import BenchConfig, Machine
from benchmarks import measure, peers
from benchmarks.climb import PUBLISHED, plot_climbs
from benchmarks.measure import Side
from benchmarks.tables import CLIMB, by_turns, describe_ratio, format_table, time_of_10B
from support.base.errors import UsageError, UserError
from support.machine.distributed import start_world
from support.text.tokenizer import VOCAB_SIZE

SECONDS = {"a": 4.0, "b": 2.0, "c": 1.0}  # of the first run of a fake side


@pytest.fixture
def machine(monkeypatch):
    """A function that makes a Machine of 2 TFLOP/s, where training uses bfloat16 and compiles."""

    def make(**flags) -> Machine:
        flags = dict(model="tiny", batch_size=2, sequence_length=32, rounds=1) | flags
        return Machine(BenchConfig(device="cpu", **flags))

    monkeypatch.setattr(bench, "why_not_compile", lambda device: "")
    monkeypatch.setattr(bench, "pick_dtype", lambda *_: (torch.bfloat16, "a test"))
    monkeypatch.setattr(bench, "peak_flops", lambda *_, **__: (2e12, "a test"))
    return make


def run_here(make, **options):
    """What the first run of a side returns, in this process."""
    torch.manual_seed(0)
    with start_world("cpu") as world:
        return make(world, **options)()


class HereWorker:
    """A side in this process."""

    def __init__(self, side):
        self.side = side

    def first_run(self, device):
        return measure.numbers_of(run_here(self.side.make, **self.side.options))

    def turn(self):
        return dict(seconds=1.0, memory=1)

    def close(self):
        pass


@pytest.fixture
def alive(monkeypatch) -> list[str]:
    """Workers whose machine gets slower with each turn -> the names of the sides that are alive."""
    names: list[str] = []
    turn_number = itertools.count()

    class FakeWorker(HereWorker):
        def first_run(self, device):
            names.append(self.side.name)
            assert len(names) <= 3, "the first, the one above, and this one"
            if self.side.name not in SECONDS:
                raise self.side.options["error"]
            return dict(loss=9.0)

        def turn(self):
            seconds = SECONDS[self.side.name] * 1.01 ** next(turn_number)
            return dict(seconds=seconds, memory=10**9)

        def close(self):
            names.remove(self.side.name)

    monkeypatch.setattr(measure, "Worker", FakeWorker)
    return names


def fake_rows(*names: str, error=None, rounds=3, chain=True) -> list[dict]:
    compared = [Side(name, print, dict(error=error), amount=32, peak=160.0) for name in names]
    return list(measure.measure(compared, "cpu", rounds, chain))


# -- what is measured


def test_the_loss_written_out_and_that_of_transformers_are_the_models_own_loss(machine):
    step = machine(sequence_length=16, compile=False).step

    def loss(**changes) -> float:
        options = step("", dtype=torch.float32, keep_memory=False, **changes).options
        return float(run_here(peers.training, **options)["loss"])

    assert loss() == pytest.approx(loss(own_loss=False), rel=1e-5)
    assert loss() == pytest.approx(loss(pad_vocab_to=1), rel=1e-5)
    assert abs(loss(theirs="hf") - math.log(VOCAB_SIZE)) < 0.5


@pytest.mark.parametrize("compile", [True, False])
def test_a_rung_without_fused_attention_never_calls_its_kernel(machine, compile):
    """Nor does the compiler put it in again, or take the code that it compiled for the other."""

    def losses_and_kernels(flash: bool) -> tuple[float, set[str]]:
        changes = dict(flash=flash, compile=compile, own_loss=False, keep_memory=False)
        options = machine().step("", dtype=torch.float32, **changes).options
        with torch.profiler.profile() as profile:
            loss = float(run_here(peers.training, **options)["loss"])
        return loss, {e.key for e in profile.key_averages() if "flash" in e.key}

    loss, none = losses_and_kernels(flash=False)
    same_loss, kernels = losses_and_kernels(flash=True)
    assert kernels and not none and loss == pytest.approx(same_loss, rel=1e-5)


def test_hot_paths_stand_beside_their_plain_versions(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "Worker", HereWorker)
    monkeypatch.setattr(peers, "keep_freed_memory", lambda device: None)
    endings = ["on a roof.", "in it", "up and goes on", "no"]
    one = dict(ctx="A man sits", endings=endings, split_type="zeroshot")
    lines = [json.dumps(one | dict(ind=i, label=i % 4)) for i in range(6)]
    (tmp_path / "examples.jsonl").write_text("\n".join(lines))
    m = machine(hellaswag_path=str(tmp_path / "examples.jsonl"), compile=False)
    m.dtype = torch.float32
    for compare, count in (bench.compare_attention, 10), (bench.compare_adamw, 3):
        assert [row["median"] > 0 for row in compare(m)] == count * [True]
    assert [row["name"] for row in bench.compare_precisions(m)] == ["float32"]
    names = [row["name"] for row in bench.compare_generation(m)]
    assert names[:2] == ["transformers, 1 × 128", "ours, eager, 1 × 128"] and len(names) == 4
    one_at_a_time, batched = bench.compare_scoring(m)
    assert one_at_a_time["right"] == batched["right"]


# -- what is compared


@pytest.mark.parametrize("compiled", [True, False])
def test_this_repository_stands_beside_anothers_compiled_step(machine, monkeypatch, compiled):
    m = machine(against="hf", compile=compiled)
    monkeypatch.setattr(bench, "measure", lambda compared, *_: iter(compared))
    sides = {side.name: side.options for side in bench.compare_peer(m)}
    ours = sides["this repository"]
    base = sides.get("transformers, compiled", ours)
    assert next(iter(sides.values())) is base and base["compile"] == ours["compile"] == compiled
    changed = {name for name in ours if base.get(name) != ours[name]}
    assert changed == ({"keep_memory"} if compiled else set())
    assert not sides["transformers, eager"]["compile"]


def climb(m: Machine, monkeypatch, fits: int, gains: int = 99) -> list[Side]:
    """The sides of the ladder on 4 cores, where micro-batches up to `fits` have room.

    Those up to `gains` are faster than the one before.
    """
    seen = []

    def measured(sides, *_):
        for side in sides:
            seen.append(side)
            B = side.options["B"]
            yield dict(error="out of memory") if B > fits else dict(speedup=1 + (B <= gains))

    monkeypatch.setattr(bench, "measure", measured)
    monkeypatch.setattr(bench, "usable_cores", lambda: 4)
    assert len(list(bench.climb_ladder(m))) == len(seen)
    return seen


def test_each_rung_of_the_ladder_changes_one_thing_of_the_rung_before(machine, monkeypatch):
    m = machine()
    seen = climb(m, monkeypatch, fits=99)
    for base, rung in itertools.pairwise(seen):
        changed = [key for key, value in rung.options.items() if base.options[key] != value]
        assert len(changed) + (rung.processes != base.processes) == 1, rung.name
    names = [rung.name for rung in seen]
    assert "+ TF32" not in names and "+ 50,304 rows (for GPUs)" in names  # this is a CPU
    assert names.index("+ torch.compile") < names.index("+ fused attention"), "as in the lecture"
    whole = seen[names.index("+ freed memory kept")]
    assert whole.options == m.step("").options, "what training does here"


@pytest.mark.parametrize("asked, fits, gains, names, B", [
    (10, 99, 99, ["+ micro-batch of 4", "+ micro-batch of 8"], 8),
    (0, 7, 99, ["+ micro-batch of 4", "+ micro-batch of 8"], 4),
    (0, 99, 2, ["+ micro-batch of 4"], 4),
    (2, 99, 99, [], 2),
])  # fmt: skip
def test_micro_batches_grow_while_they_fit_and_gain_and_processes_have_the_largest(
    machine, monkeypatch, asked, fits, gains, names, B
):
    seen = climb(machine(max_batch=asked), monkeypatch, fits, gains)
    *_, two, four = seen
    assert [side.name for side in seen if "micro-batch" in side.name] == names
    assert (two.name, four.name, four.processes) == ("2 processes", "4 processes", 4)
    assert two.options["B"] == four.options["B"] == B
    assert four.amount == 4 * B * 32


def test_ratios_are_of_turns_side_by_side_and_have_their_range(alive):
    rows = fake_rows("a", "b", "c")
    # the machine slows down by 1% a turn, not by all it did before
    assert [row["speedup"] for row in rows[1:]] == pytest.approx([2 / 1.01, 2 / 1.01])
    assert rows[1]["speedup_low"] <= rows[1]["speedup"] <= rows[1]["speedup_high"]
    assert rows[1]["MFU"] == pytest.approx(rows[1]["median"] / 160)
    assert [row["total"] for row in rows[1:]] == pytest.approx([2 / 1.01, 4 / 1.01**2])
    assert "4.0 × (3.9 to 3.9)" in format_table(
        rows, CLIMB
    ) or "3.9 × (3.9 to 3.9)" in format_table(rows, CLIMB)
    assert "speedup" not in rows[0] and rows[0]["loss"] == 9.0 and rows[0]["memory_gb"] == 1
    rows = fake_rows("a", "b", "c", chain=False)
    assert rows[2]["speedup"] == pytest.approx(4 / 1.01), "without a chain the first is the base"
    assert not alive


@pytest.mark.parametrize("names", [["a", "too large", "b"], ["too large", "a", "b"]])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room\nfor it"), BrokenProcessPool()])
def test_a_side_that_fails_says_why_and_the_next_has_the_base_before_it(alive, names, error):
    rows = fake_rows(*names, error=error, rounds=1)
    assert [row["name"] for row in rows] == names
    assert rows[names.index("too large")]["error"].startswith(type(error).__name__)
    assert rows[2]["speedup"] == pytest.approx(2 / 1.01) and not alive
    assert type(error).__name__ in format_table(rows)


# -- what is reported


def test_a_result_is_written_as_a_table_and_json_which_plan_reads(monkeypatch, capsys, tmp_path):
    """Of a ladder without techniques: an update by one process, then by two."""
    monkeypatch.setattr(bench, "TECHNIQUES", {})
    monkeypatch.setattr(bench, "usable_cores", lambda: 2)
    flags = "--model tiny --sequence-length 16 --batch-size 1 --max-batch 1 --rounds 1 --no-compile"
    bench.main([*flags.split(), "--device", "cpu", "--out", str(tmp_path / "here")])
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and "measured here" in printed and "MFU" in printed
    table = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(table) == 4 and len({len(line) for line in table}) == 1  # aligned
    result = json.loads((tmp_path / "here.json").read_text())
    assert result["versions"]["torch"] and result["git"] and result["command"].startswith("python")
    one, two = result["benchmarks"]["ladder"]["rows"]
    assert one["loss"] > 0 and two["name"] == "2 processes" and two["speedup"] > 0
    read = plan.read_mfu(str(tmp_path / "here.json"), re.escape(result["device"]["name"]))
    assert read[0] == max(one["MFU"], two["MFU"]) > 0
    assert f"climb: {tmp_path}/here.png" in printed and (tmp_path / "here.png").exists()


def test_another_kind_of_benchmark_leaves_the_ladders_record(monkeypatch):
    def measure(config, args):
        outs.append(config.out)
        return dict(benchmarks={}, peak=(1e12, ""))

    outs = []
    monkeypatch.setattr(bench, "run_benchmarks", measure)
    monkeypatch.setattr(bench, "HEAD", "")
    for flags in ("", "--pieces", "--against hf --generate", "--generate --out x"):
        bench.main(flags.split())
    assert outs == ["log/bench", "log/bench-pieces", "log/bench-against-generate", "x"]


def test_other_machines_are_drawn_beside_the_published_climbs_and_nothing_is_measured(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(bench, "run_benchmarks", None)
    record = str(ROOT / "benchmarks" / "cpu-ladder.json")
    bench.main(["--beside", record, record, "--out", str(tmp_path / "both")])
    assert capsys.readouterr().out == f"climb: {tmp_path}/both.png\n"
    [axis] = plot_climbs([record, record]).axes
    words = [text.get_text() for text in axis.texts]
    assert words.count("AMD EPYC, 2 cores, float32") == 2
    assert "645 → 3,046,409 (4,723.1 ×): 10B in 55 minutes" in words
    assert "67 → 133 (2.0 ×): 10B in 867 days" in words, "as in the table, not 133 / 89"
    with pytest.raises(UserError, match=r"name a record of bench.py's ladder"):
        plot_climbs([ROOT / "benchmarks" / "cpu-against.json"])
    failed = json.loads(Path(record).read_text())
    failed["benchmarks"]["ladder"]["rows"] = [dict(name="float32, eager", error="out of memory")]
    (tmp_path / "failed.json").write_text(json.dumps(failed))
    with pytest.raises(UserError, match="each of its rows failed"):
        plot_climbs([tmp_path / "failed.json"])


@pytest.mark.parametrize("name", ["cpu", "amx", "h200"])
def test_a_climbs_speeds_are_in_the_ratios_that_stand_beside_them(name):
    record = json.loads((ROOT / "benchmarks" / f"{name}-ladder.json").read_text())
    measured = record["benchmarks"]["ladder"]["rows"]
    shown = by_turns([*measured, dict(name="failed", error="no room")])
    first, *others = shown[:-1]
    for row in others:
        assert row["median"] / first["median"] == pytest.approx(row["total"])
        assert row["ms"] * row["median"] == pytest.approx(
            next(old["ms"] * old["median"] for old in measured if old["name"] == row["name"])
        )
        assert 0 < row["MFU"] < 1
    fastest = max(others, key=lambda row: row["median"])
    assert fastest["median"] in [row["median"] for row in measured], "as it was measured"
    assert shown[-1]["error"] and "median" not in shown[-1]


@pytest.mark.parametrize("rate, words", [
    (147, "787 days"), (44_268, "2.6 days"), (184_090, "15.1 hours"), (3_046_409, "55 minutes")
])  # fmt: skip
def test_the_time_of_the_recipe_is_told_in_words(rate, words):
    assert time_of_10B(rate) == words


def test_each_row_has_the_peak_of_its_own_precision(machine, monkeypatch):
    asked = []
    peaks = {torch.float32: 1e12, torch.bfloat16: 4e12}

    def peak_flops(device, dtype, tf32=True):
        asked.append(dtype)
        return peaks[dtype], "a test"

    monkeypatch.setattr(bench, "peak_flops", peak_flops)
    m = machine()
    plain, half = (m.step("", dtype=dtype) for dtype in peaks)
    assert half.peak == 4 * plain.peak
    assert m.step("", dtype=torch.bfloat16, tf32=True).peak == half.peak
    assert m.step("", dtype=torch.float32).peak == plain.peak
    assert len(asked) == 2, "each is measured once"


def test_published_milliseconds_and_tokens_a_second_agree():
    climbs = json.loads(PUBLISHED.read_text())["climbs"]
    in_ms = [row for climb in climbs for row in climb["rows"] if "ms" in row]
    assert in_ms and all(climb["source"] for climb in climbs)
    for row in in_ms:
        assert row["tokens_per_sec"] == round(16 * 1024 / row["ms"] * 1000)


def test_when_time_ends_the_rows_that_are_there_are_in_the_record(machine, monkeypatch, tmp_path):
    def end_early(m):
        yield dict(name="a", unit="tokens/s", median=1.0)
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.BENCHMARKS, "ladder", (end_early, "a test"))
    with pytest.raises(KeyboardInterrupt):
        bench.run_benchmarks(replace(machine().config, out=str(tmp_path / "here")), [])
    result = json.loads((tmp_path / "here.json").read_text())
    assert [row["name"] for row in result["benchmarks"]["ladder"]["rows"]] == ["a"]


@pytest.mark.parametrize("low, high, shown", [
    (1.5, 2.5, "2.00 × (1.50 to 2.50): faster"),
    (0.9, 2.5, "2.00 × (0.90 to 2.50): no difference shown"),
    (0.7, 0.9, "2.00 × (0.70 to 0.90): slower"),
    (2.0, 2.0, "2.00 × (no range)"),
    (0.9, 0.9962, "2.00 × (0.90 to 0.996): slower"),
    (0.9, 1.0041, "2.00 × (0.90 to 1.004): no difference shown"),
    (1.0, 2.5, "2.00 × (1.00 to 2.50): no difference shown"),
])  # fmt: skip
def test_nothing_is_faster_whose_range_holds_1_or_that_has_no_range(low, high, shown):
    assert describe_ratio(dict(speedup=2, speedup_low=low, speedup_high=high)) == shown


def test_mistakes_are_reported_together_each_in_one_line():
    with pytest.raises(UsageError) as error:
        bench.main(["--rounds", "0", "--examples", "0"])
    first, second = error.value.args
    assert first.startswith("--rounds 0: it must be at least 1 and ")
    assert second.startswith("--examples 0: ")

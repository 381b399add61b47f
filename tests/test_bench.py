"""bench.py: what is compared, what is reported. Never how fast this machine is."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_script

import bench
from bench import BenchConfig, MadeUpTokens, Setup, Variant, WrittenOutLoss
from distributed import World
from model import GPT, GPTConfig
from tokenizer import VOCAB_SIZE, UserError

CPU = torch.device("cpu")


def setup(**flags) -> Setup:
    """A machine that multiplies at 1 and 2 TFLOP/s and where training stays in float32."""
    config = BenchConfig(**(dict(model="tiny", batch_size=2, sequence_length=32, rounds=1, steps=1) | flags))
    peaks = {"float32": (1e12, "a test"), "bfloat16": (2e12, "a test"), "tf32": (1e12, "a test")}
    return Setup(config, CPU, torch.float32, "a test", "--no-compile", peaks)


def variant(name: str = "plain", **changes) -> Variant:
    return Variant(**(dict(name=name, B=2, T=16, size=bench.MODELS["tiny"]) | changes))


class FakeWorker:
    """Seconds of a step by the variant's name; a machine that gets slower with every step that anyone takes."""

    seconds, alive, most_alive, taken = {"a": 4.0, "b": 2.0, "c": 1.0}, set(), 0, 0

    def __init__(self, v, device):
        self.name = v.name
        FakeWorker.alive = FakeWorker.alive | {v.name}
        FakeWorker.most_alive = max(FakeWorker.most_alive, len(FakeWorker.alive))

    def take(self, steps):
        if self.name not in self.seconds:
            raise torch.OutOfMemoryError("no room\nfor it")
        FakeWorker.taken += 1
        return dict(seconds=self.seconds[self.name] * 1.01**FakeWorker.taken, loss=1.0, memory=10**9)

    def close(self):
        FakeWorker.alive = FakeWorker.alive - {self.name}


@pytest.fixture
def fake_workers(monkeypatch):
    monkeypatch.setattr(bench, "Worker", FakeWorker)
    FakeWorker.alive, FakeWorker.most_alive, FakeWorker.taken = set(), 0, 0


def test_published_peaks_are_found_by_the_whole_name_of_a_gpu():
    assert bench.published_peaks("NVIDIA H100 80GB HBM3")["bfloat16"][0] == 989.5e12
    assert bench.published_peaks("NVIDIA A100-SXM4-40GB")["tf32"][0] == 156e12
    assert "tf32" not in bench.published_peaks("Tesla T4")
    assert bench.published_peaks("NVIDIA H100 80GB HBM3 MIG 1g.10gb") == {}
    assert bench.published_peaks("NVIDIA GeForce RTX 4090 Laptop GPU") == {}


def test_the_loss_written_out_is_the_models_own_loss():
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(block_size=16, **bench.MODELS["tiny"]))
    x, y = MadeUpTokens(2, 16).next_batch()
    torch.testing.assert_close(WrittenOutLoss(gpt)(x, y)[1], gpt(x, y)[1], rtol=1e-5, atol=1e-5)


def test_a_rung_without_fused_attention_never_calls_its_kernel():
    def kernels(flash: bool) -> set[str]:
        with World("cpu") as world:
            turn = bench.prepare(variant(flash=flash), world)
            with torch.profiler.profile() as profile:
                turn(1)
        return {e.key for e in profile.key_averages() if "flash" in e.key}

    assert kernels(flash=True)
    assert not kernels(flash=False)


@pytest.mark.parametrize("hf", [False, True])
def test_a_variant_trains_with_the_real_step_from_the_loss_of_a_new_model(hf):
    with World("cpu") as world:
        turn = bench.prepare(variant(hf=hf, own_loss=True, fused=True, flash=True), world)
        first, later = turn(1), turn(5)
    assert abs(first["loss"] - math.log(VOCAB_SIZE)) < 0.5
    assert later["loss"] < first["loss"]
    assert first["seconds"] > 0 and first["memory"] > 0


def test_each_rung_of_the_ladder_changes_one_thing_of_the_rung_it_builds_on(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "measure", lambda variants, bases, setup: seen.append((variants, bases)) or [])
    here = setup()
    here.why_not_compile = ""
    bench.ladder(here)
    ((rungs, bases),) = seen
    for rung, base in list(zip(rungs, bases, strict=True))[1:]:
        changed = [k for k in vars(rung) if k != "name" and getattr(rung, k) != getattr(rungs[base], k)]
        assert len(changed) == 1, (rung.name, changed)
    last = here.variant(rungs[-1].name, B=4, tf32=False)
    assert rungs[-1] == last  # it ends with what training does here
    autocast = next(i for i, r in enumerate(rungs) if r.dtype == torch.bfloat16)
    assert autocast not in bases and rungs[autocast + 1].dtype == torch.float32  # measured, then left: training leaves it
    assert any("TF32" in note and "left out" in note for note in here.notes)


def test_ratios_are_of_turns_side_by_side_and_chains_of_them(fake_workers):
    here = setup(rounds=3)
    rows = bench.measure([variant("a"), variant("b"), variant("c", B=4)], [None, 0, 1], here)
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    assert rows[1]["speedup"] == pytest.approx(2 / 1.01)  # the machine slows down by 1% a turn, not by all it did before
    assert rows[2]["speedup"] == pytest.approx(4 / 1.01)
    assert rows[2]["total"] == pytest.approx(rows[1]["speedup"] * rows[2]["speedup"])
    assert len(rows[0]["turns_ms"]) == 6 and rows[2]["tokens_per_second"] == pytest.approx(4 * 16 / rows[2]["ms"] * 1000)
    flops = here.model().flops_per_token(16) * rows[0]["tokens_per_second"]
    assert rows[0]["mfu"] == pytest.approx(flops / 1e12) and rows[0]["mfu_half"] == pytest.approx(flops / 2e12)
    assert FakeWorker.most_alive == 2 and not FakeWorker.alive


def test_a_variant_that_fails_is_left_out_with_a_line_and_the_next_builds_on_what_it_built_on(fake_workers):
    here = setup()
    rows = bench.measure([variant("a"), variant("too large"), variant("b")], [None, 0, 1], here)
    assert [(row["name"], row.get("base")) for row in rows] == [("a", None), ("b", "a")]
    assert here.notes == ["left out: too large failed (OutOfMemoryError: no room)"]
    assert not FakeWorker.alive


def test_a_rung_that_is_slower_says_so(fake_workers, monkeypatch):
    monkeypatch.setattr(FakeWorker, "seconds", {"float32, eager": 1.0, "+ fused attention": 2.0})
    here = setup()
    bench.ladder(here)
    assert "slower: + fused attention runs at 0.50 × the speed of 'float32, eager'" in here.notes


def test_generation_and_hellaswag_agree_with_their_plain_versions():
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(block_size=128, **bench.MODELS["tiny"])).eval()
    prompt = torch.arange(10)[None]
    assert torch.equal(bench.generate_plainly(gpt, prompt, 8), gpt.generate(prompt, 8, temperature=0))
    examples = bench.hellaswag_examples("", 8)
    right = bench.hellaswag.evaluate(gpt, examples, CPU)["num_correct_norm"]
    assert bench.score_one_by_one(gpt, examples, setup()) == right


def test_every_other_hot_path_stands_beside_its_plain_version_and_its_limit():
    here = setup(data_tokens=20_000)
    cached = bench.generate(here)[1]
    batched = bench.score_hellaswag(here)[1]
    fineweb, loader = bench.prepare_data(here)[1:]
    for row in cached, batched, fineweb:
        assert row["limit"] > 0 and row["total"] > 0
    assert loader["tokens_per_second"] > 0
    lengths = bench.attention(here)
    assert [row["T"] for row in lengths] == [32, 64, 128] and all(row["speedup"] > 0 for row in lengths)


def test_a_result_is_written_and_results_of_several_machines_merge(tmp_path):
    flags = ["--model", "tiny", "--sequence-length", 16, "--rounds", 1, "--no-compile", "--sweep", "batch", "--max-batch", 1]
    printed = run_script("bench.py", *flags, "--out", tmp_path / "here").stdout
    assert "tokens/s" in printed and "MFU own" in printed and "MFU bf16" in printed and "measured here" in printed
    result = json.loads((tmp_path / "here.json").read_text())
    assert result["versions"]["torch"] and result["git"] and "bench.py --model tiny" in result["command"]
    assert [row["name"] for row in result["benchmarks"]["sweep"]["rows"]] == ["B 1"]
    result["device"]["name"] = "another machine"
    (tmp_path / "there.json").write_text(json.dumps(result))
    both = ["--report", tmp_path / "here.json", tmp_path / "there.json", "--out", tmp_path / "both"]
    lines = run_script("bench.py", *both).stdout.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({len(line) for line in table}) == 1 and len(table) == 4  # aligned: heading, rule, one row for each machine
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "here.png").exists()


def test_mistakes_are_told_together_and_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"--rounds 0: at least 1; --steps -1: at least 0"):
        bench.check(BenchConfig(rounds=0, steps=-1))
    with pytest.raises(UserError, match=r"not a result of bench\.py"):
        bench.read_result(str(Path(ROOT, "pyproject.toml")))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="not torchrun"):
        bench.check(BenchConfig())

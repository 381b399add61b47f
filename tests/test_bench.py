"""bench.py: what is compared, what is reported. Never how fast this machine is."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_script

import bench
from bench import BenchConfig, Machine
from benchmarks import anatomy, hot_paths, results, training_step, turns
from benchmarks.turns import Side
from model import GPT, GPTConfig
from support.common import UserError
from support.distributed import World
from support.tokenizer import VOCAB_SIZE

CPU = torch.device("cpu")
SIZE = bench.MODELS["tiny"]
SECONDS = {"a": 4.0, "b": 2.0, "c": 1.0}  # that a fake side's first run takes


def machine(**flags) -> Machine:
    """A machine that multiplies at 1 and 2 TFLOP/s and where training stays in float32."""
    flags = dict(model="tiny", batch_size=2, sequence_length=32, rounds=1, turn=0.0) | flags
    peaks = {"float32": (1e12, "a test"), "bfloat16": (2e12, "a test")}
    return Machine(BenchConfig(**flags), CPU, torch.float32, "a test", "--no-compile", peaks)


class HereWorker:
    """A side in this process."""

    def __init__(self, side, device):
        torch.manual_seed(0)
        turns.here.update(world=World(device.type), runs=1)
        self.run = side.make(turns.here["world"], **side.options)

    def turn(self, least):
        turns.here.update(run=self.run, runs=1)
        return turns.take_turn(least)

    def close(self):
        pass


class FakeWorker:
    """A run takes as long as the side's name says, on a machine that gets slower with each run."""

    alive: frozenset[str] = frozenset()
    most_alive = 0
    taken = 0

    def __init__(self, side, device):
        self.name = side.name
        FakeWorker.alive = FakeWorker.alive | {side.name}
        FakeWorker.most_alive = max(FakeWorker.most_alive, len(FakeWorker.alive))

    def turn(self, least):
        if self.name not in SECONDS:
            raise torch.OutOfMemoryError("no room\nfor it")
        FakeWorker.taken += 1
        seconds = SECONDS[self.name] * 1.01**FakeWorker.taken
        return dict(seconds=seconds, memory=10**9, returned=dict(loss=9.0, waited=seconds / 50))

    def close(self):
        FakeWorker.alive = FakeWorker.alive - {self.name}


@pytest.fixture
def fake_workers(monkeypatch):
    monkeypatch.setattr(turns, "Worker", FakeWorker)
    FakeWorker.alive = frozenset()
    FakeWorker.most_alive = 0
    FakeWorker.taken = 0


def side(name: str, base: int = 0, amount: int = 32, **more) -> Side:
    return Side(name, training_step.training, {}, amount, base=base, **more)


def test_the_loss_written_out_and_that_of_transformers_are_the_models_own_loss():
    def loss(**switches) -> float:
        torch.manual_seed(0)
        switches = dict(pad_vocab_to=1) | switches
        model = training_step.make_model(size=SIZE, T=16, **switches)
        with World("cpu") as world:
            x, y = training_step.MadeUpTokens(2, 16, world).next_batch()
        return model(x, y)[1].item()

    assert loss() == pytest.approx(loss(own_loss=False), rel=1e-5)
    assert loss() == pytest.approx(loss(pad_vocab_to=128), rel=1e-5)
    assert abs(loss(hf=True) - math.log(VOCAB_SIZE)) < 0.5


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_the_compiled_step_that_recomputes_has_the_loss_and_gradients_of_the_plain_one():
    def loss_and_gradients(plain: bool) -> tuple:
        torch.manual_seed(0)
        size = dict(n_layer=2, n_head=2, n_embd=16)
        model = training_step.make_model(size=size, T=16, own_loss=not plain)
        x = torch.randint(VOCAB_SIZE, (2, 17), generator=torch.Generator().manual_seed(0))
        step = model
        if not plain:
            step = training_step.compile_step(model, recompute=True, in_blocks=True)
        step(x[:, :-1], x[:, 1:])[1].backward()  # compiles it
        model.zero_grad()
        with torch.profiler.profile() as profile:
            loss = step(x[:, :-1], x[:, 1:])[1]
            loss.backward()
        kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
        [attention] = [e.count for e in profile.key_averages() if e.key == kernel]
        assert attention == 2, "one for each layer in the forward pass, none in the backward pass"
        return loss.item(), {name: p.grad for name, p in model.named_parameters()}

    loss, gradients = loss_and_gradients(plain=False)
    plain_loss, plain_gradients = loss_and_gradients(plain=True)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    for name, plain in plain_gradients.items():
        assert torch.allclose(gradients[name], plain, rtol=1e-4, atol=1e-7), name


def test_a_rung_without_fused_attention_never_calls_its_kernel():
    def kernels(flash: bool) -> set[str]:
        with World("cpu") as world:
            options = machine().step("").options | dict(flash=flash)
            run = training_step.training(world, **options)
            with torch.profiler.profile() as profile:
                assert abs(run()["loss"] - math.log(VOCAB_SIZE)) < 0.5
        return {e.key for e in profile.key_averages() if "flash" in e.key}

    assert kernels(flash=True)
    assert not kernels(flash=False)


def test_each_rung_of_the_ladder_changes_one_thing_of_the_rung_it_builds_on(monkeypatch):
    m = machine()
    seen = []
    m.why_eager = ""
    monkeypatch.setattr(bench, "measure", lambda sides, *_: seen.extend(sides) or iter(()))
    list(bench.climb_ladder(m))
    for rung in seen[1:]:
        base = seen[rung.base].options
        assert sum(base[key] != value for key, value in rung.options.items()) == 1, rung.name
    assert seen[-1].options == m.step("", B=4).options  # it ends with what training does here
    autocast = next(i for i, rung in enumerate(seen) if rung.options["dtype"] == torch.bfloat16)
    assert autocast not in [rung.base for rung in seen]  # measured, then left: training leaves it
    assert any("TF32" in note and "left out" in note for note in m.notes)


def test_ratios_are_of_turns_side_by_side_and_have_their_range(fake_workers):
    limits = {"MFU": 160.0}
    sides = [side("a"), side("b", limits=limits), side("c", 1, amount=64)]
    rows = list(turns.measure(sides, CPU, 3, 0.0))
    # the machine slows down by 1% a turn, not by all it did before
    assert rows[1]["speedup"] == pytest.approx(2 / 1.01)
    assert rows[2]["speedup"] == pytest.approx(4 / 1.01)
    assert "speedup" not in rows[0]
    uneven = turns.compare([10, 30, 20], [10, 20, 10])
    assert uneven == dict(beside=10, speedup=1.5, speedup_low=1.0, speedup_high=2.0)
    assert rows[1]["MFU"] == pytest.approx(rows[1]["median"] / 160)
    assert rows[1]["low"] < rows[1]["median"] < rows[1]["high"]
    assert rows[0]["loader"] == pytest.approx(0.02) and rows[0]["loss"] == 9.0
    assert FakeWorker.most_alive == 2 and not FakeWorker.alive


@pytest.mark.parametrize("names", [["a", "too large", "b"], ["too large", "a", "b"]])
def test_a_side_that_fails_says_why_and_the_next_builds_on_what_it_built_on(fake_workers, names):
    sides = [side(names[0]), side(names[1]), side(names[2], base=1)]
    rows = list(turns.measure(sides, CPU, 1, 0.0))
    assert [row["name"] for row in rows] == names
    assert rows[names.index("too large")]["error"] == "OutOfMemoryError: no room"
    assert rows[2]["speedup"] == pytest.approx(2 / 1.01) and not FakeWorker.alive
    assert "OutOfMemoryError: no room" in results.format_table(rows)


def test_every_other_hot_path_stands_beside_its_plain_version_and_its_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "Worker", HereWorker)
    monkeypatch.setattr(hot_paths, "NEW", 4)
    endings = ["on a roof.", "in it", "up and goes on", "no"]
    one = dict(ctx="A man sits", endings=endings, label=1, split_type="zeroshot")
    lines = [json.dumps(one | dict(ind=i)) + "\n" for i in (1, 2)]
    (tmp_path / "examples.jsonl").write_text("".join(lines))
    m = machine(hellaswag_path=str(tmp_path / "examples.jsonl"), sequence_length=16)
    n = m.config.batch_size * 16
    generated = list(hot_paths.compare_generation(m))
    scored = list(hot_paths.compare_scoring(m))
    lengths = list(hot_paths.compare_attention(m))
    [validated] = hot_paths.compare_validation(m)
    assert validated["loss"] == pytest.approx(math.log(VOCAB_SIZE), abs=0.5)
    assert len(generated) == 6 and len(scored) == 2
    assert [row["T"] for row in lengths] == [32, 32, 64, 64]
    assert all(row["of limit"] > 0 for row in generated + scored)
    assert scored[1]["speedup_low"] <= scored[1]["speedup"] <= scored[1]["speedup_high"]
    assert scored[0]["right"] == scored[1]["right"]
    every = f"an update every {n} tokens"
    names = [row["name"] for row in bench.compare_optimizers(m)]
    assert names == [f"{every}: AdamW", f"{every}: Muon"]
    assert "of a step of 524,288 tokens" in m.notes[-1]


def test_the_anatomy_of_a_step_is_all_of_it_part_by_part(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "Worker", HereWorker)
    monkeypatch.setattr(anatomy, "CASES", [(torch.float32, 48), (torch.bfloat16, 24)])
    m = machine()
    # dissect sets this in our process; monkeypatch would delete it at the end, not restore it
    with anatomy.inductor_config.patch("cpp.enable_kernel_profile", False):
        rows = list(anatomy.dissect(m))
    assert [row["case"] for row in rows] == 20 * ["float32, T 48"] + 20 * ["bfloat16, T 24"]
    for one_case in (rows[:20], rows[20:]):
        *parts, step = [row for row in one_case if "ms" in row]
        *held, peak = [row for row in one_case if "gb" in row]
        assert sum(row["ms"] for row in parts) == pytest.approx(step["ms"])
        assert sum(row["share"] for row in parts) == pytest.approx(1)
        seen = {row["part"] for row in parts if row["ms"] > 0}
        in_kernels = ("blocks", "loss")  # which only a compiled step has
        assert seen == {name for key, name in anatomy.PARTS.items() if key not in in_kernels}
        assert sum(row["gb"] for row in held) == pytest.approx(peak["gb"])
    config = dict(model="tiny", batch_size=2)
    result = dict(
        device=dict(name="a CPU"), config=config, benchmarks=dict(anatomy=dict(rows=rows))
    )
    results.plot_benchmarks([result]).savefig(tmp_path / "anatomy.png")
    assert "AdamW" in results.format_table(rows)


@pytest.mark.parametrize(
    "name, shapes, part",
    [
        ("aten::addmm", [[2304], [96, 768], [768, 2304], [], [], [96, 2304]], "forward"),
        ("aten::mm", [[96, 768], [768, 50304], [96, 50304]], "forward"),
        ("aten::mm", [[96, 50304], [50304, 768], [96, 768]], "dx"),
        ("aten::mm", [[96, 3072], [3072, 768], [96, 768]], "dx"),
        ("aten::mm", [[3072, 96], [96, 768], [3072, 768]], "dw"),
        ("aten::mm", [[50304, 2048], [2048, 768], [50304, 768]], "dw"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [], "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", [], "attention backward"),
        ("aten::bmm", [[48, 256, 66], [48, 66, 256]], "attention backward"),
        (
            "graph_0_cpp_fused__scaled_dot_product_flash_attention_for_cpu_backward_8",
            [],
            "attention backward",
        ),
        ("graph_0_cpp_fused__to_copy_gelu_view_3", [], "blocks"),
        ("graph_1_cpp_fused__to_copy_add_div_mul_1", [], "loss"),
        ("aten::empty", [], "rest"),
    ],
)
def test_an_operator_of_the_step_belongs_to_one_part(name, shapes, part):
    assert anatomy.part_of(name, shapes, tokens=96) == part


def test_what_is_alive_at_the_peak_is_known_to_the_byte():
    def run():
        x = torch.ones(1000, requires_grad=True)
        torch.ones(500)
        y = x.exp()
        y.sum().backward()

    held = anatomy.held_at_peak(run)
    # x, y, their sum and its own gradient, 1; the gradient of x. That of y is spread, not made
    assert held == {"other": 4000 + 4000 + 4 + 4, "gradients": 4000}


@pytest.mark.parametrize(
    "operators, made",
    [
        ("Torch-Compiled Region: 0/0 CompiledFunction aten::empty_strided", "kept"),
        ("Torch-Compiled Region: 1/0 CompiledFunction aten::mm", "loss"),
        ("autograd::engine CompiledFunctionBackward aten::mm", "gradients"),
        ("autograd::engine EmbeddingBackward0 aten::zeros aten::empty", "gradients"),
        ("aten::add", "other"),
    ],
)
def test_a_tensor_belongs_to_what_made_it(operators, made):
    assert anatomy.maker_of(operators) == made


def test_scoring_one_by_one_is_what_hellaswag_py_does():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, **SIZE)).eval()
    words = ["the", "man", "puts", "his", "hands", "on", "a", "table", "and", "looks", "up"]
    examples = []
    for i in range(6):
        endings = [" ".join(words[: i + k]) for k in (1, 2, 3, 4)]
        examples.append(dict(ctx=" ".join(words[i:]), endings=endings, label=i % 4))
    right = hot_paths.hellaswag.evaluate(model, examples, CPU)["num_correct_norm"]
    assert hot_paths.score_one_by_one(model, examples, CPU, torch.float32) == right


def test_a_result_is_written_and_results_of_several_machines_merge(tmp_path):
    flags = ["--model", "tiny", "--sequence-length", 16, "--rounds", 1, "--turn", 0]
    flags += ["--no-compile", "--sweep", "batch", "--max-batch", 1, "--out", tmp_path / "here"]
    printed = run_script("bench.py", *flags).stdout
    assert "tokens/s" in printed and "measured here" in printed
    assert "MFU" in printed and "MFU bf16" in printed
    result = json.loads((tmp_path / "here.json").read_text())
    assert result["versions"]["torch"] and result["git"]
    assert "bench.py --model tiny" in result["command"]
    (row,) = result["benchmarks"]["sweep"]["rows"]
    assert row["name"] == "B 1" and row["options"]["compile"] is False
    assert row["loader"] < 1
    result["device"]["name"] = "another machine"
    (tmp_path / "there.json").write_text(json.dumps(result))
    both = ["--report", tmp_path / "here.json", tmp_path / "there.json", "--out", tmp_path / "both"]
    lines = run_script("bench.py", *both).stdout.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({len(line) for line in table}) == 1  # aligned
    assert len(table) == 4  # heading, rule, one row for each machine
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "here.png").exists()


def test_mistakes_are_told_together_each_in_one_line(monkeypatch, capsys):
    wrong = ["--rounds", "0", "--turn", "-1", "--report"]
    monkeypatch.setattr("sys.argv", ["bench.py", *wrong])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "bench.py: --rounds 0: at least 1 is expected",
        "bench.py: --turn -1.0: at least 0 is expected",
        "bench.py: --report: name the JSON files that bench.py wrote, one or more",
    ]
    assert bench.check_flags(BenchConfig(turn=math.nan))
    with pytest.raises(UserError, match=r"not a result of bench\.py"):
        results.read_result(str(Path(ROOT, "pyproject.toml")))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "not torchrun" in bench.check_flags(BenchConfig())[0]

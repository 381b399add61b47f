"""plan.py and support/memory.py: what a run will need, held against what runs do need."""

import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run_program
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

import plan
from config import PRESETS, TrainConfig, parse_command_line
from model import GPT, GPTConfig, LinearCrossEntropy
from plan import Plan, PlanConfig
from support import checkpoint, memory
from support.common import UserError
from support.distributed import World
from support.fitting import fit_batch_size
from support.memory import estimate_memory
from support.peaks import published_peak


def planned(*flags) -> Plan:
    return Plan(parse_command_line([str(flag) for flag in flags], PlanConfig))


def run_main(monkeypatch, capsys, *flags) -> str:
    monkeypatch.setattr(sys, "argv", ["plan.py", *flags])
    plan.main()
    return capsys.readouterr().out


# -- the estimate, against fake and real steps


def replay(shape: GPTConfig, B: int) -> int:
    """Bytes of tensors at the fullest moment of the second micro-step, none of them allocated.

    What an operation takes for itself is not seen: in float32 that is a part of logsumexp.
    """
    with torch.device("meta"):
        model = GPT(shape)
    with FakeTensorMode():
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(torch.empty(p.shape)))
        model.lm_head.weight = model.transformer.wte.weight
        [optimizer] = model.configure_optimizers()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()  # makes the moments
            x = torch.zeros(B, shape.block_size, dtype=torch.int64)
            with torch.autocast("cpu", torch.bfloat16):
                _, loss = model(x, x)
            loss.backward()
        [peak] = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"]


@pytest.mark.parametrize("n_layer, B, recompute", [(12, 4, False), (4, 16, True)])
def test_the_estimate_is_what_a_replay_on_fake_tensors_takes(n_layer, B, recompute):
    shape = GPTConfig(n_layer=n_layer, activation_checkpointing=recompute)
    parts = estimate_memory(shape, B=B, T=1024, width=2, device="cpu")
    assert sum(parts.values()) == pytest.approx(replay(shape, B), rel=0.15)


MEASURE = """
import sys
import torch
from model import GPT, GPTConfig
from support.device import peak_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def micro_step(model, B):
    x = torch.randint(5000, (B, 256))
    model(x, x)[1].backward()

def train(B, **shape):
    model = GPT(GPTConfig(vocab_size=5000, block_size=256, **shape))
    [optimizer] = model.configure_optimizers()
    micro_step(model, 1)
    optimizer.step()  # makes the moments
    optimizer.zero_grad(set_to_none=True)
    micro_step(model, 1)  # makes the gradients
    micro_step(model, B)

train(1, n_layer=1, n_head=1, n_embd=16)  # what the libraries themselves take
before = resident()
train(int(sys.argv[1]), n_layer=6, n_head=4, n_embd=256)
print(peak_memory(torch.device("cpu")) - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_the_estimate_is_what_eager_steps_on_this_cpu_take():
    B = 4
    program = [sys.executable, "-c", MEASURE, str(B)]
    # each tensor from the system and back to it: the holes of a heap are no tensors
    done = run_program(program, PYTHONPATH=str(ROOT), MALLOC_MMAP_THRESHOLD_="65536")
    assert done.returncode == 0, done.stderr
    shape = GPTConfig(vocab_size=5000, block_size=256, n_layer=6, n_head=4, n_embd=256)
    parts = estimate_memory(shape, B=B, T=256, width=4, device="cpu")
    assert sum(parts.values()) == pytest.approx(int(done.stdout), rel=0.15)


@pytest.mark.parametrize("name", PRESETS)
def test_the_weights_of_the_estimate_are_those_of_the_model(name):
    model = plan.build_model(parse_command_line(["--preset", name], PlanConfig))
    parts = estimate_memory(model.config, B=1, T=8, width=4, device="cpu")
    numbers = sum(p.numel() for p in model.parameters())
    assert parts["weights"] == parts["gradients"] == 4 * numbers
    assert parts["moments"] == 8 * numbers


def test_the_loss_has_as_many_rows_at_a_time_as_the_model(monkeypatch):
    class Products(TorchDispatchMode):
        most_rows = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.mm.default and out.shape[1] == 64:
                self.most_rows = max(self.most_rows, len(out))
            return out

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    for device, rows in (("cpu", memory.LOSS_ROWS["cpu"]), ("meta", memory.LOSS_ROWS_ELSEWHERE)):
        x = torch.zeros(20_000, 1, device=device)
        weight = torch.zeros(64, 1, device=device)
        targets = torch.zeros(20_000, dtype=torch.int64, device=device)
        with Products() as products, torch.no_grad():
            LinearCrossEntropy.apply(x, weight, targets, 64, False)
        assert products.most_rows == rows


def test_sharding_divides_what_it_says():
    def parts(sharding: str, processes: int = 4) -> dict[str, int]:
        how = dict(B=1, T=64, width=2, device="cuda")
        return estimate_memory(GPTConfig(), sharding=sharding, processes=processes, **how)

    alone, ddp, zero1, fsdp = parts("ddp", 1), parts("ddp"), parts("zero1"), parts("fsdp")
    assert ddp == alone | {"buckets": ddp["weights"]}, "a set of gradients lives beside the buckets"
    embedding = 8 * 50304 * 768
    assert zero1 == ddp | {"moments": embedding}, "a tensor is not divided"
    for part in ("weights", "gradients", "moments"):
        assert fsdp[part] == alone[part] // 4
    assert fsdp["buckets"] == 0
    assert fsdp["activations"] == alone["activations"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_is_as_large_as_planned(optimizer, tmp_path):
    sizes = dict(n_layer=2, n_head=2, n_embd=64, sequence_length=16)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=16))
    optimizers = model.configure_optimizers(muon=optimizer == "muon")
    model(torch.zeros(1, 16, dtype=torch.int64), torch.zeros(1, 16, dtype=torch.int64))[
        1
    ].backward()
    for each in optimizers:
        each.step()
    with World("cpu") as world:
        saved = dict(model=model, optimizers=optimizers, state={"step": 1}, world=world)
        path = checkpoint.save(tmp_path, **saved)
    files = sum((path / name).stat().st_size for name in ("model.safetensors", checkpoint.STATE))
    flags = [f"--{name.replace('_', '-')}={n}" for name, n in sizes.items()]
    size = planned(*flags, "--optimizer", optimizer).checkpoint
    assert size == pytest.approx(files, rel=0.01)


# -- the micro-batch


@pytest.mark.parametrize("preset", ["gpt2-medium", "gpt2-large"])
def test_the_planned_micro_batch_is_the_one_that_training_with_fsdp_takes(preset, monkeypatch):
    it = planned("--preset", preset, "--gpus", 8, "--sharding", "fsdp")
    free = 80e9 - it.memory["weights"]
    monkeypatch.setattr("support.fitting.free_memory", lambda device: free)
    world = SimpleNamespace(device=torch.device("cuda"), sharding="fsdp", size=8, any=bool)
    raw = SimpleNamespace(config=it.shape)
    assert fit_batch_size(raw, it.config, world, torch.bfloat16) == it.batch_size
    assert it.fits(it.batch_size)


def test_a_micro_batch_that_is_too_large_is_said_to_be():
    def memory(*flags) -> str:
        return plan.describe(planned("--preset", "gpt2-xl", *flags))["memory a GPU"]

    assert "too much" in memory("--batch-size", 64)
    assert "too much" in memory("--gpu", "T4")
    assert "too much" not in memory("--gpu", "L4", "--gpus", 8, "--sharding", "fsdp")


# -- speed and cost


def test_the_largest_gpt2_costs_what_llm_c_paid_at_its_speed():
    """2.80 s a step of 1M tokens on 8 H100 of $28 an hour; 32,000 steps: 24 hours, $672 there."""
    llm_c = "--preset gpt2-xl --gpus 8 --max-steps 32000 --price 3.5 --val-every 0"
    facts = plan.describe(planned(*llm_c.split(), "--tokens-per-second", 1048576 / 2.8))
    assert facts["speed"] == "374,491 tokens/s"
    assert facts["time"] == "24.9 h"
    assert facts["cost"] == "$696.89"


def test_a_validation_costs_a_third_of_training_on_its_tokens():
    flags = ["--max-steps=10", "--warmup-steps=0", "--tokens-per-second=1000"]
    flags.append("--val-tokens=3000000")
    without = planned(*flags, "--val-every", 0).seconds
    assert without == 10 * 524288 / 1000
    seconds = planned(*flags, "--val-every", 4).seconds
    assert seconds == pytest.approx(without + 4 * 1000), "at 0, 4, 8 and 10"


def test_a_model_that_computes_its_activations_twice_takes_a_third_longer():
    once, twice = planned(), planned("--activation-checkpointing")
    assert twice.seconds == pytest.approx(once.seconds * 4 / 3)


def write_record(path, name: str) -> str:
    rows = [{"name": "eager", "MFU bf16": 0.2}, {"name": "all of it", "MFU bf16": 0.5}]
    record = {"device": {"name": name}, "config": {"model": "gpt2"}}
    record["benchmarks"] = {"ladder": {"rows": [*rows, {"name": "large", "error": "no room"}]}}
    path.write_text(json.dumps(record))
    return str(path)


def test_a_record_of_bench_says_how_fast_it_is(tmp_path):
    record = write_record(tmp_path / "bench.json", "NVIDIA H100 80GB HBM3")
    it = planned("--record", record, "--gpus", 2)
    assert it.rate == pytest.approx(2 * 0.5 * 989.5e12 / 854438400)
    assert "50.0%" in it.why and "'all of it'" in it.why
    with pytest.raises(UserError, match="is of 'NVIDIA H100 80GB HBM3', --gpu means 'NVIDIA L4'"):
        planned("--record", record, "--gpu", "L4")


def test_every_gpu_of_the_plan_has_a_published_peak():
    for _, name in plan.GPUS.values():
        assert published_peak(name, torch.float16, tf32=True)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--checkpoint-every 1000", "17 min at most (--checkpoint-every)"),
        ("--checkpoint-every 5000", "30 min at most (--checkpoint-minutes)"),
        ("--checkpoint-every 0 --checkpoint-minutes 0", "(there is no checkpoint before the end)"),
    ],
)
def test_a_hard_kill_costs_what_came_after_the_last_checkpoint(flags, words):
    speed = ["--tokens-per-second", 524288]  # a step a second
    assert words in plan.describe(planned(*flags.split(), *speed))["a hard kill undoes"]


# -- the command


def test_the_page_says_what_a_stranger_wants_to_know(monkeypatch, capsys):
    page = run_main(monkeypatch, capsys, "--preset", "gpt2-xl", "--gpus", "8", "--gpu", "H100")
    facts = dict(line.split("  ", 1) for line in page.splitlines()[2:] if line[0] != " ")
    assert facts["parameters"].strip() == "1,557,611,200"
    assert facts["tokens a parameter"].strip() == "6.4 (llm.c: 21, of 32B)"
    assert facts["steps"].strip() == "9,536 of 1,048,576 tokens"
    assert facts["checkpoint"].strip() == "18.7 GB"
    for part in ("weights", "gradients", "moments", "activations", "loss", "MFU 40.0%", "$2.50"):
        assert part in page


def test_the_readmes_table_is_what_the_program_prints(monkeypatch, capsys):
    table = run_main(monkeypatch, capsys, "--table")
    assert len(table.splitlines()) == 2 + len(PRESETS)
    assert table in (ROOT / "README.md").read_text()


def test_an_unknown_gpu_is_answered_with_those_that_are_known():
    with pytest.raises(UserError, match=r"--gpu 'H900' is not known.*H100, .*RTX-3090"):
        planned("--gpu", "H900")


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--gpus 0", "gpus is 0"),
        ("--gpus 7", "cannot be split over 7 processes"),
        ("--mfu 40", "mfu is 40.0: it must be above 0, at most 1"),
        ("--price nan", "price is nan"),
        ("--n-head 7", "n_embd 768 does not divide by n_head 7"),
        ("--device cpu", "--device cpu"),
        ("--init-from nowhere", "a plan asks no network; expected a directory, a .pt file"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(flags, words):
    with pytest.raises(UserError, match=re.escape(words)):
        planned(*flags.split())


def test_weights_to_begin_from_bring_their_sizes():
    assert planned("--init-from", "gpt2-large").num_params == 774030080


def test_nothing_of_the_plan_is_a_setting_of_training_and_help_needs_no_torch():
    own = set(vars(PlanConfig())) - set(vars(TrainConfig()))
    assert own == {"gpus", "gpu", "mfu", "record", "tokens_per_second", "price", "table"}
    look = "import sys, plan; print('torch' in sys.modules)"
    assert run_program([sys.executable, "-c", look], cwd=ROOT).stdout == "False\n"

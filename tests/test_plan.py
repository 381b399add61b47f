"""plan.py and support/machine/memory.py: estimates, compared with what runs need."""

import json
import os
import re
import sys
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, run_program, write_shard
from contract import call
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import plan
from config import NOTES, PRESETS, VOCAB_SIZES, TrainConfig, parse_command_line
from model import GPT, GPTConfig
from plan import PlanConfig
from support.base.errors import UsageError, UserError
from support.machine.device import GPUS
from support.machine.distributed import Stop, start_world
from support.machine.memory import estimate_memory, fit_batch_size, state_memory
from support.run import checkpoint


def settings(flags: str) -> PlanConfig:
    return parse_command_line(flags.split(), PlanConfig)


def with_notes(flags: str) -> dict[str, tuple[str, str]]:
    return plan.plan_run(parse_command_line(flags.split(), PlanConfig))


def facts(flags: str) -> dict[str, str]:
    return {name: fact for name, (fact, _) in with_notes(flags).items()}


def run_main(capsys, *flags) -> str:
    plan.main([*flags])
    return capsys.readouterr().out


def on_meta(**shape) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(**shape))


def replay(model: GPT, B: int) -> int:
    """Bytes of tensors at the fullest moment of the second micro-step. None is allocated.

    This misses what an operation takes for itself. In float32 that is a part of logsumexp.
    """
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
            x = torch.zeros(B, model.config.block_size, dtype=torch.int64)
            with torch.autocast("cpu", torch.bfloat16):
                _, loss = model(x, x)
            loss.backward()
        [peak] = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"]


@pytest.mark.parametrize("n_layer, B, recompute", [(12, 4, False), (4, 16, True)])
def test_the_estimate_is_what_a_replay_on_fake_tensors_takes(n_layer, B, recompute):
    model = on_meta(n_layer=n_layer, activation_checkpointing=recompute)
    parts = estimate_memory(model, TrainConfig(), B, width=2, device="cpu")
    assert sum(parts.values()) == pytest.approx(replay(model, B), rel=0.15)


MEASURE = """
import sys
import torch
from model import GPT, GPTConfig
from support.machine.device import peak_memory

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
    done = run_program(program, MALLOC_MMAP_THRESHOLD_="65536")
    assert done.returncode == 0, done.stderr
    model = on_meta(vocab_size=5000, block_size=256, n_layer=6, n_head=4, n_embd=256)
    parts = estimate_memory(model, TrainConfig(sequence_length=256), B, width=4, device="cpu")
    assert sum(parts.values()) == pytest.approx(int(done.stdout), rel=0.15)


@pytest.mark.parametrize("name", PRESETS)
def test_the_weights_of_the_estimate_are_those_of_the_model(name):
    model = plan.model_on_meta(settings(f"--preset {name}"))
    parts = state_memory(model, TrainConfig(), width=4)
    numbers = sum(p.numel() for p in model.parameters())
    assert parts["weights"] == parts["gradients"] == 4 * numbers
    assert parts["optimizer state"] == 8 * numbers


def test_sharding_divides_what_it_says():
    def parts(sharding: str, processes: int = 4) -> dict[str, int]:
        config = TrainConfig(sharding=sharding)
        return state_memory(on_meta(), config, width=2, processes=processes)

    alone, ddp, zero1, fsdp = parts("ddp", 1), parts("ddp"), parts("zero1"), parts("fsdp")
    assert ddp == alone | {"DDP buckets": ddp["weights"]}
    for part in ("weights", "gradients", "optimizer state"):
        assert fsdp[part] == alone[part] // 4
    assert fsdp["DDP buckets"] == 0
    assert zero1["optimizer state"] == fsdp["optimizer state"]
    whole = alone["weights"]
    assert zero1["gradients"] == fsdp["gradients"] + whole, "until the last micro-step"
    assert zero1["weight copies"] == alone["weight copies"] + whole
    assert parts("fsdp", 1) == parts("zero1", 1) == alone


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_is_as_large_as_planned(optimizer, tmp_path):
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=16))
    optimizers = model.configure_optimizers(optimizer)
    x = torch.zeros(1, 16, dtype=torch.int64)
    model(x, x)[1].backward()
    for each in optimizers:
        each.step()
    with start_world("cpu") as world:
        writer = checkpoint.Writer(Stop(world), tmp_path)
        writer.save(model, optimizers, {"step": 1}, {})
    path = writer.last
    files = sum((path / name).stat().st_size for name in ("model.safetensors", checkpoint.STATE))
    parts = state_memory(model, TrainConfig(optimizer=optimizer), width=4)
    assert parts["weights"] + parts["optimizer state"] == pytest.approx(files, rel=0.01)


@pytest.mark.parametrize("preset", ["gpt2-medium", "gpt2-large"])
def test_the_planned_micro_batch_is_the_one_that_training_with_fsdp_takes(preset, monkeypatch):
    flags = f"--preset {preset} --gpus 8 --sharding fsdp"
    config = settings(flags)
    model = plan.model_on_meta(config)
    free = 80e9 - state_memory(model, config, width=2, processes=8)["weights"]
    monkeypatch.setattr("support.machine.memory.free_memory", lambda device, processes: free)
    monkeypatch.setattr("support.machine.memory.is_sharded", lambda model: True)
    sizes = dict(size=8, local_size=8, shard_group_size=8)
    world = SimpleNamespace(device=torch.device("cuda"), **sizes, any=bool)
    B = fit_batch_size(model, config, world, torch.bfloat16)
    planned = facts(flags)
    assert planned["B × accumulation"].startswith(f"{B} ×")
    assert "too much" not in planned["memory per GPU"]


def test_a_plan_says_that_a_micro_batch_is_too_large():
    for flags in ("--batch-size 64", "--gpu T4"):
        assert "too much" in facts(f"--preset gpt2-xl {flags}")["memory per GPU"]


def test_the_largest_gpt2_costs_what_llm_c_paid_at_its_speed():
    """2.80 s a step of 1M tokens on 8 H100 of $28 an hour; 32,000 steps: 24 hours, $672 there."""
    off = "--val-every 0 --hellaswag-every 0 --sample-every 0"
    llm_c = f"--preset gpt2-xl --gpus 8 --max-steps 32000 --price 3.5 {off}"
    planned = facts(f"{llm_c} --tokens-per-second {1048576 / 2.8}")
    assert planned["speed"] == "374,491 tokens/s"
    assert planned["time"] == "1 day, 0:53:20"
    assert planned["cost"] == "$696.89"


def test_a_validation_costs_a_third_of_training_on_its_tokens():
    flags = "--max-steps 10 --warmup-steps 0 --tokens-per-second 1000 --val-tokens 3000000"
    flags += " --hellaswag-every 0 --sample-every 0"
    assert facts(f"{flags} --val-every 0")["time"] == "1:27:23"
    more = facts(f"{flags} --val-every 4")["time"]
    assert more == "2:34:09", "1,000 s more at each of 0, 4, 8 and 10, and a picture at each"


def test_hellaswag_samples_and_pictures_cost_time_and_the_published_range_stands_beside_it():
    off = "--gpus 8 --val-every 0 --hellaswag-every 0 --sample-every 0"
    assert facts(off)["time"] == "0:44:58"
    hella = facts(f"{off} --hellaswag-every 250")["time"]
    assert hella == "0:45:40", "78 times 2M tokens"
    assert facts(f"{off} --hellaswag-every 250 --hellaswag-limit 100")["time"] == "0:44:59"
    assert facts(f"{off} --sample-every 250")["time"] == "0:45:34"
    time, note = with_notes("--gpus 8")["time"]
    assert time == "0:48:06" and note.endswith("41% to 29%: 0:46:56 to 1:06:06")
    assert "published" not in with_notes("--gpus 8 --mfu 0.4")["time"][1]


def test_recomputing_activations_costs_a_quarter_of_the_speed():
    usual, _ = plan.find_rate(settings(""), GPUS["H100"], 1)
    slower, _ = plan.find_rate(settings("--activation-checkpointing"), GPUS["H100"], 1)
    assert slower == pytest.approx(0.75 * usual)


def test_a_record_of_bench_sets_the_speed(tmp_path):
    rows = [{"name": "eager", "MFU": 0.2, "median": 1.0, "ms": 1.0}]
    rows.append({"name": "float32", "MFU": 0.9, "median": 0.5, "ms": 2.0, "total": 0.5})
    rows.append({"name": "all of it", "MFU": 0.5, "median": 2.5, "ms": 0.4, "total": 2.5})
    rows.append({"name": "large", "error": "no room"})
    record = dict(device={"name": "NVIDIA H100 80GB HBM3"}, config={"model": "gpt2"})
    record |= {"dtype": "bfloat16", "benchmarks": {"ladder": {"rows": rows}}}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(record))
    speed, note = with_notes(f"--record {path} --gpus 2")["speed"]
    assert speed == f"{2 * 0.5 * 989.5e12 / 854438400:,.0f} tokens/s"
    assert "50.0%" in note and "'all of it'" in note
    slower, note = with_notes(f"--record {path} --gpus 2 --activation-checkpointing")["speed"]
    assert slower == f"{0.75 * 2 * 0.5 * 989.5e12 / 854438400:,.0f} tokens/s"
    assert "37.5%" in note and "three quarters" in note
    with pytest.raises(UserError, match="is of bfloat16: give --dtype bfloat16"):
        facts(f"--record {path} --dtype float32")
    path.write_text(json.dumps(record | {"dtype": "float32"}))
    speed = facts(f"--record {path} --dtype float32")["speed"]
    assert speed == f"{0.5 * 494.5e12 / 854438400:,.0f} tokens/s", "of the peak with TF32"
    with pytest.raises(UserError, match="is of 'NVIDIA H100 80GB HBM3', --gpu means 'NVIDIA L4'"):
        facts(f"--record {path} --gpu L4")
    path.write_text("{}")
    with pytest.raises(UserError, match=r"is no record of bench\.py's steps: 'device'"):
        facts(f"--record {path}")


def test_the_page_holds_the_facts_of_a_run(capsys):
    page = run_main(capsys, "--preset", "gpt2-xl", "--gpus", "8")
    assert re.search(r"^tokens +10\.0B +9,536 steps of 1,048,576$", page, re.MULTILINE)
    for words in ("  activations", "MFU 40.0% of 990 TFLOP/s", "$2.50 per GPU-hour", "18.7 GB"):
        assert words in page


@pytest.mark.parametrize(
    "flags, time, cost, note",
    [
        ("--gpu RTX-4090", "1 day", "unknown", "give --price"),
        ("--gpu RTX-4090 --price 0.5", "1 day", "$18.", "at $0.50 per GPU-hour, see --price"),
        ("--gpu H100", "6:17:45", "$15.74", "at $2.50 per GPU-hour, our assumption, see --price"),
        ("--preset quickstart", "under 0:01:00", "under $0.04", "our assumption"),
    ],
)
def test_only_a_rent_that_is_known_makes_a_cost_and_no_run_is_free(flags, time, cost, note):
    planned = with_notes(flags)
    assert planned["time"][0].startswith(time)
    assert planned["cost"][0].startswith(cost) and note in planned["cost"][1]


def test_the_table_of_the_reproduction_is_what_the_program_prints(capsys):
    table = run_main(capsys, "--table")
    assert len(table.splitlines()) == 2 + len(PRESETS) - 2, "not the two for a CPU"
    page = (ROOT / "docs" / "reproduction.md").read_text()
    assert table in page
    flags = re.search(r"`(--preset gpt2-medium [^`]*)`", page)[1].replace("--data-dir edu_32B ", "")
    medium, largest = facts(f"{flags} --gpus 8"), facts("--preset gpt2-xl --gpus 8")
    quoted = f"costs {medium['cost']}, for {medium['time']} hours of eight H100s"
    assert quoted in " ".join(page.split()) and f"preset costs {largest['cost']}" in page


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--gpu H900", "--gpu 'H900' is not known: use B200, "),
        ("--gpus 0", "--gpus 0: it must be at least 1"),
        ("--gpus 7", "processes 7"),
        ("--mfu 40", "--mfu 40.0: it must be above 0 and at most 1"),
        ("--price nan", "--price nan"),
        ("--init-from gpt2 --sequence-length 2048", "know 1024 positions, 2048 were asked for"),
        ("--n-head 7", "n_embd 768 is not a multiple of n_head 7"),
        ("--init-from nowhere", "nowhere"),
        ("--minutes 9 --tokens-per-second 9", "--minutes chooses it: give --mfu"),
    ],
)
def test_a_plan_refuses_wrong_settings_in_a_sentence(flags, words):
    with pytest.raises(UserError, match=re.escape(words)):
        facts(flags)


def test_a_model_from_files_is_planned_as_training_takes_it(tmp_path):
    GPT(GPTConfig(block_size=16, n_layer=1, n_head=2, n_embd=8)).save_pretrained(tmp_path)
    flags = f"--init-from {tmp_path} --sequence-length"
    planned = facts(f"{flags} 8 --preset gpt2-xl --n-layer 1")
    assert planned["parameters"] == f"{50257 * 8 + 8 * 8 + 12 * 8**2 + 13 * 8 + 2 * 8:,}"
    for more, words in {
        "4096": "know 16 positions, 4096 were asked for",
        "8 --n-layer 12 --n-embd=24": f"{tmp_path} has n_layer 1, n_embd 8: leave these flags out",
    }.items():
        with pytest.raises(UserError, match=words):
            facts(f"{flags} {more}")
    fields = asdict(GPTConfig(n_layer=1, n_head=2, n_embd=8))
    changed = dict(model_type="gpt2-changed", gpt_config=fields, difference="a", fingerprint=[])
    (tmp_path / "config.json").write_text(json.dumps(changed))
    assert facts(f"{flags} 512 --activation-checkpointing"), "which changes no result"


def test_what_is_less_than_a_tenth_of_a_gigabyte_is_told_in_megabytes():
    planned = facts("--preset quickstart --vocab-size 1024")
    assert planned["  weights"] == "7.5 MB" and planned["data"] == "3.9 MB"
    assert planned["memory per GPU"] == "96.7 MB"


def test_a_model_of_the_hub_is_planned_without_its_weights(tmp_path, monkeypatch):
    GPT(GPTConfig(block_size=16, n_layer=1, n_head=2, n_embd=8)).save_pretrained(tmp_path)
    asked = []

    def download(name, allow_patterns):
        asked.append((name, [pattern for pattern in allow_patterns if "safetensors" in pattern]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    there, here = (
        facts(f"--init-from {name} --sequence-length 8") for name in ("owner/name", tmp_path)
    )
    assert there["parameters"] == here["parameters"] and asked == [("owner/name", [])] * len(asked)


def test_a_plan_for_minutes_is_the_reproduction_where_time_and_text_are(tmp_path, capsys):
    plan.main(["--minutes", "48", "--gpus", "8", "--data-dir", "none"])
    page = capsys.readouterr().out
    assert "8 × H100, ddp (--gpu names another; train_gpt2.py --minutes measures" in page
    assert "12 layers of 768, T 1024" in page and "steps of 524,288" in page
    assert "flags" in page and "--optimizer=muon" in page and "--max-steps=18" in page
    write_shard(tmp_path / "a_train_000001.npy", np.zeros(100_000))
    plan.main(["--minutes", "48", "--gpus", "8", "--gpu", "H100", "--data-dir", str(tmp_path)])
    page = capsys.readouterr().out
    assert "H100, ddp\n" in page
    assert "976 steps of 2,048" in page, "20 epochs of 100,000 tokens"
    for other in ("--max-steps=9", "--init-from=gpt2"):
        with pytest.raises(UsageError, match=f"{other.partition('=')[0]} .*choose one"):
            plan.main(["--minutes", "48", other])


def test_help_says_of_each_preset_what_the_program_estimates():
    assert call("plan.py", "--help").stdout.partition("╭─ Estimate")[0].count("╭─") == 1, "-h"
    notes = [line.split(maxsplit=2) for line in NOTES.strip().splitlines()[1:]]
    assert [name for name, _, _ in notes] == list(PRESETS)
    for name, size, about in notes:
        small = VOCAB_SIZES.get(name)
        gpus = 1 if small else 8
        estimates = facts(f"--preset {name} --gpus {gpus} --vocab-size {small or 0}")
        N = int(estimates["parameters"].replace(",", "")) / 1e6
        assert size == (f"{N:.1f}M" if small else f"{N:.0f}M")
        hours, minutes, seconds = map(int, estimates["time"].rpartition(" ")[2].split(":"))
        hours, minutes = divmod(60 * hours + minutes + (seconds >= 30), 60)
        time = f"{hours}:{minutes:02} hours" if hours else f"{minutes} minutes"
        assert small or about.endswith(time), (name, time)

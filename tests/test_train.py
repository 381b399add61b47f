"""Training as a user runs it: real processes, on one rank and two, killed and resumed, and what
they say about mistakes.
"""

import dataclasses
import math
import re
import shlex
import shutil
import signal
import sys
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from conftest import (
    LONGEST,
    command,
    losses,
    read_records,
    run_program,
    run_script,
    started,
    tiny_run,
    train,
    wait_for,
    weights_hash,
)
from hypothesis import strategies as st

import hellaswag
from config import PRESETS, TrainConfig, check, parse_command_line
from model import GPT, DataLoaderLite, GPTConfig
from support import checkpoint
from support.common import UserError, headings
from support.device import free_memory
from support.distributed import Interrupted, Stop, World
from support.fitting import (
    explain_out_of_memory,
    fit_batch_size,
    parts_of_memory,
    runs_out_of_memory,
)
from support.log import Log
from support.report import command_to_resume
from train_gpt2 import learning_rate, main, train_step, validate

# -- the recipe


def test_the_learning_rate_warms_up_then_falls_along_a_cosine_to_a_tenth():
    config = TrainConfig(max_steps=100, warmup_steps=10, learning_rate=1.0)
    lr = [learning_rate(s, config) for s in range(101)]
    assert lr[0] == pytest.approx(0.1)
    assert lr[9] == lr[10] == 1.0
    assert lr[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr[100] == pytest.approx(0.1)
    assert lr[10:] == sorted(lr[10:], reverse=True)


@hypothesis.given(
    decay=st.sampled_from(["cosine", "linear", "wsd"]),
    warmup=st.integers(0, 50),
    steps=st.integers(51, 200),
)
def test_every_schedule_stays_between_its_least_and_its_peak_and_ends_at_the_least(
    decay, warmup, steps
):
    config = TrainConfig(
        max_steps=steps,
        warmup_steps=warmup,
        learning_rate=1.0,
        decay=decay,
        decay_frac=0.3,
    )
    after = [learning_rate(s, config) for s in range(warmup, steps + 1)]
    assert all(0.1 - 1e-9 <= lr <= 1 for lr in after)
    assert after[-1] == pytest.approx(0.1)
    if decay == "wsd":
        flat = max(0, math.floor(steps * 0.7) - warmup)
        assert all(lr == 1 for lr in after[:flat])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_configuration(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parse_command_line(["--preset", name, "--data-dir", str(tmp_path)])
    assert config.preset == name
    assert check(config, 1) == []
    model = GPTConfig(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
    assert model.padded_vocab_size == 50304


def test_help_has_every_flag_once_in_the_box_of_its_part_with_the_presets_values():
    args = ("--preset", "quickstart", "--help")
    shown = run_script("train_gpt2.py", *args, COLUMNS="80").stdout
    first, _, *boxes = shown.split("╭─ ")  # the second has nothing but --help
    assert TrainConfig.__doc__ in first
    titles = [box.split(" options", 1)[0] for box in boxes]
    assert titles == ["start", "architecture", "batch", "recipe", "evaluation", "computation"]
    for box, (title, about, comments) in zip(boxes, headings(TrainConfig), strict=True):
        assert box.startswith(f"{title} options")
        assert about.split()[0] in box
        assert flags_in(box) == [flag_of(name) for name in comments]
    assert flags_in(shown) == [flag_of(field.name) for field in dataclasses.fields(TrainConfig)]
    assert "(default: data/stdlib)" in boxes[0]
    assert "(default: 192)" in boxes[1]


def flags_in(shown: str) -> list[str]:
    """The flags that begin a line of --help."""
    return re.findall(r"^│ (--[a-z0-9-]+)", shown, re.MULTILINE)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_a_flag_overrides_its_preset_with_hyphens_or_underscores():
    assert parse_command_line(["--preset=gpt2-xl", "--max-steps", "7"]).max_steps == 7
    config = parse_command_line(["--max_steps", "7", "--preset", "gpt2-xl"])
    assert config.max_steps == 7
    assert config.n_layer == 48


# -- the step


class Batches:
    """A loader over given sequences (N, T+1): B at a time."""

    def __init__(self, sequences, B):
        self.parts = iter(sequences.split(B))

    def next_batch(self):
        part = next(self.parts)
        return part[:, :-1], part[:, 1:]


def step_on(model, optimizer, sequences, B: int, grad_clip: float = 0.0):
    """One update on all the sequences (N, T+1), in micro-batches of B -> loss, norm."""
    return train_step(
        model=model,
        optimizers=[optimizer],
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        loader=Batches(sequences, B),
        grad_accum_steps=len(sequences) // B,
        world=World("cpu"),
        dtype=torch.float32,
        lr=0.0,
        grad_clip=grad_clip,
    )


@pytest.mark.parametrize("B", [1, 2, 4])
def test_accumulated_gradients_are_those_of_one_large_batch(B):
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, 50257, (8, 9), generator=generator)

    def step(batch: int):
        torch.manual_seed(0)
        model = GPT(GPTConfig(block_size=8, n_layer=2, n_head=2, n_embd=8)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        gradients = {}

        def keep_gradients(*_):
            for name, p in model.named_parameters():
                gradients[name] = p.grad.clone()

        optimizer.register_step_pre_hook(keep_gradients)
        loss, norm = step_on(model, optimizer, sequences, batch)
        return gradients, loss, norm

    whole, loss, norm = step(8)
    parts, loss_of_parts, norm_of_parts = step(B)
    assert all((whole[name] - parts[name]).abs().max() < 1e-10 for name in whole)
    assert abs(loss - loss_of_parts) < 1e-5  # it is summed up in float32
    assert abs(norm - norm_of_parts) < 1e-6


def test_clipping_bounds_the_gradient_and_reports_its_norm_before():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clipped = []

    def keep_norm(*_):
        clipped.append(sum(p.grad.square().sum() for p in model.parameters()).sqrt())

    optimizer.register_step_pre_hook(keep_norm)
    sequences = torch.randint(0, 50257, (2, 9))
    _, norm = step_on(model, optimizer, sequences, B=2, grad_clip=0.25)
    assert norm > 0.25
    assert clipped[0] == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize("B", [1, 3, 50])
def test_validation_is_the_mean_over_a_fixed_number_of_tokens_whatever_the_batch(shards, tiny, B):
    loader = DataLoaderLite(shards, "val", B, 16)
    x, y = loader.batch(0, 20)
    with torch.no_grad():
        expected = tiny(x, y)[1].item()
    tiny.train()
    val_loss = validate(tiny, loader, 20 * 16 + 5, World("cpu"), torch.float32)
    assert val_loss == pytest.approx(expected, rel=1e-5)
    assert tiny.training


# -- runs


def test_a_run_leaves_logs_a_plot_and_checkpoints_that_are_hugging_face_models(shards, tmp_path):
    transformers = pytest.importorskip("transformers")
    log_dir = tmp_path / "log"
    often = "--val-every 3 --val-tokens 160 --checkpoint-every 2 --sample-every 3 --num-samples 2"
    done = train(shards, log_dir, often)
    assert "B 2 × T 16 × accumulation 2 × ranks 1 = 64 tokens" in done.stdout
    assert "rank 0 sample 1: Hello, I'm a language model," in done.stdout
    assert done.stderr == ""
    lines = [line.split() for line in (log_dir / "log.txt").read_text().splitlines()]
    assert [step for step, stream, _ in lines if stream == "val"] == ["0", "3", "6"]
    assert [int(step) for step, stream, _ in lines if stream == "train"] == list(range(6))
    first = read_records(log_dir)[0]
    assert first["type"] == "run"
    assert first["config"]["max_steps"] == 6
    assert first["versions"]["torch"]
    measured = {"loss", "lr", "norm", "ms", "mfu", "tokens_per_sec", "tokens", "wall", "memory"}
    assert measured <= read_records(log_dir, "train")[0].keys()
    assert (log_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "6 updates of 64 tokens" in (log_dir / "report.md").read_text()
    assert f"The report:     {log_dir / 'report.md'}\n" in done.stdout
    kept = {path.name for path in checkpoint.checkpoints(log_dir)}
    assert {"ckpt_000004", "ckpt_000006"} <= kept, "the newest two are kept"
    theirs = transformers.GPT2LMHeadModel.from_pretrained(log_dir / "ckpt_000006").eval()
    ours = GPT.from_pretrained(log_dir / "ckpt_000006")
    idx = torch.randint(0, 50257, (1, 16))
    assert (ours(idx)[0] - theirs(idx).logits).abs().max() < 1e-4


def test_any_number_of_processes_and_any_micro_batch_make_the_same_run(shards, tmp_path):
    flags = "--max-steps 20 --val-every 10 --val-tokens 208"
    train(shards, tmp_path / "one", f"{flags} --batch-size 4")
    train(shards, tmp_path / "small", f"{flags} --batch-size 1")
    train(shards, tmp_path / "two", f"{flags} --batch-size 2", ranks=2)
    reference = losses(tmp_path / "one")
    for other in ("small", "two"):
        assert losses(tmp_path / other) == pytest.approx(reference, rel=1e-5)

    def val_losses(name: str) -> list[float]:
        return [r["val_loss"] for r in read_records(tmp_path / name, "val")]

    assert val_losses("two") == pytest.approx(val_losses("one"), rel=1e-5)
    assert len(val_losses("one")) == 3


def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(shards, tmp_path):
    flags = "--max-steps 8 --checkpoint-every 4 --val-every 4 --val-tokens 160"
    train(shards, tmp_path / "whole", flags)
    train(shards, tmp_path / "cut", flags)
    shutil.rmtree(tmp_path / "cut" / "ckpt_000008")
    done = train(shards, tmp_path / "cut", f"{flags} --resume auto")
    assert "resuming from" in done.stdout
    assert "4 updates" in done.stdout
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    cut = tmp_path / "cut" / "ckpt_000008"
    whole = tmp_path / "whole" / "ckpt_000008"
    assert weights_hash(cut) == weights_hash(whole)
    logs = [(tmp_path / name / "log.txt").read_text() for name in ("cut", "whole")]
    assert logs[0] == logs[1]
    a = checkpoint.load_state(cut)["optimizer"]["state"]
    b = checkpoint.load_state(whole)["optimizer"]["state"]
    assert all(torch.equal(a[name][key], b[name][key]) for name in b for key in b[name])
    assert len(a["transformer.wte.weight"]["exp_avg"]) == 50257, "the padding is not saved"


def test_a_checkpoint_of_two_processes_goes_on_in_one(shards, tmp_path):
    flags = "--max-steps 6 --checkpoint-every 3"
    train(shards, tmp_path / "one", flags)
    train(shards, tmp_path / "two", f"{flags} --batch-size 1", ranks=2)
    train(shards, tmp_path / "two", flags, "--resume", tmp_path / "two" / "ckpt_000003")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_compiled_run_resumes_bit_for_bit_too(shards, tmp_path):
    flags = "--max-steps 4 --checkpoint-every 2 --compile"
    if "eager" in train(shards, tmp_path / "whole", flags).stdout:
        pytest.skip("no compiler here")
    train(shards, tmp_path / "cut", flags)
    train(shards, tmp_path / "cut", flags, "--resume", tmp_path / "cut" / "ckpt_000002")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    last = "ckpt_000004"
    assert weights_hash(tmp_path / "cut" / last) == weights_hash(tmp_path / "whole" / last)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_resumes_to_the_same_weights(shards, tmp_path, number):
    flags = "--max-steps 200 --checkpoint-every 50 --keep-checkpoints 9"
    train(shards, tmp_path / "whole", flags)
    args = tiny_run(shards, tmp_path / "cut", flags)
    with started(command("train_gpt2.py", *args)) as process:
        wait_for(tmp_path / "cut" / "ckpt_000050", process)
        process.send_signal(number)
        out, err = process.communicate(timeout=LONGEST)
    assert err == ""
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 0
        assert "--resume auto" in out.splitlines()[-1]
    train(shards, tmp_path / "cut", f"{flags} --resume auto")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    last = "ckpt_000200"
    assert weights_hash(tmp_path / "cut" / last) == weights_hash(tmp_path / "whole" / last)


def test_two_processes_told_to_stop_save_and_leave_without_noise(shards, tmp_path):
    args = tiny_run(shards, tmp_path / "log", "--max-steps 100000 --batch-size 1")
    with started(command("train_gpt2.py", *args, ranks=2)) as process:
        while "step    10" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LONGEST)
    assert "interrupted: " in out
    assert len(checkpoint.checkpoints(tmp_path / "log")) == 1


def test_a_single_batch_is_learned_by_heart(shards, tmp_path):
    flags = "--overfit-single-batch --max-steps 300 --n-embd 64 --learning-rate 0.003"
    train(shards, tmp_path / "log", flags)
    # it cannot reach zero: the first tokens of a sequence do not tell which one it is
    assert losses(tmp_path / "log")[-1] < 0.1


def test_training_goes_on_from_the_weights_of_another_run(shards, tmp_path):
    train(shards, tmp_path / "first", "--max-steps 30 --checkpoint-every 30")
    train(shards, tmp_path / "second", "--init-from", tmp_path / "first" / "ckpt_000030")
    assert losses(tmp_path / "second")[0] < losses(tmp_path / "first")[0] - 1


def test_a_run_that_goes_on_from_an_earlier_checkpoint_gives_up_the_later_ones(shards, tmp_path):
    log_dir = tmp_path / "log"
    train(shards, log_dir, "--checkpoint-every 2 --max-steps 10 --keep-checkpoints 9")
    whole = weights_hash(log_dir / "ckpt_000010")
    train(shards, log_dir, "--checkpoint-every 2 --max-steps 4 --resume", log_dir / "ckpt_000002")
    kept = [path.name for path in checkpoint.checkpoints(log_dir)]
    assert kept == ["ckpt_000002", "ckpt_000004"]
    train(shards, log_dir, "--checkpoint-every 2 --max-steps 10 --resume auto")
    assert len(losses(log_dir)) == 10
    assert len(checkpoint.checkpoints(log_dir)) == 2
    assert weights_hash(log_dir / "ckpt_000010") != whole, "the schedule of 4 steps was another"


def test_a_run_can_go_on_in_another_log_directory_with_other_settings(shards, tmp_path):
    train(shards, tmp_path / "one", "--checkpoint-every 3")
    flags = "--checkpoint-every 3 --weight-decay 0.7 --dtype float16"
    start = tmp_path / "one" / "ckpt_000003"
    done = train(shards, tmp_path / "two", flags, "--resume", start)
    expected = "other settings than before: weight_decay 0.1 -> 0.7, dtype float32 -> float16"
    assert f"with {expected}" in done.stdout
    state = checkpoint.load_state(tmp_path / "two" / "ckpt_000006")
    decay = [group["weight_decay"] for group in state["optimizer"]["param_groups"]]
    assert decay == [0.7, 0.0]
    assert state["scaler"]
    lines = (tmp_path / "two" / "log.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["3", "4", "5"]


# -- checkpoints


def test_a_checkpoint_half_written_is_not_a_checkpoint(shards, tmp_path, tiny, monkeypatch):
    def save(step: int) -> None:
        checkpoint.save(
            tmp_path,
            model=tiny,
            optimizers=tiny.configure_optimizers(),
            state={"step": step},
            world=World("cpu"),
        )

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    save(step=1)
    monkeypatch.setattr(torch, "save", full_disk)
    for step in (2, 1):
        with pytest.raises(UserError, match="No space left on device"):
            save(step=step)
    [left] = checkpoint.checkpoints(tmp_path)
    assert left.name == "ckpt_000001"
    assert checkpoint.damage_of(left) == ""


def test_checkpoints_that_cannot_be_read_are_not_thrown_away(shards, tmp_path):
    log_dir = tmp_path / "log"
    train(shards, log_dir, "--checkpoint-every 6")
    (log_dir / "ckpt_000006" / "training_state.pt").write_bytes(b"")
    before = (log_dir / "log.txt").read_text()
    done = train(shards, log_dir, "--resume auto", expect=1)
    assert "no other is whole" in done.stderr
    assert "--overwrite" in done.stderr
    assert "Traceback" not in done.stderr
    assert (log_dir / "ckpt_000006").exists()
    assert (log_dir / "log.txt").read_text() == before


@pytest.mark.parametrize("keep", [1, 2, 4, 5, 9])
def test_pruning_keeps_the_newest_and_the_best(tmp_path, keep):
    names = [f"ckpt_{step:06d}" for step in range(1, 6)]
    for name in names:
        (tmp_path / name).mkdir()
    checkpoint.prune(tmp_path, keep, best=tmp_path / names[1])
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted({names[1], *names[-keep:]})


# -- the micro-batch


def test_the_micro_batch_halves_until_it_fits_on_a_gpu(tiny, monkeypatch):
    forward = tiny.forward

    def with_little_memory(x, y):
        if len(x) > 4:
            raise torch.OutOfMemoryError
        return forward(x, y)

    def try_on_the_cpu(raw, B, T, _, dtype, muon):
        return runs_out_of_memory(raw, B, T, World("cpu"), dtype, muon)

    gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"), sharding="ddp", size=1, any=bool)
    monkeypatch.setattr("support.fitting.runs_out_of_memory", try_on_the_cpu)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(tiny, "forward", with_little_memory)
    config = TrainConfig(sequence_length=16, total_batch_size=64 * 16)
    assert fit_batch_size(tiny, config, gpu, torch.float32) == 4
    assert all(p.grad is None for p in tiny.parameters()), "nothing of the trial stays"
    config = TrainConfig(sequence_length=16, total_batch_size=6 * 16)
    B = fit_batch_size(tiny, config, gpu, torch.float32)
    assert B == 2, "it must divide the batch"


@pytest.mark.parametrize(
    "batch_size, checkpointing, advice",
    [
        (8, False, "micro-batches of 8: add --batch-size 4;"),
        (1, False, "add --activation-checkpointing;"),
        (1, True, "add --sharding fsdp, on several GPUs;"),
        (0, False, "before the first step: is another program using this GPU?"),
    ],
)
def test_what_to_do_when_a_gpu_is_full_depends_on_what_was_tried(batch_size, checkpointing, advice):
    config = TrainConfig(activation_checkpointing=checkpointing)
    assert advice in explain_out_of_memory(batch_size, config)


def test_running_out_of_memory_is_known_by_its_words_and_other_errors_are_not(tiny, monkeypatch):
    for words, known in {
        "Triton Error [CUDA]: out of memory": True,
        "another error": False,
    }.items():

        def fails(x, y, words=words):
            raise RuntimeError(words)

        monkeypatch.setattr(tiny, "forward", fails)
        if known:
            assert runs_out_of_memory(tiny, 2, 16, World("cpu"), torch.float32)
        else:
            with pytest.raises(RuntimeError, match=words):
                runs_out_of_memory(tiny, 2, 16, World("cpu"), torch.float32)


@pytest.mark.parametrize("B", [1, 4, 64])
def test_the_micro_batch_stays_within_half_of_a_cpus_free_memory(tiny, monkeypatch, B):
    world = World("cpu")
    config = TrainConfig(sequence_length=32, total_batch_size=64 * 32)
    parts = parts_of_memory(tiny, B, 32, world, torch.float32)
    free = 2 * (sum(parts.values()) - parts["weights"])  # the weights are there already
    monkeypatch.setattr("support.fitting.free_memory", lambda device: free)
    assert fit_batch_size(tiny, config, world, torch.float32) == B
    free -= 1
    assert fit_batch_size(tiny, config, world, torch.float32) == max(1, B // 2)


@pytest.mark.parametrize(
    "limit, free",
    [("max", 8000 * 1024), ("5000000", 5000000 - 2000000 + 500000), (None, 8000 * 1024)],
)
def test_a_containers_limit_counts_as_free_memory(monkeypatch, tmp_path, limit, free):
    files = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"}
    if limit:
        files["sys/fs/cgroup/memory.max"] = limit
        files["sys/fs/cgroup/memory.current"] = "2000000"
        files["sys/fs/cgroup/memory.stat"] = "anon 1\ninactive_file 500000\n"
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr("support.device.Path", lambda path: tmp_path / path.removeprefix("/"))
    assert free_memory(torch.device("cpu")) == free


# -- signals, logs, and a loss that is not a number


def test_a_second_sigterm_changes_nothing_and_a_second_ctrl_c_ends_at_once():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = Stop(World("cpu"))
        stop.check()
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_ends_the_scoring_of_hellaswag_too(tiny):
    def stop():
        raise Interrupted

    example = dict(ctx="a b", endings=["c", "d", "e", "f"], label=0)
    with pytest.raises(Interrupted):
        hellaswag.evaluate(tiny, [example], "cpu", stop=SimpleNamespace(check=stop))


def test_a_resumed_log_has_no_step_twice_and_drops_a_half_written_line(tmp_path):
    log = Log(str(tmp_path), True)
    log.start({})
    for step in range(6):
        if step % 2 == 0:
            log.record(step, "val", val_loss=1.0)
        log.record(step, "train", loss=2.0)
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"type": "train", "st')
    log.resume(4, True, {})
    lines = [line.split() for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert [step for step, stream, _ in lines if stream == "train"] == ["0", "1", "2", "3"]
    assert [step for step, stream, _ in lines if stream == "val"] == ["0", "2", "4"]
    log.resume(4, False, {})
    assert "4 val" not in (tmp_path / "log.txt").read_text()


def test_a_loss_that_is_not_a_number_stops_the_run_and_says_where(shards, tmp_path):
    flags = "--learning-rate 1e30 --grad-clip 0 --eps 1e-30"
    said = train(shards, tmp_path / "log", flags, expect=1).stderr
    assert "the loss is nan" in said
    assert "sequences" in said
    assert "Traceback" not in said
    rerun = said.partition("To find the operation: ")[2].partition(". To go on")[0]
    python, *args = shlex.split(rerun)
    assert python == "python"
    assert args[0] == "-c"
    found = run_program([sys.executable, *args])
    assert found.returncode == 1
    assert "the first output that is not finite is that of transformer.h.0" in found.stderr


# -- mistakes: a sentence, no traceback


def test_all_problems_of_a_configuration_are_told_together_with_the_way_out(tmp_path):
    flags = "--n-head 3 --total-batch-size 100 --batch-size 7 --warmup-steps 99"
    done = train(tmp_path / "nowhere", tmp_path / "log", flags, expect=2)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for sentence in (
        "n_embd 16 does not divide by n_head 3: use 15 or 18",
        "total_batch_size 100 tokens is not a whole number of sequences of 16: use 96 or 112",
        "does not exist: make it with python fineweb.py",
        "warmup_steps 99 leaves nothing",
    ):
        assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 4


def fine_config(shards) -> TrainConfig:
    return TrainConfig(
        data_dir=str(shards),
        log_dir="nowhere",
        sequence_length=16,
        total_batch_size=64,
        max_steps=9,
        warmup_steps=1,
    )


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            dict(batch_size=3),
            "batch_size 3 does not divide the 4 sequences of each of 1 process(es): "
            "use one of 1, 2, 4",
        ),
        (
            dict(max_steps=0),
            "max_steps is 0: it must be at least 1",
        ),
        (
            dict(val_every=5, val_tokens=3),
            "val_tokens 3 is less than a sequence of 16: use at least 16",
        ),
        (
            dict(beta1=1.0),
            "beta1 is 1.0",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_would_do(shards, change, sentence):
    fine = fine_config(shards)
    assert check(fine, 1) == []
    [problem] = check(dataclasses.replace(fine, **change), 1)
    assert sentence in problem


def test_a_batch_that_cannot_be_split_over_the_processes_names_sizes_that_can(shards):
    [problem] = check(fine_config(shards), 3)
    assert "cannot be split over 3 processes" in problem
    assert "48 or 96" in problem


def test_a_typo_in_a_flag_is_one_message_and_exit_code_2():
    done = run_script("train_gpt2.py", "--max-stps", 3, expect=2)
    assert "--max-stps" in done.stderr
    assert "--max-steps" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_without_shards_is_one_sentence(tmp_path):
    done = train(tmp_path, tmp_path / "log", expect=1)
    assert "no train shards in" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_log_directory_that_holds_a_run_is_not_overwritten_unasked(shards, tmp_path):
    log_dir = tmp_path / "log"
    train(shards, log_dir, "--checkpoint-every 6")
    before = (log_dir / "log.txt").read_text()
    done = train(shards, log_dir, expect=2)
    assert "holds a run: add --resume auto" in done.stderr
    assert (log_dir / "log.txt").read_text() == before
    train(shards, log_dir, "--overwrite --max-steps 3")
    assert len(losses(log_dir)) == 3
    assert not checkpoint.checkpoints(log_dir)


def test_another_model_or_other_data_cannot_be_resumed(shards, tmp_path):
    train(shards, tmp_path / "log", "--checkpoint-every 3")
    done = train(shards, tmp_path / "log", "--resume auto --n-layer 3", expect=1)
    assert "n_layer 2 -> 3" in done.stderr
    assert "--init-from" in done.stderr
    next(shards.glob("*_train_000003.npy")).unlink()
    done = train(shards, tmp_path / "log", "--resume auto", expect=1)
    assert "put the shards back" in done.stderr


def test_the_command_to_resume_is_the_command_that_was_given(monkeypatch):
    def typed(line: str) -> None:
        monkeypatch.setattr("sys.argv", shlex.split(line)[1:])

    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    line = "python train_gpt2.py --sample-prompt 'a b' --resume x --max-steps=3"
    typed(line)
    assert command_to_resume() == f"{line} --resume auto"
    typed(f"{line} --resume auto")
    assert command_to_resume() == f"{line} --resume auto"
    assert parse_command_line(sys.argv[1:]).resume == "auto", "the last of a flag counts"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    one_node = "torchrun --standalone --nproc_per_node=8 train_gpt2.py"
    assert command_to_resume().startswith(one_node)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    two_nodes = "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d"
    assert command_to_resume().startswith(two_nodes)


# -- trackers


class Service:
    """What wandb and trackio have in common; remembers what it was told."""

    def __init__(self):
        self.told = []

    def init(self, **options):
        self.told.append(options)

    def log(self, values, step):
        self.told.append((step, values))

    def finish(self):
        self.told.append("finish")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_the_configuration_the_metrics_and_the_samples(name, tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, name, service)
    log = Log(str(tmp_path), True, name)
    log.start({"config": {"n_layer": 2}})
    log.record(3, "train", loss=4.5, lr=0.1)
    log.record(5, "samples", prompt="a", samples=["ab", "ac"])
    log.close()
    options, train_values, samples, finish = service.told
    assert options["config"] == {"n_layer": 2}
    assert options["name"] == tmp_path.name
    assert train_values == (3, {"train/loss": 4.5, "train/lr": 0.1})
    assert samples == (5, {"samples/prompt": "a", "samples/samples": "ab\n\n---\n\nac"})
    assert finish == "finish"


def test_tensorboard_gets_the_metrics_and_the_samples(shards, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = "--tracker tensorboard --val-every 3 --val-tokens 160 --sample-every 3"
    train(shards, tmp_path / "log", flags)
    events = reader.EventAccumulator(str(tmp_path / "log" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("val/val_loss")] == [0, 3, 6]
    values = [event.value for event in events.Scalars("train/loss")]
    assert values == pytest.approx(losses(tmp_path / "log"))
    expected = {"train/lr", "train/norm", "train/tokens_per_sec", "train/mfu"}
    assert expected <= set(events.Tags()["scalars"])
    assert "samples/samples/text_summary" in events.Tags()["tensors"]


def test_a_tracker_that_is_not_installed_is_a_problem_of_the_configuration(shards, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = dataclasses.replace(fine_config(shards), tracker="wandb")
    assert check(config, 1) == ["tracker wandb is not installed: pip install wandb"]


@pytest.mark.parametrize("rank, told", [(0, "val_tokens is 0"), (1, "")])
def test_of_several_ranks_the_first_tells_a_mistake_and_the_others_let_it_end_first(
    rank, told, monkeypatch, capsys
):
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "--val-tokens", "0"])
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    with pytest.raises(SystemExit, match="2"):
        main()
    assert told in (err := capsys.readouterr().err) and bool(err) == (rank == 0)
    assert bool(slept) == (rank == 1)

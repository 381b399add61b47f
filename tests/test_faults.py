"""Whatever fails, training ends well and nothing is lost: tests/contract.py has the contract."""

import builtins
import io
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import time
import traceback
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import (
    EVERY_TWO,
    POINTER,
    HerePool,
    command,
    documents,
    environment,
    losses,
    run_program,
    started,
    tiny_run,
    wait_for,
    weights_hash,
    write_shard,
)
from conftest import warm_train as train
from contract import RIGHT, TOLD, assert_told, call, contents, judge
from torch.utils._python_dispatch import TorchDispatchMode
from warm import two_ranks

import fineweb
from model import GPT, DataLoaderLite, GPTConfig
from support.base.errors import UserError
from support.base.files import hash_file
from support.machine.distributed import Stop, start_world
from support.run import checkpoint, divergence
from support.run.log import open_log, read_log, read_metrics, records_before
from support.run.resume import identify_data
from support.show.report import revision
from support.text.manifest import verify_shards
from support.text.token_files import open_data

RESUME = (*EVERY_TWO, "--resume", "auto")


@pytest.mark.parametrize("steps", [3, 6])
def test_a_run_at_or_past_max_steps_is_done_and_touches_nothing(corpus, run_dir, steps):
    before = contents(run_dir)
    done = train(corpus, run_dir, *RESUME, "--max-steps", steps)
    assert done.returncode == 0 and "done: " in done.stdout and "nothing is left" in done.stdout
    assert contents(run_dir) == before


def test_a_second_run_in_the_same_log_dir_is_refused_while_the_first_goes_on(corpus, tmp_path):
    log_dir = tmp_path / "log"
    flags = ("--max-steps", 100000)
    typed = command("train_gpt2.py", *tiny_run(corpus, log_dir, "", *flags))
    with started(typed) as first:
        wait_for(log_dir / "log.txt", first)
        done = train(corpus, log_dir, *flags, "--overwrite")
        assert_told(done, "another run", str(log_dir), "--log-dir")
        assert first.poll() is None
        while not (log_dir / "log.txt").read_text():  # before its first step it has nothing to save
            time.sleep(0.01)
            assert first.poll() is None
    assert losses(log_dir), "no step is missing or there twice"
    assert checkpoint.checkpoints(log_dir), "it saved when it was told to end"


def test_a_run_needs_no_home_no_utf8_no_git_and_nobody_who_reads_its_output(corpus, tmp_path):
    env = dict(LANG="C", LC_ALL="C", PYTHONIOENCODING="ascii", TERM="dumb", HOME="/nonexistent")
    env |= dict(TMPDIR="/nonexistent", PATH="/nonexistent")
    flags = ("--max-steps", 30, "--val-every", 30, "--val-tokens", 160, "--checkpoint-every", 30)
    args = tiny_run(corpus, tmp_path / "log", "", *flags, "--sample-prompt", "ä")
    process = subprocess.Popen(
        command("train_gpt2.py", *args),
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 0)
    assert len(losses(tmp_path / "log")) == 30
    assert checkpoint.checkpoints(tmp_path / "log")


def test_a_file_system_that_refuses_what_is_not_needed_is_told_once_and_holds_all(corpus, tmp_path):
    library = tmp_path / "refuse.so"
    source = Path(__file__).with_name("refuse.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    (tmp_path / "a.txt").write_text("one two three " * 40)
    data = ("--source", tmp_path / "a.txt", "--data-dir", tmp_path / "data", "--workers", 1)
    for script, args in (
        ("train_gpt2.py", tiny_run(corpus, tmp_path / "log", "", *EVERY_TWO)),
        ("fineweb.py", data),
    ):
        done = run_program(command(script, *args), LD_PRELOAD=str(library))
        assert done.returncode == 0, done.stderr
        told = [line for line in done.stderr.splitlines() if "this file system refuses" in line]
        words = ("fsync", "chmod", "locks") if script == "train_gpt2.py" else ("locks",)
        refused = [re.search(r"refuses (\w+)", line)[1] for line in told]
        assert sorted(refused) == sorted(words)
    assert not checkpoint.damage_of(tmp_path / "log" / "ckpt_000006")
    assert "as they were written" in verify_shards(tmp_path / "data")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_scripts_run_with_closed_streams_and_write_nothing_of_them_elsewhere(
    corpus, finished, tmp_path, closed
):
    scripts = {
        "train_gpt2.py": tiny_run(corpus, tmp_path / "log", "--max-steps 3 --checkpoint-every 3"),
        "sample.py": ["--model", finished / "ckpt_000006", "--prompt", "a", "--device", "cpu"],
        "fineweb.py": ["--source", "stdlib", "--max-tokens", 9000, "--data-dir", tmp_path / "d"],
    }
    for script, args in scripts.items():
        typed = shlex.join(command(script, *args))
        done = run_program(["sh", "-c", f"{typed} {closed}"], cwd=tmp_path)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert not checkpoint.damage_of(tmp_path / "log" / "ckpt_000003")
    assert "as they were written" in verify_shards(tmp_path / "d")


def test_a_save_that_is_refused_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    before = contents(save(tmp_path, step=1))

    def save_nothing(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", save_nothing)
    with pytest.raises(UserError, match=r"No space left on device.*make room"):
        save(tmp_path, step=2)
    assert [contents(path) for path in tmp_path.iterdir()] == [before]


def test_a_state_that_no_resume_could_read_is_told_when_it_is_saved(tmp_path, tiny):
    """torch.save takes NumPy's scalars, and torch.load refuses them: it may be too late then."""
    optimizers = tiny.configure_optimizers()
    writer = checkpoint.Writer(Stop(start_world("cpu")), tmp_path)
    with pytest.raises(
        UserError, match=r"ckpt_000001 cannot be written \(Weights only load failed"
    ):
        writer.save(tiny, optimizers, {"step": 1, "rms": np.float64(1)}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("background", [set(), {"cpu"}])
def test_an_error_of_ones_own_in_saving_keeps_its_traceback_and_leaves_nothing(
    tmp_path, monkeypatch, tiny, background
):
    def broken(self, name, x):
        raise RuntimeError("my own")

    writer = checkpoint.Writer(Stop(start_world("cpu")), tmp_path)
    monkeypatch.setattr(checkpoint, "SAVES_IN_BACKGROUND", background)
    monkeypatch.setattr(GPT, "without_padding", broken)
    with pytest.raises(RuntimeError, match=r"^my own$") as raised:
        writer.save(tiny, tiny.configure_optimizers(), {"step": 1}, {})
        assert background
        futures.wait([writer.begun])
        assert writer.stop.problem == "my own", "the run ends before its next save"
        writer.wait()
    assert raised.traceback[-1].name == "broken" and not list(tmp_path.iterdir())


def test_what_only_looks_like_our_own_stays(corpus, run_dir):
    theirs = [run_dir / ".ckpt_good", run_dir / "ckpt_000100"]
    for path in theirs:
        path.mkdir()
        (path / "weights").write_text("theirs")
    (run_dir / ".ckpt_000008.tmp").mkdir()
    train(corpus, run_dir, "--overwrite")
    assert theirs[0].exists() and not (run_dir / ".ckpt_000008.tmp").exists()
    assert (run_dir / "abandoned_ckpt_000100" / "weights").read_text() == "theirs"
    assert not (run_dir / "ckpt_000002").exists(), "that of the old run"


@pytest.mark.parametrize("name", ["log.txt", "report.md", "loss.png"])
def test_a_file_of_another_program_is_not_written_over(corpus, tmp_path, name, outcome):
    (tmp_path / name).write_text("0 val 10.9511\n")  # build-nanogpt's folder is `log`, too
    done = train(corpus, tmp_path)
    outcome("logs", f"another program's {name}", judge(done, "holds a run"))
    assert done.returncode == 2 and (tmp_path / name).read_text() == "0 val 10.9511\n"


class Reads(TorchDispatchMode):
    """Counts how often the CPU asks for a value: it would wait for a GPU each time."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_weights_that_are_not_finite_are_not_saved(corpus, run_dir, monkeypatch, tiny):
    before = contents(run_dir / "ckpt_000006")
    tiny.transformer.ln_f.bias.data[0] = torch.inf  # the last one
    with Reads() as reads:
        name = divergence.find_not_finite(tiny)
    assert name == "transformer.ln_f.bias" and reads.count <= 1
    monkeypatch.setattr(divergence, "find_not_finite", lambda model: name)
    args = tiny_run(corpus, run_dir, "--max-steps 7 --checkpoint-every 7 --resume auto")
    done = call("train_gpt2.py", *args)
    assert_told(done, "ln_f.bias has values that are not finite", "--resume auto --find-nan")
    assert read_metrics(run_dir / "metrics.jsonl")[-1]["type"] == "diverged"
    assert contents(run_dir / "ckpt_000006") == before and not (run_dir / "ckpt_000007").exists()


def test_a_validation_loss_that_is_not_finite_stops_the_run(corpus, tmp_path):
    flags = ("--max-steps", 1, "--warmup-steps", 0, "--val-every", 1, "--val-tokens", 160)
    blow_up = ("--learning-rate", 1e12, "--weight-decay", 1e12)
    done = train(corpus, tmp_path / "log", *flags, *blow_up)
    assert_told(done, "validation loss", "--learning-rate")
    assert read_metrics(tmp_path / "log" / "metrics.jsonl")[-1]["type"] == "diverged"


def test_a_start_that_fails_leaves_the_run_that_it_would_overwrite(corpus, run_dir, tmp_path):
    before = contents(run_dir)
    for place in ("--hellaswag-path", "--init-from"):
        flags = ("--overwrite", "--hellaswag-every", 5, place, tmp_path / "nowhere")
        assert_told(train(corpus, run_dir, *flags), "nowhere")
        assert contents(run_dir) == before


# -- checkpoints


def find(log_dir: Path):
    said: list[str] = []
    candidates = checkpoint.checkpoints(log_dir)[::-1]
    world = start_world("cpu")
    world.say = said.append
    return checkpoint.find(candidates, world), said


FILES = ["config.json", "model.safetensors", "training_state.pt", "checksums.json"]
FILES += ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(run_dir, name, outcome):
    file = run_dir / "ckpt_000006" / name
    if name == "checksums.json":  # nobody compares the hash of the model card
        hashes = json.loads(file.read_bytes())
        file.write_text(json.dumps({file: hashes[file] for file in hashes if file != "README.md"}))
    data = file.read_bytes()
    spoilt = {"missing": None, "empty": b"", "nothing in it": b"{}", "a list": b"[]"}
    spoilt |= {"half": data[: len(data) // 2], "all but one byte": data[:-1]}
    spoilt |= {"one byte more": data + b"x", "zeros": bytes(len(data))}
    for bit in (0, 8 * len(data) - 1, *random.Random(name).sample(range(8 * len(data)), 4)):
        spoilt[f"bit {bit}"] = flip(data, bit)
    for how, content in spoilt.items():
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        found, said = find(run_dir)
        assert found.path.name == "ckpt_000004" and found.state["step"] == 4, (name, how)
        assert len(said) == 1 and "ckpt_000006" in said[0], (name, how)
        assert name in said[0] or name == "checksums.json", (name, how)
        assert [path.name for path in found.damaged] == ["ckpt_000006"]
        outcome("checkpoints", f"{name}: {how}", RIGHT)
    file.write_bytes(data)
    assert find(run_dir)[0].path.name == "ckpt_000006"


def test_a_damaged_checkpoint_is_moved_aside_and_its_run_goes_on(corpus, finished, run_dir):
    file = run_dir / "ckpt_000006" / "training_state.pt"
    file.write_bytes(file.read_bytes()[:-1])
    spoilt = contents(run_dir / "ckpt_000006")
    before = contents(run_dir)
    assert train(corpus, run_dir.parent / "mine", "--resume", run_dir).returncode == 0
    assert contents(run_dir) == before, "it is another's"
    done = train(corpus, run_dir, *RESUME)
    assert done.returncode == 0 and "ckpt_000006" in done.stdout
    assert contents(run_dir / "damaged_ckpt_000006") == spoilt
    assert weights_hash(run_dir / "ckpt_000006") == weights_hash(finished / "ckpt_000006")
    assert losses(run_dir) == losses(finished)


def test_what_a_resumed_run_leaves_behind_is_moved_aside_not_deleted(corpus, run_dir):
    later = {step: contents(run_dir / f"ckpt_{step:06d}") for step in (4, 6)}
    resume = ("--resume", run_dir / "ckpt_000002", "--max-steps", 3)
    for n in (1, 2):
        done = train(corpus, run_dir, *EVERY_TWO, *resume)
        assert done.returncode == 0, done.stderr
        assert [p.name for p in checkpoint.checkpoints(run_dir)] == ["ckpt_000002", "ckpt_000003"]
        assert (run_dir / "abandoned_ckpt_000003").exists() == (n == 2)
    for step, files in later.items():
        assert contents(run_dir / f"abandoned_ckpt_{step:06d}") == files


@pytest.mark.parametrize("name", ["training_state.pt", "model.safetensors", "checksums.json"])
def test_a_file_that_cannot_be_read_now_is_no_damage(run_dir, monkeypatch, name):
    plain_open = io.open

    def failing(path, *args, **kwargs):
        if str(path).endswith(f"ckpt_000006/{name}"):
            raise OSError(5, "I/O error")
        return plain_open(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", failing)
    monkeypatch.setattr(io, "open", failing)
    with pytest.raises(UserError, match="ckpt_000006"):
        find(run_dir)


def test_a_run_from_elsewhere_does_not_mix_with_the_one_here(corpus, finished, run_dir):
    elsewhere = ("--resume", finished / "ckpt_000004", "--checkpoint-every", 6)
    before = contents(run_dir)
    assert_told(train(corpus, run_dir, *elsewhere), "--overwrite")
    assert contents(run_dir) == before
    done = train(corpus, run_dir, *elsewhere, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in checkpoint.checkpoints(run_dir)] == ["ckpt_000006"]
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [r["step"] for r in records if r["type"] == "train"] == [4, 5]
    assert weights_hash(run_dir / "ckpt_000006") == weights_hash(finished / "ckpt_000006")


def test_a_finished_run_without_checkpoints_is_not_trained_again(corpus, run_dir):
    for path in checkpoint.checkpoints(run_dir):
        shutil.rmtree(path)
    before = contents(run_dir)
    done = train(corpus, run_dir, *RESUME)
    assert_told(done, "holds a finished run without checkpoints", "--overwrite instead of")
    assert contents(run_dir) == before
    assert train(corpus, run_dir, *RESUME, "--max-steps", 7).returncode == 0, "it had not ended"


def test_a_checkpoint_set_aside_does_not_go_on_in_the_log_of_what_came_after(corpus, run_dir):
    assert train(corpus, run_dir, *EVERY_TWO, "--resume", run_dir / "ckpt_000002").returncode == 0
    aside = run_dir / "abandoned_ckpt_000004"
    before = contents(run_dir)
    told = train(corpus, run_dir, *EVERY_TWO, "--resume", aside)
    assert_told(told, "the run has gone on without it, so choose another --log-dir")
    assert contents(run_dir) == before


def test_a_run_that_ends_earlier_than_planned_is_evaluated_at_its_end(corpus, run_dir):
    shutil.rmtree(run_dir / "ckpt_000006")
    flags = ("--max-steps", 4, "--val-every", 3)
    assert train(corpus, run_dir, *RESUME, *flags).returncode == 0
    steps = [r["step"] for r in read_metrics(run_dir / "metrics.jsonl") if r["type"] == "val"]
    assert steps[-1] == 4


def test_when_all_checkpoints_are_damaged_nothing_is_touched(corpus, run_dir):
    *others, newest = checkpoint.checkpoints(run_dir)
    (newest / "model.safetensors").write_bytes(b"")
    told = train(corpus, run_dir, *EVERY_TWO, "--resume", newest)
    assert_told(told, "is not what was written", f"the newest other one: --resume {others[-1]}")
    for path in others:
        (path / "model.safetensors").write_bytes(b"")
    before = contents(run_dir)
    done = train(corpus, run_dir, *RESUME)
    assert_told(done, "start over, with --overwrite and without --resume")
    assert "--init-from" not in done.stderr, "no weights are whole"
    assert contents(run_dir) == before


def test_resume_takes_the_newest_whole_checkpoint_of_another_log_dir(corpus, run_dir, tmp_path):
    *_, before, newest = checkpoint.checkpoints(run_dir)
    (newest / "model.safetensors").write_bytes(b"")
    weights = weights_hash(before)
    done = train(corpus, tmp_path / "new", *EVERY_TWO, "--max-steps", 5, "--resume", run_dir)
    assert f"resuming from {before}" in done.stdout, done.stderr
    assert weights_hash(before) == weights
    assert train(corpus, run_dir, *EVERY_TWO, "--resume", f"{run_dir}/").returncode == 0
    assert not checkpoint.damage_of(newest), "its own log_dir is as good as auto"


@pytest.mark.parametrize("version", [{}, {"version": 1 + checkpoint.VERSION}])
def test_a_checkpoint_of_another_version_offers_its_weights(corpus, run_dir, version):
    last = run_dir / "ckpt_000006"
    (last / "checksums.json").unlink()  # the first version had none
    state = torch.load(last / "training_state.pt", weights_only=True)
    del state["version"]
    torch.save(state | version, last / "training_state.pt")
    told = f"version {version.get('version', 1)}"
    assert_told(train(corpus, run_dir, *RESUME), told, f"--init-from {last}")
    done = train(corpus, run_dir.parent / "tuned", "--init-from", last)
    assert done.returncode == 0 and losses(run_dir.parent / "tuned")[0] < losses(run_dir)[0]


# -- other data, damaged logs, a full disk


def test_shards_that_are_only_pointers_of_git_lfs_are_named(corpus, tmp_path):
    shards = shutil.copytree(corpus, tmp_path / "shards")
    (shards / "toy_train_000002.npy").write_bytes(POINTER)
    assert_told(train(shards, tmp_path / "log"), "toy_train_000002.npy is a pointer of Git LFS")


def test_other_shards_than_the_run_began_with_are_refused(corpus, run_dir, tmp_path):
    shards = shutil.copytree(corpus, tmp_path / "shards")
    write_shard(shards / "toy_train_000003.npy", documents(777, seed=9))  # of the same size
    before = contents(run_dir)
    done = train(shards, run_dir, *RESUME, "--max-steps", 9)
    assert_told(done, str(shards), "changed: ['toy_train_000003.npy']", "--init-from")
    done = train(shards, run_dir, *RESUME)
    assert_told(done, "changed: ['toy_train_000003.npy']")  # though the run is finished
    assert contents(run_dir) == before


N = 100_000  # tokens
SPOILT = {  # the places of tokens that change, and whether a resume notices
    "a_train_000001.bin": {0: True, 4095: True, 5000: False, N // 2: False, N - 1: True},
    "a_val_000000.bin": {0: True, 5000: False, N - 1: True},
}


def test_a_shard_is_known_by_its_size_and_some_of_its_blocks(tmp_path):
    def refused(then: dict, val_every: int = 1) -> str:
        data = open_data(tmp_path, "train", *(["val"] if val_every else []))
        resumed_from = checkpoint.Checkpoint(Path("ckpt"), {"data": then}, [])
        try:
            kept = identify_data(data, resumed_from)
        except UserError as error:
            return str(error)
        assert kept.keys() == {"train", "val"}, "what is not in use is kept, too"
        return ""

    for name in SPOILT:
        np.arange(N).astype("<u2").tofile(tmp_path / name)  # nanoGPT's, without a header
    whole = identify_data(open_data(tmp_path, "train", "val"), None)
    assert not refused(whole) and not refused({"train": whole["train"]})
    for name, places in SPOILT.items():
        content = (tmp_path / name).read_bytes()
        for place, noticed in places.items():
            (tmp_path / name).write_bytes(flip(content, 16 * place))
            assert (f"changed: ['{name}']" in refused(whole)) == noticed, (name, place)
            assert bool(refused(whole, val_every=0)) == (noticed and "train" in name)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "a_train_000002.bin").write_bytes(content)
    assert "new: ['a_train_000002.bin']): move the new shards away" in refused(whole)
    (tmp_path / "a_train_000001.bin").unlink()
    assert "missing: ['a_train_000001.bin']" in (refusal := refused(whole))
    assert "put the shards back" in refusal


def test_a_resume_says_whether_the_machine_and_the_data_are_those_of_before(corpus, run_dir):
    last = run_dir / "ckpt_000006"
    state = torch.load(last / "training_state.pt", weights_only=True)
    state["machine"] |= {"code": "an older one", "processes": 8, "threads": 64}
    torch.save(state, last / "training_state.pt")
    hashes = {name: hash_file(last / name) for name in FILES if name != "checksums.json"}
    (last / "checksums.json").write_text(json.dumps(hashes))
    done = train(corpus, run_dir, "--max-steps", 6, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    code = f"code an older one -> {revision()}"
    words = f"from the uninterrupted run's: {code}, processes 8 -> 1, threads 64 -> 1"
    assert words in done.stdout


@pytest.mark.parametrize("where", [0, 2, -1])
@pytest.mark.parametrize("line", [b"", b"123", b'{"type": "tr', b"\xff\xfe\x00", bytes(4096)])
def test_a_bad_line_of_a_log_is_left_out(tmp_path, capsys, line, where, outcome):
    log = open_log(tmp_path, [{"type": "run"}])
    for step in range(4):
        log.record(step, "train", loss=2.0)
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines()
    lines[where] = line
    metrics.write_bytes(b"\n".join(lines) + b"\n")
    open_log(tmp_path, [*records_before(tmp_path, 4, True), {"type": "resume", "step": 4}])
    assert "damaged lines left out: 1" in capsys.readouterr().out
    assert len(read_metrics(metrics)) == 5 and read_log(tmp_path / "log.txt")
    outcome("logs", f"line {where} is {line[:40]!r}", RIGHT)


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(corpus, run_dir, outcome):
    sizes = {path.name: path.stat().st_size for path in (run_dir / "ckpt_000006").iterdir()}
    flags = ("--checkpoint-every", 1, "--keep-checkpoints", 9, "--max-steps", 7)
    before = {step: contents(run_dir / f"ckpt_{step:06d}") for step in (2, 4, 6)}
    for limit in (2500, 50_000, sizes["model.safetensors"] - 1, sizes["training_state.pt"] - 1):
        done = train(corpus, run_dir, *flags, "--resume", "auto", largest_file=limit)
        ended = judge(done, str(run_dir))
        outcome("full disk and permissions", f"files of at most {limit} bytes", ended)
        assert done.returncode == 1
        assert {s: contents(run_dir / f"ckpt_{s:06d}") for s in (2, 4, 6)} == before
        assert not (run_dir / "ckpt_000007").exists()
    assert train(corpus, run_dir, *flags, "--resume", "auto").returncode == 0
    assert len(losses(run_dir)) == 7


def test_a_disk_that_is_full_of_records_is_one_sentence(corpus, tmp_path):
    done = train(corpus, tmp_path, "--max-steps", 100, largest_file=6000)
    assert_told(done, f"{tmp_path} cannot be written (File too large)", "resume with --resume auto")
    assert done.stderr.count("\n") == 1


def save(log_dir: Path, step: int, weight: float = 0.0, keep: int = 0) -> Path:
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=2))
    model.transformer.wte.weight.data[0, 0] = weight
    writer = checkpoint.Writer(Stop(start_world("cpu")), log_dir, keep)
    writer.save(model, model.configure_optimizers(), {"step": step}, {})
    return writer.wait()


# -- kills at every write, damaged shards, ranks that fail


def kill_everywhere(place: Path, action, start: Path | None = None):
    """Runs action(folder) in forks that die before its first, second, ... write or rename.

    Each folder is new, or a copy of `start`. Yields each, and whether `action` came to its end.
    """
    event = 0
    code = 9
    while code == 9:
        event += 1
        folder = place / str(event)
        if start:
            shutil.copytree(start, folder)
        child = os.fork()
        if child == 0:
            try:
                die_at(event)
                action(folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 9), "neither killed nor at its end"
        yield folder, code == 0
        shutil.rmtree(folder)
    assert event > 14, "it was killed at many places"


def die_at(event: int) -> None:
    """Makes this process count what it does to a disk, and end at the event-th."""
    count = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == event:
                os._exit(9)
            return function(*args, **kwargs)

        return call

    for name in ("rename", "replace", "rmdir", "unlink", "mkdir", "write"):
        setattr(os, name, counted(getattr(os, name)))
    os.fsync = counted(lambda descriptor: None)  # slow, and no power fails here
    torch.save = counted(torch.save)
    safetensors.torch.serialize_file = counted(safetensors.torch.serialize_file)


@pytest.mark.parametrize("step, beside", [(2, "cuda"), (1, "cuda"), (2, "cpu")])
def test_a_save_killed_at_any_write_leaves_the_old_checkpoint_or_the_new(
    tmp_path, monkeypatch, step, beside, outcome
):
    """step 2: a new checkpoint; step 1: one that replaces another of the same name."""
    monkeypatch.setattr(checkpoint, "SAVES_IN_BACKGROUND", {beside})
    old = tmp_path / "old"
    save(old, step=1)

    def save_again(log_dir: Path) -> None:
        save(log_dir, step, weight=1.0, keep=1)  # removes the old one

    for log_dir, ended in kill_everywhere(tmp_path, save_again, old):
        assert not any(map(checkpoint.damage_of, checkpoint.checkpoints(log_dir)))
        checkpoint.remove_leftovers(log_dir)
        found, said = find(log_dir)
        if found is None:  # it died between the two renames
            assert step == 1 and not checkpoint.damage_of(log_dir / "abandoned_ckpt_000001")
        else:
            assert found.state["step"] in (1, step) and not said, log_dir.name
        assert not list(log_dir.glob(".ckpt*"))
        if ended:
            assert found.state["step"] == step
            assert GPT.from_pretrained(found.path).transformer.wte.weight[0, 0] == 1.0
        outcome("kills", f"a save of step {step}, {beside}, event {log_dir.name}", RIGHT)


@pytest.mark.parametrize("flags", [[], ["--vocab-size", 270]], ids=["gpt2", "own"])
def test_shards_killed_at_any_write_are_those_of_a_run_left_alone(
    tmp_path, monkeypatch, outcome, flags
):
    """A shard for validation, then training's; the vocabulary; the manifest between them."""
    monkeypatch.setattr(fineweb, "start_pool", HerePool)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    draw = random.Random(0)
    source = tmp_path / "a.jsonl"
    with open(source, "w") as f:
        for _ in range(30):
            f.write(json.dumps({"text": "".join(draw.choices("etaoin ", k=100))}) + "\n")

    def make(folder: Path) -> None:
        where = ["--source", source, "--data-dir", folder, "--shard-size", 700]
        done = call("fineweb.py", *where, *flags)
        assert done.returncode == 0, done

    make(tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    assert ("tokenizer.json" in whole) == bool(flags) and len(whole) >= 4
    for folder, _ in kill_everywhere(tmp_path, make):
        written = contents(folder) if folder.exists() else {}
        for name in written.keys() & whole.keys() - {"manifest.json"}:
            assert written[name] == whole[name], (folder.name, name)
        make(folder)
        assert contents(folder) == whole, folder.name
        outcome("kills", f"shards, event {folder.name}", RIGHT)


def test_a_damaged_shard_is_a_sentence_or_gives_the_tokens_that_it_has(tmp_path, outcome):
    path = tmp_path / "x_train_000001.npy"
    write_shard(path, documents(300, seed=0))
    whole = path.read_bytes()
    cases = {"zeros": bytes(500)}
    draw = random.Random(0)
    for i in range(50):
        cases[f"flip {i}"] = flip(whole, draw.randrange(8 * 140))  # the header, the first tokens
        cases[f"cut {i}"] = whole[: draw.randrange(len(whole))]
    refused = 0
    for name, content in cases.items():
        path.write_bytes(content)
        try:
            loader = DataLoaderLite(tmp_path, "train", 2, 16, shuffle=True)
            for _ in range(20):
                x, _ = loader.next_batch()
                assert 0 <= x.min() and x.max() < 50257, name
            outcome("shards and manifests", f"a shard: {name}", RIGHT)
        except UserError as error:
            refused += 1
            outcome("shards and manifests", f"a shard: {name}", TOLD)
            assert path.name in str(error) or "tokens" in str(error), (name, error)
    assert refused > 60


@pytest.mark.parametrize("size, wrong", [(None, 2), (0, 1), (200, 1), (700, 1)])
def test_a_shard_that_shrinks_or_vanishes_during_a_run_is_an_ordinary_error(tmp_path, size, wrong):
    for i in (1, 2):
        write_shard(tmp_path / f"x_train_00000{i}.npy", documents(2000, seed=0))
    loader = DataLoaderLite(tmp_path, "train", 1, 16)
    loader.wait()
    for path in tmp_path.glob("*"):
        if size is None:  # the first one is open already, and stays readable
            path.unlink()
        else:
            os.truncate(path, size)
    with pytest.raises(UserError, match=rf"_00000{wrong}.npy cannot be read .* put the file back"):
        for _ in range(200):
            loader.next_batch()


FAIL = """
import os, signal, time
from support.base.errors import UserError
from support.base.console import run_script
from support.machine.distributed import World, start_world

def main(_args):
    with start_world("cpu") as world:
        world.any(False)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)
        raise UserError("rank 0 has a reason")

run_script(main, at_once=True)
"""


def test_a_rank_that_fails_says_so_and_is_gone_while_its_peer_stands_still(warm, tmp_path):
    """A collective on the way out of an error would wait for the stopped peer."""
    (tmp_path / "fail.py").write_text(FAIL)
    pid = warm.start("fail.py", root=tmp_path, **two_ranks())
    end = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "rank 0 waits for its peer"
        time.sleep(0.05)
    os.killpg(pid, 0)  # raises an error if the peer is gone, too
    done = warm.kill(pid)
    assert_told(done, "rank 0 has a reason")


BESIDE = "tests/beside.py"  # a thread writes, and a failure shows at the next update or the end
SAVES = [("train_gpt2.py", 99, 2), (BESIDE, 99, 1), (BESIDE, 99, 2), (BESIDE, 8, 2)]


@pytest.mark.parametrize("script, steps, ranks", SAVES)
def test_a_failed_save_ends_all_ranks_in_a_sentence(warm, corpus, run_dir, script, steps, ranks):
    before = {path: contents(path) for path in checkpoint.checkpoints(run_dir)}
    flags = f"--max-steps {steps} --checkpoint-every 8 --resume auto"
    slow = "--total-batch-size 1024 --batch-size 1"  # many checks an update
    options = dict(largest_file=50_000, **(two_ranks() if ranks == 2 else {}))
    done = warm.run(script, *tiny_run(corpus, run_dir, f"{flags} {slow}"), **options)
    told = ["rank 1: another process has failed"] if ranks == 2 else []
    assert_told(done, "ckpt_000008 cannot be written", "older files are intact", *told)
    assert "done:" not in done.stdout and len(losses(run_dir)) < 16, "no later save finds it"
    assert {path: contents(path) for path in checkpoint.checkpoints(run_dir)} == before

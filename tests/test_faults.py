"""Every failure ends well: a right result, or a sentence and a non-zero exit; nothing is lost.

The cases are made from fixed seeds. Where a whole process matters, it is forked from a warm one
(tests/warm.py). `make torture` repeats the random parts for long (tests/test_torture.py).
"""

import dataclasses
import io
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import time
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import (
    EVERY_TWO,
    TINY,
    command,
    documents,
    environment,
    losses,
    weights_hash,
    write_shard,
)
from conftest import warm_train as train
from contract import RIGHT, TOLD, Done, contents, judge
from test_fineweb import HerePool, make, prose, write_jsonl

import config
import fineweb
from model import GPT, DataLoaderLite, GPTConfig
from support import checkpoint, common, filters
from support.common import UserError
from support.distributed import World
from support.log import Log
from support.optimizer_state import load_optimizers
from support.records import read_log, read_metrics


def assert_told(done: Done, *words: str) -> None:
    """It failed as it should: a sentence, no traceback."""
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr and done.stderr.strip(), done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


# -- 1, 3, 5, 6: runs that would spoil or lose something


def test_a_run_that_is_past_max_steps_is_done_and_touches_nothing(warm, corpus, run_dir):
    before = contents(run_dir)
    done = train(warm, corpus, run_dir, *EVERY_TWO, "--resume", "auto", "--max-steps", 3)
    assert done.returncode == 0 and "nothing is left to do" in done.stdout
    assert contents(run_dir) == before


def test_a_second_run_in_the_same_log_dir_is_refused_while_the_first_goes_on(corpus, tmp_path):
    log_dir = tmp_path / "log"
    flags = (*TINY, "--data-dir", corpus, "--log-dir", log_dir, "--max-steps", 100000)
    first = subprocess.Popen(
        command("train_gpt2.py", *flags),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while "step    10" not in first.stdout.readline():
            assert first.poll() is None
        again = command("train_gpt2.py", *flags, "--resume", "auto")
        second = subprocess.run(again, env=environment(), capture_output=True, text=True)
        assert second.returncode == 1 and "Traceback" not in second.stderr
        assert f"another run (process {first.pid}" in second.stderr
    finally:
        first.kill()
        first.communicate()
    assert losses(log_dir), "no step twice, none missing"


def test_training_goes_on_in_silence_when_nobody_reads_its_output(corpus, tmp_path):
    flags = (*TINY, "--data-dir", corpus, "--log-dir", tmp_path / "log", "--max-steps", 30)
    typed = (
        " ".join(map(str, command("train_gpt2.py", *flags))) + " | head -3; exit ${PIPESTATUS[0]}"
    )
    done = subprocess.run(["bash", "-c", typed], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert len(losses(tmp_path / "log")) == 30


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (1, 2), (0, 1, 2)])
def test_closed_streams_do_not_harm_a_run(warm, corpus, tmp_path, closed, outcome):
    flags = ("--checkpoint-every", 6, "--val-every", 3, "--val-tokens", 160)
    done = train(warm, corpus, tmp_path / "log", *flags, closed=closed)
    outcome("streams and environment", f"training with {closed} closed", judge(done))
    assert done.returncode == 0
    assert len(losses(tmp_path / "log")) == 6
    assert checkpoint.checkpoints(tmp_path / "log")


def test_weights_that_are_not_finite_are_not_saved_and_the_last_finite_ones_stay(
    warm, corpus, run_dir
):
    before = weights_hash(run_dir / "ckpt_000006")
    blow_up = ("--learning-rate", 1e39, "--grad-clip", 0, "--max-steps", 12)
    flags = ("--checkpoint-every", 1, "--keep-checkpoints", 1)
    done = train(warm, corpus, run_dir, *flags, *blow_up, "--resume", "auto")
    assert_told(done)
    assert "not finite" in done.stderr or "the loss is" in done.stderr
    assert weights_hash(run_dir / "ckpt_000006") == before


def test_a_validation_loss_that_is_not_finite_stops_the_run(warm, corpus, tmp_path):
    blow_up = ("--learning-rate", 1e39, "--grad-clip", 0, "--max-steps", 1, "--warmup-steps", 0)
    done = train(warm, corpus, tmp_path / "log", *blow_up, "--val-every", 1, "--val-tokens", 160)
    assert_told(done, "the validation loss is nan", "last good checkpoint: none yet")


# -- 2, 4, 7: what is wrong with a checkpoint


def find(log_dir: Path):
    """What --resume auto finds, and what it says."""
    said: list[str] = []
    candidates = checkpoint.checkpoints(log_dir)[::-1]
    return checkpoint.find(candidates, World("cpu"), said.append), said


FILES = [
    "config.json",
    "model.safetensors",
    "training_state.pt",
    "checksums.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
]


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def damages(data: bytes, draw: random.Random) -> dict[str, bytes | None]:
    """Ways to spoil a file; None: it is gone."""
    spoilt: dict[str, bytes | None] = {
        "missing": None,
        "empty": b"",
        "one byte": data[:1],
        "half": data[: len(data) // 2],
        "all but one byte": data[:-1],
        "one byte more": data + b"x",
        "twice": data + data,
        "zeros": bytes(len(data)),
        "a list": b"[]",
        "a number": b"7",
        "null": b"null",
        "nothing in it": b"{}",
        "a byte order mark": b"\xef\xbb\xbf" + data,
        "binary": draw.randbytes(200),
        "first bit": flip(data, 0),
        "last bit": flip(data, 8 * len(data) - 1),
    }
    for i in range(14):
        spoilt[f"bit {i}"] = flip(data, draw.randrange(8 * len(data)))
    return spoilt


def same_json(a: bytes | None, b: bytes) -> bool:
    try:
        return json.loads(a or b"") == json.loads(b)
    except ValueError:
        return False


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_a_checkpoint_is_named_and_the_one_before_is_taken(
    run_dir, name, outcome
):
    file = run_dir / "ckpt_000006" / name
    content = file.read_bytes()
    for how, spoilt in damages(content, random.Random(name)).items():
        file.unlink(missing_ok=True)
        if spoilt is not None:
            file.write_bytes(spoilt)
        if name == "checksums.json" and same_json(spoilt, content):
            continue
        found, said = find(run_dir)
        assert found.path.name == "ckpt_000004" and found.state["step"] == 4, (name, how)
        assert len(said) == 1 and "ckpt_000006" in said[0], (name, how)
        assert name in said[0] or name == "checksums.json", (name, how)
        assert [path.name for path in found.damaged] == ["ckpt_000006"]
        outcome("checkpoints", f"{name}: {how}", RIGHT)
    file.write_bytes(content)
    assert find(run_dir)[0].path.name == "ckpt_000006"


def test_a_damaged_checkpoint_is_moved_aside_and_a_resumed_run_is_the_uninterrupted_one(
    warm, corpus, finished, run_dir
):
    for name in ("config.json", "training_state.pt"):
        file = run_dir / "ckpt_000006" / name
        file.write_bytes(file.read_bytes()[:-1])
    spoilt = contents(run_dir / "ckpt_000006")
    done = train(warm, corpus, run_dir, *EVERY_TWO, "--resume", "auto")
    assert done.returncode == 0 and "skipping" in done.stdout
    assert contents(run_dir / "damaged_ckpt_000006") == spoilt
    assert weights_hash(run_dir / "ckpt_000006") == weights_hash(finished / "ckpt_000006")
    assert losses(run_dir) == losses(finished)


def test_what_a_resumed_run_leaves_behind_is_moved_aside_not_deleted(warm, corpus, run_dir):
    later = {step: contents(run_dir / f"ckpt_{step:06d}") for step in (4, 6)}
    resume = ("--resume", run_dir / "ckpt_000002", "--max-steps", 3)
    for n in (1, 2):
        done = train(warm, corpus, run_dir, *EVERY_TWO, *resume)
        assert done.returncode == 0, done.stderr
        assert [p.name for p in checkpoint.checkpoints(run_dir)] == ["ckpt_000002", "ckpt_000003"]
        assert (run_dir / "abandoned_ckpt_000003").exists() == (n == 2)
    for step, files in later.items():
        assert contents(run_dir / f"abandoned_ckpt_{step:06d}") == files


def test_a_file_that_cannot_be_read_now_is_no_damage_and_stops_the_run(run_dir, monkeypatch):
    import builtins

    plain_open = io.open
    for name in ("training_state.pt", "model.safetensors", "checksums.json"):
        for error in (PermissionError(13, "Permission denied"), OSError(5, "Input/output error")):

            def failing(path, *args, name=name, error=error, **kwargs):
                if str(path).endswith(f"ckpt_000006/{name}"):
                    raise error
                return plain_open(path, *args, **kwargs)

            with monkeypatch.context() as there:
                there.setattr(builtins, "open", failing)
                there.setattr(io, "open", failing)
                with pytest.raises(UserError, match="cannot be read now"):
                    find(run_dir)


def test_a_run_from_elsewhere_does_not_mix_with_the_one_that_a_log_dir_holds(
    warm, corpus, finished, run_dir
):
    elsewhere = ("--resume", finished / "ckpt_000004", "--checkpoint-every", 6)
    before = contents(run_dir)
    done = train(warm, corpus, run_dir, *elsewhere)
    assert_told(done, "holds a run", "--overwrite")
    assert contents(run_dir) == before
    done = train(warm, corpus, run_dir, *elsewhere, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in checkpoint.checkpoints(run_dir)] == ["ckpt_000006"]
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [r["step"] for r in records if r["type"] == "train"] == [4, 5]
    assert weights_hash(run_dir / "ckpt_000006") == weights_hash(finished / "ckpt_000006")


def test_a_hellaswag_file_that_was_asked_for_and_is_not_there_stops_the_run(warm, corpus, tmp_path):
    flags = ("--hellaswag-every", 5, "--hellaswag-path", tmp_path / "nowhere.jsonl")
    assert_told(train(warm, corpus, tmp_path / "log", *flags), "nowhere.jsonl")


def test_when_all_checkpoints_are_damaged_nothing_is_touched(warm, corpus, run_dir):
    for path in checkpoint.checkpoints(run_dir):
        (path / "model.safetensors").write_bytes(b"")
    before = contents(run_dir)
    done = train(warm, corpus, run_dir, *EVERY_TWO, "--resume", "auto")
    assert_told(done, "no other is whole", "--overwrite", "--init-from")
    assert contents(run_dir) == before


def test_a_checkpoint_of_before_checksums_offers_its_weights(warm, corpus, run_dir):
    last = run_dir / "ckpt_000006"
    (last / "checksums.json").unlink()
    state = torch.load(last / "training_state.pt", weights_only=True)
    del state["version"]
    torch.save(state, last / "training_state.pt")
    done = train(warm, corpus, run_dir, *EVERY_TWO, "--resume", "auto")
    assert_told(done, "is of version 1", f"--init-from {last}")
    done = train(warm, corpus, run_dir.parent / "tuned", "--init-from", last)
    assert done.returncode == 0 and losses(run_dir.parent / "tuned")[0] < losses(run_dir)[0]


def changed_weights(directory: Path, change) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


WTE = "transformer.wte.weight"
WPE = "transformer.wpe.weight"
CHANGES = {
    "missing": lambda w: w.pop("transformer.h.1.ln_1.bias"),
    "too much": lambda w: w.update({"transformer.h.2.ln_1.bias": torch.zeros(16)}),
    "has shape (50258": lambda w: w.update({WTE: torch.zeros(50258, 16)}),
    "has shape (50000": lambda w: w.update({WTE: torch.zeros(50000, 16)}),
    "has shape (17": lambda w: w.update({WPE: torch.zeros(17, 16)}),
    "has shape (8": lambda w: w.update({WPE: torch.zeros(8, 16)}),
    "has shape ()": lambda w: w.update({"transformer.ln_f.bias": torch.zeros(())}),
    "torch.int32": lambda w: w.update({"transformer.ln_f.bias": torch.zeros(16).int()}),
}


@pytest.mark.parametrize("words", CHANGES)
def test_tensors_that_are_missing_too_many_or_of_another_size_are_refused(run_dir, words, outcome):
    last = run_dir / "ckpt_000006"
    changed_weights(last, CHANGES[words])
    if words == "missing":
        words = "no tensor transformer.h.1.ln_1.bias"
    with pytest.raises(UserError) as told:
        GPT.from_pretrained(last)
    assert words in str(told.value)
    outcome("checkpoints", f"model.safetensors: {words}", TOLD)


def test_a_config_with_fewer_layers_than_the_file_is_refused(run_dir):
    file = run_dir / "ckpt_000006" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "n_layer": 1}))
    with pytest.raises(UserError, match="too much: this is not a GPT-2 of 1 layers"):
        GPT.from_pretrained(file.parent)


def test_the_masks_and_the_head_that_the_hubs_own_files_carry_are_no_surplus(run_dir):
    last = run_dir / "ckpt_000006"
    expected = GPT.from_pretrained(last).state_dict()

    def as_on_the_hub(w) -> None:
        for i in range(2):
            w[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
            w[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        w["lm_head.weight"] = w[WTE].clone()

    changed_weights(last, as_on_the_hub)
    for name, p in GPT.from_pretrained(last).state_dict().items():
        assert torch.equal(p, expected[name])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b'"gpt2"',
        b"\xff\xfe",
        b'{"model_type": "gpt2"}',
        b'{"model_type": "gpt2", "n_embd": "16"}',
        b"[" * 100000,
    ],
)
def test_a_config_json_that_is_none_is_a_sentence_for_every_script(run_dir, content, outcome):
    (run_dir / "ckpt_000006" / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json|only GPT-2"):
        GPT.from_pretrained(run_dir / "ckpt_000006")
    outcome("checkpoints", f"config.json: {content[:40]!r}", TOLD)


@pytest.mark.parametrize("key", ["vocab_size", "n_positions", "n_layer", "n_head", "n_embd"])
def test_a_number_of_config_json_that_cannot_be_is_a_sentence(run_dir, key, outcome):
    file = run_dir / "ckpt_000006" / "config.json"
    whole = json.loads(file.read_text())
    for value in (None, 0, -1, 1.5, "2", [], {}, True, 10**30, 7919):
        file.write_text(json.dumps({**whole, key: value}))
        with pytest.raises(UserError):
            GPT.from_pretrained(file.parent)
        outcome("checkpoints", f"config.json: {key} {value}", TOLD)


def test_optimizer_states_of_another_model_are_refused(run_dir):
    state = checkpoint.load_state(run_dir / "ckpt_000006")
    model = GPT.from_pretrained(run_dir / "ckpt_000006")
    for name in ("transformer.h.1.ln_1.bias", "transformer.h.7.ln_1.bias", "transformer.ln_f.bias"):
        states = dict(state["optimizer"]["state"])
        if name not in states:
            states[name] = states["transformer.ln_f.bias"]
        elif "ln_f" in name:
            states[name] = {k: torch.zeros(3) for k in states[name]}
        else:
            del states[name]
        other = {**state, "optimizer": {**state["optimizer"], "state": states}}
        with pytest.raises(UserError, match=f"another model: {name}"):
            load_optimizers(model, model.configure_optimizers(), other, World("cpu"))


def test_other_shards_than_the_run_began_with_are_refused(warm, corpus, run_dir, tmp_path):
    shards = shutil.copytree(corpus, tmp_path / "shards")
    tokens = np.load(shards / "toy_train_000001.npy")
    np.save(shards / "toy_train_000001.npy", tokens[:-16])
    before = contents(run_dir)
    done = train(warm, shards, run_dir, *EVERY_TWO, "--resume", "auto", "--max-steps", 9)
    assert_told(done, "toy_train_000001.npy", "put the shards back", "--init-from")
    assert contents(run_dir) == before


def test_the_hashes_of_the_manifest_tell_other_shards_of_the_same_size(warm, corpus, tmp_path):
    shards = shutil.copytree(corpus, tmp_path / "shards")
    names = [path.name for path in sorted(shards.glob("*.npy"))]

    def manifest(sha256: str) -> None:
        listed = [{"name": name, "sha256": sha256} for name in names]
        (shards / "manifest.json").write_text(json.dumps({"shards": listed}))

    manifest("a" * 64)
    assert train(warm, shards, tmp_path / "log", *EVERY_TWO).returncode == 0
    manifest("b" * 64)
    done = train(warm, shards, tmp_path / "log", "--resume", "auto", "--max-steps", 9)
    assert_told(done, "put the shards back")


# -- 8: logs


def test_a_log_with_bad_lines_is_put_aside_and_the_run_goes_on(tmp_path, outcome):
    draw = random.Random(0)
    bad = [b"123", b"{}", b"[]", b"null", b"{", b"\xff\xfe\x00", b'{"type": 3, "step": 1}']
    bad += [b'{"type": "train", "step": "1", "loss": 2}', b'{"type": "val", "step": []}', b"NaN"]
    bad += [b'{"type": "run", "config": 3}', b"x" * 100000, b"[" * 50000, b'{"type":"train"}']
    bad += [draw.randbytes(40).replace(b"\n", b"") for _ in range(26)]
    for i, line in enumerate(bad):
        log_dir = tmp_path / str(i)
        log = Log(log_dir, True)
        log.start({"config": {}})
        for step in range(4):
            log.record(step, "train", loss=2.0)
        lines = log.metrics.read_bytes().splitlines()
        where = i % len(lines)  # of the first line, too
        log.metrics.write_bytes(b"\n".join([*lines[:where], line, *lines[where + 1 :]]) + b"\n")
        before = log.metrics.read_bytes()
        said = io.StringIO()
        with redirect_stdout(said):
            log.resume(4, True, {"config": {}})
        assert "no records" in said.getvalue(), line
        assert (log_dir / "damaged_metrics.jsonl").read_bytes() == before
        assert len(read_metrics(log.metrics)) == 5 and read_log(log.text), line
        outcome("logs", f"line {where} is {line[:40]!r}", RIGHT)


# -- 9: a full disk

DISK = "full disk and permissions"


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(warm, corpus, run_dir, outcome):
    sizes = {path.name: path.stat().st_size for path in (run_dir / "ckpt_000006").iterdir()}
    limits = [2500, 50_000, sizes["tokenizer.json"] - 1, sizes["model.safetensors"] - 1]
    limits += [sizes["model.safetensors"] + 1, sizes["training_state.pt"] - 1]
    flags = ("--checkpoint-every", 1, "--keep-checkpoints", 9, "--max-steps", 7)
    before = {step: contents(run_dir / f"ckpt_{step:06d}") for step in (2, 4, 6)}
    for limit in limits:
        done = train(warm, corpus, run_dir, *flags, "--resume", "auto", largest_file=limit)
        outcome(DISK, f"files of at most {limit} bytes", judge(done, str(run_dir)))
        assert done.returncode == 1
        assert {s: contents(run_dir / f"ckpt_{s:06d}") for s in (2, 4, 6)} == before
        assert not (run_dir / "ckpt_000007").exists()
    assert train(warm, corpus, run_dir, *flags, "--resume", "auto").returncode == 0
    assert len(losses(run_dir)) == 7


def test_a_disk_without_room_is_said_with_the_bytes_before_anything_is_written(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"needs [\d,]+ bytes, the disk has 1,000 left"):
        save(tiny, tmp_path, step=1)
    assert not list(tmp_path.iterdir())


def save(model: GPT, log_dir: Path, step: int) -> Path:
    return checkpoint.save(
        log_dir,
        model=model,
        optimizers=model.configure_optimizers(),
        state={"step": step},
        world=World("cpu"),
    )


def test_the_files_of_a_checkpoint_are_readable_as_the_umask_says(tiny, tmp_path):
    for mask in (0o022, 0o077, 0o002):
        before = os.umask(mask)
        try:
            path = save(tiny, tmp_path, step=mask)
        finally:
            os.umask(before)
        modes = {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
        assert modes == {0o666 & ~mask}


# -- kills at every write of a save and of a shard


def kill_at(event: int, action) -> bool:
    """Runs `action` in a forked process that dies at its event-th write, fsync, rename or removal.

    A write then has half of its bytes on the disk. Returns whether `action` came to its end.
    """
    child = os.fork()
    if child == 0:
        try:
            die_at(event)
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9), "neither killed nor at its end"
    return code == 0


def die_at(event: int) -> None:
    """Makes this process count what it does to a disk, and end at the event-th."""
    count = 0

    def counted(function, last=lambda *args: None):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == event:
                last(*args)
                os._exit(9)
            return function(*args, **kwargs)

        return call

    class File(io.FileIO):
        """Its writes are counted; they go to the disk at once."""

        def write(self, data):
            whole = super().write

            def write_half(data):
                whole(bytes(data)[: len(bytes(data)) // 2])

            return counted(whole, write_half)(data)

    for name in ("fsync", "rename", "replace", "rmdir", "unlink", "mkdir", "write"):
        setattr(os, name, counted(getattr(os, name)))
    for module in (common, filters):
        module.open = lambda path, mode: File(path, mode.replace("b", ""))
    torch.save = counted(torch.save)
    safetensors.torch.save_file = counted(safetensors.torch.save_file)


@pytest.mark.parametrize("step", [2, 1])
def test_a_save_killed_at_any_of_its_writes_leaves_the_old_checkpoint_or_the_new(
    tiny, tmp_path, step, outcome
):
    """step 2: a new checkpoint; step 1: one that replaces another of the same name."""
    torch.set_num_threads(1)
    event, ended = 0, False
    while not ended:
        event += 1
        log_dir = tmp_path / str(event)
        save(tiny, log_dir, step=1)
        ended = kill_at(event, lambda log_dir=log_dir: save(tiny, log_dir, step=step))
        checkpoint.sweep(log_dir)
        found, said = find(log_dir)
        assert found and found.state["step"] in (1, step) and not said, event
        assert not list(log_dir.glob(".ckpt*"))
        if ended:
            assert found.state["step"] == step
        outcome("kills", f"a save of step {step}, event {event}", RIGHT)
        shutil.rmtree(log_dir)
    assert event > 15, "it was killed at many places"


def test_shards_killed_at_any_of_their_writes_are_those_of_a_run_left_alone(
    tmp_path, monkeypatch, outcome
):
    """A shard for validation, two for training; the manifest before, between and after."""
    monkeypatch.setattr(fineweb, "start_pool", lambda *_: HerePool())
    source = write_jsonl(tmp_path / "a.jsonl", prose(40, words=30))
    make(tmp_path / "whole", source, shard_size=700)
    whole = contents(tmp_path / "whole")
    event, ended = 0, False
    while not ended:
        event += 1
        folder = tmp_path / str(event)
        ended = kill_at(event, lambda folder=folder: make(folder, source, shard_size=700))
        written = contents(folder) if folder.exists() else {}
        for name in written.keys() & whole.keys() - {"manifest.json"}:
            assert written[name] == whole[name], (event, name)
        make(folder, source, shard_size=700)
        assert contents(folder) == whole, event
        outcome("kills", f"shards, event {event}", RIGHT)
        shutil.rmtree(folder)
    assert event > 20, "it was killed at many places"


# -- 11: shards


def npy(array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def npz(array) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, array)
    return buffer.getvalue()


def test_a_damaged_shard_is_a_sentence_or_gives_the_tokens_that_it_has(tmp_path, outcome):
    whole = npy(documents(300, seed=0))
    llama = np.array([20240801, 1, 100] + [0] * 253, np.int32).tobytes() + bytes(400)
    draw = random.Random(0)
    cases = {"npz": npz(np.zeros(100, np.uint16)), "llama": llama, "zeros": bytes(500)}
    for dtype in ("int8", "uint8", "int16", ">u2", "uint32", "int64", "float16", "float64", "bool"):
        cases[dtype] = npy(np.zeros(300, dtype))
    cases |= {"object": npy(np.array([{}], object)), "2d": npy(np.zeros((10, 30), np.uint16))}
    cases["text"] = npy(np.array(["a"] * 300))
    for i in range(150):
        spoilt = flip(whole, draw.randrange(8 * 140))  # in the header and the first tokens
        cases[f"flip {i}"] = spoilt
        cases[f"cut {i}"] = whole[: draw.randrange(len(whole))]
    refused = 0
    for name, content in cases.items():
        path = tmp_path / "x_train_000001.npy"
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
            assert "x_train_000001.npy" in str(error) or "tokens" in str(error), (name, error)
    assert refused > 200


def test_a_shard_that_is_no_file_is_a_sentence_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "x_train_000001.npy")
    with pytest.raises(UserError, match="no regular file"):
        DataLoaderLite(tmp_path, "train", 1, 8)


@pytest.mark.parametrize("size", [0, 200, 700])
def test_a_shard_that_shrinks_during_a_run_is_an_ordinary_error(tmp_path, size):
    path = tmp_path / "x_train_000001.npy"
    write_shard(path, documents(2000, seed=0))
    loader = DataLoaderLite(tmp_path, "train", 1, 16)
    os.truncate(path, size)
    with pytest.raises(UserError, match="has shrunk: it had 2000 tokens"):
        for _ in range(100):
            loader.next_batch()


def test_a_shard_that_vanishes_during_a_run_ends_it_in_one_sentence(warm, corpus, tmp_path):
    shards = shutil.copytree(corpus, tmp_path / "shards")
    flags = (*TINY, "--data-dir", shards, "--log-dir", tmp_path / "log", "--max-steps", 100000)
    warm.start("train_gpt2.py", *flags)
    log = tmp_path / "log" / "log.txt"
    while not (log.exists() and log.read_text().count("\n") > 5):
        time.sleep(0.05)
    for path in shards.glob("*train*"):
        path.unlink()
    done = warm.finish()
    assert_told(done, "toy_train")


# -- 12: values


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--seed", -1), "seed is -1: it must be at least 0"),
        (("--seed", 10**20), "it must be a finite number"),
        (("--max-steps", 10**20), "it must be a finite number"),
        (("--learning-rate", "nan"), "learning_rate is nan"),
        (("--learning-rate", "inf"), "learning_rate is inf"),
        (("--grad-clip", "nan"), "grad_clip is nan"),
        (("--n-layer", 10**12), "bytes for its weights"),
        (("--n-embd", 2**40, "--n-head", 1), "bytes for its weights"),
        (
            ("--sequence-length", 2**40, "--total-batch-size", 2**40, "--batch-size", 1),
            "bytes for its weights",
        ),
    ],
)
def test_a_value_that_cannot_be_leaves_nothing_behind(
    warm, corpus, tmp_path, flags, words, outcome
):
    done = train(warm, corpus, tmp_path / "log", *flags)
    assert_told(done, words)
    outcome("numbers", f"{flags}", judge(done, words))
    assert not (tmp_path / "log" / "metrics.jsonl").exists()


def test_a_prompt_that_is_not_text_is_trained_and_saved_with(warm, corpus, tmp_path):
    flags = ("--sample-prompt", "a\udcff", "--sample-every", 3, "--checkpoint-every", 6)
    done = train(warm, corpus, tmp_path / "log", *flags)
    assert done.returncode == 0, done.stderr
    assert checkpoint.checkpoints(tmp_path / "log")


# -- the surroundings


@pytest.mark.parametrize(
    "env",
    [
        dict(LANG="C", LC_ALL="C", PYTHONIOENCODING="ascii"),
        dict(HOME="/nonexistent"),
        dict(TMPDIR="/nonexistent"),
        dict(PATH="/nonexistent"),
        dict(COLUMNS="1"),
        dict(TERM="dumb"),
        dict(TORCHELASTIC_RESTART_COUNT="3"),
        dict(HF_HUB_OFFLINE="1"),
    ],
    ids=lambda env: "-".join(env),
)
def test_a_run_does_not_depend_on_its_surroundings(warm, corpus, tmp_path, env, outcome):
    flags = ("--val-every", 6, "--val-tokens", 160, "--checkpoint-every", 6)
    done = train(warm, corpus, tmp_path / "log", *flags, **env)
    outcome("streams and environment", f"training with {env}", judge(done))
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "log")) == 6


# -- several processes


def test_a_rank_that_fails_says_so_and_is_gone_while_its_peer_stands_still(tmp_path):
    """What a collective on the error path would prevent: it would wait for the stopped peer."""
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, signal, sys, time\n"
        f"sys.path.insert(0, {str(Path(config.__file__).parent)!r})\n"
        "from support.common import UserError, run_script\n"
        "from support.distributed import World\n"
        "def main():\n"
        "    with World('cpu') as world:\n"
        "        world.barrier()\n"
        "        if world.rank == 1:\n"
        "            os.kill(os.getpid(), signal.SIGSTOP)\n"
        "        time.sleep(1)\n"
        "        raise UserError('rank 0 has a reason')\n"
        "run_script(main)\n"
    )
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20000, 60000))}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", **store),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, err = processes[0].communicate(timeout=300)
        assert processes[0].returncode == 1 and "rank 0 has a reason" in err
        assert processes[1].poll() is None, "its peer still stands still"
    finally:
        processes[1].kill()
        processes[1].communicate()


def test_a_save_that_fails_on_rank_0_ends_all_ranks_with_a_sentence(corpus, tmp_path):
    blow_up = ("--learning-rate", 1e39, "--grad-clip", 0, "--checkpoint-every", 1)
    flags = (*TINY, "--data-dir", corpus, "--log-dir", tmp_path / "log", *blow_up)
    typed = command("train_gpt2.py", *flags, ranks=2)
    done = subprocess.run(typed, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "values that are not finite" in done.stderr
    assert "train_gpt2.py: rank 1: another process has failed and says why" in done.stderr


def test_a_model_knows_whether_its_config_changes_what_is_computed():
    harmless = {f.name for f in dataclasses.fields(GPTConfig) if f.metadata.get("harmless")}
    assert harmless == {"pad_vocab_to", "activation_checkpointing"}

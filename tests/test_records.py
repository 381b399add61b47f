"""benchmarks/records.py: what an entry of the race is scored on, and what none gets away with."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT
from contract import call

from benchmarks import records
from benchmarks.records import Entry
from evaluate import validate
from model import GPT, DataLoaderLite
from support.base.errors import UserError
from support.machine.distributed import Stop, start_world
from support.run.source_code import read_code
from support.text import sources

PAGE = (ROOT / "records" / "README.md").read_text()
SMALL = """--n-layer 1 --n-head 2 --n-embd 16 --sequence-length 32 --batch-size 4 --optimizer adamw
    --total-batch-size 128 --no-compile --dtype float32 --warmup-steps 1"""
HELD_OUT = Path(sources.TINYSHAKESPEARE).read_text()[sources.TRAINING_CHARS :]


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A clone of this code, with a commit of its own."""
    clone = tmp_path_factory.mktemp("repository")
    for name, content in read_code(ROOT).items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes(content)
    for command in ("init -q", "add .", "-c user.name=it -c user.email=it@here commit -qm all"):
        subprocess.run(["git", "-C", str(clone), *command.split()], check=True)
    return clone


@pytest.fixture
def race(repository, tmp_path, monkeypatch) -> Path:
    """Its records: a first one, and an entry that has a higher rate by a diff."""
    monkeypatch.setattr(records, "HERE", repository)
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    monkeypatch.setattr(records, "OUT", tmp_path / "out")
    monkeypatch.setattr(records, "TRIAL", 4)
    monkeypatch.setattr("benchmarks.race.TURNS", 1)
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None, raising=False)
    config = repository / "config.py"
    before = config.read_text()
    old, new = (f"learning_rate: Positive = {rate}" for rate in ("6e-4", "1e-2"))
    config.write_text(before.replace(old, new))
    change = subprocess.run(["git", "-C", str(repository), "diff"], capture_output=True).stdout
    config.write_text(before)
    for name in ("01-start", "02-rate"):
        (tmp_path / name).mkdir()
    (tmp_path / "02-rate" / "change.diff").write_bytes(change)
    return tmp_path


def test_an_entry_and_the_record_train_in_turns_and_the_checker_scores_them(race, monkeypatch):
    flags = ["--seeds=0", "--minutes=0.01", f"--flags={SMALL}"]
    records.main(["--measure=records/01-start", *flags])
    records.main(["--measure=records/02-rate", *flags])
    seen = {}

    def look(checkpoint: Path, scored: Path) -> float:
        place = checkpoint.parents[1]
        bits = score(checkpoint, scored)
        seen[scored.name] = bits
        val, train = (DataLoaderLite(place / "data", split, 4, 32) for split in ("val", "train"))
        assert np.array_equal(val.next_batch()[0], train.next_batch()[0]), "the text is not there"
        assert not [*place.parent.rglob("tinyshakespeare.txt"), *place.parent.rglob(".git")]
        assert not [*place.parent.rglob("val.bin")] and not (place / "code" / "left").exists()
        (place / "code" / "left").touch()  # for the next run, which has a copy of its own
        shards = scored / "shards"
        shards.mkdir(exist_ok=True)
        np.save(shards / "val_000000.npy", np.fromfile(scored / "val.bin", np.uint16))
        shutil.copy(place / "data" / "tokenizer.json", shards)
        with start_world("cpu") as world:
            loader = DataLoaderLite(shards, "val", 4, 32)
            model = GPT.from_pretrained(str(checkpoint)).eval()
            _, own, _ = validate(model, loader, 10**9, world, torch.float32, Stop(world))
        assert bits == pytest.approx(own, rel=1e-5)
        return bits

    score = records.score
    monkeypatch.setattr(records, "score", look)
    monkeypatch.setattr(records, "SCORES", 1)
    records.main(["--check=records/02-rate", "--seeds=2", "--minutes=0.01"])
    file = race / "out" / "02-rate" / "check.json"
    found = json.loads(file.read_text())
    assert [r["name"] for r in found["runs"]] == ["01-start", "02-rate"] * 2
    assert [r["seed"] for r in found["runs"][::2]] == found["seeds"] != [1, 2], "drawn"
    last = {r["name"]: r["val_loss"] for r in found["runs"]}
    assert last == seen and len({*last.values()}) == 2, "each has its own code"
    assert all(r["took"] > r["seconds"][-1] for r in found["runs"])


def test_a_check_that_was_interrupted_goes_on_with_its_seeds(race, monkeypatch):
    def train_and_score(side, _place, _scored, updates, seed):
        trained.append((side.name, seed))
        fits.append(updates)
        if len(trained) == 4:
            raise KeyboardInterrupt
        return run(2.0 + seed / 1e6), [(1, 2.0, 0.0), (2, 4.0, 0.0)]

    trained: list = []
    fits: list = []
    monkeypatch.setattr(records, "prepare", lambda *_: None)
    monkeypatch.setattr(
        records, "find_paces", lambda trials: {name: [(1.0, 0.0)] for name in trials}
    )
    monkeypatch.setattr(records, "train_and_score", train_and_score)
    for name in ("01-start", "02-rate"):
        records.main(["--seeds=0", f"--measure={name}"])
    with pytest.raises(KeyboardInterrupt):
        records.main(["--check=02-rate"])
    records.main(["--check=02-rate"])
    assert trained[4:5] == trained[3:4] and len({*trained}) == 8
    assert fits[:6] == [176, 176, 120, 120, 120, 88], "medians of all paces so far"
    records.main(["--check=02-rate", "--seeds=5"])
    assert len({*trained}) == 10 and len(trained) == 11, "one seed more"
    (race / "02-rate" / "change.diff").write_text("another")
    with pytest.raises(UserError, match=r"change.diff is not the one that record.json"):
        records.main(["--check=02-rate"])
    (race / "02-rate" / "record.json").unlink()
    with pytest.raises(UserError, match="measure it first"):
        records.main(["--check=02-rate"])
    records.main(["--seeds=0", "--measure=02-rate"])
    with pytest.raises(UserError, match=r"check.json is of another entry or record: delete it"):
        records.main(["--check=02-rate"])


def test_who_is_to_be_beaten_and_for_how_long_is_never_the_authors_word(race, repository):
    flags = ["--seeds=0", "--minutes=0.5", f"--flags={SMALL}"]
    for name in ("01-start", "02-rate"):
        records.main([f"--measure={name}", *flags])
    git = ["git", "-C", str(repository), "-c", "user.name=it", "-c", "user.email=it@here"]
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "the entry"], check=True)
    records.main(["--measure=02-rate", *flags])  # to continue, though HEAD has moved
    file = race / "02-rate" / "record.json"
    forged = json.loads(file.read_text())
    forged["beside"]["flags"] += " --learning-rate 1e-9"
    file.write_text(json.dumps(forged))
    defined = records.define(records.RecordsConfig(), race / "02-rate", forged)
    assert defined["minutes"] == 3 and "1e-9" not in defined["beside"]["flags"]
    measured = records.define(records.RecordsConfig(), race / "03-next")
    assert measured["beside"]["name"] == "01-start", "the newest that holds"
    entry = dict(entry=forged["entry"] | {"change": ""})
    with pytest.raises(UserError, match="02-rate is not checked: check it first"):
        records.define(records.RecordsConfig(), race / "03-next", entry)
    with pytest.raises(UserError, match="--beside 9: expected one of 01-start, 02-rate"):
        records.define(records.RecordsConfig(beside="9"), race / "03-next")
    hidden = [*git, "commit-tree", "HEAD^{tree}", "-m", "code that is in no diff"]
    forged["entry"]["revision"] = subprocess.check_output(hidden, text=True).strip()
    with pytest.raises(UserError, match=r"merge-base --is-ancestor .* HEAD: no"):
        records.define(records.RecordsConfig(), race / "02-rate", forged)


def run(val_loss: float, took: float = 200.0, **names) -> dict:
    points = dict(tokens=[1, 2], seconds=[90.0, 180.0], losses=[3.0, val_loss])
    return dict(took=took, val_loss=val_loss) | points | names


def make_record(own: list[float], base: list[float], took: float = 200.0) -> dict:
    runs = [run(x, took, name="02-mine", seed=i) for i, x in enumerate(own)]
    runs += [run(x, name="01-start", seed=i) for i, x in enumerate(base)]
    return dict(entry=dict(name="02-mine"), beside=dict(name="01-start"), minutes=3.0, runs=runs)


BASE = [2.10, 2.11, 2.12]


@pytest.mark.parametrize(
    "own, took, verdict, minutes",
    [
        ([2.05, 2.06, 2.08], 200, "holds", 2.92),
        ([2.05, 2.06, 2.08], 220, "holds", 2.92),
        ([2.05, 2.06, 2.08], 260, "does not hold: its runs take 1.30 × as long", 2.92),
        ([2.05, 2.05, 2.05], 200, "does not hold: it ignores the seed", 2.91),
        ([2.05, 2.15, 2.08], 200, "not shown", 2.93),
        ([2.15, 2.16, 2.18], 200, "does not hold: it ends higher", math.inf),
    ],
)
def test_the_verdict_is_by_pairs_of_seeds_and_by_the_checkers_clock(own, took, verdict, minutes):
    record = make_record(own, BASE, took)
    said, found = records.judge(record)
    assert said == verdict and found["minutes"] == pytest.approx(minutes, abs=0.01)
    assert f"02-mine: {verdict}. It ends " in records.describe(record)


def test_a_loss_that_is_typed_into_a_record_never_counts(race):
    start = make_record([], []) | dict(entry=dict(name="01-start"))
    (race / "01-start" / "record.json").write_text(json.dumps(start))
    forged = make_record([1.5, 1.51, 1.52], BASE)
    (race / "02-rate" / "record.json").write_text(json.dumps(forged))
    assert "| [02-rate](02-rate/) |  |  |  |  |  | not checked |" in records.format_table()
    unclear = "2.107 | 1.460 | 2.110 | 0.00 ± 0.05 | after 2.98 min | not shown"
    clear = "2.010 | 1.393 | 2.110 | 0.100 ± 0.012 | after 2.85 min | holds"
    for own, row, best in (
        ([2.09, 2.13, 2.10], unclear, "01-start"),
        ([2.00, 2.005, 2.025], clear, "02-mine"),
    ):
        (race / "02-rate" / "check.json").write_text(json.dumps(make_record(own, BASE)))
        assert f"| [02-rate](02-rate/) | {row} |" in records.format_table()
        assert records.define(records.RecordsConfig(), Path("03-next"))["beside"]["name"] == best


@pytest.mark.parametrize(
    "forge, words",
    [
        (["--source={all}"], "its text is another, or held out elsewhere"),
        (["--source=tinyshakespeare", "--tokenizer={vocabulary}"], "its vocabulary has b'"),
    ],
)
def test_text_for_scores_in_the_source_or_in_the_vocabulary_is_found(
    forge, words, race, monkeypatch, tmp_path
):
    """As changed flags or a changed fineweb.py would have it."""

    def make_tokens(command, place):
        [data] = [flag for flag in command if flag.startswith("--data-dir=")]
        done = call("fineweb.py", data, *forged)
        assert done.returncode == 0, done
        return ""

    (tmp_path / "all.txt").write_text(Path(sources.TINYSHAKESPEARE).read_text() + HELD_OUT)
    (tmp_path / "held-out.txt").write_text(HELD_OUT)
    at = dict(all=tmp_path / "all.txt", vocabulary=tmp_path / "vocabulary")
    flags = [f"--source={tmp_path}/held-out.txt", "--vocab-size=1500"]
    call("fineweb.py", *flags, f"--data-dir={at['vocabulary']}")
    forged = [flag.format(**at) for flag in forge]
    if "all" in forge[0]:
        forged.append("--vocab-size=300")
    monkeypatch.setattr(records, "run_program", make_tokens)
    entry = Entry("02-mine", "HEAD", "", "", "")
    with pytest.raises(UserError, match=f"02-mine does not hold: {words}"):
        records.prepare(entry, race / "none", tmp_path / "place", tmp_path / "scored")


def test_another_architecture_is_no_entry(tmp_path):
    config = dict(model_type="gpt_neo", num_layers=2, attention_types=[[["global"], 2]])
    sizes = dict(hidden_size=8, num_heads=2, vocab_size=9, max_position_embeddings=8)
    model = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**config, **sizes))
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="it is a GPTNeoForCausalLM, no GPT-2"):
        records.score(tmp_path, tmp_path)
    tiny = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, is_causal=False)
    transformers.GPT2LMHeadModel(tiny).save_pretrained(tmp_path / "both-ways")
    with pytest.raises(UserError, match="it sees the tokens that it predicts, no GPT-2"):
        records.score(tmp_path / "both-ways", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "our own"}')
    with pytest.raises(UserError, match="checkpoints must open in transformers"):
        records.score(tmp_path, tmp_path)


def test_the_page_has_the_records_as_they_are_committed():
    assert records.format_table() in PAGE
    for folder in (ROOT / "records").glob("*/"):
        assert (folder / "README.md").exists()
        record = json.loads((folder / "record.json").read_text())
        assert records.hash_change(folder) == record["entry"]["change"]
        if (check := folder / "check.json").exists():
            assert json.loads(check.read_text())["entry"] == record["entry"]

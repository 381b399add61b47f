"""benchmarks/race.py: what is trained for how long, and how it is scored. Never who wins."""

import json
import math
import os
import re
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import EOT, documents, random_model
from torch import nn

import bench
from benchmarks import peers, race
from benchmarks.race import MinutesConfig
from config import parse_command_line
from evaluate import validate
from minutes import choose_recipe
from model import DataLoaderLite
from support.base.errors import UserError
from support.machine.distributed import Stop, start_world
from support.text.tokenizer import gpt2

# A clone of nanoGPT as far as it matters: where its train.py evaluates, saves, and finds its data
MODEL = """
import dataclasses
import torch
from torch.nn.functional import cross_entropy

Fields = dict(block_size=8, vocab_size=0, n_layer=0, n_head=0, n_embd=0, dropout=0, bias=0)
GPTConfig = dataclasses.make_dataclass("GPTConfig", [(k, int, v) for k, v in Fields.items()])

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.logits = torch.nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x, y):
        logits = self.logits.expand(*x.shape, -1)
        return logits, cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
"""
TRAIN = """
import dataclasses, os, pickle, time
import numpy as np, torch
from model import GPT, GPTConfig
exec(open("configurator.py").read())
meta = pickle.load(open(os.path.join("data", dataset, "meta.pkl"), "rb"))
assert len(np.memmap(os.path.join("data", dataset, "train.bin"), np.uint16))
args = dict(block_size=8, vocab_size=meta["vocab_size"])
torch.manual_seed(1337)
model = GPT(GPTConfig(**args))
for i in range(max_iters + 1):
    if i % eval_interval == 0:
        model.eval()
        time.sleep(50)
        model.train()
        if i:
            weights = {f"_orig_mod.{name}": w for name, w in model.state_dict().items()}
            saved = dict(model=weights, model_args=args, iter_num=i)
            torch.save(saved, os.path.join(out_dir, "ckpt.pt"))
    time.sleep(2)
"""
CONFIGURATOR = """
import sys
for flag in sys.argv[1:]:
    name, _, value = flag[2:].partition("=")
    globals()[name] = value if name in ("dataset", "out_dir", "device") else eval(value)
"""


@pytest.fixture
def peer(tmp_path):
    clone = tmp_path / "nanoGPT"
    clone.mkdir()
    for name, text in dict(model=MODEL, train=TRAIN, configurator=CONFIGURATOR).items():
        (clone / f"{name}.py").write_text(text)
    return clone


@pytest.fixture
def folder(tmp_path):
    """600 tokens for training and 200 for validation, with their sizes."""
    splits = [documents(600, 0), documents(200, 1)]
    return race.write_tokens(tmp_path / "tokens", splits, gpt2().sizes.tolist())


def test_nanogpts_own_script_trains_and_its_clock_stops_while_it_evaluates(
    peer, folder, monkeypatch, tmp_path
):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(torch, "save", None)
    seeds = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    monkeypatch.setattr(nn.Module, "train", nn.Module.train)
    monkeypatch.setitem(sys.modules, "model", sys.modules["model"])
    monkeypatch.chdir(tmp_path)
    points = peers.train_nanogpt(peer, "--batch_size=4", folder, 32, 1e-3, 7, 16)
    assert seeds == [7]
    assert [step for step, *_ in points] == list(range(2, 33, 2))
    assert [seconds for _, seconds, _ in points] == [4.0 * i for i in range(1, 17)]
    tokens = np.fromfile(folder / "val.bin", np.uint16)[1:193]  # 24 sequences of 8
    text = tokens[tokens != EOT]
    bits = math.log2(gpt2().vocab_size) * len(text) / gpt2().sizes[text].sum()
    assert [point[2] for point in points] == pytest.approx([bits] * 16, rel=1e-5)


def test_a_score_is_what_validation_says(folder, tmp_path):
    model = random_model(n_layer=1, n_head=2, n_embd=16, block_size=16).eval()
    np.save(tmp_path / "val_000000.npy", np.fromfile(folder / "val.bin", np.uint16))
    loader = DataLoaderLite(tmp_path, "val", 4, 16)
    with start_world("cpu") as world:
        _, bits, _ = validate(model, loader, 10**6, world, torch.float32, Stop(world))
    scored = peers.score(lambda x, y: model(x, y)[1], folder, 16)
    assert scored == pytest.approx(bits, rel=1e-5)


def test_transformers_and_this_repository_learn_the_same_tokens(shards, folder):
    """Both are scored 16 times, and end below a model that knows nothing."""
    sizes = "--n-layer 1 --n-head 2 --n-embd 16 --sequence-length 16 --batch-size 4"
    rest = f"--total-batch-size 64 --learning-rate 0.01 --no-compile --data-dir {shards}"
    flags = f"{sizes} {rest}".split()
    recipe = parse_command_line(flags)
    for train in (partial(peers.train_here, flags), partial(peers.train_transformers, recipe)):
        points, others = [train(folder, 32, 0.01, seed, 16) for seed in (1, 2)]
        steps, seconds, bits = zip(*points, strict=True)
        assert bits[0] != others[0][2], "another seed"
        assert list(steps) == list(range(2, 33, 2))
        assert list(seconds) == sorted(seconds) and seconds[0] > 0
        assert bits[-1] < bits[0]


def test_each_run_fits_the_time_and_the_best_rate_of_a_side_is_drawn_by_the_mean_of_its_seeds(
    shards, peer, monkeypatch, tmp_path
):
    turns = []

    def run(train, updates, rate, seed, scores):
        """10 s of compilation, then 0.25 s an update; a lower score for the middle rate and 1337.

        The machine is slow in the first turn, and while the long runs are made.
        """
        name = train.func.__name__
        turns.append(name)
        update = 0.25 if 5 < len(turns) <= 15 else 1.0
        muon = name == "train_here" and parse_command_line(train.args[0]).optimizer == "muon"
        worse = 0.0 if muon else 1 + abs(rate - 2e-3)
        worse += (seed - 1337) / 10
        every = updates // scores
        steps = range(every, updates + 1, every)
        return [(step, 10 + step * update, 4 - step / updates + worse) for step in steps]

    monkeypatch.setattr(race, "in_new_process", run)
    flags = ["--peer", str(peer), "--data-dir", str(shards), "--minutes", "1", "--out"]
    race.main([*flags, str(tmp_path / "here")])
    result = json.loads((tmp_path / "here.json").read_text())
    assert result["command"].startswith("python -m benchmarks.race --peer ")
    assert turns[:5] == turns[5:10] == turns[10:15] and len(set(turns[:5])) == 3, "in turn"
    runs = [(run["name"], run["rate"], run["seed"]) for run in result["runs"]]
    ours = parse_command_line(["--preset=quickstart"]).learning_rate
    best = [ours, 2e-3, 2e-3, 1e-3, 2e-3]  # of the sides, in the order of their first turns
    pairs = list(zip(result["paces"], best, strict=True))
    assert runs[11:] == [(*pair, seed) for seed in (1338, 1339) for pair in pairs]
    assert {tuple(run["points"][-1][:2]) for run in result["runs"]} == {(192, 58.0)}
    rows = race.summarize(result)
    names = [row["name"] for row in rows]
    assert names[0] == race.THIS_REPOSITORY and rows[0]["passed"] == 58.0
    assert sorted(names[1:]) == [
        "nanoGPT, its README", "nanoGPT, our tokens", race.ADAMW, "transformers, our tokens",
    ], "the best run of each"  # fmt: skip
    others = [row["others"] for row in rows if "our tokens" in row["name"]]
    assert rows[1]["rate"] == 2e-3 and others == ["0.001: 4.001, 0.004: 4.002"] * 2
    assert rows[1]["passed"] == 13.0, "at the first score"
    assert rows[0]["by_seed"] == "3.000, 3.100, 3.200"
    assert rows[1]["start"] == pytest.approx(10) and rows[1]["ms"] == pytest.approx(250)
    [axis] = race.plot_minutes(result).axes
    assert sum(len(line.get_xdata()) == race.SCORES for line in axis.lines) == 5
    low, high = axis.collections[0].get_datalim(axis.transData).intervaly
    assert (low, high) == pytest.approx((3.0, 4.1375)), "its best seed's end, its worst one's start"
    assert axis.get_xlim() == (0, 1)
    title = axis.get_title("left")
    assert re.match(r"After 1 minutes, 3.10 bits per byte; (nanoGPT|trans\w+) has 4.10\n\(", title)
    assert axis.get_xticks().tolist() == [0, 1]
    known = dict(result, config=dict(result["config"], data_dir="data/tinyshakespeare"))
    [axis] = race.plot_minutes(known).axes
    assert axis.get_title("left").startswith(f"After 1 minutes, {3.1 * math.log(2):.2f} nats per")
    assert (tmp_path / "here.png").read_bytes()[1:4] == b"PNG"


def test_a_race_by_minutes_chooses_sizes_once_and_then_a_recipe_for_what_fits(
    shards, monkeypatch, tmp_path
):
    asked = []
    by_adamw = []

    def run(train, updates, rate, seed, scores):
        """5 s of compilation, then 0.5 s an update."""
        if train.func is peers.train_here:
            chosen = parse_command_line(train.args[0])
            side = asked if chosen.optimizer == "muon" else by_adamw
            side.append((chosen, updates, rate))
        steps = range(updates // scores, updates + 1, updates // scores)
        return [(step, 5 + step / 2, 3 - rate - step / updates) for step in steps]

    monkeypatch.setattr(race, "in_new_process", run)
    flags = ["--data-dir", str(shards), "--minutes", "1", "--seeds", "1", "--out"]
    typed = [*flags, str(tmp_path / "budget-1"), "--ours=--minutes 1 --weight-decay 0.4"]
    race.main(typed)
    record = tmp_path / "budget-1.json"
    result = json.loads(record.read_text())
    chosen, updates, rate = asked[-1]
    assert updates == 96 == chosen.max_steps, "110 fit, of which 96 are a multiple of 16"
    assert chosen.weight_decay == 0.4, "as typed"
    recipe = choose_recipe(96, 1.0, chosen.n_embd, 1.0, {})
    assert chosen.learning_rate == rate == recipe["learning_rate"]
    sizes = ("n_layer", "n_embd", "sequence_length", "total_batch_size")
    assert len({tuple(getattr(c, name) for name in sizes) for c, *_ in asked}) == 1
    other, *_ = by_adamw[-1]
    assert replace(chosen, optimizer="adamw", embedding_lr=1.0) == other, "all else is the same"
    assert [rate for *_, rate in by_adamw[-3:]] == [*race.RATES]
    assert [run["seed"] for run in result["runs"]] == [1337] * 7, "ours, and three rates of two"
    monkeypatch.setattr("minutes.fit_sizes", None)
    race.main(typed)
    assert json.loads(record.read_text()) == result and len(asked) == race.TURNS + 1
    with pytest.raises(UserError, match="it is the race of python"):
        race.main([*typed, "--minutes", "2"])
    assert json.loads(record.read_text()) == result, "of hours, perhaps"
    del result["paces"][race.ADAMW]  # in a record of before this side was raced
    record.write_text(json.dumps(result | dict(runs=result["runs"][:1])))
    race.main(typed)
    assert json.loads(record.read_text())["runs"] == result["runs"]
    later = json.loads(record.read_text())
    later["config"]["minutes"] = 3
    [axis] = race.plot_budgets([later, result]).axes
    assert axis.get_title("left").startswith("Muon is 100% of the lead after 3 minutes\n(")
    assert not axis.get_xticks(minor=True).size, "no ticks but the budgets"
    assert [line.get_xdata().tolist() for line in axis.lines if len(line.get_xdata()) == 2][:2] == (
        [[1, 3]] * 2
    )


def test_without_a_clone_its_sides_are_left_out_and_a_wrong_one_is_a_sentence(
    shards, tmp_path, capsys
):
    config = MinutesConfig(data_dir=str(shards))
    flags = race.choose_flags(config)
    assert [*race.find_sides(config, flags, tmp_path)] == [
        race.THIS_REPOSITORY,
        race.ADAMW,
        race.HF,
    ]
    assert "nanoGPT is left out" in capsys.readouterr().out
    for main, flag in ((race.main, "--data-dir"), (bench.main, "--against")):
        value = str(shards) if flag == "--data-dir" else "nanogpt"
        with pytest.raises(UserError, match="--peer '/nowhere' is no clone of nanoGPT: git clone"):
            main(["--peer", "/nowhere", flag, value, "--out", str(tmp_path / "none")])
    assert not os.path.exists(tmp_path / "none.json")


def test_the_step_of_nanogpts_model_is_measured_with_its_own_code(peer, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "model", sys.modules["model"])
    m = bench.Machine(bench.BenchConfig(device="cpu", model="tiny", batch_size=2, compile=False))
    options = m.step("", theirs=str(peer), keep_memory=False, dtype=torch.float32).options
    with start_world("cpu") as world:
        assert float(peers.training(world, **options)()["loss"]) == pytest.approx(math.log(50304))

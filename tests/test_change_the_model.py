"""The changes of docs/changes, applied to a copy of this code, keep its promises."""

import importlib.util
import json
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    documents,
    losses,
    random_model,
    tiny_run,
    wait_for_file,
    weights_hash,
    write_shard,
)
from test_hf import loss_of
from warm import two_ranks

import model as unchanged
from model import GPT
from support.base.errors import UserError
from support.weights import hf

transformers = pytest.importorskip("transformers")

CHANGES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "changes").glob("*.diff")
}
LION = "lion"
ROTARY = "rotary"
DROPOUT = "dropout"
RELU2 = "ReLU²"
CHANGES[RELU2] = """\
--- a/config.py
+++ b/config.py
@@ -54,2 +54,3 @@
     n_layer: Annotated[int, Range(1, 10_000)] = 12  # blocks
+    activation: Literal["gelu", "relu2"] = "gelu"  # of the MLP
     n_head: Annotated[int, Range(1, 10_000)] = 12  # attention heads in each block
--- a/model.py
+++ b/model.py
@@ -40,2 +40,3 @@
     n_embd: int = 768
+    activation: str = "gelu"
     # Pad the embedding's rows to a multiple of this, in memory only: GPUs are faster with it.
@@ -92,2 +93,3 @@
         self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
+        self.activation = config.activation
 
@@ -95,2 +97,4 @@
         x = self.c_fc(x)
+        if self.activation == "relu2":
+            return self.c_proj(F.relu(x).square())  # So et al. 2021
         x = F.gelu(x, approximate="tanh")  # the tanh form is part of GPT-2
"""
FLAGS = "--sequence-length 64 --total-batch-size 256 --max-steps 16 --checkpoint-every 4 "
FLAGS += "--keep-checkpoints 9 "

# Run in the copy: the cache and HellaSwag's shared contexts compute what the model does without.
CHECK = """
import json, sys
import torch
import torch.nn.functional as F
import hellaswag
from model import GPT

model = GPT.from_pretrained(sys.argv[1]).eval()
prompts = torch.randint(0, 50257, (2, 9), generator=torch.Generator().manual_seed(0))
lengths = [4, 9]
out = model.generate(prompts, 8, lengths=lengths, temperature=0)
with torch.no_grad():
    for row, length in zip(out, lengths):
        for n in range(length, length + 8):
            assert model(row[None, :n])[0][0, -1].argmax() == row[n], "another token"
    examples = [json.loads(line) for line in open(sys.argv[2])]
    found = hellaswag.score(model, examples, "cpu")
    for example, ours in zip(examples, found):
        tokens, mask, _ = hellaswag.render_example(example)
        logits = model(tokens)[0][:, :-1].transpose(1, 2)
        plain = (F.cross_entropy(logits, tokens[:, 1:], reduction="none") * mask[:, 1:]).sum(1)
        assert (torch.from_numpy(ours) - plain).abs().max() < 1e-2, "another loss"
print("the same")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_shard(folder / "toy_val_000000.npy", documents(700, seed=0))
    write_shard(folder / "toy_train_000001.npy", documents(3000, seed=1))
    endings = ["pours it out.", "sings.", "goes home at once.", "eats the whole plate of it."]
    examples = [
        dict(ctx=f"A man {doing} a cup of tea. He", endings=endings, label=0)
        for doing in ("makes", "spills and then cleans up")
    ]
    (folder / "hellaswag.jsonl").write_text("\n".join(map(json.dumps, examples)))
    return folder


def copy_with(change: str, folder) -> None:
    """Makes a copy of the repository with one of the page's changes."""
    folder.mkdir()
    for name in ("support", "assets"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("*.py"):
        shutil.copy(script, folder)
    (folder / "check.py").write_text(CHECK)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    diff = CHANGES[change].encode()
    subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, check=True)


def run(warm, place, script, *args, expect: int = 0, **how):
    """Runs a script of place/copy; fails, with what it printed, unless it ends as expected."""
    done = warm.run(script, *args, root=place / "copy", **how)
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def train_kill_resume(warm, place, files, flags: str, ranks=dict):
    """Trains with and without a kill -9 on the way -> the last checkpoint, the same of both."""
    whole = run(warm, place, "train_gpt2.py", *tiny_run(files, place / "whole", flags), **ranks())
    cut = tiny_run(files, place / "cut", flags)
    pid = warm.start("train_gpt2.py", *cut, root=place / "copy", **ranks())
    wait_for_file(place / "cut" / "ckpt_000004")
    warm.kill(pid)
    last = place / "cut" / "ckpt_000016"
    assert not last.exists()
    resumed = run(warm, place, "train_gpt2.py", *cut, "--resume", "auto", **ranks())
    assert "resuming from" in resumed.stdout
    assert losses(place / "cut") == losses(place / "whole")
    assert weights_hash(last) == weights_hash(place / "whole" / last.name)
    kind = json.loads((last / "config.json").read_text())["model_type"]
    said = [done.stdout.count("model: not a GPT-2") for done in (whole, resumed)]
    assert said == ([1, 1] if kind == "gpt2-changed" else [0, 0])
    return last


def use(warm, place, files, last, flags: str) -> None:
    """Every script of the copy takes its checkpoint."""
    examples = files / "hellaswag.jsonl"
    assert run(warm, place, "check.py", last, examples).stdout == "the same\n"
    asked = ["--model", last, "--max-new-tokens", 3, "--prompt", "Hello"]
    assert run(warm, place, "sample.py", *asked).stdout.startswith("Hello")
    scored = run(warm, place, "hellaswag.py", "--model", last, "--path", examples)
    assert "acc_norm" in scored.stdout
    tune = f"{flags} --max-steps 1 --warmup-steps 0 --checkpoint-every 0 --init-from"
    run(warm, place, "train_gpt2.py", *tiny_run(files, place / "tuned", tune, last))
    assert losses(place / "tuned")[0] < losses(place / "whole")[0] - 0.5


def refused_by_transformers(directory) -> None:
    with pytest.raises(ValueError, match="gpt2-changed"):
        transformers.AutoModelForCausalLM.from_pretrained(directory)
    with pytest.raises(Exception, match="not GPT-2"):
        transformers.GPT2LMHeadModel.from_pretrained(directory)
    assert "This is not a GPT-2" in (directory / "README.md").read_text(encoding="utf-8")


def test_relu2_becomes_a_flag_that_checkpoints_know(warm, files, tmp_path):
    copy_with(RELU2, tmp_path / "copy")
    last = train_kill_resume(warm, tmp_path, files, f"{FLAGS} --activation relu2")
    use(warm, tmp_path, files, last, FLAGS)  # --init-from keeps what the checkpoint has
    tuned = json.loads((tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()[0])
    assert tuned["model"]["activation"] == "relu2"
    # a resumed run once forgot the flag
    forgotten = tiny_run(files, tmp_path / "cut", f"{FLAGS} --resume auto")
    told = run(warm, tmp_path, "train_gpt2.py", *forgotten, expect=1).stderr
    assert "cannot be resumed with another activation relu2 -> gelu" in told
    refused_by_transformers(last)
    with pytest.raises(UserError, match="unexpected keyword argument 'activation'"):
        GPT.from_pretrained(last)


def test_lion_takes_signs_holds_one_moment_and_resumes_exactly_on_two_ranks(warm, files, tmp_path):
    copy_with(LION, tmp_path / "copy")
    spec = importlib.util.spec_from_file_location("optim_with_lion", tmp_path / "copy" / "optim.py")
    optim = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(optim)
    model = random_model()
    [lion] = optim.lion(model, 0.1, learning_rate=1e-2, betas=(0.9, 0.99), eps=1e-8)
    p = model.transformer.wte.weight
    x, m = p.detach().clone(), torch.zeros_like(p)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        lion.step()
        x = x - 1e-2 * (torch.sign(0.9 * m + 0.1 * p.grad) + 0.1 * x)  # the paper's algorithm 2
        m = 0.99 * m + 0.01 * p.grad
        torch.testing.assert_close(p.detach(), x)
    flags = f"{FLAGS} --optimizer lion --sharding zero1"
    last = train_kill_resume(warm, tmp_path, files, flags, ranks=two_ranks)
    state = torch.load(last / "training_state.pt")["optimizer"]["state"]
    assert {name for moments in state.values() for name in moments} == {"momentum"}
    assert transformers.GPT2LMHeadModel.from_pretrained(last)


def test_rotary_positions_reach_the_cache_and_hellaswag(warm, files, tmp_path):
    copy_with(ROTARY, tmp_path / "copy")
    last = train_kill_resume(warm, tmp_path, files, FLAGS)
    use(warm, tmp_path, files, last, FLAGS)
    refused_by_transformers(last)
    with pytest.raises(UserError, match="does not have the same change"):
        GPT.from_pretrained(last)


def test_dropout_resumes_exactly_on_two_ranks_and_leaves_a_gpt2(warm, files, tmp_path):
    copy_with(DROPOUT, tmp_path / "copy")
    flags = f"{FLAGS} --dropout 0.1"
    last = train_kill_resume(warm, tmp_path, files, flags, ranks=two_ranks)
    use(warm, tmp_path, files, last, flags)
    other = tiny_run(files, tmp_path / "cut", f"{FLAGS} --max-steps 17 --resume auto")
    assert "dropout 0.1 -> 0.0" in run(warm, tmp_path, "train_gpt2.py", *other).stdout
    without = f"{FLAGS} --max-steps 1 --warmup-steps 0 --checkpoint-every 0 --init-from"
    run(warm, tmp_path, "train_gpt2.py", *tiny_run(files, tmp_path / "without", without, last))
    assert losses(tmp_path / "without") != losses(tmp_path / "tuned")  # so there was dropout
    theirs = transformers.GPT2LMHeadModel.from_pretrained(last).eval()
    idx = torch.randint(0, 50257, (1, 20))
    with torch.no_grad():
        assert (GPT.from_pretrained(last)(idx)[0] - theirs(idx).logits).abs().max() < 1e-4


# -- another computation, the same names


def relu2(self, x):
    return self.c_proj(F.relu(self.c_fc(x)).square())


CHANGED = [(unchanged.MLP, "forward", relu2), (GPT, "loss", loss_of(label_smoothing=0.1))]


@pytest.mark.parametrize("change", CHANGED)
def test_another_mlp_or_loss_is_no_gpt2_and_only_that_code_reads_it(tmp_path, monkeypatch, change):
    gpt2 = tmp_path / "gpt2"
    random_model().save_pretrained(gpt2)
    hf.refuse_resume_by_changed_code(gpt2, random_model().fingerprint)
    with monkeypatch.context() as changed:
        changed.setattr(*change)
        model = random_model()
        model.save_pretrained(tmp_path)
        idx = torch.randint(0, 50257, (1, 20))
        assert torch.equal(GPT.from_pretrained(tmp_path)(idx)[0], model(idx)[0])
        with pytest.raises(UserError, match="is a GPT-2, but this code is not"):
            hf.refuse_resume_by_changed_code(gpt2, model.fingerprint)
    refused_by_transformers(tmp_path)
    with pytest.raises(UserError, match=r"standard deviations.* does not have the same change"):
        GPT.from_pretrained(tmp_path)

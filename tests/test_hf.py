"""Models in and out: Hugging Face directories, the checkpoints that training writes, other
projects' files.
"""

import ast
import functools
import json
import random
import re
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    SHARED_DATA,
    documents,
    random_model,
    run_program,
    run_script,
    train,
    write_shard,
)
from safetensors.torch import load_file

import model
from model import GPT, GPTConfig
from support.common import UserError
from support.fingerprint import Fingerprint, take_fingerprint
from support.tokenizer import EOT, get_tokenizer

transformers = pytest.importorskip("transformers")

GPT2 = dict(block_size=1024, n_layer=12, n_head=12, n_embd=768)
SHAPES = [  # what differs from the 124M
    dict(block_size=24, n_layer=2, n_head=2, n_embd=16),
    dict(n_layer=3, n_head=1, n_embd=48),
    dict(),
]


def in_transformers(directory):
    model = transformers.GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def same_weights(a: GPT, b: GPT) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_go_from_us_to_transformers_and_back_bit_for_bit(tmp_path, shape):
    ours = random_model(**(GPT2 | shape))
    ours.save_pretrained(tmp_path / "ours")
    theirs = in_transformers(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    back = GPT.from_pretrained(tmp_path / "theirs")
    assert same_weights(ours, back)
    idx = torch.randint(0, 50257, (2, 20))
    with torch.no_grad():
        logits = ours(idx)[0]
        assert (logits - theirs(idx).logits).abs().max() < 1e-4
        assert torch.equal(logits, back(idx)[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_go_from_transformers_to_us_and_back_bit_for_bit(tmp_path, shape):
    torch.manual_seed(2)
    sizes = GPT2 | shape
    config = transformers.GPT2Config(
        n_positions=sizes["block_size"],
        n_layer=sizes["n_layer"],
        n_head=sizes["n_head"],
        n_embd=sizes["n_embd"],
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = GPT.from_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    a = theirs.state_dict()
    b = in_transformers(tmp_path / "ours").state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    idx = torch.randint(0, 50257, (2, 20))
    with torch.no_grad():
        assert (ours(idx)[0] - theirs(idx).logits).abs().max() < 1e-4


def test_loading_draws_no_random_weights_and_leaves_the_padding_zero(tmp_path):
    random_model().save_pretrained(tmp_path)
    state = torch.get_rng_state()
    model = GPT.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.transformer.wte.weight[50257:].any()
    assert model.lm_head.weight is model.transformer.wte.weight


def test_the_model_card_tells_what_it_is_told(tmp_path, tiny):
    told = {"data": "my.txt", "steps": 3, "command": "python train_gpt2.py | tee log"}
    tiny.save_pretrained(tmp_path, card=told)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| data | my.txt |\n| steps | 3 |" in card
    assert "train_gpt2.py \\| tee" in card
    assert "2M parameters" in card


def test_weights_of_the_hub_without_the_prefix_and_as_a_pickle_load_too(tmp_path):
    ours = random_model()
    ours.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name.removeprefix("transformer."): w for name, w in load_file(file).items()}
    file.unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert same_weights(GPT.from_pretrained(tmp_path), ours)


def test_the_tokenizer_beside_the_weights_is_gpt2s(tmp_path, tiny):
    tiny.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer("Hello, I'm a language model,")["input_ids"]
    assert tokens == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert tokenizer.eos_token_id == EOT
    assert tokenizer.model_max_length == 32
    encode = get_tokenizer().encode_ordinary
    for text in random_texts():
        assert tokenizer(text)["input_ids"] == encode(text), repr(text)


def random_texts() -> Iterator[str]:
    """10,000 texts of any characters: first of one plane of Unicode each, then of all."""
    rng = random.Random(0)
    for plane in range(17):
        first = 0x10000 * plane
        for _ in range(400):
            yield whole_text(chr(first + rng.randrange(0x10000)) for _ in range(9))
    common = " \n'sé字🌍\u200d"
    for _ in range(3200):
        yield whole_text(rng.choice(common) + chr(rng.randrange(0x110000)) for _ in range(9))


def whole_text(parts: Iterable[str]) -> str:
    """The parts joined, without surrogates, which are no characters."""
    return "".join(parts).encode("utf-8", errors="ignore").decode()


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="needs ../shared/data")
def test_tiny_shakespeare_has_the_same_tokens_in_transformers(tmp_path, tiny):
    tiny.save_pretrained(tmp_path)
    text = (SHARED_DATA / "tinyshakespeare.txt").read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, model_max_length=10**6)
    assert tokenizer(text)["input_ids"] == get_tokenizer().encode_ordinary(text)


def test_a_shorter_context_crops_the_positions_and_a_longer_one_is_refused(tmp_path):
    ours = random_model()
    ours.save_pretrained(tmp_path)
    short = GPT.from_pretrained(tmp_path, block_size=10)
    idx = torch.randint(0, 50257, (1, 10))
    assert torch.equal(short(idx)[0], ours(idx)[0])
    with pytest.raises(UserError, match=r"can be \d+ or less"):
        GPT.from_pretrained(tmp_path, block_size=25)


# -- nanoGPT's and build-nanogpt's files


def their_weights(model: GPT, prefix: str) -> dict:
    """Their names, with 47 rows of padding that have learned something."""
    weights = {name: w.detach().clone() for name, w in model.state_dict().items()}
    padding = torch.randn(47, model.config.n_embd)
    embedding = torch.cat([weights["transformer.wte.weight"][:50257], padding])
    weights["transformer.wte.weight"] = embedding
    weights["lm_head.weight"] = embedding
    return {prefix + name: w for name, w in weights.items()}


FIELDS = dict(block_size=24, vocab_size=50304, n_layer=2, n_head=2, n_embd=16)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "_orig_mod.module."])
def test_a_checkpoint_of_nanogpt_loads(tmp_path, prefix):
    ours = random_model()
    saved = dict(
        model=their_weights(ours, prefix),
        optimizer=dict(state={0: dict(step=torch.tensor(1.0))}, param_groups=[]),
        model_args=dict(**FIELDS, bias=True, dropout=0.0),
        iter_num=5,
        best_val_loss=torch.tensor(3.0),
        config=dict(dataset="openwebtext"),
    )
    torch.save(saved, tmp_path / "ckpt.pt")
    assert same_weights(GPT.from_pretrained(tmp_path / "ckpt.pt"), ours)


def test_nanogpts_exact_gelu_is_mentioned_once_and_build_nanogpts_tanh_form_is_not(
    tmp_path, capsys
):
    weights = their_weights(random_model(), "")
    torch.save(dict(model=weights, model_args=FIELDS), tmp_path / "ckpt.pt")
    GPT.from_pretrained(tmp_path / "ckpt.pt")
    told = capsys.readouterr()
    assert told.out == ""  # where samples and JSON go
    [line] = told.err.splitlines()
    assert "nanoGPT trains with exact GELU" in line


def test_files_of_before_pytorch_1_6_load_too(tmp_path):
    ours = random_model()
    ours.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    old = dict(_use_new_zipfile_serialization=False)
    torch.save(weights, tmp_path / "pytorch_model.bin", **old)
    assert same_weights(GPT.from_pretrained(tmp_path), ours)
    saved = dict(model=their_weights(ours, ""), model_args=FIELDS)
    torch.save(saved, tmp_path / "ckpt.pt", **old)
    assert same_weights(GPT.from_pretrained(tmp_path / "ckpt.pt"), ours)


def test_a_nanogpt_without_biases_has_zeros(tmp_path):
    ours = random_model()
    with torch.no_grad():
        for name, p in ours.named_parameters():
            if name.endswith("bias"):
                p.zero_()
    weights = {name: w for name, w in their_weights(ours, "").items() if not name.endswith("bias")}
    torch.save(dict(model=weights, model_args=FIELDS), tmp_path / "ckpt.pt")
    assert same_weights(GPT.from_pretrained(tmp_path / "ckpt.pt"), ours)


@pytest.mark.parametrize("module", ["__main__", "train_gpt2"])
def test_a_model_of_build_nanogpt_loads(tmp_path, monkeypatch, capsys, module):
    ours = random_model()
    config = type("GPTConfig", (), {"__module__": module})()  # a dataclass of its script, pickled
    vars(config).update(FIELDS)
    saved = dict(model=their_weights(ours, ""), config=config, step=19072, val_loss=3.07)
    with monkeypatch.context() as there:
        there.setitem(sys.modules, module, types.SimpleNamespace(GPTConfig=type(config)))
        torch.save(saved, tmp_path / "model_19072.pt")
    assert same_weights(GPT.from_pretrained(tmp_path / "model_19072.pt"), ours)
    assert capsys.readouterr().err == ""  # its GELU is GPT-2's


class Evil:
    def __reduce__(self):
        return (open, ("evil-was-here", "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "ckpt.pt"])
def test_a_pickle_with_code_in_it_is_refused_and_not_run(tmp_path, monkeypatch, tiny, name):
    monkeypatch.chdir(tmp_path)
    tiny.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model": {}, "transformer.wte.weight": Evil()}, tmp_path / name)
    given = tmp_path / name if name == "ckpt.pt" else tmp_path
    with pytest.raises(UserError, match="refused"):
        GPT.from_pretrained(given)
    assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize("content", [{"model": {}}, [1], {"model_args": FIELDS, "model": {}}])
def test_another_pt_file_is_a_sentence(tmp_path, content):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(UserError, match=r"no checkpoint of nanoGPT|no tensor transformer"):
        GPT.from_pretrained(tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:100])
    with pytest.raises(UserError, match=r"no checkpoint|refused"):
        GPT.from_pretrained(tmp_path / "y.pt")
    with pytest.raises(UserError, match="not there"):
        GPT.from_pretrained(tmp_path / "z.pt")


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(model_type="llama"), "only GPT-2's architecture"),
        (dict(activation_function="relu"), "activation_function relu"),
        (dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon 1e-06"),
        (dict(n_layer=3), "no tensor transformer.h.2"),
        (dict(n_embd=32, n_head=2), "has shape"),
        (dict(n_head=3), "does not divide"),
    ],
)
def test_what_is_no_gpt2_is_refused_in_a_sentence(tmp_path, change, sentence):
    random_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=sentence):
        GPT.from_pretrained(tmp_path)


def test_truncated_weights_are_called_damaged(tmp_path, tiny):
    tiny.save_pretrained(tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(UserError, match="damaged"):
        GPT.from_pretrained(tmp_path)


def test_a_name_that_is_nowhere_is_a_sentence(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="no-such-model"):
        GPT.from_pretrained("no-such-model")


def test_a_hub_that_cannot_be_reached_is_one_line():
    done = run_script(
        "sample.py",
        "--model",
        "no-such-model",
        expect=1,
        HF_ENDPOINT="http://127.0.0.1:1",  # a port that nobody listens at
        HF_HUB_OFFLINE="0",
    )
    [line] = done.stderr.splitlines()
    sentence = "'no-such-model' is not a directory here, and the hub cannot be reached "
    assert line.startswith(f"sample.py: {sentence}")


# -- the label: is this code a GPT-2?

SMALL = dict(block_size=40, n_layer=3, n_head=3, n_embd=48)


def difference(**fields) -> str:
    return GPT(GPTConfig(**(SMALL | fields))).fingerprint.difference


def exact_gelu(self, x):
    return self.c_proj(F.gelu(self.c_fc(x)))


def windowed(self, x, mask=None, cache=None):
    """Attention that sees 39 tokens: of 40, only the last one misses anything."""
    ones = torch.ones(x.size(1), x.size(1), dtype=torch.bool)
    return attention(self, x, mask=ones.tril() & ones.triu(-38))


attention = model.CausalSelfAttention.forward


def after_the_block(self, x, mask, cache):
    x = self.ln_1(x + self.attn(x, mask, cache))
    return self.ln_2(x + self.mlp(x))


def soft_cap(self, x):
    return 30 * (logits(self, x) / 30).tanh()


logits = GPT.logits


def broken(self, x):
    raise RuntimeError("no such kernel\nand a page of more")


@pytest.mark.parametrize(
    "part, name, changed, sentence",
    [
        (model.MLP, "forward", exact_gelu, "standard deviations"),
        (model.MLP, "forward", broken, "cannot be compared: no such kernel$"),
        (model.CausalSelfAttention, "forward", windowed, "standard deviations"),
        (model.Block, "layers", after_the_block, "standard deviations"),
        (GPT, "logits", soft_cap, "standard deviations"),
        (torch.nn, "LayerNorm", functools.partial(torch.nn.LayerNorm, eps=1e-6), "deviations"),
        (torch.nn, "LayerNorm", torch.nn.RMSNorm, "no tensor transformer.h.0.ln_1.bias"),
    ],
)
def test_code_that_computes_something_else_is_no_gpt2(monkeypatch, part, name, changed, sentence):
    monkeypatch.setattr(part, name, changed)
    assert re.search(sentence, difference())


def test_another_tensor_anywhere_is_no_gpt2(monkeypatch):
    block = model.Block.__init__

    def third_has_more(self, config):
        block(self, config)
        third_has_more.count += 1
        if third_has_more.count == 3:
            self.mlp.c_proj = torch.nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    third_has_more.count = 0
    monkeypatch.setattr(model.Block, "__init__", third_has_more)
    assert difference() == "it has no tensor transformer.h.2.mlp.c_proj.bias"


@pytest.mark.parametrize("fields", [dict(pad_vocab_to=1), dict(activation_checkpointing=True)])
def test_this_code_is_a_gpt2_whatever_its_harmless_fields(fields):
    assert difference(**fields) == ""


def test_no_setting_of_precision_changes_the_label_or_is_changed_and_no_number_is_drawn():
    plain = GPT(GPTConfig(**SMALL)).fingerprint.logits
    before = torch.get_rng_state()
    with settings_of_a_wild_run():
        with torch.autocast("cpu", torch.bfloat16):
            found = take_fingerprint(GPT, GPTConfig(**SMALL))
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.are_deterministic_algorithms_enabled()
        assert torch._C._get_mkldnn_enabled()
    assert found == Fingerprint("", plain)
    assert torch.equal(torch.get_rng_state(), before)


@contextmanager
def settings_of_a_wild_run():
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.set_default_device(None)


def test_the_label_is_found_out_once_a_run_not_at_each_save(tmp_path, monkeypatch):
    ours = random_model()
    calls = []
    found = model.take_fingerprint

    def count(*args):
        calls.append(args)
        return found(*args)

    monkeypatch.setattr(model, "take_fingerprint", count)
    for name in "abc":
        ours.save_pretrained(tmp_path / name)
    assert len(calls) == 1


def test_the_head_of_a_model_that_unties_it_is_saved_without_its_padding(tmp_path, monkeypatch):
    def untied(self, device):
        self.to_empty(device=device)

    monkeypatch.setattr(GPT, "allocate", untied)
    ours = random_model()
    assert ours.fingerprint.difference == "GPT-2 has no tensor lm_head.weight"
    ours.save_pretrained(tmp_path)
    back = GPT.from_pretrained(tmp_path, pad_vocab_to=1)
    idx = torch.randint(0, 50257, (1, 20))
    assert torch.equal(back(idx)[0], ours(idx)[0])
    assert not torch.equal(back.lm_head.weight, back.transformer.wte.weight)


@pytest.mark.parametrize("damage", ["gpt_config", "fingerprint", "n_layer"])
def test_a_damaged_config_of_a_changed_model_is_a_sentence(tmp_path, monkeypatch, damage):
    with monkeypatch.context() as there:
        there.setattr(model.MLP, "forward", exact_gelu)
        random_model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    if damage == "n_layer":
        config["gpt_config"]["n_layer"] = "many"
    else:
        del config[damage]
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="it is damaged"):
        GPT.from_pretrained(tmp_path)


# -- checkpoints that training wrote


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The last checkpoint of a tiny training run."""
    directory = tmp_path_factory.mktemp("run")
    shards = directory / "shards"
    shards.mkdir()
    for split in ("val", "train"):
        write_shard(shards / f"toy_{split}_000000.npy", documents(2000, seed=0))
    train(shards, directory / "log", "--checkpoint-every 6")
    return directory / "log" / "ckpt_000006"


OFFLINE = dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")


def test_a_checkpoint_of_training_runs_in_transformers_pipeline_offline(checkpoint):
    code = f"""from transformers import pipeline
generate = pipeline("text-generation", model={str(checkpoint)!r})
generate("Hello")  # as many tokens as fit into the window
print(generate("Hello", do_sample=False, max_new_tokens=5))"""
    done = run_program([sys.executable, "-c", code], **OFFLINE)
    assert done.returncode == 0, done.stderr
    idx = torch.tensor([get_tokenizer().encode_ordinary("Hello")])
    tokens = GPT.from_pretrained(checkpoint).generate(idx, 5, temperature=0, stop=EOT)[0]
    text = get_tokenizer().decode(tokens.tolist()).split("<|endoftext|>")[0]
    assert ast.literal_eval(done.stdout) == [{"generated_text": text}]


def test_fine_tuning_takes_fewer_positions_and_refuses_more(checkpoint, tmp_path):
    def tune(T: int, expect: int):
        shards = checkpoint.parent.parent / "shards"
        flags = f"--sequence-length {T} --checkpoint-every 6 --init-from"
        return train(shards, tmp_path / str(T), flags, checkpoint, expect=expect)

    tune(8, expect=0)
    assert GPT.from_pretrained(tmp_path / "8" / "ckpt_000006").config.block_size == 8
    assert "the weights know 16 positions, 32 were asked for" in tune(32, expect=1).stderr

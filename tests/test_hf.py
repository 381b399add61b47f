"""Models in and out: Hugging Face directories, checkpoints, other projects' files."""

import ast
import functools
import json
import math
import random
import re
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import EOT, POINTER, ROOT, random_model, run_program, run_script, train
from contract import RIGHT, TOLD
from safetensors.torch import load_file, save_file

import model
from model import GPT, GPTConfig
from support.base.errors import UserError
from support.text.tokenizer import gpt2, train_vocabulary
from support.weights.fingerprint import EARLIER, EMBEDDING, take_fingerprint
from support.weights.hf import HEAD, Pretrained, check_vocabulary, refuse_other_change

transformers = pytest.importorskip("transformers")


def same_weights(a: GPT, b: GPT) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("shape", [{}, dict(block_size=1024, n_layer=2, n_head=12, n_embd=768)])
def test_weights_go_to_transformers_and_back_bit_for_bit(tmp_path, shape):
    ours = random_model(**shape)
    ours.save_pretrained(tmp_path / "ours")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
    theirs.save_pretrained(tmp_path / "theirs")
    state = torch.get_rng_state()
    back = GPT.from_pretrained(tmp_path / "theirs")
    assert torch.equal(torch.get_rng_state(), state)  # loading draws no random weights
    assert same_weights(ours, back)
    assert not back.transformer.wte.weight[50257:].any()  # the padding stays zero
    assert back.lm_head.weight is back.transformer.wte.weight
    back.save_pretrained(tmp_path / "back")
    for file in (tmp_path / "ours").iterdir():
        assert file.read_bytes() == (tmp_path / "back" / file.name).read_bytes()
        assert file.stat().st_mode & 0o444 == 0o444  # anyone may read it
    idx = torch.randint(0, 50257, (2, 20))
    with torch.no_grad():
        logits = ours(idx)[0]
        assert (logits - theirs(idx).logits).abs().max() < 1e-4
        assert torch.equal(logits, back(idx)[0])


def test_the_hours_weights_open_in_transformers_as_the_bfloat16_that_they_are():
    folder = ROOT / "runs" / "laptop" / "model"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.bfloat16
    assert (folder / "model.safetensors").stat().st_size <= 8e6
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    idx = tokenizer("Once upon a time there was a king", return_tensors="pt").input_ids
    ours = GPT.from_pretrained(folder)
    with torch.no_grad():
        assert (ours(idx)[0] - theirs.float()(idx).logits).abs().max() < 1e-4
    assert idx.tolist() == [ours.tokenizer.encode("Once upon a time there was a king")]


@pytest.mark.parametrize("old", [{}, dict(_use_new_zipfile_serialization=False)])
def test_weights_as_on_the_hub_load_without_the_prefix_with_masks_and_as_a_pickle(tmp_path, old):
    ours = random_model()
    ours.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name.removeprefix("transformer."): w for name, w in load_file(file).items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
    weights["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    weights["lm_head.weight"] = weights["wte.weight"].clone()
    save_file(weights, file)
    assert same_weights(GPT.from_pretrained(tmp_path), ours)
    file.unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin", **old)  # before PyTorch 1.6, and since
    assert same_weights(GPT.from_pretrained(tmp_path), ours)


THEIRS = dict(n_positions=24, n_layer=2, n_head=2, n_embd=16)


@pytest.mark.parametrize("safe", [True, False])
def test_every_layout_that_transformers_loads_is_loaded(tmp_path, safe):
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**THEIRS))
    theirs.save_pretrained(tmp_path, max_shard_size="1MB")
    if not safe:  # as older versions wrote it
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        for name in set(index["weight_map"].values()):
            torch.save(load_file(tmp_path / name), tmp_path / f"{name}.bin")
            (tmp_path / name).unlink()
        index["weight_map"] = {name: f"{file}.bin" for name, file in index["weight_map"].items()}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        (tmp_path / "model.safetensors.index.json").unlink()
    assert not (tmp_path / "model.safetensors").exists()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["vocab_size"], config["n_layer"], config["n_positions"]  # the default, two aliases
    config |= dict(num_hidden_layers=2, max_position_embeddings=24)
    config["activation_function"] = "gelu_pytorch_tanh"
    (tmp_path / "config.json").write_text(json.dumps(config))
    idx = torch.randint(0, 50257, (2, 20))
    with torch.no_grad():
        expected = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)(idx).logits
        assert (GPT.from_pretrained(tmp_path)(idx)[0] - expected).abs().max() < 1e-4
    for path in tmp_path.glob("*model*"):
        path.unlink()
    with pytest.raises(
        UserError, match=r"has no weights that are read here \(model.safetensors or"
    ):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize("index", ["model.safetensors", "pytorch_model.bin"])
def test_of_two_sets_of_weights_transformers_own_choice_is_loaded(tmp_path, index, outcome):
    """An older save in several files left its index, as where a fine-tuned model came to lie."""
    old, new = tmp_path / "old", tmp_path / "new"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**THEIRS)).save_pretrained(
        old, max_shard_size="1MB"
    )
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**THEIRS)).save_pretrained(new)
    for path in old.glob("*.safetensors*"):
        shutil.copy(path, new)
    if index == "pytorch_model.bin":
        torch.save(load_file(new / "model.safetensors"), new / "pytorch_model.bin")
        (new / "model.safetensors").unlink()
        (new / "model.safetensors.index.json").rename(new / "pytorch_model.bin.index.json")
    idx = torch.randint(0, 50257, (2, 20))
    with torch.no_grad():
        expected = transformers.GPT2LMHeadModel.from_pretrained(new)(idx).logits
        assert (GPT.from_pretrained(new)(idx)[0] - expected).abs().max() < 1e-4
    outcome("weights and tokenizers", f"two sets, {index}", RIGHT)


def test_the_padding_of_someone_elses_embedding_is_cropped_but_no_other_size(tmp_path, tiny):
    tiny.save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights = load_file(file)
    for rows, is_padding in {50304: True, 50300: False}.items():
        padded = weights | {EMBEDDING: torch.randn(rows, 32)}
        padded[EMBEDDING][:50257] = weights[EMBEDDING]
        save_file(padded, file)
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": rows}))
        if is_padding:
            assert same_weights(GPT.from_pretrained(tmp_path), tiny)
            continue
        with pytest.raises(UserError, match="has 50300 tokens, its tokenizer 50257"):
            check_vocabulary(str(tmp_path), GPT.from_pretrained(tmp_path))


def add_tokens(folder):
    (folder / "tokenizer.json").unlink()  # as older versions of transformers saved them
    (folder / "added_tokens.json").write_text('{"<|user|>": 50257}')


@pytest.mark.parametrize("change, sentence", [
    (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds an adapter, which"),
    (add_tokens, "vocab.json is not GPT-2's, or added_tokens.json adds tokens"),
])  # fmt: skip
def test_what_lies_beside_the_weights_is_used_or_refused(tmp_path, change, sentence, outcome):
    random_model().save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(UserError, match=sentence):
        GPT.from_pretrained(tmp_path)
    outcome("weights and tokenizers", sentence, TOLD)


@pytest.mark.parametrize("rows, own", [(100277, ""), (50304, train_vocabulary(["a"], 257).json)])
def test_a_pt_file_of_a_vocabulary_that_is_not_there_is_told(tmp_path, rows, own):
    """Rows above GPT-2's were once cut off, as padding."""
    ours = random_model(vocab_size=rows, pad_vocab_to=1)
    saved = {"model_args": FIELDS | dict(vocab_size=rows), "model": ours.state_dict()}
    torch.save(saved, tmp_path / "ckpt.pt")
    if own:
        (tmp_path / "tokenizer.json").write_text(own)
    with pytest.raises(
        UserError, match=f"has {rows} tokens, its tokenizer {257 if own else 50257}"
    ):
        check_vocabulary("it", GPT.from_pretrained(tmp_path / "ckpt.pt"))


def test_a_pt_file_with_a_vocabulary_of_its_own_takes_the_tokenizer_beside_it(tmp_path):
    own = train_vocabulary(["a b c"], 257)
    fields = FIELDS | dict(vocab_size=257)
    ours = random_model(vocab_size=257)
    weights = ours.state_dict()
    weights |= {name: weights[name][:257] for name in (EMBEDDING, HEAD)}
    torch.save({"model_args": fields, "model": weights}, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="of its vocabulary beside its weights"):
        check_vocabulary("it", GPT.from_pretrained(tmp_path / "ckpt.pt"))
    (tmp_path / "tokenizer.json").write_text(own.json)
    assert GPT.from_pretrained(tmp_path / "ckpt.pt").tokenizer.sha256 == own.sha256


MASK = "transformer.h.1.attn.bias"


@pytest.mark.parametrize("name, change, sentence", [
    ("lm_head.weight", lambda w: w + 1e-3 * torch.randn_like(w), "lm_head.weight is not as in"),
    ("lm_head.weight", lambda w: w.clone(), ""),  # the embedding once more
    (MASK, lambda _: torch.ones(1, 1, 24, 24).tril(), ""),
    (MASK, lambda _: torch.ones(1, 1, 24, 24).tril().triu(-7), f"{MASK} is not as in"),  # local
    (MASK, lambda _: torch.ones(1, 1, 24, 24), f"{MASK} is not as in GPT-2"),  # sees the future
    ("transformer.h.0.attn.masked_bias", lambda _: torch.tensor(-2.0), "masked_bias is not as in"),
    ("transformer.h.0.attn.rotary.inv_freq", lambda _: torch.ones(4), "inv_freq"),
    ("score.weight", lambda _: torch.ones(2, 16), "score.weight"),  # a classifier's
    ("wte.weight", lambda w: w + 1, "some tensors have the same name but for a prefix"),
])  # fmt: skip
def test_a_tensor_is_used_or_redundant_or_refused(tmp_path, name, change, sentence):
    ours = random_model()
    ours.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[name] = change(weights["transformer.wte.weight"])
    save_file(weights, tmp_path / "model.safetensors")
    if not sentence:
        assert same_weights(GPT.from_pretrained(tmp_path), ours)
        return
    with pytest.raises(UserError, match=re.escape(sentence)):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize("settings, sentence", [
    (dict(n_inner=32), "n_inner is 32, and OpenAI's GPT-2 has 64"),
    (dict(n_inner=64), ""),
    (dict(n_inner=None), ""),
    (dict(add_cross_attention=True), "add_cross_attention is True"),
    (dict(pruned_heads={"0": [1]}), "pruned_heads is"),
    (dict(quantization_config={"bits": 4}), "quantization_config is"),
    (dict(tie_word_embeddings=False), "tie_word_embeddings is False"),
    (dict(eos_token_id=0), "eos_token_id is 0, and OpenAI's GPT-2 has 50256"),
    (dict(eos_token_id=[50256]), ""),
    (dict(eos_token_id=None), ""),
    (dict(eos_token_id=[50256, 0]), "eos_token_id is [50256, 0], and OpenAI's GPT-2 has 50256"),
    (dict(reorder_and_upcast_attn=True, summary_type="mean", _name_or_path="x"), ""),
])  # fmt: skip
def test_a_setting_that_changes_what_is_computed_is_honoured_or_refused(
    tmp_path, settings, sentence
):
    ours = random_model()
    ours.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    if not sentence:
        assert same_weights(GPT.from_pretrained(tmp_path), ours)
        return
    with pytest.raises(UserError, match=re.escape(sentence)):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize("settings", [
    dict(tokenizer_class="T5Tokenizer"),  # as rinna's GPT-2, with a spiece.model
    dict(tokenizer_class="GPT2Tokenizer", add_prefix_space=True),
    dict(tokenizer_class="GPT2Tokenizer", add_bos_token=True),
])  # fmt: skip
def test_a_tokenizer_that_splits_text_otherwise_is_refused(tmp_path, settings):
    random_model().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "vocab.json"):
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="is of a tokenizer that gives a text other tokens"):
        GPT.from_pretrained(tmp_path)


def test_a_setting_that_nobody_here_knows_is_named_once(tmp_path, capsys):
    random_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(logit_cap=30, use_cache=True)))
    for _ in range(2):
        GPT.from_pretrained(tmp_path)
    assert capsys.readouterr().err == (
        f"{tmp_path / 'config.json'}: settings that are not used here: logit_cap\n"
    )


def test_beside_the_weights_are_a_card_with_the_facts_and_gpt2s_tokenizer(tmp_path, tiny):
    tiny.save_pretrained(tmp_path, card={"data": "my.txt", "command": "python x.py 'a\nb' | tee"})
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "2M parameters" in card
    assert "| data | my.txt |\n| command | python x.py 'a b' \\| tee |\n" in card
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == EOT
    assert tokenizer.model_max_length == 32
    rng = random.Random(0)
    for plane in range(17):  # of Unicode
        for _ in range(100):
            text = "".join(chr(0x10000 * plane + rng.randrange(0x10000)) for _ in range(9))
            text = " 's\n" + text.encode(errors="ignore").decode()
            assert tokenizer(text)["input_ids"] == gpt2().encode(text), repr(text)


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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.module."])
def test_a_checkpoint_of_nanogpt_loads(tmp_path, capsys, prefix, bias):
    ours = random_model()
    weights = their_weights(ours, prefix)
    if not bias:  # the same as zeros
        weights = {name: w for name, w in weights.items() if not name.endswith("bias")}
        for name, p in ours.named_parameters():
            p.data *= not name.endswith("bias")
    saved = dict(model=weights, model_args=dict(**FIELDS, bias=bias, dropout=0.0), iter_num=5)
    saved |= dict(optimizer=dict(state={0: dict(step=torch.tensor(1.0))}), config=dict(dataset="x"))
    torch.save(saved, tmp_path / "ckpt.pt")
    back = GPT.from_pretrained(tmp_path / "ckpt.pt")
    assert same_weights(back, ours)
    assert "(from nanoGPT)" in back.origin
    assert "nanoGPT trains with exact GELU, so the logits differ" in capsys.readouterr().err
    weights[f"{prefix}transformer.wte.weight"] = torch.randn(50432, 16)
    weights[f"{prefix}transformer.wte.weight"][:50257] = ours.transformer.wte.weight[:50257]
    weights[f"{prefix}lm_head.weight"] = weights[f"{prefix}transformer.wte.weight"]
    saved["model_args"]["vocab_size"] = 50432  # others pad to multiples of 256
    torch.save(saved, tmp_path / "ckpt.pt")
    assert same_weights(GPT.from_pretrained(tmp_path / "ckpt.pt"), ours)
    saved["model_args"]["vocab_size"] = 65
    torch.save(saved, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="has a vocabulary of characters, which nothing"):
        GPT.from_pretrained(tmp_path / "ckpt.pt")


@pytest.mark.parametrize("module", ["__main__", "train_gpt2"])
def test_a_model_of_build_nanogpt_loads(tmp_path, monkeypatch, module):
    ours = random_model()
    config = type("GPTConfig", (), {"__module__": module})()  # a dataclass of its script, pickled
    vars(config).update(FIELDS)
    saved = dict(model=their_weights(ours, ""), config=config, step=19072, val_loss=3.07)
    with monkeypatch.context() as there:
        there.setitem(sys.modules, module, types.SimpleNamespace(GPTConfig=type(config)))
        torch.save(saved, tmp_path / "model_19072.pt")
    back = GPT.from_pretrained(tmp_path / "model_19072.pt")
    assert same_weights(back, ours)
    assert back.origin.endswith("model_19072.pt (from build-nanogpt)")  # its GELU is GPT-2's


class Evil:
    def __reduce__(self):
        return (open, ("evil-was-here", "w"))


@pytest.mark.parametrize("name, given", [("pytorch_model.bin", "."), ("ckpt.pt", "ckpt.pt")])
def test_a_pickle_with_code_in_it_is_refused_and_not_run(tmp_path, monkeypatch, tiny, name, given):
    monkeypatch.chdir(tmp_path)
    tiny.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model": {}, "transformer.wte.weight": Evil()}, name)
    advice = "of this code's checkpoints, name the directory" if given == name else "fix that, then"
    refused = rf"cannot be read \(UnpicklingError: Weights only load failed\.\); {advice}"
    with pytest.raises(UserError, match=refused):
        GPT.from_pretrained(given)
    assert not (tmp_path / "evil-was-here").exists()


def test_a_directory_without_a_vocabulary_is_told_to_be_taken_for_gpt2s(tmp_path, capsys):
    random_model().save_pretrained(tmp_path)
    for told in (False, True):
        GPT.from_pretrained(tmp_path)
        assert ("has no tokenizer.json: its tokens are" in capsys.readouterr().err) == told
        for name in ("tokenizer.json", "vocab.json"):
            (tmp_path / name).unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_git_lfs_pointers_and_rubbish_are_named_and_nobody_is_told_to_run_code(
    tmp_path, tiny, name
):
    tiny.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(UserError, match=f"{name} is a pointer of Git LFS: in its clone, git lfs"):
        GPT.from_pretrained(tmp_path)
    (tmp_path / name).write_bytes(b"<html>404: Not Found</html>")
    with pytest.raises(UserError, match="cannot be read") as told:
        GPT.from_pretrained(tmp_path)
    assert "weights_only" not in str(told.value)


@pytest.mark.parametrize("content", [{"model": {}}, [1], {"model_args": FIELDS, "model": {}}, None])
def test_another_pt_file_or_none_is_a_sentence(tmp_path, content):
    if content:
        torch.save(content, tmp_path / "x.pt")
    with pytest.raises(UserError, match=r"x.pt, as a checkpoint of nanoGPT or .* cannot be read"):
        GPT.from_pretrained(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "model.pth", "adapter.pt"]
)
def test_a_file_of_weights_alone_is_told_so_and_is_never_asked_of_the_hub(
    tmp_path, monkeypatch, tiny, name
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    weights = {key: p.detach() for key, p in tiny.named_parameters()}
    save_file(weights, name) if "safe" in name else torch.save(weights, name)
    with pytest.raises(UserError, match=f"{name}, as a .*weights alone, .* name the directory$"):
        GPT.from_pretrained(name)
    Path(name).unlink()
    with pytest.raises(UserError, match=f"{name}: there is no such dir|{name}, as .*No such file"):
        GPT.from_pretrained(name)


def test_a_directory_named_as_a_model_of_the_hub_is_taken_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    random_model().save_pretrained("gpt2")
    GPT.from_pretrained("gpt2")
    told = "gpt2 is the directory here; the hub's is openai-community/gpt2"
    assert told in capsys.readouterr().err


def test_weights_with_the_names_of_compile_and_ddp_are_written_with_their_own(tmp_path):
    ours = random_model()
    wrapped = {f"_orig_mod.module.{name}": p.detach() for name, p in ours.named_parameters()}
    ours.save_pretrained(tmp_path, wrapped)
    assert same_weights(GPT.from_pretrained(tmp_path), ours)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(model_type="llama"), "model_type is llama, and OpenAI's GPT-2 has gpt2"),
        (dict(model_type=None), "model_type is None, and OpenAI's GPT-2 has gpt2"),
        (dict(activation_function="relu"), "activation_function is relu"),
        (dict(n_layer=1), 'Unexpected key.* "transformer.h.1.'),
        (dict(n_layer=3), 'Missing key.* "transformer.h.2.'),
        (dict(n_embd=32, n_head=2), "size mismatch for transformer.wte.weight"),
        (dict(vocab_size=50258), "size mismatch for transformer.wte.weight"),
        (dict(n_positions=23), "size mismatch for transformer.wpe.weight"),
        ("config.json", r"config.json cannot be read \(JSONDecodeError: "),
        ("model.safetensors", "the weights in .* cannot be read"),
    ],
)
def test_other_models_and_truncated_files_are_refused_in_a_sentence(tmp_path, change, sentence):
    random_model().save_pretrained(tmp_path)
    if isinstance(change, str):
        content = (tmp_path / change).read_bytes()
        (tmp_path / change).write_bytes(content[: len(content) // 2])
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=sentence) as refusal:
        GPT.from_pretrained(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["no-such-model", "owner/a-model.of_2"])
def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=f"'{name}' is not a directory here, and on the hub"):
        GPT.from_pretrained(name)


@pytest.mark.parametrize("name", ["log/run/ckpt_000200", "here/ckpt", "data/x", "./x", "~/x", "/x"])
def test_a_misspelt_path_and_a_log_dir_are_no_models_of_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "ckpt_000006").mkdir(parents=True)
    with pytest.raises(UserError, match=f"^{name}: there is no such directory$"):
        GPT.from_pretrained(name)
    with pytest.raises(UserError, match=r"config.json is missing: .*here/ckpt_000006"):
        GPT.from_pretrained("here")


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


def loss_of(logits_of=GPT.logits, **options):
    def loss(self, x, targets):
        logits = logits_of(self, x).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), **(dict(ignore_index=-1) | options))

    return loss


def forward_with_z_loss(self, idx, targets=None):
    logits = self.logits(self.hidden(idx))
    if targets is None:
        return logits, None
    return None, self.loss(self.hidden(idx), targets) + 1e-4 * logits.logsumexp(-1).square().mean()


def with_skip_of_layer(n: int):
    """U-net skips, say: a change that only a deep model has."""

    def blocks(self, x, mask=None, caches=None):
        for i, block in enumerate(self.transformer.h):
            x = block(x, mask, caches and caches[i]) + 0.1 * x * (i == n)
        return self.transformer.ln_f(x)

    return blocks


def window_of_wide_models(self, x, mask=None, cache=None):
    return (windowed if x.size(-1) > 32 else attention)(self, x, mask, cache)


def broken(self, x):
    raise RuntimeError("no such kernel\nand a page of more")


@pytest.mark.parametrize(
    "part, name, changed, sentence",
    [
        (model.MLP, "forward", exact_gelu, "standard deviations"),
        (model.MLP, "forward", broken, "cannot be compared: no such kernel$"),
        (model.CausalSelfAttention, "forward", windowed, "standard deviations"),
        (model.Block, "layers", lambda self, x, *_: x + self.attn(self.ln_1(x)), "deviations"),
        (GPT, "logits", lambda self, x: self.lm_head(x)[..., :61].tanh(), "deviations"),
        (GPT, "forward", forward_with_z_loss, "its loss differs by 0.0051 standard deviations$"),
        (GPT, "loss", loss_of(label_smoothing=0.1), "its loss differs"),
        (GPT, "loss", loss_of(lambda self, x: 30 * (self.logits(x) / 30).tanh()), "loss differs"),
        (GPT, "loss", loss_of(lambda self, x: self.lm_head(x)), "loss differs"),  # with the padding
        (GPT, "blocks", with_skip_of_layer(2), "standard deviations"),
        (model.CausalSelfAttention, "forward", window_of_wide_models, "standard deviations"),
        (torch.nn, "LayerNorm", functools.partial(torch.nn.LayerNorm, eps=1e-6), "deviations"),
        (torch.nn, "LayerNorm", torch.nn.RMSNorm, "h.0.ln_1.bias is missing here, and "),
    ],
)
def test_code_that_computes_something_else_is_no_gpt2(monkeypatch, part, name, changed, sentence):
    monkeypatch.setattr(part, name, changed)
    assert re.search(sentence, difference())


def test_a_model_is_what_it_computes_whatever_its_class_its_harmless_fields_and_its_context():
    for fields in (dict(pad_vocab_to=1), dict(activation_checkpointing=True), dict(block_size=1)):
        assert difference(**fields) == ""
    same = type("SameLoss", (GPT,), dict(loss=loss_of()))
    other = type("Scaled", (GPT,), dict(logits=lambda self, x: GPT.logits(self, x) / 7))
    assert same(GPTConfig(**SMALL)).fingerprint.difference == ""
    assert "standard deviations" in other(GPTConfig(**SMALL)).fingerprint.difference


def test_another_tensor_anywhere_is_no_gpt2():
    ours = GPT(GPTConfig(**SMALL))
    ours.transformer.h[2].mlp.c_proj = torch.nn.Linear(4 * 48, 48, bias=False)
    sentence = "tensor transformer.h.2.mlp.c_proj.bias is missing here, and (48,) in GPT-2"
    assert ours.fingerprint.difference == sentence


def test_no_setting_of_precision_changes_the_label_or_is_changed_and_no_number_is_drawn():
    plain = GPT(GPTConfig(**SMALL)).fingerprint
    before = torch.get_rng_state()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            narrow = GPT(GPTConfig(**SMALL)).fingerprint
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch._C._get_mkldnn_enabled()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert narrow == plain == replace(plain, difference="")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_head_of_a_model_that_unties_it_is_saved_without_its_padding(tmp_path, monkeypatch):
    def untied(self, device):
        self.to_empty(device=device)

    monkeypatch.setattr(GPT, "allocate", untied)
    ours = random_model()
    assert "lm_head.weight is (50257, 16) here, and missing" in ours.fingerprint.difference
    ours.save_pretrained(tmp_path)
    back = GPT.from_pretrained(tmp_path, pad_vocab_to=1)
    assert torch.equal(back.lm_head.weight, ours.lm_head.weight[:50257])
    assert not torch.equal(back.lm_head.weight, back.transformer.wte.weight)


def test_a_changed_model_that_an_earlier_revision_wrote_is_known_again(monkeypatch):
    monkeypatch.setattr(model.MLP, "forward", exact_gelu)
    changed = take_fingerprint(GPT(GPTConfig(**SMALL)), EARLIER)
    assert changed.difference == "its logits differ by 0.00089 standard deviations"
    written = [0.0599712, -0.0403290, -0.2295441, 0.0408342]
    assert changed.logits[:4] == pytest.approx(written, abs=1e-5)
    without_loss = Pretrained(SMALL, {}, "old", gpt2(), replace(changed, loss=math.nan))
    refuse_other_change(without_loss, GPTConfig, GPT)


def cut_a_layer(ours):
    del ours.transformer.h[-1]


def untie(ours):
    ours.lm_head.weight = torch.nn.Parameter(ours.lm_head.weight + 1)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (untie, "lm_head.weight is not the embedding, to which this code ties it"),
        (cut_a_layer, r"Missing key\(s\) in state_dict: .transformer.h.1"),
        (lambda ours: setattr(ours.transformer, "ln_f", torch.nn.RMSNorm(16)), "ln_f.bias"),
    ],
)
def test_a_model_changed_after_it_was_built_is_saved_as_what_it_is(
    tmp_path, change, sentence, outcome
):
    ours = random_model()
    assert not ours.fingerprint.difference
    change(ours)
    ours.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt2-changed"
    assert "This is not a GPT-2: tensor" in (tmp_path / "README.md").read_text()
    with pytest.raises(UserError, match=sentence):
        GPT.from_pretrained(tmp_path)
    outcome("changed models", change.__name__, TOLD)


def test_a_whole_state_dict_has_the_tied_head_and_is_a_gpt2s(tmp_path):
    ours = random_model()
    average = {name: w.clone() for name, w in ours.state_dict().items()}
    ours.save_pretrained(tmp_path, average)
    assert not transformers.GPT2LMHeadModel.from_pretrained(tmp_path).training
    assert same_weights(GPT.from_pretrained(tmp_path), ours)


def test_a_class_that_is_changed_between_two_saves_is_labelled_as_it_is(tmp_path, monkeypatch):
    ours = random_model()
    ours.save_pretrained(tmp_path / "a")
    monkeypatch.setattr(model.MLP, "forward", exact_gelu)
    ours.save_pretrained(tmp_path / "b")
    kinds = [json.loads((tmp_path / x / "config.json").read_text())["model_type"] for x in "ab"]
    assert kinds == ["gpt2", "gpt2-changed"]


def test_changed_models_of_which_no_small_form_runs_are_told_apart(tmp_path, monkeypatch, outcome):
    monkeypatch.setattr(GPT, "forward", lambda self, idx, targets=None: broken(self, idx))
    random_model().save_pretrained(tmp_path)
    GPT.from_pretrained(tmp_path)
    monkeypatch.setattr(GPT, "forward", lambda self, idx, targets=None: 1 / 0)
    with pytest.raises(UserError, match="does not have the same change"):
        GPT.from_pretrained(tmp_path)
    outcome("changed models", "no small form runs", TOLD)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["fingerprint_of"]  # an earlier revision had other words for the same
    (tmp_path / "config.json").write_text(json.dumps(config))
    GPT.from_pretrained(tmp_path)


def test_an_error_of_ones_own_change_keeps_its_traceback_and_a_field_of_another_is_told(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(model.MLP, "forward", exact_gelu)
    random_model().save_pretrained(tmp_path)

    def broken(self, config):
        config.n_embd // 0

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(model.MLP, "__init__", broken)
        GPT.from_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["gpt_config"]["n_kv_head"] = 2
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match=r"the changed GPT-2 in .* unexpected .*'n_kv_head'"):
        GPT.from_pretrained(tmp_path)


def test_a_change_of_the_logits_alone_says_that_the_loss_has_none(monkeypatch):
    logits = GPT.logits
    monkeypatch.setattr(GPT, "logits", lambda self, x: 9 * torch.tanh(logits(self, x) / 9))
    difference = GPT(GPTConfig(**SMALL)).fingerprint.difference
    assert difference.endswith("; its loss is not the cross-entropy of its logits")


def test_changed_code_says_that_it_is_none_where_it_runs_a_gpt2(tmp_path, monkeypatch, capsys):
    GPT(GPTConfig(**SMALL)).save_pretrained(tmp_path)
    GPT.from_pretrained(tmp_path)
    assert not capsys.readouterr().err
    monkeypatch.setattr(model.MLP, "forward", exact_gelu)
    GPT.from_pretrained(tmp_path)
    assert f"{tmp_path} is a GPT-2, and this code is not: its logits" in capsys.readouterr().err


# -- checkpoints that training wrote

OFFLINE = dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")


def test_a_checkpoint_of_training_runs_in_transformers_pipeline_offline(finished):
    checkpoint = finished / "ckpt_000006"
    code = f"""from transformers import pipeline
generate = pipeline("text-generation", model={str(checkpoint)!r})
generate("Hello")  # as many tokens as fit into the window
print(generate("Hello", do_sample=False, max_new_tokens=5))"""
    done = run_program([sys.executable, "-c", code], **OFFLINE)
    assert done.returncode == 0, done.stderr
    idx = torch.tensor([gpt2().encode("Hello")])
    tokens = GPT.from_pretrained(checkpoint).generate(idx, 5, temperature=0, stop=EOT)[0]
    text = gpt2().encoding.decode(tokens.tolist()).split("<|endoftext|>")[0]
    assert ast.literal_eval(done.stdout) == [{"generated_text": text}]


def test_fine_tuning_takes_fewer_positions_and_refuses_more(corpus, finished, tmp_path):
    flags = ["--checkpoint-every 6 --init-from", finished / "ckpt_000006", "--sequence-length"]
    train(corpus, tmp_path / "8", *flags, 8)
    assert GPT.from_pretrained(tmp_path / "8" / "ckpt_000006").config.block_size == 8
    short = GPT.from_pretrained(finished / "ckpt_000006", block_size=8)
    idx = torch.randint(0, 50257, (1, 8))
    assert torch.equal(short(idx)[0], GPT.from_pretrained(finished / "ckpt_000006")(idx)[0])
    done = train(corpus, tmp_path / "32", *flags, 32, expect=1)
    assert "the weights know 16 positions, 32 were asked for" in done.stderr


OLDER = """
import json, sys
import torch, transformers
from transformers import AutoTokenizer, GPT2LMHeadModel, GPT2Tokenizer, PreTrainedTokenizerFast

path, text, tokens, loss = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), float(sys.argv[4])
model = GPT2LMHeadModel.from_pretrained(path).eval()
for kind in (AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast):
    batch = kind.from_pretrained(path)(text, return_tensors="pt")
    assert batch["input_ids"].tolist() == [tokens], (kind, batch["input_ids"])
    assert abs(model(**batch, labels=batch["input_ids"]).loss.item() - loss) < 1e-4, kind
made = transformers.pipeline("text-generation", path)(text, max_new_tokens=4, do_sample=False)
print(transformers.__version__, made[0]["generated_text"].startswith(text))
"""


@pytest.mark.torture
@pytest.mark.parametrize("vocabulary", ["--tokenizer gpt2", "--vocab-size 600"])
@pytest.mark.parametrize("packages", [
    "transformers==4.40.2 tokenizers==0.19.1 huggingface_hub==0.23.5",
    "transformers==4.57.3 tokenizers==0.22.1 huggingface_hub==0.36.0",
    "",  # those of requirements.txt
])  # fmt: skip
def test_a_checkpoint_opens_in_older_transformers_by_every_name_of_a_tokenizer(
    tmp_path, packages, vocabulary
):
    data = ["--source", "tinyshakespeare", "--data-dir", tmp_path / "data", *vocabulary.split()]
    run_script("fineweb.py", *data)
    flags = "--checkpoint-every 6 --sequence-length 64 --batch-size 1"
    train(tmp_path / "data", tmp_path / "log", flags)
    checkpoint = tmp_path / "log" / "ckpt_000006"
    model = GPT.from_pretrained(checkpoint)
    text = "ROMEO:\nHow now, 1,000 times?  größer 日本"
    tokens = model.tokenizer.encode(text)
    idx = torch.tensor([tokens])
    loss = model(idx[:, :-1], idx[:, 1:])[1].item()
    if packages:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        assert run_program([*pip, str(tmp_path / "older"), *packages.split()]).returncode == 0
    arguments = [str(checkpoint), text, json.dumps(tokens), str(loss)]
    older = dict(PYTHONPATH=str(tmp_path / "older"), HF_HUB_OFFLINE="1")
    done = run_program([sys.executable, "-c", OLDER, *arguments], **older)
    assert done.returncode == 0 and done.stdout.split()[-1] == "True", done.stderr

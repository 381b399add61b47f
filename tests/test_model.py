"""The model is GPT-2: against transformers, by its counts, and by what its parts promise."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from model import GPT, SIZES, GPTConfig, autocast, choose, decay_groups, pick_dtype
from tokenizer import EOT, UserError

transformers = pytest.importorskip("transformers")


def as_transformers(model: GPT, directory):
    model.save_pretrained(directory)
    return transformers.GPT2LMHeadModel.from_pretrained(directory).eval()


def random_model(**shape) -> GPT:
    """A tiny model whose biases and layer norms are random too, so that nothing hides behind a zero or a one."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**{**dict(block_size=24, n_layer=2, n_head=2, n_embd=16), **shape}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            rows = model.config.vocab_size if name == "transformer.wte.weight" else len(p)
            p[:rows] += 0.1 * torch.randn_like(p[:rows])
    return model


@pytest.mark.parametrize(
    "shape", [dict(n_layer=1, n_head=1), dict(n_layer=3, n_head=4), dict(n_embd=48, n_head=3), dict(vocab_size=97)]
)
def test_logits_and_gradients_are_those_of_transformers(tmp_path, shape):
    ours = random_model(**shape)
    theirs = as_transformers(ours, tmp_path)
    idx = torch.randint(0, ours.config.vocab_size, (2, 25))
    x, y = idx[:, :-1], idx[:, 1:]
    assert (ours(x)[0] - theirs(x).logits).abs().max() < 1e-4
    ours(x, y)[1].backward()
    F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten()).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        theirs_grad = (
            gradients[name].t() if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else gradients[name]
        )
        assert (p.grad[: len(theirs_grad)] - theirs_grad).abs().max() < 1e-4, name


def test_the_full_124m_has_the_logits_and_gradients_of_transformers(tmp_path):
    torch.manual_seed(0)
    ours = GPT(GPTConfig())
    theirs = as_transformers(ours, tmp_path)
    idx = torch.randint(0, 50257, (1, 65))
    x, y = idx[:, :-1], idx[:, 1:]
    assert (ours(x)[0] - theirs(x).logits).abs().max() < 1e-4
    loss = ours(x, y)[1]
    assert 10.7 < loss.item() < 11.1  # ln 50257 = 10.82: nothing is known yet
    loss.backward()
    F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten()).backward()
    for name in (
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.attn.c_attn.bias",
        "transformer.ln_f.weight",
    ):
        a, b = ours.get_parameter(name).grad, theirs.get_parameter(name).grad
        assert (a[: len(b)] - b).abs().max() < 1e-4, name


def test_the_sizes_have_gpt2s_parameters():
    with torch.device("meta"):
        counts = {name: GPT(GPTConfig(**size)).num_params() for name, size in SIZES.items()}
    # transformers' GPT2LMHeadModel of the same sizes
    assert counts == {"gpt2": 124439808, "gpt2-medium": 354823168, "gpt2-large": 774030080, "gpt2-xl": 1557611200}


def test_weights_decay_in_50_tensors_and_not_in_98():
    with torch.device("meta"):
        decayed, others = decay_groups(list(GPT(GPTConfig()).parameters()), 0.1)
    assert (len(decayed["params"]), sum(p.numel() for p in decayed["params"])) == (50, 124_354_560)
    assert (len(others["params"]), sum(p.numel() for p in others["params"])) == (98, 121_344)
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0


def test_flops_per_token_of_gpt2():
    with torch.device("meta"):
        assert GPT(GPTConfig()).flops_per_token(1024) == 854_438_400


def test_residual_projections_start_smaller():
    model = GPT(GPTConfig(block_size=64, n_layer=8, n_head=4, n_embd=128))
    std = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    for name, value in std.items():
        expected = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
        assert abs(value / expected - 1) < 0.05, name


def test_the_head_is_the_embedding(tiny):
    assert tiny.lm_head.weight is tiny.transformer.wte.weight


@pytest.mark.parametrize("pad", [1, 128, 1000])
def test_the_padding_of_the_vocabulary_changes_nothing(pad):
    def train(pad_vocab_to: int) -> tuple:
        torch.manual_seed(3)
        model = GPT(GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=8, pad_vocab_to=pad_vocab_to))
        [optimizer] = model.configure_optimizers(learning_rate=0.1)
        torch.manual_seed(4)
        for _ in range(3):
            x = torch.randint(0, 50257, (2, 8))
            loss = model(x, x)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, loss.item()

    (plain, loss), (padded, padded_loss) = train(1), train(pad)
    wte = padded.transformer.wte.weight
    assert wte.size(0) % pad == 0 and not wte[50257:].any(), "the padding must stay zero"
    assert padded(torch.zeros(1, 1, dtype=torch.int64))[0].shape == (1, 1, 50257)
    assert abs(loss - padded_loss) < 1e-5
    assert (wte[:50257] - plain.transformer.wte.weight).abs().max() < 1e-4


def test_targets_of_minus_one_are_ignored(tiny):
    x, y = torch.randint(0, 50257, (2, 8)), torch.randint(0, 50257, (2, 8))
    y[0, 3:] = -1
    logits, keep = tiny(x)[0].flatten(0, 1), y.flatten() != -1
    assert torch.allclose(tiny(x, y)[1], F.cross_entropy(logits[keep], y.flatten()[keep]))


def test_activation_checkpointing_gives_the_same_gradients(tiny):
    x = torch.randint(0, 50257, (2, 8))

    def gradients(on: bool):
        tiny.config.activation_checkpointing = on
        tiny.zero_grad()
        tiny(x, x)[1].backward()
        return [p.grad.clone() for p in tiny.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_more_tokens_than_the_context_are_refused(tiny):
    with pytest.raises(UserError, match="33 tokens are more than the model's context of 32"):
        tiny(torch.zeros(1, 33, dtype=torch.int64))


# -- generation


def uncached(model: GPT, prompt: list[int], n: int, pick) -> list[int]:
    """The rule, written plainly: the whole context again for each token; the newest half of it at the window's end."""
    tokens, start, window = list(prompt), 0, model.config.block_size
    for _ in range(n):
        if len(tokens) - start > window:
            start = len(tokens) - window // 2
        with torch.no_grad():
            tokens.append(pick(model(torch.tensor([tokens[start:]]))[0][:, -1]))
    return tokens


@pytest.mark.parametrize("prompt_length", [1, 5, 24, 30])
def test_cached_generation_is_uncached_generation_across_the_windows_end(prompt_length):
    model = random_model()
    idx = torch.randint(0, 50257, (1, prompt_length))
    greedy = uncached(model, idx[0].tolist(), 60, lambda z: z.argmax().item())
    assert model.generate(idx, 60, temperature=0)[0].tolist() == greedy
    generator = torch.Generator().manual_seed(5)
    drawn = uncached(model, idx[0].tolist(), 60, lambda z: choose(z, 0.8, 20, 0.9, generator).item())
    same_seed = torch.Generator().manual_seed(5)
    assert model.generate(idx, 60, temperature=0.8, top_k=20, top_p=0.9, generator=same_seed)[0].tolist() == drawn


def test_prompts_of_different_lengths_share_a_batch_without_disturbing_each_other():
    model, n = random_model(), 50
    lengths = [3, 20, 11, 1]
    idx = torch.randint(0, 50257, (4, 20))
    out = model.generate(idx, n, lengths=torch.tensor(lengths), temperature=0)
    assert out.shape == (4, 20 + n)
    for row, length in enumerate(lengths):
        alone = model.generate(idx[row : row + 1, :length], n, temperature=0)[0]
        assert torch.equal(out[row, : length + n], alone) and (out[row, length + n :] == EOT).all()


def test_generation_stops_where_it_is_told():
    model = random_model()
    idx = torch.randint(0, 50257, (2, 4))
    free = model.generate(idx, 20, temperature=0)
    stop = free[0, 8].item()
    out = model.generate(idx, 20, temperature=0, stop=stop)
    first = free[0, 4:].tolist().index(stop)
    assert out[0, 4 : 5 + first].tolist() == free[0, 4 : 5 + first].tolist() and (out[0, 5 + first :] == stop).all()


def test_a_seed_gives_the_same_samples_and_leaves_the_global_generator_alone(tiny):
    idx = torch.zeros(2, 3, dtype=torch.int64)
    before = torch.get_rng_state()
    a, b = (tiny.generate(idx, 10, generator=torch.Generator().manual_seed(s)) for s in (1, 1))
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(a, tiny.generate(idx, 10, generator=torch.Generator().manual_seed(2)))


def test_top_k_and_top_p_only_draw_from_the_likeliest():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(2000, 4)
    generator = torch.Generator().manual_seed(0)
    drawn = {k: set(choose(logits, 1.0, k, None, generator).tolist()) for k in (1, 2, 4, None)}
    assert drawn == {1: {0}, 2: {0, 1}, 4: {0, 1, 2, 3}, None: {0, 1, 2, 3}}
    nucleus = {p: set(choose(logits, 1.0, None, p, generator).tolist()) for p in (0.1, 0.6, 0.9)}
    assert nucleus == {0.1: {0}, 0.6: {0, 1}, 0.9: {0, 1, 2}}
    share = (choose(logits, 1.0, None, None, generator) == 0).float().mean().item()
    assert abs(share - 0.5) < 0.05
    assert (choose(logits, 0, 50, None) == 0).all()


@pytest.mark.parametrize("lengths", [[0, 3], [4, 1]])
def test_impossible_prompt_lengths_are_refused(tiny, lengths):
    with pytest.raises(UserError, match="every prompt needs"):
        tiny.generate(torch.zeros(2, 3, dtype=torch.int64), 4, lengths=lengths)


# -- Hugging Face directories


def test_weights_survive_the_way_to_transformers_and_back_bit_for_bit(tmp_path):
    ours = random_model()
    theirs = as_transformers(ours, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    back = GPT.from_pretrained(tmp_path / "theirs")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))


def test_weights_of_the_hub_without_the_prefix_and_as_a_pickle_load_too(tmp_path):
    ours = random_model()
    ours.save_pretrained(tmp_path)
    weights = {name.removeprefix("transformer."): w for name, w in ours.hf_weights().items()}
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    back = GPT.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))


def test_the_tokenizer_beside_the_weights_is_gpt2s(tmp_path, tiny):
    tiny.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("Hello, I'm a language model,")["input_ids"] == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert tokenizer.eos_token_id == EOT and tokenizer.model_max_length == 32


def test_a_shorter_context_crops_the_positions_and_a_longer_one_is_refused(tmp_path):
    ours = random_model()
    ours.save_pretrained(tmp_path)
    short = GPT.from_pretrained(tmp_path, block_size=10)
    idx = torch.randint(0, 50257, (1, 10))
    assert torch.equal(short(idx)[0], ours(idx)[0])
    with pytest.raises(UserError, match="can only shrink"):
        GPT.from_pretrained(tmp_path, block_size=25)


class Evil:
    def __reduce__(self):
        return (open, ("evil-was-here", "w"))


def test_a_pickle_with_code_in_it_is_refused_and_not_run(tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    tiny.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="refused"):
        GPT.from_pretrained(tmp_path)
    assert not (tmp_path / "evil-was-here").exists()


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


def test_a_cpu_computes_in_the_faster_precision_and_float32_is_left_alone():
    device = torch.device("cpu")
    assert pick_dtype(device)[0] in (torch.bfloat16, torch.float32)
    assert pick_dtype(device, "bfloat16")[0] == torch.bfloat16
    a = torch.ones(2, 2)
    with autocast(device, torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
    with autocast(device, torch.float32):
        assert (a @ a).dtype == torch.float32

"""The model is GPT-2: against transformers, by its counts, and by what its parts promise."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import random_model

from config import GPT2_SIZES
from model import GPT, GPTConfig, LinearCrossEntropy
from optim import decay_groups
from support.base.errors import UserError
from support.machine.device import autocast, peak_flops, pick_dtype

transformers = pytest.importorskip("transformers")

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # transformers has them (in, out)


def as_transformers(model: GPT, directory):
    model.save_pretrained(directory)
    return transformers.GPT2LMHeadModel.from_pretrained(directory).eval()


def assert_same(ours: GPT, theirs, idx) -> float:
    """Compares logits and gradients on idx (B, T+1) -> the loss."""
    x, y = idx[:, :-1], idx[:, 1:]
    logits = theirs(x).logits
    assert (ours(x)[0] - logits).abs().max() < 1e-4
    loss = ours(x, y)[1]
    loss.backward()
    F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        expected = gradients[name]
        if name.endswith(TRANSPOSED):
            expected = expected.t()
        assert (p.grad[: len(expected)] - expected).abs().max() < 1e-4, name
    return loss.item()


@pytest.mark.parametrize(
    "shape",
    [
        dict(n_layer=1, n_head=1),
        dict(n_layer=3, n_head=4),
        dict(n_embd=48, n_head=3),
        dict(vocab_size=97),
    ],
)
def test_logits_and_gradients_are_those_of_transformers(tmp_path, shape):
    ours = random_model(**shape)
    idx = torch.randint(0, ours.config.vocab_size, (2, 25))
    assert_same(ours, as_transformers(ours, tmp_path), idx)


def test_the_full_124m_has_the_logits_and_gradients_of_transformers(tmp_path):
    torch.manual_seed(0)
    ours = GPT(GPTConfig())
    loss = assert_same(ours, as_transformers(ours, tmp_path), torch.randint(0, 50257, (1, 65)))
    assert 10.5 < loss < 11.5  # ln 50257 = 10.82: nothing is known yet


def test_the_sizes_have_gpt2s_parameters_and_operations():
    with torch.device("meta"):
        models = {name: GPT(GPTConfig(**size)) for name, size in GPT2_SIZES.items()}
    counts = {name: model.num_params() for name, model in models.items()}
    assert counts == {  # as transformers' GPT2LMHeadModel counts them
        "gpt2": 124439808,
        "gpt2-medium": 354823168,
        "gpt2-large": 774030080,
        "gpt2-xl": 1557611200,
    }
    gpt2 = models["gpt2"]
    assert gpt2.flops_per_token(1024) == 854_438_400
    assert gpt2.lm_head.weight is gpt2.transformer.wte.weight
    decayed, others = decay_groups(list(gpt2.parameters()), 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0)
    numbers = [(len(group["params"]), count_numbers(group)) for group in (decayed, others)]
    assert numbers == [(50, 124_354_560), (98, 121_344)]  # as in build-nanogpt, padded to 50304


def count_numbers(group: dict) -> int:
    return sum(p.numel() for p in group["params"])


def test_residual_projections_start_smaller():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, n_layer=8, n_head=4, n_embd=128))
    std = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    for name, value in std.items():
        expected = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
        assert abs(value / expected - 1) < 0.05, name


@pytest.mark.parametrize("pad", [1, 128, 1000])
def test_the_padding_of_the_vocabulary_changes_nothing(pad):
    def train(pad_vocab_to: int) -> tuple[GPT, float]:
        torch.manual_seed(3)
        shape = dict(block_size=8, n_layer=1, n_head=1, n_embd=8)
        model = GPT(GPTConfig(**shape, pad_vocab_to=pad_vocab_to))
        [optimizer] = model.configure_optimizers(learning_rate=0.1)
        torch.manual_seed(4)
        for _ in range(3):
            x = torch.randint(0, 50257, (2, 8))
            loss = model(x, x)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, loss.item()

    plain, loss = train(1)
    padded, padded_loss = train(pad)
    wte = padded.transformer.wte.weight
    assert wte.size(0) % pad == 0
    assert not wte[50257:].any(), "the padding must stay zero"
    assert padded(torch.zeros(1, 1, dtype=torch.int64))[0].shape == (1, 1, 50257)
    assert abs(loss - padded_loss) < 1e-5
    assert (wte[:50257] - plain.transformer.wte.weight).abs().max() < 1e-4


# -- the loss


def plain_loss(x, w, y):
    logits = F.linear(x, w)[:, :97].to(x.dtype)  # autocast may have made it narrower
    return F.cross_entropy(logits, y, ignore_index=-1)


def loss_in_parts(x, w, y):
    return LinearCrossEntropy.apply(x, w, y, 97, 2048, torch.is_grad_enabled())


def head_and_loss(loss_of, dtype=torch.float32, scale=1.0, precision=None):
    """The loss of 5,000 rows, and its gradients to x and w.

    LinearCrossEntropy takes them in several parts. It ignores a third of them, and 31 of 128
    tokens are padding. scale: of the loss before the backward pass. precision: to autocast to.
    """
    torch.manual_seed(0)
    x = torch.randn(5000, 16, dtype=dtype, requires_grad=True)
    w = torch.randn(128, 16, dtype=dtype, requires_grad=True)
    y = torch.randint(0, 97, (5000,))
    y[::3] = -1
    with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
        loss = loss_of(x, w, y)
    (loss * scale).backward()
    assert not w.grad[97:].any()
    return loss.detach(), x.grad / scale, w.grad / scale


@pytest.mark.parametrize(
    "dtype, compiled, tolerance",
    [("float32", False, 5e-6), ("float32", True, 5e-6), ("float64", False, 2e-14)],
)
def test_the_loss_without_all_logits_is_the_plain_loss(dtype, compiled, tolerance):
    dtype = getattr(torch, dtype)
    loss_of = torch.compile(loss_in_parts) if compiled else loss_in_parts
    ours = head_and_loss(loss_of, dtype, scale=3.0)
    plain = head_and_loss(plain_loss, dtype, scale=3.0)
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() < tolerance * b.abs().max()


@pytest.mark.parametrize("precision, scale", [(torch.bfloat16, 1.0), (torch.float16, 65536.0)])
def test_the_loss_in_16_bits_is_as_near_to_float32_as_the_plain_one(precision, scale):
    exact = head_and_loss(plain_loss)
    ours = head_and_loss(loss_in_parts, scale=scale, precision=precision)
    plain = head_and_loss(plain_loss, scale=scale, precision=precision)
    for a, b, c in zip(ours, plain, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - c).norm() < max(3 * (b - c).norm(), 1e-4 * c.norm())


@pytest.mark.parametrize("probability", [0.5, 0.9, 0.99, 0.999])
def test_the_gradients_of_confident_tokens_are_not_lost(probability):
    """Where p - t is nearly zero at the target, rounding the logits counts most."""
    torch.manual_seed(0)
    N, C, V = 64, 64, 1024
    y = torch.randint(0, V, (N,))
    w = 0.02 * torch.randn(V, C, dtype=torch.float64)
    x = torch.randn(N, C, dtype=torch.float64)
    wanted = math.log(probability / (1 - probability))
    for _ in range(100):  # moves x along its target's row until the target is that likely
        p = (x @ w.t()).softmax(-1).gather(1, y[:, None])
        x += 0.7 * (wanted - (p / (1 - p)).log()) / w[y].square().sum(1, keepdim=True) * w[y]
    assert p.mean().item() == pytest.approx(probability, abs=1e-3)

    def gradients(loss_of, x, w, dtype) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = loss_of(*leaves)
        return torch.autograd.grad(loss, leaves)

    def ours(x, w):
        return LinearCrossEntropy.apply(x, w, y, V, 2048, True)

    exact = gradients(lambda x, w: F.cross_entropy(x @ w.t(), y), x, w, torch.float32)
    for dtype, error in ((torch.float32, 2e-6 / (1 - probability)), (torch.bfloat16, 0.1)):
        for a, b in zip(gradients(ours, x.float(), w.float(), dtype), exact, strict=True):
            assert (a - b).norm() < error * b.norm()


def test_in_float16_thousands_of_rows_that_agree_do_not_overflow():
    """2,048 rows predict one token, and one channel of x is 100 in each of them.

    Their sum is three times what float16 holds; their mean is harmless.
    """
    torch.manual_seed(0)
    x = torch.randn(2048, 16)
    x[:, 3] = 100
    w = 0.01 * torch.randn(128, 16)
    y = torch.full((2048,), 7)

    def gradient(enabled: bool):
        weight = w.clone().requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            loss = loss_in_parts(x, weight, y)
        loss.backward()
        return weight.grad

    exact = gradient(False)
    assert 50 < exact.abs().max() < 200
    assert (gradient(True) - exact).norm() < 0.01 * exact.norm()


def test_activation_checkpointing_gives_the_same_gradients(tiny):
    x = torch.randint(0, 50257, (2, 8))
    passes = []  # through the first block

    def gradients(on: bool) -> list[torch.Tensor]:
        for block in tiny.transformer.h:
            block.activation_checkpointing = on
        tiny.zero_grad()
        tiny(x, x)[1].backward()
        return [p.grad.clone() for p in tiny.parameters()]

    tiny.transformer.h[0].ln_1.register_forward_hook(lambda *_: passes.append("forward"))
    for a, b in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(a, b)
    assert len(passes) == 3, "one without, and one more in the backward pass with it"


def test_more_tokens_than_the_context_are_refused(tiny):
    with pytest.raises(UserError, match="33 tokens are more than the model's context of 32"):
        tiny(torch.zeros(1, 33, dtype=torch.int64))


# -- precision


def test_a_cpu_computes_in_the_faster_precision_and_float32_is_left_alone():
    device = torch.device("cpu")
    assert pick_dtype(device)[0] in (torch.bfloat16, torch.float32)
    assert pick_dtype(device, "bfloat16")[0] == torch.bfloat16
    a = torch.ones(2, 2)
    with autocast(device, torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
    with autocast(device, torch.float32):
        assert (a @ a).dtype == torch.float32


@pytest.mark.parametrize(
    "name, capability, expected",
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), [67e12, 494.5e12, 989.5e12]),
        ("NVIDIA A100-SXM4-40GB", (8, 0), [19.5e12, 156e12, 312e12]),
        ("Tesla T4", (7, 5), [8.1e12, 8.1e12, 65e12]),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), None),
    ],
)
def test_mfu_is_of_the_makers_peak_for_a_gpu_of_that_whole_name_else_of_a_matmul_timed_here(
    monkeypatch, name, capability, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    seconds = itertools.cycle([2.0, 0.5, 1.0])  # the best one counts
    monkeypatch.setattr(
        "support.machine.device.time_matmul", lambda device, dtype, n: next(seconds)
    )
    cuda = torch.device("cuda")
    peaks = [peak_flops(cuda, torch.float32, tf32=tf32) for tf32 in (False, True)]
    peaks.append(peak_flops(cuda, torch.float16))
    flops, sources = zip(*peaks, strict=True)
    if expected:
        assert list(flops) == expected
        assert all("NVIDIA" in source for source in sources)
    else:
        assert set(flops) == {4 * 4096**3}
        assert all("measured here" in source for source in sources)

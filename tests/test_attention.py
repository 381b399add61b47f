"""Our code of operators that the compiler uses, compared with float64 and with PyTorch's."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile

from model import GPT, GPTConfig
from support.machine import attention
from support.machine.compile import compile_blocks, gelu, gelu_backward

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
THEIRS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def some(T: int, hs: int, sharpness: float) -> list[torch.Tensor]:
    """dy, q, k, v in the model's layout. `sharpness` is the logits' standard deviation."""
    torch.manual_seed(T + hs)
    dy, q, k, v = torch.randn(4, 2, T, 3, hs, dtype=torch.bfloat16).transpose(2, 3)
    return [dy, q * sharpness, k, v]


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def gradients(attend, dy, q, k, v) -> list[torch.Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    attend(*inputs).backward(dy)
    return [x.grad for x in inputs]


def errors(found, exact) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("sharpness", [0.1, 1, 8])
@pytest.mark.parametrize("T, hs", [(1, 16), (7, 8), (256, 64), (300, 24), (1100, 16), (257, 1)])
def test_the_gradients_are_as_near_to_float64_as_pytorchs(T, hs, sharpness):
    dy, q, k, v = some(T, hs, sharpness)
    exact = gradients(causal, *(x.double() for x in (dy, q, k, v)))
    y, lse = KERNEL(q, k, v, 0.0, True)
    ours = attention.backward(dy, q, k, v, y, lse, 0.0, True)
    theirs = THEIRS(dy, q, k, v, y, lse, 0.0, True)
    for x, own, other, wanted in zip((q, k, v), ours, theirs, exact, strict=True):
        assert own.shape == x.shape and own.dtype == x.dtype
        nothing = 1e-4 * dy.norm()  # one token alone: dq and dk are zero
        assert (own - wanted).norm() < 3 * (other - wanted).norm() + nothing


def test_the_compiler_takes_them_and_keeps_their_digits(tiny):
    compile_blocks(tiny, recompute=True)
    dy, q, k, v = some(300, 32, sharpness=8)
    exact = gradients(causal, *(x.double() for x in (dy, q, k, v)))
    compiled = torch.compile(causal, dynamic=False)
    gradients(compiled, dy, q, k, v)  # compiles: the profiler would see the tracing
    with profile(activities=[ProfilerActivity.CPU]) as ran:
        found = gradients(compiled, dy, q, k, v)
    assert not [event.name for event in ran.events() if "for_cpu_backward" in event.name]
    assert max(errors(found, exact)) < 0.01, "3% if the products' results are rounded before lse"


def test_pytorch_does_all_but_plain_causal_attention_in_bfloat16():
    dy, q, k, v = some(16, 8, 1.0)
    y, lse = KERNEL(q, k, v, 0.0, True)
    left = [
        attention.backward(*(x.float() for x in (dy, q, k, v, y)), lse, 0.0, True),
        attention.backward(dy, q, k, v, y, lse, 0.0, False),
        attention.backward(dy, q, k, v, y, lse, 0.1, True),
        attention.backward(dy, q, k, v, y, lse, 0.0, True, attn_mask=torch.zeros(16, 16)),
        attention.backward(dy[..., 1:, :], q[..., 1:, :], k, v, y, lse, 0.0, True),
    ]
    assert left == 5 * [NotImplemented]


def test_a_compiled_model_has_the_gradients_of_the_written_one():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=48, n_layer=2, n_head=2, n_embd=32))
    idx = torch.randint(50257, (3, 48))

    def learn():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(idx, idx)[1].backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = learn()
    compile_blocks(model, recompute=True)
    assert max(errors(learn(), [grad.double() for grad in plain])) < 0.05


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_gelu_and_its_gradient_are_the_tanh_forms(dtype, error):
    x = torch.cat([torch.linspace(-8, 8, 999), torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4])])
    x = x.to(dtype)
    exact = x.double().requires_grad_()
    y = F.gelu(exact, approximate="tanh")
    y.sum().backward()
    ours = gelu(x, approximate="tanh"), gelu_backward(torch.ones_like(x), x, approximate="tanh")
    for found, wanted in zip(ours, (y, exact.grad), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=error, atol=error)


def test_the_compiler_takes_our_gelu_and_leaves_the_other_form(tiny):
    compile_blocks(tiny, recompute=True)
    x = torch.randn(64, requires_grad=True)
    for form, called in (("tanh", "exp"), ("none", "erf")):
        compiled = torch.compile(functools.partial(F.gelu, approximate=form))
        y, code = run_and_get_code(lambda: compiled(x))  # noqa: B023
        torch.testing.assert_close(y, F.gelu(x, approximate=form))
        assert called in "".join(code) and "tanh" not in "".join(code)

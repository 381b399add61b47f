"""What only 16 bits, compiled blocks and two processes show.

ddp and fsdp, with activation checkpointing and without, compute one function. No block runs
uncompiled. ddp averages the gradients once per update.
"""

import functools
import json

import pytest
import torch
from conftest import ROOT, random_model, run_script

from model import MLP
from support.device import compile_blocks
from support.distributed import World
from train_gpt2 import clip_gradients, train_step

ACCUMULATION = 3
WAYS = ["ddp", "fsdp", "fsdp checkpointing"]


class Batches:
    """Random micro-batches. A rank gets the same ones in every run."""

    def __init__(self, rank: int):
        self.generator = torch.Generator().manual_seed(rank)

    def next_batch(self):
        x = torch.randint(300, (2, 17), generator=self.generator)
        return x[:, :-1], x[:, 1:]


def count_uncompiled(counts: dict) -> None:
    """From now on, each call of an MLP that is not compiled adds 1 to counts["uncompiled"]."""
    forward = MLP.forward

    def counted(self, x):
        if not torch.compiler.is_compiling():
            counts["uncompiled"] += 1
        return forward(self, x)

    MLP.forward = counted


def measure(world: World, checkpointing: bool, counts: dict) -> dict:
    """Makes two updates -> their losses and norms, and the counts."""
    torch.compiler.reset()
    raw = random_model(activation_checkpointing=checkpointing)
    world.place(raw)
    counts.update(uncompiled=0, averaged=0)
    compile_blocks(raw, recompute=True)
    model = world.wrap(raw)
    if world.sharding == "ddp":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def hook(state, bucket):
            counts["averaged"] += bucket.is_last()
            return allreduce_hook(state, bucket)

        model.register_comm_hook(None, hook)
    optimizers = raw.configure_optimizers(make=world.make_optimizer)
    batches = Batches(world.rank)
    made = []
    for _ in range(2):
        loss, norm = train_step(
            model=model,
            optimizers=optimizers,
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            loader=batches,
            grad_accum_steps=ACCUMULATION,
            world=world,
            dtype=torch.bfloat16,
            lr=0.01,
            grad_clip=1.0,
        )
        made += [loss.item(), norm.item()]
    return {"made": made, **counts}


def measure_all() -> None:
    """What each process of torchrun runs. Rank 0 prints a measurement for each way."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    counts: dict[str, int] = {}
    count_uncompiled(counts)
    found = {}
    with World("cpu") as world:
        for way in WAYS:
            world.sharding, _, checkpointing = way.partition(" ")
            found[way] = measure(world, bool(checkpointing), counts)
        if world.is_main:
            print(json.dumps(found))


@pytest.fixture(scope="module")
def measured() -> dict:
    done = run_script("tests/test_sharding.py", ranks=2, PYTHONPATH=str(ROOT))
    return json.loads(done.stdout.splitlines()[-1])


def test_fsdp_in_16_bits_is_the_function_that_ddp_is(measured):
    for run in measured.values():
        assert run["made"] == pytest.approx(measured["ddp"]["made"], rel=1e-6)
        assert run["uncompiled"] == 0
    assert measured["ddp"]["averaged"] == 2, "once per update"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_block_runs_uncompiled_in_one_process(monkeypatch, checkpointing):
    compiler = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(MLP, "forward", MLP.forward)  # so that it comes back
    counts: dict[str, int] = {}
    count_uncompiled(counts)
    assert measure(World("cpu"), checkpointing, counts)["uncompiled"] == 0
    random_model()(torch.zeros(1, 1, dtype=torch.int64))
    assert counts["uncompiled"] == 2, "it does count what runs as written"


def test_the_norm_of_a_large_gradient_is_exact():
    torch.manual_seed(0)
    layer = torch.nn.Linear(400, 10_000, bias=False)  # one float32 sum of these is 7e-5 off
    layer.weight.grad = 1e-3 * torch.randn_like(layer.weight)
    exact = layer.weight.grad.double().norm().item()
    assert clip_gradients(layer, 0).item() == pytest.approx(exact, rel=3e-6)
    clip_gradients(layer, exact / 2)
    assert layer.weight.grad.double().norm().item() == pytest.approx(exact / 2, rel=3e-6)


if __name__ == "__main__":
    measure_all()

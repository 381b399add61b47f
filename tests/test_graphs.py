"""CUDA graphs of an update. Here a stand-in records and replays on the CPU as a GPU would."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import TINY, losses, read_records, weights_hash
from torch.nn.utils import parameters_to_vector

import train_gpt2
from model import GPT, GPTConfig
from support.machine import graphs
from support.machine.distributed import Stop, World
from support.run.average import average_weights

CPU = torch.device("cpu")
WORLD = World(CPU)
UPDATES = 6


class OnCpu(graphs.Graphs):
    """Records and replays on a CPU what a GPU would.

    A capture computes nothing, but Python sees what it did. A replay works on the same memory, with
    the same numbers of Python, and Python sees nothing of it.
    """

    broken = None  # how many parts were recorded before one that cannot be

    def __init__(self, optimizers, device=CPU):
        super().__init__(optimizers, device)
        self.optimizers = optimizers
        self.replays = 0

    def warm_up(self, work, inputs):
        return work(*inputs)

    def grads(self, new=None):
        """The gradients that Python sees, and what it then sees instead, if anything."""
        old = [p.grad for p in self.params]
        for p, grad in zip(self.params, new or old, strict=True):
            p.grad = grad
        return old

    def memory(self):
        states = [x for o in self.optimizers for own in o.state.values() for x in own.values()]
        grads = [grad for grad in self.grads() if grad is not None]
        return [*self.params, *grads, *(x for x in states if isinstance(x, torch.Tensor))]

    @torch.no_grad()
    def undo(self, work):
        """What work() returns, with all memory as before."""
        kept = [(x, x.clone()) for x in self.memory()]
        with torch.enable_grad():
            output = work()
        for x, before in kept:
            x.copy_(before)
        return output

    def capture(self, work):
        before = self.grads()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        numbers = [dict(group) for group in groups]
        output = self.undo(work)
        if len(self.recordings) == OnCpu.broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        after = self.grads()

        def replay():
            self.replays += 1
            seen = self.grads(before)
            live = [dict(group) for group in groups]
            for group, baked in zip(groups, numbers, strict=True):
                group.update(baked)
            results = work()
            copies = [*zip(after, self.grads(seen), strict=True)]
            copies += zip(tensors(output), tensors(results), strict=True)
            with torch.no_grad():
                for own, new in copies:
                    if own is not None:
                        own.copy_(new)
            for group, values in zip(groups, live, strict=True):
                group.update(values)

        return replay, output


def tensors(output):
    return [x for x in (output if isinstance(output, tuple) else [output]) if torch.is_tensor(x)]


def train(
    optimizer: str, grad_accum_steps: int, between=lambda step, model, optimizers: None, lr=None
):
    """The losses of UPDATES updates, the norms, the weights, and the graphs."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=300, n_layer=2, n_head=2, n_embd=16))
    optimizers = [torch.optim.SGD(model.parameters(), momentum=0.9)]
    if optimizer != "sgd":
        optimizers = model.configure_optimizers(optimizer, learning_rate=0.01, dtype=torch.float32)
    for one in optimizers:
        one.register_step_post_hook(average_weights)
    generator = torch.Generator().manual_seed(0)

    def next_batch():
        rows = torch.randint(0, 300, (2, 17), generator=generator)
        return rows[:, :-1], rows[:, 1:]

    made = OnCpu(optimizers)
    printed = []
    for step in range(UPDATES):
        loss, norm, _ = train_gpt2.train_step(
            model=model,
            optimizers=optimizers,
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            loader=SimpleNamespace(next_batch=next_batch, wait=Mock()),
            grad_accum_steps=grad_accum_steps,
            world=WORLD,
            stop=Stop(WORLD),
            dtype=torch.float32,
            lr=0.01 / (1 + step) if lr is None else lr,
            grad_clip=1.0,
            averaging=1 / (1 + step),
            run_part=made.run,
        )
        printed.append((loss.item(), norm.item()))
        between(step, model, optimizers)
    averages = [own["average"] for one in optimizers for own in one.state.values()]
    return printed, parameters_to_vector([*model.parameters(), *averages]), made


@pytest.mark.parametrize("grad_accum_steps", [1, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_replayed_updates_are_the_plain_ones_bit_for_bit(optimizer, grad_accum_steps, monkeypatch):
    def evaluate(step, model, _):
        with torch.no_grad():
            model(torch.zeros(1, step + 1, dtype=torch.int64))

    printed, weights, made = train(optimizer, grad_accum_steps, evaluate)
    replayed = grad_accum_steps + (optimizer != "sgd")  # of which nobody says what it counts
    assert made.replays == (UPDATES - graphs.UNRECORDED) * replayed
    monkeypatch.setenv("GPT2_NO_GRAPH", "1")
    plain, plain_weights, made = train(optimizer, grad_accum_steps)
    assert not made.replays
    assert printed == plain and torch.equal(weights, plain_weights)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_rate_of_zero_reaches_what_is_replayed(optimizer):
    seen = []
    train(
        optimizer,
        1,
        lambda _, model, __: seen.append(parameters_to_vector(model.parameters())),
        0.0,
    )
    assert all(torch.equal(weights, seen[0]) for weights in seen)


@pytest.mark.parametrize("broken", [0, 1, 2], ids=["first micro-step", "micro-step", "update"])
def test_what_cannot_be_recorded_runs_as_before_and_is_told_once(broken, monkeypatch, capsys):
    monkeypatch.setattr(OnCpu, "broken", broken)
    printed, weights, _ = train("adamw", 3)
    [line] = capsys.readouterr().out.splitlines()
    part = ["first micro-step", "micro-step", "update"][broken]
    reason = "operation not permitted when stream is capturing"
    assert line == f"without CUDA graphs from now on; {part}: {reason}"
    monkeypatch.setenv("GPT2_NO_GRAPH", "1")
    plain, plain_weights, _ = train("adamw", 3)
    assert printed == plain and torch.equal(weights, plain_weights)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_option_that_changes_ends_the_replays(optimizer, monkeypatch, capsys):
    def fade(step, _, optimizers):
        optimizers[-1].param_groups[0]["weight_decay"] = 0.5**step

    printed, weights, _ = train(optimizer, 1, fade)
    assert "an optimizer's option, other than its rates, changed" in capsys.readouterr().out
    monkeypatch.setenv("GPT2_NO_GRAPH", "1")
    plain, plain_weights, _ = train(optimizer, 1, fade)
    assert printed == plain and torch.equal(weights, plain_weights)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_with_graphs_resumes_bit_for_bit(optimizer, shards, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(graphs, "can_record", lambda *_: True)
    monkeypatch.setattr(graphs, "Graphs", lambda *args: made.append(OnCpu(*args)) or made[-1])
    flags = [*TINY, "--data-dir", str(shards), "--optimizer", optimizer]
    flags += ["--average-frac", "0.2", "--checkpoint-every", "4"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    train_gpt2.main([*flags, "--log-dir", str(whole)])
    train_gpt2.main([*flags, "--log-dir", str(again), "--resume", str(whole / "ckpt_000004")])
    assert [one.updates for one in made] == [6, 2] and made[0].replays
    assert [record["loss"] for record in read_records(again, "train")] == losses(whole)[4:]
    assert weights_hash(again / "ckpt_000006") == weights_hash(whole / "ckpt_000006")

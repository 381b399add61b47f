"""Every sharding computes one function, resumes to the bit, and sends no more than it has to.

What is tested here shows only in 16 bits, in compiled blocks, or on several processes.
"""

import functools
import hashlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import (
    random_model,
    run_script,
    settle_in,
    tiny_run,
    torchrun_variables,
    write_shards,
)
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import optim
import train_gpt2
from model import MLP
from optim import clip_gradients
from support.base.errors import UsageError, UserError
from support.machine import sharding
from support.machine.compile import compile_blocks
from support.machine.distributed import Stop, World, start_world
from support.run import divergence
from train_gpt2 import train_step

ACCUMULATION = 3
WAYS = ["ddp", "zero1", "fsdp", "fsdp checkpointing"]


class Batches:
    """Random micro-batches. A rank gets the same ones in every run."""

    def __init__(self, rank: int):
        self.generator = torch.Generator().manual_seed(rank)

    def next_batch(self):
        x = torch.randint(300, (2, 17), generator=self.generator)
        return x[:, :-1], x[:, 1:]

    def wait(self):
        pass


def update(model, optimizers: list, stop: Stop, batches: Batches, strategy: str) -> list[float]:
    """Makes an update -> its loss and norm."""
    loss, norm, _ = train_step(
        model=model,
        optimizers=optimizers,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        loader=batches,
        grad_accum_steps=ACCUMULATION,
        world=stop.world,
        stop=stop,
        dtype=torch.bfloat16,
        lr=0.01,
        grad_clip=1.0,
        strategy=strategy,
    )
    return [loss.item(), norm.item()]


def count_uncompiled(counts: Counter) -> None:
    """From now on, each call of an MLP that is not compiled adds 1 to counts["uncompiled"]."""
    forward = MLP.forward

    def counted(self, x):
        if not torch.compiler.is_compiling():
            counts["uncompiled"] += 1
        return forward(self, x)

    MLP.forward = counted


def build(world: World, strategy: str, checkpointing=False) -> tuple:
    """A model that is sharded and compiled, and its wrapper."""
    torch.compiler.reset()
    raw = random_model(activation_checkpointing=checkpointing)
    sharding.place(raw, world, strategy)
    compile_blocks(raw, recompute=True)
    return raw, sharding.wrap(raw, world)


def measure(world: World, strategy: str, checkpointing: bool, counts: Counter) -> dict:
    """Makes two updates -> their losses and norms, and the counts."""
    raw, model = build(world, strategy, checkpointing)
    counts.clear()
    if isinstance(model, DistributedDataParallel):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def hook(state, bucket):
            counts["averaged"] += bucket.is_last()
            return allreduce_hook(state, bucket)

        model.register_comm_hook(None, hook)
    optimizers = raw.configure_optimizers()
    batches = Batches(world.rank)
    made: list[float] = []
    for _ in range(2):
        made += update(model, optimizers, Stop(world), batches, strategy)
    return {"made": made, "uncompiled": counts["uncompiled"], "averaged": counts["averaged"]}


def first_gradients(world: World, strategy: str) -> tuple[str, list[float]]:
    """The first update's gradients, whole: their hash, and the norm of each."""
    raw, model = build(world, strategy)
    found = []

    def take(_model, _largest, _world):
        found.extend(p.grad for p in raw.parameters())
        return torch.zeros(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt2, "clip_gradients", take)
        patch.setattr(torch.optim.AdamW, "zero_grad", lambda self, set_to_none: None)
        update(model, raw.configure_optimizers(), Stop(world), Batches(world.rank), strategy)
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in found]
    bits = b"".join(g.numpy().tobytes() for g in whole)
    return hashlib.sha256(bits).hexdigest(), [g.norm().item() for g in whole]


def measure_all() -> None:
    """What each process of torchrun runs. Rank 0 prints a measurement for each way."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    counts: Counter[str] = Counter()
    count_uncompiled(counts)
    found = {}
    gradients = {}
    with start_world("cpu") as world:
        for way in WAYS:
            strategy, _, checkpointing = way.partition(" ")
            found[way] = measure(world, strategy, bool(checkpointing), counts)
        for way in WAYS[:3]:
            gradients[way] = first_gradients(world, way)
        world.say(json.dumps([found, gradients]))


def test_every_sharding_in_16_bits_is_the_function_that_ddp_is():
    done = run_script("tests/test_sharding.py", ranks=2)
    runs, gradients = json.loads(done.stdout.splitlines()[-1])
    for run in runs.values():
        assert run["made"] == pytest.approx(runs["ddp"]["made"], rel=1e-6)
        assert run["uncompiled"] == 0
    assert runs["ddp"]["averaged"] == 2, "once per update"
    assert gradients["zero1"] == gradients["ddp"], "equal bits"
    assert gradients["fsdp"][1] == pytest.approx(gradients["ddp"][1], rel=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_block_runs_uncompiled_in_one_process(monkeypatch, checkpointing):
    compiler = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(MLP, "forward", MLP.forward)  # so that it comes back
    counts: Counter[str] = Counter()
    count_uncompiled(counts)
    assert measure(start_world("cpu"), "ddp", checkpointing, counts)["uncompiled"] == 0
    random_model()(torch.zeros(1, 1, dtype=torch.int64))
    assert counts["uncompiled"] == 2, "it does count what runs as written"


def test_the_norm_of_a_large_gradient_is_exact():
    torch.manual_seed(0)
    world = start_world("cpu")
    layer = torch.nn.Linear(400, 10_000, bias=False)  # one float32 sum of these is 7e-5 off
    layer.weight.grad = 1e-3 * torch.randn_like(layer.weight)
    exact = layer.weight.grad.double().norm().item()
    assert clip_gradients(layer, 0, world).item() == pytest.approx(exact, rel=3e-6)
    clip_gradients(layer, exact / 2, world)
    assert layer.weight.grad.double().norm().item() == pytest.approx(exact / 2, rel=3e-6)


# -- what is sent: an update of three micro-steps by 8 processes, 7 of which do not exist

GROUPS = 3  # what is gathered at a time: two blocks, and the rest of the model
SHAPES = 4  # of the matrices that Muon takes
PASSES = 2 * ACCUMULATION  # fsdp gathers a block for each, and what is beside them for each two
LOSS = ACCUMULATION + 1  # sums: Stop's flag in each micro-step (no GPU waits), and the loss
SENT = {  # sharding, processes of a node, optimizer: gathered, scattered, summed, Muon's gathers
    ("ddp", 8, "adamw"): (0, 0, LOSS, 0),  # beside DDP's buckets
    ("ddp", 8, "muon"): (0, 0, LOSS, SHAPES),  # the updates
    ("zero1", 8, "adamw"): (GROUPS, GROUPS, LOSS + 1, 0),  # the norm
    ("zero1", 8, "muon"): (GROUPS, GROUPS, LOSS + 1, 2 * SHAPES),  # directions, too
    ("zero1", 4, "adamw"): (GROUPS, GROUPS, LOSS + 1 + GROUPS, 0),  # the sum over the nodes, once
    ("fsdp", 8, "adamw"): (2 * PASSES + ACCUMULATION, GROUPS * ACCUMULATION, LOSS + 1, 0),
    ("fsdp", 8, "muon"): (2 * PASSES + ACCUMULATION, GROUPS * ACCUMULATION, LOSS + 1, 2 * SHAPES),
    ("fsdp", 4, "adamw"): (2 * PASSES + ACCUMULATION, GROUPS * ACCUMULATION, LOSS + 1 + GROUPS, 0),
}


class Collectives(TorchDispatchMode):
    """Counts the collectives that are started, by name."""

    def __init__(self):
        super().__init__()
        self.started: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # so that its own collectives come here
        if function.namespace in ("c10d", "_c10d_functional"):
            self.started[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


class HookedDDP(DistributedDataParallel):
    """The processes that do not exist send nothing, which DDP's own sum does not expect."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_comm_hook(None, noop_hook)


@pytest.fixture
def no_group():
    """Afterwards, there is no process group, and PyTorch has as many threads as before."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("way", SENT, ids=str)
def test_an_update_sends_each_thing_once(way, monkeypatch, no_group):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def join(_world):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)

    strategy, local_size, optimizer = way
    monkeypatch.setattr("support.machine.distributed.join", join)
    monkeypatch.setattr(sharding, "DistributedDataParallel", HookedDDP)
    for name, value in torchrun_variables(0, 8, local_size).items():
        monkeypatch.setenv(name, value)
    with start_world("cpu") as world:
        raw = random_model()
        sharding.place(raw, world, strategy)
        model = sharding.wrap(raw, world)
        optimizers = raw.configure_optimizers(optimizer)
        stop = Stop(world)
        for _ in range(2):  # the first update is as all others
            with Collectives() as sent:
                update(model, optimizers, stop, Batches(0), strategy)
            names = ["_allgather_base_", "_reduce_scatter_base_", "allreduce_"]
            names.append("all_gather_into_tensor")
            assert tuple(sent.started[name] for name in names) == SENT[way]


def test_blocks_compile_to_the_same_graphs_inside_ddp_and_before_it(monkeypatch, no_group):
    """Where a block compiled first, in the search for the micro-batch or in DDP, shows nowhere."""
    graphs: list[int] = []

    def count(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.zeros(1, 16, dtype=torch.int64)
    made = []
    for searched in (False, True):
        torch.compiler.reset()
        graphs.clear()
        raw = random_model()
        compile_blocks(raw, recompute=True)
        model = DistributedDataParallel(raw, bucket_cap_mb=0.001)  # less than a block
        if searched:
            raw(x, x)[1].backward()
        model(x, x)[1].backward()
        made.append(list(graphs))
    assert made[0] == made[1] and len(made[0]) == 2, "the block and the loss"


# -- Muon: the weights are those of one process, and each does its share of the work


def step_muon(model) -> list[torch.Tensor]:
    """Makes two updates with random gradients -> the matrices, whole."""
    torch.manual_seed(0)
    muon = model.configure_optimizers("muon")[1]
    params = muon.param_groups[0]["params"]
    for p in params * 2:
        p.grad = torch.randn(p.shape)
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements, src_data_rank=None)
        if p is params[-1]:
            muon.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in params]


def share_muon() -> None:
    """What each of four processes runs. Rank 0 prints what they found, alone and for each way."""
    model = functools.partial(random_model, n_layer=3, vocab_size=300)
    expected = step_muon(model())
    found = []
    with start_world("cpu") as world:
        for strategy, group in [("ddp", 4), ("zero1", 4), ("fsdp", 4), ("fsdp", 2)]:
            world.shard_group_size = group
            sharding.place(sharded := model(), world, strategy)
            found.append([None] * 4)
            with mock.patch.object(optim, "orthogonalize", wraps=optim.orthogonalize) as made:
                same = all(map(torch.equal, step_muon(sharded), expected))
                matrices = sum(x.numel() for (x,), _ in made.call_args_list)
                dist.all_gather_object(found[-1], [same, matrices])
        world.say(json.dumps(found))


def test_but_for_how_it_orthogonalizes_an_update_is_pytorchs():
    """Of c_attn, of which PyTorch knows no heads, the size differs, too."""

    def pytorchs(params, learning_rate, weight_decay, *_):
        return torch.optim.Muon(params, learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw")

    def orthogonalize(grad, *_):
        return optim.orthogonalize(grad.bfloat16()[None])[0]

    found = step_muon(random_model())
    with (
        mock.patch.object(optim, "Muon", pytorchs),
        mock.patch("torch.optim._muon._zeropower_via_newtonschulz", orthogonalize),
    ):
        expected = step_muon(random_model())
    same = [torch.equal(x, y) for x, y in zip(found, expected, strict=True)]
    assert same == [False, True, True, True] * 2


@pytest.mark.parametrize("shape", [(3, 16, 48), (3, 48, 16), (0, 16, 16)], ids=str)
def test_matrices_that_a_gpu_orthogonalizes_at_once_are_those_of_one_after_another(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    one_by_one = [optim.orthogonalize(x[None])[0] for x in matrices]
    together = optim.orthogonalize(matrices)
    assert together.shape == shape
    for x, y in zip(together, one_by_one, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_each_process_orthogonalizes_its_share_and_the_weights_are_those_of_one():
    done = run_script("tests/test_sharding.py", "muon", ranks=4)
    assert "alltoall" not in done.stderr, "PyTorch warns no user of what gloo lacks"
    one = [True, 2 * 12 * 16**2]  # all matrices of one of three blocks, in two updates
    two = [True, 2 * one[1]]
    expected = [*[[one, one, one, [True, 0]]] * 3, [two, one, two, one]]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def share_copies() -> None:
    """What each of four processes runs, as two nodes whose CPUs draw other weights."""
    with start_world("cpu") as world:
        world.shard_group_size = 2
        for strategy in ("zero1", "fsdp"):
            model = random_model(vocab_size=300)
            with torch.no_grad():
                for p in model.parameters():
                    p += world.rank // 2
            sharding.place(model, world, strategy)
            divergence.refuse_other_copies(model, world, again="never")
            world.local_size = 1 if world.rank == 3 else 3
            with pytest.raises(UsageError, match=f": {world.local_size} of 4 processes"):
                sharding.place(random_model(), world, strategy)
            sharding.place(random_model(), world, "ddp")  # shares no weights
            world.local_size = 4


def test_nodes_that_draw_other_weights_share_the_first_ones_and_none_has_more_processes():
    run_script("tests/test_sharding.py", "copies", ranks=4)


# -- resuming on four processes, where the order of a sum matters

TWENTY = """--max-steps 20 --checkpoint-every 10 --keep-checkpoints 9 --total-batch-size 128
    --batch-size 1 --val-every 10 --val-tokens 160 --learning-rate 0.01"""


def refusal(args: list[str], world: World) -> list[str]:
    """The ranks in the sentence that ends a run if a bit of rank 1 flips before step 20."""

    def evaluate(run):
        if run.progress.step == 20 and world.rank == 1:
            weights = divergence.local_weights(run.model)["transformer.ln_f.weight"]
            weights.view(torch.int32)[0] ^= 1

    settled = settle_in(world, args)
    config = settled.config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt2, "evaluate_if_due", evaluate)
        try:
            train_gpt2.train(settled, args, began=0.0)
        except UserError as error:
            assert "--resume auto" in str(error) and not list(Path(config.log_dir).glob("*ckpt*"))
            return re.findall(r"rank \d", str(error))
    return []


def resume_all(folder: Path, more: list[str]) -> None:
    """What each of four processes runs. Rank 0 prints, for each way, the hashes of two runs."""
    with start_world("cpu") as world:
        for way in ("ddp", "zero1", "fsdp", "2 × 2"):
            strategy = way if way != "2 × 2" else "fsdp"
            world.shard_group_size = 2 if way == "2 × 2" else 4
            hashes = []
            middle: list = []
            for name in ("whole", "again"):
                log_dir = folder / f"{way}-{name}"
                flags = tiny_run(folder / "shards", log_dir, TWENTY, *middle, *more)
                args = [*map(str, flags), "--sharding", strategy]
                train_gpt2.train(settle_in(world, args), args, began=0.0)
                last = (log_dir / "ckpt_000020" / "model.safetensors").read_bytes()
                hashes.append(hashlib.sha256(last).hexdigest())
                middle = ["--resume", log_dir / "ckpt_000010"]
            args[args.index(str(folder / f"{way}-again"))] = str(folder / f"{way}-odd")
            odd = refusal(args, world) if way in ("ddp", "2 × 2") else []  # where there are copies
            if world.is_main:
                lines = (folder / f"{way}-whole" / "log.txt").read_text().split("\n")
                values = [float(line.split()[2]) for line in lines if " train " in line]
                print("found", json.dumps([way, hashes, values, odd]))


def check_resumed(folder: Path, *flags: str) -> None:
    write_shards(folder / "shards")
    done = run_script("tests/test_sharding.py", folder, *flags, ranks=4)
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line[:5] == "found"]
    odd = {way: ranks for way, _, _, ranks in found}
    everyone = ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert odd == {"ddp": everyone, "zero1": [], "fsdp": [], "2 × 2": ["rank 1", "rank 3"]}
    for way, (whole, again), curve, _ in found:
        assert whole == again, way
        assert curve == pytest.approx(found[0][2], rel=1e-3), way
        assert curve[-1] < curve[0] - 0.1, "it learns"


def test_a_run_of_four_processes_resumes_to_the_same_bits_with_every_sharding(tmp_path):
    check_resumed(tmp_path, "--average-frac", "0.3")


@pytest.mark.torture
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_so_does_it_in_each_precision_compiled_with_each_optimizer(tmp_path, dtype, optimizer):
    check_resumed(tmp_path, "--dtype", dtype, "--optimizer", optimizer, "--compile")


if __name__ == "__main__":
    if sys.argv[1:] == ["muon"]:
        share_muon()
    elif sys.argv[1:] == ["copies"]:
        share_copies()
    elif sys.argv[1:]:
        resume_all(Path(sys.argv[1]), sys.argv[2:])
    else:
        measure_all()

"""Compiles a configuration for a GPU that is not there, and accounts for its updates.

The project's own functions build the run, on fake tensors, which have no values. Inductor compiles
for the GPU. A dispatch mode sees each operation, and a stand-in each launch of a Triton kernel.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet, finalize

import torch
import torch.nn.functional as F
from assemble import assemble
from mock_gpu import Gpu
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._prims.rng_prims import graphsafe_run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import hellaswag
from benchmarks import peers
from config import TrainConfig, parse_command_line
from model import GPT, GPTConfig
from support.machine import graphs, sharding
from support.machine.compile import compile_model
from support.machine.device import autocast, evaluation_mode, prepare_device
from support.machine.distributed import Stop, World, start_world
from support.machine.memory import estimate_memory
from train_gpt2 import build_optimizers, start_device, train_step

# Operations that launch nothing: they allocate, or look at memory in another way.
VIEWS = (
    " _reshape_alias _unsafe_view alias as_strided detach device empty empty_like empty_strided "
    "expand is_pinned lift_fresh permute reshape resize_ select set_ slice split split_with_sizes "
    "squeeze sym_size sym_stride t transpose unbind unsqueeze view "
)
SYNCS = ("_local_scalar_dense", "equal", "masked_select", "nonzero")  # the CPU waits for them


# -- the ledger


@dataclass
class Account:
    """What one phase does on the GPU."""

    launches: list[tuple[str, int, int]] = field(default_factory=list)  # name, bytes, FLOPs
    syncs: list[str] = field(default_factory=list)  # operations for which the CPU waits
    from_cpu: int = 0  # copies of CPU tensors to the GPU
    on_cpu: list[str] = field(default_factory=list)  # other operations that take a CPU tensor
    peak: int = 0  # bytes of GPU memory
    graphs: int = 0  # that were compiled


class Ledger(TorchDispatchMode):
    """Notes each operation in the account of the present phase, and follows the GPU's memory."""

    def __init__(self):
        super().__init__()
        self.account = Account()
        self.live = 0  # bytes
        self.storages = WeakSet()

    is_infra_mode = classmethod(lambda cls: True)  # else compiled code would run eagerly
    ignore_compile_internals = classmethod(lambda cls: True)
    supports_higher_order_operators = True

    def phase(self, work: Callable[[], Any]) -> Account:
        self.account = Account(peak=self.live)
        before = counters["stats"]["unique_graphs"]
        with self:
            work()
        self.account.graphs = counters["stats"]["unique_graphs"] - before
        return self.account

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch._guards.TracingContext.try_get():  # the compiler tries the operation out
            return func(*args, **kwargs)
        if func is graphsafe_run_with_rng_state:  # attention that checkpointing repeats
            func, *args = args
            kwargs.pop("rng_state")
        name = func._overloadpacket.__name__
        if name in SYNCS and args[0].is_cuda:
            self.account.syncs.append(name)
        if name == "_local_scalar_dense":  # .item(): there is no value
            return 0.0 if args[0].is_floating_point() else 0
        # with rates in tensors it has no fake form, and would make the XL's 25 GB
        out = None if name == "_fused_adamw_" else func(*args, **kwargs)
        tensors = tensors_of((args, kwargs, out))
        on_gpu = [x for x in tensors if x.is_cuda]
        for x in on_gpu:
            self.hold(x)
        if f" {name} " in VIEWS:
            return out
        if any(x.is_cpu and (on_gpu or x.numel() > 3) for x in tensors):  # Stop has three votes
            self.note_cpu(name, out)
        if on_gpu:
            count = flop_registry.get(func._overloadpacket)
            size = sum(x.nbytes for x in on_gpu)
            self.launch(name, size, count(*args, **kwargs, out_val=out) if count else 0)
        return out

    def note_cpu(self, name: str, out: Any) -> None:
        """Notes an operation that takes or makes a tensor on the CPU."""
        if name not in ("_to_copy", "copy_"):
            self.account.on_cpu.append(name)
        elif out.is_cuda:
            self.account.from_cpu += 1
        else:
            self.account.syncs.append("copy to the CPU")

    def launch(self, name: str, size: int, flops: int = 0) -> None:
        self.account.launches.append((name, size, flops))

    def hold(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        if storage not in self.storages:
            self.storages.add(storage)
            self.live += storage.nbytes()
            finalize(storage, self.release, storage.nbytes())
            self.account.peak = max(self.account.peak, self.live)

    def release(self, size: int) -> None:
        self.live -= size


def tensors_of(tree: Any) -> Collection[torch.Tensor]:
    """The tensors in nested lists and dictionaries, each once."""
    return {id(x): x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}.values()


LEDGER = Ledger()
SOURCES: dict[str, str] = {}  # of Triton's kernels, by their names


class StandIn:
    """What compiled code has instead of a Triton kernel."""

    def __init__(self, name: str, source: str, device_str: str):
        self.name = name
        self.gathers = find_gathers(source)
        SOURCES[name] = source

    def run(self, *args: Any, **_options: Any) -> None:
        read = math.prod(x for x in args if isinstance(x, int))  # elements of the kernel
        sizes = {id(x): x.nbytes for x in tensors_of(args)}
        sizes |= {id(args[i]): read * args[i].itemsize for i in self.gathers}
        LEDGER.launch(self.name, sum(sizes.values()))


def find_gathers(source: str) -> list[int]:
    """Of a kernel's arguments, those of which it reads only what indices say."""
    [listed] = re.findall(r"def triton_\w+\((.*?)\)", source) or [""]
    names = [name for name in listed.split(", ") if "ptr" in name]
    loads = [re.findall(rf"tl\.load\({name} \+ \((.*?)\)", source) for name in names]
    return [i for i, at in enumerate(loads) if at and all("tmp" in index for index in at)]


def refuse_cpu(*_args: Any, **_options: Any) -> None:
    raise RuntimeError("a CPU tensor is in a compiled graph: inductor makes C++ of it")


AsyncCompile.triton = StandIn
AsyncCompile.cpp = AsyncCompile.cpp_pybinding = refuse_cpu
torch._inductor.config.compile_threads = 1
torch._inductor.config.fx_graph_cache = False
torch._functorch.config.enable_autograd_cache = False


# -- a run


class FakeGPT(GPT):
    """A GPT of fake tensors, which nn.Module cannot move."""

    def to_empty(self, *, device: torch.device, recurse: bool = True) -> "FakeGPT":
        for module in self.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(torch.empty(p.shape, device=device)))
        return self

    def to(self, _device: torch.device) -> "FakeGPT":
        return self


def build(config: TrainConfig, world: World, plain: list[str]) -> dict[str, Callable[[], Any]]:
    """Builds a run as train_gpt2.build_run does -> its phases, from step 0 on.

    plain: attention or loss, as everyone writes them first.
    """
    dtype, _ = start_device(config, world)
    with LEDGER, world.device:
        model = FakeGPT(GPTConfig(**GPTConfig.fields_from(config)))
        sharding.place(model, world, config.sharding)
    if "loss" in plain:
        model.forward = partial(peers.plain_loss, model)
    if "attention" in plain:
        F.scaled_dot_product_attention = peers.written_out
    how = compile_model(model, world.device, config.compile)
    if config.compile and how != "compiled":
        raise RuntimeError(how)
    SOURCES.clear()  # compile_model has compiled a probe
    trained = sharding.wrap(model, world)
    optimizers = build_optimizers(config, model, dtype)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    x, y = torch.zeros(2, config.batch_size, config.sequence_length, dtype=torch.int64)
    loader = SimpleNamespace(wait=lambda: None, next_batch=lambda: (x, y))
    width = 384  # of the rows that hellaswag.prepare lays out
    columns = torch.zeros(hellaswag.GPU_TOKENS // width, width, 3, dtype=torch.int64)
    targets = torch.zeros(hellaswag.GPU_TOKENS // 2, 4, dtype=torch.int64)
    parts = dict(model=trained, optimizers=optimizers, scaler=scaler, loader=loader, world=world)
    parts |= dict(stop=Stop(world), dtype=dtype, strategy=config.sharding)
    if graphs.can_record(config, world, dtype):  # which need tensors for rates; nothing is recorded
        os.environ["GPT2_NO_GRAPH"] = "1"
        parts["run_part"] = graphs.Graphs(optimizers, world.device).run
    update = partial(train_step, **parts, lr=1e-3, grad_clip=config.grad_clip)

    def validate() -> None:
        with torch.no_grad(), evaluation_mode(model), autocast(world.device, dtype):
            model.loss(model.hidden(x.to(world.device)), y.to(world.device))

    def score_hellaswag() -> None:
        with torch.no_grad(), evaluation_mode(model), autocast(world.device, dtype):
            hellaswag.target_losses(model, columns.to(world.device), targets.to(world.device))

    return {
        "validation": validate,
        "HellaSwag": score_hellaswag,
        "the first update": partial(update, grad_accum_steps=2),
        "the second update": partial(update, grad_accum_steps=2),
        "an update of one micro-step": partial(update, grad_accum_steps=1),
        "the second validation": validate,
        "the second HellaSwag": score_hellaswag,
    }


def find_problems(accounts: dict[str, Account], config: TrainConfig, plan: int) -> list[str]:
    problems = [f"graph break: {why.splitlines()[0]}" for why in counters["graph_break"]]
    for name, account in accounts.items():
        if account.graphs and name not in ("validation", "HellaSwag", "the first update"):
            problems.append(f"{name} recompiles {account.graphs} graphs")
        if account.on_cpu:
            problems.append(f"{name} computes with a CPU tensor: {', '.join(set(account.on_cpu))}")
        if account.peak > plan:
            peak = f"{account.peak / 1e9:.2f} GB"
            problems.append(f"{name} takes {peak}, and plan.py says {plan / 1e9:.2f}")
    once = accounts["an update of one micro-step"]
    twice = accounts["the second update"]
    if syncs := Counter(twice.syncs) - Counter(once.syncs):
        problems.append(f"a micro-step makes the CPU wait for the GPU: {', '.join(syncs)}")
    elif len(once.syncs) > (1 if config.dtype == "float16" else 0):  # is the norm finite?
        problems.append(f"an update makes the CPU wait for the GPU: {', '.join(once.syncs)}")
    if (once.from_cpu, twice.from_cpu) != (2, 4):
        copied = f"{once.from_cpu} and {twice.from_cpu} CPU tensors"
        problems.append(f"updates of 1 and 2 micro-steps copy {copied}, not only each x and y")
    return problems


def make_row(gpu: Gpu, launches: list, seen: list, tokens: int, peak: str) -> dict[str, str]:
    """A row of the page's table. seen: the launches whose kernels count."""
    moved = sum(size for _, size, _ in launches)
    flops = sum(flops for *_, flops in launches)
    # each launch runs at full bandwidth or at full speed, whichever takes longer
    seconds = sum(max(size / gpu.bandwidth, flops / gpu.flops) for _, size, flops in launches)
    attention = (re.match(r"_scaled_dot_product_(\w+?)_attention", name) for name, *_ in launches)
    return {
        "attention": ", ".join(sorted({found[1] for found in attention if found})),
        "kernels": f"{len({name for name, *_ in seen} & SOURCES.keys())}",
        "launches": f"{len(launches):,}",
        "GB moved": f"{moved / 1e9:.1f}",
        "TFLOP": f"{flops / 1e12:.1f}",
        "roofline": f"{1e3 * seconds:.1f} ms",
        "tokens/s": f"{tokens / seconds:,.0f}",
        "peak": peak,
    }


def main(gpu: Gpu, result: Path, flags: list[str]) -> None:
    """Writes rows of the table and findings to `result`. flags: of training, or plain-…."""
    plain = [flag.removeprefix("plain-") for flag in flags if flag.startswith("plain-")]
    config = parse_command_line([flag for flag in flags if not flag.startswith("plain-")])
    with FakeTensorMode():
        prepare_device("cuda", config.deterministic)
        phases = build(config, start_world("cuda"), plain)
        accounts = {name: LEDGER.phase(work) for name, work in phases.items()}
    with torch.device("meta"):
        model = GPT(GPTConfig(**GPTConfig.fields_from(config)))
    plan = sum(estimate_memory(model, config, config.batch_size, 2, "cuda").values())
    # what is plain takes more memory than is planned, on purpose
    problems = find_problems(accounts, config, 2**60 if plain else plan)
    for name, problem in assemble(SOURCES, result.parent).items():
        problems += [f"{name} {problem}"] if problem else []
    twice = accounts["the second update"]
    once = accounts["an update of one micro-step"]
    micro_step = list((Counter(twice.launches) - Counter(once.launches)).elements())
    training = accounts["validation"].launches + twice.launches
    tokens = config.batch_size * config.sequence_length
    peak = f"{twice.peak / 1e9:.1f} of {plan / 1e9:.1f} GB"
    rows = [make_row(gpu, micro_step, training, tokens, peak)]
    masked = accounts["HellaSwag"].launches
    peak = f"{accounts['HellaSwag'].peak / 1e9:.1f} GB"
    rows += [make_row(gpu, masked, masked, hellaswag.GPU_TOKENS, peak)]
    result.write_text(json.dumps([rows, problems]))

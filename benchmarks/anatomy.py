"""bench.py --anatomy: where the time and the memory of a training step go, on a CPU.

PyTorch's profiler sees a real step, compiled as training does it, and each operator's own time
goes to one part. Beside it stands how near the part is to its limit: products and attention to the
matmul peak of their precision, what only moves memory to the speed at which memory is read. Then
what is alive when the step holds the most, by what made it.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch._inductor import config as inductor_config
from torch.profiler import ProfilerActivity, profile

from benchmarks.hot_paths import read_speed
from benchmarks.training_step import training
from model import GPTConfig
from support.device import dtype_name, number_after, peak_memory
from support.distributed import World
from support.memory import loss_rows, state_memory
from support.tokenizer import VOCAB_SIZE

MEMORY = {  # key: what is alive at the peak
    "state": "memory: weights and moments",
    "kept": "memory: what blocks keep for the backward pass",
    "loss": "memory: loss, with the gradient of the head",
    "gradients": "memory: gradients, and the backward pass at work",
    "other": "memory: other tensors",
    "libraries": "memory: Python and PyTorch",
    "holes": "memory: holes of the heap, scratch of the products",
}
CASES = [(dtype, T) for dtype in (torch.float32, torch.bfloat16) for T in (256, 1024)]
STEPS = 3  # that are profiled
PARTS = {  # key: what it is
    "forward": "products: forward",
    "dx": "products: gradient of the input",
    "dw": "products: gradient of the weights",
    "attention": "attention: forward",
    "attention backward": "attention: backward",
    "blocks": "blocks, elementwise: GELU, layer norm, casts, sums",
    "loss": "loss, elementwise: softmax, casts, sums",
    "optimizer": "AdamW",
    "norm": "norm and clipping of the gradient",
    "embedding": "embedding, sum with the head's gradient",
    "rest": "the rest: allocation, calls",
}
OPERATORS = {  # by name; for the others see `part_of`
    "aten::bmm": "attention backward",  # in blocks, see support/attention.py
    "aten::_fused_adamw_": "optimizer",
    "aten::linalg_vector_norm": "norm",
    "aten::mul_": "norm",
    "aten::_foreach_mul_": "norm",
    "aten::fill_": "embedding",
    "aten::add_": "embedding",
    "aten::embedding_dense_backward": "embedding",
    "autograd::engine::evaluate_function: EmbeddingBackward0": "embedding",
    "autograd::engine::evaluate_function: AddBackward0": "embedding",
}


def dissect(m) -> Iterator[dict]:
    """A row for each part of the step, in each precision and at each length; then its memory."""
    if m.device.type != "cpu":
        m.notes.append(
            "on a CPU only: the kernels of a GPU run beside the operators that call them"
        )
        return
    speed = read_speed(m.device)
    m.notes.append(f"limits: the matmul peaks above; memory read at {speed / 1e9:.1f} GB/s")
    m.notes.append(f"times: {STEPS} steps; memory: when the tensors of a step take the most")
    for dtype, T in CASES:
        case = f"{dtype_name(dtype)}, T {T:,}"
        step = m.step(case, dtype=dtype, T=T)
        [row] = m.measure([replace(step, make=dissected)])
        if "error" in row:
            yield row
            continue
        least = find_limits(m, dtype, T, speed)
        for key, name in PARTS.items():
            limit = least[key] / row[key] if key in least and row[key] else None
            yield dict(
                case=case,
                part=name,
                ms=1000 * row[key],
                share=row[key] / row["step"],
                **{"of limit": limit},
            )
        yield dict(case=case, part="the step", ms=1000 * row["step"], share=1.0)
        held = {key: row[f"held {key}"] for key in MEMORY}
        keep = least_kept(m, dtype, T)
        for key, name in MEMORY.items():
            limit = keep / held[key] if key == "kept" and held[key] else None
            yield dict(case=case, part=name, gb=held[key] / 1e9, **{"of limit": limit})
        yield dict(case=case, part="memory: the peak", gb=sum(held.values()) / 1e9)


def dissected(world: World, **options) -> Callable:
    """Makes a run that tells the parts of the training step: seconds, and bytes at its peak."""
    inductor_config.cpp.enable_kernel_profile = True  # the compiler's kernels tell their names
    libraries = resident()
    run = training(world, **options)
    run()
    state = weights_and_moments(options["size"], options["T"])
    held = held_at_peak(run) + Counter(state=state, libraries=libraries)
    held["holes"] = peak_memory(world.device) - sum(held.values())
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        start = time.perf_counter()
        for _ in range(STEPS):
            run()
        seconds = (time.perf_counter() - start) / STEPS
    parts: Counter[str] = Counter()
    for event in found.events():
        part = part_of(event.name, event.input_shapes, options["B"] * options["T"])
        parts[part] += event.self_cpu_time_total / 1e6 / STEPS
    parts["rest"] += seconds - sum(parts.values())  # what no operator accounts for
    told = {key: parts[key] for key in PARTS} | dict(step=seconds)
    told |= {f"held {key}": held[key] for key in MEMORY}
    return lambda: told


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return 1024 * number_after("VmRSS:", Path("/proc/self/status").read_text())


def weights_and_moments(size: dict[str, int], T: int) -> int:
    shape = GPTConfig(block_size=T, **size)
    parts = state_memory(shape, width=4, sharding="ddp", processes=1, muon=False)
    return parts["weights"] + parts["moments"]


def held_at_peak(run: Callable) -> Counter[str]:
    """Bytes of the tensors that `run` makes and holds at their peak, by key of MEMORY."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    live: dict[int, tuple[str, int]] = {}  # by address
    now: Counter[str] = Counter()
    peak = Counter(now)
    tree = found.profiler.kineto_results.experimental_event_tree()
    for _, address, nbytes, key in sorted(find_allocations(tree)):
        if nbytes > 0:
            live[address] = key, nbytes
            now[key] += nbytes
        elif address in live:
            key, nbytes = live.pop(address)
            now[key] -= nbytes
        if now.total() > peak.total():
            peak = Counter(now)
    return peak


def find_allocations(tree: list) -> Iterator[tuple[int, int, int, str]]:
    """Yields time, address, bytes (below 0: freed) and key of MEMORY from the profiler's events."""
    waiting = [(event, "") for event in tree]
    while waiting:
        event, operators = waiting.pop()
        operators += f" {event.name}"
        if event.tag.name == "Allocation":
            field = event.extra_fields
            yield event.start_time_ns, field.ptr, field.alloc_size, maker_of(operators)
        waiting += [(child, operators) for child in event.children]


def maker_of(operators: str) -> str:
    """The key of MEMORY for a tensor, from the names of the operators that it was made in."""
    if "Backward" in operators:
        return "gradients"
    if region := re.search(r"Torch-Compiled Region: (\d+)", operators):
        return "kept" if region[1] == "0" else "loss"  # compiled in this order
    return "other"


def part_of(name: str, shapes: list, tokens: int) -> str:
    """The part that an operator belongs to: a key of PARTS.

    Products are told by their shapes. (tokens, n) @ (n, m) is one of the forward pass or of the
    input's gradient; the blocks' forward products alone add a bias, and only the head has more than
    four times as many outputs as inputs.
    """
    if name in ("aten::mm", "aten::addmm"):
        (rows, _), (inner, columns) = [shape for shape in shapes if len(shape) == 2][:2]
        if rows not in (tokens, loss_rows("cpu")):
            return "dw"
        is_head = columns > 4 * inner
        return "forward" if name == "aten::addmm" or is_head else "dx"
    if "scaled_dot_product" in name and "layer_norm" not in name:  # a kernel that has both: blocks
        return "attention backward" if "backward" in name else "attention"
    if kernel := re.match(r"graph_(\d+)_cpp_fused", name):
        return "blocks" if kernel[1] == "0" else "loss"  # compiled in this order
    return OPERATORS.get(name, "rest")


def find_limits(m, dtype: torch.dtype, T: int, speed: float) -> dict[str, float]:
    """Seconds that each part needs at least, if its limit is the matmul peak or the memory.

    What is elementwise reads and writes each tensor once. Per token, channel and block that is, in
    the forward pass, 5 values of the residual stream (4 bytes) and 14 of the matmuls' precision;
    in the backward pass 6 and 32, with what is computed again; and the weights' casts, twice.
    """
    L, C = m.size["n_layer"], m.size["n_embd"]
    tokens = m.config.batch_size * T
    width = dtype.itemsize
    matrices = 12 * C**2
    head = VOCAB_SIZE * C
    parameters = L * matrices + head
    product = 2 * tokens * parameters / m.peak(dtype)
    attention = 2 * tokens * T * C * L / m.peak(dtype)  # two products, half of each is masked
    casts = 2 * matrices * (4 + width) if width < 4 else 0
    values = tokens * C * (11 * 4 + 46 * width)
    logits = tokens * VOCAB_SIZE * (4 * 4 + width)  # read for maximum and sum; made p - t
    return {
        "forward": product,
        "dx": product,
        "dw": product,
        "attention": attention,
        "attention backward": 2.5 * attention,  # five products
        "blocks": L * (values + casts) / speed,
        "loss": logits / speed,
        "optimizer": 7 * 4 * parameters / speed,  # reads 4 values a parameter, writes 3
        "norm": 3 * 4 * parameters / speed,  # reads it; reads and writes it to clip
        "embedding": 4 * 4 * head / speed,  # zeros; the sum of two gradients
    }


def least_kept(m, dtype: torch.dtype, T: int) -> int:
    """Bytes that the blocks must keep if no product is computed again.

    Per token, channel and block: the residual stream once, in float32; and in the products'
    precision q, k, v, attention's output, its projection, and the 4·C before GELU.
    """
    values = m.size["n_layer"] * m.size["n_embd"] * m.config.batch_size * T
    return values * (4 + 9 * dtype.itemsize)

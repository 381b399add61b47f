"""bench.py --anatomy: where the time and the memory of a training step go, on a CPU.

PyTorch's profiler sees a real step, compiled as training does it, and each operator's own time
goes to one part. Beside it stands how near the part is to its limit: products and attention to the
matmul peak of their precision, what only moves memory to the speed at which memory is read.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch._inductor import config as inductor_config
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from benchmarks.hot_paths import read_speed
from benchmarks.training_step import training
from support.device import dtype_name
from support.distributed import World
from support.memory import loss_rows
from support.tokenizer import VOCAB_SIZE

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
    m.notes.append(f"kept: what the backward pass finds, beside the weights; times: {STEPS} steps")
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
        yield dict(
            case=case,
            part="the step",
            ms=1000 * row["step"],
            share=1.0,
            kept_gb=row["kept"] / 1e9,
            memory_gb=row["memory_gb"],
        )


def dissected(world: World, **options) -> Callable:
    """Makes a run of the training step, which also tells its parts: seconds, and bytes kept."""
    inductor_config.cpp.enable_kernel_profile = True  # the compiler's kernels tell their names
    run = training(world, **options)
    run()
    kept = kept_bytes(run)
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
    told = {key: parts[key] for key in PARTS} | dict(step=seconds, kept=kept)
    return lambda: told


def kept_bytes(run: Callable) -> int:
    """Bytes of the tensors that the forward pass of `run` keeps for its backward pass."""
    storages: dict[int, int] = {}

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_leaf and tensor.requires_grad):  # a weight
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(look, lambda tensor: tensor):
        run()
    return sum(storages.values())


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
    if "scaled_dot_product" in name:
        return "attention backward" if name.endswith("backward") else "attention"
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

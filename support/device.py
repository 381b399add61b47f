"""What this machine computes with: devices, precision, compiler, memory, published peaks."""

import ctypes
import os
import re
import sys
import time
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch._functorch import config as functorch_config

from support.attention import replace_attention_backward
from support.common import UserError


def pick_device(name: str = "auto") -> torch.device:
    """The device of this name; auto is this machine's accelerator (CUDA or MPS), else the CPU."""
    here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name not in ("auto", "cpu", here.type):
        raise UserError(f"device {name!r} is not available here: use auto, which is {here.type}")
    return here if name == "auto" else torch.device(name)


def device_name(device: torch.device) -> str:
    """The model of the GPU or, on Linux, of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = find_in("/proc/cpuinfo", r"model name\s*:\s*(.+)") or device.type
    return f"{name}, {os.cpu_count()} cores"


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its work; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Seeds PyTorch for one update on one rank: after a resume, dropout would draw the same."""
    bits = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(bits[0]))


def pick_dtype(device: torch.device, name: str = "auto", world=None) -> tuple[torch.dtype, str]:
    """The dtype for autocast on this device, and the reason.

    auto is the fastest that trains well. If one CPU of `world` (a World) prefers float32, all of
    its processes use float32.
    """
    if name != "auto":
        return getattr(torch, name), "as asked"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16, "compute capability 8.0 or newer"
        return torch.float16, "this GPU has no bfloat16; the gradients are scaled"
    if device.type == "cpu":
        ratio = bfloat16_speed()
        slow = world.any(ratio <= 1.5) if world else ratio <= 1.5
        why = f"bfloat16 matmuls run at {ratio:.1f} × float32's speed here"
        return torch.float32 if slow else torch.bfloat16, why
    return torch.bfloat16, f"{device.type} has it"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def autocast(device: torch.device, dtype: torch.dtype):
    """The context that computes in dtype where that is safe; it does nothing for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


@lru_cache(maxsize=1)
def bfloat16_speed() -> float:
    """The speed of bfloat16 matmuls on this CPU, relative to float32: the best of 15 each.

    CPU flags do not tell: AMX is faster, AVX512-BF16 alone may be slower, others emulate it.
    """
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for _ in range(15):
        for dtype, times in seconds.items():
            times.append(time_matmul(torch.device("cpu"), dtype))
    return min(seconds[torch.float32]) / min(seconds[torch.bfloat16])


def time_matmul(device: torch.device, dtype: torch.dtype, n: int = 1024) -> float:
    """Seconds of one product of n × n matrices."""
    a = torch.ones(n, n, dtype=dtype, device=device)
    synchronize(device)
    start = time.perf_counter()
    a @ a
    synchronize(device)
    return time.perf_counter() - start


def why_not_compile(device: torch.device) -> str:
    """Why torch.compile does not work here; empty if it does."""
    if device.type == "mps":
        return "torch.compile is not reliable on MPS"
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
        return ""
    except Exception as error:  # no compiler, no Triton, an unsupported Python, …
        why = f"{type(error).__name__}; it needs a C++ compiler such as g++"
        return f"torch.compile does not work here ({why})"


def compile_blocks(model, recompute: bool) -> None:
    """Compiles the blocks and the loss of a GPT in place, for training and validation.

    All blocks share their code, so 48 layers compile as fast as 12. Parameters keep their names.
    DDP and FSDP work between the blocks. The embedding stays eager: inductor would scatter its
    gradient with atomics, which is slow on a CPU and differs from run to run.
    """
    keep_less(recompute)
    replace_attention_backward()
    torch._dynamo.config.recompile_limit = 64  # micro-batches that are tried, validation, …
    torch._dynamo.config.optimize_ddp = False  # it would split blocks, but only those inside DDP
    for block in model.transformer.h:
        block.forward = torch.compile(block.forward, dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)


def keep_less(recompute: bool) -> None:
    """Makes compiled backward passes recompute GELU, layer norms and casts of the weights.

    By default the compiler keeps them if that is faster. Call this before the model first runs.
    """
    functorch_config.ban_recompute_used_far_apart = not recompute
    functorch_config.ban_recompute_long_fusible_chains = not recompute
    functorch_config.ban_recompute_materialized_backward = not recompute


def eager():
    """The context in which compiled blocks run as written: new shapes would recompile them."""
    return torch.compiler.set_stance("force_eager")


@contextmanager
def evaluation_mode(model: torch.nn.Module):
    """model.eval() inside; afterwards each module is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, makes the C library keep freed memory for the next tensors of this process.

    Otherwise glibc maps every large tensor anew and Linux fills its pages with zeros, for a tenth
    to a quarter of a step. Holes then take 5% of the 124M's peak, a third of the quickstart's.
    """
    if device.type == "cpu" and sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large tensors come from the heap, too
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a GPU, or this process's share of a machine or container; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = 1024 * int(find_in("/proc/meminfo", r"MemAvailable:\s*(\d+)") or 0)
    if limit := find_in("/sys/fs/cgroup/memory.max", r"(\d+)"):  # a container's, or it says "max"
        used = find_in("/sys/fs/cgroup/memory.current", r"(\d+)")
        cached = find_in("/sys/fs/cgroup/memory.stat", r"inactive_file (\d+)")  # can be freed
        free = min(free, int(limit) - int(used) + int(cached))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) or None


def peak_memory(device: torch.device) -> int:
    """The most bytes that the GPU's allocator held, or that this process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if resident := find_in("/proc/self/status", r"VmHWM:\s*(\d+)"):
        return 1024 * int(resident)
    import resource  # for macOS; on Linux it would count the parent of a forked process

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def find_in(path: str, pattern: str) -> str:
    """What the pattern's group matches in a file of the Linux kernel; empty if there is nothing."""
    file = Path(path)
    found = re.search(pattern, file.read_text()) if file.exists() else None
    return found[1] if found else ""


# plan.py's name of a GPU: the whole name that CUDA reports (a MIG slice has another), GB of memory,
# and the peaks of dense matmuls in TFLOP/s: float32, float32 with TF32 if the GPU has it, 16 bits
# summed in float32. The peaks are half of those that count sparsity. B200's memory: DGX datasheet.
GPUS = {
    "B200": (r"NVIDIA B200", 180, 80, 1100, 2250, "Blackwell architecture brief, 2024 (HGX)"),
    "H200": (r"NVIDIA H200", 141, 67, 494.5, 989.5, "H200 datasheet, 2024 (SXM)"),
    "H100": (r"NVIDIA H100 80GB HBM3", 80, 67, 494.5, 989.5, "H100 datasheet, 2023 (SXM)"),
    "H100-PCIe": (r"NVIDIA H100 PCIe", 80, 51, 378, 756, "H100 datasheet, 2023"),
    "A100": (r"NVIDIA A100(-SXM\d-80GB| 80GB PCIe)", 80, 19.5, 156, 312, "A100 datasheet, 2021"),
    "A100-40GB": (r"NVIDIA A100-\w+-40GB", 40, 19.5, 156, 312, "A100 datasheet, 2021"),
    "V100": (r"Tesla V100-SXM\d-32GB", 32, 15.7, 15.7, 125, "V100 datasheet, 2020"),
    "V100-16GB": (r"Tesla V100-SXM\d-16GB", 16, 15.7, 15.7, 125, "V100 datasheet, 2020"),
    "V100-PCIe": (r"Tesla V100-PCIE-\w+", 16, 14.0, 14.0, 112, "V100 datasheet, 2020"),
    "T4": (r"Tesla T4", 16, 8.1, 8.1, 65, "T4 datasheet, 2019"),
    "L4": (r"NVIDIA L4", 24, 30.3, 60, 121, "L4 datasheet, 2023"),
    "RTX-5090": (r"NVIDIA GeForce RTX 5090", 32, 104.8, 104.8, 209.5, "RTX Blackwell whitepaper"),
    "RTX-4090": (r"NVIDIA GeForce RTX 4090", 24, 82.6, 82.6, 165.2, "Ada whitepaper, appendix A"),
    "RTX-3090": (r"NVIDIA GeForce RTX 3090", 24, 35.6, 35.6, 71, "Ampere GA102 whitepaper"),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Operations per second at an MFU of 1, and their source: the maker, or a matmul timed here."""
    if device.type == "cuda":
        for pattern, _, float32, with_tf32, half, source in GPUS.values():
            if re.fullmatch(pattern, torch.cuda.get_device_name(device)):
                peak = half
                if dtype == torch.float32:
                    tf32 = torch.get_float32_matmul_precision() != "highest"
                    peak = with_tf32 if tf32 else float32
                return 1e12 * peak, f"NVIDIA {source}"
    n = 2048 if device.type == "cpu" else 4096  # smaller ones are slower
    if device.type == "cpu" and dtype == torch.float16:
        n = 512  # a CPU emulates it: larger ones take minutes
    seconds: list[float] = []
    while sum(seconds) < 3:  # neighbours slow some of them down
        seconds.append(time_matmul(device, dtype, n))
    return 2 * n**3 / min(seconds), f"measured here, the best of {len(seconds)} matmuls, {n} × {n}"

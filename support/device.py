"""What this machine computes with: devices, precision, speed, compiler, memory."""

import ctypes
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch._functorch import config as functorch_config
from torch.nn import attention

from support.attention import replace_attention_backward
from support.common import UserError


def pick_device(name: str = "auto") -> torch.device:
    """A device by name; auto is the accelerator that is there (CUDA, MPS), else the CPU."""
    here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name not in ("auto", "cpu", here.type):
        there = " or ".join(dict.fromkeys([here.type, "cpu"]))
        raise UserError(f"device {name!r} is not available here: use {there}")
    return here if name == "auto" else torch.device(name)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's where Linux tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = device.type
    with suppress(OSError):
        if found := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            name = found[1]
    return f"{name}, {os.cpu_count()} cores"


# -- randomness


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Makes what an update draws (GPT-2's training draws nothing; dropout would) its own.

    So a resumed run draws what the uninterrupted one does, with no state to keep.
    """
    bits = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(bits[0]))


# -- precision


def pick_dtype(device: torch.device, name: str = "auto", world=None) -> tuple[torch.dtype, str]:
    """The dtype to autocast to on this device, and why.

    auto is the fastest that trains well. On CPUs each process has timed its own, and float32 is
    taken by all of `world` (a World) if one of them is faster with it.
    """
    if name != "auto":
        return getattr(torch, name), "as asked"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16, "compute capability 8.0 or newer"
        return torch.float16, "this GPU has no bfloat16; the gradients are scaled"
    if device.type == "cpu":
        ratio = bfloat16_speed()
        slow = ratio <= 1.5
        if world is not None:
            slow = world.any(slow)
        why = f"bfloat16 matmuls run at {ratio:.1f} × float32's speed here"
        return torch.float32 if slow else torch.bfloat16, why
    if device.type == "mps":
        return torch.bfloat16, "MPS has it"
    return torch.float32, "unknown device"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def autocast(device: torch.device, dtype: torch.dtype):
    """The context that computes in dtype where that is safe; nothing for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


@lru_cache(maxsize=1)
def bfloat16_speed() -> float:
    """How many times faster than in float32 this CPU multiplies matrices in bfloat16.

    The best of 15 each, in turns. A CPU's flags do not tell: with AMX it is several times, with
    AVX512-BF16 alone it can be slower than float32, and elsewhere it is emulated.
    """
    cpu = torch.device("cpu")
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for _ in range(15):
        for dtype, times in seconds.items():
            times.append(time_matmul(cpu, dtype))
    return min(seconds[torch.float32]) / min(seconds[torch.bfloat16])


# -- speed


def time_matmul(device: torch.device, dtype: torch.dtype, n: int = 1024) -> float:
    """Seconds of one product of n × n matrices."""
    a = torch.ones(n, n, dtype=dtype, device=device)
    synchronize(device)
    start = time.perf_counter()
    a @ a
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


# -- compilation and kernels


def why_not_compile(device: torch.device) -> str:
    """Why torch.compile does not work here; empty if it does."""
    if device.type == "mps":
        return "torch.compile is not reliable on MPS"
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
        return ""
    except Exception as error:  # no compiler, no Triton, an unsupported Python: any reason will do
        kind = type(error).__name__
        return f"torch.compile does not work here ({kind}; it needs a C++ compiler such as g++)"


def compile_blocks(model, recompute: bool) -> None:
    """Compiles the blocks and the loss of a GPT in place, for training and validation.

    All blocks share their code, so the first step of 48 layers waits no longer than that of 12;
    names of parameters stay as they are; and between blocks, DDP and FSDP can do their part. The
    embedding stays outside: inductor would scatter its gradient with atomics, slow on a CPU and
    different in every run. recompute: see `keep_less`. Within `eager()` what is compiled here
    runs as written.
    """
    keep_less(recompute)
    replace_attention_backward()
    torch._dynamo.config.recompile_limit = 64  # micro-batches that are tried, validation, …
    for block in model.transformer.h:
        block.forward = torch.compile(block.forward, dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)


def keep_less(recompute: bool) -> None:
    """Has the compiler recompute what takes neither matmul nor attention, instead of keeping it.

    That is GELU, layer norms and casts of the weights: the backward pass computes them again,
    even where the compiler finds keeping them faster. It is one setting for all models of the
    process, read when a model first runs.
    """
    functorch_config.ban_recompute_used_far_apart = not recompute
    functorch_config.ban_recompute_long_fusible_chains = not recompute
    functorch_config.ban_recompute_materialized_backward = not recompute


def eager():
    """The context in which compiled blocks run as written.

    Shapes that change from call to call would have them compiled again and again.
    """
    return torch.compiler.set_stance("force_eager")


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """model.eval() inside; afterwards each module is in the mode it was in, whatever happened."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def newest_flash_attention(device: torch.device) -> str:
    """Has SDPA use the FlashAttention of this GPU's generation -> its name, or "".

    That is 3 for Hopper and 4 for Blackwell, where their packages are installed.
    """
    if device.type != "cuda" or not hasattr(
        attention, "activate_flash_attention_impl"
    ):  # PyTorch 2.11
        return ""
    generation = torch.cuda.get_device_capability(device)[0]
    newest = {9: "FA3", 10: "FA4"}.get(generation, "")
    if newest:
        try:
            attention.activate_flash_attention_impl(newest)
        except (
            ImportError,
            OSError,
            RuntimeError,
            ValueError,
        ):  # not installed or not fitting: SDPA has its own
            return ""
    return newest


# -- memory


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, has the C library keep what is freed for the next tensors of this process.

    Otherwise glibc maps every large tensor anew, and Linux fills each of its pages with zeros when
    it is touched first, which takes a tenth to a quarter of a step. What is kept has holes: a run
    of the 124M takes 5% more memory, the quickstart half as much again. See mallopt(3); other C
    libraries stay as they are.
    """
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
    if device.type == "cpu" and sys.platform == "linux":
        with suppress(AttributeError):  # a C library without it
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(M_MMAP_MAX, 0)  # large tensors come from the heap too,
            mallopt(M_TRIM_THRESHOLD, -1)  # which never shrinks


def free_memory(device: torch.device) -> int | None:
    """Bytes that a GPU has left, or that this machine or container can give without swapping.

    None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = None
    with suppress(OSError, ValueError):
        meminfo = Path("/proc/meminfo").read_text()
        free = 1024 * number_after("MemAvailable:", meminfo)
    cgroup = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # a container's limit; "max" is no number
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        files = number_after("inactive_file", (cgroup / "memory.stat").read_text())
        left = limit - used + files  # the files that it has read can go
        free = left if free is None else min(free, left)
    return free


def total_memory(device: torch.device) -> int:
    """Bytes that a GPU has in all; nothing is known of others."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return 0


def number_after(name: str, text: str) -> int:
    """The number behind a name in a table of the kernel's. Raises ValueError if it is not there."""
    _, found, rest = text.partition(name)
    if not found:
        raise ValueError(f"no {name}")
    return int(rest.split()[0])


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that the GPU's allocator held, or that this process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    with suppress(OSError, ValueError):  # getrusage would count the parent of a forked process
        return 1024 * number_after("VmHWM:", Path("/proc/self/status").read_text())
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

"""What this machine computes with: devices, precision, memory, published peaks."""

import ctypes
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.base.console import counted, say_once
from support.base.errors import UserError
from support.base.process import as_typed, control_groups, find_in, usable_cores


def pick_device(name: str = "auto") -> torch.device:
    """The device of this name; auto is this machine's accelerator (CUDA or MPS), else the CPU."""
    keep_to_limit()
    here = torch.accelerator.current_accelerator(check_available=True) or fall_back_to_cpu(name)
    if name not in ("auto", "cpu", here.type):
        raise UserError(f"device {name!r} is not available here: use auto, which is {here.type}")
    return here if name == "auto" else torch.device(name)


def keep_to_limit() -> None:
    """Takes no more threads than a container may use: PyTorch counts the machine's cores."""
    cores = usable_cores()
    if "OMP_NUM_THREADS" not in os.environ and cores < torch.get_num_threads():
        torch.set_num_threads(cores)


def claim_device(name: str, local_rank: int, local_size: int) -> torch.device:
    """The device of one of the processes on this node; on a CPU, its share of the cores."""
    device = pick_device(name)
    if local_size > 1 and name == "auto" and device.type != "cuda":
        device = torch.device("cpu")  # several processes on a Mac: gloo has no MPS
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        if local_size > gpus:
            problem = f"{local_size} processes on a machine with {counted(gpus, 'GPU')}"
            raise UserError(f"{problem}: use --nproc_per_node={gpus}")
        device = torch.device("cuda", local_rank)
        # sizes that change leave fewer holes; but WSL's drivers may refuse (pytorch/pytorch#192330)
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and "microsoft" not in platform.release():
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
    elif local_size > 1:  # torchrun gives each process one thread; share the cores instead
        torch.set_num_threads(max(1, usable_cores() // local_size))
    return device


def limit_nccl(group: Any, device: torch.device) -> None:
    """Ends a stuck collective of GPUs after 10 minutes. gloo's 30 allow for rank 0's downloads."""
    if device.type == "cuda":
        nccl = group._get_backend(device)
        nccl = getattr(nccl, "wrapped_pg", nccl)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
        nccl._set_default_timeout(timedelta(minutes=10))


def fall_back_to_cpu(name: str) -> torch.device:
    """The CPU. Says so if a GPU that is not hidden idles because this PyTorch is for CPUs."""
    hidden = name == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    # SLURM hides GPUs by NoDevFiles. A container without GPUs has the driver's file, no device.
    if not hidden and not torch.version.cuda and Path("/dev/nvidiactl").exists():
        command = f"{as_typed('pip')} install --force-reinstall -r requirements.txt"
        problem = "the GPU is not used, because this PyTorch is for CPUs"
        say_once(f"{problem}; to install one for CUDA: unset PIP_EXTRA_INDEX_URL; {command}")
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The model of the GPU or, on Linux, of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = find_in("/proc/cpuinfo", r"model name\s*:\s*(.+)") or device.type
    return f"{name}, {os.cpu_count()} cores"


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Seeds PyTorch for one update on one rank, so that after a resume, dropout draws the same."""
    [bits] = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(bits))


def prepare_device(name: str, deterministic: bool) -> None:
    """Configures memory, TF32 and determinism for training. Call it before start_world."""
    keep_freed_memory(pick_device(name))
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink's switches add in any order
        torch.use_deterministic_algorithms(True)
        # filling new memory with NaN costs time, and only wrong code would read it
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def pick_dtype(
    device: torch.device,
    name: str = "auto",
    before: str = "",
    anywhere: Callable[[bool], bool] = bool,  # World.any, where there are several processes
) -> tuple[torch.dtype, str]:
    """The dtype for autocast, and the reason. auto: `before`, else the fastest that trains well."""
    if name != "auto":
        return getattr(torch, name), "--dtype"
    if before:
        return getattr(torch, before), "as before; --dtype changes it"
    if device.type == "cuda":
        if not anywhere(torch.cuda.get_device_capability(device) < (8, 0)):
            return torch.bfloat16, "compute capability 8.0 or newer"
        return torch.float16, "a GPU has no bfloat16; the gradients are scaled"
    if device.type == "cpu":
        ratio = bfloat16_speed()
        dtype = torch.float32 if anywhere(ratio <= 1.5) else torch.bfloat16
        if not ratio:
            return dtype, "this CPU has no bfloat16 units"
        return dtype, f"bfloat16 matmuls run at {ratio:.1f} × float32's speed here"
    return torch.bfloat16, f"{device.type} supports it"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """The context that computes in dtype where that is safe."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def sdpa_choice(device: torch.device, dtype: torch.dtype, shape: Any) -> str:
    """The attention kernel that PyTorch picks on a GPU for a GPTConfig's heads; empty elsewhere."""
    if device.type != "cuda":
        return ""
    hs = shape.n_embd // shape.n_head
    qkv = torch.empty(1, shape.block_size, 3, shape.n_head, hs, dtype=dtype, device=device)
    q, k, v = qkv.requires_grad_().permute(2, 0, 3, 1, 4)  # as CausalSelfAttention makes them
    choice = torch._fused_sdp_choice(q, k, v, is_causal=True)
    return f", {torch.nn.attention.SDPBackend(choice).name.lower()} for heads of {hs}"


@lru_cache(maxsize=1)
def bfloat16_speed() -> float:
    """The speed of bfloat16 matmuls on this CPU, relative to float32; 0 if it emulates them."""
    # CPU flags do not tell: AVX512-BF16 without AMX may be slower than float32
    return 0.0 if compare_matmuls(n=256, rounds=5) < 0.5 else compare_matmuls(n=1024, rounds=15)


def compare_matmuls(n: int, rounds: int) -> float:
    """How many times as fast as in float32 a CPU multiplies n × n matrices of bfloat16."""
    turns = rounds * (torch.float32, torch.bfloat16)
    seconds = [time_matmul(torch.device("cpu"), dtype, n) for dtype in turns]
    return min(seconds[::2]) / min(seconds[1::2])


def time_matmul(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """Seconds of one product of n × n matrices."""
    a = torch.ones(n, n, dtype=dtype, device=device)
    torch.get_device_module(device).synchronize()
    start = time.perf_counter()
    a @ a
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - start


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
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

    Otherwise Linux fills it with zeros again, which takes a tenth to a quarter of a step. The price
    is memory lost in holes: 5% of the 124M's peak, a third of the quickstart's.
    """
    if device.type == "cpu" and sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large tensors come from the heap, too
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def is_overloaded(device: torch.device) -> bool:
    """Whether threads of this process share a CPU's cores with other programs."""
    if device.type != "cpu" or torch.get_num_threads() == 1:
        return False
    return os.getloadavg()[0] > usable_cores() + 0.5


def free_memory(device: torch.device, processes: int = 1) -> int:
    """Free bytes of a GPU, or for each of the processes on this machine; of a Mac, half of all."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = 1024 * int(find_in("/proc/meminfo", r"MemAvailable:\s*(\d+)") or 0)
    if not free:  # macOS does not say
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for group in control_groups():
        if limit := find_in(f"{group}/memory.max", r"(\d+)"):  # or it says "max"
            used = find_in(f"{group}/memory.current", r"(\d+)")
            cached = find_in(f"{group}/memory.stat", r"inactive_file (\d+)")  # can be freed
            free = min(free, int(limit) - int(used) + int(cached))
    return free // processes


def peak_memory(device: torch.device) -> int:
    """The most bytes that the GPU's allocator held, or that this process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if resident := find_in("/proc/self/status", r"VmHWM:\s*(\d+)"):
        return 1024 * int(resident)
    import resource  # for macOS; on Linux it would count the parent of a forked process

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# plan.py's name of a GPU: the whole name that CUDA reports (a MIG slice has another), GB of memory,
# and the peaks of dense matmuls in TFLOP/s: float32, TF32 (again float32 without it), and 16 bits
# summed in float32. They are half of those that count sparsity. B200's memory: DGX datasheet.
GPUS = {
    "B200": (r"NVIDIA B200", 180, 75, 1100, 2250, "Blackwell architecture brief, 2024 (HGX)"),
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


def peak_flops(
    device: torch.device, dtype: torch.dtype, patience: float = 3, tf32: bool = True
) -> tuple[float, str]:
    """FLOP/s at an MFU of 1, and their source: the maker, or `patience` seconds of matmuls here."""
    if device.type == "cuda":
        for pattern, _, plain, fast, half, source in GPUS.values():
            if re.fullmatch(pattern, torch.cuda.get_device_name(device)):
                float32 = fast if tf32 else plain
                peak = float32 if dtype == torch.float32 else half
                return 1e12 * peak, f"NVIDIA {source}"
    n = 4096  # smaller ones are slower
    if device.type == "cpu":
        n = 512 if dtype == torch.float16 else 2048  # a CPU emulates float16, for minutes
    seconds: list[float] = []
    while sum(seconds) < patience:  # neighbours slow some of them down
        seconds.append(time_matmul(device, dtype, n))
    return 2 * n**3 / min(seconds), f"measured here, the best of {len(seconds)} matmuls, {n} × {n}"

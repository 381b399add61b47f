"""A GPU that is not there: what PyTorch, inductor and Triton ask of one is answered from a table.

The shim comes before torch, because autograd's engine looks for CUDA only once. All these names are
private ones of PyTorch 2.13 and Triton 3.7.

python mock_gpu.py GPU FLAGS RESULT     runs step.py on such a GPU
"""

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    processors: int
    shared_memory: int  # bytes that a block may take
    bandwidth: float  # bytes/s, of the datasheet
    flops: float  # FLOP/s of large matmuls in 16 bits: our assumption, 60 to 75% of the datasheet's


GPUS = {
    "H100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 3.35e12, 600e12),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 2.04e12, 230e12),
}


def install(gpu: Gpu, folder: Path) -> None:
    """Makes this process believe that it has this GPU. folder: for the shim."""
    shim = load_shim(folder / "cuda_shim.so")
    shim.prefer_cudnn(gpu.capability in ((9, 0), (10, 0)))
    answer_torch(gpu)
    answer_inductor()
    answer_triton(gpu)


def load_shim(library: Path) -> ctypes.CDLL:
    if not library.exists():
        root = Path(importlib.util.find_spec("torch").origin).parent
        command = ["g++", "-std=c++20", "-fPIC", "-shared", "-o", library]
        command += [Path(__file__).with_name("cuda_shim.cpp"), f"-I{root}/include"]
        command += [f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
        subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def always(value: Any) -> Any:
    return lambda *_args, **_options: value


def answer(owner: Any, value: Any, names: str) -> None:
    """Makes functions that return this value, one for each name: dynamo tells them apart."""
    for name in names.split():
        setattr(owner, name, staticmethod(always(value)))


def answer_torch(gpu: Gpu) -> None:
    import torch

    major, minor = gpu.capability
    properties = SimpleNamespace(major=major, minor=minor, name=gpu.name, warp_size=32)
    properties.multi_processor_count = gpu.processors
    properties.max_threads_per_multi_processor = 2048
    properties.max_threads_per_block = 1024
    properties.regs_per_multiprocessor = 65536

    class Generator(torch.Generator):  # activation checkpointing asks for its state
        device = torch.device("cuda", 0)
        clone_state = graphsafe_get_state = manual_seed = lambda self, *_seed: self
        get_state = set_state = graphsafe_set_state = always(None)

    cuda = torch.cuda
    cuda.default_generators = (Generator(),)
    answer(cuda, True, "is_available is_initialized _is_compiled is_bf16_supported")
    answer(cuda, None, "init _lazy_init set_device set_rng_state synchronize")
    answer(cuda, 0, "current_device _exchange_device _maybe_exchange_device")
    answer(cuda, 1, "device_count")
    answer(cuda, SimpleNamespace(cuda_stream=0, stream_id=0), "current_stream")
    answer(cuda, properties, "get_device_properties")
    answer(cuda, gpu.capability, "get_device_capability")
    answer(cuda, gpu.name, "get_device_name")
    answer(cuda, [f"sm_{major}{minor}"], "get_arch_list")
    answer(cuda, torch.zeros(16, dtype=torch.uint8), "get_rng_state")
    answer(torch._C, 0, "_cuda_getCurrentRawStream")
    torch.version.cuda = "13.0"
    answer(torch.accelerator, torch.device("cuda"), "current_accelerator")


def answer_inductor() -> None:
    import torch
    from torch._C._dynamo import guards
    from torch._subclasses import fake_tensor

    fake_tensor.init_gpu_context = always(None)
    fake_tensor.FakeTensorMode.avoid_device_init = property(always(True))  # .to("cuda") wants one
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda:0"
    )
    # the one in C++ makes a plain meta tensor
    guards._reinterpret_tensor = lambda x, size, stride, offset=0: torch.as_strided(
        x, size, stride, x.storage_offset() + offset
    )

    def empty_on_cpu(make):
        return lambda *size, dtype=None, **_options: make(*size, dtype=dtype, device="cpu")

    # inductor folds constants in real tensors of one element: these come to lie on the CPU
    library = answer_inductor.library = torch.library.Library("aten", "IMPL")  # kept by the name
    library.impl("empty.memory_format", empty_on_cpu(torch.empty), "CUDA")
    library.impl("empty_strided", empty_on_cpu(torch.empty_strided), "CUDA")


def answer_triton(gpu: Gpu) -> None:
    import torch
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    sizes = {"max_shared_mem": gpu.shared_memory, "multiprocessor_count": gpu.processors}
    driver = SimpleNamespace(
        get_current_target=always(GPUTarget("cuda", 10 * gpu.capability[0], 32)),
        get_current_device=always(0),
        get_current_stream=always(0),
        get_active_torch_device=always(torch.device("cuda", 0)),
        utils=SimpleNamespace(get_device_properties=always(sizes | {"warpSize": 32})),
    )
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = always(None)  # it would look for libcuda.so


if __name__ == "__main__":
    gpu, flags, result = sys.argv[1:]
    install(GPUS[gpu], Path(result).parent)
    import step

    step.main(GPUS[gpu], Path(result), flags.split())

"""Assembles Triton's kernels for a GPU that is not there, with the ptxas in Triton's wheel."""

import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from torch._inductor.codecache import PyCodeCache

from support.base.errors import first_line

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def assemble(sources: dict[str, str], folder: Path) -> dict[str, str]:
    """Inductor's sources by their kernels' names -> what is wrong with each kernel, or ""."""
    torch._inductor.config.use_static_cuda_launcher = False  # it would load the machine code
    problems = {}
    for name, source in sources.items():  # other configurations have it under another name
        answer = folder / hashlib.sha256(source.replace(name, "kernel").encode()).hexdigest()
        if not answer.exists():
            answer.write_text(find_problem(name, source))
        problems[name] = answer.read_text()
    return problems


def find_problem(name: str, source: str) -> str:
    """Why a kernel cannot be used, or "", in each of the configurations that autotuning tries."""
    kernel = getattr(PyCodeCache.load(source), name)
    for config in kernel.configs:
        try:
            cubin = kernel._precompile_config(config).kernel.asm["cubin"]
        except Exception as error:
            return f"does not assemble with {config}: {first_line(error)}"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(cubin)
            command = [CUOBJDUMP, "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        [(stack, local)] = re.findall(r"REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
        if spilled := int(stack) + int(local):
            return f"spills {spilled} bytes of registers with {config}"
    return ""

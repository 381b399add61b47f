"""The operations a second that MFU is measured against: published, or measured here."""

import re

import torch

from support.device import time_matmul

# Published peaks of dense matmuls in TFLOP/s: float32, TF32, 16 bits accumulated in float32; by the
# whole name that CUDA reports (a MIG slice or a laptop's GPU is another thing). Where a datasheet
# counts sparsity, half of its figure.
PEAKS = {
    r"Tesla V100-SXM\d-\w+": (15.7, None, 125, "NVIDIA V100 datasheet, 2020"),
    r"Tesla V100-PCIE-\w+": (14.0, None, 112, "NVIDIA V100 datasheet, 2020"),
    r"Tesla T4": (8.1, None, 65, "NVIDIA T4 datasheet, 2019"),
    r"NVIDIA A100-[\w-]+": (19.5, 156, 312, "NVIDIA A100 datasheet, 2021"),
    r"NVIDIA L4": (30.3, 60, 121, "NVIDIA L4 datasheet, 2023"),
    r"NVIDIA GeForce RTX 3090": (35.6, 35.6, 71, "NVIDIA Ampere GA102 whitepaper, appendix A"),
    r"NVIDIA GeForce RTX 4090": (82.6, 82.6, 165.2, "NVIDIA Ada whitepaper, appendix A"),
    r"NVIDIA GeForce RTX 5090": (
        104.8,
        104.8,
        209.5,
        "NVIDIA RTX Blackwell whitepaper, appendix A",
    ),
    r"NVIDIA H100 PCIe": (51, 378, 756, "NVIDIA H100 datasheet, 2023"),
    r"NVIDIA H100 80GB HBM3": (67, 494.5, 989.5, "NVIDIA H100 datasheet, 2023 (SXM)"),
    r"NVIDIA H200": (67, 494.5, 989.5, "NVIDIA H200 datasheet, 2024 (SXM)"),
    r"NVIDIA B200": (80, 1100, 2250, "NVIDIA Blackwell architecture brief, 2024 (HGX)"),
}


def published_peak(name: str, dtype: torch.dtype, tf32: bool) -> tuple[float, str] | None:
    """Operations a second of the GPU that CUDA calls so, and their source; None if unknown.

    tf32: whether matmuls of float32 are done in TF32, where there is TF32.
    """
    for pattern, (float32, with_tf32, half, source) in PEAKS.items():
        if re.fullmatch(pattern, name):
            if dtype != torch.float32:
                return 1e12 * half, source
            return 1e12 * (with_tf32 if tf32 and with_tf32 else float32), source
    return None


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Operations a second that MFU is measured against, and their source.

    That is the maker, or a matmul timed here. float32 on a GPU means TF32 where there is TF32 and
    torch.set_float32_matmul_precision allows it.
    """
    if device.type == "cuda":
        modern = torch.cuda.get_device_capability(device) >= (8, 0)
        tf32 = modern and torch.get_float32_matmul_precision() != "highest"
        published = published_peak(torch.cuda.get_device_name(device), dtype, tf32)
        if published:
            return published
    n = 2048 if device.type == "cpu" else 4096  # smaller ones are slower
    if device.type == "cpu" and dtype == torch.float16:
        n = 512  # a CPU emulates it: larger ones take minutes
    seconds = [time_matmul(device, dtype, n)]
    while len(seconds) < 8 and sum(seconds) < 0.6:  # a slow one need not be told eight times
        seconds.append(time_matmul(device, dtype, n))
    return 2 * n**3 / min(seconds), f"measured here, matmuls of {n} × {n}"

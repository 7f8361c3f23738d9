"""What this GPU does at most, measured in the same run as everything that is held against it."""

import functools

import torch

from baton.benchmarks.gpu.row import Setting
from baton.benchmarks.gpu.timing import seconds


@functools.cache
def copy_bytes_per_s(setting: Setting) -> float:
    """Read and written, by PyTorch's own copy of a large piece."""
    nbytes = setting.size(4 << 30, 1 << 20)
    source = torch.empty(nbytes, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds(lambda: target.copy_(source), setting)


@functools.cache
def flop_per_s(setting: Setting) -> float:
    """Of a bf16 product of random numbers."""
    size = setting.size(8192, 64)
    left, right = torch.randn(2, size, size, device=setting.device, dtype=torch.bfloat16)
    return 2 * size**3 / seconds(lambda: left @ right, setting)


def said_copy(setting: Setting) -> str:
    return f"copy {copy_bytes_per_s(setting) / 1e12:.2f} TB/s"


def said_products(setting: Setting) -> str:
    return f"matmul {flop_per_s(setting) / 1e12:.0f} TFLOP/s"

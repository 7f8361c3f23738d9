"""Name of a process's arithmetic, derived from its kernels, libraries and processor.

CPU processes with equal names compute the same bits.
"""

import torch

from baton.kernels.native.library import native_library


def arithmetic(device: torch.device, ranks: int = 1) -> str:
    """Return the name of this process's arithmetic. `ranks`: number of tensor-parallel devices, all like `device`.

    Two CPU processes with equal names compute bitwise equal rows of a model; with different names they may round
    differently. The name includes the instruction level, a digest of the kernels' sources and compiler flags, and
    PyTorch's version.
    """
    parts = [_of_cuda(device) if device.type == "cuda" else _of_cpu(), f"torch {torch.__version__}"]
    return ", ".join([*parts, f"{ranks} ranks"] if ranks > 1 else parts)


def _of_cpu() -> str:
    native = native_library()
    return f"PyTorch on {torch.backends.cpu.get_cpu_capability()}" if native is None else native.name


def _of_cuda(device: torch.device) -> str:
    import triton

    return f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}"

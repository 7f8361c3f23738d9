"""The name of what rounds: kernels, libraries and processor. Under one name a CPU computes the same bits."""

import torch

from baton.kernels.native.library import native_library


def arithmetic(device: torch.device, ranks: int = 1) -> str:
    """Return the name of the arithmetic that `device` computes with, or several `ranks` together.

    Two processes of one name and on CPUs give a row of a model the same result to the last bit: the name has the level
    of instructions, a digest of the kernels' sources and flags, and the version of PyTorch. Other names may round
    differently.
    """
    parts = [_of_cuda(device) if device.type == "cuda" else _of_cpu(), f"torch {torch.__version__}"]
    return ", ".join([*parts, f"{ranks} ranks"] if ranks > 1 else parts)


def _of_cpu() -> str:
    native = native_library()
    return f"PyTorch on {torch.backends.cpu.get_cpu_capability()}" if native is None else native.name


def _of_cuda(device: torch.device) -> str:
    import triton

    return f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}"

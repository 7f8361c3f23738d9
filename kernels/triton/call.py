"""A kernel with everything it is started with: made without a device, so that it can be compiled ahead of time too."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Kernel(Protocol):
    """What `triton.jit` makes of a function."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any: ...


@dataclass(frozen=True, slots=True)
class KernelCall:
    kernel: Kernel
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # tensors, numbers and constants, by name
    warps: int
    stages: int = 1

    def start(self) -> None:
        """On the current stream of the current device; does not wait. An empty grid starts nothing."""
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)


def power_of_two(least: int) -> int:
    """The smallest power of two that is not below `least`."""
    return 1 << max(least - 1, 0).bit_length()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats as the integers that their bits are: kernels decode them themselves."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else tensor

"""Launch of kernels: a call without a device, so that it can be compiled ahead of time too, and parameters per
architecture. Rows of the tables are output of lab/benchmarks/triton/tune.py unless they say otherwise.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Kernel(Protocol):
    """Kernel as `triton.jit` returns it."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any: ...


@dataclass(frozen=True, slots=True)
class KernelCall:
    kernel: Kernel
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # tensors, numbers and constants, by name
    warps: int
    stages: int = 1
    most_registers: int | None = None  # of a thread; None: as ptxas thinks best
    overlaps: bool = False
    """Permission to start before the previous kernel has ended (programmatic dependent launch). Such a kernel reads
    only weights until it has waited, and each of its programs waits: so no kernel ends before an earlier one. It
    lets the next kernel start immediately, which gets the resources that this one's programs, all of them started,
    leave.
    """

    def start(self) -> None:
        """Start the kernel on the current stream of the current device, without waiting. An empty grid starts nothing.

        Raises: RuntimeError where the tensors are of another GPU: Triton would start the kernel on the current one.
        """
        if all(self.grid):
            self._check_device()
            self.kernel[self.grid](**self.arguments, **self.options)

    def compile(self) -> Any:
        """Compile as `start` would at its first call with such arguments, and return Triton's compiled kernel."""
        warm_up: Any = self.kernel
        return warm_up.warmup(**self.arguments, grid=self.grid, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Return Triton's options."""
        # A product and the sum that it goes into round once: Triton's default, which 3.10 is to change.
        found: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        if self.most_registers is not None:
            found["maxnreg"] = self.most_registers
        if self.overlaps:
            found["launch_pdl"] = True
        return found

    def _check_device(self) -> None:
        tensor = next(each for each in self.arguments.values() if isinstance(each, torch.Tensor))
        if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
            current = torch.cuda.current_device()
            raise RuntimeError(f"a kernel for {tensor.device} was started while cuda:{current} is the current device")


def power_of_two(least: int) -> int:
    """The smallest power of two that is not below `least`."""
    return 1 << max(least - 1, 0).bit_length()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats as the integers that their bits are: kernels decode them themselves."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else tensor


SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # that one program may take


@dataclass(frozen=True, slots=True)
class Device:
    capability: int  # 10 * major + minor: 90 is Hopper
    multiprocessors: int
    overlaps: bool = False  # whether kernels wait for the one before by themselves, see KernelCall

    @property
    def has_e4m3(self) -> bool:
        """Return whether the device converts 8-bit floats of 4 exponent bits in hardware."""
        return self.capability >= 89

    @property
    def row(self) -> int:
        """Return the row of the tables below: consumer cards of all generations have the shared memory of sm_86."""
        if self.capability // 10 in (9, 10):
            return self.capability // 10 * 10
        return 80 if self.capability in (80, 87) else 86


INTERPRETED = Device(90, 3)
"""Stands in where kernels run in Triton's interpreter: few multiprocessors, so that small tests split contexts too."""


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int  # of queries, or of inputs
    tokens: int  # of keys, or outputs of a linear layer
    warps: int
    stages: int
    filling: int = 1  # programs that together read memory as fast as a multiprocessor can


# No row is measured yet. Decode: keys and values of two tiles, 64 KiB, lie in shared memory; programs that a
# multiprocessor holds follow from that: three on Hopper. Two of them keep 64 KiB on their way, which hides the latency.
PAGED_DECODE = {
    80: Tile(16, 64, 4, 3, 2),
    86: Tile(16, 32, 4, 3, 2),
    90: Tile(16, 64, 4, 3, 2),
    100: Tile(16, 64, 4, 3, 2),
}
# Of a thread of kernels whose time is that of reading memory: as many as three programs of four warps leave each other.
# Left to itself, ptxas makes room for more programs than shared memory has, and spills.
DECODE_REGISTERS = 168
# Prefill: the largest tile of queries whose sums stay in registers; keys in stages of 32 KiB.
PAGED_PREFILL = {
    80: Tile(128, 32, 8, 2),
    86: Tile(64, 32, 8, 2),
    90: Tile(128, 64, 8, 3),
    100: Tile(128, 64, 8, 3),
}
# Few rows times 8-bit or 4-bit weights: tokens are outputs here.
QUANTISED_LINEAR = {
    80: Tile(16, 64, 4, 4),
    86: Tile(16, 64, 4, 3),
    90: Tile(16, 64, 4, 4),
    100: Tile(16, 64, 4, 4),
}


@dataclass(frozen=True, slots=True)
class FewRows:
    rows: int  # a power of two, or 0: up to which one kernel has a product and all around it, not a library
    tile_bytes: int  # of the weight, that a program of one row holds at a time, were its numbers as wide as the row's
    inputs: int  # of each output in the tile, at most
    warps: int


# Nor is this. A tile is 16 KiB, and a multiprocessor has registers for several programs: enough to hide the latency.
# Beyond four rows sums across threads would take longer than memory does.
FEW_ROWS = {
    80: FewRows(4, 1 << 14, 4096, 4),
    86: FewRows(4, 1 << 14, 4096, 4),
    90: FewRows(4, 1 << 14, 4096, 4),
    100: FewRows(4, 1 << 14, 4096, 4),
}
# Rows of one expert times its weights, for so many rows at most; not measured either.
EXPERT_LINEAR = {16: Tile(16, 64, 4, 4), 32: Tile(32, 64, 4, 4), 64: Tile(64, 128, 8, 3)}
FLOAT32_EXPERTS = Tile(16, 32, 4, 2)
COPY_BYTES = 1 << 14  # that one program copies at a time
DELTA_CHANNELS = 128  # of a convolution, that one program takes
DELTA_ROWS = 32  # of a convolution, likewise; more than it sees
DELTA_VALUES = 8  # of a head: with 128 numbers of a key, 32 registers of a thread for the state
SAMPLE_TOKENS = 2048  # of the vocabulary in one part of a row
SAMPLE_PARTS = 128  # that the program of a row takes at a time
SAMPLE_KEPT = 4096  # tokens that a filter leaves of a row, at most, where they are looked through without the others
SAMPLE_COPIED_TOKENS = 4096  # that it looks at a time for those
SAMPLE_FILTERED_TOKENS = 1024  # that it holds at a time where it looks for a threshold
SAMPLE_PIVOTS = 8  # thresholds that one pass over them tries
SAMPLE_REGISTERS = 200  # of a thread of the program of a row, which has a multiprocessor to itself


# In float32 there is no matrix instruction that keeps its digits: products are made one by one, out of registers.
FLOAT32_DECODE = Tile(16, 16, 8, 2, 2)
FLOAT32_PREFILL = Tile(32, 16, 8, 2)


def decode_tile(device: Device, head_dim: int, itemsize: int, group: int) -> Tile:
    """Return the tile for `group` query heads per KV head, all of which are in a tile; itemsize: bytes of a number
    computed with.
    """
    tile = FLOAT32_DECODE if itemsize == 4 else PAGED_DECODE[device.row]
    rows = max(tile.rows, power_of_two(group))
    wide = head_dim > 128  # than the tables suppose
    tokens, stages = (max(16, tile.tokens // 2), 2) if wide else (tile.tokens, tile.stages)
    return Tile(rows, tokens, 8 if rows > 32 or head_dim > 256 else tile.warps, stages, tile.filling)


def prefill_tile(device: Device, head_dim: int, itemsize: int, rows: int, quantised: bool) -> Tile:
    """Return the tile for a chunk of `rows` rows, each one head of one token: a short chunk takes a smaller tile.

    quantised: whether keys are widened first, which takes registers of a thread: half as many fit beside the sums.
    """
    tile = FLOAT32_PREFILL if itemsize == 4 else PAGED_PREFILL[device.row]
    wide = head_dim > 128
    most = tile.rows // (4 if head_dim > 256 else 2 if wide else 1)
    tile_rows = max(16, min(most, power_of_two(rows)))
    tokens = min(tile.tokens, 32) if quantised else tile.tokens
    tokens, stages = (max(16, tokens // 2), 2) if wide else (tokens, tile.stages)
    few_warps = itemsize < 4 and tile_rows <= (32 if quantised else 64) and not wide
    return Tile(tile_rows, tokens, 4 if few_warps else tile.warps, stages)


def expert_tile(device: Device, itemsize: int, rows: int) -> Tile:
    """Return the tile for experts with that many rows each, on average; itemsize: bytes of a number computed with."""
    if itemsize == 4:
        return FLOAT32_EXPERTS
    tile = EXPERT_LINEAR[min(max(16, power_of_two(rows)), 64)]
    return tile if SHARED_BYTES[device.row] > 128 << 10 else Tile(tile.rows, 64, 4, 3)


@functools.cache
def _properties(device: torch.device) -> Device:
    properties = torch.cuda.get_device_properties(device)
    overlaps = properties.major >= 9 and hasattr(importlib.import_module("triton.language.extra.cuda"), "gdc_wait")
    return Device(10 * properties.major + properties.minor, properties.multi_processor_count, overlaps)


def device_of(tensor: torch.Tensor) -> Device:
    return _properties(tensor.device) if tensor.is_cuda else INTERPRETED

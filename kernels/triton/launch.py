"""Start of kernels: the call, which can also be compiled ahead of time without a device, and tile sizes per
architecture. A row of a table was printed by lab/benchmarks/triton/tune.py, or says otherwise.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Kernel(Protocol):
    """Function compiled by `triton.jit`."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any: ...


@dataclass(frozen=True, slots=True)
class KernelCall:
    kernel: Kernel
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # tensors, numbers and constants, by name
    warps: int
    stages: int = 1
    most_registers: int | None = None  # per thread; None: ptxas decides
    overlaps: bool = False
    """Flag that the kernel may start before the previous one has finished (programmatic dependent launch). Such a
    kernel reads only weights until it has waited, and each program waits, so kernels finish in order. It lets the
    next one start immediately, with the resources that its own programs leave.
    """

    def start(self) -> None:
        """Start the kernel on the current stream without waiting. An empty grid starts nothing.

        Raises: RuntimeError if tensors are on another GPU, since Triton would start the kernel on the current one.
        """
        if all(self.grid):
            self._check_device()
            self.kernel[self.grid](**self.arguments, **self.options)

    def compile(self) -> Any:
        """Compile for such arguments without starting. Returns Triton's compiled kernel."""
        warm_up: Any = self.kernel
        return warm_up.warmup(**self.arguments, grid=self.grid, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Return Triton's compile options."""
        # Products and their sums are fused and round once, as Triton does by default before 3.10.
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
            raise RuntimeError(f"kernel for {tensor.device} started while cuda:{current} is the current device")


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << max(least - 1, 0).bit_length()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return 8-bit floats as integers, since kernels decode them themselves."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else tensor


SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # per program


@dataclass(frozen=True, slots=True)
class Device:
    capability: int  # 10 * major + minor: 90 is Hopper
    multiprocessors: int
    overlaps: bool = False  # kernels wait for the previous one themselves, see KernelCall

    @property
    def has_e4m3(self) -> bool:
        """Return whether hardware converts 8-bit floats with 4 exponent bits."""
        return self.capability >= 89

    @property
    def row(self) -> int:
        """Return the key of the tables below; consumer cards of all generations have the shared memory of sm_86."""
        if self.capability // 10 in (9, 10):
            return self.capability // 10 * 10
        return 80 if self.capability in (80, 87) else 86


INTERPRETED = Device(90, 3)
"""Device of Triton's interpreter: few multiprocessors, so that small tests split contexts too."""


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int  # queries, or input rows
    tokens: int  # keys, or outputs of a linear layer
    warps: int
    stages: int
    filling: int = 1  # programs that saturate a multiprocessor's memory bandwidth


# Not measured. Decode: keys and values of two tiles, 64 KiB, are in shared memory, which limits the programs per
# multiprocessor: three on Hopper. Two of them keep 64 KiB in flight, which hides the latency.
PAGED_DECODE = {
    80: Tile(16, 64, 4, 3, 2),
    86: Tile(16, 32, 4, 3, 2),
    90: Tile(16, 64, 4, 3, 2),
    100: Tile(16, 64, 4, 3, 2),
}
# Registers per thread of memory-bound kernels: three programs of four warps fit. By default ptxas leaves room for more
# programs than shared memory allows, and spills.
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
    rows: int  # power of two up to which one fused kernel beats a library; 0: never
    tile_bytes: int  # weight tile of a one-row program, at the width of the row's numbers
    inputs: int  # maximum per output in the tile
    warps: int


# Not measured either. A tile is 16 KiB, and registers suffice for several programs per multiprocessor, which hides
# latency. With more than four rows, sums across threads would take longer than the memory.
FEW_ROWS = {
    80: FewRows(4, 1 << 14, 4096, 4),
    86: FewRows(4, 1 << 14, 4096, 4),
    90: FewRows(4, 1 << 14, 4096, 4),
    100: FewRows(4, 1 << 14, 4096, 4),
}
# Rows of one expert times its weights, by maximum rows; not measured either.
EXPERT_LINEAR = {16: Tile(16, 64, 4, 4), 32: Tile(32, 64, 4, 4), 64: Tile(64, 128, 8, 3)}
FLOAT32_EXPERTS = Tile(16, 32, 4, 2)
COPY_BYTES = 1 << 14  # per program
DELTA_CHANNELS = 128  # channels of a convolution per program
DELTA_ROWS = 32  # rows of a convolution per program; more than its kernel
DELTA_VALUES = 8  # values of a head per program: with 128 key numbers, 32 registers of a thread hold the state
SAMPLE_TOKENS = 2048  # vocabulary part of a row
SAMPLE_PARTS = 128  # parts that a row's program loads together
SAMPLE_KEPT = 4096  # most tokens left by a filter that are scanned separately
SAMPLE_COPIED_TOKENS = 4096  # scanned together for those
SAMPLE_FILTERED_TOKENS = 1024  # scanned together for a threshold
SAMPLE_PIVOTS = 8  # thresholds tried per pass
SAMPLE_REGISTERS = 200  # per thread of a row's program, which has a multiprocessor to itself


# No matrix instruction keeps float32 precision: products are computed one by one, from registers.
FLOAT32_DECODE = Tile(16, 16, 8, 2, 2)
FLOAT32_PREFILL = Tile(32, 16, 8, 2)


def decode_tile(device: Device, head_dim: int, itemsize: int, group: int) -> Tile:
    """Return the tile for `group` query heads per KV head; itemsize: bytes of a number in computation."""
    tile = FLOAT32_DECODE if itemsize == 4 else PAGED_DECODE[device.row]
    rows = max(tile.rows, power_of_two(group))
    wide = head_dim > 128  # beyond the tables
    tokens, stages = (max(16, tile.tokens // 2), 2) if wide else (tile.tokens, tile.stages)
    return Tile(rows, tokens, 8 if rows > 32 or head_dim > 256 else tile.warps, stages, tile.filling)


def prefill_tile(device: Device, head_dim: int, itemsize: int, rows: int, quantised: bool) -> Tile:
    """Return the tile for a chunk of `rows` rows, each one head of one token: a short chunk takes a smaller tile.

    quantised: whether keys are widened first, which needs registers: half as many keys fit next to the sums.
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
    """Return the tile for experts with `rows` rows each on average; itemsize: bytes of a number in computation."""
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

"""Launch of Triton kernels: calls, and tables of tile sizes by GPU architecture.

A call can also be compiled ahead of time without a GPU. lab/benchmarks/triton/tune.py prints rows for the tables.
Comments mark the tables whose sizes were not measured.
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
    most_registers: int | None = None  # most registers per thread; None: ptxas decides
    overlaps: bool = False
    """Whether the kernel may start before the previous one has finished (programmatic dependent launch). Until a
    program waits for the previous kernel, it reads only weights, so kernels finish in order. The kernel lets the next
    one start immediately, with the resources that its own programs leave free.
    """

    def start(self) -> None:
        """Start the kernel on the current CUDA stream, without waiting for it. An empty grid starts nothing.

        Raises: RuntimeError if tensors are on another GPU, since Triton would start the kernel on the current one.
        """
        if all(self.grid):
            self._check_device()
            self.kernel[self.grid](**self.arguments, **self.options)

    def compile(self) -> Any:
        """Compile the kernel for arguments like these, without starting it. Returns Triton's compiled kernel."""
        warm_up: Any = self.kernel
        return warm_up.warmup(**self.arguments, grid=self.grid, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Return Triton's compile options."""
        # enable_fp_fusion: round a product and a sum together, only once. It is the default before Triton 3.10.
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
    """Return 8-bit floats as a view of integers, which kernels decode; return other tensors unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else tensor


SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # shared memory of a program


@dataclass(frozen=True, slots=True)
class Device:
    capability: int  # 10 * major + minor: 90 is Hopper
    multiprocessors: int
    overlaps: bool = False  # whether a kernel may start before the previous kernel has finished, see KernelCall

    @property
    def has_e4m3(self) -> bool:
        """Return whether the GPU has instructions that convert 8-bit floats with 4 exponent bits."""
        return self.capability >= 89

    @property
    def row(self) -> int:
        """Return this GPU's key in the tables below. Consumer GPUs have key 86, since their shared memory is equal."""
        if self.capability // 10 in (9, 10):
            return self.capability // 10 * 10
        return 80 if self.capability in (80, 87) else 86


INTERPRETED = Device(90, 3)
"""Device that Triton's interpreter imitates. It has few multiprocessors, so that small tests split contexts too."""


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int  # rows of a tile: queries, or input rows of a linear layer
    tokens: int  # columns of a tile: keys, or outputs of a linear layer
    warps: int
    stages: int
    filling: int = 1  # number of programs that saturate a multiprocessor's memory bandwidth


# Tiles of decode attention, not measured. A program has keys and values of two tiles, 64 KiB, in shared memory, so
# that three programs fit on a multiprocessor of Hopper. Two programs have 64 KiB of loads in flight, which hides the
# memory latency.
PAGED_DECODE = {
    80: Tile(16, 64, 4, 3, 2),
    86: Tile(16, 32, 4, 3, 2),
    90: Tile(16, 64, 4, 3, 2),
    100: Tile(16, 64, 4, 3, 2),
}
# Maximum number of registers per thread of memory-bound kernels, so that three programs of four warps fit on a
# multiprocessor. By default ptxas would spill registers to fit more programs than shared memory allows.
DECODE_REGISTERS = 168
# Tiles of prefill attention: as many queries as fit with their sums into registers, and stages of 32 KiB of keys.
PAGED_PREFILL = {
    80: Tile(128, 32, 8, 2),
    86: Tile(64, 32, 8, 2),
    90: Tile(128, 64, 8, 3),
    100: Tile(128, 64, 8, 3),
}
# Tiles of products of few rows with 8-bit or 4-bit weights; `tokens` counts outputs.
QUANTISED_LINEAR = {
    80: Tile(16, 64, 4, 4),
    86: Tile(16, 64, 4, 3),
    90: Tile(16, 64, 4, 4),
    100: Tile(16, 64, 4, 4),
}


@dataclass(frozen=True, slots=True)
class FewRows:
    rows: int  # largest number of rows for which the fused kernel beats a library, a power of two; 0: never
    tile_bytes: int  # bytes of a program's weight tile if there is one row, counted in the dtype of x
    inputs: int  # most inputs of a tile
    warps: int


# Sizes of fused products of few rows, not measured. With a tile of 16 KiB, registers suffice for several programs per
# multiprocessor, which hides latency. With more than four rows, sums across threads would take longer than reading the
# weight from memory.
FEW_ROWS = {
    80: FewRows(4, 1 << 14, 4096, 4),
    86: FewRows(4, 1 << 14, 4096, 4),
    90: FewRows(4, 1 << 14, 4096, 4),
    100: FewRows(4, 1 << 14, 4096, 4),
}
# Tiles of products of one expert's rows and weights, by the largest number of rows, not measured.
EXPERT_LINEAR = {16: Tile(16, 64, 4, 4), 32: Tile(32, 64, 4, 4), 64: Tile(64, 128, 8, 3)}
FLOAT32_EXPERTS = Tile(16, 32, 4, 2)
COPY_BYTES = 1 << 14  # bytes of a block that one program copies
DELTA_CHANNELS = 128  # channels of a convolution per program
DELTA_ROWS = 32  # rows of a convolution per program; at least as many as the convolution's kernel
DELTA_VALUES = 8  # values of a head per program: for keys of 128 numbers, the state takes 32 registers per thread
SAMPLE_TOKENS = 2048  # tokens of each part into which a row of logits is split
SAMPLE_PARTS = 128  # parts whose sums a row's program loads together
SAMPLE_KEPT = 4096  # maximum number of copied tokens: those above a filter's bound, scanned instead of the row
SAMPLE_COPIED_TOKENS = 4096  # tokens that are scanned together to find the tokens to copy
SAMPLE_FILTERED_TOKENS = 1024  # tokens that are scanned together to find a filter's threshold
SAMPLE_PIVOTS = 8  # thresholds that are tried in each pass over the tokens
SAMPLE_REGISTERS = 200  # maximum registers per thread of a row's program, which is alone on a multiprocessor


# Tiles of float32 attention. No matrix instruction is precise enough, so numbers are multiplied in registers.
FLOAT32_DECODE = Tile(16, 16, 8, 2, 2)
FLOAT32_PREFILL = Tile(32, 16, 8, 2)


def decode_tile(device: Device, head_dim: int, itemsize: int, group: int) -> Tile:
    """Return the tile of decode attention. group: query heads per KV head; itemsize: bytes of the compute dtype."""
    tile = FLOAT32_DECODE if itemsize == 4 else PAGED_DECODE[device.row]
    rows = max(tile.rows, power_of_two(group))
    wide = head_dim > 128  # the tables are for head_dim of at most 128
    tokens, stages = (max(16, tile.tokens // 2), 2) if wide else (tile.tokens, tile.stages)
    return Tile(rows, tokens, 8 if rows > 32 or head_dim > 256 else tile.warps, stages, tile.filling)


def prefill_tile(device: Device, head_dim: int, itemsize: int, rows: int, quantised: bool) -> Tile:
    """Return the tile of prefill attention for a chunk of `rows` rows, each of which is one head of one token.

    itemsize: bytes of the compute dtype; quantised: whether keys are quantised. Quantised keys are widened in
    registers, where only half as many keys fit next to the sums.
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
    """Return the tile for experts with `rows` rows each on average; itemsize: bytes of the compute dtype."""
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

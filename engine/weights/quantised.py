"""Projections with weights of 8 or 4 bits: fp8 (E4M3), int8 and int4, quantised and multiplied.

Made here from a plain weight; AWQ and GPTQ checkpoints hold the same numbers in other places, see packed.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import Linear

# Numbers of one tile. On a CPU a tile stays in the second-level cache; on a GPU it is launches that count.
CPU_TILE_NUMBERS = 1 << 19
CUDA_TILE_NUMBERS = 1 << 25
ROW_MULTIPLE = 32  # products of narrower tiles are slow


def tiled_linear(
    x: torch.Tensor, outputs: int, rows: Callable[[slice], torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """`[tokens, in]` to `[tokens, outputs]`; `rows` gives some rows of the weight, `[rows, in]`, in x's dtype."""
    height = tile_rows(x.shape[-1], x.device)
    if height >= outputs:
        return F.linear(x, rows(slice(0, outputs)), bias)
    out = x.new_empty(len(x), outputs)
    for start in range(0, outputs, height):
        tile = slice(start, min(start + height, outputs))
        out[:, tile] = F.linear(x, rows(tile), None if bias is None else bias[tile])
    return out


def tile_rows(inputs: int, device: torch.device) -> int:
    """How many rows of `inputs` numbers make a tile."""
    numbers = CPU_TILE_NUMBERS if device.type == "cpu" else CUDA_TILE_NUMBERS
    return max(numbers // inputs // ROW_MULTIPLE, 1) * ROW_MULTIPLE


@dataclass(frozen=True, slots=True)
class StackedLinear:
    parts: tuple[Linear, ...]

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
# The exponents of E4M3 and float16 are biased by 7 and 15.
FLOAT16_RATIO = 256.0
WITHOUT_SECOND_SIGN = -16385  # 0xBFFF


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    weight: torch.Tensor  # float8_e4m3fn [out, in]
    scales: torch.Tensor  # float32 [out]
    bias: torch.Tensor | None  # [out]

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Numbers of 4 significant bits are exact in every dtype, so that the scale can wait for the product."""
        out = tiled_linear(x, len(self.weight), lambda tile: reduced(self.weight[tile], x.dtype), None)
        out = (out * (self.scales * FLOAT16_RATIO)).to(x.dtype)
        return out if self.bias is None else out + self.bias

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return self.weight, self.scales


def quantise_fp8(weight: torch.Tensor, bias: torch.Tensor | None, columns: slice | None = None) -> Fp8Linear:
    """`weight` is float32 [out, in]; an element changes by at most 1/16 of itself, or 2**-10 of its row's scale.

    `columns`: the inputs that are kept, with the scales of whole rows; None: all.
    """
    scales = (weight.abs().amax(1) / FP8_LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    kept = weight if columns is None else weight[:, columns]
    floats = (kept / scales[:, None]).clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return Fp8Linear(floats, scales, bias)


def reduced(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2**-8 of finite float8_e4m3fn, exactly, in a wider dtype: their bits, moved to where float16 has its own.

    Through integers and float32, because torch converts float8, and float16 to bfloat16, number by number on a CPU.
    """
    bits = weight.view(torch.int8).to(torch.int16)  # extends the sign: it is in bits 15 to 7
    halves = ((bits << 7) & WITHOUT_SECOND_SIGN).view(torch.float16)
    return halves.float().to(dtype)


INT8_LARGEST = 127
# Rows up to which torch's CPU kernel, which reads the integers themselves, is faster than spelling out tiles.
KERNEL_ROWS = 16


@dataclass(frozen=True, slots=True)
class Int8Linear:
    weight: torch.Tensor  # int8 [out, in]
    scales: torch.Tensor  # [out], float32, or x's dtype where the kernel is used: it wants no other
    bias: torch.Tensor | None  # [out]
    is_part: bool = False  # of the inputs, by which `scales` are not decided alone; another rank has the others

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        if x.dtype == torch.bfloat16 and x.device.type == "cpu" and len(x) <= KERNEL_ROWS:
            out = torch._weight_int8pack_mm(x.contiguous(), self.weight, self.scales.to(x.dtype))
        else:
            # Integers up to 127 are exact in every dtype, so that the scale can wait for the product.
            out = tiled_linear(x, len(self.weight), lambda tile: self.weight[tile].to(x.dtype), None)
            out = (out * self.scales).to(x.dtype)
        return out if self.bias is None else out + self.bias

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return self.weight, self.scales


def quantise_int8(weight: torch.Tensor, bias: torch.Tensor | None, columns: slice | None = None) -> Int8Linear:
    """`weight` is float32 [out, in]; an element changes by at most half the scale of its row.

    `columns`: the inputs that are kept, with the scales of whole rows; None: all.
    """
    scales = (weight.abs().amax(1) / INT8_LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    kept = weight if columns is None else weight[:, columns]
    integers = (kept / scales[:, None]).round_().clamp_(-INT8_LARGEST, INT8_LARGEST)
    return Int8Linear(integers.to(torch.int8), scales, bias, is_part=columns is not None)


LARGEST_CODE = 15
GROUP_INPUTS = 32
MIDDLE = 8  # torch's kernel counts codes from here
KERNEL_GROUPS = (32, 64, 128, 256)
KERNEL_OUTPUT_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """One matrix, not packed yet. Its columns are in the order in which groups are consecutive."""

    codes: torch.Tensor  # uint8 [out, in], at most 15
    scales: torch.Tensor  # [out, groups], any float
    zeros: torch.Tensor  # uint8 [out, groups]
    column_order: torch.Tensor | None  # int64 [in]: which input each column takes; None where that is its own

    def dequantised(self) -> torch.Tensor:
        """Float32 [out, in], columns where they belong."""
        weight = _spelled_out(self.codes.float(), self.scales, self.zeros)
        return weight if self.column_order is None else weight[:, self.column_order.argsort()]


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """On any device, in any dtype. A byte holds a column and, in its high half, the one half a row further."""

    packed: torch.Tensor  # uint8 [out, in / 2]
    scales: torch.Tensor
    zeros: torch.Tensor
    column_order: torch.Tensor | None
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        ordered = x if self.column_order is None else x[:, self.column_order]
        return tiled_linear(ordered, len(self.packed), lambda tile: self._rows(tile, x.dtype), self.bias)

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return self.packed, self.scales, self.zeros

    def weight(self) -> Int4Weight:
        codes = torch.cat((self.packed & LARGEST_CODE, self.packed >> 4), dim=1)
        return Int4Weight(codes, self.scales, self.zeros, self.column_order)

    def _rows(self, tile: slice, dtype: torch.dtype) -> torch.Tensor:
        packed = self.packed[tile]
        half = packed.shape[1]
        codes = torch.empty(len(packed), 2 * half, dtype=dtype, device=packed.device)
        codes[:, :half] = packed & LARGEST_CODE
        codes[:, half:] = packed >> 4
        return _spelled_out(codes, self.scales[tile], self.zeros[tile])


@dataclass(frozen=True, slots=True)
class Int4KernelLinear:
    """In bfloat16 on a CPU: torch's kernel, which reads packed weights. Several times faster for a few rows; with many
    rows it falls behind a product of plain weights where the CPU multiplies bfloat16 natively."""

    packed: torch.Tensor  # uint8 [out, in / 2], as _convert_weight_to_int4pack_for_cpu orders it
    scales_and_zeros: torch.Tensor  # bfloat16 [groups, out, 2]: weight = (code - 8) * scale + zero
    group_inputs: int
    column_order: torch.Tensor | None
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        ordered = x.contiguous() if self.column_order is None else x[:, self.column_order]
        out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            ordered, self.packed, self.group_inputs, self.scales_and_zeros
        )
        return out if self.bias is None else out + self.bias

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return self.packed, self.scales_and_zeros


def quantise_int4(weight: torch.Tensor) -> Int4Weight:
    """`weight` is float32 [out, in], `in` a multiple of 32; an element changes by about half its group's scale at most.

    The range of a group always includes zero, so that zero stays zero.
    """
    groups = weight.view(len(weight), -1, GROUP_INPUTS)
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scales = ((high - low) / LARGEST_CODE).clamp_min(torch.finfo(torch.float16).tiny).half()
    zeros = (-low / scales).round_().clamp_(0, LARGEST_CODE)
    codes = (groups / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, LARGEST_CODE)
    return Int4Weight(codes.view_as(weight).to(torch.uint8), scales, zeros.to(torch.uint8), None)


def int4_linear(weight: Int4Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
    """Packs; `dtype` is that of the activations, which the linear will refuse to have otherwise on a CPU."""
    outputs, inputs = weight.codes.shape
    group_inputs = inputs // weight.scales.shape[1]
    fits = outputs % KERNEL_OUTPUT_MULTIPLE == 0 and group_inputs in KERNEL_GROUPS
    if dtype == torch.bfloat16 and weight.codes.device.type == "cpu" and fits:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        scales = weight.scales.float()
        offsets = (MIDDLE - weight.zeros.float()) * scales
        pairs = torch.stack([scales, offsets], dim=2).transpose(0, 1).to(dtype).contiguous()
        return Int4KernelLinear(packed, pairs, group_inputs, weight.column_order, bias)
    half = inputs // 2
    packed = weight.codes[:, :half] | (weight.codes[:, half:] << 4)
    return Int4Linear(packed, weight.scales, weight.zeros, weight.column_order, bias)


def stack_int4(weights: list[Int4Weight]) -> Int4Weight | None:
    """One matrix of several with the same input; None where their columns or groups differ."""
    first = weights[0]
    for weight in weights[1:]:
        if weight.scales.shape[1] != first.scales.shape[1] or not _same_order(weight.column_order, first.column_order):
            return None
    codes, scales, zeros = (
        torch.cat([getattr(weight, name) for weight in weights]) for name in ("codes", "scales", "zeros")
    )
    return Int4Weight(codes, scales, zeros, first.column_order)


def _same_order(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _spelled_out(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Overwrites `codes` (a float, [rows, in]) with the weight."""
    groups = codes.view(*scales.shape, -1)
    groups.sub_(zeros[..., None]).mul_(scales[..., None])
    return codes

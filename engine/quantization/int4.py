"""Weights of 4 bits in groups along the input, each with a scale and a zero point: weight = (code - zero) * scale.

Made here from a plain weight; AWQ and GPTQ checkpoints hold the same numbers in other places, see packed.py.
"""

from dataclasses import dataclass

import torch

from engine.lora.rows import AdapterRows
from engine.models.linear import Linear
from engine.quantization.tiled import tiled_linear

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

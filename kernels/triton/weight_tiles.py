"""Inside products with weights that lie as rows of outputs, of any format: tiles of inputs added to running sums."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.quantised_weight import QuantisedWeight
from kernels.triton.call import as_bytes
from kernels.triton.formats import format_of, widened
from kernels.triton.launch import Device

INPUTS_AT_ONCE = 128


def weight_arguments(weight: QuantisedWeight | torch.Tensor, device: Device) -> dict[str, Any]:
    """The arguments for a weight, of every kernel that reads it; names are those of their parameters."""
    if isinstance(weight, torch.Tensor):
        return {
            "data": weight,
            "scales": None,
            "zeros": None,
            "COLUMNS": weight.shape[1],
            "GROUPS": 1,
            "GROUP": weight.shape[1],
            "FORMAT": format_of(weight.dtype, device),
            "HAS_CODES": False,
        }
    groups = weight.scales.shape[1] if weight.has_codes else 1
    return {
        "data": as_bytes(weight.data.contiguous()),
        "scales": weight.scales.contiguous(),
        "zeros": None if weight.zeros is None else weight.zeros.contiguous(),
        "COLUMNS": weight.data.shape[1],
        "GROUPS": groups,
        "GROUP": weight.inputs // groups,
        "FORMAT": format_of(weight.data.dtype, device),
        "HAS_CODES": weight.has_codes,
    }


def inputs_at_once(weight: QuantisedWeight | torch.Tensor, dtype: torch.dtype) -> int:
    """Columns of a tile; of codes no more than a group, as long as a matrix instruction takes that few."""
    most = 16 if dtype == torch.float32 else INPUTS_AT_ONCE  # float32 is multiplied out of registers
    if isinstance(weight, torch.Tensor):
        return most // 2 if dtype != torch.float32 else most  # as many bytes as of the others
    if not weight.has_codes:
        return most
    group = weight.inputs // weight.scales.shape[1]
    fits = group % 16 == 0 and weight.data.shape[1] % group == 0
    return min(most, group & -group if fits else 32)


@triton.jit
def codes(packed, scales, zeros, outputs, columns, inside, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Codes of 4 bits, spelled out in float32: `columns` says of which group each is."""
    places = outputs[:, None] * GROUPS + (columns // GROUP)[None, :]
    scale = tl.load(scales + places, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(zeros + places, mask=inside, other=0).to(tl.float32)
    return (packed.to(tl.float32) - zero) * scale


@triton.jit
def add_products(
    sums,  # float32 [rows, outputs]
    x,
    row,  # int64 [rows]: of x
    real_row,
    data,
    scales,
    zeros,
    out,  # int64 [outputs]: rows of the weight
    real_out,
    begin,  # columns [begin, end) of the weight
    end,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_CODES: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """With the scales of codes, and without those of whole outputs, which can wait."""
    INPUTS: tl.constexpr = COLUMNS * 2 if HAS_CODES else COLUMNS
    dtype: tl.constexpr = x.dtype.element_ty
    for first in range(begin, end, BLOCK_INPUTS):
        column = first + tl.arange(0, BLOCK_INPUTS)
        real = column < COLUMNS
        inside = real_out[:, None] & real[None, :]
        stored = tl.load(data + out[:, None] * COLUMNS + column[None, :], mask=inside, other=0)
        places = x + row[:, None] * INPUTS + column[None, :]
        wanted = real_row[:, None] & real[None, :]
        inputs = tl.load(places, mask=wanted, other=0.0)
        if HAS_CODES:
            more_inputs = tl.load(places + COLUMNS, mask=wanted, other=0.0)
            low, high = stored & 15, stored >> 4
            if COLUMNS % GROUP == 0 and GROUP % BLOCK_INPUTS == 0:
                # The tile is within one group in either half: its scale waits for the product.
                place = out * GROUPS + first // GROUP
                low_zero = tl.load(zeros + place, mask=real_out, other=0).to(tl.int16)
                high_zero = tl.load(zeros + place + COLUMNS // GROUP, mask=real_out, other=0).to(tl.int16)
                low_scale = tl.load(scales + place, mask=real_out, other=0.0).to(tl.float32)
                high_scale = tl.load(scales + place + COLUMNS // GROUP, mask=real_out, other=0.0).to(tl.float32)
                low = (low.to(tl.int16) - low_zero[:, None]).to(tl.float32).to(dtype)
                high = (high.to(tl.int16) - high_zero[:, None]).to(tl.float32).to(dtype)
                sums += tl.dot(inputs, tl.trans(low), input_precision="ieee") * low_scale[None, :]
                sums += tl.dot(more_inputs, tl.trans(high), input_precision="ieee") * high_scale[None, :]
            else:
                low = codes(low, scales, zeros, out, column, inside, GROUPS, GROUP).to(dtype)
                high = codes(high, scales, zeros, out, column + COLUMNS, inside, GROUPS, GROUP).to(dtype)
                sums = tl.dot(inputs, tl.trans(low), sums, input_precision="ieee")
                sums = tl.dot(more_inputs, tl.trans(high), sums, input_precision="ieee")
        else:
            sums = tl.dot(inputs, tl.trans(widened(stored, FORMAT, dtype)), sums, input_precision="ieee")
    return sums

"""Weights of 8 and 4 bits: kernels/quantised_linear.py on a GPU.

A program takes a few outputs over a part of the inputs, and reads each byte of the weight once. Where outputs alone do
not fill the device, the inputs are cut in parts, which a second kernel sums in order: no result depends on chance.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.quantised_weight import QuantisedWeight
from kernels.triton.call import KernelCall, power_of_two
from kernels.triton.formats import widened
from kernels.triton.launch import QUANTISED_LINEAR, Device, Tile, device_of
from kernels.triton.weight_tiles import INPUTS_AT_ONCE, add_products, codes, inputs_at_once, weight_arguments

LEAST_PART = 512  # inputs that are worth a program
SPELLED_COLUMNS = 1024


def quantised_linear(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    x = x.contiguous()
    output = x.new_empty(len(x), weight.outputs)
    for call in linear_calls(x, weight, bias, output, device_of(x)):
        call.start()
    return output


def dequantise_weight(weight: QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    output = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.data.device)
    dequantise_call(weight, output, device_of(output)).start()
    return output


def linear_calls(
    x: torch.Tensor,
    weight: QuantisedWeight,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    device: Device,
    tile: Tile | None = None,
) -> list[KernelCall]:
    """The product of each part of the inputs, then their sum unless there is only one; `tile` as for attention."""
    rows, columns = len(x), weight.data.shape[1]
    tile = tile or QUANTISED_LINEAR[device.row]
    block_rows = min(max(16, power_of_two(rows)), 64)
    programs = -(-weight.outputs // tile.tokens) * -(-rows // block_rows)
    parts = max(1, min(2 * device.multiprocessors // programs, columns // LEAST_PART))
    part_columns = -(-columns // (parts * INPUTS_AT_ONCE)) * INPUTS_AT_ONCE
    parts = -(-columns // part_columns)
    sums = output if parts == 1 else output.new_empty(parts, rows, weight.outputs, dtype=torch.float32)
    finishing: dict[str, Any] = {"rows": rows, "OUTPUTS": weight.outputs, "HAS_CODES": weight.has_codes}
    arguments = weight_arguments(weight, device) | finishing
    arguments |= {
        "x": x,
        "bias": bias,
        "output": sums,
        "part_columns": part_columns,
        "BLOCK_ROWS": block_rows,
        "BLOCK_OUTPUTS": tile.tokens,
        "BLOCK_INPUTS": inputs_at_once(weight, x.dtype),
        "WHOLE": parts == 1,
    }
    grid = (-(-weight.outputs // tile.tokens), -(-rows // block_rows), parts)
    multiply = KernelCall(multiply_rows, grid, arguments, tile.warps, tile.stages)
    if parts == 1:
        return [multiply]
    finishing |= {"sums": sums, "scales": weight.scales, "bias": bias, "output": output, "parts": parts, "BLOCK": 256}
    return [multiply, KernelCall(sum_parts, (rows, -(-weight.outputs // 256)), finishing, warps=2)]


def dequantise_call(weight: QuantisedWeight, output: torch.Tensor, device: Device) -> KernelCall:
    columns = weight.data.shape[1]
    arguments = weight_arguments(weight, device) | {
        "output": output,
        "BLOCK": min(SPELLED_COLUMNS, max(16, power_of_two(columns))),
    }
    return KernelCall(spell_out, (weight.outputs, -(-columns // arguments["BLOCK"])), arguments, warps=4)


@triton.jit(do_not_specialize=["rows"])
def multiply_rows(
    x,
    data,
    scales,
    zeros,
    bias,
    output,
    rows,
    part_columns,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_CODES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    out = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    real_row, real_out = row < rows, out < OUTPUTS
    wide_row = row.to(tl.int64)
    begin = tl.program_id(2) * part_columns
    sums = add_products(
        tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32), x, wide_row, real_row, data, scales, zeros,
        out.to(tl.int64), real_out, begin, tl.minimum(begin + part_columns, COLUMNS),
        COLUMNS, GROUPS, GROUP, FORMAT, HAS_CODES, BLOCK_INPUTS,
    )  # fmt: skip

    inside = real_row[:, None] & real_out[None, :]
    target = wide_row[:, None] * OUTPUTS + out[None, :]
    if WHOLE:
        if not HAS_CODES:
            sums *= tl.load(scales + out, mask=real_out, other=0.0)[None, :]
        if bias is not None:
            sums += tl.load(bias + out, mask=real_out, other=0.0).to(tl.float32)[None, :]
        tl.store(output + target, sums.to(output.dtype.element_ty), mask=inside)
    else:
        part = tl.program_id(2).to(tl.int64) * rows * OUTPUTS
        tl.store(output + part + target, sums, mask=inside)


@triton.jit(do_not_specialize=["rows", "parts"])
def sum_parts(
    sums, scales, bias, output, rows, parts, OUTPUTS: tl.constexpr, HAS_CODES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = out < OUTPUTS
    total = tl.zeros([BLOCK], tl.float32)
    part_stride = rows.to(tl.int64) * OUTPUTS
    place = row * OUTPUTS + out
    for _ in range(parts):
        total += tl.load(sums + place, mask=real, other=0.0)
        place += part_stride
    if not HAS_CODES:
        total *= tl.load(scales + out, mask=real, other=0.0)
    if bias is not None:
        total += tl.load(bias + out, mask=real, other=0.0).to(tl.float32)
    tl.store(output + row * OUTPUTS + out, total.to(output.dtype.element_ty), mask=real)


@triton.jit
def spell_out(
    data,
    scales,
    zeros,
    output,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    out = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < COLUMNS
    stored = tl.load(data + out * COLUMNS + column, mask=real, other=0)
    dtype: tl.constexpr = output.dtype.element_ty
    if HAS_CODES:
        target = output + out * 2 * COLUMNS + column
        rows = tl.full([1], 0, tl.int64) + out
        inside = real[None, :]
        low = codes((stored & 15)[None, :], scales, zeros, rows, column, inside, GROUPS, GROUP)
        high = codes((stored >> 4)[None, :], scales, zeros, rows, column + COLUMNS, inside, GROUPS, GROUP)
        tl.store(target[None, :], low.to(dtype), mask=inside)
        tl.store(target[None, :] + COLUMNS, high.to(dtype), mask=inside)
    else:
        wide = widened(stored, FORMAT, tl.float32) * tl.load(scales + out)
        tl.store(output + out * COLUMNS + column, wide.to(dtype), mask=real)

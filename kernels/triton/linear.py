"""Products with 8-bit and 4-bit weights, and with the weights of experts: kernels/linear.py, experts.py on a GPU."""

from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.triton.formats import format_of, widened
from baton.kernels.triton.launch import (
    DECODE_REGISTERS,
    QUANTISED_LINEAR,
    Device,
    KernelCall,
    Tile,
    as_bytes,
    device_of,
    expert_tile,
    power_of_two,
)
from baton.kernels.types import ExpertWeight, QuantisedWeight, SortedPairs

INPUTS_AT_ONCE = 128


def weight_arguments(weight: QuantisedWeight | torch.Tensor, device: Device) -> dict[str, Any]:
    """Return the arguments for a weight, with the names of the parameters of all kernels that read it."""
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
    """Return the number of inputs in a tile: at most a group of codes, but as many as matrix instructions need."""
    most = 16 if dtype == torch.float32 else INPUTS_AT_ONCE  # registers, from which float32 is multiplied, fit only 16
    if isinstance(weight, torch.Tensor):
        return most // 2 if dtype != torch.float32 else most  # half for 16-bit weights, whose numbers take two bytes
    if not weight.has_codes:
        return most
    group = weight.inputs // weight.scales.shape[1]
    fits = group % 16 == 0 and weight.data.shape[1] % group == 0
    return min(most, group & -group if fits else 32)


@triton.jit
def codes(packed, scales, zeros, outputs, columns, inside, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Dequantise 4-bit codes to float32. columns: input of each code, which determines its group.

    `zeros` are in eighths of a code (ZERO_PARTS).
    """
    places = outputs[:, None] * GROUPS + (columns // GROUP)[None, :]
    scale = tl.load(scales + places, mask=inside, other=0.0).to(tl.float32)
    if zeros is None:
        numbers = e2m1(packed)
    else:
        eighths = tl.load(zeros + places, mask=inside, other=0).to(tl.float32)
        numbers = packed.to(tl.float32) - eighths * 0.125
    return numbers * scale


@triton.jit
def e2m1(codes):
    """Convert E2M1 codes to float32.

    A code's bits, shifted to the positions of float16, are 2**-14 times the number.
    """
    bits = codes.to(tl.int16)
    halves = (((bits & 7) << 9) | ((bits & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True)
    return halves.to(tl.float32) * 16384.0


@triton.jit
def without_zeros(codes, zeros, place, real):
    """Convert codes to unscaled float32: code minus zero point, or the E2M1 number if there are no zero points.

    `place`: for each output, index of the group of its codes. Results are exact in any float dtype.
    """
    if zeros is None:
        numbers = e2m1(codes)
    else:
        zero = tl.load(zeros + place, mask=real, other=0).to(tl.int16)
        numbers = (codes.to(tl.int16) * 8 - zero[:, None]).to(tl.float32) * 0.125
    return numbers


@triton.jit
def add_products(
    sums,  # float32 [rows, outputs]
    x,
    row,  # int64 [rows]: row indices of x
    real_row,
    data,
    scales,
    zeros,
    out,  # int64 [outputs]: row indices of the weight
    real_out,
    begin,  # first column of the weight
    end,  # column after the last one
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_CODES: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """Add products of x and the weight to `sums`. Scales of 4-bit codes are applied, but not scales of outputs."""
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
                # A tile's low nibbles are all in one group, its high nibbles all in another: scale products, not codes.
                place = out * GROUPS + first // GROUP
                low_scale = tl.load(scales + place, mask=real_out, other=0.0).to(tl.float32)
                high_scale = tl.load(scales + place + COLUMNS // GROUP, mask=real_out, other=0.0).to(tl.float32)
                low = without_zeros(low, zeros, place, real_out).to(dtype)
                high = without_zeros(high, zeros, place + COLUMNS // GROUP, real_out).to(dtype)
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


LEAST_PART = 512  # minimum number of columns of each part into which inputs are split
SPELLED_COLUMNS = 1024


def quantised_linear(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute kernels/linear.py's operation. Each program computes some outputs over a part of the inputs.

    Each byte of the weight is read once. If one program per tile of outputs does not fill the GPU, inputs are split
    into parts. A second kernel sums the parts in order, so that results are deterministic.
    """
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
    """Return the call that multiplies all parts of the inputs; with several parts, also the call that sums the parts.

    tile: tile to use; None: that of QUANTISED_LINEAR.
    """
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
    few = block_rows <= 32
    warps = tile.warps if few else max(tile.warps, 8)  # sums of 64 rows need the registers of 8 warps
    registers = DECODE_REGISTERS if few and not (weight.has_codes and x.dtype == torch.float32) else None
    multiply = KernelCall(multiply_rows, grid, arguments, warps, tile.stages, registers)
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


def expert_linear(x: torch.Tensor, weight: ExpertWeight, pairs: SortedPairs) -> torch.Tensor:
    """Compute kernels/experts.py's operation. Each program computes some outputs for some pairs of one expert.

    The grid has the largest number of tiles that any choice of experts needs, so that a CUDA graph serves every choice.
    A program finds its expert from the number of pairs of each expert.
    """
    x = x.contiguous()
    output = x.new_empty(len(pairs.order), weight.outputs)
    expert_call(x, weight, pairs, output, device_of(x)).start()
    return output


def expert_call(
    x: torch.Tensor,
    weight: ExpertWeight,
    pairs: SortedPairs,
    output: torch.Tensor,
    device: Device,
    tile: Tile | None = None,
) -> KernelCall:
    """Build the call that computes the products of all (token, expert) pairs.

    `tile`: tile to use; None: that of `expert_tile`.
    """
    count = len(pairs.order)
    tile = tile or expert_tile(device, x.dtype.itemsize, count // weight.experts)
    # Largest possible number of tiles: full tiles, plus one partial tile per expert; at most one tile per pair.
    tiles = min(count, count // tile.rows + weight.experts)
    arguments = weight_arguments(weight.rows, device) | {
        "x": x,
        "order": pairs.order,
        "starts": pairs.starts,
        "output": output,
        "fan": count // len(x),
        "OUTPUTS": weight.outputs,
        "EXPERTS": weight.experts,
        "BLOCK_EXPERTS": power_of_two(weight.experts),
        "BLOCK_ROWS": tile.rows,
        "BLOCK_OUTPUTS": tile.tokens,
        "BLOCK_INPUTS": inputs_at_once(weight.rows, x.dtype),
    }
    grid = (tiles, -(-weight.outputs // tile.tokens))
    registers = DECODE_REGISTERS if tile.warps <= 4 else None
    return KernelCall(multiply_experts, grid, arguments, tile.warps, tile.stages, registers)


@triton.jit(do_not_specialize=["fan"])
def multiply_experts(
    x,
    data,
    scales,
    zeros,
    order,
    starts,
    output,
    fan,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_CODES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    tile = tl.program_id(0)
    experts = tl.arange(0, BLOCK_EXPERTS)
    begins = tl.load(starts + experts, mask=experts < EXPERTS, other=0).to(tl.int32)
    ends = tl.load(starts + experts + 1, mask=experts < EXPERTS, other=0).to(tl.int32)
    tiles = (ends - begins + BLOCK_ROWS - 1) // BLOCK_ROWS
    tiles_so_far = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_so_far <= tile).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    own = experts == expert
    first = tl.sum(tl.where(own, begins + (tile - tiles_so_far + tiles) * BLOCK_ROWS, 0), 0)
    end = tl.sum(tl.where(own, ends, 0), 0)

    place = first + tl.arange(0, BLOCK_ROWS)
    real_row = place < end
    pair = tl.load(order + place, mask=real_row, other=0)
    out = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    real_out = out < OUTPUTS
    weight_row = expert.to(tl.int64) * OUTPUTS + out
    sums = add_products(
        tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32), x, pair // fan, real_row, data, scales, zeros,
        weight_row, real_out, 0, COLUMNS, COLUMNS, GROUPS, GROUP, FORMAT, HAS_CODES, BLOCK_INPUTS,
    )  # fmt: skip
    if scales is not None and not HAS_CODES:
        sums *= tl.load(scales + weight_row, mask=real_out, other=0.0)[None, :]
    inside = real_row[:, None] & real_out[None, :]
    tl.store(output + pair[:, None] * OUTPUTS + out[None, :], sums.to(output.dtype.element_ty), mask=inside)

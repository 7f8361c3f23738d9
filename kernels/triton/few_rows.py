"""Product of few rows, fused with the operations around it: `fused_linear` of kernels/linear.py on a GPU.

With few rows, most of the time goes into reading the weight and starting kernels. A program computes some outputs of
all rows. The program reads its part of the weight once, from memory into registers, in one tile if possible. The read
overlaps with the normalisation of rows or with the previous kernel. Every program normalises all rows itself, which
saves a kernel and is cheap, since rows are small and in the L2 cache.

Matrix instructions are not used, since most of their 16 rows would be empty. Instead each number of the weight is
widened once and multiplied with every row in float32. For up to FEW_ROWS rows (launch.py) the multiplication takes less
time than reading the weight from memory.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.triton.formats import widened
from baton.kernels.triton.launch import (
    DECODE_REGISTERS,
    FEW_ROWS,
    Device,
    FewRows,
    KernelCall,
    device_of,
    power_of_two,
)
from baton.kernels.triton.linear import weight_arguments
from baton.kernels.triton.norms import gated, normalised
from baton.kernels.types import Gate, QuantisedWeight


def most_fused_rows(x: torch.Tensor) -> int:
    """Return the largest number of rows for which `fused_linear` is expected to be faster than separate kernels."""
    return FEW_ROWS[device_of(x).row].rows


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantisedWeight,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    gate: Gate | None,
    out: torch.Tensor | None,
    adds: bool,
) -> torch.Tensor:
    x = x.contiguous()
    if out is None:
        outputs = len(weight) if isinstance(weight, torch.Tensor) else weight.outputs
        out = x.new_empty(len(x), outputs if gate is None else outputs // 2)
    fused_call(x, weight, bias, norm, eps, gate, out, device_of(x), adds).start()
    return out


def fused_call(
    x: torch.Tensor,
    weight: torch.Tensor | QuantisedWeight,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    gate: Gate | None,
    output: torch.Tensor,
    device: Device,
    adds: bool = False,
    few: FewRows | None = None,
) -> KernelCall:
    """Build the kernel call. adds: whether to add to `output`; few: sizes to use; None: those of FEW_ROWS."""
    few = few or FEW_ROWS[device.row]
    outputs, read = output.shape[1], weight_arguments(weight, device)
    block_rows, inputs = 1 if len(x) == 1 else few.rows, x.shape[1]
    is_one = block_rows == 1
    numbers = few.tile_bytes // x.itemsize // (1 if is_one else 2)  # half for several rows, whose sums need registers
    block_inputs = min(few.inputs, power_of_two(inputs), numbers // block_rows)
    block_outputs = max(1, numbers // block_inputs // (1 if gate is None else 2))
    arguments = {name: read[name] for name in ("data", "scales", "FORMAT")} | {
        "x": x,
        "bias": bias,
        "norm": norm,
        "eps": eps,
        "output": output,
        "rows": len(x),
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "GATE": None if gate is None else int(gate),
        "ADDS": adds,
        "OVERLAPS": device.overlaps,
        "BLOCK_ROWS": block_rows,
        "BLOCK_OUTPUTS": block_outputs,
        "BLOCK_INPUTS": block_inputs,
    }
    grid = (-(-outputs // block_outputs), -(-len(x) // block_rows))
    registers = None if is_one else DECODE_REGISTERS
    return KernelCall(multiply_few, grid, arguments, few.warps, most_registers=registers, overlaps=device.overlaps)


@triton.jit
def _row_tile(x, row, rows, column, INPUTS: tl.constexpr):
    inside = (row < rows)[:, None] & (column < INPUTS)[None, :]
    return tl.load(x + row[:, None] * INPUTS + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _factor_tile(norm, column, INPUTS: tl.constexpr):
    return tl.load(norm + column, mask=column < INPUTS, other=0.0).to(tl.float32)


@triton.jit
def _weight_tile(data, weight_row, real, column, INPUTS: tl.constexpr):
    inside = real[:, None] & (column < INPUTS)[None, :]
    return tl.load(data + weight_row[:, None] * INPUTS + column[None, :], mask=inside, other=0)


@triton.jit(do_not_specialize=["rows"])
def multiply_few(
    x,
    data,
    scales,
    bias,
    norm,
    eps,
    output,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FORMAT: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = x.dtype.element_ty
    # In the tile, each gate is next to its factor; in the weight, all gates come before all factors.
    EACH: tl.constexpr = 1 if GATE is None else 2
    place = tl.arange(0, BLOCK_OUTPUTS * EACH)
    out = tl.program_id(0) * BLOCK_OUTPUTS + place // EACH
    weight_row = out.to(tl.int64) + place % EACH * OUTPUTS
    real = out < OUTPUTS
    row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_INPUTS)

    stored = _weight_tile(data, weight_row, real, columns, INPUTS)
    if norm is not None:
        factors = _factor_tile(norm, columns, INPUTS)
    if OVERLAPS:  # wait for the previous kernel, which may write the rows but not the weights
        tl.extra.cuda.gdc_wait()
    inputs = _row_tile(x, row, rows, columns, INPUTS)
    mean = tl.sum(inputs * inputs, 1)[:, None]
    if norm is not None:
        for first in range(BLOCK_INPUTS, INPUTS, BLOCK_INPUTS):
            others = _row_tile(x, row, rows, first + columns, INPUTS)
            mean += tl.sum(others * others, 1)[:, None]
        mean = mean / INPUTS
    sums = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS * EACH], tl.float32)
    for first in range(0, INPUTS, BLOCK_INPUTS):
        column = first + columns
        following = _weight_tile(data, weight_row, real, column + BLOCK_INPUTS, INPUTS)
        following_inputs = _row_tile(x, row, rows, column + BLOCK_INPUTS, INPUTS)
        if norm is not None:
            inputs = normalised(inputs, mean, factors[None, :], eps, norm.dtype.element_ty, dtype).to(tl.float32)
            factors = _factor_tile(norm, column + BLOCK_INPUTS, INPUTS)
        if BLOCK_ROWS == 1:  # with two dimensions, the tile stays in registers instead of passing through shared memory
            sums += tl.sum(inputs * widened(stored, FORMAT, tl.float32), 1)[None, :]
        else:
            sums += tl.sum(inputs[:, None, :] * widened(stored, FORMAT, tl.float32)[None, :, :], 2)
        stored, inputs = following, following_inputs

    if scales is not None:
        sums *= tl.load(scales + weight_row, mask=real, other=0.0)[None, :]
    if bias is not None:
        sums += tl.load(bias + weight_row, mask=real, other=0.0).to(tl.float32)[None, :]
    made = sums.to(dtype)
    if GATE is not None:
        gates, ups = tl.split(tl.reshape(made, [BLOCK_ROWS, BLOCK_OUTPUTS, 2]))
        made = gated(gates.to(tl.float32), ups.to(tl.float32), GATE, dtype)
    out = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    target = output + row[:, None] * OUTPUTS + out[None, :]
    inside = (row < rows)[:, None] & (out < OUTPUTS)[None, :]
    if ADDS:
        made = made.to(tl.float32) + tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, made.to(output.dtype.element_ty), mask=inside)

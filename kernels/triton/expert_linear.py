"""Products with the experts of a mixture: kernels/expert_linear.py on a GPU.

A program takes some pairs of one expert and some of its outputs. Which expert that is, it finds out by itself, from how
many pairs each has: the grid is the most tiles that there can be, whatever was chosen, so that it can be recorded.
"""

import torch
import triton
import triton.language as tl

from kernels.expert_weight import ExpertWeight, SortedPairs
from kernels.triton.call import KernelCall, power_of_two
from kernels.triton.launch import Device, Tile, device_of, expert_tile
from kernels.triton.weight_tiles import add_products, inputs_at_once, weight_arguments


def expert_linear(x: torch.Tensor, weight: ExpertWeight, pairs: SortedPairs) -> torch.Tensor:
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
    """`tile` is for measurements."""
    count = len(pairs.order)
    tile = tile or expert_tile(device, x.dtype.itemsize, count // weight.experts)
    # Full tiles, and one of each expert that is not: no more than there are pairs.
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
    return KernelCall(multiply_experts, (tiles, -(-weight.outputs // tile.tokens)), arguments, tile.warps, tile.stages)


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

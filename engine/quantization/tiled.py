"""A product with a weight that is spelled out a few rows at a time, so that it never exists in full."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

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

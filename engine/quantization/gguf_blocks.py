"""GGUF's block formats, from stored bytes to numbers. Layouts: ggml's block_q4_0 and its kin in ggml-common.h.

Every function takes uint8 `[..., blocks, bytes of a block]` and gives float32 `[..., blocks, numbers of a block]`,
the last perhaps split into sub-blocks.
"""

from collections.abc import Callable

import torch

from engine.quantization.gguf_file import BLOCKS, TensorType

SUB_BLOCKS = 8  # of 32 numbers, in a block of Q4_K or Q5_K


def dequantise(stored: torch.Tensor, kind: TensorType) -> torch.Tensor:
    """Rows of stored bytes, uint8 `[rows, row bytes]`, as float32 `[rows, numbers]`."""
    blocks = stored.view(len(stored), -1, BLOCKS[kind].size_bytes)
    return DEQUANTISERS[kind](blocks).reshape(len(stored), -1)


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 [..., blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Of every `run` bytes first the low halves, then the high ones. uint8 [..., bytes] to [..., 2 x bytes]."""
    runs = packed.unflatten(-1, (-1, 1, run))
    return torch.cat([runs & 15, runs >> 4], dim=-2).flatten(-3)


def _bits(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """First the lowest `width` bits of every byte, then the next, `count` times. uint8 [..., bytes] to [..., all]."""
    mask = (1 << width) - 1
    return torch.stack([(packed >> (width * index)) & mask for index in range(count)], dim=-2).flatten(-2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks, 0) * blocks[..., 2:].view(torch.int8)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[..., 2:], 16).float() - 8)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """The fifth bits are one little-endian word: bit i of it belongs to number i."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[..., 2:6, None] >> shifts) & 1).flatten(-2)
    return _halves(blocks, 0) * ((_nibbles(blocks[..., 6:], 16) | (high << 4)).float() - 16)


def _sub_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the 8 sub-blocks of Q4_K and Q5_K, float32 [..., blocks, 8, 1].

    Both have 6 bits: the first four of each lie in bytes of their own, whose upper two bits complete the last four.
    """
    low, middle, last = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat([low & 63, (last & 15) | ((low >> 2) & 48)], dim=-1)
    minima = torch.cat([middle & 63, (last >> 4) | ((middle >> 2) & 48)], dim=-1)
    return (_halves(blocks, 0) * scales)[..., None], (_halves(blocks, 2) * minima)[..., None]


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _sub_scales(blocks)
    codes: torch.Tensor = _nibbles(blocks[..., 16:], 32).unflatten(-1, (SUB_BLOCKS, -1))
    return codes * scales - minima


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _sub_scales(blocks)
    codes = _nibbles(blocks[..., 48:], 32) | (_bits(blocks[..., 16:48], 8, 1) << 4)
    spread: torch.Tensor = codes.unflatten(-1, (SUB_BLOCKS, -1))
    return spread * scales - minima


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Sixteen sub-blocks of 16 numbers. Upper two bits: of every 32 bytes four runs of 32 numbers."""
    low = _nibbles(blocks[..., :128], 64)
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 4, 2).flatten(-2)
    codes: torch.Tensor = (low | (high << 4)).unflatten(-1, (16, 16)).float() - 32
    scales = _halves(blocks, 208) * blocks[..., 192:208].view(torch.int8)
    return codes * scales[..., None]


DEQUANTISERS = {
    TensorType.F32: _plain(torch.float32),
    TensorType.F16: _plain(torch.float16),
    TensorType.BF16: _plain(torch.bfloat16),
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_0: _q4_0,
    TensorType.Q5_0: _q5_0,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
}

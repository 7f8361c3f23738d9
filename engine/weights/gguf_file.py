"""Blocks of GGUF files, and their dequantisation.

Blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from baton.kernels.types import E2M1
from baton.text.gguf.header import BLOCKS, TensorType

SUB_BLOCKS = 8  # sub-blocks of 32 numbers in a block of Q4_K or Q5_K


def map_file(path: Path) -> torch.Tensor:
    """Map the file's bytes as uint8 without reading them."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


class Codes(NamedTuple):
    """Codes of blocks: number = code * scale + offset, in float32 exactly as llama.cpp computes it.

    codes: `[..., groups, inputs of a group]`, uint8 if all are at most 15, else int8. scales, offsets: float32
    `[..., groups, 1]`.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    @property
    def numbers(self) -> torch.Tensor:
        scaled = self.codes * self.scales
        return scaled if self.offsets is None else scaled + self.offsets

    def of_groups(self, order: torch.Tensor) -> "Codes":
        """Return codes `[rows, groups, inputs of a group]` of these groups of each row."""
        offsets = None if self.offsets is None else self.offsets.flatten(1)[:, order, None]
        return Codes(self.codes.flatten(1, -2)[:, order], self.scales.flatten(1)[:, order, None], offsets)

    def in_groups(self, inputs: int) -> "Codes":
        """Return the same numbers as int8 codes `[rows, groups, inputs]`. `inputs` must divide the size of a group."""
        times = self.codes.shape[-1] // inputs
        offsets = None if self.offsets is None else _repeated(self.offsets, times)
        codes = self.codes.flatten(1).view(torch.int8).unflatten(1, (-1, inputs))
        return Codes(codes, _repeated(self.scales, times), offsets)


def _repeated(of_groups: torch.Tensor, times: int) -> torch.Tensor:
    """Repeat each group's number: `[rows, ..., 1]` to `[rows, groups * times, 1]`."""
    return of_groups.flatten(1).repeat_interleave(times, 1)[..., None]


def joined(parts: Sequence[Codes]) -> Codes:
    """Concatenate the rows of codes in groups of equal size."""
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = torch.cat([torch.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts])
    return Codes(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]), offsets)


def dequantise(stored: torch.Tensor, kind: TensorType) -> torch.Tensor:
    """Dequantise rows of stored bytes, uint8 `[rows, row bytes]`, to float32 `[rows, numbers]`."""
    if kind in PLAIN_DTYPES:
        return stored.contiguous().view(PLAIN_DTYPES[kind]).float()
    if kind in CODED:
        return codes_of(stored, kind).numbers.reshape(len(stored), -1)
    if kind is TensorType.MXFP4:
        return _mxfp4(stored).reshape(len(stored), -1)
    if stored.is_meta:
        block = BLOCKS[kind]
        return stored.new_empty(len(stored), stored.shape[1] // block.size_bytes * block.numbers, dtype=torch.float32)
    from transformers.integrations.gguf.dequant import dequantize  # it has the tables of the rare types

    numbers: torch.Tensor = dequantize(stored, int(kind))
    return numbers.view(len(stored), -1)


def codes_of(stored: torch.Tensor, kind: TensorType) -> Codes:
    """Return the codes of rows of stored bytes, uint8 `[rows, row bytes]`, of a type in CODED."""
    return CODED[kind].codes(_blocks(stored, kind))


def _blocks(stored: torch.Tensor, kind: TensorType) -> torch.Tensor:
    return stored.view(len(stored), -1, BLOCKS[kind].size_bytes)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 at byte `start` of each block, as float32 [..., blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Unpack uint8 [..., bytes] to [..., 2 x bytes]: for every `run` bytes, all low nibbles, then all high nibbles."""
    runs = packed.unflatten(-1, (-1, 1, run))
    return torch.cat([runs & 15, runs >> 4], dim=-2).flatten(-3)


def _bits(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Split each byte into `count` numbers of `width` bits: uint8 [..., bytes] to [..., count x bytes].

    The numbers in the lowest bits of all bytes come first.
    """
    mask = (1 << width) - 1
    return torch.stack([(packed >> (width * index)) & mask for index in range(count)], dim=-2).flatten(-2)


def _fifth_bits(words: torch.Tensor) -> torch.Tensor:
    """Return the bits of a little-endian word as 0 or 16: bit i belongs to number i."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    bits: torch.Tensor = ((words[..., None] >> shifts) & 1).flatten(-2) << 4
    return bits


def _q8_0(blocks: torch.Tensor) -> Codes:
    return Codes(blocks[..., 2:].view(torch.int8), _half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> Codes:
    scales = _half(blocks, 0)
    return Codes(_nibbles(blocks[..., 2:], 16), scales, -8 * scales)


def _q4_1(blocks: torch.Tensor) -> Codes:
    return Codes(_nibbles(blocks[..., 4:], 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Codes:
    codes = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6])
    return Codes(codes.view(torch.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Codes:
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    return Codes(codes.view(torch.int8), _half(blocks, 0), _half(blocks, 2))


def _sub_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets of the 8 sub-blocks of Q4_K and Q5_K, float32 [..., blocks, 8, 1].

    Scales and minima have 6 bits. The first four scales have one byte each, whose upper two bits belong to one of the
    last four scales. Minima are stored in the same way, without their sign.
    """
    low, middle, last = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat([low & 63, (last & 15) | ((low >> 2) & 48)], dim=-1)
    minima = torch.cat([middle & 63, (last >> 4) | ((middle >> 2) & 48)], dim=-1)
    return (_half(blocks, 0) * scales)[..., None], -(_half(blocks, 2) * minima)[..., None]


def _q4_k(blocks: torch.Tensor) -> Codes:
    return Codes(_nibbles(blocks[..., 16:], 32).unflatten(-1, (SUB_BLOCKS, -1)), *_sub_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> Codes:
    codes = _nibbles(blocks[..., 48:], 32) | (_bits(blocks[..., 16:48], 8, 1) << 4)
    return Codes(codes.view(torch.int8).unflatten(-1, (SUB_BLOCKS, -1)), *_sub_scales(blocks))


def _q6_k(blocks: torch.Tensor) -> Codes:
    """Return the codes of Q6_K: 16 sub-blocks of 16 numbers. The upper two bits of four numbers share a byte."""
    low = _nibbles(blocks[..., :128], 64)
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 4, 2).flatten(-2)
    codes = ((low | (high << 4)).view(torch.int8) - 32).unflatten(-1, (16, 16))
    return Codes(codes, (_half(blocks, 208) * blocks[..., 192:208].view(torch.int8))[..., None])


def mxfp4_codes(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split rows of MXFP4 bytes into E2M1 codes, `[rows, numbers]`, and exponents biased by 127, `[rows, blocks]`."""
    blocks = _blocks(stored, TensorType.MXFP4)
    return _nibbles(blocks[..., 1:], 16).flatten(1), blocks[..., 0]


def _mxfp4(stored: torch.Tensor) -> torch.Tensor:
    """Dequantise rows of MXFP4 bytes. The smallest exponents make denormal scales."""
    codes, exponents = mxfp4_codes(stored)
    values = torch.tensor(E2M1, device=stored.device)[codes.int()].unflatten(1, (exponents.shape[1], -1))
    return torch.ldexp(values, exponents[..., None].int() - 127)


PLAIN_DTYPES = {TensorType.F32: torch.float32, TensorType.F16: torch.float16, TensorType.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Coding:
    """Layout of a quantised GGUF type in memory: `bits` per packed code, and `inputs` per group.

    codes: function of uint8 `[rows, blocks, bytes of a block]`.
    """

    codes: Callable[[torch.Tensor], Codes]
    bits: int
    has_offsets: bool = True
    inputs: int = 32

    def packed_bytes(self, numbers: int) -> int:
        """Return the bytes of packed numbers, see kernels/packed_weight.py: codes, and float16 scales and offsets."""
        return numbers * self.bits // 8 + numbers // self.inputs * (4 if self.has_offsets else 2)


CODED: Mapping[TensorType, Coding] = {
    TensorType.Q4_0: Coding(_q4_0, bits=4),
    TensorType.Q4_1: Coding(_q4_1, bits=4),
    TensorType.Q5_0: Coding(_q5_0, bits=8, has_offsets=False),
    TensorType.Q5_1: Coding(_q5_1, bits=8),
    TensorType.Q8_0: Coding(_q8_0, bits=8, has_offsets=False),
    TensorType.Q4_K: Coding(_q4_k, bits=4),
    TensorType.Q5_K: Coding(_q5_k, bits=8),
    TensorType.Q6_K: Coding(_q6_k, bits=8, has_offsets=False, inputs=16),
}
"""Types of codes in groups, which the CPU's native kernels multiply. All other quantised types are expanded."""

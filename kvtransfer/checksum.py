"""Checksums of blocks, which depend neither on how tensor parallelism cuts a pool nor on the device that it lies on.

A block's words of 4 bytes, in the order `[row][head]` of the whole block, are each multiplied by an odd number of 8
bytes of its position and added up, modulo 2^64 (multilinear hashing: Lemire and Kaser, "Strongly universal string
hashing is fast", 2014). One changed word is always detected, any other change except about one in 2^32. Words as
long as the sum would not do: whatever the factor, a change of the highest bit changes the sum by 2^63, and two of
them add up to nothing. The sums of parts add up to that of the block, so no rank has to gather them.
"""

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from baton.kernels.native.library import native_library
from baton.kvtransfer.slices import PoolShape, Storage, parts_of

WORD_BYTES = 4  # half of a sum's
MODULUS = 1 << 64
_SEED = 20_141_111  # any, as long as all pools have the same


class BlockChecksum(NamedTuple):
    logical: int  # the block's place among others, from 0
    value: int  # [0, 2^64)


class Checksums:
    """Of the blocks in `storage`. On any thread; a GPU is waited for, on a stream of its own."""

    def __init__(self, storage: Storage, shape: PoolShape) -> None:
        self._shape = shape
        self._parts = [part.view(shape.num_blocks, shape.part_block_bytes) for part in parts_of(storage, shape)]
        self._by_words = shape.row_bytes % WORD_BYTES == 0
        self._native = native_library()
        self._factors = self._make_factors()  # milliseconds, which no transfer is to wait for
        # One for each part, not behind the steps of the engine. PyTorch has 32 streams and gives them out in turn: more
        # of them would meet those of the engine.
        self._streams = {part.device: torch.cuda.Stream(part.device) for part in self._parts if part.is_cuda}

    def of(self, block: int) -> int:
        """[0, 2^64). Raises: IndexError for a block that there is not."""
        if not 0 <= block < self._shape.num_blocks:
            raise IndexError(f"block {block} of {self._shape.num_blocks}")
        pairs = zip(self._parts, self._factors, strict=True)
        return sum(self._sum(part[block], factors) for part, factors in pairs) % MODULUS

    def _sum(self, data: torch.Tensor, factors: torch.Tensor) -> int:
        """uint8 `[bytes of a part's block]` and int64 `[its words, or bytes]`."""
        if data.device.type == "cpu":  # neither leaves this thread
            numbers = data.numpy().view(np.uint32) if self._by_words else data.numpy()
            of_places = factors.numpy().view(np.uint64)
            if self._by_words and self._native is not None:
                return self._native.weighted_sum(numbers, of_places)
            return int(np.dot(numbers.astype(np.uint64), of_places))
        with torch.cuda.stream(self._streams[data.device]):
            words = data.view(torch.int32).to(torch.int64) & 0xFFFFFFFF if self._by_words else data.to(torch.int64)
            return int((words * factors).sum().item())

    def _make_factors(self) -> list[torch.Tensor]:
        """For each part: int64, flat, on its device. Words that begin in one part and end in another count by bytes."""
        shape = self._shape
        of_block = _word_factors(shape.rows, shape.row_bytes * shape.parts)
        if not self._by_words:
            shifts = np.arange(WORD_BYTES, dtype=np.uint64) * np.uint64(8)
            of_block = (of_block[:, :, None] << shifts).reshape(shape.rows, -1)
        width = shape.row_bytes // WORD_BYTES if self._by_words else shape.row_bytes
        cuts = (of_block[:, rank * width : (rank + 1) * width] for rank in range(shape.parts))
        return [
            torch.from_numpy(np.ascontiguousarray(cut).reshape(-1).view(np.int64)).to(part.device)
            for cut, part in zip(cuts, self._parts, strict=True)
        ]


class SampledPlaces:
    """A share of whatever is counted, drawn at random, so that none is always or never among them."""

    def __init__(self, share: float, draws: random.Random | None = None) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"a share lies in [0, 1], got {share}")
        self._share = share
        self._draws = draws or random.Random()
        self._next = 0 if share in (0.0, 1.0) else self._gap() - 1  # that come before the next one drawn

    def draw(self, count: int) -> list[int]:
        """Which of the next `count`, counted from 0."""
        places: list[int] = []
        if self._share:
            while self._next < count:
                places.append(self._next)
                self._next += self._gap()
            self._next -= count
        return places

    def _gap(self) -> int:
        """From one drawn to the next, as if a coin were tossed for each, which would cost more."""
        if self._share == 1.0:
            return 1
        return 1 + int(math.log(1.0 - self._draws.random()) / math.log(1.0 - self._share))


class SampledChecksums:
    """Of a share of blocks."""

    def __init__(self, checksums: Checksums, share: float, draws: random.Random | None = None) -> None:
        self._checksums = checksums
        self._places = SampledPlaces(share, draws)

    def of(self, blocks: Sequence[int]) -> list[BlockChecksum]:
        """`logical` counts from the first of `blocks`."""
        return [BlockChecksum(place, self._checksums.of(blocks[place])) for place in self._places.draw(len(blocks))]


@lru_cache(maxsize=4)
def _word_factors(rows: int, row_bytes: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]":
    """Odd numbers `[rows, words of a row]`; a word that is not whole has one too."""
    words = -(-row_bytes // WORD_BYTES)
    numbers = np.random.PCG64(_SEED).random_raw(rows * words) | np.uint64(1)
    return np.asarray(numbers, dtype=np.uint64).reshape(rows, words)

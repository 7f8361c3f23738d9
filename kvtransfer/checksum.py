"""Checksums of KV blocks, independent of tensor parallelism and of the device of the pool.

Each 4-byte word of a block, in the order `[row][head]`, is multiplied by an odd 8-byte factor of its position; the
checksum is the sum of the products modulo 2^64 (multilinear hashing: Lemire and Kaser, "Strongly universal string
hashing is fast", 2014). The checksum detects every change of a single word, and any other change with probability
1 - 2^-32. Words of 8 bytes would not work: a flip of the highest bit of a word changes the sum by 2^63 for any factor,
so two such flips cancel out. The checksum of a block is the sum of its parts' checksums, so ranks need not gather
blocks.
"""

import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from baton.kernels.native.library import native_library
from baton.kvtransfer.slices import PoolShape, Storage, parts_of

WORD_BYTES = 4  # bytes of a word: half of a checksum's bytes
FACTOR_BYTES = 8
MODULUS = 1 << 64
PIECE_WORDS = 1 << 20  # maximum number of words that are summed at a time
KEPT_BYTES = 32 << 20  # bytes of factors that are kept in memory between checksums
_SEED = 20_141_111  # arbitrary, but equal in all processes


class BlockChecksum(NamedTuple):
    logical: int  # index of the block in a transfer, from 0
    value: int  # checksum, [0, 2^64)


class Checksums:
    """Calculator of checksums of the blocks in `storage`. Any thread may call it.

    On a GPU, a call waits only for work on the streams of this object, not for the engine's work.
    """

    def __init__(self, storage: Storage, shape: PoolShape) -> None:
        self._shape = shape
        self._parts = [part.view(shape.num_blocks, shape.part_block_bytes) for part in parts_of(storage, shape)]
        self._by_words = shape.row_bytes % WORD_BYTES == 0
        self._native = native_library()
        devices = tuple(part.device for part in self._parts)
        self._factors = _factors(shape.rows, shape.row_bytes, devices)
        # One stream per part, for checksums only. PyTorch assigns its 32 streams round-robin: if more streams were
        # created here, some of them would also be the engine's.
        self._streams = {device: torch.cuda.Stream(device) for device in devices if device.type == "cuda"}

    def of(self, block: int) -> int:
        """Compute the checksum of a block, [0, 2^64). Raises: IndexError."""
        if not 0 <= block < self._shape.num_blocks:
            raise IndexError(f"block must be in [0, {self._shape.num_blocks}), the blocks of the pool, got {block}")
        return sum(self._sum(self._parts[cut.part][block], cut) for cut in self._factors) % MODULUS

    def _sum(self, data: torch.Tensor, cut: "_Cut") -> int:
        """Sum the products of numbers and factors of `cut`. `data`: uint8, a block's bytes in the part of `cut`."""
        end = cut.first + cut.factors.numel()
        if data.device.type == "cpu":  # the kernel and numpy compute on this thread alone
            numbers = (data.numpy().view(np.uint32) if self._by_words else data.numpy())[cut.first : end]
            of_places = cut.factors.numpy().view(np.uint64)
            if self._by_words and self._native is not None:
                return self._native.weighted_sum(numbers, of_places)
            return int(np.dot(numbers.astype(np.uint64), of_places))
        with torch.cuda.stream(self._streams[data.device]):
            numbers_there = (data.view(torch.int32) if self._by_words else data)[cut.first : end].to(torch.int64)
            if self._by_words:
                numbers_there &= 0xFFFFFFFF
            return int((numbers_there * cut.factors.to(data.device)).sum().item())


class SampledPlaces:
    """Random sample of a sequence of items. Each item is drawn with probability `share`."""

    def __init__(self, share: float, draws: random.Random | None = None) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share must be in [0, 1], not {share}")
        self._share = share
        self._draws = draws or random.Random()
        self._next = 0 if share in (0.0, 1.0) else self._gap() - 1  # items before the next drawn one

    def draw(self, count: int) -> list[int]:
        """Return the indices, from 0, of the drawn items among the next `count` items."""
        places: list[int] = []
        if self._share:
            while self._next < count:
                places.append(self._next)
                self._next += self._gap()
            self._next -= count
        return places

    def _gap(self) -> int:
        """Draw the distance to the next drawn item from the geometric distribution."""
        if self._share == 1.0:
            return 1
        return 1 + int(math.log(1.0 - self._draws.random()) / math.log(1.0 - self._share))


class SampledChecksums:
    """Calculator of checksums of randomly drawn blocks. `share`: probability with which each block is drawn."""

    def __init__(self, checksums: Checksums, share: float, draws: random.Random | None = None) -> None:
        self._checksums = checksums
        self._places = SampledPlaces(share, draws)

    def of(self, blocks: Sequence[int]) -> list[BlockChecksum]:
        """Return the checksums of randomly drawn `blocks`. `logical` of a checksum is the block's index in `blocks`."""
        return [BlockChecksum(place, self._checksums.of(blocks[place])) for place in self._places.draw(len(blocks))]


class _Cut(NamedTuple):
    """Factors of consecutive numbers in one part of a block: of words, or of bytes if a word may span two parts."""

    part: int
    first: int  # index of the first number in the part
    factors: torch.Tensor  # int64, flat


class _Piece(NamedTuple):
    """Range of a block's words: several complete rows, or consecutive words of one row."""

    row: int
    rows: int
    word: int
    words: int


class _Factors:
    """Factors of all words of a block, generated piece by piece and divided among the parts of the block.

    The first `KEPT_BYTES` of factors are kept on the devices of the parts. All later factors are generated again for
    each checksum, since factors take twice the bytes of the block, and blocks of hybrid models are large.
    """

    def __init__(self, rows: int, row_bytes: int, devices: tuple[torch.device, ...]) -> None:
        """Create factors. `row_bytes`: bytes of a row in one part; if not a multiple of 4, numbers are bytes."""
        self._by_words = row_bytes % WORD_BYTES == 0
        self._part_width = row_bytes // WORD_BYTES if self._by_words else row_bytes
        self._parts = len(devices)
        self._row_words = -(-row_bytes * len(devices) // WORD_BYTES)
        pieces = _pieces(rows, self._row_words)
        piece_bytes = PIECE_WORDS * (1 if self._by_words else WORD_BYTES) * FACTOR_BYTES
        kept = pieces[: KEPT_BYTES // piece_bytes]
        self._drawn = pieces[len(kept) :]
        self._kept = [
            cut._replace(factors=cut.factors.to(devices[cut.part])) for piece in kept for cut in self._cuts(piece)
        ]

    def __iter__(self) -> Iterator[_Cut]:
        yield from self._kept
        for piece in self._drawn:
            yield from self._cuts(piece)

    def _cuts(self, piece: _Piece) -> Iterator[_Cut]:
        factors = _draw(piece.row * self._row_words + piece.word, piece.rows * piece.words)
        start, width = piece.word, piece.words
        if not self._by_words:
            factors = (factors[:, None] << (np.arange(WORD_BYTES, dtype=np.uint64) * np.uint64(8))).reshape(-1)
            start, width = start * WORD_BYTES, width * WORD_BYTES
        of_rows = factors.reshape(piece.rows, width)
        for part in range(self._parts):
            part_start = part * self._part_width
            low, high = max(start, part_start), min(start + width, part_start + self._part_width)
            if low < high:
                cut = np.ascontiguousarray(of_rows[:, low - start : high - start]).reshape(-1)
                yield _Cut(part, piece.row * self._part_width + low - part_start, torch.from_numpy(cut.view(np.int64)))


@lru_cache(maxsize=4)
def _factors(rows: int, row_bytes: int, devices: tuple[torch.device, ...]) -> _Factors:
    """Return the factors for pools of this shape. Pools of equal shapes in this process share them."""
    return _Factors(rows, row_bytes, devices)


def _pieces(rows: int, row_words: int) -> list[_Piece]:
    if row_words <= PIECE_WORDS:
        step = PIECE_WORDS // row_words
        return [_Piece(row, min(step, rows - row), 0, row_words) for row in range(0, rows, step)]
    starts = range(0, row_words, PIECE_WORDS)
    return [_Piece(row, 1, word, min(PIECE_WORDS, row_words - word)) for row in range(rows) for word in starts]


def _draw(first: int, count: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Return the `count` odd pseudo-random factors of the words from index `first` of a block on."""
    numbers = np.random.PCG64(_SEED).advance(first).random_raw(count)
    return np.asarray(numbers | np.uint64(1), dtype=np.uint64)

"""Checksums of blocks: equal for equal bytes in whatever parts, different for any change that we can think of."""

import itertools
import random
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.kvtransfer import checksum
from baton.kvtransfer.checksum import Checksums, SampledChecksums
from baton.kvtransfer.shared_memory import SharedMemoryTransport
from baton.kvtransfer.slices import PoolShape, plan_slices
from baton.kvtransfer.transport import BlockPair

BLOCKS, ROWS = 3, 4


def pool(parts: int, heads: int, head_bytes: int, seed: int = 5) -> tuple[torch.Tensor, PoolShape]:
    """The same bytes for every number of parts."""
    whole = torch.randint(256, (BLOCKS, ROWS, heads, head_bytes), generator=torch.Generator().manual_seed(seed))
    cut = whole.to(torch.uint8).view(BLOCKS, ROWS, parts, heads // parts * head_bytes)
    shape = PoolShape(BLOCKS, ROWS * heads * head_bytes, ROWS, parts)
    return cut.permute(2, 0, 1, 3).contiguous().view(-1), shape


def numbered(parts: int, heads: int, head_bytes: int) -> tuple[torch.Tensor, PoolShape]:
    """As `pool`, of bytes that no generator draws."""
    shape = PoolShape(BLOCKS, ROWS * heads * head_bytes, ROWS, parts)
    whole = torch.arange(BLOCKS * shape.block_bytes).remainder(251).to(torch.uint8)
    cut = whole.view(BLOCKS, ROWS, parts, shape.row_bytes)
    return cut.permute(2, 0, 1, 3).contiguous().view(-1), shape


@pytest.mark.parametrize("head_bytes", [16, 20, 7], ids=lambda size: f"{size} bytes a head")
def test_differently_cut_pools_have_equal_checksums(head_bytes: int) -> None:
    sums = [
        [Checksums(*pool(parts, heads=4, head_bytes=head_bytes)).of(block) for block in range(BLOCKS)]
        for parts in (1, 2, 4)
    ]
    assert sums[0] == sums[1] == sums[2]
    assert len(set(sums[0])) == BLOCKS


@pytest.mark.parametrize("parts", [(1, 2), (2, 1), (4, 2), (2, 4)], ids=str)
def test_copy_into_a_differently_cut_pool_has_its_sources_checksums(parts: tuple[int, int]) -> None:
    source, shape = pool(parts[0], heads=4, head_bytes=16)
    own, own_shape = pool(parts[1], heads=4, head_bytes=16, seed=6)
    peer: Any = SimpleNamespace(array=source.numpy())
    pairs = [BlockPair(0, 2, 1), BlockPair(1, 0, 0)]
    SharedMemoryTransport(peer, own, shape, own_shape).copy(b"", pairs)
    there, here = Checksums(source, shape), Checksums(own, own_shape)
    assert [here.of(pair.destination) for pair in pairs] == [there.of(pair.source) for pair in pairs]


def test_pool_in_pieces_has_equal_checksums() -> None:
    storage, shape = pool(2, heads=4, head_bytes=16)
    pieces = tuple(storage.clone().view(2, -1).unbind())
    assert Checksums(pieces, shape).of(1) == Checksums(storage, shape).of(1)


@pytest.mark.parametrize("head_bytes", [16, 7])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_flipped_bit_shows_in_its_block_alone(parts: int, head_bytes: int) -> None:
    storage, shape = pool(parts, heads=2, head_bytes=head_bytes)
    checksums = Checksums(storage, shape)
    before = [checksums.of(block) for block in range(BLOCKS)]
    for place in range(storage.numel()):
        block = place % shape.part_bytes // shape.part_block_bytes
        for bit in (0, 7):
            storage[place] ^= 1 << bit
            changed = [number for number in range(BLOCKS) if checksums.of(number) != before[number]]
            assert changed == [block]
            storage[place] ^= 1 << bit


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("word", [4, 8])
def test_same_bit_flipped_in_several_words_shows(word: int, bit: int) -> None:
    """As where a wire of a memory bus is stuck: the highest bits of words add up to a multiple of 2^64 in many sums."""
    storage, shape = pool(1, heads=4, head_bytes=64)
    checksums = Checksums(storage, shape)
    before = checksums.of(0)
    words = storage[: shape.row_bytes * shape.rows].view(-1, word)
    for place, words_hit in itertools.product(range(word), range(1, 9)):
        words[: 3 * words_hit : 3, place] ^= 1 << bit
        assert checksums.of(0) != before
        words[: 3 * words_hit : 3, place] ^= 1 << bit


SUMS = {16: 0x2C8D69C61E13C8F2, 7: 0xE29965BD4C1F6FC8}  # of block 1, by bytes of a head


@pytest.mark.parametrize(("head_bytes", "value"), SUMS.items())
@pytest.mark.parametrize("parts", [1, 2])
def test_checksums_equal_those_of_other_releases(head_bytes: int, value: int, parts: int) -> None:
    """Workers of two releases compare theirs."""
    assert Checksums(*numbered(parts, heads=4, head_bytes=head_bytes)).of(1) == value


@pytest.mark.parametrize("kept_bytes", [0, 256, 1 << 20])
@pytest.mark.parametrize("piece_words", [1, 3, 16, 1 << 20])
@pytest.mark.parametrize("head_bytes", [16, 7])
@pytest.mark.parametrize("parts", [1, 2])
def test_blocks_are_summed_in_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch, parts: int, head_bytes: int, piece_words: int, kept_bytes: int
) -> None:
    monkeypatch.setattr(checksum, "PIECE_WORDS", piece_words)
    monkeypatch.setattr(checksum, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(checksum, "_factors", checksum._Factors)
    assert Checksums(*numbered(parts, heads=4, head_bytes=head_bytes)).of(1) == SUMS[head_bytes]


@pytest.mark.parametrize("native", [True, False])
def test_sum_of_a_large_block_takes_little_memory(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """A block of hybrid models may have 150 MiB, and a GPU that is full of blocks has no room for more of that size."""
    if not native:
        monkeypatch.setattr(checksum, "native_library", lambda: None)
    monkeypatch.setattr(checksum, "_factors", checksum._Factors)
    shape = PoolShape(1, 150 << 20, rows=48)
    storage = torch.zeros(shape.part_bytes, dtype=torch.uint8)
    tracemalloc.start()
    try:
        assert Checksums(storage, shape).of(0) == 0
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()


def test_heads_in_each_others_places_show() -> None:
    storage, shape = pool(1, heads=4, head_bytes=16)
    checksums = Checksums(storage, shape)
    before = checksums.of(0)
    row = storage[: shape.row_bytes].view(4, 16)
    row[[0, 1]] = row[[1, 0]].clone()
    assert checksums.of(0) != before


def test_block_with_a_slice_of_another_one_shows() -> None:
    storage, shape = pool(2, heads=4, head_bytes=16)
    other, _ = pool(2, heads=4, head_bytes=16, seed=6)
    before = Checksums(storage, shape).of(0)
    piece = plan_slices(shape, shape)[1]
    start = piece.source_part * shape.part_bytes + piece.source_offset
    storage[start : start + piece.width] = other[start : start + piece.width]
    assert Checksums(storage, shape).of(0) != before


def test_missing_block_has_no_checksum() -> None:
    with pytest.raises(IndexError):
        Checksums(*pool(1, heads=2, head_bytes=16)).of(BLOCKS)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_share_of_the_blocks_is_drawn(share: float) -> None:
    sampled = SampledChecksums(Checksums(*pool(1, heads=2, head_bytes=16)), share, random.Random(3))
    drawn = sum(len(sampled.of([0, 1, 2])) for _ in range(1000))
    assert abs(drawn / 3000 - share) < 0.03


def test_checksums_are_sent_with_block_indices() -> None:
    checksums = Checksums(*pool(1, heads=2, head_bytes=16))
    told = SampledChecksums(checksums, 1.0).of([2, 0])
    assert told == [(0, checksums.of(2)), (1, checksums.of(0))]


def test_share_is_between_none_and_all() -> None:
    with pytest.raises(ValueError, match="share"):
        SampledChecksums(Checksums(*pool(1, heads=2, head_bytes=16)), 1.5)


@pytest.mark.usefixtures("native_kernels")
def test_native_checksums_equal_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, shape = pool(2, heads=4, head_bytes=20)
    native = [Checksums(storage, shape).of(block) for block in range(BLOCKS)]
    monkeypatch.setattr(checksum, "native_library", lambda: None)
    assert [Checksums(storage, shape).of(block) for block in range(BLOCKS)] == native

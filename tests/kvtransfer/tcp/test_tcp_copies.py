"""Blocks that are read over TCP land bit for bit where they belong, over one connection or several."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kvtransfer.slices import PoolShape, landing_places, plan_slices
from baton.kvtransfer.tcp import connection, reader
from baton.kvtransfer.transport import BlockOutOfRange, BlockPair
from tests.fixtures.tcp_pair import TRANSFER, pool_bytes, reading, serving

BLOCKS = 12
SHAPE = PoolShape(BLOCKS, 48)
DEGREES = list(itertools.product((1, 2, 4), repeat=2))


def expected_pool(pairs: list[BlockPair]) -> torch.Tensor:
    own = torch.zeros(BLOCKS, SHAPE.block_bytes, dtype=torch.uint8)
    for pair in pairs:
        own[pair.destination] = pool_bytes(SHAPE).view(BLOCKS, -1)[pair.source]
    return own.flatten()


@st.composite
def block_pairs(draw: st.DrawFn) -> list[BlockPair]:
    """The uncached rest of a prompt: logical blocks in order, some left out, anywhere in both pools."""
    sources = draw(st.permutations(range(BLOCKS)))
    destinations = draw(st.permutations(range(BLOCKS)))
    wanted = draw(st.lists(st.booleans(), min_size=BLOCKS, max_size=BLOCKS))
    every = zip(range(BLOCKS), sources, destinations, strict=True)
    return [BlockPair(*pair) for pair, chosen in zip(every, wanted, strict=True) if chosen]


@settings(max_examples=25, deadline=None)
@given(pairs=block_pairs(), connections=st.integers(1, 3))
def test_exactly_the_blocks_asked_for_are_moved(pairs: list[BlockPair], connections: int) -> None:
    blocks = list(range(BLOCKS))
    for pair in pairs:
        blocks[pair.logical] = pair.source
    own = torch.zeros(SHAPE.part_bytes, dtype=torch.uint8)
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(pool_bytes(SHAPE), SHAPE, blocks) as server,
        reading(server.port, own, SHAPE) as transport,
    ):
        patch.setattr(reader, "SHARE_BYTES", SHAPE.block_bytes)
        transport._connections.extend(transport._connect() for _ in range(connections - 1))
        assert transport.copy(TRANSFER, pairs) == len(pairs) * SHAPE.block_bytes
    assert torch.equal(own, expected_pool(pairs))


@pytest.mark.parametrize(("theirs", "mine"), DEGREES)
def test_landing_positions_of_cut_pools_equal_their_slices(theirs: int, mine: int) -> None:
    rows, row_bytes = 3, 8
    source, own = (PoolShape(1, rows * row_bytes, rows, parts) for parts in (theirs, mine))
    coming = torch.arange(rows * row_bytes).view(source.parts, source.rows, source.row_bytes)
    wanted = torch.full((own.parts, own.rows, own.row_bytes), -1)
    for piece in plan_slices(source, own):
        heads = coming[piece.source_part, :, piece.source_offset : piece.source_offset + piece.width]
        wanted[piece.destination_part, :, piece.destination_offset : piece.destination_offset + piece.width] = heads
    landed, start = torch.full((own.parts, own.part_block_bytes), -1), 0
    for part, offset, width in landing_places(source, own):
        landed[part, offset : offset + width] = coming.flatten()[start : start + width]
        start += width
    assert start == rows * row_bytes
    assert torch.equal(landed, wanted.view(own.parts, -1))


def test_differently_cut_pool_is_read_in_more_pieces_than_one_call(monkeypatch) -> None:
    monkeypatch.setattr(connection, "MOST_PLACES", 5)
    source, own_shape = PoolShape(2, 64, 4, parts=1), PoolShape(2, 64, 4, parts=4)
    own = torch.zeros(128, dtype=torch.uint8)
    with (
        serving(pool_bytes(source), source, [1, 0]) as server,
        reading(server.port, own, source, own_shape) as transport,
    ):
        transport.copy(TRANSFER, [BlockPair(0, 1, 0), BlockPair(1, 0, 1)])
    swapped = pool_bytes(source).view(2, 4, 4, 4).flip(0)  # block, row, part, bytes
    assert torch.equal(own.view(4, 2, 4, 4), swapped.permute(2, 0, 1, 3))


@pytest.mark.parametrize("pair", [BlockPair(0, 0, BLOCKS), BlockPair(0, 0, -1)])
def test_blocks_without_a_destination_are_not_requested(pair: BlockPair) -> None:
    own = torch.zeros(SHAPE.part_bytes, dtype=torch.uint8)
    with serving(pool_bytes(SHAPE), SHAPE, [0]) as server, reading(server.port, own, SHAPE) as transport:
        with pytest.raises(BlockOutOfRange):
            transport.copy(TRANSFER, [BlockPair(0, 0, 1), pair])
        assert not own.any()


class Rates:
    """Of links: `measured` gives one after another, whatever moves."""

    def __init__(self, *gb_per_s: float) -> None:
        self._left: Iterator[float] = iter(gb_per_s)

    def monotonic(self) -> float:
        """Begins at 0 for each measurement, and ends when the rate says; the warm-up's time is not looked at."""
        return next(self._left)


@pytest.mark.parametrize(
    ("seconds", "connections"),
    [((1.0, 0.9), 1), ((1.0, 0.5, 0.45), 2), ((1.0, 0.5, 0.25), 4)],
    ids=["one is enough", "two are", "all of them"],
)
def test_as_many_connections_stay_as_make_the_link_faster(
    seconds: tuple[float, ...], connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [moment for took in seconds for moment in (0.0, 1.0, 0.0, took)]  # a warm-up before each
    monkeypatch.setattr(reader, "monotonic", Rates(*clock).monotonic)
    own = torch.zeros(SHAPE.part_bytes, dtype=torch.uint8)
    with serving(pool_bytes(SHAPE), SHAPE, []) as server, reading(server.port, own, SHAPE) as transport:
        rate = transport.measure(4096)
        assert len(transport._connections) == connections
        assert (rate.bytes, rate.seconds) == (4096, min(seconds[: connections.bit_length()]))
        assert not own.any()

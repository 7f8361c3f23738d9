"""Both transports move the same blocks; they differ in where the bytes come from."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kvtransfer.shared_memory import SharedMemoryTransport, SharedPool, open_peer
from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.stream import StreamTransport, compare_beginning
from baton.kvtransfer.transport import BlockOutOfRange, BlockPair, ChecksumDiffers, CopyBroken, LinkRate, split_runs

TRANSFER = b"t" * 16
BLOCK_BYTES = 48
BLOCKS = 12
SHAPE = PoolShape(BLOCKS, BLOCK_BYTES)


def source_pool() -> torch.Tensor:
    return (torch.arange(BLOCKS * BLOCK_BYTES) % 251 + 1).to(torch.uint8)


class FakeLink:
    """A source whose transfer consists of `blocks`, in logical order; sends pieces of `piece_bytes`."""

    def __init__(self, blocks: list[int], piece_bytes: int = 7, missing: int = 0, extra: bytes = b"") -> None:
        self.blocks, self.piece_bytes, self.missing, self.extra = blocks, piece_bytes, missing, extra
        self.reads: list[tuple[int, int]] = []

    def read(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Iterator[bytes]:
        assert transfer_id == TRANSFER
        self.reads.append((first_block, num_blocks))
        pool = source_pool().view(BLOCKS, BLOCK_BYTES)
        data = bytes(pool[self.blocks[first_block : first_block + num_blocks]].flatten().tolist())
        return self._pieces(data[: len(data) - self.missing] + self.extra)

    def probe(self, nbytes: int) -> Iterator[bytes]:
        return self._pieces(bytes(nbytes - self.missing) + self.extra)

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        yield b""  # a message may be empty
        for start in range(0, len(data), self.piece_bytes):
            yield data[start : start + self.piece_bytes]


@pytest.fixture
def mapped():
    """A transport over a mapped pool, and the pool it writes to."""
    source = SharedPool.create(BLOCKS * BLOCK_BYTES)
    source.tensor.copy_(source_pool())
    own = torch.zeros(BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    transport = SharedMemoryTransport(open_peer(source.handle), own, SHAPE, SHAPE)
    yield transport, own
    transport.close()
    source.close()


def expected_pool(pairs: list[BlockPair]) -> torch.Tensor:
    """Every destination holds its source, nothing else is touched."""
    own = torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    for pair in pairs:
        own[pair.destination] = source_pool().view(BLOCKS, BLOCK_BYTES)[pair.source]
    return own.flatten()


@st.composite
def block_pairs(draw: st.DrawFn) -> list[BlockPair]:
    """The uncached rest of a prompt: logical blocks in order, some left out, anywhere in both pools."""
    sources = draw(st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=BLOCKS))
    destinations = draw(st.permutations(range(BLOCKS)))
    pairs = [BlockPair(*pair) for pair in zip(range(len(sources)), sources, destinations, strict=False)]
    wanted = draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
    return [pair for pair, chosen in zip(pairs, wanted, strict=True) if chosen]


@settings(max_examples=40, deadline=None)
@given(pairs=block_pairs())
def test_shared_memory_moves_exactly_the_blocks_asked_for(pairs):
    source = SharedPool.create(BLOCKS * BLOCK_BYTES)
    source.tensor.copy_(source_pool())
    own = torch.zeros(BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    transport = SharedMemoryTransport(open_peer(source.handle), own, SHAPE, SHAPE)
    assert transport.copy(TRANSFER, pairs) == len(pairs) * BLOCK_BYTES
    assert torch.equal(own, expected_pool(pairs))
    transport.close()
    source.close()


@settings(max_examples=40, deadline=None)
@given(pairs=block_pairs(), piece_bytes=st.integers(1, 3 * BLOCK_BYTES))
def test_stream_moves_exactly_the_blocks_asked_for(pairs, piece_bytes):
    blocks = [0] * BLOCKS
    for pair in pairs:
        blocks[pair.logical] = pair.source
    own = torch.zeros(BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    copied = StreamTransport(FakeLink(blocks, piece_bytes), own, SHAPE, SHAPE).copy(TRANSFER, pairs)
    assert copied == len(pairs) * BLOCK_BYTES
    assert torch.equal(own, expected_pool(pairs))


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_stream_fills_a_pool_on_any_device(device):
    own = torch.zeros(SHAPE.part_bytes, dtype=torch.uint8, device=device)
    transport = StreamTransport(FakeLink([5, 6, 1, 2]), own, SHAPE, SHAPE)
    pairs = [BlockPair(0, 5, 3), BlockPair(1, 6, 4), BlockPair(3, 2, 9)]
    assert transport.copy(TRANSFER, pairs) == 3 * BLOCK_BYTES
    assert own.cpu().equal(expected_pool(pairs))


def test_stream_requests_logical_neighbours_together():
    link = FakeLink(list(range(BLOCKS)))
    own = torch.zeros(BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    pairs = [BlockPair(logical, logical, 11 - logical) for logical in (2, 3, 4, 7)]
    StreamTransport(link, own, SHAPE, SHAPE).copy(TRANSFER, pairs)
    assert link.reads == [(2, 3), (7, 1)]


@pytest.mark.parametrize(("missing", "extra"), [(1, b""), (0, b"x")])
def test_stream_of_the_wrong_length_is_broken(missing, extra):
    own = torch.zeros(BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    transport = StreamTransport(FakeLink([0, 1], missing=missing, extra=extra), own, SHAPE, SHAPE)
    with pytest.raises(CopyBroken):
        transport.copy(TRANSFER, [BlockPair(0, 0, 3), BlockPair(1, 1, 4)])
    assert not own[5 * BLOCK_BYTES :].any()
    with pytest.raises(CopyBroken):
        transport.measure(100)


@pytest.mark.parametrize("pair", [BlockPair(0, 0, BLOCKS), BlockPair(0, 0, -1)])
def test_stream_does_not_request_blocks_without_a_destination(pair):
    link = FakeLink([0])
    own = torch.zeros(BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    with pytest.raises(BlockOutOfRange):
        StreamTransport(link, own, SHAPE, SHAPE).copy(TRANSFER, [pair])
    assert link.reads == []


@pytest.mark.parametrize(
    "pair", [BlockPair(1, BLOCKS, 0), BlockPair(1, -1, 0), BlockPair(1, 0, BLOCKS), BlockPair(1, 0, -1)]
)
def test_shared_memory_copies_nothing_if_any_block_is_out_of_range(mapped, pair):
    transport, own = mapped
    with pytest.raises(BlockOutOfRange):
        transport.copy(TRANSFER, [BlockPair(0, 0, 5), pair])
    assert not own.any()


def test_measuring_writes_no_pool(mapped):
    transport, own = mapped
    rate = transport.measure(1 << 20)
    assert rate.bytes == BLOCKS * BLOCK_BYTES
    assert rate.gb_per_s > 0
    assert not own.any()


def test_measuring_a_stream_counts_its_bytes():
    own = torch.zeros(SHAPE.part_bytes, dtype=torch.uint8)
    rate = StreamTransport(FakeLink([]), own, SHAPE, SHAPE).measure(1000)
    assert rate.bytes == 1000
    assert not own.any()


def test_rate_is_in_billions_of_bytes_per_second():
    assert LinkRate(3_000_000_000, 1.5).gb_per_s == 2.0
    assert LinkRate(0, 0.0).gb_per_s == 0.0


def test_runs_are_as_long_as_neighbours_last():
    pairs = [BlockPair(index, source, index) for index, source in enumerate([4, 5, 7, 8, 9, 2])]
    runs = split_runs(pairs, lambda left, right: right.source == left.source + 1)
    assert [[pair.source for pair in run] for run in runs] == [[4, 5], [7, 8, 9], [2]]
    assert list(split_runs([], lambda left, right: True)) == []


@pytest.mark.parametrize("message_bytes", [7, BLOCK_BYTES])
@pytest.mark.parametrize("parts", [(1, 1), (2, 1), (1, 2), (2, 4)], ids=str)
def test_every_byte_of_a_first_message_is_compared(parts: tuple[int, int], message_bytes: int) -> None:
    """The source sends each part's share of the block, one after the other."""
    block = torch.arange(1, BLOCK_BYTES + 1, dtype=torch.uint8).view(2, BLOCK_BYTES // 2)  # two rows
    source, own = (PoolShape(BLOCKS, BLOCK_BYTES, rows=2, parts=each) for each in parts)
    pool = torch.zeros(own.parts, BLOCKS, own.part_block_bytes, dtype=torch.uint8)
    pool[:, 3] = block.view(2, own.parts, -1).transpose(0, 1).reshape(own.parts, -1)
    sent = block.view(2, source.parts, -1).transpose(0, 1).flatten()

    class Link(FakeLink):
        def read(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Iterator[bytes]:
            assert (first_block, num_blocks) == (5, 1)
            return self._pieces(bytes(sent.tolist()))

    def compare() -> None:
        compare_beginning(Link([], message_bytes), pool.flatten(), source, own, TRANSFER, BlockPair(5, 0, 3))

    compare()
    for place in range(BLOCK_BYTES):
        sent[place] ^= 1
        with pytest.raises(ChecksumDiffers) if place < message_bytes else nullcontext():
            compare()
        sent[place] ^= 1


def test_silent_source_is_an_error() -> None:
    with pytest.raises(CopyBroken, match="sent no bytes"):
        compare_beginning(FakeLink([], missing=0), source_pool(), SHAPE, SHAPE, TRANSFER, BlockPair(0, 0, 3))

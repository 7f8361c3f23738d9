"""Pools cut by tensor parallelism into 1, 2 or 4 parts on either side: every head lands where it belongs."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from baton.engine.kv_cache.layout import KvLayout
from baton.kvtransfer.group_messages import HEADER_BYTES, MessageLayout, Packer, blocks_per_message
from baton.kvtransfer.shared_memory import SharedMemoryTransport, SharedPool, open_peer
from baton.kvtransfer.slices import PoolShape, Span, plan_slices, plan_spans
from baton.kvtransfer.stream import StreamTransport
from baton.kvtransfer.transport import BlockOutOfRange, BlockPair

LAYERS, HEADS, TOKENS, HEAD_DIM = 3, 4, 4, 6
BLOCKS = 5
DEGREES = list(itertools.product((1, 2, 4), repeat=2))
DTYPES = [torch.float32, torch.int8, torch.float8_e5m2]
PAIRS = [BlockPair(0, 3, 1), BlockPair(1, 4, 2), BlockPair(2, 0, 4)]  # two that go together, one alone


def layout(dtype: torch.dtype, heads: int = HEADS) -> KvLayout:
    return KvLayout(LAYERS, heads, TOKENS, HEAD_DIM, dtype)


def shape(dtype: torch.dtype, parts: int) -> PoolShape:
    return PoolShape(BLOCKS, layout(dtype).block_bytes, 2 * LAYERS, parts)


def cut(whole: torch.Tensor, dtype: torch.dtype, parts: int) -> torch.Tensor:
    """What each rank of `parts` would hold of a pool of one, made with the layout that ranks use themselves."""
    heads = HEADS // parts
    pool = layout(dtype).view(whole, BLOCKS)
    ranks = []
    for rank in range(parts):
        storage = torch.zeros(BLOCKS * layout(dtype, heads).block_bytes, dtype=torch.uint8)
        own = layout(dtype, heads).view(storage, BLOCKS)
        own.data.view(torch.uint8).copy_(pool.data[:, :, :, rank * heads : (rank + 1) * heads].view(torch.uint8))
        if own.scales is not None and pool.scales is not None:
            own.scales.view(torch.uint8).copy_(
                pool.scales[:, :, :, rank * heads : (rank + 1) * heads].view(torch.uint8)
            )
        ranks.append(storage)
    return torch.cat(ranks)


def whole_pool(dtype: torch.dtype, seed: int) -> torch.Tensor:
    size = BLOCKS * layout(dtype).block_bytes
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def after_copies(dtype: torch.dtype) -> torch.Tensor:
    """The destination, were it of one part, when the source was."""
    expected = whole_pool(dtype, 2).view(BLOCKS, -1)
    for pair in PAIRS:
        expected[pair.destination] = whole_pool(dtype, 1).view(BLOCKS, -1)[pair.source]
    return expected.flatten()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("source_parts", "own_parts"), DEGREES)
def test_blocks_of_a_mapped_pool_are_recut(source_parts: int, own_parts: int, dtype: torch.dtype) -> None:
    shared = SharedPool.create(BLOCKS * layout(dtype).block_bytes)
    shared.tensor.copy_(cut(whole_pool(dtype, 1), dtype, source_parts))
    own = cut(whole_pool(dtype, 2), dtype, own_parts)
    transport = SharedMemoryTransport(
        open_peer(shared.handle), own, shape(dtype, source_parts), shape(dtype, own_parts)
    )
    assert transport.copy(b"", PAIRS) == len(PAIRS) * layout(dtype).block_bytes
    assert torch.equal(own, cut(after_copies(dtype), dtype, own_parts))
    transport.close()
    shared.close()


@dataclass
class PoolLink:
    """Sends blocks of a pool, of which logical block i is the source of PAIRS[i]; 7 bytes at a time."""

    pool: torch.Tensor
    parts: int

    def read(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Iterator[bytes]:
        parts = self.pool.view(self.parts, BLOCKS, -1)
        sent = [parts[:, pair.source].flatten() for pair in PAIRS[first_block : first_block + num_blocks]]
        for piece in torch.cat(sent).split(7):
            yield bytes(piece.tolist())

    def probe(self, nbytes: int) -> Iterator[bytes]:
        yield bytes(nbytes)


@pytest.mark.parametrize(("source_parts", "own_parts"), DEGREES)
def test_blocks_of_a_stream_are_recut(source_parts: int, own_parts: int) -> None:
    dtype = torch.int8
    own = cut(whole_pool(dtype, 2), dtype, own_parts)
    link = PoolLink(cut(whole_pool(dtype, 1), dtype, source_parts), source_parts)
    apart = own.view(own_parts, -1).unbind()
    transport = StreamTransport(link, apart, shape(dtype, source_parts), shape(dtype, own_parts))
    assert transport.copy(b"", PAIRS) == len(PAIRS) * layout(dtype).block_bytes
    assert torch.equal(own, cut(after_copies(dtype), dtype, own_parts))


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize(("source_parts", "own_parts"), DEGREES)
def test_blocks_in_messages_are_recut(source_parts: int, own_parts: int, by_kernel: bool) -> None:
    dtype = torch.int8
    source, own = shape(dtype, source_parts), shape(dtype, own_parts)
    agreed = MessageLayout(source, own, blocks_per_message(source))
    message = torch.full((agreed.message_bytes,), 0xEE, dtype=torch.uint8)
    pool = cut(whole_pool(dtype, 2), dtype, own_parts)
    packer = Packer(cut(whole_pool(dtype, 1), dtype, source_parts), source, agreed, reads=True)
    unpacker = Packer(pool.view(own_parts, -1).unbind(), own, agreed, reads=False)
    packer._on_cpu = unpacker._on_cpu = not by_kernel  # as on a GPU
    sent = packer.gather([pair.source for pair in PAIRS], message)
    assert sent == len(PAIRS) * layout(dtype).block_bytes
    assert message[HEADER_BYTES + sent :].eq(0xEE).all()
    unpacker.scatter(message, [pair.destination for pair in PAIRS])
    assert torch.equal(pool, cut(after_copies(dtype), dtype, own_parts))


@pytest.mark.parametrize(("source_parts", "own_parts"), DEGREES)
def test_every_byte_of_a_row_is_copied_once(source_parts: int, own_parts: int) -> None:
    source, own = shape(torch.int8, source_parts), shape(torch.int8, own_parts)
    counts = torch.zeros(own_parts, own.row_bytes, dtype=torch.int64)
    for piece in plan_slices(source, own):
        counts[piece.destination_part, piece.destination_offset : piece.destination_offset + piece.width] += 1
        assert piece.source_offset + piece.width <= source.row_bytes
    assert counts.eq(1).all()


def test_pulling_rank_requests_only_its_heads() -> None:
    pieces = plan_slices(shape(torch.int8, 1), shape(torch.int8, 4), [2])
    assert [(piece.destination_part, piece.source_offset) for piece in pieces] == [
        (2, 2 * shape(torch.int8, 4).row_bytes)
    ]


def test_neighbours_on_both_sides_are_one_copy_where_nothing_is_cut() -> None:
    whole = PoolShape(BLOCKS, 48)
    spans = list(plan_spans(PAIRS, plan_slices(whole, whole), whole, whole))
    assert spans == [Span(3 * 48, 48, 1, 96, 96, 96), Span(0, 4 * 48, 1, 48, 48, 48)]


@pytest.mark.parametrize("pair", [BlockPair(0, BLOCKS, 0), BlockPair(0, 0, BLOCKS), BlockPair(0, -1, 0)])
def test_missing_blocks_are_rejected(pair: BlockPair) -> None:
    whole = PoolShape(BLOCKS, 48)
    with pytest.raises(BlockOutOfRange):
        list(plan_spans([pair], plan_slices(whole, whole), whole, whole))

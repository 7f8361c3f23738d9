"""The stream writes into pools that numpy cannot see, as those on a GPU are."""

from collections.abc import Iterator

import pytest
import torch

from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.stream import StreamTransport
from baton.kvtransfer.transport import BlockPair

BLOCK_BYTES = 48
SHAPE = PoolShape(12, BLOCK_BYTES)
SENT = bytes(range(4 * BLOCK_BYTES))
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Link:
    def read(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Iterator[bytes]:
        data = SENT[first_block * BLOCK_BYTES : (first_block + num_blocks) * BLOCK_BYTES]
        for start in range(0, len(data), 7):
            yield data[start : start + 7]

    def probe(self, nbytes: int) -> Iterator[bytes]:
        yield bytes(nbytes)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_land_where_they_belong_without_numpy(device: str) -> None:
    pool = torch.zeros(12 * BLOCK_BYTES, dtype=torch.uint8, device=device)
    transport = StreamTransport(Link(), pool, SHAPE, SHAPE)
    transport._array = None  # on a GPU it is None anyway
    pairs = [BlockPair(0, 5, 3), BlockPair(1, 6, 4), BlockPair(3, 2, 9)]
    assert transport.copy(b"t" * 16, pairs) == 3 * BLOCK_BYTES
    expected = torch.zeros(12, BLOCK_BYTES, dtype=torch.uint8)
    sent = torch.tensor(list(SENT), dtype=torch.uint8).view(4, BLOCK_BYTES)
    for pair in pairs:
        expected[pair.destination] = sent[pair.logical]
    assert pool.cpu().equal(expected.flatten())

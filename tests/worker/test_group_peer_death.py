"""A source that dies while its messages are on their way: a named error in time, and nothing left."""

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import torch

from baton.kvtransfer.process_group import GroupOptions
from baton.kvtransfer.puller import PullThread
from baton.kvtransfer.transport import BlockPair
from baton.worker.transfer.peers import PeerFailed, Peers
from tests.fixtures import group_source
from tests.fixtures.group_source import BLOCK_BYTES, BLOCKS, ID, describe, pool_bytes
from tests.fixtures.preloaded import FORKING
from tests.fixtures.session_client import eventually
from tests.fixtures.sockets import tcp_sockets

PAIRS = [BlockPair(block, block, BLOCKS - 1 - block) for block in range(BLOCKS)]
TIMEOUT_S = 10.0  # of a group; gloo holds what is cut off in the middle of a message for so long
NOTICED_S = 8.0  # at once, on a machine that is not busy


class Source:
    def __init__(self, messages: int | None = None) -> None:
        self._connection, theirs = FORKING.Pipe()
        self.process = FORKING.Process(target=group_source.run, args=(theirs, messages))
        self.process.start()
        theirs.close()
        self.endpoint = f"127.0.0.1:{self._connection.recv()}"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._connection.close()


@pytest.fixture
def sources() -> Iterator[tuple[Source, Source]]:
    """One that dies after two messages, and one that lives."""
    dying, living = Source(messages=2), Source()
    yield dying, living
    for source in (dying, living):
        source.end()


@asynccontextmanager
async def reading(timeout_s: float) -> AsyncIterator[tuple[Peers, torch.Tensor]]:
    pool = torch.zeros(BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    groups = GroupOptions("gloo", "lo", pool.device, timeout_s)
    peers = Peers(describe(b"r" * 16), pool, PullThread(None), "gloo", 10.0, groups)
    yield peers, pool.view(BLOCKS, BLOCK_BYTES)
    await peers.close()


async def test_source_killed_in_mid_transfer_is_named_and_the_next_one_pairs(sources: tuple[Source, Source]) -> None:
    dying, living = sources
    expected = pool_bytes().view(BLOCKS, BLOCK_BYTES).flip(0)
    async with reading(TIMEOUT_S) as (peers, pool):
        before = len(tcp_sockets(os.getpid()))
        peer = await peers.borrow(dying.endpoint)
        started = time.monotonic()
        with pytest.raises(PeerFailed, match="copy failed") as failed:
            await peers.copy(peer, ID, PAIRS)
        assert time.monotonic() - started < NOTICED_S
        assert "Timed out" not in str(failed.value)
        dying.process.join(10)
        assert dying.process.exitcode == -9
        assert peer.forgotten
        peers.give_back(peer)
        landed = pool.any(dim=1).bool()
        assert torch.equal(pool[landed], expected[landed])  # whole messages or nothing
        await eventually(lambda: not peers._closing)
        await eventually(lambda: len(tcp_sockets(os.getpid())) <= before)

        peer = await peers.borrow(living.endpoint)
        copied = await peers.copy(peer, ID, PAIRS)
        assert copied.bytes == BLOCKS * BLOCK_BYTES
        assert torch.equal(pool, expected)
        peers.give_back(peer)

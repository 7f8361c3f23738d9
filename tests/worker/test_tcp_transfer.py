"""KV over TCP between real servicers: which pairs use it, what may be read, and what comes of a source that is lost."""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
import torch

from baton.engine.request import Reservation
from baton.kvtransfer.transport import BlockOutOfRange, BlockPair, CopyRefused, UnknownTransfer
from baton.protos import kv_transfer_pb2
from baton.worker.transfer.peers import PeerFailed
from baton.worker.transfer.reader import SourceLost, TransferFailed
from baton.worker.transfer.tcp_links import looked_up_on
from tests.fixtures.session_client import eventually
from tests.fixtures.worker_stack import BLOCK_BYTES, DecodeStack, PrefillStack, compute_prompt, linked, running

ID = b"t" * 16


@asynccontextmanager
async def both(transport: str = "auto") -> AsyncIterator[tuple[PrefillStack, DecodeStack]]:
    """Auto is as between two hosts: the source's pool is not in shared memory."""
    async with (
        running(PrefillStack(shared=False)) as prefill,
        running(DecodeStack(transport=transport)) as decode,  # type: ignore[arg-type]
    ):
        yield prefill, decode


async def test_hosts_without_anything_faster_use_tcp_and_name_why() -> None:
    async with both() as (prefill, decode):
        await compute_prompt(prefill, ID)
        pull = await decode.reader.pull(prefill.endpoint, ID, Reservation((7, 2, 5), 0))
        assert (pull.transport, pull.bytes) == ("tcp", 3 * BLOCK_BYTES)
        pools = [stack.memory.tensor.view(-1, BLOCK_BYTES) for stack in (decode, prefill)]
        assert torch.equal(pools[0][[7, 2, 5]], pools[1][:3])
        [link] = decode.peers.links
        assert (link.transport, link.gb_per_s > 0) == ("tcp", True)
        assert "shared_memory: the peer's pool is not in shared memory" in link.fallback


async def test_port_that_lets_no_one_in_is_replaced_by_grpc_unless_tcp_was_demanded() -> None:
    async with both() as (prefill, decode):
        prefill.tcp.close()
        await compute_prompt(prefill, ID)
        pull = await decode.reader.pull(prefill.endpoint, ID, Reservation((7, 2, 5), 0))
        assert pull.transport == "grpc"
        [link] = decode.peers.links
        assert f"tcp: 127.0.0.1 port {prefill.tcp.port}: " in link.fallback
        async with running(DecodeStack(transport="tcp")) as demanding:
            with pytest.raises(PeerFailed, match=f"port {prefill.tcp.port}"):
                await demanding.peers.borrow(prefill.endpoint)


async def test_only_blocks_of_the_transfer_below_its_watermark_are_read() -> None:
    async with both("tcp") as (prefill, decode), linked(prefill, decode) as peer:
        await compute_prompt(prefill, ID)
        copy = peer.transport.copy
        for identity, pairs in (
            (b"?" * 16, [BlockPair(0, 0, 3)]),
            (ID, [BlockPair(2, 2, 3), BlockPair(3, 3, 4)]),
            (ID, [BlockPair(2**60, 0, 3)]),
        ):
            with pytest.raises(CopyRefused):
                await asyncio.to_thread(copy, identity, pairs)
        assert not decode.storage.any()
        await decode.reader.pull(prefill.endpoint, ID, Reservation((7, 2, 5), 0))
        assert [each.transport for each in decode.peers.links] == ["tcp"]
        with pytest.raises(CopyRefused, match="has ended"):
            await asyncio.to_thread(copy, ID, [BlockPair(0, 0, 3)])


async def test_range_of_any_length_is_rejected_immediately_over_grpc_too() -> None:
    async with both("grpc") as (prefill, decode), linked(prefill, decode) as peer:
        await compute_prompt(prefill, ID)
        whole = kv_transfer_pb2.TransferRange(transfer_id=ID, first_block=0, num_blocks=2**32 - 1)
        with pytest.raises(grpc.RpcError) as refused:
            async for _ in peer.stub.Read(kv_transfer_pb2.ReadRequest(range=whole), timeout=5.0):
                pass
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await decode.reader.pull(prefill.endpoint, ID, Reservation((7, 2, 5), 0))


async def test_broken_link_ends_the_transfer_and_the_next_one_pairs_again() -> None:
    async with both("tcp") as (prefill, decode):
        async with linked(prefill, decode) as peer:
            await compute_prompt(prefill, ID)
            broken = list(prefill.tcp._connections)
            for connection in broken:
                connection.abort()
            with pytest.raises(SourceLost, match="copy failed"):
                await decode.reader.pull(prefill.endpoint, ID, Reservation((7, 2, 5), 0))
            assert peer.forgotten
        other = secrets.token_bytes(16)
        await compute_prompt(prefill, other, attempt_id=2)
        assert (await decode.reader.pull(prefill.endpoint, other, Reservation((7, 2, 5), 0))).transport == "tcp"
        await eventually(lambda: not set(broken) & set(prefill.tcp._connections))


async def test_source_that_stops_refuses_and_its_blocks_are_not_used() -> None:
    async with both("tcp") as (prefill, decode), linked(prefill, decode):
        await compute_prompt(prefill, ID)
        prefill.tcp.detach()
        with pytest.raises(TransferFailed, match="the source is stopping"):
            await decode.reader.pull(prefill.endpoint, ID, Reservation((7, 2, 5), 0))


async def test_blocks_are_looked_up_on_the_loop_with_the_errors_that_it_raises() -> None:
    def find(transfer_id: bytes, wanted: range) -> list[int]:
        assert threading.current_thread() is threading.main_thread()
        if transfer_id != ID:
            raise UnknownTransfer(transfer_id)
        if wanted.stop > 4:
            raise BlockOutOfRange("too many")
        return list(wanted)

    ask = looked_up_on(asyncio.get_running_loop(), find)
    assert await asyncio.to_thread(ask, ID, 1, 3) == [1, 2, 3]
    with pytest.raises(UnknownTransfer):
        await asyncio.to_thread(ask, b"?" * 16, 1, 3)
    with pytest.raises(BlockOutOfRange):
        await asyncio.to_thread(ask, ID, 2, 3)


def test_stalled_or_finished_loop_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.worker.transfer.tcp_links.LOOK_UP_TIMEOUT_S", 0.05)
    loop = asyncio.new_event_loop()
    ask = looked_up_on(loop, lambda transfer_id, wanted: list(wanted))
    with pytest.raises(TimeoutError):
        ask(ID, 0, 1)  # it does not run
    loop.close()
    with pytest.raises(TimeoutError):
        ask(ID, 0, 1)

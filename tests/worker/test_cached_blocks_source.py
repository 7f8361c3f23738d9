"""KvTransferService asked for cached blocks by hash: the same on both workers, and never at the cost of their work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import BLOCK_BYTES, BLOCKS, DecodeStack, PrefillStack, prompt_command, running

ID = b"t" * 16
HASHES = [bytes([index]) * 32 for index in range(3)]


@asynccontextmanager
async def served(stack: Any) -> AsyncIterator[Any]:
    """The stack's KvTransferService; the first two of HASHES are in its cache."""
    async with running(stack), grpc.aio.insecure_channel(stack.endpoint) as channel:
        await stack.cache(HASHES[:2])
        yield kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
        await eventually(lambda: not stack.pool._watches)


def opening(stack: Any, hashes: list[bytes] = HASHES) -> kv_transfer_pb2.OpenRequest:
    pool_id = stack.transfers._description.pool_id
    return kv_transfer_pb2.OpenRequest(transfer_id=ID, pool_id=pool_id, block_hashes=hashes)


async def closed_valid(stub: Any, complete: bool = True) -> bool:
    return bool((await stub.Close(kv_transfer_pb2.CloseRequest(transfer_id=ID, complete=complete))).valid)


async def refusal(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asyncio.wait_for(call.read(), 20)
    return refused.value.code()


@pytest.mark.parametrize("kind", [DecodeStack, PrefillStack])
async def test_longest_prefix_in_the_cache_is_given_and_nothing_is_held(kind: Any) -> None:
    async with served(stack := kind()) as stub:
        call = stub.Open(opening(stack))
        message = await call.read()
        assert message.watermark_blocks == len(message.blocks) == 2
        assert message.HasField("end") and not message.end.first_tokens
        assert stack.counts.held == 0
        assert await closed_valid(stub)
        assert await call.read() is grpc.aio.EOF


async def test_missing_blocks_are_reported() -> None:
    async with served(stack := DecodeStack()) as stub:
        message = await stub.Open(opening(stack, HASHES[2:])).read()
        assert message.watermark_blocks == 0 and message.HasField("end")
        assert await closed_valid(stub)


async def test_bytes_of_cached_blocks_can_be_read_as_a_stream() -> None:
    async with served(stack := DecodeStack()) as stub:
        message = await stub.Open(opening(stack)).read()
        asked = kv_transfer_pb2.TransferRange(transfer_id=ID, first_block=0, num_blocks=2)
        data = b"".join([piece.data async for piece in stub.Read(kv_transfer_pb2.ReadRequest(range=asked))])
        pool = bytes(stack.storage.tolist())
        assert data == b"".join(pool[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] for block in message.blocks)
        assert await closed_valid(stub)


async def test_blocks_that_were_overwritten_meanwhile_are_not_valid() -> None:
    async with served(stack := DecodeStack()) as stub:
        await stub.Open(opening(stack)).read()
        await stack.on_engine(lambda: [stack.pool.release(block) for block in stack.pool.allocate(BLOCKS)])
        assert not await closed_valid(stub)


async def closed_corrupt(stub: Any) -> bool:
    return bool((await stub.Close(kv_transfer_pb2.CloseRequest(transfer_id=ID, corrupt=True))).valid)


async def test_blocks_that_a_reader_finds_corrupt_are_not_given_again() -> None:
    async with served(stack := DecodeStack()) as stub:
        await stub.Open(opening(stack)).read()
        assert await closed_corrupt(stub)
        assert await stack.on_engine(lambda: stack.pool.touch(HASHES)) == ()


async def test_overwritten_blocks_are_not_reported_as_corrupt() -> None:
    async with served(stack := DecodeStack()) as stub:
        await stub.Open(opening(stack)).read()
        await stack.on_engine(lambda: [stack.pool.release(block) for block in stack.pool.allocate(BLOCKS)])
        await stack.cache(HASHES)  # others lie there now
        assert not await closed_corrupt(stub)
        assert len(await stack.on_engine(lambda: stack.pool.touch(HASHES))) == len(HASHES)


async def test_watch_of_a_reader_that_was_lost_ends_with_its_lease() -> None:
    async with served(stack := DecodeStack(lease_s=0.05)) as stub:
        call = stub.Open(opening(stack))
        await call.read()
        assert stack.pool._watches
        call.cancel()
        await eventually(lambda: not stack.pool._watches)
        assert stack.table.counters.expired == 1
        assert not await closed_valid(stub)


async def test_reader_that_gives_up_ends_the_watch() -> None:
    async with served(stack := DecodeStack()) as stub:
        await stub.Open(opening(stack)).read()
        assert not await closed_valid(stub, complete=False)


async def test_reader_that_leaves_while_the_engine_computes_leaves_nothing_behind() -> None:
    async with served(stack := PrefillStack(lease_s=0.05)) as stub, SessionClient(stack.endpoint) as router:
        stack.runner.hold()
        await router.send(prefill=prompt_command(1, b"p" * 16, tokens=stack.chunk_tokens))
        await eventually(stack.runner.stepping.is_set)
        call = stub.Open(opening(stack))
        await eventually(lambda: stack.loop._thread._calls.qsize())
        call.cancel()
        stack.runner.let_go()
        await router.one("first_step", 1)
        await eventually(lambda: not stack.pool._watches)


async def test_id_is_used_once() -> None:
    async with served(stack := DecodeStack()) as stub:
        call = stub.Open(opening(stack))
        await call.read()
        assert await refusal(stub.Open(opening(stack))) is grpc.StatusCode.NOT_FOUND
        assert await closed_valid(stub)
        assert await refusal(stub.Open(opening(stack))) is grpc.StatusCode.NOT_FOUND


async def test_more_hashes_than_blocks_are_refused() -> None:
    async with served(stack := DecodeStack()) as stub:
        too_many = [bytes(32)] * (BLOCKS + 1)
        assert await refusal(stub.Open(opening(stack, too_many))) is grpc.StatusCode.INVALID_ARGUMENT


async def test_open_by_hash_after_the_engine_stopped_is_unavailable() -> None:
    async with served(stack := DecodeStack()) as stub:
        await asyncio.to_thread(stack.loop.stop, 5.0)
        assert await refusal(stub.Open(opening(stack))) is grpc.StatusCode.UNAVAILABLE

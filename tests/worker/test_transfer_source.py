"""KvTransferService of a prefill worker over real gRPC: who may read what, and how a reader learns that it is over."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from tests.fixtures.session_client import WAIT_S, SessionClient, eventually
from tests.fixtures.worker_stack import BLOCK_BYTES, FINGERPRINT, PrefillStack, prompt_command, running

ID = b"t" * 16


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[PrefillStack, Any, SessionClient]]:
    async with (
        running(PrefillStack(**options)) as stack,
        grpc.aio.insecure_channel(stack.endpoint) as channel,
        SessionClient(stack.endpoint) as router,
    ):
        yield stack, kv_transfer_pb2_grpc.KvTransferServiceStub(channel), router


def opening(stack: PrefillStack, identity: bytes = ID) -> kv_transfer_pb2.OpenRequest:
    return kv_transfer_pb2.OpenRequest(transfer_id=identity, pool_id=stack.transfers._description.pool_id)


async def closed_valid(stub: Any, complete: bool = True) -> bool:
    return bool((await stub.Close(kv_transfer_pb2.CloseRequest(transfer_id=ID, complete=complete))).valid)


async def status_of(call: Any) -> grpc.StatusCode:
    """How a stream ends; what it still says is read past."""
    async with asyncio.timeout(WAIT_S):
        try:
            while await call.read() is not grpc.aio.EOF:
                continue
        except grpc.aio.AioRpcError as error:
            return error.code()
        return await call.code()


async def test_early_reader_waits_and_follows_the_chunks() -> None:
    async with served() as (stack, stub, router):
        call = stub.Open(opening(stack))
        await eventually(lambda: len(stack.table) == 1)
        await router.send(prefill=prompt_command(1, ID, tokens=10))
        messages = [await call.read()]
        while not messages[-1].HasField("end"):
            messages.append(await call.read())
        blocks = [block for message in messages for block in message.blocks]
        assert messages[-1].watermark_blocks == len(blocks) == 3
        data = b""
        async for piece in stub.Read(
            kv_transfer_pb2.ReadRequest(
                range=kv_transfer_pb2.TransferRange(transfer_id=ID, first_block=1, num_blocks=2)
            )
        ):
            data += piece.data
        pool = bytes(stack.memory.tensor.tolist())
        assert data == b"".join(pool[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] for block in blocks[1:])
        assert await closed_valid(stub)
        assert await status_of(call) is grpc.StatusCode.OK


async def test_parked_reader_waits_within_a_bound() -> None:
    async with served(park_s=0.05) as (stack, stub, _):
        call = stub.Open(opening(stack))
        assert await status_of(call) is grpc.StatusCode.NOT_FOUND
        assert len(stack.table) == 0


async def test_reader_of_a_cancelled_prompt_is_told() -> None:
    async with served() as (stack, stub, router):
        stack.runner.hold()
        call = stub.Open(opening(stack))
        await eventually(lambda: len(stack.table) == 1)
        await router.send(prefill=prompt_command(1, ID))
        await eventually(stack.runner.stepping.is_set)
        await router.cancel(1)
        assert await status_of(call) is grpc.StatusCode.NOT_FOUND
        stack.runner.let_go()


async def test_lost_reader_starts_the_lease_and_its_pages_are_freed() -> None:
    async with served(lease_s=0.05) as (stack, stub, router):
        call = stub.Open(opening(stack))
        await eventually(lambda: len(stack.table) == 1)  # else its lease may run out before the reader comes
        await router.send(prefill=prompt_command(1, ID))
        await router.one("first_step", 1)
        await call.read()
        assert stack.counts.held == 3
        call.cancel()
        await stack.all_free()
        assert not await closed_valid(stub)


async def test_open_reader_keeps_the_lease() -> None:
    async with served(lease_s=0.05) as (stack, stub, router):
        call = stub.Open(opening(stack))
        await eventually(lambda: len(stack.table) == 1)  # else its lease may run out before the reader comes
        await router.send(prefill=prompt_command(1, ID))
        await router.one("first_step", 1)
        await router.send(prefill=prompt_command(2, secrets.token_bytes(16)))
        await eventually(lambda: stack.table.counters.expired == 1)  # the other one, which nobody reads
        assert await closed_valid(stub)
        assert await status_of(call) is grpc.StatusCode.OK


async def test_second_close_is_stale() -> None:
    async with served() as (_, stub, router):
        await router.send(prefill=prompt_command(1, ID))
        await router.one("first_step", 1)
        assert await closed_valid(stub)
        assert not await closed_valid(stub)


async def test_close_before_the_end_frees_the_prompt_and_is_not_valid() -> None:
    async with served() as (stack, stub, router):
        stack.runner.hold()
        await router.send(prefill=prompt_command(1, ID))
        await eventually(stack.runner.stepping.is_set)
        assert not await closed_valid(stub)
        assert not stack.service.busy
        stack.runner.let_go()


async def test_only_one_may_read_a_transfer() -> None:
    async with served() as (stack, stub, router):
        first = stub.Open(opening(stack))
        await eventually(lambda: len(stack.table) == 1)
        assert await status_of(stub.Open(opening(stack))) is grpc.StatusCode.NOT_FOUND
        first.cancel()
        await router.send(prefill=prompt_command(1, ID))
        await router.cancel(1)


@pytest.mark.parametrize("identity", [b"", b"short"])
async def test_id_of_the_wrong_length_is_refused(identity: bytes) -> None:
    async with served() as (stack, stub, _):
        assert await status_of(stub.Open(opening(stack, identity))) is grpc.StatusCode.INVALID_ARGUMENT


async def test_blocks_past_the_watermark_are_not_read() -> None:
    async with served() as (_, stub, router):
        await router.send(prefill=prompt_command(1, ID))
        await router.one("first_step", 1)
        asked = kv_transfer_pb2.TransferRange(transfer_id=ID, first_block=0, num_blocks=4)
        assert await status_of(stub.Read(kv_transfer_pb2.ReadRequest(range=asked))) is grpc.StatusCode.INVALID_ARGUMENT
        assert await closed_valid(stub)


async def test_pools_that_do_not_fit_are_not_paired() -> None:
    async with served() as (_, stub, _):
        reader = kv_transfer_pb2.PoolDescription(fingerprint=b"other", block_bytes=BLOCK_BYTES, num_blocks=1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Pair(kv_transfer_pb2.PairRequest(reader=reader))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "reader.fingerprint" in str(refused.value.details()) and FINGERPRINT.hex() in str(
            refused.value.details()
        )


async def test_readers_are_released_when_the_worker_stops() -> None:
    async with served() as (stack, stub, _):
        call = stub.Open(opening(stack))
        await eventually(lambda: len(stack.table) == 1)
        stack.transfers.close()
        assert await status_of(call) is grpc.StatusCode.NOT_FOUND
        assert await status_of(stub.Open(opening(stack))) is grpc.StatusCode.UNAVAILABLE

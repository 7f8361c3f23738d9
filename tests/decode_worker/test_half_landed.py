"""A prompt whose prefill worker goes while it is pulled: what it has confirmed is kept, and nothing else."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from baton.protos import kv_transfer_pb2, session_pb2
from baton.worker.transfer.reader import ConfirmedBlocks, Progress, keep_confirming
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    DecodeStack,
    PrefillStack,
    prompt_command,
    running,
    start_command,
)

TOKENS = 26
BLOCKS = 7  # of the prompt, the last of them part full
HASHES = [bytes([number]) * 32 for number in range(1, BLOCKS)]
OFFERED = 4  # blocks, in two steps
NEVER_S = 1e6


@dataclass
class Three:
    """Two prefill workers, whose pools differ in every byte, a decode worker, and a router's sessions."""

    first: PrefillStack
    second: PrefillStack
    decode: DecodeStack
    to_first: SessionClient
    to_second: SessionClient
    router: SessionClient

    async def begin(self) -> None:
        """Attempt 1, of which the first prefill worker computes two chunks and no more; decode copies them."""
        self.first.runner.hold_after(2)
        await self._ask(1, self.first, self.to_first)
        await eventually(lambda: self.decode.pulls.copied_blocks == OFFERED)

    async def is_certain(self, blocks: int) -> None:
        await eventually(lambda: [answer.confirmed.blocks for answer in self.decode.service._table] == [blocks])

    async def lose_first(self) -> None:
        await self.first.server.stop(0)
        [failed] = await eventually(lambda: self.router.about("failed", 1))
        assert failed.reason == session_pb2.FAILURE_REASON_TRANSFER

    async def again(self) -> session_pb2.Landed:
        """Attempt 2, with the second prefill worker."""
        await self._ask(2, self.second, self.to_second)
        landed = await self.router.one("landed", 2)
        assert isinstance(landed, session_pb2.Landed)
        await eventually(lambda: len(self.router.tokens(2)) == 4)
        return landed

    async def _ask(self, attempt_id: int, prefill: PrefillStack, to_prefill: SessionClient) -> None:
        identity, fields = secrets.token_bytes(16), {"tokens": TOKENS, "block_hashes": HASHES}
        await self.router.send(start=start_command(attempt_id, identity, prefill.endpoint, **fields))
        await to_prefill.send(prefill=prompt_command(attempt_id, identity, **fields))


@asynccontextmanager
async def three(confirm_period_s: float = 0.01, transport: Any = "auto") -> AsyncIterator[Three]:
    first = PrefillStack()
    async with (
        running(PrefillStack()) as second,
        running(DecodeStack(transport=transport, confirm_period_s=confirm_period_s)) as decode,
        running(first) as first,
        SessionClient(first.endpoint) as to_first,
        SessionClient(second.endpoint) as to_second,
        SessionClient(decode.endpoint) as router,
    ):
        second.memory.tensor.neg_()
        yield Three(first, second, decode, to_first, to_second, router)
        first.runner.let_go()
        for prompt in first.service._requests:  # its connections may be gone
            first.service._abandon(prompt)
        await decode.all_free()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "grpc"])
async def test_next_attempt_pulls_only_unconfirmed_blocks(transport: Any) -> None:
    async with three(transport=transport) as world:
        await world.begin()
        await world.is_certain(OFFERED)
        await world.lose_first()
        landed = await world.again()
        assert landed.cached_tokens == OFFERED * BLOCK_TOKENS
        assert landed.bytes == (BLOCKS - OFFERED) * BLOCK_BYTES
        for number, block in enumerate(await world.decode.on_engine(lambda: world.decode.pool.touch(HASHES))):
            source = world.first if number < OFFERED else world.second
            assert world.decode.storage.view(-1, BLOCK_BYTES)[block].equal(
                source.memory.tensor.view(-1, BLOCK_BYTES)[number]
            )


async def test_block_that_was_copied_and_not_confirmed_is_pulled_again() -> None:
    async with three(confirm_period_s=NEVER_S) as world:
        await world.begin()
        await world.lose_first()
        assert world.decode.counts.cached == 0
        landed = await world.again()
        assert landed.cached_tokens == 0
        assert landed.bytes == BLOCKS * BLOCK_BYTES


async def test_retrying_router_loses_no_confirmed_block() -> None:
    """It learns of the death first, and its next attempt is right behind the cancel."""
    async with three() as world:
        await world.begin()
        await world.is_certain(OFFERED)
        await world.router.send(cancel=session_pb2.Cancel(attempt_id=1, keep_landed=True))
        assert (await world.again()).cached_tokens == OFFERED * BLOCK_TOKENS


async def test_next_attempt_waits_for_the_copy_under_way() -> None:
    async with three() as world:
        await world.begin()
        await world.is_certain(OFFERED)
        world.decode.pulls.hold()
        world.first.runner.let_go()
        await eventually(lambda: world.decode.pulls.held)
        await world.router.send(cancel=session_pb2.Cancel(attempt_id=1, keep_landed=True))
        identity, fields = secrets.token_bytes(16), {"tokens": TOKENS, "block_hashes": HASHES}
        await world.router.send(start=start_command(2, identity, world.second.endpoint, **fields))
        await eventually(lambda: [answer.attempt_id for answer in world.decode.service._table] == [2])
        assert world.decode.counts.cached == 0, "pages were given back under a copy"
        world.decode.pulls.let_go()
        await world.to_second.send(prefill=prompt_command(2, identity, **fields))
        landed = await world.router.one("landed", 2)
        assert landed.cached_tokens == OFFERED * BLOCK_TOKENS


async def test_cancelled_transfer_leaves_no_blocks() -> None:
    async with three() as world:
        await world.begin()
        await world.is_certain(OFFERED)
        await world.router.send(cancel=session_pb2.Cancel(attempt_id=1))
        await world.decode.all_free()
        assert world.decode.counts.cached == 0


async def test_confirmed_block_withdrawn_by_its_source_is_dropped() -> None:
    """The prompt may have failed there: logits that are not finite make all of its KV suspect."""
    async with three() as world:
        await world.begin()
        await world.is_certain(OFFERED)
        await world.to_first.send(cancel=session_pb2.Cancel(attempt_id=1))
        await eventually(lambda: world.router.about("failed", 1))
        await world.decode.all_free()
        assert world.decode.counts.cached == 0


class _Source:
    """Answers while more lands."""

    def __init__(self, progress: Progress, answers: list[bool]) -> None:
        self._progress, self._answers = progress, answers

    async def Confirm(self, request: Any, timeout: float) -> kv_transfer_pb2.ConfirmResponse:
        self._progress.landed_blocks += 2
        return kv_transfer_pb2.ConfirmResponse(pinned=self._answers.pop(0))


async def test_block_landing_after_the_query_is_not_in_its_answer() -> None:
    progress, confirmed = Progress(opened=0.0, landed_blocks=2), ConfirmedBlocks()
    await keep_confirming(_Source(progress, [True, False]), bytes(16), progress, confirmed, 0.0)  # type: ignore[arg-type]
    assert confirmed.blocks == 2, "neither what landed meanwhile, nor what the source would not vouch for"

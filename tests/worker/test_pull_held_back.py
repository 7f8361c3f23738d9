"""A client's first token waits for nobody's copy: it is there while the KV of its prompt is still held back."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from baton.client import Delta, Finished
from baton.kvtransfer.puller import PullThread
from baton.kvtransfer.transport import BlockPair, LinkRate, Transport
from tests.fixtures.paged import random_prompt
from tests.fixtures.real_workers import real_pair
from tests.fixtures.routed import WAIT_S, reporting, routed
from tests.fixtures.waiting import eventually

ANSWER_TOKENS = 5


class HeldPulls(PullThread):
    """Copies only while it is let go."""

    def __init__(self) -> None:
        super().__init__(None)
        self.let_go = asyncio.Event()
        self.let_go.set()
        self.held = 0

    async def copy(self, transport: Transport, transfer_id: bytes, pairs: Sequence[BlockPair]) -> LinkRate:
        self.held += not self.let_go.is_set()
        await self.let_go.wait()
        return await super().copy(transport, transfer_id, pairs)


async def test_first_token_reaches_the_client_while_the_pull_is_held_back(checkpoint: Path) -> None:
    pulls = HeldPulls()
    async with (
        asyncio.timeout(2 * WAIT_S),
        real_pair(checkpoint, pulls=pulls) as pair,
        reporting(pair),
        routed(f"prefill@{pair.prefill_endpoint}", f"decode@{pair.to_decode.endpoint}") as client,
    ):
        await client.complete([5] * 40, max_tokens=2, ignore_eos=True)  # the canary has passed, and so has a request
        pulls.let_go.clear()
        prompt = random_prompt(100, seed=9)
        events = client.generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        deltas = [event async for event in until_the_first_token(events)]
        await eventually(lambda: pulls.held)
        assert [len(delta.token_ids) for delta in deltas] == [1]

        pulls.let_go.set()
        rest = [event async for event in events]
        assert isinstance(rest[-1], Finished)
        assert sum(len(event.token_ids) for event in rest if isinstance(event, Delta)) == ANSWER_TOKENS - 1


async def until_the_first_token(events: AsyncIterator[object]) -> AsyncIterator[Delta]:
    async for event in events:
        if isinstance(event, Delta):
            yield event
            return

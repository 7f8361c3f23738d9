"""Whoever is slow to take the answer gets more of it at a time, and the same answer."""

import asyncio
from typing import Any

import pytest

from baton.process.errors import DeadlineExceeded, Internal
from baton.protos import baton_pb2
from baton.router.fleet.fleet import WakeUpLimiter
from baton.router.public.service import Responses
from baton.router.request.events import Deadline
from baton.router.types.events import Failed, FailureReason, FirstStep, PrefillTimings, SequenceOutput
from baton.router.types.request import PreparedRequest
from baton.router.types.response import Delta
from tests.router.replay_world import ALPHABET, Fate, World, generation_of, request_of, scheduling_of

ATTEMPT = 1


def output(offset: int, token_id: int, choice: int = 0) -> SequenceOutput:
    return SequenceOutput(ATTEMPT, choice, offset, (token_id,))


class Silent(World):
    """Its workers send only what a test puts into the inbox."""

    def _speak(self, attempt_id: int, request: PreparedRequest, fate: Fate) -> None:
        pass


async def begun(world: World, **shape: Any) -> tuple[Any, "asyncio.Task[Any]"]:
    """The events of a request that was dispatched, and the first of them, which is waited for."""
    events = generation_of(request_of(**shape), scheduling_of(world)).events()
    waiting = asyncio.create_task(anext(events))
    while not world.dispatched:
        if waiting.done():
            await waiting  # raises why there will be no dispatch
        await asyncio.sleep(0)
    return events, waiting


async def test_all_that_has_come_is_taken_at_once() -> None:
    world = Silent([])
    events, waiting = await begun(world, n=2)
    inbox, a, b, timings = world.inboxes[ATTEMPT], ALPHABET[0], ALPHABET[1], PrefillTimings(0.0, (), 0.0, 0)
    inbox.put(FirstStep(ATTEMPT, (output(0, a), output(0, b, choice=1)), timings), 1.0)
    for offset in range(1, 4):
        inbox.put(output(offset, a), 2.0)
    assert await waiting == Delta(0, 0, (a, a, a, a), "aaaa")
    assert await anext(events) == Delta(1, 0, (b,), "b")
    await events.aclose()


async def test_what_came_before_a_failure_goes_out_before_it() -> None:
    world = Silent([])
    events, waiting = await begun(world)
    inbox, a = world.inboxes[ATTEMPT], ALPHABET[0]
    inbox.put(output(0, a), 1.0)
    inbox.put(Failed(ATTEMPT, "d", FailureReason.NONFINITE, ""), 1.0)
    inbox.put(output(1, a), 1.0)
    assert await waiting == Delta(0, 0, (a,), "a")
    with pytest.raises(Internal):
        await anext(events)


async def test_a_deadline_goes_before_all_that_has_come() -> None:
    world = Silent([])
    _, waiting = await begun(world)
    inbox = world.inboxes[ATTEMPT]
    inbox.put(output(0, ALPHABET[0]), 1.0)
    inbox.put_own(Deadline())
    with pytest.raises(DeadlineExceeded):
        await waiting
    assert not world.inboxes and world.ended == 1


def test_a_response_that_is_used_again_keeps_nothing_of_the_last_delta() -> None:
    responses = Responses(baton_pb2.GenerateResponse)
    deltas = [Delta(1, 4, (7, 8), "ab"), Delta(0, 0, (), "c"), Delta(0, 9, (3,), "")]
    for delta in deltas:
        written = baton_pb2.GenerateResponse.FromString(responses.of(delta).SerializeToString()).delta
        assert (written.index, written.offset, tuple(written.token_ids), written.text) == (
            delta.index, delta.offset, delta.token_ids, delta.text
        )  # fmt: skip
        assert not written.HasField("logprobs")


async def test_few_streams_go_on_in_one_turn_of_the_loop_in_the_order_of_coming() -> None:
    turns, went = WakeUpLimiter(at_once=2), list[int]()

    async def stream(number: int) -> None:
        await turns.take()
        went.append(number)

    streams = [asyncio.create_task(stream(number)) for number in range(7)]
    gone = []
    while len(went) < 6:
        await asyncio.sleep(0)  # one turn
        gone.append(len(went))
        if len(gone) == 1:
            streams[3].cancel()  # it waits: nobody else loses a turn by it
    assert went == [0, 1, 2, 4, 5, 6]
    assert all(later - earlier <= 2 for earlier, later in zip([0, *gone], gone, strict=False))
    await asyncio.wait(streams)
    await turns.take()

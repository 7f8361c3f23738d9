"""Whoever is slow to take the answer gets more of it at a time, and the same answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.protos import baton_pb2
from baton.router.fleet.inbox import Inbox, WakeUpLimiter
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import Placement
from baton.router.public.wire import Responses
from baton.router.request.attempt import Attempt
from baton.router.request.retry import AttemptFailed
from baton.router.request.tokens import TokenStream
from baton.router.trace.timeline import Timeline
from baton.router.types.events import Failed, FailureReason, FirstStep, NewTokens, PrefillTimings, SequenceOutput
from baton.router.types.response import Delta

PLACEMENT = Placement("p", "d", 0, 0, 0, 0, 1, 1)
ATTEMPT = 1


class OneInbox:
    """As much of a fleet as an attempt needs."""

    def __init__(self) -> None:
        self.inbox = Inbox(WakeUpLimiter())

    def open(self, attempt_id: int, placement: Placement) -> Inbox:
        return self.inbox


def attempt_on(fleet: OneInbox) -> Attempt:
    sampling: Any = SimpleNamespace(prompt_logprobs=None, beams=None, n=2)
    request: Any = SimpleNamespace(sampling=sampling, token_ids=(1, 2), choices=range(2), answered_tokens=0)
    one: Any = fleet
    attempt = Attempt(ATTEMPT, PLACEMENT, request, Cluster(), one, Timeline(0.0), TokenStream(2))
    attempt.__enter__()
    return attempt


def output(offset: int, token_id: int, choice: int = 0) -> SequenceOutput:
    return SequenceOutput(ATTEMPT, choice, offset, (token_id,))


async def test_all_that_has_come_is_taken_at_once() -> None:
    fleet = OneInbox()
    attempt = attempt_on(fleet)
    fleet.inbox.put(FirstStep(ATTEMPT, (output(0, 5), output(0, 7, choice=1)), PrefillTimings(0.0, (), 0.0, 0)), 1.0)
    for offset in range(1, 4):
        fleet.inbox.put(output(offset, 5 + offset), 2.0)
    assert await attempt.next() == (NewTokens(0, 0, (5, 6, 7, 8), None), NewTokens(1, 0, (7,), None))


async def test_what_came_before_a_failure_goes_out_before_it() -> None:
    fleet = OneInbox()
    attempt = attempt_on(fleet)
    fleet.inbox.put(output(0, 5), 1.0)
    fleet.inbox.put(Failed(ATTEMPT, "d", FailureReason.WORKER_LOST, ""), 1.0)
    fleet.inbox.put(output(1, 6), 1.0)
    assert await attempt.next() == (NewTokens(0, 0, (5,), None),)
    with pytest.raises(AttemptFailed):
        await attempt.next()


async def test_an_expired_inbox_ends_the_wait_and_gives_nothing_more() -> None:
    inbox = Inbox(WakeUpLimiter())
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.expire()
    with pytest.raises(TimeoutError):
        await waiting
    inbox.put(output(0, 5), 1.0)
    with pytest.raises(TimeoutError):
        await inbox.take()


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

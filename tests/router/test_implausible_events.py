"""Numbers that a worker sends about an attempt and that it cannot have: the request ends with a named error."""

import asyncio
import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from baton.process.errors import Internal
from baton.process.wire_bounds import OutOfBounds
from baton.protos import session_pb2
from baton.router.fleet.received import ResponseCheck
from baton.router.fleet.wire import Tag
from baton.router.placement.decide import Placement
from baton.router.request.answer import InconsistentOutput, RequestAnswer
from baton.router.request.effects import RecordTransfer
from baton.router.request.events import Begun
from baton.router.request.resume import AttemptLocation
from baton.router.request.state import RequestState
from baton.router.trace.record import Timeline
from baton.router.types.events import (
    AttemptEvent,
    FirstStep,
    KvReceived,
    PrefillTimings,
    PromptScores,
    SequenceEnd,
    SequenceOutput,
)
from baton.router.types.request import PreparedRequest
from tests.router.replay_world import PROMPT, World, generation_of, new_detokenizer, request_of, scheduling_of

TIMINGS = PrefillTimings(0.0, (1.0,), 1.0, 0)


class Liar(World):
    def __init__(self, event: AttemptEvent) -> None:
        super().__init__([])
        self._event = event

    def dispatch(self, tag: Tag, request: PreparedRequest, placement: Placement) -> None:
        event: Any = self._event
        change = event._replace if isinstance(event, SequenceOutput) else partial(replace, event)
        put = self.inboxes[tag.attempt_id].put
        asyncio.get_running_loop().call_soon(put, change(attempt_id=tag.attempt_id), 0.0)


@pytest.mark.parametrize(
    "event",
    [
        SequenceOutput(0, 0, 4, (7,)),
        SequenceOutput(0, 0, 1 << 31, (7,), SequenceEnd.LENGTH),
        SequenceOutput(0, 0, 0, (7,) * 5),
        SequenceOutput(0, 1, 0, (7,)),
        PromptScores(0, 0, ()),
        PromptScores(0, len(PROMPT), ()),
        FirstStep(0, (), replace(TIMINGS, cached_tokens=len(PROMPT) + 1)),
        FirstStep(0, (), replace(TIMINGS, fetched_tokens=1 << 31)),
        FirstStep(0, (), replace(TIMINGS, restored_tokens=1 << 31)),
        FirstStep(0, (SequenceOutput((1 << 64) - 1, 0, 0, (7,)),), TIMINGS),
        KvReceived(0, 1, 1.0, 0.0, 0.0, 1.0, "grpc", len(PROMPT) + 1),
    ],
    ids=str,
)
async def test_request_fails_at_once_where_a_worker_sends_what_its_attempt_cannot_have(event: AttemptEvent) -> None:
    request, world = request_of(max_tokens=4, stop_token_ids=(), prompt_logprobs=1), Liar(event)
    if isinstance(event, SequenceOutput):
        request = request_of(max_tokens=4, stop_token_ids=())
    async with asyncio.timeout(10.0):
        with pytest.raises(Internal):
            _ = [each async for each in generation_of(request, scheduling_of(world)).events()]
    assert not world.inboxes


@pytest.mark.parametrize("more", [0, 4])
def test_adopted_attempt_may_have_cached_what_the_client_has_not_received_of_the_answer(more: int) -> None:
    state = RequestState(
        request_of(max_tokens=4),
        RequestAnswer(1, (), 0, new_detokenizer),
        Timeline(0.0),
        itertools.count(1),
        most_tries=4,
    )
    state.advance(Begun([AttemptLocation("decode", 9)]), 0.0)
    event = KvReceived(1, 1, 1.0, 0.0, 0.0, 1.0, "grpc", len(PROMPT) + more)
    assert isinstance(state.advance(event, 0.0)[0], RecordTransfer)
    with pytest.raises(InconsistentOutput):
        state.advance(replace(event, cached_tokens=len(PROMPT) + 5), 0.0)


@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf, 1e12])
@pytest.mark.parametrize("stage", ["queue_ms", "total_ms", "fetch_ms", "restore_ms", "chunk_ms"])
def test_stage_time_of_a_prompt_that_is_no_duration_is_refused_by_its_name(stage: str, value: float) -> None:
    timings = session_pb2.PrefillTimings()
    if stage == "chunk_ms":
        timings.chunk_ms.append(value)
    else:
        setattr(timings, stage, value)
    with pytest.raises(OutOfBounds, match=stage):
        ResponseCheck(9).check(session_pb2.ConnectResponse(first_step=session_pb2.FirstStep(timings=timings)))


@pytest.mark.parametrize("stage", ["copy_ms", "exposed_ms", "admission_ms", "first_step_ms"])
def test_stage_time_of_a_transfer_below_zero_is_refused_by_its_name(stage: str) -> None:
    landed = session_pb2.Landed()
    setattr(landed, stage, -1.0)
    with pytest.raises(OutOfBounds, match=stage):
        ResponseCheck(9).check(session_pb2.ConnectResponse(landed=landed))


def test_logprobs_that_are_not_one_a_token_are_refused() -> None:
    output = session_pb2.SequenceOutput(token_ids=[1], logprobs=[-1.0, -2.0])
    for message in (
        session_pb2.ConnectResponse(step_outputs=session_pb2.StepOutputs(outputs=[output])),
        session_pb2.ConnectResponse(first_step=session_pb2.FirstStep(outputs=[output])),
    ):
        with pytest.raises(OutOfBounds, match="2 entries for 1 tokens"):
            ResponseCheck(9).check(message)

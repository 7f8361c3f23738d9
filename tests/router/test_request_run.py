"""Requests over workers that speak out of turn, late, slowly or wrongly."""

import asyncio
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from baton.process.errors import DeadlineExceeded, Internal
from baton.process.registry.worker_record import WorkerRole
from baton.process.wire_bounds import OutOfBounds
from baton.protos import baton_pb2, session_pb2
from baton.router.fleet.fleet import Inbox, WakeUpLimiter
from baton.router.fleet.received import ResponseCheck
from baton.router.fleet.wire import Tag
from baton.router.placement.cluster import LinkEnd
from baton.router.placement.decide import Placement
from baton.router.public.service import Responses
from baton.router.request.answer import InconsistentOutput, RequestAnswer
from baton.router.request.attempt import POISON_DEATHS
from baton.router.request.effects import RecordTransfer
from baton.router.request.events import Begun, Deadline
from baton.router.request.resume import AttemptLocation
from baton.router.request.state import RequestState
from baton.router.trace.record import Timeline
from baton.router.types.events import (
    AttemptEvent,
    Failed,
    FailureReason,
    FirstStep,
    KvReceived,
    PrefillTimings,
    PromptScores,
    SequenceEnd,
    SequenceOutput,
)
from baton.router.types.request import PreparedRequest
from baton.router.types.response import ChoiceFinished, Delta, PromptPart
from tests.router.clusters import join, reported
from tests.router.replay_world import (
    ALPHABET,
    PLACEMENT,
    PROMPT,
    Fate,
    World,
    first_of,
    generation_of,
    logprob_of,
    new_detokenizer,
    read,
    request_of,
    scheduling_of,
    whole_answer,
)

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


async def test_tokens_before_a_failure_go_out_before_it() -> None:
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


async def test_limiter_with_two_slots_resumes_two_waiting_inboxes_per_loop_iteration_in_order() -> None:
    limiter, went = WakeUpLimiter(at_once=2), list[int]()
    inboxes: list[Inbox[None]] = [Inbox(limiter) for _ in range(7)]

    async def stream(number: int) -> None:
        await inboxes[number].take()
        went.append(number)

    streams = [asyncio.create_task(stream(number)) for number in range(7)]
    await asyncio.sleep(0)
    for inbox in inboxes:
        inbox.put(output(0, ALPHABET[0]), 1.0)
    gone = []
    while len(went) < 6:
        await asyncio.sleep(0)  # one iteration
        gone.append(len(went))
        if len(gone) == 1:
            streams[3].cancel()  # it waits: no other stream loses a slot by it
    assert went == [0, 1, 2, 4, 5, 6]
    assert all(later - earlier <= 2 for earlier, later in zip([0, *gone], gone, strict=False))
    await asyncio.wait(streams)


async def test_inbox_that_waits_for_a_slot_gives_an_own_event_immediately() -> None:
    inbox: Inbox[str] = Inbox(WakeUpLimiter(at_once=0))
    inbox.put(output(0, ALPHABET[0]), 1.0)
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.put_own("deadline")
    assert await taking == "deadline" and inbox.arrivals


BOUND_S = 10.0


class Spoken(World):
    """Workers of which `prefill_next` says whose message comes next, and `apart` after which ones the router runs."""

    def __init__(self, prefill_next: tuple[bool, ...], apart: tuple[bool, ...]) -> None:
        super().__init__([])
        self._prefill_next, self._apart = prefill_next, apart
        self.saying: asyncio.Task[None] | None = None

    def dispatch(self, tag: Tag, request: PreparedRequest, placement: Placement) -> None:
        self.saying = asyncio.create_task(self._say(tag.attempt_id, request))

    async def _say(self, attempt_id: int, request: PreparedRequest) -> None:
        said = {True: iter(prefill(attempt_id, request)), False: iter(decode(attempt_id, request))}
        for from_prefill, apart in zip(self._prefill_next, self._apart, strict=True):
            event = next(said[from_prefill])
            if (inbox := self.inboxes.get(attempt_id)) is not None:  # an answer may be whole before prefill's last word
                inbox.put(event, 0.0)
            for _ in range(5 if apart else 0):
                await asyncio.sleep(0)


def prefill(attempt_id: int, request: PreparedRequest) -> Iterator[AttemptEvent]:
    scores = tuple(logprob_of(token_id, offset) for offset, token_id in enumerate(PROMPT))
    yield PromptScores(attempt_id, 1, scores[1:4])
    yield PromptScores(attempt_id, 4, scores[4:])
    yield FirstStep(attempt_id, (first_of(whole(attempt_id, request)),), PrefillTimings(0.0, (1.0,), 1.0, 0))


def decode(attempt_id: int, request: PreparedRequest) -> Iterator[AttemptEvent]:
    output = whole(attempt_id, request)
    yield KvReceived(attempt_id, 1, 1.0, 0.0, 0.0, 1.0, "grpc", 0)
    yield output._replace(token_ids=output.token_ids[:2], end=None)
    yield output._replace(offset=2, token_ids=output.token_ids[2:])


def whole(attempt_id: int, request: PreparedRequest) -> SequenceOutput:
    return SequenceOutput(attempt_id, 0, 0, whole_answer(request.sampling, PROMPT, 0), SequenceEnd.LENGTH)


async def check(prefill_next: tuple[bool, ...], apart: tuple[bool, ...]) -> None:
    request = request_of(max_tokens=4, stop_token_ids=(), prompt_logprobs=1)
    world = Spoken(prefill_next, apart)
    events = [event async for event in generation_of(request, scheduling_of(world)).events()]
    assert world.saying is not None
    await world.saying
    parts = [event for event in events if isinstance(event, PromptPart)]
    deltas = [event for event in events if isinstance(event, Delta)]
    assert events[: len(parts)] == parts and isinstance(events[-1], ChoiceFinished)
    assert sum((part.token_ids for part in parts), ()) == PROMPT
    assert [part.offset for part in parts] == [0, 1, 4]
    assert sum((delta.token_ids for delta in deltas), ()) == whole_answer(request.sampling, PROMPT, 0)
    assert not world.inboxes and world.ended == 1


async def test_the_order_of_two_sessions_does_not_matter() -> None:
    """Scores, then the first step from prefill; landed, then two steps from decode."""
    orders = sorted(set(itertools.permutations((True,) * 3 + (False,) * 3)))
    assert len(orders) == 20
    pauses = [tuple(pause in each for pause in range(6)) for each in ((), range(6), *((only,) for only in range(6)))]
    for order, apart in itertools.product(orders, pauses):
        async with asyncio.timeout(BOUND_S):
            await check(order, apart)


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


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"attempt_ids": [1], "choices": [0], "offsets": [1], "token_ids": [9], "made_us": 1}, "9 is not a token id"),
        ({"attempt_ids": [1, 2], "choices": [0], "offsets": [1], "token_ids": [8], "made_us": 1}, "equal lengths"),
        ({"attempt_ids": [1], "choices": [0], "offsets": [1], "token_ids": [8]}, "without made_us"),
    ],
)
def test_columns_out_of_bounds_are_refused(columns: dict[str, Any], why: str) -> None:
    with pytest.raises(OutOfBounds, match=why):
        ResponseCheck(9).check(session_pb2.ConnectResponse(step_outputs=session_pb2.StepOutputs(**columns)))


pytestmark = pytest.mark.usefixtures("no_pauses")
PREFILL = str(PLACEMENT.prefill)
LATE_S = 0.12  # more than a look at the worker


def report(world: World) -> None:
    world.cluster.reported(PREFILL, reported())


@pytest.fixture
def world() -> World:
    """The prefill worker is connected, and no transfer from it succeeds."""
    world = World([Fate(outputs=1, reason=FailureReason.TRANSFER)] * 3)
    join(world.cluster, PREFILL, WorkerRole.PREFILL)
    return world


async def test_a_request_that_kills_its_prefill_workers_is_refused_however_late_that_is_noticed(world: World) -> None:
    epochs = iter(range(2, 9))

    def dispatched(request: PreparedRequest) -> None:
        asyncio.get_running_loop().call_later(LATE_S, dies)

    def dies() -> None:
        world.cluster.lost(PREFILL, LinkEnd.GONE, time.monotonic())
        join(world.cluster, PREFILL, WorkerRole.PREFILL, next(epochs))

    world.on_dispatch = dispatched
    with pytest.raises(Internal) as failed:
        await read(generation_of(request_of(), scheduling_of(world)), 1)
    assert failed.value.reason == "POISON"
    assert len(world.dispatched) == POISON_DEATHS


async def test_a_worker_that_reports_since_has_not_died(world: World) -> None:
    def dispatched(request: PreparedRequest) -> None:
        asyncio.get_running_loop().call_later(LATE_S, report, world)

    world.on_dispatch = dispatched
    await read(generation_of(request_of(), scheduling_of(world)), 1)
    assert len(world.dispatched) == 4

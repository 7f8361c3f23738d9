"""What prefill and decode say reaches the router over two sessions: in every order of the two, and however much of it
at a time, the answer is the same."""

import asyncio
import itertools
from collections.abc import Iterator

from baton.router.fleet.wire import Tag
from baton.router.placement.decide import Placement
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
from baton.router.types.response import ChoiceFinished, Delta, PromptPart
from tests.router.replay_world import (
    PROMPT,
    World,
    first_of,
    generation_of,
    logprob_of,
    request_of,
    scheduling_of,
    whole_answer,
)

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

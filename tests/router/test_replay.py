"""Whatever becomes of its attempts, an answer comes out as if nothing had happened: by the thousand, in memory."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.process.errors import BatonError, DeadlineExceeded, Internal, Unavailable
from baton.router.request.attempt import POISON_DEATHS, Tries
from baton.router.request.retry import MOST_KEPT, QUARANTINE_S, Quarantine, request_digest
from baton.router.types.events import FailureReason, SequenceEnd
from baton.router.types.request import PreparedRequest, end_of, replay, replays
from baton.text.block_hash import block_hashes
from baton.text.sampling import BeamParams
from tests.router.replay_world import (
    BLOCK_TOKENS,
    PROMPT,
    STOP_TOKEN,
    WELL,
    Fate,
    World,
    generation_of,
    read,
    request_of,
    scheduling_of,
    whole_answer,
)

pytestmark = pytest.mark.usefixtures("no_pauses")
PAUSE_S = Tries.pause_s
LOST, DIED, DRAINING = FailureReason.WORKER_LOST, FailureReason.WORKER_DIED, FailureReason.DRAINING


def fates() -> st.SearchStrategy[list[Fate]]:
    each = st.builds(
        Fate,
        outputs=st.integers(0, 12),
        reason=st.sampled_from([LOST, DRAINING, FailureReason.TRANSFER, FailureReason.NO_ROOM]),
        piece=st.integers(1, 4),
        with_first_step=st.booleans(),
        gap=st.booleans(),
        late=st.integers(0, 3),
    )
    return st.lists(each, max_size=5)


REQUESTS = st.sampled_from(
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"n": 3, "max_tokens": 12},
        {"n": 2, "best_of": 4, "max_tokens": 9},
        {"logprobs": 1, "n": 2},
        {"stop": ("ab", "7"), "max_tokens": 60, "stop_token_ids": ()},
        {"stop": ("\ufffd", "xy"), "logprobs": 0, "max_tokens": 40},
    ]
)


@settings(max_examples=120, deadline=None)
@given(REQUESTS, fates())
def test_an_answer_is_the_same_whatever_its_attempts_come_to(
    runner: asyncio.Runner, shape: dict[str, object], drawn: list[Fate]
) -> None:
    request = request_of(**shape)  # type: ignore[arg-type]
    n = request.n

    async def once(fates: list[Fate]) -> object:
        world = World(list(fates))
        got = await read(generation_of(request, scheduling_of(world, attempts=100)), n)
        assert not world.inboxes, "an attempt was not left"
        assert world.admitted == world.ended == len(world.dispatched)
        return got

    assert runner.run(once(drawn)) == runner.run(once([]))


@settings(max_examples=60, deadline=None)
@given(REQUESTS, fates(), st.data())
def test_answer_of_another_router_goes_on_from_what_the_client_has(
    runner: asyncio.Runner, shape: dict[str, object], drawn: list[Fate], data: st.DataObject
) -> None:
    request = request_of(**shape)  # type: ignore[arg-type]
    if request.sampling.n > request.n:
        return  # nothing of it goes out before its end

    async def once(fates: list[Fate], received: dict[int, tuple[int, ...]]) -> list[tuple[list[int], str, object]]:
        """The client reports no text, so all of it comes again."""
        generation = generation_of(request, scheduling_of(World(list(fates)), attempts=100), received)
        answer = await read(generation, request.n, received)
        return [(got.token_ids, got.text, got.end) for got in answer]

    whole = runner.run(once([], {}))
    received = {c: tuple(ids)[: data.draw(st.integers(0, len(ids)))] for c, (ids, _, _) in enumerate(whole)}
    assert runner.run(once(drawn, received)) == whole


async def test_answer_without_delivered_tokens_begins_again() -> None:
    request = request_of(n=3)
    world = World([Fate(outputs=0, with_first_step=False)])
    await read(generation_of(request, scheduling_of(world)), 3)
    assert world.dispatched == [request, request]


def test_the_hashes_of_a_replay_cover_the_answer() -> None:
    request, answered = request_of(), tuple(range(9))
    made = replay(request, 0, answered)
    assert made.block_hashes == block_hashes(b"root", (*PROMPT, *answered), BLOCK_TOKENS)
    assert made.token_ids == (*PROMPT, *answered)
    assert made.sampling.max_tokens == request.sampling.max_tokens


def test_a_beam_search_begins_again() -> None:
    request = request_of(n=2, beams=BeamParams(2))
    assert replays(request, request, {0: (1, 2), 1: ()}) == (request,)


@pytest.mark.parametrize(
    ("answered", "end"),
    [((), None), ((1, 2), None), ((1, STOP_TOKEN), SequenceEnd.STOP), (tuple(range(20)), SequenceEnd.LENGTH)],
)
def test_an_end_whose_message_was_lost_is_found(answered: tuple[int, ...], end: SequenceEnd | None) -> None:
    assert end_of(request_of(max_tokens=20).sampling, answered) is end


async def test_attempts_without_progress_are_bounded() -> None:
    world = World([Fate(outputs=0)] * 10)
    with pytest.raises(Unavailable) as refused:
        await read(generation_of(request_of(), scheduling_of(world, attempts=3)), 1)
    assert (refused.value.reason, refused.value.retry_after_s) == ("WORKER_LOST", 1.0)
    assert len(world.dispatched) == 3


async def test_progress_takes_earlier_failures_back() -> None:
    world = World([Fate(outputs=3)] * 9)
    await read(generation_of(request_of(max_tokens=40, stop_token_ids=()), scheduling_of(world, attempts=3)), 1)
    assert len(world.dispatched) == 10


async def test_a_drained_worker_did_not_fail() -> None:
    world = World([Fate(outputs=0, reason=DRAINING, with_first_step=False)] * 3)
    await read(generation_of(request_of(), scheduling_of(world, attempts=2)), 1)
    assert len(world.dispatched) == 4


@pytest.mark.parametrize("reason", [FailureReason.INVALID, FailureReason.NONFINITE, FailureReason.DEADLINE])
async def test_some_failures_are_final(reason: FailureReason) -> None:
    world = World([Fate(outputs=3, reason=reason)])
    with pytest.raises(BatonError):
        await read(generation_of(request_of(), scheduling_of(world)), 1)
    assert len(world.dispatched) == 1


async def test_no_attempt_begins_after_the_deadline() -> None:
    world = World([Fate(outputs=3)])
    with pytest.raises(DeadlineExceeded):
        await read(generation_of(request_of(), scheduling_of(world), deadline_s=0.0), 1)


async def test_whoever_stops_reading_leaves_all_attempts() -> None:
    world = World([Fate(outputs=7)])
    generation = generation_of(request_of(n=3, stop_token_ids=()), scheduling_of(world))
    events = generation.events()
    while len(world.dispatched) < 3:
        await anext(events)
    await events.aclose()
    assert not world.inboxes
    assert world.admitted == world.ended


async def test_where_one_choice_cannot_go_on_the_request_fails_and_all_attempts_are_left() -> None:
    world = World([Fate(outputs=7), WELL, Fate(outputs=1, reason=FailureReason.NONFINITE)])
    with pytest.raises(Internal):
        await read(generation_of(request_of(n=3, stop_token_ids=()), scheduling_of(world)), 3)
    assert not world.inboxes
    assert world.admitted == world.ended


async def test_a_request_that_kills_its_workers_is_tried_twice_more_and_then_refused_at_the_door() -> None:
    world, request = World([Fate(outputs=1, reason=DIED)] * 9), request_of()
    scheduling = scheduling_of(world)
    with pytest.raises(Internal) as failed:
        await read(generation_of(request, scheduling), 1)
    assert failed.value.reason == "POISON"
    assert len(world.dispatched) == POISON_DEATHS
    with pytest.raises(Internal):
        await read(generation_of(request, scheduling), 1)
    assert len(world.dispatched) == POISON_DEATHS
    world.fates.clear()
    await read(generation_of(request_of(max_tokens=21), scheduling), 1)


async def test_a_canary_may_come_again_whatever_dies_of_it() -> None:
    world, request = World([Fate(outputs=1, reason=DIED)] * 4), request_of()
    scheduling = scheduling_of(world)
    await read(generation_of(request, scheduling, is_usual=False), 1)
    assert len(scheduling.quarantine) == 0


def test_quarantine_finds_equal_requests_for_a_while() -> None:
    quarantine, request = Quarantine(), request_of()
    quarantine.add(request_digest(request), now=10.0)
    other_seed = replace(request, sampling=replace(request.sampling, seed=8))
    assert quarantine.holds(other_seed, 10.0 + QUARANTINE_S - 1)
    assert not quarantine.holds(replace(request, token_ids=(*PROMPT, 5)), 11.0)
    assert not quarantine.holds(request, 10.0 + QUARANTINE_S)
    for number in range(MOST_KEPT + 5):
        quarantine.add(str(number).encode(), 20.0)
    assert len(quarantine) == MOST_KEPT


def test_full_quarantine_forgets_the_request_that_was_added_longest_ago() -> None:
    first, second = request_of(max_tokens=1), request_of(max_tokens=2)
    quarantine = Quarantine()
    for request in (first, second, first):
        quarantine.add(request_digest(request), now=10.0)
    for number in range(MOST_KEPT - 1):
        quarantine.add(str(number).encode(), now=10.0)
    assert not quarantine.holds(second, 10.0)
    assert quarantine.holds(first, 10.0), "it killed a worker again after the second one did"


async def test_deaths_with_progress_between_them_are_nobodys_fault() -> None:
    world = World([Fate(outputs=3, reason=DIED)] * 6)
    await read(generation_of(request_of(max_tokens=40, stop_token_ids=()), scheduling_of(world)), 1)
    assert len(world.dispatched) == 7


async def test_innocents_that_die_beside_a_deadly_request_each_time_are_served() -> None:
    """One of five kills whatever computes it; all that are there die with it, before any progress."""
    world = World([])
    scheduling = scheduling_of(world)
    deadly = request_of(max_tokens=13)
    innocents = [request_of(max_tokens=14 + index) for index in range(4)]

    def dispatched(request: PreparedRequest) -> None:
        """The deadly one, or any that still stands beside it, dies."""
        dies = request.sampling.max_tokens == 13 or len(world.inboxes) > 1
        world.fates[:] = [Fate(outputs=1, reason=DIED)] if dies else [WELL]

    world.on_dispatch = dispatched
    reads = [read(generation_of(request, scheduling), 1) for request in (deadly, *innocents)]
    failed, *answers = await asyncio.gather(*reads, return_exceptions=True)
    assert isinstance(failed, Internal) and failed.reason == "POISON"
    assert [len(answer[0].token_ids) for answer in answers if isinstance(answer, list)] == [
        len(whole_answer(request.sampling, PROMPT, 0)) for request in innocents
    ]


@pytest.mark.parametrize("in_a_row", range(1, 12))
def test_pauses_grow_and_are_bounded(in_a_row: int) -> None:
    pauses = [PAUSE_S(Tries(in_a_row, in_a_row), LOST, turn) for turn in range(8)]
    assert all(0.0 <= pause <= 2.0 for pause in pauses)
    assert (max(pauses) == 0.0) == (in_a_row == 1)
    assert PAUSE_S(Tries(1, 1), FailureReason.TRANSFER, 0) > 0.0, "its peer's death must be noticed meanwhile"

"""The queue for room: in turn, bounded, in time, and never leaking a charge."""

import asyncio
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest

from baton.process.errors import BatonError, InvalidArgument, ResourceExhausted, Unavailable
from baton.process.registry.worker_record import WorkerRole
from baton.router.admission.fair_queue import Entry, FairQueue
from baton.router.admission.queue import (
    BEGUN_PRIORITY,
    LOOK_AHEAD,
    PLANNED_SHARE,
    AdmissionPass,
    AdmissionQueue,
    Admitted,
    RequestClass,
    Ticket,
    charged_tokens,
)
from baton.router.placement.decide import NoPrefillWorker, PlacementPolicy
from baton.router.placement.policies import CacheAware
from baton.router.types.placement import PlacementRequest
from baton.versions import UNANNOUNCED, Versions
from tests.fixtures.loop_clock import put_forward
from tests.fixtures.router_defaults import DEFAULT_LIMITS, make_policy
from tests.router.clusters import BOTH, cluster_of

LIMITS = replace(DEFAULT_LIMITS, max_waiting=3, max_wait_s=5.0, without_workers_s=5.0)
POLICY = make_policy(NoPrefillWorker.QUEUE)
REQUEST = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=4, max_tokens=4, choices=1)  # 8 tokens
WIDE = replace(REQUEST, choices=2)  # 12 tokens


class Room:
    """A queue for a decode worker with so many slots, and what became of each attempt. Its clock stands still."""

    def __init__(
        self,
        slots: int,
        roles: tuple[WorkerRole, ...] = BOTH,
        policy: PlacementPolicy = POLICY,
        versions: Versions = UNANNOUNCED,
        **limits: float,
    ) -> None:
        self.cluster = cluster_of({role.value: role for role in roles}, slots=slots, versions=versions)
        self.now = 100.0
        self.faults: list[Exception] = []
        limits_of = replace(LIMITS, **limits)  # type: ignore[arg-type]
        self.queue = AdmissionQueue(self.cluster, limits_of, policy, lambda: self.now, self.faults.append)
        self.outcomes: dict[int, Admitted | BatonError] = {}
        self.entries: dict[int, Entry[Ticket]] = {}

    def ask(self, *attempt_ids: int, request: PlacementRequest = REQUEST, **request_class: float | str) -> None:
        """Raises what the queue raises."""
        for attempt_id in attempt_ids:
            self.entries[attempt_id] = self.queue.submit(
                attempt_id,
                request,
                (),
                RequestClass(**request_class),  # type: ignore[arg-type]
                partial(self.outcomes.__setitem__, attempt_id),
            )

    def free(self, attempt_id: int) -> None:
        self.cluster.release(attempt_id, "decode")
        self.queue.pump()

    async def leave(self, *attempt_ids: int) -> None:
        for attempt_id in attempt_ids:
            self.queue.withdraw(self.entries[attempt_id])
        await asyncio.sleep(0)

    def answer(self, attempt_id: int, seconds: float) -> None:
        """Serve one request by itself, from its dispatch to its end."""
        self.ask(attempt_id)
        self.now += seconds
        self.queue.ended(attempt_id, answered=True)
        for endpoint in ("prefill", "decode"):
            self.cluster.release(attempt_id, endpoint)

    @property
    def placed(self) -> list[int]:
        """In the order in which they were placed."""
        return [attempt_id for attempt_id, outcome in self.outcomes.items() if isinstance(outcome, Admitted)]

    @property
    def charges(self) -> list[set[int]]:
        return [set(worker.charges) for worker in self.cluster.workers]

    def check_refused(self, attempt_id: int, kind: type[BatonError], words: str) -> None:
        error = self.outcomes[attempt_id]
        assert isinstance(error, kind) and words in str(error), error


async def wait(seconds: float) -> None:
    """Timers that are due within so long have run when this returns."""
    put_forward(seconds)
    for _ in range(3):
        await asyncio.sleep(0)


async def test_requests_are_admitted_in_order_as_capacity_is_released() -> None:
    room = Room(slots=1)
    room.ask(1, 2, 3)
    assert (room.placed, room.queue.waiting) == ([1], 2)
    room.free(1)
    assert room.placed == [1, 2]
    room.free(2)
    assert room.charges == [{1, 2, 3}, {3}]


def overtaken() -> Room:
    """A wide request, 2, that was overtaken by its own size: room is kept for it."""
    room = Room(slots=2)
    room.ask(1)
    room.ask(2, request=WIDE)
    for attempt_id in (3, 4):  # 8 tokens, and 16
        room.ask(attempt_id)
        room.cluster.release(attempt_id, "decode")
    assert room.placed == [1, 3, 4]
    return room


async def test_small_requests_overtake_an_oversized_one_by_at_most_its_size() -> None:
    room = overtaken()
    room.ask(5)
    room.free(1)
    assert room.placed == [1, 3, 4, 2]


async def test_cancelled_request_admits_the_next_in_the_queue() -> None:
    room = overtaken()
    room.ask(5)
    await room.leave(2)
    assert room.charges[1] == {1, 5}


async def test_timed_out_request_admits_those_behind_it() -> None:
    room = overtaken()
    await wait(4.0)
    room.ask(5)
    assert 5 not in room.placed
    await wait(2.0)
    room.check_refused(2, ResourceExhausted, "within 5 s")
    assert room.charges[1] == {1, 5}


async def test_request_cancelled_at_placement_returns_its_charge() -> None:
    room = Room(slots=1)
    room.ask(1, 2)
    room.free(1)
    assert room.charges[1] == {2}
    await room.leave(2)
    assert room.charges == [{1}, set()]


async def test_full_queue_refuses() -> None:
    room = Room(slots=0)
    room.ask(1, 2, 3)
    with pytest.raises(ResourceExhausted, match="are pending, the maximum"):
        room.ask(4)
    room.queue.close()
    assert [type(room.outcomes[attempt_id]) for attempt_id in (1, 2, 3)] == [Unavailable] * 3


async def test_waiting_for_room_is_bounded() -> None:
    room = Room(slots=0)
    room.ask(1)
    await wait(5.1)
    room.check_refused(1, ResourceExhausted, "no worker had capacity")
    assert room.queue.waiting == 0


@pytest.mark.parametrize("missing", WorkerRole)
async def test_waiting_for_workers_is_bounded(missing: WorkerRole) -> None:
    room = Room(8, tuple(role for role in WorkerRole if role is not missing))
    room.ask(1, priority=BEGUN_PRIORITY)
    room.ask(2)
    await wait(5.1)
    room.check_refused(2, Unavailable, f"no {missing.value} worker")


async def test_request_that_was_begun_is_not_refused_while_its_workers_are_absent() -> None:
    room = Room(8, (WorkerRole.PREFILL,), max_wait_s=60.0)
    room.ask(1, priority=BEGUN_PRIORITY)
    room.ask(2)
    await wait(6.0)
    assert 1 not in room.outcomes and room.queue.waiting == 1
    room.check_refused(2, Unavailable, "no decode worker")


async def test_request_that_can_never_fit_is_refused_and_lets_the_next_in() -> None:
    room = Room(slots=8)
    room.ask(1, request=replace(REQUEST, max_tokens=400))
    room.ask(2)
    error = room.outcomes[1]
    assert isinstance(error, InvalidArgument) and error.field == "sampling.max_tokens"
    assert room.placed == [2]


async def test_lost_worker_takes_nothing() -> None:
    room = Room(slots=8)
    room.cluster.lost("decode")
    room.ask(1)
    assert room.queue.waiting == 1


async def test_refusing_router_does_not_wait_for_a_prefill_worker() -> None:
    room = Room(8, (WorkerRole.DECODE,), make_policy(NoPrefillWorker.REJECT))
    room.ask(1)
    room.check_refused(1, Unavailable, "no prefill worker")


async def test_prompt_for_the_decode_worker_is_charged_there_alone() -> None:
    room = Room(8, (WorkerRole.DECODE,), make_policy(NoPrefillWorker.LOCAL))
    room.ask(1)
    assert (room.placed, room.charges) == ([1], [{1}])


async def test_request_that_would_miss_its_deadline_is_rejected_with_the_wait() -> None:
    room = Room(slots=1)
    room.answer(1, seconds=2.0)
    room.ask(2, 3)
    # One of 8 tokens goes before it, and 8 tokens take 2 s: 4 s until it has its room, 2 s more until it has ended.
    with pytest.raises(ResourceExhausted, match=r"the request would be pending for 4\.0 s") as caught:
        room.ask(4, deadline_s=room.now + 5.9 / PLANNED_SHARE)
    assert caught.value.retry_after_s == pytest.approx(4.0)
    room.ask(5, deadline_s=room.now + 6.1 / PLANNED_SHARE)
    assert room.queue.waiting == 2


async def test_request_too_near_its_deadline_is_dropped_and_the_next_placed() -> None:
    room = Room(slots=1)
    room.answer(1, seconds=2.0)
    room.ask(2)
    room.ask(3, deadline_s=room.now + 6.0)  # takes 2 s itself
    room.ask(4)
    room.now += 5.5
    room.free(2)
    room.check_refused(3, ResourceExhausted, "deadline")
    assert room.charges[1] == {4}


async def test_only_waiting_request_is_not_dropped_for_its_deadline() -> None:
    """There is nobody whom its room would serve: its own timer ends it."""
    room = Room(slots=1)
    room.answer(1, seconds=2.0)
    room.ask(2)
    room.ask(3, deadline_s=room.now + 6.0)
    room.now += 5.5
    room.free(2)
    assert room.charges[1] == {3}


async def test_first_in_the_queue_is_accepted_despite_predictions() -> None:
    """Estimates refuse only those that would wait behind others."""
    room = Room(slots=1, max_waiting_per_tenant=0)
    room.answer(1, seconds=2.0)
    room.ask(2, deadline_s=room.now + 0.1)
    room.ask(3)
    assert room.queue.waiting == 1
    with pytest.raises(ResourceExhausted, match="of this caller"):
        room.ask(4)


async def test_full_queue_drops_a_request_of_the_tenant_with_most() -> None:
    room = Room(slots=0)
    room.ask(0, 1, 2, tenant="noisy")
    room.ask(9, tenant="small")
    assert list(room.outcomes) == [2]
    room.check_refused(2, ResourceExhausted, "are pending, the maximum")
    with pytest.raises(ResourceExhausted):  # they have one more than it has, and not two: it would be taking turns
        room.ask(10, tenant="small")


async def test_tenant_has_its_own_bound() -> None:
    room = Room(slots=0, max_waiting_per_tenant=1)
    room.ask(1, tenant="a")
    room.ask(2, tenant="b")
    with pytest.raises(ResourceExhausted, match="of this caller"):
        room.ask(3, tenant="a")


async def test_begun_request_goes_first_and_is_not_refused() -> None:
    room = Room(slots=1, max_waiting_per_tenant=1)
    room.ask(1)
    room.ask(2, priority=-100)
    room.ask(3, priority=BEGUN_PRIORITY)
    room.free(1)
    assert room.placed == [1, 3]


async def test_requests_without_workers_block_nobody() -> None:
    room = Room(slots=8)
    room.ask(1, request=replace(REQUEST, fingerprint=b"other"))
    room.ask(2)
    assert room.placed == [2]


async def test_requests_that_leave_together_do_not_share_room() -> None:
    room = Room(slots=1)
    room.ask(1, 2, 3, 4)
    room.cluster.release(1, "decode")
    await room.leave(2, 3)
    assert room.placed == [1, 4]


async def test_newcomer_to_a_full_queue_has_the_room_of_the_same_turn() -> None:
    room = Room(slots=1, max_waiting=1)
    room.ask(1, 2)
    room.cluster.release(1, "decode")
    room.queue.pump_soon()
    room.ask(3)
    assert (room.placed, room.queue.waiting) == ([1, 2], 1)


async def test_bug_in_the_queue_is_reported() -> None:
    room = Room(slots=1)
    room.queue.pump = Mock(side_effect=ZeroDivisionError)  # type: ignore[method-assign]
    room.queue.pump_soon()
    await asyncio.sleep(0)
    assert [type(error) for error in room.faults] == [ZeroDivisionError]


async def test_time_in_the_queue_counts_against_the_ttft_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    left_ms: list[float] = []

    def local_limit_ms(policy: CacheAware, prefill_ms: float, first_token_in_ms: float) -> None:
        left_ms.append(first_token_in_ms)

    monkeypatch.setattr(CacheAware, "local_limit_ms", local_limit_ms)
    room = Room(slots=1, policy=make_policy(NoPrefillWorker.LOCAL))
    room.ask(1)
    room.ask(2, request=replace(REQUEST, first_token_in_ms=2000.0))
    room.now += 0.5
    room.free(1)
    assert room.placed == [1, 2] and left_ms[-1] == 1500.0


def test_request_is_charged_for_uncached_tokens_and_each_choice() -> None:
    request = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=100, max_tokens=7, choices=3)
    assert charged_tokens(request, cached_tokens=40) == 60 + 3 * 7


def waiting(*requests: PlacementRequest) -> tuple[AdmissionPass, list[Entry[Ticket]]]:
    """In the order of their arrival, of one caller, 10 tokens each."""
    queue: FairQueue[Ticket] = FairQueue()
    tickets = (
        Ticket(number, each, (), RequestClass(), lambda outcome: None, 0.0) for number, each in enumerate(requests)
    )
    entries = [queue.add(ticket, "", 0, 10) for ticket in tickets]
    return AdmissionPass(queue), entries


def test_pass_skips_requests_as_large_as_one_that_did_not_fit() -> None:
    larger, other_model = replace(WIDE, prompt_tokens=400), replace(WIDE, fingerprint=b"g")
    admission_pass, entries = waiting(WIDE, larger, WIDE, REQUEST, other_model)
    assert admission_pass.next() is entries[0]
    admission_pass.without_room(entries[0])
    assert admission_pass.next() is entries[3], "it needs less"
    admission_pass.without_room(entries[3])
    assert admission_pass.next() is entries[4], "other workers may have room"
    admission_pass.without_room(entries[4])
    assert admission_pass.next() is None


def test_pass_reserves_capacity_for_a_request_overtaken_by_its_own_size() -> None:
    admission_pass, entries = waiting(WIDE, REQUEST, replace(WIDE, pooled=True))
    admission_pass.without_room(entries[0])
    entries[0].item.overtaken_tokens = 9
    assert admission_pass.next() is entries[1]
    admission_pass.served(entries[1])
    assert entries[0].item.overtaken_tokens == 19
    assert admission_pass.next() is entries[2], "a prompt without an answer takes no room that is kept"
    admission_pass.served(entries[2])
    assert entries[0].item.overtaken_tokens == 19


def test_pass_without_workers_holds_up_no_request_of_another_kind() -> None:
    admission_pass, entries = waiting(WIDE, WIDE, replace(WIDE, pooled=True))
    assert not admission_pass.some_without_workers
    admission_pass.without_workers(entries[0])
    assert admission_pass.next() is entries[2]
    assert admission_pass.some_without_workers


def test_pass_inspects_a_bounded_number_of_entries() -> None:
    admission_pass, entries = waiting(*[WIDE] * LOOK_AHEAD, REQUEST)
    admission_pass.without_room(entries[0])
    assert admission_pass.next() is None
    fewer, entries = waiting(*[WIDE] * (LOOK_AHEAD - 1), REQUEST)
    fewer.without_room(entries[0])
    assert fewer.next() is entries[-1]

"""The queue for room: in turn, bounded, in time, and never leaking a charge."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

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
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import NoPrefillWorker
from baton.router.types.placement import PlacementRequest
from baton.router.types.worker import ModelDescription, PoolBlocks, WorkerDescription, WorkerReport
from tests.fixtures.loop_clock import put_forward
from tests.fixtures.router_defaults import DEFAULT_LIMITS, make_policy

MODEL = ModelDescription("m", "/m", 128, 100, "float32", 4)
LIMITS = replace(DEFAULT_LIMITS, max_waiting=3, max_wait_s=5.0, without_workers_s=5.0)
NO_CLASS = RequestClass()
POLICY = make_policy(NoPrefillWorker.QUEUE)
REQUEST = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=4, max_tokens=4, choices=1)  # 8 tokens
WIDE = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=4, max_tokens=4, choices=2)  # 12 tokens


def cluster_with(slots: int, roles: tuple[WorkerRole, ...] = (WorkerRole.PREFILL, WorkerRole.DECODE)) -> Cluster:
    cluster = Cluster()
    for role in roles:
        cluster.add(role.value, role)
        cluster.connected(role.value, WorkerDescription(role.value, role, 1, b"f", MODEL, 100, 8), epoch=1)
        cluster.reported(role.value, WorkerReport(100, slots, PoolBlocks(100, 100, 0, 0, 0, 0), 0, 0, 0, False, 0))
    return cluster


def charges(cluster: Cluster) -> list[set[int]]:
    return [set(worker.charges) for worker in cluster.workers]


async def admit(
    queue: AdmissionQueue,
    attempt_id: int,
    request: PlacementRequest,
    block_hashes: Sequence[bytes],
    request_class: RequestClass = NO_CLASS,
) -> Admitted:
    """Waits until it is settled, and withdraws it if the waiting is cancelled."""
    outcome: asyncio.Future[Admitted | BatonError] = asyncio.get_running_loop().create_future()
    entry = queue.submit(attempt_id, request, block_hashes, request_class, outcome.set_result)
    try:
        await asyncio.wait({outcome})
    except asyncio.CancelledError:
        queue.withdraw(entry)
        raise
    if isinstance(result := outcome.result(), BatonError):
        raise result
    return result


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_are_admitted_in_order_as_room_becomes_free() -> None:
    cluster = cluster_with(slots=1)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    await admit(queue, 1, REQUEST, ())
    waiting = [asyncio.create_task(admit(queue, attempt_id, REQUEST, ())) for attempt_id in (2, 3)]
    await settled()
    assert queue.waiting == 2 and not any(task.done() for task in waiting)
    cluster.release(1, "decode")
    queue.pump()
    await waiting[0]
    assert not waiting[1].done()
    cluster.release(2, "decode")
    queue.pump()
    await waiting[1]
    assert charges(cluster) == [{1, 2, 3}, {3}]


async def test_small_requests_overtake_one_without_room_until_they_have_taken_as_much_as_it_does() -> None:
    cluster = cluster_with(slots=2)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    await admit(queue, 1, REQUEST, ())
    wide = asyncio.create_task(admit(queue, 2, WIDE, ()))
    await settled()
    for attempt_id in (3, 4):  # 8 tokens, and 16: now the wide one has waited long enough
        await admit(queue, attempt_id, REQUEST, ())
        cluster.release(attempt_id, "decode")
    late = asyncio.create_task(admit(queue, 5, REQUEST, ()))
    await settled()
    assert not wide.done() and not late.done()
    cluster.release(1, "decode")
    queue.pump()
    await wide
    assert not late.done()
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)


async def test_whoever_leaves_the_queue_lets_the_next_one_in() -> None:
    cluster = cluster_with(slots=2)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    await admit(queue, 1, REQUEST, ())
    wide = asyncio.create_task(admit(queue, 2, WIDE, ()))
    await settled()
    for attempt_id in (3, 4):
        await admit(queue, attempt_id, REQUEST, ())
        cluster.release(attempt_id, "decode")
    late = asyncio.create_task(admit(queue, 5, REQUEST, ()))
    await settled()
    wide.cancel()
    await late
    assert charges(cluster)[1] == {1, 5}


async def test_a_cancellation_in_the_moment_of_placement_returns_the_charge() -> None:
    cluster = cluster_with(slots=1)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    await admit(queue, 1, REQUEST, ())
    waiting = asyncio.create_task(admit(queue, 2, REQUEST, ()))
    await settled()
    cluster.release(1, "decode")
    queue.pump()  # placed and charged
    assert charges(cluster)[1] == {2}
    waiting.cancel()  # before it runs again
    await asyncio.gather(waiting, return_exceptions=True)
    assert charges(cluster) == [{1}, set()]


async def test_a_full_queue_refuses() -> None:
    queue = AdmissionQueue(cluster_with(slots=0), LIMITS, POLICY)
    waiting = [asyncio.create_task(admit(queue, attempt_id, REQUEST, ())) for attempt_id in range(3)]
    await settled()
    with pytest.raises(ResourceExhausted, match="pending already"):
        await admit(queue, 4, REQUEST, ())
    queue.close()
    assert all(isinstance(error, Unavailable) for error in await asyncio.gather(*waiting, return_exceptions=True))


async def test_waiting_for_room_is_bounded() -> None:
    queue = AdmissionQueue(cluster_with(slots=0), replace(DEFAULT_LIMITS, max_wait_s=0.01), POLICY)
    with pytest.raises(ResourceExhausted, match="no worker had room"):
        await admit(queue, 1, REQUEST, ())
    assert queue.waiting == 0


@pytest.mark.parametrize("missing", WorkerRole)
async def test_waiting_for_workers_is_bounded(missing: WorkerRole) -> None:
    roles = tuple(role for role in WorkerRole if role is not missing)
    queue = AdmissionQueue(cluster_with(slots=8, roles=roles), replace(DEFAULT_LIMITS, without_workers_s=0.01), POLICY)
    with pytest.raises(Unavailable, match=f"no {missing.value} worker"):
        await admit(queue, 1, REQUEST, ())


async def test_what_can_never_fit_is_refused_and_lets_the_next_one_in() -> None:
    cluster = cluster_with(slots=8)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    with pytest.raises(InvalidArgument) as caught:
        await admit(queue, 1, PlacementRequest(b"f", 4, prompt_tokens=4, max_tokens=400, choices=1), ())
    assert caught.value.field == "sampling.max_tokens"
    await admit(queue, 2, REQUEST, ())


async def test_draining_and_lost_workers_take_nothing() -> None:
    cluster = cluster_with(slots=8)
    queue = AdmissionQueue(cluster, replace(DEFAULT_LIMITS, without_workers_s=0.01), POLICY)
    cluster.lost("decode")
    with pytest.raises(Unavailable):
        await admit(queue, 1, REQUEST, ())


async def test_a_router_told_to_refuse_does_not_wait_for_a_prefill_worker() -> None:
    queue = AdmissionQueue(cluster_with(8, (WorkerRole.DECODE,)), DEFAULT_LIMITS, make_policy(NoPrefillWorker.REJECT))
    with pytest.raises(Unavailable, match="no prefill worker"):
        await admit(queue, 1, REQUEST, ())


async def test_a_prompt_for_the_decode_worker_is_charged_there_alone() -> None:
    cluster = cluster_with(8, (WorkerRole.DECODE,))
    queue = AdmissionQueue(cluster, LIMITS, make_policy(NoPrefillWorker.LOCAL))
    placement = (await admit(queue, 1, REQUEST, ())).placement
    assert (placement.prefill, charges(cluster)) == (None, [{1}])


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def answer(queue: AdmissionQueue, cluster: Cluster, clock: Clock, attempt_id: int, seconds: float) -> None:
    """One request by itself, from its dispatch to its end."""
    await admit(queue, attempt_id, REQUEST, ())
    clock.now += seconds
    queue.ended(attempt_id, answered=True)
    for endpoint in ("prefill", "decode"):
        cluster.release(attempt_id, endpoint)


async def test_a_request_that_would_wait_beyond_its_deadline_is_refused_at_once_with_the_wait() -> None:
    cluster, clock = cluster_with(slots=1), Clock()
    queue = AdmissionQueue(cluster, DEFAULT_LIMITS, POLICY, clock)
    await answer(queue, cluster, clock, 1, seconds=2.0)
    await admit(queue, 2, REQUEST, ())
    waiting = asyncio.create_task(admit(queue, 3, REQUEST, ()))
    await settled()
    # One of 8 tokens goes before it, and 8 tokens take 2 s: 4 s until it has its room, 2 s more until it has ended.
    with pytest.raises(ResourceExhausted, match=r"the request would be pending for 4\.0 s") as caught:
        await admit(queue, 4, REQUEST, (), RequestClass(deadline_s=clock.now + 5.9 / PLANNED_SHARE))
    assert caught.value.retry_after_s == pytest.approx(4.0)
    in_time = asyncio.create_task(
        admit(queue, 5, REQUEST, (), RequestClass(deadline_s=clock.now + 6.1 / PLANNED_SHARE))
    )
    await settled()
    assert queue.waiting == 2
    for task in (waiting, in_time):
        task.cancel()
    await asyncio.gather(waiting, in_time, return_exceptions=True)


async def test_one_whose_deadline_has_come_too_near_is_dropped_and_the_next_one_placed() -> None:
    cluster, clock = cluster_with(slots=1), Clock()
    queue = AdmissionQueue(cluster, DEFAULT_LIMITS, POLICY, clock)
    await answer(queue, cluster, clock, 1, seconds=2.0)
    await admit(queue, 2, REQUEST, ())
    late = asyncio.create_task(
        admit(queue, 3, REQUEST, (), RequestClass(deadline_s=clock.now + 6.0))
    )  # takes 2 s itself
    await settled()
    patient = asyncio.create_task(admit(queue, 4, REQUEST, ()))
    await settled()
    clock.now += 5.5
    cluster.release(2, "decode")
    queue.pump()
    await patient
    with pytest.raises(ResourceExhausted, match="deadline"):
        await late
    assert charges(cluster)[1] == {4}


async def test_a_full_queue_gives_up_a_request_of_whoever_has_most_in_it() -> None:
    cluster = cluster_with(slots=0)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    noisy = [asyncio.create_task(admit(queue, i, REQUEST, (), RequestClass("noisy"))) for i in range(3)]
    await settled()
    small = asyncio.create_task(admit(queue, 9, REQUEST, (), RequestClass("small")))
    await settled()
    assert [task.done() for task in (*noisy, small)] == [False, False, True, False]
    with pytest.raises(ResourceExhausted, match="pending already"):
        await noisy[2]
    with pytest.raises(ResourceExhausted):  # they have one more than it has, and not two: it would be taking turns
        await admit(queue, 10, REQUEST, (), RequestClass("small"))
    queue.close()
    await asyncio.gather(*noisy, small, return_exceptions=True)


async def test_a_tenant_has_a_bound_of_its_own() -> None:
    queue = AdmissionQueue(cluster_with(slots=0), replace(DEFAULT_LIMITS, max_waiting_per_tenant=1), POLICY)
    waiting = [asyncio.create_task(admit(queue, i, REQUEST, (), RequestClass(name))) for i, name in enumerate("ab")]
    await settled()
    with pytest.raises(ResourceExhausted, match="of this caller"):
        await admit(queue, 3, REQUEST, (), RequestClass("a"))
    queue.close()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_what_was_begun_goes_before_all_others_and_is_not_refused() -> None:
    cluster = cluster_with(slots=1)
    queue = AdmissionQueue(cluster, replace(DEFAULT_LIMITS, max_waiting_per_tenant=1), POLICY)
    await admit(queue, 1, REQUEST, ())
    urgent = asyncio.create_task(admit(queue, 2, REQUEST, (), RequestClass(priority=-100)))
    await settled()
    begun = asyncio.create_task(admit(queue, 3, REQUEST, (), RequestClass(priority=BEGUN_PRIORITY)))
    await settled()
    cluster.release(1, "decode")
    queue.pump()
    await begun
    assert not urgent.done()
    urgent.cancel()
    await asyncio.gather(urgent, return_exceptions=True)


async def test_those_without_workers_hold_nobody_up() -> None:
    cluster = cluster_with(slots=8)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    elsewhere = asyncio.create_task(admit(queue, 1, PlacementRequest(b"other", 4, 4, 4, choices=1), ()))
    await settled()
    await admit(queue, 2, REQUEST, ())
    assert not elsewhere.done()
    elsewhere.cancel()
    await asyncio.gather(elsewhere, return_exceptions=True)


def test_request_is_charged_what_is_not_cached_and_an_answer_for_each_choice() -> None:
    request = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=100, max_tokens=7, choices=3)
    assert charged_tokens(request, cached_tokens=40) == 60 + 3 * 7


def waiting(*requests: PlacementRequest) -> tuple[AdmissionPass, list[Entry[Ticket]]]:
    """In the order of their arrival, of one caller, 10 tokens each."""
    queue: FairQueue[Ticket] = FairQueue()
    tickets = (Ticket(number, each, (), NO_CLASS, lambda outcome: None) for number, each in enumerate(requests))
    entries = [queue.add(ticket, "", 0, 10) for ticket in tickets]
    return AdmissionPass(queue), entries


def test_pass_skips_requests_that_need_as_much_as_one_that_has_no_room() -> None:
    larger, other_model = replace(WIDE, prompt_tokens=400), replace(WIDE, fingerprint=b"g")
    admission_pass, entries = waiting(WIDE, larger, WIDE, REQUEST, other_model)
    assert admission_pass.next() is entries[0]
    admission_pass.without_room(entries[0])
    assert admission_pass.next() is entries[3], "it needs less"
    admission_pass.without_room(entries[3])
    assert admission_pass.next() is entries[4], "other workers may have room"
    admission_pass.without_room(entries[4])
    assert admission_pass.next() is None


def test_pass_keeps_room_for_a_request_that_was_overtaken_by_its_own_size() -> None:
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


def test_pass_looks_at_so_many_entries_and_no_more() -> None:
    admission_pass, entries = waiting(*[WIDE] * LOOK_AHEAD, REQUEST)
    admission_pass.without_room(entries[0])
    assert admission_pass.next() is None
    fewer, entries = waiting(*[WIDE] * (LOOK_AHEAD - 1), REQUEST)
    fewer.without_room(entries[0])
    assert fewer.next() is entries[-1]


async def test_request_that_was_begun_is_not_refused_while_its_workers_are_absent() -> None:
    queue = AdmissionQueue(
        cluster_with(8, (WorkerRole.PREFILL,)), replace(DEFAULT_LIMITS, without_workers_s=5.0), POLICY
    )
    begun = asyncio.create_task(admit(queue, 1, REQUEST, (), RequestClass(priority=BEGUN_PRIORITY)))
    new = asyncio.create_task(admit(queue, 2, REQUEST, ()))
    await settled()
    put_forward(6.0)
    with pytest.raises(Unavailable, match="no decode worker"):
        await new
    assert not begun.done() and queue.waiting == 1
    queue.close()
    await asyncio.gather(begun, return_exceptions=True)


async def test_request_that_waits_alone_is_not_given_up_for_its_deadline() -> None:
    """There is nobody whom its room would serve: its own timer ends it."""
    cluster, clock = cluster_with(slots=1), Clock()
    queue = AdmissionQueue(cluster, DEFAULT_LIMITS, POLICY, clock)
    await answer(queue, cluster, clock, 1, seconds=2.0)
    await admit(queue, 2, REQUEST, ())
    late = asyncio.create_task(admit(queue, 3, REQUEST, (), RequestClass(deadline_s=clock.now + 6.0)))
    await settled()
    clock.now += 5.5
    cluster.release(2, "decode")
    queue.pump()
    await late


async def test_first_in_the_queue_is_accepted_whatever_is_expected_of_it() -> None:
    """Estimates refuse only those that would wait behind others."""
    cluster, clock = cluster_with(slots=1), Clock()
    queue = AdmissionQueue(cluster, replace(DEFAULT_LIMITS, max_waiting_per_tenant=0), POLICY, clock)
    await answer(queue, cluster, clock, 1, seconds=2.0)
    await admit(queue, 2, REQUEST, (), RequestClass(deadline_s=clock.now + 0.1))
    first = asyncio.create_task(admit(queue, 3, REQUEST, ()))
    await settled()
    assert queue.waiting == 1
    with pytest.raises(ResourceExhausted, match="of this caller"):
        await admit(queue, 4, REQUEST, ())
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_request_that_waited_too_long_lets_those_behind_it_in() -> None:
    cluster = cluster_with(slots=2)
    queue = AdmissionQueue(cluster, replace(DEFAULT_LIMITS, max_wait_s=5.0), POLICY)
    await admit(queue, 1, REQUEST, ())
    wide = asyncio.create_task(admit(queue, 2, WIDE, ()))
    await settled()
    for attempt_id in (3, 4):  # it was overtaken by its own size: room is kept for it
        await admit(queue, attempt_id, REQUEST, ())
        cluster.release(attempt_id, "decode")
    put_forward(4.0)
    late = asyncio.create_task(admit(queue, 5, REQUEST, ()))
    await settled()
    assert not late.done()
    put_forward(2.0)
    with pytest.raises(ResourceExhausted, match="within 5 s"):
        await wide
    await late

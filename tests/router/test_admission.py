"""The queue for room: first come first served, bounded, and never leaking a charge."""

import asyncio

import pytest

from router.admission import AdmissionLimits, AdmissionQueue
from router.cluster import Cluster
from router.placement import NoPrefillWorker, PlacementPolicy, PlacementRequest
from router.worker import ModelDescription, PageCounts, WorkerDescription, WorkerReport, WorkerRole
from service.errors import InvalidArgument, ResourceExhausted, Unavailable

MODEL = ModelDescription("m", "/m", 128, 100, "float32", 4)
LIMITS = AdmissionLimits(max_waiting=3, max_wait_s=5.0, without_workers_s=5.0)
POLICY = PlacementPolicy(NoPrefillWorker.QUEUE)
REQUEST = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=4, max_tokens=4, choices=1)


def cluster_with(slots: int, roles: tuple[WorkerRole, ...] = (WorkerRole.PREFILL, WorkerRole.DECODE)) -> Cluster:
    cluster = Cluster()
    for role in roles:
        cluster.add(role.value, role)
        cluster.connected(role.value, WorkerDescription(role.value, role, 1, b"f", MODEL, 100, 8), epoch=1)
        cluster.reported(role.value, WorkerReport(100, slots, PageCounts(100, 100, 0, 0, 0, 0), 0, 0, 0, False, 0))
    return cluster


def charges(cluster: Cluster) -> list[set[int]]:
    return [set(worker.charges) for worker in cluster.workers]


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_are_admitted_in_order_as_room_becomes_free() -> None:
    cluster = cluster_with(slots=1)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    await queue.admit(1, REQUEST, ())
    waiting = [asyncio.create_task(queue.admit(attempt_id, REQUEST, ())) for attempt_id in (2, 3)]
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


async def test_a_small_request_does_not_overtake() -> None:
    cluster = cluster_with(slots=2)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    await queue.admit(1, REQUEST, ())
    wide = PlacementRequest(b"f", 4, prompt_tokens=4, max_tokens=4, choices=2)
    first = asyncio.create_task(queue.admit(2, wide, ()))
    await settled()
    second = asyncio.create_task(queue.admit(3, REQUEST, ()))
    await settled()
    assert not second.done()
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert charges(cluster) == [{1}, {1}]


async def test_whoever_leaves_the_queue_lets_the_next_one_in() -> None:
    cluster = cluster_with(slots=2)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    await queue.admit(1, REQUEST, ())
    wide = asyncio.create_task(queue.admit(2, PlacementRequest(b"f", 4, 4, 4, choices=2), ()))
    await settled()
    narrow = asyncio.create_task(queue.admit(3, REQUEST, ()))
    await settled()
    wide.cancel()
    await narrow
    assert charges(cluster) == [{1, 3}, {1, 3}]


async def test_a_cancellation_in_the_moment_of_placement_returns_the_charge() -> None:
    cluster = cluster_with(slots=1)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    await queue.admit(1, REQUEST, ())
    waiting = asyncio.create_task(queue.admit(2, REQUEST, ()))
    await settled()
    cluster.release(1, "decode")
    queue.pump()  # placed and charged
    assert charges(cluster)[1] == {2}
    waiting.cancel()  # before it runs again
    await asyncio.gather(waiting, return_exceptions=True)
    assert charges(cluster) == [{1}, set()]


async def test_a_full_queue_refuses() -> None:
    queue = AdmissionQueue(cluster_with(slots=0), LIMITS, POLICY)
    waiting = [asyncio.create_task(queue.admit(attempt_id, REQUEST, ())) for attempt_id in range(3)]
    await settled()
    with pytest.raises(ResourceExhausted, match="waiting already"):
        await queue.admit(4, REQUEST, ())
    queue.close()
    assert all(isinstance(error, Unavailable) for error in await asyncio.gather(*waiting, return_exceptions=True))


async def test_waiting_for_room_is_bounded() -> None:
    queue = AdmissionQueue(cluster_with(slots=0), AdmissionLimits(max_wait_s=0.01), POLICY)
    with pytest.raises(ResourceExhausted, match="no room"):
        await queue.admit(1, REQUEST, ())
    assert queue.waiting == 0


@pytest.mark.parametrize("missing", WorkerRole)
async def test_waiting_for_workers_is_bounded(missing: WorkerRole) -> None:
    roles = tuple(role for role in WorkerRole if role is not missing)
    queue = AdmissionQueue(cluster_with(slots=8, roles=roles), AdmissionLimits(without_workers_s=0.01), POLICY)
    with pytest.raises(Unavailable, match=f"no {missing.value} worker"):
        await queue.admit(1, REQUEST, ())


async def test_what_can_never_fit_is_refused_and_lets_the_next_one_in() -> None:
    cluster = cluster_with(slots=8)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    with pytest.raises(InvalidArgument) as caught:
        await queue.admit(1, PlacementRequest(b"f", 4, prompt_tokens=4, max_tokens=400, choices=1), ())
    assert caught.value.field == "sampling.max_tokens"
    await queue.admit(2, REQUEST, ())


async def test_draining_and_lost_workers_take_nothing() -> None:
    cluster = cluster_with(slots=8)
    queue = AdmissionQueue(cluster, AdmissionLimits(without_workers_s=0.01), POLICY)
    cluster.lost("decode")
    with pytest.raises(Unavailable):
        await queue.admit(1, REQUEST, ())


async def test_a_router_told_to_refuse_does_not_wait_for_a_prefill_worker() -> None:
    queue = AdmissionQueue(
        cluster_with(8, (WorkerRole.DECODE,)), AdmissionLimits(), PlacementPolicy(NoPrefillWorker.REJECT)
    )
    with pytest.raises(Unavailable, match="no prefill worker"):
        await queue.admit(1, REQUEST, ())


async def test_a_prompt_for_the_decode_worker_is_charged_there_alone() -> None:
    cluster = cluster_with(8, (WorkerRole.DECODE,))
    queue = AdmissionQueue(cluster, LIMITS, PlacementPolicy(NoPrefillWorker.LOCAL))
    placement = (await queue.admit(1, REQUEST, ())).placement
    assert (placement.prefill, charges(cluster)) == (None, [{1}])

"""Much that happens in one turn of the event loop: the queue for room is looked at once, behind all of it."""

import asyncio
from dataclasses import replace
from unittest.mock import Mock, patch

from baton.router.admission.queue import AdmissionQueue
from tests.fixtures.router_defaults import DEFAULT_LIMITS
from tests.router.test_admission import LIMITS, POLICY, REQUEST, admit, cluster_with, settled


async def test_of_many_given_up_at_once_none_is_placed_in_the_room_of_another() -> None:
    cluster = cluster_with(slots=1)
    queue = AdmissionQueue(cluster, LIMITS, POLICY)
    charge = Mock(wraps=cluster.charge)
    await admit(queue, 1, REQUEST, ())
    waiting = [asyncio.create_task(admit(queue, attempt_id, REQUEST, ())) for attempt_id in (2, 3)]
    last = asyncio.create_task(admit(queue, 4, REQUEST, ()))
    await settled()
    for task in waiting:
        task.cancel()
    cluster.release(1, "decode")
    with patch.object(cluster, "charge", charge):
        queue.pump_soon()
        await last
    assert [call.args[0] for call in charge.call_args_list] == [4]


async def test_a_newcomer_to_a_full_queue_has_the_room_of_the_same_turn() -> None:
    cluster = cluster_with(slots=1)
    queue = AdmissionQueue(
        cluster, replace(DEFAULT_LIMITS, max_waiting=1, max_wait_s=5.0, without_workers_s=5.0), POLICY
    )
    await admit(queue, 1, REQUEST, ())
    waiting = asyncio.create_task(admit(queue, 2, REQUEST, ()))
    await settled()
    newcomer = asyncio.create_task(admit(queue, 3, REQUEST, ()))
    cluster.release(1, "decode")
    queue.pump_soon()
    await waiting
    cluster.release(2, "decode")
    queue.pump_soon()
    await newcomer


async def test_a_bug_in_the_queue_is_told() -> None:
    told: list[Exception] = []
    queue = AdmissionQueue(cluster_with(slots=1), DEFAULT_LIMITS, POLICY, on_fault=told.append)
    queue.pump = Mock(side_effect=ZeroDivisionError)  # type: ignore[method-assign]
    queue.pump_soon()
    await settled()
    assert [type(error) for error in told] == [ZeroDivisionError]

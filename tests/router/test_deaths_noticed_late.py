"""A decode worker reports the death of its prefill worker before the router notices it: it counts all the same."""

import asyncio
import time

import pytest

from baton.process.errors import Internal
from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.cluster import LinkEnd
from baton.router.request.attempt import POISON_DEATHS
from baton.router.types.events import FailureReason
from baton.router.types.request import PreparedRequest
from baton.router.types.worker import ModelDescription, PoolBlocks, WorkerDescription, WorkerReport
from tests.router.replay_world import (
    BLOCK_TOKENS,
    PLACEMENT,
    Fate,
    World,
    generation_of,
    read,
    request_of,
    scheduling_of,
)

pytestmark = pytest.mark.usefixtures("no_pauses")
MODEL = ModelDescription("m", "/m", 1000, 300, "float32", BLOCK_TOKENS)
PREFILL = str(PLACEMENT.prefill)
LATE_S = 0.12  # more than a look at the worker


def report(world: World) -> None:
    world.cluster.reported(PREFILL, WorkerReport(100, 8, PoolBlocks(100, 100, 0, 0, 0, 0), 0, 0, 0, False, 0))


@pytest.fixture
def world() -> World:
    """The prefill worker is connected, and no transfer from it succeeds."""
    world = World([Fate(outputs=1, reason=FailureReason.TRANSFER)] * 3)
    world.cluster.add(PREFILL, WorkerRole.PREFILL)
    world.cluster.connected(PREFILL, WorkerDescription(PREFILL, WorkerRole.PREFILL, 1, b"f", MODEL, 100, 8), epoch=1)
    report(world)
    return world


async def test_a_request_that_kills_its_prefill_workers_is_refused_however_late_that_is_noticed(world: World) -> None:
    epochs = iter(range(2, 9))

    def dispatched(request: PreparedRequest) -> None:
        asyncio.get_running_loop().call_later(LATE_S, dies)

    def dies() -> None:
        world.cluster.lost(PREFILL, LinkEnd.GONE, time.monotonic())
        again = WorkerDescription(PREFILL, WorkerRole.PREFILL, 1, b"f", MODEL, 100, 8)
        world.cluster.connected(PREFILL, again, next(epochs))
        report(world)

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

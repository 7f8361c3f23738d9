"""What routers tell each other: what is heard counts for a while, each prediction once, and silence is no error."""

import asyncio
from contextlib import suppress

import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.router.admin.wire import router_status
from baton.router.fleet.peers import PeerRouters
from baton.router.placement.decide import Placement
from baton.router.placement.peer_load import (
    MAX_AGE_S,
    PeerRouterLoads,
    Prediction,
    RecentPredictions,
    Share,
    WorkerLoad,
)
from baton.router.types.placement import PlacementRequest, WorkerView
from tests.fixtures.loop_clock import Clock
from tests.fixtures.waiting import BOUND_S
from tests.router.clusters import cluster_of
from tests.router.shared_redis import RouterShares, SharedRedis

CHAIN = tuple(bytes([i]) * 32 for i in range(4))
REQUEST = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=17, max_tokens=8, choices=1)
PLACED = Placement("p0", "d0", 0, 0, 0, 0, 1, 1)


class Router:
    """One router's cluster of a prefill and a decode worker, and its place among the others."""

    def __init__(self, redis: SharedRedis, number: int, clock: Clock) -> None:
        self.cluster = cluster_of({"p0": WorkerRole.PREFILL, "d0": WorkerRole.DECODE})
        self.taken_over: list[int] = []
        self.peer_routers = PeerRouters(
            self.cluster,
            redis.of_router(number),
            bytes([number]) * 16,
            self.taken_over.append,
            clock=clock,
            address=f"host-{number}:1",
        )

    def view(self, endpoint: str) -> WorkerView:
        return next(view for view in self.cluster.snapshot(CHAIN) if view.endpoint == endpoint)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def redis() -> SharedRedis:
    return SharedRedis()


@pytest.fixture
def two(redis: SharedRedis, clock: Clock) -> tuple[Router, Router]:
    return Router(redis, 0, clock), Router(redis, 1, clock)


async def test_router_counts_charges_and_predictions_of_another(two: tuple[Router, Router]) -> None:
    first, second = two
    first.cluster.charge(1, PLACED, REQUEST, CHAIN)
    await first.peer_routers.exchange()
    await second.peer_routers.exchange()
    assert second.peer_routers.others == 1
    assert second.view("p0").tokens_in_flight == first.view("p0").tokens_in_flight == 17
    assert second.view("d0").elsewhere_slots == 1
    assert second.view("d0").used_slots == 0, "another router's credit was taken for its own"
    assert second.view("p0").hit_blocks == 4


async def test_router_says_where_and_how_long_it_has_been_there(two: tuple[Router, Router], clock: Clock) -> None:
    first, second = two
    first.cluster.charge(1, PLACED, REQUEST, CHAIN)
    clock.now_s += 61.0
    await first.peer_routers.exchange()
    await second.peer_routers.exchange()
    [share] = second.peer_routers.shares
    told = router_status(share, decode={"d0"})
    assert (told.router_id, told.address, told.uptime_s) == (bytes(16), "host-0:1", 61.0)
    assert (told.requests, told.tokens) == (1, first.view("p0").tokens_in_flight + first.view("d0").tokens_in_flight)


async def test_router_learns_which_of_its_streams_another_resumed(two: tuple[Router, Router]) -> None:
    first, second = two
    second.peer_routers.took_over(b"\x00" * 16, 7)
    second.peer_routers.took_over(b"\x09" * 16, 8)
    for _ in range(5):
        await second.peer_routers.exchange()
        await first.peer_routers.exchange()
    assert set(first.taken_over) == {7}
    assert len(first.taken_over) == 3, "it is told in a few shares and then no more"
    assert second.taken_over == []


async def test_released_load_is_heard(two: tuple[Router, Router]) -> None:
    first, second = two
    first.cluster.charge(1, PLACED, REQUEST, CHAIN)
    await first.peer_routers.exchange()
    for endpoint in PLACED.endpoints:
        first.cluster.release(1, endpoint)
    await first.peer_routers.exchange()
    await second.peer_routers.exchange()
    assert second.view("p0").tokens_in_flight == 0


async def test_shares_of_an_exited_router_expire_within_a_second(two: tuple[Router, Router], clock: Clock) -> None:
    first, second = two
    first.cluster.charge(1, PLACED, REQUEST, CHAIN)
    await first.peer_routers.exchange()
    await second.peer_routers.exchange()
    clock.now_s += MAX_AGE_S + 0.1
    await second.peer_routers.exchange()
    assert (second.peer_routers.others, second.view("p0").tokens_in_flight) == (0, 0)


async def test_without_redis_each_router_goes_by_itself_and_with_it_again_by_all(
    two: tuple[Router, Router], redis: SharedRedis, clock: Clock
) -> None:
    first, second = two
    first.cluster.charge(1, PLACED, REQUEST, CHAIN)
    await first.peer_routers.exchange()
    await second.peer_routers.exchange()
    redis.gone = True
    clock.now_s += MAX_AGE_S + 0.1
    assert not await second.peer_routers.exchange()
    assert second.view("p0").tokens_in_flight == 0
    redis.gone = False
    await first.peer_routers.exchange()
    assert await second.peer_routers.exchange()
    assert second.view("p0").tokens_in_flight == 17


async def test_entries_of_other_versions_are_passed_over(two: tuple[Router, Router], redis: SharedRedis) -> None:
    redis.shares[7] = b"\xff\xff"
    assert await two[0].peer_routers.exchange()
    assert two[0].peer_routers.others == 0


async def test_peer_ends_though_the_store_swallows_its_cancellation(redis: SharedRedis, clock: Clock) -> None:
    """As redis-py does with a cancellation that comes together with its answer."""
    router, asked = Router(redis, 0, clock), asyncio.Event()

    class Swallowing(RouterShares):
        async def exchange(self, share: bytes) -> tuple[bytes, ...]:
            asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return ()

    running = asyncio.create_task(PeerRouters(router.cluster, Swallowing(redis, 0), bytes(16), clock=clock).run())
    await asked.wait()
    running.cancel()
    async with asyncio.timeout(BOUND_S):
        await asyncio.wait([running])


def share(number: int, predictions: tuple[Prediction, ...]) -> Share:
    return Share(b"r" * 16, number, {"w": WorkerLoad(tokens=number)}, predictions)


def test_each_prediction_is_applied_once_and_older_shares_are_ignored() -> None:
    view = PeerRouterLoads()
    one, two, three = (Prediction(number, "w", CHAIN) for number in (1, 2, 3))
    assert list(view.take(share(5, (one, two)), 0.0)) == [one, two]
    assert list(view.take(share(6, (two, three)), 0.1)) == [three]
    assert list(view.take(share(4, (one,)), 0.2)) == []
    assert view.loads()["w"].tokens == 6


def test_prediction_is_sent_in_three_shares_and_the_oldest_are_dropped() -> None:
    recent = RecentPredictions(shares=3, max_blocks=10)
    for number in range(4):
        recent.add(f"w{number}", CHAIN, 17)
    assert [each.endpoint for each in recent.take()] == ["w2", "w3"]
    assert [len(recent.take()) for _ in range(3)] == [2, 2, 0]

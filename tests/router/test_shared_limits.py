"""Two routers and one key: together they let through what one would, but for what neither can have heard of yet."""

import random

import pytest

from baton.process.errors import RateLimited
from baton.process.registry.redis_registry import RegistryUnavailable
from baton.process.security.api_keys import KeyLimits
from baton.router.admission.key_limits import KeyMeter, KeyMeters
from baton.router.fleet.peers import PERIOD_S, PeerRouters, SharedLimits
from baton.router.placement.cluster import Cluster
from baton.router.placement.peer_load import MAX_AGE_S, KeyUse


class Redis:
    gone = False

    def __init__(self) -> None:
        self.shares: dict[int, bytes] = {}


class Place:
    """One router's place on it."""

    def __init__(self, redis: Redis, number: int) -> None:
        self._redis, self._number = redis, number

    async def exchange(self, share: bytes) -> tuple[bytes, ...]:
        if self._redis.gone:
            raise RegistryUnavailable("it is gone")
        self._redis.shares[self._number] = share
        return tuple(each for number, each in self._redis.shares.items() if number != self._number)

    async def close(self) -> None:
        """Nothing is open."""


class Pair:
    """Two routers, each of which exchanges once in a period, at times of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.redis = Redis()
        self.meters = (KeyMeters(), KeyMeters())
        self._peer_routers = [
            PeerRouters(
                Cluster(), Place(self.redis, number), bytes([number]) * 16, meters=meters, clock=lambda: self.now
            )
            for number, meters in enumerate(self.meters)
        ]

    async def period(self) -> None:
        for peer_routers in self._peer_routers:
            self.now += PERIOD_S / 2
            await peer_routers.exchange()

    def begin(self, router: int, limits: KeyLimits) -> KeyMeter | None:
        """None where it is refused."""
        try:
            return self.meters[router].begin("a", limits, self.now)
        except RateLimited:
            return None


@pytest.fixture
async def two() -> Pair:
    pair = Pair()
    for _ in range(3):
        await pair.period()
    return pair


async def test_requests_a_minute_at_two_routers_are_those_of_one(two: Pair) -> None:
    """Ten times as many are tried as are allowed, at both. A minute's worth is there at first, and one flows in."""
    limits, draw, began = KeyLimits(requests_per_minute=120), random.Random(1), 0
    beginning = two.now
    while two.now < beginning + 60:
        for _ in range(2):
            meter = two.begin(draw.randrange(2), limits)
            if meter is not None:
                began += 1
                meter.end()
        await two.period()
    assert 240 * 0.95 <= began <= 240 + 4


async def test_a_burst_at_both_at_once_is_paid_back(two: Pair) -> None:
    limits, began, beginning = KeyLimits(requests_per_minute=60), 0, two.now
    while two.now < beginning + 120:
        for router in (0, 1):
            while (meter := two.begin(router, limits)) is not None:
                began += 1
                meter.end()
        await two.period()
    assert began <= 60 + 120 + 4, "a minute's worth at first, and one for every minute"


async def test_tokens_a_minute_at_two_routers_are_those_of_one(two: Pair) -> None:
    limits, charged, beginning = KeyLimits(tokens_per_minute=6000), 0, two.now
    while two.now < beginning + 60:
        for router in (0, 1):
            if (meter := two.begin(router, limits)) is not None:
                meter.charge_answer(100, two.now)
                charged += 100
                meter.end()
        await two.period()
    assert 12_000 * 0.95 <= charged <= 12_000 + 4 * 100


async def test_at_once_no_more_than_at_one_router_once_they_have_heard(two: Pair) -> None:
    limits = KeyLimits(concurrency=8)
    running = []
    for _ in range(40):
        for router in (0, 1):
            if (meter := two.begin(router, limits)) is not None:
                running.append(meter)
        await two.period()
    assert 8 <= len(running) <= 8 + 1, "one at the other router, within a period"
    for meter in running[:5]:
        meter.end()
    await two.period()
    assert two.begin(0, limits) is not None


async def test_without_redis_each_goes_by_itself(two: Pair) -> None:
    limits = KeyLimits(concurrency=2)
    assert two.begin(0, limits) and two.begin(0, limits)
    await two.period()
    assert two.begin(1, limits) is None
    two.redis.gone = True
    for _ in range(int(MAX_AGE_S / PERIOD_S) + 2):
        await two.period()
    assert two.begin(1, limits) and two.begin(1, limits)
    assert two.begin(1, limits) is None


def test_what_a_router_says_again_is_charged_once_and_a_gap_is_made_up() -> None:
    limits, other = SharedLimits(), b"o" * 16
    assert list(limits.take(other, {"a": KeyUse(0, 100, 5)})) == [], "before it was heard of"
    assert list(limits.take(other, {"a": KeyUse(2, 103, 9)})) == [("a", 3, 4)]
    assert list(limits.take(other, {"a": KeyUse(1, 103, 9), "b": KeyUse(1, 1, 0)})) == [("b", 1, 0)]
    assert limits.active() == {"a": 1, "b": 1}
    limits.keep(())
    assert limits.active() == {}

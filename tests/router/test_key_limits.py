"""What a key may take: against a plain count in random histories, at one router and at two."""

import random

import pytest

from baton.process.errors import RateLimited
from baton.process.security.api_keys import KeyLimits
from baton.router.admission.key_limits import Bucket, KeyMeter, KeyMeters
from baton.router.admission.queue import RETRY_AFTER_S
from baton.router.fleet.peers import PERIOD_S, PeerRouters, SharedLimits
from baton.router.placement.cluster import Cluster
from baton.router.placement.peer_load import MAX_AGE_S, KeyUse
from tests.router.shared_redis import SharedRedis


def refusal(meter: KeyMeter, now: float) -> RateLimited | None:
    try:
        meter.begin(now)
    except RateLimited as error:
        return error
    return None


def test_requests_of_any_minute_are_at_most_twice_the_limit() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        allowed, now = draw.randint(1, 100), 0.0
        meter, taken = KeyMeter("a", KeyLimits(requests_per_minute=allowed), now), list[float]()
        for _ in range(100):
            now += draw.expovariate(allowed / 20)
            if refusal(meter, now) is None:
                taken.append(now)
                meter.end()
        for index, begun in enumerate(taken):
            window = sum(begun <= each < begun + 60 for each in taken[index:])
            assert window <= 2 * allowed  # the full bucket, and what flows in
        assert len(taken) <= allowed + allowed * now / 60 + 1


def test_client_is_admitted_at_the_stated_time_and_no_earlier() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        limits = KeyLimits(requests_per_minute=draw.randint(1, 600), tokens_per_minute=draw.randint(1, 10_000))
        meter, now = KeyMeter("a", limits, 0.0), 0.0
        for _ in range(50):
            error = refusal(meter, now)
            if error is None:
                meter.charge_answer(draw.randint(0, 500), now)
                continue
            early = refusal(meter, now + 0.9 * error.retry_after_s)
            assert early is not None
            now += error.retry_after_s + early.retry_after_s + 1e-6
            while (again := refusal(meter, now)) is not None:  # the other bucket may be empty too
                assert again.limit != error.limit or again.retry_after_s < 1e-3
                now += again.retry_after_s + 1e-6


def test_tokens_of_prompts_and_answers_are_one_account() -> None:
    meter = KeyMeter("a", KeyLimits(tokens_per_minute=600), 0.0)
    meter.begin(0.0)
    meter.charge_prompt(400, 0.0)
    meter.charge_answer(250, 0.0)  # 50 more than there were: nobody is cut off
    error = refusal(meter, 0.0)
    assert error is not None and error.limit == "tokens_per_minute"
    assert error.retry_after_s == pytest.approx(5.1)  # 50 of debt and 1 to go on with, 10 a second
    meter.begin(5.2)
    with pytest.raises(RateLimited) as refused:
        meter.charge_prompt(102, 5.2)
    assert refused.value.retry_after_s == pytest.approx(10.0)
    meter.charge_prompt(2, 5.2)


def test_prompt_longer_than_any_minute_needs_a_full_one() -> None:
    meter = KeyMeter("a", KeyLimits(tokens_per_minute=60), 0.0)
    meter.charge_prompt(200, 0.0)
    with pytest.raises(RateLimited) as refused:
        meter.charge_prompt(200, 10.0)
    assert refused.value.retry_after_s == pytest.approx(190.0)
    meter.charge_prompt(200, 200.0)


def test_concurrent_requests_reach_their_limit() -> None:
    meter = KeyMeter("a", KeyLimits(concurrency=3, requests_per_minute=100), 0.0)
    for _ in range(3):
        meter.begin(0.0)
    for _ in range(500):
        error = refusal(meter, 0.0)
        assert error is not None and (error.limit, error.retry_after_s) == ("concurrency", RETRY_AFTER_S)
    meter.end()
    meter.begin(0.0)  # refusals have taken nothing of the minute


def test_keys_have_separate_accounts_and_new_limits_apply_immediately() -> None:
    meters, tight = KeyMeters(), KeyLimits(requests_per_minute=1)
    for tenant in ("a", "b"):
        meters.begin(tenant, tight, 0.0)
        with pytest.raises(RateLimited, match=f"the API key {tenant} allows 1 requests per minute"):
            meters.begin(tenant, tight, 1.0)
    wide = KeyLimits(requests_per_minute=600)
    with pytest.raises(RateLimited):
        meters.begin("a", wide, 1.0)  # what was taken stays taken
    meters.begin("a", wide, 2.0)


def test_stopped_or_reversed_clock_adds_nothing() -> None:
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(100.0) == bucket.level(50.0) == bucket.level(100.0) == 0.0


def test_bucket_fills_evenly_and_keeps_its_level_when_its_limit_changes() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(60, 0.0)
    assert (bucket.level(10.0), bucket.level(1000.0)) == (10.0, 60.0)
    bucket.take(30, 1000.0)
    bucket.change(600, 1001.0)
    assert (bucket.level(1001.0), bucket.level(1002.0)) == (31.0, 41.0), "it filled slowly until the change"
    bucket.change(20, 1002.0)
    assert bucket.level(1002.0) == 20.0
    assert bucket.wait_s(50, 1002.0) == 0.0, "more than it can hold is there when it is full"
    bucket.take(5, 1002.0)
    assert bucket.wait_s(20, 1002.0) == 15.0


def test_new_limit_is_charged_for_peers_requests_of_the_last_minute() -> None:
    meter = KeyMeter("a", KeyLimits(), 0.0)
    meter.taken_elsewhere(3, 30, 0.0)
    meter.taken_elsewhere(4, 40, 50.0)
    meter.follow(KeyLimits(requests_per_minute=10, tokens_per_minute=100), 60.0)
    assert meter._requests is not None and meter._tokens is not None
    assert (meter._requests.level(60.0), meter._tokens.level(60.0)) == (6.0, 60.0)


LIMITED = KeyLimits(requests_per_minute=30, tokens_per_minute=3000, concurrency=8)


def test_tokens_let_through_elsewhere_are_charged_here() -> None:
    meters = KeyMeters()
    for _ in range(2):
        meters.begin("a", LIMITED, 0.0)
    meters.taken_elsewhere("a", 28, 0, 0.0)
    with pytest.raises(RateLimited, match="30 requests per minute"):
        meters.begin("a", LIMITED, 0.0)
    meters.taken_elsewhere("a", 0, 3500, 0.0)
    with pytest.raises(RateLimited) as refused:
        meters.begin("a", LIMITED, 0.0)
    assert (refused.value.retry_after_s or 0.0) > 500 / 50, "what was too much is a debt"
    meters.begin("a", LIMITED, 20.0)


def test_charge_elsewhere_counts_for_a_key_not_yet_seen_here_for_a_minute() -> None:
    for pause_s, allowed in ((1.0, False), (61.0, True)):
        meters = KeyMeters()
        meters.taken_elsewhere("a", 60, 0, 0.0)
        if allowed:
            meters.begin("a", LIMITED, pause_s)
        else:
            with pytest.raises(RateLimited):
                meters.begin("a", LIMITED, pause_s)


def test_active_requests_of_other_routers_count_while_active() -> None:
    meters = KeyMeters()
    meters.begin("a", LIMITED, 0.0)
    meters.active_on_peers({"a": 7})
    with pytest.raises(RateLimited, match="8 concurrent requests"):
        meters.begin("a", LIMITED, 0.0)
    meters.active_on_peers({})
    meters.begin("a", LIMITED, 0.0)


def test_router_reports_its_own_admissions_only() -> None:
    meters = KeyMeters()
    meters.taken_elsewhere("b", 5, 5, 0.0)
    first, _ = meters.begin("a", LIMITED, 0.0), meters.begin("a", LIMITED, 0.0)
    assert first is not None
    first.charge_prompt(10, 0.0)
    first.charge_answer(3, 0.0)
    first.end()
    meters.taken_elsewhere("a", 5, 5, 0.0)
    assert meters.uses() == {"a": KeyUse(active=1, requests=2, tokens=13)}


class Pair:
    """Two routers, each of which exchanges once in a period, at times of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.redis = SharedRedis()
        self.meters = (KeyMeters(), KeyMeters())
        self._peer_routers = [
            PeerRouters(
                Cluster(), self.redis.of_router(number), bytes([number]) * 16, meters=meters, clock=lambda: self.now
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


async def test_two_routers_together_keep_requests_per_minute(two: Pair) -> None:
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


async def test_burst_at_two_routers_is_paid_back(two: Pair) -> None:
    limits, began, beginning = KeyLimits(requests_per_minute=60), 0, two.now
    while two.now < beginning + 120:
        for router in (0, 1):
            while (meter := two.begin(router, limits)) is not None:
                began += 1
                meter.end()
        await two.period()
    assert began <= 60 + 120 + 4, "a minute's worth at first, and one for every minute"


async def test_two_routers_together_keep_tokens_per_minute(two: Pair) -> None:
    limits, charged, beginning = KeyLimits(tokens_per_minute=6000), 0, two.now
    while two.now < beginning + 60:
        for router in (0, 1):
            if (meter := two.begin(router, limits)) is not None:
                meter.charge_answer(100, two.now)
                charged += 100
                meter.end()
        await two.period()
    assert 12_000 * 0.95 <= charged <= 12_000 + 4 * 100


async def test_two_routers_together_keep_the_concurrency_limit_after_an_exchange(two: Pair) -> None:
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


def test_repeated_charge_counts_once_and_a_gap_is_made_up() -> None:
    limits, other = SharedLimits(), b"o" * 16
    assert list(limits.take(other, {"a": KeyUse(0, 100, 5)})) == [], "before it was heard of"
    assert list(limits.take(other, {"a": KeyUse(2, 103, 9)})) == [("a", 3, 4)]
    assert list(limits.take(other, {"a": KeyUse(1, 103, 9), "b": KeyUse(1, 1, 0)})) == [("b", 1, 0)]
    assert limits.active() == {"a": 1, "b": 1}
    limits.keep(())
    assert limits.active() == {}

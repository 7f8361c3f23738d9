"""The registry on a real Redis or Valkey: leases, epochs, loss and recovery."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from baton.process.registry.membership import (
    Epoch,
    Membership,
    Registration,
    StaticMembership,
    open_registry,
    take_epoch,
)
from baton.process.registry.redis_registry import Announced, RedisRegistry, RegistryUnavailable
from baton.process.registry.redis_server import RedisServer, start_redis_server
from baton.process.registry.worker_record import WorkerRecord, WorkerRole, parse_workers
from tests.fixtures.session_client import eventually

pytestmark = pytest.mark.usefixtures("lasting_records")
NOWHERE = "redis://127.0.0.1:1/0"
SOON_S = 20.0  # a second or two, on a machine that is not busy


def _record(worker_id: str = "decode-0", epoch: int = 5) -> WorkerRecord:
    return WorkerRecord(worker_id, WorkerRole.DECODE, "127.0.0.1:7", epoch, "ab")


@pytest.fixture
async def registry(server: RedisServer) -> AsyncIterator[RedisRegistry]:
    registry = RedisRegistry(server.url, "test")
    yield registry
    await registry.close()


async def test_announced_workers_are_listed_until_withdrawn(registry: RedisRegistry) -> None:
    first, second = _record("a"), _record("b")
    assert await registry.announce(first) is Announced.ACCEPTED
    assert await registry.announce(second) is Announced.ACCEPTED
    assert set(await registry.workers()) == {first, second}
    await registry.withdraw(first)
    assert await registry.workers() == (second,)


async def test_unrenewed_record_expires(registry: RedisRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.process.registry.redis_registry.TTL_MS", 20)
    await registry.announce(_record())
    async with asyncio.timeout(20):
        while await registry.workers():
            await asyncio.sleep(0.005)


async def test_namespaces_do_not_see_each_other(server: RedisServer, registry: RedisRegistry) -> None:
    other = RedisRegistry(server.url, "other")
    await registry.announce(_record())
    assert await other.workers() == ()
    await other.close()


async def test_older_epoch_never_overwrites_and_is_reported(registry: RedisRegistry) -> None:
    await registry.announce(_record(epoch=6))
    assert await registry.announce(_record(epoch=5)) is Announced.FENCED
    await registry.withdraw(_record(epoch=5))
    assert await registry.workers() == (_record(epoch=6),)


async def test_zombie_stays_fenced_after_its_successor_left(registry: RedisRegistry) -> None:
    await registry.announce(_record(epoch=6))
    await registry.withdraw(_record(epoch=6))
    assert await registry.announce(_record(epoch=5)) is Announced.FENCED


async def test_epochs_rise_even_where_the_clock_went_back(registry: RedisRegistry) -> None:
    assert await registry.take_epoch(proposed=1_700_000_000_000) == 1_700_000_000_000
    assert await registry.take_epoch(proposed=5) == 1_700_000_000_001
    await registry.announce(_record(epoch=1_800_000_000_000))
    assert await registry.take_epoch(proposed=5) == 1_800_000_000_001


async def test_unreadable_record_is_left_out_and_logged_once(
    server: RedisServer, registry: RedisRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    from redis.asyncio import Redis

    redis: Any = Redis.from_url(server.url)
    await redis.set("baton:{test}:worker:x", "nonsense")
    await redis.sadd("baton:{test}:workers", "x")
    await redis.aclose()
    await registry.announce(_record())
    assert await registry.workers() == (_record(),)
    assert await registry.workers() == (_record(),)
    assert len(caplog.records) == 1


async def test_epoch_is_taken_from_the_clock_without_redis() -> None:
    started = time.monotonic()
    registry = open_registry(NOWHERE, "test")
    for epoch in (await take_epoch(registry), await take_epoch(None)):
        assert epoch.from_clock and epoch.number > 1_700_000_000_000
    assert time.monotonic() - started < SOON_S
    assert open_registry(None, "test") is None


async def test_black_holed_redis_times_out() -> None:
    with socket.socket() as hole:  # accepts by its backlog, answers nothing
        hole.bind(("127.0.0.1", 0))
        hole.listen()
        registry = RedisRegistry(f"redis://127.0.0.1:{hole.getsockname()[1]}/0", "test")
        started = time.monotonic()
        with pytest.raises(RegistryUnavailable):
            await registry.workers()
        assert time.monotonic() - started < SOON_S
        await registry.close()


async def test_registration_renews_and_withdraws(server: RedisServer, registry: RedisRegistry) -> None:
    registration = Registration(RedisRegistry(server.url, "test"), _record(), Epoch(5), _unexpected, renew_s=0.01)
    membership = Membership(RedisRegistry(server.url, "test"), poll_s=0.01, ttl_s=0.05)
    await registration.start()
    await membership.start()
    await eventually(lambda: membership.current == (_record(),))
    await registration.close()
    await eventually(lambda: membership.current == ())
    await membership.close()


async def test_registration_of_a_used_name_names_both_addresses(
    registry: RedisRegistry, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    await registry.announce(replace(_record(epoch=9), endpoint="10.0.0.9:1"))
    fenced = asyncio.Event()
    record = replace(_record(), endpoint="10.0.0.5:2")
    registration = Registration(RedisRegistry(server.url, "test"), record, Epoch(5), fenced.set, renew_s=0.01)
    await registration.start()
    async with asyncio.timeout(20):
        await fenced.wait()
    await registration.close()
    assert "another process at 10.0.0.9:1; this one at 10.0.0.5:2" in caplog.text and "--namespace" in caplog.text


async def test_fenced_registration_says_so_once_and_stops(registry: RedisRegistry, server: RedisServer) -> None:
    await registry.announce(_record(epoch=6))
    fenced: list[bool] = []
    registration = Registration(
        RedisRegistry(server.url, "test"), _record(), Epoch(5), lambda: fenced.append(True), renew_s=0.01
    )
    await registration.start()
    await eventually(lambda: bool(fenced))
    await registration.close()
    assert fenced == [True]
    assert await registry.workers() == (_record(epoch=6),)


HIGH, LOW = 1_800_000_000_000, Epoch(1_700_000_000_000, from_clock=True)
"""Of a process before, and of a clock that went back since."""


async def test_epoch_of_a_clock_set_back_is_exchanged_after_the_earlier_process_left(
    registry: RedisRegistry, server: RedisServer
) -> None:
    """Else a worker that starts while Redis is mute ends: the registry takes it for that process."""
    before, fenced = _record(epoch=HIGH), list[bool]()
    await registry.announce(before)
    registration = Registration(
        RedisRegistry(server.url, "test"), _record(), LOW, lambda: fenced.append(True), renew_s=0.01
    )
    await registration.start()
    await eventually(lambda: registration.connected)
    assert await registry.workers() == (before,)
    await registry.withdraw(before)
    await eventually(lambda: registration.record.epoch == HIGH + 1)
    await _eventually_announced(registry, _record(epoch=HIGH + 1))
    await registration.close()
    assert await registry.workers() == (), "it withdraws under the epoch that it was announced under"
    assert not fenced


async def test_worker_with_a_clock_epoch_exits_if_another_process_keeps_its_name(
    registry: RedisRegistry, server: RedisServer
) -> None:
    """It stood still before its first announcement: a later process has taken its place."""
    later, fenced = _record(epoch=HIGH), list[bool]()
    await registry.announce(later)
    registration = Registration(
        RedisRegistry(server.url, "test"), _record(), LOW, lambda: fenced.append(True), renew_s=0.01, ttl_s=0.05
    )
    await registration.start()
    await eventually(lambda: bool(fenced))
    await registration.close()
    assert await registry.workers() == (later,)


async def test_epoch_of_the_clock_that_was_accepted_is_not_exchanged_later(
    registry: RedisRegistry, server: RedisServer
) -> None:
    fenced: list[bool] = []
    registration = Registration(
        RedisRegistry(server.url, "test"), _record(), LOW, lambda: fenced.append(True), renew_s=0.01
    )
    await registration.start()
    await _eventually_announced(registry, _record(epoch=LOW.number))
    later = _record(epoch=HIGH)
    await registry.announce(later)
    await registry.withdraw(later)
    await eventually(lambda: bool(fenced))
    await registration.close()


async def test_role_change_during_an_epoch_exchange_gets_its_own_epoch(
    registry: RedisRegistry, server: RedisServer
) -> None:
    await registry.announce(_record(epoch=6))
    await registry.withdraw(_record(epoch=6))
    changes = [Epoch(9)]

    class Changing(RedisRegistry):
        async def take_epoch(self, proposed: int) -> int:
            number = await super().take_epoch(proposed)
            for epoch in changes:
                registration.announce_as(_record("prefill-0"), epoch)
            changes.clear()
            return number

    clock = Epoch(5, from_clock=True)
    registration = Registration(Changing(server.url, "test"), _record(), clock, _unexpected, renew_s=0.01)
    await registration.start()
    await _eventually_announced(registry, _record("prefill-0", epoch=9))
    assert not changes
    await registration.close()


async def _eventually_announced(registry: RedisRegistry, record: WorkerRecord) -> None:
    async with asyncio.timeout(20):
        while await registry.workers() != (record,):
            await asyncio.sleep(0.005)


async def test_membership_survives_the_loss_of_redis_and_recovers() -> None:
    server = start_redis_server()
    port = int(server.url.rpartition(":")[2].removesuffix("/0"))
    registration = Registration(RedisRegistry(server.url, "test"), _record(), Epoch(5), _unexpected, renew_s=0.01)
    membership = Membership(RedisRegistry(server.url, "test"), poll_s=0.01, ttl_s=600)
    await registration.start()
    await membership.start()
    await eventually(lambda: membership.current == (_record(),) and membership.connected)
    server.stop()
    await eventually(lambda: not membership.connected and not registration.connected)
    assert membership.current == (_record(),)
    server = start_redis_server(port)  # empty
    await eventually(lambda: membership.connected and registration.connected)
    assert membership.current == (_record(),)
    await membership.close()
    await registration.close()
    server.stop()


async def test_membership_may_start_before_redis() -> None:
    membership = Membership(RedisRegistry(NOWHERE, "test"), poll_s=0.01)
    await membership.start()
    assert membership.current == ()
    assert not membership.connected
    await membership.close()


async def test_watching_yields_the_present_and_then_each_change(server: RedisServer, registry: RedisRegistry) -> None:
    membership = Membership(RedisRegistry(server.url, "test"), poll_s=0.01)
    await membership.start()
    views = membership.watch()
    async with asyncio.timeout(20):
        assert await anext(views) == ()
        await registry.announce(_record("a"))
        assert await anext(views) == (_record("a"),)
        await registry.announce(_record("b"))
        assert await anext(views) == (_record("a"), _record("b"))
    await membership.close()


async def test_static_membership_is_the_given_one() -> None:
    workers = parse_workers("prefill@h:1,decode@h:2")
    membership = StaticMembership(workers)
    await membership.start()
    assert await anext(membership.watch()) == membership.current == workers
    assert membership.connected
    await membership.close()


def _unexpected() -> None:
    raise AssertionError("fenced")


async def test_registry_listing_parses_only_changed_records(registry: RedisRegistry) -> None:
    for name in ("a", "b"):
        await registry.announce(_record(name))
    first = {record.worker_id: record for record in await registry.workers()}
    await registry.announce(_record("a", epoch=6))
    second = {record.worker_id: record for record in await registry.workers()}
    assert second["b"] is first["b"]
    assert second["a"] == _record("a", epoch=6)

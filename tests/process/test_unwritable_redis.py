"""A Redis that answers and takes no writes counts as lost: workers cannot join, and none that is known is forgotten."""

import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from baton.process.registry.membership import Epoch, Membership, Registration
from baton.process.registry.redis_registry import RedisRegistry
from baton.process.registry.redis_routers import RedisJournal, RedisShares
from baton.process.registry.redis_server import RedisServer, start_redis_server
from baton.process.registry.worker_record import WorkerRecord, WorkerRole
from baton.process.serving.health import Health
from baton.process.serving.server import Running
from baton.router.fleet.peers import PeerRouters
from baton.router.placement.cluster import Cluster
from baton.router.request.journal import Journal
from baton.router.request.resume import AttemptLocation
from baton.worker.config import WorkerConfig
from baton.worker.process import WorkerProcess
from tests.fixtures.session_client import eventually
from tests.worker.test_worker_process import FakeWorker

KNOWN = WorkerRecord("decode-0", WorkerRole.DECODE, "127.0.0.1:7", epoch=5, fingerprint="ab")


UNWRITABLE: dict[str, tuple[Callable[[Redis], Any], str]] = {
    "full": (lambda redis: redis.config_set("maxmemory", "1"), "maxmemory"),
    "replica": (lambda redis: redis.replicaof("127.0.0.1", 1), "read only replica"),
    "no right to write": (lambda redis: redis.execute_command("ACL", "SETUSER", "default", "-@write"), "permissions"),
    "too few replicas": (lambda redis: redis.config_set("min-replicas-to-write", "1"), "replicas"),
    "wrong kind of key": (lambda redis: [redis.delete(LISTED), redis.set(LISTED, "text")], "wrong kind"),
}
LISTED = "baton:{test}:workers"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Yield a Redis of the test's own, whose settings it changes."""
    server = start_redis_server()
    yield server
    server.stop()


@pytest.mark.parametrize("how", UNWRITABLE)
async def test_membership_of_an_unwritable_redis_is_lost_and_keeps_known_workers(
    server: RedisServer, undo: AsyncExitStack, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_unwritable, reason = UNWRITABLE[how]
    membership = Membership(RedisRegistry(server.url, "test"), poll_s=0.01, ttl_s=0.05)
    first = Registration(RedisRegistry(server.url, "test"), KNOWN, Epoch(5), pytest.fail, renew_s=0.01, ttl_s=0.2)
    late = replace(KNOWN, worker_id="decode-1")
    joining = Registration(RedisRegistry(server.url, "test"), late, Epoch(6), pytest.fail, renew_s=0.01)
    await membership.start()
    undo.push_async_callback(membership.close)
    await first.start()
    undo.push_async_callback(first.close)
    await eventually(lambda: membership.current == (KNOWN,))
    with Redis.from_url(server.url) as redis:
        make_unwritable(redis)
    await joining.start()
    undo.push_async_callback(joining.close)
    await eventually(lambda: not membership.connected and not first.connected and joining.problem != "not asked yet")
    assert reason in membership.problem and not joining.announced.is_set()
    assert membership.current == (KNOWN,)
    assert "worker not announced in the registry" in caplog.text


async def test_shares_and_journal_of_a_full_redis_name_the_fault(server: RedisServer, undo: AsyncExitStack) -> None:
    router_id = bytes(16)
    shares, store = RedisShares(server.url, "test", "a"), RedisJournal(server.url, "test", router_id)
    undo.push_async_callback(shares.close)
    undo.push_async_callback(store.close)
    peers = PeerRouters(Cluster(), shares, router_id)
    assert await peers.exchange() and peers.problem == ""
    with Redis.from_url(server.url) as redis:
        redis.config_set("maxmemory", "1")
        assert not await peers.exchange() and "maxmemory" in peers.problem
        journal = Journal(store, router_id, lambda record: b"record", lambda stream: None)
        unread: Any = None  # the request, which this journal does not serialise
        entry = journal.open("x", 1, unread, "model", deadline_s=time.monotonic() + 60)
        entry.placed(AttemptLocation("a:1", 1))
        await journal.write()
        assert "maxmemory" in journal.problem
        redis.config_set("maxmemory", "0")
        assert await peers.exchange() and peers.problem == ""
        await journal.write()
        assert journal.problem == ""


async def test_worker_is_healthy_once_it_is_announced(server: RedisServer) -> None:
    running = Running((1234,), Health(()))
    config = WorkerConfig(worker_id="w", model=Path("m"), redis_url=server.url, namespace="test")
    process = WorkerProcess(config, FakeWorker(), Epoch(1))
    with Redis.from_url(server.url) as redis:
        redis.config_set("maxmemory", "1")
        await process.start(running)
        registration = process._registration
        assert registration is not None
        await eventually(lambda: "maxmemory" in registration.problem)
        assert not running.health.serving
        redis.config_set("maxmemory", "0")
        await eventually(lambda: running.health.serving)
    await process.stop()


async def test_worker_without_a_registry_is_healthy_once_it_has_started() -> None:
    running = Running((1234,), Health(()))
    process = WorkerProcess(WorkerConfig(worker_id="w", model=Path("m")), FakeWorker(), Epoch(1))
    await process.start(running)
    await eventually(lambda: running.health.serving)
    await process.stop()

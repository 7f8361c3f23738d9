"""Records in Redis are believed where they were written with the cluster's secret, under their own names, alone."""

from contextlib import AsyncExitStack

import pytest
from redis import Redis

from baton.process.registry.redis_registry import Announced, RedisRegistry
from baton.process.registry.redis_responses import RedisResponses, ResponseBounds
from baton.process.registry.redis_routers import JournalChange, RedisAdapters, RedisJournal, RedisShares
from baton.process.registry.redis_server import RedisServer
from baton.process.registry.worker_record import WorkerRecord, WorkerRole
from baton.process.security.cluster_secret import ClusterSecret

pytestmark = pytest.mark.usefixtures("lasting_records")
OURS, OTHERS = ClusterSecret("ours" * 8), ClusterSecret("others" * 8)
BOUNDS = ResponseBounds(ttl_s=60, per_owner=10, bytes_per_owner=1 << 20, all_bytes=1 << 20)
NAMESPACE = "default"


def record(endpoint: str, epoch: int = 1, worker_id: str = "decode-0") -> WorkerRecord:
    return WorkerRecord(worker_id, WorkerRole.DECODE, endpoint, epoch=epoch, fingerprint="ab")


def registry(server: RedisServer, undo: AsyncExitStack, secret: ClusterSecret | None) -> RedisRegistry:
    opened = RedisRegistry(server.url, NAMESPACE, secret)
    undo.push_async_callback(opened.close)
    return opened


async def test_clusters_with_different_secrets_in_one_namespace_are_separate(
    server: RedisServer, raw: Redis, undo: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    ours, others, none = (registry(server, undo, secret) for secret in (OURS, OTHERS, None))
    assert await ours.announce(record("10.0.0.1:1", epoch=1)) is Announced.ACCEPTED
    assert await others.announce(record("10.0.0.2:1", epoch=9)) is Announced.ACCEPTED
    assert await none.announce(record("10.0.0.3:1", epoch=99)) is Announced.ACCEPTED
    assert await ours.announce(record("10.0.0.1:1", epoch=1)) is Announced.ACCEPTED
    for _ in range(3):
        listed = [(await each.workers())[0].endpoint for each in (ours, others, none)]
        assert listed == ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]
    told = [line for line in caplog.messages if "another secret" in line and NAMESPACE in line]
    assert len(told) == 3, "each cluster tells once"


@pytest.mark.parametrize("forged", [record("6.6.6.6:6", epoch=5).to_json().encode(), b"\xff\x00", b""])
async def test_forged_worker_record_is_ignored_and_named(
    server: RedisServer, raw: Redis, undo: AsyncExitStack, caplog: pytest.LogCaptureFixture, forged: bytes
) -> None:
    ours = registry(server, undo, OURS)
    await ours.announce(record("10.0.0.1:1", worker_id="decode-0"))
    key = f"baton:{{{NAMESPACE}}}:{OURS.mark}:worker:"
    raw.set(f"{key}evil\n", forged)
    raw.set(f"{key}copied", raw.get(f"{key}decode-0") or b"")
    raw.sadd(f"baton:{{{NAMESPACE}}}:{OURS.mark}:workers", "evil\n", "copied")
    for _ in range(3):
        assert [each.endpoint for each in await ours.workers()] == ["10.0.0.1:1"]
    [told] = [line for line in caplog.messages if "not signed" in line]
    assert key in told and "\n" not in told


async def test_sealed_records_open_only_unchanged(server: RedisServer, raw: Redis, undo: AsyncExitStack) -> None:
    first, second = bytes(16), bytes([1]) * 16
    journal, reader = (RedisJournal(server.url, NAMESPACE, each, OURS) for each in (first, second))
    shares, peer = (RedisShares(server.url, NAMESPACE, each, OURS) for each in ("a", "b"))
    adapters = RedisAdapters(server.url, NAMESPACE, OURS)
    responses = RedisResponses(server.url, NAMESPACE, BOUNDS, OURS)
    for each in (journal, reader, shares, peer, adapters, responses):
        undo.push_async_callback(each.close)
    await journal.write([JournalChange("x", 60_000, b"record"), JournalChange("y", 60_000, b"another")])
    await shares.exchange(b"share")
    await adapters.write(3, b"list")
    await responses.put("owner", "name", b"answer")

    async def found() -> list[object]:
        return [
            await reader.read("x"),
            await peer.exchange(b"peer"),
            await adapters.read(),
            await responses.get("owner", "name"),
        ]

    assert await found() == [b"record", (b"share",), (3, b"list"), b"answer"]
    prefix = f"baton:{{{NAMESPACE}}}:{OURS.mark}:"
    raw.set(f"{prefix}journal:x", raw.get(f"{prefix}journal:y") or b"")
    raw.set(f"{prefix}router:a", b"forged")
    raw.set(f"{prefix}adapters", b"4 forged")
    raw.set(f"{prefix}response:owner:name", OTHERS.seal(f"{prefix}response:owner:name", b"forged"))
    assert await found() == [None, (), (4, b""), None]

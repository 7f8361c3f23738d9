"""Values that anybody may have left in Redis: each is refused by its key or healed, and the others are used."""

import json

import pytest

from baton.process.registry.redis_registry import Announced, RedisRegistry
from baton.process.registry.redis_responses import RedisResponses, ResponseBounds
from baton.process.registry.redis_routers import RedisAdapters, RedisShares
from baton.process.registry.redis_server import RedisServer
from baton.process.registry.worker_record import WorkerRecord, WorkerRole
from baton.process.wire_bounds import MAX_EXACT

RECORD = WorkerRecord("decode-0", WorkerRole.DECODE, "127.0.0.1:7", 5, "ab")


def record(**fields: object) -> str:
    return json.dumps({**json.loads(RECORD.to_json()), **fields})


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "\udcff",
        record(epoch=1 << 63),
        record(epoch=-1),
        record(epoch=1).replace('"epoch": 1', '"epoch": 1e999'),
        record(endpoint="unix:/run/x"),
        record(worker_id="a\n\x1b[31m"),
        record(protocol=1 << 40),
    ],
)
async def test_malformed_worker_record_is_rejected_by_key_and_others_are_used(
    server: RedisServer, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = RedisRegistry(server.url, "records")
    assert await registry.announce(RECORD) is Announced.ACCEPTED
    await registry.redis.set(registry.key("worker:odd"), text.encode(errors="surrogateescape"))
    await registry.redis.sadd(registry.key("workers"), "odd")
    assert await registry.workers() == (RECORD,)
    assert await registry.workers() == (RECORD,)
    assert len([each for each in caplog.records if "worker:odd" in each.getMessage()]) == 1
    await registry.close()


@pytest.mark.parametrize("value", ["abc", "1e300", str(1 << 63), "nan", "-5"])
async def test_malformed_epoch_and_fence_are_rewritten(server: RedisServer, value: str) -> None:
    registry = RedisRegistry(server.url, "epochs")
    for name in ("epoch", "fence:decode-0"):
        await registry.redis.set(registry.key(name), value)
    assert await registry.take_epoch(7) == 7
    assert await registry.announce(RECORD) is Announced.ACCEPTED
    assert await registry.redis.get(registry.key("fence:decode-0")) == "5"
    await registry.close()


@pytest.mark.parametrize("version", ["9223372036854775807", str(MAX_EXACT), str(MAX_EXACT - 1), "x"])
async def test_version_of_adapters_in_the_future_does_not_stay(server: RedisServer, version: str) -> None:
    adapters = RedisAdapters(server.url, "adapters")
    await adapters.redis.set(adapters.key("adapters"), f"{version} []")
    assert await adapters.write(1, b"{}")
    assert await adapters.read() == (1, b"{}")
    await adapters.close()


async def test_share_of_another_type_is_left_out(server: RedisServer) -> None:
    first, second = RedisShares(server.url, "shares", "first"), RedisShares(server.url, "shares", "second")
    await first.exchange(b"one")
    await first.redis.sadd(first.key("router:odd"), "x")
    await first.redis.sadd(first.key("routers"), "odd")
    assert await second.exchange(b"two") == (b"one",)
    await first.close()
    await second.close()


async def test_index_of_responses_with_foreign_entries_takes_new_ones(server: RedisServer) -> None:
    responses = RedisResponses(server.url, "responses", ResponseBounds(60.0, 2, 1 << 20, 1 << 20))
    index = responses.key("responses")
    await responses.redis.zadd(f"{index}:owner", {"garbage": 1.0})
    await responses.redis.zadd(index, {"garbage": 1.0})
    await responses.redis.set(f"{index}:bytes", "many")
    for name in ("a", "b", "c"):
        await responses.put("owner", name, b"record")
    assert await responses.get("owner", "c") == b"record"
    await responses.close()

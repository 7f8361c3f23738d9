"""The journal on a real Redis: who reads what, whose record it is, and how long it stays."""

import pytest
from redis import Redis

from baton.process.registry.redis_registry import RegistryUnavailable
from baton.process.registry.redis_routers import JournalChange, RedisJournal
from baton.process.registry.redis_server import RedisServer

FIRST, SECOND = b"1" * 16, b"2" * 16
LONG_MS = 60_000


def change(key: str, value: bytes | None, ttl_ms: int = LONG_MS, seize: bool = False) -> JournalChange:
    return JournalChange(key, ttl_ms, value, seize)


async def test_routers_of_a_cluster_read_each_others_journal_and_others_do_not(server: RedisServer, raw: Redis) -> None:
    first, second = RedisJournal(server.url, "a", FIRST), RedisJournal(server.url, "a", SECOND)
    elsewhere = RedisJournal(server.url, "b", SECOND)
    assert await first.write([change("x", b"\x00record"), change("y", b"other")]) == ()
    assert [await second.read("x"), await second.read("y"), await second.read("z")] == [b"\x00record", b"other", None]
    assert await elsewhere.read("x") is None
    for journal in (first, second, elsewhere):
        await journal.close()


async def test_journal_record_expires_with_its_stream_and_is_never_on_disk(server: RedisServer, raw: Redis) -> None:
    journal = RedisJournal(server.url, "a", FIRST)
    await journal.write([change("x", b"record", ttl_ms=10 * LONG_MS)])
    assert 9 * LONG_MS < raw.pttl("baton:{a}:journal:x") <= 10 * LONG_MS
    await journal.write([change("x", None, ttl_ms=LONG_MS), change("never", None, ttl_ms=LONG_MS)])
    assert 0 < raw.pttl("baton:{a}:journal:x") <= LONG_MS
    assert raw.dbsize() == 1
    assert raw.config_get("save")["save"] == "" and raw.config_get("appendonly")["appendonly"] == "no"
    await journal.close()


async def test_record_that_another_router_seized_is_left_alone(server: RedisServer, raw: Redis) -> None:
    first, second = RedisJournal(server.url, "a", FIRST), RedisJournal(server.url, "a", SECOND)
    await first.write([change("x", b"first")])
    assert await second.write([change("x", b"second")]) == ("x",)
    assert await second.write([change("x", b"second", seize=True)]) == ()
    assert await first.write([change("y", b"own"), change("x", b"late")]) == ("x",)
    await first.write([change("x", None, ttl_ms=1)])
    assert await first.read("x") == b"second"
    assert raw.pttl("baton:{a}:journal:x") > LONG_MS / 2
    await first.close()
    await second.close()


async def test_missing_redis_is_reported() -> None:
    journal = RedisJournal("redis://127.0.0.1:1/0", "a", FIRST)
    with pytest.raises(RegistryUnavailable):
        await journal.write([change("x", b"record")])
    with pytest.raises(RegistryUnavailable):
        await journal.read("x")
    await journal.close()

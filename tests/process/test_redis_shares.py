"""What routers leave for each other on a real Redis: each reads the others, and whoever leaves is gone at once."""

import pytest

from baton.process.registry.redis_registry import RegistryUnavailable
from baton.process.registry.redis_routers import RedisShares
from baton.process.registry.redis_server import RedisServer


async def test_routers_read_each_others_newest_share_and_none_of_left_ones(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.process.registry.redis_routers.SHARE_TTL_MS", 600_000)  # it is no time that ends a share
    first, second = RedisShares(server.url, "a", "first"), RedisShares(server.url, "a", "second")
    other_cluster = RedisShares(server.url, "b", "first")
    assert await first.exchange(b"\x00old") == ()
    assert await first.exchange(b"\x00new") == ()
    assert await second.exchange(b"second") == (b"\x00new",)
    assert await other_cluster.exchange(b"b") == ()
    await first.close()
    assert await second.exchange(b"second") == ()
    await second.close()
    await other_cluster.close()


async def test_one_router_at_a_time_may_change_roles(server: RedisServer) -> None:
    first, second = RedisShares(server.url, "c", "first"), RedisShares(server.url, "c", "second")
    assert [await first.lease(10_000), await second.lease(10_000), await first.lease(10_000)] == [True, False, True]
    await first.close()
    assert await second.lease(10_000)
    await second.close()


async def test_missing_redis_is_reported_and_leaving_it_is_no_error() -> None:
    shares = RedisShares("redis://127.0.0.1:1/0", "a", "first")
    with pytest.raises(RegistryUnavailable):
        await shares.exchange(b"")
    await shares.close()

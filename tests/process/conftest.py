"""An empty Redis, and a gRPC server with given behaviours behind our interceptor."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from redis import Redis

from baton.process.registry.redis_server import RedisServer
from baton.process.serving.grpc_options import SERVER_OPTIONS
from baton.process.serving.interceptors import CallInterceptor

StartServer = Callable[..., Awaitable[grpc.aio.Channel]]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    """Start a server of `baton.test.Test` with `Unary` and `Stream`; returns a channel to it."""
    open_things: list[Any] = []

    async def start(unary: Any = None, stream: Any = None) -> grpc.aio.Channel:
        server = grpc.aio.server(interceptors=[CallInterceptor()], options=SERVER_OPTIONS)
        methods: dict[str, Any] = {}
        if unary is not None:
            methods["Unary"] = grpc.unary_unary_rpc_method_handler(unary)
        if stream is not None:
            methods["Stream"] = grpc.unary_stream_rpc_method_handler(stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.test.Test", methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        open_things.append((channel, server))
        return channel

    yield start
    for channel, server in open_things:
        await channel.close()
        await server.stop(0)


@pytest.fixture
def server(module_redis: RedisServer) -> RedisServer:
    """Return the module's Redis, emptied."""
    with Redis.from_url(module_redis.url) as redis:
        redis.flushall()
    return module_redis


@pytest.fixture
def raw(server: RedisServer) -> Iterator[Redis]:
    """Yield a client that reads and writes any key of the Redis."""
    with Redis.from_url(server.url) as redis:
        yield redis


@pytest.fixture
def lasting_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep worker records that a test announces once and does not renew."""
    monkeypatch.setattr("baton.process.registry.redis_registry.TTL_MS", 600_000)


@pytest.fixture
async def undo() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack

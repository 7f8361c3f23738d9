"""A gRPC server with given behaviours behind our interceptor; messages are plain bytes."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

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

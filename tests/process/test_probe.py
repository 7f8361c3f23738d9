"""Only a refused connection says that nobody listens."""

import asyncio
import socket

import pytest

from baton.process.serving.grpc_options import refuses_connections


async def test_free_port_refuses_connections() -> None:
    with socket.socket() as silent:  # it is bound, so no other process can have its port
        silent.bind(("127.0.0.1", 0))
        assert await refuses_connections(f"127.0.0.1:{silent.getsockname()[1]}")


async def test_somebody_listens_and_says_nothing() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert not await refuses_connections(f"127.0.0.1:{port}")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:nonsense", "no-such-host.invalid:1", ""])
async def test_unanswered_probe_is_no_refusal(endpoint: str) -> None:
    assert not await refuses_connections(endpoint)

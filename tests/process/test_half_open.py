"""A peer that has vanished without a word: its connection stays open, and nothing comes through it any more."""

import asyncio

import grpc
import pytest

from baton.client.channel import CHANNEL_OPTIONS
from baton.process.serving.grpc_options import (
    INTERNAL_CHANNEL_OPTIONS,
    INTERNAL_SERVER_OPTIONS,
    PUBLIC_SERVER_OPTIONS,
    SERVER_OPTIONS,
)
from baton.protos import session_pb2_grpc
from tests.fixtures.session_client import SessionClient, eventually
from tests.process.test_link_connection import Worker

IN_TEST_MS = {"grpc.keepalive_time_ms": 1_000, "grpc.http2.ping_timeout_ms": 500}


class Wire:
    """Passes bytes on until it is cut; then it takes them, and nobody hears."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_cut = False
        self._writers: list[asyncio.StreamWriter] = []
        self._pipes: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Wire":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def cut(self) -> None:
        self._is_cut = True

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._pipes |= {asyncio.create_task(self._pass(reader, far_writer))}
        self._pipes |= {asyncio.create_task(self._pass(far_reader, writer))}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        while data := await reader.read(65_536):
            if not self._is_cut:
                writer.write(data)
        if not self._is_cut:
            writer.close()


async def test_worker_notices_a_vanished_router_and_keeps_its_session() -> None:
    worker = Worker()
    server = grpc.aio.server(options=[*(dict(INTERNAL_SERVER_OPTIONS) | IN_TEST_MS).items()])
    session_pb2_grpc.add_SessionServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with Wire(port) as wire:
            router = SessionClient(wire.endpoint)
            await router.connect()
            await eventually(lambda: worker.connected)
            wire.cut()
            await eventually(lambda: not worker.connected)
            assert worker.hub.links and not worker.ended
    finally:
        await worker.hub.close(1.0)
        await server.stop(0)
        await router.disconnect()


INTERNALLY, PUBLICLY = (INTERNAL_SERVER_OPTIONS, INTERNAL_CHANNEL_OPTIONS), (SERVER_OPTIONS, PUBLIC_SERVER_OPTIONS)
BOUNDS = [*((each, 5_000) for each in INTERNALLY), *((each, 40_000) for each in PUBLICLY), (CHANNEL_OPTIONS, 20_000)]


@pytest.mark.parametrize(("options", "within_ms"), BOUNDS)
def test_ping_sender_bounds_the_answers(options: tuple[tuple[str, int], ...], within_ms: int) -> None:
    """gRPC waits a minute where it is not told."""
    bounds = dict(options)
    assert len(bounds) == len(options)
    assert bounds["grpc.keepalive_time_ms"] + bounds["grpc.http2.ping_timeout_ms"] <= within_ms

"""One connection of a session over real gRPC: greeting, replay, acknowledgements, and quiet ends."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from baton.process.links.connection import serve_connection
from baton.process.links.hub import LinkHub, RouterLink
from baton.process.serving.grpc_options import INTERNAL_SERVER_OPTIONS
from baton.process.serving.interceptors import CallInterceptor
from baton.protos import session_pb2, session_pb2_grpc
from tests.fixtures.servers import loop_server
from tests.fixtures.session_client import WAIT_S, SessionClient, eventually

EPOCH = 3
Session = RouterLink[session_pb2.ConnectResponse]


class Worker(session_pb2_grpc.SessionServiceServicer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.ended: list[Session] = []
        self.taken: list[int] = []
        self.hub: LinkHub[session_pb2.ConnectResponse] = LinkHub(30.0, 1000, self.ended.append)

    async def Connect(
        self, request_iterator: AsyncIterator[session_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[session_pb2.ConnectResponse]:
        connection = serve_connection(self.hub, EPOCH, request_iterator, self._welcome, self._take)
        async with aclosing(connection):
            async for message in connection:
                yield message

    def _welcome(self, resumed: bool, received: int) -> session_pb2.ConnectResponse:
        welcome = session_pb2.Welcome(resumed=resumed, received=received)
        return session_pb2.ConnectResponse(epoch=EPOCH, welcome=welcome)

    def _take(self, session: Session, command: session_pb2.ConnectRequest) -> None:
        if command.cancel.attempt_id == 13:
            raise ValueError("unlucky")
        self.taken.append(command.cancel.attempt_id)

    def say(self, attempt_id: int) -> None:
        [session] = self.hub.links
        failed = session_pb2.Failed(attempt_id=attempt_id)
        self.hub.send(session, session_pb2.ConnectResponse(epoch=EPOCH, failed=failed))

    @property
    def connected(self) -> bool:
        return any(session.outbox is not None for session in self.hub.links)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Worker, SessionClient]]:
    worker = Worker()
    add = partial(session_pb2_grpc.add_SessionServiceServicer_to_server, worker)
    async with loop_server(add, [CallInterceptor()], INTERNAL_SERVER_OPTIONS) as port:
        try:
            yield worker, SessionClient(f"127.0.0.1:{port}")
        finally:
            await worker.hub.close(WAIT_S)


async def test_commands_are_executed_once_and_in_order_across_a_reconnect() -> None:
    async with served() as (worker, router):
        async with router:
            await router.cancel(1)
            await router.cancel(2)
            await eventually(lambda: worker.taken == [1, 2])
        async with router:
            assert router.welcome is not None and router.welcome.resumed and router.welcome.received == 2
            await router.send_again(2, cancel=session_pb2.Cancel(attempt_id=2))
            await router.cancel(3)
            await eventually(lambda: worker.taken == [1, 2, 3])


async def test_known_commands_of_a_batch_are_skipped() -> None:
    async with served() as (worker, router), router:
        await router.cancel(1)
        numbered = [(1, 1), (2, 2), (3, 3), (5, 5), (6, 6)]
        cancels = [
            session_pb2.ConnectRequest(number=number, cancel=session_pb2.Cancel(attempt_id=attempt_id))
            for number, attempt_id in numbered
        ]
        await router.send_again(0, commands=session_pb2.Commands(commands=cancels))
        assert await eventually(lambda: router.ended_with) is grpc.StatusCode.OK  # number 4 is missing
        assert worker.taken == [1, 2, 3]


async def test_events_during_a_disconnect_follow_welcome() -> None:
    async with served() as (worker, router):
        async with router:
            worker.say(1)
            await router.one("failed", 1)
        await eventually(lambda: not worker.connected)
        worker.say(2)
        async with router:
            await router.one("failed", 2)
        assert [failed.attempt_id for failed in router.of_kind("failed")] == [1, 2]


async def test_gap_ends_the_connection_but_not_the_session() -> None:
    async with served() as (worker, router), router:
        await router.send_again(5, cancel=session_pb2.Cancel(attempt_id=1))
        assert await eventually(lambda: router.ended_with) is grpc.StatusCode.OK
        assert not worker.taken and not worker.ended


async def test_connection_begins_with_hello() -> None:
    async with served() as (worker, router):
        router.router_id = b"short"
        async with router:
            assert router.ended_with is grpc.StatusCode.INVALID_ARGUMENT
        assert not worker.hub.links


async def test_router_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.process.links.connection.HELLO_TIMEOUT_S", 0.01)
    async with served() as (_, router), grpc.aio.insecure_channel(router.endpoint) as channel:
        call: Any = session_pb2_grpc.SessionServiceStub(channel).Connect()
        async with asyncio.timeout(WAIT_S):
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_acknowledging_an_unsent_message_ends_the_connection_and_leaks_no_session() -> None:
    async with served() as (worker, router):
        async with router:
            pass
        await router.connect(acknowledges=9)
        assert router.ended_with is grpc.StatusCode.INVALID_ARGUMENT
        [session] = worker.hub.links
        await eventually(lambda: session.outbox is None and session.expiry is not None)
        await router.disconnect()


async def test_error_in_a_command_ends_the_connection_loudly(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as (_, router), router:
        await router.cancel(13)
        assert await eventually(lambda: router.ended_with) is grpc.StatusCode.INTERNAL
    assert "unlucky" in caplog.text


async def test_ended_session_takes_no_more_commands() -> None:
    async with served() as (worker, router), router:
        [session] = worker.hub.links
        worker.hub.end(session, "for the test")
        await router.cancel(1)
        await eventually(lambda: router.ended_with)
        assert not worker.taken


async def test_vanished_router_and_stopped_worker_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with served() as (worker, router):
        await router.connect()
        worker.say(1)
        router._reader.cancel()
        await router._channel.close()  # without a word
        await eventually(lambda: not worker.connected)
        await router.connect()
        worker.say(2)
        await worker.hub.close(WAIT_S)
        assert await eventually(lambda: router.ended_with) is grpc.StatusCode.OK
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    assert router.about("failed", 2)
    await router.disconnect()


async def test_worker_that_stops_takes_no_new_connection() -> None:
    async with served() as (worker, router):
        await worker.hub.close(1.0)
        async with router:
            assert router.ended_with is grpc.StatusCode.UNAVAILABLE

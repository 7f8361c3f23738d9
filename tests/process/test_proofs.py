"""Processes of one cluster serve each other where both prove that they know its secret, and nobody else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.process.security.cluster_secret import PROOF_KEY, ClusterSecret
from baton.process.security.proofs import NOT_PROVEN, ProofCheck
from baton.process.security.tls import open_async_channel, open_channel
from baton.process.serving.interceptors import CallInterceptor

UNARY, STREAM = "/baton.test.Test/Unary", "/baton.test.Test/Stream"
OURS, OTHERS = ClusterSecret("ours" * 8), ClusterSecret("others" * 8)
StartServer = Callable[[ClusterSecret | None], Awaitable[int]]


class Health(health_pb2_grpc.HealthServicer):
    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
async def start() -> AsyncIterator[StartServer]:
    """Start a server that asks for a secret, or for none; returns its port."""
    servers: list[grpc.aio.Server] = []

    async def unary(request: bytes, context: Any) -> bytes:
        return b"answer to " + request

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        yield b"2"

    async def start_one(secret: ClusterSecret | None) -> int:
        check = None if secret is None else ProofCheck(secret)
        server = grpc.aio.server(interceptors=[CallInterceptor(check)])
        methods: dict[str, Any] = {
            "Unary": grpc.unary_unary_rpc_method_handler(unary),
            "Stream": grpc.unary_stream_rpc_method_handler(stream),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.test.Test", methods),))
        health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        if check is not None:
            check.port = port
        await server.start()
        servers.append(server)
        return port

    yield start_one
    for server in servers:
        await server.stop(0)


async def by_event_loop(port: int, secret: ClusterSecret | None) -> tuple[bytes, list[bytes]]:
    channel: Any
    async with open_async_channel(f"127.0.0.1:{port}", (), None, secret) as channel:
        return await channel.unary_unary(UNARY)(b"a"), [each async for each in channel.unary_stream(STREAM)(b"b")]


async def by_thread(port: int, secret: ClusterSecret | None) -> tuple[bytes, list[bytes]]:
    def call() -> tuple[bytes, list[bytes]]:
        channel: Any
        with open_channel(f"127.0.0.1:{port}", (), None, secret) as channel:
            return channel.unary_unary(UNARY)(b"a"), list(channel.unary_stream(STREAM)(b"b"))

    return await asyncio.to_thread(call)


CALLERS = pytest.mark.parametrize("call", [by_event_loop, by_thread])
Call = Callable[[int, ClusterSecret | None], Awaitable[tuple[bytes, list[bytes]]]]


@CALLERS
@pytest.mark.parametrize("secret", [OURS, None])
async def test_call_between_processes_of_one_secret_is_served(
    start: StartServer, call: Call, secret: ClusterSecret | None
) -> None:
    assert await call(await start(secret), secret) == (b"answer to a", [b"1", b"2"])


@CALLERS
@pytest.mark.parametrize("secret", [OTHERS, None])
async def test_server_without_proof_rejects_the_call(
    start: StartServer, call: Call, secret: ClusterSecret | None
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await call(await start(OURS), secret)
    code, details = code_and_details(caught.value)
    assert code is grpc.StatusCode.UNAUTHENTICATED and "secret" in details and "ours" not in details


def code_and_details(error: Any) -> tuple[grpc.StatusCode, str]:
    return error.code(), error.details()


@pytest.mark.parametrize("method", [UNARY, STREAM])
@CALLERS
async def test_caller_refuses_the_answer_of_a_server_that_proves_nothing(
    start: StartServer, call: Call, method: str
) -> None:
    """One that took the port of a process of ours: what it says is not believed."""
    channel: Any
    port = await start(None)
    with pytest.raises(grpc.RpcError) as caught:
        if call is by_event_loop:
            async with open_async_channel(f"127.0.0.1:{port}", (), None, OURS) as channel:
                await (
                    channel.unary_unary(method)(b"") if method == UNARY else channel.unary_stream(method)(b"").read()
                )
        else:
            with open_channel(f"127.0.0.1:{port}", (), None, OURS) as channel:
                kind = channel.unary_unary if method == UNARY else channel.unary_stream
                await asyncio.to_thread(lambda: list(kind(method)(b"")))
    assert code_and_details(caught.value) == (grpc.StatusCode.UNAUTHENTICATED, NOT_PROVEN)


async def test_proof_that_was_made_for_another_port_or_method_is_refused(start: StartServer) -> None:
    port = await start(OURS)
    proofs = {
        "right": OURS.call_proof(UNARY, port),
        "port": OURS.call_proof(UNARY, port + 1),
        "method": OURS.call_proof(STREAM, port),
    }
    channel: Any
    codes = {}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name, proof in proofs.items():
            call = channel.unary_unary(UNARY)(b"", metadata=proof.metadata)
            codes[name] = await call.code()
        strange = await channel.unary_unary(UNARY)(b"", metadata=((PROOF_KEY, "x"),)).code()
    refused = grpc.StatusCode.UNAUTHENTICATED
    assert codes == {"right": grpc.StatusCode.OK, "port": refused, "method": refused}
    assert strange is refused


async def test_health_needs_no_proof(start: StartServer) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await start(OURS)}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_secret_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 characters"):
        ClusterSecret("short")


def test_admin_token_opens_one_port_of_one_cluster() -> None:
    tokens = {OURS.admin_token(1), OURS.admin_token(2), OTHERS.admin_token(1)}
    assert len(tokens) == 3 and OURS.admin_token(1) == ClusterSecret("ours" * 8).admin_token(1)

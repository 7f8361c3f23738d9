"""The life of a process: ports, health, drain, signals, exit codes."""

import asyncio
import gc
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.process.registry.redis_server import free_port
from baton.process.serving.server import YOUNG_OBJECTS, Listener, ListenError, Running, serve
from tests.fixtures.session_client import eventually

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class ExampleProcess:
    """Counts to `goal` on a stream, one step whenever `step` is set; drains when the stream has ended."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, shared: bool = False) -> None:
        self.listeners: Sequence[Listener] = (
            Listener(host, port, self._register, ("baton.test.Test",), reflection=True, shared=shared),
        )
        self.running: asyncio.Future[Running] = asyncio.get_running_loop().create_future()
        self.events: list[str] = []
        self.go_on = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    def _register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {"Stream": grpc.unary_stream_rpc_method_handler(self._stream)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.test.Test", handlers),))

    async def _stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.idle.clear()
        yield b"1"
        await self.go_on.wait()
        yield b"2"
        self.idle.set()

    async def start(self, running: Running) -> None:
        self.events.append("start")
        self.running.set_result(running)

    async def drain(self) -> None:
        self.events.append("drain")
        await self.idle.wait()
        self.events.append("drained")

    async def stop(self) -> None:
        self.events.append("stop")


async def _check(channel: grpc.aio.Channel, service: str = "") -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer: Any = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return answer.status


async def test_health_follows_the_process_and_the_port_is_reported() -> None:
    process = ExampleProcess()
    serving = asyncio.create_task(serve(process))
    running = await process.running
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.ports[0]}") as channel:
        assert await _check(channel) == NOT_SERVING
        await running.health.set_serving(True)
        assert [await _check(channel, name) for name in ("", "baton.test.Test")] == [SERVING, SERVING]
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await _check(channel, "nobody")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    running.stop()
    assert await serving == 0


async def test_objects_of_a_started_process_are_excluded_from_garbage_collection() -> None:
    process, threshold = ExampleProcess(), gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700)
    try:
        serving = asyncio.create_task(serve(process))
        running = await process.running
        await eventually(lambda: gc.get_freeze_count() > 0 and gc.get_threshold()[0] == YOUNG_OBJECTS)
        running.stop()
        assert await serving == 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)


async def test_signal_lets_the_stream_finish_and_ends_with_zero() -> None:
    process = ExampleProcess()
    serving = asyncio.create_task(serve(process))
    running = await process.running
    await running.health.set_serving(True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.ports[0]}") as channel:
        stream: Any = channel.unary_stream("/baton.test.Test/Stream")
        call = stream(b"")
        assert await call.read() == b"1"
        signal.raise_signal(signal.SIGTERM)
        await eventually(lambda: "drain" in process.events)
        assert await _check(channel) == NOT_SERVING
        process.go_on.set()
        assert await call.read() == b"2"
        assert await call.code() is grpc.StatusCode.OK
    assert await serving == 0
    assert process.events == ["start", "drain", "drained", "stop"]


async def test_grace_period_bounds_the_drain() -> None:
    process = ExampleProcess()
    process.idle.clear()
    serving = asyncio.create_task(serve(process, grace_s=0.05))
    (await process.running).stop()
    assert await asyncio.wait_for(serving, 20) == 0
    assert process.events == ["start", "drain", "stop"]


async def test_second_signal_ends_the_drain_with_exit_code_one() -> None:
    process = ExampleProcess()
    process.idle.clear()
    serving = asyncio.create_task(serve(process))
    await process.running
    signal.raise_signal(signal.SIGINT)
    await eventually(lambda: "drain" in process.events)
    signal.raise_signal(signal.SIGINT)
    assert await asyncio.wait_for(serving, 20) == 1
    assert process.events == ["start", "drain", "stop"]


async def test_signal_while_starting_ends_the_start() -> None:
    class Slow(ExampleProcess):
        async def start(self, running: Running) -> None:
            self.events.append("start")
            await asyncio.Event().wait()

    process = Slow()
    serving = asyncio.create_task(serve(process))
    await eventually(lambda: "start" in process.events)
    signal.raise_signal(signal.SIGTERM)
    assert await asyncio.wait_for(serving, 20) == 0
    assert process.events == ["start", "stop"]


async def test_process_that_gives_up_says_so_in_its_exit_code() -> None:
    process = ExampleProcess()
    serving = asyncio.create_task(serve(process))
    (await process.running).stop(exit_code=3)
    assert await asyncio.wait_for(serving, 20) == 3


async def test_failed_start_releases_everything_before_it_is_raised() -> None:
    class Broken(ExampleProcess):
        async def start(self, running: Running) -> None:
            raise ValueError("no model")

    process = Broken()
    with pytest.raises(ValueError, match="no model"):
        await serve(process)
    assert process.events == ["stop"]


async def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"127.0.0.1:{port}"):
            await serve(ExampleProcess(port=port))


@pytest.mark.parametrize("shared", [False, True])
async def test_port_that_another_process_does_not_share_is_refused(shared: bool) -> None:
    first = ExampleProcess()
    serving = asyncio.create_task(serve(first))
    running = await first.running
    with pytest.raises(ListenError, match="in use"):
        await serve(ExampleProcess(port=running.ports[0], shared=shared))
    running.stop()
    assert await serving == 0


async def connects(port: int) -> bool:
    """Return whether a gRPC server answers at the port."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            return bool(await _check(channel))
        except grpc.aio.AioRpcError:
            return False


async def test_shared_port_is_served_from_join_until_the_drain() -> None:
    port = free_port()
    first, second = ExampleProcess(port=port, shared=True), ExampleProcess(port=port, shared=True)
    serving = [asyncio.create_task(serve(each)) for each in (first, second)]
    one, other = [await each.running for each in (first, second)]
    assert not await connects(port)
    for running in (one, other, other):
        await running.join()
    assert await connects(port)
    first.idle.clear()  # the drain waits
    one.stop()
    await eventually(lambda: "drain" in first.events)
    assert all([await connects(port) for _ in range(20)])  # each connection goes to the other process
    other.stop()
    assert await serving[1] == 0
    assert not await connects(port)
    first.idle.set()
    assert await serving[0] == 0


async def test_stream_on_a_shared_port_finishes_during_the_drain() -> None:
    process = ExampleProcess(port=free_port(), shared=True)
    serving = asyncio.create_task(serve(process))
    running = await process.running
    await running.join()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.ports[0]}") as channel:
        stream: Any = channel.unary_stream("/baton.test.Test/Stream")
        call = stream(b"")
        assert await call.read() == b"1"
        running.stop()
        await eventually(lambda: "drain" in process.events)
        process.go_on.set()
        assert await call.read() == b"2"
        assert await call.code() is grpc.StatusCode.OK
    assert await serving == 0


async def test_only_the_given_address_listens() -> None:
    process = ExampleProcess(host="127.0.0.1")
    serving = asyncio.create_task(serve(process))
    running = await process.running
    with socket.socket() as elsewhere:  # the port is free on every other address
        elsewhere.bind(("127.0.0.2", running.ports[0]))
    running.stop()
    assert await serving == 0


def test_real_process_answers_and_ends_with_zero_on_sigterm() -> None:
    script = """
from baton.process.telemetry.logs import configure_logging
from baton.process.serving.server import Listener, run, serve

class Process:
    listeners = (Listener("127.0.0.1", 0, lambda server: None, ()),)
    async def start(self, running):
        await running.health.set_serving(True)
        print(running.ports[0], flush=True)
    async def drain(self): pass
    async def stop(self): pass

configure_logging("example", "plain")
raise SystemExit(run(serve(Process())))
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "error", "-c", script]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        port = int(process.stdout.readline())
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status == SERVING
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert "INFO example baton.process.serving.server: SIGTERM: draining" in process.stderr.read()

"""gRPC as our processes use it, over the simulated network: channels, calls and their statuses.

Messages travel as bytes, through the serializers that the stubs and handlers bring. A handler runs in the process of
its server (`served.py`); a call that breaks cancels it, as grpc.aio does.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Self

import grpc

from baton.simulation.network.links import Network, Pipe
from baton.simulation.network.loop import CURRENT, Planned, SimulatedLoop, SimulatedProcess, State
from baton.simulation.network.served import END, Served, SimulatedServer, failure

EOF = grpc.aio.EOF


class Internet:
    """Which server listens at which endpoint."""

    def __init__(self, loop: SimulatedLoop, network: Network) -> None:
        self.loop = loop
        self.network = network
        self._listening: dict[str, SimulatedServer] = {}
        self.made: Counter[str] = Counter()
        """Calls, by method."""

    def channel(self, endpoint: str, options: Iterable[tuple[str, int]] = ()) -> "SimulatedChannel":
        """In place of grpc.aio.insecure_channel."""
        return SimulatedChannel(self, endpoint, dict(options))

    def server(self, interceptors: object = None, options: object = None) -> SimulatedServer:
        """In place of grpc.aio.server."""
        return SimulatedServer(self, current_process())

    def listen(self, endpoint: str, server: SimulatedServer) -> None:
        self._listening[endpoint] = server

    def unlisten(self, server: SimulatedServer) -> None:
        self._listening = {at: each for at, each in self._listening.items() if each is not server}

    async def connect(self, host: str, port: int) -> tuple[None, "_Closable"]:
        """In place of asyncio.open_connection, by which our code finds out whether a process listens."""
        here = current_process().name
        if self.network.silent(here, host):
            await asyncio.sleep(60.0)  # longer than any caller waits
        await asyncio.sleep(self.network.draw.random() * 0.002)
        if self.at(f"{host}:{port}") is None:
            raise ConnectionRefusedError(f"no process listens at {host}:{port}")
        return None, _Closable()

    def at(self, endpoint: str) -> SimulatedServer | None:
        server = self._listening.get(endpoint)
        return None if server is None or server.process.state is State.DEAD else server


class _Closable:
    def close(self) -> None:
        """Nothing is open."""


def current_process() -> SimulatedProcess:
    process = CURRENT.get()
    if process is None:
        raise RuntimeError("this code belongs to no simulated process")
    return process


def host_of(endpoint: str) -> str:
    """The name of the process at an endpoint: names are hosts here."""
    return endpoint.rpartition(":")[0]


class SimulatedChannel:
    """As far as our code uses one."""

    def __init__(self, internet: Internet, endpoint: str, options: Mapping[str, int]) -> None:
        self._internet = internet
        self._keepalive_s = sum(options.get(f"grpc.keepalive_{part}_ms", 20_000) for part in ("time", "timeout")) / 1e3
        self._endpoint = endpoint
        self._calls: dict[Call, None] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in tuple(self._calls):
            call.cancel()

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(request: Any, timeout: float | None = None, metadata: Any = ()) -> Any:
            call = self._call(method, request_serializer, response_deserializer, timeout, metadata)
            call.send(request, last=True)
            return call.only_response()

        return start

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(request: Any, timeout: float | None = None, metadata: Any = ()) -> "Call":
            call = self._call(method, request_serializer, response_deserializer, timeout, metadata)
            call.send(request, last=True)
            return call

        return start

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(timeout: float | None = None, metadata: Any = ()) -> "Call":
            return self._call(method, request_serializer, response_deserializer, timeout, metadata)

        return start

    stream_unary = unary_unary  # of the stubs that are made and never called

    def _call(self, method: str, serialize: Any, parse: Any, timeout: float | None, metadata: Any) -> "Call":
        call = Call(self._internet, self._endpoint, method, serialize, parse, timeout, tuple(metadata or ()))
        call.keepalive_s = self._keepalive_s
        self._calls[call] = None
        call.on_end = lambda: self._calls.pop(call, None)
        return call


class Call:
    """The caller's end, and the way to the other one."""

    def __init__(
        self,
        internet: Internet,
        endpoint: str,
        method: str,
        serialize: Callable[[Any], bytes],
        parse: Callable[[bytes], Any],
        timeout_s: float | None,
        metadata: tuple[Any, ...],
    ) -> None:
        self._internet = internet
        self._process = current_process()
        self._serialize, self._parse = serialize, parse
        self._arrived: deque[bytes] = deque()
        self._ended: grpc.aio.AioRpcError | object | None = None
        self._reader: asyncio.Future[None] | None = None
        self._served: Served | None = None
        network = internet.network
        self._there = Pipe(network, self._process.name, host_of(endpoint))
        self.back = Pipe(network, host_of(endpoint), self._process.name)
        self.on_end: Callable[[], object] = lambda: None
        self.timeout_s = timeout_s
        self.keepalive_s = 2.0
        network.opened(self)
        internet.made[method.rpartition("/")[2]] += 1
        self._there.send(lambda: self._arrive(endpoint, method, metadata))
        loop = internet.loop
        if timeout_s is not None:
            late = failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._deadline: Planned | None = loop.call_later(max(0.0, timeout_s), self._end_here, late)
        else:
            self._deadline = None
        if network.silent(self._process.name, host_of(endpoint)):  # it cannot connect
            patience_s = network.draw.uniform(0.1, 2.2)
            loop.call_later(patience_s, self._give_up_connecting, context=network.process.context)

    @property
    def ends(self) -> tuple[SimulatedProcess, SimulatedProcess | None]:
        return self._process, None if self._served is None else self._served.process

    # The caller's side.

    async def write(self, message: Any) -> None:
        if isinstance(self._ended, grpc.aio.AioRpcError):
            raise self._ended
        if self._ended is not None:
            raise asyncio.InvalidStateError("RPC is finished")
        self.send(message)

    async def read(self) -> Any:
        """The next message, or EOF."""
        while not self._arrived:
            if isinstance(self._ended, grpc.aio.AioRpcError):
                raise self._ended
            if self._ended is not None:
                return EOF
            self._reader = self._internet.loop.create_future()
            try:
                await self._reader
            except asyncio.CancelledError:
                self.cancel()  # as grpc.aio does: a caller that stops waiting ends the call
                raise
            finally:
                self._reader = None
        return self._parse(self._arrived.popleft())

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    async def only_response(self) -> Any:
        response = await self.read()
        if response is EOF:
            raise failure(grpc.StatusCode.INTERNAL, "no response")
        return response

    def cancel(self) -> bool:
        if self._ended is not None:
            return False
        self._end_here(failure(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        return True

    def send(self, message: Any, last: bool = False) -> None:
        data = self._serialize(message)
        self._there.send(lambda: self._to_server(data))
        if last:
            self._there.send(lambda: self._to_server(END))

    def _end_here(self, ended: grpc.aio.AioRpcError) -> None:
        """The caller has done with it; the server learns that in time."""
        if self._ended is None:
            self._there.send(self._cancel_server)
            self._finish(ended)

    def _finish(self, ended: object) -> None:
        if self._ended is not None:
            return
        self._ended = ended
        self._internet.network.closed(self)
        if self._deadline is not None:
            self._deadline.cancel()
        self.on_end()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # Arrivals: a task that waits for one is woken in its own context.

    def take(self, data: bytes) -> None:
        if self._ended is None:
            self._arrived.append(data)
            self._wake()

    def in_caller(self, function: Callable[..., object], *arguments: Any) -> None:
        self._internet.loop.call_soon(function, *arguments, context=self._process.context)

    def finish(self, ended: object) -> None:
        self.in_caller(self._finish, ended)

    # Called by the network.

    def break_off(self, why: str) -> None:
        self.finish(failure(grpc.StatusCode.UNAVAILABLE, why))
        self._cancel_server()
        self._internet.network.closed(self)

    def peer_died(self, dead: SimulatedProcess) -> None:
        if dead is self._process:
            self._there.send(self._cancel_server)
            self._internet.network.closed(self)
        else:
            self.back.send(lambda: self.finish(failure(grpc.StatusCode.UNAVAILABLE, "Socket closed")))

    def _give_up_connecting(self) -> None:
        if self._ended is None and self._served is None:
            self.break_off("failed to connect")

    def _arrive(self, endpoint: str, method: str, metadata: tuple[Any, ...]) -> None:
        """At the server's host."""
        if self._ended is not None:
            return
        server = self._internet.at(endpoint)
        if server is None and host_of(endpoint) in self._internet.network.gone:
            return  # there is no answer, not even a refusal
        if server is None:
            refused = failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
            self.back.send(lambda: self.finish(refused))
            return
        handler = server.handler(method)
        if handler is None:
            self.back.send(lambda: self.finish(failure(grpc.StatusCode.UNIMPLEMENTED, method)))
            return
        self._served = Served(self._internet.loop, self, server, handler, metadata)

    def _to_server(self, data: object) -> None:
        if self._served is not None:
            self._served.take(data)

    def _cancel_server(self) -> None:
        if self._served is not None:
            self._served.cancel()

"""Simulated gRPC: channels, servers, calls and their statuses.

Stubs and handlers serialize messages as usual. As in grpc.aio, a handler runs in its server's process and is cancelled
when its call breaks.
"""

import asyncio
import inspect
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Self

import grpc

from baton.lab.simulation.network.links import Network, Pipe
from baton.lab.simulation.network.loop import CURRENT, PlannedCall, SimulatedLoop, SimulatedProcess, State
from baton.process.serving.interceptors import CallInterceptor

EOF = grpc.aio.EOF
END = object()  # marks the end of a stream


def failure(code: grpc.StatusCode, details: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


class Internet:
    """Directory of servers by endpoint."""

    def __init__(self, loop: SimulatedLoop, network: Network) -> None:
        self.loop = loop
        self.network = network
        self._listening: dict[str, SimulatedServer] = {}
        self.made: Counter[str] = Counter()
        """Number of calls by method."""

    def channel(self, endpoint: str, options: Iterable[tuple[str, int]] = ()) -> "SimulatedChannel":
        """Create a channel; replaces grpc.aio.insecure_channel."""
        return SimulatedChannel(self, endpoint, dict(options))

    def server(self, interceptors: object = None, options: object = None) -> "SimulatedServer":
        """Create a server; replaces grpc.aio.server."""
        return SimulatedServer(self, current_process())

    def listen(self, endpoint: str, server: "SimulatedServer") -> None:
        self._listening[endpoint] = server

    def unlisten(self, server: "SimulatedServer") -> None:
        self._listening = {at: each for at, each in self._listening.items() if each is not server}

    async def connect(self, host: str, port: int) -> tuple[None, "_Closable"]:
        """Connect to a port and send nothing; replaces asyncio.open_connection. Raises: ConnectionRefusedError."""
        here = current_process().name
        if self.network.silent(here, host):
            await asyncio.sleep(60.0)  # longer than the timeout of any caller
        await asyncio.sleep(self.network.draw.random() * 0.002)
        if self.at(f"{host}:{port}") is None:
            raise ConnectionRefusedError(f"no process listens at {host}:{port}")
        return None, _Closable()

    def at(self, endpoint: str) -> "SimulatedServer | None":
        server = self._listening.get(endpoint)
        return None if server is None or server.process.state is State.DEAD else server


class _Closable:
    def close(self) -> None:
        """Do nothing: there is no socket."""


def current_process() -> SimulatedProcess:
    process = CURRENT.get()
    if process is None:
        raise RuntimeError("this code belongs to no simulated process")
    return process


def host_of(endpoint: str) -> str:
    """Return the name of the process at an endpoint: each process is its own host."""
    return endpoint.rpartition(":")[0]


class SimulatedChannel:
    """Replacement of a grpc.aio channel, with the methods that Baton uses."""

    def __init__(self, internet: Internet, endpoint: str, options: Mapping[str, int]) -> None:
        self._internet = internet
        self._keepalive_s = sum(options.get(f"grpc.keepalive_{part}_ms", 20_000) for part in ("time", "timeout")) / 1e3
        self._endpoint = endpoint
        self._calls: dict[SimulatedCall, None] = {}
        self._server: SimulatedServer | None = None  # server that the first call reached

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in tuple(self._calls):
            call.cancel()

    def get_state(self) -> grpc.ChannelConnectivity:
        """Return the channel's state: READY until the server of the first call has died or been replaced, then IDLE."""
        silent = self._internet.network.silent(current_process().name, host_of(self._endpoint))
        same = self._internet.at(self._endpoint) is self._server
        return grpc.ChannelConnectivity.READY if silent or same else grpc.ChannelConnectivity.IDLE

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(request: Any, timeout: float | None = None, metadata: Any = ()) -> Any:
            call = self._call(method, request_serializer, response_deserializer, timeout, metadata)
            call.send(request, last=True)
            return call.only_response()

        return start

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(request: Any, timeout: float | None = None, metadata: Any = ()) -> "SimulatedCall":
            call = self._call(method, request_serializer, response_deserializer, timeout, metadata)
            call.send(request, last=True)
            return call

        return start

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(timeout: float | None = None, metadata: Any = ()) -> "SimulatedCall":
            return self._call(method, request_serializer, response_deserializer, timeout, metadata)

        return start

    stream_unary = unary_unary  # stubs need this method, but no code calls it

    def _call(self, method: str, serialize: Any, parse: Any, timeout: float | None, metadata: Any) -> "SimulatedCall":
        self._server = self._server or self._internet.at(self._endpoint)
        call = SimulatedCall(self._internet, self._endpoint, method, serialize, parse, timeout, tuple(metadata or ()))
        call.keepalive_s = self._keepalive_s
        self._calls[call] = None
        call.on_end = lambda: self._calls.pop(call, None)
        return call


class SimulatedCall:
    """Caller's end of a call."""

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
            self._deadline: PlannedCall | None = loop.call_later(max(0.0, timeout_s), self._end_here, late)
        else:
            self._deadline = None
        if network.silent(self._process.name, host_of(endpoint)):  # connecting must time out
            patience_s = network.draw.uniform(0.1, 2.2)
            loop.call_later(patience_s, self._give_up_connecting, context=network.process.context)

    @property
    def ends(self) -> tuple[SimulatedProcess, SimulatedProcess | None]:
        return self._process, None if self._served is None else self._served.process

    # Methods for the caller.

    async def write(self, message: Any) -> None:
        if isinstance(self._ended, grpc.aio.AioRpcError):
            raise self._ended
        if self._ended is not None:
            raise asyncio.InvalidStateError("RPC is finished")
        self.send(message)

    async def read(self) -> Any:
        """Return the next message, or EOF after the last one."""
        while not self._arrived:
            if isinstance(self._ended, grpc.aio.AioRpcError):
                raise self._ended
            if self._ended is not None:
                return EOF
            self._reader = self._internet.loop.create_future()
            try:
                await self._reader
            except asyncio.CancelledError:
                self.cancel()  # as in grpc.aio, cancelling a read cancels the call
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
        """End the call for the caller, and send the cancellation to the server over the network."""
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

    # Deliveries to the caller, which run in the caller's context.

    def take(self, data: bytes) -> None:
        if self._ended is None:
            self._arrived.append(data)
            self._wake()

    def in_caller(self, function: Callable[..., object], *arguments: Any) -> None:
        self._internet.loop.call_soon(function, *arguments, context=self._process.context)

    def finish(self, ended: object) -> None:
        self.in_caller(self._finish, ended)

    # Methods for the network.

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
        """Deliver the new call to the server, or refuse it."""
        if self._ended is not None:
            return
        server = self._internet.at(endpoint)
        if server is None and host_of(endpoint) in self._internet.network.gone:
            return  # a machine that is gone does not refuse calls: they time out
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


class Served:
    """Server's end of a call: the context that is passed to its handler, and the handler's task."""

    def __init__(
        self,
        loop: SimulatedLoop,
        call: SimulatedCall,
        server: "SimulatedServer",
        handler: Any,
        metadata: tuple[Any, ...],
    ) -> None:
        self.process = server.process
        self._loop = loop
        self._call = call
        self._server = server
        self._handler = handler
        self._metadata = metadata
        self._requests: asyncio.Queue[object] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self.stopping = False  # whether the call ends because the server stops
        self._status: grpc.aio.AioRpcError | None = None
        self._deadline_s = None if call.timeout_s is None else loop.time() + call.timeout_s
        loop.call_soon(self._start, context=self.process.context)

    def _start(self) -> None:
        if not self._cancelled:
            self._task = self._loop.create_task(self._serve(), context=self.process.context.copy())
            self._server.calls[self] = None

    def take(self, data: object) -> None:
        """Deliver a message from the network."""
        self._requests.put_nowait(data)

    def cancel(self) -> None:
        """Cancel the call: the caller disconnected, or the server stops."""
        self._loop.call_soon(self._cancel, context=self.process.context)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def _serve(self) -> None:
        handler, ended = self._handler, END
        try:
            request = self._stream() if handler.request_streaming else await self._message()
            if handler.response_streaming:
                await self._respond_all(handler.unary_stream or handler.stream_stream, request)
            else:
                self._send(await (handler.unary_unary or handler.stream_unary)(request, self))
        except grpc.aio.AbortError:
            ended = self._status or failure(grpc.StatusCode.UNKNOWN, "aborted")
        except asyncio.CancelledError:
            code = grpc.StatusCode.UNAVAILABLE if self.stopping else grpc.StatusCode.CANCELLED
            ended = failure(code, "the server stops" if self.stopping else "cancelled")
        finally:
            self._server.calls.pop(self, None)
        self._call.back.send(lambda: self._call.finish(ended))

    async def _respond_all(self, behaviour: Any, request: Any) -> None:
        if not inspect.isasyncgenfunction(behaviour):
            await behaviour(request, self)
            return
        async for response in behaviour(request, self):
            self._send(response)

    def _send(self, response: Any) -> None:
        data = self._handler.response_serializer(response)
        self._call.back.send(lambda: self._call.take(data))

    async def _stream(self) -> AsyncIterator[Any]:
        while (data := await self._requests.get()) is not END:
            yield self._handler.request_deserializer(data)

    async def _message(self) -> Any:
        return self._handler.request_deserializer(await self._requests.get())

    # Methods of grpc.aio.ServicerContext that Baton uses.

    async def write(self, message: Any) -> None:
        self._send(message)

    def invocation_metadata(self) -> tuple[Any, ...]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._loop.time())

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self._status = failure(code, details, trailing_metadata or ())
        raise grpc.aio.AbortError


class SimulatedServer:
    """Replacement of a process's grpc.aio.Server."""

    def __init__(self, internet: Internet, process: SimulatedProcess) -> None:
        self._internet = internet
        self.process = process
        self.calls: dict[Served, None] = {}
        self._generic: list[Any] = []
        self._endpoints: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Do nothing: `add_generic_rpc_handlers` receives the same handlers."""

    def add_insecure_port(self, address: str) -> int:
        self._endpoints.append(address)
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        for endpoint in self._endpoints:
            self._internet.listen(endpoint, self)

    async def stop(self, grace: float | None) -> None:
        self._internet.unlisten(self)
        if grace and self.calls:
            tasks = [served._task for served in self.calls if served._task is not None]
            await asyncio.wait(tasks, timeout=grace)
        for served in tuple(self.calls):
            served.stopping = True
            served.cancel()
        await asyncio.sleep(0)

    def handler(self, method: str) -> Any:
        """Return the handler of a method, with Baton's interceptors; None for an unknown method."""
        details = _Details(method)
        found = next((each for handler in self._generic if (each := handler.service(details)) is not None), None)
        return None if found is None else _intercepted(found, details)


class _Details:
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


def _intercepted(handler: Any, details: Any) -> Any:
    async def found(_: Any) -> Any:
        return handler

    work = CallInterceptor().intercept_service(found, details)
    try:
        work.send(None)  # the interceptor does not await anything, so one step completes it
    except StopIteration as result:
        return result.value
    raise RuntimeError("the interceptor awaited something; simulated interceptors must not")

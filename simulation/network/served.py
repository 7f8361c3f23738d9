"""The server's side of simulated gRPC: where calls arrive, the context that a handler gets, and its task."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc

from baton.service.serving.interceptors import CallInterceptor
from baton.simulation.network.links import Pipe
from baton.simulation.network.loop import SimulatedLoop, SimulatedProcess

END = object()  # of a stream


def failure(code: grpc.StatusCode, details: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


class Caller(Protocol):
    """The other end of a call."""

    back: Pipe
    timeout_s: float | None

    def in_caller(self, function: Callable[..., object], *arguments: Any) -> None: ...
    def take(self, data: bytes) -> None: ...
    def finish(self, ended: object) -> None: ...


class Listening(Protocol):
    """Where servers are found."""

    def listen(self, endpoint: str, server: "SimulatedServer") -> None: ...
    def unlisten(self, server: "SimulatedServer") -> None: ...


class Served:
    """The server's end of a call: the context that its handler gets, and the handler's task."""

    def __init__(
        self, loop: SimulatedLoop, call: Caller, server: "SimulatedServer", handler: Any, metadata: tuple[Any, ...]
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
        self.stopping = False  # it is the server that ends the call
        self._status: grpc.aio.AioRpcError | None = None
        self._deadline_s = None if call.timeout_s is None else loop.time() + call.timeout_s
        loop.call_soon(self._start, context=self.process.context)

    def _start(self) -> None:
        if not self._cancelled:
            self._task = self._loop.create_task(self._serve(), context=self.process.context.copy())
            self._server.calls[self] = None

    def take(self, data: object) -> None:
        """From the network."""
        self._requests.put_nowait(data)  # a task that waits for it is woken in its own context

    def cancel(self) -> None:
        """From the network, or by a server that stops: the caller has gone."""
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

    # grpc.aio.ServicerContext, as far as it is used.

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
    """In place of a grpc.aio.Server of a process."""

    def __init__(self, internet: Listening, process: SimulatedProcess) -> None:
        self._internet = internet
        self.process = process
        self.calls: dict[Served, None] = {}
        self._generic: list[Any] = []
        self._handlers: dict[str, Any] = {}
        self._endpoints: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """The same ones again."""

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
        """With our interceptor around it; None where there is no such method."""
        if method not in self._handlers:
            details = _Details(method)
            found = next((each for handler in self._generic if (each := handler.service(details)) is not None), None)
            self._handlers[method] = None if found is None else _intercepted(found, details)
        return self._handlers[method]


class _Details:
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


def _intercepted(handler: Any, details: Any) -> Any:
    async def found(_: Any) -> Any:
        return handler

    work = CallInterceptor().intercept_service(found, details)
    try:
        work.send(None)  # it waits for nothing
    except StopIteration as result:
        return result.value
    raise RuntimeError("the interceptor waits")

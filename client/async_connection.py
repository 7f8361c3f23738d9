"""Calls to one router of several, with deadline, retries and typed errors, for asyncio.

The same as sync_connection.py, line by line.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

import grpc

from baton.client.channel import CHANNEL_OPTIONS, OPEN, Security, targets_of
from baton.client.errors import BatonClientError, Cancelled, Unavailable, error_from_status
from baton.client.retry import Attempts, Recovery, RetryPolicy
from baton.client.types import Event

Metadata = tuple[tuple[str, str], ...]


class _Way(NamedTuple):
    channel: grpc.aio.Channel
    stub: Any


class AsyncConnection:
    """Stays with one router until that one is unavailable, then takes the next.

    Belongs to the event loop of its first call: channels are opened there, so that it may be made anywhere.
    """

    def __init__(
        self,
        target: str | Sequence[str],
        make_stub: Callable[[grpc.aio.Channel], Any],
        retry: RetryPolicy,
        timeout_s: float | None,
        security: Security = OPEN,
    ) -> None:
        """`make_stub`: of the one service that this connection is for. Raises: ValueError without a target."""
        self._targets = targets_of(target)
        self._make_stub = make_stub
        self._credentials = security.credentials()
        self.retry = retry.among(len(self._targets))
        self.security = security
        self._ways: dict[int, _Way] = {}
        self._current = 0
        self._timeout_s = timeout_s
        self._closed = False

    async def close(self) -> None:
        """Ends the calls that are under way; their readers get Cancelled."""
        self._closed = True
        for way in self._ways.values():
            await way.channel.close()

    async def unary(self, method: str, request: object, timeout_s: float | None) -> Any:
        attempts = Attempts(self.retry, self.timeout_s(timeout_s), time.monotonic())
        metadata = self.security.metadata()
        while True:
            current = self._current
            call = getattr(self._way(current).stub, method)
            try:
                return await call(request, timeout=attempts.remaining_s(time.monotonic()), metadata=metadata)
            except (grpc.aio.AioRpcError, asyncio.CancelledError) as failure:
                error = _error_from(failure)
                wait_s = attempts.wait_s(error, time.monotonic(), random.random())
                if wait_s is None or self._closed:
                    raise error from failure
            self._leave(current, error)
            await asyncio.sleep(wait_s)

    async def stream(self, recovery: Recovery, metadata: Metadata) -> AsyncGenerator[Event, None]:
        """The events of one answer, over as many streams as it takes.

        Closing the generator, or cancelling its reader, cancels the call.
        """
        while True:
            current = self._current
            method = getattr(self._way(current).stub, recovery.method)
            call = method(recovery.message, timeout=recovery.remaining_s(time.monotonic()), metadata=metadata)
            try:
                async for response in call:
                    event = recovery.take(response)
                    if event is not None:
                        yield event
                recovery.end()
                return
            except (grpc.aio.AioRpcError, asyncio.CancelledError) as failure:
                error = _error_from(failure)
                if recovery.is_whole:
                    return
                wait_s = recovery.wait_s(error, time.monotonic(), random.random())
                if wait_s is None or self._closed:
                    raise error from failure
            finally:
                call.cancel()
            self._leave(current, error)
            await asyncio.sleep(wait_s)

    def timeout_s(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def _way(self, number: int) -> _Way:
        if number not in self._ways:
            target = self._targets[number]
            channel = (
                grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(target, self._credentials, CHANNEL_OPTIONS)
            )
            self._ways[number] = _Way(channel, self._make_stub(channel))
        return self._ways[number]

    def _leave(self, current: int, error: BatonClientError) -> None:
        """The first call that finds a router gone moves all calls to the next."""
        if isinstance(error, Unavailable | Cancelled) and self._current == current:
            self._current = (current + 1) % len(self._targets)


def _error_from(failure: grpc.aio.AioRpcError | asyncio.CancelledError) -> BatonClientError:
    """grpc raises CancelledError also where no one cancelled the task, but the channel was closed."""
    if isinstance(failure, grpc.aio.AioRpcError):
        return error_from_status(failure.code(), failure.details(), failure.trailing_metadata())
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise failure
    return Cancelled("the client was closed")

"""Calls over one asyncio channel, with deadline, retries before the first message, and typed errors.

The same as sync_connection.py, line by line; knows no Baton service.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from client.channel import CHANNEL_OPTIONS, OPEN, Security
from client.errors import BatonClientError, Cancelled
from client.retry import Attempts, RetryPolicy
from client.status_mapping import error_from_status

Metadata = tuple[tuple[str, str], ...]


class AsyncConnection:
    """Belongs to the event loop of its first call: the channel is opened there, so that it may be made anywhere."""

    def __init__(self, target: str, retry: RetryPolicy, timeout_s: float | None, security: Security = OPEN) -> None:
        self._target = target
        self._credentials = security.credentials()
        self.security = security
        self._retry = retry
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    def stub(self, make: Callable[[grpc.aio.Channel], Any]) -> Any:
        """The stub of the one service that this connection is for."""
        if self._channel is None:
            self._channel = (
                grpc.aio.insecure_channel(self._target, CHANNEL_OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(self._target, self._credentials, CHANNEL_OPTIONS)
            )
            self._stub = make(self._channel)
        return self._stub

    async def close(self) -> None:
        """Ends the calls that are under way; their readers get Cancelled."""
        if self._channel is not None:
            await self._channel.close()

    async def unary(self, method: Callable[..., Any], request: object, timeout_s: float | None) -> Any:
        attempts, metadata = self._attempts(timeout_s), self.security.metadata()
        while True:
            try:
                return await method(request, timeout=attempts.remaining_s(time.monotonic()), metadata=metadata)
            except (grpc.aio.AioRpcError, asyncio.CancelledError) as failure:
                error = _error_from(failure)
                wait_s = attempts.wait_s(error, time.monotonic(), random.random())
                if wait_s is None:
                    raise error from failure
            await asyncio.sleep(wait_s)

    async def stream(
        self, method: Callable[..., Any], request: object, timeout_s: float | None, metadata: Metadata
    ) -> AsyncGenerator[Any, None]:
        """The messages of a server stream. Closing the generator, or cancelling its reader, cancels the call."""
        attempts = self._attempts(timeout_s)
        while True:
            call = method(request, timeout=attempts.remaining_s(time.monotonic()), metadata=metadata)
            begun = False
            try:
                async for response in call:
                    begun = True
                    yield response
                return
            except (grpc.aio.AioRpcError, asyncio.CancelledError) as failure:
                error = _error_from(failure)
                wait_s = None if begun else attempts.wait_s(error, time.monotonic(), random.random())
                if wait_s is None:
                    raise error from failure
            finally:
                call.cancel()
            await asyncio.sleep(wait_s)

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s, time.monotonic())


def _error_from(failure: grpc.aio.AioRpcError | asyncio.CancelledError) -> BatonClientError:
    """grpc raises CancelledError also where no one cancelled the task, but the channel was closed."""
    if isinstance(failure, grpc.aio.AioRpcError):
        return error_from_status(failure.code(), failure.details(), failure.trailing_metadata())
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise failure
    return Cancelled("the client was closed")

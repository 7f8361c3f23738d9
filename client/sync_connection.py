"""Calls to one router of several, with deadline, retries and typed errors."""

import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import grpc

from baton.client.channel import CHANNEL_OPTIONS, OPEN, Security, targets_of
from baton.client.errors import BatonClientError, Cancelled, Unavailable, error_from_status
from baton.client.retry import Attempts, Recovery, RetryPolicy
from baton.client.types import Event

Metadata = tuple[tuple[str, str], ...]


class _Way(NamedTuple):
    channel: grpc.Channel
    stub: Any


class SyncConnection:
    """Stays with one router until that one is unavailable, then takes the next. Safe to share between threads."""

    def __init__(
        self,
        target: str | Sequence[str],
        make_stub: Callable[[grpc.Channel], Any],
        retry: RetryPolicy,
        timeout_s: float | None,
        security: Security = OPEN,
    ) -> None:
        """`make_stub`: of the one service that this connection is for. Raises: ValueError without a target."""
        credentials = security.credentials()
        channels = [
            grpc.insecure_channel(each, CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(each, credentials, CHANNEL_OPTIONS)
            for each in targets_of(target)
        ]
        self.retry = retry.among(len(channels))
        self.security = security
        self._ways = [_Way(channel, make_stub(channel)) for channel in channels]
        self._current = 0
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._closed = False

    def close(self) -> None:
        """Ends the calls that are under way; their readers get Cancelled."""
        self._closed = True
        for way in self._ways:
            way.channel.close()

    def unary(self, method: str, request: object, timeout_s: float | None) -> Any:
        attempts = Attempts(self.retry, self.timeout_s(timeout_s), time.monotonic())
        metadata = self.security.metadata()
        while True:
            current = self._current
            call = getattr(self._ways[current].stub, method)
            try:
                return call(request, timeout=attempts.remaining_s(time.monotonic()), metadata=metadata)
            except grpc.RpcError as failure:
                error = _error_from(failure)
                wait_s = attempts.wait_s(error, time.monotonic(), random.random())
                if wait_s is None or self._closed:
                    raise error from failure
            self._leave(current, error)
            time.sleep(wait_s)

    def stream(self, recovery: Recovery, metadata: Metadata) -> Generator[Event, None, None]:
        """The events of one answer, over as many streams as it takes. Closing the generator cancels the call."""
        while True:
            current = self._current
            method = getattr(self._ways[current].stub, recovery.method)
            call = method(recovery.message, timeout=recovery.remaining_s(time.monotonic()), metadata=metadata)
            try:
                for response in call:
                    event = recovery.take(response)
                    if event is not None:
                        yield event
                recovery.end()
                return
            except grpc.RpcError as failure:
                error = _error_from(failure)
                if recovery.is_whole:
                    return
                wait_s = recovery.wait_s(error, time.monotonic(), random.random())
                if wait_s is None or self._closed:
                    raise error from failure
            finally:
                call.cancel()
            self._leave(current, error)
            time.sleep(wait_s)

    def timeout_s(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def _leave(self, current: int, error: BatonClientError) -> None:
        """The first call that finds a router gone moves all calls to the next."""
        with self._lock:
            if isinstance(error, Unavailable | Cancelled) and self._current == current:
                self._current = (current + 1) % len(self._ways)


def _error_from(failure: grpc.RpcError) -> BatonClientError:
    if isinstance(failure, grpc.Call):
        return error_from_status(failure.code(), failure.details(), failure.trailing_metadata() or ())
    return Unavailable(str(failure))

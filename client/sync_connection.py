"""Calls over one channel, with deadline, retries before the first message, and typed errors. Knows no Baton service."""

import random
import time
from collections.abc import Callable, Generator
from typing import Any

import grpc

from client.channel import CHANNEL_OPTIONS, OPEN, Security
from client.errors import BatonClientError, Unavailable
from client.retry import Attempts, RetryPolicy
from client.status_mapping import error_from_status

Metadata = tuple[tuple[str, str], ...]


class SyncConnection:
    """Safe to share between threads."""

    def __init__(self, target: str, retry: RetryPolicy, timeout_s: float | None, security: Security = OPEN) -> None:
        credentials = security.credentials()
        self.channel = (
            grpc.insecure_channel(target, CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(target, credentials, CHANNEL_OPTIONS)
        )
        self.security = security
        self._retry = retry
        self._timeout_s = timeout_s

    def close(self) -> None:
        """Ends the calls that are under way; their readers get Cancelled."""
        self.channel.close()

    def unary(self, method: Callable[..., Any], request: object, timeout_s: float | None) -> Any:
        attempts, metadata = self._attempts(timeout_s), self.security.metadata()
        while True:
            try:
                return method(request, timeout=attempts.remaining_s(time.monotonic()), metadata=metadata)
            except grpc.RpcError as failure:
                error = _error_from(failure)
                wait_s = attempts.wait_s(error, time.monotonic(), random.random())
                if wait_s is None:
                    raise error from failure
            time.sleep(wait_s)

    def stream(
        self, method: Callable[..., Any], request: object, timeout_s: float | None, metadata: Metadata
    ) -> Generator[Any, None, None]:
        """The messages of a server stream. Closing the generator cancels the call."""
        attempts = self._attempts(timeout_s)
        while True:
            call = method(request, timeout=attempts.remaining_s(time.monotonic()), metadata=metadata)
            begun = False
            try:
                for response in call:
                    begun = True
                    yield response
                return
            except grpc.RpcError as failure:
                error = _error_from(failure)
                wait_s = None if begun else attempts.wait_s(error, time.monotonic(), random.random())
                if wait_s is None:
                    raise error from failure
            finally:
                call.cancel()
            time.sleep(wait_s)

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s, time.monotonic())


def _error_from(failure: grpc.RpcError) -> BatonClientError:
    if isinstance(failure, grpc.Call):
        return error_from_status(failure.code(), failure.details(), failure.trailing_metadata() or ())
    return Unavailable(str(failure))

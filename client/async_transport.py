"""Channels of the asyncio client, with the interface of sync_transport.py."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from baton.client.channel import RouterChoice, options_of
from baton.client.errors import BatonClientError, Cancelled, error_from_status

FAILURES = (grpc.aio.AioRpcError, asyncio.CancelledError)
MakeStub = Callable[[grpc.aio.Channel], Any]
sleep = asyncio.sleep


class AsyncChannels:
    """Channels and stubs of all targets, opened in the event loop of the first call."""

    def __init__(self, connection: RouterChoice, make_stub: MakeStub) -> None:
        self._connection = connection
        self._make_stub = make_stub
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._stubs: dict[int, Any] = {}

    def stub(self, number: int) -> Any:
        if number not in self._stubs:
            target, credentials = self._connection.targets[number], self._connection.credentials
            self._channels[number] = (
                grpc.aio.insecure_channel(target, options_of(target))
                if credentials is None
                else grpc.aio.secure_channel(target, credentials, options_of(target))
            )
            self._stubs[number] = self._make_stub(self._channels[number])
        return self._stubs[number]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


def error_from(failure: grpc.aio.AioRpcError | asyncio.CancelledError) -> BatonClientError:
    """Return the client's error; raise the failure itself if the current task was cancelled.

    gRPC also raises CancelledError if the channel was closed.
    """
    if isinstance(failure, grpc.aio.AioRpcError):
        return error_from_status(failure.code(), failure.details(), failure.trailing_metadata())
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise failure
    return Cancelled("the client was closed")

"""Channels of the blocking client. Same interface as async_transport.py."""

import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.experimental

from baton.client.channel import RouterChoice, options_of
from baton.client.errors import BatonClientError, Unavailable, error_from_status

FAILURES = (grpc.RpcError,)
MakeStub = Callable[[grpc.Channel], Any]
sleep = time.sleep

# The thread that reads an answer handles its events itself. By default another thread handles them under a lock that
# Ctrl-C can leave taken: an interrupt within Condition.__enter__ (https://bugs.python.org/issue29988) then hangs every
# later call of the channel.
_SINGLE_THREADED = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)


class SyncChannels:
    """Channels and stubs of all targets. Threads may share them."""

    def __init__(self, connection: RouterChoice, make_stub: MakeStub) -> None:
        credentials = connection.credentials
        self._channels = [
            grpc.insecure_channel(target, (*options_of(target), _SINGLE_THREADED))
            if credentials is None
            else grpc.secure_channel(target, credentials, (*options_of(target), _SINGLE_THREADED))
            for target in connection.targets
        ]
        self._stubs = [make_stub(channel) for channel in self._channels]

    def stub(self, number: int) -> Any:
        return self._stubs[number]

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


def error_from(failure: grpc.RpcError) -> BatonClientError:
    if isinstance(failure, grpc.Call):
        return error_from_status(failure.code(), failure.details(), failure.trailing_metadata() or ())
    return Unavailable(str(failure))

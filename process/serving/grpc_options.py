"""gRPC settings of every server and channel of ours, and whether a process listens at an address.

A long call that writes nothing lets a client's keepalive pings count as strikes, and past two strikes the server cuts
the whole connection (GOAWAY too_many_pings) with every call on it. So servers never count strikes.

A sender of keepalive pings must set how long an answer may take: left out, `ping_timeout_ms` is a minute, independent
of the keepalive timeout, which itself bounds only how long TCP may leave data unacknowledged.
"""

import asyncio

MAX_MESSAGE_BYTES = 32 * 1024 * 1024

_SIZES = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SIZES,
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a silent share
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)

PUBLIC_MESSAGE_BYTES = 4 * 1024 * 1024
PUBLIC_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *(option for option in SERVER_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    ("grpc.max_receive_message_length", PUBLIC_MESSAGE_BYTES),
)
"""Options of public servers: messages as large as over HTTP; a larger one is refused before it is parsed
(RESOURCE_EXHAUSTED).
"""

_INTERNAL_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
)

INTERNAL_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *(option for option in SERVER_OPTIONS if option[0] not in dict(_INTERNAL_KEEPALIVE)),
    *_INTERNAL_KEEPALIVE,
)
"""Options of internal servers (links and transfers). A vanished peer is noticed within two seconds while something is
sent to it, and one that is stopped, or whose connection another process keeps open, within five. Links outlive that.
"""

INTERNAL_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SIZES,
    *_INTERNAL_KEEPALIVE,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),  # sessions resume by themselves
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
"""Options of internal channels, for the other end."""


_WAIT_S = 0.5  # an answer of the kernel; without one, the connection is not refused


async def refuses_connections(endpoint: str) -> bool:
    """Return whether the connection to `endpoint` (host:port, an IPv6 host in brackets) is refused; False for any other
    failure.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(_WAIT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return False

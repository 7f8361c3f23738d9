"""gRPC options of all servers and channels, and a probe for addresses that refuse connections.

During a long call without messages, a client's keepalive pings count as strikes; after two strikes the server would
close the connection (GOAWAY too_many_pings) with all its calls. So servers never count strikes.

A sender of keepalive pings must set `ping_timeout_ms`, the time for a response, which is 60 s by default; the keepalive
timeout only bounds how long TCP data may stay unacknowledged.
"""

import asyncio

MAX_MESSAGE_BYTES = 32 * 1024 * 1024

_SIZES = (("grpc.max_send_message_length", MAX_MESSAGE_BYTES), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES))

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SIZES,
    ("grpc.so_reuseport", 0),  # binding a port in use fails instead of sharing it
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)


def sharing_port(options: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Return the options of a server that shares its port with other processes of this user."""
    return (*(option for option in options if option[0] != "grpc.so_reuseport"), ("grpc.so_reuseport", 1))


PUBLIC_MESSAGE_BYTES = 4 * 1024 * 1024
PUBLIC_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *(option for option in SERVER_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    ("grpc.max_receive_message_length", PUBLIC_MESSAGE_BYTES),
)
"""Options of public servers: message size as over HTTP; larger messages are refused before parsing
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
"""Options of internal servers (links and transfers). During sends, a vanished peer is detected within 2 s. A
stopped peer, or one whose connection another process keeps open, is detected within 5 s. Links survive the lost
connection.
"""

INTERNAL_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SIZES,
    *_INTERNAL_KEEPALIVE,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),  # disabled, since links resume without gRPC's retries
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
"""Options of channels to internal servers."""


_WAIT_S = 0.5  # timeout of a connection attempt; a timeout does not count as refused


async def refuses_connections(endpoint: str) -> bool:
    """Return whether a connection to `endpoint` (host:port, IPv6 host in brackets) is refused; False for other
    failures.
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

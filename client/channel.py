"""How a client's channel is set up, sync and async alike."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from baton.client.requests import GenerateOptions

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_ADMIN_TARGET = "127.0.0.1:50052"
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

# The ping interval stays above the server's limit of 10 s, below which it would drop the connection. Pings are sent
# also while only the server sends: a router that hangs is noticed, and its streams are resumed at another one. One that
# accepts and then sends nothing is given up after 4 s (`min_reconnect_backoff` bounds an attempt). A refused connection
# is tried again soon, so that the client's own retries find a server that has just come up.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 4_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def targets_of(target: str | Sequence[str]) -> tuple[str, ...]:
    """host:port of each router, from a sequence or separated by commas. Raises: ValueError without any."""
    given = target.split(",") if isinstance(target, str) else target
    targets = tuple(each.strip() for each in given if each.strip())
    if not targets:
        raise ValueError("a target is required")
    return targets


@dataclass(frozen=True, slots=True)
class Security:
    """How a client authenticates itself and its server.

    `tls`: True trusts the certificate authorities that gRPC knows, a path those in that PEM file; False is no TLS. A
    key without TLS can be read by every host in between.
    """

    api_key: str | None = field(default=None, repr=False)
    tls: bool | Path = False

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None: no TLS. Raises: OSError."""
        if self.tls is False:
            return None
        return grpc.ssl_channel_credentials(None if self.tls is True else Path(self.tls).read_bytes())

    def metadata(self, options: GenerateOptions | None = None) -> tuple[tuple[str, str], ...]:
        """Of one call; its options take precedence."""
        given = options or {}
        traceparent, api_key = given.get("traceparent"), given.get("api_key", self.api_key)
        pairs = (("traceparent", traceparent), ("authorization", f"Bearer {api_key}" if api_key else None))
        return tuple((key, value) for key, value in pairs if value)


OPEN = Security()

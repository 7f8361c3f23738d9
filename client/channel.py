"""Options of channels, credentials, and the choice among several routers."""

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from baton.client.errors import BatonClientError, Cancelled, Unavailable
from baton.client.requests import GenerateOptions
from baton.client.retry import RetryPolicy

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_ADMIN_TARGET = "127.0.0.1:50052"
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

# The ping interval must exceed 10 s, the server's minimum. Pings detect a hanging router; the client then resumes its
# streams at another router. `min_reconnect_backoff` is the timeout of a connection attempt, 4 s. Refused connections
# are retried soon, so that the client's retries find a server that has just started. Each channel has a connection of
# its own: with gRPC's common pool, all clients of a process would reach one of the routers that share an address.
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
    ("grpc.use_local_subchannel_pool", 1),
)

# Options for a name with several routers' addresses, such as a headless Service of Kubernetes. Calls are balanced over
# the routers whose health check succeeds. A draining router fails the check but finishes its streams. After a lost
# connection, the name is resolved again, at most once per second (gRPC's default is 30 s).
_BY_NAME: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}'),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)


def options_of(target: str) -> tuple[tuple[str, str | int], ...]:
    """Return the options of a channel. A target dns:///NAME:PORT balances over all addresses of the name."""
    return (*CHANNEL_OPTIONS, *_BY_NAME) if target.startswith("dns:") else CHANNEL_OPTIONS


Metadata = tuple[tuple[str, str], ...]


def targets_of(target: str | Sequence[str]) -> tuple[str, ...]:
    """Return host:port of each router, from a sequence or a comma-separated text. Raises: ValueError without any."""
    given = target.split(",") if isinstance(target, str) else target
    targets = tuple(each.strip() for each in given if each.strip())
    if not targets:
        raise ValueError("target: empty; name at least one host:port")
    return targets


@dataclass(frozen=True, slots=True)
class Security:
    """Credentials of a client.

    `tls`: True: trust gRPC's default certificate authorities; a path: trust those in this PEM file; False: no TLS.
    Without TLS, the API key can be read on the network.
    """

    api_key: str | None = field(default=None, repr=False)
    tls: bool | Path = False

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return TLS credentials; None without TLS. Raises: OSError."""
        if self.tls is False:
            return None
        return grpc.ssl_channel_credentials(None if self.tls is True else Path(self.tls).read_bytes())

    def metadata(self, options: GenerateOptions | None = None) -> Metadata:
        """Return the metadata of one call. Options of the call take precedence."""
        given = options or {}
        traceparent, api_key = given.get("traceparent"), given.get("api_key", self.api_key)
        pairs = (("traceparent", traceparent), ("authorization", f"Bearer {api_key}" if api_key else None))
        return tuple((key, value) for key, value in pairs if value)


OPEN = Security()


@dataclass(frozen=True, slots=True)
class AdminSecurity(Security):
    """Credentials of an admin port.

    Without a key, each call sends the token of a service that the same user started on the same machine. The token file
    is read at each call, so the service may start after the client.
    """

    target: str = ""

    def metadata(self, options: GenerateOptions | None = None) -> Metadata:
        api_key = self.api_key or local_admin_token(self.target)
        return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def admin_token_file(port: int) -> Path:
    """Return the path of the file with the token of an admin port, readable by its user only.

    The name contains the host name, since machines may share a home. Raises: RuntimeError without a home.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "baton" / f"admin-{socket.gethostname()}-{port}"


def local_admin_token(target: str) -> str | None:
    """Return the token of an admin port; None if `target` is on another machine or there is no token file."""
    host, _, port = target.rpartition(":")
    if host.strip("[]") not in _LOOPBACK or not port.isdecimal():
        return None
    try:
        return admin_token_file(int(port)).read_text(encoding="ascii").strip() or None
    except (OSError, RuntimeError, ValueError):  # no such service, no home, or another user's file
        return None


class RouterChoice:
    """Choice of the current router among several. If the current router becomes unavailable, the next one is chosen."""

    def __init__(
        self, target: str | Sequence[str], retry: RetryPolicy, timeout_s: float | None, security: Security = OPEN
    ) -> None:
        """Read targets and certificates. Raises: ValueError without a target, OSError for an unreadable certificate
        file.
        """
        self.targets = targets_of(target)
        self.retry = retry.among(len(self.targets))
        self.security = security
        self.credentials = security.credentials()
        self.current = 0  # index of the current target
        self.closed = False
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    def timeout_s(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def leave(self, current: int, error: BatonClientError) -> None:
        """Move all calls to the next router if `current` is unavailable. Later calls for the same router do nothing."""
        with self._lock:
            if isinstance(error, Unavailable | Cancelled) and self.current == current:
                self.current = (current + 1) % len(self.targets)

"""Destination of traces: an OpenTelemetry collector over OTLP, gRPC or HTTP.

With HTTP, /v1/traces is appended to the endpoint of all signals. The endpoint of traces is used unchanged, as
OpenTelemetry's specification demands.
"""

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

Protocol = Literal["grpc", "http/protobuf"]

_TRACES_PATH = "/v1/traces"
_USER = re.compile(r"^([\w+.-]+://)?[^/?#]*@")


@dataclass(frozen=True, slots=True)
class Collector:
    """OpenTelemetry collector that receives traces. `endpoint`: over HTTP the complete URL, over gRPC a URL or
    host:port. It may contain a password, which `str()` omits.
    """

    endpoint: str = field(repr=False)
    protocol: Protocol = "grpc"

    def __str__(self) -> str:
        """Return the endpoint without user, password and query, such as `http://collector:4318/v1/traces (OTLP,
        http/protobuf)`.
        """
        return f"{_shown(self.endpoint)} (OTLP, {self.protocol})"


def choose_collector(
    endpoint: str | None,
    protocol: Protocol,
    traces_endpoint: str | None = None,
    traces_protocol: Protocol | None = None,
) -> Collector | None:
    """Return the collector; None without an endpoint. Settings for traces override settings for all signals.

    Raises: ValueError, whose message contains no password.
    """
    given, spoken = traces_endpoint or endpoint, traces_protocol or protocol
    if given is None:
        return None
    if spoken == "http/protobuf":
        parts = urlsplit(given)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"over {spoken} the collector's endpoint must be a URL such as http://host:4318, not {_shown(given)}"
            )
        if not traces_endpoint:
            given = urlunsplit(parts._replace(path=parts.path.rstrip("/") + _TRACES_PATH))
    return Collector(given, spoken)


def _shown(endpoint: str) -> str:
    return _USER.sub(lambda found: found[1] or "", endpoint).partition("?")[0]

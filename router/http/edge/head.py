"""Checks of request heads that RFC 9112 demands and the parser does not perform. Pure."""

import re
from collections.abc import Sequence
from http import HTTPStatus

from baton.router.http.edge.problem import Problem

_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+;=%-]*)(:[0-9]*)?")


def check_head(method: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Check a request's head. Raises: Problem (400)."""
    hosts = [value for name, value in headers if name == b"host"]
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if version not in ("1.0", "1.1"):
        raise _bad(None, f"HTTP/{version} is not supported; use HTTP/1.1 or HTTP/1.0")
    if method == b"CONNECT":
        raise _bad(None, "method CONNECT is not supported: the router is not a proxy")
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise _bad("host", f"host: {len(hosts)} header fields; HTTP/{version} requires exactly one")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise _bad("host", "host: must be a name or an address with an optional port")
    if codings and (version == "1.0" or codings != [b"chunked"]):
        raise _bad("transfer-encoding", "transfer-encoding: only chunked is supported, and only in HTTP/1.1")


def _bad(field: str | None, message: str) -> Problem:
    return Problem(HTTPStatus.BAD_REQUEST, message, field, "invalid_http")

"""Connections of commands: addresses, credentials, and advice for failed calls."""

import http.client
import json
import os
import ssl
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict, TypeVar

import grpc

from baton.cli.options import DEFAULT_TARGET
from baton.client import (
    AdminClient,
    BatonClientError,
    Event,
    ModelNotFound,
    NotAllowed,
    RetryPolicy,
    ServerError,
    Unavailable,
)
from baton.client.channel import Security, local_admin_token
from baton.launch import CommandFailed
from baton.process.config import ConfigError, InternalTlsConfig, SecretConfig, read_config
from baton.process.security.tls import open_async_channel

API_KEY_VARIABLE = "BATON_API_KEY"
TLS_CA_VARIABLE = "BATON_TLS_CA"
Answer = TypeVar("Answer")
GrpcPort = Callable[[str], int | None]


class Credentials(TypedDict):
    """Keyword arguments of a client."""

    api_key: str | None
    tls: bool | Path


def credentials() -> Credentials:
    """Return the credentials in the environment. Raises: CommandFailed."""
    authority = os.environ.get(TLS_CA_VARIABLE)
    if authority and not Path(authority).is_file():
        raise CommandFailed(f"{TLS_CA_VARIABLE}: {authority} is not a file")
    return Credentials(api_key=os.environ.get(API_KEY_VARIABLE) or None, tls=Path(authority) if authority else False)


def admin_key(target: str) -> str | None:
    """Return the key for an admin port: from the cluster secret, or the user's API key. None if the client itself finds
    the token of a service that this user started. Raises: CommandFailed.
    """
    try:
        secret = read_config(SecretConfig, []).cluster_secret
    except ConfigError as error:
        raise CommandFailed(str(error)) from error
    port = target.rpartition(":")[2]
    if secret is not None and port.isdecimal():
        return secret.admin_token(int(port))
    return None if local_admin_token(target) else os.environ.get(API_KEY_VARIABLE) or None


def way_in(authority: Path | None, internal: bool) -> Callable[[str], grpc.aio.Channel] | None:
    """Return how to open a TLS channel to a public or an internal port, None without TLS. Raises: CommandFailed."""
    if internal:
        try:
            tls = read_config(InternalTlsConfig, []).internal_tls
        except ConfigError as error:
            raise CommandFailed(str(error)) from error
        return lambda target: open_async_channel(target, (), tls)
    trusted = Security(tls=authority or False).credentials()
    return None if trusted is None else lambda target: grpc.aio.secure_channel(target, trusted)


_TIMEOUT_S = 2.0


def grpc_port_of(target: str, credentials: Credentials) -> int | None:
    """Return the gRPC port of the router with an HTTP port at `target`, None if no Baton answers this caller there."""
    headers = {"authorization": f"Bearer {credentials['api_key']}"} if credentials["api_key"] else {}
    try:
        connection = _connection(target, credentials)
        try:
            connection.request("GET", "/version", headers=headers)
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):
        return None
    port = answer.get("grpc_port") if isinstance(answer, dict) else None
    return port if isinstance(port, int) else None


def _connection(target: str, credentials: Credentials) -> http.client.HTTPConnection:
    """Return a connection. Raises: OSError if certificates cannot be read."""
    authority = credentials["tls"]
    if authority is False:
        return http.client.HTTPConnection(target, timeout=_TIMEOUT_S)
    context = ssl.create_default_context(cafile=None if authority is True else authority)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: the certificate itself may be trusted
    return http.client.HTTPSConnection(target, timeout=_TIMEOUT_S, context=context)


# Parts of gRPC's messages about an HTTP/1 server, plain and over TLS.
_HTTP_SIGNS = ("http1.x server", "missing selected ALPN property")


def for_people(
    error: BatonClientError, target: str, begun: bool = False, grpc_port: GrpcPort = lambda target: None
) -> BatonClientError:
    """Return the error with advice, or as it is if the server explained it.

    `begun`: part of the answer has arrived. `grpc_port` finds the gRPC port for an HTTP port.
    """
    # Baton gives every UNAVAILABLE a reason: without one there is no server.
    if isinstance(error, Unavailable) and error.reason is None:
        return Unavailable(_unreachable(error.message, target, begun, grpc_port), error.details)
    if isinstance(error, NotAllowed):
        return NotAllowed(f"{error.message}; set {API_KEY_VARIABLE}", error.details)
    if error.code is grpc.StatusCode.UNIMPLEMENTED:
        text = f"{target} does not serve this; --target is the public port of a router, --admin its admin port"
        return ServerError(text, error.details, error.code)
    return error


@contextmanager
def admin_client(target: str) -> Iterator[AdminClient]:
    """Open a client without retries. Raises: CommandFailed with advice for any error but ModelNotFound."""
    try:
        with AdminClient(target, retry=RetryPolicy(attempts=1), api_key=admin_key(target)) as admin:
            yield admin
    except ModelNotFound:
        raise
    except BatonClientError as error:
        raise CommandFailed(for_people(error, f"{target} (admin port)").message) from error


def first_that_knows(request_id: str, admin_targets: Sequence[str], ask: Callable[[AdminClient], Answer]) -> Answer:
    """Ask one router after another. Raises: CommandFailed if none knows the request."""
    for target in admin_targets:
        with suppress(ModelNotFound), admin_client(target) as admin:
            return ask(admin)
    raise CommandFailed(
        f"no router at {', '.join(admin_targets)} knows {request_id}: it was served by another one, still runs, "
        "or is too old"
    )


def explained(
    events: Generator[Event, None, None], target: str, grpc_port: GrpcPort = lambda target: None
) -> Generator[Event, None, None]:
    """Yield the events, and raise their error with advice."""
    begun = False
    try:
        for event in events:
            begun = True
            yield event
    except BatonClientError as error:
        advised = for_people(error, target, begun, grpc_port)
        if advised is error:
            raise
        raise advised from error


def _unreachable(message: str, target: str, begun: bool, grpc_port: GrpcPort) -> str:
    if any(sign in message for sign in _HTTP_SIGNS):
        host, port = target.rpartition(":")[0], grpc_port(target)
        advice = f"--target {host}:{port}" if port else f"`baton up` prints the endpoint, by default {DEFAULT_TARGET}"
        return f"{target} is an HTTP port, and this command needs the gRPC port: {advice}"
    if "CERTIFICATE_VERIFY_FAILED" in message or "Hostname Verification Check failed" in message:
        return f"the certificate of {target} is not the one that {TLS_CA_VARIABLE} vouches for"
    if "WRONG_VERSION_NUMBER" in message:
        return f"{target} does not speak TLS; unset {TLS_CA_VARIABLE}"
    if begun:
        return f"lost the connection to {target}; is `baton up` running?"
    if "Socket closed" in message:
        return f"{target} closed the connection; if it speaks TLS, {TLS_CA_VARIABLE} must name its certificate"
    return f"no answer from {target}; is `baton up` running?"

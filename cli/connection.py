"""How commands reach a server: which port, how they authenticate, and what a failed call means for the user."""

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
    """From the environment. Raises: CommandFailed."""
    authority = os.environ.get(TLS_CA_VARIABLE)
    if authority and not Path(authority).is_file():
        raise CommandFailed(f"{TLS_CA_VARIABLE} is {authority}, which is no file")
    return Credentials(api_key=os.environ.get(API_KEY_VARIABLE) or None, tls=Path(authority) if authority else False)


def admin_key(target: str) -> str | None:
    """For the admin port at `target`: of the secret in this environment, or the user's API key. None where the client
    finds the token of a service that this user has started here, which changes as that restarts. Raises: CommandFailed.
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
    """To a public port with TLS, or, by the variables of router and workers, to one of theirs; None: no TLS.

    Raises: CommandFailed.
    """
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
    """`target`: host:port. None where no Baton answers there, or not to this caller."""
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


def fetch_text(target: str, path: str, credentials: Credentials) -> str:
    """What an HTTP port of a router answers to GET. Raises: CommandFailed."""
    headers = {"authorization": f"Bearer {credentials['api_key']}"} if credentials["api_key"] else {}
    try:
        connection = _connection(target, credentials)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        raise CommandFailed(f"no answer from http://{target}{path} ({type(error).__name__})") from error
    if answer.status in (401, 403):
        raise CommandFailed(f"http://{target}{path} needs a key of `baton keys new --admin`, in {API_KEY_VARIABLE}")
    if answer.status != 200:
        raise CommandFailed(f"http://{target}{path} answered {answer.status}")
    return text


def _connection(target: str, credentials: Credentials) -> http.client.HTTPConnection:
    """Raises: OSError where the certificates cannot be read."""
    authority = credentials["tls"]
    if authority is False:
        return http.client.HTTPConnection(target, timeout=_TIMEOUT_S)
    context = ssl.create_default_context(cafile=None if authority is True else authority)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: the certificate itself may be the one trusted
    return http.client.HTTPSConnection(target, timeout=_TIMEOUT_S, context=context)


# Parts of gRPC's messages about a server of another protocol, plain and over TLS.
_HTTP_SIGNS = ("http1.x server", "missing selected ALPN property")


def for_people(
    error: BatonClientError, target: str, begun: bool = False, grpc_port: GrpcPort = lambda target: None
) -> BatonClientError:
    """The same kind of error with advice. One that the server itself explained comes back as it is.

    `begun`: a part of the answer had come. `grpc_port` finds the gRPC port of a server whose HTTP port is `target`.
    """
    # Our server gives every UNAVAILABLE a reason: without one there is no server, or no longer one.
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
    """Calls that are made once. Raises: CommandFailed, with advice, for any error but ModelNotFound."""
    try:
        with AdminClient(target, retry=RetryPolicy(attempts=1), api_key=admin_key(target)) as admin:
            yield admin
    except ModelNotFound:
        raise
    except BatonClientError as error:
        raise CommandFailed(for_people(error, f"{target} (admin port)").message) from error


def first_that_knows(request_id: str, admin_targets: Sequence[str], ask: Callable[[AdminClient], Answer]) -> Answer:
    """Asks one router after another. Raises: CommandFailed where none knows the request."""
    for target in admin_targets:
        with suppress(ModelNotFound), admin_client(target) as admin:
            return ask(admin)
    raise CommandFailed(
        f"no router at {', '.join(admin_targets)} knows {request_id}: it was served by another one, has not ended yet, "
        "or is too long ago"
    )


def explained(
    events: Generator[Event, None, None], target: str, grpc_port: GrpcPort = lambda target: None
) -> Generator[Event, None, None]:
    """The same events, their error with advice."""
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

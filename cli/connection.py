"""Connections of commands: addresses, credentials, and advice for failed calls."""

import os
import socket
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
from baton.launch.paths import RUNTIME
from baton.launch.run_record import running_services
from baton.process.config import InternalTlsConfig, SecretConfig, read_config
from baton.process.security.tls import open_async_channel

API_KEY_VARIABLE = "BATON_API_KEY"
TLS_CA_VARIABLE = "BATON_TLS_CA"
Answer = TypeVar("Answer")
_CONNECT_S = 1.0


class Credentials(TypedDict):
    """Credentials, as keyword arguments of a client."""

    api_key: str | None
    tls: bool | Path


def credentials() -> Credentials:
    """Read the credentials from environment variables. Raises: CommandFailed."""
    authority = os.environ.get(TLS_CA_VARIABLE)
    if authority and not Path(authority).is_file():
        raise CommandFailed(f"{TLS_CA_VARIABLE}: {authority} is not a file")
    return Credentials(api_key=os.environ.get(API_KEY_VARIABLE) or None, tls=Path(authority) if authority else False)


def admin_key(target: str) -> str | None:
    """Return the key for an admin port: one derived from the cluster secret, else the user's API key, else None.

    For a service that this user started, the API key is not used: the client finds the service's admin token itself.
    Raises: ConfigError.
    """
    secret = read_config(SecretConfig, []).cluster_secret
    port = target.rpartition(":")[2]
    if secret is not None and port.isdecimal():
        return secret.admin_token(int(port))
    return None if local_admin_token(target) else os.environ.get(API_KEY_VARIABLE) or None


def channel_opener(authority: Path | None, internal: bool) -> Callable[[str], grpc.aio.Channel] | None:
    """Return a function that opens TLS channels to public or internal ports; None without TLS. Raises: ConfigError."""
    if internal:
        tls = read_config(InternalTlsConfig, []).internal_tls
        return lambda target: open_async_channel(target, (), tls)
    trusted = Security(tls=authority or False).credentials()
    return None if trusted is None else lambda target: grpc.aio.secure_channel(target, trusted)


# Texts in gRPC's errors if the server speaks only HTTP/1, without and with TLS.
_HTTP_SIGNS = ("http1.x server", "missing selected ALPN property")


def for_people(error: BatonClientError, target: str, begun: bool = False) -> BatonClientError:
    """Return the error with advice, or unchanged if the server gave a reason. `begun`: part of the answer arrived."""
    # Servers give every UNAVAILABLE a reason: without a reason, no server answered.
    if isinstance(error, Unavailable) and error.reason is None:
        return Unavailable(_unreachable(error.message, target, begun), error.details)
    if isinstance(error, NotAllowed):
        return NotAllowed(f"{error.message}; set {API_KEY_VARIABLE}", error.details)
    if error.code is grpc.StatusCode.UNIMPLEMENTED:
        text = f"{target} does not serve this; --target is the public port of a router, --admin its admin port"
        return ServerError(text, error.details, error.code)
    return error


def open_admin(target: str, timeout_s: float = 5.0) -> AdminClient:
    """Return a client for an admin port, which does not retry: of several, comma-separated ones, the first that accepts
    a connection. Raises: ConfigError.
    """
    target = next(filter(_is_open, target.split(",")), target) if "," in target else target
    return AdminClient(target, retry=RetryPolicy(attempts=1), timeout_s=timeout_s, api_key=admin_key(target))


def _is_open(target: str) -> bool:
    host, _, port = target.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


@contextmanager
def admin_client(target: str, timeout_s: float = 5.0) -> Iterator[AdminClient]:
    """Open a client for an admin port. Raises: ModelNotFound, ConfigError; else CommandFailed with advice."""
    try:
        with open_admin(target, timeout_s) as admin:
            yield admin
    except ModelNotFound:
        raise
    except BatonClientError as error:
        raise CommandFailed(for_people(error, f"{target} (admin port)").message) from error


def first_that_knows(request_id: str, admin_targets: Sequence[str], ask: Callable[[AdminClient], Answer]) -> Answer:
    """Return the answer of the first router that knows the request. Raises: CommandFailed if none does."""
    for target in admin_targets:
        with suppress(ModelNotFound), admin_client(target) as admin:
            return ask(admin)
    raise CommandFailed(
        f"no router at {', '.join(admin_targets)} knows {request_id}: it was served by another one, still runs, "
        "or is too old"
    )


def explained(events: Generator[Event, None, None], target: str) -> Generator[Event, None, None]:
    """Yield the events; an error of their stream is raised with advice."""
    begun = False
    try:
        for event in events:
            begun = True
            yield event
    except BatonClientError as error:
        advised = for_people(error, target, begun)
        if advised is error:
            raise
        raise advised from error


def _unreachable(message: str, target: str, begun: bool) -> str:
    if any(sign in message for sign in _HTTP_SIGNS):
        return f"{target} is an HTTP port, and this command needs the gRPC port: {_grpc_port_advice(target)}"
    if "CERTIFICATE_VERIFY_FAILED" in message or "Hostname Verification Check failed" in message:
        return f"the certificate of {target} is not signed by the CA in {TLS_CA_VARIABLE}"
    if "WRONG_VERSION_NUMBER" in message:
        return f"{target} does not speak TLS; unset {TLS_CA_VARIABLE}"
    if begun:
        return f"lost the connection to {target}; is `baton up` running?"
    if "Socket closed" in message:
        return f"{target} closed the connection; if it speaks TLS, {TLS_CA_VARIABLE} must name its certificate"
    return f"no answer from {target}; is `baton up` running?"


def _grpc_port_advice(target: str) -> str:
    """Return advice for a user who gave the HTTP address `target`: the gRPC address of this service, if it is local."""
    for record in running_services(RUNTIME):
        for grpc_target, http_target in zip(record.targets, record.http_targets, strict=True):
            if http_target == target:
                return f"--target {grpc_target}"
    return f"`baton up` prints the endpoint, by default {DEFAULT_TARGET}"

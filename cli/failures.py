"""The meaning of a failed call for the user, where the error is gRPC's own and not our server's. Pure."""

from collections.abc import Callable, Generator

import grpc

from cli.connection import API_KEY_VARIABLE, TLS_CA_VARIABLE
from cli.options import DEFAULT_TARGET
from client import BatonClientError, Event, NotAllowed, ServerError, Unavailable

GrpcPort = Callable[[str], int | None]

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
        said = for_people(error, target, begun, grpc_port)
        if said is error:
            raise
        raise said from error


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

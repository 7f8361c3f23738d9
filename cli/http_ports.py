"""On which ports the routers of one machine listen."""

import socket
from collections.abc import Callable, Set

from cli.errors import CommandFailed
from service.redis_server import free_port

DEFAULT_HTTP_PORT = 8000


class PortTaken(CommandFailed):
    """Another process listens on the address that was asked for."""


def choose_http_ports(
    asked: int | None, count: int, reserved: Set[int], is_free: Callable[[int], bool]
) -> tuple[int, ...]:
    """As many, one for each router.

    `asked`: that port and those after it, taken or not. 0: free ones. None: 8000 and those after it, each replaced by a
    free one if it is taken or `reserved`.
    """
    if asked == 0:
        return tuple(free_port() for _ in range(count))
    if asked is not None:
        return tuple(range(asked, asked + count))
    wanted = range(DEFAULT_HTTP_PORT, DEFAULT_HTTP_PORT + count)
    return tuple(port if port not in reserved and is_free(port) else free_port() for port in wanted)


def is_free(host: str, port: int) -> bool:
    """Whether a socket could be bound there now."""
    try:
        require_free(host, port)
    except PortTaken:
        return False
    return True


def require_free(host: str, port: int) -> None:
    """gRPC may share a port with another process in silence; we may not. Raises: PortTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise PortTaken(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error

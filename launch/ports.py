"""Ports of a service: choose them, check that they are free, and claim them for the run."""

import errno
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager

from baton.launch import CommandFailed
from baton.process.registry.redis_server import free_ports
from baton.process.serving.addresses import Address, ListenError, check_distinct, check_free

LOOPBACK = "127.0.0.1"
DEFAULT_HTTP_PORT = 8000


class PortTaken(CommandFailed):
    """Error: a port of the service is in use or given twice."""


def choose_http_ports(
    asked: int | None, count: int, reserved: Set[int], is_free: Callable[[int], bool]
) -> tuple[int, ...]:
    """Choose one HTTP port for each router.

    `asked`: the first of consecutive ports; 0: free ports; None: the ports from 8000 on, where a free port replaces
    each port that is in use or `reserved`.
    """
    if asked == 0:
        return free_ports(count, reserved)
    if asked is not None:
        return tuple(range(asked, asked + count))
    wanted = range(DEFAULT_HTTP_PORT, DEFAULT_HTTP_PORT + count)
    usable = [port for port in wanted if port not in reserved and is_free(port)]
    others = iter(free_ports(count - len(usable), reserved))
    return tuple(port if port in usable else next(others) for port in wanted)


def is_free(host: str, port: int) -> bool:
    """Return whether a socket can be bound to the port now."""
    try:
        check_free(Address("", host, port))
    except ListenError:
        return False
    return True


def check_ports(own: Sequence[Address], others: Iterable[Address]) -> None:
    """Check that addresses differ and are free. Raises: PortTaken.

    `own`: addresses on which routers will listen. `others`: addresses of servers to which routers will connect.
    """
    try:
        check_distinct(own, others)
        for address in own:
            check_free(address)
    except (ListenError, ValueError) as error:
        raise PortTaken(str(error)) from error


@contextmanager
def claimed(ports: Iterable[int]) -> Iterator[None]:
    """Claim ports during the block, so that no other run takes them before this run binds them. Raises: PortTaken.

    A claim is a unix socket in the abstract namespace, which disappears with its process.
    """
    with ExitStack() as claims:
        for port in ports:
            claim = claims.enter_context(socket.socket(socket.AF_UNIX))
            try:
                claim.bind(_claim_name(port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                pid = claimant_of(port)
                raise PortTaken(
                    f"another `baton up`{f' (pid {pid})' if pid else ''} uses port {port}; stop it, or choose another "
                    "--port, --admin-port or --http-port"
                ) from error
            claim.listen()
        yield


def _claim_name(port: int) -> str:
    return f"\0baton-up-{port}"


def claimant_of(port: int) -> int | None:
    """Return the pid of the `baton up` that claims a port, None if there is none."""
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.settimeout(1.0)
            asking.connect(_claim_name(port))
            pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return None
    return int(pid)

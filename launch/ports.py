"""The ports of a service on one machine: chosen, checked before anything starts, and claimed for the run."""

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
    """A port of the service is not to be had."""


def choose_http_ports(
    asked: int | None, count: int, reserved: Set[int], is_free: Callable[[int], bool]
) -> tuple[int, ...]:
    """Choose one HTTP port for each router.

    `asked`: that port and those after it, taken or not. 0: free ones. None: 8000 and those after it, each replaced by a
    free one if it is taken or `reserved`.
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
    """Return whether a socket could be bound there now."""
    try:
        check_free(Address("", host, port))
    except ListenError:
        return False
    return True


def check_ports(own: Sequence[Address], others: Iterable[Address]) -> None:
    """Check ports. `own`: where routers will listen. `others`: servers that they connect to. Raises: PortTaken."""
    try:
        check_distinct(own, others)
        for address in own:
            check_free(address)
    except (ListenError, ValueError) as error:
        raise PortTaken(str(error)) from error


@contextmanager
def claimed(ports: Iterable[int]) -> Iterator[None]:
    """Keep other runs from starting on these ports, also before our processes have bound them. Raises: PortTaken.

    A claim is a unix socket in the abstract namespace, which the kernel removes with its process.
    """
    with ExitStack() as claims:
        for port in ports:
            claim = claims.enter_context(socket.socket(socket.AF_UNIX))
            try:
                claim.bind(_claim_name(port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                holder = _named(claimant_of(port))
                raise PortTaken(
                    f"another `baton up`{holder} uses port {port}; stop it, or choose another --port, --admin-port or "
                    "--http-port"
                ) from error
            claim.listen()
        yield


def _claim_name(port: int) -> str:
    return f"\0baton-up-{port}"


def _named(pid: int | None) -> str:
    return "" if pid is None else f" (pid {pid})"


def claimant_of(port: int) -> int | None:
    """The process of the `baton up` that claims `port`."""
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.settimeout(1.0)
            asking.connect(_claim_name(port))
            pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return None
    return int(pid)

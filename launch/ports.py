"""Ports of a service: choose them, check that they are free, and claim them for the run."""

import errno
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from baton.launch import CommandFailed
from baton.process.registry.redis_server import free_port, free_ports
from baton.process.serving.addresses import Address, ListenError, check_distinct, check_free, reserve

LOOPBACK = "127.0.0.1"
DEFAULT_HTTP_PORT = 8000


class PortTaken(CommandFailed):
    """Error: a port of the service is in use or given twice."""


class RouterPorts(NamedTuple):
    """Ports of one router. `public`, `http`: the same for all routers of a service; `metrics`: a further HTTP port of
    this router, None if `http` is not shared.
    """

    public: int
    admin: int
    http: int
    metrics: int | None = None


def plan_ports(
    routers: int, public: int, admin: int | None, http: int | None, is_free: Callable[[int], bool]
) -> tuple[RouterPorts, ...]:
    """Choose the ports of each router: all share `public` and `http`, admin ports are consecutive from `admin` on, and
    the metrics ports of several routers follow `http`.

    0: free ports. `admin` None: the port after `public`. `http` None: 8000, or free ports if one of them is in use.
    """
    port = public or free_port()
    if admin == 0 or (admin is None and public == 0):
        admins: Sequence[int] = free_ports(routers, {port})
    else:
        first = port + 1 if admin is None else admin
        admins = range(first, first + routers)
    taken, count = {port, *admins}, 1 if routers == 1 else 1 + routers
    first = DEFAULT_HTTP_PORT if http is None else http
    https: Sequence[int] = range(first, first + count)
    if first == 0 or (http is None and not all(each not in taken and is_free(each) for each in https)):
        https = free_ports(count, taken)
    metrics = https[1:] or (None,)
    return tuple(RouterPorts(port, each, https[0], own) for each, own in zip(admins, metrics, strict=True))


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


@contextmanager
def reserved(addresses: Iterable[Address]) -> Iterator[None]:
    """Reserve addresses that routers share, so that during the block only processes of this user that share a port can
    listen on it. Raises: PortTaken.
    """
    with ExitStack() as opened:
        for address in addresses:
            try:
                reservations = reserve(address)
            except ListenError as error:
                raise PortTaken(str(error)) from error
            for each in reservations:
                opened.enter_context(each)
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

"""Listen addresses: collisions within a configuration, and reasons why an address cannot be bound."""

import errno
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import combinations
from pathlib import Path
from urllib.parse import urlsplit

_LISTENING = "0A"  # state LISTEN in /proc/net/tcp
_WILDCARDS = ("0.0.0.0", "::")
_REASONS = {
    errno.EACCES: "this user may not listen on a port that low; choose one above 1023",
    errno.EADDRNOTAVAIL: "no network interface of this machine has that address",
    errno.EAFNOSUPPORT: "IPv6 is turned off on this machine",
}


class ListenError(Exception):
    """Error: an address cannot be bound; the message names address, reason and remedy."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address that an option sets. Port 0 stands for any free port, which never collides."""

    name: str  # name of the option, for error messages
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.name} {host_and_port(self.host, self.port)}"


def host_and_port(host: str, port: int) -> str:
    """Return host:port in gRPC's form, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`; False for an unknown host name."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def address_of_url(name: str, url: str, default_port: int = 0) -> Address:
    """Return host and port of a URL or of `host:port`; empty and 0 if it has none."""
    parts = urlsplit(url if "://" in url else f"//{url}")
    try:
        return Address(name, parts.hostname or "", parts.port or default_port)
    except ValueError:  # invalid port
        return Address(name, "", 0)


def check_distinct(own: Sequence[Address], others: Iterable[Address] = ()) -> None:
    """Check that no two addresses of `own`, the process's listen addresses, collide, and none with `others`.

    Raises: ValueError, which names the first pair that collides.
    """
    pairs = [*combinations(own, 2), *((mine, other) for mine in own for other in others)]
    for first, second in pairs:
        if first.port and first.port == second.port and _hosts_overlap(first.host, second.host):
            raise ValueError(f"{first} and {second} are the same port; choose another")


def _hosts_overlap(listening: str, other: str) -> bool:
    if listening == other or other in _WILDCARDS:
        return True
    return is_loopback(other) and (listening in _WILDCARDS or is_loopback(listening))


def check_free(address: Address, shared: bool = False) -> None:
    """Bind `address` for a moment, since gRPC reports no reason for a failure. Raises: ListenError.

    `shared`: processes of this user that share the port may listen on it.
    """
    for bound in _bound(address, shared):
        bound.close()


def reserve(address: Address) -> list[socket.socket]:
    """Bind `address`, which must be free, without listening. Until the sockets are closed, only processes of this user
    that share the port (SO_REUSEPORT) can listen on it. Raises: ListenError.
    """
    reserved = _bound(address)
    for each in reserved:
        # In this order, since a socket that shares the port could be bound next to a server that shares it, too.
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return reserved


def refusal(address: Address, error: OSError) -> ListenError:
    """Convert an error of the kernel into a message with reason and remedy."""
    if error.errno == errno.EADDRINUSE:
        holder = listener_on(address.port)
        reason = f"the port is in use{f' by {holder}' if holder else ''}; choose another"
    else:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return ListenError(f"cannot listen on {address}: {reason}")


def _resolve(address: Address) -> list[tuple[int, str]]:
    """Return family and IP address of each address of the host. Raises: ListenError."""
    host = address.host
    if "/" in host or host.startswith("unix:"):
        raise ListenError(f"cannot listen on {address}: unix sockets are not supported; give a host")
    if host.startswith("["):
        raise ListenError(f"cannot listen on {address}: write an IPv6 address without brackets")
    if not 0 <= address.port <= 65535:
        raise ListenError(f"cannot listen on {address}: the port must be from 0 to 65535")
    try:
        found = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ListenError(f"cannot listen on {address}: no host of that name is known") from error
    return [(family, str(place[0])) for family, _, _, _, place in found]


def _bound(address: Address, shared: bool = False) -> list[socket.socket]:
    """Return a bound socket for each address of the host that this machine has. Raises: ListenError."""
    errors = list[OSError]()
    with ExitStack() as opened:
        bound = list[socket.socket]()
        for family, host in _resolve(address):
            try:
                each = opened.enter_context(socket.socket(family))
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
                each.bind((host, address.port))
                bound.append(each)
            except OSError as error:
                errors.append(error)
        in_use = [error for error in errors if error.errno == errno.EADDRINUSE]
        if in_use or not bound:
            raise refusal(address, (in_use or errors)[0])
        opened.pop_all()
    return bound


def listener_on(port: int, proc: Path = Path("/proc")) -> str:
    """Return the process that listens on `port`, such as `pid 123 (redis-server)`; empty if unknown."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(proc / "net" / table, port)}
    for process in proc.glob("[0-9]*") if inodes else ():
        try:
            if any(str(link.readlink()) in inodes for link in (process / "fd").iterdir()):
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:
            continue  # another user's process, or one that has ended
    return ""


def _listening(table: Path, port: int) -> list[str]:
    """Return the inodes of the sockets that listen on `port`."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port]

"""Which of our processes has the other end of a TCP connection on loopback.

The kernel is asked for that very socket (sock_diag over netlink), since reading all of /proc/net/tcp takes 10 ms: too
long for a proxy that everybody connects to again at once.
"""

import os
import socket
import struct
from collections.abc import Mapping

HOST = "127.0.0.1"  # that connections on loopback come from
SOCK_DIAG_BY_FAMILY, NETLINK_SOCK_DIAG = 20, 4
ALL_STATES = NO_COOKIE = 0xFFFFFFFF
INODE_AT = 16 + 68  # of an answer: behind netlink's header, struct inet_diag_msg up to idiag_inode
TIMEOUT_S = 0.2


class Owners:
    """Remembers the sockets of processes, as far as it has seen them."""

    def __init__(self) -> None:
        self._seen: dict[int, set[str]] = {}  # by pid

    def find(self, client_port: int, server: tuple[str, int], pids: Mapping[str, int]) -> str | None:
        """Name of the process that connected from `client_port` to `server`; None where it is none of these."""
        inode = _inode(client_port, server)
        if inode is None:
            return None
        wanted = f"socket:[{inode}]"
        for name, pid in pids.items():
            if wanted in self._seen.get(pid, ()):
                return name
        self._seen = {pid: _open_files(pid) for pid in pids.values()}
        return next((name for name, pid in pids.items() if wanted in self._seen[pid]), None)


def listens(server: tuple[str, int]) -> bool:
    """Whether some process accepts connections there. The kernel looks for a listener where no connection matches."""
    return _ask(server, ("0.0.0.0", 0)) is not None


def _inode(client_port: int, server: tuple[str, int]) -> int | None:
    """Of the connecting side's socket."""
    return _ask((HOST, client_port), server)


def _ask(own: tuple[str, int], other: tuple[str, int]) -> int | None:
    """The inode of the socket with these ends; None where there is none."""
    ends = struct.pack("!HH", own[1], other[1]) + _address(own[0]) + _address(other[0])
    asked = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, ALL_STATES)
    asked += ends + struct.pack("=III", 0, NO_COOKIE, NO_COOKIE)
    header = struct.pack("=IHHII", 16 + len(asked), SOCK_DIAG_BY_FAMILY, 1, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(TIMEOUT_S)
            kernel.send(header + asked)
            answer = kernel.recv(4096)
    except OSError:
        return None
    if struct.unpack_from("=H", answer, 4)[0] != SOCK_DIAG_BY_FAMILY:
        return None  # there is no such connection any more
    return int(struct.unpack_from("=I", answer, INODE_AT)[0])


def _address(host: str) -> bytes:
    return socket.inet_aton(host).ljust(16, b"\0")


def _open_files(pid: int) -> set[str]:
    folder, found = f"/proc/{pid}/fd", set()
    try:
        names = os.listdir(folder)  # noqa: PTH208 -- hundreds
    except OSError:
        return set()
    for name in names:
        try:
            found.add(os.readlink(f"{folder}/{name}"))  # noqa: PTH115
        except OSError:
            continue  # closed meanwhile
    return found

"""TCP proxy in front of one process, which can hold, delay and cut connections by source.

A link is a pair of connecting process and this process; each has a rule and counters, the evidence of a fault. The
proxy listens only while the process does, so that the kernel refuses connections to a dead process as without a proxy.
"""

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

HOST = "127.0.0.1"  # source address of loopback connections
SOCK_DIAG_BY_FAMILY, NETLINK_SOCK_DIAG = 20, 4
ALL_STATES = NO_COOKIE = 0xFFFFFFFF
INODE_AT = 16 + 68  # offset of idiag_inode in struct inet_diag_msg, after the netlink header
TIMEOUT_S = 0.2


class Owners:
    """Lookup of the process at the other end of a loopback connection, with a cache of sockets by pid.

    Uses sock_diag over netlink: reading /proc/net/tcp takes 10 ms, too long when all processes reconnect together.
    """

    def __init__(self) -> None:
        self._seen: dict[int, set[str]] = {}  # by pid

    def find(self, client_port: int, server: tuple[str, int], pids: Mapping[str, int]) -> str | None:
        """Return the name of the process that connected from `client_port` to `server`; None if it is unknown."""
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
    """Return whether a process listens at `server`."""
    return _ask(server, ("0.0.0.0", 0)) is not None


def _inode(client_port: int, server: tuple[str, int]) -> int | None:
    """Return the inode of the connecting side's socket."""
    return _ask((HOST, client_port), server)


def _ask(own: tuple[str, int], other: tuple[str, int]) -> int | None:
    """Return the inode of the socket with these ends; None if there is none."""
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
        return None  # the connection has closed
    return int(struct.unpack_from("=I", answer, INODE_AT)[0])


def _address(host: str) -> bytes:
    return socket.inet_aton(host).ljust(16, b"\0")


def _open_files(pid: int) -> set[str]:
    folder, found = f"/proc/{pid}/fd", set()
    try:
        names = os.listdir(folder)  # noqa: PTH208 -- faster for hundreds of files
    except OSError:
        return set()
    for name in names:
        try:
            found.add(os.readlink(f"{folder}/{name}"))  # noqa: PTH115
        except OSError:
            continue  # closed since listdir
    return found


CHUNK_BYTES = 1 << 16
CONNECT_S = 2.0
FOLLOW_S = 0.02  # poll period of the process's listening socket


class LinkWay(Enum):
    THERE = "there"  # from the connecting process
    BACK = "back"


@dataclass(slots=True)
class Rule:
    """Rule for the bytes of a link. Held bytes are delivered later, as if TCP retransmitted them."""

    held: frozenset[LinkWay] = frozenset()
    delay_s: float = 0.0
    refuses: bool = False  # close new connections


@dataclass(slots=True)
class LinkCounters:
    connections: int = 0  # open connections
    cut: int = 0
    refused: int = 0
    held: int = 0  # chunks, like the next three
    delayed: int = 0
    there: int = 0
    back: int = 0
    moved_s: float = float("-inf")  # time of the last received chunk, monotonic

    def passed(self, way: LinkWay) -> int:
        return self.there if way is LinkWay.THERE else self.back


@dataclass(slots=True)
class _Link:
    rule: Rule = field(default_factory=Rule)
    counts: LinkCounters = field(default_factory=LinkCounters)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)


class Proxy:
    """Proxy from `listen` to the process at `target`. `who`: name of the process that connects from a port."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int], who: Callable[[int], str | None]) -> None:
        self._listen = listen
        self._target = target
        self._who = who
        self._links: dict[str, _Link] = defaultdict(_Link)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start listening. Raises: OSError."""
        await self._follow()
        self._following = asyncio.create_task(self._keep_following())

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_following(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            with contextlib.suppress(OSError):  # the address is not free yet; retried in FOLLOW_S
                await self._follow()

    async def _follow(self) -> None:
        """Open or close the proxy's listening socket so that it follows the process's."""
        is_there = listens(self._target)
        if is_there and self._server is None:
            self._server = await asyncio.start_server(self._accept, *self._listen)
        elif not is_there and self._server is not None:
            self._server.close()
            self._server = None

    def counts(self, source: str) -> LinkCounters:
        """Return live counters of the link from `source`."""
        return self._links[source].counts

    def set_rule(self, source: str, rule: Rule) -> None:
        link = self._links[source]
        link.rule = rule
        link.changed.set()
        link.changed = asyncio.Event()

    def cut(self, source: str) -> int:
        """Abort every connection of the link; return their number."""
        link = self._links[source]
        ends = list(link.writers)
        for writer in ends:
            writer.transport.abort()
        link.counts.cut += link.counts.connections
        return link.counts.connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        link = self._links[self._who(writer.get_extra_info("peername")[1]) or "others"]
        if link.rule.refuses:
            link.counts.refused += 1
            writer.transport.abort()
            return
        try:
            async with asyncio.timeout(CONNECT_S):
                inner_reader, inner_writer = await asyncio.open_connection(*self._target)
        except (OSError, TimeoutError):
            writer.transport.abort()  # the process does not listen any more
            return
        link.writers |= {writer, inner_writer}
        link.counts.connections += 1
        try:
            there = asyncio.create_task(_pump(link, LinkWay.THERE, reader, inner_writer))
            back = asyncio.create_task(_pump(link, LinkWay.BACK, inner_reader, writer))
            try:
                await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            finally:
                there.cancel()
                back.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
        finally:
            link.counts.connections -= 1
            link.writers -= {writer, inner_writer}
            writer.transport.abort()
            inner_writer.transport.abort()


async def _pump(link: _Link, way: LinkWay, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes until the reader ends, then half-close the writer."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            link.counts.moved_s = time.monotonic()
            if link.rule.delay_s:
                link.counts.delayed += 1
                await asyncio.sleep(link.rule.delay_s)
            if way in link.rule.held:
                link.counts.held += 1
                while way in link.rule.held:
                    await link.changed.wait()
            writer.write(data)
            if way is LinkWay.THERE:
                link.counts.there += 1
            else:
                link.counts.back += 1
            await writer.drain()
        await asyncio.sleep(0)
        if writer.can_write_eof():
            writer.write_eof()
        await asyncio.sleep(0.05)  # time for written bytes to leave before both sides are closed

"""TCP proxy in front of one process, which can hold, delay and cut the connections of a chosen connecting process.

A link is a pair of a connecting process and the process behind the proxy. Each link has a rule, and counters as
evidence of faults. The proxy listens only while its process does, so that connections to a dead process are refused.
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
INODE_AT = 16 + 68  # bytes of the netlink header, and offset of idiag_inode in struct inet_diag_msg
TIMEOUT_S = 0.2


class Owners:
    """Finds the process at the other end of a loopback connection. Caches the sockets of each process.

    Uses sock_diag over netlink, because reading /proc/net/tcp takes 10 ms: too long if all processes reconnect at once.
    """

    def __init__(self) -> None:
        self._seen: dict[int, set[str]] = {}  # open files of each process, by pid

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
    """Return the inode of the socket that the connecting process uses; None if there is none."""
    return _ask((HOST, client_port), server)


def _ask(own: tuple[str, int], other: tuple[str, int]) -> int | None:
    """Return the inode of the socket whose two addresses are `own` and `other`; None if there is none."""
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
        return None  # the connection has been closed
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
            continue  # the file was closed after listdir
    return found


CHUNK_BYTES = 1 << 16
CONNECT_S = 2.0
FOLLOW_S = 0.02  # interval at which the proxy checks whether its process listens


class LinkWay(Enum):
    THERE = "there"  # from the connecting process to the one behind the proxy
    BACK = "back"


@dataclass(slots=True)
class Rule:
    """Rule for the bytes of a link. `held`: directions in which bytes are kept back until the rule ends."""

    held: frozenset[LinkWay] = frozenset()
    delay_s: float = 0.0
    refuses: bool = False  # whether new connections are closed


@dataclass(slots=True)
class LinkCounters:
    connections: int = 0  # number of open connections
    cut: int = 0
    refused: int = 0
    held: int = 0  # number of chunks, as are `delayed`, `there` and `back`
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
    """Proxy from address `listen` to the process at address `target`.

    `who`: returns the name of the process that connects from a port; None if it is unknown.
    """

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
            with contextlib.suppress(OSError):  # the address is not free yet: try again after FOLLOW_S
                await self._follow()

    async def _follow(self) -> None:
        """Open or close the proxy's listening socket if the process has opened or closed its own."""
        is_there = listens(self._target)
        if is_there and self._server is None:
            self._server = await asyncio.start_server(self._accept, *self._listen)
        elif not is_there and self._server is not None:
            self._server.close()
            self._server = None

    def counts(self, source: str) -> LinkCounters:
        """Return the counters of the link from `source`, which keep counting."""
        return self._links[source].counts

    def set_rule(self, source: str, rule: Rule) -> None:
        link = self._links[source]
        link.rule = rule
        link.changed.set()
        link.changed = asyncio.Event()

    def cut(self, source: str) -> int:
        """Abort all connections of the link from `source`; return their number."""
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
        await asyncio.sleep(0.05)  # lets written bytes leave before both sides are closed

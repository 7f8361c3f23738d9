"""A TCP proxy before one process: what passes, how late, and in which direction can be changed while it runs.

Rules are per link, which is (who connects, this process). Everything that a rule does is counted, so that a fault can
prove that it happened. The proxy listens while the process does: whoever connects to a dead one is refused by the
kernel, as it would be without a proxy.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from chaos.connections import listens

CHUNK_BYTES = 1 << 16
CONNECT_S = 2.0
FOLLOW_S = 0.02  # between two looks whether the process listens


class Way(Enum):
    THERE = "there"  # from who connected
    BACK = "back"


@dataclass(slots=True)
class Rule:
    """What happens to the bytes of a link. Held bytes are kept and go on later, as a network would have them resent."""

    held: frozenset[Way] = frozenset()
    delay_s: float = 0.0
    refuses: bool = False  # new connections are closed at once


@dataclass(slots=True)
class Counts:
    connections: int = 0  # open now
    cut: int = 0
    refused: int = 0
    held: int = 0  # pieces that met a closed way
    delayed: int = 0
    there: int = 0  # pieces that went on
    back: int = 0
    moved_s: float = float("-inf")  # when something last came from either side, monotonic

    def passed(self, way: Way) -> int:
        return self.there if way is Way.THERE else self.back


@dataclass(slots=True)
class _Link:
    rule: Rule = field(default_factory=Rule)
    counts: Counts = field(default_factory=Counts)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)


class Proxy:
    """Listens on `listen` for the process at `target`. `who` names the process that connects from a port."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int], who: Callable[[int], str | None]) -> None:
        self._listen = listen
        self._target = target
        self._who = who
        self._links: dict[str, _Link] = defaultdict(_Link)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises: OSError."""
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
            with contextlib.suppress(OSError):  # the address is still being given back: soon again
                await self._follow()

    async def _follow(self) -> None:
        """Listens where the process does, and only then."""
        is_there = listens(self._target)
        if is_there and self._server is None:
            self._server = await asyncio.start_server(self._accept, *self._listen)
        elif not is_there and self._server is not None:
            self._server.close()
            self._server = None

    def counts(self, source: str) -> Counts:
        """Of the link from `source`, living."""
        return self._links[source].counts

    def set_rule(self, source: str, rule: Rule) -> None:
        link = self._links[source]
        link.rule = rule
        link.changed.set()
        link.changed = asyncio.Event()

    def cut(self, source: str) -> int:
        """Breaks every connection of the link; how many."""
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
            writer.transport.abort()  # as the process itself would: nobody listens
            return
        link.writers |= {writer, inner_writer}
        link.counts.connections += 1
        try:
            there = asyncio.create_task(_pump(link, Way.THERE, reader, inner_writer))
            back = asyncio.create_task(_pump(link, Way.BACK, inner_reader, writer))
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


async def _pump(link: _Link, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one side has ended; what was read before is still passed on."""
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
            if way is Way.THERE:
                link.counts.there += 1
            else:
                link.counts.back += 1
            await writer.drain()
        await asyncio.sleep(0)
        if writer.can_write_eof():
            writer.write_eof()
        await asyncio.sleep(0.05)  # lets what was written leave before both sides are closed

"""Worker's side of all links: one numbered, resumable link per router. Independent of protobuf and gRPC.

A link outlives its connection for a grace period, so that a router that reconnects loses nothing. Sending never blocks:
messages go to the connection's outbox and stay in the channel until acknowledged.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.process.links.channel import LinkChannel, LinkOverflow

logger = logging.getLogger(__name__)
DELIVERY_POLL_S = 0.005
MAX_WAITING = 1024  # queued messages of a connection beyond which lossy ones are dropped
REPEAT_S = 0.5  # time before an unchanged report is sent again, unless the router asks for another


class LinkMessage(Protocol):
    """Fields of an outgoing message that the hub sets."""

    number: int
    acknowledged: int


Message = TypeVar("Message", bound=LinkMessage)


class Outbox(Generic[Message]):
    """Queue of the messages that one connection must send. It keeps only the newest report (`put_latest`)."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._latest: Message | None = None
        self._changed = asyncio.Event()
        self._finishing = False
        self.closed = False

    @property
    def waiting(self) -> int:
        """Return the number of queued messages, without the latest report."""
        return len(self._messages)

    def put(self, message: Message) -> None:
        self._messages.append(message)
        self._changed.set()

    def put_latest(self, message: Message) -> None:
        self._latest = message
        self._changed.set()

    def finish(self) -> None:
        """Close the connection after all queued messages are sent."""
        self._finishing = True
        self._changed.set()

    def close(self) -> None:
        """Close the connection immediately; queued messages are not sent."""
        self.closed = True
        self._changed.set()

    async def drain(self) -> AsyncIterator[Message]:
        """Yield messages in order, and the latest report between them, until closed or finished."""
        while not self.closed:
            if self._messages:
                yield self._messages.popleft()
            if self._latest is not None and not self.closed:
                latest, self._latest = self._latest, None
                yield latest
            if self._messages or self._latest is not None or self.closed:
                continue
            if self._finishing:
                return
            self._changed.clear()
            await self._changed.wait()


@dataclass(eq=False)
class RouterLink(Generic[Message]):
    """Link with one router. Messages of `send` are numbered and survive a reconnect; messages of `send_lossy` do not,
    but keep their order. `send_latest` is for reports: each replaces a previous one that is still queued, and one with
    the content of the last is sent only every `repeat_s`, since reading reports is most of what an idle worker costs.
    """

    router_id: bytes
    channel: LinkChannel[Message]
    outbox: Outbox[Message] | None = None
    expiry: asyncio.TimerHandle | None = None
    ended: bool = False
    reported: bytes = b""  # content of the last report of this connection
    repeats_at_s: float = 0.0  # time from which that content is sent again, on the event loop's clock
    repeat_s: float = REPEAT_S

    def __hash__(self) -> int:
        """Hash by the router's id, so that the order of sets of links does not depend on memory addresses."""
        return int.from_bytes(self.router_id[:8], "little")

    def send(self, message: Message) -> None:
        """Send a numbered message. Raises: LinkOverflow if too many sent messages are unacknowledged."""
        if self.ended:
            return
        message.number = self.channel.number(message)
        if self.outbox is not None:
            message.acknowledged = self.channel.last_received
            self.outbox.put(message)

    def send_lossy(self, message: Message) -> None:
        """Send a message that may be lost: without a connection, or if too many messages are queued. The router must
        detect the loss.
        """
        if self.outbox is not None and self.outbox.waiting < MAX_WAITING:
            message.acknowledged = self.channel.last_received
            self.outbox.put(message)

    def send_latest(self, message: Message, content: bytes = b"") -> None:
        """Send a report. `content`: what makes it differ from another one, without its time; empty: it differs."""
        now_s = asyncio.get_running_loop().time()
        if self.outbox is None or (content and content == self.reported and now_s < self.repeats_at_s):
            return
        self.reported, self.repeats_at_s = content, now_s + self.repeat_s
        message.acknowledged = self.channel.last_received
        self.outbox.put_latest(message)

    def repeat_every(self, repeat_s: float) -> None:
        """Send an unchanged report again every `repeat_s`, the first time within `repeat_s` from now."""
        self.repeat_s = repeat_s
        self.repeats_at_s = min(self.repeats_at_s, asyncio.get_running_loop().time() + repeat_s)


class LinkHub(Generic[Message]):
    """Links of one worker with all routers.

    `on_end` is called once for a closed link (grace period over, router restarted, overflow, or worker stopping), whose
    requests must be aborted.
    """

    def __init__(self, grace_s: float, max_unacknowledged: int, on_end: Callable[[RouterLink[Message]], None]) -> None:
        self._grace_s = grace_s
        self._max_unacknowledged = max_unacknowledged
        self._on_end = on_end
        self._links: dict[bytes, RouterLink[Message]] = {}
        self._connections: dict[Outbox[Message], None] = {}  # outboxes of open connections, oldest first
        self._disconnected = asyncio.Event()
        self.closed = False

    @property
    def links(self) -> tuple[RouterLink[Message], ...]:
        return tuple(self._links.values())

    def connect(self, router_id: bytes, resumes: bool) -> tuple[RouterLink[Message], bool]:
        """Connect a router; return its link, and whether the link continues an earlier one."""
        old = self._links.get(router_id)
        link = old if resumes else None
        resumed = link is not None
        if link is None:
            link = self._links[router_id] = RouterLink(router_id, LinkChannel(self._max_unacknowledged))
            if old is not None:
                self.end(old, "the router opened a new one")
        if link.expiry is not None:
            link.expiry.cancel()
            link.expiry = None
        if link.outbox is not None:
            link.outbox.close()
        link.outbox, link.reported, link.repeat_s = Outbox(), b"", REPEAT_S
        self._connections[link.outbox] = None
        return link, resumed

    def disconnect(self, link: RouterLink[Message], outbox: Outbox[Message]) -> None:
        """Record the end of a connection. If no newer connection has replaced it, the link waits for one, for the grace
        period at most.
        """
        outbox.close()
        self._connections.pop(outbox, None)
        self._disconnected.set()
        if link.outbox is not outbox:
            return
        link.outbox = None
        if not link.ended:
            loop = asyncio.get_running_loop()
            link.expiry = loop.call_later(self._grace_s, self.end, link, "the router did not reconnect in time")

    def send(self, link: RouterLink[Message], message: Message) -> None:
        """Send a numbered message; a link with too many unacknowledged messages is closed."""
        try:
            link.send(message)
        except LinkOverflow:
            self.end(link, "too many messages are unacknowledged")

    def end(self, link: RouterLink[Message], why: str) -> None:
        if link.ended:
            return
        link.ended = True
        logger.info("link with router %s closed: %s", link.router_id.hex()[:8], why)
        if link.expiry is not None:
            link.expiry.cancel()
        if link.outbox is not None:
            link.outbox.close()
        if self._links.get(link.router_id) is link:
            del self._links[link.router_id]
        self._on_end(link)

    @property
    def _owes_routers_that_are_here(self) -> bool:
        return any(each.outbox is not None and each.channel.unacknowledged_count for each in self.links)

    async def delivered(self, timeout_s: float) -> None:
        """Wait until the connected routers have acknowledged all messages, for `timeout_s` at most.

        Call it before the connections close: a router that is sending at that moment may never read the last messages.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._owes_routers_that_are_here:  # noqa: ASYNC110 -- channels have no event
                    await asyncio.sleep(DELIVERY_POLL_S)
        except TimeoutError:
            logger.warning("a router did not acknowledge its last messages within %g s", timeout_s)

    async def close(self, timeout_s: float) -> None:
        """Close all links when the worker stops, after sending queued messages for `timeout_s` at most."""
        self.closed = True
        for outbox in self._connections:
            outbox.finish()
        try:
            async with asyncio.timeout(timeout_s):
                while self._connections:
                    self._disconnected.clear()
                    await self._disconnected.wait()
        except TimeoutError:
            logger.warning("%d links did not send their last messages within %g s", len(self._connections), timeout_s)
        for link in self.links:
            self.end(link, "the worker is stopping")

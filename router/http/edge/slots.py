"""Limit of HTTP connections: counts connections with a request, and closes idle ones in favour of new ones."""

import logging
import time
from collections import Counter
from typing import Protocol

from baton.process.open_files import connections_within

logger = logging.getLogger(__name__)

RESERVE = 16
"""Connections beyond the limit, which wait for a request or ask for the router's health."""
_LOG_EVERY_S = 10.0
_REASONS = ("refused", "closed_idle", "no_descriptors")


class Waiter(Protocol):
    """A connection; it waits for a request where it has none."""

    def give_way(self) -> None:
        """End at once, unasked."""


class ConnectionSlots:
    """Connections by their state: each is waiting or busy."""

    def __init__(self, most: int) -> None:
        """`most`: connections that may have a request at once."""
        self.most = most
        self.counts = Counter(dict.fromkeys(_REASONS, 0))
        """Connections that were refused or ended for want of room, by reason."""
        self._busy = set[Waiter]()
        self._waiting: dict[Waiter, None] = {}  # the longest first
        self._logged_at_s = 0.0
        self._logged = Counter[str]()

    def fit_open_files(self) -> None:
        """Lower the limit to what the limit of open files has descriptors for."""
        fitting = max(1, connections_within(self.most + RESERVE) - RESERVE)
        if fitting < self.most:
            logger.warning(
                "the limit of open files (ulimit -n) has room for %d HTTP connections, --http-max-connections is %d",
                *(fitting, self.most),
            )
            self.most = fitting

    @property
    def is_full(self) -> bool:
        return len(self._busy) >= self.most

    def is_busy(self, connection: Waiter) -> bool:
        return connection in self._busy

    def wait(self, connection: Waiter) -> None:
        """Record that the connection has no request from now on."""
        self._busy.discard(connection)
        self._waiting.setdefault(connection)

    def begin(self, connection: Waiter) -> None:
        """Record that the connection has a request."""
        self._waiting.pop(connection, None)
        self._busy.add(connection)

    def leave(self, connection: Waiter) -> None:
        self._waiting.pop(connection, None)
        self._busy.discard(connection)

    def make(self) -> None:
        """Make room for a new connection: where there is none, the one that has waited longest ends."""
        if len(self._waiting) + len(self._busy) >= self.most + RESERVE:
            self.shrink("closed_idle")

    def shrink(self, reason: str) -> None:
        """End the connection that has waited longest, if any."""
        self.count(reason)
        if self._waiting:
            oldest = next(iter(self._waiting))
            self.leave(oldest)
            oldest.give_way()

    def count(self, reason: str) -> None:
        """Count a connection without room, and log the counts every 10 s at most."""
        self.counts[reason] += 1
        now = time.monotonic()
        if now - self._logged_at_s >= _LOG_EVERY_S or not self._logged:
            since = ", ".join(f"{each} {number}" for each, number in (self.counts - self._logged).items())
            logger.warning("no room for HTTP connections: %s; limit %d (--http-max-connections)", since, self.most)
            self._logged_at_s, self._logged = now, self.counts.copy()

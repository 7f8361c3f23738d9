"""Limit on HTTP connections. It counts connections with a request, and closes idle ones in favour of new ones."""

import logging
import time
from collections import Counter
from typing import Protocol

from baton.process.open_files import connections_within

logger = logging.getLogger(__name__)

RESERVE = 16
"""Number of connections allowed beyond the limit, for idle connections and health probes."""
_LOG_EVERY_S = 10.0
_REASONS = ("refused", "closed_idle", "no_descriptors")


class Waiter(Protocol):
    """Interface of a connection, which is waiting for a request or busy with one."""

    def give_way(self) -> None:
        """Close the idle connection immediately, in favour of a new one."""


class ConnectionSlots:
    """Open HTTP connections by state: waiting for a request, or busy with one."""

    def __init__(self, most: int) -> None:
        """Begin without connections. `most`: maximum number of busy connections."""
        self.most = most
        self.counts = Counter(dict.fromkeys(_REASONS, 0))
        """Number of connections rejected or closed at the limit, by reason."""
        self._busy = set[Waiter]()
        self._waiting: dict[Waiter, None] = {}  # connections that are waiting, longest wait first
        self._logged_at_s = 0.0
        self._logged = Counter[str]()

    def fit_open_files(self) -> None:
        """Lower the limit if the process may not open enough file descriptors for it."""
        fitting = max(1, connections_within(self.most + RESERVE) - RESERVE)
        if fitting < self.most:
            logger.warning(
                "open files (ulimit -n) allow %d HTTP connections, fewer than --http-max-connections %d; limit lowered",
                *(fitting, self.most),
            )
            self.most = fitting

    @property
    def is_full(self) -> bool:
        return len(self._busy) >= self.most

    def is_busy(self, connection: Waiter) -> bool:
        return connection in self._busy

    def wait(self, connection: Waiter) -> None:
        """Record that the connection is waiting for a request."""
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
        """Make room for a new connection: at the limit, close the connection that has waited longest."""
        if len(self._waiting) + len(self._busy) >= self.most + RESERVE:
            self.shrink("closed_idle")

    def shrink(self, reason: str) -> None:
        """Close the connection that has waited longest, if one is waiting. `reason`: one of `counts`."""
        self.count(reason)
        if self._waiting:
            oldest = next(iter(self._waiting))
            self.leave(oldest)
            oldest.give_way()

    def count(self, reason: str) -> None:
        """Count a connection that was rejected or closed for `reason`, and log the counts at most every 10 s."""
        self.counts[reason] += 1
        now = time.monotonic()
        if now - self._logged_at_s >= _LOG_EVERY_S or not self._logged:
            since = ", ".join(f"{each} {number}" for each, number in (self.counts - self._logged).items())
            logger.warning(
                "HTTP connections at the limit of %d (--http-max-connections); since the last report: %s",
                *(self.most, since),
            )
            self._logged_at_s, self._logged = now, self.counts.copy()

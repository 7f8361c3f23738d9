"""A worker's prefix cache, as routers receive it: numbered changes over every session, and all of it on demand.

It follows the journal of the pool: a moment behind it, and exact for the changes that it has numbered.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.engine.kv_cache.block_pool import CacheChanges
from baton.process.sessions.hub import RouterSession, SessionHub
from baton.protos import cache_pb2, report_pb2, session_pb2

MESSAGE_HASHES = 2048
"""Maximum hashes of a message: 64 KiB, so that no token waits long behind one."""


@dataclass(frozen=True, slots=True)
class NumberedChanges:
    """Message with the changes after the message of the previous number."""

    sequence: int
    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Part of all hashes after the changes of `sequence`; `part` counts from 0."""

    sequence: int
    part: int
    parts: int
    hashes: tuple[bytes, ...]


class CacheLog:
    """Log of one epoch. `digest` is the exclusive or of the first 8 bytes, little-endian, of all hashes."""

    def __init__(self, message_hashes: int = MESSAGE_HASHES) -> None:
        self._message_hashes = message_hashes
        self._hashes: set[bytes] = set()
        self.sequence = 0  # of the last message
        self.digest = 0

    @property
    def blocks(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_hash: object) -> bool:
        """Return whether the hash is cached. Any thread."""
        return block_hash in self._hashes

    def record(self, changes: CacheChanges) -> list[NumberedChanges]:
        """The messages that report these changes: one, unless they are many."""
        self._toggle(block_hash for block_hash in changes.evicted if block_hash in self._hashes)
        self._hashes.difference_update(changes.evicted)
        self._toggle(block_hash for block_hash in changes.stored if block_hash not in self._hashes)
        self._hashes.update(changes.stored)
        return list(self._messages(changes))

    def snapshot(self) -> list[SnapshotPart]:
        """Return the snapshot in at least one part, even an empty one."""
        hashes = tuple(self._hashes)
        pieces = list(_pieces(hashes, self._message_hashes)) or [()]
        return [SnapshotPart(self.sequence, part, len(pieces), piece) for part, piece in enumerate(pieces)]

    def _messages(self, changes: CacheChanges) -> Iterator[NumberedChanges]:
        """Evictions first: a router never counts more blocks than the pool has."""
        evicted, stored, size = changes.evicted, changes.stored, self._message_hashes
        while evicted or stored:
            room = size - len(evicted[:size])
            self.sequence += 1
            yield NumberedChanges(self.sequence, stored[:room], evicted[:size])
            evicted, stored = evicted[size:], stored[room:]

    def _toggle(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            self.digest ^= int.from_bytes(block_hash[:8], "little")


def _pieces(hashes: tuple[bytes, ...], size: int) -> Iterator[tuple[bytes, ...]]:
    for begin in range(0, len(hashes), size):
        yield hashes[begin : begin + size]


class CacheEventPublisher:
    """Sends the changes of the cache to routers, in one epoch of a worker. Lives on the event loop."""

    def __init__(self, hub: SessionHub[session_pb2.ConnectResponse], epoch: int) -> None:
        self._hub = hub
        self._epoch = epoch
        self._log = CacheLog()

    def on_changes(self, changes: CacheChanges) -> None:
        """A step's changes of the cache. To be called before the step's tokens are sent."""
        for each in self._log.record(changes):
            events = cache_pb2.CacheEvents(
                sequence=each.sequence, stored=b"".join(each.stored), evicted=b"".join(each.evicted)
            )
            for session in self._hub.sessions:  # a message each: it takes the session's own acknowledgement
                session.send_lossy(session_pb2.ConnectResponse(epoch=self._epoch, cache_events=events))

    def knows(self, block_hash: bytes) -> bool:
        """Return whether the block was in the cache a moment ago. Any thread."""
        return block_hash in self._log

    def send_snapshot(self, session: RouterSession[session_pb2.ConnectResponse]) -> None:
        """Send the complete snapshot in parts to one router that requested it."""
        for part in self._log.snapshot():
            snapshot = cache_pb2.CacheSnapshot(
                sequence=part.sequence, part=part.part, parts=part.parts, hashes=b"".join(part.hashes)
            )
            session.send_lossy(session_pb2.ConnectResponse(epoch=self._epoch, cache_snapshot=snapshot))

    @property
    def sum(self) -> report_pb2.CacheSum:
        log = self._log
        return report_pb2.CacheSum(sequence=log.sequence, digest=log.digest, blocks=log.blocks)

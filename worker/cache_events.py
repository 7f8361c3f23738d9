"""Reports of a worker's prefix cache to routers: all routers receive numbered changes, and on request a snapshot.

`CacheLog` follows the journal of the KV pool. It lags slightly, but is exact up to its last numbered change.
"""

from collections.abc import Iterable, Iterator

from baton.engine.kv_cache.block_pool import CacheChanges
from baton.process.links.hub import LinkHub, RouterLink
from baton.protos import cache_pb2, report_pb2, session_pb2

MESSAGE_HASHES = 2048
"""Maximum number of hashes per message: 64 KiB, so that no token waits long behind one."""


class CacheLog:
    """Log of a prefix cache's changes in one epoch. `digest`: XOR of the first 8 bytes, little-endian, of all cached
    hashes.
    """

    def __init__(self, message_hashes: int = MESSAGE_HASHES) -> None:
        self._message_hashes = message_hashes
        self._hashes: set[bytes] = set()
        self.sequence = 0  # number of the last message
        self.digest = 0

    @property
    def blocks(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_hash: object) -> bool:
        """Return whether the hash is cached. Any thread may call it."""
        return block_hash in self._hashes

    def record(self, changes: CacheChanges) -> list[cache_pb2.CacheEvents]:
        """Apply changes and return the messages that report them: usually one, several for many changes."""
        self._toggle(block_hash for block_hash in changes.evicted if block_hash in self._hashes)
        self._hashes.difference_update(changes.evicted)
        self._toggle(block_hash for block_hash in changes.stored if block_hash not in self._hashes)
        self._hashes.update(changes.stored)
        return list(self._messages(changes))

    def snapshot(self) -> list[cache_pb2.CacheSnapshot]:
        """Return messages with all cached hashes: at least one message, even without hashes."""
        hashes, size = list(self._hashes), self._message_hashes
        pieces = [b"".join(hashes[first : first + size]) for first in range(0, len(hashes), size)] or [b""]
        return [
            cache_pb2.CacheSnapshot(sequence=self.sequence, part=part, parts=len(pieces), hashes=piece)
            for part, piece in enumerate(pieces)
        ]

    def _messages(self, changes: CacheChanges) -> Iterator[cache_pb2.CacheEvents]:
        """Yield the messages of `changes`, evictions first, so that a router never counts more blocks than the pool
        has.
        """
        evicted, stored, size = changes.evicted, changes.stored, self._message_hashes
        while evicted or stored:
            room = size - len(evicted[:size])
            self.sequence += 1
            yield cache_pb2.CacheEvents(
                sequence=self.sequence, stored=b"".join(stored[:room]), evicted=b"".join(evicted[:size])
            )
            evicted, stored = evicted[size:], stored[room:]

    def _toggle(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            self.digest ^= int.from_bytes(block_hash[:8], "little")


class CacheEventPublisher:
    """Sender of the cache's changes to routers, in one epoch of a worker. Lives on the event loop."""

    def __init__(self, hub: LinkHub[session_pb2.ConnectResponse], epoch: int) -> None:
        self._hub = hub
        self._epoch = epoch
        self._log = CacheLog()

    def on_changes(self, changes: CacheChanges) -> None:
        """Send the cache changes of a step. Call it before the tokens of that step are sent."""
        for events in self._log.record(changes):
            for link in self._hub.links:  # one message object per link: each carries its link's acknowledgement
                link.send_lossy(session_pb2.ConnectResponse(epoch=self._epoch, cache_events=events))

    def knows(self, block_hash: bytes) -> bool:
        """Return whether the block was in the cache after the last reported change. Any thread may call it."""
        return block_hash in self._log

    def send_snapshot(self, link: RouterLink[session_pb2.ConnectResponse]) -> None:
        """Send the complete snapshot in parts to the router that requested it."""
        for part in self._log.snapshot():
            link.send_lossy(session_pb2.ConnectResponse(epoch=self._epoch, cache_snapshot=part))

    @property
    def sum(self) -> report_pb2.CacheSum:
        log = self._log
        return report_pb2.CacheSum(sequence=log.sequence, digest=log.digest, blocks=log.blocks)

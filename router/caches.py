"""A router's view of all workers' prefix caches: followed, expected, or assumed; and how right it was. Pure state.

Workers are named by endpoint. Where a method returns true, the worker is to be asked for a snapshot now.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router.cache_audit import CacheAudit
from router.cache_view import CacheChanges, CacheSnapshotPart, CacheSum, CacheView, Wrong
from router.prefix_index import Hits, PrefixIndex


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """For people."""

    follows: bool
    exact: bool
    blocks: int
    sequence: int
    resyncs: int
    checked_requests: int
    equal_requests: int
    missing_tokens: int
    surplus_tokens: int
    drift: float


@dataclass(slots=True)
class _Cache:
    view: CacheView
    audit: CacheAudit


class Caches:
    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._caches: dict[str, _Cache] = {}

    @property
    def indexed_blocks(self) -> int:
        """Different blocks, on any worker."""
        return len(self._index)

    def connected(self, worker: str) -> None:
        """It is to be asked for a snapshot. If it was connected before, it is the same process, or was forgotten."""
        cache = self._caches.get(worker)
        if cache is None:
            cache = self._caches[worker] = _Cache(CacheView(worker, self._index), CacheAudit())
        cache.view.connected()

    def disconnected(self, worker: str) -> None:
        cache = self._caches.get(worker)
        if cache is not None:
            cache.view.disconnected()

    def forget(self, worker: str) -> None:
        """Its process is gone."""
        self._caches.pop(worker, None)
        self._index.forget(worker)

    def take_changes(self, worker: str, changes: CacheChanges, now: float) -> bool:
        cache = self._caches.get(worker)
        return cache is not None and cache.view.take_changes(changes, now)

    def take_snapshot(self, worker: str, part: CacheSnapshotPart, now: float) -> None:
        cache = self._caches.get(worker)
        if cache is not None:
            cache.view.take_snapshot(part, now)

    def check(self, worker: str, told: CacheSum | None, now: float) -> bool:
        """With the sum of a report."""
        cache = self._caches.get(worker)
        if cache is None:
            return False
        if cache.view.follows and cache.audit.wants_resync(now):
            return cache.view.resync(Wrong.DRIFT, now)
        return cache.view.check(told, now)

    def wrong(self, worker: str) -> Wrong | None:
        """Why its view was given up the last time."""
        cache = self._caches.get(worker)
        return None if cache is None else cache.view.wrong

    def follows(self, worker: str) -> bool:
        """Whether it reports its cache; otherwise `assume` the blocks of prompts that were sent there."""
        cache = self._caches.get(worker)
        return cache is not None and cache.view.follows

    def assume(self, worker: str, block_hashes: Sequence[bytes], capacity_blocks: int) -> None:
        cache = self._caches.get(worker)
        if cache is not None:
            cache.view.assume(block_hashes, capacity_blocks)

    def expect(self, worker: str, attempt_id: int, block_hashes: Sequence[bytes]) -> None:
        """The attempt's prompt is to be computed there."""
        self._index.expect(worker, attempt_id, block_hashes)

    def expect_elsewhere(self, worker: str, block_hashes: Sequence[bytes]) -> None:
        """Another router's prompt is."""
        self._index.expect_elsewhere(worker, block_hashes)

    def settle(self, worker: str, attempt_id: int) -> Sequence[bytes]:
        """The attempt has been computed there, or will not be. Returns the expected blocks that were not reported."""
        return self._index.settle(worker, attempt_id)

    def hits(self, block_hashes: Sequence[bytes]) -> Hits:
        return self._index.hits(block_hashes)

    def audit(self, worker: str, predicted_tokens: int, actual_tokens: int) -> None:
        """A prompt was looked up there, and this much of it was found."""
        cache = self._caches.get(worker)
        if cache is not None:
            cache.audit.take(predicted_tokens, actual_tokens)

    def status(self, worker: str) -> CacheStatus | None:
        cache = self._caches.get(worker)
        if cache is None:
            return None
        view, audit = cache.view, cache.audit
        return CacheStatus(
            follows=view.follows,
            exact=view.exact,
            blocks=self._index.blocks(worker),
            sequence=view.sequence,
            resyncs=view.resyncs,
            checked_requests=audit.checked_requests,
            equal_requests=audit.equal_requests,
            missing_tokens=audit.missing_tokens,
            surplus_tokens=audit.surplus_tokens,
            drift=audit.drift,
        )

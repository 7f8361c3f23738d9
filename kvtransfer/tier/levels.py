"""Several stores that are read as one: each block comes from the fastest store that has it."""

from collections.abc import Sequence
from typing import NamedTuple

from baton.kvtransfer.tier.records import SegmentFormat
from baton.kvtransfer.tier.staging import Staging
from baton.kvtransfer.tier.store import TierStore


class _Run(NamedTuple):
    """Range [begin, end) of a list of names. The blocks of all names in the range are read from `store`."""

    store: TierStore
    begin: int
    end: int


class TierLevels:
    """Several stores of one format, fastest first, that are read as one store. Any thread may call it.

    Each store has its own writer.
    """

    def __init__(self, stores: Sequence[TierStore]) -> None:
        self._stores = tuple(stores)

    @property
    def format(self) -> SegmentFormat:
        return self._stores[0].format

    def known(self, names: Sequence[bytes]) -> int:
        """Return the number of leading `names` that can be found."""
        found = 0
        while found < len(names):
            blocks = max(store.known(names[found:]) for store in self._stores)
            if not blocks:
                break
            found += blocks
        return found

    def announce(self, names: Sequence[bytes]) -> None:
        """Hint to the system that these blocks will be loaded soon. Never fails."""
        for run in self._runs(names):
            run.store.announce(names[run.begin : run.end])

    def load(self, names: Sequence[bytes], staging: Staging) -> int:
        """Load blocks as `TierStore.load` does. Raises: OSError."""
        loaded = 0
        for run in self._runs(names[: staging.slots]):
            loaded += run.store.load(names[run.begin : run.end], staging, run.begin)
            if loaded < run.end:  # a segment was removed after `_runs` had found its blocks
                break
        return loaded

    def try_reading(self) -> None:
        """Test reading in every store, see `TierStore.try_reading`. Raises: OSError."""
        for store in self._stores:
            store.try_reading()

    def verify(self, names: Sequence[bytes], staging: Staging) -> int:
        """Verify blocks as `TierStore.verify` does, and remove a damaged block from every store."""
        right = self._stores[0].verify(names, staging)
        if right < len(names):
            for store in self._stores[1:]:
                store.forget(names[right])
        return right

    def _runs(self, names: Sequence[bytes]) -> list[_Run]:
        """Return runs of names up to the first name that no store has.

        A run ends before a name that a faster store has.
        """
        runs, begin = list[_Run](), 0
        while begin < len(names):
            blocks = [store.known(names[begin:]) for store in self._stores]
            level = next((level for level, known in enumerate(blocks) if known), None)
            if level is None:
                break
            end = begin + blocks[level]
            faster = self._stores[:level]
            later = (place for place in range(begin + 1, end) if any(each.known(names[place:][:1]) for each in faster))
            end = next(later, end)
            runs.append(_Run(self._stores[level], begin, end))
            begin = end
        return runs

"""Transfers as their source sees them: which blocks are pinned, for how long, and whether a reader may use them.

Pure: time comes in as `now` (monotonic seconds), nothing is sent or freed here.

              announce             open                 close, drop, expired
    (unknown) --------> [waiting] ------> [being read] ---------------------> [tombstone] --> (unknown)
                            ^                  |
                            +--[lease runs] <--+ reader_lost

An id that is opened before it is announced is parked. Every id is used once: until its tombstone is forgotten, all
calls for it are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from baton.kvtransfer.checksum import BlockChecksum
from baton.kvtransfer.transport import UnknownTransfer

Owner = TypeVar("Owner")  # to be released when a transfer has ended; never looked at
FirstToken = TypeVar("FirstToken")  # handed through to the reader, never looked at


class OpenVerdict(Enum):
    OPENED = auto()  # the reader may follow its snapshots; end with `close` or `reader_lost`
    PARKED = auto()  # not announced yet: wait at most `park_s`; end likewise
    REFUSED = auto()  # ended already, or another reader has it


@dataclass(frozen=True, slots=True)
class CloseVerdict(Generic[Owner]):
    valid: bool  # pinned from the first read until now, and complete
    owner: Owner | None  # to be released by the caller now; None: nothing was pinned


@dataclass(frozen=True, slots=True)
class SourceState(Generic[FirstToken]):
    announced: bool
    blocks: tuple[int, ...]  # physical block of each logical block that is complete
    first_tokens: tuple[FirstToken, ...] | None  # None until finished
    finished_at: float | None  # monotonic seconds; None until finished
    dropped: bool  # no transfer, or no longer one; its other fields are meaningless then
    checksums: tuple[BlockChecksum, ...] = ()  # of some of `blocks`, in their order

    @property
    def watermark_blocks(self) -> int:
        return len(self.blocks)

    @property
    def finished(self) -> bool:
        return self.first_tokens is not None


@dataclass(frozen=True, slots=True)
class SourceCounters:
    expired: int  # pins whose lease ended
    stale: int  # readers that had copied everything and were refused its use


class _Reader(Enum):
    NEVER = auto()
    READING = auto()
    LOST = auto()


@dataclass(slots=True, eq=False)
class _Transfer(Generic[Owner, FirstToken]):
    owner: Owner | None  # None: parked
    reader: _Reader
    ends_at: float | None = None  # None: no lease is running
    blocks: list[int] = field(default_factory=list)
    checksums: list[BlockChecksum] = field(default_factory=list)
    first_tokens: tuple[FirstToken, ...] | None = None
    finished_at: float | None = None


class SourceTable(Generic[Owner, FirstToken]):
    """Transfers of one source. A deadline that has passed takes effect at the next `expired`."""

    def __init__(self, lease_s: float, park_s: float, tombstone_s: float) -> None:
        self._lease_s = lease_s  # how long blocks wait for a reader that never came, or went
        self._park_s = park_s  # how long a reader waits for the announcement
        self._tombstone_s = tombstone_s  # how long a used id is remembered
        self._transfers: dict[bytes, _Transfer[Owner, FirstToken]] = {}
        self._tombstones: dict[bytes, float] = {}  # id -> when it may be forgotten
        self._expired = 0
        self._stale = 0

    def __len__(self) -> int:
        """Transfers that have not ended, parked ones included."""
        return len(self._transfers)

    @property
    def counters(self) -> SourceCounters:
        return SourceCounters(self._expired, self._stale)

    def announce(self, transfer_id: bytes, owner: Owner, now: float) -> bool:
        """A prompt will be computed. False: the id was used before, or its reader has given up; do not compute it.

        No lease runs before the first blocks are there: a prompt that waits its turn pins nothing.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer_id in self._tombstones or (transfer is not None and transfer.owner is not None):
            return False
        if transfer is None:
            self._transfers[transfer_id] = _Transfer(owner, _Reader.NEVER)
            return True
        transfer.owner = owner
        transfer.ends_at = None if transfer.reader is _Reader.READING else now + self._lease_s
        return True

    def advance(
        self, transfer_id: bytes, blocks: Sequence[int], now: float, checksums: Sequence[BlockChecksum] = ()
    ) -> None:
        """The next logical blocks are complete and pinned. Raises UnknownTransfer, also when it has ended.

        `checksums`: of some of them, counted from the first of these.
        """
        transfer = self._computing(transfer_id)
        first = len(transfer.blocks)
        transfer.checksums.extend(BlockChecksum(first + place, value) for place, value in checksums)
        transfer.blocks.extend(blocks)
        self._renew_unread(transfer, now)

    def finish(self, transfer_id: bytes, first_tokens: Sequence[FirstToken], now: float) -> None:
        """Record that no more blocks will come. Raises: UnknownTransfer, also for one that has ended."""
        transfer = self._computing(transfer_id)
        transfer.first_tokens = tuple(first_tokens)
        transfer.finished_at = now
        self._renew_unread(transfer, now)

    def open(self, transfer_id: bytes, now: float) -> OpenVerdict:
        """A reader has come, or come back within its lease. While it reads no lease runs."""
        transfer = self._transfers.get(transfer_id)
        if transfer_id in self._tombstones or (transfer is not None and transfer.reader is _Reader.READING):
            return OpenVerdict.REFUSED
        if transfer is None:
            self._transfers[transfer_id] = _Transfer(None, _Reader.READING, ends_at=now + self._park_s)
            return OpenVerdict.PARKED
        transfer.reader = _Reader.READING
        if transfer.owner is None:
            return OpenVerdict.PARKED
        transfer.ends_at = None
        return OpenVerdict.OPENED

    def reader_lost(self, transfer_id: bytes, now: float) -> None:
        """The stream of a reader that had been let in is over. Its lease begins, unless the transfer has ended."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.reader is not _Reader.READING:
            return
        transfer.reader = _Reader.LOST
        if transfer.owner is not None:
            transfer.ends_at = now + self._lease_s

    def close(self, transfer_id: bytes, complete: bool, now: float) -> CloseVerdict[Owner]:
        """The reader is done (`complete`: it has copied everything) or gives up. Ends the transfer, even before it is
        announced."""
        transfer = self._end(transfer_id, now)
        valid = complete and transfer is not None and transfer.first_tokens is not None
        if complete and not valid:
            self._stale += 1
        return CloseVerdict(valid, None if transfer is None else transfer.owner)

    def confirm(self, transfer_id: bytes) -> CloseVerdict[Owner]:
        """The reader reads on. `valid`: nothing that was readable has been taken back so far."""
        transfer = self._transfers.get(transfer_id)
        owner = None if transfer is None else transfer.owner
        return CloseVerdict(owner is not None, owner)

    def drop(self, transfer_id: bytes, now: float) -> None:
        """The source takes its blocks back (cancelled, failed, memory is short). Further reads of them are stale."""
        self._end(transfer_id, now)

    def expired(self, now: float) -> list[Owner]:
        """Ends transfers that have waited too long; returns the owners to be released. Call a few times per lease."""
        overdue = [
            transfer_id
            for transfer_id, transfer in self._transfers.items()
            if transfer.ends_at is not None and transfer.ends_at <= now
        ]
        ended = [self._end(transfer_id, now) for transfer_id in overdue]
        released = [transfer.owner for transfer in ended if transfer and transfer.owner is not None]
        self._expired += len(released)
        for transfer_id in [identity for identity, until in self._tombstones.items() if until <= now]:
            del self._tombstones[transfer_id]
        return released

    def snapshot(self, transfer_id: bytes) -> SourceState[FirstToken]:
        """Return the progress of a transfer; one that has ended reads as dropped."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return SourceState(announced=False, blocks=(), first_tokens=None, finished_at=None, dropped=True)
        return SourceState(
            transfer.owner is not None,
            tuple(transfer.blocks),
            transfer.first_tokens,
            transfer.finished_at,
            dropped=False,
            checksums=tuple(transfer.checksums),
        )

    def _computing(self, transfer_id: bytes) -> _Transfer[Owner, FirstToken]:
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.owner is None:
            raise UnknownTransfer(transfer_id)
        if transfer.first_tokens is not None:
            raise ValueError("a transfer that is finished cannot advance or finish")
        return transfer

    def _renew_unread(self, transfer: _Transfer[Owner, FirstToken], now: float) -> None:
        """Blocks still being computed are in use anyway: the lease of an unopened transfer runs from its newest one."""
        if transfer.reader is _Reader.NEVER:
            transfer.ends_at = now + self._lease_s

    def _end(self, transfer_id: bytes, now: float) -> _Transfer[Owner, FirstToken] | None:
        self._tombstones[transfer_id] = now + self._tombstone_s
        return self._transfers.pop(transfer_id, None)

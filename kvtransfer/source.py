"""State of KV transfers at their source: which blocks are pinned, for how long, and whether a reader may use them.

Pure: callers pass the time as `now` (monotonic seconds), and send messages and release blocks themselves.

              announce             open                 close, drop, expired
    (unknown) --------> [waiting] ------> [being read] ---------------------> [tombstone] --> (unknown)
                            ^                  |
                            +--[lease runs] <--+ reader_lost

If a reader opens a transfer before it is announced, the transfer is parked. A transfer id is used only once: while an
ended transfer has a tombstone, all calls with its id are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from baton.kvtransfer.checksum import BlockChecksum
from baton.kvtransfer.transport import UnknownTransfer

Owner = TypeVar("Owner")  # opaque; the caller releases it when the transfer has ended
FirstToken = TypeVar("FirstToken")  # opaque; passed on to the reader


class OpenVerdict(Enum):
    OPENED = auto()  # reading may begin; the caller must end it with `close` or `reader_lost`
    PARKED = auto()  # not announced yet: the reader waits at most `park_s`; the caller must end this as for OPENED
    REFUSED = auto()  # the transfer has ended, or another reader has it


@dataclass(frozen=True, slots=True)
class CloseVerdict(Generic[Owner]):
    valid: bool  # whether all blocks were complete, and pinned from the first read until now
    owner: Owner | None  # owner to release now; None: nothing was pinned


@dataclass(frozen=True, slots=True)
class SourceState(Generic[FirstToken]):
    announced: bool
    blocks: tuple[int, ...]  # physical block of each complete logical block
    first_tokens: tuple[FirstToken, ...] | None  # None until finished
    finished_at: float | None  # monotonic seconds; None until finished
    dropped: bool  # whether the transfer has ended or is unknown; if so, ignore all other fields
    checksums: tuple[BlockChecksum, ...] = ()  # checksums of some of `blocks`, in their order

    @property
    def watermark_blocks(self) -> int:
        return len(self.blocks)

    @property
    def finished(self) -> bool:
        return self.first_tokens is not None


@dataclass(frozen=True, slots=True)
class SourceCounters:
    expired: int  # transfers whose blocks were released because the lease expired
    stale: int  # complete reads whose blocks must not be used


class _Reader(Enum):
    NEVER = auto()
    READING = auto()
    LOST = auto()


@dataclass(slots=True, eq=False)
class _Transfer(Generic[Owner, FirstToken]):
    owner: Owner | None  # None: the transfer is parked
    reader: _Reader
    ends_at: float | None = None  # end of the lease, monotonic seconds; None: no lease is running
    blocks: list[int] = field(default_factory=list)
    checksums: list[BlockChecksum] = field(default_factory=list)
    first_tokens: tuple[FirstToken, ...] | None = None
    finished_at: float | None = None


class SourceTable(Generic[Owner, FirstToken]):
    """Transfers of one source. Deadlines take effect only when `expired` is called."""

    def __init__(self, lease_s: float, park_s: float, tombstone_s: float) -> None:
        self._lease_s = lease_s  # time for which blocks without a reader are pinned
        self._park_s = park_s  # longest wait of a reader for the announcement
        self._tombstone_s = tombstone_s  # time for which the id of an ended transfer is remembered
        self._transfers: dict[bytes, _Transfer[Owner, FirstToken]] = {}
        self._tombstones: dict[bytes, float] = {}  # time at which each ended transfer is forgotten
        self._expired = 0
        self._stale = 0

    def __len__(self) -> int:
        """Number of transfers that have not ended, including parked ones."""
        return len(self._transfers)

    @property
    def counters(self) -> SourceCounters:
        return SourceCounters(self._expired, self._stale)

    def announce(self, transfer_id: bytes, owner: Owner, now: float) -> bool:
        """Announce that a prompt will be computed. Return False if the id was used before or the reader has given up.

        The lease begins with the first computed blocks, since a queued prompt pins no blocks.
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
        """Add complete, pinned blocks. Raises: UnknownTransfer, also if the transfer has ended.

        `checksums`: checksums of some of these blocks, where `logical` is an index in `blocks`.
        """
        transfer = self._computing(transfer_id)
        first = len(transfer.blocks)
        transfer.checksums.extend(BlockChecksum(first + place, value) for place, value in checksums)
        transfer.blocks.extend(blocks)
        self._renew_unread(transfer, now)

    def finish(self, transfer_id: bytes, first_tokens: Sequence[FirstToken], now: float) -> None:
        """Record that no more blocks will come. Raises: UnknownTransfer, also if the transfer has ended."""
        transfer = self._computing(transfer_id)
        transfer.first_tokens = tuple(first_tokens)
        transfer.finished_at = now
        self._renew_unread(transfer, now)

    def open(self, transfer_id: bytes, now: float) -> OpenVerdict:
        """Record that a new or reconnected reader reads from now on. The lease does not run while a reader reads."""
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
        """Record that the reader's connection has ended. The lease begins, unless the transfer has ended."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.reader is not _Reader.READING:
            return
        transfer.reader = _Reader.LOST
        if transfer.owner is not None:
            transfer.ends_at = now + self._lease_s

    def close(self, transfer_id: bytes, complete: bool, now: float) -> CloseVerdict[Owner]:
        """End a transfer at its reader's request, which may come before the announcement.

        `complete`: whether the reader has copied all blocks.
        """
        transfer = self._end(transfer_id, now)
        valid = complete and transfer is not None and transfer.first_tokens is not None
        if complete and not valid:
            self._stale += 1
        return CloseVerdict(valid, None if transfer is None else transfer.owner)

    def confirm(self, transfer_id: bytes) -> CloseVerdict[Owner]:
        """Return the verdict for a reader that continues to read: `valid` if no readable block has been released."""
        transfer = self._transfers.get(transfer_id)
        owner = None if transfer is None else transfer.owner
        return CloseVerdict(owner is not None, owner)

    def drop(self, transfer_id: bytes, now: float) -> None:
        """End the transfer because its request failed or was cancelled, or memory is short. Later reads are stale."""
        self._end(transfer_id, now)

    def expired(self, now: float) -> list[Owner]:
        """End transfers whose lease or wait is over; return the owners to release. Call this a few times per lease."""
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
        """Return the state of a transfer. If it has ended, the state is `dropped`."""
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
            raise ValueError("the transfer is finished: call neither advance() nor finish() again")
        return transfer

    def _renew_unread(self, transfer: _Transfer[Owner, FirstToken], now: float) -> None:
        """Restart the lease of a transfer that no reader has opened: the lease counts from the last computed block."""
        if transfer.reader is _Reader.NEVER:
            transfer.ends_at = now + self._lease_s

    def _end(self, transfer_id: bytes, now: float) -> _Transfer[Owner, FirstToken] | None:
        self._tombstones[transfer_id] = now + self._tombstone_s
        return self._transfers.pop(transfer_id, None)

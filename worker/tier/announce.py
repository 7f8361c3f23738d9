"""A worker's own files, as routers receive them: numbered changes over every session, and all of it on demand.

A segment only grows, until it is removed as a whole. So it is enough to remember how many records of each segment
routers know of; their names are in the index of the files.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baton.process.sessions.hub import RouterSession, SessionHub
from baton.protos import cache_pb2, session_pb2

NAME_BYTES = 8  # of each name: all that an index of files keeps
MESSAGE_NAMES = 8192
"""Maximum names of a message: 64 KiB, so that no token waits long behind one."""
MESSAGES_AT_ONCE = 8
"""Maximum messages of changes per report: files that are found at start are announced over a while."""


class OwnFiles(Protocol):
    """See `TierStore`. On any thread."""

    def own_slots(self) -> Mapping[int, int]: ...
    def own_names(self, number: int, first: int, count: int) -> bytes: ...


class Piece(NamedTuple):
    """Records side by side in a segment of that number; NAME_BYTES of each name."""

    segment: int
    first_slot: int
    names: bytes


@dataclass(frozen=True, slots=True)
class FilesChange:
    """Message with the changes after the message of the previous number."""

    sequence: int
    stored: tuple[Piece, ...]
    removed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FilesPart:
    """Part of all that was announced up to `sequence`; `part` counts from 0."""

    sequence: int
    part: int
    parts: int
    stored: tuple[Piece, ...]


class FilesLog:
    """Log of one epoch. Pure except for the index that it is given."""

    def __init__(self, message_names: int = MESSAGE_NAMES) -> None:
        self._message_names = message_names
        self._announced: dict[int, int] = {}  # records by segment
        self.sequence = 0  # of the last message

    def changes(self, files: OwnFiles, most: int = MESSAGES_AT_ONCE) -> Iterator[FilesChange]:
        """Yield at most that many messages; the rest is for the next call. Each that was taken counts as announced."""
        present = files.own_slots()
        removed = tuple(number for number in self._announced if number not in present)
        for number in removed:
            del self._announced[number]
        news = ((number, self._announced.get(number, 0), slots) for number, slots in sorted(present.items()))
        for _, pieces in zip(range(most), self._messages(files, news, self._tell), strict=False):
            self.sequence += 1
            yield FilesChange(self.sequence, pieces, removed)
            removed = ()
        if removed:
            self.sequence += 1
            yield FilesChange(self.sequence, (), removed)

    def snapshot(self, files: OwnFiles) -> list[FilesPart]:
        """Return the snapshot in at least one part, even an empty one. A segment that is gone is left out."""
        announced = ((number, 0, slots) for number, slots in self._announced.items())
        parts = list(self._messages(files, announced, lambda piece: None)) or [()]
        return [FilesPart(self.sequence, part, len(parts), pieces) for part, pieces in enumerate(parts)]

    def _tell(self, piece: Piece) -> None:
        self._announced[piece.segment] = piece.first_slot + len(piece.names) // NAME_BYTES

    def _messages(
        self, files: OwnFiles, ranges: "Iterator[tuple[int, int, int]]", on_piece: Callable[[Piece], None]
    ) -> Iterator[tuple[Piece, ...]]:
        """Pieces of all records at [first, last) of these segments, as many at a time as a message takes."""
        pieces: list[Piece] = []
        room = self._message_names
        for number, first, last in ranges:
            while first < last and (names := files.own_names(number, first, min(room, last - first))):
                pieces.append(Piece(number, first, names))
                on_piece(pieces[-1])
                first += len(names) // NAME_BYTES
                room -= len(names) // NAME_BYTES
                if not room:
                    yield tuple(pieces)
                    pieces, room = [], self._message_names
        if pieces:
            yield tuple(pieces)


class TierPublisher:
    """Sends the changes of a worker's own files to routers, in one epoch of the worker. Lives on the event loop."""

    def __init__(self, hub: SessionHub[session_pb2.ConnectResponse], epoch: int) -> None:
        self._hub = hub
        self._epoch = epoch
        self._log = FilesLog()

    @property
    def sequence(self) -> int:
        return self._log.sequence

    def tell(self, files: OwnFiles) -> None:
        """Announce changes since the last time, a part of them if there are many. Call it before each report."""
        for change in self._log.changes(files):
            events = cache_pb2.TierEvents(
                sequence=change.sequence, stored=_pieces(change.stored), removed_segments=change.removed
            )
            for session in self._hub.sessions:  # a message each: it takes the session's own acknowledgement
                session.send_lossy(session_pb2.ConnectResponse(epoch=self._epoch, tier_events=events))

    def send_snapshot(self, session: RouterSession[session_pb2.ConnectResponse], files: OwnFiles) -> None:
        """Send everything that was announced, in parts, to one router that requested it."""
        for part in self._log.snapshot(files):
            snapshot = cache_pb2.TierSnapshot(
                sequence=part.sequence, part=part.part, parts=part.parts, stored=_pieces(part.stored)
            )
            session.send_lossy(session_pb2.ConnectResponse(epoch=self._epoch, tier_snapshot=snapshot))


def _pieces(pieces: tuple[Piece, ...]) -> list[cache_pb2.TierPiece]:
    return [cache_pb2.TierPiece(segment=each.segment, first_slot=each.first_slot, names=each.names) for each in pieces]

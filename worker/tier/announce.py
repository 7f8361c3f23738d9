"""Reports of a worker's own KV files to routers: all routers receive numbered changes, and on request a snapshot.

A segment is a file that only grows, until it is removed with all its blocks. So the log stores only the number of
announced records of each segment; the block names are in the index of the files.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from baton.process.links.hub import LinkHub, RouterLink
from baton.protos import cache_pb2, session_pb2

NAME_BYTES = 8  # length of block names in messages: the index of files stores only this prefix
MESSAGE_NAMES = 8192
"""Maximum number of names per message: 64 KiB, so that no token waits long behind one."""
MESSAGES_AT_ONCE = 8
"""Maximum number of messages per report: files found at start are announced over several reports."""


class OwnFiles(Protocol):
    """Interface of the KV files that this worker writes, implemented by `TierStore`. Any thread may call it."""

    def own_slots(self) -> Mapping[int, int]: ...
    def own_names(self, number: int, first: int, count: int) -> bytes: ...


class FilesLog:
    """Log of the changes of a worker's own KV files in one epoch. Reads only the index, never a file."""

    def __init__(self, message_names: int = MESSAGE_NAMES) -> None:
        self._message_names = message_names
        self._announced: dict[int, int] = {}  # number of announced records, by segment
        self.sequence = 0  # number of the last message

    def changes(self, files: OwnFiles, most: int = MESSAGES_AT_ONCE) -> Iterator[cache_pb2.TierEvents]:
        """Yield at most `most` messages of changes; later calls yield the remaining changes. A yielded change counts
        as announced.
        """
        present = files.own_slots()
        removed = tuple(number for number in self._announced if number not in present)
        for number in removed:
            del self._announced[number]
        news = ((number, self._announced.get(number, 0), slots) for number, slots in sorted(present.items()))
        for _, pieces in zip(range(most), self._messages(files, news, self._mark_announced), strict=False):
            self.sequence += 1
            yield cache_pb2.TierEvents(sequence=self.sequence, stored=pieces, removed_segments=removed)
            removed = ()
        if removed:
            self.sequence += 1
            yield cache_pb2.TierEvents(sequence=self.sequence, removed_segments=removed)

    def snapshot(self, files: OwnFiles) -> list[cache_pb2.TierSnapshot]:
        """Return messages with all announced records except those of removed segments: at least one message, even
        without records.
        """
        announced = ((number, 0, slots) for number, slots in self._announced.items())
        parts = list(self._messages(files, announced, lambda piece: None)) or [[]]
        return [
            cache_pb2.TierSnapshot(sequence=self.sequence, part=part, parts=len(parts), stored=pieces)
            for part, pieces in enumerate(parts)
        ]

    def _mark_announced(self, piece: cache_pb2.TierPiece) -> None:
        self._announced[piece.segment] = piece.first_slot + len(piece.names) // NAME_BYTES

    def _messages(
        self,
        files: OwnFiles,
        ranges: "Iterator[tuple[int, int, int]]",
        on_piece: Callable[[cache_pb2.TierPiece], None],
    ) -> Iterator[list[cache_pb2.TierPiece]]:
        """Yield one list of pieces per message, with the records of `ranges` (segment, first, end).

        Each piece is also passed to `on_piece`.
        """
        pieces: list[cache_pb2.TierPiece] = []
        room = self._message_names
        for number, first, last in ranges:
            while first < last and (names := files.own_names(number, first, min(room, last - first))):
                pieces.append(cache_pb2.TierPiece(segment=number, first_slot=first, names=names))
                on_piece(pieces[-1])
                first += len(names) // NAME_BYTES
                room -= len(names) // NAME_BYTES
                if not room:
                    yield pieces
                    pieces, room = [], self._message_names
        if pieces:
            yield pieces


class TierPublisher:
    """Sender of the changes of a worker's own files to routers, in one epoch. Lives on the event loop."""

    def __init__(self, hub: LinkHub[session_pb2.ConnectResponse], epoch: int) -> None:
        self._hub = hub
        self._epoch = epoch
        self._log = FilesLog()

    @property
    def sequence(self) -> int:
        return self._log.sequence

    def send_changes(self, files: OwnFiles) -> None:
        """Announce changes since the last call; if there are too many for one call, later calls announce the others.

        Call it before each report.
        """
        for events in self._log.changes(files):
            for link in self._hub.links:  # one message object per link: each carries its link's acknowledgement
                link.send_lossy(session_pb2.ConnectResponse(epoch=self._epoch, tier_events=events))

    def send_snapshot(self, link: RouterLink[session_pb2.ConnectResponse], files: OwnFiles) -> None:
        """Send all announced records, in parts, to the router that requested them."""
        for part in self._log.snapshot(files):
            link.send_lossy(session_pb2.ConnectResponse(epoch=self._epoch, tier_snapshot=part))

"""Open segment of the KV tier. After `give_up` it is closed as soon as its last reader has finished."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.kvtransfer.tier.files import SegmentId, TierFile
from baton.kvtransfer.tier.records import HEADER_BYTES, RecordHeader, SegmentFormat
from baton.kvtransfer.tier.staging import Staging


class SegmentGone(Exception):
    """Error: `give_up` was called, so the segment cannot be read any more."""


class Segment:
    """Segment with one writer and any number of readers. Methods raise OSError if the file fails."""

    def __init__(self, segment_id: SegmentId, file: TierFile, format: SegmentFormat, size_bytes: int) -> None:
        self.id = segment_id
        self.size_bytes = size_bytes
        self._file = file
        self._format = format
        self._guard = threading.Lock()
        self._readers = 0
        self._given_up = False

    @property
    def slots(self) -> int:
        """Number of complete records, computed from the size of the file."""
        return self._format.slots(self.size_bytes)

    def headers(self, first: int, last: int) -> Iterator[RecordHeader | None]:
        """Yield the headers of the records in slots [first, last); None for a damaged header."""
        raw = bytearray(HEADER_BYTES)
        view = memoryview(raw)
        with self._in_use():
            for slot in range(first, last):
                whole = self._file.read([view], self._format.offset(slot)) == HEADER_BYTES
                yield self._format.read_record_header(bytes(raw)) if whole else None

    def read_end(self, number: int) -> None:
        """Test the file: read the last bytes of one record, in slot `number` modulo `slots`. Raises: SegmentGone."""
        end = self._format.offset(number % max(1, self.slots) + 1)
        with self._in_use():
            self._file.read([memoryview(bytearray(HEADER_BYTES))], end - HEADER_BYTES)

    def announce(self, first: int, count: int) -> None:
        """Hint to the system that `count` records from slot `first` on will be loaded soon."""
        with self._in_use():
            self._file.announce(self._format.offset(first), count * self._format.record_bytes)

    def load(self, first: int, count: int, staging: Staging, into: int) -> None:
        """Load records into staging memory. `first`: first slot of the segment. `into`: first staging slot.

        If the file has fewer records, the remaining staging slots get a header of zeros. Raises: SegmentGone.
        """
        buffers: list[memoryview] = []
        for slot in range(into, into + count):
            buffers += (staging.header(slot), staging.block(slot))
        with self._in_use():
            whole = self._file.read(buffers, self._format.offset(first)) // self._format.record_bytes
        for slot in range(into + whole, into + count):
            staging.header(slot)[:] = bytes(HEADER_BYTES)  # otherwise an older record in the slot would seem loaded

    def append(self, headers: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        """Append all records. If this fails, the file is cut to its previous size."""
        buffers: list[memoryview] = []
        for header, block in zip(headers, blocks, strict=True):
            buffers += (memoryview(header), block)
        begin = self._format.offset(self.slots)
        try:
            self._file.write(buffers, begin)
        except OSError:
            self._file.truncate(begin)
            self.size_bytes = begin
            raise
        self.size_bytes = begin + len(headers) * self._format.record_bytes

    def cut(self) -> None:
        """Cut off the last record if it is incomplete."""
        self.size_bytes = self._format.offset(self.slots)
        self._file.truncate(self.size_bytes)

    def give_up(self) -> None:
        """Forbid further reads, and close the file as soon as no reader uses it. Call it once."""
        with self._guard:
            self._given_up = True
            unused = not self._readers
        if unused:
            self._file.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._guard:
            if self._given_up:
                raise SegmentGone(str(self.id))
            self._readers += 1
        try:
            yield
        finally:
            with self._guard:
                self._readers -= 1
                last = self._given_up and not self._readers
            if last:
                self._file.close()

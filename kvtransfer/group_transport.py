"""Pulls blocks as messages of a process group: the source sends the requested blocks into a staging ring of ours.

The receiver posts every receive itself, so that the source never chooses where to write. It requests no more at a time
than it will take in order, so that the content of each message is known before it comes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from kvtransfer.errors import BlockOutOfRange, CopyRefused, LinkBroken
from kvtransfer.messages import HEADER_BYTES, MessageLayout, Packer, check_header
from kvtransfer.parts import Storage
from kvtransfer.process_group import MessageGroup, Pending
from kvtransfer.staging import StagingRing
from kvtransfer.transport import BlockPair, LinkRate

STAGING_SLOTS = 3  # one landing, one being put into place, one ahead
MAX_PROBE_MESSAGES = 64


class SendControl(Protocol):
    """Asks the source for messages. Bounds its waits.

    Raises: CopyRefused, and none will come; LinkBroken, where some may.
    """

    def send(self, first_sequence: int, transfer_id: bytes, blocks: Sequence[int]) -> None:
        """Of logical blocks, so many in each message as was agreed."""

    def probe(self, first_sequence: int, messages: int) -> None:
        """Full ones, of anything."""


class GroupTransport:
    """Owns `group` and closes it. `pool` is our own; its first part is on the device of the group's messages."""

    def __init__(
        self,
        name: str,
        group: MessageGroup,
        control: SendControl,
        pool: Storage,
        layout: MessageLayout,
        on_close: Callable[[], None],
    ) -> None:
        self.name = name
        self._group = group
        self._control = control
        self._layout = layout
        self._packer = Packer(pool, layout.reader, layout, reads=False)
        self._ring = StagingRing(STAGING_SLOTS, layout.message_bytes, self._packer.device)
        self._on_close = on_close
        self._next_sequence = 0
        self._broken = False
        self._closed = False

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Raises BlockOutOfRange, before anything is asked for; CopyRefused; LinkBroken."""
        for pair in pairs:
            if not 0 <= pair.destination < self._layout.reader.num_blocks:
                raise BlockOutOfRange(f"{pair} is not within {self._layout.reader.num_blocks} own blocks")
        size = self._layout.blocks_per_message
        batches = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        sizes = [len(batch) * self._layout.reader.block_bytes for batch in batches]
        wanted = [pair.logical for pair in pairs]
        messages = self._messages(sizes, lambda first: self._control.send(first, transfer_id, wanted))
        for batch, message in zip(batches, messages, strict=True):
            with self._group.stream():
                self._packer.scatter(message, [pair.destination for pair in batch])
            self._group.settle()
        return sum(sizes)

    def measure(self, nbytes: int) -> LinkRate:
        """The first message, which may have to set up connections, is not counted."""
        self._probe(1)
        size = self._layout.blocks_per_message * self._layout.reader.block_bytes
        count = max(1, min(MAX_PROBE_MESSAGES, nbytes // size))
        started = time.monotonic()
        self._probe(count)
        return LinkRate(count * size, time.monotonic() - started)

    def lost(self) -> None:
        """The other end is gone: calls that wait for it fail. Any thread, any number of times."""
        self._closed = True
        self._group.close()

    def close(self) -> None:
        self.lost()
        self._on_close()

    def _probe(self, count: int) -> None:
        size = self._layout.blocks_per_message * self._layout.reader.block_bytes
        for _ in self._messages([size] * count, lambda first: self._control.probe(first, count)):
            pass

    def _messages(self, sizes: Sequence[int], ask: Callable[[int], None]) -> Iterator[torch.Tensor]:
        """Messages of so many bytes behind their headers, in order. Each is good until the next one is asked for."""
        if self._broken or self._closed:
            raise LinkBroken("this group has failed before, or was closed")
        first, self._broken = self._next_sequence, True  # unless all goes well
        try:
            ask(first)
            self._next_sequence += len(sizes)
            yield from self._receive(first, sizes)
            self._broken = False
        except CopyRefused:
            self._broken = False
            raise
        finally:
            if self._broken:
                self._group.close()

    def _receive(self, first: int, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        posted: deque[tuple[torch.Tensor, Pending]] = deque()
        for index, size in enumerate(sizes):
            while len(posted) < len(self._ring) and index + len(posted) < len(sizes):
                ahead = index + len(posted)
                message = self._ring.post(first + ahead)[: HEADER_BYTES + sizes[ahead]]
                with self._group.stream():  # not behind the engine's queued work
                    posted.append((message, self._group.receive(message, first + ahead)))
            message, pending = posted.popleft()
            pending.wait()
            self._ring.landed(first + index)
            with self._group.stream():
                check_header(message, first + index, size)
            yield message
            self._ring.free(first + index)

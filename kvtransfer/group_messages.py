"""KV copies as messages of a process group: the source packs and sends blocks, the reader receives and unpacks them.

The reader posts every receive, so that the source never chooses a destination. The reader requests messages in the
order in which it will process them, so that it knows which blocks each message contains before the message arrives.
"""

import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import numpy as np
import torch

from baton.kernels.pages import compile_copies, gather_blocks, scatter_blocks
from baton.kvtransfer.process_group import ProcessGroup, Wait
from baton.kvtransfer.slices import HeadSlice, PoolShape, Storage, parts_of, plan_slices
from baton.kvtransfer.transport import BlockPair, CopyRefused, LinkBroken, LinkRate, check_destinations

HEADER = struct.Struct("<QQ")  # sequence number, bytes of blocks
HEADER_BYTES = 64  # more bytes than HEADER needs, so that the blocks after the header are aligned
WANTED_MESSAGE_BYTES = 4 << 20
WANTED_RING_BYTES = 64 << 20


class _Slot(Enum):
    FREE = auto()
    AWAITED = auto()  # a receive is posted: bytes may arrive in the slot at any time
    LANDED = auto()  # the message has arrived and is being copied to its destination


class StagingRing:
    """Ring of message buffers. Slot `sequence % slots` holds message `sequence`.

    Only one thread may use it. A call in the wrong order is a bug and raises ValueError.
    """

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        """Create the buffers. `slots`: maximum number of buffers; fewer are created if messages are large."""
        slots = max(1, min(slots, WANTED_RING_BYTES // slot_bytes))
        self._memory = torch.empty(slots, slot_bytes, dtype=torch.uint8, device=device)
        self._states = [_Slot.FREE] * slots

    def __len__(self) -> int:
        return len(self._states)

    def post(self, sequence: int) -> torch.Tensor:
        """Reserve the message's slot, which must be free; return its memory, uint8 `[slot_bytes]`."""
        self._turn(sequence, _Slot.FREE, _Slot.AWAITED)
        return self._memory[sequence % len(self)]

    def landed(self, sequence: int) -> None:
        self._turn(sequence, _Slot.AWAITED, _Slot.LANDED)

    def free(self, sequence: int) -> None:
        """Free the slot of a message whose blocks have been unpacked."""
        self._turn(sequence, _Slot.LANDED, _Slot.FREE)

    def _turn(self, sequence: int, wanted: _Slot, next_state: _Slot) -> None:
        slot = sequence % len(self)
        if self._states[slot] is not wanted:
            raise ValueError(f"slot of message {sequence} is {self._states[slot].name}, expected {wanted.name}")
        self._states[slot] = next_state


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Layout of a message after its header: slices of heads in order, and in each slice all blocks in order."""

    source: PoolShape
    reader: PoolShape
    blocks_per_message: int

    @property
    def slices(self) -> tuple[HeadSlice, ...]:
        return plan_slices(self.source, self.reader)

    @property
    def message_bytes(self) -> int:
        return HEADER_BYTES + self.blocks_per_message * self.source.block_bytes


def blocks_per_message(shape: PoolShape) -> int:
    return max(1, min(shape.num_blocks, WANTED_MESSAGE_BYTES // shape.block_bytes))


def write_header(message: torch.Tensor, sequence: int, block_bytes: int) -> None:
    header = HEADER.pack(sequence, block_bytes).ljust(HEADER_BYTES, b"\0")
    message[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))


def check_header(message: torch.Tensor, sequence: int, block_bytes: int) -> None:
    """Check a message's header. Raises: LinkBroken if its sequence number or size differs from the expected one."""
    found = HEADER.unpack(message[: HEADER.size].cpu().numpy().tobytes())
    if found != (sequence, block_bytes):
        raise LinkBroken(f"received message {found[0]} of {found[1]} bytes, expected {sequence} of {block_bytes}")


class Packer:
    """Copier of blocks between a pool, on any devices, and messages, on the device of the pool's first part.

    The constructor compiles kernels, which may take seconds.
    """

    def __init__(self, pool: Storage, shape: PoolShape, layout: MessageLayout, reads: bool) -> None:
        """Create a packer. `shape`: shape of `pool`. `reads`: True at the source, which reads blocks from `pool`."""
        parts = [part.view(shape.num_blocks, shape.rows, shape.row_bytes) for part in parts_of(pool, shape)]
        self._views = []  # one view of the pool per slice: [block, row, bytes of the row in the slice]
        for piece in layout.slices:
            part = piece.source_part if reads else piece.destination_part
            start = piece.source_offset if reads else piece.destination_offset
            self._views.append(parts[part][:, :, start : start + piece.width])
        self.device = parts[0].device
        self._on_cpu = self.device.type == "cpu"
        for view in self._views:  # compile now, so that the first blocks do not wait for the compiler
            with torch.cuda.device(view.device) if view.is_cuda else nullcontext():  # Triton uses the current device
                message = view.new_empty(HEADER_BYTES + view[0].numel())
                compile_copies(view, message[HEADER_BYTES:].view(1, *view.shape[1:]))

    def gather(self, blocks: Sequence[int], message: torch.Tensor) -> int:
        """Copy blocks into the message, after its header; return the bytes of the blocks."""
        end = HEADER_BYTES
        for view in self._views:
            start, end = end, end + len(blocks) * view[0].numel()
            self._copy(message[start:end].view(len(blocks), *view.shape[1:]), view, blocks, out_of_pool=True)
        return end - HEADER_BYTES

    def scatter(self, message: torch.Tensor, blocks: Sequence[int]) -> int:
        end = HEADER_BYTES
        for view in self._views:
            start, end = end, end + len(blocks) * view[0].numel()
            self._copy(message[start:end].view(len(blocks), *view.shape[1:]), view, blocks, out_of_pool=False)
        return end - HEADER_BYTES

    def _copy(self, packed: torch.Tensor, view: torch.Tensor, blocks: Sequence[int], out_of_pool: bool) -> None:
        if self._on_cpu:
            # Copy with numpy, which uses only this thread, unlike torch. Both release the GIL.
            small, large = packed.numpy(), view.numpy()
            for index, block in enumerate(blocks):
                np.copyto(small[index], large[block]) if out_of_pool else np.copyto(large[block], small[index])
            return
        ids = torch.tensor(blocks, dtype=torch.int64).to(view.device, non_blocking=True)
        if view.device != self.device:
            _copy_across(packed, view, ids, out_of_pool)
        elif out_of_pool:
            gather_blocks(view, ids, packed)
        else:
            scatter_blocks(packed, view, ids)


def _copy_across(packed: torch.Tensor, view: torch.Tensor, ids: torch.Tensor, out_of_pool: bool) -> None:
    """Copy between a message and a view of the pool on another device. torch orders the work of both devices."""
    if out_of_pool:
        packed.copy_(view[ids])
    else:
        view[ids] = packed.to(view.device)
        torch.cuda.current_stream(view.device).synchronize()  # `settle` waits only for the device of the messages


SEND_SLOTS = 2  # one message is being sent, one is being packed


class GroupSender:
    """Sender of blocks on its own thread, so that the engine never waits for the reader. Owns and closes `group`.

    A block that is released before it is sent arrives with wrong content. The reader learns this when it closes the
    transfer. Only one thread may call `submit` and `probe`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        pool: Storage,
        layout: MessageLayout,
        on_broken: Callable[[BaseException], None],
    ) -> None:
        """Start the thread. If sending fails, the thread calls `on_broken` once and sends nothing more."""
        self._group = group
        self._layout = layout
        self._packer = Packer(pool, layout.source, layout, reads=True)
        self._ring = StagingRing(SEND_SLOTS, layout.message_bytes, self._packer.device)
        self._under_way: dict[int, Wait] = {}
        self._on_broken = on_broken
        self._next_sequence = 0
        self._broken = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-send")

    def submit(self, first_sequence: int, blocks: Sequence[int]) -> None:
        """Queue blocks of the pool, to be sent in messages of the agreed size.

        Raises: LinkBroken if `first_sequence` is not the next sequence number, or if sending has failed.
        """
        size = self._layout.blocks_per_message
        self._enqueue(first_sequence, [blocks[start : start + size] for start in range(0, len(blocks), size)])

    def probe(self, first_sequence: int, messages: int) -> None:
        """Queue messages of full size with arbitrary content, to measure the link. Raises: LinkBroken."""
        self._enqueue(first_sequence, [()] * messages)

    def close(self) -> None:
        """Stop the thread. Returns when the reader has closed the group too, or after the group's timeout."""
        self._broken = True
        self._group.close()
        self._executor.shutdown(cancel_futures=True)

    def _enqueue(self, first_sequence: int, batches: Sequence[Sequence[int]]) -> None:
        if first_sequence != self._next_sequence or self._broken:
            raise LinkBroken(f"cannot send message {first_sequence}: {self._next_sequence} is next, or sending failed")
        self._next_sequence += len(batches)
        self._executor.submit(self._send_all, first_sequence, batches).add_done_callback(self._ended)

    def _send_all(self, first_sequence: int, batches: Sequence[Sequence[int]]) -> None:
        """Send each batch of blocks as one message. Raises: LinkBroken."""
        if self._broken:
            return
        for sequence, batch in enumerate(batches, first_sequence):
            self._finish(sequence - len(self._ring))
            self._send(sequence, batch)
        for sequence in sorted(self._under_way):
            self._finish(sequence)

    def _ended(self, sent: "Future[None]") -> None:
        if not sent.cancelled() and (error := sent.exception()) is not None and not self._broken:
            self._broken = True
            self._on_broken(error)

    def _send(self, sequence: int, blocks: Sequence[int]) -> None:
        slot = self._ring.post(sequence)
        with self._group.stream():
            block_bytes = self._packer.gather(blocks, slot) if blocks else slot.numel() - HEADER_BYTES
            write_header(slot, sequence, block_bytes)
            self._under_way[sequence] = self._group.send(slot[: HEADER_BYTES + block_bytes], sequence)

    def _finish(self, sequence: int) -> None:
        wait = self._under_way.pop(sequence, None)
        if wait is not None:
            wait()
            self._ring.landed(sequence)
            self._ring.free(sequence)


STAGING_SLOTS = 3  # one message is being received, one is being unpacked, one is posted ahead
MAX_PROBE_MESSAGES = 64


class SendControl(Protocol):
    """Requests to the source for messages. Every wait is bounded.

    Raises: CopyRefused if the source will send no message; LinkBroken if it may still send one.
    """

    def send(self, first_sequence: int, transfer_id: bytes, blocks: Sequence[int]) -> None:
        """Request blocks of a transfer by their logical indices, in messages of the agreed size."""

    def probe(self, first_sequence: int, messages: int) -> None:
        """Request messages of full size with arbitrary content, to measure the link."""


class GroupTransport:
    """Transport that receives blocks as messages of a process group. Owns and closes `group`.

    `pool`: this worker's pool, into which blocks are copied. Messages are on the device of the pool's first part.
    """

    def __init__(
        self,
        name: str,
        group: ProcessGroup,
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
        """Copy blocks. Raises: BlockOutOfRange, before anything is requested; CopyRefused; LinkBroken."""
        check_destinations(pairs, self._layout.reader.num_blocks)
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
        """Measure the link. A first message is not counted, because it may set up connections."""
        self._probe(1)
        size = self._layout.blocks_per_message * self._layout.reader.block_bytes
        count = max(1, min(MAX_PROBE_MESSAGES, nbytes // size))
        started = time.monotonic()
        self._probe(count)
        return LinkRate(count * size, time.monotonic() - started)

    def lost(self) -> None:
        """Close the group because the source is gone: pending calls fail. Any thread may call this, also repeatedly."""
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
        """Yield messages of these sizes (without header), in order. Each is valid until the next one is requested."""
        if self._broken or self._closed:
            raise LinkBroken("the process group failed earlier, or was closed")
        first, self._broken = self._next_sequence, True  # the link counts as broken until all messages have arrived
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
        posted: deque[tuple[torch.Tensor, Wait]] = deque()
        for index, size in enumerate(sizes):
            while len(posted) < len(self._ring) and index + len(posted) < len(sizes):
                ahead = index + len(posted)
                message = self._ring.post(first + ahead)[: HEADER_BYTES + sizes[ahead]]
                with self._group.stream():  # the group's stream does not wait for the engine's work
                    posted.append((message, self._group.receive(message, first + ahead)))
            message, wait = posted.popleft()
            wait()
            self._ring.landed(first + index)
            with self._group.stream():
                check_header(message, first + index, size)
            yield message
            self._ring.free(first + index)

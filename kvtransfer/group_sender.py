"""Sends blocks of our pool over a process group, in the order in which the group's one reader requested them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvtransfer.errors import LinkBroken
from kvtransfer.messages import HEADER_BYTES, MessageLayout, Packer, write_header
from kvtransfer.parts import Storage
from kvtransfer.process_group import MessageGroup, Pending
from kvtransfer.staging import StagingRing

SEND_SLOTS = 2  # one being sent, one being gathered


class GroupSender:
    """Owns `group`, closes it, and has a thread that waits for the reader: the engine never does.

    Messages are copies: blocks that are given up while a message waits harm only their reader, which learns of it
    when it closes the transfer. `submit` and `probe` belong to one thread.
    """

    def __init__(
        self,
        group: MessageGroup,
        pool: Storage,
        layout: MessageLayout,
        on_broken: Callable[[BaseException], None],
    ) -> None:
        """`on_broken` is called once at most, on our thread; nothing is sent from then on."""
        self._group = group
        self._layout = layout
        self._packer = Packer(pool, layout.source, layout, reads=True)
        self._ring = StagingRing(SEND_SLOTS, layout.message_bytes, self._packer.device)
        self._under_way: dict[int, Pending] = {}
        self._on_broken = on_broken
        self._next_sequence = 0
        self._broken = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-send")

    def submit(self, first_sequence: int, blocks: Sequence[int]) -> None:
        """Blocks of our pool, so many a message as was agreed. Raises: LinkBroken, if they are out of order."""
        size = self._layout.blocks_per_message
        self._enqueue(first_sequence, [blocks[start : start + size] for start in range(0, len(blocks), size)])

    def probe(self, first_sequence: int, messages: int) -> None:
        """Full messages of no blocks. Raises: LinkBroken."""
        self._enqueue(first_sequence, [()] * messages)

    def close(self) -> None:
        """Returns when the thread has ended: when the reader has dropped the group, or at its timeout."""
        self._broken = True
        self._group.close()
        self._executor.shutdown(cancel_futures=True)

    def _enqueue(self, first_sequence: int, batches: Sequence[Sequence[int]]) -> None:
        if first_sequence != self._next_sequence or self._broken:
            raise LinkBroken(f"message {first_sequence} was asked for, {self._next_sequence} is next")
        self._next_sequence += len(batches)
        self._executor.submit(self._send_all, first_sequence, batches).add_done_callback(self._ended)

    def _send_all(self, first_sequence: int, batches: Sequence[Sequence[int]]) -> None:
        """Raises: LinkBroken."""
        if self._broken:
            return
        for sequence, batch in enumerate(batches, first_sequence):
            self._finish(sequence - SEND_SLOTS)
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
        pending = self._under_way.pop(sequence, None)
        if pending is not None:
            pending.wait()
            self._ring.landed(sequence)
            self._ring.free(sequence)

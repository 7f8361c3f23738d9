"""What goes over a group, over one that is a queue in this process: order, staging, refusals. gloo: tests/worker."""

import queue
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

from baton.kvtransfer import group_messages
from baton.kvtransfer.group_messages import (
    STAGING_SLOTS,
    GroupSender,
    GroupTransport,
    MessageLayout,
    Packer,
    StagingRing,
    check_header,
    write_header,
)
from baton.kvtransfer.process_group import Wait
from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.transport import BlockOutOfRange, BlockPair, CopyRefused, LinkBroken

SHAPE = PoolShape(num_blocks=20, block_bytes=32)
LAYOUT = MessageLayout(SHAPE, SHAPE, blocks_per_message=2)
CPU = torch.device("cpu")


class QueueGroup:
    """Both ends; sends are copies. `posted`: addresses that may be written at any time, until waited for."""

    def __init__(self) -> None:
        self.messages: queue.Queue[torch.Tensor] = queue.Queue()
        self.posted: list[int] = []
        self.most_posted = 0
        self.closed = False

    def send(self, message: torch.Tensor, sequence: int) -> Wait:
        self.messages.put(message.clone())
        return lambda: None

    def receive(self, message: torch.Tensor, sequence: int) -> Wait:
        self.posted.append(message.data_ptr())
        self.most_posted = max(self.most_posted, len(self.posted))

        def land() -> None:
            try:
                message.copy_(self.messages.get(timeout=20))
            except (queue.Empty, RuntimeError) as error:
                raise LinkBroken(str(error)) from error
            self.posted.remove(message.data_ptr())

        return land

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def settle(self) -> None:
        """Nothing runs on its own here."""

    def close(self) -> None:
        self.closed = True


class Direct:
    """A `SendControl` that asks a sender in this process. `refuse`: what to raise instead."""

    def __init__(self, sender: GroupSender) -> None:
        self.sender = sender
        self.refuse: Exception | None = None

    def send(self, first_sequence: int, transfer_id: bytes, blocks: Sequence[int]) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.sender.submit(first_sequence, blocks)

    def probe(self, first_sequence: int, messages: int) -> None:
        self.sender.probe(first_sequence, messages)


class Ends:
    def __init__(self) -> None:
        self.group = QueueGroup()
        self.broken: list[BaseException] = []
        self.source = torch.arange(SHAPE.part_bytes).remainder(253).to(torch.uint8)
        self.own = torch.zeros(SHAPE.part_bytes, dtype=torch.uint8)
        self.sender = GroupSender(self.group, self.source, LAYOUT, self.broken.append)
        self.control = Direct(self.sender)
        self.transport = GroupTransport("queue", self.group, self.control, self.own, LAYOUT, lambda: None)

    def pull(self, blocks: Sequence[int]) -> None:
        pairs = [BlockPair(block, block, SHAPE.num_blocks - 1 - block) for block in blocks]
        assert self.transport.copy(b"", pairs) == len(blocks) * SHAPE.block_bytes
        own, source = self.own.view(-1, SHAPE.block_bytes), self.source.view(-1, SHAPE.block_bytes)
        assert all(own[SHAPE.num_blocks - 1 - block].equal(source[block]) for block in blocks)


@pytest.fixture
def ends():
    both = Ends()
    yield both
    both.transport.close()
    both.sender.close()
    assert both.group.closed


@pytest.mark.parametrize("count", [1, 2, 3, 19])
def test_any_number_of_blocks_lands_in_order(ends: Ends, count: int) -> None:
    ends.pull(range(count))
    ends.pull(range(count - 1, -1, -1))
    assert not ends.broken


def test_posted_receives_do_not_exceed_slots(ends: Ends) -> None:
    ends.pull(range(20))
    assert ends.group.most_posted == STAGING_SLOTS


class OnSecondGpu(torch.Tensor):
    """Says so."""

    is_cuda = True  # type: ignore[assignment]
    device = torch.device("cuda", 1)  # type: ignore[assignment]


def test_kernels_are_compiled_for_the_gpu_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's own GPU is the first one."""
    entered: list[torch.device] = []
    compiled_on: list[list[torch.device]] = []

    @contextmanager
    def device(entering: torch.device) -> Iterator[None]:
        entered.append(entering)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(group_messages, "compile_copies", lambda view, message: compiled_on.append(entered.copy()))
    Packer(torch.zeros(SHAPE.part_bytes, dtype=torch.uint8).as_subclass(OnSecondGpu), SHAPE, LAYOUT, reads=True)
    assert compiled_on == [[torch.device("cuda", 1)]]


@pytest.mark.parametrize(("ring_bytes", "slots"), [(1, 1), (2 * LAYOUT.message_bytes, 2)])
def test_large_messages_have_fewer_slots(monkeypatch: pytest.MonkeyPatch, ring_bytes: int, slots: int) -> None:
    monkeypatch.setattr(group_messages, "WANTED_RING_BYTES", ring_bytes)
    ends = Ends()
    ends.pull(range(20))
    assert ends.group.most_posted == slots
    assert max(ends.transport._ring._memory.nbytes, ends.sender._ring._memory.nbytes) == slots * LAYOUT.message_bytes
    ends.transport.close()
    ends.sender.close()
    assert not ends.broken


def test_slot_is_not_posted_while_it_is_copied_from(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = ends.transport._packer.scatter
    overlaps = []

    def checked(message: torch.Tensor, blocks: Sequence[int]) -> int:
        overlaps.append(message.data_ptr() in ends.group.posted)
        return scatter(message, blocks)

    monkeypatch.setattr(ends.transport._packer, "scatter", checked)
    ends.pull(range(20))
    assert overlaps == [False] * 10


def test_measuring_writes_no_pool_and_counts_the_second_time_only(ends: Ends) -> None:
    assert ends.transport.measure(300).bytes == 256
    assert not ends.own.any()
    ends.pull(range(3))


def test_refusal_costs_no_number(ends: Ends) -> None:
    ends.control.refuse = CopyRefused("no")
    with pytest.raises(CopyRefused):
        ends.transport.copy(b"", [BlockPair(0, 0, 0)])
    ends.control.refuse = None
    ends.pull(range(3))


def test_unclear_answer_ends_the_group(ends: Ends) -> None:
    ends.control.refuse = LinkBroken("did it hear me?")
    with pytest.raises(LinkBroken):
        ends.transport.copy(b"", [BlockPair(0, 0, 0)])
    ends.control.refuse = None
    with pytest.raises(LinkBroken):
        ends.transport.copy(b"", [BlockPair(0, 0, 0)])


def test_unexpected_message_is_not_accepted(ends: Ends) -> None:
    wrong = torch.zeros(LAYOUT.message_bytes, dtype=torch.uint8)
    write_header(wrong, 7, 64)
    ends.group.messages.put(wrong)
    with pytest.raises(LinkBroken, match="received message 7 of 64 bytes, expected 0 of 64"):
        ends.transport.copy(b"", [BlockPair(0, 0, 0), BlockPair(1, 1, 1)])
    assert not ends.own.any()


def test_messages_out_of_order_are_not_asked_for(ends: Ends) -> None:
    with pytest.raises(LinkBroken):
        ends.sender.submit(1, [0])


def test_failed_send_is_reported_and_ends_the_group(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(message: torch.Tensor, sequence: int) -> Wait:
        raise LinkBroken("gone")

    monkeypatch.setattr(ends.group, "send", fail)
    ends.sender.submit(0, [0])
    ends.sender._executor.submit(lambda: None).result(20)
    assert [str(error) for error in ends.broken] == ["gone"]
    with pytest.raises(LinkBroken):
        ends.sender.submit(1, [0])


def test_destination_out_of_range_is_not_asked_for(ends: Ends) -> None:
    with pytest.raises(BlockOutOfRange):
        ends.transport.copy(b"", [BlockPair(0, 0, SHAPE.num_blocks)])
    ends.pull(range(2))


def test_headers_name_their_message() -> None:
    message = torch.zeros(64, dtype=torch.uint8)
    write_header(message, 2**40, 9)
    check_header(message, 2**40, 9)
    with pytest.raises(LinkBroken):
        check_header(message, 2**40, 8)


def test_slot_goes_round_free_awaited_landed() -> None:
    ring = StagingRing(2, 8, CPU)
    first, second = ring.post(0), ring.post(1)
    assert first.data_ptr() != second.data_ptr()
    with pytest.raises(ValueError, match="message 2"):
        ring.post(2)  # still awaited
    ring.landed(0)
    with pytest.raises(ValueError, match="message 2"):
        ring.post(2)  # still copied from
    ring.free(0)
    assert ring.post(2).data_ptr() == first.data_ptr()

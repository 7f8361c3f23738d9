"""Whatever the order of events: each pin is released exactly once, and stale data is never called valid."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.kvtransfer.source import OpenVerdict, SourceTable
from baton.kvtransfer.transport import UnknownTransfer

IDS = st.sampled_from([bytes([letter]) * 16 for letter in b"ABC"])
LEASE_S, PARK_S, TOMBSTONE_S = 5.0, 2.0, 1e9  # an id is never forgotten here


class Transfers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table: SourceTable[int, str] = SourceTable(LEASE_S, PARK_S, TOMBSTONE_S)
        self.now = 0.0
        self.next_request = 0
        self.pinned: dict[bytes, int] = {}  # our own book of what must still be released
        self.blocks: dict[bytes, list[int]] = {}
        self.finished: set[bytes] = set()
        self.ended: set[bytes] = set()
        self.reading: set[bytes] = set()
        self.parked: dict[bytes, float] = {}  # opened, not announced: until when

    def end(self, transfer_id: bytes) -> None:
        self.ended.add(transfer_id)
        self.pinned.pop(transfer_id, None)
        self.reading.discard(transfer_id)
        self.parked.pop(transfer_id, None)

    @rule(transfer_id=IDS)
    def announce(self, transfer_id: bytes) -> None:
        wanted = transfer_id not in self.ended and transfer_id not in self.pinned
        assert self.table.announce(transfer_id, self.next_request, self.now) == wanted
        if wanted:
            self.pinned[transfer_id] = self.next_request
            self.blocks[transfer_id] = []
            self.parked.pop(transfer_id, None)
        self.next_request += 1

    @rule(transfer_id=IDS, count=st.integers(0, 3), last=st.booleans())
    def compute(self, transfer_id: bytes, count: int, last: bool) -> None:
        blocks = list(range(count))
        if transfer_id not in self.pinned:
            with pytest.raises(UnknownTransfer):
                self.table.advance(transfer_id, blocks, self.now)
            return
        if transfer_id in self.finished:
            return
        self.table.advance(transfer_id, blocks, self.now)
        self.blocks[transfer_id] += blocks
        if last:
            self.table.finish(transfer_id, ("first",), self.now)
            self.finished.add(transfer_id)

    @rule(transfer_id=IDS)
    def open(self, transfer_id: bytes) -> None:
        verdict = self.table.open(transfer_id, self.now)
        if transfer_id in self.ended or transfer_id in self.reading:
            assert verdict is OpenVerdict.REFUSED
            return
        assert verdict is (OpenVerdict.OPENED if transfer_id in self.pinned else OpenVerdict.PARKED)
        self.reading.add(transfer_id)
        if verdict is OpenVerdict.PARKED:
            self.parked.setdefault(transfer_id, self.now + PARK_S)

    @rule(transfer_id=IDS)
    def reader_lost(self, transfer_id: bytes) -> None:
        self.table.reader_lost(transfer_id, self.now)
        self.reading.discard(transfer_id)

    @rule(transfer_id=IDS, complete=st.booleans())
    def close(self, transfer_id: bytes, complete: bool) -> None:
        verdict = self.table.close(transfer_id, complete, self.now)
        assert verdict.owner == self.pinned.get(transfer_id)
        assert verdict.valid == (complete and transfer_id in self.pinned and transfer_id in self.finished)
        self.end(transfer_id)

    @rule(transfer_id=IDS)
    def drop(self, transfer_id: bytes) -> None:
        self.table.drop(transfer_id, self.now)
        self.end(transfer_id)

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        released = self.table.expired(self.now)
        owners = {request: transfer_id for transfer_id, request in self.pinned.items()}
        assert len(set(released)) == len(released)
        for request in released:
            assert owners[request] not in self.reading
            self.end(owners[request])
        for transfer_id in [parked for parked, until in self.parked.items() if until <= self.now]:
            self.end(transfer_id)

    @invariant()
    def what_has_not_ended_is_in_the_table(self) -> None:
        assert len(self.table) == len(self.pinned) + len(self.parked)
        for transfer_id in self.ended:
            assert self.table.snapshot(transfer_id).dropped

    @invariant()
    def what_is_pinned_and_nothing_else_is_confirmed(self) -> None:
        for transfer_id in self.ended | self.reading | set(self.pinned):
            assert self.table.confirm(transfer_id).valid == (transfer_id in self.pinned)

    @invariant()
    def a_pinned_transfer_shows_all_its_blocks(self) -> None:
        for transfer_id in self.pinned:
            state = self.table.snapshot(transfer_id)
            assert list(state.blocks) == self.blocks[transfer_id]
            assert state.finished == (transfer_id in self.finished)

    def teardown(self) -> None:
        for transfer_id in list(self.reading):
            self.reader_lost(transfer_id)
        for transfer_id in list(self.pinned):
            self.compute(transfer_id, 1, last=True)
        self.time_passes(LEASE_S)
        assert not self.pinned
        assert len(self.table) == 0


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

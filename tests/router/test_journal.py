"""What is written down of streams, when, and what happens where it cannot be."""

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.process.objectives import NO_LATENCY_OBJECTIVES, LatencyObjectives
from baton.process.registry.redis_registry import RegistryUnavailable
from baton.process.registry.redis_routers import JournalChange
from baton.protos import journal_pb2, versions_pb2
from baton.router.request import journal as journal_wire
from baton.router.request.journal import GRACE_S, MAX_NOTED, MAX_RECORD_BYTES, Journal, Record, journal_key
from baton.router.request.resume import AttemptLocation
from baton.router.types.request import LogitRules, Operation, PreparedRequest, Sampling, TokenPrompt
from baton.router.types.session import kept_session
from baton.router.types.worker import Adapter
from baton.text.block_hash import block_hashes, root_hash
from baton.text.packed_tokens import TokenPacker
from baton.text.sampling import BeamParams, BeamStop
from baton.text.structured.output import StructuredKind, StructuredOutput
from baton.versions import OWN
from tests.fixtures.waiting import eventually

ROUTER = b"r" * 16
BLOCK_TOKENS = 4
ROOT = root_hash(b"f", "float32", "", "salt", b"key-salt")


def sampling(**fields: object) -> Sampling:
    given: dict[str, object] = {
        "max_tokens": 20, "temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.125, "seed": 2**63 + 1,
        "stop_token_ids": (2, 7), "n": 2,
    }  # fmt: skip
    return Sampling(**(given | fields))  # type: ignore[arg-type]


def request(sampled: Sampling | None = None, tokens: int = 11, adapter: Adapter | None = None) -> PreparedRequest:
    sampled = sampled or sampling()
    token_ids = tuple(range(tokens))
    return PreparedRequest(
        operation=Operation.CHAT,
        prompt=TokenPrompt(token_ids),
        request_id="r-1",
        sampling=sampled,
        stop=("stop", "é"),
        n=1,
        logprobs=sampled.logprobs,
        echo=True,
        priority=-5,
        tenant="somebody",
        session="s",
        kept_session=kept_session("agent-7", "ten", b"key-salt", "salt", keep_for_s=0.5),
        token_ids=token_ids,
        packed_tokens=TokenPacker().pack(token_ids),
        cache_root=ROOT,
        block_hashes=block_hashes(ROOT, token_ids, BLOCK_TOKENS),
        fingerprint=b"f",
        block_tokens=BLOCK_TOKENS,
        echo_text="the prompt",
        adapter=adapter,
    )


RULES = LogitRules({5: -2.0}, (1, 2), ((4, 5), (6,)))
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}
SAMPLINGS = st.one_of(
    st.just(sampling()),
    st.just(sampling(rules=RULES, **PENALTIES, min_tokens=3, typical_p=0.5, logprobs=0, prompt_logprobs=4)),
    st.builds(lambda stop: sampling(temperature=0.0, beams=BeamParams(4, -0.5, stop)), st.sampled_from(BeamStop)),
    st.builds(lambda most: sampling(most_drafted=most), st.none() | st.integers(0, 64)),
    st.builds(lambda kind: sampling(structured=StructuredOutput(kind, "[]")), st.sampled_from(StructuredKind)),
)
PLACES = st.builds(
    AttemptLocation,
    st.text(max_size=8),
    st.integers(0, 2**64 - 1),
    st.integers(0, 15),
    st.integers(1, 16),
    st.integers(0, 99),
)


@settings(max_examples=40)
@given(sampled=SAMPLINGS, places=st.lists(PLACES, max_size=3), adapted=st.booleans())
def test_a_record_read_is_the_one_written(sampled: Sampling, places: list[AttemptLocation], adapted: bool) -> None:
    adapter = Adapter("tiny", "digest") if adapted else None
    objectives = LatencyObjectives(900.5, 20.0) if adapted else NO_LATENCY_OBJECTIVES
    prepared = replace(request(sampled, adapter=adapter), objectives=objectives)
    written = Record(ROUTER, 7, prepared, "tiny", tuple(places))
    assert journal_wire.from_bytes(journal_wire.to_bytes(written), "somebody", BLOCK_TOKENS) == written


def test_a_record_holds_neither_key_nor_caller_nor_salt() -> None:
    secret = dataclasses.replace(request(), key_salt=b"SALT", tenant="TEN")
    data = journal_wire.to_bytes(Record(ROUTER, 1, secret, "tiny"))
    assert b"SALT" not in data and b"TEN" not in data


@pytest.mark.parametrize("data", [b"\xff", b"", journal_wire.to_bytes(Record(ROUTER, 1, request(), "tiny"))[2:]])
def test_data_that_is_not_understood_is_no_record(data: bytes) -> None:
    assert journal_wire.from_bytes(data, "somebody", BLOCK_TOKENS) is None


def test_the_key_tells_callers_requests_and_tokens_apart() -> None:
    names = [("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("b", "b", "c")]
    assert len({journal_key(*each) for each in names}) == len(names)


@dataclass
class Store:
    """Keeps what it is given, or does not answer."""

    written: list[JournalChange] = field(default_factory=list)
    answers: bool = True
    seized: tuple[str, ...] = ()
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while writes are answered."""

    def __post_init__(self) -> None:
        self.answering.set()

    async def write(self, changes: Sequence[JournalChange]) -> tuple[str, ...]:
        if not self.answers:
            raise RegistryUnavailable("gone")
        self.written += changes
        await self.answering.wait()
        return self.seized

    async def read(self, key: str) -> bytes | None:
        return None

    async def close(self) -> None:
        pass


@dataclass
class World:
    store: Store = field(default_factory=Store)
    ended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.journal = Journal(self.store, ROUTER, journal_wire.to_bytes, self.ended.append, clock=lambda: 100.0)

    @property
    def last(self) -> Record:
        value = self.store.written[-1].value
        assert value is not None
        record = journal_wire.from_bytes(value, "somebody", BLOCK_TOKENS)
        assert record is not None
        return record


async def test_where_a_stream_is_made_is_written_until_it_ends_and_then_only_for_a_little_while() -> None:
    world = World()
    entry = world.journal.open("k", 1, request(), "tiny", deadline_s=130.0)
    await world.journal.write()
    assert world.store.written == []
    entry.placed(AttemptLocation("a:1", 5))
    await world.journal.write()
    assert (world.store.written[-1].key, world.store.written[-1].ttl_ms) == ("k", 30_000)
    assert world.last.places == (AttemptLocation("a:1", 5),)
    entry.left(5)
    entry.placed(AttemptLocation("b:2", 6, 1, 1, 9))
    await world.journal.write()
    assert world.last.places == (AttemptLocation("b:2", 6, 1, 1, 9),)
    entry.left(6)
    entry.end()
    await world.journal.write()
    assert world.store.written[-1] == JournalChange("k", round(GRACE_S * 1e3), None)
    assert world.journal.find("k") is None
    assert world.journal.counts.written == 3


async def test_changes_of_one_stream_that_wait_are_written_once() -> None:
    world = World()
    entry = world.journal.open("k", 1, request(), "tiny", 130.0)
    for attempt_id in range(1, 5):
        entry.placed(AttemptLocation("a:1", attempt_id))
    await world.journal.write()
    assert len(world.store.written) == 1
    assert len(world.last.places) == 4


async def test_a_store_that_does_not_answer_costs_a_count_and_what_lives_is_written_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(Store(answers=False))
    entry = world.journal.open("k", 1, request(), "tiny", 130.0)
    for attempt_id in (1, 2):
        entry.placed(AttemptLocation("a:1", attempt_id))
        await world.journal.write()
    assert (world.journal.counts.failed, len(caplog.records)) == (2, 1)
    world.store.answers = True
    other = world.journal.open("other", 2, request(), "tiny", 130.0)
    other.placed(AttemptLocation("a:1", 3))
    await world.journal.write()
    assert {change.key for change in world.store.written} == {"k", "other"}


async def test_unanswered_write_is_repeated_without_another_change() -> None:
    world = World(Store(answers=False))
    lives, ended = (world.journal.open(key, 1, request(), "tiny", 130.0) for key in ("lives", "ended"))
    for attempt_id, entry in enumerate((lives, ended)):
        entry.placed(AttemptLocation("a:1", attempt_id))
    await world.journal.write()
    ended.end()
    await world.journal.write()
    world.store.answers = True
    await world.journal.write()
    assert {change.key: change.value is not None for change in world.store.written} == {"lives": True, "ended": False}


async def test_a_full_queue_drops_the_newest_and_counts_them() -> None:
    world = World()
    small = request(tokens=1)
    entries = [world.journal.open(str(number), number, small, "t", 130.0) for number in range(MAX_NOTED + 3)]
    for entry in entries:
        entry.placed(AttemptLocation("a:1", 1))
    assert world.journal.counts.dropped == 3
    await world.journal.write()
    assert len(world.store.written) == MAX_NOTED
    assert world.store.written[-1].key == str(MAX_NOTED - 1)


async def test_a_request_that_is_too_large_is_not_written() -> None:
    world = World()
    large = replace(request(), echo_text="x" * (MAX_RECORD_BYTES + 1))
    world.journal.open("k", 1, large, "tiny", 130.0).placed(AttemptLocation("a:1", 1))
    await world.journal.write()
    assert (world.store.written, world.journal.counts.too_large) == ([], 1)


async def test_a_stream_that_another_router_seized_is_told_so_and_one_resumed_here_is_left_to_its_newest() -> None:
    world = World(Store(seized=("k",)))
    old = world.journal.open("k", 1, request(), "tiny", 130.0)
    old.placed(AttemptLocation("a:1", 1))
    await world.journal.write()
    assert world.ended == [1]
    new = world.journal.open("k", 2, request(), "tiny", 130.0, seize=True)
    old.end()
    old.placed(AttemptLocation("a:1", 3))
    new.placed(AttemptLocation("b:2", 4))
    world.store.seized = ()
    await world.journal.write()
    assert world.store.written[-1].seize
    assert world.last.places == (AttemptLocation("b:2", 4),)
    assert not (await _settled(world, new)).seize


async def test_resumed_stream_outlives_the_pending_write_of_an_earlier_stream_whose_record_was_seized() -> None:
    """The client left this router, resumed at another one, and came back while the first stream's end was written."""
    world = World(Store(seized=("k",)))
    earlier = world.journal.open("k", 1, request(), "tiny", 130.0)
    earlier.placed(AttemptLocation("a:1", 1))
    earlier.end()
    world.store.answering.clear()
    writing = asyncio.create_task(world.journal.write())
    await eventually(lambda: world.store.written)
    resumed = world.journal.open("k", 2, request(), "tiny", 130.0, seize=True)
    world.store.answering.set()
    await writing
    resumed.placed(AttemptLocation("b:2", 2))
    world.store.seized = ()
    await world.journal.write()
    assert world.ended == []
    assert world.store.written[-1].seize


async def test_a_stream_that_is_resumed_seizes_its_record_with_the_first_place_however_late_that_comes() -> None:
    """An answer that could not be adopted is left before anything of it was written."""
    world = World()
    entry = world.journal.open("k", 1, request(), "tiny", 130.0, seize=True)
    entry.placed(AttemptLocation("a:1", 1))
    entry.left(1)
    await world.journal.write()
    assert world.store.written[-1].value is None
    entry.placed(AttemptLocation("b:2", 2))
    await world.journal.write()
    assert world.store.written[-1].seize


async def _settled(world: World, entry: object) -> JournalChange:
    """The next change of that stream, after it was written once."""
    entry.placed(AttemptLocation("b:2", 5))  # type: ignore[attr-defined]
    await world.journal.write()
    return world.store.written[-1]


async def test_the_writing_task_writes_what_comes_and_ends_with_its_cancellation() -> None:
    world = World()
    running = asyncio.create_task(world.journal.run())
    world.journal.open("k", 1, request(), "tiny", 130.0).placed(AttemptLocation("a:1", 1))
    await eventually(lambda: world.store.written)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()


async def test_an_end_waits_for_what_is_written_next() -> None:
    world = World()
    first, second = (world.journal.open(key, 1, request(), "tiny", 130.0) for key in ("k", "l"))
    first.placed(AttemptLocation("a:1", 1))
    await world.journal.write()
    first.end()
    assert not world.journal._changed.is_set(), "a call to Redis for an end alone"
    second.placed(AttemptLocation("a:1", 2))
    assert world.journal._changed.is_set()
    await world.journal.write()
    assert [change.key for change in world.store.written[-2:]] == ["k", "l"]


def test_a_record_of_another_version_is_skipped_and_both_are_named(caplog: pytest.LogCaptureFixture) -> None:
    written = journal_pb2.JournalRecord.FromString(journal_wire.to_bytes(Record(ROUTER, 1, request(), "tiny")))
    written.version = journal_wire.VERSION + 1
    written.versions.CopyFrom(versions_pb2.Versions(release="9.0.0", protocol=9))
    assert journal_wire.from_bytes(written.SerializeToString(), "somebody", BLOCK_TOKENS) is None
    assert "release 9.0.0" in caplog.text and str(OWN) in caplog.text


def test_fields_of_a_later_release_are_ignored() -> None:
    record = Record(ROUTER, 1, request(), "tiny")
    later = journal_wire.to_bytes(record) + bytes([0xFA, 0x7F, 1, 0x78])  # number 2047, one byte
    assert journal_wire.from_bytes(later, "somebody", BLOCK_TOKENS) == record

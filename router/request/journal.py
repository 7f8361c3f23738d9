"""Streams of this router, and the journal: records in a store, from which another router can continue the streams.

A record has the request and the workers where it runs, but no output and no API key. When a newer stream of a request
begins at any router, the older stream is closed.

No request waits for the journal: one task writes all pending changes in batches, and retries a second later if the
store does not answer. While the store is down, a client whose stream breaks must send its request again.
"""

import asyncio
import hashlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from baton.process.objectives import LEAST_SLO_MS, MOST_SLO_MS, LatencyObjectives
from baton.process.registry.redis_registry import RegistryUnavailable
from baton.process.registry.redis_routers import JournalChange
from baton.process.registry.worker_record import WEIGHTS, is_weights
from baton.process.wire_bounds import Bounds, anything, mapping, number, numbers, text
from baton.protos import journal_pb2, kept_session_pb2, sampling_pb2
from baton.router.fleet import wire as link_wire
from baton.router.fleet.peers import is_cancelled
from baton.router.model.served_model import ChosenModel
from baton.router.request.resume import AttemptLocation, ReceivedAnswer, ResumeRequest, Resumption
from baton.router.types.request import LogitRules, Operation, PreparedRequest, Sampling, TokenPrompt
from baton.router.types.session import KeptSession
from baton.router.types.worker import Adapter
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.text.block_hash import HASH_BYTES, block_hashes
from baton.text.packed_tokens import TokenPacker, field
from baton.text.sampling import BIASES, MAX_BIASES, BeamParams, BeamStop, received_numbers
from baton.text.structured.output import StructuredKind, StructuredOutput
from baton.versions import OWN

logger = logging.getLogger(__name__)
GRACE_S = 10.0
"""Time for which a record is kept after its stream was closed, in case the client has not received the end."""
MAX_RECORD_BYTES = 1 << 20
MAX_NOTED = 4096  # maximum number of pending changes; further changes are dropped
BATCH = 16  # maximum records per call, so that serialising them blocks the event loop for less than 1 ms
BATCH_BYTES = 1 << 15
ENDS_WAIT_S = 1.0
GATHER_S = 0.2  # time in which changes are gathered for one call, which costs as much as ten records
_KEY_DIGITS = 32
_TOKEN_IDS = journal_pb2.JournalRecord.DESCRIPTOR.fields_by_name["token_ids"].number
VERSION = 1
_BEAM_STOPS = {number: stop for stop, number in link_wire.BEAM_STOPS.items()}
_KINDS: dict[int, StructuredKind] = {number: kind for kind, number in link_wire.STRUCTURED_KINDS.items()}


@dataclass(frozen=True, slots=True)
class Record:
    """Record of a stream. `router_id`: router that serves the stream; `stream`: number of the stream at that router;
    `model`: name by which clients choose the model or adapter.
    """

    router_id: bytes
    stream: int
    request: PreparedRequest
    model: str
    places: tuple[AttemptLocation, ...] = ()


_BOUNDS = Bounds(
    {
        "JournalRecord.token_ids": numbers(1 << 24),
        "JournalRecord.echo_text": text(1 << 20),
        "JournalRecord.ttft_slo_ms": number(LEAST_SLO_MS, MOST_SLO_MS),
        "JournalRecord.tbt_slo_ms": number(LEAST_SLO_MS, MOST_SLO_MS),
        "JournalPlace.attempt_id": anything,
        "Sampling.seed": anything,
        "Sampling.logit_bias": mapping(MAX_BIASES, anything, number(BIASES.least, BIASES.most)),
        "StructuredOutput.text": text(1 << 20),
    }
)


class JournalStore(Protocol):
    async def write(self, changes: Sequence[JournalChange]) -> tuple[str, ...]:
        """Write changes; return the keys of records that another router has seized. Raises: RegistryUnavailable."""

    async def read(self, key: str) -> bytes | None:
        """Return a stored record; None if there is none. Raises: RegistryUnavailable."""

    async def close(self) -> None: ...


def journal_key(tenant: str, request_id: str, resume_token: str) -> str:
    """Return the key of a stream's record. The tenant is part of it, so that no other tenant finds the record."""
    digest = hashlib.sha256(b"baton.journal.v1")
    for part in (tenant.encode(), request_id.encode(), resume_token.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:_KEY_DIGITS]


class JournalEntry:
    """Journal record of one open stream. Its locations change as attempts are placed and closed."""

    def __init__(self, journal: "Journal", key: str, record: Record, deadline_s: float, seize: bool) -> None:
        self.key = key
        self._record = record  # record without locations
        self._places: dict[int, AttemptLocation] = {}  # locations of open attempts, by attempt id
        self.deadline_s = deadline_s
        self.seize = seize  # True: the next write takes the record over from another router
        self._journal = journal

    @property
    def record(self) -> Record:
        return replace(self._record, places=tuple(self._places.values()))

    def placed(self, place: AttemptLocation) -> None:
        self._places[place.attempt_id] = place
        self._journal.note(self)

    def left(self, attempt_id: int) -> None:
        """Remove a closed attempt's location. The removal is written only with the next call of `placed`."""
        self._places.pop(attempt_id, None)

    def end(self) -> None:
        """Close the stream: its record expires after GRACE_S."""
        self._journal.ended(self)


@dataclass(slots=True)
class JournalCounts:
    """Numbers of changes of records since the start, by outcome. `dropped`: too many were pending; `failed`: the store
    did not answer; `too_large`: the record was larger than MAX_RECORD_BYTES.
    """

    written: int = 0
    dropped: int = 0
    failed: int = 0
    too_large: int = 0


class Journal:
    """Records of this router's streams. `on_seized` is called with a stream that another router continues."""

    def __init__(
        self,
        store: JournalStore,
        router_id: bytes,
        to_bytes: Callable[[Record], bytes],
        on_seized: Callable[[int], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.router_id = router_id
        self.counts = JournalCounts()
        self._store = store
        self._to_bytes = to_bytes
        self._on_seized = on_seized
        self._clock = clock or time.monotonic
        self._live: dict[str, JournalEntry] = {}
        self._noted: dict[str, JournalEntry] = {}  # entries to write, by key; entries that are not in _live are closed
        self._changed = asyncio.Event()
        self.problem = ""
        """Reason why the store rejected the last write; empty if the write succeeded."""

    def open(
        self, key: str, stream: int, request: PreparedRequest, model: str, deadline_s: float, seize: bool = False
    ) -> JournalEntry:
        """Open the record of a stream; the first call of `placed` stores it.

        `seize`: take the record over from another router.
        """
        entry = JournalEntry(self, key, Record(self.router_id, stream, request, model), deadline_s, seize)
        self._live[key] = entry
        return entry

    def find(self, key: str) -> Record | None:
        """Return the record of a stream that this router serves; None if it serves none with this key."""
        entry = self._live.get(key)
        return entry.record if entry is not None else None

    def note(self, entry: JournalEntry) -> None:
        if self._live.get(entry.key) is not entry:
            return  # a newer stream of the request replaced the entry
        self._put(entry)

    def ended(self, entry: JournalEntry) -> None:
        if self._live.get(entry.key) is entry:
            del self._live[entry.key]
            self._put(entry, urgent=False)

    def _put(self, entry: JournalEntry, urgent: bool = True) -> None:
        """Queue a change. To save calls, non-urgent changes wait for the next urgent change, at most ENDS_WAIT_S."""
        if entry.key not in self._noted and len(self._noted) >= MAX_NOTED:
            self.counts.dropped += 1
            return
        self._noted[entry.key] = entry
        if urgent:
            self._changed.set()

    async def read(self, key: str) -> bytes | None:
        """Return a stored record; None if there is none. Raises: RegistryUnavailable."""
        return await self._store.read(key)

    async def run(self) -> None:
        while not is_cancelled():
            with suppress(TimeoutError):
                async with asyncio.timeout(ENDS_WAIT_S):
                    await self._changed.wait()
            await asyncio.sleep(GATHER_S)
            await self.write()

    async def write(self) -> None:
        """Write all pending changes. If the store does not answer, the remaining changes stay pending."""
        self._changed.clear()
        while self._noted and not is_cancelled():
            batch = self._batch()
            if not await self._write(batch):
                for entry in batch:
                    self._noted.setdefault(entry.key, entry)
                return

    def _batch(self) -> dict[JournalEntry, JournalChange]:
        """Remove and return the oldest pending changes that fit into one call."""
        changes: dict[JournalEntry, JournalChange] = {}
        size = 0
        while self._noted and len(changes) < BATCH and size < BATCH_BYTES:
            entry = self._noted.pop(next(iter(self._noted)))
            change = self._change(entry)
            if change is not None:
                changes[entry] = change
                size += len(change.value or b"")
        return changes

    def _change(self, entry: JournalEntry) -> JournalChange | None:
        live = self._live.get(entry.key) is entry
        left_s = entry.deadline_s - self._clock() if live else GRACE_S
        record = entry.record
        value = self._to_bytes(record) if live and record.places else None
        if value is not None and len(value) > MAX_RECORD_BYTES:
            self.counts.too_large += 1
            return None
        return JournalChange(entry.key, max(1, round(left_s * 1e3)), value, entry.seize)

    async def _write(self, changes: Mapping[JournalEntry, JournalChange]) -> bool:
        """Write changes, and return whether the store answered."""
        if not changes:
            return True
        try:
            seized = await self._store.write(tuple(changes.values()))
        except RegistryUnavailable as error:
            self.counts.failed += len(changes)
            if not self.problem:
                logger.warning("journal unavailable: %s; new streams cannot resume at another router", error)
            self.problem = str(error)
            return False
        self.counts.written += len(changes)
        if self.problem:
            logger.info("journal available again; new streams can resume at another router")
            self.problem = ""
            for live in tuple(self._live.values()):
                if live.record.places:
                    self._put(live)
        for entry, change in changes.items():
            if self._live.get(entry.key) is not entry:
                continue  # closed, perhaps while the store was called: the change says nothing about a newer stream
            if change.value is not None:
                entry.seize = False  # the record is taken over only when a value was written
            if change.key in seized:
                self._on_seized(entry.record.stream)
        return True


@dataclass(frozen=True, slots=True)
class Beginning:
    """Prepared request of a new or resumed stream. `resumption`, `record`: None for a new stream."""

    request: PreparedRequest
    chosen: ChosenModel
    tenant: str
    resume_token: str
    resumption: Resumption | None = None
    record: Record | None = None
    shown_tokens: frozenset[str] = frozenset()  # special tokens that the detokenizer keeps in the text

    @property
    def key(self) -> str:
        return journal_key(self.tenant, self.request.request_id, self.resume_token)

    @property
    def choices(self) -> int:
        """Number of choices whose end the client has not received."""
        return self.request.n - (len(self.resumption.received.finished) if self.resumption is not None else 0)


class Streams:
    """Open resumable streams of this router. `announce` tells another router that one of its streams continues here."""

    def __init__(self, router_id: bytes, journal: Journal | None, announce: Callable[[bytes, int], None]) -> None:
        self._router_id = router_id
        self._journal = journal
        self._announce = announce
        self._numbers = itertools.count(1)
        self._lives: dict[int, asyncio.Timeout] = {}  # by stream number: timeout that closes the stream
        self._newest: dict[str, int] = {}  # by journal key: number of the newest stream
        self.resumed = 0
        """Number of resumed streams since the start."""

    async def find(self, asked: ResumeRequest, block_tokens: int, groups: BlockGroups = ONE_GROUP) -> Record | None:
        """Return the journal record of a stream to resume; None if there is none or the store does not answer.

        `block_tokens`, `groups`: block size and block groups of the workers.
        """
        if self._journal is None:
            return None
        key = journal_key(asked.tenant, asked.request_id, asked.resume_token)
        living = self._journal.find(key)
        if living is not None:
            return living
        try:
            data = await self._journal.read(key)
        except RegistryUnavailable as error:
            logger.info("journal unavailable: %s; a stream is resumed without its record", error)
            return None
        record = from_bytes(data, asked.tenant, block_tokens) if data is not None else None
        return None if record is None else replace(record, request=replace(record.request, groups=groups))

    def resumption(self, received: ReceivedAnswer, record: Record | None) -> Resumption:
        """Return how the stream resumes. If the earlier stream is still open here, its answer is not adopted, because
        closing the earlier stream cancels the answer.
        """
        if record is None or (record.stream in self._lives and record.router_id == self._router_id):
            return Resumption(received)
        return Resumption(received, record.router_id, record.places)

    @contextmanager
    def open(
        self, beginning: Beginning, life: asyncio.Timeout | None, deadline_s: float
    ) -> Iterator[JournalEntry | None]:
        """Open a stream for the duration of the context, and yield its journal entry, if any. `life`: timeout that
        expires when a newer stream of the request begins; None: the stream cannot be resumed.
        """
        if life is None:
            yield None
            return
        key, record, number = beginning.key, beginning.record, next(self._numbers)
        self.end(self._newest.get(key))
        if record is not None and record.router_id != self._router_id:
            self._announce(record.router_id, record.stream)
        self.resumed += beginning.resumption is not None
        self._lives[number], self._newest[key] = life, number
        entry = self._open_entry(beginning, number, deadline_s)
        try:
            yield entry
        finally:
            self._lives.pop(number, None)
            if self._newest.get(key) == number:
                del self._newest[key]
            if entry is not None:
                entry.end()

    def _open_entry(self, beginning: Beginning, number: int, deadline_s: float) -> JournalEntry | None:
        if self._journal is None:
            return None
        seize = beginning.resumption is not None
        model = beginning.chosen.name
        return self._journal.open(beginning.key, number, beginning.request, model, deadline_s, seize)

    def end(self, number: int | None) -> None:
        """Close a stream, if it is open, because a newer stream of the same request has begun."""
        life = self._lives.pop(number, None) if number is not None else None
        if life is not None:
            life.reschedule(asyncio.get_running_loop().time())


def to_bytes(record: Record) -> bytes:
    """Serialise a record for the journal."""
    request = record.request
    return journal_pb2.JournalRecord(
        version=VERSION,
        router_id=record.router_id,
        places=[
            journal_pb2.JournalPlace(
                endpoint=place.endpoint,
                attempt_id=place.attempt_id,
                first_choice=place.first_choice,
                choices=place.choices,
                answered_tokens=place.answered_tokens,
            )
            for place in record.places
        ],
        request_id=request.request_id,
        operation=request.operation.value,
        model=record.model,
        fingerprint=request.fingerprint,
        adapter_digest=request.adapter.digest if request.adapter is not None else "",
        sampling=link_wire.sampling_message(request.sampling, computes_prompt=True),
        cache_root=request.cache_root,
        stop=request.stop,
        n=request.n,
        tells_logprobs=request.logprobs is not None,
        echo=request.echo,
        echo_text=request.echo_text,
        priority=request.priority,
        session=request.session,
        kept_session=link_wire.kept_session_message(
            request.kept_session, request.kept_session.name if request.kept_session is not None else ""
        ),
        stream=record.stream,
        versions=link_wire.versions_message(OWN),
        ttft_slo_ms=_finite(request.objectives.ttft_ms),
        tbt_slo_ms=_finite(request.objectives.tbt_ms),
    ).SerializeToString() + field(_TOKEN_IDS, request.packed_tokens)


def from_bytes(data: bytes, tenant: str, block_tokens: int) -> Record | None:
    """Parse a journal record of the caller `tenant`. If it is unreadable, log a warning and return None.

    The client can then resume by sending its request again with the tokens that it has.
    """
    record = journal_pb2.JournalRecord()
    try:
        record.ParseFromString(data)
        _BOUNDS.check(record)
        if record.version != VERSION or len(record.cache_root) != HASH_BYTES:
            raise ValueError(
                f"version {record.version}, cache root of {len(record.cache_root)} bytes; "
                f"expected version {VERSION}, {HASH_BYTES} bytes"
            )
        request = _request(record, tenant, block_tokens)
    except Exception as error:  # noqa: BLE001 -- foreign input
        writer = link_wire.versions_of(record.versions)
        logger.warning("unreadable journal record ignored: written by %s, read by %s: %s", writer, OWN, error)
        return None
    places = tuple(
        AttemptLocation(place.endpoint, place.attempt_id, place.first_choice, place.choices, place.answered_tokens)
        for place in record.places
    )
    return Record(record.router_id, record.stream, request, record.model, places)


def _request(record: journal_pb2.JournalRecord, tenant: str, block_tokens: int) -> PreparedRequest:
    sampling, token_ids = _sampling(record.sampling), tuple(record.token_ids)
    return PreparedRequest(
        operation=Operation(record.operation),
        prompt=TokenPrompt(token_ids),
        request_id=record.request_id,
        sampling=sampling,
        stop=tuple(record.stop),
        n=record.n,
        logprobs=sampling.logprobs if record.tells_logprobs else None,
        echo=record.echo,
        priority=record.priority,
        tenant=tenant,
        session=record.session,
        kept_session=_kept_session(record.kept_session) if record.HasField("kept_session") else None,
        token_ids=token_ids,
        packed_tokens=TokenPacker().pack(token_ids),
        cache_root=record.cache_root,
        block_hashes=block_hashes(record.cache_root, token_ids, block_tokens),
        fingerprint=record.fingerprint,
        block_tokens=block_tokens,
        echo_text=record.echo_text,
        adapter=_adapter(record),
        objectives=LatencyObjectives(
            record.ttft_slo_ms if record.HasField("ttft_slo_ms") else math.inf,
            record.tbt_slo_ms if record.HasField("tbt_slo_ms") else math.inf,
        ),
    )


def _finite(slo_ms: float) -> float | None:
    return None if math.isinf(slo_ms) else slo_ms


def _adapter(record: journal_pb2.JournalRecord) -> Adapter | None:
    """Return the adapter of the recorded request, or the weights that replaced the model's own; None without either."""
    if not record.adapter_digest:
        return None
    return Adapter(WEIGHTS if is_weights(record.adapter_digest) else record.model, record.adapter_digest)


def _kept_session(message: kept_session_pb2.KeptSession) -> KeptSession:
    keep_for_s = message.keep_for_s if message.HasField("keep_for_s") else None
    return KeptSession(message.name, message.id, message.owner, keep_for_s, message.done)


def _sampling(message: sampling_pb2.Sampling) -> Sampling:
    """Read sampling parameters that `sampling_message` wrote. Raises: KeyError for an unknown enum value."""
    form = message.structured
    return Sampling(
        max_tokens=message.max_tokens,
        **received_numbers(message),
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        n=message.n,
        rules=LogitRules(
            logit_bias=dict(message.logit_bias),
            allowed_token_ids=tuple(message.allowed_token_ids),
            bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        ),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        beams=_beams(message),
        structured=StructuredOutput(_KINDS[form.kind], form.text) if message.HasField("structured") else None,
        most_drafted=message.most_drafted if message.HasField("most_drafted") else None,
    )


def _beams(message: sampling_pb2.Sampling) -> BeamParams | None:
    if not message.beam_width:
        return None
    stop: BeamStop = _BEAM_STOPS[message.beam_stop]
    return BeamParams(message.beam_width, message.length_penalty, stop)

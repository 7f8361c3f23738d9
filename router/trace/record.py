"""The record of one request: its attempts, when things happened to it, the stages that follow, and how it ended. Pure.

TTFT            = router queue + route + prefill fetch + prefill queue + chunks + return
token 1 to 2    = recovery + exposed transfer + decode admission + first step

Where decode's message overtakes prefill's, both tokens come at once: what lay between them is in the return.
"""

import asyncio
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import grpc

from baton.process.errors import Aborted, BatonError
from baton.process.telemetry.spans import WallClock
from baton.process.telemetry.trace_context import TraceContext, new_trace
from baton.router.cache.autopsy import NOWHERE, CacheLook, Held
from baton.router.placement.decide import Decision, Placement
from baton.router.types.events import (
    NO_DRAFTS,
    Drafts,
    Failed,
    FirstStep,
    KvReceived,
    Made,
    NewTokens,
    PrefillTimings,
    WorkerGap,
)
from baton.router.types.placement import PlacementRequest
from baton.router.types.request import Operation, PreparedRequest
from baton.router.types.response import AnswerEvent, Stages, Summary
from baton.text.causes import CausePart, StallCause

KEPT_CANDIDATES = 128
"""Of one attempt: all that a placement looks at but where a large cluster has hardly any room."""


@dataclass(slots=True)
class AttemptNote:
    """One attempt: filled in as it proceeds. Seconds, monotonic."""

    request: PlacementRequest
    placement: Placement
    decision: Decision | None  # None: it is adopted
    began_s: float
    placed_s: float
    first_step_s: float | None = None  # its first token arrived
    prefill: PrefillTimings | None = None
    kv_received: KvReceived | None = None
    failed: Failed | None = None
    failed_s: float | None = None
    stood_still_ms: float | None = None  # how long the client waited for its next token, where tokens were out before
    attempt_id: int = 0
    choice: int | None = None  # the only one that it continues; None: all of the request
    answered_tokens: int = 0  # that had been given out when it began
    look: CacheLook | None = None  # at the cache of the worker that computes the prompt; None: none was to be used

    @property
    def is_adopted(self) -> bool:
        """Its worker has the answer already, and another router placed it: it has no first token of its own."""
        return self.decision is None


KEPT_LONG_GAPS = 1024  # of one request, with their causes
LEAST_LONG_MS = 5.0
KEPT_WAITS = 4096  # of one attempt


@dataclass(frozen=True, slots=True)
class Stall:
    """A gap between two tokens of one choice that stands out. `usual_ms` and the causes add up to it."""

    at_s: float  # its end
    gap_ms: float
    choice: int = 0
    usual_ms: float = 0.0
    causes: tuple[CausePart, ...] = ()  # longest first


@dataclass(frozen=True, slots=True)
class GapSummary:
    """Time between tokens (TBT) on the router, from the second token on."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    stalls: tuple[Stall, ...]  # the longest, in order
    stall_count: int  # of all stalls


class _Wait(NamedTuple):
    """Seconds, the first two by the worker's clock."""

    began_s: float
    ended_s: float
    parts: tuple[CausePart, ...]


class WorkerWaits:
    """When the worker of an attempt did something else. Its tokens leave late then, and say so only when they come.

    The worker's clock is placed by the message that came fastest: all others took longer by what they waited.
    """

    def __init__(self) -> None:
        self._ahead_s = math.inf  # this clock, of the worker's, and the fastest way
        self._waits: list[_Wait] = []
        self._last: tuple[float, float] | None = None  # when the newest token was made, and sent

    def take(self, made: Made, now: float) -> None:
        """A token of it has arrived."""
        made_s, sent_s = made.at_us / 1e6, (made.at_us + made.held_us) / 1e6
        self._ahead_s = min(self._ahead_s, now - sent_s)
        if self._last is not None and len(self._waits) < KEPT_WAITS:
            last_made_s, last_sent_s = self._last
            self._note(last_sent_s, sent_s, made.since)
            self._note(made_s, sent_s, _of_process(made.held))
            self._note(last_made_s, made_s, () if made.gap is None else _of_process(made.gap.causes))
        self._last = made_s, sent_s

    def _note(self, began_s: float, ended_s: float, parts: tuple[CausePart, ...]) -> None:
        if parts and ended_s > began_s:
            self._waits.append(_Wait(began_s, ended_s, parts))

    def between(self, began_s: float, ended_s: float) -> Iterator[CausePart]:
        """Between two moments of this clock; of a wait that overlaps, the overlap's share."""
        for wait in self._waits:
            first_s, last_s = wait.began_s + self._ahead_s, wait.ended_s + self._ahead_s
            overlap_s = min(last_s, ended_s) - max(first_s, began_s)
            if overlap_s > 0.0:
                share = overlap_s / (last_s - first_s)
                yield from (part._replace(ms=part.ms * share) for part in wait.parts)


def _of_process(causes: tuple[CausePart, ...]) -> tuple[CausePart, ...]:
    """Those that held up whatever the worker had still to send."""
    return tuple(part for part in causes if part.cause in (StallCause.STOPPED, StallCause.LOCK)) if causes else ()


class LongGap(NamedTuple):
    """Between the arrivals of two tokens, or of tokens that came together. Monotonic seconds."""

    began_s: float
    ended_s: float
    choice: int
    gap_ms: float
    on_worker_ms: float | None  # None: not known
    held_more_ms: float  # by the worker's event loop than the token before
    gap: WorkerGap | None
    held: tuple[CausePart, ...]  # why, where it was long
    waits: WorkerWaits
    lost_worker: str | None  # another worker took over from that one


class TokenGaps:
    """Time between consecutive tokens of each choice, as they arrive from decode."""

    def __init__(self, least_ms: float = LEAST_LONG_MS) -> None:
        """`least_ms`: of gaps whose causes are kept."""
        self._least_ms = least_ms
        self._last_s: dict[int, float] = {}
        self._last_made: dict[int, Made] = {}
        self._gaps_ms = array("d")
        self._pauses_ms = array("d")
        self._waits = WorkerWaits()
        self.long: list[LongGap] = []
        """Those above `least_ms`; of very many, some of the longest."""

    def take(self, choice: int, tokens: int, now: float, made: Made | None = None) -> None:
        """Several tokens at once, as accepted drafts are, share the time since the last one: their reader's pause."""
        self._take(choice, tokens, now, made, None)

    def last_s(self, choice: int) -> float | None:
        return self._last_s.get(choice)

    def resume(self, choice: int, last_s: float, now: float, lost_worker: str = "") -> None:
        """The first token of another attempt, which comes from the worker that computed the prompt."""
        self._last_s[choice] = last_s
        self._waits = WorkerWaits()
        self._take(choice, 1, now, None, lost_worker)

    @property
    def each_ms(self) -> list[float]:
        """All of them, in the order of their ends."""
        return list(self._gaps_ms)

    @property
    def pauses_ms(self) -> list[float]:
        """Times in which nothing came of a choice, in the order of their ends; as many as gaps where no tokens came
        together.
        """
        return list(self._pauses_ms)

    def newest_ms(self, count: int) -> "array[float]":
        """The last ones of them, at most `count`, in order."""
        return self._gaps_ms[-count:]

    def _take(self, choice: int, tokens: int, now: float, made: Made | None, lost_worker: str | None) -> None:
        last_s, last_made = self._last_s.get(choice), self._last_made.pop(choice, None)
        self._last_s[choice] = now
        if made is not None:
            self._last_made[choice] = made
            self._waits.take(made, now)
        if last_s is None:
            return
        pause_ms = (now - last_s) * 1e3
        self._pauses_ms.append(pause_ms)
        for _ in range(tokens):
            self._gaps_ms.append(pause_ms / tokens)
        if pause_ms > self._least_ms:
            on_worker_ms, held_ms = _on_worker(last_made, made)
            gap, held = (None, ()) if made is None else (made.gap, made.held)
            self._keep(
                LongGap(last_s, now, choice, pause_ms, on_worker_ms, held_ms, gap, held, self._waits, lost_worker)
            )

    def _keep(self, gap: LongGap) -> None:
        self.long.append(gap)
        if len(self.long) > KEPT_LONG_GAPS:
            longest = sorted(self.long, key=lambda each: -each.gap_ms)[: KEPT_LONG_GAPS // 2]
            self.long = sorted(longest, key=lambda each: each.ended_s)


def _on_worker(last: Made | None, made: Made | None) -> tuple[float | None, float]:
    """Of the gap, and how much longer its token was held than the one before, milliseconds."""
    if last is None or made is None:
        return None, 0.0
    return (made.at_us - last.at_us) / 1e3, (made.held_us - last.held_us) / 1e3


@dataclass(frozen=True, slots=True)
class Resume:
    """Another attempt continued a choice of which some tokens were out."""

    at_s: float
    gap_ms: float  # since its last token
    choice: int
    offset: int  # of the first token that it made


@dataclass(slots=True)
class Timeline:
    """Filled in as the request proceeds. Seconds, monotonic.

    A retried request keeps its last attempt; but once its first token went out, the stages up to that token stay, and
    so do those of the second. The time in which another attempt made the first token again, or the second, counts as
    recovery. Later gaps of that kind are `resumes`.
    """

    arrived_s: float
    streams: bool = True  # tokens leave as they come; otherwise the first one counts as gone when it arrives
    tokenised_s: float | None = None
    route_began_s: float | None = None  # the head of the queue, about to be placed
    sent_s: float | None = None
    first_step_s: float | None = None
    prefill: PrefillTimings | None = None
    kv_received: KvReceived | None = None
    first_token_s: float | None = None  # the first token left the router
    resumed_step_s: float | None = None  # the first step of another attempt, when the first token was out already
    second_token_s: float | None = None  # the first output of decode arrived
    last_token_s: float | None = None
    ended_s: float | None = None
    detokenise_ms: float = 0.0
    placement: Placement | None = None
    attempts: int = 0
    prefill_pid: int = 0
    decode_pid: int = 0
    gaps: TokenGaps = field(default_factory=TokenGaps)
    drafts: Drafts = NO_DRAFTS
    notes: list[AttemptNote] = field(default_factory=list)  # of all attempts, for a client that asks why
    resumes: list[Resume] = field(default_factory=list)
    pooled: tuple[float, ...] = ()  # the vector that the prompt was computed for
    _staged: int = 0  # the attempt whose KvReceived is a stage between the first token and the second

    def begin_attempt(self, note: AttemptNote, route_began_s: float) -> None:
        """A retry before the first token starts over; the time that the failed attempt took counts as queueing."""
        self.notes.append(note)
        self.placement = note.placement
        self.attempts += 1
        if self.first_token_s is None:
            self.route_began_s = route_began_s
            self.sent_s = self.first_step_s = self.prefill = None
        if note.answered_tokens == 0 and note.choice is None:
            self.second_token_s = self.kv_received = None
            self.gaps, self.drafts = TokenGaps(), NO_DRAFTS
            self._staged = note.attempt_id

    def dispatched(self, now: float) -> None:
        if self.first_token_s is None:
            self.sent_s = now

    def take_first_step(self, first_step: FirstStep, now: float) -> None:
        note = self._note(first_step.attempt_id)
        self.pooled = first_step.pooled
        self._first_token_arrived(note, now)
        if note is not None:
            note.prefill = first_step.timings
            if note.first_step_s == self.first_step_s:
                self.prefill = first_step.timings

    def take_kv_received(self, kv_received: KvReceived) -> None:
        if kv_received.attempt_id == self._staged:
            self.kv_received = kv_received
        note = self._note(kv_received.attempt_id)
        if note is not None:
            note.kv_received = kv_received

    def take_failure(self, failed: Failed, now: float) -> AttemptNote | None:
        """Returns the attempt's note."""
        note = self._note(failed.attempt_id)
        if note is not None:
            note.failed, note.failed_s = failed, now
        return note

    @property
    def is_overtaken(self) -> bool:
        """The first token came with the second: decode's message overtook prefill's. Nothing lies between the two."""
        return self.second_token_s is not None and self.second_token_s == (self.resumed_step_s or self.first_step_s)

    @property
    def last_kv_received(self) -> KvReceived | None:
        """Of the newest attempt that has reported it."""
        return next((note.kv_received for note in reversed(self.notes) if note.kv_received is not None), None)

    def _note(self, attempt_id: int) -> AttemptNote | None:
        return next((note for note in reversed(self.notes) if note.attempt_id == attempt_id), None)

    def _first_token_arrived(self, note: AttemptNote | None, now: float) -> None:
        """The first of an attempt. Decode repeats what prefill has sent, and its message may overtake prefill's."""
        if note is None or note.is_adopted or note.first_step_s is not None:
            return
        note.first_step_s = now
        if note.answered_tokens:
            self._take_resumed(note, now)
        if self.first_step_s is None:
            self.first_step_s = now
            if not self.streams:
                self.first_token_s = now
        elif self.second_token_s is None:
            self.resumed_step_s = now
            if note.answered_tokens:
                self.second_token_s = now

    def _take_resumed(self, note: AttemptNote, now: float) -> None:
        """An answer continues. The gap is the one that its reader saw."""
        choice = note.choice or 0
        last_s = self.gaps.last_s(choice) or self.first_step_s or now
        note.stood_still_ms = (now - last_s) * 1e3
        self.resumes.append(Resume(now, note.stood_still_ms, choice, note.answered_tokens))
        failed = next((each.failed for each in reversed(self.notes) if each.failed is not None), None)
        self.gaps.resume(choice, last_s, now, failed.endpoint if failed is not None else "")

    def take_decode_output(
        self, attempt_id: int, choice: int, offset: int, tokens: int, now: float, made: Made | None = None
    ) -> None:
        """`offset` from where its attempt began. Decode repeats token 0: only later tokens are its own."""
        if offset <= 0 < offset + tokens:
            self._first_token_arrived(self._note(attempt_id), now)
        if made is not None and made.drafts is not NO_DRAFTS:
            self.drafts = self.drafts.plus(made.drafts)
        if offset + tokens > 1:
            if self.second_token_s is None:
                self.second_token_s = now
            self.last_token_s = now
            self.gaps.take(choice, offset + tokens - max(offset, 1), now, made)


def stages(timeline: Timeline, now: float) -> Stages:
    """`now` stands for the end while there is none."""
    prefill, kv_received = timeline.prefill, None if timeline.is_overtaken else timeline.kv_received
    return Stages(
        ttft_ms=_between_ms(timeline.arrived_s, timeline.first_token_s),
        total_ms=_between_ms(timeline.arrived_s, timeline.ended_s or now),
        router_queue_ms=_between_ms(timeline.arrived_s, timeline.route_began_s),
        route_ms=_between_ms(timeline.route_began_s, timeline.sent_s),
        prefill_fetch_ms=prefill.fetch_ms if prefill else 0.0,
        # All other waiting on the worker: before the first chunk, and between chunks while others are computed.
        prefill_queue_ms=_prefill_queue_ms(prefill) if prefill else 0.0,
        prefill_ms=sum(prefill.chunk_ms) if prefill else 0.0,
        return_ms=_return_ms(timeline),
        transfer_exposed_ms=kv_received.exposed_ms if kv_received else 0.0,
        decode_admission_ms=kv_received.admission_ms if kv_received else 0.0,
        first_step_ms=kv_received.first_step_ms if kv_received else _local_first_step_ms(timeline),
        recovery_ms=_between_ms(timeline.first_step_s, timeline.resumed_step_s),
        token_gap_ms=_between_ms(timeline.first_step_s, timeline.second_token_s),
    )


def _prefill_queue_ms(prefill: PrefillTimings) -> float:
    return max(prefill.queue_ms, prefill.total_ms - sum(prefill.chunk_ms)) - prefill.fetch_ms


def _local_first_step_ms(timeline: Timeline) -> float:
    """Where the decode worker computed the prompt nothing lies between its first and its second step."""
    if timeline.placement is None or timeline.placement.prefill is not None:
        return 0.0
    return _between_ms(timeline.resumed_step_s or timeline.first_step_s, timeline.second_token_s)


def _return_ms(timeline: Timeline) -> float:
    """All of the way where no message of prefill came: how long it took is not known."""
    on_worker_ms = 0.0 if timeline.prefill is None else timeline.prefill.total_ms
    return _between_ms(timeline.sent_s, timeline.first_token_s or timeline.first_step_s) - on_worker_ms


def under_way_ms(timeline: Timeline) -> float:
    """To the worker that computed the prompt and back, without the time spent there."""
    if timeline.prefill is None:
        return 0.0
    return _between_ms(timeline.sent_s, timeline.first_step_s) - timeline.prefill.total_ms


def _between_ms(begin_s: float | None, end_s: float | None) -> float:
    return 0.0 if begin_s is None or end_s is None else (end_s - begin_s) * 1e3


class AnswerStream(Protocol):
    """An Answer, or a wrapper of one."""

    @property
    def done(self) -> bool: ...
    @property
    def completion_tokens(self) -> int: ...
    def has_finished(self, index: int) -> bool: ...
    def take(self, new_tokens: NewTokens) -> Sequence[AnswerEvent]: ...


_UNEXPECTED = "unexpected"
_POISON = "poison"


class Outcome(StrEnum):
    ANSWERED = "answered"
    CANCELLED = "cancelled"  # its reader wanted no more of it, or was disconnected
    REFUSED = "refused"  # before any worker was given it
    FAILED = "failed"


class Leave(StrEnum):
    """Why a request was cancelled."""

    CLIENT = "client"  # cancelled the call, or closed the connection
    STALLED = "client_stalled"  # took nothing of the answer for too long
    SUPERSEDED = "superseded"  # another stream of the same request continues
    SIBLING = "sibling_failed"  # another prompt of the same call
    STOPPING = "router_stopped"


@dataclass(slots=True)
class Reader:
    """The reader of the answers to one call."""

    requests: int = 0
    """Requests that were begun for it: an end of the call before that is counted with none of them."""
    leaves: Leave = Leave.CLIENT
    """Why, if it leaves before the end. To be set by the one that makes it leave."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    outcome: Outcome
    reason: str = ""  # a lower-case word out of few; empty where it was answered
    status: str = "OK"  # name of the gRPC status

    @property
    def error(self) -> str | None:
        """The status, None where all is well."""
        return None if self.outcome is Outcome.ANSWERED else self.status


ANSWERED = RequestEnd(Outcome.ANSWERED)


def left(leaves: Leave) -> RequestEnd:
    return RequestEnd(Outcome.CANCELLED, leaves.value, "CANCELLED")


def end_of(error: BaseException, dispatched: bool) -> RequestEnd:
    """`dispatched`: a worker was given it. An error that is no BatonError is a fault of this program."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return left(Leave.CLIENT)
    if not isinstance(error, BatonError):
        return RequestEnd(Outcome.FAILED, _UNEXPECTED, grpc.StatusCode.INTERNAL.name)
    if isinstance(error, Aborted):
        return RequestEnd(Outcome.CANCELLED, error.cause, error.code.name)
    ours = error.code is grpc.StatusCode.INTERNAL and error.cause != _POISON
    return RequestEnd(Outcome.FAILED if dispatched or ours else Outcome.REFUSED, error.cause, error.code.name)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Filled in on the request's way. `identity` is the root span's place in the trace."""

    operation: Operation
    parent: TraceContext | None
    identity: TraceContext
    clock: WallClock
    timeline: Timeline
    model: str = ""
    version: str = ""  # of its weights
    tenant: str = ""  # the caller: the name of its API key, where there are keys
    prepared: PreparedRequest | None = None
    finish_reasons: list[str] = field(default_factory=list)
    ended_choices: list[int] = field(default_factory=list)  # in the same order
    is_streamed: bool = True  # the client reads the answer as it comes
    summary: Summary | None = None
    is_resumed: bool = False  # an answer that began in another stream
    answer: AnswerStream | None = None
    delivered_tokens: int = 0  # of deltas that went out
    end: RequestEnd | None = None  # None: it runs
    gaps: GapSummary | None = None  # once it has ended, where it had two tokens from decode

    salted: Held = NOWHERE  # blocks cached under another salt, once it has completed

    @property
    def name(self) -> str:
        """Name of the trace's root, such as `chat tiny`."""
        return f"{self.operation.value} {self.model}".rstrip()

    @property
    def error(self) -> str | None:
        """Name of the status that it ended with; None is OK."""
        return self.end.error if self.end is not None else None

    @property
    def prompt_tokens(self) -> int:
        """That a worker was given for this request, and not for one that it resumes."""
        given = self.prepared is not None and self.timeline.attempts and not self.is_resumed
        return len(self.prepared.token_ids) if self.prepared is not None and given else 0

    @property
    def completion_tokens(self) -> int:
        """Tokens that went out; of an answer that is sent only at its end, tokens that were made. Those that the client
        of a resumed stream had before are not included.
        """
        whole_at_once = self.prepared is not None and not self.prepared.streams
        return self.answer.completion_tokens if whole_at_once and self.answer is not None else self.delivered_tokens

    @staticmethod
    def begin(operation: Operation, parent: TraceContext | None) -> "RequestRecord":
        clock = WallClock.now()
        identity = parent.child() if parent else new_trace()
        return RequestRecord(operation, parent, identity, clock, Timeline(arrived_s=clock.monotonic_s))

"""Record of one request: attempts, times of events, the stages between them, and the outcome. Pure.

TTFT            = router queue + route + prefill fetch + prefill queue + chunks + return
token 1 to 2    = recovery + exposed transfer + decode admission + first step

If decode's message overtakes prefill's, both tokens arrive together and the time between them is part of the return.
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

KEPT_CANDIDATES = 128  # per attempt; a placement rarely considers more


@dataclass(slots=True)
class AttemptNote:
    """Attempt of a request, filled in as it proceeds. Times are monotonic seconds."""

    request: PlacementRequest
    placement: Placement
    decision: Decision | None  # None: adopted
    began_s: float
    placed_s: float
    first_step_s: float | None = None  # arrival of its first token
    prefill: PrefillTimings | None = None
    kv_received: KvReceived | None = None
    failed: Failed | None = None
    failed_s: float | None = None
    stood_still_ms: float | None = None  # client's wait for the next token, if tokens were delivered before
    attempt_id: int = 0
    choice: int | None = None  # the choice that it continues; None: all
    answered_tokens: int = 0  # delivered before it began
    look: CacheLook | None = None  # at the cache of the worker that computes the prompt; None: unused

    @property
    def is_adopted(self) -> bool:
        """True if another router placed it: its worker has the answer already, and sends no first token."""
        return self.decision is None


KEPT_LONG_GAPS = 1024  # per request
MIN_LONG_GAP_MS = 5.0
KEPT_WAITS = 4096  # per attempt


@dataclass(frozen=True, slots=True)
class Stall:
    """Long gap between two tokens of one choice: the sum of `usual_ms` and the causes."""

    at_s: float  # end of the gap
    gap_ms: float
    choice: int = 0
    usual_ms: float = 0.0
    causes: tuple[CausePart, ...] = ()  # longest first


@dataclass(frozen=True, slots=True)
class GapSummary:
    """Time between tokens (TBT) at the router, from the second token on."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    stalls: tuple[Stall, ...]  # the longest, in order of time
    stall_count: int


class _Wait(NamedTuple):
    """Delay on a worker, in seconds of its clock."""

    began_s: float
    ended_s: float
    parts: tuple[CausePart, ...]


class WorkerWaits:
    """Periods in which an attempt's worker was delayed, as its tokens report afterwards.

    The fastest message defines the offset of the worker's clock; every other one took longer by its wait.
    """

    def __init__(self) -> None:
        self._offset_s = math.inf  # offset from the worker's clock to this one, fastest transit included
        self._waits: list[_Wait] = []
        self._last: tuple[float, float] | None = None  # generation and sending of the newest token

    def add(self, made: Made, now: float) -> None:
        """Add what a token reports on arrival."""
        made_s, sent_s = made.at_us / 1e6, (made.at_us + made.held_us) / 1e6
        self._offset_s = min(self._offset_s, now - sent_s)
        if self._last is not None and len(self._waits) < KEPT_WAITS:
            last_made_s, last_sent_s = self._last
            self._add(last_sent_s, sent_s, made.since)
            self._add(made_s, sent_s, _of_process(made.held))
            self._add(last_made_s, made_s, () if made.gap is None else _of_process(made.gap.causes))
        self._last = made_s, sent_s

    def _add(self, began_s: float, ended_s: float, parts: tuple[CausePart, ...]) -> None:
        if parts and ended_s > began_s:
            self._waits.append(_Wait(began_s, ended_s, parts))

    def between(self, began_s: float, ended_s: float) -> Iterator[CausePart]:
        """Yield the delays between two times of this clock, each in proportion to its overlap."""
        for wait in self._waits:
            first_s, last_s = wait.began_s + self._offset_s, wait.ended_s + self._offset_s
            overlap_s = min(last_s, ended_s) - max(first_s, began_s)
            if overlap_s > 0.0:
                share = overlap_s / (last_s - first_s)
                yield from (part._replace(ms=part.ms * share) for part in wait.parts)


def _of_process(causes: tuple[CausePart, ...]) -> tuple[CausePart, ...]:
    """Return the causes that delayed everything that the worker had to send."""
    return tuple(part for part in causes if part.cause in (StallCause.STOPPED, StallCause.LOCK)) if causes else ()


class LongGap(NamedTuple):
    """Gap between the arrivals of two tokens, or of groups that arrived together. Monotonic seconds."""

    began_s: float
    ended_s: float
    choice: int
    gap_ms: float
    on_worker_ms: float | None  # None: unknown
    held_more_ms: float  # delay in the worker's event loop beyond that of the token before
    gap: WorkerGap | None
    held: tuple[CausePart, ...]  # causes of a long delay there
    waits: WorkerWaits
    lost_worker: str | None  # the worker that another one replaced


class TokenGaps:
    """Time between consecutive tokens of each choice, on arrival from decode."""

    def __init__(self, least_ms: float = MIN_LONG_GAP_MS) -> None:
        """Keep the causes of gaps above `least_ms`."""
        self._least_ms = least_ms
        self._last_s: dict[int, float] = {}
        self._last_made: dict[int, Made] = {}
        self._gaps_ms = array("d")
        self._pauses_ms = array("d")
        self._waits = WorkerWaits()
        self.long: list[LongGap] = []
        """Gaps above `least_ms`; the longest if there are too many."""

    def add(self, choice: int, tokens: int, now: float, made: Made | None = None) -> None:
        """Add tokens that arrived. Those that arrive together, such as accepted drafts, share the pause before."""
        self._add(choice, tokens, now, made, None)

    def last_s(self, choice: int) -> float | None:
        """Return the arrival of a choice's last token."""
        return self._last_s.get(choice)

    def resume(self, choice: int, last_s: float, now: float, lost_worker: str = "") -> None:
        """Add the first token of another attempt, which the worker that computed the prompt sends."""
        self._last_s[choice] = last_s
        self._waits = WorkerWaits()
        self._add(choice, 1, now, None, lost_worker)

    @property
    def each_ms(self) -> list[float]:
        """Gaps in order of time."""
        return list(self._gaps_ms)

    @property
    def pauses_ms(self) -> list[float]:
        """Pauses without a token of a choice, in order of time; fewer than gaps if tokens arrived together."""
        return list(self._pauses_ms)

    def newest_ms(self, count: int) -> "array[float]":
        """Return the last `count` gaps."""
        return self._gaps_ms[-count:]

    def _add(self, choice: int, tokens: int, now: float, made: Made | None, lost_worker: str | None) -> None:
        last_s, last_made = self._last_s.get(choice), self._last_made.pop(choice, None)
        self._last_s[choice] = now
        if made is not None:
            self._last_made[choice] = made
            self._waits.add(made, now)
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
    """Return a gap's length on the worker, and how much longer its token was held there than the one before, ms."""
    if last is None or made is None:
        return None, 0.0
    return (made.at_us - last.at_us) / 1e3, (made.held_us - last.held_us) / 1e3


@dataclass(frozen=True, slots=True)
class Resume:
    """Continuation of a choice by another attempt after tokens were delivered."""

    at_s: float
    gap_ms: float  # time since the choice's last token
    choice: int
    offset: int  # position of the attempt's first token


@dataclass(slots=True)
class Timeline:
    """Times of a request, filled in as it proceeds. Monotonic seconds.

    A retry replaces the times of the attempt before, except for stages up to a token that was delivered. Time to
    generate the first or second token again counts as recovery; later gaps of that kind are `resumes`.
    """

    arrived_s: float
    streams: bool = True  # else the first token counts as delivered on arrival
    tokenised_s: float | None = None
    route_began_s: float | None = None  # head of the queue
    sent_s: float | None = None
    first_step_s: float | None = None
    prefill: PrefillTimings | None = None
    kv_received: KvReceived | None = None
    first_token_s: float | None = None  # delivery of the first token
    resumed_step_s: float | None = None  # first step of another attempt after the first token's delivery
    second_token_s: float | None = None  # arrival of decode's first output
    last_token_s: float | None = None
    ended_s: float | None = None
    detokenise_ms: float = 0.0
    placement: Placement | None = None
    attempts: int = 0
    prefill_pid: int = 0
    decode_pid: int = 0
    gaps: TokenGaps = field(default_factory=TokenGaps)
    drafts: Drafts = NO_DRAFTS
    notes: list[AttemptNote] = field(default_factory=list)  # all attempts
    resumes: list[Resume] = field(default_factory=list)
    pooled: tuple[float, ...] = ()  # vector of an embedding
    _staged: int = 0  # attempt whose KvReceived counts between the first and second token

    def begin_attempt(self, note: AttemptNote, route_began_s: float) -> None:
        """Begin an attempt. Before the first token, the time of a failed attempt counts as queueing."""
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
        """Record the dispatch to workers."""
        if self.first_token_s is None:
            self.sent_s = now

    def take_first_step(self, first_step: FirstStep, now: float) -> None:
        """Record an attempt's first step."""
        note = self._attempt(first_step.attempt_id)
        self.pooled = first_step.pooled
        self._first_token_arrived(note, now)
        if note is not None:
            note.prefill = first_step.timings
            if note.first_step_s == self.first_step_s:
                self.prefill = first_step.timings

    def take_kv_received(self, kv_received: KvReceived) -> None:
        """Record the end of an attempt's transfer."""
        if kv_received.attempt_id == self._staged:
            self.kv_received = kv_received
        note = self._attempt(kv_received.attempt_id)
        if note is not None:
            note.kv_received = kv_received

    def take_failure(self, failed: Failed, now: float) -> AttemptNote | None:
        """Record an attempt's failure and return its note."""
        note = self._attempt(failed.attempt_id)
        if note is not None:
            note.failed, note.failed_s = failed, now
        return note

    @property
    def is_overtaken(self) -> bool:
        """True if decode's message overtook prefill's, so that first and second token arrived together."""
        return self.second_token_s is not None and self.second_token_s == (self.resumed_step_s or self.first_step_s)

    @property
    def last_kv_received(self) -> KvReceived | None:
        """End of the newest transfer that was reported."""
        return next((note.kv_received for note in reversed(self.notes) if note.kv_received is not None), None)

    def _attempt(self, attempt_id: int) -> AttemptNote | None:
        return next((note for note in reversed(self.notes) if note.attempt_id == attempt_id), None)

    def _first_token_arrived(self, note: AttemptNote | None, now: float) -> None:
        """Record an attempt's first token once, though decode repeats it and may overtake prefill."""
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
        """Record that an answer continues, and the gap that its reader saw."""
        choice = note.choice or 0
        last_s = self.gaps.last_s(choice) or self.first_step_s or now
        note.stood_still_ms = (now - last_s) * 1e3
        self.resumes.append(Resume(now, note.stood_still_ms, choice, note.answered_tokens))
        failed = next((each.failed for each in reversed(self.notes) if each.failed is not None), None)
        self.gaps.resume(choice, last_s, now, failed.endpoint if failed is not None else "")

    def take_decode_output(
        self, attempt_id: int, choice: int, offset: int, tokens: int, now: float, made: Made | None = None
    ) -> None:
        """Record decode's tokens, of which token 0 repeats prefill's. `offset`: from the attempt's first token."""
        if offset <= 0 < offset + tokens:
            self._first_token_arrived(self._attempt(attempt_id), now)
        if made is not None and made.drafts is not NO_DRAFTS:
            self.drafts = self.drafts.plus(made.drafts)
        if offset + tokens > 1:
            if self.second_token_s is None:
                self.second_token_s = now
            self.last_token_s = now
            self.gaps.add(choice, offset + tokens - max(offset, 1), now, made)


def stages(timeline: Timeline, now: float) -> Stages:
    """Return the stages up to the end, or `now` while the request runs."""
    prefill, kv_received = timeline.prefill, None if timeline.is_overtaken else timeline.kv_received
    return Stages(
        ttft_ms=_between_ms(timeline.arrived_s, timeline.first_token_s),
        total_ms=_between_ms(timeline.arrived_s, timeline.ended_s or now),
        router_queue_ms=_between_ms(timeline.arrived_s, timeline.route_began_s),
        route_ms=_between_ms(timeline.route_began_s, timeline.sent_s),
        prefill_fetch_ms=prefill.fetch_ms if prefill else 0.0,
        # Includes waits between chunks while other requests are computed.
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
    """Return the second step's time if the decode worker computed the prompt, else 0."""
    if timeline.placement is None or timeline.placement.prefill is not None:
        return 0.0
    return _between_ms(timeline.resumed_step_s or timeline.first_step_s, timeline.second_token_s)


def _return_ms(timeline: Timeline) -> float:
    """Return the time in transit; all of it if prefill sent no timings."""
    on_worker_ms = 0.0 if timeline.prefill is None else timeline.prefill.total_ms
    return _between_ms(timeline.sent_s, timeline.first_token_s or timeline.first_step_s) - on_worker_ms


def transit_ms(timeline: Timeline) -> float:
    """Return the time to the worker that computed the prompt and back."""
    if timeline.prefill is None:
        return 0.0
    return _between_ms(timeline.sent_s, timeline.first_step_s) - timeline.prefill.total_ms


def _between_ms(begin_s: float | None, end_s: float | None) -> float:
    return 0.0 if begin_s is None or end_s is None else (end_s - begin_s) * 1e3


class AnswerInProgress(Protocol):
    """Answer, or a wrapper of one."""

    @property
    def done(self) -> bool: ...
    @property
    def completion_tokens(self) -> int: ...
    def has_finished(self, index: int) -> bool: ...
    def take(self, new_tokens: NewTokens) -> Sequence[AnswerEvent]: ...


_UNEXPECTED = "unexpected"
_POISON = "poison"


class RequestOutcome(StrEnum):
    ANSWERED = "answered"
    CANCELLED = "cancelled"  # the reader left
    REFUSED = "refused"  # rejected before it was dispatched
    FAILED = "failed"


class Leave(StrEnum):
    """Cause of a cancellation."""

    CLIENT = "client"  # cancelled the call or closed the connection
    STALLED = "client_stalled"  # read nothing for too long
    SUPERSEDED = "superseded"  # another stream of the same request continues
    SIBLING = "sibling_failed"  # another prompt of the same call
    STOPPING = "router_stopped"


@dataclass(slots=True)
class CallReader:
    """Reader of the answers to one call."""

    requests: int = 0
    """Requests begun for it; a call that ends earlier is counted with none."""
    leaves: Leave = Leave.CLIENT
    """Cause if it leaves early, set by whoever disconnects it."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """End of a request."""

    outcome: RequestOutcome
    reason: str = ""  # one lower-case word; empty if answered
    status: str = "OK"  # name of the gRPC status

    @property
    def error(self) -> str | None:
        """Name of the gRPC status; None if answered."""
        return None if self.outcome is RequestOutcome.ANSWERED else self.status


ANSWERED = RequestEnd(RequestOutcome.ANSWERED)


def left(leaves: Leave) -> RequestEnd:
    """Return the end of a cancelled request."""
    return RequestEnd(RequestOutcome.CANCELLED, leaves.value, "CANCELLED")


def end_of(error: BaseException, dispatched: bool) -> RequestEnd:
    """Return the end for an error; anything but a BatonError is a fault of the router. `dispatched`: to a worker."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return left(Leave.CLIENT)
    if not isinstance(error, BatonError):
        return RequestEnd(RequestOutcome.FAILED, _UNEXPECTED, grpc.StatusCode.INTERNAL.name)
    if isinstance(error, Aborted):
        return RequestEnd(RequestOutcome.CANCELLED, error.cause, error.code.name)
    ours = error.code is grpc.StatusCode.INTERNAL and error.cause != _POISON
    return RequestEnd(
        RequestOutcome.FAILED if dispatched or ours else RequestOutcome.REFUSED, error.cause, error.code.name
    )


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Record of a request, filled in as it proceeds. `identity`: of the trace's root span."""

    operation: Operation
    parent: TraceContext | None
    identity: TraceContext
    clock: WallClock
    timeline: Timeline
    model: str = ""
    version: str = ""  # version of the weights
    tenant: str = ""  # name of the caller's API key
    prepared: PreparedRequest | None = None
    finish_reasons: list[str] = field(default_factory=list)
    ended_choices: list[int] = field(default_factory=list)  # choices in the order of finish_reasons
    is_streamed: bool = True
    summary: Summary | None = None
    is_resumed: bool = False  # continues another stream
    answer: AnswerInProgress | None = None
    delivered_tokens: int = 0
    end: RequestEnd | None = None  # None: running
    gaps: GapSummary | None = None  # once completed, if decode sent two tokens

    salted: Held = NOWHERE  # blocks cached under another salt, once it has completed

    @property
    def name(self) -> str:
        """Name of the trace's root, such as `chat tiny`."""
        return f"{self.operation.value} {self.model}".rstrip()

    @property
    def error(self) -> str | None:
        """Name of the final status, None for OK."""
        return self.end.error if self.end is not None else None

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens dispatched for this request, 0 for a resumed one."""
        given = self.prepared is not None and self.timeline.attempts and not self.is_resumed
        return len(self.prepared.token_ids) if self.prepared is not None and given else 0

    @property
    def completion_tokens(self) -> int:
        """Number of delivered tokens (generated ones if not streaming), without those before a resume."""
        non_streaming = self.prepared is not None and not self.prepared.streams
        return self.answer.completion_tokens if non_streaming and self.answer is not None else self.delivered_tokens

    @staticmethod
    def begin(operation: Operation, parent: TraceContext | None) -> "RequestRecord":
        clock = WallClock.now()
        identity = parent.child() if parent else new_trace()
        return RequestRecord(operation, parent, identity, clock, Timeline(arrived_s=clock.monotonic_s))

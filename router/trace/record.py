"""Record of one request: its attempts, times of events, stages between them, and outcome. Pure state.

TTFT            = router queue + route + prefill fetch + prefill queue + chunks + return
token 1 to 2    = recovery + exposed transfer + decode admission + first step

If the decode worker's message overtakes the prefill worker's, both tokens arrive together, and the time between them is
part of the return.
"""

import asyncio
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
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

KEPT_CANDIDATES = 128  # maximum number of workers recorded per attempt; placements rarely consider more


@dataclass(slots=True)
class AttemptNote:
    """Record of one attempt of a request, filled in as it proceeds. Times are monotonic seconds."""

    request: PlacementRequest
    placement: Placement
    decision: Decision | None  # None: another router placed the attempt
    began_s: float
    placed_s: float
    first_step_s: float | None = None  # arrival of the attempt's first token
    prefill: PrefillTimings | None = None
    kv_received: KvReceived | None = None
    failed: Failed | None = None
    failed_s: float | None = None
    stood_still_ms: float | None = None  # client's wait for this attempt's first token; None: no token delivered before
    attempt_id: int = 0
    choice: int | None = None  # choice that the attempt continues; None: it generates all choices
    answered_tokens: int = 0  # tokens of the answer that were delivered before the attempt
    look: CacheLook | None = None  # known cache state of the computing worker; None: the request excludes cached blocks

    @property
    def is_adopted(self) -> bool:
        """Whether another router placed the attempt: its worker already has the answer, and sends no first token."""
        return self.decision is None


MAX_STALLS = 32  # maximum number of stalls reported per request
MIN_LONG_GAP_MS = 5.0
KEPT_WAITS = 4096  # maximum number of worker delays recorded per attempt


@dataclass(frozen=True, slots=True)
class Stall:
    """Long gap between two tokens of one choice. `gap_ms` is the sum of `usual_ms` and the times of the causes."""

    at_s: float  # end of the gap
    gap_ms: float
    choice: int = 0
    usual_ms: float = 0.0
    causes: tuple[CausePart, ...] = ()  # ordered by duration, longest first


@dataclass(frozen=True, slots=True)
class GapSummary:
    """Summary of a request's gaps between tokens (TBT) at the router, from its second token on."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    stalls: tuple[Stall, ...]  # longest stalls, in chronological order; `stall_count` counts all
    stall_count: int


class _Wait(NamedTuple):
    """Delay on a worker and its causes, in seconds of the worker's clock."""

    began_s: float
    ended_s: float
    parts: tuple[CausePart, ...]


class WorkerWaits:
    """Periods in which an attempt's worker was delayed. They are reported afterwards, with the tokens.

    The message with the fastest transit defines the offset of the worker's clock.
    """

    def __init__(self) -> None:
        self._offset_s = math.inf  # from the worker's clock to this clock, including the fastest transit
        self._waits: list[_Wait] = []
        self._last: Made | None = None  # times of the newest token

    def add(self, made: Made, now: float) -> None:
        """Add the delays that a token reports. `now`: its arrival."""
        offset_s, last = now - made.sent_s, self._last
        if offset_s < self._offset_s:
            self._offset_s = offset_s
        is_delayed = made.since or made.held or made.gap is not None
        if is_delayed and last is not None and len(self._waits) < KEPT_WAITS:
            made_s = made.at_us / 1e6
            self._add(last.sent_s, made.sent_s, made.since)
            self._add(made_s, made.sent_s, _of_process(made.held))
            self._add(last.at_us / 1e6, made_s, () if made.gap is None else _of_process(made.gap.causes))
        self._last = made

    def _add(self, began_s: float, ended_s: float, parts: tuple[CausePart, ...]) -> None:
        if parts and ended_s > began_s:
            self._waits.append(_Wait(began_s, ended_s, parts))

    def between(self, began_s: float, ended_s: float) -> Iterator[CausePart]:
        """Yield causes of delays between two times of this clock. A delay counts in proportion to its overlap."""
        for wait in self._waits:
            first_s, last_s = wait.began_s + self._offset_s, wait.ended_s + self._offset_s
            overlap_s = min(last_s, ended_s) - max(first_s, began_s)
            if overlap_s > 0.0:
                share = overlap_s / (last_s - first_s)
                yield from (part._replace(ms=part.ms * share) for part in wait.parts)


def _of_process(causes: tuple[CausePart, ...]) -> tuple[CausePart, ...]:
    """Return those causes that delayed the complete worker process, not only one token."""
    return tuple(part for part in causes if part.cause in (StallCause.STOPPED, StallCause.LOCK)) if causes else ()


class LongGap(NamedTuple):
    """Gap between the arrivals of two tokens, or of groups of tokens that arrived together. Monotonic seconds.

    Nearly every token of a slow answer constructs one, so causes are read from `made` when they are asked for.
    """

    began_s: float
    ended_s: float
    choice: int
    gap_ms: float
    made_before: Made | None  # times of the token before the gap; None: unknown
    made: Made | None
    waits: WorkerWaits
    lost_worker: str | None  # None: no worker was replaced in this gap

    @property
    def on_worker_ms(self) -> float | None:
        """Length of the gap on the worker; None: unknown."""
        if self.made_before is None or self.made is None:
            return None
        return (self.made.at_us - self.made_before.at_us) / 1e3

    @property
    def held_more_ms(self) -> float:
        """Delay in the worker's event loop, minus the previous token's delay there."""
        if self.made_before is None or self.made is None:
            return 0.0
        return (self.made.held_us - self.made_before.held_us) / 1e3

    @property
    def gap(self) -> WorkerGap | None:
        return None if self.made is None else self.made.gap

    @property
    def held(self) -> tuple[CausePart, ...]:
        """Causes of a long delay in the worker's event loop."""
        return () if self.made is None else self.made.held


@dataclass(slots=True)
class _LastToken:
    """Newest token of a choice. `made`: None if its worker sent no times."""

    at_s: float
    made: Made | None


class TokenGaps:
    """Gaps between consecutive tokens of each choice, by their arrivals from the decode worker."""

    def __init__(self, least_ms: float = MIN_LONG_GAP_MS) -> None:
        """Begin without gaps. Causes are recorded only for gaps above `least_ms`, and of many only for the longest."""
        self._least_ms = least_ms
        self._last: dict[int, _LastToken] = {}
        self._gaps_ms = array("d")
        self._pauses_ms = array("d")
        self._waits = WorkerWaits()
        self.long: list[LongGap] = []
        """Gaps above `least_ms`, with at least the MAX_STALLS longest, in chronological order."""

    def add(
        self, choice: int, tokens: int, now: float, made: Made | None = None, lost_worker: str | None = None
    ) -> None:
        """Add tokens that arrived together, such as accepted drafts. The pause before them is divided among them.

        `lost_worker`: worker that was replaced in the pause; None: none.
        """
        if made is not None:
            self._waits.add(made, now)
        last = self._last.get(choice)
        if last is None:
            self._last[choice] = _LastToken(now, made)
            return
        last_s, last_made = last.at_s, last.made
        last.at_s, last.made = now, made
        pause_ms = (now - last_s) * 1e3
        self._pauses_ms.append(pause_ms)
        if tokens == 1:
            self._gaps_ms.append(pause_ms)
        else:
            self._gaps_ms.extend(pause_ms / tokens for _ in range(tokens))
        if pause_ms > self._least_ms:
            self._keep(LongGap(last_s, now, choice, pause_ms, last_made, made, self._waits, lost_worker))

    def last_s(self, choice: int) -> float | None:
        """Return the arrival time of a choice's last token; None without tokens."""
        last = self._last.get(choice)
        return last.at_s if last is not None else None

    def resume(self, choice: int, last_s: float, now: float, lost_worker: str = "") -> None:
        """Add the first token of a retry. `last_s`: arrival of the token before it. `lost_worker`: failed worker."""
        self._last[choice] = _LastToken(last_s, None)
        self._waits = WorkerWaits()
        self.add(choice, 1, now, None, lost_worker)

    @property
    def each_ms(self) -> list[float]:
        """All gaps, in chronological order, in milliseconds."""
        return list(self._gaps_ms)

    @property
    def pauses_ms(self) -> list[float]:
        """Pauses without a token of a choice, in chronological order. Tokens that arrive together end one pause."""
        return list(self._pauses_ms)

    def newest_ms(self, count: int) -> "array[float]":
        """Return the newest `count` gaps, oldest first."""
        return self._gaps_ms[-count:]

    def _keep(self, gap: LongGap) -> None:
        """Record a long gap. From time to time, drop all but the longest: no later gap is recorded that is shorter."""
        self.long.append(gap)
        if len(self.long) > 2 * MAX_STALLS:
            longest = sorted(self.long, key=lambda each: -each.gap_ms)[:MAX_STALLS]
            self.long = sorted(longest, key=lambda each: each.ended_s)
            self._least_ms = longest[-1].gap_ms


@dataclass(frozen=True, slots=True)
class Resume:
    """Continuation of a choice by another attempt after tokens were delivered."""

    at_s: float
    gap_ms: float  # time since the choice's previous token
    choice: int
    offset: int  # position in the answer of the attempt's first token


@dataclass(slots=True)
class Timeline:
    """Times of events of a request in monotonic seconds, filled in as the request proceeds.

    A retry replaces the times of the previous attempt, except for stages before a token that was delivered. The time of
    a retry before the first or second token counts as recovery; retries after later tokens are listed in `resumes`.
    """

    arrived_s: float
    streams: bool = True  # False: the first token counts as delivered when it arrives
    tokenised_s: float | None = None
    route_began_s: float | None = None  # when the request reached the head of the queue
    sent_s: float | None = None
    first_step_s: float | None = None
    prefill: PrefillTimings | None = None
    kv_received: KvReceived | None = None
    first_token_s: float | None = None  # delivery of the first token
    resumed_step_s: float | None = None  # first step of a retry after the first token was delivered
    second_token_s: float | None = None  # arrival of the decode worker's first new token
    last_token_s: float | None = None
    ended_s: float | None = None
    detokenise_ms: float = 0.0
    placement: Placement | None = None
    attempts: int = 0
    prefill_pid: int = 0
    decode_pid: int = 0
    gaps: TokenGaps = field(default_factory=TokenGaps)
    drafts: Drafts = NO_DRAFTS
    notes: list[AttemptNote] = field(default_factory=list)  # notes on all attempts, in order
    resumes: list[Resume] = field(default_factory=list)
    pooled: tuple[float, ...] = ()  # result of an embedding or score request; empty for others
    _staged: int = 0  # id of the attempt whose transfer is between first and second token

    def begin_attempt(self, note: AttemptNote, route_began_s: float) -> None:
        """Begin an attempt. If no token was delivered, the time of failed attempts counts as router queue."""
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
        """Record that the attempt's commands were sent to its workers."""
        if self.first_token_s is None:
            self.sent_s = now

    def take_first_step(self, first_step: FirstStep, now: float) -> None:
        """Record the arrival of an attempt's first step."""
        note = self._attempt(first_step.attempt_id)
        self.pooled = first_step.pooled
        self._first_token_arrived(note, now)
        if note is not None:
            note.prefill = first_step.timings
            if note.first_step_s == self.first_step_s:
                self.prefill = first_step.timings

    def take_kv_received(self, kv_received: KvReceived) -> None:
        """Record that the decode worker of an attempt has received the KV of the prompt."""
        if kv_received.attempt_id == self._staged:
            self.kv_received = kv_received
        note = self._attempt(kv_received.attempt_id)
        if note is not None:
            note.kv_received = kv_received

    def take_failure(self, failed: Failed, now: float) -> AttemptNote | None:
        """Record an attempt's failure. Return the note on the attempt."""
        note = self._attempt(failed.attempt_id)
        if note is not None:
            note.failed, note.failed_s = failed, now
        return note

    @property
    def is_overtaken(self) -> bool:
        """Whether first and second token arrived together, since decode's message overtook that of prefill."""
        return self.second_token_s is not None and self.second_token_s == (self.resumed_step_s or self.first_step_s)

    @property
    def last_kv_received(self) -> KvReceived | None:
        """Timings of the newest KV transfer that was reported; None without a report."""
        return next((note.kv_received for note in reversed(self.notes) if note.kv_received is not None), None)

    def _attempt(self, attempt_id: int) -> AttemptNote | None:
        return next((note for note in reversed(self.notes) if note.attempt_id == attempt_id), None)

    def _first_token_arrived(self, note: AttemptNote | None, now: float) -> None:
        """Record an attempt's first token, once: prefill and decode send it, and either message may arrive first."""
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
        """Record that a retry continues an answer after delivered tokens, and the gap that the client saw."""
        choice = note.choice or 0
        last_s = self.gaps.last_s(choice) or self.first_step_s or now
        note.stood_still_ms = (now - last_s) * 1e3
        self.resumes.append(Resume(now, note.stood_still_ms, choice, note.answered_tokens))
        failed = next((each.failed for each in reversed(self.notes) if each.failed is not None), None)
        self.gaps.resume(choice, last_s, now, failed.endpoint if failed is not None else "")

    def take_decode_output(
        self, attempt_id: int, choice: int, offset: int, tokens: int, now: float, made: Made | None = None
    ) -> None:
        """Record tokens from decode. `offset`: position of the first one in the attempt. Prefill also sends token 0."""
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
    """Return the durations of all stages. `now`: end of the total time of a running request."""
    prefill, kv_received = timeline.prefill, None if timeline.is_overtaken else timeline.kv_received
    return Stages(
        ttft_ms=_between_ms(timeline.arrived_s, timeline.first_token_s),
        total_ms=_between_ms(timeline.arrived_s, timeline.ended_s or now),
        router_queue_ms=_between_ms(timeline.arrived_s, timeline.route_began_s),
        route_ms=_between_ms(timeline.route_began_s, timeline.sent_s),
        prefill_fetch_ms=prefill.fetch_ms if prefill else 0.0,
        # Includes waits between chunks, while the worker computes other requests.
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
    """Return the time between first and second token if the decode worker computed the prompt, otherwise 0."""
    if timeline.placement is None or timeline.placement.prefill is not None:
        return 0.0
    return _between_ms(timeline.resumed_step_s or timeline.first_step_s, timeline.second_token_s)


def _return_ms(timeline: Timeline) -> float:
    """Return the time from dispatch to first token, less the time on the worker if the worker has sent timings."""
    on_worker_ms = 0.0 if timeline.prefill is None else timeline.prefill.total_ms
    return _between_ms(timeline.sent_s, timeline.first_token_s or timeline.first_step_s) - on_worker_ms


def transit_ms(timeline: Timeline) -> float:
    """Return the time of messages to and from the worker that computed the prompt; 0 if it sent no timings."""
    if timeline.prefill is None:
        return 0.0
    return _between_ms(timeline.sent_s, timeline.first_step_s) - timeline.prefill.total_ms


def _between_ms(begin_s: float | None, end_s: float | None) -> float:
    return 0.0 if begin_s is None or end_s is None else (end_s - begin_s) * 1e3


class AnswerInProgress(Protocol):
    """Interface of an answer in progress, or of a wrapper around one."""

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
    CANCELLED = "cancelled"  # for a cause in `Leave`, such as a client that disconnected
    REFUSED = "refused"  # rejected before dispatch to a worker
    FAILED = "failed"


class Leave(StrEnum):
    """Cause of a request's cancellation."""

    CLIENT = "client"  # the client cancelled the call or closed the connection
    STALLED = "client_stalled"  # the client read nothing for too long
    SUPERSEDED = "superseded"  # another stream continues the same request
    SIBLING = "sibling_failed"  # another prompt of the same call failed
    STOPPING = "router_stopped"


@dataclass(slots=True)
class CallReader:
    """State of a client call that several requests may serve."""

    requests: int = 0
    """Number of requests that were begun for the call."""
    leaves: Leave = Leave.CLIENT
    """Cause of a cancellation of its requests. Code that disconnects the client sets it first."""
    not_acted_upon: list[str] = field(default_factory=list)
    """Fields, headers and tools of the call that were accepted without effect."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """End of a request: outcome, reason and gRPC status."""

    outcome: RequestOutcome
    reason: str = ""  # lower-case identifier; empty if the request was answered
    status: str = "OK"  # name of the gRPC status

    @property
    def error(self) -> str | None:
        """Name of the gRPC status; None if the request was answered."""
        return None if self.outcome is RequestOutcome.ANSWERED else self.status


ANSWERED = RequestEnd(RequestOutcome.ANSWERED)


def left(leaves: Leave) -> RequestEnd:
    """Return the end of a request that was cancelled for the cause `leaves`."""
    return RequestEnd(RequestOutcome.CANCELLED, leaves.value, "CANCELLED")


def end_of(error: BaseException, dispatched: bool) -> RequestEnd:
    """Return the end of a request that raised `error`. An error that is not a BatonError is a fault of the router.

    `dispatched`: whether the request was sent to a worker.
    """
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


class ShownChange(NamedTuple):
    """Index of the first token at which a session's prompt changed, and the text from there on."""

    token: int
    text: str


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Record of a request, filled in as it proceeds. `identity`: trace and span id of the trace's root span."""

    operation: Operation
    parent: TraceContext | None
    identity: TraceContext
    clock: WallClock
    timeline: Timeline
    model: str = ""
    version: str = ""  # version of the weights that answer
    tenant: str = ""  # name of the caller's API key
    prepared: PreparedRequest | None = None
    finish_reasons: list[str] = field(default_factory=list)
    ended_choices: list[int] = field(default_factory=list)  # completed choices, in the order of finish_reasons
    is_streamed: bool = True
    summary: Summary | None = None
    is_resumed: bool = False  # whether it continues an earlier stream of the same request
    answer: AnswerInProgress | None = None
    released: Callable[[], Sequence[Sequence[int]]] | None = None
    """Returns the tokens of each generated choice so far. None: no attempt was begun."""
    delivered_tokens: int = 0
    end: RequestEnd | None = None  # None: the request is running
    gaps: GapSummary | None = None  # set when the request has completed, if it had a second token

    salted: Held = NOWHERE  # prefix cached under another salt; set when the request has completed
    not_acted_upon: Sequence[str] = ()  # fields, headers and tools of the call that were accepted without effect
    prompt_change: ShownChange | None = None  # where the prompt differs from that of the session's last turn

    @property
    def name(self) -> str:
        """Name of the trace's root span, such as `chat tiny`: operation and model."""
        return f"{self.operation.value} {self.model}".rstrip()

    @property
    def error(self) -> str | None:
        """Name of the final gRPC status; None for OK, and while the request runs."""
        return self.end.error if self.end is not None else None

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens sent to workers for this request; 0 if it resumes another."""
        given = self.prepared is not None and self.timeline.attempts and not self.is_resumed
        return len(self.prepared.token_ids) if self.prepared is not None and given else 0

    @property
    def completion_tokens(self) -> int:
        """Number of delivered tokens, or of generated tokens if not streaming. Tokens before a resume do not count."""
        non_streaming = self.prepared is not None and not self.prepared.streams
        return self.answer.completion_tokens if non_streaming and self.answer is not None else self.delivered_tokens

    @staticmethod
    def begin(operation: Operation, parent: TraceContext | None) -> "RequestRecord":
        clock = WallClock.now()
        identity = parent.child() if parent else new_trace()
        return RequestRecord(operation, parent, identity, clock, Timeline(arrived_s=clock.monotonic_s))

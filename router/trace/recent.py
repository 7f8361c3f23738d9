"""What is kept of the newest requests: why they were placed as they were, where their time went, and how fast they
were. No prompt content.
"""

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from baton.process.telemetry.spans import FinishedSpan, WallClock
from baton.process.telemetry.trace_context import current_request_id
from baton.router.cache.autopsy import NOWHERE, Held
from baton.router.trace.record import AttemptNote, GapSummary, RequestRecord, Stall, Timeline, TokenGaps, stages
from baton.router.types.events import NO_DRAFTS, Drafts
from baton.router.types.response import Stages, bare_id

KEPT_REQUESTS = 512  # some 14 KiB each
KEPT_STALLS = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended."""

    status: str
    prompt_tokens: int
    ttft_ms: float
    total_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float
    session_id: str = ""  # as the client named it


@dataclass(frozen=True, slots=True)
class Waits:
    """Where the time went."""

    stages: Stages
    stalls: Sequence[Stall] = ()  # the longest, in order
    stall_count: int = 0
    longest_gap_ms: float = 0.0
    drafts: Drafts = NO_DRAFTS

    @staticmethod
    def of(stages: Stages, gaps: GapSummary | None, drafts: Drafts = NO_DRAFTS) -> "Waits":
        if gaps is None:
            return Waits(stages)
        longest = sorted(gaps.stalls, key=lambda stall: -stall.gap_ms)[:KEPT_STALLS]
        in_order = tuple(sorted(longest, key=lambda stall: stall.at_s))
        return Waits(stages, in_order, gaps.stall_count, gaps.max_ms, drafts)


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """Made when a request has ended. The costs are those of the placement's own decision; names and text are made of
    it only when a request is explained.
    """

    request_id: str
    trace_id: str
    arrived_s: float
    outcome: Outcome
    attempts: Sequence[AttemptNote]
    waits: Waits | None = None
    salted: Held = NOWHERE  # blocks that were in a cache under another salt when it ended


@dataclass(slots=True)
class DecisionRecords:
    """The newest requests by their ids; of two with one id the newer."""

    kept: int = KEPT_REQUESTS
    _by_id: OrderedDict[str, DecisionRecord] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, record: DecisionRecord) -> None:
        self._by_id.pop(record.request_id, None)
        self._by_id[record.request_id] = record
        if len(self._by_id) > self.kept:
            self._by_id.popitem(last=False)

    def find(self, given: str) -> DecisionRecord | None:
        """See `named`."""
        return self._by_id.get(given) or named(given, reversed(self._by_id.values()))


KEPT_TIMELINES = 256  # some 28 KiB each


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """A request that has ended, as it is in its trace: the root, then its stages."""

    request_id: str
    trace_id: str
    spans: tuple[FinishedSpan, ...]
    stalls: tuple[Stall, ...]
    clock: WallClock

    @property
    def root(self) -> FinishedSpan:
        return self.spans[0]


class RecentTimelines:
    """The newest requests, whatever became of them."""

    def __init__(self, kept: int = KEPT_TIMELINES) -> None:
        self._kept: deque[RequestTimeline] = deque(maxlen=kept)

    def add(self, record: RequestRecord, spans: Sequence[FinishedSpan]) -> None:
        request_id = "" if record.prepared is None else record.prepared.valid.request_id
        stalls = () if record.gaps is None else record.gaps.stalls
        self._kept.append(RequestTimeline(request_id, record.identity.trace_id, tuple(spans), stalls, record.clock))

    def since(self, wall_ns: int) -> list[RequestTimeline]:
        """Those that ended after that moment."""
        return [each for each in self._kept if each.root.end_ns >= wall_ns]

    def find(self, given: str) -> RequestTimeline | None:
        """See `named`."""
        return named(given, reversed(self._kept))


WINDOW_S = 60.0
LATENCY_REQUESTS = 256
KEPT_GAPS = 1024  # of one request, the newest
COUNTED_GAPS = 8192  # of all requests, the newest: sorting them takes a millisecond


class Quantiles(NamedTuple):
    p50_ms: float
    p99_ms: float


class Latency(NamedTuple):
    """`tbt` is None where no answer had a token after those of the first step."""

    requests: int
    ttft: Quantiles
    tbt: Quantiles | None


class _Ended(NamedTuple):
    at_s: float
    ttft_ms: float
    gaps_ms: "array[float]"


class RecentLatency:
    """`observe` is called with every request that has ended; those without a first token do not count."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=LATENCY_REQUESTS)

    def observe(self, record: RequestRecord) -> None:
        timeline = record.timeline
        if timeline.first_token_s is None:
            return
        at_s = timeline.ended_s or timeline.last_token_s or timeline.first_token_s
        ttft_ms = (timeline.first_token_s - timeline.arrived_s) * 1e3
        self._ended.append(_Ended(at_s, ttft_ms, timeline.gaps.newest_ms(KEPT_GAPS)))

    def figures(self, now: float) -> Latency | None:
        """`now` is in monotonic seconds. None where no request ended within WINDOW_S."""
        recent = [ended for ended in self._ended if now - ended.at_s <= WINDOW_S]
        if not recent:
            return None
        newest_gaps_ms = (gap_ms for ended in reversed(recent) for gap_ms in reversed(ended.gaps_ms))
        gaps_ms = list(islice(newest_gaps_ms, COUNTED_GAPS))
        return Latency(
            len(recent),
            quantiles(ended.ttft_ms for ended in recent),
            quantiles(gaps_ms) if gaps_ms else None,
        )


def quantiles(values_ms: Iterable[float]) -> Quantiles:
    """Of at least one value."""
    ordered = sorted(values_ms)
    return Quantiles(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100])


KEPT_SEEN = 256
KEPT_WORKERS = 1024
RUNNING_GAPS = 256  # of a running request, the newest
SHOWN_STALLS = 8
SHOWN_CAUSES = 6


class Phase(StrEnum):
    """Of a request that runs. One that has ended has an Outcome instead."""

    QUEUED = "queued"  # in the router
    PREFILL = "prefill"  # a worker was given it
    DECODE = "decode"  # its first token has come


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One request as it was at the moment of the look."""

    request_id: str  # empty: refused before it had one
    trace_id: str
    model: str
    phase: str  # a Phase or an Outcome
    reason: str  # of an end that is no answer, in one word
    status: str  # OK, or the name of the gRPC status
    arrived_s: float  # monotonic
    ended_s: float | None  # None: it runs
    attempts: int
    prefill: str  # endpoint; empty where decode computed the prompt
    decode: str  # empty where no worker was chosen
    prompt_tokens: int | None  # None: not counted yet, or refused before they were
    cached_tokens: int
    generated_tokens: int | None  # that went out; None: it was refused before it had any
    stages: Stages
    gaps: GapSummary | None
    drafts: Drafts = NO_DRAFTS


def seen_request(record: RequestRecord, now: float, gaps: GapSummary | None, fallback_id: str = "") -> SeenRequest:
    """`now`, in monotonic seconds, stands for an end that is not there. `gaps`: between its tokens. `fallback_id`: of a
    request that was refused before it was prepared.
    """
    timeline, prepared, placement = record.timeline, record.prepared, record.timeline.placement
    return SeenRequest(
        request_id=prepared.valid.request_id if prepared is not None else fallback_id,
        trace_id=record.identity.trace_id,
        model=record.model,
        phase=_phase(timeline).value if record.end is None else record.end.outcome.value,
        reason=record.end.reason if record.end is not None else "",
        status=record.error or "OK",
        arrived_s=timeline.arrived_s,
        ended_s=(timeline.ended_s or now) if record.end is not None else None,
        attempts=timeline.attempts,
        prefill=(placement.prefill or "") if placement is not None else "",
        decode=placement.decode if placement is not None else "",
        prompt_tokens=len(prepared.token_ids) if prepared is not None else None,
        cached_tokens=timeline.prefill.cached_tokens if timeline.prefill is not None else 0,
        generated_tokens=record.completion_tokens if prepared is not None else None,
        stages=stages(timeline, now),
        gaps=gaps,
        drafts=timeline.drafts,
    )


def _phase(timeline: Timeline) -> Phase:
    if timeline.first_step_s is not None or timeline.first_token_s is not None:
        return Phase.DECODE
    return Phase.QUEUED if timeline.sent_s is None else Phase.PREFILL


def gaps_so_far(gaps: TokenGaps) -> GapSummary | None:
    """Of the newest tokens, and without stalls: finding their causes costs too much for every running request."""
    newest = sorted(gaps.newest_ms(RUNNING_GAPS))
    return GapSummary(*quantiles(newest), newest[-1], (), 0) if newest else None


def shown_stalls(gaps: GapSummary | None) -> Sequence[Stall]:
    """The longest, in order of time."""
    longest = sorted(gaps.stalls if gaps is not None else (), key=lambda stall: -stall.gap_ms)[:SHOWN_STALLS]
    return sorted(longest, key=lambda stall: stall.at_s)


class RecentRequests:
    """`observe` is called with every request that has ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: deque[SeenRequest] = deque(maxlen=KEPT_SEEN)
        self._gaps_ms: OrderedDict[str, array[float]] = OrderedDict()

    def observe(self, record: RequestRecord) -> None:
        now = self._clock()
        self._ended.append(seen_request(record, now, record.gaps, current_request_id.get() or ""))
        if record.timeline.placement is not None:
            self._keep(record.timeline.placement.decode, record.timeline.gaps.newest_ms(KEPT_GAPS))

    def newest(self) -> Iterator[SeenRequest]:
        """Of those that have ended, the newest first."""
        return reversed(self._ended)

    def token_times(self, endpoint: str) -> Quantiles | None:
        """Of the answers that ended last on this decode worker."""
        gaps_ms = self._gaps_ms.get(endpoint)
        return quantiles(gaps_ms) if gaps_ms else None

    def _keep(self, endpoint: str, gaps_ms: Sequence[float]) -> None:
        kept = self._gaps_ms.setdefault(endpoint, array("d"))
        kept.extend(gaps_ms)
        del kept[:-KEPT_GAPS]
        self._gaps_ms.move_to_end(endpoint)
        if len(self._gaps_ms) > KEPT_WORKERS:
            self._gaps_ms.popitem(last=False)


class Identified(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def trace_id(self) -> str: ...


Seen = TypeVar("Seen", bound=Identified)
SHORTEST_PREFIX = 4


def named(given: str, newest_first: Iterable[Seen]) -> Seen | None:
    """By the request's id, bare or as an answer bears it, or that of its trace: of several the newest.

    A beginning of one of the ids will do, where no other request has it.
    """
    known = list(newest_first)
    exact = next((each for each in known if is_named(each.request_id, each.trace_id, given)), None)
    if exact is not None or len(given) < SHORTEST_PREFIX:
        return exact
    beginnings = (given, bare_id(given) or given, f"req-{given}")
    short = [each for each in known if each.trace_id.startswith(given) or each.request_id.startswith(beginnings)]
    return short[0] if len({each.request_id for each in short}) == 1 else None


def is_named(request_id: str, trace_id: str, given: str) -> bool:
    """Whether a request is the one with that id, bare or as an answer bears it, or with the id of its trace."""
    return (bool(request_id) and request_id in (given, bare_id(given))) or trace_id == given

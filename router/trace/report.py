"""Report of one request, from which `why`, `top`, the page and timelines are drawn, and the newest reports.

A report has no prompt and no answer.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

from baton.process.telemetry.spans import FinishedSpan, WallClock
from baton.router.cache.autopsy import NOWHERE, Held
from baton.router.trace.latency import quantiles
from baton.router.trace.record import AttemptNote, GapSummary, RequestRecord, Stall, Timeline, TokenGaps, stages
from baton.router.types.events import NO_DRAFTS, Drafts
from baton.router.types.response import Stages, bare_id

KEPT_REPORTS = 512  # about 18 KiB each
RUNNING_GAPS = 256  # newest token gaps of a running request
SHOWN_STALLS = 8
SHOWN_CAUSES = 6
SHORTEST_PREFIX = 4


class Phase(StrEnum):
    """Phase of a running request. A completed one has an Outcome instead."""

    QUEUED = "queued"
    PREFILL = "prefill"  # dispatched to a worker
    DECODE = "decode"  # first token received


class StageTime(NamedTuple):
    """Stage of a trace, nanoseconds since 1970."""

    name: str
    began_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class RequestReport:
    """Report of a request, running or completed."""

    request_id: str  # empty: rejected before it had one
    trace_id: str
    name: str  # name of the trace's root, such as "chat tiny"
    model: str
    phase: str  # a Phase or an Outcome
    reason: str  # one word, where it was not answered
    status: str  # OK, or the name of the gRPC status
    arrived_s: float  # monotonic
    ended_s: float | None  # None: running
    attempts: int
    prefill: str  # endpoint; empty where decode computed the prompt
    decode: str  # endpoint; empty where no worker was chosen
    prompt_tokens: int | None  # None: not counted yet
    cached_tokens: int
    generated_tokens: int | None  # delivered; None: rejected before any
    stages: Stages
    gaps: GapSummary | None
    clock: WallClock
    drafts: Drafts = NO_DRAFTS
    session_id: str = ""
    notes: tuple[AttemptNote, ...] = ()
    salted: Held = NOWHERE  # blocks cached under another salt when it completed
    stage_times: tuple[StageTime, ...] = ()  # once it has completed

    @property
    def began_ns(self) -> int:
        return self.clock.at(self.arrived_s)

    @property
    def ended_ns(self) -> int:
        return self.clock.at(self.arrived_s if self.ended_s is None else self.ended_s)


def report_of(
    record: RequestRecord,
    now: float,
    gaps: GapSummary | None,
    fallback_id: str = "",
    spans: Sequence[FinishedSpan] = (),
) -> RequestReport:
    """Return the report of a request at `now`, monotonic seconds.

    `gaps`: between its tokens. `fallback_id`: id of a request that was rejected before it was prepared. `spans`: its
    trace, the root first.
    """
    timeline, prepared, placement = record.timeline, record.prepared, record.timeline.placement
    session = prepared.kept_session if prepared is not None else None
    return RequestReport(
        request_id=prepared.request_id if prepared is not None else fallback_id,
        trace_id=record.identity.trace_id,
        name=record.name,
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
        clock=record.clock,
        drafts=timeline.drafts,
        session_id=session.name if session is not None else "",
        notes=tuple(timeline.notes),
        salted=record.salted,
        stage_times=tuple(StageTime(span.name, span.start_ns, span.end_ns) for span in spans[1:]),
    )


def _phase(timeline: Timeline) -> Phase:
    if timeline.first_step_s is not None or timeline.first_token_s is not None:
        return Phase.DECODE
    return Phase.QUEUED if timeline.sent_s is None else Phase.PREFILL


def gaps_so_far(gaps: TokenGaps) -> GapSummary | None:
    """Return the gaps of the newest tokens without stalls, whose causes cost too much to find for every request."""
    newest = sorted(gaps.newest_ms(RUNNING_GAPS))
    return GapSummary(*quantiles(newest), newest[-1], (), 0) if newest else None


def shown_stalls(gaps: GapSummary | None) -> Sequence[Stall]:
    """Return the longest stalls, in order of time."""
    longest = sorted(gaps.stalls if gaps is not None else (), key=lambda stall: -stall.gap_ms)[:SHOWN_STALLS]
    return sorted(longest, key=lambda stall: stall.at_s)


class RecentReports:
    """Reports of the newest completed requests, whatever their outcome."""

    def __init__(self, kept: int = KEPT_REPORTS) -> None:
        self._kept: deque[RequestReport] = deque(maxlen=kept)

    def add(self, report: RequestReport) -> None:
        self._kept.append(report)

    def newest(self) -> Iterator[RequestReport]:
        """Iterate from the newest to the oldest."""
        return reversed(self._kept)

    def since(self, wall_ns: int) -> list[RequestReport]:
        """Return the requests that completed after `wall_ns`."""
        return [each for each in self._kept if each.ended_ns >= wall_ns]

    def find(self, given: str) -> RequestReport | None:
        """Return the newest request with exactly this id, else the one that `named` finds."""
        exact = next((each for each in self.newest() if given and each.request_id == given), None)
        return exact or named(given, self.newest())


class Identified(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def trace_id(self) -> str: ...


Found = TypeVar("Found", bound=Identified)


def named(given: str, newest_first: Iterable[Found]) -> Found | None:
    """Return the newest request with an id, bare or with an answer's prefix, or with a trace's id.

    A prefix of at least SHORTEST_PREFIX characters suffices if only one request has it.
    """
    known = list(newest_first)
    exact = next((each for each in known if is_named(each.request_id, each.trace_id, given)), None)
    if exact is not None or len(given) < SHORTEST_PREFIX:
        return exact
    beginnings = (given, bare_id(given) or given, f"req-{given}")
    short = [each for each in known if each.trace_id.startswith(given) or each.request_id.startswith(beginnings)]
    return short[0] if len({each.request_id for each in short}) == 1 else None


def is_named(request_id: str, trace_id: str, given: str) -> bool:
    """Return whether `given` is the request's id, bare or with an answer's prefix, or its trace's id."""
    return (bool(request_id) and request_id in (given, bare_id(given))) or trace_id == given

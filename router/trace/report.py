"""Report of one request, the source of `why`, `top`, the web page and timelines; and the list of the newest reports.

A report contains nothing of the answer, and of the prompt only a few words where a session's prompt changed.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

from baton.process.telemetry.spans import FinishedSpan, WallClock
from baton.router.cache.autopsy import NOWHERE, Held
from baton.router.trace.decided import RequestInputs, inputs_of
from baton.router.trace.latency import quantiles
from baton.router.trace.record import (
    AttemptNote,
    GapSummary,
    RequestRecord,
    ShownChange,
    Stall,
    Timeline,
    TokenGaps,
    stages,
)
from baton.router.types.events import NO_DRAFTS, Drafts
from baton.router.types.response import Stages, bare_id

KEPT_REPORTS = 512  # maximum number of reports of completed requests, about 18 KiB each
RUNNING_GAPS = 256  # number of a running request's newest token gaps that its report counts
SHOWN_STALLS = 8
SHOWN_CAUSES = 6
SHORTEST_PREFIX = 4


class Phase(StrEnum):
    """Phase of a running request. A completed request has a RequestOutcome instead."""

    QUEUED = "queued"
    PREFILL = "prefill"  # the request was sent to a worker
    DECODE = "decode"  # the first token was received


class StageTime(NamedTuple):
    """Begin and end of a stage of a request, in nanoseconds since 1970."""

    name: str
    began_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class RequestReport:
    """Report of a running or completed request."""

    request_id: str  # empty: the request was rejected before it had an id
    trace_id: str
    name: str  # name of the trace's root span, such as "chat tiny"
    model: str
    phase: str  # value of a Phase or a RequestOutcome
    reason: str  # identifier of the cause of a failure, rejection or cancellation; empty: answered or running
    status: str  # name of the gRPC status; OK while the request runs
    arrived_s: float  # monotonic seconds
    ended_s: float | None  # None: the request is running
    attempts: int
    prefill: str  # endpoint of the prefill worker; empty: decode computed the prompt
    decode: str  # endpoint of the decode worker; empty: no worker was chosen
    prompt_tokens: int | None  # None: the prompt was not tokenised
    cached_tokens: int
    generated_tokens: int | None  # delivered tokens; None: the prompt was not tokenised
    stages: Stages
    gaps: GapSummary | None
    clock: WallClock
    drafts: Drafts = NO_DRAFTS
    session_id: str = ""
    notes: tuple[AttemptNote, ...] = ()
    salted: Held = NOWHERE  # prefix that was cached under another salt when the request completed
    stage_times: tuple[StageTime, ...] = ()  # empty while the request runs
    prompt_change: ShownChange | None = None  # where the prompt differs from that of the session's last turn
    not_acted_upon: tuple[str, ...] = ()  # fields, headers and tools of the call that were accepted without effect
    inputs: RequestInputs | None = None  # None: the request was rejected before it was prepared, or runs

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
    """Return the report of a request as of `now`, in monotonic seconds.

    `gaps`: gaps between its tokens. `fallback_id`: id to report if the request was rejected before it was prepared.
    `spans`: spans of its trace, beginning with the root.
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
        prompt_change=record.prompt_change,
        not_acted_upon=tuple(dict.fromkeys(record.not_acted_upon)),
        inputs=inputs_of(prepared) if prepared is not None and record.end is not None else None,
    )


def _phase(timeline: Timeline) -> Phase:
    if timeline.first_step_s is not None or timeline.first_token_s is not None:
        return Phase.DECODE
    return Phase.QUEUED if timeline.sent_s is None else Phase.PREFILL


def gaps_so_far(gaps: TokenGaps) -> GapSummary | None:
    """Summarise the newest gaps of a running request, without stalls: finding their causes would cost too much."""
    newest = sorted(gaps.newest_ms(RUNNING_GAPS))
    return GapSummary(*quantiles(newest), newest[-1], (), 0) if newest else None


def shown_stalls(gaps: GapSummary | None) -> Sequence[Stall]:
    """Return the SHOWN_STALLS longest stalls, in chronological order."""
    longest = sorted(gaps.stalls if gaps is not None else (), key=lambda stall: -stall.gap_ms)[:SHOWN_STALLS]
    return sorted(longest, key=lambda stall: stall.at_s)


class RecentReports:
    """Reports of the newest completed requests, including failed and rejected ones."""

    def __init__(self, kept: int = KEPT_REPORTS) -> None:
        self._kept: deque[RequestReport] = deque(maxlen=kept)

    def add(self, report: RequestReport) -> None:
        self._kept.append(report)

    def newest(self) -> Iterator[RequestReport]:
        """Iterate over the reports, newest first."""
        return reversed(self._kept)

    def since(self, wall_ns: int) -> list[RequestReport]:
        """Return the reports of requests that completed at or after `wall_ns` (since 1970), oldest first."""
        return [each for each in self._kept if each.ended_ns >= wall_ns]

    def find(self, given: str) -> RequestReport | None:
        """Return the report of the newest request with exactly this id, or else the report that `named` finds."""
        exact = next((each for each in self.newest() if given and each.request_id == given), None)
        return exact or named(given, self.newest())


class Identified(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def trace_id(self) -> str: ...


Found = TypeVar("Found", bound=Identified)


def named(given: str, newest_first: Iterable[Found]) -> Found | None:
    """Return the newest request that `given` identifies, as defined by `is_named`.

    The first SHORTEST_PREFIX or more characters of an id suffice if only one request has them.
    """
    known = list(newest_first)
    exact = next((each for each in known if is_named(each.request_id, each.trace_id, given)), None)
    if exact is not None or len(given) < SHORTEST_PREFIX:
        return exact
    beginnings = (given, bare_id(given) or given, f"req-{given}")
    short = [each for each in known if each.trace_id.startswith(given) or each.request_id.startswith(beginnings)]
    return short[0] if len({each.request_id for each in short}) == 1 else None


def is_named(request_id: str, trace_id: str, given: str) -> bool:
    """Return whether `given` is the request's id (with or without the prefix of an answer's id) or its trace id."""
    return (bool(request_id) and request_id in (given, bare_id(given))) or trace_id == given

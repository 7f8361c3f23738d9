"""The newest requests of a router as its admin port lists them, and the latency of the last minute."""

import asyncio
from typing import Any

import pytest

from baton.client import AsyncAdminClient
from baton.process.telemetry.spans import NoTelemetry
from baton.protos import admin_pb2
from baton.router.dispatcher import Accounts
from baton.router.placement.decide import Placement
from baton.router.trace.latency import (
    COUNTED_GAPS,
    KEPT_GAPS,
    KEPT_WORKERS,
    LATENCY_REQUESTS,
    WINDOW_S,
    LatencyQuantiles,
    RecentFigures,
    RecentLatency,
    WorkerTokenTimes,
)
from baton.router.trace.record import RequestRecord, TokenGaps, stages
from baton.router.trace.report import KEPT_REPORTS, SHOWN_STALLS, report_of, shown_stalls
from baton.router.trace.spans import Tracer
from baton.router.trace.stalls import StallBound
from baton.router.types.request import Operation
from tests.fixtures.stalled import blamed, running, stalled
from tests.router.conftest import Stack

WAIT_S = 20.0


def ids(accounts: Accounts, count: int = 9) -> list[str]:
    return [seen.request_id for seen in accounts.newest(count)]


class KeptAccounts(Accounts):
    def __init__(self) -> None:
        self.tracer = Tracer(NoTelemetry(), bound=StallBound(least_ms=20.0))
        super().__init__(self.tracer)

    def complete(self, record: RequestRecord) -> None:
        """Do with a completed request what the tracer does."""
        self.tracer.recent.add(report_of(record, record.timeline.arrived_s + 60.0, record.gaps))


def accounts() -> KeptAccounts:
    return KeptAccounts()


def token_gaps(*gaps_ms: float) -> TokenGaps:
    gaps, now = TokenGaps(), 0.0
    for gap_ms in (0.0, *gaps_ms):
        now += gap_ms / 1e3
        gaps.add(0, 1, now)
    return gaps


def test_running_requests_are_first_and_the_newest_of_each_kind() -> None:
    kept = accounts()
    for name in ("ended-1", "ended-2"):
        kept.complete(stalled(name))
    for name in ("running-1", "running-2"):
        kept.counts.begin(running(name))
    assert ids(kept) == ["running-2", "running-1", "ended-2", "ended-1"]
    assert ids(kept, 2) == ["running-2", "ended-2"], "many of one kind do not hide the other"
    assert ids(kept, 3) == ["running-2", "running-1", "ended-2"]


def test_only_the_newest_finished_requests_are_kept() -> None:
    kept = accounts()
    for number in range(KEPT_REPORTS + 5):
        kept.complete(stalled(str(number)))
    shown = ids(kept, 10 * KEPT_REPORTS)
    assert (len(shown), shown[0], shown[-1]) == (KEPT_REPORTS, str(KEPT_REPORTS + 4), "5")


def test_phase_of_a_running_request_follows_its_timeline() -> None:
    kept, record = accounts(), running()
    kept.counts.begin(record)
    seen = []
    for field in ("route_began_s", "sent_s", "first_step_s"):
        setattr(record.timeline, field, record.timeline.arrived_s)
        seen.append(kept.newest(1)[0].phase)
    assert seen == ["queued", "prefill", "decode"]


def test_finished_request_has_outcome_and_stages() -> None:
    kept, record = accounts(), stalled("r", (blamed("long"),))
    timeline = record.timeline
    timeline.route_began_s, timeline.sent_s = timeline.arrived_s + 1.0, timeline.arrived_s + 1.5
    kept.complete(record)
    (seen,) = kept.newest(9)
    assert (seen.phase, seen.reason, seen.trace_id) == ("answered", "", record.identity.trace_id)
    assert seen.stages == stages(timeline, timeline.arrived_s + 60.0)
    assert seen.gaps == record.gaps


def test_stalls_of_a_running_request_are_in_its_report_and_not_in_the_list() -> None:
    kept, record = accounts(), running("r")
    record.timeline.gaps = token_gaps(*[10.0] * 50, 400.0, *[10.0] * 10)
    kept.counts.begin(record)
    (listed,), named = kept.newest(9), kept.find("r")
    assert listed.gaps is not None and named is not None and named.gaps is not None
    assert (round(listed.gaps.p50_ms), round(listed.gaps.max_ms), listed.gaps.stalls) == (10, 400, ())
    assert [round(stall.gap_ms) for stall in named.gaps.stalls] == [400]


@pytest.mark.parametrize("is_running", [False, True])
def test_request_is_found_by_its_id_as_an_answer_bears_it_and_by_its_trace(is_running: bool) -> None:
    kept = accounts()
    record = running("mine") if is_running else stalled("mine")
    kept.counts.begin(record) if is_running else kept.complete(record)
    for given in ("mine", "chatcmpl-mine", record.identity.trace_id):
        found = kept.find(given)
        assert found is not None and found.request_id == "mine", given
    for given in ("other", "chatcmpl-", "chatcmpl-other"):
        assert kept.find(given) is None


def test_request_rejected_without_an_id_is_not_found_by_an_empty_one() -> None:
    kept, record = accounts(), stalled()
    record.prepared = None
    kept.complete(record)
    assert [seen.prompt_tokens for seen in kept.newest(9)] == [None]
    assert kept.find("chatcmpl-") is None


def test_longest_stalls_are_shown_in_order_of_time() -> None:
    gaps = stalled("r", *((blamed("x", float(ms)),) for ms in (50, *range(1, 12), 90))).gaps
    shown = [stall.gap_ms - 10.0 for stall in shown_stalls(gaps)]
    assert shown == [50.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 90.0]
    assert len(shown) == SHOWN_STALLS
    assert shown_stalls(None) == []


def placed(endpoint: str, gaps: TokenGaps) -> RequestRecord:
    """An answer of that decode worker."""
    record = stalled()
    record.timeline.placement = Placement(None, endpoint, 0, 0, 0, 0, 0, 1)
    record.timeline.gaps = gaps
    return record


def test_token_times_of_a_worker_cover_its_newest_tokens() -> None:
    recent = WorkerTokenTimes()
    recent.observe(placed("d1", token_gaps(*[100.0] * KEPT_GAPS)))
    recent.observe(placed("d1", token_gaps(*[10.0] * KEPT_GAPS)))
    recent.observe(placed("d2", token_gaps(7.0)))
    recent.observe(placed("d3", token_gaps()))
    found = [recent.quantiles(endpoint) for endpoint in ("d1", "d2")]
    assert [None if each is None else round(each.p99_ms) for each in found] == [10, 7]
    assert recent.quantiles("d3") is None, "no answer of it had two gaps"
    assert recent.quantiles("d4") is None


def test_workers_that_answered_nothing_for_long_are_forgotten() -> None:
    recent = WorkerTokenTimes()
    for number in range(KEPT_WORKERS + 1):
        recent.observe(placed(f"d{number}", token_gaps(5.0)))
    assert recent.quantiles("d0") is None
    assert recent.quantiles(f"d{KEPT_WORKERS}") is not None


async def recent_of(stack: Stack, **fields: Any) -> list[Any]:
    message = admin_pb2.RecentRequestsRequest(**fields)
    return list((await stack.admin.RecentRequests(message)).requests)


async def test_admin_port_tells_of_requests_without_their_texts(stack: Stack) -> None:
    await stack.ready()
    await stack.generate("secret", max_tokens=6)
    async with asyncio.timeout(WAIT_S):
        while not any(each.phase == "answered" and each.prompt_tokens == 6 for each in await recent_of(stack)):
            await asyncio.sleep(0)
    shown = [each for each in await recent_of(stack) if each.prompt_tokens == 6]
    (request,) = shown
    assert (request.model, request.prefill, request.decode) == ("tiny", "prefill-0", "decode-0")
    assert (request.generated_tokens, request.attempts, request.reason) == (6, 1, "")
    assert 0.0 < request.stages.ttft_ms <= request.stages.total_ms
    assert 0.0 < request.tbt.p50_ms <= request.tbt.max_ms
    assert "secret" not in str(request)
    named = await recent_of(stack, request_id=request.trace_id)
    assert [each.request_id for each in named] == [request.request_id]
    assert await recent_of(stack, request_id="never") == []
    async with AsyncAdminClient(f"127.0.0.1:{stack.router.running.ports[1]}") as client:
        (seen,) = await client.recent_requests(request_id=request.request_id)
    assert (seen.trace_id, seen.stages.ttft_ms) == (request.trace_id, request.stages.ttft_ms)
    assert seen.tbt is not None and seen.tbt.max_ms == request.tbt.max_ms
    workers = {each.worker.worker_id: each for each in (await stack.status()).workers}
    assert workers["decode-0"].tbt.p50_ms > 0.0
    assert not workers["prefill-0"].HasField("tbt")


def ended_at(at_s: float, ttft_ms: float | None, gaps_ms: tuple[float, ...] = ()) -> RequestRecord:
    """A request that ended_at at that time."""
    record = RequestRecord.begin(Operation.GENERATE, None)
    timeline = record.timeline
    timeline.ended_s = at_s
    timeline.arrived_s = at_s - 10.0
    if ttft_ms is not None:
        timeline.first_token_s = timeline.arrived_s + ttft_ms / 1e3
    now = at_s - 5.0
    for count, gap_ms in enumerate((0.0, *gaps_ms)):
        now += gap_ms / 1e3
        timeline.gaps.add(0, 1, now) if count or gaps_ms else None
    return record


def figures(*records: RequestRecord, now: float = 1000.0) -> RecentFigures | None:
    recent = RecentLatency()
    for record in records:
        recent.observe(record)
    return recent.figures(now)


def rounded(found: LatencyQuantiles | None) -> tuple[float, float] | None:
    return None if found is None else (round(found.p50_ms, 3), round(found.p99_ms, 3))


def test_quantiles_are_over_all_requests() -> None:
    found = figures(*(ended_at(1000.0, float(ttft), (10.0, 10.0, 200.0)) for ttft in range(100, 200)))
    assert found is not None and found.requests == 100
    assert rounded(found.ttft) == (150.0, 199.0)
    assert rounded(found.tbt) == (10.0, 200.0)


def test_requests_that_ended_earlier_do_not_count() -> None:
    old, new = ended_at(1000.0 - WINDOW_S - 1, 900.0, (90.0,)), ended_at(999.0, 100.0, (5.0,))
    found = figures(old, new)
    assert found is not None and found.requests == 1
    assert (rounded(found.ttft), rounded(found.tbt)) == ((100.0, 100.0), (5.0, 5.0))
    assert figures(old) is None


def test_request_without_a_first_token_does_not_count() -> None:
    assert figures(ended_at(1000.0, None)) is None


def test_answers_of_one_token_have_no_time_between_tokens() -> None:
    found = figures(ended_at(1000.0, 100.0))
    assert found is not None and found.tbt is None


def test_only_the_newest_are_kept() -> None:
    many = figures(*(ended_at(1000.0, float(number)) for number in range(LATENCY_REQUESTS + 50)))
    assert many is not None and many.requests == LATENCY_REQUESTS
    assert many.ttft.p50_ms > LATENCY_REQUESTS / 2
    slow_then_fast = [ended_at(1000.0, 1.0, (500.0,) * 1000)] * 2 + [ended_at(1000.0, 1.0, (5.0,) * 1000)] * 9
    assert COUNTED_GAPS < 9 * 1000
    assert rounded(figures(*slow_then_fast).tbt) == (5.0, 5.0)  # type: ignore[union-attr]

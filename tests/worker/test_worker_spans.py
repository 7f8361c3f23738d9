"""The spans of a request on a worker, and the newest requests that it keeps."""

import pytest

from baton.process.telemetry.clock_offset import ClockOffset
from baton.process.telemetry.spans import FinishedSpan, NoTelemetry, WallClock
from baton.process.telemetry.trace_context import TraceContext, new_trace
from baton.worker.spans import SHOWN_CHUNKS, WorkerClock, write_spans
from baton.worker.times import KEPT_CHUNKS, KEPT_REQUESTS, RequestLog, RequestTimes, TransferTime

CLOCK = WorkerClock(WallClock(1_000_000_000_000, 100.0), ClockOffset(902.0, 0.003))


class Kept(NoTelemetry):
    def __init__(self) -> None:
        self.spans: list[FinishedSpan] = []

    def span(self, span: FinishedSpan) -> TraceContext:
        self.spans.append(span)
        return super().span(span)


def written(times: RequestTimes, role: str = "decode", clock: WorkerClock = CLOCK) -> list[FinishedSpan]:
    kept = Kept()
    write_spans(kept, times, "decode-0", role, clock)
    return kept.spans


def answer() -> RequestTimes:
    times = RequestTimes(7, "r7", new_trace().traceparent, arrived_s=100.0, prompt_tokens=64)
    times.transfer = TransferTime(100.1, 100.2, "127.0.0.1:1", 4096, "shared_memory")
    for index in range(5):
        times.add_tokens(1, 100.3 + index * 0.1)
    times.ended_s = 101.0
    return times


def test_all_are_below_the_span_of_the_worker_which_is_below_the_routers() -> None:
    times = answer()
    root, *rest = written(times)
    assert root.name == "worker.decode" and root.parent is not None and root.identity is not None
    assert root.parent.traceparent == times.traceparent
    assert {span.parent for span in rest} == {root.identity}
    assert [span.name for span in rest] == ["worker.kv.pull", "worker.decode.first_step", "worker.decode.steps"]
    assert root.attributes["baton.request_id"] == "r7" and root.attributes["baton.tokens"] == 5


def test_times_are_put_on_the_routers_clock_and_the_error_is_said() -> None:
    root = written(answer())[0]
    assert root.start_ns == 1_002_000_000_000 and root.end_ns == 1_003_000_000_000
    assert (root.attributes["baton.clock.offset_ms"], root.attributes["baton.clock.error_ms"]) == (2000.0, 3.0)
    unknown = written(answer(), clock=WorkerClock(CLOCK.wall, None))[0]
    assert unknown.start_ns == 1_000_000_000_000 and "baton.clock.offset_ms" not in unknown.attributes


def test_prompt_of_many_chunks_has_few_spans_and_all_its_tokens() -> None:
    times = RequestTimes(1, "r", new_trace().traceparent, arrived_s=100.0)
    for index in range(2 * KEPT_CHUNKS):
        times.add_chunk(100.0 + index, 100.5 + index, 10)
    times.first_step_s = 100.0 + 2 * KEPT_CHUNKS
    chunks = [span for span in written(times, "prefill") if span.name == "worker.prefill.chunk"]
    assert len(chunks) == SHOWN_CHUNKS
    tokens = [span.attributes["baton.tokens"] for span in chunks]
    assert sum(each for each in tokens if isinstance(each, int)) == 2 * KEPT_CHUNKS * 10


def test_drafted_tokens_are_said_where_there_were_any() -> None:
    times = answer()
    assert "baton.drafted_tokens" not in written(times)[0].attributes
    times.drafted_tokens, times.accepted_tokens = 9, 4
    attributes = written(times)[0].attributes
    assert (attributes["baton.drafted_tokens"], attributes["baton.accepted_tokens"]) == (9, 4)


def test_request_that_failed_says_why() -> None:
    times = answer()
    times.failure = "the deadline passed"
    assert written(times)[0].error == "the deadline passed"


@pytest.mark.parametrize("traceparent", ["", "no trace", f"00-{'a' * 32}-{'b' * 16}-00"])
def test_without_a_sampled_trace_nothing_is_written(traceparent: str) -> None:
    times = answer()
    times.traceparent = traceparent
    assert written(times) == []


def test_requests_are_kept_from_their_arrival_and_only_the_newest() -> None:
    now = [10.0]
    log = RequestLog(lambda: now[0])
    for number in range(KEPT_REQUESTS + 5):
        log.begin(RequestTimes(number))
        if number:
            now[0] += 1.0
            log.end(RequestTimes(number))
    kept = [times.number for times in log.since(0.0)]
    assert kept == [0, *range(5, KEPT_REQUESTS + 5)]
    assert [times.number for times in log.since(now[0])] == [0, KEPT_REQUESTS + 4]


def test_request_ends_once() -> None:
    ended = list[int]()
    log = RequestLog(on_end=lambda times: ended.append(times.number))
    times = RequestTimes(3)
    log.begin(times)
    log.end(times)
    log.end(times)
    assert ended == [3]

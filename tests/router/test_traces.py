"""One trace per request: the stages, and the two sums that hold."""

import asyncio
from typing import Any

import grpc
import pytest

from baton.process.telemetry.loop_lag import Delay
from baton.process.telemetry.spans import FinishedSpan, SpanKind
from baton.protos import baton_pb2, session_pb2
from baton.router.trace.record import AttemptNote, RequestRecord, Timeline, TokenGaps, stages
from baton.router.trace.spans import finish_reasons, request_spans
from baton.router.trace.stalls import StallBound, gap_summary
from baton.router.types.events import FirstStep, KvReceived, PrefillTimings
from baton.router.types.request import Operation
from tests.fixtures.waiting import eventually
from tests.router.conftest import Stack, encode

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def spans_of(stack: Stack, count: int = 1) -> dict[str, FinishedSpan]:
    """Spans of the newest request, by name, once it was recorded."""
    await eventually(lambda: len([s for s in stack.telemetry.spans if s.kind is SpanKind.SERVER]) >= count)
    begin = max(i for i, span in enumerate(stack.telemetry.spans) if span.kind is SpanKind.SERVER)
    return {span.name: span for span in stack.telemetry.spans[begin:]}


async def test_request_leaves_one_trace_with_all_its_stages(stack: Stack) -> None:
    await stack.ready()
    stack.pair.manual = True
    request = baton_pb2.GenerateRequest(text="hello", sampling=baton_pb2.SamplingParams(max_tokens=5))
    call = stack.stub.Generate(request, timeout=10, metadata=(("traceparent", PARENT),))
    attempt_id = (await stack.prefill.received("prefill")).attempt_id
    stack.pair.first_step(attempt_id, encode("h"))
    incoming = aiter(call)
    responses = [await anext(incoming)]
    stack.pair.landed(attempt_id)
    stack.pair.step(attempt_id, 0, encode("hello"), end=session_pb2.END_REASON_LENGTH)
    responses += [response async for response in incoming]
    spans = await spans_of(stack)
    root = spans["text_completion tiny"]
    assert set(spans) == {
        "text_completion tiny", "router.tokenise", "router.queue", "route.select", "prefill.queue", "prefill.chunk",
        "return", "kv.transfer", "decode.admission", "decode.first_step", "decode", "detokenize",
    }  # fmt: skip
    assert root.parent is not None and root.parent.traceparent == PARENT
    assert root.identity is not None
    assert all(span.parent == root.identity for span in spans.values() if span is not root)
    assert all(span.start_ns <= span.end_ns for span in spans.values())
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.usage.input_tokens"] == 5
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert root.attributes["baton.ttft_ms"] == pytest.approx(responses[-1].finished.timings.ttft_ms, abs=1e-3)
    assert spans["kv.transfer"].attributes["baton.transfer.overlapped_share"] == pytest.approx(0.75)
    assert spans["kv.transfer"].attributes["baton.transfer.gb_per_s"] == pytest.approx(4096 / 2e-3 / 1e9)


async def test_request_attributes_follow_the_conventions_and_omit_defaults(stack: Stack) -> None:
    await stack.generate(max_tokens=2)
    plain = (await spans_of(stack))["text_completion tiny"].attributes
    assert {name: value for name, value in plain.items() if name.startswith(("gen_ai.", "server."))} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.temperature": plain["gen_ai.request.temperature"],
        "gen_ai.request.top_p": plain["gen_ai.request.top_p"],
        "gen_ai.response.id": plain["gen_ai.response.id"],
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.time_to_first_chunk": plain["gen_ai.response.time_to_first_chunk"],
        "gen_ai.usage.input_tokens": plain["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 2,
        **{name: 0 for name in ("gen_ai.usage.cache_read.input_tokens",) if name in plain},  # decode may be faster
        "server.address": plain["server.address"],
        "server.port": plain["server.port"],
    }
    assert isinstance(plain["server.port"], int) and plain["server.port"] > 0


def test_each_choice_has_a_reason_in_its_place_and_error_where_it_did_not_end() -> None:
    record = RequestRecord.begin(Operation.GENERATE, None)
    record.finish_reasons, record.ended_choices = ["stop", "length"], [2, 0]
    assert finish_reasons(record, 4) == ("length", "error", "stop", "error")


def test_complete_answer_has_no_first_chunk() -> None:
    record = RequestRecord.begin(Operation.CHAT, None)
    record.timeline.first_token_s = record.timeline.arrived_s + 0.5
    record.model = "tiny"
    streamed = next(request_spans(record, record.timeline.arrived_s + 1.0))
    record.is_streamed = False
    whole = next(request_spans(record, record.timeline.arrived_s + 1.0))
    assert streamed.name == "chat tiny" and streamed.kind is SpanKind.SERVER
    assert set(streamed.attributes) - set(whole.attributes) == {
        "gen_ai.request.stream",
        "gen_ai.response.time_to_first_chunk",
    }


async def test_workers_get_the_place_of_the_root_span(stack: Stack) -> None:
    await stack.generate(max_tokens=2)
    root = (await spans_of(stack))["text_completion tiny"]
    assert root.identity is not None
    for command in (await stack.prefill.received("prefill"), await stack.decode.received("start")):
        assert command.traceparent == root.identity.traceparent


async def test_refused_and_cancelled_requests_leave_a_trace_too(stack: Stack) -> None:
    await stack.ready()
    call = stack.stub.Generate(baton_pb2.GenerateRequest(text=""), timeout=10)
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
        await call.read()
    assert (await spans_of(stack))["text_completion"].error == "INVALID_ARGUMENT"
    stack.pair.manual = True
    call = stack.stub.Generate(baton_pb2.GenerateRequest(text="hello"), timeout=10)
    attempt_id = (await stack.prefill.received("prefill")).attempt_id
    call.cancel()
    assert (await stack.prefill.received("cancel")).attempt_id == attempt_id
    assert (await spans_of(stack, 2))["text_completion tiny"].error == "CANCELLED"


async def test_nothing_that_was_said_is_recorded(stack: Stack) -> None:
    secret = "tell nobody"
    await stack.generate(secret, max_tokens=20)
    await spans_of(stack)
    assert secret not in repr(stack.telemetry.spans)
    assert str(tuple(encode(secret)))[1:-1] not in repr(stack.telemetry.spans)


async def test_time_between_tokens_is_kept_as_a_summary_with_stalls() -> None:
    gaps = TokenGaps()
    for index in range(101):
        gaps.add(0, 1, now=index * 0.010 + (0.5 if index == 100 else 0.0))
    summary = gap_summary(gaps, StallBound(), lambda began_s, ended_s: Delay(0.0, 0.0))
    assert summary is not None
    assert summary.p50_ms == pytest.approx(10.0)
    assert summary.p99_ms == summary.max_ms == pytest.approx(510.0)
    assert [stall.gap_ms for stall in summary.stalls] == [pytest.approx(510.0)]


PLACED: Any = "a decision, which nothing here reads"


def test_stages_add_up_by_construction() -> None:
    timeline = Timeline(arrived_s=10.0, route_began_s=10.1, sent_s=10.101, first_step_s=10.2, first_token_s=10.2)
    timeline.prefill = PrefillTimings(queue_ms=5.0, chunk_ms=(30.0, 40.0), total_ms=75.0, cached_tokens=0)
    timeline.kv_received = KvReceived(1, 100, 3.0, exposed_ms=2.0, admission_ms=1.0, first_step_ms=4.0, transport="grpc", cached_tokens=0)  # fmt: skip  # noqa: E501
    timeline.second_token_s = 10.207
    measured = stages(timeline, now=11.0)
    parts = measured.router_queue_ms + measured.route_ms + measured.prefill_queue_ms
    assert measured.ttft_ms == pytest.approx(parts + measured.prefill_ms + measured.return_ms)
    exposed = measured.transfer_exposed_ms + measured.decode_admission_ms + measured.first_step_ms
    assert measured.token_gap_ms == pytest.approx(exposed)


def test_gap_to_a_second_token_of_another_attempt_is_recovery() -> None:
    nothing: Any = None
    timeline = Timeline(arrived_s=10.0, first_step_s=10.2, first_token_s=10.2)
    timeline.begin_attempt(
        AttemptNote(nothing, nothing, PLACED, 0.0, 0.0, attempt_id=2, choice=0, answered_tokens=1), 10.5
    )
    timeline.take_first_step(FirstStep(2, (), PrefillTimings(0.0, (1.0,), 1.0, 0)), 10.9)
    timeline.take_kv_received(KvReceived(2, 100, 3.0, exposed_ms=2.0, admission_ms=1.0, first_step_ms=4.0, transport="grpc", cached_tokens=0))  # fmt: skip  # noqa: E501
    timeline.take_decode_output(2, 0, 0, 2, 11.0)
    measured = stages(timeline, now=12.0)
    exposed = measured.transfer_exposed_ms + measured.decode_admission_ms + measured.first_step_ms
    assert (measured.token_gap_ms, measured.recovery_ms, exposed) == (pytest.approx(700.0), pytest.approx(700.0), 0.0)
    assert [(each.gap_ms, each.offset) for each in timeline.resumes] == [(pytest.approx(700.0), 1)]
    assert timeline.last_kv_received is not None


def overtaken(prefill_s: float | None, begins: int = 0) -> Timeline:
    """Decode's first message has two tokens, or more that the client has; prefill's comes later, or not at all."""
    nothing: Any = None
    timeline = Timeline(arrived_s=10.0)
    timeline.begin_attempt(AttemptNote(nothing, nothing, PLACED, 10.0, 10.0, attempt_id=1), 10.0)
    timeline.dispatched(10.1)
    timeline.take_decode_output(1, 0, begins, 2 - begins, 10.2)
    timeline.first_token_s = 10.2
    timeline.take_decode_output(1, 0, 2, 1, 10.25)
    timeline.take_kv_received(KvReceived(1, 100, 3.0, exposed_ms=2.0, admission_ms=1.0, first_step_ms=4.0, transport="grpc", cached_tokens=0))  # fmt: skip  # noqa: E501
    if prefill_s is not None:
        timeline.take_first_step(FirstStep(1, (), PrefillTimings(5.0, (30.0,), 35.0, 0)), prefill_s)
    return timeline


@pytest.mark.parametrize(("prefill_s", "return_ms"), [(10.4, 65.0), (None, 100.0)])
@pytest.mark.parametrize("begins", [0, -3])
def test_stages_add_up_where_decodes_first_message_overtakes_prefills(
    prefill_s: float | None, return_ms: float, begins: int
) -> None:
    measured = stages(overtaken(prefill_s, begins), now=11.0)
    assert (measured.ttft_ms, measured.return_ms) == (pytest.approx(200.0), pytest.approx(return_ms))
    parts = measured.router_queue_ms + measured.route_ms + measured.prefill_queue_ms + measured.prefill_ms
    assert measured.ttft_ms == pytest.approx(parts + measured.return_ms)
    exposed = measured.transfer_exposed_ms + measured.decode_admission_ms + measured.first_step_ms
    assert measured.token_gap_ms == measured.recovery_ms + exposed == 0.0


def test_attempt_resumes_with_its_first_token_from_any_worker() -> None:
    nothing: Any = None
    timeline = overtaken(prefill_s=None)
    timeline.begin_attempt(
        AttemptNote(nothing, nothing, PLACED, 0.0, 0.0, attempt_id=2, choice=0, answered_tokens=3), 10.5
    )
    timeline.take_decode_output(2, 0, 0, 1, 10.9)
    timeline.take_first_step(FirstStep(2, (), PrefillTimings(0.0, (1.0,), 1.0, 0)), 11.4)
    assert [(each.gap_ms, each.offset) for each in timeline.resumes] == [(pytest.approx(650.0), 3)]
    assert timeline.gaps.each_ms == [pytest.approx(50.0), pytest.approx(650.0)]


def test_adopted_answer_was_not_resumed_by_another_attempt() -> None:
    nothing: Any = None
    timeline = Timeline(arrived_s=10.0)
    adopted = AttemptNote(nothing, nothing, None, 10.0, 10.0, attempt_id=1, answered_tokens=2)
    timeline.begin_attempt(adopted, 10.0)
    timeline.take_decode_output(1, 1, -2, 6, 10.2)
    assert timeline.resumes == [] and timeline.gaps.each_ms == []
    assert (timeline.first_step_s, adopted.first_step_s, adopted.stood_still_ms) == (None, None, None)


def test_later_resumes_keep_the_first_gap() -> None:
    nothing: Any = None
    timeline = Timeline(arrived_s=10.0, first_step_s=10.2, first_token_s=10.2)
    for offset, now in ((1, 10.3), (2, 10.4)):
        timeline.take_decode_output(1, 0, offset, 1, now)
    timeline.begin_attempt(
        AttemptNote(nothing, nothing, PLACED, 0.0, 0.0, attempt_id=2, choice=0, answered_tokens=3), 11.0
    )
    timeline.take_first_step(FirstStep(2, (), PrefillTimings(0.0, (1.0,), 1.0, 0)), 11.4)
    timeline.take_decode_output(2, 0, 1, 1, 11.5)
    assert stages(timeline, now=12.0).token_gap_ms == pytest.approx(100.0)
    assert timeline.gaps.each_ms == [pytest.approx(gap) for gap in (100.0, 1000.0, 100.0)]


async def test_retry_keeps_only_the_last_attempts_stages(stack: Stack) -> None:
    await stack.ready()
    stack.pair.manual = True
    answer = asyncio.create_task(stack.generate(max_tokens=1))
    first = (await stack.decode.received("start")).attempt_id
    stack.decode.fail(first, session_pb2.FAILURE_REASON_DRAINING)
    second = (await stack.decode.received("start", 2)).attempt_id
    stack.pair.first_step(second, encode("a"), [session_pb2.END_REASON_LENGTH])
    timings = (await answer)[-1].finished.timings
    assert timings.ttft_ms == pytest.approx(
        timings.router_queue_ms + timings.route_ms + timings.prefill_queue_ms + timings.prefill_ms + timings.return_ms,
        abs=2.0,
    )
    assert (await spans_of(stack))["text_completion tiny"].attributes["baton.attempts"] == 2

"""Trace of each completed request: its stages, computed from the router's clock and durations that workers report.

The root span `text_completion {model}` or `chat {model}` has gen_ai.* attributes (docs/traces.md), and every stage in
milliseconds as `baton.*_ms`:
    baton.ttft_ms      = router_queue + route + prefill_fetch + prefill_queue + prefill + return
    baton.token_gap_ms = recovery + transfer_exposed + decode_admission + first_step
Children: router.tokenise (a part of the queue), router.queue, route.select, prefill.fetch, prefill.queue,
prefill.chunk (each), return, recovery, kv.transfer, decode.admission, decode.first_step, decode (time between tokens,
one event per stall), detokenize; and each attempt, if one failed. Stages that a request did not reach have no span.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from baton.process.telemetry.loop_lag import Delay
from baton.process.telemetry.spans import (
    Attributes,
    AttributeValue,
    FinishedSpan,
    SpanEvent,
    SpanKind,
    Telemetry,
    WallClock,
)
from baton.process.telemetry.trace_context import current_request_id
from baton.router.trace.record import GapSummary, RequestRecord, Stall, Timeline, stages, transit_ms
from baton.router.trace.report import RecentReports, report_of
from baton.router.trace.stalls import DelayBetween, StallBound, gap_summary
from baton.router.types.events import Drafts, KvReceived, PrefillTimings
from baton.router.types.response import Stages
from baton.text.structured.output import StructuredKind
from baton.text.structured.thoughts import form_of

_PROVIDER = "baton"
_JSON = (StructuredKind.JSON_SCHEMA, StructuredKind.JSON_OBJECT)
_STAGES = {stage.name: f"baton.{stage.name}" for stage in fields(Stages)}


class ServerAddress(NamedTuple):
    """Address of this router's gRPC port. Traces of HTTP requests state it, too."""

    host: str
    port: int


RecordObserver = Callable[[RequestRecord], None]


class Tracer:
    """Writes the traces of completed requests. Its methods never block."""

    def __init__(
        self,
        telemetry: Telemetry,
        worker_id: Callable[[str], str] = str,
        bound: StallBound | None = None,
        delay: DelayBetween = lambda began_s, ended_s: Delay(0.0, 0.0),
        recent: RecentReports | None = None,
        server: Callable[[], ServerAddress | None] = lambda: None,
        observers: Sequence[RecordObserver] = (),
        late_observers: Sequence[RecordObserver] = (),
    ) -> None:
        """Create a tracer. `worker_id` returns the id of the worker at an endpoint. `delay` returns the delay of this
        router's event loop. `recent`: receives the reports. `server` returns this router's address once it listens.

        `observers` are called with each request when it completes; `late_observers` are called in the next event-loop
        iteration, when its gaps and stalls are known.
        """
        self._telemetry = telemetry
        self._bound, self._delay = bound or StallBound(), delay
        self._worker_id = worker_id
        self._server = server
        self.observers, self.late_observers = observers, late_observers
        self.recent = recent or RecentReports()

    def gaps_of(self, record: RequestRecord) -> GapSummary | None:
        """Return the summary of a request's gaps so far; None before its second token."""
        return record.gaps or gap_summary(record.timeline.gaps, self._bound, self._delay)

    def record(self, record: RequestRecord) -> None:
        """Call the observers with a completed request, and write its trace in the next event-loop iteration."""
        for observe in self.observers:
            observe(record)
        # The trace is written later: first, waiting requests get the resources that this request has released.
        asyncio.get_running_loop().call_soon(self._write, record, WallClock.now().monotonic_s)

    def _write(self, record: RequestRecord, ended_s: float) -> None:
        record.gaps = gap_summary(record.timeline.gaps, self._bound, self._delay)
        for observe in self.late_observers:
            observe(record)
        spans = list(request_spans(record, ended_s, self._worker_id, self._server()))
        self.recent.add(report_of(record, ended_s, record.gaps, current_request_id.get() or "", spans))
        for span in spans:
            self._telemetry.span(span)


def request_spans(
    record: RequestRecord,
    now_s: float,
    worker_id: Callable[[str], str] = str,
    server: ServerAddress | None = None,
) -> Iterator[FinishedSpan]:
    """Yield the root span, then a span of each stage that the request reached. `now_s`: end of unfinished stages."""
    measured = stages(record.timeline, now_s)
    gaps = record.gaps
    clock = record.clock
    yield FinishedSpan(
        name=record.name,
        start_ns=clock.at(record.timeline.arrived_s),
        end_ns=clock.at(now_s),
        parent=record.parent,
        identity=record.identity,
        kind=SpanKind.SERVER,
        attributes={
            **_request_attributes(record, server),
            **_result_attributes(record, measured),
            **_stage_attributes(measured),
            **_gap_attributes(gaps),
            **_draft_attributes(record.timeline.drafts),
        },
        error=record.error,
    )
    timeline = record.timeline
    for stage in (
        *_to_first_token(timeline, measured, now_s),
        *_decode_stages(timeline, measured, gaps),
        *_attempts(timeline, now_s, worker_id),
    ):
        yield FinishedSpan(
            name=stage.name,
            start_ns=clock.at(stage.begin_s),
            end_ns=clock.at(max(stage.begin_s, stage.end_s)),
            parent=record.identity,
            attributes=stage.attributes,
            events=[
                SpanEvent("stall", clock.at(stall.at_s), _stall_attributes(stall))
                for stall in (gaps.stalls if gaps and stage.name == "decode" else ())
            ],
        )


@dataclass(frozen=True, slots=True)
class _StageSpan:
    name: str
    begin_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)


def _to_first_token(timeline: Timeline, measured: Stages, now_s: float) -> Iterator[_StageSpan]:
    route_s = timeline.route_began_s
    if timeline.tokenised_s is not None:
        yield _StageSpan("router.tokenise", timeline.arrived_s, timeline.tokenised_s)
    yield _StageSpan("router.queue", timeline.arrived_s, now_s if route_s is None else route_s)
    if route_s is None or timeline.sent_s is None:
        return
    yield _StageSpan("route.select", route_s, timeline.sent_s, _route_attributes(timeline))
    if timeline.prefill is None or timeline.first_step_s is None:
        return
    # Only the round trip is known, so half of it is assumed in each direction.
    begin_s = timeline.sent_s + max(0.0, transit_ms(timeline)) / 2e3
    if measured.prefill_fetch_ms > 0.0:
        begin_s, fetch_s = begin_s + measured.prefill_fetch_ms / 1e3, begin_s
        yield _StageSpan("prefill.fetch", fetch_s, begin_s, _fetch_attributes(timeline.prefill))
    # All waiting is shown before the first chunk, although some of it may have been between chunks.
    end_s = begin_s + measured.prefill_queue_ms / 1e3
    before_ms = timeline.prefill.queue_ms - timeline.prefill.fetch_ms
    yield _StageSpan("prefill.queue", begin_s, end_s, {"baton.before_first_chunk_ms": before_ms})
    for chunk_ms in timeline.prefill.chunk_ms:
        begin_s, end_s = end_s, end_s + chunk_ms / 1e3
        yield _StageSpan("prefill.chunk", begin_s, end_s)
    return_attributes: Attributes = {"baton.return_ms": measured.return_ms}
    yield _StageSpan("return", end_s, timeline.first_token_s or timeline.first_step_s, return_attributes)


def _decode_stages(timeline: Timeline, measured: Stages, gaps: GapSummary | None) -> Iterator[_StageSpan]:
    """Yield the spans of decode's stages. Those up to its first output are computed backwards from that time."""
    kv_received, second_s = timeline.kv_received, timeline.second_token_s
    if timeline.first_step_s is not None and timeline.resumed_step_s is not None:
        yield _StageSpan("recovery", timeline.first_step_s, timeline.resumed_step_s)
    if kv_received is not None and second_s is not None:
        step_s = second_s - kv_received.first_step_ms / 1e3
        admission_s = step_s - kv_received.admission_ms / 1e3
        transfer_s = admission_s - max(kv_received.copy_ms, kv_received.exposed_ms) / 1e3
        yield _StageSpan("kv.transfer", transfer_s, admission_s, _transfer_attributes(kv_received))
        yield _StageSpan("decode.admission", admission_s, step_s)
        yield _StageSpan("decode.first_step", step_s, second_s)
    elif measured.first_step_ms and second_s is not None:
        yield _StageSpan("decode.first_step", second_s - measured.first_step_ms / 1e3, second_s)
    if second_s is not None and timeline.last_token_s is not None:
        attributes = _gap_attributes(gaps) | _draft_attributes(timeline.drafts)
        yield _StageSpan("decode", second_s, timeline.last_token_s, attributes)
    if timeline.detokenise_ms and timeline.ended_s is not None:
        # Detokenisation is spread over the answer, but shown as one span at the end.
        begin_s = timeline.ended_s - timeline.detokenise_ms / 1e3
        yield _StageSpan("detokenize", begin_s, timeline.ended_s, {"baton.detokenise_ms": timeline.detokenise_ms})


def _attempts(timeline: Timeline, now_s: float, worker_id: Callable[[str], str]) -> Iterator[_StageSpan]:
    """If an attempt failed, yield a span for each attempt: its workers, its failure, and the client's wait for it."""
    if not any(note.failed for note in timeline.notes):
        return
    for number, note in enumerate(timeline.notes, 1):
        prefill, decode = note.placement.prefill, note.placement.decode
        attributes: dict[str, AttributeValue] = {
            "baton.attempt.number": number,
            "baton.attempt.decode": worker_id(decode),
            "baton.attempt.first_token": note.answered_tokens,
        }
        if prefill is not None:
            attributes["baton.attempt.prefill"] = worker_id(prefill)
        if note.choice is not None:
            attributes["baton.attempt.choice"] = note.choice
        if note.stood_still_ms is not None:
            attributes["baton.attempt.stood_still_ms"] = round(note.stood_still_ms, 3)
        if note.failed is not None:
            attributes |= {
                "baton.attempt.failure": note.failed.reason.name,
                "baton.attempt.failed_worker": worker_id(note.failed.endpoint),
                "baton.attempt.message": note.failed.message,
            }
        yield _StageSpan("attempt", note.placed_s, note.failed_s or timeline.ended_s or now_s, attributes)


def _request_attributes(record: RequestRecord, server: ServerAddress | None) -> dict[str, AttributeValue]:
    """Return the request's span attributes. As the GenAI conventions demand, defaults are left out."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": record.operation.value,
        "gen_ai.provider.name": _PROVIDER,
    }
    if record.model:
        attributes["gen_ai.request.model"] = record.model
    if record.is_streamed:
        attributes["gen_ai.request.stream"] = True
    if server is not None:
        attributes |= {"server.address": server.host, "server.port": server.port}
    if record.prepared is not None:
        sampling = record.prepared.sampling
        attributes |= {
            "gen_ai.response.id": record.prepared.request_id,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.usage.input_tokens": len(record.prepared.token_ids),
        }
        if record.prepared.kept_session is not None:
            attributes["gen_ai.conversation.id"] = record.prepared.kept_session.name
        form = form_of(sampling.structured)
        if form is not None and form.kind in _JSON:
            attributes["gen_ai.output.type"] = "json"
        optional = {
            "top_k": (sampling.top_k, 0),
            "choice.count": (record.prepared.n, 1),
            "frequency_penalty": (sampling.frequency_penalty, 0.0),
            "presence_penalty": (sampling.presence_penalty, 0.0),
        }
        attributes |= {f"gen_ai.request.{name}": value for name, (value, usual) in optional.items() if value != usual}
    return attributes


def _result_attributes(record: RequestRecord, measured: Stages) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {"baton.attempts": record.timeline.attempts}
    if record.timeline.resumes:
        attributes["baton.resumes"] = len(record.timeline.resumes)
        attributes["baton.longest_resume_ms"] = round(max(each.gap_ms for each in record.timeline.resumes), 3)
    if failures := [note.failed.reason.name.lower() for note in record.timeline.notes if note.failed is not None]:
        attributes["baton.failed_attempts"] = tuple(failures)
    if record.prepared is not None and (record.finish_reasons or record.timeline.first_token_s is not None):
        attributes["gen_ai.response.finish_reasons"] = finish_reasons(record, record.prepared.n)
    if record.end is not None:
        attributes |= {"baton.outcome": record.end.outcome.value, "baton.reason": record.end.reason}
    if record.is_resumed:
        attributes["baton.resumed"] = True
    if record.error is not None:
        attributes["error.type"] = record.error
    if record.timeline.first_token_s is not None and record.is_streamed:
        attributes["gen_ai.response.time_to_first_chunk"] = measured.ttft_ms / 1e3
    if record.prepared is not None:
        attributes["gen_ai.usage.output_tokens"] = record.completion_tokens
    if record.timeline.prefill is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.timeline.prefill.cached_tokens
    if record.summary is not None:
        attributes["gen_ai.response.model"] = record.model
    if record.version:
        attributes["baton.model.version"] = record.version
    return attributes


def finish_reasons(record: RequestRecord, choices: int) -> tuple[str, ...]:
    """Return the finish reason of each choice; `error` for a choice that did not finish."""
    by_choice = dict(zip(record.ended_choices, record.finish_reasons, strict=False))
    return tuple(by_choice.get(choice, "error") for choice in range(choices))


def _stage_attributes(measured: Stages) -> dict[str, AttributeValue]:
    return {attribute: round(getattr(measured, name), 3) for name, attribute in _STAGES.items()}


def _gap_attributes(gaps: GapSummary | None) -> dict[str, AttributeValue]:
    if gaps is None:
        return {}
    return {
        "baton.tbt_p50_ms": round(gaps.p50_ms, 3),
        "baton.tbt_p99_ms": round(gaps.p99_ms, 3),
        "baton.tbt_max_ms": round(gaps.max_ms, 3),
        "baton.stalls": gaps.stall_count,
    }


def _draft_attributes(drafts: Drafts) -> dict[str, AttributeValue]:
    if not drafts.happened:
        return {}
    return {
        "baton.drafted_tokens": drafts.drafted_tokens,
        "baton.accepted_tokens": drafts.accepted_tokens,
        "baton.drafts_saved_ms": round(drafts.saved_ms, 3),
    }


def _stall_attributes(stall: Stall) -> Attributes:
    """Return a stall's span attributes. The lists of causes, times, causing requests and details are parallel."""
    return {
        "baton.gap_ms": round(stall.gap_ms, 3),
        "baton.choice": stall.choice,
        "baton.usual_ms": round(stall.usual_ms, 3),
        "baton.causes": tuple(part.cause.value for part in stall.causes),
        "baton.cause_ms": tuple(round(part.ms, 3) for part in stall.causes),
        "baton.culprits": tuple(part.request_id for part in stall.causes),
        "baton.details": tuple(part.detail for part in stall.causes),
    }


def _route_attributes(timeline: Timeline) -> dict[str, AttributeValue]:
    if timeline.placement is None:
        return {}
    attributes = {f"baton.route.{name}": value for name, value in timeline.placement._asdict().items()}
    # The placement has the predicted hits (*_hit_tokens); the measured hits are added. Both are of the last attempt,
    # although the stages may be of an earlier one.
    measured = timeline.notes[-1] if timeline.notes else timeline
    prefill, kv_received = measured.prefill, measured.kv_received
    computed_by = "prefill" if timeline.placement.computes_for_others else "decode"
    if prefill is not None:
        attributes[f"baton.route.{computed_by}_cached_tokens"] = prefill.found_tokens
    if kv_received is not None:
        attributes["baton.route.decode_cached_tokens"] = kv_received.cached_tokens
    return {name: value for name, value in attributes.items() if value is not None}


def _fetch_attributes(prefill: PrefillTimings) -> Attributes:
    return {
        "baton.fetch.tokens": prefill.fetched_tokens,
        "baton.fetch.bytes": prefill.fetch_bytes,
        "baton.fetch.transport": prefill.fetch_transport,
    }


def _transfer_attributes(kv_received: KvReceived) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "baton.transfer.bytes": kv_received.transferred_bytes,
        "baton.transfer.transport": kv_received.transport,
        "baton.transfer.copy_ms": kv_received.copy_ms,
        "baton.transfer.exposed_ms": kv_received.exposed_ms,
        "baton.transfer.cached_tokens": kv_received.cached_tokens,
    }
    if kv_received.copy_ms > 0.0:
        # 1 byte per ms = 1e3 bytes per s = 1e-6 GB per s
        attributes["baton.transfer.gb_per_s"] = kv_received.transferred_bytes / kv_received.copy_ms * 1e-6
        attributes["baton.transfer.overlapped_share"] = min(
            1.0, max(0.0, 1.0 - kv_received.exposed_ms / kv_received.copy_ms)
        )
    return attributes

"""From protobuf responses to the client's own types. The other half of requests.py."""

from dataclasses import fields

from baton.client.cluster import (
    CacheView,
    ClusterStatus,
    EndedRequests,
    Latency,
    Link,
    Load,
    PageCounts,
    PlannerStatus,
    Quantiles,
    RequestTotals,
    Role,
    RouterStatus,
    WorkerStatus,
)
from baton.client.errors import ProtocolError
from baton.client.types import (
    Alternative,
    Delta,
    Event,
    Finished,
    FinishReason,
    Model,
    PromptPart,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)
from baton.protos import admin_pb2, baton_pb2, report_pb2, session_pb2

Response = baton_pb2.GenerateResponse | baton_pb2.ChatResponse | baton_pb2.ResumeResponse
FINISH_REASONS = {
    baton_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    baton_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
ROLES: dict[int, Role] = {session_pb2.ROLE_PREFILL: "prefill", session_pb2.ROLE_DECODE: "decode"}


def event_from(response: Response) -> Event:
    """Raises: ProtocolError for an event or a finish reason that this client does not know, and for log-probabilities
    that do not match their tokens.
    """
    match response.WhichOneof("event"):
        case "started":
            started = response.started
            return Started(started.request_id, started.model, started.prompt_tokens, started.seed, started.resume_token)
        case "prompt":
            return _prompt_part_from(response.prompt)
        case "delta":
            return _delta_from(response.delta)
        case "finished":
            return _finished_from(response.finished)
        case _:
            raise ProtocolError("the server sent an event that this client does not know")


def _delta_from(delta: baton_pb2.Delta) -> Delta:
    return Delta(delta.index, delta.offset, tuple(delta.token_ids), delta.text, _logprobs_from(delta))


def _prompt_part_from(part: baton_pb2.PromptPart) -> PromptPart:
    return PromptPart(part.offset, tuple(part.token_ids), part.text, _logprobs_from(part))


def _logprobs_from(message: baton_pb2.Delta | baton_pb2.PromptPart) -> tuple[TokenLogprob, ...] | None:
    if not message.HasField("logprobs"):
        return None
    scores, tokens = message.logprobs, len(message.token_ids)
    width = len(scores.top_token_ids) // tokens if tokens else 0
    if len(scores.chosen) != tokens or not len(scores.top_token_ids) == len(scores.top_logprobs) == width * tokens:
        raise ProtocolError("the server sent log-probabilities that do not match their tokens")
    top = [Alternative(*pair) for pair in zip(scores.top_token_ids, scores.top_logprobs, strict=True)]
    return tuple(
        TokenLogprob(token_id, logprob, tuple(top[index * width : (index + 1) * width]))
        for index, (token_id, logprob) in enumerate(zip(message.token_ids, scores.chosen, strict=True))
    )


def _finished_from(finished: baton_pb2.Finished) -> Finished:
    reason = FINISH_REASONS.get(finished.reason)
    if reason is None:
        raise ProtocolError(f"the server sent finish reason {finished.reason}, which this client does not know")
    matched_stop: str | int | None = None
    match finished.WhichOneof("matched_stop"):
        case "stop_text":
            matched_stop = finished.stop_text
        case "stop_token_id":
            matched_stop = finished.stop_token_id
    return Finished(
        finished.index,
        reason,
        matched_stop,
        usage=_usage_from(finished.usage) if finished.HasField("usage") else None,
        timings=_timings_from(finished.timings) if finished.HasField("timings") else None,
    )


def _usage_from(usage: baton_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def _timings_from(timings: baton_pb2.Timings) -> Timings:
    return Timings(**{field.name: getattr(timings, field.name) for field in fields(Timings)})


def model_from(model: baton_pb2.Model) -> Model:
    return Model(model.name, model.max_model_len, model.vocab_size, model.dtype, model.block_size, parent=model.parent)


def cluster_status_from(response: admin_pb2.GetStatusResponse) -> ClusterStatus:
    return ClusterStatus(
        ready=response.ready,
        detail=response.detail,
        registry_connected=response.registry_connected,
        active_requests=response.active_requests,
        queued_requests=response.queued_requests,
        workers=tuple(_worker_from(worker) for worker in response.workers),
        other_routers=response.other_routers,
        indexed_blocks=response.indexed_blocks,
        routers=tuple(
            RouterStatus(each.router_id.hex(), each.address, each.uptime_s, each.requests, each.tokens)
            for each in response.routers
        ),
        planner=_planner_from(response.planner) if response.HasField("planner") else None,
        latency=_latency_from(response.latency) if response.HasField("latency") else None,
        requests=_requests_from(response.requests),
    )


def _requests_from(totals: admin_pb2.RequestTotals) -> RequestTotals:
    ended = tuple(EndedRequests(each.outcome, each.reason, each.count) for each in totals.ended)
    return RequestTotals(totals.started, ended, totals.prompt_tokens, totals.generated_tokens)


def _planner_from(planner: admin_pb2.PlannerStatus) -> PlannerStatus:
    return PlannerStatus(
        planner.mode, planner.prefill_pressure, planner.decode_pressure, planner.verdict, planner.changes
    )


def _latency_from(latency: admin_pb2.LatencyStatus) -> Latency:
    return Latency(
        latency.requests,
        Quantiles(latency.ttft.p50_ms, latency.ttft.p99_ms),
        Quantiles(latency.tbt.p50_ms, latency.tbt.p99_ms) if latency.HasField("tbt") else None,
    )


def _worker_from(status: admin_pb2.WorkerStatus) -> WorkerStatus:
    worker, model = status.worker, status.worker.model
    return WorkerStatus(
        worker_id=worker.worker_id,
        role=ROLES.get(worker.role, "unknown"),
        endpoint=status.endpoint,
        pid=worker.pid,
        epoch=status.epoch,
        connected=status.connected,
        fingerprint=worker.fingerprint.hex(),
        model=Model(model.name, model.max_model_len, model.vocab_size, model.dtype, model.block_size),
        model_path=model.path,
        total_blocks=worker.total_blocks,
        total_slots=worker.total_slots,
        in_flight_requests=status.in_flight_requests,
        deaths=status.deaths,
        drains=status.drains,
        role_changes=status.role_changes,
        lost_sessions=status.lost_sessions,
        load=_load_from(status.report) if status.HasField("report") else None,
        roles=tuple(ROLES.get(role, "unknown") for role in worker.roles),
        cache_view=_cache_view_from(status.cache_view) if status.HasField("cache_view") else None,
    )


def _cache_view_from(view: admin_pb2.CacheViewStatus) -> CacheView:
    return CacheView(**{field.name: getattr(view, field.name) for field in fields(CacheView)})


def _load_from(report: report_pb2.Report) -> Load:
    pages = {field.name: getattr(report.pages, field.name) for field in fields(PageCounts)}
    return Load(
        limit_blocks=report.limit_blocks,
        limit_slots=report.limit_slots,
        pages=PageCounts(**pages),
        waiting_requests=report.waiting_requests,
        running_sequences=report.running_sequences,
        pending_tokens=report.pending_tokens,
        draining=report.draining,
        steps=report.steps,
        cache_query_tokens=report.cache_query_tokens,
        cache_hit_tokens=report.cache_hit_tokens,
        preemptions=report.preemptions,
        unfilled_slots=report.unfilled_slots,
        links=tuple(Link(each.endpoint, each.transport, each.gb_per_s, each.fallback) for each in report.links),
        checked_blocks=report.checked_blocks,
        checksum_mismatches=report.checksum_mismatches,
    )

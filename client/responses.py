"""From protobuf responses to the client's own types. The other half of requests.py."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from baton.client.cluster import (
    AdapterStatus,
    CacheView,
    Candidate,
    ClusterStatus,
    EndedRequests,
    ExplainedAttempt,
    Latency,
    Link,
    Load,
    PageCounts,
    PlannerStatus,
    Quantiles,
    RecentRequest,
    RequestDrafts,
    RequestExplanation,
    RequestStages,
    RequestStall,
    RequestTotals,
    Role,
    RouterStatus,
    StallCausePart,
    TierView,
    TokenTimes,
    WorkerStatus,
)
from baton.client.errors import ProtocolError
from baton.client.types import (
    Alternative,
    CallBegins,
    CallPart,
    Delta,
    Embeddings,
    Event,
    Finished,
    FinishReason,
    Model,
    PromptPart,
    Scores,
    Started,
    ThoughtPart,
    Timings,
    TokenLogprob,
    Usage,
)
from baton.client.why import (
    BlockRun,
    CacheAutopsy,
    ColocatedPrefill,
    RequestWhy,
)
from baton.protos import admin_pb2, baton_pb2, report_pb2, session_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Response = baton_pb2.GenerateResponse | baton_pb2.ChatResponse | baton_pb2.ResumeResponse
FINISH_REASONS = {
    baton_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    baton_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    baton_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}
ROLES: dict[session_pb2.Role, Role] = {session_pb2.ROLE_PREFILL: "prefill", session_pb2.ROLE_DECODE: "decode"}
Value = TypeVar("Value", bound="DataclassInstance")


def event_from(response: Response) -> Event:
    """Raises: ProtocolError for an event or a finish reason that this client does not know, and for log-probabilities
    that do not match their tokens.
    """
    match response.WhichOneof("event"):
        case "started":
            return _like(Started, response.started)
        case "prompt":
            return _prompt_part_from(response.prompt)
        case "delta":
            return _delta_from(response.delta)
        case "finished":
            return _finished_from(response.finished)
    if not isinstance(response, baton_pb2.GenerateResponse):
        match response.WhichOneof("event"):
            case "thought":
                return _like(ThoughtPart, response.thought)
            case "call_begins":
                return _like(CallBegins, response.call_begins)
            case "call":
                return _like(CallPart, response.call)
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
    matched = finished.WhichOneof("matched_stop")
    return Finished(
        finished.index,
        reason,
        matched_stop=getattr(finished, matched) if matched else None,
        usage=_usage_from(finished.usage) if finished.HasField("usage") else None,
        timings=_like(Timings, finished.timings) if finished.HasField("timings") else None,
    )


def _usage_from(usage: baton_pb2.Usage) -> Usage:
    thoughts = usage.reasoning_tokens if usage.HasField("reasoning_tokens") else None
    return _like(Usage, usage, reasoning_tokens=thoughts)


def embeddings_from(response: baton_pb2.EmbedResponse) -> Embeddings:
    vectors = tuple(tuple(each.values) for each in response.embeddings)
    return _like(Embeddings, response, vectors=vectors, usage=_usage_from(response.usage))


def scores_from(response: baton_pb2.ScoreResponse) -> Scores:
    return _like(Scores, response, scores=tuple(response.scores), usage=_usage_from(response.usage))


def model_from(model: baton_pb2.Model) -> Model:
    return _like(Model, model)


def cluster_status_from(response: admin_pb2.GetStatusResponse) -> ClusterStatus:
    return _like(
        ClusterStatus,
        response,
        workers=tuple(_worker_from(worker) for worker in response.workers),
        routers=tuple(
            _like(RouterStatus, each, router_id=each.router_id.hex(), release=each.versions.release)
            for each in response.routers
        ),
        release=response.versions.release,
        protocol=response.versions.protocol,
        model_version=response.model_version,
        planner=_like(PlannerStatus, response.planner) if response.HasField("planner") else None,
        latency=_latency_from(response.latency) if response.HasField("latency") else None,
        requests=_like(
            RequestTotals,
            response.requests,
            ended=tuple(_like(EndedRequests, each) for each in response.requests.ended),
        ),
    )


def _latency_from(latency: admin_pb2.LatencyStatus) -> Latency:
    tbt = _like(Quantiles, latency.tbt) if latency.HasField("tbt") else None
    return Latency(latency.requests, _like(Quantiles, latency.ttft), tbt)


def _worker_from(status: admin_pb2.WorkerStatus) -> WorkerStatus:
    worker = status.worker
    return _like(
        WorkerStatus,
        status,
        worker_id=worker.worker_id,
        role=ROLES.get(worker.role, "unknown"),
        pid=worker.pid,
        fingerprint=worker.fingerprint.hex(),
        arithmetic=worker.arithmetic,
        model=_like(Model, worker.model, parent="", version=""),
        model_path=worker.model.path,
        total_blocks=worker.total_blocks,
        total_slots=worker.total_slots,
        load=_load_from(status.report) if status.HasField("report") else None,
        roles=tuple(ROLES.get(role, "unknown") for role in worker.roles),
        cache_view=_like(CacheView, status.cache_view) if status.HasField("cache_view") else None,
        tier_view=_tier_view_from(status.tier_view) if status.HasField("tier_view") else None,
        tbt=_like(Quantiles, status.tbt) if status.HasField("tbt") else None,
        release=worker.versions.release,
        protocol=worker.versions.protocol,
        kv_layout=worker.kv.layout,
    )


def _tier_view_from(view: admin_pb2.TierViewStatus) -> TierView:
    return _like(TierView, view, directory_id=view.directory_id.hex())


def _load_from(report: report_pb2.Report) -> Load:
    links = tuple(_like(Link, each) for each in report.links)
    return _like(Load, report, pages=_like(PageCounts, report.pages), links=links)


def explanation_from(response: admin_pb2.ExplainResponse) -> RequestExplanation:
    return _like(RequestExplanation, response, attempts=tuple(map(_attempt_from, response.attempts)))


def _attempt_from(attempt: admin_pb2.ExplainedAttempt) -> ExplainedAttempt:
    return _like(
        ExplainedAttempt,
        attempt,
        candidates=tuple(map(_candidate_from, attempt.candidates)),
        predicted=_sorted(attempt.predicted),
        actual=_sorted(attempt.actual),
    )


def _candidate_from(candidate: admin_pb2.ExplainedCandidate) -> Candidate:
    return _like(
        Candidate,
        candidate,
        role=ROLES.get(candidate.role, "unknown"),
        terms=_sorted(candidate.terms),
        cost_terms=tuple(candidate.cost_terms),
    )


def recent_requests_from(response: admin_pb2.RecentRequestsResponse) -> tuple[RecentRequest, ...]:
    return tuple(
        _like(
            RecentRequest,
            request,
            stages=_like(RequestStages, request.stages),
            tbt=_like(TokenTimes, request.tbt) if request.HasField("tbt") else None,
            stalls=tuple(map(_stall_from, request.stalls)),
            drafts=_like(RequestDrafts, request.drafts) if request.HasField("drafts") else None,
        )
        for request in response.requests
    )


def _stall_from(stall: admin_pb2.RequestStall) -> RequestStall:
    return _like(RequestStall, stall, causes=tuple(_like(StallCausePart, part) for part in stall.causes))


def why_from(response: admin_pb2.WhyResponse) -> RequestWhy:
    cache = response.cache
    return _like(
        RequestWhy,
        response,
        placed=explanation_from(response.placed),
        stages=_like(RequestStages, response.stages),
        stalls=tuple(map(_stall_from, response.stalls)),
        cache=_like(CacheAutopsy, cache, runs=tuple(_like(BlockRun, run) for run in cache.runs))
        if response.HasField("cache")
        else None,
        colocated=_like(ColocatedPrefill, response.colocated) if response.HasField("colocated") else None,
        drafts=_like(RequestDrafts, response.drafts) if response.HasField("drafts") else None,
    )


def _sorted(terms: Mapping[str, float]) -> dict[str, float]:
    """A map of protobuf comes in any order."""
    return dict(sorted(terms.items()))


def role_number(role: Role) -> session_pb2.Role:
    numbers: dict[Role, session_pb2.Role] = {name: number for number, name in ROLES.items()}
    return numbers.get(role, session_pb2.ROLE_UNSPECIFIED)


def _like(kind: type[Value], message: Message, **differing: Any) -> Value:
    """A dataclass whose fields are called as those of the message, but for those that differ."""
    given = {each.name: getattr(message, each.name) for each in fields(kind) if each.name not in differing}
    return kind(**given, **differing)


def adapters_from(response: admin_pb2.ListAdaptersResponse) -> tuple[AdapterStatus, ...]:
    return tuple(
        AdapterStatus(
            each.name,
            each.digest,
            each.path,
            each.started,
            each.retired,
            tuple(each.worker_ids),
            {missing.worker_id: missing.why for missing in each.missing},
        )
        for each in response.adapters
    )

"""Why a request was placed on its workers, and the result, as reported by the router that served it."""

from collections.abc import Mapping
from dataclasses import dataclass

from client.cluster import Role
from protos import admin_pb2, session_pb2

ROLES: Mapping[int, Role] = {session_pb2.ROLE_PREFILL: "prefill", session_pb2.ROLE_DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker that was considered; `terms` are the known and weighed values, by name.

    Of the workers of a role that have a `cost` among their terms, the cheapest was taken, equal ones in turn.
    """

    worker_id: str
    endpoint: str  # host:port
    role: Role
    chosen: bool
    excluded: str  # why it could not be chosen; empty where it could
    terms: Mapping[str, float]
    cost_terms: tuple[str, ...] = ()  # those of `terms` that the cost is the sum of


@dataclass(frozen=True, slots=True)
class ExplainedAttempt:
    candidates: tuple[Candidate, ...]
    policy: str
    reason: str
    queue_ms: float
    predicted: Mapping[str, float]
    actual: Mapping[str, float]
    transport: str  # of the KV; empty where it did not have to travel
    failure: str  # why this attempt came to nothing; empty where it did not
    failed_endpoint: str


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    request_id: str
    age_s: float  # since its arrival
    prompt_tokens: int
    status: str
    attempts: tuple[ExplainedAttempt, ...]
    ttft_ms: float
    total_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float


def explanation_from(response: admin_pb2.ExplainResponse) -> RequestExplanation:
    return RequestExplanation(
        response.request_id,
        response.age_s,
        response.prompt_tokens,
        response.status,
        tuple(_attempt_from(attempt) for attempt in response.attempts),
        response.ttft_ms,
        response.total_ms,
        response.tbt_p50_ms,
        response.tbt_p99_ms,
    )


def _attempt_from(attempt: admin_pb2.ExplainedAttempt) -> ExplainedAttempt:
    return ExplainedAttempt(
        tuple(_candidate_from(candidate) for candidate in attempt.candidates),
        attempt.policy,
        attempt.reason,
        attempt.queue_ms,
        dict(sorted(attempt.predicted.items())),
        dict(sorted(attempt.actual.items())),
        attempt.transport,
        attempt.failure,
        attempt.failed_endpoint,
    )


def _candidate_from(candidate: admin_pb2.ExplainedCandidate) -> Candidate:
    return Candidate(
        candidate.worker_id,
        candidate.endpoint,
        ROLES.get(candidate.role, "unknown"),
        candidate.chosen,
        candidate.excluded,
        dict(sorted(candidate.terms.items())),  # a map of protobuf comes in any order
        tuple(candidate.cost_terms),
    )


def role_number(role: Role) -> "session_pb2.Role":
    numbers = {"prefill": session_pb2.ROLE_PREFILL, "decode": session_pb2.ROLE_DECODE}
    return numbers.get(role, session_pb2.ROLE_UNSPECIFIED)

"""The requests that the page shows, and why they failed."""

from http import HTTPStatus
from typing import Any

import pytest

from baton.router.http.edge.problem import Problem
from baton.router.http.page.state import KEPT_REQUESTS, REASON_CHARACTERS, ListedRequest, RecentRequests, reason_of
from baton.router.http.requests import HttpCall, current_call
from baton.router.public.access import Caller
from baton.router.trace.record import ANSWERED, AttemptNote, Leave, RequestEnd, RequestOutcome, RequestRecord, left
from baton.router.types.events import Failed, FailureReason
from baton.router.types.request import Operation

NOW = 100.0
NOT_READ: Any = object()


def ended(end: RequestEnd) -> RequestRecord:
    """A request that ended before it had tokens."""
    record = RequestRecord.begin(Operation.CHAT, None)
    record.end = end
    return record


def refused(status: str) -> RequestRecord:
    return ended(RequestEnd(RequestOutcome.REFUSED, status.lower(), status))


def newest(recent: RecentRequests, tenant: str | None = None) -> list[ListedRequest]:
    return list(recent.newest(KEPT_REQUESTS, tenant))


def call_of(tenant: str) -> HttpCall:
    return HttpCall("r1", Caller(tenant), session="", trace=None)


def test_request_that_the_router_refused_has_the_reason_that_its_client_got() -> None:
    recent, call = RecentRequests(lambda: NOW), call_of("one")
    token = current_call.set(call)
    recent.observe(refused("INVALID_ARGUMENT"))
    current_call.reset(token)

    recent.refused(call, Problem(HTTPStatus.BAD_REQUEST, "top_p: " + "x" * 1000))

    (request,) = newest(recent, "one")
    seen = request.seen
    assert (seen.status, seen.phase, seen.prompt_tokens, seen.decode) == ("INVALID_ARGUMENT", "refused", None, "")
    assert request.reason.startswith("top_p: ")
    assert len(request.reason) == REASON_CHARACTERS
    assert newest(recent, "two") == []


def test_rejection_belongs_to_its_call() -> None:
    recent, call = RecentRequests(lambda: NOW), call_of("one")
    recent.observe(refused("NOT_FOUND"))
    token = current_call.set(call)
    recent.observe(ended(ANSWERED))
    current_call.reset(token)

    recent.refused(call, Problem(HTTPStatus.BAD_REQUEST, "no JSON"))

    own, other = newest(recent)
    assert (own.seen.status, own.reason) == ("OK", "")
    assert own.number > other.number
    assert (other.seen.status, other.reason) == ("NOT_FOUND", "not found")


def test_grpc_rejection_of_an_unknown_caller_is_shown_only_to_administrators() -> None:
    recent = RecentRequests(lambda: NOW)
    recent.observe(refused("NOT_FOUND"))

    assert newest(recent, "") == []
    assert [request.seen.status for request in newest(recent)] == ["NOT_FOUND"]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (ANSWERED, ""),
        (left(Leave.CLIENT), "client disconnected before placement"),
        (left(Leave.STOPPING), "the router was stopped"),
        (RequestEnd(RequestOutcome.FAILED, "deadline_exceeded", "DEADLINE_EXCEEDED"), "the deadline passed"),
        (RequestEnd(RequestOutcome.REFUSED, "queue_full", "RESOURCE_EXHAUSTED"), "queue full"),
    ],
)
def test_reason_equals_that_of_the_record(end: RequestEnd, reason: str) -> None:
    assert reason_of(ended(end)) == reason


@pytest.mark.parametrize("leaves", Leave)
def test_every_way_to_leave_has_a_sentence(leaves: Leave) -> None:
    assert " " in reason_of(ended(left(leaves)))


def test_request_of_a_disconnected_client_shows_its_progress() -> None:
    record = ended(left(Leave.CLIENT))
    record.timeline.placement = NOT_READ
    assert reason_of(record) == "client disconnected before the first token"
    record.timeline.first_token_s = NOW
    assert reason_of(record) == "client disconnected after the first token"


def test_request_with_failed_attempts_names_the_last_failure() -> None:
    record = ended(RequestEnd(RequestOutcome.FAILED, "worker_lost", "UNAVAILABLE"))
    failed = Failed(1, "d", FailureReason.WORKER_LOST, "gone")
    record.timeline.notes.append(AttemptNote(NOT_READ, NOT_READ, (), 0.0, 0.0, failed=failed))

    assert reason_of(record) == "WORKER_LOST: gone"

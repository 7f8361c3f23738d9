"""The page's state, read each second: workers for callers that may see all requests, and each caller's newest requests.

It has sizes, times and workers, and neither prompts nor answers.
"""

import itertools
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Set
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import Scope

from baton.gateway.http.endpoint import caller_of
from baton.gateway.http.exchange import Reply, json_reply
from baton.gateway.http.problem import Problem
from baton.gateway.requests import Call, current_call
from baton.router.admission.queue import AdmissionQueue
from baton.router.dispatcher import Dispatcher
from baton.router.placement.cluster import Cluster, Worker
from baton.router.public.access import Access, Caller, Need
from baton.router.readiness import Readiness
from baton.router.trace.record import Leave, Outcome, RequestRecord, stages
from baton.router.types.response import Stages
from baton.service.errors import PermissionDenied
from baton.service.telemetry.trace_context import current_request_id

KEPT_REQUESTS = 256
KEPT_GAPS = 1024
"""Of one worker: about the last half minute of a busy one."""
REASON_CHARACTERS = 300
_REASONS = {
    Leave.STALLED.value: "the client read nothing of its answer for too long",
    Leave.SUPERSEDED.value: "another stream of the same request went on",
    Leave.SIBLING.value: "another prompt of the same call failed",
    Leave.STOPPING.value: "the router was stopped",
    "deadline_exceeded": "the deadline passed",
}


@dataclass(slots=True)
class RecentRequest:
    number: int  # no other has it; clients may give one id to several
    request_id: str
    tenant: str | None  # None: not known; only administrators see it
    status: str  # OK, or the name of the error
    reason: str  # of an error, for a person; may be empty
    ended_s: float  # monotonic
    stages: Stages
    model: str = ""
    prompt_tokens: int | None = None  # None: it was refused before they were counted
    completion_tokens: int | None = None  # that were sent; None: it was refused before it had any
    cached_tokens: int = 0
    attempts: int = 0
    prefill: str = ""  # endpoint; empty where decode computed the prompt
    decode: str = ""  # empty where no worker was chosen
    call: Call | None = None  # over HTTP


class TokenTimes(NamedTuple):
    p50_ms: float
    p99_ms: float


class RecentRequests:
    """`observe` is called with every request that has ended, `refused` after it where an HTTP client got an error."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: deque[RecentRequest] = deque(maxlen=KEPT_REQUESTS)
        self._gaps_ms: dict[str, array[float]] = {}
        self._numbers = itertools.count(1)

    def observe(self, record: RequestRecord) -> None:
        timeline, placement = record.timeline, record.timeline.placement
        self._requests.append(self._recent(record, timeline.ended_s or self._clock()))
        if placement is not None:
            gaps_ms = self._gaps_ms.setdefault(placement.decode, array("d"))
            gaps_ms.extend(timeline.gaps.each_ms[-KEPT_GAPS:])
            del gaps_ms[:-KEPT_GAPS]

    def refused(self, call: Call, problem: Problem) -> None:
        """The reason, as the client got it."""
        for request in self._requests:
            if request.call is call and request.status != "OK":
                request.reason = problem.message[:REASON_CHARACTERS]

    def _recent(self, record: RequestRecord, ended_s: float) -> RecentRequest:
        timeline, prepared, call = record.timeline, record.prepared, current_call.get()
        placement = timeline.placement
        tenant = call.caller.tenant if call is not None else None
        request_id = current_request_id.get() or ""
        if prepared is not None:
            tenant, request_id = prepared.valid.tenant, prepared.valid.request_id
        return RecentRequest(
            number=next(self._numbers),
            request_id=request_id,
            tenant=tenant,
            status=record.error or "OK",
            reason=reason_of(record)[:REASON_CHARACTERS],
            ended_s=ended_s,
            stages=stages(timeline, ended_s),
            model=record.model,
            prompt_tokens=len(prepared.token_ids) if prepared is not None else None,
            completion_tokens=record.completion_tokens if prepared is not None else None,
            cached_tokens=timeline.prefill.cached_tokens if timeline.prefill else 0,
            attempts=timeline.attempts,
            prefill=(placement.prefill or "") if placement is not None else "",
            decode=placement.decode if placement is not None else "",
            call=call,
        )

    def newest(self, count: int, tenant: str | None) -> Iterator[RecentRequest]:
        """The newest first; of one tenant, or of all."""
        for request in reversed(self._requests):
            if count == 0:
                return
            if tenant is None or request.tenant == tenant:
                count -= 1
                yield request

    def token_times(self, endpoint: str) -> TokenTimes | None:
        """Of the answers that ended last on this decode worker."""
        ordered = sorted(self._gaps_ms.get(endpoint, ()))
        if not ordered:
            return None
        return TokenTimes(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100])

    def keep(self, endpoints: Set[str]) -> None:
        """Workers that are no more are forgotten."""
        for gone in self._gaps_ms.keys() - endpoints:
            del self._gaps_ms[gone]


def reason_of(record: RequestRecord) -> str:
    """Why it did not end well, as far as its record shows it; empty where it ended well. Pure."""
    timeline, end = record.timeline, record.end
    if end is None or end.outcome is Outcome.ANSWERED:
        return ""
    if end.reason == Leave.CLIENT:
        if timeline.placement is None:
            return "the client left before a worker was chosen"
        return f"the client left {'before' if timeline.first_token_s is None else 'after'} the first token"
    if end.reason in _REASONS:
        return _REASONS[end.reason]
    failed = next((note.failed for note in reversed(timeline.notes) if note.failed is not None), None)
    return f"{failed.reason.name}: {failed.message}" if failed is not None else end.reason.replace("_", " ")


PATH = "/page/state"
SHOWN_REQUESTS = 24
_UNSHOWN = frozenset({"call", "ended_s", "tenant", "stages"})


@dataclass(frozen=True, slots=True)
class PageState:
    cluster: Cluster
    queue: AdmissionQueue
    readiness: Readiness
    dispatcher: Dispatcher
    access: Access
    recent: RecentRequests
    clock: Callable[[], float] = time.monotonic
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    """Another one after a restart: requests are then counted from 1 again."""

    async def answer(self, scope: Scope) -> Reply:
        """Raises: Unavailable."""
        sees_all, caller = self._sees_all(scope), caller_of(scope)
        tenant = None if sees_all else caller.tenant
        self.recent.keep({worker.endpoint for worker in self.cluster.workers})
        return json_reply(
            {
                "instance": self.instance,
                "ready": self.readiness.ready and not self.dispatcher.draining,
                "detail": "draining" if self.dispatcher.draining else self.readiness.detail,
                "models": await self._models(caller),
                "requests": [self._request(each) for each in self.recent.newest(SHOWN_REQUESTS, tenant)],
                "cluster": self._cluster() if sees_all else None,
            }
        )

    def _sees_all(self, scope: Scope) -> bool:
        """A key that may not see all may still see its own requests. Raises: Unauthenticated."""
        try:
            self.access.caller(Need.ADMIN, Headers(scope=scope).items())
        except PermissionDenied:
            return False
        return True

    async def _models(self, caller: Caller) -> list[dict[str, object]]:
        """Empty while there are none: no client waits here."""
        if not self.readiness.ready:
            return []
        return [
            {
                "name": chosen.name,
                "chat": chosen.served.tokenizer.chat_template is not None,
                "max_context": chosen.served.max_context(caller.limits.max_context_tokens),
            }
            for chosen in await self.dispatcher.models()
        ]

    def _cluster(self) -> dict[str, object]:
        return {
            "active": self.dispatcher.active,
            "queued": self.queue.waiting,
            "workers": [self._worker(worker) for worker in self.cluster.workers],
        }

    def _worker(self, worker: Worker) -> dict[str, Any]:
        """`load` is null while it is not known."""
        report, times = worker.report, self.recent.token_times(worker.endpoint)
        draining = report is not None and report.draining
        facts = {
            "name": self.cluster.name_of(worker.endpoint),
            "role": worker.role.value,
            "endpoint": worker.endpoint,
            "state": "lost" if not worker.connected else "draining" if draining else "connected",
            "requests": len(worker.charges),
            "tbt": times._asdict() if times is not None else None,
        }
        if report is None or not worker.connected:
            return facts | {"load": None}
        return facts | {
            "load": {
                "queue": report.waiting_requests,
                "batch": report.running_sequences,
                "slots": worker.description.total_slots if worker.description is not None else 0,
                "pending_tokens": report.pending_tokens,
                "pages": asdict(report.pages),
                "cache_query_tokens": report.cache_query_tokens,
                "cache_hit_tokens": report.cache_hit_tokens,
                "preemptions": report.preemptions,
                "steps": report.steps,
            }
        }

    def _request(self, request: RecentRequest) -> dict[str, Any]:
        shown = {each.name: getattr(request, each.name) for each in fields(request) if each.name not in _UNSHOWN}
        for role in ("prefill", "decode"):
            shown[role] = self.cluster.name_of(shown[role]) if shown[role] else ""
        return shown | {"stages": asdict(request.stages), "age_s": round(self.clock() - request.ended_s, 3)}

"""State that the web page shows: the caller's newest requests, and for administrators the workers.

The state has sizes, times and names of workers, but no prompts and answers. A caller without an admin key sees only its
own requests, also among the causes of stalls.
"""

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from baton.process.errors import PermissionDenied
from baton.process.telemetry.trace_context import current_request_id
from baton.router.admission.queue import AdmissionQueue
from baton.router.dispatcher import Dispatcher
from baton.router.http.edge.endpoint import caller_of
from baton.router.http.edge.exchange import Reply, json_reply
from baton.router.http.edge.problem import Problem
from baton.router.http.requests import HttpCall, current_call
from baton.router.placement.cluster import Cluster, Worker
from baton.router.public.access import Access, Caller, Need
from baton.router.readiness import Readiness
from baton.router.trace.latency import WorkerTokenTimes
from baton.router.trace.record import Leave, RequestOutcome, RequestRecord, Stall
from baton.router.trace.report import SHOWN_CAUSES, RequestReport, report_of, shown_stalls
from baton.text.causes import CausePart

KEPT_REQUESTS = 256
REASON_CHARACTERS = 300
_REASONS = {
    Leave.STALLED.value: "client stalled: it stopped reading its answer",
    Leave.SUPERSEDED.value: "superseded by another stream of the same request",
    Leave.SIBLING.value: "another prompt of the same call failed",
    Leave.STOPPING.value: "the router was stopped",
    "deadline_exceeded": "the deadline passed",
}


@dataclass(slots=True)
class ListedRequest:
    number: int  # identifies the request here, since clients may reuse request ids
    tenant: str | None  # None: unknown, so only administrators see the request
    reason: str  # why it failed, for people; empty if it did not fail
    ended_s: float  # when it ended, monotonic
    seen: RequestReport
    call: HttpCall | None = None  # None: the request came over gRPC


class RecentRequests:
    """The newest requests. Call `observe` with every finished request, then `refused` if its client got an error."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: deque[ListedRequest] = deque(maxlen=KEPT_REQUESTS)
        self._numbers = itertools.count(1)

    def observe(self, record: RequestRecord) -> None:
        prepared, call = record.prepared, current_call.get()
        tenant = call.caller.tenant if call is not None else None
        ended_s = record.timeline.ended_s or self._clock()
        self._requests.append(
            ListedRequest(
                number=next(self._numbers),
                tenant=prepared.tenant if prepared is not None else tenant,
                reason=reason_of(record)[:REASON_CHARACTERS],
                ended_s=ended_s,
                seen=report_of(record, ended_s, record.gaps, current_request_id.get() or ""),
                call=call,
            )
        )

    def refused_soon(self, call: HttpCall, problem: Problem) -> None:
        """Schedule `refused` for the next event-loop iteration, so that `observe` gets the record first."""
        asyncio.get_running_loop().call_soon(self.refused, call, problem)

    def refused(self, call: HttpCall, problem: Problem) -> None:
        """Set the reason of the call's failed requests to the error that the client got."""
        for request in self._requests:
            if request.call is call and request.seen.status != "OK":
                request.reason = problem.message[:REASON_CHARACTERS]

    def newest(self, count: int, tenant: str | None) -> Iterator[ListedRequest]:
        """Return up to `count` requests of a tenant (None: of all tenants), newest first."""
        shown = (each for each in reversed(self._requests) if tenant is None or each.tenant == tenant)
        return itertools.islice(shown, count)

    def ids_of(self, tenant: str) -> Set[str]:
        """Return the ids of a tenant's finished requests in this list."""
        return {request.seen.request_id for request in self._requests if request.tenant == tenant} - {""}


def reason_of(record: RequestRecord) -> str:
    """Return why a request failed, according to its record; empty if it succeeded or is running. Pure."""
    timeline, end = record.timeline, record.end
    if end is None or end.outcome is RequestOutcome.ANSWERED:
        return ""
    if end.reason == Leave.CLIENT:
        if timeline.placement is None:
            return "client disconnected before placement"
        return f"client disconnected {'before' if timeline.first_token_s is None else 'after'} the first token"
    if end.reason in _REASONS:
        return _REASONS[end.reason]
    failed = next((note.failed for note in reversed(timeline.notes) if note.failed is not None), None)
    return f"{failed.reason.name}: {failed.message}" if failed is not None else end.reason.replace("_", " ")


PATH = "/page/state"
SHOWN_REQUESTS = 24
_AS_SEEN = ("request_id", "trace_id", "model", "status", "attempts", "prompt_tokens", "cached_tokens")


@dataclass(frozen=True, slots=True)
class PageState:
    cluster: Cluster
    queue: AdmissionQueue
    readiness: Readiness
    dispatcher: Dispatcher
    access: Access
    recent: RecentRequests
    token_times: WorkerTokenTimes
    clock: Callable[[], float] = time.monotonic
    routers: Callable[[], int] = lambda: 1
    """Number of routers that share the page's address."""
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    """Id of this router process, since each process numbers requests from 1."""

    async def answer(self, scope: Scope) -> Reply:
        """Answer with the state that the caller may see. Raises: Unavailable."""
        sees_all, caller = self._sees_all(scope), caller_of(scope)
        tenant = None if sees_all else caller.tenant
        routers = self.routers()
        culprits = None if tenant is None else self.recent.ids_of(tenant) | self.dispatcher.accounts.running_ids(tenant)
        reply = json_reply(
            {
                "instance": self.instance,
                "routers": routers,
                "ready": self.readiness.ready and not self.dispatcher.draining,
                "detail": "draining" if self.dispatcher.draining else self.readiness.detail,
                "models": await self._models(caller),
                "requests": [self._request(each, culprits) for each in self.recent.newest(SHOWN_REQUESTS, tenant)],
                "cluster": self._cluster() if sees_all else None,
            }
        )
        # The page's next poll opens a connection, which may reach another router.
        return replace(reply, headers={"connection": "close"}) if routers > 1 else reply

    def _sees_all(self, scope: Scope) -> bool:
        """Return whether the caller may see the requests of all tenants. Raises: Unauthenticated."""
        try:
            self.access.caller(Need.ADMIN, Headers(scope=scope).items())
        except PermissionDenied:
            return False
        return True

    async def _models(self, caller: Caller) -> list[dict[str, object]]:
        """Return the served models; empty while the router is not ready, since asking for them would wait."""
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
        """Return the state of a worker. `load` is null if the worker is lost or has not reported yet."""
        report, times = worker.report, self.token_times.quantiles(worker.endpoint)
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

    def _request(self, request: ListedRequest, culprits: Set[str] | None) -> dict[str, Any]:
        seen, gaps = request.seen, request.seen.gaps
        return {name: getattr(seen, name) for name in _AS_SEEN} | {
            "number": request.number,
            "reason": request.reason,
            "age_s": round(self.clock() - request.ended_s, 3),
            "completion_tokens": seen.generated_tokens,
            "prefill": self.cluster.name_of(seen.prefill) if seen.prefill else "",
            "decode": self.cluster.name_of(seen.decode) if seen.decode else "",
            "stages": asdict(seen.stages),
            "tbt": {"p50_ms": gaps.p50_ms, "p99_ms": gaps.p99_ms, "max_ms": gaps.max_ms} if gaps is not None else None,
            "drafts": seen.drafts._asdict() if seen.drafts.happened else None,
            "stall_count": len(gaps.stalls) if gaps is not None else 0,
            "stalls": [self._stall(each, seen.arrived_s, culprits) for each in shown_stalls(gaps)],
        }

    def _stall(self, stall: Stall, arrived_s: float, culprits: Set[str] | None) -> dict[str, Any]:
        return {
            "at_ms": round((stall.at_s - arrived_s) * 1e3, 3),
            "gap_ms": round(stall.gap_ms, 3),
            "usual_ms": round(stall.usual_ms, 3),
            "causes": [self._cause(part, culprits) for part in stall.causes[:SHOWN_CAUSES]],
        }

    def _cause(self, part: CausePart, culprits: Set[str] | None) -> dict[str, Any]:
        """Return a cause of a stall. `culprits`: ids of requests that the caller may see as causes; None: all."""
        is_shown = culprits is None or part.request_id in culprits
        return {
            "cause": part.cause.value,
            "ms": round(part.ms, 3),
            "culprit": part.request_id if is_shown else "",
            "by_another": bool(part.request_id) and not is_shown,
            "detail": self.cluster.name_of(part.detail) if is_shown else "",
        }

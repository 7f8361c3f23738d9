"""The page's state, read each second: workers for callers that may see all requests, and each caller's own requests."""

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from baton.gateway.http.guard import caller_of
from baton.gateway.http.reply import Reply, json_reply
from baton.gateway.page.recent import RecentRequest, RecentRequests
from baton.router.admission.queue import AdmissionQueue
from baton.router.dispatcher import Dispatcher
from baton.router.placement.cluster import Cluster, Worker
from baton.router.public.access import Access, Caller, Need
from baton.router.readiness import Readiness
from baton.service.errors import PermissionDenied

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

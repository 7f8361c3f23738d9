"""The newest requests of this router, as the page draws them, and the times between tokens of each decode worker.

No prompt and no answer: sizes, times and who did it.
"""

import itertools
from array import array
from collections import deque
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import NamedTuple

from router.timeline import Stages, stages
from router.tracing import RequestRecord

KEPT_REQUESTS = 256
KEPT_GAPS = 1024
"""Of one worker: about the last half minute of a busy one."""


@dataclass(frozen=True, slots=True)
class RecentRequest:
    number: int  # no other has it; clients may give one id to several
    request_id: str
    tenant: str
    model: str
    status: str  # OK, or the name of the error
    ended_s: float  # monotonic
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    attempts: int
    prefill: str  # endpoint; empty where decode computed the prompt
    decode: str
    stages: Stages


class TokenTimes(NamedTuple):
    p50_ms: float
    p99_ms: float


class RecentRequests:
    """`observe` is called with every request that has ended."""

    def __init__(self) -> None:
        self._requests: deque[RecentRequest] = deque(maxlen=KEPT_REQUESTS)
        self._gaps_ms: dict[str, array[float]] = {}
        self._numbers = itertools.count(1)

    def observe(self, record: RequestRecord) -> None:
        timeline, prepared, usage = record.timeline, record.prepared, record.summary and record.summary.usage
        placement, ended_s = timeline.placement, timeline.ended_s
        if prepared is None or placement is None or ended_s is None:
            return  # nobody was chosen for it
        self._requests.append(
            RecentRequest(
                number=next(self._numbers),
                request_id=prepared.valid.request_id,
                tenant=prepared.valid.tenant,
                model=record.model,
                status=record.error or "OK",
                ended_s=ended_s,
                prompt_tokens=len(prepared.token_ids),
                cached_tokens=timeline.prefill.cached_tokens if timeline.prefill else 0,
                completion_tokens=usage.completion_tokens if usage else 0,
                attempts=timeline.attempts,
                prefill=placement.prefill or "",
                decode=placement.decode,
                stages=stages(timeline, ended_s),
            )
        )
        gaps_ms = self._gaps_ms.setdefault(placement.decode, array("d"))
        gaps_ms.extend(timeline.gaps.each_ms[-KEPT_GAPS:])
        del gaps_ms[:-KEPT_GAPS]

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

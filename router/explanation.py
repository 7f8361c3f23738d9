"""Why requests went where they went, and what came of it: plain values, and a ring of the newest. No prompt content.

A record is made when a request has ended. What was weighed is kept as the views that the placement saw; names and
terms are made of them only when somebody asks.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.events import Failed, Landed, PrefillTimings
from router.placement import Placement, PlacementRequest, WorkerView

KEPT_REQUESTS = 1024
KEPT_CANDIDATES = 64
"""Of one attempt; in a larger cluster the chosen ones and the first of the others."""


@dataclass(slots=True)
class AttemptNote:
    """One attempt: filled in as it goes on. Seconds, monotonic."""

    request: PlacementRequest
    placement: Placement
    candidates: Sequence[WorkerView]
    began_s: float
    placed_s: float
    prefill: PrefillTimings | None = None
    landed: Landed | None = None
    failed: Failed | None = None
    attempt_id: int = 0
    choice: int | None = None  # that it goes on with by itself; None: with all of the request
    answered_tokens: int = 0  # that had been given out when it began


def candidates_of(placement: Placement, views: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Those to keep."""
    if len(views) <= KEPT_CANDIDATES:
        return views
    chosen = [view for view in views if view.endpoint in placement.endpoints]
    return (*chosen, *(view for view in views if view.endpoint not in placement.endpoints))[:KEPT_CANDIDATES]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended."""

    status: str
    prompt_tokens: int
    ttft_ms: float
    total_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float


@dataclass(frozen=True, slots=True)
class Explanation:
    request_id: str
    arrived_s: float
    outcome: Outcome
    attempts: Sequence[AttemptNote]


@dataclass(slots=True)
class Explanations:
    """The newest requests by their ids; of two with one id the newer."""

    kept: int = KEPT_REQUESTS
    _by_id: OrderedDict[str, Explanation] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, explanation: Explanation) -> None:
        self._by_id.pop(explanation.request_id, None)
        self._by_id[explanation.request_id] = explanation
        if len(self._by_id) > self.kept:
            self._by_id.popitem(last=False)

    def find(self, request_id: str) -> Explanation | None:
        return self._by_id.get(request_id)

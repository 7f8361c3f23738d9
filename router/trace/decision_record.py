"""Why requests were placed as they were, and the results: plain values, and a ring of the newest. No prompt content.

A record is made when a request has ended. The costs are kept as the placement's own decision; names and text are
made of it only when a request is explained.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.router.placement.decide import Decision, Placement
from baton.router.placement.views import PlacementRequest
from baton.router.types.events import Failed, KvReceived, PrefillTimings
from baton.router.types.response import bare_id

KEPT_REQUESTS = 1024
KEPT_CANDIDATES = 128
"""Of one attempt: all that a placement looks at but where a large cluster has hardly any room."""


@dataclass(slots=True)
class AttemptNote:
    """One attempt: filled in as it proceeds. Seconds, monotonic."""

    request: PlacementRequest
    placement: Placement
    decision: Decision | None  # None: an answer that its worker made already
    began_s: float
    placed_s: float
    first_step_s: float | None = None  # its first token arrived
    prefill: PrefillTimings | None = None
    kv_received: KvReceived | None = None
    failed: Failed | None = None
    failed_s: float | None = None
    stood_still_ms: float | None = None  # how long the client waited for its next token, where tokens were out before
    attempt_id: int = 0
    choice: int | None = None  # the only one that it continues; None: all of the request
    answered_tokens: int = 0  # that had been given out when it began


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
class DecisionRecord:
    request_id: str
    trace_id: str
    arrived_s: float
    outcome: Outcome
    attempts: Sequence[AttemptNote]


@dataclass(slots=True)
class DecisionRecords:
    """The newest requests by their ids; of two with one id the newer."""

    kept: int = KEPT_REQUESTS
    _by_id: OrderedDict[str, DecisionRecord] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, record: DecisionRecord) -> None:
        self._by_id.pop(record.request_id, None)
        self._by_id[record.request_id] = record
        if len(self._by_id) > self.kept:
            self._by_id.popitem(last=False)

    def find(self, given: str) -> DecisionRecord | None:
        """By the request's id, bare or as an answer bears it, or the id of its trace: of several the newest."""
        found = self._by_id.get(given) or self._by_id.get(bare_id(given))
        return found or next((each for each in reversed(self._by_id.values()) if each.trace_id == given), None)

"""Snapshots of a router: status, newest requests, and rates since an earlier snapshot."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.client import ClusterStatus, RecentRequest

MAX_REQUESTS = 128  # requests per snapshot
RATE_SNAPSHOTS = 5  # snapshots over which a rate is measured: workers report less often than frames are drawn


class Admin(Protocol):
    """Methods of AdminClient that snapshots use."""

    def status(self) -> ClusterStatus: ...
    def recent_requests(self, *, limit: int = ..., request_id: str = ...) -> tuple[RecentRequest, ...]: ...


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens and steps per second; None if not known yet."""

    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    steps: Mapping[str, float] = field(default_factory=dict)  # steps per second by worker endpoint


@dataclass(frozen=True, slots=True)
class Snapshot:
    at_s: float  # monotonic time
    status: ClusterStatus
    requests: tuple[RecentRequest, ...]
    opened: RecentRequest | None = None  # the open request, with its stalls
    rates: Rates = Rates()


def rates_between(old: Snapshot, new: Snapshot) -> Rates:
    """Return the rates between two snapshots; None for a process that restarted in between."""
    seconds = new.at_s - old.at_s
    before = {worker.endpoint: worker for worker in old.status.workers}
    steps = {}
    for worker in new.status.workers:
        known = before.get(worker.endpoint)
        if known is None or known.epoch != worker.epoch or known.load is None or worker.load is None:
            continue
        made = _per_second(known.load.steps, worker.load.steps, seconds)
        if made is not None:
            steps[worker.endpoint] = made
    totals, counted = old.status.requests, new.status.requests
    return Rates(
        _per_second(totals.prompt_tokens, counted.prompt_tokens, seconds),
        _per_second(totals.generated_tokens, counted.generated_tokens, seconds),
        steps,
    )


def _per_second(old: int, new: int, seconds: float) -> float | None:
    return (new - old) / seconds if new >= old and seconds > 0.0 else None


class Snapshots:
    """Takes snapshots of a router, with rates since earlier ones."""

    def __init__(self, admin: Admin, clock: Callable[[], float], opened: Callable[[], str] = str) -> None:
        """Create snapshots of the router of `admin`. `opened` returns the id of the open request, empty for none."""
        self._admin = admin
        self._clock = clock
        self._opened = opened
        self._earlier: deque[Snapshot] = deque(maxlen=RATE_SNAPSHOTS)

    def take(self) -> Snapshot:
        """Fetch a snapshot. Raises: BatonClientError."""
        status = self._admin.status()
        at_s = self._clock()
        requests = self._admin.recent_requests(limit=MAX_REQUESTS)
        named = self._opened()
        opened = self._admin.recent_requests(request_id=named) if named else ()
        counted = Snapshot(at_s, status, requests, next(iter(opened), None))
        rates = rates_between(self._earlier[0], counted) if self._earlier else Rates()
        self._earlier.append(counted)
        return Snapshot(at_s, status, requests, counted.opened, rates)

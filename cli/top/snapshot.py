"""Snapshots of routers: status, newest requests, and rates since an earlier snapshot."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from baton.client import BatonClientError, ClusterStatus, RecentRequest, RequestTotals

Answer = TypeVar("Answer")

RUNNING = ("queued", "prefill", "decode")
MAX_REQUESTS = 128  # requests per snapshot
RATE_SNAPSHOTS = 5  # snapshots over which a rate is measured: workers report less often than frames are drawn


class Admin(Protocol):
    """Methods of AdminClient that snapshots use."""

    def status(self) -> ClusterStatus: ...
    def recent_requests(self, *, limit: int = ..., request_id: str = ...) -> tuple[RecentRequest, ...]: ...


class SeveralRouters:
    """Admin of several routers: the status of the first one that answers, with the requests of all that answer."""

    def __init__(self, admins: Sequence[Admin]) -> None:
        self._admins = admins

    def status(self) -> ClusterStatus:
        """Return the status. Raises: BatonClientError if no router answers."""
        found = self._ask(lambda admin: admin.status())
        totals = [each.requests for each in found]
        requests = RequestTotals(
            sum(each.started for each in totals),
            tuple(ended for each in totals for ended in each.ended),
            sum(each.prompt_tokens for each in totals),
            sum(each.generated_tokens for each in totals),
        )
        active, queued = (sum(each.active_requests for each in found), sum(each.queued_requests for each in found))
        return replace(found[0], active_requests=active, queued_requests=queued, requests=requests)

    def recent_requests(self, *, limit: int = 64, request_id: str = "") -> tuple[RecentRequest, ...]:
        """Return the newest requests. Raises: BatonClientError if no router answers."""
        found = self._ask(lambda admin: admin.recent_requests(limit=limit, request_id=request_id))
        requests = [each for its in found for each in its]
        return tuple(sorted(requests, key=lambda each: (each.phase not in RUNNING, each.age_s))[:limit])

    def _ask(self, call: Callable[[Admin], Answer]) -> list[Answer]:
        found, errors = list[Answer](), list[BatonClientError]()
        for admin in self._admins:
            try:
                found.append(call(admin))
            except BatonClientError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        return found


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

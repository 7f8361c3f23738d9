"""A look at a router: its status and newest requests, and what came per second since an earlier look."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.client import ClusterStatus, RecentRequest

REQUESTS = 128  # of one look
RATE_LOOKS = 5
"""Rates are taken over so many looks: workers report now and then, and not with every look."""


class Admin(Protocol):
    """As the client's AdminClient is."""

    def status(self) -> ClusterStatus: ...
    def recent_requests(self, *, limit: int = ..., request_id: str = ...) -> tuple[RecentRequest, ...]: ...


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second; None where it is not known yet."""

    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    steps: Mapping[str, float] = field(default_factory=dict)  # by a worker's endpoint, as far as known


@dataclass(frozen=True, slots=True)
class Look:
    at_s: float  # monotonic
    status: ClusterStatus
    requests: tuple[RecentRequest, ...]
    opened: RecentRequest | None = None  # with its stalls, also while it runs
    rates: Rates = Rates()


def rates_between(old: Look, new: Look) -> Rates:
    """Nothing of a process that has started anew in between: it counts from 0 again."""
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


class Looks:
    """Takes one after another."""

    def __init__(self, admin: Admin, clock: Callable[[], float], opened: Callable[[], str] = str) -> None:
        """`opened`: the id of the request that is looked at closely, empty for none."""
        self._admin = admin
        self._clock = clock
        self._opened = opened
        self._earlier: deque[Look] = deque(maxlen=RATE_LOOKS)

    def take(self) -> Look:
        """Raises: BatonClientError."""
        status = self._admin.status()
        at_s = self._clock()
        requests = self._admin.recent_requests(limit=REQUESTS)
        named = self._opened()
        opened = self._admin.recent_requests(request_id=named) if named else ()
        counted = Look(at_s, status, requests, next(iter(opened), None))
        rates = rates_between(self._earlier[0], counted) if self._earlier else Rates()
        self._earlier.append(counted)
        return Look(at_s, status, requests, counted.opened, rates)

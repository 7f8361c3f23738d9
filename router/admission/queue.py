"""Queue of requests that wait for capacity. The fair queue selects the next request; the placement decides if it fits.

A request that cannot be served in time is rejected immediately with a retry time, before anything is computed for it.
A placed attempt is charged to the cluster immediately; whoever submitted it releases the charge and calls `ended`.

The wait is estimated from the tokens ahead and the rate at which capacity is released while requests are pending. A
request's tokens are the uncached part of its prompt plus an answer of the usual length. Time without pending requests
does not show the workers' capacity and is left out. Until enough time with pending requests has passed, Little's law
gives the rate: tokens on the workers, divided by the service time of a request.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from baton.process.errors import BatonError, InvalidArgument, ResourceExhausted, Unavailable
from baton.process.registry.worker_record import WorkerRole
from baton.router.admission.fair_queue import Entry, FairQueue
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import (
    Decision,
    NoPrefillWorker,
    NoRoom,
    Placement,
    PlacementPolicy,
    decide,
    placement_of,
)
from baton.router.placement.eligible import NEVER, ineligible
from baton.router.placement.rates import known_tokens
from baton.router.types.placement import PlacementRequest, WorkerView
from baton.router.types.worker import Adapter

RECENT_S = 10.0
"""Minimum time constant of the measured release rate, in seconds with pending requests."""
RECENT_ENDS = 4.0
"""Minimum time constant of the measured release rate, in completed requests, each of which may take minutes."""
_GAP_KEPT = 0.7  # weight of the old mean time between completions when a new time is added
GUESS_S = 1.0
"""Weight of the rate by Little's law relative to the measured rate, as seconds of measurement."""
MOST_COUNTED_S = 1.0
"""Maximum counted time between two updates: workers report several times per second, so a longer time means that this
process was stopped.
"""
RETRY_LEAST_S, RETRY_MOST_S = 0.1, 60.0
RETRY_AFTER_S = 1.0
"""Seconds after which clients should retry if no better estimate is known."""
_KEPT = 0.98  # factor by which each completion reduces the weight of earlier service times


class WaitEstimate:
    """Estimator of waiting times, updated by every dispatched and completed request. `now`: monotonic seconds."""

    def __init__(self) -> None:
        self._in_flight_tokens = 0
        self._some_wait = False
        self._counted_to_s = 0.0
        self._freed_tokens = 0.0  # decaying sum of tokens released while requests were pending
        self._waiting_s = 0.0  # decaying sum of time with pending requests
        self._since_end_s = 0.0  # time with pending requests since the last completion
        self._gap_s = 0.0  # mean time between completions while requests were pending
        # Decaying sums over completed requests:
        self._stays = 0.0
        self._stayed_s = 0.0
        self._stayed_tokens = 0.0
        self._stayed_token_s = 0.0

    def dispatched(self, tokens: int) -> None:
        self._in_flight_tokens += tokens

    def ended(self, tokens: int, stayed_s: float | None, now: float) -> None:
        """Record that a request released its capacity. `stayed_s`: service time; None: it did not complete."""
        self._count(now)
        self._in_flight_tokens -= tokens
        if self._some_wait:
            self._freed_tokens += tokens
            self._gap_s = _GAP_KEPT * self._gap_s + (1.0 - _GAP_KEPT) * self._since_end_s
            self._since_end_s = 0.0
        if stayed_s is not None:
            self._stays = _KEPT * self._stays + 1.0
            self._stayed_s = _KEPT * self._stayed_s + stayed_s
            self._stayed_tokens = _KEPT * self._stayed_tokens + tokens
            self._stayed_token_s = _KEPT * self._stayed_token_s + tokens * stayed_s

    def some_wait(self, some: bool, now: float) -> None:
        self._count(now)
        self._some_wait = some

    def tokens_per_s(self, now: float) -> float | None:
        """Return the rate at which capacity is released, in tokens per second; None while it is unknown."""
        self._count(now)
        if self._stayed_token_s > 0.0 and self._in_flight_tokens > 0:
            little = self._in_flight_tokens * self._stayed_tokens / self._stayed_token_s
            return (self._freed_tokens + GUESS_S * little) / (self._waiting_s + GUESS_S)
        if self._waiting_s >= GUESS_S and self._freed_tokens > 0.0:
            return self._freed_tokens / self._waiting_s
        return None

    def wait_s(self, tokens: float, now: float) -> float | None:
        """Return the seconds until capacity for `tokens` has been released; None while unknown."""
        rate = self.tokens_per_s(now)
        return None if rate is None else tokens / rate

    def stay_s(self, tokens: int) -> float:
        """Return the expected service time in seconds of a request of `tokens`; 0 while unknown."""
        return tokens * self._stayed_s / self._stayed_tokens if self._stayed_tokens > 0.0 else 0.0

    @property
    def usual_tokens(self) -> int:
        return round(self._stayed_tokens / self._stays) if self._stays > 0.0 else 0

    def retry_after_s(self, tokens: float, now: float) -> float:
        """Return the seconds after which a client should retry while `tokens` are pending. It grows with `tokens`."""
        wait_s = self.wait_s(tokens, now)
        return RETRY_AFTER_S if wait_s is None else min(max(wait_s, RETRY_LEAST_S), RETRY_MOST_S)

    def _count(self, now: float) -> None:
        passed_s, self._counted_to_s = max(0.0, now - self._counted_to_s), max(now, self._counted_to_s)
        passed_s = min(passed_s, MOST_COUNTED_S)
        if self._some_wait:
            recent_s = max(RECENT_S, RECENT_ENDS * self._gap_s)
            kept = math.exp(-passed_s / recent_s)
            self._freed_tokens *= kept
            self._waiting_s = self._waiting_s * kept + recent_s * (1.0 - kept)
            self._since_end_s += passed_s


BEGUN_PRIORITY = -1000
"""Priority of retried requests, which come before all others and are not rejected because of a long queue."""
PLANNED_SHARE = 0.8
"""Fraction of the time until a deadline that may be planned; the rest covers errors of the estimates."""
QUEUE_FULL, NO_TIME = "queue_full", "no_room_in_time"
"""Causes of rejections, by which metrics count them."""
SURE_SHARE = 0.8
"""A pending request is rejected if less than this fraction of its service time is left until its deadline."""


ABSENT = {
    NoRoom.NO_PREFILL_WORKER: "prefill worker",
    NoRoom.NO_DECODE_WORKER: "decode worker",
    NoRoom.NO_POOLING_WORKER: "prefill worker whose release makes vectors",
}
"""Kind of worker that is missing, by the reason why a request cannot be placed."""


def no_workers(reason: NoRoom) -> Unavailable:
    return Unavailable(f"no {ABSENT[reason]} is connected", "NO_WORKERS", RETRY_AFTER_S)


def never_fits(request: PlacementRequest, reason: NoRoom) -> InvalidArgument:
    if request.pooled:
        what = f"needs {request.longest_blocks} KV blocks, more than the pool of any worker has; shorten it"
        return InvalidArgument("prompt", what, reason="NEVER_FITS")
    if reason is NoRoom.TOO_MANY_CHOICES:
        return InvalidArgument(
            "sampling.n", f"{request.choices} sequences exceed the batch of every decode worker", reason="NEVER_FITS"
        )
    return InvalidArgument(
        "sampling.max_tokens",
        f"prompt and answer may need {request.longest_blocks} KV blocks, more than any decode worker has; lower it",
        reason="NEVER_FITS",
    )


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    max_waiting: int
    max_wait_s: float
    without_workers_s: float  # longest wait of a new request while a role that it needs has no workers
    max_waiting_per_tenant: int


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Tenant, priority (lower is earlier) and deadline (monotonic seconds) of a request."""

    tenant: str = ""
    priority: int = 0
    deadline_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Admitted:
    """Result of a successful admission. `route_began_s`: time at which its placement began, monotonic seconds."""

    placement: Placement
    route_began_s: float
    decision: Decision


@dataclass(eq=False, slots=True)
class Ticket:
    """Attempt that waits for admission, or was just admitted or rejected."""

    attempt_id: int
    request: PlacementRequest
    block_hashes: Sequence[bytes]
    request_class: RequestClass
    on_settled: Callable[[Admitted | BatonError], None]
    submitted_s: float
    overtaken_tokens: int = 0  # tokens of later requests that were served before it
    outcome: Admitted | BatonError | None = None
    patience: asyncio.TimerHandle | None = None  # timer that ends the wait of a pending attempt

    def settle(self, outcome: Admitted | BatonError) -> None:
        self.outcome = outcome
        if self.patience is not None:
            self.patience.cancel()
        self.on_settled(outcome)


@dataclass(frozen=True, slots=True)
class _Stay:
    """Charged tokens and start time of an in-flight attempt."""

    tokens: int
    since_s: float


class WaitForecast:
    """Forecast of the waiting times in one queue. It rejects requests that would be late."""

    def __init__(self, queue: FairQueue[Ticket], limits: AdmissionLimits, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._limits = limits
        self._clock = clock
        self._estimate = WaitEstimate()
        self._stays: dict[int, _Stay] = {}  # in-flight attempts by attempt id
        self.lacks_room = False
        """True: requests wait for capacity."""

    def retry_after_s(self) -> float:
        """Return the retry time in seconds for a request that is rejected before it is queued."""
        ahead = self._queue.tokens_ahead("", 0) + self._estimate.usual_tokens
        return self._estimate.retry_after_s(ahead, self._clock())

    def refuse_late(self, request_class: RequestClass, tokens: int | None = None) -> None:
        """Raise ResourceExhausted if a new request would be late. `tokens`: its charge; None: not known yet."""
        if not self._queue or request_class.priority == BEGUN_PRIORITY:
            return
        own = self._queue.waiting_of(request_class.tenant)
        if own >= self._limits.max_waiting_per_tenant:
            message = f"{own} requests of this caller are pending, the maximum; retry later"
            raise self.refusal(message, request_class, QUEUE_FULL)
        now, tokens = self._clock(), self._estimate.usual_tokens if tokens is None else tokens
        ahead = self._queue.tokens_ahead(request_class.tenant, request_class.priority) + tokens
        wait_s = self._estimate.wait_s(ahead, now)
        time_left_s = PLANNED_SHARE * (request_class.deadline_s - now)
        longest_s = min(self._limits.max_wait_s, time_left_s - self._estimate.stay_s(tokens))
        if wait_s is not None and wait_s > longest_s:
            message = f"the request would be pending for {wait_s:.1f} s, too long for its deadline or the queue's limit"
            raise self.refusal(message, request_class, NO_TIME)

    def would_miss_deadline(self, entry: Entry[Ticket], now: float) -> bool:
        """Return whether the request would miss its deadline if it started now.

        False if no other request is pending.
        """
        needed_s = SURE_SHARE * self._estimate.stay_s(entry.tokens)
        return len(self._queue) > 1 and now + needed_s > entry.item.request_class.deadline_s

    def refusal(self, message: str, request_class: RequestClass, cause: str) -> ResourceExhausted:
        ahead = self._queue.tokens_ahead(request_class.tenant, request_class.priority) + self._estimate.usual_tokens
        return ResourceExhausted(message, self._estimate.retry_after_s(ahead, self._clock()), cause)

    def dispatched(self, attempt_id: int, tokens: int, now: float) -> None:
        """Record that an attempt uses capacity of `tokens` from now on."""
        self._stays[attempt_id] = _Stay(tokens, now)
        self._estimate.dispatched(tokens)

    def ended(self, attempt_id: int, answered: bool) -> None:
        """Record that an attempt released its capacity. `answered`: the attempt completed."""
        stay, now = self._stays.pop(attempt_id), self._clock()
        self._estimate.ended(stay.tokens, now - stay.since_s if answered else None, now)

    def some_wait(self, waits: bool) -> None:
        """Record whether requests wait for capacity. Requests that wait for absent workers do not count."""
        self.lacks_room = waits
        self._estimate.some_wait(waits, self._clock())


OVERTAKING = 1.0
"""Maximum tokens of requests that overtake a pending request, as a multiple of that request's tokens."""
LOOK_AHEAD = 64
"""Maximum number of pending entries that are searched for one that fits."""


class _RequestKind(NamedTuple):
    """Properties that decide which workers can serve a request."""

    fingerprint: bytes
    adapter: Adapter | None
    pooled: bool


def _kind(request: PlacementRequest) -> _RequestKind:
    return _RequestKind(request.fingerprint, request.adapter, request.pooled)


def _covers(request: PlacementRequest, unmet: PlacementRequest) -> bool:
    """Return whether `request` is of the same kind as `unmet`, which did not fit, and at least as large."""
    is_larger = request.charged_blocks >= unmet.charged_blocks and request.choices >= unmet.choices
    return is_larger and _kind(request) == _kind(unmet)


class AdmissionPass:
    """One pass over pending requests: selects the next one to try, which may overtake requests that do not fit.

    Smaller requests overtake a large one that does not fit, until they have OVERTAKING times its tokens. From then on,
    all released capacity is reserved for the large request. So the large request delays small requests only while its
    capacity is being released. Small requests delay the large request no longer than one request of its size would.

    After each `next`, the caller must remove the entry from the queue (and call `served` if it was placed), or call
    `without_room` or `without_workers`.
    """

    def __init__(self, queue: FairQueue[Ticket]) -> None:
        self._queue = queue
        self._held: dict[int, Entry[Ticket]] = {}  # entries that do not fit: by number, in order of service
        self._unmet: list[PlacementRequest] = []
        self._unserved: set[_RequestKind] = set()

    @property
    def some_without_workers(self) -> bool:
        return bool(self._unserved)

    def next(self) -> Entry[Ticket] | None:
        is_reserved = False  # True: all capacity of decode workers is reserved for an overtaken request
        for entry in islice(self._queue.order(), LOOK_AHEAD):
            request = entry.item.request
            if _kind(request) in self._unserved or (is_reserved and not request.pooled):
                continue
            if entry.number not in self._held:
                if not any(_covers(request, unmet) for unmet in self._unmet):
                    return entry
                self._held[entry.number] = entry
            if entry.item.overtaken_tokens >= OVERTAKING * entry.tokens:
                if request.pooled:
                    return None
                is_reserved = True
        return None

    def without_room(self, entry: Entry[Ticket]) -> None:
        self._held[entry.number] = entry
        self._unmet.append(entry.item.request)

    def without_workers(self, entry: Entry[Ticket]) -> None:
        """Skip all requests that need the same absent workers as `entry`. They delay no other request."""
        self._unserved.add(_kind(entry.item.request))

    def served(self, entry: Entry[Ticket]) -> None:
        """Count a served request as one that overtook the entries that do not fit.

        A pooled request uses no credit, so it counts only for pooled entries.
        """
        for held in self._held.values():
            if held.item.request.pooled or not entry.item.request.pooled:
                held.item.overtaken_tokens += entry.tokens


def charged_tokens(request: PlacementRequest, cached_tokens: int) -> int:
    """Return the tokens charged for a request: uncached prompt tokens, and the charged length of each answer."""
    return request.prompt_tokens - cached_tokens + request.choices * request.charged_answer_tokens


class Unmet(NamedTuple):
    """Request that does not fit, and the workers that its placement considered."""

    request: PlacementRequest
    workers: Sequence[WorkerView]


class CreditRequest(NamedTuple):
    """Credit that a pending request needs on a worker, beyond what this router's other requests use there."""

    endpoint: str
    blocks: int
    slots: int


class CreditRequester:
    """Requests a credit loan if this router's share on every decode worker is too small for the first unmet request."""

    def __init__(self, on_credit_request: Callable[[CreditRequest], None]) -> None:
        """Create a requester. `on_credit_request` sends a request to the worker; 0 blocks and 0 slots end a loan."""
        self._on_credit_request = on_credit_request
        self._wanted: CreditRequest | None = None

    def follow(self, unmet: Unmet | None) -> None:
        """Request, change or end the loan. `unmet`: first request that does not fit; None: no request needs credit."""
        wanted = (
            None if unmet is None else credit_request(unmet, None if self._wanted is None else self._wanted.endpoint)
        )
        if wanted == self._wanted:
            return
        before, self._wanted = self._wanted, wanted
        if before is not None and (wanted is None or wanted.endpoint != before.endpoint):
            self._on_credit_request(CreditRequest(before.endpoint, 0, 0))
        if wanted is not None:
            self._on_credit_request(wanted)


def credit_request(unmet: Unmet, asked: str | None) -> CreditRequest | None:
    """Return the credit to borrow, and from which worker; None if this router's share on some worker suffices.

    `asked`: worker that lends already, which is preferred.
    """
    request = unmet.request
    workers = [worker for worker in unmet.workers if worker.role is WorkerRole.DECODE]
    workers = [worker for worker in workers if ineligible(request, worker) not in NEVER]
    if not workers or any(_lacking(worker, request) <= 0 for worker in workers):
        return None
    before = [worker for worker in workers if worker.endpoint == asked]
    chosen = min(before or workers, key=lambda worker: _lacking(worker, request))
    return CreditRequest(chosen.endpoint, request.charged_on(chosen), request.choices)


def _lacking(worker: WorkerView, request: PlacementRequest) -> float:
    """Return the credit that the request needs beyond this router's limit, as a fraction of the worker's capacity."""
    blocks = (request.charged_on(worker) - worker.limit_blocks) / worker.total_blocks
    return max(blocks, (request.choices - worker.limit_slots) / worker.total_slots)


def _raise(error: Exception) -> None:
    raise error


class AdmissionQueue:
    """Queue of pending requests. Call `pump` whenever capacity may have been released."""

    def __init__(
        self,
        cluster: Cluster,
        limits: AdmissionLimits,
        policy: PlacementPolicy,
        clock: Callable[[], float] | None = None,
        on_fault: Callable[[Exception], None] = _raise,
        on_credit_request: Callable[[CreditRequest], None] = lambda wanted: None,
    ) -> None:
        """Create a queue. `on_fault` gets an exception of a scheduled `pump`, after which the queue cannot continue."""
        self._cluster = cluster
        self._policy = policy
        self._limits = limits
        self._clock = clock or time.monotonic
        self._queue: FairQueue[Ticket] = FairQueue()
        self.forecast = WaitForecast(self._queue, limits, self._clock)
        self._patience: asyncio.TimerHandle | None = None  # timer that runs while requests wait for absent workers
        self._pumping: asyncio.Handle | None = None  # scheduled call of `pump`
        self._on_fault = on_fault
        self._credit_requests = CreditRequester(on_credit_request)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def lacks_room_before(self, priority: int) -> bool:
        """Return whether requests with a lower value than `priority` wait for capacity."""
        return self.forecast.lacks_room and self._queue.has_before(priority)

    def submit(
        self,
        attempt_id: int,
        request: PlacementRequest,
        block_hashes: Sequence[bytes],
        request_class: RequestClass,
        on_settled: Callable[[Admitted | BatonError], None],
    ) -> Entry[Ticket]:
        """Queue an attempt. `on_settled` is called once with the outcome, perhaps before this method returns.

        Outcome: Admitted, with the attempt charged on its workers; ResourceExhausted (no capacity in time); Unavailable
        (no workers); or InvalidArgument (never fits). Raises: ResourceExhausted if the attempt cannot be queued.
        """
        views = self._cluster.snapshot(block_hashes, request.turn)
        tokens = charged_tokens(request, max((known_tokens(request, view) for view in views), default=0))
        self.forecast.refuse_late(request_class, tokens)
        if self._pumping is not None and len(self._queue) >= self._limits.max_waiting:
            self.pump()  # a pump is scheduled: capacity may have been released in this event-loop iteration
            views = self._cluster.snapshot(block_hashes, request.turn)
        if len(self._queue) >= self._limits.max_waiting:
            self._make_place(request_class)
        ticket = Ticket(attempt_id, request, block_hashes, request_class, on_settled, self._clock())
        entry = self._queue.add(ticket, request_class.tenant, request_class.priority, tokens)
        self._pump(ticket, views)
        if ticket.outcome is None:
            loop = asyncio.get_running_loop()
            ticket.patience = loop.call_later(self._limits.max_wait_s, self._waited_too_long, entry)
        return entry

    def withdraw(self, entry: Entry[Ticket]) -> None:
        """Withdraw an abandoned request from the queue, or release its charge if it has just been placed."""
        ticket = entry.item
        if ticket.patience is not None:
            ticket.patience.cancel()
        if isinstance(ticket.outcome, Admitted):
            for endpoint in ticket.outcome.placement.endpoints:
                self._cluster.release(ticket.attempt_id, endpoint)
            self.forecast.ended(ticket.attempt_id, answered=False)
        elif ticket.outcome is None:
            self._queue.withdraw(entry)
        self.pump_soon()

    def adopted(
        self, attempt_id: int, placement: Placement, request: PlacementRequest, block_hashes: Sequence[bytes]
    ) -> None:
        """Charge an answer that its worker already generates for another router; it needs no admission."""
        self._cluster.charge(attempt_id, placement, request, block_hashes)
        tokens = charged_tokens(request, placement.decode_hit_tokens)
        self.forecast.dispatched(attempt_id, tokens, self._clock())

    def served_elsewhere(self, tenant: str, tokens: int) -> None:
        """Count tokens that another router served for a tenant."""
        self._queue.charge(tenant, tokens)

    def ended(self, attempt_id: int, answered: bool) -> None:
        """Record that an admitted attempt released its capacity. `answered`: the attempt completed."""
        self.forecast.ended(attempt_id, answered)

    def pump(self) -> None:
        """Place all pending requests that fit, in order of service."""
        self._pump()

    def pump_soon(self) -> None:
        """Schedule one `pump` at the end of the current event-loop iteration.

        So if many requests are abandoned together, none of them is first placed in capacity that another one released.
        """
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pumping = None
        try:
            self.pump()
        except Exception as error:  # noqa: BLE001 -- no caller awaits this call and would report a bug
            self._on_fault(error)

    def _pump(self, newest: Ticket | None = None, seen: Sequence[WorkerView] | None = None) -> None:
        """Place requests in turn. `seen`: snapshot of the workers for `newest`; unused if another is placed first."""
        admission_pass, unmet = AdmissionPass(self._queue), None
        while (entry := admission_pass.next()) is not None:
            ticket, began_s = entry.item, self._clock()
            if self.forecast.would_miss_deadline(entry, began_s):
                message = "the request can no longer complete before its deadline"
                too_late = self.forecast.refusal(message, ticket.request_class, NO_TIME)
                self._settle(entry, too_late, served=False)
                continue
            views, outcome = self._place(ticket, seen if ticket is newest else None)
            match outcome:
                case Decision():
                    self._dispatch(entry, outcome, began_s)
                    admission_pass.served(entry)
                    seen = None
                case NoRoom.TOO_LONG | NoRoom.TOO_MANY_CHOICES:
                    self._settle(entry, never_fits(ticket.request, outcome), served=False)
                case NoRoom.NO_PREFILL_WORKER | NoRoom.NO_POOLING_WORKER if (
                    self._policy.no_prefill_worker is NoPrefillWorker.REJECT
                ):
                    self._settle(entry, no_workers(outcome), served=False)
                case NoRoom.NO_PREFILL_WORKER | NoRoom.NO_DECODE_WORKER | NoRoom.NO_POOLING_WORKER:
                    admission_pass.without_workers(entry)
                case _:
                    admission_pass.without_room(entry)
                    unmet = unmet or (None if ticket.request.pooled else Unmet(ticket.request, views))
        self._credit_requests.follow(unmet)
        self._be_patient(admission_pass.some_without_workers)
        self.forecast.some_wait(len(self._queue) > 0 and not admission_pass.some_without_workers)

    def _place(
        self, ticket: Ticket, views: Sequence[WorkerView] | None
    ) -> tuple[Sequence[WorkerView], Decision | NoRoom]:
        """Return the considered workers and the decision.

        If nothing fits on the shortlist, all workers are considered.
        """
        request, hashes = ticket.request, ticket.block_hashes
        if views is None:  # it has waited
            request = request.after(self._clock() - ticket.submitted_s)
            views = self._cluster.snapshot(hashes, request.turn)
        outcome = decide(request, views, self._policy)
        if isinstance(outcome, NoRoom) and len(views) < self._cluster.available:
            views = self._cluster.snapshot(hashes)
            outcome = decide(request, views, self._policy)
        return views, outcome

    def close(self) -> None:
        """Fail all pending requests because the router drains."""
        self._be_patient(False)
        for entry in tuple(self._queue.order()):
            self._settle(entry, Unavailable("the router is draining; retry", "DRAINING", RETRY_AFTER_S), served=False)

    def _dispatch(self, entry: Entry[Ticket], decision: Decision, began_s: float) -> None:
        ticket = entry.item
        placement = placement_of(ticket.request, decision, self._policy)
        self._cluster.charge(ticket.attempt_id, placement, ticket.request, ticket.block_hashes)
        self.forecast.dispatched(ticket.attempt_id, entry.tokens, began_s)
        self._settle(entry, Admitted(placement, began_s, decision), served=True)

    def _settle(self, entry: Entry[Ticket], outcome: Admitted | BatonError, served: bool) -> None:
        if served:
            self._queue.take(entry)
        else:
            self._queue.withdraw(entry)
        entry.item.settle(outcome)

    def _make_place(self, request_class: RequestClass) -> None:
        """Make space in a full queue by rejecting the newest request of the tenant with most pending requests.

        Raises: ResourceExhausted if the new request's tenant would then have most requests.
        """
        newest = self._queue.newest_of_largest()
        message = f"{len(self._queue)} requests are pending, the maximum; retry later"
        if newest is None or self._queue.waiting_of(newest.tenant) <= self._queue.waiting_of(request_class.tenant) + 1:
            raise self.forecast.refusal(message, request_class, QUEUE_FULL)
        self._settle(newest, self.forecast.refusal(message, newest.item.request_class, QUEUE_FULL), served=False)

    def _be_patient(self, some_without_workers: bool) -> None:
        """Start the timer for absent workers, or stop it if no request waits for them."""
        if some_without_workers and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(self._limits.without_workers_s, self._give_up)
        elif not some_without_workers and self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        """Reject requests that still have no workers. Retried requests stay in the queue."""
        self._patience = None
        for entry in tuple(self._queue.order()):
            if entry.item.request_class.priority != BEGUN_PRIORITY and (absent := self._absent(entry.item)) is not None:
                self._settle(entry, absent, served=False)

    def _absent(self, ticket: Ticket) -> Unavailable | None:
        """Return the error for a request without workers; None if workers can serve it."""
        outcome = decide(ticket.request, self._cluster.snapshot(()), self._policy)
        return no_workers(outcome) if isinstance(outcome, NoRoom) and outcome in ABSENT else None

    def _waited_too_long(self, entry: Entry[Ticket]) -> None:
        ticket = entry.item
        self._queue.withdraw(entry)
        message = f"no worker had capacity for the request within {self._limits.max_wait_s:g} s; retry later"
        refusal = self.forecast.refusal(message, ticket.request_class, "no_room")
        ticket.settle(self._absent(ticket) or refusal)
        self.pump_soon()

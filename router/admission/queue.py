"""Requests that wait for room: the fair queue decides which is next, the placement whether there is room.

A request that cannot be served in time is refused at once with the time to come back, before anything was computed
for it. A placement is charged to the cluster as soon as it is made; its owner returns the charge, and reports here when
the attempt has ended.

How long a request will wait is estimated from the tokens ahead and the rate at which room became free while others
waited. Tokens are what requests are charged: the uncached part of the prompt, and an answer of the usual length. Time
in which no request waited does not show what the workers can do and is left out. Until enough time with waiting
requests has passed, Little's law stands in: the tokens on the workers, by how long a request stays there.
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
"""Minimum window of waiting time; older time decays by 1/e. See RECENT_ENDS."""
RECENT_ENDS = 4.0
"""Requests may take minutes each. So many that ended are looked back on, however long ago they did."""
_GAP_KEPT = 0.7  # of the earlier knowledge of the time between two ends, by each further one
GUESS_S = 1.0
"""The rate that Little's law gives counts as much as so many seconds of measurement."""
MOST_COUNTED_S = 1.0
"""Maximum time counted at once. Workers report several times a second: a longer time is one in which this process stood
still.
"""
RETRY_LEAST_S, RETRY_MOST_S = 0.1, 60.0
RETRY_UNKNOWN_S = 1.0
_KEPT = 0.98  # of the earlier knowledge of stays, by each further one


class WaitEstimate:
    """Notified of every request that is dispatched and that ends. `now` is a reading of the monotonic clock."""

    def __init__(self) -> None:
        self._in_flight_tokens = 0
        self._some_wait = False
        self._counted_to_s = 0.0
        self._freed_tokens = 0.0  # while some waited, the recent ones
        self._waiting_s = 0.0  # and how long that was
        self._since_end_s = 0.0  # of that, since the last request ended
        self._gap_s = 0.0  # and usually, from one end to the next
        # Of requests that were answered, decaying:
        self._stays = 0.0
        self._stayed_s = 0.0
        self._stayed_tokens = 0.0
        self._stayed_token_s = 0.0

    def dispatched(self, tokens: int) -> None:
        self._in_flight_tokens += tokens

    def ended(self, tokens: int, stayed_s: float | None, now: float) -> None:
        """Record that a request released its capacity. `stayed_s`: service time, None if it did not complete."""
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
        """Return the rate at which capacity is released; None while unknown."""
        self._count(now)
        if self._stayed_token_s > 0.0 and self._in_flight_tokens > 0:
            little = self._in_flight_tokens * self._stayed_tokens / self._stayed_token_s
            return (self._freed_tokens + GUESS_S * little) / (self._waiting_s + GUESS_S)
        if self._waiting_s >= GUESS_S and self._freed_tokens > 0.0:
            return self._freed_tokens / self._waiting_s
        return None

    def wait_s(self, tokens: float, now: float) -> float | None:
        """Return the time until capacity for `tokens` has been released; None while unknown."""
        rate = self.tokens_per_s(now)
        return None if rate is None else tokens / rate

    def stay_s(self, tokens: int) -> float:
        """Return the expected service time of a request of this size; 0 while unknown."""
        return tokens * self._stayed_s / self._stayed_tokens if self._stayed_tokens > 0.0 else 0.0

    @property
    def usual_tokens(self) -> int:
        return round(self._stayed_tokens / self._stays) if self._stays > 0.0 else 0

    def retry_after_s(self, tokens: float, now: float) -> float:
        """Return the time after which a client should retry while `tokens` wait: never shorter for more of them."""
        wait_s = self.wait_s(tokens, now)
        return RETRY_UNKNOWN_S if wait_s is None else min(max(wait_s, RETRY_LEAST_S), RETRY_MOST_S)

    def _count(self, now: float) -> None:
        passed_s, self._counted_to_s = max(0.0, now - self._counted_to_s), max(now, self._counted_to_s)
        passed_s = min(passed_s, MOST_COUNTED_S)
        if self._some_wait:
            recent_s = max(RECENT_S, RECENT_ENDS * self._gap_s)
            kept = math.exp(-passed_s / recent_s)
            self._freed_tokens *= kept
            self._waiting_s = self._waiting_s * kept + recent_s * (1.0 - kept)
            self._since_end_s += passed_s


RETRY_AFTER_S = 1.0
"""RetryInfo's time where no better one is known."""
BEGUN_PRIORITY = -1000
"""Priority of a request that was dispatched before: ahead of all others, and never rejected for a long queue."""
PLANNED_SHARE = 0.8
"""The share of the time until a deadline that may be planned for. The rest is for errors of the estimates."""
QUEUE_FULL, NO_TIME = "queue_full", "no_room_in_time"
"""Causes of refusals, for counters."""
SURE_SHARE = 0.8
"""Share of the usual service time: a request that has less time left does not overtake others that wait."""


ABSENT = {
    NoRoom.NO_PREFILL_WORKER: "prefill worker",
    NoRoom.NO_DECODE_WORKER: "decode worker",
    NoRoom.NO_POOLING_WORKER: "prefill worker whose release makes vectors",
}
"""Missing workers by reason."""


def no_workers(reason: NoRoom) -> Unavailable:
    return Unavailable(f"no {ABSENT[reason]} is connected", "NO_WORKERS", RETRY_AFTER_S)


def never_fits(request: PlacementRequest, reason: NoRoom) -> InvalidArgument:
    if request.pooled:
        what = f"the prompt needs {request.longest_blocks} KV blocks, more than any worker has that computes it"
        return InvalidArgument("prompt", what, reason="NEVER_FITS")
    if reason is NoRoom.TOO_MANY_CHOICES:
        return InvalidArgument(
            "sampling.n", f"no decode worker has batch slots for {request.choices} sequences", reason="NEVER_FITS"
        )
    return InvalidArgument(
        "sampling.max_tokens",
        f"prompt and answer may need {request.longest_blocks} KV blocks, more than any decode worker has",
        reason="NEVER_FITS",
    )


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    max_waiting: int
    max_wait_s: float
    without_workers_s: float  # wait of a new request for an absent role, while its workers restart
    max_waiting_per_tenant: int


@dataclass(frozen=True, slots=True)
class RequestClass:
    """The tenant, how early it would like to go (lower is earlier), and when it must have ended, monotonic."""

    tenant: str = ""
    priority: int = 0
    deadline_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Admitted:
    """Result of an admission. `route_began_s`: start of the placement, in monotonic seconds."""

    placement: Placement
    route_began_s: float
    decision: Decision


@dataclass(eq=False, slots=True)
class Ticket:
    """Request that waits, or has just been settled."""

    attempt_id: int
    request: PlacementRequest
    block_hashes: Sequence[bytes]
    request_class: RequestClass
    on_settled: Callable[[Admitted | BatonError], None]
    overtaken_tokens: int = 0  # of requests that went before it out of their turn
    outcome: Admitted | BatonError | None = None
    patience: asyncio.TimerHandle | None = None  # runs while it waits

    def settle(self, outcome: Admitted | BatonError) -> None:
        self.outcome = outcome
        if self.patience is not None:
            self.patience.cancel()
        self.on_settled(outcome)


@dataclass(frozen=True, slots=True)
class _Stay:
    """A request that was dispatched and has not ended."""

    tokens: int
    since_s: float


class WaitForecast:
    """Forecast of the waits in one queue, and of the requests that cannot be served in time."""

    def __init__(self, queue: FairQueue[Ticket], limits: AdmissionLimits, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._limits = limits
        self._clock = clock
        self._estimate = WaitEstimate()
        self._stays: dict[int, _Stay] = {}  # by attempt id

    def retry_after_s(self) -> float:
        """Return the retry time for a request that is not even queued."""
        ahead = self._queue.tokens_ahead("", 0) + self._estimate.usual_tokens
        return self._estimate.retry_after_s(ahead, self._clock())

    def refuse_late(self, request_class: RequestClass, tokens: int | None = None) -> None:
        """Reject a new request that could not be served in time. `tokens`: its charge, if known. Raises:
        ResourceExhausted.
        """
        if not self._queue or request_class.priority == BEGUN_PRIORITY:
            return
        own = self._queue.waiting_of(request_class.tenant)
        if own >= self._limits.max_waiting_per_tenant:
            raise self.refusal(f"{own} requests of this caller are pending already", request_class, QUEUE_FULL)
        now, tokens = self._clock(), self._estimate.usual_tokens if tokens is None else tokens
        ahead = self._queue.tokens_ahead(request_class.tenant, request_class.priority) + tokens
        wait_s = self._estimate.wait_s(ahead, now)
        time_left_s = PLANNED_SHARE * (request_class.deadline_s - now)
        longest_s = min(self._limits.max_wait_s, time_left_s - self._estimate.stay_s(tokens))
        if wait_s is not None and wait_s > longest_s:
            message = f"the request would be pending for {wait_s:.1f} s, too long for its deadline or the queue's limit"
            raise self.refusal(message, request_class, NO_TIME)

    def would_miss_deadline(self, entry: Entry[Ticket], now: float) -> bool:
        """Return whether the deadline will pass before the answer, while others wait that can be answered."""
        needed_s = SURE_SHARE * self._estimate.stay_s(entry.tokens)
        return len(self._queue) > 1 and now + needed_s > entry.item.request_class.deadline_s

    def refusal(self, message: str, request_class: RequestClass, cause: str) -> ResourceExhausted:
        ahead = self._queue.tokens_ahead(request_class.tenant, request_class.priority) + self._estimate.usual_tokens
        return ResourceExhausted(message, self._estimate.retry_after_s(ahead, self._clock()), cause)

    def dispatched(self, attempt_id: int, tokens: int, now: float) -> None:
        """Reserve the attempt's capacity."""
        self._stays[attempt_id] = _Stay(tokens, now)
        self._estimate.dispatched(tokens)

    def ended(self, attempt_id: int, answered: bool) -> None:
        """Release the attempt's capacity. `answered`: the attempt completed."""
        stay, now = self._stays.pop(attempt_id), self._clock()
        self._estimate.ended(stay.tokens, now - stay.since_s if answered else None, now)

    def some_wait(self, waits: bool) -> None:
        """Record whether a request waits for capacity, and not for absent workers, which do not show how fast workers
        are.
        """
        self._estimate.some_wait(waits, self._clock())


OVERTAKING = 1.0
LOOK_AHEAD = 64
"""Maximum number of entries searched for one that fits: a full queue is not scanned for each answer."""


@dataclass(frozen=True, slots=True)
class _Need:
    fingerprint: bytes
    adapter: Adapter | None
    blocks: int
    choices: int
    pooled: bool

    def covers(self, other: "_Need") -> bool:
        """Return whether this request cannot fit if the other one did not."""
        same = self.fingerprint == other.fingerprint and self.adapter == other.adapter and self.pooled == other.pooled
        return same and self.blocks >= other.blocks and self.choices >= other.choices


class AdmissionPass:
    """One pass over the waiting requests: which is tried next, and which may overtake one that does not fit.

    A request that does not fit lets smaller ones overtake it until they have taken OVERTAKING times its size. From then
    on the capacity that running requests release is kept for it. So a large request delays small ones no longer than
    the workers need to make room for it, and waits for them no longer than for another of its size.

    An entry from `next` is then placed, removed for another reason, or reported as not fitting.
    """

    def __init__(self, queue: FairQueue[Ticket]) -> None:
        self._queue = queue
        self._held: dict[int, Entry[Ticket]] = {}  # without room, by number, in the order of their turn
        self._unmet: list[_Need] = []
        self._unserved: set[_Kind] = set()

    @property
    def some_without_workers(self) -> bool:
        return bool(self._unserved)

    def next(self) -> Entry[Ticket] | None:
        is_kept = False  # room with decode workers, for a request that was overtaken
        for entry in islice(self._queue.order(), LOOK_AHEAD):
            request = entry.item.request
            if _kind(request) in self._unserved or (is_kept and not request.pooled):
                continue
            if entry.number not in self._held:
                need = _need(request)
                if not any(need.covers(unmet) for unmet in self._unmet):
                    return entry
                self._held[entry.number] = entry
            if entry.item.overtaken_tokens >= OVERTAKING * entry.tokens:
                if request.pooled:
                    return None
                is_kept = True
        return None

    def without_room(self, entry: Entry[Ticket]) -> None:
        self._held[entry.number] = entry
        self._unmet.append(_need(entry.item.request))

    def without_workers(self, entry: Entry[Ticket]) -> None:
        """Skip a request that no worker could take: it delays no other request."""
        self._unserved.add(_kind(entry.item.request))

    def served(self, entry: Entry[Ticket]) -> None:
        """Count a served request against those that it overtook, unless it has no answer and so takes no credit that
        they need.
        """
        for held in self._held.values():
            if held.item.request.pooled or not entry.item.request.pooled:
                held.item.overtaken_tokens += entry.tokens


def charged_tokens(request: PlacementRequest, cached_tokens: int) -> int:
    """The tokens that a request is charged: the uncached part of its prompt, and answers of the usual length."""
    return request.prompt_tokens - cached_tokens + request.choices * request.charged_answer_tokens


def _need(request: PlacementRequest) -> _Need:
    return _Need(request.fingerprint, request.adapter, request.charged_blocks, request.choices, request.pooled)


class _Kind(NamedTuple):
    """Kind of requests that the same workers can serve."""

    fingerprint: bytes
    adapter: Adapter | None
    pooled: bool


def _kind(request: PlacementRequest) -> _Kind:
    return _Kind(request.fingerprint, request.adapter, request.pooled)


class Unmet(NamedTuple):
    """A request that there is no room for, and the workers as they were when that was decided."""

    request: PlacementRequest
    workers: Sequence[WorkerView]


class CreditRequest(NamedTuple):
    """The request's needs, beside this router's present charges on the worker."""

    endpoint: str
    blocks: int
    slots: int


class CreditRequester:
    """Asks a decode worker to lend more where the first waiting request is larger than this router's share anywhere.

    One worker at a time.
    """

    def __init__(self, on_credit_request: Callable[[CreditRequest], None]) -> None:
        """Create a requester. `on_credit_request` is called with 0 blocks and 0 slots when nothing more is wanted from
        a worker.
        """
        self._on_credit_request = on_credit_request
        self._wanted: CreditRequest | None = None

    def follow(self, unmet: Unmet | None) -> None:
        """The first request that has no room now; None: all have been placed."""
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
    """Return the credit to request; None if the request only waits for others of this router. `asked`: last worker
    asked.
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
    """Return the need beyond this router's maximum credit there, as a share of the worker."""
    blocks = (request.charged_on(worker) - worker.limit_blocks) / worker.total_blocks
    return max(blocks, (request.choices - worker.limit_slots) / worker.total_slots)


def _raise(error: Exception) -> None:
    raise error


class AdmissionQueue:
    """Requests that wait for their turn and for capacity. Call `pump` whenever capacity may have been released."""

    def __init__(
        self,
        cluster: Cluster,
        limits: AdmissionLimits,
        policy: PlacementPolicy,
        clock: Callable[[], float] | None = None,
        on_fault: Callable[[Exception], None] = _raise,
        on_credit_request: Callable[[CreditRequest], None] = lambda wanted: None,
    ) -> None:
        """Create a queue. `on_fault` is called with a bug in `pump_soon`, after which the queue cannot continue."""
        self._cluster = cluster
        self._policy = policy
        self._limits = limits
        self._clock = clock or time.monotonic
        self._queue: FairQueue[Ticket] = FairQueue()
        self.forecast = WaitForecast(self._queue, limits, self._clock)
        self._patience: asyncio.TimerHandle | None = None  # runs while a role is absent
        self._pumping: asyncio.Handle | None = None  # until the turn of the event loop is over
        self._on_fault = on_fault
        self._credit_requests = CreditRequester(on_credit_request)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def submit(
        self,
        attempt_id: int,
        request: PlacementRequest,
        block_hashes: Sequence[bytes],
        request_class: RequestClass,
        on_settled: Callable[[Admitted | BatonError], None],
    ) -> Entry[Ticket]:
        """Queue a request. `on_settled` is called once, perhaps before this returns.

        Then the attempt is charged on its workers, or refused with ResourceExhausted (no capacity in time), Unavailable
        (no workers), or InvalidArgument (can never fit). Raises: ResourceExhausted if it cannot be queued.
        """
        views = self._cluster.snapshot(block_hashes, request.turn)
        tokens = charged_tokens(request, max((known_tokens(request, view) for view in views), default=0))
        self.forecast.refuse_late(request_class, tokens)
        if self._pumping is not None and len(self._queue) >= self._limits.max_waiting:
            self.pump()  # there may be room since this turn of the event loop began
            views = self._cluster.snapshot(block_hashes, request.turn)
        if len(self._queue) >= self._limits.max_waiting:
            self._make_place(request_class)
        ticket = Ticket(attempt_id, request, block_hashes, request_class, on_settled)
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
        """An answer that its worker already makes continues here: it waits for no turn."""
        self._cluster.charge(attempt_id, placement, request, block_hashes)
        tokens = charged_tokens(request, placement.decode_hit_tokens)
        self.forecast.dispatched(attempt_id, tokens, self._clock())

    def ended(self, attempt_id: int, answered: bool) -> None:
        """An admitted attempt takes up no room any more. `answered`: to its end."""
        self.forecast.ended(attempt_id, answered)

    def pump(self) -> None:
        """Place those whose turn it is, until the next must wait."""
        self._pump()

    def pump_soon(self) -> None:
        """Schedule one `pump` at the end of the current event-loop iteration.

        If many requests are abandoned together, none of them is placed in the capacity of the others.
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
        """Place the requests whose turn it is. `seen`: snapshot for the newest request, valid until another one is
        placed.
        """
        admission_pass, unmet = AdmissionPass(self._queue), None
        while (entry := admission_pass.next()) is not None:
            ticket, began_s = entry.item, self._clock()
            if self.forecast.would_miss_deadline(entry, began_s):
                message = "the request can no longer finish before its deadline"
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
        """The workers that were considered, all of them where the shortlist has no room; and the decision."""
        request, hashes = ticket.request, ticket.block_hashes
        views = self._cluster.snapshot(hashes, request.turn) if views is None else views
        outcome = decide(request, views, self._policy)
        if isinstance(outcome, NoRoom) and len(views) < self._cluster.available:
            views = self._cluster.snapshot(hashes)
            outcome = decide(request, views, self._policy)
        return views, outcome

    def close(self) -> None:
        """Requests that still wait fail with the error that the router is draining."""
        self._be_patient(False)
        for entry in tuple(self._queue.order()):
            self._settle(entry, Unavailable("the router is draining", "DRAINING", RETRY_AFTER_S), served=False)

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
        """The queue is full: the tenant with most requests in it loses one, unless the new request is that tenant's."""
        newest = self._queue.newest_of_largest()
        message = f"{len(self._queue)} requests are pending already"
        if newest is None or self._queue.waiting_of(newest.tenant) <= self._queue.waiting_of(request_class.tenant) + 1:
            raise self.forecast.refusal(message, request_class, QUEUE_FULL)
        self._settle(newest, self.forecast.refusal(message, newest.item.request_class, QUEUE_FULL), served=False)

    def _be_patient(self, some_without_workers: bool) -> None:
        """Run a timer while requests wait for absent workers."""
        if some_without_workers and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(self._limits.without_workers_s, self._give_up)
        elif not some_without_workers and self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        """Refuse requests that still have no workers, except those that had workers and lost them."""
        self._patience = None
        for entry in tuple(self._queue.order()):
            if entry.item.request_class.priority != BEGUN_PRIORITY and (absent := self._absent(entry.item)) is not None:
                self._settle(entry, absent, served=False)

    def _absent(self, ticket: Ticket) -> Unavailable | None:
        """The error for a request that no worker can serve; None where there are workers for it."""
        outcome = decide(ticket.request, self._cluster.snapshot(()), self._policy)
        return no_workers(outcome) if isinstance(outcome, NoRoom) and outcome in ABSENT else None

    def _waited_too_long(self, entry: Entry[Ticket]) -> None:
        ticket = entry.item
        self._queue.withdraw(entry)
        message = f"no worker had room for the request within {self._limits.max_wait_s:g} s"
        refusal = self.forecast.refusal(message, ticket.request_class, "no_room")
        ticket.settle(self._absent(ticket) or refusal)
        self.pump_soon()

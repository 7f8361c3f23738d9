"""Whether a request that waits for room can be served in time, by what others took; else when to come back."""

from collections.abc import Callable
from dataclasses import dataclass

from router.fair_queue import Entry, FairQueue
from router.tickets import BEGUN_PRIORITY, AdmissionLimits, Standing, Ticket
from router.wait_estimate import WaitEstimate
from service.errors import ResourceExhausted

PLANNED_SHARE = 0.8
"""The share of the time until a deadline that may be planned for. The rest is for errors of the estimates."""
QUEUE_FULL, NO_TIME = "queue_full", "no_room_in_time"
"""Causes of refusals, for counters."""
SURE_SHARE = 0.8
"""Of the time that such requests usually take: one that has less left does not go before others that wait."""


@dataclass(frozen=True, slots=True)
class _Stay:
    """A request that was dispatched and has not ended."""

    tokens: int
    since_s: float


class Prospects:
    """Of one queue."""

    def __init__(self, queue: FairQueue[Ticket], limits: AdmissionLimits, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._limits = limits
        self._clock = clock
        self._estimate = WaitEstimate()
        self._stays: dict[int, _Stay] = {}  # by attempt id

    def retry_after_s(self) -> float:
        """For a request that is not even queued."""
        ahead = self._queue.tokens_ahead("", 0) + self._estimate.usual_tokens
        return self._estimate.retry_after_s(ahead, self._clock())

    def refuse_hopeless(self, standing: Standing, tokens: int | None = None) -> None:
        """Raises: ResourceExhausted for a request that came now and could not be served in time.

        `tokens`: its charge; left out before that is known.
        """
        if not self._queue or standing.priority == BEGUN_PRIORITY:
            return
        own = self._queue.waiting_of(standing.tenant)
        if own >= self._limits.max_waiting_per_tenant:
            raise self.refusal(f"{own} requests of this caller are pending already", standing, QUEUE_FULL)
        now, tokens = self._clock(), self._estimate.usual_tokens if tokens is None else tokens
        ahead = self._queue.tokens_ahead(standing.tenant, standing.priority) + tokens
        wait_s = self._estimate.wait_s(ahead, now)
        time_left_s = PLANNED_SHARE * (standing.deadline_s - now)
        longest_s = min(self._limits.max_wait_s, time_left_s - self._estimate.stay_s(tokens))
        if wait_s is not None and wait_s > longest_s:
            message = f"the request would be pending for {wait_s:.1f} s, too long for its deadline or the queue's limit"
            raise self.refusal(message, standing, NO_TIME)

    def is_hopeless(self, entry: Entry[Ticket], now: float) -> bool:
        """Its deadline will pass before it is answered, and others wait that can be answered."""
        needed_s = SURE_SHARE * self._estimate.stay_s(entry.tokens)
        return len(self._queue) > 1 and now + needed_s > entry.item.standing.deadline_s

    def refusal(self, message: str, standing: Standing, cause: str) -> ResourceExhausted:
        ahead = self._queue.tokens_ahead(standing.tenant, standing.priority) + self._estimate.usual_tokens
        return ResourceExhausted(message, self._estimate.retry_after_s(ahead, self._clock()), cause)

    def dispatched(self, attempt_id: int, tokens: int, now: float) -> None:
        """It takes up room from now on."""
        self._stays[attempt_id] = _Stay(tokens, now)
        self._estimate.dispatched(tokens)

    def ended(self, attempt_id: int, answered: bool) -> None:
        """It takes up no room any more. `answered`: to its end."""
        stay, now = self._stays.pop(attempt_id), self._clock()
        self._estimate.ended(stay.tokens, now - stay.since_s if answered else None, now)

    def some_wait(self, waits: bool) -> None:
        """Whether a request waits for room, and not for workers, whose absence does not show how fast they are."""
        self._estimate.some_wait(waits, self._clock())

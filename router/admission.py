"""Requests that wait for room: the fair queue decides whose turn it is, the placement whether there is room.

A request that cannot be served in time is refused at once with the time to come back, before anything was computed
for it. A placement is charged to the cluster as soon as it is made; the caller that receives it returns the charge,
and reports here when the attempt has ended.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.cluster import Cluster
from router.decision import Decision
from router.fair_queue import Entry, FairQueue
from router.placement import (
    NoPrefillWorker,
    NoRoom,
    Placement,
    PlacementPolicy,
    PlacementRequest,
    WorkerView,
    decide,
    placement_of,
)
from router.prospects import NO_TIME, QUEUE_FULL, Prospects
from router.refusals import RETRY_AFTER_S, never_fits, no_workers
from router.tickets import BEGUN_PRIORITY, NOBODY, AdmissionLimits, Admitted, Standing, Ticket
from router.turns import Turns, charged_tokens
from router.wanting import Unmet, Wanting
from service.errors import BatonError, Unavailable

__all__ = ["AdmissionLimits", "AdmissionQueue", "Admitted", "Standing"]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The workers for one request, as they are until another one is placed."""

    ticket: Ticket
    views: Sequence[WorkerView]


class AdmissionQueue:
    """`pump` is called whenever room may have become free."""

    def __init__(
        self,
        cluster: Cluster,
        limits: AdmissionLimits,
        policy: PlacementPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._policy = policy
        self._limits = limits
        self._clock = clock
        self._queue: FairQueue[Ticket] = FairQueue()
        self.prospects = Prospects(self._queue, limits, clock)
        self._patience: asyncio.TimerHandle | None = None  # runs while a role is absent
        self._pumping: asyncio.Handle | None = None  # until the turn of the event loop is over
        self.on_fault: Callable[[Exception], None] = _raise
        """Called with a bug in `pump_soon`, after which the queue cannot continue."""
        self.wanting = Wanting()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def admit(
        self,
        attempt_id: int,
        request: PlacementRequest,
        block_hashes: Sequence[bytes],
        standing: Standing = NOBODY,
    ) -> Admitted:
        """Waits for its turn and for room; the attempt is charged on its workers when this returns.

        Raises: ResourceExhausted (queue full, or no room in time), Unavailable (no workers), InvalidArgument (can
        never fit).
        """
        views = self._cluster.snapshot(block_hashes, request.turn)
        tokens = charged_tokens(request, max((request.hit_tokens(view) for view in views), default=0))
        self.prospects.refuse_hopeless(standing, tokens)
        if self._pumping is not None and len(self._queue) >= self._limits.max_waiting:
            self.pump()  # there may be room since this turn of the event loop began
        if len(self._queue) >= self._limits.max_waiting:
            self._make_place(standing)
        ticket = Ticket(attempt_id, request, block_hashes, standing)
        entry = self._queue.add(ticket, standing.tenant, standing.priority, tokens)
        self._pump(_Seen(ticket, views))
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                await ticket.settled.wait()
        except TimeoutError:
            self._withdraw(entry)
            absent = self._absent(ticket)
            if absent is not None:
                raise absent from None
            message = f"no worker had room for the request within {self._limits.max_wait_s:g} s"
            raise self.prospects.refusal(message, standing, "no_room") from None
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise
        if isinstance(ticket.outcome, Admitted):
            return ticket.outcome
        if ticket.outcome is None:
            raise RuntimeError("a settled ticket has an outcome")
        raise ticket.outcome

    def adopted(
        self, attempt_id: int, placement: Placement, request: PlacementRequest, block_hashes: Sequence[bytes]
    ) -> None:
        """An answer that its worker already makes continues here: it waits for no turn."""
        self._cluster.charge(attempt_id, placement, request, block_hashes)
        tokens = charged_tokens(request, placement.decode_hit_tokens)
        self.prospects.dispatched(attempt_id, tokens, self._clock())

    def ended(self, attempt_id: int, answered: bool) -> None:
        """An admitted attempt takes up no room any more. `answered`: to its end."""
        self.prospects.ended(attempt_id, answered)

    def pump(self) -> None:
        """Places those whose turn it is, until the next must wait."""
        self._pump(None)

    def pump_soon(self) -> None:
        """As `pump`, once for all that happens in this turn of the event loop.

        Where many requests are given up at once, none that is about to be is placed in the room of the others.
        """
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pumping = None
        try:
            self.pump()
        except Exception as error:  # noqa: BLE001 -- no caller awaits this call and would report a bug
            self.on_fault(error)

    def _pump(self, seen: _Seen | None) -> None:
        turns, unmet = Turns(self._queue), None
        while (entry := turns.next()) is not None:
            ticket, began_s = entry.item, self._clock()
            if self.prospects.is_hopeless(entry, began_s):
                message = "the request can no longer finish before its deadline"
                too_late = self.prospects.refusal(message, ticket.standing, NO_TIME)
                self._settle(entry, too_late, served=False)
                continue
            current = seen is not None and seen.ticket is ticket
            views, outcome = self._place(ticket, seen.views if current and seen is not None else None)
            match outcome:
                case Decision():
                    self._dispatch(entry, outcome, began_s)
                    turns.served(entry)
                    seen = None
                case NoRoom.TOO_LONG | NoRoom.TOO_MANY_CHOICES:
                    self._settle(entry, never_fits(ticket.request, outcome), served=False)
                case NoRoom.NO_PREFILL_WORKER if self._policy.no_prefill_worker is NoPrefillWorker.REJECT:
                    self._settle(entry, no_workers(outcome), served=False)
                case NoRoom.NO_PREFILL_WORKER | NoRoom.NO_DECODE_WORKER:
                    turns.without_workers(entry)
                case _:
                    turns.without_room(entry)
                    unmet = unmet or Unmet(ticket.request, views)
        self.wanting.follow(unmet)
        self._be_patient(turns.some_without_workers)
        self.prospects.some_wait(len(self._queue) > 0 and not turns.some_without_workers)

    def _place(
        self, ticket: Ticket, views: Sequence[WorkerView] | None
    ) -> tuple[Sequence[WorkerView], Decision | NoRoom]:
        """The workers that were considered, all of them where the shortlist has no room; and the decision."""
        request, hashes = ticket.request, ticket.block_hashes
        views = self._cluster.snapshot(hashes, request.turn) if views is None else views
        outcome = decide(request, views, self._policy)
        if isinstance(outcome, NoRoom) and len(views) < self._cluster.able:
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
        self.prospects.dispatched(ticket.attempt_id, entry.tokens, began_s)
        self._settle(entry, Admitted(placement, began_s, decision), served=True)

    def _settle(self, entry: Entry[Ticket], outcome: Admitted | BatonError, served: bool) -> None:
        if served:
            self._queue.take(entry)
        else:
            self._queue.withdraw(entry)
        entry.item.settle(outcome)

    def _make_place(self, standing: Standing) -> None:
        """The queue is full: the tenant with most requests in it loses one, unless the new request is that tenant's."""
        newest = self._queue.newest_of_largest()
        message = f"{len(self._queue)} requests are pending already"
        if newest is None or self._queue.waiting_of(newest.tenant) <= self._queue.waiting_of(standing.tenant) + 1:
            raise self.prospects.refusal(message, standing, QUEUE_FULL)
        self._settle(newest, self.prospects.refusal(message, newest.item.standing, QUEUE_FULL), served=False)

    def _be_patient(self, some_without_workers: bool) -> None:
        """While workers that some wait for are absent, a timer runs."""
        if some_without_workers and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(self._limits.without_workers_s, self._give_up)
        elif not some_without_workers and self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        """Refuses requests that still have no workers, except those that had workers and lost them."""
        self._patience = None
        for entry in tuple(self._queue.order()):
            if entry.item.standing.priority != BEGUN_PRIORITY and (absent := self._absent(entry.item)) is not None:
                self._settle(entry, absent, served=False)

    def _absent(self, ticket: Ticket) -> Unavailable | None:
        """The error for a request that no worker can serve; None where there are workers for it."""
        outcome = decide(ticket.request, self._cluster.snapshot(()), self._policy)
        return no_workers(outcome) if outcome in (NoRoom.NO_PREFILL_WORKER, NoRoom.NO_DECODE_WORKER) else None

    def _withdraw(self, entry: Entry[Ticket]) -> None:
        """Its owner has gone: removed from the queue, or, if it was placed at the same moment, its charge returned."""
        ticket = entry.item
        if isinstance(ticket.outcome, Admitted):
            for endpoint in ticket.outcome.placement.endpoints:
                self._cluster.release(ticket.attempt_id, endpoint)
            self.prospects.ended(ticket.attempt_id, answered=False)
        elif ticket.outcome is None:
            self._queue.withdraw(entry)
        self.pump_soon()


def _raise(error: Exception) -> None:
    raise error

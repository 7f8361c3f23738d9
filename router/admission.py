"""Requests that wait for room: first come first served, bounded in number and time.

A placement is charged to the cluster the moment it is made; whoever gets it returns the charge.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.cluster import Cluster
from router.placement import NoPrefillWorker, NoRoom, Placement, PlacementPolicy, PlacementRequest, place
from service.errors import BatonError, InvalidArgument, ResourceExhausted, Unavailable

RETRY_AFTER_S = 1.0
"""What RetryInfo says to a client that found no room or no workers."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    max_waiting: int = 1024
    max_wait_s: float = 60.0
    without_workers_s: float = 10.0  # a role may be absent this long, while its workers restart


@dataclass(frozen=True, slots=True)
class Admitted:
    """`route_began_s`: when its turn came, monotonic."""

    placement: Placement
    route_began_s: float


@dataclass(eq=False, slots=True)
class _Ticket:
    attempt_id: int
    request: PlacementRequest
    block_hashes: Sequence[bytes]
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Admitted | BatonError | None = None

    def settle(self, outcome: Admitted | BatonError) -> None:
        self.outcome = outcome
        self.settled.set()


class AdmissionQueue:
    """`pump` is called whenever room may have become free."""

    def __init__(self, cluster: Cluster, limits: AdmissionLimits, policy: PlacementPolicy) -> None:
        self._cluster = cluster
        self._policy = policy
        self._limits = limits
        self._waiting: deque[_Ticket] = deque()
        self._patience: asyncio.TimerHandle | None = None  # runs while a role is absent

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def admit(self, attempt_id: int, request: PlacementRequest, block_hashes: Sequence[bytes]) -> Admitted:
        """Waits for its turn and for room; the attempt is charged on both workers when this returns.

        Raises: ResourceExhausted (queue full, or no room in time), Unavailable (no workers), InvalidArgument (can
        never fit).
        """
        if len(self._waiting) >= self._limits.max_waiting:
            raise ResourceExhausted(f"{len(self._waiting)} requests are waiting already", RETRY_AFTER_S)
        ticket = _Ticket(attempt_id, request, block_hashes)
        self._waiting.append(ticket)
        self.pump()
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                await ticket.settled.wait()
        except TimeoutError:
            self._withdraw(ticket)
            message = f"no room became free in {self._limits.max_wait_s:g} s"
            raise ResourceExhausted(message, RETRY_AFTER_S) from None
        except asyncio.CancelledError:
            self._withdraw(ticket)
            raise
        if isinstance(ticket.outcome, Admitted):
            return ticket.outcome
        if ticket.outcome is None:
            raise RuntimeError("a settled ticket has an outcome")
        raise ticket.outcome

    def pump(self) -> None:
        """Places requests from the head of the queue until one must wait."""
        while self._waiting:
            ticket = self._waiting[0]
            began_s = time.monotonic()
            outcome = place(ticket.request, self._cluster.snapshot(ticket.block_hashes), self._policy)
            match outcome:
                case Placement():
                    self._cluster.charge(ticket.attempt_id, outcome, ticket.request, ticket.block_hashes)
                    self._waiting.popleft().settle(Admitted(outcome, began_s))
                case NoRoom.TOO_LONG | NoRoom.TOO_MANY_CHOICES:
                    self._waiting.popleft().settle(_never_fits(ticket.request, outcome))
                case NoRoom.NO_CREDIT:
                    self._stop_patience()
                    return
                case NoRoom.NO_PREFILL_WORKER if self._policy.no_prefill_worker is NoPrefillWorker.REJECT:
                    self._waiting.popleft().settle(_no_workers(outcome))
                case NoRoom.NO_PREFILL_WORKER | NoRoom.NO_DECODE_WORKER:
                    if self._patience is None:
                        loop = asyncio.get_running_loop()
                        self._patience = loop.call_later(self._limits.without_workers_s, self._give_up, outcome)
                    return
        self._stop_patience()

    def close(self) -> None:
        """Whoever still waits is told that the router is draining."""
        self._stop_patience()
        while self._waiting:
            self._waiting.popleft().settle(Unavailable("the router is draining", "DRAINING", RETRY_AFTER_S))

    def _give_up(self, reason: NoRoom) -> None:
        self._patience = None
        while self._waiting:
            self._waiting.popleft().settle(_no_workers(reason))

    def _stop_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _withdraw(self, ticket: _Ticket) -> None:
        """Its owner has gone: out of the queue, or, if it was placed in the same moment, its charge returned."""
        if isinstance(ticket.outcome, Admitted):
            for endpoint in ticket.outcome.placement.endpoints:
                self._cluster.release(ticket.attempt_id, endpoint)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
        self.pump()


def _no_workers(reason: NoRoom) -> Unavailable:
    missing = "prefill" if reason is NoRoom.NO_PREFILL_WORKER else "decode"
    return Unavailable(f"there is no {missing} worker", "NO_WORKERS", RETRY_AFTER_S)


def _never_fits(request: PlacementRequest, reason: NoRoom) -> InvalidArgument:
    if reason is NoRoom.TOO_MANY_CHOICES:
        return InvalidArgument(
            "sampling.n", f"no decode worker runs {request.choices} sequences at once", reason="NEVER_FITS"
        )
    return InvalidArgument(
        "sampling.max_tokens",
        f"prompt and answer take {request.longest_blocks} KV blocks at their longest; no decode worker has as many",
        reason="NEVER_FITS",
    )

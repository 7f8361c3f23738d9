"""A request that waits for room: its tenant, its needs, and its outcome."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.decision import Decision
from router.placement import Placement, PlacementRequest
from service.errors import BatonError

BEGUN_PRIORITY = -1000
"""Of a request that was dispatched before: it goes before all others, and is not refused for a long queue."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    max_waiting: int = 1024
    max_wait_s: float = 60.0
    without_workers_s: float = 10.0  # a new request waits this long for an absent role, while its workers restart
    max_waiting_per_tenant: int = 1024


@dataclass(frozen=True, slots=True)
class Standing:
    """The tenant, how early it would like to go (lower is earlier), and when it must have ended, monotonic."""

    tenant: str = ""
    priority: int = 0
    deadline_s: float = math.inf


NOBODY = Standing()


@dataclass(frozen=True, slots=True)
class Admitted:
    """`route_began_s`: when its turn came, monotonic."""

    placement: Placement
    route_began_s: float
    decision: Decision


@dataclass(eq=False, slots=True)
class Ticket:
    """One that waits, or has just been settled."""

    attempt_id: int
    request: PlacementRequest
    block_hashes: Sequence[bytes]
    standing: Standing
    overtaken_tokens: int = 0  # of requests that went before it out of their turn
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Admitted | BatonError | None = None

    def settle(self, outcome: Admitted | BatonError) -> None:
        self.outcome = outcome
        self.settled.set()

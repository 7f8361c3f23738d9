"""Which router a decode worker lends more than its share to: one at a time, in the order in which they asked. Pure.

A turn ends when the router wants no more, since its request has been placed or given up, and in any case after TURN_S:
then the others have the same time in which nothing is lent. So a request that never gets room, however long it waits,
keeps no other router from its share for more than half of the time.
"""

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from decode_worker.credits import Charge

Router = TypeVar("Router", bound=Hashable)
TURN_S = 20.0


@dataclass(frozen=True, slots=True)
class Loan(Generic[Router]):
    """The resources that a router gets beside its own here, as soon as others have released them."""

    router: Router
    wanted: Charge


class Lending(Generic[Router]):
    def __init__(self) -> None:
        self._wanted: dict[Router, Charge] = {}  # in the order of their turn
        self._turn_of: Router | None = None
        self._until = 0.0  # of the turn, or of the rest after one; monotonic seconds

    def ask(self, router: Router, wanted: Charge) -> None:
        """The newest replaces the one before and keeps its place in line; of nothing, it leaves the line."""
        if wanted.blocks or wanted.slots:
            self._wanted[router] = wanted
        else:
            self.forget(router)

    def forget(self, router: Router) -> None:
        """It is gone, or needs nothing any more."""
        self._wanted.pop(router, None)
        if self._turn_of == router:
            self._turn_of = None
            self._until = 0.0

    def loan(self, present: Collection[Router], now: float) -> Loan[Router] | None:
        """The loan, if any; called for each report. `present`: routers that receive the report."""
        if self._turn_of is not None and (now >= self._until or self._turn_of not in present):
            self._wanted[self._turn_of] = self._wanted.pop(self._turn_of)  # it goes to the end of the queue
            self._turn_of = None
            self._until = now + TURN_S
        if self._turn_of is None:
            first = next((router for router in self._wanted if router in present), None)
            if first is None or now < self._until:
                return None
            self._turn_of, self._until = first, now + TURN_S
        return Loan(self._turn_of, self._wanted[self._turn_of])

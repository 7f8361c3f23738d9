"""Credits: the number of a decode worker's blocks and batch slots that each router may use. Pure.

A router's share is what it uses plus an equal part of what no router uses. One router at a time may borrow more, for
a request larger than its share; the others then divide the rest.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from baton.text.block_groups import ONE_GROUP, BlockGroups, charged_blocks
from baton.worker.wire import Limit

Router = TypeVar("Router", bound=Hashable)
NOTHING: Mapping[Any, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Charge:
    """Blocks and slots of one request. Complete blocks of the prompt count once, further blocks once per choice."""

    blocks: int
    slots: int

    @staticmethod
    def of(
        prompt_tokens: int, max_tokens: int, slots: int, block_tokens: int, groups: BlockGroups = ONE_GROUP
    ) -> "Charge":
        return Charge(charged_blocks(prompt_tokens, max_tokens, slots, block_tokens, groups), slots)


NO_CHARGE = Charge(blocks=0, slots=0)
"""Charge of an embedding, which keeps no blocks."""


class Credits(Generic[Router]):
    """Division of one resource, blocks or batch slots, among routers.

    A router's limit rises one report later than another's falls, because the other router may use its old limit until
    it receives that report. So the limits in use never exceed the total, if commands arrive within the time between
    two reports.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._reported: dict[Router, int] = {}  # each router's limit in the last report

    def deal(
        self, used: Mapping[Router, int], present: frozenset[Router], lent: Mapping[Router, int] = NOTHING
    ) -> dict[Router, int]:
        """Return each router's limit for the next report. Call it once per report.

        `used`: amount in use, by router. `present`: routers that receive the report; an absent one keeps what it uses.
        `lent`: extra amount for a present router, taken from what the others may use but do not use.
        """
        parts = self._divide(used, present)
        for router, more in lent.items():
            parts = self._lend(parts, used, router, more)
        reserved = {router: max(self._reported.get(router, 0), used.get(router, 0)) for router in present}
        away = sum(count for router, count in used.items() if router not in present)
        spare = max(0, self._total - away - sum(reserved.values()))
        limits = {}
        for router, part in parts.items():
            more = min(spare, max(0, part - reserved[router]))
            spare -= more
            limits[router] = min(part, reserved[router] + more)
        self._reported = limits
        return dict(limits)

    def _divide(
        self, used: Mapping[Router, int], present: frozenset[Router], total: int | None = None
    ) -> dict[Router, int]:
        """Return fair shares by router, regardless of earlier reports. Routers that use least get the remainder."""
        unused = max(0, (self._total if total is None else total) - sum(used.values()))
        each, extra = divmod(unused, max(1, len(present)))
        in_turn = sorted(present, key=lambda router: (used.get(router, 0), hash(router)))
        return {router: used.get(router, 0) + each + (place < extra) for place, router in enumerate(in_turn)}

    def _lend(
        self, parts: Mapping[Router, int], used: Mapping[Router, int], borrower: Router, more: int
    ) -> dict[Router, int]:
        wanted = min(self._total, used.get(borrower, 0) + more)
        if wanted <= parts[borrower]:
            return dict(parts)
        others = {router: count for router, count in used.items() if router != borrower}
        of_others = self._divide(others, frozenset(parts) - {borrower}, self._total - wanted)
        return {borrower: wanted, **of_others}


TURN_S = 20.0


@dataclass(frozen=True, slots=True)
class CreditLoan(Generic[Router]):
    """Resources lent to a router beyond its share; available as soon as other routers have released them."""

    router: Router
    wanted: Charge


class CreditLoans(Generic[Router]):
    """Queue of routers that ask for more than their share. One router borrows at a time, in order of arrival.

    A loan ends when the router has placed or cancelled the request, at the latest after TURN_S. After a loan that
    reached TURN_S, nothing is lent for TURN_S, so a request that never fits reduces other routers' shares at most half
    of the time.
    """

    def __init__(self) -> None:
        self._wanted: dict[Router, Charge] = {}  # requested loans by router, in order of their turns
        self._turn_of: Router | None = None
        self._until = 0.0  # end of the present loan or of the pause after a loan, monotonic seconds

    def ask(self, router: Router, wanted: Charge) -> None:
        """Set the loan that a router requests. A changed loan keeps its position in the queue; zero cancels it."""
        if wanted.blocks or wanted.slots:
            self._wanted[router] = wanted
        else:
            self.forget(router)

    def forget(self, router: Router) -> None:
        """Remove a router that is gone or no longer needs a loan, and end its present loan."""
        self._wanted.pop(router, None)
        if self._turn_of == router:
            self._turn_of = None
            self._until = 0.0

    def loan(self, present: Collection[Router], now: float) -> CreditLoan[Router] | None:
        """Return the present loan. Call it once per report. `present`: routers that receive the report."""
        if self._turn_of is not None and (now >= self._until or self._turn_of not in present):
            self._wanted[self._turn_of] = self._wanted.pop(self._turn_of)  # the router moves to the end of the queue
            self._turn_of = None
            self._until = now + TURN_S
        if self._turn_of is None:
            first = next((router for router in self._wanted if router in present), None)
            if first is None or now < self._until:
                return None
            self._turn_of, self._until = first, now + TURN_S
        return CreditLoan(self._turn_of, self._wanted[self._turn_of])


class WorkerCredits(Generic[Router]):
    """Limits of each router on a decode worker, sent with every report: blocks and batch slots."""

    def __init__(self, total_blocks: int, total_slots: int) -> None:
        self._blocks: Credits[Router] = Credits(total_blocks)
        self._slots: Credits[Router] = Credits(total_slots)
        self.loans: CreditLoans[Router] = CreditLoans()

    def deal(
        self, open_here: Iterable[tuple[Router, Charge]], present: Iterable[Router], now: float
    ) -> dict[Router, Limit]:
        """Return limits by router. Call it once per report.

        `open_here`: router and charge of every open request. `present`: routers that receive the report."""
        blocks: dict[Router, int] = {}
        slots: dict[Router, int] = {}
        for router, charge in open_here:
            blocks[router] = blocks.get(router, 0) + charge.blocks
            slots[router] = slots.get(router, 0) + charge.slots
        routers = frozenset(present)
        loan = self.loans.loan(routers, now)
        most_blocks = self._blocks.deal(blocks, routers, {loan.router: loan.wanted.blocks} if loan else {})
        most_slots = self._slots.deal(slots, routers, {loan.router: loan.wanted.slots} if loan else {})
        return {router: Limit(most_blocks[router], most_slots[router]) for router in routers}

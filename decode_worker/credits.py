"""How a decode worker is divided among routers: used, an equal part, lent; and what each report says of it. Pure.

One router at a time may be lent more, for a request that is larger than its part: then the others share what is left.
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
    """What a router charges for a request: complete blocks of the prompt once, and what each answer adds to them."""

    blocks: int
    slots: int

    @staticmethod
    def of(
        prompt_tokens: int, max_tokens: int, slots: int, block_tokens: int, groups: BlockGroups = ONE_GROUP
    ) -> "Charge":
        return Charge(charged_blocks(prompt_tokens, max_tokens, slots, block_tokens, groups), slots)


NO_CHARGE = Charge(blocks=0, slots=0)
"""Of a prompt that is computed for a vector: no answer keeps its blocks."""


class Credits(Generic[Router]):
    """Of one kind: blocks, or places in the batch.

    An increase of a router's limit takes effect one report later: until then another router may still use what the
    current report takes from it. So the limits of all routers together never exceed the total, as long as a command
    takes less than the time between two reports.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._reported: dict[Router, int] = {}  # in the last report

    def deal(
        self, used: Mapping[Router, int], present: frozenset[Router], lent: Mapping[Router, int] = NOTHING
    ) -> dict[Router, int]:
        """The most that each router may have here; called once for each report.

        `used`: by router, what it has here now; `present`: routers that receive the report. One that is away for a
        moment keeps what it uses and no more. `lent`: what one of those present gets beside what it uses, at the cost
        of the others' shares, though not of what they use.
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
        """The fair shares now, regardless of earlier reports. The router that has least comes first."""
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
    """The resources that a router gets beside its own here, as soon as others have released them."""

    router: Router
    wanted: Charge


class CreditLoans(Generic[Router]):
    """Which router is lent more than its share: one at a time, in the order in which they asked.

    A turn ends when the router wants no more, since its request has been placed or given up, and in any case after
    TURN_S: then the others have the same time in which nothing is lent. So a request that never gets room, however long
    it waits, keeps no other router from its share for more than half of the time.
    """

    def __init__(self) -> None:
        self._wanted: dict[Router, Charge] = {}  # in the order of their turn
        self._turn_of: Router | None = None
        self._until = 0.0  # of the turn, or of the rest after one; monotonic seconds

    def ask(self, router: Router, wanted: Charge) -> None:
        """The newest replaces the one before and keeps its place in the queue; of nothing, it leaves the queue."""
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

    def loan(self, present: Collection[Router], now: float) -> CreditLoan[Router] | None:
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
        return CreditLoan(self._turn_of, self._wanted[self._turn_of])


class WorkerCredits(Generic[Router]):
    """What each router may have on a decode worker, sent with every report: blocks, and places in the batch.

    `loans`: takes the routers' requests beyond their shares.
    """

    def __init__(self, total_blocks: int, total_slots: int) -> None:
        self._blocks: Credits[Router] = Credits(total_blocks)
        self._slots: Credits[Router] = Credits(total_slots)
        self.loans: CreditLoans[Router] = CreditLoans()

    def deal(
        self, open_here: Iterable[tuple[Router, Charge]], present: Iterable[Router], now: float
    ) -> dict[Router, Limit]:
        """`open_here`: every request with its router; `present`: routers that receive it. Called for each report."""
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

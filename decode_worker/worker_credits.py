"""What each router may have on a decode worker, sent with every report: blocks, places in the batch. Pure."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from decode_worker.credits import Charge, Credits
from decode_worker.lending import Lending

Router = TypeVar("Router", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Limit:
    blocks: int
    slots: int


class WorkerCredits(Generic[Router]):
    """Both kinds of credits. `lending`: takes the routers' requests beyond their shares."""

    def __init__(self, total_blocks: int, total_slots: int) -> None:
        self._blocks: Credits[Router] = Credits(total_blocks)
        self._slots: Credits[Router] = Credits(total_slots)
        self.lending: Lending[Router] = Lending()

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
        loan = self.lending.loan(routers, now)
        most_blocks = self._blocks.deal(blocks, routers, {loan.router: loan.wanted.blocks} if loan else {})
        most_slots = self._slots.deal(slots, routers, {loan.router: loan.wanted.slots} if loan else {})
        return {router: Limit(most_blocks[router], most_slots[router]) for router in routers}

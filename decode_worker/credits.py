"""How a decode worker is divided among routers: what each uses already, and an equal part of what is unused. Pure.

One of them may be lent more, for a request that is larger than its part: then the others share what is left.

An increase of a router's limit takes effect one report later: until then another router may still use what the current
report takes from it. So the limits of all routers together never exceed the total, as long as a command takes less
than the time between two reports.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from service.charging import charged_blocks

Router = TypeVar("Router", bound=Hashable)
NOTHING: Mapping[Any, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Charge:
    """What a router charges for a request: complete blocks of the prompt once, and what each answer adds to them."""

    blocks: int
    slots: int

    @staticmethod
    def of(prompt_tokens: int, max_tokens: int, slots: int, block_tokens: int) -> "Charge":
        return Charge(charged_blocks(prompt_tokens, max_tokens, slots, block_tokens), slots)


class Credits(Generic[Router]):
    """Of one kind: blocks, or places in the batch."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._told: dict[Router, int] = {}  # in the last report

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
        reserved = {router: max(self._told.get(router, 0), used.get(router, 0)) for router in present}
        away = sum(count for router, count in used.items() if router not in present)
        spare = max(0, self._total - away - sum(reserved.values()))
        limits = {}
        for router, part in parts.items():
            more = min(spare, max(0, part - reserved[router]))
            spare -= more
            limits[router] = min(part, reserved[router] + more)
        self._told = limits
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

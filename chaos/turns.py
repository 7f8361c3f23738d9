"""Which faults may be under way beside each other, so that something is always left to go on with. Pure.

That is a router, a prefill and a decode worker that nothing was done to, and that have recovered from all before.
"""

from collections.abc import Collection, Set
from dataclasses import dataclass, field

from chaos.faults import DECODE, PREFILL, ROUTERS, Fault, FaultKind, Planned

STARTS = 2  # processes that are being started again at a time: each takes seconds of a core
_RESTARTED = frozenset({FaultKind.KILL, FaultKind.RESTART})


@dataclass
class Turns:
    """`under_way`: from before the injection until all that was disturbed has recovered."""

    under_way: list[Fault] = field(default_factory=list)

    @property
    def disturbed(self) -> frozenset[str]:
        return frozenset().union(*(fault.disturbs for fault in self.under_way))

    def may_begin(self, planned: Planned, unsound: Collection[str]) -> bool:
        """`unsound`: processes that do not serve now, for whatever reason."""
        fault = planned.fault
        busy = self.disturbed | set(unsound)
        hits_again = planned.at_once and fault.hits_process
        if fault.disturbs & busy and not hits_again:
            return False
        restarts = sum(each.kind in _RESTARTED for each in self.under_way)
        if fault.kind in _RESTARTED and restarts >= STARTS:
            return False
        return not any(_peers(name) & busy for name in fault.disturbs if not _peers(name) <= fault.disturbs)


def _peers(name: str) -> Set[str]:
    """Who can go on in its place."""
    return next((frozenset(role) - {name} for role in (ROUTERS, PREFILL, DECODE) if name in role), frozenset())

"""Inject a plan of faults into a running stack while observing which processes serve.

A fault that finds nothing to break is reported as not made; a fault without evidence is reported as not proven. Both
are retried later, up to TRIES attempts in all. A retry of a link fault may choose another link that is in use.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from baton.lab.chaos.checker import Injected
from baton.lab.chaos.disk.injections import FILE_KINDS, SHIM_KINDS, disk_injection
from baton.lab.chaos.faults import Fault, FaultKind, FaultTurns, Planned
from baton.lab.chaos.hosts.injections import HOST_KINDS, host_injection
from baton.lab.chaos.injection import Injection, NotMade, NotProven, Scene, in_use, injection_of
from baton.lab.chaos.stack import ChaosStack
from baton.lab.chaos.watch import Background

PERIOD_S = 0.15
WHOLE_S = 60.0  # longest time from the end of a fault until the disturbed processes serve again
AHEAD = 8  # number of planned faults among which the next one is chosen
TRIES = 4  # most attempts for a fault that finds nothing to break or is not proven
BACK = 3  # number of other faults that are injected before a failed one is tried again


class Soundness(Background):
    """Polls from `start` to `stop` which processes of the stack serve. `unsound`: problems by name of the process."""

    def __init__(self, stack: ChaosStack) -> None:
        super().__init__()
        self._stack = stack
        self._looked = asyncio.Condition()
        self._began_s = float("-inf")  # start of the last completed poll
        self.unsound: dict[str, str] = {"the stack": "has not been polled yet"}

    async def next_look(self) -> None:
        """Wait until a poll that began after this call has finished."""
        since_s = time.monotonic()
        async with self._looked:
            await self._looked.wait_for(lambda: self._began_s >= since_s)

    async def recovered(self, names: frozenset[str], within_s: float) -> str:
        """Wait until these processes serve again: return an empty text, or what is still wrong after `within_s`."""
        until_s = time.monotonic() + within_s
        while True:
            await self.next_look()
            wrong = [f"{name} {word}" for name, word in self.unsound.items() if name in names]
            if not wrong or time.monotonic() > until_s:
                return f"after {within_s:g} s: {'; '.join(wrong)}" if wrong else ""

    async def _run(self) -> None:
        while True:
            began_s = time.monotonic()
            found = await self._stack.unsound()
            async with self._looked:
                self.unsound, self._began_s = found, began_s
                self._looked.notify_all()
            await asyncio.sleep(PERIOD_S)


Make = Callable[[Fault, Scene], Injection]


def make_injection(fault: Fault, scene: Scene) -> Injection:
    """Create the injection of any fault of the catalogue. Raises: NotMade if the stack lacks what it needs."""
    if fault.kind in HOST_KINDS:
        return host_injection(fault, scene)
    if fault.kind in FILE_KINDS | SHIM_KINDS:
        return disk_injection(fault, scene)
    return injection_of(fault, scene)


@dataclass(frozen=True, slots=True)
class Unmade:
    """Fault that was not injected because it found nothing to break."""

    fault: Fault
    at_s: float
    why: str


@dataclass
class FaultCampaign:
    """Injects the planned faults of a run. `began_s`: start of the run, monotonic; printed times count from it.

    `wanted`: number of proven faults after which the campaign ends; None: it ends with the plan.
    """

    scene: Scene
    soundness: Soundness
    plan: Sequence[Planned]
    make: Make
    say: Callable[[str], None]
    began_s: float
    wanted: int | None = None
    injected: list[Injected] = field(default_factory=list)
    unmade: list[Unmade] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._turns = FaultTurns()
        self._left = deque(self.plan)
        self._number = 0

    async def run(self, until_s: float) -> None:
        """Inject planned faults until `until_s`; return once all disturbed processes serve again or have timed out.

        Raises: ExceptionGroup of an injection's errors other than NotMade, NotProven and OSError.
        """
        under_way: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            while (self._left or under_way) and time.monotonic() < until_s and not self._is_enough:
                planned = self._next()
                if planned is None:
                    await self.soundness.next_look()
                    continue
                self._turns.under_way.append(planned.fault)
                task = group.create_task(self._one(planned))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
                await asyncio.sleep(planned.pause_s)

    @property
    def _is_enough(self) -> bool:
        return self.wanted is not None and sum(each.proof is not None for each in self.injected) >= self.wanted

    def _next(self) -> Planned | None:
        """Remove and return the first of the next AHEAD faults that may start now. A link fault needs a link in use."""
        for place, planned in enumerate(list(self._left)[:AHEAD]):

            def may_begin(fault: Fault, planned: Planned = planned) -> bool:
                return self._turns.may_begin(replace(planned, fault=fault), self.soundness.unsound)

            fault = in_use(planned.fault, self.scene, may_begin)
            if fault is not None and may_begin(fault):
                del self._left[place]
                return replace(planned, fault=fault)
        return None

    async def _one(self, planned: Planned) -> None:
        """Inject one fault and wait until the processes that it disturbed serve again."""
        fault, proof, trouble = planned.fault, None, ""
        self._number += 1
        number, injection = self._number, None
        at_s = time.monotonic()
        try:
            try:
                injection = self.make(fault, self.scene)
                await injection.inject()
                at_s = time.monotonic()
                proof = await injection.prove()
            finally:
                if injection is not None:
                    await injection.heal()
        except NotMade as error:
            self._turns.under_way.remove(fault)
            self._not_made(planned, at_s, str(error))
            return
        except (NotProven, OSError) as error:
            trouble = str(error) or type(error).__name__
        healed_s = time.monotonic()
        late = await self.soundness.recovered(fault.disturbs, WHOLE_S)
        self._turns.under_way.remove(fault)
        self.injected.append(Injected(fault, at_s, healed_s, proof, trouble or late))
        self._tell(number, fault, at_s, f"{proof or 'not proven:'}  {trouble or late}")
        if proof is None:
            self._try_again(planned)

    def _not_made(self, planned: Planned, at_s: float, why: str) -> None:
        self.unmade.append(Unmade(planned.fault, at_s, why))
        self._tell(0, planned.fault, at_s, f"not made: {why}")
        self._try_again(planned)

    def _try_again(self, planned: Planned) -> None:
        if planned.tries + 1 < TRIES:
            self._left.insert(BACK, replace(planned, tries=planned.tries + 1))

    def _tell(self, number: int, fault: Fault, at_s: float, what: str) -> None:
        self.say(f"{at_s - self.began_s:7.1f} s  {number or '':3}  {fault!s:40}  {what}".rstrip())


def never_made(injected: Sequence[Injected], unmade: Sequence[Unmade]) -> list[FaultKind]:
    """Return the kinds of fault that had nothing to break in TRIES attempts and were never proven."""
    proven = {each.fault.kind for each in injected if each.proof is not None}
    tried = [each.fault.kind for each in unmade]
    return sorted(kind for kind in set(tried) - proven if tried.count(kind) >= TRIES)


LEAST_PROVEN = 0.5  # least fraction of a kind's injected faults that must be proven; at least one must


def too_few_proven(injected: Sequence[Injected]) -> list[FaultKind]:
    """Return the kinds of fault of which fewer were proven than LEAST_PROVEN demands."""
    made = Counter(each.fault.kind for each in injected)
    proven = Counter(each.fault.kind for each in injected if each.proof is not None)
    return sorted(kind for kind, count in made.items() if proven[kind] < max(1.0, LEAST_PROVEN * count))

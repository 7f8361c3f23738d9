"""Whether a worker had better serve in the other role: from how busy the two are, measured against their SLOs. Pure.

A pressure of 1 is as much as the SLOs allow. Moving one worker divides the load of its old role by fewer workers, and
that of its new role by more; a part that no further worker would shorten (a prompt's own computation, a step of one
sequence) stays. A change is worth it where the higher of both pressures is beyond 1, would fall, and is at least
GAIN above the pressure that the worker's old role would have: under the same load the way back is then never worth it,
so that roles do not oscillate. This must hold for `hold_s`, and after a change there is none for `cool_down_s`.
"""

from dataclasses import dataclass

from router.worker import WorkerRole

GAIN = 0.15
LEAST_HELP = 0.5
"""Share of the help that one more worker would give if all load of a role could be divided."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """`level` of a role now; `floor` is the part of it that more workers would not change."""

    level: float
    floor: float = 0.0

    def over(self, workers: int, instead_of: int) -> float:
        """The level if so many shared what others share now."""
        fixed = min(self.floor, self.level)
        return fixed + (self.level - fixed) * instead_of / workers


@dataclass(frozen=True, slots=True)
class Situation:
    prefill_workers: int  # that serve now
    decode_workers: int
    prefill: Pressure
    decode: Pressure
    moving: bool = False  # a worker is draining: present measurements will not last


@dataclass(frozen=True, slots=True)
class PlannerTiming:
    hold_s: float = 5.0  # how long a change must seem worth it
    cool_down_s: float = 30.0  # after a change


@dataclass(frozen=True, slots=True)
class Verdict:
    """`to`: the role that one worker of the other had better take; None: leave them."""

    to: WorkerRole | None
    why: str
    prefill_pressure: float
    decode_pressure: float


class Planner:
    """Looks at one situation after another; call `changed` when one of its verdicts was carried out."""

    def __init__(self, timing: PlannerTiming = PlannerTiming()) -> None:
        self._timing = timing
        self._wanted: WorkerRole | None = None
        self._wanted_since_s = 0.0
        self._changed_s: float | None = None

    def look(self, situation: Situation, now: float) -> Verdict:
        wanted, why = _worth_it(situation)
        if wanted is not self._wanted:
            self._wanted, self._wanted_since_s = wanted, now
        if wanted is not None and now - self._wanted_since_s < self._timing.hold_s:
            wanted, why = None, f"{why}; for {now - self._wanted_since_s:.0f} s so far"
        elif wanted is not None and self._cooling(now):
            wanted, why = None, f"{why}; the last change is less than {self._timing.cool_down_s:g} s ago"
        return Verdict(wanted, why, situation.prefill.level, situation.decode.level)

    def changed(self, now: float) -> None:
        """A worker was asked to change its role."""
        self._changed_s, self._wanted = now, None

    def _cooling(self, now: float) -> bool:
        return self._changed_s is not None and now - self._changed_s < self._timing.cool_down_s


def _worth_it(situation: Situation) -> tuple[WorkerRole | None, str]:
    """The role to strengthen, and why; None and why not."""
    if situation.moving:
        return None, "a worker is draining"
    prefill, decode = situation.prefill, situation.decode
    worst = max(prefill.level, decode.level)
    if worst <= 1.0:
        return None, "both roles are within their SLOs"
    to = WorkerRole.PREFILL if prefill.level > decode.level else WorkerRole.DECODE
    more = 1 if to is WorkerRole.PREFILL else -1
    prefill_workers, decode_workers = situation.prefill_workers + more, situation.decode_workers - more
    if prefill_workers < 1 or decode_workers < 1:
        return None, f"{to} is overloaded, and the other role cannot give up a worker"
    prefill_then = prefill.over(prefill_workers, situation.prefill_workers)
    decode_then = decode.over(decode_workers, situation.decode_workers)
    numbers = f"prefill {prefill.level:.2f} -> {prefill_then:.2f}, decode {decode.level:.2f} -> {decode_then:.2f}"
    helped, given = (prefill_then, decode_then) if to is WorkerRole.PREFILL else (decode_then, prefill_then)
    workers = prefill_workers if to is WorkerRole.PREFILL else decode_workers
    if worst - helped < worst * LEAST_HELP / workers:
        return None, f"one more {to} worker would help too little: {numbers}"
    if given > worst * (1 - GAIN):
        return None, f"one more {to} worker would cost the other role too much: {numbers}"
    return to, f"one more {to} worker: {numbers}"

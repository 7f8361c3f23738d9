"""Decision whether a worker should change its role, by comparing the load of both roles with the SLOs. Pure.

A pressure of 1 is the most that the SLOs allow. If a worker changes its role, the load of the old role is divided by
fewer workers, and that of the new role by more. The part of the pressure that more workers would not reduce (a
prompt's own computation, a step of one sequence) stays. A change is worthwhile if the higher of the two pressures
is above 1, would fall, and is at least GAIN above the pressure that the old role would have after the change. Since
pressures are noisy, averages over AVERAGED times `cool_down_s` must agree: the higher pressure is above 1, and the old
role's load would be at least GAIN below 1, or below the load of the new role. Latency counts as load up to
MOST_FOR_WAITING: a queue shows that workers are missing, but not how many, and it passes. The reverse change is then
not worthwhile under the same load. Workers that were just lost count as present: they return.

A worker changes its role after a change was worthwhile for `hold_s`. Two changes are at least `cool_down_s` apart. A
change that undoes the last one within CALM times the planner's patience doubles the patience, and must wait for it. So
a load that alternates faster than roles can follow causes changes at doubling intervals, up to half an hour.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from baton.process.errors import FailedPrecondition, NotFound
from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.cluster import Worker


def serves(worker: Worker) -> bool:
    """Return whether the worker accepts work in its present role."""
    return worker.connected and worker.report is not None and not worker.report.draining


def endpoint_to_change(workers: Sequence[Worker], worker_id: str, role: WorkerRole) -> str | None:
    """Return the endpoint of a worker that can change to `role`; None if it already has `role`.

    Raises: NotFound, FailedPrecondition.
    """
    worker = next((each for each in workers if each.description and each.description.worker_id == worker_id), None)
    if worker is None or worker.description is None:
        raise NotFound("worker", worker_id)
    if worker.role is role:
        return None
    if role not in worker.description.roles:
        raise FailedPrecondition("role", f"{worker_id} cannot change its role: it is not an elastic worker")
    if not serves(worker):
        raise FailedPrecondition("worker_id", f"{worker_id} is not connected, or is draining already; retry later")
    if not _others_of_its_role(workers, worker):
        raise FailedPrecondition("role", f"{worker_id} is the only {worker.role} worker, which the cluster needs")
    return worker.endpoint


def _others_of_its_role(workers: Sequence[Worker], worker: Worker) -> bool:
    model = worker.description.fingerprint if worker.description else None
    return any(
        other is not worker
        and other.role is worker.role
        and serves(other)
        and other.description is not None
        and other.description.fingerprint == model
        for other in workers
    )


GAIN = 0.15
MOST_FOR_WAITING = 1.25
"""Maximum factor by which latency alone counts as missing workers."""
AVERAGED = 2.0
MOST_AVERAGED = 2.0
"""Maximum pressure that counts in an average: one long queue does not count for a minute."""
CALM = 10.0
MOST_PATIENCE_S = 1800.0
RETURN_S = 60.0  # time for which a worker that was lost is expected back
LEAST_HELP = 0.5
"""Minimum effect of one more worker, as a fraction of the effect that it would have if all load could be divided."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Load pressure of a role. `level`: present pressure; `floor`: part of it that more workers would not reduce.

    `shared`: pressure of the incoming load, and of the backlog spread over RECOVER_S. Twice the workers halve it.
    """

    level: float
    floor: float = 0.0
    shared: float = 0.0
    load: float = 0.0  # pressure of the incoming load alone, without any queue

    def over(self, workers: int, instead_of: int) -> float:
        """Return the level that the role would have with `workers` workers instead of the present `instead_of`."""
        fixed = min(self.floor, self.level)
        return fixed + (self.level - fixed) * instead_of / workers


@dataclass(frozen=True, slots=True)
class Situation:
    """Number of serving workers and pressure of both roles. `moving`: a worker drains, so the pressure will change.

    `prefill_lost`, `decode_lost`: numbers of further workers, which were lost within RETURN_S and are expected back.
    """

    prefill_workers: int
    decode_workers: int
    prefill: Pressure
    decode: Pressure
    moving: bool = False
    prefill_lost: int = 0
    decode_lost: int = 0


@dataclass(frozen=True, slots=True)
class PlannerTiming:
    hold_s: float = 5.0  # time for which a change must have been worthwhile
    cool_down_s: float = 30.0  # minimum time between changes


@dataclass(frozen=True, slots=True)
class PlannerVerdict:
    """Verdict of the planner. `to`: role to which one worker of the other role should change; None: no change."""

    to: WorkerRole | None
    why: str
    prefill_pressure: float
    decode_pressure: float


class Planner:
    """Planner of role changes. Call `look` with each new situation, and `changed` after carrying out a verdict."""

    def __init__(self, timing: PlannerTiming = PlannerTiming()) -> None:
        self._timing = timing
        self._wanted: WorkerRole | None = None
        self._wanted_since_s = 0.0
        self._changed_s = -math.inf
        self._changed_to: WorkerRole | None = None
        self._patience_s = timing.cool_down_s
        self._seen: deque[tuple[float, Situation]] = deque()

    def look(self, situation: Situation, now: float) -> PlannerVerdict:
        self._seen.append((now, situation))
        while now - self._seen[0][0] > AVERAGED * self._timing.cool_down_s:
            self._seen.popleft()
        wanted, why = _worth_it(situation, [seen for _, seen in self._seen])
        if wanted is not self._wanted:
            self._wanted, self._wanted_since_s = wanted, now
        if wanted is not None and now - self._wanted_since_s < self._timing.hold_s:
            wanted, why = None, f"{why}; worthwhile for {now - self._wanted_since_s:.0f} s so far"
        elif wanted is not None and now - self._changed_s < self._pause_s(wanted):
            wanted, why = None, f"{why}; the last change is less than {self._pause_s(wanted):g} s ago"
        return PlannerVerdict(wanted, why, situation.prefill.level, situation.decode.level)

    def changed(self, now: float) -> None:
        """Record that a worker was asked to change its role."""
        if self._wanted is not self._changed_to:
            alternates = now - self._changed_s < CALM * self._patience_s
            self._patience_s = min(MOST_PATIENCE_S, 2 * self._patience_s) if alternates else self._timing.cool_down_s
        self._changed_s, self._changed_to, self._wanted = now, self._wanted, None

    def _pause_s(self, wanted: WorkerRole | None) -> float:
        """Return the least time between the last change and one to `wanted`."""
        return self._timing.cool_down_s if wanted is self._changed_to else self._patience_s


def _worth_it(situation: Situation, recent: Sequence[Situation]) -> tuple[WorkerRole | None, str]:
    """Return the role that needs one more worker, and the reason; None and the reason if a change is not worthwhile.

    `recent`: situations over which the load of the other role is averaged.
    """
    if situation.moving:
        return None, "a worker is draining"
    prefill, decode = _RolePlan.of_prefill(situation), _RolePlan.of_decode(situation)
    is_prefill = prefill.level > decode.level
    busy, other = (prefill, decode) if is_prefill else (decode, prefill)
    plans = _RolePlan.of_prefill, _RolePlan.of_decode
    busy_of, other_of = plans if is_prefill else plans[::-1]
    levels = [busy_of(seen).level_with(busy.workers) for seen in recent]
    if busy.level <= 1.0 or fmean(min(level, MOST_AVERAGED) for level in levels) <= 1.0:
        return None, "both roles are within their SLOs"
    to = WorkerRole.PREFILL if is_prefill else WorkerRole.DECODE
    if other.serving < 2:
        return None, f"{to} is overloaded, and the other role cannot give up a worker"
    helped, given = busy.level_with(busy.workers + 1), other.level_with(other.workers - 1)
    load = fmean(busy_of(seen).load_with(busy.workers) for seen in recent)
    given_load = fmean(other_of(seen).pressure.load * other_of(seen).serving / (other.workers - 1) for seen in recent)
    prefill_then, decode_then = (helped, given) if is_prefill else (given, helped)
    numbers = f"prefill {prefill.level:.2f} -> {prefill_then:.2f}, decode {decode.level:.2f} -> {decode_then:.2f}"
    if busy.level - helped < busy.level * LEAST_HELP / (busy.workers + 1):
        return None, f"one more {to} worker would help too little: {numbers}"
    if given > busy.level * (1 - GAIN) or given_load > max(1.0, load) * (1 - GAIN):
        return None, f"one more {to} worker would cost the other role too much: {numbers}"
    return to, f"one more {to} worker: {numbers}"


class _RolePlan(NamedTuple):
    """Pressure and number of a role's workers once its lost workers are back."""

    pressure: Pressure
    serving: int
    workers: int

    @staticmethod
    def of_prefill(situation: Situation) -> "_RolePlan":
        serving = situation.prefill_workers
        return _RolePlan(situation.prefill, serving, serving + situation.prefill_lost)

    @staticmethod
    def of_decode(situation: Situation) -> "_RolePlan":
        serving = situation.decode_workers
        return _RolePlan(situation.decode, serving, serving + situation.decode_lost)

    @property
    def level(self) -> float:
        return self.level_with(self.workers)

    def level_with(self, workers: int) -> float:
        return self.pressure.over(workers, self.serving) if workers else self.pressure.level

    def load_with(self, workers: int) -> float:
        """Return the load, to which latency contributes up to MOST_FOR_WAITING."""
        load = self.pressure.load * self.serving / max(1, workers)
        return max(load, min(self.level_with(workers), MOST_FOR_WAITING))

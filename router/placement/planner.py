"""Decision whether a worker should change its role, by comparing the load of both roles with the SLOs. Pure.

A pressure of 1 is the most that the SLOs allow. If a worker changes its role, the load of the old role is divided by
fewer workers, and that of the new role by more. The part of the pressure that more workers would not reduce (a
prompt's own computation, a step of one sequence) stays. A change is worthwhile if the higher of the two pressures
is above 1, would fall, and is at least GAIN above the pressure that the old role would have after the change. The
reverse change is then not worthwhile under the same load, so roles do not oscillate. A worker changes its role after a
change was worthwhile for `hold_s`. Two changes are at least `cool_down_s` apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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

    def over(self, workers: int, instead_of: int) -> float:
        """Return the level that the role would have with `workers` workers instead of the present `instead_of`."""
        fixed = min(self.floor, self.level)
        return fixed + (self.level - fixed) * instead_of / workers


@dataclass(frozen=True, slots=True)
class Situation:
    """Number of serving workers and pressure of both roles. `moving`: a worker drains, so the pressure will change."""

    prefill_workers: int
    decode_workers: int
    prefill: Pressure
    decode: Pressure
    moving: bool = False


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
        self._changed_s: float | None = None

    def look(self, situation: Situation, now: float) -> PlannerVerdict:
        wanted, why = _worth_it(situation)
        if wanted is not self._wanted:
            self._wanted, self._wanted_since_s = wanted, now
        if wanted is not None and now - self._wanted_since_s < self._timing.hold_s:
            wanted, why = None, f"{why}; worthwhile for {now - self._wanted_since_s:.0f} s so far"
        elif wanted is not None and self._cooling(now):
            wanted, why = None, f"{why}; the last change is less than {self._timing.cool_down_s:g} s ago"
        return PlannerVerdict(wanted, why, situation.prefill.level, situation.decode.level)

    def changed(self, now: float) -> None:
        """Record that a worker was asked to change its role."""
        self._changed_s, self._wanted = now, None

    def _cooling(self, now: float) -> bool:
        return self._changed_s is not None and now - self._changed_s < self._timing.cool_down_s


def _worth_it(situation: Situation) -> tuple[WorkerRole | None, str]:
    """Return the role that needs one more worker, and the reason; None and the reason if a change is not worthwhile."""
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

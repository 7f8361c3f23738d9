"""One step: what the scheduler decides, the runner computes. The same for prefill and for decode."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from engine.plan import ChunkResult, Plan

Outcome = TypeVar("Outcome")
Committed = TypeVar("Committed", covariant=True)


class PlanRunner(Protocol):
    """Carries out plans: one result per chunk, in order."""

    def run(self, plan: Plan) -> tuple[ChunkResult, ...]: ...


class Scheduler(Protocol[Committed]):
    """Decides. Each plan is committed, with its results, before the next one is made."""

    def plan(self) -> Plan | None: ...

    def commit(self, plan: Plan, results: Sequence[ChunkResult]) -> Sequence[Committed]: ...


class Engine(Generic[Outcome]):
    """Not thread-safe: scheduler, pages and runner belong to the one thread that steps."""

    def __init__(self, runner: PlanRunner, scheduler: Scheduler[Outcome]) -> None:
        self._runner = runner
        self._scheduler = scheduler

    def step(self) -> Sequence[Outcome] | None:
        """Computes one plan and returns what came of it; None, without computing, when nothing can run."""
        plan = self._scheduler.plan()
        if plan is None:
            return None
        return self._scheduler.commit(plan, self._runner.run(plan))

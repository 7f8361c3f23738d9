"""One step: the scheduler decides it and the runner computes it. The same for prefill and for decode."""

import time
from collections.abc import Callable, Sequence
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

    def __init__(
        self,
        runner: PlanRunner,
        scheduler: Scheduler[Outcome],
        on_computed: Callable[[Plan, float], None] = lambda plan, seconds: None,
    ) -> None:
        """`on_computed` is called with the runner's time for each plan, before the plan is committed."""
        self._runner = runner
        self._scheduler = scheduler
        self._on_computed = on_computed

    def step(self) -> Sequence[Outcome] | None:
        """Computes one plan and returns its outcomes; None, without computing, when nothing can run."""
        plan = self._scheduler.plan()
        if plan is None:
            return None
        started = time.monotonic()
        results = self._runner.run(plan)
        self._on_computed(plan, time.monotonic() - started)
        return self._scheduler.commit(plan, results)

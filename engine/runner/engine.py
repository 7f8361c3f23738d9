"""One step: the scheduler decides it and the runner computes it; on a GPU the next is planned before this one ends."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.engine.plan import ChunkResult, Plan
from baton.engine.runner.launched import Launched

Outcome = TypeVar("Outcome")
Committed = TypeVar("Committed", covariant=True)


class PlanRunner(Protocol):
    """Carries out plans: one result per chunk, in order."""

    def run(self, plan: Plan) -> tuple[ChunkResult, ...]: ...


class StepScheduler(Protocol[Committed]):
    """Decides. Each plan is committed, with its results, before the next one is made."""

    def plan(self) -> Plan | None: ...

    def commit(self, plan: Plan, results: Sequence[ChunkResult]) -> Sequence[Committed]: ...


class Engine(Generic[Outcome]):
    """Not thread-safe: scheduler, pages and runner belong to the one thread that steps."""

    def __init__(
        self,
        runner: PlanRunner,
        scheduler: StepScheduler[Outcome],
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


class LaunchingRunner(Protocol):
    def launch(self, plan: Plan, after: Launched | None) -> Launched:
        """`after`: the step before, whose draws the chunks of this plan may follow."""


class AheadScheduler(Protocol[Committed]):
    """Plans one step while another is under way; they are committed in their order."""

    def plan(self) -> Plan | None: ...

    def plan_ahead(self) -> Plan | None: ...

    def commit(self, plan: Plan, results: Sequence[ChunkResult]) -> Sequence[Committed]: ...


@dataclass(frozen=True, slots=True)
class StepInFlight:
    plan: Plan
    launched: Launched


class OverlappedEngine(Generic[Outcome]):
    """As engine/runner/engine.py's Engine, one step ahead of itself. Not thread-safe."""

    def __init__(
        self,
        runner: LaunchingRunner,
        scheduler: AheadScheduler[Outcome],
        on_computed: Callable[[Plan, float], None] = lambda plan, seconds: None,
    ) -> None:
        """`on_computed` is called with the time of each plan, from when nothing was before it on the device."""
        self._runner = runner
        self._scheduler = scheduler
        self._on_computed = on_computed
        self._in_flight: StepInFlight | None = None
        self._free_since = 0.0  # when the device had finished the step before

    def step(self) -> Sequence[Outcome] | None:
        """The outcomes of the oldest step under way; None when nothing can run."""
        in_flight = self._in_flight or self._launch(self._scheduler.plan(), None)
        if in_flight is None:
            return None
        self._in_flight = self._launch(self._scheduler.plan_ahead(), in_flight.launched)
        results = in_flight.launched.results()
        now = time.monotonic()
        self._on_computed(in_flight.plan, now - self._free_since)
        self._free_since = now
        return self._scheduler.commit(in_flight.plan, results)

    def _launch(self, plan: Plan | None, after: Launched | None) -> StepInFlight | None:
        if plan is None:
            return None
        if after is None:
            self._free_since = time.monotonic()
        return StepInFlight(plan, self._runner.launch(plan, after))


class EitherRunner(LaunchingRunner, PlanRunner, Protocol):
    @property
    def launches_ahead(self) -> bool: ...


def engine_over(
    runner: EitherRunner,
    scheduler: AheadScheduler[Outcome],
    on_computed: Callable[[Plan, float], None] = lambda plan, seconds: None,
) -> Engine[Outcome] | OverlappedEngine[Outcome]:
    """The kind of engine that the runner's device gains from."""
    kind = OverlappedEngine if runner.launches_ahead else Engine
    return kind(runner, scheduler, on_computed)

"""Engine step: the scheduler plans, the runner computes; on a GPU the next step is planned before this one finishes."""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.engine.request import Plan
from baton.engine.runner.core_use import SpareCores
from baton.engine.runner.launched import Launched
from baton.engine.runner.sharing import PrefillThrottle
from baton.engine.runner.step_records import DoneStep
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import SchedulerOutcome

DECAY = 1.001  # growth factor of the best time per step, since contexts grow
EWMA_WEIGHT = 0.05  # weight of the newest step in the mean, which covers about 20 steps
MIN_STEPS = 16  # measured steps before a ratio is reported


class SlowDown:
    """Ratio of decode step times to the best times, assumed to be those without other work on the device.

    Each step is compared with steps that had a similar number of rows.
    """

    def __init__(self) -> None:
        self._best_s: dict[int, float] = {}  # best step time, by bit length of the number of rows
        self._mean = 1.0
        self._steps = 0

    def observe(self, rows: int, duration_s: float) -> None:
        size = rows.bit_length()
        best_s = min(duration_s, self._best_s.get(size, duration_s) * DECAY)
        self._best_s[size] = best_s
        self._mean += EWMA_WEIGHT * (duration_s / max(best_s, 1e-9) - self._mean)
        self._steps += 1

    @property
    def ratio(self) -> float:
        """Mean slow-down, at least 1; 0 before enough steps are measured."""
        return max(1.0, self._mean) if self._steps >= MIN_STEPS else 0.0


class StepRunner(Protocol):
    """Interface that computes plans, implemented by engine/runner/runner.py and by the simulation."""

    @property
    def launches_ahead(self) -> bool:
        """Return whether the engine should launch a step before the previous one has finished."""

    def launch(self, plan: Plan, after: Launched | None = None) -> Launched:
        """Launch a plan. `after`: the previous step, whose sampled tokens its chunks may follow."""


class StepInFlight(NamedTuple):
    plan: Plan
    launched: Launched


class Engine:
    """Scheduler with its KV blocks, and runner. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        throttle: PrefillThrottle | None = None,
        spare: SpareCores | None = None,
    ) -> None:
        """Start idle. `throttle`: limit on prefill work, for a GPU that decode workers also use. `spare`: cores of
        another worker, which are wanted when the scheduler says so.
        """
        self.scheduler = scheduler
        self.throttle = throttle
        self.slow_down = SlowDown()
        self._runner = runner
        self._spare = spare
        self._ahead: StepInFlight | None = None
        self.done: DoneStep | None = None
        """The step whose outcomes `step` returned last."""
        self._free_since = 0.0  # time at which the device finished the previous step
        self._ended_s = math.inf  # time at which the previous step finished; infinite: there was nothing to compute

    def step(self) -> Sequence[SchedulerOutcome] | None:
        """Complete the oldest step in flight and return its outcomes; do nothing and return None if nothing can run."""
        if self.throttle is not None:
            self.throttle.rest()
        if (sessions := self.scheduler.pool.order.sessions).wakes:
            sessions.advance(time.monotonic())
        step = self._ahead or self._launch(self._plan(), None)
        if step is None:
            self._ended_s = math.inf
            return None
        self._ahead = self._launch(self.scheduler.plan_ahead(), step) if self._runner.launches_ahead else None
        finished = _finished(step)
        seconds, period_s = self._observe(step.plan)
        self.done = done = finished._replace(observed_s=seconds, period_s=period_s)
        return self.scheduler.commit(step.plan, done.results)

    def _plan(self) -> Plan | None:
        plan = self.scheduler.plan(time.monotonic())
        if self._spare is not None:
            self._spare.want(self.scheduler.wants_cores)
        return plan

    def _launch(self, plan: Plan | None, after: StepInFlight | None) -> StepInFlight | None:
        if plan is None:
            return None
        if after is None:
            self._free_since = time.monotonic()
        return StepInFlight(plan, self._runner.launch(plan, after and after.launched))

    def spare_s(self) -> float:
        """Return for how many seconds the next step may wait: see `Scheduler.spare_s`."""
        return self.scheduler.spare_s(time.monotonic())

    @property
    def launches_ahead(self) -> bool:
        """Whether the next step is planned and launched before the results of this one are known."""
        return self._runner.launches_ahead

    def _observe(self, plan: Plan) -> tuple[float, float]:
        """Record how long a step took on the device, and how long its answers waited for their next token."""
        now = time.monotonic()
        seconds, self._free_since = now - self._free_since, now
        period_s, self._ended_s = max(seconds, now - self._ended_s), now
        self.scheduler.observe(plan, seconds, period_s)
        if not plan.prompt_tokens:
            self.slow_down.observe(plan.tokens, seconds)
        if self.throttle is not None:
            self.scheduler.max_step_tokens = self.throttle.observe(seconds)
        return seconds, period_s


def _finished(step: StepInFlight) -> DoneStep:
    """Wait until the device has finished the step; return its results and times."""
    launched = step.launched
    began_s, began_running_s = time.monotonic(), time.thread_time()
    results = launched.results()
    waited_s = (time.monotonic() - began_s) - (time.thread_time() - began_running_s)
    device_s = max(0.0, waited_s) if launched.tokens.is_cuda else 0.0
    return DoneStep(step.plan, results, launched.moving_s, launched.masks_s, device_s)

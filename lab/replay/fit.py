"""Duration of steps as a function of what they compute, fitted to a record's steps. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from baton.client.timelines import ProcessTimeline, TimelineStep
from baton.engine.request import Plan


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one step."""

    answers: int
    context_tokens: int
    prompts: tuple[tuple[int, int], ...]  # first position and number of the tokens of each prompt

    @property
    def factors(self) -> tuple[float, ...]:
        """Inputs of the fit; the last is the sum, over the prompt tokens, of the tokens before each."""
        tokens = sum(count for _, count in self.prompts)
        attended = sum(count * (start + count / 2) for start, count in self.prompts)
        return 1.0, self.answers, self.context_tokens, tokens, attended

    @staticmethod
    def of_plan(plan: Plan) -> "Work":
        answers = [chunk for chunk in plan.chunks if len(chunk.token_ids) == 1 and chunk.samples]
        prompts = [chunk for chunk in plan.chunks if len(chunk.token_ids) != 1 or not chunk.samples]
        parts = tuple((chunk.start, len(chunk.token_ids)) for chunk in prompts)
        return Work(len(answers), sum(chunk.end for chunk in answers), parts)


@dataclass(frozen=True, slots=True)
class StepFit:
    """Linear fit of step durations. `weights_s`: seconds per unit of each of `Work.factors`, never negative."""

    weights_s: tuple[float, ...]
    steps: int
    median_error: float  # relative to the measured duration

    def seconds(self, plan: Plan) -> float:
        return self.of(Work.of_plan(plan))

    def of(self, work: Work) -> float:
        return sum(weight * factor for weight, factor in zip(self.weights_s, work.factors, strict=True))


def fit_steps(workers: Iterable[ProcessTimeline]) -> StepFit | None:
    """Fit the durations of the steps of workers of one role; None without steps."""
    measured = [(work, seconds) for worker in workers for work, seconds in _measured(worker) if seconds > 0.0]
    if not measured:
        return None
    durations = np.array([seconds for _, seconds in measured])
    factors = np.array([work.factors for work, _ in measured])
    weights = _non_negative(factors / durations[:, None])
    errors = np.abs(factors @ weights / durations - 1.0)
    return StepFit(tuple(map(float, weights)), len(measured), float(np.median(errors)))


def gap_between_steps_s(workers: Iterable[ProcessTimeline]) -> float:
    """Return the median time between two steps that follow each other immediately; 0 without any."""
    gaps = [
        (after.began_us - before.ended_us) / 1e6
        for worker in workers
        for before, after in zip(worker.steps, worker.steps[1:], strict=False)
        if after.number == before.number + 1 and not after.spent_ms.get("idle")
    ]
    return max(0.0, median(gaps)) if gaps else 0.0


def _measured(worker: ProcessTimeline) -> Iterator[tuple[Work, float]]:
    """Yield the work and the duration of each step of a worker."""
    reached = {each.number: each.cached_tokens for each in worker.worker_requests}
    for step in worker.steps:
        parts = []
        for number, tokens in step.prompts.items():
            parts.append((reached.get(number, 0), tokens))
            reached[number] = reached.get(number, 0) + tokens
        yield Work(step.answers, step.context_tokens, tuple(parts)), _duration_s(step)


def _duration_s(step: TimelineStep) -> float:
    return step.observed_s or (step.ended_us - step.began_us) / 1e6


def _non_negative(factors: "npt.NDArray[np.float64]") -> "npt.NDArray[np.float64]":
    """Return the weights for which the rows are closest to 1. A factor with a negative weight is left out."""
    sizes = factors.mean(axis=0)
    used = [index for index, size in enumerate(sizes) if size > 0.0]
    while True:
        found, *_ = np.linalg.lstsq(factors[:, used] / sizes[used], np.ones(len(factors)), rcond=None)
        if min(found) >= 0.0 or len(used) == 1:
            weights = np.zeros(factors.shape[1])
            weights[used] = np.maximum(found, 0.0) / sizes[used]
            return weights
        used.pop(int(np.argmin(found)))

"""Causes of late tokens: splits the time between two tokens of an answer by cause. Does no I/O.

The time between two tokens is the sum of the steps between them. Step records (engine/runner/step_records.py) split
each step's time. The compute time is compared with that of recent usual steps, which have no prompts, block moves, late
masks or preemptions.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy

from baton.engine.runner.step_records import ChoiceKey, LoopDelay, StepHistory, StepRecord, StepTimeBreakdown
from baton.text.causes import CausePart, StallCause, joined_causes

LEAST_S = 0.005  # shortest gap for which causes are reported
FACTOR = 1.25  # shortest gap for which causes are reported, as a multiple of the usual step interval
KEPT_USUAL = 128  # number of recent usual steps whose times are kept
MEASURED_EVERY = 16  # steps between two computations of the medians
KEPT_NAMES = 4096
MOST_BLAMED = 3  # maximum number of prompts that are named as the cause of one long step


class Moment(NamedTuple):
    """End of the step that generated the last token of a choice."""

    step: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Time between two tokens of one choice, which is the sum of `usual_ms` and the causes."""

    usual_ms: float
    causes: tuple[CausePart, ...]  # longest first

    @property
    def total_ms(self) -> float:
        return self.usual_ms + sum(part.ms for part in self.causes)


class _StepParts(NamedTuple):
    """Size of a usual step, and its time in seconds without the time that drafts added."""

    answers: int
    context_tokens: int
    computing_s: float
    locked_s: float
    stopped_s: float


class _Prices(NamedTuple):
    """Seconds that one more answer, or one more context token, adds to a usual step."""

    answer_s: float
    context_token_s: float


@dataclass(slots=True)
class UsualStep:
    """Recent usual times: the interval of all steps, and the parts of steps without prompts."""

    interval_s: float = 0.0  # median interval of all steps; 0: not known yet
    _plain: deque[_StepParts] = field(default_factory=lambda: deque(maxlen=KEPT_USUAL))
    _intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_USUAL))
    _seen: int = 0
    # `_middle` and `_prices` are cached for MEASURED_EVERY steps; None: not computed
    _middle: _StepParts | None = None
    _prices: _Prices | None = None

    def add(self, step: StepRecord) -> None:
        self._intervals_s.append(step.interval_s)
        self._seen += 1
        if self._seen % MEASURED_EVERY == 0 or self._seen < MEASURED_EVERY:
            self.interval_s = median(self._intervals_s)
            self._middle = self._prices = None
        if step.answers and not (step.prompts or step.moved_blocks or step.late or step.preempted):
            spent = step.spent
            computing_s = max(0.0, spent.computing_s - step.prices.longer_s)
            self._plain.append(
                _StepParts(len(step.answers), step.context_tokens, computing_s, spent.locked_s, spent.stopped_s)
            )

    def middle(self) -> _StepParts:
        """Return the median of each value over the recent usual steps."""
        if not self._plain:
            return _StepParts(0, 0, self.interval_s, 0.0, 0.0)
        if self._middle is None:
            columns = list(zip(*self._plain, strict=True))
            answers, context_tokens = median(columns[0]), median(columns[1])
            self._middle = _StepParts(int(answers), int(context_tokens), *(median(column) for column in columns[2:]))
        return self._middle

    def cost_of(self, answers: int, context_tokens: int) -> tuple[float, float]:
        """Return the seconds that these additional answers and context tokens add to a step, fitted to usual steps."""
        if len(self._plain) < MEASURED_EVERY:
            return 0.0, 0.0
        if self._prices is None:
            self._prices = _fitted(self._plain)
        return max(0.0, self._prices.answer_s * answers), max(0.0, self._prices.context_token_s * context_tokens)


def _fitted(steps: Sequence[_StepParts]) -> _Prices:
    rows = numpy.array([[1.0, each.answers, each.context_tokens] for each in steps])
    means = numpy.maximum(rows.mean(axis=0), 1e-9)  # scales that let columns that grow together share the cost
    seconds = numpy.array([each.computing_s for each in steps])
    _, per_answer, per_token = (numpy.linalg.lstsq(rows / means, seconds, rcond=1e-6)[0] / means).tolist()
    return _Prices(per_answer, per_token)


class RequestNames:
    """Public ids of the newest requests, by request number."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, str] = OrderedDict()

    def add(self, number: int, request_id: str) -> None:
        self._names[number] = request_id
        if len(self._names) > KEPT_NAMES:
            self._names.popitem(last=False)

    def of(self, number: int) -> str:
        """Return a request's public id; empty if it is unknown."""
        return self._names.get(number, "")


class StepGaps:
    """Explains the token gaps of one worker's answers. Use it only on the event loop."""

    def __init__(self, history: StepHistory, names: RequestNames) -> None:
        self._history = history
        self._names = names
        self._usual = UsualStep()
        # Gap of all answers that no step delayed differently from others, by the step of their previous token.
        self._shared: dict[int, Gap] = {}

    def begin(self, step: StepRecord) -> None:
        """Record a finished step. Call it before `explain` for the same step. A record without a number is ignored."""
        self._shared.clear()
        if step.number:
            self._usual.add(step)

    def is_late(self, last: Moment, step: StepRecord) -> bool:
        """Return whether a token of `step` is late. `last`: step of its choice's previous token."""
        gap_s = step.ended - last.at_s
        return gap_s >= LEAST_S and gap_s >= FACTOR * self._usual.interval_s > 0.0

    def explain(self, key: ChoiceKey, last: Moment) -> Gap:
        """Return the gap before the token that the newest step generated for a choice."""
        steps = self._history.after(last.step)
        if any(_is_of_its_own(key, each) for each in steps):
            return self._gap(key, steps)
        if last.step not in self._shared:
            self._shared[last.step] = self._gap(key, steps)
        return self._shared[last.step]

    def _gap(self, key: ChoiceKey, steps: Sequence[StepRecord]) -> Gap:
        usual_s, causes, preemptor = 0.0, [], ""
        for each in steps:
            for part in self._step_parts(key, each, is_last=each is steps[-1]):
                if isinstance(part, float):
                    usual_s += part
                    continue
                if part.cause is StallCause.PREEMPTION:  # all name the request that caused the first one
                    preemptor = preemptor or part.request_id
                    part = part._replace(request_id=preemptor)
                causes.append(part)
        return Gap(usual_s * 1e3, tuple(joined_causes(causes)))

    def held(self, spent: StepTimeBreakdown) -> tuple[CausePart, ...]:
        """Return why the outcomes of a step reached the event loop late; empty if they were not late."""
        if sum(spent) < LEAST_S:
            return ()
        parts = [CausePart(StallCause.WORKER_LOOP, spent.computing_s * 1e3), *_waits(spent)]
        return tuple(joined_causes(parts))

    def since(self, since: LoopDelay) -> tuple[CausePart, ...]:
        """Return why the previous message may have been sent late; empty if the delay is small."""
        if sum(since) < LEAST_S:
            return ()
        return tuple(
            joined_causes(
                [
                    CausePart(StallCause.COLLECTION, since.collecting_s * 1e3),
                    CausePart(StallCause.CPU_WAIT, since.queued_s * 1e3, detail="of the worker"),
                    CausePart(StallCause.WORKER_LOOP, since.running_s * 1e3),
                ]
            )
        )

    def _step_parts(self, key: ChoiceKey, step: StepRecord, is_last: bool) -> Iterator[CausePart | float]:
        """Yield the parts of a step's time: one CausePart per cause, and the usual part as a float, in seconds."""
        absence = self._absence(key, step)
        if absence is not None:
            usual_s = min(self._usual.middle().computing_s, step.interval_s) if is_last else 0.0
            yield usual_s
            yield CausePart(absence.cause, (step.interval_s - usual_s) * 1e3, absence.request_id, absence.detail)
            return
        spent, usual = step.spent, self._usual.middle()
        locked_s, stopped_s = max(0.0, spent.locked_s - usual.locked_s), max(0.0, spent.stopped_s - usual.stopped_s)
        late = self._names.of(step.late[0].request_id) if step.late else ""
        yield CausePart(StallCause.IDLE, spent.idle_s * 1e3)
        yield CausePart(StallCause.LENT, spent.lent_s * 1e3)
        yield CausePart(StallCause.COPIES, spent.moving_s * 1e3, detail=f"{step.moved_blocks} blocks")
        yield CausePart(StallCause.MASK, spent.masks_s * 1e3, late or self._names.of(key.request_id))
        yield from _waits(spent._replace(locked_s=locked_s, stopped_s=stopped_s))
        computing_s = spent.computing_s + (spent.locked_s - locked_s) + (spent.stopped_s - stopped_s)
        usual_s = min(computing_s, usual.computing_s + usual.locked_s + usual.stopped_s)
        yield usual_s
        yield from self._excess(step, usual, computing_s - usual_s)

    def _excess(self, step: StepRecord, usual: _StepParts, excess_s: float) -> Iterator[CausePart]:
        """Yield the compute time by which a step exceeded a usual step, by cause."""
        if step.drafts:
            drafts_s = min(step.prices.longer_s, excess_s)
            excess_s -= drafts_s
            most = max(step.drafts, key=lambda part: part.tokens)
            detail = f"{step.drafted_tokens} drafted tokens in a step"
            yield CausePart(StallCause.DRAFTS, drafts_s * 1e3, self._names.of(most.request_id), detail)
        if step.prompts:
            yield from self._blamed(step, excess_s)
            return
        more_answers, more_context = len(step.answers) - usual.answers, step.context_tokens - usual.context_tokens
        batch_s, contexts_s = self._usual.cost_of(max(0, more_answers), max(0, more_context))
        batch_s = min(batch_s, excess_s)
        contexts_s = min(contexts_s, excess_s - batch_s)
        yield CausePart(StallCause.BATCH, batch_s * 1e3, detail=f"{len(step.answers)} answers")
        yield CausePart(StallCause.CONTEXTS, contexts_s * 1e3, detail=f"{step.context_tokens} tokens")
        yield CausePart(StallCause.SLOWER, (excess_s - batch_s - contexts_s) * 1e3)

    def _blamed(self, step: StepRecord, seconds: float) -> Iterator[CausePart]:
        """Yield `seconds`, divided among the step's largest prompts in proportion to their tokens."""
        prompts = sorted(step.prompts, key=lambda part: -part.tokens)[:MOST_BLAMED]
        total = sum(part.tokens for part in prompts)
        for part in prompts:
            share_ms = seconds * 1e3 * part.tokens / total
            yield CausePart(
                StallCause.PROMPTS, share_ms, self._names.of(part.request_id), f"{step.prompt_tokens} tokens in a step"
            )

    def _absence(self, key: ChoiceKey, step: StepRecord) -> CausePart | None:
        """Return why a step generated no token of this choice, or recomputed its KV; None for a normal step."""
        if key in step.preempted or any(part.request_id == key.request_id for part in step.prompts):
            others = [(tokens, number) for number, tokens in zip(step.answers, step.contexts, strict=True)]
            _, largest = max((each for each in others if each[1] != key.request_id), default=(0, 0))
            return CausePart(StallCause.PREEMPTION, 0.0, self._names.of(largest))
        if key in step.late:
            return CausePart(StallCause.MASK, 0.0, self._names.of(key.request_id))
        return None


def _is_of_its_own(key: ChoiceKey, step: StepRecord) -> bool:
    """Return whether the step may have delayed this choice differently from other choices."""
    return bool(
        step.late
        or step.preempted
        or step.spent.masks_s
        or any(part.request_id == key.request_id for part in step.prompts)
    )


def _waits(spent: StepTimeBreakdown) -> Iterator[CausePart]:
    yield CausePart(StallCause.COLLECTION, spent.collecting_s * 1e3)
    yield CausePart(StallCause.CPU_WAIT, spent.queued_s * 1e3)
    yield CausePart(StallCause.LOCK, spent.locked_s * 1e3)
    yield CausePart(StallCause.STOPPED, spent.stopped_s * 1e3)

"""Records of what each step computed and how its time was spent, for explaining the latency of a token."""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from itertools import takewhile
from typing import NamedTuple, Protocol
from zlib import crc32

from baton.engine.request import Chunk, ChunkResult, Computed, Plan
from baton.engine.runner.thread_meter import ThreadTimes
from baton.engine.scheduler.batch import RunningBatch
from baton.engine.scheduler.speculation import Speculation, StepPrices

KEPT_STEPS = 4096
CONTENTION_S = 0.001  # from this wait of the event loop for a core, contention with other threads is assumed
CONTENDED_STEPS = 32  # number of steps after contention in which waits of other threads are counted too


class StepTimeBreakdown(NamedTuple):
    """Time from the end of the previous step to the end of this one, in seconds by cause."""

    computing_s: float  # computation, and everything not listed below
    idle_s: float = 0.0  # time without anything to run
    moving_s: float = 0.0  # copies and swaps of blocks that the host waited for
    masks_s: float = 0.0  # wait for masks of structured output
    collecting_s: float = 0.0  # garbage collection
    queued_s: float = 0.0  # wait for a core
    locked_s: float = 0.0  # time off the core while other threads of the process ran
    stopped_s: float = 0.0  # time off the core while no thread of the process ran
    lent_s: float = 0.0  # time in which another worker's prompts were computed on the cores


class WaitedBefore(NamedTuple):
    """Time between two steps, in seconds."""

    idle_s: float = 0.0  # without work
    lent_s: float = 0.0  # with work, while another worker used the cores


NO_WAIT = WaitedBefore()


class PromptChunk(NamedTuple):
    request_id: int
    tokens: int  # prompt tokens computed in this step


class CallKind(StrEnum):
    """Call of a scheduler that changes which requests it has."""

    ADD = auto()
    RESERVE = auto()
    ACTIVATE = auto()
    ABORT = auto()


class RecordedCall(NamedTuple):
    kind: CallKind
    request_id: int


class ChoiceKey(NamedTuple):
    request_id: int
    choice: int


class DraftPart(NamedTuple):
    """Drafted tokens that a step verified for a choice."""

    request_id: int
    choice: int
    tokens: int


@dataclass(slots=True)
class StepTiming:
    """Start and end of a step, in monotonic seconds. Not frozen: creating a record would take three times as long."""

    started: float
    ended: float

    @property
    def duration_ms(self) -> float:
        return (self.ended - self.started) * 1e3


NO_TIME, NO_PRICES = StepTimeBreakdown(0.0), StepPrices()


@dataclass(slots=True)
class StepRecord(StepTiming):
    """Record of what one step computed, and how its time was spent.

    Thousands of records are kept, so fields are plain tuples of numbers, which the garbage collector stops tracking.
    """

    number: int = 0  # number of the step, from 1 without gaps
    spent: StepTimeBreakdown = NO_TIME
    answers: tuple[int, ...] = ()  # request ids of chunks that each sample the next token of an answer
    contexts: tuple[int, ...] = ()  # context length of each of `answers`, in the same order
    prompts: tuple[PromptChunk, ...] = ()  # chunks of prompts and of recomputed answers
    drafts: tuple[DraftPart, ...] = ()
    prices: StepPrices = NO_PRICES  # expected times; zero if the step has no drafts
    moved_blocks: int = 0  # number of blocks copied or swapped
    late: tuple[ChoiceKey, ...] = ()  # choices without a sampled token, since their mask was not ready
    preempted: tuple[ChoiceKey, ...] = ()  # preempted choices that were waiting for blocks
    held_blocks: int = 0  # blocks in use in the pool after the step
    waiting: int = 0  # number of sequences waiting for blocks after the step
    calls: tuple[RecordedCall, ...] = ()  # calls since the previous step, in order
    observed_s: float = 0.0  # duration that the scheduler observed
    period_s: float = 0.0  # time since the end of the previous step that the scheduler observed
    digest: int = 0  # see `results_digest`

    @property
    def interval_s(self) -> float:
        """Seconds from the end of the previous step to the end of this one."""
        return sum(self.spent)

    @property
    def context_tokens(self) -> int:
        return sum(self.contexts)

    @property
    def drafted_tokens(self) -> int:
        return sum(part.tokens for part in self.drafts)

    @property
    def prompt_tokens(self) -> int:
        return sum(part.tokens for part in self.prompts)


def results_digest(results: Sequence[ChunkResult]) -> int:
    """Return a CRC-32 of the sampled tokens and their log-probabilities, in the order of the plan; 0 without any."""
    drawn = (token for result in results if isinstance(result, Computed) for token in result.drawn)
    return crc32(array("d", [number for token in drawn for number in token[:2]]))


class StepHistory:
    """Records of the most recent steps, oldest first. Not thread-safe."""

    def __init__(self, kept: int = KEPT_STEPS) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=kept)

    def add(self, step: StepRecord) -> None:
        self._steps.append(step)

    def after(self, number: int) -> list[StepRecord]:
        """Return the kept records of steps after step `number`, oldest first."""
        return list(takewhile(lambda step: step.number > number, reversed(self._steps)))[::-1]

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


class DoneStep(NamedTuple):
    """Finished step, with the seconds that the host spent on moving blocks and on waiting."""

    plan: Plan
    results: Sequence[ChunkResult]
    moving_s: float = 0.0
    masks_s: float = 0.0
    device_s: float = 0.0  # time off the core, waiting for the device
    observed_s: float = 0.0  # see StepRecord
    period_s: float = 0.0


class Meter(Protocol):
    def read(self) -> ThreadTimes: ...

    def close(self) -> None: ...


class StepRecorder:
    """Creates step records on the engine's thread. `meter`: meter of that thread."""

    def __init__(self, batch: RunningBatch, meter: Meter, speculation: Speculation | None = None) -> None:
        self._batch = batch
        self._meter = meter
        self._speculation = speculation
        self._before = meter.read()
        self._ended: float | None = None
        self._number = 0

    def close(self) -> None:
        self._meter.close()

    def record(
        self, timing: StepTiming, step: DoneStep, waited: WaitedBefore = NO_WAIT, calls: Sequence[RecordedCall] = ()
    ) -> StepRecord:
        """Create the record of a step. `waited`, `calls`: time, and calls of the scheduler, since the previous step."""
        now, before = self._meter.read(), self._before
        interval_s = timing.ended - (timing.started - waited.idle_s if self._ended is None else self._ended)
        self._before, self._ended, self._number = now, timing.ended, self._number + 1
        plan, batch = step.plan, self._batch
        answers: Sequence[Chunk] = plan.chunks
        prompts: tuple[PromptChunk, ...] = ()
        drafts: tuple[DraftPart, ...] = ()
        if plan.prompt_tokens:
            answers, others = _divided(plan.chunks, _is_answer)
            prompts = tuple(PromptChunk(chunk.request_id, len(chunk.token_ids)) for chunk in others)
        if self._speculation is not None:
            drafted, answers = _divided(answers, lambda chunk: chunk.is_draft)
            counts = Counter((chunk.request_id, chunk.samples[0].choice) for chunk in drafted)
            drafts = tuple(DraftPart(*key, tokens) for key, tokens in counts.items())
        return StepRecord(
            timing.started,
            timing.ended,
            number=self._number,
            spent=_spent(interval_s, waited, step, now.since(before)),
            answers=tuple([chunk.request_id for chunk in answers]),
            contexts=tuple([chunk.start + 1 for chunk in answers]),
            prompts=prompts,
            drafts=drafts,
            prices=self._speculation.prices if drafts and self._speculation is not None else NO_PRICES,
            moved_blocks=len(plan.copies) + len(plan.swaps_out) + len(plan.swaps_in),
            late=_late(step),
            preempted=_preempted(batch),
            held_blocks=batch.pool.total_blocks - batch.pool.available,
            waiting=len(batch.waiting),
            calls=tuple(calls),
            observed_s=step.observed_s,
            period_s=step.period_s,
            digest=results_digest(step.results),
        )


def _divided(chunks: Sequence[Chunk], belongs: Callable[[Chunk], bool]) -> tuple[list[Chunk], list[Chunk]]:
    """Return the chunks for which `belongs` is true, and the others."""
    found: tuple[list[Chunk], list[Chunk]] = [], []
    for chunk in chunks:
        found[not belongs(chunk)].append(chunk)
    return found


def _is_answer(chunk: Chunk) -> bool:
    """Return whether a chunk is the newest token of an answer, or a drafted one."""
    return len(chunk.token_ids) == 1 and bool(chunk.samples)


def _spent(interval_s: float, waited: WaitedBefore, step: DoneStep, times: ThreadTimes) -> StepTimeBreakdown:
    """Split the time since the previous step by cause. No part is negative, even if clocks differ slightly."""
    left_s = interval_s

    def take(seconds: float) -> float:
        nonlocal left_s
        taken = 0.0 if seconds <= 0.0 else seconds if seconds < left_s else left_s
        left_s -= taken
        return taken

    idle_s, lent_s = take(waited.idle_s), take(waited.lent_s)
    queued_s = take(times.queued_s)
    off_s = max(0.0, left_s - times.running_s - step.device_s)
    masks_s = take(step.masks_s)
    others_collected_s = min(times.other_collections_s, off_s)
    collecting_s = take(times.own_collections_s + others_collected_s)
    off_s = max(0.0, off_s - masks_s - others_collected_s)
    locked_s = take(min(off_s, times.others_s - others_collected_s))
    behind_s = take(min(off_s - locked_s, times.lock_queued_s))  # the thread that held the lock waited for a core
    stopped_s = take(off_s - locked_s - behind_s)
    moving_s = take(step.moving_s)
    queued_s += behind_s
    return StepTimeBreakdown(left_s, idle_s, moving_s, masks_s, collecting_s, queued_s, locked_s, stopped_s, lent_s)


class LoopDelay(NamedTuple):
    """Delay of the event loop by work other than sending the delivered outcomes, in seconds by cause."""

    running_s: float = 0.0  # time of the event loop's thread on a core
    collecting_s: float = 0.0
    queued_s: float = 0.0  # wait for a core, of the event loop's thread and, under contention, of other threads


class HandOver:
    """Breakdown of the time between a step's end and the delivery of its outcomes.

    `meter`: meter of the event loop's thread.
    """

    def __init__(self, meter: Meter, others_share: Callable[[], float]) -> None:
        """Start the measurement. `others_share`: returns the fraction of recent time that threads waited for cores."""
        self._meter = meter
        self._before = meter.read()
        self._others_share = others_share
        self._contended = 0
        self._taken_s = 0.0  # monotonic time of the last delivery
        self.since = LoopDelay()
        """Delay since the previous call of `take`."""

    def close(self) -> None:
        self._meter.close()

    def take(self, held_s: float, now_s: float) -> StepTimeBreakdown:
        """Return the breakdown of the `held_s` seconds between a step's end and now, when its outcomes are delivered.

        If another delivery was made in these seconds, the time before it counts as running.
        """
        now, before = self._meter.read(), self._before
        self._before = now
        passed_s, self._taken_s = now_s - self._taken_s, now_s
        earlier_s = max(0.0, held_s - passed_s)
        held_s -= earlier_s
        times = now.since(before)
        collected_s = times.own_collections_s + times.other_collections_s
        ran_s = max(0.0, times.running_s - times.own_collections_s)
        self.since = LoopDelay(ran_s, collected_s, self._queued_s(times.queued_s, passed_s))
        collecting_s = min(collected_s, held_s)
        queued_s = min(times.queued_s, held_s - collecting_s)
        left_s = held_s - collecting_s - queued_s
        running_s = min(ran_s, left_s)
        locked_s = min(max(0.0, times.others_s - times.other_collections_s), left_s - running_s)
        stopped_s = left_s - running_s - locked_s
        return StepTimeBreakdown(earlier_s + running_s, 0.0, 0.0, 0.0, collecting_s, queued_s, locked_s, stopped_s)

    def _queued_s(self, of_loop_s: float, passed_s: float) -> float:
        self._contended = CONTENDED_STEPS if of_loop_s >= CONTENTION_S else max(0, self._contended - 1)
        return max(of_loop_s, self._others_share() * passed_s) if self._contended else of_loop_s


def _late(step: DoneStep) -> tuple[ChoiceKey, ...]:
    late = [chunk for chunk, result in zip(step.plan.chunks, step.results, strict=False) if result.late]
    return tuple([ChoiceKey(chunk.request_id, chunk.samples[0].choice) for chunk in late]) if late else ()


def _preempted(batch: RunningBatch) -> tuple[ChoiceKey, ...]:
    if not batch.waiting:
        return ()
    return tuple(
        ChoiceKey(each.request.request_id, each.arrival_key.choice) for each in batch.waiting if each.lost_tokens
    )

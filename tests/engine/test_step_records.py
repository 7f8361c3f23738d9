"""The record of a step: its make-up, and its time split so that the parts add up to all of it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import BlockCopy, Chunk, Computed, Drawn, NonFinite, Plan, Sample
from baton.engine.runner.step_records import (
    ChoiceKey,
    DoneStep,
    DraftPart,
    HandOver,
    PromptChunk,
    StepHistory,
    StepRecord,
    StepRecorder,
    StepTiming,
    WaitedBefore,
    results_digest,
)
from baton.engine.runner.thread_meter import ThreadTimes
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.batch import RunningBatch
from baton.engine.scheduler.speculation import Speculation, StepPrices

SECONDS = st.floats(0.0, 2.0)
LIKELIEST = Sample(0, SamplingParams(max_tokens=1))
NOTHING = ThreadTimes(0.0, 0.0, 0.0, 0.0, 0.0)
EMPTY = DoneStep(Plan(()), ())


class FakeMeter:
    """Reads what it is given, one after another; the last for ever."""

    def __init__(self, *readings: ThreadTimes) -> None:
        self._readings: list[ThreadTimes] = [NOTHING, *readings]

    def read(self) -> ThreadTimes:
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]

    def close(self) -> None:
        """Nothing is open."""


def recorder(*readings: ThreadTimes) -> StepRecorder:
    return StepRecorder(RunningBatch(BlockPool(8), 4, SwapSpace(0)), FakeMeter(*readings))


def recorded(times: ThreadTimes, step: DoneStep = EMPTY, seconds: float = 1.0) -> StepRecord:
    return recorder(times).record(StepTiming(10.0, 10.0 + seconds), step)


def test_the_make_up_of_a_step() -> None:
    chunks = (Chunk(1, [5], 30, [0], (LIKELIEST,)), Chunk(2, [5, 6, 7], 0, [1]), Chunk(3, [5], 9, [2], (LIKELIEST,)))
    step = DoneStep(Plan(chunks, (BlockCopy(0, 1),)), (Computed(), Computed(), Computed(late=True)))
    record = recorded(NOTHING, step)
    assert (record.answers, record.contexts) == ((1, 3), (31, 10))
    assert record.prompts == (PromptChunk(2, 3),)
    assert (record.context_tokens, record.prompt_tokens, record.moved_blocks) == (41, 3, 1)
    assert record.late == (ChoiceKey(3, 0),)


def test_digest_of_a_step_depends_on_tokens_and_log_probabilities() -> None:
    drawn = Drawn(5, -0.25)
    digests = {
        results_digest(results)
        for results in (
            [Computed((drawn,)), Computed(), Computed((Drawn(6, -1.0),))],
            [Computed((Drawn(7, -0.25),)), Computed((Drawn(6, -1.0),))],
            [Computed((Drawn(5, -0.2500001),)), Computed((Drawn(6, -1.0),))],
            [Computed((Drawn(6, -1.0),)), Computed((drawn,))],
        )
    }
    assert len(digests) == 4 and 0 not in digests
    assert results_digest([Computed(), NonFinite()]) == 0
    step = DoneStep(Plan((Chunk(1, [5], 30, [0], (LIKELIEST,)),)), (Computed((drawn,)),))
    assert recorded(NOTHING, step).digest == results_digest(step.results)


def test_drafted_tokens_are_no_answers_of_their_own() -> None:
    """They count for their choice, with what is known of the price of their step."""
    second = LIKELIEST._replace(choice=1)
    chunks = (
        Chunk(1, [5], 30, [0], (LIKELIEST,)),
        Chunk(1, [6], 31, [0], (LIKELIEST,), is_draft=True),
        Chunk(1, [7], 32, [0], (LIKELIEST,), is_draft=True),
        Chunk(1, [5], 30, [1], (second,)),
        Chunk(1, [6], 31, [1], (second,), is_draft=True),
    )
    speculation = Speculation(4)
    speculation.prices = StepPrices(0.010, 0.002)
    batch = RunningBatch(BlockPool(8), 4, SwapSpace(0))
    plan = DoneStep(Plan(chunks), (Computed(),) * 5)
    record = StepRecorder(batch, FakeMeter(), speculation).record(StepTiming(10.0, 11.0), plan)
    assert (record.answers, record.contexts, record.prompts) == ((1, 1), (31, 31), ())
    assert record.drafts == (DraftPart(1, 0, 2), DraftPart(1, 1, 1))
    assert (record.drafted_tokens, record.prices) == (3, speculation.prices)


@pytest.mark.parametrize(
    ("times", "part"),
    [
        (ThreadTimes(1.0, 0.0, 0.0, 0.0, 0.0), "computing_s"),
        (ThreadTimes(0.0, 1.0, 0.0, 0.0, 0.0), "queued_s"),
        (ThreadTimes(0.0, 0.0, 5.0, 0.0, 0.0), "locked_s"),
        (ThreadTimes(1.0, 0.0, 0.0, 1.0, 0.0), "collecting_s"),
        (ThreadTimes(0.0, 0.0, 1.0, 0.0, 1.0), "collecting_s"),
        (ThreadTimes(0.0, 0.0, 0.0, 0.0, 0.0), "stopped_s"),
        (ThreadTimes(0.0, 0.0, 0.0, 0.0, 0.0, lock_queued_s=1.0), "queued_s"),
    ],
)
def test_where_the_time_of_a_thread_went(times: ThreadTimes, part: str) -> None:
    """A second in which the thread only computed, only waited for a core, and so on."""
    assert getattr(recorded(times).spent, part) == pytest.approx(1.0)


def test_the_device_is_computing_though_the_thread_waits_for_it() -> None:
    spent = recorded(NOTHING, DoneStep(Plan(()), (), device_s=0.9)).spent
    assert (spent.computing_s, spent.stopped_s) == (pytest.approx(0.9), pytest.approx(0.1))


def test_masks_that_a_step_waited_for_are_not_taken_for_a_stopped_process() -> None:
    spent = recorded(ThreadTimes(0.1, 0.0, 0.0, 0.0, 0.0), DoneStep(Plan(()), (), masks_s=0.9)).spent
    assert (spent.masks_s, spent.stopped_s) == (pytest.approx(0.9), pytest.approx(0.0))


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, st.tuples(SECONDS, SECONDS, SECONDS), SECONDS, SECONDS)
def test_the_parts_add_up_and_none_is_negative(
    running: float, queued: float, others: float, own: float, other: float, lock: float,
    step: Sequence[float], idle: float, lent: float,
) -> None:  # fmt: skip
    """Whatever the clocks say, which are read at slightly different times."""
    done = DoneStep(Plan(()), (), *step)
    times = ThreadTimes(running, queued, others, own, other, lock)
    record = recorder(times).record(StepTiming(10.0, 11.0), done, WaitedBefore(idle, lent))
    assert sum(record.spent) == pytest.approx(1.0 + idle)
    assert min(record.spent) >= 0.0


@given(SECONDS, st.lists(SECONDS, min_size=6, max_size=6))
def test_the_parts_of_a_hand_over_add_up(held: float, times: list[float]) -> None:
    spent = HandOver(FakeMeter(ThreadTimes(*times)), lambda: 0.0).take(held, 100.0)
    assert sum(spent) == pytest.approx(held)
    assert min(spent) >= 0.0


def test_an_interval_begins_where_the_one_before_ended() -> None:
    both = recorder()
    both.record(StepTiming(10.0, 11.0), EMPTY)
    assert both.record(StepTiming(11.5, 12.0), EMPTY, WaitedBefore(0.25)).interval_s == pytest.approx(1.0)


def test_what_was_held_while_another_step_was_handed_over_is_explained_there() -> None:
    both = HandOver(FakeMeter(), lambda: 0.0)
    assert both.take(0.4, 100.0).stopped_s == pytest.approx(0.4)
    assert both.take(0.4, 100.1) == (pytest.approx(0.3), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, pytest.approx(0.1), 0.0)


def test_other_threads_of_a_contended_process_are_looked_at() -> None:
    waited = ThreadTimes(0.0, 0.002, 0.0, 0.0, 0.0)
    waits = HandOver(FakeMeter(waited, waited), lambda: 0.5)
    waits.take(0.0, 100.0)
    waits.take(0.0, 100.1)
    assert waits.since == (0.0, 0.0, pytest.approx(0.05))
    calm = HandOver(FakeMeter(ThreadTimes(0.3, 0.0, 0.0, 0.1, 0.2)), lambda: 0.5)
    calm.take(0.0, 100.0)
    assert calm.since == (pytest.approx(0.2), pytest.approx(0.3), 0.0)


def test_the_history_keeps_the_newest_and_finds_those_after_one() -> None:
    history = StepHistory(kept=4)
    assert history.after(0) == []
    for number in range(1, 7):
        history.add(StepRecord(0.0, 0.0, number=number))
    assert [step.number for step in history] == [3, 4, 5, 6]
    assert [step.number for step in history.after(4)] == [5, 6]
    assert [step.number for step in history.after(1)] == [3, 4, 5, 6]
    assert history.after(6) == []

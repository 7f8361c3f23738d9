"""`baton replay` plans recorded steps again: the scheduler plans the same, and the first other step is named."""

from dataclasses import replace

import pytest

from baton.client.timelines import ProcessTimeline, SchedulerCall, TimelineStep
from baton.engine.scheduler.scheduler import Scheduler
from baton.lab.replay.steps import check_steps
from tests.lab.replay.incidents import recorded_request, steps_of

SHARED = tuple(range(8))
REQUESTS = [
    recorded_request("r-0", 40, 12),
    recorded_request("r-1", 33, 5, SHARED),
    recorded_request("r-2", 70, 30),
    recorded_request("r-3", 34, 3, SHARED),
    recorded_request("r-4", 9, 20),
]
ARRIVALS = list(zip((0, 1, 3, 15, 15), REQUESTS, strict=True))


@pytest.fixture(scope="module")
def worker() -> ProcessTimeline:
    return steps_of(ARRIVALS)


def with_step(worker: ProcessTimeline, index: int, step: TimelineStep) -> ProcessTimeline:
    return replace(worker, steps=(*worker.steps[:index], step, *worker.steps[index + 1 :]))


def test_steps_of_the_same_scheduler_are_as_recorded(worker: ProcessTimeline) -> None:
    check = check_steps(worker, REQUESTS)
    assert (check.difference, check.stopped) == (None, "")
    assert check.checked == check.steps == len(worker.steps) > 20 and check.skipped == 0
    assert worker.worker_requests[3].cached_tokens == 32, "the prompt shares a prefix with an earlier one"


def test_steps_with_one_changed_step_name_it(worker: ProcessTimeline) -> None:
    step = worker.steps[17]
    check = check_steps(with_step(worker, 17, replace(step, answer_requests=step.answer_requests[1:])), REQUESTS)
    assert check.difference is not None and check.difference.step.number == 18 and check.checked == 17
    assert set(check.difference.planned.answers) == set(step.answer_requests)


def test_steps_by_a_changed_scheduler_differ(worker: ProcessTimeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_without_tail", lambda self, prompt, budget_tokens: min(7, budget_tokens))
    check = check_steps(worker, REQUESTS)
    assert check.difference is not None and check.difference.step.number == 1


def test_steps_begin_after_a_request_whose_start_is_missing(worker: ProcessTimeline) -> None:
    late = replace(worker, steps=worker.steps[2:])
    check = check_steps(late, REQUESTS)
    last = max(n for n, step in enumerate(late.steps) if {0, 1} & {*step.answer_requests, *step.prompts})
    assert check.difference is None and check.skipped > last


def test_steps_with_blocks_cached_before_the_record_are_as_recorded(worker: ProcessTimeline) -> None:
    alone = steps_of([(0, REQUESTS[1]), (6, REQUESTS[3])])
    second = next(n for n, step in enumerate(alone.steps) if SchedulerCall("add", 1) in step.calls)
    assert alone.worker_requests[1].cached_tokens == 32
    check = check_steps(replace(alone, steps=alone.steps[second:]), REQUESTS)
    assert check.difference is None and check.checked == len(alone.steps) - second


def test_steps_with_a_prefix_that_a_later_prompt_computes_first_are_as_recorded() -> None:
    long, short = (
        recorded_request("r-0", 70, 6, (*SHARED, *range(100, 109))),
        recorded_request("r-1", 40, 5, (*SHARED, 200, 201)),
    )
    worker = steps_of([(0, long), (0, short)], ttft_slo_s=3600.0)
    assert worker.steps[0].prompts.keys() == {1} and worker.worker_requests[0].cached_tokens == 32
    check = check_steps(worker, [long, short])
    assert (check.difference, check.checked) == (None, len(worker.steps))


def test_steps_begin_where_an_earlier_request_releases_its_blocks() -> None:
    two = steps_of([(0, REQUESTS[1]), (6, REQUESTS[3])])
    released = replace(two.steps[6], calls=(SchedulerCall("abort", 0), *two.steps[6].calls))
    check = check_steps(replace(two, steps=(released, *two.steps[7:])), REQUESTS)
    assert (check.difference, check.skipped, check.checked) == (None, 0, len(two.steps) - 6)


def test_steps_stop_at_a_request_with_several_choices(worker: ProcessTimeline) -> None:
    check = check_steps(worker, [*REQUESTS[:3], replace(REQUESTS[3], choices=2), REQUESTS[4]])
    assert check.checked == 15 and check.stopped.startswith("step 16: r-3 has 2 choices")


@pytest.mark.parametrize("setting", ["drafts", "launches_ahead", "windows", "whole_prompts"])
def test_steps_of_an_unsupported_worker_are_not_checked(worker: ProcessTimeline, setting: str) -> None:
    check = check_steps(replace(worker, scheduler={**worker.scheduler, setting: 1.0}), REQUESTS)
    assert (check.checked, check.difference) == (0, None) and check.stopped

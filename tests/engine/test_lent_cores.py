"""Cores that a decode worker lends while a prompt of a prefill worker would miss its TTFT objective."""

import queue
import threading
from pathlib import Path

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Computed, Objectives, Request
from baton.engine.runner.core_use import CoreUse, SpareCores
from baton.engine.runner.step_records import StepTiming
from baton.engine.runner.thread import EngineThread
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.budget import DELIVERY_SHARE, StepBudget
from baton.engine.scheduler.scheduler import Scheduler
from tests.engine.test_prompt_order import OWN_S, TBT_S, beside

TOKENS_PER_S, TTFT_S, GAIN = 500.0, 2.0, 0.75
WAIT_S = 10.0


def test_next_step_of_answers_may_wait_as_long_as_their_objective_leaves() -> None:
    clock = beside()
    clock.step()
    spare_s = clock.scheduler.spare_s(clock.now_s)
    assert 0.5 * TBT_S - OWN_S < spare_s < (1.0 - DELIVERY_SHARE) * TBT_S - OWN_S
    assert clock.scheduler.spare_s(clock.now_s + 0.005) == pytest.approx(spare_s - 0.005)
    assert clock.scheduler.spare_s(clock.now_s + 1.0) == 0.0


def test_step_with_a_prompt_or_a_new_answer_does_not_wait() -> None:
    with_prompt, with_answer = beside(), beside()
    for clock in (with_prompt, with_answer):
        clock.step()
    with_prompt.add(64)
    with_answer.answer(received_s=with_answer.now_s)
    assert with_prompt.scheduler.spare_s(with_prompt.now_s) == with_answer.scheduler.spare_s(with_answer.now_s) == 0.0


def test_first_step_after_a_time_without_answers_does_not_wait() -> None:
    clock = beside()
    clock.step()
    clock.scheduler.abort(1)
    clock.now_s += 1.0
    clock.answer()
    assert clock.scheduler.spare_s(clock.now_s) == 0.0


def test_strict_scheduler_lends_no_cores() -> None:
    clock = beside(tbt_s=0.0)
    clock.step()
    assert clock.scheduler.spare_s(clock.now_s) == 0.0


def test_step_after_lending_takes_what_the_wait_leaves_of_the_objective() -> None:
    clock = beside()
    for waited_s in (0.0, 0.020):
        clock.step()
        prompt = clock.add(512, ttft_s=1.0)
        clock.now_s += waited_s
        _, duration_s = clock.step()
        assert waited_s + duration_s <= TBT_S
        clock.scheduler.abort(prompt)


class Borrower:
    """Scheduler of a prefill worker, which is faster by `true_gain` while it wants the cores of another worker."""

    def __init__(self, gain: float = GAIN, true_gain: float = GAIN) -> None:
        self.now_s, self.true_gain = 0.0, true_gain
        self.scheduler = Scheduler(BlockPool(4096), 16, 256, 0, StepBudget(), lent_gain=gain)
        self.add(1, 512, ttft_s=None)
        while self.step() is not None:
            pass

    def add(self, number: int, tokens: int, ttft_s: float | None = TTFT_S) -> None:
        objectives = Objectives() if ttft_s is None else Objectives(self.now_s + ttft_s, TBT_S, ttft_s)
        request = Request(
            number, (1,) * tokens, SamplingParams(max_tokens=1), (), prefill_only=True, objectives=objectives
        )
        self.scheduler.add(request)

    def step(self) -> bool | None:
        """Compute a step; return whether it wanted the cores, None if there was nothing to compute."""
        plan = self.scheduler.plan(self.now_s)
        if plan is None:
            return None
        wanted = self.scheduler.wants_cores
        duration_s = plan.prompt_tokens / TOKENS_PER_S / (1.0 + self.true_gain * wanted)
        self.now_s += duration_s
        self.scheduler.observe(plan, duration_s)
        self.scheduler.commit(plan, [Computed() for _ in plan.chunks])
        return wanted

    def run(self) -> list[bool]:
        found: list[bool] = []
        while (wanted := self.step()) is not None:
            found.append(wanted)
        return found


def test_prompt_that_own_cores_complete_in_time_wants_no_others() -> None:
    borrower = Borrower()
    borrower.add(2, 400)
    assert not any(borrower.run())


def test_prompt_that_needs_other_cores_is_on_time_with_them() -> None:
    borrower = Borrower()
    borrower.add(2, 1_400)  # 2.8 s on its own cores, 1.6 s with the others
    wanted = borrower.run()
    assert wanted[0] and borrower.now_s < 1.024 + TTFT_S
    assert not borrower.scheduler.wants_cores


def test_prompt_that_other_cores_help_less_than_assumed_keeps_them_while_it_can_be_on_time() -> None:
    borrower = Borrower(true_gain=0.5)
    borrower.add(2, 1_400)  # 1.87 s with the others
    assert all(borrower.run()[:-1]) and borrower.now_s < 1.024 + TTFT_S


def test_prompt_that_cannot_be_on_time_wants_no_cores() -> None:
    borrower = Borrower()
    borrower.add(2, 4_000)
    assert not borrower.step()


def test_worker_without_cores_to_borrow_wants_none() -> None:
    borrower = Borrower(gain=0.0)
    borrower.add(2, 1_400)
    assert not any(borrower.run())


class Answers:
    """Engine of one answer whose next step may wait until `released`."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.left = 0
        self.asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self, steps: int) -> None:
        self.left = steps

    def step(self) -> list[int] | None:
        if not self.left:
            return None
        self.left -= 1
        return [self.left]

    def spare_s(self) -> float:
        self.asked.put(None)
        return 0.0 if self.released.is_set() else WAIT_S


def test_thread_lends_its_cores_while_the_next_step_can_wait(tmp_path: Path) -> None:
    cores, spare = CoreUse(tmp_path / "decode-0"), SpareCores.of(frozenset({0}), tmp_path / "decode-0")
    answers, ended = Answers(), threading.Event()
    lent_s: list[float] = []

    def on_step(outcomes: object, timing: StepTiming) -> None:
        lent_s.append(thread.lent_s)
        if len(lent_s) == 2:
            ended.set()

    thread: EngineThread[int, None] = EngineThread(
        answers, on_step, lambda fault: None, lambda: None, cores=cores, spare_s=answers.spare_s
    )
    spare.want(True)
    thread.start()
    thread.call(answers.start, 2).result(WAIT_S)
    answers.asked.get(timeout=WAIT_S)
    in_use = thread.call(lambda: int(spare.in_use[0])).result(WAIT_S)  # calls are executed in the meantime
    assert (in_use, len(lent_s)) == (0, 0)
    thread.call(answers.released.set).result(WAIT_S)
    assert ended.wait(WAIT_S)
    assert thread.stop(WAIT_S)
    assert lent_s[0] > 0.0 == lent_s[1]

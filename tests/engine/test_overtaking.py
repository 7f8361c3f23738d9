"""Who goes first while a block that a waiting prompt needs is being computed: on a prefill worker and on others."""

from dataclasses import dataclass
from functools import partial

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.scheduler.batch import LOOKAHEAD, admitted
from baton.engine.scheduler.scheduler import Scheduler
from tests.engine.test_shared_prefixes import compute, spans
from tests.engine.test_shared_prefixes import prompt as shared_prompt

BLOCK = 4


def mixed(chunk_tokens: int) -> Scheduler:
    return Scheduler(BlockPool(64), BLOCK, max_step_tokens=chunk_tokens, max_sequences=8)


@dataclass
class Waiter:
    name: str
    size_tokens: int
    coming: bool = False
    admitted_before: int = 0
    table: None = None

    @property
    def token_ids(self) -> range:
        return range(self.size_tokens)


class Line:
    """Prompts that wait, and room for so many tokens."""

    def __init__(self, *waiting: Waiter, room_tokens: int = 1 << 30) -> None:
        self.waiting = list(waiting)
        self._room_tokens = room_tokens

    def admit(self, waiter: Waiter) -> bool:
        if waiter.size_tokens > self._room_tokens:
            return False
        self._room_tokens -= waiter.size_tokens
        self.waiting.remove(waiter)
        return True

    def step(self) -> list[str]:
        return [waiter.name for waiter in admitted(list(self.waiting), lambda waiter: waiter.coming, self.admit)]


def test_admission_lets_others_overtake_up_to_the_size_of_the_waiting_prompt() -> None:
    waits = Waiter("waits", 10, coming=True)
    line = Line(waits, Waiter("a", 6), Waiter("b", 6), Waiter("c", 1))
    assert line.step() == ["a", "b"], "the bound is looked at before each"
    assert line.step() == []
    waits.coming = False
    assert line.step() == ["waits", "c"]


def test_admission_counts_tokens_that_overtook_in_earlier_steps() -> None:
    waits = Waiter("waits", 10, coming=True)
    line = Line(waits)
    went = 0
    for number in range(100):
        line.waiting.append(Waiter(str(number), 3))
        went += len(line.step())
    assert went == 4


def test_admission_lets_nobody_overtake_a_prompt_without_capacity() -> None:
    line = Line(Waiter("coming", 9, coming=True), Waiter("large", 9), Waiter("small", 1), room_tokens=5)
    assert line.step() == []


def test_admission_inspects_a_bounded_number_of_prompts() -> None:
    coming = [Waiter(str(number), 10, coming=True) for number in range(LOOKAHEAD + 1)]
    assert Line(*coming, Waiter("last", 1)).step() == []
    assert Line(*coming[1:], Waiter("last", 1)).step() == ["last"]


@pytest.mark.parametrize("prefill_only", [True, False])
def test_scheduler_skips_a_prompt_awaiting_a_block(prefill_only: bool) -> None:
    scheduler = mixed(64)
    prompt = partial(shared_prompt, prefill_only=prefill_only)
    scheduler.add(prompt(1, shared_blocks=4, own_tokens=3))
    scheduler.add(prompt(2, shared_blocks=4, own_tokens=5))
    scheduler.add(prompt(3, shared_blocks=0, own_tokens=6))
    plan = scheduler.plan()
    assert spans(plan) == [(1, 0, 19), (3, 0, 6)]
    compute(scheduler, plan)
    assert (2, 16, 21) in spans(scheduler.plan())


@pytest.mark.parametrize("prefill_only", [True, False])
def test_scheduler_lets_a_prompt_be_overtaken_by_at_most_its_size(prefill_only: bool) -> None:
    scheduler = mixed(40)
    prompt = partial(shared_prompt, prefill_only=prefill_only)
    scheduler.add(prompt(1, shared_blocks=4, own_tokens=40))
    compute(scheduler, scheduler.plan())
    scheduler.add(prompt(2, shared_blocks=1, own_tokens=3))
    for number in range(3, 9):
        scheduler.add(prompt(number, shared_blocks=0, own_tokens=4))
    assert spans(scheduler.plan()) == [(1, 40, 56), (3, 0, 4), (4, 0, 4)], "7 tokens wait, 8 go first"

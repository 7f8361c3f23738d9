"""Order of prompts by TTFT objectives, and steps that an urgent prompt lengthens, on a virtual clock."""

import math
import random
from dataclasses import dataclass, field

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import NO_OBJECTIVES, Computed, Drawn, FirstToken, Objectives, Plan, Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.budget import MIN_ALONE_TOKENS, PROMISED_SHARE, StepBudget
from baton.engine.scheduler.prompt_order import MIN_PATIENCE_TOKENS, PATIENCE
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import PromptComputed

TTFT_S, TBT_S = 2.0, 0.050
OWN_S, TOKEN_S = 0.020, 0.002  # a step of answers; one prompt token more
WORLDS = 6  # thousands were tried when this was written


@dataclass
class Clock:
    """A scheduler on a device whose steps take OWN_S if there are answers, and TOKEN_S for each prompt token."""

    tbt_s: float = TBT_S
    noise: float = 0.0
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    now_s: float = 0.0
    made: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(BlockPool(4096), 16, 512, 64, StepBudget(), tbt_s=self.tbt_s)
        self.ends: dict[int, float] = {}  # by request id: when its prompt was complete
        self.due: dict[int, float] = {}

    def add(
        self, tokens: int, ttft_s: float | None = TTFT_S, max_tokens: int = 1, time_left_s: float = math.inf
    ) -> int:
        """Add a prompt that arrives now. `ttft_s` None: it has no objective. `time_left_s`: time until its deadline."""
        self.made += 1
        of_request = NO_OBJECTIVES
        if ttft_s is not None:
            self.due[self.made] = self.now_s + ttft_s
            of_request = Objectives(self.now_s + ttft_s, TBT_S, ttft_s, self.now_s + time_left_s)
        params = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(Request(self.made, (1,) * tokens, params, (), objectives=of_request))
        return self.made

    def answer(self, tokens: int = 10_000, received_s: float = math.inf) -> None:
        """Add an answer whose prompt was computed elsewhere, and whose KV was received at `received_s`."""
        self.made += 1
        request = Request(self.made, (1,), SamplingParams(max_tokens=tokens), (), objectives=Objectives(tbt_s=TBT_S))
        assert self.scheduler.reserve(request) is not None
        self.scheduler.activate(self.made, [FirstToken(0, 1, 0.0, end=None)], received_s)

    def step(self) -> tuple[Plan, float]:
        """Compute a step; return it and its duration without noise."""
        plan = self.scheduler.plan(self.now_s)
        assert plan is not None
        answers = plan.tokens - plan.prompt_tokens
        duration_s = OWN_S * bool(answers) + TOKEN_S * plan.prompt_tokens
        measured_s = duration_s * self.draw.uniform(1.0 - self.noise, 1.0 + self.noise)
        self.now_s += measured_s
        self.scheduler.observe(plan, measured_s)
        drawn = [Computed(tuple(Drawn(1, 0.0) for _ in chunk.samples)) for chunk in plan.chunks]
        for outcome in self.scheduler.commit(plan, drawn):
            if isinstance(outcome, PromptComputed) and outcome.ended:
                self.ends[outcome.request_id] = self.now_s
        return plan, duration_s

    def learn(self) -> "Clock":
        """Compute prompts beside the answers until the costs of steps are known."""
        self.scheduler.add(Request(10**6, (1,) * 4096, SamplingParams(max_tokens=1), ()))
        for _ in range(150):
            self.step()
        self.scheduler.abort(10**6)
        return self

    def run(self, *prompts: int) -> list[int]:
        """Compute until these prompts are complete; return them in the order in which they were."""
        while not set(prompts) <= self.ends.keys():
            self.step()
        return sorted(prompts, key=self.ends.__getitem__)

    @property
    def met(self) -> int:
        return sum(end_s <= self.due[number] for number, end_s in self.ends.items() if number in self.due)


def alone() -> Clock:
    """Return a device without answers whose rate, 500 tokens per second, is known."""
    clock = Clock()
    clock.run(clock.add(512, ttft_s=None))
    return clock


def beside(**options: float) -> Clock:
    clock = Clock(**options)
    clock.answer()
    return clock.learn()


def test_short_prompt_goes_before_a_long_one_that_has_time() -> None:
    clock = alone()
    long, short = clock.add(600), clock.add(100)
    assert clock.run(long, short) == [short, long]
    assert clock.met == 2


def test_first_token_of_a_completed_prompt_waits_for_few_tokens_of_others() -> None:
    clock = alone()
    clock.add(120)
    clock.add(600)
    assert clock.step()[0].prompt_tokens == 120 + TBT_S / TOKEN_S


def test_step_that_completes_a_very_short_prompt_is_not_too_small() -> None:
    clock = alone()
    clock.add(10)
    clock.add(600)
    assert clock.step()[0].prompt_tokens == MIN_ALONE_TOKENS


def test_short_prompt_waits_for_a_long_one_that_has_no_time() -> None:
    clock = alone()
    long, short = clock.add(600, ttft_s=1.35), clock.add(100)
    assert clock.run(long, short) == [long, short]
    assert clock.met == 2


def test_prompt_that_was_given_up_is_computed_though_others_never_cease() -> None:
    clock = alone()
    long, tokens, step_tokens = clock.add(1500), 0, 512
    while long not in clock.ends:
        for _ in range(3):
            clock.add(100)
        tokens += clock.step()[0].prompt_tokens
        assert tokens <= (PATIENCE + 1) * 1500 + 2 * step_tokens
    assert tokens > 2 * 1500, "others went before it"


def test_prompt_that_cannot_be_on_time_takes_no_other_ones_time() -> None:
    clock = alone()
    hopeless, others = clock.add(3000), [clock.add(150) for _ in range(4)]
    assert clock.run(hopeless, *others)[-1] == hopeless
    assert clock.met == 4


def test_prompts_without_objectives_are_computed_by_arrival() -> None:
    clock = alone()
    long, short = clock.add(600, ttft_s=None), clock.add(100, ttft_s=None)
    assert clock.run(long, short) == [long, short]


def test_prompt_with_time_takes_the_free_part_of_steps_only() -> None:
    clock = beside()
    clock.add(60, ttft_s=60.0)
    for _ in range(20):
        plan, duration_s = clock.step()
        assert duration_s <= max(OWN_S * (1 + PROMISED_SHARE), OWN_S + TOKEN_S), plan.prompt_tokens


def test_prompt_that_would_miss_takes_what_the_objective_of_answers_leaves() -> None:
    clock = beside()
    prompt = clock.add(350)
    durations = []
    while prompt not in clock.ends:
        durations.append(clock.step()[1])
    assert clock.met == 1
    assert TBT_S * 0.75 <= max(durations) <= TBT_S


def test_late_prompt_takes_the_free_part_of_steps_until_its_next_objective_is_near() -> None:
    clock = beside()
    clock.add(4000)
    arrived_s = clock.now_s
    while clock.now_s < arrived_s + 8 * TTFT_S - TBT_S:
        assert clock.step()[1] <= OWN_S + TOKEN_S
    while clock.now_s < 60.0 and clock.step()[1] <= OWN_S + TOKEN_S:
        pass
    assert clock.now_s < 60.0, "it was never urgent again"


def test_late_prompt_of_which_half_is_computed_is_completed_first() -> None:
    clock = beside()
    prompt, computed = clock.add(600), 0
    while computed < 350:
        computed += clock.step()[0].prompt_tokens
    clock.now_s += 1.9  # another program took the core: it cannot be on time any more
    durations = []
    while prompt not in clock.ends:
        durations.append(clock.step()[1])
    assert clock.met == 0 and min(durations[1:6]) > OWN_S + 4 * TOKEN_S


def test_late_prompt_takes_what_the_objective_of_answers_leaves_to_be_complete_before_its_deadline() -> None:
    clock = beside()
    arrived_s, prompt = clock.now_s, clock.add(4000, time_left_s=22.0)
    durations = []
    while prompt not in clock.ends:
        durations.append(clock.step()[1])
    assert clock.ends[prompt] < arrived_s + 22.0
    assert TBT_S * 0.75 <= max(durations) <= TBT_S


def test_prompt_that_cannot_be_complete_before_its_deadline_takes_the_free_part_of_steps() -> None:
    clock = beside()
    clock.add(4000, time_left_s=5.0)
    arrived_s = clock.now_s
    while clock.now_s < arrived_s + 5.0:
        assert clock.step()[1] <= OWN_S + TOKEN_S


def test_strict_scheduler_keeps_the_free_part_for_all_prompts() -> None:
    clock = beside(tbt_s=0.0)
    prompt = clock.add(400)
    while prompt not in clock.ends:
        assert clock.step()[1] <= OWN_S + TOKEN_S


def test_step_after_an_answer_is_received_takes_what_its_wait_leaves_of_the_objective() -> None:
    waited_s = 0.015
    clock = beside()
    for _ in range(3):
        clock.answer(tokens=20)
    for _ in range(25):  # learn steps of more answers, too
        clock.step()
    clock.add(1000)
    clock.add(1000)
    while clock.step()[1] < 0.7 * TBT_S:  # until the prompts are urgent
        continue
    clock.answer(received_s=clock.now_s - waited_s)
    assert OWN_S < clock.step()[1] <= TBT_S - waited_s
    assert clock.step()[1] > 0.7 * TBT_S
    clock.answer(received_s=clock.now_s - TBT_S)
    assert clock.step()[1] <= (1.0 + PROMISED_SHARE) * OWN_S


def test_strictest_objective_of_the_answers_counts() -> None:
    clock = beside()
    clock.made += 1
    strict = Request(clock.made, (1,), SamplingParams(max_tokens=900), (), objectives=Objectives(tbt_s=0.030))
    assert clock.scheduler.reserve(strict) is not None
    clock.scheduler.activate(clock.made, [FirstToken(0, 1, 0.0, end=None)])
    for _ in range(50):
        clock.step()
    clock.add(500)
    assert max(clock.step()[1] for _ in range(30)) <= 0.030


@pytest.mark.parametrize("world", range(WORLDS))
def test_no_step_takes_longer_than_the_objective_and_no_prompt_starves(world: int) -> None:
    """Prompts arrive at random, up to twice what the device can compute; answers run at all times."""
    draw = random.Random(world)
    clock = beside(noise=0.03)
    clock.draw = draw
    arrivals_s, rate = clock.now_s, draw.uniform(0.3, 2.0)
    ahead: dict[int, tuple[int, int]] = {}  # by prompt: tokens pending at its arrival, and its own
    computed = 0
    began: dict[int, int] = {}
    while clock.made < 40:
        while arrivals_s <= clock.now_s:
            tokens = draw.choice([30, 100, 200, 600])
            pending = clock.scheduler.batch.pending_tokens
            number = clock.add(tokens)
            ahead[number], began[number] = (pending, tokens), computed
            arrivals_s += draw.expovariate(rate)
        before = set(clock.ends)
        plan, duration_s = clock.step()
        computed += plan.prompt_tokens
        assert duration_s <= TBT_S * 1.05
        for number in (clock.ends.keys() - before) & ahead.keys():
            tokens_ahead, own = ahead[number]
            waited = computed - began[number]
            assert waited <= tokens_ahead + own + (PATIENCE + 1) * max(own, MIN_PATIENCE_TOKENS) + 1200


@pytest.mark.parametrize("world", range(WORLDS))
def test_more_prompts_are_on_time_than_by_arrival(world: int) -> None:
    def met(ttft_s: float | None) -> int:
        draw, clock = random.Random(world), alone()
        number_due: dict[int, float] = {}
        arrival_s = clock.now_s
        while clock.made < 80:
            tokens, gap_s = draw.choice([60, 150, 600]), draw.expovariate(2.2)
            while clock.now_s < arrival_s:
                if not clock.scheduler.has_work:
                    clock.now_s = arrival_s
                    break
                clock.step()
            number_due[clock.add(tokens, ttft_s)] = arrival_s + TTFT_S
            arrival_s += gap_s
        while clock.scheduler.has_work:
            clock.step()
        return sum(clock.ends[number] <= due_s for number, due_s in number_due.items())

    assert met(TTFT_S) >= met(None)

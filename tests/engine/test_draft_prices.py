"""Drafts that cost passes of a model: how many are worth it, on simulated devices, and what catching up may take."""

import random
from collections.abc import Sequence

import pytest

from baton.engine.scheduler.budget import StepBudget
from baton.engine.scheduler.drafts import AnswerSoFar, CostlyDrafter, Offer
from baton.engine.scheduler.speculation import CATCH_UP_SHARE, SequenceDrafts, Speculation, drafting_s
from tests.fixtures.growing_answer import GrowingAnswer

STEPS, MOST, ROWS = 400, 8, 64
OWN_S = 0.010  # of a step without drafts: weights are read once, whatever the rows


class Answer(GrowingAnswer):
    def __init__(self, behind_tokens: int = 0) -> None:
        super().__init__([1])
        self.drafts = SequenceDrafts()
        self.behind_tokens = behind_tokens


class Passes:
    """A model, a pass of which takes a given share of a step of the larger one, whatever its tokens."""

    def __init__(self, share: float, answers: Sequence[Answer], token_s: float = 0.0) -> None:
        self.pass_s, self.token_s = share * OWN_S, token_s
        self.begin_s = 0.0
        self.answers = answers
        self.spent_s = self.caught_up_s = 0.0
        self.asked_for: list[int] = []

    def offers(self, answers: Sequence[AnswerSoFar], most: Sequence[int]) -> list[Offer]:
        return [Offer(count, each.behind_tokens == 0) for each, count in zip(self.answers, most, strict=True)]

    def seconds(self, tokens: int) -> float:
        return self.pass_s + self.token_s * tokens

    @property
    def least_room_s(self) -> float:
        return self.seconds(8)

    def catch_up(self, answers: Sequence[AnswerSoFar], room_s: float) -> float:
        [tokens] = [count for count in range(64, -1, -1) if count == 0 or self.seconds(count) <= room_s][:1]
        first = next(each for each in self.answers if each is answers[0])
        assert first.behind_tokens > 0, "it is known"
        first.behind_tokens = max(0, first.behind_tokens - tokens)
        self.caught_up_s = self.seconds(tokens) if tokens else 0.0
        return self.caught_up_s

    def drafts_of(self, answers: Sequence[AnswerSoFar], most: Sequence[int]) -> list[list[int]]:
        self.asked_for = list(most)
        self.spent_s = sum(self.seconds(sum(count > place for count in most)) for place in range(max(most)))
        return [[0] * count for count in most]

    def forget(self, answer: AnswerSoFar) -> None:
        pass


class Device:
    """Steps of as many answers as there are chances of a draft to be right."""

    def __init__(
        self,
        chances: Sequence[float],
        share: float,
        behind_tokens: int = 0,
        row_s: float = 0.0,
        target_s: float | None = None,
        token_s: float = 0.0,
    ) -> None:
        self.answers = [Answer(behind_tokens) for _ in chances]
        self.chances, self.row_s = chances, row_s
        self.passes = Passes(share, self.answers, token_s)
        self.speculation = Speculation(MOST, target_s, self.passes)
        self.steps_s: list[float] = []
        self.tokens, self.drafted = 0, 0
        self._draw = random.Random(1)

    def step(self) -> None:
        count = len(self.answers)
        self.passes.spent_s = self.passes.caught_up_s = 0.0
        candidates = self.speculation.candidates(self.answers, [MOST] * count, ROWS)
        lengths = self.speculation.lengths(count, candidates, ROWS)
        rows = count + sum(lengths)
        seconds = OWN_S + self.row_s * rows
        self.speculation.observe(rows, seconds)
        self.steps_s.append(seconds + self.passes.spent_s + self.passes.caught_up_s)
        self.tokens += count
        self.drafted += sum(lengths)
        for answer, length, chance in zip(self.answers, lengths, self.chances, strict=True):
            right = 0
            while right < length and self._draw.random() < chance:
                right += 1
            self.tokens += right
            if length:
                self.speculation.judge(answer.drafts, length, right)

    def run(self, steps: int = STEPS) -> "Device":
        for _ in range(steps):
            self.step()
        return self

    @property
    def gain(self) -> float:
        """Tokens per second, as a multiple of those without drafts."""
        own_s = OWN_S + self.row_s * len(self.answers)
        return self.tokens / sum(self.steps_s) * own_s / len(self.answers)


def test_drafter_with_passes_is_distinguished_from_one_without() -> None:
    assert isinstance(Passes(0.1, []), CostlyDrafter)


@pytest.mark.parametrize(("share", "gain"), [(0.02, 3.0), (0.1, 1.9), (0.25, 1.3)])
def test_cheap_and_mostly_right_model_pays(share: float, gain: float) -> None:
    assert Device([0.8] * 4, share).run().gain >= gain


@pytest.mark.parametrize("chances", [[0.8], [0.8] * 4, [0.3] * 4, [1.0]])
def test_model_as_slow_as_the_larger_one_drafts_nothing(chances: list[float]) -> None:
    device = Device(chances, share=1.0).run()
    assert device.drafted == 0
    assert device.gain == pytest.approx(1.0)


def test_never_right_model_costs_next_to_nothing() -> None:
    assert Device([0.0] * 4, share=0.1).run(2000).gain >= 0.98


def test_dearer_model_drafts_fewer_tokens() -> None:
    cheap, dear = Device([0.8], share=0.02).run(), Device([0.8], share=0.2).run()
    assert cheap.drafted > 1.5 * dear.drafted > 0


def test_price_counts_a_pass_once_for_all_answers_of_a_step() -> None:
    passes = Passes(1.0 / OWN_S, [], token_s=0.1)
    assert drafting_s([0, 0, 1, 0], passes) == pytest.approx([0.0, 1.1, 1.2, 2.3, 2.4])


def test_extra_time_of_the_first_pass_counts_once_and_only_with_drafts() -> None:
    passes = Passes(1.0 / OWN_S, [], token_s=0.1)
    passes.begin_s = 5.0
    assert drafting_s([0, 0, 1], passes) == pytest.approx([0.0, 6.1, 6.2, 7.3])


def test_no_step_is_longer_than_a_given_target() -> None:
    device = Device([0.9] * 2, share=0.15, behind_tokens=200, row_s=0.0005, target_s=0.020, token_s=0.0001).run()
    assert device.drafted > 0
    assert max(device.steps_s) <= 0.020


def test_nothing_is_drafted_where_a_step_takes_the_whole_target() -> None:
    device = Device([1.0], share=0.1, behind_tokens=20, target_s=1.05 * OWN_S).run()
    assert device.drafted == 0
    assert max(device.steps_s) <= 1.05 * OWN_S


def test_catching_up_makes_no_step_longer_than_its_share() -> None:
    device = Device([0.9], share=0.05, behind_tokens=1000, token_s=0.0002)
    while device.answers[0].behind_tokens:
        device.step()
    assert max(device.steps_s) <= (1.0 + CATCH_UP_SHARE) * OWN_S
    assert len(device.steps_s) > 10
    device.run(50)
    assert device.drafted > 0


def test_answer_is_caught_up_with_where_a_pass_takes_more_than_the_share() -> None:
    device = Device([0.9], share=0.2, behind_tokens=100, token_s=0.0004)
    device.run(100 // 8 + 2)
    assert device.answers[0].behind_tokens == 0


def test_others_go_on_drafting_while_one_catches_up() -> None:
    device = Device([0.9] * 3, share=0.05, token_s=0.0005)
    device.run(20)
    device.answers[2].behind_tokens = 500
    before = device.drafted
    device.run(5)
    assert device.answers[2].behind_tokens > 0
    assert device.passes.asked_for[2] == 0
    assert device.drafted > before


def test_unprofitable_drafts_cause_no_catching_up() -> None:
    device = Device([0.9], share=1.0, behind_tokens=100).run()
    assert device.answers[0].behind_tokens == 100


def test_prompts_get_the_target_time_left_by_drafting() -> None:
    def prompt_tokens(beside_s: float) -> int:
        budget = StepBudget()
        for step in range(200):
            tokens = 0 if step % 4 == 0 else 100
            budget.observe(4, tokens, 0.010 + 0.0002 * tokens)
        return budget.prompt_tokens(4, 512, beside_s, target_s=0.040)

    assert prompt_tokens(0.0) > prompt_tokens(0.010) > prompt_tokens(0.020)

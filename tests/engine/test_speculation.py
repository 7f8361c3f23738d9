"""How many drafts a step computes, on simulated devices: tokens per second against those without any."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Chunk, Plan, Sample
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.budget import PROMISED_SHARE
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.speculation import DraftCandidate, RowCost, SequenceDrafts, Speculation

STEPS, MOST = 600, 8

Cost = Callable[[int], float]
"""Seconds of a step, by its rows."""


def memory_bound(rows: int) -> float:
    """Weights are read once, whatever the rows."""
    return 0.010 + 0.0005 * rows


def compute_bound(rows: int) -> float:
    return 0.002 * rows


def stairs(rows: int) -> float:
    """Rows are computed by fours."""
    return 0.004 * -(-rows // 4)


class Device:
    """Runs steps; every answer's drafts are right with a chance of its own. None: that answer has no drafts."""

    def __init__(self, cost: Cost, chances: Sequence[float | None], noise: float = 0.02, seed: int = 1) -> None:
        self.cost, self.chances = cost, chances
        self._draw, self._noise = random.Random(seed), noise
        self.speculation = Speculation(MOST)
        self.rows: list[int] = []
        self.tokens, self.seconds = 0, 0.0

    def run(self, steps: int = STEPS, most_rows: int = 64) -> None:
        of_each = [SequenceDrafts() for _ in self.chances]
        for _ in range(steps):
            self._step(of_each, most_rows)

    def _step(self, of_each: Sequence[SequenceDrafts], most_rows: int) -> None:
        drafts = [[] if chance is None else [0] * MOST for chance in self.chances]
        candidates = [DraftCandidate(*pair) for pair in zip(of_each, drafts, strict=True)]
        lengths = self.speculation.lengths(len(candidates), candidates, most_rows)
        rows = len(candidates) + sum(lengths)
        seconds = self.cost(rows) * self._draw.gauss(1.0, self._noise)
        self.speculation.observe(rows, seconds)
        self.rows.append(rows)
        self.seconds += seconds
        self.tokens += len(candidates)
        for each, length, chance in zip(of_each, lengths, self.chances, strict=True):
            right = 0
            while right < length and chance is not None and self._draw.random() < chance:
                right += 1
            self.tokens += right
            if length:
                self.speculation.judge(each, length, right)

    @property
    def gain(self) -> float:
        """Tokens per second, as a multiple of those without drafts."""
        return (self.tokens / self.seconds) / (len(self.chances) / self.cost(len(self.chances)))


@pytest.mark.parametrize("cost", [memory_bound, compute_bound, stairs])
@pytest.mark.parametrize("answers", [1, 4, 16])
def test_drafts_that_are_never_right_cost_next_to_nothing(cost: Cost, answers: int) -> None:
    device = Device(cost, [0.0] * answers)
    device.run()
    assert device.gain >= 0.98


@pytest.mark.parametrize(("answers", "gain"), [(1, 2.5), (4, 1.8), (16, 1.15)])
def test_drafts_that_are_mostly_right_pay_where_rows_are_cheap(answers: int, gain: float) -> None:
    device = Device(memory_bound, [0.8] * answers)
    device.run()
    assert device.gain >= gain


@pytest.mark.parametrize("chance", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("answers", [1, 4, 16])
def test_nothing_is_lost_where_rows_cost_their_full_price(answers: int, chance: float) -> None:
    device = Device(compute_bound, [chance] * answers)
    device.run()
    assert device.gain >= 0.97


def test_best_number_of_rows_is_found_where_rows_are_computed_by_fours() -> None:
    device = Device(stairs, [0.9])
    device.run()
    assert device.gain >= 1.9
    assert max(set(device.rows[-100:]), key=device.rows[-100:].count) % 4 == 0


def test_undrafted_answer_waits_little_for_drafts_of_others() -> None:
    device = Device(memory_bound, [1.0, None, None, None])
    device.run()
    settled = device.rows[50:]
    longest_s = (1 + PROMISED_SHARE) * memory_bound(4)
    longer = sum(memory_bound(rows) > 1.03 * longest_s for rows in settled)
    assert longer <= 0.02 * len(settled), "but for steps that were not measured lately"
    assert max(settled) > 4


def test_answers_with_accepted_drafts_get_more_rows() -> None:
    speculation = Speculation(MOST)
    for _ in range(20):
        for rows in range(1, 20):
            speculation.observe(rows, 0.010 + 0.001 * rows)
    right, wrong = SequenceDrafts(), SequenceDrafts()
    for _ in range(20):
        speculation.judge(right, 4, 4)
        speculation.judge(wrong, 4, 0)
    first, second = speculation.lengths(2, [DraftCandidate(right, [0] * 8), DraftCandidate(wrong, [0] * 8)], 64)
    assert first >= 4 > second


def test_rows_never_exceed_the_limit() -> None:
    device = Device(memory_bound, [1.0] * 4)
    device.run(most_rows=6)
    assert max(device.rows) == 6


@pytest.mark.parametrize("chance", [0.6, 1.0])
def test_first_measurement_that_was_disturbed_does_not_end_drafts_for_long(chance: float) -> None:
    device = Device(memory_bound, [chance])
    device.run(1)
    device.cost = lambda rows: 5 * memory_bound(rows) if rows > 1 else memory_bound(rows)
    device.run(2)
    device.cost = memory_bound
    begun = len(device.rows)
    device.run(200)
    assert max(device.rows[begun : begun + 10]) == 1, "it was taken for the price"
    assert min(device.rows[begun + 150 :]) > 1


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-4, 1.0)), min_size=1, max_size=40))
def test_more_rows_are_never_expected_sooner(measured: list[tuple[int, float]]) -> None:
    """A first step without drafts that was disturbed made a draft seem free, right or not."""
    cost = RowCost()
    for rows, seconds in measured:
        cost.observe(rows, seconds)
    expected = [cost.expected_s(rows) or 0.0 for rows in range(1, 80)]
    assert all(more >= less * (1 - 1e-9) > 0 for less, more in pairwise(expected))


def test_step_is_measured_before_anything_is_drafted() -> None:
    speculation = Speculation(MOST)
    assert speculation.lengths(1, [DraftCandidate(SequenceDrafts(), [0] * 8)], 64) == [0]


def test_drafts_are_tried_again_after_a_while() -> None:
    device = Device(memory_bound, [0.0])
    device.run()
    device.chances = [1.0]
    begun = len(device.rows)
    device.run()
    assert max(device.rows[begun:]) == 1 + MOST


def test_steps_with_drafts_keep_a_given_target() -> None:
    speculation = Speculation(MOST, target_s=0.012)
    for _ in range(10):
        for rows in range(1, 10):
            speculation.observe(rows, memory_bound(rows))
    drafts = SequenceDrafts()
    for _ in range(50):
        speculation.judge(drafts, 8, 8)
    [length] = speculation.lengths(1, [DraftCandidate(drafts, [0] * 8)], 64)
    assert memory_bound(1 + length) <= 0.012 < memory_bound(2 + length)


def test_drafted_and_accepted_tokens_are_counted_by_position() -> None:
    speculation = Speculation(MOST)
    drafts = SequenceDrafts()
    for drafted, right in ((3, 2), (1, 0), (2, 2)):
        speculation.judge(drafts, drafted, right)
    counters = speculation.done
    assert (counters.drafts, counters.drafted_tokens, counters.accepted_tokens) == (3, 6, 4)
    assert counters.accepted_by_position == (2, 2)


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("answers", [1, 4])
def test_saved_time_approximates_the_time_without_drafts(answers: int, chance: float) -> None:
    """Where no step goes without drafts any more, the time of one is no longer measured: hence a tenth."""
    device = Device(memory_bound, [chance] * answers)
    device.run()
    plain_s = device.tokens * memory_bound(answers)
    done = device.speculation.done
    assert done.gained_s - done.lost_s == pytest.approx(plain_s - answers * device.seconds, abs=0.1 * plain_s)
    assert done.lost_s > 0.0, "drafts were tried"


def test_step_without_drafts_costs_nothing_more() -> None:
    speculation = Speculation(MOST)
    speculation.observe(1, 0.010)
    speculation.lengths(1, [DraftCandidate(SequenceDrafts(), [])], 64)
    assert (speculation.prices.longer_s, speculation.done.lost_s) == (0.0, 0.0)


REPLAYED_S, COMPUTED_S = 0.004, 0.010


def replaying() -> Speculation:
    """On a device that replays steps without drafts and computes those with, at two speeds whatever the rows."""
    speculation = Speculation(MOST, computes_alike=False)
    for _ in range(20):
        for rows in (1, 4, 5):
            speculation.observe(rows, REPLAYED_S)
        for rows in (4, 5, 8):
            speculation.observe(rows, COMPUTED_S, has_drafts=True)
    return speculation


def certain(tokens: int) -> DraftCandidate:
    """Drafts that are bound to be right."""
    return DraftCandidate(SequenceDrafts(bound=tokens), [0] * tokens)


def test_step_with_drafts_has_its_own_price_next_to_replayed_graphs() -> None:
    speculation = replaying()
    assert speculation.lengths(1, [certain(4)], 64) == [4], "five tokens a step instead of one"
    assert speculation.prices == pytest.approx((REPLAYED_S, COMPUTED_S - REPLAYED_S))


def test_right_drafts_that_end_a_replay_for_too_little_are_skipped() -> None:
    assert replaying().lengths(4, [certain(1)] * 4, 64) == [0] * 4, "twice as many tokens in 2.5 times the time"


def test_scheduler_tells_steps_with_drafts_from_others() -> None:
    speculation = Speculation(MOST, computes_alike=False)
    scheduler = Scheduler(BlockPool(8), 16, 16, max_sequences=4, speculation=speculation)
    draws = (Sample(0, SamplingParams(max_tokens=9)),)
    for is_draft, seconds in ((False, REPLAYED_S), (True, 1.5 * REPLAYED_S)):
        chunks = Chunk(0, [1], 4, [0], draws), Chunk(0, [2], 5, [0], draws, is_draft=is_draft)
        scheduler.observe(Plan(chunks), seconds)
        scheduler.observe(Plan(chunks[:1]), REPLAYED_S)
    assert speculation.lengths(2, [certain(4)] * 2, 64) == [4, 4]
    assert speculation.prices.plain_s == pytest.approx(REPLAYED_S), "of two rows without drafts"


def test_steps_of_both_kinds_are_measured_again_after_a_while() -> None:
    speculation, kinds = Speculation(MOST, computes_alike=False), list[bool]()
    for _ in range(700):
        [length] = speculation.lengths(1, [certain(8)], 64)
        kinds.append(length > 0)
        disturbed = 100.0 if kinds.count(True) == 1 and length else 1.0
        seconds = COMPUTED_S if length else REPLAYED_S
        speculation.observe(1 + length, disturbed * seconds, has_drafts=length > 0)
    tried = kinds.index(True)
    assert not any(kinds[tried + 1 : tried + 10]), "the first was taken for the price"
    settled = kinds[150:]
    assert 0 < settled.count(False) <= 0.03 * len(settled), "of steps without drafts too"


def test_length_without_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="most_tokens is"):
        Speculation(0)

"""Number of drafted tokens that each answer verifies in a step, chosen by their cost and acceptance rate. Pure.

Speculative decoding (Leviathan, Kalman, Matias, 2023) that never changes the answer. A step computes one row for the
newest token of an answer and one row for each drafted token. Every row samples with the random number of its position.
Samples are kept up to the first that differs from the draft, so the tokens equal those of one-by-one decoding.

Steps without prompt tokens are timed by their number of rows. A drafted row pays if it raises the expected tokens per
second of the step. If drafting takes time, that time counts as part of the step, and the number of drafted tokens is
chosen before drafting.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from baton.engine.scheduler.budget import PROMISED_SHARE, reachable
from baton.engine.scheduler.drafts import AnswerSoFar, CostlyDrafter, Drafter
from baton.engine.scheduler.ended_answers import SharedLookup
from baton.engine.scheduler.estimator import OnlineEstimator

INITIAL_RATE = 0.5  # acceptance rate assumed at the start
INITIAL_RATE_COSTLY = 0.7  # acceptance rate assumed for a draft model, which was chosen for its target model
PRIOR_WEIGHT = 4.0  # weight of the shared rate in one answer's rate, as a number of drafted tokens
DECAY = 0.95  # decay of an answer's counts, per draft
SHARED_WEIGHT = 0.05  # weight of one drafted token in the shared rate; the first tokens weigh more
INITIAL_WEIGHT = 2  # weight of the initial rate in the shared rate, as a number of drafted tokens
RELAX_RATE = 0.002  # fraction of the gap to the initial rate closed per step without drafts, to retry drafts later
RELAX_RATE_COSTLY = 0.0005  # RELAX_RATE for a draft model, whose retries cost forward passes
EXPLORE_EVERY = 32  # one in this many steps with drafts has one extra row, because an extra row may cost nothing
CATCH_UP_SHARE = 0.25  # time for a draft model to catch up, as a fraction of a step without drafts
DRAFT_COUNTS = (*range(1, 9), 12, 16, 24, 32, 48, 64)  # numbers of drafted tokens per step to choose from

EWMA_WEIGHT = 0.1  # weight of a new step time
OUTLIER_RATIO = 1.5  # cap of a measurement, as a multiple of the estimate
FORGET_AFTER = 256  # measurements after which the estimate of a row count is forgotten
FORGET_AFTER_EACH = 64  # FORGET_AFTER for each measurement of a row count: a disturbed first one is forgotten soon
ASSUMED_GROWTH = 0.25  # assumed increase of step time if rows double, as a fraction, until measured


class RowCost:
    """Step time by number of rows, interpolated between measured numbers.

    The time never decreases with more rows, so that a disturbed first measurement does not make drafts seem free.
    """

    def __init__(self) -> None:
        self._measured = OnlineEstimator(EWMA_WEIGHT, FORGET_AFTER, FORGET_AFTER_EACH)
        self._expected: dict[int, float] = {}  # seconds by measured number of rows; both ascend

    def observe(self, rows: int, seconds: float) -> None:
        """Record a step time. Other row counts keep their measurements, so that a wrong time affects only one."""
        measured = self._measured.estimates.get(rows)
        self._measured.advance()
        self._measured.add(rows, seconds if measured is None else min(seconds, OUTLIER_RATIO * measured.seconds))
        self._update()

    def grow_older(self) -> None:
        """Age all estimates by one measurement, which another RowCost has recorded."""
        self._measured.advance()
        self._update()

    def _update(self) -> None:
        self._measured.forget_old()
        descending = sorted(self._measured.estimates, reverse=True)
        least = accumulate((self._measured.estimates[rows].seconds for rows in descending), min)
        self._expected = dict(sorted(zip(descending, least, strict=True)))

    def expected_s(self, rows: int) -> float | None:
        """Return the expected step time, or None before the first measurement."""
        if rows in self._expected or not self._expected:
            return self._expected.get(rows)
        measured = list(self._expected)
        if len(measured) == 1:
            return self._expected[measured[0]] * (1.0 + ASSUMED_GROWTH * (rows / measured[0] - 1.0))
        index = bisect_left(measured, rows)
        # Outside the measured range, extrapolate from its smallest and largest row count: close counts differ by noise.
        low, high = (measured[index - 1], measured[index]) if 0 < index < len(measured) else (measured[0], measured[-1])
        low_s, high_s = self._expected[low], self._expected[high]
        return max(low_s + (high_s - low_s) * (rows - low) / (high - low), low_s * min(1.0, rows / low))


@dataclass(slots=True)
class SequenceDrafts:
    """Acceptance counts of one answer's drafts."""

    right: float = 0.0  # accepted tokens, with decay
    wrong: float = 0.0  # rejected tokens, with decay
    bound: int = 0  # number of leading drafted tokens of this step that a grammar forces

    def rate(self, shared: float) -> float:
        """Return the expected acceptance rate of the next draft. `shared`: rate of all answers."""
        return (PRIOR_WEIGHT * shared + self.right) / (PRIOR_WEIGHT + self.right + self.wrong)


class JudgedAnswer(AnswerSoFar, Protocol):
    @property
    def drafts(self) -> SequenceDrafts: ...


class DraftCandidate(NamedTuple):
    """Drafted tokens of one answer."""

    drafts: SequenceDrafts
    token_ids: Sequence[int]


class StepPrices(NamedTuple):
    """Expected time of a step with drafts, in seconds."""

    plain_s: float = 0.0  # time that the step would take without drafts
    longer_s: float = 0.0  # time that the drafts add


class Speculated(NamedTuple):
    """Counters of drafts since the start. A draft is all tokens drafted for one answer in one step.

    Times are summed over answers: an accepted token saves its answer one step without drafts, and every answer loses
    the time that drafts add to its steps. The difference is the time saved.
    """

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()  # accepted tokens by position in the draft
    gained_s: float = 0.0
    lost_s: float = 0.0

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)

    def and_one(self, drafted: int, accepted: int, plain_s: float = 0.0) -> "Speculated":
        """Return the counters after another draft. `plain_s`: time that its step takes without drafts."""
        positions = range(max(accepted, len(self.accepted_by_position)))
        before = (*self.accepted_by_position, *[0] * accepted)
        by_position = tuple(before[position] + (position < accepted) for position in positions)
        gained_s = self.gained_s + accepted * plain_s
        return Speculated(self.drafts + 1, self.drafted_tokens + drafted, by_position, gained_s, self.lost_s)


class Speculation:
    """Choice of drafts for each step, learned from step times and acceptance."""

    def __init__(
        self,
        most_tokens: int,
        target_s: float | None = None,
        drafter: Drafter | None = None,
        computes_alike: bool = True,
    ) -> None:
        """Start with the initial acceptance rate.

        `most_tokens`: maximum draft length. `target_s`: longest step with drafts. `drafter`: by default, lookup in
        prompt, answer and finished answers. `computes_alike`: whether steps with drafts cost the same per row as
        steps without drafts; false if only steps without drafts are recorded as graphs.
        """
        if most_tokens < 1:
            raise ValueError(f"most_tokens is {most_tokens}; it must be at least 1")
        self.most_tokens = most_tokens
        self.drafter = drafter or SharedLookup()
        self._costly = self.drafter if isinstance(self.drafter, CostlyDrafter) else None
        self.drafting_s = 0.0
        """Expected drafting time of the last call of `candidates`."""
        self.done = Speculated()
        self.prices = StepPrices()
        """Expected times of the step that was planned last."""
        self._target_s = target_s
        self._cost = RowCost()  # times of steps without drafts
        self._drafted_cost = self._cost if computes_alike else RowCost()
        self._start = INITIAL_RATE if self._costly is None else INITIAL_RATE_COSTLY
        self._rate = self._start
        self._judged = INITIAL_WEIGHT
        self._drafted_steps = 0

    def candidates(self, answers: Sequence[JudgedAnswer], most: Sequence[int], most_rows: int) -> list[DraftCandidate]:
        """Draft at most `most` tokens for each answer, the oldest answer first. `most_rows`: row limit of the step."""
        self.drafting_s = 0.0
        for each in answers:
            each.drafts.bound = 0
        if self._costly is not None:
            most = self._worth_drafting(self._costly, answers, most, most_rows)
        drafted = self.drafter.drafts_of(answers, most)
        return [DraftCandidate(each.drafts, token_ids) for each, token_ids in zip(answers, drafted, strict=True)]

    def lengths(self, answers: int, candidates: Sequence[DraftCandidate], most_rows: int) -> list[int]:
        """Return the number of drafted tokens to verify per candidate. `answers`: rows of the step without drafts."""
        drafts, counts = [each.drafts for each in candidates], [len(each.token_ids) for each in candidates]
        # The counts of a draft model's tokens were chosen before drafting; tokens forced by a grammar change them.
        if self._costly is None or any(each.bound for each in drafts):
            counts = self._chosen(drafts, counts, most_rows - answers, sum(map(bool, counts)) == answers)
        self.prices = self._prices(answers, sum(counts))
        self.done = self.done._replace(lost_s=self.done.lost_s + answers * self.prices.longer_s)
        return counts

    def observe(self, rows: int, seconds: float, has_drafts: bool = False) -> None:
        """Record the time of a step without prompt tokens."""
        own, other = (self._drafted_cost, self._cost) if has_drafts else (self._cost, self._drafted_cost)
        own.observe(rows, seconds)
        if other is not own:
            other.grow_older()

    def judge(self, drafts: SequenceDrafts, drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of the drafted tokens were right."""
        self.done = self.done.and_one(drafted, accepted, self.prices.plain_s)
        judged = [True] * accepted + [False] * (accepted < drafted)  # tokens after the first wrong one do not count
        for is_right in judged[drafts.bound :]:
            drafts.right = DECAY * drafts.right + is_right
            drafts.wrong = DECAY * drafts.wrong + (not is_right)
            self._judged += 1
            self._rate += max(SHARED_WEIGHT, 1.0 / self._judged) * (is_right - self._rate)

    def _worth_drafting(
        self, drafter: CostlyDrafter, answers: Sequence[JudgedAnswer], most: Sequence[int], most_rows: int
    ) -> list[int]:
        """Return the number of tokens to draft per answer. Let the drafter catch up with new answers if that pays.

        New answers count as having drafts: otherwise the limit for steps with undrafted answers (`_longest_s`) could
        stop the drafts of all answers until the drafter has caught up.
        """
        offers, drafts = drafter.offers(answers, most), [each.drafts for each in answers]
        rows = most_rows - len(answers)
        all_draft = all(offer.tokens for offer in offers)
        lengths = wanted = self._chosen(drafts, [offer.tokens for offer in offers], rows, all_draft, drafter)
        if not all(offer.is_known for offer in offers):
            known = [offer.tokens if offer.is_known else 0 for offer in offers]
            lengths = self._chosen(drafts, known, rows, all_draft, drafter)
        self.drafting_s = drafting_s([position for length in lengths for position in range(length)], drafter)[-1]
        behind = [
            each for each, offer, count in zip(answers, offers, wanted, strict=True) if count and not offer.is_known
        ]
        if behind:
            room_s = self._room_s(len(answers), sum(lengths), drafter.least_room_s)
            self.drafting_s += drafter.catch_up(behind, room_s)
        return lengths

    def _room_s(self, answers: int, drafted: int, least_s: float) -> float:
        """Return the time for catching up: a fraction of a step, but at least `least_s` and within the target time."""
        room_s = max(CATCH_UP_SHARE * (self._cost.expected_s(answers) or 0.0), least_s)
        if self._target_s is None:
            return room_s
        target_s = reachable(self._target_s, self._cost.expected_s(answers) or 0.0)
        return min(room_s, target_s - self.drafting_s - (self._expected_s(answers, drafted) or 0.0))

    def _chosen(
        self,
        drafts: Sequence[SequenceDrafts],
        counts: Sequence[int],
        most: int,
        all_draft: bool,
        drafter: CostlyDrafter | None = None,
    ) -> list[int]:
        """Return the number of drafted tokens that pay for each answer: at most its `counts`, and `most` in total.

        `drafter`: draft model, if drafting takes time.
        """
        chances = []
        for index, (each, count) in enumerate(zip(drafts, counts, strict=True)):
            rate = each.rate(self._rate) if count else 0.0
            chances += [(rate ** max(0, position + 1 - each.bound), position, index) for position in range(count)]
        chances.sort(key=lambda each: (-each[0], each[1]))  # at equal chances, a token comes after its predecessor
        del chances[max(0, min(most, DRAFT_COUNTS[-1])) :]
        drafting = drafting_s([position for _, position, _ in chances], drafter)
        chosen = self._worthwhile(len(drafts), [each[0] for each in chances], drafting, all_draft)
        lengths = [0] * len(drafts)
        for _, _, index in chances[:chosen]:
            lengths[index] += 1
        if any(counts) and not chosen:
            self._rate += (RELAX_RATE if drafter is None else RELAX_RATE_COSTLY) * (self._start - self._rate)
        return lengths

    def _worthwhile(self, answers: int, chances: Sequence[float], drafting: Sequence[float], all_draft: bool) -> int:
        """Return the number of drafted tokens that maximises the expected tokens per second.

        `chances`: acceptance probabilities, descending. `drafting`: at index n, seconds to draft the first n tokens.
        """
        own_s = self._cost.expected_s(answers)
        if own_s is None:
            return 0  # a step without drafts must be measured first
        longest_s = self._longest_s(own_s, all_draft)
        best, best_per_s, expected = 0, answers / own_s, float(answers)
        for count, chance in enumerate(chances, start=1):
            expected += chance
            seconds = self._step_s(answers, count, drafting) if count in DRAFT_COUNTS else None
            if seconds is not None and seconds <= longest_s and expected / seconds > best_per_s:
                best, best_per_s = count, expected / seconds
        self._drafted_steps += best > 0
        if best and self._drafted_steps % EXPLORE_EVERY == 0 and best < len(chances):
            seconds = self._step_s(answers, best + 1, drafting)
            best += seconds is not None and seconds <= longest_s
        return best

    def _step_s(self, answers: int, drafted: int, drafting: Sequence[float]) -> float | None:
        seconds = self._expected_s(answers, drafted)
        return None if seconds is None else seconds + drafting[drafted]

    def _expected_s(self, answers: int, drafted: int) -> float | None:
        """Return the expected step time, excluding drafting; from steps without drafts until others are measured."""
        seconds = self._drafted_cost.expected_s(answers + drafted) if drafted else None
        return self._cost.expected_s(answers + drafted) if seconds is None else seconds

    def _prices(self, answers: int, drafted: int) -> StepPrices:
        """Return the expected times of a step; zeros before the first measurement, or if nothing is drafted."""
        plain_s, whole_s = self._expected_s(answers, 0), self._expected_s(answers, drafted)
        if not (drafted or self.drafting_s) or plain_s is None or whole_s is None:
            return StepPrices()
        return StepPrices(plain_s, max(0.0, whole_s + self.drafting_s - plain_s))

    def _longest_s(self, own_s: float, all_draft: bool) -> float:
        """Return the maximum time of a step with drafts; PROMISED_SHARE limits it if some answers have no drafts."""
        if not all_draft:
            return (1.0 + PROMISED_SHARE) * own_s
        return math.inf if self._target_s is None else reachable(self._target_s, own_s)


def drafting_s(positions: Sequence[int], drafter: CostlyDrafter | None) -> list[float]:
    """Return, at index n, the seconds to draft the first n tokens. `positions`: index of each token in its draft.

    Each pass drafts one token for several answers. Without a draft model, drafts take no time.
    """
    if drafter is None:
        return [0.0] * (len(positions) + 1)
    sums, answers = [0.0], Counter[int]()  # number of answers with a drafted token at each position
    for position in positions:
        before_s = drafter.seconds(answers[position]) if answers[position] else 0.0
        answers[position] += 1
        begin_s = 0.0 if len(sums) > 1 else drafter.begin_s
        sums.append(sums[-1] + begin_s + drafter.seconds(answers[position]) - before_s)
    return sums

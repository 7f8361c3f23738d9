"""How many drafted tokens each answer computes in a step: as many as pay by their cost and how often they are right.

Speculative decoding (Leviathan, Kalman, Matias, 2023) without a change of the answer: every drafted token is a row of
its own beside the row of the newest token, drawn from with the number of its own position. The draws are kept as far as
drafts agree with them: so the tokens are those that would have come one by one. Pure.

A step of more rows takes longer: steps without prompts are measured by their number of rows. A row pays where it raises
the tokens per second that are expected of the step. Where drafting itself takes time, that counts in the step, and is
decided before.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from baton.engine.scheduler.budget import PROMISED_SHARE
from baton.engine.scheduler.drafts import AnswerSoFar, CostlyDrafter, Drafter
from baton.engine.scheduler.ended_answers import SharedLookup

START = 0.5  # rate at which drafts are right before anything is known
START_COSTLY = 0.7  # of drafts that cost passes: those of a model, chosen for this one
PRIOR = 4.0  # drafts that the rate of all answers counts for, beside those of one answer
FADING = 0.95  # of what is known of an answer, with each of its drafts
OF_ALL = 0.05  # weight of one draft in the rate of all answers; more of the first ones
BELIEVED = 2  # drafts that this counts for
RELAXING = 0.002  # of that rate towards where it started, in a step where no drafts pay: they are tried again some time
RELAXING_COSTLY = 0.0005  # as much where drafts cost passes, and maybe a prompt to catch up with
EXPLORING = 32  # steps with drafts, one of which has a row more: steps may take as long with it as without
CATCHING_UP = 0.25  # of a step without drafts: the time in which a drafter may catch up beside it
COUNTS = (*range(1, 9), 12, 16, 24, 32, 48, 64)  # drafted tokens of a step, one of which is chosen

WEIGHT = 0.1  # of a measurement of a step
DISTURBED = 1.5  # times longer than known: as much of a measurement is taken
KEPT = 256  # measurements later one of another number of rows is forgotten
KEPT_ONCE = 64  # as much for each time that it was measured: a first one that was disturbed must not last
GUESSED_SHARE = 0.25  # of a step without drafts, that twice as many rows are taken to add before any were measured


class RowCost:
    """The time of a step by its number of rows. Between those that were measured it is taken to grow evenly.

    Fewer rows take no longer than more do: a first measurement that was disturbed does not make drafts seem free.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._expected: dict[int, float] = {}  # of the rows that were measured, in their order
        self._last: dict[int, int] = {}  # number of the last measurement, by rows
        self._times: dict[int, int] = {}
        self._number = 0

    def observe(self, rows: int, seconds: float) -> None:
        """One number of rows says nothing of others: else a first measurement that was wrong would stay so."""
        known = self._seconds.get(rows)
        times = self._times[rows] = self._times.get(rows, 0) + 1
        self._last[rows] = self._number + 1
        if known is None:
            self._seconds[rows] = seconds
        else:
            self._seconds[rows] += max(WEIGHT, 1.0 / times) * (min(seconds, DISTURBED * known) - known)
        self.grow_older()

    def grow_older(self) -> None:
        """By a measurement, here or of steps that are measured apart."""
        self._number += 1
        ages = ((each, self._number - last) for each, last in self._last.items())
        for old in [each for each, age in ages if age >= min(KEPT, KEPT_ONCE * self._times[each])]:
            del self._seconds[old], self._last[old], self._times[old]
        descending = sorted(self._seconds, reverse=True)
        least = accumulate((self._seconds[each] for each in descending), min)
        self._expected = dict(sorted(zip(descending, least, strict=True)))

    def expected_s(self, rows: int) -> float | None:
        """None: nothing was measured yet."""
        if rows in self._expected or not self._expected:
            return self._expected.get(rows)
        known = list(self._expected)
        if len(known) == 1:
            return self._expected[known[0]] * (1.0 + GUESSED_SHARE * (rows / known[0] - 1.0))
        place = bisect_left(known, rows)
        # Beyond those measured by the line through all of them: near neighbours differ by noise.
        low, high = (known[place - 1], known[place]) if 0 < place < len(known) else (known[0], known[-1])
        low_s, high_s = self._expected[low], self._expected[high]
        return max(low_s + (high_s - low_s) * (rows - low) / (high - low), low_s * min(1.0, rows / low))


@dataclass(slots=True)
class SequenceDrafts:
    """Of one answer."""

    right: float = 0.0  # of its drafts, the older ones counting less
    wrong: float = 0.0
    bound: int = 0  # of the step's drafts, the first that are bound to be right: a grammar leaves no other

    def rate(self, of_all: float) -> float:
        """At which its next draft is right."""
        return (PRIOR * of_all + self.right) / (PRIOR + self.right + self.wrong)


class JudgedAnswer(AnswerSoFar, Protocol):
    @property
    def drafts(self) -> SequenceDrafts: ...


class Candidate(NamedTuple):
    """What an answer may compute beside its newest token."""

    drafts: SequenceDrafts
    token_ids: Sequence[int]


class StepPrices(NamedTuple):
    """What is known of the time of a step with drafts. Seconds."""

    plain_s: float = 0.0  # of one with the same answers and without drafts
    longer_s: float = 0.0  # than that one


class Speculated(NamedTuple):
    """Sums since the start. A draft is all that was drafted for an answer in one step.

    Times are those of the answers, added up: an accepted token saves its answer a step without drafts, and every answer
    waits for the longer steps. The difference is what speculation has saved.
    """

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()  # tokens that were right, by their place in the draft
    gained_s: float = 0.0
    lost_s: float = 0.0

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)

    def and_one(self, drafted: int, accepted: int, plain_s: float = 0.0) -> "Speculated":
        """With another draft. `plain_s`: as of its step's prices."""
        places = range(max(accepted, len(self.accepted_by_position)))
        before = (*self.accepted_by_position, *[0] * accepted)
        by_position = tuple(before[place] + (place < accepted) for place in places)
        gained_s = self.gained_s + accepted * plain_s
        return Speculated(self.drafts + 1, self.drafted_tokens + drafted, by_position, gained_s, self.lost_s)


class Speculation:
    """`most_tokens`: drafted for one answer. `target_s`: no step with drafts shall take longer, where it is given."""

    def __init__(
        self,
        most_tokens: int,
        target_s: float | None = None,
        drafter: Drafter | None = None,
        computes_alike: bool = True,
    ) -> None:
        """`drafter`: None looks drafts up in prompt, answer, and answers that have ended.

        `computes_alike`: steps with drafts as those without. Not where the device records the ones without.
        """
        if most_tokens < 1:
            raise ValueError(f"{most_tokens} drafted tokens; it must be at least 1")
        self.most_tokens = most_tokens
        self.drafter = drafter or SharedLookup()
        self._costly = self.drafter if isinstance(self.drafter, CostlyDrafter) else None
        self.drafting_s = 0.0
        """That the drafts of the last `candidates` are expected to have taken."""
        self.done = Speculated()
        self.prices = StepPrices()
        """Of the step planned last."""
        self._target_s = target_s
        self._cost = RowCost()  # of steps without drafts
        self._drafted_cost = self._cost if computes_alike else RowCost()
        self._start = START if self._costly is None else START_COSTLY
        self._rate = self._start
        self._judged = BELIEVED
        self._drafted_steps = 0

    def candidates(self, answers: Sequence[JudgedAnswer], most: Sequence[int], most_rows: int) -> list[Candidate]:
        """Drafts of each answer of a step, the oldest first; `most`: tokens of each. `most_rows`: of the step."""
        self.drafting_s = 0.0
        for each in answers:
            each.drafts.bound = 0
        if self._costly is not None:
            most = self._worth_drafting(self._costly, answers, most, most_rows)
        drafted = self.drafter.drafts_of(answers, most)
        return [Candidate(each.drafts, token_ids) for each, token_ids in zip(answers, drafted, strict=True)]

    def lengths(self, answers: int, candidates: Sequence[Candidate], most_rows: int) -> list[int]:
        """Drafted tokens to compute of each candidate. `answers`: rows of the step without any."""
        drafts, counts = [each.drafts for each in candidates], [len(each.token_ids) for each in candidates]
        # Drafts that cost time were chosen before; texts that are bound to come cost nothing to draft.
        if self._costly is None or any(each.bound for each in drafts):
            counts = self._chosen(drafts, counts, most_rows - answers, sum(map(bool, counts)) == answers)
        self.prices = self._prices(answers, sum(counts))
        self.done = self.done._replace(lost_s=self.done.lost_s + answers * self.prices.longer_s)
        return counts

    def observe(self, rows: int, seconds: float, has_drafts: bool = False) -> None:
        """A step of so many rows without prompt tokens took so long."""
        own, other = (self._drafted_cost, self._cost) if has_drafts else (self._cost, self._drafted_cost)
        own.observe(rows, seconds)
        if other is not own:
            other.grow_older()

    def judge(self, drafts: SequenceDrafts, drafted: int, accepted: int) -> None:
        """Of the drafted tokens of a step, the first `accepted` were right."""
        self.done = self.done.and_one(drafted, accepted, self.prices.plain_s)
        judged = [True] * accepted + [False] * (accepted < drafted)  # what follows a wrong one says nothing
        for is_right in judged[drafts.bound :]:
            drafts.right = FADING * drafts.right + is_right
            drafts.wrong = FADING * drafts.wrong + (not is_right)
            self._judged += 1
            self._rate += max(OF_ALL, 1.0 / self._judged) * (is_right - self._rate)

    def _worth_drafting(
        self, drafter: CostlyDrafter, answers: Sequence[JudgedAnswer], most: Sequence[int], most_rows: int
    ) -> list[int]:
        """Tokens to draft of each answer. Those that the drafter does not know yet are caught up with, where that pays.

        They count as answers with drafts: else each new one would end the drafts of all others for a while.
        """
        offers, drafts = drafter.offers(answers, most), [each.drafts for each in answers]
        rows = most_rows - len(answers)
        all_draft = all(offer.tokens for offer in offers)
        lengths = wanted = self._chosen(drafts, [offer.tokens for offer in offers], rows, all_draft, drafter)
        if not all(offer.is_known for offer in offers):
            known = [offer.tokens if offer.is_known else 0 for offer in offers]
            lengths = self._chosen(drafts, known, rows, all_draft, drafter)
        self.drafting_s = drafting_s([place for length in lengths for place in range(length)], drafter)[-1]
        behind = [
            each for each, offer, count in zip(answers, offers, wanted, strict=True) if count and not offer.is_known
        ]
        if behind:
            room_s = self._room_s(len(answers), sum(lengths), drafter.least_room_s)
            self.drafting_s += drafter.catch_up(behind, room_s)
        return lengths

    def _room_s(self, answers: int, drafted: int, least_s: float) -> float:
        """For catching up: a share of a step, or `least_s` where that is longer; and within a given target."""
        room_s = max(CATCHING_UP * (self._cost.expected_s(answers) or 0.0), least_s)
        if self._target_s is None:
            return room_s
        return min(room_s, self._target_s - self.drafting_s - (self._expected_s(answers, drafted) or 0.0))

    def _chosen(
        self,
        drafts: Sequence[SequenceDrafts],
        counts: Sequence[int],
        most: int,
        all_draft: bool,
        drafter: CostlyDrafter | None = None,
    ) -> list[int]:
        """Of each answer's drafts, of so many tokens, those that pay: at most `most` in all.

        `drafter`: that will take its time for them.
        """
        chances = []
        for index, (each, count) in enumerate(zip(drafts, counts, strict=True)):
            rate = each.rate(self._rate) if count else 0.0
            chances += [(rate ** max(0, place + 1 - each.bound), place, index) for place in range(count)]
        chances.sort(key=lambda each: (-each[0], each[1]))  # a token never before the one that it follows
        del chances[max(0, min(most, COUNTS[-1])) :]
        drafting = drafting_s([place for _, place, _ in chances], drafter)
        chosen = self._worthwhile(len(drafts), [each[0] for each in chances], drafting, all_draft)
        lengths = [0] * len(drafts)
        for _, _, index in chances[:chosen]:
            lengths[index] += 1
        if any(counts) and not chosen:
            self._rate += (RELAXING if drafter is None else RELAXING_COSTLY) * (self._start - self._rate)
        return lengths

    def _worthwhile(self, answers: int, chances: Sequence[float], drafting: Sequence[float], all_draft: bool) -> int:
        """How many drafted tokens give the most expected tokens per second. `chances`: the best first.

        `drafting`: seconds to draft none, one, two and so on of them.
        """
        own_s = self._cost.expected_s(answers)
        if own_s is None:
            return 0  # to be measured first
        longest_s = self._longest_s(own_s, all_draft)
        best, best_per_s, expected = 0, answers / own_s, float(answers)
        for count, chance in enumerate(chances, start=1):
            expected += chance
            seconds = self._step_s(answers, count, drafting) if count in COUNTS else None
            if seconds is not None and seconds <= longest_s and expected / seconds > best_per_s:
                best, best_per_s = count, expected / seconds
        self._drafted_steps += best > 0
        if best and self._drafted_steps % EXPLORING == 0 and best < len(chances):
            seconds = self._step_s(answers, best + 1, drafting)
            best += seconds is not None and seconds <= longest_s
        return best

    def _step_s(self, answers: int, drafted: int, drafting: Sequence[float]) -> float | None:
        seconds = self._expected_s(answers, drafted)
        return None if seconds is None else seconds + drafting[drafted]

    def _expected_s(self, answers: int, drafted: int) -> float | None:
        """Without drafting them. While none with drafts was measured, such a step is taken to be as others are."""
        seconds = self._drafted_cost.expected_s(answers + drafted) if drafted else None
        return self._cost.expected_s(answers + drafted) if seconds is None else seconds

    def _prices(self, answers: int, drafted: int) -> StepPrices:
        """Nothing is known of a step before any was measured; no drafts are computed then."""
        plain_s, whole_s = self._expected_s(answers, 0), self._expected_s(answers, drafted)
        if not (drafted or self.drafting_s) or plain_s is None or whole_s is None:
            return StepPrices()
        return StepPrices(plain_s, max(0.0, whole_s + self.drafting_s - plain_s))

    def _longest_s(self, own_s: float, all_draft: bool) -> float:
        """An answer without drafts shall not wait much longer for those of others."""
        if self._target_s is not None:
            return self._target_s
        return math.inf if all_draft else (1.0 + PROMISED_SHARE) * own_s


def drafting_s(places: Sequence[int], drafter: CostlyDrafter | None) -> list[float]:
    """Seconds to draft none, one, two and so on of these tokens; `places`: of each in its draft, by 0.

    Each pass drafts one token of so many answers. None: drafts take no time.
    """
    if drafter is None:
        return [0.0] * (len(places) + 1)
    sums, answers = [0.0], Counter[int]()  # by place
    for place in places:
        before_s = drafter.seconds(answers[place]) if answers[place] else 0.0
        answers[place] += 1
        begin_s = 0.0 if len(sums) > 1 else drafter.begin_s
        sums.append(sums[-1] + begin_s + drafter.seconds(answers[place]) - before_s)
    return sums

"""Order in which prompts are computed, by their TTFT objectives, and whether answers must make room for one. Pure.

The order meets as many objectives as possible (Moore and Hodgson, 1968): prompts are sorted by due time; whenever one
would be late, the largest prompt so far is given up. Of the prompts that can be on time, the shortest is computed first
if all prompts that are due earlier stay on time. Late prompts and those without an objective follow by arrival.

The TTFT objective of a late prompt is doubled until the prompt can meet it. The prompt may become urgent again when
half of the doubled objective has passed, so that it does not depend on the free part of steps (TARGET_SHARE in
budget.py) forever; it stays urgent if half of it is computed, since answers have paid for that half. It is also urgent
if the free part would not complete it before its deadline, and more would. No prompt starves: when the younger prompts
computed before it have more than PATIENCE times its tokens, it is computed before all others.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from baton.engine.request import Chunk
from baton.engine.scheduler.sequences import ScheduledSequence

MARGIN_SHARE = 0.05  # fraction of the TTFT objective reserved for rate errors, hand-over and host time
AIM_SHARE = 0.25  # planned fraction of the TTFT objective; the rest is reserved for prompts that arrive later
LENT_SHARE = 0.5  # planned fraction of the TTFT objective before cores of other workers are wanted
DEADLINE_SHARE = 0.5  # planned fraction of the time until a deadline; the rest is for the answer and for errors
PATIENCE = 4.0
MIN_TTFT_S = 0.01  # shortest objective whose multiples are considered
MIN_PATIENCE_TOKENS = 256  # minimum length that PATIENCE multiplies, so that short prompts are not reordered


@dataclass(frozen=True, slots=True)
class AssumedRates:
    """Assumed rates of computing prompts, in tokens per second; infinite before anything is measured."""

    full: float = math.inf  # with as many prompt tokens per step as TBT objectives allow, or on lent cores too
    free: float = math.inf  # with only the free part of each step (TARGET_SHARE in budget.py), or on own cores


@dataclass(frozen=True, slots=True)
class PromptOrder:
    prompts: Sequence[ScheduledSequence]  # in the order in which to compute them
    urgent: bool  # whether the free part of steps would complete some prompt too late

    def overtaken(self, chunks: Iterable[tuple[ScheduledSequence, Chunk]]) -> None:
        """Add a step's prompt `chunks` to `overtaken_tokens` of all older prompts that the step does not compute."""
        computed = [(sequence, len(chunk.token_ids)) for sequence, chunk in chunks]
        if not computed:
            return
        chosen = {id(sequence) for sequence, _ in computed}
        for waiting in self.prompts:
            if id(waiting) not in chosen:
                younger = (tokens for sequence, tokens in computed if sequence.arrival_key > waiting.arrival_key)
                waiting.overtaken_tokens += sum(younger)


def order_prompts(
    pending: Sequence[ScheduledSequence],
    now_s: float,
    rates: AssumedRates,
    free_places: int,
    aim_share: float = AIM_SHARE,
) -> PromptOrder:
    """Return the order of the `pending` prompts. If none has an objective, it is the given order.

    `pending`: running prompts, then waiting ones by arrival. `free_places`: number of free batch slots; a prompt that
    needs more slots is not urgent, since it must wait for answers to finish. `aim_share`: fraction of the TTFT
    objective after which the free part of steps, or the own cores, must have completed a prompt.
    """
    if all(each.request.objectives.first_token_at_s == math.inf for each in pending):
        return PromptOrder(pending, False)
    first: list[ScheduledSequence] = []
    dated: list[ScheduledSequence] = []
    late: list[ScheduledSequence] = []
    for each in sorted(pending, key=lambda each: each.arrival_key):
        of_class = first if each.made_tokens or _is_starving(each) else dated
        (late if of_class is dated and _due_s(each) == math.inf else of_class).append(each)
    first.sort(key=lambda each: (not each.made_tokens, each.arrival_key))  # running beams may wait for a preempted beam
    began_s = now_s + sum(each.pending_tokens for each in first) / rates.full
    on_time, missed = _on_time(dated, began_s, rates.full)
    late = sorted([*late, *missed], key=lambda each: each.arrival_key)
    prompts = [*first, *_shortest_first(on_time, began_s, rates.full), *late]
    able = [each for each in prompts if each.table is not None or each.places <= free_places]
    return PromptOrder(prompts, _is_urgent(able, {id(each) for each in late}, now_s, rates, aim_share))


def _is_starving(prompt: ScheduledSequence) -> bool:
    return prompt.overtaken_tokens > PATIENCE * max(len(prompt.token_ids), MIN_PATIENCE_TOKENS)


def _due_s(prompt: ScheduledSequence) -> float:
    """Return the time by which a prompt should be complete, with MARGIN_SHARE left for its hand-over."""
    objectives = prompt.request.objectives
    if objectives.first_token_at_s == math.inf:
        return math.inf
    return objectives.first_token_at_s - MARGIN_SHARE * objectives.ttft_s


def _on_time(
    prompts: Iterable[ScheduledSequence], began_s: float, tokens_per_s: float
) -> tuple[list[ScheduledSequence], list[ScheduledSequence]]:
    """Return the largest set of prompts that can all be complete when due, by due time, and the remaining prompts."""
    kept: dict[int, ScheduledSequence] = {}
    missed: list[ScheduledSequence] = []
    largest: list[tuple[int, int, ScheduledSequence]] = []
    total_tokens = 0
    for number, each in enumerate(sorted(prompts, key=lambda each: (_due_s(each), each.arrival_key))):
        kept[number] = each
        total_tokens += each.pending_tokens
        heappush(largest, (-each.pending_tokens, number, each))
        if began_s + total_tokens / tokens_per_s > _due_s(each):
            tokens, given_up, prompt = heappop(largest)
            total_tokens += tokens
            missed.append(prompt)
            del kept[given_up]
    return list(kept.values()), missed


def _shortest_first(
    prompts: list[ScheduledSequence], began_s: float, tokens_per_s: float
) -> Iterable[ScheduledSequence]:
    """Move the shortest prompt to the front if those due before it stay on time. `prompts`: by due time."""
    best, spare_s, end_s = 0, math.inf, began_s
    for number, each in enumerate(prompts):
        own_s = each.pending_tokens / tokens_per_s
        if own_s <= spare_s and each.pending_tokens < prompts[best].pending_tokens:
            best = number
        end_s += own_s
        spare_s = min(spare_s, _due_s(each) - end_s)
    return [*prompts[best : best + 1], *prompts[:best], *prompts[best + 1 :]]


def _is_urgent(
    prompts: Iterable[ScheduledSequence], late: set[int], now_s: float, rates: AssumedRates, aim_share: float
) -> bool:
    """Return whether the free part of steps would complete a prompt too late.

    Too late is after `aim_share` of its TTFT objective; for a prompt in `late`, after its doubled objective, or after
    DEADLINE_SHARE of the time until its deadline if it can be complete before that deadline.
    """
    free_s = full_s = now_s
    for each in prompts:
        free_s += each.pending_tokens / rates.free
        full_s += each.pending_tokens / rates.full
        objectives = each.request.objectives
        if objectives.first_token_at_s == math.inf:
            continue
        began_s, length_s = objectives.first_token_at_s - objectives.ttft_s, max(objectives.ttft_s, MIN_TTFT_S)
        if id(each) not in late:
            if free_s > began_s + aim_share * length_s:
                return True
            continue
        planned_s = began_s + DEADLINE_SHARE * (objectives.deadline_s - began_s)
        if free_s > planned_s and full_s <= objectives.deadline_s:
            return True
        while began_s + 2.0 * length_s < full_s:
            length_s *= 2.0
        is_due = began_s + length_s <= now_s or 2 * each.pending_tokens <= len(each.token_ids)
        if is_due and free_s > began_s + 2.0 * length_s:
            return True
    return False

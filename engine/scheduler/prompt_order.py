"""Order in which prompts are computed, by their TTFT objectives, and whether answers must make room for one. Pure.

The order serves as many objectives as possible (Moore and Hodgson, 1968: by due time; when one would miss, the largest
before it is given up). Of the prompts that can be on time, the shortest is computed first if all that are due earlier
stay on time. Prompts that cannot be on time follow by arrival, and so do those without an objective.

A late prompt has further objectives, each twice as long as the one before. Once the last one that it cannot meet has
passed, it may become urgent again, so that it does not wait in the free part of steps forever. No prompt starves:
one that younger prompts have overtaken by PATIENCE times its own length is computed before all others.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from baton.engine.request import Chunk
from baton.engine.scheduler.sequences import ScheduledSequence

MARGIN_SHARE = 0.05  # part of the TTFT objective kept for errors of rates, hand-over and host
AIM_SHARE = 0.25  # part of the TTFT objective that is planned for; the rest is for prompts that arrive later
PATIENCE = 4.0
MIN_TTFT_S = 0.01  # shortest objective whose multiples are considered
MIN_PATIENCE_TOKENS = 256  # length that a shorter prompt counts as in PATIENCE, so that short ones are not reordered


@dataclass(frozen=True, slots=True)
class AssumedRates:
    """Assumed rates of computing prompts, in tokens per second; infinite before anything is measured."""

    full: float = math.inf  # with as much of each step as TBT objectives allow
    free: float = math.inf  # with the free part of each step


@dataclass(frozen=True, slots=True)
class PromptOrder:
    prompts: Sequence[ScheduledSequence]  # in the order in which to compute them
    urgent: bool  # whether one would miss its aim with the free part of steps alone

    def overtaken(self, chunks: Iterable[tuple[ScheduledSequence, Chunk]]) -> None:
        """Count a step's prompt tokens against the older prompts that it does not compute. `chunks`: of prompts."""
        computed = [(sequence, len(chunk.token_ids)) for sequence, chunk in chunks]
        if not computed:
            return
        chosen = {id(sequence) for sequence, _ in computed}
        for waiting in self.prompts:
            if id(waiting) not in chosen:
                younger = (tokens for sequence, tokens in computed if sequence.arrival_key > waiting.arrival_key)
                waiting.overtaken_tokens += sum(younger)


def order_prompts(
    pending: Sequence[ScheduledSequence], now_s: float, rates: AssumedRates, free_places: int
) -> PromptOrder:
    """Order prompts, given by arrival with running ones first; without objectives, keep that order.

    `free_places`: batch slots that are free. A prompt that needs more waits for answers to end, and is not urgent.
    """
    if all(each.request.objectives.first_token_at_s == math.inf for each in pending):
        return PromptOrder(pending, False)
    first: list[ScheduledSequence] = []
    dated: list[ScheduledSequence] = []
    late: list[ScheduledSequence] = []
    for each in sorted(pending, key=lambda each: each.arrival_key):
        of_class = first if each.made_tokens or _is_starving(each) else dated
        (late if of_class is dated and _due_s(each) == math.inf else of_class).append(each)
    first.sort(key=lambda each: (not each.made_tokens, each.arrival_key))  # a preempted beam may hold the others' slots
    began_s = now_s + sum(each.pending_tokens for each in first) / rates.full
    on_time, missed = _on_time(dated, began_s, rates.full)
    late = sorted([*late, *missed], key=lambda each: each.arrival_key)
    prompts = [*first, *_shortest_first(on_time, began_s, rates.full), *late]
    able = [each for each in prompts if each.table is not None or each.places <= free_places]
    return PromptOrder(prompts, _is_urgent(able, {id(each) for each in late}, now_s, rates))


def _is_starving(prompt: ScheduledSequence) -> bool:
    return prompt.overtaken_tokens > PATIENCE * max(len(prompt.token_ids), MIN_PATIENCE_TOKENS)


def _due_s(prompt: ScheduledSequence) -> float:
    """Return the time at which a prompt should be complete; with the margin, the hand-over is on time."""
    objectives = prompt.request.objectives
    if objectives.first_token_at_s == math.inf:
        return math.inf
    return objectives.first_token_at_s - MARGIN_SHARE * objectives.ttft_s


def _on_time(
    prompts: Iterable[ScheduledSequence], began_s: float, tokens_per_s: float
) -> tuple[list[ScheduledSequence], list[ScheduledSequence]]:
    """Return the largest set of prompts that can all be complete when due, in that order, and the others."""
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


def _is_urgent(prompts: Iterable[ScheduledSequence], late: set[int], now_s: float, rates: AssumedRates) -> bool:
    """Return whether the free part of steps would compute a prompt too late: after its aim, or after the next of its
    longer objectives.
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
            if free_s > began_s + AIM_SHARE * length_s:
                return True
            continue
        while began_s + 2.0 * length_s < full_s:
            length_s *= 2.0
        if began_s + length_s <= now_s and free_s > began_s + 2.0 * length_s:
            return True
    return False

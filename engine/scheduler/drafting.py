"""Drafts of one step: which tokens each answer verifies in addition to its newest one. Pure."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.scheduler.sequences import ScheduledSequence
from baton.engine.scheduler.speculation import DraftCandidate, Speculation


class Drafting:
    def __init__(self, speculation: Speculation, pool: BlockPool, block_tokens: int) -> None:
        self._speculation = speculation
        self._pool = pool
        self._block_tokens = block_tokens

    def drafts(self, answers: Sequence[ScheduledSequence], most_rows: int) -> Sequence[Sequence[int]]:
        """Return the drafted tokens of each answer. `most_rows`: maximum rows of the step, including one per answer."""
        columns = self._pool.available // self._pool.groups.count
        spare = columns - len(answers)  # the newest token of each answer needs at most one column
        most = [self._most_tokens(sequence, with_new_column=number < spare) for number, sequence in enumerate(answers)]
        drafted = self._speculation.candidates(answers, most, most_rows)
        candidates = [vetted(*each) for each in zip(answers, drafted, most, strict=True)]
        lengths = self._speculation.lengths(len(answers), candidates, most_rows)
        return [each.token_ids[:length] for each, length in zip(candidates, lengths, strict=True)]

    def judge(self, drafted: Sequence[ScheduledSequence], right: Sequence[ScheduledSequence]) -> None:
        """Record accepted drafts. `drafted`: sequence of each drafted token; `right`: sequence of each accepted one."""
        accepted = Counter(right)
        for sequence, count in Counter(drafted).items():
            self._speculation.judge(sequence.drafts, count, accepted[sequence])

    def forget(self, sequence: ScheduledSequence) -> None:
        """Drop the state of a finished sequence."""
        self._speculation.drafter.forget(sequence)

    def _most_tokens(self, sequence: ScheduledSequence, with_new_column: bool) -> int:
        """Return the maximum draft length, which keeps the length limit and adds at most one block table column."""
        if not sequence.may_draft:
            return 0
        block_tokens, position = self._block_tokens, sequence.computed_tokens
        columns = max(sequence.held().columns, position // block_tokens + 1) + with_new_column
        params = sequence.request.params
        left_tokens = params.max_tokens - sequence.answer_tokens - 1
        most = self._speculation.most_tokens
        asked = most if params.most_drafted is None else params.most_drafted
        return min(most, asked, left_tokens, columns * block_tokens - position - 1)


def vetted(sequence: ScheduledSequence, candidate: DraftCandidate, most: int) -> DraftCandidate:
    """Cut a draft before the first token that the grammar rejects or that would end the answer."""
    drafts, drafted = candidate
    params, token_ids = sequence.request.params, sequence.token_ids
    if params.constraint is not None and most > 0:
        choice, prompt_tokens = sequence.arrival_key.choice, sequence.request.prompt_tokens
        try:
            drafted, drafts.bound = params.constraint.vet(choice, token_ids, prompt_tokens, drafted, most)
        except Exception:  # noqa: BLE001 -- its mask, which is asked for next, fails the request
            drafted, drafts.bound = (), 0
    going_on = list(takewhile(lambda token_id: token_id not in params.stop_token_ids, drafted))
    return DraftCandidate(drafts, going_on)

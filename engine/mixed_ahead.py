"""The step after one that is still computed, so that a device need not wait for the host between two steps.

Pure. Its chunks follow chunks of the step before, whose tokens are not known yet.
"""

from engine.mixed_batch import MixedBatch
from engine.mixed_draft import Draft
from engine.mixed_growth import Write, blocks_to_write, grow
from engine.mixed_state import MixedSequence


def draft_ahead(batch: MixedBatch, block_tokens: int) -> Draft | None:
    """One more token of every answer that runs, except those that end with the token under way for their length.

    None where the step must be planned with that step's tokens at hand: a prompt is to be computed or admitted, a
    request looks back on its tokens or takes several candidates, or blocks are short.
    """
    place = {id(sequence): index for index, sequence in enumerate(batch.flights.latest)}
    if batch.waiting:
        return None
    draft = Draft()
    continued: list[MixedSequence] = []
    for sequence in batch.running:
        if not sequence.request.params.drawn_alone or sequence.uncomputed_tokens != 1 or sequence.made_tokens == 0:
            return None
        if id(sequence) not in place or sequence.answer_tokens + 1 < sequence.request.params.max_tokens:
            continued.append(sequence)
    writes = [Write(sequence.held(), _position(sequence, id(sequence) in place)) for sequence in continued]
    if blocks_to_write(writes, batch.pool, block_tokens) > batch.available_blocks:
        return None
    for sequence, write in zip(continued, writes, strict=True):
        draft.copy(grow(write.table, write.position, block_tokens))
        if id(sequence) in place:
            draft.follow(sequence, place[id(sequence)])
        else:
            draft.compute(sequence, budget_tokens=1)
    return draft


def _position(sequence: MixedSequence, is_under_way: bool) -> int:
    """Of the token whose KV is written next."""
    return sequence.computed_tokens + is_under_way

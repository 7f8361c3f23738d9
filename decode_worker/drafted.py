"""Speculative decoding per answer and step: drafted tokens, accepted tokens, and saved time. Does no I/O.

Each accepted token saves its answer one step, but drafts lengthen the step for all answers. Saved and added times come
from measured steps (engine/scheduler/speculation.py).
"""

from dataclasses import dataclass

from baton.engine.runner.step_records import StepRecord
from baton.protos import session_pb2
from baton.worker.times import RequestTimes


@dataclass(slots=True)
class _Share:
    """Counts of one choice's drafted tokens. `output`: index of the choice's output in `batch`."""

    batch: session_pb2.StepOutputs
    output: int
    times: RequestTimes
    drafted_tokens: int
    accepted_tokens: int = 0


class StepDrafts:
    """Counts and saved times of one step with drafted tokens, for the messages to routers and the request log."""

    def __init__(self, step: StepRecord) -> None:
        self._drafted = {(part.request_id, part.choice): part.tokens for part in step.drafts}
        self._prices = step.prices
        self._shares: dict[tuple[int, int], _Share] = {}

    def take(self, request_id: int, choice: int, batch: session_pb2.StepOutputs, times: RequestTimes) -> None:
        """Count a token of the last output of `batch`. All but a choice's first token in a step are accepted drafts."""
        share = self._shares.get((request_id, choice))
        if share is None:
            drafted_tokens = self._drafted.get((request_id, choice), 0)
            self._shares[request_id, choice] = _Share(batch, len(batch.outputs) - 1, times, drafted_tokens)
        else:
            share.accepted_tokens += 1

    def write(self) -> None:
        """Add the counts and saved times to the batches. Call it after the last `take`."""
        plain_ms, longer_ms = self._prices.plain_s * 1e3, self._prices.longer_s * 1e3
        for share in self._shares.values():
            accepted_tokens = share.accepted_tokens
            share.batch.drafts.add(
                output=share.output,
                drafted_tokens=share.drafted_tokens,
                accepted_tokens=accepted_tokens,
                saved_ms=accepted_tokens * plain_ms - longer_ms,
            )
            share.times.drafted_tokens += share.drafted_tokens
            share.times.accepted_tokens += accepted_tokens

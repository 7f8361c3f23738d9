"""What each answer had of a step with drafted tokens: how many were its own, how many were drawn, and the time saved.

An accepted token saves its answer a step without drafts; every answer of the step waits for as long as drafts make it
longer. Both are known from measured steps (engine/scheduler/speculation.py). Does no I/O.
"""

from baton.engine.runner.step_records import ChoiceKey, StepRecord
from baton.protos import session_pb2
from baton.worker.times import RequestTimes


class StepDrafts:
    """Of one step with drafted tokens."""

    def __init__(self, step: StepRecord) -> None:
        self._drafted = {ChoiceKey(part.request_id, part.choice): part.tokens for part in step.drafts}
        self._plain_ms, self._longer_ms = step.prices.plain_s * 1e3, step.prices.longer_s * 1e3
        self._messages: dict[ChoiceKey, session_pb2.Drafts] = {}

    def take(self, key: ChoiceKey, batch: session_pb2.StepOutputs, times: RequestTimes) -> None:
        """A token of a choice was added to the last output of `batch`; all but its first are accepted ones."""
        message = self._messages.get(key)
        if message is None:
            drafted_tokens = self._drafted.get(key, 0)
            self._messages[key] = batch.drafts.add(
                output=len(batch.outputs) - 1, drafted_tokens=drafted_tokens, saved_ms=-self._longer_ms
            )
            times.drafted_tokens += drafted_tokens
        else:
            message.accepted_tokens += 1
            message.saved_ms += self._plain_ms
            times.accepted_tokens += 1

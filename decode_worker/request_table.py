"""Table of a decode worker's open answers, and adoption of answers by another router.

Does no I/O.
"""

import logging
import time
from collections.abc import Callable, Iterator

from baton.decode_worker.answer import Answer
from baton.decode_worker.retained import EndedOutputs, RetainedBounds, RetainedChoice, RetainedOutputs
from baton.protos import session_pb2
from baton.worker.request import AttemptKey, Link, RequestTable
from baton.worker.wire import END_REASONS, add_logprobs

logger = logging.getLogger(__name__)
PIECE_TOKENS = 512  # maximum tokens per output: alternatives of each token can make an output large
Send = Callable[[Link, session_pb2.ConnectResponse], None]
SendFailed = Callable[[Link, int, "session_pb2.FailureReason", str], None]


class AnswerTable(RequestTable[Answer]):
    """Open answers by request id and by attempt, and finished answers that can still be adopted."""

    def __init__(self, grace_s: float, bounds: RetainedBounds) -> None:
        """Create a table. `grace_s`: time for which a finished answer can be adopted."""
        super().__init__()
        self.ended: EndedOutputs[AttemptKey] = EndedOutputs(grace_s, bounds)

    def keep(self, answer: Answer, now: float) -> None:
        """Retain a finished answer, which can be adopted for the grace period."""
        self.ended.keep(answer.key, answer.retained, now)

    def move(self, answer: Answer, link: Link, attempt_id: int) -> None:
        """Assign an answer to another router or attempt id."""
        self.forget(answer)
        answer.adopt(link, attempt_id)
        self.add(answer)

    def move_ended(self, old: AttemptKey, new: AttemptKey, now: float) -> RetainedOutputs | None:
        retained = self.ended.take(old, now)
        if retained is not None:
            self.ended.keep(new, retained, now)  # stays adoptable, because the adopting router may die, too
        return retained


class Adoptions:
    """Moves answers to another router that adopts them, and sends it the tokens generated so far."""

    def __init__(self, table: AnswerTable, send: Send, send_failed: SendFailed) -> None:
        self._table = table
        self._send = send
        self._send_failed = send_failed

    def adopt(self, link: Link, command: session_pb2.Adopt) -> Answer | None:
        """Move an answer to the router at `link` and send it the tokens so far. Return the answer; None if not open."""
        old = AttemptKey(command.router_id, command.attempt_id)
        new = AttemptKey(link.router_id, command.as_attempt_id)
        if self._table.of_attempt(new) is not None:
            logger.error("duplicate attempt id %d from a router; the second command is dropped", new.attempt_id)
            return None
        answer = self._table.of_attempt(old)
        if answer is None:
            retained = self._table.move_ended(old, new, time.monotonic())
            if retained is None:
                reason = session_pb2.FAILURE_REASON_UNKNOWN_ATTEMPT
                self._send_failed(link, new.attempt_id, reason, "the decode worker does not have that answer")
            else:
                self.send_again(link, new.attempt_id, retained)
            return None
        earlier = answer.link
        self._table.move(answer, link, new.attempt_id)
        reason = session_pb2.FAILURE_REASON_ADOPTED
        self._send_failed(earlier, old.attempt_id, reason, "another router adopted the request")
        self.send_again(link, new.attempt_id, answer.retained)
        return answer

    def send_again(self, link: Link, attempt_id: int, retained: RetainedOutputs) -> None:
        for output in sent_again(retained, attempt_id):
            outputs = session_pb2.StepOutputs(outputs=[output])
            self._send(link, session_pb2.ConnectResponse(step_outputs=outputs))


def sent_again(retained: RetainedOutputs, attempt_id: int) -> Iterator[session_pb2.SequenceOutput]:
    """Yield outputs with all retained tokens, by choice. Tokens of earlier attempts have no log-probabilities."""
    for choice, made in retained.choices.items():
        if retained.answered:
            yield session_pb2.SequenceOutput(attempt_id=attempt_id, choice=choice, token_ids=retained.answered)
        for start in range(0, len(made.token_ids), PIECE_TOKENS):
            output = _piece(made, start)
            output.attempt_id, output.choice, output.offset = attempt_id, choice, len(retained.answered) + start
            yield output


def _piece(made: RetainedChoice, start: int) -> session_pb2.SequenceOutput:
    stop = start + PIECE_TOKENS
    is_last = stop >= len(made.token_ids)
    output = session_pb2.SequenceOutput(
        token_ids=made.token_ids[start:stop], end=END_REASONS[made.end if is_last else None]
    )
    for token in made.logged[start:stop]:
        add_logprobs(output, token)
    return output

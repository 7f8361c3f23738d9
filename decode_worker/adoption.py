"""Answers that a router takes over from another one: it is sent all of their tokens, in pieces. Does no I/O."""

import logging
import time
from collections.abc import Callable, Iterator

from decode_worker.answer import Answer, Session
from decode_worker.book import AnswerBook, AttemptKey
from decode_worker.kept import KeptAnswer, KeptChoice
from protos import session_pb2
from worker.wire import END_REASONS, add_logprobs

logger = logging.getLogger(__name__)
PIECE_TOKENS = 512  # of an output; each token may come with the likeliest ones in its place
Send = Callable[[Session, session_pb2.ConnectResponse], None]


class Adoptions:
    def __init__(self, book: AnswerBook, send: Send) -> None:
        self._book = book
        self._send = send

    def adopt(self, session: Session, command: session_pb2.Adopt) -> Answer | None:
        """Moves an answer to `session`, which is sent its tokens so far. None where it is not open, or not here."""
        old = AttemptKey(command.router_id, command.attempt_id)
        new = AttemptKey(session.router_id, command.as_attempt_id)
        if self._book.of_attempt(new) is not None:
            logger.error("a router sent attempt %d twice; the second is dropped", new.attempt_id)
            return None
        answer = self._book.of_attempt(old)
        if answer is None:
            kept = self._book.move_ended(old, new, time.monotonic())
            if kept is None:
                reason = session_pb2.FAILURE_REASON_UNKNOWN_ATTEMPT
                self._send_failed(session, new.attempt_id, reason, "the decode worker does not have that answer")
            else:
                self.tell_again(session, new.attempt_id, kept)
            return None
        earlier = answer.session
        self._book.move(answer, session, new.attempt_id)
        reason = session_pb2.FAILURE_REASON_ADOPTED
        self._send_failed(earlier, old.attempt_id, reason, "another router goes on with it")
        self.tell_again(session, new.attempt_id, answer.kept)
        return answer

    def tell_again(self, session: Session, attempt_id: int, kept: KeptAnswer) -> None:
        for output in told_again(kept, attempt_id):
            outputs = session_pb2.StepOutputs(outputs=[output])
            self._send(session, session_pb2.ConnectResponse(step_outputs=outputs))

    def _send_failed(
        self, session: Session, attempt_id: int, reason: "session_pb2.FailureReason", message: str
    ) -> None:
        failed = session_pb2.Failed(attempt_id=attempt_id, reason=reason, message=message)
        self._send(session, session_pb2.ConnectResponse(failed=failed))


def told_again(kept: KeptAnswer, attempt_id: int) -> Iterator[session_pb2.SequenceOutput]:
    """From offset 0 on, choice by choice. The tokens of an earlier attempt come without log-probabilities."""
    for choice, made in kept.choices.items():
        if kept.answered:
            yield session_pb2.SequenceOutput(attempt_id=attempt_id, choice=choice, token_ids=kept.answered)
        for start in range(0, len(made.token_ids), PIECE_TOKENS):
            output = _piece(made, start)
            output.attempt_id, output.choice, output.offset = attempt_id, choice, len(kept.answered) + start
            yield output


def _piece(made: KeptChoice, start: int) -> session_pb2.SequenceOutput:
    stop = start + PIECE_TOKENS
    is_last = stop >= len(made.token_ids)
    output = session_pb2.SequenceOutput(
        token_ids=made.token_ids[start:stop], end=END_REASONS[made.end if is_last else None]
    )
    for token in made.logged[start:stop]:
        add_logprobs(output, token)
    return output

"""Every answer that is open on a decode worker, by its own number and by its router's; and those that ended lately.

Does no I/O.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from decode_worker.answer import Answer, Session
from decode_worker.kept import EndedAnswers, KeptAnswer, KeptBounds


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """A router numbers its attempts; two routers may use the same number."""

    router_id: bytes
    attempt_id: int


def key_of(answer: Answer) -> AttemptKey:
    return AttemptKey(answer.session.router_id, answer.attempt_id)


class AnswerBook:
    def __init__(self, grace_s: float, bounds: KeptBounds) -> None:
        """`grace_s`: how long an answer that has ended can be asked for again."""
        self._answers: dict[int, Answer] = {}
        self._by_attempt: dict[AttemptKey, Answer] = {}
        self.ended: EndedAnswers[AttemptKey] = EndedAnswers(grace_s, bounds)

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[Answer]:
        """The book may change meanwhile."""
        return iter(tuple(self._answers.values()))

    def __contains__(self, answer: Answer) -> bool:
        return answer.request_id in self._answers

    def add(self, answer: Answer) -> None:
        self._answers[answer.request_id] = answer
        self._by_attempt[key_of(answer)] = answer

    def get(self, request_id: int) -> Answer | None:
        return self._answers.get(request_id)

    def of_attempt(self, key: AttemptKey) -> Answer | None:
        return self._by_attempt.get(key)

    def forget(self, answer: Answer) -> None:
        """Also an answer that is not here any more."""
        if self._answers.pop(answer.request_id, None) is not None:
            del self._by_attempt[key_of(answer)]

    def keep(self, answer: Answer, now: float) -> None:
        """Of an answer that has ended: it can be adopted for a while."""
        self.ended.keep(key_of(answer), answer.kept, now)

    def move(self, answer: Answer, session: Session, attempt_id: int) -> None:
        """To another router, or to another number of the same one."""
        del self._by_attempt[key_of(answer)]
        answer.adopt(session, attempt_id)
        self._by_attempt[key_of(answer)] = answer

    def move_ended(self, old: AttemptKey, new: AttemptKey, now: float) -> KeptAnswer | None:
        kept = self.ended.take(old, now)
        if kept is not None:
            self.ended.keep(new, kept, now)  # its new router may die as well
        return kept

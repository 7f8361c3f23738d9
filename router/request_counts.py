"""Counts of this router's requests since it started, running ones included. Pure.

started = the sum of all that have ended + running, at any moment.
"""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from router.outcomes import Outcome, RequestEnd
from router.request_record import RequestRecord


class RequestCounts:
    """Of requests, by how they ended; of tokens, by model. Tokens count as they come, not at the end."""

    def __init__(self) -> None:
        self.started = 0
        self._running: dict[RequestRecord, None] = {}
        self._ended: Counter[tuple[Outcome, str]] = Counter()
        self._prompt_tokens: Counter[str] = Counter()  # of requests that have ended
        self._generated_tokens: Counter[str] = Counter()

    def begin(self, record: RequestRecord) -> None:
        self.started += 1
        self._running[record] = None

    def end(self, record: RequestRecord, end: RequestEnd) -> None:
        """Raises: KeyError for one that does not run."""
        del self._running[record]
        self._ended[end.outcome, end.reason] += 1
        self._prompt_tokens[record.model] += record.prompt_tokens
        self._generated_tokens[record.model] += record.completion_tokens

    def refuse(self, end: RequestEnd) -> None:
        """A call that was refused before there was a request."""
        self.started += 1
        self._ended[end.outcome, end.reason] += 1

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def ended(self) -> Mapping[tuple[Outcome, str], int]:
        """By outcome and reason."""
        return MappingProxyType(self._ended)

    @property
    def prompt_tokens(self) -> Counter[str]:
        """Of prompts that a worker was given. A resumed stream adds none: its prompt counted when it began."""
        return self._prompt_tokens + _sum({record: record.prompt_tokens for record in self._running})

    @property
    def generated_tokens(self) -> Counter[str]:
        """Tokens that went out; of an answer that is sent only at its end, tokens that were made."""
        return self._generated_tokens + _sum({record: record.completion_tokens for record in self._running})


def _sum(tokens: Mapping[RequestRecord, int]) -> Counter[str]:
    by_model: Counter[str] = Counter()
    for record, count in tokens.items():
        by_model[record.model] += count
    return by_model

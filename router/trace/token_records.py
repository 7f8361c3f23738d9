"""Token ids of the newest requests, for `baton replay --model`. Kept only if the operator asks for them."""

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.router.trace.record import RequestRecord
from baton.router.types.plain import to_plain
from baton.router.types.request import Sampling

OTHER_BYTES = 2048  # memory of a record without its tokens, about


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Token ids of one request, and its sampling parameters. `answers`: released tokens of each generated choice."""

    request_id: str
    prompt: Sequence[int]
    answers: Sequence[Sequence[int]]
    sampling: Sampling

    @property
    def bytes(self) -> int:
        return OTHER_BYTES + sum(4 * len(tokens) for tokens in (self.prompt, *self.answers))

    def plain(self) -> Mapping[str, Any]:
        """Return the record as JSON values."""
        answers = [list(answer) for answer in self.answers]
        return {"prompt": list(self.prompt), "answers": answers, "sampling": to_plain(self.sampling)}


class TokenRecords:
    """Records of the newest completed requests, of at most `most_bytes` together."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._records: deque[TokenRecord] = deque()
        self._bytes = 0

    def observe(self, record: RequestRecord) -> None:
        """Keep the tokens of a completed request."""
        prepared, released = record.prepared, record.released
        if prepared is None or released is None or not self._most_bytes:
            return
        answers = [array("I", answer) for answer in released()]
        self._records.append(
            TokenRecord(prepared.request_id, array("I", prepared.token_ids), answers, prepared.sampling)
        )
        self._bytes += self._records[-1].bytes
        while self._bytes > self._most_bytes:
            self._bytes -= self._records.popleft().bytes

    def find(self, request_id: str) -> TokenRecord | None:
        """Return the newest record with this id; None if there is none."""
        return next((each for each in reversed(self._records) if each.request_id == request_id), None)

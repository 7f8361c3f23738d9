"""Token ids of the newest requests, for `baton replay --model`. Kept only if the operator asks for them."""

from array import array
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
        self._records: dict[tuple[str, str], TokenRecord] = {}  # by request id and trace id, oldest first
        self._bytes = 0

    def observe(self, record: RequestRecord) -> None:
        """Keep the tokens of a completed request."""
        prepared, released = record.prepared, record.released
        if prepared is None or released is None or not self._most_bytes:
            return
        answers = [array("I", answer) for answer in released()]
        kept = TokenRecord(array("I", prepared.token_ids), answers, prepared.sampling)
        key = prepared.request_id, record.identity.trace_id
        if (older := self._records.pop(key, None)) is not None:
            self._bytes -= older.bytes
        self._records[key] = kept
        self._bytes += kept.bytes
        while self._bytes > self._most_bytes:
            self._bytes -= self._records.pop(next(iter(self._records))).bytes

    def find(self, request_id: str, trace_id: str) -> TokenRecord | None:
        """Return the newest record with these ids; None if there is none."""
        return self._records.get((request_id, trace_id))

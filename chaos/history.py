"""What one client saw of one stream, with times. Plain values: written by load.py, judged by checker.py."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum


class Behaviour(StrEnum):
    """What a client does with its stream."""

    READS = "reads"
    SLOW = "slow"  # takes its time between events
    CANCELS = "cancels"  # goes away on purpose


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one choice that came together."""

    at_s: float  # monotonic, as all times here
    choice: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] = ()  # of these tokens; none where they were not asked for


@dataclass(frozen=True, slots=True)
class End:
    at_s: float
    choice: int
    reason: str
    matched_stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One placement of the request, as the router explains it afterwards."""

    prefill: str  # worker ids; empty where none was chosen
    decode: str
    failure: str  # empty for the attempt that held


@dataclass(slots=True)
class History:
    """One stream. `closed_s` is None while it is open: after a run that is a hang."""

    number: int
    case: str
    behaviour: Behaviour
    request_id: str
    began_s: float
    starts: int = 0
    pieces: list[Piece] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    closed_s: float | None = None
    failure: str | None = None  # status and reason the stream ended with; None: OK, or given up by the client
    attempts: list[Attempt] = field(default_factory=list)
    packed_times: "array[float] | None" = None
    packed_tokens: int = 0

    @property
    def token_times(self) -> list[float]:
        """When something came, in order."""
        if self.packed_times is not None:
            return self.packed_times.tolist()
        return [piece.at_s for piece in self.pieces]

    @property
    def tokens(self) -> int:
        return self.packed_tokens + sum(len(piece.token_ids) for piece in self.pieces)

    def pack(self) -> None:
        """Keeps times and counts alone: what was said has been judged."""
        self.packed_times, self.packed_tokens = array("d", self.token_times), self.tokens
        self.pieces = []

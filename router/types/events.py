"""Events that workers send about one attempt at a request. Plain values, no protobuf."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from baton.text.causes import CausePart


class SequenceEnd(Enum):
    """Reason why a sequence ended on a worker."""

    STOP = auto()  # a stop token, which is the last token
    LENGTH = auto()


class FailureReason(Enum):
    INVALID = auto()
    TRANSFER = auto()
    NONFINITE = auto()
    DEADLINE = auto()
    DRAINING = auto()
    NO_ROOM = auto()
    ADOPTED = auto()  # another router continues the answer
    UNKNOWN_ATTEMPT = auto()  # the worker does not have the answer to be adopted
    CORRUPT = auto()  # the checksum of transferred KV differs from its source's
    UNKNOWN = auto()  # a reason of a newer release, or none
    WORKER_LOST = auto()  # reported by the router's own link, never by a worker
    WORKER_DIED = auto()  # reported by the router's own link: the process is gone


class Alternative(NamedTuple):
    token_id: int
    logprob: float


class TokenLogprob(NamedTuple):
    """Log-probability of a token, and the alternatives at its position, likeliest first."""

    logprob: float
    top: tuple[Alternative, ...]


class WorkerGap(NamedTuple):
    """Gap between two tokens on the worker: the sum of `usual_ms` and the causes."""

    usual_ms: float
    causes: tuple[CausePart, ...]  # longest first


class Drafts(NamedTuple):
    """Effect of speculative decoding on an answer, by its own drafts and those of others in its steps."""

    drafted_tokens: int = 0  # drafted for this answer
    accepted_tokens: int = 0  # drafted and accepted
    saved_ms: float = 0.0  # estimated by the worker; negative: drafts delayed its tokens

    def plus(self, other: "Drafts") -> "Drafts":
        return Drafts(
            self.drafted_tokens + other.drafted_tokens,
            self.accepted_tokens + other.accepted_tokens,
            self.saved_ms + other.saved_ms,
        )

    @property
    def happened(self) -> bool:
        return self != NO_DRAFTS


NO_DRAFTS = Drafts()


class Made(NamedTuple):
    """Generation of a token on its worker. Only differences of `at_us` (microseconds) in one epoch are meaningful."""

    at_us: int
    held_us: int  # time from generation to sending
    gap: WorkerGap | None = None  # gap before the token, if it was longer than usual
    held: tuple[CausePart, ...] = ()  # causes of a long `held_us`
    since: tuple[CausePart, ...] = ()  # delays of the worker since the previous token was sent
    drafts: Drafts = NO_DRAFTS


class SequenceOutput(NamedTuple):
    """Tokens of one choice; `offset`: position of the first one within the answer.

    `logprobs` has one entry per token, or none if they were not requested. `made`: None for a repeated output.
    """

    attempt_id: int
    choice: int
    offset: int
    token_ids: tuple[int, ...]
    end: SequenceEnd | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    made: Made | None = None


@dataclass(frozen=True, slots=True)
class PrefillTimings:
    queue_ms: float
    chunk_ms: tuple[float, ...]
    total_ms: float  # from the arrival of the command to the sending of the first step
    cached_tokens: int  # fetched and restored tokens included
    fetch_ms: float = 0.0  # part of queue_ms, even if the fetch failed
    fetched_tokens: int = 0
    fetch_bytes: int = 0
    fetch_transport: str = ""
    restore_ms: float = 0.0  # part of queue_ms for loading from files
    restored_tokens: int = 0

    @property
    def found_tokens(self) -> int:
        """Return the tokens that were in the pool when the prompt arrived, which a router can predict."""
        return self.cached_tokens - self.fetched_tokens - self.restored_tokens


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt's tokens from `offset` on."""

    attempt_id: int
    offset: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class FirstStep:
    """First token of every choice, from prefill; or the vector of the prompt without tokens."""

    attempt_id: int
    outputs: tuple[SequenceOutput, ...]
    timings: PrefillTimings
    pooled: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class KvReceived:
    """Report of a decode worker on a finished KV transfer."""

    attempt_id: int
    transferred_bytes: int
    copy_ms: float
    exposed_ms: float
    admission_ms: float
    first_step_ms: float
    transport: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Failure of an attempt. `endpoint`: worker on which it failed."""

    attempt_id: int
    endpoint: str
    reason: FailureReason
    message: str


AttemptEvent = PromptScores | FirstStep | SequenceOutput | KvReceived | Failed


class NewTokens(NamedTuple):
    """Next released tokens of one choice; `logprobs` has one entry per token, or none."""

    choice: int
    offset: int
    token_ids: tuple[int, ...]
    end: SequenceEnd | None
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_token_id: int | None = None  # stop token that ended the choice, if it was released before

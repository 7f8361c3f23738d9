"""Events that workers send about one attempt at a request, as plain values without protobuf."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from baton.text.causes import CausePart


class SequenceEnd(Enum):
    """Reason why a worker completed a sequence."""

    STOP = auto()  # the last token is a stop token
    LENGTH = auto()


class FailureReason(Enum):
    INVALID = auto()
    TRANSFER = auto()
    NONFINITE = auto()
    DEADLINE = auto()
    DRAINING = auto()
    NO_ROOM = auto()
    ADOPTED = auto()  # another router has adopted the answer
    UNKNOWN_ATTEMPT = auto()  # the worker does not have the answer to be adopted
    CORRUPT = auto()  # transferred KV has another checksum than at the source
    UNKNOWN = auto()  # the worker gave no reason, or a reason that only newer releases know
    WORKER_LOST = auto()  # the router's link to the worker was lost; never sent by a worker
    WORKER_DIED = auto()  # the router found the worker's process gone; never sent by a worker


class Alternative(NamedTuple):
    token_id: int
    logprob: float


class TokenLogprob(NamedTuple):
    """Log-probability of a token. `top`: alternatives at the same position, likeliest first."""

    logprob: float
    top: tuple[Alternative, ...]


class WorkerGap(NamedTuple):
    """Time between two tokens of an answer on its worker, which is the sum of `usual_ms` and the causes."""

    usual_ms: float
    causes: tuple[CausePart, ...]  # longest first


class Drafts(NamedTuple):
    """Effect of speculative decoding on an answer, by its own drafts and those of other answers in the same steps."""

    drafted_tokens: int = 0  # number of tokens drafted for this answer
    accepted_tokens: int = 0  # number of drafted tokens that were accepted
    saved_ms: float = 0.0  # time saved, estimated by the worker; negative: drafts delayed the answer

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
    """Times of a token's generation on its worker. `at_us` (microseconds) is comparable within one worker epoch."""

    at_us: int
    held_us: int  # microseconds from generation to sending
    gap: WorkerGap | None = None  # time since the previous token, if longer than usual
    held: tuple[CausePart, ...] = ()  # causes of a long `held_us`
    since: tuple[CausePart, ...] = ()  # causes of delays of the worker since it sent the previous token
    drafts: Drafts = NO_DRAFTS

    @property
    def sent_s(self) -> float:
        """Time of sending, in seconds of the worker's clock."""
        return (self.at_us + self.held_us) / 1e6


class SequenceOutput(NamedTuple):
    """Tokens of one choice. `offset`: position of the first of them within the answer.

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
    cached_tokens: int  # tokens that were not computed, including fetched and restored tokens
    fetch_ms: float = 0.0  # part of queue_ms for fetching from another worker, even if it failed
    fetched_tokens: int = 0
    fetch_bytes: int = 0
    fetch_transport: str = ""
    restore_ms: float = 0.0  # part of queue_ms for loading from files
    restored_tokens: int = 0

    @property
    def found_tokens(self) -> int:
        """Number of prompt tokens that were in the pool when the prompt arrived. The router predicts this number."""
        return self.cached_tokens - self.fetched_tokens - self.restored_tokens


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens, beginning at the token `offset`."""

    attempt_id: int
    offset: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class FirstStep:
    """Result of a computed prompt: the first token of every choice; for an embedding, the vector and no tokens."""

    attempt_id: int
    outputs: tuple[SequenceOutput, ...]
    timings: PrefillTimings
    pooled: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class KvReceived:
    """Report of a decode worker on a completed KV transfer."""

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
    """Next released tokens of one choice. `logprobs` has one entry per token, or is empty if not requested."""

    choice: int
    offset: int
    token_ids: tuple[int, ...]
    end: SequenceEnd | None
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_token_id: int | None = None  # stop token that ended the choice, if it is not among token_ids

"""The events that workers send about one attempt at a request. Plain values, no protobuf."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from baton.text.causes import CausePart


class SequenceEnd(Enum):
    """Reason why a sequence ended on a worker."""

    STOP = auto()  # one of the stop token ids; it is the last token
    LENGTH = auto()


class FailureReason(Enum):
    INVALID = auto()
    TRANSFER = auto()
    NONFINITE = auto()
    DEADLINE = auto()
    DRAINING = auto()
    NO_ROOM = auto()
    ADOPTED = auto()  # another router continues the answer
    UNKNOWN_ATTEMPT = auto()  # an answer that was to be adopted is not kept there
    CORRUPT = auto()  # KV that was read differs from its source's
    UNKNOWN = auto()  # a newer worker's reason, or none
    WORKER_LOST = auto()  # this and the next come from the router's own session, never from a worker
    WORKER_DIED = auto()  # its process is gone


class Alternative(NamedTuple):
    token_id: int
    logprob: float


class TokenLogprob(NamedTuple):
    """The log-probability of a token of the answer, and the likeliest in its place, likeliest first."""

    logprob: float
    top: tuple[Alternative, ...]


class WorkerGap(NamedTuple):
    """Gap between two tokens on the worker: `usual_ms` and the causes add up to it."""

    usual_ms: float
    causes: tuple[CausePart, ...]  # longest first


class Drafts(NamedTuple):
    """Time that an answer spent in steps with drafted tokens, its own or those of others."""

    drafted_tokens: int = 0  # of this answer
    accepted_tokens: int = 0  # of those, the ones that were drawn
    saved_ms: float = 0.0  # as far as the worker knows; negative: its tokens came later than without drafts

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
    """Time at which a worker generated a token, in microseconds; of `at_us` only differences within one epoch are
    meaningful.
    """

    at_us: int
    held_us: int  # from then until it was sent
    gap: WorkerGap | None = None  # since the token before, where that took longer than usual
    held: tuple[CausePart, ...] = ()  # the parts of `held_us`, where that is long
    since: tuple[CausePart, ...] = ()  # of the worker, since the token before: that may have left so much later
    drafts: Drafts = NO_DRAFTS


class SequenceOutput(NamedTuple):
    """Tokens of one choice; `offset` is the position of the first of them within the answer.

    `logprobs` has one entry per token, or none if they were not asked for. `made`: None where it was made earlier.
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
    cached_tokens: int  # fetched and restored ones included
    fetch_ms: float = 0.0  # a part of queue_ms, also where nothing came of it
    fetched_tokens: int = 0
    fetch_bytes: int = 0
    fetch_transport: str = ""
    restore_ms: float = 0.0  # loading from files; a part of queue_ms too
    restored_tokens: int = 0

    @property
    def found_tokens(self) -> int:
        """Return the tokens that were in the pool when the prompt arrived: what a router could know of."""
        return self.cached_tokens - self.fetched_tokens - self.restored_tokens


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt's tokens from `offset` on, from the worker that computes it."""

    attempt_id: int
    offset: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class FirstStep:
    """First token of every choice, from prefill; or the vector of the prompt, and no token."""

    attempt_id: int
    outputs: tuple[SequenceOutput, ...]
    timings: PrefillTimings
    pooled: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class KvReceived:
    """Report of decode on how the KV was transferred."""

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
    """The attempt ended without an answer. `endpoint` is the worker that it failed on."""

    attempt_id: int
    endpoint: str
    reason: FailureReason
    message: str


AttemptEvent = PromptScores | FirstStep | SequenceOutput | KvReceived | Failed


class NewTokens(NamedTuple):
    """Tokens of one choice that follow those released before; `logprobs` has one entry for each, or none."""

    choice: int
    offset: int
    token_ids: tuple[int, ...]
    end: SequenceEnd | None
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_token_id: int | None = None  # where the end is one, and was released before

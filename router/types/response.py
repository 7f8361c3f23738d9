"""The response to a client, in plain types: one Started, PromptParts, Deltas, one Finished per choice. No protobuf."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from baton.process.errors import Aborted
from baton.router.types.events import TokenLogprob

TOKEN_CHARACTERS = 32
_VERSION_CHARACTERS = 8  # of them, the first; the others are random


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of the prompt from `offset` on. `logprobs` has one entry per token, or none."""

    offset: int
    token_ids: tuple[int, ...]
    text: str = ""  # of the whole prompt, with the first part
    logprobs: tuple[TokenLogprob, ...] = ()


class FinishReason(Enum):
    STOP = auto()
    LENGTH = auto()


@dataclass(slots=True)
class Delta:
    """New tokens of one choice; `offset` is the position of the first of them. The text may lag the tokens.

    It never changes; it is not frozen because that takes twice as long to make, and nearly every token has one.
    `logprobs` has one entry per token, or none if they were not asked for.
    """

    index: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The end of one choice. At most one of `stop_text` and `stop_token_id` is set."""

    index: int
    reason: FinishReason
    stop_text: str | None = None
    stop_token_id: int | None = None


AnswerEvent = Delta | ChoiceFinished


@dataclass(frozen=True, slots=True)
class Stages:
    """Durations of one request in milliseconds; 0 for a stage that it did not come to."""

    ttft_ms: float
    total_ms: float
    router_queue_ms: float
    route_ms: float
    prefill_fetch_ms: float  # KV that prefill fetched from another worker, or tried to
    prefill_queue_ms: float
    prefill_ms: float
    return_ms: float  # to the prompt's worker and back, and from its answer until the first token went out
    transfer_exposed_ms: float
    decode_admission_ms: float
    first_step_ms: float
    recovery_ms: float  # from the first token's arrival until another attempt had made it again
    token_gap_ms: float  # from token 1 to token 2, as they arrived


class AnswerId(StrEnum):
    CHAT = "chatcmpl-"
    COMPLETION = "cmpl-"
    RESPONSE = "resp_"
    MESSAGE = "msg_"


def bare_id(given: str) -> str:
    """The request's own id."""
    return next((given.removeprefix(each) for each in AnswerId if given.startswith(each)), given)


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    prompt_token_ids: tuple[int, ...] = ()
    resume_token: str = ""  # empty: over this transport a stream is not resumed
    version: str = ""  # of the weights, see ChosenModel


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    stages: Stages
    transfer_bytes: int
    transport: str
    prefill_pid: int
    decode_pid: int


@dataclass(frozen=True, slots=True)
class Summary:
    usage: Usage
    timings: Timings
    pooled: tuple[float, ...] = ()  # the vector, where the prompt was computed for one
    version: str = ""  # of the weights, see ChosenModel


def one_version(versions: Iterable[str]) -> str:
    """Return the version of the weights that answered one call. Raises: Aborted if they were replaced meanwhile."""
    first, *others = sorted(set(versions))
    if others:
        raise Aborted("the model's weights were replaced between the prompts of this call", "MODEL_REPLACED")
    return first


@dataclass(frozen=True, slots=True)
class Finished:
    """End of a choice. `summary` only on the last one of the stream."""

    choice: ChoiceFinished
    summary: Summary | None


ResponseEvent = Started | PromptPart | Delta | Finished


def resume_token(version: str) -> str:
    """A new one, of a stream whose answer is made by weights of this version."""
    begin = version[:_VERSION_CHARACTERS]
    return begin + secrets.token_hex(TOKEN_CHARACTERS)[len(begin) : TOKEN_CHARACTERS]


def is_of_version(token: str, version: str) -> bool:
    return token[:_VERSION_CHARACTERS] == version[:_VERSION_CHARACTERS]

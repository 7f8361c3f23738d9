"""Response to a client: one Started, PromptParts, Deltas, one Finished per choice. Plain values, no protobuf."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from baton.process.errors import Aborted
from baton.router.types.events import TokenLogprob

TOKEN_CHARACTERS = 32
_VERSION_CHARACTERS = 8  # first characters, which identify the weights; the others are random


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt tokens from `offset` on. `logprobs` has one entry per token, or none."""

    offset: int
    token_ids: tuple[int, ...]
    text: str = ""  # text of the complete prompt; only in the first part
    logprobs: tuple[TokenLogprob, ...] = ()


class FinishReason(Enum):
    STOP = auto()
    LENGTH = auto()


@dataclass(slots=True)
class Delta:
    """New tokens of one choice; `offset`: position of the first one. The text may lag behind the tokens.

    `logprobs` has one entry per token, or none if they were not requested. Treat it as immutable: it is not frozen
    because constructing a frozen one takes twice as long, for nearly every token.
    """

    index: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """End of one choice. At most one of `stop_text` and `stop_token_id` is set."""

    index: int
    reason: FinishReason
    stop_text: str | None = None
    stop_token_id: int | None = None


AnswerEvent = Delta | ChoiceFinished


@dataclass(frozen=True, slots=True)
class Stages:
    """Durations of one request's stages in milliseconds; 0 for a stage that it did not reach."""

    ttft_ms: float
    total_ms: float
    router_queue_ms: float
    route_ms: float
    prefill_fetch_ms: float  # fetching of cached KV from another worker, even if it failed
    prefill_queue_ms: float
    prefill_ms: float
    return_ms: float  # network to the prefill worker and back, and delivery of the first token
    transfer_exposed_ms: float
    decode_admission_ms: float
    first_step_ms: float
    recovery_ms: float  # from the first token until another attempt had generated it again
    token_gap_ms: float  # from the arrival of token 1 to that of token 2


class AnswerId(StrEnum):
    """Prefix of a response id, by API."""

    CHAT = "chatcmpl-"
    COMPLETION = "cmpl-"
    RESPONSE = "resp_"
    MESSAGE = "msg_"


def bare_id(given: str) -> str:
    """Return the request id without an API's prefix."""
    return next((given.removeprefix(each) for each in AnswerId if given.startswith(each)), given)


@dataclass(frozen=True, slots=True)
class Started:
    """Beginning of a stream."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    prompt_token_ids: tuple[int, ...] = ()
    resume_token: str = ""  # empty: the transport cannot resume streams
    version: str = ""  # version of the weights, see ChosenModel


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens, summed over all choices."""

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
    pooled: tuple[float, ...] = ()  # vector of a pooled request
    version: str = ""  # version of the weights, see ChosenModel


def one_version(versions: Iterable[str]) -> str:
    """Return the version of the weights that answered one call. Raises: Aborted if they were replaced meanwhile."""
    first, *others = sorted(set(versions))
    if others:
        raise Aborted("the weights were replaced between the prompts of this call; send it again", "MODEL_REPLACED")
    return first


@dataclass(frozen=True, slots=True)
class Finished:
    """End of a choice. `summary`: only with the last choice of the stream."""

    choice: ChoiceFinished
    summary: Summary | None


ResponseEvent = Started | PromptPart | Delta | Finished


def resume_token(version: str) -> str:
    """Draw the resume token of a stream. Its first characters identify the version of the weights."""
    begin = version[:_VERSION_CHARACTERS]
    return begin + secrets.token_hex(TOKEN_CHARACTERS)[len(begin) : TOKEN_CHARACTERS]


def is_of_version(token: str, version: str) -> bool:
    return token[:_VERSION_CHARACTERS] == version[:_VERSION_CHARACTERS]

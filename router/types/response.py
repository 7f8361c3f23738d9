"""Events of a response: one Started, PromptParts, Deltas, one Finished per choice. Plain values without protobuf."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from baton.process.errors import Aborted
from baton.router.types.events import TokenLogprob

TOKEN_CHARACTERS = 32
_VERSION_CHARACTERS = 8  # number of first characters of a resume token, which identify the weights


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Part of an echoed prompt, beginning at the token `offset`. `logprobs` has one entry per token, or is empty."""

    offset: int
    token_ids: tuple[int, ...]
    text: str = ""  # in the first part: text of the complete prompt
    logprobs: tuple[TokenLogprob, ...] = ()


class FinishReason(Enum):
    STOP = auto()
    LENGTH = auto()


@dataclass(slots=True)
class Delta:
    """New tokens of one choice. `offset`: position of the first in the answer. The text may lag behind the tokens.

    `logprobs` has one entry per token, or none if they were not requested. Treat a delta as immutable. The class is
    not frozen because nearly every token constructs a delta, and a frozen one would take twice as long.
    """

    index: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """End of one choice of an answer. At most one of `stop_text` and `stop_token_id` is set."""

    index: int
    reason: FinishReason
    stop_text: str | None = None
    stop_token_id: int | None = None


AnswerEvent = Delta | ChoiceFinished


@dataclass(frozen=True, slots=True)
class Stages:
    """Durations of one request's stages in milliseconds; 0 for a stage that the request did not reach."""

    ttft_ms: float
    total_ms: float
    router_queue_ms: float
    route_ms: float
    prefill_fetch_ms: float  # fetch of cached KV from another worker, even if it failed
    prefill_queue_ms: float
    prefill_ms: float
    return_ms: float  # network time to the prefill worker and back, and delivery of the first token
    transfer_exposed_ms: float
    decode_admission_ms: float
    first_step_ms: float
    recovery_ms: float  # after failures: from the first token until another attempt generated it again
    token_gap_ms: float  # from the arrival of token 1 to that of token 2


class AnswerId(StrEnum):
    """Prefix of the response ids of each HTTP API."""

    CHAT = "chatcmpl-"
    COMPLETION = "cmpl-"
    RESPONSE = "resp_"
    MESSAGE = "msg_"


def bare_id(given: str) -> str:
    """Return the request id without an API's prefix."""
    return next((given.removeprefix(each) for each in AnswerId if given.startswith(each)), given)


@dataclass(frozen=True, slots=True)
class Started:
    """First event of a response."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    prompt_token_ids: tuple[int, ...] = ()
    resume_token: str = ""  # empty: the transport cannot resume streams
    version: str = ""  # version of the weights, see ChosenModel


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, summed over all choices."""

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
    pooled: tuple[float, ...] = ()  # vector that an embedding request returns
    version: str = ""  # version of the weights, see ChosenModel


def one_version(versions: Iterable[str]) -> str:
    """Return the version of the weights that answered a call's prompts. Raises: Aborted if there were several."""
    first, *others = sorted(set(versions))
    if others:
        raise Aborted("the weights were replaced between the prompts of this call; send it again", "MODEL_REPLACED")
    return first


@dataclass(frozen=True, slots=True)
class Finished:
    """End of a choice, as sent to the client. `summary`: only with the last choice of the stream."""

    choice: ChoiceFinished
    summary: Summary | None


ResponseEvent = Started | PromptPart | Delta | Finished


def resume_token(version: str) -> str:
    """Draw a random resume token for a stream. The first characters identify the version of the weights."""
    begin = version[:_VERSION_CHARACTERS]
    return begin + secrets.token_hex(TOKEN_CHARACTERS)[len(begin) : TOKEN_CHARACTERS]


def is_of_version(token: str, version: str) -> bool:
    return token[:_VERSION_CHARACTERS] == version[:_VERSION_CHARACTERS]

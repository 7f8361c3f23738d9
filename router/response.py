"""The response to a client, in plain types: one Started, PromptParts, Deltas, one Finished per choice. No protobuf."""

from dataclasses import dataclass

from router.answer import ChoiceFinished, Delta
from router.prompt_echo import PromptPart
from router.timeline import Stages


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    prompt_token_ids: tuple[int, ...] = ()
    resume_token: str = ""  # empty: over this transport a stream is not resumed


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


@dataclass(frozen=True, slots=True)
class Finished:
    """`summary` only on the last one of the stream."""

    choice: ChoiceFinished
    summary: Summary | None


ResponseEvent = Started | PromptPart | Delta | Finished

"""The client's types: plain frozen values, no protobuf."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token id or a stop text
    LENGTH = "length"  # max_tokens or the end of the context
    TOOL_CALLS = "tool_calls"  # as STOP, of an answer that calls functions


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of every answer."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int  # in effect, given or drawn by the server
    resume_token: str = field(default="", repr=False)  # with request_id: another router continues the answer by it
    model_version: str = ""  # of the weights that answer: equal ones are the same


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the likeliest tokens in a place, whether or not it was chosen."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer as the model itself saw it: before penalties, biases, temperature and filters."""

    token_id: int
    logprob: float  # natural logarithm of its probability
    top: tuple[Alternative, ...]  # the likeliest, likeliest first


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice. `offset` is where they begin in the answer; offsets of a choice are contiguous from 0.

    `text` may lag `token_ids`: incomplete characters and text that may begin a stop string are held back. `logprobs` is
    parallel to `token_ids` where they were asked for, and None where they were not.
    """

    index: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of the prompt from `offset` on, where `echo` or `prompt_logprobs` ask for them; before the first Delta.

    `text` is the whole prompt's, with the first part, where `echo` asks for it. `logprobs` is parallel to `token_ids`;
    None where they were not asked for, and for the first token of a prompt, which is a part by itself then.
    """

    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class ThoughtPart:
    """What one choice thinks, of a chat in parts. A Delta with its tokens came before it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The `call`-th call of one choice, from 0. Its arguments follow."""

    index: int
    call: int
    id: str
    name: str  # of the function


@dataclass(frozen=True, slots=True)
class CallPart:
    """The next part of the arguments of a call, which are JSON."""

    index: int
    call: int
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, taken from a cache
    reasoning_tokens: int | None = None  # of the completion, thoughts; None where the server does not say


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, as the server measured it. Each field is explained in protos/baton.proto."""

    ttft_ms: float
    total_ms: float
    router_queue_ms: float
    route_ms: float
    prefill_queue_ms: float
    prefill_ms: float
    return_ms: float
    transfer_exposed_ms: float
    decode_admission_ms: float
    first_step_ms: float
    transfer_bytes: int
    transport: str
    prefill_pid: int
    decode_pid: int
    prefill_fetch_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of one choice. Usage and timings come with the last of the stream."""

    index: int
    reason: FinishReason
    matched_stop: str | int | None = None  # the stop text, or the token id, that ended the answer
    usage: Usage | None = None
    timings: Timings | None = None


Event: TypeAlias = Started | PromptPart | Delta | ThoughtPart | CallBegins | CallPart | Finished


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: a JSON schema of its arguments; None: any object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for; `arguments` is JSON, as it wrote it."""

    id: str
    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name. Raises: ValueError where the model wrote no JSON object."""
        read = json.loads(self.arguments or "{}")
        if not isinstance(read, dict):
            raise ValueError(f"the arguments of {self.name} are no JSON object")
        return read

    def result(self, content: str) -> "Message":
        """The message that answers it."""
        return Message("tool", content, tool_call_id=self.id)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str  # "system", "user", "assistant", "tool", or another that the model's template knows
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # that the assistant asked for
    tool_call_id: str = ""  # of the call that it answers
    reasoning: str = ""  # what the assistant thought before it


@dataclass(frozen=True, slots=True)
class ToldPrompt:
    """The prompt as the server sent it back."""

    token_ids: tuple[int, ...]
    text: str  # empty without `echo`
    logprobs: tuple[TokenLogprob, ...] | None  # of all tokens but the first; None where they were not asked for


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    text: str  # with `echo` it begins with the prompt's
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None = None  # parallel to token_ids; None where they were not asked for
    thoughts: str = ""  # of a chat in parts
    calls: tuple[ToolCall, ...] = ()  # the same

    @property
    def message(self) -> Message:
        """As a turn of the conversation."""
        return Message("assistant", self.text, tool_calls=self.calls, reasoning=self.thoughts)


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `choices` is ordered by index and never empty."""

    request_id: str
    model: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    prompt: ToldPrompt | None = None  # where `echo` or `prompt_logprobs` ask for it

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Those of the first choice."""
        return self.choices[0].calls

    @property
    def thoughts(self) -> str:
        """Those of the first choice."""
        return self.choices[0].thoughts

    @property
    def message(self) -> Message:
        """The first choice as a turn of the conversation."""
        return self.choices[0].message


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector for each input, in order."""

    request_id: str
    model: str
    vectors: tuple[tuple[float, ...], ...]
    usage: Usage
    model_version: str = ""  # as `Started.model_version`


@dataclass(frozen=True, slots=True)
class Scores:
    """One for each document, in order: in [0, 1] of a reranker, in [-1, 1] of other models."""

    request_id: str
    model: str
    scores: tuple[float, ...]
    usage: Usage
    model_version: str = ""  # as `Started.model_version`


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    max_model_len: int  # longest prompt plus answer, in tokens
    vocab_size: int
    dtype: str  # that the model computes in: "float32" or "bfloat16"
    block_size: int  # tokens per KV block
    parent: str = ""  # of a LoRA adapter, which `model` chooses by its name: the model that it changes
    version: str = ""  # of the weights, as `Started.model_version`

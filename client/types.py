"""Public values of the client: frozen dataclasses without protobuf."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token id or a stop text
    LENGTH = "length"  # max_tokens or the end of the context
    TOOL_CALLS = "tool_calls"  # as STOP, but the answer calls functions


@dataclass(frozen=True, slots=True)
class Started:
    """First event of every answer."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int  # seed in effect, from the request or drawn by the server
    resume_token: str = field(default="", repr=False)  # with request_id, it permits resuming the answer
    model_version: str = ""  # version of the weights; equal versions mean equal weights


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the likeliest tokens at a position; it may be the chosen one."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token of the answer before penalties, biases, temperature and filters."""

    token_id: int
    logprob: float  # natural logarithm
    top: tuple[Alternative, ...]  # likeliest tokens, best first


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice. `offset` is their position in the answer; the offsets of a choice are contiguous from
    0.

    `text` may lag behind `token_ids`: incomplete characters and possible beginnings of a stop string are withheld.
    `logprobs` is parallel to `token_ids`, and None unless the request asks for it.
    """

    index: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of the prompt from `offset` on, for `echo` or `prompt_logprobs`. Parts precede the first Delta.

    With `echo`, `text` of the first part is the complete prompt. `logprobs` is parallel to `token_ids`, and None unless
    the request asks for it. The prompt's first token has no log-probability: with `logprobs`, it is a separate part.
    """

    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class ThoughtPart:
    """Reasoning text of one choice of a chat with `parts`. A Delta with its tokens precedes it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """Start of call number `call` of one choice, counted from 0. Its arguments follow."""

    index: int
    call: int
    id: str
    name: str  # name of the function


@dataclass(frozen=True, slots=True)
class CallPart:
    """Next part of the JSON arguments of a call."""

    index: int
    call: int
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # tokens of the prompt found in a prefix cache
    reasoning_tokens: int | None = None  # reasoning tokens of the completion; None if the server does not count them


@dataclass(frozen=True, slots=True)
class Timings:
    """Latency of a request by stage, measured by the server; protos/baton.proto explains each field."""

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
    """Last event of one choice. Usage and timings come with the last event of the stream."""

    index: int
    reason: FinishReason
    matched_stop: str | int | None = None  # stop string or token id that ended the answer
    usage: Usage | None = None
    timings: Timings | None = None


Event: TypeAlias = Started | PromptPart | Delta | ThoughtPart | CallBegins | CallPart | Finished


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: JSON schema of its arguments; None allows any object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for. `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        """Return the arguments by name. Raises: ValueError if the model wrote no JSON object."""
        read = json.loads(self.arguments or "{}")
        if not isinstance(read, dict):
            raise ValueError(f"arguments of {self.name}: not a JSON object")
        return read

    def result(self, content: str) -> "Message":
        """Return the message that answers the call."""
        return Message("tool", content, tool_call_id=self.id)


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a conversation."""

    role: str  # "system", "user", "assistant", "tool", or another role of the model's template
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # tool calls in an assistant message
    tool_call_id: str = ""  # id of the call that a tool message answers
    reasoning: str = ""  # reasoning in an assistant message


@dataclass(frozen=True, slots=True)
class ToldPrompt:
    """The prompt as the server echoed it."""

    token_ids: tuple[int, ...]
    text: str  # empty without `echo`
    logprobs: tuple[TokenLogprob, ...] | None  # for all tokens but the first; None unless requested


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    text: str  # text of the answer; with `echo`, the prompt precedes it
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token of token_ids; None unless requested
    thoughts: str = ""  # reasoning, in a chat with `parts`
    calls: tuple[ToolCall, ...] = ()  # tool calls, in a chat with `parts`

    @property
    def message(self) -> Message:
        """Return the choice as a turn of the conversation."""
        return Message("assistant", self.text, tool_calls=self.calls, reasoning=self.thoughts)


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete answer. `choices` is ordered by index and never empty."""

    request_id: str
    model: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    prompt: ToldPrompt | None = None  # None unless `echo` or `prompt_logprobs` asks for it

    @property
    def text(self) -> str:
        """Return the text of the first choice."""
        return self.choices[0].text

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Return the calls of the first choice."""
        return self.choices[0].calls

    @property
    def thoughts(self) -> str:
        """Return the reasoning of the first choice."""
        return self.choices[0].thoughts

    @property
    def message(self) -> Message:
        """Return the first choice as a turn of the conversation."""
        return self.choices[0].message


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors of the inputs, in order."""

    request_id: str
    model: str
    vectors: tuple[tuple[float, ...], ...]
    usage: Usage
    model_version: str = ""  # version of the weights; equal versions mean equal weights


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of the documents, in order: in [0, 1] from a reranker, in [-1, 1] from other models."""

    request_id: str
    model: str
    scores: tuple[float, ...]
    usage: Usage
    model_version: str = ""  # version of the weights; equal versions mean equal weights


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    max_model_len: int  # tokens of prompt and answer
    vocab_size: int
    dtype: str  # compute dtype: "float32" or "bfloat16"
    block_size: int  # tokens per KV block
    parent: str = ""  # base model, for a LoRA adapter
    version: str = ""  # version of the weights

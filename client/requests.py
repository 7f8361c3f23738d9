"""Options of a request, and conversion of a caller's arguments to protobuf requests.

A value that protobuf cannot represent is rejected here by field name. The server checks everything else.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypedDict, TypeVar

from google.protobuf.message import Message as ProtobufMessage

from baton.client.errors import ErrorDetails, InvalidRequest
from baton.client.types import Message, Tool, ToolCall
from baton.protos import baton_pb2


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `complete`, `chat` and `complete_chat`."""

    max_tokens: int  # per choice, at least 1
    temperature: float  # 0 is greedy
    top_k: int  # 0 keeps all tokens
    top_p: float  # in (0, 1]
    min_p: float  # in [0, 1]
    seed: int
    stop: str | Sequence[str]  # strings that end the answer; not part of it
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int  # choices, from 1 to 16
    typical_p: float  # in (0, 1]
    repetition_penalty: float  # applies to tokens in prompt and answer; in (0, 10], 1 has no effect
    presence_penalty: float  # applies to tokens in the answer; in [-2, 2], 0 has no effect
    frequency_penalty: float  # applies per occurrence in the answer; in [-2, 2], 0 has no effect
    logit_bias: Mapping[int, float]  # added to the logits, by token id; each in [-100, 100]
    min_tokens: int  # minimum tokens per choice; no stop condition ends an answer earlier
    allowed_token_ids: Sequence[int]  # only these tokens are generated
    bad_words: Sequence[str | Sequence[int]]  # never generated; strings or sequences of token ids
    logprobs: int  # report log-probabilities, and this number of likeliest alternatives; 0 to 20
    prompt_logprobs: int  # number of likeliest tokens to report per prompt token; bypasses the prefix cache
    echo: bool  # return the prompt too, and its log-probabilities if `logprobs` is set; not for chat
    best_of: int  # choices generated, n to 16; the n with the best mean log-probability are returned
    beam_width: int  # width of a beam search, n to 16; its n best sequences are the choices
    length_penalty: float  # beam search: values above 0 favour long answers
    early_stopping: bool | Literal["never"]  # beam search: when to stop, as in transformers
    json_schema: str | Mapping[str, Any]  # the answer is JSON that matches it; excludes the next four options
    json_object: bool  # the answer is a JSON object
    regex: str  # the complete answer matches it
    grammar: str  # Lark grammar of llguidance; the answer matches its rule `start`
    choice: Sequence[str]  # the answer is one of these strings
    speculative: Mapping[str, Any]  # {"method": "ngram", "draft_model" or "off", "num_speculative_tokens": 1 to 64}
    model: str  # name of the model or of an adapter; default: the model
    request_id: str  # appears in the server's traces and logs
    priority: int  # lower runs earlier if requests wait; -100 to 100
    ttft_slo_ms: float  # TTFT objective in milliseconds; default: the API key's or the service's
    tbt_slo_ms: float  # TBT objective in milliseconds; default: the API key's or the service's
    cache_salt: str  # prompts share cached blocks only with an equal salt
    session_id: str  # id of the conversation; its KV is kept longer than that of other prompts
    keep_for_s: float  # time for which KV is kept for the next turn; 0 to 86400
    done: bool  # last turn of the conversation; its KV may be evicted first
    api_key: str  # default: the client's
    timeout_s: float  # limit of the complete answer, retries included; default: the client's
    traceparent: str  # W3C trace context; the server's spans join it


class ChatOptions(GenerateOptions, total=False):
    """Additional keyword arguments of `chat` and `complete_chat`."""

    tools: Sequence[Tool | Mapping[str, Any]]  # functions that the model may call; mappings in OpenAI's format
    tool_choice: str  # "auto", "none", "required", or the name of the function to call
    parallel_tool_calls: bool  # False: the answer has at most one call
    parts: bool  # True: separate events for reasoning and tool calls; always with tools or thinking_budget
    enable_thinking: bool  # whether the model reasons first, if the chat template has this variable
    reasoning_effort: str  # reasoning effort, in the words of the model's chat template
    thinking_budget: int  # maximum of reasoning tokens
    include_reasoning: bool  # False: reasoning is generated but not sent
    chat_template_kwargs: Mapping[str, Any]  # variables for the model's template
    add_generation_prompt: bool  # False: the prompt ends with the last message


class VectorOptions(TypedDict, total=False):
    """Keyword arguments of `embed` and `score`."""

    model: str
    request_id: str
    cache_salt: str
    priority: int


STRUCTURED = ("json_schema", "json_object", "regex", "grammar", "choice")
SAMPLING_TOKEN_IDS = ("stop_token_ids", "allowed_token_ids")
REQUEST_SCALARS = (
    *("model", "request_id", "cache_salt", "priority", "ttft_slo_ms", "tbt_slo_ms"),
    *("session_id", "keep_for_s", "done"),
)
EARLY_STOPPING = {
    False: baton_pb2.EARLY_STOPPING_UNSPECIFIED,
    True: baton_pb2.EARLY_STOPPING_FULL,
    "never": baton_pb2.EARLY_STOPPING_NEVER,
}
CALL_OPTIONS = ("timeout_s", "traceparent", "api_key")


def generate_request(prompt: str | Sequence[int], options: GenerateOptions) -> baton_pb2.GenerateRequest:
    """Return the protobuf request. Raises: InvalidRequest, TypeError for an unknown option."""
    request = baton_pb2.GenerateRequest()
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    else:
        request.token_ids.SetInParent()  # an empty list is sent, and the server rejects it
        _extend(request.token_ids.ids, prompt, "token_ids")
    _apply(request, options)
    return request


def chat_request(messages: Sequence[Message | Mapping[str, Any]], options: ChatOptions) -> baton_pb2.ChatRequest:
    """Return the protobuf request. `messages`: Messages, or mappings in OpenAI's format.

    Raises: InvalidRequest, TypeError for an unknown option.
    """
    request = baton_pb2.ChatRequest()
    for position, given in enumerate(messages):
        message = given if isinstance(given, Message) else _message(given, position)
        added = request.messages.add()
        _set(added, "role", message.role, f"messages[{position}].role")
        _set(added, "content", message.content, f"messages[{position}].content")
        for name in ("name", "tool_call_id", "reasoning"):
            _set(added, name, getattr(message, name), f"messages[{position}].{name}")
        for place, call in enumerate(message.tool_calls):
            wire = added.tool_calls.add()
            for name in ("id", "name", "arguments"):
                _set(wire, name, getattr(call, name), f"messages[{position}].tool_calls[{place}].{name}")
    _apply(request, options)
    return request


def in_parts(request: baton_pb2.ChatRequest) -> bool:
    """Return whether the request asks for separate events for reasoning and tool calls."""
    return request.parts or bool(request.tools) or request.HasField("thinking_budget")


def embed_request(
    inputs: str | Sequence[str | Sequence[int]],
    dimensions: int | None,
    prompt_name: str | None,
    options: VectorOptions,
) -> baton_pb2.EmbedRequest:
    """Return the protobuf request. Raises: InvalidRequest, TypeError for an unknown option."""
    request = baton_pb2.EmbedRequest()
    for place, given in enumerate([inputs] if isinstance(inputs, str) else inputs):
        added = request.inputs.add()
        if isinstance(given, str):
            _set(added, "text", given, f"inputs[{place}].text")
        else:
            added.token_ids.SetInParent()
            _extend(added.token_ids.ids, given, f"inputs[{place}].token_ids")
    fields = {"dimensions": dimensions, "prompt_name": prompt_name}
    with_fields(request, {name: value for name, value in fields.items() if value is not None})
    return _with_vector_options(request, options)


def score_request(
    queries: str | Sequence[str], documents: Sequence[str], options: VectorOptions
) -> baton_pb2.ScoreRequest:
    """Return the protobuf request. Raises: InvalidRequest, TypeError for an unknown option."""
    given = {"queries": queries, "documents": documents}
    fields = {name: [texts] if isinstance(texts, str) else texts for name, texts in given.items()}
    return _with_vector_options(with_fields(baton_pb2.ScoreRequest(), fields), options)


Request = TypeVar("Request", bound=ProtobufMessage)


def with_fields(request: Request, fields: Mapping[str, object]) -> Request:
    """Return the request with these fields set. Raises: InvalidRequest, naming the field."""
    for name, value in fields.items():
        if request.DESCRIPTOR.fields_by_name[name].is_repeated:
            _extend(getattr(request, name), value, name)
        else:
            _set(request, name, value)
    return request


def _with_vector_options(request: Request, options: VectorOptions) -> Request:
    unknown = next((name for name in options if name not in VectorOptions.__annotations__), None)
    if unknown is not None:
        raise TypeError(f"unknown option {unknown!r}")
    return with_fields(request, options)


def choices(request: baton_pb2.GenerateRequest | baton_pb2.ChatRequest) -> int:
    """Return the number of choices that the request asks for."""
    return request.sampling.n if request.sampling.HasField("n") else 1


def _apply(request: baton_pb2.GenerateRequest | baton_pb2.ChatRequest, options: GenerateOptions | ChatOptions) -> None:
    sampling = request.sampling
    for name, value in options.items():
        if name in REQUEST_SCALARS:
            _set(request, name, value)
        elif name == "early_stopping":
            sampling.early_stopping = _early_stopping(value)
        elif name == "echo":
            _set_echo(request, value)
        elif name == "stop":
            _extend(sampling.stop, [value] if isinstance(value, str) else value, "sampling.stop")
        elif name in SAMPLING_TOKEN_IDS:
            _extend(getattr(sampling, name), value, f"sampling.{name}")
        elif name == "logit_bias":
            with _naming("sampling.logit_bias"):
                sampling.logit_bias.update(options["logit_bias"])
        elif name == "bad_words":
            _add_bad_words(sampling, options["bad_words"])
        elif name in STRUCTURED:
            _set_structured(sampling, name, value)
        elif name == "speculative":
            _set_fields(sampling.speculative, options["speculative"], "sampling.speculative")
        elif name in _CHAT_OPTIONS:
            if not isinstance(request, baton_pb2.ChatRequest):
                raise TypeError(f"option {name!r} is for chats only")
            _set_chat(request, name, value)
        elif name not in GenerateOptions.__annotations__:
            raise TypeError(f"unknown option {name!r}")
        elif name not in CALL_OPTIONS:
            _set(sampling, name, value, f"sampling.{name}")


_CHAT_OPTIONS = ChatOptions.__annotations__.keys() - GenerateOptions.__annotations__.keys()
_CALLS = {"auto": baton_pb2.CALLS_UNSPECIFIED, "none": baton_pb2.CALLS_NONE, "required": baton_pb2.CALLS_REQUIRED}


def _set_chat(request: baton_pb2.ChatRequest, name: str, value: Any) -> None:
    match name:
        case "tools":
            for place, given in enumerate(value):
                _add_tool(request.tools.add().function, given, f"tools[{place}]")
        case "tool_choice" if value in _CALLS:
            request.tool_choice.calls = _CALLS[value]
        case "tool_choice":
            _set(request.tool_choice, "function", value, "tool_choice.function")
        case "chat_template_kwargs":
            _set(request, name, json.dumps(value))
        case _:
            _set(request, name, value)


def _add_tool(function: baton_pb2.Function, given: Tool | Mapping[str, Any], path: str) -> None:
    try:
        tool = given if isinstance(given, Tool) else Tool(**given["function"])
    except (KeyError, TypeError) as error:
        message = "is neither a Tool nor {'type': 'function', 'function': {'name': ..., ...}}"
        raise InvalidRequest(f"{path}: {message}", ErrorDetails(field=path)) from error
    _set(function, "name", tool.name, f"{path}.function.name")
    _set(function, "description", tool.description, f"{path}.function.description")
    if tool.parameters is not None:
        _set(function, "parameters", json.dumps(tool.parameters), f"{path}.function.parameters")


def _set_structured(sampling: baton_pb2.SamplingParams, name: str, value: object) -> None:
    path, before = f"sampling.{name}", sampling.WhichOneof("structured")
    if before is not None:
        raise InvalidRequest(f"{path}: does not go with {before}", ErrorDetails(field=path))
    if name == "choice":
        sampling.choice.SetInParent()  # an empty list is sent, and the server rejects it
        _extend(sampling.choice.texts, value, path)
    else:
        _set(sampling, name, json.dumps(value) if isinstance(value, Mapping) else value, path)


def _set_fields(message: baton_pb2.Speculative, fields: Mapping[str, Any], path: str) -> None:
    message.SetInParent()  # an empty message is sent, and the server rejects it
    for name, value in fields.items():
        try:
            _set(message, name, value, f"{path}.{name}")
        except AttributeError as error:
            raise InvalidRequest(f"{path}.{name}: unknown", ErrorDetails(field=f"{path}.{name}")) from error


def _early_stopping(value: object) -> "baton_pb2.EarlyStopping":
    for known, wire in EARLY_STOPPING.items():
        if value is known or value == known == "never":
            return wire
    path = "sampling.early_stopping"
    raise InvalidRequest(f"{path}: must be True, False or 'never', not {value!r}", ErrorDetails(field=path))


def _set_echo(request: baton_pb2.GenerateRequest | baton_pb2.ChatRequest, value: object) -> None:
    if isinstance(request, baton_pb2.GenerateRequest):
        _set(request, "echo", value)
    elif value:
        raise InvalidRequest("echo: not supported by chats", ErrorDetails(field="echo"))


def _add_bad_words(sampling: baton_pb2.SamplingParams, words: Sequence[str | Sequence[int]]) -> None:
    for word in [words] if isinstance(words, str) else words:
        if isinstance(word, str):
            _extend(sampling.bad_words, [word], "sampling.bad_words")
        else:
            position = len(sampling.bad_word_token_ids)
            _extend(sampling.bad_word_token_ids.add().ids, word, f"sampling.bad_word_token_ids[{position}].ids")


def _message(given: Mapping[str, Any], position: int) -> Message:
    try:
        calls = tuple(
            ToolCall(each["id"], each["function"]["name"], each["function"]["arguments"])
            for each in given.get("tool_calls") or ()
        )
        # OpenAI's clients set the content of a turn with tool calls to null.
        content = given["content"] if not calls else given.get("content") or ""
        reasoning = given.get("reasoning_content") or given.get("reasoning") or ""
        return Message(
            given["role"], content, given.get("name") or "", calls, given.get("tool_call_id") or "", reasoning
        )
    except KeyError as missing:
        path = f"messages[{position}].{missing.args[0]}"
        raise InvalidRequest(f"{path}: missing", ErrorDetails(field=path)) from None


def _set(message: Any, name: str, value: object, path: str | None = None) -> None:
    with _naming(path or name):
        setattr(message, name, value)


class _Repeated(Protocol):
    def extend(self, values: Any, /) -> None: ...


def _extend(repeated: _Repeated, values: object, path: str) -> None:
    with _naming(path):
        repeated.extend(values)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn a TypeError or ValueError (number out of range, invalid Unicode) into InvalidRequest with the field."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{path}: {error}", ErrorDetails(field=path)) from error

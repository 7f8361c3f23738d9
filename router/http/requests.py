"""Conversion of bodies of HTTP requests into the router's requests: fields, structured output, tools."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import BaseModel
from starlette.datastructures import Headers

from baton.process.foreign_text import identifier_fault
from baton.process.objectives import RequestedObjectives
from baton.process.telemetry.trace_context import TraceContext, parse_traceparent
from baton.router.http.anthropic.bodies import MessagesRequest, PromptFields
from baton.router.http.chat_body import logprobs_count
from baton.router.http.dialects import Body, without_front_lines
from baton.router.http.edge.problem import Renamed, refused
from baton.router.http.messages import (
    ChatMessage,
    ChatRequest,
    ChatTool,
    CompletionRequest,
    GenerateRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    MessageText,
    NamedSchemaFormat,
    OpenAIFields,
    RequestFields,
    SamplingFields,
    StructuredOutputs,
    TextFormat,
)
from baton.router.http.responses.bodies import InputMessage, ResponseRequest
from baton.router.model.chat_template import ChatTemplate
from baton.router.model.served_model import TokenizerWorker
from baton.router.public.access import Caller
from baton.router.public.chat import EFFORT, THINKING, ChatAsked, ReadChat, read_chat
from baton.router.public.tools import Function, ToolChoice, ToolsAsked
from baton.router.trace.record import CallReader
from baton.router.types.request import (
    SESSION_HEADER,
    ChatPrompt,
    GenerationRequest,
    Message,
    Operation,
    Prompt,
    RequestedSampling,
    RequestedSpeculation,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    session_of,
)
from baton.text.sampling import NUMBERS
from baton.text.structured.json_text import JsonRefused, read_json
from baton.text.structured.output import StructuredKind, StructuredOutput, json_schema

REQUEST_ID_HEADER = "x-request-id"
DEFAULT_MAX_TOKENS = 16
"""Default of max_tokens for completions, as in OpenAI's API and vLLM. For chats it is the rest of the context."""


@dataclass(frozen=True, slots=True)
class HttpCall:
    request_id: str  # of the client's header x-request-id, or generated
    caller: Caller
    session: str  # value of the header x-session-id
    trace: TraceContext | None  # span of the caller, from the header traceparent
    reader: CallReader = field(default_factory=CallReader)


current_call: ContextVar[HttpCall | None] = ContextVar("current_call", default=None)
"""Call that the current task answers; None if the task does not answer an HTTP POST."""


def call_of(headers: Headers, caller: Caller) -> HttpCall:
    """Create a call from its headers. Invalid headers are ignored."""
    given = headers.get(REQUEST_ID_HEADER, "")
    usable = bool(given) and identifier_fault(given) is None
    return HttpCall(
        request_id=given if usable else secrets.token_hex(12),
        caller=caller,
        session=session_of(headers.items()),
        trace=parse_traceparent(headers.get("traceparent"), headers.get("tracestate", "")),
    )


class AskedForm(NamedTuple):
    field: str  # field of the body that requests the form
    form: StructuredOutput


def structure_of(message: SamplingFields) -> StructuredOutput | None:
    """Return the requested structured output; None for free text. Raises: Problem if several are requested."""
    asked = list(asked_forms(message))
    if len(asked) > 1:
        fault = f"only one structured output is allowed, but {asked[0].field} is set, too; remove one of them"
        raise refused(asked[1].field, fault)
    return asked[0].form if asked else None


def asked_forms(message: BaseModel) -> Iterator[AskedForm]:
    """Yield all structured outputs (forms) that fields of the body request, OpenAI's fields first. Raises: Problem."""
    match message:
        case ChatRequest() | CompletionRequest():
            yield from _of_format("response_format", message.response_format)
        case ResponseRequest() if message.text is not None:
            yield from _of_format("text.format", message.text.format)
    if isinstance(message, SamplingFields):
        given = message.structured_outputs or StructuredOutputs(json=None)
        for kind, name, newer, older in (
            (StructuredKind.JSON_SCHEMA, "json", given.json_, message.guided_json),
            (StructuredKind.REGEX, "regex", given.regex, message.guided_regex),
            (StructuredKind.CHOICE, "choice", given.choice, message.guided_choice),
            (StructuredKind.GRAMMAR, "grammar", given.grammar, message.guided_grammar),
            (StructuredKind.JSON_OBJECT, "json_object", given.json_object, message.guided_json_object),
        ):
            for field, value in ((f"structured_outputs.{name}", newer), (f"guided_{name}", older)):
                if value is not None and value is not False:
                    yield AskedForm(field, _form(kind, value))


def _of_format(
    field: str, given: TextFormat | JsonObjectFormat | JsonSchemaFormat | NamedSchemaFormat | None
) -> Iterator[AskedForm]:
    match given:
        case JsonObjectFormat():
            yield AskedForm(field, StructuredOutput(StructuredKind.JSON_OBJECT))
        case NamedSchemaFormat():
            yield AskedForm(field, json_schema(given.schema_))
        case JsonSchemaFormat(json_schema=asked):
            if asked.schema_ is None:
                raise refused(f"{field}.json_schema.schema", "is missing")
            yield AskedForm(field, json_schema(asked.schema_))


def _form(kind: StructuredKind, value: Any) -> StructuredOutput:
    match kind:
        case StructuredKind.JSON_SCHEMA:
            return json_schema(value)
        case StructuredKind.CHOICE:
            return StructuredOutput.choice(value)
    return StructuredOutput(kind) if kind is StructuredKind.JSON_OBJECT else StructuredOutput(kind, value)


_SEED_BITS = (1 << 64) - 1


def completion_requests(message: CompletionRequest, call: HttpCall) -> list[GenerationRequest]:
    """Convert the body of a completion into one request per prompt. Raises: Problem."""
    sampling = _sampling(message, _or_default(message.max_tokens), message.logprobs, _prompt_logprobs(message))
    return [
        _request(Operation.GENERATE, prompt, message, call, sampling, bool(message.stream), bool(message.echo))
        for prompt in prompts_of(message.prompt, "prompt")
    ]


async def chat_request(
    message: ChatRequest,
    call: HttpCall,
    tokenizer: TokenizerWorker,
    grammars: Mapping[str, StructuredOutput] = MappingProxyType({}),
) -> ReadChat:
    """Convert the body of a chat into a request, with the parser of its answer. Raises: Problem, BatonError.

    max_tokens may exceed the rest of the context, which then takes its place: agents send their default, whatever the
    model's context. `grammars`: see ToolsAsked.
    """
    max_tokens = message.max_tokens if message.max_completion_tokens is None else message.max_completion_tokens
    if message.max_tokens not in (None, max_tokens):
        raise refused("max_completion_tokens", "differs from max_tokens, its other name; give one of them")
    logprobs = logprobs_count(message.logprobs, message.top_logprobs)
    prompt = ChatPrompt(
        messages=_without_front_lines([chat_message(each) for each in message.messages]),
        add_generation_prompt=message.add_generation_prompt is not False and not message.continue_final_message,
        continues=_continues(message),
    )
    sampling = replace(_sampling(message, max_tokens, logprobs, _prompt_logprobs(message)), is_clamped=True)
    request = _request(Operation.CHAT, prompt, message, call, sampling, bool(message.stream))
    asked = _asked(message, call, tokenizer.chat_template)
    return await read_chat(request, replace(asked, tools=replace(asked.tools, grammars=grammars)), tokenizer)


def _asked(message: ChatRequest, call: HttpCall, template: ChatTemplate | None) -> ChatAsked:
    """Return the options that only chats have. Raises: Problem.

    The effort of reasoning is a hint: if the template has no option for it, it is noted in `call` and has no effect.
    """
    effort, variables = message.reasoning_effort, template.variables if template is not None else frozenset[str]()
    if effort not in (None, "none") and not variables & {EFFORT, THINKING}:
        call.reader.not_acted_upon.append("reasoning_effort")
        effort = None
    budget = message.thinking_token_budget if message.thinking_budget is None else message.thinking_budget
    if message.thinking_token_budget not in (None, budget):
        raise refused("thinking_token_budget", "differs from thinking_budget, its other name; give one of them")
    choice = message.tool_choice or "auto"
    return ChatAsked(
        tools=ToolsAsked(
            shown_tools(message.tools),
            ToolChoice(choice) if isinstance(choice, str) else Function(choice.function.name),
            one_call=message.parallel_tool_calls is False,
            deferred=frozenset(tool.function.name for tool in message.tools or () if tool.defer_loading),
        ),
        template_options=message.chat_template_kwargs or {},
        enable_thinking=message.enable_thinking,
        effort=effort,
        budget=budget,
        shows_thoughts=message.include_reasoning is not False,
    )


def simple_request(message: GenerateRequest, call: HttpCall) -> GenerationRequest:
    """Convert the body of POST /generate. Raises: Problem."""
    sampling = _sampling(message, _or_default(message.max_tokens), None, None)
    return _request(Operation.GENERATE, TextPrompt(message.prompt), message, call, sampling, bool(message.stream))


def _continues(message: ChatRequest) -> bool:
    """Return whether the answer continues the last message. Raises: Problem if it cannot."""
    if not message.continue_final_message:
        return False
    last = message.messages[-1] if message.messages else None
    if message.add_generation_prompt:
        raise refused("continue_final_message", "cannot be combined with add_generation_prompt; remove one of the two")
    if last is None or last.role != "assistant" or last.tool_calls or not _text(last.content).strip():
        raise refused("continue_final_message", "the last message must be a text of the assistant")
    return True


def _without_front_lines(messages: list[Message]) -> list[Message]:
    if messages and messages[0].role in ("system", "developer"):
        messages[0] = replace(messages[0], content=without_front_lines(messages[0].content))
    return messages


def chat_message(message: ChatMessage) -> Message:
    return Message(
        role=message.role,
        content=_text(message.content),
        name=message.name or "",
        # Most messages have no tool calls: for them no generator is created.
        tool_calls=tuple(ToolCall(each.id, each.function.name, each.function.arguments) for each in message.tool_calls)
        if message.tool_calls
        else (),
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )


RETENTIONS_S: Mapping[str, float] = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86_400.0}
"""Seconds of retention by value of OpenAI's prompt_cache_retention. OpenAI keeps `in_memory` for 5 to 10 minutes."""
TTLS_S: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
"""Seconds of retention by value of Anthropic's ttl."""


_SESSION_MARK = "_session_"


def session_id(message: RequestFields, call: HttpCall) -> str:
    """Return the session id in the body; without one, that in the header x-session-id."""
    return named_session(message)[1] or call.session


def named_session(message: RequestFields) -> tuple[str, str]:
    """Return the field of the body that names a session, and the session id; both are empty without such a field."""
    user = message.metadata.user_id if isinstance(message, MessagesRequest) and message.metadata is not None else None
    for name, given in (
        ("session_id", message.session_id),
        ("prompt_cache_key", message.prompt_cache_key if isinstance(message, OpenAIFields) else None),
        ("metadata.user_id", _session_of_user(user or "")),
    ):
        if given:
            return name, given
    return "", ""


def _session_of_user(user_id: str) -> str:
    """Return the session id in a user id of Claude Code, which is JSON, or in older versions ends with the session."""
    try:
        read = read_json(user_id)
    except JsonRefused:
        _, mark, session = user_id.rpartition(_SESSION_MARK)
        return session if mark else ""
    named = read.get("session_id") if isinstance(read, dict) else None
    return named if isinstance(named, str) else ""


def kept_for_s(message: RequestFields, in_session: bool) -> float | None:
    """Return how long KV is kept: by our field, OpenAI's field, or the longest of Anthropic's marks; None: unstated.

    The fields of OpenAI and Anthropic have no effect without a session.
    """
    if message.keep_for_s is not None or not in_session:
        return message.keep_for_s
    if isinstance(message, OpenAIFields) and message.prompt_cache_retention is not None:
        return RETENTIONS_S[message.prompt_cache_retention]
    return max((TTLS_S[ttl] for ttl in _ttls(message)), default=None)


def _ttls(message: RequestFields) -> Iterator[str]:
    contents: Iterator[str | Sequence[object] | None] = iter(())
    match message:
        case PromptFields():
            tools = message.tools or ()
            contents = iter(([message, *tools], message.system, *(turn.content for turn in message.messages)))
        case ChatRequest():
            contents = (each.content for each in message.messages)
        case ResponseRequest() if not isinstance(message.input, str):
            contents = (each.content for each in message.input if isinstance(each, InputMessage))
    for content in contents:
        if content is not None and not isinstance(content, str):
            marks = (getattr(part, "cache_control", None) for part in content)
            yield from (mark.ttl for mark in marks if mark is not None and mark.ttl is not None)


def shown_tools(tools: Sequence[ChatTool] | None) -> list[Mapping[str, Any]]:
    """Convert tools to JSON objects, which chat templates read."""
    return [tool.model_dump(exclude_none=True, exclude={"defer_loading"}) for tool in tools or ()]


def _request(
    operation: Operation,
    prompt: Prompt,
    message: RequestFields,
    call: HttpCall,
    sampling: RequestedSampling,
    is_streamed: bool,
    echo: bool = False,
) -> GenerationRequest:
    session = session_id(message, call)
    request = GenerationRequest(
        operation=operation,
        prompt=prompt,
        request_id=message.request_id or call.request_id,
        model=message.model or "",
        sampling=sampling,
        cache_salt=message.cache_salt or "",
        echo=echo,
        priority=message.priority or 0,
        objectives=RequestedObjectives(message.ttft_slo_ms, message.tbt_slo_ms),
        session=call.session,
        session_id=session,
        keep_for_s=kept_for_s(message, bool(session)),
        done=bool(message.done),
        is_streamed=is_streamed,
    )
    return call.caller.asks(request)


def _sampling(
    message: ChatRequest | CompletionRequest | GenerateRequest,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> RequestedSampling:
    seed, asked = message.seed, message.speculative
    return RequestedSampling(
        max_tokens=max_tokens,
        numbers=_numbers(message),
        seed=None if seed is None else seed & _SEED_BITS,
        stop=_texts(message.stop),
        stop_token_ids=message.stop_token_ids or (),
        ignore_eos=bool(message.ignore_eos),
        n=message.n,
        logit_bias=_logit_bias(message.logit_bias),
        allowed_token_ids=message.allowed_token_ids or (),
        bad_words=message.bad_words or (),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        best_of=message.best_of,
        structured=structure_of(message),
        speculative=None if asked is None else RequestedSpeculation(asked.method, asked.num_speculative_tokens),
    )


def _numbers(message: SamplingFields) -> dict[str, float]:
    given = {name: value for name in NUMBERS if (value := getattr(message, name)) is not None}
    return given if message.top_k is None else given | {"top_k": max(0, message.top_k)}


def _prompt_logprobs(message: ChatRequest | CompletionRequest) -> int | None:
    if message.stream and message.prompt_logprobs is not None:
        raise refused("prompt_logprobs", "is not supported in a stream; set stream to false")
    return message.prompt_logprobs


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float]:
    biases = {}
    for name, value in (given or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise refused("logit_bias", f"{name[:32]!r} is not a token id")
        biases[int(name)] = value
    return biases


def prompts_of(given: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]], field: str) -> list[Prompt]:
    """Return the prompts in a field of OpenAI's API: one or several, as texts or token ids. Raises: Problem."""
    if isinstance(given, str):
        return [TextPrompt(given)]
    if not given:
        raise refused(field, "is empty")
    prompts: list[Prompt] = []
    for each in given:
        if isinstance(each, int):
            return [TokenPrompt(given)]  # type: ignore[arg-type]  # all are, where one is
        prompts.append(TextPrompt(each) if isinstance(each, str) else TokenPrompt(each))
    return prompts


def _text(content: str | Sequence[MessageText] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _texts(given: str | Sequence[str] | None) -> Sequence[str]:
    return () if given is None else (given,) if isinstance(given, str) else given


def _or_default(max_tokens: int | None) -> int:
    return DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens


_FORCED: Renamed = {
    kind.value: "tools" for kind in (StructuredKind.JSON_SCHEMA, StructuredKind.GRAMMAR, StructuredKind.REGEX)
}


def names_of(message: Body) -> Renamed:
    """Map the router's fields to their names in this body. If a field has several, the used one. Raises: Problem."""
    names = {"session": SESSION_HEADER, **message.renamed}
    if isinstance(message, RequestFields):
        names["session_id"] = named_session(message)[0] or SESSION_HEADER
    match message:
        case ChatRequest():
            names |= _FORCED  # structured output that the client did not request results from forced calls
            if message.reasoning_effort is not None:
                names[f"template_options.{EFFORT}"] = "reasoning_effort"
            if message.enable_thinking is not None:
                names[f"template_options.{THINKING}"] = THINKING
        case ResponseRequest():
            names |= _FORCED
            names |= {f"template_options.{option}": "reasoning.effort" for option in (EFFORT, THINKING)}
    return names | {asked.form.kind.value: asked.field for asked in asked_forms(message)}

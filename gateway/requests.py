"""The one place where messages of HTTP become the router's requests. The router checks the values."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from baton.gateway.http.call import Call
from baton.gateway.http.problem import Renamed, refused
from baton.gateway.messages.chat import ChatMessage, ChatRequest, Tool
from baton.gateway.messages.completions import CompletionRequest
from baton.gateway.messages.responses import InputMessage, ResponseRequest
from baton.gateway.messages.sampling import RequestFields, SamplingFields
from baton.gateway.messages.simple import GenerateRequest
from baton.gateway.structure import asked_forms, structure_of
from baton.gateway.tools.choice import ToolUse
from baton.generation.structured.output import StructuredOutput
from baton.router.types.request import (
    ChatPrompt,
    GenerationRequest,
    Message,
    Operation,
    Prompt,
    RequestedSampling,
    TextPrompt,
    TokenPrompt,
    ToolCall,
)

DEFAULT_MAX_TOKENS = 16
"""Of a completion, as OpenAI and vLLM have it. A chat continues to the end of the context."""

EFFORT = "reasoning_effort"
"""Its name in templates."""

_SEED_BITS = (1 << 64) - 1


def completion_requests(message: CompletionRequest, call: Call) -> list[GenerationRequest]:
    """One for each prompt. Raises: Problem."""
    max_tokens, scored = _or(message.max_tokens, DEFAULT_MAX_TOKENS), _prompt_logprobs(message)
    sampling = _sampling(message, message.n, max_tokens, message.logprobs, structure_of(message), scored)
    return [
        _request(Operation.GENERATE, prompt, message, call, sampling, echo=bool(message.echo))
        for prompt in _prompts(message.prompt)
    ]


def chat_request(message: ChatRequest, call: Call, tools: ToolUse) -> GenerationRequest:
    """Raises: Problem."""
    max_tokens = message.max_tokens if message.max_completion_tokens is None else message.max_completion_tokens
    if message.max_tokens not in (None, max_tokens):
        raise refused("max_completion_tokens", "is another name of max_tokens, which says something else")
    if message.top_logprobs is not None and not message.logprobs:
        raise refused("top_logprobs", "needs logprobs to be true")
    structured = structure_of(message)
    if structured is not None and tools.forced is not None:
        raise refused("tool_choice", "a function that must be called and a form of the answer exclude each other")
    logprobs = (message.top_logprobs or 0) if message.logprobs else None
    prompt = ChatPrompt(
        messages=[chat_message(each) for each in message.messages],
        tools=tools.shown,
        template_options=_template_options(message.chat_template_kwargs, "reasoning_effort", message.reasoning_effort),
        add_generation_prompt=message.add_generation_prompt is not False,
    )
    scored = _prompt_logprobs(message)
    sampling = _sampling(message, message.n, max_tokens, logprobs, tools.forced or structured, scored)
    return _request(Operation.CHAT, prompt, message, call, sampling)


def response_request(message: ResponseRequest, call: Call) -> GenerationRequest:
    """Raises: Problem."""
    messages = [Message("user", message.input)] if isinstance(message.input, str) else _messages(message.input)
    if message.instructions:
        messages.insert(0, Message("system", message.instructions))
    effort = message.reasoning.effort if message.reasoning is not None else None
    prompt = ChatPrompt(messages, template_options=_template_options(None, "reasoning.effort", effort))
    sampling = _sampling(message, 1, message.max_output_tokens, None, structure_of(message))
    return _request(Operation.CHAT, prompt, message, call, sampling)


def simple_request(message: GenerateRequest, call: Call) -> GenerationRequest:
    """Raises: Problem."""
    sampling = _sampling(message, message.n, _or(message.max_tokens, DEFAULT_MAX_TOKENS), None, structure_of(message))
    return _request(Operation.GENERATE, TextPrompt(message.prompt), message, call, sampling)


def chat_message(message: ChatMessage) -> Message:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    return Message(
        role=message.role,
        content=content or "",
        name=message.name or "",
        # Conversations are long, and few of their messages call functions.
        tool_calls=tuple(ToolCall(each.id, each.function.name, each.function.arguments) for each in message.tool_calls)
        if message.tool_calls
        else (),
        tool_call_id=message.tool_call_id or "",
    )


def shown_tools(tools: Sequence[Tool] | None) -> list[Mapping[str, Any]]:
    """As a template gets them."""
    return [tool.model_dump(exclude_none=True) for tool in tools or ()]


def _request(
    operation: Operation,
    prompt: Prompt,
    message: RequestFields,
    call: Call,
    sampling: RequestedSampling,
    echo: bool = False,
) -> GenerationRequest:
    request = GenerationRequest(
        operation=operation,
        prompt=prompt,
        request_id=message.request_id or call.request_id,
        model=message.model or "",
        sampling=sampling,
        cache_salt=message.cache_salt or "",
        echo=echo,
        priority=message.priority or 0,
        session=message.session_id or call.session,
    )
    return call.caller.asks(request)


def _sampling(
    message: SamplingFields,
    n: int | None,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutput | None,
    prompt_logprobs: int | None = None,
) -> RequestedSampling:
    seed = message.seed
    return RequestedSampling(
        max_tokens=max_tokens,
        temperature=message.temperature,
        top_k=None if message.top_k is None else max(0, message.top_k),
        top_p=message.top_p,
        min_p=message.min_p,
        seed=None if seed is None else seed & _SEED_BITS,
        stop=_texts(message.stop),
        stop_token_ids=message.stop_token_ids or (),
        ignore_eos=bool(message.ignore_eos),
        n=n,
        typical_p=message.typical_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty or 0.0,
        frequency_penalty=message.frequency_penalty or 0.0,
        logit_bias=_logit_bias(message.logit_bias),
        min_tokens=message.min_tokens or 0,
        allowed_token_ids=message.allowed_token_ids or (),
        bad_words=message.bad_words or (),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        best_of=message.best_of,
        structured=structured,
    )


def _prompt_logprobs(message: ChatRequest | CompletionRequest) -> int | None:
    if message.stream and message.prompt_logprobs is not None:
        raise refused("prompt_logprobs", "is not served in a stream")
    return message.prompt_logprobs


def _template_options(given: Mapping[str, Any] | None, field: str, effort: str | None) -> Mapping[str, Any]:
    options = dict(given or {})
    if effort is not None and options.setdefault(EFFORT, effort) != effort:
        raise refused(field, f"chat_template_kwargs.{EFFORT} says something else")
    return options


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float]:
    biases = {}
    for name, value in (given or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise refused("logit_bias", f"{name[:32]!r} is not a token id")
        biases[int(name)] = value
    return biases


def _prompts(given: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]) -> list[Prompt]:
    if isinstance(given, str):
        return [TextPrompt(given)]
    if not given:
        raise refused("prompt", "is empty")
    prompts: list[Prompt] = []
    for each in given:
        if isinstance(each, int):
            return [TokenPrompt(given)]  # type: ignore[arg-type]  # all are, where one is
        prompts.append(TextPrompt(each) if isinstance(each, str) else TokenPrompt(each))
    return prompts


def _messages(messages: Sequence[InputMessage]) -> list[Message]:
    return [
        Message(
            each.role,
            each.content if isinstance(each.content, str) else "".join(part.text for part in each.content),
        )
        for each in messages
    ]


def _texts(given: str | Sequence[str] | None) -> Sequence[str]:
    return () if given is None else (given,) if isinstance(given, str) else given


def _or(given: int | None, otherwise: int) -> int:
    return otherwise if given is None else given


def names_of(message: BaseModel, renamed: Renamed) -> Renamed:
    """`renamed` for all messages of its type, and the names that this one chose of several. Raises: Problem."""
    names = dict(renamed)
    match message:
        case ChatRequest():
            names["json_schema"] = "tools"  # where no form is asked for, a function is forced
            if message.reasoning_effort is not None:
                names[f"template_options.{EFFORT}"] = "reasoning_effort"
        case ResponseRequest():
            names[f"template_options.{EFFORT}"] = "reasoning.effort"
    return names | {asked.form.kind.value: asked.field for asked in asked_forms(message)}

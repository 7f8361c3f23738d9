"""Conversion of requests of Ollama's API into chat and completion requests. Pure."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from baton.router.http.chat_body import ChatPart, logprobs_count, request_fields, schema_format
from baton.router.http.edge.problem import refused
from baton.router.http.messages import ChatRequest, CompletionRequest
from baton.router.http.ollama.bodies import (
    OPTIONS,
    AskedFields,
    EarlierCall,
    OllamaChatRequest,
    OllamaGenerateRequest,
    Options,
    Turn,
)
from baton.router.http.requests import HttpCall, completion_requests
from baton.router.model.chat_template import ChatTemplate
from baton.router.public.chat import asked_to_think
from baton.router.types.request import GenerationRequest

_LATEST = ":latest"


def model_name(given: str | None) -> str:
    """Return the name of the requested model without the tag `:latest`, which Ollama's clients may append."""
    return (given or "").removesuffix(_LATEST)


def chat_of(message: AskedFields, template: ChatTemplate | None) -> ChatRequest:
    """Convert an Ollama request into a chat request. `template`: the model's chat template. Raises: Problem."""
    level = message.think if isinstance(message.think, str) else None
    asked = message.think if isinstance(message.think, bool) else None if level is None else True
    chat = {
        **_common(message),
        "messages": list(_turns(message)),
        "tools": message.tools if isinstance(message, OllamaChatRequest) else None,
        "enable_thinking": asked_to_think(asked, None, "think", template),
        "reasoning_effort": level,
        "logprobs": message.logprobs,
        "top_logprobs": message.top_logprobs,
    }
    return ChatRequest.model_validate(chat)


def raw_request(message: OllamaGenerateRequest, call: HttpCall) -> GenerationRequest:
    """Convert a request with `raw`, whose prompt gets no chat template, into a completion. Raises: Problem."""
    for field, value in (("system", message.system), ("think", message.think)):
        if value:
            raise refused(field, "needs the model's chat template, which raw turns off; remove one of the two")
    logprobs = logprobs_count(message.logprobs, message.top_logprobs)
    completion = CompletionRequest.model_validate({**_common(message), "prompt": message.prompt, "logprobs": logprobs})
    (request,) = completion_requests(completion, call)
    # An omitted limit became OpenAI's default of 16 tokens: restore None, for Ollama's default, the remaining context.
    return replace(request, sampling=replace(request.sampling, max_tokens=completion.max_tokens, is_clamped=True))


def _common(message: AskedFields) -> dict[str, Any]:
    named = {"model": model_name(message.model), "stream": message.stream is not False}
    return {**request_fields(message), **named, **_sampling(message.options), "response_format": _format(message)}


def _sampling(options: Options | None) -> dict[str, Any]:
    if options is None:
        return {}
    given = {ours: getattr(options, theirs) for ours, theirs in OPTIONS.items()}
    if options.num_predict is not None and options.num_predict < 0:
        given["max_tokens"] = None
    return given | ({"seed": None} if options.seed == -1 else {})


def _format(message: AskedFields) -> ChatPart | None:
    if message.format is None or message.format == "":
        return None
    return {"type": "json_object"} if isinstance(message.format, str) else schema_format(message.format)


def _turns(message: AskedFields) -> Iterator[ChatPart]:
    match message:
        case OllamaChatRequest():
            yield from (_turn(turn) for turn in message.messages or ())
        case OllamaGenerateRequest():
            if message.system:
                yield {"role": "system", "content": message.system}
            yield {"role": "user", "content": message.prompt}


def _turn(turn: Turn) -> ChatPart:
    return {
        "role": turn.role,
        "content": turn.content,
        "reasoning_content": turn.thinking,
        "name": turn.tool_name,
        "tool_calls": [_call(call) for call in turn.tool_calls or ()] or None,
        "tool_call_id": turn.tool_call_id,
    }


def _call(call: EarlierCall) -> ChatPart:
    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    return {"id": call.id, "function": {"name": call.function.name, "arguments": arguments}}

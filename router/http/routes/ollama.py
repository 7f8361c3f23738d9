"""Ollama's API over the router's chats and completions."""

import asyncio
import time
from collections.abc import Mapping

from baton.router.dispatcher import Dispatcher
from baton.router.http.answers import TokenTexts
from baton.router.http.edge.exchange import Reply, json_reply
from baton.router.http.ollama.answer import (
    JSON_LINES,
    OllamaWriter,
    PartFormat,
    embedded,
    in_chat,
    in_generate,
    loaded,
)
from baton.router.http.ollama.bodies import (
    AskedFields,
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from baton.router.http.ollama.models import shown
from baton.router.http.ollama.request import chat_of, model_name, raw_request
from baton.router.http.requests import HttpCall, chat_request, names_of, prompts_of
from baton.router.public.vectors import VectorCall
from baton.router.types.request import GenerationRequest
from baton.text.output.thoughts import OutputParser

_NO_PULLS = "the model is chosen when the server starts"
UNSERVED: Mapping[str, str] = {
    "/api/embeddings": "use /api/embed",
    **dict.fromkeys((f"/api/{name}" for name in ("pull", "push", "create", "copy", "delete")), _NO_PULLS),
}
"""Paths of Ollama that are not served, with the reasons."""


async def answer_chat(dispatcher: Dispatcher, message: OllamaChatRequest, call: HttpCall) -> Reply:
    """Answer a chat. Raises: Problem, BatonError."""
    if not message.messages:
        return await _loaded(dispatcher, message, in_chat)
    return await _chat(dispatcher, message, call, in_chat)


async def answer_generate(dispatcher: Dispatcher, message: OllamaGenerateRequest, call: HttpCall) -> Reply:
    """Answer a completion. Raises: Problem, BatonError."""
    if not message.prompt:
        return await _loaded(dispatcher, message, in_generate)
    if not message.raw:
        return await _chat(dispatcher, message, call, in_generate)
    request = raw_request(message, call)
    return await _reply(dispatcher, message, request, call, in_generate, OutputParser(None, None))


async def embed(dispatcher: Dispatcher, message: OllamaEmbedRequest, call: HttpCall) -> Reply:
    """Answer with vectors. Raises: Problem, BatonError."""
    began = time.monotonic()
    asked = VectorCall(
        dispatcher,
        call.caller,
        model=model_name(message.model),
        request_id=call.request_id,
        trace=call.trace,
        reader=call.reader,
    )
    made = await asked.embed(prompts_of(message.input, "input"), message.dimensions)
    # On a thread, since vectors may have millions of numbers.
    return await asyncio.to_thread(embedded, made, time.monotonic() - began)


async def show(dispatcher: Dispatcher, message: OllamaShowRequest, call: HttpCall) -> Reply:
    """Describe a model. Raises: BatonError."""
    return json_reply(shown(await dispatcher.choose(model_name(message.model or message.name))))


async def _loaded(dispatcher: Dispatcher, message: AskedFields, shape: PartFormat) -> Reply:
    """Answer that the model is loaded. Raises: BatonError."""
    return json_reply(loaded((await dispatcher.choose(model_name(message.model))).name, shape))


async def _chat(dispatcher: Dispatcher, message: AskedFields, call: HttpCall, shape: PartFormat) -> Reply:
    """Answer a chat, or a completion as a chat. Raises: Problem, BatonError."""
    tokenizer = (await dispatcher.choose(model_name(message.model))).served.tokenizer
    read = await chat_request(chat_of(message, tokenizer.chat_template), call, tokenizer)
    return await _reply(dispatcher, message, read.request, call, shape, read.reader())


async def _reply(
    dispatcher: Dispatcher,
    message: AskedFields,
    request: GenerationRequest,
    call: HttpCall,
    shape: PartFormat,
    parser: OutputParser,
) -> Reply:
    """Answer with one object or with lines of JSON. Raises: BatonError."""
    tokenizer = (await dispatcher.choose(request.model)).served.tokenizer
    writer = OllamaWriter(shape, parser, TokenTexts(tokenizer.token_bytes) if message.logprobs else None)
    events = dispatcher.answer(request, None, call.trace, reader=call.reader)
    return await writer.reply(events, message.stream is not False, names_of(message), JSON_LINES)

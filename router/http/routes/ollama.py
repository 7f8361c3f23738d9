"""Ollama's API over the router's chats and completions."""

import asyncio
import time
from collections.abc import Mapping

from baton.router.dispatcher import Dispatcher
from baton.router.http.answers import TokenTexts
from baton.router.http.edge.exchange import Reply, json_reply
from baton.router.http.ollama.answer import JSON_LINES, OllamaWriter, embedded, in_chat, in_generate, loaded
from baton.router.http.ollama.bodies import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from baton.router.http.ollama.models import shown
from baton.router.http.ollama.request import chat_of, model_name, raw_request
from baton.router.http.requests import HttpCall, chat_request, names_of, prompts_of
from baton.router.public.vectors import VectorCall
from baton.text.output.thoughts import OutputParser

_NO_PULLS = "the model is chosen when the server starts"
UNSERVED: Mapping[str, str] = {
    "/api/embeddings": "use /api/embed",
    **dict.fromkeys((f"/api/{name}" for name in ("pull", "push", "create", "copy", "delete")), _NO_PULLS),
}
"""Paths of Ollama's API that are not served, each with the reason."""


async def answer(dispatcher: Dispatcher, message: OllamaChatRequest | OllamaGenerateRequest, call: HttpCall) -> Reply:
    """Answer /api/chat or /api/generate. A prompt with `raw` is a completion, other prompts are chats.

    Raises: Problem, BatonError.
    """
    chosen = await dispatcher.choose(model_name(message.model))
    tokenizer = chosen.served.tokenizer
    shape, asked = (
        (in_chat, message.messages) if isinstance(message, OllamaChatRequest) else (in_generate, message.prompt)
    )
    if not asked:
        return json_reply(loaded(chosen.name, shape))
    if isinstance(message, OllamaGenerateRequest) and message.raw:
        request, parser = raw_request(message, call), OutputParser(None, None)
    else:
        read = await chat_request(chat_of(message, tokenizer.chat_template), call, tokenizer)
        request, parser = read.request, read.reader()
    writer = OllamaWriter(shape, parser, TokenTexts(tokenizer.token_bytes) if message.logprobs else None)
    events = dispatcher.answer(request, None, call.trace, reader=call.reader)
    return await writer.reply(events, message.stream is not False, names_of(message), JSON_LINES)


async def embed(dispatcher: Dispatcher, message: OllamaEmbedRequest, call: HttpCall) -> Reply:
    """Answer /api/embed with vectors. Raises: Problem, BatonError."""
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
    # Encoded on a thread, since the vectors may have millions of numbers.
    return await asyncio.to_thread(embedded, made, time.monotonic() - began)


async def show(dispatcher: Dispatcher, message: OllamaShowRequest, call: HttpCall) -> Reply:
    """Answer /api/show with a description of the model. Raises: BatonError."""
    return json_reply(shown(await dispatcher.choose(model_name(message.model or message.name))))

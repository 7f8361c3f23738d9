"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the router's chats."""

from baton.router.dispatcher import Dispatcher
from baton.router.http.anthropic.answer import AnthropicWriter
from baton.router.http.anthropic.bodies import CountTokensRequest, MessagesRequest
from baton.router.http.anthropic.request import chat_of
from baton.router.http.edge.exchange import Reply, json_reply
from baton.router.http.requests import HttpCall, chat_request, names_of
from baton.router.types.request import ChatPrompt
from baton.router.types.response import AnswerId


async def answer_messages(dispatcher: Dispatcher, message: MessagesRequest, call: HttpCall) -> Reply:
    """Answer a Messages request. Raises: Problem, BatonError."""
    tokenizer = (await dispatcher.choose(message.model or "")).served.tokenizer
    read = await chat_request(chat_of(message, tokenizer.chat_template, call), call, tokenizer)
    request = read.request
    writer = AnthropicWriter(f"{AnswerId.MESSAGE}{request.request_id}", read.reader())
    events = dispatcher.answer(request, None, call.trace, reader=call.reader)
    return await writer.reply(events, message.stream, names_of(message))


async def count_tokens(dispatcher: Dispatcher, message: CountTokensRequest, call: HttpCall) -> Reply:
    """Return the number of tokens of a Messages request's prompt. Raises: Problem, BatonError."""
    served = (await dispatcher.choose(message.model or "")).served
    chat = await chat_request(chat_of(message, served.tokenizer.chat_template, call), call, served.tokenizer)
    prompt = chat.request.prompt
    if not isinstance(prompt, ChatPrompt):
        raise RuntimeError(f"the prompt of a chat became a {type(prompt).__name__}")
    return json_reply({"input_tokens": len(await served.tokenize_chat(prompt, call.caller.tenant))})

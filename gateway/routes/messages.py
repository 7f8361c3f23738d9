"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol, over the same chats as OpenAI's."""

from baton.gateway.anthropic.answer import Answer, stream, whole
from baton.gateway.anthropic.bodies import CountTokensRequest, MessagesRequest
from baton.gateway.anthropic.request import RENAMED, chat_of
from baton.gateway.http.exchange import Reply, Streamed, json_reply
from baton.gateway.output.thoughts import OutputParser
from baton.gateway.requests import Call, chat_request, tool_use
from baton.gateway.routes.chat import output_parser
from baton.router.dispatcher import Dispatcher
from baton.router.model.validation import MAX_TEXT_BYTES, check_chat
from baton.router.types.request import ChatPrompt
from baton.router.types.response import AnswerId

__all__ = ["RENAMED", "answer_messages", "count_tokens"]


async def answer_messages(dispatcher: Dispatcher, message: MessagesRequest, call: Call) -> Reply:
    """Raises: Problem, BatonError."""
    template = (await dispatcher.choose(message.model or "")).served.tokenizer.chat_template
    chat = chat_of(message, template)
    tools = tool_use(chat, template)
    request = chat_request(chat, call, tools, template)
    parser = output_parser(chat, request, tools, template)
    answer = Answer(f"{AnswerId.MESSAGE}{request.request_id}", parser() if parser else OutputParser(None, None))
    events = dispatcher.answer(request, None, call.trace, reader=call.reader)
    return Streamed(stream(answer, events)) if message.stream else json_reply(await whole(answer, events))


async def count_tokens(dispatcher: Dispatcher, message: CountTokensRequest, call: Call) -> Reply:
    """Raises: Problem, BatonError."""
    served = (await dispatcher.choose(message.model or "")).served
    template = served.tokenizer.chat_template
    chat = chat_of(message, template)
    prompt = chat_request(chat, call, tool_use(chat, template), template).prompt
    if not isinstance(prompt, ChatPrompt):
        raise RuntimeError("a chat has messages")
    return json_reply({"input_tokens": len(await served.tokenizer.prompt_tokens(check_chat(prompt, MAX_TEXT_BYTES)))})

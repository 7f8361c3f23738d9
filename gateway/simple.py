"""vLLM's simple server (POST /generate) and its tokenizer routes."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway.call import Call
from gateway.collected import collect
from gateway.messages.simple import DetokenizeRequest, GenerateRequest, TokenizeRequest
from gateway.problem import Problem, Renamed, problem_of, refused
from gateway.reply import Reply, Streamed, json_reply
from gateway.requests import chat_message, shown_tools, simple_request
from gateway.token_texts import TokenTexts
from router.answer import Delta
from router.chat_checks import check_chat
from router.checks import check_token_ids
from router.dispatcher import Dispatcher
from router.request import ChatPrompt
from router.response import ResponseEvent
from router.service import MAX_DETOKENIZE_TOKENS
from router.validation import MAX_TEXT_BYTES
from service.errors import BatonError, InvalidArgument

RENAMED: Renamed = {"text": "prompt", "token_ids": "tokens"}
DELIMITER = b"\0"


class Simple:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def generate(self, message: GenerateRequest, call: Call) -> Reply:
        """`{"text": [prompt + output]}`; a stream tells all of it each time. Raises: Problem, BatonError."""
        events = self._dispatcher.answer(simple_request(message, call), None, call.trace)
        if message.stream:
            return Streamed(_cumulative(message, events), "application/octet-stream")
        whole = await collect(events)
        return json_reply({"text": [message.prompt + choice.text for choice in whole.choices]})

    async def tokenize(self, message: TokenizeRequest, call: Call) -> Reply:
        """Raises: Problem, BatonError."""
        served = (await self._dispatcher.choose(message.model or "")).served
        if (message.prompt is None) == (message.messages is None):
            raise refused("prompt", "either a prompt or messages")
        if message.prompt is not None:
            token_ids = await served.tokenize(message.prompt, message.add_special_tokens is not False)
        else:
            said = [chat_message(each) for each in message.messages or ()]
            options = message.chat_template_kwargs or {}
            prompt = ChatPrompt(said, shown_tools(message.tools), options, message.add_generation_prompt is not False)
            token_ids = await served.tokenizer.prompt_tokens(check_chat(prompt, MAX_TEXT_BYTES))
        content: dict[str, object] = {
            "count": len(token_ids),
            "max_model_len": served.max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if message.return_token_strs:
            texts = TokenTexts(served.tokenizer.token_bytes)
            content["token_strs"] = [texts.text(token_id) for token_id in token_ids]
        return json_reply(content)

    async def detokenize(self, message: DetokenizeRequest, call: Call) -> Reply:
        """Raises: BatonError."""
        served = (await self._dispatcher.choose(message.model or "")).served
        if len(message.tokens) > MAX_DETOKENIZE_TOKENS:
            raise InvalidArgument("token_ids", f"at most {MAX_DETOKENIZE_TOKENS}, not {len(message.tokens)}")
        token_ids = check_token_ids("token_ids", message.tokens, served.vocab_size)
        return json_reply({"prompt": await served.tokenizer.decode(token_ids, False)})


async def _cumulative(
    message: GenerateRequest, events: AsyncGenerator[ResponseEvent, None]
) -> AsyncGenerator[bytes, None]:
    texts = [message.prompt] * (message.n or 1)
    begun = False
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta) and event.text:
                    texts[event.index] += event.text
                    yield json.dumps({"text": texts}, ensure_ascii=False).encode() + DELIMITER
                    begun = True
        if not begun:
            yield json.dumps({"text": texts}, ensure_ascii=False).encode() + DELIMITER
    except BatonError as error:
        if not begun:
            raise
        problem: Problem = problem_of(error, RENAMED)
        yield problem.body + DELIMITER

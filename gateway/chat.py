"""POST /v1/chat/completions."""

import time
from typing import Any

from gateway.call import Call
from gateway.chat_stream import ChatStream
from gateway.collected import Choice, collect, stop_reason, usage_json
from gateway.completions import RENAMED as COMPLETION_NAMES
from gateway.messages.chat import ChatRequest
from gateway.problem import Renamed
from gateway.reply import Reply, Streamed, json_reply
from gateway.requests import chat_request
from gateway.sse import told_problems
from gateway.token_texts import TokenTexts
from gateway.tool_calls import CallBegins, CallGoesOn
from gateway.tool_choice import ToolUse, tool_use
from router.answer_ids import AnswerId
from router.dispatcher import Dispatcher

RENAMED: Renamed = {**COMPLETION_NAMES, "logprobs": "top_logprobs", "template_options": "chat_template_kwargs"}


class Chat:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def answer(self, message: ChatRequest, call: Call) -> Reply:
        """Raises: Problem, BatonError."""
        tokenizer = (await self._dispatcher.choose(message.model or "")).served.tokenizer
        tools = tool_use(message, tokenizer.chat_template)
        request = chat_request(message, call, tools)
        events = self._dispatcher.answer(request, None, call.trace, reader=call.reader)
        stream_id, texts = f"{AnswerId.CHAT}{request.request_id}", TokenTexts(tokenizer.token_bytes)
        if message.stream:
            return Streamed(told_problems(ChatStream(message, stream_id, texts, tools).chunks(events), RENAMED))
        whole = await collect(events)
        response = {
            "id": stream_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": whole.model,
            "choices": [
                {"index": index, **_choice(message, choice, texts, tools)} for index, choice in enumerate(whole.choices)
            ],
            "usage": usage_json(whole.usage),
        }
        if message.return_token_ids:
            response["prompt_token_ids"] = list(whole.prompt_token_ids)
        if message.prompt_logprobs is not None:
            response["prompt_logprobs"] = texts.prompt(whole.prompt)
        return json_reply(response)


def _choice(message: ChatRequest, choice: Choice, texts: TokenTexts, tools: ToolUse) -> dict[str, Any]:
    said = _message(choice.text, tools)
    reason = choice.finish_reason
    content: dict[str, Any] = {
        "message": said,
        "logprobs": texts.chat(choice.token_ids, choice.logprobs) if message.logprobs else None,
        "finish_reason": "tool_calls" if "tool_calls" in said and reason == "stop" else reason,
        "stop_reason": stop_reason(choice.end, message.stop_token_ids),
    }
    if message.return_token_ids:
        content["token_ids"] = choice.token_ids
    return content


def _message(text: str, tools: ToolUse) -> dict[str, Any]:
    if tools.parser is None:
        return {"role": "assistant", "content": text, "refusal": None}
    parser = tools.parser()
    content, calls = "", list[dict[str, Any]]()
    for piece in (*parser.push(text), *parser.finish()):
        match piece:
            case CallBegins(call_id=call_id, name=name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case CallGoesOn(index=index, arguments=arguments):
                calls[index]["function"]["arguments"] += arguments
            case str():
                content += piece
    if not calls:
        return {"role": "assistant", "content": content, "refusal": None}
    return {"role": "assistant", "content": content or None, "refusal": None, "tool_calls": calls}

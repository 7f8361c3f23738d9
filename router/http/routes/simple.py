"""Routes of vLLM's simple API server (POST /generate), and its routes /tokenize and /detokenize."""

import asyncio
import json
from collections.abc import Sequence

from baton.process.errors import InvalidArgument
from baton.router.dispatcher import Dispatcher
from baton.router.http.answers import TokenTexts, collect
from baton.router.http.edge.exchange import FullReply, Reply, StreamedReply, json_reply
from baton.router.http.edge.problem import Problem, refused
from baton.router.http.messages import DetokenizeRequest, GenerateRequest, TokenizeRequest
from baton.router.http.requests import HttpCall, chat_message, names_of, shown_tools, simple_request
from baton.router.http.stream import AnswerWriter, PromptEvent, stream
from baton.router.public.service import MAX_DETOKENIZE_TOKENS
from baton.router.types.request import ChatPrompt
from baton.router.types.response import Delta, ResponseEvent

DELIMITER = b"\0"
_PIECE = 1 << 12  # number of elements of a list that are encoded in one step


async def generate(dispatcher: Dispatcher, message: GenerateRequest, call: HttpCall) -> Reply:
    """Answer with `{"text": [prompt + output]}`. Chunks of a stream repeat all text. Raises: Problem, BatonError."""
    events = dispatcher.answer(simple_request(message, call), None, call.trace, reader=call.reader)
    if message.stream:
        writer = CumulativeWriter(message.prompt, message.n or 1)
        return StreamedReply(stream(writer, events, names_of(message)), "application/octet-stream")
    whole = await collect(events)
    return json_reply({"text": [message.prompt + choice.text for choice in whole.choices]})


async def tokenize(dispatcher: Dispatcher, message: TokenizeRequest, call: HttpCall) -> Reply:
    """Return the token ids of a prompt or of messages. Raises: Problem, BatonError."""
    served = (await dispatcher.choose(message.model or "")).served
    _check_tokenize(message)
    if message.prompt is not None:
        token_ids = await served.tokenize(message.prompt, message.add_special_tokens is not False, call.caller.tenant)
    else:
        messages = [chat_message(each) for each in message.messages or ()]
        options = message.chat_template_kwargs or {}
        prompt = ChatPrompt(messages, shown_tools(message.tools), options, message.add_generation_prompt is not False)
        token_ids = await served.tokenize_chat(prompt, call.caller.tenant)
    texts = TokenTexts(served.tokenizer.token_bytes) if message.return_token_strs else None
    # Encoded on a thread, since a prompt may have 100,000 tokens.
    return await asyncio.to_thread(_tokens_reply, token_ids, served.max_model_len, texts)


async def detokenize(dispatcher: Dispatcher, message: DetokenizeRequest, call: HttpCall) -> Reply:
    """Return the text of token ids. Raises: BatonError."""
    served = (await dispatcher.choose(message.model or "")).served
    if len(message.tokens) > MAX_DETOKENIZE_TOKENS:
        raise InvalidArgument(
            "token_ids", f"{len(message.tokens)} ids exceed the limit of {MAX_DETOKENIZE_TOKENS}; send fewer"
        )
    token_ids = await served.tokenizer.checked("token_ids", message.tokens, served.vocab_size)
    return json_reply({"prompt": await served.tokenizer.decode(token_ids, False)})


def _check_tokenize(message: TokenizeRequest) -> None:
    """Check that the body has a prompt or messages, and no fields that apply only to the other. Raises: Problem."""
    if (message.prompt is None) == (message.messages is None):
        raise refused("prompt", "give either prompt or messages")
    if message.messages is not None and message.add_special_tokens:
        raise refused("add_special_tokens", "applies only to prompt; a chat template adds them itself")
    for name in ("tools", "add_generation_prompt", "chat_template_kwargs"):
        if message.prompt is not None and getattr(message, name) is not None:
            raise refused(name, "applies only to messages")


def _tokens_reply(token_ids: Sequence[int], max_model_len: int, texts: TokenTexts | None) -> FullReply:
    listed_texts = b"null" if texts is None else _listed([texts.text(token_id) for token_id in token_ids])
    body = b'{"count": %d, "max_model_len": %d, "tokens": %b, "token_strs": %b}'
    return FullReply(body % (len(token_ids), max_model_len, _listed(token_ids), listed_texts))


def _listed(values: Sequence[int] | Sequence[str]) -> bytes:
    """Encode a list as JSON, in pieces, since the encoder blocks all other threads."""
    pieces = [
        json.dumps(values[begin : begin + _PIECE], ensure_ascii=False)[1:-1].encode()
        for begin in range(0, len(values), _PIECE)
    ]
    return b"[" + b", ".join(pieces) + b"]"


class CumulativeWriter(AnswerWriter):
    """Writer of a stream of POST /generate. Each chunk repeats the complete texts of all choices."""

    def __init__(self, prompt: str, n: int) -> None:
        self._texts = [bytearray(_escaped(prompt)) for _ in range(n)]
        self._has_written = False

    def write(self, event: ResponseEvent | PromptEvent) -> bytes:
        if not isinstance(event, Delta) or not event.text:
            return b""
        self._has_written = True
        self._texts[event.index] += _escaped(event.text)
        return self._chunk()

    def failed(self, problem: Problem) -> bytes:
        return problem.body + DELIMITER

    async def end(self) -> bytes:
        return b"" if self._has_written else self._chunk()

    def _chunk(self) -> bytes:
        return b'{"text": ["' + b'", "'.join(self._texts) + b'"]}' + DELIMITER


def _escaped(text: str) -> bytes:
    """Escape a text for JSON. It is called once for each new text, so that earlier text is not escaped again."""
    return json.dumps(text, ensure_ascii=False)[1:-1].encode()

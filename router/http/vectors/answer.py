"""Answers to POST /v1/embeddings in OpenAI's format, and to /v1/score and /v1/rerank in vLLM's format."""

import asyncio
import base64
import json
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from baton.router.dispatcher import Dispatcher
from baton.router.http.answers import created_now
from baton.router.http.edge.exchange import FullReply, Reply, json_reply
from baton.router.http.requests import HttpCall, prompts_of
from baton.router.http.vectors.bodies import EmbeddingRequest, RerankRequest, ScoreRequest, VectorFields
from baton.router.public.vectors import VectorCall, Vectors
from baton.router.types.response import Usage


async def answer_embeddings(dispatcher: Dispatcher, message: EmbeddingRequest, call: HttpCall) -> Reply:
    """Answer /v1/embeddings with one vector per input. Raises: Problem, BatonError."""
    inputs = prompts_of(message.input, "input")
    made = await _call(dispatcher, message, call).embed(inputs, message.dimensions, message.prompt_name)
    # Encoded on a thread, since the vectors may have millions of numbers.
    return await asyncio.to_thread(_embeddings, made, message.encoding_format == "base64")


async def answer_score(dispatcher: Dispatcher, message: ScoreRequest, call: HttpCall) -> Reply:
    """Answer /v1/score with one score per pair of texts. Raises: BatonError."""
    made = await _call(dispatcher, message, call).score(_listed(message.text_1), _listed(message.text_2))
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(made.scores)]
    return json_reply(
        {
            "id": f"score-{call.request_id}",
            "object": "list",
            "created": created_now(),
            "model": made.model,
            "system_fingerprint": made.version,
            "data": data,
            "usage": usage_of(made.usage),
        }
    )


async def answer_rerank(dispatcher: Dispatcher, message: RerankRequest, call: HttpCall) -> Reply:
    """Answer /v1/rerank with documents, best first; equal scores keep their order. Raises: BatonError."""
    made = await _call(dispatcher, message, call).score([message.query], message.documents)
    order = sorted(range(len(made.scores)), key=lambda index: -made.scores[index])
    results = [_result(message, index, made.scores[index]) for index in order[: message.top_n or None]]
    return json_reply(
        {
            "id": f"rerank-{call.request_id}",
            "model": made.model,
            "system_fingerprint": made.version,
            "results": results,
            "usage": usage_of(made.usage),
        }
    )


def _call(dispatcher: Dispatcher, message: VectorFields, call: HttpCall) -> VectorCall:
    return VectorCall(
        dispatcher,
        call.caller,
        model=message.model or "",
        request_id=message.request_id or call.request_id,
        cache_salt=message.cache_salt or "",
        priority=message.priority or 0,
        session=call.session,
        trace=call.trace,
        reader=call.reader,
    )


def _result(message: RerankRequest, index: int, score: float) -> dict[str, Any]:
    shown = {} if message.return_documents is False else {"document": {"text": message.documents[index]}}
    return {"index": index, **shown, "relevance_score": score}


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def embedding_text(numbers: Sequence[float], as_base64: bool) -> str:
    """Return a vector as JSON: a list of numbers, or a base64 text."""
    return json.dumps(base64_of(numbers) if as_base64 else list(numbers))


def base64_of(numbers: Sequence[float]) -> str:
    """Encode a vector as little-endian float32 in base64, as OpenAI's client decodes it."""
    packed = array("f", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


def _embeddings(made: Vectors, as_base64: bool) -> FullReply:
    """Encode the answer vector by vector, since the encoder blocks all other threads."""
    texts = (embedding_text(numbers, as_base64) for numbers in made.numbers)
    listed = ", ".join(
        f'{{"object": "embedding", "index": {index}, "embedding": {text}}}' for index, text in enumerate(texts)
    )
    model, usage = json.dumps(made.model, ensure_ascii=False), json.dumps(usage_of(made.usage))
    about = f'"model": {model}, "system_fingerprint": "{made.version}", "usage": {usage}'
    return FullReply(f'{{"object": "list", "data": [{listed}], {about}}}'.encode())

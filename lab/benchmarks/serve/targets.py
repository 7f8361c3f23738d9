"""Servers under load: Baton through its Python client, and any server with OpenAI's completions API.

Prompts are sent as token ids, or as text if a tokenizer is given for a server that takes only text.
"""

import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from baton.client import AsyncBatonClient, BatonClientError, Delta, RetryPolicy
from baton.lab.benchmarks.serve.load import Job, Target, TargetFailed, random_tokens
from baton.lab.commands.bench_options import ServeBenchOptions
from baton.launch import CommandFailed

TextOf = Callable[[tuple[int, ...]], str]
ERROR_CHARACTERS = 300


class BatonTarget:
    """Router of Baton. A failed call is not retried."""

    def __init__(self, address: str, model: str = "", timeout_s: float = 120.0, api_key: str | None = None) -> None:
        self.name = f"grpc://{address}"
        self._model = model
        once = RetryPolicy(attempts=1)
        self._client = AsyncBatonClient(address, timeout_s=timeout_s, retry=once, api_key=api_key)

    async def prepare(self) -> int | None:
        try:
            models = await self._client.models()
        except BatonClientError as error:
            raise TargetFailed(str(error)) from error
        return min((model.vocab_size for model in models if self._model in ("", model.name)), default=None)

    async def answer(self, job: Job, on_piece: Callable[[], None]) -> int:
        return len(await self.tokens(job, on_piece))

    async def tokens(self, job: Job, on_piece: Callable[[], None]) -> list[int]:
        """Return the tokens of an answer. Raises: TargetFailed."""
        token_ids: list[int] = []
        events = self._client.generate(
            job.prompt, max_tokens=job.output_tokens, temperature=0.0, ignore_eos=True, model=self._model
        )
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Delta) and event.token_ids:
                        on_piece()
                        token_ids += event.token_ids
        except BatonClientError as error:
            come_back_s = error.details.retry_after_s
            raise TargetFailed(f"{error.code.name}: {error.message}", error.code.name, come_back_s) from error
        return token_ids

    async def close(self) -> None:
        await self._client.close()


class OpenAITarget:
    """Server with OpenAI's API. `base`: URL without /completions. `close` also closes `client`.

    `text_of`: function that decodes prompts to text; None: prompts are sent as token ids.
    """

    def __init__(self, base: str, model: str, api_key: str, text_of: TextOf | None, client: httpx2.AsyncClient) -> None:
        self.name = base
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._text_of = text_of
        self._client = client

    async def prepare(self) -> int | None:
        """Choose the server's first model if none was named. Return None, since the server does not tell its vocabulary
        size.
        """
        if self._model:
            return None
        try:
            listed = await self._client.get(f"{self.name}/models", headers=self._headers)
            listed.raise_for_status()
            self._model = str(listed.json()["data"][0]["id"])
        except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise TargetFailed(f"--model is missing, and the server's models cannot be listed: {error}") from error
        return None

    async def answer(self, job: Job, on_piece: Callable[[], None]) -> int:
        pieces, usage_tokens = 0, None
        try:
            url = f"{self.name}/completions"
            async with self._client.stream("POST", url, json=self._body(job), headers=self._headers) as response:
                if response.is_error:
                    raise TargetFailed(f"{response.status_code}: {(await response.aread())[:ERROR_CHARACTERS]!r}")
                async for line in response.aiter_lines():
                    message = read_event(line)
                    if message.get("choices"):  # counts even without text: a token may be half a character
                        on_piece()
                        pieces += 1
                    if usage := message.get("usage"):
                        usage_tokens = usage.get("completion_tokens")
        except httpx2.HTTPError as error:
            raise TargetFailed(f"{type(error).__name__}: {error}") from error
        return pieces if usage_tokens is None else int(usage_tokens)

    async def close(self) -> None:
        await self._client.aclose()

    def _body(self, job: Job) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(job.prompt) if self._text_of is None else self._text_of(job.prompt),
            "max_tokens": job.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }


def read_event(line: str) -> dict[str, Any]:
    """Return the event in a line of a stream of server-sent events; empty if there is none. Raises: TargetFailed."""
    kind, _, data = line.partition(":")
    data = data.strip()
    if kind != "data" or data == "[DONE]":
        return {}
    try:
        message = json.loads(data)
    except ValueError as error:
        raise TargetFailed(f"an event of the stream is not JSON: {data[:ERROR_CHARACTERS]}") from error
    if not isinstance(message, dict) or message.get("error"):
        raise TargetFailed(data[:ERROR_CHARACTERS])
    return message


def make_target(url: str, model: str, api_key: str, timeout_s: float, tokenizer: Path | None) -> Target:
    """Create a target. Raises: CommandFailed if `url` is neither grpc:// nor http(s)://."""
    scheme, _, rest = url.partition("://")
    if scheme == "grpc" and rest:
        return BatonTarget(rest, model, timeout_s)
    if scheme in ("http", "https") and rest:
        unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        client = httpx2.AsyncClient(limits=unlimited, timeout=timeout_s, trust_env=False)
        return OpenAITarget(url.rstrip("/"), model, api_key, _text_of(tokenizer), client)
    raise CommandFailed(f"{url!r} is no target: give grpc://host:port of Baton, or http://host:port/v1 of any server")


def _text_of(tokenizer: Path | None) -> TextOf | None:
    if tokenizer is None:
        return None
    from tokenizers import Tokenizer

    try:
        read = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CommandFailed(f"{tokenizer}/tokenizer.json cannot be read: {error}") from error
    return lambda token_ids: str(read.decode(list(token_ids)))


WARM_UP_PROMPT_TOKENS, WARM_UP_ANSWER_TOKENS = 16, 4
DEFAULT_VOCAB_SIZE = 1000
"""Vocabulary size if neither the server nor the caller gives one."""


@dataclass(frozen=True, slots=True)
class Server:
    target: Target
    vocab_size: int


@asynccontextmanager
async def opened(options: ServeBenchOptions) -> AsyncIterator[list[Server]]:
    """Open and warm up all servers. Raises: CommandFailed."""
    urls, models = options.targets, options.model or [""]
    if len(models) not in (1, len(urls)):
        raise CommandFailed(f"{len(models)} models for {len(urls)} targets: give --model once, or once per target")
    async with AsyncExitStack() as undo:
        ready = []
        for url, model in zip(urls, models if len(models) > 1 else models * len(urls), strict=True):
            target = make_target(url, model, options.api_key, options.timeout, options.tokenizer)
            undo.push_async_callback(target.close)
            ready.append(await _warm(target, options.vocab_size))
        yield ready


async def _warm(target: Target, vocab_size: int | None) -> Server:
    try:
        reported = await target.prepare()
        size = vocab_size or reported or DEFAULT_VOCAB_SIZE
        prompt = random_tokens(random.Random("warm-up"), WARM_UP_PROMPT_TOKENS, size)
        await target.answer(Job(prompt, WARM_UP_ANSWER_TOKENS), lambda: None)
    except TargetFailed as error:
        raise CommandFailed(f"{target.name} does not answer: {error}") from error
    return Server(target, size)

"""The servers of one run of `baton bench serve`, each warmed up by a request that is not counted."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cli.bench.serve_jobs import Job, random_tokens
from cli.bench.serve_load import Target, TargetFailed
from cli.bench.serve_targets import make_target
from cli.errors import CommandFailed

WARM_UP_PROMPT_TOKENS, WARM_UP_ANSWER_TOKENS = 16, 4
DEFAULT_VOCAB_SIZE = 1000
"""Where neither the server nor the caller names it: every vocabulary has these."""


@dataclass(frozen=True, slots=True)
class Servers:
    urls: tuple[str, ...]
    models: tuple[str, ...]  # as requests name them: one for each URL, one for all of them, or none
    vocab_size: int | None  # None: as the server reports
    tokenizer: Path | None  # prompts go to HTTP servers as text
    api_key: str
    timeout_s: float  # of each request

    def model_of(self, index: int) -> str:
        """Raises: CommandFailed."""
        if len(self.models) not in (0, 1, len(self.urls)):
            raise CommandFailed(f"{len(self.models)} models for {len(self.urls)} targets: give one for each, or one")
        return self.models[index if len(self.models) > 1 else 0] if self.models else ""


@dataclass(frozen=True, slots=True)
class Server:
    target: Target
    vocab_size: int


@asynccontextmanager
async def opened(servers: Servers) -> AsyncIterator[list[Server]]:
    """All of them, warm. Raises: CommandFailed."""
    async with AsyncExitStack() as undo:
        ready = []
        for index, url in enumerate(servers.urls):
            target = make_target(url, servers.model_of(index), servers.api_key, servers.timeout_s, servers.tokenizer)
            undo.push_async_callback(target.close)
            ready.append(await _warm(target, servers.vocab_size))
        yield ready


async def _warm(target: Target, vocab_size: int | None) -> Server:
    try:
        told = await target.prepare()
        size = vocab_size or told or DEFAULT_VOCAB_SIZE
        prompt = random_tokens(random.Random("warm-up"), WARM_UP_PROMPT_TOKENS, size)
        await target.answer(Job(prompt, WARM_UP_ANSWER_TOKENS), lambda: None)
    except TargetFailed as error:
        raise CommandFailed(f"{target.name} does not answer: {error}") from error
    return Server(target, size)

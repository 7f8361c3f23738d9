"""Chunks of a stream in OpenAI's form: their common part is written once, before the first token."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.collected import usage_json
from baton.gateway.http.problem import Problem, Renamed, problem_of
from baton.gateway.http.reply import DONE
from baton.gateway.messages.sampling import StreamOptions
from baton.router.types.response import Usage
from baton.service.errors import BatonError

encode_text = json.encoder.encode_basestring
"""A text as JSON, in quotes: the function that `json.dumps` calls, without its overhead."""


def event(content: Any) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


@dataclass(slots=True)
class UsageSoFar:
    """The usage in the chunks of a stream: none, in the last chunk, or in each.

    A stream may answer several prompts: counts are kept by prompt, and reported as sums.
    """

    in_the_end: bool
    each_time: bool
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    completion_tokens: int = 0
    final: dict[int, Usage] = field(default_factory=dict)

    @staticmethod
    def of(options: StreamOptions | None) -> "UsageSoFar":
        asked = options or StreamOptions()
        in_the_end = bool(asked.include_usage)
        return UsageSoFar(in_the_end, in_the_end and bool(asked.continuous_usage_stats))

    @property
    def now(self) -> dict[str, Any]:
        prompt_tokens = sum(self.prompt_tokens.values())
        return usage_json(Usage(prompt_tokens, self.completion_tokens, self._cached_tokens))

    @property
    def total(self) -> dict[str, Any]:
        prompts: Sequence[Usage] = list(self.final.values())
        return usage_json(
            Usage(
                sum(usage.prompt_tokens for usage in prompts),
                sum(usage.completion_tokens for usage in prompts),
                self._cached_tokens,
            )
        )

    @property
    def _cached_tokens(self) -> int:
        return sum(usage.cached_tokens for usage in self.final.values())


class ChunkWriter:
    """Makes the chunks of one stream."""

    def __init__(self, stream_id: str, kind: str, created: int, model: str, usage: UsageSoFar) -> None:
        named = {"id": stream_id, "object": kind, "created": created, "model": model}
        self._head = json.dumps(named, ensure_ascii=False)[:-1]
        self._usage = usage
        self._tail = ',"usage":null}\n\n' if usage.in_the_end else "}\n\n"
        self._begin = f'data: {self._head},"choices":['
        self._end = f"]{self._tail}"

    def choice(self, choice: str, extra: str = "") -> bytes:
        """`choice` is JSON already; `extra` begins with a comma, and stands beside the choices."""
        if self._usage.each_time:
            tail = f',"usage":{json.dumps(self._usage.now)}}}\n\n'
            return f"{self._begin}{choice}]{extra}{tail}".encode()
        return f"{self._begin}{choice}]{extra}{self._tail}".encode()

    def plain(self, before: str, text: str, after: str) -> bytes:
        """The way of nearly all chunks: a text between two parts that stay the same."""
        if self._usage.each_time:
            return self.choice(f"{before}{encode_text(text)}{after}")
        return f"{self._begin}{before}{encode_text(text)}{after}{self._end}".encode()

    def usage(self) -> bytes:
        return f'data: {self._head},"choices":[],"usage":{json.dumps(self._usage.total)}}}\n\n'.encode()


async def with_problem_event(chunks: AsyncGenerator[bytes, None], renamed: Renamed) -> AsyncGenerator[bytes, None]:
    """The same chunks, with an error that comes after the first of them as a chunk. Raises: BatonError before that."""
    begun = False
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                begun = True
                yield chunk
        except BatonError as error:
            if not begun:
                raise
            yield event(problem_of(error, renamed).content)
            yield DONE
        except Problem as problem:
            if not begun:
                raise
            yield event(problem.content)
            yield DONE

"""Answers as OpenAI's routes write them: collected whole, or as chunks whose common part is written once."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.gateway.http.exchange import DONE
from baton.gateway.http.problem import Problem, Renamed, problem_of
from baton.gateway.messages import StreamOptions
from baton.router.types.events import TokenLogprob
from baton.router.types.response import (
    ChoiceFinished,
    Delta,
    Finished,
    FinishReason,
    PromptPart,
    ResponseEvent,
    Started,
    Summary,
    Usage,
)
from baton.service.errors import BatonError

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    end: ChoiceFinished | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str | None:
        return REASONS[self.end.reason] if self.end is not None else None


@dataclass(slots=True)
class Collected:
    started: Started | None = None
    prompt: list[PromptPart] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    summary: Summary | None = None

    @property
    def model(self) -> str:
        return self.started.model if self.started is not None else ""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.started.prompt_token_ids if self.started is not None else ()

    @property
    def usage(self) -> Usage:
        return self.summary.usage if self.summary is not None else Usage(0, 0, 0)


async def collect(events: AsyncGenerator[ResponseEvent, None]) -> Collected:
    """Raises: BatonError."""
    collected = Collected()
    async with aclosing(events):
        async for event in events:
            _take(collected, event)
    return collected


def _take(collected: Collected, event: ResponseEvent) -> None:
    match event:
        case Started():
            collected.started = event
        case PromptPart():
            collected.prompt.append(event)
        case Delta():
            choice = _choice(collected, event.index)
            choice.token_ids.extend(event.token_ids)
            choice.logprobs.extend(event.logprobs)
            choice.texts.append(event.text)
        case Finished():
            _choice(collected, event.choice.index).end = event.choice
            collected.summary = event.summary or collected.summary


def stop_reason(end: ChoiceFinished | None, asked_token_ids: Sequence[int] | None) -> str | int | None:
    """vLLM's: the stop text or stop token of the request that ended the answer; None for the model's own end."""
    if end is None or end.stop_text is not None:
        return None if end is None else end.stop_text
    return end.stop_token_id if end.stop_token_id in (asked_token_ids or ()) else None


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _choice(collected: Collected, index: int) -> Choice:
    while len(collected.choices) <= index:
        collected.choices.append(Choice())
    return collected.choices[index]


_LEAST = -9999.0
"""In place of minus infinity, which JSON does not have."""


class Spelling(Protocol):
    """The bytes of each token."""

    def __getitem__(self, token_id: int, /) -> bytes: ...


class TokenTexts:
    """Texts of tokens by themselves; those of a part of a character are written `bytes:\\xe2\\x82`."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling

    def text(self, token_id: int) -> str:
        spelled = self._spelling[token_id]
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """`logprobs` of a chat choice; one entry per token."""
        content = [
            {
                **self._entry(token_id, scored.logprob),
                "top_logprobs": [self._entry(each.token_id, each.logprob) for each in scored.top],
            }
            for token_id, scored in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], offset: int
    ) -> dict[str, Any]:
        """`logprobs` of a completion choice. `offset`: characters of text before the first of these tokens.

        None is the first token of a prompt, for which there is nothing that it could follow.
        """
        tokens = [self.text(token_id) for token_id in token_ids]
        offsets = []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [None if scored is None else _finite(scored.logprob) for scored in logprobs],
            "top_logprobs": [
                None if scored is None else self._top(text, scored)
                for text, scored in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def prompt(self, parts: Sequence[PromptPart]) -> list[Mapping[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token its own entry and the likeliest, by id; None for the first token."""
        return [
            None if scored is None else self._by_id(token_id, scored)
            for part in parts
            for token_id, scored in zip(part.token_ids, part.logprobs or [None] * len(part.token_ids), strict=True)
        ]

    def _by_id(self, token_id: int, scored: TokenLogprob) -> Mapping[str, Any]:
        ranks = {each.token_id: rank for rank, each in enumerate(scored.top, 1)}
        scores = {token_id: scored.logprob} | {each.token_id: each.logprob for each in scored.top}
        return {
            str(each): {"logprob": _finite(score), "rank": ranks.get(each), "decoded_token": self.text(each)}
            for each, score in scores.items()
        }

    def _top(self, text: str, scored: TokenLogprob) -> Mapping[str, float]:
        """The likeliest, and the token itself; of tokens with one text the likeliest counts."""
        top: dict[str, float] = {}
        for each in scored.top:
            top.setdefault(self.text(each.token_id), _finite(each.logprob))
        top.setdefault(text, _finite(scored.logprob))
        return top

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self._spelling[token_id]),
        }


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)


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

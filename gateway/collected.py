"""A whole answer, put together from the router's events."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

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

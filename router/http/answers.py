"""Answers in OpenAI's format: one object, or chunks of a stream. The part that all chunks share is encoded once."""

import json
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

from baton.router.http.edge.exchange import DONE
from baton.router.http.edge.problem import Problem
from baton.router.http.messages import StreamOptions
from baton.router.http.stream import AnswerWriter, PromptEvent
from baton.router.model.served_model import TokenBytes
from baton.router.types.events import TokenLogprob
from baton.router.types.response import (
    ChoiceFinished,
    Delta,
    Finished,
    FinishReason,
    PromptPart,
    ResponseEvent,
    Started,
    Usage,
    one_version,
)


def created_now() -> int:
    """Return the time in seconds since 1970 for the field `created` of OpenAI's API. Never used in computations."""
    return int(time.time())  # noqa: TID251 -- `created` of OpenAI's API


def rfc3339_now() -> str:
    """Return the time in RFC 3339 format for the field `created_at` of Ollama's API. Never used in computations."""
    return datetime.now(UTC).isoformat()  # noqa: TID251 -- `created_at` of Ollama's API


REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class CollectedChoice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # number of tokens of each entry of `texts`
    end: ChoiceFinished | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str | None:
        return REASONS[self.end.reason] if self.end is not None else None


@dataclass(frozen=True, slots=True)
class Collected:
    """Complete answer of one request, with all of its choices."""

    started: Started
    prompt: list[PromptPart]
    choices: list[CollectedChoice]
    usage: Usage


async def collect(events: AsyncGenerator[ResponseEvent, None]) -> Collected:
    """Collect the events of an answer until it is complete. Raises: BatonError."""
    started: Started | None = None
    usage: Usage | None = None
    prompt: list[PromptPart] = []
    choices = defaultdict[int, CollectedChoice](CollectedChoice)
    async with aclosing(events):
        async for event in events:
            match event:
                case Started():
                    started = event
                case PromptPart():
                    prompt.append(event)
                case Delta():
                    choice = choices[event.index]
                    choice.token_ids.extend(event.token_ids)
                    choice.logprobs.extend(event.logprobs)
                    choice.texts.append(event.text)
                    choice.tokens.append(len(event.token_ids))
                case Finished(end, summary):
                    choices[end.index].end = end
                    usage = usage if summary is None else summary.usage
    if started is None or usage is None:
        raise RuntimeError("the events of an answer lack Started, or Finished with a summary")
    return Collected(started, prompt, [choices[index] for index in sorted(choices)], usage)


def stop_reason(end: ChoiceFinished | None, asked_token_ids: Sequence[int] | None) -> str | int | None:
    """Return vLLM's `stop_reason`: the requested stop text or stop token that ended the answer; None: neither did."""
    if end is None or end.stop_text is not None:
        return None if end is None else end.stop_text
    return end.stop_token_id if end.stop_token_id in (asked_token_ids or ()) else None


def usage_json(usage: Usage, thought_tokens: int | None = None) -> dict[str, Any]:
    """Return the object `usage`. `thought_tokens`: reasoning tokens; None for a model that does not reason."""
    thoughts = {} if thought_tokens is None else {"completion_tokens_details": {"reasoning_tokens": thought_tokens}}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **thoughts,
    }


def usage_sum(usages: Iterable[Usage]) -> Usage:
    """Return the sum of the usage of several prompts."""
    counts = [(each.prompt_tokens, each.completion_tokens, each.cached_tokens) for each in usages]
    return Usage(*map(sum, zip(*counts, strict=True))) if counts else Usage(0, 0, 0)


_LEAST = -9999.0
"""Replacement for minus infinity, which JSON cannot express."""


class TokenTexts:
    """Texts of single tokens, for log-probabilities. An incomplete character is written as `bytes:\\xe2\\x82`."""

    def __init__(self, spelling: TokenBytes) -> None:
        self._spelling = spelling

    def text(self, token_id: int) -> str:
        spelled = self._spelling[token_id]
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the object `logprobs` of a choice of a chat: one entry per token."""
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
        """Return the object `logprobs` of a choice of a completion. `offset`: characters of text before these tokens.

        `logprobs`: None for the first token of a prompt.
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
        """Return vLLM's `prompt_logprobs`: per prompt token, its log-probability and those of the most likely tokens.

        Each entry is keyed by token id. The first prompt token has None.
        """
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
        """Return, by text, the log-probabilities of the most likely tokens and of the token itself.

        Of tokens with the same text, the most likely one is returned.
        """
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


_encode_text = json.encoder.encode_basestring
"""Encode a text as JSON, in quotes: what `json.dumps` calls, without its overhead."""


@dataclass(slots=True)
class UsageSoFar:
    """Token counts of a stream. The stream states them in no chunk, in the last chunk, or in each chunk.

    A stream may answer several prompts, so counts are kept by prompt and reported as sums.
    """

    in_the_end: bool
    each_time: bool
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    completion_tokens: int = 0
    thought_tokens: int | None = None
    final: dict[int, Usage] = field(default_factory=dict)

    @staticmethod
    def of(options: StreamOptions | None) -> "UsageSoFar":
        asked = options or StreamOptions()
        in_the_end = bool(asked.include_usage)
        return UsageSoFar(in_the_end, in_the_end and bool(asked.continuous_usage_stats))

    @property
    def now(self) -> dict[str, Any]:
        cached_tokens = usage_sum(self.final.values()).cached_tokens
        so_far = Usage(sum(self.prompt_tokens.values()), self.completion_tokens, cached_tokens)
        return usage_json(so_far, self.thought_tokens)

    @property
    def total(self) -> dict[str, Any]:
        return usage_json(usage_sum(self.final.values()), self.thought_tokens)


class ChunkWriter(AnswerWriter):
    """Writer of the chunks of one stream, which answers all prompts. Choice `c` of prompt `p` has index p x n + c."""

    kind: ClassVar[str]
    plain: ClassVar[tuple[str, str]]
    """JSON of a choice with only text: what precedes the text, with a placeholder for the index, and what follows."""

    def __init__(self, stream_id: str, n: int | None, options: StreamOptions | None, detailed: bool) -> None:
        """Create the writer. `n`: choices per prompt. `detailed`: choices have more than text, so `_delta` is used."""
        self.n = n or 1
        self._id = stream_id
        self._detailed = detailed
        self._usage = UsageSoFar.of(options)
        self._head = self._begin = self._version = ""
        self._tail = ',"usage":null}\n\n' if self._usage.in_the_end else "}\n\n"
        self._plain_heads: dict[int, str] = {}
        self._plain_end = f"{self.plain[1]}]{self._tail}"

    @abstractmethod
    def _started(self, place: int, started: Started) -> Iterable[bytes]: ...

    def _part(self, place: int, part: PromptPart) -> Iterable[bytes]:
        """Return the chunks for a part of the prompt, if the API returns the prompt."""
        return ()

    @abstractmethod
    def _delta(self, place: int, delta: Delta) -> Iterable[bytes]:
        """Return the chunks for new tokens. It is only called for a detailed stream."""

    @abstractmethod
    def _finished(self, place: int, finished: Finished) -> Iterable[bytes]: ...

    def write(self, event: ResponseEvent | PromptEvent) -> bytes:
        return self._written(*event) if isinstance(event, PromptEvent) else self._written(0, event)

    def failed(self, problem: Problem) -> bytes:
        return b"data: " + problem.body + b"\n\n" + DONE

    async def end(self) -> bytes:
        if not (self._begin and self._usage.in_the_end):
            return DONE
        return f'data: {self._head},"choices":[],"usage":{json.dumps(self._usage.total)}}}\n\n'.encode() + DONE

    def _written(self, place: int, event: ResponseEvent) -> bytes:
        if isinstance(event, Delta):
            self._usage.completion_tokens += len(event.token_ids)
            if self._detailed:
                return b"".join(self._delta(place, event))
            if not event.text:
                return b""
            # Fast path, for nearly all chunks: the text is put between two constant strings.
            if not self._begin:
                raise RuntimeError("the first event of a stream is not Started")
            index = place * self.n + event.index
            head = self._plain_heads.get(index) or self._plain_heads.setdefault(index, self.plain[0] % index)
            if self._usage.each_time:
                return self._encoded(f"{head}{_encode_text(event.text)}{self.plain[1]}")
            return f"{self._begin}{head}{_encode_text(event.text)}{self._plain_end}".encode()
        if isinstance(event, Started):
            self._usage.prompt_tokens[place] = event.prompt_tokens
            if not self._begin:
                named = {"id": self._id, "object": self.kind, "created": created_now(), "model": event.model}
                named["system_fingerprint"] = self._version = event.version
                self._head = json.dumps(named, ensure_ascii=False)[:-1]
                self._begin = f'data: {self._head},"choices":['
            one_version((self._version, event.version))
            return b"".join(self._started(place, event))
        if isinstance(event, PromptPart):
            return b"".join(self._part(place, event))
        if event.summary is not None:
            self._usage.final[place] = event.summary.usage
        return b"".join(self._finished(place, event))

    def choice(self, choice: Mapping[str, Any], extra: str = "") -> bytes:
        """Return a chunk with one choice. `extra`: JSON members after `choices`, beginning with a comma."""
        return self._encoded(json.dumps(choice, ensure_ascii=False), extra)

    def _encoded(self, choice: str, extra: str = "") -> bytes:
        tail = f',"usage":{json.dumps(self._usage.now)}}}\n\n' if self._usage.each_time else self._tail
        return f"{self._begin}{choice}]{extra}{tail}".encode()

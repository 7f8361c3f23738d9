"""Vectors and scores for one call, over gRPC or HTTP. Each prompt of the call is a request of its own.

At most AT_ONCE prompts of a call run concurrently, and fewer if the API key's limit is lower, so that a large call does
not delay other callers.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from baton.process.errors import DeadlineExceeded, Internal, InvalidArgument
from baton.process.telemetry.trace_context import TraceContext
from baton.router.dispatcher import Dispatcher
from baton.router.public.access import Caller
from baton.router.trace.record import CallReader, Leave
from baton.router.types.request import (
    AnyPrompt,
    ChatPrompt,
    GenerationRequest,
    Message,
    Operation,
    PairPrompt,
    Prompt,
    TextPrompt,
)
from baton.router.types.response import Finished, Summary, Usage, one_version
from baton.text.pooler_files import LogitScore, Pooler
from baton.text.pooling import MAX_INPUTS, Pooling, cosine, finish_vector

AT_ONCE = 32
INPUTS, QUERIES, DOCUMENTS, DIMENSIONS, PROMPT_NAME = "inputs", "queries", "documents", "dimensions", "prompt_name"
"""Names of fields in the public schema."""
_PROMPT_FIELDS = ("text", "token_ids", "messages", "prompt")


@dataclass(frozen=True, slots=True)
class Vectors:
    """Result of a call for vectors: one vector per input, in order."""

    model: str
    numbers: list[list[float]]
    usage: Usage
    version: str = ""  # version of the weights, equal for all


@dataclass(frozen=True, slots=True)
class ScoredDocuments:
    """Result of a call for scores: one score per document, in order."""

    model: str
    scores: list[float]
    usage: Usage
    version: str = ""  # version of the weights that computed all scores


@dataclass(frozen=True, slots=True)
class VectorCall:
    """One client call for vectors or scores. `time_left_s` None: the router's default deadline applies."""

    dispatcher: Dispatcher
    caller: Caller
    model: str = ""
    request_id: str = ""
    cache_salt: str = ""
    priority: int = 0
    session: str = ""
    time_left_s: float | None = None
    trace: TraceContext | None = None
    reader: CallReader = field(default_factory=CallReader)

    async def embed(
        self, inputs: Sequence[Prompt], dimensions: int | None = None, prompt_name: str | None = None
    ) -> Vectors:
        """Compute one vector per input. `prompt_name`: prompt of the model to put before texts. Raises: BatonError."""
        _check_count(INPUTS, len(inputs))
        chosen = await self.dispatcher.choose(self.model)
        pooler = chosen.served.vectors()
        if pooler.score is not None:
            raise InvalidArgument("model", f"{chosen.name} is a reranker without vectors; request scores")
        if dimensions is not None:
            _check_dimensions(pooler, dimensions, pooler.size)
        summaries = await self._pooled(prompted(inputs, pooler, prompt_name), pooler.pooling, INPUTS)
        if dimensions is not None:
            _check_dimensions(pooler, dimensions, len(summaries[0].pooled))
        numbers = [finish_vector(summary.pooled, pooler.normalises, dimensions) for summary in summaries]
        return Vectors(chosen.name, numbers, _usage(summaries), one_version(each.version for each in summaries))

    async def score(self, queries: Sequence[str], documents: Sequence[str]) -> ScoredDocuments:
        """Score each document for its query, or for the only query. Raises: BatonError."""
        _check_count(DOCUMENTS, len(documents))
        if len(queries) not in (1, len(documents)):
            allowed = f"must be 1, or one per document ({len(documents)}), not {len(queries)}"
            raise InvalidArgument(QUERIES, allowed)
        chosen = await self.dispatcher.choose(self.model)
        pooler = chosen.served.vectors()
        if pooler.score is not None:
            pairs = [PairPrompt(queries[index % len(queries)], each) for index, each in enumerate(documents)]
            return await self._reranked(chosen.name, pairs, pooler.score)
        ones = await self._pooled(prompted(map(TextPrompt, queries), pooler), pooler.pooling, QUERIES)
        others = await self._pooled(prompted(map(TextPrompt, documents), pooler), pooler.pooling, DOCUMENTS)
        scores = [cosine(ones[index % len(ones)].pooled, each.pooled) for index, each in enumerate(others)]
        version = one_version(each.version for each in (*ones, *others))
        return ScoredDocuments(chosen.name, scores, _usage([*ones, *others]), version)

    async def _reranked(self, model: str, pairs: Sequence[PairPrompt], score: LogitScore) -> ScoredDocuments:
        prompts = [each if score.pair else _rendered(each) for each in pairs]
        summaries = await self._pooled(prompts, score.pooling, DOCUMENTS)
        scores = [score.value(each.pooled) for each in summaries]
        return ScoredDocuments(model, scores, _usage(summaries), one_version(each.version for each in summaries))

    async def _pooled(self, prompts: Sequence[AnyPrompt], pooling: Pooling, name: str) -> list[Summary]:
        """Compute all prompts concurrently; the first failure cancels the others. `name`: field that has the prompts.

        Raises: BatonError.
        """
        until_s = None if self.time_left_s is None else time.monotonic() + self.time_left_s
        turns = asyncio.Semaphore(min(AT_ONCE, self.caller.limits.concurrency or AT_ONCE))

        async def one(place: int, prompt: AnyPrompt) -> Summary:
            async with turns:
                try:
                    return await self._summary(prompt, pooling, until_s)
                except InvalidArgument as error:
                    if error.field.partition(".")[0] not in _PROMPT_FIELDS:
                        raise
                    raise InvalidArgument(
                        f"{name}[{place}]", error.description, error.reason, error.metadata
                    ) from error

        tasks = [asyncio.ensure_future(one(place, prompt)) for place, prompt in enumerate(prompts)]
        try:
            return list(await asyncio.gather(*tasks))
        except Exception:  # not CancelledError, which means that the client left
            self.reader.leaves = Leave.SIBLING
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _summary(self, prompt: AnyPrompt, pooling: Pooling, until_s: float | None) -> Summary:
        """Compute one prompt by `until_s` (monotonic; None: no deadline of the call). Raises: BatonError."""
        left_s = None if until_s is None else until_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded
        request = GenerationRequest(
            Operation.EMBED,
            prompt,
            request_id=self.request_id,
            model=self.model,
            cache_salt=self.cache_salt,
            priority=self.priority,
            session=self.session,
            is_streamed=False,
        )
        asked = self.caller.asks(replace(request, pooling=pooling))
        summary: Summary | None = None
        async with aclosing(self.dispatcher.answer(asked, left_s, self.trace, reader=self.reader)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    summary = event.summary
        if summary is None or not summary.pooled:
            raise Internal("NO_VECTOR", self.request_id)
        return summary


def prompted(inputs: Iterable[Prompt], pooler: Pooler, name: str | None = None) -> list[Prompt]:
    """Put the model's prompt `name` before each text; token ids stay unchanged. Raises: InvalidArgument."""
    return [_behind(each, pooler, name) for each in inputs]


def _behind(given: Prompt, pooler: Pooler, name: str | None) -> Prompt:
    if not isinstance(given, TextPrompt):
        if name is not None:
            raise InvalidArgument(PROMPT_NAME, "needs text inputs, but token ids were given")
        return given
    try:
        before = pooler.prompts.text(name)
    except ValueError as error:
        raise InvalidArgument(PROMPT_NAME, str(error).removeprefix(f"{PROMPT_NAME}: ")) from error
    return TextPrompt(before + given.text) if given.text else given


def _rendered(pair: PairPrompt) -> ChatPrompt:
    return ChatPrompt([Message("query", pair.query), Message("document", pair.document)])


def _check_count(name: str, given: int) -> None:
    if not 1 <= given <= MAX_INPUTS:
        raise InvalidArgument(name, f"must be from 1 to {MAX_INPUTS}, not {given}")


def _check_dimensions(pooler: Pooler, dimensions: int, size: int | None) -> None:
    """Check that the model's vectors of `size` numbers can be cut to `dimensions`. Raises: InvalidArgument."""
    try:
        pooler.check_dimensions(dimensions, size)
    except ValueError as error:
        raise InvalidArgument(DIMENSIONS, str(error).removeprefix(f"{DIMENSIONS}: ")) from error


def _usage(summaries: Sequence[Summary]) -> Usage:
    usages = [summary.usage for summary in summaries]
    return Usage(sum(usage.prompt_tokens for usage in usages), 0, sum(usage.cached_tokens for usage in usages))

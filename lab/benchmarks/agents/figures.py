"""Figures of an agent's session, from the events of its prompts and the router's trace. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Any

import numpy

from baton.lab.benchmarks.agents.worker import ANSWER_STARTED, AgentEvent
from baton.router.trace.record import RequestOutcome

TARGET_SHARE = 0.99
_FEWEST_FITTED = 6  # fewest turns for a fit of three numbers


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    """Request that the router has answered. `reusable_tokens`: tokens of the prompt's complete blocks that earlier
    prompts or answers of the session begin with. `cached_tokens`: tokens that the service reports as cached.
    """

    step: int | None  # number of results in the prompt; None for a prompt without tools
    prompt_tokens: int
    reusable_tokens: int
    cached_tokens: int
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class TtftFit:
    """Least-squares fit of the time to first token over the number of the turn and the tokens that are not reusable."""

    p50_ms: float
    per_turn_ms: float
    per_new_token_ms: float


@dataclass(frozen=True, slots=True)
class MeasuredSession:
    """Measured session. `turns`: answered requests. `unanswered`: requests with tools and no answer in the trace."""

    turns: Sequence[MeasuredTurn]
    unanswered: int
    repeated_share: float  # part of the tokens of earlier prompts with tools that later ones repeat
    last_prompt_tokens: int

    @property
    def cached_share(self) -> float:
        """Return the part of the reusable tokens that came from a cache."""
        reusable = sum(each.reusable_tokens for each in self.turns)
        return sum(min(each.cached_tokens, each.reusable_tokens) for each in self.turns) / reusable if reusable else 0.0

    @property
    def ttft(self) -> TtftFit | None:
        """Return how TTFT depends on the turn; None for too few turns. The first turn, all of it new, is left out."""
        later = [each for each in self.turns if each.step]
        if len(later) < _FEWEST_FITTED:
            return None
        ttfts_ms = [each.ttft_ms for each in later]
        rows = [(1, each.step, each.prompt_tokens - each.reusable_tokens) for each in later]
        _, per_turn_ms, per_new_token_ms = numpy.linalg.lstsq(numpy.array(rows, float), ttfts_ms, rcond=None)[0]
        return TtftFit(median(ttfts_ms), float(per_turn_ms), float(per_new_token_ms))


class IdealCache:
    """Unbounded cache of all prompts and answers so far: the upper bound of any other cache's hits."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._names: set[int] = set()

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """Return the cached tokens of a prompt in complete blocks, except its last token, which must be computed."""
        names = self._chain(prompt[:-1])
        return self._block_tokens * sum(1 for _ in takewhile(self._names.__contains__, names))

    def add(self, tokens: Sequence[int]) -> None:
        """Cache a prompt with its answer, except the answer's last token, whose KV was not computed."""
        self._names.update(self._chain(tokens[:-1]))

    def _chain(self, tokens: Sequence[int]) -> Iterator[int]:
        name = 0
        for end in range(self._block_tokens, len(tokens) + 1, self._block_tokens):
            name = hash((name, *tokens[end - self._block_tokens : end]))
            yield name


def measure(events: Iterable[AgentEvent], spans: Iterable[Mapping[str, Any]], block_tokens: int) -> MeasuredSession:
    """Summarise a session. `spans`: lines of the router's trace file."""
    answered = {each["attributes"].get("gen_ai.response.id"): each["attributes"] for each in spans}
    started: dict[str, AgentEvent] = {}  # by request id: another attempt on a request has the same prompt
    for event in events:
        if event.kind == ANSWER_STARTED:
            started.setdefault(event.request_id, event)
    cache = IdealCache(block_tokens)
    turns: list[MeasuredTurn] = []
    for request_id, event in started.items():
        reusable_tokens = cache.cached_tokens(event.prompt)
        cache.add((*event.prompt, *event.answer))
        if (root := answered.get(request_id)) is not None and root.get("baton.outcome") == RequestOutcome.ANSWERED:
            cached_tokens = root.get("gen_ai.usage.cache_read.input_tokens", 0)
            tokens = (len(event.prompt), reusable_tokens, cached_tokens)
            turns.append(MeasuredTurn(event.step, *tokens, root["baton.ttft_ms"]))
    prompts = [numpy.array(event.prompt) for event in started.values() if event.step is not None]
    unanswered = len(prompts) - sum(turn.step is not None for turn in turns)
    return MeasuredSession(turns, unanswered, repeated_share(prompts), len(prompts[-1]) if prompts else 0)


def repeated_share(prompts: Sequence[numpy.ndarray]) -> float:
    """Return the part of the tokens of earlier prompts that later prompts repeat, each the most similar one."""
    pairs: list[tuple[int, int]] = []
    for number, prompt in enumerate(prompts):
        earlier = [(_common(each, prompt), len(each)) for each in prompts[:number]]
        pairs += [max(earlier)] if earlier else []
    return sum(repeated for repeated, _ in pairs) / sum(size for _, size in pairs) if pairs else 0.0


def _common(one: numpy.ndarray, other: numpy.ndarray) -> int:
    """Return the number of equal tokens at the beginning."""
    size = min(len(one), len(other))
    different = numpy.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size

"""Vectors and scores of prompts, offline. Names and fields are vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.engine.offline.prompts import Prompt, PromptType, as_list, check_prompt_tokens, text_of
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.sequences import PromptComputed, RequestFailed, SchedulerOutcome
from baton.text.pooler_files import LogitScore, Pooler
from baton.text.pooling import Pooling, cosine, finish_vector

NOTHING_DRAWN = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Options of `embed`.

    `dimensions`: size to which vectors are cut; None: uncut. `prompt_name`: name of the checkpoint's
    prompt to put before each text; None: the checkpoint's default prompt.
    """

    dimensions: int | None = None
    prompt_name: str | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """Score of two texts. `prompt_token_ids`: tokens of both texts, in order."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


@dataclass(frozen=True, slots=True)
class Vector:
    """Pooled vector of one prompt."""

    prompt: Prompt
    pooled: tuple[float, ...]
    cached_tokens: int


class NotFinite(ValueError):
    """Failure of a prompt: its hidden states are not finite."""


def pooled_request(request_id: int, prompt: Prompt, pooling: Pooling, adapter: int, most_tokens: int) -> Request:
    """Create a request that computes a prompt's vector. Raises: ValueError if the prompt is too long."""
    check_prompt_tokens(len(prompt.token_ids), most_tokens, pooled=True)
    of_pair = replace(pooling, second_from=prompt.second_from)
    return Request(request_id, prompt.token_ids, NOTHING_DRAWN, (), adapter=adapter, prefill_only=True, pooling=of_pair)


def vectors_of(outcomes: Sequence[SchedulerOutcome], waiting: dict[int, Prompt]) -> list[tuple[int, Vector]]:
    """Return (request id, vector) of each prompt that a step completed; remove it from `waiting`. Raises: NotFinite."""
    made = []
    for outcome in outcomes:
        if isinstance(outcome, RequestFailed):
            raise NotFinite(f"prompt {outcome.request_id}: the model's hidden states are not finite")
        if isinstance(outcome, PromptComputed) and outcome.ended:
            prompt = waiting.pop(outcome.request_id)
            made.append((outcome.request_id, Vector(prompt, outcome.pooled, outcome.cached_tokens)))
    return made


def embedding(index: int, vector: Vector, pooler: Pooler, params: PoolingParams) -> EmbeddingRequestOutput:
    """Create the output of `embed` for one prompt. Raises: ValueError, naming the field."""
    if params.dimensions is not None:
        pooler.check_dimensions(params.dimensions, len(vector.pooled))
    made = finish_vector(vector.pooled, pooler.normalises, params.dimensions)
    return EmbeddingRequestOutput(
        str(index), EmbeddingOutput(made), list(vector.prompt.token_ids), vector.cached_tokens
    )


def cosine_score(index: int, first: Vector, second: Vector) -> ScoringRequestOutput:
    return _score(index, cosine(first.pooled, second.pooled), first, second)


def logit_score(index: int, vector: Vector, score: LogitScore) -> ScoringRequestOutput:
    return _score(index, score.value(vector.pooled), vector)


def _score(index: int, score: float, *vectors: Vector) -> ScoringRequestOutput:
    token_ids = [token_id for vector in vectors for token_id in vector.prompt.token_ids]
    cached_tokens = sum(vector.cached_tokens for vector in vectors)
    return ScoringRequestOutput(str(index), ScoringOutput(score), token_ids, cached_tokens)


def with_prompt(prompt: PromptType, pooler: Pooler, name: str | None = None) -> PromptType:
    """Return a text with the checkpoint's prompt before it, or token ids unchanged. Raises: ValueError."""
    text = text_of(prompt)
    if text is not None:
        return pooler.prompts.text(name) + text
    if name is not None:
        raise ValueError("prompt_name: needs a text, not token ids")
    return prompt


def pairs_of(
    first: PromptType | Sequence[PromptType], second: PromptType | Sequence[PromptType]
) -> list[tuple[PromptType, PromptType]]:
    """Pair a single `first` with each of `second`, or both lists by index. Raises: ValueError if lengths differ."""
    ones, others = as_list(first), as_list(second)
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others) or not others:
        raise ValueError(
            f"data_1 has {len(ones)} texts and data_2 {len(others)}: data_1 must have 1, or as many as data_2"
        )
    return list(zip(ones, others, strict=True))

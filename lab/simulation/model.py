"""Model whose every token depends on all earlier KV, so that stale or lost KV changes the answer.

The KV of a token is one number, a hash of the token and of all earlier KV. "Attention" is the sum of the KV numbers,
weighted by position. `expected_answer`, the oracle, computes the same from tokens alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from baton.engine.request import uniform

MASK = (1 << 64) - 1
VOCABULARY = 257
END_TOKEN = 256
CONTEXT_TOKENS = 160
_ENDS_ONE_IN = 48

KvNumbers = npt.NDArray[np.uint64]


def mix(value: int) -> int:
    """Return the output of SplitMix64 for a state."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


WEIGHTS = tuple(mix(position) | 1 for position in range(CONTEXT_TOKENS + 1))
"""Weights of attention by position; they are odd, so that no difference of KV is lost modulo 2**64."""
_WEIGHTS: KvNumbers = np.array(WEIGHTS, dtype=np.uint64)


def attend(numbers: KvNumbers) -> int:
    """Return the weighted sum over the KV of positions [0, len(numbers))."""
    return int(np.dot(numbers, _WEIGHTS[: len(numbers)]))  # the product wraps modulo 2**64


def kv_number(attended: int, token_id: int, position: int) -> int:
    """Return the KV of a token. `attended`: hash of all earlier KV. Never 0, which fresh memory contains."""
    return mix(attended ^ mix(token_id << 20 | position)) | 1


def of_group(number: int, group: int) -> int:
    """Return the number that the layer group `group` stores for a KV number."""
    return number ^ group << 1


def add(attended: int, number: int, position: int) -> int:
    return (attended + WEIGHTS[position] * number) & MASK


@dataclass(frozen=True, slots=True)
class ModelDraw:
    """Inputs of a token's sampling, which schedulers and workers must pass on unchanged."""

    temperature: float
    seed: int
    choice: int
    history: Sequence[int] | None  # all tokens so far; None: the request has no penalties
    prompt_tokens: int  # number of prompt tokens in `history`


def next_token(attended: int, position: int, draw: ModelDraw) -> tuple[int, float]:
    """Return the token at `position` and its log-probability, which is exact in float32."""
    state = mix(attended ^ 0x5EED)
    if draw.temperature != 0.0:
        state = mix(state ^ int(uniform(draw.seed, draw.choice, position) * (1 << 53)))
    if draw.history is not None:
        state = mix(state ^ hash((tuple(draw.history), draw.prompt_tokens)))
    logprob = -float(state >> 54 & 0x3FF) / 64.0
    ends = (state >> 8) % _ENDS_ONE_IN == 0
    return (END_TOKEN if ends else state & 0xFF), logprob


@lru_cache(maxsize=512)
def prompt_attended(token_ids: tuple[int, ...]) -> int:
    attended = 0
    for position, token_id in enumerate(token_ids):
        attended = add(attended, kv_number(attended, token_id, position), position)
    return attended


def kv_numbers(token_ids: Sequence[int]) -> list[int]:
    """Return the KV of every token of a sequence."""
    numbers, attended = [], 0
    for position, token_id in enumerate(token_ids):
        number = kv_number(attended, token_id, position)
        attended = add(attended, number, position)
        numbers.append(number)
    return numbers


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Fields of a request that determine its answer."""

    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    ignores_end: bool
    looks_back: bool  # whether it has penalties, which depend on earlier tokens


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool  # whether the end token ended the answer


@lru_cache(maxsize=256)
def expected_answer(asked: ModelRequest, choice: int) -> ExpectedAnswer:
    attended, tokens = prompt_attended(asked.token_ids), list(asked.token_ids)
    logprobs: list[float] = []
    prompt_tokens = len(asked.token_ids)
    for _ in range(asked.max_tokens):
        history = tokens if asked.looks_back else None
        draw = ModelDraw(asked.temperature, asked.seed, choice, history, prompt_tokens if asked.looks_back else 0)
        token_id, logprob = next_token(attended, len(tokens), draw)
        logprobs.append(logprob)
        attended = add(attended, kv_number(attended, token_id, len(tokens)), len(tokens))
        tokens.append(token_id)
        if token_id == END_TOKEN and not asked.ignores_end:
            return ExpectedAnswer(tuple(tokens[prompt_tokens:]), tuple(logprobs), True)
    return ExpectedAnswer(tuple(tokens[prompt_tokens:]), tuple(logprobs), False)

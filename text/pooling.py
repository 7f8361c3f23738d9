"""Pooling of a prompt's tokens to one vector, and computations with such vectors. No torch.

`text/pooler_files.py` reads a checkpoint's pooling from its files.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

MAX_INPUTS = 2048
"""Maximum number of inputs of one call for vectors or scores."""


class PoolingKind(enum.Enum):
    """Tokens whose hidden states are pooled."""

    LAST = "last"  # last token
    MEAN = "mean"  # mean of all tokens
    FIRST = "cls"  # first token


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of one prompt: last hidden state of one token, or mean over all, after the model's last norm.

    With `head_token_ids`, the result is the logits of those tokens at one position. With a classification head, the ids
    are indexes of the head's labels.
    """

    kind: PoolingKind = PoolingKind.LAST
    head_token_ids: tuple[int, ...] = ()
    second_from: int | None = None  # index of the first token of the second text of a pair; None for one text

    @property
    def reuses_prefix(self) -> bool:
        """Return whether cached tokens may be reused: if only the last token, which is always computed, is pooled."""
        return self.kind is PoolingKind.LAST

    def rows(self, start: int, end: int, prompt_tokens: int) -> range:
        """Return which tokens of the chunk [start, end) are pooled, as indexes from `start`.

        The pooled vector is the sum over all chunks, divided by `divisor`.
        """
        match self.kind:
            case PoolingKind.LAST:
                return range(end - start - 1, end - start) if end == prompt_tokens else range(0)
            case PoolingKind.MEAN:
                return range(end - start)
            case PoolingKind.FIRST:
                return range(1) if start == 0 else range(0)

    def divisor(self, prompt_tokens: int) -> int:
        return prompt_tokens if self.kind is PoolingKind.MEAN else 1


def second_text(type_ids: Sequence[int]) -> int | None:
    """Return the index of the first token of a pair's second text, whose token type is 1; None if there is none."""
    return type_ids.index(1) if 1 in type_ids else None


def finish_vector(vector: Sequence[float], normalises: bool, dimensions: int | None = None) -> list[float]:
    """Shorten a pooled vector to `dimensions` numbers (arXiv:2205.13147), and scale it to length 1 if `normalises`."""
    kept = list(vector if dimensions is None else vector[:dimensions])
    if not normalises:
        return kept
    length = math.hypot(*kept)
    return [number / length for number in kept] if length else kept


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine similarity of two vectors, 0 if one of them is zero."""
    lengths = math.hypot(*first) * math.hypot(*second)
    return math.fsum(map(mul, first, second)) / lengths if lengths else 0.0


def sigmoid(number: float) -> float:
    if number >= 0:
        return 1.0 / (1.0 + math.exp(-number))
    return math.exp(number) / (1.0 + math.exp(number))

"""One vector of a prompt in place of an answer: how its tokens are pooled, and what is made of the vector.

Which of them a checkpoint wants is in its files (`text/pooler_files.py`). Without torch.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

MAX_INPUTS = 2048
"""Of one call for vectors or scores."""


class PoolingKind(enum.Enum):
    LAST = "last"  # the last token
    MEAN = "mean"  # of all tokens
    FIRST = "cls"  # the first token


@dataclass(frozen=True, slots=True)
class Pooling:
    """What one prompt is pooled to: the model's last hidden state, normalised by its last norm, of some tokens.

    With `head_token_ids` it is the logits of these tokens there instead: of one token alone. Where the checkpoint has
    a classification head, they are numbers of its labels.
    """

    kind: PoolingKind = PoolingKind.LAST
    head_token_ids: tuple[int, ...] = ()
    second_from: int | None = None  # of a pair of texts, the token that the second one begins with; None: one text

    @property
    def reuses_prefix(self) -> bool:
        """The last token is always computed; the others are not where their KV is cached."""
        return self.kind is PoolingKind.LAST

    def rows(self, start: int, end: int, prompt_tokens: int) -> range:
        """Which of the tokens at [start, end) take part, counted from `start`. Their sum over all chunks, divided by
        `divisor`, is the result."""
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
    """Where the tokens of the second of two texts begin, whose type is 1; None where the tokenizer gives no types."""
    return type_ids.index(1) if 1 in type_ids else None


def finish_vector(vector: Sequence[float], normalises: bool, dimensions: int | None = None) -> list[float]:
    """The first `dimensions` of a pooled vector (arXiv:2205.13147), then of length 1 where it `normalises`."""
    kept = list(vector if dimensions is None else vector[:dimensions])
    if not normalises:
        return kept
    length = math.hypot(*kept)
    return [number / length for number in kept] if length else kept


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """0 where one of them has no direction."""
    lengths = math.hypot(*first) * math.hypot(*second)
    return math.fsum(map(mul, first, second)) / lengths if lengths else 0.0


def sigmoid(number: float) -> float:
    if number >= 0:
        return 1.0 / (1.0 + math.exp(-number))
    return math.exp(number) / (1.0 + math.exp(number))

"""Second implementation of sampling, written from the definition in lab/chaos/README.md. Pure; float64 numpy.

Shares no code with the service, so that both would have to make the same mistake.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from numpy.typing import NDArray

Floats = NDArray[numpy.float64]
CLOSE = 1e-4  # difference of logits, probabilities or uniform numbers that rounding may cause
_MODULUS = 2**64


def uniform_number(seed: int, choice: int, position: int) -> float:
    """Return the uniform number in [0, 1) of a token: SplitMix64 over seed, choice and position; 53 bits."""
    state = 0
    for part in (seed, choice, position):
        state = ((state ^ part) + 0x9E3779B97F4A7C15) % _MODULUS
        state = (state ^ state // 2**30) * 0xBF58476D1CE4E5B9 % _MODULUS
        state = (state ^ state // 2**27) * 0x94D049BB133111EB % _MODULUS
        state ^= state // 2**31
    return state // 2**11 / 2**53


@dataclass(frozen=True, slots=True)
class Filters:
    """Temperature and filters, in the order in which they are applied. Default values keep all tokens."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Filters":
        return cls(**{name: options[name] for name in cls.__dataclass_fields__ if name in options})

    def neighbours(self) -> Iterator["Filters"]:
        """Yield copies of these filters with one bound shifted up or down by CLOSE."""
        for step in (-CLOSE, CLOSE):
            if self.top_p < 1.0:
                yield replace(self, top_p=min(1.0, self.top_p + step))
            if self.min_p > 0.0:
                yield replace(self, min_p=self.min_p * (1.0 + step))
            if self.typical_p < 1.0:
                yield replace(self, typical_p=min(1.0, self.typical_p + step))


@dataclass(frozen=True, slots=True)
class SampledDraw:
    """Drawn token. `is_close`: whether rounding could change it."""

    token_id: int
    is_close: bool


def adjusted(scores: Floats, prompt: Sequence[int], answer: Sequence[int], options: Mapping[str, Any]) -> Floats:
    """Return the logits with bias and penalties applied.

    The repetition penalty counts tokens of prompt and answer; frequency and presence penalty those of the answer.
    """
    scores = scores.copy()
    for token_id, bias in options.get("logit_bias", {}).items():
        scores[token_id] += bias
    repetition = options.get("repetition_penalty", 1.0)
    for token_id in {*prompt, *answer} if repetition != 1.0 else ():
        scores[token_id] *= repetition if scores[token_id] < 0 else 1.0 / repetition
    for token_id, count in Counter(answer).items():
        scores[token_id] -= options.get("frequency_penalty", 0.0) * count + options.get("presence_penalty", 0.0)
    return scores


def drawn(scores: Floats, filters: Filters, number: float) -> SampledDraw:
    """Draw a token. `scores`: result of `adjusted`."""
    descending = numpy.sort(scores)[::-1]
    if filters.temperature == 0.0:
        return SampledDraw(int(scores.argmax()), bool(descending[0] - descending[1] < CLOSE))
    token_id = _picked(_shares(scores, filters), number)
    alike = [(filters, number - CLOSE), (filters, number + CLOSE), *((each, number) for each in filters.neighbours())]
    others = (_picked(_shares(scores, each), min(max(moved, 0.0), 1.0 - 2**-53)) for each, moved in alike)
    top_k = filters.top_k
    tied = 0 < top_k < len(scores) and descending[top_k - 1] - descending[top_k] < CLOSE
    return SampledDraw(token_id, bool(tied) or any(each != token_id for each in others))


def _picked(shares: Floats, number: float) -> int:
    """Return the token whose interval of the cumulative probabilities, in order of token ids, contains `number`."""
    ends = numpy.cumsum(shares)
    return int(numpy.argmax(ends > number * ends[-1]))


def _shares(scores: Floats, filters: Filters) -> Floats:
    kept = scores
    if 0 < filters.top_k < len(scores):
        kept = numpy.where(scores >= numpy.partition(scores, -filters.top_k)[-filters.top_k], scores, -numpy.inf)
    shares = numpy.exp((kept - kept.max()) / filters.temperature)
    shares /= shares.sum()
    if filters.top_p < 1.0:
        shares = _likeliest(shares, filters.top_p)
    if filters.min_p > 0.0:
        shares = numpy.where(shares >= filters.min_p * shares.max(), shares, 0.0)
    if filters.typical_p < 1.0:
        shares = _typical(shares / shares.sum(), filters.typical_p)
    whole: Floats = shares / shares.sum()
    return whole


def _likeliest(shares: Floats, mass: float) -> Floats:
    """Return `shares` with 0 for all but the fewest largest that sum to `mass`. Ties keep the higher token ids."""
    order = numpy.lexsort((numpy.arange(len(shares)), shares))[::-1]
    before = numpy.concatenate(([0.0], numpy.cumsum(shares[order])[:-1]))
    result = numpy.zeros_like(shares)
    inside = order[before < mass]
    result[inside] = shares[inside]
    return result


def _typical(shares: Floats, mass: float) -> Floats:
    """Return `shares` with 0 for all but the fewest that sum to `mass`, by closeness of information to the entropy.

    Tokens as close as the last kept token are kept too.
    """
    with numpy.errstate(divide="ignore"):
        information = -numpy.log(shares)
    entropy = float(numpy.sum(shares[shares > 0.0] * information[shares > 0.0]))
    distance = numpy.abs(information - entropy)
    order = numpy.argsort(distance, kind="stable")
    last = order[min(int(numpy.sum(numpy.cumsum(shares[order]) < mass)), len(order) - 1)]
    result: Floats = numpy.where(distance <= distance[last], shares, 0.0)
    return result

"""Sampling parameters that are one number each: the only place of their names, defaults and ranges. And the bounds of
the others, which router and workers check.

A new one is a line of `SamplingNumbers`, a field of both protos, and of the HTTP message, the client's options and the
command's flags; the sampler gives it its meaning. Everything between them goes by `NUMBERS`.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

MAX_LENGTH_PENALTY = 10.0  # the length is raised to it
MAX_CHOICES = 16  # and beams
MAX_STOP_TOKEN_IDS = 64  # beside the model's own
MAX_LOGPROBS = 20
MAX_BIASES = 300
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 64  # as texts, and once more as tokens
MAX_BAD_WORD_TOKENS = 256


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Values that a parameter may have. `above`: `least` itself is none of them."""

    least: float
    most: float = math.inf
    above: bool = False

    def fault(self, value: float) -> str | None:
        """The end of an error message for a value out of range, which NaN is too."""
        if self.above and value == self.least:
            return f"must be above {self.least:g}"
        if math.isfinite(value) and self.least <= value <= self.most:
            return None
        bounded = self.most < math.inf
        allowed = f"a number from {self.least:g} to {self.most:g}" if bounded else f"at least {self.least:g}"
        return f"must be {allowed}, not {value:g}"


BIASES = NumberRange(-100.0, 100.0)


def _number(
    default: float,
    least: float,
    most: float = math.inf,
    *,
    above: bool = False,
    stated: bool = False,
    filters: bool = False,
) -> Any:
    """`stated`: a model's generation_config.json may state another default. `filters`: it bars unlikely tokens."""
    return field(
        default=default, metadata={"range": NumberRange(least, most, above), "stated": stated, "filters": filters}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """The defaults change nothing. Ranges are checked by `check_numbers`, where values come in."""

    temperature: float = _number(0.0, 0.0, 100.0, stated=True)  # 0 is greedy
    top_k: int = _number(0, 0, stated=True, filters=True)  # 0 keeps all
    top_p: float = _number(1.0, 0.0, 1.0, above=True, stated=True, filters=True)  # 1 keeps all
    min_p: float = _number(0.0, 0.0, 1.0, stated=True, filters=True)  # 0 keeps all
    typical_p: float = _number(1.0, 0.0, 1.0, above=True, stated=True, filters=True)  # 1 keeps all
    repetition_penalty: float = _number(1.0, 0.0, 10.0, above=True, stated=True)  # of tokens in prompt and answer
    presence_penalty: float = _number(0.0, -2.0, 2.0)  # of tokens in the answer
    frequency_penalty: float = _number(0.0, -2.0, 2.0)  # of tokens in the answer, per occurrence
    min_tokens: int = _number(0, 0)  # no stop token before so many


@dataclass(frozen=True, slots=True)
class NumberField:
    default: float
    range: NumberRange
    stated: bool  # see `_number`
    filters: bool


NUMBERS: Mapping[str, NumberField] = {
    each.name: NumberField(cast(float, each.default), **each.metadata) for each in fields(SamplingNumbers)
}
"""By name."""
NEVER_ZERO = tuple(name for name, number in NUMBERS.items() if number.range.fault(0) is not None)


def numbers_of(parameters: SamplingNumbers) -> dict[str, Any]:
    """By name, to make other parameters of, or a message whose fields have the same names."""
    return {name: getattr(parameters, name) for name in NUMBERS}


def received_numbers(message: object) -> dict[str, Any]:
    """Of a message between our processes, where a 0 out of range is a field that its sender did not know."""
    found = {name: getattr(message, name) for name in NUMBERS}
    return found | {name: NUMBERS[name].default for name in NEVER_ZERO if not found[name]}


def check_numbers(parameters: SamplingNumbers) -> None:
    """Raises: ValueError, naming the field."""
    for name, number in NUMBERS.items():
        fault = number.range.fault(getattr(parameters, name))
        if fault is not None:
            raise ValueError(f"{name} {fault}")


def mean_logprob(logprobs: Sequence[float]) -> float:
    """Return the score by which best_of ranks choices, as OpenAI defines it: the mean, -inf without a token."""
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


class BeamStop(enum.Enum):
    """When a beam search ends before max_tokens: once as many beams have ended as it is wide, and ..."""

    UNPROMISING = "unpromising"  # none of the running beams, if it ended now, would be better than the worst of those
    FULL = "full"  # at once
    NEVER = "never"  # none of the running beams can become better than the worst of those


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Raises ValueError, naming the field, for a value without meaning."""

    width: int
    length_penalty: float = 1.0  # above 0 favours long answers, since scores are negative
    stop: BeamStop = BeamStop.UNPROMISING

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError("beam_width must be at least 1")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise ValueError(f"length_penalty must be within {MAX_LENGTH_PENALTY:g} of 0")

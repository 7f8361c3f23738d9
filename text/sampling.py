"""Names, defaults and ranges of sampling parameters that are one number each, and the limits of all others.

A new number needs a line in `SamplingNumbers`, a field in both protos, in the HTTP message, in the client's options and
in the command's flags; the sampler gives it its meaning. Everything between them iterates over `NUMBERS`.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

MAX_LENGTH_PENALTY = 10.0  # exponent of the length
MAX_CHOICES = 16  # also of beams
MAX_STOP_TOKEN_IDS = 64  # in addition to the model's own
MAX_LOGPROBS = 20
MAX_BIASES = 300
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 64  # as strings, and again as token sequences
MAX_BAD_WORD_TOKENS = 256


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Allowed values of a parameter. `above` excludes `least` itself."""

    least: float
    most: float = math.inf
    above: bool = False

    def fault(self, value: float) -> str | None:
        """Return the end of an error message for a value out of range, NaN included; None for an allowed value."""
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
    """Declare a number. `stated`: generation_config.json may change the default. `filters`: bars unlikely tokens."""
    return field(
        default=default, metadata={"range": NumberRange(least, most, above), "stated": stated, "filters": filters}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """Numbers of a request. The defaults change nothing; `check_numbers` checks the ranges at the edge."""

    temperature: float = _number(0.0, 0.0, 100.0, stated=True)  # 0 is greedy
    top_k: int = _number(0, 0, stated=True, filters=True)  # 0 keeps all
    top_p: float = _number(1.0, 0.0, 1.0, above=True, stated=True, filters=True)  # 1 keeps all
    min_p: float = _number(0.0, 0.0, 1.0, stated=True, filters=True)  # 0 keeps all
    typical_p: float = _number(1.0, 0.0, 1.0, above=True, stated=True, filters=True)  # 1 keeps all
    repetition_penalty: float = _number(1.0, 0.0, 10.0, above=True, stated=True)  # for tokens in prompt and answer
    presence_penalty: float = _number(0.0, -2.0, 2.0)  # of tokens in the answer
    frequency_penalty: float = _number(0.0, -2.0, 2.0)  # for tokens in the answer, per occurrence
    min_tokens: int = _number(0, 0)  # no stop token within the first min_tokens


@dataclass(frozen=True, slots=True)
class NumberField:
    """Default and range of one number."""

    default: float
    range: NumberRange
    stated: bool  # a model may state another default
    filters: bool


NUMBERS: Mapping[str, NumberField] = {
    each.name: NumberField(cast(float, each.default), **each.metadata) for each in fields(SamplingNumbers)
}
"""Numbers by name."""
NEVER_ZERO = tuple(name for name, number in NUMBERS.items() if number.range.fault(0) is not None)


def numbers_of(parameters: SamplingNumbers) -> dict[str, Any]:
    """Return the numbers by name, for other parameters or a message with the same field names."""
    return {name: getattr(parameters, name) for name in NUMBERS}


def received_numbers(message: object) -> dict[str, Any]:
    """Return the numbers of a message between processes. A 0 out of range is a field unknown to the sender."""
    found = {name: getattr(message, name) for name in NUMBERS}
    return found | {name: NUMBERS[name].default for name in NEVER_ZERO if not found[name]}


def check_numbers(parameters: SamplingNumbers) -> None:
    """Check all ranges. Raises: ValueError, naming the field."""
    for name, number in NUMBERS.items():
        fault = number.range.fault(getattr(parameters, name))
        if fault is not None:
            raise ValueError(f"{name} {fault}")


def mean_logprob(logprobs: Sequence[float]) -> float:
    """Return the score by which best_of ranks choices, as OpenAI defines it: the mean, -inf without a token."""
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


class BeamStop(enum.Enum):
    """Condition that ends a beam search before max_tokens, once `width` beams have finished."""

    UNPROMISING = "unpromising"  # no running beam, if it finished now, would beat the worst finished one
    FULL = "full"  # immediately
    NEVER = "never"  # no running beam can ever beat the worst finished one


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a beam search. Raises ValueError, naming the field."""

    width: int
    length_penalty: float = 1.0  # above 0 favours long answers, since scores are negative
    stop: BeamStop = BeamStop.UNPROMISING

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError("beam_width must be at least 1")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise ValueError(f"length_penalty must be within {MAX_LENGTH_PENALTY:g} of 0")

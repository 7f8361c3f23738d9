"""Names, defaults and ranges of numeric sampling parameters, and limits of the others.

A new number needs a line in `SamplingNumbers`, a field in both protos, in the HTTP message, in the client's options and
in the command's flags; the sampler applies it. All code between these places iterates over `NUMBERS`.
"""

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

MAX_CHOICES = 16  # maximum number of choices, also of beams
MAX_STOP_TOKEN_IDS = 64  # maximum stop tokens of a request, in addition to the model's own
MAX_LOGPROBS = 20
MAX_BIASES = 300
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 64  # maximum number of bad words as strings, and separately as token sequences
MAX_BAD_WORD_TOKENS = 256


class FieldRefused(ValueError):
    """Invalid value of a request's field. `fault`: reason, without the field's name."""

    def __init__(self, field: str, fault: str) -> None:
        super().__init__(f"{field}: {fault}")
        self.field = field
        self.fault = fault


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Allowed values of a parameter, from `least` to `most`. `above`: whether `least` itself is excluded."""

    least: float
    most: float = math.inf
    above: bool = False

    def fault(self, value: float) -> str | None:
        """Return why a value is not allowed, without the field's name; None for an allowed value. NaN is refused."""
        if self.above and value == self.least:
            return f"must be above {self.least:g}"
        if math.isfinite(value) and self.least <= value <= self.most:
            return None
        bounded = self.most < math.inf
        allowed = f"a number from {self.least:g} to {self.most:g}" if bounded else f"at least {self.least:g}"
        return f"must be {allowed}, not {value:g}"

    def check(self, field: str, value: float) -> None:
        """Check the value of `field`. Raises: FieldRefused if it is out of range."""
        fault = self.fault(value)
        if fault is not None:
            raise FieldRefused(field, fault)


BIASES = NumberRange(-100.0, 100.0)
LENGTH_PENALTIES = NumberRange(-10.0, 10.0)  # range of the exponent of an answer's length


def _number(
    default: float,
    least: float,
    most: float = math.inf,
    *,
    above: bool = False,
    stated: bool = False,
    filters: bool = False,
) -> Any:
    """Declare a number. `stated`: generation_config.json may set its default. `filters`: it removes unlikely tokens."""
    return field(
        default=default, metadata={"range": NumberRange(least, most, above), "stated": stated, "filters": filters}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """Numeric sampling parameters of a request. The defaults mean greedy sampling without penalties."""

    temperature: float = _number(0.0, 0.0, 100.0, stated=True)  # 0: greedy sampling
    top_k: int = _number(0, 0, stated=True, filters=True)  # 0 keeps all tokens
    top_p: float = _number(1.0, 0.0, 1.0, above=True, stated=True, filters=True)  # 1 keeps all tokens
    min_p: float = _number(0.0, 0.0, 1.0, stated=True, filters=True)  # 0 keeps all tokens
    typical_p: float = _number(1.0, 0.0, 1.0, above=True, stated=True, filters=True)  # 1 keeps all tokens
    repetition_penalty: float = _number(1.0, 0.0, 10.0, above=True, stated=True)  # for tokens in prompt and answer
    presence_penalty: float = _number(0.0, -2.0, 2.0)  # for tokens in the answer
    frequency_penalty: float = _number(0.0, -2.0, 2.0)  # for tokens in the answer, per occurrence
    min_tokens: int = _number(0, 0)  # minimum tokens of the answer before a stop token


@dataclass(frozen=True, slots=True)
class NumberField:
    """Default and range of one numeric sampling parameter."""

    default: float
    range: NumberRange
    stated: bool  # whether a model's generation_config.json may set another default
    filters: bool


NUMBERS: Mapping[str, NumberField] = {
    each.name: NumberField(cast(float, each.default), **each.metadata) for each in fields(SamplingNumbers)
}
"""Numeric sampling parameters by name."""
NEVER_ZERO = tuple(name for name, number in NUMBERS.items() if number.range.fault(0) is not None)


def numbers_of(parameters: SamplingNumbers) -> dict[str, Any]:
    """Return the numeric parameters by name, to fill other parameters or a message with the same field names."""
    return {name: getattr(parameters, name) for name in NUMBERS}


def received_numbers(message: object) -> dict[str, Any]:
    """Return the numeric parameters in a message between processes.

    If a field is 0 although 0 is out of range, the sender does not know the field, and the default is returned.
    """
    found = {name: getattr(message, name) for name in NUMBERS}
    return found | {name: NUMBERS[name].default for name in NEVER_ZERO if not found[name]}


def check_numbers(parameters: SamplingNumbers) -> None:
    """Check that all numeric parameters are in range. Raises: FieldRefused."""
    for name, number in NUMBERS.items():
        number.range.check(name, getattr(parameters, name))


def check_choices(name: str, asked: int, least: int, most: int) -> int:
    """Return `asked`, the number of choices or beams in field `name`, if it is in range. Raises: FieldRefused.

    `least`: minimum: 1 for field n, and the value of n for other fields.
    """
    if not least <= asked <= most:
        bounds = f"from 1 to {most}" if name == "n" else f"from n, {least}, to {most}"
        raise FieldRefused(name, f"must be {bounds}, not {asked}")
    return asked


def check_alone(name: str, others: Iterable[tuple[str, object]]) -> None:
    """Reject other fields set together with field `name`. `others`: (field, value). Raises: FieldRefused."""
    for other, value in others:
        if value:
            raise FieldRefused(other, f"cannot be combined with {name}")


def long_prompt_fault(prompt_tokens: int, max_model_len: int, pooled: bool = False, or_more: bool = False) -> str:
    """Return the reason to reject a prompt that is too long.

    An answer needs room for one token after the prompt; a pooled prompt may fill the context. `or_more`: whether
    `prompt_tokens` is only a lower bound.
    """
    counted = f"{prompt_tokens} tokens{' or more' if or_more else ''}"
    most = most_prompt_tokens(max_model_len, pooled)
    return f"{counted}; at most {most}{'' if pooled else ' leave room for one token of the answer'}"


def most_prompt_tokens(max_model_len: int, pooled: bool = False) -> int:
    return max_model_len - (not pooled)


def bad_word_tokens(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of bad words. A word has two: of the word alone, and of the word after a space.

    If the second sequence ends with the first, only the first is returned. Raises: FieldRefused for a word without
    tokens.
    """
    found: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        alone, after_space = tuple(encode(word)), tuple(encode(f" {word}"))
        if not alone:
            raise FieldRefused(f"bad_words[{index}]", "the model's tokenizer has no tokens for it")
        found += [alone] if after_space[-len(alone) :] == alone else [alone, after_space]
    return tuple(found)


def mean_logprob(logprobs: Sequence[float]) -> float:
    """Return the mean log-probability, -inf without tokens. As OpenAI defines, best_of ranks choices by this mean."""
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


class BeamStop(enum.Enum):
    """Condition that ends a beam search before max_tokens, once `width` beams have finished."""

    UNPROMISING = "unpromising"  # ends if no running beam, finished now, would beat the worst finished beam
    FULL = "full"  # ends immediately
    NEVER = "never"  # ends if no running beam can ever beat the worst finished beam


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a beam search. Raises FieldRefused."""

    width: int
    length_penalty: float = 1.0  # above 0 favours long answers, since scores are negative
    stop: BeamStop = BeamStop.UNPROMISING

    def __post_init__(self) -> None:
        if self.width < 1:
            raise FieldRefused("beam_width", "must be at least 1")
        LENGTH_PENALTIES.check("length_penalty", self.length_penalty)

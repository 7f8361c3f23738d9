"""Sampling parameters and structured output under vLLM's names, and their conversion to the engine's parameters."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine.offline.prompts import check_prompt_tokens
from baton.engine.sampling import params as sampling_params
from baton.text.sampling import (
    FieldRefused,
    NumberRange,
    SamplingNumbers,
    bad_word_tokens,
    check_alone,
    check_choices,
    numbers_of,
)
from baton.text.speculation import most_drafted
from baton.text.structured.output import StructuredKind, StructuredOutput, choices_of
from baton.text.structured.thoughts import MAX_BUDGET

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Structured output: exactly one field is set. JSON answers have no white space.

    Creating a request raises ValueError if no field or several are set, or if a value is invalid.
    """

    json: str | Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # grammar in llguidance's Lark syntax
    json_object: bool | None = None
    thoughts: str | None = None  # rules of the reasoning before the answer, see text/structured/thoughts.py

    @staticmethod
    def from_output(asked: StructuredOutput) -> "StructuredOutputsParams":
        """Convert the engine's structured output to these parameters. Raises: FormRefused for invalid choices."""
        match asked.kind:
            case StructuredKind.JSON_SCHEMA:
                return StructuredOutputsParams(json=asked.text)
            case StructuredKind.JSON_OBJECT:
                return StructuredOutputsParams(json_object=True)
            case StructuredKind.REGEX:
                return StructuredOutputsParams(regex=asked.text)
            case StructuredKind.GRAMMAR:
                return StructuredOutputsParams(grammar=asked.text)
            case StructuredKind.CHOICE:
                return StructuredOutputsParams(choice=choices_of(asked))
            case StructuredKind.THOUGHTS:
                return StructuredOutputsParams(thoughts=asked.text)

    def output(self) -> StructuredOutput:
        """Convert the parameters to the engine's structured output. Raises: ValueError unless one field is set."""
        schema = self.json if self.json is None or isinstance(self.json, str) else json.dumps(self.json)
        asked = [
            StructuredOutput(kind, text)
            for kind, text in (
                (StructuredKind.JSON_SCHEMA, schema),
                (StructuredKind.REGEX, self.regex),
                (StructuredKind.GRAMMAR, self.grammar),
                (StructuredKind.JSON_OBJECT, "" if self.json_object else None),
                (StructuredKind.THOUGHTS, self.thoughts),
            )
            if text is not None
        ]
        if self.choice is not None:
            asked.append(StructuredOutput.choice(self.choice))
        if len(asked) != 1:
            raise ValueError("structured_outputs: needs exactly one of json, regex, choice, grammar and json_object")
        return asked[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingNumbers):
    """Sampling parameters of one prompt. Names and defaults are vLLM's.

    A top_k of -1 keeps all tokens, like 0. Creating a request raises ValueError, naming the field.
    """

    n: int = 1
    best_of: int | None = None  # choices to generate; the n best by mean log-probability are returned
    temperature: float = 1.0
    seed: int | None = None  # None: derived from the engine's seed and the request's number
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to max_model_len
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # like logprobs, for prompt tokens; disables the prefix cache for the prompt
    detokenize: bool = True
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None  # maximum reasoning tokens; structured_outputs apply after them
    speculative: Mapping[str, Any] | None = None
    """{"method": "ngram", "draft_model" or "off", "num_speculative_tokens": 1 to 64}, within the engine's
    speculative_config. Drafting changes no token.
    """

    @property
    def choices(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings. Raises: ValueError for an empty string, or without detokenize."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stops:
            raise FieldRefused("stop", "a stop string is empty")
        if stops and not self.detokenize:
            raise FieldRefused("stop", "stop strings need detokenize=True")
        return stops


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a model's requests, and the tokens that end its answers."""

    max_model_len: int  # maximum tokens of prompt plus answer
    max_choices: int  # maximum number of choices per request
    eos_token_ids: frozenset[int]


def resolve(
    params: SamplingParams, prompt_tokens: int, limits: ModelLimits, seed: int, encode: Encode
) -> sampling_params.SamplingParams:
    """Return the engine's parameters for one prompt. `seed`: used if `params` has no seed.

    As in vLLM, max_tokens is cut to the remaining context. Raises: ValueError, naming the field.
    """
    check_prompt_tokens(prompt_tokens, limits.max_model_len)
    room = limits.max_model_len - prompt_tokens
    check_choices("n", params.n, 1, limits.max_choices)
    check_choices("best_of", params.choices, params.n, limits.max_choices)
    if params.max_tokens is not None and params.max_tokens < 1:
        raise FieldRefused("max_tokens", "must be at least 1")
    params.stops  # noqa: B018 -- raises for invalid ones
    if params.thinking_token_budget is not None:
        NumberRange(0, MAX_BUDGET).check("thinking_token_budget", params.thinking_token_budget)
    if params.structured_outputs is not None or params.thinking_token_budget is not None:
        name = "thinking_token_budget" if params.structured_outputs is None else "structured_outputs"
        check_alone(
            name, (("ignore_eos", params.ignore_eos), ("allowed_token_ids", params.allowed_token_ids is not None))
        )
    eos = frozenset[int]() if params.ignore_eos else limits.eos_token_ids
    return sampling_params.SamplingParams(
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        **numbers_of(params) | {"top_k": max(0, params.top_k) if params.top_k >= -1 else params.top_k},
        seed=(seed if params.seed is None else params.seed) % (1 << 64),
        stop_token_ids=eos.union(params.stop_token_ids or ()),
        n=params.choices,
        logit_bias=dict(params.logit_bias or {}),
        allowed_token_ids=None if params.allowed_token_ids is None else frozenset(params.allowed_token_ids),
        bad_words=bad_word_tokens(params.bad_words or (), encode),
        logprobs=params.logprobs or 0,
        prompt_logprobs=params.prompt_logprobs,
        most_drafted=_most_drafted(params.speculative),
    )


def _most_drafted(asked: Mapping[str, Any] | None) -> int | None:
    """Return a request's maximum number of drafts per step; None: the engine's maximum. Raises: ValueError."""
    if asked is None:
        return None
    if unknown := asked.keys() - {"method", "num_speculative_tokens"}:
        raise FieldRefused(f"speculative.{min(unknown)}", "unknown field")
    return most_drafted(asked.get("method", "ngram"), asked.get("num_speculative_tokens"))

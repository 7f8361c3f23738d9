"""Answers in a form that can be compared bit by bit: tokens, text, end reason, log-probabilities as float32 bits."""

import struct
from dataclasses import dataclass, replace
from itertools import zip_longest

from baton.client import Choice, Completion
from baton.engine import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True)
class ExactChoice:
    """One choice of an answer. If a stop string ended it, the last token is left out: only engines return that token.

    `logprobs`: for each position, token id and float32 bits of the chosen token and of each of the likeliest tokens.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    matched_stop: str | int | None
    logprobs: tuple[tuple[tuple[int, bytes], ...], ...]


Answers = list[tuple[ExactChoice, ...]]
"""Choices of each request, in order."""


def first_tokens(answered: ExactChoice, count: int) -> ExactChoice:
    return replace(answered, token_ids=answered.token_ids[:count], logprobs=answered.logprobs[:count])


def difference(expected: tuple[ExactChoice, ...], made: tuple[ExactChoice, ...]) -> str:
    """Return a description of the first difference between two answers; empty if they are equal."""
    if len(expected) != len(made):
        return f"{len(made)} choices, not {len(expected)}"
    for number, (before, whole) in enumerate(zip(expected, made, strict=True)):
        after = whole
        if before.finish_reason == "stop" and len(whole.token_ids) == len(before.token_ids) + 1:
            after = first_tokens(whole, len(before.token_ids))
        for name in ("token_ids", "logprobs"):
            places = enumerate(zip_longest(getattr(before, name), getattr(after, name)))
            place = next((place for place, pair in places if pair[0] != pair[1]), None)
            if place is not None:
                return f"choice {number}: {name} differ at {place} of {len(before.token_ids)}"
        if before != after:
            return f"choice {number}: {after.text!r} {after.finish_reason}, not {before.text!r} {before.finish_reason}"
    return ""


def _bits(logprob: float) -> bytes:
    return struct.pack("<f", logprob)


def answered_here(output: RequestOutput) -> tuple[ExactChoice, ...]:
    return tuple(
        first_tokens(
            ExactChoice(
                each.index,
                tuple(each.token_ids),
                each.text,
                each.finish_reason or "",
                each.stop_reason,
                _logprobs_here(each),
            ),
            len(each.token_ids) - isinstance(each.stop_reason, str),
        )
        for each in output.outputs
    )


def _logprobs_here(output: CompletionOutput) -> tuple[tuple[tuple[int, bytes], ...], ...]:
    return tuple(
        tuple(sorted((token_id, _bits(each.logprob)) for token_id, each in place.items()))
        for place in output.logprobs or ()
    )


def answered_there(completion: Completion) -> tuple[ExactChoice, ...]:
    return tuple(
        ExactChoice(
            each.index,
            each.token_ids,
            each.text,
            each.finish_reason.value,
            each.matched_stop,
            _logprobs_there(each),
        )
        for each in completion.choices
    )


def _logprobs_there(choice: Choice) -> tuple[tuple[tuple[int, bytes], ...], ...]:
    places = (
        {each.token_id: each.logprob, **{other.token_id: other.logprob for other in each.top}}
        for each in choice.logprobs or ()
    )
    return tuple(tuple(sorted((token_id, _bits(logprob)) for token_id, logprob in place.items())) for place in places)

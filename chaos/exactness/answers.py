"""Answers as they are compared: tokens, texts, how they ended, and log-probabilities in the bits that the wire has."""

import struct
from dataclasses import dataclass

from baton.client import Choice, Completion
from baton.engine import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True)
class Answered:
    """One choice. `logprobs`: of its tokens and of the likeliest in their places, in the bits of the wire."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[tuple[tuple[int, bytes], ...], ...]


Answers = list[tuple[Answered, ...]]
"""Of each request, all choices in order."""


def _bits(logprob: float) -> bytes:
    return struct.pack("<f", logprob)


def answered_here(output: RequestOutput) -> tuple[Answered, ...]:
    return tuple(
        Answered(tuple(each.token_ids), each.text, each.finish_reason or "", _logprobs_here(each))
        for each in output.outputs
    )


def _logprobs_here(output: CompletionOutput) -> tuple[tuple[tuple[int, bytes], ...], ...]:
    return tuple(
        tuple(sorted((token_id, _bits(each.logprob)) for token_id, each in place.items()))
        for place in output.logprobs or ()
    )


def answered_there(completion: Completion) -> tuple[Answered, ...]:
    return tuple(
        Answered(each.token_ids, each.text, each.finish_reason.value, _logprobs_there(each))
        for each in completion.choices
    )


def _logprobs_there(choice: Choice) -> tuple[tuple[tuple[int, bytes], ...], ...]:
    places = (
        {each.token_id: each.logprob, **{other.token_id: other.logprob for other in each.top}}
        for each in choice.logprobs or ()
    )
    return tuple(tuple(sorted((token_id, _bits(logprob)) for token_id, logprob in place.items())) for place in places)

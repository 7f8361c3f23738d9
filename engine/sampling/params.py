"""Parameters of sampling and beam search, with every default resolved."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.text.sampling import NUMBERS, BeamParams, SamplingNumbers, check_numbers

if TYPE_CHECKING:
    from baton.engine.sampling.constraint import Constraint


NARROW_TOP_K = 1024  # up to this top-k, later filters process only the top k tokens, not the vocabulary


def candidates_per_beam(width: int, stop_token_ids: frozenset[int]) -> int:
    """Return the number of most likely tokens that a step of a beam search needs per beam.

    These tokens include the `width` best continuations of all beams. They also include the `width` best continuations
    that do not end, even if all stop tokens are among the most likely.
    """
    return width + len(stop_token_ids)


FILTERS_BY_VALUE = tuple(name for name, number in NUMBERS.items() if number.filters and name not in ("top_k", "top_p"))
"""Filters that need more than the order of the tokens and the total probability of the most likely ones."""


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingNumbers):
    """Sampling parameters of one request, the same for all its choices.

    `stop_token_ids` contains the model's end-of-sequence ids unless the caller wants to continue past them. Token ids
    outside the vocabulary have no effect. With `beam`, the answers are the `n` best sequences, and `logprobs` is at
    least what the search needs. Raises ValueError, naming the field, for an invalid value; the scheduler checks `n` and
    `max_tokens`.
    """

    max_tokens: int
    seed: int = 0  # seed of the random numbers, 64 bits
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # by token id: value added to its logit
    allowed_token_ids: frozenset[int] | None = None  # None allows all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    logprobs: int = 0  # number of most likely tokens reported with each answer token
    prompt_logprobs: int | None = None  # most likely tokens reported per prompt token; None: no prompt scores
    beam: BeamParams | None = None  # None: choices are sampled independently
    constraint: "Constraint | None" = field(default=None, compare=False)  # structured output of this request
    most_drafted: int | None = None  # maximum drafted tokens per step; None: the engine's limit
    adjusts_logits: bool = field(init=False, repr=False, compare=False)  # whether bias, penalties or bans apply
    needs_history: bool = field(init=False, repr=False, compare=False)  # whether `Sample.history` must be set
    # The following fields are read in every step.
    greedy: bool = field(init=False, repr=False, compare=False)
    takes_any_token: bool = field(init=False, repr=False, compare=False)  # whether sampling uses the unchanged logits
    filters_by_rank_alone: bool = field(init=False, repr=False, compare=False)  # whether only top-k and top-p filter
    first_draws: int = field(init=False, repr=False, compare=False)  # number of tokens sampled after the prompt
    is_narrow: bool = field(init=False, repr=False, compare=False)  # whether filters process only the top k tokens
    drawn_alone: bool = field(init=False, repr=False, compare=False)
    """Whether sampling needs only logits and a random number, without beams or reported alternatives."""

    def __post_init__(self) -> None:
        check_numbers(self)
        _check(self)
        penalises = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        needs_history = penalises or self.min_tokens > 0 or any(len(word) > 1 for word in self.bad_words)
        masks = bool(self.bad_words) or self.allowed_token_ids is not None
        object.__setattr__(self, "needs_history", needs_history or self.constraint is not None)
        object.__setattr__(self, "adjusts_logits", needs_history or masks or bool(self.logit_bias))
        object.__setattr__(self, "greedy", self.temperature == 0.0)
        object.__setattr__(self, "takes_any_token", not self.adjusts_logits and self.constraint is None)
        by_rank = all(getattr(self, name) == NUMBERS[name].default for name in FILTERS_BY_VALUE)
        object.__setattr__(self, "filters_by_rank_alone", by_rank)
        object.__setattr__(self, "first_draws", self.n if self.beam is None else 1)
        object.__setattr__(self, "is_narrow", 0 < self.top_k <= NARROW_TOP_K)
        object.__setattr__(self, "drawn_alone", self.takes_any_token and self.logprobs == 0 and self.beam is None)
        if self.beam is not None:
            _check_beam(self, self.beam)

    @property
    def places(self) -> int:
        """Number of the request's sequences that run at the same time."""
        return self.n if self.beam is None else self.beam.width


def _check(params: SamplingParams) -> None:
    """Check the values. Comparisons are written so that NaN fails. Raises: ValueError."""
    for name, good, wanted in (
        ("logit_bias", all(bias < math.inf for bias in params.logit_bias.values()), "finite, or -inf"),
        ("allowed_token_ids", params.allowed_token_ids is None or bool(params.allowed_token_ids), "non-empty"),
        ("bad_words", all(params.bad_words), "non-empty token sequences"),
        ("logprobs", params.logprobs >= 0, "at least 0"),
        ("prompt_logprobs", params.prompt_logprobs is None or params.prompt_logprobs >= 0, "at least 0"),
    ):
        if not good:
            raise ValueError(f"{name} must be {wanted}")


def _check_beam(params: SamplingParams, beam: BeamParams) -> None:
    """Check the beam search. Raises: ValueError."""
    if params.n > beam.width:
        raise ValueError(f"n must be at most beam_width, {beam.width}, the number of sequences to choose from")
    if not params.greedy or not params.takes_any_token:
        raise ValueError("beam_width requires temperature 0 and no change of the logits")
    needed = candidates_per_beam(beam.width, params.stop_token_ids)
    if params.logprobs < needed:
        raise ValueError(f"logprobs must be at least {needed} for this beam search")

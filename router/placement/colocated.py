"""Cost of a prompt that its decode worker computes itself, and the accuracy of such predictions. Pure."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum, auto
from statistics import median
from typing import NamedTuple

from baton.router.placement.rates import expected_here, has_answers, known_tokens, token_gap_ms
from baton.router.types.placement import Measured, PlacementRequest, WorkerRates, WorkerView

KEPT_PREDICTIONS = 256
ALIKE_FACTOR = 4.0
"""Prompts are alike whose lengths differ by no more."""


class Basis(StrEnum):
    """Basis of a predicted rate."""

    MEASURED = auto()  # prompts on this worker, with answers beside them if it has any now
    ASSUMED = auto()  # other workers, or prompts without answers beside them


@dataclass(frozen=True, slots=True)
class ColocatedPrefill:
    """Times from the dispatch on."""

    basis: Basis
    wait_ms: float  # for the prompts before it
    compute_ms: float
    prompt_tokens: int  # that the worker does not have
    answers: int  # that run there
    answers_gap_ms: float  # expected time between their tokens

    @property
    def ttft_ms(self) -> float:
        return self.wait_ms + self.compute_ms


def colocated_prefill(request: PlacementRequest, decode: WorkerView) -> ColocatedPrefill | None:
    """Predict the prefill at this decode worker; None if no prompt rate was ever measured."""
    basis = _basis(decode.rates, has_answers(decode))
    if basis is None:
        return None
    expected = expected_here(request, decode)
    return ColocatedPrefill(
        basis,
        expected.wait_ms,
        expected.compute_ms + expected.load_ms,
        request.prompt_tokens - known_tokens(request, decode),
        decode.used_slots + decode.elsewhere_slots,
        token_gap_ms(request, decode),
    )


def _basis(rates: WorkerRates, beside: bool) -> Basis | None:
    """Return the basis of the rate next to `beside` answers."""
    if beside and rates.beside_tokens_per_s is not None:
        return Basis.MEASURED
    if rates.prefill_measured is Measured.NOWHERE:
        return None
    return Basis.MEASURED if rates.prefill_measured is Measured.HERE and not beside else Basis.ASSUMED


class PredictionError(NamedTuple):
    """Error of predictions for prompts that decode workers computed themselves."""

    requests: int
    median_tokens: int  # that the workers did not have
    median_error: float  # |predicted - measured| over measured
    median_ratio: float  # measured over predicted


class _Measured(NamedTuple):
    prompt_tokens: int
    predicted_ms: float
    measured_ms: float


class LocalPrefills:
    """The newest prompts that decode workers computed: when the first token was expected, and when it came."""

    def __init__(self, kept: int = KEPT_PREDICTIONS) -> None:
        self._measured: deque[_Measured] = deque(maxlen=kept)

    def take(self, prompt_tokens: int, predicted_ms: float, measured_ms: float) -> None:
        """Tokens that were to be computed, and the time from the dispatch to the first token. A time that is not
        positive says nothing.
        """
        if predicted_ms > 0.0 and measured_ms > 0.0:
            self._measured.append(_Measured(prompt_tokens, predicted_ms, measured_ms))

    def error(self, prompt_tokens: int) -> PredictionError | None:
        """Return the error for prompts of about that length, or of all; None without any.

        A remainder of few tokens takes little more than a round trip, and says nothing about a long prompt.
        """
        low, high = prompt_tokens / ALIKE_FACTOR, prompt_tokens * ALIKE_FACTOR
        alike = [each for each in self._measured if low <= each.prompt_tokens <= high] or self._measured
        if not alike:
            return None
        return PredictionError(
            len(alike),
            round(median(each.prompt_tokens for each in alike)),
            median(abs(each.predicted_ms - each.measured_ms) / each.measured_ms for each in alike),
            median(each.measured_ms / each.predicted_ms for each in alike),
        )

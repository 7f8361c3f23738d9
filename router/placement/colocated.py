"""Predicted TTFT of a prompt that its decode worker computes itself, and the accuracy of such predictions. Pure."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum, auto
from statistics import median
from typing import NamedTuple

from baton.router.placement.rates import expected_here, has_answers, known_tokens, token_gap_ms
from baton.router.types.placement import Measured, PlacementRequest, WorkerRates, WorkerView

KEPT_PREDICTIONS = 256
ALIKE_FACTOR = 4.0
"""Maximum ratio of the uncached lengths of two prompts that count as similar."""


class Basis(StrEnum):
    """Measurements from which a prompt rate is predicted."""

    MEASURED = auto()  # measured on this worker; if it has running answers, measured while answers ran
    ASSUMED = auto()  # measured on other workers only, or only without running answers


@dataclass(frozen=True, slots=True)
class LocalPrediction:
    """Predicted times of a prompt on its decode worker, counted from the dispatch."""

    basis: Basis
    wait_ms: float  # time in the queue behind other prompts
    compute_ms: float
    prompt_tokens: int  # uncached tokens of the prompt
    answers: int  # number of the worker's running answers
    answers_gap_ms: float  # expected time between tokens of those answers

    @property
    def ttft_ms(self) -> float:
        return self.wait_ms + self.compute_ms


def colocated_prefill(request: PlacementRequest, decode: WorkerView) -> LocalPrediction | None:
    """Predict the times of a prompt at this decode worker; None if no prompt rate was ever measured."""
    basis = _basis(decode.rates, has_answers(decode))
    if basis is None:
        return None
    expected = expected_here(request, decode)
    return LocalPrediction(
        basis,
        expected.wait_ms,
        expected.compute_ms + expected.load_ms,
        request.prompt_tokens - known_tokens(request, decode),
        decode.used_slots + decode.elsewhere_slots,
        token_gap_ms(request, decode),
    )


def _basis(rates: WorkerRates, beside: bool) -> Basis | None:
    """Return the basis of the prompt rate; None if it was never measured. `beside`: answers run on the worker."""
    if beside and rates.beside_tokens_per_s is not None:
        return Basis.MEASURED
    if rates.prefill_measured is Measured.NOWHERE:
        return None
    return Basis.MEASURED if rates.prefill_measured is Measured.HERE and not beside else Basis.ASSUMED


class PredictionError(NamedTuple):
    """Error of the TTFT predictions for a group of prompts that decode workers computed."""

    requests: int
    median_tokens: int  # median number of uncached prompt tokens
    median_error: float  # median of |predicted - measured| / measured
    median_ratio: float  # median of measured / predicted


class _Measured(NamedTuple):
    prompt_tokens: int
    predicted_ms: float
    measured_ms: float


class LocalPrefills:
    """Predicted and measured TTFT of the newest prompts that decode workers computed."""

    def __init__(self, kept: int = KEPT_PREDICTIONS) -> None:
        self._measured: deque[_Measured] = deque(maxlen=kept)

    def take(self, prompt_tokens: int, predicted_ms: float, measured_ms: float) -> None:
        """Add a prompt.

        `prompt_tokens`: uncached tokens. `predicted_ms`, `measured_ms`: TTFT from the dispatch; ignored if not
        positive.
        """
        if predicted_ms > 0.0 and measured_ms > 0.0:
            self._measured.append(_Measured(prompt_tokens, predicted_ms, measured_ms))

    def error(self, prompt_tokens: int) -> PredictionError | None:
        """Return the error for prompts of similar length, or for all prompts if none is similar; None without prompts.

        Errors depend on the length, because a few uncached tokens take little more than a round trip.
        """
        low, high = prompt_tokens / ALIKE_FACTOR, prompt_tokens * ALIKE_FACTOR
        similar = [each for each in self._measured if low <= each.prompt_tokens <= high] or self._measured
        if not similar:
            return None
        return PredictionError(
            len(similar),
            round(median(each.prompt_tokens for each in similar)),
            median(abs(each.predicted_ms - each.measured_ms) / each.measured_ms for each in similar),
            median(each.measured_ms / each.predicted_ms for each in similar),
        )

"""Earlier predictions of changes, with what was then measured: past.json, which measure.py writes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from baton.router.types.plain import from_plain

FILE = Path(__file__).with_name("past.json")


@dataclass(frozen=True, slots=True)
class PastPrediction:
    """Prediction of one change, and its truth. Times are medians over the requests, errors relative to the truth."""

    change: str
    requests: int
    before_ms: float  # measured TTFT before the change
    predicted_before_ms: float
    predicted_ms: float  # after the change
    true_ms: float  # measured TTFT after the change
    median_error: float
    p90_error: float
    again_error: float  # median difference of the requests' TTFTs between two runs without the change

    @property
    def has_right_sign(self) -> bool:
        """Return whether TTFT changed in the predicted direction."""
        return (self.predicted_ms < self.predicted_before_ms) == (self.true_ms < self.before_ms)


@dataclass(frozen=True, slots=True)
class PastPredictions:
    predictions: tuple[PastPrediction, ...]

    def __str__(self) -> str:
        each = self.predictions
        right = sum(one.has_right_sign for one in each)
        return (
            f"{len(each)} earlier predictions of changes: median error per request "
            f"{median(one.median_error for one in each):.0%}, worst {max(one.median_error for one in each):.0%}; "
            f"{right} had the right sign; the same load twice differed by {median(one.again_error for one in each):.0%}"
        )


def past_predictions(file: Path = FILE) -> PastPredictions | None:
    """Return the predictions of a result file; None if it does not exist."""
    if not file.is_file():
        return None
    rounds: Sequence[Any] = json.loads(file.read_text())["rounds"]
    return PastPredictions(from_plain(tuple[PastPrediction, ...], rounds))

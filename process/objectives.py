"""Latency objectives: TTFT and TBT, of the service, an API key or a request."""

import math
from dataclasses import dataclass

LEAST_SLO_MS, MOST_SLO_MS = 1.0, 86_400_000.0
"""Bounds of an objective, in milliseconds. The largest is one day, the longest deadline of a request."""


@dataclass(frozen=True, slots=True)
class RequestedObjectives:
    """Objectives that an API key or a request sets, in milliseconds; None: not set."""

    ttft_slo_ms: float | None = None
    tbt_slo_ms: float | None = None

    def or_else(self, others: "RequestedObjectives") -> "RequestedObjectives":
        """Return these objectives; an objective that is not set is taken from `others`."""
        return RequestedObjectives(
            others.ttft_slo_ms if self.ttft_slo_ms is None else self.ttft_slo_ms,
            others.tbt_slo_ms if self.tbt_slo_ms is None else self.tbt_slo_ms,
        )


@dataclass(frozen=True, slots=True)
class LatencyObjectives:
    """Objectives in milliseconds; infinite: none."""

    ttft_ms: float = math.inf  # time from the arrival of a request to its first token
    tbt_ms: float = math.inf  # longest time between two tokens of an answer

    def replaced_by(self, requested: RequestedObjectives) -> "LatencyObjectives":
        """Return the requested objectives; an objective that was not requested is taken from this object."""
        ttft_ms, tbt_ms = requested.ttft_slo_ms, requested.tbt_slo_ms
        return LatencyObjectives(
            self.ttft_ms if ttft_ms is None else ttft_ms, self.tbt_ms if tbt_ms is None else tbt_ms
        )


NO_LATENCY_OBJECTIVES = LatencyObjectives()
NONE_REQUESTED = RequestedObjectives()

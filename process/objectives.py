"""Latency objectives: TTFT and TBT, of the service, an API key or a request."""

import math
from dataclasses import dataclass

LEAST_SLO_MS, MOST_SLO_MS = 1.0, 86_400_000.0
"""Bounds of an objective, in milliseconds. The largest is one day, the longest deadline of a request."""


@dataclass(frozen=True, slots=True)
class LatencyObjectives:
    """Objectives in milliseconds; infinite: none."""

    ttft_ms: float = math.inf  # time from the arrival of a request to its first token
    tbt_ms: float = math.inf  # longest time between two tokens of an answer


NO_LATENCY_OBJECTIVES = LatencyObjectives()

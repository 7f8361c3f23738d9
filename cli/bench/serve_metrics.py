"""TTFT, TPOT, ITL, latency, throughput and goodput of a run: definitions and names as in vLLM's `bench serve`. Pure.

Of the requests that ended well: TTFT is from the sending to the first piece, latency (E2EL) to the last. TPOT is
(latency - TTFT) / (output tokens - 1), one value per request with more than one token. ITL has one value per gap
between two pieces, of all requests together. A request is good where each of its values is at most the objective's;
without a second token its TPOT counts as 0. Percentiles are interpolated linearly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cli.bench.serve_load import Outcome, Run

OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds. All 0 where there was nothing to measure."""

    mean: float
    std: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Metrics:
    target: str
    duration: float  # seconds
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float  # these are all per second
    request_goodput: float | None  # None: no objectives were given
    output_throughput: float
    total_token_throughput: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    late: Spread  # how long after its arrival each was sent: where this is not small, the client was too slow
    errors: tuple[str, ...]  # the first few different ones

    def as_json(self) -> dict[str, Any]:
        """With vLLM's keys: mean_ttft_ms, median_ttft_ms, p99_ttft_ms and so on."""
        result: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                result |= {f"{'median' if part == 'p50' else part}_{name}_ms": ms for part, ms in value.items()}
            else:
                result[name] = value
        return result


ERRORS_SHOWN = 5


def measure(target: str, run: Run, objectives_ms: Mapping[str, float]) -> Metrics:
    """`objectives_ms`: of OBJECTIVES, those that a good request meets."""
    good = [outcome for outcome in run.outcomes if not outcome.error]
    input_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    met = sum(is_good(outcome, objectives_ms) for outcome in good)
    seconds = run.duration_s
    return Metrics(
        target=target,
        duration=seconds,
        completed=len(good),
        failed=len(run.outcomes) - len(good),
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        request_throughput=len(good) / seconds,
        request_goodput=met / seconds if objectives_ms else None,
        output_throughput=output_tokens / seconds,
        total_token_throughput=(input_tokens + output_tokens) / seconds,
        ttft=spread([outcome.ttft_s for outcome in good]),
        tpot=spread([tpot_s(outcome) for outcome in good if outcome.output_tokens > 1]),
        itl=spread([gap_s for outcome in good for gap_s in outcome.gaps_s]),
        e2el=spread([outcome.latency_s for outcome in good]),
        late=spread([outcome.late_s for outcome in run.outcomes]),
        errors=tuple(dict.fromkeys(outcome.error for outcome in run.outcomes if outcome.error))[:ERRORS_SHOWN],
    )


def tpot_s(outcome: Outcome) -> float:
    """Seconds per token after the first; 0 where there is none."""
    if outcome.output_tokens <= 1:
        return 0.0
    return (outcome.latency_s - outcome.ttft_s) / (outcome.output_tokens - 1)


def is_good(outcome: Outcome, objectives_ms: Mapping[str, float]) -> bool:
    values_s = {"ttft": outcome.ttft_s, "tpot": tpot_s(outcome), "e2el": outcome.latency_s}
    return all(values_s[name] * 1e3 <= most_ms for name, most_ms in objectives_ms.items())


def spread(values_s: Sequence[float]) -> Spread:
    if not values_s:
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0)
    values_ms = np.asarray(values_s) * 1e3
    p50, p90, p99 = (float(value) for value in np.percentile(values_ms, (50, 90, 99)))
    return Spread(float(values_ms.mean()), float(values_ms.std()), p50, p90, p99)

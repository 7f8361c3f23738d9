"""What `baton bench serve` asks for and how it counts: no server is needed."""

import math

import numpy as np
import pytest

from baton.lab.benchmarks.serve.load import LoadOutcome, LoadRun, RandomJobs, measure, poisson_arrivals_s, spread


def outcome(sent_s: float, pieces_s: list[float], output_tokens: int, error: str = "") -> LoadOutcome:
    return LoadOutcome(10, output_tokens, sent_s, 0.0, tuple(pieces_s), error)


def test_last_arrival_is_at_requests_over_rate() -> None:
    arrivals = poisson_arrivals_s(50, rate=10.0, burstiness=1.0, seed=3)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(5.0)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (100.0, 0.1)])
def test_variation_of_gaps_is_that_of_a_gamma_distribution(burstiness: float, variation: float) -> None:
    gaps = np.diff(poisson_arrivals_s(20_000, 10.0, burstiness, seed=3))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_infinite_rate_sends_all_requests_together() -> None:
    assert poisson_arrivals_s(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_random_prompts_share_the_prefix_and_keep_to_their_lengths() -> None:
    jobs = RandomJobs(100, 20, prefix_tokens=7, range_ratio=0.5, vocab_size=50, seed=0).draw([0.0] * 200)
    assert len({job.prompt[:7] for job in jobs}) == 1
    assert len({job.prompt for job in jobs}) == 200
    assert {len(job.prompt) - 7 for job in jobs} <= set(range(50, 151))
    assert {job.output_tokens for job in jobs} == set(range(10, 31))
    assert max(max(job.prompt) for job in jobs) < 50


def test_metrics_are_vllms() -> None:
    run = LoadRun(
        (
            outcome(1.0, [1.5, 1.6, 1.9], output_tokens=5),  # a piece may have several tokens
            outcome(2.0, [2.1], output_tokens=1),
            outcome(3.0, [], output_tokens=0, error="gone"),
        ),
        duration_s=4.0,
    )
    metrics = measure("x", run, {})
    assert (metrics.completed, metrics.failed, metrics.errors) == (2, 1, ("gone",))
    assert (metrics.request_throughput, metrics.output_throughput) == (0.5, 1.5)
    assert metrics.total_token_throughput == (20 + 6) / 4.0
    assert metrics.ttft.mean == pytest.approx(300.0)
    assert metrics.e2el.mean == pytest.approx(500.0)
    assert metrics.tpot.mean == pytest.approx((0.9 - 0.5) / 4 * 1e3)  # of the one request that has a second token
    assert metrics.itl.mean == pytest.approx(200.0)
    assert metrics.request_goodput is None


def test_percentiles_are_interpolated() -> None:
    found = spread([0.001, 0.002, 0.003, 0.004])
    assert found.p50 == pytest.approx(2.5)
    assert found.p90 == pytest.approx(3.7)


@pytest.mark.parametrize(
    ("objectives_ms", "good"), [({"ttft": 500.0}, 2), ({"ttft": 499.0}, 1), ({"tpot": 99.0}, 1), ({"e2el": 1e4}, 2)]
)
def test_goodput_counts_requests_that_keep_to_every_objective(objectives_ms: dict[str, float], good: int) -> None:
    run = LoadRun((outcome(0.0, [0.5, 0.7], 3), outcome(0.0, [0.1], 1)), duration_s=2.0)
    assert measure("x", run, objectives_ms).request_goodput == good / 2

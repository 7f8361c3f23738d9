"""Whether to load or to compute, and for how long to wait: by measured rates alone."""

import pytest

from baton.text.kv_loading import FIXED_S, LoadCosts
from baton.worker.tier.policy import FORGOTTEN_S, LEAST_WAIT_S, LONGEST_WAIT_S, LoadRate, longest_wait_s

BLOCK_BYTES = 720 * 1024


def costs(compute: float | None, load: float | None) -> LoadCosts:
    """`compute`: tokens per second; `load`: bytes per second."""
    return LoadCosts(32, BLOCK_BYTES, compute, load)


@pytest.mark.parametrize(
    ("compute", "load", "blocks", "loads"),
    [
        (1_000.0, 1e9, 64, True),  # 2 s of computing against 50 ms
        (1e6, 1e9, 64, False),  # 2 ms against 50 ms
        (1_000.0, 1e6, 64, False),  # a slow disk
        (32 / 0.5, BLOCK_BYTES / (0.5 - FIXED_S), 1, False),  # half a second each: it is computed
        (32 / 0.5, BLOCK_BYTES / (0.499 - FIXED_S), 1, True),
        (20_000.0, 1e9, 1, False),  # 1.6 ms, less than a load takes in any case
        (None, 1e6, 64, True),
        (1e6, None, 64, True),
    ],
)
def test_sooner_choice_is_made_and_unknown_ones_are_tried(
    compute: float | None, load: float | None, blocks: int, loads: bool
) -> None:
    assert costs(compute, load).favour_loading(blocks) is loads


def test_prompt_waits_as_long_as_computing_would_take_within_bounds() -> None:
    assert longest_wait_s(costs(1_000.0, 1e9), 64) == pytest.approx(64 * 32 / 1_000)
    assert longest_wait_s(costs(1e6, 1e9), 64) == LEAST_WAIT_S
    assert longest_wait_s(costs(1.0, 1e9), 64) == LONGEST_WAIT_S
    assert longest_wait_s(costs(None, None), 64) == LONGEST_WAIT_S


def test_large_and_new_loads_make_the_rate() -> None:
    rate = LoadRate()
    assert rate.bytes_per_s(0.0) is None
    rate.observe(1_000_000_000, 1.0, now=10.0)
    rate.observe(1_000, 0.01, now=11.0)
    assert rate.bytes_per_s(11.0) == pytest.approx(1e9, rel=0.05)
    for now in range(12, 40):
        rate.observe(100_000_000, 1.0, now=float(now))
    assert rate.bytes_per_s(40.0) == pytest.approx(1e8, rel=0.1)


def test_old_rate_is_unknown_so_that_one_prompt_tries_again() -> None:
    rate = LoadRate()
    rate.observe(1_000, 1.0, now=10.0)
    assert rate.bytes_per_s(10.0 + FORGOTTEN_S - 0.1) is not None
    assert rate.bytes_per_s(10.0 + FORGOTTEN_S) is None
    assert rate.last_bytes_per_s == 1_000, "for routers, which have nothing better"

"""When blocks are fetched rather than computed. A block is 32 tokens and 1 MB here."""

from dataclasses import replace

import pytest

from baton.prefill_worker.fetch import FIXED_S, FetchCosts, FetchHint, FetchOptions, PrefillRate, longest_wait_s
from baton.text.kv_loading import FIXED_S as LOAD_FIXED_S


def costs(
    prefill_tokens_per_s: float | None, link_bytes_per_s: float = 1e9, transport: str = "shared_memory"
) -> FetchCosts:
    return FetchCosts(32, 10**6, prefill_tokens_per_s, transport, link_bytes_per_s)


@pytest.mark.parametrize("transport", ["shared_memory", "grpc"])
def test_break_even_is_where_both_take_the_same_time(transport: str) -> None:
    even = FIXED_S[transport] / 0.0035
    measured = costs(7111.0, transport=transport)  # 4.5 ms a block, against 1 ms over the link
    assert not measured.favour_fetching(int(even))
    assert measured.favour_fetching(int(even) + 1)
    assert measured.fetch_s(3) == pytest.approx(FIXED_S[transport] + 0.003)
    assert measured.compute_s(3) == pytest.approx(0.0135, rel=1e-3)


def test_over_a_link_slower_than_computing_nothing_is_ever_fetched() -> None:
    measured = costs(prefill_tokens_per_s=6400.0, link_bytes_per_s=1e8)
    assert not any(measured.favour_fetching(blocks) for blocks in (1, 10, 1000))


def test_load_time_of_the_other_worker_counts() -> None:
    from_pool = costs(prefill_tokens_per_s=7111.0)  # 4.5 ms a block
    slow = replace(from_pool, loaded_blocks=100, load_bytes_per_s=2e8)  # 5 ms a block
    fast = replace(slow, load_bytes_per_s=1e9)
    assert fast.fetch_s(10) == pytest.approx(from_pool.fetch_s(10) + LOAD_FIXED_S + 0.010)
    assert replace(fast, loaded_blocks=4).fetch_s(10) == pytest.approx(from_pool.fetch_s(10) + LOAD_FIXED_S + 0.004)
    assert fast.favour_fetching(10) and not slow.favour_fetching(10)
    assert replace(slow, load_bytes_per_s=0.0).fetch_s(10) == from_pool.fetch_s(10), "the router did not say"


def test_prompt_waits_longer_for_a_loading_worker_within_a_bound() -> None:
    options = FetchOptions(block_tokens=32, block_bytes=10**6, timeout_s=1.0)
    hint = FetchHint("d0", b"t" * 16, blocks=100)
    assert longest_wait_s(hint, options) == 1.0
    assert longest_wait_s(replace(hint, loaded_blocks=100, load_bytes_per_s=1e8), options) == pytest.approx(3.0)
    assert longest_wait_s(replace(hint, loaded_blocks=100, load_bytes_per_s=1.0), options) == 21.0
    assert longest_wait_s(replace(hint, loaded_blocks=100), options) == 1.0


def test_before_anything_was_computed_blocks_are_fetched() -> None:
    assert costs(prefill_tokens_per_s=None).favour_fetching(1)


def test_rate_is_that_of_recent_steps_and_long_ones_weigh_more() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s is None
    rate.observe(1000, 1.0)
    for _ in range(20):
        rate.observe(1, 0.1)
    assert rate.tokens_per_s == pytest.approx(1000.0, rel=0.01)
    for _ in range(200):
        rate.observe(2000, 1.0)
    assert rate.tokens_per_s == pytest.approx(2000.0, rel=0.01)

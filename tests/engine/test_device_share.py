"""Prefill's share of a GPU, and how decode finds out that it is too large."""

import pytest

from baton.engine.runner.engine import MIN_STEPS, SlowDown
from baton.engine.runner.sharing import MAX_REST, MIN_TOKENS, SILENCE_S, DeviceShare


def test_chunks_have_full_size_without_decode_on_the_device() -> None:
    share = DeviceShare(4096, 1.5)
    assert (share.chunk_tokens(0.0), share.rest_s(1.0, 0.0)) == (4096, 0.0)


def test_chunks_shrink_and_then_prefill_rests_while_decode_is_slowed() -> None:
    share, sizes, rests = DeviceShare(4096, 1.5), [], []
    for second in range(12):
        share.observe_slow_down(3.0, second)
        sizes.append(share.chunk_tokens(second))
        rests.append(share.rest_s(1.0, second))
    assert sizes == [2048, 1024, 512] + [MIN_TOKENS] * 9
    assert rests[:5] == [0.0, 0.0, 0.0, 0.0, 0.25]
    assert rests[-1] == MAX_REST


def test_share_near_the_target_is_kept() -> None:
    share = DeviceShare(4096, 1.5)
    share.observe_slow_down(2.0, 0.0)
    before = share.chunk_tokens(0.0)
    share.observe_slow_down(1.45, 0.1)
    assert share.chunk_tokens(0.1) == before == 3072


def test_share_grows_back_when_decode_has_room() -> None:
    share = DeviceShare(4096, 1.5)
    for moment in range(8):
        share.observe_slow_down(3.0, moment / 10)
    for moment in range(8, 40):
        share.observe_slow_down(1.0, moment / 10)
    assert (share.chunk_tokens(4.0), share.rest_s(1.0, 4.0)) == (4096, 0.0)


def test_silence_means_no_decode_on_the_device() -> None:
    share = DeviceShare(4096, 1.5)
    share.observe_slow_down(3.0, 0.0)
    assert share.chunk_tokens(SILENCE_S) == 2048
    assert share.chunk_tokens(SILENCE_S + 0.1) == 4096


def test_chunks_that_are_small_anyway_do_not_grow_to_the_least() -> None:
    share = DeviceShare(64, 1.5)
    share.observe_slow_down(9.0, 0.0)
    assert share.chunk_tokens(0.0) == 64


def test_target_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="target"):
        DeviceShare(64, 0.9)


def test_steps_are_compared_with_the_best_of_their_size() -> None:
    steps = SlowDown()
    assert steps.ratio == 0.0
    for _ in range(100):
        steps.observe(1, 0.001)
        steps.observe(64, 0.010)
    assert steps.ratio == pytest.approx(1.0)
    for _ in range(100):
        steps.observe(64, 0.020)
    assert steps.ratio == pytest.approx(1.9, abs=0.15), "the best has faded by a tenth"


def test_few_steps_tell_nothing() -> None:
    steps = SlowDown()
    for _ in range(MIN_STEPS - 1):
        steps.observe(4, 0.001)
    assert steps.ratio == 0.0

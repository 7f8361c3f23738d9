"""The sum of checksums at every level of the instruction set."""

import numpy as np
import pytest

from tests.fixtures.native_levels import TESTED, native_at


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("count", [0, 1, 7, 64, 1_000])
def test_words_times_factors_add_up_modulo_two_to_the_64(level: str, count: int) -> None:
    draws = np.random.default_rng(count)
    words = draws.integers(1 << 32, size=count, dtype=np.uint32)
    factors = draws.integers(1 << 64, size=count, dtype=np.uint64, endpoint=False)
    exact = sum(word * factor for word, factor in zip(words.tolist(), factors.tolist(), strict=True))
    assert native_at(level).weighted_sum(words, factors) == exact % (1 << 64)

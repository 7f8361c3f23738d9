"""Counter-based uniform numbers."""

from collections import Counter

from baton.engine.request import uniform


def test_is_a_function_of_seed_choice_and_position() -> None:
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
    assert len({uniform(1, 2, 3), uniform(2, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4), uniform(3, 2, 1)}) == 5


def test_lies_in_the_half_open_unit_interval_for_extreme_seeds() -> None:
    for seed in (0, 1, (1 << 64) - 1):
        assert all(0.0 <= uniform(seed, choice, position) < 1.0 for choice in range(8) for position in range(100))


def test_values_are_pinned() -> None:
    """A change here changes every sampled answer: replays and other versions of a worker would disagree."""
    assert [uniform(0, 0, 0), uniform(42, 1, 100)] == [0.13870941014555427, 0.358059860541451]


def test_is_spread_evenly_along_each_argument() -> None:
    """Chi-square over 20 bins, 19 degrees of freedom: 43.8 is exceeded by chance once in a thousand."""
    draws = 4000
    for arguments in (
        [(7, 0, position) for position in range(draws)],
        [(7, choice, 5) for choice in range(draws)],
        [(seed, 0, 5) for seed in range(draws)],
    ):
        counts = Counter(int(uniform(*argument) * 20) for argument in arguments)
        expected = draws / 20
        assert sum((counts[bin_] - expected) ** 2 / expected for bin_ in range(20)) < 43.8

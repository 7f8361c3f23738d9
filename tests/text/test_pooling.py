"""Pooling over chunks, and what is made of a pooled vector."""

import itertools
import math

import pytest

from baton.text.pooling import Pooling, PoolingKind, cosine, finish_vector, sigmoid


@pytest.mark.parametrize(
    ("kind", "taken"), [(PoolingKind.LAST, [9]), (PoolingKind.FIRST, [0]), (PoolingKind.MEAN, list(range(10)))]
)
@pytest.mark.parametrize("cuts", [[0, 10], [0, 4, 10], [0, 1, 9, 10]])
def test_each_pooled_token_is_in_exactly_one_chunk(kind: PoolingKind, taken: list[int], cuts: list[int]) -> None:
    pooling = Pooling(kind)
    chunks = itertools.pairwise(cuts)
    assert [start + row for start, end in chunks for row in pooling.rows(start, end, 10)] == taken
    assert pooling.divisor(10) == len(taken)


def test_cut_vector_is_normalised_after_the_cut() -> None:
    assert finish_vector([3.0, 4.0, 12.0], normalises=True, dimensions=2) == [0.6, 0.8]
    assert finish_vector([3.0, 4.0, 12.0], normalises=False, dimensions=2) == [3.0, 4.0]
    assert finish_vector([0.0, 0.0], normalises=True) == [0.0, 0.0]


def test_cosines_and_probabilities() -> None:
    assert cosine([1.0, 0.0], [2.0, 2.0]) == pytest.approx(math.sqrt(0.5))
    assert cosine([0.0], [1.0]) == 0.0
    assert sigmoid(0.0) == 0.5
    assert (sigmoid(1000.0), sigmoid(-1000.0)) == (1.0, 0.0)

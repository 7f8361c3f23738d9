"""The benchmark of agreement, on one question: it runs, and its counts add up."""

from baton.lab.benchmarks.engine.agreement import DEMO, common_prefix, measure


def test_the_demo_model_answers_as_transformers_does() -> None:
    found = measure(DEMO, prompts=1, tokens=6)
    assert found.prompts == 1
    assert 0.5 < found.equal_share <= 1.0
    parted = found.float32_sides_with_baton + found.float32_sides_with_transformers
    assert parted <= found.prompts - found.equal_answers


def test_a_common_prefix_ends_at_the_first_difference() -> None:
    assert common_prefix([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0

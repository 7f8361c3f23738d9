"""How many kernels a decode step launches: what a graph of it costs beside the bytes that it reads."""

import pytest

from baton.benchmarks.triton.nodes import estimate, step_kernels


@pytest.mark.parametrize("shape", ["llama8b", "qwen0.6b"])
def test_a_layer_is_ten_kernels_and_a_step_few_more(shape: str) -> None:
    found = estimate(shape)
    assert sum(found.layer_kernels.values()) == 10
    assert sum(found.other_kernels.values()) == 8
    assert found.estimate_ms["H200"] < found.goal_ms


def test_angles_and_tokens_take_no_kernels_of_their_own() -> None:
    counts = step_kernels("qwen0.6b", 2)
    assert not {name for name in counts if "cos" in name or "sin" in name or "where" in name}
    assert counts["survey_part"] == counts["draw_row"] == 1

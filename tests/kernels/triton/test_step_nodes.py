"""How many kernels a decode step launches: what a graph of it costs beside the bytes that it reads."""

import pytest

from baton.lab.benchmarks.triton.nodes import estimate, step_kernels


@pytest.mark.parametrize("shape", ["llama8b", "qwen0.6b"])
def test_layer_of_few_rows_is_its_four_projections_and_attention(shape: str) -> None:
    found = estimate(shape)
    assert found.layer_kernels == {"multiply_few": 4, "attend_part": 1}
    assert sum(found.other_kernels.values()) == 5
    assert found.estimate_ms["H200"] < found.goal_ms


def test_library_multiplies_many_rows_between_norm_and_gate_kernels() -> None:
    found = estimate("qwen0.6b", rows=8)
    assert found.layer_kernels == {"normalise": 2, "aten.linear.default": 4, "attend_part": 1, "gate": 1}
    assert sum(found.other_kernels.values()) == 7


@pytest.mark.parametrize("rows", [1, 8])
def test_angles_tokens_and_copies_take_no_kernels_of_their_own(rows: int) -> None:
    counts = step_kernels("qwen0.6b", 2, rows)
    assert not {name for name in counts if any(part in name for part in ("cos", "sin", "where", "copy"))}
    assert counts["survey_part"] == counts["draw_row"] == 1

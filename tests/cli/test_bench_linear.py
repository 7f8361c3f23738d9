"""`baton bench linear` on tiny shapes: what it prints."""

import json

import pytest
import torch

from baton.lab.benchmarks.engine import linear as bench
from baton.lab.benchmarks.engine.linear import PRIMITIVES, LinearBenchOptions, candidates, run_linear_bench
from baton.lab.benchmarks.report import limits

OPTIONS = LinearBenchOptions(((64, 32), (40, 24)), (1, 3), 1, "float32")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "MATRIX_SIZE", 64)
    monkeypatch.setattr(bench, "COLD_BYTES", 1 << 10)
    monkeypatch.setattr(bench, "ROUND_S", 1e-4)


def test_json_has_an_object_for_each_shape_number_of_rows_and_primitive(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_linear_bench(OPTIONS, as_json=True) == 0
    speeds = json.loads(capsys.readouterr().out)
    found = {(speed["outputs"], speed["rows"], speed["primitive"]) for speed in speeds}
    assert len(found) == len(speeds)
    assert {(outputs, rows) for outputs, rows, _ in found} == {(64, 1), (64, 3), (40, 1), (40, 3)}
    assert {primitive for *_, primitive in found} <= set(PRIMITIVES)
    assert all(speed["time_us"] > 0 and speed["limit_read_gb_per_s"] > 0 for speed in speeds)


def test_the_table_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    run_linear_bench(OPTIONS, as_json=False)
    out = capsys.readouterr().out
    assert "64 x 32" in out and "torch" in out and "limits" in out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_candidates_multiply_about_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 32).to(dtype)
    products = [candidate.copies[0](x).float() for candidate in candidates(64, 32, dtype)]
    for product in products[1:]:
        assert (product - products[0]).abs().max() < 0.15 * products[0].abs().max()

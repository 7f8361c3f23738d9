"""`baton bench curves` on a tiny model: slopes beside the limit's, and what it writes."""

import json
from pathlib import Path

import pytest
import torch

from baton.lab.benchmarks.engine.curves import Times, as_lines, as_picture, curves_report, make_growth, run_curves
from baton.lab.commands.bench_options import CurvesOptions
from baton.lab.report import limits
from baton.launch import CommandFailed
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.encoders import make_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("curves"), "llama", max_position_embeddings=256)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "MATRIX_SIZE", 64)


def options(model: Path, context: int, folder: Path | None = None) -> CurvesOptions:
    return CurvesOptions(
        model=str(model), threads=torch.get_num_threads(), batch="1,2", batch_context=context, lengths="16,32,4096",
        steps=3, rounds=1, folder=folder, json=True,
    )  # fmt: skip


def test_growth_excludes_the_constant_part() -> None:
    growth = make_growth("step", "sequences", [(x, Times(5.0 + 3.0 * x, 1.0 + 2.0 * x)) for x in (1, 2, 8)])
    assert (growth.slope_ms, growth.intercept_ms, growth.limit_slope_ms) == pytest.approx((3.0, 5.0, 2.0))
    assert (growth.growth, growth.r_squared) == pytest.approx((1.5, 1.0))
    assert "1.50 times as fast" in as_lines(growth)[-1]


def test_curve_over_many_sizes_is_drawn_on_logarithmic_axes() -> None:
    wide = make_growth("t", "tokens", [(x, Times(x / 10, x / 20)) for x in (64, 512, 8192)])
    narrow = make_growth("t", "tokens", [(x, Times(x / 10, x / 20)) for x in (1, 8, 32)])
    assert "fit:" not in as_picture(wide, "m")
    assert "fit:" in as_picture(narrow, "m")


def test_three_curves_are_measured_up_to_the_models_longest(folder: Path, tmp_path: Path) -> None:
    assert run_curves(options(folder, 24, tmp_path / "out")) == 0
    report = json.loads((tmp_path / "out" / "curves.json").read_text())
    by_batch, by_context, by_prompt = report["curves"]
    assert [point["x"] for point in by_batch["points"]] == [1, 2]
    assert [point["x"] for point in by_context["points"]] == [16, 32, 188]
    assert [point["x"] for point in by_prompt["points"]] == [16, 32, 188]
    for curve in report["curves"]:
        assert all(point["measured_ms"] > 0 and point["limit_ms"] > 0 for point in curve["points"])
    for name in ("batch", "context", "prompt"):
        assert "<svg" in (tmp_path / "out" / f"{name}.svg").read_text()


def test_contexts_that_the_model_has_no_positions_for_are_refused(folder: Path) -> None:
    with pytest.raises(CommandFailed, match="256 positions"):
        run_curves(options(folder, 250))


def test_model_that_makes_no_answers_is_refused_by_its_kind(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "tiny", "bert")
    with pytest.raises(CommandFailed, match="tiny is an encoder, which makes vectors and no answers: curves need"):
        curves_report(options(folder, 64), print)

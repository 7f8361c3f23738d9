"""Pictures of results: well-formed, complete, and true to scale."""

from xml.etree import ElementTree

import pytest

from baton.lab.report.picture import (
    PLOT_HEIGHT,
    TOP,
    WIDTH,
    Axis,
    BarChart,
    Bars,
    DrawnCurve,
    LineChart,
    draw_bars,
    draw_lines,
    make_scale,
)
from baton.lab.report.statistics import MeanEstimate

SVG = "{http://www.w3.org/2000/svg}"
BARS = BarChart(
    "Decode step",
    Axis("milliseconds"),
    ("batch 1", "batch 16"),
    (Bars("ours & theirs", (MeanEstimate(4.0, 3.5, 4.5), 8.0)), Bars("<other>", (6.0, None))),
    mark=2.0,
)


def texts(picture: str) -> list[str | None]:
    return [element.text for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_bar_chart_says_title_unit_groups_and_series() -> None:
    assert {"Decode step", "milliseconds", "batch 1", "batch 16", "ours & theirs", "<other>"} <= set(
        texts(draw_bars(BARS))
    )


def test_bars_have_the_height_of_their_values_and_gaps_for_missing_ones() -> None:
    root = ElementTree.fromstring(draw_bars(BARS))
    heights = [float(element.attrib["height"]) for element in root.iter(f"{SVG}rect")]
    assert len(heights) == 3
    assert heights[2] / heights[0] == pytest.approx(2.0, rel=0.01)
    assert max(heights) <= PLOT_HEIGHT


def test_only_an_estimate_has_a_whisker() -> None:
    assert draw_bars(BARS).count(" h8 ") == 2


def test_lines_keep_inside_the_plot_and_fits_have_no_dots() -> None:
    curves = (
        DrawnCurve("measured", ((128.0, 3.0), (1024.0, 5.0), (8192.0, 30.0))),
        DrawnCurve("limit", ((128.0, 2.0), (8192.0, 20.0)), is_dashed=True),
    )
    picture = draw_lines(LineChart("t", Axis("tokens", True, (128.0, 1024.0, 8192.0)), Axis("ms", True), curves))
    root = ElementTree.fromstring(picture)
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.iter(f"{SVG}circle")]
    assert len(dots) == 3
    assert all(0 < x <= WIDTH and TOP <= y <= TOP + PLOT_HEIGHT for x, y in dots)
    assert dots[1][0] - dots[0][0] == pytest.approx(dots[2][0] - dots[1][0], abs=0.2)  # 128 to 1024 to 8192
    assert {"128", "1,024", "8,192", "tokens", "ms"} <= set(texts(picture))


@pytest.mark.parametrize("values", [[0.3, 7.0], [5.5, 5.5], [1.0, 1e6], [98.0, 2003.0], [0.004, 0.005]])
@pytest.mark.parametrize("is_log", [False, True])
def test_scales_hold_all_values_between_few_round_ticks(values: list[float], is_log: bool) -> None:
    scale = make_scale(Axis("x", is_log), values, 0.0, 100.0)
    assert scale.low <= min(values) <= max(values) <= scale.high
    assert 2 <= len(scale.ticks) <= 10
    assert list(scale.ticks) == sorted(scale.ticks)
    assert scale.place(scale.low) == 0.0
    assert scale.place(scale.high) == pytest.approx(100.0)

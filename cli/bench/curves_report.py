"""Whether cost grows as it should: measured times beside those of the machine's limits, with fitted slopes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from cli.bench.picture import Curve, LineChart, draw_lines
from cli.bench.scale import Axis
from cli.bench.statistics import Line, fit_line

FEWEST_TICKS = 4


@dataclass(frozen=True, slots=True)
class Times:
    measured_ms: float
    limit_ms: float  # at the bandwidth and arithmetic measured in the same run


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    measured_ms: float
    limit_ms: float


@dataclass(frozen=True, slots=True)
class Growth:
    """One curve. Slopes are of straight lines through all points, by least squares.

    `growth` is the slope of measured times over the limit's times at the same points: 1 is growing as fast as the limit
    does; constant parts do not count.
    """

    name: str
    x_name: str
    points: tuple[Point, ...]
    slope_ms: float  # per unit of x
    intercept_ms: float
    limit_slope_ms: float
    growth: float
    r_squared: float  # of measured times over the limit's

    @property
    def line(self) -> Line:
        return Line(self.slope_ms, self.intercept_ms, self.r_squared)


def make_growth(name: str, x_name: str, times: Sequence[tuple[int, Times]]) -> Growth:
    """Raises: ValueError for fewer than two different x."""
    points = tuple(Point(x, each.measured_ms, each.limit_ms) for x, each in times)
    xs = [float(point.x) for point in points]
    measured, limits = [point.measured_ms for point in points], [point.limit_ms for point in points]
    line, against_limit = fit_line(xs, measured), fit_line(limits, measured)
    return Growth(
        name,
        x_name,
        points,
        line.slope,
        line.intercept,
        fit_line(xs, limits).slope,
        against_limit.slope,
        against_limit.r_squared,
    )


def as_picture(growth: Growth, title: str) -> str:
    """Logarithmic over x where it spans much, as prompt lengths do."""
    xs = [point.x for point in growth.points]
    is_log = max(xs) / min(xs) > 50
    ticks = tuple(float(x) for x in xs) if len(xs) >= FEWEST_TICKS and is_log else ()
    fitted = tuple((float(x), growth.line.at(x)) for x in (min(xs), max(xs)))
    curves = [
        Curve("measured", tuple((float(point.x), point.measured_ms) for point in growth.points)),
        Curve("limit", tuple((float(point.x), point.limit_ms) for point in growth.points), is_dashed=True),
    ]
    if not is_log:
        curves.append(Curve(f"fit: {growth.slope_ms:.3g} ms each", fitted, is_dashed=True))
    axes = Axis(growth.x_name, is_log, ticks), Axis("milliseconds", is_log)
    return draw_lines(LineChart(f"{title}: {growth.name}", *axes, tuple(curves)))


def as_lines(growth: Growth) -> list[str]:
    """For a terminal."""
    lines = [f"{growth.name}", f"{growth.x_name:>16}  measured ms  limit ms  of limit"]
    for point in growth.points:
        share = point.limit_ms / point.measured_ms
        lines.append(f"{point.x:16,}  {point.measured_ms:11.2f}  {point.limit_ms:8.2f}  {share:8.0%}")
    lines.append(
        f"slope {growth.slope_ms:.4g} ms, the limit's {growth.limit_slope_ms:.4g} ms; measured grows "
        f"{growth.growth:.2f} times as fast as the limit (r^2 {growth.r_squared:.3f})"
    )
    return lines

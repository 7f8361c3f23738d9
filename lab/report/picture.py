"""Charts as SVG text: grouped bars with whiskers, and lines. Pure.

Charts have no background; every colour is readable on white and on black.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from baton.lab.report.statistics import MeanEstimate

MAX_TICKS = 7
WIDTH, PLOT_HEIGHT = 760, 300
LEFT, RIGHT, TOP = 74, 20, 44
AXIS_HEIGHT, LEGEND_ROW = 48, 22
COLOURS = ("#2f7fd1", "#c8781a", "#2a9d6f", "#b4528a", "#8a6fd0", "#a08a1c", "#3f9fb0", "#c4554a")
GREY = "#717d88"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
LETTER = 7.6  # average width of a letter in the legend, in pixels


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis of a chart. `title` includes the unit. `ticks`: positions of labels instead of the usual round numbers."""

    title: str
    is_log: bool = False
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """Map from values `low` to `high` to positions `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Return the position of a value, clipped to the ends of the scale."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share


def make_scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    """Create a scale that fits all values. A linear scale begins at 0 or below.

    Raises: ValueError if a logarithmic scale would contain 0 or less.
    """
    low, high = min(values), max(values)
    if axis.is_log:
        if low <= 0:
            raise ValueError(f"a logarithmic axis cannot show {low}")
        ticks = axis.ticks or _log_ticks(low, high)
        low, high = min(low, ticks[0]), max(high, ticks[-1])
        high = high if high > low else 2 * low
    else:
        ticks = axis.ticks or _linear_ticks(min(low, 0.0), max(high, 0.0))
        low, high = min(low, 0.0, ticks[0]), max(high, ticks[-1])
        high = high if high > low else low + 1
    return Scale(low, high, start, end, axis.is_log, ticks)


def tick_label(value: float) -> str:
    """Format a value: 1500 -> 1,500; 0.25 -> 0.25; three significant digits below 100."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _linear_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return ticks from the last round number below `low` to the first above `high`."""
    span = high - low if high > low else 1.0
    power = 10.0 ** math.floor(math.log10(span / MAX_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= MAX_TICKS)
    return tuple(
        round(step * index, 12) for index in range(math.floor(low / step), math.ceil(low / step + span / step) + 1)
    )


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return 1, 2 and 5 times powers of ten, or only the powers if that is too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(index for index, tick in enumerate(fine) if tick <= low * (1 + 1e-9))
    last = min((index for index, tick in enumerate(fine) if tick >= high * (1 - 1e-9)), default=len(fine) - 1)
    inside = fine[first : last + 1]
    return tuple(inside) if len(inside) <= MAX_TICKS + 2 else tuple(10.0**power for power in powers)


@dataclass(frozen=True, slots=True)
class Bars:
    """Series of bars, one per group, with a whisker from low to high; None leaves a bar out."""

    name: str
    values: tuple[MeanEstimate | float | None, ...]


@dataclass(frozen=True, slots=True)
class BarChart:
    title: str
    axis: Axis
    groups: tuple[str, ...]
    series: tuple[Bars, ...]
    mark: float | None = None  # value of a dashed line, such as 1 for ratios


@dataclass(frozen=True, slots=True)
class DrawnCurve:
    """Curve of points (x, y) in order of x. A dashed curve has no dots."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class LineChart:
    title: str
    x: Axis
    y: Axis
    curves: tuple[DrawnCurve, ...]


def draw_bars(chart: BarChart) -> str:
    """Draw bars as SVG. Raises: ValueError without a value, or if a logarithmic axis would show 0 or less."""
    estimates = [_as_estimate(value) for bars in chart.series for value in bars.values if value is not None]
    ends = [end for estimate in estimates for end in (estimate.low, estimate.high)]
    if not ends:
        raise ValueError("no bar has a value")
    scale = _upright(chart.axis, ends if chart.mark is None else [*ends, chart.mark])
    group_width = (WIDTH - LEFT - RIGHT) / len(chart.groups)
    bar_width = min(46.0, 0.8 * group_width / len(chart.series))
    parts = _frame(scale, chart.axis.title)
    for place, group in enumerate(chart.groups):
        centre = LEFT + group_width * (place + 0.5)
        parts.append(_text(centre, TOP + PLOT_HEIGHT + 20, group))
        start = centre - bar_width * len(chart.series) / 2
        for index, bars in enumerate(chart.series):
            value = bars.values[place]
            if value is not None:
                parts += _bar(scale, start + bar_width * index, bar_width, _as_estimate(value), _colour(index))
    if chart.mark is not None:
        y = scale.place(chart.mark)
        parts.append(f'<path d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}" stroke="{GREY}" stroke-dasharray="5 4"/>')
    return _document(chart.title, parts, [(bars.name, False) for bars in chart.series])


def draw_lines(chart: LineChart) -> str:
    """Draw curves as SVG. Raises: ValueError without a point, or if a logarithmic axis would show 0 or less."""
    points = [point for curve in chart.curves for point in curve.points]
    if not points:
        raise ValueError("no curve has a point")
    across = make_scale(chart.x, [x for x, _ in points], LEFT, WIDTH - RIGHT)
    scale = _upright(chart.y, [y for _, y in points])
    parts = _frame(scale, chart.y.title)
    for tick in across.ticks:
        x = across.place(tick)
        parts.append(f'<path d="M{x:.1f} {TOP + PLOT_HEIGHT} v5" stroke="{GREY}"/>')
        parts.append(_text(x, TOP + PLOT_HEIGHT + 20, tick_label(tick)))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, TOP + PLOT_HEIGHT + 40, chart.x.title))
    for index, curve in enumerate(chart.curves):
        places = [(across.place(x), scale.place(y)) for x, y in curve.points]
        dashes = ' stroke-dasharray="6 4"' if curve.is_dashed else ""
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="M{path}" fill="none" stroke="{_colour(index)}" stroke-width="2"{dashes}/>')
        if not curve.is_dashed:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{_colour(index)}"/>' for x, y in places]
    return _document(chart.title, parts, [(curve.name, curve.is_dashed) for curve in chart.curves])


def _bar(scale: Scale, x: float, width: float, value: MeanEstimate, colour: str) -> list[str]:
    base = scale.place(scale.low if scale.is_log else 0.0)
    y = scale.place(value.middle)
    top, height = min(y, base), abs(base - y)
    parts = [f'<rect x="{x + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" height="{height:.1f}" fill="{colour}"/>']
    if value.low < value.high:
        low, high, middle = scale.place(value.low), scale.place(value.high), x + width / 2
        ends = f"M{middle - 4:.1f} {low:.1f} h8 M{middle - 4:.1f} {high:.1f} h8 M{middle:.1f} {low:.1f} V{high:.1f}"
        parts.append(f'<path d="{ends}" stroke="{GREY}" stroke-width="1.6"/>')
    parts.append(_text(x + width / 2, min(top, scale.place(value.high)) - 5, _short(value.middle), size=11))
    return parts


def _upright(axis: Axis, values: Sequence[float]) -> Scale:
    return make_scale(axis, values, TOP + PLOT_HEIGHT, TOP)


def _frame(scale: Scale, title: str) -> list[str]:
    middle = TOP + PLOT_HEIGHT / 2
    parts = [
        f'<text transform="translate(16 {middle:.1f}) rotate(-90)" text-anchor="middle">{escape(title)}</text>',
        f'<path d="M{LEFT} {TOP} V{TOP + PLOT_HEIGHT} H{WIDTH - RIGHT}" fill="none" stroke="{GREY}"/>',
    ]
    for tick in scale.ticks:
        y = scale.place(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}" stroke="{GREY}" stroke-opacity="0.22"/>')
        parts.append(_text(LEFT - 8, y + 4, tick_label(tick), anchor="end"))
    return parts


def _legend(names: Sequence[tuple[str, bool]]) -> tuple[list[str], int]:
    """Return the parts of a legend and its number of rows."""
    parts: list[str] = []
    x, y, rows = float(LEFT), TOP + PLOT_HEIGHT + AXIS_HEIGHT + 14, 1 if names else 0
    for index, (name, is_dashed) in enumerate(names):
        width = 34 + LETTER * len(name)
        if x + width > WIDTH - RIGHT and x > LEFT:
            x, y, rows = float(LEFT), y + LEGEND_ROW, rows + 1
        dashes = ' stroke-dasharray="5 3"' if is_dashed else ""
        weight = 2 if is_dashed else 8
        parts.append(
            f'<path d="M{x:.1f} {y - 4} h16" stroke="{_colour(index)}" stroke-width="{weight}"{dashes}/>'
            + _text(x + 22, y, name, anchor="start")
        )
        x += width
    return parts, rows


def _document(title: str, parts: Sequence[str], names: Sequence[tuple[str, bool]]) -> str:
    legend, rows = _legend(names)
    height = TOP + PLOT_HEIGHT + AXIS_HEIGHT + LEGEND_ROW * rows
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" font-family="{FONT}" font-size="13" fill="{GREY}">',
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
        *parts,
        *legend,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int | None = None) -> str:
    font = f' font-size="{size}"' if size else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{font}>{escape(text)}</text>'


def _as_estimate(value: MeanEstimate | float) -> MeanEstimate:
    return value if isinstance(value, MeanEstimate) else MeanEstimate(value, value, value)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]

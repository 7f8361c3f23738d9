"""An axis of a picture: from values to places, and where its ticks are. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_TICKS = 7


@dataclass(frozen=True, slots=True)
class Axis:
    """`title` includes the unit. `ticks`: places of labels, where the usual round numbers would not do."""

    title: str
    is_log: bool = False
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """`low` to `high` of values onto `start` to `end` of places."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Values beyond the ends are put at the ends."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share


def make_scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    """With room for all values; a linear one begins at 0 or below. Raises: ValueError for a logarithm of 0 or less."""
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
    """1500 -> 1,500; 0.25 -> 0.25; two digits are distinguished, three where they matter."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _linear_ticks(low: float, high: float) -> tuple[float, ...]:
    """From the last round number below `low` to the first above `high`."""
    span = high - low if high > low else 1.0
    power = 10.0 ** math.floor(math.log10(span / MAX_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= MAX_TICKS)
    return tuple(
        round(step * index, 12) for index in range(math.floor(low / step), math.ceil(low / step + span / step) + 1)
    )


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten; the powers alone where those were too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(index for index, tick in enumerate(fine) if tick <= low * (1 + 1e-9))
    last = min((index for index, tick in enumerate(fine) if tick >= high * (1 - 1e-9)), default=len(fine) - 1)
    inside = fine[first : last + 1]
    return tuple(inside) if len(inside) <= MAX_TICKS + 2 else tuple(10.0**power for power in powers)

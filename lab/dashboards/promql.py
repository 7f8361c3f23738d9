"""Builds PromQL over declared metrics; a name or label that is not declared is an error. Pure.

If several routers are scraped, the rates of their requests are added. But every router reports each worker's figures,
so only the largest value that any router reports for a worker is added.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from baton.router.http.metric_families import CounterFamily, GaugeFamily, HistogramFamily, MetricFamily, Source

WINDOW = "$__rate_interval"
"""Grafana's variable for a window: four scrapes, or one step of the graph if that is longer."""

Matchers = Mapping[str, str]
"""Label matchers: a value, or a regular expression after `~`."""


class Query(NamedTuple):
    """Query of a panel. `legend`: name of each line, with its labels in the form `{{engine}}`."""

    expression: str
    legend: str = ""


def selector(series: str, family: MetricFamily, matchers: Matchers | None = None) -> str:
    """Return a PromQL selector. Raises: ValueError for a series or a label that the family does not have."""
    if series not in family.series:
        raise ValueError(f"{family.name} has no series {series}")
    _check(family, (matchers or {}).keys())
    parts = (
        f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"'
        for label, value in (matchers or {}).items()
    )
    inside = ",".join(parts)
    return f"{series}{{{inside}}}" if inside else series


def value(gauge: GaugeFamily, by: Sequence[str] = (), matchers: Matchers | None = None) -> str:
    """Return PromQL for the current value of a gauge."""
    return _combined(gauge, by, selector(gauge.name, gauge, matchers))


def rate(counter: CounterFamily, by: Sequence[str] = (), matchers: Matchers | None = None, window: str = WINDOW) -> str:
    """Return PromQL for the growth of a counter per second."""
    return _combined(counter, by, f"rate({selector(counter.series[0], counter, matchers)}[{window}])")


def growth(
    counter: CounterFamily, by: Sequence[str] = (), matchers: Matchers | None = None, window: str = WINDOW
) -> str:
    """Return PromQL for the growth of a counter within the window."""
    return _combined(counter, by, f"increase({selector(counter.series[0], counter, matchers)}[{window}])")


def quantile(share: float, histogram: HistogramFamily, by: Sequence[str] = (), window: str = WINDOW) -> str:
    """Return PromQL for a quantile of a histogram within the window, in the histogram's unit."""
    _check(histogram, by)
    buckets = f"rate({selector(f'{histogram.name}_bucket', histogram)}[{window}])"
    return f"histogram_quantile({share:g}, sum by ({', '.join((*by, 'le'))}) ({buckets}))"


def mean(histogram: HistogramFamily, window: str = WINDOW) -> str:
    """Return PromQL for the mean of a histogram within the window."""
    total, count = (f"sum(rate({histogram.name}_{part}[{window}]))" for part in ("sum", "count"))
    return f"{total} / {count}"


def share(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def _combined(family: MetricFamily, by: Sequence[str], inner: str) -> str:
    _check(family, by)
    if family.source is Source.WORKER:
        inner = f"max by ({', '.join(family.labels)}) ({inner})"
        if set(by) == set(family.labels):
            return inner
    return f"sum by ({', '.join(by)}) ({inner})" if by else f"sum({inner})"


def _check(family: MetricFamily, labels: Iterable[str]) -> None:
    """Check that the family has these labels. Raises: ValueError."""
    unknown = set(labels) - set(family.labels)
    if unknown:
        raise ValueError(f"{family.name} has no label {', '.join(sorted(unknown))}")

"""Reads metric names and labels from PromQL, without the generator that is tested."""

import re
from collections.abc import Mapping

from baton.router.http.metric_families import FAMILIES, HistogramFamily, MetricFamily

_NAME = re.compile(r"\b(?:(?:baton|vllm):[a-z0-9_]+|baton_build_info\b)")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
PROMETHEUS_OWN = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate"}}
"""Series that Prometheus makes itself."""
SCRAPED = {"instance", "job"}
"""Labels that a scrape adds."""

SERIES: Mapping[str, MetricFamily] = {series: family for family in FAMILIES.values() for series in family.series}


def names(expression: str) -> set[str]:
    """Return the names of Baton's series."""
    return set(_NAME.findall(expression))


def selectors(expression: str) -> list[tuple[str, dict[str, str]]]:
    """Return each series with label matchers, and the matched values by label."""
    return [(name, dict(_MATCHER.findall(inside))) for name, inside in _SELECTOR.findall(expression)]


def faults(expression: str) -> list[str]:
    """Return series and labels of the expression that are not declared."""
    found = [f"no series {name}" for name in sorted(names(expression)) if name not in SERIES]
    for name, matched in selectors(expression):
        known = PROMETHEUS_OWN[name] if name in PROMETHEUS_OWN else labels_of(name)
        found += [f"{name} has no label {label}" for label in sorted(matched.keys() - known)]
    declared = set[str]().union(*(labels_of(name) for name in names(expression)))
    grouped = {label.strip() for inside in _GROUPED.findall(expression) for label in inside.split(",")}
    return found + [f"nothing has the label {label}" for label in sorted(grouped - declared - SCRAPED - {""})]


def labels_of(series: str) -> set[str]:
    family = SERIES.get(series)
    if family is None:
        return set()
    return {*family.labels, *(["le"] if isinstance(family, HistogramFamily) else [])}

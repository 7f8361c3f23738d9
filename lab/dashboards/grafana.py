"""Dashboards in Grafana's JSON: panels are laid out from left to right in rows of 24 columns. Pure."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from baton.lab.dashboards.promql import Query

COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TAG = "baton"
_SCHEMA_VERSION = 39


class PanelKind(Enum):
    LINES = "timeseries"
    NUMBER = "stat"


class Unit(Enum):
    """Units, by Grafana's names."""

    SECONDS = "s"
    COUNT = "short"
    PER_SECOND = "cps"
    BYTES = "bytes"
    BYTES_PER_SECOND = "Bps"
    GIGABYTES_PER_SECOND = "GBs"
    SHARE = "percentunit"
    YES_NO = "bool_yes_no"


@dataclass(frozen=True, slots=True)
class Panel:
    """Panel of a dashboard. `shows`: its description, one or two sentences.

    `links_traces`: whether the panel's histogram has exemplars.
    """

    title: str
    shows: str
    queries: tuple[Query, ...]
    unit: Unit
    kind: PanelKind = PanelKind.LINES
    links_traces: bool = False

    @property
    def width(self) -> int:
        return 4 if self.kind is PanelKind.NUMBER else 8

    @property
    def height(self) -> int:
        return 4 if self.kind is PanelKind.NUMBER else 8


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Grafana dashboard with its panels. `name`: part of its file name and of its address."""

    name: str
    title: str
    shows: str
    panels: tuple[Panel, ...]

    @property
    def file_name(self) -> str:
        return f"{self.name}.json"

    @property
    def text(self) -> str:
        return json.dumps(self.as_json(), indent=2) + "\n"

    def as_json(self) -> dict[str, Any]:
        return {
            "uid": f"baton-{self.name}",
            "title": f"Baton: {self.title}",
            "description": self.shows,
            "tags": [TAG],
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "schemaVersion": _SCHEMA_VERSION,
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "links": [{"type": "dashboards", "title": "Baton", "tags": [TAG], "keepTime": True}],
            "templating": {"list": [_DATASOURCES]},
            "annotations": {"list": [_ALERTS]},
            "panels": list(_placed(self.panels)),
        }


_DATASOURCES = {
    "name": "datasource",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
    "current": {"text": "Prometheus", "value": "prometheus"},
}
_ALERTS = {
    "name": "Alerts",
    "datasource": DATASOURCE,
    "enable": True,
    "iconColor": "red",
    "expr": 'ALERTS{alertname=~"Baton.*",alertstate="firing"}',
    "titleFormat": "{{alertname}}",
    "textFormat": "{{engine}}",
}


def _placed(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    x = y = row_height = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS or (row_height and panel.height != row_height):
            x, y, row_height = 0, y + row_height, 0
        place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
        x, row_height = x + panel.width, panel.height
        yield _panel(number, panel, place)


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": query.expression,
            "legendFormat": query.legend or "__auto",
            "exemplar": panel.links_traces,
        }
        for index, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.shows,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit.value, "min": 0}, "overrides": []},
        "targets": targets,
    }

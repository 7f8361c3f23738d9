"""The committed dashboards are up to date and complete, and use only metrics and labels that exist."""

import json
from collections import Counter
from typing import Any

import pytest

from baton.lab.dashboards.__main__ import BOARDS, FOLDER, files
from baton.lab.dashboards.dashboards import DASHBOARDS, NEEDS_A_FAILURE, NOT_SHOWN, gauge, histogram
from baton.lab.dashboards.grafana import COLUMNS
from baton.lab.dashboards.promql import quantile, selector, value
from baton.router.http.metric_families import FAMILIES
from tests.lab.dashboards.expressions import SERIES, faults, names


def boards() -> dict[str, Any]:
    """Load the dashboards, by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(BOARDS.glob("*.json"))}


def expressions(board: Any) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_committed_files_equal_the_generators() -> None:
    written = {path: path.read_text() if path.exists() else None for path in files()}
    assert written == files(), "run `.venv/bin/python -m baton.lab.dashboards`"


def test_all_dashboards_are_generated() -> None:
    assert boards().keys() == {board.file_name for board in DASHBOARDS}
    assert boards().keys() == {f"{name}.json" for name in ("overview", "workers", "transfer", "router", "keys")}


def test_every_metric_is_on_a_panel_or_has_a_written_reason_not_to_be() -> None:
    shown = {SERIES[name].name for board in boards().values() for each in expressions(board) for name in names(each)}
    assert FAMILIES.keys() - shown == NOT_SHOWN.keys()
    assert all(NOT_SHOWN.values())


@pytest.mark.parametrize("name", [board.file_name for board in DASHBOARDS])
def test_every_name_and_label_of_a_query_is_declared(name: str) -> None:
    assert [fault for expression in expressions(boards()[name]) for fault in faults(expression)] == []


@pytest.mark.parametrize("name", [board.file_name for board in DASHBOARDS])
def test_panels_do_not_overlap_and_have_titles_of_their_own(name: str) -> None:
    panels = boards()[name]["panels"]
    places = [panel["gridPos"] for panel in panels]
    cells = Counter(
        (x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])
    )
    assert max(cells.values()) == 1 and max(x for x, _ in cells) < COLUMNS
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)


def test_panels_of_latencies_ask_for_the_traces_of_their_values() -> None:
    linked = {
        panel["title"]
        for board in boards().values()
        for panel in board["panels"]
        if all(target["exemplar"] for target in panel["targets"])
    }
    assert {"Time to first token", "Time between tokens", "KV transfer that a client waits for", "Waiting"} <= linked


def test_panels_that_need_a_failure_are_there() -> None:
    assert {panel["title"] for board in boards().values() for panel in board["panels"]} >= NEEDS_A_FAILURE


def test_undeclared_metric_is_found() -> None:
    assert faults("rate(baton:nothing_total[5m])") == ["no series baton:nothing_total"]
    assert faults('baton:workers{engine="d"}') == ["baton:workers has no label engine"]
    assert faults("sum by (role) (baton:ready)") == ["nothing has the label role"]
    assert faults('up{role="x"}') == ["up has no label role"]


def test_values_of_workers_are_counted_once_however_many_routers_repeat_them() -> None:
    running = gauge("vllm:num_requests_running")
    by_worker = "max by (model_name, engine) (vllm:num_requests_running)"
    assert value(running, ("engine",)) == f"sum by (engine) ({by_worker})"
    assert value(gauge("baton:active_requests")) == "sum(baton:active_requests)"


def test_expression_with_an_unknown_label_or_name_is_not_made() -> None:
    with pytest.raises(ValueError, match="has no label key"):
        quantile(0.5, histogram("vllm:time_to_first_token_seconds"), ("key",))
    with pytest.raises(ValueError, match="has no series"):
        selector("baton:ready_total", gauge("baton:ready"))
    with pytest.raises(TypeError, match="no HistogramFamily"):
        histogram("baton:ready")
    with pytest.raises(KeyError):
        gauge("baton:nothing")


def test_provisioning_names_the_data_sources_that_dashboards_and_exemplars_use() -> None:
    text = (FOLDER / "grafana" / "provisioning" / "datasources" / "datasources.yaml").read_text()
    for board in boards().values():
        [variable] = board["templating"]["list"]
        assert f"uid: {variable['current']['value']}\n" in text
    assert "{name: trace_id, datasourceUid: tempo" in text and "uid: tempo\n" in text

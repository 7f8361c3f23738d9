"""What `baton status` prints."""

import itertools
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import baton.cli.connection
import baton.cli.status
from baton.cli.__main__ import app
from baton.cli.options import STATUS_COLUMNS
from baton.cli.status import (
    COLUMNS,
    arithmetic_lines,
    cache_lines,
    cluster_lines,
    departure_lines,
    headline,
    latency_line,
    link_lines,
    refusal_lines,
    release_lines,
    requests_line,
    show_status,
    status_lines,
    table_lines,
    tier_lines,
)
from baton.client import (
    CacheView,
    ClusterStatus,
    EndedRequests,
    Latency,
    Link,
    Load,
    Model,
    PageCounts,
    PlannerStatus,
    Quantiles,
    RequestTotals,
    RouterStatus,
    TierView,
    WorkerStatus,
)
from baton.launch import CommandFailed
from baton.process.registry.redis_server import free_port
from tests.fixtures.admin_clients import FakeAdmin

MODEL = Model("tiny", 512, 2048, "float32", 32)
LOAD = Load(100, 8, PageCounts(100, 60, 10, 30, 20, 10), 1, 2, 300, False, 4000, 800, 600, 7, 55)


def worker(load: Load | None = LOAD, connected: bool = True) -> WorkerStatus:
    return WorkerStatus(
        worker_id="decode-0",
        role="decode",
        endpoint="127.0.0.1:40001",
        pid=4711,
        epoch=1,
        connected=connected,
        fingerprint="ab",
        model=MODEL,
        model_path="/models/tiny",
        total_blocks=100,
        total_slots=8,
        in_flight_requests=3,
        load=load,
    )


def status(ready: bool = True, detail: str = "") -> ClusterStatus:
    return ClusterStatus(ready, detail, True, 3, 1, (worker(),))


def huge(number: int) -> WorkerStatus:
    """With the longest figures that a large cluster may show."""
    pages = PageCounts(654_321, 123_456, 123_456, 407_409, 400_000, 7_409)
    load = replace(LOAD, pages=pages, waiting_requests=1023, running_sequences=1024, pending_tokens=9_999_999)
    load = replace(load, preemptions=123_456, links=(Link("127.0.0.1:40001", "shared_memory", 12.34, ""),))
    view = CacheView(True, True, 123_456, 99, 12, 340_000, 330_000, 9, 9, 0.02)
    return replace(worker(load), worker_id=f"decode-{number}", pid=4_194_303, deaths=12, cache_view=view)


LARGE = ClusterStatus(
    ready=True,
    detail="the registry does not answer; the router keeps the workers it knows",
    registry_connected=False,
    active_requests=2000,
    queued_requests=999,
    workers=(*map(huge, range(3)), replace(huge(3), connected=False)),
    other_routers=1,
    planner=PlannerStatus("propose", 0.61, 0.97, "decode is busier, but a change is not worth it", 3, 2, 5),
    indexed_blocks=1_234_567,
    routers=(RouterStatus("0a1b2c3d4e5f", "127.0.0.1:50053", 3661.2, 2, 900),),
    latency=Latency(256, Quantiles(1234.5, 98_765.4), Quantiles(9.87, 1234.5)),
    requests=RequestTotals(
        123456,
        (
            EndedRequests("answered", "", 654321),
            EndedRequests("cancelled", "client", 12345),
            EndedRequests("refused", "invalid_argument", 23456),
            EndedRequests("refused", "no_such_model", 34567),
        ),
        98_765_432,
        12_345_678,
    ),
)


def cells(workers: tuple[WorkerStatus, ...], width: int = 200) -> list[dict[str, str]]:
    """The table as read by a person: columns are two spaces apart at least."""
    header, *rows = (re.split(r"\s{2,}", line) for line in table_lines(workers, width))
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_status_lines_fit_the_terminal_uncut(width: int) -> None:
    lines = status_lines(LARGE, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for figure in ("407409/654321", "1024", "1023", "12.34 GB/s", "1,234 ms", "98.8 s", "9.9 ms", "123456 blocks"):
        assert figure in text, figure
    assert "…" not in text and "..." not in text


def test_status_table_wider_shows_more_columns() -> None:
    shown = [cells((worker(),), width)[0] for width in (60, 80, 120, 200)]
    for narrow, wide in itertools.pairwise(shown):
        assert narrow.items() < wide.items()
    assert list(shown[-1]) == [column.header for column in COLUMNS]


def test_status_table_long_name_is_above_its_row() -> None:
    named = replace(huge(0), worker_id="baton-decode-7f9c4d5b6-" + "x" * 20)
    lines = table_lines((named,), 60)
    assert max(map(len, lines)) <= 60
    assert lines[1] == f"{named.worker_id} (decode)" and "407409/654321" in lines[2]


def test_status_row_shows_load_and_blocks() -> None:
    assert cells((worker(),)) == [
        {
            "worker": "decode-0",
            "state": "connected",
            "restarts": "0",
            "running": "2",
            "pending": "1",
            "pending tokens": "300",
            "blocks": "30/100",
            "pinned": "10",
            "cached": "10",
            "hit rate": "75%",
            "preempted": "7",
            "pid": "4711",
            "endpoint": "127.0.0.1:40001",
        }
    ]


def test_status_help_describes_each_column() -> None:
    assert list(STATUS_COLUMNS) == [column.header for column in COLUMNS]
    shown = re.sub(r"\s+", " ", CliRunner().invoke(app, ["status", "--help"], env={"COLUMNS": "120"}).output)
    for name, meaning in STATUS_COLUMNS.items():
        assert f"{name}: {meaning}" in shown


def test_status_unused_cache_has_no_hit_rate() -> None:
    idle = worker(load=replace(LOAD, cache_query_tokens=0, cache_hit_tokens=0))
    assert cells((idle,))[0]["hit rate"] == "-"


def test_status_counts_deaths_as_restarts() -> None:
    for connected, state in ((True, "connected"), (False, "lost")):
        (shown,) = cells((replace(worker(connected=connected), deaths=3),))
        assert (shown["state"], shown["restarts"]) == (state, "3")


def test_status_requests_line_counts_outcomes() -> None:
    counts = (("refused", "queue_full", 2), ("answered", "", 7), ("refused", "draining", 1))
    ended = tuple(EndedRequests(*each) for each in counts)
    totals = RequestTotals(started=11, ended=ended, prompt_tokens=70, generated_tokens=140)
    assert requests_line(replace(status(), requests=totals)) == (
        "since the router started: 11 requests, 7 answered, 3 refused (queue_full 2, draining 1); "
        "70 prompt tokens, 140 generated"
    )


def test_status_departures_are_no_restarts() -> None:
    seen = replace(worker(), drains=1, role_changes=2, lost_sessions=3)
    assert departure_lines(replace(status(), workers=(worker(), seen))) == [
        "decode-0 drained 1 time, changed its role 2 times, lost its link 3 times"
    ]
    assert cells((seen,))[0]["restarts"] == "0"


def test_status_unknown_load_is_a_dash() -> None:
    for unknown in (worker(load=None), worker(connected=False)):
        (shown,) = cells((unknown,))
        assert [shown[name] for name in ("running", "pending", "blocks", "hit rate", "preempted")] == ["-"] * 5
        assert shown["pid"] == "4711"


def test_status_names_role_that_differs_from_id() -> None:
    assert cells((replace(worker(), role="prefill"),))[0]["worker"] == "decode-0 (prefill)"


def test_status_latency_line_is_of_last_minute() -> None:
    assert latency_line(LARGE) == (
        "TTFT p50 1,234 ms, p99 98.8 s · TBT p50 9.9 ms, p99 1,234 ms · requests in the last minute: 256"
    )
    single = replace(status(), latency=Latency(1, Quantiles(50.2, 50.2), None))
    assert latency_line(single) == "TTFT p50 50 ms, p99 50 ms · requests in the last minute: 1"
    assert latency_line(status()) == "TTFT and TBT: no request completed in the last minute"


def test_status_lists_routers_and_planner() -> None:
    assert cluster_lines(LARGE) == [
        "router 0a1b2c3d at 127.0.0.1:50053, up 1:01:01: 2 requests, 900 tokens on the workers",
        "role planner (propose): prefill at 61% of its SLO, decode at 97%; decode is busier, but a change is not "
        "worth it; 3 changes made",
        "desired workers: 2 prefill, 5 decode",
    ]


def test_status_names_workers_that_round_differently() -> None:
    first, second, third = (replace(worker(), worker_id=name, arithmetic="avx2") for name in ("d-0", "d-1", "d-2"))
    assert arithmetic_lines(replace(status(), workers=(first, second))) == []
    assert arithmetic_lines(replace(status(), workers=(first, replace(second, arithmetic="")))) == [], "an older one"
    [line] = arithmetic_lines(replace(status(), workers=(first, second, replace(third, arithmetic="avx512"))))
    assert line.endswith("d-0, d-1: avx2; d-2: avx512")


def test_status_links_show_rate_and_fallback() -> None:
    links = (Link("127.0.0.1:40001", "gloo", 1.234, ""), Link("10.0.0.9:1", "grpc", 0.4, "gloo: not offered there"))
    reader = worker(load=replace(LOAD, links=links))
    assert link_lines(replace(status(), workers=(reader,))) == [
        "decode-0 reads decode-0 over gloo, 1.23 GB/s",
        "decode-0 reads 10.0.0.9:1 over grpc, 0.40 GB/s (nothing faster: gloo: not offered there)",
    ]
    assert link_lines(replace(status(), workers=(worker(connected=False),))) == []


def test_status_tier_lines_name_sharing_workers() -> None:
    mine, other = TierView(True, 120, 200, "aa"), TierView(False, 80, 200, "aa")
    workers = (
        replace(worker(), worker_id="prefill-0", role="prefill", tier_view=mine),
        replace(worker(), worker_id="decode-0", role="decode", tier_view=other),
        replace(worker(), worker_id="decode-1", role="decode", tier_view=TierView(True, 7, 7, "bb")),
        replace(worker(), worker_id="decode-2", role="decode"),
    )
    assert tier_lines(replace(status(), workers=workers)) == [
        "files of prefill-0: 120 blocks known, 200 in a directory shared with decode-0",
        "files of decode-0: 80 blocks known, 200 in a directory shared with prefill-0; catching up",
        "files of decode-1: 7 blocks known, 7 in a directory",
    ]


def test_status_cache_line_shows_prediction_rate() -> None:
    assert cache_lines(replace(LARGE, workers=(huge(0),)))[1] == (
        "cache of decode-0: 123456 blocks known, exact; hits predicted correctly for 97.1% of 340000 prompts, "
        "98.0% of the last 64; 12 snapshots requested"
    )


def test_status_headline_names_missing_parts() -> None:
    rest = " · tiny · 2 requests running, 1 pending"
    missing = "no decode worker is connected"
    assert headline(status()) == "ready" + rest
    assert headline(status(detail=missing)) == f"degraded: {missing}{rest}"
    assert headline(status(ready=False, detail=missing)) == f"not ready: {missing}{rest}"


@pytest.mark.parametrize(("ready", "code"), [(True, 0), (False, 3)])
def test_status_exit_code_is_readiness(
    ready: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(baton.cli.connection, "AdminClient", lambda *_, **__: FakeAdmin(status=lambda: status(ready)))
    assert show_status("somewhere:1", as_json=False) == code
    assert capsys.readouterr().out.splitlines() == status_lines(status(ready), 80)


def test_status_without_router_names_remedy() -> None:
    target = f"127.0.0.1:{free_port()}"
    with pytest.raises(CommandFailed) as caught:
        show_status(target, as_json=False)
    assert str(caught.value) == f"no answer from {target} (admin port); is `baton up` running?"


def test_status_lists_refused_worker_with_reason() -> None:
    refused = replace(worker(), connected=False, refused="no protocol in common: release 0.2.0 here, 9.0.0 there")
    assert cells((refused,))[0]["state"] == "refused"
    assert refusal_lines(replace(status(), workers=(refused, worker()))) == [f"decode-0 is refused: {refused.refused}"]


def test_status_names_mixed_releases() -> None:
    alone = replace(status(), release="0.2.0", workers=(replace(worker(), release="0.2.0"),))
    assert release_lines(alone) == []
    mixed = replace(alone, workers=(*alone.workers, replace(worker(), worker_id="decode-1")))
    assert release_lines(mixed) == ["releases serve together: before 0.2.0: decode-1; 0.2.0: this router, decode-0"]

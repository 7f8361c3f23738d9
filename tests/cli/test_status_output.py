"""The table of `baton status`."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import cli.status
from cli.errors import CommandFailed
from cli.status import cluster_lines, headline, link_lines, requests_line, row, show_status
from client import (
    ClusterStatus,
    EndedRequests,
    Link,
    Load,
    Model,
    PageCounts,
    RequestTotals,
    RouterStatus,
    WorkerStatus,
)
from client.responses import cluster_status_from
from router.admin_service import AdminServicer
from router.caches import Caches
from router.cluster import Worker
from router.departures import Departures
from router.request_counts import RequestCounts
from service.redis_server import free_port
from service.worker_record import WorkerRole

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


def test_a_row_shows_load_and_who_holds_pages() -> None:
    assert row(worker()) == (
        *("decode-0", "connected", "127.0.0.1:40001", "4711", "3", "1", "2", "300"),
        *("100", "60", "10", "20", "10"),
        *("75%", "7", "55"),
    )


def test_other_routers_are_told_one_by_one() -> None:
    other = RouterStatus("0a1b2c3d4e5f", "127.0.0.1:50053", 3661.2, 2, 900)
    assert cluster_lines(replace(status(), other_routers=1, routers=(other,))) == [
        "other router 0a1b2c3d at 127.0.0.1:50053, up 1:01:01: 2 requests on the workers, 900 tokens"
    ]


def test_a_cache_that_was_never_asked_has_no_hit_rate() -> None:
    assert row(worker(load=replace(LOAD, cache_query_tokens=0, cache_hit_tokens=0)))[-3] == "-"


@pytest.mark.parametrize(("connected", "shown"), [(True, "connected, died 3x"), (False, "lost, died 3x")])
def test_a_crash_loop_shows(connected: bool, shown: str) -> None:
    assert row(replace(worker(connected=connected), deaths=3))[1] == shown


def test_requests_are_told_by_how_they_ended_and_why() -> None:
    counts = (("refused", "queue_full", 2), ("answered", "", 7), ("refused", "draining", 1))
    ended = tuple(EndedRequests(*each) for each in counts)
    totals = RequestTotals(started=11, ended=ended, prompt_tokens=70, generated_tokens=140)
    assert requests_line(replace(status(), requests=totals)) == (
        "11 requests since the start, 7 answered, 3 refused (queue_full 2, draining 1), 70 tokens in, 140 out"
    )


def test_what_is_no_death_has_words_of_its_own() -> None:
    seen = replace(worker(), drains=1, role_changes=2, lost_sessions=3)
    assert row(seen)[1] == "connected, drained 1x, changed role 2x, out of reach 3x"


def test_a_worker_that_has_not_reported_has_dashes() -> None:
    assert row(worker(load=None))[5:] == ("-",) * 11


def test_what_a_lost_worker_had_is_not_shown() -> None:
    cells = row(worker(connected=False))
    assert (cells[1], cells[5:]) == ("lost", ("-",) * 11)


def test_links_are_told_with_their_rate_and_why_they_are_slow() -> None:
    links = (Link("127.0.0.1:40001", "gloo", 1.234, ""), Link("10.0.0.9:1", "grpc", 0.4, "gloo: not offered there"))
    reader = worker(load=replace(LOAD, links=links))
    assert link_lines(replace(status(), workers=(reader,))) == [
        "decode-0 reads decode-0 by gloo, 1.23 GB/s",
        "decode-0 reads 10.0.0.9:1 by grpc, 0.40 GB/s (the slow way: gloo: not offered there)",
    ]
    assert link_lines(replace(status(), workers=(worker(connected=False),))) == []


def test_the_headline_says_ready_or_what_is_missing() -> None:
    rest = " · tiny · 3 requests, 1 of them waiting for room"
    missing = "no decode worker is connected"
    assert headline(status()) == "ready" + rest
    assert headline(status(detail=missing)) == f"degraded: {missing}{rest}"
    assert headline(status(ready=False, detail=missing)) == f"not ready: {missing}{rest}"


@pytest.mark.parametrize(
    ("connected", "registry", "detail"),
    [
        ((WorkerRole.PREFILL, WorkerRole.DECODE), True, ""),
        ((WorkerRole.PREFILL,), True, "no decode worker is connected"),
        ((), True, "no prefill worker is connected; no decode worker is connected"),
        ((WorkerRole.PREFILL, WorkerRole.DECODE), False, "the registry does not answer; membership is as last seen"),
    ],
)
async def test_a_router_that_is_ready_says_what_it_lacks(
    connected: tuple[WorkerRole, ...], registry: bool, detail: str
) -> None:
    workers = tuple(Worker(f"{role}:1", role, connected=role in connected) for role in WorkerRole)
    servicer: Any = AdminServicer(
        SimpleNamespace(  # type: ignore[arg-type]
            workers=workers, roles_seen=frozenset(), caches=Caches(), departures=defaultdict(Departures), name_of=str
        ),
        SimpleNamespace(waiting=0),  # type: ignore[arg-type]
        SimpleNamespace(ready=True, detail="", needed=frozenset(WorkerRole)),  # type: ignore[arg-type]
        SimpleNamespace(active=0, accounts=SimpleNamespace(counts=RequestCounts())),  # type: ignore[arg-type]
        lambda: registry,
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        replicas=None,
        planning=None,
    )
    answer = cluster_status_from(await servicer.GetStatus(None, None))
    assert (answer.ready, answer.detail) == (True, detail)
    assert headline(answer).startswith("ready ·" if not detail else f"degraded: {detail} ·")


@pytest.mark.parametrize(("ready", "code"), [(True, 0), (False, 3)])
def test_the_exit_code_says_whether_it_is_ready(
    ready: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.status, "AdminClient", lambda *_, **__: FakeAdmin(ready))
    assert show_status("somewhere:1", as_json=False) == code
    assert capsys.readouterr().out.splitlines()[-1].split() == list(row(worker()))


class FakeAdmin:
    def __init__(self, ready: bool) -> None:
        self._ready = ready

    def __enter__(self) -> "FakeAdmin":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def status(self) -> ClusterStatus:
        return status(self._ready)


def test_nobody_there_is_said_with_what_to_do() -> None:
    target = f"127.0.0.1:{free_port()}"
    with pytest.raises(CommandFailed) as caught:
        show_status(target, as_json=False)
    assert str(caught.value) == f"no answer from {target} (admin port); is `baton up` running?"

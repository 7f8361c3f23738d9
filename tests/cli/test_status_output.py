"""The table of `baton status`."""

import pytest

import cli.status
from cli.errors import CommandFailed
from cli.status import headline, row, show_status
from client import ClusterStatus, Load, Model, PageCounts, WorkerStatus
from service.redis_server import free_port

MODEL = Model("tiny", 512, 2048, "float32", 32)
LOAD = Load(100, 8, PageCounts(100, 60, 10, 30, 20, 10), 1, 2, 300, False, 4000)


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


def status(ready: bool = True, detail: str = "", registry: bool = True) -> ClusterStatus:
    return ClusterStatus(ready, detail, registry, 3, 1, (worker(),))


def test_a_row_shows_load_and_who_holds_pages() -> None:
    assert row(worker()) == (
        *("decode-0", "connected", "127.0.0.1:40001", "4711", "3", "1", "2", "300"),
        *("100", "60", "10", "20", "10"),
    )


def test_a_worker_that_has_not_reported_has_dashes() -> None:
    assert row(worker(load=None, connected=False))[1] == "lost"
    assert row(worker(load=None))[5:] == ("-",) * 8


def test_the_headline_says_ready_or_why_not() -> None:
    assert headline(status()) == "ready · tiny · 3 requests, 1 of them waiting for room"
    lost = headline(status(ready=False, detail="no decode worker", registry=False))
    assert lost.startswith("not ready") and lost.endswith("registry not connected · no decode worker")


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
    with pytest.raises(CommandFailed, match="is `baton up` running"):
        show_status(f"127.0.0.1:{free_port()}", as_json=False)

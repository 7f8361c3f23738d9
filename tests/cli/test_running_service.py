"""Commands find the service that runs on this machine; `why` takes the slowest request; ids may be short."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import baton.launch.paths
from baton.cli import options
from baton.cli.options import DEFAULT_TARGET, admin_target_of
from baton.cli.why import show
from baton.launch import CommandFailed
from baton.launch.ports import claimed
from baton.launch.run_record import RunRecord, running_services, write_run_record
from baton.process.registry.redis_server import free_ports
from baton.router.trace.report import named
from tests.fixtures.admin_clients import FakeAdmin

app = typer.Typer()


@app.command()
def ask(target: options.Target = DEFAULT_TARGET, admin: options.Admin = None) -> None:
    print(target, admin or admin_target_of(target))


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(baton.launch.paths, "RUNTIME", tmp_path)
    return tmp_path


def asked(*flags: str, **variables: str) -> list[str]:
    result = CliRunner().invoke(app, flags, env=variables)
    assert result.exit_code == 0, result.output
    return result.stdout.split()


def note(runtime: Path, port: int, admin: int, age_s: float = 0.0, pid: int | None = None) -> None:
    targets, admins = (f"127.0.0.1:{port}",), (f"127.0.0.1:{admin}",)
    record = RunRecord(pid or os.getpid(), admins, (), "", "", {}, {}, targets)
    path = write_run_record(runtime, port, record)
    changed = path.stat().st_mtime - age_s
    os.utime(path, (changed, changed))


def test_command_without_target_finds_the_running_service_and_its_admin_port(runtime: Path) -> None:
    port, admin = free_ports(2)
    note(runtime, port, admin)
    with claimed((port,)):
        assert asked() == [f"127.0.0.1:{port}", f"127.0.0.1:{admin}"]
        assert asked("--target", f"127.0.0.1:{port}") == [f"127.0.0.1:{port}", f"127.0.0.1:{admin}"]
        assert asked("--router", "10.0.0.1:7000") == ["10.0.0.1:7000", "10.0.0.1:7001"]
        assert asked(BATON_TARGET="10.0.0.1:7000")[0] == "10.0.0.1:7000"


def test_command_without_running_service_uses_the_default(runtime: Path) -> None:
    [port] = free_ports(1)
    note(runtime, port, port + 1)  # its process does not claim the port: it has ended
    assert asked() == [DEFAULT_TARGET, "127.0.0.1:50052"]
    with claimed((port,)):
        note(runtime, port, port + 1, pid=1)  # of an earlier run on the port that another one has now
        assert asked()[0] == DEFAULT_TARGET


def test_command_with_several_services_uses_the_newest(runtime: Path) -> None:
    old, new = free_ports(2)
    note(runtime, old, old + 1, age_s=60)
    note(runtime, new, new + 1)
    with claimed((old, new)):
        result = CliRunner().invoke(app, [])
        assert result.stdout.split()[0] == f"127.0.0.1:{new}" and f"127.0.0.1:{old}" in result.stderr
        assert [each.targets[0] for each in running_services(runtime)] == [f"127.0.0.1:{new}", f"127.0.0.1:{old}"]
        assert asked("--router", f"127.0.0.1:{old}")[1] == f"127.0.0.1:{old + 1}"


def seen(request_id: str, trace_id: str = "t" * 32) -> Any:
    return SimpleNamespace(request_id=request_id, trace_id=trace_id)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("req-abcd1234", "req-abcd1234"),
        ("chatcmpl-req-abcd1234", "req-abcd1234"),
        ("req-abcd", "req-abcd1234"),
        ("chatcmpl-req-abcd", "req-abcd1234"),
        ("abcd", "req-abcd1234"),
        ("0123", "req-beef5678"),
        ("req-b", None),  # two begin so
        ("req", None),
        ("", None),
        ("nothing", None),
        ("req-beef", "req-beef"),  # a whole id comes before a longer one
    ],
)
def test_named_finds_request_by_unique_prefix(given: str, found: str | None) -> None:
    kept = [seen("req-beef"), seen("req-beef5678", "0123" + "a" * 28), seen("req-abcd1234")]
    assert getattr(named(given, kept), "request_id", None) == found


def ended(request_id: str, total_ms: float, age_s: float = 1.0, phase: str = "answered") -> Any:
    stages = SimpleNamespace(total_ms=total_ms)
    return SimpleNamespace(request_id=request_id, phase=phase, age_s=age_s, stages=stages)


def test_why_without_id_explains_slowest_recent_request(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = {
        "a": (ended("req-quick", 5), ended("req-running", 99, phase="decode"), ended("req-old", 999, age_s=61)),
        "b": (ended("req-slow", 50), ended("", 70, phase="refused")),
        "c": (),
    }
    monkeypatch.setattr(show, "admin_client", lambda target: FakeAdmin(recent_requests=lambda limit: requests[target]))
    assert show.slowest(["a", "b"]) == "req-slow"
    with pytest.raises(CommandFailed, match="no request completed in the last 60 s"):
        show.slowest(["c"])

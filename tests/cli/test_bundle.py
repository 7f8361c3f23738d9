"""`baton bundle`: everything that a bug report needs, and nothing that was planted."""

import io
import json
import os
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from baton.cli.bundle import parts
from baton.cli.bundle.archive import Missing, Part, Piece, collect, readme, write_archive
from baton.cli.bundle.parts import PARTS, make_bundle
from baton.cli.bundle.redaction import Redactor, shown_flags, shown_variables
from baton.cli.bundle.sources import BatonProcess, Sources, find_sources
from baton.launch import CommandFailed
from baton.launch.log_files import begin_logs
from baton.launch.run_record import RunRecord, write_run_record
from baton.process.security.api_keys import new_secret

NOWHERE = ("127.0.0.1:1",)
PLANTED = "xQzWvK"
"""Part of every secret."""
SAID = "jYkRtPz"
"""Part of every prompt and answer. No secret has it: nothing but the lists of what is harmless keeps it in."""
ENVIRONMENT = {
    "BATON_API_KEY": f"{PLANTED}-client-key",
    "BATON_API_KEY_HASHES": f"me:{PLANTED}hash",
    "BATON_NEVER_HEARD_OF": f"{PLANTED}-unknown",
    "BATON_PLACEMENT": "least_tokens",
    "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {PLANTED}otlp,x={PLANTED}2",
    "OTEL_EXPORTER_OTLP_ENDPOINT": f"https://me:{PLANTED}@collector.example:4318/{PLANTED}?key={PLANTED}",
    "REDIS_URL": f"redis://:{PLANTED}redis@127.0.0.1:6379/0",
    "AWS_SECRET_ACCESS_KEY": f"{PLANTED}/aws",
    "OMP_NUM_THREADS": "3",
}
LOG = f"""\
12:00:00.001 INFO router baton.router.process: gRPC on 127.0.0.1:50051, admin port 50052
12:00:00.002 INFO router baton.router.fleet.session: connection with d-0 ended: no '{SAID} prompt' request_id=r-1
12:00:00.003 INFO router baton.router.fleet.session: the prompt was {SAID}
12:00:00.004 WARNING router uvicorn.error: {SAID} body of a library
What {SAID} wrote to stdout
Traceback (most recent call last):
  File "/baton/router/process.py", line 12, in run
    raise ValueError("{SAID}")
ValueError: cannot read {SAID}
12:00:00.005 INFO router baton.router.fleet.session: connection with d-1 ended: Authorization: Bearer {PLANTED}5
{{"time": "t", "level": "info", "process": "router", "logger": "baton.x", "message": "{SAID}", "other": "{SAID}"}}
"""


def span(name: str, attributes: dict[str, object]) -> dict[str, object]:
    return {
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "parent_span_id": None,
        "name": name,
        "kind": "server",
        "service": "router",
        "start_ns": 1,
        "end_ns": 9,
        "status": "error",
        "status_message": f"it said {SAID}",
        "attributes": attributes,
        "events": [{"name": "stall", "time_ns": 5, "attributes": {"baton.gap_ms": 1.5, "text": SAID}}],
        "links": [],
    }


SPANS = [
    span(
        "chat tiny",
        {
            "baton.ttft_ms": 12.5,
            "baton.outcome": "failed",
            "gen_ai.request.model": "tiny",
            "gen_ai.input.messages": f"{SAID}",
            "gen_ai.output.messages": [SAID],
            "baton.attempt.message": f"{SAID} in an error",
            "baton.reason": f"{SAID} in a sentence",
            "enduser.id": SAID,
        },
    ),
    span(f"chat me {SAID} something", {}),
]


def plant_run(runtime: Path) -> Path:
    """A run that is over, in whose files things were planted. Returns the log of its router."""
    logs = begin_logs(runtime, 1)
    log = logs / "router.log"
    log.write_text("".join(f"router    | {line}\n" for line in LOG.splitlines()))
    (logs / "up.log").write_text(f"baton     | Redis: redis://u:{PLANTED}@h:1\nbaton     | ready in 3.1 s\n")
    traces = runtime / "traces-1.jsonl"
    traces.write_text("".join(json.dumps(each) + "\n" for each in SPANS))
    flags = {
        "router": shown_flags(["--port", "50051", "--api-keys", f"/{PLANTED}/keys", "--insecure"]),
        "decode-0": shown_flags(["--worker-id", "decode-0", "--mystery", PLANTED]),
    }
    record = RunRecord(1, NOWHERE, NOWHERE, str(logs), str(traces), flags, shown_variables(ENVIRONMENT))
    write_run_record(runtime, 1, record)
    return log


def plant_process(proc: Path) -> None:
    """A router that runs, as /proc shows it."""
    folder = proc / "77"
    (folder / "fd").mkdir(parents=True)
    command = ["python", "-P", "-m", "baton.router", "--port", "50051", "--admin-port", "1", "--http-port", "1"]
    command += ["--api-key-hashes", f"me:{PLANTED}", f"--redis-url=redis://:{PLANTED}@r:6379", "--model", "/m/tiny"]
    (folder / "cmdline").write_bytes(b"".join(each.encode() + b"\0" for each in command))
    environ = ENVIRONMENT | {"OTHER_TOKEN": "unseen-by-us-77"}
    (folder / "environ").write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in environ.items()))
    (folder / "status").write_text("Name:\tpython\nVmRSS:\t  1234 kB\nThreads:\t7\n")
    (folder / "stat").write_text("77 (py) thon) S 1 1 1 0 -1 0 0 0 0 0 250 50 0 0 20 5 7 0 0\n")


def contents(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as opened:
        files = {entry.name: opened.extractfile(entry) for entry in opened.getmembers()}
        return {name.partition("/")[2]: file.read().decode() for name, file in files.items() if file is not None}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The files of a bundle that was made where something was planted everywhere."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    plant_run(tmp_path / "runtime")
    plant_process(tmp_path / "proc")
    out = tmp_path / "report.tar.gz"
    assert make_bundle(out, runtime=tmp_path / "runtime", proc=tmp_path / "proc") == 0
    assert out.stat().st_mode & 0o777 == 0o600
    return contents(out)


def test_nothing_that_was_planted_is_anywhere_in_the_archive(planted: dict[str, str]) -> None:
    for mark in (PLANTED, SAID, "unseen-by-us"):
        assert {name for name, text in planted.items() if mark.lower() in text.lower()} == set(), mark
    assert str(Path.home()) not in "".join(planted.values()) or Path.home() == Path("/")


def test_what_was_planted_is_in_what_the_bundle_is_made_of(tmp_path: Path) -> None:
    """The search above could find it."""
    log = plant_run(tmp_path / "runtime")
    plant_process(tmp_path / "proc")
    assert log.read_text().count(SAID) > 5 and PLANTED in log.read_text()
    assert SAID in (tmp_path / "runtime" / "traces-1.jsonl").read_text()
    (process,) = find_sources(tmp_path / "runtime", {}, proc=tmp_path / "proc").processes
    assert PLANTED in str(process.environment) and PLANTED in str(process.arguments)
    assert PLANTED not in repr(process)


def test_what_is_harmless_and_useful_is_there(planted: dict[str, str]) -> None:
    configuration = json.loads(planted["configuration.json"])
    (running,) = configuration["running"]
    assert running["flags"]["--port"] == "50051" and running["flags"]["--redis-url"] == "redis://r:6379"
    assert running["flags"]["--api-key-hashes"] == "[given, not shown]"
    assert running["variables"]["BATON_PLACEMENT"] == "least_tokens"
    assert running["variables"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://collector.example:4318"
    assert running["variables"]["BATON_NEVER_HEARD_OF"] == "[given, not shown]"
    assert "AWS_SECRET_ACCESS_KEY" not in planted["configuration.json"]
    assert configuration["last_run_of_up"]["flags"]["router"]["--insecure"] == "on"

    (process,) = json.loads(planted["processes.json"])
    assert (process["VmRSS"], process["Threads"], process["nice"]) == ("1234 kB", "7", 5)
    assert process["cpu_s"] == 300 / os.sysconf("SC_CLK_TCK")

    traces = json.loads(planted["traces.json"])
    assert traces[0]["attributes"] == {"baton.ttft_ms": 12.5, "baton.outcome": "failed", "gen_ai.request.model": "tiny"}
    assert traces[0]["events"][0]["attributes"] == {"baton.gap_ms": 1.5}
    assert (traces[0]["name"], traces[1]["name"]) == ("chat tiny", None)

    assert {"versions.json", "machine.json", "logs/router.log", "logs/up.log"} <= planted.keys()
    assert "gRPC on 127.0.0.1:50051, admin port 50052" in planted["logs/router.log"]
    assert 'File "/baton/router/process.py", line 12, in run' in planted["logs/router.log"]
    assert "ready in 3.1 s" in planted["logs/up.log"]


def test_the_readme_lists_every_file_and_what_is_missing(planted: dict[str, str]) -> None:
    text = planted["README.txt"]
    assert all(f"\n  {name} " in text for name in planted)
    assert "status: no answer from 127.0.0.1:1 (admin port)" in text
    assert "metrics: no answer from http://127.0.0.1:1/metrics" in text
    assert "processes: decode-0 of the last run does not run" in text


def test_without_any_run_or_process_the_archive_says_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "report.tar.gz"
    (tmp_path / "proc").mkdir()
    none = tmp_path / "never"
    assert make_bundle(out, NOWHERE, NOWHERE, runtime=none, proc=tmp_path / "proc") == 0
    files = contents(out)
    assert {"README.txt", "versions.json", "machine.json", "configuration.json"} <= files.keys()
    missing = files["README.txt"].partition("Missing, and why:")[2]
    for part in ("configuration", "processes", "status", "metrics", "traces", "logs"):
        assert f"  {part}: " in missing
    assert not none.exists()


def test_traces_that_went_to_a_collector_are_missing_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "traces-1.jsonl").write_text('{"sent_to": "http://collector:4317 (OTLP, grpc)"}\n')
    bundle = collect(
        [part for part in PARTS if part.what == "traces"], Sources(tmp_path, None, (), (), (), {}), Redactor(())
    )
    assert bundle.files == {}
    assert "traces: they went to the collector at http://collector:4317" in bundle.missing[0]


def test_a_part_that_fails_costs_no_other_and_its_error_says_nothing(tmp_path: Path) -> None:
    def broken(sources: Sources) -> Iterator[Piece | Missing]:
        yield Piece("half.txt", "what came before", "half")
        raise KeyError(PLANTED)

    def whole(sources: Sources) -> Iterator[Piece | Missing]:
        yield Piece("whole.txt", "a text", "token=hunter22 here")

    sources = Sources(tmp_path, None, (), (), (), {})
    bundle = collect([Part("first", broken), Part("second", whole)], sources, Redactor(()))
    assert bundle.files == {"half.txt": b"half", "whole.txt": b"token=[redacted] here"}
    assert bundle.missing == ["first: KeyError in the collecting of it, which is a fault of Baton"]
    assert PLANTED not in readme(bundle, datetime(2026, 1, 2, tzinfo=UTC))


def test_a_place_that_cannot_be_written_is_an_error_and_leaves_no_half(tmp_path: Path) -> None:
    bundle = collect([], Sources(tmp_path, None, (), (), (), {}), Redactor(()))
    with pytest.raises(CommandFailed, match="cannot be written to"):
        write_archive(bundle, tmp_path / "none" / "x.tar.gz", datetime(2026, 1, 2, tzinfo=UTC))
    (tmp_path / "taken").mkdir()
    with pytest.raises(CommandFailed):
        write_archive(bundle, tmp_path / "taken", datetime(2026, 1, 2, tzinfo=UTC))
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]


@pytest.fixture
def metrics_port() -> Iterator[tuple[int, list[str | None]]]:
    """A router's HTTP port that wants a key."""
    seen: list[str | None] = []

    class Router(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["authorization"])
            allowed = self.headers["authorization"] == f"Bearer {PLANTED}-client-key"
            body = io.BytesIO()
            body.write(b"# HELP baton:steps_total Steps of the engine.\n# TYPE baton:steps_total counter\n")
            body.write(b'baton:steps_total{engine="decode-0"} 7.0\n# HELP other_x x\nother_x 1\n')
            self.send_response(200 if allowed else 401)
            self.send_header("content-length", str(len(body.getvalue())))
            self.end_headers()
            self.wfile.write(body.getvalue())

        def log_message(self, format: str, *arguments: object) -> None:
            """The output of the tests is for failures."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1], seen
    server.shutdown()
    server.server_close()


def test_metrics_are_fetched_with_the_callers_key_which_stays_here(
    metrics_port: tuple[int, list[str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, seen = metrics_port
    (tmp_path / "proc").mkdir()
    out = tmp_path / "out.tar.gz"
    make_bundle(out, NOWHERE, [f"127.0.0.1:{port}"], runtime=tmp_path, proc=tmp_path / "proc")
    assert "needs a key of `baton keys new --admin`, in BATON_API_KEY" in contents(out)["README.txt"]
    monkeypatch.setenv("BATON_API_KEY", f"{PLANTED}-client-key")
    make_bundle(out, NOWHERE, [f"127.0.0.1:{port}"], runtime=tmp_path, proc=tmp_path / "proc")
    files = contents(out)
    assert seen == [None, f"Bearer {PLANTED}-client-key"]
    assert (
        'baton:steps_total{engine="decode-0"} 7.0' in files["metrics-0.txt"] and "other_x" not in files["metrics-0.txt"]
    )
    assert not any(PLANTED in text for text in files.values())


def test_addresses_come_from_routers_that_run_then_from_the_last_run(tmp_path: Path) -> None:
    runtime, proc = tmp_path / "runtime", tmp_path / "proc"
    assert find_sources(runtime, {}, proc=proc).admin_targets == ("127.0.0.1:50052",)
    plant_run(runtime)
    assert find_sources(runtime, {}, proc=proc).admin_targets == NOWHERE
    plant_process(proc)
    assert find_sources(runtime, {}, proc=proc).admin_targets == ["127.0.0.1:1"]
    assert find_sources(runtime, {}, ["h:2"], ["h:3"], proc).http_targets == ["h:3"]


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ((), "127.0.0.1:8000"),
        (("--http-host", "0.0.0.0", "--http-port", "9"), "127.0.0.1:9"),
        (("--http-host", "10.0.0.1"), "10.0.0.1:8000"),
        (("--http-host", "fd00::1", "--http-port", "9"), "[fd00::1]:9"),
    ],
)
def test_a_router_is_reached_where_it_listens(
    arguments: tuple[str, ...], address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = BatonProcess(1, "router", arguments, {})
    monkeypatch.setattr("baton.cli.bundle.sources.find_processes", lambda proc: [process])
    assert find_sources(tmp_path, {}).http_targets == [address]


def test_a_part_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def added(sources: Sources) -> Iterator[Piece | Missing]:
        yield Piece("more.json", "one more", {"key": new_secret()})

    monkeypatch.setattr(parts, "PARTS", (*PARTS, Part("more", added)))
    out = tmp_path / "out.tar.gz"
    (tmp_path / "proc").mkdir()
    make_bundle(out, NOWHERE, NOWHERE, runtime=tmp_path, proc=tmp_path / "proc")
    assert json.loads(contents(out)["more.json"]) == {"key": "[redacted]"}

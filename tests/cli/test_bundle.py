"""Archive of `baton bundle`: it has what a bug report needs, and no planted secret, prompt or answer."""

import json
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from baton.cli.bundle.command import Sources, collect, make_bundle, write_archive
from baton.cli.bundle.processes import BatonProcess, admin_targets, find_processes
from baton.cli.bundle.redaction import Redactor, shown_flags, shown_variables
from baton.launch import CommandFailed
from baton.launch.log_files import begin_logs
from baton.launch.run_record import RunRecord, newest_run, write_run_record

NOWHERE = ("127.0.0.1:1",)
PLANTED = "xQzWvK"
"""Part of every secret."""
SAID = "jYkRtPz"
"""Part of every prompt and answer. No secret contains it, so only the allow-lists can keep it in."""
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
12:00:00.002 INFO router baton.router.fleet.link: connection to worker d-0 closed: no '{SAID} prompt'; reconnecting request_id=r-1
12:00:00.003 INFO router baton.router.fleet.link: the prompt was {SAID}
12:00:00.004 WARNING router uvicorn.error: {SAID} body of a library
What {SAID} wrote to stdout
Traceback (most recent call last):
  File "/baton/router/process.py", line 12, in run
    raise ValueError("{SAID}")
ValueError: cannot read {SAID}
12:00:00.005 INFO router baton.router.fleet.link: connection to worker d-1 closed: Authorization: Bearer {PLANTED}5; reconnecting
{{"time": "t", "level": "info", "process": "router", "logger": "baton.x", "message": "{SAID}", "other": "{SAID}"}}
"""  # noqa: E501


def plant_run(runtime: Path) -> Path:
    """Write a finished run with planted secrets; return the log of its router."""
    logs = begin_logs(runtime, 1)
    log = logs / "router.log"
    log.write_text("".join(f"router    | {line}\n" for line in LOG.splitlines()))
    (logs / "up.log").write_text(f"baton     | Redis: redis://u:{PLANTED}@h:1\nbaton     | ready in 3.1 s\n")
    flags = {
        "router": shown_flags(["--port", "50051", "--api-keys", f"/{PLANTED}/keys", "--insecure"]),
        "decode-0": shown_flags(["--worker-id", "decode-0", "--mystery", PLANTED]),
    }
    record = RunRecord(1, NOWHERE, NOWHERE, str(logs), "", flags, shown_variables(ENVIRONMENT))
    write_run_record(runtime, 1, record)
    return log


def plant_process(proc: Path) -> None:
    """Write a running router as /proc shows it."""
    folder = proc / "77"
    folder.mkdir(parents=True)
    command = ["python", "-P", "-m", "baton.router", "--port", "50051", "--admin-port", "1", "--http-port", "1"]
    command += ["--api-key-hashes", f"me:{PLANTED}", f"--redis-url=redis://:{PLANTED}@r:6379", "--model", "/m/tiny"]
    (folder / "cmdline").write_bytes(b"".join(each.encode() + b"\0" for each in command))
    environ = ENVIRONMENT | {"OTHER_TOKEN": "unseen-by-us-77"}
    (folder / "environ").write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in environ.items()))


def contents(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as opened:
        files = {entry.name: opened.extractfile(entry) for entry in opened.getmembers()}
        return {name.partition("/")[2]: file.read().decode() for name, file in files.items() if file is not None}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the files of a bundle whose sources all have planted texts."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    plant_run(tmp_path / "runtime")
    plant_process(tmp_path / "proc")
    out = tmp_path / "report.tar.gz"
    assert make_bundle(out, runtime=tmp_path / "runtime", proc=tmp_path / "proc") == 0
    assert out.stat().st_mode & 0o777 == 0o600
    return contents(out)


def test_bundle_of_planted_sources_contains_no_planted_text(planted: dict[str, str]) -> None:
    for mark in (PLANTED, SAID, "unseen-by-us"):
        assert {name for name, text in planted.items() if mark.lower() in text.lower()} == set(), mark
    assert str(Path.home()) not in "".join(planted.values()) or Path.home() == Path("/")


def test_planted_text_is_in_sources_of_bundle(tmp_path: Path) -> None:
    log = plant_run(tmp_path / "runtime")
    plant_process(tmp_path / "proc")
    assert log.read_text().count(SAID) > 5 and PLANTED in log.read_text()
    (process,) = find_processes(tmp_path / "proc")
    assert PLANTED in str(process.environment) and PLANTED in str(process.arguments)
    assert PLANTED not in repr(process)


def test_bundle_contains_harmless_settings_and_logs(planted: dict[str, str]) -> None:
    configuration = json.loads(planted["configuration.json"])
    (running,) = configuration["running"]
    assert running["flags"]["--port"] == "50051" and running["flags"]["--redis-url"] == "redis://r:6379"
    assert running["flags"]["--api-key-hashes"] == "[given, not shown]"
    assert running["variables"]["BATON_PLACEMENT"] == "least_tokens"
    assert running["variables"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://collector.example:4318"
    assert running["variables"]["BATON_NEVER_HEARD_OF"] == "[given, not shown]"
    assert "AWS_SECRET_ACCESS_KEY" not in planted["configuration.json"]
    assert configuration["last_run_of_up"]["flags"]["router"]["--insecure"] == "on"

    assert json.loads(planted["machine.json"])["packages"]["grpcio"]
    assert {"machine.json", "logs/router.log", "logs/up.log"} <= planted.keys()
    assert "gRPC on 127.0.0.1:50051, admin port 50052" in planted["logs/router.log"]
    assert 'File "/baton/router/process.py", line 12, in run' in planted["logs/router.log"]
    assert "ready in 3.1 s" in planted["logs/up.log"]


def test_bundle_readme_lists_files_and_missing_parts(planted: dict[str, str]) -> None:
    text = planted["README.txt"]
    assert all(f"\n  {name} " in text for name in planted if name != "README.txt")
    assert "status-0.json: no answer from 127.0.0.1:1 (admin port)" in text


def test_bundle_with_tokens_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "proc").mkdir()
    for with_tokens in (False, True):
        out = tmp_path / "report.tar.gz"
        assert make_bundle(out, runtime=tmp_path, proc=tmp_path / "proc", with_tokens=with_tokens) == 0
        assert ("PROMPTS AND ANSWERS ARE IN IT" in contents(out)["README.txt"]) is with_tokens
        assert ("prompts and answers, as token ids" in capsys.readouterr().out) is with_tokens


def test_bundle_without_run_or_process_lists_missing_parts(tmp_path: Path) -> None:
    out = tmp_path / "report.tar.gz"
    (tmp_path / "proc").mkdir()
    none = tmp_path / "never"
    assert make_bundle(out, NOWHERE, runtime=none, proc=tmp_path / "proc") == 0
    files = contents(out)
    assert {"README.txt", "machine.json", "configuration.json"} <= files.keys()
    missing = files["README.txt"].partition("Missing, and why:")[2]
    for part in ("the last run", "status-0.json", "requests-0.json", "logs"):
        assert f"  {part}: " in missing
    assert not none.exists()


def test_bundle_failing_part_is_listed_without_its_error_text(tmp_path: Path) -> None:
    def broken(sources: Sources) -> Iterator[tuple[str, object]]:
        yield "half.txt", "half"
        raise KeyError(PLANTED)

    def whole(sources: Sources) -> Iterator[tuple[str, object]]:
        yield "whole.txt", "token=hunter22 here"

    sources = Sources(tmp_path, None, (), (), {})
    bundle = collect([broken, whole], sources, Redactor(()))
    assert bundle.files == {"half.txt": b"half", "whole.txt": b"token=[redacted] here"}
    assert bundle.missing == ["broken: KeyError while collecting, a defect of Baton"]


def test_bundle_unwritable_archive_fails_and_leaves_no_file(tmp_path: Path) -> None:
    bundle = collect([], Sources(tmp_path, None, (), (), {}), Redactor(()))
    with pytest.raises(CommandFailed, match="cannot write the bundle"):
        write_archive(bundle, tmp_path / "none" / "x.tar.gz", datetime(2026, 1, 2, tzinfo=UTC))
    (tmp_path / "taken").mkdir()
    with pytest.raises(CommandFailed):
        write_archive(bundle, tmp_path / "taken", datetime(2026, 1, 2, tzinfo=UTC))
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]


def test_admin_targets_prefer_running_routers_to_last_run(tmp_path: Path) -> None:
    runtime, proc = tmp_path / "runtime", tmp_path / "proc"
    assert admin_targets((), newest_run(runtime)) == ("127.0.0.1:50052",)
    plant_run(runtime)
    assert admin_targets((), newest_run(runtime)) == NOWHERE
    plant_process(proc)
    assert admin_targets(find_processes(proc), newest_run(runtime)) == ["127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ((), "127.0.0.1:50052"),
        (("--admin-host", "0.0.0.0", "--admin-port", "9"), "127.0.0.1:9"),
        (("--admin-host", "10.0.0.1"), "10.0.0.1:50052"),
        (("--admin-host", "fd00::1", "--admin-port", "9"), "[fd00::1]:9"),
    ],
)
def test_admin_targets_follow_flags_of_router(arguments: tuple[str, ...], address: str) -> None:
    assert admin_targets([BatonProcess(1, "router", arguments, {})], None) == [address]

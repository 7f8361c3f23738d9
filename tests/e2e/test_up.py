"""`baton up` as a user runs it: start, answers, the death of a worker, and a clean shutdown."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from baton.client import AdminClient
from baton.lab.chaos.watch import children_of
from tests.e2e.conftest import REPOSITORY
from tests.e2e.stack import SILENCE_S, free_ports

READY_S = 180.0
STOP_S = 30.0
SHARED_MEMORY = Path("/dev/shm")
IN_BACKGROUND = ("sh", "-c", 'trap "" INT; exec "$0" "$@"')  # like `&` in a script, which makes processes ignore SIGINT


class Up:
    """Running `baton up`, by default with the demo model, and commands that talk to it."""

    def __init__(self, log: Path, *flags: str, within: Sequence[str] = ()) -> None:
        """Start it. `within`: command that runs the rest of its arguments."""
        self.port, self.admin_port = free_ports(2)
        self.log = log
        command = [
            *within,
            sys.executable,
            "-m",
            "baton.cli",
            "up",
            "--port",
            str(self.port),
            "--admin-port",
            str(self.admin_port),
        ]
        # On a busy machine, the router would take slow workers for lost.
        environment = {**os.environ, "BATON_SESSION_SILENCE_S": SILENCE_S}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--kv-memory", "128MiB", *flags],
                stdout=output,
                stderr=output,
                cwd=REPOSITORY,
                env=environment,
            )

    def baton(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "baton.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)

    def ask(self, *arguments: str) -> list[dict[str, object]]:
        done = self.baton(*arguments, "--json", "--target", f"127.0.0.1:{self.port}")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def worker_pids(self) -> dict[str, int]:
        with AdminClient(f"127.0.0.1:{self.admin_port}") as admin:
            return {worker.worker_id: worker.pid for worker in admin.status().workers if worker.connected}

    def wait_for(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {within_s:g} s:\n{self.log.read_text()[-5000:]}"
            assert self.process.poll() is None, self.log.read_text()[-5000:]
            time.sleep(0.1)  # a poll between two looks, bounded above


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """`baton up`, started in the background as by a script."""
    running = Up(tmp_path_factory.mktemp("up") / "up.log", within=IN_BACKGROUND)
    try:
        running.wait_for(lambda: "ready in" in running.log.read_text(), READY_S, "readiness")
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_chat_streams_an_answer_that_two_processes_made(up: Up) -> None:
    events = up.ask("chat", "What is a block table?")
    last = events[-1]
    timings = last["timings"]
    assert [event["event"] for event in events][0 :: len(events) - 1] == ["started", "finished"]
    assert "".join(str(event.get("text", "")) for event in events).startswith("A block table maps the logical blocks")
    assert last["finish_reason"] == "stop"
    assert isinstance(timings, dict)
    assert timings["prefill_pid"] != timings["decode_pid"]
    assert timings["transport"] == "shared_memory"
    assert timings["transfer_bytes"] > 0


def test_json_deltas_are_contiguous(up: Up) -> None:
    deltas = [
        e
        for e in up.ask("generate", "--token-ids", "5,17,30", "--max-tokens", "9", "--ignore-eos")
        if e["event"] == "delta"
    ]
    tokens = [token for delta in deltas for token in delta["token_ids"]]  # type: ignore[attr-defined]
    assert len(tokens) == 9
    assert deltas[0]["offset"] == 0


def test_bad_input_is_an_error_event_and_a_non_zero_exit(up: Up) -> None:
    done = up.baton("generate", "hi", "--temperature", "nan", "--json", "--target", f"127.0.0.1:{up.port}")
    event = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode != 0
    assert (event["event"], event["code"], event["field"]) == ("error", "INVALID_ARGUMENT", "sampling.temperature")


def test_killed_worker_is_restarted_and_serves_again(up: Up) -> None:
    status = json.loads(up.baton("status", "--json", "--admin", f"127.0.0.1:{up.admin_port}").stdout)
    before = {worker["worker_id"]: worker["pid"] for worker in status["workers"] if worker["connected"]}
    assert before == up.worker_pids() and before.keys() == {"prefill-0", "decode-0"}
    os.kill(before["decode-0"], signal.SIGKILL)
    up.wait_for(lambda: up.worker_pids().get("decode-0", before["decode-0"]) != before["decode-0"], 60, "restart")
    assert up.ask("chat", "What is TTFT?")[-1]["finish_reason"] == "stop"


def test_why_recent_lists_the_last_request(up: Up) -> None:
    admin = ("--admin", f"127.0.0.1:{up.admin_port}")
    request_id = up.ask("chat", "What is prefill?")[0]["request_id"]

    def last() -> list[str]:
        done = up.baton("why", "--recent", "--last", "1", "--json", *admin)
        return [json.loads(line)["request_id"] for line in done.stdout.splitlines()] if done.returncode == 0 else []

    up.wait_for(lambda: last() == [request_id], 60, "report of the last request")
    done = up.baton("why", request_id, *admin)
    assert done.returncode == 0, done.stderr
    assert "The first token came after" in done.stdout and "first token to second" in done.stdout


def test_bundle_has_the_run_and_nothing_that_was_asked_or_answered(up: Up, tmp_path: Path) -> None:
    answer = "".join(str(event.get("text", "")) for event in up.ask("chat", "What is xylophonic scheduling?"))
    out = tmp_path / "report.tar.gz"
    done = up.baton("bundle", "--out", str(out), "--admin", f"127.0.0.1:{up.admin_port}")
    assert done.returncode == 0, done.stderr
    with tarfile.open(out) as archive:
        members = {entry.name.partition("/")[2]: archive.extractfile(entry) for entry in archive.getmembers()}
        files = {name: member.read().decode() for name, member in members.items() if member is not None}
    assert {"machine.json", "logs/router.log", "logs/decode-0.log"} <= files.keys()
    for kind in ("status-", "requests-"):  # one file for each router on this machine
        assert any(name.startswith(kind) for name in files)
    seen = [json.loads(text)["workers"] for name, text in files.items() if name.startswith("status-")]
    assert {"prefill-0", "decode-0"} <= {worker["worker_id"] for workers in seen for worker in workers}
    assert any('"phase": "answered"' in text for name, text in files.items() if name.startswith("requests-"))
    assert "gRPC on 127.0.0.1" in files["logs/router.log"] and "ready in" in files["logs/up.log"]
    assert "was ended by SIGKILL; restarting it" in files["logs/up.log"]  # from an earlier test
    said = ["xylophonic", answer[:40], "A block table maps the logical blocks"]
    assert [(name, text) for name, whole in files.items() for text in said if text in whole] == []


def test_sigint_drains_and_leaves_nothing(up: Up) -> None:
    """This test is the last of the file, since it stops the shared `baton up`."""
    pids = [up.process.pid, *up.worker_pids().values(), *children_of(up.process.pid)]
    shared = set(SHARED_MEMORY.iterdir())
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(STOP_S) == 0, up.log.read_text()[-5000:]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    deadline = time.monotonic() + STOP_S
    while not set(SHARED_MEMORY.iterdir()) <= shared:  # other programs may have files there for a moment
        assert time.monotonic() < deadline, set(SHARED_MEMORY.iterdir()) - shared
        time.sleep(0.1)  # a poll between two looks, bounded above
    assert "Traceback" not in up.log.read_text()


def test_signal_during_the_start_ends_all_processes(tmp_path: Path) -> None:
    """A signal after the start is tested above (SIGINT) and in test_colocated.py (SIGTERM)."""
    up = Up(tmp_path / "up.log", within=IN_BACKGROUND)
    children: list[int] = []
    try:
        up.wait_for(lambda: "starting:" in up.log.read_text() and children_of(up.process.pid) != [], READY_S, "start")
        children = children_of(up.process.pid)
        up.process.terminate()
        assert up.process.wait(STOP_S) == 0, up.log.read_text()[-5000:]
    finally:
        up.process.kill()
        up.process.wait()
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert "stopped" in up.log.read_text()

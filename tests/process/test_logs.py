"""Log lines carry the trace and the request of the task that writes them."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from baton.process.telemetry.logs import SeldomLog, configure_logging
from baton.process.telemetry.trace_context import current_request_id, current_trace, new_trace


@pytest.fixture(autouse=True)
def restored_globals() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    trace, request_id = current_trace.set(None), current_request_id.set(None)
    yield
    current_trace.reset(trace)
    current_request_id.reset(request_id)
    root.handlers, root.level = handlers, level


def _log(monkeypatch: pytest.MonkeyPatch, log_format: str) -> str:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("router", log_format)  # type: ignore[arg-type]
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("thing").exception("failed at %d", 3)
    return stream.getvalue()


def test_plain_lines_end_with_the_identifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = new_trace()
    current_trace.set(trace)
    current_request_id.set("r1")
    line = _log(monkeypatch, "plain").splitlines()[0]
    assert line.endswith(f"ERROR router thing: failed at 3 trace_id={trace.trace_id} request_id=r1")


def test_json_lines_are_one_object_each(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = new_trace()
    current_trace.set(trace)
    (line,) = _log(monkeypatch, "json").splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["process"], entry["message"]) == ("error", "router", "failed at 3")
    assert entry["trace_id"] == trace.trace_id
    assert "ValueError: boom" in entry["exception"]
    assert "request_id" not in entry


def test_plain_line_with_control_characters_of_others_stays_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("router", "plain")
    current_request_id.set("a\n12:00:00.000 CRITICAL forged")
    logging.getLogger("thing").warning("model %s", "\x1b[2J\u202egpj")
    [line] = stream.getvalue().splitlines()
    assert line.endswith("model \\x1b[2J\\u202egpj request_id=a\\n12:00:00.000 CRITICAL forged")


def test_seldom_log_writes_one_of_a_kind_and_counts_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    seldom = SeldomLog(logging.getLogger("thing"), lambda: now[0])
    for _ in range(5):
        seldom.warning("record", "bad: %s", "x")
    seldom.warning("other", "bad: %s", "y")
    now[0] = SeldomLog.PERIOD_S
    seldom.warning("record", "bad: %s", "z")
    assert [each.getMessage() for each in caplog.records] == ["bad: x", "bad: y", "bad: z (and 4 like it)"]

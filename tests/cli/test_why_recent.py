"""`baton why --recent` lists requests of routers and of files of spans."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.__main__ import app
from baton.cli.span_files.read import read_spans
from baton.cli.why import show
from baton.cli.why.recent import recent_lines, requests_in
from baton.cli.why.show import show_file, show_recent
from baton.client import RequestDrafts, StallCausePart, TokenTimes
from baton.launch import CommandFailed
from tests.fixtures.admin_clients import FakeAdmin
from tests.fixtures.snapshots import RUNNING, SLOW, STALLED

STAGES = {"baton.total_ms": 100.0, "baton.ttft_ms": 40.0, "baton.prefill_ms": 28.0, "baton.token_gap_ms": 10.0}


def line(name: str, start_ms: float, end_ms: float, attributes: dict[str, Any], parent: str | None = None) -> str:
    content = {
        "trace_id": "t1", "span_id": name, "parent_span_id": parent, "name": name,
        "kind": "server" if parent is None else "internal", "service": "router", "start_ns": int(start_ms * 1e6),
        "end_ns": int(end_ms * 1e6), "status": "ok", "status_message": None, "attributes": attributes, "events": [],
        "links": [],
    }  # fmt: skip
    return json.dumps(content) + "\n"


def test_requests_in_spans_have_stages_workers_and_stalls() -> None:
    stall = {"baton.gap_ms": 30.0, "baton.usual_ms": 5.0, "baton.causes": ["network"], "baton.cause_ms": [25.0]}
    stall |= {"baton.culprits": [""], "baton.details": [""]}
    decode = json.loads(line("decode", 40, 100, {}, "root"))
    decode["events"] = [{"name": "stall", "time_ns": 70_000_000, "attributes": stall}]
    tbt = {"baton.tbt_p50_ms": 1.5, "baton.tbt_p99_ms": 3.0, "baton.tbt_max_ms": 30.0, "baton.stalls": 2}
    drafts = {"baton.drafted_tokens": 20, "baton.accepted_tokens": 12, "baton.drafts_saved_ms": 34.4}
    root = STAGES | tbt | drafts | {"gen_ai.response.id": "r", "gen_ai.usage.input_tokens": 9, "baton.attempts": 2}
    route = {"baton.route.prefill": "p:1", "baton.route.decode": "d:1"}
    spans = [line("root", 0, 100, root), line("route.select", 1, 2, route, "root"), json.dumps(decode)]
    (found,) = requests_in(read_spans(spans))
    assert (found.request_id, found.phase, found.prompt_tokens, found.attempts) == ("r", "answered", 9, 2)
    assert (found.stages.ttft_ms, found.stages.prefill_ms, found.stages.recovery_ms) == (40.0, 28.0, 0.0)
    assert (found.prefill, found.decode, found.stall_count) == ("p:1", "d:1", 2)
    assert (found.tbt, found.drafts) == (TokenTimes(1.5, 3.0, 30.0), RequestDrafts(20, 12, 34.4))
    (seen,) = found.stalls
    assert (seen.at_ms, seen.gap_ms, seen.causes) == (70.0, 30.0, (StallCausePart("network", 25.0, "", ""),))


def test_read_spans_skips_incomplete_last_line() -> None:
    root = line("root", 0, 100, STAGES)
    assert len(requests_in(read_spans([root, root[:40]]))) == 1


def test_why_file_lists_newest_first_and_draws_one_by_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "traces.jsonl"
    roots = [line(f"chat {n}", n, n + 100, STAGES | {"gen_ai.response.id": f"req-{n}"}) for n in range(5)]
    file.write_text("".join(roots))
    assert show_file(None, file, 2, as_json=True) == 0
    assert [json.loads(row)["request_id"] for row in capsys.readouterr().out.splitlines()] == ["req-4", "req-3"]
    assert show_file("req-1", file, 2, as_json=False) == 0
    drawn = capsys.readouterr().out
    assert drawn.startswith("req-1 ") and "later tokens" in drawn and "28 ms |" in drawn
    with pytest.raises(CommandFailed, match="has no request other"):
        show_file("other", file, 2, as_json=False)
    with pytest.raises(CommandFailed, match="`baton up` writes"):
        show_file(None, tmp_path / "none.jsonl", 1, as_json=False)


def admin_of(target: str) -> FakeAdmin:
    return FakeAdmin(recent_requests=lambda limit: (RUNNING,) if target == "a" else (STALLED, SLOW))


def test_why_recent_lists_all_routers_with_complete_ids(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "admin_client", admin_of)
    assert show_recent(9, ["a", "b"], as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 80 and "TTFT" in lines[0]
    assert [row.split()[0] for row in lines[1:]] == [
        each.request_id.removeprefix("req-") for each in (RUNNING, STALLED, SLOW)
    ]
    assert show_recent(2, ["a", "b"], as_json=True) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_why_recent_narrow_terminal_keeps_ids() -> None:
    assert any(STALLED.request_id.removeprefix("req-") in row for row in recent_lines([STALLED], 20))


@pytest.mark.parametrize(("old", "new"), [(["explain", "r"], "why ID"), (["trace"], "why --recent")])
def test_renamed_command_names_its_successor(old: list[str], new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("show_why", "show_recent"):
        monkeypatch.setattr(show, name, lambda *_, **__: 0)
    done = CliRunner().invoke(app, [*old, "--admin", "h:1"])
    assert done.exit_code == 0 and f"`{new}`" in done.stderr and not done.stdout

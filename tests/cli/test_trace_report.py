"""What `baton trace` reads out of a trace file."""

import json
import os
import re
from pathlib import Path

import pytest

from baton.cli.span_files.places import begin_trace_file
from baton.cli.span_files.read import Span, read_spans
from baton.cli.trace import RequestTrace, as_object, report_lines, requests_in, show_traces
from baton.launch import CommandFailed
from baton.process.telemetry.collector import Collector

STAGES = {
    "baton.total_ms": 100.0,
    "baton.ttft_ms": 40.0,
    "baton.router_queue_ms": 5.0,
    "baton.route_ms": 1.0,
    "baton.prefill_queue_ms": 4.0,
    "baton.prefill_ms": 28.0,
    "baton.return_ms": 1.0,
    "baton.token_gap_ms": 10.0,
    "baton.transfer_exposed_ms": 2.0,
    "baton.decode_admission_ms": 3.0,
    "baton.first_step_ms": 5.0,
    "baton.tbt_p50_ms": 1.5,
    "baton.tbt_p99_ms": 3.0,
    "baton.tbt_max_ms": 9.0,
}
TRANSFER: dict[str, object] = {"baton.transfer.bytes": 2**20, "baton.transfer.transport": "grpc"}


def line(name: str, start_ms: float, end_ms: float, attributes: dict[str, object], parent: str | None = None) -> str:
    content = {
        "trace_id": "t1",
        "span_id": name,
        "parent_span_id": parent,
        "name": name,
        "kind": "server" if parent is None else "internal",
        "service": "router",
        "start_ns": int(start_ms * 1e6),
        "end_ns": int(end_ms * 1e6),
        "status": "ok",
        "status_message": None,
        "attributes": attributes,
        "events": [],
        "links": [],
    }
    return json.dumps(content) + "\n"


def request(**changes: float) -> RequestTrace:
    attributes = STAGES | {f"baton.{name}": value for name, value in changes.items()}
    (found,) = requests_in(read_spans([line("generate tiny", 0, 100, attributes)]))
    return found


def test_both_sums_hold_where_stages_add_up() -> None:
    ttft, gap = request().ttft, request().first_gap
    assert ttft is not None and gap is not None
    assert (ttft.deviation_ms, ttft.holds) == (-1.0, True)
    assert (gap.deviation_ms, gap.holds) == (0.0, True)


@pytest.mark.parametrize(("measured_ms", "holds"), [(42.0, False), (38.0, True), (36.0, False)])
def test_a_sum_that_is_off_by_more_than_two_milliseconds_does_not_hold(measured_ms: float, holds: bool) -> None:
    ttft = request(ttft_ms=measured_ms).ttft
    assert ttft is not None
    assert ttft.holds is holds


@pytest.mark.parametrize(
    ("measured_ms", "verdict"), [(41.64, "(2.6 ms unaccounted for)"), (36.0, "(3.0 ms of overlap)")]
)
def test_a_sum_that_misses_says_by_how_much_and_json_keeps_the_verdict(measured_ms: float, verdict: str) -> None:
    found = request(ttft_ms=measured_ms)
    assert report_lines(found)[2].endswith(verdict)
    ttft = as_object(found)["ttft"]
    assert isinstance(ttft, dict) and ttft["holds"] is False


def test_times_in_json_have_three_decimals() -> None:
    text = json.dumps(as_object(request(ttft_ms=40.123456789, tbt_p50_ms=1.23456, decode_admission_ms=3.00049)))
    assert not re.search(r"\.\d{4}", text)
    assert '"measured_ms": 40.123,' in text


def test_a_long_time_may_be_off_by_three_percent() -> None:
    long, longer = request(ttft_ms=1010.0, prefill_ms=1028.0).ttft, request(ttft_ms=1000.0, prefill_ms=1028.0).ttft
    assert long is not None and longer is not None
    assert (long.holds, longer.holds) == (True, False)


def test_a_request_that_was_not_answered_says_how_it_ended_and_what_went_out() -> None:
    ended: dict[str, object] = {"baton.outcome": "cancelled", "baton.reason": "client", "error.type": "CANCELLED"}
    tokens: dict[str, object] = {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 300}
    root = line("generate tiny", 0, 100, {**STAGES, **ended, **tokens}).replace('"ok"', '"error"')
    (found,) = requests_in(read_spans([root]))
    assert "5 tokens in (0 cached), 300 out, 100.0 ms, cancelled: client" in report_lines(found)[0]


def test_an_answer_of_one_token_has_no_gap() -> None:
    assert request(token_gap_ms=0.0).first_gap is None


def test_the_report_names_sums_tbt_and_stages_in_order_of_time() -> None:
    lines = [
        line("decode", 50, 100, {"baton.stalls": 2, "baton.tbt_max_ms": 9.4}, parent="generate tiny"),
        line("router.queue", 0, 5, {}, parent="generate tiny"),
        line(
            "kv.transfer", 10, 48, {"baton.transfer.bytes": 2**20, "baton.transfer.transport": "grpc"}, "generate tiny"
        ),
        line("generate tiny", 0, 100, STAGES | {"gen_ai.response.id": "req-1"}),
    ]
    (found,) = requests_in(read_spans(lines))
    text = report_lines(found)
    assert text[1].split()[-3:] == ["its", "trace", "t1"] and "req-1, or" in text[1]
    assert "40.00 ms = router queue 5.00 + route 1.00" in text[2]
    assert text[2].endswith("(adds up to within 1.0 ms)")
    assert text[3].endswith("(adds up to within 0.0 ms)")
    assert text[4].split() == ["TBT", "p50", "1.50", "p99", "3.00", "max", "9.00", "ms"]
    assert [row.split()[0] for row in text[5:]] == ["router.queue", "kv.transfer", "decode"]
    assert "1.00 MiB by grpc" in text[6]
    assert text[7].endswith("| 2 stalls, the longest 9 ms")


@pytest.mark.parametrize(
    ("drafted", "accepted", "saved_ms", "said"),
    [
        (20, 12, 34.4, "12 of 20 drafted tokens were drawn, about 34 ms sooner"),
        (8, 0, -3.2, "0 of 8 drafted tokens were drawn, about 3 ms later"),
        (0, 0, -5.0, "only of other answers, about 5 ms later"),
    ],
)
def test_drafts_say_how_many_were_drawn_and_what_that_saved(
    drafted: int, accepted: int, saved_ms: float, said: str
) -> None:
    found = request(drafted_tokens=drafted, accepted_tokens=accepted, drafts_saved_ms=saved_ms)
    assert f"  drafts        {said}" in report_lines(found)
    given = as_object(found)["drafts"]
    assert given == {"drafted_tokens": drafted, "accepted_tokens": accepted, "drafts_saved_ms": saved_ms}
    assert as_object(request())["drafts"] is None


def test_attempts_say_where_they_were_what_ended_them_and_how_long_the_client_waited() -> None:
    failed = {"number": 1, "prefill": "prefill-0", "decode": "decode-1", "first_token": 0, "failure": "WORKER_DIED"}
    failed |= {"failed_worker": "decode-1", "message": "its process is gone"}
    replay = {"number": 2, "decode": "decode-0", "first_token": 300, "choice": 0, "stood_still_ms": 5931.2}
    lines = [
        line("attempt", start, start + 40, {f"baton.attempt.{name}": value for name, value in given.items()}, "request")
        for start, given in ((5, failed), (60, replay))
    ]
    (found,) = requests_in(read_spans([line("request", 0, 100, STAGES), *lines]))
    first, second = [row.split("|")[2] for row in report_lines(found)[5:]]
    assert first == " 1: prefill-0 -> decode-1; decode-1 failed: WORKER_DIED, its process is gone"
    assert second == " 2: decode-0, choice 0, from token 301 on, the client waited 5931 ms for it"


def test_bars_never_leave_the_scale() -> None:
    lines = [
        line("late", 250, 300, {}, parent="generate tiny"),
        line("early", -50, -10, {}, parent="generate tiny"),
        line("generate tiny", 0, 100, STAGES),
    ]
    (found,) = requests_in(read_spans(lines))
    bars = [row.split("|")[1] for row in report_lines(found)[5:]]
    assert [len(bar) for bar in bars] == [48, 48]
    assert all("#" in bar for bar in bars)


def test_a_half_written_last_line_is_left_out() -> None:
    whole = line("generate tiny", 0, 100, STAGES)
    assert [type(span) for span in read_spans([whole, whole[:40]])] == [Span]


def test_only_the_last_requests_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_text("".join(line(f"generate {number}", number, number + 100, STAGES) for number in range(5)))
    assert show_traces(str(file), last=2, as_json=True) == 0
    assert [json.loads(row)["name"] for row in capsys.readouterr().out.splitlines()] == ["generate 3", "generate 4"]


def test_a_missing_file_says_who_writes_it(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="baton up"):
        show_traces(str(tmp_path / "none.jsonl"), last=1, as_json=False)


def test_where_the_last_run_sends_its_traces_elsewhere_those_of_an_earlier_run_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.cli.trace.RUNTIME", tmp_path)
    earlier = begin_trace_file(tmp_path, 1)
    earlier.write_text(line("generate tiny", 0, 100, STAGES))
    os.utime(earlier, (100, 100))
    begin_trace_file(tmp_path, 2, Collector("http://collector:4317"))
    with pytest.raises(
        CommandFailed, match="the traces of the last `baton up` go to the collector at http://collector:4317"
    ):
        show_traces(None, last=1, as_json=False)
    assert show_traces(str(earlier), last=1, as_json=True) == 0

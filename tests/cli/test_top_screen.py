"""What `baton top` shows, at several widths, and what keys change."""

from dataclasses import replace

import pytest

from baton.cli.status import WatchFrame
from baton.cli.top.keys import Key
from baton.cli.top.screen import RequestKey, Sort, View, key_of, ordered, pressed, screen_of
from baton.cli.top.snapshot import Rates, Snapshot, Snapshots, rates_between
from baton.cli.why.waterfall import bars, waterfall_lines
from baton.client import ClusterStatus, RecentRequest, RequestDrafts, RequestTotals
from tests.fixtures.snapshots import NO_STAGES, RUNNING, SLOW, SNAPSHOT, STAGES, STALL, STALLED, STATUS, request, worker

CHOSEN = View(chosen=key_of(STALLED))

AT_80 = """\
ready · tiny · 2 requests running, 1 pending
TTFT p50 45 ms, p99 400 ms · TBT p50 10 ms, p99 100 ms · requests in the last
  minute: 7
tokens per second: 1,234 prompt, 567 generated

worker     running  blocks  pending  steps/s  TBT p50   TBT p99
prefill-0        2  30/100        1        -        -         -
decode-0         2  30/100        1       99   9.9 ms  1,234 ms

  request       phase     prompt  out    TTFT  TBT p99     total  stalls
  00010000000~  queued        30    5       -        -    5.5 ms       -
> 00020000000~  answered      30    5  400 ms    12 ms  1,000 ms       3
  00030000000~  failed    123456    5  400 ms    12 ms    61.2 s       0

q quit · up/down choose · enter waterfall · s sort: newest · p pause"""

AT_40 = """\
worker     running  blocks  steps/s
prefill-0        2  30/100        -
decode-0         2  30/100       99

  request       phase        total
  00010000000~  queued      5.5 ms
> 00020000000~  answered  1,000 ms
  00030000000~  failed      61.2 s

q quit · up/down choose · enter
  waterfall · s sort: newest · p pause"""

OPEN_AT_80 = """\
req-0002000000000000 · tiny · answered · trace 00000000000000000000000000000002
prefill-0 > decode-0 · 30 prompt tokens (8 cached), 5 generated
TTFT 400 ms · TBT p50 10 ms, p99 12 ms, longest 100 ms · 1,000 ms in all

router queue         100 ms |#####                                             |
prefill              300 ms |     ###############                              |
transfer exposed      50 ms |                    ##                            |
first step            50 ms |                      ##                          |
later tokens         500 ms |                         #####!!!!!###############|

stalls (the longest 1 of 3), marked !:
    100 ms until 0.7 s after the arrival: computing prompt tokens for request
    req-00000000000000b2, 80 ms (1024 tokens); the network, 10 ms; usual 10 ms

q quit · up/down next · esc back · p pause"""


def shown(view: View = CHOSEN, width: int = 80, height: int | None = None, snapshot: Snapshot = SNAPSHOT) -> str:
    return "\n".join(screen_of(WatchFrame(snapshot, "", is_current=True), view, width, height).lines)


def test_screen_at_80_columns() -> None:
    assert shown() == AT_80


def test_screen_at_40_columns_has_fewer_columns() -> None:
    assert shown(width=40).endswith("\n\n" + AT_40)


def test_screen_wide_shows_stalls_and_workers() -> None:
    assert "100 ms: prompt tokens" in shown(width=120)
    assert "prefill-0 > decode-0" not in shown(width=120)
    wide = shown(width=160)
    assert "100 ms: prompt tokens" in wide and "prefill-0 > decode-0" in wide and "connected" in wide


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("is_open", [False, True])
def test_screen_lines_fit_the_terminal(width: int, is_open: bool) -> None:
    named = replace(STALLED, request_id="w" * 128, model="m" * 100)
    snapshot = replace(SNAPSHOT, requests=(named, SLOW, RUNNING))
    lines = shown(View(chosen=key_of(named), is_open=is_open), width, 24, snapshot).split("\n")
    assert max(map(len, lines)) <= width


def test_screen_open_request_is_a_waterfall() -> None:
    assert shown(replace(CHOSEN, is_open=True)) == OPEN_AT_80


def test_bars_are_consecutive_stages() -> None:
    assert [tuple(each) for each in bars(STAGES)] == [
        ("router queue", 0.0, 100.0),
        ("prefill", 100.0, 300.0),
        ("transfer exposed", 400.0, 50.0),
        ("first step", 450.0, 50.0),
        ("later tokens", 500.0, 500.0),
    ]


def test_bars_before_first_token_end_unfinished() -> None:
    waiting = replace(NO_STAGES, router_queue_ms=40.0, total_ms=100.0)
    assert [tuple(each) for each in bars(waiting)] == [("router queue", 0.0, 40.0), ("unfinished", 40.0, 60.0)]


def test_waterfall_failed_request_shows_reason_and_attempts() -> None:
    heading = " ".join(waterfall_lines(SLOW, 200)[:3])
    assert "failed: worker lost" in heading and "2 attempts" in heading


def test_waterfall_heading_shows_drafts() -> None:
    drafted = request(5, drafts=RequestDrafts(20, 12, 34.0))
    assert "Of 20 drafted tokens 12 were accepted: its answer came about 34 ms sooner" in "\n".join(
        waterfall_lines(drafted, 200)[:4]
    )


def test_screen_open_running_request_shows_its_stalls() -> None:
    listed = request(4, phase="decode")
    snapshot = replace(SNAPSHOT, requests=(listed,), opened=replace(listed, stalls=(STALL,), stall_count=1))
    text = shown(View(chosen=key_of(listed), is_open=True), snapshot=snapshot)
    assert "stalls (1), marked !:" in text and "req-00000000000000b2, 80 ms" in text


def test_screen_open_request_outlives_the_list() -> None:
    snapshot = replace(SNAPSHOT, requests=(RUNNING,), opened=STALLED)
    assert shown(replace(CHOSEN, is_open=True), snapshot=snapshot) == OPEN_AT_80


@pytest.mark.parametrize("height", [12, 16, 24])
def test_screen_low_terminal_shows_chosen_request_and_keys(height: int) -> None:
    requests = tuple(request(number) for number in range(1, 60))
    snapshot = replace(SNAPSHOT, requests=requests, status=replace(STATUS, workers=tuple(map(worker, range(30)))))
    screen = screen_of(WatchFrame(snapshot, "", is_current=True), View(chosen=key_of(requests[40])), 80, height)
    assert len(screen.lines) <= height
    assert screen.chosen is not None and screen.lines[screen.chosen].startswith("> 0029")
    assert screen.lines[-1].startswith("q quit")
    assert any("more lines" in line for line in screen.lines)


def test_screen_unbounded_shows_everything() -> None:
    requests = tuple(request(number) for number in range(1, 60))
    snapshot = replace(SNAPSHOT, requests=requests, status=replace(STATUS, workers=tuple(map(worker, range(30)))))
    lines = screen_of(WatchFrame(snapshot, "", is_current=True), View(), 80, None, has_keys=False).lines
    assert sum(line.startswith("decode-") for line in lines) == 30
    assert sum("answered" in line for line in lines) == 59
    assert not any(line.startswith("q quit") for line in lines)


def test_screen_lost_router_is_above_last_figures() -> None:
    lines = screen_of(WatchFrame(SNAPSHOT, "no answer", is_current=False), View(), 80, 24).lines
    assert lines[:2] == ["no answer", "The last figures:"]
    assert screen_of(WatchFrame(None, "no answer", is_current=False), View(), 80, 24).lines == ["no answer"]


def test_screen_without_requests_says_so() -> None:
    assert "No request yet." in shown(View(), snapshot=replace(SNAPSHOT, requests=()))


# Keys.


def after(*keys: Key, requests: tuple[RecentRequest, ...] = SNAPSHOT.requests) -> View:
    view = View()
    for key in keys:
        view = pressed(view, key, requests)
    return view


def test_pressed_up_and_down_stop_at_the_ends() -> None:
    assert after(Key.DOWN).chosen == key_of(RUNNING)
    assert after(Key.DOWN, Key.DOWN).chosen == key_of(STALLED)
    assert after(*[Key.DOWN] * 9).chosen == key_of(SLOW)
    assert after(Key.DOWN, Key.DOWN, *[Key.UP] * 9).chosen == key_of(RUNNING)
    assert after(Key.DOWN, requests=()).chosen is None


def test_screen_chosen_request_stays_chosen() -> None:
    view = after(Key.DOWN, Key.DOWN)
    snapshot = replace(SNAPSHOT, requests=(request(9), *SNAPSHOT.requests))
    screen = screen_of(WatchFrame(snapshot, "", is_current=True), view, 80, None)
    assert screen.chosen is not None and screen.lines[screen.chosen].startswith("> 0002")


def test_pressed_with_vanished_choice_takes_the_first() -> None:
    gone = View(chosen=RequestKey("gone", "gone"))
    assert pressed(gone, Key.DOWN, SNAPSHOT.requests).chosen == key_of(RUNNING)


def test_pressed_enter_opens_and_closes() -> None:
    assert after(Key.ENTER) == View(chosen=key_of(RUNNING), is_open=True), "the first, where none was chosen"
    assert after(Key.ENTER).opened_id == RUNNING.request_id
    assert after(Key.ENTER, Key.DOWN).opened_id == STALLED.request_id
    for key in (Key.ENTER, Key.BACK):
        assert after(Key.ENTER, key).opened_id == ""
    assert after(Key.ENTER, requests=()) == View()


def test_pressed_enter_without_id_uses_trace() -> None:
    refused = request(5, request_id="", phase="refused")
    assert after(Key.ENTER, requests=(refused,)).opened_id == refused.trace_id


def test_pressed_sort_cycles_largest_first() -> None:
    sorts = [after(*[Key.SORT] * count).sort for count in range(5)]
    assert sorts == [Sort.NEWEST, Sort.TTFT, Sort.TOTAL, Sort.GAP, Sort.NEWEST]
    firsts = [ordered(SNAPSHOT.requests, sort)[0] for sort in Sort]
    assert firsts == [RUNNING, STALLED, SLOW, STALLED]


def test_screen_paused_says_so() -> None:
    assert "· paused" in shown(after(Key.PAUSE)).split("\n")[0]
    assert not after(Key.PAUSE, Key.PAUSE).is_paused


# Rates.


class Router:
    """Each snapshot finds 100 more tokens of answers, and 50 more steps of each worker."""

    def __init__(self) -> None:
        self.looks = 0
        self.asked: list[str] = []

    def status(self) -> ClusterStatus:
        self.looks += 1
        load = STATUS.workers[1].load
        assert load is not None
        made = worker(0, load=replace(load, steps=50 * self.looks))
        return replace(STATUS, workers=(made,), requests=RequestTotals(1, (), 10, 100 * self.looks))

    def recent_requests(self, *, limit: int = 0, request_id: str = "") -> tuple[RecentRequest, ...]:
        self.asked.append(request_id)
        return (STALLED,)


def test_snapshots_rates_span_several_snapshots() -> None:
    router = Router()
    looks = Snapshots(router, lambda: router.looks / 2)
    taken = [looks.take() for _ in range(9)]
    assert taken[0].rates == Rates()
    for snapshot in taken[1:]:
        assert snapshot.rates == Rates(0.0, 200.0, {snapshot.status.workers[0].endpoint: 100.0})


def test_rates_between_restarts_are_unknown() -> None:
    old = Snapshot(1.0, replace(STATUS, requests=RequestTotals(9, (), 900, 900)), ())
    again = tuple(replace(each, epoch=2) for each in STATUS.workers)
    new = Snapshot(2.0, replace(STATUS, workers=again, requests=RequestTotals(1, (), 5, 5)), ())
    assert rates_between(old, new) == Rates(None, None, {})


def test_snapshots_fetch_open_request_by_name() -> None:
    router, named = Router(), ""
    looks = Snapshots(router, lambda: 0.0, lambda: named)
    assert looks.take().opened is None
    named = "mine"
    assert looks.take().opened == STALLED
    assert router.asked == ["", "", "mine"]

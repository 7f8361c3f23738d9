"""The chaos report, its pictures, and when a run counts as good."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from baton.lab.chaos.campaign import Unmade
from baton.lab.chaos.checker import Finding, FindingKind, Injected
from baton.lab.chaos.faults import Fault, FaultKind
from baton.lab.chaos.history import Behaviour, ObservedAttempt, StreamEnd, StreamHistory, StreamPiece
from baton.lab.chaos.report import markdown, summary, write
from baton.lab.chaos.run import ChaosOptions, ChaosOutcome
from baton.lab.chaos.watch import Look, growth


def outcome() -> ChaosOutcome:
    pieces = [StreamPiece(101.0 + at, 0, at, (7,), "x") for at in range(3)] + [StreamPiece(106.0, 0, 3, (8,), "y")]
    attempts = [ObservedAttempt("prefill-0", "decode-0", "WORKER_LOST"), ObservedAttempt("prefill-0", "decode-1", "")]
    stream = StreamHistory(
        0, "greedy 0", Behaviour.READS, "chaos-0", 100.5, 1, pieces, [StreamEnd(106.0, 0, "length")], 106.1
    )
    stream.attempts = attempts
    killed = Injected(Fault(FaultKind.KILL, "decode-0"), 103.2, 104.0, "pid 5 is gone")
    looks = life(range(120))
    return ChaosOutcome(
        ChaosOptions(1.0, 7, 2, ()), 100.0, 107.0, {}, [killed], [stream], [], looks, pages_free_after_s=0.2
    )


def test_report_has_its_figures_and_pictures(tmp_path: Path) -> None:
    write(outcome(), tmp_path)
    result = json.loads((tmp_path / "report.json").read_text())
    assert (result["verdict"]["held"], result["verdict"]["missed"]) == (1, 0)
    (report,) = result["rounds"]
    assert report["good"]
    assert (report["streams"], report["faults"], report["streams_of_several_attempts"]) == (1, 1, 1)
    assert report["gaps_s"]["killed"]["p50"] == 3.0
    assert "| 0 | 0 | 0 | 0 | 0 | 0 | 0 |" in (tmp_path / "report.md").read_text()
    for name in ("gaps", "memory"):
        ElementTree.parse(tmp_path / f"{name}.svg")
    assert json.loads((tmp_path / "streams.jsonl").read_text())["longest_pause_s"] == 3.0


def test_broken_stream_is_listed_with_its_time_and_its_workers() -> None:
    run = replace(outcome(), findings=[Finding(0, FindingKind.WRONG_TOKEN, 0, 3, "8 in place of 7")])
    attempts = "prefill-0 > decode-0 WORKER_LOST; prefill-0 > decode-1"
    wanted = f"| 0 | wrong token | 0 | 3 | 8 in place of 7 | greedy 0, 0.5 to 6.1 s, {attempts} |"
    assert wanted in markdown(summary(run)).splitlines()


def test_broken_answer_after_the_faults_is_no_stream_of_before() -> None:
    run = replace(outcome(), after=[Finding(0, FindingKind.WRONG_TOKEN, 0, 3, "8 in place of 7")])
    wanted = "| 0 | wrong token | 0 | 3 | 8 in place of 7 | after the faults, undisturbed |"
    assert wanted in markdown(summary(run)).splitlines()


@pytest.mark.parametrize(
    "changes",
    [
        {"histories": []},
        {"injected": []},
        {"injected": [Injected(Fault(FaultKind.KILL, "decode-0"), 1.0, 2.0, None, "still there")]},
        {"findings": [Finding(0, FindingKind.LOST, 0, 3, "")]},
        {"after": [Finding(0, FindingKind.WRONG_TOKEN, 0, 3, "")]},
        {"pages_free_after_s": None},
        {"pages_free_after_s": 1.5},
        {"left_in_shared_memory": ("x",)},
        {"left_processes": (9,)},
        {"crashes": ["decode-0 ended with exit code 1; restarting it in 0.2 s"]},
        {"unmade": [Unmade(Fault(FaultKind.CUT, "decode-0"), 1.0, "")] * 4},
        {
            "injected": [
                Injected(Fault(FaultKind.KILL, "decode-0"), 1.0, 2.0, "gone", "after 60 s: decode-0 is not there")
            ]
        },
        {"missing": "decode-0 not running"},
        {"options": ChaosOptions(1.0, 7, 2, (), wanted=2)},
        {"options": ChaosOptions(1.0, 7, 2, (), speculate="ngram")},
        {"options": ChaosOptions(1.0, 7, 2, (), tier=True)},
    ],
)
def test_run_where_anything_broke_is_not_good(changes: dict[str, object]) -> None:
    assert not replace(outcome(), **changes).is_good  # type: ignore[arg-type]


def test_single_unproven_fault_is_listed_and_fails_nothing() -> None:
    unproven = Injected(Fault(FaultKind.KILL, "decode-0"), 1.0, 2.0, None, "not seen within 90 s")
    run = outcome()
    run.injected.append(unproven)
    assert run.is_good
    text = markdown(summary(run))
    assert "(1 more were not proven)" in text
    assert "- kill -9 decode-0: not seen within 90 s" in text


def test_drafts_of_a_run_that_speculates_are_counted() -> None:
    speculating = replace(outcome(), options=ChaosOptions(1.0, 7, 2, (), speculate="ngram"))
    speculating.histories[0].drafted_tokens, speculating.histories[0].accepted_tokens = 9, 4
    assert speculating.is_good
    assert "`--speculate ngram`: 4 of 9 drafted tokens were accepted" in markdown(summary(speculating))
    assert "--speculate" not in markdown(summary(outcome()))


def test_close_place_is_reported_and_breaks_nothing() -> None:
    close = replace(outcome(), findings=[Finding(0, FindingKind.CLOSE, 0, 3, "")])
    assert close.is_good
    assert summary(close)["findings"]["close"] == 1


def test_growth_is_of_lives_that_lasted_and_after_their_warm_up() -> None:
    warming = [80 * 2**20 if at < 30 else 160 * 2**20 for at in range(120)]
    [grown] = growth(life(range(120), warming))
    assert (grown.grown_bytes, grown.seconds) == (0, 89)
    assert grown.is_flat
    assert growth(life(range(80))) == []


@pytest.mark.parametrize(
    ("mib_per_minute", "descriptors", "flat"), [(0.5, 0, True), (6, 0, True), (12, 0, False), (0, 0.5, False)]
)
def test_growth_with_time_is_not_flat(mib_per_minute: float, descriptors: float, flat: bool) -> None:
    private = [round(2**27 + mib_per_minute * 2**20 * at / 60) for at in range(150)]
    [grown] = growth(life(range(150), private, descriptors))
    assert grown.per_minute == pytest.approx(mib_per_minute * 2**20, rel=0.05, abs=1)
    assert grown.is_flat is flat
    assert replace(outcome(), looks=life(range(150), private, descriptors)).is_good is flat


def test_routers_records_fill_while_it_lives() -> None:
    private = [round(2**27 + 10 * 2**20 * at / 60) for at in range(150)]
    router = [replace(look, name="router-0") for look in life(range(150), private)]
    assert [grown.is_flat for grown in growth(router)] == [True]
    assert [grown.is_flat for grown in growth(life(range(150), private))] == [False]


def life(times: range, private: Sequence[int] = (), descriptors: float = 0) -> list[Look]:
    """`descriptors`: more, by second."""
    return [
        Look(100.0 + at, "decode-1", 6, 2**28, 30 + int(descriptors * at), 8, private[at] if private else 2**27)
        for at in times
    ]


def test_report_of_a_run_with_files_counts_restored_blocks() -> None:
    with_files = replace(outcome(), options=ChaosOptions(1.0, 7, 2, (), tier=True))
    assert "NO block was read from files" in markdown(summary(with_files))
    told = Counter({"hits": 40, "queries": 90, "corrupt_blocks": 3, "evicted_blocks": 7})
    read = replace(with_files, tier=told, tier_off=Counter({"writes": 2}))
    assert read.is_good
    assert "40 of 90 prompt blocks that pools lacked were loaded from files" in markdown(summary(read))
    assert "turned reads off 0 times and writes 2 times" in markdown(summary(read))
    assert "KV files" not in markdown(summary(outcome()))

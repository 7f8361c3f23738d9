"""The checker finds every kind of violation in a history, and none in a correct one."""

from dataclasses import replace

import pytest

from baton.lab.chaos.checker import ExpectedChoice, Finding, FindingKind, check
from baton.lab.chaos.history import Behaviour, StreamEnd, StreamHistory, StreamPiece

TOKENS, TEXT = (5, 6, 7, 8), "abcd"
EXPECTED = (ExpectedChoice(TOKENS, TEXT, "length", None, (-0.1, -0.2, -0.3, -0.4), frozenset({2})),)
BOUND_S = 10.0


def piece(offset: int, count: int = 1, **changes: object) -> StreamPiece:
    """Make a correct piece of an answer, with changes."""
    end = offset + count
    logprobs = EXPECTED[0].logprobs[offset:end]
    good = StreamPiece(1.0 + offset, 0, offset, TOKENS[offset:end], TEXT[offset:end], logprobs)
    return replace(good, **changes)  # type: ignore[arg-type]


def history(
    *pieces: StreamPiece, ends: tuple[StreamEnd, ...] = (StreamEnd(9.0, 0, "length"),), **changes: object
) -> StreamHistory:
    whole = StreamHistory(3, "greedy 0", Behaviour.READS, "id", 0.0, 1, list(pieces), list(ends), 9.5)
    return replace(whole, **changes)  # type: ignore[arg-type]


GOOD = (piece(0), piece(1, 2), piece(3))


def kinds(given: StreamHistory, expected: tuple[ExpectedChoice, ...] = EXPECTED) -> list[FindingKind]:
    return [finding.kind for finding in check(given, expected, BOUND_S)]


def test_good_history_has_no_findings() -> None:
    assert kinds(history(*GOOD)) == []


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (history(piece(0), piece(2, 2)), FindingKind.LOST),
        (history(piece(0), piece(1), ends=(StreamEnd(9.0, 0, "length"),)), FindingKind.LOST),
        (history(piece(0), piece(1, 2), piece(2), piece(3)), FindingKind.REPEATED),
        (history(piece(0), piece(2), piece(1), piece(3)), FindingKind.REORDERED),
        (history(piece(0), piece(1, token_ids=(9,)), piece(2, 2)), FindingKind.WRONG_TOKEN),
        (history(*GOOD, StreamPiece(8.0, 0, 4, (1,), "", (0.0,))), FindingKind.WRONG_TOKEN),
        (history(piece(0), piece(1, 2, text="bX"), piece(3)), FindingKind.WRONG_TEXT),
        (history(piece(0), piece(1, 2), piece(3, text="")), FindingKind.WRONG_TEXT),
        (history(piece(0), piece(1, 2, logprobs=(-0.2, -0.3002)), piece(3)), FindingKind.WRONG_LOGPROB),
        (history(piece(0, logprobs=()), piece(1, 2), piece(3)), FindingKind.WRONG_LOGPROB),
        (history(*GOOD, ends=(StreamEnd(9.0, 0, "stop", "c"),)), FindingKind.WRONG_END),
        (history(*GOOD, starts=2), FindingKind.WRONG_END),
        (history(*GOOD, ends=(StreamEnd(9.0, 0, "length"), StreamEnd(9.1, 0, "length"))), FindingKind.TWO_ENDS),
        (history(*GOOD, ends=(StreamEnd(3.5, 0, "length"),)), FindingKind.TWO_ENDS),
        (history(*GOOD, ends=()), FindingKind.NO_END),
        (history(*GOOD, closed_s=None), FindingKind.HANG),
        (history(*GOOD, closed_s=10.5), FindingKind.HANG),
        (history(piece(0), ends=(), failure="UNAVAILABLE WORKER_LOST"), FindingKind.FAILED),
        (history(*GOOD, piece(0, choice=1)), FindingKind.WRONG_TOKEN),
    ],
)
def test_planted_fault_is_found_by_kind(planted: StreamHistory, found: FindingKind) -> None:
    assert kinds(planted) == [found]


def test_token_in_a_close_place_is_counted_apart_and_ends_the_comparison() -> None:
    other = history(piece(0), piece(1), piece(2, token_ids=(9,)), piece(3, token_ids=(11,)))
    assert check(other, EXPECTED, BOUND_S) == [Finding(3, FindingKind.CLOSE, 0, 2, "token 9 instead of 7")]


def test_tokens_before_a_failure_are_checked() -> None:
    assert kinds(history(piece(0), piece(2), ends=(), failure="UNAVAILABLE")) == [FindingKind.FAILED, FindingKind.LOST]


def test_stream_abandoned_by_its_client_is_judged_up_to_its_end() -> None:
    given_up = history(piece(0), piece(1), ends=(), behaviour=Behaviour.CANCELS, failure="CANCELLED")
    assert kinds(given_up) == []
    assert kinds(replace(given_up, pieces=[piece(0), piece(1, token_ids=(9,))])) == [FindingKind.WRONG_TOKEN]


def test_each_choice_is_judged_by_its_own_answer() -> None:
    other = ExpectedChoice((1, 2), "xy", "length")
    second = [StreamPiece(2.0, 1, 0, (1, 2), "xy")]
    both = history(*GOOD, ends=(StreamEnd(9.0, 0, "length"), StreamEnd(9.0, 1, "length")))
    both.pieces += second
    assert kinds(both, (*EXPECTED, other)) == []
    both.pieces[-1] = replace(second[0], token_ids=(1, 3))
    assert [(each.kind, each.choice) for each in check(both, (*EXPECTED, other), BOUND_S)] == [
        (FindingKind.WRONG_TOKEN, 1)
    ]

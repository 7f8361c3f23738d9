"""The specification of the hand-over, explored exhaustively, and mutants of its participants, which are refused."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from baton.lab.protocol import cluster, participants
from baton.lab.protocol.cluster import ClusterStates, Explored
from baton.lab.protocol.explorer import RequestGraph, Spent, Violated
from baton.lab.protocol.merged import Numbers
from baton.lab.protocol.participants import ClusterSize, MoveKind, Step
from baton.lab.protocol.state import AnswerPhase, CopyPhase, SpecAttempt, SpecRequest

ONE_OF_EACH = ClusterSize(routers=1, prefill=1, decode=1, deaths=1)
SMALL = ClusterSize(deaths=1, blocks=1)


def explore(shape: ClusterSize) -> Explored:
    return ClusterStates(RequestGraph(shape)).explore()


explored_once = cache(explore)
"""For tests that change nothing of the participants."""


def test_two_of_each_process_with_one_death_answer_both_requests() -> None:
    explored = explored_once(SMALL)
    assert set(explored.ends) == {"answered and answered", "answered and left", "left and left"}
    assert explored.states > 20_000


def test_two_of_each_process_two_blocks_and_two_deaths_answer_both_requests() -> None:
    explored = explored_once(ClusterSize())
    assert set(explored.ends) == {"answered and answered", "answered and left", "left and left"}
    assert explored.request_states > 50_000 and explored.most_attempts == 5


@pytest.mark.parametrize(
    "shape",
    [replace(ONE_OF_EACH, deaths=2), replace(ONE_OF_EACH, blocks=1, deaths=0, mishaps=1), SMALL],
    ids=["deaths", "mishaps", "two of each"],
)
def test_equivalent_states_merged_leave_ends_attempts_and_longest_run(
    monkeypatch: pytest.MonkeyPatch, shape: ClusterSize
) -> None:
    merged = explored_once(shape)
    monkeypatch.setattr(cluster, "representatives", every_state)
    all_states = explore(shape)
    assert merged.ends.keys() == all_states.ends.keys() and merged.states < all_states.states
    assert (merged.most_attempts, merged.longest_run) == (all_states.most_attempts, all_states.longest_run)


def every_state(graph: RequestGraph, faults: Sequence[Spent]) -> Numbers:
    return np.tile(np.arange(len(graph)), (len(faults), 1))


def test_two_deaths_cost_fewer_attempts_than_routers_make() -> None:
    assert explored_once(replace(ONE_OF_EACH, deaths=2, blocks=1)).most_attempts == 5


def test_two_blocks_and_three_tokens_answer_both_requests() -> None:
    assert "answered and answered" in explored_once(replace(ONE_OF_EACH, tokens=3)).ends


def test_copies_are_torn_and_no_answer_starts_from_one() -> None:
    attempts = [attempt for request in RequestGraph(ONE_OF_EACH).states for attempt in request.attempts]
    assert any(attempt.copy is CopyPhase.TORN for attempt in attempts)
    assert any(attempt.sound < attempt.landed for attempt in attempts)
    valid = [attempt for attempt in attempts if attempt.answer is AnswerPhase.VALID]
    assert valid and all(attempt.sound == attempt.landed for attempt in valid)


def confirms_early(attempt: SpecAttempt, shape: ClusterSize) -> bool:
    return attempt.first and attempt.copy is not CopyPhase.NONE


def offered_blocks(attempt: SpecAttempt) -> int:
    return attempt.offered


def first_tokens(request: SpecRequest, stream: int) -> int:
    return 0


def adopts_anything(old: SpecAttempt) -> bool:
    return True


def never(attempt: SpecAttempt) -> bool:
    return False


def always(attempt: SpecAttempt) -> bool:
    return attempt.offered > 0


@pytest.mark.parametrize(
    "rule, mutant, refusal",
    [
        ("may_confirm", confirms_early, "the copy is confirmed while it runs"),
        ("frees_unread", always, "pinned blocks are released"),
        ("can_adopt", adopts_anything, "an answer is adopted that ended, or that another attempt has"),
        ("kept_blocks", offered_blocks, "blocks are kept that the source has not confirmed"),
        ("waits_for_copy", never, "blocks are released while a copy into them runs"),
        ("carried_tokens", first_tokens, "the prompt does not end at the last released token"),
    ],
)
def test_mutant_of_a_participant_is_refused(
    monkeypatch: pytest.MonkeyPatch, rule: str, mutant: object, refusal: str
) -> None:
    monkeypatch.setattr(participants, rule, mutant)
    with pytest.raises(Violated, match=refusal):
        explore(ONE_OF_EACH)


def test_blocks_that_no_cancel_and_no_lease_releases_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = participants._of_ends

    def without_leases(index: int, attempt: SpecAttempt) -> Iterator[Step]:
        for name, kind, change in real(index, attempt):
            if kind is not MoveKind.STEP or not name.startswith(("prefill drops", "the lease")):
                yield name, kind, change

    monkeypatch.setattr(participants, "_of_ends", without_leases)
    with pytest.raises(Violated, match="a run stops although a request has not ended"):
        explore(ONE_OF_EACH)

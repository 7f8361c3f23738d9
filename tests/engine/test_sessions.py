"""When the next turn of a session is expected, and whose blocks are protected until then."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.kv_cache.sessions import (
    DOUBLE_COST_BLOCKS,
    INITIAL_PATIENCE_S,
    INITIAL_PAUSE_S,
    MIN_PAUSE_S,
    MIN_PAUSES,
    PAUSE_EWMA_WEIGHT,
    Pauses,
    RetentionState,
    Session,
    SessionRetention,
    Sessions,
    SessionTurn,
)


class Book:
    """Sessions of a pool of 100 blocks, and what was told of keeps that ended."""

    def __init__(self, blocks: int = 100, most: int = 16) -> None:
        self.ended: list[SessionRetention] = []
        self.sessions = Sessions(blocks, self.ended.append, most)

    def turn(
        self,
        name: str,
        at_s: float,
        blocks: int | None = 10,
        owner: str = "ann",
        keep_for_s: float | None = None,
        done: bool = False,
    ) -> Session:
        """Comes and ends at once."""
        asked = SessionTurn(name.encode(), owner.encode(), at_s, keep_for_s, done)
        session = self.sessions.begin(asked)
        self.sessions.end(session, asked, blocks)
        self.sessions.check()
        return session


def standing(session: Session) -> RetentionState:
    assert session.keep is not None
    return session.keep.state


def test_session_is_protected_while_its_return_is_likely() -> None:
    book = Book()
    session = book.turn("a", 0.0)
    book.sessions.advance(INITIAL_PATIENCE_S - 1)
    assert standing(session) is RetentionState.PROTECTED
    book.sessions.advance(INITIAL_PATIENCE_S)
    assert standing(session) is RetentionState.OTHER
    assert book.ended == [session.keep]


def test_session_is_protected_as_long_as_the_client_says() -> None:
    book = Book()
    short, long = book.turn("a", 0.0, keep_for_s=2.0), book.turn("b", 0.0, keep_for_s=86_400.0)
    book.sessions.advance(2.0)
    assert (standing(short), standing(long)) == (RetentionState.OTHER, RetentionState.PROTECTED)
    book.sessions.advance(86_399.0)
    assert standing(long) is RetentionState.PROTECTED
    book.sessions.advance(86_400.0)
    assert standing(long) is RetentionState.OTHER


def test_session_kept_for_no_time_is_not_protected() -> None:
    assert standing(Book().turn("a", 0.0, keep_for_s=0.0)) is RetentionState.OTHER


def test_after_the_last_turn_the_blocks_of_all_turns_go_first() -> None:
    book = Book()
    session = book.turn("a", 0.0)
    kept = session.keep
    book.turn("a", 1.0, done=True)
    assert kept is not None and kept.state is RetentionState.DONE
    assert standing(book.turn("new", 2.0, done=True)) is RetentionState.DONE


def test_turn_after_the_last_one_is_a_new_beginning() -> None:
    book = Book()
    book.turn("a", 0.0, done=True)
    assert standing(book.turn("a", 1.0)) is RetentionState.PROTECTED


def test_nothing_lapses_while_a_turn_runs() -> None:
    book = Book()
    session = book.turn("a", 0.0, keep_for_s=5.0)
    book.sessions.begin(SessionTurn(b"a", b"ann", 4.0))
    book.sessions.advance(1e6)
    assert standing(session) is RetentionState.PROTECTED


def test_next_pause_is_expected_like_earlier_ones() -> None:
    book = Book()
    session = book.turn("a", 0.0)
    assert book.sessions.expected_s(session) == INITIAL_PAUSE_S
    for number in range(1, 30):
        book.turn("a", number * 20.0)
    assert book.sessions.expected_s(session) == pytest.approx(20.0)
    other = book.turn("b", 600.0)  # which has paused never yet: as all others
    assert 16.0 <= book.sessions.expected_s(other) <= 32.0
    assert book.sessions.patience_s(20.0) == 80.0


def test_repeated_attempt_of_a_turn_is_no_pause() -> None:
    book = Book()
    book.turn("a", 0.0)
    session = book.turn("a", 0.01)
    assert session.pauses == 0 and book.sessions.pauses.observed == 0


def test_turn_retried_until_admission_has_paused_once() -> None:
    book = Book()
    book.turn("a", 0.0)
    for at_s in (5.0, 6.0, 7.0):
        session = book.sessions.begin(SessionTurn(b"a", b"ann", at_s))
    assert (session.pauses, session.usual_pause_s) == (1, 5.0)


def test_overdue_session_is_expected_the_later_the_longer_it_is_away() -> None:
    book = Book(1000)
    overdue = book.turn("a", 0.0, keep_for_s=1000.0)
    book.sessions.advance(100.0)
    fresh = book.turn("b", 100.0, keep_for_s=1000.0)
    assert overdue.keep is not None and fresh.keep is not None
    assert overdue.keep.due_s > fresh.keep.due_s
    assert book.sessions.farthest.first() is overdue.keep


def test_owner_has_at_most_half_of_the_pool_protected_soonest_first() -> None:
    book = Book()
    # Each with a pause of its own; all have the last of their four turns at the same time.
    turns = sorted((200.0 - left * 2.0**number, number) for left in range(4) for number in range(6))
    for at_s, number in turns:
        book.turn(str(number), at_s, keep_for_s=3600.0)
    sessions = [book.turn(str(number), 200.0, keep_for_s=3600.0) for number in range(6)]
    protected = [number for number, session in enumerate(sessions) if standing(session) is RetentionState.PROTECTED]
    assert protected == [0, 1, 2, 3, 4]


def test_session_larger_than_its_owners_share_is_not_protected() -> None:
    book = Book()
    assert standing(book.turn("a", 0.0, blocks=50)) is RetentionState.PROTECTED
    assert standing(book.turn("a", 1.0, blocks=51)) is RetentionState.OTHER


def test_protected_blocks_are_shared_among_owners() -> None:
    book = Book()
    ann = [book.turn(f"ann{number}", 0.0) for number in range(5)]
    assert sum(standing(session) is RetentionState.PROTECTED for session in ann) == 5
    bob = [book.turn(f"bob{number}", 1.0, owner="bob") for number in range(5)]
    assert sum(standing(session) is RetentionState.PROTECTED for session in ann) == 3  # a third of the pool
    assert sum(standing(session) is RetentionState.PROTECTED for session in bob) == 3


def test_records_are_bounded_and_the_longest_unused_goes() -> None:
    book = Book(most=3)
    first = book.turn("a", 0.0, blocks=1)
    for number in range(3):
        book.turn(str(number), 1.0, blocks=1)
    assert book.sessions.known == 3
    assert standing(first) is RetentionState.OTHER


def test_deep_blocks_are_dear_to_compute_and_not_to_load() -> None:
    sessions = Book().sessions
    assert sessions.price(DOUBLE_COST_BLOCKS) == 2 * sessions.price(0)
    sessions.file_price = 0.1
    assert sessions.price(DOUBLE_COST_BLOCKS) == sessions.price(0) == 0.1


def test_costlier_of_two_equal_sessions_is_kept() -> None:
    book = Book(100_000)
    small, large = book.turn("a", 0.0, blocks=10), book.turn("b", 0.0, blocks=8192)
    assert book.sessions.farthest.first() is small.keep
    book.sessions.file_price = 0.1
    book.turn("b", 1.0, blocks=8192)
    book.turn("a", 2.0, blocks=10)
    assert book.sessions.farthest.first() is small.keep is not large.keep


@given(st.lists(st.floats(0.05, 1e6), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_quantile_is_an_upper_bound_within_a_power_of_two(pauses: list[float], share: float) -> None:
    histogram = Pauses()
    for pause_s in pauses:
        histogram.observe(pause_s)
    quantile_s = histogram.quantile_s(share)
    least, most = 2.0**Pauses.FIRST, 2.0 ** (Pauses.FIRST + Pauses.BUCKETS)
    assert min(max(min(pauses), least), most) <= quantile_s <= max(2.0 * max(pauses), 2 * least)
    assert histogram.quantile_s(1.0) * 2.0 >= min(max(pauses), most)


def test_few_pauses_say_nothing_of_how_long_to_wait() -> None:
    book = Book()
    for number in range(MIN_PAUSES):
        book.turn("a", number * 1.0)
    assert book.sessions.patience_s(1.0) == INITIAL_PATIENCE_S
    book.turn("a", MIN_PAUSES * 1.0)
    assert book.sessions.patience_s(1.0) == 4.0


def ended(book: Book, name: str, at_s: float, names: list[bytes]) -> Session:
    asked = SessionTurn(name.encode(), b"ann", at_s)
    session = book.sessions.begin(asked)
    book.sessions.end(session, asked, len(names), names)
    book.sessions.check()
    return session


def test_sessions_are_due_once_for_each_turn_the_soonest_first() -> None:
    book = Book()
    book.sessions.file_price = 0.5
    ended(book, "a", 1.0, [b"a0", b"a1"])
    ended(book, "b", 0.0, [b"b0"])
    assert book.sessions.due(INITIAL_PAUSE_S - 0.1, most=8) == []
    assert [each.session_id for each in book.sessions.due(60.0, most=8)] == [b"a", b"b"]
    assert book.sessions.due(60.0, most=8) == []
    ended(book, "a", 2.0, [b"a0", b"a1", b"a2"])
    [due] = book.sessions.due(60.0, most=8)
    assert due.names == (b"a0", b"a1", b"a2")


def test_running_and_finished_sessions_are_not_due() -> None:
    book = Book()
    book.sessions.file_price = 0.5
    ended(book, "a", 0.0, [b"a0"])
    book.sessions.begin(SessionTurn(b"a", b"ann", 1.0))
    ended(book, "b", 0.0, [b"b0"])
    book.turn("b", 1.0, done=True)
    assert book.sessions.due(60.0, most=8) == []


def test_names_are_remembered_of_four_pools_and_the_newest() -> None:
    book = Book(blocks=4)
    for number in range(6):
        ended(book, str(number), float(number), [bytes([number, place]) for place in range(4)])
    book.sessions.file_price = 0.5
    assert list(book.sessions._names) == [b"2", b"3", b"4", b"5"]


def test_transferable_sessions_are_protected_between_turns_and_soonest_first() -> None:
    book = Book()
    ended(book, "late", 10.0, [b"l0"])
    ended(book, "runs", 10.0, [b"r0"])
    ended(book, "none", 10.0, [])
    book.turn("done", 10.0, done=True)
    early = ended(book, "soon", 10.0, [b"s0", b"s1"])
    assert early.keep is not None
    early.keep.due_s = 11.0
    book.sessions.begin(SessionTurn(b"runs", b"ann", 11.0))
    kept = book.sessions.kept()
    assert [(each.session_id, each.names) for each in kept] == [(b"soon", (b"s0", b"s1")), (b"late", (b"l0",))]
    assert kept[0].left_s == INITIAL_PATIENCE_S - 1.0


TURNS = st.tuples(
    st.integers(0, 5),  # session
    st.floats(0.0, 400.0),  # until it comes
    st.one_of(st.none(), st.integers(0, 70)),  # blocks
    st.sampled_from([None, 0.0, 1.0, 500.0]),
    st.booleans(),
)


@settings(max_examples=150)
@given(st.lists(TURNS, max_size=30))
def test_bounds_and_sums_hold_for_any_turns(turns: list[tuple[int, float, int | None, float | None, bool]]) -> None:
    book, now = Book(most=4), 0.0
    for number, pause_s, blocks, keep_for_s, done in turns:
        now += pause_s
        book.turn(str(number), now, blocks, f"owner{number % 3}", keep_for_s, done)
    book.sessions.advance(now + 10_000.0)
    book.sessions.check()
    assert all(keep.state is not RetentionState.PROTECTED for keep in book.ended)
    assert len(set(book.ended)) == len(book.ended)
    assert math.isfinite(now) and not book.sessions.farthest.keeps  # all of them have lapsed


def test_usual_pause_is_the_geometric_mean_that_follows_the_newest_slowly() -> None:
    book = Book()
    for at_s in (0.0, 1.0, 9.0):
        session = book.turn("a", at_s)
    assert session.usual_pause_s == pytest.approx(8.0**PAUSE_EWMA_WEIGHT)
    assert book.sessions.expected_s(session) == session.usual_pause_s, "two pauses of its own are enough"
    once = book.turn("b", 9.0)
    book.turn("b", 9.0 + MIN_PAUSE_S)
    assert once.pauses == 1, "the shortest that is one"
    assert book.sessions.expected_s(once) == book.sessions.pauses.quantile_s(0.5)


def test_quantile_is_the_upper_end_of_its_power_of_two() -> None:
    histogram = Pauses()
    assert histogram.quantile_s(0.5) == 0.0
    for pause_s in (1.0, 1.9, 2.0, 70.0):
        histogram.observe(pause_s)
    assert [histogram.quantile_s(share) for share in (0.2, 0.49, 0.7, 0.9, 1.0)] == [2.0, 2.0, 4.0, 128.0, 128.0]
    histogram.observe(0.0)
    histogram.observe(1e9)
    assert histogram.quantile_s(0.01) == 2.0 ** (Pauses.FIRST + 1)
    assert histogram.quantile_s(1.0) == 2.0 ** (Pauses.FIRST + Pauses.BUCKETS)


def test_old_pauses_count_less_than_new_ones() -> None:
    histogram = Pauses()
    for pause_s in [1.0] * 1000 + [10.0] * 1000:
        histogram.observe(pause_s)
    assert histogram.quantile_s(0.3) == 16.0, "the newer half counts for 73 %"


def test_reused_session_is_not_the_forgotten_one() -> None:
    book = Book(most=2)
    first, second = book.turn("a", 0.0, blocks=1), book.turn("b", 1.0, blocks=1)
    book.turn("a", 2.0, blocks=1)
    book.turn("c", 3.0, blocks=1)
    assert (standing(first), standing(second)) == (RetentionState.PROTECTED, RetentionState.OTHER)


def test_overdue_session_is_expected_after_twice_its_absence() -> None:
    book = Book()
    session = book.turn("a", 0.0, keep_for_s=100.0)
    keep = session.keep
    assert keep is not None
    assert (keep.wake_s, keep.lapse_s) == (INITIAL_PAUSE_S, 100.0)
    book.sessions.advance(INITIAL_PAUSE_S)
    assert keep.wake_s == 2 * INITIAL_PAUSE_S
    book.sessions.advance(60.0)
    assert keep.wake_s == 100.0, "until it is not waited for any longer"
    price = book.sessions.price(10)
    assert keep.due_s == pytest.approx(60.0 + (120.0 - 60.0) / price)


def test_client_that_says_how_long_is_expected_by_then() -> None:
    assert Book().turn("a", 1.0, keep_for_s=2.0).due_s == 3.0
    assert Book().turn("a", 1.0, keep_for_s=60.0).due_s == 1.0 + INITIAL_PAUSE_S


def test_due_sessions_are_returned_up_to_a_number_and_time() -> None:
    book = Book()
    book.sessions.file_price = 0.5
    for number in range(4):
        ended(book, str(number), float(number), [bytes([number])])

    def due(until_s: float, most: int) -> list[bytes]:
        return [each.session_id for each in book.sessions.due(until_s, most)]

    assert due(3.0 + INITIAL_PAUSE_S, most=2) == [b"0", b"1"]
    assert due(1.9 + INITIAL_PAUSE_S, most=2) == []
    assert due(2.0 + INITIAL_PAUSE_S, most=2) == [b"2"]


def test_received_session_is_kept_as_after_its_turn() -> None:
    book = Book()
    keep = book.sessions.take_over(SessionTurn(b"a", b"ann", 1.0), [b"x", b"y"])
    assert keep is not None and (keep.blocks, keep.ended_s, keep.state) == (2, 1.0, RetentionState.PROTECTED)
    again = book.sessions.begin(SessionTurn(b"a", b"ann", 3.0))
    assert book.sessions.take_over(SessionTurn(b"a", b"ann", 4.0), [b"z"]) is keep
    assert (keep.blocks, again.pauses) == (2, 1), "its next turn has come: nothing changes"
    book.sessions.end(again, SessionTurn(b"a", b"ann", 3.0), 3)
    book.sessions.take_over(SessionTurn(b"a", b"ann", 90.0), [b"z"])
    assert again.pauses == 1, "the turn that ended elsewhere tells of no pause"


def test_turn_without_blocks_keeps_those_of_the_turn_before() -> None:
    book = Book()
    session = book.turn("a", 0.0, blocks=7)
    book.turn("a", 1.0, blocks=None)
    assert session.keep is not None and (session.keep.blocks, session.keep.ended_s) == (7, 1.0)

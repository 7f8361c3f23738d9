"""Routers that want more than their share take turns."""

from baton.worker.decode.credits import TURN_S, Charge, Lending, Loan

BIG, SMALL, NOTHING = Charge(80, 2), Charge(40, 1), Charge(0, 0)
BOTH = ("a", "b")


def test_nothing_is_lent_where_nobody_wants_anything() -> None:
    assert Lending[str]().loan(BOTH, 0.0) is None


def test_who_asked_first_has_the_first_turn_until_it_wants_no_more() -> None:
    lending = Lending[str]()
    lending.ask("b", BIG)
    lending.ask("a", SMALL)
    assert lending.loan(BOTH, 0.0) == Loan("b", BIG)
    lending.ask("b", SMALL)
    assert lending.loan(BOTH, 1.0) == Loan("b", SMALL)
    lending.ask("b", NOTHING)
    assert lending.loan(BOTH, 2.0) == Loan("a", SMALL)


def test_a_request_that_is_not_placed_gives_the_others_their_time() -> None:
    lending = Lending[str]()
    lending.ask("a", BIG)
    assert lending.loan(BOTH, 0.0) == Loan("a", BIG)
    assert lending.loan(BOTH, TURN_S) is None
    lending.ask("a", BIG)
    lending.ask("b", SMALL)
    assert lending.loan(BOTH, 1.5 * TURN_S) is None
    assert lending.loan(BOTH, 2.0 * TURN_S) == Loan("a", BIG), "it asked before"


def test_after_its_turn_a_router_stands_at_the_end_of_the_line() -> None:
    lending = Lending[str]()
    lending.ask("a", BIG)
    lending.ask("b", SMALL)
    lending.loan(BOTH, 0.0)
    lending.loan(BOTH, TURN_S)
    assert lending.loan(BOTH, 2.0 * TURN_S) == Loan("b", SMALL)


def test_a_router_that_is_away_is_lent_nothing() -> None:
    lending = Lending[str]()
    lending.ask("a", BIG)
    assert lending.loan(("b",), 0.0) is None
    assert lending.loan(BOTH, 1.0) == Loan("a", BIG)
    lending.forget("a")
    assert lending.loan(BOTH, 2.0) is None

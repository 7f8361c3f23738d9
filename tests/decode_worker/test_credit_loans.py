"""Routers that want more than their share take turns."""

from baton.decode_worker.credits import TURN_S, Charge, CreditLoan, CreditLoans

BIG, SMALL, NOTHING = Charge(80, 2), Charge(40, 1), Charge(0, 0)
BOTH = ("a", "b")


def test_no_loans_without_demand() -> None:
    assert CreditLoans[str]().loan(BOTH, 0.0) is None


def test_first_requester_has_the_first_turn_while_it_wants_more() -> None:
    loans = CreditLoans[str]()
    loans.ask("b", BIG)
    loans.ask("a", SMALL)
    assert loans.loan(BOTH, 0.0) == CreditLoan("b", BIG)
    loans.ask("b", SMALL)
    assert loans.loan(BOTH, 1.0) == CreditLoan("b", SMALL)
    loans.ask("b", NOTHING)
    assert loans.loan(BOTH, 2.0) == CreditLoan("a", SMALL)


def test_unplaced_request_gives_its_time_to_others() -> None:
    loans = CreditLoans[str]()
    loans.ask("a", BIG)
    assert loans.loan(BOTH, 0.0) == CreditLoan("a", BIG)
    assert loans.loan(BOTH, TURN_S) is None
    loans.ask("a", BIG)
    loans.ask("b", SMALL)
    assert loans.loan(BOTH, 1.5 * TURN_S) is None
    assert loans.loan(BOTH, 2.0 * TURN_S) == CreditLoan("a", BIG), "it asked before"


def test_router_after_its_turn_is_last_in_line() -> None:
    loans = CreditLoans[str]()
    loans.ask("a", BIG)
    loans.ask("b", SMALL)
    loans.loan(BOTH, 0.0)
    loans.loan(BOTH, TURN_S)
    assert loans.loan(BOTH, 2.0 * TURN_S) == CreditLoan("b", SMALL)


def test_disconnected_router_gets_no_loan() -> None:
    loans = CreditLoans[str]()
    loans.ask("a", BIG)
    assert loans.loan(("b",), 0.0) is None
    assert loans.loan(BOTH, 1.0) == CreditLoan("a", BIG)
    loans.forget("a")
    assert loans.loan(BOTH, 2.0) is None

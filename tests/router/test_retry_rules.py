"""Which failures another attempt may mend, what the others tell the client, and who is attempted alone."""

import pytest

from baton.process.errors import BatonError, Internal
from baton.router.request.retry import ABOUT_A_PAIR, PREFILL_GONE, RETRYABLE, Suspects, error_of, poisonous
from baton.router.types.events import Failed, FailureReason

R = FailureReason


@pytest.mark.parametrize(
    ("reason", "retried", "about_a_pair", "prefill_gone", "status"),
    [
        (R.TRANSFER, True, True, False, "UNAVAILABLE"),
        (R.CORRUPT, True, True, False, "UNAVAILABLE"),
        (R.DRAINING, True, False, True, "UNAVAILABLE"),
        (R.WORKER_LOST, True, False, True, "UNAVAILABLE"),
        (R.WORKER_DIED, True, False, True, "UNAVAILABLE"),
        (R.NO_ROOM, True, False, False, "RESOURCE_EXHAUSTED"),
        (R.UNKNOWN_ATTEMPT, True, False, False, "INTERNAL"),
        (R.INVALID, False, False, False, "INVALID_ARGUMENT"),  # the same anywhere
        (R.ADOPTED, False, False, False, "ABORTED"),  # another stream has it
        (R.DEADLINE, False, False, False, "DEADLINE_EXCEEDED"),
        (R.NONFINITE, False, False, False, "INTERNAL"),
        (R.UNKNOWN, False, False, False, "INTERNAL"),
    ],
)
def test_failure_is_retried_where_another_worker_or_moment_may_mend_it(
    reason: FailureReason, retried: bool, about_a_pair: bool, prefill_gone: bool, status: str
) -> None:
    assert (reason in RETRYABLE, reason in ABOUT_A_PAIR, reason in PREFILL_GONE) == (
        retried,
        about_a_pair,
        prefill_gone,
    )
    error: BatonError = error_of(Failed(1, "d", reason, "why"), "request")
    assert error.code.name == status


def test_suspects_are_attempted_one_at_a_time_in_order() -> None:
    suspects, held = Suspects(), list[str]()
    first, second, third = (suspects.lock(lambda name=name: held.append(name)) for name in "abc")  # type: ignore[misc]
    assert held == ["a"]
    second.release()
    assert held == ["a"], "one that waits has nothing to pass on"
    first.release()
    first.release()
    assert held == ["a", "c"]
    third.release()
    suspects.lock(lambda: held.append("d"))
    assert held == ["a", "c", "d"]


def test_deadly_request_is_an_internal_error_with_its_own_reason() -> None:
    error = poisonous("request")
    assert isinstance(error, Internal) and error.reason == "POISON"

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.client.errors import (
    BatonClientError,
    Busy,
    DeadlineExceeded,
    ErrorDetails,
    InvalidRequest,
    ServerError,
    Unavailable,
)
from baton.client.retry import Attempts, RetryPolicy

POLICY = RetryPolicy(attempts=4, first_wait_s=0.1, longest_wait_s=1.0)


def test_waits_double_and_end_after_the_last_attempt() -> None:
    attempts = Attempts(POLICY, timeout_s=None, now=0.0)
    waits = [attempts.wait_s(Unavailable("gone"), now=0.0, uniform=0.0) for _ in range(4)]
    assert waits[:3] == pytest.approx([0.05, 0.1, 0.2])
    assert waits[3] is None


@pytest.mark.parametrize("error", [InvalidRequest("no"), DeadlineExceeded("late"), ServerError("bug"), Busy("a limit")])
def test_permanent_error_is_not_repeated(error: BatonClientError) -> None:
    assert Attempts(POLICY, timeout_s=None, now=0.0).wait_s(error, now=0.0, uniform=0.5) is None


@pytest.mark.parametrize("kind", [Busy, Unavailable])
def test_time_that_the_server_asks_for_is_waited(kind: type[Busy] | type[Unavailable]) -> None:
    error = kind("later", ErrorDetails(retry_after_s=0.7))
    wait_s = Attempts(POLICY, timeout_s=None, now=0.0).wait_s(error, now=0.0, uniform=0.0)
    assert wait_s == pytest.approx(0.75)


def test_server_that_asks_for_too_long_is_not_waited_for() -> None:
    error = Busy("later", ErrorDetails(retry_after_s=1.1))
    assert Attempts(POLICY, timeout_s=None, now=0.0).wait_s(error, now=0.0, uniform=0.0) is None


def test_no_wait_reaches_past_the_deadline() -> None:
    attempts = Attempts(POLICY, timeout_s=1.0, now=10.0)
    assert attempts.remaining_s(10.96) == pytest.approx(0.04)
    assert attempts.wait_s(Unavailable("gone"), now=10.96, uniform=0.0) is None


@given(uniform=st.floats(0, 1, exclude_max=True), failures=st.integers(1, 50))
def test_wait_stays_within_its_bounds(uniform: float, failures: int) -> None:
    attempts = Attempts(RetryPolicy(attempts=100, first_wait_s=0.1, longest_wait_s=1.0), timeout_s=None, now=0.0)
    waits = [attempts.wait_s(Unavailable("gone"), now=0.0, uniform=uniform) for _ in range(failures)]
    assert all(wait is not None and 0.05 <= wait <= 1.0 for wait in waits)


def test_policy_without_attempts_is_refused() -> None:
    with pytest.raises(ValueError, match="attempts"):
        RetryPolicy(attempts=0)


def test_every_router_of_a_cluster_is_tried_as_often_as_one_alone() -> None:
    assert POLICY.among(1) == POLICY
    assert POLICY.among(3).attempts == 12
    assert RetryPolicy(attempts=1).among(3).attempts == 1

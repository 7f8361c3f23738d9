"""The best of several choices goes out once, whatever comes behind its end."""

from typing import Any, cast

from baton.router.request.answer import BestOf, RequestAnswer
from baton.router.types.events import NewTokens


class Ended:
    """An answer whose choices have all ended; what comes behind that says nothing."""

    done = True

    def take(self, released: NewTokens) -> tuple[Any, ...]:
        raise AssertionError("nothing is taken any more")


def test_what_comes_behind_the_last_end_tells_nothing_again() -> None:
    best = BestOf(cast(RequestAnswer, Ended()), 1, with_logprobs=False)
    assert best.take(cast(NewTokens, None)) == ()

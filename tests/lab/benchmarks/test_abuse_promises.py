"""When a run beside abusers counts as bad."""

from collections import Counter

import pytest

from baton.lab.benchmarks.clients.abuse import ANSWERS, MOST_GROWTH_MIB, Window, broken, figures
from baton.lab.benchmarks.clients.abusers import KINDS

GOOD = {"p50_ratio": 1.0, "p99_ratio": 1.1, "growth_mib_beside": 10.0, "told": {"400": 7}}


def test_every_kind_has_answers_that_it_may_be_told() -> None:
    assert ANSWERS.keys() == KINDS.keys()


def test_a_good_run_breaks_nothing() -> None:
    assert not list(broken("malformed", GOOD))


@pytest.mark.parametrize(
    "bad",
    [
        {"p50_ratio": 1.2},
        {"p99_ratio": 1.7},
        {"growth_mib_beside": MOST_GROWTH_MIB + 1},
        {"told": {"400": 7, "500": 1}},
        {"told": {}},
    ],
)
def test_each_promise_can_be_broken(bad: dict[str, object]) -> None:
    assert len(list(broken("malformed", GOOD | bad))) == 1


def test_ratios_are_those_of_windows_that_took_turns() -> None:
    alone = [Window(20, 22, 50, Counter()), Window(20, 40, 50, Counter()), Window(20, 22, 90, Counter())]
    beside = [Window(20, 33, 60, Counter(a=1)), Window(21, 40, 70, Counter(a=1)), Window(20, 33, 60, Counter(b=1))]

    found = figures(alone, beside, before_mib=40)

    assert (found["p50_ratio"], found["p99_ratio"], found["growth_mib_beside"]) == (1.0, 1.5, 30)
    assert found["told"] == {"a": 2, "b": 1}

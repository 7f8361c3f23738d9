"""Placement written for speed against placement written down plainly, on workers of few kinds, so that ties come up."""

from random import Random

import pytest

from baton.router.placement.decide import NoPrefillWorker, Placement, place
from baton.router.placement.policies import Strategy
from tests.fixtures.router_defaults import make_policy
from tests.router.plain_placement import chosen
from tests.router.random_clusters import random_request, random_worker

CASES = 800


@pytest.mark.parametrize("without", NoPrefillWorker)
def test_fast_and_plain_decisions_are_equal(without: NoPrefillWorker) -> None:
    for case in range(CASES):
        chance = Random(f"{without} {case}")
        workers = [random_worker(chance, number) for number in range(chance.randrange(12))]
        request = random_request(chance)
        policy = make_policy(without, chance.choice([0, 64, 1000]), Strategy.CACHE_AWARE)
        outcome, plain = place(request, workers, policy), chosen(request, workers, policy)
        if isinstance(outcome, Placement):
            told = (outcome.prefill, outcome.decode, outcome.local_prefill, outcome.fetch_from)
            assert told == plain, f"case {case}: {request} {workers}"
        else:
            assert outcome is plain, f"case {case}: {request} {workers}"

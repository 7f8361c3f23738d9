"""Inputs of placements as JSON values: what is read back is what was written."""

import json
from random import Random

import pytest

from baton.router.placement.decide import Decision, Placement, PlacementPolicy, decide, placement_of
from baton.router.types.placement import PlacementRequest, WorkerView
from baton.router.types.plain import from_plain, to_plain
from baton.router.types.worker import Adapter
from tests.fixtures.router_defaults import make_policy
from tests.router.random_clusters import random_request, random_worker


@pytest.mark.parametrize("seed", range(30))
def test_plain_values_of_a_random_placement_are_read_back_unchanged(seed: int) -> None:
    chance = Random(seed)
    workers, request, policy = tuple(random_worker(chance, n) for n in range(6)), random_request(chance), make_policy()
    written = json.loads(json.dumps(to_plain({"workers": workers, "request": request, "policy": policy})))
    assert from_plain(tuple[WorkerView, ...], written["workers"]) == workers
    assert from_plain(PlacementRequest, written["request"]) == request
    assert from_plain(PlacementPolicy, written["policy"]) == policy
    decision = decide(request, workers, policy)
    if isinstance(decision, Decision):
        placement = placement_of(request, decision, policy)
        assert from_plain(Placement, json.loads(json.dumps(to_plain(placement)))) == placement


def test_plain_values_of_an_adapter_are_read_back_unchanged() -> None:
    request = PlacementRequest(b"f", 4, 18, 6, 1, adapter=Adapter("a", "d"), broken_pairs=frozenset({("p", "d")}))
    assert from_plain(PlacementRequest, json.loads(json.dumps(to_plain(request)))) == request


def test_plain_values_with_an_unknown_field_are_read_without_it() -> None:
    request = PlacementRequest(b"f", 4, 18, 6, 1)
    assert from_plain(PlacementRequest, {**to_plain(request), "of_a_later_release": 7}) == request


def test_plain_values_omit_defaults() -> None:
    assert to_plain(PlacementRequest(b"f", 4, 18, 6, 1)) == {
        "fingerprint": "66", "block_tokens": 4, "prompt_tokens": 18, "max_tokens": 6, "choices": 1,
    }  # fmt: skip

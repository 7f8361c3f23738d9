"""Where a prefill worker is told to look for more of a prompt than it has itself, and what is told of the fetch."""

from dataclasses import replace

import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.decide import Placement, place
from baton.router.trace.record import Timeline, stages
from baton.router.types.events import PrefillTimings
from baton.router.types.placement import PlacementRequest, WorkerView
from tests.fixtures.router_defaults import make_policy
from tests.router.clusters import cluster_of, join

F = b"f"
REQUEST = PlacementRequest(fingerprint=F, block_tokens=4, prompt_tokens=18, max_tokens=6, choices=1)
PREFILL = WorkerView("p0", WorkerRole.PREFILL, F, 100, 0, 0, 0)
DECODE = WorkerView("d0", WorkerRole.DECODE, F, 100, 8, 100, 8)


def placed(*workers: WorkerView) -> Placement:
    outcome = place(REQUEST, workers, make_policy())
    assert isinstance(outcome, Placement)
    return outcome


def test_worker_with_more_of_the_prompt_is_named() -> None:
    placement = placed(replace(PREFILL, hit_blocks=1), replace(DECODE, hit_blocks=3, ready_blocks=3))
    assert (placement.fetch_from, placement.fetch_tokens) == ("d0", 12)


@pytest.mark.parametrize("prefill_hit", [3, 4])
def test_worker_without_more_of_the_prompt_is_not_named(prefill_hit: int) -> None:
    placement = placed(replace(PREFILL, hit_blocks=prefill_hit), replace(DECODE, hit_blocks=3, ready_blocks=3))
    assert placement.fetch_from is None


def test_blocks_that_may_still_have_to_be_computed_are_not_promised() -> None:
    assert placed(PREFILL, replace(DECODE, hit_blocks=3)).fetch_from is None


def test_decode_worker_is_preferred_only_where_it_has_as_much() -> None:
    other = replace(DECODE, endpoint="d1", tokens_in_flight=100)
    assert placed(PREFILL, DECODE, replace(other, hit_blocks=2, ready_blocks=2)).fetch_from == "d1"
    both = placed(PREFILL, replace(other, ready_blocks=2), replace(DECODE, ready_blocks=2))
    assert (both.decode, both.fetch_from) == ("d0", "d0")


def test_nobody_fetches_from_itself_or_another_model() -> None:
    stranger = replace(DECODE, endpoint="d9", fingerprint=b"g", ready_blocks=4)
    assert placed(replace(PREFILL, ready_blocks=4), DECODE, stranger).fetch_from is None


def test_worker_that_came_back_has_nothing_ready() -> None:
    cluster = cluster_of({"d0": WorkerRole.DECODE})
    cluster.answered("d0", [b"1"])
    assert cluster.snapshot([b"1"])[0].ready_blocks == 1
    join(cluster, "d0", WorkerRole.DECODE, epoch=2)
    assert cluster.snapshot([b"1"])[0].ready_blocks == 0


def test_fetch_is_its_own_stage_in_the_sum() -> None:
    timeline = Timeline(arrived_s=10.0, route_began_s=10.1, sent_s=10.101, first_step_s=10.2, first_token_s=10.2)
    timeline.prefill = PrefillTimings(
        queue_ms=25.0, chunk_ms=(30.0,), total_ms=60.0, cached_tokens=32, fetch_ms=20.0, fetched_tokens=32
    )
    measured = stages(timeline, now=11.0)
    assert (measured.prefill_fetch_ms, measured.prefill_queue_ms) == (20.0, 10.0)
    before = measured.router_queue_ms + measured.route_ms + measured.prefill_fetch_ms + measured.prefill_queue_ms
    assert measured.ttft_ms == pytest.approx(before + measured.prefill_ms + measured.return_ms)

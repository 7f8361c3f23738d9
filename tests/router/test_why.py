"""Where a request's time went and what became of its blocks, as the router answers: stages, stalls, predictions."""

import asyncio
from typing import Any

import grpc
import pytest

from baton.process.errors import NotFound
from baton.process.registry.worker_record import WorkerRole
from baton.protos import admin_pb2, baton_pb2
from baton.router.cache.autopsy import CacheLook
from baton.router.placement.decide import Decision, decide, placement_of
from baton.router.trace.record import AttemptNote, GapSummary, Stall, Timeline
from baton.router.trace.report import SHOWN_STALLS
from baton.router.types.events import FirstStep, PrefillTimings
from baton.router.types.placement import Measured, PlacementRequest, WorkerRates, WorkerView
from baton.text.causes import CausePart, StallCause
from tests.fixtures.router_defaults import make_policy
from tests.fixtures.stalled import KeptExplainer, reported
from tests.router.conftest import READY_S, Stack

REQUEST = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=18, max_tokens=6, choices=1)
RATES = WorkerRates(prefill_tokens_per_s=180.0, prefill_measured=Measured.HERE)
PREFILL = WorkerView("p0", WorkerRole.PREFILL, b"f", 100, 0, 0, 0, rates=RATES)
OTHER = WorkerView("p1", WorkerRole.PREFILL, b"f", 100, 0, 0, 0, rates=RATES, tokens_in_flight=99, ready_blocks=3)
DECODE = WorkerView("d0", WorkerRole.DECODE, b"f", 100, 8, 100, 8, rates=RATES)
LOOK = CacheLook(1, follows=True, known_s=30.0)


def note(*views: WorkerView, attempt_id: int = 1) -> AttemptNote:
    policy = make_policy()
    decision = decide(REQUEST, views, policy)
    assert isinstance(decision, Decision)
    placement = placement_of(REQUEST, decision, policy)
    return AttemptNote(REQUEST, placement, decision, 1.0, 1.5, attempt_id=attempt_id, look=LOOK)


def asked(timeline: Timeline, gaps: GapSummary | None = None) -> admin_pb2.WhyResponse:
    explainer = KeptExplainer(str.upper)
    explainer.observe(reported(timeline, gaps=gaps))
    return explainer.why("r")


def computed(*views: WorkerView, cached_tokens: int = 4, first_step_s: float = 1.75) -> Timeline:
    timeline = Timeline(0.0)
    timeline.begin_attempt(note(*views), 1.4)
    timings = PrefillTimings(2.0, (3.0,), 9.0, cached_tokens)
    timeline.take_first_step(FirstStep(1, (), timings), first_step_s)
    return timeline


def test_autopsy_is_of_the_computing_worker_and_names_others_with_the_prefix() -> None:
    cache = asked(computed(PREFILL, OTHER, DECODE)).cache
    assert (cache.worker_id, cache.attempt, cache.block_tokens, cache.known_s) == ("P0", 1, 4, 30.0)
    runs = [(run.first_block, run.blocks, run.fate, run.worker_id) for run in cache.runs]
    assert runs == [(0, 1, "cached", ""), (1, 2, "elsewhere", "P1"), (3, 1, "never", "")]
    assert cache.expected_blocks == 1


def test_attempt_that_made_the_first_token_counts() -> None:
    timeline = Timeline(0.0)
    timeline.begin_attempt(note(PREFILL, DECODE), 1.4)
    timeline.begin_attempt(note(PREFILL, DECODE, attempt_id=2), 1.6)
    assert asked(timeline).cache.attempt == 2, "the last one where there is no token"
    timeline.take_first_step(FirstStep(1, (), PrefillTimings(2.0, (3.0,), 9.0, 0)), 1.75)
    assert asked(timeline).cache.attempt == 1


def test_answer_that_another_router_had_placed_has_no_autopsy() -> None:
    adopted = note(PREFILL, DECODE)
    adopted.decision = adopted.look = None
    timeline = Timeline(0.0)
    timeline.begin_attempt(adopted, 1.4)
    response = asked(timeline)
    assert not response.HasField("cache") and not response.HasField("colocated")
    assert response.placed.request_id == "r" and response.HasField("stages")


def test_prompt_that_was_to_be_computed_as_a_whole_has_no_missed_blocks() -> None:
    timeline = computed(PREFILL, OTHER, DECODE)
    timeline.notes[0].look = None
    assert [run.fate for run in asked(timeline).cache.runs] == ["unused"]


def test_resumed_attempt_counts_its_first_token_from_one_as_the_trace_does() -> None:
    timeline = computed(PREFILL, DECODE)
    timeline.notes[0].answered_tokens = 7
    [attempt] = asked(timeline).placed.attempts
    assert attempt.reason.startswith("the answer continues at token 8: ")


def test_longest_stalls_have_their_causes_in_order_of_time() -> None:
    blamed = (CausePart(StallCause.PROMPTS, 30.0, "other", "512 tokens"),)
    stalls = tuple(Stall(float(second), 40.0 + second % 7, 0, 10.0, blamed) for second in range(1, SHOWN_STALLS + 4))
    response = asked(computed(PREFILL, DECODE), GapSummary(5.0, 50.0, 60.0, stalls, len(stalls)))
    assert (response.stall_count, response.longest_gap_ms) == (SHOWN_STALLS + 3, 60.0)
    assert len(response.stalls) == SHOWN_STALLS
    assert [each.at_ms for each in response.stalls] == sorted(each.at_ms for each in response.stalls)
    assert min(each.gap_ms for each in response.stalls) >= 42.0
    [cause] = response.stalls[0].causes
    assert (cause.cause, cause.ms, cause.culprit, cause.detail) == ("prompt_tokens", 30.0, "other", "512 tokens")


def test_prompts_of_decode_workers_measure_the_prediction_error() -> None:
    explainer = KeptExplainer(str.upper)
    explainer.observe(reported(computed(PREFILL, DECODE), "remote"))
    remote = explainer.why("remote").colocated
    assert (remote.is_local, remote.worker_id, remote.basis) == (False, "D0", "measured")
    assert remote.ttft_ms == pytest.approx(100.0)
    assert (remote.measured_ttft_ms, remote.checked_requests) == (250.0, 0)
    explainer.observe(reported(computed(DECODE, first_step_s=1.58), "local"))
    remote, local = [explainer.why(name).colocated for name in ("remote", "local")]
    assert local.is_local and remote.checked_requests == local.checked_requests == 1
    assert local.median_error == pytest.approx(0.25)
    assert local.median_ratio == pytest.approx(0.8)


def test_without_any_measured_rate_no_time_is_predicted() -> None:
    unmeasured = WorkerView("d0", WorkerRole.DECODE, b"f", 100, 8, 100, 8)
    explainer = KeptExplainer(str.upper)
    explainer.observe(reported(computed(unmeasured)))
    found = explainer.why("r").colocated
    assert (found.basis, found.ttft_ms, found.checked_requests) == ("", 0.0, 0)
    assert found.measured_ttft_ms == 250.0


def test_unknown_request_is_not_found() -> None:
    with pytest.raises(NotFound):
        KeptExplainer(str.upper).why("r")


async def why(stack: Stack, request_id: str) -> admin_pb2.WhyResponse:
    """Once the request was recorded."""
    async with asyncio.timeout(READY_S):
        while True:
            try:
                response: admin_pb2.WhyResponse = await stack.admin.Why(admin_pb2.WhyRequest(request_id=request_id))
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.NOT_FOUND
            else:
                return response


async def ask(stack: Stack, request_id: str, **sampling: Any) -> admin_pb2.WhyResponse:
    request = baton_pb2.GenerateRequest(
        text="the secret word is xylophone",
        request_id=request_id,
        sampling=baton_pb2.SamplingParams(max_tokens=5, **sampling),
    )
    responses = [response async for response in stack.stub.Generate(request, timeout=10)]
    assert responses[-1].WhichOneof("event") == "finished"
    return await why(stack, request_id)


async def test_workers_without_cache_reports_are_named_and_no_prompt_leaves_the_router(stack: Stack) -> None:
    await stack.ready()
    response = await ask(stack, "mine")
    assert {run.fate for run in response.cache.runs} <= {"expected", "cached", "unknown", "gone"}
    assert any(run.fate == "unknown" for run in response.cache.runs)
    assert response.cache.known_s == 0.0
    stages = response.stages
    assert stages.ttft_ms > 0
    assert b"xylophone" not in response.SerializeToString()

"""Records for tests: placements by the real code, and the steps of a real scheduler."""

from collections.abc import Sequence
from dataclasses import replace

from baton.client.timelines import ProcessTimeline, SchedulerCall, TimelineStep, WorkerRequest
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Computed, Drawn, Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.budget import StepBudget
from baton.engine.scheduler.scheduler import Scheduler
from baton.lab.replay.record import IncidentRecord, RecordedPlacement, RecordedRequest, RouterSettings
from baton.lab.replay.steps import StepComposition, block_name
from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.decide import Decision, decide, placement_of
from baton.router.types.placement import PlacementRequest, WorkerView
from tests.fixtures.router_defaults import make_policy

BLOCK_TOKENS = 4
SETTINGS = RouterSettings(make_policy(), 2000.0, 50.0)
STEP_S, TOKEN_S = 0.010, 0.001


def recorded_request(
    request_id: str, prompt_tokens: int, answer_tokens: int, blocks: Sequence[int] = ()
) -> RecordedRequest:
    """Return a request without placements; by default no other prompt shares its blocks."""
    own = blocks or [1000 * int(request_id.rpartition("-")[2]) + n for n in range(prompt_tokens // BLOCK_TOKENS)]
    return RecordedRequest(
        request_id, 0, BLOCK_TOKENS, tuple(own), prompt_tokens, answer_tokens, 64, 1, 0, False, False, 0, "answered",
        100.0, 1.0, (),
    )  # fmt: skip


def placed(request: RecordedRequest, *in_flight: int) -> RecordedRequest:
    """Return the request with a placement among prefill workers that have `in_flight` tokens, and a decode worker."""
    views = (
        *(
            WorkerView(f"p{n}:1", WorkerRole.PREFILL, b"f", 99, 0, 0, 0, tokens_in_flight=t)
            for n, t in enumerate(in_flight)
        ),
        WorkerView("d0:1", WorkerRole.DECODE, b"f", 99, 8, 99, 8),
    )
    asked = PlacementRequest(b"f", BLOCK_TOKENS, request.prompt_tokens, request.max_tokens, 1)
    decision = decide(asked, views, SETTINGS.policy)
    assert isinstance(decision, Decision)
    placement = placement_of(asked, decision, SETTINGS.policy)
    return replace(request, placements=(RecordedPlacement(0, 0, "", asked, views, None, placement),))


def record_of(requests: Sequence[RecordedRequest], workers: Sequence[ProcessTimeline] = ()) -> IncidentRecord:
    return IncidentRecord(SETTINGS, tuple(requests), tuple(workers))


def steps_of(arrivals: Sequence[tuple[int, RecordedRequest]], total_blocks: int = 400) -> ProcessTimeline:
    """Return the timeline of a decode worker that computes prompts itself. `arrivals`: step before which each comes."""
    scheduler = Scheduler(BlockPool(total_blocks), BLOCK_TOKENS, 32, 8, StepBudget())
    steps: list[TimelineStep] = []
    made: dict[int, int] = {}
    cached: dict[int, int] = {}
    while len(steps) <= max(at for at, _ in arrivals) or scheduler.has_work:
        coming = [(number, each) for number, (at, each) in enumerate(arrivals) if at == len(steps)]
        for number, each in coming:
            scheduler.add(_asked(number, each), bytes(32))
        now_s = 0.1 * len(steps)
        plan = scheduler.plan(now_s)
        assert plan is not None, "a step without work"
        composition = StepComposition.of_plan(plan)
        seconds = STEP_S + TOKEN_S * plan.prompt_tokens
        scheduler.observe(plan, seconds, seconds)
        results = []
        for chunk in plan.chunks:
            made[chunk.request_id] = made.get(chunk.request_id, 0) + len(chunk.samples)
            ends = made[chunk.request_id] == arrivals[chunk.request_id][1].answer_tokens
            results.append(Computed((Drawn(0 if ends else 5, 0.0),) if chunk.samples else ()))
        for outcome in scheduler.commit(plan, results):
            cached[outcome.request_id] = getattr(outcome, "cached_tokens", 0)
        began_us = round(now_s * 1e6)
        steps.append(
            TimelineStep(
                len(steps) + 1, began_us, began_us + round(seconds * 1e6), sum(composition.answers.values()),
                sum(chunk.end for chunk in plan.chunks if chunk.samples), dict(composition.prompts),
                tuple(number for number, count in composition.answers.items() for _ in range(count)), 0, 0, 0, 0, 0, {},
                calls=tuple(SchedulerCall("add", number) for number, _ in coming), observed_s=seconds, period_s=seconds,
            )
        )  # fmt: skip
    requests = tuple(
        WorkerRequest(
            number, each.request_id, 0, each.prompt_tokens, cached[number], None, 1, 1, made[number], 10**9, ""
        )
        for number, (_, each) in enumerate(arrivals)
    )
    return ProcessTimeline(
        "decode-0", "decode", "d0:1", 0, "", total_blocks, (), tuple(steps), requests, dict(scheduler.settings)
    )


def _asked(number: int, request: RecordedRequest) -> Request:
    params = SamplingParams(max_tokens=request.max_tokens, stop_token_ids=frozenset({0}))
    return Request(number, (7 + number,) * request.prompt_tokens, params, tuple(map(block_name, request.blocks)))

"""Records for tests: placements by the real code, and the steps of a real scheduler, also of a real engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.client.timelines import ProcessTimeline, SchedulerCall, TimelineStep, WorkerRequest
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import NO_OBJECTIVES, ChunkResult, Computed, Drawn, Objectives, Plan, Request
from baton.engine.runner.step_records import results_digest
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.budget import StepBudget
from baton.engine.scheduler.scheduler import Scheduler
from baton.lab.replay.record import IncidentRecord, RecordedPlacement, RecordedRequest, RecordedTokens, RouterSettings
from baton.lab.replay.steps import StepComposition, block_name
from baton.process.registry.worker_record import WorkerRole
from baton.router.fleet.wire import sampling_message
from baton.router.placement.decide import Decision, decide, placement_of
from baton.router.types.placement import PlacementRequest, WorkerView
from baton.router.types.request import Sampling
from baton.worker.wire import sampling_params
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


def with_tokens(request: RecordedRequest, prompt: Sequence[int], temperature: float = 0.0) -> RecordedRequest:
    """Return the request with this prompt and without an answer yet, which has the recorded length."""
    sampling = Sampling(request.answer_tokens, 7, (), 1, temperature=temperature)
    return replace(request, tokens=RecordedTokens(tuple(prompt), ((),), sampling), max_tokens=request.answer_tokens)


def computed_steps_of(
    arrivals: Sequence[tuple[int, RecordedRequest]], run: Callable[[Plan], Sequence[ChunkResult]]
) -> tuple[ProcessTimeline, list[RecordedRequest]]:
    """Return the timeline of a worker whose runner computes the steps, and the requests with their answers."""
    answers: dict[int, list[int]] = {number: [] for number in range(len(arrivals))}

    def computed(plan: Plan) -> Sequence[ChunkResult]:
        results = run(plan)
        for chunk, result in zip(plan.chunks, results, strict=True):
            assert isinstance(result, Computed)
            answers[chunk.request_id] += [drawn.token_id for drawn in result.drawn]
        return results

    timeline = steps_of(arrivals, run=computed)
    requests = []
    for number, (_, each) in enumerate(arrivals):
        assert each.tokens is not None
        requests.append(replace(each, tokens=replace(each.tokens, answers=(tuple(answers[number]),))))
    return timeline, requests


def steps_of(
    arrivals: Sequence[tuple[int, RecordedRequest]],
    total_blocks: int = 400,
    run: Callable[[Plan], Sequence[ChunkResult]] | None = None,
    ttft_slo_s: float = 0.0,
) -> ProcessTimeline:
    """Return the timeline of a decode worker that computes prompts itself. `arrivals`: step before which each comes.

    `run`: computes a plan; None: answers have the recorded lengths. `ttft_slo_s`: objective of all requests; 0: none.
    """
    scheduler = Scheduler(BlockPool(total_blocks), BLOCK_TOKENS, 32, 8, StepBudget())
    steps: list[TimelineStep] = []
    made: dict[int, int] = {}
    cached: dict[int, int] = {}
    while len(steps) <= max(at for at, _ in arrivals) or scheduler.has_work:
        coming = [(number, each) for number, (at, each) in enumerate(arrivals) if at == len(steps)]
        for number, each in coming:
            objectives = Objectives(ttft_slo_s, ttft_s=ttft_slo_s) if ttft_slo_s else NO_OBJECTIVES
            scheduler.add(replace(_asked(number, each), objectives=objectives), bytes(32))
        now_s = 0.1 * len(steps)
        plan = scheduler.plan(now_s)
        assert plan is not None, "a step without work"
        composition = StepComposition.of_plan(plan)
        seconds = STEP_S + TOKEN_S * plan.prompt_tokens
        scheduler.observe(plan, seconds, seconds)
        lengths = []
        for chunk in plan.chunks:
            made[chunk.request_id] = made.get(chunk.request_id, 0) + len(chunk.samples)
            ends = made[chunk.request_id] == arrivals[chunk.request_id][1].answer_tokens
            lengths.append(Computed((Drawn(0 if ends else 5, 0.0),) if chunk.samples else ()))
        results: Sequence[ChunkResult] = lengths if run is None else run(plan)
        for outcome in scheduler.commit(plan, results):
            cached[outcome.request_id] = getattr(outcome, "cached_tokens", 0)
        began_us = round(now_s * 1e6)
        steps.append(
            TimelineStep(
                len(steps) + 1, began_us, began_us + round(seconds * 1e6), sum(composition.answers.values()),
                sum(chunk.end for chunk in plan.chunks if chunk.samples), dict(composition.prompts),
                tuple(number for number, count in composition.answers.items() for _ in range(count)), 0, 0, 0, 0, 0, {},
                calls=tuple(SchedulerCall("add", number) for number, _ in coming), observed_s=seconds, period_s=seconds,
                digest=0 if run is None else results_digest(results),
            )
        )  # fmt: skip
    requests = tuple(
        WorkerRequest(
            number,
            each.request_id,
            0,
            each.prompt_tokens,
            cached[number],
            None,
            1,
            1,
            made[number],
            10**9,
            "",
            wanted_us=round(ttft_slo_s * 1e6) or None,
            ttft_slo_ms=ttft_slo_s * 1e3,
        )
        for number, (_, each) in enumerate(arrivals)
    )
    return ProcessTimeline(
        "decode-0", "decode", "d0:1", 0, "", total_blocks, (), tuple(steps), requests, dict(scheduler.settings)
    )


def _asked(number: int, request: RecordedRequest) -> Request:
    params = SamplingParams(max_tokens=request.max_tokens, stop_token_ids=frozenset({0}))
    prompt: tuple[int, ...] = (7 + number,) * request.prompt_tokens
    if request.tokens is not None:
        prompt = request.tokens.prompt
        params = sampling_params(sampling_message(request.tokens.sampling, computes_prompt=True))
    return Request(number, prompt, params, tuple(map(block_name, request.blocks)))

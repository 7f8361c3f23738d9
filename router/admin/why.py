"""Where the time of a request went, and what became of its prompt's blocks, for an operator who asks. Into protobuf."""

from collections.abc import Callable
from dataclasses import asdict

from baton.protos import admin_pb2
from baton.router.admin.requests import request_drafts, request_stall
from baton.router.cache.autopsy import NOWHERE, BlockRun, Found, Held, autopsy
from baton.router.placement.colocated import ColocatedPrefill, LocalPrefills, colocated_prefill
from baton.router.placement.decide import Decision
from baton.router.trace.recent import DecisionRecord, Waits
from baton.router.trace.record import AttemptNote

WorkerId = Callable[[str], str]
"""Names the worker at an endpoint."""


def why_response(
    found: DecisionRecord, placed: admin_pb2.ExplainResponse, worker_id: WorkerId, local_prefills: LocalPrefills
) -> admin_pb2.WhyResponse:
    """`local_prefills` say how right predictions like this request's have been."""
    response = admin_pb2.WhyResponse(placed=placed)
    if found.waits is not None:
        _add_waits(response, found.waits, found.arrived_s, worker_id)
    number = _computed(found)
    note = found.attempts[number - 1]
    if note.decision is not None:
        response.cache.CopyFrom(_autopsy(note, number, found.salted, worker_id))
        response.colocated.CopyFrom(_colocated(note, local_prefills, worker_id))
    return response


def _computed(found: DecisionRecord) -> int:
    """The attempt that made the first token, from 1; the last where none did."""
    made = (number for number, note in enumerate(found.attempts, 1) if note.first_step_s is not None)
    return next(made, len(found.attempts))


def _add_waits(response: admin_pb2.WhyResponse, waits: Waits, arrived_s: float, worker_id: WorkerId) -> None:
    response.stages.CopyFrom(admin_pb2.RequestStages(**asdict(waits.stages)))
    response.stalls.extend(request_stall(stall, arrived_s, worker_id) for stall in waits.stalls)
    response.stall_count, response.longest_gap_ms = waits.stall_count, waits.longest_gap_ms
    if (drafts := request_drafts(waits.drafts)) is not None:
        response.drafts.CopyFrom(drafts)


def _autopsy(note: AttemptNote, number: int, salted: Held, worker_id: WorkerId) -> admin_pb2.CacheAutopsy:
    request, computing = note.request, note.placement.computing
    elsewhere = _elsewhere(note.decision, computing)
    runs = autopsy(request.reusable_blocks, note.look, _found(note), elsewhere, salted)
    return admin_pb2.CacheAutopsy(
        worker_id=worker_id(computing),
        attempt=number,
        block_tokens=request.block_tokens,
        runs=[_run(run, worker_id) for run in runs],
        known_s=note.look.known_s if note.look is not None else 0.0,
        expected_blocks=note.look.hit_blocks if note.look is not None else 0,
    )


def _run(run: BlockRun, worker_id: WorkerId) -> admin_pb2.BlockRun:
    return admin_pb2.BlockRun(
        first_block=run.first,
        blocks=run.blocks,
        fate=run.fate.value,
        worker_id=worker_id(run.worker) if run.worker else "",
        least_age_s=run.least_age_s,
        most_age_s=run.most_age_s,
    )


def _found(note: AttemptNote) -> Found | None:
    timings, block_tokens = note.prefill, note.request.block_tokens
    if timings is None:
        return None
    cached_blocks, fetched_blocks = timings.found_tokens // block_tokens, timings.fetched_tokens // block_tokens
    loaded_blocks = timings.restored_tokens // block_tokens
    return Found(cached_blocks, fetched_blocks, note.placement.fetch_from or "", loaded_blocks)


def _elsewhere(decision: Decision | None, computing: str) -> Held:
    """The worker that had most of the prompt when it was placed, beside the one that computes it."""
    others = [view for view in (decision.workers if decision else ()) if view.endpoint != computing]
    best = max(others, key=lambda view: view.ready_blocks, default=None)
    return NOWHERE if best is None or not best.ready_blocks else Held(best.endpoint, best.ready_blocks)


def colocated_of(note: AttemptNote) -> ColocatedPrefill | None:
    """What was to be expected at the placement; None where nothing was known, or there is no answer."""
    workers = note.decision.workers if note.decision is not None and not note.request.pooled else ()
    decode = next((view for view in workers if view.endpoint == note.placement.decode), None)
    return None if decode is None else colocated_prefill(note.request, decode)


def _colocated(note: AttemptNote, local_prefills: LocalPrefills, worker_id: WorkerId) -> admin_pb2.ColocatedPrefill:
    message = admin_pb2.ColocatedPrefill(
        worker_id=worker_id(note.placement.decode), is_local=not note.placement.computes_for_others
    )
    if note.first_step_s is not None:
        message.measured_ttft_ms = (note.first_step_s - note.placed_s) * 1e3
    if (predicted := colocated_of(note)) is not None:
        message.basis, message.ttft_ms, message.wait_ms = predicted.basis.value, predicted.ttft_ms, predicted.wait_ms
        message.prompt_tokens = predicted.prompt_tokens
        message.answers, message.answers_gap_ms = predicted.answers, predicted.answers_gap_ms
    error = local_prefills.error(message.prompt_tokens)
    if error is not None:
        message.checked_requests, message.checked_tokens = error.requests, error.median_tokens
        message.median_error, message.median_ratio = error.median_error, error.median_ratio
    return message

"""Conversion of the fate of a prompt's cached blocks, and of the cost of its prefill on decode, into protobuf."""

from collections.abc import Callable

from baton.protos import admin_pb2
from baton.router.cache.autopsy import NOWHERE, FateRun, Found, Held, autopsy
from baton.router.placement.colocated import LocalPrediction, LocalPrefills, colocated_prefill
from baton.router.placement.decide import Decision
from baton.router.trace.record import AttemptNote

WorkerId = Callable[[str], str]
"""Name of the worker at an endpoint."""


def cache_autopsy(note: AttemptNote, number: int, salted: Held, worker_id: WorkerId) -> admin_pb2.CacheAutopsy:
    """Return the fate of each block of the prompt. `number`: attempt number. `salted`: prefix under another salt."""
    request, computing, look = note.request, note.placement.computing, note.look
    runs = autopsy(request.reusable_blocks, look, _found(note), _elsewhere(note.decision, computing), salted)
    return admin_pb2.CacheAutopsy(
        worker_id=worker_id(computing),
        attempt=number,
        block_tokens=request.block_tokens,
        runs=[_run(run, worker_id) for run in runs],
        known_s=look.known_s if look is not None else 0.0,
        expected_blocks=look.hit_blocks if look is not None else 0,
    )


def _run(run: FateRun, worker_id: WorkerId) -> admin_pb2.BlockRun:
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
    """Return the worker, other than `computing`, with the longest cached prefix of the prompt at the placement."""
    others = [view for view in (decision.workers if decision else ()) if view.endpoint != computing]
    best = max(others, key=lambda view: view.ready_blocks, default=None)
    return NOWHERE if best is None or not best.ready_blocks else Held(best.endpoint, best.ready_blocks)


def colocated_of(note: AttemptNote) -> LocalPrediction | None:
    """Return the prediction of the prompt's prefill on its decode worker.

    None if that worker was not known at the placement, or the request has no answer to decode.
    """
    workers = note.decision.workers if note.decision is not None and not note.request.pooled else ()
    decode = next((view for view in workers if view.endpoint == note.placement.decode), None)
    return None if decode is None else colocated_prefill(note.request, decode)


def colocated_message(
    note: AttemptNote, local_prefills: LocalPrefills, worker_id: WorkerId
) -> admin_pb2.ColocatedPrefill:
    """Return the predicted prefill on the decode worker, the measured TTFT, and the error of earlier predictions."""
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

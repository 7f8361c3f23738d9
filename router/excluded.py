"""Why a worker that a placement considered was no candidate. In words; the decision lists the candidates."""

from router.candidates import PlacementRequest, WorkerView
from router.decision import Decision
from router.worker import WorkerRole


def excluded(request: PlacementRequest, decision: Decision, view: WorkerView) -> str:
    """Empty for a candidate."""
    weighed = decision.decode if view.role is WorkerRole.DECODE else decision.prefill
    if weighed is not None and any(view is each for each in weighed.workers):
        return ""
    if not request.suits(view):
        return "it has another model, or not this adapter"
    if view.role is WorkerRole.PREFILL:
        failed = view.endpoint in request.avoided_prefill
        return "it failed this request before" if failed else "transfers from it to each decode worker with credit fail"
    return _without_credit(request, view) or _with_credit(request, decision, view)


def _without_credit(request: PlacementRequest, view: WorkerView) -> str:
    """As `router.placement.those_with_credit`."""
    if request.longest_blocks > view.total_blocks:
        return "its pool is smaller than the longest answer"
    if request.choices > view.total_slots:
        return "its batch has fewer slots than the request has choices"
    if view.used_slots + request.choices > view.limit_slots:
        return "no slot is free in its batch"
    is_whole = view.used_blocks == 0 and view.limit_blocks >= view.total_blocks
    if view.used_blocks + request.charged_blocks > view.limit_blocks and not is_whole:
        return "no credit for its blocks"
    return ""


def _with_credit(request: PlacementRequest, decision: Decision, view: WorkerView) -> str:
    computing = decision.prefill
    if computing is not None and (computing.worker.endpoint, view.endpoint) in request.apart:
        return "transfers to it from the prefill worker that was taken fail"
    return "the request stays with the decode worker that it had"

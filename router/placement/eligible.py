"""Reasons why a worker cannot take a request, or may take it only if no other worker can.

decide.py filters workers by these functions, and `baton why` shows the reasons that they return.
"""

from collections.abc import Sequence
from enum import StrEnum

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.rates import prompt_tokens_per_s
from baton.router.types.placement import PlacementRequest, WorkerView
from baton.versions import POOLING_PROTOCOL

POOLED_AHEAD_MS = 500.0
"""Maximum queueing time of a pooled prompt on its worker.

Further pooled prompts wait in the router, where tenants take turns, so that other prompts find short queues on workers.
"""


class Reason(StrEnum):
    """Reason why a worker is not a candidate. Operators read the values in `baton why`."""

    OTHER_MODEL = "it has another model, other weights, or not this adapter"
    TOO_FEW_SLOTS = "its batch has fewer slots than the request has choices"
    POOL_TOO_SMALL = "its pool is smaller than the longest answer"
    NO_FREE_SLOT = "no slot is free in its batch"
    NO_CREDIT = "no credit for its blocks"
    NO_VECTORS = "its release makes no vectors"
    PROMPTS_AHEAD = "the prompts ahead of this one take too long"
    NO_ANSWER = "there is no answer to decode"
    FAILED_BEFORE = "it failed this request before"
    BROKEN_PAIRS = "transfers from it to each decode worker with credit fail"
    BROKEN_PAIR = "transfers to it from the chosen prefill worker fail"
    NOT_PREFERRED = "the request stays with the decode worker that it had"


NEVER = frozenset({Reason.OTHER_MODEL, Reason.TOO_FEW_SLOTS, Reason.POOL_TOO_SMALL})
"""Reasons that do not disappear by waiting."""

_DECODE = WorkerRole.DECODE  # looking up an enum member is slow in a hot path


def ineligible(request: PlacementRequest, worker: WorkerView) -> Reason | None:
    """Return why the worker cannot serve the request in its role now; None if it can."""
    has_weights = worker.has_own_weights if request.adapter is None else request.adapter in worker.adapters
    if worker.fingerprint != request.fingerprint or not has_weights:
        return Reason.OTHER_MODEL
    if request.pooled:
        return _cannot_pool(request, worker)
    return _without_credit(request, worker) if worker.role is _DECODE else None


def _cannot_pool(request: PlacementRequest, worker: WorkerView) -> Reason | None:
    """Return why the worker cannot compute a vector now; None if it can.

    Credit is not needed, since no blocks are kept.
    """
    if worker.protocol < POOLING_PROTOCOL:
        return Reason.NO_VECTORS
    if request.longest_blocks > worker.total_blocks:
        return Reason.POOL_TOO_SMALL
    if worker.role is _DECODE:
        ahead_ms = worker.pending_prompt_tokens * 1e3 / prompt_tokens_per_s(worker)
    else:
        ahead_ms = worker.tokens_in_flight * 1e3 / worker.rates.prefill_tokens_per_s
    return Reason.PROMPTS_AHEAD if ahead_ms > POOLED_AHEAD_MS else None


def _without_credit(request: PlacementRequest, worker: WorkerView) -> Reason | None:
    """Return why this router's credit on a decode worker does not cover the request; None if it does.

    If the charge of a request exceeds the worker's total blocks, credit for all blocks covers the request, provided
    that this router has no other request on the worker.

    Credit beyond this router's share can be borrowed (router/admission/queue.py).
    """
    choices, used_blocks, limit_blocks = request.choices, worker.used_blocks, worker.limit_blocks
    if choices > worker.total_slots:
        return Reason.TOO_FEW_SLOTS
    if request.longest_blocks > worker.total_blocks:
        return Reason.POOL_TOO_SMALL
    if worker.used_slots + choices > worker.limit_slots:
        return Reason.NO_FREE_SLOT
    if used_blocks + request.charged_blocks > limit_blocks and (used_blocks or limit_blocks < worker.total_blocks):
        return Reason.NO_CREDIT
    return None


def deferred_prefill(request: PlacementRequest, worker: WorkerView, decode: Sequence[WorkerView] = ()) -> Reason | None:
    """Return why a prefill worker is deferred, that is, used only if all others are deferred, too; None if it is not.

    `decode`: candidate decode workers; empty for a pooled request.
    """
    if worker.endpoint in request.avoided_prefill:
        return Reason.FAILED_BEFORE
    broken = request.broken_pairs
    if broken and decode and all((worker.endpoint, each.endpoint) in broken for each in decode):
        return Reason.BROKEN_PAIRS
    return None


def deferred_decode(request: PlacementRequest, worker: WorkerView, prefill: WorkerView | None) -> Reason | None:
    """Return BROKEN_PAIR if transfers from `prefill` to this decode worker fail, so that it is deferred; else None."""
    is_broken = prefill is not None and (prefill.endpoint, worker.endpoint) in request.broken_pairs
    return Reason.BROKEN_PAIR if is_broken else None

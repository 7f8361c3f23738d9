"""Causes of a stall (a late token of an answer). Workers report causes on their side; routers add causes on theirs."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class StallCause(StrEnum):
    """Cause of a delay of an answer's token beyond the time of a usual step."""

    PROMPTS = "prompt_tokens"  # prompt of another request in the same step
    BATCH = "larger_batch"  # more sequences in the step than usual
    CONTEXTS = "longer_contexts"  # more tokens to attend to than usual
    DRAFTS = "drafted_tokens"  # drafts computed in the same step
    COPIES = "block_copies"  # copy on write, and swapping of preempted sequences
    PREEMPTION = "preemption"  # the sequence was preempted or is recomputed
    MASK = "late_mask"  # the mask of structured output was not ready
    COLLECTION = "garbage_collection"
    LOCK = "interpreter_lock"  # another Python thread of the worker held the GIL
    CPU_WAIT = "cpu_wait"  # the engine waited for a free core: another process, or steal time
    STOPPED = "stopped"  # the worker was not ready to run: SIGSTOP, frozen machine, page fault
    SLOWER = "slower_computation"  # the same work took longer: memory bandwidth, caches, clock rate or device
    IDLE = "engine_idle"  # the engine could run no step
    LENT = "lent_cores"  # a prefill worker computed an urgent prompt on the cores
    WORKER_LOOP = "worker_event_loop"  # the step had finished, but its tokens waited to be sent
    ROUTER_LOOP = "router_event_loop"  # the tokens had arrived, but the router was busy
    NETWORK = "network"  # transmission between worker and router
    RECOVERY = "recovery"  # another worker took the request over
    UNKNOWN = "unknown"  # cause reported by a newer worker, unknown here


class CausePart(NamedTuple):
    """Part of the gap before a token, with its cause. `request_id`: id of the request that caused it; empty if none."""

    cause: StallCause
    ms: float
    request_id: str = ""
    detail: str = ""  # text for people: number of tokens, blocks or answers, or the lost worker


WORTH_NAMING_MS = 0.05


def joined_causes(parts: Iterable[CausePart]) -> list[CausePart]:
    """Sum the parts by cause and request. Return the sums, longest first, without those under WORTH_NAMING_MS.

    A sum keeps the detail of its largest part.
    """
    joined: dict[tuple[StallCause, str], CausePart] = {}
    for part in parts:
        known = joined.get((part.cause, part.request_id), part)
        if known is not part:
            part = max(part, known, key=_ms)._replace(ms=part.ms + known.ms)
        joined[part.cause, part.request_id] = part
    return sorted((part for part in joined.values() if part.ms >= WORTH_NAMING_MS), key=_ms, reverse=True)


def _ms(part: CausePart) -> float:
    return part.ms

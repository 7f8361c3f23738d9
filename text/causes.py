"""Causes of a stall: why a token of an answer came late. Workers name causes, routers add theirs."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class StallCause(StrEnum):
    """Cause of time spent on anything other than a usual step of the answer."""

    PROMPTS = "prompt_tokens"  # prompt of another request in the same step
    BATCH = "larger_batch"  # more sequences in the step than usual
    CONTEXTS = "longer_contexts"  # more tokens to attend to than usual
    DRAFTS = "drafted_tokens"  # drafts computed in the same step
    COPIES = "block_copies"  # copy on write, and swapping of preempted sequences
    PREEMPTION = "preemption"  # the sequence was preempted or is recomputed
    MASK = "late_mask"  # mask of a structured output
    COLLECTION = "garbage_collection"
    LOCK = "interpreter_lock"  # another Python thread of the worker held the GIL
    CPU_WAIT = "cpu_wait"  # the engine was runnable without a free core: another process, or steal time
    STOPPED = "stopped"  # the worker was not runnable: SIGSTOP, frozen machine, page fault
    SLOWER = "slower_computation"  # the same work took longer: memory bandwidth, caches, clock rate or device
    IDLE = "engine_idle"  # no step was possible
    WORKER_LOOP = "worker_event_loop"  # the step was done and its tokens were not sent yet
    ROUTER_LOOP = "router_event_loop"  # the tokens had arrived and the router was busy
    NETWORK = "network"  # between worker and router
    RECOVERY = "recovery"  # another worker took over
    UNKNOWN = "unknown"  # cause of a newer worker


class CausePart(NamedTuple):
    """Part of a gap. `request_id`: responsible request, empty if there is none."""

    cause: StallCause
    ms: float
    request_id: str = ""
    detail: str = ""  # for people: number of tokens, blocks or answers; or the lost worker


WORTH_NAMING_MS = 0.05


def joined_causes(parts: Iterable[CausePart]) -> list[CausePart]:
    """Return the parts summed by cause and request, longest first, without those under WORTH_NAMING_MS.

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

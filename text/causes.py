"""Causes of a stall: why the next token of an answer came late. Workers name them, routers add theirs."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class StallCause(StrEnum):
    """Each names time that was spent on something other than a usual step of this answer."""

    PROMPTS = "prompt_tokens"  # of another request, computed in the same step
    BATCH = "larger_batch"  # more answers in a step than usual
    CONTEXTS = "longer_contexts"  # more tokens to attend to than usual
    DRAFTS = "drafted_tokens"  # computed in the same step, of this answer or of others
    COPIES = "block_copies"  # copy on write, and blocks of preempted answers on their way to or from the host
    PREEMPTION = "preemption"  # the answer gave up its blocks to others, or is computed again after that
    MASK = "late_mask"  # the grammar of a structured output
    COLLECTION = "garbage_collection"
    LOCK = "interpreter_lock"  # another thread of the worker ran Python
    CPU_WAIT = "cpu_wait"  # the engine could run and no core was free: another process, or the hypervisor's steal
    STOPPED = (
        "stopped"  # the worker's process neither ran nor waited for a core: SIGSTOP, a frozen machine, a page fault
    )
    SLOWER = "slower_computation"  # the same work took longer: memory bandwidth, caches, clock rate, or the device
    IDLE = "engine_idle"  # no step could run
    WORKER_LOOP = "worker_event_loop"  # the step had ended and its tokens were not sent yet
    ROUTER_LOOP = "router_event_loop"  # the tokens had come and the router was busy
    NETWORK = "network"  # between the two
    RECOVERY = "recovery"  # another worker took over
    UNKNOWN = "unknown"  # a newer worker's cause


class CausePart(NamedTuple):
    """A part of a gap. `request_id` is of the request to blame, empty where there is none."""

    cause: StallCause
    ms: float
    request_id: str = ""
    detail: str = ""  # for people: how many tokens, blocks, answers; the worker that was lost


WORTH_NAMING_MS = 0.05


def joined_causes(parts: Iterable[CausePart]) -> list[CausePart]:
    """Parts of one cause and culprit added up, with the detail of the largest. Longest first, without tiny ones."""
    joined: dict[tuple[StallCause, str], CausePart] = {}
    for part in parts:
        known = joined.get((part.cause, part.request_id), part)
        if known is not part:
            part = max(part, known, key=_ms)._replace(ms=part.ms + known.ms)
        joined[part.cause, part.request_id] = part
    return sorted((part for part in joined.values() if part.ms >= WORTH_NAMING_MS), key=_ms, reverse=True)


def _ms(part: CausePart) -> float:
    return part.ms

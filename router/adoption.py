"""Answers that decode workers still make for a router that is gone: waits for those workers, and takes them over.

The worker sends all of an answer again, under a new attempt: for the rest of the router it is an attempt like any
other. It fails if the worker no longer keeps the answer; another attempt then continues behind the client's tokens.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from router.attempt import Attempt
from router.explanation import AttemptNote
from router.journal import Place
from router.lifecycle import Lifecycle
from router.placement import Placement
from router.placing import placement_request
from router.request import PreparedRequest
from router.scheduling import Scheduling
from router.timeline import Timeline

WAIT_S = 1.0
"""For the session with a decode worker: this router may just have started. Workers keep answers for longer."""
_LOOK_S = 0.02


async def within_reach(places: Sequence[Place], scheduling: Scheduling) -> tuple[Place, ...]:
    """Those of them whose workers are connected, WAIT_S from now at the latest."""
    until_s = time.monotonic() + WAIT_S
    while True:
        reached = tuple(place for place in places if _is_connected(place.endpoint, scheduling))
        if len(reached) == len(places) or time.monotonic() > until_s:
            return reached
        await asyncio.sleep(_LOOK_S)


def _is_connected(endpoint: str, scheduling: Scheduling) -> bool:
    worker = scheduling.cluster.find(endpoint)
    return worker is not None and worker.connected


def placed(
    whole: PreparedRequest, parts: Sequence[PreparedRequest], places: Sequence[Place]
) -> tuple[tuple[PreparedRequest, Place | None], ...]:
    """Each part with the place where it is made, if any; where one makes all choices, the whole request with that."""
    for place in places:
        if place.choices > 1:
            return ((whole, place),)
    by_choice = {place.first_choice: place for place in places}
    return tuple((part, by_choice.get(part.first_choice)) for part in parts)


def place_of(attempt: Attempt, part: PreparedRequest, adopted: Place | None) -> Place:
    """Where another router may take this attempt over."""
    if adopted is not None:
        return replace(adopted, attempt_id=attempt.attempt_id)
    endpoint, made = attempt.placement.decode, part.choices
    return Place(endpoint, attempt.attempt_id, made.start, len(made), part.answered_tokens)


def adopt(
    place: Place, part: PreparedRequest, scheduling: Scheduling, timeline: Timeline, lifecycle: Lifecycle
) -> Attempt:
    """An attempt at `part`, charged to its worker and not yet sent to it."""
    attempt_id, now = next(scheduling.attempt_ids), time.monotonic()
    placement = Placement(
        prefill=None,
        decode=place.endpoint,
        prefill_hit_tokens=0,
        decode_hit_tokens=len(part.token_ids),  # nothing of it is computed
        prefill_tokens_in_flight=0,
        decode_tokens_in_flight=0,
        prefill_candidates=0,
        decode_candidates=1,
        policy="adopted",
    )
    request = placement_request(part, attempt_id)
    scheduling.queue.adopted(attempt_id, placement, request, part.block_hashes)
    answered_tokens = part.answered_tokens
    note = AttemptNote(request, placement, None, now, now, attempt_id=attempt_id, answered_tokens=answered_tokens)
    timeline.begin_attempt(note, now)
    return Attempt(attempt_id, placement, part, scheduling.cluster, scheduling.fleet, timeline, lifecycle)

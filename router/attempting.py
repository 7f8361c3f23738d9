"""How the attempts at one request reach workers: each waits for room, is sent to both workers, and leaves blocks."""

import asyncio
import secrets
import time

from router import session_wire
from router.attempt import Attempt
from router.explanation import KEPT_CANDIDATES, AttemptNote
from router.journal import Place
from router.lifecycle import Lifecycle
from router.placement import Placement
from router.placing import placement_request
from router.recovery import Recovery
from router.replay import replay
from router.request import PreparedRequest
from router.resuming import Resumption
from router.scheduling import Scheduling
from router.tickets import BEGUN_PRIORITY, Standing
from router.timeline import Timeline
from service.errors import DeadlineExceeded

_TRANSFER_ID_BYTES = 16
_MAX_TIME_LEFT_MS = 2**32 - 1


class Attempting:
    """Of one request. `deadline_s` is a reading of the monotonic clock."""

    def __init__(
        self,
        request: PreparedRequest,
        scheduling: Scheduling,
        timeline: Timeline,
        lifecycle: Lifecycle,
        recovery: Recovery,
        deadline_s: float,
        traceparent: str,
        resumption: Resumption | None,
    ) -> None:
        self._request = request
        self._scheduling = scheduling
        self._timeline = timeline
        self._lifecycle = lifecycle
        self._recovery = recovery
        self._deadline_s = deadline_s
        self._traceparent = traceparent
        self._resumption = resumption

    async def place(self, part: PreparedRequest) -> Attempt:
        """Waits for room for it. Raises: as AdmissionQueue.admit, and DeadlineExceeded."""
        scheduling, recovery = self._scheduling, self._recovery
        attempt_id, began_s = next(scheduling.attempt_ids), time.monotonic()
        apart = scheduling.cluster.pairs.apart(began_s)
        wanted = placement_request(part, attempt_id, recovery.avoided_prefill, apart, recovery.preferred_decode)
        try:
            async with asyncio.timeout(self.time_left_s()):
                # A prompt whose log-probabilities are wanted is computed in full: cached blocks do not matter.
                cacheable = part.block_hashes if part.sampling.prompt_logprobs is None else ()
                admitted = await scheduling.queue.admit(attempt_id, wanted, cacheable, self._standing())
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the request was pending") from None
        placed_s = time.monotonic()
        note = AttemptNote(
            wanted,
            admitted.placement,
            admitted.decision.kept(KEPT_CANDIDATES),
            began_s,
            placed_s,
            attempt_id=attempt_id,
            choice=None if part is self._request else part.first_choice,
            answered_tokens=part.answered_tokens,
        )
        self._timeline.begin_attempt(note, admitted.route_began_s)
        cluster, fleet = scheduling.cluster, scheduling.fleet
        return Attempt(attempt_id, admitted.placement, part, cluster, fleet, self._timeline, self._lifecycle)

    def dispatch(self, attempt: Attempt, place: Place | None) -> None:
        tag = session_wire.Tag(
            attempt_id=attempt.attempt_id,
            transfer_id=secrets.token_bytes(_TRANSFER_ID_BYTES),
            fetch_id=secrets.token_bytes(_TRANSFER_ID_BYTES),
            time_left_ms=max(1, min(round(self.time_left_s() * 1e3), _MAX_TIME_LEFT_MS)),
            traceparent=self._traceparent,
        )
        if place is None or self._resumption is None:
            attempt.dispatch(tag)
        else:
            attempt.adopt(tag, self._resumption.router_id, place.attempt_id)
        self._timeline.dispatched(time.monotonic())

    def record_answer(self, placement: Placement, part: PreparedRequest) -> None:
        """The decode worker keeps the blocks of each choice: the conversation's next turn had better go there.

        Most workers report them themselves. The last token of a choice has no KV yet.
        """
        request = self._request
        if self._scheduling.cluster.caches.follows(placement.decode):
            return
        for choice in part.choices:
            made = replay(request, choice, self._lifecycle.answer(choice)[:-1])
            self._scheduling.cluster.answered(placement.decode, made.block_hashes)

    def time_left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def _standing(self) -> Standing:
        valid = self._request.valid
        priority = BEGUN_PRIORITY if self._timeline.attempts or self._resumption else valid.priority
        return Standing(valid.tenant, priority, self._deadline_s)

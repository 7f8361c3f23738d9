"""One request from its tokens to its end: waits for room, dispatches, follows the answer, tries once more if it may."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from router import session_wire
from router.admission import AdmissionQueue
from router.answer import Answer, AnswerEvent
from router.attempt import Attempt
from router.cluster import Cluster
from router.detokenizer import Detokenizer
from router.failures import RETRYABLE, AttemptFailed, error_of
from router.fleet import Fleet
from router.lifecycle import InconsistentOutput, Released
from router.placement import PlacementRequest
from router.request import PreparedRequest
from router.timeline import Timeline
from service.errors import DeadlineExceeded, Internal

logger = logging.getLogger(__name__)

_TRANSFER_ID_BYTES = 16
_ATTEMPTS = 2
_RETRY_PAUSE_S = 0.1  # for the loss of a worker, seen by its peer first, to be seen here too
_MAX_TIME_LEFT_MS = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Scheduling:
    """What every request needs to be placed and followed. `attempt_ids` never repeat within this process."""

    cluster: Cluster
    fleet: Fleet
    queue: AdmissionQueue
    attempt_ids: Iterator[int]


class Generation:
    """Follows one request; `answer` and `timeline` may be read at any time."""

    def __init__(
        self,
        request: PreparedRequest,
        scheduling: Scheduling,
        timeline: Timeline,
        new_detokenizer: Callable[[], Detokenizer],
        deadline_s: float,
        traceparent: str = "",
    ) -> None:
        """`deadline_s` is a reading of the monotonic clock."""
        sampling = request.sampling
        self.answer = Answer(sampling.n, request.valid.stop, sampling.rules.min_tokens, new_detokenizer)
        self.timeline = timeline
        self._request = request
        self._scheduling = scheduling
        self._deadline_s = deadline_s
        self._traceparent = traceparent
        self._begun = False
        self._avoided_prefill: frozenset[str] = frozenset()

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """Deltas and ends of the choices, as they come; `answer.done` turns true before the last of them.

        Closing this iterator, at any time, frees everything on both workers. Raises: BatonError.
        """
        for last in (attempt == _ATTEMPTS for attempt in range(1, _ATTEMPTS + 1)):
            try:
                async with aclosing(self._attempt()) as events:
                    async for event in events:
                        yield event
                return
            except AttemptFailed as failure:
                if last or self._begun or failure.failed.reason not in RETRYABLE:
                    raise error_of(failure.failed, self._request.valid.request_id) from failure
                logger.info("another attempt: %s", failure)
                if self.timeline.placement is not None:
                    self._avoided_prefill |= {self.timeline.placement.prefill}
                await asyncio.sleep(_RETRY_PAUSE_S)
            except InconsistentOutput as error:
                logger.exception("a worker broke the protocol")
                raise Internal("INCONSISTENT_OUTPUT", self._request.valid.request_id) from error

    async def _attempt(self) -> AsyncGenerator[AnswerEvent, None]:
        events: tuple[AnswerEvent, ...] = ()
        with await self._place() as attempt:
            self._dispatch(attempt)
            while not self.answer.done:
                events = self._take(await self._within_deadline(attempt))
                if not self.answer.done:
                    for event in events:
                        yield event
            await attempt.landing()
            self.timeline.ended_s = time.monotonic()
        for event in events:  # the last ones: the workers are free already, whether or not the client reads on
            yield event

    async def _place(self) -> Attempt:
        scheduling, request = self._scheduling, self._request
        attempt_id = next(scheduling.attempt_ids)
        placement_request = PlacementRequest(
            fingerprint=request.fingerprint,
            block_tokens=request.block_tokens,
            prompt_tokens=len(request.token_ids),
            max_tokens=request.sampling.max_tokens,
            choices=request.sampling.n,
            turn=attempt_id,
            avoided_prefill=self._avoided_prefill,
        )
        try:
            async with asyncio.timeout(self._time_left_s()):
                admitted = await scheduling.queue.admit(attempt_id, placement_request, request.block_hashes)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the request waited for room") from None
        self.timeline.begin_attempt(admitted.placement, admitted.route_began_s)
        return Attempt(attempt_id, admitted.placement, request, scheduling.cluster, scheduling.fleet, self.timeline)

    def _dispatch(self, attempt: Attempt) -> None:
        tag = session_wire.Tag(
            attempt_id=attempt.attempt_id,
            transfer_id=secrets.token_bytes(_TRANSFER_ID_BYTES),
            time_left_ms=max(1, min(round(self._time_left_s() * 1e3), _MAX_TIME_LEFT_MS)),
            traceparent=self._traceparent,
        )
        attempt.dispatch(tag)
        self.timeline.sent_s = time.monotonic()

    async def _within_deadline(self, attempt: Attempt) -> Released:
        try:
            async with asyncio.timeout(self._time_left_s()):
                return await attempt.next()
        except TimeoutError:
            raise DeadlineExceeded from None

    def _take(self, released: Released) -> tuple[AnswerEvent, ...]:
        self._begun = True
        began_s = time.monotonic()
        events = self.answer.take(released)
        now = time.monotonic()
        self.timeline.detokenise_ms += (now - began_s) * 1e3
        if self.timeline.first_token_s is None and events:
            self.timeline.first_token_s = now
        return events

    def _time_left_s(self) -> float:
        return self._deadline_s - time.monotonic()

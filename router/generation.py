"""One request from its tokens to its end: waits for room, dispatches, follows the answer, tries once more if it may."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from router import session_wire
from router.admission import BEGUN_PRIORITY, AdmissionQueue, Standing
from router.answer import Answer, AnswerEvent
from router.attempt import Attempt
from router.best_of import BestOf
from router.block_hashing import block_hashes
from router.cluster import Cluster
from router.detokenizer import Detokenizer
from router.events import FailureReason, PromptScores
from router.explanation import AttemptNote, candidates_of
from router.failures import RETRYABLE, AttemptFailed, error_of
from router.fleet import Fleet
from router.lifecycle import InconsistentOutput, Lifecycle, NotRepeated, Released
from router.placement import Placement, PlacementRequest
from router.policies.prefix_hash import early_block
from router.prompt_echo import PromptEcho, PromptPart
from router.refusals import RETRY_AFTER_S
from router.request import PreparedRequest
from router.timeline import Timeline
from service.errors import DeadlineExceeded, Internal, Unavailable

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
        is_usual: bool = True,
    ) -> None:
        """`deadline_s` is a reading of the monotonic clock. `is_usual`: how long it takes says how long others will."""
        sampling = request.sampling
        valid = request.valid
        made = Answer(sampling.n, valid.stop, sampling.rules.min_tokens, new_detokenizer)
        self.answer = BestOf(made, valid.n, valid.logprobs is not None) if sampling.n > valid.n else made
        self.timeline = timeline
        timeline.streams = valid.streams
        self._request = request
        self._scheduling = scheduling
        self._deadline_s = deadline_s
        self._traceparent = traceparent
        self._is_usual = is_usual
        self._lifecycle = Lifecycle(sampling.n)
        scored = sampling.prompt_logprobs is not None
        self._echo = PromptEcho(request.token_ids, request.echo_text, scored) if scored or valid.echo else None
        self._avoided_prefill: frozenset[str] = frozenset()

    async def events(self) -> AsyncGenerator[AnswerEvent | PromptPart, None]:
        """Deltas and ends of the choices, as they come; `answer.done` turns true before the last of them.

        Where the prompt is to be told back, it is before the first of them.

        Closing this iterator, at any time, frees everything on both workers. Raises: BatonError.
        """
        for last in (attempt == _ATTEMPTS for attempt in range(1, _ATTEMPTS + 1)):
            try:
                async with aclosing(self._attempt()) as events:
                    async for event in events:
                        yield event
                return
            except AttemptFailed as failure:
                self.timeline.take_failure(failure.failed)
                if last or not self._lifecycle.at_first_token or failure.failed.reason not in RETRYABLE:
                    raise error_of(failure.failed, self._request.valid.request_id) from failure
                logger.info("another attempt: %s", failure)
                self._avoid(failure)
                await asyncio.sleep(_RETRY_PAUSE_S)
            except NotRepeated as error:
                message = "a worker failed, and another one did not repeat the token that had gone out"
                raise Unavailable(message, "NOT_REPEATED", RETRY_AFTER_S) from error
            except InconsistentOutput as error:
                logger.exception("a worker broke the protocol")
                raise Internal("INCONSISTENT_OUTPUT", self._request.valid.request_id) from error

    async def _attempt(self) -> AsyncGenerator[AnswerEvent | PromptPart, None]:
        events: Sequence[AnswerEvent | PromptPart] = ()
        with await self._place() as attempt:
            deadline = asyncio.get_running_loop().call_later(self._time_left_s(), attempt.expire)
            try:
                self._dispatch(attempt)
                while not self.answer.done:
                    events = self._take(await attempt.next())
                    if not self.answer.done:
                        for event in events:
                            yield event
                await attempt.landing()
            except TimeoutError:
                raise DeadlineExceeded from None
            finally:
                deadline.cancel()
                self._scheduling.queue.ended(attempt.attempt_id, self.answer.done and self._is_usual)
            self.timeline.ended_s = time.monotonic()
            asyncio.get_running_loop().call_soon(self._record_answer, attempt.placement)
        for event in events:  # the last ones: the workers are free already, whether or not the client reads on
            yield event

    async def _place(self) -> Attempt:
        scheduling, request = self._scheduling, self._request
        attempt_id, began_s = next(scheduling.attempt_ids), time.monotonic()
        placement_request = PlacementRequest(
            fingerprint=request.fingerprint,
            block_tokens=request.block_tokens,
            prompt_tokens=len(request.token_ids),
            max_tokens=request.sampling.max_tokens,
            choices=request.sampling.places,
            turn=attempt_id,
            avoided_prefill=self._avoided_prefill,
            adapter=request.adapter,
            prefix=early_block(request.block_hashes, request.block_tokens),
            session=request.valid.session or None,
        )
        try:
            async with asyncio.timeout(self._time_left_s()):
                # Who wants the prompt's log-probabilities has it computed: what is cached does not matter.
                cacheable = request.block_hashes if request.sampling.prompt_logprobs is None else ()
                admitted = await scheduling.queue.admit(attempt_id, placement_request, cacheable, self._standing())
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the request waited for room") from None
        candidates = candidates_of(admitted.placement, admitted.workers)
        placed_s = time.monotonic()
        note = AttemptNote(placement_request, admitted.placement, candidates, began_s, placed_s)
        self.timeline.begin_attempt(note, admitted.route_began_s)
        cluster, fleet = scheduling.cluster, scheduling.fleet
        return Attempt(attempt_id, admitted.placement, request, cluster, fleet, self.timeline, self._lifecycle)

    def _standing(self) -> Standing:
        valid = self._request.valid
        priority = BEGUN_PRIORITY if self.timeline.attempts else valid.priority
        return Standing(valid.tenant, priority, self._deadline_s)

    def _avoid(self, failure: AttemptFailed) -> None:
        """The next attempt goes to another prefill worker where this one failed, or its KV could not be read."""
        prefill = self.timeline.placement.prefill if self.timeline.placement is not None else None
        if prefill is not None and (
            failure.failed.endpoint == prefill or failure.failed.reason is FailureReason.TRANSFER
        ):
            self._avoided_prefill |= {prefill}

    def _dispatch(self, attempt: Attempt) -> None:
        tag = session_wire.Tag(
            attempt_id=attempt.attempt_id,
            transfer_id=secrets.token_bytes(_TRANSFER_ID_BYTES),
            fetch_id=secrets.token_bytes(_TRANSFER_ID_BYTES),
            time_left_ms=max(1, min(round(self._time_left_s() * 1e3), _MAX_TIME_LEFT_MS)),
            traceparent=self._traceparent,
        )
        attempt.dispatch(tag)
        self.timeline.dispatched(time.monotonic())

    def _take(self, arrived: PromptScores | tuple[Released, ...]) -> Sequence[AnswerEvent | PromptPart]:
        if isinstance(arrived, PromptScores):
            return self._echo.take(arrived) if self._echo is not None else ()
        began_s = time.monotonic()
        parts = self._echo.rest() if self._echo is not None else ()
        events = [event for released in arrived for event in self.answer.take(released)]
        now = time.monotonic()
        self.timeline.detokenise_ms += (now - began_s) * 1e3
        if self.timeline.first_token_s is None and events:
            self.timeline.first_token_s = now
        return [*parts, *events] if parts else events

    def _record_answer(self, placement: Placement) -> None:
        """The decode worker keeps the blocks of each choice: the conversation's next turn had better go there.

        Most workers tell so themselves. The last token of a choice has no KV yet.
        """
        request = self._request
        if self._scheduling.cluster.caches.follows(placement.decode):
            return
        parent = request.block_hashes[-1] if request.block_hashes else request.cache_root
        tail = request.token_ids[len(request.block_hashes) * request.block_tokens :]
        for answer in self._lifecycle.answers:
            hashes = block_hashes(parent, (*tail, *answer[:-1]), request.block_tokens)
            self._scheduling.cluster.answered(placement.decode, (*request.block_hashes, *hashes))

    def _time_left_s(self) -> float:
        return self._deadline_s - time.monotonic()

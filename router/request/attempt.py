"""The attempts at one request: their room, their resources on workers, their events, their release.

The worker sends all of an answer again, under a new attempt: for the rest of the router it is an attempt like any
other. It fails if the worker no longer keeps the answer; another attempt then continues behind the client's tokens.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from baton.router.admission.queue import BEGUN_PRIORITY, RequestClass
from baton.router.fleet import wire as session_wire
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.inbox import Arrival
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import Placement
from baton.router.placement.views import placement_request
from baton.router.request.journal import AttemptLocation
from baton.router.request.resume import Resumption
from baton.router.request.retry import PREFILL_GONE, AttemptFailed, Recovery, Scheduling, replay
from baton.router.request.tokens import InconsistentOutput, TokenStream
from baton.router.trace.decision_record import KEPT_CANDIDATES, AttemptNote
from baton.router.trace.timeline import Timeline
from baton.router.types.events import (
    Failed,
    FailureReason,
    FirstStep,
    KvReceived,
    NewTokens,
    PrefillTimings,
    PromptScores,
    SequenceOutput,
)
from baton.router.types.request import PreparedRequest
from baton.service.errors import DeadlineExceeded

_LANDED_WAIT_S = 0.1  # KvReceived travels beside the tokens; it may come just after the last


class Attempt:
    """Owns the charges and the work on its workers until it is left (`with`); then it cancels what they still hold."""

    def __init__(
        self,
        attempt_id: int,
        placement: Placement,
        request: PreparedRequest,
        cluster: Cluster,
        fleet: Fleet,
        timeline: Timeline,
        stream: TokenStream,
    ) -> None:
        """`stream` is the request's, and begins this attempt. `request` may be a part of it (see retry.py)."""
        self.attempt_id = attempt_id
        self.placement = placement
        self._request = request
        self._cluster = cluster
        self._fleet = fleet
        self._timeline = timeline
        self._stream = stream
        stream.begin(attempt_id, request.choices)
        self._outputs: deque[SequenceOutput] = deque()
        self._scores: deque[PromptScores] = deque()
        self._unscored = 0 if request.sampling.prompt_logprobs is None else len(request.token_ids) - 1
        self._unfinished = set(request.choices)  # those that may still be running on decode
        # Those of which no worker has sent anything; of a search decode sends all, at its end.
        self._unheard = set() if request.sampling.beams is not None else set(request.choices)
        self._prefill_holds = False
        self._decode_holds = False
        self._has_landed = False

    def __enter__(self) -> Self:
        self._inbox = self._fleet.open(self.attempt_id, self.placement)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        placement = self.placement
        self._fleet.close(self.attempt_id)
        self._stream.leave(self.attempt_id)
        if self._decode_holds:
            self._fleet.cancel(self.attempt_id, placement.decode, keep_landed=self._prefill_is_gone(error))
        if self._prefill_holds and placement.prefill is not None:
            self._fleet.cancel(self.attempt_id, placement.prefill)
        for endpoint in placement.endpoints:
            self._cluster.release(self.attempt_id, endpoint)
        self._fleet.on_change()

    def _prefill_is_gone(self, error: BaseException | None) -> bool:
        if not isinstance(error, AttemptFailed) or error.failed.endpoint != self.placement.prefill:
            return False
        return error.failed.reason in PREFILL_GONE

    def dispatch(self, tag: session_wire.Tag) -> None:
        self._prefill_holds = self.placement.prefill is not None
        self._decode_holds = True
        self._fleet.dispatch(tag, self._request, self.placement)

    def adopt(self, tag: session_wire.Tag, router_id: bytes, attempt_id: int) -> None:
        """Instead of `dispatch`: continues an attempt that the decode worker makes for another router."""
        self._decode_holds = True
        self._fleet.adopt(tag, router_id, attempt_id, self.placement.decode)

    def expire(self) -> None:
        """The deadline has passed: `next` raises TimeoutError from now on."""
        self._inbox.expire()

    async def next(self) -> PromptScores | tuple[NewTokens, ...]:
        """All scores of the prompt, where they are asked for; then the next tokens in order, of some choices.

        All that has come since the last call comes at once: a slow reader gets more at a time. Raises:
        AttemptFailed, InconsistentOutput, TimeoutError.
        """
        while True:
            if self._scores:
                return self._scores.popleft()
            if self._outputs and not self._unscored:  # tokens from decode may overtake prefill's scores
                released = self._stream.take_all(self._outputs)
                if released:
                    return released
            self._take(await self._inbox.take())
            # Outputs that came before a failure go out before it.
            while (first := self._inbox.first) is not None and not isinstance(first.event, Failed):
                self._take(self._inbox.take_first())

    async def wait_for_kv(self) -> None:
        """Waits a moment for KvReceived where it is still due: an answer that decode ended comes with its timings."""
        if self._decode_holds or self.placement.prefill is None or self._has_landed:
            return
        try:
            async with asyncio.timeout(_LANDED_WAIT_S):
                while not self._has_landed:
                    self._take(await self._inbox.take())
        except (TimeoutError, AttemptFailed):
            return  # the answer is complete; only its timings are not

    def _take(self, arrival: Arrival) -> None:
        match arrival.event:
            case SequenceOutput() as output:
                offset = output.offset - self._request.answered_tokens
                self._timeline.take_decode_output(output.choice, offset, len(output.token_ids), arrival.at_s)
                self._unheard.discard(output.choice)
                self._take_decode_end(output)
                self._outputs.append(output)
            case PromptScores() as scores:
                self._take_scores(scores)
            case FirstStep() as first_step:
                self._take_first_step(first_step, arrival.at_s)
            case KvReceived() as kv_received:
                self._has_landed = True
                self._timeline.take_kv_received(kv_received)
                placement = self.placement
                self._cluster.caches.audit(placement.decode, placement.decode_hit_tokens, kv_received.cached_tokens)
                moved_tokens = len(self._request.token_ids) - kv_received.cached_tokens
                self._cluster.rates.transferred(moved_tokens, kv_received.transferred_bytes)
                self._prefill_holds = False
                if placement.prefill is not None:
                    self._cluster.pairs.succeeded((placement.prefill, placement.decode))
            case Failed() as failed:
                self._take_failure(failed)

    def _take_scores(self, scores: PromptScores) -> None:
        if scores.offset != len(self._request.token_ids) - self._unscored or len(scores.logprobs) > self._unscored:
            raise InconsistentOutput(
                f"prompt log-probabilities begin at token {scores.offset}; the last {self._unscored} are missing"
            )
        self._unscored -= len(scores.logprobs)
        self._scores.append(scores)

    def _take_first_step(self, first_step: FirstStep, now: float) -> None:
        self._timeline.take_first_step(first_step, now)
        self._unfinished.difference_update(o.choice for o in first_step.outputs if o.end is not None)
        self._unheard.clear()
        self._audit(first_step.timings)
        self._learn(first_step.timings)
        if self.placement.prefill is not None:
            self._cluster.release(self.attempt_id, self.placement.prefill)
        else:
            self._cluster.prompt_computed(self.attempt_id, self.placement.decode)
            if not self._unfinished:
                self._decode_holds = False  # it made this step, so it knows that the answer has ended
        self._outputs.extend(first_step.outputs)

    def _learn(self, timings: PrefillTimings) -> None:
        """Learns a prefill worker's rate. A decode worker computes prompts beside answers, and reports its own."""
        if self.placement.prefill is not None:
            computed_tokens = len(self._request.token_ids) - timings.cached_tokens
            self._cluster.rates.computed(self.placement.prefill, computed_tokens, sum(timings.chunk_ms))

    def _audit(self, timings: PrefillTimings) -> None:
        placement, found_tokens = self.placement, timings.cached_tokens - timings.fetched_tokens
        if placement.prefill is not None:
            self._cluster.caches.audit(placement.prefill, placement.prefill_hit_tokens, found_tokens)
        else:
            self._cluster.caches.audit(placement.decode, placement.decode_hit_tokens, found_tokens)

    def _take_decode_end(self, output: SequenceOutput) -> None:
        if output.end is not None:
            self._unfinished.discard(output.choice)
            if not self._unfinished:
                self._decode_holds = False

    def _take_failure(self, failed: Failed) -> None:
        """Once the KV has landed, and the prompt's scores have come, prefill's troubles are not this request's.

        Unless prefill alone knew of a choice: one that ended with its first token never reaches decode.
        """
        if failed.endpoint == self.placement.prefill:
            self._prefill_holds = False
            if self._has_landed and not self._unscored and not self._unheard:
                return
        else:
            self._decode_holds = False
        if failed.reason is FailureReason.DRAINING:
            self._fleet.drains(failed.endpoint)
        raise AttemptFailed(failed)


_TRANSFER_ID_BYTES = 16
_MAX_TIME_LEFT_MS = 2**32 - 1


class AttemptDispatcher:
    """Of one request. `deadline_s` is a reading of the monotonic clock."""

    def __init__(
        self,
        request: PreparedRequest,
        scheduling: Scheduling,
        timeline: Timeline,
        stream: TokenStream,
        recovery: Recovery,
        deadline_s: float,
        traceparent: str,
        resumption: Resumption | None,
    ) -> None:
        self._request = request
        self._scheduling = scheduling
        self._timeline = timeline
        self._stream = stream
        self._recovery = recovery
        self._deadline_s = deadline_s
        self._traceparent = traceparent
        self._resumption = resumption

    async def place(self, part: PreparedRequest) -> Attempt:
        """Waits for room for it. Raises: as AdmissionQueue.admit, and DeadlineExceeded."""
        scheduling, recovery = self._scheduling, self._recovery
        attempt_id, began_s = next(scheduling.attempt_ids), time.monotonic()
        broken_pairs = scheduling.cluster.pairs.broken(began_s)
        wanted = placement_request(part, attempt_id, recovery.avoided_prefill, broken_pairs, recovery.preferred_decode)
        try:
            async with asyncio.timeout(self.time_left_s()):
                # A prompt whose log-probabilities are wanted is computed in full: cached blocks do not matter.
                cacheable = part.block_hashes if part.sampling.prompt_logprobs is None else ()
                admitted = await scheduling.queue.admit(attempt_id, wanted, cacheable, self._request_class())
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
        return Attempt(attempt_id, admitted.placement, part, cluster, fleet, self._timeline, self._stream)

    def dispatch(self, attempt: Attempt, location: AttemptLocation | None) -> None:
        tag = session_wire.Tag(
            attempt_id=attempt.attempt_id,
            transfer_id=secrets.token_bytes(_TRANSFER_ID_BYTES),
            fetch_id=secrets.token_bytes(_TRANSFER_ID_BYTES),
            time_left_ms=max(1, min(round(self.time_left_s() * 1e3), _MAX_TIME_LEFT_MS)),
            traceparent=self._traceparent,
        )
        if location is None or self._resumption is None:
            attempt.dispatch(tag)
        else:
            attempt.adopt(tag, self._resumption.router_id, location.attempt_id)
        self._timeline.dispatched(time.monotonic())

    def record_answer(self, placement: Placement, part: PreparedRequest) -> None:
        """The decode worker keeps the blocks of each choice: the conversation's next turn had better go there.

        Most workers report them themselves. The last token of a choice has no KV yet.
        """
        request = self._request
        if self._scheduling.cluster.caches.follows(placement.decode):
            return
        for choice in part.choices:
            made = replay(request, choice, self._stream.answer(choice)[:-1])
            self._scheduling.cluster.answered(placement.decode, made.block_hashes)

    def time_left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def _request_class(self) -> RequestClass:
        valid = self._request.valid
        priority = BEGUN_PRIORITY if self._timeline.attempts or self._resumption else valid.priority
        return RequestClass(valid.tenant, priority, self._deadline_s)


WAIT_S = 1.0
"""For the session with a decode worker: this router may just have started. Workers keep answers for longer."""
_LOOK_S = 0.02


async def within_reach(locations: Sequence[AttemptLocation], scheduling: Scheduling) -> tuple[AttemptLocation, ...]:
    """Those of them whose workers are connected, WAIT_S from now at the latest."""
    until_s = time.monotonic() + WAIT_S
    while True:
        reached = tuple(location for location in locations if _is_connected(location.endpoint, scheduling))
        if len(reached) == len(locations) or time.monotonic() > until_s:
            return reached
        await asyncio.sleep(_LOOK_S)


def _is_connected(endpoint: str, scheduling: Scheduling) -> bool:
    worker = scheduling.cluster.find(endpoint)
    return worker is not None and worker.connected


def placed(
    whole: PreparedRequest, parts: Sequence[PreparedRequest], locations: Sequence[AttemptLocation]
) -> tuple[tuple[PreparedRequest, AttemptLocation | None], ...]:
    """Each part with the location of its attempt, if any. Where one makes all choices: the whole request with that."""
    for location in locations:
        if location.choices > 1:
            return ((whole, location),)
    by_choice = {location.first_choice: location for location in locations}
    return tuple((part, by_choice.get(part.first_choice)) for part in parts)


def location_of(attempt: Attempt, part: PreparedRequest, adopted: AttemptLocation | None) -> AttemptLocation:
    """Where another router may take this attempt over."""
    if adopted is not None:
        return replace(adopted, attempt_id=attempt.attempt_id)
    endpoint, made = attempt.placement.decode, part.choices
    return AttemptLocation(endpoint, attempt.attempt_id, made.start, len(made), part.answered_tokens)


def adopt(
    location: AttemptLocation, part: PreparedRequest, scheduling: Scheduling, timeline: Timeline, stream: TokenStream
) -> Attempt:
    """An attempt at `part`, charged to its worker and not yet sent to it."""
    attempt_id, now = next(scheduling.attempt_ids), time.monotonic()
    placement = Placement(
        prefill=None,
        decode=location.endpoint,
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
    return Attempt(attempt_id, placement, part, scheduling.cluster, scheduling.fleet, timeline, stream)

"""Run of one request: a loop that applies events from an inbox to the request's state and performs the effects.

The state is pure (state.py). Released tokens are final, and part of the next attempt's prompt (types/request.py).
Detokenizers, stop strings and token counts belong to the request and continue across attempts.
"""

import asyncio
import functools
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from baton.process.errors import BatonError, Internal, Unavailable
from baton.router.admission.fair_queue import Entry as QueueEntry
from baton.router.admission.queue import BEGUN_PRIORITY, RETRY_AFTER_S, AdmissionQueue, Admitted, RequestClass, Ticket
from baton.router.cache.autopsy import CacheLook
from baton.router.fleet import wire as link_wire
from baton.router.fleet.fleet import Inbox, WorkerArrival, WorkerLinks
from baton.router.placement.cluster import Cluster, Worker
from baton.router.placement.decide import Placement
from baton.router.request.answer import BestOf, InconsistentOutput, NotRepeated, PromptEcho, RequestAnswer
from baton.router.request.attempt import Attempt
from baton.router.request.effects import (
    AddToQuarantine,
    Adopt,
    AwaitKv,
    AwaitTurn,
    BackOff,
    ClearSuspicion,
    Dispatch,
    Effect,
    Fail,
    LogRetry,
    MarkDraining,
    RecordPairFailure,
    RecordPrefill,
    RecordTransfer,
    Release,
    Submit,
)
from baton.router.request.events import (
    Begun,
    Deadline,
    KvOverdue,
    OwnEvent,
    Placed,
    Refused,
    RequestClosed,
    RequestPhase,
    RetryDue,
    Superseded,
    TurnCame,
)
from baton.router.request.journal import JournalEntry
from baton.router.request.resume import AttemptLocation, ResumeFilter, Resumption, adoptable
from baton.router.request.retry import ABOUT_A_PAIR, Quarantine, SuspectLock, Suspects, poisonous, request_digest
from baton.router.request.state import RequestState
from baton.router.trace.record import AnswerInProgress, Timeline
from baton.router.types.events import Failed, FailureReason, PrefillTimings, TokenLogprob
from baton.router.types.placement import PlacementRequest, placement_request
from baton.router.types.request import PreparedRequest, replay
from baton.router.types.response import AnswerEvent, PromptPart
from baton.router.types.worker import WorkerReport
from baton.text.detokenizer import Detokenizer

logger = logging.getLogger(__name__)

_UNSCORED = TokenLogprob(float("nan"), ())  # placeholder: log-probability of a token sent by an earlier stream
_KV_RECEIVED_WAIT_S = 0.1  # maximum wait for KvReceived, which may arrive after the last token
_TRANSFER_ID_BYTES = 16
_MAX_TIME_LEFT_MS = 2**32 - 1
_LOOK_S, _LOOKS = 0.05, 20
REACH_S = 1.0
"""Maximum wait for the link to a decode worker whose answer is adopted: the router may just have started and have
no links yet. Workers keep answers for longer than this.
"""
_REACH_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class RequestDeps:
    """Router components that every request uses. `attempt_ids`: never repeat within this process; `attempts`: maximum
    number of consecutive failed attempts.
    """

    cluster: Cluster
    fleet: WorkerLinks
    queue: AdmissionQueue
    attempt_ids: Iterator[int]
    attempts: int = 6
    quarantine: Quarantine = field(default_factory=Quarantine)
    suspects: Suspects = field(default_factory=Suspects)


class Lease:
    """Resources that one attempt holds in the rest of the router. `release` releases them exactly once.

    A waiting attempt holds a queue entry, or a lock if it is suspected. A placed attempt holds charges on the workers
    and in the wait estimate, an inbox at the links, work on the workers, and a location in the journal.
    """

    def __init__(self, attempt_id: int, scheduling: RequestDeps, entry: JournalEntry | None) -> None:
        self._attempt_id = attempt_id
        self._scheduling = scheduling
        self._entry = entry
        self._released = False
        self.lock: SuspectLock | None = None
        self.queued: QueueEntry[Ticket] | None = None
        self._placement: Placement | None = None

    def placed(self, placement: Placement, location: AttemptLocation, inbox: Inbox[OwnEvent]) -> None:
        """Record that the attempt is charged on its workers. Call it before the attempt is sent to them."""
        self._placement = placement
        self._scheduling.fleet.open(self._attempt_id, placement, inbox)
        if self._entry is not None:
            self._entry.placed(location)

    def forgive(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def release(self, cancels: Sequence[str] = (), keeps_kv: bool = False, answered: bool = False) -> None:
        """Perform `effects.Release`.

        `answered`: the attempt completed, and its duration predicts that of other requests.
        """
        if self._released:
            return
        self._released = True
        queue, fleet, attempt_id = self._scheduling.queue, self._scheduling.fleet, self._attempt_id
        if self._placement is not None:
            queue.ended(attempt_id, answered)
            if self._entry is not None:
                self._entry.left(attempt_id)
            fleet.close(attempt_id)
            for endpoint in cancels:
                fleet.cancel(attempt_id, endpoint, keep_landed=keeps_kv and endpoint == self._placement.decode)
            for endpoint in self._placement.endpoints:
                self._scheduling.cluster.release(attempt_id, endpoint)
            self._scheduling.queue.pump_soon()
        elif self.queued is not None:
            queue.withdraw(self.queued)
        self.forgive()


class RequestRunner:
    """Runner of one request over all its attempts. `answer` and `timeline` may be read at any time."""

    def __init__(
        self,
        request: PreparedRequest,
        scheduling: RequestDeps,
        timeline: Timeline,
        new_detokenizer: Callable[[], Detokenizer],
        deadline_s: float,
        traceparent: str = "",
        is_usual: bool = True,
        resumption: Resumption | None = None,
    ) -> None:
        """Create a runner. `deadline_s`: monotonic seconds. `is_usual`: the request is a client's and not a probe, so
        its duration predicts that of other requests.

        `resumption`: what the client of a resumed stream has received; only the rest is sent.
        """
        sampling = request.sampling
        made = RequestAnswer(sampling.n, request.stop, sampling.min_tokens, new_detokenizer)
        self.answer: AnswerInProgress = (
            BestOf(made, request.n, request.logprobs is not None) if sampling.n > request.n else made
        )
        if resumption is not None:
            self.answer = ResumeFilter(self.answer, request.n, resumption.received)
        self.timeline = timeline
        timeline.streams = request.streams
        self._request = request
        self._scheduling = scheduling
        self._deadline_s = deadline_s
        self._traceparent = traceparent
        self._is_usual = is_usual
        self._resumption = resumption
        scored = sampling.prompt_logprobs is not None
        sent_tokens = resumption.received.prompt_tokens if resumption is not None else 0
        echo = PromptEcho(request.token_ids, request.echo_text, scored, sent_tokens)
        self._echo = echo if scored or request.echo else None
        self._state = RequestState(
            request, self.answer, timeline, scheduling.attempt_ids, scheduling.attempts, may_be_poison=is_usual
        )
        self._inbox: Inbox[OwnEvent] = Inbox(scheduling.fleet.wake_ups)
        self._entry: JournalEntry | None = None
        self._leases: dict[int, Lease] = {}  # resources held, by attempt id
        self._timers: list[asyncio.TimerHandle] = []

    def released(self) -> tuple[tuple[int, ...], ...]:
        """Return the released tokens of each generated choice."""
        return tuple(map(self._state.stream.answer, range(self._request.sampling.n)))

    def supersede(self, error: BatonError) -> None:
        """End the request with `error`, unless its answer is complete. Used when its weights are replaced."""
        self._inbox.put_own(Superseded(error))

    async def events(self, entry: JournalEntry | None = None) -> AsyncGenerator[AnswerEvent | PromptPart, None]:
        """Yield the echoed prompt, if any, then deltas and ends of the choices as they arrive. `answer.done` turns true
        before the last event.

        `entry`: journal entry in which the request's workers are recorded. Closing this iterator releases everything on
        all workers. Raises: BatonError.
        """
        quarantine = self._scheduling.quarantine
        if quarantine.until_s and quarantine.holds(self._request, time.monotonic()):
            raise poisonous(self._request.request_id)
        state, self._entry, closed = self._state, entry, RequestClosed(RequestPhase.CANCELLED)
        last: list[AnswerEvent | PromptPart] = []
        try:
            for carried in self._carried():
                yield carried
            locations = await self._reachable()
            self._put_at(self._deadline_s, Deadline())
            self._advance(Begun(locations))
            while not state.is_over:
                if not state.has_more:
                    self._take(await self._inbox.take())
                events = self._deliver()
                if self.answer.done:
                    last += events
                else:
                    for event in events:
                        yield event
            for event in last:  # sent after the workers are released, so that a slow client does not hold them
                yield event
        except NotRepeated as error:
            closed = RequestClosed(RequestPhase.FAILED)
            message = "after a worker's failure another one generated a different token than was delivered; retry"
            raise Unavailable(message, "NOT_REPEATED", RETRY_AFTER_S) from error
        except InconsistentOutput as error:
            closed = RequestClosed(RequestPhase.FAILED)
            logger.exception("request %s failed: inconsistent output of a worker", self._request.request_id)
            raise Internal("INCONSISTENT_OUTPUT", self._request.request_id) from error
        finally:
            self._advance(closed)
            for timer in self._timers:
                timer.cancel()

    def _carried(self) -> Iterator[AnswerEvent]:
        """Decode and filter again the tokens that the client already has; yield the events that the client lacks."""
        carried = self._resumption.carried(self._request) if self._resumption is not None else {}
        for choice, token_ids in carried.items():
            unscored = (_UNSCORED,) * len(token_ids) if self._request.sampling.logprobs is not None else ()
            yield from self.answer.take(self._state.stream.prime(choice, token_ids)._replace(logprobs=unscored))

    async def _reachable(self) -> Sequence[AttemptLocation]:
        """Return another router's attempts that can be adopted.

        Wait at most REACH_S until their workers are connected.
        """
        if self._resumption is None or self.answer.done:
            return ()
        locations, until_s = adoptable(self._request, self._resumption), time.monotonic() + REACH_S
        while True:
            reached = tuple(location for location in locations if self._is_connected(location.endpoint))
            if len(reached) == len(locations) or time.monotonic() > until_s:
                return reached
            await asyncio.sleep(_REACH_LOOK_S)

    def _is_connected(self, endpoint: str) -> bool:
        worker = self._scheduling.cluster.find(endpoint)
        return worker is not None and worker.connected

    def _take(self, event: WorkerArrival | OwnEvent) -> None:
        """Apply `event`, then queued worker events up to the next failure, so that earlier output comes first."""
        if not isinstance(event, WorkerArrival):
            self._advance(event)
            return
        state, following, arrival = self._state, self._inbox.arrivals, event
        while True:
            effects = state.advance(arrival.event, arrival.at_s)
            if effects:
                self._perform(effects)
            if not following or isinstance(following[0].event, Failed):
                return
            arrival = following.popleft()

    def _deliver(self) -> Sequence[AnswerEvent | PromptPart]:
        """Return the events that can be sent to the client now."""
        state, timeline, began_s = self._state, self.timeline, time.monotonic()
        tokens = state.new_tokens()
        parts: Sequence[PromptPart] = () if self._echo is None else self._echoed(self._echo, bool(tokens))
        if len(tokens) == 1:  # usual case: there is only one choice
            events = self.answer.take(tokens[0])
        else:
            events = [event for released in tokens for event in self.answer.take(released)]
        now = time.monotonic()
        timeline.detokenise_ms += (now - began_s) * 1e3
        if timeline.first_token_s is None and events:
            timeline.first_token_s = now
        effects = state.delivered(now)
        if effects:
            self._perform(effects)
        return [*parts, *events] if parts else events

    def _echoed(self, echo: PromptEcho, has_tokens: bool) -> Sequence[PromptPart]:
        """Return the new parts of the echoed prompt. `has_tokens`: they precede tokens of the answer."""
        parts = [part for scores in self._state.new_scores() for part in echo.take(scores)]
        return [*parts, *echo.rest()] if has_tokens else parts

    def _advance(self, event: OwnEvent) -> None:
        self._perform(self._state.advance(event, time.monotonic()))

    def _perform(self, effects: Sequence[Effect]) -> None:
        """Perform the effects that a state change requested. Raises: BatonError if the request fails."""
        cluster = self._scheduling.cluster
        for effect in effects:
            match effect:
                case AwaitTurn(attempt):
                    came = functools.partial(self._inbox.put_own, TurnCame(attempt.attempt_id))
                    self._lease(attempt).lock = self._scheduling.suspects.lock(came)
                case Submit(attempt):
                    self._submit(attempt)
                case Dispatch(attempt, placement):
                    self._dispatch(attempt, placement)
                case Adopt(attempt, placement, asked, location):
                    self._adopt(attempt, placement, asked, location)
                case RecordPrefill(attempt, timings):
                    self._record_prefill(attempt, attempt.placement, timings)
                case RecordTransfer(attempt, kv_received):
                    placement = attempt.placement
                    cluster.caches.audit(placement.decode, placement.decode_hit_tokens, kv_received.cached_tokens)
                    moved_tokens = len(attempt.part.token_ids) - kv_received.cached_tokens
                    cluster.rates.transferred(moved_tokens, kv_received.transferred_bytes)
                    if placement.prefill is not None:
                        cluster.pairs.succeeded((placement.prefill, placement.decode))
                case AwaitKv(attempt):
                    self._put_at(time.monotonic() + _KV_RECEIVED_WAIT_S, KvOverdue(attempt.attempt_id))
                case ClearSuspicion(attempt):
                    self._leases[attempt.attempt_id].forgive()
                case Release():
                    self._release(effect)
                case MarkDraining(endpoint):
                    self._scheduling.fleet.drains(endpoint)
                case BackOff():
                    self._back_off(effect)
                case RecordPairFailure(pair):
                    cluster.pairs.failed(pair, time.monotonic())
                case LogRetry(failed):
                    where = f"{failed.reason.name} at {failed.endpoint}"
                    logger.info("attempt %d failed: %s: %s; retrying", failed.attempt_id, where, failed.message)
                case AddToQuarantine(failed):
                    self._scheduling.quarantine.add(request_digest(self._request), time.monotonic())
                    request_id = self._request.request_id
                    logger.error(
                        "request %s quarantined: its workers died: %s; equal requests are rejected",
                        request_id,
                        failed.message,
                    )
                case Fail(error):
                    raise error

    def _lease(self, attempt: Attempt) -> Lease:
        """Return the attempt's lease; the first call creates it."""
        return self._leases.setdefault(attempt.attempt_id, Lease(attempt.attempt_id, self._scheduling, self._entry))

    def _submit(self, attempt: Attempt) -> None:
        scheduling, state, part, attempt_id = self._scheduling, self._state, attempt.part, attempt.attempt_id
        began_s = time.monotonic()
        if began_s >= self._deadline_s:
            self._inbox.put_own(Deadline())
            return
        if (gone := scheduling.fleet.adapters.open_requests.gone(part.adapter)) is not None:
            self._inbox.put_own(Superseded(gone))
            return
        broken_pairs = scheduling.cluster.pairs.broken(began_s)
        first_token_in_ms = 1e3 * (self._first_token_at_s(part, began_s) - began_s)
        asked = placement_request(
            part, attempt_id, state.avoided_prefill, broken_pairs, state.preferred_decode, first_token_in_ms
        )

        def settled(outcome: Admitted | BatonError) -> None:
            if isinstance(outcome, Admitted):
                self._inbox.put_own(Placed(attempt_id, asked, outcome, began_s))
            else:
                self._inbox.put_own(Refused(attempt_id, outcome))

        request = self._request
        priority = BEGUN_PRIORITY if self.timeline.attempts or self._resumption is not None else request.priority
        request_class = RequestClass(request.tenant, priority, self._deadline_s)
        lease = self._lease(attempt)
        try:
            lease.queued = scheduling.queue.submit(attempt_id, asked, part.cacheable, request_class, settled)
        except BatonError as refusal:
            settled(refusal)

    def _dispatch(self, attempt: Attempt, placement: Placement) -> None:
        made = attempt.part.choices
        answered_tokens = attempt.part.answered_tokens
        location = AttemptLocation(placement.decode, attempt.attempt_id, made.start, len(made), answered_tokens)
        self._lease(attempt).placed(placement, location, self._inbox)
        self._scheduling.fleet.dispatch(self._tag(attempt), attempt.part, placement)
        now = time.monotonic()
        self.timeline.dispatched(now)
        if attempt.note is not None and (attempt.part.cacheable or not attempt.part.block_hashes):
            attempt.note.look = self._look_at_cache(attempt.part, placement, now)

    def _look_at_cache(self, part: PreparedRequest, placement: Placement, now: float) -> CacheLook:
        """Return what this router knows about the prompt's blocks at the computing worker, for `baton why`."""
        computing = placement.computing
        hit_tokens = placement.decode_hit_tokens if placement.prefill is None else placement.prefill_hit_tokens
        caches, hit_blocks = self._scheduling.cluster.caches, hit_tokens // part.block_tokens
        return caches.look(computing, part.block_hashes, hit_blocks, now)

    def _adopt(
        self, attempt: Attempt, placement: Placement, asked: PlacementRequest, location: AttemptLocation
    ) -> None:
        if self._resumption is None:
            raise RuntimeError("cannot adopt an attempt: the request is not resumed")
        attempt_id = attempt.attempt_id
        self._scheduling.queue.adopted(attempt_id, placement, asked, attempt.part.block_hashes)
        self._lease(attempt).placed(placement, replace(location, attempt_id=attempt_id), self._inbox)
        tag, router_id = self._tag(attempt), self._resumption.router_id
        self._scheduling.fleet.adopt(tag, router_id, location.attempt_id, placement.decode)
        self.timeline.dispatched(time.monotonic())

    def _first_token_at_s(self, part: PreparedRequest, now: float) -> float:
        """Return the time by which the first token of `part` is wanted, in monotonic seconds; infinite: no objective.

        The TTFT objective counts from the request's arrival, or from `now` if `part` continues an answer.
        """
        began_s = now if part.answered_tokens else self.timeline.arrived_s
        return began_s + part.objectives.ttft_ms / 1e3

    def _tag(self, attempt: Attempt) -> link_wire.Tag:
        now = time.monotonic()
        time_left_s, wanted_in_s = self._deadline_s - now, self._first_token_at_s(attempt.part, now) - now
        return link_wire.Tag(
            attempt_id=attempt.attempt_id,
            transfer_id=secrets.token_bytes(_TRANSFER_ID_BYTES),
            fetch_id=secrets.token_bytes(_TRANSFER_ID_BYTES),
            time_left_ms=max(1, min(round(time_left_s * 1e3), _MAX_TIME_LEFT_MS)),
            traceparent=self._traceparent,
            request_id=attempt.part.request_id,
            first_token_in_ms=None if math.isinf(wanted_in_s) else round(wanted_in_s * 1e3),
        )

    def _record_prefill(self, attempt: Attempt, placement: Placement, timings: PrefillTimings) -> None:
        """Update hits, rates and charges after a computed prompt.

        Decode workers report their prompt rates themselves.
        """
        cluster, found_tokens = self._scheduling.cluster, timings.found_tokens
        hit_tokens = placement.decode_hit_tokens if placement.prefill is None else placement.prefill_hit_tokens
        cluster.caches.audit(placement.computing, hit_tokens, found_tokens)
        if not placement.computes_for_others:
            cluster.prompt_computed(attempt.attempt_id, placement.decode)
            return
        computed_tokens = len(attempt.part.token_ids) - timings.cached_tokens
        cluster.rates.computed(placement.computing, computed_tokens, sum(timings.chunk_ms))
        cluster.release(attempt.attempt_id, placement.computing)

    def _release(self, effect: Release) -> None:
        attempt, lease = effect.attempt, self._leases.pop(effect.attempt.attempt_id, None)
        is_usual = self._is_usual and not attempt.part.answered_tokens
        if lease is not None:
            lease.release(effect.cancels, effect.keeps_kv, effect.answered and is_usual)
        if effect.answered and attempt.note is not None:
            asyncio.get_running_loop().call_soon(self._record_answer, attempt.placement, attempt.part)

    def _record_answer(self, placement: Placement, part: PreparedRequest) -> None:
        """Record that the blocks of each choice are cached at the worker, if the worker does not report its cache.

        The last token of a choice is left out, because its KV is never computed.
        """
        cluster = self._scheduling.cluster
        if cluster.caches.follows(placement.decode):
            return
        for choice in part.choices:
            made = replay(self._request, choice, self._state.stream.answer(choice)[:-1])
            cluster.answered(placement.decode, made.block_hashes)

    def _put_at(self, when_s: float, event: OwnEvent) -> None:
        delay_s = max(0.0, when_s - time.monotonic())
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, self._inbox.put_own, event))

    def _back_off(self, effect: BackOff) -> None:
        delay_s = max(0.0, min(effect.pause_s, self._deadline_s - time.monotonic()))
        worker = self._settling(effect)
        heard = None if worker is None else worker.report
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, self._look, effect, heard, _LOOKS))

    def _look(self, effect: BackOff, heard: WorkerReport | None, looks: int) -> None:
        """Send RetryDue when it is known whether the worker is gone, or after `looks` polls.

        A broken link may reconnect, and a worker counts as alive only after a report newer than `heard`.
        """
        worker = self._settling(effect)
        if looks and worker is not None and worker.held and (not worker.connected or worker.report is heard):
            self._timers.append(asyncio.get_running_loop().call_later(_LOOK_S, self._look, effect, heard, looks - 1))
            return
        self._inbox.put_own(RetryDue(effect.attempt.attempt_id, self._died(effect.attempt, effect.failed)))

    def _settling(self, effect: BackOff) -> Worker | None:
        return None if effect.settles is None else self._scheduling.cluster.find(effect.settles)

    def _died(self, attempt: Attempt, failed: Failed) -> bool:
        """Return whether the attempt failed because a worker process is gone.

        That includes a prefill worker whose loss the decode worker reported as a failed transfer.
        """
        if failed.reason is FailureReason.WORKER_DIED:
            return True
        note = attempt.note
        if failed.reason not in ABOUT_A_PAIR or note is None or note.placement.prefill is None:
            return False
        prefill = self._scheduling.cluster.find(note.placement.prefill)
        return prefill is not None and prefill.died_s is not None and prefill.died_s >= note.placed_s

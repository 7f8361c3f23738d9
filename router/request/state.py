"""State machine of a request and its attempts: events change the state and return effects. Pure.

| phase | event | next phase |
|---|---|---|
| TURN | TurnCame | QUEUED |
| QUEUED | Placed | PREFILL |
| QUEUED | Refused | the request fails |
| PREFILL | FirstStep | TRANSFER; DECODE if the decode worker computed the prompt |
| PREFILL, TRANSFER | KvReceived, which may overtake FirstStep | DECODE |
| PREFILL, TRANSFER | every choice is complete | COMPLETE; ENDED if the decode worker still runs a choice |
| PREFILL, TRANSFER, DECODE | Failed | BACKOFF; the request fails if no other attempt may succeed |
| DECODE | every choice is complete | ENDED |
| COMPLETE | KvReceived, KvOverdue, Failed | ENDED |
| BACKOFF | RetryDue | ENDED; the rest starts in QUEUED or TURN, or the request fails if no attempts are left |
| any | Closed: failed, past its deadline, or the client has gone | ENDED |

An adopted answer begins in DECODE. In DECODE a failure of the prefill worker changes nothing, unless log-probabilities
of the prompt or the first token of a choice are missing: a choice that finished with its first token never reaches
decode. Outputs may arrive before FirstStep; the token stream orders them. Events of a closed attempt, or in a phase
that does not expect them, change nothing.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from baton.process.errors import BatonError, DeadlineExceeded
from baton.router.placement.decide import Placement
from baton.router.request.answer import InconsistentOutput, TokenStream
from baton.router.request.attempt import PROGRESS_TOKENS, Attempt, AttemptPhase, Tries
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
from baton.router.request.resume import AttemptLocation
from baton.router.request.retry import ABOUT_A_PAIR, PREFILL_GONE, RETRYABLE, error_of, poisonous
from baton.router.trace.record import KEPT_CANDIDATES, AnswerInProgress, AttemptNote, Timeline
from baton.router.types.events import (
    AttemptEvent,
    Failed,
    FailureReason,
    FirstStep,
    KvReceived,
    NewTokens,
    PromptScores,
    SequenceEnd,
    SequenceOutput,
)
from baton.router.types.placement import placement_request
from baton.router.types.request import PreparedRequest, end_of, replays

_EXPECTED: Mapping[type, AttemptPhase] = {
    TurnCame: AttemptPhase.TURN,
    Placed: AttemptPhase.QUEUED,
    Refused: AttemptPhase.QUEUED,
    RetryDue: AttemptPhase.BACKOFF,
    KvOverdue: AttemptPhase.COMPLETE,
}
"""Phase in which each event is applied. Worker events are applied in all phases in which workers run the attempt."""


class RequestState:
    """State of one request over all its attempts. Only `advance` and `delivered` change phases and the timeline."""

    def __init__(
        self,
        request: PreparedRequest,
        answer: AnswerInProgress,
        timeline: Timeline,
        attempt_ids: Iterator[int],
        most_tries: int,
        may_be_poison: bool = True,
    ) -> None:
        """Create the state. `most_tries`: maximum number of consecutive failed attempts.

        `may_be_poison`: whether the request is quarantined if its workers die repeatedly.
        """
        self.request = request
        self.answer = answer
        self.timeline = timeline
        self.phase = RequestPhase.PREPARED
        self.stream = TokenStream(request.sampling.n)
        self.attempts: dict[int, Attempt] = {}  # open attempts by attempt id
        self.avoided_prefill: frozenset[str] = frozenset()
        """Prefill workers that the next attempt should avoid."""
        self.preferred_decode: str | None = None
        """Decode worker of the last attempt, if another worker failed."""
        self._attempt_ids = attempt_ids
        self._most_tries = most_tries
        self._may_be_poison = may_be_poison
        self._outputs: deque[SequenceOutput] = deque()
        self._scores: deque[PromptScores] = deque()
        self._ended: list[NewTokens] = []  # ends of choices that completed without a worker's message
        self._unscored = False

    @property
    def is_over(self) -> bool:
        return self.phase not in (RequestPhase.PREPARED, RequestPhase.RUNNING)

    @property
    def has_more(self) -> bool:
        """True if `new_tokens` must be called before the next event is awaited.

        Either no attempt is open, so that no event would come, or outputs remain after an inconsistent one.
        """
        return not self.attempts or (bool(self._outputs) and not self._unscored)

    def new_scores(self) -> Sequence[PromptScores]:
        """Return new log-probabilities of the prompt, in order."""
        if not self._scores:
            return ()
        scores, self._scores = self._scores, deque()
        return scores

    def new_tokens(self) -> Sequence[NewTokens]:
        """Return newly released tokens, in order; none while log-probabilities of the prompt are missing.

        Raises: InconsistentOutput.
        """
        ended, self._ended = self._ended, []
        if not self._outputs or self._unscored:
            return ended
        released = self.stream.take_all(self._outputs)
        return (*ended, *released) if ended else released

    def advance(self, event: AttemptEvent | OwnEvent, now: float) -> Sequence[Effect]:
        """Apply an event and return the effects to perform. Raises: InconsistentOutput."""
        match event:
            case SequenceOutput():
                return self._take_output(event, now)
            case Begun():
                self.phase = RequestPhase.RUNNING
                return self._continue(self.request, Tries(), now, event.locations)
            case Deadline():
                return self._deadline()
            case Superseded():
                return self._end_all() if self.answer.done else self._fail(event.error)
            case RequestClosed():
                return self._close(event.phase)
        attempt = self.attempts.get(event.attempt_id)
        if attempt is None or attempt.phase is not _EXPECTED.get(type(event), attempt.phase):
            return ()
        match event:
            case TurnCame():
                attempt.enter(AttemptPhase.QUEUED)
                return (Submit(attempt),)
            case Placed():
                return self._placed(attempt, event, now)
            case Refused():
                return self._fail(event.error)
            case RetryDue():
                return self._retry(attempt, event.died, now)
            case KvOverdue():
                return self._end(attempt)
            case _ if not attempt.phase.on_workers:
                return ()
            case FirstStep():
                return self._first_step(attempt, event, now)
            case KvReceived():
                return self._kv_received(attempt, event)
            case Failed():
                return self._failed(attempt, event, now)
            case PromptScores():
                return self._take_scores(attempt, event)

    def _continue(
        self, part: PreparedRequest, tries: Tries, now: float, locations: Sequence[AttemptLocation] = ()
    ) -> list[Effect]:
        """Open attempts for the rest of a part: one attempt per choice if the choices have released tokens."""
        parts = placed(self.request, self._left(part), locations)
        return [self._open(each, tries, location, now) for each, location in parts]

    def _left(self, part: PreparedRequest) -> tuple[PreparedRequest, ...]:
        """Return the parts that must still be generated. Choices whose tokens already complete them are finished."""
        sampling = self.request.sampling
        answers: dict[int, tuple[int, ...]] = {}
        for choice in part.choices:
            if self.answer.has_finished(choice):
                continue
            answered = self.stream.answer(choice)
            end = end_of(sampling, answered) if sampling.beams is None else None
            if end is None:
                answers[choice] = answered
            else:
                self._ended.append(self.stream.finish(choice, end))
        return replays(self.request, part, answers) if answers else ()

    def _open(self, part: PreparedRequest, tries: Tries, location: AttemptLocation | None, now: float) -> Effect:
        sampling, choices, waits = part.sampling, part.choices, tries.suspect and location is None
        attempt = Attempt(
            next(self._attempt_ids),
            part,
            tries,
            before=[self.stream.released(choice) for choice in choices],
            unscored=0 if sampling.prompt_logprobs is None else len(part.token_ids) - 1,
            # the decode worker sends all choices of a beam search together at the end
            unreported=set() if sampling.beams is not None else set(choices),
            unfinished=set(choices),
            phase=AttemptPhase.TURN if waits else AttemptPhase.QUEUED,
            adopts=location,
        )
        self.attempts[attempt.attempt_id] = attempt
        if location is not None:
            return self._adopt(attempt, location, now)
        return AwaitTurn(attempt) if waits else Submit(attempt)

    def _adopt(self, attempt: Attempt, location: AttemptLocation, now: float) -> Adopt:
        placement = Placement(
            prefill=None,
            decode=location.endpoint,
            prefill_hit_tokens=0,
            decode_hit_tokens=len(attempt.part.token_ids),  # no part of the prompt is computed again
            prefill_tokens_in_flight=0,
            decode_tokens_in_flight=0,
            prefill_candidates=0,
            decode_candidates=1,
            policy="adopted",
        )
        asked, answered = placement_request(attempt.part, attempt.attempt_id), attempt.part.answered_tokens
        note = AttemptNote(asked, placement, None, now, now, attempt_id=attempt.attempt_id, answered_tokens=answered)
        self._on_workers(attempt, AttemptPhase.DECODE, note, now)
        return Adopt(attempt, placement, asked, location)

    def _placed(self, attempt: Attempt, event: Placed, now: float) -> Sequence[Effect]:
        part, admitted = attempt.part, event.admitted
        note = AttemptNote(
            event.asked,
            admitted.placement,
            admitted.decision.kept(KEPT_CANDIDATES),
            event.began_s,
            now,
            attempt_id=attempt.attempt_id,
            choice=None if part is self.request else part.first_choice,
            answered_tokens=part.answered_tokens,
        )
        self._on_workers(attempt, AttemptPhase.PREFILL, note, admitted.route_began_s)
        return (Dispatch(attempt, admitted.placement),)

    def _on_workers(self, attempt: Attempt, phase: AttemptPhase, note: AttemptNote, route_began_s: float) -> None:
        attempt.enter(phase)
        attempt.note, attempt.busy = note, set(note.placement.endpoints)
        self._unscored = attempt.unscored > 0
        self._scores.clear()
        self.timeline.begin_attempt(note, route_began_s)
        self.stream.begin(attempt.attempt_id, attempt.part.choices)

    def _take_output(self, output: SequenceOutput, now: float) -> Sequence[Effect]:
        attempt = self.attempts.get(output.attempt_id)
        if attempt is None or not attempt.phase.on_workers:
            return ()
        tokens, choice, part = len(output.token_ids), output.choice, attempt.part
        if output.offset + tokens > part.sampling.max_tokens:
            raise _impossible(attempt, output)
        offset = output.offset - part.answered_tokens
        self.timeline.take_decode_output(output.attempt_id, choice, offset, tokens, now, output.made)
        attempt.unreported.discard(choice)
        if output.end is not None:
            attempt.unfinished.discard(choice)
            if not attempt.unfinished:
                attempt.busy.discard(attempt.placement.decode)
        self._outputs.append(output)
        return ()

    def _take_scores(self, attempt: Attempt, scores: PromptScores) -> Sequence[Effect]:
        if scores.offset != len(attempt.part.token_ids) - attempt.unscored or len(scores.logprobs) > attempt.unscored:
            raise InconsistentOutput(
                f"{len(scores.logprobs)} prompt log-probabilities from token {scores.offset} on; "
                f"expected at most {attempt.unscored} from token {len(attempt.part.token_ids) - attempt.unscored} on"
            )
        attempt.unscored -= len(scores.logprobs)
        # One flag suffices, because a request with prompt log-probabilities has only one attempt at a time.
        self._unscored = attempt.unscored > 0
        self._scores.append(scores)
        return ()

    def _first_step(self, attempt: Attempt, event: FirstStep, now: float) -> Sequence[Effect]:
        placement, timings = attempt.placement, event.timings
        counts = timings.cached_tokens, timings.fetched_tokens, timings.restored_tokens
        _check_plausible(attempt, event.outputs, *counts)
        self.timeline.take_first_step(event, now)
        attempt.unfinished.difference_update(output.choice for output in event.outputs if output.end is not None)
        attempt.unreported.clear()
        if attempt.part.pooling is not None:  # an embedding is complete now, without tokens
            attempt.unfinished.clear()
            self._ended.append(self.stream.finish(attempt.part.first_choice, SequenceEnd.LENGTH))
        if placement.prefill is None and not attempt.unfinished:
            attempt.busy.clear()  # the decode worker knows that the answer is complete: no cancel is needed
        if attempt.phase is AttemptPhase.PREFILL:
            attempt.enter(AttemptPhase.DECODE if placement.prefill is None else AttemptPhase.TRANSFER)
        self._outputs.extend(event.outputs)
        return (RecordPrefill(attempt, event.timings),)

    def _kv_received(self, attempt: Attempt, event: KvReceived) -> Sequence[Effect]:
        _check_plausible(attempt, (), event.cached_tokens)
        self.timeline.take_kv_received(event)
        if attempt.placement.prefill is not None:
            attempt.busy.discard(attempt.placement.prefill)
        recorded = RecordTransfer(attempt, event)
        if attempt.phase is AttemptPhase.COMPLETE:
            return (recorded, *self._end(attempt))
        if attempt.phase is not AttemptPhase.DECODE:
            attempt.enter(AttemptPhase.DECODE)
        return (recorded,)

    def _failed(self, attempt: Attempt, failed: Failed, now: float) -> Sequence[Effect]:
        placement, phase = attempt.placement, attempt.phase
        of_prefill = failed.endpoint == placement.prefill
        attempt.busy.discard(failed.endpoint if of_prefill else placement.decode)
        if of_prefill and phase is AttemptPhase.DECODE and not attempt.unscored and not attempt.unreported:
            return ()
        effects: list[Effect] = [MarkDraining(failed.endpoint)] if failed.reason is FailureReason.DRAINING else []
        if phase is AttemptPhase.COMPLETE:
            return [*effects, *self._end(attempt)]
        self.timeline.take_failure(failed, now)
        attempt.failed, attempt.fresh_tokens = failed, self._fresh_tokens(attempt)
        attempt.enter(AttemptPhase.BACKOFF)
        effects.append(self._release(attempt, keeps_kv=of_prefill and failed.reason in PREFILL_GONE))
        if failed.reason not in RETRYABLE:
            return [*effects, *self._fail(error_of(failed, self.request.request_id))]
        tries = attempt.tries.after(failed.reason, attempt.fresh_tokens, died=False)
        settles = placement.prefill if failed.reason in ABOUT_A_PAIR else None
        return [*effects, BackOff(attempt, failed, tries.pause_s(failed.reason, failed.attempt_id), settles)]

    def _retry(self, attempt: Attempt, died: bool, now: float) -> Sequence[Effect]:
        failed, placement, request_id = attempt.failed, attempt.placement, self.request.request_id
        if failed is None:
            raise RuntimeError(f"cannot retry attempt {attempt.attempt_id}: it has not failed")
        attempt.enter(AttemptPhase.ENDED)
        del self.attempts[attempt.attempt_id]
        tries = attempt.tries.after(failed.reason, attempt.fresh_tokens, died)
        effects: list[Effect] = []
        if not died and failed.reason in ABOUT_A_PAIR and placement.prefill is not None:
            effects.append(RecordPairFailure((placement.prefill, placement.decode)))
        if tries.poisonous and self._may_be_poison:
            return [*effects, AddToQuarantine(failed), *self._fail(poisonous(request_id))]
        if tries.exhausted(self._most_tries):
            return [*effects, *self._fail(error_of(failed, request_id))]
        self._avoid(failed, placement, attempt.fresh_tokens)
        return [*effects, LogRetry(failed), *self._continue(attempt.part, tries, now)]

    def _avoid(self, failed: Failed, placement: Placement, fresh_tokens: int) -> None:
        """Set which workers the next attempt prefers.

        If prefill failed or its KV was unreadable, these are another prefill worker and the same decode worker.
        """
        if fresh_tokens >= PROGRESS_TOKENS:
            self.avoided_prefill = frozenset()
        self.preferred_decode = None
        prefill = placement.computing if placement.computes_for_others else None
        if prefill is not None and (failed.endpoint == prefill or failed.reason in ABOUT_A_PAIR):
            self.avoided_prefill |= {prefill}
            self.preferred_decode = placement.decode

    def delivered(self, now: float) -> Sequence[Effect]:
        """Return the effects to perform after the answer has processed all released tokens."""
        effects: list[Effect] = []
        for attempt in tuple(self.attempts.values()):
            phase = attempt.phase
            if not phase.on_workers:
                continue
            if attempt.tries.suspect and self._fresh_tokens(attempt) >= PROGRESS_TOKENS:
                attempt.tries = replace(attempt.tries, deaths=0)
                effects.append(ClearSuspicion(attempt))
            if phase is AttemptPhase.COMPLETE or not self._is_done(attempt.part):
                continue
            placement = attempt.placement
            if phase is AttemptPhase.DECODE or placement.prefill is None or placement.decode in attempt.busy:
                effects += self._end(attempt)
            else:
                attempt.enter(AttemptPhase.COMPLETE)
                effects.append(AwaitKv(attempt))
        if not self.attempts and not self._ended and self.phase is RequestPhase.RUNNING:
            self.phase, self.timeline.ended_s = RequestPhase.COMPLETED, now
        return effects

    def _is_done(self, part: PreparedRequest) -> bool:
        """Return whether all choices are complete or, if `part` continues one choice, whether this choice is."""
        return self.answer.done or (part is not self.request and self.answer.has_finished(part.first_choice))

    def _fresh_tokens(self, attempt: Attempt) -> int:
        """Return the largest number of tokens that any choice has released since the attempt began."""
        released = (self.stream.released(choice) for choice in attempt.part.choices)
        return max(now - before for now, before in zip(released, attempt.before, strict=True))

    def _end(self, attempt: Attempt) -> Sequence[Effect]:
        """Close an attempt after all its choices are complete."""
        attempt.enter(AttemptPhase.ENDED)
        del self.attempts[attempt.attempt_id]
        return (self._release(attempt, answered=True),)

    def _release(self, attempt: Attempt, keeps_kv: bool = False, answered: bool = False) -> Release:
        self.stream.leave(attempt.attempt_id)
        endpoints = attempt.note.placement.endpoints if attempt.note is not None else ()
        cancels = tuple(endpoint for endpoint in endpoints if endpoint in attempt.busy)
        return Release(attempt, cancels, keeps_kv, answered)

    def _deadline(self) -> Sequence[Effect]:
        phases = {attempt.phase for attempt in self.attempts.values()}
        if self.answer.done:
            return self._end_all()
        if any(phase.on_workers for phase in phases):
            return self._fail(DeadlineExceeded())
        if AttemptPhase.TURN in phases:
            return self._fail(DeadlineExceeded("the deadline passed while the request waited to be retried alone"))
        return self._fail(DeadlineExceeded("the deadline passed while the request was pending"))

    def _end_all(self) -> Sequence[Effect]:
        return [effect for attempt in tuple(self.attempts.values()) for effect in self._end(attempt)]

    def _fail(self, error: BatonError) -> Sequence[Effect]:
        self.phase = RequestPhase.FAILED
        return (Fail(error),)

    def _close(self, phase: RequestPhase) -> Sequence[Effect]:
        if not self.is_over:
            self.phase = phase
        left = tuple(self.attempts.values())
        self.attempts.clear()
        effects = [self._release(attempt) for attempt in left if attempt.phase is not AttemptPhase.BACKOFF]
        for attempt in left:
            attempt.enter(AttemptPhase.ENDED)
        return effects


def placed(
    whole: PreparedRequest, parts: Sequence[PreparedRequest], locations: Sequence[AttemptLocation]
) -> Sequence[tuple[PreparedRequest, AttemptLocation | None]]:
    """Pair each part with the attempt to adopt, or None. An attempt at several choices is paired with `whole`."""
    for location in locations:
        if location.choices > 1:
            return ((whole, location),)
    by_choice = {location.first_choice: location for location in locations}
    return tuple((part, by_choice.get(part.first_choice)) for part in parts)


def _check_plausible(attempt: Attempt, outputs: Sequence[SequenceOutput], *prompt_counts: int) -> None:
    """Check a worker's counts of prompt tokens and its outputs. Raises: InconsistentOutput if they are impossible."""
    prompt_tokens = len(attempt.part.token_ids)
    if attempt.adopts is not None:  # the adopted prompt may include answer tokens that the client did not receive
        prompt_tokens += attempt.part.sampling.max_tokens - attempt.part.answered_tokens
    if max(prompt_counts, default=0) > prompt_tokens:
        raise InconsistentOutput(f"{max(prompt_counts)} prompt tokens reported, but the prompt has {prompt_tokens}")
    for output in outputs:
        beyond = output.offset + len(output.token_ids)
        if beyond > attempt.part.sampling.max_tokens or output.attempt_id != attempt.attempt_id:
            raise _impossible(attempt, output)


def _impossible(attempt: Attempt, output: SequenceOutput) -> InconsistentOutput:
    return InconsistentOutput(
        f"tokens {output.offset} to {output.offset + len(output.token_ids)} of attempt {output.attempt_id}; "
        f"expected at most {attempt.part.sampling.max_tokens} tokens of attempt {attempt.attempt_id}"
    )

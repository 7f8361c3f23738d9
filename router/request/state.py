"""The phases of a request and of its attempts, and how events change them. Pure: time comes in, effects go out.

| phase | event | next phase |
|---|---|---|
| QUEUED | TurnCame: no other suspected request runs | QUEUED, submitted |
| QUEUED | Placed | PREFILL |
| QUEUED | Refused | the request fails |
| PREFILL | FirstStep | TRANSFER; DECODE where the decode worker computed the prompt |
| PREFILL, TRANSFER | KvReceived, which may overtake FirstStep | DECODE |
| PREFILL, TRANSFER, DECODE | Failed | BACKOFF; the request fails where no other attempt may succeed |
| PREFILL, TRANSFER, DECODE | every choice has ended | ENDED, once KvReceived came or is overdue |
| BACKOFF | RetryDue | ENDED; the rest begins anew in QUEUED, or the request fails if its tries are spent |
| any | Closed: failed, past its deadline, or the client has gone | ENDED |

An answer that is adopted begins in DECODE. In DECODE a failure of the prefill worker changes nothing, unless scores of
the prompt or the first token of a choice are missing: a choice that ended with its first token never comes to decode.
Outputs may come before FirstStep; the token stream orders them. Events of an attempt that is over change nothing.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.process.errors import BatonError, DeadlineExceeded
from baton.router.admission.queue import Admitted
from baton.router.placement.decide import Placement
from baton.router.request.answer import InconsistentOutput, TokenStream
from baton.router.request.resume import AttemptLocation
from baton.router.request.retry import (
    ABOUT_A_PAIR,
    PREFILL_GONE,
    RETRYABLE,
    error_of,
    poisonous,
)
from baton.router.trace.record import KEPT_CANDIDATES, AnswerStream, AttemptNote, Timeline
from baton.router.types.events import (
    AttemptEvent,
    End,
    Failed,
    FailureReason,
    FirstStep,
    KvReceived,
    NewTokens,
    PrefillTimings,
    PromptScores,
    SequenceOutput,
)
from baton.router.types.placement import PlacementRequest, placement_request
from baton.router.types.request import PreparedRequest, end_of, replays

PROGRESS_TOKENS = 2
ALL_FACTOR = 4
POISON_DEATHS = 3
SUSPECT_DEATHS = 2

_NOTICING_S = 0.2
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Tries:
    """The failed attempts at a request; at one of its choices, where that continues by itself.

    Progress is two new tokens: the first one comes with the computing of the prompt, even if its workers fail
    afterwards. An attempt that made progress resets the count of failures: a long answer may lose many workers.
    `ALL_FACTOR` bounds the cost of a request that fails again and again a little later.

    A dead process does not report the cause of its death, and many requests lose their attempt with it. So a request is
    suspected if it lost its worker twice in a row without progress in between: a request that only ran beside a deadly
    one is served by the next worker and forgiven. Two deaths can still hit the same innocents, those that wait behind
    the deadly one each time; so suspected requests run one after another (`Suspects`). A request whose worker dies a
    third time, in its turn, counts as deadly: it fails, and requests equal to it are refused (`Quarantine`).

    One case is not distinguished: an innocent in its turn whose worker is killed by something else at that moment, the
    third time in a row.
    """

    failed: int = 0
    in_a_row: int = 0  # without progress; a worker that drained did not fail
    deaths: int = 0  # of processes, in a row, without progress

    def after(self, reason: FailureReason, fresh_tokens: int, died: bool) -> "Tries":
        """One more, which made so many new tokens. `died`: the process of a worker that was at it is gone."""
        progress = fresh_tokens >= PROGRESS_TOKENS
        return Tries(
            failed=self.failed + 1,
            in_a_row=(0 if progress else self.in_a_row) + (reason is not FailureReason.DRAINING),
            deaths=(0 if progress else self.deaths) + died,
        )

    def exhausted(self, attempts: int) -> bool:
        """`attempts` may fail one after another, and `ALL_FACTOR` times as many in all."""
        return self.in_a_row >= attempts or self.failed >= ALL_FACTOR * attempts

    @property
    def poisonous(self) -> bool:
        return self.deaths >= POISON_DEATHS

    @property
    def suspect(self) -> bool:
        return self.deaths >= SUSPECT_DEATHS

    def pause_s(self, reason: FailureReason, turn: int) -> float:
        """Before the next attempt: none after a first failure, growing from there; `turn` spreads those of many.

        Where a worker's peer may have reported its death first, the pause is mostly enough to notice it here.
        """
        noticing_s = _NOTICING_S if reason in ABOUT_A_PAIR else 0.0
        if self.in_a_row <= 1:
            return noticing_s
        longest_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self.in_a_row - 2))
        return noticing_s + longest_s * (0.5 + turn % 8 / 16)


class RequestPhase(Enum):
    PREPARED = auto()
    RUNNING = auto()
    COMPLETED = auto()
    FAILED = auto()
    CANCELLED = auto()


class AttemptPhase(Enum):
    QUEUED = auto()  # it waits for its turn and for room
    PREFILL = auto()  # the prompt is computed; it has room on all its workers
    TRANSFER = auto()  # the first tokens are here; prefill keeps the KV until decode has it
    DECODE = auto()  # decode has the KV, and alone makes the rest
    BACKOFF = auto()  # it failed, and another one will follow; it holds nothing
    ENDED = auto()  # it holds nothing


ON_WORKERS = frozenset({AttemptPhase.PREFILL, AttemptPhase.TRANSFER, AttemptPhase.DECODE})
NEXT: Mapping[AttemptPhase, frozenset[AttemptPhase]] = {
    AttemptPhase.QUEUED: frozenset({AttemptPhase.PREFILL, AttemptPhase.DECODE, AttemptPhase.ENDED}),
    AttemptPhase.PREFILL: frozenset(
        {AttemptPhase.TRANSFER, AttemptPhase.DECODE, AttemptPhase.BACKOFF, AttemptPhase.ENDED}
    ),
    AttemptPhase.TRANSFER: frozenset({AttemptPhase.DECODE, AttemptPhase.BACKOFF, AttemptPhase.ENDED}),
    AttemptPhase.DECODE: frozenset({AttemptPhase.BACKOFF, AttemptPhase.ENDED}),
    AttemptPhase.BACKOFF: frozenset({AttemptPhase.ENDED}),
    AttemptPhase.ENDED: frozenset(),
}


@dataclass(eq=False, slots=True)
class Attempt:
    """One attempt at `part`: the request, or one choice of it from where that is. `tries` are those before it."""

    attempt_id: int
    part: PreparedRequest
    tries: Tries
    before: Sequence[int]  # tokens of each of its choices that were out when it began
    unscored: int  # tokens of the prompt whose scores are still to come
    unreported: set[int]  # choices of which no worker has sent anything
    phase: AttemptPhase = AttemptPhase.QUEUED
    is_on_workers: bool = False  # as its phase says; looking an enum up would take as long as taking a token in
    adopts: AttemptLocation | None = None  # the attempt of another router that it continues
    placement: Placement | None = None
    at_work: set[str] = field(default_factory=set)  # its workers that may still hold something of it
    unfinished: set[int] = field(default_factory=set)  # choices that may still be running on decode
    awaits_turn: bool = False  # while another suspected request runs
    is_suspected: bool = False  # it runs alone: until it makes progress, no other suspected request does
    awaits_kv: bool = False  # its choices have ended
    note: AttemptNote | None = None
    failed: Failed | None = None
    fresh_tokens: int = 0  # that it had made when it failed

    def enter(self, phase: AttemptPhase) -> None:
        """Raises: RuntimeError for a phase that does not follow."""
        if phase not in NEXT[self.phase]:
            raise RuntimeError(f"{phase.name} does not follow {self.phase.name}")
        self.phase, self.is_on_workers = phase, phase in ON_WORKERS


@dataclass(frozen=True, slots=True)
class Begun:
    """`locations` of the attempts that can be adopted."""

    locations: Sequence[AttemptLocation] = ()


@dataclass(frozen=True, slots=True)
class TurnCame:
    attempt_id: int


@dataclass(frozen=True, slots=True)
class Placed:
    """`began_s`: when it was submitted."""

    attempt_id: int
    asked: PlacementRequest
    admitted: Admitted
    began_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    attempt_id: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class KvOverdue:
    attempt_id: int


@dataclass(frozen=True, slots=True)
class RetryDue:
    """`died`: the process of a worker that was at the attempt is gone."""

    attempt_id: int
    died: bool


@dataclass(frozen=True, slots=True)
class Deadline:
    pass


@dataclass(frozen=True, slots=True)
class Superseded:
    """Its weights were replaced, and its time to end with them is over, or no worker has them any more."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class Delivered:
    """The answer has taken all new tokens."""


@dataclass(frozen=True, slots=True)
class Closed:
    """No more of the answer is wanted, or it cannot be made. `phase`: the request's, if it has not ended already."""

    phase: RequestPhase


OwnEvent = Begun | TurnCame | Placed | Refused | KvOverdue | RetryDue | Deadline | Superseded | Delivered | Closed


@dataclass(frozen=True, slots=True)
class AwaitTurn:
    """Until no other suspected request runs: TurnCame."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Submit:
    """To the queue for room: Placed or Refused."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Dispatch:
    attempt: Attempt
    placement: Placement


@dataclass(frozen=True, slots=True)
class Adopt:
    attempt: Attempt
    placement: Placement
    asked: PlacementRequest
    location: AttemptLocation


@dataclass(frozen=True, slots=True)
class PromptComputed:
    attempt: Attempt
    placement: Placement
    timings: PrefillTimings


@dataclass(frozen=True, slots=True)
class KvArrived:
    attempt: Attempt
    placement: Placement
    kv_received: KvReceived


@dataclass(frozen=True, slots=True)
class AwaitKv:
    """A moment, then KvOverdue: the answer is complete, but for the timings that KvReceived brings."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Forgive:
    """It made progress: other suspected requests may run."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Release:
    """All that it holds. `cancels`: workers that may hold something; `keeps_kv`: its KV in decode is of use to the next
    attempt; `answered`: all its choices have ended."""

    attempt: Attempt
    cancels: Sequence[str] = ()
    keeps_kv: bool = False
    answered: bool = False


@dataclass(frozen=True, slots=True)
class Drains:
    endpoint: str


@dataclass(frozen=True, slots=True)
class BackOff:
    """After the pause, and once it is known whether the worker `settles` comes back: RetryDue."""

    attempt: Attempt
    failed: Failed
    pause_s: float
    settles: str | None


@dataclass(frozen=True, slots=True)
class PairFailed:
    pair: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Retry:
    """For the log: other attempts follow."""

    failed: Failed


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Requests like this one are refused from now on."""

    failed: Failed


@dataclass(frozen=True, slots=True)
class Fail:
    error: BatonError


Effect = (
    AwaitTurn
    | Submit
    | Dispatch
    | Adopt
    | PromptComputed
    | KvArrived
    | AwaitKv
    | Forgive
    | Release
    | Drains
    | BackOff
    | PairFailed
    | Retry
    | Quarantined
    | Fail
)


class RequestState:
    """One request, over all its attempts. `advance` alone changes it, and writes its timeline."""

    def __init__(
        self,
        request: PreparedRequest,
        answer: AnswerStream,
        timeline: Timeline,
        attempt_ids: Iterator[int],
        most_tries: int,
        may_be_poison: bool = True,
    ) -> None:
        """So many attempts in a row may fail. `may_be_poison` False: it is never quarantined, even if workers die."""
        self.request = request
        self.answer = answer
        self.timeline = timeline
        self.phase = RequestPhase.PREPARED
        self.is_over = False
        self.stream = TokenStream(request.sampling.n)
        self.attempts: dict[int, Attempt] = {}  # that have not ended
        self.avoided_prefill: frozenset[str] = frozenset()
        """Workers that the next attempt should avoid."""
        self.preferred_decode: str | None = None
        """One that was at the last attempt, where it was not that which failed."""
        self._attempt_ids = attempt_ids
        self._most_tries = most_tries
        self._may_be_poison = may_be_poison
        self._outputs: deque[SequenceOutput] = deque()
        self._scores: deque[PromptScores] = deque()
        self._ended: list[NewTokens] = []  # ends that were reached though their message was lost
        self._unscored = False

    @property
    def has_more(self) -> bool:
        """There is more to give out before anything else comes: ends that were found where no attempt is left, or an
        output behind those given out that is inconsistent."""
        return not self.attempts or (bool(self._outputs) and not self._unscored)

    def new_scores(self) -> Sequence[PromptScores]:
        """Of the prompt, in order, each once."""
        if not self._scores:
            return ()
        scores, self._scores = self._scores, deque()
        return scores

    def new_tokens(self) -> Sequence[NewTokens]:
        """In order, each once. Tokens from decode may overtake prefill's scores, and wait for those.

        Raises: InconsistentOutput.
        """
        ended, self._ended = self._ended, []
        if not self._outputs or self._unscored:
            return ended
        released = self.stream.take_all(self._outputs)
        return (*ended, *released) if ended else released

    def advance(self, event: AttemptEvent | OwnEvent, now: float) -> Sequence[Effect]:
        """What has to be done now. Raises: InconsistentOutput."""
        match event:
            case SequenceOutput():
                return self._take_output(event, now)
            case Delivered():
                return self._delivered(now)
            case Begun():
                self.phase = RequestPhase.RUNNING
                return self._continue(self.request, Tries(), now, event.locations)
            case Deadline():
                return self._deadline()
            case Superseded():
                return self._end_all() if self.answer.done else self._fail(event.error)
            case Closed():
                return self._close(event.phase)
        attempt = self.attempts.get(event.attempt_id)
        if attempt is None:
            return ()
        return self._of_attempt(attempt, event, now)

    def _of_attempt(
        self,
        attempt: Attempt,
        event: TurnCame | Placed | Refused | KvOverdue | RetryDue | PromptScores | FirstStep | KvReceived | Failed,
        now: float,
    ) -> Sequence[Effect]:
        placement = attempt.placement
        match event:
            case TurnCame():
                attempt.awaits_turn = False
                return (Submit(attempt),)
            case Placed():
                return self._placed(attempt, event, now)
            case Refused():
                return self._fail(event.error)
            case RetryDue():
                return self._retry(attempt, event.died, now)
            case KvOverdue():
                return self._end(attempt) if attempt.awaits_kv else ()
        if placement is None or not attempt.is_on_workers:
            return ()
        match event:
            case FirstStep():
                return self._first_step(attempt, placement, event, now)
            case KvReceived():
                return self._kv_received(attempt, placement, event)
            case Failed():
                return self._failed(attempt, placement, event, now)
            case PromptScores():
                return self._take_scores(attempt, event)

    def _continue(
        self, part: PreparedRequest, tries: Tries, now: float, locations: Sequence[AttemptLocation] = ()
    ) -> list[Effect]:
        """The rest of a part: its attempts, each choice by itself where some of it is out."""
        parts = placed(self.request, self._left(part), locations)
        return [self._open(each, tries, location, now) for each, location in parts]

    def _left(self, part: PreparedRequest) -> tuple[PreparedRequest, ...]:
        """The parts still to be made. Ends that were reached without a message are found."""
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
        sampling, choices = part.sampling, part.choices
        attempt = Attempt(
            next(self._attempt_ids),
            part,
            tries,
            before=[self.stream.released(choice) for choice in choices],
            unscored=0 if sampling.prompt_logprobs is None else len(part.token_ids) - 1,
            unreported=set()
            if sampling.beams is not None
            else set(choices),  # of a search decode sends all, at its end
            adopts=location,
            unfinished=set(choices),
            awaits_turn=tries.suspect,
            is_suspected=tries.suspect,
        )
        self.attempts[attempt.attempt_id] = attempt
        if location is not None:
            return self._adopt(attempt, location, now)
        return AwaitTurn(attempt) if tries.suspect else Submit(attempt)

    def _adopt(self, attempt: Attempt, location: AttemptLocation, now: float) -> Adopt:
        placement = Placement(
            prefill=None,
            decode=location.endpoint,
            prefill_hit_tokens=0,
            decode_hit_tokens=len(attempt.part.token_ids),  # nothing of it is computed
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
        attempt.note, attempt.placement = note, note.placement
        attempt.at_work = set(note.placement.endpoints)
        self._unscored = attempt.unscored > 0
        self._scores.clear()
        self.timeline.begin_attempt(note, route_began_s)
        self.stream.begin(attempt.attempt_id, attempt.part.choices)

    def _take_output(self, output: SequenceOutput, now: float) -> Sequence[Effect]:
        attempt = self.attempts.get(output.attempt_id)
        if attempt is None or (placement := attempt.placement) is None or not attempt.is_on_workers:
            return ()
        _check_plausible(attempt, (output,))
        offset = output.offset - attempt.part.answered_tokens
        self.timeline.take_decode_output(
            output.attempt_id, output.choice, offset, len(output.token_ids), now, output.made
        )
        attempt.unreported.discard(output.choice)
        if output.end is not None:
            attempt.unfinished.discard(output.choice)
            if not attempt.unfinished:
                attempt.at_work.discard(placement.decode)
        self._outputs.append(output)
        return ()

    def _take_scores(self, attempt: Attempt, scores: PromptScores) -> Sequence[Effect]:
        if scores.offset != len(attempt.part.token_ids) - attempt.unscored or len(scores.logprobs) > attempt.unscored:
            raise InconsistentOutput(
                f"prompt log-probabilities begin at token {scores.offset}; the last {attempt.unscored} are missing"
            )
        attempt.unscored -= len(scores.logprobs)
        self._unscored = attempt.unscored > 0  # a request whose prompt is scored has one attempt at a time
        self._scores.append(scores)
        return ()

    def _first_step(self, attempt: Attempt, placement: Placement, event: FirstStep, now: float) -> Sequence[Effect]:
        timings = event.timings
        counts = timings.cached_tokens, timings.fetched_tokens, timings.restored_tokens
        _check_plausible(attempt, event.outputs, *counts)
        self.timeline.take_first_step(event, now)
        attempt.unfinished.difference_update(output.choice for output in event.outputs if output.end is not None)
        attempt.unreported.clear()
        if attempt.part.valid.pooling is not None:  # it has no tokens, and this is its end
            attempt.unfinished.clear()
            self._ended.append(self.stream.finish(attempt.part.first_choice, End.LENGTH))
        if placement.prefill is None and not attempt.unfinished:
            attempt.at_work.clear()  # decode made this step, so it knows that the answer has ended
        if attempt.phase is AttemptPhase.PREFILL:
            attempt.enter(AttemptPhase.DECODE if placement.prefill is None else AttemptPhase.TRANSFER)
        self._outputs.extend(event.outputs)
        return (PromptComputed(attempt, placement, event.timings),)

    def _kv_received(self, attempt: Attempt, placement: Placement, event: KvReceived) -> Sequence[Effect]:
        _check_plausible(attempt, (), event.cached_tokens)
        self.timeline.take_kv_received(event)
        if placement.prefill is not None:
            attempt.at_work.discard(placement.prefill)
        if attempt.phase is not AttemptPhase.DECODE:
            attempt.enter(AttemptPhase.DECODE)
        arrived = KvArrived(attempt, placement, event)
        return (arrived, *self._end(attempt)) if attempt.awaits_kv else (arrived,)

    def _failed(self, attempt: Attempt, placement: Placement, failed: Failed, now: float) -> Sequence[Effect]:
        of_prefill = failed.endpoint == placement.prefill
        attempt.at_work.discard(failed.endpoint if of_prefill else placement.decode)
        has_kv = attempt.phase is AttemptPhase.DECODE
        if of_prefill and has_kv and not attempt.unscored and not attempt.unreported:
            return ()
        effects: list[Effect] = [Drains(failed.endpoint)] if failed.reason is FailureReason.DRAINING else []
        if attempt.awaits_kv:
            return [*effects, *self._end(attempt)]
        self.timeline.take_failure(failed, now)
        attempt.failed, attempt.fresh_tokens = failed, self._fresh_tokens(attempt)
        attempt.enter(AttemptPhase.BACKOFF)
        effects.append(self._release(attempt, keeps_kv=of_prefill and failed.reason in PREFILL_GONE))
        if failed.reason not in RETRYABLE:
            return [*effects, *self._fail(error_of(failed, self.request.valid.request_id))]
        tries = attempt.tries.after(failed.reason, attempt.fresh_tokens, died=False)
        settles = placement.prefill if failed.reason in ABOUT_A_PAIR else None
        return [*effects, BackOff(attempt, failed, tries.pause_s(failed.reason, failed.attempt_id), settles)]

    def _retry(self, attempt: Attempt, died: bool, now: float) -> Sequence[Effect]:
        failed, placement, request_id = attempt.failed, attempt.placement, self.request.valid.request_id
        if failed is None or placement is None:
            raise RuntimeError("only an attempt that failed is followed by others")
        attempt.enter(AttemptPhase.ENDED)
        del self.attempts[attempt.attempt_id]
        tries = attempt.tries.after(failed.reason, attempt.fresh_tokens, died)
        effects: list[Effect] = []
        if not died and failed.reason in ABOUT_A_PAIR and placement.prefill is not None:
            effects.append(PairFailed((placement.prefill, placement.decode)))
        if tries.poisonous and self._may_be_poison:
            return [*effects, Quarantined(failed), *self._fail(poisonous(request_id))]
        if tries.exhausted(self._most_tries):
            return [*effects, *self._fail(error_of(failed, request_id))]
        self._avoid(failed, placement, attempt.fresh_tokens)
        return [*effects, Retry(failed), *self._continue(attempt.part, tries, now)]

    def _avoid(self, failed: Failed, placement: Placement, fresh_tokens: int) -> None:
        """The next attempt goes to another prefill worker where this one failed, or its KV could not be read.

        Its decode worker has nothing to do with that.
        """
        if fresh_tokens >= PROGRESS_TOKENS:
            self.avoided_prefill = frozenset()
        self.preferred_decode = None
        prefill = placement.computing if placement.computes_for_others else None
        if prefill is not None and (failed.endpoint == prefill or failed.reason in ABOUT_A_PAIR):
            self.avoided_prefill |= {prefill}
            self.preferred_decode = placement.decode

    def _delivered(self, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        for attempt in tuple(self.attempts.values()):
            if not attempt.is_on_workers or (placement := attempt.placement) is None:
                continue
            if attempt.is_suspected and self._fresh_tokens(attempt) >= PROGRESS_TOKENS:
                attempt.is_suspected = False
                effects.append(Forgive(attempt))
            if attempt.awaits_kv or not self._is_done(attempt.part):
                continue
            has_kv = placement.prefill is None or attempt.phase is AttemptPhase.DECODE
            if has_kv or placement.decode in attempt.at_work:
                effects += self._end(attempt)
            else:
                attempt.awaits_kv = True
                effects.append(AwaitKv(attempt))
        if not self.attempts and not self._ended and self.phase is RequestPhase.RUNNING:
            self.phase, self.is_over, self.timeline.ended_s = RequestPhase.COMPLETED, True, now
        return effects

    def _is_done(self, part: PreparedRequest) -> bool:
        """All of it, or the one choice of a part."""
        return self.answer.done or (part is not self.request and self.answer.has_finished(part.first_choice))

    def _fresh_tokens(self, attempt: Attempt) -> int:
        """Most that any of its choices has made."""
        released = (self.stream.released(choice) for choice in attempt.part.choices)
        return max(now - before for now, before in zip(released, attempt.before, strict=True))

    def _end(self, attempt: Attempt) -> Sequence[Effect]:
        """All its choices have ended."""
        attempt.enter(AttemptPhase.ENDED)
        del self.attempts[attempt.attempt_id]
        return (self._release(attempt, answered=True),)

    def _release(self, attempt: Attempt, keeps_kv: bool = False, answered: bool = False) -> Release:
        self.stream.leave(attempt.attempt_id)
        endpoints = attempt.placement.endpoints if attempt.placement is not None else ()
        cancels = tuple(endpoint for endpoint in endpoints if endpoint in attempt.at_work)
        return Release(attempt, cancels, keeps_kv, answered)

    def _deadline(self) -> Sequence[Effect]:
        phases = {attempt.phase for attempt in self.attempts.values()}
        if self.answer.done:
            return self._end_all()
        if phases & ON_WORKERS:
            return self._fail(DeadlineExceeded())
        if any(attempt.awaits_turn for attempt in self.attempts.values()):
            return self._fail(DeadlineExceeded("the deadline passed while the request waited to be retried alone"))
        return self._fail(DeadlineExceeded("the deadline passed while the request was pending"))

    def _end_all(self) -> Sequence[Effect]:
        return [effect for attempt in tuple(self.attempts.values()) for effect in self._end(attempt)]

    def _fail(self, error: BatonError) -> Sequence[Effect]:
        self.phase, self.is_over = RequestPhase.FAILED, True
        return (Fail(error),)

    def _close(self, phase: RequestPhase) -> Sequence[Effect]:
        if self.phase in (RequestPhase.PREPARED, RequestPhase.RUNNING):
            self.phase, self.is_over = phase, True
        left = tuple(self.attempts.values())
        self.attempts.clear()
        effects = [self._release(attempt) for attempt in left if attempt.phase is not AttemptPhase.BACKOFF]
        for attempt in left:
            attempt.enter(AttemptPhase.ENDED)
        return effects


def placed(
    whole: PreparedRequest, parts: Sequence[PreparedRequest], locations: Sequence[AttemptLocation]
) -> Sequence[tuple[PreparedRequest, AttemptLocation | None]]:
    """Each part with the location of its attempt, if any. Where one makes all choices: the whole request with that."""
    for location in locations:
        if location.choices > 1:
            return ((whole, location),)
    by_choice = {location.first_choice: location for location in locations}
    return tuple((part, by_choice.get(part.first_choice)) for part in parts)


def _check_plausible(attempt: Attempt, outputs: Sequence[SequenceOutput], *prompt_counts: int) -> None:
    """`prompt_counts`: numbers of tokens of the prompt. Raises: InconsistentOutput for what the attempt cannot have."""
    prompt_tokens, most_tokens = len(attempt.part.token_ids), attempt.part.sampling.max_tokens
    if attempt.adopts is not None:  # its prompt may have more of the answer than the client received
        prompt_tokens += most_tokens - attempt.part.answered_tokens
    if max(prompt_counts, default=0) > prompt_tokens:
        raise InconsistentOutput(f"{max(prompt_counts)} tokens of a prompt of {prompt_tokens}")
    for output in outputs:
        end = output.offset + len(output.token_ids)
        if end > most_tokens or output.attempt_id != attempt.attempt_id:
            raise InconsistentOutput(
                f"tokens {output.offset} to {end} of attempt {output.attempt_id}: attempt {attempt.attempt_id} has at "
                f"most {most_tokens}"
            )

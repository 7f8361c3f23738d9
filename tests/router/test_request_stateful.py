"""The state of a request under events in any order: each lease is returned once, each offset is given out once."""

import itertools
from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.process.errors import Unavailable
from baton.router.admission.queue import Admitted
from baton.router.placement.decide import Placement
from baton.router.request.answer import RequestAnswer
from baton.router.request.attempt import NEXT, Attempt, AttemptPhase
from baton.router.request.effects import (
    Adopt,
    AwaitKv,
    AwaitTurn,
    BackOff,
    ClearSuspicion,
    Dispatch,
    Effect,
    Fail,
    Release,
    Submit,
)
from baton.router.request.events import (
    Begun,
    Deadline,
    KvOverdue,
    Placed,
    Refused,
    RequestClosed,
    RequestPhase,
    RetryDue,
    TurnCame,
)
from baton.router.request.resume import AttemptLocation
from baton.router.request.state import RequestState
from baton.router.trace.record import Timeline
from baton.router.types.events import (
    Failed,
    FailureReason,
    FirstStep,
    KvReceived,
    PrefillTimings,
    SequenceEnd,
    SequenceOutput,
)
from baton.router.types.placement import placement_request
from baton.router.types.response import ChoiceFinished, Delta
from tests.router.replay_world import DECISION, PLACEMENT, PROMPT, new_detokenizer, request_of, whole_answer

LOCAL = PLACEMENT._replace(prefill=None)
REASONS = [
    FailureReason.WORKER_LOST,
    FailureReason.WORKER_DIED,
    FailureReason.TRANSFER,
    FailureReason.DRAINING,
    FailureReason.NONFINITE,
]
TIMINGS = PrefillTimings(0.0, (1.0,), 1.0, 0)


class RequestMachine(RuleBasedStateMachine):
    """Plays queue, workers and timers: what an effect asks for may come at any time, or never."""

    @initialize(n=st.integers(1, 3), adopted=st.booleans())
    def begin(self, n: int, adopted: bool) -> None:
        self.request = request_of(max_tokens=6, n=n)
        self.answer = RequestAnswer(n, (), 0, new_detokenizer)
        ids = itertools.count(1)
        self.state = RequestState(self.request, self.answer, Timeline(0.0), ids, most_tries=4)
        self.now = 0.0
        self.seen: dict[int, Attempt] = {}  # all attempts there ever were
        self.phases: dict[int, AttemptPhase] = {}
        self.held: Counter[str] = Counter()
        self.returned: Counter[int] = Counter()
        self.taken: Counter[int] = Counter()
        self.waiting: set[int] = set()  # in the queue
        self.turns: set[int] = set()  # for the suspect lock
        self.pausing: set[int] = set()
        self.overdue: set[int] = set()
        self.given: dict[int, list[int]] = {choice: [] for choice in range(n)}
        self.ended: Counter[int] = Counter()
        self.failed = False
        self.dispatched: dict[int, Placement] = {}
        self.made: dict[int, int] = {}  # the next offset that decode sends, by attempt and choice
        location = AttemptLocation("d", 77, 0, n)
        self.feed(Begun((location,) if adopted else ()))

    def feed(self, event: Any) -> None:
        self.now += 0.01
        self.take(self.state.advance(event, self.now))
        self.deliver()

    def deliver(self) -> None:
        for released in self.state.new_tokens():
            for event in self.answer.take(released):
                if isinstance(event, ChoiceFinished):
                    self.ended[event.index] += 1
                elif isinstance(event, Delta):
                    assert event.offset == len(self.given[event.index]), "an offset twice, or left out"
                    self.given[event.index] += event.token_ids
        self.take(self.state.delivered(self.now))

    def take(self, effects: Any) -> None:
        assert not self.failed or not effects or all(isinstance(effect, Release) for effect in effects)
        for effect in effects:
            self.perform(effect)

    def perform(self, effect: Effect) -> None:
        match effect:
            case AwaitTurn(attempt):
                self.lease(attempt)
                self.turns.add(attempt.attempt_id)
            case Submit(attempt):
                self.lease(attempt)
                self.waiting.add(attempt.attempt_id)
            case Dispatch(attempt, placement):
                self.dispatched[attempt.attempt_id] = placement
            case Adopt(attempt, placement):
                self.lease(attempt)
                assert attempt.phase is AttemptPhase.DECODE
                self.dispatched[attempt.attempt_id] = placement
            case AwaitKv(attempt):
                self.overdue.add(attempt.attempt_id)
            case BackOff(attempt):
                assert self.returned[attempt.attempt_id] == 1, "in a pause it holds nothing"
                self.pausing.add(attempt.attempt_id)
            case Release(attempt):
                assert set(effect.cancels) <= set(attempt.note.placement.endpoints if attempt.note else ())
                self.returned[attempt.attempt_id] += 1
                for names in (self.waiting, self.turns, self.overdue):
                    names.discard(attempt.attempt_id)
            case ClearSuspicion(attempt):
                assert not attempt.tries.suspect
            case Fail():
                self.failed = True
            case _:
                pass

    def lease(self, attempt: Attempt) -> None:
        self.seen[attempt.attempt_id] = attempt
        self.taken[attempt.attempt_id] = 1

    def drawn(self, data: st.DataObject, ids: set[int]) -> int:
        return data.draw(st.sampled_from(sorted(ids)))

    @property
    def running(self) -> set[int]:
        return {number for number in self.dispatched if self.seen[number].phase.on_workers}

    @property
    def goes_on(self) -> bool:
        return not self.failed and not self.state.is_over

    @precondition(lambda self: self.goes_on and self.waiting)
    @rule(data=st.data(), local=st.booleans())
    def placed(self, data: st.DataObject, local: bool) -> None:
        number = self.drawn(data, self.waiting)
        self.waiting.discard(number)
        asked = placement_request(self.seen[number].part, number)
        self.feed(Placed(number, asked, Admitted(LOCAL if local else PLACEMENT, self.now, DECISION), self.now))

    @precondition(lambda self: self.goes_on and self.waiting)
    @rule(data=st.data(), rarely=st.integers(0, 9))
    def refused(self, data: st.DataObject, rarely: int) -> None:
        if rarely == 0:
            self.feed(Refused(self.drawn(data, self.waiting), Unavailable("no", "NO_WORKERS", 1.0)))

    @precondition(lambda self: self.goes_on and self.turns)
    @rule(data=st.data())
    def turn_came(self, data: st.DataObject) -> None:
        number = self.drawn(data, self.turns)
        self.turns.discard(number)
        self.feed(TurnCame(number))

    @precondition(lambda self: self.goes_on and self.running)
    @rule(data=st.data())
    def first_step(self, data: st.DataObject) -> None:
        attempt = self.seen[self.drawn(data, self.running)]
        outputs = tuple(
            self.output(attempt, choice, attempt.part.answered_tokens, 1) for choice in attempt.part.choices
        )
        self.feed(FirstStep(attempt.attempt_id, outputs, TIMINGS))

    @precondition(lambda self: self.goes_on and self.running)
    @rule(data=st.data(), ahead=st.integers(0, 3), count=st.integers(1, 4))
    def tokens(self, data: st.DataObject, ahead: int, count: int) -> None:
        """From anywhere in the answer: repeated, in order, or beyond a gap."""
        attempt = self.seen[self.drawn(data, self.running)]
        choice = data.draw(st.sampled_from(list(attempt.part.choices)))
        begin = max(attempt.part.answered_tokens, len(self.given[choice]) - 1) + ahead
        if begin < len(whole_answer(self.request.sampling, PROMPT, choice)):
            self.feed(self.output(attempt, choice, begin, count))

    @rule(data=st.data())
    def late_and_wrong(self, data: st.DataObject) -> None:
        """Of an attempt that is over: it changes nothing."""
        over = set(self.dispatched) - self.running
        if over:
            number = self.drawn(data, over)
            output = SequenceOutput(number, self.seen[number].part.first_choice, 0, (1, 2, 3))
            for event in (output, KvReceived(number, 1, 1.0, 0.0, 0.0, 1.0, "grpc", 0), KvOverdue(number)):
                assert not self.state.advance(event, self.now)

    @precondition(lambda self: self.goes_on and self.running)
    @rule(data=st.data())
    def kv_received(self, data: st.DataObject) -> None:
        self.feed(KvReceived(self.drawn(data, self.running), 1, 1.0, 0.0, 0.0, 1.0, "grpc", 0))

    @precondition(lambda self: self.goes_on and self.overdue)
    @rule(data=st.data())
    def kv_overdue(self, data: st.DataObject) -> None:
        self.feed(KvOverdue(self.drawn(data, self.overdue)))

    @precondition(lambda self: self.goes_on and self.running)
    @rule(data=st.data(), reason=st.sampled_from(REASONS), of_decode=st.booleans())
    def fails(self, data: st.DataObject, reason: FailureReason, of_decode: bool) -> None:
        attempt = self.seen[self.drawn(data, self.running)]
        endpoints = self.dispatched[attempt.attempt_id].endpoints
        endpoint, before = endpoints[0 if of_decode else -1], attempt.phase
        ignored = endpoint == "p" and before is AttemptPhase.DECODE and not attempt.unreported
        self.feed(Failed(attempt.attempt_id, endpoint, reason, "drawn"))
        assert not ignored or attempt.phase is before

    @precondition(lambda self: self.goes_on and self.pausing)
    @rule(data=st.data(), died=st.booleans())
    def retry_due(self, data: st.DataObject, died: bool) -> None:
        number = self.drawn(data, self.pausing)
        self.pausing.discard(number)
        self.feed(RetryDue(number, died))

    @precondition(lambda self: self.goes_on)
    @rule(rarely=st.integers(0, 19))
    def deadline(self, rarely: int) -> None:
        if rarely == 0:
            answered = self.state.answer.done  # it only waits for word that its KV was read
            self.feed(Deadline())
            assert self.failed is not answered

    @invariant()
    def phases_follow_one_another(self) -> None:
        for number, attempt in getattr(self, "seen", {}).items():
            before = self.phases.get(number, AttemptPhase.TURN)
            reachable, further = {before}, {before}
            while further := {phase for each in further for phase in NEXT[each]} - reachable:
                reachable |= further
            assert attempt.phase in reachable
            self.phases[number] = attempt.phase

    @invariant()
    def only_what_runs_holds_a_lease(self) -> None:
        for number, attempt in getattr(self, "seen", {}).items():
            holds = attempt.phase not in (AttemptPhase.BACKOFF, AttemptPhase.ENDED)
            assert self.returned[number] == (not holds)

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        answers = {choice: whole_answer(self.request.sampling, PROMPT, choice) for choice in self.given}
        for choice, given in self.given.items():
            assert tuple(given) == answers[choice][: len(given)]
            assert self.ended[choice] == (len(given) == len(answers[choice]) and self.answer.has_finished(choice))
        if self.state.phase is RequestPhase.COMPLETED:
            assert self.answer.done and not self.state.attempts
        self.take(self.state.advance(RequestClosed(RequestPhase.CANCELLED), self.now))
        assert self.state.phase is not RequestPhase.RUNNING
        assert self.returned == self.taken, "each lease once"

    def output(self, attempt: Attempt, choice: int, begin: int, count: int) -> SequenceOutput:
        answer = whole_answer(self.request.sampling, PROMPT, choice)
        made = answer[begin : begin + count]
        stopped = bool(made) and made[-1] in self.request.sampling.stop_token_ids
        end = (SequenceEnd.STOP if stopped else SequenceEnd.LENGTH) if begin + len(made) == len(answer) else None
        return SequenceOutput(attempt.attempt_id, choice, begin, made, end)


TestRequestMachine = RequestMachine.TestCase
TestRequestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

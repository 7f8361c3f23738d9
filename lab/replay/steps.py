"""Check of steps: each worker's recorded calls and step times go through the real scheduler, step by step. Pure.

No token decides what a step computes: a prompt's cached blocks, an answer's length and the duration of each step do,
and these are recorded. The scheduler must then plan the recorded steps. If tokens are recorded, the real runner can
compute the plans (engine.py), and must sample these tokens.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from baton.client.timelines import ProcessTimeline, SchedulerCall, TimelineStep, WorkerRequest
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import (
    Chunk,
    ChunkResult,
    Computed,
    Drawn,
    FirstToken,
    Objectives,
    Plan,
    Request,
    RequestRefused,
    UnknownRequest,
)
from baton.engine.runner.step_records import CallKind
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.budget import StepBudget
from baton.engine.scheduler.scheduler import Scheduler
from baton.lab.replay.record import RecordedRequest

STOP_TOKEN, FIRST_TOKEN = 0, 1
NAME_BYTES = 32
_ROOT = bytes(NAME_BYTES)


@dataclass(frozen=True, slots=True)
class StepComposition:
    """Work of a step by request number: the number of answers that it continues, and its prompt tokens."""

    answers: Mapping[int, int]
    prompts: Mapping[int, int]

    @staticmethod
    def of_record(step: TimelineStep) -> "StepComposition":
        return StepComposition(Counter(step.answer_requests), dict(step.prompts))

    @staticmethod
    def of_plan(plan: Plan | None) -> "StepComposition":
        """Return the composition of a plan, by the rule of StepRecorder."""
        answers, prompts = Counter[int](), Counter[int]()
        for chunk in () if plan is None else plan.chunks:
            if len(chunk.token_ids) == 1 and chunk.samples:
                answers[chunk.request_id] += 1
            else:
                prompts[chunk.request_id] += len(chunk.token_ids)
        return StepComposition(answers, prompts)


class ResultDifference(NamedTuple):
    """Result of a step that differs from the record. Without a request id: only log-probabilities differ."""

    request_id: str = ""
    position: int = 0  # index of the token in the answer
    recorded: int = 0
    computed: int = 0


@dataclass(frozen=True, slots=True)
class StepDifference:
    """First step of a worker that differs. `calls`: calls of the scheduler since the step before."""

    step: TimelineStep
    planned: StepComposition
    refused: str = ""  # recorded call that the scheduler refused; empty: all calls succeeded
    result: ResultDifference | None = None  # None: the composition differs, or a call was refused


@dataclass(frozen=True, slots=True)
class StepCheck:
    """Result of one worker. `stopped`: why later steps were not checked; empty: all were, or one differs."""

    worker: str
    steps: int
    skipped: int  # number of first steps, with requests of which the record lacks the beginning
    checked: int
    difference: StepDifference | None = None
    stopped: str = ""


class StepModel(Protocol):
    """Model of a replayed worker: the scheduler's requests, and the results of its plans."""

    def prompt(self, number: int) -> tuple[Sequence[int], SamplingParams]:
        """Return the prompt and the sampling parameters of a request."""

    def first(self, number: int) -> FirstToken:
        """Return the first token of an answer whose prompt another worker computed."""

    def fill(self, number: int, start: int, end: int, blocks: Sequence[int]) -> None:
        """Write the KV of prompt tokens [start, end) into the prompt's `blocks`: another worker computed it."""

    def run(self, plan: Plan) -> Sequence[ChunkResult]: ...

    def difference(self, step: TimelineStep, plan: Plan, results: Sequence[ChunkResult]) -> ResultDifference | None:
        """Return how the results of a step differ from the record; None if they do not."""


def check_steps(
    worker: ProcessTimeline,
    requests: Sequence[RecordedRequest],
    computing: "Callable[[ProcessTimeline, KnownRequests], StepModel] | None" = None,
) -> StepCheck:
    """Plan the recorded steps of a worker again, up to the first one that differs.

    `computing`: creates the model that computes the steps with the recorded tokens; None: steps are only planned.
    """
    steps, count = worker.steps, len(worker.steps)
    if (reason := _unsupported(worker)) or not steps:
        return StepCheck(worker.name, count, 0, 0, stopped=reason or "it took no steps")
    known = KnownRequests(worker, requests, needs_tokens=computing is not None)
    begin = _best_begin(steps, known)
    model = RecordedLengths(known) if computing is None else computing(worker, known)
    replay = WorkerReplay(worker, known, begin, model)
    for number, step in enumerate(steps[begin:]):
        if reason := known.obstacle(step):
            return StepCheck(worker.name, count, begin, number, stopped=f"step {step.number}: {reason}")
        difference = replay.step(step)
        if difference is not None:
            return StepCheck(worker.name, count, begin, number, difference)
    return StepCheck(worker.name, count, begin, count - begin)


def _unsupported(worker: ProcessTimeline) -> str:
    """Return why no step of a worker can be planned again; empty if they can."""
    if worker.failure:
        return "its timeline is missing"
    settings = worker.scheduler
    reasons = {
        "launches_ahead": "it plans a step before the results of the last one are known",
        "drafts": "its drafts depend on tokens, which are not recorded",
        "windows": "its model has windowed layers",
        "whole_prompts": "its model computes each prompt in one step",
    }
    return next((reason for name, reason in reasons.items() if settings.get(name)), "")


class KnownRequests:
    """Requests of a worker by their number, with what the routers recorded of them.

    `needs_tokens`: whether a request without recorded tokens is an obstacle.
    """

    def __init__(self, worker: ProcessTimeline, requests: Sequence[RecordedRequest], needs_tokens: bool) -> None:
        self._needs_tokens = needs_tokens
        routed = {each.request_id: each for each in requests}
        self._pairs = {each.number: (each, routed.get(each.request_id)) for each in worker.worker_requests}
        aborts = (call for step in worker.steps for call in step.calls if call.kind == CallKind.ABORT)
        self.aborted = frozenset(call.request_number for call in aborts)

    def both(self, number: int) -> tuple[WorkerRequest, RecordedRequest]:
        """Return a request as the worker and as its router recorded it. Raises: KeyError."""
        own, routed = self._pairs[number]
        if routed is None:
            raise KeyError(number)
        return own, routed

    def blocks(self, number: int) -> tuple[int, ...]:
        """Return the block numbers of a prompt; empty if no router recorded it."""
        routed = self._pairs.get(number, (None, None))[1]
        return () if routed is None else routed.blocks

    def obstacle(self, step: TimelineStep) -> str:
        """Return why a step cannot be planned again; empty if it can."""
        if step.late:
            return "an answer waited for the mask of its structured output"
        reasons = (self._unplannable(call) for call in step.calls if _is_begin(call))
        return next((reason for reason in reasons if reason), "")

    def _unplannable(self, call: SchedulerCall) -> str:
        own, routed = self._pairs.get(call.request_number, (None, None))
        if own is None or routed is None:
            return f"request {call.request_number} is in no router's record"
        name = own.request_id
        if routed.choices > 1:
            return f"{name} has {routed.choices} choices, whose lengths are not recorded"
        if routed.pooled or routed.needs_every_token:
            return f"{name} asks for a vector or for scores of its prompt"
        if own.prompt_tokens != routed.prompt_tokens:
            return f"{name} continues an answer"
        return _not_computable(routed, call.kind == CallKind.RESERVE) if self._needs_tokens else ""


def _not_computable(request: RecordedRequest, is_received: bool) -> str:
    """Return why the tokens of a request cannot be computed again; empty if they can.

    `is_received`: another worker computed its prompt and its first token.
    """
    name, tokens = request.request_id, request.tokens
    if tokens is None or (is_received and not tokens.answers[0]):
        return f"{name} has no recorded tokens"
    if request.has_adapter:
        return f"{name} was computed with an adapter or with reloaded weights"
    if tokens.sampling.structured is not None:
        return f"{name} has structured output"
    return ""


def _is_begin(call: SchedulerCall) -> bool:
    return call.kind in (CallKind.ADD, CallKind.RESERVE)


def _best_begin(steps: Sequence[TimelineStep], known: KnownRequests) -> int:
    """Return the index of the step from which most steps can be planned.

    No request that began before it is in this step or a later one.
    """
    crossed = accumulate(_crossings(steps))
    begins = [index for index, count in zip(range(len(steps)), crossed, strict=False) if not count]
    ends = [index for index, step in enumerate(steps) if known.obstacle(step)] + [len(steps)]
    lengths = {begin: next(end for end in ends if end >= begin) - begin for begin in begins}
    return max(begins, key=lambda begin: lengths[begin], default=len(steps))


def _first_steps(steps: Sequence[TimelineStep]) -> dict[int, int]:
    """Return the number of the first step that computes each request."""
    found: dict[int, int] = {}
    for step in steps:
        for number in (*step.prompts, *step.answer_requests):
            found.setdefault(number, step.number)
    return found


def _crossings(steps: Sequence[TimelineStep]) -> list[int]:
    """Return how much the number of requests that began before a step and are in it or a later one changes at it."""
    begun: dict[int, int] = {}
    last: dict[int, int] = {}
    is_complete = steps[0].number == 1
    for index, step in enumerate(steps):
        for call in step.calls:
            if _is_begin(call):
                begun[call.request_number] = index
            elif call.kind != CallKind.ABORT:
                last[call.request_number] = index
            elif call.request_number in begun or not is_complete:  # otherwise it was never added
                last[call.request_number] = index - 1  # its blocks are free in this step
        last.update(dict.fromkeys((*step.answer_requests, *step.prompts), index))
    changes = [0] * (len(steps) + 1)
    for number, index in last.items():
        begin = begun.get(number, -1)
        if begin < index:
            changes[begin + 1] += 1
            changes[index + 1] -= 1
    return changes


class WorkerReplay:
    """Scheduler of a worker that gets the recorded calls. Its prompts find as many cached tokens as recorded."""

    def __init__(self, worker: ProcessTimeline, known: KnownRequests, begin: int, model: StepModel) -> None:
        """Create the scheduler, whose step times are learned from the steps before index `begin`."""
        settings = {name: int(value) for name, value in worker.scheduler.items() if name not in ("tbt_s", "lent_gain")}
        self._is_prefill = worker.role == "prefill"
        self._known = known
        self._model = model
        self._block_tokens = settings["block_tokens"]
        self._seen: set[int] = set()  # blocks of the prompts so far
        self._first_steps = _first_steps(worker.steps[begin:])
        budget = StepBudget()
        for step in worker.steps[:begin]:
            budget.observe(
                step.answers + step.drafted_tokens, sum(step.prompts.values()), step.observed_s, step.period_s
            )
        self._scheduler = Scheduler(
            BlockPool(settings["total_blocks"]),
            self._block_tokens,
            settings["max_step_tokens"],
            settings["max_sequences"],
            budget,
            SwapSpace(settings["swap_slots"]),
            settings["tail_tokens"],
            tbt_s=worker.scheduler["tbt_s"],
            lent_gain=worker.scheduler.get("lent_gain", 0.0),
        )

    def step(self, step: TimelineStep) -> StepDifference | None:
        """Make the calls before a step, plan and compute it; return the difference from the record, if any."""
        for call in step.calls:
            if refused := self._call(call):
                return StepDifference(step, StepComposition({}, {}), refused)
        plan = self._scheduler.plan(step.began_us / 1e6)
        planned = StepComposition.of_plan(plan)
        if plan is None or planned != StepComposition.of_record(step):
            return StepDifference(step, planned)
        self._scheduler.observe(plan, step.observed_s, step.period_s)
        results = self._model.run(plan)
        if (difference := self._model.difference(step, plan, results)) is not None:
            return StepDifference(step, planned, result=difference)
        self._scheduler.commit(plan, results)
        return None

    def _call(self, call: SchedulerCall) -> str:
        """Make a call; return the call if it has another result than recorded, otherwise an empty text."""
        scheduler, number = self._scheduler, call.request_number
        if call.kind == CallKind.ABORT:
            scheduler.abort(number)
            return ""
        try:
            if call.kind == CallKind.ACTIVATE:
                transfer = self._known.both(number)[0].transfer
                received_s = math.inf if transfer is None else transfer.ended_us / 1e6
                scheduler.activate(number, [self._model.first(number)], received_s)
                return ""
            request, root = self._request(number), None if self._is_prefill else _ROOT
            self._bring(*self._known.both(number))
            if call.kind == CallKind.ADD:
                scheduler.add(request, root)
            elif (reserved := scheduler.reserve(request, root)) is None:
                return f"reserve of request {number}: blocks or slots are short"
            else:
                self._model.fill(number, reserved.cached_tokens, len(request.token_ids), reserved.blocks)
        except (RequestRefused, UnknownRequest) as error:
            return f"{call.kind} of request {number}: {error}"
        return ""

    def _request(self, number: int) -> Request:
        own, routed = self._known.both(number)
        wanted_s, deadline_s = (math.inf if us is None else us / 1e6 for us in (own.wanted_us, own.deadline_us))
        ttft_s, tbt_s = own.ttft_slo_ms / 1e3 or math.inf, own.tbt_slo_ms / 1e3 or math.inf
        objectives = Objectives(wanted_s, tbt_s, ttft_s, deadline_s)
        prompt, params = self._model.prompt(number)
        return Request(
            number,
            tuple(prompt),
            params,
            tuple(map(block_name, routed.blocks)),
            prefill_only=self._is_prefill,
            objectives=objectives,
        )

    def _bring(self, own: WorkerRequest, routed: RecordedRequest) -> None:
        """Cache blocks that the prompt found in the cache although no prompt that was computed before has them."""
        found = routed.blocks[: own.cached_tokens // self._block_tokens]
        if not self._computed_before(own.number).issuperset(found):
            batch = self._scheduler.batch
            incoming = batch.begin_fetch(tuple(map(block_name, found)), lambda columns: True)
            if incoming is not None:
                size = self._block_tokens
                self._model.fill(own.number, incoming.known_columns * size, len(found) * size, incoming.blocks)
                batch.end_fetch(incoming, len(incoming.blocks))
        self._seen.update(routed.blocks)

    def _computed_before(self, number: int) -> set[int]:
        """Return the blocks of the prompts so far, and of later ones that are computed before request `number`."""
        own_step = self._first_steps.get(number, 0)
        before = (other for other, step in self._first_steps.items() if step < own_step)
        return self._seen.union(*map(self._known.blocks, before))


class RecordedLengths:
    """Model that computes nothing: its answers become as long as recorded."""

    def __init__(self, known: KnownRequests) -> None:
        self._known = known
        self._made: Counter[int] = Counter()  # tokens generated so far, by request number

    def prompt(self, number: int) -> tuple[Sequence[int], SamplingParams]:
        own, routed = self._known.both(number)
        params = SamplingParams(max_tokens=routed.max_tokens, stop_token_ids=frozenset({STOP_TOKEN}))
        return (FIRST_TOKEN + number,) * own.prompt_tokens, params

    def first(self, number: int) -> FirstToken:
        return FirstToken(0, FIRST_TOKEN + number, 0.0, None)

    def fill(self, number: int, start: int, end: int, blocks: Sequence[int]) -> None:
        """Do nothing: there is no KV."""

    def run(self, plan: Plan) -> Sequence[ChunkResult]:
        return [self._result(chunk) for chunk in plan.chunks]

    def difference(self, step: TimelineStep, plan: Plan, results: Sequence[ChunkResult]) -> ResultDifference | None:
        return None

    def _result(self, chunk: Chunk) -> ChunkResult:
        number = chunk.request_id
        if not chunk.samples:
            return Computed()
        self._made[number] += 1
        own, _ = self._known.both(number)
        stops = own.ended_us is not None and number not in self._known.aborted and self._made[number] == own.tokens
        return Computed((Drawn(STOP_TOKEN if stops else FIRST_TOKEN + number, 0.0),))


def block_name(number: int) -> bytes:
    """Return a block hash for a recorded block number."""
    return (number + 1).to_bytes(NAME_BYTES)

"""What a decode worker tells routers: sessions. Protobuf stops here and in `transfer.py`.

The life of a request on this worker: a Start command waits its turn for pages, its KV is pulled while prefill still
computes, its sequences join the running batch once the copy is validated, and every engine step sends one message
per router with the tokens of all its sequences.
"""

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import grpc

from decode_worker.admission import Admission
from decode_worker.loop import DecodeLoop
from engine.decode_scheduler import DecodeRequest, SequenceStep
from engine.engine_thread import StepTiming
from engine.sequence import FirstToken, RequestRefused
from protos import session_pb2, session_pb2_grpc
from service.errors import Unavailable
from service.session_connection import serve_connection
from service.session_hub import RouterSession, SessionHub
from worker.transfer_reader import Pull, TransferFailed, TransferReader
from worker.wire import END_REASONS, add_logprobs, page_counts, sampling_params

logger = logging.getLogger(__name__)
Session = RouterSession[session_pb2.ConnectResponse]
LOADING_RETRY_S = 0.5
CLOSE_TIMEOUT_S = 1.0  # for routers to take their last messages, and for copies to end
MAX_UNACKNOWLEDGED = 65536  # messages a router may leave unread before it loses its session


@dataclass(eq=False)
class Answer:
    """One Start command, from its arrival until its last token or its abort."""

    request_id: int  # this worker's own: two routers may use the same attempt id
    session: Session
    attempt_id: int
    with_logprobs: bool  # whether the router wants to be told
    task: "asyncio.Task[None] | None" = None
    deadline: asyncio.TimerHandle | None = None
    pull: Pull | None = None
    cached_tokens: int = 0
    landed_at: float = 0.0  # monotonic seconds; when the copy was validated
    first_tokens: dict[int, FirstToken] = field(default_factory=dict)  # by choice; until they were repeated
    running_choices: set[int] = field(default_factory=set)


class DecodeService(session_pb2_grpc.SessionServiceServicer):
    """Serves SessionService and keeps the book of answers. Lives on the event loop."""

    def __init__(self, worker: session_pb2.WorkerInfo, epoch: int, session_grace_s: float) -> None:
        self._worker = worker
        self._epoch = epoch
        self._hub: SessionHub[session_pb2.ConnectResponse] = SessionHub(
            session_grace_s, MAX_UNACKNOWLEDGED, self._on_session_end
        )
        self._answers: dict[int, Answer] = {}
        self._by_attempt: dict[tuple[bytes, int], Answer] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # those of `_answers`, and cancelled ones that wait out a copy
        self._request_ids = itertools.count(1)
        self._attached = False
        self.draining = False

    def attach(self, loop: DecodeLoop, reader: TransferReader) -> None:
        """The engine calls back into this object, so it is given to it after it is made."""
        self._loop = loop
        self._attached = True
        self._admission = Admission(loop)
        self._reader = reader

    @property
    def busy(self) -> bool:
        return bool(self._answers)

    async def Connect(
        self,
        request_iterator: AsyncIterator[session_pb2.ConnectRequest],
        context: "grpc.aio.ServicerContext[session_pb2.ConnectRequest, session_pb2.ConnectResponse]",
    ) -> AsyncIterator[session_pb2.ConnectResponse]:
        if not self._attached:
            raise Unavailable("the engine is still loading", "LOADING", LOADING_RETRY_S)
        connection = serve_connection(self._hub, self._epoch, request_iterator, self._welcome, self._on_command)
        async with aclosing(connection):
            async for message in connection:
                yield message

    async def close(self) -> None:
        """Ends all sessions, and with them every request that is left; waits for their copies, bounded."""
        await self._hub.close(CLOSE_TIMEOUT_S)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)

    def _welcome(self, resumed: bool, received: int) -> session_pb2.ConnectResponse:
        welcome = session_pb2.Welcome(resumed=resumed, received=received, worker=self._worker)
        return session_pb2.ConnectResponse(epoch=self._epoch, welcome=welcome)

    def _on_command(self, session: Session, command: session_pb2.ConnectRequest) -> None:
        match command.WhichOneof("command"):
            case "start":
                self._on_start(session, command.start)
            case "cancel":
                answer = self._by_attempt.get((session.router_id, command.cancel.attempt_id))
                if answer is not None:
                    self._abandon(answer)
            case other:
                logger.warning("a router sent %s to a decode worker", other)

    def _on_start(self, session: Session, command: session_pb2.Start) -> None:
        if (session.router_id, command.attempt_id) in self._by_attempt:
            logger.error("a router sent attempt %d twice; the second is dropped", command.attempt_id)
            return
        with_logprobs = command.sampling.HasField("logprobs")
        answer = Answer(next(self._request_ids), session, command.attempt_id, with_logprobs)
        self._answers[answer.request_id] = answer
        self._by_attempt[session.router_id, answer.attempt_id] = answer
        if self.draining:
            self._fail(answer, session_pb2.FAILURE_REASON_DRAINING, "the decode worker is draining")
        elif not self._fits(command):
            self._fail(answer, session_pb2.FAILURE_REASON_INVALID, "the decode worker cannot take this request")
        else:
            answer.deadline = asyncio.get_running_loop().call_later(
                command.time_left_ms / 1e3,
                self._fail,
                answer,
                session_pb2.FAILURE_REASON_DEADLINE,
                "the deadline passed",
            )
            answer.task = asyncio.create_task(self._run(answer, command), name=f"answer {answer.request_id}")
            self._tasks.add(answer.task)
            answer.task.add_done_callback(self._tasks.discard)
            answer.task.add_done_callback(partial(self._on_run_ended, answer))

    def _fits(self, command: session_pb2.Start) -> bool:
        model = self._worker.model
        length = len(command.token_ids) + command.sampling.max_tokens
        return bool(command.token_ids) and length <= model.max_model_len and command.sampling.n >= 1

    async def _run(self, answer: Answer, command: session_pb2.Start) -> None:
        """Takes a request from its arrival into the running batch. Ends it with a named failure where that fails."""
        try:
            request = DecodeRequest(
                answer.request_id,
                tuple(command.token_ids),
                sampling_params(command.sampling),
                tuple(command.block_hashes),
            )
        except ValueError as error:
            self._fail(answer, session_pb2.FAILURE_REASON_INVALID, str(error))
            return
        try:
            await self._land(answer, command, request)
        except TransferFailed as error:
            self._fail(answer, session_pb2.FAILURE_REASON_TRANSFER, str(error))
        except RequestRefused as error:
            self._fail(answer, session_pb2.FAILURE_REASON_INVALID, str(error))

    def _on_run_ended(self, answer: Answer, task: "asyncio.Task[None]") -> None:
        """What nobody foresaw still ends the request, and is seen."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("request %d failed", answer.request_id, exc_info=error)
        if error is not None or task.cancelled():
            self._fail(answer, session_pb2.FAILURE_REASON_UNSPECIFIED, "internal error of the decode worker")

    async def _land(self, answer: Answer, command: session_pb2.Start, request: DecodeRequest) -> None:
        reservation = await self._admission.reserve(request)
        pull = await self._reader.pull(command.prefill_endpoint, command.transfer_id, reservation)
        if sorted(first.choice for first in pull.first_tokens) != list(range(request.params.n)):
            raise TransferFailed(f"{command.prefill_endpoint} did not send one first token per choice")
        answer.pull = pull
        answer.cached_tokens = reservation.cached_blocks * self._worker.model.block_size
        answer.landed_at = time.monotonic()
        answer.first_tokens = {first.choice: first for first in pull.first_tokens}
        answer.running_choices = {first.choice for first in pull.first_tokens if first.end is None}
        if not answer.running_choices:
            self._abandon(answer)  # prefill's first tokens were the whole answer, and the router has them
            return
        await asyncio.wrap_future(self._loop.activate(answer.request_id, pull.first_tokens))

    def on_steps(self, steps: Sequence[SequenceStep], timing: StepTiming) -> None:
        """A step has ended: called on the event loop, in the order of the steps."""
        outputs: defaultdict[Session, list[session_pb2.SequenceOutput]] = defaultdict(list)
        ended = False
        for step in steps:
            answer = self._answers.get(step.request_id)
            if answer is None:
                continue  # cancelled while this step ran
            if step.failed:
                self._fail(answer, session_pb2.FAILURE_REASON_NONFINITE, "the logits of this sequence are not finite")
                continue
            if answer.pull is not None:
                self._send_landed(answer, answer.pull, timing)
                answer.pull = None
            outputs[answer.session].append(self._output(answer, step))
            if step.end is not None:
                ended = True  # a choice gives back its pages and its place, even where others go on
                answer.running_choices.discard(step.choice)
                if not answer.running_choices:
                    self._forget(answer)
        for session, batch in outputs.items():
            self._send(session, session_pb2.ConnectResponse(step_outputs=session_pb2.StepOutputs(outputs=batch)))
        if ended:
            self._admission.room_may_have_grown()

    def _output(self, answer: Answer, step: SequenceStep) -> session_pb2.SequenceOutput:
        """The first output of a choice repeats the token that prefill sampled, in case the router never got it."""
        first = answer.first_tokens.pop(step.choice, None)
        tokens = (step,) if first is None else (first, step)
        output = session_pb2.SequenceOutput(
            attempt_id=answer.attempt_id,
            choice=step.choice,
            offset=step.offset if first is None else 0,
            token_ids=[token.token_id for token in tokens],
            end=END_REASONS[step.end],
        )
        if answer.with_logprobs:
            for token in tokens:
                add_logprobs(output, token)
        return output

    def _send_landed(self, answer: Answer, pull: Pull, timing: StepTiming) -> None:
        landed = session_pb2.Landed(
            attempt_id=answer.attempt_id,
            bytes=pull.bytes,
            copy_ms=pull.copy_ms,
            exposed_ms=pull.exposed_ms,
            admission_ms=pull.late_ms + (timing.started - answer.landed_at) * 1e3,
            first_step_ms=(time.monotonic() - timing.started) * 1e3,
            transport=pull.transport,
            cached_tokens=answer.cached_tokens,
        )
        self._send(answer.session, session_pb2.ConnectResponse(landed=landed))

    def _abandon(self, answer: Answer) -> None:
        """Ends a request in whatever phase. Its pages are freed only when no copy into them is under way."""
        self._forget(answer)
        if answer.task is not None and answer.task is not asyncio.current_task():
            answer.task.cancel()  # `TransferReader.pull` waits for its copy before it lets go
            answer.task.add_done_callback(lambda _: self._free(answer))
        else:
            self._free(answer)

    def _free(self, answer: Answer) -> None:
        self._loop.abort(answer.request_id)
        self._admission.room_may_have_grown()  # who asks now, asks after the abort

    def _fail(self, answer: Answer, reason: "session_pb2.FailureReason", message: str) -> None:
        if answer.request_id not in self._answers:
            return
        self._abandon(answer)
        failed = session_pb2.Failed(attempt_id=answer.attempt_id, reason=reason, message=message)
        self._send(answer.session, session_pb2.ConnectResponse(failed=failed))

    def _forget(self, answer: Answer) -> None:
        self._answers.pop(answer.request_id, None)
        self._by_attempt.pop((answer.session.router_id, answer.attempt_id), None)
        if answer.deadline is not None:
            answer.deadline.cancel()

    def _send(self, session: Session, message: session_pb2.ConnectResponse) -> None:
        message.epoch = self._epoch
        self._hub.send(session, message)

    def _on_session_end(self, session: Session) -> None:
        for answer in [answer for answer in self._answers.values() if answer.session is session]:
            self._abandon(answer)

    def report(self) -> None:
        """Tells every router how things stand, and how much of this worker is its own."""
        load = self._loop.load
        shares = max(1, len(self._hub.sessions))
        for session in self._hub.sessions:
            report = session_pb2.Report(
                limit_blocks=load.pages.total // shares,
                limit_slots=self._worker.total_slots // shares,
                pages=page_counts(load),
                waiting_requests=self._admission.waiting,
                running_sequences=load.running_sequences,
                draining=self.draining,
                steps=self._loop.steps,
            )
            session.tell(session_pb2.ConnectResponse(epoch=self._epoch, report=report))

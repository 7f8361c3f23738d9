"""The servicer of a decode worker: sessions with routers. Protobuf stops here and in `answer.py`.

The life of a request on this worker: a Start command waits for blocks, its KV is pulled while prefill still computes,
its sequences join the running batch once the copy is confirmed, and every engine step sends one message per router with
the tokens of all its sequences. If a Start names no prefill worker, the prompt is computed here, in chunks beside the
running batch, and its first tokens go to the router as a prefill worker would send them. Another router may adopt a
request while it is open here, and for a while after its answer has ended.
"""

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial

import grpc

from baton.engine.request import Request, RequestRefused
from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.thread import StepTiming
from baton.engine.sampling.constraint import Grammars
from baton.engine.scheduler.sequences import PromptComputed, RequestFailed, SchedulerOutcome
from baton.protos import session_pb2, session_pb2_grpc
from baton.service.errors import Unavailable
from baton.service.sessions.connection import serve_connection
from baton.service.sessions.hub import SessionHub
from baton.service.telemetry.trace_context import in_trace
from baton.worker.cache_events import CacheEventPublisher
from baton.worker.decode.admission import Admission, PartialPrefixes
from baton.worker.decode.answer import Answer, LocalPrefill, ReceivedKv, Session, answer_to, fits
from baton.worker.decode.credits import Charge, WorkerCredits
from baton.worker.decode.report import decode_report
from baton.worker.decode.request_table import Adoptions, AttemptKey, RequestTable
from baton.worker.decode.retained import RetainedBounds
from baton.worker.drain import DrainState
from baton.worker.model import adapter_number
from baton.worker.structured import constraint_of
from baton.worker.transfer.reader import BlocksCorrupt, SourceLost, TransferFailed, TransferReader
from baton.worker.wire import failure_of, request_of, sampling_params

logger = logging.getLogger(__name__)
LOADING_RETRY_S = 0.5
CLOSE_TIMEOUT_S = 1.0  # for routers to take their last messages, and for copies to end
MAX_UNACKNOWLEDGED = 65536  # messages a router may leave unread before it loses its session


class DecodeService(session_pb2_grpc.SessionServiceServicer, DrainState):
    """Serves SessionService and keeps the table of answers. Lives on the event loop."""

    def __init__(
        self, worker: session_pb2.WorkerInfo, epoch: int, session_grace_s: float, retained: RetainedBounds | None = None
    ) -> None:
        """`retained`: how much of answers that have ended, each for `session_grace_s`."""
        self._worker = worker
        self._epoch = epoch
        self._hub: SessionHub[session_pb2.ConnectResponse] = SessionHub(
            session_grace_s, MAX_UNACKNOWLEDGED, self._on_session_end
        )
        self.cache = CacheEventPublisher(self._hub, epoch)
        self._credits: WorkerCredits[Session] = WorkerCredits(worker.total_blocks, worker.total_slots)
        self._table = RequestTable(session_grace_s, retained or RetainedBounds())
        self._adoptions = Adoptions(self._table, self._send)
        self._partial_prefixes = PartialPrefixes()
        self._tasks: set[asyncio.Task[None]] = set()  # those of the table, and cancelled ones that wait out a copy
        self._request_ids = itertools.count(1)
        self._attached = False

    def attach(self, loop: EngineLoop, reader: TransferReader, grammars: Grammars | None = None) -> None:
        """The engine calls back into this object, so it is given to it after it is made."""
        self._loop = loop
        self._attached = True
        self._admission = Admission(loop)
        self._reader = reader
        self._grammars = grammars

    @property
    def busy(self) -> bool:
        return len(self._table) > 0

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
        """Ends all sessions, and with them every request that is left; waits for their copies, bounded.

        Answers that a drain left over are continued by other workers: each is reported to its router as failed.
        """
        if self.hands_over:
            self.draining = True
            for answer in self._table:
                self._fail(answer, session_pb2.FAILURE_REASON_DRAINING, "the decode worker is stopping")
            await self._hub.delivered(CLOSE_TIMEOUT_S)
        await self._hub.close(CLOSE_TIMEOUT_S)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)

    def _welcome(self, resumed: bool, received: int) -> session_pb2.ConnectResponse:
        welcome = session_pb2.Welcome(resumed=resumed, received=received, worker=self._worker)
        return session_pb2.ConnectResponse(epoch=self._epoch, welcome=welcome)

    def _on_command(self, session: Session, command: session_pb2.ConnectRequest) -> None:
        match command.WhichOneof("command"):
            case "start":
                in_trace(command.start.traceparent).run(self._on_start, session, command.start)
            case "snapshot_request":
                self.cache.send_snapshot(session)
            case "cancel":
                answer = self._table.of_attempt(AttemptKey(session.router_id, command.cancel.attempt_id))
                if answer is not None:
                    answer.keeps_landed = command.cancel.keep_landed
                    self._abandon(answer)
            case "adopt":
                answer = self._adoptions.adopt(session, command.adopt)
                if answer is not None and command.adopt.time_left_ms:
                    self._set_deadline(answer, command.adopt.time_left_ms)
            case "want":
                self._credits.loans.ask(session, Charge(command.want.blocks, command.want.slots))
            case "change_role":
                self.on_change_role(command.change_role.role)
            case other:
                logger.warning("a router sent %s to a decode worker", other)

    def _on_start(self, session: Session, command: session_pb2.Start) -> None:
        if self._table.of_attempt(AttemptKey(session.router_id, command.attempt_id)) is not None:
            logger.error("a router sent attempt %d twice; the second is dropped", command.attempt_id)
            return
        answer = answer_to(command, next(self._request_ids), session, self._worker.model.block_size)
        self._table.add(answer)
        if self.draining:
            self._fail(answer, session_pb2.FAILURE_REASON_DRAINING, "the decode worker is draining")
        elif not fits(command, self._worker.model):
            self._fail(answer, session_pb2.FAILURE_REASON_INVALID, "the decode worker cannot take this request")
        else:
            self._set_deadline(answer, command.time_left_ms)
            answer.task = asyncio.create_task(self._run(answer, command), name=f"answer {answer.request_id}")
            self._tasks.add(answer.task)
            answer.task.add_done_callback(self._tasks.discard)
            answer.task.add_done_callback(partial(self._on_run_ended, answer))

    def _set_deadline(self, answer: Answer, time_left_ms: int) -> None:
        if answer.deadline is not None:
            answer.deadline.cancel()
        answer.deadline = asyncio.get_running_loop().call_later(
            time_left_ms / 1e3, self._fail, answer, session_pb2.FAILURE_REASON_DEADLINE, "the deadline passed"
        )

    async def _run(self, answer: Answer, command: session_pb2.Start) -> None:
        """Takes a request from its arrival into the running batch. Ends it with a named failure where that fails."""
        try:
            params = sampling_params(command.sampling, await constraint_of(self._grammars, command.sampling))
            request = request_of(answer.request_id, command, params, adapter_number(self._worker, command.adapter))
        except ValueError as error:
            self._fail(answer, session_pb2.FAILURE_REASON_INVALID, str(error))
            return
        try:
            await self._partial_prefixes.settled(command.block_hashes)
            if command.prefill_endpoint:
                await self._land(answer, command, request)
            else:
                answer.prefill = LocalPrefill(arrived=time.monotonic())
                await self._admission.add(request, command.cache_root or None)
        except BlocksCorrupt as error:
            self._fail(answer, session_pb2.FAILURE_REASON_CORRUPT, str(error))
        except TransferFailed as error:
            answer.keeps_landed = isinstance(error, SourceLost)
            self._fail(answer, session_pb2.FAILURE_REASON_TRANSFER, str(error))
        except RequestRefused as error:
            self._fail(answer, session_pb2.FAILURE_REASON_INVALID, str(error))

    def _on_run_ended(self, answer: Answer, task: "asyncio.Task[None]") -> None:
        """An unexpected exception still ends the request, and is logged."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("an answer failed", exc_info=error)
        if error is not None or task.cancelled():
            self._fail(answer, session_pb2.FAILURE_REASON_UNSPECIFIED, "internal error of the decode worker")

    async def _land(self, answer: Answer, command: session_pb2.Start, request: Request) -> None:
        reservation = await self._admission.reserve(request, command.cache_root or None)
        pull = await self._reader.pull(
            command.prefill_endpoint, command.transfer_id, reservation, confirmed=answer.confirmed
        )
        if sorted(first.choice for first in pull.first_tokens) != list(request.first_choices):
            raise TransferFailed(f"{command.prefill_endpoint} did not send one first token per choice")
        cached_tokens = reservation.cached_blocks * self._worker.model.block_size
        answer.land(ReceivedKv(pull, cached_tokens, validated=time.monotonic()), request.params)
        if answer.adopted:  # prefill has sent them to another router
            answer.first_tokens.clear()
            self._adoptions.send_again(answer.session, answer.attempt_id, answer.retained)
        if not answer.running_choices:
            self._end(answer)  # prefill's first tokens were the whole answer, and the router has them
            self._free(answer)
            return
        outcomes = await asyncio.wrap_future(self._loop.activate(answer.request_id, pull.first_tokens))
        if outcomes:  # a search that was over with its first tokens
            now = time.monotonic()
            self.on_outcomes(outcomes, StepTiming(now, now))

    def on_outcomes(self, outcomes: Sequence[SchedulerOutcome], timing: StepTiming) -> None:
        """A step has ended: called on the event loop, in the order of the steps."""
        outputs: defaultdict[Session, list[session_pb2.SequenceOutput]] = defaultdict(list)
        touched: dict[int, Answer] = {}  # with tokens of this step
        ended = False
        for outcome in outcomes:
            answer = self._table.get(outcome.request_id)
            if answer is None:
                continue  # cancelled while this step ran
            if isinstance(outcome, RequestFailed):
                self._fail(answer, *failure_of(outcome.cause))
            elif isinstance(outcome, PromptComputed):
                scores = answer.take_chunk(outcome, timing)
                if scores is not None:
                    self._send(answer.session, session_pb2.ConnectResponse(prompt_scores=scores))
                if outcome.ended:
                    touched[answer.request_id] = answer
            else:
                touched[answer.request_id] = answer
                ended |= outcome.end is not None  # a choice gives back its pages, even where others continue
                output = answer.take(outcome)
                if output is not None:
                    outputs[answer.session].append(output)
        for answer in touched.values():  # before their further tokens
            for beginning in answer.take_beginnings(timing):
                self._send(answer.session, beginning)
        for session, batch in outputs.items():
            self._send(session, session_pb2.ConnectResponse(step_outputs=session_pb2.StepOutputs(outputs=batch)))
        for answer in touched.values():
            if not answer.running_choices:
                self._end(answer)
        if ended:
            self._admission.room_may_have_grown()

    def _abandon(self, answer: Answer) -> None:
        """Ends a request in any phase. Its pages are freed only when no copy into them is under way."""
        self._forget(answer)
        if answer.task is not None and answer.task is not asyncio.current_task():
            answer.task.cancel()  # `TransferReader.pull` waits for its copy before it lets go
            answer.task.add_done_callback(lambda _: self._free(answer))
            if answer.keeps_landed:
                self._partial_prefixes.add(answer.last_block, answer.task)
        else:
            self._free(answer)

    def _free(self, answer: Answer) -> None:
        self._loop.abort(answer.request_id, answer.confirmed_blocks)
        self._admission.room_may_have_grown()  # a request that asks now, asks after the abort

    def _fail(self, answer: Answer, reason: "session_pb2.FailureReason", message: str) -> None:
        if answer not in self._table:
            return
        self._abandon(answer)
        self._send(answer.session, session_pb2.ConnectResponse(failed=answer.failed(reason, message)))

    def _forget(self, answer: Answer) -> None:
        self._table.forget(answer)
        if answer.deadline is not None:
            answer.deadline.cancel()

    def _end(self, answer: Answer) -> None:
        """It is made."""
        self._forget(answer)
        self._table.keep(answer, time.monotonic())

    def _send(self, session: Session, message: session_pb2.ConnectResponse) -> None:
        message.epoch = self._epoch
        self._hub.send(session, message)

    def _on_session_end(self, session: Session) -> None:
        self._credits.loans.forget(session)
        for answer in self._table:
            if answer.session is session:
                self._abandon(answer)

    def report(self) -> None:
        """Sends every router this worker's state, and the router's share of it."""
        now = time.monotonic()
        self._table.ended.expire(now)
        open_here = ((answer.session, answer.charge) for answer in self._table)
        present = [session for session in self._hub.sessions if session.outbox is not None]
        draining, waiting = self.leaving or self.draining, self._admission.waiting
        for session, limit in self._credits.deal(open_here, present, now).items():
            report = decode_report(self._loop, self._reader, limit, waiting, draining, self.cache.sum)
            session.tell(session_pb2.ConnectResponse(epoch=self._epoch, report=report))

"""The servicer of a prefill worker: sessions with routers. Protobuf stops here.

The life of a prompt on this worker: a Prefill command queues it, perhaps after some of its KV was fetched from another
worker. Chunks are computed, finished blocks are advertised to the transfers, and the first tokens go to the router at
once. The blocks stay pinned until the decode worker has confirmed its copy, gives up, or its lease ends.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial

import grpc

from baton.engine.request import Request, RequestRefused, reusable_hashes
from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.thread import StepTiming
from baton.engine.sampling.constraint import Constraint, Grammars
from baton.engine.scheduler.sequences import PromptComputed, RequestFailed, SchedulerOutcome
from baton.protos import report_pb2, session_pb2, session_pb2_grpc
from baton.service.errors import Unavailable
from baton.service.sessions.connection import serve_connection
from baton.service.sessions.hub import SessionHub
from baton.service.telemetry.trace_context import in_trace
from baton.worker.cache_events import CacheEventPublisher
from baton.worker.drain import DrainState
from baton.worker.model import adapter_number
from baton.worker.prefill.fetch import FetchHint, PrefillRate, PrefixFetcher
from baton.worker.prefill.prompt import Prompt, Session
from baton.worker.structured import constraint_of
from baton.worker.transfer.source import TRANSFER_ID_BYTES, TransferSource
from baton.worker.wire import failure_of, link_reports, page_counts, request_of, sampling_params

logger = logging.getLogger(__name__)
LOADING_RETRY_S = 0.5
CLOSE_TIMEOUT_S = 1.0  # for routers to take their last messages
MAX_UNACKNOWLEDGED = 65536  # messages a router may leave unread before it loses its session


class PrefillService(session_pb2_grpc.SessionServiceServicer, DrainState):
    """Serves SessionService and keeps the table of prompts. Lives on the event loop."""

    def __init__(self, worker: session_pb2.WorkerInfo, epoch: int, session_grace_s: float) -> None:
        self._worker = worker
        self._epoch = epoch
        self._hub: SessionHub[session_pb2.ConnectResponse] = SessionHub(
            session_grace_s, MAX_UNACKNOWLEDGED, self._on_session_end
        )
        self.cache = CacheEventPublisher(self._hub, epoch)
        self._prompts: dict[int, Prompt] = {}
        self._by_attempt: dict[tuple[bytes, int], Prompt] = {}
        self._request_ids = itertools.count(1)
        self._attached = False
        self.rate = PrefillRate()

    def attach(
        self,
        loop: EngineLoop,
        transfers: TransferSource,
        fetcher: PrefixFetcher | None,
        grammars: Grammars | None = None,
    ) -> None:
        """The engine and the transfers call back into this object, so they are given to it after it is made.

        Without `fetcher` all blocks that are not in the cache are computed.
        """
        self._loop = loop
        self._fetcher = fetcher
        self._grammars = grammars
        self._attached = True
        self._transfers = transfers

    @property
    def busy(self) -> bool:
        return bool(self._prompts)

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
        """Ends all sessions, and with them every prompt that is left: after a drain, for other workers to compute."""
        if self.hands_over:
            self.draining = True
            for prompt in tuple(self._prompts.values()):
                self._fail(prompt, session_pb2.FAILURE_REASON_DRAINING, "the prefill worker is stopping")
            await self._hub.delivered(CLOSE_TIMEOUT_S)
        await self._hub.close(CLOSE_TIMEOUT_S)

    def _welcome(self, resumed: bool, received: int) -> session_pb2.ConnectResponse:
        welcome = session_pb2.Welcome(resumed=resumed, received=received, worker=self._worker)
        return session_pb2.ConnectResponse(epoch=self._epoch, welcome=welcome)

    def _on_command(self, session: Session, command: session_pb2.ConnectRequest) -> None:
        match command.WhichOneof("command"):
            case "prefill":
                in_trace(command.prefill.traceparent).run(self._on_prefill, session, command.prefill)
            case "snapshot_request":
                self.cache.send_snapshot(session)
            case "cancel":
                prompt = self._by_attempt.get((session.router_id, command.cancel.attempt_id))
                if prompt is not None:
                    self._abandon(prompt)
            case "change_role":
                self.on_change_role(command.change_role.role)
            case other:
                logger.warning("a router sent %s to a prefill worker", other)

    def _on_prefill(self, session: Session, command: session_pb2.Prefill) -> None:
        if (session.router_id, command.attempt_id) in self._by_attempt:
            logger.error("a router sent attempt %d twice; the second is dropped", command.attempt_id)
            return
        prompt = Prompt(
            next(self._request_ids),
            session,
            command.attempt_id,
            command.transfer_id,
            arrived=time.monotonic(),
            with_logprobs=command.sampling.HasField("logprobs"),
            searches=command.sampling.beam_width > 0,
            answered_tokens=command.answered_tokens,
        )
        if not self._transfers.announce(prompt.transfer_id, prompt.request_id):
            # not `_fail`, which would end a transfer of that id that is someone else's
            self._send_failed(prompt, session_pb2.FAILURE_REASON_TRANSFER, "its reader gave up, or its id is in use")
            return
        self._prompts[prompt.request_id] = prompt
        self._by_attempt[session.router_id, prompt.attempt_id] = prompt
        refusal = self._refusal(command)
        if refusal is not None:
            self._fail(prompt, refusal, "the prefill worker cannot take this prompt")
            return
        prompt.deadline = asyncio.get_running_loop().call_later(
            command.time_left_ms / 1e3, self._fail, prompt, session_pb2.FAILURE_REASON_DEADLINE, "the deadline passed"
        )
        if command.sampling.HasField("structured"):
            prompt.compiling = asyncio.create_task(self._compile_then_queue(prompt, command))
            prompt.compiling.add_done_callback(partial(self._on_added, prompt))
        else:
            self._queue(prompt, command, None)

    async def _compile_then_queue(self, prompt: Prompt, command: session_pb2.Prefill) -> None:
        try:
            constraint = await constraint_of(self._grammars, command.sampling)
        except ValueError as error:
            self._fail(prompt, session_pb2.FAILURE_REASON_INVALID, str(error))
            return
        if prompt.request_id in self._prompts:
            self._queue(prompt, command, constraint)

    def _queue(self, prompt: Prompt, command: session_pb2.Prefill, constraint: Constraint | None) -> None:
        try:
            params = sampling_params(command.sampling, constraint)
            adapter = adapter_number(self._worker, command.adapter)
        except ValueError as error:
            self._fail(prompt, session_pb2.FAILURE_REASON_INVALID, str(error))
            return
        request = request_of(prompt.request_id, command, params, adapter)
        hashes = reusable_hashes(request, self._worker.model.block_size)
        may_skip = bool(hashes) and request.params.prompt_logprobs is None  # cached blocks need not be computed
        if self._fetcher is not None and command.HasField("fetch") and may_skip:
            fetch = command.fetch
            hint = FetchHint(fetch.endpoint, fetch.transfer_id, fetch.blocks)
            prompt.fetching = asyncio.create_task(self._fetch_then_add(self._fetcher, prompt, request, hint, hashes))
            prompt.fetching.add_done_callback(partial(self._on_added, prompt))
        else:
            self._add(prompt, request)

    def _add(self, prompt: Prompt, request: Request) -> None:
        added = asyncio.wrap_future(self._loop.add(request))
        added.add_done_callback(partial(self._on_added, prompt))

    async def _fetch_then_add(
        self,
        fetcher: PrefixFetcher,
        prompt: Prompt,
        request: Request,
        hint: FetchHint,
        hashes: Sequence[bytes],
    ) -> None:
        prompt.fetched = await fetcher.fetch(hint, hashes)
        if prompt.request_id in self._prompts:
            self._add(prompt, request)

    def _refusal(self, command: session_pb2.Prefill) -> "session_pb2.FailureReason | None":
        if self.draining:
            return session_pb2.FAILURE_REASON_DRAINING
        model = self._worker.model
        length = len(command.token_ids)
        fits = 0 < length < model.max_model_len and max(command.token_ids) < model.vocab_size
        can_be_read = len(command.transfer_id) == TRANSFER_ID_BYTES
        return None if fits and can_be_read and command.sampling.n >= 1 else session_pb2.FAILURE_REASON_INVALID

    def _on_added(self, prompt: Prompt, added: "asyncio.Future[None]") -> None:
        """Queued, or its fetch has ended: only an error matters here."""
        error = None if added.cancelled() else added.exception()
        if isinstance(error, RequestRefused):
            self._fail(prompt, session_pb2.FAILURE_REASON_INVALID, str(error))
        elif error is not None:
            logger.error("a prompt could not be queued", exc_info=error)
            self._fail(prompt, session_pb2.FAILURE_REASON_UNSPECIFIED, "internal error of the prefill worker")

    def on_outcomes(self, outcomes: Sequence[SchedulerOutcome], timing: StepTiming) -> None:
        """A step has ended: called on the event loop, in the order of the steps."""
        tokens = 0
        for advance in outcomes:
            prompt = self._prompts.get(advance.request_id)
            if prompt is None:
                continue  # cancelled while this step ran
            if isinstance(advance, RequestFailed):
                self._fail(prompt, *failure_of(advance.cause))
            if not isinstance(advance, PromptComputed):
                continue  # no answers are made here
            tokens += prompt.record(advance, timing)
            self._transfers.advance(prompt.transfer_id, advance.new_blocks, advance.first)
            scores = prompt.scores(advance)
            if scores is not None:
                self._send(prompt.session, session_pb2.ConnectResponse(prompt_scores=scores))
            if advance.first is not None and prompt.request_id in self._prompts:
                first_step = prompt.first_step(advance)
                # last: it may end the session, and the prompt with it
                self._send(prompt.session, session_pb2.ConnectResponse(first_step=first_step))
        self.rate.observe(tokens, timing.ended - timing.started)

    def on_transfer_ended(self, request_id: int) -> None:
        """The reader has closed, or its lease has ended: no reader needs these pages any more."""
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            self._forget(prompt)
            self._loop.abort(request_id)

    def _abandon(self, prompt: Prompt) -> None:
        self._forget(prompt)
        self._transfers.drop(prompt.transfer_id)
        self._loop.abort(prompt.request_id)

    def _fail(self, prompt: Prompt, reason: "session_pb2.FailureReason", message: str) -> None:
        if prompt.request_id not in self._prompts:
            return
        self._abandon(prompt)
        self._send_failed(prompt, reason, message)

    def _send_failed(self, prompt: Prompt, reason: "session_pb2.FailureReason", message: str) -> None:
        failed = session_pb2.Failed(attempt_id=prompt.attempt_id, reason=reason, message=message)
        self._send(prompt.session, session_pb2.ConnectResponse(failed=failed))

    def _forget(self, prompt: Prompt) -> None:
        del self._prompts[prompt.request_id]
        self._by_attempt.pop((prompt.session.router_id, prompt.attempt_id), None)
        prompt.let_go()

    def _send(self, session: Session, message: session_pb2.ConnectResponse) -> None:
        message.epoch = self._epoch
        self._hub.send(session, message)

    def _on_session_end(self, session: Session) -> None:
        for prompt in [prompt for prompt in self._prompts.values() if prompt.session is session]:
            self._abandon(prompt)

    def report(self) -> None:
        """Sends every router this worker's state."""
        load = self._loop.load
        for session in self._hub.sessions:
            report = report_pb2.Report(
                limit_blocks=load.pages.total,
                limit_slots=0,
                pages=page_counts(load),
                waiting_requests=load.waiting_sequences,
                running_sequences=load.running_sequences,
                pending_tokens=load.pending_tokens,
                draining=self.leaving or self.draining,
                steps=self._loop.steps,
                cache_query_tokens=load.cache_query_tokens,
                cache_hit_tokens=load.cache_hit_tokens,
                links=link_reports(self._fetcher.links if self._fetcher else ()),
                cache=self.cache.sum,
                **(asdict(self._fetcher.integrity) if self._fetcher else {}),
            )
            session.tell(session_pb2.ConnectResponse(epoch=self._epoch, report=report))

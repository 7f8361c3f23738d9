"""Session service of a prefill worker: serves prompts from the router's command to the confirmed copy of their KV.

A Prefill command queues a prompt, possibly after a fetch of cached KV from another worker. The prompt is computed in
chunks, complete blocks are offered to the decode worker, and the first tokens go to the router immediately. The blocks
stay pinned until the decode worker has confirmed its copy or gives up, or the lease expires.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from baton.engine.request import Request, reusable_hashes
from baton.engine.runner.step_records import StepRecord
from baton.engine.sampling.constraint import Constraint
from baton.engine.scheduler.sequences import PromptComputed, RequestFailed, SchedulerOutcome
from baton.prefill_worker.fetch import NOTHING_FETCHED, Fetched, FetchHint, PrefillRate, PrefixFetcher
from baton.process.telemetry.trace_context import in_trace
from baton.protos import session_pb2
from baton.worker.request import Link, OpenRequest, PromptProgress, RequestTable
from baton.worker.service import ServiceParts, SessionService
from baton.worker.tier.restorer import TierRestorer
from baton.worker.times import TransferTime
from baton.worker.transfer.source import TransferSource
from baton.worker.wire import Limit, constraint_of, failure_of, objectives_of, request_of, sampling_params

logger = logging.getLogger(__name__)
UNQUEUED = "prompt not queued: unexpected error"


@dataclass(eq=False)
class Prompt(OpenRequest):
    """Prompt of a Prefill command, from its arrival until its blocks are unpinned."""

    transfer_id: bytes
    progress: PromptProgress
    with_logprobs: bool
    searches: bool  # beam search: first tokens are not sent
    is_pooled: bool  # embedding: its KV is not transferred
    answered_tokens: int  # number of tokens that earlier attempts have sent
    compiling: "asyncio.Task[None] | None" = None
    fetching: "asyncio.Task[None] | None" = None
    fetched: Fetched = NOTHING_FETCHED

    def first_step(self, computed: PromptComputed) -> session_pb2.FirstStep:
        """Build the FirstStep message: first token of every choice, or the embedding, and timings."""
        first = () if self.searches else computed.first or ()
        message = self.progress.first_step(self.attempt_id, first, self.with_logprobs, self.answered_tokens)
        message.pooled.extend(computed.pooled)
        fetched, timings = self.fetched, message.timings
        timings.fetch_ms, timings.fetched_tokens = fetched.duration_ms, fetched.tokens
        timings.fetch_bytes, timings.fetch_transport = fetched.bytes, fetched.transport
        return message

    def let_go(self) -> None:
        super().let_go()
        for task in (self.compiling, self.fetching):
            if task is not None:
                task.cancel()


def _hint(fetch: session_pb2.Fetch) -> FetchHint:
    return FetchHint(fetch.endpoint, fetch.transfer_id, fetch.blocks, fetch.loaded_blocks, fetch.load_bytes_per_s)


class PrefillService(SessionService[Prompt]):
    """Service that receives routers' commands for the prefill role and sends them first tokens and reports."""

    role_name = "prefill"

    def __init__(
        self,
        worker: session_pb2.WorkerInfo,
        epoch: int,
        session_grace_s: float,
        parts: ServiceParts,
        transfers: TransferSource,
        rate: PrefillRate,
        fetcher: PrefixFetcher | None,
    ) -> None:
        """Create the service. `fetcher`: None to fetch no blocks from other workers. `rate` observes every step."""
        super().__init__(worker, epoch, session_grace_s, RequestTable(), parts)
        self._transfers = transfers
        self._rate = rate
        self._fetcher = fetcher

    def _on_role_command(self, link: Link, command: session_pb2.ConnectRequest) -> bool:
        if command.WhichOneof("command") != "prefill":
            return False
        in_trace(command.prefill.traceparent, command.prefill.request_id).run(self._on_prefill, link, command.prefill)
        return True

    def _on_prefill(self, link: Link, command: session_pb2.Prefill) -> None:
        if not self._is_new(link, command.attempt_id):
            return
        number = next(self._request_ids)
        prompt = Prompt(
            number,
            link,
            command.attempt_id,
            command.transfer_id,
            PromptProgress(arrived=time.monotonic()),
            with_logprobs=command.sampling.HasField("logprobs"),
            searches=command.sampling.beam_width > 0,
            is_pooled=command.HasField("pooling"),
            answered_tokens=command.answered_tokens,
            times=self._times(link, command, number),
        )
        if not prompt.is_pooled and not self._transfers.announce(prompt.transfer_id, prompt.request_id):
            # `_fail` is not called, because it would end the transfer of another request that has the same transfer id
            reason = session_pb2.FAILURE_REASON_TRANSFER
            prompt.times.failure = "the reader has given up, or the transfer id is in use"
            self.log.end(prompt.times)
            self._send_failed(link, prompt.attempt_id, reason, prompt.times.failure)
            return
        self._requests.add(prompt)
        if not self._accepts(prompt, command):
            return
        if command.sampling.HasField("structured"):
            prompt.compiling = asyncio.create_task(self._compile_then_queue(prompt, command))
            prompt.compiling.add_done_callback(partial(self._on_task_ended, prompt, UNQUEUED))
        else:
            self._queue(prompt, command, None)

    async def _compile_then_queue(self, prompt: Prompt, command: session_pb2.Prefill) -> None:
        try:
            constraint = await constraint_of(self._grammars, command.sampling)
        except ValueError as error:
            self._fail(prompt, session_pb2.FAILURE_REASON_INVALID, str(error))
            return
        if prompt in self._requests:
            self._queue(prompt, command, constraint)

    def _queue(self, prompt: Prompt, command: session_pb2.Prefill, constraint: Constraint | None) -> None:
        try:
            params = sampling_params(command.sampling, constraint)
            prompt.times.objectives = objectives = objectives_of(command, prompt.times.arrived_s)
            request = request_of(prompt.request_id, command, params, prompt.adapter, objectives)
        except ValueError as error:
            self._fail(prompt, session_pb2.FAILURE_REASON_INVALID, str(error))
            return
        hashes = reusable_hashes(request, self._worker.model.block_size)
        fetcher = self._fetcher if command.HasField("fetch") and hashes else None
        restorer = self._kv.restorer_of(hashes)
        doubted = self._kv.to_check(hashes)
        if fetcher is None and restorer is None and not doubted:
            self._add(prompt, request)
            return
        fetch = command.fetch
        hint = None if fetcher is None else _hint(fetch)
        prompt.fetching = asyncio.create_task(self._bring_then_add(prompt, request, hint, hashes, restorer, doubted))
        prompt.fetching.add_done_callback(partial(self._on_task_ended, prompt, UNQUEUED))

    def _add(self, prompt: Prompt, request: Request) -> None:
        added = asyncio.wrap_future(self._loop.add(request))
        added.add_done_callback(partial(self._on_task_ended, prompt, UNQUEUED))

    async def _bring_then_add(
        self,
        prompt: Prompt,
        request: Request,
        hint: FetchHint | None,
        hashes: Sequence[bytes],
        restorer: TierRestorer | None,
        doubted: Sequence[bytes],
    ) -> None:
        """Check cached blocks, fetch blocks from another worker, load blocks from the KV tier, then queue the prompt.

        `doubted`: hashes of the cached blocks to check.
        """
        await self._kv.check(doubted)
        if hint is not None and self._fetcher is not None:
            began_s = time.monotonic()
            prompt.fetched = fetched = await self._fetcher.fetch(hint, hashes)
            if fetched.tokens:
                ended_s = time.monotonic()
                prompt.times.transfer = TransferTime(began_s, ended_s, hint.endpoint, fetched.bytes, fetched.transport)
        if restorer is not None:
            prompt.progress.restored = await self._kv.restore(prompt.times, restorer, hashes)
        if prompt in self._requests:
            self._add(prompt, request)

    def on_outcomes(self, outcomes: Sequence[SchedulerOutcome], step: StepRecord) -> None:
        tokens = 0
        for outcome in outcomes:
            prompt = self._requests.get(outcome.request_id)
            if prompt is None:
                continue  # cancelled while this step ran
            try:
                tokens += self._on_outcome(prompt, outcome, step)
            except Exception:  # only this prompt fails
                logger.exception("step outcome not sent; the request fails: request %s", prompt.times.request_id)
                self._fail_unforeseen(prompt)
        self._rate.observe(tokens, step.ended - step.started)

    def _on_outcome(self, prompt: Prompt, outcome: SchedulerOutcome, step: StepRecord) -> int:
        """Send the outcome to the router; return the number of prompt tokens computed."""
        if isinstance(outcome, RequestFailed):
            self._fail(prompt, *failure_of(outcome.cause))
        if not isinstance(outcome, PromptComputed):
            return 0  # prefill workers generate no answers
        computed_tokens = prompt.progress.record(outcome, step)
        prompt.times.add_chunk(step.started, step.ended, computed_tokens)
        if not prompt.is_pooled:
            self._transfers.advance(prompt.transfer_id, outcome.new_blocks, outcome.first)
        scores = prompt.progress.scores(prompt.attempt_id, outcome)
        if scores is not None:
            self._send(prompt.link, scores)
        if outcome.ended and prompt in self._requests:
            self._computed(prompt, outcome, step)
        return computed_tokens

    def _computed(self, prompt: Prompt, outcome: PromptComputed, step: StepRecord) -> None:
        """Send the first tokens of a computed prompt. An embedding is then complete and its request keeps no blocks."""
        first_step = prompt.first_step(outcome)
        prompt.times.first_step_s = step.ended
        prompt.times.cached_tokens = outcome.cached_tokens
        if prompt.is_pooled:
            self._forget(prompt)
        # sent last, because sending may close the link and thereby the prompt
        self._send(prompt.link, session_pb2.ConnectResponse(first_step=first_step))

    def on_transfer_ended(self, request_id: int) -> None:
        """Release a prompt's blocks after the decode worker has closed the transfer or the lease has expired."""
        prompt = self._requests.get(request_id)
        if prompt is not None:
            self._forget(prompt)
            self._loop.abort(request_id)

    def _abandon(self, prompt: Prompt) -> None:
        self._forget(prompt)
        if not prompt.is_pooled:
            self._transfers.drop(prompt.transfer_id)
        self._loop.abort(prompt.request_id)

    def report(self) -> None:
        reader = None if self._fetcher is None else self._fetcher.reader
        limit = Limit(self._loop.load.pages.total, slots=0)
        for link in self._hub.links:
            self._report_to(link, reader, limit)

"""Session service of a decode worker, which generates answers for routers.

A Start command waits for blocks; then its KV is pulled while the prefill worker still computes. After the copy is
confirmed, the sequences join the running batch, and every step sends each router one message with the tokens of all
its sequences. If Start names no prefill worker, the prompt is computed here in chunks, and the first tokens (or the
embedding, which completes the request) are sent as a prefill worker would send them. Another router may adopt an open
request, or a finished one within a grace period.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from baton.decode_worker.admission import Admission, PartialPrefixes
from baton.decode_worker.answer import Answer, ReceivedKv, answer_to, extends_last
from baton.decode_worker.columns import ColumnChoices, LinkOutputs
from baton.decode_worker.credits import Charge, WorkerCredits
from baton.decode_worker.drafted import StepDrafts
from baton.decode_worker.gaps import Moment, RequestNames, StepGaps
from baton.decode_worker.request_table import Adoptions, AnswerTable
from baton.decode_worker.retained import RetainedBounds
from baton.engine.request import Request, RequestRefused, reusable_hashes
from baton.engine.runner.step_records import ChoiceKey, StepRecord
from baton.engine.scheduler.sequences import PromptComputed, RequestFailed, SchedulerOutcome, TokenMade
from baton.process.telemetry.trace_context import in_trace
from baton.protos import session_pb2
from baton.worker.request import Link, PromptProgress
from baton.worker.service import CLOSE_TIMEOUT_S, ServiceParts, SessionService
from baton.worker.tier.restorer import NOTHING_RESTORED, Restored
from baton.worker.times import TransferTime
from baton.worker.transfer.reader import BlocksCorrupt, SourceLost, TransferFailed, TransferReader
from baton.worker.wire import (
    constraint_of,
    failure_of,
    gap_causes,
    groups_of,
    objectives_of,
    request_of,
    sampling_params,
)

logger = logging.getLogger(__name__)


class StepMessages:
    """Messages of one step: outputs by router, and the answers that the outputs belong to."""

    def __init__(self, step: StepRecord) -> None:
        self.outputs: defaultdict[Link, LinkOutputs] = defaultdict(LinkOutputs)
        self.moment = Moment(step.number, step.ended)
        self.drafts = StepDrafts(step) if step.drafts else None
        self.touched: dict[int, Answer] = {}
        """Answers with tokens of this step that are not in columns, by request id."""
        self.choice_ended = False
        """True once a choice finished and released its blocks, even if others continue."""
        self._last = (0, 0)  # request id and choice of the output that was added last

    def note(self, answer: Answer, outcome: SchedulerOutcome) -> None:
        if isinstance(outcome, TokenMade):
            self.touched[answer.request_id] = answer
            self.choice_ended |= outcome.end is not None
        elif isinstance(outcome, PromptComputed) and outcome.ended:
            self.touched[answer.request_id] = answer

    def add(self, answer: Answer, output: session_pb2.SequenceOutput, gap: session_pb2.Gap | None) -> None:
        batch = self.outputs[answer.link].batch
        key = answer.request_id, output.choice
        if key != self._last or not extends_last(batch, output):
            batch.outputs.append(output)
        self._last = key
        if gap is not None:
            gap.output = len(batch.outputs) - 1
            batch.gaps.append(gap)
        if self.drafts is not None:
            self.drafts.take(answer.request_id, output.choice, batch, answer.times)


class DecodeService(SessionService[Answer]):
    """Service that receives routers' commands for the decode role and sends them tokens and reports."""

    role_name = "decode"

    def __init__(
        self,
        worker: session_pb2.WorkerInfo,
        epoch: int,
        session_grace_s: float,
        parts: ServiceParts,
        reader: TransferReader,
        retained: RetainedBounds,
        tbt_s: float = math.inf,
    ) -> None:
        """Create the service. `retained`: bounds on finished answers, each of which is kept for `session_grace_s`.
        `tbt_s`: TBT objective of commands without one.
        """
        self._table = AnswerTable(session_grace_s, retained)
        super().__init__(worker, epoch, session_grace_s, self._table, parts)
        self._reader = reader
        self._tbt_s = tbt_s
        self._admission = Admission(parts.loop)
        self._credits: WorkerCredits[Link] = WorkerCredits(worker.total_blocks, worker.total_slots)
        self._adoptions = Adoptions(self._table, self._send, self._send_failed)
        self._partial_prefixes = PartialPrefixes()
        self._names = RequestNames()
        self._gaps = StepGaps(parts.loop.history, self._names)
        self._in_columns = ColumnChoices(self._gaps, self._protocol)
        self._tasks: set[asyncio.Task[None]] = set()  # tasks of open requests, and cancelled tasks that wait for a copy

    async def close(self) -> None:
        """Close links with their requests, and wait for running copies for a bounded time."""
        await super().close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)

    def _on_role_command(self, link: Link, command: session_pb2.ConnectRequest) -> bool:
        match command.WhichOneof("command"):
            case "start":
                in_trace(command.start.traceparent, command.start.request_id).run(self._on_start, link, command.start)
            case "adopt":
                answer = self._adoptions.adopt(link, command.adopt)
                if answer is not None and command.adopt.time_left_ms:
                    self._set_deadline(answer, command.adopt.time_left_ms)
            case "want":
                self._credits.loans.ask(link, Charge(command.want.blocks, command.want.slots))
            case _:
                return False
        return True

    def _on_cancel(self, answer: Answer, command: session_pb2.Cancel) -> None:
        answer.keeps_landed = command.keep_landed
        self._abandon(answer)

    def _on_start(self, link: Link, command: session_pb2.Start) -> None:
        if not self._is_new(link, command.attempt_id):
            return
        model = self._worker.model
        answer = answer_to(command, next(self._request_ids), link, model.block_size, groups_of(model))
        answer.times = self._times(link, command, answer.request_id)
        self._table.add(answer)
        self._names.add(answer.request_id, command.request_id)
        if self._accepts(answer, command):
            answer.task = asyncio.create_task(self._run(answer, command), name=f"answer {answer.request_id}")
            self._tasks.add(answer.task)
            answer.task.add_done_callback(self._tasks.discard)
            answer.task.add_done_callback(partial(self._on_run_ended, answer))

    async def _run(self, answer: Answer, command: session_pb2.Start) -> None:
        """Admit a request to the running batch, or fail it with a reason."""
        try:
            params = sampling_params(command.sampling, await constraint_of(self._grammars, command.sampling))
            answer.times.objectives = objectives = objectives_of(command, answer.times.arrived_s, self._tbt_s)
            request = request_of(answer.request_id, command, params, answer.adapter, objectives)
        except ValueError as error:
            self._fail(answer, session_pb2.FAILURE_REASON_INVALID, str(error))
            return
        try:
            await self._partial_prefixes.settled(command.block_hashes)
            await self._kv.check_drawn(reusable_hashes(request, self._worker.model.block_size))
            if command.prefill_endpoint:
                await self._land(answer, command, request)
            else:
                answer.prefill = progress = PromptProgress(arrived=time.monotonic())
                progress.restored = await self._bring(answer, request)
                await self._admission.add(request, command.cache_root or None)
        except BlocksCorrupt as error:
            self._fail(answer, session_pb2.FAILURE_REASON_CORRUPT, str(error))
        except TransferFailed as error:
            answer.keeps_landed = isinstance(error, SourceLost)
            self._fail(answer, session_pb2.FAILURE_REASON_TRANSFER, str(error))
        except RequestRefused as error:
            self._fail(answer, session_pb2.FAILURE_REASON_INVALID, str(error))

    async def _bring(self, answer: Answer, request: Request) -> Restored:
        """Load blocks from the KV tier for a prompt that is computed here."""
        hashes = reusable_hashes(request, self._worker.model.block_size)
        restorer = self._kv.restorer_of(hashes)
        return NOTHING_RESTORED if restorer is None else await self._kv.restore(answer.times, restorer, hashes)

    def _on_run_ended(self, answer: Answer, task: "asyncio.Task[None]") -> None:
        """Fail the request if its task ended by an unexpected cancellation, or by an exception, which is logged."""
        self._on_task_ended(answer, "answer failed: unexpected error", task)
        if task.cancelled():
            self._fail_unforeseen(answer)

    async def _land(self, answer: Answer, command: session_pb2.Start, request: Request) -> None:
        reservation = await self._admission.reserve(request, command.cache_root or None)
        began_s = time.monotonic()
        pull = await self._reader.pull(
            command.prefill_endpoint, command.transfer_id, reservation, confirmed=answer.confirmed
        )
        if sorted(first.choice for first in pull.first_tokens) != list(request.first_choices):
            raise TransferFailed(f"{command.prefill_endpoint} did not send exactly one first token per choice")
        if any(first.token_id >= self._worker.model.vocab_size for first in pull.first_tokens):
            raise TransferFailed(f"{command.prefill_endpoint} sent a first token outside of the vocabulary")
        cached_tokens = reservation.cached_tokens
        validated_s = time.monotonic()
        answer.times.cached_tokens = cached_tokens
        answer.times.transfer = TransferTime(began_s, validated_s, command.prefill_endpoint, pull.bytes, pull.transport)
        answer.land(ReceivedKv(pull, cached_tokens, validated=validated_s), request.params)
        if answer.adopted:  # the adopting router gets the first tokens here, not with later outputs
            answer.first_tokens.clear()
            self._adoptions.send_again(answer.link, answer.attempt_id, answer.retained)
        if not answer.running_choices:
            self._end(answer)  # the first tokens complete the answer, and the router has them from the prefill worker
            self._free(answer)
            return
        activated = self._loop.activate(answer.request_id, pull.first_tokens, validated_s)
        outcomes = await asyncio.wrap_future(activated)
        if outcomes:  # outcomes of a beam search that finished with its first tokens
            now = time.monotonic()
            self.on_outcomes(outcomes, StepRecord(now, now))

    def on_outcomes(self, outcomes: Sequence[SchedulerOutcome], step: StepRecord) -> None:
        """Send the outcomes of a step to routers. A `step` without a number stands for outcomes outside of any step."""
        self._gaps.begin(step)
        messages = StepMessages(step)
        if messages.drafts is None:
            outcomes = self._in_columns.take(outcomes, step, messages.moment, messages.outputs)
        for outcome in outcomes:
            answer = self._table.get(outcome.request_id)
            if answer is not None:  # None: cancelled while this step ran
                messages.note(answer, outcome)
                self._attempt(answer, messages, self._translate, answer, outcome, step, messages)
        if messages.drafts is not None:
            messages.drafts.write()
        for answer in [each for each in messages.touched.values() if each.begins]:
            self._attempt(answer, messages, self._send_beginnings, answer, step)  # before later tokens
        self._send_outputs(messages, step)
        for answer in messages.touched.values():
            if not answer.running_choices:
                self._end(answer)
        if messages.choice_ended:
            self._admission.room_may_have_grown()

    def _attempt(self, answer: Answer, messages: StepMessages, work: Callable[..., None], *arguments: object) -> None:
        """Call `work`, and fail one answer if it raises; the other answers of the step continue."""
        try:
            work(*arguments)
        except Exception:  # only this answer fails
            logger.exception("step outcome not sent; the request fails: request %s", answer.times.request_id)
            messages.touched.pop(answer.request_id, None)
            self._fail_unforeseen(answer)

    def _translate(self, answer: Answer, outcome: SchedulerOutcome, step: StepRecord, messages: StepMessages) -> None:
        if not isinstance(outcome, TokenMade):
            self._translate_other(answer, outcome, step)
            return
        answer.times.add_tokens(1, step.ended)
        retained, gap = answer.retained.choices.get(outcome.choice), None
        last = None if retained is None else retained.moment
        if last is not None and self._gaps.is_late(last, step):
            gap = self._gap(ChoiceKey(answer.request_id, outcome.choice), last)
        output = answer.take(outcome, may_wait=gap is None and messages.drafts is None)
        answer.retained.choices[outcome.choice].moment = messages.moment
        if output is None:
            return
        if answer.is_plain:
            self._in_columns.add(answer, outcome.choice)
        if gap is not None:
            gap.usual_ms *= len(output.token_ids)  # the gap began with the first token of the output
        messages.add(answer, output, gap)

    def _translate_other(self, answer: Answer, outcome: PromptComputed | RequestFailed, step: StepRecord) -> None:
        if isinstance(outcome, RequestFailed):
            self._fail(answer, *failure_of(outcome.cause))
            return
        scores = answer.take_chunk(outcome, step)
        answer.times.cached_tokens = outcome.cached_tokens
        if scores is not None:
            self._send(answer.link, scores)

    def _send_beginnings(self, answer: Answer, step: StepRecord) -> None:
        for beginning in answer.take_beginnings(step):
            self._send(answer.link, beginning)

    def _send_outputs(self, messages: StepMessages, step: StepRecord) -> None:
        """Send each router one message with the tokens of all its answers."""
        if not messages.outputs:
            return
        held_us = round(sum(self._loop.held) * 1e6)
        held = gap_causes(self._gaps.held(self._loop.held))
        since = gap_causes(self._gaps.since(self._loop.since_hand_over))
        for link, outputs in messages.outputs.items():
            batch = outputs.batch
            batch.made_us, batch.held_us = round(step.ended * 1e6), held_us
            batch.held.extend(held)
            batch.since.extend(since)
            self._send(link, outputs.message())

    def _gap(self, key: ChoiceKey, last: Moment) -> session_pb2.Gap:
        """Return why the newest token of a choice was late."""
        gap = self._gaps.explain(key, last)
        return session_pb2.Gap(usual_ms=gap.usual_ms, causes=gap_causes(gap.causes))

    def _fail(self, answer: Answer, reason: "session_pb2.FailureReason", message: str) -> None:
        if answer in self._table:
            for output in answer.take_held():
                outputs = session_pb2.StepOutputs(outputs=[output])
                self._send(answer.link, session_pb2.ConnectResponse(step_outputs=outputs))
        super()._fail(answer, reason, message)

    def _abandon(self, answer: Answer) -> None:
        """Close a request in any phase. Its blocks are released when no copy writes to them."""
        self._forget(answer)
        if answer.task is not None and answer.task is not asyncio.current_task():
            answer.task.cancel()  # the task ends only when its current copy of KV has finished
            answer.task.add_done_callback(lambda _: self._free(answer))
            if answer.keeps_landed:
                self._partial_prefixes.add(answer.last_block, answer.task)
        else:
            self._free(answer)

    def _free(self, answer: Answer) -> None:
        self._loop.abort(answer.request_id, answer.confirmed_blocks)
        self._admission.room_may_have_grown()  # a waiting request asks the engine again, after the abort above

    def _end(self, answer: Answer) -> None:
        """Remove a complete answer from the open ones, and retain its tokens in case another router adopts it."""
        self._forget(answer)
        if not answer.is_pooled:
            self._table.keep(answer, time.monotonic())

    def _forget(self, answer: Answer) -> None:
        self._in_columns.forget(answer)
        super()._forget(answer)

    def _on_link_end(self, link: Link) -> None:
        self._credits.loans.forget(link)
        super()._on_link_end(link)

    def report(self) -> None:
        """Send each router a report with the limits of blocks and slots that it may use."""
        now = time.monotonic()
        self._table.ended.expire(now)
        open_here = ((answer.link, answer.charge) for answer in self._table)
        present = [link for link in self._hub.links if link.outbox is not None]
        for link, limit in self._credits.deal(open_here, present, now).items():
            self._report_to(link, self._reader, limit, self._admission.waiting)

"""Recorder of a simulated world's events for the trace check. It wraps methods of production code."""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from baton.decode_worker.answer import Answer
from baton.decode_worker.columns import ColumnChoices
from baton.decode_worker.request_table import Adoptions, AnswerTable
from baton.decode_worker.service import DecodeService
from baton.engine.scheduler.batch import RunningBatch
from baton.engine.scheduler.scheduler import Scheduler
from baton.kvtransfer.source import OpenVerdict, SourceTable
from baton.lab.protocol.specification import ProcessKind
from baton.lab.protocol.trace_check import Dispatched, TraceCheck
from baton.lab.simulation.host import SimulatedPullThread
from baton.lab.simulation.network.calls import current_process, host_of
from baton.lab.simulation.processes import SimulatedMachine
from baton.router.fleet.fleet import WorkerLinks
from baton.router.request.events import Begun
from baton.router.request.run import Lease, RequestRunner
from baton.router.request.state import RequestState
from baton.worker.request import AttemptKey, RequestTable
from baton.worker.transfer.reader import TransferReader

KINDS = {"router": ProcessKind.ROUTER, "prefill": ProcessKind.PREFILL, "decode": ProcessKind.DECODE}

Wrapper = Callable[..., Any]


@contextmanager
def recording(check: TraceCheck) -> Iterator[None]:
    """Report the events of all simulated processes to `check` inside the block."""
    recorder = SimulationRecorder(check)
    with ExitStack() as undo:
        for owner, name, wrapper in recorder.wrappers():
            undo.enter_context(patch.object(owner, name, _wrapped(getattr(owner, name), wrapper, check)))
        yield


def _wrapped(real: Callable[..., Any], wrapper: Wrapper, check: TraceCheck) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        if check.refusal is not None:
            return real(*arguments, **more)
        return wrapper(real, *arguments, **more)

    return call


def worker_request(number: int) -> Hashable:
    """Return the identity of a request at the current worker process."""
    return current_process(), number


class SimulationRecorder:
    """Wrappers by which the events of the code reach the trace check."""

    def __init__(self, check: TraceCheck) -> None:
        self._check = check
        self._stream: RequestState | None = None  # stream of the attempt that is being sent
        self._adopts = False

    def wrappers(self) -> list[tuple[type, str, Wrapper]]:
        return [
            (RequestState, "advance", self._advance),
            (RequestState, "new_tokens", self._new_tokens),
            (RequestRunner, "_dispatch", self._sending),
            (RequestRunner, "_adopt", self._sending),
            (WorkerLinks, "dispatch", self._dispatch),
            (WorkerLinks, "adopt", self._ask),
            (Lease, "release", self._let_go),
            (SourceTable, "announce", self._announce),
            (SourceTable, "advance", self._offer),
            (SourceTable, "finish", self._complete),
            (SourceTable, "open", self._open),
            (SourceTable, "reader_lost", self._reader_lost),
            (SourceTable, "close", self._close),
            (SourceTable, "confirm", self._confirm),
            (SourceTable, "drop", self._drop),
            (SourceTable, "expired", self._expired),
            (SimulatedPullThread, "_copy", self._copy),
            (TransferReader, "_confirm", self._ask_to_close),
            (RequestTable, "add", self._add),
            (Scheduler, "reserve", self._reserve),
            (Scheduler, "activate", self._activate),
            (Scheduler, "abort", self._abort),
            (RunningBatch, "end", self._end),
            (Answer, "take", self._take),
            (ColumnChoices, "take", self._take_columns),
            (AnswerTable, "keep", self._retain),
            (Adoptions, "adopt", self._adopt),
            (DecodeService, "_abandon", self._abandon),
            (SimulatedMachine, "kill", self._kill),
            (SimulatedMachine, "_ended", self._exit),
        ]

    # Router

    def _advance(self, real: Wrapper, state: RequestState, event: Any, now: float) -> Any:
        if isinstance(event, Begun):
            carried = [state.stream.released(choice) for choice in range(state.request.sampling.n)]
            self._check.connected(state, state.request.request_id, current_process().name, carried)
        return real(state, event, now)

    def _new_tokens(self, real: Wrapper, state: RequestState) -> Any:
        released = real(state)
        for each in released:
            self._check.released(state, each.choice, each.offset, len(each.token_ids))
        return released

    def _sending(self, real: Wrapper, runner: RequestRunner, *arguments: Any) -> Any:
        self._stream = runner._state
        return real(runner, *arguments)

    def _dispatch(self, real: Wrapper, links: WorkerLinks, tag: Any, request: Any, placement: Any) -> Any:
        prefill = None if placement.prefill is None else host_of(placement.prefill)
        sent = Dispatched(
            AttemptKey(links._router_id, tag.attempt_id),
            tag.transfer_id,
            request.choices,
            prefill,
            host_of(placement.decode),
            request.answered_tokens,
        )
        self._check.dispatched(self._stream, sent)
        return real(links, tag, request, placement)

    def _ask(self, real: Wrapper, links: WorkerLinks, tag: Any, router_id: bytes, attempt_id: int, at: str) -> Any:
        key = AttemptKey(links._router_id, tag.attempt_id)
        self._check.asked_to_adopt(self._stream, key, AttemptKey(router_id, attempt_id))
        return real(links, tag, router_id, attempt_id, at)

    def _let_go(self, real: Wrapper, lease: Lease, *arguments: Any, **more: Any) -> Any:
        if not lease._released and lease._placement is not None:
            self._check.closed_by_router(AttemptKey(lease._scheduling.fleet._router_id, lease._attempt_id))
        return real(lease, *arguments, **more)

    # Source of a transfer

    def _announce(self, real: Wrapper, table: Any, transfer_id: bytes, owner: Any, now: float) -> Any:
        announced = real(table, transfer_id, owner, now)
        if announced:
            self._check.announced(transfer_id)
        return announced

    def _offer(self, real: Wrapper, table: Any, transfer_id: bytes, blocks: Any, now: float, *more: Any) -> Any:
        real(table, transfer_id, blocks, now, *more)
        self._check.offered(transfer_id, list(blocks))

    def _complete(self, real: Wrapper, table: Any, transfer_id: bytes, *more: Any) -> Any:
        real(table, transfer_id, *more)
        self._check.completed(transfer_id)

    def _open(self, real: Wrapper, table: Any, transfer_id: bytes, now: float) -> Any:
        verdict = real(table, transfer_id, now)
        if verdict is not OpenVerdict.REFUSED:
            self._check.opened(transfer_id)
        return verdict

    def _reader_lost(self, real: Wrapper, table: Any, transfer_id: bytes, now: float) -> Any:
        real(table, transfer_id, now)
        self._check.reader_lost(transfer_id)

    def _close(self, real: Wrapper, table: Any, transfer_id: bytes, complete: bool, now: float) -> Any:
        verdict = real(table, transfer_id, complete, now)
        self._check.closed(transfer_id, complete, verdict.valid)
        return verdict

    def _confirm(self, real: Wrapper, table: Any, transfer_id: bytes) -> Any:
        verdict = real(table, transfer_id)
        self._check.confirmed(transfer_id, verdict.valid)
        return verdict

    def _drop(self, real: Wrapper, table: Any, transfer_id: bytes, now: float) -> Any:
        real(table, transfer_id, now)
        self._check.dropped(transfer_id)

    def _expired(self, real: Wrapper, table: Any, now: float) -> Any:
        before = tuple(table._transfers)
        owners = real(table, now)
        self._check.expired(each for each in before if each not in table._transfers)
        return owners

    # Decode worker

    async def _copy(self, real: Wrapper, thread: Any, transport: Any, transfer_id: bytes, pairs: Any) -> Any:
        self._check.copy_began(transfer_id, [(pair.logical, pair.source) for pair in pairs])
        is_done = False
        try:
            rate = await real(thread, transport, transfer_id, pairs)
            is_done = True
            return rate
        finally:
            self._check.copy_ended(transfer_id, pairs[-1].logical + 1, is_done)

    async def _ask_to_close(self, real: Wrapper, reader: TransferReader, peer: Any, transfer_id: bytes) -> Any:
        self._check.asked_to_close(transfer_id)
        return await real(reader, peer, transfer_id)

    def _add(self, real: Wrapper, table: Any, request: Any) -> Any:
        real(table, request)
        if not self._adopts:
            self._check.arrived(worker_request(request.request_id), request.key, isinstance(request, Answer))

    def _reserve(self, real: Wrapper, scheduler: Scheduler, request: Any, *more: Any) -> Any:
        reservation = real(scheduler, request, *more)
        if reservation is not None:
            self._check.reserved(worker_request(request.request_id), reservation.cached_blocks)
        return reservation

    def _activate(self, real: Wrapper, scheduler: Scheduler, request_id: int, *more: Any) -> Any:
        outcomes = real(scheduler, request_id, *more)
        self._check.activated(worker_request(request_id))
        return outcomes

    def _abort(self, real: Wrapper, scheduler: Scheduler, request_id: int, landed_blocks: int = 0) -> Any:
        if landed_blocks and request_id in scheduler.batch.reserved:
            self._check.kept(worker_request(request_id), landed_blocks)
        return real(scheduler, request_id, landed_blocks)

    def _end(self, real: Wrapper, batch: RunningBatch, sequence: Any) -> Any:
        request = sequence.request
        is_last = len(batch.requests[request.request_id]) == 1
        is_pinned = request.request_id in batch.pinned
        real(batch, sequence)
        if is_last:
            self._check.blocks_released(worker_request(request.request_id), is_pinned, request.prefill_only)

    def _take(self, real: Wrapper, answer: Answer, made: Any, may_wait: bool = False) -> Any:
        output = real(answer, made, may_wait)
        if output is not None:
            end = output.offset + len(output.token_ids)
        else:
            end = answer.answered_tokens + len(answer.retained.choices[made.choice].token_ids)
        self._check.made(answer.key, made.choice, end)
        return output

    def _take_columns(self, real: Wrapper, columns: ColumnChoices, outcomes: Any, *step: Any) -> Any:
        others = real(columns, outcomes, *step)
        left = set(map(id, others))
        for made in outcomes:
            if id(made) not in left:
                self._check.made(columns._choices[made[:2]].answer.key, made.choice, made.offset + 1)
        return others

    def _retain(self, real: Wrapper, table: AnswerTable, answer: Answer, now: float) -> Any:
        real(table, answer, now)
        self._check.retained(answer.key)

    def _adopt(self, real: Wrapper, adoptions: Adoptions, link: Any, command: Any) -> Any:
        table = adoptions._table
        old, new = AttemptKey(command.router_id, command.attempt_id), AttemptKey(link.router_id, command.as_attempt_id)
        table.ended.expire(time.monotonic())
        is_known = any(table.of_attempt(each) is not None for each in (old, new)) or old in table.ended._ended
        self._check.adopted(new, old, is_known)
        self._adopts = True
        try:
            return real(adoptions, link, command)
        finally:
            self._adopts = False

    def _abandon(self, real: Wrapper, service: DecodeService, answer: Answer) -> Any:
        self._check.aborted(answer.key)
        return real(service, answer)

    # Processes

    def _kill(self, real: Wrapper, machine: SimulatedMachine, peers_notice: bool) -> Any:
        if machine.life is not None:
            self._died(machine)
        return real(machine, peers_notice)

    def _exit(self, real: Wrapper, machine: SimulatedMachine, task: Any) -> Any:
        if machine.life is not None and machine.life.task is task:
            self._died(machine)
        return real(machine, task)

    def _died(self, machine: SimulatedMachine) -> None:
        self._check.died(machine.name, KINDS[machine.name.partition("-")[0]])
